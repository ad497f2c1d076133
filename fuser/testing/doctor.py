"""Doctor: a report of what this machine can run and what is missing."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.metadata
import os
import pkgutil
import platform
import re
import shutil
import statistics
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import networkx
import numpy
import torch

import fuser.cuda
from fuser.basic_ops import BasicLinear, GroupedLinear
from fuser.cuda import module
from fuser.cuda.module import Installation, Obstacle, installation, obstacle
from fuser.cuda.pass_graphs import Switch, graphs_of_process
from fuser.cuda.probe import probe
from fuser.errors import EmulationWarning, FuserError, KernelUnavailable
from fuser.op import BasicOperation
from fuser.precision.availability import USAGES, runs_natively
from fuser.precision.contexts import autocast, default_recipe
from fuser.precision.quantizer_for import role_format
from fuser.recipe import NAMES, recipe_named
from fuser.report.text import columns, format_bytes
from fuser.runtime.pipeline import OperationFuser
from fuser.version import __version__

MINIMUM_TORCH = (2, 11)

OPTIONAL_PACKAGES = (
    ("matplotlib", "plans drawn as pictures", "pip install matplotlib"),
    ("tqdm", "the demo's progress bar", "pip install tqdm"),
)


UNQUANTIZED = {
    "fp32": (torch.float32, (5, 0)),
    "fp16": (torch.float16, (7, 0)),
    "bf16": (torch.bfloat16, (8, 0)),
}
"""Dtypes without a recipe, and the first compute capability whose products are fast in them."""

COLUMNS = 98
"""The width of sentences, which are indented by two columns."""


PRODUCTS = ("forward", "dgrad", "wgrad")
"""The products of a linear in a training step."""

OTHER_OPS = "other ops"


@dataclass(frozen=True)
class Support:
    """How a part of a training step runs: native, emulated or refused, and why if not native.

    A native product multiplies in the format of its operands, an emulated one after they were
    dequantized; another op is native in kernels of fuser, and emulated by operations of torch.
    """

    status: str = "native"
    reason: str | None = None


@dataclass(frozen=True)
class RecipeSupport:
    """How the parts of a training step run under a recipe.

    ``parts`` has an entry for each product of a linear and of experts, such as "linear dgrad", and
    for the other ops. ``is_grouped`` says whether all experts of a product are multiplied at once.
    """

    parts: dict[str, Support]
    is_grouped: bool

    def to_dict(self) -> dict[str, Any]:
        """By part, the status and its reason; and whether experts are multiplied at once."""
        parts = {name: dataclasses.asdict(part) for name, part in self.parts.items()}
        return {**parts, "experts at once": self.is_grouped}


def support(
    capability: tuple[int, int] | None, no_kernels: Obstacle | None
) -> dict[str, RecipeSupport]:
    """How everything runs on a GPU of ``capability``, None for a CPU: by dtype and recipe.

    The products are those that plans of a linear and of experts have there, in 16 bits under a
    recipe. ``no_kernels`` is the reason why other ops have no kernels, None if they have.
    """
    other = Support("emulated", no_kernels.reason) if no_kernels is not None else Support()
    if capability is None:
        other = Support("emulated", "kernels run on CUDA GPUs; here torch does their work.")
    rows: dict[str, RecipeSupport] = {}
    for name in (*UNQUANTIZED, *NAMES):
        parts: dict[str, Support] = {}
        kernels = ""
        for kind in ("linear", "experts"):
            try:
                kernels = planned_kernels(kind, name, capability)
            except FuserError as error:
                parts |= {
                    f"{kind} {product}": Support("refused", str(error)) for product in PRODUCTS
                }
                continue
            for product in PRODUCTS:
                parts[f"{kind} {product}"] = _product(kind, product, name, kernels, capability)
        parts[OTHER_OPS] = other
        rows[name] = RecipeSupport(parts, " x " not in kernels)
    return rows


def planned_kernels(kind: str, name: str, capability: tuple[int, int] | None) -> str:
    """The kernels of a training step of a linear or of experts, as its plan names them.

    ``name`` is that of a recipe, or of a dtype without one.

    Raises
    ------
    FuserError
        If the recipe cannot be used there.
    """
    dtype = UNQUANTIZED[name][0] if name in UNQUANTIZED else torch.bfloat16
    factory: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
    inputs = [torch.empty(512, 128, **factory, requires_grad=True)]
    op: BasicOperation = BasicLinear(128, 128, **factory)
    if kind == "experts":
        inputs.append(torch.full((4,), 128))
        op = GroupedLinear(4, 128, 128, bias=False, **factory)
    pipeline = OperationFuser([op])
    recipe = None if name in UNQUANTIZED else recipe_named(name)
    with autocast(enabled=recipe is not None, recipe=recipe), warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationWarning)  # which the table says
        if capability is None:
            plan = pipeline.plan(*inputs)
        else:
            _, plan = pipeline.plan_for_gpu(capability, *inputs, is_elsewhere=False)
    return ", ".join(step.kernel for step in (*plan.forward, *plan.backward))


def _product(
    kind: str, product: str, name: str, kernels: str, capability: tuple[int, int] | None
) -> Support:
    """How one product of a step runs, of which ``kernels`` are all."""
    where = "a CPU" if capability is None else f"compute capability {_number(capability)}"
    if name in UNQUANTIZED:
        first = UNQUANTIZED[name][1]
        if capability is None or first <= capability:
            return Support()
        return Support("emulated", f"{where} comes before {_number(first)}, the first with {name}.")
    products = [text for text in kernels.split(", ") if "mm" in text]
    (text,) = (text for text in products if _product_of(text) == product)
    if "(emulated)" not in text:
        return Support()
    if capability is None:
        return Support("emulated", "a CPU has no products of quantized operands.")
    recipe = recipe_named(name)
    roles = list(USAGES)[PRODUCTS.index(product)]
    formats = dict.fromkeys(role_format(recipe, role).name for role in roles)
    grouped = "" if kind == "linear" or not runs_natively(recipe, capability) else "grouped "
    return Support(
        "emulated", f"{where} has no {grouped}products of {' and '.join(formats)} operands."
    )


def _product_of(kernel: str) -> str:
    """Which product of a linear a kernel of a plan is."""
    return next((name for name in PRODUCTS[1:] if name in kernel), PRODUCTS[0])


def _number(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@dataclass(frozen=True)
class PresentDevice:
    """A device that pipelines can run on; a CPU has no capability."""

    name: str
    model: str
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class ProbeResult:
    """The result of compiling and running one kernel; ``error`` is None if it was correct."""

    error: str | None
    compile_ms: float = 0.0
    launch_us: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    """Everything that the doctor found; ``str()`` is the report.

    ``obstacle`` is the reason why CUDA kernels are not available, None if they are.
    ``probe`` is the result of one kernel, None if kernels are not available.
    ``compile_failure`` names a kernel that did not compile, None if all did.
    ``optional`` has the version of each optional package, None if it is missing.
    ``graphs`` are the number of the process's CUDA graphs of passes, and the bytes that they hold.
    """

    versions: tuple[tuple[str, str], ...]
    installation: Installation
    devices: tuple[PresentDevice, ...]
    obstacle: Obstacle | None
    probe: ProbeResult | None
    optional: tuple[tuple[str, str | None], ...]
    has_nvidia_driver: bool
    compile_failure: Obstacle | None = None
    graphs: tuple[int, int] = (0, 0)

    @property
    def faults(self) -> tuple[str, ...]:
        """Sentences on packages that are installed but do not work."""
        sentences = []
        if _release(self.installation.torch_version) < MINIMUM_TORCH:
            sentences.append(
                f"torch {self.installation.torch_version} is too old: fuser needs "
                f"{MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]} or later."
            )
        if self.probe is not None and self.probe.error is not None:
            sentences.append(f"CUDA kernels do not work: {self.probe.error}")
        elif self.compile_failure is not None:
            sentences.append(
                f"{self.compile_failure.reason} Torch does the work of kernels. Undo what was "
                "edited in that source, or else reinstall fuser and CuPy."
            )
        return tuple(sentences)

    @property
    def exit_status(self) -> int:
        """0 if fuser can run here, on a CPU too; 1 if something installed is broken."""
        return 1 if self.faults else 0

    @property
    def verdict(self) -> str:
        """One line: whether fuser runs, and on which device."""
        if self.faults:
            return f"fuser does not run correctly here: {self.faults[0].splitlines()[0]}"
        gpu = next((device for device in self.devices if device.capability), None)
        if gpu is None:
            return "fuser runs here, on the CPU in plain torch."
        if self.obstacle is not None:
            return f"fuser runs here, on {gpu.name} ({gpu.model}) with torch's kernels alone."
        return f"fuser runs here, on {gpu.name} ({gpu.model}), and CUDA kernels compile and run."

    @property
    def advice(self) -> tuple[str, ...]:
        """Packages to install and faults to fix, one line each."""
        lines = list(self.faults)
        if _release(self.installation.torch_version) < MINIMUM_TORCH:
            lines.append(f'pip install "torch>={MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]}"')
        if self.obstacle is not None and (self.has_nvidia_driver or self.obstacle.commands):
            lines += [*_wrapped(self.obstacle.reason), *self.obstacle.commands]
        missing = {name for name, version in self.optional if version is None}
        lines += [
            f"{command}   (optional: {use})"
            for name, use, command in OPTIONAL_PACKAGES
            if name in missing
        ]
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as values that JSON has; ``recipes`` are by device, recipe and part."""
        return {
            "fuser": __version__,
            "versions": dict(self.versions),
            "devices": [dataclasses.asdict(device) for device in self.devices],
            "kernels": {
                "are_available": self.obstacle is None and not self.faults,
                "reason": None if self.obstacle is None else self.obstacle.reason,
                "probe": None if self.probe is None else dataclasses.asdict(self.probe),
                "graphs": dict(zip(("count", "bytes"), self.graphs, strict=True)),
            },
            "recipes": {
                device.name: {
                    name: row.to_dict()
                    for name, row in support(device.capability, self.obstacle).items()
                }
                for device in self.devices
            },
            "optional": dict(self.optional),
            "to do": list(self.advice),
            "verdict": self.verdict,
            "exit_status": self.exit_status,
        }

    def __str__(self) -> str:
        sections = (
            (f"fuser {__version__}", ()),
            ("Versions", _aligned(self.versions)),
            ("Devices", _aligned((device.name, device.model) for device in self.devices)),
            ("CUDA kernels", self._kernel_lines()),
            ("Recipes", self._recipe_lines()),
            ("torch.compile", _compile_lines(self.installation.torch_version)),
            ("Optional packages", _aligned((n, v or "not installed") for n, v in self.optional)),
            ("To do", self.advice or ("nothing",)),
        )
        text = [
            f"{title}\n" + "".join(f"  {line}".rstrip() + "\n" for line in part)
            for title, part in sections
        ]
        return "\n".join([*text, self.verdict])

    def _kernel_lines(self) -> tuple[str, ...]:
        lines = _agreement(self.installation)
        if self.obstacle is not None:
            lines += _wrapped(f"not available: {self.obstacle.reason}")
        if self.probe is not None and self.probe.error is None:
            lines.append(
                f"fuser_probe: right values; first call {self.probe.compile_ms:.0f} ms with "
                f"compiling or loading, then {self.probe.launch_us:.1f} us a launch"
            )
        elif self.probe is not None:
            lines += f"fuser_probe failed: {self.probe.error}".splitlines()
        if self.compile_failure is not None:
            lines.append(self.compile_failure.reason)
        elif self.probe is not None and self.probe.error is None:
            lines += _wrapped(f"one kernel of each of {', '.join(one_of_each_source())} compiles")
        lines.append(
            "They quantize, normalize and run pointwise ops; without them, torch does this."
        )
        if self.obstacle is None:
            lines += _wrapped(
                "Passes that repeat are CUDA graphs; fuser.graph_passes(False) or "
                "FUSER_GRAPH_PASSES=0 turns this off."
                if Switch.is_on
                else "Passes that repeat are launched call by call: fuser.graph_passes(False) or "
                "FUSER_GRAPH_PASSES=0 has turned their CUDA graphs off."
            )
            count, nbytes = self.graphs
            if count:
                lines += _wrapped(
                    f"Graphs of passes in this process: {count}, whose temporaries have "
                    f"{format_bytes(nbytes)}; model.plan(x) says which passes are graphs."
                )
        return tuple(lines)

    def _recipe_lines(self) -> tuple[str, ...]:
        """A matrix for each kind of GPU, or else for the CPU: rows are recipes, columns parts."""
        gpus = dict.fromkeys(device.capability for device in self.devices if device.capability)
        lines: list[str] = []
        for capability in tuple(gpus) or (None,):
            where = "CPU" if capability is None else f"sm_{capability[0]}{capability[1]}"
            lines += [*_matrix(where, support(capability, self.obstacle)), ""]
        return (
            *lines,
            *_wrapped(
                "Every recipe that is not refused computes with its format's exact bytes. Emulated "
                "products multiply dequantized operands in fp32, fp16 or bf16. Experts at once are "
                "one product whose rows the host does not read, one by one a product for each. "
                "Other ops quantize, normalize, activate and add."
            ),
            f"fuser.autocast() without a recipe, or with recipe=None, is {default_recipe()};",
            "fuser.autocast(enabled=False) turns quantization off.",
        )


