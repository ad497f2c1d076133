"""Layout of the picture of a model's plan: a row for each part, repeated layers once."""

from __future__ import annotations

import re
from itertools import groupby

from fuser.report.columns import MARGIN, Item, columns_of
from fuser.report.layout import kind_of
from fuser.report.picture import SMALL, Drawing, Picture, matplotlib_or_error, text_width
from fuser.report.text import format_flops, format_time

ROW = 46.0
BOX = 30.0  # height of the box of a part
INDENT = 58.0  # room for the bracket of repeated layers and its count
OP_GAP = 3.0
BAR = 170.0  # of the longest time
PLAIN, COMPILED = "torch eager", "torch.compile"


@matplotlib_or_error()
def lay_out_model(plan: Item) -> Picture:
    """The picture of a plan, given as ``ModelPlan.to_dict`` returns it, with all places."""
    return _ModelLayout(plan).picture()


class _ModelLayout(Drawing):
    def __init__(self, plan: Item) -> None:
        super().__init__()
        self.plan = plan
        self.parts: list[Item] = plan["parts"]
        self.sides = ["forward", "backward"] if plan["training"] else ["forward"]
        widest = max((self._width(part) for part in self.parts), default=0.0)
        names = [text_width(part["place"], 8.5) for part in self.parts]
        self.box_x = MARGIN + INDENT
        self.bar_x = self.box_x + max(widest, *names, 120.0) + 30
        times = [max(self._time(part), part["baselines"][PLAIN]) for part in self.parts]
        self.longest = max(times, default=0.0) or 1.0

    def picture(self) -> Picture:
        y = self._title()
        for prefix, group in groupby(self.parts, key=_repeated):
            top = y
            for part in group:
                y = self._row(part, y)
            if prefix is not None:
                self._bracket(prefix, top + 8, y - 12)
        y = self._legend(y + 14)
        return Picture(self._right() + MARGIN, y + MARGIN, tuple(self.items))

    def _title(self) -> float:
        plan, y = self.plan, MARGIN + 12
        side = "training" if plan["training"] else "no grad"
        self._text(MARGIN, y, f"Plan of {plan['name']}", size=15.0, bold=True)
        y += 15
        line = (
            f"{format_flops(plan['parameters'])} parameters, {side}, inputs "
            f"{', '.join(plan['inputs'])}, modelled on {plan['device']}"
        )
        self._text(MARGIN, y, line, size=9.0, color="muted")
        time_as_planned, compiled = plan["microseconds"], plan["compiled_microseconds"]
        plain = plan["baselines"]
        longest = max(time_as_planned, compiled, *plain.values()) or 1.0
        y += 8
        # Each time of plain torch below that of the plan which it is compared with.
        rows = [("as planned", time_as_planned, None), (PLAIN, plain[PLAIN], time_as_planned)]
        rows += [("within torch.compile", compiled, None), (COMPILED, plain[COMPILED], compiled)]
        x = MARGIN + 106
        for name, time, planned in rows:
            y += 16
            color = "GEMM edge" if planned is None else "faint"
            self._text(MARGIN, y, name, size=8.5, bold=planned is None)
            self._box(x, y - 7, max(BAR * time / longest, 1.0), 8, color, color, 1.0)
            end = self._text(x + 6 + BAR, y, f"{format_time(time)}  ", size=8.5).bounds[2]
            if planned is not None:
                self._ratio(end, y, time, planned)
        return y + 20

    def _ratio(self, x: float, y: float, time: float, planned: float) -> None:
        """How many times as long plain torch takes; grey where nothing is gained."""
        ratio = f"{time / planned if planned else 1.0:.2f}x"
        gains = ratio != "1.00x"
        self._text(x, y, ratio, size=8.5, bold=gains, color="ink" if gains else "muted")

    def _row(self, part: Item, y: float) -> float:
        """Draw a part below ``y``; returns its lower end."""
        self._text(self.box_x, y + 8, part["place"], size=8.5, bold=part["plan"] is not None)
        top, x = y + 12, self.box_x
        if part["plan"] is None:
            label = f"{part['name']}, not of fuser"
            width = self._width(part)
            tip = "\n".join(f"{name}: {count}" for name, count in part["calls"].items())
            self._box(x, top, width, BOX - 8, "paper", "muted", 4.0, tip)
            self._text(x + width / 2, top + 14, label, size=8.0, color="muted", align="center")
        else:
            for i, name in enumerate(_names(part["plan"])):
                width, kind = _op_width(name), kind_of(part["plan"]["ops"][i])
                shape = columns_of(part["plan"], i)
                tip = f"{name} {shape}".strip()
                self._box(x, top, width, BOX - 8, kind, f"{kind} edge", 4.0, tip)
                self._text(x + width / 2, top + 9.5, name, size=SMALL, align="center", tip=tip)
                self._text(
                    x + width / 2, top + 18, shape, size=SMALL, color="muted", align="center"
                )
                x += width + OP_GAP
        time_of_part, plain = self._time(part), part["baselines"][PLAIN]
        for offset, time, color in ((0, time_of_part, "GEMM edge"), (9, plain, "faint")):
            length = max(BAR * time / self.longest, 1.0)
            self._box(self.bar_x, top + 2 + offset, length, 7, color, color, 1.0)
        x = self.bar_x + BAR + 8
        times = " + ".join(format_time(part[side]) for side in self.sides)
        words = f"{times}, {format_flops(part['flops'])}FLOP" if part["flops"] else times
        self._text(x, top + 8.5, words, size=8.0)
        end = self._text(x, top + 18.5, f"eager {format_time(plain)}  ", size=8.0, color="muted")
        self._ratio(end.bounds[2], top + 18.5, plain, time_of_part)
        return y + ROW

    def _bracket(self, prefix: str, top: float, bottom: float) -> None:
        x = MARGIN + INDENT - 12
        points = ((x + 6, top), (x, top), (x, bottom), (x + 6, bottom))
        self._line(*points, color="muted")
        count = max(part["count"] for part in self.parts if _repeated(part) == prefix)
        middle = (top + bottom) / 2 + 3
        self._text(x - 5, middle, f"{count} \N{MULTIPLICATION SIGN}", size=10.0, align="right")

    def _legend(self, y: float) -> float:
        text = (
            "Blue: the modelled time of all calls of a part, as planned; grey: in eager torch. "
            "Times are forward + backward. Numbers in ops are the columns of input and output."
        )
        self._text(MARGIN, y, text, size=8.0, color="muted")
        return y

    def _time(self, part: Item) -> float:
        return float(sum(part[side] for side in self.sides))

    def _width(self, part: Item) -> float:
        """The width of the boxes of a part."""
        if part["plan"] is None:
            return text_width(f"{part['name']}, not of fuser", 8.0) + 20
        return sum(_op_width(name) + OP_GAP for name in _names(part["plan"]))


def _names(plan: Item) -> list[str]:
    """The ops as users write them: the matrix product of a Linear has its name."""
    return [
        whole if whole and name == f"Basic{whole}" else name
        for name, whole in zip(plan["ops"], plan["wholes"], strict=True)
    ]


def _op_width(name: str) -> float:
    return max(text_width(name, SMALL) + 10, 58.0)


def _repeated(part: Item) -> str | None:
    """The path of the layers that a part is of, if there are several: ``layers.0-31``."""
    match = re.match(r"(.*?(?<![^.])\d+[-,][\d,-]*)(?![^.])", part["place"])
    return match.group(1) if match and part["count"] > 1 else None
