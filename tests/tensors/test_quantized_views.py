"""Views of quantized tensors: what they keep, what they share, and where writes go."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from said import holds, said
from samples import examples
from test_quantized_tensors import same_buffers

import fuser
from fuser import DType
from fuser.tensors.dequantized_view import DequantizedView

COPIES = ("rowwise", "columnwise")
K = 160

QUANTIZERS: dict[str, Any] = {
    **{name: q for name, q in formats.QUANTIZERS.items() if name != "block"},
    "delayed": fuser.Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1)),
    "mxfp8-2d": fuser.MXFP8Quantizer(DType.kFloat8E5M2, with_2d_quantization=True),
    "block-1d": fuser.Float8BlockQuantizer(block_scaling_dim=1),
    "block-2d": fuser.Float8BlockQuantizer(force_pow_2_scales=False),
    "nvfp4-2d": fuser.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4-hadamard": fuser.NVFP4Quantizer(with_rht=True),
}
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
# Formats whose blocks need nothing else of the tensor.
INDEPENDENT = tuple(name for name, q in QUANTIZERS.items() if q.tensor_class.has_independent_blocks)


def values(
    rows: int, seed: int = 3, dtype: torch.dtype = torch.float32, k: int = K
) -> torch.Tensor:
    """Rows of different magnitudes, so that a scale of other rows would show."""
    x = oracles.random_tensor((rows, k), dtype, seed)
    return x * 2.0 ** (torch.arange(rows)[:, None] % 7 - 3).to(dtype)


def copies(tensor: torch.Tensor) -> tuple[str, ...]:
    """The copies that a quantized tensor has; none for a plain one."""
    if not isinstance(tensor, fuser.QuantizedTensor):
        return ()
    usage = tensor._usage()
    return tuple(which for which in COPIES if getattr(usage, which))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


# -- what a view keeps ---------------------------------------------------------------

BOTH, ROWS, NONE = COPIES, ("rowwise",), ()


@pytest.mark.parametrize(
    ("name", "start", "stop", "kept"),
    [
        ("current", 3, 7, BOTH),
        ("delayed", 3, 7, BOTH),
        ("mxfp8", 3, 7, ROWS),
        ("mxfp8", 32, 96, BOTH),
        ("mxfp8", 32, 100, ROWS),
        ("mxfp8-2d", 3, 7, ROWS),
        ("mxfp8-2d", 224, 256, BOTH),
        ("block-1d", 3, 7, ROWS),
        ("block-1d", 128, 256, BOTH),
        ("block-2d", 3, 7, NONE),
        ("block-2d", 64, 256, NONE),
        ("block-2d", 128, 256, BOTH),
        ("nvfp4", 3, 7, ROWS),
        ("nvfp4", 16, 48, BOTH),
        ("nvfp4-2d", 3, 7, ROWS),
        ("nvfp4-hadamard", 16, 48, BOTH),
        ("nvfp4-hadamard", 16, 40, ROWS),
        ("mxfp8", 5, 5, ROWS),
    ],
)
def test_rows_keep_the_copies_whose_blocks_they_do_not_cut(
    name: str, start: int, stop: int, kept: tuple[str, ...]
) -> None:
    tensor = QUANTIZERS[name](values(256))
    part = tensor[start:stop]
    assert copies(part) == kept
    assert torch.equal(part.dequantize() if kept else part, tensor.dequantize()[start:stop])
    for which in kept:
        expected = tensor.with_usage(which).dequantize()[start:stop]
        assert torch.equal(part.with_usage(which).dequantize(), expected)


def test_a_last_block_may_be_short() -> None:
    for name in ("block-1d", "block-2d"):
        tensor = QUANTIZERS[name](values(200))
        assert copies(tensor[128:]) == BOTH
        assert torch.equal(tensor[128:].dequantize(), tensor.dequantize()[128:])


def test_a_tensor_without_a_copy_that_survives_is_dequantized() -> None:
    tensor = QUANTIZERS["mxfp8"](values(64)).with_usage("columnwise")
    assert copies(tensor[3:7]) == NONE
    assert torch.equal(tensor[3:7], tensor.dequantize()[3:7])
    pieces = tensor.split(48)
    assert [copies(piece) for piece in pieces] == [NONE, NONE]
    assert [copies(piece) for piece in tensor.split([32, 16, 16])] == [("columnwise",), NONE, NONE]


@every_quantizer
def test_a_view_of_a_view_has_no_copy_that_was_dropped(quantizer: Any) -> None:
    tensor = quantizer(values(384))
    part = tensor[128:]
    part.update_usage(rowwise_usage=False)
    inner = part[128:]
    assert copies(inner) == ("columnwise",)
    assert torch.equal(inner.dequantize(), tensor.with_usage("columnwise").dequantize()[256:])
    assert copies(tensor[256:]) == BOTH


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda t: t[128:256],
    "narrow": lambda t: t.narrow(0, 0, 128),
    "split": lambda t: t.split(128)[1],
    "split_with_sizes": lambda t: t.split([128, 256])[1],
    "chunk": lambda t: t.chunk(3)[2],
    "as_strided": lambda t: t.as_strided((2, 64, K), (64 * K, K, 1), 128 * K),
    "view": lambda t: t.view(3, 128, K)[1],
    "select": lambda t: t.view(3, 128, K).select(0, 2),
    "unbind": lambda t: t.view(3, 128, K).unbind()[1],
    "unsqueeze": lambda t: t[128:].unsqueeze(0),
    "squeeze": lambda t: t.view(1, 384, 1, K).squeeze(),
    "flatten": lambda t: t.view(3, 128, K).flatten(0, 1),
    "expand": lambda t: t.expand(384, -1),
    "a view of a view": lambda t: t[128:].view(2, 128, K)[1].as_strided((128, K), (K, 1)),
}


@pytest.mark.sampled
@every_quantizer
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_whole_rows_stay_quantized_and_share_their_bytes(
    view: Any, quantizer: Any
) -> None:
    tensor = quantizer(values(384))
    part, expected = view(tensor), view(tensor.dequantize())
    assert copies(part) == BOTH
    assert part.shape == expected.shape
    assert torch.equal(part.dequantize(), expected)
    for mine, its in zip(part.buffers().values(), tensor.buffers().values(), strict=True):
        assert mine.untyped_storage().data_ptr() == its.untyped_storage().data_ptr()


@every_quantizer
@pytest.mark.parametrize(
    "view",
    [lambda t: t[:, 32:64], lambda t: t[::2], lambda t: t.view(-1), lambda t: t.unsqueeze(-1),
     lambda t: t.view(torch.int32), lambda t: t.view(2, 128, K).transpose(0, 1),
     lambda t: t.as_strided((2, K), (K, 1), 5)],
    ids=["columns", "every other row", "flat", "unsqueeze", "dtype", "transpose", "offset"],
)  # fmt: skip
def test_other_views_are_not_quantized_and_read_the_values_of_the_moment(
    view: Any, quantizer: Any
) -> None:
    tensor = quantizer(values(256))
    part = view(tensor)
    for _ in range(2):
        expected = view(tensor.dequantize())
        assert copies(part) == NONE
        assert part.dtype is expected.dtype
        assert part.stride() == expected.stride()
        assert torch.equal(part, expected)
        tensor.copy_(values(256, seed=5))


def test_a_view_that_torch_refuses_is_refused() -> None:
    tensor = QUANTIZERS["current"](values(64))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        tensor.view(63, -1, K)
    with pytest.raises(RuntimeError, match="not compatible"):
        tensor.t().view(-1)


@every_quantizer
def test_a_transpose_stays_quantized_where_both_copies_are_the_same_values(quantizer: Any) -> None:
    tensor = quantizer(values(256))
    turned = tensor.t()
    assert torch.equal(turned.dequantize(), tensor.dequantize().t())
    assert turned.stride() == tensor.dequantize().t().stride()
    same_values = quantizer in [
        QUANTIZERS[n] for n in ("current", "delayed", "block-2d", "nvfp4-2d")
    ]
    assert copies(turned) == (BOTH if same_values else NONE)
    if same_values:
        assert same_buffers(turned.compact(), quantizer(tensor.dequantize().t())) or (
            quantizer is not QUANTIZERS["delayed"]
        )
        assert same_buffers(turned.t(), tensor)
        assert torch.equal(tensor[128:].t().dequantize(), tensor.dequantize()[128:].t())
        assert torch.equal(turned.contiguous().dequantize(), tensor.dequantize().t())
        assert copies(tensor.with_usage("rowwise").t()) == ("columnwise",)


@pytest.mark.parametrize("option", [{"with_rht": True}, {"stochastic_rounding": True, "seed": 1}])
def test_a_transpose_is_plain_where_the_copies_are_not_the_same_values(option: Any) -> None:
    """Of 16x16 blocks too, if one copy is transformed, or each is rounded at random."""
    tensor = fuser.NVFP4Quantizer(with_2d_quantization=True, **option)(values(256))
    turned = tensor.t()
    assert copies(turned) == NONE
    assert torch.equal(turned.dequantize(), tensor.dequantize().t())


@pytest.mark.parametrize("name", QUANTIZERS)
def test_compact_is_the_layout_of_a_tensor_that_is_no_view(name: str) -> None:
    quantizer, x = QUANTIZERS[name], values(384)
    tensor = quantizer(x)
    compact, fresh = tensor[128:256].compact(), quantizer(x[128:256])
    assert tensor.compact() is tensor
    for mine, its in zip(compact.buffers().values(), fresh.buffers().values(), strict=True):
        assert (mine.shape, mine.is_contiguous()) == (its.shape, True)
    assert torch.equal(compact.dequantize(), tensor.dequantize()[128:256])
    if name in INDEPENDENT:
        assert same_buffers(compact, fresh)


# -- where writes go ------------------------------------------------------------------

WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "copy_": lambda t, x: t.copy_(x),
    "fill_": lambda t, x: t.fill_(-3.0),
    "mul_": lambda t, x: t.mul_(4.0),
    "add_": lambda t, x: t.add_(x, alpha=0.5),
    "_foreach_add_": lambda t, x: torch._foreach_add_([t], [x]),
}


ROW_RANGES = ((128, 256), (0, 384), (32, 96), (3, 7))


@pytest.mark.sampled(most=40)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    ("name", "start", "stop"),
    # 2D blocks of 128 have no view of the others.
    [(n, a, b) for n in QUANTIZERS for a, b in ROW_RANGES if n != "block-2d" or a % 128 == 0],
)
def test_a_write_through_rows_reaches_the_parent(
    name: str, start: int, stop: int, write: Any
) -> None:
    quantizer = QUANTIZERS[name]
    tensor = quantizer(values(384))
    part, beside = tensor[start:stop], tensor[256:]
    expected, x = tensor.dequantize(), values(stop - start, seed=5)
    before = [tensor.with_usage(which).dequantize() for which in COPIES]
    write(expected[start:stop], x)
    write(part, x)
    assert torch.equal(part.dequantize(), tensor.dequantize()[start:stop])
    assert torch.equal(beside.dequantize(), tensor.dequantize()[256:])
    block = {"mxfp8": 32, "mxfp8-2d": 32, "block-1d": 128, "block-2d": 128}.get(name)
    if block:  # the blocks that the rows are in, and no others
        around = slice(start // block * block, -(-stop // block) * block)
        alone = quantizer(expected[around])
        for which, old in zip(COPIES, before, strict=True):
            old[around] = alone.with_usage(which).dequantize()
            assert torch.equal(tensor.with_usage(which).dequantize(), old)
    else:
        assert same_buffers(tensor, quantizer(expected))


@every_quantizer
def test_quantized_rows_are_copied_byte_by_byte_where_blocks_allow(quantizer: Any) -> None:
    # A scale of the whole source would not fit the rest of the tensor.
    tensor, source = quantizer(values(384)), quantizer(16 * values(384, seed=5))
    before = tensor.dequantize()
    tensor[128:256].copy_(source[128:256])
    expected = tensor.dequantize()
    expected[128:256] = source.dequantize()[128:256]
    if quantizer in [QUANTIZERS[name] for name in INDEPENDENT]:
        # Quantizing again would give other bytes for other scales.
        assert same_buffers(tensor[128:256], source[128:256])
    else:
        step = 2**-2 if isinstance(quantizer, fuser.NVFP4Quantizer) else 2**-4
        error = (tensor.dequantize()[128:256] - expected[128:256]).norm()
        assert error <= step * expected[128:256].norm()
    for rest in (slice(0, 128), slice(256, 384)):
        error = (tensor.dequantize() - before)[rest].norm()
        assert error <= 2**-2 * before[rest].norm()


def test_bytes_of_another_encoding_are_not_copied() -> None:
    narrow = fuser.Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(values(32))
    wide = fuser.Float8CurrentScalingQuantizer(DType.kFloat8E5M2)(values(32, seed=5))
    expected = narrow._quantizer(wide.dequantize())
    narrow.copy_(wide)
    assert same_buffers(narrow, expected)
    blocks = fuser.Float8BlockQuantizer(block_scaling_dim=1)(values(32))
    squares = fuser.Float8BlockQuantizer(block_scaling_dim=2)(values(32, seed=5))
    blocks.copy_(squares)
    assert torch.equal(blocks.dequantize(), squares.dequantize())


def test_a_copy_that_a_view_has_lost_is_written_too() -> None:
    tensor = QUANTIZERS["mxfp8"](values(64))
    part = tensor[3:7]
    assert copies(part) == ROWS
    part.zero_()
    assert not tensor.with_usage("columnwise").dequantize()[3:7].any()
    aligned = tensor[32:]
    aligned.update_usage(columnwise_usage=False)
    aligned.zero_()
    assert not tensor.with_usage("columnwise").dequantize()[32:].any()


def test_a_write_through_a_transpose_reaches_the_parent() -> None:
    for name in ("current", "block-2d", "nvfp4-2d"):
        quantizer = QUANTIZERS[name]
        tensor, x = quantizer(values(256)), values(256, seed=5)
        tensor.t().copy_(x.t())
        assert same_buffers(tensor, quantizer(x))
        tensor[128:].t().zero_()
        assert same_buffers(
            tensor, quantizer(torch.cat([quantizer(x).dequantize()[:128], torch.zeros(128, K)]))
        )


@pytest.mark.parametrize("name", ["current", "delayed", "block-2d", "nvfp4-2d"])
@pytest.mark.parametrize("which", COPIES)
def test_views_of_a_transpose_have_the_copies_that_it_has(name: str, which: str) -> None:
    tensor = QUANTIZERS[name](values(384))
    expected = tensor.with_usage(which).dequantize()
    other = COPIES[1 - COPIES.index(which)]
    turned = tensor.t()
    turned.update_usage(**{f"{which}_usage": False})
    for one in (tensor.with_usage(which).t(), turned):
        assert copies(one) == (other,)
        for back, plain in (
            (one.t(), expected),
            (one.t()[128:256], expected[128:256]),
            (one.t()[128:].t().t()[128:], expected[256:]),
        ):
            assert copies(back) == (which,)
            assert torch.equal(back.dequantize(), plain)
        for view in (lambda t: t[3:7], lambda t: t[5], lambda t: t.t()[:, 3:7].t()):
            assert copies(view(one)) == NONE
            assert torch.equal(view(one), view(expected.t()))
        columns = one[:, 128:256]
        assert copies(columns) == (other,)
        assert torch.equal(columns.dequantize(), expected.t()[:, 128:256])
    before, version = tensor.dequantize(), tensor._version
    turned[3:7].fill_(2.0)
    turned.t()[128:256].mul_(-1)
    before[:, 3:7] = 2.0
    before[128:256] *= -1
    assert tensor._version > version
    for both in COPIES:
        again = QUANTIZERS[name](before).with_usage(both).dequantize()
        assert torch.equal(tensor.with_usage(both).dequantize(), again)


def test_a_write_through_transposed_rows_of_a_square_leaves_the_rest() -> None:
    quantizer = QUANTIZERS["current"]
    tensor = quantizer(values(K))
    expected = tensor.dequantize()
    expected[:32] = 300.0
    tensor[:32].t().fill_(300.0)
    assert same_buffers(tensor, quantizer(expected))


def test_one_copy_and_a_compact_view_are_there_to_be_read() -> None:
    tensor = QUANTIZERS["mxfp8"](values(64))
    before = tensor.dequantize()
    for part in (
        tensor.with_usage("rowwise"),
        tensor.with_usage("rowwise")[32:],
        tensor[32:].compact(),
    ):
        with pytest.raises(fuser.StateError, match=said("base-read-only-layout")):
            part.zero_()
        with pytest.raises(fuser.StateError, match=said("base-read-only-layout")):
            part.copy_(tensor[: part.shape[0]])
        assert torch.equal(tensor.dequantize(), before)
        for twin in (part.clone(), copy.copy(part), pickle.loads(pickle.dumps(part))):
            assert not twin.zero_().dequantize().any()
        assert torch.equal(tensor.dequantize(), before)


def test_a_view_makes_no_copy_that_would_not_follow_its_parent() -> None:
    tensor = QUANTIZERS["current"](values(64)).with_usage("rowwise")
    part = tensor[3:7]
    with pytest.raises(fuser.StateError, match=said("base-view-without-follow")):
        part.update_usage(columnwise_usage=True)
    assert torch.equal(part.with_usage("columnwise")._transpose, part._data.t())
    twin = part.clone()
    twin.update_usage(columnwise_usage=True)
    assert torch.equal(twin._transpose, part._data.t())


OTHER_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "t[0, 0] = 5": lambda t: t.__setitem__((0, 0), 5.0),
    "t[:, 0] = 0": lambda t: t.__setitem__((slice(None), 0), 0.0),
    "t[:, :32] *= 2": lambda t: t[:, :32].mul_(2),
    "t[::2] += 1": lambda t: t[::2].add_(1),
    "t[3, 40:80]": lambda t: t[3, 40:80].fill_(1.0),
    "t[mask] = 0": lambda t: t.__setitem__(t.dequantize() > 0, 0.0),
    "t[[1, 1, 2], [0, 1, 2]] = 1": lambda t: t.__setitem__(([1, 1, 2], [0, 1, 2]), 1.0),
    "t[..., None, 1:3]": lambda t: t[..., None, 1:3].zero_(),
    "flat": lambda t: t.view(-1)[:4].fill_(9.0),
    "t().t()[5]": lambda t: t.t().t()[5].fill_(2.0),
    "t()[0]": lambda t: t.t()[0].zero_(),
    "T[3]": lambda t: t.T[3].fill_(9.0),
    "mT": lambda t: t.mT[3:9].fill_(9.0),
    "diagonal": lambda t: t.diagonal().zero_(),
    "fill_diagonal_": lambda t: t.fill_diagonal_(3.0),
    "chunk of columns": lambda t: t.chunk(2, 1)[1].fill_(1.0),
    "tensor_split of columns": lambda t: t.tensor_split([3, 7], 1)[1].mul_(-1),
    "hsplit": lambda t: t.hsplit(2)[0].neg_(),
    "unflatten": lambda t: t.unflatten(1, (4, -1))[:, 2].fill_(1.0),
    "movedim": lambda t: t.view(4, -1, K).movedim(1, 2)[..., 0].fill_(1.0),
    "swapaxes": lambda t: t.swapaxes(0, 1)[:5].copy_(torch.ones(5, len(t))),
    "detach": lambda t: t[:, 3].detach().fill_(2.0),
    "a view of a view": lambda t: t[128:, 4:][:, ::2].t()[2].fill_(-1.0),
    "masked_fill_": lambda t: t[:, :8].masked_fill_(torch.ones(len(t), 8, dtype=torch.bool), 2.0),
    "index_fill_": lambda t: t.index_fill_(1, torch.tensor([3, 5]), 2.0),
    "scatter_": lambda t: t.scatter_(1, torch.arange(len(t))[:, None] % K, 2.0),
    "copy_ from a view": lambda t: t[:, :8].copy_(t[:, 8:16]),
    "out=": lambda t: torch.mul(t[:, :8], 3, out=t[:, :8]),
    "foreach": lambda t: torch._foreach_mul_([t[:, :8], t[:, 4:12], t[128:], t], 2.0),
    "sparse_": lambda t: (torch.manual_seed(0), torch.nn.init.sparse_(t, 0.5)),
    "uniform_": lambda t: (torch.manual_seed(0), t[:, 1].uniform_()),
}  # fmt: skip


@pytest.mark.sampled
@every_quantizer
@pytest.mark.parametrize("write", OTHER_WRITES.values(), ids=OTHER_WRITES)
def test_a_write_through_any_view_reaches_the_parent(quantizer: Any, write: Any) -> None:
    tensor = quantizer(values(256))
    expected, version = tensor.dequantize(), tensor._version
    write(expected)
    write(tensor)
    assert tensor._version > version
    again = quantizer(expected)
    if not same_buffers(tensor, again):
        # Whole blocks of rows are quantized alone; rounding twice is not rounding once.
        error = (tensor.dequantize() - expected).norm()
        assert error <= 2 * (again.dequantize() - expected).norm()


# How each view operation of torch is called on a tensor [256, 160]; a result of several is taken
# apart. Compound operations (reshape, chunk, narrow, mT, ...) are made of these.
VIEW_OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "_reshape_alias": lambda t: torch.ops.aten._reshape_alias(t, (160, 256), (256, 1)),
    "alias": torch.ops.aten.alias,
    "as_strided": lambda t: t.as_strided((5, 7), (3, 11), 2),
    "detach": lambda t: t.detach(),
    "diagonal": lambda t: t.diagonal(3),
    "expand": lambda t: t[:, :1].expand(256, 1),
    "lift_fresh": torch.ops.aten.lift_fresh,
    "permute": lambda t: t.permute(1, 0),
    "select": lambda t: t.select(1, 3),
    "slice": lambda t: t[1:200:3, 5:],
    "slice_inverse": lambda t: torch.ops.aten.slice_inverse(t[2:], t.dequantize(), 0, 2, 256, 1),
    "split": lambda t: t.split(48, 1),
    "split_with_sizes": lambda t: t.split_with_sizes([100, 60], 1),
    "squeeze": lambda t: t[:, 3:4].squeeze(),
    "t": lambda t: t.t(),
    "transpose": lambda t: t.transpose(0, 1),
    "unbind": lambda t: t.unbind(1)[:3],
    "unfold": lambda t: t.unfold(1, 4, 40),
    "unsqueeze": lambda t: t.unsqueeze(2),
    "view": lambda t: (t.view(-1), t.view(160, 256), t.view(torch.int32)),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(256, 80, 2)),
    "view_as_real": lambda t: torch.view_as_real(torch.view_as_complex(t.view(256, 80, 2))),
}
# Of sparse and nested tensors, forward-mode differentiation, and torch's own tests.
NOT_OF_DENSE_TENSORS = (
    "_fw_primal", "_indices", "_make_dual", "_nested_get_values", "_nested_view_from_buffer",
    "_nested_view_from_jagged", "_sparse_broadcast_to", "_test_autograd_multiple_dispatch_view",
    "_values", "ccol_indices", "col_indices", "crow_indices", "indices", "row_indices", "values",
)  # fmt: skip
REFUSED = ("_conj", "_neg_view")


def torch_view_operations() -> set[str]:
    """Torch's view operations that are not made of others."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            compound = torch._C._dispatch_has_kernel_for_dispatch_key(
                name, "CompositeImplicitAutograd"
            )
            if op is not None and op.is_view and not compound:
                found.add(packet)
    return found


