"""``weight.main_grad``: weight gradients that are added to a buffer, as Megatron-LM has them."""

from __future__ import annotations

from typing import Any

import torch

from fuser.errors import InputError, StateError


def main_grad_of(weight: Any, op_weight: torch.Tensor | None) -> torch.Tensor | None:
    """The buffer of ``weight``, which the forward read; None if its gradient is returned.

    None for a weight that ``torch.func.functional_call`` passed, which has no buffer. ``op_weight``
    is the op's own weight. Megatron-LM's sharding gives a buffer to each backward, by
    ``get_main_grad``. Where ``overwrite_main_grad`` is set, the buffer is cleared first. Raises
    StateError if the op's own weight has no ``main_grad``.
    """
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None and op_weight is not None and weight is op_weight:
        raise StateError(
            "A linear accumulates its weight gradient into weight.main_grad, but the weight of "
            f"shape {tuple(op_weight.shape)} has no main_grad."
            " Set it before backward, or leave accumulate_into_main_grad out."
        )
    if main_grad is not None and getattr(weight, "overwrite_main_grad", False):
        main_grad.zero_()
    return main_grad


def main_grad_of_linear(weight: Any, op_weight: torch.Tensor | None) -> torch.Tensor | None:
    """:func:`main_grad_of` for the weight ``[out_features, in_features]`` of a linear.

    Raises InputError if the buffer has another shape; it is as it was then.
    """
    main_grad = getattr(weight, "main_grad", None)
    is_sharded = hasattr(weight, "__fsdp_param__")
    if main_grad is not None and not is_sharded and main_grad.shape != weight.shape:
        raise InputError(
            f"A linear adds the gradient of a weight of shape {tuple(weight.shape)} to its "
            f"main_grad, which has the shape {tuple(main_grad.shape)}. Give a view of the "
            "weight's shape: main_grad.view_as(weight)."
        )
    return main_grad_of(weight, op_weight)


def check_main_grad(
    name: str, owner: torch.Tensor | None, op_weight: torch.Tensor | None, shape: torch.Size
) -> None:
    """Raise if the gradient of ``owner`` cannot be added to its ``main_grad``."""
    if owner is None or hasattr(owner, "__fsdp_param__"):
        return  # main_grad_of makes the buffer of a sharded weight
    main_grad = getattr(owner, "main_grad", None)
    if main_grad is None:
        if owner is op_weight:
            main_grad_of(owner, op_weight)  # raises
        return
    try:
        if main_grad.dim() == len(shape) and main_grad.shape != shape:
            raise RuntimeError
        main_grad.view(shape)
    except RuntimeError:
        raise InputError(
            f"GroupedLinear adds the gradient of {name}, of shape {tuple(shape)}, to a main_grad "
            f"of shape {tuple(main_grad.shape)} and strides {main_grad.stride()}, which cannot be "
            "viewed in that shape."
            " Give it a contiguous one."
        ) from None


def accumulation(weight: Any) -> tuple[torch.Tensor | None, tuple[bool, ...]]:
    """The ``main_grad`` of a weight, and the options of its accumulation.

    The first is None for a sharded weight, which has another ``main_grad`` in each backward.
    """
    options = (
        getattr(weight, "overwrite_main_grad", False),
        hasattr(weight, "grad_added_to_main_grad"),
        getattr(weight, "zero_out_wgrad", False),
    )
    is_sharded = hasattr(weight, "__fsdp_param__")
    return None if is_sharded else getattr(weight, "main_grad", None), options


def note_accumulation(weight: Any) -> None:
    """Tell Megatron-LM that the gradient went into ``main_grad``, if it asks."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True


def stand_in_gradient(weight: Any) -> torch.Tensor | None:
    """The gradient that autograd gets for a weight whose gradient went into ``main_grad``.

    Megatron-LM's hooks run only if there is one. It has no values; zeros if ``zero_out_wgrad``
    asks for them. None for a weight without ``grad_added_to_main_grad``.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    note_accumulation(weight)
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    stand_in: torch.Tensor = make(weight)
    return stand_in
