"""Launcher of the probe, a kernel that tests whether kernels work on a machine."""

from __future__ import annotations

import functools

import torch

from fuser.cuda.arguments import float32, int64
from fuser.cuda.launch import Kernel, Launch
from fuser.errors import InputError

THREADS = 256
# Few enough that a million elements take several steps of the grid-stride loop.
MAX_BLOCKS = 1024

FUSER_PROBE = Kernel("probe", "fuser_probe")


def probe(x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
    """Write ``y[i] = scale * x[i] + i``, in fp32 with one rounding.

    The kernel steps by its argument for the number of threads. So all elements are right only if
    the grid, block, pointers, int64 sizes and the float arrive correctly. Subnormal inputs count as
    0. ``x`` and ``y`` are fp32, contiguous, of one shape; ``i`` counts the elements in memory.
    """
    for name, tensor in (("x", x), ("y", y)):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise InputError(
                f"probe takes contiguous float32 tensors; {name} is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}."
            )
    if x.shape != y.shape:
        raise InputError(
            f"probe writes as many elements as it reads; x has shape {tuple(x.shape)} and y "
            f"{tuple(y.shape)}."
        )
    launch = _launch(x.numel())
    threads = launch.grid[0] * launch.block[0]
    FUSER_PROBE(launch, x, y, int64(x.numel()), int64(threads), float32(scale))


@functools.lru_cache(maxsize=64)
def _launch(n: int) -> Launch:
    return Launch(grid=(min(-(-n // THREADS), MAX_BLOCKS),), block=(THREADS,))
