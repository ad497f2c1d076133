"""Notes of a plan on the tensors of one call: what is copied, read in small pieces, or padded.

They are not part of a plan, because shapes, strides and addresses are not part of a plan's key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
from fuser.basic_ops.activation import ScaledActivation
from fuser.cuda.arguments import TILE_RUN
from fuser.doors import OBSERVER, Observer
from fuser.formats import padded_shape
from fuser.functional import pointwise
from fuser.functional.lazy import are_rows
from fuser.functional.pointwise import reads_in_place
from fuser.fused_ops import PointwiseChain
from fuser.plan.graph import Memory, OpGraph
from fuser.plan.plan import FusionPlan, Note, Step
from fuser.plan.saved_inputs import rebuilding
from fuser.report.text import format_bytes
from fuser.specs import QuantSpec, TensorSpec

VECTOR_BYTES = 16
SIDES = ("forward", "backward")
NAMES = {"input": "input", "weight": "weight", "grad_output": "gradient of its output"}


class Notes(Observer):
    """Notes on layouts and on padding."""

    def notes(
        self, graph: OpGraph, plan: FusionPlan, inputs: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        graph.bind(plan.key)
        pads = plan.key.recipe is not None and inputs[0].numel() > 0
        padding = tuple(_padding(graph, plan)) if pads else ()
        return {"layout": tuple(_layout(graph, plan, inputs)), "padding": padding}


OBSERVER.open(Notes())

# -- padding ----------------------------------------------------------------------


def _padding(graph: OpGraph, plan: FusionPlan) -> Iterator[Note]:
    """A note for each tensor that a step pads to quantize it, with the bytes that this adds.

    A padded matrix is written and read, and the quantized result is longer. If a kernel would
    otherwise have quantized values as it computes them, these are written and read unquantized too.
    """
    for side in SIDES:
        for step in plan.steps(side):
            for name, spec, quantized, is_plain in _quantized(graph, side, step):
                if not quantized.format.pads(spec.shape):
                    continue
                m, k = math.prod(spec.shape[:-1]), spec.shape[-1]
                padded = padded_shape(m, k, quantized.format.multiple)
                whole = TensorSpec(padded, spec.dtype)
                more = 2 * (whole.nbytes + quantized.nbytes(whole) - quantized.nbytes(spec))
                more += 0 if is_plain else 2 * spec.nbytes
                text = (
                    f"pads the {name} of shape {spec.shape} to {padded[0]} x {padded[1]} for "
                    f"{quantized.format.name}: {format_bytes(more)} more."
                )
                yield Note(step.ops, text, step.fusion, side)


def _quantized(
    graph: OpGraph, side: str, step: Step
) -> Iterator[tuple[str, TensorSpec, QuantSpec, bool]]:
    """The tensors that a step quantizes: name, spec, format, and whether it is in memory before."""
    for i in step.ops:
        op = graph.ops[i]
        dtype = graph.main_specs[i + 1].dtype  # the dtype in which a linear computes
        shapes = {"input": graph.main_specs[i].shape, "grad_output": graph.main_specs[i + 1].shape}
        for role, quantized in op.quantizes(side, graph.key.window(i, i + 1)).items():
            shape = shapes.get(role) or tuple(next(op.parameters()).shape)
            yield NAMES[role], TensorSpec(shape, dtype), quantized, True
    if step.emits is not None:
        gap, name = (step.ops[-1] + 1, "output") if side == "forward" else (step.ops[0], "")
        is_plain = step.kernel.endswith("quantize")  # the quantize kernel, as a separate launch
        yield name or "gradient of its input", graph.main_specs[gap], step.emits, is_plain


# -- how kernels read -------------------------------------------------------------


class _Reading(NamedTuple):
    """A kernel reads rows of ``columns`` in ``dtype``, ``run`` elements at a time if it can.

    A ``run`` of 0 means that the kernel is torch's, or reads one element for each row, so that
    vectors do not matter. Norms and quantizers read any view as a matrix, whose rows begin at
    multiples of ``spacing`` bytes, unless the kernel ``streams`` over a contiguous tensor as if it
    were one row. Others are chains, and ``is_extra`` says that they read no main input.
    """

    columns: int
    dtype: torch.dtype
    run: int
    is_norms: bool = False
    is_extra: bool = False
    spacing: int = VECTOR_BYTES
    streams: bool = False

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The rows of a tensor; None if the tensor is copied first."""
        if not self.is_norms:
            columns = tensor.numel() if self.is_extra else tensor.shape[-1]
            is_read = tensor.is_contiguous() or not self.is_extra
            return tensor.view(-1, columns) if is_read and reads_in_place(tensor) else None
        try:
            rows = tensor.view(-1, self.columns)
        except RuntimeError:
            return None
        return rows if are_rows(rows) else None


