"""Pipelines inside torch.compile: whole graphs, the bits of the eager step, and when they break."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

import every_format as formats
import oracles
import pytest
import torch
import torch._dynamo.testing
from needs import needs_compiler
from pipeline_kernels import on_kernels
from said import holds, said
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fuser
from fuser import modules
from fuser import recipe as recipes
from fuser.runtime import compiled as passes
from fuser.runtime import compiled_runner, recorded
from fuser.tensors import Float8Quantizer, nvfp4

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16 = torch.bfloat16
WIDTH = 64
CURRENT, MXFP8 = recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()
DELAYED = recipes.DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def block(width: int = WIDTH, **options: Any) -> fuser.Sequential:
    residual = fuser.MakeExtraOutput()
    residual.set_extra_output_channel(0, "residual", output_to_caller=False)
    add = fuser.AddExtraInput()
    add.set_extra_input_channel(0, "residual")
    return fuser.Sequential(
        residual,
        fuser.RMSNorm(width, **options),
        fuser.Linear(width, 2 * width, bias=False, **options),
        fuser.SwiGLU(),
        fuser.Linear(width, width, **options),
        add,
    )


class Blocks(torch.nn.Module):
    """Several blocks, called in a loop."""

    def __init__(self, count: int = 2, in_checkpoints: bool = False, **options: Any) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(block(**options) for _ in range(count))
        self.in_checkpoints = in_checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.blocks:
            x = checkpoint(one, x, use_reentrant=False) if self.in_checkpoints else one(x)
        return x


def under(recipe: Any) -> Any:
    return contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe)


def whole(function: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def step(function: Any, model: torch.nn.Module, *given: torch.Tensor) -> list[torch.Tensor | None]:
    """Outputs and gradients of one step."""
    model.zero_grad(set_to_none=True)
    inputs = [x.clone().requires_grad_() for x in given]
    result = function(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    like = [{"dtype": y.dtype, "device": y.device} for y in outputs]
    weights = [torch.linspace(-1, 2, y.shape[-1], **o) for y, o in zip(outputs, like, strict=True)]
    sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)).backward()
    leaves = [*inputs, *model.parameters()]
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves)]


def assert_equal(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def rows(count: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(count))


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


# -- bits ---------------------------------------------------------------------------------

RECIPES: dict[str, Any] = {
    "none": None,
    **{
        f"{name} {override}": formats.deterministic(recipe, backward_override=override)
        for name, recipe in formats.STATELESS.items()
        for override in (None, "high_precision", "dequantized")
    },
}


@pytest.mark.parametrize("is_of_one_buffer", [False, True])
def test_equal_blocks_in_16_bits_have_the_bits_of_eager_ones(is_of_one_buffer: bool) -> None:
    """The second is like the first to a trace; the tensors of a call may share memory."""
    options = {"dtype": BF16}
    blocks = [fuser.Sequential(fuser.AddExtraInput(), *block(**options)) for _ in range(2)]

    def run(x: torch.Tensor, extra: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for one in blocks:
            x = one(x, extra)
        return x, torch.zeros(1, dtype=x.dtype)  # which is known to the trace

    memory = torch.randn(2, 16, WIDTH, dtype=BF16, requires_grad=True)
    x, extra = memory if is_of_one_buffer else (t.detach().clone() for t in memory)
    leaves = [memory] if is_of_one_buffer else [x.requires_grad_(), extra.requires_grad_()]
    leaves += [p for one in blocks for p in one.parameters()]
    dy = torch.randn(16, WIDTH, dtype=BF16)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    steps = []
    for function in (run, compiled, compiled):
        y, zero = function(x, extra)
        steps.append([y, zero, *torch.autograd.grad(y, leaves, dy)])
    expected, *found = steps
    for each in found:
        assert [t.dtype for t in each] == [BF16] * len(expected)
        assert all(map(torch.equal, each, expected))


def test_the_copy_of_a_pipeline_that_graphs_run_has_the_facts_of_parameters_and_no_memory() -> None:
    model = fuser.Sequential(fuser.Linear(8, 8, dtype=BF16), fuser.RMSNorm(8))
    model[0].weight.requires_grad_(False)
    pipeline = model._current_segments().only
    twin = compiled_runner.copied(pipeline)
    for own, other in zip(pipeline.basic_ops, twin.basic_ops, strict=True):
        assert other is not own
        for one, like in zip(own.parameters(), other.parameters(), strict=True):
            assert like.is_meta
            assert not one.is_meta
            assert (like.shape, like.dtype) == (one.shape, one.dtype)
            assert like.requires_grad == one.requires_grad


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_compiled_step_has_the_bits_of_an_eager_one(recipe: Any) -> None:
    model, x = Blocks(), rows()
    with under(recipe):
        expected = step(model, model, x)
        found = step(whole(model), model, x)
    assert_equal(found, expected)
    # Under a recipe the step is quantized: its output is another than without one.
    assert torch.equal(found[0], model(x)) == (recipe is None)


@needs_compiler
@pytest.mark.parametrize("recipe", [None, CURRENT], ids=str)
def test_inductor_compiles_what_is_around_pipelines(recipe: Any) -> None:
    model, x = Blocks(), rows()

    def around(x: torch.Tensor) -> Any:
        return model(x * 2) + 1

    with under(recipe):
        expected = step(around, model, x)
        assert_equal(step(whole(around, "inductor"), model, x), expected)


EXTRAS: dict[str, Callable[[], torch.nn.Module]] = {
    "extra input and output": lambda: fuser.Sequential(
        fuser.MakeExtraOutput(), fuser.Linear(WIDTH, WIDTH), fuser.GELU(), fuser.AddExtraInput()
    ),
    "scaled": lambda: fuser.Sequential(fuser.Linear(WIDTH, WIDTH), fuser.ConstantScale(0.5)),
    "normed": lambda: fuser.Sequential(fuser.LayerNorm(WIDTH), fuser.Bias(WIDTH), fuser.ReLU()),
    "views": lambda: fuser.Sequential(fuser.Identity(), fuser.Reshape((-1, WIDTH))),
    "quantize": lambda: fuser.Sequential(fuser.Quantize(True, True), fuser.Linear(WIDTH, WIDTH)),
    "linear alone": lambda: fuser.Linear(WIDTH, WIDTH),
    "norm alone": lambda: fuser.RMSNorm(WIDTH),
    "activation alone": lambda: fuser.SwiGLU(),
    "linear layer": lambda: modules.Linear(WIDTH, WIDTH),
    "mlp layer": lambda: modules.LayerNormMLP(WIDTH, 2 * WIDTH),
    "modules between": lambda: fuser.Sequential(
        fuser.Linear(WIDTH, WIDTH), torch.nn.Tanh(), fuser.GELU(), block(), torch.nn.Tanh()
    ),
    "hooks": lambda: hooked(),
    "no dropout": lambda: fuser.Sequential(fuser.Dropout(0.0), fuser.Linear(WIDTH, WIDTH)),
}


def hooked() -> torch.nn.Module:
    model = fuser.Sequential(fuser.RMSNorm(WIDTH), fuser.Linear(WIDTH, WIDTH), fuser.GELU())
    model[1].register_forward_hook(lambda module, given, y: 2 * y)
    model[2].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    return model


def constants(role: Any) -> Any:
    return fuser.MXFP8Quantizer()


@pytest.mark.parametrize("recipe", [None, MXFP8], ids=str)
@pytest.mark.parametrize("make", EXTRAS.values(), ids=EXTRAS)
def test_ops_and_layers_are_whole_graphs(make: Callable[[], Any], recipe: Any) -> None:
    model = make()
    given = [rows(), rows()] if make is EXTRAS["extra input and output"] else [rows()]
    with under(recipe):
        expected = step(model, model, *given)
        # A function of its own, whose frame Dynamo compiles: not that of the module.
        found = step(whole(lambda *inputs: model(*inputs)), model, *given)
    assert_equal(found, expected)


@pytest.mark.parametrize("read", [0, 1])
def test_an_output_that_no_loss_reads(read: int) -> None:
    model = fuser.Sequential(fuser.MakeExtraOutput(), fuser.Linear(WIDTH, WIDTH))
    x = rows()

    def loss(x: torch.Tensor) -> torch.Tensor:
        outputs = model(x * 2)
        assert isinstance(outputs, tuple)
        return torch.as_tensor(outputs[read] * 3)

    expected = [None if g is None else g for g in step(loss, model, x)]
    found = step(whole(loss), model, x)
    # Dynamo's graph has zeros where a loss reaches nothing.
    zeros = [torch.zeros_like(f) if e is None else e for e, f in zip(expected, found, strict=True)]
    assert_equal(found, zeros)


def test_frozen_parts_get_no_gradient() -> None:
    model, x = Blocks(), rows()
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    compiled = whole(model)
    for gradient in (True, False):
        leaf = x.clone().requires_grad_(gradient)
        compiled(leaf).sum().backward()
        found = [leaf.grad, *(p.grad for p in model.parameters())]
        model.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_(gradient)
        model(leaf).sum().backward()
        assert_equal(found, [leaf.grad, *(p.grad for p in model.parameters())])
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=str)
def test_calls_without_gradients_and_then_with(recipe: Any) -> None:
    model, x = Blocks(), rows()
    compiled = whole(model)
    with under(recipe):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(compiled(x), model(x))
        assert_equal(step(compiled, model, x), step(model, model, x))


def test_a_call_without_gradients_saves_nothing() -> None:
    model, x = Blocks(1), rows()
    passes._passes.clear()
    with torch.no_grad():
        whole(model)(x)
    (made,) = passes._passes.values()
    assert made.noted.saved == ((), (), 0)


VIEWS: dict[str, Callable[[], torch.nn.Module]] = {
    "views": EXTRAS["views"],
    "one op": lambda: fuser.Identity(),
    "extra output": lambda: fuser.Sequential(fuser.MakeExtraOutput(), fuser.GELU()),
    "both outputs": lambda: fuser.Sequential(fuser.Identity(), fuser.MakeExtraOutput()),
    "two extra outputs": lambda: fuser.Sequential(
        fuser.MakeExtraOutput(), fuser.MakeExtraOutput(), fuser.Bias(WIDTH)
    ),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_writes_to_an_output_change_neither_the_input_nor_another_output(make: Any) -> None:
    """In each of the calls: the third one is replayed."""
    with on_kernels():
        model = make()
        compiled = whole(lambda x: model(x), "eager")
        for number in range(1, 5):
            for grad in (True, False):
                x = (number * rows()).requires_grad_(grad)
                before = x.detach().clone()
                found, expected = compiled(x), model(x)
                pairs = list(zip(as_tuple(found), as_tuple(expected), strict=True))
                for place, (one, other) in enumerate(pairs, start=1):
                    assert torch.equal(one, other)
                    one.detach().fill_(-place)
                assert torch.equal(x, before)
                for place, (one, _) in enumerate(pairs, start=1):
                    assert (one == -place).all()


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=str)
def test_torchs_autocast(recipe: Any) -> None:
    model, x = Blocks(), rows()
    with under(recipe), torch.autocast("cpu", dtype=BF16):
        expected = step(model, model, x)
        found = step(whole(model), model, x)
    assert_equal(found, expected)
    with under(recipe):
        assert not torch.equal(found[0], model(x))


def test_an_autocast_inside_the_graph_counts() -> None:
    model, x = Blocks(), rows()

    def inside(x: torch.Tensor) -> Any:
        with fuser.autocast(recipe=CURRENT):
            y = model(x)
        return model(y)

    expected = step(inside, model, x)
    found = step(whole(inside), model, x)
    assert_equal(found, expected)
    assert not torch.equal(found[0], model(model(x)))


@pytest.mark.parametrize("inner", [None, MXFP8, DELAYED], ids=str)
@pytest.mark.parametrize("outer", [None, CURRENT, DELAYED], ids=str)
def test_the_recipe_is_that_of_the_innermost_autocast_before_inside_and_after_it(
    outer: Any, inner: Any
) -> None:
    """None: ``enabled=False``, or no outer autocast."""
    models = [Blocks(1)]
    models.append(copy.deepcopy(models[0]))
    found = []
    for model, function in zip(models, (models[0], whole(models[1], "eager")), strict=True):
        outputs = []
        with under(outer):
            outputs += step(function, model, rows())
            for _ in range(2):
                with fuser.autocast(enabled=inner is not None, recipe=inner):
                    outputs += step(function, model, 2 * rows())
                outputs += step(function, model, 3 * rows())
        found.append([*outputs, *step(function, model, rows())])
    assert_equal(found[1], found[0])


def test_a_recipe_may_be_made_inside_the_graph() -> None:
    model, x = Blocks(), rows()

    def inside(x: torch.Tensor) -> Any:
        with fuser.autocast(recipe=recipes.Float8CurrentScaling(backward_override="dequantized")):
            return model(x)

    expected = step(inside, model, x)
    assert_equal(step(whole(inside), model, x), expected)
    assert not torch.equal(expected[0], model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_an_input_that_no_pipeline_takes_is_refused(dtype: torch.dtype) -> None:
    model, x = block(), rows().to(dtype)
    sentence = f"The input is {dtype}; a pipeline runs in torch.float32"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=sentence):
        whole(lambda x: model(x), "eager")(x)
    torch._dynamo.reset()
    with pytest.raises(fuser.InputError, match=sentence):
        torch.compile(lambda x: model(x), backend="eager")(x)
    assert torch.equal(whole(lambda x: model(x), "eager")(rows()), model(rows()))


def test_a_custom_recipe_of_constants_is_in_the_graph() -> None:
    model, x = Blocks(), rows()
    custom = recipes.CustomRecipe(qfactory=constants)
    with under(custom):
        expected = step(model, model, x)
        assert_equal(step(whole(model), model, x), expected)
        assert graphs() == 1
    with under(MXFP8):
        assert_equal(expected, step(model, model, x))


# -- what a forward saves --------------------------------------------------------------------


def scaled() -> torch.nn.Module:
    return fuser.Sequential(
        fuser.ScaledSwiGLU(),
        fuser.Linear(WIDTH, 2 * WIDTH, bias=False),
        fuser.ScaledSwiGLU(),
        fuser.Linear(WIDTH, 2 * WIDTH, bias=False),
        fuser.ScaledSwiGLU(),
    )


def test_a_backward_reads_the_tensors_of_its_forward_if_inputs_are_tied() -> None:
    model = scaled()
    x, s, t = torch.randn(8, 2 * WIDTH), torch.rand(8), torch.rand(8)

    def gradients(function: Any) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        outputs = [function(leaf, s, t, s), function(leaf, s, t, t), function(leaf, t, t, t)]
        leaves = [leaf, *model.parameters()]
        return [g for y in outputs for g in torch.autograd.grad(y.sum(), leaves)]

    assert_equal(gradients(whole(model)), gradients(model))


def three(tied: int | None) -> torch.nn.Module:
    linears = [fuser.BasicLinear(WIDTH, WIDTH) for _ in range(3)]
    if tied is not None:
        linears[2].weight = linears[tied].weight
    return fuser.Sequential(*linears)


def test_a_backward_reads_the_weights_of_its_forward_if_weights_are_tied() -> None:
    models, x = [three(tied) for tied in (1, 0, None)], rows()
    compiled = [whole(lambda x, model=model: model(x)) for model in models]
    outputs = [function(x.requires_grad_()) for function in compiled]
    for model, y in zip(models, outputs, strict=True):
        leaves = list(model.parameters())
        expected = torch.autograd.grad(model(x).sum(), leaves)
        assert_equal(list(torch.autograd.grad(y.sum(), leaves)), list(expected))


def test_an_op_may_be_in_a_pipeline_twice() -> None:
    op, others = fuser.Linear(WIDTH, WIDTH), [fuser.Linear(WIDTH, WIDTH) for _ in range(2)]
    for one, two in ((others[0], others[1]), (op, op), (others[1], others[0])):
        model = fuser.Sequential(one, fuser.SiLU(), two)
        assert_equal(step(whole(lambda x: model(x)), model, rows()), step(model, model, rows()))  # noqa: B023


def test_inputs_of_other_layouts_share_passes() -> None:
    model, x = fuser.Sequential(fuser.RMSNorm(WIDTH), fuser.Linear(WIDTH, WIDTH)), rows()
    x = x.view(4, 8, WIDTH)
    compiled = whole(lambda x: model(x))
    leaves = [x.requires_grad_(), x.detach().transpose(0, 1).requires_grad_()]
    for function in (compiled, model):
        outputs = [function(leaf) for leaf in leaves]
        for leaf, y in zip(leaves, outputs, strict=True):
            (leaf.grad,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.equal(leaves[0].grad, leaves[1].grad.transpose(0, 1))


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


IN_ONE_GRAPH: dict[str, tuple[Callable[[], list[torch.nn.Module]], Any]] = {
    "ties of weights": (lambda: [three(tied) for tied in (None, 0, None)], lambda x: x),
    "rows": (lambda: [three(None) for _ in range(3)], lambda x: x[:8]),
    "strides": (lambda: [three(None) for _ in range(3)], turned),
    "dtypes": (
        lambda: [three(None), three(None).bfloat16(), three(None)],
        lambda x: x.bfloat16(),
    ),
    "strides of weights": (lambda: [three(None), with_turned_weight(), three(None)], lambda x: x),
}
"""Pipelines of one structure, and an input for the second of them, which differ in one thing."""


def with_turned_weight() -> torch.nn.Module:
    model = three(None)
    model[1].weight.data = turned(model[1].weight.data)
    return model


@pytest.mark.parametrize("is_last", [False, True], ids=["in the middle", "at the end"])
@pytest.mark.parametrize(("make", "change"), IN_ONE_GRAPH.values(), ids=IN_ONE_GRAPH)
def test_pipelines_of_one_graph_that_differ_in_one_thing_are_traced_apart(
    make: Callable[[], list[torch.nn.Module]], change: Any, is_last: bool
) -> None:
    """The passes of equal blocks are traced once."""
    models = torch.nn.ModuleList(make())
    order = (0, 2, 1) if is_last else (0, 1, 2)

    def call(x: torch.Tensor) -> Any:
        found = [models[i](change(x) if i == 1 else x) for i in order]
        return tuple(y.float() for y in found)

    assert_equal(step(whole(call), models, rows(WIDTH)), step(call, models, rows(WIDTH)))


@pytest.mark.parametrize("kind", ["expanded", "turned", "part"])
def test_gradients_of_other_strides_are_those_of_an_eager_backward(kind: str) -> None:
    model, x = fuser.Sequential(fuser.RMSNorm(WIDTH), fuser.SiLU()), rows()
    wide = torch.cat([rows(), rows()], 1)
    dy = {"expanded": rows()[:1].expand(32, -1), "turned": turned(rows()), "part": wide[:, WIDTH:]}
    compiled, found = whole(lambda x: model(x), "eager"), []
    for function in (model, compiled):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        found.append(torch.autograd.grad(y, [leaf, *model.parameters()], dy[kind]))
    assert_equal(list(found[1]), list(found[0]))


def like(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def test_each_field_of_the_layouts_of_a_trace_counts() -> None:
    """Of the last tensor too; and which of them are one tensor, or in one memory, or missing."""
    shared = like(2 * 8)
    base = [like(8, 8), like(8, 8)]
    others: dict[str, list[torch.Tensor | None]] = {
        "shape": [base[0], like(8, 8)[:, :4]],
        "strides": [base[0], turned(base[1])],
        "dtype": [base[0], like(8, 8, dtype=torch.float16)],
        "device": [base[0], like(8, 8, device="meta")],
        "one tensor": [base[0], base[0]],
        "one more that is missing": [*base, None],
        "parts of one memory": [shared[:8], shared[8:]],
        "parts of two": [like(8), like(8)],
        "the first two of three": [base[0], base[0], base[1]],
        "the last two of three": [base[0], base[1], base[1]],
        "three": [base[0], base[1], like(8, 8)],
    }
    keys = {name: compiled_runner._layouts_of(tensors) for name, tensors in others.items()}
    keys["as it is"] = compiled_runner._layouts_of(base)
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)
    assert compiled_runner._layouts_of([like(8, 8), like(8, 8)]) == keys["as it is"]


def test_hooks_on_saved_tensors_may_change_strides() -> None:
    linear, x = fuser.BasicLinear(WIDTH, WIDTH), rows()
    linear.weight.data = linear.weight.data.t()
    model = fuser.Sequential(linear, fuser.GELU())

    def hooked_step(function: Any) -> list[Any]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()):
            return step(function, model, x)

    assert_equal(hooked_step(whole(lambda x: model(x))), hooked_step(model))


# -- other transformations ---------------------------------------------------------------------


def test_a_backward_inside_torchs_autocast_has_the_dtypes_of_its_forward() -> None:
    model, x = Blocks(), rows().requires_grad_()
    found = []
    for function in (model, whole(model)):
        y = function(x)
        with torch.autocast("cpu", dtype=BF16):
            found.append(torch.autograd.grad(y.sum(), [x, *model.parameters()]))
    assert_equal(list(found[1]), list(found[0]))


def test_forward_derivatives_are_refused() -> None:
    model, x = fuser.Sequential(fuser.LayerNorm(WIDTH), fuser.Linear(WIDTH, WIDTH)), rows()

    def tangent(x: torch.Tensor) -> Any:
        return torch.func.jvp(model, (x,), (torch.ones_like(x),))

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"transformed by torch\.func"):
        whole(tangent)(x)
    with pytest.raises(fuser.StateError):
        torch.compile(tangent, backend="aot_eager")(x)


def test_second_derivatives_are_refused() -> None:
    model, x = fuser.Sequential(fuser.Linear(WIDTH, WIDTH), fuser.GELU()), rows().requires_grad_()
    y = whole(lambda x: model(x), "eager")(x)
    with pytest.raises(fuser.StateError, match=said("diagnose-pipeline-differentiated-twice")):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class Hundred(fuser.FusedOperation):
    """What no other fusion computes: 100 times the input."""

    window: ClassVar[Any] = (fuser.GELU, fuser.ConstantScale)
    side: ClassVar[Any] = "joint"

    def fuser_forward(self, ctxs: Any, x: torch.Tensor, **_: Any) -> Any:  # type: ignore[override]
        return x * 100, [(), ()]

    def fuser_backward(self, ctxs: Any, dy: torch.Tensor, **_: Any) -> Any:  # type: ignore[override]
        return dy * 100, [(), ()], [(), ()]


@pytest.mark.parametrize("others", [(), fuser.FUSIONS], ids=["alone", "with fuser's"])
def test_a_graph_has_the_fusions_of_its_sequential(others: Any) -> None:
    model, x = fuser.Sequential(fuser.GELU(), fuser.ConstantScale(2.0)), rows()
    compiled = whole(lambda x: model(x), "eager")
    for fusions in (others, (*others, Hundred)):
        model.fusions = fusions
        expected = step(model, model, x)
        assert torch.equal(expected[0], 100 * x) == (Hundred in fusions)
        assert_equal(step(compiled, model, x), expected)


def test_fusions_that_are_registered_after_compiling_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fuser.runtime import pipeline

    monkeypatch.setattr(pipeline, "_registered", pipeline._registered)

    def fuse(ops: Any, *, recipe: Any = None) -> Any:
        kinds = [fuser.GELU, fuser.ConstantScale]
        return [Hundred(ops)] if [type(op) for op in ops] == kinds else ops

    model, x = fuser.Sequential(fuser.GELU(), fuser.ConstantScale(2.0)), rows()
    compiled = whole(lambda x: model(x))
    compiled(x)
    fuser.register_forward_fusion(fuse)
    fuser.register_backward_fusion(fuse)
    assert_equal(step(compiled, model, x), step(model, model, x))
    assert torch.equal(compiled(x), 100 * x)


def test_a_forward_that_is_set_on_a_composite_counts() -> None:
    model, other = (fuser.Sequential(fuser.Linear(WIDTH, WIDTH), fuser.GELU()) for _ in range(2))
    compiled, x = whole(lambda x: model(x)), rows()
    compiled(x)
    for one in (model, other):
        one[0].forward = lambda x: 3 * x
        assert torch.equal(whole(lambda x: one(x))(x), one(x))  # noqa: B023
    assert torch.equal(compiled(x), model(x))


# -- the number of graphs -------------------------------------------------------------------


def test_equal_blocks_that_are_compiled_one_by_one_share_a_graph() -> None:
    model, x = Blocks(12), rows()
    expected = step(model, model, x)
    for one in model.blocks:
        one.compile(backend="aot_eager", fullgraph=True)
    assert_equal(step(model, model, x), expected)
    assert graphs() == 1


def test_equal_recipes_share_a_graph_and_others_do_not() -> None:
    model, x = Blocks(1), rows()
    compiled = whole(model, "eager")
    made: list[Callable[[], Any]] = [lambda: None, recipes.Float8CurrentScaling]
    made.append(functools.partial(recipes.Float8CurrentScaling, backward_override="dequantized"))
    for make in made * 3:
        with under(make()):
            assert_equal(step(compiled, model, x), step(model, model, x))
    assert graphs() == len(made)


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=str)
def test_ten_numbers_of_tokens_are_few_graphs(recipe: Any) -> None:
    model = Blocks(1)
    compiled = whole(model)
    for count in (16, 24, 32, 40, 48, 7, 100, 33, 64, 80):
        x = rows(count)
        with under(recipe):
            assert_equal(step(compiled, model, x), step(model, model, x))
    assert graphs() <= 2


@pytest.mark.parametrize("recipe", [None, CURRENT, MXFP8, DELAYED], ids=str)
def test_ten_numbers_of_tokens_are_few_graphs_of_kernels(recipe: Any) -> None:
    with on_kernels():
        model = Blocks(1, dtype=BF16)
        other = copy.deepcopy(model)
        compiled = whole(other)
        for count in (64, 32, 96, 48, 7, 100, 33, 160, 80, 1):
            x = rows(count, BF16)
            with under(recipe):
                expected = step(model, model, x)
            with under(recipe):
                assert_equal(step(compiled, other, x), expected)
        # One of them for one token; under MXFP8, one more for rows that are padded.
        assert graphs() <= 3 + (recipe is MXFP8)


def test_many_layouts_in_turn_keep_few_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, most in (
        (compiled_runner, "MOST_LAYOUTS", 2),
        (compiled_runner, "MOST_SIZES", 2),
        (recorded, "MOST_LAYOUTS", 2),
    ):
        monkeypatch.setattr(module, name, most)
    passes._passes.clear()
    with on_kernels():
        model = fuser.BasicLinear(WIDTH, WIDTH)
        compiled = whole(fuser.Sequential(model), dynamic=True)
        for count in range(2, 12):
            for _ in range(3):
                compiled(rows(count)).sum().backward()
            model.weight = torch.nn.Parameter(model.weight.detach().clone())
        (made,) = passes._passes.values()
        (runner,) = made.runners()
        gc.collect()
        kept = [one for one in gc.get_objects() if type(one) is recorded.RecordedForward]
        assert 0 < len(kept) <= 3 * 2
        assert len(runner._layouts) <= 2


def test_a_backward_after_too_many_other_layouts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_runner, "MOST_SIZES", 2)
    compiled = whole(fuser.Linear(WIDTH, WIDTH), dynamic=True)
    outputs = [compiled(rows(count)).sum() for count in (2, 3, 4, 3)]
    outputs[1].backward()
    outputs[2].backward()
    with pytest.raises(fuser.StateError, match=r"is not known: .* 2 other layouts ago"):
        outputs[0].backward()


@pytest.mark.parametrize("has_kernels", [False, True], ids=["torch", "kernels"])
def test_the_latest_layouts_are_known_however_old_they_are(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among ever new ones, where a layout that recurs is recorded and where it is not."""
    monkeypatch.setattr(compiled_runner, "MOST_SIZES", 2)
    passes._passes.clear()
    with on_kernels() if has_kernels else contextlib.nullcontext():
        model = fuser.Linear(WIDTH, WIDTH)
        compiled = whole(model, dynamic=True)
        for count in range(2, 10):
            outputs = [compiled(rows(n)).sum() for n in (64, count)]
            for y in outputs:
                y.backward()
        (made,) = passes._passes.values()
        assert [bool(runner._recorded_passes) for runner in made.runners()] == [has_kernels]
    expected = sum(rows(n).sum(0) for n in range(2, 10)) + 8 * rows(64).sum(0)
    torch.testing.assert_close(model.weight.grad[0], expected, rtol=1e-4, atol=1e-3)


