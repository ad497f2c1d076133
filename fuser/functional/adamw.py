"""A step of AdamW: kernels if available, else PyTorch.

If kernels run, the new weights are a :class:`~fuser.functional.lazy.LazyTensor`: the kernel that
quantizes them takes the step.
"""

from __future__ import annotations

import torch

from fuser.cuda import adamw as kernels
from fuser.cuda import fp8_scaling
from fuser.cuda.adamw import AdamWStep
from fuser.cuda.arguments import Producer
from fuser.cuda.launch import kernels_support
from fuser.functional.lazy import LazyTensor
from fuser.reference import adamw as reference

__all__ = ["AdamWStep", "adamw"]


def adamw(
    step: AdamWStep, dtype: torch.dtype, *, values: torch.Tensor | None = None
) -> torch.Tensor | LazyTensor:
    """The weights after the step, rounded to ``dtype``; see the reference.

    The step is taken once, by the time that they are in memory or quantized.

    Parameters
    ----------
    step
        Of any shape ``[..., K]``, or with no dimension; the gradient in fp32 or ``dtype``.
    dtype
        fp32, fp16 or bf16.
    values
        Where to put them, contiguous, if they are not quantized. None makes a new tensor.
    """
    if not kernels_support(step.master):
        reference.adamw(*step)
        rounded = step.master.to(dtype)
        return rounded if values is None else values.copy_(rounded)
    updated = _Updated(step, dtype)
    updated.values = values
    return updated if kernels.are_aligned(updated.step) else updated.tensor()


class _Updated(LazyTensor):
    """The weights after a step; what is in memory last is the master weight."""

    values: torch.Tensor | None = None  # memory for them, if they are not quantized

    def __init__(self, step: AdamWStep, dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.device = step.master.shape, dtype, step.master.device
        k = self.shape[-1] if self.shape else 1
        rows = [one.view(-1 if k else 0, k) for one in step[:4]]
        self.step = AdamWStep(rows[0], rows[1], rows[2], rows[3], step.constants)
        self.is_taken = False  # the step

    def _from_kernel(self) -> torch.Tensor:
        if self.is_taken:
            return self._rounded()
        out = self.values
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        kernels.adamw(self.step, self.dtype, values=out.view(self.step.master.shape))
        self.is_taken = True
        return out

    def _from_reference(self) -> torch.Tensor:
        if not self.is_taken:
            reference.adamw(*self.step)
            self.is_taken = True
        return self._rounded()

    def _rounded(self) -> torch.Tensor:
        rounded = self.step.master.view(self.shape).to(self.dtype)
        return rounded if self.values is None else self.values.copy_(rounded)

    def amax(self, out: torch.Tensor) -> None:
        """As in the base class; takes the step, so that no kernel reads its tensors twice."""
        if self.is_taken:
            fp8_scaling.amax(self.producer(), out=out)
        else:
            kernels.adamw(self.step, self.dtype, amax=out)
            self.is_taken = True

    def producer(self) -> Producer:
        if self.is_taken:
            return kernels.rounded_producer(self.step.master, self.dtype)
        return kernels.producer(self.step, self.dtype)

    def finish(self) -> None:
        self.is_taken = True
