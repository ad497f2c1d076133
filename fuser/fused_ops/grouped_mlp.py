"""GroupedMLP: the experts of a mixture, two grouped linears with a scaled activation between."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fuser.basic_ops import GroupedLinear
from fuser.basic_ops.grouped_products import (
    Quantized,
    kept,
    products_of_backward,
    products_of_forward,
    quantizers_of_groups,
    rows_of_groups,
)
from fuser.basic_ops.linear_operands import plain
from fuser.basic_ops.scaled_activation import ScaledActivation
from fuser.functional import pointwise
from fuser.functional.grouped import PaddedGroups, padded_rows, unpad
from fuser.functional.lazy import materialize
from fuser.gemm import grouped
from fuser.gemm.grouped import Groups
from fuser.op import FusedOperation, Grads, OperationContext, cast, write_grad_input, write_output
from fuser.specs import PlanKey
from fuser.tensors import Float8Quantizer


class _Saved(NamedTuple):
    """The tensors that backward reads; None in place of those that it does not read.

    Rows of ``z``, ``h`` and ``scales`` are those of padded groups under a recipe. Without ``h`` it
    is computed again.
    """

    ends: torch.Tensor
    padded_ends: Any
    tiles: Any
    x: Any
    up: Any
    z: Any
    scales: Any
    h: Any
    down: Any
    up_scales: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_scales: torch.Tensor | None
    down_bias: torch.Tensor | None


class GroupedMLP(FusedOperation):
    """``y_g = (f(x_g @ up_g.T) * scales) @ down_g.T`` of all groups together.

    The groups are found once. Under a recipe the rows stay padded from the first product to the
    last: one kernel computes the activation, its product with the scales and both quantized copies.
    In backward one kernel computes and quantizes the activation's gradient, and leaves the parts of
    the gradients of the scales and of the first linear's biases; with ``scale_bias`` the latter are
    weighted sums of a gradient in memory. With ``activation_recompute_in_mlp`` the product of
    activation and scales is not saved but computed again in backward, except under delayed scaling,
    whose scales have changed by then.
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
        found = ["Finds the groups once."]
        if key.recipe is not None:
            found = ["Finds and pads the groups once: rows stay padded between the products."]
        is_delayed = key.recipe is not None and key.recipe.delayed()
        if self.members[1].activation_recompute_in_mlp and key.requires_grad:
            found.append(
                "activation_recompute_in_mlp=True has no effect under delayed scaling, whose "
                "scales have changed by the backward."
                if is_delayed
                else "Backward computes the scaled activation again."
            )
        return tuple(found)

    # -- forward ----------------------------------------------------------------------

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        up, activation, down = self.members
        ctx: Any = basic_op_ctxs[0]
        extras = basic_op_extra_inputs
        # With buffers of the caller, or split sizes of two tensors, the ops run one by one.
        firsts = [kwargs.get("is_first_microbatch") for kwargs in basic_op_kwargs]
        are_no_buffers = all({*kwargs} <= {"is_first_microbatch"} for kwargs in basic_op_kwargs)
        # Identity alone: a recorded pass knows which inputs are one tensor, but not their memory.
        ctx.is_fused = extras[0][0] is extras[2][0] and are_no_buffers
        if ctx.has_recipe and (up.check_device_splits or down.check_device_splits):
            ctx.is_fused = False  # if sizes are read, each group has its own products
        quantizers: list[Any] = [None, None]
        if ctx.is_fused and ctx.has_recipe:
            pairs = ((up, ctx), (down, basic_op_ctxs[2]))
            quantizers = [quantizers_of_groups(op, of_op) for op, of_op in pairs]
            ctx.is_fused = None not in quantizers
        if not ctx.is_fused:
            return self._one_by_one(
                basic_op_ctxs, input_, extras, basic_op_kwargs, next_op_input_quantizer
            )
        leading = tuple(input_.shape[:-1])
        up._check(input_.shape, extras[0])
        activation._check_scales((*leading, up.out_features), tuple(extras[1][0].shape))
        features = activation.function.output_features(up.out_features)
        down._check((*leading, features), extras[2])
        dtype = ctx.autocast_dtype or up._dtype
        ctx.compute_dtype, ctx.quantizers = dtype, quantizers
        x = rows_of_groups(input_, dtype)
        y, saved = self._forward(basic_op_ctxs, x, extras, firsts)
        if ctx.requires_grad:
            ctx.save_for_backward(*saved)
        return write_output(y.view(*leading, down.out_features), next_op_input_quantizer), [()] * 3

    def _forward(
        self,
        ctxs: list[OperationContext],
        x: Any,
        extras: list[tuple[torch.Tensor, ...]],
        firsts: list[bool | None],
    ) -> tuple[torch.Tensor, _Saved]:
        """The output ``[T, N]``, and what backward reads.

        ``firsts``: the ``is_first_microbatch`` of each op.
        """
        up, activation, down = self.members
        ctx: Any = ctxs[0]
        dtype: torch.dtype = x.dtype
        of_up, of_down = ctx.quantizers
        is_read = any(op.check_device_splits for op in (up, down))
        is_read = of_up is None and (is_read or not grouped.has_grouped_mm(x.device, dtype))
        groups = grouped.groups_of(extras[0][0], x, is_read=is_read, is_padded=of_up is not None)
        ctx.group_sizes = groups.sizes
        products = products_of_forward(ctx, groups, of_up, dtype)
        ends, padded = products.rows.ends, groups.padded
        wants_up, wants_dx, wants_down, wants_dh = self._wanted(ctxs)
        is_quantized = ctx.backward_override is None
        up_scales, down_scales = (
            extras[i][1].reshape(-1) if op.scale_bias else None for i, op in ((0, up), (2, down))
        )
        up_scales = _of_rows(up_scales, padded)
        scales: Any = _of_rows(extras[1][0].reshape(-1), padded)

        up_weight = up.stacked_weight(ctx, dtype)
        x_made = products.input(x, of_up, is_kept=wants_up and is_quantized)
        up_made = up.weight_operand(ctx, products, up_weight, of_up, firsts[0])
        z = products.forward(x_made, up_made, up.out_features, is_padded=True)
        z, up_bias = up.add_biases(ctx, ends, up_scales, z)

        # Computing h again gives the same bits, but quantizing it again might not.
        is_exact = of_down is None or ctx.backward_override == "high_precision"
        can_repeat = is_exact or (
            is_quantized and not isinstance(of_down.input[0], Float8Quantizer)
        )
        is_again = wants_down and can_repeat and activation.activation_recompute_in_mlp
        is_again = is_again or ctx.backward_override == "high_precision"
        h = products.input(
            pointwise.scaled_activation(activation.function, z, scales),
            of_down,
            is_kept=wants_down and is_quantized and not is_again,
            is_padded=True,
        )
        down_weight = down.stacked_weight(ctxs[2], dtype)
        down_made = down.weight_operand(ctxs[2], products, down_weight, of_down, firsts[2])
        y = products.forward(h, down_made, down.out_features)
        y, down_bias = down.add_biases(ctxs[2], groups.ends, down_scales, y)
        reads_z = wants_dh or (wants_down and is_again)
        return y, _Saved(
            groups.ends,
            *groups.places(),
            kept(ctx, x, x_made, wants_up),
            up.saved_weight(ctx, up_weight, up_made, of_up, wants_dx, is_own=firsts[0] is None),
            z if reads_z else None,
            scales if reads_z else None,
            kept(ctx, h, h, wants_down and not is_again),
            down.saved_weight(
                ctxs[2], down_weight, down_made, of_down, wants_dh, is_own=firsts[2] is None
            ),
            up_scales,
            up_bias,
            down_scales,
            down_bias,
        )

    def _wanted(self, ctxs: list[OperationContext]) -> tuple[bool, bool, bool, bool]:
        """Whether the gradients of up's weights, of x, of down's weights and of h are wanted."""
        return tuple(  # type: ignore[return-value]
            of_op.requires_grad and is_wanted
            for op, of_op in zip(self.members[::2], ctxs[::2], strict=True)
            for is_wanted in (
                any(of_op.params_require_grad[: op.main_grad_count]),
                of_op.input_requires_grad,
            )
        )

    # -- backward ---------------------------------------------------------------------

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        up, activation, down = self.members
        ctx: Any = basic_op_ctxs[0]
        if not ctx.is_fused:
            return self._one_by_one_backward(basic_op_ctxs, grad_output)
        saved = _Saved(*ctx.saved_tensors)
        up.check_versions(ctx)
        down.check_versions(basic_op_ctxs[2])
        dtype, leading = ctx.compute_dtype, tuple(grad_output.shape[:-1])
        dy = cast(plain(grad_output, dtype), dtype).reshape(-1, down.out_features)
        groups = Groups.at(saved.ends, ctx.group_sizes, saved.padded_ends, saved.tiles, len(dy))
        products: Any = products_of_backward(ctx, groups, dtype)
        wants_up, wants_dx, wants_down, wants_dh = self._wanted(basic_op_ctxs)
        of_up, of_down = ctx.quantizers

        dy_made = None
        if wants_dh or wants_down:
            dy_made = products.gradient(dy, of_down, dgrad=wants_dh, wgrad=wants_down)
        dz = dscales = dx = up_dbias = None
        wants_biases = any(ctx.params_require_grad[up.main_grad_count :])
        # The store that quantizes dz leaves the sums of its rows, of whole tiles of one group.
        sums_beside = wants_biases and (wants_up or wants_dx) and not up.scale_bias
        sums_beside = sums_beside and isinstance(products, Quantized)
        if wants_dh:
            weight = down.weight_of_backward(basic_op_ctxs[2], saved.down, dtype)
            dh = products.dgrad(dy_made, weight, is_padded=True)
            del weight
            of_dz = (activation.function, dh, saved.z, saved.scales)
            wants_dscales = basic_op_ctxs[1].extra_inputs_require_grad[0]
            if sums_beside:
                dz, dscales, up_dbias = pointwise.scaled_activation_bias_backward(
                    *of_dz, products.padded, wants_dscales=wants_dscales
                )
            else:
                dz, dscales = pointwise.scaled_activation_backward(
                    *of_dz, wants_dscales=wants_dscales
                )
            del dh, of_dz
        dweights: list[Any] = [[None] * op.main_grad_count for op in (up, down)]
        if wants_down:
            h = saved.h
            source = (saved.z, saved.scales) if h is None else (None, None)
            make = functools.partial(self._down_gradient, products, of_down, dy_made, h, *source)
            dweights[1] = down.weight_gradients(basic_op_ctxs[2], make)
        down_biases, down_dscales = down.bias_gradients(
            basic_op_ctxs[2], dy, groups, saved.down_scales, saved.down_bias
        )
        del dy_made
        up_biases: Sequence[torch.Tensor | None] = [None] * len(up._names.get("bias", ()))
        up_dscales = None
        if dz is not None:
            reads_dz = (wants_biases and not sums_beside) or saved.up_bias is not None
            if up_dbias is not None:
                up_biases = up.bias_parts(ctx, up_dbias)
            elif reads_dz or not (wants_up or wants_dx):
                dz = materialize(dz)  # which also computes the gradient of the scales
                up_biases, up_dscales = up.bias_gradients(
                    ctx, dz, products.rows, saved.up_scales, saved.up_bias
                )
            if wants_up or wants_dx:
                made = products.gradient(dz, of_up, dgrad=wants_dx, wgrad=wants_up, is_padded=True)
                del dz
                if wants_dx:
                    dx = products.dgrad(made, up.weight_of_backward(ctx, saved.up, dtype))
                    dx = write_grad_input(dx.view(*leading, up.in_features), ctx)
                if wants_up:
                    make = functools.partial(products.wgrad, made, saved.x)
                    dweights[0] = up.weight_gradients(ctx, make)
        params = [(*dweights[0], *up_biases), (), (*dweights[1], *down_biases)]
        of_scales = [
            None if found is None else _unpadded(found, groups.padded).view(leading)
            for found in (up_dscales, dscales)
        ]
        if down_dscales is not None:
            down_dscales = down_dscales.view(leading)
        return (
            dx,
            params,
            [
                (None, of_scales[0]) if up.scale_bias else (None,),
                (of_scales[1],),
                (None, down_dscales) if down.scale_bias else (None,),
            ],
        )

    def _down_gradient(
        self, products: Any, of_down: Any, dy: Any, h: Any, z: Any, scales: Any
    ) -> torch.Tensor:
        """The gradients of the second linear's weights ``[G, N, K]``; h from z if it is None."""
        if h is None:
            h = pointwise.scaled_activation(self.members[1].function, z, scales)
            is_quantized = isinstance(products, Quantized)
            h = products.kept_input(h, of_down) if is_quantized else materialize(h)
        made: torch.Tensor = products.wgrad(dy, h, is_padded=True)
        return made

    # -- unfused ----------------------------------------------------------------------

    def _one_by_one(
        self,
        ctxs: list[OperationContext],
        x: torch.Tensor,
        extras: list[tuple[torch.Tensor, ...]],
        kwargs: list[dict[str, Any]],
        next_op_input_quantizer: Any | None,
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        for i, op in enumerate(self.members):
            x, _ = op.fuser_forward(
                ctxs[i : i + 1],
                x,
                basic_op_extra_inputs=extras[i : i + 1],
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=next_op_input_quantizer if i == 2 else None,
                basic_op_kwargs=kwargs[i : i + 1],
            )
        return x, [()] * 3

    def _one_by_one_backward(
        self, ctxs: list[OperationContext], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        params: list[Any] = [(None,) * len(op.parameter_names) for op in self.members]
        extras: list[Any] = [(None,) * op.num_extra_inputs for op in self.members]
        found: torch.Tensor | None = grad
        for i in (2, 1, 0):
            if found is None or not ctxs[i].requires_grad:
                return None, params, extras
            found, (params[i],), (extras[i],) = self.members[i].fuser_backward(
                ctxs[i : i + 1], found, basic_op_grad_extra_outputs=[()]
            )
        return found, params, extras


def _of_rows(values: torch.Tensor | None, padded: PaddedGroups | None) -> torch.Tensor | None:
    """One value for each row, ``[T]``; of padded groups, if these are given, zeros in between."""
    if values is None or padded is None:
        return values
    return materialize(padded_rows(values[:, None], padded)).view(-1)


def _unpadded(values: torch.Tensor, padded: PaddedGroups | None) -> torch.Tensor:
    """The inverse of :func:`_of_rows`."""
    return values if padded is None else unpad(values.view(-1, 1), padded).view(-1)
