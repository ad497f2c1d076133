"""AdaptiveLayerNorm: values and gradients against its formula, its shapes, its place in models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import (
    DTYPES,
    Draw,
    assert_no_worse_than_torch,
    leaf,
    random_tensor,
    run_autocast_formula,
    run_formula,
    run_module,
)
from said import said

import fuser
from fuser import recipe as recipes

HIDDEN = 7
EPS = 1e-5
# Shape of the input, batch_dim, and whether conditions have its rank.
LAYOUTS = {
    "[B, H]": ((5,), 0, False),
    "[B, S, H]": ((2, 3), 0, False),
    "[B, S, H], [B, 1, H]": ((2, 3), 0, True),
    "[S, B, H]": ((3, 2), 1, False),
    "[S, B, H], [1, B, H]": ((3, 2), 1, True),
    "[T, B, S, H]": ((3, 2, 4), 1, False),
}
every_layout = pytest.mark.parametrize(
    ("leading", "batch_dim", "has_rank"), LAYOUTS.values(), ids=LAYOUTS
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def formula(batch_dim: int, rank: int, native: bool = False) -> Any:
    """In plain torch; ``native`` by its own layer norm, as a user would write it."""

    def compute(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        shape = [1] * (rank - 1) + [x.shape[-1]]
        shape[batch_dim] = x.shape[batch_dim]
        gain, bias = 1 + scale.reshape(shape), shift.reshape(shape)
        if native:
            return F.layer_norm(x, x.shape[-1:], eps=EPS) * gain + bias
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + EPS) * gain + bias

    return compute


def tensors_of(
    leading: tuple[int, ...], batch_dim: int, has_rank: bool, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    x = random_tensor((*leading, HIDDEN), dtype, seed)
    shape: tuple[int, ...] = (leading[batch_dim], HIDDEN)
    if has_rank:
        shape = (*(n if i == batch_dim else 1 for i, n in enumerate(leading)), HIDDEN)
    return [x, *(random_tensor(shape, dtype, 100 + 2 * seed + k) for k in range(2))]


@every_layout
@every_dtype
def test_output_and_every_gradient_are_no_worse_than_torch(
    leading: tuple[int, ...], batch_dim: int, has_rank: bool, dtype: torch.dtype
) -> None:
    op = fuser.AdaptiveLayerNorm(HIDDEN, batch_dim=batch_dim)
    rank, draws = len(leading) + 1, []
    for seed in range(8):
        tensors = tensors_of(leading, batch_dim, has_rank, dtype, seed)
        named = dict(zip(("x", "extra 0", "extra 1"), tensors, strict=True))
        draws.append(
            Draw(
                run_module(op, leaf(tensors[0]), [leaf(t) for t in tensors[1:]]),
                run_formula(formula(batch_dim, rank, native=True), named, dtype),
                run_formula(formula(batch_dim, rank), named, torch.float64),
            )
        )
    assert_no_worse_than_torch(*draws)


def test_under_torchs_autocast_the_output_has_its_dtype() -> None:
    op, draws = fuser.AdaptiveLayerNorm(HIDDEN), []
    for seed in range(8):
        tensors = tensors_of((2, 3), 0, False, torch.float32, seed)
        named = dict(zip(("x", "extra 0", "extra 1"), tensors, strict=True))
        extras = [leaf(t) for t in tensors[1:]]
        bf16, exact = torch.bfloat16, run_formula(formula(0, 3), named, torch.float64)
        draws.append(
            Draw(
                run_module(op, leaf(tensors[0]), extras, bf16),
                run_autocast_formula(formula(0, 3, native=True), named, bf16),
                exact,
                bf16,
            )
        )
    assert_no_worse_than_torch(*draws)


def test_a_small_scale_in_bf16_is_not_lost_beside_one() -> None:
    x = random_tensor((2, 64, 512), torch.bfloat16, 1)
    scale = torch.full((2, 512), 2**-10, dtype=torch.bfloat16)
    shift = torch.zeros_like(scale)
    op = fuser.AdaptiveLayerNorm(512)
    exact = formula(0, 3)(*(t.double() for t in (x, scale, shift)))
    without = op(x, torch.zeros_like(scale), shift)
    with_scale = op(x, scale, shift)
    errors = [(y.double() - exact).square().mean() for y in (with_scale, without)]
    assert errors[0] < errors[1]


def test_conditions_may_have_another_dtype_and_keep_it() -> None:
    x, scale, shift = tensors_of((2, 3), 0, False, torch.float32, 1)
    x, scale, shift = leaf(x, torch.bfloat16), leaf(scale), leaf(shift, torch.float16)
    y = fuser.AdaptiveLayerNorm(HIDDEN)(x, scale, shift)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert [t.grad.dtype for t in (x, scale, shift)] == [
        torch.bfloat16,
        torch.float32,
        torch.float16,
    ]


@pytest.mark.parametrize("which", range(3))
def test_each_gradient_comes_alone(which: int) -> None:
    op, tensors = fuser.AdaptiveLayerNorm(HIDDEN), tensors_of((2, 3), 0, False, torch.float32, 1)
    together = [leaf(t) for t in tensors]
    op(*together).square().sum().backward()
    tensors[which].requires_grad_()
    plan = fuser.Sequential(op).plan(*tensors) if which == 0 else None
    op(*tensors).square().sum().backward()
    assert [t.grad is not None for t in tensors] == [k == which for k in range(3)]
    torch.testing.assert_close(tensors[which].grad, together[which].grad)
    if plan is not None:
        assert plan.backward[0].kernel == "mul, layer_norm_backward"


@pytest.mark.parametrize("recipe", [recipes.MXFP8BlockScaling(), recipes.Float8BlockScaling()])
def test_in_a_pipeline_it_writes_the_format_that_the_linear_reads(recipe: Any) -> None:
    x, scale, shift = (random_tensor(s, torch.float32, k) for k, s in enumerate(
        [(4, 8, 64), (4, 64), (4, 64)]))  # fmt: skip
    op, linear = fuser.AdaptiveLayerNorm(64), fuser.Linear(64, 64)
    results = []
    for model in (fuser.Sequential(linear, op, linear), None):
        leaves = [leaf(t) for t in (x, scale, shift)]
        linear.zero_grad()
        with fuser.autocast(recipe=recipe):
            y = linear(op(linear(leaves[0]), *leaves[1:])) if model is None else model(*leaves)
        y.square().sum().backward()
        results.append([y.detach(), *(t.grad for t in leaves), linear.weight.grad])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


class Doubled(fuser.BasicOperation):
    """Passes x on, with 2 x as an extra output."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        return input_, [(2 * input_,)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ((grad,),) = basic_op_grad_extra_outputs
        return grad_output + 2 * grad, [()], [()]


