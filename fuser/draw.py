"""A fusion plan as a picture: one layout, painted into SVG, PNG and HTML."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fuser import basic_ops
from fuser.errors import StateError
from fuser.plan import FusionPlan, Refusal, Step, _bytes, _span, renderers

# Light and dark value of each colour. Kinds of op are told apart by hues that
# stay apart with any colour blindness (blue, orange, teal, purple, grey).
COLORS = {
    "paper": ("#ffffff", "#15181c"),
    "ink": ("#1f242a", "#e8eaed"),
    "muted": ("#646c75", "#9ea7b1"),
    "faint": ("#c3c9cf", "#4a525b"),
    "window": ("#f3f5f7", "#22272d"),
    "window edge": ("#4d565f", "#8d97a2"),
    "refused": ("#9c3d12", "#f09a6c"),
    "channel": ("#35529c", "#93abef"),
    "GEMM": ("#c9dff3", "#1f4567"),
    "GEMM edge": ("#2a6ca8", "#6fb0e6"),
    "activation": ("#fbdcb8", "#5f3d14"),
    "activation edge": ("#b5670f", "#eaa652"),
    "norm": ("#c4e8de", "#124a3f"),
    "norm edge": ("#0f7d66", "#4cc3a8"),
    "pointwise": ("#e5d6ef", "#46305a"),
    "pointwise edge": ("#7a4a99", "#bf94dc"),
    "residual": ("#e4e4df", "#3a3a37"),
    "residual edge": ("#74746b", "#a6a69c"),
}
KINDS = {
    "GEMM": "GEMM",
    "activation": "activation",
    "norm": "norm",
    "pointwise": "pointwise, other",
    "residual": "residual, pass-through",
}
PASSING = {"AddExtraInput", "Identity", "MakeExtraOutput", "Quantize", "Reshape"}

# Lengths are points, y grows downwards.
MARGIN = 24.0
MAX_ROW = 1160.0  # a wider pipeline is wrapped into several rows
MIN_WIDTH = 560.0  # room for the totals of a pipeline of one op
PAD = 7.0  # from a fused window's outline to the ops in it
HEADER = 17.0  # height of a fused window's name
OP_HEIGHT = 32.0
END = 52.0  # "input", "grad output" and the like beside a row
STUB = 44.0  # the arrow between that and the row
LANE = 18.0  # height of one level of channels above a row
REASON_WIDTH = (170.0, 330.0)  # least and greatest width of a refusal's text
SMALL = 7.0  # font size of labels


def draw_svg(plan: FusionPlan, path: Path) -> None:
    """Write the picture as SVG, with text as text; equal plans give equal files."""
    with _matplotlib():
        path.write_text(_svg(lay_out(plan)), encoding="utf-8")


def draw_png(plan: FusionPlan, path: Path) -> None:
    """Write the picture as PNG, 160 dots an inch."""
    with _matplotlib():
        path.write_bytes(_paint(lay_out(plan), "png"))


def draw_html(plan: FusionPlan, path: Path) -> None:
    """Write one page that needs no other file: the picture, with hover texts, and the plan's text."""
    with _matplotlib():
        svg = _svg(lay_out(plan))
    svg = svg[svg.index("<svg") :]
    modes = ["", ""]
    for number, pair in enumerate(COLORS.values()):
        svg = svg.replace(pair[0], f"var(--c{number})")
        modes = [css + f"--c{number}:{value};" for css, value in zip(modes, pair, strict=True)]
    title = html.escape(f"Fusion plan of {_count(plan)}")
    light, dark = modes
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{color-scheme: light dark; {light}}}
@media (prefers-color-scheme: dark) {{:root {{{dark}}}}}
body {{margin: 1.5rem; background: var(--c0); color: var(--c1);}}
figure, pre {{margin: 0 0 1.5rem; overflow-x: auto;}}
pre {{font: 12px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;}}
</style>
</head>
<body>
<figure>
{svg}</figure>
<pre>{html.escape(str(plan))}</pre>
</body>
</html>
"""
    path.write_text(page, encoding="utf-8")


renderers.update({".svg": draw_svg, ".png": draw_png, ".html": draw_html})


# -- what a picture is made of ------------------------------------------------

Point = tuple[float, float]


@dataclass(frozen=True)
class Text:
    """One line of text on the baseline ``y``; ``align`` says what of it stands at ``x``."""

    x: float
    y: float
    string: str
    size: float = SMALL
    color: str = "ink"
    bold: bool = False
    mono: bool = False
    align: str = "center"

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom."""
        width = text_width(self.string, self.size, self.bold, self.mono)
        left = self.x - width * {"left": 0.0, "center": 0.5, "right": 1.0}[self.align]
        return left, self.y - 0.78 * self.size, left + width, self.y + 0.24 * self.size


