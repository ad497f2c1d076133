"""The graph of a pipeline: basic ops, the tensors between them, and the bytes of windows."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fuser.errors import InputError
from fuser.op import BasicOperation
from fuser.op.parameters import compute_dtypes
from fuser.plan.parameter_slots import find_slots
from fuser.plan.saved_inputs import rebuilding
from fuser.specs import Collective, PlanKey, QuantSpec, TensorSpec

if TYPE_CHECKING:
    import networkx as nx

Node = Hashable
Memory = Hashable


@dataclass(frozen=True)
class Source:
    """The source of an extra input: the caller, or an extra output of another op.

    The extra input of an open channel comes from the caller too.
    """

    caller_index: int | None
    channel: str | None = None
    producer: int | None = None
    producer_output: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The producing op and the index of its extra output; only for a channel."""
        assert self.producer is not None
        assert self.producer_output is not None
        return self.producer, self.producer_output


def extra_input_sources(
    ops: Sequence[BasicOperation], open_channels: Collection[str] = ()
) -> list[tuple[Source, ...]]:
    """For each op, the source of each of its extra inputs.

    The producer of a channel in ``open_channels`` may be outside of ``ops``; the extra input then
    comes from the caller. Raises InputError if a channel has two producers, none, or one that runs
    after a consumer.
    """
    producers: dict[str, tuple[int, int]] = {}
    for index, op in enumerate(ops):
        for output, (name, _) in sorted(op._output_channels.items()):
            if name in producers:
                raise InputError(
                    f"Channel {name!r} has two producers: {_named(ops, producers[name][0])} and "
                    f"{_named(ops, index)}."
                    " Name the second channel otherwise."
                )
            producers[name] = (index, output)
    sources: list[tuple[Source, ...]] = []
    taken = 0
    for index, op in enumerate(ops):
        row = []
        for slot in range(op.num_extra_inputs):
            channel = op._input_channels.get(slot)
            if channel is None or (channel in open_channels and channel not in producers):
                row.append(Source(taken, channel))
                taken += 1
                continue
            if channel not in producers:
                raise InputError(
                    f"Channel {channel!r} has no producer, and {_named(ops, index)} reads from it."
                    " Bind the extra output of an op to it."
                )
            producer, output = producers[channel]
            if producer >= index:
                raise InputError(
                    f"Channel {channel!r} is read by {_named(ops, index)} before "
                    f"{_named(ops, producer)} has produced it."
                    " Put the reader after the producer."
                )
            row.append(Source(None, channel, producer, output))
        sources.append(tuple(row))
    return sources


def returned_outputs(
    ops: Sequence[BasicOperation], open_channels: Collection[str] = ()
) -> tuple[tuple[int, int], ...]:
    """The extra outputs that leave ``ops``: to the caller, or on an open channel.

    Each is the index of an op, and the index of the extra output among those of the op.
    """
    return tuple(
        (index, output)
        for index, op in enumerate(ops)
        for output in range(op.num_extra_outputs)
        if op.returns_extra_output(output) or op._output_channels[output][0] in open_channels
    )


def assumes_extra_outputs(op: BasicOperation) -> bool:
    """Whether a plan assumes that the extra outputs of ``op`` are like its input.

    An op of a user that does not tell by ``extra_output_specs``.
    """
    tells = type(op).extra_output_specs is not BasicOperation.extra_output_specs
    return op.is_external and op.num_extra_outputs > 0 and not tells


def _named(ops: Sequence[BasicOperation], index: int) -> str:
    return f"op {index} ({type(ops[index]).__name__})"


