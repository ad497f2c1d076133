"""BasicLinear: y = x @ weight.T."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import gemm
from fuser.basic_ops.linear_operands import (
    LinearSaved,
    OperandQuantizers,
    gemm_name,
    kept_copy,
    operand_of_backward,
    operands_of,
    original,
    plain,
    quantized,
    quantizes_weight_again,
    readable,
    takes_rebuilt_input,
)
from fuser.basic_ops.main_grad import main_grad_of_linear, stand_in_gradient
from fuser.basic_ops.weights import InitialisedWeights
from fuser.communication import Agreement, GroupArgument, GroupRef, divided, group_size
from fuser.doors import PARAMETERS
from fuser.errors import InputError
from fuser.functional.lazy import materialize
from fuser.op import (
    Grads,
    OperationContext,
    ParallelMode,
    Values,
    cast,
    check_parallel_mode,
    check_parameter,
    check_sizes,
    default_device,
    default_dtype,
    write_grad_input,
    write_output,
)
from fuser.precision.contexts import current_parameter_init
from fuser.specs import Collective, PlanKey, Product, QuantSpec, TensorSpec
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.base import note_backward_read
from fuser.tensors.observation import note_operands, observing


class BasicLinear(InitialisedWeights):
    """Apply a linear transformation without bias: ``y = x @ weight.T``.

    Parameters
    ----------
    in_features, out_features
        Last dimension of the input and of the output, of all ranks together.
    device, dtype
        Device and dtype of the weight, shape ``[local_out_features, local_in_features]``: the
        part of this rank. A weight on the meta device is allocated at the first forward, on the
        default device.
    tensor_parallel_mode
        ``"column"``: each rank has ``out_features / ranks`` rows of the weight, and these
        features of the output. ``"row"``: each has ``in_features / ranks`` columns, takes these
        features of the input, and the products of all ranks are added.
    tensor_parallel_group
        A process group, a mesh of one dimension, or None for all ranks. Its size is that at
        construction; in a group of one rank, or without process groups, the modes have no effect.
    sequence_parallel
        Each rank has ``1 / ranks`` of dimension 0 of the input of a column parallel linear, which
        is gathered, or of the output of a row parallel one, whose sum is scattered.
    rng_state_tracker_function
        Returns an object whose ``fork()`` is the context in which the weight
        is initialised.
    accumulate_into_main_grad
        Add the weight gradient to ``weight.main_grad`` instead of returning it; overwrite the
        buffer if ``weight.overwrite_main_grad`` is true.

    Raises
    ------
    InputTypeError
        On a feature size that is not an integer.
    InputError
        On one that is not positive or that the ranks do not divide, an unknown
        parallel mode, ``sequence_parallel`` without a mode, or a group without this rank.
    StateError
        If a group is given and torch.distributed is not initialised.
    """

    parameter_names: Sequence[str] = ("weight",)
    can_quantize_output = ("forward", "backward")
    grad_input_dtype = "output"
    module_type = "linear"
    weight: torch.nn.Parameter
    _sharded_dim: int | None = None  # the dimension of the weight of which this rank has a part
    _product_ranks = 1  # the ranks whose products a later op adds

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: ParallelMode | None = None,
        tensor_parallel_group: GroupArgument = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        check_sizes("BasicLinear", in_features=in_features, out_features=out_features)
        self.in_features = self.local_in_features = in_features
        self.out_features = self.local_out_features = out_features
        self.shard(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        self._accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_state_tracker_function = rng_state_tracker_function
        self._init = current_parameter_init()
        options: dict[str, Any] = {"device": default_device(device), "dtype": default_dtype(dtype)}
        size = (self.local_out_features, self.local_in_features)
        self._register("weight", torch.empty(size, **options))
        if not self.weight.is_meta:
            self.reset_parameters()

    def implementation(self) -> tuple[object, ...]:
        # Plans depend on the communication.
        return (*super().implementation(), self._parallel)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.whole_in_features}, out_features={self.out_features}"
        return f"{sizes}{parallel_text([self])}"

    @property
    def process_groups(self) -> tuple[GroupArgument, ...]:
        return () if self._parallel is None else (self.tensor_parallel_group,)

    # -- the part of this rank ------------------------------------------------

    def shard(
        self,
        mode: ParallelMode | None,
        group: GroupArgument = None,
        sequence_parallel: bool = False,
    ) -> None:
        """Shard an op of whole features over ``group``; the caller replaces the weight.

        The arguments are ``tensor_parallel_mode``, ``tensor_parallel_group`` and
        ``sequence_parallel`` of the constructor. Raises InputError, StateError as the constructor;
        nothing has changed then.
        """
        check_parallel_mode("BasicLinear", mode, sequence_parallel)
        ranks = group_size("BasicLinear", group) if mode is not None else 1
        name = "out_features" if mode == "column" else "in_features"
        size = divided(f"BasicLinear's {name}", getattr(self, name), ranks)
        setattr(self, f"local_{name}", size)
        self.tensor_parallel_mode = mode
        self.sequence_parallel = sequence_parallel
        self.tensor_parallel_size = ranks
        self._group = GroupRef(group)
        self._agreement = Agreement()
        self._parallel: Any | None = None  # what a linear of several ranks does otherwise
        if mode is not None and ranks > 1:
            self._parallel = PARAMETERS.guest.parallelism(mode, ranks, sequence_parallel)
            self._sharded_dim = 0 if mode == "column" else 1

    def note_products(self, group: GroupArgument) -> None:
        """Say that the op's features are those of this rank, and a later op adds the products."""
        self._group = GroupRef(group)
        self._sharded_dim = 1
        self._product_ranks = group_size("BasicLinear", group)

    @property
    def mode_and_ranks(self) -> tuple[ParallelMode, int] | None:
        """``"column"`` or ``"row"``, and how many ranks share the linear; None if none do.

        Also if a later op adds the products.
        """
        if self._parallel is not None:
            return self._parallel.mode, self._parallel.ranks
        return None if self._sharded_dim is None else ("row", self._product_ranks)

    @property
    def whole_in_features(self) -> int:
        """``in_features`` of all ranks together, also if a later op adds the products."""
        return self.in_features * self._product_ranks

    def placement_of(self, name: str) -> tuple[int | None, GroupArgument]:
        dim = self._sharded_dim
        return (None, None) if dim is None else (dim, self._group.group)

    @property
    def tensor_parallel_group(self) -> GroupArgument:
        """The argument of the constructor; it may be set to another group of the same size."""
        return self._group.group

    @tensor_parallel_group.setter
    def tensor_parallel_group(self, group: GroupArgument) -> None:
        ranks = group_size("BasicLinear", group) if self._parallel is not None else 1
        if ranks != self.tensor_parallel_size:
            raise InputError(
                f"BasicLinear is sharded over {self.tensor_parallel_size} ranks, and a group of "
                f"{ranks} cannot run it."
                " Make the op with that group."
            )
        self._group = GroupRef(group)

    # -- first values ---------------------------------------------------------

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight as torch.nn.Linear does; a weight on meta is allocated first.

        Of a weight that ``fully_shard`` has sharded, every rank initialises its shard; all ranks
        call this.
        """
        self._reset(("weight",))

    # -- questions of the planner ------------------------------------------------

    @property
    def saves_input(self) -> bool:  # type: ignore[override]
        """The weight gradient reads the input."""
        return self.weight.requires_grad

    def takes_rebuilt_input(self, key: PlanKey) -> bool:
        """Unless it gathers its input, or a quantizer would make other bytes of it."""
        gathers = self._parallel is not None and self._parallel.gathers_input
        return not gathers and takes_rebuilt_input(self, key)

    @property
    def can_defer_wgrad(self) -> bool:
        """Unless ranks communicate."""
        return self._parallel is None

    def quantizes_weight_again(self, key: PlanKey) -> bool:
        return quantizes_weight_again(self, key)

    def take_rebuilt_input(self, ctx: OperationContext, values: Values) -> None:
        if ctx.is_partial and not ctx.params_require_grad[0]:
            return
        kept, *weight = LinearSaved(*ctx.saved_tensors)
        dtype: torch.dtype = ctx.compute_dtype or ctx.dtype
        x: torch.Tensor
        if not ctx.has_recipe or ctx.backward_override == "high_precision":
            x = cast(materialize(values), dtype)
        else:
            is_dequantized = ctx.backward_override == "dequantized"
            usage = {"rowwise": is_dequantized, "columnwise": not is_dequantized}
            quantizer = ctx.input_quantizer.with_usage(**usage).repeating(kept)
            x = quantizer(values if values.dtype is dtype else materialize(values).to(dtype))
        ctx.saved_tensors = LinearSaved(x, *weight)

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        check_parameter(
            self._sized(), "weight", self.weight, (self.local_out_features, self.local_in_features)
        )
        self._check_features(spec.shape)
        shape = (*spec.shape[:-1], self.local_out_features)
        if self._parallel is not None:
            shape = self._parallel.output_shape("BasicLinear", spec.shape, shape[-1])
        return TensorSpec(shape, autocast or self.weight.dtype)

    def product(self, spec: TensorSpec, output: TensorSpec) -> Product:
        # Ranks gather rows before the product, or scatter them after it.
        rows = max(math.prod(spec.shape[:-1]), math.prod(output.shape[:-1]))
        inputs, outputs = self.local_in_features, self.local_out_features
        operands = (rows * inputs, inputs * outputs, rows * outputs)
        return Product(2 * rows * inputs * outputs, operands)

    def collectives(self, side: str, key: PlanKey) -> tuple[Collective, ...]:
        return () if self._parallel is None else self._parallel.collectives(self, side, key)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        (op,) = key.ops
        if side == "forward":
            return ("mm" if key.recipe is None else self._gemm_name("mm", "input", "weight", key),)
        roles_of = {
            "dgrad mm": op.input_requires_grad and ("grad_output", "weight"),
            "wgrad mm": op.params[0].requires_grad and ("grad_output", "input"),
        }
        products = [(name, roles) for name, roles in roles_of.items() if roles]
        if key.recipe is None or not key.recipe.quantizes_backward:
            return tuple(name for name, _ in products)
        return tuple(self._gemm_name(name, *roles, key) for name, roles in products)

    def context_constants(self, key: PlanKey) -> dict[str, object]:
        """Constants of a linear's context, under the names that other libraries' fusions read.

        The compute dtype, whether the weight needs a gradient, whether backward multiplies
        quantized tensors, and the quantizers, which a quantized forward sets.
        """
        (op,) = key.ops
        return {
            "dtype": key.autocast_dtype or op.params[0].dtype,
            "weight_requires_grad": op.params[0].requires_grad,
            "with_quantized_compute": key.recipe is not None and key.recipe.quantizes_backward,
            "input_quantizer": None,
            "weight_quantizer": None,
        }

    def context_values(self, key: PlanKey) -> dict[str, object]:
        """The op, and its quantizers of input, weight and output gradient with their usages.

        Empty for quantizers that must be looked up at each call. With the op, since an op that
        contains linears may run them with its own context.
        """
        if key.recipe is None or self.constant_quantizer(key.recipe, "forward", 0) is None:
            return {}
        quantizers: dict[str, Any] = {"grad_output": None}
        for side in ("forward", "backward"):
            operands = operands_of(side, key, self.quantizer_format)
            for index, (role, spec) in enumerate(operands.items()):
                quantizer = self.constant_quantizer(key.recipe, side, index)
                assert quantizer is not None
                quantizers[role] = quantizer.with_usage(**spec.usage)
        return {"operand_quantizers": OperandQuantizers(self, **quantizers)}

    def quantizes(self, side: str, key: PlanKey) -> dict[str, QuantSpec]:
        (op,) = key.ops
        arrives = {
            "input": op.input is not None,
            "weight": op.params[0].format is not None,
            "grad_output": op.grad_output is not None,
        }
        operands = operands_of(side, key, self.quantizer_format)
        specs = {role: operand for role, operand in operands.items() if not arrives[role]}
        if side == "forward":
            return specs
        is_kept = {"input": op.keeps_input, "weight": op.keeps_weight}
        again = {role: kept_copy(self, role, key) for role, kept in is_kept.items() if not kept}
        return specs | {role: spec for role, spec in again.items() if spec is not None}

    def input_quantization(self, key: PlanKey) -> QuantSpec | None:
        (op,) = key.ops
        recipe = key.recipe
        if recipe is None or op.input_dtype != self._compute_dtype(key):
            return None  # this op casts the input first, and quantizes it itself
        if recipe.backward_override == "high_precision":
            return None  # backward reads the unquantized input, so the producer must not quantize
        if self._parallel is not None and self._parallel.gathers_input:
            return None  # ranks must agree on scales first
        return operands_of("forward", key, self.quantizer_format)["input"]

    def grad_output_quantization(self, key: PlanKey) -> QuantSpec | None:
        if self._parallel is not None and self._parallel.gathers_grad:
            return None  # as for the input
        return operands_of("backward", key, self.quantizer_format).get("grad_output")

    def _gemm_name(self, name: str, a: str, b: str, key: PlanKey) -> str:
        return gemm_name(name, a, b, key, self.quantizer_format)

    # -- running --------------------------------------------------------------

    def operands(
        self, ctx: OperationContext, input_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and weight in the compute dtype, for an unquantized GEMM.

        Saves in ``ctx`` the operands that the wanted gradients need.
        """
        # Not self.weight at once: torch.nn.Module.__getattr__ costs 0.4 us.
        x, weight = input_, self._parameters.get("weight")
        if weight is None:
            weight = self.weight  # an attribute, which a hook computes
        if self._parallel is not None:
            self._check_features(x.shape)
            x = plain(x, ctx.autocast_dtype or weight.dtype)
        wants_grad = ctx.params_require_grad[0]
        if ctx.autocast_dtype is not None:
            weight = cast(weight, ctx.autocast_dtype)  # type: ignore[assignment]
        if x.dtype is not weight.dtype:
            x = x.to(weight.dtype)
        if ctx.requires_grad:
            saved_weight = weight if ctx.input_requires_grad else None
            is_kept = wants_grad and ctx.keeps_input
            ctx.to_save = (x if is_kept else None, saved_weight)
            if isinstance(weight, QuantizedTensor):  # its rowwise copy has the values of forward
                note_backward_read(weight, "rowwise" if ctx.input_requires_grad else None)
        if self._parallel is not None:
            x = self._parallel.whole_input(self, ctx, input_, x)
        return x, weight

    def matmul(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        addend: torch.Tensor | None = None,
        scale: float = 1.0,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """The product, quantized under a recipe; saves the operands of backward.

        ``scale * (x @ weight.T) (+ bias) (+ addend)``. A parallel linear gathers
        its input first, or adds the products of all ranks, and then takes no bias and no addend.
        """
        if ctx.has_recipe:
            qx, qw = self._quantized_operands(ctx, input_, is_first_microbatch)
            dtype = ctx.compute_dtype
            assert dtype is not None
            is_split = ctx.split_accumulators[0]
            y = gemm.quantized_linear(
                qx, qw, dtype, is_split=is_split, bias=bias, scale=scale, addend=addend
            )
            if ctx.requires_grad and ctx.backward_override is None:
                assert ctx.to_save is not None
                for operand, kept in zip((qx, qw), ctx.to_save, strict=False):
                    if operand is kept:
                        operand.release("rowwise")
        else:
            x, weight = self.operands(ctx, input_)
            if addend is not None:
                y = gemm.linear_add(x, weight, addend, scale=scale, bias=bias)
            elif scale != 1.0:
                y = gemm.scaled_linear(x, weight, scale, bias)
            else:
                y = gemm.linear(x, weight, bias)
        if self._parallel is None or self._parallel.mode == "column":
            return y
        assert bias is None  # linear_epilogues.py refuses it
        assert addend is None
        added: torch.Tensor = self._parallel.added(self, y)
        return added

    # -- quantized ------------------------------------------------------------

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def _quantized_operands(
        self, ctx: OperationContext, input_: torch.Tensor, is_first_microbatch: bool | None
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Input and weight with rowwise copies; saves in ``ctx`` the operands of backward."""
        if input_.shape[-1] != self.local_in_features:
            self._check_features(input_.shape)
        weight = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        dtype = ctx.compute_dtype = ctx.autocast_dtype or weight.dtype
        quantizers: OperandQuantizers | None = ctx.operand_quantizers
        if quantizers is None or quantizers[0] is not self:
            quantizers = self._quantizers_of_call(ctx, ctx.params_require_grad[0])
        _, input_quantizer, weight_quantizer, _ = quantizers
        gather = None
        if self._parallel is not None:
            wants_wgrad = ctx.requires_grad and ctx.params_require_grad[0]
            gather = self._parallel.start_gather(
                self, ctx, input_, dtype, input_quantizer, wants_wgrad=wants_wgrad
            )
        qx = quantized(input_, dtype, input_quantizer) if gather is None else input_
        if is_first_microbatch is not None and not ctx.keeps_weight:  # the op keeps both copies
            is_read = ctx.backward_override is None
            weight_quantizer = weight_quantizer.with_usage(rowwise=True, columnwise=is_read)
        qw = self._quantized_weight(weight, dtype, weight_quantizer, is_first_microbatch)
        if gather is not None:
            qx = gather.wait()
        assert isinstance(qx, QuantizedTensor)
        if observing.now is not None:
            note_operands(self, input=qx if gather is None else gather.of_rank, weight=qw)
        if ctx.requires_grad:
            _, ctx.input_quantizer, ctx.weight_quantizer, ctx.grad_output_quantizer = quantizers
            is_new = is_first_microbatch is None and not isinstance(weight, QuantizedTensor)
            is_rebuilt = is_new and not ctx.keeps_weight
            saved_x = saved_weight = None
            if ctx.params_require_grad[0]:
                saved_x = self._saved_input(ctx, input_, qx, gather)
            if is_rebuilt:
                ctx.to_save = LinearSaved(saved_x, weight, weight_quantizer.to_repeat(qw))
            else:
                if ctx.input_requires_grad:
                    saved_weight = self._saved_weight(ctx, weight, qw, is_new)
                ctx.to_save = (saved_x, saved_weight)  # as fusions of users read it
            if not ctx.input_requires_grad or ctx.backward_override == "high_precision":
                note_backward_read(weight, "rowwise" if ctx.input_requires_grad else None)
        return readable(qx, "rowwise", input_quantizer), readable(qw, "rowwise", weight_quantizer)

    def _quantized_weight(
        self,
        weight: torch.Tensor,
        dtype: torch.dtype,
        quantizer: Quantizer,
        is_first_microbatch: bool | None,
    ) -> QuantizedTensor:
        """The quantized weight; see :mod:`weights` for a caller that counts microbatches."""
        if isinstance(weight, QuantizedTensor):
            self.bound([weight])
            return weight
        if is_first_microbatch is None:
            return quantizer(cast(weight, dtype))
        return self.kept_weights(
            [weight],
            dtype,
            [quantizer],
            is_first_microbatch,
            lambda: quantizer(cast(weight, dtype)),
            lambda kept: kept._has("columnwise") or not quantizer.columnwise,
        )

    def _saved_input(
        self, ctx: OperationContext, input_: torch.Tensor, qx: QuantizedTensor, gather: Any | None
    ) -> torch.Tensor | None:
        """The input that backward reads; ``qx`` is the quantized one."""
        if gather is not None:
            saved: torch.Tensor | None = gather.saved
            return saved
        if not ctx.keeps_input:
            return ctx.input_quantizer.to_repeat(qx)
        if ctx.backward_override == "high_precision":
            assert ctx.compute_dtype is not None
            return original(input_, ctx.compute_dtype)
        return operand_of_backward(ctx, qx, ctx.input_quantizer, is_new=qx is not input_)

    def _saved_weight(
        self, ctx: OperationContext, weight: torch.Tensor, qw: QuantizedTensor, is_new: bool
    ) -> torch.Tensor:
        """The weight that backward reads; ``qw`` is the quantized one, of this call if new."""
        if ctx.backward_override == "high_precision":
            assert ctx.compute_dtype is not None
            return cast(weight, ctx.compute_dtype)
        return operand_of_backward(ctx, qw, ctx.weight_quantizer, is_new=is_new)

    def _quantizers_of_call(
        self, ctx: OperationContext, weight_requires_grad: bool
    ) -> OperandQuantizers:
        """The quantizers of a call for which the plan has no constant ones."""
        is_quantized = ctx.requires_grad and ctx.backward_override is None
        x, weight = self.quantizer_value("forward", 0), self.quantizer_value("forward", 1)
        assert x is not None
        assert weight is not None
        # Backward then reads columnwise copies.
        wgrad = is_quantized and weight_requires_grad and ctx.keeps_input
        dgrad = is_quantized and ctx.input_requires_grad and ctx.keeps_weight
        x = x.with_usage(rowwise=True, columnwise=wgrad)
        weight = weight.with_usage(rowwise=True, columnwise=dgrad)
        gradient = self.quantizer_value("backward", 0) if is_quantized else None
        return OperandQuantizers(self, x, weight, gradient)

    def _compute_dtype(self, key: PlanKey) -> torch.dtype:
        return key.autocast_dtype or self.weight.dtype

    # -- main_grad ------------------------------------------------------------

    @property
    def accumulates_into_main_grad(self) -> bool:  # type: ignore[override]
        """The argument of the constructor."""
        return self._accumulate_into_main_grad

    # -- running --------------------------------------------------------------

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """``x @ weight.T``.

        ``is_first_microbatch`` is for a caller that runs several microbatches between two changes
        of the weight: True quantizes the weight and keeps it, False uses the kept weight, and None
        quantizes at every call. False quantizes again after a step of any
        ``torch.optim.Optimizer``, after a write that torch counts (``weight._version``), and if
        the weight has moved. It does not notice writes through ``weight.data`` or by kernels that
        the caller launches, such as ``torch._fused_adam_``: pass True after them.
        """
        y = self.matmul(ctx, input_, is_first_microbatch=is_first_microbatch)
        return write_output(y, next_op_input_quantizer)

    def op_backward(
        self,
        ctx: OperationContext,
        grad_output: torch.Tensor,
        scale: float = 1.0,
        addend: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, Grads]:
        """``scale * dy @ weight (+ addend)``, and ``scale * dy.T @ x`` for the weight.

        Each is None if it is not wanted; the weight's also if it went into ``main_grad``.
        """
        x, weight = self.saved_operands(ctx)
        if x is None and weight is None and ctx.is_partial and not ctx.defers_wgrad:
            materialize(grad_output)  # with what is computed beside a lazy one, such as a bias's
            return None, (None,)
        if self._parallel is not None:
            grads: tuple[torch.Tensor | None, Grads] = self._parallel.backward(
                self, ctx, grad_output, x, weight, scale, addend
            )
            return grads
        if ctx.defers_wgrad:
            x = None  # not yet computed again
        # A user's fused op may have run the forward, and saved unquantized operands.
        if ctx.has_recipe and ctx.compute_dtype is not None:
            if ctx.backward_override is None:
                return self._quantized_backward(ctx, grad_output, x, weight, scale, addend)
            dtype = ctx.compute_dtype
            assert dtype is not None
            x, weight = plain(x, dtype), plain(weight, dtype)
            grad_output = plain(grad_output, dtype)
        operand = weight if x is None else x
        # Of a weight's gradient alone, whose input is computed again, neither is here.
        dtype = (ctx.compute_dtype or ctx.dtype) if operand is None else operand.dtype
        dy = grad_output
        if dy.dtype is not dtype:
            dy = dy.to(dtype)
        grad_input = grad_weight = None
        if weight is not None:
            grad_input = write_grad_input(gemm.dgrad(dy, weight, scale, addend), ctx)
        if ctx.defers_wgrad:
            self._defer(ctx, dy)
        elif x is not None:
            grad_weight = self.weight_gradient(ctx, dy, x, scale)
        return grad_input, (grad_weight,)

    def saved_operands(self, ctx: OperationContext) -> tuple[Any, Any]:
        """Input and weight as backward reads them; None for those that it does not."""
        x, weight, kept = LinearSaved(*ctx.saved_tensors)
        if ctx.is_partial:
            if not ctx.params_require_grad[0]:
                x, ctx.defers_wgrad = None, False
            weight = weight if ctx.input_requires_grad else None
            ctx.saved_tensors = LinearSaved(x, weight, kept)
        if ctx.keeps_weight or weight is None or isinstance(weight, QuantizedTensor):
            return x, weight
        assert ctx.compute_dtype is not None
        is_dequantized = ctx.backward_override == "dequantized"
        usage = {"rowwise": is_dequantized, "columnwise": not is_dequantized}
        quantizer = ctx.weight_quantizer.with_usage(**usage).repeating(kept)
        return x, quantized(weight, ctx.compute_dtype, quantizer)

    def weight_gradient(
        self, ctx: OperationContext, dy: Any, x: Any, scale: float, *, is_quantized: bool = False
    ) -> torch.Tensor | None:
        """``scale * dy.T @ x``; None if it is added to ``main_grad``.

        Of quantized tensors, ``is_quantized``, the columnwise copies.
        """
        (owner,), weight = ctx.main_grad_owners, self._parameters.get("weight")
        main_grad = None if owner is None else main_grad_of_linear(owner, weight)
        if is_quantized:
            dtype, is_split = ctx.compute_dtype, ctx.split_accumulators[2]
            assert dtype is not None
            if main_grad is None:
                return gemm.quantized_wgrad(dy, x, dtype, is_split=is_split, scale=scale)
            gemm.quantized_wgrad_accumulate(main_grad, dy, x, dtype, is_split=is_split, scale=scale)
        elif main_grad is None:
            return gemm.wgrad(dy, x, scale)
        else:
            gemm.wgrad_accumulate(main_grad, dy, x, scale)
        return stand_in_gradient(owner)

    def _quantized_backward(
        self,
        ctx: OperationContext,
        grad_output: torch.Tensor,
        x: torch.Tensor | None,
        weight: torch.Tensor | None,
        scale: float,
        addend: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, Grads]:
        """:meth:`op_backward` with quantized operands."""
        dtype, quantizer = ctx.compute_dtype, ctx.grad_output_quantizer
        assert dtype is not None
        assert quantizer is not None
        rowwise, columnwise = weight is not None, x is not None or ctx.defers_wgrad
        if quantizer.rowwise is not rowwise or quantizer.columnwise is not columnwise:
            quantizer = quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        dy = quantized(grad_output, dtype, quantizer)
        if observing.now is not None:
            note_operands(self, grad_output=dy)
            note_operands(self, input=x, weight=weight, only_new=True)
        dgrad_is_split = ctx.split_accumulators[1]
        grad_input = grad_weight = None
        if isinstance(weight, QuantizedTensor):
            rows = readable(dy, "rowwise", quantizer)
            grad_input = gemm.quantized_dgrad(
                rows, weight, dtype, is_split=dgrad_is_split, scale=scale, addend=addend
            )
            grad_input = write_grad_input(grad_input, ctx)
        if ctx.defers_wgrad:
            # Without the rowwise copy, which is freed now.
            self._defer(ctx, readable(dy, "columnwise", quantizer).with_usage("columnwise"))
        elif isinstance(x, QuantizedTensor):
            columns = readable(dy, "columnwise", quantizer)
            grad_weight = self.weight_gradient(ctx, columns, x, scale, is_quantized=True)
        return grad_input, (grad_weight,)

    def _defer(self, ctx: OperationContext, dy: torch.Tensor) -> None:
        """Keep ``dy`` for :meth:`deferred_gradients`, and not the weight, which nothing reads."""
        ctx.deferred = dy
        ctx.saved_tensors = LinearSaved(ctx.saved_tensors[0], None)

    def deferred_gradients(self, ctx: OperationContext) -> Grads:
        """The gradients that :meth:`op_backward` left until the input was computed again."""
        x, *_ = ctx.saved_tensors
        dy, ctx.deferred = ctx.deferred, None
        if dy is None:  # the running backward does not need it
            return (None,)
        is_quantized = isinstance(x, QuantizedTensor)
        if observing.now is not None and is_quantized:
            note_operands(self, input=x, only_new=True)
        return (self.weight_gradient(ctx, dy, x, 1.0, is_quantized=is_quantized),)

    def _check_features(self, shape: tuple[int, ...]) -> None:
        if shape[-1] != self.local_in_features:
            mode, ranks = self.mode_and_ranks or ("", 1)
            part = f" ({self.whole_in_features} over {ranks} ranks)" if mode == "row" else ""
            raise InputError(
                f"{self._sized()} got an input of shape {tuple(shape)}; its last dimension must "
                f"be {self.local_in_features}{part}."
            )

    def _sized(self) -> str:
        """The op with its sizes, for messages."""
        return f"{self.part_of or 'BasicLinear'}({self.whole_in_features}, {self.out_features})"


def parallel_text(linears: Sequence[BasicLinear]) -> str:
    """For a repr: ``", column and row parallel over 2 ranks"`` of two linears, else empty."""
    shared = [pair for linear in linears if (pair := linear.mode_and_ranks) is not None]
    if not shared:
        return ""
    return f", {' and '.join(mode for mode, _ in shared)} parallel over {shared[0][1]} ranks"
