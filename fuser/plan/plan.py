"""Fusion plans: steps, bytes, modelled times and refusals; as text, dict and DOT."""

from __future__ import annotations

import functools
import html
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fuser.cuda.launch import off_cuda
from fuser.plan.devices import Device, device_of
from fuser.plan.memory import MemoryCurve
from fuser.report.text import (
    columns,
    format_bytes,
    format_flops,
    format_time,
    listed,
    quoted,
    span,
    wrapped,
)
from fuser.specs import PlanKey, QuantSpec

KERNELS_WIDTH = 50  # of the column of kernels in a printed plan
# Fields of a plan with an entry for each of some windows of its ops, which ``ops`` of it are.
_OF_WINDOWS = ("refusals", "layout", "padding", "notes", "replays", "kept")
PIPELINE_INPUT = "the pipeline's input"  # the reason to keep it; of a later pipeline, the module


@dataclass(frozen=True)
class Step:
    """One entry of a plan: a basic op, or a window of them run by one fused op.

    ``ops`` are basic-op indices in pipeline order, ``fusion`` the fused op's
    class name (None for a basic op), ``kernel`` its kernels (empty if the step
    only returns references). ``bytes_per_token`` are the bytes moved through
    memory, divided by the tokens (rows of the pipeline's input); the bytes of
    parameters are divided by the plan's nominal token count. ``microseconds``
    is the modelled time for that token count: of its products,
    ``product_microseconds``, of its memory traffic beside them, and of its
    launches. ``cover_microseconds`` has bytes and launches alone, by which covers
    are chosen. ``flops_per_token`` are the operations of the products. ``emits``
    is the quantization of the step's output, or of its input's gradient; None for
    unquantized. ``link_bytes_per_token`` are the bytes that a rank sends to the others.
    """

    ops: tuple[int, ...]
    fusion: str | None
    kernel: str
    bytes_per_token: float
    microseconds: float
    emits: QuantSpec | None = None
    link_bytes_per_token: float = 0.0
    flops_per_token: float = 0.0
    product_microseconds: float = 0.0
    cover_microseconds: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """A window that matches a fusion by type but does not run as that fusion, with the reason."""

    fusion: str
    side: str
    ops: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Note:
    """A sentence of a step, or of an operation, about itself or about a tensor that it reads.

    ``fusion`` is the fused op, None for a basic op; ``side`` that of a step, None for both sides.
    """

    ops: tuple[int, ...]
    text: str
    fusion: str | None = None
    side: str | None = None

    def title(self, names: Sequence[str]) -> str:
        """The name of the step or operation; ``names`` are those of the plan's ops."""
        return self.fusion or names[self.ops[0]]


@dataclass(frozen=True)
class Kept:
    """A tensor of forward that the backward of an op reads.

    ``name`` is ``"input"``, ``"statistics"`` or ``"weight"``. It is kept, with ``bytes_per_token``
    or, for a quantized copy of a weight, ``nbytes``, or else ``rebuilt_by`` these ops in backward,
    or from the parameter. It has no bytes if an earlier entry is the same memory. ``reason`` is why
    it is kept; ``rounded_to`` the format of an activation's input that is kept rounded.
    ``moved_again`` are the bytes that backward reads and writes to quantize a weight again.
    """

    ops: tuple[int, ...]
    name: str
    bytes_per_token: float
    nbytes: int = 0
    rebuilt_by: tuple[int, ...] = ()
    reason: str = ""
    rounded_to: str = ""
    moved_again: int = 0

    @property
    def is_rebuilt(self) -> bool:
        """Whether backward computes it again."""
        return bool(self.rebuilt_by) or (self.name == "weight" and self.nbytes == 0)


@dataclass(frozen=True)
class Node:
    """The ops that run as one autograd node, if somebody waits for single gradients.

    ``is_cut`` tells whether the pipeline is cut before it; without a cut a pipeline is one node.
    ``takes_quantized``: a quantized tensor passes that cut, in forward or backward.
    """

    ops: tuple[int, ...]
    is_cut: bool = False
    takes_quantized: bool = False


@dataclass(frozen=True)
class ModuleCall:
    """A module that is called outside of pipelines, and the reason.

    ``ops`` are the basic ops of the module if it is an op, else empty.
    ``before`` is the index of the next op after the module, or of the first of
    ``ops``.
    """

    name: str
    reason: str
    ops: tuple[int, ...] = ()
    before: int = 0


