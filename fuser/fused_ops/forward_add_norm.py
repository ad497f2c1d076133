"""ForwardAddRMSNorm and ForwardAddLayerNorm: z = x + extra; y = norm(z)."""

from __future__ import annotations

from typing import Any

import torch

from fuser.basic_ops import AddExtraInput, LayerNorm, MakeExtraOutput, RMSNorm
from fuser.basic_ops.normalization import kernel_names
from fuser.op import (
    Contexts,
    FusedOperation,
    StepInputs,
    StepOutputs,
    write_output,
)
from fuser.plan.window import Optional
from fuser.specs import PlanKey


class _ForwardAddNorm(FusedOperation):
    """``z = x + extra; y = norm(z)``, with z as an extra output if there is a MakeExtraOutput.

    z has the dtype that torch promotes x and extra to.
    """

    side = "forward"

    @classmethod
    def refuses(
        cls, add: Any, make: MakeExtraOutput | None, norm: Any, *, key: PlanKey
    ) -> str | None:
        first, count = key.ops[0], len(key.ops)
        extra, x = first.extra_inputs[0].dtype, first.input_dtype
        refusal: str | None = norm.sum_refusal(extra, x, key.window(count - 1, count))
        return refusal

    @classmethod
    def kernels(
        cls, add: Any, make: MakeExtraOutput | None, norm: Any, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        count = len(key.ops)
        name = type(norm).__name__.lower()
        if not cls._adds_in_kernel(norm, key):
            return (("add", 1), (name, count - 1))
        *first, last = kernel_names(norm, f"add_{name}", side, key.window(count - 1, count))
        return (*((name, 0) for name in first), (last, count))

    @classmethod
    def fuses_quantize(
        cls, add: Any, make: MakeExtraOutput | None, norm: Any, *, side: str, key: PlanKey
    ) -> bool:
        count = len(key.ops)
        own = key.window(count - 1, count)
        return cls._adds_in_kernel(norm, key) and norm.fuses_quantize(side, own)

    @classmethod
    def _adds_in_kernel(cls, norm: Any, key: PlanKey) -> bool:
        count = len(key.ops)
        runs: bool = norm.runs_in_kernel(key.window(count - 1, count))
        return runs

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        add, norm, (extra,) = self.members[0], self.members[-1], inputs.extras
        add.check_extra(x.shape, extra.shape)
        exposes_sum = len(self.members) == 3
        y, z = norm.normalize(ctxs[-1], x, extra, exposes_sum)
        return write_output(y, inputs.quantizer), (z,) if exposes_sum else ()


class ForwardAddRMSNorm(_ForwardAddNorm):
    """``z = x + extra; y = rmsnorm(z)``; z is an extra output if there is a MakeExtraOutput."""

    window = (AddExtraInput, Optional(MakeExtraOutput), RMSNorm)


class ForwardAddLayerNorm(_ForwardAddNorm):
    """``z = x + extra; y = layernorm(z)``; z is an extra output if there is a MakeExtraOutput."""

    window = (AddExtraInput, Optional(MakeExtraOutput), LayerNorm)
