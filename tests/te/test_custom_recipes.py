"""Transformer Engine's factories of custom recipes: their quantizers, products and import paths."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from fresh import python

import fuser
from fuser import recipe as recipes
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import QuantizerRole
from fuser.te.pytorch import custom_recipes

ROLES = ("input", "weight", "grad_output")
# Of gradients; a test that makes them again gets other ones.
ROUNDS_AT_RANDOM = (
    *("nvfp4_factory", "nvfp4_quantizer_factory", "nvfp4_1d_weight_factory"),
    "mxfp8_fwd_nvfp4_bwd_factory",
)
FACTORIES = [name for name in custom_recipes.__all__ if name.endswith("_factory")]


def of_one_role(role: str, one: Any, others: Any) -> Any:
    """A factory that gives ``one`` to a role, and ``others`` to the rest."""
    return lambda asked: one if asked.tensor_type == role else others


TRANSFORMED, BLOCKS = fuser.NVFP4Quantizer(with_rht=True), fuser.MXFP8Quantizer()
OWN = {
    "transformed inputs": of_one_role("input", TRANSFORMED, fuser.NVFP4Quantizer()),
    "transformed gradients": of_one_role("grad_output", TRANSFORMED, fuser.NVFP4Quantizer()),
    "transformed gradients of blocks": of_one_role("grad_output", TRANSFORMED, BLOCKS),
    "plain gradients": of_one_role("grad_output", fuser.IdentityQuantizer(), BLOCKS),
    "plain inputs": of_one_role("input", fuser.IdentityQuantizer(), BLOCKS),
    "plain weights": of_one_role("weight", fuser.IdentityQuantizer(), BLOCKS),
    "gradients with a scale": of_one_role(
        "grad_output", fuser.Float8CurrentScalingQuantizer(fuser.DType.kFloat8E5M2), BLOCKS
    ),
}


def factory(name: str) -> Any:
    return OWN[name] if name in OWN else getattr(custom_recipes, name)


@pytest.mark.parametrize("module_type", ["linear", "grouped_linear"])
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("current_scaling_factory", recipes.Float8CurrentScaling()),
        ("current_scaling_ref_factory", recipes.Float8CurrentScaling()),
        ("float8_block_scaling_factory", recipes.Float8BlockScaling()),
        ("mxfp8_factory", recipes.MXFP8BlockScaling()),
        ("nvfp4_factory", recipes.NVFP4BlockScaling()),
    ],
)
def test_a_factory_has_the_quantizers_of_its_recipe(
    name: str, recipe: Any, module_type: str
) -> None:
    for role in ROLES:
        made = factory(name)(QuantizerRole(module_type, role))
        assert made == make_quantizer(recipe, role)


@pytest.mark.parametrize("name", ["nvfp4_ref_rht_2d_factory", "nvfp4_ref_rht_2d_quantizer_factory"])
def test_the_reference_of_nvfp4_transforms_all_but_weights(name: str) -> None:
    for role in ROLES:
        is_weight = role == "weight"
        expected = fuser.NVFP4Quantizer(with_2d_quantization=is_weight, with_rht=not is_weight)
        assert factory(name)(QuantizerRole("linear", role)) == expected


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_takes_roles_of_other_modules_and_none(name: str) -> None:
    for role in (None, QuantizerRole(), QuantizerRole("dpa", "qkv")):
        assert isinstance(factory(name)(role), fuser.Quantizer)


def _copies(quantizer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the rowwise and of the columnwise copy, in fp64."""
    usages = ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True})
    row, column = (quantizer.with_usage(**usage)(x).dequantize().double() for usage in usages)
    return row, column


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("name", [*FACTORIES, *OWN])
def test_products_are_those_of_the_factorys_operands(name: str, is_grouped: bool) -> None:
    recipe = recipes.CustomRecipe(qfactory=factory(name))
    op: Any = (
        fuser.GroupedLinear(1, 64, 64, bias=False) if is_grouped else fuser.BasicLinear(64, 64)
    )
    oracles.randomize(op)
    (weight,) = op.parameters()
    x = oracles.leaf(oracles.random_tensor((32, 64), torch.float32, 1))
    dy = oracles.random_tensor((32, 64), torch.float32, 2)
    with fuser.autocast(recipe=recipe):
        y = op(x, torch.tensor([32])) if is_grouped else op(x)
    y.backward(dy)
    module = "grouped_linear" if is_grouped else "linear"
    of_x, of_w, of_dy = (
        _copies(factory(name)(QuantizerRole(module, role)), value.detach())
        for role, value in zip(ROLES, (x, weight, dy), strict=True)
    )
    expected = {
        "y": (y.detach(), of_x[0] @ of_w[0].T),
        "dx": (x.grad, of_dy[0] @ of_w[1]),
        "dw": (weight.grad, of_dy[1].T @ of_x[1]),
    }
    if name in ROUNDS_AT_RANDOM:
        expected = {"y": expected["y"]}
    for what, (found, exact) in expected.items():
        assert (found.double() - exact).abs().max() < 1e-5 * exact.abs().max(), what


