"""The command ``python -m fuser scale``: its options and its output."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from fuser.errors import InputError
from fuser.plan.transformers import PRESETS, preset
from fuser.recipe import NAMES, Recipe, recipe_named
from fuser_forecast.draw import check_path, draw
from fuser_forecast.hardware import GPUS, UNMODELLED, Hardware
from fuser_forecast.mesh import Sizes
from fuser_forecast.report import BATCH, TOKENS, scale

# Options that replace a size of the model.
SIZES = {
    "layers": "layers",
    "hidden": "width of the residual",
    "intermediate": "width of the feed-forward block, or of one expert",
    "heads": "heads of attention",
    "kv_heads": "heads of keys and values",
    "head_dim": "width of a head",
    "vocab": "size of the vocabulary",
    "sequence": "tokens of a sequence",
    "experts": "experts of a layer; 0 is a dense model",
    "top_k": "experts of a token",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status.

    Raises
    ------
    InputError
        If sizes do not fit each other.
    """
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its help or its error
        return int(stop.code or 0)
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fuser scale",
        description="Forecast a training step of a transformer on many GPUs: time, traffic, "
        "memory, and the limit of the step, on the fastest mesh that fits into memory. Nothing "
        "runs, and no GPU is needed.",
    )
    add = parser.add_argument
    add("--model", default="llama3-70b", help=f"{', '.join(PRESETS)}; default: llama3-70b")
    for name, text in SIZES.items():
        add(_option(name), type=int, metavar="N", help=f"{text}; default: the model's")
    add("--gpu", choices=GPUS, default="h200", help="default: h200")
    add("--gpus", type=int, default=1024, metavar="N", help="default: 1024")
    add("--fsdp", type=int, metavar="N", help="shards of a weight; default: the fastest")
    add("--tp", type=int, metavar="N", help="tensor parallel GPUs; default: the fastest")
    add("--ep", type=int, metavar="N", help="GPUs that share the experts; default: the fastest")
    add("--replicas", type=int, metavar="N", help="replicas of the shards (HSDP)")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    add(
        "--recipe",
        default="current",
        help=f"{', '.join(NAMES)}, or the name of a class; default: current",
    )
    add("--batch", type=int, default=BATCH, metavar="N", help=f"tokens of a step; default: {BATCH}")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"most tokens of a microbatch on a GPU; default: {TOKENS}, or one sequence",
    )
    add(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        help="keep only the input of every layer for backward; default: if it is faster",
    )
    add("--network", type=float, metavar="GBITS", help="network, Gb/s a GPU; default: the GPU's")
    add("--nvlink", type=float, metavar="GBYTES", help="NVLink, GB/s a GPU; default: the GPU's")
    add("--tflops", type=float, help="rate of the recipe's products, native; default: measured")
    add(
        "--unmodelled",
        type=float,
        metavar="FACTOR",
        help=f"times the modelled step, for what is not modelled; default: {UNMODELLED:g}",
    )
    add(
        "--host",
        type=float,
        metavar="FACTOR",
        help="times the host's time that was measured; 0 leaves the host out; default: 1",
    )
    add("--draw", metavar="FILE", help="draw the table of GPUs too, as .svg or .png")
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.draw is not None:
        check_path(options.draw)  # raises before anything is made or printed
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    model = preset(options.model)
    model = replace(model, **given) if given else model
    recipe = recipe_named(options.recipe)
    report = scale(
        model,
        options.gpus,
        recipe,
        sizes=Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)}),
        batch=options.batch,
        tokens=options.tokens,
        recompute=options.recompute,
        hardware=_hardware(options, recipe),
    )
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    if options.draw is not None:
        # With --json, stdout is JSON and nothing else.
        where = draw(report, options.draw)
        print(f"\nDrawn into {where}.", file=sys.stderr if options.json else sys.stdout)
    return 0


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _hardware(options: argparse.Namespace, recipe: Recipe) -> Hardware:
    """The GPU with the rates that were given, of which one is for the products of the recipe."""
    for name in ("network", "nvlink", "tflops", "unmodelled"):
        rate = getattr(options, name)
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise InputError(f"--{name} is {rate:g}; it must be more than 0.")
    if options.host is not None and not (options.host >= 0 and math.isfinite(options.host)):
        raise InputError(f"--host is {options.host:g}; it must be 0 or more.")
    hardware = GPUS[options.gpu]
    if options.network is not None:
        hardware = replace(hardware, network=options.network * 1e9 / 8)
    if options.nvlink is not None:
        hardware = replace(hardware, nvlink=options.nvlink * 1e9)
    if options.unmodelled is not None:
        hardware = replace(hardware, unmodelled=options.unmodelled)
    if options.host is not None:
        hardware = replace(hardware, host=options.host)
    if options.tflops is not None:
        hardware = hardware.with_products(type(recipe).__name__, options.tflops * 1e12)
    return hardware
