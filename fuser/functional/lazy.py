"""Lazy tensors: values that a kernel can compute but has not stored yet, with a torch fallback."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from fuser.cuda.arguments import PLAIN, Producer
from fuser.cuda.launch import kernels_support
from fuser.errors import KernelUnavailable

Result = TypeVar("Result")


class LazyTensor:
    """A tensor that a kernel can compute and has not stored yet.

    The function that receives one stores it once: unquantized (:meth:`tensor`), or quantized,
    by a kernel that takes :meth:`producer`, followed by a call of :meth:`finish`.
    Tensors that are computed together with the values, such as statistics of rows and
    gradients of parameters, are in memory only after that. The bits of the values are
    the same in both cases; sums may be in another order.

    If its kernel is unavailable, :meth:`tensor` computes it with torch. The other
    methods raise :class:`~fuser.errors.KernelUnavailable`; :func:`kernel_or_torch`
    and a quantizer catch that and call :meth:`tensor`.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_of_groups = False
    """Whether kernels that quantize groups of rows take the producer."""
    buffers: Mapping[str, torch.Tensor | None] | None = None
    """Those of a quantized tensor, by name, that its quantizer writes in place of new ones."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns: the product of all other dimensions, and the last dimension."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def view(self, shape: torch.Size) -> LazyTensor:
        """The same values in another shape, with the same length of rows."""
        self.shape = shape
        return self

    def apart(self) -> LazyTensor:
        """A second one of the same values, which writes to no tensor of this one.

        Beside the values it may leave out what is computed together with them.
        """
        return copy.copy(self)

    def tensor(self) -> torch.Tensor:
        """The values, contiguous, stored unquantized by a kernel."""
        try:
            return self._from_kernel()
        except KernelUnavailable:
            return self._from_reference()

    def _from_kernel(self) -> torch.Tensor:
        """The kernel implementation of :meth:`tensor`."""
        raise NotImplementedError

    def _from_reference(self) -> torch.Tensor:
        """The PyTorch implementation of :meth:`tensor`; also computes the other tensors."""
        raise NotImplementedError

    def amax(self, out: torch.Tensor) -> None:
        """Set ``out``, fp32 ``[1]``, to the maximum of itself and ``max |values|``."""
        raise NotImplementedError

    def producer(self) -> Producer:
        """The producer: another kernel uses it to compute and store the values, as a matrix."""
        raise NotImplementedError

    def finish(self) -> None:
        """Complete the partial results of the kernel that took the producer."""


def materialize(values: torch.Tensor | LazyTensor) -> torch.Tensor:
    """``values`` in memory."""
    return values.tensor() if isinstance(values, LazyTensor) else values


# -- fallback -------------------------------------------------------------------


def kernel_or_torch(
    x: torch.Tensor | LazyTensor,
    kernel: Callable[[Any], Result],
    reference: Callable[[torch.Tensor], Result],
) -> Result:
    """``kernel(x)`` if kernels run, otherwise ``reference(x)`` of the matrix."""
    if isinstance(x, LazyTensor) or kernels_support(x):
        try:
            return kernel(x)
        except KernelUnavailable:
            pass
    return reference(materialize(x).view(matrix_of(x)))


def launched(kernel: Callable[..., object], *args: Any, **options: Any) -> bool:
    """Launch a kernel; False if it is unavailable, and torch is to do its work."""
    try:
        kernel(*args, **options)
    except KernelUnavailable:
        return False
    return True


def filled(
    out: torch.Tensor,
    kernel: Callable[..., None],
    reference: Callable[..., torch.Tensor],
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    """``out``, filled by ``kernel`` if it runs; otherwise ``reference(*args, **options)``."""
    if kernels_support(out) and launched(kernel, *args, **options, out=out):
        return out
    return reference(*args, **options)


# -- inputs and outputs of kernels that quantize --------------------------------


def are_rows(x: torch.Tensor) -> bool:
    """Whether the elements of a row of ``x [M, K]`` are adjacent in memory, as kernels need."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x [M, K]`` with adjacent elements in each row; a copy if necessary."""
    x = as_stored(x)
    return x if are_rows(x) else x.contiguous()


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """``x`` if its memory holds its values, which a kernel reads; else a copy.

    torch negates lazily: the imaginary part of a conjugate is a view with a negation bit. Zero
    gradients, of complex formulas and of forward-mode derivatives, may have no memory.
    """
    if x.is_neg():
        return x.resolve_neg()
    if type(x) not in PLAIN or x.layout is not torch.strided or x.is_meta:
        return x
    is_zeros = not x.data_ptr() and x.numel() and x.untyped_storage().nbytes()  # it was not freed
    return x.clone() if is_zeros else x


def matrix_of(x: torch.Tensor | LazyTensor) -> tuple[int, int]:
    """Rows and columns of ``[M, K]``, or of a lazy tensor of any shape."""
    if isinstance(x, LazyTensor):
        return x.matrix
    m, k = x.shape
    return m, k


def source_of(x: torch.Tensor | LazyTensor) -> torch.Tensor | Producer:
    """The argument of a kernel that quantizes ``x``: the tensor or its producer."""
    return x.producer() if isinstance(x, LazyTensor) else rows_of(x)
