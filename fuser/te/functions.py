"""Functions of Transformer Engine whose names or arguments differ from those of fuser."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint

from fuser.communication import GroupArgument
from fuser.errors import InputError
from fuser.precision.contexts import autocast, quantized_model_init
from fuser.recipe import Recipe

__all__ = [
    "checkpoint",
    "deinterleave_glu_tensor",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "interleave_glu_tensor",
    "is_bf16_available",
]

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


TORCHS = ("context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state")
"""Keywords of :func:`checkpoint` that are those of torch's function; others are the function's."""


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
    function, and with the random states that a tracker had in forward: an object with
    ``get_states()`` and ``set_states(states)``. ``tp_group`` has no effect unless saved
    activations are distributed. Keywords are those of torch's function, or of ``function``.

    Raises
    ------
    InputError
        If asked to distribute saved activations, or for gradients of a keyword with
        ``use_reentrant``.
    """
    if distribute_saved_activations:
        raise InputError(
            "checkpoint got distribute_saved_activations=True; activations are kept on the rank "
            "that computed them."
            " Leave the argument out."
        )
    options = {name: kwargs.pop(name) for name in TORCHS if name in kwargs}
    if use_reentrant:
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
                raise InputError(
                    f"checkpoint got the keyword {name}, which requires a gradient, with "
                    "use_reentrant=True, which returns gradients of positional arguments alone. "
                    "Pass it by position, or use_reentrant=False."
                )
    if kwargs:
        function = functools.partial(function, **kwargs)
    if get_rng_state_tracker is not None:
        function = _WithStates(function, get_rng_state_tracker)
    result: Result = torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=use_reentrant, **options
    )
    return result


class _WithStates:
    """A function whose later calls have the random states of the first; then its tracker goes on
    with the states that it had."""

    def __init__(self, function: Callable[..., Any], tracker: Callable[[], Any]) -> None:
        self._function, self._tracker = function, tracker
        self._first: dict[str, Any] | None = None

    def __call__(self, *args: Any) -> Any:
        tracker = self._tracker()
        before = tracker.get_states()
        if self._first is None:
            self._first = _copies(before)
            return self._function(*args)
        tracker.set_states(_copies(self._first))
        try:
            return self._function(*args)
        finally:
            tracker.set_states(before)


def _copies(states: dict[str, Any]) -> dict[str, Any]:
    """Random states that forks do not change: a generator, as CUDA graphs need it, is copied."""
    return {
        name: state.clone_state() if isinstance(state, torch.Generator) else state
        for name, state in states.items()
    }


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
