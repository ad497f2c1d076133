"""Split sizes that two grouped linears of one pipeline must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fuser.basic_ops import GroupedLinear
from fuser.errors import InputError
from fuser.gemm.grouped import listed
from fuser.op import BasicOperation
from fuser.plan.graph import Source


class SharedSizes(NamedTuple):
    """Two extra inputs of a caller that are the split sizes of the same rows."""

    first: int
    """Its place among the caller's extra inputs."""
    second: int
    ops: tuple[int, int]
    """The grouped linears that read them."""

    def check(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Raise if two tensors on the CPU differ. On another device they are not read.

        Raises
        ------
        InputError
        """
        if first is second:
            return
        is_readable = first.device.type == second.device.type == "cpu"
        if not is_readable or first.shape != second.shape:  # which the op refuses
            return
        sizes, others = first.tolist(), second.tolist()
        if sizes != others:
            raise InputError(
                f"The grouped MLP of ops {self.ops[0]} to {self.ops[1]} got split sizes "
                f"[{listed(sizes)}] for its first GroupedLinear and [{listed(others)}] for its "
                "second; they must be equal, unless the linears are in two pipelines."
            )


def shared_sizes(
    ops: Sequence[BasicOperation], sources: Sequence[tuple[Source, ...]]
) -> tuple[SharedSizes, ...]:
    """The pairs of split sizes that must be equal.

    A pair belongs to two grouped linears with equal numbers of groups and only pointwise ops
    between them: parts of one expert. With other ops between them, the groups may differ.
    """
    pairs = []
    last: int | None = None
    for i, op in enumerate(ops):
        if isinstance(op, GroupedLinear):
            if last is not None and ops[last].num_groups == op.num_groups:
                first, second = (sources[k][0].caller_index for k in (last, i))
                if first is not None and second is not None:
                    pairs.append(SharedSizes(first, second, (last, i)))
            last = i
        elif not hasattr(op, "stage"):
            last = None
    return tuple(pairs)
