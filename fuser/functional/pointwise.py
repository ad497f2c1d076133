"""Pointwise ops and their gradients: kernels if available, else PyTorch.

If kernels run, a result is a :class:`~fuser.functional.lazy.LazyTensor`: nothing is launched
before it is written. Gradients of operands are returned with it as tensors, which are filled when
it is written.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from fuser.chain import Stage, Stages
from fuser.cuda import pointwise as kernels
from fuser.cuda.arguments import Producer
from fuser.cuda.launch import kernels_support
from fuser.errors import KernelUnavailable
from fuser.functional.lazy import LazyTensor, as_stored
from fuser.reference import chain as reference
from fuser.reference.activation import NATIVE, activation, activation_backward
from fuser.wrapper_tensor import WrapperTensor

Result = torch.Tensor | LazyTensor
Operands = Sequence[torch.Tensor | None]

NO_OPERAND = (None,)
# For fewer elements torch's own function runs, if it is one call: this many bf16 are 4 MB, 1 us of
# a GPU's memory, and a launch costs the host more than a call of torch. Forward and backward of
# Linear-GELU-Linear on 16x128 took 1.9 times nn.Sequential's time with launches, 1.2 without.
FEW_ELEMENTS = 2**20
MAX_FLOAT32 = torch.finfo(torch.float32).max

# torch runs one such op alone, because it is as fast.
_TORCH = frozenset(("bias", "add_extra_input", "constant_scale"))


def chain(
    stages: Stages, x: torch.Tensor, operands: Operands = NO_OPERAND, *, is_plain: bool = False
) -> Result:
    """The output of ``stages``, each rounded to the dtype of ``x``; see the reference.

    ``operands``, one for each stage: a bias, an extra input, a dropout's seed, scales, or None.
    Biases and extra inputs have the dtype of ``x``. ``is_plain``: the one stage is an activation
    and nothing around it is quantized, so that torch's rounding is acceptable too.
    """
    if is_plain and prefers_torch(stages[0], x.numel()):
        return activation(stages[0], x)
    if not kernels_take(x):
        return reference.forward(stages, x, operands)
    return _ChainOutput(stages, x, _contiguous(operands))


def chain_backward(
    stages: Stages,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    operands: Operands,
    needed: Sequence[bool],
    *,
    saved: int = 0,
    is_plain: bool = False,
    output: Result | None = None,
) -> tuple[Result, list[torch.Tensor | None]]:
    """Gradients of the input of ``stages`` and, if ``needed``, of the operands; see the reference.

    ``x`` is the input of stage number ``saved``. Tensors that no later activation reads again may
    be None: ``x``, a bias, an extra input. ``is_plain`` as in :func:`chain`, of the last stage,
    which reads ``x``; those before it are biases.
    ``output``: what :func:`chain` returned again for this x. If it is lazy, and one kernel can
    store it and the gradient, that kernel does, in the memory of ``dy``, which nothing reads later.
    """
    if is_plain and x is not None and prefers_torch(stages[-1], x.numel()):
        dx = activation_backward(stages[-1], dy, x)
        return dx, [reference.sum_over_rows(dx) if is_bias else None for is_bias in needed]
    if not kernels_take(dy, x):
        return reference.backward(stages, dy, x, operands, needed, saved)
    *leading, width = dy.shape
    grads: list[torch.Tensor | None] = []
    for stage, operand, is_wanted in reversed(list(zip(stages, operands, needed, strict=True))):
        shape, dtype = (*leading, width), dy.dtype
        if stage.name == "bias":
            shape = (width,)
        elif stage.is_scaled and operand is not None:
            shape, dtype = tuple(operand.shape), operand.dtype
        grads.append(torch.empty(shape, dtype=dtype, device=dy.device) if is_wanted else None)
        width <<= stage.is_gated
    grads.reverse()
    values = BackwardChain(stages, dy, x, _contiguous(operands), grads, saved, output)
    return values, grads


def dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> Result:
    """``x * mask / (1 - p)``, also for a gradient; see the reference."""
    return chain((Stage("dropout", (p,)),), x, (seed,))


def constant_scale(x: torch.Tensor, scale: float) -> Result:
    """``x * scale``; kernels compute in fp32, in which the scale may not be finite."""
    if abs(scale) > MAX_FLOAT32:
        return x * scale
    return chain((Stage("constant_scale", (scale,)),), x)


def prefers_torch(stage: Stage, count: int) -> bool:
    """Whether torch's own function runs for so many elements, as fast; see `chain`."""
    return stage.name in NATIVE and count < FEW_ELEMENTS


