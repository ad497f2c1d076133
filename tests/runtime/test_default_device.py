"""Torch's default device is for what the user makes: pipelines work where their tensors are."""

from __future__ import annotations

import os
import sys
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from fresh import python
from paths import TESTS
from pipeline_kernels import on_kernels

import fuser
from fuser import recipe

N = 64
RECIPES = {
    "plain": None,
    **{name: cls() for name, cls in formats.RECIPES.items()},
    "mxfp8 2D": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
}

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")


def model() -> fuser.Sequential:
    torch.manual_seed(1)
    ops = (
        fuser.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        fuser.LayerNorm(N),
        fuser.Linear(N, N),
        fuser.GELU(cache_quantized_input=True),
        fuser.Dropout(0.5),
        fuser.Linear(N, 2 * N),
        fuser.ClampedSwiGLU(),
        fuser.ConstantScale(2.0),
        fuser.RMSNorm(N),
        fuser.L2Normalization(),
        fuser.Quantize(backward=True),
        fuser.BasicLinear(N, N),
        fuser.AddExtraInput().set_extra_input_channel(0, "x"),
        fuser.ScaledSReLU(),
        fuser.Reshape((-1, N)),
    )
    return oracles.randomize(fuser.Sequential(*ops))


def run(chosen: Any, training: bool, default_device: str) -> list[torch.Tensor]:
    """Outputs, state and gradients."""
    ops = model()
    torch.manual_seed(2)
    x = oracles.random_tensor((N, N), torch.float32, 3).requires_grad_(training)
    scales = oracles.random_tensor((N,), torch.float32, 4).requires_grad_(training)
    dy = oracles.random_tensor((N, N), torch.float32, 5)
    found = []
    with torch.set_grad_enabled(training), torch.device(default_device):
        for _ in range(2):
            with fuser.autocast(enabled=chosen is not None, recipe=chosen):
                y = ops(x, scales)
            found.append(y.detach())
            if training:
                y.backward(dy)
        ops.plan(x, scales)
        found += ops.state_dict().values()
    return found + [p.grad for p in (x, scales, *ops.parameters()) if p.grad is not None]


@pytest.mark.parametrize("chosen", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("training", [True, False])
def test_a_pipeline_runs_on_the_device_of_its_tensors(chosen: Any, training: bool) -> None:
    found = run(chosen, training, "meta")
    assert {tensor.device.type for tensor in found} == {"cpu"}
    for one, other in zip(found, run(chosen, training, "cpu"), strict=True):
        assert torch.equal(one, other)


def test_kernels_write_to_the_device_of_their_tensors() -> None:
    with on_kernels():
        found = run(RECIPES["mxfp8"], True, "meta")
    assert {tensor.device.type for tensor in found} == {"cpu"}


@pytest.mark.parametrize(
    "quantizer",
    [
        fuser.Float8CurrentScalingQuantizer(),
        fuser.Float8Quantizer(),
        fuser.MXFP8Quantizer(),
        fuser.Float8BlockQuantizer(),
        fuser.NVFP4Quantizer(),
    ],
    ids=lambda quantizer: type(quantizer).__name__,
)
def test_a_quantized_tensor_is_where_its_values_were(quantizer: Any) -> None:
    x = oracles.random_tensor((N, N), torch.float32, 3)
    with torch.device("meta"):
        tensor = quantizer(x)
        made = [tensor, tensor.dequantize(), tensor + 1, tensor.clone(), tensor[:32], tensor.t()]
    assert {one.device.type for one in made} == {"cpu"}


def test_a_process_may_import_fuser_under_another_default_device() -> None:
    code = (
        "import torch\n"
        "with torch.device('meta'):\n"
        "    import fuser\n"
        "x = torch.ones(32, 32, requires_grad=True)\n"
        "with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):\n"
        "    y = fuser.Sequential(fuser.Linear(32, 32, device='cpu'), fuser.GELU())(x)\n"
        "y.sum().backward()\n"
        "from pipeline_kernels import on_kernels\n"
        "with on_kernels():\n"
        "    print(fuser.cuda.launch.kernel_refusal('cpu') is None, y.device)\n"
    )
    paths = os.pathsep.join(sys.path)
    done = python(["-W", "ignore", "-c", code], {"PYTHONPATH": paths}, TESTS)
    assert done.stdout == "True cpu\n", done.stderr
