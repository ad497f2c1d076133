"""What a plan depends on, as frozen values: tensor descriptions and the plan's cache key."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser.formats import NumberFormat
from fuser.recipe import Recipe


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that a plan talks about; holds no data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes the tensor occupies."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorKey:
    """The part of a tensor that a plan depends on: not its shape.

    ``format`` is that of a quantized tensor, None for a plain one.
    """

    dtype: torch.dtype
    requires_grad: bool
    format: NumberFormat | None = None


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor travels from one op to the next where it travels quantized."""

    format: NumberFormat
    rowwise: bool
    columnwise: bool

    def __str__(self) -> str:
        return f"{self.format} {'+'.join(self.copies)}"

    @property
    def copies(self) -> tuple[str, ...]:
        """The copies that are made: ``"rowwise"``, ``"columnwise"``."""
        made = (("rowwise", self.rowwise), ("columnwise", self.columnwise))
        return tuple(name for name, is_made in made if is_made)

    @property
    def usage(self) -> dict[str, bool]:
        """Which copies are made, as ``Quantizer.with_usage`` takes it."""
        return {"rowwise": self.rowwise, "columnwise": self.columnwise}

    def nbytes(self, spec: TensorSpec) -> int:
        """Bytes that such a tensor occupies quantized."""
        return self.format.nbytes(spec.shape, self.copies)


@dataclass(frozen=True)
class OpKey:
    """What a plan depends on at one basic op.

    ``input_dtype`` is the dtype in which the main line arrives. An op whose
    ``requires_grad`` is False has no backward at all; one whose
    ``input_requires_grad`` is False needs no gradient of its main input. The
    last four say how the main line and its gradients are quantized where they
    arrive at the op and leave it, None for plain; they follow from the rest.
    """

    input_dtype: torch.dtype
    requires_grad: bool
    input_requires_grad: bool
    params: tuple[TensorKey, ...]
    extra_inputs: tuple[TensorKey, ...]
    input: QuantSpec | None = None
    output: QuantSpec | None = None
    grad_output: QuantSpec | None = None
    grad_input: QuantSpec | None = None


@dataclass(frozen=True)
class PlanKey:
    """Everything a fusion plan depends on; plans are cached by it.

    Contents, not identities: two recipes with equal fields, and so equal
    ``backward_override``, share a plan. Shapes are not part of it. ``fusions``
    are the classes in force, ``registered`` the functions registered besides them.
    ``no_kernels`` says why fuser's own kernels do not run on a device that could
    run them; None where they do, and where there are none for it.
    """

    ops: tuple[OpKey, ...]
    recipe: Recipe | None
    autocast_dtype: torch.dtype | None
    device: str
    arch: tuple[int, int] | None
    fusions: tuple[type[Any], ...]
    registered: Hashable = None
    no_kernels: str | None = None

    @property
    def requires_grad(self) -> bool:
        """Whether there is a backward."""
        return any(op.requires_grad for op in self.ops)

    def window(self, start: int, stop: int) -> PlanKey:
        """The same key seen by ops ``start`` up to ``stop`` only."""
        return replace(self, ops=self.ops[start:stop])

    def describe(self) -> str:
        """One line for people: dtype, device, recipe."""
        dtype = str(self.ops[0].input_dtype if self.ops else None).removeprefix("torch.")
        arch = f" sm_{self.arch[0]}{self.arch[1]}" if self.arch else ""
        parts = [f"{dtype} on {self.device}{arch}", "training" if self.requires_grad else "no grad"]
        if self.autocast_dtype is not None:
            parts.append(f"autocast {str(self.autocast_dtype).removeprefix('torch.')}")
        parts.append(f"recipe {self.recipe}" if self.recipe is not None else "no recipe")
        return ", ".join(parts)
