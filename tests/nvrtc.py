"""NVRTC from NVIDIA's wheel through ctypes: what a kernel costs on a GPU that is not here.

A kernel is compiled once for the same NVRTC, options, source and headers: its resources are kept on
disk, beside what the emulator compiles, and the folder may be deleted at any time.

``python tests/nvrtc.py [name ...] [--arch sm_90a]`` prints the table of all kernels, or of those of
some sources, for every architecture or for some.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emulator import compile as compilation
from emulator.compile import cuda_include

from fuser.cuda import module

CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
# Where wgmma is.
HOPPER = ((9, 0),)
# CuPy's own, after those of the library.
CUPY_OPTIONS = ("-ftz=true",)
# The first NVRTC that keeps what it compiled.
CACHES = (12, 9)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one architecture: bytes of memory, and registers a thread."""

    symbol: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.arch:8} {self.registers:4} registers {self.spill_bytes:4} spilled "
            f"{self.stack_bytes:4} stack {self.shared_bytes:6} shared  {self.symbol}"
        )


class CompileError(AssertionError):
    """A source that does not compile, or compiles with warnings."""


@functools.cache
def why_unavailable() -> str | None:
    """Why nothing can be compiled here, as a sentence; None if it can."""
    if not libraries():
        return "NVRTC is not there; `pip install nvidia-cuda-nvrtc-cu12` brings it."
    if cuda_include() is None:
        return "CUDA's headers are not there; `pip install nvidia-cuda-runtime-cu12` brings them."
    return None


@functools.cache
def libraries() -> tuple[ctypes.CDLL, ...]:
    """NVRTC of every CUDA version that is here, the oldest first."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = [] if nvidia is None else map(Path, nvidia.submodule_search_locations or ())
    found = [
        path
        for wheels in folders
        for pattern in ("cuda_nvrtc/lib/libnvrtc.so.??", "cu??/lib/libnvrtc.so.??")
        for path in wheels.glob(pattern)
    ]
    return tuple(map(_loaded, sorted(found, key=lambda path: path.name)))


def _loaded(path: Path) -> ctypes.CDLL:
    # What it opens by name, from no folder of its own.
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


def compiled(
    sources: Path,
    name: str,
    symbols: Sequence[str],
    capability: tuple[int, int],
    library: ctypes.CDLL | None = None,
) -> list[Resources]:
    """Compile ``<sources>/<name>.cu`` with fuser's options; what each of ``symbols`` takes.

    By ``library``, the newest NVRTC if it is None. What was compiled before is read from disk.

    Raises
    ------
    CompileError
        If it does not compile, says a warning, or has no such kernel. These are compiled each time.
    """
    library = library or libraries()[-1]
    path = sources / f"{name}.cu"
    kept = compilation.cache() / f"nvrtc-{compilation_key(path, capability, library)}.json"
    known = _known(kept)
    missing = tuple(symbol for symbol in symbols if symbol not in known)
    if missing:
        found = _compile(path, missing, capability, library)
        with compilation.locked(kept.with_suffix(".lock")):
            # Another process may have compiled other kernels of the same source.
            known = _known(kept) | found
            written = kept.with_suffix(".new")
            written.write_text(json.dumps(known))
            written.replace(kept)
    arch = module.arch_name(capability)
    return [Resources(symbol, arch, *known[symbol]) for symbol in symbols]


def _known(kept: Path) -> dict[str, Sequence[int]]:
    """What a file keeps by symbol; nothing if it is not there, or not as it was written."""
    try:
        known = json.loads(kept.read_text())
    except (OSError, ValueError):
        return {}
    values = known.values() if isinstance(known, dict) else [None]
    return known if all(map(_are_resources, values)) else {}


def _are_resources(value: object) -> bool:
    return isinstance(value, list) and [type(number) for number in value] == [int] * 4


def capabilities_of(sources: Path, name: str) -> tuple[tuple[int, int], ...]:
    """The architectures that a source of kernels is for: Hopper alone if it uses its products."""
    texts = texts_of(sources / f"{name}.cu")
    return HOPPER if any(Path(header).name == "sm90.cuh" for header in texts) else CAPABILITIES


def compilation_key(path: Path, capability: tuple[int, int], library: ctypes.CDLL) -> str:
    """The hash of what a compilation depends on: compiler, options, source and its headers."""
    # Where it is differs between clones, which share what was compiled.
    binary = Path(library._name)
    compiler = (*version(library), binary.name, binary.stat().st_size)
    options = portable_options(path, capability, library)
    texts = texts_of(path)
    uses_hash = any("FUSER_SOURCES" in text for text in texts.values())
    parts = [compiler, options, sorted(texts.items())]
    if uses_hash:
        parts.append(_options(path, capability, library))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def portable_options(path: Path, capability: tuple[int, int], library: ctypes.CDLL) -> list[str]:
    """The options of a compilation, without folders and the hash of all sources."""
    ignored = ("-I", "-DFUSER_SOURCES=")
    return [o for o in _options(path, capability, library) if not o.startswith(ignored)]


def texts_of(path: Path) -> dict[str, str]:
    """The texts of a source and of the headers that it includes, directly or not, by their names.

    A header that is not found here is NVRTC's own.
    """
    found: dict[str, str] = {}
    folders = (path.parent, module.KERNELS, cuda_include())
    left = [(path.name, path)]
    while left:
        name, file = left.pop()
        found[name], headers = _text(file, file.stat().st_mtime_ns)
        for header in headers:
            places = (folder / header for folder in folders if folder is not None)
            there = next((place for place in places if place.is_file()), None)
            if there is not None and header not in found:
                left.append((header, there))
    return found


@functools.lru_cache(maxsize=1024)
def _text(path: Path, changed: int) -> tuple[str, tuple[str, ...]]:
    """The text of a file and the names of the headers in it; read again after a change."""
    text = path.read_text(encoding="utf-8", errors="replace")
    includes = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)
    return text, tuple(includes)


def _options(path: Path, capability: tuple[int, int], library: ctypes.CDLL) -> list[str]:
    options = [*module.compile_options(path.parent, capability), *CUPY_OPTIONS]
    # A source elsewhere, in a test, includes fuser's headers too.
    options += [f"-I{module.KERNELS}", f"-I{cuda_include()}", "--ptxas-options=-v"]
    if version(library) >= CACHES:
        # A kernel that comes from the cache, which a machine with a driver has, leaves no log.
        options.append("--no-cache")
    return options


def _compile(
    path: Path, symbols: Sequence[str], capability: tuple[int, int], library: ctypes.CDLL
) -> dict[str, tuple[int, int, int, int]]:
    """Registers and bytes, as of :func:`resources`, of each symbol of a source."""
    options = _options(path, capability, library)
    arch = module.arch_name(capability)
    program = ctypes.c_void_p()
    text = f'#line 1 "{path.name}"\n{path.read_text(encoding="utf-8")}'.encode()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text, b"", 0, None, None))
    try:
        templates = [symbol for symbol in symbols if "<" in symbol]
        for symbol in templates:
            _check(library.nvrtcAddNameExpression(program, symbol.encode()))
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), encoded)
        log = _log(library, program)
        if status != 0 or "warning" in log:
            said = [line for line in log.splitlines() if not line.startswith("ptxas info")]
            raise CompileError(f"{path.name} for {arch}:\n" + "\n".join(said[:40]))
        lowered = {symbol: symbol for symbol in symbols}
        for symbol in templates:
            mangled = ctypes.c_char_p()
            _check(library.nvrtcGetLoweredName(program, symbol.encode(), ctypes.byref(mangled)))
            assert mangled.value is not None
            lowered[symbol] = mangled.value.decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    found = resources(log)
    missing = [symbol for symbol in symbols if lowered[symbol] not in found]
    if missing:
        raise CompileError(f"{path.name} for {arch} has no kernel {', '.join(missing)}.")
    return {symbol: found[lowered[symbol]] for symbol in symbols}


def resources(log: str) -> dict[str, tuple[int, int, int, int]]:
    """Registers, and bytes of spills, stack and shared memory, of each kernel in a ptxas log."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match.group(1)) if match else 0

        found[part.partition("'")[0]] = (
            number(r"Used (\d+) registers"),
            number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            number(r"(\d+) bytes stack frame"),
            number(r"(\d+) bytes smem"),
        )
    return found


