"""Models in plain torch whose linears gate and up are one product, as a converted model has them.

Torch may add the terms of two small products in another order than those of one of all columns.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

PAIRS = (("gate", "up"), ("w1", "w3"))


class JoinedProducts(TorchFunctionMode):
    """``F.linear`` with one weight of a pair is a half of the product with both."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._pairs: dict[int, tuple[list[torch.nn.Linear], int]] = {}
        for module in model.modules():
            for names in PAIRS:
                children = [getattr(module, name, None) for name in names]
                linears = [each for each in children if type(each) is torch.nn.Linear]
                if len(linears) == len(names):
                    for half, linear in enumerate(linears):
                        self._pairs[id(linear.weight)] = linears, half

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        pair = self._pairs.get(id(args[1])) if func is F.linear else None
        if pair is None or kwargs:
            return func(*args, **(kwargs or {}))
        linears, half = pair
        biases = [linear.bias for linear in linears if linear.bias is not None]
        weights = [linear.weight for linear in linears]
        kinds = {(weight.shape, weight.dtype) for weight in weights}
        if len(biases) == 1 or len(kinds) > 1:
            return func(*args)
        bias = torch.cat(biases) if biases else None
        return func(args[0], torch.cat(weights), bias).chunk(2, dim=-1)[half].contiguous()


def output_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a model returns; a graph of torch.compile is as it is."""
    is_graph = isinstance(model, torch._dynamo.OptimizedModule)
    with contextlib.nullcontext() if is_graph else JoinedProducts(model):
        y: torch.Tensor = model(x)
    return y
