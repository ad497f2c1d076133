"""GroupedMLP: the experts of a mixture, two grouped linears with a scaled activation between."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fuser.basic_ops import GroupedLinear
from fuser.basic_ops.activation import ScaledActivation, ScaledActivationSaved, input_to_save
from fuser.basic_ops.grouped_products import (
    GroupedProduct,
    QuantizedProduct,
    padded_values,
    product_at_once,
    quantizers_of_groups,
    rows_of_groups,
    unpadded_values,
)
from fuser.chain import Stage
from fuser.functional import pointwise
from fuser.functional.grouped import scaled_activation_bias_backward
from fuser.fused_ops.catalog import register
from fuser.gemm import grouped
from fuser.op import (
    Contexts,
    FusedOperation,
    OperationContext,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    Values,
    rows,
    write_grad_input,
    write_output,
)
from fuser.specs import PlanKey


class GroupedMLPState(NamedTuple):
    """Kept at the activation's context by a forward of all three ops together.

    That saves the tensors of a :class:`ScaledActivationSaved` too: under a recipe, rows of padded
    groups.
    """

    function: Stage
    is_repeated: bool
    """Whether backward computes the scaled activation again, whatever the plan."""


@register
class GroupedMLP(FusedOperation):
    """``y_g = (f(x_g @ up_g.T) * scales) @ down_g.T`` of all groups together.

    The gate of a gated ``f`` is the first half of the first product's columns, or with the
    activation's ``glu_interleave_size`` every other block of them, from the first one on.

    The groups are found once. Under a recipe the rows stay padded from the first product to the
    last: one kernel computes the activation, its product with the scales and both quantized copies.
    In backward one kernel computes and quantizes the activation's gradient, and leaves the parts of
    the gradients of the scales and of the first linear's biases; with ``scale_bias`` the latter are
    weighted sums of a gradient in memory. With ``activation_recompute_in_mlp`` the product of
    activation and scales is not saved but computed again in backward.
    """

    window = (GroupedLinear, ScaledActivation, GroupedLinear)
    side = "joint"

    @classmethod
    def refuses(
        cls, up: GroupedLinear, activation: ScaledActivation, down: GroupedLinear, *, key: PlanKey
    ) -> str | None:
        if up.num_groups != down.num_groups:
            return f"the linears have {up.num_groups} and {down.num_groups} groups."
        dtypes = [key.autocast_dtype or op.params[0].dtype for op in (key.ops[0], key.ops[2])]
        if dtypes[0] is not dtypes[1]:
            return f"the linears compute in {dtypes[0]} and {dtypes[1]}."
        is_alone = not (up.runs_at_once(key.window(0, 1)) and down.runs_at_once(key.window(2, 3)))
        if key.recipe is not None and is_alone:
            name = type(key.recipe).__name__
            return f"under {name} here, each group is quantized and multiplied alone."
        return None

    @classmethod
    def kernels(
        cls,
        up: GroupedLinear,
        activation: ScaledActivation,
        down: GroupedLinear,
        *,
        side: str,
        key: PlanKey,
    ) -> tuple[tuple[str, int], ...]:
        ops = [up, activation, down] if side == "forward" else [down, activation, up]
        places = (0, 1, 2) if side == "forward" else (2, 1, 0)
        first, (middle, *_), last = (
            op.kernels(side, key.window(i, i + 1)) for op, i in zip(ops, places, strict=True)
        )
        if last and last[0].startswith("grouped quantize"):
            middle, last = f"{middle}+quantize", last[1:]
        names = (*first, middle, *last)
        return tuple((name, 3 * (i + 1 == len(names))) for i, name in enumerate(names))

    def notes(self, key: PlanKey, rows: int) -> tuple[str, ...]:
        """Shared work of the three ops, and what backward computes again."""
        notes = ["Finds the groups once."]
        if key.recipe is not None:
            notes = ["Finds and pads the groups once: rows stay padded between the products."]
        if self.members[1].activation_recompute_in_mlp and key.requires_grad:
            notes.append("Backward computes the scaled activation again.")
        return tuple(notes)

    # -- forward ----------------------------------------------------------------------

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        up, _, down = self.members
        extras = rows(inputs.extras, [op.num_extra_inputs for op in self.members])
        for ctx in (ctxs[0], ctxs[2]):
            ctx.compute_dtype = ctx.autocast_dtype or up._dtype
        matrix, leading = rows_of_groups(x, ctxs[0]), x.shape[:-1]
        products = self._products(ctxs, matrix, leading, extras, inputs.kwargs)
        if products is None:
            return self._one_by_one(ctxs, x, extras, inputs)
        firsts = [kwargs.get("is_first_microbatch") for kwargs in inputs.kwargs]
        y = self._together(*products, ctxs[1], matrix, extras, firsts)
        return write_output(y.view(*leading, down.out_features), inputs.quantizer), ()

    def _together(
        self,
        of_up: GroupedProduct,
        of_down: GroupedProduct,
        ctx: OperationContext,
        x: Values,
        extras: list[tuple[torch.Tensor, ...]],
        firsts: list[bool | None],
    ) -> torch.Tensor:
        """The output ``[T, N]``; ``firsts`` is the ``is_first_microbatch`` of each op."""
        scales = padded_values(extras[1][0].reshape(-1), of_up.groups.padded)
        z = of_up.forward(x, extras[0], firsts[0], keeps_input=of_up.ctx.keeps_input)
        h = pointwise.chain((self.members[1].function.scaled,), z, (scales,))
        is_repeated, is_rebuilt = self._is_repeated(of_down), not of_down.ctx.keeps_input
        keeps_input = not (is_repeated or is_rebuilt)
        y = of_down.forward(h, extras[2], firsts[2], keeps_input=keeps_input)
        if ctx.requires_grad:
            ctx.state = GroupedMLPState(self.members[1].function, is_repeated)
            if not keeps_input or of_down.wants_dgrad:
                ctx.save_for_backward(*ScaledActivationSaved(input_to_save(ctx, z), scales))
        return y

    def _products(
        self,
        ctxs: Contexts,
        x: Any,
        leading: torch.Size,
        extras: list[tuple[torch.Tensor, ...]],
        kwargs: Sequence[Mapping[str, Any]],
    ) -> tuple[GroupedProduct, GroupedProduct] | None:
        """Those of both linears, with the groups of one; None if the ops run one by one.

        They do with buffers of the caller, split sizes of two tensors or that are read, or
        quantizers of each group.
        """
        up, activation, down = self.members
        has_recipe = ctxs[0].has_recipe
        reads_sizes = up.check_device_splits or down.check_device_splits
        are_no_buffers = all({*options} <= {"is_first_microbatch"} for options in kwargs)
        # Identity alone: a recorded pass knows which inputs are one tensor, but not their memory.
        is_fused = extras[0][0] is extras[2][0] and are_no_buffers
        if not is_fused or (has_recipe and reads_sizes):
            return None
        of_up = of_down = None
        if has_recipe:
            of_up, of_down = quantizers_of_groups(up, ctxs[0]), quantizers_of_groups(down, ctxs[2])
            if of_up is None or of_down is None:
                return None
        up._check((*leading, x.shape[-1]), extras[0])
        activation._check_scales((*leading, up.out_features), tuple(extras[1][0].shape))
        down._check((*leading, activation.function.output_features(up.out_features)), extras[2])
        is_read = not has_recipe and (reads_sizes or not grouped.has_grouped_mm(x.device, x.dtype))
        groups = grouped.groups_of(extras[0][0], x, is_read=is_read, is_padded=has_recipe)
        return (
            product_at_once(up, ctxs[0], groups, of_up, (False, True)),
            product_at_once(down, ctxs[2], groups, of_down, (True, False)),
        )

    def _is_repeated(self, of_down: GroupedProduct) -> bool:
        """Whether backward computes the scaled activation again."""
        is_wanted = self.members[1].activation_recompute_in_mlp
        is_wanted = is_wanted or of_down.ctx.backward_override == "high_precision"
        return of_down.wants_wgrad and is_wanted

    # -- backward ---------------------------------------------------------------------

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        ctx, leading = ctxs[1], dy.shape[:-1]
        if not isinstance(ctx.state, GroupedMLPState):
            return self._one_by_one_backward(ctxs, dy)
        matrix = rows_of_groups(dy, ctxs[0])
        up = GroupedProduct.of_backward(self.members[0], ctxs[0], matrix.shape[0])
        down = GroupedProduct.of_backward(self.members[2], ctxs[2], matrix.shape[0])
        if ctx.state.is_repeated:
            ctxs[2].rebuilt_input = self.members[1].rebuild(ctx, None)
        dh, down_grads, down_extras = down.backward([matrix], leading)
        if dh is None:
            none = [None] * len(up.linear.parameter_names)
            extras = (*[None] * up.linear.num_extra_inputs, None, *down_extras)
            return None, (*none, *down_grads), extras
        dz, dscales, sums = self._activation_backward(ctx, dh, up)
        held = [dz]
        # Nothing reads z and the second weights again, and wgrad of the first is the peak.
        ctx.saved_tensors = ctxs[2].saved_tensors = None
        del dh, dz, down
        dx, up_grads, up_extras = up.backward(held, leading, sums=sums)
        if dx is not None:
            dx = write_grad_input(dx.view(*leading, up.linear.in_features), up.ctx)
        if dscales is not None:
            dscales = unpadded_values(dscales, up.groups.padded).view(leading)
        return dx, (*up_grads, *down_grads), (*up_extras, dscales, *down_extras)

    def _activation_backward(
        self, ctx: OperationContext, dh: torch.Tensor, of_up: GroupedProduct
    ) -> tuple[Values, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of z and of the scales, and the sums of dz that a kernel leaves."""
        saved: ScaledActivationSaved = self.members[1].saved(ctx)
        function, (wants_dscales,) = ctx.state.function, ctx.extra_inputs_require_grad
        # The store that quantizes dz leaves the sums of its rows, of whole tiles of one group.
        sums_beside = of_up.wants_biases and of_up.wants_products and not of_up.linear.scale_bias
        if sums_beside and isinstance(of_up, QuantizedProduct) and not of_up.is_exact:
            return scaled_activation_bias_backward(
                *(function, dh, *saved, of_up.padded), wants_dscales=wants_dscales
            )
        x, scales = saved
        dz, (dscales,) = pointwise.chain_backward(
            (function.scaled,), dh, x, (scales,), (wants_dscales,)
        )
        return dz, dscales, None

    # -- unfused ----------------------------------------------------------------------

    def _one_by_one(
        self,
        ctxs: Contexts,
        x: torch.Tensor,
        extras: list[tuple[torch.Tensor, ...]],
        inputs: StepInputs,
    ) -> StepOutputs:
        for i, op in enumerate(self.members):
            quantizer = inputs.quantizer if i == 2 else None
            of_op = StepInputs(extras[i], quantizer, inputs.kwargs[i : i + 1])
            x, _ = op.step_forward(ctxs[i : i + 1], x, of_op)
        return x, ()

    def _one_by_one_backward(self, ctxs: Contexts, dy: torch.Tensor) -> StepGrads:
        params: list[Any] = [(None,) * len(op.parameter_names) for op in self.members]
        extras: list[Any] = [(None,) * op.num_extra_inputs for op in self.members]
        dx: torch.Tensor | None = dy
        for i in (2, 1, 0):
            if dx is not None and ctxs[i].requires_grad:
                dx, params[i], extras[i] = self.members[i].step_backward(ctxs[i : i + 1], dx, ())
            else:
                dx = None
        return dx, (*itertools.chain(*params),), (*itertools.chain(*extras),)
