"""The picture of producers and stores, docs/kernels.svg: python docs/site/kernels_picture.py.

What is in it is read from the kernels that the launchers may ask for.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "kernels.svg"
# A producer, what it computes, and the kernel that stores its values unquantized.
PRODUCERS = (
    ("LoadProducer", "a matrix in memory", ""),
    ("PointwiseProducer", "a chain: activation, bias, dropout, ...", "fuser_pointwise"),
    ("PointwiseBackwardProducer", "the gradient of a chain", "fuser_pointwise_backward"),
    ("NormProducer", "RMSNorm or LayerNorm", "fuser_norm"),
    ("NormBackwardProducer", "the gradient of a norm", "fuser_norm_backward"),
    ("GatheredProducer", "tokens, sorted by their experts", "fuser_permute"),
    ("AdamWProducer", "weights after a step of AdamW", "fuser_adamw"),
    ("RoundedProducer", "fp32 in memory, rounded", ""),
    ("BlockProducer", "decoded FP8", ""),
    ("Mxfp8Producer", "decoded MXFP8", ""),
    ("Nvfp4Producer", "decoded NVFP4", ""),
)
UNQUANTIZED = "(no store)"
# A store, and what it writes; those of groups have its name after "Grouped".
STORES = (
    (UNQUANTIZED, "16 or 32 bits"),
    ("TransposedStore", "16 or 32 bits, transposed"),
    ("Fp8Store", "FP8, a scale a tensor"),
    ("RowwiseAmaxStore", "amaxes of rows and columns"),
    ("RowwiseStore", "FP8, a scale a row"),
    ("Block1dStore", "FP8, a scale for 1 x 128"),
    ("Block2dStore", "FP8, a scale for 128 x 128"),
    ("Mxfp8Store", "MXFP8, 1 x 32"),
    ("Mxfp8SquareStore", "MXFP8, 32 x 32"),
    ("HadamardAmaxStore", "amaxes after a transform"),
    ("Nvfp4Store", "NVFP4, 1 x 16"),
)
MATRIX, GROUPS = "#1971c2", "#d9480f"
LEFT, TOP, ROW, COLUMN, WIDTH = 262, 268, 30, 42, 836
HEIGHT = TOP + ROW * len(PRODUCERS) + 56


def kernels() -> set[tuple[str, str, bool]]:
    """A producer, a store, and whether the rows are padded groups, of each kernel that there is."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "cases")]
    from kernel_instantiations import instantiations

    symbols = [symbol for found in instantiations().values() for symbol in found]
    heads = {symbol.partition("<")[0] for symbol in symbols}
    pairs = {(name, UNQUANTIZED, False) for name, _, kernel in PRODUCERS if kernel in heads}
    for symbol in symbols:
        head = symbol.partition("<")[0]
        names = re.findall(r"(\w+)Producer\b", symbol)
        if head not in ("fuser_tiled", "fuser_tiled_rows"):
            continue
        is_grouped = any(name.startswith("Grouped") for name in names)
        producer = f"{names[-1].removeprefix('Grouped')}Producer"
        stores = re.findall(r"\w+Store\b", symbol)
        store = stores[0].removeprefix("Grouped") if stores else UNQUANTIZED
        pairs.add((producer, store, is_grouped))
        if (
            store == "Nvfp4Store"
        ):  # of some producers the list has the store without a transform alone
            pairs.add((producer, "HadamardAmaxStore", is_grouped))
    return pairs


def picture() -> str:
    """The picture, as SVG."""
    pairs = kernels()
    parts = [*_flow(), *_heads()]
    for i, (producer, what, _) in enumerate(PRODUCERS):
        y = TOP + ROW * i
        if i % 2 == 0:
            size = f'width="{LEFT + COLUMN * len(STORES) - 8}" height="{ROW}"'
            parts.append(f'<rect class="band" x="8" y="{y}" {size}/>')
        parts.append(_text(16, y + 13, what))
        parts.append(_text(16, y + 26, producer, "code"))
        for j, (store, _) in enumerate(STORES):
            x, middle = LEFT + COLUMN * j + COLUMN / 2, y + ROW / 2
            if (producer, store, False) in pairs:
                parts.append(f'<circle cx="{x - 6:g}" cy="{middle:g}" r="5" fill="{MATRIX}"/>')
            if (producer, store, True) in pairs:
                box = f'x="{x + 3:g}" y="{middle - 5:g}" width="10" height="10"'
                parts.append(f'<rect {box} fill="{GROUPS}"/>')
    y = TOP + ROW * len(PRODUCERS) + 28
    parts += [
        f'<circle cx="22" cy="{y - 4}" r="5" fill="{MATRIX}"/>',
        _text(34, y, "a kernel of whole matrices", "small"),
        f'<rect x="202" y="{y - 9}" width="10" height="10" fill="{GROUPS}"/>',
        _text(218, y, "a kernel of groups of rows, each padded to whole tiles", "small"),
    ]
    return _page(parts)


def _flow() -> list[str]:
    """A kernel: a producer, a tile in registers, and what a store writes."""
    boxes = ((16, 150, "producer", "computes"), (236, 150, "128 x 128", "in registers"))
    parts = []
    for x, width, name, what in (*boxes, (456, 150, "store", "quantizes")):
        parts.append(f'<rect class="box" x="{x}" y="24" width="{width}" height="50" rx="6"/>')
        parts.append(_text(x + 14, 45, name))
        parts.append(_text(x + 14, 63, what, "small"))
    for x in (170, 390):
        parts.append(f'<path class="arrow" d="M{x} 49 h54"/>')
    for y, what in ((30, "rowwise copy"), (49, "columnwise copy"), (68, "scales, or amaxes")):
        parts.append(f'<path class="arrow" d="M610 49 L640 {y}"/>')
        parts.append(_text(648, y + 4, what, "small"))
    parts.append(_text(16, 96, "fuser_tiled&lt;Producer, Store&gt;", "code"))
    return parts


def _heads() -> list[str]:
    """The names of the stores, upwards and to the right of their columns."""
    parts = []
    for j, (store, what) in enumerate(STORES):
        x, y = LEFT + COLUMN * j + COLUMN / 2, TOP - 8
        turned = f'transform="translate({x:g} {y}) rotate(-50)"'
        parts.append(f"<g {turned}>{_text(0, 0, what)}{_text(4, 12, store, 'code')}</g>")
    return parts


def _text(x: float, y: float, text: str, kind: str = "name") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


def _page(parts: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" role="img"',
            ' aria-label="Producers of values, and the stores that kernels write them with">',
            "<style>text { font: 13px system-ui, sans-serif; fill: #1a1a1a; }",
            ".small { font-size: 12px; fill: #444; }",
            ".code { font: 11px ui-monospace, monospace; fill: #555; }",
            ".band { fill: #f1f3f5; } .box { fill: #e7f5ff; stroke: #1971c2; }",
            ".arrow { fill: none; stroke: #495057; stroke-width: 1.5; }</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