def with_quantized_outputs(ops: Sequence[BasicOperation], key: PlanKey) -> PlanKey:
    """``key`` with the quantization of each tensor between ``ops``, as the two ops agree on it."""
    if key.recipe is None:
        return key
    narrowed = [key.window(i, i + 1) for i in range(len(ops))]
    keys = list(key.ops)
    for gap in range(len(ops) + 1):
        before, after = gap - 1, gap
        if before >= 0:
            reader = ops[after].input_quantization(narrowed[after]) if after < len(ops) else None
            value = ops[before].output_quantization("forward", narrowed[before], reader)
            keys[before] = replace(keys[before], output=value)
            if after < len(ops):
                keys[after] = replace(keys[after], input=value)
        if after < len(ops) and key.ops[after].input_requires_grad:
            reader = ops[before].grad_output_quantization(narrowed[before]) if before >= 0 else None
            grad = ops[after].output_quantization("backward", narrowed[after], reader)
            keys[after] = replace(keys[after], grad_input=grad)
            if before >= 0:
                keys[before] = replace(keys[before], grad_output=grad)
    return replace(key, ops=tuple(keys))


class OpGraph:
    """The tensors of a pipeline, and the bytes that each window of its ops moves.

    ``ops``: the basic ops in order. ``sources``: from :func:`extra_input_sources`. ``input_spec``
    and ``extra_specs``: the pipeline's main input and the extra inputs from its caller.
    ``autocast``: the dtype of torch's autocast, None if it is off. ``returned``: from
    :func:`returned_outputs`; None if no channel is open. ``places``: the place of each op in the
    user's model, for messages.

    Raises InputError if an op cannot take its input; it says where the op is, and what is before
    it.
    """

    def __init__(
        self,
        ops: Sequence[BasicOperation],
        sources: Sequence[tuple[Source, ...]],
        input_spec: TensorSpec,
        extra_specs: Sequence[TensorSpec],
        autocast: torch.dtype | None,
        returned: Collection[tuple[int, int]] | None = None,
        places: Sequence[str] = (),
    ) -> None:
        self.ops = tuple(ops)
        self.sources = tuple(sources)
        self.returned = returned_outputs(ops) if returned is None else returned
        # The shape is known as long as every op has returned its output_spec. An empty batch is
        # planned as one token, and its shapes are not checked here.
        shape_is_known = 0 not in input_spec.shape
        self.main_specs = [_without_zeros(input_spec)]
        self.tokens = math.prod(self.main_specs[0].shape[:-1])
        from_caller = [_without_zeros(spec) for spec in extra_specs]
        self.extra_inputs: list[tuple[TensorSpec, ...]] = []
        self.extra_outputs: list[tuple[TensorSpec, ...]] = []
        for op, row in zip(ops, sources, strict=True):
            spec = self.main_specs[-1]
            extras = tuple(self._extra_spec(source, from_caller) for source in row)
            for k, extra in enumerate(extras) if op.takes_floating_extras else ():
                if k not in op.index_extras and extra.dtype not in compute_dtypes():
                    raise InputError(
                        f"{_named(ops, len(self.main_specs) - 1)} got an extra input of "
                        f"{extra.dtype}; it takes {', '.join(map(str, compute_dtypes()))}."
                    )
            try:
                output = op.output_spec(spec, extras, autocast)
            except InputError as error:
                if shape_is_known and not any(self._is_assumed(source) for source in row):
                    error.args = (f"{error}{self._whereabouts(places)}",)
                    raise
                output = None
            shape_is_known = shape_is_known and output is not None
            self.extra_inputs.append(extras)
            self.extra_outputs.append(op.extra_output_specs(spec, extras))
            self.main_specs.append(output or spec)

    def _whereabouts(self, places: Sequence[str]) -> str:
        """A sentence about the op whose input is the last tensor so far; empty for an op alone."""
        index = len(self.main_specs) - 1
        if not places or len(self.ops) == 1:
            return ""
        if index == 0:
            return f" It is {places[0]}, the first of its pipeline."
        before = self.ops[index - 1]
        name = before.part_of or type(before).__name__
        text = f" It is {places[index]}; its input is the output of {name}, {places[index - 1]}"
        was, now = (self.main_specs[i].shape[-1] for i in (index - 1, index))
        if was == 2 * now and not before.part_of:
            return f"{text}, which halves the last dimension, from {was} to {now}."
        return f"{text}."

    def _is_assumed(self, source: Source) -> bool:
        """Whether an extra input comes from an op that does not tell what it is."""
        return source.producer is not None and assumes_extra_outputs(self.ops[source.producer])

    def _extra_spec(self, source: Source, from_caller: Sequence[TensorSpec]) -> TensorSpec:
        if source.caller_index is not None:
            return from_caller[source.caller_index]
        producer, output = source.place
        return self.extra_outputs[producer][output]

    def bind(self, key: PlanKey) -> None:
        """Build ``flows``: the digraph of values and the digraph of gradients.

        Nodes are basic-op indices, ``"input"``, ``"output"``, ``("extra input",
        k)`` for tensors from the caller and ``("extra output", op, k)`` for
        tensors to the caller. An edge has ``tensors``, a mapping from the name
        of a memory to its bytes: a tensor that an op returns by reference keeps
        its name, and is counted once. ``arriving`` has the name of each op's
        main input, ``fixed`` the names of all tensors that do not grow with
        the tokens.
        """
        self.key = key
        slots = [find_slots(op, _named(self.ops, i)) for i, op in enumerate(self.ops)]
        self.params = [[held[name] for held, name in row] for row in slots]
        import networkx as nx  # at the first plan: half of the modules that fuser imports

        values, gradients = nx.DiGraph(), nx.DiGraph()
        values.add_nodes_from(range(len(self.ops)))
        gradients.add_nodes_from(range(len(self.ops)))
        self.flows = {"forward": values, "backward": gradients}
        value, gradient = self._memory_names(key)
        places: list[Node] = ["input", *range(len(self.ops)), "output"]
        for gap in range(len(self.main_specs)):
            source, target = places[gap], places[gap + 1]
            _add(values, source, target, value["line", gap], self.gap_bytes(gap, "forward"))
            if gap == len(self.ops) or key.ops[gap].input_requires_grad:
                nbytes = self.gap_bytes(gap, "backward")
                _add(gradients, target, source, gradient["line", gap], nbytes)
        for i in range(len(self.ops)):
            keys = key.ops[i].extra_inputs
            for k, (spec, tensor) in enumerate(zip(self.extra_inputs[i], keys, strict=True)):
                origin = self._origin(i, k)
                _add(values, origin, i, value["extra input", i, k], spec.nbytes)
                if tensor.requires_grad:
                    _add(gradients, i, origin, gradient["extra input", i, k], spec.nbytes)
            for k, spec in enumerate(self.extra_outputs[i]):
                if (i, k) in self.returned:
                    node = ("extra output", i, k)
                    _add(values, i, node, value["extra output", i, k], spec.nbytes)
                    name = ("gradient of extra output", i, k)
                    if spec.dtype.is_floating_point:
                        _add(gradients, node, i, name, spec.nbytes)
        self.arriving = [value["line", i] for i in range(len(self.ops))]
        self.fixed = {
            value["extra input", i, k] for i, op in enumerate(self.ops) for k in op.index_extras
        }

    def _origin(self, op: int, slot: int) -> Node:
        source = self.sources[op][slot]
        is_callers = source.producer is None
        return ("extra input", source.caller_index) if is_callers else source.producer

    def _memory_names(self, key: PlanKey) -> tuple[dict[Node, Memory], dict[Node, Memory]]:
        """The name of the memory of each value and each gradient; references share a name."""
        count = len(self.ops)
        value: dict[Node, Memory] = {("line", 0): ("value", 0)}
        gradient: dict[Node, Memory] = {("line", count): ("gradient", count)}
        for i, op in enumerate(self.ops):
            here, passes = value["line", i], not op.kernels("forward", key.window(i, i + 1))
            value["line", i + 1] = here if passes else ("value", i + 1)
            for k in range(op.num_extra_outputs):
                node = ("extra output", i, k)
                value[node] = here if passes else node
            for k, source in enumerate(self.sources[i]):
                if source.producer is None:
                    value["extra input", i, k] = ("extra input", source.caller_index)
                else:
                    node = ("extra output", *source.place)
                    value["extra input", i, k] = value[node]
        for i in reversed(range(count)):
            here, op = gradient["line", i + 1], self.ops[i]
            passes = not op.kernels("backward", key.window(i, i + 1)) or op.passes_gradient_on
            passes = passes and key.ops[i].grad_input is None
            gradient["line", i] = here if passes else ("gradient", i)
            for k in range(op.num_extra_inputs):
                is_shared = passes or op.passes_gradient_to_extras
                name = ("gradient of extra input", i, k)
                gradient["extra input", i, k] = here if is_shared else name
        return value, gradient

    def channels_inside(self, start: int, stop: int) -> str | None:
        """The channel inside ops ``start`` to ``stop - 1``, as a sentence; None if there is none.

        A fused op gets all extra inputs before it runs, so none of them can be
        one of its own extra outputs. A fused op from a registered function, or
        of a fusion with ``makes_channels``, makes such a tensor itself.
        """
        for consumer in range(start, stop):
            for source in self.sources[consumer]:
                if source.producer is not None and source.producer >= start:
                    return (
                        f"channel {source.channel!r} runs from {_named(self.ops, source.producer)} "
                        f"to {_named(self.ops, consumer)} inside the window."
                    )
        return None

    def window_bytes(
        self, start: int, stop: int, side: str, *, recomputes: bool = False
    ) -> tuple[int, int]:
        """Bytes that one kernel for ops ``start`` to ``stop - 1`` must move.

        The kernel reads each tensor that enters once, and writes each tensor
        that leaves or that backward needs once; tensors inside are free. The
        first number is for all tokens of the pipeline's input. The second does
        not depend on the tokens: it is for parameters, their gradients, and
        extra inputs such as split sizes.
        A window that ``recomputes`` saves its own input for all its ops, and
        reads extra inputs again.
        """
        flow = self.flows[side]
        inside = range(start, stop)
        entering: dict[Memory, int] = {}
        leaving: dict[Memory, int] = {}
        saved: dict[Memory, int] = {}
        statistics = 0
        params = 0
        for i in inside:
            for source, _, tensors in flow.in_edges(i, data="tensors"):
                if source not in inside:
                    entering |= tensors
            for _, target, tensors in flow.out_edges(i, data="tensors"):
                if target not in inside:
                    leaving |= tensors
            op, op_key = self.ops[i], self.key.ops[i]
            if op_key.requires_grad:
                statistics += op.saved_bytes(self.main_specs[i])
                if op.saves_input:
                    at = start if recomputes else i
                    saved[self.arriving[at]] = self.gap_bytes(at, "forward")
            if recomputes and any(self.ops[k].saves_input for k in range(i, stop)):
                for source, _, tensors in self.flows["forward"].in_edges(i, data="tensors"):
                    entering |= tensors if source not in (i - 1, "input") else {}
            params += self._param_bytes(i, side)
        moved = entering | saved | leaving
        fixed = sum(nbytes for memory, nbytes in moved.items() if memory in self.fixed)
        return sum(moved.values()) - fixed + statistics, params + fixed

    def gap_bytes(self, gap: int, side: str) -> int:
        """Bytes of the tensor between op ``gap - 1`` and op ``gap``, or of its gradient."""
        spec = self.main_specs[gap]
        quantized = self.quant_spec(gap, side)
        return spec.nbytes if quantized is None else quantized.nbytes(spec)

    def quant_spec(self, gap: int, side: str) -> QuantSpec | None:
        """The quantization of the tensor at ``gap``, or of its gradient; None for unquantized."""
        keys = self.key.ops
        if gap == len(keys):
            return keys[gap - 1].output if side == "forward" else None
        return keys[gap].input if side == "forward" else keys[gap].grad_input

    def quantize_kernels(self, start: int, stop: int, side: str) -> list[tuple[str, int, int]]:
        """The kernels by which ops ``start`` to ``stop - 1`` quantize unquantized inputs.

        Tensors inside a window are unquantized. Each entry has the kernel's
        name and the bytes that it adds, for tokens and for parameters. The
        unquantized tensor is read in any case, so only writing and reading the
        quantized one counts. First are the kernels that compute inputs again, and
        those of inputs that are kept rounded.
        """
        kernels: list[tuple[str, int, int]] = []
        for i in range(start, stop) if side == "backward" else ():
            path = rebuilding(self.ops, self.key, i) if not self.key.ops[i].keeps_input else ()
            kept = self.ops[i].kept_input(self.key.window(i, i + 1))
            is_quantized = kept is not None and self.key.no_kernels is None
            for k in path:
                (*_, name) = self.ops[k].kernels("forward", self.key.window(k, k + 1))
                moved = self.main_specs[k].nbytes
                if not is_quantized:
                    moved += self.main_specs[k + 1].nbytes
                elif k > min(path):  # the kernel that quantizes computes all of them
                    moved = 0
                kernels.append((f"{name} again", moved, 0))
        for i in range(start, stop):
            rounded, spec = self.rounded_input(i), self.main_specs[i]
            if rounded is not None:
                name = "quantize to keep" if side == "forward" else "dequantize"
                kernels.append((name, spec.nbytes + rounded.nbytes(spec), 0))
        for i in range(start, stop) if self.key.recipe is not None else ():
            op, key = self.ops[i], self.key.window(i, i + 1)
            if side == "forward" and i > start:
                key = replace(key, ops=(replace(key.ops[0], input=None),))
            elif side == "backward" and i + 1 < stop:
                key = replace(key, ops=(replace(key.ops[0], grad_output=None),))
            for role, quantized in op.quantizes(side, key).items():
                if role == "weight":
                    weight = self.params[i][0]
                    nbytes = quantized.nbytes(TensorSpec(tuple(weight.shape), weight.dtype))
                    kernels.append((f"quantize {role}", 0, 2 * nbytes))
                else:
                    nbytes = quantized.nbytes(self.main_specs[i if role == "input" else i + 1])
                    kernels.append((f"quantize {role}", 2 * nbytes, 0))
        return kernels

    def rounded_input(self, op: int) -> QuantSpec | None:
        """How an activation keeps its main input rounded, if the key says so; else None."""
        is_rounded = self.key.ops[op].rounds_input
        return self.ops[op].kept_input(self.key.window(op, op + 1)) if is_rounded else None

    def output_quantize_bytes(self, start: int, stop: int, side: str) -> int | None:
        """Bytes that a kernel of its own moves to quantize a window's output; None if it need not.

        The unquantized tensor is written and read once more.
        """
        gap = stop if side == "forward" else start
        return None if self.quant_spec(gap, side) is None else 2 * self.main_specs[gap].nbytes

    def collectives(
        self, start: int, stop: int, side: str, sends: Mapping[str, QuantSpec]
    ) -> list[tuple[Collective, int]]:
        """The communication of ops ``start`` to ``stop - 1`` on ``side``, each with its bytes.

        ``sends`` has what a fusion sends quantized, by the tensor's name.
        """
        collectives = []
        for i in range(start, stop):
            for collective in self.ops[i].collectives(side, self.key.window(i, i + 1)):
                collective = replace(
                    collective, quantization=sends.get(collective.tensor, collective.quantization)
                )
                is_after = collective.tensor in ("output", "grad_output")
                spec = self.main_specs[i + is_after]
                if collective.extra_output is not None:
                    spec = self.extra_outputs[i][collective.extra_output]
                collectives.append((collective, collective.nbytes(spec)))
        return collectives

    def _param_bytes(self, op: int, side: str) -> int:
        return sum(
            p.numel() * p.element_size() * (1 + (side == "backward" and key.requires_grad))
            for p, key in zip(self.params[op], self.key.ops[op].params, strict=True)
        )


def _without_zeros(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(tuple(max(size, 1) for size in spec.shape), spec.dtype)


def _add(graph: nx.DiGraph, source: Node, target: Node, memory: Memory, nbytes: int) -> None:
    if not graph.has_edge(source, target):
        graph.add_edge(source, target, tensors={})
    graph.edges[source, target]["tensors"][memory] = nbytes
