"""Segments: consecutive modules, divided into pipelines and other modules, and their channels.

A Sequential runs its modules in this way, and a composite op its basic ops. The ends of a channel
may be in any two segments: an extra output of one is an extra input of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fuser.errors import InputError, StateError
from fuser.fused_ops.catalog import FUSIONS
from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.op.fusible import runs_ops_alone
from fuser.op.module_calls import module_calls
from fuser.plan.graph import Source, extra_input_sources, returned_outputs
from fuser.plan.plan import Channel, FusionPlan, ModuleCall, merged
from fuser.runtime.checks import Checks, wrong_extra_count
from fuser.runtime.pipeline import OperationFuser, Output
from fuser.torch_private import has_global_hooks, hooks_of

Keywords = Mapping[torch.nn.Module, Mapping[str, Any]]
"""The caller's keyword arguments, by op."""
Place = tuple[int, int]
"""An extra output: the index of its op, and its index among that op's extra outputs."""
Planned = tuple[list[FusionPlan | ModuleCall], tuple[torch.Tensor, ...]]
"""Plans, with the modules called between them; meta tensors like main and extra outputs."""

NO_OP = "it is not an op of fuser"
OWN_FORWARD = "it has its own forward"


class Segment:
    """A module that is not an op: it takes the main input and returns the main output.

    ``reason`` is why it is called as a module. ``last_reads`` are the extra outputs of earlier
    segments that no segment after this one reads.
    """

    def __init__(
        self,
        module: Any,
        reason: str,
        inputs: Sequence[Source] = (),
        outputs: Sequence[Place] = (),
    ) -> None:
        self.module = module
        self.reason = reason
        self.last_reads: list[Place] = []
        self._inputs = inputs
        self._outputs = outputs

    @property
    def inputs(self) -> Sequence[Source]:
        """The source of each extra input of a call."""
        return self._inputs

    @property
    def outputs(self) -> Sequence[Place | None]:
        """The extra outputs that a call returns; None for those that only the caller receives."""
        return self._outputs

    def call(self, x: Any, taken: Sequence[torch.Tensor], keywords: Keywords | None) -> Any:
        """Run on the main input and the extra inputs."""
        return self.module(x)

    def taken_apart(self, result: Any, count: int) -> tuple[Any, ...]:
        """The main output and the ``count`` extra outputs of a call.

        Refuses a result whose form a hook, or the module's own ``forward``, has changed.
        """
        if isinstance(result, tuple) and len(result) == 1 + count:
            return result
        form = type(result).__name__
        if isinstance(result, tuple):
            form += f" of {len(result)}"
        raise StateError(
            f"A call of {type(self.module).__name__} returns a tuple of {1 + count}, the output "
            f"and its extra outputs; its hooks, or its own forward, made it a {form}."
        )

    def pipelines(self) -> Iterator[OperationFuser]:
        """The pipelines of this segment."""
        yield from ()

    def planned(self, x: torch.Tensor, taken: Sequence[torch.Tensor], **how: Any) -> Planned:
        """The plans of this segment, and meta tensors like its outputs.

        ``how`` are the keyword arguments of :meth:`OperationFuser.plan`.
        """
        call = ModuleCall(type(self.module).__name__, self.reason)
        return [call], _outputs_like(self.module, x, taken)


class PipelineSegment(Segment):
    """A pipeline of consecutive ops."""

    def __init__(
        self, pipeline: OperationFuser, inputs: Sequence[Source], outputs: Sequence[Place]
    ) -> None:
        super().__init__(pipeline, "", inputs, outputs)
        self.pipeline = pipeline

    def call(self, x: Any, taken: Sequence[torch.Tensor], keywords: Keywords | None) -> Any:
        return self.pipeline.run(x, tuple(taken), keyword_rows(self.pipeline, keywords))

    def pipelines(self) -> Iterator[OperationFuser]:
        yield self.pipeline

    def planned(self, x: torch.Tensor, taken: Sequence[torch.Tensor], **how: Any) -> Planned:
        return [self.pipeline.plan(x, *taken, **how)], self.pipeline.outputs_like(x, *taken)


