"""Adapters of low rank beside the frozen weight of a linear, or the weights of a grouped one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from fuser.basic_ops.grouped_parameters import stacked
from fuser.basic_ops.linear_operands import plain
from fuser.basic_ops.weights import InitialisedWeights
from fuser.communication import is_distributed
from fuser.errors import InputError, StateError
from fuser.functional import pointwise
from fuser.functional.lazy import materialize
from fuser.functional.random_seeds import dropout_seed
from fuser.gemm.grouped import GroupProducts
from fuser.op import OperationContext, Values, cast, check_sizes
from fuser.op.module_calls import module_calls
from fuser.specs import PlanKey, QuantSpec, TensorSpec
from fuser.tensors import QuantizedTensor

Products = ModuleType | GroupProducts
"""The products of a linear: the module ``fuser.gemm``, or the same of groups of rows."""

KINDS = ("lora_A", "lora_B")

Adapted = TypeVar("Adapted", bound="LoRAAdapters")


class AdaptersSaved(NamedTuple):
    """What the adapters' backward reads; None for what it does not."""

    input: torch.Tensor | None
    """The input in the dtype of the adapters, for the gradient of A."""
    seed: torch.Tensor | None
    hidden: torch.Tensor | None
    """``dropout(x) @ A.T``, ``[..., rank]``."""
    a: torch.Tensor | None
    b: torch.Tensor | None


class AdaptersState(NamedTuple):
    """The scale and the probability, as the forward found them, and the dtype of the adapters."""

    scale: float
    dropout_probability: float
    dtype: torch.dtype


