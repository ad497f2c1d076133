"""Steps of optimizers: fused ones write to parameters, and torch counts no version of them."""

from __future__ import annotations

import functools

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = 0


@functools.cache
def count_optimizer_steps() -> None:
    """Count the steps of every ``torch.optim.Optimizer`` from now on, in versions too.

    After a step each parameter with a gradient has another version, so that a backward which would
    read the new values is refused, as after the step of an optimizer whose writes torch counts.
    """
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, *_: object) -> None:
    global _steps
    _steps += 1
    if torch.compiler.is_compiling():
        return  # torch counts the writes of a graph
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not parameter.is_inference():
                torch.autograd.graph.increment_version(parameter)


def optimizer_steps() -> int:
    """The number of steps since :func:`count_optimizer_steps`, or the first call of this."""
    count_optimizer_steps()
    return _steps
