"""Rows of groups padded to a multiple, and the padding taken away again."""

from __future__ import annotations

import torch

from fuser.errors import InputError

__all__ = ["Fp8Padding", "Fp8Unpadding"]

ALIGNMENT = 16
"""The default multiple, in rows; the formats of this library need none."""


class _Padded(torch.nn.Module):
    """``num_gemms`` groups, whose rows become a multiple of ``align_size``; None is 16."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = ALIGNMENT if align_size is None else align_size

    def padded(self, sizes: list[int]) -> list[int]:
        """The sizes of groups with their padding."""
        if len(sizes) != self.num_gemms:
            raise InputError(
                f"{type(self).__name__} for {self.num_gemms} groups got the {len(sizes)} sizes "
                f"{sizes}: give one for each."
            )
        return [-(-size // self.align_size) * self.align_size for size in sizes]

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Padded):
    """Rows of zeros behind the rows of each group, up to a multiple of ``align_size``.

    The grouped linears here need no alignment, so programs may leave it out.
    """

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """``[rows, features]`` with the padding, and the new sizes of the groups."""
        sizes = self.padded(m_splits)
        if sizes == list(m_splits):
            return inp, list(m_splits)
        parts = []
        for rows, size in zip(torch.split(inp, list(m_splits)), sizes, strict=True):
            parts += [rows, rows.new_zeros(size - rows.shape[0], *rows.shape[1:])]
        return torch.cat(parts), sizes


class Fp8Unpadding(_Padded):
    """The inverse of :class:`Fp8Padding`."""

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """``[rows, features]`` without the padding; ``m_splits`` are the sizes without it."""
        sizes = self.padded(m_splits)
        if sizes == list(m_splits):
            return inp
        parts = zip(torch.split(inp, sizes), m_splits, strict=True)
        return torch.cat([rows[:size] for rows, size in parts])
