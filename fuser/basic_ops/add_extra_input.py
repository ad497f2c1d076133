"""AddExtraInput: add a second tensor to the main input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.chain import Stage
from fuser.errors import InputError
from fuser.functional import pointwise
from fuser.op import (
    BasicOperation,
    Contexts,
    OperationContext,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    quantizes_values,
    write_grad_input,
    write_output,
)
from fuser.specs import PlanKey, TensorSpec

STAGES = (Stage("add_extra_input"),)


class AddExtraInput(BasicOperation):
    """``y = x + extra``, with the extra input in the shape of the main input.

    The sum has the dtype that torch promotes the two dtypes to. Each gradient has
    the dtype of its input.

    Parameters
    ----------
    in_place
        Permission to overwrite the extra input. Accepted for compatibility:
        fuser never changes a caller's tensor, and results are the same.
    """

    parameter_names = ()
    takes_scalars = True
    num_extra_inputs = 1
    takes_floating_extras = True
    saves_input = False
    passes_gradient_to_extras = True
    can_quantize_output = ("forward", "backward")

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def extra_repr(self) -> str:
        return self.channel_text()

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        (extra,) = extras
        self.check_extra(spec.shape, extra.shape)
        return TensorSpec(spec.shape, torch.promote_types(spec.dtype, extra.dtype))

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        if side == "forward":
            return ("add",)
        (op,) = key.ops
        dtype = torch.promote_types(op.input_dtype, op.extra_inputs[0].dtype)
        return ("cast",) if op.input_requires_grad and op.input_dtype is not dtype else ()

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return side == "forward" and quantizes_values(side, key)

    def check_extra(self, main: tuple[int, ...], extra: tuple[int, ...]) -> None:
        """Raise InputError if the shapes of the main and the extra input differ."""
        if extra != main:
            raise InputError(
                f"AddExtraInput got an extra input of shape {tuple(extra)} for a main input of "
                f"shape {tuple(main)}; the two must be equal."
            )

    def stage(
        self,
        ctx: OperationContext,
        shape: tuple[int, ...],
        device: torch.device,
        extras: tuple[torch.Tensor, ...],
    ) -> tuple[Stage, torch.Tensor | None]:
        """As in ``Activation``."""
        (extra,) = extras
        self.check_extra(shape, extra.shape)
        return STAGES[0], extra

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        (extra,) = inputs.extras
        self.check_extra(x.shape, extra.shape)
        # A kernel adds tensors of one dtype.
        y = pointwise.chain(STAGES, x, (extra,)) if extra.dtype is x.dtype else x + extra
        return write_output(y, inputs.quantizer), ()

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (ctx,), dx = ctxs, dy
        if ctx.input_requires_grad:
            if dx.dtype.itemsize > ctx.input_dtype.itemsize:
                dx = dx.to(ctx.input_dtype)
            dx = write_grad_input(dx, ctx)
        return dx, (), (dy,)