def test_train_and_eval_are_compiled_once() -> None:
    model, x = Blocks(1), rows()
    compiled = whole(model, "eager")
    for mode in (True, False) * 4:
        model.train(mode)
        assert_equal(step(compiled, model, x), step(model, model, x))
    assert graphs() <= 2


# -- changes ---------------------------------------------------------------------------------


def change_eps(model: Any) -> None:
    model.blocks[0][1].eps = 0.5


def replace_op(model: Any) -> None:
    model.blocks[0][3] = fuser.ReGLU()


def insert_op(model: Any) -> None:
    model.blocks[0].insert(2, fuser.ConstantScale(3.0))


def no_fusions(model: Any) -> None:
    for one in model.blocks:
        one.fusions = ()
        one[1].eps = 0.25


def replace_parameter(model: Any) -> None:
    model.blocks[0][1].weight = torch.nn.Parameter(torch.full((WIDTH,), 2.0))


CHANGES = (change_eps, replace_op, insert_op, no_fusions, replace_parameter)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_compiling_counts(change: Callable[[Any], None]) -> None:
    model, x = Blocks(), rows()
    compiled = whole(model, "eager")
    before = step(compiled, model, x)
    change(model)
    found, expected = step(compiled, model, x), step(model, model, x)
    assert_equal(found, expected)
    assert not torch.equal(found[0], before[0])


