"""State dicts: a refused one changes nothing, and parameters have the names of torch's modules."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fuser.tensors import QuantizedTensor
from fuser.torch_private import has_loading_hooks

_thread = threading.local()


def is_tried() -> bool:
    """Whether a state is loaded to find its errors only: no state of an op may change then."""
    return getattr(_thread, "is_tried", False)


class Stateful(torch.nn.Module):
    """A module whose state dict can have the keys of torch's modules, and loads as a whole."""

    def plain_names(self) -> Mapping[str, str | None]:
        """For keys of this module's state: the plain ones, or None if there is none."""
        return {}

    def plain_state_dict(self) -> dict[str, torch.Tensor]:
        """The state with the keys of torch's modules, such as ``0.weight``, in plain tensors.

        A ``torch.nn.Sequential`` of the same layers loads it strictly, and so does this module.
        Quantized weights are dequantized. Scales and amax histories of delayed scaling are left
        out. Shares memory with the parameters that are not quantized, as ``state_dict`` does.
        """
        state = OrderedDict(self.state_dict())
        plain_keys(self, state, "", {})
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module, with its own keys or plain ones.

        Raises
        ------
        RuntimeError
            torch's, which names missing and unexpected keys and wrong sizes.
        InputError
            If a state of delayed scaling is too short. Nothing has changed in either case, unless
            a module has hooks or methods of its own for loading.
        """
        if strict and isinstance(state_dict, Mapping) and _can_be_tried(self):
            _try(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _take_plain_names(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Give the tensors with plain keys the keys of this module, unless these are there too."""
        for key, name in self.plain_names().items():
            if name is not None and prefix + name in state_dict and prefix + key not in state_dict:
                state_dict[prefix + key] = state_dict.pop(prefix + name)


def plain_keys(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """A hook after which every ``state_dict`` of a module is plain, also in that of its parents.

    As :meth:`Stateful.plain_state_dict`, for any module with ops of fuser below it:
    ``module.register_state_dict_post_hook(fuser.plain_keys)``.
    """
    names: dict[str, str | None] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, Stateful):
            start = f"{prefix}{path}." if path else prefix
            names |= {
                start + key: name and start + name for key, name in part.plain_names().items()
            }
    items = list(state_dict.items())
    state_dict.clear()
    for key, value in items:
        name = names.get(key, key)
        if name is not None:
            is_quantized = isinstance(value, QuantizedTensor)
            state_dict[name] = value.detach().dequantize() if is_quantized else value


def _can_be_tried(module: torch.nn.Module) -> bool:
    """Whether loading does nothing but set parameters, buffers and states of ops."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return False  # torch then exchanges the contents of the parameters themselves
    return all(
        not has_loading_hooks(part)
        and _owner(part, "_load_from_state_dict").startswith(("torch.nn.", "fuser."))
        and _owner(part, "set_extra_state").startswith(("torch.nn.modules.module", "fuser."))
        for part in module.modules()
    )


def _owner(module: torch.nn.Module, method: str) -> str:
    return getattr(getattr(type(module), method), "__module__", None) or ""


def _try(module: torch.nn.Module, state_dict: Mapping[str, object]) -> None:
    """Raise what loading the state would raise about keys and sizes; nothing changes.

    Empty tensors of these sizes take the places of the parameters for a moment.
    """
    before = [(part, {**part._parameters, **part._buffers}) for part in module.modules()]
    sizes: Any = OrderedDict((key, _size(key, value)) for key, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:  # torch writes into it
        sizes._metadata = {path: {**of_module} for path, of_module in metadata.items()}
    _thread.is_tried = True
    try:
        torch.nn.Module.load_state_dict(module, sizes, strict=True, assign=True)
    finally:
        _thread.is_tried = False
        for part, tensors in before:
            for name, tensor in tensors.items():
                if tensor is not None:
                    setattr(part, name, tensor)  # a module may keep references of its own


def _size(key: str, value: object) -> object:
    if not isinstance(value, torch.Tensor) or key.endswith("_extra_state"):
        return value
    # A parameter that needs a gradient takes floating-point numbers alone.
    return torch.empty(value.shape, dtype=torch.get_default_dtype(), device="meta")


class HiddenOps(Stateful):
    """Base of modules whose ops are not submodules: parameters and states are the module's own."""

    ops: torch.nn.Module

    def hand_parameters_to_ops(self) -> None:
        """Give the ops the parameters of this module."""
        raise NotImplementedError


def modules_and_ops(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The submodules with their paths, and after each layer its ops, with its parameters."""
    for path, part in module.named_modules():
        yield path, part
        if isinstance(part, HiddenOps):
            part.hand_parameters_to_ops()
            yield from part.ops.named_modules(prefix=f"{path}.ops".strip("."))
