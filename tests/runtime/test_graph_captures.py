"""What a capture of graphed callables leaves, reads and refuses, on a stand-in for graphs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import cpu_graphs
import pytest
import torch
from said import holds, said

import fuser
from fuser import recipe as recipes
from fuser.precision import delayed_scaling
from fuser.runtime import graphs
from fuser.runtime.captured import CapturedStates
from fuser.runtime.graphs import _leaving_no_trace

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated", "error:Graphed module")

SHAPE = (6, 8)
DELAYED = recipes.DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_graphs.use_stand_in(monkeypatch)


def sample(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(SHAPE, requires_grad=requires_grad)


class Everything(torch.nn.Module):
    """A module with all that a run changes; ``fails`` is asked in its forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        linear = fuser.Linear(8, 8, bias=False, accumulate_into_main_grad=True)
        self.ops = fuser.Sequential(fuser.LayerNorm(8), linear, fuser.Dropout(0.5))
        self.layer = fuser.modules.Linear(8, 8, params_dtype=torch.float32)
        self.norm = torch.nn.BatchNorm1d(8)
        weight: Any = linear.basic_ops[0].weight
        weight.main_grad = torch.ones(8, 8)
        weight.grad_added_to_main_grad = False
        self.fails: Callable[[str], bool] = lambda side: False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Checking.apply(self.norm(self.layer(self.ops(x))), self)
        if self.fails("forward"):
            raise KeyboardInterrupt("in the forward")
        return y


class Checking(torch.autograd.Function):
    """The identity, whose backward fails if the module says so, or a gradient has no values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Everything) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.module.fails("backward"):
            raise KeyboardInterrupt("in the backward")
        return grad, None


def step(model: torch.nn.Module, scale: float = 1.0) -> None:
    with fuser.autocast(recipe=DELAYED):
        y = model((scale * torch.randn(SHAPE)).requires_grad_())
    (scale * y).square().sum().backward()
    model.zero_grad()


def contents(model: Everything) -> dict[str, Any]:
    """Everything that a capture could change, without memory in common with the model."""
    weight = model.ops[1].basic_ops[0].weight
    states: dict[Any, Any] = {
        (path, mode): (state.scale.clone(), state.amax_history.clone())
        for path, op in fuser.op.modules_and_ops(model)
        for mode, state in getattr(op, "_delayed", {}).items()
    }
    return {
        "random": torch.get_rng_state(),
        "modes": (torch.is_grad_enabled(), torch.is_autocast_cache_enabled()),
        "steps": (delayed_scaling.holds_steps(), fuser.precision.contexts.current_recipe()),
        "weight": copy.deepcopy(vars(weight)),
        "values": [value.clone() for value in model.state_dict().values()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        **states,
    }


def twin(model: Everything) -> Everything:
    """A copy, also of the attributes of parameters, which deepcopy leaves out."""
    other = copy.deepcopy(model)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        vars(ours).update(copy.deepcopy(vars(theirs)))
    return other


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def never(model: Everything) -> Callable[[str], bool]:
    return lambda side: False


def in_the_first_run(model: Everything) -> Callable[[str], bool]:
    return lambda side: side == "backward"


def in_a_capture(side: str) -> Callable[[Everything], Callable[[str], bool]]:
    return lambda model: lambda at: at == side and cpu_graphs.StandIn.captured > 0


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    "fails",
    [never, in_the_first_run, in_a_capture("forward"), in_a_capture("backward")],
    ids=["whole", "first run", "forward", "backward"],
)
def test_a_capture_leaves_no_trace(
    fails: Callable[[Everything], Callable[[str], bool]], before: int
) -> None:
    model = Everything()
    for _ in range(before):
        step(model)
    other = twin(model)
    given = sample()
    model.fails = fails(model)
    expected = contents(model)
    with contextlib.nullcontext() if fails is never else pytest.raises(KeyboardInterrupt):
        fuser.make_graphed_callables(model, (given,), recipe=DELAYED)
    assert_same(contents(model), expected)
    model.fails = never(model)
    for scale in (8.0, 1.0):
        for each in (model, other):
            torch.manual_seed(3)
            step(each, scale)
        assert_same(contents(model), contents(other))


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("fails", [never, in_a_capture("forward")], ids=["whole", "forward"])
def test_autocasts_cache_is_on_after_a_capture_if_it_was_before(
    fails: Callable[[Everything], Callable[[str], bool]], is_cached: bool
) -> None:
    model = Everything()
    model.fails = fails(model)
    raised = contextlib.nullcontext() if fails is never else pytest.raises(KeyboardInterrupt)
    with torch.autocast("cpu", enabled=False, cache_enabled=is_cached):
        with raised:
            fuser.make_graphed_callables(model, (sample(),))
        assert torch.is_autocast_cache_enabled() is is_cached


class Reading(torch.nn.Module):
    """Keeps the gradients that its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.grads: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        y.register_hook(lambda grad: self.grads.append(grad.clone()))
        return y * 2


