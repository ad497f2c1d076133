"""DispatchedExperts: a dispatch and its experts, whose quantizer reads the tokens by index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fuser.basic_ops import GroupedLinear, MoeDispatch
from fuser.basic_ops.activation import ScaledActivation
from fuser.basic_ops.expert_parallel import sends_bytes
from fuser.basic_ops.moe import BLOCK
from fuser.functional.lazy import materialize
from fuser.fused_ops.catalog import register
from fuser.fused_ops.grouped_mlp import GroupedMLP
from fuser.op import Contexts, FusedOperation, StepGrads, StepInputs, StepOutputs, Tensors
from fuser.plan.window import Optional
from fuser.specs import PlanKey, QuantSpec

SPLIT_SIZES = 0
"""The extra output of the dispatch that has them."""


@register
class DispatchedExperts(FusedOperation):
    """``y_g = experts_g(x[tokens of g])``: no copy of the tokens in the order of experts is made.

    The experts are a grouped linear, or those of :class:`GroupedMLP`. The kernels that quantize
    their input read each row from its token. Saved tensors and gradients are those of the ops.
    With experts on several ranks they read the received rows, or quantize tokens before these are
    sent to another host.
    """

    window = (MoeDispatch, GroupedLinear, Optional(ScaledActivation), Optional(GroupedLinear))
    side = "joint"
    makes_channels = True
    communicates = True

    def __init__(self, basic_ops: Iterable[Any]) -> None:
        super().__init__(basic_ops)
        dispatch, *experts = self.members
        # In a tuple, in which torch finds no submodule.
        self._experts = (GroupedMLP(experts) if len(experts) > 1 else experts[0],)
        outputs = {name: k for k, (name, _) in dispatch._output_channels.items()}
        # For each extra input of the experts, the extra output of the dispatch that it is.
        self._places = [
            outputs.get(op._input_channels.get(k, ""))
            for op in experts
            for k in range(op.num_extra_inputs)
        ]

    @classmethod
    def refuses(
        cls,
        dispatch: MoeDispatch,
        up: GroupedLinear,
        activation: ScaledActivation | None,
        down: GroupedLinear | None,
        *,
        key: PlanKey,
    ) -> str | None:
        if (activation is None) != (down is None):
            return ""
        recipe, of_experts = key.recipe, key.window(1, len(key.ops))
        if recipe is None:
            return "without a recipe, the product of the experts reads the rows in memory."
        if not up.runs_at_once(key.window(1, 2)):
            name = type(recipe).__name__
            return f"under {name} here, each group is quantized and multiplied alone."
        if activation is not None and down is not None:
            reason = GroupedMLP.refuses(up, activation, down, key=of_experts)
            if reason is not None:
                return ""  # GroupedMLP has said it
        weights = key.ops[1].params[: up.main_grad_count]
        # All ranks send rows in one form, also if experts of some of them are frozen.
        reads_rows = dispatch.expert_parallel_size > 1 or any(w.requires_grad for w in weights)
        if recipe.backward_override == "high_precision" and reads_rows:
            return "the weight gradients read the rows in high precision, in memory."
        return None

    @classmethod
    def kernels(
        cls,
        dispatch: MoeDispatch,
        up: GroupedLinear,
        activation: ScaledActivation | None,
        down: GroupedLinear | None,
        *,
        side: str,
        key: PlanKey,
    ) -> tuple[tuple[str, int], ...]:
        of_experts = key.window(1, len(key.ops))
        own = dispatch.kernels(side, key.window(0, 1))
        sends_bytes = _sends_bytes(dispatch, up, key)
        if activation is None or down is None:
            names = up.kernels(side, of_experts)
        else:
            of_mlp = GroupedMLP.kernels(up, activation, down, side=side, key=of_experts)
            names = tuple(name for name, _ in of_mlp)
        if side == "forward":
            how = "permute input" if sends_bytes else "permute+quantize input"
            names = tuple(name.replace("quantize input", how) for name in names)
            names = (*(name for name in own if name != "permute"), *names)
            if sends_bytes:
                sent = "permute+quantize to ranks"
                names = tuple(sent if name == "permute to ranks" else name for name in names)
            return tuple(
                (name, len(key.ops) * (i + 1 == len(names))) for i, name in enumerate(names)
            )
        # In backward the gradient of the rows is in memory between the two.
        experts = len(key.ops) - 1
        counts = [0] * len(names) + [0] * len(own)
        for last, count in ((len(names) - 1, experts), (-1, 1)):
            if counts:
                counts[last] += count
        return tuple(zip((*names, *own), counts, strict=True)) or (("nothing", len(key.ops)),)

    @classmethod
    def sends(
        cls,
        dispatch: MoeDispatch,
        up: GroupedLinear,
        activation: ScaledActivation | None,
        down: GroupedLinear | None,
        *,
        side: str,
        key: PlanKey,
    ) -> Mapping[str, QuantSpec]:
        """Bytes of the tokens, if an expert has one scale."""
        if side == "backward" or not _sends_bytes(dispatch, up, key):
            return {}
        assert key.recipe is not None
        return {"output": QuantSpec(up.quantizer_format(key.recipe, "input"), True, False)}

    def notes(self, key: PlanKey, rows: int) -> tuple[str, ...]:
        """Notes on the copy that is not made and on sent bytes, and the notes of the experts."""
        (experts,), (dispatch, up, *_) = self._experts, self.members
        note = "Quantizes the experts' input from the tokens, by index: the rows are not copied."
        if _sends_bytes(dispatch, up, key):
            note += " Bytes are sent; ranks first agree on the scale of each expert."
        elif dispatch.expert_parallel_size > 1:
            note = "Quantizes the experts' input from the received rows, by index."
        of_experts = key.window(1, len(key.ops))
        return (note, *(experts.notes(of_experts, rows) if experts.is_fused_op else ()))

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        (experts,), (dispatch, up, *_) = self._experts, self.members
        count = dispatch.num_extra_inputs
        of_dispatch, of_experts = inputs.extras[:count], inputs.extras[count:]
        rows: Any
        rows, outputs = dispatch.rows_of_experts(
            ctxs[0],
            x,
            of_dispatch,
            ctxs[1].autocast_dtype or up._dtype,
            inputs.kwargs[0].get(BLOCK),
            is_lazy=True,
            may_send_bytes=dispatch.may_cross_hosts and self._places[0] == SPLIT_SIZES,
        )
        if not all({*kwargs} <= {"is_first_microbatch"} for kwargs in inputs.kwargs[1:]):
            rows = materialize(rows)  # the caller has buffers, which are compared with the input
        extras = tuple(
            extra if place is None else outputs[place]
            for extra, place in zip(of_experts, self._places, strict=True)
        )
        own_inputs = StepInputs(extras, inputs.quantizer, inputs.kwargs[1:])
        y, _ = experts.step_forward(ctxs[1:], rows, own_inputs)
        return y, outputs

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (experts,), dispatch = self._experts, self.members[0]
        dx, params, extras = experts.step_backward(ctxs[1:], dy, ())
        extras, of_outputs = tuple(extras), list[Any](grad_extras)
        # In the order in which the executor adds those of one fused op, which decides the bits.
        for grad, place in zip(extras, self._places, strict=True):
            if place is not None and grad is not None:
                before = of_outputs[place]
                of_outputs[place] = grad if before is None else before + grad
        dx, own_params, own_extras = dispatch.step_backward(ctxs[:1], dx, of_outputs)
        return dx, (*own_params, *params), (*own_extras, *extras)


def _sends_bytes(dispatch: MoeDispatch, up: GroupedLinear, key: PlanKey) -> bool:
    """Whether bytes of the tokens are sent to other ranks: see :class:`RemoteRows`."""
    recipe = key.recipe
    if not dispatch.may_cross_hosts or recipe is None:
        return False
    outputs = {name: k for k, (name, _) in dispatch._output_channels.items()}
    are_experts = outputs.get(up._input_channels.get(0, "")) == SPLIT_SIZES
    return are_experts and sends_bytes(up.quantizer_format(recipe, "input"), up.in_features)
