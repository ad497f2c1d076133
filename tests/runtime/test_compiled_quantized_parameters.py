"""Quantized parameters inside torch.compile: whole graphs, and the bits of the eager step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import every_format as formats
import pytest
import torch
from needs import needs_compiler
from pipeline_kernels import on_kernels
from said import holds, said
from test_compiled import _nothing_compiled_yet
from torch._dynamo.utils import counters

import fuser
from fuser import recipe as recipes

__all__ = ["_nothing_compiled_yet"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

WIDTH = 64
DELAYED = recipes.DelayedScaling(amax_history_len=3)
RECIPES: dict[str, Any] = {
    **{name: formats.deterministic(recipe) for name, recipe in formats.STATELESS.items()},
    "delayed": DELAYED,
}


def block(recipe: Any, seed: int = 0) -> fuser.Sequential:
    torch.manual_seed(seed)
    with fuser.quantized_model_init(recipe=recipe):
        return fuser.Sequential(
            fuser.RMSNorm(WIDTH),
            fuser.Linear(WIDTH, 2 * WIDTH, bias=False),
            fuser.SwiGLU(),
            fuser.Linear(WIDTH, WIDTH),
        )


def tied(recipe: Any) -> fuser.Sequential:
    torch.manual_seed(0)
    with fuser.quantized_model_init(recipe=recipe):
        model = fuser.Sequential(
            fuser.Linear(WIDTH, WIDTH), fuser.GELU(), fuser.Linear(WIDTH, WIDTH)
        )
    model[2].weight = model[0].weight
    return model


def experts(recipe: Any) -> fuser.Sequential:
    torch.manual_seed(0)
    with fuser.quantized_model_init(recipe=recipe):
        return fuser.Sequential(fuser.GroupedLinear(2, WIDTH, WIDTH), fuser.GELU())


def frozen(recipe: Any) -> fuser.Sequential:
    model = block(recipe)
    model[1].weight.requires_grad_(False)
    return model


def rows(count: int = 32) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def whole(function: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(function, backend=backend, fullgraph=True)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def train(function: Any, model: torch.nn.Module, recipe: Any, steps: int = 3) -> list[Any]:
    """Outputs and gradients of some steps, and the weights after them."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for number in range(steps):
        optimizer.zero_grad()
        x = rows(32 + number % 2).requires_grad_()
        with fuser.autocast(recipe=recipe):
            y = function(x)
        (y * torch.linspace(-1, 2, WIDTH)).sum().backward()
        found += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        optimizer.step()
    return found + [
        (p.dequantize() if _is_quantized(p) else p).detach() for p in model.parameters()
    ]


def _is_quantized(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, fuser.QuantizedTensor)


def assert_equal(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.sampled
@pytest.mark.parametrize("make", [block, tied, frozen], ids=lambda make: make.__name__)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_compiled_training_has_the_bits_of_eager_training(
    recipe: Any, make: Callable[[Any], fuser.Sequential]
) -> None:
    model, other = make(recipe), make(recipe)
    assert any(map(_is_quantized, model.parameters()))
    expected = train(other, other, recipe)
    assert_equal(train(whole(lambda x: model(x)), model, recipe), expected)
    assert graphs() <= 2  # the second has a symbolic number of rows


@pytest.mark.sampled
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("recipe", formats.STATELESS.values(), ids=formats.STATELESS)
def test_backward_overrides_have_the_bits_of_eager_steps(recipe: Any, override: str) -> None:
    recipe = formats.deterministic(recipe, backward_override=override)
    model, other = block(recipe), block(recipe)
    expected = train(other, other, recipe, steps=1)
    assert_equal(train(whole(lambda x: model(x)), model, recipe, steps=1), expected)


@needs_compiler
@pytest.mark.parametrize("name", ["current", "delayed"])
def test_inductor_compiles_what_is_around(name: str) -> None:
    recipe = RECIPES[name]
    model, other = block(recipe), block(recipe)
    expected = train(lambda x: other(x * 2) + 1, other, recipe)
    assert_equal(train(whole(lambda x: model(x * 2) + 1, "inductor"), model, recipe), expected)


def test_weights_are_read_quantized_outside_of_autocast_too() -> None:
    model = block(recipes.MXFP8BlockScaling())
    with torch.no_grad():
        assert torch.equal(whole(lambda x: model(x))(rows()), model(rows()))


def test_kernels_have_the_bits_of_an_eager_step() -> None:
    recipe = recipes.Float8CurrentScaling()
    model, other = block(recipe), block(recipe)
    with on_kernels():
        expected = train(other, other, recipe, steps=1)
        assert_equal(train(whole(lambda x: model(x)), model, recipe, steps=1), expected)


@pytest.mark.parametrize("recipe", [recipes.MXFP8BlockScaling(), DELAYED], ids=["mxfp8", "delayed"])
def test_experts_have_the_bits_of_eager_steps(recipe: Any) -> None:
    model, other = experts(recipe), experts(recipe)
    sizes = torch.tensor([20, 12])
    found = []
    for function in (whole(lambda x: model(x, sizes)), lambda x: other(x, sizes)):
        x = rows().requires_grad_()
        with fuser.autocast(recipe=recipe):
            y = function(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad])
    assert_equal(*found)
    assert_equal(*([p.grad for p in each.parameters()] for each in (model, other)))