def test_every_view_operation_of_torch_is_tried() -> None:
    tried = {*VIEW_OPERATIONS, *NOT_OF_DENSE_TENSORS, *REFUSED}
    assert torch_view_operations() <= tried


@pytest.mark.sampled
@every_quantizer
@pytest.mark.parametrize("operation", VIEW_OPERATIONS.values(), ids=VIEW_OPERATIONS)
def test_a_write_through_each_view_operation_of_torch_reaches_the_parent(
    quantizer: Any, operation: Any
) -> None:
    tensor = quantizer(values(256))
    count = len(views) if isinstance(views := operation(tensor), (tuple, list)) else 1
    for index in range(count):
        expected = tensor.dequantize()
        for one in (expected, tensor):
            views = operation(one)
            view = views[index] if isinstance(views, (tuple, list)) else views
            if view.dtype is torch.int32:
                view.bitwise_xor_(1 << 31)  # another sign
            else:
                view.mul_(-1)
        again = quantizer(expected)
        if quantizer in [QUANTIZERS[name] for name in INDEPENDENT]:
            # Rows of whole blocks are quantized alone; here that gives the same bytes.
            assert torch.equal(tensor.dequantize(), again.dequantize())
        else:
            assert same_buffers(tensor, again)


def test_lazy_signs_of_a_view_are_refused() -> None:
    tensor = QUANTIZERS["mxfp8"](values(64))
    with pytest.raises(
        fuser.StateError, match=said("dispatch-not-supported-dequantize", holds("_neg_view"))
    ):
        torch._neg_view(tensor)
    with pytest.raises(
        fuser.StateError, match=said("dispatch-not-supported-dequantize", holds("_conj"))
    ):
        torch.view_as_complex(tensor.view(64, 80, 2)).conj()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t_(),
        lambda t: t.squeeze_(0),
        lambda t: t.unsqueeze_(0),
        lambda t: t.transpose_(0, 1),
        lambda t: t.resize_(4, 4),
        lambda t: t.as_strided_((2, 2), (1, 1)),
        lambda t: t.set_(torch.ones(64, K)),
    ],
)
def test_an_operation_that_changes_the_shape_in_place_is_refused(change: Any) -> None:
    tensor = QUANTIZERS["current"](values(64))
    before = tensor.dequantize()
    for one in (tensor, tensor[:, :32], tensor[3:5]):
        with pytest.raises(fuser.StateError, match=said("dispatch-change-memory-place")):
            change(one)
    assert torch.equal(tensor.dequantize(), before)
    with pytest.raises(fuser.StateError, match=said("dispatch-gives-shape", None, (64, 160))):
        torch.mul(before, 2, out=tensor[:0])
    assert torch.equal(tensor.dequantize(), before)


