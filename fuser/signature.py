"""The signature of a call: what a plan may depend on, read by a function written for that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from fuser.cuda import module as kernels
from fuser.errors import StateError
from fuser.op import BasicOperation
from fuser.precision import current_recipe
from fuser.written import compiled

Reading = tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]


Slot = tuple[dict[str, Any], str]
"""Where a parameter is held: a dict, and its name in it."""


class ParameterSlots:
    """The parameters of a pipeline's ops, each found by its name at every call.

    Raises
    ------
    StateError
        As :func:`find_slots`.
    """

    def __init__(self, ops: Sequence[BasicOperation], num_extra_inputs: int) -> None:
        self._extras = [f"extras[{k}]" for k in range(num_extra_inputs)]
        rows = [find_slots(op, f"Op {i} ({type(op).__name__})") for i, op in enumerate(ops)]
        self._slots = [slot for row in rows for slot in row]
        self.counts = [len(row) for row in rows]
        """How many parameters each op has."""
        self.places = (self._extras, self.counts, [(id(held), name) for held, name in self._slots])
        """All that :attr:`read` is written from."""
        self.computed = [i for i, row in enumerate(rows) if any(map(_is_computed, row))]
        """The ops that have one which a hook computes before each of their calls."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The parameters that the ops hold at this moment."""
        return tuple(owner[name] for owner, name in self._slots)

    @functools.cached_property
    def read(self) -> Callable[[torch.Tensor, tuple[torch.Tensor, ...], Any], Reading]:
        """``read(x, extras, registered)``: the parameters, and the signature of a call.

        Calls of one signature run the same plan. It is made at every call, so
        that nothing can go stale, and by code written once with every tensor
        named: 1.9 us for four parameters, where a loop takes 3.3. A parameter's
        device is not in it: that is looked at when planning, and when a run
        fails.
        """
        params = [f"p{i}" for i in range(len(self._slots))]
        owners = {f"owner_of_{p}": owner for p, (owner, _) in zip(params, self._slots, strict=True)}
        slots = "".join(
            f"owner_of_{p}[{name!r}], " for p, (_, name) in zip(params, self._slots, strict=True)
        )
        lines = [
            "def read(x, extras, registered):",
            f"    params = ({''.join(f'{p}, ' for p in params)}) = ({slots})",
            "    is_cpu = x.is_cpu",
            "    device = 'cpu' if is_cpu else autocast_device(x)",
            "    signature = (",
            "        registered,",
            "        kernels.compile_failure,",
            "        current_recipe(),",
            "        is_grad_enabled(),",
            "        is_autocast_enabled(device) and get_autocast_dtype(device),",
            "        x.shape[-1] == 0,  # refused, so of no plan",
            "        type(x), x.dtype, x.requires_grad, is_cpu or x.device,",
            "        len(extras),",
            *(f"        {e}.dtype, {e}.requires_grad, {e}.device," for e in self._extras),
            *(f"        type({p}), {p}.dtype, {p}.requires_grad, {p}.is_meta," for p in params),
            "    )",
            "    return params, signature",
        ]
        return compiled("\n".join(lines) + "\n", "signature", {**_ASKED, **owners})["read"]


def find_slots(op: BasicOperation, who: str) -> list[Slot]:
    """Where each parameter of ``op`` is held at this moment, in the order of its gradients.

    That is where torch registers parameters, or, where a hook computes one before each call, as
    those of ``torch.nn.utils.prune`` and ``weight_norm`` do, a plain attribute: its gradient goes
    on to what it was computed from. ``who`` names the op in messages.

    Raises
    ------
    StateError
        If a parameter is missing or parametrized, or is not the op's own.
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
    # Beside a computed one there is, under any name, what it is computed from.
    if not any(map(_is_computed, slots)):
        for name, _ in op.named_parameters(remove_duplicate=False):
            if name not in names:
                raise StateError(
                    f"{who} holds a parameter {name!r} that is not its own, and gives it no "
                    f"gradient: its parameters are {', '.join(map(repr, names)) or 'none'}. Hold "
                    "it outside of the op; a class of ops that computes with it names it in "
                    "parameter_names."
                )
    return slots


def _registered_slots(op: BasicOperation) -> list[Slot]:
    """Slots of an op that does not name its parameters: by first registration, each once."""
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
    """Where the parameter of that path is held; None if it is nowhere."""
    owner, _, name = path.rpartition(".")
    module = dict(op.named_modules()).get(owner) if owner else op
    for held in (module._parameters, module.__dict__) if module is not None else ():
        if isinstance(held.get(name), torch.Tensor):
            return held, name
    return None


def _is_computed(slot: Slot) -> bool:
    """Whether a parameter is a plain attribute, and not where torch registers parameters."""
    return "_parameters" in slot[0]  # an attribute of every module


def autocast_device(tensor: torch.Tensor) -> str:
    """The device type whose autocast counts for ``tensor``; meta has none, the CPU's is asked."""
    if tensor.is_cuda:
        return "cuda"
    return "cpu" if tensor.is_meta else tensor.device.type


_ASKED = {
    "autocast_device": autocast_device,
    "kernels": kernels,
    "current_recipe": current_recipe,
    "is_grad_enabled": torch.is_grad_enabled,
    "is_autocast_enabled": torch.is_autocast_enabled,
    "get_autocast_dtype": torch.get_autocast_dtype,
}
