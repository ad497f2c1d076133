"""LoRALinear and LoRAGroupedLinear: frozen weights, and adapters of low rank that are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fuser import gemm
from fuser.basic_ops.basic_linear import BasicLinear
from fuser.basic_ops.grouped_linear import GroupedLinear
from fuser.basic_ops.grouped_products import GroupedProduct
from fuser.basic_ops.linear_epilogues import added_gemm, addend_refusal
from fuser.basic_ops.linear_operands import plain
from fuser.basic_ops.lora_adapters import LoRAAdapters, check_adapters
from fuser.communication import GroupArgument, is_distributed
from fuser.errors import InputError
from fuser.gemm import grouped
from fuser.gemm.grouped import GroupProducts, Groups
from fuser.op import (
    Contexts,
    Grads,
    OperationContext,
    ParallelMode,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    cast,
    check_parameter,
    default_device,
    default_dtype,
    write_output,
)
from fuser.specs import PlanKey
from fuser.tensors import QuantizedTensor, Quantizer


class LoRALinear(LoRAAdapters, BasicLinear):
    """``y = x @ W.T + bias + alpha / rank * dropout(x) @ A.T @ B.T``.

    The low-rank adapters of Hu et al. 2021 (LoRA). The GEMM with B adds to the output of the
    GEMM with W, and in backward the GEMM with W to the adapters' gradient of x. W and the bias are
    frozen: backward computes the gradients of x, A and B. A recipe quantizes W and the input of
    its product; the adapters' products run in the adapters' dtype, or that of ``torch.autocast``.

    Made under ``quantized_model_init``, W is stored quantized. In formats that make one copy from
    the other, FP8 with one scale a tensor and blocks of 128x128, W has the rowwise copy alone, and
    each backward makes and frees the other one. In the other formats it has two copies, or one
    if the recipe has ``backward_override="dequantized"``: backward then multiplies its values.

    Parameters
    ----------
    in_features, out_features
        Last dimension of the input and of the output.
    rank
        Rows of ``lora_A``, shape ``[rank, in_features]``, and columns of ``lora_B``, shape
        ``[out_features, rank]``.
    alpha
        The adapters' product is multiplied by ``alpha / rank``; None for 1.
    dropout
        The probability with which elements of the adapters' input are zero in training.
    bias
        Whether there is a bias, shape ``[out_features]``.
    device
        Of the parameters.
    dtype, adapter_dtype
        Of W and the bias, and of the adapters; None for torch's default, and for ``dtype``.

    Raises
    ------
    InputTypeError
        On a size or a rank that is not an integer.
    InputError
        On one that is not positive, a probability that is not in [0, 1], or at a call if W
        requires a gradient.
    """

    bias: torch.nn.Parameter | None
    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter

    def __init__(
        self,
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
    ) -> None:
        sizes = {"in_features": in_features, "out_features": out_features, "rank": rank}
        check_adapters("LoRALinear", dropout, **sizes)
        super().__init__(in_features, out_features, device=device, dtype=dtype)
        factory: dict[str, Any] = {"device": default_device(device), "dtype": self.weight.dtype}
        of_bias = torch.nn.Parameter(torch.zeros(out_features, **factory)) if bias else None
        self.register_parameter("bias", of_bias)
        self.parameter_names = ("weight", "bias") if bias else ("weight",)
        factory["dtype"] = default_dtype(adapter_dtype or self.weight.dtype)
        self._add_adapters(rank, alpha, dropout, is_one=True, **factory)

    @classmethod
    def _options_of(cls, linear: object) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        weight, bias = (getattr(linear, name, None) for name in ("weight", "bias"))
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise InputError(
                f"LoRALinear.from_linear takes a linear with a weight [out_features, in_features]; "
                f"got a {type(linear).__name__}."
            )
        if is_distributed(weight):
            raise InputError(
                "LoRALinear.from_linear got a sharded weight: make it first, and then shard it."
            )
        parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        sizes = dict(zip(("out_features", "in_features"), weight.shape, strict=True))
        return parameters, {**sizes, "bias": bias is not None, "dtype": weight.dtype}

    def shard(
        self,
        mode: ParallelMode | None,
        group: GroupArgument = None,
        sequence_parallel: bool = False,
    ) -> None:
        """Refuse every mode: the features of a LoRALinear are on one rank."""
        if mode is not None:
            raise InputError(
                f"LoRALinear is not {mode} parallel: its features are on one rank. Shard a Linear, "
                "or give this one to fully_shard."
            )
        super().shard(mode, group, sequence_parallel)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}"

    def plain_names(self) -> dict[str, str | None]:
        """Those of PEFT's files: ``lora_A.weight`` and ``lora_B.weight``."""
        names = {name: f"{name}.weight" for name in ("lora_A", "lora_B")}
        return {**super().plain_names(), **names}

    # -- first values ---------------------------------------------------------

    def reset_parameters(self) -> None:
        """Initialise W and the bias as torch.nn.Linear and fuser.Linear do, and the adapters.

        The adapters as :meth:`reset_adapters`. Parameters on meta are allocated first.
        """
        self._reset(self.parameter_names)

    def pre_first_fuser_forward(self) -> None:
        super().pre_first_fuser_forward()
        self._reset([name for name in self.parameter_names if getattr(self, name).is_meta])

    # -- questions of the planner ---------------------------------------------

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for name in self.parameter_names[1:]:
            check_parameter(self._sized(), name, getattr(self, name), self._size(name))

    def _kernels(self, side: str, key: PlanKey, base: tuple[str, ...]) -> Iterator[str]:
        (op,), (product, *_) = key.ops, (*base, "")
        of_bias = [param.requires_grad for param in op.params[1:-2]]
        if side == "forward":
            has_bias = len(op.params) == 4
            yield "addmm" if has_bias and key.recipe is None else product
            if has_bias and not _adds_bias(
                key.recipe is not None, key.autocast_dtype or op.params[0].dtype
            ):
                yield "add"
        yield from self._adapter_kernels(side, key, lambda name: (name,), adds=False)
        if side == "backward" and op.input_requires_grad:
            is_fused = not self.is_merged and addend_refusal(self, "backward", key) is None
            yield added_gemm(self, "backward", key) if is_fused else product
            yield from () if is_fused or self.is_merged else ("add",)
        if side == "backward" and any(of_bias):
            yield "sum"

    # -- running --------------------------------------------------------------

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """``is_first_microbatch`` is as in ``BasicLinear``."""
        dtype = ctx.autocast_dtype or self.weight.dtype
        bias = None if self.bias is None else cast(self.bias, dtype)
        is_fused = _adds_bias(ctx.has_recipe, dtype)
        y = self.matmul(
            ctx, input_, bias if is_fused else None, is_first_microbatch=is_first_microbatch
        )
        if bias is not None and not is_fused:
            y = y + bias
        if not self.is_merged:
            y = self.add_adapters(ctx, gemm, input_, y)
        return write_output(y, next_op_input_quantizer)

    @property
    def can_defer_wgrad(self) -> bool:
        """No: the adapters' gradients share a product with the input's."""
        return False

    def op_backward(
        self,
        ctx: OperationContext,
        grad_output: torch.Tensor,
        scale: float = 1.0,
        addend: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, Grads]:
        """``dy @ W + scale * dy @ B @ A``, and the gradients of the bias and of A and B."""
        assert scale == 1.0  # no fusion runs this backward
        assert addend is None
        _, *of_bias, _, _ = ctx.params_require_grad
        grad_bias = [_rows_summed(grad_output) if is_needed else None for is_needed in of_bias]
        added = grad_a = grad_b = grad_input = None
        if ctx.adapters is not None:  # else it ran merged
            saved = self.take_saved(ctx)
            added, grad_a, grad_b = self.adapters_backward(ctx, gemm, saved, grad_output)
        if ctx.input_requires_grad:
            grad_input, _ = super().op_backward(ctx, grad_output, addend=added)
        return grad_input, (None, *grad_bias, grad_a, grad_b)

    def _saved_weight(
        self, ctx: OperationContext, weight: torch.Tensor, qw: QuantizedTensor, is_new: bool
    ) -> torch.Tensor:
        is_made = not qw._has("columnwise") and qw.derives_columnwise
        if qw is weight and is_made and ctx.backward_override is None:
            return qw.with_usage("rowwise")  # backward makes the other copy, and frees it
        return super()._saved_weight(ctx, weight, qw, is_new)


def _adds_bias(has_recipe: bool, dtype: torch.dtype) -> bool:
    """Whether the product with the weight takes the bias: quantized GEMMs do not in fp32."""
    return not (has_recipe and dtype == torch.float32)


def _rows_summed(dy: torch.Tensor) -> torch.Tensor:
    """The sum over all dimensions but the last."""
    dy = plain(dy, dy.dtype)
    return dy.reshape(-1, dy.shape[-1]).sum(0)


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
    def _options_of(cls, linear: object) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
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
