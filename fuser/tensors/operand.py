"""Operand: one side of a matrix product of quantized tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fuser.formats import NumberFormat


class Operand(NamedTuple):
    """One side of a product: bytes ``[rows, inner]``, their number format, and their scales."""

    data: torch.Tensor
    format: NumberFormat
    scale_inv: torch.Tensor
