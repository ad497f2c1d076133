"""An op as a user writes it, which says that its passes can be recorded."""

from __future__ import annotations

from typing import Any

import torch

import fuser

BF16 = torch.bfloat16


class Square(fuser.BasicOperation):
    """A user's op, y = scale * x^2, whose class says that it can be recorded."""

    is_recordable = True
    parameter_names = ("scale",)

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=BF16, device=device))

    def op_forward(self, ctx: Any, input_: Any, **_: Any) -> Any:
        x = input_.dequantize() if isinstance(input_, fuser.QuantizedTensor) else input_
        ctx.save_for_backward(x, self.scale)
        return self.scale * x * x

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        x, scale = ctx.saved_tensors
        return 2 * scale * x * grad_output, ((grad_output * x * x).sum(),)


def with_square(device: str = "cpu") -> fuser.Sequential:
    """A pipeline with the op between a chain and a linear."""
    torch.manual_seed(0)
    options: Any = {"dtype": BF16, "device": device}
    return fuser.Sequential(
        *(fuser.RMSNorm(32, **options), fuser.Linear(32, 64, **options), fuser.GELU()),
        *(Square(device), fuser.Linear(64, 32, **options)),
    )
