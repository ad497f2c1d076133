"""Quantized tensors by the constructors, methods and attributes that Transformer Engine has."""

from __future__ import annotations

import copy
from typing import Any

import oracles
import pytest
import torch
from said import holds, said
from test_quantized_tensors import QUANTIZERS, every_quantizer, same_buffers

import fuser
from fuser import DType

COPIES = ("rowwise", "columnwise")


def values(seed: int = 3, shape: tuple[int, ...] = (2, 32, 96)) -> torch.Tensor:
    return oracles.random_tensor(shape, torch.float32, seed)


# -- constructors --------------------------------------------------------------------


@every_quantizer
@pytest.mark.parametrize("usage", [(True, True), (True, False), (False, True)])
def test_a_tensor_is_made_of_buffers_by_keyword_and_shares_them(
    usage: tuple[bool, bool], quantizer: Any
) -> None:
    made_by = quantizer.with_usage(rowwise=usage[0], columnwise=usage[1])
    tensor = made_by(values())
    twin = type(tensor)(shape=tensor.shape, dtype=tensor.dtype, **tensor.get_metadata())
    assert same_buffers(twin, tensor)
    assert (twin.shape, twin.dtype, twin.requires_grad) == (tensor.shape, tensor.dtype, False)
    assert torch.equal(twin.dequantize(), tensor.dequantize())
    assert twin._quantizer == made_by
    tensor.quantize_(values(5))
    assert same_buffers(twin, tensor)


@pytest.mark.parametrize("element", [DType.kFloat8E4M3, DType.kFloat8E5M2])
def test_a_quantizer_that_is_not_given_follows_from_the_keywords(element: DType) -> None:
    for quantizer in (
        fuser.Float8CurrentScalingQuantizer(element),
        fuser.MXFP8Quantizer(element),
        fuser.Float8BlockQuantizer(element, block_scaling_dim=1),
        fuser.Float8BlockQuantizer(element, block_scaling_dim=2),
        fuser.NVFP4Quantizer(),
    ):
        tensor: Any = quantizer(values())
        keywords = {k: v for k, v in tensor.get_metadata().items() if k != "quantizer"}
        twin = type(tensor)(shape=(2, 32, 96), dtype=torch.bfloat16, requires_grad=True, **keywords)
        assert twin._quantizer == tensor._quantizer
        assert twin.requires_grad
        assert twin.dtype is torch.bfloat16
        assert torch.equal(twin.detach().dequantize(dtype=torch.float32), tensor.dequantize())


def test_scales_of_blocks_are_of_squares_unless_a_keyword_says_otherwise() -> None:
    quantizer = fuser.Float8BlockQuantizer(block_scaling_dim=2)
    tensor: Any = quantizer(values())
    without = ("quantizer", "is_2D_scaled")
    keywords = {k: v for k, v in tensor.get_metadata().items() if k not in without}
    twin = type(tensor)(shape=tensor.shape, dtype=tensor.dtype, **keywords)
    assert twin._quantizer == tensor._quantizer
    assert torch.equal(twin.dequantize(), tensor.dequantize())


def test_writes_to_a_tensor_of_given_buffers_record_no_amax() -> None:
    quantizer = fuser.Float8Quantizer(scale=torch.ones(1), amax=torch.zeros(1))
    tensor: Any = quantizer(values())
    recorded = quantizer.amax.clone()
    assert recorded > 0
    keywords = {**tensor.get_metadata(), "quantizer": quantizer}
    twin = type(tensor)(shape=tensor.shape, dtype=tensor.dtype, **keywords)
    twin.copy_(100 * values(5))
    twin.quantize_(100 * values(6))
    assert torch.equal(quantizer.amax, recorded)


def test_float8_data_may_be_of_a_float8_dtype_and_in_the_tensors_shape() -> None:
    tensor = QUANTIZERS["current"](values())
    twin = fuser.Float8Tensor(
        shape=tensor.shape,
        dtype=torch.float32,
        data=tensor._data.view(torch.float8_e4m3fn),
        fp8_scale_inv=tensor._scale_inv.reshape(()),
        fp8_dtype=DType.kFloat8E4M3,
    )
    assert torch.equal(twin.dequantize(), tensor.dequantize())
    assert torch.equal(twin.with_usage("columnwise")._transpose, tensor._transpose)
    x = values(7, (4, 96)).requires_grad_()
    assert torch.equal(x @ twin[0].t(), x @ tensor[0].t())


