"""Torch on a CPU as it may be on another machine: ``FUSER_TEST_OTHER_SUMS=1 pytest``.

Which kernel torch takes for a product, and in which order it adds, depends on the instructions of
the CPU and the number of threads, and on shapes, strides and addresses of the operands. Here the
order of every product, sum and mean follows from shapes, strides and addresses alone: two calls
with equal ones give equal bits, as on every machine, and two calls with others do not. A sum that
is exact, of small integers say, has the same bits in every order.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

VARIABLE = "FUSER_TEST_OTHER_SUMS"
IS_TRIED = bool(os.environ.get(VARIABLE))
# Torch's CPU allocator aligns to it; a view may begin anywhere.
ALIGNMENT = 64
# Two orders of an fp32 sum differ by less than a rounding to 16 bits, which they seldom move.
# This many times the difference is still far below it, and moves some.
AMPLIFICATION = 256.0
NARROW = (torch.float16, torch.bfloat16)
# By so many units in its last place the largest of fp32 sums may differ: twice as many as seen.
UNITS = 5
# The place of the first factor among the arguments of each product.
PRODUCTS = {"mm": 0, "bmm": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
WRITTEN_PRODUCTS = {"mm.out": 0, "bmm.out": 0, "addmm.out": 1, "addmm_": 1, "baddbmm_": 1}
SUMS = ("sum.dim_IntList", "mean.dim")

Call = Callable[..., Any]


Layout = tuple[Any, ...]


def layout(t: torch.Tensor) -> Layout:
    return (*t.shape, *t.stride(), t.data_ptr() % ALIGNMENT)


def layout_of_terms(x: torch.Tensor, dims: Iterable[int]) -> Layout:
    """The layout of ``x``, of which ``dims`` are summed.

    Other dimensions that follow one another in memory are one, as in every loop of torch over
    elements (TensorIterator): rows ``[2, 12, 64]`` and ``[24, 64]`` have the same sums.
    """
    summed = {dim % x.dim() for dim in dims}
    merged: list[tuple[int, int, bool]] = []
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size == 1:
            continue
        if merged and dim not in summed:
            outer, outer_stride, is_summed = merged[-1]
            if not is_summed and outer_stride == stride * size:
                merged[-1] = outer * size, stride, False
                continue
        merged.append((size, stride, dim in summed))
    return (*merged, x.data_ptr() % ALIGNMENT)


def order(size: int, *layouts: Layout) -> torch.Tensor:
    """A permutation that follows from these layouts.

    By NumPy: torch.vmap refuses random operations of torch.
    """
    places = np.random.default_rng(hash(layouts) % 2**63).permutation(size)
    return torch.from_numpy(places)


def product(first: int, writes: bool, kernel: Call, *args: Any, **kwargs: Any) -> Any:
    """``kernel`` with the terms of its sums in another order; ``args[first]`` is a factor."""
    a, b = args[first : first + 2]
    b_dim = max(b.dim() - 2, 0)
    size = a.shape[-1]
    if size < 2 or size != b.shape[b_dim] or not a.is_floating_point():
        return kernel(*args, **kwargs)
    places = order(size, layout(a), layout(b))
    factors = a.index_select(-1, places), b.index_select(b_dim, places)
    moved = (*args[:first], *factors, *args[first + 2 :])
    if a.dtype not in NARROW:
        return kernel(*moved, **kwargs)
    if writes:
        into = kwargs.get("out", args[0])

        def kernel_of_copies(*args: Any) -> Any:
            if "out" in kwargs:
                return kernel(
                    *args, **kwargs | {"out": torch.empty_like(into, dtype=torch.float32)}
                )
            return kernel(args[0].clone(), *args[1:], **kwargs)

        return into.copy_(amplified(kernel_of_copies, args, moved, {}))
    return amplified(kernel, args, moved, kwargs).to(a.dtype)


def total(kernel: Call, x: torch.Tensor, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``kernel`` with the terms of its sums in another order."""
    moved = x
    if x.is_floating_point():
        summed = dims or range(x.dim())
        terms = layout_of_terms(x, summed)
        for dim in summed:
            if x.shape[dim] > 1:
                moved = moved.index_select(dim, order(x.shape[dim], terms))
    if x.dtype not in NARROW or kwargs.get("dtype"):
        return kernel(moved, dims, *args, **kwargs)
    return amplified(kernel, (x, dims, *args), (moved, dims, *args), kwargs).to(x.dtype)


def amplified(kernel: Call, args: tuple[Any, ...], moved: tuple[Any, ...], kwargs: Any) -> Any:
    """``kernel`` in fp32, with many times the difference between two orders."""

    def in_fp32(args: tuple[Any, ...]) -> torch.Tensor:
        wide = (arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args)
        result: torch.Tensor = kernel(*wide, **kwargs)
        return result

    return in_fp32(args).lerp(in_fp32(moved), AMPLIFICATION)


def install() -> None:
    """Put these in the place of torch's kernels, until the process ends."""
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for name, first in PRODUCTS.items():
        _replace(library, name, functools.partial(product, first, False))
    for name, first in WRITTEN_PRODUCTS.items():
        _replace(library, name, functools.partial(product, first, True))
    for name in SUMS:
        _replace(library, name, total)


def _replace(library: torch.library.Library, name: str, function: Callable[..., Any]) -> None:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def replaced(keys: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(kernel.call_boxed, keys)
        return own(*args, **kwargs) if _is_own[0] else function(own, *args, **kwargs)

    library.impl(name, replaced, "CPU", with_keyset=True)


@contextlib.contextmanager
def own_order() -> Iterator[None]:
    """Torch's own kernels, where memory is measured: no machine makes the copies made here."""
    _is_own[0] = True
    try:
        yield
    finally:
        _is_own[0] = False


def assert_equal_sums(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Sums of the same terms in tensors of other layouts have equal bits.

    Where layouts decide the order, they differ by a few units in the last place of the largest.
    """
    if not IS_TRIED:
        assert torch.equal(actual, expected), name
        return
    unit = torch.finfo(expected.dtype).eps * float(expected.abs().max()) if expected.numel() else 0
    limit = unit * (1 if expected.dtype in NARROW else UNITS)
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=limit, msg=lambda text: f"{name}: {text}"
    )


# A backward runs in threads of its own.
_is_own = [False]
# What a library has registered ends with it.
_libraries: list[torch.library.Library] = []

if IS_TRIED:
    install()
