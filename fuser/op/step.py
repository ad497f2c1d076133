"""Steps of a plan: what this library's own fusions, and ops with extra tensors, take and return.

Tensors of several ops are in one sequence, in the order of the ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from fuser.functional.lazy import LazyTensor
from fuser.op.context import OperationContext
from fuser.specs import TensorSpec
from fuser.tensors import Quantizer

T = TypeVar("T")
Autocast: TypeAlias = torch.dtype | None
"""The dtype of torch's autocast; None if it is off."""
Specs = Sequence[TensorSpec]
"""Of the extra inputs of an op."""
Values: TypeAlias = torch.Tensor | LazyTensor
Contexts = Sequence[OperationContext]
"""The context of each basic op of a step."""
Tensors = Sequence[torch.Tensor]
Grads = Iterable[torch.Tensor | None]
OpGrads: TypeAlias = tuple[torch.Tensor | None, Grads]
"""The gradients of the main input and of the parameters."""
Kernels = tuple[tuple[str, int], ...]
"""The kernels of a fusion: a name, and how many ops it finishes."""
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