def reads_in_place(x: torch.Tensor) -> bool:
    """Whether a kernel reads ``x`` without a copy: contiguous, or a matrix of contiguous rows."""
    return x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)


# -- arguments of kernels -------------------------------------------------------


def kernels_take(x: torch.Tensor, other: torch.Tensor | None = None) -> bool:
    """Whether kernels support these tensors, which must have one dtype."""
    return kernels_support(x) and x.dim() > 0 and (other is None or other.dtype is x.dtype)


def _contiguous(operands: Operands) -> Operands:
    return [None if operand is None else _rows(operand).contiguous() for operand in operands]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` in a layout that kernels read; a copy if necessary."""
    if isinstance(x, WrapperTensor):
        x = x.dequantize()
    x = as_stored(x)
    return x if reads_in_place(x) else x.contiguous()


class _ChainOutput(LazyTensor):
    """The output of a chain."""

    is_of_groups = True

    def __init__(self, stages: Stages, x: torch.Tensor, operands: Operands) -> None:
        self.stages = stages
        self.x = _rows(x)
        self.operands = operands
        halves = sum(stage.is_gated for stage in stages)
        *leading, features = x.shape
        self.shape = torch.Size((*leading, features >> halves))
        self.dtype, self.device = x.dtype, x.device
        self.values: torch.Tensor | None = None  # if a kernel for the gradient has stored them

    def _from_kernel(self) -> torch.Tensor:
        if self.values is not None:
            return self.values.view(self.shape)
        stage, *more = self.stages
        if not more and stage.name in _TORCH:
            return reference.forward(self.stages, self.x, self.operands)
        y = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        kernels.pointwise(self.stages, self.x, self.operands, y)
        return y

    def _from_reference(self) -> torch.Tensor:
        y = reference.forward(self.stages, self.x, self.operands)
        y = y.contiguous()
        return y if y.shape == self.shape else y.view(self.shape)

    def amax(self, out: torch.Tensor) -> None:
        kernels.pointwise(self.stages, self.x, self.operands, None, out)

    def producer(self) -> Producer:
        return kernels.forward_producer(self.stages, self.x, self.operands, *self.matrix)


class BackwardChain(LazyTensor):
    """The gradient of a chain's input; ``grads`` of its operands are written together with it.

    If the gradient is stored unquantized, so is the ``output`` of the chain, where the kernel can.
    """

    sums_rows = False
    """Whether a tiled kernel leaves sums over rows also if no bias is the only operand."""

    def __init__(
        self,
        stages: Stages,
        dy: torch.Tensor,
        x: torch.Tensor | None,
        operands: Operands,
        grads: Operands,
        saved: int = 0,
        output: Result | None = None,
    ) -> None:
        self.stages = stages
        self.output = output
        self.dy = _rows(dy)
        self.x = None if x is None else _rows(x)
        self.operands, self.grads, self.saved = operands, grads, saved
        halves = sum(stage.is_gated for stage in stages)
        *leading, features = dy.shape
        self.columns = features
        self.shape = torch.Size((*leading, features << halves))
        self.dtype, self.device = dy.dtype, dy.device
        # Parts of gradients that a tiled kernel leaves: of biases before the chain, and of scales.
        self.sums: torch.Tensor | None = None
        self.row_parts: torch.Tensor | None = None

    def apart(self) -> LazyTensor:
        other: BackwardChain = copy.copy(self)
        other.grads = (None,) * len(self.stages)
        return other

    def _from_kernel(self) -> torch.Tensor:
        dx = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        output = self._output_to_store()
        if output is None:
            self._run(dx, None)
        else:
            y = self.dy if self.dy.is_contiguous() else torch.empty_like(self.dy)
            self._run(dx, None, y)
            output.values = y
        return dx

    def _output_to_store(self) -> _ChainOutput | None:
        """The output, if it is lazy, and of what the kernel for the gradient reads."""
        output, saved = self.output, self.saved
        if not isinstance(output, _ChainOutput) or output.x is not self.x:
            return None
        contents = (*self.stages[saved:], *map(id, self.operands[saved:]))
        if contents != (*output.stages, *map(id, output.operands)):
            return None
        reads = kernels.writes_output(self.stages, self.dtype, self.operands, self.grads, saved)
        return output if reads else None

    def _from_reference(self) -> torch.Tensor:
        needed = [grad is not None for grad in self.grads]
        dx, grads = reference.backward(
            self.stages, self.dy, self.x, self.operands, needed, self.saved
        )
        for out, grad in zip(self.grads, grads, strict=True):
            if out is not None and grad is not None:
                out.copy_(grad)
        self.grads, self.sums, self.row_parts = (None,) * len(self.stages), None, None
        dx = dx.contiguous()  # the same tensor if it is: autograd sees who else has it
        return dx if dx.shape == self.shape else dx.view(self.shape)

    def amax(self, out: torch.Tensor) -> None:
        self._run(None, out)

    def producer(self) -> Producer:
        rows, columns = self.matrix
        operands_with_grad = [i for i, grad in enumerate(self.grads) if grad is not None]
        scaled = [i for i, stage in enumerate(self.stages) if stage.is_scaled]
        self.sums = self.row_parts = None
        is_of_bias = operands_with_grad == [0] and self.stages[0].name == "bias"
        if is_of_bias or self.sums_rows:
            self.sums = self._parts(kernels.sums_shape(rows, columns))
        if len(operands_with_grad) == 1 and operands_with_grad == scaled:
            shape = kernels.row_parts_shape(self.stages, rows, self.columns)
            self.row_parts = self._parts(shape)
        elif operands_with_grad and not is_of_bias:
            self._run(None, None)  # a tile has no room for these
        return kernels.backward_producer(
            self.stages,
            self.dy,
            self.x,
            self.operands,
            rows,
            self.columns,
            saved=self.saved,
            sums=self.sums,
            row_parts=self.row_parts,
        )

    def _parts(self, shape: tuple[int, int]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def finish(self) -> None:
        grad = next((grad for grad in self.grads if grad is not None), None)
        parts = self.sums if self.row_parts is None else self.row_parts
        if parts is not None and grad is not None:
            try:
                kernels.sum_parts(parts, grad.view(-1))
            except KernelUnavailable:
                grad.copy_(parts.sum(0).view(grad.shape))

    def _run(
        self, dx: torch.Tensor | None, amax: torch.Tensor | None, y: torch.Tensor | None = None
    ) -> None:
        """Write the gradients of operands, once, and the other outputs that are not None."""
        size, workspace = 0, None
        have_grad = [grad is not None for grad in self.grads]
        if any(have_grad):
            rows, _ = self.matrix
            size = kernels.workspace_size(self.stages, rows, self.columns, self.dtype, have_grad)
        if size:
            workspace = torch.empty(size, dtype=torch.float32, device=self.device)
        kernels.pointwise_backward(
            self.stages,
            self.dy,
            self.x,
            self.operands,
            dx,
            self.grads,
            workspace,
            amax,
            saved=self.saved,
            y=y,
        )
        self.grads = (None,) * len(self.stages)