class OpSegment(Segment):
    """An op that is called as a module."""

    def call(self, x: Any, taken: Sequence[torch.Tensor], keywords: Keywords | None) -> Any:
        rows = [keywords.get(op, {}) for op in basic_ops_of(self.module)] if keywords else []
        if not any(rows):
            return self.module(x, *taken)
        if isinstance(self.module, FusedOperation):
            return self.module(x, *taken, basic_op_kwargs=rows)
        return self.module(x, *taken, **rows[0])

    def pipelines(self) -> Iterator[OperationFuser]:
        if isinstance(self.module, FusedOperation):
            yield from self.module._own_segments().pipelines()
        else:
            yield self.module._own_pipeline()

    def planned(self, x: torch.Tensor, taken: Sequence[torch.Tensor], **how: Any) -> Planned:
        if isinstance(self.module, FusedOperation):
            parts, outputs = self.module._own_segments().planned(x, taken, **how)
        else:
            pipeline = self.module._own_pipeline()
            parts, outputs = [pipeline.plan(x, *taken, **how)], pipeline.outputs_like(x, *taken)
        if self.reason == OWN_FORWARD:
            outputs = _outputs_like(self.module, x, taken)
        ops = tuple(range(len(basic_ops_of(self.module))))
        return [ModuleCall(type(self.module).__name__, self.reason, ops), *parts], outputs


class NestedSegment(Segment):
    """A nested Sequential: its extra tensors are the caller's, its channels are its own."""

    @property
    def segments(self) -> Any:
        """The current segments of the container, which may have been edited or have new hooks."""
        return self.module._current_segments()

    @property
    def inputs(self) -> Sequence[Source]:
        return [Source(k) for k in range(self.segments.num_extra_inputs)]

    @property
    def outputs(self) -> Sequence[Place | None]:
        return [None] * self.segments.num_extra_outputs

    def call(self, x: Any, taken: Sequence[torch.Tensor], keywords: Keywords | None) -> Any:
        if keywords:
            ops = {op for _, op in self.segments.named_ops()}
            keywords = {op: of_op for op, of_op in keywords.items() if op in ops}
        return self.module(x, *taken, **({"op_kwargs": keywords} if keywords else {}))


def why_called(op: FusibleOperation) -> str | None:
    """The reason why ``op`` must be called as a module, outside of pipelines; or None."""
    if any(hooks_of(op)):
        return "it has hooks"
    if has_global_hooks():
        return "torch has hooks for every module"
    cls = type(op)
    forward = op.__dict__.get("forward")
    if (
        cls.forward not in (BasicOperation.forward, FusedOperation.forward)
        or cls.__call__ is not torch.nn.Module.__call__
        or (forward is not None and getattr(forward, "__func__", None) is not cls.forward)
    ):
        return OWN_FORWARD
    return None


def basic_ops_of(unit: Any) -> tuple[BasicOperation, ...]:
    """The basic ops that a module is, or that it replaces."""
    if isinstance(unit, FusedOperation):
        return unit.members
    return (unit,) if isinstance(unit, BasicOperation) else ()


def keyword_rows(pipeline: OperationFuser, keywords: Keywords | None) -> list[Any] | None:
    """The keyword arguments of each basic op of ``pipeline``."""
    return None if keywords is None else [keywords.get(op, {}) for op in pipeline.basic_ops]


