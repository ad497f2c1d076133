"""Grouped layers, routers and permutations inside torch.compile: whole graphs, and their bits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from needs import needs_compiler
from one_launch_experts import one_by_one
from pipeline_kernels import on_kernels
from said import said
from test_compiled import (
    CURRENT,
    DELAYED,
    MXFP8,
    RECIPES,
    _nothing_compiled_yet,
    assert_equal,
    graphs,
    step,
    under,
    whole,
)
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import moe
from fuser import recipe as recipes
from fuser.errors import InputError
from fuser.fused_ops import GroupedMLP
from fuser.runtime import traced

__all__ = ["_nothing_compiled_yet"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

G, K, F, T = 4, 64, 96, 80
BF16 = torch.bfloat16
TOGETHER = {name: recipe for name, recipe in RECIPES.items() if "rowwise" not in name}
EVERY_RECIPE = pytest.mark.parametrize(
    "recipe", [*TOGETHER.values(), DELAYED], ids=[*TOGETHER, "delayed"]
)


def experts(**options: Any) -> fuser.Sequential:
    torch.manual_seed(0)
    bias = options.pop("bias", False)
    return fuser.Sequential(
        fuser.GroupedLinear(G, K, 2 * F, bias=bias, scale_bias=bias, **options),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(G, F, K, bias=bias, **options),
    )


class Experts(torch.nn.Module):
    """Experts over rows that are sorted already."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.experts = experts(**options)
        self.has_scaled_bias = bool(options.get("bias"))

    def forward(self, x: torch.Tensor, scales: torch.Tensor, sizes: torch.Tensor) -> Any:
        of_bias = (scales,) if self.has_scaled_bias else ()
        return self.experts(x, sizes, *of_bias, scales, sizes)


