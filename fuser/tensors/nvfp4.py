"""NVFP4: blocks of 16 E2M1 elements share an E4M3 scale, and the tensor has an fp32 scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, get_args

import torch

from fuser.cuda import nvfp4 as kernels
from fuser.errors import InputError
from fuser.formats import NVFP4, NVFP4_BLOCK, NVFP4_ROWS, DType, NumberFormat
from fuser.functional.amax import amax, raise_amax
from fuser.functional.lazy import LazyTensor, kernel_or_torch, matrix_of, rows_of, source_of
from fuser.functional.random_seeds import rounding_seed
from fuser.recipe import FourOverSixError, NVFP4BlockScaling, role_params
from fuser.reference import nvfp4 as reference
from fuser.reference.nvfp4 import inverse_hadamard_transform
from fuser.tensors.base import BlockScaledTensor
from fuser.tensors.quantizer import AMAXES, Quantizer, whole_blocks


class NVFP4Tensor(BlockScaledTensor, layout=NVFP4):
    """Pairs of E2M1 elements with E4M3 block scales and the tensor's amax.

    Buffers: ``_rowwise_data`` [M, K / 2] and ``_columnwise_data`` [K, M / 2]
    uint8, low nibble first, M and K rounded up to multiples of 16;
    ``_rowwise_scale_inv`` and ``_columnwise_scale_inv``, E4M3 bytes in the shapes of
    ``formats.NVFP4``; ``_amax_rowwise`` and ``_amax_columnwise`` [1]
    fp32, or [M] and [K] if rows have scales of their own.
    """

    _amax_rowwise: torch.Tensor | None
    _amax_columnwise: torch.Tensor | None
    _quantizer: NVFP4Quantizer
    _kernels, _reference = kernels, reference

    def _is_transposable(self) -> bool:
        how = self._quantizer
        if how.nvfp4_use_4over6:  # the sums of errors of a block and of its transpose are rounded
            return False
        return how.with_2d_quantization and not (how.with_rht or how.stochastic_rounding)

    @property
    def column_transform(self) -> Hashable | None:
        how = self._quantizer
        return ("hadamard", how.with_random_sign_mask) if how.with_rht else None

    def transformed_columns(self, dtype: torch.dtype) -> torch.Tensor:
        tensor: Any = self.with_usage("columnwise").compact()
        values: torch.Tensor = tensor._stored_values(dtype)
        return values

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        if self._rowwise_data is not None or not self._quantizer.with_rht:
            return self._stored_values(dtype)
        values, signs = self._stored_values(torch.float32), self._quantizer.with_random_sign_mask
        return inverse_hadamard_transform(values.t(), signs).t().to(dtype).contiguous()

    def _stored_values(self, dtype: torch.dtype) -> torch.Tensor:
        """The values of one copy, ``[M, K]``, without the inverse of its transform."""
        data, scale, amax_value = (getattr(self, name) for name in self._copy_to_read()[1])
        how = self._quantizer
        if how.format.has_kernel:
            return self._dequantized(dtype, amax_value)
        if how.row_scaled_nvfp4:
            amax_value = amax_value[:, None]
        columnwise = self._rowwise_data is None
        options: dict[str, Any] = {"columnwise": columnwise, "e4m3_max": how.nvfp4_e4m3_max}
        return reference.dequantize(data, scale, amax_value, dtype, **options)


@dataclass(frozen=True)
class NVFP4Quantizer(Quantizer):
    """NVFP4: one scale for each block of 1x16 elements, or 16x16 for weights.

    Parameters
    ----------
    fp4_dtype
        E2M1, the only element type.
    with_2d_quantization
        One scale for each block of 16x16 elements.
    with_rht
        Apply a 16-point random Hadamard transform to the columnwise copy. The
        transform is computed in fp32 and rounded to bf16, for every input dtype.
    with_random_sign_mask
        Change signs before the transform (``formats.HADAMARD_SIGNS``).
    stochastic_rounding
        Round at random, so that the expected value is unchanged.
    seed
        Seed of the stochastic rounding; None draws one from torch's generator at every call.
    with_post_rht_amax
        Has no effect: the amax of a transformed copy is always that of its transformed values.
    row_scaled_nvfp4
        One fp32 scale for each row of a copy, ``[M]`` of one and ``[K]`` of the other, in place of
        one for the tensor; torch computes it on every device.
    nvfp4_use_4over6
        Scale the largest value of each block to 6 or to 4, whichever has the smaller error; torch
        computes it on every device.
    nvfp4_e4m3_max
        The largest block scale: 448, or with ``nvfp4_use_4over6`` 256.
    nvfp4_4over6_err_mode
        The error of a block: ``"MAE"``, the sum of absolute errors, or ``"MSE"``, of squares.

    Raises
    ------
    InputError
        If ``fp4_dtype`` is not E2M1, or an option has another value or does not go with another.
    """

    fp4_dtype: InitVar[DType] = DType.kFloat4E2M1
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    with_2d_quantization: bool = field(default=False, kw_only=True)
    with_rht: bool = field(default=False, kw_only=True)
    with_random_sign_mask: bool = field(default=True, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    with_post_rht_amax: InitVar[bool] = field(default=False, kw_only=True)
    row_scaled_nvfp4: bool = field(default=False, kw_only=True)
    nvfp4_use_4over6: bool = field(default=False, kw_only=True)
    nvfp4_e4m3_max: Literal[448, 256] = field(default=448, kw_only=True)
    nvfp4_4over6_err_mode: FourOverSixError = field(default="MAE", kw_only=True)

    tensor_class = NVFP4Tensor
    recipe_class = NVFP4BlockScaling
    accepts_lazy = True
    reduces_scales = True

    def __post_init__(self, fp4_dtype: DType, with_post_rht_amax: bool) -> None:
        if fp4_dtype is not DType.kFloat4E2M1:
            raise InputError(
                f"NVFP4 got fp4_dtype {fp4_dtype}; the only element type is {DType.kFloat4E2M1}."
            )
        if self.row_scaled_nvfp4 and self.with_2d_quantization:
            raise InputError(
                "NVFP4 got row_scaled_nvfp4=True and with_2d_quantization=True; a row has no scale "
                "of its own if 16 of them share the scales of blocks. Leave one out."
            )
        if self.nvfp4_4over6_err_mode not in get_args(FourOverSixError):
            raise InputError(
                f"NVFP4 got nvfp4_4over6_err_mode={self.nvfp4_4over6_err_mode!r}; it is "
                f"{' or '.join(map(repr, get_args(FourOverSixError)))}."
            )
        if self.nvfp4_e4m3_max not in ((448, 256) if self.nvfp4_use_4over6 else (448,)):
            raise InputError(
                f"NVFP4 got nvfp4_e4m3_max={self.nvfp4_e4m3_max} and nvfp4_use_4over6="
                f"{self.nvfp4_use_4over6}; it takes 448, or 256 with four over six."
            )
        if self.nvfp4_use_4over6 and (self.with_rht or self.stochastic_rounding):
            refused = "with_rht" if self.with_rht else "stochastic_rounding"
            raise InputError(
                f"NVFP4 got nvfp4_use_4over6=True and {refused}=True; a block that chooses its "
                "scale by its error is neither transformed nor rounded at random. Leave one out."
            )

    @classmethod
    def of_recipe(cls, recipe: NVFP4BlockScaling, role: str) -> Quantizer:
        params = role_params(recipe, role, "fp4")
        return cls(
            with_2d_quantization=params.fp4_2d_quantization,
            with_rht=params.random_hadamard_transform,
            stochastic_rounding=params.stochastic_rounding,
            row_scaled_nvfp4=recipe.row_scaled_activation and role == "input",
            **recipe.four_over_six(role),
        )

    @functools.cached_property
    def format(self) -> NumberFormat:
        size = NVFP4_BLOCK * (NVFP4_BLOCK if self.with_2d_quantization else 1)
        names = {
            "rowwise": self.row_scaled_nvfp4,
            "4over6": self.nvfp4_use_4over6,
            "256": self.nvfp4_e4m3_max == 256,
        }
        options = [name for name, is_on in names.items() if is_on]
        layout = NVFP4_ROWS if self.row_scaled_nvfp4 else NVFP4
        name = " ".join(["NVFP4", *options])
        return NumberFormat(name, DType.kFloat4E2M1, layout, size, has_kernel=not options)

    @property
    def is_repeatable(self) -> bool:
        return not self.stochastic_rounding or self.seed is not None  # else each call draws one

    def encoding(self) -> tuple[object, ...]:
        transform = (self.with_rht, self.with_random_sign_mask)
        scales = (self.row_scaled_nvfp4, self.nvfp4_e4m3_max)
        return (self.with_2d_quantization, *transform, *scales)

    def amaxes_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The amax, and with a Hadamard transform that of the transformed values.

        If rows have scales of their own, those of columns, for their copy.
        """
        x = whole_blocks(rows, self.multiple)
        if self.row_scaled_nvfp4:
            assert isinstance(x, torch.Tensor)
            return self._amaxes_of_columns(x) if self.columnwise else None
        return kernel_or_torch(x, self._amaxes_from_kernel, self._amaxes_from_reference)

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        if not self.format.has_kernel:
            return super().from_kernel(x)  # which says that there is none
        if isinstance(x, torch.Tensor):
            x = rows_of(x)
        buffers, amaxes = self.new_buffers(x), self.reduced_amaxes
        amaxes = self._amaxes_from_kernel(x) if amaxes is None else amaxes
        if not math.prod(matrix_of(x)):  # nothing is launched
            for name in ("_amax_rowwise", "_amax_columnwise"):
                if buffers[name] is not None:
                    buffers[name] = torch.zeros(1, dtype=torch.float32, device=x.device)
        kernels.quantize(self.format, source_of(x), buffers, amaxes, **self._options())
        buffers[AMAXES] = amaxes
        return buffers

    def _amaxes_from_kernel(self, x: torch.Tensor | LazyTensor) -> torch.Tensor:
        amaxes = torch.zeros(1 + self.with_rht, dtype=torch.float32, device=x.device)
        if self.with_rht:
            kernels.hadamard_amax(source_of(x), random_signs=self.with_random_sign_mask, out=amaxes)
        else:
            raise_amax(x, amaxes)
        return amaxes

    def _amaxes_from_reference(self, x: torch.Tensor) -> torch.Tensor:
        if not self.with_rht:
            return amax(x)
        turned = reference.hadamard_transform(x.t().float(), self.with_random_sign_mask)
        return torch.cat([amax(x), amax(turned)])

    def _amaxes_of_columns(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.t()
        if self.with_rht:
            turned = reference.hadamard_transform(turned, self.with_random_sign_mask)
        return reference.amaxes_of_rows(turned)

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        amaxes = self.reduced_amaxes
        if amaxes is None:
            amaxes = self.amaxes_of(x) if self.row_scaled_nvfp4 else self._amaxes_from_reference(x)
        copies = self.copies(
            *reference.quantize(
                x,
                rowwise=self.rowwise,
                columnwise=self.columnwise,
                two_dimensional=self.with_2d_quantization,
                row_scaled=self.row_scaled_nvfp4,
                four_over_six=self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else None,
                e4m3_max=self.nvfp4_e4m3_max,
                **self._options(),
                amax_value=amaxes,
            )
        )
        return copies if amaxes is None else {**copies, AMAXES: amaxes}

    def _options(self) -> dict[str, Any]:
        """The options of kernels and reference; draws the seed of this call."""
        seed = self.seed
        if seed is None:
            seed = rounding_seed() if self.stochastic_rounding else 0
        return {
            "hadamard": self.with_rht,
            "random_signs": self.with_random_sign_mask,
            "stochastic": self.stochastic_rounding,
            "seed": seed if self.stochastic_rounding else 0,
        }
