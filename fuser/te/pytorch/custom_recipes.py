"""``transformer_engine.pytorch.custom_recipes``: factories of quantizers for a ``CustomRecipe``.

Each is a function of the :class:`~fuser.recipe.QuantizerRole` of a tensor. Those that mirror a
recipe have its default quantizers for the input, the weight and the output gradient of a linear or
a grouped linear. The names that end in ``_quantizer_factory`` are those of older versions, and the
``ref`` factories, there quantizers in plain torch, are quantizers of this library.
"""

from __future__ import annotations

from typing import Any

from fuser.formats import DType
from fuser.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fuser.tensors import HybridQuantizer, IdentityQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fuser.tensors.quantizer import Quantizer, quantizer_class

__all__ = [
    "current_scaling_factory",
    "current_scaling_quantizer_factory",
    "current_scaling_ref_factory",
    "current_scaling_ref_quantizer_factory",
    "float8_block_scaling_factory",
    "float8_block_scaling_quantizer_factory",
    "high_precision_factory",
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "mxfp8_quantizer_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_factory",
    "nvfp4_quantizer_factory",
    "nvfp4_ref_rht_2d_factory",
    "nvfp4_ref_rht_2d_quantizer_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
]

_LINEARS = ("linear", "grouped_linear")
_TENSORS = ("input", "weight", "grad_output")


def _tensor(role: Any, modules: tuple[str, ...] = _LINEARS) -> str:
    """The tensor of the role if it is of one of the modules; empty if not."""
    if role is None or role.module_type not in modules or role.tensor_type not in _TENSORS:
        return ""
    return str(role.tensor_type)


def _of_recipe(recipe: Recipe, tensor: str) -> Quantizer:
    """The recipe's quantizer of that tensor; of an input if it is another one."""
    cls = quantizer_class(recipe)
    assert cls is not None
    return cls.of_recipe(recipe, tensor or "input")


# -- like recipes --------------------------------------------------------------------


def high_precision_factory(role: Any) -> Quantizer:
    """No tensor is quantized."""
    return IdentityQuantizer()


def current_scaling_factory(role: Any) -> Quantizer:
    """The quantizers of ``Float8CurrentScaling()``: gradients E5M2, all other tensors E4M3."""
    is_gradient = role is not None and role.tensor_type == "grad_output"
    return _of_recipe(Float8CurrentScaling(), "grad_output" if is_gradient else "input")


def float8_block_scaling_factory(role: Any) -> Quantizer:
    """The quantizers of ``Float8BlockScaling()``: weights in blocks of 128x128, others of 1x128."""
    return _of_recipe(Float8BlockScaling(), _tensor(role))


def mxfp8_factory(role: Any) -> Quantizer:
    """The quantizers of ``MXFP8BlockScaling()``: E4M3."""
    return _of_recipe(MXFP8BlockScaling(), _tensor(role))


def nvfp4_factory(role: Any) -> Quantizer:
    """The quantizers of ``NVFP4BlockScaling()``."""
    return _of_recipe(NVFP4BlockScaling(), _tensor(role))


def current_scaling_ref_factory(role: Any) -> Quantizer:
    """The quantizers of :func:`current_scaling_factory`."""
    return current_scaling_factory(role)


def nvfp4_ref_rht_2d_factory(role: Any) -> Quantizer:
    """NVFP4: weights in blocks of 16x16, other tensors with a Hadamard transform; no randomness."""
    if _tensor(role) == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True)


current_scaling_quantizer_factory = current_scaling_factory
current_scaling_ref_quantizer_factory = current_scaling_ref_factory
float8_block_scaling_quantizer_factory = float8_block_scaling_factory
mxfp8_quantizer_factory = mxfp8_factory
nvfp4_quantizer_factory = nvfp4_factory
nvfp4_ref_rht_2d_quantizer_factory = nvfp4_ref_rht_2d_factory


# -- one format in forward, another in backward ----------------------------------------


def _from_rows(rowwise: Quantizer, columnwise: Quantizer) -> Quantizer:
    """Backward reads what forward has rounded: ``columnwise`` of the values of ``rowwise``."""
    return HybridQuantizer(
        rowwise_quantizer=rowwise,
        columnwise_quantizer=columnwise,
        columnwise_source="rowwise_dequantized",
    )


def _mxfp8() -> Quantizer:
    return MXFP8Quantizer(DType.kFloat8E4M3)


def high_precision_fwd_mxfp8_bwd_factory(role: Any) -> Quantizer:
    """Forward unquantized; gradients, and in backward inputs and weights, MXFP8."""
    if _tensor(role) == "grad_output":
        return _mxfp8()
    return HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=_mxfp8())


def mxfp8_fwd_nvfp4_bwd_factory(role: Any) -> Quantizer:
    """Forward MXFP8; backward NVFP4 in blocks of 16, of the original inputs and rounded weights.

    Inputs and gradients of a weight gradient have a Hadamard transform, and gradients are rounded
    at random.
    """
    tensor = _tensor(role)
    if tensor == "grad_output":
        return nvfp4_factory(role)
    if tensor == "input":
        return HybridQuantizer(rowwise_quantizer=_mxfp8(), columnwise_quantizer=nvfp4_factory(role))
    return _from_rows(_mxfp8(), NVFP4Quantizer()) if tensor == "weight" else _mxfp8()


def nvfp4_1d_weight_factory(role: Any) -> Quantizer:
    """NVFP4 with weights in blocks of 16 values, which backward reads rounded twice."""
    if _tensor(role) == "weight":
        return _from_rows(NVFP4Quantizer(), NVFP4Quantizer())
    return nvfp4_factory(role)


def mxfp8_fwd_high_precision_bwd_factory(role: Any) -> Quantizer:
    """Forward MXFP8; backward unquantized, of the inputs and weights that forward rounded."""
    tensor = _tensor(role)
    if tensor == "grad_output":
        return IdentityQuantizer()
    return _from_rows(_mxfp8(), IdentityQuantizer()) if tensor else _mxfp8()


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: Any) -> Quantizer:
    """Grouped linears: forward NVFP4, inputs with a scale a row; backward MXFP8 of what it rounded.

    All else is MXFP8.
    """
    tensor = _tensor(role, ("grouped_linear",))
    if tensor in ("input", "weight"):
        return _from_rows(NVFP4Quantizer(row_scaled_nvfp4=tensor == "input"), _mxfp8())
    return _mxfp8()


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: Any) -> Quantizer:
    """Forward NVFP4, inputs with a scale a row; backward unquantized, of what forward rounded."""
    tensor = _tensor(role)
    if tensor == "grad_output":
        return IdentityQuantizer()
    own = NVFP4Quantizer(row_scaled_nvfp4=tensor == "input")
    return _from_rows(own, IdentityQuantizer()) if tensor else own
