"""Quantizers of a recipe for the input, the weight and the output gradient of a linear."""

from __future__ import annotations

import functools

from fuser.errors import InputError
from fuser.formats import DType, NumberFormat
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    QuantizerRole,
    Recipe,
)
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)


def fp8_dtype(recipe_format: Format, role: str) -> DType:
    """The FP8 format of a tensor with this role: under HYBRID, E5M2 for gradients."""
    if recipe_format is Format.HYBRID:
        return DType.kFloat8E5M2 if role == "grad_output" else DType.kFloat8E4M3
    return {Format.E4M3: DType.kFloat8E4M3, Format.E5M2: DType.kFloat8E5M2}[recipe_format]


def make_quantizer(
    recipe: Recipe, role: str, *, module_type: str = "linear", name: str = ""
) -> Quantizer:
    """The quantizer of ``recipe`` for an ``"input"``, ``"weight"`` or ``"grad_output"``.

    ``module_type`` and ``name`` are those of the op, for the factory of a custom recipe.

    Raises
    ------
    InputError
        If the recipe is custom and its factory returns no quantizer, or if it is DelayedScaling,
        whose quantizers belong to the state of an op.
    """
    if not isinstance(recipe, CustomRecipe):
        return _make_quantizer(recipe, role)
    # Not cached: the factory may return another quantizer for every op.
    assert recipe.qfactory is not None  # checked by the recipe
    quantizer = recipe.qfactory(QuantizerRole(module_type, role, name))
    if not isinstance(quantizer, Quantizer):
        raise InputError(f"{recipe} gives {quantizer!r} for the role {role!r}; it is no Quantizer.")
    # A copy: later changes to the factory's quantizer have no effect.
    return quantizer.with_usage(rowwise=quantizer.rowwise, columnwise=quantizer.columnwise)


@functools.lru_cache(maxsize=1024)
def _make_quantizer(recipe: Recipe, role: str) -> Quantizer:
    if isinstance(recipe, MXFP8BlockScaling):
        return MXFP8Quantizer(
            fp8_dtype(recipe.fp8_format, role),
            with_2d_quantization=recipe.enable_2d_quantization and role == "weight",
        )
    if isinstance(recipe, Float8CurrentScaling):
        params = _params(recipe, role, "fp8")
        return Float8CurrentScalingQuantizer(
            fp8_dtype(recipe.fp8_format, role),
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
        )
    if isinstance(recipe, Float8BlockScaling):
        params = _params(recipe, role, "fp8")
        dims = {
            "input": recipe.x_block_scaling_dim,
            "weight": recipe.w_block_scaling_dim,
            "grad_output": recipe.grad_block_scaling_dim,
        }
        return Float8BlockQuantizer(
            fp8_dtype(recipe.fp8_format, role),
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
            block_scaling_dim=dims[role],
        )
    if isinstance(recipe, NVFP4BlockScaling):
        params = _params(recipe, role, "fp4")
        return NVFP4Quantizer(
            with_2d_quantization=params.fp4_2d_quantization,
            with_rht=params.random_hadamard_transform,
            stochastic_rounding=params.stochastic_rounding,
        )
    raise InputError(f"{recipe} names no quantizer for the role {role!r}.")


def _params(recipe: Recipe, role: str, prefix: str) -> QParams:
    names = {"input": "fwd_inp", "weight": "fwd_weight", "grad_output": "bwd_grad"}
    params: QParams = getattr(recipe, f"{prefix}_quant_{names[role]}")
    return params


def role_format(recipe: Recipe, role: str) -> NumberFormat:
    """The format of tensors with this role under ``recipe``, which is not custom."""
    if isinstance(recipe, DelayedScaling):
        return NumberFormat("FP8", fp8_dtype(recipe.fp8_format, role))
    return _make_quantizer(recipe, role).format