class LoRAAdapters(InitialisedWeights):
    """The adapters of a linear, or of a linear for each group, whose weights are frozen.

    They are the last parameters, first all A and then all B. The linear's own class comes after
    this one in the bases of an op.
    """

    in_features: int
    out_features: int
    parameter_names: Sequence[str]
    rank: int
    alpha: float
    dropout_probability: float
    _groups: tuple[int, ...] = ()  # their number, if there are groups
    _adapter_names: tuple[str, ...] = ()
    _are_trained: tuple[bool, ...]  # the adapters, before they were merged
    is_merged: bool = False
    """Whether the adapters' product is in the weight; see :meth:`merge`."""

    def _add_adapters(
        self, rank: int, alpha: float | None, dropout: float, *, is_one: bool, **options: Any
    ) -> None:
        """Freeze the parameters that there are, and add adapters: one of each kind, or many."""
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.requires_grad_(False)
        self.rank = rank
        self.alpha = float(rank if alpha is None else alpha)
        self.dropout_probability = dropout
        for kind in KINDS:
            names = (kind,) if is_one else tuple(f"{kind}{g}" for g in range(*self._groups))
            self._names = {**self._names, kind: names}
            self._adapter_names += names
            self._register(kind, torch.empty(*self._groups, *self._size(kind), **options))
        self.parameter_names = (*self.parameter_names, *self._adapter_names)
        self._are_trained = (True,) * len(self._adapter_names)
        if options["device"].type != "meta":
            self._reset(self._adapter_names)

    @classmethod
    def from_linear(
        cls: type[Adapted],
        linear: torch.nn.Module,
        *,
        rank: int,
        alpha: float | None = None,
        dropout: float = 0.0,
        adapter_dtype: torch.dtype | None = None,
    ) -> Adapted:
        """Adapters for a linear with ``weight`` and ``bias``, of torch or of fuser.

        Those of groups are for a ``GroupedLinear``, whose channels and layout of parameters they
        get. The parameters of ``linear`` are used, and frozen; nothing is copied. Of quantized
        weights that make one copy from the other, the columnwise copy is freed.

        Raises
        ------
        InputTypeError, InputError
            As the constructor; or if ``linear`` has no such weight, has adapters for groups
            already, or is sharded. Nothing has changed then.
        """
        parameters, options = cls._options_of(linear)
        options |= {"rank": rank, "alpha": alpha, "dropout": dropout}
        adapted = cls(adapter_dtype=adapter_dtype, device="meta", **options)  # type: ignore[call-arg]
        for name, parameter in parameters.items():
            setattr(adapted, name, frozen(parameter))
            hold_once(getattr(adapted, name))
        device = next(iter(parameters.values())).device
        for name in adapted._adapter_names:
            like = torch.empty_like(getattr(adapted, name), device=device)
            setattr(adapted, name, torch.nn.Parameter(like))
        adapted._input_channels = dict(getattr(linear, "_input_channels", {}))
        adapted.train(linear.training)
        if not adapted._groups or device.type != "meta":
            adapted.reset_adapters()
        return adapted

    @classmethod
    def _options_of(cls, linear: object) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The parameters of a linear, and arguments for one like it; may refuse it."""
        raise NotImplementedError

    def _size(self, kind: str) -> tuple[int, ...]:
        """The shape of what one linear has."""
        inputs, outputs = self.in_features, self.out_features
        adapters = {"lora_A": (self.rank, inputs), "lora_B": (outputs, self.rank)}
        return {"weight": (outputs, inputs), "bias": (outputs,), **adapters}[kind]

    # -- first values ---------------------------------------------------------

    def reset_adapters(self) -> None:
        """Each A as the weight of torch.nn.Linear, and B zero: the products are zero.

        :meth:`reset_parameters` does it too.
        """
        self._reset(self._adapter_names)

    def as_parameter(self, weight: torch.nn.Parameter, name: str = "weight") -> torch.nn.Parameter:
        fresh = super().as_parameter(weight, name)
        hold_once(fresh)
        return fresh

    def _operand(
        self, ctx: OperationContext, kind: str, dtype: torch.dtype, *, is_read: bool
    ) -> torch.Tensor:
        """The adapters of a kind as the operand of a product; whether backward reads it too."""
        (one,) = self._parts(kind)
        return cast(one, dtype)

    def _sized(self) -> str:
        """The op with its sizes, for messages."""
        sizes = (*self._groups, self.in_features, self.out_features)
        return f"{type(self).__name__}({', '.join(map(str, sizes))})"

    def extra_repr(self) -> str:
        merged = ", merged" if self.is_merged else ""
        return (
            f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha:g}, "
            f"dropout={self.dropout_probability:g}{merged}"
        )

    # -- merging --------------------------------------------------------------

    @property
    def scale(self) -> float:
        """``alpha / rank``."""
        return self.alpha / self.rank

    def merged_weight(self) -> torch.Tensor:
        """``W + alpha / rank * B @ A``, computed in fp32 and rounded once, in the dtype of W.

        Of groups, ``[num_groups, out_features, in_features]``; of a quantized W its values. An op
        without adapters that has this weight computes what this one does in evaluation mode, up to
        the rounding of the weight.

        Raises
        ------
        StateError
            If the parameters are sharded, or are merged already.
        """
        merged = self._merged()
        return stacked(merged) if self._groups and merged[0].dim() == 2 else merged[0]

    def _merged(self) -> list[torch.Tensor]:
        """Each weight with its product."""
        self._check_merge(is_merged=False)
        return [
            (plain(weight.detach(), torch.float32).float() + product).to(weight.dtype)
            for weight, product in self._with_products()
        ]

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapters' products to the weights, so that a forward computes no others.

        A weight is then that of ``merged_weight()``, and the adapters are frozen. The state of a
        merged op is that of a linear: it has no adapters, and is not loaded into a merged op.

        Raises
        ------
        StateError
            If a weight is quantized, which would round the adapters away; if it would have an
            infinity or NaN; if the parameters are sharded, or are merged already.
        """
        weights = self._parts("weight")
        if isinstance(weights[0], QuantizedTensor):
            raise StateError(
                f"{self._sized()} has a weight in {type(weights[0]).__name__}, whose steps are "
                "wider than what adapters add. Give merged_weight() to a linear without adapters."
            )
        every = self._merged()
        if not all(bool(merged.isfinite().all()) for merged in every):
            raise StateError(
                f"The merged weight of {self._sized()} is not finite in {every[0].dtype}; nothing "
                "was merged."
                " Check the adapters, or merge in a wider dtype."
            )
        for weight, merged in zip(weights, every, strict=True):
            weight.copy_(merged)
        self._are_trained = tuple(getattr(self, name).requires_grad for name in self._adapter_names)
        self._set_merged(True, (False,) * len(self._adapter_names))

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract the adapters' products from the weights, in fp32, and round once.

        A weight is then within one unit in the last place of the merged value from what it was
        before :meth:`merge`: keep a copy where the bits count. The adapters are trained as before.

        Raises
        ------
        StateError
            If it is not merged.
        """
        self._check_merge(is_merged=True)
        for weight, product in self._with_products():
            weight.copy_((weight.float() - product).to(weight.dtype))
        self._set_merged(False, self._are_trained)

    def _with_products(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each weight, and ``alpha / rank * B @ A`` in fp32."""
        kinds = [self._parts(kind) for kind in ("weight", "lora_A", "lora_B")]
        for weight, a, b in zip(*kinds, strict=True):
            yield weight, self.scale * (b.detach().float() @ a.detach().float())

    def _check_merge(self, *, is_merged: bool) -> None:
        if self.is_merged is not is_merged:
            raise StateError(
                f"{self._sized()} is {'merged already' if self.is_merged else 'not merged'}."
            )
        if any(map(is_distributed, self.parameters())):
            raise StateError(
                f"A sharded {type(self).__name__} is not merged: call unshard() of its module."
            )

    def _set_merged(self, is_merged: bool, are_trained: Sequence[bool]) -> None:
        self.is_merged = is_merged
        for name, is_trained in zip(self._adapter_names, are_trained, strict=True):
            getattr(self, name).requires_grad_(is_trained)
        module_calls.change()  # plans depend on it

    def implementation(self) -> tuple[object, ...]:
        return (*super().implementation(), self.is_merged)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._adapter_names if self.is_merged else ():
            del destination[prefix + name]

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
        """The gradient of A reads the input."""
        return not self.is_merged and any(a.requires_grad for a in self._parts("lora_A"))

    def kept_input(self, key: PlanKey) -> QuantSpec | None:
        """None: it is kept in the dtype of the adapters."""
        return None

    def saved_bytes(self, spec: TensorSpec) -> int:
        """Those of ``hidden``."""
        if self.is_merged:
            return 0
        itemsize: int = self._parts("lora_A")[0].dtype.itemsize
        return math.prod(spec.shape[:-1]) * self.rank * itemsize

    def takes_rebuilt_input(self, key: PlanKey) -> bool:
        (op,) = key.ops
        of_a, _ = self._wants([param.requires_grad for param in op.params])
        return not self.is_merged and op.requires_grad and of_a

    def take_rebuilt_input(self, ctx: OperationContext, values: Values) -> None:
        _, *others = ctx.saved_tensors
        ctx.saved_tensors = (cast(materialize(values), ctx.adapters.dtype), *others)

    def input_quantization(self, key: PlanKey) -> QuantSpec | None:
        """None: the adapters read the values too, and the op quantizes for itself."""
        return None

    grad_output_quantization = input_quantization

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> Any:
        self._check_parameters()
        return super().output_spec(spec, extras, autocast)

    def _check_parameters(self) -> None:
        """Refuse weights that require a gradient."""
        for name, parameter in zip(self.parameter_names, self._parts("weight"), strict=False):
            if parameter.requires_grad:
                raise InputError(
                    f"{self._sized()} has a {name} that requires a gradient, and trains its "
                    f"adapters alone: call {name}.requires_grad_(False), or give merged_weight() "
                    "to a linear without adapters."
                )

    def _wants(self, require_grad: Sequence[bool]) -> tuple[bool, bool]:
        """Whether a gradient of A, and one of B, is wanted; of the op's parameters."""
        count = len(self._adapter_names) // 2
        return any(require_grad[-2 * count : -count]), any(require_grad[-count:])

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return tuple(self._kernels(side, key, super().kernels(side, key)))

    def _kernels(self, side: str, key: PlanKey, base: tuple[str, ...]) -> Iterator[str]:
        """The kernels of the op, of which ``base`` are those of the linear."""
        raise NotImplementedError

    def _adapter_kernels(
        self, side: str, key: PlanKey, named: Callable[[str], Sequence[str]], *, adds: bool
    ) -> Iterator[str]:
        """The kernels of the adapters; ``named`` are those of a product.

        ``adds``: whether they add to the linear's gradient of the input, and not the other way.
        """
        (op,) = key.ops
        if self.is_merged:
            return
        of_a, of_b = self._wants([param.requires_grad for param in op.params])
        drops = self.training and self.draws_seed
        if side == "forward":
            yield from ("dropout",) if drops else ()
            yield from (*named("mm"), *named("addmm"))
            return
        yield from named("dgrad mm") if of_a or op.input_requires_grad else ()
        yield from named("wgrad mm") if of_b else ()
        if of_a:
            yield from ("dropout again",) if drops else ()
            yield from named("wgrad mm")
        if op.input_requires_grad:
            yield from named("dgrad addmm" if adds and not drops else "dgrad mm")
            yield from ("dropout_backward",) if drops else ()
            yield from ("add",) if adds and drops else ()

    # -- running --------------------------------------------------------------

    def add_adapters(
        self, ctx: OperationContext, products: Products, input_: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """``y`` with the adapters' product; saves what their backward reads before the rest."""
        dtype = self._adapter_dtype(ctx.autocast_dtype)
        of_a, of_b = self._wants(ctx.params_require_grad) if ctx.requires_grad else (False, False)
        of_x = ctx.requires_grad and ctx.input_requires_grad
        a = self._operand(ctx, "lora_A", dtype, is_read=of_x)
        b = self._operand(ctx, "lora_B", dtype, is_read=of_a or of_x)
        x = cast(plain(input_, dtype), dtype)
        seed, dropped = None, x
        if self.training and self.draws_seed:
            seed = dropout_seed(x.device)
            dropped = materialize(pointwise.dropout(x, seed, self.dropout_probability))
        hidden = products.linear(dropped, a)
        if ctx.requires_grad:
            saved = AdaptersSaved(
                x if of_a and ctx.keeps_input else None,
                seed if of_a or of_x else None,
                hidden if of_b else None,
                a if of_x else None,
                b if of_a or of_x else None,
            )
            ctx.to_save = (*saved, *(ctx.to_save or (None, None)))
            ctx.adapters = AdaptersState(self.scale, self.dropout_probability, dtype)
        return cast(products.linear_add(hidden, b, y, scale=self.scale), y.dtype)

    def _adapter_dtype(self, autocast: torch.dtype | None) -> torch.dtype:
        """The dtype of the adapters' products."""
        dtype: torch.dtype = autocast or self._parts("lora_A")[0].dtype
        return dtype

    @staticmethod
    def take_saved(ctx: OperationContext) -> AdaptersSaved:
        """What the adapters saved in ``ctx``, which then has what the linear saved alone."""
        count = len(AdaptersSaved._fields)
        saved, ctx.saved_tensors = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        return AdaptersSaved(*saved)

    def adapters_backward(
        self,
        ctx: OperationContext,
        products: Products,
        saved: AdaptersSaved,
        grad_output: torch.Tensor,
        addend: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of the input, to which ``addend`` is added, and of A and B."""
        of_a, _ = self._wants(ctx.params_require_grad)
        state: AdaptersState = ctx.adapters
        dy = cast(plain(grad_output, state.dtype), state.dtype)
        grad_a = grad_b = grad_input = grad_hidden = None
        if saved.b is not None:
            grad_hidden = products.dgrad(dy, saved.b, state.scale)
        if saved.hidden is not None:
            grad_b = products.wgrad(dy, saved.hidden, state.scale)
        if of_a:
            x = saved.input
            assert x is not None
            if saved.seed is not None:
                x = materialize(pointwise.dropout(x, saved.seed, state.dropout_probability))
            assert grad_hidden is not None
            grad_a = products.wgrad(grad_hidden, x)
        if saved.a is not None:
            assert grad_hidden is not None
            if saved.seed is None:
                return products.dgrad(grad_hidden, saved.a, 1.0, addend), grad_a, grad_b
            grad_input = products.dgrad(grad_hidden, saved.a)
            dropped = pointwise.dropout(grad_input, saved.seed, state.dropout_probability)
            grad_input = materialize(dropped)
            grad_input = grad_input if addend is None else addend.add_(grad_input)
        return grad_input, grad_a, grad_b


def check_adapters(op: str, dropout: float, **sizes: object) -> None:
    """Refuse sizes that are not positive integers, and a probability that is none."""
    check_sizes(op, **sizes)
    if not 0 <= dropout <= 1:
        raise InputError(f"{op} got dropout={dropout}; it is between 0 and 1.")


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    """The parameter itself, without a gradient; one over the memory of a tensor."""
    if not isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach(), requires_grad=False)
    tensor.requires_grad_(False)
    return tensor


def hold_once(weight: torch.Tensor) -> None:
    """Drop the columnwise copy of a quantized weight if it can be made from the rowwise one."""
    if isinstance(weight, QuantizedTensor) and weight.derives_columnwise and weight._has("rowwise"):
        weight.update_usage(columnwise_usage=False)
