"""What splits a pipeline: other modules, hooks and forwards of ops' own; and channels across it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracles import one_ulp, random_tensor, randomize, worst_error
from said import holds, said
from torch.nn.modules import module as torch_module

import fuser

N = 6
# How far two orders of sums may be apart, in units in the last place of the largest value. The
# longest way through `block` and back sums 56 terms: the norm 6, the linears 6 and 8; their
# gradients 6, 8 and 16, the norm's 6. Each rounds by at most half a unit and to either side, which
# is sqrt(56) / 2 < 4 units, for both of the two that are compared.
REORDERED = 8


def leaf(seed: int = 1, grad: bool = True, rows: int = 4) -> torch.Tensor:
    return random_tensor((rows, N), torch.float32, seed).requires_grad_(grad)


def make(name: str = "r", to_caller: bool = False) -> Any:
    return fuser.MakeExtraOutput().set_extra_output_channel(0, name, output_to_caller=to_caller)


def add(name: str = "r") -> Any:
    return fuser.AddExtraInput().set_extra_input_channel(0, name)


def scale(factor: float) -> fuser.ConstantScale:
    return fuser.ConstantScale(factor)


def block(*between: torch.nn.Module, to_caller: bool = False) -> fuser.Sequential:
    """A residual block, ``x + W2 swiglu(W1 norm(x))``, with modules before the last linear."""
    return randomize(
        fuser.Sequential(
            make(to_caller=to_caller),
            fuser.RMSNorm(N),
            fuser.Linear(N, 16),
            fuser.SwiGLU(),
            *between,
            fuser.Linear(8, N),
            add(),
        )
    )


def results(model: torch.nn.Module, *inputs: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    """Outputs, and gradients of the inputs and parameters for weighted sums of the outputs."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    outputs = model(*inputs, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((k + 1) * (y * y).sum() for k, y in enumerate(outputs))
    grads = torch.autograd.grad(loss, [*inputs, *model.parameters()])
    return [*(y.detach() for y in outputs), *grads]


def assert_alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal but for the order of sums, which torch takes by the layouts of a product."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert worst_error(a, b) <= REORDERED * one_ulp(b, torch.float32)


def nothing(*args: Any) -> None:
    """A hook of any kind that changes nothing."""


HOOKS = [
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
]


@pytest.fixture
def global_hook() -> Iterator[Callable[[Any], None]]:
    handles: list[Any] = []
    yield lambda hook: handles.append(torch_module.register_module_forward_hook(hook))
    for handle in handles:
        handle.remove()


