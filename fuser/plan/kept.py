"""Kept tensors: what a plan holds between forward and backward, and the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.plan.graph import OpGraph
from fuser.plan.plan import PIPELINE_INPUT, Kept
from fuser.plan.registered import RegisteredFusions
from fuser.plan.saved_inputs import is_own, many_rows, rebuilding
from fuser.specs import TensorSpec

PRODUCT = "output of a product"
EVERYTHING = "everything is kept: activation_memory_budget(None), or a checkpoint"
OTHER_BYTES = "quantized again, it could have other bytes"
OWN = "saved by the op itself"
TOKENS = "in place of the copies of its rows"


def why_input(graph: OpGraph, reader: int) -> str:
    """The reason why the main input of op ``reader`` is kept; ``graph`` is bound to the key."""
    ops, key = graph.ops, graph.key
    op, narrowed = ops[reader], key.window(reader, reader + 1)
    if not is_own(op):
        return "a user's op may read it"
    if not rebuilding(ops, key, reader):
        return _why_not_rebuilt(graph, reader)
    if not _is_product(graph, reader):
        return "only inputs of linears are computed again"
    if not op.takes_rebuilt_input(narrowed):
        gathers = any(c.tensor == "input" for c in op.collectives("forward", narrowed))
        return "gathered from other ranks" if gathers else OTHER_BYTES
    return _why_everything(graph)


def why_weight(graph: OpGraph, reader: int) -> str:
    """The reason why the quantized weight of op ``reader`` is kept."""
    if not graph.ops[reader].quantizes_weight_again(graph.key.window(reader, reader + 1)):
        return OTHER_BYTES
    reason = _why_everything(graph)
    if reason != EVERYTHING:
        return reason
    return f"fewer than {many_rows(graph.ops)} rows, keep_weight_copies=True, or a checkpoint"


def _why_everything(graph: OpGraph) -> str:
    """The reason why a tensor is kept that could be computed again."""
    for fusion in graph.key.fusions:
        if fusion.is_external:
            return f"a user's fusion, {fusion.__name__}, may read it"
    if graph.key.registered not in (None, RegisteredFusions()):
        return "a registered function may read it"
    return EVERYTHING


def _why_not_rebuilt(graph: OpGraph, reader: int) -> str:
    """The reason why ops before op ``reader`` cannot compute its input again."""
    refusing: str | None = None
    passed: str | None = None
    for i in reversed(range(reader)):
        op, key = graph.ops[i], graph.key.window(i, i + 1)
        (op_key,) = key.ops
        if _is_product(graph, i):
            return PRODUCT
        if not op.kernels("forward", key):
            passed = passed or f"{_name(op, i)} hands it on"
            continue  # the output is the input
        name = _name(op, i)
        if not is_own(op):
            return refusing or f"{name}, a user's op, computed it"
        if any(op.collectives("forward", key)):
            return refusing or f"{name} has it from other ranks"
        if op.rebuilds_output and not op_key.requires_grad:
            return refusing or f"{name} needs no gradient, so it saves nothing to compute it again"
        if not op.rebuilds_output:
            refusing = refusing or f"{name} cannot compute it again"
        if op.saves_input or op.saved_bytes(graph.main_specs[i]):
            break  # another kept tensor begins here
    else:
        return refusing or PIPELINE_INPUT
    return refusing or passed or EVERYTHING


def _is_product(graph: OpGraph, index: int) -> bool:
    """Whether the op multiplies matrices."""
    return graph.ops[index].product(*graph.main_specs[index : index + 2]) is not None


def _name(op: BasicOperation, index: int) -> str:
    return f"op {index} ({type(op).__name__})"


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
            # Between the op and the first one that would compute its input again.
            first = rebuilding(graph.ops, graph.key, i).start
            cut = next((cut for cut in cuts if first < cut <= i), None)
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
