"""The picture of the rooms of the library, docs/rooms.svg: python docs/site/rooms_picture.py.

Which rooms there are is read from tests/rooms.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "rooms.svg"
WHAT = {
    "core": "a dense block, eager, on a CPU and a GPU",
    "experts": "grouped linears, dispatch, routers",
    "sharding": "FSDP2, tensor and sequence parallel",
    "conversion": "modules of torch run pipelines",
    "compile": "pipelines in torch.compile",
    "recording": "passes that are one launch",
    "model plans": "plans of whole models",
    "capture": "modules in CUDA graphs",
    "layers": "layers made of pipelines",
    "checks": "checks of users' ops",
    "LoRA": "adapters on linears",
    "memory plans": "what backward computes again",
    "cuts": "a pipeline in several nodes",
    "AdamW": "a step that quantizes",
    "notes": "what a plan says of shapes",
    "te": "programs of Transformer Engine",
    "demo": "a language model that trains",
    "inspection": "what quantizing loses",
    "pictures": "plans as pictures",
    "integrations": "transformers, PEFT, torchtitan",
    "doctor": "what this machine can run",
    "command line": "python -m fuser",
}
COLUMNS, WIDTH, HEIGHT, GAP, LEFT = 4, 240, 46, 8, 12
FLOORS = (
    ("product", "Products: nothing imports them", "#fff4e6", "#d9480f"),
    ("wing", "Wings: each imports the core, and answers at its doors", "#e7f5ff", "#1971c2"),
    ("core", "The core: imports neither wings nor products", "#ebfbee", "#2b8a3e"),
)


def picture() -> str:
    """The picture, as SVG: a floor for each kind of room, the core below."""
    sys.path.append(str(ROOT / "tests"))
    from rooms import ROOMS

    parts: list[str] = []
    y = 12
    for kind, title, fill, stroke in FLOORS:
        parts.append(f'<text x="{LEFT}" y="{y + 14}">{title}</text>')
        y += 24
        rooms = [room.name for room in ROOMS if room.kind == kind]
        columns = COLUMNS if len(rooms) > 1 else 1
        width = (WIDTH + GAP) * COLUMNS // columns - GAP
        for i, name in enumerate(rooms):
            x, top = LEFT + (width + GAP) * (i % columns), y + (HEIGHT + GAP) * (i // columns)
            size = f'width="{width}" height="{HEIGHT}" rx="5"'
            parts.append(f'<rect x="{x}" y="{top}" {size} fill="{fill}" stroke="{stroke}"/>')
            parts.append(f'<text x="{x + 10}" y="{top + 19}">{name}</text>')
            parts.append(f'<text class="small" x="{x + 10}" y="{top + 36}">{WHAT[name]}</text>')
        y += (HEIGHT + GAP) * -(-len(rooms) // columns) + 10
    whole = 2 * LEFT + (WIDTH + GAP) * COLUMNS - GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {y}" width="{whole}" '
        'role="img" aria-label="The rooms of the library">'
    )
    style = (
        "<style>text { font: 14px system-ui, sans-serif; fill: #1a1a1a; }"
        " .small { font-size: 12px; fill: #444; }</style>"
    )
    paper = f'<rect width="{whole}" height="{y}" fill="#fff"/>'
    return "\n".join([head, style, paper, *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
