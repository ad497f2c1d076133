"""Columns and rows of a plan's picture: the width of each op, and the wrapping into rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuser.report.picture import SMALL, printable, text_width
from fuser.report.text import format_bytes, format_flops, format_time

# Lengths are points, y grows downwards.
MARGIN = 24.0
MAX_ROW = 1160.0  # a wider pipeline is wrapped into several rows
MIN_ROW = 560.0  # room for the totals of a pipeline of one op
PAD = 7.0  # from a fused window's outline to the ops in it
END = 52.0  # "input", "grad output" and the like beside a row
STUB = 44.0  # the least length of the arrow between that label and the row
MODULE_ARROW = 18.0  # the arrow beside the box of a module between pipelines
AS_MODULE = "called as a module"

Item = dict[str, Any]
"""An entry of a plan's dict, such as a step, a refusal or the call of a module."""
NO_STEP: Item = {"ops": [], "fusion": None, "kernel": ""}


class Columns:
    """A column for each op, the same for forward and backward, in rows of a page.

    ``plan`` is a plan as ``FusionPlan.to_dict`` returns it.
    """

    def __init__(self, plan: Item) -> None:
        self.plan = plan
        self.ops: list[str] = plan["ops"]
        self.sides = ["forward", "backward"] if plan["backward"] else ["forward"]
        self.steps: list[Item] = [step for side in self.sides for step in plan[side]]
        self.step_of: dict[str, dict[int, Item]] = {
            side: {i: step for step in plan[side] for i in step["ops"]} for side in self.sides
        }
        self.gaps = [self._gap(i) for i in range(len(self.ops))]
        self.widths = self._column_widths()
        self.stub = STUB
        self.rows = self._rows()
        self.stub = self._stub_width()
        self._widen_parts()
        self.width = max(MIN_ROW, *(self._row_width(ops) for ops in self.rows))
        self.x: list[float] = []
        for ops in self.rows:
            self.x.append(MARGIN + END + self.stub + self.modules_width(ops.start))
            for i in ops[1:]:
                self.x.append(self.x[-1] + self.widths[i - 1] + self.gaps[i])

    def _gap(self, op: int) -> float:
        """Space before ``op`` for an arrow and its bytes; less if both sides fuse across it."""
        if all(op - 1 in self.step(side, op)["ops"] for side in self.sides):
            return 16.0
        labels = [label for side in self.sides for label in self.gap_labels(side, op)]
        label = max(text_width(label, SMALL) for label in labels)
        return label + 2 * PAD + 16 + self.modules_width(op)

    def modules_width(self, gap: int) -> float:
        """Space for modules that are called before op ``gap``, each with an arrow."""
        return sum(module_width(call) + MODULE_ARROW for call in self.modules_before(gap))

    def modules_before(self, gap: int) -> list[Item]:
        """The modules, except ops, that are called before op ``gap``."""
        return [m for m in self.plan["modules"] if m["before"] == gap and not m["ops"]]

    def gap_labels(self, side: str, gap: int) -> list[str]:
        bytes_a_token, *formats = self.plan["labels"][side][gap]
        return [bytes_a_token.removesuffix("/token"), *formats]

    def _column_widths(self) -> list[float]:
        """The width of each op: enough for its name and for the text of its steps."""
        widths = [
            max(text_width(name, 8.5) + 18, text_width(columns_of(self.plan, i), 6.5) + 10, 62.0)
            for i, name in enumerate(self.ops)
        ]
        for step in sorted(self.steps, key=lambda step: len(step["ops"])):
            needs = [text_width(word, SMALL, mono=True) for word in kernels_of(step)]
            needs += [text_width(text, SMALL) for text in (cost(step), *products(step))]
            needs.append(text_width(step["fusion"] or "", 8.0, bold=True))
            needs.append(text_width(AS_MODULE, SMALL) if self.is_module(step) else 0.0)
            self._widen(widths, step["ops"], max(needs))
        return widths

    def _widen(self, widths: list[float], ops: Sequence[int], need: float) -> None:
        have = sum(widths[i] for i in ops) + sum(self.gaps[i] for i in ops[1:])
        for i in ops:
            widths[i] += max(need - have, 0.0) / len(ops)

    def _widen_parts(self) -> None:
        """Widen each part of a window that is split over rows, for its name."""
        for step in self.steps:
            name = f"{step['fusion']} (continued)" if step["fusion"] else ""
            for row in self.rows:
                part = [i for i in row if i in step["ops"]]
                if name and 0 < len(part) < len(step["ops"]):
                    self._widen(self.widths, part, text_width(name, 8.0, bold=True))

    def _stub_width(self) -> float:
        """Space for the text on the arrows into and out of rows, beside a window's outline."""
        gaps = {gap for ops in self.rows for gap in (ops.start, ops.stop)}
        labels = [label for s in self.sides for gap in gaps for label in self.gap_labels(s, gap)]
        return max(STUB, *(text_width(label, SMALL) + 2 * PAD for label in labels))

    def _row_width(self, ops: range) -> float:
        inner = sum(self.widths[i] for i in ops) + sum(self.gaps[i] for i in ops[1:])
        return inner + 2 * (END + self.stub) + self.modules_width(ops.start) + self._tail(ops)

    def _tail(self, ops: range) -> float:
        """Space for modules after the last op; other modules are drawn before the next row."""
        return self.modules_width(ops.stop) if ops.stop == len(self.ops) else 0.0

    def _rows(self) -> list[range]:
        """The rows: few, of about equal width, and with few windows split over two rows."""
        count = len(self.ops)
        cut = [0.0] * (count + 1)
        for items, price in ((self.steps, 4.0), (self.plan["refusals"], 0.5)):
            for i in (i for item in items for i in item["ops"][1:]):
                cut[i] += price
        best = [(0.0, 0)]  # for the ops before each gap: the price, and the start of the last row
        for stop in range(1, count + 1):
            choices: list[tuple[float, int]] = []
            for start in reversed(range(stop)):
                used = self._row_width(range(start, stop)) / MAX_ROW
                if used > 1 and choices:
                    break
                choices.append((best[start][0] + cut[start] + 1 + 4 * (1 - used) ** 2, start))
            best.append(min(choices))
        rows = [range(best[count][1], count)]
        while rows[0].start:
            rows.insert(0, range(best[rows[0].start][1], rows[0].start))
        return rows

    def row_right(self, ops: range) -> float:
        return self.x[ops[-1]] + self.widths[ops[-1]] + self.stub + self._tail(ops)

    def step(self, side: str, op: int) -> Item:
        """The step that runs ``op``; an empty step if there is none."""
        return self.step_of[side].get(op, NO_STEP)

    def edges(self, side: str, first: int, last: int) -> tuple[float, float]:
        """The left and right edge of ops; a fused window is wider than its ops."""
        pad = [PAD if self.step(side, i)["fusion"] else 0.0 for i in (first, last)]
        return self.x[first] - pad[0], self.x[last] + self.widths[last] + pad[1]

    def is_module(self, step: Item) -> bool:
        """Whether the step belongs to an op that is called as a module."""
        return any(set(step["ops"]) <= set(call["ops"]) for call in self.plan["modules"])


def columns_of(plan: Item, op: int) -> str:
    """The columns of the input and output of an op of ``plan``, as text."""
    ends = dict.fromkeys(plan["features"][op : op + 2])
    return " \N{RIGHTWARDS ARROW} ".join(map(str, ends))


def module_width(call: Item) -> float:
    return max(text_width(printable(call["name"]), 8.5) + 18, 62.0)


def cost(step: Item) -> str:
    """The bytes and the time of ``step``; empty if it has no kernel."""
    if not step["kernel"]:
        return ""
    return f"{format_bytes(step['bytes_per_token'])}, {format_time(step['microseconds'])}"


def products(step: Item) -> list[str]:
    """The operations and the time of the products of ``step``; empty if it has none."""
    if not step["flops_per_token"]:
        return []
    flops = format_flops(step["flops_per_token"]).replace(" ", "\N{NO-BREAK SPACE}")
    return [f"{flops}FLOP", f"GEMMs {format_time(step['product_microseconds'])}"]


def kernels_of(step: Item) -> list[str]:
    """The kernels of ``step`` as words, with commas."""
    return (step["kernel"] or "no kernel").replace(", ", ",\n").split("\n")
