"""Padding notes: the extra bytes of quantized tensors whose shapes are not whole blocks.

They are not part of a plan, because shapes are not part of a plan's key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fuser.formats import padded_shape
from fuser.plan.graph import OpGraph
from fuser.plan.plan import FusionPlan, Note, Step
from fuser.report.text import format_bytes
from fuser.specs import QuantSpec, TensorSpec

NAMES = {"input": "input", "weight": "weight", "grad_output": "gradient of its output"}


def padding_notes(graph: OpGraph, plan: FusionPlan) -> tuple[Note, ...]:
    """A note for each tensor that a step of ``plan`` pads to quantize it; ``graph`` is the call's.

    It counts the bytes that padding adds. A padded matrix is written and read, and the quantized
    result is longer. If a kernel would otherwise have quantized values as it computes them, these
    are written and read unquantized too.
    """
    if plan.key.recipe is None:
        return ()
    graph.bind(plan.key)
    notes = []
    for side in ("forward", "backward"):
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
                notes.append(Note(step.ops, text, step.fusion, side))
    return tuple(notes)


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
