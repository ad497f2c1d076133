"""Rows of the arguments of methods of quantizers and quantized tensors, against fp64."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import operands_in_fp64 as formats
import torch
from argument_checks import refuses
from argument_rows import Of, sets
from operands_in_fp64 import Format, blocks, mxfp8, nvfp4, one_scale
from rows_of_quantizers import SIZES, USAGES, assert_copies, hybrid, mxfp8_beside_rows, sample
from rows_of_recipes import Given
from torch.testing import assert_close

import fuser
from fuser import tensors

QUANTIZER = "fuser.Float8BlockQuantizer"
TENSOR = "fuser.QuantizedTensor"
GROUPS = "fuser.GroupedTensor"
METHODS = (
    f"{TENSOR}.dequantize_padded",
    f"{TENSOR}.release",
    f"{TENSOR}.set_high_precision_init_val",
    f"{TENSOR}.type_as",
    f"{TENSOR}.with_usage",
)
"""Methods of which all arguments have rows."""
QUANTIZERS: tuple[tuple[Any, Format], ...] = (
    (fuser.Float8Quantizer, formats.a_scale(1.0)),
    (fuser.Float8CurrentScalingQuantizer, one_scale()),
    (fuser.Float8BlockQuantizer, blocks(2)),
    (fuser.MXFP8Quantizer, mxfp8()),
    (fuser.NVFP4Quantizer, nvfp4()),
    (fuser.IdentityQuantizer, formats.unquantized),
    (hybrid, mxfp8_beside_rows),
)
"""What makes a changeable quantizer of each format, and the format in fp64."""
ONES = torch.ones(1)


def other() -> torch.Tensor:
    return sample().flip(0) * -3


def _rowwise(expected: Format, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(expected(x.numpy()).rowwise).double()


# -- quantizers -----------------------------------------------------------------------------


@sets(f"{QUANTIZER}.quantize", out=Of("a tensor", instead=None))
def _the_tensor_that_is_written(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        target = make()(other())
        assert make().quantize(x, out=given["out"] and target) is not None
        assert_copies(target, expected(x.numpy()))


@sets(f"{QUANTIZER}.quantize", dtype=torch.bfloat16)
def _the_dtype_of_the_source(given: Given) -> None:
    for make, _ in QUANTIZERS:
        x = sample().bfloat16()
        assert torch.equal(make().quantize(x, **given).dequantize(), make()(x).dequantize())
        refuses(partial(make().quantize, sample(), **given), "got dtype torch.bfloat16")


@sets(f"{QUANTIZER}.update_quantized", noop_flag=ONES)
def _a_flag_against_a_write(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        target = make()(x)
        make().update_quantized(other(), target, **given)
        assert_copies(target, expected(x.numpy()))
        make().update_quantized(other(), target, noop_flag=0 * ONES)
        assert_copies(target, expected(other().numpy()))


def _empty(make: Any, **given: Any) -> Any:
    return make().make_empty((32, 64), **given)


@sets(f"{QUANTIZER}.make_empty", dtype=torch.bfloat16)
def _the_dtype_of_an_empty_tensor(given: Given) -> None:
    for make, _ in QUANTIZERS:
        tensor = _empty(make, **given)
        assert tensor.dtype is tensor.dequantize().dtype is torch.bfloat16
        assert not tensor.dequantize().any()


@sets(f"{QUANTIZER}.make_empty", device="meta")
def _the_device_of_an_empty_tensor(given: Given) -> None:
    for make, _ in QUANTIZERS[1:]:  # the scale of the first is on the CPU
        assert _empty(make, **given).device.type == "meta"


@sets(f"{QUANTIZER}.make_empty", requires_grad=True)
def _an_empty_tensor_that_gets_a_gradient(given: Given) -> None:
    for make, _ in QUANTIZERS:
        tensor = _empty(make, **given)
        tensor.dequantize().sum().backward()
        assert torch.equal(tensor.grad, torch.ones(32, 64))


@sets(f"{QUANTIZER}.make_empty", pin_memory=True)
def _an_empty_tensor_in_pinned_memory(given: Given) -> None:
    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        twin = tensor.clone()
        twin.is_in_pinned_memory = True
        return twin

    with mock.patch.object(torch.Tensor, "pin_memory", pinned):
        for make, _ in QUANTIZERS:
            tensor = _empty(make, **given)
            assert isinstance(tensor, fuser.QuantizedTensor)
            assert tensor.is_in_pinned_memory


def _rows_of_usages(usage: str, remaining: str) -> None:
    @sets(f"{QUANTIZER}.with_usage", **{usage: Of(False, instead=True)})
    def a_copy_of_another_quantizer(given: Given) -> None:
        x = sample()
        for make, expected in QUANTIZERS:
            before = make()
            after = before.with_usage(**{remaining: True, **given})
            assert_copies(after(x), expected(x.numpy()), (remaining,))
            assert_copies(before(x), expected(x.numpy()))

    @sets("fuser.Quantizer.with_usage", **{usage: Of(False, instead=True)})
    def a_copy_of_another_frozen_quantizer(given: Given) -> None:
        x = sample()
        before = tensors.MXFP8Quantizer()
        after = before.with_usage(**{remaining: True, **given})
        assert_copies(after(x), mxfp8()(x.numpy()), (remaining,))
        assert_copies(before(x), mxfp8()(x.numpy()))
        assert before.with_usage(**{remaining: True, **given}) is after

    @sets(f"{QUANTIZER}.set_usage", **{usage: False})
    def copies_of_the_next_tensor(given: Given) -> None:
        x = sample()
        for make, expected in QUANTIZERS:
            quantizer = make()
            assert_copies(quantizer(x), expected(x.numpy()))
            quantizer.set_usage(**given)
            assert_copies(quantizer(x), expected(x.numpy()), (remaining,))
            quantizer.set_usage(**dict.fromkeys(given, True))
            assert_copies(quantizer(x), expected(x.numpy()))

    @sets(f"{QUANTIZER}.{usage}_usage", usage=Of(False, instead=True))
    def an_attribute_says_the_copies(given: Given) -> None:
        x = sample()
        for make, expected in QUANTIZERS:
            quantizer = make()
            assert_copies(quantizer(x), expected(x.numpy()))
            setattr(quantizer, f"{usage}_usage", given["usage"])
            assert_copies(quantizer(x), expected(x.numpy()), (remaining,))

    @sets(f"{TENSOR}.update_usage", **{f"{usage}_usage": False})
    def copies_of_a_tensor(given: Given) -> None:
        x = sample()
        for make, expected in QUANTIZERS:
            tensor = make()(x)
            tensor.update_usage(**given)
            assert_copies(tensor, expected(x.numpy()), (remaining,))
        for make, expected in QUANTIZERS[:3]:  # whose copies have the same values
            tensor = make().with_usage(**{usage: False, remaining: True})(x)
            tensor.update_usage(**dict.fromkeys(given, True))
            assert_copies(tensor, expected(x.numpy()))

    @sets(f"{GROUPS}.update_usage", **{f"{usage}_usage": False})
    def copies_of_groups(given: Given) -> None:
        tensor = _groups()
        tensor.update_usage(**given)
        for member, x in zip(tensor.members(), sample()[:128].split(SIZES), strict=True):
            assert_copies(member, mxfp8()(x.numpy()), (remaining,))


_rows_of_usages(*USAGES)
_rows_of_usages(*USAGES[::-1])


# -- quantized tensors ----------------------------------------------------------------------


def _groups() -> fuser.GroupedTensor:
    sizes = torch.tensor(SIZES)
    return fuser.GroupedTensor.quantize(sample()[:128], sizes, fuser.MXFP8Quantizer())


@sets(f"{TENSOR}.dequantize", dtype=torch.bfloat16)
def _the_dtype_of_values(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        tensor = make()(x).requires_grad_()
        values = tensor.dequantize(**given)
        exact = _rowwise(expected, x)
        assert values.dtype is torch.bfloat16
        assert_close(values.double(), exact, rtol=2**-8, atol=0.0)
        values.backward(other().bfloat16())
        assert torch.equal(tensor.grad, other().bfloat16().float())


@sets(f"{GROUPS}.dequantize", dtype=torch.bfloat16)
def _the_dtype_of_values_of_groups(given: Given) -> None:
    values = _groups().dequantize(**given)
    assert values.dtype is torch.bfloat16
    parts = [mxfp8()(x.numpy()).rowwise for x in sample()[:128].split(SIZES)]
    exact = torch.cat([torch.from_numpy(part) for part in parts])
    assert_close(values.double(), exact, rtol=2**-8, atol=0.0)


@sets(f"{TENSOR}.high_precision_source", value=Of(other(), instead=None))
def _what_a_backward_in_high_precision_reads(given: Given) -> None:
    recipe = fuser.recipe.Float8CurrentScaling(backward_override="high_precision")
    tensor = fuser.Float8CurrentScalingQuantizer()(sample())
    tensor.high_precision_source = given["value"]
    linear = fuser.BasicLinear(144, 16)
    dy = torch.randn(len(tensor), 16, generator=torch.Generator().manual_seed(2))
    with fuser.autocast(recipe=recipe):
        linear(tensor).backward(dy)
    assert_close(linear.weight.grad, dy.T @ other())
    tensor.fill_(1.0)
    assert tensor.high_precision_source is None


@sets(f"{TENSOR}.quantize_", noop_flag=ONES)
def _a_flag_against_a_write_to_a_tensor(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        tensor = make()(x)
        tensor.quantize_(other(), **given)
        assert_copies(tensor, expected(x.numpy()))
        tensor.quantize_(other(), noop_flag=0 * ONES)
        assert_copies(tensor, expected(other().numpy()))


@sets(f"{TENSOR}.data", value=Of(other(), instead=sample()))
def _contents_that_are_set(given: Given) -> None:
    """A plain tensor is quantized for the copies that there are, and a quantized one shared."""
    for make, expected in QUANTIZERS:
        for is_quantized, usages in ((False, USAGES[1:]), (False, USAGES), (True, USAGES)):
            quantizer = make().with_usage(**{usage: usage in usages for usage in USAGES})
            tensor = quantizer(sample())
            value = quantizer(given["value"]) if is_quantized else given["value"]
            tensor.data = value
            assert_copies(tensor, expected(other().numpy()), tuple(usages))
            if is_quantized:
                own, shared = tensor.buffers(), value.buffers()
                assert all(own[name] is shared[name] for name in own)


@sets(f"{TENSOR}.type", dtype=torch.bfloat16)
def _values_of_another_type(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        tensor = make()(x)
        values = tensor.type(**given)
        assert type(values) is torch.Tensor
        assert values.dtype is torch.bfloat16
        exact = _rowwise(expected, x)
        assert_close(values.double(), exact, rtol=2**-8, atol=0.0)


@sets(f"{TENSOR}.fsdp_post_all_gather", out=Of("made before", instead=None))
def _a_gathered_parameter_that_was_made_before(given: Given) -> None:
    """Its buffers are filled, and nothing is made."""
    tensor = fuser.Float8CurrentScalingQuantizer()(sample())
    gathering = SimpleNamespace(
        buffers=tensor.buffers(), memory=tensor.buffers(), shape=tensor.shape, freed=[]
    )
    sent = SimpleNamespace(names=(), gathering=gathering)
    out = tensor if given["out"] == "made before" else None
    with mock.patch("fuser.tensors.gathering._fill_from_shard") as filled:
        made: Any = tensor.fsdp_post_all_gather((), sent, torch.float32, out=out)
    assert filled.call_count == 1
    assert len(gathering.freed) == len(gathering.memory)
    assert made is None


@sets("fuser.Float8BlockwiseQTensor.numpy", force=True)
def _an_array_of_a_tensor_with_a_gradient(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        tensor = make()(x).requires_grad_()
        values = torch.from_numpy(tensor.numpy(**given)).double()
        exact = _rowwise(expected, x)
        assert_close(values, exact, rtol=1e-5, atol=0.0)


@sets(f"{TENSOR}.with_usage", usage=Of("columnwise", instead="rowwise"))
def _a_tensor_with_one_copy(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        assert_copies(make()(x).with_usage(**given), expected(x.numpy()), ("columnwise",))


@sets(f"{TENSOR}.release", usage=Of("columnwise", instead="rowwise"))
def _a_copy_that_is_freed(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        tensor = make()(x)
        tensor.release(**given)
        assert_copies(tensor, expected(x.numpy()), ("rowwise",))


@sets(f"{TENSOR}.set_high_precision_init_val", value=Of(sample(), instead=other()))
def _values_before_quantization(given: Given) -> None:
    for make, _ in QUANTIZERS:
        tensor = make()(sample())
        assert tensor.get_high_precision_init_val() is None
        tensor.set_high_precision_init_val(**given)
        assert torch.equal(tensor.get_high_precision_init_val(), sample())


@sets(f"{TENSOR}.type_as", other=Of(torch.ones(1, dtype=torch.bfloat16), instead=torch.ones(1)))
def _values_in_the_dtype_of_another(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        values = make()(x).type_as(**given)
        assert values.dtype is torch.bfloat16
        assert_close(values.double(), _rowwise(expected, x), rtol=2**-8, atol=0.0)


@sets(f"{TENSOR}.dequantize_padded", dtype=Of(torch.bfloat16, instead=torch.float32))
def _values_with_the_padding(given: Given) -> None:
    x = sample()
    for make, expected in QUANTIZERS:
        values = make()(x).dequantize_padded(**given)
        assert values.dtype is torch.bfloat16
        exact = _rowwise(expected, x)
        rows, columns = exact.shape
        assert_close(values.double()[:rows, :columns], exact, rtol=2**-8, atol=0.0)
        assert not values[rows:].any()
        assert not values[:, columns:].any()