def version(library: ctypes.CDLL) -> tuple[int, int]:
    """The version of CUDA that an NVRTC belongs to."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library.nvrtcGetProgramLog(program, buffer))
    return buffer.value.decode()


def _check(status: int) -> None:
    if status != 0:
        raise CompileError(f"NVRTC returned {status}.")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what every kernel of some sources takes, of all of them if none is named.

    Returns how many keep data in local memory; the last line says so.
    """
    from kernel_instantiations import instantiations

    architectures = {module.arch_name(capability): capability for capability in CAPABILITIES}
    parser = argparse.ArgumentParser(
        description="Registers, spills, stack and shared memory of kernels, compiled by NVRTC."
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"of {', '.join(sorted(instantiations()))}"
    )
    parser.add_argument(
        "--arch",
        action="append",
        choices=list(architectures),
        help="may be repeated; default: each of them",
    )
    options = parser.parse_args(argv)
    for name in options.names:
        if name not in instantiations():
            parser.error(f"no source is called {name!r}; --help lists them.")
    if reason := why_unavailable():
        parser.error(reason)
    count = in_memory = 0
    for name in options.names or instantiations():
        for arch in options.arch or architectures:
            capability = architectures[arch]
            if capability not in capabilities_of(module.KERNELS, name):
                continue
            for kernel in compiled(module.KERNELS, name, instantiations()[name], capability):
                print(kernel, flush=True)
                count += 1
                in_memory += bool(kernel.spill_bytes or kernel.stack_bytes)
    print(f"{count} compilations; {in_memory} keep data in local memory")
    return in_memory


if __name__ == "__main__":
    sys.exit(main() > 0)
