"""Launches made again on a GPU: the references' bytes, on the right stream and device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import every_format as formats
import pytest
import torch
from launch_cache_cases import Pair, check, pairs
from quantize_cases import GPU, Input, assert_same
from streams import check_replay, check_two_streams

from fuser.chain import Stage
from fuser.cuda import launch
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


def cached_launches() -> int:
    """How many launch sequences of this process have generated code."""
    sequences = launch.backend.sequences.values()
    return sum(one is not None and one.is_written for one in sequences)


def quantized(quantizer: Quantizer, x: torch.Tensor) -> list[torch.Tensor]:
    """Buffers of x and of gelu(x)."""
    made = [quantizer(x), quantizer(pointwise.activation(Stage("gelu"), x))]
    return [buffer for one in made for buffer in one.buffers().values()]


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """Inside, launches are new ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "backend", launch.LaunchBackend())
        yield


@pytest.mark.parametrize("pair", pairs(), ids=str)
def test_calls_that_differ_in_one_field_get_their_own_launches(pair: Pair) -> None:
    check(pair, nothing_remembered, "cuda")


@SHAPES
def test_current_scaling_is_the_references_at_every_call(shape: tuple[int, int]) -> None:
    quantizer, before = Float8CurrentScalingQuantizer(amax_epsilon=1e-3), cached_launches()
    for call in range(6):
        x = torch.randn(shape, device="cuda").bfloat16() * (call + 1)
        made = quantizer(x)
        row, col, scale_inv = reference.quantize_current(x, E4M3, eps=1e-3)
        assert_same(made._data, row, "row")
        assert_same(made._transpose, col, "col")
        assert_same(made._scale_inv, scale_inv, "scale_inv")
    assert cached_launches() == before + 1


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
def test_cached_launches_are_captured_in_cuda_graphs(
    quantizer: Quantizer, shape: tuple[int, int]
) -> None:
    case = Input(*shape)
    for _ in range(3):
        quantized(quantizer, case.on(GPU))
    check_replay(lambda x: quantized(quantizer, x), case)


@QUANTIZERS
def test_cached_launches_run_on_torchs_current_stream(quantizer: Quantizer) -> None:
    case = Input(384, 512)
    for _ in range(3):
        quantized(quantizer, case.on(GPU))
    check_two_streams(lambda x: quantized(quantizer, x), case)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@QUANTIZERS
def test_cached_launches_run_on_the_tensors_device(quantizer: Quantizer) -> None:
    x = torch.randn(384, 512, device="cuda:1").bfloat16()
    expected = quantized(quantizer, x.to("cuda:0"))
    for _ in range(4):
        for got, wanted in zip(quantized(quantizer, x), expected, strict=True):
            assert got.device == x.device
            assert torch.equal(got.to("cuda:0"), wanted)
    assert torch.cuda.current_device() == 0
