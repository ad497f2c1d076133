"""Quantizers as values, and quantized tensors as tensors: copies, views, in-place, state."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from said import holds, said

import fuser
from fuser import DType, tensors
from fuser import recipe as recipes
from fuser.tensors.sharding import is_exact

QUANTIZERS = {
    **formats.QUANTIZERS,
    "current-pow2": tensors.Float8CurrentScalingQuantizer(
        DType.kFloat8E5M2, force_pow_2_scales=True
    ),
    "mxfp8-2d": tensors.MXFP8Quantizer(with_2d_quantization=True),
    "block-1d": tensors.Float8BlockQuantizer(block_scaling_dim=1),
    "nvfp4-2d": tensors.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4-hadamard": tensors.NVFP4Quantizer(with_rht=True),
}
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


def values(rows: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return oracles.random_tensor((rows, 96), dtype, 3)


def same_buffers(a: fuser.QuantizedTensor, b: fuser.QuantizedTensor) -> bool:
    return type(a) is type(b) and all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y))
        for x, y in zip(a.buffers().values(), b.buffers().values(), strict=True)
    )


# -- quantizers are values -----------------------------------------------------------


@every_quantizer
def test_a_quantizer_is_equal_by_contents_hashable_and_picklable(quantizer: Any) -> None:
    twin = pickle.loads(pickle.dumps(quantizer))
    assert twin == quantizer
    assert hash(twin) == hash(quantizer)
    rowwise = quantizer.with_usage(rowwise=True, columnwise=False)
    assert rowwise != quantizer
    assert quantizer.columnwise  # unchanged
    with pytest.raises(AttributeError):
        quantizer.columnwise = False


@every_quantizer
def test_another_usage_is_made_once_and_is_no_part_of_the_value(quantizer: Any) -> None:
    quantizer = copy.deepcopy(quantizer)
    twin = copy.deepcopy(quantizer)
    assert twin == quantizer
    rowwise = quantizer.with_usage(rowwise=True, columnwise=False)
    assert (rowwise.rowwise, rowwise.columnwise) == (True, False)
    assert quantizer.with_usage(rowwise=True, columnwise=False) is rowwise
    assert rowwise.with_usage(rowwise=True, columnwise=True) is quantizer
    assert quantizer.with_usage(rowwise=True, columnwise=True) is quantizer
    # Those that have been asked are the same values as one that has not.
    assert twin == quantizer
    assert hash(twin) == hash(quantizer)
    assert len(pickle.dumps(quantizer)) == len(pickle.dumps(dataclasses.replace(quantizer)))
    assert repr(twin) == repr(quantizer)
    assert rowwise == twin.with_usage(rowwise=True, columnwise=False)


def test_threads_that_ask_at_once_get_the_same_quantizer() -> None:
    for _ in range(20):
        quantizer, start = fuser.MXFP8Quantizer(), threading.Barrier(8)

        def ask(i: int, quantizer: Any = quantizer, start: Any = start) -> Any:
            start.wait()
            return quantizer.with_usage(rowwise=i % 2 == 0, columnwise=i % 2 == 1)

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(ask, range(8)))
        assert len({id(one) for one in found}) == 2
        assert found[0].rowwise
        assert found[1].columnwise


def test_delayed_quantizers_are_equal_if_they_hold_the_same_state() -> None:
    scale, amax = torch.full((1,), 8.0), torch.zeros(1)
    quantizer = fuser.Float8Quantizer(scale, amax)
    assert quantizer == fuser.Float8Quantizer(scale, amax)
    assert hash(quantizer) == hash(fuser.Float8Quantizer(scale, amax))
    assert quantizer != fuser.Float8Quantizer(scale.clone(), amax)
    for twin in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
        assert twin != quantizer  # with a state of its own
        assert torch.equal(twin.scale, scale)
    one, other = copy.deepcopy((quantizer, fuser.Float8Quantizer(scale, amax)))
    assert one == other
    x = values()
    rowwise = quantizer.with_usage(rowwise=True, columnwise=False)
    rowwise(x)
    assert torch.equal(amax, x.abs().max().float().reshape(1))


def test_different_quantizers_differ() -> None:
    assert len(set(QUANTIZERS.values())) == len(QUANTIZERS)


def test_a_quantizer_without_any_usage_is_refused() -> None:
    quantizer = fuser.MXFP8Quantizer(rowwise=False, columnwise=False)
    with pytest.raises(fuser.InputError, match=said("quantizer-makes-neither-rowwise")):
        quantizer(values())


@every_quantizer
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0),
        torch.ones(32, 32, dtype=torch.int32),
        torch.ones(32, 32, dtype=torch.float8_e4m3fn),
    ],
)
def test_what_has_no_rows_or_no_fractions_or_is_fp8_is_refused(quantizer: Any, tensor: Any) -> None:
    with pytest.raises(fuser.InputError, match=said("quantizer-tensor-shape-dtype")):
        quantizer(tensor)


@every_quantizer
def test_fp64_is_quantized_as_its_fp32_values(quantizer: Any) -> None:
    x = values().float()
    x[0, 0] = 0.0
    made = quantizer(x.double())
    assert made.dtype is torch.float64
    for ours, theirs in zip(made._memory(), quantizer(x)._memory(), strict=True):
        assert torch.equal(ours, theirs)


# -- contents ------------------------------------------------------------------------


@every_quantizer
def test_both_copies_dequantize_near_the_values(quantizer: Any) -> None:
    x = values(dtype=torch.float32)
    tensor = quantizer(x)
    assert (tensor.shape, tensor.dtype) == (x.shape, x.dtype)
    step = {DType.kFloat8E4M3: 2**-4, DType.kFloat8E5M2: 2**-3}.get(
        getattr(quantizer, "fp8_dtype", None), 2**-2
    )
    for which in ("rowwise", "columnwise"):
        back = tensor.with_usage(which).dequantize()
        # A scale rounded down to a power of two costs nothing; the largest sets the step.
        assert (back - x).norm() <= step * x.norm()
        assert back.dtype is torch.float32
        half = tensor.with_usage(which).dequantize(dtype=torch.bfloat16)
        assert half.dtype is torch.bfloat16
        assert torch.equal(half, back.bfloat16())


@every_quantizer
def test_one_usage_gives_the_same_bytes_as_both(quantizer: Any) -> None:
    x = values()
    both = quantizer(x)
    for rowwise, which in ((True, "rowwise"), (False, "columnwise")):
        alone = quantizer.with_usage(rowwise=rowwise, columnwise=not rowwise)(x)
        assert same_buffers(alone, both.with_usage(which))


@every_quantizer
def test_update_usage_drops_and_refuses(quantizer: Any) -> None:
    tensor = quantizer(values())
    before = tensor.with_usage("rowwise").dequantize()
    tensor.update_usage(columnwise_usage=False)
    assert not tensor._usage().columnwise
    assert torch.equal(tensor.dequantize(), before)
    with pytest.raises(fuser.StateError, match=said("base-neither-rowwise-nor")):
        tensor.update_usage(rowwise_usage=False)
    whole = quantizer(values())
    is_2d_block = getattr(quantizer, "block_scaling_dim", None) == 2
    if isinstance(tensor, fuser.Float8Tensor) or is_2d_block:
        tensor.update_usage(columnwise_usage=True)
        assert same_buffers(tensor, whole)
        tensor.update_usage(rowwise_usage=False)
        tensor.update_usage(rowwise_usage=True)
        assert same_buffers(tensor, whole)
    else:
        with pytest.raises(fuser.StateError, match=said("base-format-cannot-other")):
            tensor.update_usage(columnwise_usage=True)


# -- as tensors ------------------------------------------------------------------------


@every_quantizer
def test_arithmetic_is_that_of_the_dequantized_tensor(quantizer: Any) -> None:
    tensor = quantizer(values(dtype=torch.float32))
    plain = tensor.dequantize()
    assert torch.equal(tensor + 1, plain + 1)
    assert torch.equal(tensor @ plain.T, plain @ plain.T)
    assert torch.equal(torch.cat([tensor, plain]), torch.cat([plain, plain]))
    assert torch.equal(tensor[3:5], plain[3:5])
    assert torch.equal(tensor.t(), plain.t())
    assert tensor.sum() == plain.sum()


@every_quantizer
@pytest.mark.parametrize(
    "duplicate",
    [
        torch.clone,
        copy.deepcopy,
        lambda t: t.to("cpu", copy=True),
        lambda t: t.detach(),
        lambda t: pickle.loads(pickle.dumps(t)),
    ],
    ids=["clone", "deepcopy", "to", "detach", "pickle"],
)
def test_duplicates_keep_the_bytes(quantizer: Any, duplicate: Any) -> None:
    tensor = quantizer(values())
    twin = duplicate(tensor)
    assert same_buffers(twin, tensor)
    assert (twin.shape, twin.dtype) == (tensor.shape, tensor.dtype)
    assert twin._quantizer == tensor._quantizer


def test_a_file_with_other_buffers_is_refused() -> None:
    rebuild, (cls, buffers, *rest) = QUANTIZERS["current"](values()).__reduce_ex__(2)
    older = {name.replace("_rowwise", ""): buffer for name, buffer in buffers.items()}
    with pytest.raises(
        fuser.InputError,
        match=said("base-file-version-consists", "Float8Tensor", "_data", holds("_rowwise_data, ")),
    ):
        rebuild(cls, older, *rest)


@every_quantizer
def test_a_view_keeps_scales_or_is_plain(quantizer: Any) -> None:
    tensor = quantizer(values())
    kept = tensor.view(2, 32, 96)
    assert isinstance(kept, fuser.QuantizedTensor)
    assert torch.equal(kept.dequantize(), tensor.dequantize().view(2, 32, 96))
    other = tensor.reshape(96, 64)
    assert not isinstance(other, fuser.QuantizedTensor)
    assert torch.equal(other, tensor.dequantize().reshape(96, 64))


@every_quantizer
def test_writing_in_place_quantizes_again(quantizer: Any) -> None:
    tensor = quantizer(values(dtype=torch.float32))
    expected = quantizer(tensor.dequantize() * 2 + 1)
    buffers = {n: b.data_ptr() for n, b in tensor.buffers().items() if b is not None}
    tensor.copy_(tensor.dequantize() * 2 + 1)
    assert same_buffers(tensor, expected)
    assert buffers == {n: b.data_ptr() for n, b in tensor.buffers().items() if b is not None}
    source = quantizer(values())
    tensor.copy_(source)
    assert same_buffers(tensor, source)
    doubled = quantizer(tensor.dequantize() * 2)
    assert tensor.mul_(2) is tensor
    assert same_buffers(tensor, doubled)


# -- parameters --------------------------------------------------------------------------

MAKERS = formats.RECIPES
every_recipe = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def quantized_linear(make: Any, **options: Any) -> fuser.Sequential:
    torch.manual_seed(0)
    with fuser.quantized_model_init(recipe=make(), **options):
        return fuser.Sequential(fuser.Linear(64, 32))


@every_recipe
def test_quantized_parameters_train_with_a_torch_optimizer(make: Any) -> None:
    model = quantized_linear(make)
    weight = model[0].weight
    assert isinstance(weight, fuser.QuantizedTensor)
    assert isinstance(weight, torch.nn.Parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = oracles.random_tensor((64, 64), torch.float32, 1)
    target = oracles.random_tensor((64, 32), torch.float32, 2)
    losses = []
    for _ in range(5):
        with fuser.autocast(recipe=make()):
            loss = torch.nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert model[0].weight is weight
    assert isinstance(weight, fuser.QuantizedTensor)


@every_recipe
def test_checkpoints_go_between_quantized_and_plain_models(make: Any, tmp_path: Any) -> None:
    model = quantized_linear(make)
    file = tmp_path / "model.pt"
    torch.save(model.state_dict(), file)
    state = torch.load(file, weights_only=True)
    again = quantized_linear(make)
    again.load_state_dict(state)
    assert same_buffers(again[0].weight, model[0].weight)
    plain = fuser.Sequential(fuser.Linear(64, 32))
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, model[0].weight.dequantize())
    back = quantized_linear(make)
    back.load_state_dict(plain.state_dict())
    assert torch.equal(back[0].weight.dequantize(), model[0].weight.dequantize())


def test_initial_values_can_be_kept() -> None:
    torch.manual_seed(0)
    exact = fuser.Linear(64, 32).weight.detach()
    weight = quantized_linear(recipes.MXFP8BlockScaling, preserve_high_precision_init_val=True)[
        0
    ].weight
    kept = weight.get_high_precision_init_val()
    assert torch.equal(kept, exact)
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.copy_(torch.ones(32, 64)),
        lambda w: w.detach()[:1].zero_(),
        lambda w: w.data.mul_(2.0),
        lambda w: w.quantize_(torch.ones(32, 64)),
        lambda w: setattr(w, "data", torch.ones(32, 64)),
        lambda w: torch.nn.init.normal_(w),
    ],
)
def test_a_write_ends_the_initial_values(write: Any) -> None:
    """They are no longer those of the parameter, with which an optimizer would begin."""
    layer = quantized_linear(recipes.MXFP8BlockScaling, preserve_high_precision_init_val=True)
    weight = layer[0].weight
    layer(torch.ones(1, 64)).sum().backward()
    assert weight.get_high_precision_init_val() is not None
    with torch.no_grad():
        write(weight)
    assert weight.get_high_precision_init_val() is None


def test_a_quantized_parameter_without_autocast_computes_with_its_values() -> None:
    model = quantized_linear(recipes.MXFP8BlockScaling)
    x = oracles.random_tensor((3, 64), torch.float32, 1).requires_grad_()
    y = model(x)
    weight, bias = model[0].weight.dequantize(), model[0].bias
    torch.testing.assert_close(y, x @ weight.T + bias)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 32) @ weight)
    assert not isinstance(model[0].weight.grad, fuser.QuantizedTensor)


def test_a_bound_quantizer_reduces_its_amax_and_leaves_nothing_of_it_on_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reduced: list[Any] = []

    def all_reduce(amax: torch.Tensor, op: Any, group: Any) -> None:
        reduced.append((op, group))
        amax.mul_(2)  # another rank's is larger

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    quantizer, x = fuser.Float8CurrentScalingQuantizer(), values()
    alone, together = quantizer(x), quantizer.bound_to("group")(x)
    assert reduced == [(torch.distributed.ReduceOp.MAX, "group")]
    assert torch.equal(together._scale_inv, 2 * alone._scale_inv)
    assert together._quantizer == quantizer
    assert together._quantizer.reduced_amaxes is None
    delayed = fuser.Float8Quantizer(torch.full((1,), 1e6), torch.zeros(1), saturates=False)
    made = delayed.bound_to("group")(x)
    largest = 2 * x.abs().max().float()
    assert torch.equal(delayed.amax, largest.view(1))
    torch.testing.assert_close(made._scale_inv, (largest / E4M3_MAX).view(1))
    assert reduced[1:] == [(torch.distributed.ReduceOp.MAX, "group")]
    # Block scales are each rank's own: there is nothing to bind.
    blocks = fuser.MXFP8Quantizer()
    assert blocks.bound_to("group") is blocks


def test_without_saturation_an_infinity_leaves_the_scale_that_there_was() -> None:
    x = torch.tensor([[1.0, torch.inf, -3.0, 2.0]])
    quantizer = fuser.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1), saturates=False)
    made = quantizer(x)
    assert made._scale_inv.item() == 0.5
    assert made.dequantize()[0, ::2].tolist() == [1.0, -3.0]
    assert torch.equal(quantizer(torch.full((1, 4), 448.0))._scale_inv, torch.ones(1))


class OfFewerBuffers(fuser.Float8CurrentScalingQuantizer):
    """Says nothing of what its own function takes and makes."""

    def buffers_of(self, rows: Any) -> dict[str, torch.Tensor | None]:
        return super().buffers_of(rows)


class OfTheSame(OfFewerBuffers):
    """Says it again."""

    accepts_lazy = True
    reduces_scales = True
    is_repeatable = True

    def buffers_of(self, rows: Any) -> dict[str, torch.Tensor | None]:
        return super().buffers_of(rows)


def test_a_quantizer_with_a_function_of_its_own_inherits_no_promise_about_it() -> None:
    names = ("accepts_lazy", "reduces_scales", "is_repeatable")
    for cls, expected in (
        (fuser.Float8CurrentScalingQuantizer, True),
        (OfFewerBuffers, False),
        (OfTheSame, True),
    ):
        assert [getattr(cls(), name) for name in names] == [expected] * 3


@every_quantizer
def test_a_copy_between_tensors_with_one_copy_is_one_of_bytes(quantizer: Any) -> None:
    """Quantizing the values again may round them again."""
    for which in ("rowwise", "columnwise"):
        alone = quantizer.with_usage(**{each: each == which for each in ("rowwise", "columnwise")})
        source, target = alone(values(dtype=torch.float32)), alone(torch.zeros(64, 96))
        target.copy_(source)
        assert same_buffers(target, source)


@every_quantizer
def test_a_row_is_copied_into_all_rows(quantizer: Any) -> None:
    target, row = quantizer(values(64)), quantizer(values(1))
    target.copy_(row)
    expected = quantizer(row.dequantize().expand(64, 96))
    assert same_buffers(target, expected)


@every_quantizer
def test_a_tensor_of_a_graph_is_not_deeply_copied(quantizer: Any) -> None:
    tensor = quantizer(values().requires_grad_())
    for one in (tensor, tensor[:, 3:9]):
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(one)


@every_quantizer
def test_a_conversion_rounds_once(quantizer: Any) -> None:
    tensor = quantizer(values(dtype=torch.bfloat16))
    exact = tensor.dequantize(dtype=torch.float32)
    assert torch.equal(tensor.to(torch.float32), exact)
    assert torch.equal(tensor.to(torch.float16), tensor.dequantize(dtype=torch.float16))
    assert torch.equal(tensor.to(torch.int32), tensor.dequantize().to(torch.int32))


def through_a_graph(tensor: Any) -> Any:
    """A tensor as ``torch.compile`` takes it apart, and puts it together in a graph."""
    names, constants = tensor.__tensor_flatten__()
    buffers = {name: getattr(tensor, name) for name in names}
    return type(tensor).__tensor_unflatten__(buffers, constants, tensor.shape, tensor.stride())


@every_quantizer
def test_in_a_graph_what_shares_bytes_or_a_state_is_there_to_be_read(quantizer: Any) -> None:
    whole = quantizer(values(384))
    delayed = fuser.Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1))(values())
    through_a_graph(quantizer(values(384))).zero_()
    for one in (whole.with_usage("rowwise"), whole[:128], delayed):
        found = through_a_graph(one)
        assert torch.equal(found.dequantize(), one.dequantize())
        with pytest.raises(fuser.StateError, match=said("base-read-only-layout")):
            found.zero_()


# Rows of a block of the rowwise and of the columnwise copy.
BLOCK_ROWS = {"block": (128, 128), "mxfp8": (1, 32), "nvfp4": (1, 16)}
E4M3_MAX = 448.0


@pytest.mark.parametrize("copies", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", BLOCK_ROWS)
def test_shards_have_the_bytes_of_the_whole_if_no_copy_has_a_block_in_two_of_them(
    name: str, copies: tuple[bool, bool]
) -> None:
    rowwise, columnwise = copies
    quantizer = formats.QUANTIZERS[name].with_usage(rowwise=rowwise, columnwise=columnwise)
    whole = quantizer(torch.randn(256, 128))
    units = [rows for rows, is_made in zip(BLOCK_ROWS[name], copies, strict=True) if is_made]
    for ranks in (1, 2, 3, 4, 8, 16, 32):
        fits = ranks != 3 and all(256 // ranks % unit == 0 for unit in units)
        assert is_exact(whole, quantizer, ranks) is (fits or ranks == 1)
    fits = all(128 % unit == 0 for unit in units)
    assert is_exact(quantizer(torch.randn(384, 128)), quantizer, 3) is fits


@pytest.mark.parametrize("rows", [256, 255])
def test_shards_of_a_tensor_with_one_scale_have_its_bytes_if_rows_are_whole(rows: int) -> None:
    """Columns that are made of rows, after these were gathered, are those of any part."""
    for copies in ((True, True), (True, False), (False, True)):
        rowwise, columnwise = copies
        quantizer = formats.QUANTIZERS["current"].with_usage(rowwise=rowwise, columnwise=columnwise)
        whole = quantizer(torch.randn(rows, 128))
        for ranks in (2, 3, 4):
            assert is_exact(whole, quantizer, ranks) is (rowwise or rows % ranks == 0)


@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", ["block", "current"])
def test_a_copy_from_a_tensor_that_has_one_copy_makes_the_other_in_the_target_alone(
    name: str, usage: str
) -> None:
    quantizer, values = formats.QUANTIZERS[name], torch.randn(256, 128)
    one = {"rowwise": usage == "rowwise", "columnwise": usage == "columnwise"}
    source: Any = quantizer.with_usage(**one)(values)
    held = {place: buffer for place, buffer in source.buffers().items() if buffer is not None}
    target = quantizer(torch.randn(256, 128))
    target.copy_(source)
    for place, buffer in quantizer(values).buffers().items():
        assert torch.equal(target.buffers()[place], buffer)
    found = {place: buffer for place, buffer in source.buffers().items() if buffer is not None}
    assert found.keys() == held.keys()
    assert all(found[place] is buffer for place, buffer in held.items())
