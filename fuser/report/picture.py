"""Pictures of boxes, lines and text, which matplotlib paints into SVG or PNG."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fuser.errors import StateError

# The light and the dark value of each colour. The hues for kinds of ops are distinct
# with any colour blindness: blue, orange, teal, grey, purple.
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
    "residual, pass-through": ("#e4e4df", "#3a3a37"),
    "residual, pass-through edge": ("#74746b", "#a6a69c"),
    "pointwise, other": ("#e5d6ef", "#46305a"),
    "pointwise, other edge": ("#7a4a99", "#bf94dc"),
}
SMALL = 7.0  # font size of labels, in points; y grows downwards

Point = tuple[float, float]


@dataclass(frozen=True)
class Text:
    """One line of text on the baseline ``y``; ``align`` says which part of it is at ``x``.

    ``tip``, here and of a box, is a tooltip.
    """

    x: float
    y: float
    string: str
    size: float = SMALL
    color: str = "ink"
    bold: bool = False
    mono: bool = False
    align: str = "left"
    tip: str = ""

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom."""
        width = text_width(self.string, self.size, self.bold, self.mono)
        left = self.x - width * {"left": 0.0, "center": 0.5, "right": 1.0}[self.align]
        return left, self.y - 0.78 * self.size, left + width, self.y + 0.24 * self.size


@dataclass(frozen=True)
class Box:
    """A rounded box."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str
    radius: float = 4.0
    tip: str = ""

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom."""
        return self.x, self.y, self.x + self.width, self.y + self.height


@dataclass(frozen=True)
class Line:
    """A line through ``points`` with round corners, and a head at its end if it is an arrow."""

    points: tuple[Point, ...]
    color: str = "ink"
    dashed: bool = False
    arrow: bool = False


@dataclass(frozen=True)
class Picture:
    """Items in the order in which they are painted."""

    width: float
    height: float
    items: tuple[Text | Box | Line, ...]


class Drawing:
    """The items of a picture that is being drawn."""

    def __init__(self) -> None:
        self.items: list[Text | Box | Line] = []

    def _text(self, x: float, y: float, string: str, **style: Any) -> Text:
        self.items.append(text := Text(x, y, printable(string), **style))
        return text

    def _box(self, x: float, y: float, width: float, height: float, *style: Any) -> None:
        self.items.append(Box(x, y, width, height, *style))

    def _line(self, *points: Point, **style: Any) -> None:
        self.items.append(Line(points, **style))

    def _right(self) -> float:
        """The right end of all items but lines."""
        return max(item.bounds[2] for item in self.items if not isinstance(item, Line))


# -- text ---------------------------------------------------------------------


