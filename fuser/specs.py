"""Specs and keys: frozen descriptions of tensors and ops, and the key of the plan cache."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fuser.formats import NumberFormat
from fuser.recipe import Recipe


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor in a plan; holds no data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Product(NamedTuple):
    """A matrix product of an op's forward, and each of the two of its backward.

    ``flops`` are the operations of one of them, two a multiplication and addition; ``operands``
    the elements of input, weight and output; ``groups`` the number of weights of a grouped linear,
    which is 0 for a single matrix.
    """

    flops: int
    operands: tuple[int, int, int]
    groups: int = 0


@dataclass(frozen=True)
class TensorKey:
    """The properties of a tensor that a plan depends on, without its shape.

    ``format`` is the format of a quantized tensor, None for an unquantized one.
    """

    dtype: torch.dtype
    requires_grad: bool
    format: NumberFormat | None = None


@dataclass(frozen=True)
class QuantSpec:
    """The format and usages of a tensor that is quantized between two ops."""

    format: NumberFormat
    rowwise: bool
    columnwise: bool

    def __str__(self) -> str:
        return f"{self.format} {'+'.join(self.usages)}"

    @property
    def usages(self) -> tuple[str, ...]:
        """``"rowwise"``, ``"columnwise"`` or both."""
        return tuple(name for name, is_used in self.usage.items() if is_used)

    @property
    def usage(self) -> dict[str, bool]:
        """The usages as keyword arguments of ``Quantizer.with_usage``."""
        return {"rowwise": self.rowwise, "columnwise": self.columnwise}

    def nbytes(self, spec: TensorSpec) -> int:
        """Bytes of the tensor ``spec`` when quantized."""
        return self.format.nbytes(spec.shape, self.usages)


@dataclass(frozen=True)
class Collective:
    """Communication of an op over the ranks of its process group.

    ``kind`` is ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"`` or ``"all-to-all"``;
    ``tensor`` the ``"input"``, ``"output"``, ``"grad_output"`` or ``"grad_input"`` that it reads or
    writes; ``quantization`` what travels of a quantized tensor, None for its values. Of an extra
    output of the op, or of its gradient, ``extra_output`` is the index, and ``tensor`` the name.
    """

    kind: str
    tensor: str
    ranks: int
    quantization: QuantSpec | None = None
    extra_output: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether it comes before the kernels of the op: what they read has travelled."""
        if self.kind == "all-to-all":
            return self.tensor in ("input", "grad_output") or self.tensor.startswith("grad of")
        return self.kind == "all-gather"

    def nbytes(self, spec: TensorSpec) -> int:
        """Bytes that a rank sends, and that it receives; ``spec`` is the tensor on this rank.

        Of an all-to-all: if every rank sends and receives as many rows.
        """
        size = spec.nbytes if self.quantization is None else self.quantization.nbytes(spec)
        others = self.ranks - 1
        if self.kind == "all-to-all":
            return others * size // self.ranks
        return 2 * others * size // self.ranks if self.kind == "all-reduce" else others * size


@dataclass(frozen=True)
class OpKey:
    """The properties of one basic op that a plan depends on.

    ``input_dtype`` is the dtype of the main input. If ``requires_grad`` is False,
    the op has no backward at all; if ``input_requires_grad`` is False, it needs no
    gradient of its main input. The last four fields describe how main input, main
    output and their gradients are quantized, None if they are unquantized; they
    follow from the other fields.
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
    keeps_input: bool = True
    """Whether backward reads the main input as forward kept it; if not, earlier ops compute it
    again. It follows from the other fields and from the ops, as the next one does."""
    keeps_source: bool = False
    """Whether the op saves its main input in place of its larger output, which a later op reads in
    backward."""
    keeps_weight: bool = True
    """Whether backward reads a quantized weight that forward kept; if not, it quantizes the
    parameter again."""
    rounds_input: bool = False
    """Whether an activation keeps its main input in FP8 and backward reads the rounded values."""


@dataclass(frozen=True)
class PlanKey:
    """Everything that a fusion plan depends on: the key of the plan cache.

    Compared by contents, not identity: two recipes with equal fields, and thus
    equal ``backward_override``, share a plan. Shapes are not part of it. ``fusions``
    are the fusion classes in use, ``registered`` the registered functions.
    ``no_kernels`` is the reason why fuser's kernels do not run on the device;
    None if they run. ``is_elsewhere``: the device need not be here, and has the
    libraries of a newest CUDA, whatever this machine has.
    """

    ops: tuple[OpKey, ...]
    recipe: Recipe | None
    autocast_dtype: torch.dtype | None
    device: str
    arch: tuple[int, int] | None
    fusions: tuple[type[Any], ...]
    registered: Hashable = None
    no_kernels: str | None = None
    is_elsewhere: bool = False

    @property
    def requires_grad(self) -> bool:
        """Whether there is a backward."""
        return any(op.requires_grad for op in self.ops)

    def window(self, start: int, stop: int) -> PlanKey:
        """The key of the ops ``start`` up to ``stop`` only."""
        return PlanKey(  # not `replace`, which takes six times as long
            self.ops[start:stop],
            self.recipe,
            self.autocast_dtype,
            self.device,
            self.arch,
            self.fusions,
            self.registered,
            self.no_kernels,
            self.is_elsewhere,
        )

    def dtype_name(self) -> str:
        """The name of the dtype of unquantized values between the ops."""
        return _name(self.autocast_dtype or self.ops[0].input_dtype)

    def describe(self) -> str:
        """A one-line summary: dtype, device, recipe."""
        dtype = _name(self.ops[0].input_dtype if self.ops else None)
        arch = f" sm_{self.arch[0]}{self.arch[1]}" if self.arch else ""
        parts = [f"{dtype} on {self.device}{arch}", "training" if self.requires_grad else "no grad"]
        if self.autocast_dtype is not None:
            parts.append(f"autocast {_name(self.autocast_dtype)}")
        parts.append(f"recipe {self.recipe}" if self.recipe is not None else "no recipe")
        return ", ".join(parts)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
