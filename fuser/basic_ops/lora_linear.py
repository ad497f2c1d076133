"""LoRALinear: a linear with a frozen weight, and adapters of low rank that are trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fuser import gemm
from fuser.basic_ops.basic_linear import BasicLinear
from fuser.basic_ops.linear_epilogues import added_gemm, addend_refusal
from fuser.basic_ops.linear_operands import LinearSaved, plain
from fuser.communication import GroupArgument
from fuser.errors import InputError, StateError
from fuser.functional import pointwise
from fuser.functional.lazy import LazyTensor, materialize
from fuser.functional.random_seeds import dropout_seed
from fuser.module_calls import module_calls
from fuser.op import (
    Grads,
    OperationContext,
    ParallelMode,
    cast,
    check_parameter,
    check_sizes,
    default_device,
    default_dtype,
    write_output,
)
from fuser.specs import PlanKey, QuantSpec, TensorSpec
from fuser.tensors import QuantizedTensor
from fuser.tensors.sharding import is_distributed


class LoRASaved(NamedTuple):
    """What backward reads; None for what it does not."""

    x: None
    """The input for the gradient of the weight, which is frozen."""
    weight: Any
    scale_of_weight: torch.Tensor | None
    input: torch.Tensor | None
    """The input in the dtype of the adapters, for the gradient of ``lora_A``."""
    seed: torch.Tensor | None
    hidden: torch.Tensor | None
    """``dropout(x) @ A.T``, ``[..., rank]``."""
    a: torch.Tensor | None
    b: torch.Tensor | None


class LoRAState(NamedTuple):
    """The scale and the probability, as the forward found them, and the dtype of the adapters."""

    scale: float
    dropout_probability: float
    dtype: torch.dtype


class LoRALinear(BasicLinear):
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
        check_sizes("LoRALinear", **sizes)
        if not 0 <= dropout <= 1:
            raise InputError(f"LoRALinear got dropout={dropout}; it is between 0 and 1.")
        super().__init__(in_features, out_features, device=device, dtype=dtype)
        self.weight.requires_grad_(False)
        factory: dict[str, Any] = {"device": default_device(device), "dtype": self.weight.dtype}
        if bias:
            frozen = torch.nn.Parameter(torch.empty(out_features, **factory), requires_grad=False)
            self.register_parameter("bias", frozen)
        else:
            self.register_parameter("bias", None)
        factory["dtype"] = default_dtype(adapter_dtype or self.weight.dtype)
        self.lora_A = torch.nn.Parameter(torch.empty(rank, in_features, **factory))
        self.lora_B = torch.nn.Parameter(torch.empty(out_features, rank, **factory))
        self.parameter_names = tuple(
            name for name in ("weight", "bias", "lora_A", "lora_B") if name != "bias" or bias
        )
        self.rank = rank
        self.alpha = float(rank if alpha is None else alpha)
        self.dropout_probability = dropout
        self._are_trained = (True, True)  # A and B, before they were merged
        self.is_merged: bool = False
        """Whether the adapters' product is in the weight; see :meth:`merge`."""
        self._reset([name for name in self.parameter_names[1:] if not self._is_on_meta(name)])

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Module,
        *,
        rank: int,
        alpha: float | None = None,
        dropout: float = 0.0,
        adapter_dtype: torch.dtype | None = None,
    ) -> LoRALinear:
        """Adapters for a linear with ``weight`` and ``bias``, of torch or of fuser.

        The parameters of ``linear`` are used, and frozen; nothing is copied. Of a quantized weight
        that makes one copy from the other, the columnwise copy is freed.

        Raises
        ------
        InputTypeError, InputError
            As the constructor, or if ``linear`` has no weight of two dimensions. Nothing has
            changed then.
        """
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
        out_features, in_features = weight.shape
        adapted = cls(
            in_features,
            out_features,
            rank=rank,
            alpha=alpha,
            dropout=dropout,
            bias=bias is not None,
            device="meta",
            dtype=weight.dtype,
            adapter_dtype=adapter_dtype,
        )
        adapted.weight = _frozen(weight)
        if bias is not None:
            adapted.bias = _frozen(bias)
        for name in ("lora_A", "lora_B"):
            like = getattr(adapted, name)
            setattr(adapted, name, torch.nn.Parameter(torch.empty_like(like, device=weight.device)))
        _hold_once(adapted.weight)
        adapted._reset(["lora_A", "lora_B"])
        return adapted

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
        merged = ", merged" if self.is_merged else ""
        return (
            f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha:g}, "
            f"dropout={self.dropout_probability:g}, bias={self.bias is not None}{merged}"
        )

    def plain_names(self) -> dict[str, str | None]:
        """Those of PEFT's files: ``lora_A.weight`` and ``lora_B.weight``."""
        names = {name: f"{name}.weight" for name in ("lora_A", "lora_B")}
        return {**super().plain_names(), **names}

    # -- first values ---------------------------------------------------------

    def reset_parameters(self) -> None:
        """Initialise W and the bias as torch.nn.Linear and fuser.Linear do, and the adapters.

        The adapters as :meth:`reset_adapters`. Parameters on meta are allocated first.
        """
        super().reset_parameters()
        self._reset([name for name in self.parameter_names if name != "weight"])

    def reset_adapters(self) -> None:
        """A Kaiming-uniform, as the weight of torch.nn.Linear, and B zero: the product is zero."""
        self._reset(["lora_A", "lora_B"])

    def _reset(self, names: Sequence[str]) -> None:
        for name in names:
            self.initialise(name, _kaiming if name == "lora_A" else torch.nn.init.zeros_)

    def _is_on_meta(self, name: str) -> bool:
        return bool(getattr(self, name).is_meta)

    def pre_first_fuser_forward(self) -> None:
        super().pre_first_fuser_forward()
        self._reset([name for name in self.parameter_names if self._is_on_meta(name)])

    def as_parameter(self, weight: torch.nn.Parameter, name: str = "weight") -> torch.nn.Parameter:
        fresh = super().as_parameter(weight, name)
        _hold_once(fresh)
        return fresh

    # -- merging --------------------------------------------------------------

    @property
    def scale(self) -> float:
        """``alpha / rank``."""
        return self.alpha / self.rank

    def merged_weight(self) -> torch.Tensor:
        """``W + alpha / rank * B @ A``, computed in fp32 and rounded once, in the dtype of W.

        Of a quantized W its values. A ``Linear`` with it computes what this op does in evaluation
        mode, up to the rounding of the weight.

        Raises
        ------
        StateError
            If the parameters are sharded, or are merged already.
        """
        self._check_merge(is_merged=False)
        weight = plain(self.weight.detach(), torch.float32)
        merged: torch.Tensor = (weight.float() + self._product()).to(self.weight.dtype)
        return merged

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapters' product to W, so that a forward computes one product.

        W is then :meth:`merged_weight`, and the adapters are frozen. The state of a merged op is
        that of a Linear: it has no adapters, and is not loaded into a merged op.

        Raises
        ------
        StateError
            If W is quantized, which would round the adapters away; if it would have an infinity
            or NaN; if the parameters are sharded, or are merged already.
        """
        if isinstance(self.weight, QuantizedTensor):
            raise StateError(
                f"LoRALinear({self.in_features}, {self.out_features}) has a weight in "
                f"{type(self.weight).__name__}, whose steps are wider than what adapters add. Give "
                "merged_weight() to a Linear."
            )
        merged = self.merged_weight()
        if not merged.isfinite().all():
            raise StateError(
                f"The merged weight of LoRALinear({self.in_features}, {self.out_features}) is not "
                f"finite in {merged.dtype}; nothing was merged."
            )
        self.weight.copy_(merged)
        self._are_trained = (self.lora_A.requires_grad, self.lora_B.requires_grad)
        self._set_merged(True, (False, False))

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract the adapters' product from W, in fp32, and round once.

        W is then within one unit in the last place of the merged value from what it was before
        :meth:`merge`: keep a copy where the bits count. The adapters are trained as before it.

        Raises
        ------
        StateError
            If it is not merged.
        """
        self._check_merge(is_merged=True)
        self.weight.copy_((self.weight.float() - self._product()).to(self.weight.dtype))
        self._set_merged(False, self._are_trained)

    def _product(self) -> torch.Tensor:
        a, b = self.lora_A.detach().float(), self.lora_B.detach().float()
        return self.scale * (b @ a)

    def _check_merge(self, *, is_merged: bool) -> None:
        if self.is_merged is not is_merged:
            raise StateError(
                f"LoRALinear({self.in_features}, {self.out_features}) is "
                f"{'merged already' if self.is_merged else 'not merged'}."
            )
        if any(map(is_distributed, self.parameters())):
            raise StateError("A sharded LoRALinear is not merged: call unshard() of its module.")

    def _set_merged(self, is_merged: bool, are_trained: tuple[bool, bool]) -> None:
        self.is_merged = is_merged
        for adapter, is_trained in zip((self.lora_A, self.lora_B), are_trained, strict=True):
            adapter.requires_grad_(is_trained)
        module_calls.change()  # plans depend on it

    def implementation(self) -> tuple[Any, ...]:
        return (*super().implementation(), self.is_merged)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_merged:
            del destination[f"{prefix}lora_A"], destination[f"{prefix}lora_B"]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._take_plain_names(state_dict, prefix)
        if self.is_merged:
            *_, errors = args
            errors.append(f"{prefix}lora_A and lora_B are merged into the weight: unmerge() first.")
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # -- questions of the planner ---------------------------------------------

    @property
    def draws_seed(self) -> bool:  # type: ignore[override]
        return self.dropout_probability > 0 and not self.is_merged

    @property
    def saves_input(self) -> bool:  # type: ignore[override]
        """The gradient of ``lora_A`` reads the input."""
        return self.lora_A.requires_grad and not self.is_merged

    def kept_input(self, key: PlanKey) -> QuantSpec | None:
        """None: it is kept in the dtype of the adapters."""
        return None

    def saved_bytes(self, spec: TensorSpec) -> int:
        """Those of ``hidden``."""
        if self.is_merged:
            return 0
        return math.prod(spec.shape[:-1]) * self.rank * self.lora_A.dtype.itemsize

    def takes_rebuilt_input(self, key: PlanKey) -> bool:
        (op,) = key.ops
        return not self.is_merged and op.requires_grad and op.params[-2].requires_grad

    def take_rebuilt_input(self, ctx: OperationContext, values: torch.Tensor | LazyTensor) -> None:
        saved, state = LoRASaved(*ctx.saved_tensors), ctx.state
        ctx.saved_tensors = saved._replace(input=cast(materialize(values), state.dtype))

    def input_quantization(self, key: PlanKey) -> QuantSpec | None:
        """None: the adapters read the values too, and the op quantizes for itself."""
        return None

    def grad_output_quantization(self, key: PlanKey) -> QuantSpec | None:
        """None, for the same reason."""
        return None

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        if self.weight.requires_grad:
            raise InputError(
                f"{self._sized()} has a weight that requires a gradient, and trains its adapters "
                "alone: call weight.requires_grad_(False), or give merged_weight() to a Linear."
            )
        shapes = {
            "bias": (self.out_features,),
            "lora_A": (self.rank, self.in_features),
            "lora_B": (self.out_features, self.rank),
        }
        for name in self.parameter_names[1:]:
            check_parameter(self._sized(), name, getattr(self, name), shapes[name])
        return super().output_spec(spec, extras, autocast)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return tuple(self._kernels(side, key))

    def _kernels(self, side: str, key: PlanKey) -> Iterator[str]:
        (op,), (base, *_) = key.ops, (*super().kernels(side, key), "")
        *of_bias, of_a, of_b = (param.requires_grad for param in op.params[1:])
        drops = self.training and self.draws_seed
        has_bias = len(op.params) == 4
        if side == "forward":
            yield "addmm" if has_bias and key.recipe is None else base
            if has_bias and not _adds_bias(
                key.recipe is not None, key.autocast_dtype or op.params[0].dtype
            ):
                yield "add"
            if not self.is_merged:
                yield from ("dropout",) if drops else ()
                yield from ("mm", "addmm")
            return
        if not self.is_merged:
            yield from ("dgrad mm",) if of_a or op.input_requires_grad else ()
            yield from ("wgrad mm",) if of_b else ()
            if of_a:
                yield from ("dropout again",) if drops else ()
                yield "wgrad mm"
            if op.input_requires_grad:
                yield "dgrad mm"
                yield from ("dropout_backward",) if drops else ()
        if op.input_requires_grad:
            is_fused = not self.is_merged and addend_refusal(self, "backward", key) is None
            yield added_gemm(self, "backward", key) if is_fused else base
            yield from () if is_fused or self.is_merged else ("add",)
        if any(of_bias):
            yield "sum"

    # -- running --------------------------------------------------------------

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
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
        if self.is_merged:
            return write_output(y, next_op_input_quantizer)
        dtype = ctx.autocast_dtype or self.lora_A.dtype
        a, b = cast(self.lora_A, dtype), cast(self.lora_B, dtype)
        x = cast(plain(input_, dtype), dtype)
        seed, dropped = None, x
        if self.training and self.draws_seed:
            seed = dropout_seed(x.device)
            dropped = materialize(pointwise.dropout(x, seed, self.dropout_probability))
        hidden = gemm.linear(dropped, a)
        if ctx.requires_grad:
            base = LinearSaved(*ctx.to_save or (None, None))
            *_, of_a, of_b = ctx.params_require_grad
            of_x = ctx.input_requires_grad
            ctx.to_save = LoRASaved(
                *(None, base.weight, base.scale_of_weight),
                x if of_a and ctx.keeps_input else None,
                seed if of_a or of_x else None,
                hidden if of_b else None,
                a if of_x else None,
                b if of_a or of_x else None,
            )
            ctx.state = LoRAState(self.scale, self.dropout_probability, dtype)
        y = cast(gemm.linear_add(hidden, b, y, scale=self.scale), y.dtype)
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
        _, *of_bias, of_a, _ = ctx.params_require_grad
        grad_bias = [_rows_summed(grad_output) if wanted else None for wanted in of_bias]
        if self._ran_merged(ctx):
            grad_input = None
            if ctx.input_requires_grad:
                grad_input, _ = super().op_backward(ctx, grad_output)
            return grad_input, (None, *grad_bias, None, None)
        saved, state = LoRASaved(*ctx.saved_tensors), ctx.state
        dy = cast(plain(grad_output, state.dtype), state.dtype)
        grad_a = grad_b = grad_input = grad_hidden = None
        if saved.b is not None:
            grad_hidden = gemm.dgrad(dy, saved.b, state.scale)
        if saved.hidden is not None:
            grad_b = gemm.wgrad(dy, saved.hidden, state.scale)
        if of_a:
            x = saved.input
            assert x is not None
            if saved.seed is not None:
                x = materialize(pointwise.dropout(x, saved.seed, state.dropout_probability))
            assert grad_hidden is not None
            grad_a = gemm.wgrad(grad_hidden, x)
        if saved.a is not None:
            assert grad_hidden is not None
            added = gemm.dgrad(grad_hidden, saved.a)
            if saved.seed is not None:
                dropped = pointwise.dropout(added, saved.seed, state.dropout_probability)
                added = materialize(dropped)
            ctx.saved_tensors = LinearSaved(None, saved.weight, saved.scale_of_weight)
            grad_input, _ = super().op_backward(ctx, grad_output, addend=added)
        return grad_input, (None, *grad_bias, grad_a, grad_b)

    @staticmethod
    def _ran_merged(ctx: OperationContext) -> bool:
        """Whether the forward of ``ctx`` ran with merged adapters."""
        return ctx.state is None

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


def _kaiming(tensor: torch.Tensor) -> None:
    torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    """The parameter itself, without a gradient; one over the memory of a tensor."""
    if not isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach(), requires_grad=False)
    tensor.requires_grad_(False)
    return tensor


def _hold_once(weight: torch.Tensor) -> None:
    """Drop the columnwise copy of a quantized weight if it can be made from the rowwise one."""
    if isinstance(weight, QuantizedTensor) and weight.derives_columnwise and weight._has("rowwise"):
        weight.update_usage(columnwise_usage=False)