def test_a_write_through_a_view_of_data_reaches_the_parent_unseen_by_autograd() -> None:
    tensor = QUANTIZERS["current"](values(64))
    version = tensor._version
    tensor.data[5, :8].zero_()
    assert not tensor[5, :8].any()
    assert tensor[5, 8:].any()
    assert tensor._version == version


def test_a_write_to_several_parts_at_once_keeps_them_all() -> None:
    for name in ("current", "mxfp8", "nvfp4"):
        tensor = QUANTIZERS[name](values(256))
        expected = tensor.dequantize()
        for one in (expected, tensor):
            parts = [one, one[:, :8], one[:, 4:12], one[32:64], one[3:5]]
            torch._foreach_mul_(parts, 2.0)
        assert same_buffers(tensor, QUANTIZERS[name](expected))


def test_a_write_that_memory_of_its_own_could_not_take_is_refused() -> None:
    tensor = QUANTIZERS["current"](values(64))
    with pytest.raises(RuntimeError, match="single memory location"):
        tensor[:, :1].expand(64, 4).mul_(2)


def test_columns_of_one_copy_are_there_to_be_read() -> None:
    tensor = QUANTIZERS["mxfp8"](values(64))
    before = tensor.dequantize()
    for which in COPIES:
        part = tensor.with_usage(which)[:, :32]
        assert torch.equal(part, tensor.with_usage(which).dequantize()[:, :32])
        with pytest.raises(fuser.StateError, match=said("base-read-only-layout")):
            part.zero_()
    assert torch.equal(tensor.dequantize(), before)


