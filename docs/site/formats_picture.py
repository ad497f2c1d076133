"""The picture of number formats, docs/formats.svg: python docs/site/formats_picture.py."""

from __future__ import annotations

from pathlib import Path

import torch

PICTURE = Path(__file__).resolve().parents[1] / "formats.svg"
# Sign, exponent and mantissa bits; the dtype that torch has for it.
ELEMENTS = (
    ("FP8 E4M3", (1, 4, 3), torch.float8_e4m3fn),
    ("FP8 E5M2", (1, 5, 2), torch.float8_e5m2),
    ("FP4 E2M1", (1, 2, 1), None),
    ("bf16", (1, 8, 7), torch.bfloat16),
)
LARGEST_E2M1 = 6.0
# Rows and columns of a 16 x 32 piece of a tensor that share a scale; None is all of them.
SCALES = (
    ("tensor", "Delayed, Current", None, None),
    ("row", "Rowwise", 1, None),
    ("1 x 128", "Block, inputs", 1, 16),
    ("128 x 128", "Block, weights", 16, 16),
    ("1 x 32", "MXFP8", 1, 4),
    ("1 x 16", "NVFP4", 1, 2),
)
ROWS, COLUMNS, CELL, BIT = 16, 32, 4, 22
KINDS = (("sign", "#d9480f"), ("exponent", "#1971c2"), ("mantissa", "#2f9e44"))
SHADES = ("#a5d8ff", "#4dabf7")


def largest(dtype: torch.dtype | None) -> str:
    """The largest finite value of an element, in at most five digits."""
    return f"{LARGEST_E2M1 if dtype is None else torch.finfo(dtype).max:.5g}"


def picture() -> str:
    """The picture, as SVG."""
    parts = []
    for i, (name, bits, dtype) in enumerate(ELEMENTS):
        y = 34 + 40 * i
        parts.append(_text(10, y + 16, name))
        x = 100
        for (_, color), count in zip(KINDS, bits, strict=True):
            for _ in range(count):
                parts.append(_box(x, y, BIT, 24, color))
                x += BIT
        parts.append(_text(x + 10, y + 16, f"largest {largest(dtype)}", "small"))
    for i, (kind, color) in enumerate(KINDS):
        parts += [_box(100 + 110 * i, 6, 12, 12, color), _text(118 + 110 * i, 16, kind, "small")]
    for i, (shared, recipe, rows, columns) in enumerate(SCALES):
        left, top = 10 + (COLUMNS * CELL + 50) * (i % 3), 220 + 105 * (i // 3)
        parts += [
            _text(left, top - 8, f"{recipe}: {shared}", "small"),
            *_shared(left, top, rows or ROWS, columns or COLUMNS),
        ]
    return _page(parts)


def _shared(left: int, top: int, rows: int, columns: int) -> list[str]:
    """A piece of a tensor, in which each shade has one scale."""
    boxes = []
    for row in range(0, ROWS, rows):
        for column in range(0, COLUMNS, columns):
            shade = SHADES[(row // rows + column // columns) % 2]
            x, y = left + CELL * column, top + CELL * row
            boxes.append(_box(x, y, CELL * columns, CELL * rows, shade))
    return boxes


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}"/>'


def _text(x: float, y: float, text: str, kind: str = "name") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


def _page(parts: list[str]) -> str:
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 405" width="600" role="img"',
            ' aria-label="Bits of FP8, FP4 and bf16, and the values that share a scale">',
            "<style>text { font: 13px system-ui, sans-serif; fill: #1a1a1a; }",
            ".small { font-size: 11.5px; fill: #444; }",
            "rect { stroke: #fff; stroke-width: 0.6; }</style>",
            '<rect width="600" height="405" fill="#fff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
