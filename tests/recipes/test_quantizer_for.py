"""What every field of a recipe means for the input, the weight and the gradient of a linear."""

from __future__ import annotations

from typing import Any

import pytest

import fuser
from fuser.formats import DType
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
ROLES = {"input": ("forward", 0), "weight": ("forward", 1), "grad_output": ("backward", 0)}


def quantizers(recipe: Recipe) -> list[Any]:
    """Those that a linear uses under ``recipe``: of its input, its weight and its gradient."""
    linear = fuser.BasicLinear(32, 32)
    with fuser.autocast(recipe=recipe):
        return [linear.get_quantizer(*place) for place in ROLES.values()]


def current(dtype: DType, **options: bool) -> Quantizer:
    return Float8CurrentScalingQuantizer(dtype, **options)


def rowwise(dtype: DType, **options: bool) -> Quantizer:
    return Float8RowwiseQuantizer(dtype, **options)


def block(dtype: DType, dim: int, pow2: bool = True) -> Quantizer:
    return Float8BlockQuantizer(dtype, block_scaling_dim=dim, force_pow_2_scales=pow2)


def nvfp4(is_2d: bool, rht: bool, stochastic: bool) -> Quantizer:
    return NVFP4Quantizer(with_2d_quantization=is_2d, with_rht=rht, stochastic_rounding=stochastic)


MX = MXFP8Quantizer(E4M3)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Float8CurrentScaling(), [current(E4M3), current(E4M3), current(E5M2)]),
        (Float8CurrentScaling(fp8_format=Format.E4M3), [current(E4M3)] * 3),
        (Float8RowwiseScaling(), [rowwise(E4M3)] * 3),
        (Float8RowwiseScaling(fp8_format=Format.HYBRID), [*[rowwise(E4M3)] * 2, rowwise(E5M2)]),
        (
            Float8RowwiseScaling(use_power_2_scales=True),
            [rowwise(E4M3, force_pow_2_scales=True)] * 3,
        ),
        (
            Float8CurrentScaling(use_power_2_scales=True),
            [current(dtype, force_pow_2_scales=True) for dtype in (E4M3, E4M3, E5M2)],
        ),
        (MXFP8BlockScaling(), [MX] * 3),
        (MXFP8BlockScaling(fp8_format=Format.HYBRID), [MX, MX, MXFP8Quantizer(E5M2)]),
        (
            MXFP8BlockScaling(enable_2d_quantization=True),
            [MX, MXFP8Quantizer(E4M3, with_2d_quantization=True), MX],
        ),
        (Float8BlockScaling(), [block(E4M3, 1), block(E4M3, 2), block(E4M3, 1)]),
        (
            Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID),
            [block(E4M3, 1, False), block(E4M3, 2, False), block(E5M2, 1, False)],
        ),
        (
            Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
            [block(E4M3, 2), block(E4M3, 1), block(E4M3, 1)],
        ),
        (
            Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1),
            [block(E4M3, 1), block(E4M3, 1), block(E4M3, 2)],
        ),
        (
            NVFP4BlockScaling(),
            [nvfp4(False, True, False), nvfp4(True, False, False), nvfp4(False, True, True)],
        ),
        (
            NVFP4BlockScaling(disable_rht=True),
            [nvfp4(False, False, False), nvfp4(True, False, False), nvfp4(False, False, True)],
        ),
        (
            NVFP4BlockScaling(disable_stochastic_rounding=True),
            [nvfp4(False, True, False), nvfp4(True, False, False), nvfp4(False, True, False)],
        ),
        (
            NVFP4BlockScaling(disable_2d_quantization=True),
            [nvfp4(False, True, False), nvfp4(False, False, False), nvfp4(False, True, True)],
        ),
    ],
    ids=str,
)
def test_a_recipe_gives_each_role_the_quantizer_that_its_fields_say(
    recipe: Recipe, expected: list[Quantizer]
) -> None:
    found = quantizers(recipe)
    for role, one, other in zip(ROLES, found, expected, strict=True):
        assert one == other, role


@pytest.mark.parametrize(("fp8_format", "gradients"), [(Format.HYBRID, E5M2), (Format.E4M3, E4M3)])
def test_delayed_scaling_takes_the_format_of_each_role_from_its_recipe(
    fp8_format: Format, gradients: DType
) -> None:
    found = quantizers(DelayedScaling(fp8_format=fp8_format))
    assert [quantizer.fp8_dtype for quantizer in found] == [E4M3, E4M3, gradients]


@pytest.mark.parametrize("make", [DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling])
def test_recipes_without_a_field_for_it_split_the_accumulators_of_backward_alone(
    make: type[Recipe],
) -> None:
    assert make().split_accumulators == (False, True, True)


def test_a_quantizer_class_that_names_a_recipe_is_what_the_recipe_means() -> None:
    class Coarse(Float8RowwiseScaling):
        pass

    class CoarseQuantizer(Float8RowwiseQuantizer):
        recipe_class = Coarse

        @classmethod
        def of_recipe(cls, recipe: Float8RowwiseScaling, role: str) -> Quantizer:
            return cls(E5M2 if role == "weight" else E4M3)

    found = quantizers(Coarse())
    assert found == [CoarseQuantizer(dtype) for dtype in (E4M3, E5M2, E4M3)]
    assert all(type(value_of(q)) is CoarseQuantizer for q in found)
    assert quantizers(Float8RowwiseScaling()) == [rowwise(E4M3)] * 3


def value_of(quantizer: Quantizer) -> Quantizer:
    return quantizer.with_usage(rowwise=True, columnwise=True)
