"""What a training step holds at its peak, counted: what it must hold at once, and nothing else.

Kernels' buffers are allocated as on a GPU and nothing is launched, so that temporaries of plain
torch's arithmetic, which kernels do not have, are not counted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import models
import other_sums
import pytest
import torch
from normalization_cases import Recorder
from paths import BENCHMARKS
from test_quantized_gemm import stand_in_for_hopper

import fuser
from fuser.cuda import launch
from fuser.gemm import native
from fuser.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe

sys.path.append(str(BENCHMARKS))

import memory_meter

T, H, F = 1024, 512, 1792
BF16 = 2


class _Idle(Recorder):
    """Takes a CPU's tensors too, and runs nothing."""

    device_type = "cpu"

    def refusal(self) -> str | None:
        return None

    def has_wgmma(self, device: torch.device) -> bool:
        return True

    def tensor_map(self, matrix: torch.Tensor, box_rows: int) -> tuple[Any, ...]:
        return (0,) * 16


def scaled_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """The output of torch's quantized product, empty."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=options["out_dtype"])


@pytest.fixture
def idle() -> Iterator[None]:
    with stand_in_for_hopper(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "scaled_mm", scaled_mm)
        patch.setattr(launch, "backend", _Idle())
        # What is listened to is launched one by one, and never cached.
        patch.setattr(launch.recording, "listener", lambda *launched: None)
        yield


def peak(model: torch.nn.Module, width: int, recipe: Recipe | None = None) -> int:
    """Bytes beyond parameters, input and its gradient's seed, in a step that makes gradients."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(T, width, dtype=dtype, requires_grad=True)
    dy = torch.randn(T, width, dtype=dtype)

    def step() -> None:
        with fuser.autocast(recipe=recipe) if recipe else contextlib.nullcontext():
            y = model(x)
        y.backward(dy)

    for _ in range(2):
        step()
        for tensor in (x, *model.parameters()):
            tensor.grad = None
    with other_sums.own_order():
        return memory_meter.measure({"step": step}, "cpu")["step"].peak


def gelu_block() -> fuser.Sequential:
    return models.mlp(H, F, randomized=False, dtype=torch.bfloat16)


def swiglu_block() -> fuser.Sequential:
    like: dict[str, Any] = {"dtype": torch.bfloat16}
    return fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        fuser.RMSNorm(H, **like),
        fuser.Linear(H, 2 * F, bias=False, **like),
        fuser.SwiGLU(),
        fuser.Linear(F, H, bias=False, **like),
        fuser.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


# In each the peak is in the backward of the activation: its input, dy and dx, and y, which the
# caller holds. In bf16 the output, which is computed again, takes the place of dy. What the norm
# wrote is computed again later. In FP8 dx has two copies, and there is one of the first weight; for
# SwiGLU there is also the gradient of the second weight. The GELU's output is quantized again in
# the launch that quantizes dx: at this time there is one copy of it and of dy.
GELU = BF16 * (3 * T * F + T * H)
SWIGLU = BF16 * (5 * T * F + T * H)
GELU_IN_FP8 = BF16 * (2 * T * F + T * H) + 3 * T * F + H * F + 2 * T * H
SWIGLU_IN_FP8 = BF16 * (3 * T * F + F * H + T * H) + 4 * T * F + 2 * H * F + T * H
# Statistics and scales; parts of the gradient of a bias, which at T 8192 and F 14336 are 1%.
FEW, PARTS = 0.02, 0.07


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("block", "recipe", "expected", "more"),
    [
        (gelu_block, None, GELU, PARTS),
        (swiglu_block, None, SWIGLU, FEW),
        (gelu_block, Float8CurrentScaling(), GELU_IN_FP8, PARTS),
        (gelu_block, Float8BlockScaling(), GELU_IN_FP8, PARTS),
        (swiglu_block, Float8CurrentScaling(), SWIGLU_IN_FP8, FEW),
    ],
)
def test_a_block_holds_at_once_what_one_step_of_it_needs(
    block: Callable[[], fuser.Sequential], recipe: Recipe | None, expected: int, more: float
) -> None:
    assert 1 <= peak(block(), H, recipe) / expected < 1 + more


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), Float8BlockScaling()])
@pytest.mark.parametrize("block", [gelu_block, swiglu_block])
def test_what_is_computed_again_does_not_raise_the_peak(
    block: Callable[[], fuser.Sequential], recipe: Recipe | None
) -> None:
    with fuser.activation_memory_budget(None):
        everything = peak(block(), H, recipe)
    with fuser.activation_memory_budget(1, keep_weight_copies=False):
        assert peak(block(), H, recipe) <= everything
    # At most that of one launch for two tensors: see above.
    both = T * F + T * H - 2 * F * H if recipe is not None and block is gelu_block else 0
    assert peak(block(), H, recipe) <= everything + both + FEW * everything


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), Float8BlockScaling()])
@pytest.mark.parametrize("block", [gelu_block, swiglu_block])
def test_an_input_in_fp8_is_not_held_beside_its_values(
    block: Callable[[], fuser.Sequential], recipe: Recipe | None
) -> None:
    exact = peak(block(), H, recipe)
    with fuser.activation_memory_budget(1, lossy_activation_inputs=True):
        assert peak(block(), H, recipe) <= exact


class _Experts(torch.nn.Module):
    """Experts of as many rows each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        like: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
        like["single_grouped_weight"] = True
        self.ops = fuser.Sequential(
            fuser.GroupedLinear(count, H, 2 * F, **like),
            fuser.ScaledSwiGLU(),
            fuser.GroupedLinear(count, F, H, **like),
        )
        self.sizes = torch.full((count,), T // count)
        self.scales = torch.ones(T, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.ops(x, self.sizes, self.scales, self.sizes)
        return y


@pytest.mark.usefixtures("idle")
def test_experts_hold_at_their_last_product_what_it_reads_and_the_gradients() -> None:
    count = 8  # so many that their gradients are most of it
    rows = T + 128 * (count - 1)  # padded for any sizes of the groups
    results = BF16 * (3 * count * F * H + 2 * T * H)  # weights' gradients, y and dx
    operands = rows * (2 * F + H)  # a copy of dz and one of the input
    with fuser.activation_memory_budget(1, keep_weight_copies=False):
        found = peak(_Experts(count), H, Float8CurrentScaling())
    assert 1 <= found / (results + operands) < 1 + FEW


class _Residuals(torch.nn.Module):
    """x + (x + b), again and again, in plain torch."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.biases = torch.nn.ParameterList(torch.zeros(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for bias in self.biases:
            x = x + (x + bias)
        return x


@pytest.mark.parametrize("is_training", [False, True])
def test_channels_hold_nothing_after_their_last_reader(is_training: bool) -> None:
    width, count = 64, 12
    ops: list[torch.nn.Module] = []
    for i in range(count):
        ops += [
            fuser.MakeExtraOutput().set_extra_output_channel(0, f"{i}", output_to_caller=False),
            fuser.Bias(width),
            fuser.AddExtraInput().set_extra_input_channel(0, f"{i}"),
        ]
    pipeline, plain = fuser.Sequential(*ops), _Residuals(count, width)
    if is_training:
        assert peak(pipeline, width) <= 1.02 * peak(plain, width)
        return
    x = torch.randn(T, width)
    phases = {"pipeline": lambda: pipeline(x), "plain": lambda: plain(x)}
    with torch.no_grad(), other_sums.own_order():
        used = memory_meter.measure(phases, "cpu")
    assert used["pipeline"].peak <= used["plain"].peak
