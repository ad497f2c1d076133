"""Tensor and sequence parallel linears: their communication, overlapped with their products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser import gemm
from fuser.basic_ops.basic_linear import BasicLinear
from fuser.basic_ops.collectives import (
    AllReduce,
    ReduceScatter,
    Rows,
    group_of,
    note_group,
    quantized_rows,
    travelling,
)
from fuser.basic_ops.linear_operands import (
    LinearSaved,
    operands_of,
    original,
    plain,
    quantized,
    readable,
    saved_operand,
)
from fuser.communication import (
    Group,
    GroupArgument,
    Pending,
    check_divides,
    check_shard,
    makes_columns,
    resolved,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from fuser.op import BasicOperation, Grads, OperationContext, ParallelMode, cast, write_grad_input
from fuser.precision.contexts import current_recipe
from fuser.specs import Collective, PlanKey, QuantSpec
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.observation import note_operands, observing


@dataclass(frozen=True)
class Parallelism:
    """How a linear is spread over ``ranks`` ranks: two or more.

    ``mode`` is ``"column"``, each rank has some outputs, or ``"row"``, some inputs. With
    ``has_shards`` (sequence parallel) each rank has some rows of the tensors that are whole in
    their features: the input of a column parallel linear, and the output of a row parallel one.
    """

    mode: ParallelMode
    ranks: int
    has_shards: bool

    @property
    def gathers_input(self) -> bool:
        return self.mode == "column" and self.has_shards

    @property
    def gathers_grad(self) -> bool:
        """Whether the gradient of the output is gathered."""
        return self.mode == "row" and self.has_shards

    # -- planning -----------------------------------------------------------------

    def collectives(self, op: BasicLinear, side: str, key: PlanKey) -> tuple[Collective, ...]:
        """The communication of forward or backward."""
        (linear,) = key.ops
        operands = operands_of("forward", key, op.quantizer_format)
        input_ = _travels(key, "input", operands.get("input"), side)
        gathered = Collective("all-gather", "input", self.ranks, input_)
        reduced = "reduce-scatter" if self.has_shards else "all-reduce"
        if side == "forward":
            if self.mode == "row":
                return (Collective(reduced, "output", self.ranks),)
            return (gathered,) if self.gathers_input else ()
        wants_dgrad, wants_wgrad = linear.input_requires_grad, linear.params[0].requires_grad
        collectives = [gathered] if self.gathers_input and wants_wgrad else []
        if self.gathers_grad and (wants_dgrad or wants_wgrad):
            operands = operands_of("backward", key, op.quantizer_format)
            grad = _travels(key, "grad_output", operands.get("grad_output"), side)
            collectives.append(Collective("all-gather", "grad_output", self.ranks, grad))
        if self.mode == "column" and wants_dgrad:
            collectives.append(Collective(reduced, "grad_input", self.ranks))
        return tuple(collectives)

    def output_shape(self, op: str, shape: tuple[int, ...], features: int) -> tuple[int, ...]:
        """The shape of the output on this rank.

        Raises InputError if the ranks do not divide the rows of a sequence, or the tensor has fewer
        than two dimensions.
        """
        if self.gathers_input:
            check_shard(op, shape)
            return (self.ranks * shape[0], *shape[1:-1], features)
        if self.mode == "row" and self.has_shards:
            shape = check_divides(op, shape, self.ranks)
        return (*shape[:-1], features)

    def adding_op(self, group: GroupArgument) -> BasicOperation:
        """An op that adds the products of all ranks, after others."""
        return ReduceScatter(group) if self.has_shards else AllReduce(group)

    # -- running --------------------------------------------------------------------

    def whole_input(
        self, op: BasicLinear, ctx: OperationContext, input_: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """The operand ``x`` of the forward, of the rows ``input_``, with the rows of all ranks."""
        group = self._note_group(op, ctx, input_)
        if not self.gathers_input:
            return x
        check_shard("BasicLinear", input_.shape)
        return start_all_gather(x, group).wait()

    def start_gather(
        self,
        op: BasicLinear,
        ctx: OperationContext,
        input_: torch.Tensor,
        dtype: torch.dtype,
        quantizer: Quantizer,
        *,
        wants_wgrad: bool,
    ) -> InputGather | None:
        """Start to gather the quantized input; None if the linear does not gather it."""
        group = self._note_group(op, ctx, input_)
        if not self.gathers_input:
            return None
        check_shard("BasicLinear", input_.shape)
        return InputGather(ctx, input_, dtype, quantizer, group, wants_wgrad=wants_wgrad)

    def _note_group(self, op: BasicLinear, ctx: OperationContext, input_: torch.Tensor) -> Group:
        """The group of this forward, which its backward uses too; its ranks agree on the call."""
        group = resolved("BasicLinear", op.tensor_parallel_group)
        grads = (ctx.input_requires_grad, *ctx.params_require_grad) if ctx.requires_grad else ()
        name, recipe = f"BasicLinear({op.in_features}, {op.out_features})", current_recipe()
        op._agreement.check(name, group, recipe, input_, self, f"gradients {grads}")
        note_group(ctx, group)
        return group

    def added(self, op: BasicLinear, y: torch.Tensor) -> torch.Tensor:
        """The products of all ranks of a row parallel linear, added."""
        group = resolved("BasicLinear", op.tensor_parallel_group)
        if self.has_shards:
            check_divides("BasicLinear", tuple(y.shape), self.ranks)
        return self._start_sum(y, group).wait()

    def _start_sum(self, products: torch.Tensor, group: Group) -> Pending[torch.Tensor]:
        """Start to add the products that all ranks have."""
        if self.has_shards:
            return start_reduce_scatter(products, group)
        return start_all_reduce(products, group, is_own=True)

    def backward(
        self,
        op: BasicLinear,
        ctx: OperationContext,
        grad_output: torch.Tensor,
        x: Any,
        weight: Any,
        scale: float,
        addend: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, Grads]:
        """``BasicLinear.op_backward`` of a parallel linear; ``x`` and ``weight`` are those saved.

        The input is gathered during dgrad, and dgrad's result is added over ranks during wgrad.
        """
        group = group_of(ctx, "BasicLinear", op.tensor_parallel_group)
        is_recipes = ctx.has_recipe and ctx.compute_dtype is not None
        is_quantized = is_recipes and ctx.backward_override is None
        gathering = None
        is_whole = x is not None and x.shape[0] == grad_output.shape[0]
        if x is not None and self.gathers_input and not is_whole:
            gathering = _start_saved(x, group, is_quantized)
        dtype = ctx.compute_dtype if is_recipes else (weight if x is None else x).dtype
        assert dtype is not None
        take_grad = _quantized_grad if is_quantized else _plain_grad
        rows, columns = take_grad(op, ctx, grad_output, dtype, group)
        dx = reducing = grad_weight = None
        if weight is not None:
            if is_quantized:
                is_split = ctx.split_accumulators[1]
                dx = gemm.quantized_dgrad(
                    rows(), weight, dtype, is_split=is_split, scale=scale, addend=addend
                )
            else:
                dx = gemm.dgrad(rows(), plain(weight, dtype), scale, addend)
            if self.mode == "column":
                reducing = self._start_sum(dx, group)
        if x is not None:
            whole = x if gathering is None else gathering.wait()
            whole = whole if is_quantized else plain(whole, dtype)
            grad_weight = op.weight_gradient(
                ctx, columns(), whole, scale, is_quantized=is_quantized
            )
        if reducing is not None:
            dx = reducing.wait()
        return (None if dx is None else write_grad_input(dx, ctx)), (grad_weight,)


def _travels(key: PlanKey, role: str, spec: QuantSpec | None, side: str) -> QuantSpec | None:
    """The form of the sent ``"input"`` or ``"grad_output"`` on ``side``; None for values.

    It assumes that no block has rows of two ranks: shapes are not part of a plan.
    """
    recipe = key.recipe
    if recipe is None or (side == "backward" and recipe.backward_override == "high_precision"):
        return None
    if spec is not None and role == "input":
        is_wgrads = side == "backward" and recipe.backward_override is None
        spec = replace(spec, rowwise=not is_wgrads, columnwise=is_wgrads)
    return travelling(recipe, spec)


class InputGather:
    """The quantized input of a column parallel linear, while it is gathered.

    Starts at once, and ``wait`` returns the whole input with a rowwise copy. After it, ``saved`` is
    what backward needs: the rows of this rank, gathered again, or the whole input, where ranks
    cannot quantize their rows alike.
    """

    def __init__(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        dtype: torch.dtype,
        quantizer: Quantizer,
        group: Group,
        *,
        wants_wgrad: bool,
    ) -> None:
        override = ctx.backward_override
        self._quantizer = quantizer
        self._usage = None
        if wants_wgrad and override != "high_precision":
            self._usage = "rowwise" if override == "dequantized" else "columnwise"
        usages = tuple(dict.fromkeys(("rowwise", self._usage or "rowwise")))
        source = input_ if isinstance(input_, QuantizedTensor) else cast(input_, dtype)
        rows = quantized_rows(source, quantizer, usages, group, reduces_amaxes=ctx.reduces_amaxes)
        self._gathering: Pending[QuantizedTensor]
        if rows is None:
            values = start_all_gather(cast(plain(input_, dtype), dtype), group)
            self._gathering = Pending(lambda: quantizer(values.wait()))
        else:
            self._gathering = rows.start(("rowwise",), group)
        self.of_rank = None if rows is None else rows.tensor
        """What this rank has quantized: its rows, or after :meth:`wait` the whole input."""
        self.saved: torch.Tensor | None = None
        if wants_wgrad and override == "high_precision":
            self.saved = original(input_, dtype)

    def wait(self) -> QuantizedTensor:
        """The input of all ranks."""
        whole, rows = self._gathering.wait(), self.of_rank
        if rows is None:
            self.of_rank = whole
            self.saved = self.saved if self._usage is None else whole
        elif self._usage is not None:
            kept = self._usage if rows._has(self._usage) else "rowwise"
            self.saved = saved_operand(rows, kept, self._quantizer)
        return whole


def _start_saved(x: torch.Tensor, group: Group, is_quantized: bool) -> Pending[Any]:
    """Start to gather the saved input, in the copy that wgrad reads."""
    if not isinstance(x, QuantizedTensor):
        return start_all_gather(x, group)
    rows = Rows(x, checks_scales=False)  # forward has compared them
    return rows.start(("columnwise" if is_quantized else "rowwise",), group)


def _plain_grad(
    op: Any, ctx: OperationContext, grad_output: torch.Tensor, dtype: torch.dtype, group: Group
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """As :func:`_quantized_grad`, of a gradient in ``dtype``."""
    dy = cast(plain(grad_output, dtype), dtype)
    if op._parallel.gathers_grad:
        dy = start_all_gather(dy, group).wait()
    return (lambda: dy), (lambda: dy)


def _quantized_grad(
    op: Any, ctx: OperationContext, grad_output: torch.Tensor, dtype: torch.dtype, group: Group
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Functions that return the quantized gradient with a rowwise, and with a columnwise copy.

    With sequence parallel rows the copies are gathered one after the other: the second one during
    the product that reads the first.
    """
    quantizer = ctx.grad_output_quantizer
    assert quantizer is not None
    x, weight, _ = LinearSaved(*ctx.saved_tensors)
    readers = (("rowwise", weight), ("columnwise", x))
    usages = tuple(usage for usage, reader in readers if reader is not None)
    quantizer = quantizer.with_usage(rowwise=weight is not None, columnwise=x is not None)
    if not op._parallel.gathers_grad:
        dy = quantized(grad_output, dtype, quantizer)
        _note_gradient(op, dy, x, weight)
        return (
            lambda: readable(dy, "rowwise", quantizer),
            lambda: readable(dy, "columnwise", quantizer),
        )
    is_given = isinstance(grad_output, QuantizedTensor)
    source = grad_output if is_given else cast(grad_output, dtype)
    rows = quantized_rows(source, quantizer, usages, group, reduces_amaxes=ctx.reduces_amaxes)
    if rows is None:
        whole = quantizer(start_all_gather(plain(source, dtype), group).wait())
        _note_gradient(op, whole, x, weight)
        return (lambda: whole), (lambda: whole)
    _note_gradient(op, rows.tensor, x, weight)
    if len(usages) == 1 or makes_columns(rows.tensor._quantizer):
        both = functools.cache(rows.start(usages, group).wait)
        return both, both
    first, second = (rows.start((usage,), group) for usage in usages)
    return first.wait, second.wait


def _note_gradient(op: BasicLinear, dy: QuantizedTensor, x: object, weight: object) -> None:
    """Show an inspector the gradient that this rank has quantized, and saved operands."""
    if observing.now is not None:
        note_operands(op, grad_output=dy)
        note_operands(op, input=x, weight=weight, only_new=True)
