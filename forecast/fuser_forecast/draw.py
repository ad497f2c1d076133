"""The picture of a report: exposed share and speed of each variant over the number of GPUs."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path

from fuser.errors import InputError
from fuser.report.picture import (
    Box,
    Line,
    Picture,
    Text,
    matplotlib_or_error,
    paint,
    svg,
)
from fuser_forecast.report import ScaleReport

COLORS = ("muted", "GEMM edge", "activation edge")  # of the variants
WIDTH, HEIGHT, MARGIN = 330.0, 200.0, 46.0  # of a panel, and around it
GRID = 4
FONT = 8.0
SUFFIXES = (".svg", ".png")


def check_path(path: str | os.PathLike[str]) -> Path:
    """``path``, if a report can be drawn into a file of this name.

    Raises
    ------
    InputError
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InputError(f"A report is drawn as {', '.join(SUFFIXES)}; got {target.name!r}.")
    if target.is_dir() or not target.parent.is_dir():
        obstacle = "is a folder" if target.is_dir() else "is in a folder that does not exist"
        raise InputError(f"A report is drawn into a file; {str(target)!r} {obstacle}.")
    return target


def draw(report: ScaleReport, path: str | os.PathLike[str]) -> Path:
    """Draw ``report.elsewhere`` into ``path``, ``.svg`` or ``.png``. Returns the path.

    Raises
    ------
    InputError
        If the path has another suffix or cannot be written, or fewer than two numbers of GPUs hold
        the model.
    """
    target = check_path(path)
    fitting = [scaled for scaled in report.elsewhere if any(step.fits for step in scaled.steps)]
    if len(fitting) < 2:
        raise InputError(
            "A picture needs two numbers of GPUs, and the model, the batch and the memory allow "
            f"{len(fitting)}."
        )
    picture = _picture(report)
    is_svg = target.suffix.lower() == ".svg"
    drawn = svg(picture).encode() if is_svg else paint(picture, "png")
    try:
        target.write_bytes(drawn)
    except OSError as error:
        raise InputError(f"{str(target)!r} cannot be written: {error.strerror}.") from error
    return target


@matplotlib_or_error()
def _picture(report: ScaleReport) -> Picture:
    shares = _curves(report, "exposed")
    speeds = _curves(report, "tokens_per_second")
    most = max(value for curve in speeds for value in curve if value is not None)
    unit = 10 ** math.floor(math.log10(most / GRID))
    top = math.ceil(most / GRID / unit) * unit * GRID
    recipe = type(report.here.steps[-1].variant.recipe).__name__
    first = report.here.steps[0]
    batch = first.tokens * first.microbatches * first.mesh.gpus
    title = f"{report.model.name}, {recipe}, {batch:,} tokens a step"
    items: list[Text | Box | Line] = [Text(MARGIN, 20, title, size=11.0, bold=True)]
    items += _panel(report, MARGIN, "exposed communication, share of the step", shares, 1.0, "%")
    right = 2 * MARGIN + WIDTH
    items += _panel(report, right, "tokens a second of one GPU", speeds, top, "")
    x = MARGIN
    for step, color in zip(report.here.steps, COLORS, strict=True):
        y = HEIGHT + 92
        items.append(Line(((x, y - 3), (x + 18, y - 3)), color))
        items.append(name := Text(x + 23, y, step.variant.name, size=FONT))
        x = name.bounds[2] + 18
    return Picture(2 * WIDTH + 3 * MARGIN, HEIGHT + 106, tuple(items))


# For each variant a value for each number of GPUs, None where the step does not fit into memory.
_Curves = list[list[float | None]]


def _curves(report: ScaleReport, name: str) -> _Curves:
    """A property of the step of each variant, over the numbers of GPUs."""
    variants = zip(*(scaled.steps for scaled in report.elsewhere), strict=True)
    return [[getattr(step, name) if step.fits else None for step in steps] for steps in variants]


def _panel(
    report: ScaleReport, left: float, title: str, curves: _Curves, top: float, unit: str
) -> list[Text | Box | Line]:
    """Curves over the numbers of GPUs, with a logarithmic axis, from 0 to ``top``."""
    bottom, counts = 46 + HEIGHT, [scaled.gpus for scaled in report.elsewhere]
    spread = math.log2(counts[-1] / counts[0])
    places = [left + WIDTH * math.log2(count / counts[0]) / spread for count in counts]
    items: list[Text | Box | Line] = [Text(left, 38, title, size=FONT, bold=True)]
    for step in range(GRID + 1):
        y = bottom - HEIGHT * step / GRID
        value = top * step / GRID * (100 if unit else 1)
        items.append(Line(((left, y), (left + WIDTH, y)), "faint"))
        items.append(Text(left - 6, y + 3, f"{value:.0f}{unit}", size=FONT, align="right"))
    for x, count in zip(places, counts, strict=True):
        items.append(Text(x, bottom + 14, str(count), size=FONT, align="center"))
    items.append(Text(left + WIDTH / 2, bottom + 28, "GPUs", size=FONT, align="center"))
    for curve, color in zip(curves, COLORS, strict=True):
        points = [
            None if value is None else (x, bottom - HEIGHT * value / top)
            for x, value in zip(places, curve, strict=True)
        ]
        items += [Line((a, b), color) for a, b in pairwise(points) if a and b]
        items += [Box(p[0] - 2, p[1] - 2, 4, 4, color, color, 2.0) for p in points if p]
    return items
