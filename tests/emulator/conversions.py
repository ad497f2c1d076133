"""Inputs that a conversion to 8 or 4 bits may get wrong, and what must come out of each.

For ``kernels/conversions.cu``, in the emulator and on a GPU.
"""

from __future__ import annotations

import number_formats
import numpy as np
import torch
from number_formats import E2M1, E4M3, E5M2

from fuser.cuda.launch import Launch

THREADS = 256


def hard_inputs() -> torch.Tensor:
    """Every bf16; values and ties of every small format with their neighbours; fp32 at random."""
    generator = np.random.default_rng(0)
    parts = [np.arange(2**16, dtype=np.uint32) << 16]
    parts += [generator.integers(0, 2**32, 2**16, dtype=np.uint32)]
    for small in (E4M3, E5M2, E2M1):
        ties = (small.values[:-1] + small.values[1:]) / 2
        beyond = [small.max * 1.0625, small.max * 1.125]
        points = np.concatenate([small.values, ties, beyond]).astype(np.float32).view(np.uint32)
        near = np.concatenate([points[1:] - 1, points, points + 1])
        parts += [near, near | 1 << 31]
    bits = np.concatenate(parts)
    whole = np.concatenate([bits, bits[: bits.size % 2]])
    return torch.from_numpy(number_formats.from_bits(whole).copy())


def outputs_for(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes for E4M3 and E5M2, and half as many for E2M1."""
    e4m3, e5m2 = (torch.empty(x.numel(), dtype=torch.uint8, device=x.device) for _ in range(2))
    return e4m3, e5m2, torch.empty(x.numel() // 2, dtype=torch.uint8, device=x.device)


def launch_for(x: torch.Tensor) -> Launch:
    """One thread a pair."""
    return Launch((-(-x.numel() // 2 // THREADS),), (THREADS,))


def check(x: torch.Tensor, e4m3: torch.Tensor, e5m2: torch.Tensor, e2m1: torch.Tensor) -> None:
    """Every byte is what the definition of the format says."""
    values = x.cpu().numpy()
    nibbles = torch.stack([e2m1 & 15, e2m1 >> 4], 1).flatten()
    for small, codes in ((E4M3, e4m3), (E5M2, e5m2), (E2M1, nibbles)):
        expected, got = small.encode(values), codes.cpu().numpy()
        wrong = np.flatnonzero(expected != got)
        assert wrong.size == 0, (
            f"{values[wrong[0]]!r}: {got[wrong[0]]:#x}, not {expected[wrong[0]]:#x}"
        )
