"""Key of a call: everything that a plan may depend on, read by a generated function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.cuda import module as kernels
from fuser.op import BasicOperation
from fuser.plan.parameter_slots import find_slots, is_computed
from fuser.plan.saved_inputs import budget, many_rows
from fuser.precision.contexts import current_recipe
from fuser.precision.recomputation import is_in_checkpoint
from fuser.runtime.known_parameters import KnownParameters, LayoutOfCall, ends_of_memory
from fuser.source import SourceCode
from fuser.torch_private import saved_tensor_hooks

Reading = tuple[tuple[torch.Tensor, ...], tuple[Any, ...], LayoutOfCall]


class CallKeyReader:
    """Finds the parameters of a pipeline's ops, each by its name at every call."""

    def __init__(self, ops: Sequence[BasicOperation], num_extra_inputs: int) -> None:
        self._ops = ops
        self._extras = [f"extras[{k}]" for k in range(num_extra_inputs)]
        rows = [find_slots(op, f"Op {i} ({type(op).__name__})") for i, op in enumerate(ops)]
        self.slots = [slot for row in rows for slot in row]
        """The places of the parameters, op by op."""
        self.counts = [len(row) for row in rows]
        """The number of parameters of each op."""
        self.places = (self._extras, self.counts, [(id(held), name) for held, name in self.slots])
        """Everything that the code of :attr:`read` is generated from."""
        self.computed = [i for i, row in enumerate(rows) if any(map(is_computed, row))]
        """The ops with a parameter that a hook computes before each of their calls."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The current parameters of the ops."""
        return tuple(owner[name] for owner, name in self.slots)

    @functools.cached_property
    def read(self) -> Callable[[torch.Tensor, tuple[torch.Tensor, ...], Any], Reading]:
        """``read(x, extras, registered)`` returns the parameters, the key of a call, and a layout.

        Calls with equal keys run the same plan. The key is made at every call, so
        nothing in it can be stale: facts about parameters are checked before they are
        used again. The devices of parameters are not part of the key: they are checked
        when planning, and when a run fails. The layout is that of the parameters.
        """
        owners = {id(owner): owner for owner, _ in self.slots}
        numbers = {owner: f"owner{i}" for i, owner in enumerate(owners)}
        slots = "".join(f"{numbers[id(owner)]}[{name!r}], " for owner, name in self.slots)
        named = {numbers[place]: owner for place, owner in owners.items()}
        known, rows = KnownParameters(self._ops), many_rows(self._ops)
        src = SourceCode(**_ASKED, **named, known=known, many_rows=rows)
        with src.block("def read(x, extras, registered):"):
            src.add(
                f"params = ({slots})",
                "is_same, seen, addresses, heads, ends, key, layout, with_buffers = known.state",
                "tensors = params if with_buffers is None else with_buffers(params)",
            )
            with src.block(
                "if is_same is None or tensors is None or not is_same(*tensors) "
                "or list(map(address_of, tensors[seen])) != addresses "
                "or heads and ends_of_memory(params, heads) != ends:"
            ):
                src.add("key, layout = known.renew(params)", "tensors = None")
            src.add(
                "is_cpu = x.is_cpu",
                "device = 'cpu' if is_cpu else autocast_device(x)",
            )
            with src.block("call_key = ("):
                src.add(
                    "registered,",
                    "kernels.compile_failure,",
                    "current_recipe(),",
                    "is_grad_enabled(),",
                    "None if saved_tensor_hooks(True) and is_in_checkpoint() else budget.limit,",
                    "x.numel() < many_rows * (columns := x.shape[-1]),",
                    "is_autocast_enabled(device) and get_autocast_dtype(device),",
                    "columns == 0,  # refused, so of no plan",
                    "type(x), x.dtype, x.requires_grad, is_cpu or x.device,",
                    "len(extras),",
                    *(f"{e}.dtype, {e}.requires_grad, {e}.device," for e in self._extras),
                    "key,",
                )
            src.add(")", "return params, call_key, (layout, tensors)")
        return src.functions("call_key")["read"]


def autocast_device(tensor: torch.Tensor) -> str:
    """The device type whose autocast applies to ``tensor``; the CPU for meta, which has none."""
    if tensor.is_cuda:
        return "cuda"
    return "cpu" if tensor.is_meta else tensor.device.type


_ASKED = {
    "address_of": torch.Tensor.data_ptr,
    "ends_of_memory": ends_of_memory,
    "autocast_device": autocast_device,
    "kernels": kernels,
    "current_recipe": current_recipe,
    "is_grad_enabled": torch.is_grad_enabled,
    "budget": budget,
    "is_in_checkpoint": is_in_checkpoint,
    "saved_tensor_hooks": saved_tensor_hooks,
    "is_autocast_enabled": torch.is_autocast_enabled,
    "get_autocast_dtype": torch.get_autocast_dtype,
}
