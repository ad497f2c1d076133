"""Functions of Transformer Engine whose names or arguments differ from those of fuser."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint

from fuser.communication import GroupArgument
from fuser.errors import InputError
from fuser.precision.contexts import autocast, quantized_model_init
from fuser.recipe import Recipe

Result = TypeVar("Result")


def get_default_recipe() -> Recipe:
    """The recipe of an ``autocast`` without a recipe."""
    recipe = autocast().recipe
    assert recipe is not None
    return recipe


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: GroupArgument = None,
) -> autocast:
    """Deprecated: ``autocast`` with other names for ``recipe`` and ``amax_reduction_group``."""
    _warn_of_new_name("fp8_autocast", "autocast")
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """Deprecated: ``quantized_model_init``."""
    _warn_of_new_name("fp8_model_init", "quantized_model_init")
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def _warn_of_new_name(old: str, new: str) -> None:
    warnings.warn(
        f"fuser.{old} is now fuser.{new}. Use the new name.", DeprecationWarning, stacklevel=3
    )


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the current device computes in bf16: CPUs, and GPUs from capability 8.0.

    With ``return_reason`` a second value is the reason if it does not, else empty.
    """
    reason = ""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            reason = f"bf16 needs compute capability 8.0; the current device has {major}.{minor}."
    return (not reason, reason) if return_reason else not reason


def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: GroupArgument = None,
    **kwargs: Any,
) -> Result:
    """``torch.utils.checkpoint.checkpoint``: compute ``function`` again in backward.

    A recomputation runs under the recipe of its forward also with torch's own
    function. ``tp_group`` has no effect unless saved activations are distributed.
    Other keywords go to torch's function, or to ``function``.

    Raises
    ------
    InputError
        If asked to distribute saved activations, or to track random states.
    """
    if distribute_saved_activations:
        raise InputError(
            "checkpoint got distribute_saved_activations=True; activations are kept on the rank "
            "that computed them."
            " Leave the argument out."
        )
    if get_rng_state_tracker is not None:
        raise InputError(
            f"checkpoint got get_rng_state_tracker {get_rng_state_tracker!r}; a recomputation "
            "restores only torch's own random states."
            " Leave it out."
        )
    result: Result = torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=use_reentrant, **kwargs
    )
    return result


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Reorder a linear's weight or bias for a gated unit with ``glu_interleave_size``.

    ``tensor`` is ``[2 n, ...]``: rows of the gate, then rows of the linear
    part. The result has the same rows in blocks of ``interleave_size`` rows,
    which alternate between gate and linear part.

    Raises
    ------
    InputError
        If the rows do not divide into such blocks.
    """
    _check_interleave(tensor, interleave_size)
    halves = tensor.reshape(2, -1, interleave_size, *tensor.shape[1:])
    return halves.transpose(0, 1).reshape(tensor.shape).contiguous()


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of :func:`interleave_glu_tensor`; raises as that does."""
    _check_interleave(tensor, interleave_size)
    blocks = tensor.reshape(-1, 2, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).reshape(tensor.shape).contiguous()


def _check_interleave(tensor: torch.Tensor, interleave_size: int) -> None:
    rows = tensor.shape[0] if tensor.dim() else 0
    if interleave_size <= 0 or not tensor.dim() or rows % (2 * interleave_size):
        raise InputError(
            f"A tensor of shape {tuple(tensor.shape)} cannot be interleaved in blocks of "
            f"{interleave_size}: its first dimension must be a multiple of twice a positive size."
        )
