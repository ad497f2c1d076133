"""Peers: torch, and other libraries that can be imported, for comparison with fuser.

Each function here returns calls by the name of the library, and none if the library is absent. A
library may only fail inside the call, so that the other variants still run.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from timing import Call

PACKAGES = {"torchao": "torchao", "Liger": "liger_kernel", "TE": "transformer_engine.pytorch"}

Calls = dict[str, Call]


@functools.cache
def imported(name: str) -> ModuleType | None:
    """The module; None if it, or a library that it needs, cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


def library(label: str) -> ModuleType | None:
    """A library of the table; None if absent, or without a GPU, where none has kernels."""
    return imported(PACKAGES[label]) if torch.cuda.is_available() else None


def absent() -> list[str]:
    """The libraries of the table that are absent."""
    return [label for label in PACKAGES if library(label) is None]


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function through torch.compile, once for all input sets."""
    result: Callable[..., Any] = torch.compile(function, dynamic=False)
    return result


def in_torch(
    eager: Callable[..., Any], *args: Any, compile_as: Callable[..., Any] | None = None
) -> Calls:
    """torch eager and compiled; ``compile_as`` is an equivalent function for the compiler."""
    call = compiled(compile_as or eager)
    return {"eager": functools.partial(eager, *args), "compile": functools.partial(call, *args)}


def torchao(package: str, call: Callable[[Any], Call]) -> Calls:
    """A call of torchao, given a function that imports modules of one of its packages."""
    if library("torchao") is None:
        return {}
    return {"torchao": call(lambda name: importlib.import_module(f"torchao.{package}.{name}"))}


def liger(module: str, call: Callable[[Any], Call]) -> Calls:
    """A call of one of Liger's modules."""
    ops = library("Liger") and imported(f"liger_kernel.ops.{module}")
    return {"Liger": call(ops)} if ops else {}


def transformer_engine(call: Callable[[Any], Call]) -> Calls:
    """A call of Transformer Engine's extension module."""
    extension = library("TE") and imported("transformer_engine_torch")
    return {"TE": call(extension)} if extension else {}


def te_quantizer(name: str, x: torch.Tensor, **options: Any) -> Calls:
    """One of Transformer Engine's quantizers, ``module:class``; it allocates its outputs."""

    def call(tex: Any) -> Call:
        module, _, kind = name.partition(":")

        @functools.cache
        def quantizer() -> Any:
            tensors = importlib.import_module(f"transformer_engine.pytorch.tensor.{module}")
            element = {} if kind == "NVFP4Quantizer" else {"fp8_dtype": tex.DType.kFloat8E4M3}
            return getattr(tensors, kind)(**element, **options)

        return lambda: quantizer()(x)

    return transformer_engine(call)
