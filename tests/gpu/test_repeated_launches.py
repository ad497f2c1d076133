"""Launches made again on a GPU: the references' bytes, on the right stream and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import every_format as formats
import pytest
import torch
from quantize_cases import GPU, Input, assert_same
from said import said
from streams import check_replay, check_two_streams

import fuser
from fuser.chain import Stage
from fuser.formats import DType
from fuser.functional import pointwise
from fuser.reference import fp8_scaling as reference
from fuser.tensors import (
    Float8CurrentScalingQuantizer,
    NVFP4Quantizer,
    Quantizer,
)

E4M3 = DType.kFloat8E4M3
QUANTIZERS = pytest.mark.parametrize(
    "quantizer",
    [*formats.QUANTIZERS.values(), NVFP4Quantizer(with_rht=True)],
    ids=[*formats.QUANTIZERS, "nvfp4-hadamard"],
)
SHAPES = pytest.mark.parametrize("shape", [(96, 128), (384, 512)], ids=["one tile", "more"])
ODD = pytest.mark.parametrize("shape", [(5, 40), (384, 512)], ids=["padded", "whole"])


def quantized(quantizer: Quantizer, x: torch.Tensor) -> list[Any]:
    """Buffers of x and of gelu(x)."""
    made = [quantizer(x), quantizer(pointwise.chain((Stage("gelu"),), x))]
    return [buffer for one in made for buffer in one.buffers().values()]


@SHAPES
def test_current_scaling_is_the_references_at_every_call(shape: tuple[int, int]) -> None:
    quantizer = Float8CurrentScalingQuantizer(amax_epsilon=1e-3)
    for call in range(6):
        x = torch.randn(shape, device="cuda").bfloat16() * (call + 1)
        made = quantizer(x)
        row, col, scale_inv = reference.quantize_current(x, E4M3, eps=1e-3)
        assert_same(made._data, row, "row")
        assert_same(made._transpose, col, "col")
        assert_same(made._scale_inv, scale_inv, "scale_inv")


@QUANTIZERS
@SHAPES
def test_every_call_gives_the_same_bytes_in_memory_of_its_own(
    quantizer: Quantizer, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape, device="cuda").bfloat16()
    calls = [quantized(quantizer, x) for _ in range(5)]
    for buffers in zip(*calls, strict=True):
        assert len({buffer.data_ptr() for buffer in buffers}) == 5
        assert all(torch.equal(buffers[0], buffer) for buffer in buffers)


@QUANTIZERS
@ODD
def test_launches_of_quantizers_are_captured_in_cuda_graphs(
    quantizer: Quantizer, shape: tuple[int, int]
) -> None:
    case = Input(*shape)
    for _ in range(3):
        quantized(quantizer, case.on(GPU))
    check_replay(lambda x: quantized(quantizer, x), case)


@QUANTIZERS
def test_launches_of_quantizers_run_on_torchs_current_stream(quantizer: Quantizer) -> None:
    case = Input(384, 512)
    for _ in range(3):
        quantized(quantizer, case.on(GPU))
    check_two_streams(lambda x: quantized(quantizer, x), case)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@QUANTIZERS
def test_launches_of_quantizers_run_on_the_tensors_device(quantizer: Quantizer) -> None:
    x = torch.randn(384, 512, device="cuda:1").bfloat16()
    expected = quantized(quantizer, x.to("cuda:0"))
    for _ in range(4):
        for got, wanted in zip(quantized(quantizer, x), expected, strict=True):
            assert got.device == x.device
            assert torch.equal(got.to("cuda:0"), wanted)
    assert torch.cuda.current_device() == 0


def norm_and_gelu() -> fuser.Sequential:
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    return fuser.Sequential(fuser.RMSNorm(64, **options), fuser.GELU())


def gradients(
    model: fuser.Sequential, change: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Of a step in which the norm's weight is changed between forward and backward."""
    x = torch.ones(128, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
    y, weight = model(x), model[0].weight
    if change is not None:
        weight.data = change(weight.detach())
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return [y.detach(), dx]


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda weight: weight.float(),
    "strides": lambda weight: torch.stack([weight, weight + 7], 1)[:, 0],
    "odd address": lambda weight: torch.cat([weight[:1], weight])[1:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_recorded_backward_reads_a_parameter_as_it_is_then(change: str) -> None:
    model, other = norm_and_gelu(), norm_and_gelu()
    for _ in range(4):
        expected = gradients(model)
    assert_equal(gradients(model, CHANGES[change]), expected)
    assert_equal(gradients(other, CHANGES[change]), expected)  # nothing is recorded yet


def test_zero_gradients_without_memory_are_zeros_in_recorded_passes() -> None:
    model = norm_and_gelu()
    for _ in range(4):
        gradients(model)
    x = torch.ones(128, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
    y = model(x)
    y.backward(torch._efficientzerotensor(y.shape, dtype=y.dtype, device="cuda"))
    assert x.grad is not None
    assert not x.grad.any()
    zeros = torch._efficientzerotensor(x.shape, dtype=x.dtype, device="cuda")
    assert_equal([model(zeros)], [model(torch.zeros_like(x))])


def test_a_parameter_that_moved_to_the_cpu_is_refused_and_the_next_step_runs() -> None:
    model = norm_and_gelu()
    for _ in range(4):
        expected = gradients(model)
    with pytest.raises(fuser.InputError, match=said("arguments-kernels-read-write", None, "CUDA")):
        gradients(model, lambda weight: weight.cpu())
    model.cuda()
    assert_equal(gradients(model), expected)


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, some, others))
