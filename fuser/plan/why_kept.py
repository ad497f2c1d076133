"""Reasons why a plan keeps tensors of forward for backward, instead of computing them again."""

from __future__ import annotations

from fuser.op import BasicOperation
from fuser.plan.graph import OpGraph
from fuser.plan.plan import PIPELINE_INPUT
from fuser.plan.registered import RegisteredFusions
from fuser.plan.saved_inputs import is_own, many_rows, rebuilding

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
