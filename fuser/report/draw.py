"""Drawing of plans into files: SVG, PNG, or HTML with the plan's text."""

from __future__ import annotations

import html
from pathlib import Path

from fuser.plan.plan import FusionPlan, renderers
from fuser.report.layout import count_of, lay_out
from fuser.report.picture import COLORS, paint, svg


def draw_svg(plan: FusionPlan, path: Path) -> None:
    """Write the picture as SVG, with text as text; equal plans give equal files."""
    path.write_text(svg(lay_out(plan)), encoding="utf-8")


def draw_png(plan: FusionPlan, path: Path) -> None:
    """Write the picture as PNG with 160 dots per inch."""
    path.write_bytes(paint(lay_out(plan), "png"))


def draw_html(plan: FusionPlan, path: Path) -> None:
    """Write one self-contained page: the picture, with tooltips, and the plan's text."""
    picture = svg(lay_out(plan)).partition("<svg")[2]
    light = dark = ""
    for number, (by_day, by_night) in enumerate(COLORS.values()):
        picture = picture.replace(by_day, f"var(--c{number})")
        light += f"--c{number}:{by_day};"
        dark += f"--c{number}:{by_night};"
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Fusion plan of {count_of(len(plan.ops), "op")}</title>
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
<svg{picture}</figure>
<pre>{html.escape(str(plan))}</pre>
</body>
</html>
"""
    path.write_text(page, encoding="utf-8")


renderers.update({".svg": draw_svg, ".png": draw_png, ".html": draw_html})
