"""Quantize: quantizes the main input of a pipeline at this place, or its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fuser.op import BasicOperation, Grads, OperationContext
from fuser.specs import PlanKey, QuantSpec, TensorSpec
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.observation import note_operands, observing


class Quantize(BasicOperation):
    """Quantize the main input under a recipe; without a recipe, the identity.

    Parameters
    ----------
    forward, backward
        Whether to quantize the values, and whether to quantize their gradients.
        Under a ``backward_override`` gradients are not quantized. A gradient that
        leaves the pipeline has the quantized values in a plain tensor, because
        autograd adds the next gradient to it in place.
    """

    parameter_names = ()
    saves_input = False

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward = forward
        self._quantize_backward = backward

    def extra_repr(self) -> str:
        return f"forward={self._quantize_forward}, backward={self._quantize_backward}"

    def output_quantization(
        self, side: str, key: PlanKey, wanted: QuantSpec | None
    ) -> QuantSpec | None:
        """The quantization on the sides where this op quantizes, with the usage of the reader."""
        spec = self._wanted(side, key)
        if spec is None or not self.kernels(side, key):
            return None
        if wanted is None:
            return spec
        return replace(spec, rowwise=wanted.rowwise, columnwise=wanted.columnwise)

    def input_quantization(self, key: PlanKey) -> QuantSpec | None:
        """None: this op knows the usage that the op after it wants, the op before does not."""
        return None

    grad_output_quantization = input_quantization

    def num_quantizers(self, mode: str) -> int:
        return int(self._quantize_forward if mode == "forward" else self._quantize_backward)

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return spec

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        if key.recipe is None or not self.num_quantizers(side):
            return ()
        if side == "backward" and not key.recipe.quantizes_backward:
            return ()
        arrives = key.ops[0].input if side == "forward" else key.ops[0].grad_output
        return ("quantize",) if arrives is None else ()

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return True

    def context_values(self, key: PlanKey) -> dict[str, object]:
        """The op, and its quantizers of values and of gradients; as those of a linear.

        Empty for quantizers that must be looked up at each call.
        """
        if key.recipe is None:
            return {}
        values, gradients = (
            self.constant_quantizer(key.recipe, side, 0) if self.num_quantizers(side) else None
            for side in ("forward", "backward")
        )
        if not (values or gradients):
            return {}
        return {"operand_quantizers": (self, values, None, gradients)}

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        if not ctx.has_recipe:
            return input_
        if self._quantize_backward and ctx.backward_override is None:
            ctx.grad_output_quantizer = self._quantizer("backward", ctx, input_.device)
        if not self._quantize_forward or isinstance(input_, QuantizedTensor):
            return input_
        quantizer = self._quantizer("forward", ctx, input_.device)
        assert quantizer is not None
        output = _for_reader(quantizer, next_op_input_quantizer)(input_)
        if observing.now is not None:
            note_operands(self, input=output)
        if ctx.backward_override == "high_precision":
            output.high_precision_source = input_.detach()
        return output

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        quantizer: Quantizer | None = ctx.grad_output_quantizer
        if quantizer is None or isinstance(grad_output, QuantizedTensor):
            return grad_output, ()
        grad_input = _for_reader(quantizer, ctx.grad_input_quantizer)(grad_output)
        if observing.now is not None:
            note_operands(self, grad_output=grad_input)
        return grad_input, ()

    def _quantizer(
        self, mode: str, ctx: OperationContext, device: torch.device
    ) -> Quantizer | None:
        """The plan's constant if there is one; else the op's current quantizer."""
        constant = ctx.operand_quantizers
        if constant is None or constant[0] is not self:
            return self.quantizer_value(mode, 0, device)
        quantizer: Quantizer | None = constant[3 if mode == "backward" else 1]
        return quantizer


def _for_reader(quantizer: Quantizer, reader: Quantizer | None) -> Quantizer:
    """``quantizer`` with the usage that ``reader`` wants; with both if ``reader`` is None."""
    if reader is None:
        return quantizer
    return quantizer.with_usage(rowwise=reader.rowwise, columnwise=reader.columnwise)
