"""``transformer_engine.pytorch.fp8``: the recipe in effect, and what a device runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuser.precision.availability import (
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from fuser.precision.contexts import (
    autocast,
    current_recipe,
    current_state,
    default_recipe,
    quantized_model_init,
)
from fuser.recipe import QuantizerRole, Recipe
from fuser.te.functions import fp8_autocast, fp8_model_init, get_default_recipe

__all__ = [
    "FP8GlobalStateManager",
    "QuantizerRole",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]


def _with_reason(is_available: Callable[..., Any]) -> Callable[[], tuple[bool, str]]:
    """Whether recipes run here, True on every device, and a sentence if they are emulated."""

    def check() -> tuple[bool, str]:
        answer: tuple[bool, str] = is_available(return_reason=True)
        return answer

    return check


check_fp8_support = _with_reason(is_fp8_available)
check_mxfp8_support = _with_reason(is_mxfp8_available)
check_nvfp4_support = _with_reason(is_nvfp4_available)
check_fp8_block_scaling_support = _with_reason(is_fp8_block_scaling_available)
get_default_fp8_recipe = get_default_recipe


class FP8GlobalStateManager:
    """The recipe in effect in this thread, by the methods of Transformer Engine's class."""

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether an ``autocast`` that quantizes is in effect."""
        return current_recipe() is not None

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """False: calibration has no effect here."""
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe in effect; outside of every ``autocast`` the default one."""
        return current_recipe() or default_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The process group over which amaxes are reduced; None for all ranks."""
        return current_state().group

    @classmethod
    def reset(cls) -> None:
        """Accepted, no effect: a step ends with its ``autocast``, and leaves no state."""