def test_an_infinity_leaves_the_other_values_of_a_tensor_with_one_scale() -> None:
    tensor = QUANTIZERS["current"](values(64))
    before = tensor.dequantize()
    tensor[0].fill_(float("nan"))
    assert tensor.dequantize()[0].isnan().all()
    # The scale is 1 now: each is rounded as E4M3 rounds it.
    assert torch.equal(tensor.dequantize()[1:], before[1:].to(torch.float8_e4m3fn).float())


# -- versions and gradients --------------------------------------------------------------


@every_quantizer
def test_every_write_advances_the_version_that_views_share(quantizer: Any) -> None:
    tensor, x = quantizer(values(384)), values(384, seed=5)
    one, part = tensor.with_usage("rowwise"), tensor[3:7] if copies(tensor[3:7]) else tensor[:128]
    writes: tuple[Callable[[], object], ...] = (
        lambda: tensor.copy_(x),
        lambda: tensor.copy_(quantizer(x)),
        lambda: tensor.quantize_(x),
        lambda: tensor.mul_(2),
        lambda: torch._foreach_mul_([tensor], 2.0),
        lambda: part.zero_(),
        lambda: part.quantize_(x[: len(part)]),
        lambda: tensor.detach().add_(1),
    )
    for write in writes:
        before = tensor._version
        write()
        assert tensor._version > before
        assert part._version == one._version == tensor._version