def _matrix(where: str, rows: dict[str, RecipeSupport]) -> Iterator[str]:
    """The rows as a table, and below it the reason of what is not native."""
    groups = ("linear", "", "", "experts", "", "", "", "other")
    heading = (where, *PRODUCTS, *PRODUCTS, "how", "ops")
    cells = []
    for name, row in rows.items():
        *products, other = (part.status for part in row.parts.values())
        cells.append((name, *products, "at once" if row.is_grouped else "one by one", other))
    yield from _aligned([("", *groups), heading, *cells])
    parts: dict[str, dict[str, list[str]]] = {}
    for name, row in rows.items():
        for part, cell in row.parts.items():
            if cell.reason is not None:
                parts.setdefault(cell.reason, {}).setdefault(name, []).append(part)
    for reason, by_recipe in parts.items():
        # Recipes that share a reason share the parts too, in most cases.
        for shared in dict.fromkeys(map(tuple, by_recipe.values())):
            names = [name for name, some in by_recipe.items() if tuple(some) == shared]
            named = "all" if len(names) == len(rows) else ", ".join(names)
            yield from _wrapped(f"{named}; {_joined(shared)}: {reason}")


def _joined(parts: tuple[str, ...]) -> str:
    """The names of parts, with one name for all products of an op."""
    text = ", ".join(parts)
    for kind in ("linear", "experts"):
        text = text.replace(", ".join(f"{kind} {product}" for product in PRODUCTS), kind)
    return text


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS)


