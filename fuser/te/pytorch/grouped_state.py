"""Delayed scaling's state of a grouped linear, by the keys of Transformer Engine.

Programs that give each expert a file of its own, as Megatron-LM's distributed checkpoints do, take
such a state apart and put it together again. They expect pickled bytes of a dict of ``recipe``,
``extra_fp8_variables``, ``scale_fwd`` [3 x groups], ``amax_history_fwd`` [length, 3 x groups],
``scale_bwd`` [2 x groups] and ``amax_history_bwd``: first all inputs, then all weights, then all
outputs; all gradients of outputs, then of inputs. Outputs and gradients of inputs are not quantized
here: their scales are 1. The recipe is named as Transformer Engine's, the only one of its classes
that readers with a list of classes take.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from fuser.errors import InputError
from fuser.precision.delayed_scaling import DelayedScales
from fuser.recipe import DelayedScaling, Format, FormatRange
from fuser.te.pytorch import recipes
from fuser.torch_private import unpickled

__all__ = ["pickled_state", "plain_state", "recipe_of"]

QUANTIZED = {"forward": 2, "backward": 1}
"""The tensors of a group that are quantized here."""
CLASSES: dict[str, type] = {
    f"{recipes.NAME}.DelayedScaling": recipes.DelayedScaling,
    # States that fuser wrote until 2026-11-28.
    **{f"fuser.recipe.{each.__name__}": each for each in (DelayedScaling, Format, FormatRange)},
}
"""The classes in such a state, by their names there."""
UNREADABLE = (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, ValueError)
"""What reading the bytes of another library raises."""
KEYS = {"forward": ("fwd", 3), "backward": ("bwd", 2)}
"""The ends of the keys, and the tensors of a group that have a scale there."""


def pickled_state(state: torch.Tensor, groups: int) -> torch.Tensor:
    """Bytes, uint8, of the ``state`` of an op of ``groups`` groups."""
    content: dict[str, Any] = {"extra_fp8_variables": {"num_gemms": groups}}
    for mode, (key, count) in KEYS.items():
        scales, state = DelayedScales.unpacked(state, mode)
        length = len(scales.amax_history)
        scale, history = torch.ones(count, groups), torch.zeros(length, count, groups)
        if scales.scale.numel():
            own = QUANTIZED[mode]
            scale[:own] = scales.scale.view(groups, own).T
            history[:, :own] = scales.amax_history.view(length, groups, own).mT
        content |= {f"scale_{key}": scale.flatten(), f"amax_history_{key}": history.flatten(1)}
    lengths = [len(content[f"amax_history_{key}"]) for key, _ in KEYS.values()]
    for key, count in KEYS.values():  # a mode that has not been used has no history yet
        if not len(content[f"amax_history_{key}"]):
            content[f"amax_history_{key}"] = torch.zeros(max(lengths), count * groups)
    # Megatron-LM reads scales only beside a recipe of this class.
    content["recipe"] = recipes.DelayedScaling(amax_history_len=max(lengths))
    return torch.frombuffer(bytearray(_pickled(content)), dtype=torch.uint8)


def _pickled(content: dict[str, Any]) -> bytes:
    own = f"c{recipes.DelayedScaling.__module__}\nDelayedScaling\n"  # of this protocol
    named = f"c{recipes.NAME}\nDelayedScaling\n"
    return pickle.dumps(content, protocol=3).replace(own.encode(), named.encode())


def plain_state(state: torch.Tensor, groups: int) -> torch.Tensor | None:
    """The op's state of such bytes; None for the bytes of another library.

    Raises
    ------
    InputError
        If the state is that of another number of groups.
    """
    content = _content(state)
    if content is None:
        return None
    parts = []
    for mode, (key, count) in KEYS.items():
        scale, history = content[f"scale_{key}"], content[f"amax_history_{key}"]
        if scale.numel() != count * groups or history[0].numel() != count * groups:
            raise InputError(
                f"GroupedLinear of {groups} groups got a state of delayed scaling with "
                f"{scale.numel()} scales in its {mode}, which has {count} for each group. Load "
                "the state of a layer of as many groups."
            )
        scales, own = DelayedScales(mode), QUANTIZED[mode]
        scales.scale = scale.view(count, groups)[:own].T.flatten()
        scales.amax_history = history.reshape(-1, count, groups)[:, :own].mT.flatten(1)
        parts.append(scales.packed())
    return torch.cat(parts)


def recipe_of(state: torch.Tensor) -> DelayedScaling | None:
    """A recipe with the length of the histories of such bytes, which is what is read of it."""
    content = _content(state)
    if content is None:
        return None
    return DelayedScaling(amax_history_len=max(len(content["amax_history_fwd"]), 1))


def _content(state: torch.Tensor) -> dict[str, Any] | None:
    """The dict that the bytes are; None for those of another library, whose classes are others."""
    try:
        content = unpickled(state.detach().cpu().numpy().tobytes(), CLASSES)
    except UNREADABLE:
        return None
    return content if isinstance(content, dict) else None
