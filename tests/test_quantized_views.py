"""Views of quantized tensors: what they keep, what they share, and where writes go."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantized_tensors import same_buffers

import fuser
from fuser import DType

COPIES = ("rowwise", "columnwise")
K = 160

QUANTIZERS: dict[str, Any] = {
    "current": fuser.Float8CurrentScalingQuantizer(),
    "delayed": fuser.Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1)),
    "mxfp8": fuser.MXFP8Quantizer(),
    "mxfp8-2d": fuser.MXFP8Quantizer(DType.kFloat8E5M2, with_2d_quantization=True),
    "block-1d": fuser.Float8BlockQuantizer(block_scaling_dim=1),
    "block-2d": fuser.Float8BlockQuantizer(force_pow_2_scales=False),
    "nvfp4": fuser.NVFP4Quantizer(),
    "nvfp4-2d": fuser.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4-hadamard": fuser.NVFP4Quantizer(with_rht=True),
}
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
# Formats whose blocks need nothing else of the tensor.
INDEPENDENT = ("mxfp8", "mxfp8-2d", "block-1d", "block-2d")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are small; on a busy machine threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
        expected = tensor.only(which).dequantize()[start:stop]
        assert torch.equal(part.only(which).dequantize(), expected)


def test_a_last_block_may_be_short() -> None:
    for name in ("block-1d", "block-2d"):
        tensor = QUANTIZERS[name](values(200))
        assert copies(tensor[128:]) == BOTH
        assert torch.equal(tensor[128:].dequantize(), tensor.dequantize()[128:])


def test_a_tensor_without_a_copy_that_survives_is_dequantized() -> None:
    tensor = QUANTIZERS["mxfp8"](values(64)).only("columnwise")
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
    assert torch.equal(inner.dequantize(), tensor.only("columnwise").dequantize()[256:])
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
def test_other_views_are_plain_copies(view: Any, quantizer: Any) -> None:
    tensor = quantizer(values(256))
    assert copies(view(tensor)) == NONE
    assert torch.equal(view(tensor), view(tensor.dequantize()))


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
        assert copies(tensor.only("rowwise").t()) == ("columnwise",)


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
    before = [tensor.only(which).dequantize() for which in COPIES]
    write(expected[start:stop], x)
    write(part, x)
    assert torch.equal(part.dequantize(), tensor.dequantize()[start:stop])
    assert torch.equal(beside.dequantize(), tensor.dequantize()[256:])
    block = {"mxfp8": 32, "mxfp8-2d": 32, "block-1d": 128, "block-2d": 128}.get(name)
    if (start, stop) != (0, 384) and block and start % block == stop % block == 0:
        alone = quantizer(expected[start:stop])
        for which, old in zip(COPIES, before, strict=True):
            old[start:stop] = alone.only(which).dequantize()
            assert torch.equal(tensor.only(which).dequantize(), old)
    else:
        assert same_buffers(tensor, quantizer(expected))


@every_quantizer
def test_quantized_rows_are_copied_byte_by_byte_where_blocks_allow(quantizer: Any) -> None:
    tensor, source = quantizer(values(384)), quantizer(values(384, seed=5))
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
    assert not tensor.only("columnwise").dequantize()[3:7].any()
    aligned = tensor[32:]
    aligned.update_usage(columnwise_usage=False)
    aligned.zero_()
    assert not tensor.only("columnwise").dequantize()[32:].any()


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
    for part in (tensor.only("rowwise"), tensor.only("rowwise")[32:], tensor[32:].compact()):
        with pytest.raises(fuser.StateError, match="there to be read"):
            part.zero_()
        with pytest.raises(fuser.StateError, match="there to be read"):
            part.copy_(tensor[: part.shape[0]])
        assert torch.equal(tensor.dequantize(), before)
        for twin in (part.clone(), copy.copy(part), pickle.loads(pickle.dumps(part))):
            assert not twin.zero_().dequantize().any()
        assert torch.equal(tensor.dequantize(), before)


def test_a_view_makes_no_copy_that_would_not_follow_its_parent() -> None:
    tensor = QUANTIZERS["current"](values(64)).only("rowwise")
    part = tensor[3:7]
    with pytest.raises(fuser.StateError, match="clone it first"):
        part.update_usage(columnwise_usage=True)
    assert torch.equal(part.only("columnwise")._transpose, part._data.t())
    twin = part.clone()
    twin.update_usage(columnwise_usage=True)
    assert torch.equal(twin._transpose, part._data.t())


# -- versions and gradients --------------------------------------------------------------


@every_quantizer
def test_every_write_advances_the_version_that_views_share(quantizer: Any) -> None:
    tensor, x = quantizer(values(384)), values(384, seed=5)
    one, part = tensor.only("rowwise"), tensor[3:7] if copies(tensor[3:7]) else tensor[:128]
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
            ctx.save_for_backward(weight.only("columnwise"))
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


def test_a_tensor_and_its_view_copied_together_still_share() -> None:
    tensor = QUANTIZERS["current"](values(64))
    twin, part = copy.deepcopy([tensor, tensor[3:7]])
    before = tensor.dequantize()
    part.fill_(100.0)
    assert torch.equal(twin.dequantize()[3:7], torch.full((4, K), 100.0))
    assert torch.equal(part[1:].dequantize(), twin[4:7].dequantize())
    assert torch.equal(tensor.dequantize(), before)


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


def steps(draw: Any, shape: torch.Size) -> Step:
    """One more operation on a tensor of that shape, as its name and itself."""
    rows, lead = shape.numel() // shape[-1], shape[0]
    names = ["clone", "detach", "to", "unsqueeze", "squeeze", "view", "expand"]
    if len(shape) >= 2:
        names += ["slice", "slice", "slice", "split", "chunk", "select", "flatten", "as_strided"]
    if len(shape) == 2 and rows:
        names += ["t"]
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
    }
    return name, operations[name]


def _one(pieces: Any, pick: int) -> torch.Tensor:
    piece: torch.Tensor = pieces[pick % len(pieces)]
    return piece


@pytest.mark.parametrize("name", QUANTIZERS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_sequence_of_views_gives_what_it_gives_on_the_values(name: str, data: Any) -> None:
    draw, quantizer = data.draw, QUANTIZERS[name]
    tensor: torch.Tensor = quantizer(values(draw(row_counts(quantizer)), k=draw(WIDTHS)))
    tensor = draw(st.sampled_from([tensor, tensor.only("rowwise"), tensor.only("columnwise")]))
    # The values of each copy; which one a copy of the view has turns with every t().
    plain = {which: tensor.only(which).dequantize() for which in copies(tensor)}
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
            found = tensor.only(which).dequantize()
            assert found.shape == plain[which].shape, step
            assert torch.equal(bits(found), bits(plain[which])), (step, which)
        plain = {which: plain[which] for which in copies(tensor)}


@pytest.mark.parametrize("name", QUANTIZERS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_view_and_its_parent_never_disagree(name: str, data: Any) -> None:
    draw, quantizer = data.draw, QUANTIZERS[name]
    tensor = quantizer(values(draw(row_counts(quantizer)), k=draw(WIDTHS)))
    views: list[tuple[torch.Tensor, list[Callable[[torch.Tensor], torch.Tensor]]]] = [(tensor, [])]
    turned: list[bool] = [False]
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, len(views) - 1))
        view, path = views[index]
        step, operation = steps(draw, view.shape)
        derived = operation(view)
        if copies(derived) and step not in ("clone", "to"):
            views.append((derived, [*path, operation]))
            turned.append(turned[index] != (step == "t"))
    for _ in range(draw(st.integers(1, 3))):
        view = views[draw(st.integers(0, len(views) - 1))][0]
        x = oracles.random_tensor(tuple(view.shape), torch.float32, draw(st.integers(0, 9)))
        WRITES[draw(st.sampled_from(sorted(WRITES)))](view, x * 2.0 ** draw(st.integers(-3, 3)))
        for (view, path), is_turned in zip(views, turned, strict=True):
            for which in copies(view):
                expected = tensor.only(COPIES[COPIES.index(which) ^ is_turned]).dequantize()
                for operation in path:
                    expected = operation(expected)
                assert torch.equal(bits(view.only(which).dequantize()), bits(expected))
