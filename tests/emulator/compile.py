"""CUDA sources to shared libraries for the CPU, with g++ and a cache on disk.

The text of a ``.cu`` is put between a precompiled header, which is CUDA C++ spelled in C++, and a
table of the kernels that are asked for. One thing is not C++ and is rewritten: a declaration of
``__shared__`` memory becomes a reference, or a pointer, to memory that the worker allocates:
between red zones, no better aligned than it must be, and garbage at the beginning of a block.

Results are cached by the hash of everything that goes in, in ``$XDG_CACHE_HOME/fuser-emulator``
(``~/.cache`` without it); the folder may be deleted at any time.

Subnormals are not this file's matter: the worker sets the processor to flush them, as the GPU build
does. ``a * b + c`` is not contracted here, and is on a GPU: where a bit counts, a kernel writes
``fmaf`` or ``__fmul_rn``.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import fuser
from emulator.errors import KernelError
from fuser.chain import headers_in
from fuser.cuda import module as kernel_module
from fuser.cuda.sources import INCLUDE, own_files

HERE = Path(__file__).parent
REPOSITORY = Path(fuser.__file__).parent.parent

SANITIZERS = "address,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero"
# -Og compiles in three quarters of the time of -O1, and with checks of memory as calls in three
# quarters of that; tests spend more on compiling than on running.
FLAGS = (
    *("-std=c++17", "-Og", "-g1", "-fPIC", "-w", "-fno-exceptions", "-fno-threadsafe-statics"),
    "--param=asan-instrumentation-with-call-threshold=0",
    *("-fno-strict-aliasing", "-ffp-contract=off", "-fno-omit-frame-pointer"),
    *(f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all"),
)
# What a kernel source may include: the precompiled header has it, and NVRTC finds it.
CUDA_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cuda_fp4.h")
# The files that may include a header of the emulator, where FUSER_EMULATED is defined, and which.
EMULATOR_HEADERS = {"sm90.cuh": "emulator/sm90.hpp"}

WORKER = ("worker.cpp", "sm90.cpp", "sm90_warpgroups.cpp")
# The worker's arithmetic.
PRODUCTS = "sm90_products.cpp"


# -- what must be there -------------------------------------------------------


@functools.cache
def why_unavailable() -> str | None:
    """Why kernels cannot be emulated here, as a sentence; None if they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"kernels are emulated on x86-64 Linux only, not {platform.machine()}."
    if shutil.which("g++") is None:
        return "there is no g++ to compile kernels for the CPU."
    printed = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    if "/" not in printed.stdout:
        return "g++ comes without AddressSanitizer (libasan)."
    if cuda_include() is None:
        return (
            "CUDA's headers are not there; `pip install nvidia-cuda-runtime-cu12` brings them, "
            "and CUDA_HOME may name a toolkit."
        )
    return None


@functools.cache
def cuda_include() -> Path | None:
    """The folder of ``cuda_bf16.h``, of NVIDIA's wheels or of a toolkit; None without either."""
    nvidia = importlib.util.find_spec("nvidia")
    wheels = (
        [Path(folder) for folder in (nvidia.submodule_search_locations or ())] if nvidia else []
    )
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = [*(w / "cuda_runtime" for w in wheels), *(w / "cu13" for w in wheels), toolkit]
    headers = (folder / "include" for folder in folders)
    return next((folder for folder in headers if (folder / "cuda_bf16.h").is_file()), None)


# -- the cache ----------------------------------------------------------------