def test_equal_blocks_are_one_graph_and_a_copy_that_goes_another() -> None:
    recipe = DELAYED
    blocks = [block(recipe, seed) for seed in range(3)]
    others = copy.deepcopy(blocks)
    for one in blocks:
        one.compile(backend="aot_eager", fullgraph=True)
    with fuser.autocast(recipe=recipe):
        for one, other in zip(blocks, others, strict=True):
            assert torch.equal(one(rows()), other(rows()))
    assert graphs() == 1
    blocks[0][1].weight.update_usage(columnwise_usage=False)
    with fuser.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(blocks[0](rows()), others[0](rows()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_in_a_graph(reentrant: bool) -> None:
    recipe = recipes.Float8CurrentScaling()
    model, other = block(recipe), block(recipe)

    def again(x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)

    expected = train(other, other, recipe, steps=1)
    assert_equal(train(whole(again), model, recipe, steps=1), expected)


def test_a_written_weight_counts() -> None:
    recipe = recipes.Float8CurrentScaling()
    model = block(recipe)
    compiled = whole(lambda x: model(x))
    with torch.no_grad(), fuser.autocast(recipe=recipe):
        before = compiled(rows())
        model[1].weight.mul_(-1)
        assert torch.equal(compiled(rows()), model(rows()))
        assert not torch.equal(compiled(rows()), before)


@pytest.mark.parametrize("recipe", [recipes.MXFP8BlockScaling(), DELAYED], ids=["mxfp8", "delayed"])
def test_a_weight_that_is_written_before_backward_is_refused_as_in_an_eager_step(
    recipe: Any,
) -> None:
    for compiles in (False, True):
        model = block(recipe)
        trained = whole(lambda x: model(x)) if compiles else model  # noqa: B023
        x = rows().requires_grad_()
        with fuser.autocast(recipe=recipe):
            y = trained(x)
        with torch.no_grad():
            model[1].weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def _loaded(model: torch.nn.Module) -> None:
    trained = block(DELAYED, seed=5)
    train(trained, trained, DELAYED)
    model.load_state_dict(trained.state_dict())


def _swapped(model: Any) -> None:
    other = block(DELAYED, seed=6)
    train(other, other, DELAYED)
    model[1].weight = other[1].weight


@pytest.mark.parametrize("change", [_loaded, _swapped, lambda model: None])
@pytest.mark.parametrize("made_under", [DELAYED, recipes.DelayedScaling()], ids=["same", "other"])
def test_weights_have_the_scales_of_their_ops_under_delayed_scaling(
    change: Any, made_under: Any
) -> None:
    """Writes of optimizers are quantized by scales of the op, whichever the weight came with."""
    model, other = block(made_under), block(made_under)
    compiled = whole(lambda x: model(x))
    assert_equal(train(compiled, model, DELAYED), train(other, other, DELAYED))
    for each in (model, other):
        change(each)
    for _ in range(2):
        with torch.no_grad():
            for each in (model, other):
                each[1].weight.mul_(0.7)
        assert_equal(train(compiled, model, DELAYED), train(other, other, DELAYED))
    state = model[1].basic_ops[0]._delayed["forward"]
    assert model[1].weight._quantizer.scale.data_ptr() == state.scale[1:].data_ptr()


def test_weights_have_the_scales_of_their_ops_after_others_that_are_not_quantized() -> None:
    """In pipelines of the same ops, of which the first is made without quantized weights."""

    def linear(*, is_quantized: bool = True) -> fuser.Sequential:
        with fuser.quantized_model_init(enabled=is_quantized, recipe=DELAYED):
            return fuser.Sequential(fuser.Linear(WIDTH, WIDTH))

    plain, model, trained = linear(is_quantized=False), linear(), linear()
    for each in (plain, trained):
        train(each, each, DELAYED, steps=1)
    plain.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(whole(plain), plain, DELAYED, steps=1)
    other = copy.deepcopy(model)
    compiled = whole(other)
    for function, each in ((model, model), (compiled, other)):
        train(function, each, DELAYED, steps=1)
        each.load_state_dict(copy.deepcopy(trained.state_dict()))
        train(function, each, DELAYED, steps=1)
    (one,), (two,) = (each[0].basic_ops[:1] for each in (model, other))
    for mode, state in one._delayed.items():
        assert torch.equal(state.amax_history, two._delayed[mode].amax_history)


def test_a_weight_that_keeps_its_source_is_refused_in_a_graph() -> None:
    recipe = recipes.Float8CurrentScaling()
    model, x = block(recipe), rows()
    weight = model[1].weight
    weight.high_precision_source = weight.dequantize()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"shape \(128, 64\), is a view"):
        whole(lambda x: model(x))(x)


def test_an_export_is_refused() -> None:
    model = block(recipes.Float8CurrentScaling())
    with pytest.raises(
        fuser.StateError,
        match=said("traced-cannot-exported", None, holds("its parameters are quantized")),
    ):
        torch.export.export(model, (rows(),), strict=False)


def test_a_write_in_a_graph_to_a_weight_with_a_state_is_refused() -> None:
    weight = block(DELAYED)[1].weight
    assert weight._quantizer.without_state() is not weight._quantizer

    def halve(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.mul_(0.5)

    with pytest.raises(Exception, match="read-only copy"), contextlib.suppress(AssertionError):
        torch.compile(halve, backend="aot_eager", fullgraph=True)(weight)


def test_only_parameters_may_be_quantized() -> None:
    model = fuser.Sequential(fuser.Linear(WIDTH, WIDTH))
    x = fuser.MXFP8Quantizer()(rows())
    with fuser.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        quantized = fuser.Sequential(fuser.Linear(WIDTH, WIDTH))
    for one in (model, quantized):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="a MXFP8Tensor is among"):
            whole(lambda x: one(x))(x)  # noqa: B023
