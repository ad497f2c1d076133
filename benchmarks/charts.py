"""Charts of the results of kernels.py, pipelines.py and whole_models.py, as PNG or SVG.

python benchmarks/charts.py out/kernels.csv -o out/kernels.png
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import evidence

COLORS = {
    "fuser": "#08519c",
    "TE": "#41ab5d",
    "Liger": "#fd8d3c",
    "torchao": "#9e6fc4",
    "compile": "#969696",
    "torch.compile": "#969696",
    "unfused": "#74a9cf",
    "eager": "#d0d0d0",
    "torch eager": "#d0d0d0",
}
SMALL = {"fontsize": 7.5}
# Inches of a bar, of the space between groups, and of the space above and below the bars.
BAR, GAP, FRAME = 0.11, 0.08, 1.5

Rows = Sequence[Mapping[str, Any]]


def groups(rows: Rows, *keys: str) -> list[list[Mapping[str, Any]]]:
    """Groups of rows with equal ``keys``, in order of appearance."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.values())


def unavailable() -> str | None:
    """The reason why no chart can be drawn here; None if one can."""
    found = importlib.util.find_spec("matplotlib")
    return None if found else "Drawing a chart needs matplotlib; pip install matplotlib."


def figure_of(height: float) -> Any:
    """An empty figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(10, height), layout="constrained")


def title(rows: Rows, what: str) -> str:
    """A title: the measured quantity, the machine and the commit."""
    one = rows[0]
    return (
        f"{what}\n{one['device']}, torch {one['torch']}, CUDA {one['cuda']}, {one['dtype']}, "
        f"commit {one['commit']}, {one['date']}"
    )


def finish(figure: Any, panels: Sequence[Any], names: Sequence[str], path: Path) -> None:
    """A legend of the libraries, and the file."""
    from matplotlib.patches import Patch

    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    patches = [Patch(color=COLORS[name], label=name) for name in COLORS if name in names]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_kernels(path: Path, rows: Rows) -> None:
    """A group of bars for each kernel: the fraction of the copy bandwidth of each variant.

    On the right are fuser's rate, and the time of the fastest other variant over fuser's. A diamond
    is the row's target; a variant that failed has no bar.
    """
    kernels = groups(rows, "row", "rows", "columns")
    shapes = Counter((kernel[0]["rows"], kernel[0]["columns"]) for kernel in kernels)
    usual = shapes.most_common(1)[0][0]
    most = max([1.0, *(float(row["of copy"]) for row in rows if row["of copy"] != "")])
    figure = figure_of(FRAME + len(rows) * BAR + len(kernels) * GAP)
    panel = figure.subplots()
    place, ticks, labels = 0.0, [], []
    for kernel in kernels:
        own = kernel[0]
        ticks.append(place + (len(kernel) - 1) * BAR / 2)
        shape = (own["rows"], own["columns"])
        labels.append(own["row"] if shape == usual else "{}  {} x {}".format(own["row"], *shape))
        panel.text(1.03 * most, ticks[-1], rate_of(kernel), va="center", fontsize=8)
        if own["target"] != "":
            panel.plot(float(own["target"]), place, "D", ms=4, mfc="black", mec="white", zorder=3)
        for row in kernel:
            if row["of copy"] != "":
                panel.barh(place, float(row["of copy"]), BAR * 0.92, color=COLORS[row["variant"]])
            place += BAR
        place += GAP
    diamond = "; diamond: target" if any(row["target"] != "" for row in rows) else ""
    panel.axvline(1.0, color="black", lw=0.9, ls="--", zorder=0)
    panel.set_yticks(ticks, labels, fontsize=8)
    panel.set_ylim(place, -BAR - GAP / 2)
    panel.set_xlim(0, 1.02 * most)
    panel.set_xlabel(
        "bytes that must move over time, as a part of the copy bandwidth "
        f"({float(rows[0]['copy GB/s']) / 1e3:.3g} TB/s read + written){diamond}",
        fontsize=9,
    )
    what = "Memory-bound kernels, {} x {} where nothing is said".format(*usual)
    if rows[0]["cuda"] != "none":
        what += ", cold in L2"
    figure.suptitle(title(rows, what), fontsize=10)
    finish(figure, [panel], [row["variant"] for row in rows], path)


def rate_of(kernel: Rows) -> str:
    """The text beside a kernel's bars."""
    own, *others = kernel
    if own["us"] == "":
        return "failed"
    best = min((float(row["us"]) for row in others if row["us"] != ""), default=None)
    ratio = f"   {best / float(own['us']):.2f}x best peer" if best else ""
    return f"{float(own['GB/s']) / 1e3:.2f} TB/s{ratio}"


