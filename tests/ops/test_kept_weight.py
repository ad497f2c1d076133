"""The quantized weight of the first microbatch: which weight is kept, and for how long."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import every_format as formats
import pytest
import torch

import fuser
from fuser import recipe as recipes

RECIPES = {
    **{name: formats.deterministic(cls) for name, cls in formats.RECIPES.items()},
    "mxfp8-dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "current-high_precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
FLAGS = (None, True, False)


def uneven(*shape: int, seed: int) -> torch.Tensor:
    """Values times powers of two: their copies along rows and along columns differ."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * 2.0 ** torch.randint(-12, 12, shape, generator=generator)


def linear() -> fuser.BasicLinear:
    op = fuser.BasicLinear(64, 32)
    with torch.no_grad():
        op.weight.copy_(uneven(32, 64, seed=1))
    return op


def run(op: Any, recipe: Any, flag: bool | None, with_grad: bool = True) -> list[torch.Tensor]:
    x = uneven(32, 64, seed=2).requires_grad_()
    with fuser.autocast(recipe=recipe), torch.set_grad_enabled(with_grad):
        y = op(x, is_first_microbatch=flag)
    if not with_grad:
        return [y]
    y.backward(uneven(32, 32, seed=3))
    grad, op.weight.grad = op.weight.grad, None
    return [y.detach(), x.grad, grad]


def trained(recipe: Any) -> fuser.BasicLinear:
    """With scales of delayed scaling that do not change any more."""
    op = linear()
    for _ in range(2):
        run(op, recipe, None)
    return op


@every_recipe
def test_every_flag_gives_the_same_output_and_gradients(recipe: Any) -> None:
    expected = run(trained(recipe), recipe, None)
    for flags in ((None, True, False, False), (True, None, False), (False, False)):
        op = trained(recipe)
        for flag in flags:
            assert all(map(torch.equal, run(op, recipe, flag), expected)), (flags, flag)


@pytest.mark.parametrize("is_training_first", [False, True])
@every_recipe
def test_what_evaluation_kept_serves_training_and_the_other_way_round(
    recipe: Any, is_training_first: bool
) -> None:
    op = trained(recipe)
    found = {grad: run(op, recipe, True, with_grad=grad) for grad in (is_training_first,)}
    found[not is_training_first] = run(op, recipe, False, with_grad=not is_training_first)
    expected = run(trained(recipe), recipe, None)
    assert all(map(torch.equal, found[True], expected))
    assert torch.equal(found[False][0], expected[0])


def experts(has_one_weight: bool) -> fuser.GroupedLinear:
    torch.manual_seed(1)
    return fuser.GroupedLinear(2, 64, 32, single_grouped_weight=has_one_weight)


KEEPERS: dict[str, Any] = {
    "a linear": linear,
    "experts": lambda: experts(False),
    "experts of one weight": lambda: experts(True),
}