def test_a_model_that_is_compiled_and_dropped_frees_its_parameters() -> None:
    model, x = Blocks(), rows()
    weights = list(map(weakref.ref, model.parameters()))
    whole(model)(x).sum().backward()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)


def test_a_copy_of_a_compiled_model_runs_by_itself() -> None:
    model, x = Blocks(), rows()
    expected = step(whole(model), model, x)
    other = copy.deepcopy(model)
    assert_equal(step(other, other, x), expected)
    assert_equal(step(whole(other), other, x), expected)


def test_backwards_in_another_order_read_their_own_layouts() -> None:
    model = fuser.Sequential(fuser.Reshape((-1, WIDTH)), fuser.Linear(WIDTH, WIDTH))
    plain, turned = rows(WIDTH), rows(WIDTH).t()
    compiled = whole(lambda x: model(x))
    found = []
    for function in (model, compiled):
        leaves = [t.detach().requires_grad_() for t in (plain, turned)]
        outputs = [function(leaf) for leaf in leaves]
        for y in outputs:
            y.square().sum().backward()
        found.append([*(leaf.grad for leaf in leaves), *(p.grad for p in model.parameters())])
        model.zero_grad(set_to_none=True)
    assert_equal(*found)


# -- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, CURRENT, MXFP8], ids=str)
def test_checkpoints_inside_the_graph(recipe: Any) -> None:
    model, x = Blocks(3, in_checkpoints=True), rows()
    with under(recipe):
        expected = step(model, model, x)
        assert_equal(step(whole(model), model, x), expected)