def _outputs_like(
    module: torch.nn.Module, x: torch.Tensor, extra_inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Meta tensors like the outputs of ``module``, which runs on the meta device for this."""
    state = {
        name: tensor.to("meta")
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    inputs = tuple(tensor.to("meta") for tensor in (x, *extra_inputs))
    outputs = torch.func.functional_call(module, state, inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


class Segments:
    """The segments of ``modules``, which it runs and plans.

    ``name`` is the class of the module that owns them, and ``keys`` are the names of the modules in
    their container, for messages; those of a composite have none. ``is_open``: a channel may have
    an end outside, which is an extra input or output of a call. Pipelines of ``previous``, segments
    of the same modules, are reused if their ops stay together.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        fusions: Sequence[type[FusedOperation]] = FUSIONS,
        *,
        name: str,
        keys: Iterable[str] = (),
        is_open: bool = False,
        previous: Segments | None = None,
    ) -> None:
        # Read first: a change after this point makes these segments outdated.
        self.version = module_calls.version
        self._has_global_hooks = has_global_hooks()
        self.modules = tuple(modules)
        self.name = name
        units = list(_units(self.modules))
        self.ops = tuple(op for unit, _ in units for op in basic_ops_of(unit))
        owners = [key for key, m in zip(keys, self.modules, strict=False) for _ in basic_ops_of(m)]
        self._places = [f"op {i} (module {key})" for i, key in enumerate(owners)]
        self._lone = [(op, why) for op, why in units if why and isinstance(op, FusibleOperation)]
        channels = {channel for op in self.ops for channel in op.channels} if is_open else ()
        self.sources = extra_input_sources(self.ops, channels)
        self._checks = Checks(self.ops, self.sources)
        self._readers: dict[Place, list[int]] = {}
        for reader, row in enumerate(self.sources):
            for source in row:
                if source.producer is not None:
                    self._readers.setdefault(source.place, []).append(reader)
        every = range(len(self.ops))
        self._unread = self._written_channels(every, every) if is_open else frozenset()
        self._returned = frozenset(returned_outputs(self.ops, self._unread))
        kept = () if previous is None else previous.pipelines()
        self.parts = list(self._divided(units, tuple(fusions), kept))
        self._nested = [segment for segment in self.parts if isinstance(segment, NestedSegment)]
        last = {s.place: g for g in self.parts for s in g.inputs if s.producer is not None}
        for place, segment in last.items():
            segment.last_reads.append(place)
        only = self.parts[0] if len(self.parts) == 1 else None
        self.only = only.pipeline if isinstance(only, PipelineSegment) else None
        """The pipeline, if there is nothing else."""
        for op in self.ops:
            op._captured = True

    # -- dividing -------------------------------------------------------------

    def _divided(
        self,
        units: Iterable[tuple[Any, str | None]],
        fusions: tuple[type[FusedOperation], ...],
        kept: Iterable[OperationFuser],
    ) -> Iterator[Segment]:
        pipelines = {
            (p.basic_ops, p.fusions, p.open_channels): p
            for p in kept
            if p.implementations == tuple(op.implementation() for op in p.basic_ops)
        }
        start = stop = 0
        for unit, reason in (*units, (None, NO_OP)):  # None ends the last run
            if reason is None:
                stop += len(basic_ops_of(unit))
                continue
            if start < stop:
                window = range(start, stop)
                ops, channels = self.ops[start:stop], self._open_channels(window)
                pipeline = pipelines.get((ops, fusions, channels))
                if pipeline is None:
                    pipeline = OperationFuser(ops, fusions, open_channels=channels)
                pipeline.places = self._places[start:stop]
                yield PipelineSegment(pipeline, *self._ends(window, channels))
            window = range(stop, stop + len(basic_ops_of(unit)))
            if isinstance(unit, FusibleOperation):
                self._check_hidden(unit, window)
                channels = self._written_channels(window, window)
                yield OpSegment(unit, reason, *self._ends(window, channels))
            elif unit is not None:
                yield NestedSegment(unit, reason) if _is_container(unit) else Segment(unit, reason)
            start = stop = window.stop

    def _written_channels(
        self, window: range, readers: range, *, are_read: bool = False
    ) -> frozenset[str]:
        """The channels that ops of ``window`` write, and that ``readers`` do or do not read."""
        return frozenset(
            channel
            for i in window
            for k, (channel, _) in self.ops[i]._output_channels.items()
            if any(reader in readers for reader in self._readers.get((i, k), ())) == are_read
        )

    def _open_channels(self, window: range) -> frozenset[str]:
        """The channels that a pipeline of these ops shares with other segments, or a caller."""
        later = range(window.stop, len(self.ops))
        inputs, _ = self._ends(window, ())
        entering = (source.channel for source in inputs if source.channel is not None)
        leaving = self._written_channels(window, later, are_read=True)
        unread = self._unread & self._written_channels(window, later)
        return leaving | unread | frozenset(entering)

    def _ends(
        self, window: range, open_channels: Collection[str]
    ) -> tuple[list[Source], list[Place]]:
        """The extra inputs and outputs of a call of these ops."""
        sources = (source for i in window for source in self.sources[i])
        outputs = returned_outputs(self.ops[window.start : window.stop], open_channels)
        return (
            [s for s in sources if s.producer is None or s.producer not in window],
            [(window.start + i, k) for i, k in outputs],
        )

    def _check_hidden(self, unit: FusibleOperation, window: range) -> None:
        """Refuse a channel whose tensor a call of ``unit``, a composite, does not return."""
        for (i, k), readers in self._readers.items():
            is_split = i in window and readers[0] in window and readers[-1] not in window
            if is_split and not self.ops[i].returns_extra_output(k):
                channel, _ = self.ops[i]._output_channels[k]
                raise InputError(
                    f"Channel {channel!r} is read inside and outside of {type(unit).__name__} (ops "
                    f"{window.start} to {window.stop - 1}), which is called as a module and does "
                    f"not return the tensor; bind op {i} ({type(self.ops[i]).__name__}) with "
                    "output_to_caller=True."
                )

    def is_current(self) -> bool:
        """Whether every module is still to be called as when these segments were made."""
        return (
            self.version is module_calls.version
            and self._has_global_hooks == has_global_hooks()
            and (not self._lone or all(why_called(op) == reason for op, reason in self._lone))
        )

    def __len__(self) -> int:
        """The number of segments."""
        return len(self.parts)

    def pipelines(self) -> Iterator[OperationFuser]:
        """Every pipeline here, including those of ops that are called as modules."""
        for segment in self.parts:
            yield from segment.pipelines()

    # -- the caller's arguments -------------------------------------------------

    @property
    def num_extra_inputs(self) -> int:
        """The number of extra inputs that the caller gives."""
        count = self._checks.num_extra_inputs
        if self._nested:
            count += sum(len(nested.inputs) for nested in self._nested)
        return count

    @property
    def num_extra_outputs(self) -> int:
        """The number of extra outputs that the caller receives."""
        return len(self._returned) + sum(len(nested.outputs) for nested in self._nested)

    def named_ops(self) -> Iterator[tuple[str, BasicOperation]]:
        """Every op, also of nested containers, with its name for messages."""
        for i, op in enumerate(self.ops):
            yield f"Op {i} ({type(op).__name__})", op
        for nested in self._nested:
            for name, op in nested.segments.named_ops():
                yield f"{name} of a nested {nested.segments.name}", op

    def keywords(self, rows: Sequence[Mapping[str, Any]]) -> Keywords:
        """``rows``, the keyword arguments of each basic op, by op."""
        self._checks.keywords(rows)
        return dict(zip(self.ops, rows, strict=True))

    def _check_extra_inputs(self, count: int) -> None:
        if count != self.num_extra_inputs:
            takers = wrong_extra_count(self.num_extra_inputs, self._takers(), count)
            raise InputError(f"The {self.name} {takers}")

    def _takers(self) -> list[str]:
        """The ops that take extra inputs from the caller, for messages."""
        takers = self._checks.extra_input_takers()
        for nested in self._nested:
            inner = nested.segments
            takers += [f"{taker} of a nested {inner.name}" for taker in inner._takers()]
        return takers

    # -- running --------------------------------------------------------------

    def run(
        self, x: Any, extra_inputs: tuple[torch.Tensor, ...], keywords: Keywords | None = None
    ) -> Output:
        """Run every segment, with keyword arguments that were checked.

        Returns the main output, or a tuple of it and the extra outputs in the order of the ops.
        """
        self._check_extra_inputs(len(extra_inputs))
        if self.only is not None:
            return self.only.run(x, extra_inputs, keyword_rows(self.only, keywords))
        remaining = iter(extra_inputs)
        # The tensors on channels, with the version that each had at the start.
        carried: dict[Place | None, tuple[torch.Tensor, int | None]] = {}
        returned: list[torch.Tensor] = []
        for segment in self.parts:
            taken = [
                next(remaining) if s.producer is None else self._read(s, *carried[s.place])
                for s in segment.inputs
            ]
            x = segment.call(x, taken, keywords)
            del taken
            for end in segment.last_reads:
                del carried[end]
            if segment.outputs:
                places = segment.outputs
                x, *extras = segment.taken_apart(x, len(places))
                for place, tensor in zip(places, extras, strict=True):
                    if place in self._readers:
                        carried[place] = (tensor, _version(tensor))
                    if place is None or place in self._returned:
                        returned.append(tensor)
                del extras, tensor
        return (x, *returned) if returned else x

    def _read(self, source: Source, tensor: torch.Tensor, version: int | None) -> torch.Tensor:
        """The tensor on a channel, after a check that it was not changed."""
        if _version(tensor) != version:
            producer, _ = source.place
            raise StateError(
                f"The tensor on channel {source.channel!r}, from op {producer} "
                f"({type(self.ops[producer]).__name__}), was changed in place before all ops had "
                "read it. A module between the ends of a channel must not write into its input."
            )
        return tensor

    # -- planning -------------------------------------------------------------

    def plan(
        self,
        x: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        *,
        training: bool,
        device: str | None = None,
    ) -> FusionPlan:
        """One plan for all segments."""
        if not self.ops:
            raise InputError(
                f"This {self.name} holds no fusible op, so there is nothing to plan."
                " Add an op of fuser."
            )
        self._check_extra_inputs(len(extra_inputs))
        if self.only is not None:
            return self.only.plan(x, *extra_inputs, training=training, device=device)
        parts, _ = self.planned(x, extra_inputs, training=training, device=device)
        keys = [key for part in parts if isinstance(part, FusionPlan) for key in part.key.ops]
        channels = [
            Channel(
                source.channel or "",
                source.producer,
                reader,
                keys[reader].extra_inputs[k].dtype.is_floating_point,
            )
            for reader, row in enumerate(self.sources)
            for k, source in enumerate(row)
            if source.producer is not None
        ]
        plan = merged(parts, channels)
        return replace(plan, memory=plan.memory.with_inputs(t.nbytes for t in (x, *extra_inputs)))

    def planned(self, x: torch.Tensor, extra_inputs: Sequence[torch.Tensor], **how: Any) -> Planned:
        """The plan of each segment, and meta tensors like the outputs."""
        remaining = iter(extra_inputs)
        carried: dict[Place | None, torch.Tensor] = {}
        returned: list[torch.Tensor] = []
        parts: list[FusionPlan | ModuleCall] = []
        for segment in self.parts:
            taken = [
                next(remaining) if source.producer is None else carried[source.place]
                for source in segment.inputs
            ]
            plans, (x, *extras) = segment.planned(x, taken, **how)
            parts += plans
            for place, tensor in zip(segment.outputs, extras, strict=True):
                carried[place] = tensor
                if place is None or place in self._returned:
                    returned.append(tensor)
        return parts, (x, *returned)


