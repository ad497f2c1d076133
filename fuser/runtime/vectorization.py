"""Vector notes: how kernels read tensors of a call that 16-byte vectors cannot read.

They are not part of a plan, because shapes, strides and addresses are not part of a plan's key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser.basic_ops import (
    Activation,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    Dropout,
    L2Normalization,
    LayerNorm,
    Quantize,
    RMSNorm,
)
from fuser.basic_ops.scaled_activation import ScaledActivation
from fuser.cuda.arguments import TILE_RUN
from fuser.functional import pointwise
from fuser.functional.lazy import are_rows
from fuser.fused_ops import PointwiseChain
from fuser.plan.graph import Memory, OpGraph
from fuser.plan.plan import FusionPlan, Note, Step
from fuser.plan.saved_inputs import rebuilding
from fuser.specs import PlanKey, TensorSpec

VECTOR_BYTES = 16

POINTWISE = (Activation, ScaledActivation, Bias, ConstantScale, AddExtraInput, Dropout)
# If one of these is a step of its own with an unquantized output, torch runs it.
RUN_BY_TORCH = (Bias, ConstantScale, AddExtraInput)

Rows = Callable[[torch.Tensor], torch.Tensor | None]


def layout_notes(
    graph: OpGraph, plan: FusionPlan, input_: torch.Tensor, extra_inputs: Sequence[torch.Tensor]
) -> tuple[Note, ...]:
    """Notes on the call's tensors that kernels of ``plan`` cannot read by vectors.

    ``graph`` is that of the call. A tensor on the meta device may have any address. Tensors that
    torch's kernels or a user's ops read are not examined.
    """
    if plan.key.no_kernels is not None:
        return ()
    graph.bind(plan.key)
    extras = [(("extra input", k), f"extra input {k}", t) for k, t in enumerate(extra_inputs)]
    notes: list[Note] = []
    for memory, name, tensor in ((graph.arriving[0], "the input", input_), *extras):
        # The layout of tensors of other types is unknown.
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
            continue
        for side in ("forward", "backward"):
            for step in plan.steps(side):
                for op in _readers(graph, side, step, memory):
                    is_main = graph.arriving[op] == memory
                    seen = _shaped(tensor, graph.main_specs[op].shape) if is_main else tensor
                    reading = _reading(graph, side, step, op, is_main)
                    if reading is not None and seen is not None:
                        texts = reading.notes(name, seen.detach())
                        notes += [Note(step.ops, text, step.fusion, side) for text in texts]
                for op in _rebuilding(graph, side, step, memory):
                    seen = _shaped(tensor, graph.main_specs[op].shape)
                    reading = _reading_again(graph, step, op)
                    if reading is not None and seen is not None:
                        texts = reading.notes(name, seen.detach())
                        notes += [Note(step.ops, text, step.fusion, side) for text in texts]
    return tuple(notes)


def _rebuilding(graph: OpGraph, side: str, step: Step, memory: Memory) -> Iterator[int]:
    """The ops of which a step computes the output again from the tensor ``memory``."""
    for i in step.ops if side == "backward" else ():
        if not graph.key.ops[i].keeps_input:
            first = rebuilding(graph.ops, graph.key, i).start
            if graph.arriving[first] == memory and not graph.rounded_input(first):
                yield first


def _reading_again(graph: OpGraph, step: Step, i: int) -> _Reading | None:
    """How the kernel that computes the output of op ``i`` again, a norm or activation, reads."""
    op: Any = graph.ops[i]
    quantized = graph.quant_spec(i + 1, "forward")
    quantizes = quantized is not None and not quantized.format.pads(graph.main_specs[i + 1].shape)
    if isinstance(op, (LayerNorm, RMSNorm, L2Normalization)):
        return _normalizing(graph, "backward", i, quantizes)
    return _computing(graph, step, i, True, quantizes)


def _shaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A tensor as an op receives it after reshapes; None if that cannot be derived."""
    if tensor.shape == shape:
        return tensor
    if tensor.numel() != math.prod(shape):
        return None
    try:
        return tensor.view(shape)
    except RuntimeError:  # torch has to copy it
        return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _readers(graph: OpGraph, side: str, step: Step, memory: Memory) -> Iterator[int]:
    """The ops of a step for which it reads the tensor ``memory``."""
    edges = graph.flows["forward"].in_edges
    taking = [
        i
        for i in step.ops
        if any(
            memory in tensors
            for source, _, tensors in edges(i, data="tensors")
            if source not in step.ops
        )
    ]
    if side == "forward":
        yield from taking
        return
    saving = [i for i in step.ops if graph.ops[i].saves_input and not graph.rounded_input(i)]
    for i in step.ops[:1] if saving and _is_chain(step) else saving:
        if graph.arriving[i] == memory:
            yield i
    # Extra inputs: scales, and the input of an activation in the same kernel.
    for i in taking:
        is_read = isinstance(graph.ops[i], ScaledActivation) or (
            _is_chain(step) and any(k > i for k in saving)
        )
        if is_read and graph.arriving[i] != memory:
            yield i