@pytest.mark.parametrize("count", [0, 1, 3])
def test_no_run_of_a_capture_reads_memory_without_values(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
    model = Reading()
    fuser.make_graphed_callables(model, (sample(),), num_warmup_iters=count)
    ran = model.grads[:-1]  # the last one is in the graph
    assert len(ran) == max(count, 1) + 1
    assert all(torch.equal(grad, torch.zeros(SHAPE)) for grad in ran)


def test_states_are_restored_with_their_numbers_and_memory() -> None:
    model = fuser.Sequential(fuser.Linear(8, 8))
    step(model)
    op = model[0].basic_ops[0]
    before = {mode: state.memory() for mode, state in op._delayed.items()}
    numbers = copy.deepcopy([memory[1:3] for memory in before.values()])
    with _leaving_no_trace([model], ((),)):
        for state in op._delayed.values():
            state.scale.fill_(7)
            state.amax_history.fill_(7)
        with fuser.autocast(recipe=recipes.DelayedScaling(amax_history_len=5)):
            model(sample()).sum().backward()
        op._delayed = {}
    for (mode, memory), (scale, history) in zip(before.items(), numbers, strict=True):
        state = op._delayed[mode]
        assert state.scale is memory.scale
        assert state.amax_history is memory.amax_history
        assert torch.equal(state.scale, scale)
        assert torch.equal(state.amax_history, history)
        assert state.is_in(memory)


def test_a_state_that_replaces_another_has_its_own_numbers_in_the_memory_of_the_graph() -> None:
    model = fuser.Sequential(fuser.Linear(8, 8))
    step(model)
    op = model[0].basic_ops[0]
    before = op._delayed["forward"]
    memory = before.memory()
    captured = CapturedStates(model, [before])
    assert captured.current() == [before]
    saved = model.state_dict()
    saved = {name: value + 1 if "extra" in name else value for name, value in saved.items()}
    sizes = model[0].basic_ops[0].get_extra_state()
    saved["0.basic_ops.0._extra_state"][:2] = sizes[:2]  # n and length
    backward = 2 + 2 + 2 * 3
    saved["0.basic_ops.0._extra_state"][backward : backward + 2] = sizes[backward : backward + 2]
    expected = memory.amax_history + 1
    model.load_state_dict(saved)
    (state,) = captured.current() or []
    assert state is op._delayed["forward"]
    assert state is not before
    assert state.amax_history is memory.amax_history
    assert torch.equal(memory.amax_history, expected)
    old = before.amax_history.clone()
    state.amax_history.fill_(9)
    assert torch.equal(before.amax_history, old)


def test_a_parameter_of_a_state_that_was_moved_is_written_with_the_scale_of_its_memory() -> None:
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = fuser.Sequential(fuser.Linear(8, 8))
        step(model)
        states.append(model[0].basic_ops[0]._delayed["forward"])
    moved, before = states
    own = moved.parameter_quantizer(1)
    assert own is not None
    memory = before.memory()
    scale = moved.scale.clone()
    moved.move_into(memory)
    present = moved.parameter_quantizer(1)
    for read, of in ((present.scale, memory.scale), (present.amax, memory.amax_history[0])):
        assert read.data_ptr() == of[1:].data_ptr()
    assert torch.equal(present.scale, scale[1:2])
    assert not present.saturates


def test_weights_of_microbatches_are_not_kept_in_a_capture() -> None:
    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = fuser.modules.Linear(8, 8, params_dtype=torch.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, is_first_microbatch=True)

    recipe = recipes.Float8CurrentScaling()
    model = First()
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(),), recipe=recipe)
    x = torch.randn(SHAPE)
    with fuser.autocast(recipe=recipe):
        for each in (model, other):
            each.eval()
        expected = other.layer(x, is_first_microbatch=None)
        assert torch.equal(model.layer(x, is_first_microbatch=False), expected)


