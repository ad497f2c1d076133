"""The parameters of a grouped linear, separate ones of each group or one, and their gradients."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch.nn import Parameter

from fuser.basic_ops.linear_operands import plain
from fuser.basic_ops.main_grad import check_main_grad, main_grad_of, stand_in_gradient
from fuser.basic_ops.shared_memory import Versions, are_packed, pack, packed
from fuser.basic_ops.weights import InitialisedWeights
from fuser.errors import InputError, StateError
from fuser.formats import GROUP_TILE
from fuser.op import OperationContext, cast
from fuser.precision.contexts import current_parameter_init
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import DelayedScaling
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.base import note_backward_read
from fuser.tensors.grouped import joined, one_copy
from fuser.tensors.sharding import gathered_by
from fuser.tensors.stacks import stack_quantizer
from fuser.torch_private import without_autocast

Owners = Sequence[torch.Tensor | None]
"""The weights whose gradients go into ``main_grad`` or wait; None for the others."""


class GroupParameters(InitialisedWeights):
    """An op with the weights ``[num_groups, out_features, in_features]``, and biases, of groups.

    They are separate parameters ``weight0``, ``weight1`` and so on, which share one buffer, or one
    parameter ``weight``; biases likewise. Made under ``quantized_model_init``, separate weights are
    quantized tensors as the weight of a linear is, and one weight is a stack of such tensors, each
    with scales of its own (``tensors/stacks.py``).
    """

    parameter_names: Sequence[str]
    num_groups: int
    in_features: int
    out_features: int
    has_bias: bool
    scale_bias: bool

    def __init__(self, accumulate_into_main_grad: bool, delay_wgrad_compute: bool) -> None:
        super().__init__()
        self.delay_wgrad_compute = delay_wgrad_compute
        self._accumulate_into_main_grad = accumulate_into_main_grad
        self._delayed_wgrads: deque[Callable[[], None]] = deque()
        self._wgrad_hooks: list[Callable[[], object]] = []

    def _size(self, kind: str) -> tuple[int, ...]:
        """The shape of what one group has."""
        return (self.out_features, self.in_features)[: 2 if kind == "weight" else 1]

    def _sized(self) -> str:
        """The op with its sizes, for messages."""
        sizes = f"{self.num_groups}, {self.in_features}, {self.out_features}"
        return f"{type(self).__name__}({sizes})"

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(self, self._names["weight"][0]).dtype
        return dtype

    def _separate(self) -> list[list[Parameter]]:
        """The weights, and the biases, that are separate parameters in memory."""
        separate = []
        for names in self._names.values():
            parts = [p for name in names if type(p := self._parameters.get(name)) is Parameter]
            if len(parts) == len(names) > 1 and not any(p.is_meta for p in parts):
                separate.append(parts)
        return separate

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; separate parameters become views of one buffer again."""
        result = super()._apply(*args, **kwargs)
        self._pack()
        return result

    def _pack(self) -> None:
        """Make separate parameters views of one buffer again, after they were replaced."""
        for parts in self._separate():
            pack(parts)

    def arrange_parameters(self) -> bool:
        """As :meth:`_pack`, for parameters that the caller has replaced or moved.

        Not while a CUDA graph is captured, which would replay the move; nor of parameters that
        ``fully_shard`` gathers, whose memory it fills.
        """
        is_moved = False
        for parts in self._separate():
            is_capturing = parts[0].is_cuda and torch.cuda.is_current_stream_capturing()
            if are_packed(parts) or is_capturing:
                continue
            if gathered_by(parts[:1]) or gathered_by(parts):  # most often all are, or none
                continue
            is_moved |= pack(parts)
        return is_moved

    def _stacked(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """The parameters of a kind, such as the weights ``[G, N, K]``, as one tensor.

        This is the buffer of which the parameters are views, or a copy if they are not.
        """
        values = self._together(kind, dtype)
        return values if isinstance(values, torch.Tensor) else stacked(values)

    def _together(self, kind: str, dtype: torch.dtype) -> torch.Tensor | Sequence[torch.Tensor]:
        """As :meth:`_stacked`; a list in place of a copy."""
        parts = self._parts(kind)
        size = self._size(kind)
        shape = (self.num_groups, *size) if self._is_one(kind) else size
        for name, part in zip(self._names[kind], parts, strict=True):
            if part.shape != shape:
                raise InputError(
                    f"{self._sized()} has a {name} of shape {tuple(part.shape)}; it must be "
                    f"{shape}."
                )
        if are_quantized(parts):
            self._check_stack(parts[0])
            return parts
        if self._is_one(kind):
            return cast(parts[0], dtype)
        buffer = packed(parts)
        if buffer is None:
            return [cast(part.detach(), dtype) for part in parts]
        return cast(buffer, dtype)

    def _check_stack(self, weight: QuantizedTensor) -> None:
        """Refuse a stack of other matrices, whose scales are not those of this op's groups."""
        rows = weight._quantizer.stacked_rows
        if rows not in (1, self.out_features):
            raise InputError(
                f"{self._sized()} has a quantized weight of shape {tuple(weight.shape)} in which "
                f"each {rows} rows were quantized alone; each group has {self.out_features} rows. "
                "Quantize the values of the weight again."
            )

    # -- quantized weights -------------------------------------------------------------

    def _take_parameter_init(self, *, is_one: bool) -> None:
        """Note the options of ``quantized_model_init``.

        Raises InputError if all weights are one parameter, of which the recipe makes no stack.
        """
        self._init = current_parameter_init()
        if self._init is None or not is_one:
            return
        recipe = self._init.recipe
        is_delayed = isinstance(recipe, DelayedScaling)
        if is_delayed or not stack_quantizer(make_quantizer(recipe, "weight"), self.out_features):
            raise InputError(
                f"{self._sized()} was made inside quantized_model_init with "
                f"single_grouped_weight=True and {recipe}. One quantized parameter for all groups "
                "takes Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling or "
                "NVFP4BlockScaling without nvfp4_4over6, and out_features that are a multiple of "
                f"{GROUP_TILE}: leave that argument out, and each group has a parameter of its own."
            )

    def _parameter_quantizer(self, name: str, device: torch.device) -> Quantizer:
        alone = super()._parameter_quantizer(name, device)
        return alone if name != "weight" else stack_quantizer(alone, self.out_features) or alone

    # -- passes ------------------------------------------------------------------------

    def note_versions(self, ctx: OperationContext, kind: str) -> None:
        """Note the versions of weights or biases that backward reads but autograd does not save.

        These are quantized weights, and separate ones, of which autograd saves one view with the
        version counter of the first. In graphs autograd saves each parameter.
        """
        if self.runs_in_graph:
            return
        parts = self._parts(kind)
        if len(parts) > 1 or are_quantized(parts):
            noted = ctx.versions.tensors if "versions" in ctx.__dict__ else []
            ctx.versions = Versions([*noted, *parts], type(self).__name__)

    def check_versions(self, ctx: OperationContext) -> None:
        """Raise StateError if a weight or bias was changed in place since the forward."""
        if "versions" in ctx.__dict__:
            ctx.versions.check()

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._pack()

    def read_weights(
        self, ctx: OperationContext, dtype: torch.dtype
    ) -> torch.Tensor | Sequence[torch.Tensor]:
        """The weights ``[G, N, K]`` in ``dtype`` for a pass; notes versions for its backward.

        Quantized weights, and separate ones that are not one in memory, as a list.
        """
        if ctx.requires_grad:
            self._refuse_gathered()
            if ctx.input_requires_grad:
                self.note_versions(ctx, "weight")
        return self._together("weight", dtype)

    def _refuse_gathered(self) -> None:
        """Refuse that ``fully_shard``, which reduces gradients in backward, misses a gradient."""
        options = {
            "delay_wgrad_compute": self.delay_wgrad_compute,
            "accumulate_into_main_grad": self._accumulate_into_main_grad,
        }
        name = next((name for name, is_set in options.items() if is_set), None)
        if name is not None and gathered_by(weights := self._parts("weight")):
            raise StateError(
                f"{self._sized()} has {name}=True, and a weight of shape "
                f"{tuple(weights[0].shape)} that fully_shard gathers and whose gradient it reduces "
                "in backward; a gradient that comes later or goes elsewhere would be lost. Make "
                "the op without that argument."
            )

    # -- gradients -----------------------------------------------------------------------

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether weight gradients are left to :meth:`backward_dw`.

        Raises
        ------
        StateError
            If it is set to another value after the first call or plan.
        """
        is_delayed: bool = self.__dict__["delay_wgrad_compute"]
        return is_delayed

    @delay_wgrad_compute.setter
    def delay_wgrad_compute(self, value: bool) -> None:
        if self._captured and value != self.delay_wgrad_compute:
            raise StateError(
                f"{type(self).__name__}.delay_wgrad_compute was set to {value} after the first "
                f"call or plan, which is made for {self.delay_wgrad_compute}. Set it before the "
                "first call, or on a copy of the op (copy.deepcopy), which has no plan."
            )
        self.__dict__["delay_wgrad_compute"] = value

    @property
    def accumulates_into_main_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients go elsewhere than to autograd: backward then gets the weights."""
        return self._accumulate_into_main_grad or self.delay_wgrad_compute

    @property
    def is_recordable(self) -> bool:  # type: ignore[override]
        """A repeated backward would leave no weight gradients to :meth:`backward_dw`."""
        return not self.delay_wgrad_compute

    def weight_gradients(
        self, ctx: OperationContext, make: Callable[[], torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradient of each weight that autograd gets.

        The gradients of leaves that this backward accumulates may instead go into ``main_grad``, or
        wait for :meth:`backward_dw`. A weight that a hook computes is not a leaf.
        """
        require_grad = ctx.params_require_grad[: self.main_grad_count]
        owners: Owners = [None] * self.main_grad_count
        if self.accumulates_into_main_grad:
            owners = ctx.main_grad_owners
        if not self.delay_wgrad_compute:
            return self._added(make(), owners, require_grad)
        if any(owner is not None for owner in owners):
            self._delayed_wgrads.append(functools.partial(self._add_later, make, owners))
        now = [wants and owner is None for wants, owner in zip(require_grad, owners, strict=True)]
        if not any(now):
            return [None] * self.main_grad_count
        return self._added(make(), [None] * self.main_grad_count, now)

    def _added(
        self, gradients: torch.Tensor, owners: Owners, require_grad: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradients that autograd gets, after others were added to their ``main_grad``."""
        parts = [gradients] if self._is_one("weight") else list(gradients)
        names = self._names["weight"]
        if not self._accumulate_into_main_grad:
            owners = [None] * self.main_grad_count
        for name, owner, part in zip(names, owners, parts, strict=True):  # before any is added to
            check_main_grad(name, owner, self._parameters.get(name), part.shape)
        grads: list[torch.Tensor | None] = []
        for name, owner, part, is_wanted in zip(names, owners, parts, require_grad, strict=True):
            main_grad = None
            if owner is not None:
                main_grad = main_grad_of(owner, self._parameters.get(name))
            if main_grad is None:
                grads.append(part if is_wanted else None)
            else:
                main_grad.view(part.shape).add_(part)
                grads.append(stand_in_gradient(owner))
        return grads

    def _add_later(self, make: Callable[[], torch.Tensor], owners: Owners) -> None:
        """Add gradients to the ``main_grad`` or the ``grad`` of their weights."""
        is_leaf = [owner is not None for owner in owners]
        for owner, grad in zip(owners, self._added(make(), owners, is_leaf), strict=True):
            has_main_grad = self._accumulate_into_main_grad and hasattr(owner, "main_grad")
            if owner is None or grad is None or has_main_grad:
                continue
            if owner.grad is None:
                owner.grad = grad.to(owner.dtype)
            else:
                owner.grad.add_(grad)

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward that left them to this call.

        They go into ``grad``, or into ``main_grad``. A backward leaves the gradients of the leaves
        into which it accumulates. Hooks of these weights are not called. Do not change the input or
        the gradient of the output in place before this call. Without ``delay_wgrad_compute`` it
        does nothing.

        Raises
        ------
        StateError
            If no backward has left any.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._delayed_wgrads:
            raise StateError(
                "GroupedLinear.backward_dw() was called, and no backward has left weight gradients "
                "to it: call it once for each backward."
            )
        with torch.no_grad():
            self._delayed_wgrads[0]()
        self._delayed_wgrads.popleft()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], object]
    ) -> None:
        """Call this hook, without arguments, at the end of each :meth:`backward_dw`."""
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_delayed_wgrads": deque(), "_wgrad_hooks": []}


