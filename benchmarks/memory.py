"""Peak memory of a training step under every recipe and backward override, against bf16.

A stack of LayerNormMLP blocks runs forward and backward on random rows, after
one step that is not counted. The peaks include parameters and input, and the
gradients of the parameters, which the step makes. "Held until backward" is the
memory between forward and backward without parameters and input. MB are 10^6
bytes.

    python benchmarks/memory.py --out benchmarks/results/memory_cpu.csv
    python benchmarks/memory.py --recipes mxfp8 --breakdown
    python benchmarks/memory.py --device cuda --tokens 8192 --width 4096 --hidden 16384 --layers 8
"""

from __future__ import annotations

import argparse
import contextlib
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from evidence import environment
from memory_meter import METHODS, Usage, measure

import fuser
from fuser import recipe
from fuser.tensors import QuantizedTensor

RECIPES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "rowwise": recipe.Float8RowwiseScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
OVERRIDES = (None, *recipe.BACKWARD_OVERRIDES)
MOST_HELD = 0.66
# Number of largest sites in a printed breakdown.
SITES = 10
SMALL: dict[str, Any] = {"fontsize": 8, "family": "monospace"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its input."""

    layers: int = 24
    tokens: int = 1024
    width: int = 256
    hidden: int = 1024


@dataclass(frozen=True)
class Case:
    """One way to train: in bf16, or under a recipe, with plain or quantized parameters."""

    recipe: str | None = None
    override: str | None = None
    has_quantized_parameters: bool = False
    keeps_everything: bool = False

    @property
    def columns(self) -> tuple[str, str, str]:
        """Recipe, override and parameters as text."""
        if self.recipe is None:
            return "bf16", "all kept" if self.keeps_everything else "", "bf16"
        parameters = "quantized" if self.has_quantized_parameters else "bf16"
        return self.recipe, self.override or "none", parameters

    def __str__(self) -> str:
        return " ".join(filter(None, self.columns[: 3 if self.recipe else 2]))

    def make_recipe(self) -> fuser.recipe.Recipe | None:
        """The recipe, independent of the environment's override."""
        return RECIPES[self.recipe](backward_override=self.override) if self.recipe else None


@dataclass(frozen=True)
class Row:
    """The memory of one case in bytes; ``forward`` and ``backward`` count from the step's start."""

    case: Case
    parameters: int
    input: int
    forward: Usage
    backward: Usage

    @property
    def standing(self) -> int:
        """Bytes alive before, during and after the step."""
        return self.parameters + self.input

    @property
    def held(self) -> int:
        """Bytes alive between forward and backward, without parameters and input."""
        return self.forward.end

    @property
    def forward_peak(self) -> int:
        """The peak of forward."""
        return self.standing + self.forward.peak

    @property
    def backward_peak(self) -> int:
        """The peak of backward."""
        return self.standing + self.backward.peak

    @property
    def peak(self) -> int:
        """The peak of the step."""
        return max(self.forward_peak, self.backward_peak)


def cases(names: Sequence[str]) -> Iterator[Case]:
    """bf16 that keeps everything for backward, and as by default; every case of these recipes.

    Delayed scaling takes no override. Before its first step it has no scale for
    a weight, so it has no quantized parameters here.
    """
    yield Case(keeps_everything=True)
    yield Case()
    for name, is_quantized, override in product(names, (False, True), OVERRIDES):
        if name != "delayed" or (override is None and not is_quantized):
            yield Case(name, override, is_quantized)


def measured(case: Case, sizes: Sizes, device: str, *, with_sites: bool = False) -> Row:
    """Build the model, warm it up and count one step."""
    torch.manual_seed(0)
    chosen = case.make_recipe()
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    with fuser.quantized_model_init(case.has_quantized_parameters, recipe=chosen):
        blocks = [
            fuser.modules.LayerNormMLP(sizes.width, sizes.hidden, **options)
            for _ in range(sizes.layers)
        ]
    model = torch.nn.Sequential(*blocks)
    x = torch.randn(sizes.tokens, sizes.width, requires_grad=True, **options)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        budget = fuser.activation_memory_budget(None if case.keeps_everything else 1)
        with budget, fuser.autocast(recipe=chosen) if chosen else contextlib.nullcontext():
            losses.append(model(x).sum())

    def backward() -> None:
        losses.pop().backward()

    # Plans, recipes' state and workspaces of libraries are made in the first step.
    forward()
    backward()
    x.grad = None
    model.zero_grad()
    usages = measure({"forward": forward, "backward": backward}, device, with_sites=with_sites)
    return Row(case, parameter_bytes(model), x.untyped_storage().nbytes(), **usages)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters; a quantized parameter counts by its buffers."""
    count = 0
    for parameter in model.parameters():
        buffers: Iterable[torch.Tensor | None] = [parameter]
        if isinstance(parameter, QuantizedTensor):
            buffers = parameter.buffers().values()
        count += sum(b.untyped_storage().nbytes() for b in buffers if b is not None)
    return count


# -- results ------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """The rows as text, in MB; the last column divides by the first row's peak, that of bf16."""
    lines = [
        f"{'':36}{'':10}{'held until':>12}{'peak in':>10}{'peak in':>10}{'':10}{'':8}",
        f"{'recipe':<8}{'override':<16}{'parameters':<12}{'params':>10}{'backward':>12}"
        f"{'forward':>10}{'backward':>10}{'peak':>10}{'peak':>8}",
        f"{'':36}{'MB':>10}{'MB':>12}{'MB':>10}{'MB':>10}{'MB':>10}{'/ bf16':>8}",
    ]
    for row in rows:
        name, override, parameters = row.case.columns
        megabytes = [
            count / 1e6
            for count in (row.parameters, row.held, row.forward_peak, row.backward_peak, row.peak)
        ]
        lines.append(
            f"{name:<8}{override:<16}{parameters:<12}"
            "{:>10.1f}{:>12.1f}{:>10.1f}{:>10.1f}{:>10.1f}".format(*megabytes)
            + f"{row.peak / rows[0].peak:>8.2f}"
        )
    return "\n".join(line.rstrip() for line in lines)


def findings(rows: Sequence[Row]) -> str:
    """Two claims checked on the rows, with the cases that contradict them."""
    everything, *others = rows
    held = {row.case: row.held / everything.held for row in others}
    quantized = {
        row.case: row.peak / everything.peak for row in others if row.case.has_quantized_parameters
    }
    claim = f"at most {MOST_HELD} of what bf16 holds until backward if everything is kept"
    return "\n".join(
        [
            _finding(claim, held, MOST_HELD),
            _finding("with quantized parameters the peak is below that of bf16", quantized, 1),
        ]
    )


def _finding(claim: str, ratios: Mapping[Case, float], most: float) -> str:
    exceptions = [f"{case} ({ratio:.2f}x)" for case, ratio in ratios.items() if ratio > most]
    told = f"{claim}: {len(ratios) - len(exceptions)} of {len(ratios)} cases"
    return f"{told}; not {', '.join(exceptions)}." if exceptions else f"{told}."


def breakdown(row: Row) -> str:
    """The memory at the peak of the step, by allocation site."""
    phases = {"forward": row.forward, "backward": row.backward}
    name, usage = max(phases.items(), key=lambda item: item[1].peak)
    lines = [
        f"{row.case}: at the peak in {name} {row.peak / 1e6:.1f} MB are alive; of them "
        f"{row.standing / 1e6:.1f} are parameters and input, and the step allocated"
    ]
    sites = list(usage.sites.items())
    shown = [*sites[:SITES], ("elsewhere", sum(size for _, size in sites[SITES:]))]
    return "\n".join([*lines, *(f"{size / 1e6:>8.1f}  {site}" for site, size in shown)])


def write_csv(
    path: Path, rows: Sequence[Row], sizes: Sizes, where: Mapping[str, object], method: str
) -> None:
    """Write the rows in bytes, each with machine, commit, sizes and method."""
    records = [
        {
            **where,
            **asdict(sizes),
            "method": method,
            **dict(zip(("recipe", "override", "parameters"), row.case.columns, strict=True)),
            "parameter bytes": row.parameters,
            "input bytes": row.input,
            "bytes held until backward": row.held,
            "forward peak bytes": row.forward_peak,
            "backward peak bytes": row.backward_peak,
            "peak bytes": row.peak,
            "peak / bf16": round(row.peak / rows[0].peak, 3),
        }
        for row in rows
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def draw(path: Path, rows: Sequence[Row], sizes: Sizes) -> None:
    """Draw a bar for each case: constant memory, memory held until backward, and the peak.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 1.4 + 0.27 * len(rows)), layout="constrained")
    panel = figure.subplots()
    # Cases of one recipe and one kind of parameters are side by side.
    groups = [(row.case.recipe, row.case.has_quantized_parameters) for row in rows]
    gaps = accumulate(0.6 * (a != b) for a, b in zip(groups, [groups[0], *groups], strict=False))
    places = [i + gap for i, gap in enumerate(gaps)]
    layers = (
        ("at the peak: gradients and temporaries", "#c6dbef", [r.peak for r in rows]),
        ("held until backward", "#6baed6", [r.standing + r.held for r in rows]),
        ("parameters and input", "#08519c", [r.standing for r in rows]),
    )
    for label, color, counts in layers:
        panel.barh(places, [c / 1e6 for c in counts], 0.8, color=color, label=label)
    edge = 1.01 * max(row.peak for row in rows) / 1e6
    for place, row in zip(places, rows, strict=True):
        ratio = row.peak / rows[0].peak
        panel.text(edge, place, f"{row.peak / 1e6:7.1f}  {ratio:.2f}x", va="center", **SMALL)
    panel.axvline(rows[0].peak / 1e6, color="black", lw=0.8, ls="--")
    labels = ["{:<8}{:<15}{:<9}".format(*row.case.columns) for row in rows]
    panel.set_yticks(places, labels, **SMALL)
    panel.set_ylim(places[-1] + 0.7, -0.7)
    panel.set_xlabel("MB")
    figure.suptitle(
        f"Memory of a training step: {sizes.layers} blocks LayerNormMLP({sizes.width}, "
        f"{sizes.hidden}) on {sizes.tokens} tokens",
        fontsize=10,
    )
    figure.legend(loc="outside lower center", ncols=len(layers), frameon=False, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


# -- command line -------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    default = Sizes()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, value in asdict(default).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument(
        "--breakdown", action="store_true", help="who allocated what is alive at a peak; CPU only"
    )
    parser.add_argument("--out", type=Path, help="CSV file to write, and a chart .png beside it")
    options = parser.parse_args(argv)
    if options.breakdown and options.device != "cpu":
        parser.error(f"--breakdown looks into torch's CPU allocator; --device is {options.device}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no CUDA device.")
    sizes = Sizes(**{name: getattr(options, name) for name in asdict(default)})
    for name, value in asdict(sizes).items():
        if value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1.")

    where = environment(options.device, torch.bfloat16)
    rows = [
        measured(case, sizes, options.device, with_sites=options.breakdown)
        for case in cases(options.recipes)
    ]
    print("  ".join(f"{name} {value}" for name, value in {**where, **asdict(sizes)}.items()))
    print(f"Counted: {METHODS[options.device]}.\n\n{table(rows)}\n\n{findings(rows)}")
    if options.breakdown:
        print("\n" + "\n\n".join(map(breakdown, rows)))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_csv(options.out, rows, sizes, where, METHODS[options.device])
        try:
            draw(options.out.with_suffix(".png"), rows, sizes)
        except ImportError:
            print("\nNo chart: drawing it needs matplotlib; pip install matplotlib.")


if __name__ == "__main__":
    main()