def _compile_lines(torch_version: str) -> tuple[str, ...]:
    lines = ("Pipelines are operations of its graphs, also with fullgraph=True.",)
    if _release(torch_version) != (2, 11):
        return lines
    return (
        *lines,
        "torch 2.11 computes wrong gradients of some torch.autograd.Functions in graphs, without",
        "an error (pytorch issue 180642). Pipelines are none; functions of other libraries may be.",
    )


def diagnose() -> Diagnosis:
    """Examine this machine: versions, devices, and one kernel, compiled and run if possible."""
    facts = installation()
    hindrance = obstacle(facts)
    probed = run_probe() if hindrance is None else None
    return Diagnosis(
        versions=_versions(facts),
        installation=facts,
        devices=_devices(),
        obstacle=hindrance,
        probe=probed,
        optional=tuple((name, _version_of(name)) for name, _, _ in OPTIONAL_PACKAGES),
        has_nvidia_driver=shutil.which("nvidia-smi") is not None,
        compile_failure=find_compile_failure() if hindrance is None else None,
        graphs=graphs_of_process(),
    )


def one_of_each_source() -> dict[str, str]:
    """The symbol of one kernel of each source that pipelines use, by the name of the ``.cu``."""
    symbols: dict[str, str] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(fuser.cuda.__path__)):
        launcher = importlib.import_module(f"fuser.cuda.{name}")
        for kernel in getattr(launcher, "instantiations", tuple)():
            symbols.setdefault(kernel.module, kernel.symbol)
    return symbols


