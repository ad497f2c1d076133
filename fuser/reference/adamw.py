"""A step of AdamW in plain torch, each operation rounded once to fp32.

The formula is Algorithm 2 of Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2017);
with the decay in the gradient it is Adam of Kingma and Ba (2014).
"""

from __future__ import annotations

import torch


def constants_of(
    step: torch.Tensor,
    lr: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    *,
    is_decoupled: bool,
) -> torch.Tensor:
    """What all elements of a step share: fp32 ``[9]``, on the device of ``step``.

    ``step``, the number of this step from 1 on, and ``lr`` are fp64 of one element, on one device.
    The others are as of :class:`torch.optim.AdamW`; if not ``is_decoupled``, the decay is added to
    the gradient, as in Adam.
    """
    beta1, beta2 = betas
    one = torch.ones_like(step)
    decay = 0.0 if is_decoupled else weight_decay
    kept = one - lr * weight_decay if is_decoupled else one
    step_size = lr / (1 - beta1**step)
    root_scale = (1 - beta2**step).rsqrt()
    rest = (one * (1 - beta1), one * beta2, one * (1 - beta2))
    all_of_step = (kept, one * decay, one * beta1, *rest, step_size, root_scale, one * eps)
    return torch.stack(all_of_step).to(torch.float32)


def adamw(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    constants: torch.Tensor,
) -> None:
    """Update ``master`` and both moments, fp32 of one shape, by a step (:func:`constants_of`).

    The gradient is fp32, fp16 or bf16, of their shape.
    """
    kept, decay, beta1, rest1, beta2, rest2, step_size, root_scale, eps = constants.unbind()
    gradient = gradient.float()
    gradient = torch.where(decay == 0, gradient, gradient + master * decay)  # weights may be inf
    exp_avg.mul_(beta1).add_(gradient * rest1)
    exp_avg_sq.mul_(beta2).add_(gradient * gradient * rest2)
    root = exp_avg_sq.double().sqrt().float()  # torch's in fp32 may be off by the last bit
    root = root.mul_(root_scale).add_(eps)
    master.mul_(kept).sub_(exp_avg * step_size / root)
