"""Kept tensors: what a plan holds between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fuser.op import FusedOperation, FusibleOperation
from fuser.plan.graph import OpGraph
from fuser.plan.plan import Kept
from fuser.plan.saved_inputs import rebuilding
from fuser.plan.why_kept import OWN, TOKENS, why_input, why_weight
from fuser.specs import TensorSpec

Steps = Sequence[tuple[FusibleOperation, tuple[int, ...]]]


def kept_tensors(graph: OpGraph, forward: Steps, cuts: Sequence[int] = ()) -> tuple[Kept, ...]:
    """The tensors of forward that backward reads; ``forward`` are the steps that run.

    ``cuts`` are the ops before which the pipeline is cut: nothing is computed again across one. A
    tensor that several ops keep is counted with the first of them. Parameters are not kept: they
    are there in any case.
    """
    held: set[object] = set()
    kept = []
    for op, ops in forward:
        recomputes = isinstance(op, FusedOperation) and op.recomputes
        for name, i, memory, nbytes, why in _of_step(graph, ops, cuts, recomputes=recomputes):
            rebuilt = rebuilding(graph.ops, graph.key, i) if memory is None else range(0)
            is_new = memory is not None and memory not in held
            held.add(memory)
            a_token = nbytes / graph.tokens if is_new else 0.0
            why = why if is_new else ""
            rounded = graph.rounded_input(i) if name == "input" else None
            rounded_to = "" if rounded is None else str(rounded.format)
            kept.append(Kept((i,), name, a_token, 0, tuple(rebuilt), why, rounded_to))
        kept += _weights(graph, ops)
    return tuple(kept)


def _of_step(
    graph: OpGraph, ops: Iterable[int], cuts: Sequence[int], *, recomputes: bool
) -> Iterator[tuple[str, int, object, int, str]]:
    """What a step needs of its ops: name, op, its memory, bytes, and why it is kept.

    The memory is None for an input that backward computes again.
    """
    trained = [i for i in ops if graph.key.ops[i].requires_grad]
    reading = [i for i in trained if graph.ops[i].saves_input]
    if recomputes:  # it computes what is between its ops again
        reading = trained[:1] if reading else []
    for i in trained:
        op, key = graph.ops[i], graph.key.window(i, i + 1)
        if i in reading:
            quantized = op.kept_input(key)
            spec = graph.main_specs[i]
            nbytes = graph.gap_bytes(i, "forward") if quantized is None else quantized.nbytes(spec)
            memory = graph.arriving[i] if quantized is None else ("operand", i)
            cut = _cut_before(graph, i, cuts)
            if key.ops[0].keeps_input:
                yield "input", i, memory, nbytes, why_input(graph, i)
            elif cut is not None:
                yield "input", i, memory, nbytes, f"the pipeline is cut before op {cut} for hooks"
            else:
                yield "input", i, None, nbytes, ""
        elif key.ops[0].keeps_source:
            yield "input", i, graph.arriving[i], graph.gap_bytes(i, "forward"), TOKENS
        statistics = op.saved_bytes(graph.main_specs[i])
        if statistics:
            yield "statistics", i, ("statistics", i), statistics, OWN


def _cut_before(graph: OpGraph, reader: int, cuts: Sequence[int]) -> int | None:
    """The cut between op ``reader`` and the first op that would compute its input again."""
    path = rebuilding(graph.ops, graph.key, reader)
    return next((cut for cut in cuts if path.start < cut <= reader), None)


def _weights(graph: OpGraph, ops: Iterable[int]) -> Iterator[Kept]:
    """The quantized copies of parameters."""
    for i in ops:
        (op_key,) = graph.key.window(i, i + 1).ops
        quantized = graph.ops[i].kept_weight(graph.key.window(i, i + 1))
        if quantized is None or not op_key.requires_grad:
            continue
        weights = graph.params[i][: graph.ops[i].main_grad_count]
        specs = [TensorSpec(tuple(weight.shape), weight.dtype) for weight in weights]
        nbytes = sum(map(quantized.nbytes, specs))
        if op_key.keeps_weight:
            yield Kept((i,), "weight", 0.0, nbytes, reason=why_weight(graph, i))
        else:
            moved = nbytes + sum(spec.nbytes for spec in specs)
            yield Kept((i,), "weight", 0.0, moved_again=moved)