@dataclass(frozen=True)
class Box:
    """A rounded box; ``tip`` is shown where the pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str
    radius: float = 4.0
    line_width: float = 0.9
    tip: str = ""

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom."""
        return self.x, self.y, self.x + self.width, self.y + self.height


@dataclass(frozen=True)
class Line:
    """A line through ``points`` with round corners, and a head at its end if it is an arrow."""

    points: tuple[tuple[float, float], ...]
    color: str = "ink"
    dashed: bool = False
    arrow: bool = False
    line_width: float = 0.9


@dataclass(frozen=True)
class Picture:
    """Items in the order in which they are painted."""

    width: float
    height: float
    items: tuple[Text | Box | Line, ...]


# -- layout -------------------------------------------------------------------


def lay_out(plan: FusionPlan) -> Picture:
    """Place everything that a picture of ``plan`` shows."""
    return _Layout(plan).picture()


@dataclass(frozen=True)
class _Wire:
    """A value beside the main line; an end that is None is the pipeline's caller."""

    name: str
    source: int | None
    target: int | None


@dataclass(frozen=True)
class _Route:
    """Where a wire runs above its row: its ends, the middle of its name, and its lane from 1."""

    wire: _Wire
    label: str
    start: float
    end: float
    middle: float
    lane: int


class _Layout:
    """Columns are ops, the same for forward and backward; rows come in pairs."""

    def __init__(self, plan: FusionPlan) -> None:
        self.plan = plan
        self.items: list[Text | Box | Line] = []
        self.sides = ["forward", "backward"] if plan.backward else ["forward"]
        self.step_of = {s: {i: step for step in plan.steps(s) for i in step.ops} for s in self.sides}
        self.gaps = [self._gap(i) for i in range(len(plan.ops))]
        self.widths = self._column_widths()
        self.x: dict[int, float] = {}
        self.left = self.right = MARGIN

    def picture(self) -> Picture:
        rows = self._rows()
        self.width = max(MIN_WIDTH, *(self._row_width(ops) for ops in rows))
        y = self._title(MARGIN) + 6
        for ops in rows:
            self._place(ops)
            for side in self.sides:
                y = self._row(side, ops, y + 12)
            y += 14
            if ops.stop < len(self.plan.ops):
                self._line((MARGIN, y), (MARGIN + self.width, y), color="faint", line_width=0.6)
                y += 2
        y = self._legend(y)
        right = max(item.bounds[2] for item in self.items if not isinstance(item, Line))
        return Picture(max(right, MARGIN + self.width) + MARGIN, y + MARGIN, tuple(self.items))

    def _text(self, x: float, y: float, string: str, **how: object) -> None:
        self.items.append(Text(x, y, _printable(string), **how))  # type: ignore[arg-type]

    def _line(self, *points: tuple[float, float], **how: object) -> None:
        self.items.append(Line(points, **how))  # type: ignore[arg-type]

    # columns and rows

    def _gap(self, op: int) -> float:
        """Room before ``op``: for an arrow and its bytes, unless both sides fuse across it."""
        if all(op - 1 in self.step_of[s].get(op, _NOTHING).ops for s in self.sides):
            return 16.0
        return text_width(_bytes(self.plan.line_bytes[op]), SMALL) + 2 * PAD + 16

    def _column_widths(self) -> list[float]:
        """Each op's width: its name, and what its steps need above and beneath them."""
        widths = [max(text_width(name, 8.5) + 18, 54.0) for name in self.plan.ops]
        steps = [step for side in self.sides for step in self.plan.steps(side)]
        for step in sorted(steps, key=lambda step: len(step.ops)):
            lines = [(step.fusion or "", 8.0, True, False), (_cost(step), SMALL, False, False)]
            lines += [(kernel, SMALL, False, True) for kernel in step.kernel.split(", ")]
            need = max(text_width(*line) for line in lines)
            have = sum(widths[i] for i in step.ops) + sum(self.gaps[i] for i in step.ops[1:])
            for i in step.ops:
                widths[i] += max(need - have, 0.0) / len(step.ops)
        return widths

    def _row_width(self, ops: range) -> float:
        inner = sum(self.widths[i] for i in ops) + sum(self.gaps[i] for i in ops[1:])
        return inner + 2 * (END + STUB)

    def _rows(self) -> list[range]:
        """Where to wrap: rows of about equal width that cut few windows."""
        plan, count = self.plan, len(self.plan.ops)
        cuts = [0.0] * (count + 1)
        fused = [step for side in self.sides for step in plan.steps(side)]
        for windows, price in ((fused, 4.0), (plan.refusals, 0.5)):
            for window in windows:
                for gap in window.ops[1:]:  # type: ignore[attr-defined]
                    cuts[gap] += price
        best: list[tuple[float, int]] = [(0.0, 0)]
        for stop in range(1, count + 1):
            choices = []
            for start in range(stop):
                used = self._row_width(range(start, stop)) / MAX_ROW
                if used <= 1 or stop - start == 1:
                    loose = 0.0 if start == 0 and stop == count else (1 - used) ** 2
                    choices.append((best[start][0] + 1 + 4 * loose + cuts[start], start))
            best.append(min(choices))
        rows, stop = [], count
        while stop:
            rows.append(range(best[stop][1], stop))
            stop = best[stop][1]
        return rows[::-1]

    def _place(self, ops: range) -> None:
        x = MARGIN + END + STUB
        self.x = {}
        for i in ops:
            x += self.gaps[i] if i > ops.start else 0.0
            self.x[i] = x
            x += self.widths[i]
        self.left, self.right = MARGIN + END, x + STUB

    def _edges(self, side: str, ops: Sequence[int]) -> tuple[float, float]:
        """Left and right of the box around ``ops``; a fused window is wider than its ops."""
        first, last = ops[0], ops[-1]
        pads = [PAD if self.step_of[side].get(i, _NOTHING).fusion else 0.0 for i in (first, last)]
        return self.x[first] - pads[0], self.x[last] + self.widths[last] + pads[1]

    # title, totals, legend

    def _title(self, y: float) -> float:
        plan = self.plan
        y += 12
        self._text(MARGIN, y, f"Fusion plan of {_count(plan)}", size=15.0, bold=True, align="left")
        for line in _wrap(plan.key.describe(), self.width, 9.0):
            y += 15
            self._text(MARGIN, y, line, size=9.0, color="muted", align="left")
        y += 8
        longest = max(_total(plan.steps(s, fused=False))[1] for s in self.sides)
        for side in ("forward", "backward"):
            y += 16
            self._text(MARGIN, y, side, size=8.5, bold=True, align="left")
            if side not in self.sides:
                text = "nothing needs a gradient"
                self._text(MARGIN + 62, y, text, size=8.5, color="muted", align="left")
                continue
            fused, plain = (_total(plan.steps(side, fused=f)) for f in (True, False))
            for (_, time), fill in ((plain, "faint"), (fused, "GEMM edge")):
                length = max(110 * time / longest, 1.0) if longest else 1.0
                self.items.append(Box(MARGIN + 62, y - 7, length, 8, fill, fill, 1.0, 0.0))
            ratio = plain[1] / fused[1] if fused[1] else 1.0
            text = (
                f"{_steps(len(plan.steps(side)))}, {_bytes(fused[0])}/token, {fused[1]:.1f} us;  "
                f"unfused {_steps(len(plan.steps(side, fused=False)))}, {_bytes(plain[0])}/token, "
                f"{plain[1]:.1f} us;  "
            )
            x = MARGIN + 182
            self._text(x, y, text, size=8.5, align="left")
            x += text_width(text, 8.5)
            self._text(x, y, f"{ratio:.2f}x", size=8.5, bold=True, align="left")
        return y

    def _legend(self, y: float) -> float:
        y += 18
        x = MARGIN
        kinds = {_kind(name) for name in self.plan.ops}
        entries = [(text, kind, f"{kind} edge") for kind, text in KINDS.items() if kind in kinds]
        entries += [("no kernel", "paper", "faint"), ("fused window", "window", "window edge")]
        lines = [("channel", "channel")] if self.plan.channels else []
        lines += [("not used, and why", "refused")] if self.plan.refusals else []
        for text, *colors in (*entries, *lines):
            width = 22 + text_width(text, 8.0) + 18
            if x > MARGIN and x + width > MARGIN + self.width:
                x, y = MARGIN, y + 16
            if len(colors) == 2:
                self.items.append(Box(x, y - 8, 16, 10, *colors, radius=2.5))
            else:
                self._line((x, y - 3), (x + 16, y - 3), color=colors[0], dashed=True)
            self._text(x + 22, y, text, size=8.0, color="muted", align="left")
            x += width
        note = (
            "On the arrows: bytes a token that the main line carries. Beneath a step: its kernels, "
            "the bytes a token that they move through memory, and their modelled time for "
            f"{self.plan.nominal_tokens} tokens."
        )
        y += 3
        for line in _wrap(note, self.width, 8.0):
            y += 13
            self._text(MARGIN, y, line, size=8.0, color="muted", align="left")
        return y

    # one side of one row

    def _row(self, side: str, ops: range, y: float) -> float:
        """Draw ``ops`` of one side from ``y`` downwards; returns where that ends."""
        forward = side == "forward"
        arrow = "\N{RIGHTWARDS ARROW}" if forward else "\N{LEFTWARDS ARROW}"
        title = f"{side} {arrow}"
        self._text(MARGIN, y + 9, title, size=9.5, bold=True, align="left")
        steps = [s for s in self.plan.steps(side) if any(i in ops for i in s.ops)]
        routes = self._routes(self._wires(side, ops), ops)
        lanes = y + 8 + LANE * max((route.lane for route in routes), default=0)
        y = lanes + 8 + (HEADER if any(step.fusion for step in steps) else 4)
        for route in routes:
            self._draw_route(side, route, ops, y, lanes)
        bottom = y + OP_HEIGHT + PAD
        for step in steps:
            bottom = max(bottom, self._step(side, step, [i for i in step.ops if i in ops], y))
        for i in ops:
            if i not in self.step_of[side]:
                self._op(i, "no gradient", y, "")
        self._main_line(forward, side, ops, y + OP_HEIGHT / 2)
        return self._refusals(side, ops, bottom + 6)

    def _step(self, side: str, step: Step, ops: list[int], y: float) -> float:
        left, right = self._edges(side, ops)
        kernels = step.kernel or "no kernel"
        name = step.fusion or self.plan.ops[step.ops[0]]
        tip = f"{side} {_span(step.ops)}: {name}\nkernels: {kernels}\n{_cost(step)}"
        if step.fusion:
            box = (left, y - HEADER, right - left, HEADER + OP_HEIGHT + PAD)
            self.items.append(Box(*box, "window", "window edge", 7.0, 1.2, tip))
            title = step.fusion if ops[0] == step.ops[0] else f"{step.fusion} (continued)"
            self._text((left + right) / 2, y - 5.5, title, size=8.0, bold=True)
        for i in ops:
            self._op(i, self.plan.ops[i], y, tip, bool(step.kernel))
        y += OP_HEIGHT + (PAD if step.fusion else 0) + 3
        if ops[0] != step.ops[0]:
            return y
        middle = (left + right) / 2
        for line in _fill(kernels.split(", "), right - left + 2):
            y += 9.5
            self._text(middle, y, line, mono=True, color="ink" if step.kernel else "muted")
        if step.kernel:
            y += 9.5
            self._text(middle, y, _cost(step), color="muted")
        return y + 3

    def _op(self, op: int, name: str, y: float, tip: str, has_kernel: bool = False) -> None:
        kind = _kind(self.plan.ops[op])
        fill, edge = (kind, f"{kind} edge") if has_kernel else ("paper", "faint")
        x, width = self.x[op], self.widths[op]
        self.items.append(Box(x, y, width, OP_HEIGHT, fill, edge, tip=tip))
        ink = "ink" if has_kernel else "muted"
        self._text(x + 5, y + 8.5, str(op), size=6.0, color="muted", align="left")
        self._text(x + width / 2, y + 21, name, size=8.5 if tip else SMALL, color=ink)

    def _main_line(self, forward: bool, side: str, ops: range, y: float) -> None:
        """Arrows along the row, with the bytes where one step hands over to another."""
        step_of, key, count = self.step_of[side], self.plan.key, len(self.plan.ops)
        grad = "" if forward else "grad "
        for i in range(ops.start, ops.stop + 1):
            near = [j for j in (i - 1, i) if 0 <= j < count]
            if any(j not in step_of for j in near):
                continue
            if not forward and i == 0 and not key.ops[0].input_requires_grad:
                continue
            left = self._edges(side, [i - 1])[1] if i > ops.start else self.left
            right = self._edges(side, [i])[0] if i < ops.stop else self.right
            fused = len(near) == 2 and step_of[i - 1] is step_of[i]
            if fused and ops.start < i < ops.stop:
                left, right = self.x[i - 1] + self.widths[i - 1], self.x[i]
            ends = ((left + 1, y), (right - 1, y))
            color = "muted" if fused else "ink"
            self._line(*(ends if forward else ends[::-1]), arrow=True, color=color)
            if not fused:
                self._text((left + right) / 2, y - 4, _bytes(self.plan.line_bytes[i]))
            if i == ops.start:
                name = f"{grad}input" if i == 0 else f"op {i - 1}"
                self._text(self.left - 4, y + 2.5, name, color="muted", align="right")
            if i == ops.stop:
                name = f"{grad}output" if i == count else f"op {i}"
                self._text(self.right + 4, y + 2.5, name, color="muted", align="left")

    # channels, extra inputs and outputs

    def _wires(self, side: str, ops: range) -> list[_Wire]:
        """What enters and leaves ``ops`` beside the main line."""
        plan, known = self.plan, self.step_of[side]
        wires = [_Wire(c.name, c.producer, c.consumer) for c in plan.channels]
        for i, key in enumerate(plan.key.ops):
            wanted = sum(side == "forward" or extra.requires_grad for extra in key.extra_inputs)
            routed = sum(c.consumer == i and c.producer in known for c in plan.channels)
            wires += [_Wire("extra input", None, i)] * (wanted - routed)
            made = getattr(getattr(basic_ops, plan.ops[i], None), "num_extra_outputs", 0)
            if made and all(c.producer != i for c in plan.channels):
                wires.append(_Wire("extra output", i, None))
        if side == "backward":
            wires = [_Wire(f"grad {wire.name}", wire.target, wire.source) for wire in wires]
        ends = [{wire.source, wire.target} - {None} for wire in wires]
        return [w for w, e in zip(wires, ends, strict=True) if e & set(ops) and e <= known.keys()]

    def _routes(self, wires: list[_Wire], ops: range) -> list[_Route]:
        """Give each wire its place: short ones lowest, and no two over each other in a lane."""
        ports: dict[int, list[tuple[int, bool]]] = {}
        for number, wire in enumerate(wires):
            for end, is_source in ((wire.target, False), (wire.source, True)):
                if end in ops:
                    ports.setdefault(end, []).append((number, is_source))

        def place(number: int, op: int | None, is_source: bool) -> float | None:
            if op is None:
                return None
            if op not in ops:
                return MARGIN if op < ops.start else self.right + END
            slot = ports[op].index((number, is_source)) - (len(ports[op]) - 1) / 2
            return self.x[op] + self.widths[op] / 2 + 14 * slot

        spans = []
        for number, wire in enumerate(wires):
            ends = (place(number, wire.source, True), place(number, wire.target, False))
            start, end = (x if x is not None else other for x, other in (ends, ends[::-1]))
            label = wire.name
            if wire.source is not None and wire.source not in ops:
                label += f" from op {wire.source}"
            if wire.target is not None and wire.target not in ops:
                label += f" to op {wire.target}"
            half = text_width(label, SMALL) / 2 + 3
            middle = max((start + end) / 2, MARGIN + half)
            low, high = min(start, end, middle - half), max(start, end, middle + half)
            spans.append((high - low, low, high, wire, label, start, end, middle))
        taken: list[tuple[int, float, float]] = []
        routes = []
        for _, low, high, wire, label, start, end, middle in sorted(spans, key=lambda s: s[0]):
            full = {lane for lane, left, right in taken if left < high and low < right}
            lane = next(n for n in range(1, len(taken) + 2) if n not in full)
            taken.append((lane, low, high))
            routes.append(_Route(wire, label, start, end, middle, lane))
        return routes

    def _draw_route(self, side: str, route: _Route, ops: range, y: float, lanes: float) -> None:
        """Up from the source, along the lane, down to the target; what is elsewhere is left out."""
        wire, lane = route.wire, lanes - LANE * (route.lane - 1)

        def top(op: int) -> float:
            return y - HEADER if self.step_of[side][op].fusion else y

        points = [(route.start, lane), (route.end, lane)]
        if wire.source in ops:
            points.insert(0, (route.start, top(wire.source)))
        if wire.target in ops:
            points.append((route.end, top(wire.target)))
        if route.start == route.end:
            points = [points[0], points[-1]]
        self._line(*points, color="channel", dashed=None not in (wire.source, wire.target), arrow=True)
        self._text(route.middle, lane - 3, route.label, color="channel")

    # windows that are not used

    def _refusals(self, side: str, ops: range, y: float) -> float:
        """Dashed brackets under the ops, each as high as what stands above it allows."""
        refusals = [
            (refusal, [i for i in refusal.ops if i in ops])
            for refusal in self.plan.refusals
            if ("forward" if refusal.side == "forward" or len(self.sides) == 1 else "backward") == side
        ]
        placed: list[tuple[float, float, float]] = []
        for refusal, here in sorted(refusals, key=lambda pair: (len(pair[1]), pair[1])):
            if here:
                placed.append(self._refusal(refusal, here, y, placed))
        return max((bottom for _, _, bottom in placed), default=y) + 4

    def _refusal(
        self, refusal: Refusal, ops: list[int], y: float, placed: list[tuple[float, float, float]]
    ) -> tuple[float, float, float]:
        left, right = self.x[ops[0]], self.x[ops[-1]] + self.widths[ops[-1]]
        name = f"{refusal.fusion} over {_span(refusal.ops)}"
        if ops[0] != refusal.ops[0]:
            name += " (continued)"
        width = min(max(right - left, REASON_WIDTH[0]), REASON_WIDTH[1])
        lines = _wrap(refusal.reason, width, SMALL) if ops[0] == refusal.ops[0] else []
        widest = max(text_width(name, SMALL, True), *(text_width(line, SMALL) for line in lines), 0)
        start = max(min(left, MARGIN + self.width - widest), MARGIN)
        low, high = min(left, start), max(right, start + widest)
        y = max([y, *(b + 6 for l, r, b in placed if l < high + 8 and low < r + 8)])
        ends = ((left, y), (left, y + 6), (right, y + 6), (right, y))
        self._line(*ends, color="refused", dashed=True)
        y += 15
        self._text(start, y, name, color="refused", bold=True, align="left")
        for line in lines:
            y += 9
            self._text(start, y, line, align="left")
        return low, high, y + 3


