"""Copies, transposes, padding, views and empty tensors of every format."""

from __future__ import annotations

import number_formats as ref
import numpy as np
import pytest
import torch
from format_cases import (
    E4M3,
    EVERY_QUANTIZER,
    QUANTIZERS,
    MetaOnly,
    Random,
    dequantizers,
    identical,
    same,
)

from fuser import formats
from fuser.reference import block_scaling, fp8, mxfp8, nvfp4


@EVERY_QUANTIZER
@pytest.mark.parametrize("shape", [(96, 160), (32, 32)])
def test_one_copy_alone_has_the_bytes_that_it_has_beside_the_other(
    name: str, shape: tuple[int, int]
) -> None:
    x = Random(*shape, dtype=torch.bfloat16, seed=3).tensor()
    both = QUANTIZERS[name](x)
    for asked, other in (("row", "col"), ("col", "row")):
        alone = QUANTIZERS[name](x, rowwise=asked == "row", columnwise=asked == "col")
        for key, expected in both.items():
            if key.startswith(other):
                assert alone[key] is None
            else:
                assert identical(alone[key], expected)


@EVERY_QUANTIZER
def test_the_input_is_left_alone_and_no_output_shares_its_memory(name: str) -> None:
    x = Random(32, 64, seed=4).tensor()
    before = x.clone()
    outputs = [out for out in QUANTIZERS[name](x).values() if out is not None]
    memory = [out.untyped_storage().data_ptr() for out in outputs]
    assert len(set(memory)) == len(memory)
    for out in outputs:
        out.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["current", "current-pow2", "delayed", "block-2d"])
def test_the_columnwise_copy_is_the_transpose_of_the_rowwise_bytes(name: str) -> None:
    x = Random(131, 262, seed=5).tensor()
    out = QUANTIZERS[name](x)
    assert out["row"].shape == (131, 262)
    assert torch.equal(out["col"], out["row"].T)
    assert torch.equal(fp8.transpose(out["row"]), out["col"])
    assert fp8.transpose(out["row"]).is_contiguous()
    if name == "block-2d":
        assert torch.equal(out["col_scale"][:, :2], out["row_scale"][:, :3].T)


@pytest.mark.parametrize("name", ["block-1d", "block-2d", "nvfp4", "nvfp4-2d"])
def test_a_transposed_columnwise_copy_is_the_rowwise_copy_of_the_transpose(name: str) -> None:
    x = Random(160, 272, seed=6).tensor()
    col, row = QUANTIZERS[name](x), QUANTIZERS[name](x.T)
    for key in ("", "_scale", "_amax"):
        if f"col{key}" in col:
            assert identical(col[f"col{key}"], row[f"row{key}"])


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-2d"])
def test_the_columnwise_mxfp8_copy_keeps_the_shape_and_is_that_of_the_transpose(name: str) -> None:
    x = Random(160, 96, seed=7).tensor()
    col, row = QUANTIZERS[name](x), QUANTIZERS[name](x.T)
    assert col["col"].shape == (160, 96)
    assert identical(col["col"].T.contiguous(), row["row"])
    assert identical(col["col_scale"].T.contiguous(), row["row_scale"])


def test_columnwise_blocks_of_128_and_of_32_are_not_the_rowwise_bytes_transposed() -> None:
    x = Random(256, 256, spread=12, seed=8).tensor()
    row, _, col, _ = mxfp8.quantize(x, E4M3)
    assert not identical(row, col)
    row, _, col, _ = block_scaling.quantize(x, E4M3, block_dim=1)
    assert not identical(row, col.T.contiguous())


@pytest.mark.parametrize(("name", "size"), [("mxfp8-2d", 32), ("nvfp4-2d", 16), ("block-2d", 128)])
def test_a_two_dimensional_block_has_one_scale_and_both_copies_have_the_same_values(
    name: str, size: int
) -> None:
    x = Random(256, 384, spread=12, seed=9).tensor()
    out = QUANTIZERS[name](x)
    row, row_scale, col, col_scale = (out[key] for key in ("row", "row_scale", "col", "col_scale"))
    if name == "mxfp8-2d":
        assert torch.equal(row, col)
        by_row = row_scale[:256, :12].reshape(8, 32, 12)
        by_col = col_scale[:8, :384].reshape(8, 12, 32)
        assert torch.equal(by_row, by_row[:, :1].expand_as(by_row))
        assert torch.equal(by_col, by_row[:, 0, :, None].expand_as(by_col))
        assert len(by_row.unique()) > 1
    elif name == "nvfp4-2d":
        by_row = row_scale[:256, :24].reshape(16, 16, 24)
        by_col = col_scale[:384, :16].reshape(24, 16, 16)
        assert torch.equal(by_row, by_row[:, :1].expand_as(by_row))
        assert torch.equal(by_col, by_row[:, :1].permute(2, 1, 0).expand_as(by_col))
        assert len(by_row.unique()) > 1
        assert np.array_equal(ref.unpacked(col.numpy()), ref.unpacked(row.numpy()).T)
    else:
        assert torch.equal(row, col.T)
        assert torch.equal(row_scale[:, :3], col_scale[:, :2].T)
    # What lies outside of a block has no say in it.
    inside = x[size : 2 * size, size : 2 * size]
    if name == "nvfp4-2d":
        alone, *_ = nvfp4.quantize(inside, two_dimensional=True, amax_value=out["row_amax"])
        assert identical(alone, row[16:32, 8:16].contiguous())
    else:
        alone = QUANTIZERS[name](inside)["row"]
        assert identical(alone, row[size : 2 * size, size : 2 * size].contiguous())


