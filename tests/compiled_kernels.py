"""Kernels that were compiled and spill nothing, recorded by the text that they were compiled from.

``make compiled`` compiles the kernels of all sources that differ from the record and writes it,
``tests/kernels/compiled.json``; ``python tests/compiled_kernels.py name ...`` does so for some.
``make test`` compiles nothing of a source that is as recorded, ``make test-nightly`` everything.

All kernels are compiled for Hopper. Each other architecture gets every kind of kernel, and of a
kind so many that about BUDGET compilations are made in all: 0.25 s each. Hopper's are compiled by
the newest NVRTC that is here and the others' by the oldest: what one takes another may refuse.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nvrtc
from kernel_instantiations import instantiations
from nvrtc import CAPABILITIES, CompileError, Resources

from fuser.cuda import module

RECORD = Path(__file__).parent / "kernels" / "compiled.json"
ALL = (9, 0)
OTHERS = tuple(other for other in CAPABILITIES if other != ALL)
BUDGET = 1900
# Kernels of one compilation, so that no process has minutes of work when the others have none.
TOGETHER = 64
# Strings stay as they are; a comment goes.
LITERAL_OR_COMMENT = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/', re.DOTALL
)

Record = dict[str, dict[str, dict[str, object]]]


# -- which kernels -------------------------------------------------------------


def kind(symbol: str) -> tuple[str, ...]:
    """What stays of a symbol without its types: the kernel, its producer and its store."""
    return tuple(re.findall(r"\w+(?:Producer|Store)\b|^\w+", symbol))


def share(symbols: Sequence[str], capability: tuple[int, int], step: int) -> tuple[str, ...]:
    """The symbols of a source to compile for an architecture: all for Hopper.

    Each of the others gets every ``step``-th symbol of a kind, or one of them, each another one.
    """
    if capability == ALL:
        return tuple(symbols)
    kinds: dict[tuple[str, ...], list[str]] = {}
    for symbol in symbols:
        kinds.setdefault(kind(symbol), []).append(symbol)
    number = OTHERS.index(capability)
    found: list[str] = []
    for alike in kinds.values():
        first = number * max(1, step // len(OTHERS))
        found += alike[first % step :: step] or [alike[number % len(alike)]]
    return tuple(found)


def step_within(known: Mapping[str, Sequence[str]], budget: int = BUDGET) -> int:
    """The step of :func:`share` with which all architectures take about ``budget`` compilations."""
    total = sum(map(len, known.values()))
    return max(1, -(-total * len(OTHERS) // max(1, budget - total)))


@functools.cache
def symbols_of(name: str, capability: tuple[int, int]) -> tuple[str, ...]:
    """The symbols of a source of fuser that are compiled for an architecture."""
    return share(instantiations()[name], capability, step_within(instantiations()))


def library_for(capability: tuple[int, int]) -> ctypes.CDLL:
    """The NVRTC that compiles for an architecture."""
    return nvrtc.libraries()[-1 if capability == ALL else 0]


# -- the record ----------------------------------------------------------------


def digest(
    path: Path, capability: tuple[int, int], symbols: Sequence[str], library: ctypes.CDLL
) -> str:
    """The hash of what kernels are compiled from: symbols, compiler, options, source and headers.

    Comments, blank lines and the spaces between words do not matter, nor where the files are.
    """
    texts = {name: without_comments(text) for name, text in nvrtc.texts_of(path).items()}
    options = nvrtc.portable_options(path, capability, library)
    parts = (nvrtc.version(library), options, sorted(texts.items()), sorted(symbols))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=1024)
def without_comments(text: str) -> str:
    """The lines of a C++ text that have code, with one space between words."""

    def kept(found: re.Match[str]) -> str:
        return " " if found.group().startswith("/") else found.group()

    lines = (" ".join(line.split()) for line in LITERAL_OR_COMMENT.sub(kept, text).splitlines())
    return "\n".join(filter(None, lines))


def read(record: Path = RECORD) -> Record:
    """The record; an empty one if there is none."""
    return json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}


def is_recorded(name: str, capability: tuple[int, int], record: Record) -> bool:
    """Whether the kernels of a source were compiled for an architecture as they are now."""
    entry = record.get(name, {}).get(module.arch_name(capability), {})
    symbols = symbols_of(name, capability)
    path = module.KERNELS / f"{name}.cu"
    return entry.get("digest") == digest(path, capability, symbols, library_for(capability))


def entry_of(name: str, capability: tuple[int, int]) -> dict[str, object]:
    """Compile the kernels of a source for an architecture, as an entry of the record.

    Raises
    ------
    CompileError
        If one does not compile, or keeps data in local memory.
    """
    symbols, library = symbols_of(name, capability), library_for(capability)
    path = module.KERNELS / f"{name}.cu"
    before = digest(path, capability, symbols, library)

    def compiled(first: int) -> list[Resources]:
        part = symbols[first : first + TOGETHER]
        return nvrtc.compiled(module.KERNELS, name, part, capability, library)

    # NVRTC leaves Python's lock while it compiles.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(compiled, range(0, len(symbols), TOGETHER)))
    kernels = [kernel for part in parts for kernel in part]
    in_memory = [str(k) for k in kernels if k.spill_bytes or k.stack_bytes]
    if in_memory:
        raise CompileError("local memory is used:\n" + "\n".join(in_memory))
    if digest(path, capability, symbols, library) != before:
        raise CompileError(f"{name}.cu or one of its headers has changed meanwhile.")
    registers = max(kernel.registers for kernel in kernels)
    return {"digest": before, "kernels": len(kernels), "registers": registers}


def write(names: Sequence[str], record: Path = RECORD) -> int:
    """Compile what differs from the record, and record it; the number of kernels compiled."""
    entries = {name: archs for name, archs in read(record).items() if name in instantiations()}
    count = 0
    for name in names:
        capabilities = nvrtc.capabilities_of(module.KERNELS, name)
        archs = {module.arch_name(capability): capability for capability in capabilities}
        new = {arch: entry for arch, entry in entries.get(name, {}).items() if arch in archs}
        for arch, capability in archs.items():
            if not is_recorded(name, capability, entries):
                new[arch] = entry_of(name, capability)
                count += len(symbols_of(name, capability))
                print(f"{name} for {arch}: {new[arch]['kernels']} kernels", flush=True)
        entries[name] = new
        # After each source, so that what has been compiled stays.
        record.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Record some sources, or all; 1 if a kernel does not compile or spills."""
    parser = argparse.ArgumentParser(
        description="Compile the kernels whose text differs from the record, and record them."
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"of {', '.join(sorted(instantiations()))}"
    )
    names = parser.parse_args(argv).names
    for name in names:
        if name not in instantiations():
            parser.error(f"no source is called {name!r}; --help lists them.")
    if reason := nvrtc.why_unavailable():
        parser.error(reason)
    try:
        count = write(names or list(instantiations()))
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{count} kernels compiled; {RECORD.name} has all of {len(names or instantiations())}.")
    return 0


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent / "cases"))
    sys.exit(main())
