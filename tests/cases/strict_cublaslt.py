"""A stand-in for cuBLASLt on a CPU. It checks its arguments strictly and computes in fp64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from fuser.cuda import cublaslt
from fuser.cuda.cublaslt import Scales
from fuser.formats import ceil_div, round_up

NARROW = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def layouts(operands: Sequence[Any]) -> list[Any]:
    """What the descriptors of a product say of its operands."""
    *matrices, bias = operands
    described = [t if t is None else (t.shape, t.stride(), t.dtype) for t in matrices]
    return [*described, None if bias is None else bias.dtype]


class StrictProduct:
    """One product, with the limits it has on Hopper; ``calls`` gets a line for each run.

    Like the product of the library it has descriptors of the operands that it was made for, and
    takes no others.
    """

    def __init__(
        self, calls: list[str], operands: Sequence[Any], modes: tuple[int, ...], is_split: bool
    ) -> None:
        self.calls, self.modes, self.is_split = calls, modes, is_split
        self.layouts = layouts(operands)

    def run(
        self,
        operands: Sequence[Any],
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        alpha: float,
    ) -> None:
        assert layouts(operands) == self.layouts
        out, a, b, addend, bias = operands
        (m, k), n = a.shape, b.shape[1]
        assert b.shape[0] == k
        assert out.shape == (m, n)
        assert out.stride(1) == 1
        assert bias is None or bias.data_ptr() % 16 == 0
        assert all(t.data_ptr() % 16 == 0 for t in (out, a, b))
        for matrix in (out, a, b) if addend is None else (out, a, b, addend):
            strides = sorted(zip(matrix.stride(), matrix.shape, strict=True))
            assert strides[0][0] == 1 or 1 in matrix.shape
            assert strides[1][0] >= strides[0][1] or 1 in matrix.shape
        if self.modes:
            assert {a.dtype, b.dtype} <= set(FP8)
            assert FP8[0] in (a.dtype, b.dtype)
            assert a.stride(1) == b.stride(0) == 1
            assert m % 16 == n % 16 == k % 16 == 0
            assert (
                not any(mode in (Scales.BLOCKS_1X128, Scales.BLOCKS_128X128) for mode in self.modes)
                or self.is_split
            )
            left = a.double() * spread(scale_a, self.modes[0], m, k)
            right = b.t().double() * spread(scale_b, self.modes[1], n, k)
            product = left @ right.t()
        else:
            assert a.dtype is b.dtype
            assert a.dtype in NARROW
            product = a.double() @ b.double()
        product = alpha * product
        if bias is not None:
            assert bias.shape == (n,)
            assert bias.is_contiguous()
            assert bias.dtype in NARROW
            product = product + bias.double()
        if addend is not None:
            assert addend.dtype is out.dtype
            assert addend.shape == out.shape
            product = product + addend.double()
        self.calls.append(f"{a.dtype} {'+ bias ' * (bias is not None)}{'+' * (addend is not None)}")
        out.copy_(product.to(out.dtype))


def spread(scale: torch.Tensor | None, mode: int, rows: int, inner: int) -> torch.Tensor:
    """One factor an element, from scales as cuBLASLt reads them."""
    assert scale is not None
    assert scale.dtype is torch.float32
    blocks, wide = ceil_div(inner, 128), scale.double()
    if mode == Scales.TENSOR:
        assert scale.numel() == 1
        return wide.reshape(1, 1).expand(rows, inner)
    if mode == Scales.ROWS:
        assert scale.shape == (rows,)
        assert scale.is_contiguous()
        return wide[:, None].expand(rows, inner)
    if mode == Scales.BLOCKS_1X128:
        assert scale.shape == (blocks, rows)
        assert scale.is_contiguous()
        return wide.t().repeat_interleave(128, 1)[:, :inner]
    assert scale.shape == (ceil_div(rows, 128), round_up(blocks, 4))
    assert scale.is_contiguous()
    return wide.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :inner]


@contextlib.contextmanager
def strict_cublaslt() -> Iterator[list[str]]:
    """cuBLASLt as if it were loaded, for tensors on the CPU; yields the list of its calls."""
    calls: list[str] = []

    def product(operands: Any, modes: Any, is_split: bool) -> Any:
        out, a, b, _, bias = operands
        if not modes and (a.dtype not in NARROW or a.dtype is not b.dtype):
            return None
        if not modes and bias is not None and bias.dtype is not out.dtype:
            return None
        return StrictProduct(calls, operands, modes or (), is_split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublaslt, "library", lambda device_type: object())
        patch.setattr(cublaslt, "_made", product)
        patch.setattr(cublaslt, "_products", cublaslt._Products())
        yield calls
