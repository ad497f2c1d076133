"""Quantizers and quantized tensors on kernels, in the emulator: the bytes and values of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from emulator import emulated

import fuser
from fuser import DType, tensors
from fuser.cuda.launch import Kernel

SHAPE = (64, 288)
BIG = {"amax_epsilon": 1000.0}
POW2 = {"force_pow_2_scales": True}
QUANTIZERS: dict[str, Any] = {
    **formats.QUANTIZERS,
    **{
        f"{name} {option}": type(formats.QUANTIZERS[name])(**given)
        for name in ("current", "rowwise", "block")
        for option, given in (("epsilon", BIG), ("powers of 2", POW2))
    },
    "block any scale": tensors.Float8BlockQuantizer(force_pow_2_scales=False),
    "block 1d": tensors.Float8BlockQuantizer(DType.kFloat8E5M2, block_scaling_dim=1),
    "nvfp4 2d": tensors.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 hadamard": tensors.NVFP4Quantizer(with_rht=True),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    names: list[str] = []
    call = Kernel.__call__

    def noted(kernel: Kernel, *args: Any) -> None:
        names.append(kernel.symbol)
        call(kernel, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    with emulated():
        yield names


@pytest.fixture
def default_of_64_bits() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_of_64_bits")
@pytest.mark.parametrize("name", QUANTIZERS)
def test_kernels_make_the_bytes_of_torch_and_read_both_copies(
    name: str, launches: list[str]
) -> None:
    quantizer, x = QUANTIZERS[name], oracles.random_tensor(SHAPE, torch.bfloat16, 1)
    made, expected = quantizer(x), quantizer.from_reference(x)
    assert launches
    for place, buffer in made.buffers().items():
        assert buffer.dtype is expected[place].dtype, place
        assert torch.equal(buffer, expected[place]), place
    for usage in ("rowwise", "columnwise"):
        alone = quantizer.with_usage(**{each: each == usage for each in ("rowwise", "columnwise")})
        found = alone(x).dequantize()
        assert found.shape == SHAPE
        error = (found.double() - x.double()).norm() / x.double().norm()
        assert error < (0.2 if "nvfp4" in name else 0.08)


@pytest.mark.parametrize("name", formats.QUANTIZERS)
def test_a_quantized_tensor_is_quantized_by_its_values(name: str, launches: list[str]) -> None:
    quantizer = QUANTIZERS[name]
    source = fuser.MXFP8Quantizer()(oracles.random_tensor(SHAPE, torch.float32, 1))
    expected = quantizer(source.dequantize())
    for place, buffer in quantizer(source).buffers().items():
        assert torch.equal(buffer, expected.buffers()[place]), place
