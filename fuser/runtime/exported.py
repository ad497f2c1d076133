"""Passes of exported programs: their names contain what a fresh process makes them from.

``torch.export`` stores the arguments of operations. The name of passes is one of them: a pickle of
the pipeline's ops, without the memory of parameters, the facts of the call, and the recipe. Only
classes of fuser, and what torch needs to make tensors without memory, are read from it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
import zlib
from typing import Any

import torch

from fuser.cuda.launch import kernel_refusal
from fuser.errors import StateError
from fuser.recipe import Recipe
from fuser.runtime.compiled_passes import Passes
from fuser.runtime.compiled_runner import copied
from fuser.runtime.compiled_values import Facts
from fuser.runtime.pipeline import OperationFuser
from fuser.torch_private import PICKLED_META_PARAMETERS
from fuser.version import __version__

_PREFIX = "exported "
# Besides classes of fuser: containers, and tensors without memory.
_OTHERS = {
    *(("collections", name) for name in ("OrderedDict", "deque")),
    *(("builtins", name) for name in ("set", "frozenset")),
    *PICKLED_META_PARAMETERS,
}


def exported_name(pipeline: OperationFuser, facts: Facts, recipe: Recipe | None) -> str:
    """The name of passes that :func:`passes_of_export` makes again in any process.

    Refuses ops that cannot be stored, such as one with a process group.
    """
    ops = copied(pipeline).basic_ops
    for op in ops:
        op.__dict__.pop("_next_call", None)
    content = (__version__, list(ops), pipeline.fusions, pipeline.open_channels, facts, recipe)
    data = zlib.compress(pickle.dumps(content), 9)
    name = _PREFIX + base64.b85encode(data).decode()
    passes_of_export(name)  # which refuses what another process may not have
    return name


def is_exported(name: str) -> bool:
    """Whether this is a name of :func:`exported_name`."""
    return name.startswith(_PREFIX)


def passes_of_export(name: str) -> Passes:
    """The passes with a name of :func:`exported_name`."""
    data = zlib.decompress(base64.b85decode(name.removeprefix(_PREFIX)))
    version, *rest = _Unpickler(io.BytesIO(data)).load()
    if version != __version__:
        raise StateError(
            f"A program was exported with fuser {version}, and this is fuser {__version__}. Export "
            "it again."
        )
    ops, fusions, open_channels, facts, recipe = rest
    pipeline = OperationFuser(ops, fusions, open_channels=open_channels)
    here = facts._replace(no_kernels=kernel_refusal(facts.device))
    return Passes(copied(pipeline), here, recipe)


class _Unpickler(pickle.Unpickler):
    """Reads classes of fuser, dtypes, and tensors without memory; nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if module.partition(".")[0] == "fuser":
            named = None
            with contextlib.suppress(ModuleNotFoundError, AttributeError):  # of another version
                named = super().find_class(module, name)
            # A name with dots reaches what a module of fuser imports.
            if isinstance(named, type) and (named.__module__, named.__qualname__) == (module, name):
                return named
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise StateError(
            f"An exported program names {module}.{name}, which no pipeline of fuser contains."
            " Export it again with this version."
        )
