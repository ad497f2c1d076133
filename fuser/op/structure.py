"""The structure of an op as text: everything that its code depends on besides tensors.

Graphs of torch.compile compare it, so that ops of equal structure share a graph and a changed op
gets another one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import torch

from fuser.communication import group_number
from fuser.errors import InputError, StateError

REFUSED = "refused: "

# Attributes on which no code of an op depends, or which are read apart.
_NOT_STRUCTURE = frozenset(
    (
        *("_parameters", "_buffers", "_modules", "training", "_changes", "_captured", "_delayed"),
        *("_made_quantizers", "_last_recipe", "_quantizer_views", "_group"),
        *("_agreement", "_structure", "_is_full_backward_hook", "_init"),
        *("_number", "_next_call", "runs_in_graph", "_rng_state_tracker_function"),
        *("_delayed_wgrads", "_wgrad_hooks"),
        *("_non_persistent_buffers_set", "_forward_hooks_with_kwargs"),
        *("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks"),
        *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def structure_of(op: Any) -> str:
    """Everything that the code of an op depends on besides tensors, as text.

    It begins with :data:`REFUSED` if the op cannot be in a graph.
    """
    name = type(op).__name__
    called = [bool(op.__dict__.get(hooks)) for hooks in _HOOKS]
    if op.is_fused_op:
        return f"{name} {op.has_own_methods()} {called}"
    if op.is_external:
        return f"{REFUSED}{name} is an op from outside of fuser"
    if op.has_own_methods():
        return f"{REFUSED}{name} has methods of its own"
    if op.accumulates_into_main_grad:
        return f"{REFUSED}{name} adds gradients to main_grad"
    parts = [
        f"{type(op).__module__}.{name}",
        repr(called),  # a container calls an op with hooks by itself
        repr([(n, p is not None) for n, p in op._parameters.items()]),
    ]
    try:
        parts += [f"group {group_number(name, group)}" for group in op.process_groups]
    except (InputError, StateError) as error:
        return f"{REFUSED}{str(error).removesuffix('.')}"
    if op.process_groups and not op.is_recordable:
        return f"{REFUSED}{name} reads on the host how many rows other ranks send"
    if op.__dict__.get("_init") is not None:  # its quantized weights get the scales of its states
        parts.append("quantized_model_init")
    for attribute, value in sorted(op.__dict__.items()):
        if attribute in _NOT_STRUCTURE or attribute in _HOOKS:
            continue
        text = _text(value)
        if text is None:
            kind = type(value).__name__
            return f"{REFUSED}{name} has the attribute {attribute}, a {kind}, which is no constant"
        parts.append(f"{attribute}={text}")
    return "; ".join(parts)


def _text(value: object) -> str | None:
    """A constant as text; None if it is no constant."""
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, enum.Enum)):
        return repr(value)
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if dataclasses.is_dataclass(value) and type(value).__module__.partition(".")[0] == "fuser":
        value = (type(value).__name__, *(getattr(value, f.name) for f in dataclasses.fields(value)))
    if isinstance(value, (tuple, list)):
        texts = [_text(item) for item in value]
        return None if None in texts else f"{type(value).__name__}{texts}"
    return None
