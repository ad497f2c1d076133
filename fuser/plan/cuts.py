"""Cuts: the places where a pipeline is divided into several autograd nodes.

Autograd receives the gradients of a node when the node's backward ends. If gradients are needed
during backward, as by DistributedDataParallel, which reduces them, a long pipeline runs as several
nodes. A cut is between steps of the chosen cover of forward and of backward, so the steps are the
same, and a quantized tensor between two steps passes the cut as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from fuser.plan.graph import OpGraph
from fuser.plan.planner import Planned
from fuser.specs import PlanKey

FIRST_BYTES = 2**20
"""The least bytes of gradients of a node: the default size of the first bucket of torch's
``DistributedDataParallel``."""
BUCKET_BYTES = 25 * 2**20
"""The bytes of gradients with which a node ends in any case: a later bucket."""
SHARE = 1 / 8
"""The share of a pipeline's gradients with which a node ends, if hooks wait for them."""
NODE_MICROSECONDS = 100.0
"""The least modelled time of such a share. A node costs 10 to 20 us on the host."""

Sizes = tuple[int, int]
"""The bytes of the first node of a backward, and of every other."""


def default_buckets() -> Sizes:
    """The sizes of DistributedDataParallel's buckets, if its user sets none."""
    return FIRST_BYTES, BUCKET_BYTES


class Gap(NamedTuple):
    """A place where a cut is possible: before op ``op``.

    ``is_quantized`` tells whether a quantized tensor passes it, in forward or backward, and
    ``channels`` how many channels do.
    """

    op: int
    is_quantized: bool
    channels: int


class Cuts:
    """The places where a planned pipeline can be cut.

    ``planned`` and ``key``: the plan and its key. ``graph``: the pipeline's graph, which is bound
    to ``key``.
    """

    def __init__(self, planned: Planned, key: PlanKey, graph: OpGraph) -> None:
        self.grad_bytes = [
            [
                param.numel() * param.element_size() if param_key.requires_grad else 0
                for param, param_key in zip(row, op_key.params, strict=True)
            ]
            for row, op_key in zip(graph.params, key.ops, strict=True)
        ]
        """The bytes of the gradients of each op's parameters."""
        self._bytes = [sum(row) for row in self.grad_bytes]
        self._microseconds = sum(step.cover_microseconds for step in planned.plan.backward)
        self.gaps = {gap.op: gap for gap in _gaps(planned, key, graph)}

    def at(
        self, sizes: Sizes | None = None, joined: Collection[tuple[int, int]] = ()
    ) -> tuple[int, ...]:
        """The ops before which to cut, in their order.

        ``sizes`` are the least bytes of gradients of the first node of a backward, which has the
        last ops, and of every other; None for ``FIRST_BYTES`` and :meth:`share`. Every node has
        ``FIRST_BYTES`` or more. Among the gaps within as many bytes again, those that no quantized
        tensor passes are preferred, then those that the fewest channels pass.

        ``joined`` are pairs of ops, first and last, without a cut between them.
        """
        allowed = {
            op: gap
            for op, gap in self.gaps.items()
            if not any(first < op <= last for first, last in joined)
        }
        first, bytes_of_others = (FIRST_BYTES, self.share()) if sizes is None else sizes
        least, stop = max(first, FIRST_BYTES), len(self._bytes)
        chosen: list[int] = []
        while (gap := self._before(stop, least, allowed)) is not None:
            chosen.append(gap.op)
            least, stop = max(bytes_of_others, FIRST_BYTES), gap.op
        return tuple(reversed(chosen))

    def share(self) -> int:
        """The bytes of gradients of a node if hooks wait for single ones.

        A share of all, which has the same share of the modelled time, or ``BUCKET_BYTES``.
        """
        least = NODE_MICROSECONDS / self._microseconds if self._microseconds else 1.0
        return min(BUCKET_BYTES, math.ceil(sum(self._bytes) * max(SHARE, least)))

    def _before(self, stop: int, least: int, allowed: Mapping[int, Gap]) -> Gap | None:
        """The gap before the node that ends before op ``stop``; None for the pipeline's start."""
        left, held, limit = sum(self._bytes[:stop]), 0, 0
        best: Gap | None = None
        for op in reversed(range(1, stop)):
            held += self._bytes[op]
            if left - held < FIRST_BYTES or (best is not None and held > limit):
                break
            gap = allowed.get(op)
            if gap is None or held < least:
                continue
            if best is None:
                best, limit = gap, held + least
            elif gap[1:] < best[1:]:
                best = gap
        return best