class Drawn:
    """A plan that is drawn from its dict, and shown as its text."""

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain lists, strings and numbers, ready for JSON."""
        raise NotImplementedError

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the plan into ``path``: ``.svg``, ``.png`` or ``.html``. Returns the path.

        Raises
        ------
        InputError
            If the path has another suffix.
        """
        from fuser.report.draw import draw

        return draw(self.to_dict(), str(self), path)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True)
class Channel:
    """An extra output that is an extra input of a later op, perhaps in another pipeline.

    A channel of integers has no gradient.
    """

    name: str
    producer: int
    consumer: int
    has_gradient: bool = True


@dataclass(frozen=True)
class Baseline:
    """Modelled microseconds of the ops of a plan in plain torch; ``backward`` is 0 without one."""

    name: str
    forward: float
    backward: float

    @property
    def microseconds(self) -> float:
        """Both sides."""
        return self.forward + self.backward

    def followed_by(self, other: Baseline) -> Baseline:
        """That of these ops and of others after them."""
        return replace(
            self, forward=self.forward + other.forward, backward=self.backward + other.backward
        )


@dataclass(frozen=True)
class FusionPlan(Drawn):
    """The steps that a pipeline runs for one plan key.

    ``forward`` and ``backward`` have the steps in the order in which they run:
    backward from the last op to the first, and empty if nothing needs a
    gradient. ``activation_bytes[i]`` are the bytes per token of the main input
    of op ``i``, and ``grad_activation_bytes[i]`` those of its gradient; the last
    entries are for the output. ``notes`` are sentences of the operations about
    themselves. ``layout`` and ``padding`` are notes on the
    tensors given to ``plan``; a cached plan has none. ``replays`` say how the calls until then have
    run. ``modules`` are called
    between the pipelines, in a plan for several, and are not modelled. ``nodes``
    are the autograd nodes into which ``plan`` says that the pipeline is cut if
    somebody waits for single gradients, and ``waiting`` who waits now; both are
    empty if it cannot be cut, and ``waiting`` if it runs as one node. ``extra_outputs`` are the
    numbers of extra outputs of the ops. ``kept`` is what backward reads of forward, and ``memory``
    what each memory budget would keep and cost, in a plan from ``plan``; plans are compared without
    it, since it belongs to a shape. ``target`` is
    the device that the plan was asked for; None for this machine's. ``features`` are the columns
    of the main input of each op, and at the end those of the output. ``wholes`` has for each
    op the class that users write for it and its neighbours, such as ``Linear``; empty if that is
    the op. ``baselines`` are the modelled times of the same ops in plain torch, if the plan is for
    the rows of its own input.
    """

    key: PlanKey
    ops: tuple[str, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    unfused_forward: tuple[Step, ...]
    unfused_backward: tuple[Step, ...]
    refusals: tuple[Refusal, ...]
    channels: tuple[Channel, ...]
    activation_bytes: tuple[float, ...]
    grad_activation_bytes: tuple[float, ...]
    nominal_tokens: int
    layout: tuple[Note, ...] = ()
    modules: tuple[ModuleCall, ...] = ()
    padding: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()
    nodes: tuple[Node, ...] = ()
    waiting: str = ""
    extra_outputs: tuple[int, ...] = ()
    kept: tuple[Kept, ...] = ()
    memory: MemoryCurve = field(default_factory=MemoryCurve, compare=False)
    target: Device | None = None
    features: tuple[int, ...] = ()
    wholes: tuple[str, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    replays: tuple[Note, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        steps = ", ".join(
            f"{len(side)} steps {name}"
            for name, side in (("forward", self.forward), ("backward", self.backward))
            if side
        )
        return f"<FusionPlan of {len(self.ops)} ops: {steps}; {self.key.describe()}>"

    def __str__(self) -> str:
        lines = [f"Fusion plan of {len(self.ops)} ops: {self.key.describe()}"]
        names = []
        for i, name in enumerate((*self.ops, None)):
            names += [f"[{module.name}]" for module in self.modules_before(i)]
            names += [] if name is None else [f"{i} {name}"]
        lines += wrapped("  ", names)
        for (reason,), calls in _alike(self.modules, "reason").items():
            called = (f"{c.name} over {span(c.ops)}" if c.ops else f"[{c.name}]" for c in calls)
            lines.append(f"  called as a module ({reason}): {', '.join(dict.fromkeys(called))}")
        lines += [
            f"  channel {c.name!r}: op {c.producer} to op {c.consumer}" for c in self.channels
        ]
        for sentence in self.node_lines():
            lines += textwrap.wrap(sentence, 96, initial_indent="  ", subsequent_indent="    ")
        if self.key.no_kernels not in (None, off_cuda(self.key.device)):
            lines.append(f"  plain torch, without fuser's kernels: {self.key.no_kernels}")
        for side in ("forward", "backward"):
            lines += ["", *self.side_lines(side)]
        if self.baselines:
            lines += ["", "plain torch, modelled", *(f"  {one}" for one in self.baseline_lines())]
        if self.kept:
            rows = [(str(i), self.ops[i], text) for i, text in self._kept_of_ops().items()]
            lines += ["", self.kept_line(), *columns(rows, left=3)]
        lines += ["", "notes"] if self.notes else []
        for paragraph in self.note_lines():
            lines += textwrap.wrap(paragraph, 96, initial_indent="  ", subsequent_indent="    ")
        for heading, notes in (
            ("inputs that kernels cannot read in 16-byte vectors", self.layout),
            ("tensors that are padded to whole blocks", self.padding),
        ):
            lines += ["", heading] if notes else []
            for note in notes:
                title = f"{note.title(self.ops)} over {span(note.ops)}"
                lines.append(f"  {note.side:<8} {title} {note.text}")
        lines += ["", "calls until here"] if self.replays else []
        for note in self.replays:
            place = f"{note.side or 'both':<8} {span(note.ops)} {note.text}"
            lines += textwrap.wrap(place, 96, initial_indent="  ", subsequent_indent=" " * 11)
        if self.refusals:
            lines += ["", "not used"]
        refusals = _alike(self.refusals, "side", "fusion", "reason")
        for (side, fusion, reason), alike in refusals.items():
            spans = [span(refusal.ops) for refusal in alike]
            where, below = ", ".join(spans), []
            if len(where) > 40:
                where, below = f"{len(spans)} windows", wrapped(" " * 11, spans)
            lines += [f"  {side:<8} {fusion} over {where}: {reason}", *below]
        lines += [
            "",
            *textwrap.wrap(
                f"Modelled for {self.nominal_tokens} tokens on {self.device.describe()}: a GEMM "
                "takes its operations' time at the rate of its format, other bytes move once, at "
                "memory bandwidth, and a kernel costs a launch.",
                width=96,
            ),
        ]
        if any(step.link_bytes_per_token for step in self.forward + self.backward):
            lines.append("Bytes sent to other ranks take the time of the link, without overlap.")
        if any("(emulated)" in step.kernel for step in self.forward + self.backward):
            lines.append("An emulated product dequantizes its operands before it.")
        if any(not call.ops for call in self.modules):
            lines.append("Modules in brackets are not counted.")
        return "\n".join(lines)

    def side_lines(self, side: str) -> list[str]:
        """The steps of a side as a table, and their totals."""
        steps = self.steps(side)
        if not steps:
            return [f"{side}: nothing needs a gradient"]
        emits = any(step.emits for step in steps)
        rows: list[tuple[str, ...]] = []
        for step in steps:
            first, *more = wrapped("", (step.kernel or "(no kernel)").split(", "), KERNELS_WIDTH)
            row = (
                span(step.ops),
                step.fusion or self.ops[step.ops[0]],
                self.shape_of(step, side),
                first,
                *((str(step.emits or ""),) if emits else ()),
                format_flops(step.flops_per_token),
                format_bytes(step.bytes_per_token),
                format_time(step.product_microseconds) if step.flops_per_token else "-",
                format_time(step.microseconds),
            )
            rows += [row, *(("", "", "", line, *[""] * (len(row) - 4)) for line in more)]
        quantization = ("emits",) if emits else ()
        numbers = ("FLOP/token", "bytes/token", "GEMMs", "modelled")
        heading = (side, "runs as", "columns", "kernels", *quantization, *numbers)
        return [*columns([heading, *rows], left=len(heading) - len(numbers)), f"  {_total(steps)}"]

    def shape_of(self, step: Step, side: str) -> str:
        """The columns of a step's main input and output, or of their gradients: ``64 -> 256``."""
        if not self.features:
            return ""
        ends = [self.features[step.ops[0]], self.features[step.ops[-1] + 1]]
        first, last = ends if side == "forward" else ends[::-1]
        return str(first) if first == last else f"{first} -> {last}"

    @property
    def device(self) -> Device:
        """What the times are modelled for."""
        return self.target or device_of(self.key.device)

    @property
    def microseconds(self) -> float:
        """The modelled time of forward and backward."""
        return _time(self.forward) + _time(self.backward)

    def baseline_lines(self) -> list[str]:
        """The modelled times of plain torch, and how much faster the plan is."""
        lines = []
        for one in self.baselines:
            sides = [one.forward] + [one.backward] * bool(self.backward)
            ratio = one.microseconds / self.microseconds if self.microseconds else 1.0
            times = " + ".join(map(format_time, sides))
            lines.append(f"{one.name}, in {self.key.dtype_name()}: {times}, {ratio:.2f}x this plan")
        return lines

    @property
    def kept_bytes_per_token(self) -> float:
        """Bytes that forward keeps for backward, divided by the tokens; without weights."""
        return sum(kept.bytes_per_token for kept in self.kept)

    def kept_line(self) -> str:
        """What forward keeps for backward, in all."""
        weights = sum(kept.nbytes for kept in self.kept)
        beside = f", and {format_bytes(weights)} of quantized weights" if weights else ""
        return f"kept for backward: {format_bytes(self.kept_bytes_per_token)} a token{beside}"

    def _kept_of_ops(self) -> dict[int, str]:
        """What backward reads of the forward of each op, and where it comes from."""
        texts: dict[int, list[str]] = {}
        for kept in self.kept:
            if kept.name == "weight" and kept.is_rebuilt:
                moves = f", which moves {format_bytes(kept.moved_again)}" * bool(kept.moved_again)
                text = f"weight quantized again{moves}"
            elif kept.is_rebuilt:
                text = f"{kept.name} computed again by {span(kept.rebuilt_by)}"
            else:
                nbytes = kept.nbytes or kept.bytes_per_token
                why = f" ({kept.reason})" if kept.reason else ""
                to = f" rounded to {kept.rounded_to}" if kept.rounded_to else ""
                size = f"{format_bytes(nbytes)}{to}{why}" if nbytes else "as above"
                text = f"{kept.name} {size}"
            texts.setdefault(kept.ops[0], []).append(text)
        return {i: ", ".join(of_op) for i, of_op in texts.items()}

    def modules_before(self, op: int) -> list[ModuleCall]:
        """The modules, except ops, that are called between op ``op - 1`` and op ``op``."""
        return [call for call in self.modules if call.before == op and not call.ops]

    def note_lines(self) -> list[str]:
        """The notes of each operation as one line; operations with equal notes share one."""
        spans: dict[tuple[str, str], list[str]] = {}
        for notes in _alike(self.notes, "fusion", "ops").values():
            text = " ".join(note.text for note in notes)
            spans.setdefault((notes[0].title(self.ops), text), []).append(span(notes[0].ops))
        return [f"{name} over {', '.join(over)}: {text}" for (name, text), over in spans.items()]

    @property
    def cuts(self) -> tuple[int, ...]:
        """The ops before which the pipeline is cut into autograd nodes."""
        return tuple(node.ops[0] for node in self.nodes if node.is_cut)

    def node_lines(self) -> list[str]:
        """Sentences about the autograd nodes: how many, for whom, and where the cuts are."""
        cuts = self.cuts
        if not cuts:
            return []
        where = listed(list(map(str, cuts)))
        cut = f"cut before op{'s' * (len(cuts) > 1)} {where}"
        if self.waiting:
            lines = [f"runs as {len(self.nodes)} autograd nodes, {cut}: {self.waiting}"]
        else:
            one = len(self.nodes) - len(cuts)
            lines = [
                f"{one} autograd node{'s' * (one > 1)}; {len(self.nodes)} with hooks of "
                f"parameters, {cut}; inside DDP about one a bucket"
            ]
        quantized = listed([str(node.ops[0]) for node in self.nodes if node.takes_quantized])
        if quantized and self.waiting:
            lines.append(
                f"a quantized tensor passes the cut before {quantized}: the nodes beside it run "
                "their ops in Python at every step"
            )
        return lines

    def gap_labels(self, side: str, gap: int) -> list[str]:
        """Labels of the tensor before op ``gap``, or of its gradient: bytes, and format."""
        carried = (self.activation_bytes if side == "forward" else self.grad_activation_bytes)[gap]
        edge, last = (gap - 1, -1) if side == "forward" else (gap, 0)
        emits = [step.emits for step in self.steps(side) if step.ops[last] == edge]
        return [f"{format_bytes(carried)}/token", *(str(e.format) for e in emits if e is not None)]

    def steps(self, side: str, *, fused: bool = True) -> tuple[Step, ...]:
        """The steps of ``"forward"`` or ``"backward"``, fused or unfused."""
        if side == "forward":
            return self.forward if fused else self.unfused_forward
        return self.backward if fused else self.unfused_backward

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain lists, strings and numbers, ready for JSON."""

        def steps(part: Iterable[Step]) -> list[dict[str, Any]]:
            return [
                {**_as_dict(step), "emits": None if step.emits is None else str(step.emits)}
                for step in part
            ]

        return {
            "key": self.key.describe(),
            "device": self.device.describe(),
            "features": list(self.features),
            "wholes": list(self.wholes),
            "baselines": [_as_dict(one) for one in self.baselines],
            "ops": list(self.ops),
            "channels": [_as_dict(channel) for channel in self.channels],
            "nominal_tokens": self.nominal_tokens,
            "activation_bytes": list(self.activation_bytes),
            "grad_activation_bytes": list(self.grad_activation_bytes),
            "forward": steps(self.forward),
            "backward": steps(self.backward),
            "unfused_forward": steps(self.unfused_forward),
            "unfused_backward": steps(self.unfused_backward),
            "modules": [_as_dict(call) for call in self.modules],
            "nodes": [_as_dict(node) for node in self.nodes],
            "waiting": self.waiting,
            **{name: [_as_dict(item) for item in getattr(self, name)] for name in _OF_WINDOWS},
            "memory": self.memory.to_dict(),
            "input_requires_grad": self.key.ops[0].input_requires_grad,
            "extra_inputs": [[e.requires_grad for e in op.extra_inputs] for op in self.key.ops],
            "extra_outputs": list(self.extra_outputs),
            "labels": {
                side: [self.gap_labels(side, gap) for gap in range(len(self.activation_bytes))]
                for side in ("forward", "backward")
            },
            "sentences": {
                "nodes": self.node_lines(),
                "notes": self.note_lines(),
                "baselines": self.baseline_lines(),
                "kept": [self.kept_line()] * bool(self.kept)
                + [f"{i} {self.ops[i]}: {text}" for i, text in self._kept_of_ops().items()],
            },
        }

    def to_dot(self) -> str:
        """The plan as a Graphviz digraph with a cluster for each step of forward and backward."""
        lines = ["digraph plan {", "  rankdir=LR;", "  node [shape=box, style=rounded];"]
        kept_of_ops = self._kept_of_ops()
        if self.kept:
            lines.append(f"  label={quoted(self.kept_line())};")
        for side in ("forward", "backward"):
            steps = self.steps(side)
            prefix = side[0]
            for number, step in enumerate(steps):
                label = f"{step.fusion or self.ops[step.ops[0]]}\n{step.kernel or 'no kernel'}"
                lines.append(f"  subgraph cluster_{prefix}{number} {{")
                lines.append(f"    label={quoted(label)};")
                for op in step.ops:
                    name = f"{op} {self.ops[op]}"
                    if side == "forward" and op in kept_of_ops:
                        name += f"\nfor backward: {kept_of_ops[op]}"
                    lines.append(f"    {prefix}{op} [label={quoted(name)}];")
                lines.append("  }")
            for source, target, gap in self._edges(side):
                label = "" if gap is None else quoted("\n".join(self.gap_labels(side, gap)))
                lines.append(f"  {source} -> {target}" + (f" [label={label}];" if label else ";"))
            for number, call in enumerate(self.modules):
                if not call.ops and steps:
                    name = quoted(call.name)
                    lines.append(f"  {prefix}m{number} [label={name}, style=dashed];")
        for channel in self.channels:
            label = quoted(channel.name)
            lines.append(f"  f{channel.producer} -> f{channel.consumer} [label={label}];")
        lines.append("}")
        return "\n".join(lines)

    def _edges(self, side: str) -> list[tuple[str, str, int | None]]:
        """The arrows between ops in DOT, each with the gap that its label is for, or None."""
        covered = sorted(op for step in self.steps(side) for op in step.ops)
        nodes: list[tuple[str, int | None]] = []
        for op in (*covered, len(self.ops)) if covered else ():
            nodes += [
                (f"{side[0]}m{number}", None)
                for number, call in enumerate(self.modules)
                if call.before == op and not call.ops
            ]
            nodes += [(f"{side[0]}{op}", op)] if op < len(self.ops) else []
        edges = []
        for (source, before), (target, after) in pairwise(nodes):
            gap = len(self.ops) if after is None and before == len(self.ops) - 1 else after
            edges.append((source, target, gap) if side == "forward" else (target, source, gap))
        return edges if side == "forward" else edges[::-1]


def merged(parts: Iterable[FusionPlan | ModuleCall], channels: Sequence[Channel]) -> FusionPlan:
    """One plan for a sequence of pipelines, and modules called between them.

    Ops are numbered through all pipelines; ``channels`` has those numbers already.
    """
    plans: list[FusionPlan] = []
    modules: list[ModuleCall] = []
    count = 0
    for part in parts:
        if isinstance(part, ModuleCall):
            modules.append(replace(part, ops=_shifted(part.ops, count), before=count))
        else:
            plans.append(_after(modules[-1], part) if modules else part)
            count += len(part.ops)
    return replace(
        functools.reduce(_joined, plans), channels=tuple(channels), modules=tuple(modules)
    )


def _after(call: ModuleCall, plan: FusionPlan) -> FusionPlan:
    """``plan`` of a pipeline that is one because a module before it, or all of it, is called."""
    why = f"input of a pipeline: {call.name} is called as a module, {call.reason}"
    kept = (replace(k, reason=why) if k.reason == PIPELINE_INPUT else k for k in plan.kept)
    return replace(plan, kept=tuple(kept))


def _joined(first: FusionPlan, second: FusionPlan) -> FusionPlan:
    by = len(first.ops)

    def moved(name: str) -> tuple[Any, ...]:
        return tuple(_moved(item, by) for item in getattr(second, name))

    return replace(
        first,
        key=replace(first.key, ops=first.key.ops + second.key.ops),
        forward=first.forward + moved("forward"),
        backward=moved("backward") + first.backward,
        unfused_forward=first.unfused_forward + moved("unfused_forward"),
        unfused_backward=moved("unfused_backward") + first.unfused_backward,
        nodes=_nodes_of(first) + tuple(_moved(node, by) for node in _nodes_of(second)),
        waiting=first.waiting or second.waiting,
        memory=first.memory.followed_by(second.memory, by),
        baselines=tuple(map(Baseline.followed_by, first.baselines, second.baselines)),
        **{name: getattr(first, name) + moved(name) for name in _OF_WINDOWS},
        **{
            name: getattr(first, name) + getattr(second, name)
            for name in ("ops", "extra_outputs", "wholes")
        },
        **{  # the output of the first pipeline is the input of the second
            name: getattr(first, name)[:-1] + getattr(second, name)
            for name in ("features", "activation_bytes", "grad_activation_bytes")
        },
    )


def _moved(item: Any, by: int) -> Any:
    """An entry of a plan for ops whose indices are larger by ``by``."""
    names = ("ops", "rebuilt_by") if isinstance(item, Kept) else ("ops",)
    return replace(item, **{name: _shifted(getattr(item, name), by) for name in names})


def _as_dict(item: object) -> dict[str, Any]:
    """The fields of an entry of a plan, with lists in the place of tuples."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in vars(item).items()}


def _nodes_of(plan: FusionPlan) -> tuple[Node, ...]:
    """The autograd nodes of a pipeline, or of several; one if it is not cut."""
    whole = (Node(tuple(range(len(plan.ops)))),) if plan.key.requires_grad else ()
    return plan.nodes or whole


def _shifted(ops: Iterable[int], by: int) -> tuple[int, ...]:
    return tuple(i + by for i in ops)


def _alike(items: Iterable[Any], *names: str) -> dict[tuple[Any, ...], list[Any]]:
    """``items`` by the values of the attributes ``names``, in order of appearance."""
    alike: dict[tuple[Any, ...], list[Any]] = {}
    for item in items:
        alike.setdefault(tuple(getattr(item, name) for name in names), []).append(item)
    return alike


def _time(steps: Iterable[Step]) -> float:
    return sum(step.microseconds for step in steps)


def _total(steps: tuple[Step, ...]) -> str:
    moved = format_bytes(sum(step.bytes_per_token for step in steps))
    noun = "step" if len(steps) == 1 else "steps"
    return f"{len(steps)} {noun}, {moved} a token, {format_time(_time(steps))}"