# -- how kernels read -------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """A kernel reads rows of ``columns`` in ``dtype``, ``run`` elements at a time if it can.

    ``rows_of`` returns the rows of a tensor, or None if the tensor is copied first. A ``run`` of 0
    means that the kernel is torch's, or reads one element for each row, so that vectors do not
    matter. Rows must begin at multiples of ``spacing`` bytes, unless the kernel ``streams`` over a
    contiguous tensor as if it were one row.
    """

    rows_of: Rows
    columns: int
    dtype: torch.dtype
    run: int
    spacing: int = VECTOR_BYTES
    streams: bool = False

    def notes(self, name: str, tensor: torch.Tensor) -> Iterator[str]:
        """The loads of ``tensor`` that are not vector loads; nothing if all are."""
        if tensor.dtype is not self.dtype:  # cast, to strides like its own
            tensor = torch.empty_like(tensor, dtype=self.dtype, device="meta")
        rows = self.rows_of(tensor)
        if rows is None:
            has_gaps = tensor.shape[-1] > 1 and tensor.stride(-1) != 1
            yield (
                f"copies {name} first: {'its rows are' if has_gaps else 'it is'} not contiguous "
                f"(shape {tuple(tensor.shape)}, strides {tensor.stride()})."
            )
            rows = torch.empty((1, self.columns), dtype=self.dtype, device="meta")
        reasons = list(self._obstacles(rows)) if self.run else []
        if reasons:
            yield f"moves one element at a time: {name} {' and '.join(reasons)}."

    def _obstacles(self, rows: torch.Tensor) -> Iterator[str]:
        begin = 0 if rows.is_meta else rows.data_ptr() % VECTOR_BYTES
        if begin:
            yield f"begins {begin} bytes after a multiple of {VECTOR_BYTES}"
        apart = rows.stride(0) * rows.element_size()
        if self.streams and rows.is_contiguous():
            return
        if self.columns % self.run:
            dtype = str(self.dtype).removeprefix("torch.")
            yield f"is read in rows of {self.columns} {dtype}, no multiple of {self.run}"
        elif rows.shape[0] > 1 and apart % self.spacing:
            yield f"has its rows {apart} bytes apart, no multiple of {self.spacing}"


def _reading(graph: OpGraph, side: str, step: Step, i: int, is_main: bool) -> _Reading | None:
    """How a step reads the tensor at its op ``i``, a main or an extra input; None for torch."""
    op, last = graph.ops[i], step.ops[-1]
    has_gemm = any(isinstance(graph.ops[k], BasicLinear) for k in step.ops)
    if (
        isinstance(op, AddExtraInput)
        and graph.extra_inputs[i][0].dtype is not graph.main_specs[i].dtype
    ):
        return None
    gap = last + 1 if side == "forward" else step.ops[0]
    result = graph.quant_spec(gap, side)
    # A tensor that needs padding is written unquantized first.
    quantizes = result is not None and not result.format.pads(graph.main_specs[gap].shape)
    if isinstance(op, (BasicLinear, Quantize)):
        return _quantizing(graph, i) if side == "forward" else None
    if isinstance(graph.ops[last], (LayerNorm, RMSNorm, L2Normalization)):
        return _normalizing(graph, side, last, quantizes)
    if isinstance(op, POINTWISE) and not has_gemm:
        return _computing(graph, step, i, is_main, quantizes)
    return None


def _quantizing(graph: OpGraph, i: int) -> _Reading | None:
    """How op ``i``, a linear or a Quantize, reads an unquantized input."""
    op: Any = graph.ops[i]
    key, spec = graph.key.window(i, i + 1), graph.main_specs[i]
    if isinstance(op, Quantize):
        quantized = key.ops[0].output if op.kernels("forward", key) else None
        dtype = spec.dtype
    else:
        quantized = op.quantizes("forward", key).get("input")
        dtype = key.autocast_dtype or op.weight.dtype
    if quantized is None or quantized.format.pads(spec.shape):  # torch pads it
        return None
    streams = quantized.format.has_one_scale and not quantized.columnwise
    return _Reading(_matrix(spec.shape[-1]), spec.shape[-1], dtype, TILE_RUN, streams=streams)


def _normalizing(graph: OpGraph, side: str, i: int, quantizes: bool) -> _Reading | None:
    """How the kernel of op ``i``, a norm, reads its input or its added tensor."""
    norm: Any = graph.ops[i]
    spec, output = graph.main_specs[i], graph.main_specs[i + 1]
    if isinstance(norm, L2Normalization):
        columns, dtype = spec.shape[-1], output.dtype
    else:
        if not norm.runs_in_kernel(graph.key.window(i, i + 1)):
            return None
        columns, dtype = math.prod(norm.normalized_shape), spec.dtype
    run = TILE_RUN if quantizes else VECTOR_BYTES // dtype.itemsize
    rows_of = _matrix(columns, is_saved=side == "backward")
    return _Reading(rows_of, columns, dtype, run, run * dtype.itemsize)


def _computing(
    graph: OpGraph, step: Step, i: int, is_main: bool, quantizes: bool
) -> _Reading | None:
    """How a pointwise op, alone or in a chain, reads the tensor at op ``i``."""
    op: Any = graph.ops[i]
    spec, output = graph.main_specs[i], graph.main_specs[i + 1]
    is_alone = not _is_chain(step)
    if is_alone and _is_torchs(op, graph.key, spec):
        return None
    run = TILE_RUN if quantizes else VECTOR_BYTES // output.dtype.itemsize
    is_scale = isinstance(op, ScaledActivation) and not is_main
    if is_scale or (is_alone and not quantizes and isinstance(op, RUN_BY_TORCH)):
        run = 0
    rows_of = _pointwise_rows if is_main else _pointwise_extra
    dtype = output.dtype if is_main else graph.extra_inputs[i][0].dtype
    return _Reading(rows_of, graph.main_specs[step.ops[-1] + 1].shape[-1], dtype, run)


def _is_chain(step: Step) -> bool:
    return step.fusion == PointwiseChain.__name__


def _is_torchs(op: Any, key: PlanKey, spec: TensorSpec) -> bool:
    """Whether a pointwise op as a single step does nothing, or is as fast in torch."""
    if isinstance(op, Dropout):
        return not op.training or op.dropout_probability == 0
    return isinstance(op, Activation) and pointwise.prefers_torch(
        op.function, math.prod(spec.shape), is_plain=key.recipe is None
    )


# -- rows of a tensor -------------------------------------------------------------


def _matrix(columns: int, *, is_saved: bool = False) -> Rows:
    """Rows for norms and quantizers: any view as a matrix, with adjacent elements in each row.

    A tensor that a norm saved is a matrix already, even if that took a copy.
    """

    def rows_of(tensor: torch.Tensor) -> torch.Tensor | None:
        try:
            rows = tensor.view(-1, columns)
        except RuntimeError:
            size = (tensor.numel() // columns, columns)
            return torch.empty(size, dtype=tensor.dtype, device="meta") if is_saved else None
        return rows if are_rows(rows) else None

    return rows_of


def _pointwise_rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """Rows of the tensor that a chain computes on."""
    return tensor.view(-1, tensor.shape[-1]) if pointwise.reads_in_place(tensor) else None


def _pointwise_extra(tensor: torch.Tensor) -> torch.Tensor | None:
    """Rows of the extra inputs and scales of a chain."""
    return tensor.view(1, -1) if tensor.is_contiguous() else None
