"""Layout of a plan's picture: all boxes, lines and texts, with their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fuser.report.columns import (
    AS_MODULE,
    END,
    MARGIN,
    MODULE_ARROW,
    PAD,
    Columns,
    Item,
    columns_of,
    cost,
    kernels_of,
    module_width,
    products,
)
from fuser.report.picture import (
    COLORS,
    SMALL,
    Drawing,
    Picture,
    matplotlib_or_error,
    printable,
    text_width,
    wrap,
)
from fuser.report.text import format_bytes, format_time, span

COMPILED = "torch.compile"
"""The baseline of the bars."""

PASSING = {"AddExtraInput", "Identity", "MakeExtraOutput", "Quantize", "Reshape"}

HEADER = 17.0  # height of a fused window's name
OP_HEIGHT = 32.0
LANE = 18.0  # one level of channels above a row
REASON_WIDTHS = (170.0, 330.0)  # least and greatest width of a refusal's text


@matplotlib_or_error()
def lay_out(plan: Item) -> Picture:
    """The picture of a plan, given as ``FusionPlan.to_dict`` returns it, with all places."""
    return _PictureLayout(plan).picture()


@dataclass(frozen=True)
class _Wire:
    """The line of an extra tensor or channel; an end that is None is the caller.

    It runs above its row from ``start`` to ``end``, with its name at
    ``middle``. Lane 0 is the lowest.
    """

    name: str
    source: int | None
    target: int | None
    start: float = 0.0
    end: float = 0.0
    middle: float = 0.0
    lane: int = 0

    @property
    def is_channel(self) -> bool:
        """Whether both ends are ops."""
        return self.source is not None and self.target is not None


class _PictureLayout(Columns, Drawing):
    """The items of the picture; each row is drawn for forward, and below it for backward."""

    def __init__(self, plan: Item) -> None:
        Columns.__init__(self, plan)
        Drawing.__init__(self)

    def picture(self) -> Picture:
        y = self._title(MARGIN) + 6
        for ops in self.rows:
            if ops.start:
                y += 14
                self._line((MARGIN, y), (MARGIN + self.width, y), color="faint")
            for side in self.sides:
                y = self._row(side, ops, y + 13)
        heading, *kept = self.plan["sentences"]["kept"] or [""]
        for title, lines in ((heading, kept), ("notes", self.plan["sentences"]["notes"])):
            y = self._section(y + 22, title, lines) if lines else y
        y = self._legend(y + 28)
        right = max(self._right(), MARGIN + self.width)
        return Picture(right + MARGIN, y + MARGIN, tuple(self.items))

    # title, totals, legend

    def _title(self, y: float) -> float:
        y += 12
        title = f"Fusion plan of {count_of(len(self.ops), 'op')}"
        self._text(MARGIN, y, title, size=15.0, bold=True)
        y = self._note(y + 2, self.plan["key"], 9.0)
        y = self._note(y, f"modelled on {self.plan['device']}", 9.0)
        for sentence in self.plan["sentences"]["nodes"]:
            y = self._note(y, sentence, 9.0)
        y += 8
        compiled = {one["name"]: one for one in self.plan["baselines"]}.get(COMPILED)
        longest = max(
            max(_totals(self.plan[side])[1], compiled[side] if compiled else 0.0)
            for side in self.sides
        )
        for side in ("forward", "backward"):
            y += 16
            self._text(MARGIN, y, side, size=8.5, bold=True)
            if side not in self.sides:
                self._text(MARGIN + 62, y, "nothing needs a gradient", size=8.5, color="muted")
                continue
            steps = self.plan[side]
            moved, time = _totals(steps)
            bars = [(compiled[side], "faint")] if compiled else []
            for length, color in (*bars, (time, "GEMM edge")):
                width = max(110 * length / longest, 1.0) if longest else 1.0
                self._box(MARGIN + 62, y - 7, width, 8, color, color, 1.0)
            text = f"{count_of(len(steps), 'step')}, {format_bytes(moved)}/token, "
            text += format_time(time)
            text += f";  {COMPILED} {format_time(compiled[side])};  " if compiled else ""
            end = self._text(MARGIN + 182, y, text, size=8.5).bounds[2]
            if compiled:
                ratio = compiled[side] / time if time else 1.0
                gains = ratio > 1.005
                color = "ink" if gains else "muted"
                self._text(end, y, f"{ratio:.2f}x", size=8.5, bold=gains, color=color)
        for sentence in self.plan["sentences"]["baselines"]:
            y += 14
            self._text(MARGIN + 62, y, sentence, size=8.5, color="muted")
        return y

    def _note(self, y: float, text: str, size: float) -> float:
        for line in wrap(text.split(), self.width, size):
            y += 1.5 * size
            self._text(MARGIN, y, line, size=size, color="muted")
        return y

    def _section(self, y: float, heading: str, lines: Sequence[str]) -> float:
        self._text(MARGIN, y, heading, size=9.5, bold=True)
        y += 2
        for line in lines:
            for number, part in enumerate(wrap(line.split(), self.width - 12, 8.0)):
                y += 12 if number else 14
                self._text(MARGIN + 12 * bool(number), y, part, size=8.0)
        return y

    def _legend(self, y: float) -> float:
        plan = self.plan
        has_light = not all(step["kernel"] for step in self.steps)
        kinds = {kind_of(op) for op in self.ops}
        entries = [(kind, kind, f"{kind} edge") for kind in COLORS if kind in kinds]
        entries += [("no kernel", "paper", "faint")] * has_light
        has_modules = any(not call["ops"] for call in plan["modules"])
        entries += [("other module, not modelled", "paper", "muted")] * has_modules
        entries += [("fused window", "window", "window edge")] * any(
            step["fusion"] for step in self.steps
        )
        entries += [("channel", "channel", "")] * bool(plan["channels"])
        entries += [("not used, and why", "refused", "")] * bool(plan["refusals"])
        x = MARGIN
        for name, color, edge in entries:
            right = x + 22 + text_width(name, 8.0)
            if right > MARGIN + self.width:
                x, y, right = MARGIN, y + 16, right - x + MARGIN
            if edge:
                self._box(x, y - 8, 16, 10, color, edge, 2.5)
            else:
                self._line((x, y - 3), (x + 16, y - 3), color=color, dashed=True)
            self._text(x + 22, y, name, size=8.0, color="muted")
            x = right + 18
        note = (
            "On the arrows: bytes a token that the main line carries. Beneath a step: its kernels, "
            "the bytes a token that they move through memory and their modelled time for "
            f"{plan['nominal_tokens']} tokens; of matrix products also the operations a token. In "
            "an op: the columns of its input and output."
        )
        if plan["baselines"]:
            note += f" The bars at the top: modelled time; in grey what more {COMPILED} takes."
        return self._note(y + 3, note, 8.0)

    # one side of one row

    def _row(self, side: str, ops: range, y: float) -> float:
        """Draw ``ops`` of one side from ``y`` downwards; returns the lower end."""
        arrow = "\N{RIGHTWARDS ARROW}" if side == "forward" else "\N{LEFTWARDS ARROW}"
        title = f"{side} {arrow}" + (f"  ops {span(tuple(ops))}" if len(self.rows) > 1 else "")
        self._text(MARGIN, y + 9, title, size=9.5, bold=True)
        steps = [step for step in self.plan[side] if set(step["ops"]) & set(ops)]
        wires = self._routed(self._wires(side, ops), ops)
        lowest = y + 8 + LANE * max((wire.lane + 1 for wire in wires), default=0)
        y = lowest + 8 + (HEADER if any(step["fusion"] for step in steps) else 4)
        for wire in reversed(wires):  # long ones first: their ends are under short ones' names
            self._draw_wire(side, wire, ops, y, lowest - LANE * wire.lane)
        bottom = y + OP_HEIGHT + PAD
        for step in steps:
            here = [i for i in step["ops"] if i in ops]
            bottom = max(bottom, self._draw_step(side, step, here, y))
        for i in ops:
            if i not in self.step_of[side]:
                self._draw_op(i, "no gradient", y, "", False)
        self._main_line(side, ops, y + OP_HEIGHT / 2)
        return self._refusals(side, ops, bottom + 9)

    def _draw_step(self, side: str, step: Item, ops: list[int], y: float) -> float:
        left, right = self.edges(side, ops[0], ops[-1])
        middle = (left + right) / 2
        is_first = ops[0] == step["ops"][0]  # the text of a split window is in its first row
        name = step["fusion"] or self.ops[step["ops"][0]]
        tip = f"{side} {span(step['ops'])}: {name}\n{' '.join(kernels_of(step))}\n{cost(step)}"
        bottom = y + OP_HEIGHT
        if step["fusion"]:
            height = HEADER + OP_HEIGHT + PAD
            self._box(left, y - HEADER, right - left, height, "window", "window edge", 7.0, tip)
            title = name if is_first else f"{name} (continued)"
            self._text(middle, y - 5.5, title, size=8.0, bold=True, align="center", tip=tip)
            bottom += PAD
        for i in ops:
            self._draw_op(i, self.ops[i], y, tip, bool(step["kernel"]))
        bottom += 3
        if not is_first:
            return bottom
        color = "ink" if step["kernel"] else "muted"
        for line in wrap(kernels_of(step), right - left, SMALL, mono=True):
            bottom += 9.5
            self._text(middle, bottom, line, mono=True, color=color, align="center")
        below = [cost(step), *products(step)] if step["kernel"] else []
        if side == "forward" and self.is_module(step):
            below.append(AS_MODULE)
        for line in below:
            bottom += 9.5
            self._text(middle, bottom, line, color="muted", align="center")
        return bottom

    def _draw_op(self, op: int, name: str, y: float, tip: str, has_kernel: bool) -> None:
        x, width, kind = self.x[op], self.widths[op], kind_of(self.ops[op])
        fill, edge = (kind, f"{kind} edge") if has_kernel else ("paper", "faint")
        ink = "ink" if has_kernel else "muted"
        self._box(x, y, width, OP_HEIGHT, fill, edge, 4.0, tip)
        self._text(x + 5, y + 8.5, str(op), size=6.0, color="muted")
        whole = next(iter(self.plan["wholes"][op : op + 1]), "")
        if whole:
            self._text(x + width - 5, y + 8.5, whole, size=6.5, color="muted", align="right")
        self._text(x + width / 2, y + 19, name, size=8.5, color=ink, align="center", tip=tip)
        shape = columns_of(self.plan, op)
        self._text(x + width / 2, y + 28.5, shape, size=6.5, color="muted", align="center")

    def _main_line(self, side: str, ops: range, y: float) -> None:
        """Draw the arrows along the row, with bytes between two steps."""
        count, grad = len(self.ops), "" if side == "forward" else "grad "
        start, stop = MARGIN + END, self.row_right(ops)
        for i in range(ops.start, ops.stop + 1):
            near = {i - 1, i} & set(range(count))
            ends_here = bool(grad) and i == 0 and not self.plan["input_requires_grad"]
            if ends_here or not near <= self.step_of[side].keys():
                continue
            left = self.edges(side, i - 1, i - 1)[1] if i > ops.start else start
            right = self.edges(side, i, i)[0] if i < ops.stop else stop
            is_inside = i - 1 in self.step(side, i)["ops"]
            if is_inside and ops.start < i < ops.stop:
                left, right = left - PAD, right + PAD
            color = "muted" if is_inside else "ink"
            left, right = self._draw_modules(i, ops, left, right, y, bool(grad))
            self._arrow(left, right, y, bool(grad), color)
            if not is_inside:
                for offset, label in zip((-4, 10), self.gap_labels(side, i), strict=False):
                    self._text((left + right) / 2, y + offset, label, align="center")
            if i == ops.start:
                name = f"{grad}input" if i == 0 else f"op {i - 1}"
                self._text(start - 4, y + 2.5, name, color="muted", align="right")
            if i == ops.stop:
                name = f"{grad}output" if i == count else f"op {i}"
                self._text(stop + 4, y + 2.5, name, color="muted")

    def _arrow(self, left: float, right: float, y: float, is_back: bool, color: str) -> None:
        points = ((left + 1, y), (right - 1, y))
        self._line(*(points[::-1] if is_back else points), color=color, arrow=True)

    def _draw_modules(
        self, gap: int, ops: range, left: float, right: float, y: float, is_back: bool
    ) -> tuple[float, float]:
        """Draw the modules before op ``gap``; returns the space left for an arrow with bytes.

        The arrow shows the input of the op, so it comes after the modules; at the end of the
        pipeline it shows the output, and comes before them.
        """
        is_end = gap == len(self.ops)
        calls = self.modules_before(gap) if is_end or gap < ops.stop else []
        x = end = right - self.modules_width(gap) if is_end else left
        for call in calls:
            width = module_width(call)
            arrow = x + width if is_end else x
            self._arrow(arrow, arrow + MODULE_ARROW, y, is_back, "ink")
            box, tip = x + (0 if is_end else MODULE_ARROW), f"{call['name']}: {call['reason']}"
            self._box(box, y - OP_HEIGHT / 2, width, OP_HEIGHT, "paper", "muted", 4.0, tip)
            style = {"size": 8.5, "color": "muted", "align": "center", "tip": tip}
            self._text(box + width / 2, y + 3, call["name"], **style)
            x += width + MODULE_ARROW
        return (left, end) if is_end else (x, right)

    # channels, extra inputs and outputs

    def _wires(self, side: str, ops: range) -> list[_Wire]:
        """The extra inputs, extra outputs and channels of ``ops``."""
        known, plan = self.step_of[side].keys(), self.plan
        channels = [c for c in plan["channels"] if side == "forward" or c["has_gradient"]]
        wires = [_Wire(c["name"], c["producer"], c["consumer"]) for c in channels]
        extras = zip(plan["extra_inputs"], plan["extra_outputs"], strict=True)
        for i, (needing_gradients, outputs) in enumerate(extras):
            inputs = sum(side == "forward" or needs for needs in needing_gradients)
            inputs -= sum(c["consumer"] == i and c["producer"] in known for c in channels)
            if inputs > 0:
                wires.append(_Wire(_several(inputs, "extra input"), None, i))
            if outputs and all(c["producer"] != i for c in plan["channels"]):
                wires.append(_Wire(_several(outputs, "extra output"), i, None))
        if side == "backward":
            wires = [_Wire(f"grad of {w.name}", w.target, w.source) for w in wires]
        ends = [{wire.source, wire.target} - {None} for wire in wires]
        return [w for w, e in zip(wires, ends, strict=True) if e & set(ops) and e <= known]

    def _routed(self, wires: list[_Wire], ops: range) -> list[_Wire]:
        """Give each wire its place: short wires lowest, and no overlap in a lane."""
        targets = {wire.target for wire in wires}
        leaving = {wire.source for wire in wires if wire.is_channel}
        crowd = Counter(end for wire in wires for end in (wire.source, wire.target))
        placed = []
        for wire in wires:
            ends, name = [], wire.name
            for op, word in ((wire.source, "from"), (wire.target, "to")):
                if op is not None and op in ops:
                    if word == "from":
                        beside = (op in targets) + (not wire.is_channel and op in leaving)
                    else:
                        beside = -(not wire.is_channel and crowd[op] > 1)
                    ends.append(self.x[op] + self.widths[op] / 2 + 14 * beside)
                elif op is not None:
                    ends.append(MARGIN if op < ops.start else self.row_right(ops) + END)
                    name += f" {word} op {op}"
            half = text_width(printable(name), SMALL) / 2
            middle = max(sum(ends) / len(ends), MARGIN + half)
            low, high = min(*ends, middle - half - 4), max(*ends, middle + half + 4)
            wire = _Wire(name, wire.source, wire.target, ends[0], ends[-1], middle)
            placed.append((low, high, wire))
        taken: list[tuple[float, float, int]] = []
        routed = []
        for low, high, wire in sorted(placed, key=lambda item: item[1] - item[0]):
            full = {lane for left, right, lane in taken if left < high and low < right}
            taken.append((low, high, min(set(range(len(taken) + 1)) - full)))
            routed.append(replace(wire, lane=taken[-1][2]))
        return routed

    def _draw_wire(self, side: str, wire: _Wire, ops: range, y: float, lane: float) -> None:
        """Draw a wire: up from the source, along the lane, down to the target, if in ``ops``."""
        points = [(wire.start, lane), (wire.end, lane)][: 1 + (wire.start != wire.end)]
        if wire.source is not None and wire.source in ops:
            top = y - HEADER * bool(self.step(side, wire.source)["fusion"])
            points.insert(0, (wire.start, top))
        if wire.target is not None and wire.target in ops:
            top = y - HEADER * bool(self.step(side, wire.target)["fusion"])
            points.append((wire.end, top))
        self._line(*points, color="channel", dashed=wire.is_channel, arrow=True)
        width = text_width(printable(wire.name), SMALL) + 2
        self._box(wire.middle - width / 2, lane - 9, width, 8, "paper", "paper")
        self._text(wire.middle, lane - 3, wire.name, color="channel", align="center")

    # refusals

    def _refusals(self, side: str, ops: range, y: float) -> float:
        """Draw dashed brackets under the ops, each as high as the brackets above it allow."""
        placed: list[tuple[float, float, float]] = []
        for refusal in sorted(self.plan["refusals"], key=lambda r: (len(r["ops"]), r["ops"])):
            home = refusal["side"] if refusal["side"] in self.sides else self.sides[-1]
            here = [i for i in refusal["ops"] if i in ops]
            if home == side and here:
                placed.append(self._refusal(refusal, here, y, placed))
        return max((bottom for _, _, bottom in placed), default=y)

    def _refusal(
        self, refusal: Item, ops: list[int], y: float, placed: list[tuple[float, float, float]]
    ) -> tuple[float, float, float]:
        left, right = self.x[ops[0]], self.x[ops[-1]] + self.widths[ops[-1]]
        joint = "joint " if refusal["side"] == "joint" else ""
        name = f"{joint}{refusal['fusion']} over {span(refusal['ops'])}"
        width = min(max(right - left, REASON_WIDTHS[0]), REASON_WIDTHS[1])
        lines = wrap(refusal["reason"].split(), width, SMALL)
        if ops[0] != refusal["ops"][0]:
            name, lines = f"{name} (continued)", []
        widest = max(text_width(name, SMALL, bold=True), *(text_width(s, SMALL) for s in lines), 0)
        start = max(min(left, MARGIN + self.width - widest), MARGIN)
        low, high = min(left, start), max(right, start + widest)
        y = max([y, *(end + 6 for a, b, end in placed if a < high + 8 and low < b + 8)])
        bracket = ((left, y), (left, y + 6), (right, y + 6), (right, y))
        self._line(*bracket, color="refused", dashed=True)
        y += 15
        self._text(start, y, name, color="refused", bold=True)
        for line in lines:
            y += 9
            self._text(start, y, line)
        return low, high, y + 3


def kind_of(op: str) -> str:
    """The kind of an op, from its class name, since a plan has only that."""
    if op in PASSING:
        return "residual, pass-through"
    if "Linear" in op:
        return "GEMM"
    if "Norm" in op:
        return "norm"
    return "activation" if op.endswith("LU") else "pointwise, other"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _several(number: int, noun: str) -> str:
    return noun if number == 1 else count_of(number, noun)


def _totals(steps: Sequence[Item]) -> tuple[float, float]:
    return sum(s["bytes_per_token"] for s in steps), sum(s["microseconds"] for s in steps)
