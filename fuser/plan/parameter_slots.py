"""Parameter slots: the places where an op's parameters are, by their declared names."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from fuser.errors import StateError
from fuser.op import BasicOperation

Slot = tuple[dict[str, Any], str]
"""The place of a parameter: a dict, and a name in it."""


def find_slots(op: BasicOperation, who: str) -> list[Slot]:
    """The present slot of each parameter of ``op``, in the order of the gradients.

    Usually this is torch's dict of parameters. Hooks such as those of ``torch.nn.utils.prune`` and
    ``weight_norm`` compute a parameter before each call; it is then a plain attribute, and autograd
    continues from its gradient. ``who`` names the op in messages. Raises StateError if a parameter
    is missing or parametrized, or is not the op's own.
    """
    for module in op.modules():
        if is_parametrized(module):
            raise StateError(
                f"{who} has a parametrized {' and '.join(module.parametrizations)}; fuser gives "  # type: ignore[arg-type]
                "gradients to an op's own parameters only. Remove the parametrization, or use a "
                "torch module here."
            )
    names = op.parameter_names
    if names is None:
        return _registered_slots(op)
    slots = []
    for name in names:
        slot = _slot(op, name)
        if slot is None:
            raise StateError(
                f"{who} has no parameter {name!r} any more, or never had one: it is in the op's "
                "parameter_names. If a wrapper has taken it away, wrap or shard the Sequential "
                "as a whole, or use a torch module here."
            )
        slots.append(slot)
    # A computed parameter has its sources beside it, under any name.
    if not any(map(is_computed, slots)):
        for name, _ in op.named_parameters(remove_duplicate=False):
            if name not in names:
                raise StateError(
                    f"{who} holds a parameter {name!r} that is not its own, and gives it no "
                    f"gradient: its parameters are {', '.join(map(repr, names)) or 'none'}. Keep "
                    "it outside of the op; if the op computes with it, add it to the "
                    "parameter_names of its class."
                )
    return slots


def _registered_slots(op: BasicOperation) -> list[Slot]:
    """Slots of an op without ``parameter_names``: in order of registration, each once."""
    slots = [slot for name in op._registered_names if (slot := _slot(op, name)) is not None]
    # torch computes "weight" from "weight_orig", or from "weight_g" and "weight_v".
    sources = tuple(f"{name}_" for held, name in slots if held is op.__dict__)
    slots = [slot for slot in slots if not slot[1].startswith(sources)]
    for module in list(op.modules())[1:]:
        slots += [(module._parameters, name) for name in module._parameters]
    distinct: dict[int, Slot] = {}
    for held, name in slots:
        if held[name] is not None:
            distinct.setdefault(id(held[name]), (held, name))
    return list(distinct.values())


def _slot(op: torch.nn.Module, path: str) -> Slot | None:
    """The slot of the parameter at ``path``; None if there is none."""
    owner, _, name = path.rpartition(".")
    module = dict(op.named_modules()).get(owner) if owner else op
    for held in (module._parameters, module.__dict__) if module is not None else ():
        if isinstance(held.get(name), torch.Tensor):
            return held, name
    return None


def is_computed(slot: Slot) -> bool:
    """Whether a parameter is a plain attribute, and not in torch's dict of parameters."""
    return "_parameters" in slot[0]  # an attribute of every module
