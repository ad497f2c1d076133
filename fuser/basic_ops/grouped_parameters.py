"""Quantized weights of a grouped linear, which are separate parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from fuser.basic_ops.grouped_products import GroupsQuantizers, Quantized
from fuser.basic_ops.linear_operands import bind, plain
from fuser.errors import InputError
from fuser.gemm.quantized_groups import reads_columns
from fuser.op import BasicOperation, OperationContext, cast, default_device
from fuser.precision.contexts import (
    ParameterInit,
    current_parameter_init,
    initialised_weight,
    weight_quantizer,
)
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import DelayedScaling
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.gathering import note_backward_read
from fuser.tensors.grouped import joined
from fuser.tensors.sharding import initialise_shard, is_distributed, shard_of_values


class QuantizedGroupWeights(BasicOperation):
    """Weights ``weight0``, ``weight1`` and so on that are made under ``quantized_model_init``.

    Each is a quantized tensor ``[out_features, in_features]``, as the weight of a linear is.
    """

    _init: ParameterInit | None

    def _take_parameter_init(self, op: str, *, is_one: bool) -> None:
        """Note the options of ``quantized_model_init``.

        Raises
        ------
        InputError
            If all weights are one parameter, which cannot be quantized.
        """
        self._init = current_parameter_init()
        if self._init is not None and is_one:
            raise InputError(
                f"{op} was made inside quantized_model_init with single_grouped_weight=True, and "
                "quantized weights are separate parameters: leave that argument out, or make the "
                "op outside, where it quantizes weights at each call."
            )

    def as_parameter(self, weight: Parameter, name: str) -> Parameter:
        """``weight``; quantized if the op was made under ``quantized_model_init``."""
        if self._init is None or not name.startswith("weight"):
            return weight
        quantizer = self._parameter_quantizer(name, weight.device)
        return initialised_weight(weight, self._init, quantizer)

    def _parameter_quantizer(self, name: str, device: torch.device) -> Quantizer:
        """The quantizer of a weight on ``device``."""
        assert self._init is not None
        recipe = self._init.recipe
        if not isinstance(recipe, DelayedScaling):
            return make_quantizer(recipe, "weight")
        state, dtypes, device = self._delayed_state("forward", recipe, device)
        state.prepare(recipe, dtypes, device)
        quantizer = state.parameter_quantizer(_place(name))
        assert quantizer is not None
        return quantizer

    def initialise(self, name: str, fill: Callable[[torch.Tensor], Any]) -> None:
        """As for other ops; a quantized weight, or the shard of one, is quantized after that."""
        parameter = getattr(self, name)
        if self._init is None or not name.startswith("weight"):
            super().initialise(name, fill)
        elif is_distributed(parameter):
            quantizer = self._parameter_quantizer(name, parameter.device)
            make = functools.partial(
                shard_of_values,
                quantizer=weight_quantizer(self._init, quantizer),
                is_kept=self._init.preserve_high_precision_init_val,
            )
            initialise_shard(parameter, fill, make)
        else:
            device = default_device(None) if parameter.is_meta else parameter.device
            data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            fresh = Parameter(data, requires_grad=parameter.requires_grad)
            fill(fresh)
            self.renew(name, self.as_parameter(fresh, name))

    def bound(self, weights: Sequence[Any]) -> Sequence[Any]:
        """The weights, with the scales of this op's state under delayed scaling."""
        state = self._delayed.get("forward")
        if state is not None and self._init is not None:
            for g, weight in enumerate(weights):
                bind(weight, state, 2 * g + 1)
        return weights


def are_quantized(weights: Any) -> bool:
    """Whether these are separate quantized weights, and not a tensor or plain ones."""
    return isinstance(weights, list) and isinstance(weights[0], QuantizedTensor)


def quantized_operand(
    weights: Sequence[QuantizedTensor], products: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Quantized weights as the operand of the forward's products."""
    if isinstance(products, Quantized):
        return joined(weights, "rowwise")
    return stacked(values_of(weights, dtype))


def backward_usage(
    ctx: OperationContext,
    weights: Sequence[QuantizedTensor],
    quantizers: GroupsQuantizers | None,
    device: torch.device,
) -> str | None:
    """The copy of quantized weights that a backward's product reads; None for the values."""
    if quantizers is None or ctx.backward_override == "high_precision":
        return None
    if ctx.backward_override is not None:
        return "rowwise"
    reads = reads_columns(weights[0]._quantizer, quantizers.grad_output[0], device)
    return "columnwise" if reads else "rowwise"


def note_reads(weights: Sequence[torch.Tensor], usage: str | None, *, is_read: bool) -> None:
    """Say which copy of gathered weights this forward's backward reads."""
    for weight in weights:
        note_backward_read(weight, (usage or "rowwise") if is_read else None)


def values_of(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The values of each weight in ``dtype``."""
    return [cast(plain(weight.detach(), dtype), dtype) for weight in weights]


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Separate weights or biases as one tensor, which is a copy."""
    with torch._C._DisableAutocast():  # which would choose another dtype
        return torch.stack(list(parts))


def _place(name: str) -> int:
    """The place of a weight among the quantized tensors of the forward: inputs and weights."""
    return 2 * int(name.removeprefix("weight")) + 1