def test_a_saved_copy_that_was_written_to_is_noticed() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: fuser.QuantizedTensor) -> torch.Tensor:
            ctx.save_for_backward(weight.with_usage("columnwise"))
            return 2 * x

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            assert ctx.saved_tensors
            return 2 * dy, None

    weight = QUANTIZERS["mxfp8"](values(32))
    x = values(32).requires_grad_()
    y = Double.apply(x, weight)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_quantizer
def test_gradients_go_through_views(quantizer: Any) -> None:
    parameter = torch.nn.Parameter(quantizer(values(256)))
    plain = parameter.dequantize().detach().requires_grad_()
    dy = values(256, seed=7)
    for tensor in (parameter, plain):
        a, b = tensor.split(128)
        (
            (a * dy[:128]).sum() + (b.t() @ dy[128:]).sum() + (tensor.view(2, 128, K)[1]).sum()
        ).backward()
    assert torch.equal(parameter.grad, plain.grad)


@every_quantizer
def test_gradients_go_through_views_that_are_not_quantized(quantizer: Any) -> None:
    parameter = torch.nn.Parameter(quantizer(values(256)))
    plain = parameter.dequantize().detach().requires_grad_()
    for tensor in (parameter, plain):
        columns = tensor[:, 8:40]
        (
            columns.square().sum() + tensor.diagonal().sin().sum() + tensor.view(-1)[::3].sum()
        ).backward()
    assert torch.equal(parameter.grad, plain.grad)