@pytest.mark.parametrize("block_dim", [1, 2])
def test_an_edge_block_uses_its_valid_elements_only(block_dim: int) -> None:
    x = Random(131, 259, seed=10).tensor()
    x[:128] *= 1000
    x[:, :256] *= 1000
    row, row_scale, col, _ = block_scaling.quantize(x, E4M3, block_dim=block_dim)
    corner = block_scaling.quantize(x[128:, 256:], E4M3, block_dim=block_dim)
    assert identical(corner[0], row[128:, 256:].contiguous())
    assert identical(corner[2], col[256:, 128:].contiguous())
    last = (slice(2, 3), slice(128, 131)) if block_dim == 1 else (slice(1, 2), slice(2, 3))
    assert torch.equal(row_scale[last], corner[1][:1, : last[1].stop - last[1].start])
    assert int((row_scale[last] == 0).sum()) == 0


@EVERY_QUANTIZER
def test_padding_is_zero_in_poisoned_memory(name: str) -> None:
    x = Random(32, 96, seed=11).tensor() + 0.5
    clean = QUANTIZERS[name](x)
    torch.use_deterministic_algorithms(True)  # and fill what torch.empty returns with NaN
    try:
        assert torch.empty(1).isnan().all()
        poisoned = QUANTIZERS[name](x)
    finally:
        torch.use_deterministic_algorithms(False)
    for key, expected in clean.items():
        assert identical(poisoned[key], expected)
    valid = {
        "mxfp8": ((32, 3), (1, 96)),
        "block-1d": ((1, 32), (1, 96)),
        "block-2d": ((1, 1), (1, 1)),
        "nvfp4": ((32, 6), (96, 2)),
    }
    for key, (rows, columns) in zip(
        ("row_scale", "col_scale"),
        valid.get(name, valid.get(name.split("-")[0], ())),
        strict=False,
    ):
        scale = poisoned[key]
        assert scale[:rows, :columns].all()
        assert int(scale.count_nonzero()) == rows * columns


@EVERY_QUANTIZER
@pytest.mark.parametrize("view", ["transposed", "every other", "expanded", "slice"])
def test_a_non_contiguous_input_gives_the_same_bytes(name: str, view: str) -> None:
    x = {
        "transposed": Random(96, 64, seed=12).tensor().T,
        "every other": Random(128, 192, seed=12).tensor()[::2, ::2],
        "expanded": Random(64, 1, seed=12).tensor().expand(64, 96),
        "slice": Random(64, 99, seed=12).tensor()[:, 3:],
    }[view]
    assert not x.is_contiguous()
    expected = QUANTIZERS[name](x.contiguous())
    for key, got in QUANTIZERS[name](x).items():
        assert identical(got, expected[key])


@EVERY_QUANTIZER
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
def test_an_empty_tensor_has_empty_data_and_scales_of_the_right_shape(
    name: str, shape: tuple[int, int]
) -> None:
    m, k = shape
    out = QUANTIZERS[name](torch.empty(m, k, dtype=torch.bfloat16))
    shapes = {key: None if t is None else tuple(t.shape) for key, t in out.items()}
    if name.startswith("nvfp4"):
        assert (shapes["row"], shapes["col"]) == ((m, k // 2), (k, m // 2))
        assert shapes["row_scale"] == formats.nvfp4_scale_shape(m, k, False)
        assert shapes["col_scale"] == formats.nvfp4_scale_shape(m, k, True)
        assert (shapes["row_amax"], shapes["col_amax"]) == ((1,), (1,))
    elif name.startswith("mxfp8"):
        assert (shapes["row"], shapes["col"]) == ((m, k), (m, k))
        assert shapes["row_scale"] == formats.mxfp8_scale_shape(m, k, False)
        assert shapes["col_scale"] == formats.mxfp8_scale_shape(m, k, True)
    elif name.startswith("block"):
        dim = int(name[6])
        assert (shapes["row"], shapes["col"]) == ((m, k), (k, m))
        assert shapes["row_scale"] == formats.fp8_block_scale_shape(m, k, False, dim)
        assert shapes["col_scale"] == formats.fp8_block_scale_shape(m, k, True, dim)
    elif name == "rowwise":
        assert (shapes["row"], shapes["col"]) == ((m, k), (k, m))
        for key, count in (("row_scale", m), ("col_scale", k)):
            assert same(out.pop(key), np.ones(count, np.float32))
    else:
        assert (shapes["row"], shapes["col"]) == ((m, k), (k, m))
        scale_inv = ref.quotient(1, 3.0 if name == "delayed" else 1.0).reshape(1)
        assert same(out["scale_inv"], scale_inv)
    for key, tensor in out.items():
        if key.endswith("amax"):
            assert same(tensor, np.zeros(1, np.float32))
        elif key.endswith("_scale"):
            assert not tensor.any()


@EVERY_QUANTIZER
def test_quantizing_reads_nothing_back_from_the_device(name: str) -> None:
    x = Random(32, 64, dtype=torch.bfloat16, seed=13).tensor()
    on_meta = x.to("meta")
    with MetaOnly():
        out = QUANTIZERS[name](on_meta)
        values = [dequantize(torch.bfloat16) for dequantize in dequantizers(name, out).values()]
    for key, tensor in QUANTIZERS[name](x).items():
        assert out[key].shape == tensor.shape
        assert out[key].dtype == tensor.dtype
    assert [tuple(value.shape) for value in values] == [(32, 64)] * 2
