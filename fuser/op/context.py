"""The context of a basic op: what the op keeps from its forward for its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of torch's autocast on ``device_type``, or None where it is off."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


class OperationContext:
    """What one basic op keeps between one forward and its backward.

    Ops may set attributes of their own. Tensors go through
    :meth:`save_for_backward` and come back as ``saved_tensors``.
    """

    # What every call writes is in slots: five contexts cost 0.3 us less.
    __slots__ = ("__dict__", "saved_tensors", "to_save")

    requires_grad: bool = True
    """Whether any backward reaches this op."""
    input_requires_grad: bool = True
    """Whether the gradient of the op's main input is wanted."""
    params_require_grad: tuple[bool, ...] = ()
    """Whether the gradient of each of the op's parameters is wanted."""
    extra_inputs_require_grad: tuple[bool, ...] = ()
    """Whether the gradient of each extra input is wanted, also of one that comes on a channel."""
    autocast_dtype: torch.dtype | None = None
    """The dtype of torch's autocast in the forward, None where it is off."""
    has_recipe: bool = False
    """Whether the forward runs under a recipe."""
    backward_override: str | None = None
    """The recipe's override: how backward gets its operands, None for quantized ones."""
    split_accumulators: tuple[bool, bool, bool] = (False, True, True)
    """Whether the quantized GEMMs of forward, dgrad and wgrad use split accumulators."""
    input_dtype: torch.dtype = torch.float32
    """The dtype in which the op's main input arrives."""
    grad_input_quantizer: Any | None = None
    """What the op before wants the gradient of the main input in, None for plain."""
    grad_output_quantizer: Any | None = None
    """What this op quantizes the gradient of its output with, where it does."""
    main_grad_owner: torch.Tensor | None = None
    """In backward: the weight to whose ``main_grad`` the gradient of the op's first parameter is
    added; None where that is returned, or not wanted."""
    compute_dtype: torch.dtype | None = None
    """The dtype that a linear's operands have, or are dequantized to."""
    to_save: tuple[torch.Tensor | None, ...] | None
    saved_tensors: Any
    """In backward: what the forward saved, in its order."""

    def __init__(self) -> None:
        self.to_save = self.saved_tensors = None

    if TYPE_CHECKING:  # an op's own attributes

        def __getattr__(self, name: str) -> Any: ...

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep ``tensors`` for the backward; called in the forward."""
        self.to_save = tensors
