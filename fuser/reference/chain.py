"""Chains of pointwise ops in plain torch, stage by stage; the kernels of chains must equal it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.chain import STAGES, Stage, Stages
from fuser.reference.activation import (
    activation,
    activation_backward,
    scaled_activation,
    scaled_activation_backward,
)
from fuser.reference.dropout import dropout

Operands = Sequence[torch.Tensor | None]


def forward(stages: Stages, x: torch.Tensor, operands: Operands) -> torch.Tensor:
    """The output of the chain; every stage rounds to the dtype of ``x``, ``[..., columns]``.

    ``operands`` has one entry a stage: a bias ``[columns]``, an extra input, one scale a row,
    the seed of a dropout (two int64), or None.
    """
    for stage, operand in zip(stages, operands, strict=True):
        x = _forward(stage, x, operand)
    return x


def backward(
    stages: Stages,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    operands: Operands,
    needed: Sequence[bool] | None = None,
    saved: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Gradients of the chain's input and of each stage's operand.

    None for a stage without an operand, and for one that is not ``needed``, by default all are.
    ``x`` is the input of stage number ``saved``; None if no stage reads it.
    """
    grads: list[torch.Tensor | None] = [None] * len(stages)
    inputs = {saved: x} if saved + 1 == len(stages) else _inputs(stages, x, operands, saved)
    for i in range(len(stages) - 1, -1, -1):
        is_needed = needed is None or needed[i]
        dy, grads[i] = _backward(stages[i], dy, inputs.get(i), operands[i], is_needed)
    return dy, grads


def sum_over_rows(dy: torch.Tensor) -> torch.Tensor:
    """The gradient ``[columns]`` of a bias, from that of its sum, ``[..., columns]``."""
    return (dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])).sum(0)


def _inputs(
    stages: Stages, x: torch.Tensor | None, operands: Operands, saved: int
) -> dict[int, torch.Tensor | None]:
    """The inputs of stage ``saved`` and of those after it, up to the last activation."""
    inputs = {saved: x}
    last = max((i for i, stage in enumerate(stages) if stage.is_activation), default=saved)
    for i in range(saved, last):
        x = None if x is None else _forward(stages[i], x, operands[i])
        inputs[i + 1] = x
    return inputs


def _forward(stage: Stage, x: torch.Tensor, operand: torch.Tensor | None) -> torch.Tensor:
    if stage.is_activation and not stage.is_scaled:
        return activation(stage, x)
    if stage.name == "constant_scale":
        return x * stage.scalars[0]
    registered = STAGES[stage.name].forward
    if registered is not None and not stage.is_activation:
        y: torch.Tensor = registered(x.float(), *stage.scalars)
        return y.to(x.dtype)
    assert operand is not None
    if stage.is_scaled:
        return scaled_activation(stage, x, operand)
    return dropout(x, operand, *stage.scalars) if stage.name == "dropout" else x + operand


def _backward(
    stage: Stage,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    operand: torch.Tensor | None,
    is_needed: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if stage.is_activation:
        assert x is not None
        if not stage.is_scaled:
            return activation_backward(stage, dy, x), None
        assert operand is not None
        return scaled_activation_backward(stage, dy, x, operand, wants_dscales=is_needed)
    if stage.name == "bias":
        return dy, sum_over_rows(dy) if is_needed else None
    if stage.name == "constant_scale":
        return dy * stage.scalars[0], None
    if stage.name == "add_extra_input":
        return dy, dy if is_needed else None
    if stage.name == "dropout":
        assert operand is not None
        return dropout(dy, operand, *stage.scalars), None
    registered = STAGES[stage.name].backward
    assert registered is not None
    return registered(dy.float(), *stage.scalars).to(dy.dtype), None
