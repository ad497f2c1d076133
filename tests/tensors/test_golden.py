"""Quantized bytes equal what independent implementations made of the same inputs.

``golden/fp8_scaling.npz`` is from Transformer Engine 2.20.2's quantizers on an
H200, ``golden/mxfp8.npz`` from torchao 0.18's MX cast (RCEIL). Both definitions
in this repository are held to every array: the torch reference, and the numpy
one that the other tests compare it with.
"""

from __future__ import annotations

import functools

import number_formats as numpy_formats
import numpy as np
import pytest
import torch
from paths import TESTS

from fuser.formats import DType
from fuser.reference import block_scaling, fp8_scaling, mxfp8

GOLDEN = TESTS / "golden"
FILES = ("fp8_scaling.npz", "mxfp8.npz")
FORMATS = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}

Arrays = dict[str, np.ndarray]


def _read(file: str) -> Arrays:
    with np.load(GOLDEN / file) as arrays:
        return dict(arrays)


ARRAYS = {key: array for file in FILES for key, array in _read(file).items()}
KEYS = sorted(key for key in ARRAYS if not key.endswith(".x"))


def _input(group: str) -> torch.Tensor:
    """The input of an array's group, from ``{dtype}.{name}.{...}``."""
    dtype, name = group.split(".")[:2]
    x = torch.from_numpy(ARRAYS[f"{dtype}.{name}.x"])
    return x.view(torch.bfloat16) if dtype == "bf16" else x


@functools.cache
def _by_torch(group: str) -> Arrays:
    x = _input(group)
    method, fmt, *scaling = group.split(".")[2:]
    pow2 = scaling == ["pow2"]
    if method == "current":
        row, col, scale_inv = fp8_scaling.quantize_current(x, FORMATS[fmt], pow2=pow2)
        made = {"row": row, "col": col, "scale_inv": scale_inv}
    else:
        if method == "mxfp8":
            row, row_scale, col, col_scale = mxfp8.quantize(x, FORMATS[fmt])
        else:
            row, row_scale, col, col_scale = block_scaling.quantize(
                x, FORMATS[fmt], block_dim=int(method[5]), pow2=pow2
            )
        made = {"row": row, "row_scale": row_scale, "col": col, "col_scale": col_scale}
    assert all(tensor is not None for tensor in made.values())
    return {name: tensor.numpy() for name, tensor in made.items()}


@functools.cache
def _by_numpy(group: str) -> Arrays:
    x = _input(group)
    method, fmt, *scaling = group.split(".")[2:]
    pow2 = scaling == ["pow2"]
    largest = numpy_formats.LARGEST_INPUT[str(x.dtype).removeprefix("torch.")]
    to, values = numpy_formats.FLOAT8[fmt], x.float().numpy()
    if method == "current":
        codes, scale_inv = numpy_formats.quantize_current(values, to, pow2)
        return {"row": codes, "col": codes.T, "scale_inv": scale_inv}
    if method == "mxfp8":
        row, row_scale, col, col_scale = numpy_formats.mxfp8_buffers(values, to)
    else:
        row, row_scale, col, col_scale = numpy_formats.fp8_block_buffers(
            values, to, int(method[5]), pow2, largest_input=largest
        )
    return {"row": row, "row_scale": row_scale, "col": col, "col_scale": col_scale}


def _check(key: str, made: Arrays) -> None:
    group, name = key.rsplit(".", 1)
    expected, got = ARRAYS[key], made[name]
    if "block2d" in group and name.endswith("_scale"):
        # Their padding columns are undefined.
        m, k = _input(group).shape
        blocks = -(-(k if name == "row_scale" else m) // 128)
        assert got.shape == expected.shape
        expected, got = expected[:, :blocks], got[:, :blocks]
    elif "mxfp8" in group and name.endswith("_scale"):
        # Theirs are unpadded.
        got = got[: expected.shape[0], : expected.shape[1]]
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    as_bytes = np.ascontiguousarray(got).view(np.uint8)
    assert np.array_equal(as_bytes, np.ascontiguousarray(expected).view(np.uint8))


@pytest.mark.parametrize("key", KEYS)
def test_the_torch_reference_makes_the_golden_bytes(key: str) -> None:
    _check(key, _by_torch(key.rsplit(".", 1)[0]))


@pytest.mark.parametrize("key", KEYS)
def test_the_numpy_definition_makes_the_golden_bytes(key: str) -> None:
    _check(key, _by_numpy(key.rsplit(".", 1)[0]))


def test_no_golden_array_is_missing_and_both_files_hold_the_same_inputs() -> None:
    # 2 dtypes x 2 inputs x (current: 2 formats x 2 scalings x 3 arrays;
    # blocks: 2 shapes x 2 scalings x 4; MXFP8: 2 formats x 4).
    assert len(KEYS) == 2 * 2 * (2 * 2 * 3 + 2 * 2 * 4 + 2 * 4)
    fp8, mx = map(_read, FILES)
    inputs = {key for key in fp8 if key.endswith(".x")}
    assert inputs == {key for key in mx if key.endswith(".x")}
    assert len(inputs) == 4
    for key in inputs:
        assert np.array_equal(fp8[key], mx[key])
