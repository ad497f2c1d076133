"""Contexts: the values that a basic op keeps from its forward for its backward."""

from __future__ import annotations

from typing import Any

import torch

from fuser.functional.lazy import LazyTensor
from fuser.tensors import Quantizer


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of torch's autocast on ``device_type``, None if it is off."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


class OperationContext:
    """Values that one basic op keeps from one forward for its backward.

    Ops may set attributes of their own. They save tensors with
    :meth:`save_for_backward`, and read them from ``saved_tensors``.
    """

    # Attributes that every call writes are slots: this saves 0.3 us for five contexts.
    __slots__ = ("__dict__", "saved_tensors", "to_save")

    requires_grad: bool = True
    """Whether any backward reaches this op."""
    input_requires_grad: bool = True
    """Whether backward must return the gradient of the op's main input."""
    params_require_grad: tuple[bool, ...] = ()
    """Whether backward must return the gradient of each of the op's parameters."""
    is_partial: bool = False
    """Whether the running backward needs fewer gradients than the forward prepared. Those of
    the input and of parameters that it does not need are false in the two attributes above."""
    extra_inputs_require_grad: tuple[bool, ...] = ()
    """Whether backward must return the gradient of each extra input, channels included."""
    autocast_dtype: torch.dtype | None = None
    """The dtype of torch's autocast in the forward, None if it was off."""
    has_recipe: bool = False
    """Whether the forward runs under a recipe."""
    keeps_input: bool = True
    """Whether a linear saves its input; if not, backward computes it again."""
    keeps_source: bool = False
    """Whether a dispatch saves the tokens, from which backward computes their rows again."""
    rebuilt_input: torch.Tensor | LazyTensor | None = None
    """In the backward of a grouped linear: its input, lazily, if that is computed again."""
    rebuilt_output: torch.Tensor | LazyTensor | None = None
    """In backward: the op's output, lazily, if a linear that defers its wgrad reads it again. The
    kernel that computes the gradient of the input may store it, over the gradient of the output,
    which nothing else reads then."""
    defers_wgrad: bool = False
    """Whether backward computes a linear's input again after its dgrad, and then its wgrad."""
    deferred: Any = None
    """Of such a backward: the gradient of the output, with the copy that wgrad reads."""
    keeps_weight: bool = True
    """Whether a linear saves its quantized weight; if not, backward quantizes it again."""
    rounds_input: bool = False
    """Whether an activation saves its input in FP8, from which backward computes."""
    backward_override: str | None = None
    """The recipe's ``backward_override``; None if backward uses quantized operands."""
    split_accumulators: tuple[bool, bool, bool] = (False, True, True)
    """Whether the quantized GEMMs of forward, dgrad and wgrad use split accumulators."""
    input_dtype: torch.dtype = torch.float32
    """The dtype of the op's main input."""
    grad_input_quantizer: Quantizer | None = None
    """The quantizer that the op before wants for its gradient; None for unquantized."""
    grad_output_quantizer: Quantizer | None = None
    """The quantizer for the gradient of the op's output, if this op quantizes it."""
    operand_quantizers: Any | None = None
    """The op, and its quantizers of input, weight and output gradient, if they are constants of the
    plan."""
    main_grad_owners: tuple[torch.Tensor | None, ...] = (None,)
    """In backward, for each of the op's ``main_grad_count`` first parameters: the weight whose
    ``main_grad`` its gradient is added to; None if the op returns that gradient, or need not
    compute it."""
    dtype: torch.dtype
    """The dtype in which a linear multiplies."""
    compute_dtype: torch.dtype | None = None
    """The dtype of a linear's operands after dequantization."""
    input_quantizer: Quantizer
    weight_quantizer: Quantizer
    """The quantizers of a linear's quantized forward, under the names of te.ops."""
    reduces_amaxes: bool
    """Of an op that communicates: whether ranks agree on amaxes before they quantize."""
    versions: Any
    """Of a grouped linear that reads parts of one buffer: their versions in the forward."""
    state: Any = None
    """What the op keeps for its backward besides tensors: a ``NamedTuple`` of its own."""
    adapters: Any = None
    """Of a linear with adapters of low rank: what these keep besides tensors; None without any."""
    groups: Any
    """Of a grouped linear with adapters: the groups of its forward, until the adapters ran."""
    to_save: tuple[torch.Tensor | None, ...] | None
    saved_tensors: Any
    """In backward: the saved tensors, in the order in which the forward saved them."""

    def __init__(self) -> None:
        self.to_save = self.saved_tensors = None

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep ``tensors`` for the backward. The forward calls this."""
        self.to_save = tensors


def context_of(kind: type[OperationContext], attributes: dict[str, object]) -> OperationContext:
    """A context of a class with these attributes, for a backward."""
    context = kind()
    context.to_save = context.saved_tensors = None
    context.__dict__.update(attributes)
    return context
