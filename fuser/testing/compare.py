"""Comparison of tensors: tolerances, and the sentence that describes a difference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuser.formats import DType
from fuser.precision.quantizer_for import role_format
from fuser.recipe import CustomRecipe, Recipe

# Relative to the largest magnitude of the tensor: some roundings of a result, and a short sum.
OF_DTYPE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Root mean square, relative to that of the tensor. One quantization has an error of 2.6% in E4M3,
# 5% in E5M2 and about 10% in E2M1; an op has two or three of them, and x^2 doubles an error.
OF_FP8, OF_FP4 = 0.15, 0.45


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference between a tensor and the expected one.

    Unquantized tensors are compared by element: ``|error| <= atol + rtol * max |expected|``.
    With ``is_rms``, for quantized runs, the root mean square of the errors is compared with that
    of the expected values in the same way.
    """

    atol: float
    rtol: float
    is_rms: bool


def tolerance_of(
    recipe: Recipe | None, dtype: torch.dtype, atol: float | None, rtol: float | None
) -> Tolerance:
    """The tolerance of a run in ``dtype`` under ``recipe``; ``atol`` and ``rtol`` replace its own.

    ``atol`` is 1e-7 by default: gradients whose true value is 0 are sums of rounding errors.
    """
    if recipe is None:
        own = OF_DTYPE[dtype]
    elif isinstance(recipe, CustomRecipe):
        own = OF_FP4  # the formats of its quantizers are unknown
    else:
        own = OF_FP4 if role_format(recipe, "input").element is DType.kFloat4E2M1 else OF_FP8
    return Tolerance(
        1e-7 if atol is None else atol, own if rtol is None else rtol, recipe is not None
    )


def difference(
    actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: Tolerance
) -> str | None:
    """The end of a sentence that describes how ``actual`` differs; None if it does not.

    None instead of a gradient means zeros.
    """
    if actual is None and expected is None:
        return None
    if actual is None:
        assert expected is not None
        if not expected.any():
            return None
        return f"is missing; its largest value is {expected.abs().max():.3g}."
    if expected is None:
        expected = torch.zeros_like(actual)
    if actual.shape != expected.shape:
        return f"has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}."
    if actual.numel() == 0:
        return None
    a, e = actual.detach().double(), expected.detach().double()
    error = torch.where(a == e, 0.0, (a - e).abs())  # infinities are equal to themselves
    error = torch.where(a.isnan() & e.isnan(), 0.0, error).nan_to_num(nan=torch.inf)
    if tolerance.is_rms:
        worst, scale = error.square().mean().sqrt(), e.square().mean().sqrt()
    else:
        worst, scale = error.max(), e.abs().max()
    if worst <= tolerance.atol + tolerance.rtol * scale:
        return None
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    largest = (
        f"differs by up to {error.max():.3g}, at {list(place)}: {a[place]:.6g} instead of "
        f"{e[place]:.6g}"
    )
    of_it = "the root mean square" if tolerance.is_rms else "the largest value"
    share = f"{worst / scale:.3g} of {of_it}" if scale > 0 else f"{worst:.3g}, and all should be 0"
    of_errors = "in root mean square " if tolerance.is_rms else ""
    return (
        f"{largest}. That is {of_errors}{share}; rtol={tolerance.rtol:g} and "
        f"atol={tolerance.atol:g} are allowed."
    )