def find_compile_failure() -> Obstacle | None:
    """Compile one kernel of each source on the current CUDA device; return the first failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says it
        for name, symbol in one_of_each_source().items():
            try:
                module.kernel(name, symbol, torch.cuda.current_device())
            except KernelUnavailable:
                break
    return module.compile_failure


def run_probe() -> ProbeResult:
    """Compile ``fuser_probe`` on the current CUDA device, run it, check every value, time it."""
    n = 1_000_003
    try:
        x = torch.arange(n, dtype=torch.float32, device="cuda")
        y = torch.full_like(x, float("nan"))
        torch.cuda.synchronize()
        start = time.perf_counter()
        probe(x, y, 0.5)
        torch.cuda.synchronize()
        compile_ms = 1e3 * (time.perf_counter() - start)
        # 0.5 i + i is exact in fp32 for every i here.
        wrong = int((y != 1.5 * x).sum())
        launch_us = 1e6 * statistics.median(_launch_seconds(x, y) for _ in range(5))
    except Exception as error:
        # A broken driver or installation may raise anything; the report contains the error.
        return ProbeResult(f"{type(error).__name__}: {error}")
    if wrong:
        return ProbeResult(f"fuser_probe wrote {wrong} wrong values of {n}.")
    return ProbeResult(None, compile_ms, launch_us)


def _launch_seconds(x: torch.Tensor, y: torch.Tensor, count: int = 100) -> float:
    """Host seconds of one launch, without the device time."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        probe(x, y, 0.5)
    seconds = (time.perf_counter() - start) / count
    torch.cuda.synchronize()
    return seconds