def _units(modules: Iterable[Any]) -> Iterator[tuple[Any, str | None]]:
    """Each unit of a segment, and the reason to call it as a module; composites may be split up."""
    for module in modules:
        reason = why_called(module) if isinstance(module, FusibleOperation) else NO_OP
        members = module.members if isinstance(module, FusedOperation) else ()
        if reason is None and any(why_called(member) for member in members):
            yield from _units(members)
        else:
            yield module, reason


def _is_container(module: Any) -> bool:
    """Whether ``module`` is a Sequential that runs its modules in this way itself."""
    runs_segments = getattr(module, "_runs_segments", None)
    return runs_segments is not None and bool(runs_segments())


def _version(tensor: torch.Tensor) -> int | None:
    """The number of writes to ``tensor``; None if torch does not count them."""
    return None if tensor.is_inference() else tensor._version


def _runner_of(op: FusibleOperation, previous: Segments | None) -> Segments | OperationFuser:
    """What runs ``op`` if it is called alone: a composite, as segments of its basic ops."""
    if isinstance(op, FusedOperation):
        return Segments(op.members, name=type(op).__name__, is_open=True, previous=previous)
    assert isinstance(op, BasicOperation)
    return OperationFuser([op], open_channels=op.channels)


runs_ops_alone(_runner_of)
