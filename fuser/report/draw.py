"""Drawing of plans and inspections, given as dicts, into files: SVG, PNG, or HTML with the text."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from fuser.errors import InputError
from fuser.report.inspection import lay_out_inspection
from fuser.report.layout import lay_out
from fuser.report.model_layout import lay_out_model
from fuser.report.picture import COLORS, Picture, Text, paint, svg

SUFFIXES = (".html", ".png", ".svg")
LAYOUTS = {"parts": lay_out_model, "rows_of_steps": lay_out_inspection}
"""The layouts of dicts with these keys, of models and inspections; others are of pipelines."""


def drawable(path: str | os.PathLike[str]) -> Path:
    """``path``, if its suffix is that of a picture."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InputError(f"A picture is drawn as {', '.join(SUFFIXES)}; got {target.name!r}.")
    return target


def draw(shown: dict[str, Any], text: str, path: str | os.PathLike[str]) -> Path:
    """Draw a plan, of a pipeline or of a model, or an inspection into ``path``, and return that.

    Equal ones give equal SVG files. SVG has text as text, PNG 160 dots per inch. HTML is one
    self-contained page: the picture, with tooltips, and ``text``.
    """
    target = drawable(path)
    layout = next((layout for key, layout in LAYOUTS.items() if key in shown), lay_out)
    picture = layout(shown)
    if target.suffix.lower() == ".png":
        target.write_bytes(paint(picture, "png"))
    else:
        is_page = target.suffix.lower() == ".html"
        page = _page(picture, text) if is_page else svg(picture)
        target.write_text(page, encoding="utf-8")
    return target


def _page(drawing: Picture, text: str) -> str:
    """A page of HTML with a picture and a text, in light or dark colours."""
    picture = svg(drawing).partition("<svg")[2]
    title = next(html.escape(item.string) for item in drawing.items if isinstance(item, Text))
    light = dark = ""
    for number, (by_day, by_night) in enumerate(COLORS.values()):
        picture = picture.replace(by_day, f"var(--c{number})")
        light += f"--c{number}:{by_day};"
        dark += f"--c{number}:{by_night};"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
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
<pre>{html.escape(text)}</pre>
</body>
</html>
"""