@pytest.mark.parametrize("keeper", KEEPERS)
@every_recipe
def test_what_inference_mode_kept_serves_training(recipe: Any, keeper: str) -> None:
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        op, x = KEEPERS[keeper](), uneven(32, 64, seed=2).requires_grad_()
        sizes = () if keeper == "a linear" else (torch.tensor([8, 24]),)
        with fuser.autocast(recipe=recipe):
            with context():
                op(x.detach(), *sizes, is_first_microbatch=True)
            y = op(x, *sizes, is_first_microbatch=False)
        y.backward(uneven(32, 32, seed=3))
        found.append([y.detach(), x.grad, *(p.grad for p in op.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


OPTIMIZERS = {
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_of_any_optimizer_is_noticed(make: Any) -> None:
    """Whatever the caller says, also of an optimizer from before the first microbatch."""
    op, recipe = linear(), RECIPES["current"]
    optimizer = make(op.parameters())
    for _ in range(2):
        before = run(op, recipe, True)[0]
        op.weight.grad = uneven(32, 64, seed=4)
        optimizer.step()
        op.weight.grad = None
        found = run(op, recipe, False)
        assert not torch.equal(found[0], before)
        assert all(map(torch.equal, found, run(op, recipe, None)))


class OfMasters(torch.optim.Optimizer):
    """Writes weights whose gradients are elsewhere, in a way that torch does not count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(-2)


def test_a_step_of_an_optimizer_that_reads_no_gradients_is_noticed() -> None:
    op, recipe = linear(), RECIPES["current"]
    optimizer = OfMasters(op.parameters())
    for _ in range(2):
        before = run(op, recipe, True)[0]
        version = op.weight._version
        optimizer.step()
        assert op.weight._version == version
        found = run(op, recipe, False)
        assert not torch.equal(found[0], before)
        assert all(map(torch.equal, found, run(op, recipe, None)))


@pytest.mark.parametrize("write", ["in place", "foreach", "data", "replaced"])
def test_a_write_that_torch_counts_or_another_weight_is_noticed(write: str) -> None:
    op, recipe = linear(), RECIPES["mxfp8"]
    before = run(op, recipe, True)[0]
    with torch.no_grad():
        if write == "in place":
            op.weight.mul_(2)
        elif write == "foreach":
            torch._foreach_mul_([op.weight], 2)
        elif write == "data":
            op.weight.data = op.weight.data * 2
        else:
            op.weight = torch.nn.Parameter(op.weight * 2)
    found = run(op, recipe, False)
    assert not torch.equal(found[0], before)
    assert all(map(torch.equal, found, run(op, recipe, None)))


@pytest.mark.parametrize("change", ["to", "load_state_dict"])
def test_a_kept_weight_is_in_no_ones_way_where_torch_swaps_parameters(change: str) -> None:
    op, other = linear(), linear()
    with torch.no_grad():
        other.weight.mul_(2)
    run(op, RECIPES["mxfp8"], True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if change == "to":
            op.to(torch.float16)
        else:
            op.load_state_dict(other.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    op.float()
    found = run(op, RECIPES["mxfp8"], False)
    assert all(map(torch.equal, found, run(op, RECIPES["mxfp8"], None)))


def test_a_weight_that_was_kept_in_another_dtype_or_format_is_quantized_anew() -> None:
    op, x = linear(), uneven(32, 64, seed=2)

    def output(name: str, dtype: torch.dtype | None, flag: bool | None) -> torch.Tensor:
        is_cast = dtype is not None
        with torch.autocast("cpu", dtype, is_cast), fuser.autocast(recipe=RECIPES[name]):
            result: torch.Tensor = op(x, is_first_microbatch=flag).float()
        return result

    # Each pair in both orders: the second call finds what the first one kept.
    pairs = (
        (("current", None), ("current", torch.bfloat16)),
        (("mxfp8", None), ("current", None)),
        (("mxfp8", None), ("mxfp8-dequantized", None)),
    )
    for pair in pairs:
        for first, second in (pair, pair[::-1]):
            output(*(*first, True))
            found, expected = (output(*(*second, flag)) for flag in (False, None))
            assert torch.equal(found, expected), (first, second)


def test_a_first_microbatch_quantizes_anew_after_a_write_that_nobody_counts() -> None:
    op, recipe = linear(), RECIPES["current"]
    before = run(op, recipe, True)
    op.weight.data.mul_(3)
    assert all(map(torch.equal, run(op, recipe, False), before)), "the write was counted"
    found = run(op, recipe, True)
    assert not torch.equal(found[0], before[0])
    assert all(map(torch.equal, found, run(op, recipe, None)))
    assert all(map(torch.equal, run(op, recipe, False), found))


@every_recipe
def test_a_replaced_weight_is_not_kept_alive_by_what_was_kept_of_it(recipe: Any) -> None:
    op = linear()
    run(op, recipe, True)
    gone = weakref.ref(op.weight)
    kept = weakref.ref(next(iter(op._kept_weight.values())).made)
    op.weight = torch.nn.Parameter(uneven(32, 64, seed=5))
    gc.collect()
    assert gone() is None
    assert kept() is None
    assert all(map(torch.equal, run(op, recipe, False), run(op, recipe, None)))


def test_a_kept_weight_serves_a_recomputation_under_the_flag_of_the_first_microbatch() -> None:
    calls = []

    class Counting(fuser.MXFP8Quantizer):
        def buffers_of(self, rows: Any) -> Any:
            calls.append(tuple(rows.shape))
            return super().buffers_of(rows)

    recipe = recipes.CustomRecipe(lambda role: Counting())
    op, x = linear(), uneven(32, 64, seed=2).requires_grad_()
    with fuser.autocast(recipe=recipe):
        y = torch.utils.checkpoint.checkpoint(
            lambda x: torch.sin(op(x, is_first_microbatch=True)), x, use_reentrant=False
        )
    y.sum().backward()
    assert calls.count((32, 64)) == 3  # weight and input, then the input again
