"""Lazy tensors: values that a kernel can compute but has not stored yet, with a torch fallback."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from fuser.cuda.arguments import Producer
from fuser.cuda.launch import kernels_support
from fuser.errors import KernelUnavailable

Result = TypeVar("Result")


class LazyTensor:
    """A tensor that a kernel can make, in the form in which it is first stored.

    The function that gets one writes it once: plainly (:meth:`tensor`), or quantized, by
    a kernel that takes :meth:`producer`, after which :meth:`finish` is called.
    What is computed along with the values, such as statistics of rows and
    gradients of parameters, is in memory only then. The bits do not depend on
    the way.

    If its kernel is unavailable, :meth:`tensor` computes it with torch. The other
    methods raise :class:`~fuser.errors.KernelUnavailable`; :func:`fallback_to_torch`
    catches that and takes :meth:`tensor`.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns: the last dimension, and all others."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def view(self, shape: torch.Size) -> LazyTensor:
        """The same values in another shape, with rows as long."""
        self.shape = shape
        return self

    def tensor(self) -> torch.Tensor:
        """The values, contiguous, by a kernel that writes them plainly."""
        try:
            return self._from_kernel()
        except KernelUnavailable:
            return self._from_reference()

    def _from_kernel(self) -> torch.Tensor:
        """:meth:`tensor`, by kernels alone."""
        raise NotImplementedError

    def _from_reference(self) -> torch.Tensor:
        """:meth:`tensor`, and all that is computed along with it, in plain torch."""
        raise NotImplementedError

    def amax(self, out: torch.Tensor) -> None:
        """Raise ``out``, fp32 ``[1]``, to ``max |values|``, without writing them."""
        raise NotImplementedError

    def producer(self) -> Producer:
        """The values as another kernel makes and stores them, as a matrix."""
        raise NotImplementedError

    def launch_key(self) -> tuple[Hashable | None, tuple[torch.Tensor | None, ...]]:
        """All that launches depend on besides tensors' layouts, and the tensors.

        For :func:`fuser.cuda.launch_cache.replayed`; the first is None where it cannot be said.
        """
        return None, ()

    def written_by(self, store: Callable[[Any], Result]) -> Result:
        """``store(self)``, which launches a kernel that takes :meth:`producer`; then finish."""
        result = store(self)
        self.finish()
        return result

    def finish(self) -> None:
        """Complete what the kernel that took the producer has left in parts."""


def materialize(values: torch.Tensor | LazyTensor) -> torch.Tensor:
    """``values`` in memory."""
    return values.tensor() if isinstance(values, LazyTensor) else values


# -- where a kernel cannot be had -----------------------------------------------

First = TypeVar("First")
Rest = ParamSpec("Rest")


def fallback_to_torch(
    function: Callable[Concatenate[First, Rest], Result],
) -> Callable[Concatenate[First, Rest], Result]:
    """Decorator: if a kernel is unavailable, call the function again; the second call uses torch.

    All kernels are off by then, and lazy tensors were computed by torch.
    """

    @functools.wraps(function)
    def attempt(x: First, /, *args: Rest.args, **options: Rest.kwargs) -> Result:
        try:
            return function(x, *args, **options)
        except KernelUnavailable:
            again: Any = x.tensor().view(x.matrix) if isinstance(x, LazyTensor) else x
            return function(again, *args, **options)

    return attempt


def kernel_or_torch(
    x: torch.Tensor | LazyTensor,
    kernel: Callable[[Any], Result],
    reference: Callable[[torch.Tensor], Result],
) -> Result:
    """``kernel(x)`` where kernels run, ``reference(x)`` of the matrix elsewhere."""
    if isinstance(x, LazyTensor) or kernels_support(x):
        try:
            return kernel(x)
        except KernelUnavailable:
            pass
    return reference(materialize(x).view(matrix_of(x)))


def filled(
    out: torch.Tensor,
    kernel: Callable[..., None],
    reference: Callable[..., torch.Tensor],
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    """``reference(*args, **options)``; by ``kernel``, which writes it to ``out``, where it runs."""
    if kernels_support(out):
        try:
            kernel(*args, **options, out=out)
        except KernelUnavailable:
            pass
        else:
            return out
    return reference(*args, **options)


# -- inputs and outputs of kernels that quantize --------------------------------


def are_rows(x: torch.Tensor) -> bool:
    """Whether neighbours in a row of ``x [M, K]`` are next to each other, as kernels read it."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x [M, K]`` with neighbours in a row next to each other; a copy where they are not."""
    x = as_stored(x)
    return x if are_rows(x) else x.contiguous()


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the values that its memory has, which a kernel reads; else a copy.

    torch negates lazily: the imaginary part of a conjugate is a view with a bit that says so.
    """
    return x.resolve_neg() if x.is_neg() else x


def matrix_of(x: torch.Tensor | LazyTensor) -> tuple[int, int]:
    """Rows and columns of ``[M, K]``, or of values of any shape."""
    if isinstance(x, LazyTensor):
        return x.matrix
    m, k = x.shape
    return m, k


def source_of(x: torch.Tensor | LazyTensor) -> torch.Tensor | Producer:
    """What a kernel takes to quantize ``x``."""
    return x.producer() if isinstance(x, LazyTensor) else rows_of(x)


def buffer(
    x: torch.Tensor | LazyTensor,
    shape: tuple[int, ...],
    is_needed: bool = True,
    dtype: torch.dtype = torch.uint8,
) -> torch.Tensor | None:
    """An unwritten output on x's device; None if it is not needed."""
    return torch.empty(shape, dtype=dtype, device=x.device) if is_needed else None