@lru_cache(maxsize=4096)
def text_width(string: str, size: float, bold: bool = False, mono: bool = False) -> float:
    """The width of one line in points, in the font of the picture."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    family, weight = _font(bold, mono)
    font = FontProperties(family=family, weight=weight, size=size)
    return float(text_to_path.get_text_width_height_descent(string, font, False)[0])


def _font(bold: bool, mono: bool) -> tuple[str, str]:
    return "monospace" if mono else "sans-serif", "bold" if bold else "normal"


# Rounding: a column as wide as its longest word may be narrower than it by this much.
ROUNDING = 1e-6


def wrap(words: Sequence[str], width: float, size: float, mono: bool = False) -> list[str]:
    """``words`` in lines of at most ``width``; a wider word is broken."""

    def fits(line: str) -> bool:
        return text_width(line, size, mono=mono) <= width + ROUNDING

    lines = [""]
    for word in map(printable, words):
        if fits(f"{lines[-1]} {word}".strip()):
            lines[-1] = f"{lines[-1]} {word}".strip()
            continue
        lines.append("")
        for letter in word:
            if not fits(lines[-1] + letter):
                lines.append("")
            lines[-1] += letter
    return [line for line in lines if line]


def printable(text: str) -> str:
    """``text`` without control characters, which XML cannot hold."""
    return "".join(c if c.isprintable() else " " for c in text)


# -- painting -----------------------------------------------------------------


@contextmanager
def matplotlib_or_error() -> Iterator[None]:
    """matplotlib with its default settings instead of the user's; text stays text in SVG."""
    try:
        import matplotlib
    except ImportError as error:
        raise StateError(
            "Drawing needs matplotlib, which cannot be imported here: run `pip install matplotlib`."
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fuser"})
        yield


def svg(picture: Picture) -> str:
    """The picture as SVG, with tips as titles."""
    text = paint(picture, "svg").decode()
    for number, item in enumerate(picture.items):
        if not isinstance(item, Line) and item.tip:
            group = f'<g id="item{number}">'
            tip = "\n".join(html.escape(printable(line)) for line in item.tip.splitlines())
            text = text.replace(group, f"{group}\n<title>{tip}</title>", 1)
    return text


@matplotlib_or_error()
def paint(picture: Picture, file_format: str) -> bytes:
    """The picture as the bytes of an ``"svg"`` or ``"png"`` file, in its light colours."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon

    color = {name: light for name, (light, _) in COLORS.items()}
    figure = Figure((picture.width / 72, picture.height / 72), facecolor=color["paper"])
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.set_axis_off()
    for number, item in enumerate(picture.items):
        artists: list[Any]
        if isinstance(item, Text):
            family, weight = _font(item.bold, item.mono)
            style: dict[str, Any] = {"family": family, "weight": weight, "ha": item.align}
            style |= {"size": item.size, "color": color[item.color], "parse_math": False}
            artists = [axes.text(item.x, item.y, item.string, **style)]
        elif isinstance(item, Box):
            shape = f"round,pad=0,rounding_size={item.radius}"
            box = FancyBboxPatch((item.x, item.y), item.width, item.height, shape, linewidth=0.9)
            box.set(facecolor=color[item.fill], edgecolor=color[item.edge])
            artists = [box]
        else:
            dashes = (0, (3, 2)) if item.dashed else "solid"
            line = PathPatch(_rounded(item.points), fill=False, linewidth=0.9, linestyle=dashes)
            line.set_edgecolor(color[item.color])
            artists = [line]
            if item.arrow:
                artists.append(Polygon(_head(item.points), color=color[item.color], linewidth=0))
        for artist in artists:
            artist.set_zorder(number)
            if not isinstance(item, Text):
                axes.add_patch(artist)
            if not isinstance(item, Line):
                artist.set_gid(f"item{number}")
    target = io.BytesIO()
    # Without these arguments a file would contain the time and links to metadata schemes.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if file_format == "svg" else {}
    figure.savefig(target, format=file_format, dpi=160, metadata=metadata)
    return target.getvalue()


def _rounded(points: Sequence[Point], radius: float = 6.0) -> Any:
    """The path through ``points`` with its corners rounded off."""
    from matplotlib.path import Path as Curve

    vertices, codes = [points[0]], [Curve.MOVETO]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        vertices += [_toward(corner, before, radius), corner, _toward(corner, after, radius)]
        codes += [Curve.LINETO, Curve.CURVE3, Curve.CURVE3]
    return Curve([*vertices, points[-1]], [*codes, Curve.LINETO])


def _head(points: Sequence[Point], length: float = 5.0, half: float = 2.2) -> list[Point]:
    """The triangle at the end of an arrow."""
    (x, y), (back_x, back_y) = points[-1], _toward(points[-1], points[-2], length)
    across, down = (y - back_y) * half / length, (back_x - x) * half / length
    return [(x, y), (back_x + across, back_y + down), (back_x - across, back_y - down)]


def _toward(point: Point, other: Point, distance: float) -> Point:
    """The point at ``distance`` from ``point`` towards ``other``, at most half way."""
    part = min(distance / max(math.dist(point, other), 1e-9), 0.5)
    return point[0] + (other[0] - point[0]) * part, point[1] + (other[1] - point[1]) * part