def test_buffers_that_do_not_fit_are_refused() -> None:
    data = torch.zeros(32, 96, dtype=torch.uint8)
    scale = torch.ones(1)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (
            fuser.Float8Tensor,
            {"data": data[:3], "fp8_scale_inv": scale},
            said("tensors-shape-needs-contiguous", None, None, None, None, "shape (3, 96)"),
        ),
        (
            fuser.Float8Tensor,
            {"data": data},
            said("tensors-shape-needs-contiguous", None, None, "_scale_inv", holds("1,"), "none"),
        ),
        (fuser.Float8Tensor, {"fp8_scale_inv": scale}, said("tensors-no-data-give")),
        (fuser.Float8Tensor, {"data": data.t(), "fp8_scale_inv": scale}, "contiguous"),
        (fuser.MXFP8Tensor, {"rowwise_data": data}, "_rowwise_scale_inv"),
        (fuser.MXFP8Tensor, {"rowwise_data": data, "with_gemm_swizzled_scales": True}, "swizzled"),
        (
            fuser.NVFP4Tensor,
            {"rowwise_data": data},
            said("tensors-shape-needs-contiguous", None, None, "_rowwise_data", holds("32, 48")),
        ),
    ]
    for cls, keywords, sentence in cases:
        with pytest.raises(fuser.InputError, match=sentence):
            cls(shape=(32, 96), dtype=torch.float32, **keywords)
    with pytest.raises(
        fuser.InputTypeError, match=said("tensors-takes-no-keyword", None, "'datum'")
    ):
        fuser.Float8Tensor(shape=(32, 96), dtype=torch.float32, datum=data)


# -- Float8Tensor's bytes --------------------------------------------------------------


def test_float8_data_has_the_shape_of_the_tensor_and_shares_its_bytes() -> None:
    tensor = QUANTIZERS["current"](values())
    assert tensor._data.shape == (2, 32, 96)
    assert tensor._transpose.shape == (96, 64)
    for view in (tensor[1], tensor[:, None], tensor.view(64, 96)[3:5], tensor.view(64, 96).t()):
        assert view._data.shape == view.shape
        expected = decoded(view._data) * tensor._scale_inv
        assert torch.equal(expected, view.dequantize())
    assert tensor._data.data_ptr() == tensor.buffers()["_rowwise_data"].data_ptr()
    assert tensor.with_usage("columnwise")._data is None


def decoded(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float8_e4m3fn).float()


def test_setting_float8_data_sets_the_contents_without_a_stale_transpose() -> None:
    tensor, other = QUANTIZERS["current"](values()), QUANTIZERS["current"](values(5))
    version = tensor._version
    tensor._data, tensor._scale_inv = other._data.clone(), other._scale_inv
    assert tensor._version > version
    assert tensor._transpose is None
    for which in COPIES:
        assert torch.equal(tensor.with_usage(which).dequantize(), other.dequantize())
    tensor._transpose = other._transpose
    assert torch.equal(tensor.with_usage("columnwise").dequantize(), other.dequantize())
    with pytest.raises(fuser.InputError, match=said("fp8-bytes-float8tensor-x", 64, 96)):
        tensor._data = other._data[1]
    with pytest.raises(fuser.InputError, match=said("fp8-bytes-float8tensor-x", 64, 96)):
        tensor._data = other._data.float()
    tensor._data.zero_()
    tensor._reset_caches()
    assert not tensor.with_usage("columnwise").dequantize().any()


# -- methods ---------------------------------------------------------------------------


@every_quantizer
def test_usages_and_data_say_which_copies_are_here(quantizer: Any) -> None:
    tensor = quantizer(values())
    names = [tensor._names(which)[0] for which in COPIES]
    row, column = (getattr(tensor, name) for name in names)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    assert [a is b for a, b in zip(tensor.get_data_tensors(), (row, column), strict=True)] == [
        True,
        True,
    ]
    assert tensor.get_data_tensors(columnwise_data=False) is row
    assert tensor.get_data_tensors(rowwise_data=False) is column
    with pytest.raises(fuser.InputError, match=said("tensors-get-neither-nor")):
        tensor.get_data_tensors(rowwise_data=False, columnwise_data=False)
    tensor.update_usage(columnwise_usage=False)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}
    assert tensor.get_data_tensors(rowwise_data=False) is None
    assert tensor._get_quantizer() == tensor._quantizer


