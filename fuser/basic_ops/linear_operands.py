"""Quantized operands of a linear: the copies that its GEMMs read, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fuser.errors import StateError
from fuser.formats import NumberFormat
from fuser.gemm.native import NativeGemm, native_gemm
from fuser.op import BasicOperation, OperationContext
from fuser.precision.availability import USAGES
from fuser.precision.delayed_scaling import DelayedScales
from fuser.recipe import CustomRecipe, DelayedScaling, Recipe
from fuser.specs import PlanKey, QuantSpec
from fuser.tensors import Float8Quantizer, Float8Tensor, QuantizedTensor, Quantizer
from fuser.tensors.base import note_backward_read

# -- planning ---------------------------------------------------------------------

FormatOf = Callable[[Recipe, str], NumberFormat]
"""The format of the tensor with a role, such as ``"weight"``, under a recipe."""


def operands_of(side: str, key: PlanKey, format_of: FormatOf) -> dict[str, QuantSpec]:
    """Format and usages of each tensor that a linear quantizes on ``side``, by role.

    Empty without a recipe, and for a backward in high precision. ``key`` is narrowed to the
    linear, whose first parameter is its weight.
    """
    recipe, (op,) = key.recipe, key.ops
    if recipe is None:
        return {}
    wants_dgrad, wants_wgrad = op.input_requires_grad, op.params[0].requires_grad
    is_quantized_backward = recipe.quantizes_backward
    if side == "backward":
        copies = {"grad_output": (wants_dgrad, wants_wgrad)} if is_quantized_backward else {}
    else:
        copies = {
            "input": (True, wants_wgrad and is_quantized_backward and op.keeps_input),
            "weight": (True, wants_dgrad and is_quantized_backward and op.keeps_weight),
        }
    return {
        role: QuantSpec(format_of(recipe, role), rowwise, columnwise)
        for role, (rowwise, columnwise) in copies.items()
    }


def kept_copy(op: BasicOperation, role: str, key: PlanKey) -> QuantSpec | None:
    """The copy of a quantized operand that backward reads; None if it reads the values."""
    (op_key,), recipe = key.ops, key.recipe
    if recipe is None or recipe.backward_override == "high_precision":
        return None
    if role == "weight" and not (op_key.input_requires_grad and op_key.params[0].format is None):
        return None
    is_dequantized = recipe.backward_override == "dequantized"
    form = op.quantizer_format(recipe, role)
    return QuantSpec(form, rowwise=is_dequantized, columnwise=not is_dequantized)


def quantizes_again(op: BasicOperation, recipe: Recipe | None, index: int) -> bool:
    """Whether backward can make the bytes of tensor ``index`` of a quantized forward again."""
    if recipe is None or isinstance(recipe, CustomRecipe):
        return False
    quantizer = op.constant_quantizer(recipe, "forward", index)
    if quantizer is None:
        return isinstance(recipe, DelayedScaling)
    return quantizer.is_repeatable


def takes_rebuilt_input(op: BasicOperation, key: PlanKey) -> bool:
    """Whether backward can read the input of a linear that is computed again."""
    (op_key,), recipe = key.ops, key.recipe
    # Not those of the op, which in a graph is without its parameters.
    weights = op_key.params[: op.main_grad_count]
    if not (op_key.requires_grad and any(weight.requires_grad for weight in weights)):
        return False
    is_plain = recipe is None or recipe.backward_override == "high_precision"
    return is_plain or quantizes_again(op, recipe, 0)


def quantizes_weight_again(op: BasicOperation, key: PlanKey) -> bool:
    """Whether backward can quantize the weight of a linear, a parameter of values, again."""
    (op_key,), recipe = key.ops, key.recipe
    is_read = op_key.requires_grad and op_key.input_requires_grad
    if recipe is None or recipe.backward_override == "high_precision":
        return False
    return is_read and op_key.params[0].format is None and quantizes_again(op, recipe, 1)


def native_row(a: str, b: str, key: PlanKey, format_of: FormatOf) -> NativeGemm | None:
    """The native GEMM for the tensors of two roles; None if the product is emulated."""
    assert key.recipe is not None
    (op,) = key.ops[:1]
    arrives = {
        "input": None if op.input is None else op.input.format,
        "weight": op.params[0].format,
        "grad_output": None if op.grad_output is None else op.grad_output.format,
    }
    first, second = (arrives[role] or format_of(key.recipe, role) for role in (a, b))
    if first.multiple != second.multiple:
        return None
    usages = USAGES[a, b]
    formats = first.of(usages[0]), second.of(usages[1])
    return native_gemm(*formats, key.arch, is_elsewhere=key.is_elsewhere)


def gemm_name(name: str, a: str, b: str, key: PlanKey, format_of: FormatOf) -> str:
    """``name``, such as ``"dgrad mm"``, with the GEMM that multiplies the tensors of two roles."""
    row = native_row(a, b, key, format_of)
    if row is None:
        assert key.recipe is not None
        reads = zip((a, b), USAGES[a, b], strict=True)
        if all(format_of(key.recipe, role).of(usage).is_unquantized for role, usage in reads):
            return name
        return f"{name} (emulated)"
    return f"{name.removesuffix('mm')}{row.name} (native)"


# -- running ----------------------------------------------------------------------


class OperandQuantizers(NamedTuple):
    """The quantizers of a linear's operands, with the usages that are read.

    With the op, since an op that contains linears may run them with its own context.
    """

    op: BasicOperation
    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer | None


class LinearSaved(NamedTuple):
    """The operands that a linear's backward reads; None for those that it does not."""

    x: Any
    """Of an input that backward computes again: what its quantizer needs for the same bytes."""
    weight: Any
    scale_of_weight: torch.Tensor | None = None
    """Of a weight that backward quantizes again: what its quantizer needs for the same bytes."""


