"""Quantized weights and inputs where no recipe is active, in pipelines that run as on a GPU.

Kernels and cuBLASLt read memory, and a quantized tensor has none with its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
import torch.nn.functional as F
from pipeline_kernels import on_kernels
from strict_cublaslt import strict_cublaslt
from test_quantized_gemm import stand_in_for_hopper

import fuser
from fuser import recipe as recipes
from fuser.precision.quantizer_for import make_quantizer

BF16, FP64 = torch.bfloat16, torch.float64
STACKED = {name: cls for name, cls in formats.STATELESS.items() if name != "rowwise"}
WIDTH, ROWS = 128, 32


def linear(n: int, m: int, **options: Any) -> fuser.Linear:
    return fuser.Linear(n, m, dtype=BF16, **options)


def block(*inner: torch.nn.Module) -> fuser.Sequential:
    """``x + inner(rmsnorm(x))``."""
    fork, join = fuser.MakeExtraOutput(), fuser.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join.set_extra_input_channel(0, "residual")
    return fuser.Sequential(fork, fuser.RMSNorm(WIDTH, dtype=BF16), *inner, join)


def gelu_block(x: torch.Tensor, gain: torch.Tensor, *linears: torch.Tensor) -> torch.Tensor:
    up, up_bias, down, down_bias = linears
    h = oracles.gelu(F.linear(oracles.rmsnorm()(x, gain), up, up_bias))
    return x + F.linear(h, down, down_bias)


def swiglu_block(
    x: torch.Tensor, gain: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    h = oracles.gated(oracles.silu)(F.linear(oracles.rmsnorm()(x, gain), up))
    return x + F.linear(h, down)


@dataclass(frozen=True)
class Model:
    """A pipeline, and its formula in plain torch: of the input, then the parameters."""

    make: Callable[[], fuser.Sequential]
    formula: oracles.Formula


MODELS = {
    "gelu": Model(lambda: block(linear(WIDTH, 256), fuser.GELU(), linear(256, WIDTH)), gelu_block),
    "swiglu": Model(
        lambda: block(
            linear(WIDTH, 512, bias=False), fuser.SwiGLU(), linear(256, WIDTH, bias=False)
        ),
        swiglu_block,
    ),
    "scale": Model(
        lambda: block(linear(WIDTH, WIDTH), fuser.ConstantScale(0.5)),
        lambda x, gain, w, b: x + 0.5 * F.linear(oracles.rmsnorm()(x, gain), w, b),
    ),
    "linear": Model(lambda: fuser.Sequential(linear(WIDTH, 256)), F.linear),
    "dropout": Model(
        lambda: fuser.Sequential(fuser.Dropout(0.0), linear(WIDTH, 256), fuser.ReLU()),
        lambda x, w, b: torch.relu(F.linear(x, w, b)),
    ),
    "layer norm": Model(
        lambda: fuser.Sequential(fuser.LayerNorm(WIDTH, dtype=BF16), linear(WIDTH, 256)),
        lambda x, gain, shift, w, b: F.linear(oracles.layernorm()(x, gain, shift), w, b),
    ),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with on_kernels(), strict_cublaslt():
        yield


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    is_quantized = isinstance(tensor, fuser.QuantizedTensor)
    return tensor.detach().dequantize() if is_quantized else tensor.detach().clone()


def step(model: Any, x: torch.Tensor, context: Any) -> list[torch.Tensor]:
    with context:
        y = model(x)
    y.backward(oracles.random_tensor(y.shape, y.dtype, 2).to(y.device))
    grads = [p.grad for p in model.parameters()]
    return [y.detach(), *grads] if x.grad is None else [y.detach(), x.grad, *grads]


def assert_computes_as_its_values(
    name: str, model: Any, x: torch.Tensor, *, is_cast: bool = False
) -> None:
    """The outputs and gradients of a model are as close to fp64, of the values of its operands, as
    plain torch."""
    formula = MODELS[name].formula
    tensors = {"x": values_of(x)}
    tensors |= {name: values_of(parameter) for name, parameter in model.named_parameters()}
    results = oracles.run_module(model, x, autocast=BF16 if is_cast else None)
    run_plain = oracles.run_autocast_formula if is_cast else oracles.run_formula
    plain, exact = run_plain(formula, tensors, BF16), oracles.run_formula(formula, tensors, FP64)
    if not x.requires_grad:
        plain["gradient of x"] = exact["gradient of x"] = None
    oracles.assert_no_worse_than_torch(oracles.Draw(results, plain, exact, BF16))


@pytest.mark.sampled
@pytest.mark.parametrize("is_cast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("recipe", formats.RECIPES.values(), ids=formats.RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_compute_as_their_values(name: str, recipe: Any, is_cast: bool) -> None:
    with fuser.quantized_model_init(recipe=recipe()):
        model = MODELS[name].make()
    if is_cast:
        model = model.float()
    x = oracles.random_tensor((ROWS, WIDTH), BF16, 1).requires_grad_()
    assert_computes_as_its_values(name, model, x, is_cast=is_cast)


@pytest.mark.sampled
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("recipe", formats.STATELESS.values(), ids=formats.STATELESS)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantized_input_computes_as_its_values(
    name: str, recipe: Any, requires_grad: bool
) -> None:
    quantizer = make_quantizer(recipe(), "input")
    x = quantizer(oracles.random_tensor((ROWS, WIDTH), BF16, 1))
    torch.manual_seed(0)
    model = MODELS[name].make()
    assert_computes_as_its_values(name, model, x.detach().requires_grad_(requires_grad))


@pytest.mark.parametrize("name", ["gelu", "swiglu", "scale"])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_native_products_add_a_quantized_residual(recipe: str, name: str) -> None:
    x = make_quantizer(recipes.MXFP8BlockScaling(), "input")(
        oracles.random_tensor((ROWS, WIDTH), BF16, 1)
    )
    torch.manual_seed(0)
    model = MODELS[name].make()
    found = []
    for given in (x.detach(), x.dequantize()):
        model.zero_grad()
        with stand_in_for_hopper():
            context = fuser.autocast(recipe=formats.RECIPES[recipe]())
            found.append(step(model, given.requires_grad_(), context))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", STACKED.values(), ids=STACKED)
def test_each_expert_of_a_stack_has_its_values_and_multiplies_as_they_do(recipe: Any) -> None:
    """Its scales begin anywhere in those of all experts."""
    with fuser.quantized_model_init(recipe=recipe()):
        op = fuser.GroupedLinear(5, WIDTH, WIDTH, single_grouped_weight=True, dtype=BF16)
    whole = op.weight.detach().dequantize()
    x = oracles.random_tensor((ROWS, WIDTH), BF16, 1)
    for expert, values in zip(op.weight.detach(), whole, strict=True):
        assert torch.equal(expert.dequantize(), values)
        product = F.linear(x, expert)
        plain, exact = F.linear(x, values), F.linear(x.double(), values.double())
        oracles.assert_no_worse_than_torch(oracles.Draw({"y": product}, {"y": plain}, {"y": exact}))