_NOTHING = Step((), None, "", 0.0, 0.0)


def _kind(op: str) -> str:
    """The kind of an op by its class name, which is what a plan knows of it."""
    if op in PASSING:
        return "residual"
    if "Linear" in op:
        return "GEMM"
    if "Norm" in op:
        return "norm"
    return "activation" if op.endswith("LU") else "pointwise"


def _count(plan: FusionPlan) -> str:
    return f"{len(plan.ops)} op{'s' * (len(plan.ops) != 1)}"


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _total(steps: Sequence[Step]) -> tuple[float, float]:
    return sum(s.bytes_per_token for s in steps), sum(s.microseconds for s in steps)


def _cost(step: Step) -> str:
    return f"{_bytes(step.bytes_per_token)}, {step.microseconds:.1f} us" if step.kernel else ""


def _printable(text: str) -> str:
    """``text`` without control characters, which XML does not hold."""
    return "".join(c if c.isprintable() else " " for c in text)


# -- text ---------------------------------------------------------------------


@lru_cache(maxsize=4096)
def text_width(string: str, size: float, bold: bool = False, mono: bool = False) -> float:
    """Width of one line in points, in the font that the painter uses."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(
        family="monospace" if mono else "sans-serif", weight="bold" if bold else "normal", size=size
    )
    width, _, _ = text_to_path.get_text_width_height_descent(string, font, False)
    return float(width)


def _wrap(text: str, width: float, size: float, mono: bool = False) -> list[str]:
    """``text`` in lines of at most ``width``; a word that is wider is broken."""
    lines = [""]
    for word in _printable(text).split():
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if text_width(longer, size, False, mono) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if text_width(lines[-1] + letter, size, False, mono) > width and lines[-1]:
                lines.append("")
            lines[-1] += letter
    return lines


def _fill(kernels: Sequence[str], width: float) -> list[str]:
    """Kernel names in lines of at most ``width``; a name is never broken."""
    lines = [kernels[0]]
    for kernel in kernels[1:]:
        longer = f"{lines[-1]}, {kernel}"
        if text_width(longer, SMALL, mono=True) <= width:
            lines[-1] = longer
        else:
            lines[-1] += ","
            lines.append(kernel)
    return lines


# -- painting -----------------------------------------------------------------


@contextmanager
def _matplotlib() -> Iterator[None]:
    """matplotlib with its own defaults, whatever the user has set; text stays text in SVG.

    Raises
    ------
    StateError
        If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise StateError(
            "Drawing a plan needs matplotlib, which cannot be imported here: "
            'run pip install "fuser[draw]".'
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fuser"})
        yield


def _svg(plan_picture: Picture) -> str:
    """The picture as SVG, in which boxes carry their tips as titles."""
    svg = _paint(plan_picture, "svg").decode()
    tips = [item.tip for item in plan_picture.items if isinstance(item, Box) and item.tip]
    for number, tip in enumerate(tips):
        group = f'<g id="tip{number}">'
        title = "".join(c if c == "\n" or c.isprintable() else " " for c in tip)
        svg = svg.replace(group, f"{group}\n<title>{html.escape(title)}</title>", 1)
    # Text must not hide the box behind it from the pointer.
    return svg.replace("</style>", "text{pointer-events:none}</style>", 1)


def _paint(picture: Picture, file_format: str) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon

    color = {name: light for name, (light, _) in COLORS.items()}
    size = (picture.width / 72, picture.height / 72)
    figure = Figure(figsize=size, dpi=72, facecolor=color["paper"])
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.set_axis_off()
    tips = 0
    for order, item in enumerate(picture.items, start=1):
        if isinstance(item, Text):
            axes.text(
                item.x,
                item.y,
                item.string,
                fontsize=item.size,
                color=color[item.color],
                weight="bold" if item.bold else "normal",
                family="monospace" if item.mono else "sans-serif",
                horizontalalignment=item.align,
                verticalalignment="baseline",
                parse_math=False,
                zorder=order,
            )
        elif isinstance(item, Box):
            box = FancyBboxPatch(
                (item.x, item.y),
                item.width,
                item.height,
                boxstyle=f"round,pad=0,rounding_size={item.radius}",
                facecolor=color[item.fill],
                edgecolor=color[item.edge],
                linewidth=item.line_width,
                zorder=order,
            )
            if item.tip:
                box.set_gid(f"tip{tips}")
                tips += 1
            axes.add_patch(box)
        else:
            ink = color[item.color]
            style = (0, (3, 2)) if item.dashed else "solid"
            axes.add_patch(
                PathPatch(
                    _rounded(item.points), facecolor="none", edgecolor=ink, zorder=order,
                    linewidth=item.line_width, linestyle=style,
                )
            )
            if item.arrow:
                head = _head(item.points)
                axes.add_patch(Polygon(head, facecolor=ink, edgecolor="none", zorder=order))
    target = io.BytesIO()
    # Without these a file would hold the time and links to metadata schemes.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if file_format == "svg" else {}
    figure.savefig(target, format=file_format, dpi=160, metadata=metadata)
    return target.getvalue()


def _rounded(points: Sequence[tuple[float, float]], radius: float = 6.0) -> Any:
    """The path through ``points`` with its inner corners rounded off."""
    from matplotlib.path import Path as Curve

    vertices, codes = [points[0]], [Curve.MOVETO]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        vertices += [_toward(corner, before, radius), corner, _toward(corner, after, radius)]
        codes += [Curve.LINETO, Curve.CURVE3, Curve.CURVE3]
    return Curve([*vertices, points[-1]], [*codes, Curve.LINETO])


def _toward(point: Point, other: Point, distance: float) -> Point:
    """The point ``distance`` from ``point`` on the way to ``other``, at most half way."""
    length = math.dist(point, other)
    part = min(distance / length, 0.5) if length else 0.0
    return tuple(a + (b - a) * part for a, b in zip(point, other, strict=True))


def _head(points: Sequence[Point], length: float = 5.0, half: float = 2.2) -> list[Point]:
    """The triangle at the end of an arrow."""
    tip, (x, y) = points[-1], _toward(points[-1], points[-2], length)
    across = ((tip[1] - y) / length * half, (x - tip[0]) / length * half)
    return [tip, (x + across[0], y + across[1]), (x - across[0], y - across[1])]
