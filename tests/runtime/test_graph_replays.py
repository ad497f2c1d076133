"""Replays of graphed modules against the same modules without a graph, on a stand-in for graphs."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cpu_graphs
import pytest
import torch
from said import holds, said

import fuser
from fuser import recipe as recipes
from fuser.runtime.graphed import GraphedForward, GraphMemory

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is emulated", "error:Graphed module"),
    pytest.mark.sampled(most=12),
]

BF16 = torch.bfloat16
SHAPE = (6, 8)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_graphs.use_stand_in(monkeypatch)


def mlp() -> torch.nn.Sequential:
    """A model of torch alone: nothing that it computes is of this library."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))


def pipeline() -> fuser.Sequential:
    return fuser.Sequential(fuser.Linear(8, 16), fuser.GELU(), fuser.Linear(16, 8))


def sample(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(SHAPE, requires_grad=requires_grad)


def graphed(module: torch.nn.Module, **options: Any) -> tuple[Any, Any]:
    """The module with a graph, and a copy without one."""
    other = copy.deepcopy(module)
    fuser.make_graphed_callables(module, (sample(),), **options)
    return module, other


def graph_of(module: torch.nn.Module) -> Any:
    forward = module.forward
    assert isinstance(forward, GraphedForward)
    return forward._graph


def replays(module: torch.nn.Module) -> int:
    count: int = graph_of(module)._forward_graph.replays
    return count


def results(module: torch.nn.Module, x: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    """Output and gradients of one step, in memory of their own; ``.grad`` is empty afterwards."""
    x = x.detach().clone().requires_grad_()
    y = module(x)
    (scale * y.float().square()).sum().backward()
    tensors = [y, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]
    module.zero_grad()
    return [tensor.detach().clone() for tensor in tensors if tensor is not None]


def assert_equal(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)


def assert_replayed(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """A step of the graph has the bits of a step without one."""
    before, x = replays(module), torch.randn(SHAPE)
    assert_equal(results(module, x), results(other, x))
    assert replays(module) == before + 1


def assert_runs_itself(module: torch.nn.Module, other: torch.nn.Module) -> None:
    before, x = replays(module), torch.randn(SHAPE)
    assert_equal(results(module, x), results(other, x))
    assert replays(module) == before


# -- changes after the capture ----------------------------------------------------


def replaced(model: Any) -> None:
    model[0].weight = torch.nn.Parameter(2 * model[0].weight.detach())


def data_set(model: Any) -> None:
    model[0].weight.data = 2 * model[0].weight.data


def assigned(model: Any) -> None:
    values = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def frozen(model: Any) -> None:
    model[2].bias.requires_grad_(False)


def bias_removed(model: Any) -> None:
    model[2].bias = None


def activation_replaced(model: Any) -> None:
    model[1] = torch.nn.ReLU()


def layer_added(model: Any) -> None:
    model.append(torch.nn.Tanh())


def buffer_added(model: Any) -> None:
    model[1].register_buffer("offset", torch.ones(16))


def parameter_added(model: Any) -> None:
    model[1].gain = torch.nn.Parameter(torch.ones(16))


def module_added_below(model: Any) -> None:
    model[1].inner = torch.nn.Tanh()


def parametrized(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model[0])


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "replaced": (
        replaced,
        said(
            "graphed-runs-because-since",
            "Graphed module 0 (Sequential)",
            "'0.weight' is in other memory",
        ),
    ),
    "data": (
        data_set,
        said(
            "graphed-runs-because-since",
            "Graphed module 0 (Sequential)",
            "'0.weight' is in other memory",
        ),
    ),
    "assigned": (
        assigned,
        said(
            "graphed-runs-because-since",
            "Graphed module 0 (Sequential)",
            holds("is in other memory"),
        ),
    ),
    "frozen": (
        frozen,
        said(
            "graphed-runs-because-since",
            "Graphed module 0 (Sequential)",
            "the requires_grad of '2.bias' was True and is False",
        ),
    ),
    "bias removed": (
        bias_removed,
        said("graphed-runs-because-since", "Graphed module 0 (Sequential)", "'2.bias' was removed"),
    ),
    "module": (
        activation_replaced,
        said(
            "graphed-runs-because-since",
            "Graphed module 0 (Sequential)",
            "a module in it was added, removed or replaced",
        ),
    ),
    "added": (
        layer_added,
        said(
            "graphed-runs-because-since",
            "Graphed module 0 (Sequential)",
            "a module in it was added, removed or replaced",
        ),
    ),
    "buffer added": (
        buffer_added,
        said("graphed-runs-because-since", "Graphed module 0 (Sequential)", "'1.offset' was added"),
    ),
    "parameter added": (
        parameter_added,
        said("graphed-runs-because-since", "Graphed module 0 (Sequential)", "'1.gain' was added"),
    ),
    "added below": (
        module_added_below,
        said(
            "graphed-runs-because-since",
            "Graphed module 0 (Sequential)",
            "a module in it was added, removed or replaced",
        ),
    ),
    "parametrized": (
        parametrized,
        said(
            "graphed-runs-because-since",
            "Graphed module 0 (Sequential)",
            "a module in it was added, removed or replaced",
        ),
    ),
}


@pytest.mark.parametrize(("change", "sentence"), CHANGES.values(), ids=CHANGES)
def test_a_changed_module_runs_without_its_graph_and_says_what_changed(
    change: Callable[[Any], None], sentence: str
) -> None:
    model, other = graphed(mlp())
    assert_replayed(model, other)
    for each in (model, other):
        torch.manual_seed(1)
        change(each)
    with pytest.warns(fuser.FuserWarning, match=sentence):
        assert_runs_itself(model, other)
    assert_runs_itself(model, other)  # and warns once


def test_a_module_of_another_dtype_runs_without_its_graph() -> None:
    model, other = graphed(mlp())
    x = torch.randn(SHAPE, dtype=torch.float64)
    for each in (model, other):
        each.double()
    with pytest.warns(
        fuser.FuserWarning,
        match=said(
            "graphed-runs-because-since",
            None,
            holds("the dtype of '0.weight' was torch.float32 and is"),
        ),
    ):
        assert_equal(results(model, x), results(other, x))


def test_an_unfrozen_parameter_gets_its_gradient() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model, other = graphed(model)
    assert_replayed(model, other)
    for each in (model, other):
        each[0].weight.requires_grad_(True)
    with pytest.warns(
        fuser.FuserWarning,
        match=said(
            "graphed-runs-because-since",
            None,
            "the requires_grad of '0.weight' was False and is True",
        ),
    ):
        assert_runs_itself(model, other)


def test_a_change_that_is_undone_ends_with_the_graph_in_use() -> None:
    model, other = graphed(mlp())
    weight = model[0].weight.data
    model[0].weight.data = weight.clone()
    with pytest.warns(
        fuser.FuserWarning,
        match=said("graphed-runs-because-since", None, holds("is in other memory")),
    ):
        assert_runs_itself(model, other)
    model[0].weight.data = weight
    assert_replayed(model, other)


def test_a_buffer_in_other_memory_is_noticed() -> None:
    model, other = graphed(torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(8)))
    assert_replayed(model, other)
    assert_equal(list(model.buffers()), list(other.buffers()))  # a replay writes them
    for each in (model, other):
        each[1].running_mean = each[1].running_mean + 1
    with pytest.warns(
        fuser.FuserWarning,
        match=said("graphed-runs-because-since", None, "'1.running_mean' is in other memory"),
    ):
        assert_runs_itself(model, other)
    assert_equal(list(model.buffers()), list(other.buffers()))


def test_an_attribute_of_an_op_that_was_set_is_followed() -> None:
    model, other = graphed(fuser.Sequential(fuser.ConstantScale(2.0), fuser.Linear(8, 8)))
    assert_replayed(model, other)
    model[0].scale = other[0].scale = 5.0
    with pytest.warns(
        fuser.FuserWarning,
        match=said("graphed-runs-because-since", None, "the attribute 'scale' of '0' was set"),
    ):
        assert_runs_itself(model, other)
    x = sample(requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = model(x)
    linear = model[1].basic_ops
    expected = 5 * x.double() @ linear[0].weight.double().T + linear[1].bias.double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    model[0].scale = other[0].scale = 2.0
    assert_replayed(model, other)


def test_a_parameter_of_a_layer_that_was_replaced_is_followed() -> None:
    layer = fuser.modules.LayerNormLinear(8, 8, params_dtype=torch.float32)
    model, other = graphed(layer)
    assert_replayed(model, other)
    for each in (model, other):
        each.weight = torch.nn.Parameter(each.weight.detach() * 2)
    with pytest.warns(
        fuser.FuserWarning,
        match=said("graphed-runs-because-since", None, "'weight' is in other memory"),
    ):
        assert_runs_itself(model, other)


@pytest.mark.parametrize("make", [mlp, pipeline])
def test_evaluation_runs_the_module_itself_and_training_the_graph_again(
    make: Callable[[], torch.nn.Module],
) -> None:
    model, other = graphed(make())
    for _ in range(2):
        for each in (model, other):
            each.eval()
        assert_runs_itself(model, other)
        for each in (model, other):
            each.train()
        assert_replayed(model, other)


def test_a_part_in_evaluation_is_followed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    fuser.make_graphed_callables(model, (sample(),))
    model[1].eval()
    x = torch.randn(SHAPE)
    with pytest.warns(
        fuser.FuserWarning, match=said("graphed-runs-because-since", None, "'1' has training=False")
    ):
        y = model(x)
    torch.testing.assert_close(y, x @ model[0].weight.T + model[0].bias)


# -- copies ------------------------------------------------------------------------


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_a_file(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [mlp, pipeline, lambda: fuser.Linear(8, 8)])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
def test_a_copy_computes_with_its_own_parameters(
    copied: Callable[[Any], Any], make: Callable[[], Any]
) -> None:
    model, other = graphed(make())
    twin = copied(copied(model))
    for each in (twin, other):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(2)
    before, x = replays(model), torch.randn(SHAPE)
    assert_equal(results(twin, x), results(other, x))
    assert replays(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    fuser.make_graphed_callables(twin, (sample(),))
    assert_replayed(twin, other)


# -- modes -------------------------------------------------------------------------


def test_without_gradients_the_module_itself_runs_and_records_no_amax() -> None:
    recipe = recipes.DelayedScaling(amax_history_len=3)
    model, other = graphed(pipeline(), recipe=recipe)
    x = torch.randn(SHAPE)
    for _ in range(2):
        with fuser.autocast(recipe=recipe):
            assert_replayed(model, other)
        before = replays(model)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context, fuser.autocast(recipe=recipe):
                assert torch.equal(model(8 * x), other(8 * x))
        assert replays(model) == before
        assert_equal(list(model.state_dict().values()), list(other.state_dict().values()))


def test_a_module_captured_without_gradients_runs_itself_where_they_are_computed() -> None:
    model, other = mlp(), None
    other = copy.deepcopy(model)
    with torch.no_grad():
        fuser.make_graphed_callables(model, (sample(requires_grad=False),))
        x = torch.randn(SHAPE)
        assert torch.equal(model(x), other(x))
    assert replays(model) == 1
    assert_runs_itself(model, other)


@pytest.mark.parametrize(
    ("captured", "called"),
    [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)],
)
def test_a_graph_is_for_inference_mode_or_for_no_grad_and_not_for_both(
    captured: Any, called: Any
) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    x = torch.randn(SHAPE)
    with captured():
        fuser.make_graphed_callables(model, (sample(requires_grad=False),))
        model(x)
    assert replays(model) == 1
    with called():
        found, wanted = model(x), other(x)
    assert replays(model) == 1
    assert torch.equal(found, wanted)
    assert found.is_inference() == wanted.is_inference()


def test_within_another_capture_the_module_itself_is_captured() -> None:
    inner, other = graphed(mlp())
    outer = torch.nn.Sequential(inner, torch.nn.Tanh())
    fuser.make_graphed_callables(outer, (sample(),))
    assert replays(inner) == 0
    before = replays(inner)
    assert_replayed(outer, torch.nn.Sequential(other, torch.nn.Tanh()))
    assert replays(inner) == before
    graph = cpu_graphs.StandIn()
    with cpu_graphs.capture(graph), torch.no_grad():
        inner(sample(requires_grad=False))
    assert replays(inner) == before


def test_a_second_capture_replaces_the_first() -> None:
    model, other = graphed(mlp())
    model[0].weight.data = 2 * model[0].weight.data
    other[0].weight.data = 2 * other[0].weight.data
    fuser.make_graphed_callables(model, (sample(),))
    assert_replayed(model, other)


def test_a_second_capture_drops_the_first_graph_also_for_calls_in_its_mode() -> None:
    model, other = graphed(mlp())
    first, first_graph = weakref.ref(graph_of(model)), graph_of(model)._forward_graph
    model.eval()
    fuser.make_graphed_callables(model, (sample(),))
    model.train()
    assert_runs_itself(model, other)
    assert first_graph.replays == 0
    gc.collect()
    assert first() is None


def test_a_forward_that_was_set_on_a_module_is_the_one_that_runs_after_two_captures() -> None:
    model = mlp()
    whole = model.forward
    model.forward = lambda x: 2 * whole(x)  # type: ignore[method-assign]
    for _ in range(2):
        fuser.make_graphed_callables(model, (sample(),))
    x = torch.randn(SHAPE)
    assert torch.equal(model(x), 2 * whole(x))
    assert replays(model) == 1
    model.eval()
    assert torch.equal(model(x), 2 * whole(x))
    assert replays(model) == 1


@pytest.mark.parametrize("is_cached", [True, False])
def test_under_autocast_of_torch_a_graph_casts_the_present_weights(is_cached: bool) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    x = torch.randn(SHAPE)
    with torch.autocast("cpu", BF16, cache_enabled=is_cached):
        model(x)  # its cast weights are in the cache
        fuser.make_graphed_callables(model, (sample(),))
        assert torch.is_autocast_cache_enabled() is is_cached
    for _ in range(2):
        before = replays(model)
        found = []
        for each in (model, other):
            with torch.autocast("cpu", BF16):
                y = each(x)
            assert y.dtype is BF16
            y.float().square().sum().backward()
            found.append([y.detach().clone(), *(p.grad.clone() for p in each.parameters())])
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.add_(parameter.grad)
            each.zero_grad()
        assert_equal(*found)
        assert replays(model) == before + 1
    assert_runs_itself(model, other)  # outside of torch's autocast


# -- forwards and backwards ----------------------------------------------------------


def test_a_forward_whose_saved_tensors_were_overwritten_has_no_backward() -> None:
    model, other = graphed(mlp())
    first, second = model(sample()), model(sample())
    second.sum().backward()
    with pytest.raises(fuser.StateError, match=said("graphed-comes-too-late")):
        first.sum().backward()
    model.zero_grad()
    assert_replayed(model, other)


def test_a_backward_runs_once() -> None:
    model, other = graphed(mlp())
    y = model(sample())
    y.sum().backward(retain_graph=True)
    with pytest.raises(fuser.StateError, match=said("graphed-comes-too-late")):
        y.sum().backward()
    model.zero_grad()
    assert_replayed(model, other)


def test_a_second_derivative_is_refused() -> None:
    model, _ = graphed(mlp())
    x = sample()
    with pytest.raises(fuser.StateError, match=said("graphed-differentiated-twice-asked")):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_a_call_without_gradients_between_forward_and_backward_changes_nothing() -> None:
    model, other = graphed(mlp())
    x = torch.randn(SHAPE)
    expected = results(other, x)
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    output = y.detach().clone()
    with torch.no_grad():
        model(torch.randn(SHAPE))
    y.square().sum().backward()
    found = [output, leaf.grad, *(p.grad for p in model.parameters())]
    assert_equal(found, expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_modules_captured_together_run_in_their_order_or_are_refused(
    order: tuple[int, ...],
) -> None:
    blocks = [mlp() for _ in range(3)]
    others = copy.deepcopy(blocks)
    fuser.make_graphed_callables(tuple(blocks), tuple((sample(),) for _ in blocks))
    for block, other in zip(blocks[::-1], others[::-1], strict=True):
        assert_replayed(block, other)  # alone
    x = torch.randn(SHAPE)
    chosen = [[every[place] for place in order] for every in (blocks, others)]
    whole = [torch.nn.Sequential(*every) for every in chosen]
    if order == (0, 1, 2):
        assert_equal(results(whole[0], x), results(whole[1], x))
    else:  # a graph of an earlier place may overwrite what a later one saved
        with pytest.raises(fuser.StateError, match=said("graphed-comes-too-late")):
            results(whole[0], x)


def test_a_graph_of_a_shared_pool_overwrites_what_an_earlier_capture_saved() -> None:
    pool = torch.cuda.graph_pool_handle()
    first, other = graphed(mlp(), pool=pool)
    second, _ = graphed(mlp(), pool=pool)
    y = first(sample())
    second(sample())
    with pytest.raises(
        fuser.StateError, match=said("graphed-comes-too-late", None, holds("Graphed module 0"))
    ):
        y.sum().backward()
    first.zero_grad()
    assert_replayed(first, other)


@pytest.mark.parametrize(
    ("replayed", "is_valid"),
    [
        ([], True),
        ([2], True),
        ([2, 3, 5, 6], True),
        ([1], False),  # the forward of the same graph
        ([0], False),  # captured before
        ([8], False),  # captured after
    ],
)
def test_only_graphs_captured_between_a_forward_and_its_backward_leave_its_memory_alone(
    replayed: list[int], is_valid: bool
) -> None:
    memory = GraphMemory()
    memory.replays(1, "itself")
    saved = memory.saves(1, 7)
    for place in replayed:
        memory.replays(place, "other")
    assert (saved.overwritten_by is None) is is_valid
    memory.replays(7, "itself")
    assert saved.overwritten_by is not None


@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_a_parameter_written_between_forward_and_backward_is_refused(name: str) -> None:
    model, other = graphed(mlp())
    y = model(sample())
    with torch.no_grad():
        model.get_parameter(name).mul_(1.0)
    with pytest.raises(fuser.StateError, match="changed in place between forward and backward"):
        y.sum().backward()
    assert_replayed(model, other)


def test_a_parameter_moved_between_forward_and_backward_is_refused() -> None:
    model, _ = graphed(mlp())
    y = model(sample())
    model[2].weight.data = model[2].weight.data.clone()
    with pytest.raises(
        fuser.StateError,
        match=said("graphed-between-forward-memory", None, holds("'2.weight' is in")),
    ):
        y.sum().backward()


# -- gradients ---------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up_over_replays(set_to_none: bool) -> None:
    model, other = graphed(mlp())
    for _ in range(2):
        for scale in (1.0, 2.0, 4.0):
            x = torch.randn(SHAPE)
            for each in (model, other):
                (scale * each(x.clone().requires_grad_())).square().sum().backward()
        found = [[p.grad for p in each.parameters()] for each in (model, other)]
        assert_equal(*found)
        for each in (model, other):
            each.zero_grad(set_to_none=set_to_none)
    assert replays(model) == 6


def test_a_leaf_keeps_its_gradient_when_the_graph_is_replayed() -> None:
    model, other = graphed(mlp())
    x, same = sample(), None
    same = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    other(same).square().sum().backward()
    kept = [x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    for _ in range(2):
        results(model, torch.randn(SHAPE))
    assert_equal([x.grad], [same.grad])
    assert_equal(kept[1:], [p.grad for p in other.parameters()])


@pytest.mark.parametrize("trained", [0, 1, 4], ids=["none", "the first", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_graph_has_the_gradients_of_the_parameters_that_are_trained(
    trained: int, dtype: torch.dtype
) -> None:
    model = mlp().to(dtype)
    for parameter in [*model.parameters()][trained:]:
        parameter.requires_grad_(False)
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample().detach().to(dtype).requires_grad_(),))
    for _ in range(2):
        x = torch.randn(SHAPE, dtype=dtype)
        found = results(model, x)
        assert [tensor.dtype for tensor in found] == [dtype] * (2 + trained)
        assert_equal(found, results(other, x))
    assert replays(model) == 2


def test_each_replay_returns_a_tensor_of_its_own() -> None:
    model, _ = graphed(mlp())
    first, second = model(sample()), model(sample())
    assert first is not second
    assert first.grad_fn is not second.grad_fn
    still = torch.nn.Linear(8, 8)
    with torch.no_grad():
        fuser.make_graphed_callables(still, (sample(False),))
        found = [still(sample(False)) for _ in range(2)]
        found[0].requires_grad_()
        assert found[0] is not found[1]
        assert not found[1].requires_grad


class OfPairs(torch.nn.Module):
    """Takes a tuple and a dictionary of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, pair: Any, named: Any) -> torch.Tensor:
        y: torch.Tensor = self.inner(pair[0]) * pair[1] + named["scale"]
        return y


def test_a_graph_takes_tensors_in_tuples_and_dictionaries() -> None:
    def given() -> Any:
        return (sample(), sample()), {"scale": sample()}

    model = OfPairs()
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, given())
    for _ in range(2):
        pair, named = given()
        assert_equal([model(pair, named)], [other(pair, named)])
    assert replays(model) == 2
    with pytest.raises(fuser.InputError, match="captured with 3 tensors, and got 2"):
        model((sample(),), {"scale": sample()})


class Marking(torch.nn.Module):
    """Sets an attribute of a weight at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = fuser.BasicLinear(8, 8, accumulate_into_main_grad=True)
        self.linear.weight.main_grad = torch.zeros(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.is_marked = True
        y: torch.Tensor = self.linear(x)
        return y


def test_attributes_that_a_capture_gave_to_a_weight_are_gone_after_it() -> None:
    model = Marking()
    before = dict(vars(model.linear.weight))
    fuser.make_graphed_callables(model, (sample(),))
    assert vars(model.linear.weight).keys() == before.keys()


def test_gradients_of_autograd_grad_are_the_callers() -> None:
    model, other = graphed(mlp())
    x = sample()
    wanted = [torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (other,)]
    grads = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    results(model, torch.randn(SHAPE))
    assert_equal(list(grads), list(wanted[0]))


def test_two_graphed_modules_that_share_a_parameter_add_their_gradients() -> None:
    blocks = [mlp() for _ in range(2)]
    blocks[1][2].weight = blocks[0][2].weight
    others = copy.deepcopy(blocks)
    assert others[1][2].weight is others[0][2].weight
    fuser.make_graphed_callables(tuple(blocks), tuple((sample(),) for _ in blocks))
    for _ in range(2):
        x = torch.randn(SHAPE)
        whole = [torch.nn.Sequential(*each) for each in (blocks, others)]
        assert_equal(results(whole[0], x), results(whole[1], x))
    assert replays(blocks[0]) == replays(blocks[1]) == 2


# -- main_grad -----------------------------------------------------------------------


class Accumulating:
    """A linear that adds its weight gradient to ``main_grad``, and the sum that is right."""

    def __init__(self, **options: Any) -> None:
        self.model = fuser.Sequential(
            fuser.BasicLinear(8, 8, dtype=BF16, accumulate_into_main_grad=True),
            fuser.Bias(8, dtype=BF16),
        )
        self.weight: Any = self.model[0].weight
        self.weight.main_grad = torch.ones(8, 8)
        self.expected = torch.ones(8, 8, dtype=torch.float64)
        for name, value in options.items():
            setattr(self.weight, name, value)

    def sample(self) -> torch.Tensor:
        return torch.randn(SHAPE, dtype=BF16, requires_grad=True)

    def step(self) -> None:
        x = self.sample()
        y = self.model(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        self.expected += grad.double().T @ x.detach().double()

    def check(self) -> None:
        torch.testing.assert_close(self.weight.main_grad.double(), self.expected, rtol=0, atol=1e-5)


def accumulating(**options: Any) -> Accumulating:
    made = Accumulating(**options)
    before = dict(vars(made.weight))
    fuser.make_graphed_callables(made.model, (made.sample(),))
    assert dict(vars(made.weight)) == before
    made.check()  # the capture leaves nothing
    return made


def test_weight_gradients_are_added_to_main_grad_in_replays() -> None:
    one = accumulating()
    for count in range(1, 4):
        one.step()
        one.check()
        assert one.weight.grad is None
        assert replays(one.model) == count
    assert one.model[1].bias.grad is not None


def test_main_grad_is_overwritten_in_replays_if_the_weight_says_so() -> None:
    one = accumulating(overwrite_main_grad=True)
    for _ in range(2):
        one.expected = torch.zeros(8, 8, dtype=torch.float64)
        one.step()
        one.check()
    assert replays(one.model) == 2
    one.weight.overwrite_main_grad = False
    with pytest.warns(
        fuser.FuserWarning,
        match=said("graphed-runs-because-since", None, "overwrite_main_grad of a weight was set"),
    ):
        one.step()
    one.check()
    assert replays(one.model) == 2


def test_a_replay_notes_that_a_gradient_was_added() -> None:
    one = accumulating(grad_added_to_main_grad=False, zero_out_wgrad=True)
    one.step()
    assert one.weight.grad_added_to_main_grad is True
    assert torch.equal(one.weight.grad, torch.zeros(8, 8, dtype=BF16))
    one.check()


def test_another_main_grad_is_followed() -> None:
    one = accumulating()
    one.weight.main_grad = one.weight.main_grad.clone()
    with pytest.warns(fuser.FuserWarning, match="'0.weight.main_grad' is in other memory"):
        one.step()
    one.check()
    assert replays(one.model) == 0


def test_a_main_grad_that_is_replaced_before_the_backward_is_refused() -> None:
    one = accumulating()
    y = one.model(one.sample())
    one.weight.main_grad = one.weight.main_grad.clone()
    with pytest.raises(fuser.StateError, match=r"'0.weight.main_grad' is in other memory"):
        y.sum().backward()
    one.check()


def test_a_gradient_that_is_added_in_the_graph_cannot_be_asked_for() -> None:
    """Nor another gradient alone: the graph would add this one to main_grad."""
    one = accumulating()
    y = one.model(one.sample())
    for ask in (
        lambda: torch.autograd.grad(y.sum(), [one.weight], retain_graph=True),
        lambda: y.sum().backward(inputs=[one.model[1].bias]),
    ):
        with pytest.raises(fuser.StateError, match=said("graphed-adds-weight-gradients")):
            ask()
        one.check()
    one.step()
    one.check()


# -- delayed scaling -------------------------------------------------------------------


def trained(model: torch.nn.Module, recipe: Any, scales: list[float]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for seed, scale in enumerate(scales):
        torch.manual_seed(seed)
        with fuser.autocast(recipe=recipe):
            tensors += results(model, scale * torch.randn(SHAPE))
    return [*tensors, *model.state_dict().values()]


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(
        fuser.modules.LayerNormLinear(8, 16, params_dtype=torch.float32),
        fuser.modules.Linear(16, 8, params_dtype=torch.float32),
    )


@pytest.mark.parametrize("make", [pipeline, layers])
@pytest.mark.parametrize("before", range(4))
def test_scales_move_in_replays_as_without_a_graph(
    make: Callable[[], torch.nn.Module], before: int
) -> None:
    recipe = recipes.DelayedScaling(amax_history_len=3)
    model = make()
    trained(model, recipe, [2.0**i for i in range(before)])
    kept = copy.deepcopy(model.state_dict())
    model, other = graphed(model, recipe=recipe)
    assert_equal(list(model.state_dict().values()), list(kept.values()))
    steps = [4.0**i for i in range(4)]
    assert_equal(trained(model, recipe, steps), trained(other, recipe, steps))
    assert replays(model) == 4


def test_replays_use_the_scales_of_a_loaded_checkpoint() -> None:
    recipe = recipes.DelayedScaling(amax_history_len=3)
    model = pipeline()
    trained(model, recipe, [1.0, 2.0])
    saved = copy.deepcopy(model.state_dict())
    model, other = graphed(model, recipe=recipe)
    for each in (model, other):
        trained(each, recipe, [64.0, 32.0])
        each.load_state_dict(saved)
    assert_equal(*(trained(each, recipe, [1.0, 8.0, 2.0]) for each in (model, other)))
    assert replays(model) == 5


@pytest.mark.parametrize("length", [2, 5])
def test_scales_survive_a_capture_under_another_recipe(length: int) -> None:
    first = recipes.DelayedScaling(amax_history_len=3)
    second = recipes.DelayedScaling(amax_history_len=length, margin=1)
    model = pipeline()
    other = copy.deepcopy(model)
    for each in (model, other):  # a copy does not know the formats of its scales
        trained(each, first, [4.0, 2.0, 1.0])
    fuser.make_graphed_callables(model, (sample(),), recipe=second)
    steps = [1.0, 8.0, 2.0]
    assert_equal(trained(model, second, steps), trained(other, second, steps))
    assert replays(model) == 3
    # Steps of the first recipe between replays, in evaluation so that the module itself runs.
    for each in (model, other):
        each.eval()
        trained(each, first, [16.0])
        each.train()
    assert_equal(trained(model, second, steps), trained(other, second, steps))
    assert replays(model) == 6


def test_microbatches_in_one_autocast_are_steps() -> None:
    recipe = recipes.DelayedScaling(amax_history_len=3)
    model, other = graphed(pipeline(), recipe=recipe)
    for each in (model, other):
        with fuser.autocast(recipe=recipe):
            for seed in range(3):
                torch.manual_seed(seed)
                each((2.0**seed * torch.randn(SHAPE)).requires_grad_()).sum().backward()
    assert_equal(*([p.grad for p in each.parameters()] for each in (model, other)))
    assert_equal(*(list(each.state_dict().values()) for each in (model, other)))


# -- arguments of calls ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), said("graphed-again-such-sample", None, 1, 0)),
        (
            (torch.ones(1, 8),),
            said("graphed-other-shapes-need", None, None, "torch.float32 (1, 8) on cpu"),
        ),
        (
            (torch.ones(SHAPE, dtype=torch.float16),),
            said("graphed-other-shapes-need", None, None, holds("torch.float16")),
        ),
        ((1.0,), said("graphed-argument-takes-tensors", None, None, "float")),
    ],
)
def test_other_arguments_than_the_samples_are_refused(args: Any, sentence: str) -> None:
    model, other = graphed(mlp())
    with pytest.raises((ValueError, TypeError), match=sentence):
        model(*args)
    assert_replayed(model, other)


def test_keywords_and_gradients_that_the_sample_did_not_need_are_refused() -> None:
    model = mlp()
    fuser.make_graphed_callables(model, (sample(requires_grad=False),))
    with pytest.raises(ValueError, match=said("graphed-needs-did-not")):
        model(sample())
    with pytest.raises(ValueError, match=said("graphed-takes-positional-arguments", None, "input")):
        model(input=sample(requires_grad=False))


def test_a_call_under_another_recipe_is_refused_and_outside_of_all_runs_as_captured() -> None:
    recipe = recipes.Float8CurrentScaling()
    model, other = graphed(pipeline(), recipe=recipe)
    x = torch.randn(SHAPE)
    with fuser.autocast(recipe=recipes.Float8CurrentScaling()):  # an equal one
        expected = results(other, x)
        assert_equal(results(model, x), expected)
    assert_equal(results(model, x), expected)
    assert replays(model) == 2
    for context in (fuser.autocast(recipe=recipes.DelayedScaling()), fuser.autocast(enabled=False)):
        with context, pytest.raises(RuntimeError, match=said("graphed-under-called-cannot")):
            model(x)


def test_a_view_of_the_samples_memory_is_read_as_it_is() -> None:
    model = torch.nn.Linear(8, 8)
    other = copy.deepcopy(model)
    square = torch.randn(8, 8)
    fuser.make_graphed_callables(model, (square,))
    for view in (square, square.t(), square.flip(0)):
        given = view.clone()
        torch.testing.assert_close(model(view), other(given))
    assert replays(model) == 3


class Multiplied(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y


def test_one_tensor_twice_in_the_sample_is_one_tensor_in_each_call() -> None:
    model, x = Multiplied(), torch.randn(SHAPE)
    fuser.make_graphed_callables(model, (x, x))
    y = torch.randn(SHAPE)
    assert torch.equal(model(y, y), y * y)
    with pytest.raises(ValueError, match=said("graphed-arguments-two-tensor", 0, 1)):
        model(y, y.clone())


@pytest.fixture(autouse=True)
def nothing_captured_is_left() -> Iterator[None]:
    yield
    assert cpu_graphs.StandIn.captured == 0