def _versions(facts: Installation) -> tuple[tuple[str, str], ...]:
    built = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built without CUDA"
    if facts.cupy_version is not None and facts.cupy_cuda is not None:
        cupy = f"{facts.cupy_version}, built for CUDA {_cuda_version(facts.cupy_cuda)}"
    elif facts.cupy_packages:
        cupy = f"{' and '.join(facts.cupy_packages)}, not imported"
    else:
        cupy = "not installed"
    driver = 0
    if facts.device_count and facts.torch_cuda:
        driver = _driver_version()
    return (
        ("python", platform.python_version()),
        ("torch", f"{facts.torch_version}, {built}"),
        ("cupy", cupy),
        ("networkx", networkx.__version__),
        ("numpy", numpy.__version__),
        ("driver", f"up to CUDA {_cuda_version(driver)}" if driver else "no CUDA driver in use"),
    )


def _driver_version() -> int:
    """The newest CUDA version that the driver runs, as CUDA writes it; 0 if unknown."""
    version = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        driver.cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def _devices() -> tuple[PresentDevice, ...]:
    devices = [PresentDevice("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        memory = properties.total_memory / 2**30
        model = f"{properties.name}, compute capability {capability[0]}.{capability[1]}"
        devices.append(PresentDevice(f"cuda:{index}", f"{model}, {memory:.0f} GiB", capability))
    return tuple(devices)


def _agreement(facts: Installation) -> list[str]:
    """A line that says whether CuPy and torch are built for one CUDA; empty without both."""
    torch_cuda, cupy_cuda = facts.torch_cuda_major, facts.cupy_cuda_major
    if torch_cuda is None or cupy_cuda is None:
        return []
    verb = "agree" if torch_cuda == cupy_cuda else "disagree"
    return [f"CuPy and torch {verb} on CUDA: {cupy_cuda} and {torch_cuda}"]


def _aligned(rows: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    cells = list(rows)
    return tuple(line[2:] for line in columns(cells, left=len(cells[0])))


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_version(number: int) -> str:
    """CUDA's 1000 * major + 10 * minor as ``major.minor``."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _release(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as ``2.13.0+cpu``."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
