"""Directive ``figures``: a table of medians from a file of ``benchmarks/results``.

``:rows:`` is the column whose values name the rows, ``:columns:`` that of the table's columns, and
``:values:`` are the columns of figures. ``:where: column=value`` takes some of the lines.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import ClassVar

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def table(
    file: str, rows: str, columns: str | None, values: list[str], where: str | None
) -> tuple[str, list[list[str]]]:
    """The caption of a table, and its lines, the first of which has the headings.

    Raises
    ------
    KeyError, ValueError
        If the file has no such column, or no such lines.
    """
    with (RESULTS / file).open(newline="", encoding="utf-8") as source:
        lines = list(csv.DictReader(source))
    if where is not None:
        column, _, value = where.partition("=")
        lines = [line for line in lines if line[column] == value]
    if not lines:
        raise ValueError(f"{file} has no lines where {where}.")
    first = lines[0]
    caption = (
        f"{first['device']}, torch {first['torch']}, commit {first['commit']}, {first['date']}"
    )
    names = list(dict.fromkeys(line[rows] for line in lines))
    if columns is None:
        heads = [rows, *values]
        cells = {(line[rows], value): line[value] for line in lines for value in values}
        keys = values
    else:
        (value,) = values
        keys = list(dict.fromkeys(line[columns] for line in lines))
        heads = [f"{value}, {columns}", *keys]
        cells = {}
        for line in lines:
            cells.setdefault((line[rows], line[columns]), line[value])
    body = [[name, *(_short(cells.get((name, key), "")) for key in keys)] for name in names]
    return caption, [heads, *body]


def _short(cell: str) -> str:
    """A figure with at most four digits; a text as it is."""
    try:
        number = float(cell)
    except ValueError:
        return cell or "-"
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def setup(app: object) -> dict[str, bool]:
    """Registers the directive."""
    from docutils import nodes
    from docutils.parsers.rst import directives
    from sphinx.application import Sphinx
    from sphinx.util.docutils import SphinxDirective

    class Figures(SphinxDirective):
        required_arguments = 1
        option_spec: ClassVar = {
            "rows": directives.unchanged_required,
            "columns": directives.unchanged,
            "values": directives.unchanged_required,
            "where": directives.unchanged,
        }

        def run(self) -> list[nodes.Node]:
            file = self.arguments[0]
            self.env.note_dependency(str(RESULTS / file))
            options = self.options
            caption, lines = table(
                file,
                options["rows"],
                options.get("columns"),
                options["values"].split(", "),
                options.get("where"),
            )
            group = nodes.tgroup(cols=len(lines[0]))
            group += [nodes.colspec(colwidth=1) for _ in lines[0]]
            head, body = nodes.thead(), nodes.tbody()
            for part, rows in ((head, lines[:1]), (body, lines[1:])):
                for line in rows:
                    row = nodes.row()
                    row += [nodes.entry("", nodes.paragraph(text=cell)) for cell in line]
                    part += row
            group += [head, body]
            note = nodes.paragraph()
            note += nodes.emphasis(text=f"{caption}, benchmarks/results/{file}")
            return [nodes.table("", group), note]

    assert isinstance(app, Sphinx)
    app.add_directive("figures", Figures)
    return {"parallel_read_safe": True}