def _reading_of(graph: OpGraph, side: str, i: int, result: bool) -> _Reading | None:
    """How the kernel of op ``i`` alone reads its main input, or what it adds to it.

    ``result``: that is quantized. None if torch reads them, or an op that is not known, a user's.
    """
    op: Any = graph.ops[i]
    key, spec, output = graph.key.window(i, i + 1), graph.main_specs[i], graph.main_specs[i + 1]
    chain = _Reading(output.shape[-1], output.dtype, _run(output.dtype, result))
    match op:
        case BasicLinear() if side == "forward":
            quantized = op.quantizes(side, key).get("input")
            return _quantizer(spec, key.autocast_dtype or op.weight.dtype, quantized)
        case Quantize() if side == "forward" and op.kernels(side, key):
            return _quantizer(spec, spec.dtype, key.ops[0].output)
        case LayerNorm() | RMSNorm() if op.runs_in_kernel(key):
            return _norm(math.prod(op.normalized_shape), spec.dtype, result)
        case L2Normalization():
            return _norm(spec.shape[-1], output.dtype, result)
        case Activation() if key.recipe is None and pointwise.prefers_torch(
            op.function, math.prod(spec.shape)
        ):
            return None
        case Dropout() if not op.training or op.dropout_probability == 0:
            return None
        case AddExtraInput() if key.ops[0].extra_inputs[0].dtype is not spec.dtype:
            return None  # torch casts it
        case Bias() | ConstantScale() | AddExtraInput():
            return chain if result else chain._replace(run=0)
        case Activation() | ScaledActivation() | Dropout():
            return chain
    return None


def _quantizer(
    spec: TensorSpec, dtype: torch.dtype, quantized: QuantSpec | None
) -> _Reading | None:
    if quantized is None or quantized.format.pads(spec.shape):
        return None  # torch pads it
    streams = quantized.format.has_one_scale and not quantized.columnwise
    return _Reading(spec.shape[-1], dtype, TILE_RUN, is_norms=True, streams=streams)


def _norm(columns: int, dtype: torch.dtype, result: bool) -> _Reading:
    run = _run(dtype, result)
    return _Reading(columns, dtype, run, is_norms=True, spacing=run * dtype.itemsize)


def _run(dtype: torch.dtype, result: bool) -> int:
    return TILE_RUN if result else VECTOR_BYTES // dtype.itemsize


# -- layouts ----------------------------------------------------------------------


def _layout(graph: OpGraph, plan: FusionPlan, inputs: Sequence[torch.Tensor]) -> Iterator[Note]:
    """Notes on tensors that kernels cannot read in vectors; one on meta may have any address.

    Tensors that torch's kernels or a user's ops read are not examined.
    """
    memories = [graph.arriving[0], *(("extra input", k) for k in range(len(inputs) - 1))]
    for number, (memory, tensor) in enumerate(zip(memories, inputs, strict=True)):
        # The layout of tensors of other types is unknown.
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not is_plain or not tensor.numel() or plan.key.no_kernels is not None:
            continue
        name = f"extra input {number - 1}" if number else "the input"
        for side in SIDES:
            for step in plan.steps(side):
                for op, reading in _readings(graph, side, step, memory):
                    seen: torch.Tensor | None = tensor
                    if graph.arriving[op] == memory:
                        seen = _shaped(tensor, graph.main_specs[op].shape)
                    if reading is not None and seen is not None:
                        for text in _texts(reading, name, seen.detach(), side):
                            yield Note(step.ops, text, step.fusion, side)


