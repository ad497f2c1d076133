"""Rebuilt tensors: inputs that backward computes again from what is kept in any case.

A linear's weight gradient reads its input. If the ops before it can compute that again, to the last
bit, from tensors that they keep for their own backward, the plan keeps nothing for it: a norm keeps
its input, so the normalized rows need not be kept, and an activation keeps the output of the linear
before it. A dispatch keeps the tokens in place of the copies of their rows. Nothing else is kept in
their place, so every such input that can be rebuilt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuser.errors import InputError
from fuser.op import BasicOperation
from fuser.plan.saved_inputs import Limit, MemoryBudget, is_own, rebuilding
from fuser.specs import PlanKey


class activation_memory_budget(MemoryBudget):
    """Context for what calls keep between forward and backward.

    Named after ``activation_memory_budget`` of torch's partitioner. Calls in a checkpoint of torch
    keep everything.

    Parameters
    ----------
    memory_budget
        1, the default of all calls: a pipeline does not keep the inputs of linears that an
        activation, a norm, a dropout or a dispatch before them can compute again, bit for bit, from
        what these keep for themselves; backward moves some more bytes. None: everything that
        backward reads is kept. 0: a :class:`fuser.Sequential` keeps its inputs alone, and runs
        forward again before its backward, as in ``torch.utils.checkpoint``: modules with states run
        twice, and parameters and ops that have changed in between are refused. In
        ``torch.compile`` it is 1.
    keep_weight_copies
        Whether the columnwise copies of quantized weights, a byte a parameter in FP8, are kept;
        else backward quantizes the parameters again, with the same bytes. On an H200 this took
        about 1% of a block's step with 8192 tokens, and 10% with 512, so by default calls with
        fewer than 4096 rows keep them, and those of experts with fewer than 1024 for each. The
        plan has the bytes and the modelled time.
    lossy_activation_inputs
        True changes gradients: activations keep their inputs in E4M3, with a float32 scale for 128
        elements of a row, in place of 2 or 4 bytes an element. Backward computes from the rounded
        values: the gradients of the inputs and, where the budget is 1, the activations' outputs
        that weight gradients read. Outputs of forward have the same bits.

    Raises
    ------
    InputError
        If the budget is another number, or 0 with ``lossy_activation_inputs``.
    """

    def __init__(
        self,
        memory_budget: float | None,
        *,
        keep_weight_copies: bool | None = None,
        lossy_activation_inputs: bool = False,
    ) -> None:
        is_number = isinstance(memory_budget, (int, float)) and not isinstance(memory_budget, bool)
        if memory_budget is not None and not (is_number and memory_budget in (0, 1)):
            raise InputError(
                f"activation_memory_budget got {memory_budget!r}; it is 1, to compute again what "
                "needs no product, 0, to keep the inputs of pipelines alone, or None, to keep "
                "everything. For a part of a model, use it around that part."
            )
        if memory_budget == 0 and lossy_activation_inputs:
            raise InputError(
                "activation_memory_budget got 0 with lossy_activation_inputs=True; a budget of 0 "
                "keeps no inputs of activations. Use 1."
            )
        is_kept = None if keep_weight_copies is None else bool(keep_weight_copies)
        self.limit = Limit(memory_budget, is_kept, bool(lossy_activation_inputs))

    def __repr__(self) -> str:
        memory_budget, keep_weight_copies, lossy_activation_inputs = self.limit
        return (
            f"activation_memory_budget({memory_budget}, keep_weight_copies={keep_weight_copies}, "
            f"lossy_activation_inputs={lossy_activation_inputs})"
        )


def with_rebuilt_tensors(ops: Sequence[BasicOperation], key: PlanKey, limit: Limit) -> PlanKey:
    """``key`` with what backward computes again, in place of what forward would keep.

    And with what forward keeps rounded. Fusions of users read what they save: with one of them in
    use, nothing is rebuilt or rounded.
    """
    if any(fusion.is_external for fusion in key.fusions):
        return key
    keys = list(key.ops)
    for i, op in enumerate(ops):
        narrowed = key.window(i, i + 1)
        if not is_own(op):
            continue
        if limit.lossy_activation_inputs and op.can_round_input and op.saves_input:
            keys[i] = replace(keys[i], rounds_input=keys[i].requires_grad)
        if limit.memory_budget is None:
            continue
        path = rebuilding(ops, key, i) if op.takes_rebuilt_input(narrowed) else ()
        if path:
            keys[i] = replace(keys[i], keeps_input=False)
            if not ops[path[0]].saves_input:
                keys[path[0]] = replace(keys[path[0]], keeps_source=True)
        if not limit.keep_weight_copies and op.quantizes_weight_again(narrowed):
            keys[i] = replace(keys[i], keeps_weight=False)
    return replace(key, ops=tuple(keys))
