"""What kernels read, tensors or values that are not in memory yet, and outputs for them."""

from __future__ import annotations

import abc
import math

import torch

from fuser.cuda import module
from fuser.cuda.arguments import Producer
from fuser.cuda.launch import kernels_take

_ON_CPU = torch.empty(0)


class Values(abc.ABC):
    """A tensor that a kernel can make, in the form in which it is first stored.

    Whoever gets one writes it once: plainly (:meth:`tensor`), or quantized, by
    a kernel that takes :meth:`producer`, after which :meth:`finish` is called.
    What is computed beside the values, such as statistics of rows and
    gradients of parameters, is in memory only then. The bits do not depend on
    the way.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns: the last dimension, and all others."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def view(self, shape: torch.Size) -> Values:
        """The same values in another shape, with rows as long."""
        self.shape = shape
        return self

    @abc.abstractmethod
    def tensor(self) -> torch.Tensor:
        """The values, contiguous, by a kernel that writes them plainly."""

    @abc.abstractmethod
    def amax(self, out: torch.Tensor) -> None:
        """Raise ``out``, fp32 ``[1]``, to ``max |values|``, without writing them."""

    @abc.abstractmethod
    def producer(self) -> Producer:
        """The values as another kernel makes and stores them, as a matrix."""

    def finish(self) -> None:  # noqa: B027  most have nothing to complete
        """Complete what the kernel that took the producer has left in parts."""


def written(values: torch.Tensor | Values) -> torch.Tensor:
    """``values`` in memory."""
    return values.tensor() if isinstance(values, Values) else values


def kernels_run_on(device: str) -> bool:
    """Whether kernels take tensors on a device of that type."""
    return module.kernels_unavailable() is None if device == "cuda" else kernels_take(_ON_CPU)


# -- inputs and outputs of kernels that quantize --------------------------------


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x [M, K]`` with neighbours in a row next to each other; a copy where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def matrix_of(x: torch.Tensor | Values) -> tuple[int, int]:
    """Rows and columns of ``[M, K]``, or of values of any shape."""
    if isinstance(x, Values):
        return x.matrix
    m, k = x.shape
    return m, k


def source_of(x: torch.Tensor | Values) -> torch.Tensor | Producer:
    """What a kernel takes to quantize ``x``."""
    return x.producer() if isinstance(x, Values) else rows_of(x)


def buffer(
    x: torch.Tensor | Values,
    shape: tuple[int, int],
    is_wanted: bool,
    dtype: torch.dtype = torch.uint8,
) -> torch.Tensor | None:
    """An unwritten output on x's device, None where it is not wanted."""
    return torch.empty(shape, dtype=dtype, device=x.device) if is_wanted else None
