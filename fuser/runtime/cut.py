"""Pipelines that are cut into several autograd nodes, if gradients are needed during backward.

DistributedDataParallel reduces gradients during backward, and hooks of parameters may use them up.
A long pipeline as one node gives all of them at the end of its backward. As several nodes it runs
the same steps of the same plan, with equal results.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fuser.doors import OBSERVER, PASSES, PassRunner
from fuser.op import BasicOperation
from fuser.plan.cuts import Cuts, Sizes, default_buckets, joined_ops, nodes
from fuser.plan.graph import OpGraph, Source
from fuser.plan.plan import FusionPlan, Node
from fuser.plan.planner import Planned
from fuser.plan.saved_inputs import rebuilding
from fuser.runtime.codegen import Neighbours
from fuser.runtime.executor import CompiledPlan
from fuser.runtime.known_parameters import LayoutOfCall
from fuser.runtime.split_backward import SplittablePlan
from fuser.specs import PlanKey
from fuser.torch_private import gradient_hooks, graph_task, running_data_parallel

IN_DDP = "DistributedDataParallel waits for gradients; a node gives those of a bucket"
IN_HOOKS = (
    "hooks of parameters wait for gradients; a node gives an eighth of them or 25 MiB, unless that "
    "takes less than 100 us"
)

Place = tuple[int, int]
Tensors = tuple[torch.Tensor, ...]


class CuttingPasses(PassRunner):
    """Plans that can be cut if they have places for that, and backwards in parts."""

    def compiled_plan(
        self, kind: Any, planned: Planned, graph: OpGraph, key: PlanKey, *contents: Any
    ) -> Any:
        kind = SplittablePlan
        if key.requires_grad:
            cuts = Cuts(planned, key, graph)
            if cuts.at((0, 0)):
                kind = functools.partial(CuttablePlan, cuts)
        return super().compiled_plan(kind, planned, graph, key, *contents)


class CuttablePlan(SplittablePlan):
    """A plan that runs as one autograd node, or as several if gradients are needed earlier.

    ``cuts`` has the places where it can be cut, one or more; ``contents`` are the arguments of
    :class:`CompiledPlan`.
    """

    can_be_cut = True

    def __init__(self, cuts: Cuts, *contents: Any) -> None:
        super().__init__(*contents)
        self.cuts = cuts
        self._watched = self._largest(cuts.at(default_buckets()))
        self._cuts_of: dict[Hashable, tuple[int, ...]] = {}
        self._cut_plans: dict[tuple[int, ...], CutPlan] = {}
        # The result of ``waiting`` in the last forward outside of a backward.
        self._last: tuple[str, Sizes | None] | None = None

    def call(
        self,
        input_: torch.Tensor,
        params: Tensors,
        extra_inputs: Tensors,
        kwargs: list[dict[str, Any]] | None,
        layout: LayoutOfCall,
    ) -> torch.Tensor | Tensors:
        if (waiting := self.waiting(params)) is not None:
            cut = self._cut(self.cuts_at(waiting[1], (input_, *params, *extra_inputs)))
            if cut is not None:
                return cut.call(input_, params, extra_inputs, kwargs, layout)
        return _call(self, input_, params, extra_inputs, kwargs, layout)

    def waiting(self, params: Sequence[torch.Tensor]) -> tuple[str, Sizes | None] | None:
        """The reason to cut a call, and the sizes of nodes, as of :meth:`Cuts.at`; None without.

        The forward of a recomputation, which runs in a backward, is cut as the last forward was.
        """
        reason: tuple[str, Sizes | None] | None = None
        ddp = running_data_parallel()
        if ddp is not None and ddp.require_backward_grad_sync:
            size = ddp.bucket_bytes_cap
            is_default = ddp.bucket_bytes_cap_default
            reason = IN_DDP, default_buckets() if is_default else (size, size)
        else:
            for place in self._watched:
                # Hooks are on the DTensor, in whose place its local tensor is during a call.
                param: Any = params[place]
                if gradient_hooks(getattr(param, "whole_parameter", param)):
                    reason = IN_HOOKS, None
                    break
        if reason is None and self._last is None:
            return None
        if graph_task() == -1:
            self._last = reason
        return reason or self._last

    def cuts_at(self, sizes: Sizes | None, tensors: Tensors) -> tuple[int, ...]:
        """The ops before which to cut a call with such tensors: input, parameters, extra inputs."""
        joined: tuple[tuple[int, int], ...] = ()
        if len(set(map(id, tensors))) < len(tensors):
            places = zip(tensors, self.readers, strict=True)
            joined = joined_ops((t, op) for t, op in places if t.requires_grad)
        cuts = self._cuts_of.get((sizes, joined))
        if cuts is None:
            cuts = self._cuts_of.setdefault((sizes, joined), self.cuts.at(sizes, joined))
        return cuts

    def with_nodes(
        self,
        plan: FusionPlan,
        graph: OpGraph,
        input_: torch.Tensor,
        params: Tensors,
        extra_inputs: Tensors,
    ) -> FusionPlan:
        """Also with the reason for the cuts, and what they make it keep. Binds ``graph``, that of
        the pipeline.
        """
        who, sizes = self.waiting(params) or ("", None)
        gaps = self.cuts.gaps
        cuts = self.cuts_at(sizes, (input_, *params, *extra_inputs))
        plan_nodes = tuple(
            Node(tuple(ops), ops.start > 0, ops.start > 0 and gaps[ops.start].is_quantized)
            for ops in nodes(len(self.ops), cuts)
        )
        if not cuts:
            return plan
        kept = plan.kept
        if who:
            graph.bind(self.key)
            kept = OBSERVER.guest.kept(graph, self.code.steps["forward"], cuts)
        return replace(plan, nodes=plan_nodes, waiting=who, kept=kept)

    def _largest(self, cuts: Sequence[int]) -> list[int]:
        """The place among the parameters of the largest one of each node."""
        sizes = [(i, nbytes) for i, row in enumerate(self.cuts.grad_bytes) for nbytes in row]
        largest = []
        for ops in nodes(len(self.ops), cuts):
            places = [n for n, (i, _) in enumerate(sizes) if i in ops]
            largest.append(max(places, key=lambda n: sizes[n][1]))
        return largest

    def _cut(self, cuts: tuple[int, ...]) -> CutPlan | None:
        if not cuts:
            return None
        cut_plan = self._cut_plans.get(cuts)
        if cut_plan is None:
            own_nodes = [self._node(ops) for ops in nodes(len(self.ops), cuts)]
            cut_plan = self._cut_plans.setdefault(cuts, CutPlan(own_nodes, self.code.returned))
        return cut_plan

    def _node(self, ops: range) -> _NodeOps:
        """The steps of the plan that run ``ops``, as an autograd node of their own."""
        start, stop, code = ops.start, ops.stop, self.code
        forward, backward = (
            [(op, tuple(i - start for i in run)) for op, run in side if run[0] in ops]
            for side in code.steps.values()
        )
        # Autograd adds the gradients of a channel that is read at several places in the order of
        # these inputs: in that of the backward's steps, as one node adds them.
        reading = [i + start for _, run in backward for i in run]
        inputs: list[Source] = []
        sources: dict[int, tuple[Source, ...]] = {}
        for i in dict.fromkeys((*reading, *ops)):
            sources_of_op = []
            for source in code.sources[i]:
                if source.producer is not None and source.producer in ops:
                    sources_of_op.append(replace(source, producer=source.producer - start))
                else:
                    sources_of_op.append(Source(len(inputs), source.channel))
                    inputs.append(source)
            sources[i] = tuple(sources_of_op)
        later = {s.place for row in code.sources[stop:] for s in row if s.producer is not None}
        outputs = [p for p in self.places if p[0] in ops and (p in later or p in code.returned)]
        counts = code.param_counts[start:stop]
        first = sum(code.param_counts[:start])
        run = SplittablePlan(
            self.plan,
            self._key(start, stop),
            self.ops[start:stop],
            [sources[i] for i in ops],
            [(i - start, k) for i, k in outputs],
            counts,
            forward,
            backward,
            Neighbours(start, self._beside(start, start - 1), self._beside(stop, stop)),
        )
        return _NodeOps(run, ops, range(first, first + sum(counts)), inputs, outputs)

    def _beside(self, gap: int, op: int) -> tuple[BasicOperation, PlanKey] | None:
        """The op at the other side of a cut, if a quantized tensor passes the cut."""
        if gap not in self.cuts.gaps or not self.cuts.gaps[gap].is_quantized:
            return None
        # What it reads is the last value of a node, or the first gradient.
        return self.ops[op], self._key(op, op + 1)

    def _key(self, start: int, stop: int) -> PlanKey:
        """The key of the ops of a node, which keeps inputs that other nodes would compute again."""
        key = self.key.window(start, stop)
        op_keys = [
            replace(
                op, keeps_input=op.keeps_input or rebuilding(self.ops, self.key, i).start < start
            )
            for i, op in enumerate(key.ops, start)
        ]
        return replace(key, ops=tuple(op_keys))


class _NodeOps(NamedTuple):
    """One node of a plan: its ops and parameters, the extra tensors that it takes and returns."""

    run: CompiledPlan
    ops: range
    params: range
    inputs: Sequence[Source]
    outputs: Sequence[Place]


class CutPlan:
    """The autograd nodes of a plan, which run one after another."""

    def __init__(self, own_nodes: Sequence[_NodeOps], returned: Sequence[Place]) -> None:
        self.nodes = own_nodes
        self._returned = frozenset(returned)
        last = {
            s.place: n for n, p in enumerate(own_nodes) for s in p.inputs if s.producer is not None
        }
        # By node, the extra outputs of earlier ones that no node after it reads.
        self._last_reads = [[p for p, at in last.items() if at == n] for n in range(len(own_nodes))]
        self._read = frozenset(last)

    def call(
        self,
        input_: torch.Tensor,
        params: Tensors,
        extra_inputs: Tensors,
        kwargs: list[dict[str, Any]] | None,
        layout: LayoutOfCall,
    ) -> torch.Tensor | Tensors:
        """Run as :meth:`CompiledPlan.call` does, in several nodes if the call is cut."""
        x: Any = input_
        carried: dict[Place, torch.Tensor] = {}
        returned: list[torch.Tensor] = []
        whole, _ = layout
        for node, last_reads in zip(self.nodes, self._last_reads, strict=True):
            taken = tuple(
                carried[s.place] if s.caller_index is None else extra_inputs[s.caller_index]
                for s in node.inputs
            )
            start, stop = node.params.start, node.params.stop
            x = node.run.call(
                x,
                params[start:stop],
                taken,
                kwargs and kwargs[node.ops.start : node.ops.stop],
                (whole and whole.part(start, stop), None),
            )
            del taken
            for place in last_reads:
                del carried[place]
            if node.outputs:
                x, *extras = x
                for place, tensor in zip(node.outputs, extras, strict=True):
                    if place in self._read:
                        carried[place] = tensor
                    if place in self._returned:
                        returned.append(tensor)
                del extras, tensor
        return (x, *returned) if returned else x


_call = CompiledPlan.call
PASSES.open(CuttingPasses())