def _gaps(planned: Planned, key: PlanKey, graph: OpGraph) -> Iterable[Gap]:
    """The places between steps of forward and of backward, except beside a user's op.

    Such an op may return any dtype, and may read its neighbour's class. Autograd converts a
    gradient to the dtype of its tensor and a pipeline does not, so a gap is possible only if all
    gradients that pass it have the dtypes of their tensors.
    """
    starts = [{ops[0] for _, ops in side} for side in (planned.forward, planned.backward)]
    others = {
        place
        for op, ops in (*planned.forward, *planned.backward)
        if op.is_external
        for place in (ops[0], ops[-1] + 1)
    }
    others.add(0)  # nothing is before it: its gradient goes to the caller
    main, extras = _converted(graph)
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for reader, row in enumerate(graph.sources):
        for k, source in enumerate(row):
            if source.producer is not None:
                readers.setdefault(source.place, []).append((reader, k))
    for op in sorted(starts[0] & starts[1] - others):
        op_key = key.ops[op]
        passing = [
            place
            for (producer, _), places in readers.items()
            for place in places
            if producer < op <= place[0]
        ]
        if not op_key.input_requires_grad or main[op] or not extras.isdisjoint(passing):
            continue
        is_quantized = op_key.input is not None or op_key.grad_input is not None
        yield Gap(op, is_quantized, len(passing))


def _converted(graph: OpGraph) -> tuple[list[bool], set[tuple[int, int]]]:
    """The places at which a gradient may have another dtype than its tensor.

    The first result is for the main input of each op, and the pipeline's output; the second has the
    other extra inputs, each an op and the index of the extra input.
    """
    dtypes = [spec.dtype for spec in graph.main_specs]
    main = [False] * len(dtypes)  # autograd gives the output's gradient in its dtype
    extras: set[tuple[int, int]] = set()
    for i, op in reversed(list(enumerate(graph.ops))):
        arrives = main[i + 1] or any(
            source.producer == i and (reader, k) in extras
            for reader, row in enumerate(graph.sources)
            for k, source in enumerate(row)
        )
        is_alike = dtypes[i] == dtypes[i + 1]
        for k, spec in enumerate(graph.extra_inputs[i]):
            passes = op.passes_gradient_to_extras or is_alike
            if spec.dtype.is_floating_point and (
                arrives or not passes or spec.dtype != dtypes[i + 1]
            ):
                extras.add((i, k))
        main[i] = {
            "input": False,
            "output": not is_alike,
            "grad_output": arrives or not is_alike,
        }[op.grad_input_dtype]
    return main, extras


def joined_ops(places: Iterable[tuple[object, int]]) -> tuple[tuple[int, int], ...]:
    """Pairs of ops, first and last, without a cut between them: both read the same tensor.

    Autograd adds the gradients of such a tensor in another order if they come from two nodes.
    ``places`` are pairs of a tensor and the op that reads it.
    """
    readers: dict[int, list[int]] = {}
    for tensor, op in places:
        readers.setdefault(id(tensor), []).append(op)
    spans = {(min(ops), max(ops)) for ops in readers.values()}
    return tuple(sorted(span for span in spans if span[0] < span[1]))


def nodes(count: int, cuts: Sequence[int]) -> list[range]:
    """The ops of each autograd node of a pipeline of ``count`` ops, in their order."""
    ends = (*cuts, count)
    return [range(start, stop) for start, stop in zip((0, *cuts), ends, strict=True)]
