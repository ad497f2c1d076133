"""Quantized weights of a grouped linear: separate parameters, or one for all groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch

from fuser.basic_ops.initialised_weights import InitialisedWeights
from fuser.basic_ops.linear_operands import bind, plain
from fuser.errors import InputError
from fuser.formats import GROUP_TILE
from fuser.op import cast
from fuser.precision.contexts import current_parameter_init
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import DelayedScaling, Recipe
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.base import note_backward_read
from fuser.tensors.grouped import joined, one_copy
from fuser.tensors.stacks import stack_quantizer
from fuser.torch_private import without_autocast


class QuantizedGroupWeights(InitialisedWeights):
    """Weights that are made under ``quantized_model_init``.

    ``weight0``, ``weight1`` and so on are quantized tensors ``[out_features, in_features]``, as the
    weight of a linear is. One ``weight`` ``[num_groups, out_features, in_features]`` is a stack of
    such tensors, each with scales of its own (``tensors/stacks.py``).
    """

    out_features: int

    def _take_parameter_init(self, op: str, *, is_one: bool) -> None:
        """Note the options of ``quantized_model_init``.

        Raises
        ------
        InputError
            If all weights are one parameter, of which the recipe makes no stack.
        """
        self._init = current_parameter_init()
        if self._init is None or not is_one:
            return
        recipe = self._init.recipe
        if isinstance(recipe, DelayedScaling) or self._stack_quantizer(recipe) is None:
            raise InputError(
                f"{op} was made inside quantized_model_init with single_grouped_weight=True and "
                f"{recipe}. One quantized parameter for all groups takes "
                "Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling or NVFP4BlockScaling "
                "without nvfp4_4over6, "
                f"and out_features that are a multiple of {GROUP_TILE}: leave that argument out, "
                "and each group has a parameter of its own."
            )

    def _stack_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return stack_quantizer(make_quantizer(recipe, "weight"), self.out_features)

    def _parameter_quantizer(self, name: str, device: torch.device) -> Quantizer:
        if name == "weight":
            assert self._init is not None
            of_stack = self._stack_quantizer(self._init.recipe)
            if of_stack is not None:
                return of_stack
        return super()._parameter_quantizer(name, device)

    def bound(self, weights: Sequence[Any]) -> Sequence[Any]:
        """The weights, with the scales of this op's state under delayed scaling."""
        state = self._delayed.get("forward")
        if state is not None and self._init is not None:
            for g, weight in enumerate(weights):
                bind(weight, state, 2 * g + 1)
        return weights


def are_quantized(weights: Any) -> TypeGuard[list[QuantizedTensor]]:
    """Whether this is a list of quantized parameters: of each group, or one of all groups."""
    return isinstance(weights, list) and isinstance(weights[0], QuantizedTensor)


def padded_weights(weights: Sequence[QuantizedTensor], usage: str) -> QuantizedTensor:
    """One copy of quantized weights, as padded groups; a copy of bytes if they are separate."""
    first = weights[0]
    if first.dim() == 2:
        return joined(weights, usage)
    return one_copy(first.detach().view(-1, first.shape[-1]), usage)  # type: ignore[arg-type]


def note_reads(weights: Sequence[torch.Tensor], usage: str | None, *, is_read: bool) -> None:
    """Say which copy of gathered weights this forward's backward reads."""
    for weight in weights:
        note_backward_read(weight, (usage or "rowwise") if is_read else None)


def stacked_values(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The values ``[G, N, K]`` of weights, of each group or one for all groups, in ``dtype``."""
    values = [cast(plain(weight.detach(), dtype), dtype) for weight in weights]
    return values[0] if values[0].dim() == 3 else stacked(values)


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Separate weights or biases as one tensor, which is a copy."""
    with without_autocast():  # which would choose another dtype
        return torch.stack(list(parts))