class EachInside(Blocks):
    """Blocks in checkpoints, each under an autocast of its own."""

    def __init__(self, recipe: Any) -> None:
        super().__init__(3)
        self.recipe = recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.blocks:
            x = checkpoint(self.quantized, one, x, use_reentrant=False)
        return x

    def quantized(self, one: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(recipe=self.recipe):
            y: torch.Tensor = one(x)
        return y


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=str)
def test_an_autocast_in_a_checkpoint_inside_the_graph(recipe: Any) -> None:
    model, x = EachInside(recipe), rows()
    other = copy.deepcopy(model)
    function = whole(model)
    assert_equal(step(function, model, x), step(other, other, x))
    # The graph is of this autocast, whatever is around it.
    with fuser.autocast(recipe=MXFP8):
        step(function, model, x)
    assert graphs() == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [None, CURRENT], ids=str)
def test_a_compiled_model_in_a_checkpoint(recipe: Any, use_reentrant: bool) -> None:
    model, x = Blocks(), rows()
    compiled = whole(model)

    def checkpointed(x: torch.Tensor) -> Any:
        return checkpoint(compiled, x, use_reentrant=use_reentrant)

    with under(recipe):
        assert_equal(step(checkpointed, model, x), step(model, model, x))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", ""])
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=str)
def test_a_recomputation_under_another_recipe_is_refused(recipe: Any, use_reentrant: bool) -> None:
    model, x = Blocks(), rows().requires_grad_()
    other = copy.deepcopy(model)
    compiled = whole(model)
    words = rf"recomputed without a recipe.*ran under {type(recipe).__name__}"
    for number in range(2):
        with under(recipe):
            y = checkpoint(compiled, number * x, use_reentrant=use_reentrant)
            other(number * x)
        with pytest.raises(fuser.StateError, match=words):
            y.sum().backward()
    with under(recipe):
        expected = step(other, other, x.detach())
    with under(recipe):
        assert_equal(step(compiled, model, x.detach()), expected)