@every_quantizer
def test_make_like_shares_bytes_in_another_shape_or_dtype(quantizer: Any) -> None:
    tensor = quantizer(values())
    made = type(tensor).make_like(tensor, shape=(64, 96), dtype=torch.bfloat16, requires_grad=True)
    assert (made.shape, made.dtype, made.requires_grad) == ((64, 96), torch.bfloat16, True)
    assert same_buffers(made, tensor)
    half = tensor.to_dtype(torch.float16)
    assert half.dtype is torch.float16
    assert torch.equal(half.dequantize(dtype=torch.float32), tensor.dequantize())
    half.zero_()
    assert not tensor.dequantize().any()
    with pytest.raises(fuser.InputError, match=said("tensors-make-like-tensor")):
        type(tensor).make_like(tensor, shape=(96, 64))
    rows = tensor.view(64, 96)[32:]
    if isinstance(rows, fuser.QuantizedTensor):
        alike = type(tensor).make_like(rows, dtype=torch.bfloat16)
        assert alike.storage_offset() == rows.storage_offset() > 0
        alike.fill_(1.0)
        assert (tensor.view(64, 96)[32:].dequantize() == 1).all()
        assert not tensor.view(64, 96)[:32].dequantize().any()
    with pytest.raises(fuser.StateError, match=said("base-read-only-layout")):
        tensor.with_usage("rowwise").to_dtype(torch.float16).zero_()


@every_quantizer
def test_a_tensor_is_saved_for_backward_in_parts(quantizer: Any) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            parts, ctx.waiting = quantizer(x).prepare_for_saving()
            others, ctx.other = quantizer(2 * x).prepare_for_saving()
            ctx.save_for_backward(*parts, *others)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            with pytest.raises(fuser.StateError, match=said("base-bytes-cleared-another")):
                ctx.waiting.dequantize()
            rest = ctx.waiting.restore_from_saved(ctx.saved_tensors)
            assert ctx.other.restore_from_saved(rest) == []
            dx: torch.Tensor = dy * ctx.waiting.dequantize() * ctx.other.dequantize()
            return dx

    x = values().requires_grad_()
    Double.apply(x).sum().backward()
    expected = quantizer(x.detach()).dequantize() * quantizer(2 * x.detach()).dequantize()
    assert torch.equal(x.grad, expected)
    tensor = quantizer(values())
    tensor.prepare_for_saving()
    assert torch.equal(tensor.dequantize(), quantizer(values()).dequantize())


@every_quantizer
def test_a_cleared_tensor_has_no_bytes_and_leaves_its_aliases_theirs(quantizer: Any) -> None:
    tensor = quantizer(values())
    alias, twin = tensor.detach(), copy.deepcopy(tensor)
    tensor.clear()
    assert tensor.get_usages() == {"rowwise": False, "columnwise": False}
    with pytest.raises(fuser.StateError, match=said("base-bytes-cleared-another")):
        tensor.dequantize()
    assert same_buffers(alias, twin)


@every_quantizer
def test_a_write_under_a_flag_that_is_set_leaves_every_byte(quantizer: Any) -> None:
    tensor, x = quantizer(values(shape=(64, 96))), values(5, (64, 96))
    before = copy.deepcopy(tensor)
    rows = tensor[:32]
    for flag in (torch.ones(1), torch.ones(()), torch.ones(1, dtype=torch.int32)):
        assert tensor.quantize_(x, noop_flag=flag) is tensor
        if isinstance(rows, fuser.QuantizedTensor):
            rows.quantize_(x[:32], noop_flag=flag)
        assert same_buffers(tensor, before)
    if isinstance(rows, fuser.QuantizedTensor):
        rows.quantize_(x[:32], noop_flag=torch.zeros(1))
        assert not torch.equal(tensor[:32].dequantize(), before[:32].dequantize())
    tensor.quantize_(x, noop_flag=torch.zeros(1))
    assert same_buffers(tensor, quantizer(x))


@every_quantizer
def test_columns_of_a_chunk_are_those_of_the_values(quantizer: Any) -> None:
    tensor = quantizer(values())
    for found, expected in zip(
        tensor.chunk(3, dim=-1), tensor.dequantize().chunk(3, dim=-1), strict=True
    ):
        assert torch.equal(found, expected)
