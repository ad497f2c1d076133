"""What a quantized tensor lost: measured from its own bytes, against what it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fuser.formats import DType
from fuser.functional.grouped import PaddedGroups, unpad
from fuser.tensors import QuantizedTensor

# Two elements of E2M1 are in a byte: 6.0, its largest, has the code 7, and 4.0 the code 6.
_CODES_OF_FP4 = (0x77, 0x66)


class MeasuredSums(NamedTuple):
    """Sums over the values of a tensor; of tensors together, their sums, and the largest amax.

    ``underflows`` and ``saturations`` are NaN where elements are not those of the tensor, as after
    a Hadamard transform; all but ``amax`` and ``values`` are NaN without a source.
    """

    amax: float
    values: float
    nonzeros: float
    underflows: float
    saturations: float
    signal: float
    """Of the squares of the source."""
    noise: float
    """Of the squares of the errors."""
    noise_of_bf16: float
    """Of the errors of the source rounded to bf16; 0 of one that has 16 bits itself."""


UNKNOWN = float("nan")


def copies_of(tensor: QuantizedTensor) -> tuple[str, ...]:
    """The copies to measure: ``"both"`` if a copy of the format is the transpose of the other.

    Of a gathered parameter, those that are in memory now.
    """
    if tensor._is_transposable():
        return ("both",)
    here = tensor._present()
    return tuple(usage for usage in ("rowwise", "columnwise") if here._has(usage))


def measured(tensor: QuantizedTensor, copy: str, groups: PaddedGroups | None) -> torch.Tensor:
    """The :class:`MeasuredSums` of a copy as fp64 ``[8]`` on its device, for which nothing waits.

    The values of padded ``groups`` are those of their rows alone, without the padding.
    """
    one = tensor._present()
    one = one if copy == "both" else one.with_usage(copy)
    values = _rows(one.dequantize(dtype=torch.float32), groups)
    seen = tensor._observation
    if seen is None or seen.source is None:
        unknown = values.new_full((6,), UNKNOWN, dtype=torch.float64)
        return torch.cat([_amax(values), _count(values, groups), unknown])
    source = _rows(seen.source, groups)
    exact = source.float()
    is_nonzero, is_zero = exact != 0, values == 0
    underflows = saturations = exact.new_full((1,), UNKNOWN, dtype=torch.float64)
    if copy != "columnwise" or tensor.column_transform is None:
        underflows = (is_nonzero & is_zero).sum()
        largest = _largest(one, groups)
        if largest is not None:
            saturations = ((exact.abs() > largest) & ~is_zero).sum()
    has_16_bits = source.dtype.itemsize <= 2
    rounding = torch.zeros_like(exact) if has_16_bits else exact - exact.bfloat16().float()
    parts = [_amax(exact), _count(exact, groups), is_nonzero.sum(), underflows, saturations]
    parts += [_energy(exact), _energy(exact - values), _energy(rounding)]
    return torch.cat([part.double().reshape(1) for part in parts])


def together(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums of several tensors as those of one."""
    stacked = torch.stack(tuple(sums))
    return torch.cat([stacked[:, :1].amax(0), stacked[:, 1:].sum(0)])


def _rows(values: torch.Tensor, groups: PaddedGroups | None) -> torch.Tensor:
    """The values of padded groups without their padding."""
    if groups is None or values.shape[0] != groups.padded_rows:
        return values
    return unpad(values, groups)


def _amax(values: torch.Tensor) -> torch.Tensor:
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    return largest.double().reshape(1)


def _count(values: torch.Tensor, groups: PaddedGroups | None) -> torch.Tensor:
    """The number of values; the rows after the last of padded groups belong to none."""
    if groups is None or not len(groups.ends):
        return values.new_full((1,), values.numel(), dtype=torch.float64)
    return (groups.ends[-1:] * values.shape[1]).double()


def _energy(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares, added in fp64."""
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


def _largest(one: QuantizedTensor, groups: PaddedGroups | None) -> torch.Tensor | None:
    """By element, where rounding to nearest leaves the format under the element's own scale.

    That is half a step above the largest value, as IEEE 754 defines overflow. Both are read from
    the tensor itself, with the codes of the two largest values in place of its data.
    """
    element = one.format.element
    if element is DType.kFloat4E2M1:
        codes = _CODES_OF_FP4
    elif element.torch_dtype.is_floating_point and element.torch_dtype.itemsize == 1:
        code = int(torch.tensor(element.max).to(element.torch_dtype).view(torch.uint8))
        codes = code, code - 1
    else:
        return None
    top, below = (_rows(_filled(one, code), groups) for code in codes)
    return top + (top - below) / 2


def _filled(one: QuantizedTensor, code: int) -> torch.Tensor:
    """The values of a tensor whose data has this byte everywhere, with its scales."""
    stored = one.compact()
    buffers = stored.buffers()
    for name in (stored.rowwise_names[0], stored.columnwise_names[0]):
        data = buffers[name]
        buffers[name] = None if data is None else torch.full_like(data, code)
    filled = type(stored)(buffers, stored.shape, stored.dtype, stored.device, stored._quantizer)
    return filled.dequantize(dtype=torch.float32)
