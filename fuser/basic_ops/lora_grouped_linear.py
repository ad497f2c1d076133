"""LoRAGroupedLinear: linears of groups with frozen weights, and adapters that are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fuser.basic_ops.grouped_linear import GroupedLinear
from fuser.basic_ops.grouped_products import GroupedProduct
from fuser.basic_ops.lora_adapters import LoRAAdapters, check_adapters
from fuser.communication import is_distributed
from fuser.errors import InputError
from fuser.gemm import grouped
from fuser.gemm.grouped import GroupProducts, Groups
from fuser.op import (
    Contexts,
    OperationContext,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    default_device,
    default_dtype,
    write_output,
)
from fuser.specs import PlanKey


class LoRAGroupedLinear(LoRAAdapters, GroupedLinear):
    """``y_g = x_g @ W_g.T + bias_g + alpha / rank * dropout(x_g) @ A_g.T @ B_g.T``.

    A :class:`GroupedLinear` whose weights and biases are frozen, with adapters for each group, such
    as an expert; the extra inputs are those of that op. The adapters are parameters ``lora_A0``
    ``[rank, in_features]``, ``lora_A1`` and so on, then ``lora_B0`` ``[out_features, rank]`` and so
    on; each kind is views of one buffer. A recipe quantizes the weights and the input of their
    products, and weights are held as in :class:`LoRALinear`: in formats that make one copy from the
    other they have one, from which each backward makes the other.

    The adapters' products run where those of :class:`GroupedLinear` would without a recipe: with 16
    bits on a Hopper or Blackwell GPU all groups at once, and split sizes are not read. With fp32
    adapters on a GPU everything runs group by group.

    Parameters
    ----------
    num_groups
        The number of groups, such as experts.
    in_features, out_features
        Last dimension of the input and of the output.
    bias
        Whether each group has a bias, shape ``[out_features]``.
    device
        Of the parameters.
    rank
        Rows of each ``lora_A`` and columns of each ``lora_B``.
    alpha
        The adapters' product is multiplied by ``alpha / rank``; None for 1.
    dropout
        The probability with which elements of the adapters' input are zero in training.
    dtype, adapter_dtype
        Of weights and biases, and of the adapters; None for torch's default, and for ``dtype``.
    single_grouped_weight
        One parameter ``weight`` for all groups, and so one ``lora_A`` ``[num_groups, rank,
        in_features]`` and one ``lora_B`` ``[num_groups, out_features, rank]``.
    single_grouped_bias, scale_bias
        As in :class:`GroupedLinear`.

    Raises
    ------
    InputTypeError, InputError
        As the constructors of these two ops; at a call if a weight requires a gradient.
    """

    can_quantize_output = ("forward",)

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        adapter_dtype: torch.dtype | None = None,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        scale_bias: bool = False,
    ) -> None:
        sizes = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        check_adapters("LoRAGroupedLinear", dropout, **sizes, rank=rank)
        of_adapters = default_dtype(adapter_dtype or dtype)
        super().__init__(
            num_groups,
            in_features,
            out_features,
            bias=bias,
            device=device,
            dtype=dtype,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            scale_bias=scale_bias,
        )
        options: dict[str, Any] = {"device": default_device(device), "dtype": of_adapters}
        self._add_adapters(rank, alpha, dropout, is_one=single_grouped_weight, **options)

    @classmethod
    def _options_of(cls, linear: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if not isinstance(linear, GroupedLinear) or isinstance(linear, LoRAAdapters):
            kind = type(linear)
            raise InputError(
                "LoRAGroupedLinear.from_linear takes a fuser.GroupedLinear, an op without "
                f"adapters; got a {kind.__module__}.{kind.__qualname__}."
            )
        if any(map(is_distributed, linear.parameters())):
            raise InputError(
                "LoRAGroupedLinear.from_linear got sharded weights: make it first, and then shard "
                "it."
            )
        flags = ("scale_bias", "single_grouped_weight", "single_grouped_bias")
        same = ("num_groups", "in_features", "out_features", *flags)
        options = {name: getattr(linear, name) for name in same}
        parameters = {name: getattr(linear, name) for name in linear.parameter_names}
        return parameters, {**options, "bias": linear.has_bias, "dtype": linear._dtype}

    @property
    def _groups(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.num_groups,)

    def _reset(self, names: Iterable[str]) -> None:
        super()._reset(sorted(names, key=lambda name: name not in self._adapter_names))

    # -- questions of the planner ---------------------------------------------

    def runs_at_once(self, key: PlanKey) -> bool:
        dtype = self._adapter_dtype(key.autocast_dtype)
        is_wide = key.arch is not None and dtype is torch.float32 and not self.is_merged
        return super().runs_at_once(key) and not is_wide

    def _kernels(self, side: str, key: PlanKey, base: tuple[str, ...]) -> Iterator[str]:
        count, is_one = self.num_groups, self.runs_at_once(key)
        has_one_dtype = self._parts("lora_A")[0].dtype is self._dtype or key.autocast_dtype

        def named(name: str) -> tuple[str, ...]:
            if name.endswith("addmm") and (is_one or not has_one_dtype):
                return (*named(name.replace("addmm", "mm")), "add")
            return (f"grouped {name} of {count}" if is_one else f"{count} x {name}",)

        yield from base
        yield from self._adapter_kernels(side, key, named, adds=True)

    # -- running --------------------------------------------------------------

    def _operand(
        self, ctx: OperationContext, kind: str, dtype: torch.dtype, *, is_read: bool
    ) -> torch.Tensor:
        values = self._stacked(kind, dtype)
        if not is_read:
            return values
        self.note_versions(ctx, kind)
        # Parameters of which it is a view are apart in graphs.
        return values.clone() if self.runs_in_graph and not self._is_one(kind) else values

    def _reads_sizes(self, ctx: OperationContext, x: Any) -> bool:
        dtype = self._adapter_dtype(ctx.autocast_dtype)
        is_looped = x.is_cuda and not self.is_merged and not grouped.has_grouped_mm(x.device, dtype)
        return is_looped or super()._reads_sizes(ctx, x)

    def _product(self, ctx: OperationContext, split_sizes: torch.Tensor, x: Any) -> GroupedProduct:
        product = super()._product(ctx, split_sizes, x)
        ctx.groups = product.groups
        return product

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        """``op_kwargs`` are those of ``GroupedLinear``."""
        (ctx,) = ctxs
        y, _ = super().step_forward(ctxs, x, inputs._replace(quantizer=None))
        groups: Groups = ctx.__dict__.pop("groups")
        if not self.is_merged:
            y = self.add_adapters(ctx, GroupProducts(groups._replace(padded=None)), x, y)
        return write_output(y, inputs.quantizer), ()

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (ctx,) = ctxs
        if ctx.adapters is None:  # it ran merged
            dx, grads, extras = super().step_backward(ctxs, dy, grad_extras)
            return dx, (*grads, *(None for _ in self._adapter_names)), extras
        saved = self.take_saved(ctx)
        ends, sizes, *_ = ctx.saved_tensors
        dx, grads, extras = super().step_backward(ctxs, dy, grad_extras)
        products = GroupProducts(Groups(ends, sizes))
        dx, *of_adapters = self.adapters_backward(ctx, products, saved, dy, dx)
        for grad in of_adapters:
            parts = [None] * self.num_groups if grad is None else grad
            grads = (*grads, *([grad] if self.single_grouped_weight else parts))
        pairs = zip(grads, ctx.params_require_grad, strict=True)
        return dx, [grad if is_wanted else None for grad, is_wanted in pairs], extras
