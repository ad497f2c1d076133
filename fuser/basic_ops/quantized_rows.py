"""Rows of a tensor on several ranks: quantized alike on each, and gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fuser.communication import (
    Pending,
    WeakGroup,
    can_gather,
    makes_columns,
    resolved,
    start_all_gather,
    start_quantized_gather,
)
from fuser.op import OperationContext
from fuser.precision.delayed_scaling import reduces_amaxes_over
from fuser.recipe import DelayedScaling, Recipe
from fuser.specs import QuantSpec
from fuser.tensors import Float8Quantizer, QuantizedTensor, Quantizer
from fuser.tensors.base import USAGES


def note_group(ctx: OperationContext, group: Any) -> None:
    """Note in ``ctx`` the group of a forward, which its backward uses, without keeping it.

    Also whether delayed scaling reduces its amaxes over the group, which backward cannot see.
    """
    ctx.group = WeakGroup(group)  # type: ignore[attr-defined]
    ctx.reduces_amaxes = ctx.has_recipe and reduces_amaxes_over(group)


def group_of(ctx: OperationContext, op: str, group: Any | None) -> Any:
    """The group of the forward; ``group``, that of the op, if a user's fused op ran the forward."""
    noted = ctx.__dict__.get("group")
    return resolved(op, group) if noted is None else noted(op)


def travelling(recipe: Recipe | None, spec: QuantSpec | None) -> QuantSpec | None:
    """The form in which ranks send rows that are quantized as ``spec``; None for their values.

    It assumes that no block has rows of two ranks: shapes are not part of a plan.
    """
    if recipe is None or spec is None or recipe.custom():
        return None
    if isinstance(recipe, DelayedScaling) and not recipe.reduce_amax:
        return None
    if spec.format.parts is not None:
        return None
    if spec.format.name == "FP8":  # the columnwise copy is made from the rowwise one
        return replace(spec, rowwise=True, columnwise=False)
    return spec


class Rows(NamedTuple):
    """Rows that one rank holds, quantized so that gathered bytes are those of one tensor."""

    tensor: QuantizedTensor
    """The quantized rows, with the copies that travel."""
    checks_scales: bool
    """Whether scales that rows of all ranks share are compared when they are gathered."""

    def start(self, usages: tuple[str, ...], group: Any) -> Pending[QuantizedTensor]:
        """Start to gather ``usages``, the rowwise and the columnwise copy, of all rows."""
        tensor = self.tensor
        is_made = makes_columns(tensor._quantizer)
        pending = [
            start_quantized_gather(tensor, usage, group, checks_scales=self.checks_scales)
            for usage in dict.fromkeys("rowwise" if is_made else usage for usage in usages)
        ]

        def finish() -> QuantizedTensor:
            whole, *others = (gathering.wait() for gathering in pending)
            for other in others:
                for name, buffer in other.buffers().items():
                    if buffer is not None:
                        setattr(whole, name, buffer)
            if is_made and "columnwise" in usages:
                whole._make_copy("columnwise")
                if "rowwise" not in usages:
                    whole.release("rowwise")
            return whole

        return Pending(finish)


def quantized_rows(
    x: torch.Tensor, quantizer: Any, usages: tuple[str, ...], group: Any, *, reduces_amaxes: bool
) -> Rows | None:
    """The rows ``x`` of this rank quantized, for gathering the copies ``usages``.

    Scales that all rows share are those of the amax over all ranks: reduced here, or by delayed
    scaling, if ``reduces_amaxes``. None if ranks cannot quantize their rows alone: a block would
    have rows of two ranks, or the format reduces no amax; if the quantizer is a user's; or if
    ``x`` is quantized already and its bytes cannot travel.
    """
    arrived = x if isinstance(x, QuantizedTensor) else None
    quantizer = quantizer if arrived is None else arrived._quantizer
    if not isinstance(quantizer, Quantizer):
        return None
    quantizer = quantizer.value()
    if type(quantizer).__module__.partition(".")[0] != "fuser":
        return None  # a user's quantizer may read rows of other ranks, or reduce no amax
    is_delayed = isinstance(quantizer, Float8Quantizer) and reduces_amaxes
    has_equal_scales = arrived is None and (quantizer.reduces_scales or is_delayed)
    is_made = makes_columns(quantizer)
    needed = tuple(dict.fromkeys("rowwise" if is_made else usage for usage in usages))
    rows = x.shape[:-1].numel()
    if not all(can_gather(quantizer, u, rows, has_equal_scales=has_equal_scales) for u in needed):
        return None
    if arrived is not None:
        return Rows(arrived, False) if all(map(arrived._has, needed)) else None
    copies = quantizer.with_usage(rowwise="rowwise" in needed, columnwise="columnwise" in needed)
    return Rows(copies.bound_to(group)(x), is_delayed)


def gathered(
    x: torch.Tensor, quantizer: Any | None, group: Any, *, reduces_amaxes: bool
) -> torch.Tensor:
    """The rows of all ranks, quantized by ``quantizer``; as ``x`` is without one.

    Bytes travel if the ranks can quantize their rows alike, else values.
    """
    copies: Any = quantizer
    if isinstance(x, QuantizedTensor) and not isinstance(quantizer, Quantizer):
        copies = x._usage()
    usages = tuple(usage for usage in USAGES if getattr(copies, usage, False))
    rows, whole = None, x
    if usages:
        rows = quantized_rows(x, quantizer, usages, group, reduces_amaxes=reduces_amaxes)
    if rows is not None:
        whole = rows.start(usages, group).wait()
    else:
        whole = start_all_gather(x, group).wait()
        whole = whole if quantizer is None else quantizer(whole)
    source = getattr(x, "high_precision_source", None)
    if source is not None:
        gathering = start_all_gather(source, group)
        whole.high_precision_source = gathering.wait()  # type: ignore[attr-defined]
    return whole
