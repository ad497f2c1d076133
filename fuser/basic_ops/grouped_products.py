"""Products of a grouped linear, of all groups at once: in the compute dtype, or quantized.

If the recipe's format has a quantizer of groups, the operands of all groups are quantized in one
launch and multiplied in one, over *padded* groups; the split sizes are not read on the host.
Otherwise each group has its own quantizers and products (:mod:`grouped_loop`). Both give each group
the bytes of a tensor of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fuser.basic_ops.expert_parallel import RemoteRows
from fuser.basic_ops.grouped_parameters import (
    GroupParameters,
    are_quantized,
    note_reads,
    padded_weights,
    stacked,
    stacked_values,
)
from fuser.basic_ops.linear_operands import plain
from fuser.basic_ops.shared_memory import packed
from fuser.basic_ops.weights import as_list
from fuser.formats import GROUP_TILE
from fuser.functional.grouped import PaddedGroups, add_bias, padded_groups, padded_rows, unpad
from fuser.functional.lazy import LazyTensor, materialize
from fuser.gemm import grouped, quantized_groups
from fuser.gemm.grouped import Groups
from fuser.gemm.quantized_groups import reads_columns
from fuser.op import BasicOperation, OperationContext, Values, cast
from fuser.precision.contexts import current_recipe
from fuser.precision.quantizer_for import make_quantizer, role_format
from fuser.recipe import Recipe
from fuser.reference import grouped as reference
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    QuantizedTensor,
    Quantizer,
    groups_quantizer,
    quantizes_groups,
)
from fuser.tensors.grouped import can_be_joined
from fuser.tensors.observation import note_operands, observing
from fuser.tensors.sharding import gathered_by
from fuser.tensors.stacks import is_stack

Operand = Any
"""An operand of a product: a tensor of all groups, or ``GroupOperands`` of a loop."""
Weights = torch.Tensor | Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]
Saved = tuple[Any, ...]
"""Tensors, and None for those that backward does not read."""
Usages = tuple[bool, bool]
"""Whether a quantized tensor has a rowwise, and a columnwise copy."""


# -- quantizers ------------------------------------------------------------------------


class GroupsQuantizers(NamedTuple):
    """Quantizers by role, for all groups or one for each."""

    input: list[Quantizer]
    weight: list[Quantizer]
    grad_output: list[Quantizer]


def quantizes_groups_of(recipe: Recipe | None) -> bool:
    """Whether a grouped linear quantizes all groups in one launch under a recipe; for plans."""
    if recipe is None:
        return True
    if recipe.delayed():
        return role_format(recipe, "input").has_kernel
    if recipe.custom():
        return False
    roles = ("input", "weight", "grad_output")
    return all(quantizes_groups([make_quantizer(recipe, role)], 1) for role in roles)


def quantizers_of_groups(op: BasicOperation, ctx: OperationContext) -> GroupsQuantizers | None:
    """The quantizers of a grouped linear; None if one of them quantizes no groups in one launch.

    None too if its weights are quantized parameters of which the groups cannot be made.
    """
    recipe = current_recipe()
    assert recipe is not None
    groups = op.num_quantizers("backward")
    weights: list[Any] = list(op._parameters.values())[: op.main_grad_count]
    first = weights[0]
    has_groups = is_stack if first.dim() == 3 else can_be_joined
    if isinstance(first, QuantizedTensor) and not has_groups(weights):
        return None

    def of(mode: str) -> list[list[Quantizer]]:
        """The quantizers of each role."""
        roles = op.num_quantizers(mode) // groups
        constants = [op.constant_quantizer(recipe, mode, role) for role in range(roles)]
        if None not in constants:
            return [[constant] for constant in constants if constant is not None]
        return _of_each_group(op, mode) if recipe.delayed() else [[]] * roles

    has_gradient = ctx.requires_grad and ctx.backward_override is None
    quantizers = GroupsQuantizers(*of("forward"), *(of("backward") if has_gradient else [[]]))
    needed = quantizers if has_gradient else quantizers[:2]
    return quantizers if all(quantizes_groups(of_role, groups) for of_role in needed) else None


def quantizers_of_each(op: BasicOperation, ctx: OperationContext) -> GroupsQuantizers:
    """The quantizers of a grouped linear, one for each group."""
    has_gradient = ctx.requires_grad and ctx.backward_override is None
    gradient = _of_each_group(op, "backward") if has_gradient else [[]]
    return GroupsQuantizers(*_of_each_group(op, "forward"), *gradient)


def _of_each_group(op: BasicOperation, mode: str) -> list[list[Quantizer]]:
    values = [value for value in op.quantizer_values(mode) if value is not None]
    roles = op.num_quantizers(mode) // op.num_quantizers("backward")
    return [values[role::roles] for role in range(roles)]


def rows_of_groups(values: Values, ctx: OperationContext) -> Values:
    """An input of a grouped linear, or the gradient of its output, as ``[T, K]``.

    In the compute dtype; lazy rows as they are, which a kernel that quantizes takes.
    """
    if isinstance(values, LazyTensor):
        return values
    dtype = ctx.compute_dtype
    assert dtype is not None
    return cast(plain(values, dtype), dtype).reshape(-1, values.shape[-1])


def padded_values(values: torch.Tensor, padded: PaddedGroups | None) -> torch.Tensor:
    """One value for each row, ``[T]``; of padded groups, if these are given, zeros in between."""
    if padded is None:
        return values
    return materialize(padded_rows(values[:, None], padded)).view(-1)


def unpadded_values(values: torch.Tensor, padded: PaddedGroups | None) -> torch.Tensor:
    """The inverse of :func:`padded_values`."""
    return values if padded is None else unpad(values.view(-1, 1), padded).view(-1)


# -- from forward to backward ----------------------------------------------------------


class GroupedLinearSaved(NamedTuple):
    """The tensors that the backward of a grouped linear reads; None for those that it does not.

    ``x`` and ``weight`` have a tensor of all groups, or one of each group.
    """

    ends: torch.Tensor
    sizes: torch.Tensor | None
    padded_ends: torch.Tensor | None
    tiles: torch.Tensor | None
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    x_scaling: torch.Tensor | None
    """What :meth:`Quantizer.repeating` needs if backward computes the input again."""
    weight_scaling: torch.Tensor | None
    """The same if backward quantizes the weights again."""
    x: Saved
    weight: Saved

    def tensors(self) -> Saved:
        """All of them, to be saved."""
        return (*self[:-2], *self.x, *self.weight)

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> GroupedLinearSaved:
        """Those of :meth:`tensors`."""
        count = len(cls._fields) - 2
        operands = tuple(tensors[count:])
        half = len(operands) // 2
        named = dict(zip(cls._fields, tensors[:count], strict=False))
        return cls(**named, x=operands[:half], weight=operands[half:])


class SeparateWeights(NamedTuple):
    """Parameters that backward copies into one operand: of each group, or one of all groups.

    So the copies of all layers are not in memory at one time. ``usage`` is the copy of quantized
    ones that backward reads, None for their values.
    """

    usage: str | None
    weights: Sequence[torch.Tensor]


class GroupedLinearState(NamedTuple):
    """What a grouped linear keeps for its backward besides the tensors that it saves."""

    product: type[GroupedProduct]
    quantizers: GroupsQuantizers | None
    is_padded: tuple[bool, bool]
    separate: SeparateWeights | None
    is_transposed: bool
    """Whether the weights are ``[G, K, N]`` in memory, as then their gradients are."""
    grad_input: torch.Tensor | None = None
    """The caller's buffer for the gradient of the input."""


