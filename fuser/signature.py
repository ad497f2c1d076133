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


class ParameterSlots:
    """Where a pipeline's parameters live: a replaced parameter is found in its old place.

    Raises
    ------
    StateError
        If an op's parameter is parametrized.
    """

    def __init__(self, ops: Sequence[BasicOperation], num_extra_inputs: int) -> None:
        self._ops = ops
        self._extras = [f"extras[{k}]" for k in range(num_extra_inputs)]
        self._slots: list[tuple[dict[str, Any], str]] = []
        self.counts: list[int] = []
        """How many parameters each op has."""
        for index, op in enumerate(ops):
            if is_parametrized(op):
                raise StateError(
                    f"Op {index} ({type(op).__name__}) has a parametrized "
                    f"{' and '.join(op.parametrizations)}; fuser gives gradients to an op's own "  # type: ignore[arg-type]
                    "parameters only. Remove the parametrization, or use a torch module here."
                )
            seen: set[int] = set()
            for module in op.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        self._slots.append((module._parameters, name))
            self.counts.append(len(seen))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The parameters that the ops hold at this moment.

        Raises
        ------
        StateError
            If one is gone.
        """
        places = iter(self._slots)
        for index, (op, count) in enumerate(zip(self._ops, self.counts, strict=True)):
            for owner, name in (next(places) for _ in range(count)):
                if owner.get(name) is None:
                    raise StateError(
                        f"Op {index} ({type(op).__name__}) has no parameter {name!r} any more: a "
                        "pipeline reads parameters from where they stood at its first call. Wrap "
                        "or shard the Sequential as a whole, or use a torch module here."
                    )
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
