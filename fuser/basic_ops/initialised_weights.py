"""First values of weights, which are quantized parameters under ``quantized_model_init``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from fuser.basic_ops.kept_weight import KeepsWeights
from fuser.basic_ops.linear_operands import bind
from fuser.communication import is_distributed
from fuser.doors import PARAMETERS
from fuser.op import default_device, fill_weight
from fuser.precision.contexts import ParameterInit, initialised_weight, weight_quantizer
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import DelayedScaling
from fuser.tensors import QuantizedTensor, Quantizer


class InitialisedWeights(KeepsWeights):
    """An op whose weights are initialised: ``weight``, or ``weight0``, ``weight1`` and so on."""

    _names: Mapping[str, tuple[str, ...]] = {"weight": ("weight",)}
    """Names of the parameters by kind: one, which is the kind, or one of each group."""
    _init: ParameterInit | None
    """The options of ``quantized_model_init``, under which the op was made."""
    _rng_state_tracker_function: Callable[[], Any] | None

    def _register(self, kind: str, buffer: torch.Tensor) -> None:
        """Register the parameters of a kind over ``buffer``, or over each ``buffer[g]``."""
        parts = [buffer] if self._is_one(kind) else buffer
        for name, part in zip(self._names[kind], parts, strict=True):
            self.register_parameter(name, Parameter(part))

    def _is_one(self, kind: str) -> bool:
        """Whether there is one parameter of a kind, for all groups if there are any."""
        return self._names[kind] == (kind,)

    def _parts(self, kind: str) -> list[Any]:
        """The parameters of a kind: those of each group, or the one that there is."""
        own = self._parameters  # without torch's lookup of an attribute, 0.5 us for each
        return [own[n] if n in own else getattr(self, n) for n in self._names[kind]]

    def _reset(self, names: Iterable[str]) -> None:
        """Initialise weights as torch.nn.Linear does, and other parameters with zeros."""
        tracker = self._rng_state_tracker_function
        with tracker().fork() if tracker is not None else contextlib.nullcontext():
            for name in names:
                is_weight = name.startswith(("weight", "lora_A"))
                self.initialise(name, fill_weight if is_weight else torch.nn.init.zeros_)

    def initialise(self, name: str, fill: Callable[[torch.Tensor], Any]) -> None:
        """As for other ops; a weight, or its shard on this rank, is quantized after that."""
        weight = fresh = getattr(self, name)
        if not name.startswith("weight"):
            super().initialise(name, fill)
            return
        if is_distributed(weight):
            quantizer = None
            if self._init is not None:
                quantizer = self._parameter_quantizer(name, weight.device)
                quantizer = weight_quantizer(self._init, quantizer)
            PARAMETERS.guest.initialise(self, name, fill, quantizer)
            return
        if weight.is_meta or isinstance(weight, QuantizedTensor):
            device = default_device(None) if weight.is_meta else weight.device
            data = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            fresh = Parameter(data, requires_grad=weight.requires_grad)
        fill(fresh)
        fresh = self.as_parameter(fresh, name)
        if fresh is not weight:
            self.renew(name, fresh)

    def as_parameter(self, weight: Parameter, name: str = "weight") -> Parameter:
        """``weight``; quantized if the op was made under ``quantized_model_init``."""
        if self._init is None or not name.startswith("weight"):
            return weight
        quantizer = self._parameter_quantizer(name, weight.device)
        return initialised_weight(weight, self._init, quantizer)

    def _parameter_quantizer(self, name: str, device: torch.device) -> Quantizer:
        """The quantizer of a weight that is a quantized parameter on ``device``."""
        assert self._init is not None
        recipe = self._init.recipe
        if not isinstance(recipe, DelayedScaling):
            return make_quantizer(recipe, "weight")
        state, dtypes, device = self._delayed_state("forward", recipe, device)
        state.prepare(recipe, dtypes, device)
        group = int(name.removeprefix("weight") or 0)
        quantizer = state.parameter_quantizer(2 * group + 1)  # after the input of its group
        assert quantizer is not None
        return quantizer

    def bound(self, weights: Sequence[Any]) -> Sequence[Any]:
        """The weights, with the scales of this op's state under delayed scaling."""
        state = self._delayed.get("forward")
        if state is not None and self._init is not None:
            for group, weight in enumerate(weights):
                bind(weight, state, 2 * group + 1)
        return weights
