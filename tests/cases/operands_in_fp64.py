"""Both copies of a quantized tensor in fp64, by format, and the products of a linear with them.

The bytes are those of ``number_formats``, which shares nothing with the library.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import number_formats as numbers
import numpy as np
import torch
from number_formats import E2M1, E4M3, Array, SmallFloat

import fuser
from fuser.formats import HADAMARD_SIGNS
from fuser.recipe import Recipe


class Copies(NamedTuple):
    """The values ``[M, K]`` of the copy that is read along rows, and of the other.

    The other one of NVFP4 has the rows that pad its blocks: a Hadamard transform spreads the
    rounding errors of a block over all of its rows. With ``signs``, those of such a transform, it
    holds the transformed values.
    """

    rowwise: Array
    columnwise: Array
    signs: int | None = None

    def columns(self, other: int | None = None) -> Array:
        """The columnwise copy for a product with a copy that has the signs ``other``."""
        if self.signs is None or self.signs == other:
            return self.columnwise
        values: Array = _turned_back(self.columnwise.T, self.signs).T
        return values

    def sizes_of_columns(self, other: int | None = None) -> Array:
        """Of :meth:`columns`, what their rounding is measured by: the inverse mixes 16 values."""
        sizes = np.abs(self.columnwise)
        if self.signs is None or self.signs == other:
            return sizes
        mixed: Array = sizes.reshape(-1, 16, sizes.shape[1]).sum(1).repeat(16, 0)
        return mixed


Format = Callable[[Array], Copies]


def unquantized(x: Array) -> Copies:
    return Copies(x, x)


def one_scale(
    to: SmallFloat = E4M3, pow2: bool = False, eps: float = 0.0, amax: float | None = None
) -> Format:
    """FP8 with a scale from the tensor's amax, or from the one that is given."""

    def quantized(x: Array) -> Copies:
        given = None if amax is None else np.array([amax], np.float32)
        codes, scale_inv = numbers.quantize_current(x, to, pow2, eps, given)
        return Copies(*[to.decode(codes) * float(scale_inv[0])] * 2)

    return quantized


def a_scale(scale: float, to: SmallFloat = E4M3) -> Format:
    """FP8 with this scale."""

    def quantized(x: Array) -> Copies:
        codes = to.encode(numbers.product(x, np.float32(scale)))
        return Copies(*[to.decode(codes) * float(numbers.quotient(1, np.float32(scale)))] * 2)

    return quantized


def blocks(
    dim: int, to: SmallFloat = E4M3, pow2: bool = True, eps: float = 0.0, side: int = 128
) -> Format:
    """FP8 in blocks of 1x128 (1) or 128x128 (2)."""

    def copy(x: Array, rows: int, columns: int) -> Array:
        rows, columns = min(rows, x.shape[0]), min(columns, x.shape[1])
        codes, scale_inv = numbers.quantize_blocks(x, to, rows, columns, pow2, eps)
        scales: Array = numbers.spread(scale_inv.astype(np.float64), rows, columns, x.shape)
        values: Array = to.decode(codes) * scales
        return values

    rows = side if dim == 2 else 1
    return lambda x: Copies(copy(x, rows, side), copy(x, side, rows))


def rows(to: SmallFloat = E4M3, pow2: bool = False, eps: float = 0.0) -> Format:
    """FP8 with a scale for each row of a copy."""
    return blocks(1, to, pow2, eps, side=2**20)


def mxfp8(to: SmallFloat = E4M3, is_square: bool = False) -> Format:
    def copy(x: Array, rows: int, columns: int) -> Array:
        codes, e8m0 = numbers.quantize_mxfp8(x, to, rows, columns)
        scales = numbers.spread(np.ldexp(1.0, e8m0.astype(int) - 127), rows, columns, x.shape)
        values: Array = to.decode(codes) * scales
        return values

    other = 32 if is_square else 1
    return lambda x: Copies(copy(x, other, 32), copy(x, 32, other))


def nvfp4(
    is_square: bool = False,
    hadamard: bool = False,
    signs: int = HADAMARD_SIGNS,
    of_rows: bool = False,
    error: str | None = None,
    largest: int = 448,
) -> Format:
    """NVFP4, rounded to nearest; ``error`` is that of four over six, ``largest`` its last scale."""
    block_rows = 16 if is_square else 1

    def copy(x: Array) -> Array:
        amax = np.abs(x).max(axis=1 if of_rows else None, keepdims=True)
        if error is None:
            codes, scale, _ = numbers.quantize_nvfp4(x, block_rows, 16, amax)
            return numbers.dequantize_nvfp4(codes, scale, amax, block_rows, 16)
        encode = largest * 6.0 / amax.astype(np.float64)
        wanted = numbers.block_amax(x, block_rows, 16) * encode
        tried = []
        for top in (6.0, 4.0):
            scale = E4M3.decode(E4M3.encode(wanted / top))
            each = numbers.spread(scale, block_rows, 16, x.shape) / encode
            codes = E2M1.encode(np.divide(x, each, out=np.zeros(x.shape), where=each != 0))
            tried.append(E2M1.decode(codes) * each)
        away = [np.abs(one - x) ** (2 if error == "MSE" else 1) for one in tried]
        sums = [_sums(each, block_rows) for each in away]
        is_four = numbers.spread(sums[1] < sums[0], block_rows, 16, x.shape)
        values: Array = np.where(is_four, tried[1], tried[0])
        return values

    def quantized(x: Array) -> Copies:
        m, k = x.shape
        whole = numbers.padded(x, 16, 16)
        turned = np.ascontiguousarray(whole.T)
        if hadamard:
            turned = numbers.hadamard(turned, signs)
        own_signs = signs if hadamard else None
        return Copies(copy(whole)[:m, :k], copy(turned).T[:, :k], own_signs)

    return quantized