# -- results of several tensors ----------------------------------------------------


class Several(torch.nn.Module):
    """Results of several kinds: a sum, a copy of its argument, and places of maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        z = self.linear(x)
        constant = z.detach() * 2
        return {"sum": z + y, "places": z.argmax(-1), "others": (constant, z.sin())}


def test_results_of_several_kinds_have_the_bits_and_gradients_of_the_module() -> None:
    model = Several()
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(), sample()))
    for _ in range(3):
        found = []
        x, y = torch.randn(SHAPE), torch.randn(SHAPE)
        for each in (model, other):
            a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
            made = each(a, b)
            constant, sine = made["others"]
            assert not made["places"].requires_grad
            assert not constant.requires_grad
            (made["sum"].square().sum() + sine.sum()).backward()
            tensors = [made["sum"], made["places"], constant, sine, a.grad, b.grad]
            tensors += [p.grad for p in each.parameters()]
            found.append([tensor.detach().clone() for tensor in tensors])
            each.zero_grad()
        assert_same(*found)


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y + self.bias


def test_gradients_of_two_leaves_share_no_memory() -> None:
    model = Sum()
    fuser.make_graphed_callables(model, (sample(), sample()))
    x, y = sample(), sample()
    model(x, y).sum().backward()
    assert x.grad is not None
    x.grad.mul_(2)
    assert y.grad is not None
    assert torch.equal(y.grad, torch.ones(SHAPE))


# -- refusals ------------------------------------------------------------------------


class Unused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.used


def test_a_parameter_without_a_gradient_is_refused_or_allowed() -> None:
    model = Unused()
    with pytest.raises(ValueError, match=said("graphed-parameter-shape-gets", None, (8,))):
        fuser.make_graphed_callables(model, (sample(),))
    fuser.make_graphed_callables(model, (sample(),), allow_unused_input=True)
    model(sample()).sum().backward()
    assert model.unused.grad is None
    assert model.used.grad is not None


@pytest.mark.parametrize("where", ["argument", "parameter", "buffer"])
def test_a_tensor_off_the_gpu_is_refused_wherever_it_is(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = torch.nn.BatchNorm1d(8), sample()
    other = {"argument": given, "parameter": model.weight, "buffer": model.running_mean}[where]
    monkeypatch.setattr(graphs, "_is_on_gpu", lambda tensor: tensor is not other)
    shape = (6, 8) if where == "argument" else (8,)
    with pytest.raises(
        fuser.InputError, match=said("graphs-holds-tensor-shape", None, None, shape, "cpu")
    ):
        fuser.make_graphed_callables(model, (given,))


def test_hooks_of_parameters_and_trainable_buffers_are_refused() -> None:
    model = torch.nn.Linear(8, 8)
    handle = model.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(fuser.StateError, match=said("graphs-holds-hooks-run", None, None, (8, 8))):
        fuser.make_graphed_callables(model, (sample(),))
    handle.remove()
    model.register_buffer("trainable", torch.ones(8, requires_grad=True))
    with pytest.raises(
        fuser.StateError, match=said("graphs-buffer-requires-computes", None, None, "'trainable'")
    ):
        fuser.make_graphed_callables(model, (sample(),))


def test_a_hook_of_a_parameter_runs_once_in_each_backward() -> None:
    model = torch.nn.Linear(8, 8)
    fuser.make_graphed_callables(model, (sample(),))
    model.bias.register_hook(lambda grad: 2 * grad)
    model(sample()).sum().backward()
    assert torch.equal(model.bias.grad, torch.full((8,), 2.0 * SHAPE[0]))


HOOKS: dict[str, Callable[..., Any]] = {
    "register_forward_pre_hook": lambda module, args: (2 * args[0],),
    "register_forward_hook": lambda module, args, output: 2 * output,
    "register_full_backward_pre_hook": lambda module, grads: (2 * grads[0],),
    "register_full_backward_hook": lambda module, grads, grad_outputs: (2 * grads[0],),
}


@pytest.mark.parametrize(("kind", "hook"), HOOKS.items(), ids=HOOKS)
def test_a_hook_inside_a_graphed_module_is_followed(kind: str, hook: Callable[..., Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(),))
    for each in (model, other):
        getattr(each[0], kind)(hook)
    x = torch.randn(SHAPE)
    found = []
    for each in (model, other):
        given = x.clone().requires_grad_()
        told = pytest.warns(
            fuser.FuserWarning,
            match=said(
                "graphed-runs-because-since", None, holds("hooks of modules in it were added")
            ),
        )
        with told if each is model else contextlib.nullcontext():
            y = each(given)
        y.sum().backward()
        found.append([y, given.grad, each[0].weight.grad])
    for one, another in zip(*found, strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize("result", [2.0, None])
def test_a_result_that_is_no_tensor_is_refused(result: Any) -> None:
    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, result

    with pytest.raises(
        TypeError, match=said("graphed-output-returns-tensors", 1, holds("Graphed module 0"))
    ):
        fuser.make_graphed_callables(Other(), (sample(),))


def test_a_weight_with_another_main_grad_in_each_backward_is_refused() -> None:
    op = fuser.BasicLinear(8, 8, accumulate_into_main_grad=True)
    weight: Any = op.weight
    weight.__fsdp_param__ = True
    with pytest.raises(fuser.StateError, match=said("graphs-weight-another-main")):
        fuser.make_graphed_callables(fuser.Sequential(op), (sample(),))
    del weight.__fsdp_param__
    with pytest.raises(fuser.StateError, match=said("main-grad-accumulates-weight-into")):
        fuser.make_graphed_callables(fuser.Sequential(op), (sample(),))


class Enters(torch.nn.Module):
    """A module that enters autocast itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = fuser.Sequential(fuser.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(recipe=DELAYED):
            return self.ops(x)


def test_steps_of_a_module_that_enters_autocast_end_in_replays() -> None:
    model = Enters()
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(),))
    for seed in range(4):
        for each in (model, other):
            torch.manual_seed(seed)
            each((2.0**seed * torch.randn(SHAPE)).requires_grad_()).sum().backward()
        assert_same(*(list(each.state_dict().values()) for each in (model, other)))


class Holding(torch.nn.Module):
    """A module with ops that are no submodules, and so no part of its walk."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [fuser.Sequential(fuser.Linear(8, 8)), fuser.Sequential(fuser.Linear(8, 8))]
        self.shown = fuser.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.held:
            x = each(x)
        return self.shown(x)


def test_steps_of_ops_that_are_no_submodules_end_in_replays() -> None:
    model = Holding()
    fuser.make_graphed_callables(model, (sample(),), recipe=DELAYED)
    op = model.held[0][0].basic_ops[0]
    for amax in (3.0, 50.0, 7.0):
        x = torch.full(SHAPE, amax, requires_grad=True)
        y = model(x)
        (amax * y).sum().backward()
        assert op._delayed["forward"].amax_history[:, 0].tolist()[-1] == amax
        assert op._delayed["forward"].amax_history[0, 0] == 0
        assert op._delayed["backward"].amax_history[-1, 0] > 0
