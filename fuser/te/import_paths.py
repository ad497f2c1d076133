"""Transformer Engine's import paths, under which programs written for it find this library.

With ``FUSER_AS_TE=1`` in the environment ``import fuser`` calls :func:`install`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fuser.errors import InputError, StateError

ROOT = "transformer_engine"
EXTENSION = "transformer_engine_torch"
"""The module of bindings, of which the element types are here."""
DISTRIBUTION = "transformer-engine"
VERSION = "2.11.0"
"""The version that programs are told, unless :func:`install` gets another: names and arguments
that programs ask for up to it are here or raise."""

_HERE = "fuser.te.pytorch"
_FACTORIES = (
    "quantization_current_scaling",
    "quantization_factory_base",
    "quantization_factory_zoo",
    "quantization_nvfp4",
    "quantization_recipes_base",
    "quantization_ref_current_scaling",
    "quantization_ref_nvfp4",
    "quantizer_factories",
    "quantizer_factory_zoo",
    "reference_current_scaling",
    "reference_nvfp4",
)
"""Modules of factories for custom recipes, in the names of several versions."""
SOURCES: dict[str, tuple[str, ...]] = {
    "": (),
    "common": (),
    "common.recipe": (f"{_HERE}.recipes", "fuser.recipe"),
    "pytorch": (_HERE,),
    "pytorch.attention": (f"{_HERE}.attention", f"{_HERE}.rope", f"{_HERE}.transformer"),
    "pytorch.attention.dot_product_attention": (f"{_HERE}.attention",),
    "pytorch.attention.multi_head_attention": (f"{_HERE}.transformer",),
    "pytorch.attention.rope": (f"{_HERE}.rope",),
    "pytorch.cpu_offload": (f"{_HERE}.cpu_offload",),
    "pytorch.cross_entropy": (f"{_HERE}.cross_entropy",),
    "pytorch.custom_recipes": (),
    **{f"pytorch.custom_recipes.{name}": (f"{_HERE}.custom_recipes",) for name in _FACTORIES},
    "pytorch.distributed": (f"{_HERE}.distributed",),
    "pytorch.float8_tensor": (f"{_HERE}.tensors",),
    "pytorch.fp8": (f"{_HERE}.state", f"{_HERE}.recipes", "fuser.recipe"),
    "pytorch.graph": (f"{_HERE}.graph",),
    "pytorch.module": (f"{_HERE}.layers", f"{_HERE}.padding", f"{_HERE}.userbuffers"),
    "pytorch.module.base": (f"{_HERE}.layers", f"{_HERE}.userbuffers"),
    "pytorch.ops": ("fuser.te.pytorch.operations", "fuser.ops"),
    "pytorch.ops.basic": ("fuser.te.pytorch.operations", "fuser.basic_ops"),
    "pytorch.ops.fused": ("fuser.fused_ops",),
    "pytorch.ops.fuser": ("fuser.ops.fuser",),
    "pytorch.ops.linear": ("fuser.ops.linear",),
    "pytorch.ops.op": ("fuser.ops.op",),
    "pytorch.ops.sequential": ("fuser.ops.sequential",),
    "pytorch.optimizers": (f"{_HERE}.optimizers",),
    "pytorch.permutation": (f"{_HERE}.permutation",),
    "pytorch.quantization": (f"{_HERE}.state",),
    "pytorch.router": (f"{_HERE}.router",),
    "pytorch.tensor": (f"{_HERE}.tensors", f"{_HERE}.master_weights"),
    "pytorch.tensor.float8_blockwise_tensor": (f"{_HERE}.tensors",),
    "pytorch.tensor.float8_tensor": (f"{_HERE}.tensors",),
    "pytorch.tensor.hybrid_tensor": (f"{_HERE}.tensors",),
    "pytorch.tensor.identity_tensor": (f"{_HERE}.tensors",),
    "pytorch.tensor.mxfp8_tensor": (f"{_HERE}.tensors",),
    "pytorch.tensor.nvfp4_tensor": (f"{_HERE}.tensors",),
    "pytorch.tensor.utils": (f"{_HERE}.master_weights",),
    "pytorch.transformer": (f"{_HERE}.transformer",),
}
"""For each path below ``transformer_engine``, the modules that have its names."""

_asked: Counter[str] = Counter()


class _ImportPath(ModuleType):
    """A module of Transformer Engine's name, with names of this library's modules."""

    def __init__(self, name: str, sources: tuple[str, ...]) -> None:
        super().__init__(name, f"fuser, under the import path {name}.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__package__ = name
        self._sources = sources

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [
                name for source in self._sources for name in importlib.import_module(source).__all__
            ]
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        for source in self._sources:
            module = importlib.import_module(source)
            if name in module.__all__:
                value = getattr(module, name)
                self.__dict__[name] = value
                return value
        _asked[f"{self.__name__}.{name}"] += 1
        raise AttributeError(
            f"{self.__name__} is fuser here, which has no {name!r}. Use another way in the "
            "program; fuser.te.missing() lists what it has asked for."
        )

    def __dir__(self) -> list[str]:
        names = set(self.__dict__)
        for source in self._sources:
            names.update(importlib.import_module(source).__all__)
        return sorted(name for name in names if name != "_sources")


class _Paths:
    """A finder on ``sys.meta_path``: notes submodules that are not here, and has the version."""

    def __init__(self, version: str) -> None:
        self.version = version

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.startswith(f"{ROOT}."):
            _asked[fullname] += 1

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterable[importlib.metadata.Distribution]:
        name = (context.name or DISTRIBUTION).replace("_", "-").lower()
        return [_Distribution(self.version)] if name == DISTRIBUTION else []


class _Distribution(importlib.metadata.Distribution):
    """The distribution of :data:`ROOT`, for programs that ask importlib for its version."""

    def __init__(self, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {ROOT} is fuser here, without files. Use those of fuser.")


def install(version: str = VERSION) -> None:
    """Let ``import transformer_engine`` and its submodules find this library.

    Names that are not here raise AttributeError or ImportError, so that a program that has a way
    without them takes it. A second call has no effect.

    Parameters
    ----------
    version
        What programs are told as ``transformer_engine.__version__`` and by ``importlib.metadata``:
        many take other ways for other versions.

    Raises
    ------
    StateError
        If the real library has been imported.
    InputError
        If it is installed under another version already.
    """
    present = sys.modules.get(ROOT)
    if isinstance(present, _ImportPath):
        if present.__version__ != version:
            raise InputError(
                f"fuser.te.install got the version {version!r}, and is installed as "
                f"{present.__version__!r} already: programs may have read it. Give it in the first "
                "call."
            )
        return
    if present is not None:
        place = getattr(present, "__file__", None) or "memory"
        raise StateError(
            f"fuser.te.install: the real {ROOT} has been imported, from {place}. Call install() "
            "before anything imports it."
        )
    paths = {
        path: _ImportPath(f"{ROOT}.{path}" if path else ROOT, sources)
        for path, sources in SOURCES.items()
    }
    paths[""].__dict__["__version__"] = version
    for path, module in paths.items():
        parent, _, name = path.rpartition(".")
        if path:
            paths[parent].__dict__[name] = module
    sys.modules.update((module.__name__, module) for module in paths.values())
    sys.modules[EXTENSION] = _ImportPath(EXTENSION, (f"{_HERE}.element_types",))
    sys.meta_path.insert(0, _Paths(version))
    if (recipes := f"{_HERE}.recipes") in sys.modules:
        sys.modules[recipes].take_name()


def is_installed() -> bool:
    """Whether ``import transformer_engine`` gives this library."""
    return isinstance(sys.modules.get(ROOT), _ImportPath)


def missing() -> dict[str, int]:
    """The names that programs have asked for and not got, and how often; the most asked first.

    A name such as ``transformer_engine.pytorch.ep`` is an attribute or a module.
    """
    return dict(_asked.most_common())


def program(arguments: Sequence[str]) -> Callable[[], None]:
    """What runs a script with its arguments, or a module after ``-m``, as Python does.

    Raises
    ------
    InputError
        If there is no such script, or no module after ``-m``.
    """
    script, *rest = arguments
    if script == "-m" and not rest:
        raise InputError("python -m fuser te -- -m MODULE got no module: give its name.")
    if script != "-m" and not Path(script).is_file():
        raise InputError(
            f"python -m fuser te -- SCRIPT got {script!r}, which is not a file; a module is run by "
            "python -m fuser te -- -m MODULE."
        )

    def run() -> None:
        sys.argv = rest if script == "-m" else [script, *rest]
        if script == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")

    return run
