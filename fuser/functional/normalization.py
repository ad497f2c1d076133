"""Normalization over rows: kernels if available, else PyTorch.

``x``, ``extra`` and their gradients are ``[rows, n]``, statistics ``[rows, 1]`` in fp32, and
parameters ``[n]``; with ``zero_centered`` the gain is ``1 + gamma``. If kernels run, the output of
a norm is a :class:`~fuser.functional.lazy.LazyTensor`; the other results are written together
with it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from fuser.cuda import normalization as kernels
from fuser.cuda import normalization_backward as backward_kernels
from fuser.cuda.arguments import Producer
from fuser.cuda.launch import kernels_support
from fuser.cuda.norm_common import takes, takes_addend
from fuser.functional.lazy import LazyTensor, as_stored, launched, rows_of
from fuser.reference import normalization as reference
from fuser.wrapper_tensor import WrapperTensor

Result = torch.Tensor | LazyTensor
Wanted = torch.Tensor | None
Parameters = Sequence[torch.Tensor]
"""Of a norm: gamma and beta of LayerNorm, gamma of RMSNorm, none of L2 normalization."""


def norm(
    x: torch.Tensor,
    parameters: Parameters,
    eps: float,
    dtype: torch.dtype,
    *,
    zero_centered: bool = False,
    extra: Wanted = None,
    wants_sum: bool = False,
) -> tuple[Result, Sequence[torch.Tensor], Wanted]:
    """The norm of ``z = x + extra`` in ``dtype``, its statistics, and z.

    z is None without ``wants_sum``, which needs an ``extra``. It has the dtype that torch promotes
    x and extra to.
    """
    if not (_takes_sum(dtype, x, extra) and _are_alike(parameters)):
        z = x if extra is None else x + extra
        y, *statistics = _forward_by_torch(z, parameters, eps, dtype, zero_centered)
        return y, statistics, z if wants_sum else None
    lazy = _Norm(x, dtype, parameters, eps, zero_centered, extra, wants_sum)
    return lazy, lazy.statistics, lazy.z


def with_statistics(y: Result, statistics: Sequence[torch.Tensor]) -> Result:
    """``y``, a norm whose statistics are known: a kernel that quantizes it does not measure x."""
    if isinstance(y, _Norm):
        y.statistics, y.has_statistics = tuple(statistics), True
    return y


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    parameters: Parameters,
    statistics: Sequence[torch.Tensor],
    needed: Sequence[bool],
    *,
    zero_centered: bool = False,
    d_extra: Wanted = None,
    rounded_dx: Wanted = None,
    output: Result | None = None,
) -> tuple[Result | None, Sequence[Wanted]]:
    """Gradients of ``x``, plus ``d_extra``, and of the parameters; None if not ``needed``.

    ``rounded_dx``, contiguous, in the dtype of dy and of fewer bits than x, is written together
    with the first when that is stored. So is ``output``, what :func:`norm` returned again for this
    x, if it is lazy and one kernel can store both: in the memory of ``dy``, which nothing reads
    later.
    """
    if not (_takes(dy.dtype, x, d_extra) and _are_alike(parameters)):
        read = (dy, x, parameters, statistics, needed, zero_centered, d_extra)
        dx, *grads = _backward_by_torch(*read)
        return _rounded_too(dx, rounded_dx), grads
    options = (zero_centered, d_extra, rounded_dx, output)
    lazy = _NormBackward(dy, x, parameters, statistics, needed[1:], *options)
    if needed[0]:
        return lazy, lazy.grads
    if any(needed) and not launched(lazy._run, None):
        lazy._from_reference()
    return None, lazy.grads


# -- by torch -------------------------------------------------------------------


def _forward_by_torch(
    z: torch.Tensor, parameters: Parameters, eps: float, dtype: torch.dtype, zero_centered: bool
) -> tuple[torch.Tensor, ...]:
    """The norm, and its statistics."""
    if not parameters:
        return reference.l2norm(z, eps)
    gain, *beta = parameters
    forward: Any = reference.layernorm if beta else reference.rmsnorm
    results: tuple[torch.Tensor, ...] = forward(z, _gain(gain, zero_centered), *beta, eps, dtype)
    return results


def _backward_by_torch(
    dy: torch.Tensor,
    x: torch.Tensor,
    parameters: Parameters,
    statistics: Sequence[torch.Tensor],
    needed: Sequence[bool],
    zero_centered: bool,
    d_extra: Wanted,
) -> list[Wanted]:
    """The gradients of the input and of the parameters."""
    if not parameters:
        return [reference.l2norm_backward(dy, x, *statistics)]
    backward: Any = (
        reference.layernorm_backward if len(parameters) > 1 else reference.rmsnorm_backward
    )
    gain = _gain(parameters[0], zero_centered)
    dx, *grads = backward(dy, x, gain, *statistics, needed, d_extra)
    cast = (g if g is None else g.to(p.dtype) for g, p in zip(grads, parameters, strict=True))
    return [dx, *cast]


# -- arguments of kernels -------------------------------------------------------


def _takes_sum(y: torch.dtype, x: torch.Tensor, extra: Wanted) -> bool:
    """Whether kernels make an output of dtype ``y`` from ``x + extra``."""
    if extra is None or extra.dtype is x.dtype:
        return _takes(y, x, extra)
    return kernels_support(x) and takes_addend(x.dtype, extra.dtype, y) and x.shape[1] > 0


def _takes(y: torch.dtype, x: torch.Tensor, added: Wanted = None) -> bool:
    """Whether kernels support this x, an output of dtype ``y``, and the tensor added to x."""
    return (
        kernels_support(x)
        and takes(x.dtype, y)
        and x.shape[1] > 0
        and (added is None or added.dtype is x.dtype)
    )


def _are_alike(parameters: Parameters) -> bool:
    """Whether the parameters have one dtype, as kernels need."""
    return all(parameter.dtype is parameters[0].dtype for parameter in parameters)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return rows_of(x.dequantize() if isinstance(x, WrapperTensor) else x)


def _gain(gamma: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """The fp32 factor of the normalized input."""
    return gamma.float() + 1 if zero_centered else gamma.float()


def _rounded_too(dx: Wanted, rounded_dx: Wanted) -> Wanted:
    """``dx``, which is also written to ``rounded_dx``."""
    if dx is not None and rounded_dx is not None:
        rounded_dx.copy_(dx)
    return dx


def _like(tensor: torch.Tensor, is_wanted: bool) -> Wanted:
    if not is_wanted:
        return None
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class _Norm(LazyTensor):
    """The output of a norm."""

    def __init__(
        self,
        x: torch.Tensor,
        dtype: torch.dtype,
        parameters: Parameters,
        eps: float,
        zero_centered: bool = False,
        extra: Wanted = None,
        wants_sum: bool = False,
    ) -> None:
        if extra is not None and extra.dtype.itemsize > x.dtype.itemsize:
            x, extra = extra, x  # a kernel's x has the dtype of the sum
        self.x = _rows(x)
        self.extra = None if extra is None else _rows(extra)
        self.parameters = tuple(as_stored(parameter).contiguous() for parameter in parameters)
        self.eps, self.zero_centered = eps, zero_centered
        self.shape, self.dtype, self.device = x.shape, dtype, x.device
        self.statistics = tuple(
            torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
            for _ in range(max(1, len(parameters)))
        )
        self.z = _like(self.x, wants_sum)
        self.has_statistics = False
        self.values: Wanted = None  # if a kernel for the gradient has stored them

    def apart(self) -> LazyTensor:
        other: _Norm = copy.copy(self)
        other.statistics = tuple(map(torch.empty_like, self.statistics))
        other.z, other.has_statistics = _like(self.x, self.z is not None), False
        return other

    def _from_kernel(self) -> torch.Tensor:
        if self.values is not None:
            return self.values.view(self.shape)
        y = torch.empty(self.x.shape, dtype=self.dtype, device=self.device)
        self._run(y, None)
        return y.view(self.shape)

    def _from_reference(self) -> torch.Tensor:
        z = self.x if self.extra is None else self.x + self.extra
        if self.z is not None:
            self.z.copy_(z)
        options = (self.eps, self.dtype, self.zero_centered)
        y, *statistics = _forward_by_torch(z, self.parameters, *options)
        for out, statistic in zip(self.statistics, statistics, strict=True):
            out.copy_(statistic)
        return y.view(self.shape)

    def amax(self, out: torch.Tensor) -> None:
        self._run(None, out)

    def producer(self) -> Producer:
        if not self.has_statistics:
            self._run(None, None)
        tensors = self._tensors(self.x if self.z is None else self.z)
        return kernels.norm_producer(tensors, self.dtype, zero_centered_gamma=self.zero_centered)

    def _run(self, y: Wanted, amax: Wanted) -> None:
        """Write the statistics and the sum, and the other outputs that are not None."""
        if y is None and self.extra is not None and self.z is None:
            self.z = _like(self.x, True)  # which the producer reads
        kernels.norm_forward(
            self._tensors(self.x, extra=self.extra, y=y, z=self.z, amax=amax),
            eps=self.eps,
            zero_centered_gamma=self.zero_centered,
            y_dtype=self.dtype,
        )
        self.has_statistics = True

    def _tensors(self, x: torch.Tensor, **others: Wanted) -> kernels.Forward:
        """``x``, the parameters and statistics, and ``others``."""
        gamma, beta = (*self.parameters, None, None)[:2]
        mean, rstd = (None, *self.statistics)[-2:]
        return kernels.Forward(x, gamma=gamma, beta=beta, mean=mean, rstd=rstd, **others)


class _NormBackward(LazyTensor):
    """The gradient of a norm's input; ``grads`` of its parameters are written together with it.

    ``rounded_dx`` is written when the gradient is stored, and not by a quantizer that computes it.
    So is the ``output`` of the norm, where the kernel can.
    """

    def __init__(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        parameters: Parameters,
        statistics: Sequence[torch.Tensor],
        needed: Sequence[bool],
        zero_centered: bool = False,
        d_extra: Wanted = None,
        rounded_dx: Wanted = None,
        output: Result | None = None,
    ) -> None:
        self.output = output
        self.dy, self.x = _rows(dy), _rows(x)
        self.d_extra = None if d_extra is None else _rows(d_extra)
        self.parameters = tuple(as_stored(parameter).contiguous() for parameter in parameters)
        self.statistics = statistics
        self.zero_centered = zero_centered
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.grads = [_like(p, is_wanted) for p, is_wanted in zip(parameters, needed, strict=True)]
        self.rounded_dx = rounded_dx
        self.means: Wanted = None

    def apart(self) -> LazyTensor:
        other: _NormBackward = copy.copy(self)
        other.grads, other.rounded_dx = [None] * len(self.grads), None
        return other

    def _from_kernel(self) -> torch.Tensor:
        dx = torch.empty(self.x.shape, dtype=self.dtype, device=self.device)
        output = self._output_to_store()
        if output is None:
            self._run(dx)
        else:
            y = self.dy if self.dy.is_contiguous() else torch.empty_like(self.dy)
            self._run(dx, y=y, beta=self._beta)
            output.values = y
        return dx.view(self.shape)

    def _output_to_store(self) -> _Norm | None:
        """The output, if it is lazy, and of what the kernel for the gradient reads."""
        output = self.output
        if not isinstance(output, _Norm) or not self.parameters or output.extra is not None:
            return None
        tensors = (self.x, *self.parameters, *self.statistics)
        read = (output.x, *output.parameters, *output.statistics)
        is_same = (*map(id, tensors), self.dy.dtype) == (*map(id, read), output.dtype)
        if not is_same or self.zero_centered is not output.zero_centered:
            return None
        arguments = (self.dy, self.x, self.parameters[0], self._beta, self.d_extra)
        return output if backward_kernels.writes_output(*arguments) else None

    @property
    def _beta(self) -> Wanted:
        return self.parameters[1] if len(self.parameters) > 1 else None

    def _from_reference(self) -> torch.Tensor:
        needed = (True, *(grad is not None for grad in self.grads))
        options = (needed, self.zero_centered, self.d_extra)
        dx, *grads = _backward_by_torch(self.dy, self.x, self.parameters, self.statistics, *options)
        assert dx is not None
        for out, grad_of_reference in zip(self.grads, grads, strict=True):
            if out is not None and grad_of_reference is not None:
                out.copy_(grad_of_reference)
        _rounded_too(dx, self.rounded_dx)
        return dx.view(self.shape)

    def amax(self, out: torch.Tensor) -> None:
        self._measure(amax=out)

    def producer(self) -> Producer:
        if self.means is None:
            self._measure()
        return backward_kernels.norm_backward_producer(
            self._tensors(means=self.means), zero_centered_gamma=self.zero_centered
        )

    def _measure(self, amax: Wanted = None) -> None:
        """Write the means that a producer reads: two for each row of a LayerNorm, else one."""
        shape = (self.x.shape[0], len(self.statistics))
        means = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._run(None, means=means, amax=amax)
        self.means = means

    def _run(self, dx: Wanted, **others: Wanted) -> None:
        """Write the gradients of parameters, and the other outputs that are not None."""
        workspace = None
        if any(grad is not None for grad in self.grads):
            shape = backward_kernels.workspace_shape(self.x, has_beta=len(self.parameters) > 1)
            workspace = torch.empty(shape, dtype=torch.float32, device=self.device)
        rounded_dx = None if dx is None else self.rounded_dx
        dgamma, dbeta = (*self.grads, None, None)[:2]
        backward_kernels.norm_backward(
            self._tensors(dx=dx, rounded_dx=rounded_dx, workspace=workspace, **others),
            dgamma=dgamma,
            dbeta=dbeta,
            zero_centered_gamma=self.zero_centered,
        )

    def _tensors(self, beta: Wanted = None, **others: Any) -> backward_kernels.Backward:
        """What is read, and ``others``; beta is read only where y is written too."""
        gamma = self.parameters[0] if self.parameters else None
        *mean, rstd = self.statistics
        return backward_kernels.Backward(
            *(self.dy, self.x, gamma, beta, mean[0] if mean else None, rstd, self.d_extra),
            **others,
        )
