"""``transformer_engine.pytorch.cpu_offload``: tensors that backward needs, in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuser.errors import InputError

__all__ = ["get_cpu_offload_context"]

DEVICE = "cuda"
"""Tensors of this type of device are copied to the host."""


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.cuda.Stream | None = None,
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """A context for the forward of each layer, and a function for the output of each.

    Forwards of the first ``num_layers`` of ``model_layers`` layers that enter the context keep what
    they save for backward in pinned memory of the host, except parameters. Copies are made in the
    order of the kernels, so that they take their time; the function returns its argument.

    Parameters
    ----------
    enabled
        Off, the context has no effect.
    num_layers, model_layers
        The first layers, and all layers: the context counts its entries.
    offload_activations
        Must be True if ``enabled``.
    offload_weights
        Must be False if ``enabled``.
    manual_synchronization
        Must be False if ``enabled``: the caller starts no copies.
    double_buffering, retain_pinned_cpu_buffers, offload_stream
        Accepted, no effect.

    Raises
    ------
    InputError
        If it is enabled for weights, for more layers than there are, or with copies that the caller
        starts.
    """
    if enabled and manual_synchronization:
        raise InputError(
            "get_cpu_offload_context got manual_synchronization=True; a layer starts its copies "
            "itself. Leave it out."
        )
    if enabled and (offload_weights or not offload_activations):
        raise InputError(
            f"get_cpu_offload_context got offload_activations={offload_activations} and "
            f"offload_weights={offload_weights}; activations alone are kept in the host's memory. "
            "Give True and False."
        )
    if enabled and not 0 <= num_layers <= model_layers:
        raise InputError(
            f"get_cpu_offload_context got num_layers={num_layers} of model_layers={model_layers}; "
            "give a part of the layers."
        )
    return _Offload(num_layers if enabled else 0, model_layers), _same


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Offload:
    """Hooks of saved tensors, in effect for the first ``count`` of each ``layers`` entries."""

    def __init__(self, count: int, layers: int) -> None:
        self._count, self._layers = count, layers
        self._entered = 0
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks | None] = []

    def __enter__(self) -> None:
        is_first = self._entered % self._layers < self._count
        self._entered += 1
        hooks = torch.autograd.graph.saved_tensors_hooks(_to_host, _back) if is_first else None
        self._hooks.append(hooks)
        if hooks is not None:
            hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        hooks = self._hooks.pop()
        if hooks is not None:
            hooks.__exit__(*error)
        if any(each is not None for each in error):
            self._entered = 0  # the next forward begins with the first layer again


def _to_host(tensor: torch.Tensor) -> Any:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    if is_parameter or type(tensor) is not torch.Tensor or tensor.device.type != DEVICE:
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    copy.copy_(tensor, non_blocking=True)
    return tensor.device, copy


def _back(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    device, copy = saved
    tensor: torch.Tensor = copy.to(device, non_blocking=True)
    return tensor