def _shaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A tensor as an op receives it after reshapes; None if that cannot be derived."""
    if tensor.numel() != math.prod(shape):
        return None
    try:
        return tensor.view(shape)
    except RuntimeError:  # torch has to copy it
        return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _readings(
    graph: OpGraph, side: str, step: Step, memory: Memory
) -> Iterator[tuple[int, _Reading | None]]:
    """The ops of a step for which it reads the tensor ``memory``, and how."""
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
    is_chain = _is_chain(step)
    if side == "backward":
        saving = [i for i in step.ops if graph.ops[i].saves_input and not graph.rounded_input(i)]
        # Extra inputs: scales, and the input of an activation in the same kernel.
        extras = [
            i
            for i in taking
            if graph.arriving[i] != memory
            and (graph.ops[i].saves_input or (is_chain and any(k > i for k in saving)))
        ]
        main = step.ops[:1] if saving and is_chain else saving
        taking = [*(i for i in main if graph.arriving[i] == memory), *extras]
    for i in taking:
        yield i, _reading(graph, side, step, i, graph.arriving[i] == memory)
    for i in step.ops if side == "backward" else ():
        if not graph.key.ops[i].keeps_input:  # it is computed again
            first = rebuilding(graph.ops, graph.key, i).start
            if graph.arriving[first] == memory and not graph.rounded_input(first):
                result = _quantizes(graph, first + 1, "forward")
                yield first, _reading_of(graph, side, first, result)


def _reading(graph: OpGraph, side: str, step: Step, i: int, is_main: bool) -> _Reading | None:
    """How a step reads the tensor at its op ``i``, a main or an extra input; None for torch."""
    first, last = step.ops[0], step.ops[-1]
    result = _quantizes(graph, last + 1 if side == "forward" else first, side)
    reading, of_last = (_reading_of(graph, side, k, result) for k in (i, last))
    is_scale = not is_main and isinstance(graph.ops[i], ScaledActivation)
    if _is_chain(step):
        output = graph.main_specs[last + 1]
        reading = _Reading(output.shape[-1], output.dtype, _run(output.dtype, result))
    elif reading is None and (i == last or not is_main):
        return None
    elif (reading is None or not reading.is_norms) and not is_scale:
        if of_last is None or of_last.is_norms:
            return of_last  # a norm's, which adds
        if any(isinstance(graph.ops[k], BasicLinear) for k in step.ops):
            return None
    if reading is None or reading.is_norms or is_main:
        return reading
    run = 0 if is_scale else reading.run
    dtype = graph.extra_inputs[i][0].dtype
    return reading._replace(dtype=dtype, run=run, is_extra=True)


def _quantizes(graph: OpGraph, gap: int, side: str) -> bool:
    """Whether a kernel with the result at ``gap`` quantizes it; what needs padding it does not."""
    result = graph.quant_spec(gap, side)
    return result is not None and not result.format.pads(graph.main_specs[gap].shape)


def _is_chain(step: Step) -> bool:
    return step.fusion == PointwiseChain.__name__


def _texts(reading: _Reading, name: str, tensor: torch.Tensor, side: str) -> Iterator[str]:
    """The loads of ``tensor`` that are not vector loads; nothing if all are."""
    columns, dtype = reading.columns, reading.dtype
    if tensor.dtype is not dtype:  # cast, to strides like its own
        tensor = torch.empty_like(tensor, dtype=dtype, device="meta")
    kept: torch.Tensor | None = tensor
    if side == "backward" and reading.is_norms:
        # A norm saves a matrix, even if that takes a copy.
        kept = _shaped(tensor, (tensor.numel() // columns, columns))
    rows = None if kept is None else reading.rows_of(kept)
    if rows is None:
        has_gaps = tensor.shape[-1] > 1 and tensor.stride(-1) != 1
        yield (
            f"copies {name} first: {'its rows are' if has_gaps else 'it is'} not contiguous "
            f"(shape {tuple(tensor.shape)}, strides {tensor.stride()})."
        )
        rows = torch.empty((1, columns), dtype=dtype, device="meta")
    reasons = list(_obstacles(reading, rows)) if reading.run else []
    if reasons:
        yield f"moves one element at a time: {name} {' and '.join(reasons)}."


def _obstacles(reading: _Reading, rows: torch.Tensor) -> Iterator[str]:
    begin = 0 if rows.is_meta else rows.data_ptr() % VECTOR_BYTES
    if begin:
        yield f"begins {begin} bytes after a multiple of {VECTOR_BYTES}"
    apart = rows.stride(0) * rows.element_size()
    if reading.streams and rows.is_contiguous():
        return
    if reading.columns % reading.run:
        dtype = str(reading.dtype).removeprefix("torch.")
        yield f"is read in rows of {reading.columns} {dtype}, no multiple of {reading.run}"
    elif rows.shape[0] > 1 and apart % reading.spacing:
        yield f"has its rows {apart} bytes apart, no multiple of {reading.spacing}"
