"""The parameters of a grouped linear: separate ones of each group, or one for all groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from fuser.basic_ops.grouped_products import kept, needs_columns
from fuser.basic_ops.grouped_quantized_weights import (
    QuantizedGroupWeights,
    are_quantized,
    backward_usage,
    note_reads,
    padded_weights,
    quantized_operand,
    stacked,
    stacked_values,
)
from fuser.basic_ops.kept_weight import KeepsWeights
from fuser.basic_ops.linear_operands import quantized
from fuser.basic_ops.shared_memory import Versions, are_packed, pack, packed
from fuser.errors import InputError, StateError
from fuser.op import OperationContext, cast
from fuser.tensors import QuantizedTensor
from fuser.tensors.sharding import gathered_by


class GroupParameters(QuantizedGroupWeights, KeepsWeights):
    """An op with the weights ``[num_groups, out_features, in_features]``, and biases, of groups.

    They are separate parameters ``weight0``, ``weight1`` and so on, which share one buffer, or one
    parameter ``weight``; biases likewise.
    """

    num_groups: int
    in_features: int
    single_grouped_weight: bool
    single_grouped_bias: bool
    delay_wgrad_compute: bool
    _accumulate_into_main_grad: bool
    _names: dict[str, tuple[str, ...]]  # of the weights, and of the biases

    def _register(self, what: str, buffer: torch.Tensor) -> None:
        parts = [buffer] if self._is_one(what) else buffer
        for name, part in zip(self._names[what], parts, strict=True):
            self.register_parameter(name, Parameter(part))

    def _is_one(self, what: str) -> bool:
        return self.single_grouped_weight if what == "weight" else self.single_grouped_bias

    def _sized(self) -> str:
        """The op with its sizes, for messages."""
        return f"GroupedLinear({self.num_groups}, {self.in_features}, {self.out_features})"

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(self, self._names["weight"][0]).dtype
        return dtype

    def _parts(self, what: str) -> list[Any]:
        """The separate weights or biases, or the one parameter that has all."""
        own = self._parameters  # without torch's lookup of an attribute, 0.5 us for each
        return [own[n] if n in own else getattr(self, n) for n in self._names[what]]

    def _separate(self) -> list[list[Parameter]]:
        """The weights, and the biases, that are separate parameters in memory."""
        found = []
        for names in self._names.values():
            parts = [p for name in names if type(p := self._parameters.get(name)) is Parameter]
            if len(parts) == len(names) > 1 and not any(p.is_meta for p in parts):
                found.append(parts)
        return found

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

    def _stacked(self, what: str, dtype: torch.dtype) -> torch.Tensor:
        """The weights ``[G, N, K]`` or biases ``[G, N]`` as one tensor.

        This is the buffer of which the parameters are views, or a copy if they are not.
        """
        found = self._together(what, dtype)
        return found if isinstance(found, torch.Tensor) else stacked(found)

    def _together(self, what: str, dtype: torch.dtype) -> torch.Tensor | list[torch.Tensor]:
        """As :meth:`_stacked`; a list in place of a copy."""
        parts = self._parts(what)
        size = (self.out_features, self.in_features)[: 2 if what == "weight" else 1]
        shape = (self.num_groups, *size) if self._is_one(what) else size
        for name, part in zip(self._names[what], parts, strict=True):
            if part.shape != shape:
                raise InputError(
                    f"{self._sized()} has a {name} of shape {tuple(part.shape)}; it must be "
                    f"{shape}."
                )
        if are_quantized(parts):
            self._check_stack(parts[0])
            return parts
        if self._is_one(what):
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

    def _note_versions(self, ctx: OperationContext, what: str) -> None:
        """Note the versions of weights or biases that backward reads but autograd does not save.

        These are quantized weights, and separate ones, of which autograd saves one view with the
        version counter of the first.
        """
        parts = self._parts(what)
        if len(parts) > 1 or are_quantized(parts):
            noted = ctx.versions.tensors if "versions" in ctx.__dict__ else []
            ctx.versions = Versions([*noted, *parts], type(self).__name__)  # type: ignore[attr-defined]

    def check_versions(self, ctx: OperationContext) -> None:
        """Raise StateError if a weight or bias was changed in place since the forward."""
        if "versions" in ctx.__dict__:
            ctx.versions.check()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()

    def weights_to_keep(self) -> Sequence[torch.Tensor] | None:
        own = self._parameters
        are_own = all(name in own for name in self._names["weight"])
        return self._parts("weight") if are_own else None

    # -- weights in a pass, of a grouped linear and of a fused op --------------------

    def stacked_weight(self, ctx: OperationContext, dtype: torch.dtype) -> Any:
        """The weights ``[G, N, K]`` in ``dtype``; notes versions for :meth:`check_versions`.

        Quantized weights as a list.
        """
        ctx.compute_dtype = dtype
        weights = self._weights(ctx, dtype)
        if isinstance(weights, torch.Tensor) or are_quantized(weights):
            return weights
        return stacked(weights)

    def _weights(
        self, ctx: OperationContext, dtype: torch.dtype
    ) -> torch.Tensor | list[torch.Tensor]:
        """As :meth:`stacked_weight`; separate weights that are not one in memory are a list."""
        if ctx.requires_grad:
            self._refuse_gathered()
            if ctx.input_requires_grad:
                self._note_versions(ctx, "weight")
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

    def weight_operand(
        self,
        ctx: OperationContext,
        products: Any,
        weight: Any,
        quantizers: Any,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        """The weights ``[G, N, K]`` as an operand, perhaps that of the first microbatch."""
        if are_quantized(weight):
            assert ctx.compute_dtype is not None
            return quantized_operand(self.bound(weight), products, ctx.compute_dtype)
        is_kept = ctx.requires_grad and ctx.input_requires_grad and ctx.backward_override is None

        def make() -> torch.Tensor:
            made: torch.Tensor = products.weight(weight, quantizers, is_kept=is_kept)
            return made

        if is_first_microbatch is None or quantizers is None:
            return make()
        has_columns = is_kept and needs_columns(quantizers, "weight", weight.device)
        return self.kept_weights(
            self._parts("weight"),
            weight.dtype,
            quantizers.weight,
            is_first_microbatch,
            make,
            lambda made: not has_columns or made._has("columnwise"),  # type: ignore[attr-defined]
        )

    def saved_weight(
        self,
        ctx: OperationContext,
        weight: Any,
        operand: torch.Tensor,
        quantizers: Any,
        is_wanted: bool,
        *,
        is_own: bool,
    ) -> Any:
        """The weights to save for backward, as :func:`kept`; read by :meth:`weight_of_backward`.

        None if the operand is a copy of separate parameters that ``fully_shard`` gathers, or of
        quantized ones: backward copies them again, so that the copies of all layers are not in
        memory at one time.
        """
        if are_quantized(weight):
            usage = backward_usage(ctx, weight, quantizers, operand.device) if is_wanted else None
            note_reads(weight, usage, is_read=is_wanted)
            if is_wanted:
                ctx.separate_weights = (usage, weight)  # type: ignore[attr-defined]
            return None
        found: Any = kept(ctx, weight, operand, is_wanted, is_own=is_own)
        parts = self._parts("weight")
        if found is not weight or weight.data_ptr() == parts[0].data_ptr():
            return found
        if len(parts) == 1 or packed(parts) is not None or not gathered_by(parts):
            return found
        ctx.separate_weights = (None, parts)  # type: ignore[attr-defined]
        return None

    def weight_of_backward(self, ctx: OperationContext, saved: Any, dtype: torch.dtype) -> Any:
        """The weights that :meth:`saved_weight` saved."""
        if "separate_weights" not in ctx.__dict__:
            return saved
        usage, weights = ctx.separate_weights
        return stacked_values(weights, dtype) if usage is None else padded_weights(weights, usage)

    def _looped_weights(
        self,
        ctx: OperationContext,
        weights: torch.Tensor | Sequence[torch.Tensor],
        dtype: torch.dtype,
        wants_dgrad: bool,
        is_first_microbatch: bool | None,
    ) -> list[QuantizedTensor]:
        """The weight of each group, quantized alone, perhaps in the first microbatch."""
        if are_quantized(weights):
            self.quantizer_values("forward")  # makes the state of delayed scaling
            return list(self.bound(list(weights)))
        columnwise = wants_dgrad and ctx.backward_override is None
        quantizers = [
            quantizer.with_usage(rowwise=True, columnwise=columnwise)
            for quantizer in self.quantizer_values("forward")[1::2]
            if quantizer is not None
        ]

        def make() -> list[QuantizedTensor]:
            pairs = zip(weights, quantizers, strict=True)
            return [quantized(each, dtype, quantizer) for each, quantizer in pairs]

        if is_first_microbatch is None:
            return make()
        return self.kept_weights(
            self._parts("weight"),
            dtype,
            quantizers,
            is_first_microbatch,
            make,
            lambda made: not columnwise or all(each._has("columnwise") for each in made),
        )
