"""Quantizing, dequantizing and quantized parameters inside ``torch.compile``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import oracles
import pytest
import torch
import torch._dynamo.testing
from said import said
from test_quantized_tensors import QUANTIZERS, every_quantizer, same_buffers

import fuser

BACKENDS = ("eager", "aot_eager")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def values(rows: int = 64) -> torch.Tensor:
    return oracles.random_tensor((rows, 96), torch.float32, 3)


def compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend)


def quantize(quantizer: Any, x: torch.Tensor) -> torch.Tensor:
    quantized: torch.Tensor = quantizer(x)
    return quantized


@pytest.mark.sampled
@every_quantizer
@every_backend
def test_quantizing_is_traced_to_the_same_bytes(backend: str, quantizer: Any) -> None:
    found = compiled(quantize, backend)(quantizer, values())
    assert same_buffers(found, quantizer(values()))
    assert (found.shape, found.dtype, found._quantizer) == ((64, 96), torch.float32, quantizer)


@pytest.mark.sampled
@every_quantizer
@every_backend
def test_dequantizing_is_traced_to_the_same_values(backend: str, quantizer: Any) -> None:
    def both(tensor: fuser.QuantizedTensor) -> Any:
        return tensor.with_usage("rowwise").dequantize(), tensor.with_usage(
            "columnwise"
        ).dequantize()

    tensor = quantizer(values())
    for found, expected in zip(compiled(both, backend)(tensor), both(tensor), strict=True):
        assert torch.equal(found, expected)


def different(quantizer: Any) -> Any:
    if isinstance(quantizer, fuser.NVFP4Quantizer):
        return dataclasses.replace(
            quantizer, with_2d_quantization=not quantizer.with_2d_quantization
        )
    formats = {
        fuser.DType.kFloat8E4M3: fuser.DType.kFloat8E5M2,
        fuser.DType.kFloat8E5M2: fuser.DType.kFloat8E4M3,
    }
    return dataclasses.replace(quantizer, fp8_dtype=formats[quantizer.fp8_dtype])


@every_quantizer
def test_a_quantizer_is_a_constant_of_the_graph(quantizer: Any) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    run = compiled(quantize, counter)
    for _ in range(2):
        assert same_buffers(run(dataclasses.replace(quantizer), values()), quantizer(values()))
    assert counter.frame_count == 1
    other = different(quantizer)
    assert same_buffers(run(other, values()), other(values()))
    assert counter.frame_count == 2
    rowwise = quantizer.with_usage(rowwise=True, columnwise=False)
    assert same_buffers(run(rowwise, values()), rowwise(values()))
    assert counter.frame_count == 3


@pytest.mark.parametrize("name", ["current", "mxfp8", "block-1d", "nvfp4"])
def test_a_tensor_of_another_quantizer_is_traced_anew(name: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    run = compiled(lambda tensor: tensor.dequantize() + 1, counter)
    quantizer = QUANTIZERS[name]
    for one, count in (
        (quantizer, 1),
        (dataclasses.replace(quantizer), 1),
        (different(quantizer), 2),
    ):
        tensor = one(values())
        assert torch.equal(run(tensor), tensor.dequantize() + 1)
        assert counter.frame_count == count


@every_backend
def test_a_quantized_parameter_takes_part_in_a_graph(backend: str) -> None:
    weight = torch.nn.Parameter(QUANTIZERS["mxfp8"](values()))
    x = oracles.random_tensor((3, 96), torch.float32, 5).requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight).square().sum()

    results = []
    for function in (loss, compiled(loss, backend)):
        value = function(x)
        results.append((value, *torch.autograd.grad(value, (x, weight))))
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain)


@every_backend
def test_a_write_in_a_graph_quantizes_again(backend: str) -> None:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)

    tensor, twin = (QUANTIZERS["block-1d"](values()) for _ in range(2))
    compiled(double, backend)(tensor)
    assert same_buffers(tensor, double(twin))


@pytest.mark.sampled
@pytest.mark.parametrize("view", [lambda t: t[32:64], lambda t: t[3:7], lambda t: t[3:7].t()])
@every_backend
def test_views_are_read_in_a_graph(backend: str, view: Any) -> None:
    tensor = QUANTIZERS["current"](values())
    expected = view(tensor.dequantize()) + 1
    assert torch.equal(compiled(lambda t: t.dequantize() + 1, backend)(view(tensor)), expected)
    assert torch.equal(compiled(lambda t: view(t).dequantize() + 1, backend)(tensor), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["current", "rowwise", "mxfp8", "block", "nvfp4"])
@every_backend
def test_columns_are_read_and_written_in_a_graph(backend: str, name: str) -> None:
    def double_columns(tensor: torch.Tensor) -> Any:
        tensor[:, :32].mul_(2)
        return tensor[:, 30:40] + 1, tensor[3, 5:8]

    tensor, twin = QUANTIZERS[name](values()), QUANTIZERS[name](values())
    found, expected = compiled(double_columns, backend)(tensor), double_columns(twin)
    assert same_buffers(tensor, twin)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    if backend != "eager":  # there a graph's results share no memory with what it was given
        columns = compiled(lambda t: t[:, 3:5], backend)(tensor)
        with pytest.raises(fuser.StateError, match=said("base-read-only-layout")):
            columns.zero_()


@pytest.mark.sampled
@every_quantizer
@every_backend
def test_gradients_pass_through_quantizing_and_dequantizing_in_a_graph(
    backend: str, quantizer: Any
) -> None:
    weight = torch.nn.Parameter(quantizer(values().bfloat16()))

    def loss(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (
            (quantizer(x).dequantize() * weight.float() + weight.dequantize()).square().sum()
        )
        return total

    results = []
    for function in (loss, compiled(loss, backend)):
        x = values().requires_grad_()
        value = function(x)
        results.append((value, *torch.autograd.grad(value, (x, weight))))
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain)