def _are_transposed(weights: Weights) -> bool:
    """Whether weights ``[G, N, K]`` are ``[G, K, N]`` in memory."""
    if not isinstance(weights, torch.Tensor) or weights.is_contiguous():
        return False
    return weights.mT.is_contiguous()


# -- products --------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupedProduct:
    """``y_g = x_g @ weight_g.T (+ bias_g)`` of all groups at once, in the compute dtype.

    A grouped linear in one pass: its operands, what backward reads of them, and its gradients.
    Operands that were quantized are dequantized.

    ``linear`` and ``ctx``: the op and its context. ``groups``: the groups of rows; products are of
    the rows of padded groups, if these are given. ``quantizers``: None without a recipe.
    ``is_padded``: whether ``x`` and ``y``, and their gradients, have the rows of padded groups.
    ``saved``: in backward, what the forward saved.
    """

    linear: GroupParameters
    ctx: OperationContext
    groups: Groups
    quantizers: GroupsQuantizers | None
    is_padded: tuple[bool, bool] = (False, False)
    saved: GroupedLinearSaved | None = None

    @staticmethod
    def of_backward(linear: GroupParameters, ctx: OperationContext, rows: int) -> GroupedProduct:
        """The product in the backward of a forward with ``rows`` rows.

        Raises StateError if a weight or a bias that it reads was changed in place since the
        forward.
        """
        linear.check_versions(ctx)
        saved, state = GroupedLinearSaved.of(ctx.saved_tensors), ctx.state
        groups = Groups.at(*saved[:4], rows)
        product: type[GroupedProduct] = state.product
        return product(linear, ctx, groups, state.quantizers, state.is_padded, saved)

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.ctx.compute_dtype
        assert dtype is not None
        return dtype

    @property
    def wants_wgrad(self) -> bool:
        """Whether backward computes gradients of the weights, which read the input."""
        ctx = self.ctx
        return ctx.requires_grad and any(ctx.params_require_grad[: self.linear.main_grad_count])

    @property
    def wants_dgrad(self) -> bool:
        """Whether backward computes the gradient of the input, which reads the weights."""
        return self.ctx.requires_grad and self.ctx.input_requires_grad

    @property
    def wants_products(self) -> bool:
        """Whether a product reads the gradient of the output."""
        return self.wants_wgrad or self.wants_dgrad

    @property
    def wants_biases(self) -> bool:
        """Whether backward computes gradients of the biases."""
        return any(self._biases_wanted)

    @property
    def _biases_wanted(self) -> Sequence[bool]:
        first, names = self.linear.main_grad_count, self.linear._names.get("bias", ())
        return self.ctx.params_require_grad[first : first + len(names)]

    @property
    def rows(self) -> Groups:
        """The groups of the rows that are multiplied."""
        padded = self.groups.padded
        return self.groups if padded is None else Groups(padded.padded_ends, None)

    @property
    def _rows_of_y(self) -> Groups:
        return self.rows if self.is_padded[1] else self.groups

    @property
    def _padding_of_y(self) -> PaddedGroups | None:
        return self.groups.padded if self.is_padded[1] else None

    # -- forward -----------------------------------------------------------------------

    def forward(
        self,
        x: Values,
        extras: Sequence[torch.Tensor],
        is_first_microbatch: bool | None,
        *,
        keeps_input: bool = True,
    ) -> torch.Tensor:
        """The output ``[T, N]`` of ``x [T, K]``; keeps in the context what backward reads.

        ``extras`` are the op's extra inputs. ``keeps_input``: whether gradients of the weights read
        this ``x``.
        """
        ctx, keeps_input = self.ctx, keeps_input and self.wants_wgrad
        scales = x_scaling = None
        if self.linear.scale_bias:
            scales = padded_values(extras[1].reshape(-1), self._padding_of_y)
        operand, quantizer = self._input(x, keeps_input and ctx.backward_override is None)
        if self.wants_wgrad and not keeps_input and quantizer is not None:
            x_scaling = quantizer.to_repeat(operand)
        weights, keeps_weight = self._weights(), ctx.keeps_weight or is_first_microbatch is not None
        weight = self._weight_operand(weights, is_first_microbatch, has_columns=keeps_weight)
        weight_scaling = None if keeps_weight else self._scaling_of(weight)
        if observing.now is not None:
            note_operands(self.linear, input=operand, weight=weight, groups=self.groups.padded)
        y, bias = self._with_biases(self._multiplied(operand, weight), scales)
        is_own = is_first_microbatch is None
        saved_weight, separate = self._saved_weight(weights, weight, is_own)
        if ctx.requires_grad:
            saved_x = self._saved_input(x, operand) if keeps_input else ()
            missing = (None,) * (len(saved_weight) - len(saved_x))
            saved_x = (*saved_x, *missing)
            kept = (scales, bias, x_scaling, weight_scaling)
            saved = GroupedLinearSaved(*self.groups.tensors(), *kept, saved_x, saved_weight)
            ctx.save_for_backward(*saved.tensors())
            ctx.state = GroupedLinearState(
                type(self), self.quantizers, self.is_padded, separate, _are_transposed(weights)
            )
        return y

    def _input(self, x: Values, has_columns: bool) -> tuple[Operand, Quantizer | None]:
        """The input as the operand of the forward, and of the weight gradient if needed.

        Also its quantizer, None if several or none quantized it.
        """
        return self._padded(x, self.is_padded[0]), None

    def _padded(self, rows: Values, is_padded: bool) -> torch.Tensor:
        padded = self.groups.padded
        return materialize(rows if is_padded or padded is None else padded_rows(rows, padded))

    def _unpadded(self, rows: torch.Tensor, is_padded: bool) -> torch.Tensor:
        padded = self.groups.padded
        return rows if is_padded or padded is None else unpad(rows, padded)

    def _weights(self) -> Weights:
        """The weights ``[G, N, K]``; quantized ones as a list."""
        weights = self.linear.read_weights(self.ctx, self.dtype)
        if isinstance(weights, torch.Tensor) or are_quantized(weights):
            return weights
        return stacked(weights)

    def _weight_operand(
        self, weights: Weights, is_first_microbatch: bool | None, *, has_columns: bool
    ) -> Operand:
        """The weights as an operand, perhaps that of the first microbatch.

        ``has_columns``: with the copy that backward reads, if it reads one.
        """
        if are_quantized(weights):
            return stacked_values(self.linear.bound(weights), self.dtype)
        return weights

    def _scaling_of(self, weight: Operand) -> torch.Tensor | None:
        """What :meth:`Quantizer.repeating` needs to quantize the weights again."""
        return None

    def _multiplied(self, x: Operand, weight: Operand) -> torch.Tensor:
        return self._unpadded(grouped.forward(x, weight, self.rows), self.is_padded[1])

    def _with_biases(
        self, y: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``y`` with its biases, and the biases if the gradient of scales reads them."""
        linear, ctx = self.linear, self.ctx
        if not linear.has_bias:
            return y, None
        bias = linear._stacked("bias", y.dtype)
        factors = None if scales is None else cast(scales, y.dtype)
        y = add_bias(self._rows_of_y.ends, bias, factors, y)
        wants_dscales = linear.scale_bias and ctx.extra_inputs_require_grad[1]
        if not (ctx.requires_grad and wants_dscales):
            return y, None
        linear.note_versions(ctx, "bias")
        # Parameters of which it is a view are apart in graphs.
        return y, bias.clone() if linear.runs_in_graph else bias

    def _saved_input(self, x: Values, operand: Operand) -> Saved:
        return (self._kept(x, operand, is_own=True),)

    def _kept(self, values: Any, operand: Operand, *, is_own: bool) -> Any:
        """What is saved of an input or of weights, from which ``operand`` was made.

        This is the operand, or the values if the override is high precision. An operand with a
        columnwise copy loses its rowwise copy. If it is not this call's own operand, the result is
        an alias of its columnwise copy instead.
        """
        if self.ctx.backward_override == "high_precision":
            return values
        if isinstance(operand, QuantizedTensor) and operand._has("columnwise"):
            if not is_own:
                return operand.with_usage("columnwise")
            operand.release("rowwise")
        return operand

    def _saved_weight(
        self, weights: Weights, operand: Operand, is_own: bool
    ) -> tuple[Saved, SeparateWeights | None]:
        """The weights that are saved for backward, or else those that it copies again."""
        if are_quantized(weights):
            usage = self._usage_of_backward(weights[0]) if self.wants_dgrad else None
            note_reads(weights, usage, is_read=self.wants_dgrad)
            return (None,), SeparateWeights(usage, weights) if self.wants_dgrad else None
        assert isinstance(weights, torch.Tensor)
        if not self.wants_dgrad:
            return (None,), None
        is_quantized_again = is_own and not self.ctx.keeps_weight
        kept = weights if is_quantized_again else self._kept(weights, operand, is_own=is_own)
        parts = self.linear._parts("weight")
        has_dtype = parts[0].dtype is self.dtype
        if kept is weights and self.linear.runs_in_graph and (has_dtype or is_quantized_again):
            return tuple(parts), None  # put together again by backward
        is_copy = kept is weights and weights.data_ptr() != parts[0].data_ptr()
        if is_copy and is_quantized_again and len(parts) == 1:
            return tuple(parts), None  # cast again by backward
        is_gathered = packed(parts) is None and bool(gathered_by(parts))
        if is_copy and len(parts) > 1 and (is_quantized_again or is_gathered):
            return (None,), SeparateWeights(None, parts)
        return (kept,), None

    def _usage_of_backward(self, weight: QuantizedTensor) -> str | None:
        """The copy of quantized weights that dgrad reads; None for the values."""
        override, quantizers = self.ctx.backward_override, self.quantizers
        if quantizers is None or override == "high_precision":
            return None
        is_columns = override is None and reads_columns(
            weight._quantizer, quantizers.grad_output[0], weight.device
        )
        return "columnwise" if is_columns else "rowwise"

    # -- backward ----------------------------------------------------------------------

    def backward(
        self, held: list[Values], leading: torch.Size, *, sums: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, Gradients, Gradients]:
        """The gradients of the input, of the parameters, and of the extra inputs.

        If the context has a ``rebuilt_input``, that is the input, and none was saved.

        ``held``: the gradient of the output alone, which is taken out, and so is not kept.
        ``leading``: the shape of the input's rows. ``sums``: the sums of that gradient by group, if
        a kernel leaves them as it quantizes it.
        """
        dy, saved = held.pop(), self.saved
        assert saved is not None
        dbiases = self._bias_parts(sums)
        extras: Gradients = [None] * self.linear.num_extra_inputs
        reads_dy = self.wants_biases or saved.bias is not None
        if sums is None and (reads_dy or not self.wants_products):
            dy = materialize(dy)  # which also computes what comes beside a lazy gradient
            dbiases, extras = self._bias_gradients(dy, saved, leading)
        operand = self._gradient(dy) if self.wants_products else None
        if observing.now is not None:
            note_operands(self.linear, grad_output=operand, groups=self.groups.padded)
        del dy
        dx = None
        if self.wants_dgrad:
            dx = self._dgrad(operand, self._weight_of_backward(saved), saved.weight_scaling)
        dweights: Gradients = [None] * self.linear.main_grad_count
        if self.wants_wgrad:
            # Without the saved weight, if the gradient is computed later.
            product = replace(self, saved=None)
            x, rebuilt = saved.x, self.ctx.rebuilt_input
            self.ctx.rebuilt_input = None
            if rebuilt is not None and self.linear.delay_wgrad_compute:
                # Not later, when the tensors that it is computed from may have changed.
                x, rebuilt = (materialize(product._rebuilt(rebuilt, saved.x_scaling)),), None
            wgrad = functools.partial(product._wgrad, operand, x, saved.x_scaling, rebuilt)
            dweights = self.linear.weight_gradients(self.ctx, wgrad)
        return dx, (*dweights, *dbiases), extras

    def _gradient(self, dy: Values) -> Operand:
        """The gradient of the output as the operand of the products that are wanted."""
        return self._padded(dy, self.is_padded[1])

    def _weight_of_backward(self, saved: GroupedLinearSaved) -> Operand:
        """The weights that were saved, or a copy of their parameters."""
        (weight, *others), separate = saved.weight, self.ctx.state.separate
        if others:
            buffer = packed(saved.weight)
            return stacked(saved.weight) if buffer is None else buffer
        if separate is None:
            return weight
        if separate.usage is None:
            return stacked_values(separate.weights, self.dtype)
        return padded_weights(separate.weights, separate.usage)

    def _dgrad(self, dy: Operand, weight: Operand, scaling: torch.Tensor | None) -> torch.Tensor:
        """``dy_g @ weight_g``, the gradient of the input ``[T, K]``.

        ``scaling`` is that of weights which are quantized again, as in forward.
        """
        if isinstance(weight, QuantizedTensor):
            shape = (len(self.rows.ends), -1, weight.shape[-1])
            weight = weight.dequantize(dtype=dy.dtype).view(shape)[:, : dy.shape[1]]
        return self._unpadded(grouped.dgrad(dy, weight, self.rows), self.is_padded[0])

    def _wgrad(
        self, dy: Operand, x: Saved, scaling: torch.Tensor | None, rebuilt: Values | None
    ) -> torch.Tensor:
        """``dy_g.T @ x_g``, the gradients of the weights ``[G, N, K]``.

        ``x`` is what was saved of the input; or ``rebuilt`` are its values, which are quantized
        with ``scaling`` as in forward.
        """
        (x_of_all, *_), is_padded = x, self.is_padded[0]
        if rebuilt is not None:
            x_of_all = self._rebuilt(rebuilt, scaling)
        if isinstance(x_of_all, QuantizedTensor):
            x_of_all, is_padded = x_of_all.dequantize(dtype=dy.dtype), True
        values = self._padded(x_of_all, is_padded)
        if self.ctx.state.is_transposed:
            return grouped.wgrad(values, dy, self.rows).mT
        return grouped.wgrad(dy, values, self.rows)

    def _rebuilt(self, x: Values, scaling: torch.Tensor | None) -> Operand:
        """An input that backward computed again, as the operand of the weight gradient."""
        return x

    def _bias_gradients(
        self, dy: torch.Tensor, saved: GroupedLinearSaved, leading: torch.Size
    ) -> tuple[Gradients, Gradients]:
        """The gradients of the biases that autograd gets, and of the extra inputs."""
        groups, scales, bias = self._rows_of_y, saved.scales, saved.bias
        dbiases = self._bias_parts(grouped.sums(dy, groups, scales) if self.wants_biases else None)
        if bias is None or scales is None:
            return dbiases, [None] * self.linear.num_extra_inputs
        products = (dy.float() * reference.of_rows(groups.ends, bias, dy.shape[0]).float()).sum(-1)
        dscales = reference.zero_tail(groups.ends, products).to(scales.dtype)
        return dbiases, (None, unpadded_values(dscales, self._padding_of_y).view(leading))

    def _bias_parts(self, summed: torch.Tensor | None) -> Gradients:
        """The gradients of the biases that autograd gets, from those of all groups ``[G, N]``."""
        if summed is None:
            return [None] * len(self.linear._names.get("bias", ()))
        parts = [summed] if self.linear._is_one("bias") else summed
        return [p if w else None for p, w in zip(parts, self._biases_wanted, strict=True)]


@dataclass(frozen=True)
class QuantizedProduct(GroupedProduct):
    """The product with quantized operands, whose rows are those of padded groups."""

    quantizers: GroupsQuantizers

    @property
    def is_exact(self) -> bool:
        """Whether backward multiplies values, those of quantized operands too."""
        return self.ctx.backward_override is not None

    @property
    def padded(self) -> PaddedGroups:
        assert self.groups.padded is not None
        return self.groups.padded

    def _quantized(
        self, x: Values, role: str, usages: Usages, is_padded: bool
    ) -> tuple[Operand, Quantizer | None]:
        """The rows quantized, and their quantizer; None if it was that of another rank."""
        quantizers: list[Quantizer] = getattr(self.quantizers, role)
        rowwise, columnwise = usages
        if isinstance(x, RemoteRows):
            received = x.quantized(quantizers, self.padded, rowwise=rowwise, columnwise=columnwise)
            if received is not None:
                return received, None
            x = x.gathered()
        quantizer = groups_quantizer(
            quantizers, self.padded, rowwise=rowwise, columnwise=columnwise
        )
        return quantizer(padded_rows(x, self.padded, is_padded=is_padded)), quantizer

    def _reads_columns(self, role: str, device: torch.device) -> bool:
        """Whether backward reads a columnwise copy of the tensor of a role."""
        quantizers = self.quantizers
        other = quantizers.input if role == "grad_output" else quantizers.grad_output
        return reads_columns(getattr(quantizers, role)[0], other[0], device)

    def _input(self, x: Values, has_columns: bool) -> tuple[Operand, Quantizer | None]:
        has_columns = has_columns and self._reads_columns("input", x.device)
        return self._quantized(x, "input", (True, has_columns), self.is_padded[0])

    def _rebuilt(self, x: Values, scaling: torch.Tensor | None) -> Operand:
        if self.ctx.backward_override == "high_precision":
            return x
        has_columns = not self.is_exact and self._reads_columns("input", x.device)
        usages = {"rowwise": not has_columns, "columnwise": has_columns}
        quantizer = groups_quantizer(self.quantizers.input, self.padded, **usages)
        rows = padded_rows(x, self.padded, is_padded=self.is_padded[0])
        return quantizer.repeating(scaling)(rows)

    def _gradient(self, dy: Values) -> Operand:
        if self.is_exact:
            return super()._gradient(dy)
        has_columns = self.wants_wgrad and self._reads_columns("grad_output", dy.device)
        rowwise = self.wants_dgrad or not has_columns
        return self._quantized(dy, "grad_output", (rowwise, has_columns), self.is_padded[1])[0]

    def _weight_operand(
        self, weights: Weights, is_first_microbatch: bool | None, *, has_columns: bool
    ) -> Operand:
        linear = self.linear
        if are_quantized(weights):
            return self._parameters_as_operand(weights)
        has_columns = has_columns and self.wants_dgrad and not self.is_exact
        has_columns = has_columns and self._reads_columns("weight", weights[0].device)
        make = functools.partial(self._quantized_weight, weights, (True, has_columns))
        if is_first_microbatch is None:
            return make()
        return linear.kept_weights(
            linear._parts("weight"),
            self.dtype,
            self.quantizers.weight,
            is_first_microbatch,
            make,
            lambda kept: not has_columns or all(q._has("columnwise") for q in as_list(kept)),
        )

    def _parameters_as_operand(self, weights: Sequence[QuantizedTensor]) -> Operand:
        """Weights that are quantized parameters, as the operand of the forward."""
        return padded_weights(self.linear.bound(weights), "rowwise")

    def _quantized_weight(
        self, weight: Weights, usages: Usages, scaling: torch.Tensor | None = None
    ) -> Operand:
        """The weights ``[G, N, K]`` quantized; with ``scaling`` those of a forward again."""
        assert isinstance(weight, torch.Tensor)
        quantizers = self.quantizers.weight
        count, n, k = weight.shape
        rows, first = weight.reshape(count * n, k), quantizers[0]
        copies = {"rowwise": usages[0], "columnwise": usages[1]}
        if isinstance(first, (Float8BlockQuantizer, MXFP8Quantizer)) and n % GROUP_TILE == 0:
            return first.with_usage(**copies)(rows)  # no padding, no scales of groups
        groups = padded_groups(n, count, count * n, weight.device)
        quantizer = groups_quantizer(quantizers, groups, **copies)
        if self.saved is not None:  # in backward
            quantizer = quantizer.repeating(scaling)
        return quantizer(padded_rows(rows, groups))

    def _scaling_of(self, weight: Operand) -> torch.Tensor | None:
        if not self.wants_dgrad:
            return None
        scales = [q.scale for q in self.quantizers.weight if isinstance(q, Float8Quantizer)]
        return torch.cat(scales) if scales else weight._amaxes

    def _multiplied(self, x: Operand, weight: Operand) -> torch.Tensor:
        how = {"is_split": self.ctx.split_accumulators[0], "is_padded": self.is_padded[1]}
        size = self.linear.out_features
        return quantized_groups.quantized_forward(x, weight, self.padded, size, self.dtype, **how)

    def _dgrad(self, dy: Operand, weight: Operand, scaling: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(weight, QuantizedTensor) and not self.ctx.keeps_weight:
            values = cast(weight, self.dtype)
            has_columns = not self.is_exact and self._reads_columns("weight", values.device)
            weight = self._quantized_weight(values, (not has_columns, has_columns), scaling)
            if observing.now is not None:
                note_operands(self.linear, weight=weight)
        if self.is_exact:
            return super()._dgrad(dy, weight, scaling)
        how = {"is_split": self.ctx.split_accumulators[1], "is_padded": self.is_padded[0]}
        dx = quantized_groups.quantized_dgrad(dy, weight, self.padded, self.dtype, **how)
        if dy._has("columnwise"):
            dy.release("rowwise")  # nothing reads it again
        return dx

    def _wgrad(
        self, dy: Operand, x: Saved, scaling: torch.Tensor | None, rebuilt: Values | None
    ) -> torch.Tensor:
        if self.is_exact:
            return super()._wgrad(dy, x, scaling, rebuilt)
        operand = x[0] if rebuilt is None else self._rebuilt(rebuilt, scaling)
        if observing.now is not None:
            note_operands(self.linear, input=operand, groups=self.padded, only_new=True)
        how = {"is_split": self.ctx.split_accumulators[2]}
        if self.ctx.state.is_transposed:
            return quantized_groups.quantized_wgrad(operand, dy, self.padded, self.dtype, **how).mT
        return quantized_groups.quantized_wgrad(dy, operand, self.padded, self.dtype, **how)


def product_at_once(
    linear: GroupParameters,
    ctx: OperationContext,
    groups: Groups,
    quantizers: GroupsQuantizers | None,
    is_padded: tuple[bool, bool] = (False, False),
) -> GroupedProduct:
    """The product of a forward; in the compute dtype without quantizers."""
    if quantizers is None:
        return GroupedProduct(linear, ctx, groups, None, is_padded)
    return QuantizedProduct(linear, ctx, groups, quantizers, is_padded)