def are_quantized(weights: object) -> TypeGuard[list[QuantizedTensor]]:
    """Whether this is a list of quantized parameters: of each group, or one of all groups."""
    return isinstance(weights, list) and isinstance(weights[0], QuantizedTensor)


def padded_weights(weights: Sequence[QuantizedTensor], usage: str) -> QuantizedTensor:
    """One copy of quantized weights, as padded groups; a copy of bytes if they are separate."""
    first = weights[0]
    if first.dim() == 2:
        return joined(weights, usage)
    return one_copy(first.detach().view(-1, first.shape[-1]), usage)  # type: ignore[arg-type]


def note_reads(weights: Sequence[torch.Tensor], usage: str | None, *, is_read: bool) -> None:
    """Say which copy of gathered weights this forward's backward reads."""
    for weight in weights:
        note_backward_read(weight, (usage or "rowwise") if is_read else None)


def stacked_values(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The values ``[G, N, K]`` of weights, of each group or one for all groups, in ``dtype``."""
    values = [cast(plain(weight.detach(), dtype), dtype) for weight in weights]
    return values[0] if values[0].dim() == 3 else stacked(values)


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Separate weights or biases as one tensor, which is a copy."""
    with without_autocast():  # which would choose another dtype
        return torch.stack(list(parts))
