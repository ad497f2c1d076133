"""The text of the demos: the source of the Python standard library, which every machine has."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

# Left out, because a model learns little from them: tests, generated tables, other packages.
SKIPPED_FOLDERS = {
    "dist-packages",
    "distutils",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
# One of this many source files is held out for validation.
FILES_PER_HELD_OUT = 10

Batch = tuple[torch.Tensor, torch.Tensor]
"""Bytes ``[batch, context]`` and, for each of them, the byte that follows."""


@dataclass(frozen=True)
class Corpus:
    """The training text and the held-out text, from the sources under ``root``."""

    root: Path
    training: torch.Tensor
    validation: torch.Tensor

    def to(self, device: str) -> Corpus:
        """The corpus on a device; ``cuda`` is the one that ``torch.cuda.set_device`` chose."""
        return Corpus(self.root, self.training.to(device), self.validation.to(device))


def library_corpus(context: int) -> Corpus | None:
    """This Python's standard library; None, after a message, if it is too short for ``context``."""
    root = Path(sysconfig.get_path("stdlib"))
    corpus = read_corpus(root)
    sizes = len(corpus.training), len(corpus.validation)
    if min(sizes) >= context + 2:
        return corpus
    print(
        f"The Python sources under {root} hold {sizes[0]:,} bytes to train on and "
        f"{sizes[1]:,} to validate, too few for a context of {context}.",
        file=sys.stderr,
    )
    return None


def read_corpus(root: Path) -> Corpus:
    """The Python sources under ``root`` in sorted order, split by file."""
    texts = [path.read_bytes() for path in source_files(root)]
    training = [text for i, text in enumerate(texts) if i % FILES_PER_HELD_OUT]
    validation = texts[::FILES_PER_HELD_OUT]
    # frombuffer refuses an empty text, as on a machine without sources.
    both = (bytearray(b"\n".join(part) or b"\n") for part in (training, validation))
    return Corpus(root, *(torch.frombuffer(text, dtype=torch.uint8) for text in both))


def source_files(root: Path) -> Iterator[Path]:
    """The library's .py files under ``root``, always in the same order."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> Batch:
    """The ``context`` bytes at each of ``starts``, and the bytes that follow them."""
    positions = starts[:, None] + torch.arange(context + 1)
    taken = text[positions.to(text.device)].long()
    return taken[:, :-1], taken[:, 1:]