def test_channels_bring_conditions_and_their_gradients() -> None:
    """A condition computed in the pipeline gets the gradient that autograd finds."""
    x, shift = (random_tensor((4, HIDDEN), torch.float32, seed) for seed in (1, 2))
    model = fuser.Sequential(
        Doubled().set_extra_output_channel(0, "scale", output_to_caller=False),
        fuser.GELU(),
        fuser.AdaptiveLayerNorm(HIDDEN).set_extra_input_channel(0, "scale"),
    )
    ours, plain = leaf(x), leaf(x)
    model(ours, shift).square().sum().backward()
    y = F.layer_norm(F.gelu(plain, approximate="tanh"), (HIDDEN,), eps=EPS)
    (y * (1 + 2 * plain) + shift).square().sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize(
    ("x", "scale", "shift", "words"),
    [
        ((7,), (1, 7), (1, 7), said("adaptive-layer-norm-dimensions-more-last", None, 2)),
        (
            (2, 6),
            (2, 7),
            (2, 7),
            said("adaptive-layer-norm-dimensions-more-last", None, None, None, 7),
        ),
        (
            (2, 3, 7),
            (3, 7),
            (2, 7),
            said(
                "adaptive-layer-norm-samples-along-dimension",
                "scale",
                (3, 7),
                None,
                None,
                (2, 7),
                (2, 1, 7),
            ),
        ),
        (
            (2, 3, 7),
            (2, 7),
            (7,),
            said("adaptive-layer-norm-samples-along-dimension", "shift", (7,)),
        ),
    ],
)
def test_another_shape_is_refused_with_those_that_it_takes(
    x: Any, scale: Any, shift: Any, words: str
) -> None:
    with pytest.raises(fuser.InputError, match=words):
        fuser.AdaptiveLayerNorm(7)(torch.ones(x), torch.ones(scale), torch.ones(shift))


@pytest.mark.parametrize("options", [{"eps": -1.0}, {"eps": math.nan}, {"batch_dim": -1}])
def test_arguments_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(fuser.InputError, match=said("adaptive-layer-norm-eps-dim-finite")):
        fuser.AdaptiveLayerNorm(7, **options)
    with pytest.raises(fuser.InputError, match=said("parameters-positive", None, "hidden_size", 0)):
        fuser.AdaptiveLayerNorm(0)


@pytest.mark.parametrize("name", ["batch_dim", "eps"])
def test_gradients_are_of_what_the_forward_used(name: str) -> None:
    op = fuser.AdaptiveLayerNorm(HIDDEN)
    tensors = [leaf(t) for t in tensors_of((3, 3), 0, False, torch.float32, seed=8)]
    y = op(*tensors)
    dy = random_tensor(y.shape, torch.float32, 9)
    expected = torch.autograd.grad(y, tensors, dy, retain_graph=True)
    setattr(op, name, 1)
    found = torch.autograd.grad(y, tensors, dy, retain_graph=True)
    assert all(map(torch.equal, found, expected))


def test_no_rows_give_no_output_and_zero_gradients() -> None:
    x, scale, shift = (torch.ones(s, requires_grad=True) for s in ((2, 0, 7), (2, 7), (2, 7)))
    y = fuser.AdaptiveLayerNorm(7)(x, scale, shift)
    assert y.shape == (2, 0, 7)
    y.sum().backward()
    assert torch.equal(scale.grad, torch.zeros(2, 7))
    assert x.grad.shape == x.shape


def test_the_plan_says_what_it_launches_and_saves() -> None:
    tensors = [leaf(t) for t in tensors_of((2, 3), 0, False, torch.float32, 1)]
    plan = fuser.Sequential(fuser.AdaptiveLayerNorm(HIDDEN)).plan(*tensors)
    assert plan.forward[0].kernel == "layer_norm, addcmul"
    assert plan.backward[0].kernel == "mul, layer_norm_backward, mul_sum, sum"
