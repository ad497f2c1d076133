"""Command-line options that kernels.py and pipelines.py share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import charts
import torch
from timing import ROUNDS


def new_parser(description: str, sizes: Mapping[str, str]) -> argparse.ArgumentParser:
    """A parser with the shared options; ``sizes`` has more options, each with its help text."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", default=default, choices=["cpu", "cuda"], help="default here: %(default)s"
    )
    for name, text in sizes.items():
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"how often every variant is timed; default: {ROUNDS['cuda']}, on a CPU "
        f"{ROUNDS['cpu']}",
    )
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--commit", help="the commit, where git cannot tell")
    parser.add_argument("--out", type=Path, metavar="CSV", help="a file for the rows")
    parser.add_argument(
        "--chart", type=Path, metavar="PNG/SVG", help="a file for a picture of them"
    )
    return parser


def parsed(
    parser: argparse.ArgumentParser, argv: list[str] | None, sizes: Mapping[str, str]
) -> argparse.Namespace:
    """The parsed and checked options of a parser from :func:`new_parser`."""
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no CUDA device.")
    if options.chart and (reason := charts.unavailable()):
        parser.error(reason)
    for name in (*sizes, "rounds"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1.")
    options.rounds = options.rounds or ROUNDS[options.device]
    return options