class Adapted(torch.nn.Module):
    """An op with a low-rank term beside it, as fine-tuning libraries put one in its place."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        return y


# -- channels across what splits a pipeline -----------------------------------------------------


def _hook(index: int, name: str) -> Callable[[Any], None]:
    return lambda model: getattr(model[index], name)(nothing)


def _inner_hook(index: int, inner: int) -> Callable[[Any], None]:
    return lambda model: model[index].basic_ops[inner].register_forward_hook(nothing)


def _hook_all(model: Any) -> None:
    for module in model.modules():
        module.register_forward_hook(nothing)
        module.register_forward_pre_hook(nothing)


SPLITS: dict[str, Callable[[Any], Any]] = {
    **{f"{name}-of-{i}": _hook(i, name) for i in range(6) for name in HOOKS},
    **{f"hook-in-{i}-{k}": _inner_hook(i, k) for i in (2, 4) for k in (0, 1)},
    "hooks-of-all": _hook_all,
    "identity": lambda model: model.insert(4, torch.nn.Identity()),
    "dropout": lambda model: model.insert(2, torch.nn.Dropout(0.0)),
    "module-after-producer": lambda model: model.insert(1, torch.nn.Identity()),
    "module-before-consumer": lambda model: model.insert(5, torch.nn.Identity()),
    "adapted": lambda model: model.__setitem__(4, Adapted(model[4])),
    "both-adapted": lambda model: [model.__setitem__(i, Adapted(model[i])) for i in (2, 4)],
    "nested": lambda model: model.__setitem__(3, fuser.Sequential(model[3])),
}


@pytest.mark.sampled
@pytest.mark.parametrize("to_caller", [False, True])
@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
@pytest.mark.parametrize("split", SPLITS)
def test_a_channel_survives_what_splits_its_pipeline(
    split: str, called: bool, to_caller: bool
) -> None:
    model, x = block(to_caller=to_caller), leaf()
    expected = results(model, x)
    twin = copy.deepcopy(model)
    if called:
        twin(x)
    SPLITS[split](twin)
    assert_alike(results(twin, x), expected)
    with torch.no_grad():
        y = twin(x)
    assert isinstance(y, tuple) == to_caller
    assert len(twin._current_segments()) > 1
    for copied in (copy.deepcopy(twin), *([] if "hook" in split else [unpickled(twin)])):
        assert_alike(results(copied, x), expected)


def unpickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def test_a_channel_passes_torch_linears() -> None:
    model, x = block(), leaf()
    plain = copy.deepcopy(model)
    for i in (2, 4):
        linear = torch.nn.Linear(model[i].weight.shape[1], model[i].weight.shape[0])
        linear.weight, linear.bias = model[i].weight, model[i].bias
        plain[i] = linear
    expected = results(model, x)
    renamed = results(plain, x)
    assert_alike(renamed, expected)


@pytest.mark.parametrize("to_caller", [False, True])
def test_readers_in_several_pipelines_get_the_tensor_and_their_gradients_are_summed(
    to_caller: bool,
) -> None:
    def parts(between: Callable[[], list[Any]]) -> fuser.Sequential:
        return fuser.Sequential(
            scale(3.0),
            make(to_caller=to_caller),
            scale(2.0),
            add(),
            *between(),
            add(),
            scale(0.5),
            *between(),
            scale(0.25),
            add(),
            add(),
        )

    x = leaf()
    split, whole = parts(lambda: [torch.nn.Identity()]), parts(list)
    assert [len(m._current_segments()) for m in (split, whole)] == [5, 1]
    for found, expected in zip(results(split, x), results(whole, x), strict=True):
        assert torch.equal(found, expected)


def test_channels_cross_each_other_between_pipelines() -> None:
    model = fuser.Sequential(
        make("a"),
        scale(2.0),
        make("b", to_caller=True),
        torch.nn.Identity(),
        add("a"),
        torch.nn.Identity(),
        scale(3.0),
        add("b"),
    )
    x = torch.ones(2, 2, requires_grad=True)
    y, b = model(x)
    assert torch.equal(y, torch.full((2, 2), (2 + 1) * 3.0 + 2))
    assert torch.equal(b, torch.full((2, 2), 2.0))
    (y.sum() + b.sum()).backward()
    assert torch.equal(x.grad, torch.full((2, 2), 3 * 3 + 2 + 2.0))


@pytest.mark.parametrize(
    "split",
    [
        lambda model: None,
        lambda model: model.insert(3, torch.nn.Identity()),
        lambda model: [model.insert(i, torch.nn.Identity()) for i in (7, 5, 3, 1)],
        _hook_all,
    ],
    ids=["whole", "in-two", "in-many", "hooks"],
)
def test_the_callers_extra_tensors_keep_their_order_however_a_model_is_split(split: Any) -> None:
    model = fuser.Sequential(
        make("kept", to_caller=True),
        fuser.AddExtraInput(),
        scale(10.0),
        fuser.MakeExtraOutput(),
        add("kept"),
        fuser.AddExtraInput(),
        make("hidden"),
        fuser.MakeExtraOutput(),
        add("hidden"),
    )
    split(model)
    x, first, second = (torch.full((2, 2), float(k)) for k in (1, 2, 3))
    outputs = model(x, first, second)
    last = (1 + 2) * 10 + 1 + 3
    assert [float(t[0, 0]) for t in outputs] == [2 * last, 1, 30, last]
    with pytest.raises(ValueError, match=r"takes 2 extra inputs .*op 1, AddExtra.*op 5.* got 1"):
        model(x, first)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (
            lambda: [make(), torch.nn.Identity(), scale(1.0), make(), add()],
            ["two producers", "op 0 (MakeExtraOutput)", "op 2 (MakeExtraOutput)"],
        ),
        (
            lambda: [scale(1.0), torch.nn.Identity(), scale(1.0), add()],
            ["no producer", "op 2 (AddExtraInput)"],
        ),
        (
            lambda: [add(), torch.nn.Identity(), scale(1.0), make()],
            ["before", "op 0 (AddExtraInput)", "op 2 (MakeExtraOutput)"],
        ),
        (
            lambda: [fuser.Sequential(make(to_caller=True)), add()],
            ["no producer", "op 0 (AddExtraInput)"],
        ),
    ],
    ids=["two-producers", "no-producer", "consumer-first", "producer-in-a-nested-one"],
)
def test_a_channel_that_cannot_be_routed_names_ops_by_their_place_in_the_whole(
    modules: Any, said: list[str]
) -> None:
    model = fuser.Sequential(*modules())
    for call in (model, model.plan, model):
        with pytest.raises(fuser.InputError, match="'r'") as error:
            call(leaf())
        assert all(part in str(error.value) for part in said)


def test_a_slice_with_a_producer_runs_and_one_with_a_consumer_alone_says_so() -> None:
    x = leaf()
    assert isinstance(block()[:3](x), torch.Tensor)
    _, kept = block(to_caller=True)[:3](x)
    assert torch.equal(kept, x)
    with pytest.raises(
        ValueError, match=said("graph-no-reads-bind", "'r'", "op 2 (AddExtraInput)")
    ):
        block()[4:](torch.ones(2, 8))


def test_a_channel_is_bound_for_good_once_a_model_has_run_split_or_not() -> None:
    model = fuser.Sequential(make(), torch.nn.Identity(), add())
    model[0].register_forward_hook(nothing)
    model(leaf())
    for bind in (model[0].set_extra_output_channel, model[2].set_extra_input_channel):
        with pytest.raises(RuntimeError, match=said("channels-cannot-bound-pipeline", "'s'")):
            bind(0, "s")
    twin = copy.deepcopy(model)
    twin[0].set_extra_output_channel(0, "s", output_to_caller=False)
    twin[2].set_extra_input_channel(0, "s")
    x = leaf()
    assert torch.equal(twin(x), 2 * x)


def test_a_channel_is_bound_for_good_even_if_the_first_call_was_refused() -> None:
    model, x = fuser.Sequential(make(), fuser.AddExtraInput(), add()), leaf()
    for op in model:
        op.register_forward_hook(nothing)
    with pytest.raises(ValueError, match="takes 1 extra input"):
        model(x)
    with pytest.raises(RuntimeError, match=said("channels-cannot-bound-pipeline", "'s'")):
        model[2].set_extra_input_channel(0, "s")
    torch.testing.assert_close(model(x, x), 3 * x)


def test_a_split_model_runs_what_was_planned_ahead() -> None:
    model = block(torch.nn.Identity(), to_caller=True)
    model.insert(1, torch.nn.Identity())
    for x in (leaf(), leaf(grad=False)):
        model.plan(x)
        planned = model.plans
        model(x)
        assert model.plans == planned


def of_every_segment() -> fuser.Sequential:
    """A pipeline, an op and a composite with hooks, and a nested container with extra tensors."""
    inner = fuser.Sequential(fuser.AddExtraInput(), torch.nn.Identity(), fuser.MakeExtraOutput())
    op, composite = fuser.GELU(), fuser.Linear(N, N)
    for hooked in (op, composite):
        hooked.register_forward_hook(nothing)
    return fuser.Sequential(fuser.AddExtraInput(), op, composite, inner, torch.nn.Tanh())


@pytest.mark.parametrize("device", [None, "h200"])
def test_a_plan_of_many_segments_has_no_backward_in_evaluation(device: str | None) -> None:
    model, tensors = of_every_segment(), [leaf(seed) for seed in range(3)]
    assert len(model.plan(*tensors, device=device).backward) == 4
    plan = model.plan(*tensors, training=False, device=device)
    assert (plan.backward, plan.kept, plan.nodes) == ((), (), ())
    assert len(plan.forward) == 3


def test_a_plan_of_many_segments_takes_as_many_extra_inputs_as_a_call() -> None:
    model, x = of_every_segment(), leaf()
    for count in (0, 1, 3):
        refusals = []
        for run in (model, model.plan):
            with pytest.raises(fuser.InputError) as raised:
                run(x, *[leaf() for _ in range(count)])
            refusals.append(str(raised.value))
        assert refusals[0] == refusals[1]
        assert "2" in refusals[0]


def test_a_budget_of_zero_of_many_segments_keeps_the_callers_tensors() -> None:
    tensors = [leaf(seed) for seed in range(3)]
    *_, least = of_every_segment().plan(*tensors).memory
    assert (least.memory_budget, least.repeats_forward) == (0, True)
    assert least.nbytes == sum(tensor.nbytes for tensor in tensors)


def test_a_nested_containers_extra_output_is_planned_like_the_one_of_a_call() -> None:
    inner = fuser.Sequential(fuser.MakeExtraOutput(), torch.nn.Identity(), fuser.GELU())
    model = fuser.Sequential(fuser.Linear(N, 4), inner, torch.nn.Identity(), fuser.Linear(4, 2))
    outer = fuser.Sequential(model, torch.nn.Identity(), fuser.GELU())
    assert outer.plan(leaf()).features == (2, 2)
    y, made = outer(leaf())
    assert (y.shape, made.shape) == ((4, 2), (4, 4))


def test_a_pipeline_with_an_open_channel_can_be_copied() -> None:
    pipeline = fuser.OperationFuser([make("a"), add("b")], open_channels=("a", "b"))
    x, other = leaf(), leaf(2)
    for each in (pipeline, copy.deepcopy(pipeline), unpickled(pipeline)):
        y, made = each(x, other)
        assert torch.equal(y, x + other)
        assert torch.equal(made, x)


@pytest.mark.parametrize("edit", ["insert", "pop", "del", "append"])
def test_edits_of_a_split_model_take_effect(edit: str) -> None:
    model = fuser.Sequential(make(), scale(2.0), torch.nn.Identity(), add(), scale(10.0))
    x = leaf()
    model(x)
    if edit == "insert":
        model.insert(2, scale(4.0))
    elif edit == "pop":
        model.pop(1)
    elif edit == "del":
        del model[2]
    else:
        model.append(scale(0.5))
    factor = {"insert": 90, "pop": 20, "del": 30, "append": 15}[edit]
    torch.testing.assert_close(model(x), factor * x)


@pytest.mark.parametrize("changing", [torch.nn.ReLU(inplace=True), torch.nn.Dropout(0.5, True)])
def test_a_tensor_on_a_channel_that_a_module_writes_into_is_refused(changing: Any) -> None:
    model, x = fuser.Sequential(make(), changing, add()), leaf(grad=False)
    with pytest.raises(fuser.StateError, match=r"'r', from op 0 .* changed in place"):
        model(x)
    later = fuser.Sequential(make(), scale(2.0), changing, add())
    assert later.eval()(x).shape == x.shape


def test_a_tensor_on_a_channel_is_freed_after_its_last_reader() -> None:
    alive: list[bool] = []
    made: Any = None

    class Watch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append(made() is not None)
            return x * 1

    class Note(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal made
            fresh = x * 1
            made = weakref.ref(fresh.untyped_storage())
            return fresh

    model = fuser.Sequential(
        Note(), make(), scale(2.0), Watch(), add(), scale(2.0), Watch(), scale(3.0)
    )
    with torch.no_grad():
        model(leaf(grad=False))
    assert alive == [True, False]


# -- calls of single ops ------------------------------------------------------------------------


def test_the_ends_of_channels_are_plain_extra_tensors_of_an_op_called_alone() -> None:
    x, other = leaf(), leaf(2)
    y, made = make()(x)
    assert torch.equal(y, x)
    assert torch.equal(made, x)
    assert torch.equal(add()(x, other), x + other)
    with pytest.raises(ValueError, match="takes 1 extra input"):
        add()(x)


def test_a_composite_called_alone_keeps_channels_that_end_in_it() -> None:
    pair = fuser.FusedOperation([make(), scale(2.0), add()])
    x, other = leaf(), leaf(2)
    assert torch.equal(pair(x), 3 * x)
    y, made = fuser.FusedOperation([make(), scale(2.0)])(x)
    assert torch.equal(y, 2 * x)
    assert torch.equal(made, x)
    assert torch.equal(fuser.FusedOperation([scale(2.0), add()])(x, other), 2 * x + other)
    pair.basic_ops[1].register_forward_hook(nothing)
    assert torch.equal(pair(x), 3 * x)


def test_a_composite_that_hides_a_channels_tensor_from_a_later_reader_is_refused() -> None:
    def model(to_caller: bool) -> fuser.Sequential:
        pair = fuser.FusedOperation([make(to_caller=to_caller), scale(2.0), add()])
        return fuser.Sequential(pair, scale(2.0), add())

    x = leaf()
    torch.testing.assert_close(model(False)(x), 7 * x)
    hooked = model(False)
    hooked[0].register_forward_hook(nothing)
    with pytest.raises(
        fuser.InputError, match=said("segments-inside-outside-called", "'r'", None, 0, 2, 0)
    ):
        hooked(x)
    hooked = model(True)
    hooked[0].register_forward_hook(nothing)
    y, made = hooked(x)
    torch.testing.assert_close(y, 7 * x)
    assert torch.equal(made, x)


def test_a_hooked_composite_may_read_a_channel_of_an_earlier_op_that_a_later_one_reads() -> None:
    pair = fuser.FusedOperation([scale(2.0), add()])
    pair.register_forward_hook(nothing)
    x = leaf()
    model = fuser.Sequential(make(), pair, scale(2.0), add())
    torch.testing.assert_close(model(x), 7 * x)
    whole = fuser.FusedOperation([make(), scale(2.0), add(), scale(3.0), add()])
    whole.register_forward_hook(nothing)
    torch.testing.assert_close(fuser.Sequential(whole, scale(2.0))(x), 20 * x)


def test_a_channel_between_hooked_composites_and_ops_works() -> None:
    x = leaf()
    model = fuser.Sequential(
        fuser.FusedOperation([make(), scale(2.0)]), torch.nn.Identity(), scale(5.0), add()
    )
    for index in (0, 3):
        model[index].register_forward_hook(nothing)
    torch.testing.assert_close(model(x), 11 * x)
    (channel,) = model.plan(x).channels
    assert (channel.producer, channel.consumer) == (0, 3)
    model[0].basic_ops[1].register_forward_hook(nothing)
    torch.testing.assert_close(model(x), 11 * x)
    assert model.plan(x).channels == (channel,)


# -- hooks --------------------------------------------------------------------------------------


def test_hooks_see_the_tensors_of_channels() -> None:
    model, x = block(), leaf()
    seen: dict[str, Any] = {}
    model[0].register_forward_hook(lambda op, args, out: seen.update(out=out))
    model[5].register_forward_pre_hook(lambda op, args: seen.update(args=args))
    model(x)
    assert len(seen["out"]) == len(seen["args"]) == 2
    assert torch.equal(seen["out"][1], x)
    assert torch.equal(seen["args"][1], x)


def test_a_hook_may_change_what_is_on_a_channel() -> None:
    model, x = fuser.Sequential(make(), scale(2.0), add()), leaf()
    model[0].register_forward_hook(lambda op, args, out: (out[0], 10 * out[1]))
    torch.testing.assert_close(model(x), 12 * x)
    model[0].register_forward_hook(lambda op, args, out: out[0])
    with pytest.raises(
        fuser.StateError, match=said("segment-call-returns-tuple", "MakeExtraOutput", 2, "Tensor")
    ):
        model(x)
    model[0].register_forward_hook(lambda op, args, out: (out, out, out))
    with pytest.raises(
        fuser.StateError, match=said("segment-call-returns-tuple", None, 2, "tuple of 3")
    ):
        model(x)


@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
@pytest.mark.parametrize("place", ["op", "composite", "inner"])
@pytest.mark.parametrize("register", HOOKS)
def test_hooks_fire_whenever_and_wherever_they_are_registered(
    register: str, place: str, called: bool
) -> None:
    model, calls = randomize(fuser.Sequential(fuser.GELU(), fuser.Linear(N, N), scale(2.0))), []
    x = leaf()
    expected = results(model, x)
    if not called:
        model = copy.deepcopy(model)
    op = {"op": model[0], "composite": model[1], "inner": model[1].basic_ops[1]}[place]
    handle = getattr(op, register)(lambda *args: calls.append(args[0]))
    for times in (1, 2):
        assert_alike(results(model, x), expected)
        assert calls == [op] * times
    handle.remove()
    assert_alike(results(model, x), expected)
    assert calls == [op] * 2
    assert len(model._current_segments()) == 1  # together again


@pytest.mark.parametrize("inner", [0, 1])
def test_hooks_in_a_composite_fire_when_it_is_called_alone(inner: int) -> None:
    linear, x, calls = randomize(fuser.Linear(N, N)), leaf(), []
    expected = results(linear, x)
    handle = linear.basic_ops[inner].register_forward_hook(lambda *args: calls.append(1))
    assert_alike(results(linear, x), expected)
    assert calls == [1]
    handle.remove()
    assert_alike(results(linear, x), expected)
    assert calls == [1]


def test_a_hooks_result_replaces_that_of_an_op_in_a_composite() -> None:
    model = fuser.Sequential(fuser.Linear(N, N))
    model[0].basic_ops[1].register_forward_hook(lambda op, args, output: output * 0)
    assert not model(leaf()).any()
    assert not model[0](leaf()).any()


def test_hooks_for_every_module_see_every_op(global_hook: Callable[[Any], None]) -> None:
    model, x, seen = fuser.Sequential(fuser.GELU(), fuser.Linear(N, N)), leaf(), []
    expected = model(x)
    global_hook(lambda module, args, output: seen.append(type(module).__name__))
    torch.testing.assert_close(model(x), expected)
    assert seen == ["GELU", "BasicLinear", "Bias", "Linear", "Sequential"]


@pytest.mark.parametrize("kind", ["pre_hook", "hook"])
def test_hooks_for_every_modules_backward_see_every_op(kind: str) -> None:
    model, x, seen = fuser.Sequential(fuser.GELU(), fuser.Linear(N, N)), leaf(), []
    model(x)
    register = getattr(torch_module, f"register_module_full_backward_{kind}")
    handle = register(lambda module, *grads: seen.append(type(module).__name__))
    try:
        model(x).sum().backward()
    finally:
        handle.remove()
    assert sorted(seen) == ["BasicLinear", "Bias", "GELU", "Linear", "Sequential"]


@pytest.mark.parametrize(
    "kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
)
def test_hooks_of_one_kind_for_every_module_call_each_op_as_one(kind: str) -> None:
    model, x = fuser.Sequential(fuser.GELU(), scale(2.0)), leaf()
    handle = getattr(torch_module, f"register_module_{kind}")(nothing)
    try:
        calls = [(call.name, call.ops) for call in model.plan(x).modules]
    finally:
        handle.remove()
    assert calls == [("GELU", (0,)), ("ConstantScale", (1,))]
    assert model.plan(x).modules == ()


@pytest.mark.parametrize("inner", [0, 1])
def test_hooks_of_a_composite_and_of_its_ops_fire_once_each(inner: int) -> None:
    model, x, calls = randomize(fuser.Sequential(fuser.Linear(N, N), fuser.GELU())), leaf(), []
    expected = results(model, x)
    model[0].register_forward_hook(lambda *args: calls.append("composite"))
    model[0].basic_ops[inner].register_forward_hook(lambda *args: calls.append("op"))
    assert_alike(results(model, x), expected)
    assert sorted(calls) == ["composite", "op"]


def test_ops_come_together_again_after_hooks_for_every_module() -> None:
    model, x = fuser.Sequential(fuser.GELU(), fuser.Linear(N, N)), leaf()
    handle = torch_module.register_module_forward_pre_hook(nothing)
    model(x)
    assert len(model._current_segments()) == 2
    handle.remove()
    model(x)
    assert len(model._current_segments()) == 1


def test_a_hook_elsewhere_costs_a_model_no_plan() -> None:
    model, x = block(), leaf()
    model.insert(2, torch.nn.Identity())
    model(x)
    pipelines = list(model._current_segments().pipelines())
    fuser.GELU().register_forward_hook(nothing)
    model[4].register_forward_hook(nothing)
    model(x)
    kept = list(model._current_segments().pipelines())
    assert kept[0] is pipelines[0]  # what is before the module has not changed
    assert kept[0].planned_count == 1


def test_a_summary_of_every_module_counts_every_op_once() -> None:
    model, x, seen = block(), leaf(), []
    model(x)
    handles = [
        module.register_forward_hook(lambda module, *_: seen.append(module))
        for module in model.modules()
        if not isinstance(module, torch.nn.ModuleList)
    ]
    expected = {m for m in model.modules() if not isinstance(m, torch.nn.ModuleList)}
    model(x)
    assert len(seen) == len(expected)
    assert set(seen) == expected
    for handle in handles:
        handle.remove()


# -- forwards of ops' own -----------------------------------------------------------------------


class Doubled(fuser.BasicLinear):
    """A linear whose forward is not that of its kind."""

    def forward(self, input: torch.Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        return 2 * super().forward(input, **kwargs)


def test_the_forward_of_an_ops_own_class_is_used_in_a_sequential() -> None:
    op, x = Doubled(N, N), leaf()
    expected = op(x)
    for model in (
        fuser.Sequential(op),
        fuser.Sequential(fuser.Identity(), op, fuser.Identity()),
        fuser.Sequential(fuser.FusedOperation([op, fuser.Identity()])),
    ):
        torch.testing.assert_close(model(x), expected)
        assert any(call.name == "Doubled" for call in model.plan(x).modules)
        model(x, op_kwargs={op: {"is_first_microbatch": True}})


def test_an_overridden_call_is_used() -> None:
    class Called(fuser.Identity):
        def __call__(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return 5 * super().__call__(x)

    x = leaf()
    assert torch.equal(fuser.Sequential(fuser.Identity(), Called())(x), 5 * x)


def test_a_forward_may_change_the_shape_and_is_asked_for_it_when_planning() -> None:
    class Widened(fuser.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            once: Any = super().forward(x)
            return torch.cat([once] * 2, dim=-1)

    model, x = fuser.Sequential(Widened(), fuser.Linear(2 * N, N)), leaf()
    assert model(x).shape == x.shape
    assert model.plan(x).activation_bytes[1:] == (8 * N, 4 * N, 4 * N)


def test_an_op_whose_class_changes_computes_as_the_new_one() -> None:
    class Tripled(fuser.Identity):
        def op_forward(self, ctx: Any, input_: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return 3 * input_

        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            return 3 * grad_output, ()

    op, x = fuser.Identity(), leaf()
    models = [op, fuser.Sequential(op), fuser.FusedOperation([op])]
    assert all(torch.equal(model(x), x) for model in models)
    op.__class__ = Tripled
    assert all(torch.equal(model(x), 3 * x) for model in models)


@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
def test_methods_that_are_set_on_an_op_are_used_until_they_are_deleted(called: bool) -> None:
    op: Any = fuser.Identity()
    x = leaf()
    models = [op, fuser.Sequential(scale(1.0), op), fuser.FusedOperation([op])]
    if called:
        assert all(torch.equal(model(x), x) for model in models)
    op.op_forward = lambda ctx, input_, **kwargs: 7 * input_
    assert all(torch.equal(model(x), 7 * x) for model in models)
    del op.op_forward
    assert all(torch.equal(model(x), x) for model in models)


@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
def test_a_forward_that_was_set_on_an_op_is_used(called: bool) -> None:
    op: Any = scale(2.0)
    x = leaf()
    model = fuser.Sequential(scale(3.0), op)
    if called:
        model(x)
    original = op.forward
    op.forward = lambda x: original(x) + 1
    torch.testing.assert_close(model(x), 6 * x + 1)
    op.forward = original
    torch.testing.assert_close(model(x), 6 * x)
    assert len(model._current_segments()) == 1


def test_fully_shard_of_any_op_or_inner_op_trains_like_the_whole_model() -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or distributed.is_initialized():
        pytest.skip("needs a process group of its own")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for pick in (0, 1, 2, 5, (2, 0)):
            model, x = block(), leaf()
            expected = results(model, x)
            op = model[pick] if isinstance(pick, int) else model[pick[0]].basic_ops[pick[1]]
            fully_shard(op, mesh=mesh)
            fully_shard(model, mesh=mesh)
            inputs = x.detach().requires_grad_()
            y = model(inputs)
            (y * y).sum().backward()
            grads = [p.grad.full_tensor() for p in model.parameters()]
            found: list[Any] = [y.detach(), inputs.grad, *grads]
            assert_alike(found, expected)
    finally:
        distributed.destroy_process_group()


# -- keyword arguments --------------------------------------------------------------------------


class Times(fuser.BasicOperation):
    """The input times a factor of the caller."""

    def op_forward(
        self,
        ctx: Any,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        factor: Any = 1.0,
    ) -> Any:
        ctx.factor = factor
        return input_ * factor

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output * ctx.factor, ()


@pytest.mark.parametrize(
    ("wrap", "inner"),
    [
        (lambda op: op, lambda part: part),
        (lambda op: fuser.FusedOperation([op, scale(1.0)]), lambda part: part.basic_ops[0]),
        (lambda op: fuser.FusedOperation([scale(1.0), op]), lambda part: part.basic_ops[1]),
        (lambda op: fuser.Sequential(scale(1.0), op), lambda part: part[1]),
        (lambda op: fuser.Sequential(fuser.Sequential(op)), lambda part: part[0][0]),
    ],
    ids=["op", "composite", "second-in-composite", "nested", "nested-twice"],
)
@pytest.mark.parametrize("hooked", ["nothing", "op", "around"])
def test_op_kwargs_reach_an_op_wherever_it_is_and_whatever_hooks_there_are(
    wrap: Any, inner: Any, hooked: str
) -> None:
    model = fuser.Sequential(scale(1.0), wrap(Times()), scale(1.0))
    op, x = inner(model[1]), leaf()
    if hooked != "nothing":
        (op if hooked == "op" else model[1]).register_forward_hook(nothing)
    torch.testing.assert_close(model(x, op_kwargs={op: {"factor": 3.0}}), 3 * x)
    torch.testing.assert_close(model(x), x)
    mistakes: tuple[tuple[Any, str], ...] = (
        (
            {"nonsense": 1},
            said("checks-no-keyword-argument", holds("(Times)"), "'nonsense'", "factor"),
        ),
        ({"ctx": 1}, said("checks-gets-caller-cannot", holds("(Times)"), "'ctx'")),
        ({"input_": x}, said("checks-gets-caller-cannot", holds("(Times)"), "'input_'")),
        (
            {"next_op_input_quantizer": None},
            said("checks-gets-caller-cannot", holds("(Times)"), "'next_op_input_quantizer'"),
        ),
        (None, said("checks-keyword-arguments-dict", holds("(Times)"), "NoneType")),
        (["factor"], said("checks-keyword-arguments-dict", holds("(Times)"), "list")),
    )
    for bad, words in mistakes:
        with pytest.raises(fuser.InputTypeError, match=words):
            model(x, op_kwargs={op: bad})
    torch.testing.assert_close(model(x), x)


def test_op_kwargs_of_ops_inside_and_outside_of_a_nested_sequential_go_each_to_its_op() -> None:
    model, x = fuser.Sequential(Times(), fuser.Sequential(Times()), Times()), leaf()
    ops = (model[0], model[1][0], model[2])
    for given in ((2.0, 1.0, 1.0), (1.0, 3.0, 1.0), (2.0, 3.0, 5.0)):
        kwargs = {op: {"factor": f} for op, f in zip(ops, given, strict=True) if f != 1.0}
        found = model(x, op_kwargs=kwargs)
        torch.testing.assert_close(found, given[0] * given[1] * given[2] * x)


@pytest.mark.parametrize("wrong", [[], [1], 3, "factor", {0}])
def test_op_kwargs_that_are_no_dict_are_refused(wrong: Any) -> None:
    model = fuser.Sequential(Times())
    with pytest.raises(fuser.InputTypeError, match=said("sequential-dict-dicts-keyword")):
        model(leaf(), op_kwargs=wrong)


def test_op_kwargs_may_name_an_op_once() -> None:
    model = fuser.Sequential(Times(), scale(2.0))
    for kwargs in ({0: {"factor": 2.0}, model[0]: {}}, {0: {}, -2: {"factor": 2.0}}):
        with pytest.raises(
            fuser.InputError, match=said("sequential-two-entries-merge", "Op 0 (Times)")
        ):
            model(leaf(), op_kwargs=kwargs)
    with pytest.raises(fuser.InputError, match=said("sequential-names-not-holds", True)):
        model(leaf(), op_kwargs={True: {}})


@pytest.mark.parametrize("wrong", [[{}], {}, 3, [{}, {}, {}], [{}, None], [{}, {"factor": 1}]])
def test_keyword_arguments_of_basic_ops_are_a_list_of_dicts_that_fit(wrong: Any) -> None:
    with pytest.raises(fuser.InputTypeError, match=r"list of 2 dicts|Op 1 \(ConstantScale\)"):
        fuser.FusedOperation([Times(), scale(1.0)])(leaf(), basic_op_kwargs=wrong)
    with pytest.raises(fuser.InputTypeError, match=r"list of 2 dicts|Op 1 \(ConstantScale\)"):
        fuser.OperationFuser([Times(), scale(1.0)])(leaf(), basic_op_kwargs=wrong)


# -- Sequentials in Sequentials -----------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
def test_extra_tensors_of_nested_sequentials_count_in_their_order(hooked: bool) -> None:
    def parts() -> list[Any]:
        return [
            fuser.MakeExtraOutput(),
            fuser.AddExtraInput(),
            scale(10.0),
            fuser.AddExtraInput(),
            fuser.MakeExtraOutput(),
            fuser.AddExtraInput(),
            fuser.MakeExtraOutput(),
        ]

    a, b, c, d, e, f, g = parts()
    flat = fuser.Sequential(*parts())
    inner = fuser.Sequential(c, fuser.Sequential(d, e), torch.nn.Identity())
    nested = fuser.Sequential(a, b, inner, f, g)
    if hooked:
        inner.register_forward_hook(nothing)
        d.register_forward_hook(nothing)
    inputs = [leaf(k) for k in range(4)]
    assert_alike(results(nested, *inputs), results(flat, *inputs))
    assert all(type(t) is torch.Tensor for t in nested(*inputs))
    nested.plan(*inputs)
    with pytest.raises(
        ValueError,
        match=said("segments-takes", None, holds("3 extra inputs ", "nested Sequential"), 2),
    ):
        nested(*inputs[:3])


def test_a_nested_sequential_may_be_edited() -> None:
    inner = fuser.Sequential(scale(2.0))
    model, x = fuser.Sequential(inner, scale(3.0)), leaf()
    assert torch.equal(model(x), 6 * x)
    inner.append(fuser.AddExtraInput())
    inner.append(fuser.MakeExtraOutput())
    y, made = model(x, x)
    assert torch.equal(made, 3 * x)
    torch.testing.assert_close(y, 9 * x)


def test_channels_of_blocks_in_a_model_may_have_one_name() -> None:
    model, x = fuser.Sequential(block(), block(), block()), leaf()
    expected = x
    for part in model:
        expected = part(expected)
    assert torch.equal(model(x), expected)


def test_a_module_that_is_no_op_gets_and_gives_the_main_tensor_alone() -> None:
    class Own(fuser.Sequential):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x, x)

    x = leaf()
    model = fuser.Sequential(make(to_caller=True), Own(fuser.AddExtraInput()), add())
    y, made = model(x)
    assert torch.equal(y, 3 * x)
    assert torch.equal(made, x)


# -- what is kept alive -------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        lambda: fuser.BasicLinear(N, N),
        lambda: fuser.Linear(N, N),
        lambda: fuser.Sequential(fuser.Linear(N, N), fuser.GELU()),
        lambda: fuser.Sequential(make(), torch.nn.Identity(), fuser.Linear(N, N), add()),
    ],
    ids=["op", "composite", "sequential", "split"],
)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_called_model_is_freed_without_the_garbage_collector(
    build: Any, grad: bool, hooked: bool, no_collector: None
) -> None:
    model = build()
    if hooked:
        model.apply(lambda module: module.register_forward_hook(nothing) and None)
    for _ in range(2):
        y = model(leaf(grad=grad))
        if grad:
            y.sum().backward()
    plans = model.plans if isinstance(model, fuser.Sequential) else ()
    found = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(model)]
    del model, y
    assert [ref() for ref in found] == [None] * len(found)
    del plans


@pytest.mark.parametrize(
    "remove",
    [
        lambda model: model.__delitem__(1),
        lambda model: model.pop(1),
        lambda model: model.__setitem__(1, fuser.GELU()),
        lambda model: model.__delitem__(slice(1, None)),
        lambda model: setattr(model, "1", fuser.GELU()),
    ],
    ids=["del", "pop", "set", "del-slice", "setattr"],
)
def test_a_removed_op_is_freed_at_once(remove: Any, no_collector: None) -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.Linear(N, N), fuser.SiLU())
    model(leaf())
    weight = weakref.ref(model[1].weight)
    remove(model)
    assert weight() is None
    model(leaf())


def test_a_plan_keeps_no_model_alive(no_collector: None) -> None:
    model = block(torch.nn.Identity())
    plan = model.plan(leaf())
    model(leaf())
    weight = weakref.ref(model[2].weight)
    del model
    assert weight() is None
    assert len(plan.ops) == 8


def test_an_op_and_what_runs_it_alone_have_one_state() -> None:
    op, x = fuser.BasicLinear(N, N), leaf()
    op(x)
    with torch.no_grad():
        op.weight.zero_()
    assert not op(x).any()
    op.weight = torch.nn.Parameter(torch.eye(N))
    assert torch.equal(op(x), x)
    dropout = fuser.Dropout(0.5)
    dropout(x)
    assert torch.equal(dropout.eval()(x), x)
    twin = copy.deepcopy(op)
    assert torch.equal(twin(x), x)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(op(x), x)
    assert not twin(x).any()
