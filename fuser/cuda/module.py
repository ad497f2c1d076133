"""Compilation: CUDA sources to kernel handles, with caches. The only import of CuPy is here."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fuser.chain import headers_in
from fuser.cuda.sources import own_options, shown, source_text
from fuser.errors import FuserWarning, KernelUnavailable, StateError

KERNELS = Path(str(importlib.resources.files("fuser.cuda"))) / "kernels"
"""The folder of the ``.cu`` files; their headers are in ``fuser/*/*.cuh`` below it."""

CUPY_PACKAGES = {12: "cupy-cuda12x", 13: "cupy-cuda13x"}
"""CUDA's major version to the package that is the CuPy for it."""


# -- can kernels run here? ----------------------------------------------------


@dataclass(frozen=True)
class Installation:
    """The installed software and visible devices that CUDA kernels depend on.

    ``torch_cuda`` is the CUDA version that torch was built with, or None.
    ``cupy_packages`` are the distributions that provide CuPy. ``cupy_cuda`` is
    the CUDA version that CuPy was built with, as 1000 * major + 10 * minor; it and
    ``cupy_version`` are None if CuPy was not imported. If its import failed,
    ``cupy_error`` is the reason, and ``lacks_cache`` says whether the reason is the
    folder of compiled kernels, which CuPy 14 creates at its import.
    """

    torch_version: str
    torch_cuda: str | None
    device_count: int
    cupy_packages: tuple[str, ...] = ()
    cupy_version: str | None = None
    cupy_cuda: int | None = None
    cupy_error: str | None = None
    lacks_cache: bool = False

    @property
    def torch_cuda_major(self) -> int | None:
        """CUDA's major version in torch, None without CUDA."""
        return None if self.torch_cuda is None else int(self.torch_cuda.split(".")[0])

    @property
    def cupy_cuda_major(self) -> int | None:
        """CUDA's major version in CuPy, None if CuPy was not imported."""
        return None if self.cupy_cuda is None else self.cupy_cuda // 1000


@dataclass(frozen=True)
class Obstacle:
    """The reason why CUDA kernels are not available, and the commands that remove it."""

    reason: str
    commands: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = ", then ".join(f"`{command}`" for command in self.commands)
        return f"{self.reason} Run {steps}." if steps else self.reason


def installation() -> Installation:
    """Inspect torch, its devices and CuPy. Imports CuPy if exactly one is installed."""
    packages = _cupy_packages()
    facts = Installation(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        device_count=torch.cuda.device_count(),
        cupy_packages=packages,
    )
    # Two CuPy packages overwrite each other's files; importing the mixture may crash.
    if len(packages) > 1 or importlib.util.find_spec("cupy") is None:
        return facts
    try:
        import cupy
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}".strip()
        return replace(facts, cupy_error=sentence, lacks_cache=isinstance(error, OSError))
    return replace(
        facts,
        cupy_version=cupy.__version__,
        cupy_cuda=int(cupy.cuda.driver.get_build_version()),
    )


def obstacle(facts: Installation) -> Obstacle | None:
    """The obstacle to CUDA kernels on such an installation; None if they can run."""
    if facts.torch_cuda is None:
        return Obstacle(
            f"torch {facts.torch_version} is built without CUDA. To use an NVIDIA GPU, install "
            "a CUDA build of torch: https://pytorch.org/get-started/locally."
        )
    if facts.device_count == 0:
        return Obstacle(
            f"torch {facts.torch_version} is built for CUDA {facts.torch_cuda}, but sees no CUDA "
            "device: check `nvidia-smi` and CUDA_VISIBLE_DEVICES."
        )
    package = CUPY_PACKAGES.get(facts.torch_cuda_major or 0)
    if package is None:
        return Obstacle(
            f"torch {facts.torch_version} is built for CUDA {facts.torch_cuda}; fuser's kernels "
            f"need a torch built for CUDA {' or '.join(map(str, CUPY_PACKAGES))}."
        )
    install = f"pip install {package}"
    uninstall = f"pip uninstall -y {' '.join(facts.cupy_packages)}"
    reinstall = (uninstall, install) if facts.cupy_packages else (install,)
    if len(facts.cupy_packages) > 1:
        names = " and ".join(facts.cupy_packages)
        return Obstacle(f"{names} are installed together and overwrite each other.", reinstall)
    if facts.lacks_cache:
        return Obstacle(f"CuPy cannot be imported ({facts.cupy_error}). {_cache_advice()}")
    if facts.cupy_error is not None:
        return Obstacle(f"CuPy cannot be imported ({facts.cupy_error}).", reinstall)
    if facts.cupy_cuda_major is None:
        return Obstacle("CuPy, which compiles fuser's CUDA kernels, is not installed.", (install,))
    if facts.cupy_cuda_major != facts.torch_cuda_major:
        return Obstacle(
            f"CuPy {facts.cupy_version} is built for CUDA {facts.cupy_cuda_major} and torch "
            f"{facts.torch_version} for CUDA {facts.torch_cuda_major}; they must be the same.",
            reinstall,
        )
    return None


compile_failure: Obstacle | None = None
"""The first compile failure of this process, which disables all kernels; None without one."""


def kernels_unavailable() -> str | None:
    """Why CUDA kernels are disabled or cannot run, as a sentence; None if they run."""
    return missing_requirement() if compile_failure is None else str(compile_failure)


@functools.cache
def missing_requirement() -> str | None:
    """The missing requirement of CUDA kernels, as a sentence; computed once a process."""
    hindrance = obstacle(installation())
    return None if hindrance is None else str(hindrance)


def disable_kernels(failure: Obstacle) -> None:
    """Disable all kernels of this process; the first call warns with the reason.

    If one kernel does not compile, mostly none does. If only one fails, PyTorch for everything is
    slower than necessary but just as correct, and one sentence is enough to say what runs.
    """
    global compile_failure
    if compile_failure is None:
        compile_failure = failure
        sentence = f"{failure} From here on torch does the work of kernels."
        warnings.warn(sentence, FuserWarning, stacklevel=2)


def _cupy_packages() -> tuple[str, ...]:
    names = {str(package.metadata["Name"]) for package in importlib.metadata.distributions()}
    return tuple(sorted(n for n in names if re.fullmatch(r"cupy(-cuda\w+|-rocm[\w-]+)?", n)))


# -- compiling ----------------------------------------------------------------


def sources_digest(root: Path) -> str:
    """SHA-256 over the names and contents of every ``.cu`` and ``.cuh`` below ``root``."""
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.cu"), *root.rglob("*.cuh")]):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(contents)}\0".encode())
        digest.update(contents)
    return digest.hexdigest()


def arch_name(capability: tuple[int, int]) -> str:
    """The compiler's name of an architecture, ``(9, 0)`` -> ``sm_90a``.

    From Hopper on, the ``a`` enables the chip's own instructions (wgmma, TMA,
    tcgen05), which the plain name lacks.
    """
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def compile_options(root: Path, capability: tuple[int, int]) -> tuple[str, ...]:
    """The NVRTC options of every kernel, for the sources below ``root``.

    The key of CuPy's disk cache has the ``.cu`` and the options, but no headers: the digest
    gives an edited header a new key. CuPy appends its own ``-arch=sm_90`` at the end; NVRTC then
    keeps the ``a`` of the same number.
    """
    return (
        "-std=c++17",
        f"-I{root}",
        f"-arch={arch_name(capability)}",
        f"-DFUSER_SOURCES={sources_digest(root)}",
    )


@functools.cache
def kernel(name: str | Path, symbol: str, device: int) -> Any:
    """The handle (``cupy.RawKernel``) of a kernel on a device, compiled on first use.

    The source is ``fuser/cuda/kernels/<name>.cu``, or a user's, whose path ``name`` is. ``symbol``
    is an ``extern "C"`` function, or an instantiation of a template as a C++ name expression, such
    as ``fuser_swiglu<float, 4>``.

    KernelUnavailable if CUDA kernels are not available here, or the source does not compile, with
    the compiler's log; after that all kernels are disabled. StateError if the source does not
    exist, has no such kernel, or is a user's and does not compile; other kernels are still taken.
    """
    reason = kernels_unavailable()
    if reason is not None:
        raise KernelUnavailable(f"Kernel {symbol} cannot run. {reason}")
    import cupy

    expressions = (symbol,) if "<" in symbol else ()
    with cupy.cuda.Device(device):
        compiled = _compiled(name, expressions, device)
        try:
            return compiled.get_function(symbol)
        except cupy.cuda.driver.CUDADriverError as error:
            raise StateError(f"{shown(name)} has no kernel {symbol} ({error}).") from error


@functools.cache
def function(name: str | Path, symbol: str, device: int, *, has_dynamic_memory: bool) -> int:
    """The driver's handle (``CUfunction``) of such a :func:`kernel`.

    With ``has_dynamic_memory``, a launch may use all the shared memory that a block can have on the
    device. Without it, a block has 48 KB, which include the kernel's static shared memory.
    """
    handle = kernel(name, symbol, device)
    import cupy

    with cupy.cuda.Device(device) as place:
        if has_dynamic_memory:
            most = place.attributes["MaxSharedMemoryPerBlockOptin"]
            handle.max_dynamic_shared_size_bytes = most - handle.shared_size_bytes
        pointer: int = handle.kernel.ptr
    return pointer


@functools.cache
def driver_launch() -> Callable[..., None]:
    """``cuLaunchKernel``. Its arguments: a function, three sizes of the grid and of a block, bytes
    of dynamic shared memory, a raw stream, and the addresses of ``kernelParams`` and ``extra``."""
    import cupy

    launches: Callable[..., None] = cupy.cuda.driver.launchKernel
    return launches


@functools.cache
def driver_memset() -> Callable[..., None]:
    """``cudaMemsetAsync``. Arguments: an address, a byte, a count of bytes and a raw stream."""
    import cupy

    sets: Callable[..., None] = cupy.cuda.runtime.memsetAsync
    return sets


def bind_context(device: int) -> None:
    """Give this thread the device's context, which the driver needs for a launch.

    A thread has no context before its first call of CUDA's runtime.
    """
    import cupy

    cupy.cuda.runtime.setDevice(device)


@functools.cache
def _compiled(name: str | Path, expressions: tuple[str, ...], device: int) -> Any:
    """The ``cupy.RawModule`` of a source on the current device, ``device``."""
    import cupy

    capability = torch.cuda.get_device_capability(device)
    headers = headers_in(" ".join(expressions))
    user_files = (*headers, name) if isinstance(name, Path) else headers
    module = cupy.RawModule(
        code=source_text(KERNELS, name, headers),
        options=(*compile_options(KERNELS, capability), *own_options(user_files)),
        backend="nvrtc",
        name_expressions=expressions or None,
    )
    try:
        module.compile()
    except Exception as error:
        # A compiler error, no compiler, a compiler that does not know the chip, or a full disk.
        of_stages = f" with {', '.join(map(str, headers))}" if headers else ""
        failure = f"{shown(name)}{of_stages} does not compile for {arch_name(capability)}"
        if user_files and isinstance(error, cupy.cuda.compiler.CompileException):
            raise StateError(f"{failure}:\n{error}") from error
        disable_kernels(_compile_obstacle(failure, error))
        raise KernelUnavailable(f"{failure}:\n{error}") from error
    _loaded.append(module.module)
    return module


_loaded: list[Any] = []
"""The ``cupy.cuda.function.Module`` of each compiled source on its device."""


@atexit.register
def leave_loaded() -> None:
    """Leave the unloading of kernels to the end of the process.

    CuPy unloads a module when its object goes. After an error on the GPU the driver refuses that,
    and Python would print one ignored exception for each module, below the error that counts.
    """
    for module in _loaded:
        module.ptr = 0


def _compile_obstacle(failure: str, error: Exception) -> Obstacle:
    """The first error line of a failed compilation, and the commands that help."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line), lines[0] if lines else "")
    reason = f"{failure} ({type(error).__name__}: {first})."
    if isinstance(error, OSError):
        return Obstacle(f"{reason} {_cache_advice()}")
    return Obstacle(reason, ("python -m fuser doctor",))


def _cache_advice() -> str:
    folder = os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")
    return (
        f"CuPy keeps compiled kernels in {folder}: set CUPY_CACHE_DIR to a folder that can be "
        "written."
    )