@every_quantizer
def test_gradients_after_a_write_through_a_view_are_those_of_torch(quantizer: Any) -> None:
    grads = []
    for make in (quantizer, torch.clone):
        x = values(256).requires_grad_()
        tensor = make(x)
        tensor[:, :32].mul_(2)
        tensor[0, 0] = 0
        tensor[5:9].mul_(3)
        tensor.t()[3] = 1.0
        (tensor * torch.arange(float(K))).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("view", [lambda t: t[:, :3], lambda t: t[0, 0], lambda t: t[3:5]])
def test_a_view_of_a_parameter_is_written_to_without_gradients_alone(view: Any) -> None:
    parameter = torch.nn.Parameter(QUANTIZERS["current"](values(64)))
    before = parameter.detach().dequantize()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        view(parameter).mul_(2)
    with torch.no_grad():
        made_without = view(parameter)
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        made_without.mul_(2)
    assert torch.equal(parameter.detach().dequantize(), before)
    saved = view(parameter).square().sum()
    with torch.no_grad():
        view(parameter).mul_(2)
    assert not torch.equal(parameter.detach().dequantize(), before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_a_parameter_made_of_columns_trains_its_parent() -> None:
    tensor = QUANTIZERS["mxfp8"](values(64))
    before = tensor.dequantize()
    columns = torch.nn.Parameter(tensor[:, 32:64])
    columns.grad = torch.ones(64, 32)
    torch.optim.SGD([columns], lr=2.0).step()
    expected = before.clone()
    expected[:, 32:64] -= 2.0
    assert same_buffers(tensor, QUANTIZERS["mxfp8"](expected))


def test_a_fused_step_advances_the_version_of_a_view_that_is_not_quantized() -> None:
    """Though torch counts no such write to a plain tensor."""
    tensor = QUANTIZERS["mxfp8"](values(64))
    before = tensor.dequantize()
    elements = torch.nn.Parameter(tensor.view(-1))
    assert isinstance(elements, DequantizedView)
    elements.grad, version = torch.ones(64 * K), elements._version
    torch.optim.SGD([elements], lr=2.0, fused=True).step()
    assert elements._version > version
    assert same_buffers(tensor, QUANTIZERS["mxfp8"](before - 2.0))


# -- a view by itself ------------------------------------------------------------------


@every_quantizer
@pytest.mark.parametrize(
    "duplicate",
    [
        torch.clone,
        lambda t: t.to("cpu", copy=True),
        lambda t: pickle.loads(pickle.dumps(t)),
        copy.deepcopy,
        copy.copy,
    ],
    ids=["clone", "to", "pickle", "deepcopy", "copy"],
)
def test_a_duplicate_of_a_view_has_its_own_bytes(duplicate: Any, quantizer: Any) -> None:
    tensor = quantizer(values(384))
    part, before = tensor[128:256], tensor.dequantize()
    twin = duplicate(part)
    assert copies(twin) == BOTH
    assert same_buffers(twin.compact(), part.compact())
    twin.zero_()
    assert not twin.dequantize().any()
    assert torch.equal(tensor.dequantize(), before)


def test_a_deep_copy_of_a_view_has_its_strides_and_offset() -> None:
    tensor = QUANTIZERS["block-2d"](values(384))
    for view in (tensor[128:256], tensor.t(), tensor[128:256].t()):
        twin = copy.deepcopy(view)
        assert (twin.stride(), twin.storage_offset()) == (view.stride(), view.storage_offset())
        assert torch.equal(twin.dequantize(), view.dequantize())


@pytest.mark.parametrize(
    "duplicate",
    [torch.clone, lambda t: pickle.loads(pickle.dumps(t)), lambda t: t.dequantize()],
    ids=["clone", "pickle", "dequantize"],
)
def test_a_duplicate_of_columns_is_a_plain_tensor(duplicate: Any) -> None:
    tensor = QUANTIZERS["current"](values(64))
    before = tensor.dequantize()
    twin = duplicate(tensor[:, 3:9])
    assert type(twin) is torch.Tensor
    assert torch.equal(twin, before[:, 3:9])
    twin.zero_()
    assert torch.equal(tensor.dequantize(), before)
    parameter = torch.nn.Parameter(tensor[:, 3:9], requires_grad=False)
    made = pickle.loads(pickle.dumps(parameter))
    assert type(made) is torch.nn.Parameter
    assert not made.requires_grad
    assert torch.equal(made, parameter)
    assert pickle.loads(pickle.dumps(tensor[:, 3:9])).untyped_storage().nbytes() == 64 * 6 * 4


def test_a_write_through_another_dtype_of_the_values_reaches_their_rows_alone() -> None:
    for quantizer in (QUANTIZERS["mxfp8"], QUANTIZERS["current"]):
        tensor = quantizer(values(64))
        expected = tensor.dequantize()
        tensor.view(torch.int16)[40:42].zero_()
        expected[40:42] = 0
        assert not tensor.dequantize()[40:42].any()
        torch.testing.assert_close(tensor.dequantize(), expected, rtol=2**-2, atol=0.02)


@pytest.mark.parametrize("is_inference", [True, False])
def test_an_operation_in_place_returns_what_it_was_called_on(is_inference: bool) -> None:
    tensor = QUANTIZERS["current"](values(64))
    with torch.inference_mode(is_inference):
        for one in (tensor, tensor[:32], tensor[:, 3]):
            assert one.zero_() is one
            assert torch.neg(one, out=one) is one
    assert not tensor.dequantize()[:32].any()


def test_columns_give_arrays_and_lists() -> None:
    tensor = QUANTIZERS["current"](values(64))
    expected = tensor.dequantize()
    for one, plain in ((tensor, expected), (tensor[:, 3], expected[:, 3])):
        assert (one.numpy() == plain.numpy()).all()
        assert one.tolist() == plain.tolist()
        assert torch.equal(torch.from_dlpack(one), plain)
    assert tensor[2, 3].item() == expected[2, 3].item()
    assert repr(expected[:2, 3]) in repr(tensor[:2, 3])


def test_a_tensor_and_its_view_copied_together_still_share() -> None:
    tensor = QUANTIZERS["current"](values(64))
    columns = torch.nn.Parameter(tensor[:, 3:9])
    columns.grad, columns.mark = torch.ones(64, 6), "by the caller"
    twin, part, columns = copy.deepcopy([tensor, tensor[3:7], columns])
    before = tensor.dequantize()
    part.fill_(100.0)
    assert torch.equal(twin.dequantize()[3:7], torch.full((4, K), 100.0))
    assert torch.equal(part[1:].dequantize(), twin[4:7].dequantize())
    assert isinstance(columns, torch.nn.Parameter)
    assert torch.equal(columns.grad, torch.ones(64, 6))
    assert columns.mark == "by the caller"
    with torch.no_grad():
        columns.zero_()
    assert not twin[:, 3:9].any()
    assert torch.equal(tensor.dequantize(), before)
    copy.deepcopy(tensor[:, 3:9]).zero_()
    assert torch.equal(tensor.dequantize(), before)


def test_a_pipeline_takes_a_view_that_is_not_quantized() -> None:
    model = fuser.Sequential(
        fuser.Linear(32, 64), fuser.SwiGLU(), fuser.RMSNorm(32), fuser.AddExtraInput(), fuser.GELU()
    )
    tensor = QUANTIZERS["mxfp8"](values(64))
    x, extra = tensor[:, 32:64], tensor[:, :32]
    weight, bias, gain = (parameter.detach().double() for parameter in model.parameters())
    z = x.clone().double() @ weight.t() + bias
    h = oracles.rmsnorm()(oracles.gated(oracles.silu)(z), gain) + extra.clone().double()
    torch.testing.assert_close(model(x, extra), oracles.gelu(h).float(), rtol=1e-5, atol=1e-5)
    exact = oracles.gelu(x.clone().double())
    torch.testing.assert_close(fuser.GELU()(x), exact.float(), rtol=1e-5, atol=1e-5)
    # Under a recipe the products get equal bytes.
    for recipe in (fuser.recipe.MXFP8BlockScaling(), fuser.recipe.Float8CurrentScaling()):
        with fuser.autocast(recipe=recipe):
            assert torch.equal(model(x, extra), model(x.clone(), extra.clone()))


# -- sharding, as FSDP2 does it ------------------------------------------------------------


@every_quantizer
@pytest.mark.parametrize(("rows", "ranks"), [(512, 2), (512, 4), (384, 2), (256, 3)])
def test_shards_of_a_parameter_train_as_their_rows(rows: int, ranks: int, quantizer: Any) -> None:
    """chunk, new_zeros, narrow and copy_ into it, then an optimizer's write; gathered again."""
    parameter, update = quantizer(values(rows)), values(rows, seed=9) / 16
    chunks = parameter.chunk(ranks)
    shards = []
    for chunk, change in zip(chunks, update.chunk(ranks), strict=True):
        padded = parameter.new_zeros(chunks[0].shape)
        if not isinstance(chunk, fuser.QuantizedTensor):
            padded = padded.dequantize() if copies(padded) else padded
        shard = padded.narrow(0, 0, len(chunk))
        shard.copy_(chunk)
        exact = len(chunk) == len(padded) or quantizer in [QUANTIZERS[n] for n in INDEPENDENT]
        if exact or not copies(chunk):
            now = shard.dequantize() if copies(shard) else shard
            assert torch.equal(now, chunk.dequantize() if copies(chunk) else chunk)
        shard.add_(change)
        now = padded.dequantize() if copies(padded) else padded
        shards.append(now[: len(chunk)])
    step = 2**-1 if isinstance(quantizer, fuser.NVFP4Quantizer) else 2**-3
    expected = parameter.dequantize() + update
    assert (torch.cat(shards) - expected).norm() <= step * expected.norm()


@every_quantizer
def test_new_zeros_are_quantized_where_only_rows_differ(quantizer: Any) -> None:
    tensor = quantizer(values(64))
    zeros = tensor.new_zeros((128, K))
    assert copies(zeros) == BOTH
    assert (zeros.shape, zeros.dtype) == ((128, K), tensor.dtype)
    assert not zeros.dequantize().any()
    plain = (
        tensor.new_zeros((64, 32)),
        tensor.new_zeros((64, K), dtype=torch.bfloat16),
        tensor.new_zeros(K // 2, 2),
        torch.zeros_like(tensor),
    )
    assert [copies(t) for t in plain] == [NONE] * 4
    assert copies(tensor.new_zeros((3, K))) == (BOTH if quantizer.format.multiple == 1 else NONE)
    assert torch.equal(tensor[:, 3:9].new_zeros(5, 6), torch.zeros(5, 6))
    odd = quantizer(values(45))
    assert copies(odd.new_zeros(odd.shape)) == BOTH


# -- random sequences ----------------------------------------------------------------------

Step = tuple[str, Callable[[torch.Tensor], torch.Tensor]]
contiguous = torch.contiguous_format
WIDTHS = st.sampled_from([K, 75])


def row_counts(quantizer: Any) -> st.SearchStrategy[int]:
    """Whole blocks, and any number."""
    multiple = max(quantizer.format.multiple, 8)
    whole = st.integers(1, 320 // multiple).map(lambda n: n * multiple)
    return st.one_of(whole, st.integers(1, 320))


def steps(draw: Any, shape: torch.Size, *, other_views: bool = False) -> Step:
    """One more operation on a tensor of that shape, as its name and itself."""
    rows, lead = shape.numel() // shape[-1], shape[0]
    names = ["clone", "detach", "to", "unsqueeze", "squeeze", "view", "expand"]
    if len(shape) >= 2:
        names += ["slice", "slice", "slice", "split", "chunk", "select", "flatten", "as_strided"]
    if len(shape) == 2 and rows:
        names += ["t"]
    if other_views:
        names += ["columns", "flat", "transpose", "unfold"]
    name = draw(st.sampled_from(names))
    edges = sorted({0, lead, *range(0, lead, 128), *range(0, lead, 32), *range(0, lead, 16)})
    place = st.one_of(st.sampled_from(edges), st.integers(0, lead))
    start, stop = sorted((draw(place), draw(place)))
    pick = draw(st.integers(0, 10))
    parts = draw(st.integers(1, 4))
    divisor = draw(st.sampled_from([d for d in (1, 2, 3, 4, 8) if rows % d == 0]))
    k = shape[-1]
    operations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "clone": lambda t: t.clone(memory_format=contiguous),
        "detach": lambda t: t.detach(),
        "to": lambda t: t.to("cpu", copy=True).contiguous(),
        "unsqueeze": lambda t: t.unsqueeze(0),
        "squeeze": lambda t: t.squeeze(),
        "view": lambda t: t.reshape(divisor, -1, k) if rows else t.unsqueeze(0),
        "expand": lambda t: t.expand(shape),
        "slice": lambda t: t[start:stop],
        "split": lambda t: _one(t.split(max(1, start)), pick),
        "chunk": lambda t: _one(t.chunk(parts), pick),
        "select": lambda t: t[pick % lead] if lead else t,
        "flatten": lambda t: t.flatten(0, -2),
        "as_strided": lambda t: t.as_strided(
            (stop - start, *shape[1:]), t.stride(), t.storage_offset() + start * t.stride()[0]
        ),
        "t": lambda t: t.t(),
        "columns": lambda t: t[..., pick % k :: 3],
        "flat": lambda t: t.reshape(-1)[: max(1, start)],
        "transpose": lambda t: t.unsqueeze(1).transpose(0, -1),
        "unfold": lambda t: t.unfold(-1, 1, 2),
    }
    return name, operations[name]


def _one(pieces: Any, pick: int) -> torch.Tensor:
    piece: torch.Tensor = pieces[pick % len(pieces)]
    return piece


@pytest.mark.parametrize("name", QUANTIZERS)
@settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_sequence_of_views_gives_what_it_gives_on_the_values(name: str, data: Any) -> None:
    draw, quantizer = data.draw, QUANTIZERS[name]
    tensor: torch.Tensor = quantizer(values(draw(row_counts(quantizer)), k=draw(WIDTHS)))
    tensor = draw(
        st.sampled_from([tensor, tensor.with_usage("rowwise"), tensor.with_usage("columnwise")])
    )
    # The values of each copy; which one a copy of the view has turns with every t().
    plain = {which: tensor.with_usage(which).dequantize() for which in copies(tensor)}
    for _ in range(draw(st.integers(1, 5))):
        step, operation = steps(draw, tensor.shape)
        tensor = operation(tensor)
        plain = {which: operation(t) for which, t in plain.items()}
        if step == "t" and copies(tensor):
            plain = {COPIES[1 - COPIES.index(which)]: t for which, t in plain.items()}
        if not copies(tensor):
            expected = plain.get("rowwise", plain.get("columnwise"))
            assert torch.equal(bits(tensor), bits(expected)), step
            plain = {"rowwise": expected}
            continue
        for which in copies(tensor):
            found = tensor.with_usage(which).dequantize()
            assert found.shape == plain[which].shape, step
            assert torch.equal(bits(found), bits(plain[which])), (step, which)
        plain = {which: plain[which] for which in copies(tensor)}


@pytest.mark.parametrize("name", QUANTIZERS)
@settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_view_and_its_parent_never_disagree(name: str, data: Any) -> None:
    draw, quantizer = data.draw, QUANTIZERS[name]
    tensor = quantizer(values(draw(row_counts(quantizer)), k=draw(WIDTHS)))
    views: list[tuple[torch.Tensor, list[Callable[[torch.Tensor], torch.Tensor]]]] = [(tensor, [])]
    turned: list[bool] = [False]
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, len(views) - 1))
        view, path = views[index]
        step, operation = steps(draw, view.shape, other_views=True)
        derived = operation(view)
        other = isinstance(derived, DequantizedView) and derived.dim() and derived.numel()
        if other or (copies(derived) and step not in ("clone", "to")):
            views.append((derived, [*path, operation]))
            turned.append(turned[index] != (step == "t"))
    for _ in range(draw(st.integers(1, 3))):
        view = views[draw(st.integers(0, len(views) - 1))][0]
        x = oracles.random_tensor(tuple(view.shape), torch.float32, draw(st.integers(0, 9)))
        WRITES[draw(st.sampled_from(sorted(WRITES)))](view, x * 2.0 ** draw(st.integers(-3, 3)))
        for (view, path), is_turned in zip(views, turned, strict=True):
            for which in copies(view):
                expected = tensor.with_usage(COPIES[COPIES.index(which) ^ is_turned]).dequantize()
                for operation in path:
                    expected = operation(expected)
                assert torch.equal(bits(view.with_usage(which).dequantize()), bits(expected))
            if not copies(view):
                expected = tensor.dequantize()
                for operation in path:
                    expected = operation(expected)
                assert torch.equal(bits(view), bits(expected))
