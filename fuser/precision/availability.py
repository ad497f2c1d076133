"""Availability of recipes: native tensor cores or emulation, and the warning about emulation."""

from __future__ import annotations

import warnings

import torch

from fuser.errors import EmulationWarning
from fuser.gemm.matmul import architecture
from fuser.gemm.native import native_gemm
from fuser.precision.quantizer_for import role_format
from fuser.recipe import (
    RECIPES,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fuser.torch_private import users_level

USAGES = {
    ("input", "weight"): ("rowwise", "rowwise"),
    ("grad_output", "weight"): ("rowwise", "columnwise"),
    ("grad_output", "input"): ("columnwise", "columnwise"),
}
"""The roles of the two operands of forward, dgrad and wgrad, and the copies that are read."""


def runs_natively(recipe: Recipe, arch: tuple[int, int] | None) -> bool:
    """Whether tensor cores multiply every pair of formats of ``recipe``, without an override.

    ``arch`` is a CUDA device's compute capability, None for another device.
    """
    formats = [
        [role_format(recipe, role).of(usage) for role, usage in zip(roles, usages, strict=True)]
        for roles, usages in USAGES.items()
    ]
    return all(
        native_gemm(a, b, arch) is not None or (a.is_unquantized and b.is_unquantized)
        for a, b in formats
    )


def emulation(recipe: Recipe, arch: tuple[int, int] | None) -> str | None:
    """A sentence that says that ``recipe`` is emulated on ``arch``; None if it runs natively."""
    if runs_natively(recipe, arch):
        return None
    where = "a CPU" if arch is None else f"compute capability {arch[0]}.{arch[1]}"
    native = [cls.__name__ for cls in RECIPES if runs_natively(cls(), arch)]
    # If no recipe is native, the doctor says so; here it would be in the warning of every recipe.
    others = f" Native there: {', '.join(native)}." if native else ""
    return (
        f"{type(recipe).__name__} is emulated on {where}: operands have its exact bytes, and "
        f"matrix products run dequantized, slower than unquantized.{others}"
    )


def warn_if_emulated(recipe: Recipe, arch: tuple[int, int] | None) -> None:
    """Warn that ``recipe`` is emulated on ``arch``: once in a process for each recipe class."""
    place = (type(recipe), arch)
    if place in _warned or not isinstance(recipe, RECIPES):
        return
    sentence = emulation(recipe, arch)
    if sentence is not None:
        # Noted after it: where a filter makes an error of the warning, each call raises it.
        warnings.warn(sentence, EmulationWarning, stacklevel=users_level())
        _warned.add(place)


_warned: set[tuple[type[Recipe], tuple[int, int] | None]] = set()


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 recipes run here: True on every device.

    With ``return_reason`` it also returns a sentence, which says that they are
    emulated on the current device; the sentence is empty if they run natively.
    """
    return _available(Float8CurrentScaling(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 recipes in blocks of 128 run here; see :func:`is_fp8_available`."""
    return _available(Float8BlockScaling(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether MXFP8 recipes run here; see :func:`is_fp8_available`."""
    return _available(MXFP8BlockScaling(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether NVFP4 recipes run here; see :func:`is_fp8_available`."""
    return _available(NVFP4BlockScaling(), return_reason)


def _available(recipe: Recipe, return_reason: bool) -> bool | tuple[bool, str]:
    if not return_reason:
        return True
    arch = None
    if torch.cuda.is_available():
        arch = architecture(torch.device("cuda", torch.cuda.current_device()))
    return True, emulation(recipe, arch) or ""
