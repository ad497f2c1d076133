"""Steps of a plan: what ops and fusions take and return, and how they write their output.

Tensors of several ops are in one sequence, in the order of the ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from fuser.functional.lazy import LazyTensor, materialize
from fuser.op.context import OperationContext
from fuser.recipe import CustomRecipe
from fuser.specs import PlanKey
from fuser.tensors import QuantizedTensor, Quantizer

T = TypeVar("T")
Values: TypeAlias = torch.Tensor | LazyTensor
Contexts = Sequence[OperationContext]
"""The context of each basic op of a step."""
Tensors = Sequence[torch.Tensor]
Grads = Iterable[torch.Tensor | None]
StepOutputs: TypeAlias = tuple[torch.Tensor, Tensors]
"""The output, and the extra outputs."""
StepGrads: TypeAlias = tuple[torch.Tensor | None, Grads, Grads]
"""The gradients of the main input, of the parameters, and of the extra inputs."""


class StepInputs(NamedTuple):
    """What a forward reads besides its contexts and the main input."""

    extras: Tensors
    """The extra inputs; None for one that the step makes itself."""
    quantizer: Quantizer | None
    """What the next op reads the output in; None for unquantized."""
    kwargs: Sequence[Mapping[str, Any]]
    """The caller's ``op_kwargs`` of each basic op."""


def rows(tensors: Iterable[T], counts: Iterable[int]) -> list[tuple[T, ...]]:
    """``tensors`` as a row for each basic op, of as many as ``counts`` says."""
    rest = iter(tensors)
    return [tuple(next(rest) for _ in range(count)) for count in counts]


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype``; unchanged if it has that dtype (0.6 us faster than ``to``)."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def write_output(values: torch.Tensor | LazyTensor, quantizer: Quantizer | None) -> torch.Tensor:
    """``values`` quantized for the next op; unquantized if ``quantizer`` is None.

    A quantized tensor is returned unchanged, because quantizing it again would
    round again. A lazy tensor is written to memory here.
    """
    if quantizer is None:
        return values if type(values) is torch.Tensor else materialize(values)
    if isinstance(values, QuantizedTensor):
        return values
    quantized: torch.Tensor = quantizer(values)
    return quantized


def write_grad_input(grad_input: torch.Tensor | LazyTensor, ctx: OperationContext) -> torch.Tensor:
    """The gradient of an op's main input, quantized for the op before if that wants it.

    It is cast to the dtype of that input first, because the op before would
    quantize it from that dtype.
    """
    quantizer = ctx.grad_input_quantizer
    if quantizer is None:
        return grad_input if type(grad_input) is torch.Tensor else materialize(grad_input)
    if grad_input.dtype is not ctx.input_dtype:
        grad_input = materialize(grad_input)
        if not isinstance(grad_input, QuantizedTensor):
            grad_input = grad_input.to(ctx.input_dtype)
    return write_output(grad_input, quantizer)


def quantizes_values(side: str, key: PlanKey) -> bool:
    """Whether kernels run here that quantize their own output for the op that reads it.

    False for a user's quantizers, which may not take lazy tensors, for a format without a
    kernel, and for a gradient that must be cast first.
    """
    if key.no_kernels is not None or isinstance(key.recipe, CustomRecipe):
        return False
    read = key.ops[-1].output if side == "forward" else key.ops[0].grad_input
    if read is not None and not read.format.has_kernel:
        return False
    return side == "forward" or key.autocast_dtype in (None, key.ops[0].input_dtype)