@functools.cache
def cache() -> Path:
    """The folder of everything compiled; made if it is not there."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "fuser-emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="fuser-emulator-"))


def _cached(key: str, name: str, make: Callable[[Path], None], *others: str) -> Path:
    """``cache()/key/name``, made by ``make(folder)`` once, whoever asks first, with ``others``.

    Files that are no longer as they were made, as after a full disk, are made anew.
    """
    folder = cache() / key
    folder.mkdir(exist_ok=True)
    files = [folder / file for file in (name, *others)]
    done = folder / f"{name}.done"
    if not _are_as_noted(files, done):
        with locked(folder / f"{name}.lock"):
            if not _are_as_noted(files, done):
                for file in files:
                    file.unlink(missing_ok=True)  # not overwritten: a process may have loaded it
                make(folder)
                done.write_text(_contents(files))
    return folder / name


def _are_as_noted(files: Sequence[Path], done: Path) -> bool:
    try:
        return done.read_text(errors="replace") == _contents(files)
    except OSError:
        return False


def _contents(files: Sequence[Path]) -> str:
    return " ".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process is in here with the same ``path``."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}\0{part}".encode())
    return digest.hexdigest()[:32]


@functools.cache
def _toolchain() -> str:
    """The hash of what goes into every compilation: g++, flags, the emulator's own sources."""
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    own = sorted(path for path in (HERE / "include").rglob("*") if path.is_file())
    own += [HERE / name for name in (*WORKER, PRODUCTS, "worker.hpp")]
    texts = [path.read_text(encoding="utf-8") for path in own]
    include = cuda_include()
    assert include is not None
    cuda = [(include / header).read_text(encoding="utf-8") for header in CUDA_HEADERS]
    # Of the other headers the sizes: where they are differs between clones, which share the cache.
    sizes = sorted(f"{path.name} {path.stat().st_size}" for path in include.glob("*.h"))
    return _digest(version.stdout, *FLAGS, *texts, *cuda, *sizes)