def _sums(x: Array, rows: int) -> Array:
    """The sum of each block of ``rows x 16``."""
    m, k = x.shape
    sums: Array = x.reshape(m // rows, rows, k // 16, 16).sum(axis=(1, 3))
    return sums


def _turned_back(y: Array, mask: int) -> Array:
    """The inverse of the transform of every 16 elements of a row."""
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.array([-1.0 if mask >> i & 1 else 1.0 for i in range(16)])
    values: Array = (y.reshape(-1, 16) @ matrix.T / 4 * signs).reshape(y.shape)
    return values


# -- products ------------------------------------------------------------------------


class Operands(NamedTuple):
    """The formats of a linear's input, weight and output gradient in each pass."""

    input: Format
    weight: Format
    grad: Format
    override: str | None = None

    def products(self, x: Array, weight: Array, dy: Array) -> dict[str, Product]:
        """Output and gradients."""
        of_x, of_weight, of_dy = self.input(x), self.weight(weight), self.grad(dy)
        read_x, read_weight = of_x.columns(of_dy.signs), of_weight.columns()
        of_y = of_dy.columns(of_x.signs)
        sizes = of_dy.sizes_of_columns(of_x.signs), of_x.sizes_of_columns(of_dy.signs)
        if self.override is not None:
            is_plain = self.override == "high_precision"
            of_dy, of_y = unquantized(dy), dy
            read_x, read_weight = (x, weight) if is_plain else (of_x.rowwise, of_weight.rowwise)
            sizes = np.abs(of_y), np.abs(read_x)
        m = min(len(of_y), len(read_x))
        return {
            "y": Product.of(of_x.rowwise, of_weight.rowwise.T),
            "dx": Product.of(of_dy.rowwise, read_weight),
            "dw": Product.of(of_y[:m].T, read_x[:m], sizes[0][:m].T @ sizes[1][:m]),
        }


class Product(NamedTuple):
    """In fp64, with the sum of the absolute values of the terms of each sum."""

    values: Array
    sizes: Array

    @classmethod
    def of(cls, a: Array, b: Array, sizes: Array | None = None) -> Product:
        a, b = a.astype(np.float64), b.astype(np.float64)
        return cls(a @ b, np.abs(a) @ np.abs(b) if sizes is None else sizes)

    def assert_equals(self, found: torch.Tensor, name: str) -> None:
        """But for the rounding of sums in fp32, in any order, and of results.

        A byte that differs changes a sum by some ten times as much.
        """
        away = np.abs(found.detach().double().numpy() - self.values)
        half_a_bit = torch.finfo(found.dtype).eps / 2
        far = away > 3e-5 * self.sizes + half_a_bit * np.abs(self.values)
        assert not far.any(), f"{far.sum()} of {far.size} elements of {name} differ"


INPUTS, OUTPUTS = 160, 144
"""Several blocks of each format, and a part of one."""
SPLITS = (16, 13)


def samples(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight and output gradient, whose rows and columns differ by powers of two.

    Rows by many of them: scales that are powers of two differ in what becomes subnormal alone.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for m, k in ((sum(SPLITS), INPUTS), (OUTPUTS, INPUTS), (sum(SPLITS), OUTPUTS)):
        values = torch.randn(m, k, generator=generator)
        of_rows = torch.randint(-8, 9, (m, 1), generator=generator)
        of_columns = torch.randint(-3, 4, (k,), generator=generator)
        made.append(values * 2.0 ** (of_rows + of_columns))
    return made[0], made[1], made[2]


def around(recipe: Any) -> Any:
    """The context of a forward: autocast under a recipe, or the context that is given."""
    return fuser.autocast(recipe=recipe) if isinstance(recipe, Recipe) else recipe


def assert_linear_computes(
    recipe: Any, operands: Operands, dtype: torch.dtype = torch.float32
) -> None:
    """What a linear returns under a recipe or in a context, forward and both gradients.

    In 16 bits operands are rounded to ``dtype`` when they are dequantized, unless their scales are
    powers of two.
    """
    x, weight, dy = (tensor.to(dtype) for tensor in samples())
    linear = fuser.BasicLinear(INPUTS, OUTPUTS, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    leaf = x.clone().requires_grad_()
    with around(recipe):
        y = linear(leaf)
    y.backward(dy)
    exact = operands.products(*(tensor.float().numpy() for tensor in (x, weight, dy)))
    found: dict[str, Any] = {"y": y, "dx": leaf.grad, "dw": linear.weight.grad}
    for name in exact:
        exact[name].assert_equals(found[name], name)


def assert_experts_compute(recipe: Any, operands: Operands) -> None:
    """As :func:`assert_linear_computes`, of a grouped linear: each group is quantized alone."""
    x, weight, dy = samples()
    weights = [weight, weight.flip(1)]
    linear = fuser.GroupedLinear(2, INPUTS, OUTPUTS, bias=False)
    with torch.no_grad():
        for parameter, values in zip(linear.parameters(), weights, strict=True):
            parameter.copy_(values)
    leaf = x.clone().requires_grad_()
    with around(recipe):
        y = linear(leaf, torch.tensor(SPLITS))
    y.backward(dy)
    grads = [parameter.grad for parameter in linear.parameters()]
    ends = list(itertools.accumulate(SPLITS, initial=0))
    for group, (first, last) in enumerate(itertools.pairwise(ends)):
        part = slice(first, last)
        exact = operands.products(x[part].numpy(), weights[group].numpy(), dy[part].numpy())
        assert leaf.grad is not None
        found: dict[str, Any] = {"y": y[part], "dx": leaf.grad[part], "dw": grads[group]}
        for name in exact:
            exact[name].assert_equals(found[name], f"{name} of group {group}")