def test_composed_factories_say_what_forward_and_backward_read() -> None:
    x = oracles.random_tensor((64, 64), torch.float32, 1)
    mxfp8 = fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)
    rounded = mxfp8(x).dequantize()
    weight, gradient = QuantizerRole("linear", "weight"), QuantizerRole("linear", "grad_output")
    row, column = _copies(factory("mxfp8_fwd_high_precision_bwd_factory")(weight), x)
    assert torch.equal(row, rounded.double())
    assert torch.equal(column, rounded.double())
    assert torch.equal(factory("mxfp8_fwd_high_precision_bwd_factory")(gradient)(x).dequantize(), x)
    row, column = _copies(factory("high_precision_fwd_mxfp8_bwd_factory")(weight), x)
    assert torch.equal(row, x.double())
    assert torch.equal(column, _copies(mxfp8, x)[1])
    row, column = _copies(factory("mxfp8_fwd_nvfp4_bwd_factory")(weight), x)
    assert torch.equal(column, _copies(fuser.NVFP4Quantizer(), rounded)[1])
    # Of a linear all is MXFP8, of a grouped one forward is NVFP4 with scales of rows.
    composer = factory("nvfp4_row_scaled_fwd_mxfp8_bwd_factory")
    assert composer(QuantizerRole("linear", "input")) == mxfp8
    row, _ = _copies(composer(QuantizerRole("grouped_linear", "input")), x)
    assert torch.equal(row, _copies(fuser.NVFP4Quantizer(row_scaled_nvfp4=True), x)[0])


def test_programs_import_factories_and_quantizers_by_their_paths() -> None:
    code = """
import fuser.te
fuser.te.install()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.custom_recipes import quantizer_factories
from transformer_engine.pytorch.custom_recipes.quantization_nvfp4 import (
    nvfp4_ref_rht_2d_quantizer_factory,
)
from transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo import (
    mxfp8_fwd_high_precision_bwd_factory,
)
from transformer_engine.pytorch.quantization import QuantizerRole
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
assert te.HybridQuantizer is HybridQuantizer is fuser.HybridQuantizer

def own(role):
    assert isinstance(role, QuantizerRole)
    if role.tensor_type == "weight":
        return HybridQuantizer(
            rowwise_quantizer=MXFP8Quantizer(fuser.DType.kFloat8E4M3),
            columnwise_quantizer=IdentityQuantizer(),
            columnwise_source="rowwise_dequantized",
        )
    return IdentityQuantizer()

x = torch.randn(32, 64, requires_grad=True)
layer = te.Linear(64, 64, device="cpu")
for made in (own, quantizer_factories.mxfp8_factory, mxfp8_fwd_high_precision_bwd_factory,
             nvfp4_ref_rht_2d_quantizer_factory):
    with te.autocast(recipe=CustomRecipe(qfactory=made)):
        y = layer(x)
    y.sum().backward()
assert not fuser.te.missing(), fuser.te.missing()
"""
    done = python(["-W", "ignore", "-c", code])
    assert done.returncode == 0, done.stderr
