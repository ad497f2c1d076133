"""Rows of the arguments of norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import oracles
import torch
from argument_checks import (
    BF16,
    agrees,
    agrees_quantized,
    is_on_meta_until_its_first_call,
    near,
    parameters_are_in,
    refuses,
    untyped,
)
from argument_rows import Of, ignores, sets
from oracles import random_tensor

import fuser

X = random_tensor((4, 3, 5), BF16, 1)
NORMS = {fuser.LayerNorm: oracles.layernorm, fuser.RMSNorm: oracles.rmsnorm}


@sets("fuser.LayerNorm", normalized_shape=Of((3, 5), instead=5))
def _the_normalized_dimensions(given: dict[str, Any]) -> None:
    for norm, formula in NORMS.items():
        op = norm(**given)
        assert {tuple(p.shape) for p in op.parameters()} == {(3, 5)}
        agrees(partial(norm, **given), formula(2), X)
        refuses(partial(op, X.float().transpose(1, 2)), r"its last dimensions must be \(3, 5\)")
        for shape in ((5,), [5]):
            agrees(partial(norm, shape), formula(1), X)


@sets("fuser.LayerNorm", eps=0.75)
def _eps_of_a_norm(given: dict[str, Any]) -> None:
    for norm, formula in NORMS.items():
        agrees(partial(norm, 5, **given), formula(eps=0.75), X)
        for dims, shape in enumerate((5, (3, 5)), 1):
            agrees_quantized(partial(norm, shape, **given), formula(dims, eps=0.75), X)
        _check_after_an_addition(norm, formula(eps=0.75), given)


@sets("fuser.LayerNorm", zero_centered_gamma=True)
def _gain_around_zero(given: dict[str, Any]) -> None:
    for norm, formula in NORMS.items():
        assert torch.equal(norm(5, **given).weight, torch.zeros(5))
        agrees(partial(norm, 5, **given), formula(zero_centered=True), X)
        agrees_quantized(partial(norm, 5, **given), formula(zero_centered=True), X)
        agrees(
            partial(norm, (3, 5), **given),
            formula(2, zero_centered=True),
            X,
        )
        _check_after_an_addition(norm, formula(zero_centered=True), given)
        on_meta = norm(5, device="meta", **given)
        on_meta(X.float())
        assert torch.equal(on_meta.weight, torch.zeros(5))


def _check_after_an_addition(norm: Any, formula: Any, given: dict[str, Any]) -> None:
    """The norm of a sum, which one kernel computes with it."""
    agrees(
        lambda dtype: fuser.Sequential(fuser.AddExtraInput(), norm(5, dtype=dtype, **given)),
        lambda x, *rest: formula(x + rest[-1], *rest[:-1]),
        X,
        random_tensor(X.shape, BF16, 3),
    )


@sets("fuser.LayerNorm", dtype=BF16)
def _dtype_of_gains(given: dict[str, Any]) -> None:
    for norm in NORMS:
        op = norm(5, **given)
        parameters_are_in(op, BF16)
        assert op(X).dtype is BF16


@sets("fuser.LayerNorm", device="meta")
def _device_of_gains(given: dict[str, Any]) -> None:
    for norm, formula in NORMS.items():
        op = norm(5, **given)
        is_on_meta_until_its_first_call(op, X.float())
        near(
            op(X.float()),
            formula()(X.double(), torch.ones(5).double(), torch.zeros(5).double())
            if norm is fuser.LayerNorm
            else formula()(X.double(), torch.ones(5).double()),
            1e-5,
        )


@sets("fuser.L2Normalization", eps=2.0)
def _eps_of_the_sum_of_squares(given: dict[str, Any]) -> None:
    agrees(untyped(fuser.L2Normalization, **given), oracles.l2norm(2.0), X)
    agrees_quantized(untyped(fuser.L2Normalization, **given), oracles.l2norm(2.0), X)


ignores("fuser.LayerNorm", "kernels take all multiprocessors", "sm_margin")
ignores("fuser.L2Normalization", "the input has these sizes", "seq_length", "micro_batch_size")


# -- AdaptiveLayerNorm ------------------------------------------------------------------


def _adaptive(eps: float = 1e-5, batch_dim: int = 0) -> Any:
    def formula(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        shape = [n if i in (batch_dim, x.dim() - 1) else 1 for i, n in enumerate(x.shape)]
        normed = oracles.layernorm(eps=eps)(x, torch.ones(5).double(), torch.zeros(5).double())
        y: torch.Tensor = normed * (1 + scale.reshape(shape)) + shift.reshape(shape)
        return y

    return formula


def _scales(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_tensor((batch, 5), BF16, 5), random_tensor((batch, 5), BF16, 6)


@sets("fuser.AdaptiveLayerNorm", hidden_size=Of(5, instead=3))
def _hidden_size_of_the_adaptive_norm(given: dict[str, Any]) -> None:
    agrees(untyped(fuser.AdaptiveLayerNorm, **given), _adaptive(), X, *_scales(4))
    x = torch.zeros(4, 3, 3)
    refuses(
        lambda: fuser.AdaptiveLayerNorm(**given)(x, torch.zeros(4, 3), torch.zeros(4, 3)),
        "the last is 5",
    )


@sets("fuser.AdaptiveLayerNorm", eps=0.75)
def _eps_of_the_adaptive_norm(given: dict[str, Any]) -> None:
    agrees(untyped(fuser.AdaptiveLayerNorm, 5, **given), _adaptive(0.75), X, *_scales(4))
    agrees_quantized(untyped(fuser.AdaptiveLayerNorm, 5, **given), _adaptive(0.75), X, *_scales(4))


def _row_of_the_batch_dimension(dim: int) -> None:
    def samples_along_another_dimension(given: dict[str, Any]) -> None:
        for batch_dim in (1, 2):
            own = {"batch_dim": batch_dim} if given and batch_dim == 2 else given
            x = X if batch_dim == 1 else random_tensor((2, 3, 4, 5), BF16, 1)
            pair = _scales(x.shape[batch_dim])
            formula = _adaptive(batch_dim=batch_dim)
            agrees(untyped(fuser.AdaptiveLayerNorm, 5, **own), formula, x, *pair)
            agrees_quantized(untyped(fuser.AdaptiveLayerNorm, 5, **own), formula, x, *pair)

    sets("fuser.AdaptiveLayerNorm", batch_dim=dim)(samples_along_another_dimension)


_row_of_the_batch_dimension(1)
