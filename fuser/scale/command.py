"""The command ``python -m fuser scale``: its options and its output."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from typing import Any

from fuser.errors import InputError
from fuser.recipe import NAMES, Recipe, recipe_named
from fuser.scale.draw import check_path, draw
from fuser.scale.hardware import H200, Hardware
from fuser.scale.mesh import make_mesh
from fuser.scale.model import PRESETS, preset
from fuser.scale.report import BATCH, TOKENS, scale

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


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of ``python -m fuser``."""
    parser = commands.add_parser(
        "scale",
        help="model a training step on many GPUs",
        description="Model a training step of a transformer on many H200: time, traffic, memory, "
        "and the limit of the step. Nothing runs, and no GPU is needed.",
    )
    add = parser.add_argument
    add("--model", default="llama3-70b", help=f"{', '.join(PRESETS)}; default: llama3-70b")
    for name, text in SIZES.items():
        add(_option(name), type=int, metavar="N", help=f"{text}; default: the model's")
    add("--gpus", type=int, default=1024, metavar="N", help="default: 1024")
    add("--fsdp", type=int, metavar="N", help="shards of a weight; default: at most 64")
    add("--tp", type=int, metavar="N", help="tensor parallel GPUs; default: as many as fit a node")
    add(
        "--ep",
        type=int,
        metavar="N",
        help="GPUs that share the experts; default: as many as fit a node",
    )
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
    add("--recompute", action="store_true", help="keep only the input of every layer for backward")
    add("--network", type=float, metavar="GBITS", help="network, Gb/s a GPU; default: 400")
    add("--nvlink", type=float, metavar="GBYTES", help="NVLink, GB/s a GPU; default: 450")
    add("--tflops", type=float, help="rate of the recipe's products, native; default: measured")
    add("--draw", metavar="FILE", help="draw the table of GPUs too, as .svg or .png")
    add("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Print the report; returns the exit status.

    Raises
    ------
    InputError
        If sizes do not fit each other.
    """
    if options.draw is not None:
        check_path(options.draw)  # raises before anything is made or printed
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    model = preset(options.model)
    model = replace(model, **given) if given else model
    recipe = recipe_named(options.recipe)
    names = ("gpus", "fsdp", "tp", "ep", "replicas", "gpus_per_node")
    mesh = make_mesh(model, **{name: getattr(options, name) for name in names})
    report = scale(
        model,
        mesh,
        recipe,
        batch=options.batch,
        tokens=options.tokens,
        recompute=options.recompute,
        hardware=_hardware(options, recipe),
        fsdp=options.fsdp,
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
    """An H200 with the rates that were given, of which one is for the products of the recipe."""
    for name in ("network", "nvlink", "tflops"):
        rate = getattr(options, name)
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise InputError(f"--{name} is {rate:g}; it must be more than 0.")
    hardware = H200
    if options.network is not None:
        hardware = replace(hardware, network=options.network * 1e9 / 8)
    if options.nvlink is not None:
        hardware = replace(hardware, nvlink=options.nvlink * 1e9)
    if options.tflops is not None:
        rate = {type(recipe).__name__: options.tflops * 1e12}
        hardware = replace(
            hardware,
            dense={**hardware.dense, **rate},
            grouped={**hardware.grouped, **rate},
            products_are_given=True,
        )
    return hardware