def quantized(tensor: torch.Tensor, dtype: torch.dtype, quantizer: Quantizer) -> QuantizedTensor:
    """``tensor`` quantized from ``dtype``; as it is if it arrives quantized."""
    if isinstance(tensor, QuantizedTensor):
        return tensor
    return quantizer(tensor if tensor.dtype is dtype else tensor.to(dtype))


def readable(tensor: QuantizedTensor, usage: str, quantizer: Quantizer) -> QuantizedTensor:
    """The tensor if it has the ``"rowwise"`` or ``"columnwise"`` copy, else one that has it."""
    return tensor if tensor._has(usage) else saved_operand(tensor, usage, quantizer)


def saved_operand(tensor: QuantizedTensor, usage: str, quantizer: Quantizer) -> QuantizedTensor:
    """The ``"rowwise"`` or ``"columnwise"`` copy of a tensor alone.

    If the tensor lacks it, and it cannot be made from the other copy, the values are quantized
    again. A sharded parameter gathers it for backward.
    """
    note_backward_read(tensor, usage)
    try:
        return tensor.with_usage(usage)
    except StateError:
        needed = {name: name == usage for name in ("rowwise", "columnwise")}
        return quantizer.with_usage(**needed)(tensor)


def operand_of_backward(
    ctx: OperationContext, operand: QuantizedTensor, quantizer: Quantizer, *, is_new: bool
) -> QuantizedTensor:
    """The copy of a quantized operand that backward reads.

    The tensor itself, without an alias for one of its copies, if it was quantized in this call, and
    no other code refers to it: a repeatable quantizer makes new tensors.
    """
    if is_new and quantizer.is_repeatable:
        return operand
    is_dequantized = ctx.backward_override == "dequantized"
    return saved_operand(operand, "rowwise" if is_dequantized else "columnwise", quantizer)


def original(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unquantized source of ``tensor`` if it holds one, else the tensor; in ``dtype``."""
    source = getattr(tensor, "high_precision_source", None)
    tensor = tensor if source is None else source
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of a quantized tensor in ``dtype``; any other tensor unchanged."""
    return tensor.dequantize(dtype=dtype) if isinstance(tensor, QuantizedTensor) else tensor


def bind(weight: QuantizedTensor, state: DelayedScales, index: int) -> None:
    """Give a delayed-scaling weight, the tensor ``index`` of an op's forward, the op's scales.

    The state changes when an op is copied, loaded or moved to another device.
    """
    carried, of_op = weight._quantizer, state.parameter_quantizer(index)
    if of_op is None or not isinstance(carried, Float8Quantizer) or carried.scale is of_op.scale:
        return
    # It is the shard that is written.
    written = weight if weight._gathering is None else weight._gathering.shard
    assert isinstance(written, Float8Tensor)
    state.keep_scale(index, written._scale_inv)
    weight._quantizer = of_op.with_usage(rowwise=carried.rowwise, columnwise=carried.columnwise)
    written._quantizer = weight._quantizer