class Layer(torch.nn.Module):
    """A whole layer: router, experts in a pipeline with the dispatch, or between functions."""

    def __init__(self, kind: str, capacity: int | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.capacity = kind, capacity
        self.router = moe.Router(K, G, 2, aux_loss_coefficient=0.1, device="cpu")
        self.experts = experts(**options)
        if kind == "ops":
            dispatch = fuser.MoeDispatch(G, capacity=capacity)
            for index, channel in enumerate(("sizes", "probs", "rows")):
                dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
            up, activation, down = self.experts
            up.set_extra_input_channel(0, "sizes")
            activation.set_extra_input_channel(0, "probs")
            down.set_extra_input_channel(0, "sizes")
            combine = fuser.MoeCombine().set_extra_input_channel(0, "rows")
            self.experts = fuser.Sequential(dispatch, up, activation, down, combine)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.router(x)
        if self.kind == "ops":
            y = self.experts(x, found.expert_indices, found.probs)
        else:
            in_rows = found.probs if self.kind == "probs of rows" else None
            rows = moe.permute(
                x, found.expert_indices, in_rows, num_experts=G, capacity=self.capacity
            )
            ones = torch.ones(rows.x.shape[0])
            y = self.experts(
                rows.x,
                rows.split_sizes,
                ones if rows.probs is None else rows.probs,
                rows.split_sizes,
            )
            y = moe.unpermute(y, rows, probs=None if in_rows is not None else found.probs)
        return y, found.load_balancing_loss.view(1)


def tokens(count: int = T, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, K, generator=torch.Generator().manual_seed(count)).to(dtype)


def sizes(*each: int) -> torch.Tensor:
    return torch.tensor(each)


FEW = [None, CURRENT, DELAYED, TOGETHER["nvfp4 high_precision"]]
OTHERS: list[dict[str, Any]] = [{"bias": True, "dtype": BF16}, {"single_grouped_weight": True}]


@EVERY_RECIPE
def test_a_compiled_step_has_the_bits_of_an_eager_one(recipe: Any) -> None:
    check_steps(recipe, {})


@pytest.mark.parametrize("options", OTHERS, ids=["biases", "one weight"])
@pytest.mark.parametrize(
    "recipe", [None, CURRENT, DELAYED, RECIPES["nvfp4 high_precision"]], ids=str
)
def test_so_has_one_with_biases_and_one_with_a_single_weight(recipe: Any, options: Any) -> None:
    check_steps(recipe, options)


def check_steps(recipe: Any, options: dict[str, Any]) -> None:
    x, scales = tokens(dtype=options.get("dtype", torch.float32)), torch.rand(T)
    found = []
    for function in (lambda model: model, whole):
        model = Experts(**options)
        call = functools.partial(function(model), sizes=sizes(20, 0, 33, 20))
        with under(recipe):
            found.append([step(call, model, x, scales) for _ in range(2)])
    for one, other in zip(*found, strict=True):
        assert_equal(one, other)
    assert graphs() == 1


KINDS = ("ops", "probs of rows", "probs of sums")


@pytest.mark.parametrize("capacity", [None, 100], ids=["no capacity", "capacity"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=str)
def test_a_whole_layer_is_one_graph(recipe: Any, kind: str, capacity: int | None) -> None:
    model = Layer(kind, capacity)
    with under(recipe):
        expected = step(model, model, tokens())
        assert_equal(step(whole(model), model, tokens()), expected)
    assert graphs() == 1


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_compiles_a_whole_layer(kind: str) -> None:
    """Its own code for the router rounds otherwise."""
    model = Layer(kind)
    expected = step(model, model, tokens())
    for one, other in zip(step(whole(model, "inductor"), model, tokens()), expected, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_other_split_sizes_are_the_same_graph_and_no_pass_keeps_those_of_another() -> None:
    model = Experts()
    compiled = whole(model)
    given = [(tokens(), sizes(20, 0, 33, 20)), (-tokens(), sizes(1, 70, 0, 9))]
    found = []
    for function in (model, compiled):
        model.zero_grad()
        inputs = [(x.clone().requires_grad_(), each) for x, each in given]
        outputs = [function(x, torch.ones(T), each) for x, each in inputs]
        for y in reversed(outputs):  # forward, forward, backward, backward
            y.square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        found.append([*(y.detach() for y in outputs), *(x.grad for x, _ in inputs), *gradients])
    assert_equal(found[1], found[0])
    assert graphs() == 1


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["ops", "probs of rows"])
@pytest.mark.parametrize("recipe", [None, CURRENT, MXFP8, DELAYED], ids=str)
def test_ten_numbers_of_tokens_are_two_graphs(recipe: Any, kind: str) -> None:
    model, twin = Layer(kind), Layer(kind)
    compiled = whole(model)
    for count in range(8, 48, 4):
        with under(recipe):
            expected = step(twin, twin, tokens(count))
            assert_equal(step(compiled, model, tokens(count)), expected)
    assert graphs() <= 2


def test_two_layers_of_one_structure_share_a_graph_and_not_their_weights() -> None:
    layers = [Layer("ops"), Layer("ops")]
    with torch.no_grad():
        for parameter in layers[1].parameters():
            parameter.mul_(0.5)
    expected = [step(layer, layer, tokens()) for layer in layers]
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for layer, each in zip(layers, expected, strict=True):
        assert_equal(step(layer, layer, tokens()), each)


def test_weights_that_are_no_longer_one_buffer_are_read() -> None:
    model = Experts()
    of = functools.partial(functools.partial, sizes=sizes(20, 0, 33, 20))
    given = (model, tokens(), torch.ones(T))
    compiled, eager = of(whole(model)), of(model)
    assert_equal(step(compiled, *given), step(eager, *given))
    up = model.experts[0]
    up.weight1 = torch.nn.Parameter(torch.randn_like(up.weight1))
    assert_equal(step(compiled, *given), step(eager, *given))


def apart() -> fuser.Sequential:
    model = experts()
    for linear in (model[0], model[2]):
        for name, weight in list(linear.named_parameters()):
            setattr(linear, name, torch.nn.Parameter(weight.detach().clone()))
    return model


def tied() -> fuser.Sequential:
    model = experts()
    model[0].weight2 = model[0].weight1
    return model


PAIRS = ((experts, apart), (tied, experts))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " ".join(f.__name__ for f in pair))
def test_experts_of_one_graph_whose_weights_share_other_memory_are_traced_apart(pair: Any) -> None:
    """Sizes, strides, dtypes and devices are equal."""
    models = torch.nn.ModuleList(make() for make in pair)
    each = sizes(20, 0, 33, 20)

    def call(x: torch.Tensor) -> Any:
        return tuple(model(x, each, torch.ones(T), each) for model in models)

    assert_equal(step(whole(call), models, tokens()), step(call, models, tokens()))


def test_gradients_of_experts_are_one_tensor_in_memory() -> None:
    """The passes return them as one result, and not as copies."""
    model = Experts()
    call = functools.partial(whole(model), sizes=sizes(20, 0, 33, 20))
    step(call, model, tokens(), torch.ones(T))
    up = model.experts[0]
    storages = {getattr(up, f"weight{g}").grad.untyped_storage().data_ptr() for g in range(G)}
    assert len(storages) == 1


def test_split_sizes_of_two_tensors_are_not_taken_for_one() -> None:
    model = experts()

    def call(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> Any:
        return model(x, one, torch.ones(T), other)

    compiled, first = torch.compile(call, backend="aot_eager", fullgraph=True), sizes(20, 0, 33, 20)
    for recipe in (None, recipes.MXFP8BlockScaling()):
        with under(recipe):
            for other in (first, first.clone()):
                assert torch.equal(compiled(tokens(), first, other), call(tokens(), first, other))
            with pytest.raises(
                InputError,
                match=said(
                    "shared-sizes-grouped-mlp-ops", None, None, "20, 0, 33, 20", "1, 2, 3, 4"
                ),
            ):
                compiled(tokens(), first, sizes(1, 2, 3, 4))


def test_split_sizes_of_one_tensor_find_the_groups_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[Any] = []
    one_by_one = GroupedMLP._one_by_one

    def noted(self: GroupedMLP, *args: Any) -> Any:
        alone.append(args)
        return one_by_one(self, *args)

    monkeypatch.setattr(GroupedMLP, "_one_by_one", noted)
    model, first = experts(), sizes(20, 0, 33, 20)
    compiled = whole(model)
    for other in (first, first.clone()):
        compiled(tokens(), first, torch.ones(T), other)
        assert bool(alone) == (other is not first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_computes_the_same_again(kind: str) -> None:
    model = Layer(kind)
    expected = step(model, model, tokens())

    def checkpointed(x: torch.Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False)

    assert_equal(step(whole(checkpointed), model, tokens()), expected)


def test_on_kernels() -> None:
    for recipe in (None, recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()):
        model = Layer("ops", dtype=BF16, device="cpu")
        with on_kernels(), under(recipe):
            expected = [step(model, model, tokens(dtype=BF16)) for _ in range(3)]
            compiled = whole(model)
            for one in expected:
                assert_equal(step(compiled, model, tokens(dtype=BF16)), one)


def test_the_dtype_of_its_own_weights_decides_whether_a_layer_reads_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Hopper; of layers of one structure, whose pipelines share a copy; or torch's autocast."""
    monkeypatch.setattr(traced, "architecture", lambda device: (9, 0))
    fp32 = torch.float32
    for dtype, name, is_autocast in (
        *((BF16, "forward", False), (fp32, "host_forward", False), (BF16, "forward", False)),
        (fp32, "forward", True),
    ):
        model = Experts(dtype=dtype)
        graphs = torch._dynamo.testing.EagerAndRecordGraphs()
        call = torch.compile(model, backend=graphs, fullgraph=True)
        with torch.autocast("cpu", dtype=BF16, enabled=is_autocast):
            call(tokens(dtype=dtype), torch.ones(T), sizes(20, 0, 33, 20))
        targets = [str(node.target) for node in graphs.graphs[0].graph.nodes]
        assert f"fuser.{name}" in targets


@pytest.mark.parametrize("alone", [(), (0,), (1,), (0, 1)], ids=str)
def test_the_host_waits_for_sizes_if_any_grouped_linear_does(
    alone: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, the last, both or none of two linears of one pipeline runs its groups alone."""
    waiting = [(48, K)[place] for place in alone]
    monkeypatch.setattr(
        fuser.GroupedLinear, "runs_at_once", lambda self, _: self.out_features not in waiting
    )
    model = fuser.Sequential(
        fuser.GroupedLinear(G, K, 48, bias=False), fuser.GroupedLinear(G, 48, K, bias=False)
    )
    graphs = torch._dynamo.testing.EagerAndRecordGraphs()
    each = sizes(20, 0, 33, 20)
    call = torch.compile(lambda x: model(x, each, each), backend=graphs, fullgraph=True)
    assert torch.equal(call(tokens()), model(tokens(), each, each))
    targets = [str(node.target) for node in graphs.graphs[0].graph.nodes]
    assert ("fuser.host_forward" in targets) == bool(alone)
    assert ("fuser.forward" in targets) == (not alone)


def test_bad_values_are_refused_when_the_graph_runs() -> None:
    model = experts()
    compiled = whole(model)

    def call(*each: int) -> Any:
        return compiled(tokens(), sizes(*each), torch.ones(T), sizes(*each))

    call(20, 0, 33, 20)
    with pytest.raises(InputError, match=said("grouped-sum-more-rows", 200, 80)):
        call(50, 50, 50, 50)
    with pytest.raises(InputError, match=said("grouped-split-not-negative", "-1, 0, 33, 20")):
        call(-1, 0, 33, 20)
    call(20, 0, 33, 20)
    routed = torch.compile(
        lambda x, indices: moe.permute(x, indices, num_experts=G).x,
        backend="aot_eager",
        fullgraph=True,
    )
    indices = torch.zeros(T, 2, dtype=torch.int64)
    routed(tokens(), indices)
    indices[3, 1] = 9
    with pytest.raises(InputError, match=said("routing-token-choice-0", "permute", 9, 3, 1)):
        routed(tokens(), indices)


def refused(model: Any, recipe: Any, *given: Any) -> str:
    with under(recipe), pytest.raises(torch._dynamo.exc.Unsupported) as error:
        whole(model)(*given)
    return str(error.value)


def test_groups_that_are_quantized_alone_end_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(role: Any) -> Any:
        return fuser.Float8CurrentScalingQuantizer()

    given = (tokens(), sizes(20, 0, 33, 20), torch.ones(T), sizes(20, 0, 33, 20))
    text = refused(experts(), recipes.CustomRecipe(qfactory=factory), *given)
    assert "GroupedLinear quantizes each group alone, and split sizes decide what it keeps" in text
    one_by_one(monkeypatch)
    text = refused(experts(), recipes.MXFP8BlockScaling(), *given)
    assert "GroupedLinear quantizes each group alone" in text
    model = experts()
    with under(recipes.MXFP8BlockScaling()):
        broken = torch.compile(model, backend="aot_eager")
        assert torch.equal(broken(*given), model(*given))
