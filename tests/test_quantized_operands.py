"""Quantized weights and inputs where no recipe is active, in pipelines that run as on a GPU.

Kernels and cuBLASLt read memory, and a quantized tensor has none with its values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from strict_cublaslt import strict_cublaslt
from test_quantized_gemm import stand_in_for_hopper

import fuser
from fuser import recipe as recipes
from fuser.precision.quantizer_for import make_quantizer

BF16 = torch.bfloat16
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


MODELS: dict[str, Callable[[], fuser.Sequential]] = {
    "gelu": lambda: block(linear(WIDTH, 256), fuser.GELU(), linear(256, WIDTH)),
    "swiglu": lambda: block(
        linear(WIDTH, 512, bias=False), fuser.SwiGLU(), linear(256, WIDTH, bias=False)
    ),
    "scale": lambda: block(linear(WIDTH, WIDTH), fuser.ConstantScale(0.5)),
    "linear": lambda: fuser.Sequential(linear(WIDTH, 256)),
    "dropout": lambda: fuser.Sequential(fuser.Dropout(0.0), linear(WIDTH, 256), fuser.ReLU()),
    "layer norm": lambda: fuser.Sequential(fuser.LayerNorm(WIDTH, dtype=BF16), linear(WIDTH, 256)),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with on_kernels(), strict_cublaslt():
        yield


def step(model: Any, x: torch.Tensor, context: Any) -> list[torch.Tensor]:
    with context:
        y = model(x)
    y.backward(oracles.random_tensor(y.shape, y.dtype, 2).to(y.device))
    grads = [p.grad for p in model.parameters()]
    return [y.detach(), *grads] if x.grad is None else [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("is_cast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("recipe", formats.RECIPES.values(), ids=formats.RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_compute_as_their_values(name: str, recipe: Any, is_cast: bool) -> None:
    with fuser.quantized_model_init(recipe=recipe()):
        model = MODELS[name]()
    plain = MODELS[name]()
    if is_cast:
        model, plain = model.float(), plain.float()
    with torch.no_grad():
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            own.copy_(other.dequantize() if isinstance(other, fuser.QuantizedTensor) else other)
    found = []
    for m in (model, plain):
        x = oracles.random_tensor((ROWS, WIDTH), BF16, 1).requires_grad_()
        found.append(step(m, x, torch.autocast("cpu", BF16, enabled=is_cast)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("recipe", formats.STATELESS.values(), ids=formats.STATELESS)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantized_input_computes_as_its_values(
    name: str, recipe: Any, requires_grad: bool
) -> None:
    quantizer = make_quantizer(recipe(), "input")
    x = quantizer(oracles.random_tensor((ROWS, WIDTH), BF16, 1))
    torch.manual_seed(0)
    model = MODELS[name]()
    found = []
    for given in (x.detach(), x.dequantize()):
        model.zero_grad()
        found.append(step(model, given.requires_grad_(requires_grad), contextlib.nullcontext()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["gelu", "swiglu", "scale"])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_native_products_add_a_quantized_residual(recipe: str, name: str) -> None:
    x = make_quantizer(recipes.MXFP8BlockScaling(), "input")(
        oracles.random_tensor((ROWS, WIDTH), BF16, 1)
    )
    torch.manual_seed(0)
    model = MODELS[name]()
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
        assert torch.equal(torch.nn.functional.linear(x, expert), x @ values.t())
