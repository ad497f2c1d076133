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
    inputs: list[torch.Tensor | None] = [None] * saved
    for i in range(saved, len(stages)):
        inputs.append(x)
        # Up to the last activation: later stages do not need their inputs.
        reads_again = any(stage.is_activation for stage in stages[i + 1 :])
        x = _forward(stages[i], x, operands[i]) if x is not None and reads_again else None
    needed = [True] * len(stages) if needed is None else needed
    grads: list[torch.Tensor | None] = []
    steps = list(zip(stages, inputs, operands, needed, strict=True))
    for stage, input_, operand, is_needed in reversed(steps):
        dy, grad = _backward(stage, dy, input_, operand, is_needed)
        grads.insert(0, grad)
    return dy, grads


def _forward(stage: Stage, x: torch.Tensor, operand: torch.Tensor | None) -> torch.Tensor:
    if stage.name == "constant_scale":
        return x * stage.scalars[0]
    if stage.is_activation and not stage.is_scaled:
        return activation(stage, x)
    own = STAGES[stage.name].forward
    if own is not None and not stage.is_activation:
        y: torch.Tensor = own(x.float(), *stage.scalars)
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
    if stage.name == "constant_scale":
        return dy * stage.scalars[0], None
    if stage.name == "bias":
        return dy, dy.reshape(-1, dy.shape[-1]).sum(0) if is_needed else None
    if stage.name == "add_extra_input":
        return dy, dy if is_needed else None
    if stage.name == "dropout":
        assert operand is not None
        return dropout(dy, operand, *stage.scalars), None
    own = STAGES[stage.name].backward
    if own is not None and not stage.is_activation:
        return own(dy.float(), *stage.scalars).to(dy.dtype), None
    assert x is not None
    if stage.is_scaled:
        assert operand is not None
        return scaled_activation_backward(stage, dy, x, operand, wants_dscales=is_needed)
    return activation_backward(stage, dy, x), None