def draw_pipelines(path: Path, rows: Rows) -> None:
    """A panel for each block and pass: milliseconds, and the floor of the GEMMs."""
    parts = groups(rows, "block", "pass")
    heights = [0.5 + 2 * BAR * len(part) for part in parts]
    figure = figure_of(FRAME + sum(heights))
    panels = figure.subplots(len(parts), squeeze=False, height_ratios=heights)[:, 0]
    for panel, part in zip(panels, parts, strict=True):
        most = max([float(row["ms"]) for row in part if row["ms"] != ""], default=1.0)
        for place, row in enumerate(part):
            if row["ms"] == "":
                panel.text(0.006 * most, place, "failed", va="center", color="#b00020", **SMALL)
                continue
            time = float(row["ms"])
            panel.barh(place, time, 0.8, color=COLORS[row["library"]])
            told, end = f"{time:.3g} ms", time
            if row["floor ms"] != "":
                floor = float(row["floor ms"])
                end = max(time, floor)
                panel.plot([floor, floor], [place - 0.4, place + 0.4], color="black", lw=1.6)
                told += f"  {float(row['/ floor']):.2f}x floor"
            panel.text(end + 0.006 * most, place, told, va="center", **SMALL)
        # A variant that was also timed as a CUDA graph has two bars.
        captured = {"graph": ", graph", "not captured": ", not captured"}
        labels = [f"{row['variant']}{captured.get(row['method'], '')}" for row in part]
        panel.set_yticks(range(len(part)), labels, fontsize=8)
        panel.set_ylim(len(part) - 0.4, -0.6)
        panel.set_xlim(0, 1.2 * most)
        panel.set_title(f"{part[0]['block']}, {part[0]['pass']}", fontsize=9, loc="left")
    panels[-1].set_xlabel(
        "ms of a step; black line: the GEMMs' arithmetic at the measured rate", fontsize=9
    )
    one = rows[0]
    what = f"Blocks at T {one['tokens']}, H {one['hidden']}, F {one['intermediate']}"
    figure.suptitle(title(rows, what), fontsize=10)
    finish(figure, panels, [row["library"] for row in rows], path)


def draw_models(path: Path, rows: Rows) -> None:
    """A panel for each model: tokens a second of each variant, and its memory."""
    parts = groups(rows, "model")
    heights = [0.5 + 2 * BAR * len(part) for part in parts]
    figure = figure_of(FRAME + sum(heights))
    panels = figure.subplots(len(parts), squeeze=False, height_ratios=heights)[:, 0]
    libraries = [library_of(row["variant"]) for row in rows]
    for panel, part in zip(panels, parts, strict=True):
        most = max([float(row["tokens/s"]) for row in part if row["tokens/s"] != ""], default=1.0)
        for place, row in enumerate(part):
            if row["tokens/s"] == "":
                panel.text(0.006 * most, place, "failed", va="center", color="#b00020", **SMALL)
                continue
            rate = float(row["tokens/s"])
            panel.barh(place, rate, 0.8, color=COLORS[library_of(row["variant"])])
            text = f"{rate / 1e3:.1f}k"
            if row.get("GiB", "") != "":
                text += f"   {float(row['GiB']):.0f} GiB"
            panel.text(rate + 0.006 * most, place, text, va="center", **SMALL)
        panel.set_yticks(range(len(part)), [row["variant"] for row in part], fontsize=8)
        panel.set_ylim(len(part) - 0.4, -0.6)
        panel.set_xlim(0, 1.15 * most)
        panel.set_title(f"Llama, {part[0]['model']}", fontsize=9, loc="left")
    panels[-1].set_xlabel("tokens/s of training; beside it the peak of memory", fontsize=9)
    figure.suptitle(title(rows, "Whole models, 4 sequences of 2048 tokens a step"), fontsize=10)
    finish(figure, panels, libraries, path)


def library_of(variant: str) -> str:
    """The library of a variant, which its name begins with."""
    return next(name for name in sorted(COLORS, key=len, reverse=True) if variant.startswith(name))


def main(argv: list[str] | None = None) -> None:
    """Draw one CSV file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, help="of kernels.py, pipelines.py or whole_models.py")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="PNG/SVG")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows or blocks with this text")
    options = parser.parse_args(argv)
    if reason := unavailable():
        parser.error(reason)
    try:
        rows = evidence.read(options.csv)
    except OSError as error:
        parser.error(f"{options.csv} cannot be read: {error.strerror}.")
    rows = [
        row
        for row in rows
        if options.only in row.get("row", row.get("block", row.get("model", "")))
    ]
    if rows and "of copy" in rows[0]:
        draw_kernels(options.out, rows)
    elif rows and "floor ms" in rows[0]:
        draw_pipelines(options.out, rows)
    elif rows and "model" in rows[0] and "tokens/s" in rows[0]:
        draw_models(options.out, rows)
    else:
        which = f" with {options.only!r}" * bool(options.only)
        parser.error(
            f"{options.csv} has no rows of kernels.py, pipelines.py or whole_models.py{which}."
        )


if __name__ == "__main__":
    main()
