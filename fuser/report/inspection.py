"""Layout of an inspection's picture: a bar for the signal to noise ratio of each tensor."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from fuser.report.picture import (
    SMALL,
    Box,
    Line,
    Picture,
    Text,
    matplotlib_or_error,
    printable,
    text_width,
)
from fuser.report.text import format_share, listed

# Lengths are points, y grows downwards.
MARGIN = 24.0
ROW = 13.0
BAR = 8.0
SCALE = 300.0  # the width of the axis
TICK = 10  # dB between two lines of the axis
COLORS_OF = {"input": "GEMM", "weight": "norm", "grad_output": "activation"}

Item = dict[str, Any]


@matplotlib_or_error()
def lay_out_inspection(inspection: Item) -> Picture:
    """The picture of an inspection, given as ``InspectionReport.to_dict`` returns it."""
    rows = inspection["rows"]
    numbers = listed([str(step) for step in inspection["steps"]])
    title = f"Quantized tensors of call {numbers}, of {inspection['calls']} in training"
    if not rows:
        reason = Text(MARGIN, MARGIN + 9, inspection["reason"], 9.0)
        return Picture(reason.bounds[2] + MARGIN, 2 * MARGIN + 12, (reason,))
    heading = Text(MARGIN, MARGIN + 9, title, 11.0, bold=True)
    items: list[Text | Box | Line] = [heading]
    labels = [_label(row) for row in rows]
    left = MARGIN + 12 + max(text_width(label, SMALL) for label in labels) + 8
    decibels = [row[key] for row in rows for key in ("snr_db", "bf16_snr_db")]
    highest = max((d for d in decibels if isinstance(d, float)), default=TICK)
    top = max(TICK, math.ceil(highest / TICK) * TICK)
    y = first = MARGIN + 46
    bars: list[Text | Box | Line] = []
    right = heading.bounds[2]
    by_layer = itertools.groupby(zip(labels, rows, strict=True), lambda pair: _layer(pair[1]))
    for layer, members in by_layer:
        bars.append(Text(MARGIN, y + 9, layer, 8.0, bold=True))
        y += ROW + 1
        for label, row in members:
            bars.append(Text(left - 8, y + 7.5, label, SMALL, "muted", align="right"))
            bars += _bar(row, left, y, top)
            right = max(right, *(item.bounds[2] for item in bars[-2:] if isinstance(item, Text)))
            y += ROW
        y += 5
    for tick in range(0, top + 1, TICK):
        x = left + SCALE * tick / top
        items.append(Line(((x, first - 4), (x, y - 3)), "faint"))
        items.append(Text(x, first - 8, f"{tick}", SMALL, "muted", align="center"))
    axis = Text(left, first - 20, "signal to noise in dB; a line: the same values in bf16")
    items.append(replace(axis, color="muted"))
    right = max(right, left + SCALE, axis.bounds[2])
    return Picture(right + MARGIN, y + MARGIN - 8, (*items, *bars))


def _layer(row: Item) -> str:
    return printable(f"{row['layer'] or '(model)'} {row['op']}")


def _label(row: Item) -> str:
    copy = "" if row["copy"] == "both" else f", {row['copy']}"
    return f"{row['tensor']}{copy}"


def _bar(row: Item, left: float, y: float, top: int) -> list[Text | Box | Line]:
    """The bar of a tensor, with its number and what was lost beside it; the text comes last."""
    ratio, color = row["snr_db"], COLORS_OF[row["tensor"]]
    is_number = isinstance(ratio, float)
    width = SCALE * min(max(ratio, 0.0) / top, 1.0) if is_number else 0.0
    said = f"{ratio:.1f}" if is_number else {None: "not known"}.get(ratio, str(ratio))
    lost = [
        f"{format_share(row[key])} {name}"
        for key, name in (("underflow", "to zero"), ("saturation", "saturated"))
        if row[key]
    ]
    tip = "\n".join(f"{name}: {value}" for name, value in row.items())
    items: list[Text | Box | Line] = []
    if width:
        items.append(Box(left, y + 1, width, BAR, color, f"{color} edge", 1.5, tip))
    exact = row["bf16_snr_db"]
    end = left + width
    if isinstance(exact, float):
        x = left + SCALE * min(exact / top, 1.0)
        items.append(Line(((x, y), (x, y + BAR + 2)), "refused"))
        end = max(end, x) if x - end < 24 else end
    text = Text(end + 5, y + 7.5, ", ".join([said, *lost]), SMALL, tip=tip)
    x, _, until, _ = text.bounds
    # Over the lines of the axis, which would cross the text.
    items.append(Box(x - 1, y + 1, until - x + 2, BAR, "paper", "paper", 1.0))
    return [*items, text]