@pytest.mark.parametrize("others", [(None, CURRENT), (CURRENT, DELAYED), (DELAYED, MXFP8)], ids=str)
def test_a_recomputation_enters_the_recipe_that_its_forward_had(others: Any) -> None:
    model, x = Blocks(), rows().requires_grad_()
    compiled, chosen = whole(model), list(others)

    def forward(x: torch.Tensor) -> Any:
        with under(chosen[0]):
            return compiled(x)

    y = checkpoint(forward, x, use_reentrant=False)
    chosen.reverse()  # the recomputation has the other one
    with pytest.raises(fuser.StateError, match=said("compiled-passes-recomputed-forward-ran")):
        y.sum().backward()


# -- delayed scaling ---------------------------------------------------------------------------

Run: TypeAlias = Callable[[Any, torch.nn.Module, torch.Tensor], list[torch.Tensor | None]]


def one_step(function: Any, model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    with under(DELAYED):
        return step(function, model, x)


def two_steps_in_one_autocast(function: Any, model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    with under(DELAYED):
        return [*step(function, model, x), *step(function, model, 2 * x)]


def evaluation_and_step(function: Any, model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    with under(DELAYED), torch.no_grad():
        y = function(3 * x)
    return [y, *one_step(function, model, x)]


def two_forwards_in_one_step(function: Any, model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    model.zero_grad(set_to_none=True)
    leaves = [x.clone().requires_grad_(), (4 * x).requires_grad_()]
    with under(DELAYED):
        outputs = [function(leaf) for leaf in leaves]
    for y in outputs:
        y.square().sum().backward()
    return [*outputs, *(t.grad for t in (*leaves, *model.parameters()))]


def backwards_in_turned_order(function: Any, model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    model.zero_grad(set_to_none=True)
    leaves = [x.clone().requires_grad_(), (4 * x).requires_grad_()]
    outputs = []
    for leaf in leaves:
        with under(DELAYED):
            outputs.append(function(leaf))
    for y in reversed(outputs):
        y.square().sum().backward()
    return [*outputs, *(t.grad for t in (*leaves, *model.parameters()))]


def checkpointed(use_reentrant: bool) -> Run:
    def run(function: Any, model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
        def again(x: torch.Tensor) -> Any:
            return checkpoint(function, x, use_reentrant=use_reentrant)

        return one_step(again, model, x)

    return run


def with_torchs_autocast(function: Any, model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    with torch.autocast("cpu", dtype=BF16):
        return one_step(function, model, x)


class Inside(Blocks):
    """Blocks under an autocast of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(recipe=DELAYED):
            return super().forward(x) * 2


class Twice(Blocks):
    """Blocks of which the first runs again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks[0](super().forward(x))
        return y


# Two blocks where their order counts: a block takes most of a second to trace.
DELAYED_RUNS: dict[str, tuple[Run, Callable[[], torch.nn.Module]]] = {
    "step": (one_step, Blocks),
    "two steps in one autocast": (two_steps_in_one_autocast, lambda: Blocks(1)),
    "evaluation": (evaluation_and_step, lambda: Blocks(1)),
    "two forwards in one step": (two_forwards_in_one_step, lambda: Blocks(1)),
    "backwards in turned order": (backwards_in_turned_order, Blocks),
    "one block twice": (backwards_in_turned_order, Twice),
    "torch's autocast": (with_torchs_autocast, lambda: Blocks(1)),
    "checkpoint inside": (one_step, lambda: Blocks(1, True)),
    "two in one step, checkpointed": (two_forwards_in_one_step, lambda: Blocks(1, True)),
    "turned order, checkpointed": (backwards_in_turned_order, lambda: Blocks(2, True)),
    "checkpoint inside an autocast inside": (one_step, lambda: Inside(1, True)),
    "checkpoint around": (checkpointed(use_reentrant=False), Blocks),
    "reentrant checkpoint around": (checkpointed(use_reentrant=True), lambda: Blocks(1)),
    "autocast inside": (step, Inside),
    "autocast inside and around": (two_steps_in_one_autocast, lambda: Inside(1)),
}


def states_of(model: torch.nn.Module) -> list[torch.Tensor]:
    ops = [op for op in model.modules() if isinstance(op, fuser.op.BasicOperation)]
    return [op.get_extra_state() for op in ops]


@pytest.mark.parametrize(("run", "make"), DELAYED_RUNS.values(), ids=DELAYED_RUNS)
def test_steps_under_delayed_scaling_have_the_bits_and_the_states_of_eager_ones(
    run: Run, make: Callable[[], torch.nn.Module]
) -> None:
    compare_delayed(run, make())


RECORDED = [name for name in DELAYED_RUNS if "step" in name or "checkpoint" in name]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps_under_delayed_scaling_have_the_states_of_eager_ones(name: str) -> None:
    run, make = DELAYED_RUNS[name]
    with on_kernels():
        compare_delayed(run, make().to(BF16), BF16)


def compare_delayed(run: Run, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    other = copy.deepcopy(model)
    compiled = whole(other)
    for number in range(1, 5):
        x = rows(dtype=dtype) * number
        assert_equal(run(compiled, other, x), run(model, model, x))
        assert_equal(states_of(other), states_of(model))
    assert any(state.numel() for state in states_of(model))


STATELESS = [name for name in DELAYED_RUNS if not name.endswith(("inside", "checkpointed"))]


@pytest.mark.parametrize("name", STATELESS)
def test_pipelines_without_quantizers_are_compiled_under_delayed_scaling(name: str) -> None:
    run, _ = DELAYED_RUNS[name]
    model, x = fuser.Sequential(fuser.LayerNorm(WIDTH), fuser.GELU()), rows()
    other = copy.deepcopy(model)
    compiled = whole(other)
    for _ in range(3):
        assert_equal(run(compiled, other, x), run(model, model, x))


def test_blocks_under_delayed_scaling_that_are_compiled_one_by_one_share_a_graph() -> None:
    model, x = Blocks(6), rows()
    other = copy.deepcopy(model)
    for one in other.blocks:
        one.compile(backend="aot_eager", fullgraph=True)
    for _ in range(3):
        assert_equal(one_step(other, other, x), one_step(model, model, x))
        assert_equal(states_of(other), states_of(model))
    assert graphs() == 1


def test_a_state_that_is_loaded_after_compiling_counts() -> None:
    model, x = Blocks(), rows()
    other = copy.deepcopy(model)
    compiled = whole(other)
    one_step(model, model, 8 * x)
    one_step(compiled, other, x)
    other.load_state_dict(model.state_dict())
    for _ in range(2):
        assert_equal(one_step(compiled, other, x), one_step(model, model, x))
        assert_equal(states_of(other), states_of(model))


def test_a_model_under_delayed_scaling_that_is_dropped_frees_its_states() -> None:
    model, x = Blocks(), rows()
    one_step(whole(model), model, x)
    found = [weakref.ref(s) for op in quantizing(model) for s in op._delayed.values()]
    assert found
    del model
    torch._dynamo.reset()
    gc.collect()
    assert {state() for state in found} == {None}


def quantizing(model: torch.nn.Module) -> list[fuser.op.BasicOperation]:
    ops = [op for op in model.modules() if isinstance(op, fuser.op.BasicOperation)]
    return [op for op in ops if op._delayed]


# -- random numbers ----------------------------------------------------------------------------


class Dropping(torch.nn.Module):
    """Pipelines with dropouts, which may be in checkpoints."""

    def __init__(self, in_checkpoints: bool = False) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(
            fuser.Sequential(
                fuser.Linear(WIDTH, WIDTH), fuser.Dropout(0.3), fuser.GELU(), fuser.Dropout(0.5)
            )
            for _ in range(2)
        )
        self.in_checkpoints = in_checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.parts:
            x = checkpoint(one, x, use_reentrant=False) if self.in_checkpoints else one(x)
        return x


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("how", ["plain", "inside", "around", "reentrant around"])
def test_dropout_has_the_numbers_of_eager_steps(how: str, kernels: bool) -> None:
    with on_kernels() if kernels else contextlib.nullcontext():
        model, x = Dropping(in_checkpoints=how == "inside"), rows()
        compiled = whole(model)

        def call(function: Any) -> Any:
            if "around" not in how:
                return function
            is_reentrant = how.startswith("reentrant")
            return lambda x: checkpoint(function, x, use_reentrant=is_reentrant)

        for seed in range(3):
            torch.manual_seed(seed)
            expected = step(call(model), model, x)
            torch.manual_seed(seed)
            found = step(call(compiled), model, x)
            assert_equal(found, expected)
        torch.manual_seed(0)
        assert not torch.equal(compiled(x), found[0])


@needs_compiler
def test_the_gradient_of_dropout_is_zero_where_its_output_is() -> None:
    model = fuser.Sequential(fuser.Dropout(0.5))

    def again(x: torch.Tensor) -> Any:
        return checkpoint(lambda x: model(x), x, use_reentrant=False)

    leaf = torch.ones(8, WIDTH, requires_grad=True)
    y = whole(again, "inductor")(leaf)
    y.sum().backward()
    assert torch.equal(leaf.grad, y.detach())
    assert {0.0, 2.0} == set(y.flatten().tolist())


ROUNDED = recipes.NVFP4BlockScaling()


@pytest.mark.parametrize("how", ["inside", "around", "reentrant around"])
def test_stochastic_rounding_is_the_same_in_a_recomputation(how: str) -> None:
    model, x = Blocks(), rows()
    other = Blocks(in_checkpoints=how == "inside")
    other.load_state_dict(model.state_dict())
    compiled, again = whole(model), whole(other)

    def recomputed(x: torch.Tensor) -> Any:
        if how == "inside":
            return again(x)
        return checkpoint(again, x, use_reentrant=how.startswith("reentrant"))

    with under(ROUNDED):
        torch.manual_seed(1)
        expected = step(compiled, model, x)
        torch.manual_seed(1)
        assert_equal(step(recomputed, other, x), expected)
        found = step(compiled, model, x)
    assert torch.equal(found[0], expected[0])  # the forward does not round at random
    assert found[1] is not None
    assert expected[1] is not None
    assert not torch.equal(found[1], expected[1])
    close = torch.nn.functional.cosine_similarity(found[1], expected[1], dim=-1)
    assert close.mean() > 0.9


def equal_gradients() -> torch.nn.Module:
    """Two linears, whose outputs both leave: no gradient flows from the second to the first."""
    model = fuser.Sequential(
        fuser.BasicLinear(WIDTH, WIDTH), fuser.MakeExtraOutput(), fuser.BasicLinear(WIDTH, WIDTH)
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(WIDTH))
        model[2].weight.zero_()
    return model


@pytest.mark.parametrize("is_compiled", [False, True])
def test_equal_gradients_in_one_pass_round_differently(is_compiled: bool) -> None:
    """And differently in each pass; without rounding at random they round alike."""
    model = equal_gradients()
    call = whole(lambda x: model(x), "eager") if is_compiled else model
    dy = rows(33)[:32]
    # What NVFP4 has exactly, so that both linears read one input.
    x = torch.tensor([6, -6, 4, -3, 2, 1.5, -1, 0.5] * 4).repeat(32, WIDTH // 32)

    def gradients(recipe: Any) -> list[Any]:
        with under(recipe):
            outputs = call(x)
        return list(torch.autograd.grad(outputs, list(model.parameters()), (dy, dy)))

    first, last = gradients(recipes.NVFP4BlockScaling(disable_stochastic_rounding=True))
    assert torch.equal(first, last)
    found = [gradient for _ in range(2) for gradient in gradients(ROUNDED)]
    for one, other in itertools.combinations(found, 2):
        assert not torch.equal(one, other)


def test_the_seeds_of_a_pass_are_those_of_its_number_and_of_no_other_pass() -> None:
    """In forward, which rounds at random too if a recipe says so, and in backward."""
    given = recipes.QParams(stochastic_rounding=True)
    drawn: list[list[int]] = [[]]
    model, x = Blocks(1), rows()
    draw = nvfp4.rounding_seed

    def noted() -> int:
        drawn[-1].append(draw())
        return drawn[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvfp4, "rounding_seed", noted)
        with under(recipes.NVFP4BlockScaling(disable_rht=True, fp4_quant_fwd_inp=given)):
            y = whole(model, "eager")(x)
            drawn.append([])
            y.sum().backward()
    forward, backward = drawn[-2:]
    assert len(forward) > 1
    assert len(backward) > 1
    assert len({*forward, *backward}) == len(forward) + len(backward)


# -- what cannot be in a graph -----------------------------------------------------------------


class Doubled(fuser.GELU):
    """An op of a user."""

    def op_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().op_forward(*args, **kwargs)


def with_its_own_method() -> torch.nn.Module:
    model = block()
    model[1].op_forward = lambda *args, **kwargs: args[1]
    return model


def crossed() -> torch.nn.Module:
    model = block()
    model.insert(3, torch.nn.Identity())
    return model


def hooked_in_a_channel() -> torch.nn.Module:
    model = block()
    model[2].register_forward_hook(lambda module, given, y: 2 * y)
    return model


def stateful(role: Any) -> Any:
    return Float8Quantizer()


class InsideTwice(Inside):
    """Blocks that run twice in the autocast of a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(recipe=DELAYED):
            y: torch.Tensor = self.blocks[0](self.blocks[0](x))
        return y


OUTSIDE: dict[str, tuple[Callable[[], torch.nn.Module], Any, str]] = {
    "an op twice inside": (InsideTwice, None, "called twice in an autocast"),
    "an op of a user": (lambda: fuser.Sequential(Doubled()), None, "Doubled is an op from outside"),
    "methods": (with_its_own_method, None, "RMSNorm has methods of its own"),
    "channels": (crossed, None, "channels or extra tensors cross the modules"),
    "a hook": (hooked_in_a_channel, None, "cross Linear, which is called by itself because it has"),
    "stateful recipe": (
        block,
        recipes.CustomRecipe(qfactory=stateful),
        "custom recipe have states",
    ),
}


@pytest.mark.parametrize(("make", "recipe", "reason"), OUTSIDE.values(), ids=OUTSIDE)
def test_what_cannot_be_in_a_graph_breaks_it_and_is_named_under_fullgraph(
    make: Callable[[], Any], recipe: Any, reason: str
) -> None:
    model, x = make(), rows()
    other = copy.deepcopy(model)
    with under(recipe):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
            whole(lambda x: model(x) * 2, "eager")(x)
        torch._dynamo.reset()
        function = torch.compile(lambda x: model(x) * 2, backend="eager")
        assert torch.equal(function(x), other(x) * 2)


def test_an_evaluation_after_training_drops_nothing() -> None:
    model, x = fuser.Sequential(fuser.Linear(WIDTH, WIDTH), fuser.Dropout(0.5)), rows()
    compiled = whole(lambda x: model(x))
    torch.manual_seed(1)
    dropped = compiled(x)
    torch.manual_seed(1)
    assert torch.equal(dropped, model(x))
    model.eval()
    assert torch.equal(compiled(x), model(x))
    model.train()
    torch.manual_seed(1)
    assert torch.equal(compiled(x), dropped)


def test_a_wrong_number_of_extra_inputs_has_the_sentence_of_an_eager_call() -> None:
    model = fuser.Sequential(fuser.AddExtraInput())
    with pytest.raises(fuser.InputError, match=said("checks-pipeline", holds("1 extra input"))):
        torch.compile(lambda x: model(x), backend="aot_eager")(rows())


def test_keyword_arguments_of_ops_break_the_graph() -> None:
    model, x = block(), rows()
    kwargs = {2: {"is_first_microbatch": True}}
    function = torch.compile(lambda x: model(x, op_kwargs=kwargs) * 2, backend="aot_eager")
    with under(CURRENT):
        assert torch.equal(function(x), model(x) * 2)


# -- threads and kernels ----------------------------------------------------------------------


def refusal_in_a_thread(compiled: Any, x: torch.Tensor, of_thread: Any, around: Any) -> str:
    """The refusal of a call in a thread under a recipe, while this one is in another autocast."""
    has_entered, may_call = threading.Event(), threading.Event()
    failures: list[str] = []

    def call() -> None:  # a thread starts without a recipe
        with under(of_thread):
            has_entered.set()
            may_call.wait()
            try:
                compiled(x)
            except fuser.StateError as error:
                failures.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    has_entered.wait()
    with fuser.autocast(enabled=around is not None, recipe=around):
        for _ in range(4):  # on kernels, they are recorded
            expected = compiled(x)
        may_call.set()
        thread.join()
        assert torch.equal(compiled(x), expected)
    (failure,) = failures
    return failure


@pytest.mark.parametrize("has_kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize(
    ("traced", "of_thread"),
    [(CURRENT, None), (None, CURRENT), (CURRENT, MXFP8)],
    ids=str,
)
def test_a_thread_under_another_recipe_is_refused_and_the_next_call_works(
    traced: Any, of_thread: Any, has_kernels: bool
) -> None:
    """A graph is that of the recipe which any thread has entered last."""
    passes._passes.clear()
    with on_kernels() if has_kernels else contextlib.nullcontext():
        compiled = whole(fuser.Linear(WIDTH, WIDTH, dtype=BF16))
        failure = refusal_in_a_thread(compiled, rows(64, BF16), of_thread, traced)
    assert "another thread uses" in failure
    (made,) = passes._passes.values()
    assert [bool(runner._recorded_passes) for runner in made.runners()] == [has_kernels]


@pytest.mark.parametrize("around", [MXFP8, None], ids=str)
def test_a_recorded_part_in_a_thread_outside_of_the_autocast_around_it_is_refused(
    around: Any,
) -> None:
    """Also an autocast that turns quantization off."""
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    ).bfloat16()
    fuser.convert(model, recipe=CURRENT, keep=())
    with on_kernels():
        failure = refusal_in_a_thread(whole(model), rows(64, BF16), None, around)
    assert re.search(said("compiled-passes-converted-module-called"), failure)


def test_four_threads_may_call_one_compiled_model() -> None:
    model, x = Blocks(), rows()
    compiled = whole(model)
    expected = compiled(x)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(compiled(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal(found, [expected] * 4)


@pytest.mark.parametrize("recipe", [None, CURRENT, MXFP8, DELAYED], ids=str)
def test_a_compiled_step_launches_kernels_and_is_recorded(recipe: Any) -> None:
    with on_kernels():
        model, x = Blocks(1, dtype=BF16), rows(64, BF16)
        twin = copy.deepcopy(model)
        compiled = whole(twin)
        for _ in range(4):
            with under(recipe):
                expected = step(model, model, x)
            with under(recipe):
                assert_equal(step(compiled, twin, x), expected)
    plans = [runner._plan for one in passes._passes.values() for runner in one.runners()]
    assert any(plan and plan.recorded and plan.recorded._forwards for plan in plans)


# -- selective checkpoints ---------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=str)
@pytest.mark.parametrize("saves", [True, False], ids=["saved", "recomputed"])
def test_a_selective_checkpoint_that_names_the_operation(recipe: Any, saves: bool) -> None:
    """With its results saved, a pipeline runs once in a step, and else a second time."""
    operation = torch.ops.fuser.host_forward if recipe is DELAYED else torch.ops.fuser.forward
    named = [operation.default] if saves else [torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, named)
    model, x = Blocks(2), rows()
    other = copy.deepcopy(model)

    def again(x: torch.Tensor) -> Any:
        return checkpoint(other, x, use_reentrant=False, context_fn=contexts)

    calls: list[str] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=noted, bw_compiler=noted, partition_fn=min_cut_rematerialization_partition
    )
    compiled = whole(again, backend)
    for number in (1, 2, 3):
        with under(recipe):
            expected = step(model, model, number * x)
        with under(recipe):
            assert_equal(step(compiled, other, number * x), expected)
    assert sum(str(operation.default) == call for call in calls) == (2 if saves else 4)


# -- budgets of threads ---------------------------------------------------------------------


def in_another_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_the_memory_budget_of_a_compiled_call_is_that_of_its_thread() -> None:
    lossy = fuser.activation_memory_budget(1, lossy_activation_inputs=True)
    model, x = Blocks(), rows()
    compiled = whole(model)
    exact = step(model, model, x)
    assert_equal(step(compiled, model, x), exact)
    in_another_thread(lossy.__enter__)
    assert_equal(step(compiled, model, x), exact)
    with fuser.activation_memory_budget(1, lossy_activation_inputs=True):
        rounded = step(model, model, x)
        in_another_thread(fuser.activation_memory_budget(1).__enter__)
        assert_equal(step(compiled, model, x), rounded)
    assert not torch.equal(rounded[1], exact[1])
    assert_equal(step(compiled, model, x), exact)


def test_exact_weight_gradients_are_the_same_in_a_graph() -> None:
    exact = (False, False, True)
    recipe = recipes.DelayedScaling(override_linear_precision=exact, amax_history_len=3)
    model = oracles.randomize(
        fuser.Sequential(fuser.Linear(32, 32), fuser.GELU(), fuser.Linear(32, 16))
    )
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        for step in range(3):
            x = oracles.leaf(oracles.random_tensor((16, 32), torch.float32, step))
            with fuser.autocast(recipe=recipe):
                y = run(x)
            y.backward(oracles.random_tensor((16, 16), torch.float32, 7))
        results.append([y.detach(), x.grad])
    grads = [[p.grad for p in m.parameters()] for m in (model, other)]
    for found, expected in zip(results[1] + grads[1], results[0] + grads[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