def _compile(arguments: list[str]) -> None:
    command = ["g++", *FLAGS, f"-I{HERE / 'include'}", f"-I{cuda_include()}", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise KernelError(f"The kernels do not compile for the CPU:\n{_trimmed(run.stderr)}")


def _trimmed(log: str) -> str:
    lines = [line for line in log.splitlines() if "/cuda.hpp" not in line]
    more = f"\n... and {len(lines) - 30} lines more" if len(lines) > 30 else ""
    return "\n".join(lines[:30]) + more


# -- the three things that are compiled ---------------------------------------


def worker() -> Path:
    """The executable that runs kernels."""

    def make(folder: Path) -> None:
        # -rdynamic: kernels find threadIdx and barriers in the executable that loads them.
        products = str(folder / "products.o")
        _compile(["-O2", "-c", str(HERE / PRODUCTS), "-o", products])
        sources = (str(HERE / name) for name in WORKER)
        _compile([*sources, products, "-rdynamic", "-ldl", "-o", str(folder / "worker")])

    return _cached(_toolchain(), "worker", make)


def _prelude() -> Path:
    """The header that every source starts with, beside its precompiled form."""

    def make(folder: Path) -> None:
        header = folder / "cuda.hpp"
        shutil.copy(HERE / "include" / "emulator" / "cuda.hpp", header)
        _compile(["-x", "c++-header", str(header), "-o", str(header.with_suffix(".hpp.gch"))])

    return _cached(_toolchain(), "cuda.hpp", make, "cuda.hpp.gch")


def library(sources: Path, module: str | Path, symbols: tuple[str, ...]) -> Path:
    """The shared library with kernels ``symbols`` of ``<sources>/<module>.cu``, or of a user's.

    Headers ``<fuser/**/*.cuh>`` are looked for below ``sources``, then beside fuser's kernels.

    Raises
    ------
    KernelError
        If it does not compile, or includes what no GPU build finds.
    """
    is_stable = _is_stable(sources) and isinstance(module, str)
    make = _library_of_fuser if is_stable and not headers_in(" ".join(symbols)) else _library
    return make(sources, module, symbols)


# Sources that do not change while a process runs.
_STABLE = (kernel_module.KERNELS.resolve(), HERE / "kernels")


@functools.cache
def _is_stable(sources: Path) -> bool:
    """Whether a folder is one of those; each launch asks."""
    return sources.resolve() in _STABLE


def _library(sources: Path, module: str | Path, symbols: tuple[str, ...]) -> Path:
    path = module if isinstance(module, Path) else sources / f"{module}.cu"
    if not path.is_file():
        raise KernelError(f"There is no {_shown(path)}.")
    name = path.stem
    headers = (_headers_of_fuser if _is_stable(sources) else _headers)(sources)
    if isinstance(module, Path):
        headers = headers | _own_headers(module, "")
    included = ""
    for number, top in enumerate(headers_in(" ".join(symbols))):
        own = {f"own{number}/{top.name}": _rewritten(top)}
        headers = headers | own | _own_headers(top, f"own{number}")
        included += f'#include "own{number}/{top.name}"\n'
    text = _translation_unit(included + _rewritten(path), symbols)
    if not included and not isinstance(module, Path):
        headers = _reached(text, headers)
    key = _digest(_toolchain(), text, *headers, *headers.values())

    def make(folder: Path) -> None:
        for header, contents in headers.items():
            target = folder / "headers" / header
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(contents, encoding="utf-8")
        source = folder / "source.cpp"
        source.write_text(text, encoding="utf-8")
        prelude = ["-include", str(_prelude()), f"-I{folder / 'headers'}"]
        _compile([*prelude, "-shared", str(source), "-o", str(folder / f"{name}.so")])

    return _cached(key, f"{name}.so", make)


def _reached(text: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Those of ``headers`` that a source includes, directly or not; others may change."""
    found: dict[str, str] = {}
    left = INCLUDE.findall(text)
    while left:
        name = left.pop()
        if name in headers and name not in found:
            found[name] = headers[name]
            left += INCLUDE.findall(headers[name])
    return dict(sorted(found.items()))


def _headers(sources: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for root in (sources, kernel_module.KERNELS):
        for path in sorted((root / "fuser").rglob("*.cuh")):
            found.setdefault(path.relative_to(root).as_posix(), _rewritten(path))
    return found


_headers_of_fuser = functools.cache(_headers)
_library_of_fuser = functools.cache(_library)


def _own_headers(top: Path, folder: str) -> dict[str, str]:
    """What a user's file includes of his own, as it is named from the folder of ``top``."""
    return {
        os.path.normpath(Path(folder, os.path.relpath(path, top.parent))): _rewritten(path)
        for path in own_files(top)[1:]
    }


# -- rewriting ----------------------------------------------------------------

ALIGNMENT = r"(?:(?:__align__|alignas)\s*\(([^()]*)\)\s*)?"
# `extern __shared__ T x[];` and `__shared__ T x[n][m];`.
SHARED = re.compile(
    rf"\b(extern\s+)?__shared__\s+{ALIGNMENT}([\w:<>,* \t]+?)\s*\b(\w+)((?:\s*\[[^\]]*\])*)\s*;"
)


def _rewritten(path: Path) -> str:
    return _rewritten_text(path, path.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1024)
def _rewritten_text(path: Path, text: str) -> str:
    for included in INCLUDE.findall(text):
        is_known = included.startswith("fuser/") or included in CUDA_HEADERS
        is_known = is_known or EMULATOR_HEADERS.get(path.name) == included
        if not is_known and not (path.parent / included).is_file():
            raise KernelError(
                f"{_shown(path)} includes {included}; kernels include fuser/**/*.cuh and "
                f"{', '.join(CUDA_HEADERS)} alone."
            )
    text = SHARED.sub(_declared, text)
    left = re.search(r"^(?!\s*//).*\b__shared__\b.*$", text, re.MULTILINE)
    if left is not None:
        raise KernelError(
            f"{_shown(path)} declares `{left.group().strip()}`; the emulator understands "
            "`__shared__ [__align__(n)] T name[...];` and `extern __shared__ [__align__(n)] T "
            "name[];`."
        )
    return f'#line 1 "{_shown(path)}"\n{text}'


def _declared(declaration: re.Match[str]) -> str:
    """A declaration of shared memory as C++."""
    extern, alignment, element, name, extents = declaration.groups()
    lines = "\n" * declaration.group().count("\n")
    if extern:
        dynamic = f"fuser_emulator::dynamic_shared({alignment or f'alignof({element})'})"
        return f"{element}* {name} = static_cast<{element}*>({dynamic});{lines}"
    return (
        f"typedef {element} {name}_shared{extents}; "
        f"static fuser_emulator::Shared {name}_memory{{"
        f'"{name}", sizeof({name}_shared), {alignment or f"alignof({name}_shared)"}}}; '
        f"{name}_shared& {name} = "
        f"*static_cast<{name}_shared*>(fuser_emulator::static_shared({name}_memory));{lines}"
    )


def _translation_unit(text: str, symbols: tuple[str, ...]) -> str:
    entries = "\n".join(f'    fuser_emulator::entry("{s}", &{s}),' for s in symbols)
    # In an unnamed namespace, so that what no kernel here uses is not compiled.
    return f"""\
namespace {{
{text}
#line 1 "the kernels asked for"
const fuser_emulator::Entry entries[] = {{
{entries}
}};
}}
extern "C" {{
extern const fuser_emulator::Library fuser_emulator_library = {{entries, {len(symbols)}}};
}}
"""


def _shown(path: Path) -> str:
    return str(path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path)
