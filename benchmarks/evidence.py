"""Results as CSV rows, each with machine, versions, commit and date."""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fuser.cuda.module import kernels_unavailable

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


def environment(device: str, dtype: torch.dtype) -> dict[str, object]:
    """The machine and the commit of the figures."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    ).stdout.strip()
    chip = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    return {
        "device": chip,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "commit": commit or "unknown",
    }


def provenance(device: str, dtype: torch.dtype, commit: str | None = None) -> dict[str, object]:
    """The machine, the versions, the commit and the date, on which figures depend.

    ``commit`` names the commit if git cannot.
    """
    where = environment(device, dtype)
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        **where,
        "cuda": (torch.version.cuda if device == "cuda" else None) or "none",
        "fuser runs": "kernels" if device == "cuda" and not kernels_unavailable() else "references",
        "commit": commit or where["commit"],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


class Sink:
    """A CSV file that gets each row at once, so that an interrupted run keeps its rows.

    Without a path it writes nothing.
    """

    def __init__(self, path: Path | None, where: Mapping[str, object]) -> None:
        self.path, self.where = path, where
        self.has_header = False

    def write(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows. The first row decides the columns."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mode = "a" if self.has_header else "w"
        with self.path.open(mode, newline="") as file:
            writer = csv.DictWriter(file, [*self.where, *rows[0]])
            if not self.has_header:
                writer.writeheader()
                self.has_header = True
            writer.writerows({**self.where, **row} for row in rows)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def progress(items: Sequence[Any], what: str) -> Iterator[Any]:
    """The items, with a progress bar if tqdm and a terminal are there, else a line at the start."""
    if tqdm is None or not sys.stderr.isatty():
        print(f"{what}: {len(items)}", file=sys.stderr, flush=True)
        return iter(items)
    bar: Iterator[Any] = tqdm(items, desc=what, leave=False, dynamic_ncols=True, disable=None)
    return bar


def say(text: str) -> None:
    """Print at once; above a progress bar if there is one."""
    if tqdm is None:
        print(text, flush=True)
    else:
        tqdm.write(text)
        sys.stdout.flush()
