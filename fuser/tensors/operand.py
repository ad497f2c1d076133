"""What a matrix product reads of a quantized tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fuser.formats import NumberFormat


class Operand(NamedTuple):
    """One side of a product: bytes ``[rows, inner]``, what they are, and their scales."""

    data: torch.Tensor
    format: NumberFormat
    scale_inv: torch.Tensor
