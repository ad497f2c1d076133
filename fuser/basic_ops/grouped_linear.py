"""GroupedLinear: a linear for each group of rows, as in mixtures of experts."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from fuser.basic_ops.group_notes import bits_note, padding_note
from fuser.basic_ops.grouped_parameters import GroupParameters
from fuser.basic_ops.grouped_products import (
    kept,
    loop_backward,
    loop_forward,
    products_of_backward,
    products_of_forward,
    quantizers_of_groups,
    quantizes_groups_of,
    rows_of_groups,
)
from fuser.basic_ops.grouped_quantized_weights import are_quantized, keep_stack, kept_matrices
from fuser.basic_ops.grouped_wgrad import GroupedWeightGradients
from fuser.basic_ops.linear_operands import gemm_name, plain
from fuser.basic_ops.shared_memory import overlap, pack
from fuser.cuda import grouped_gemm
from fuser.errors import InputError, InputTypeError
from fuser.functional.grouped import add_bias
from fuser.functional.lazy import materialize
from fuser.gemm import grouped
from fuser.gemm.grouped import Groups
from fuser.gemm.quantized_groups import sums_of
from fuser.op import (
    Grads,
    OperationContext,
    cast,
    check_sizes,
    default_device,
    default_dtype,
    write_grad_input,
    write_output,
)
from fuser.reference import grouped as reference
from fuser.specs import PlanKey, QuantSpec, TensorSpec
from fuser.tensors.gathering import gather_noted_reads
from fuser.tensors.sharding import is_distributed
from fuser.tensors.stacks import matrices

INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class GroupedLinear(GroupedWeightGradients, GroupParameters):
    """``y_g = x_g @ weight_g.T (+ bias_g)``: a linear for each group of consecutive rows.

    The first extra input, ``split_sizes``, is an integer tensor ``[num_groups]`` with the number of
    rows of each group, on the device of the input or on the CPU. A group may be empty. Rows after
    the last group belong to none: their output and their gradients are zeros, and no value in them
    reaches any other result.

    With fp16 and bf16 operands on a Hopper or Blackwell GPU all groups are one launch, and the
    sizes are not read on the host: the op can be captured in a CUDA graph, and its output may be
    replayed with other sizes. There negative sizes count as zero, and groups end at the last row.
    The same holds under recipes of current and delayed scaling, blocks of 128, MXFP8 and NVFP4,
    which quantize the operands of all groups in one launch. Elsewhere each group has its own
    product, and sizes on a GPU are read.

    Parameters
    ----------
    num_groups
        The number of groups, experts for example.
    in_features, out_features
        Last dimension of the input and of the output.
    bias
        Whether each group has a bias.
    device, dtype
        Device and dtype of the parameters. Parameters on meta are allocated at the first forward.
    rng_state_tracker_function
        Returns an object whose ``fork()`` is the context in which the weights are initialised.
    accumulate_into_main_grad
        Add weight gradients to the weights' ``main_grad`` instead of returning them.
    single_grouped_weight
        One parameter ``weight`` ``[num_groups, out_features, in_features]`` in place of
        ``weight0``, ``weight1`` and so on, which are views of one buffer of that shape.
    single_grouped_bias
        One parameter ``bias`` ``[num_groups, out_features]`` in place of ``bias0`` and so on.
    delay_wgrad_compute
        Leave weight gradients to :meth:`backward_dw`.
    scale_bias
        Multiply the bias of each row by a second extra input, ``scales``, in the shape of the
        input's leading dimensions. It receives a gradient.

    Raises
    ------
    InputError
        On sizes that are not positive. Inside ``quantized_model_init``, on
        ``single_grouped_weight`` with a recipe of delayed or rowwise scaling, or with
        ``out_features`` that are not a multiple of 128.
    """

    can_quantize_output = ("forward", "backward")
    module_type = "grouped_linear"
    takes_floating_extras = True
    index_extras = (0,)
    check_device_splits = False
    """Set to True to read split sizes on a GPU too, and refuse those that do not fit."""

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        super().__init__(accumulate_into_main_grad, delay_wgrad_compute)
        check_sizes(
            "GroupedLinear",
            num_groups=num_groups,
            in_features=in_features,
            out_features=out_features,
        )
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self._take_parameter_init(self._sized(), is_one=single_grouped_weight)
        self.has_bias = bias
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias
        self.scale_bias = scale_bias and bias
        self.num_extra_inputs = 1 + self.scale_bias
        self._rng_state_tracker_function = rng_state_tracker_function
        is_one = {"weight": single_grouped_weight, "bias": single_grouped_bias}
        self._names = {
            what: (what,) if one else tuple(f"{what}{g}" for g in range(num_groups))
            for what, one in is_one.items()
            if what == "weight" or bias
        }
        self.parameter_names = [name for names in self._names.values() for name in names]
        self.main_grad_count = len(self._names["weight"])
        options: dict[str, Any] = {"device": default_device(device), "dtype": default_dtype(dtype)}
        self._register("weight", torch.empty(num_groups, out_features, in_features, **options))
        if bias:
            self._register("bias", torch.empty(num_groups, out_features, **options))
        if options["device"].type != "meta":
            self.reset_parameters()

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.has_bias}"
        )

    def reset_parameters(self) -> None:
        """Initialise each weight as torch.nn.Linear does, and the biases with zeros."""
        self._reset([name for names in self._names.values() for name in names])

    def _reset(self, wanted: Collection[str]) -> None:
        tracker = self._rng_state_tracker_function
        with tracker().fork() if tracker is not None else contextlib.nullcontext():
            for name in self._names["weight"]:
                if name in wanted:
                    self.initialise(name, _fill)
        for name in self._names.get("bias", ()):
            if name in wanted:
                self.initialise(name, torch.nn.init.zeros_)
        for parts in self._separate():
            pack(parts)

    def pre_first_fuser_forward(self) -> None:
        every = [name for names in self._names.values() for name in names]
        on_meta = [name for name in every if getattr(self, name).is_meta]
        if on_meta:
            self._reset(on_meta)

    # -- questions of the planner ------------------------------------------------

    @property
    def saves_input(self) -> bool:  # type: ignore[override]
        """The weight gradients read the input."""
        return any(getattr(self, name).requires_grad for name in self._names["weight"])

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        self._check(spec.shape, extras)
        return TensorSpec((*spec.shape[:-1], self.out_features), autocast or self._dtype)

    def runs_at_once(self, key: PlanKey) -> bool:
        """Whether all groups are one launch, and the split sizes are not read on the host."""
        is_narrow = (key.autocast_dtype or self._dtype) is not torch.float32
        has_kernel = is_narrow and key.arch is not None and key.arch[0] in (9, 10)
        return has_kernel and not self.check_device_splits and quantizes_groups_of(key.recipe)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        (op,), recipe, weights = key.ops, key.recipe, self.main_grad_count
        is_one = self.runs_at_once(key)
        is_quantized = recipe is not None and (side == "forward" or recipe.quantizes_backward)
        sizes = (self.out_features, self.in_features)
        has_kernel = key.arch == (9, 0) and grouped_gemm.is_aligned(sizes)
        times, one = f"{self.num_groups} x ", "grouped "

        def product(name: str, a: str, b: str) -> str:
            of = f" of {self.num_groups}" if is_one else ""
            if is_quantized and is_one:
                assert recipe is not None
                formats = [self.quantizer_format(recipe, role) for role in (a, b)]
                is_native = has_kernel and sums_of(formats[0], formats[1], True) is not None
                how = "(native)" if is_native else "(emulated)"
                name = name.replace("mm", "scaled_mm") if is_native else name
                return f"{one}{name}{of} {how}"
            if is_quantized:
                return times + gemm_name(name, a, b, key, self.quantizer_format)
            return f"{one}{name}{of}" if is_one else times + name

        if side == "forward":
            weight_arrives = op.params[0].format is not None
            quantized_first = ("input", *["weight"] * (not weight_arrives)) if is_quantized else ()
            first = [f"{one if is_one else times}quantize {role}" for role in quantized_first]
            return (*first, product("mm", "input", "weight"), *["grouped add"] * self.has_bias)
        wanted = {
            f"{one if is_one else times}quantize grad_output": is_quantized,
            product("dgrad mm", "grad_output", "weight"): op.input_requires_grad,
            product("wgrad mm", "grad_output", "input"): any(
                param.requires_grad for param in op.params[:weights]
            )
            and not self.delay_wgrad_compute,
            "grouped sum": any(param.requires_grad for param in op.params[weights:]),
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    def notes(self, key: PlanKey, rows: int) -> tuple[str, ...]:
        """Groups, split sizes, padding, and what the bits of a row depend on."""
        is_one, recipe = self.runs_at_once(key), key.recipe
        how = (
            "one launch for all; split sizes are not read on the host, so that a CUDA graph can "
            "contain it."
            if is_one
            else "one after the other; split sizes are read on the host."
        )
        found = (
            f"{self.num_groups} groups, {how}",
            padding_note(recipe, self.num_groups, rows, is_one_launch=is_one),
            bits_note(recipe, key.autocast_dtype or self._dtype),
        )
        return tuple(note for note in found if note is not None)

    def num_quantizers(self, mode: str) -> int:
        return (2 if mode == "forward" else 1) * self.num_groups

    def quantizer_roles(self, mode: str) -> tuple[str, ...]:
        """Of each group: its input and its weight; or its gradient."""
        roles = ("input", "weight") if mode == "forward" else ("grad_output",)
        return roles * self.num_groups

    def input_quantization(self, key: PlanKey) -> QuantSpec | None:
        """None: each group has scales of its own, so that this op quantizes its input."""
        return None

    def grad_output_quantization(self, key: PlanKey) -> QuantSpec | None:
        """None, as :meth:`input_quantization`."""
        return None

    # -- running --------------------------------------------------------------------

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        """``op_kwargs`` may have ``is_first_microbatch``, and buffers of the caller.

        ``is_first_microbatch`` is as in :class:`BasicLinear`: True quantizes the weights and keeps
        them, False uses the kept ones. A buffer, ``output`` or ``grad_input``, belongs to one call
        until its result has been read: two calls that share one overwrite each other's results.
        """
        (ctx,), (extras,) = basic_op_ctxs, basic_op_extra_inputs
        options = dict(basic_op_kwargs[0])
        output, grad_input = options.pop("output", None), options.pop("grad_input", None)
        is_first = options.pop("is_first_microbatch", None)
        if options:
            raise InputError(
                f"GroupedLinear got {', '.join(options)}; it takes output, grad_input and "
                "is_first_microbatch."
            )
        self._check(input_.shape, extras)
        dtype = ctx.autocast_dtype or self._dtype
        ctx.compute_dtype = dtype
        shape = (*input_.shape[:-1], self.out_features)
        self._check_buffer("output", output, shape, dtype, input_.device)
        self._check_buffer("grad_input", grad_input, input_.shape, dtype, input_.device)
        ctx.grad_input_buffer = grad_input  # type: ignore[attr-defined]
        x = rows_of_groups(input_, dtype)
        for name, buffer in (("output", output), ("grad_input", grad_input)):
            if buffer is not None and overlap(buffer, input_):
                raise InputError(f"GroupedLinear got a buffer {name} in the memory of its input.")
        is_read = self.check_device_splits or not grouped.has_grouped_mm(x.device, dtype)
        quantizers = None
        if ctx.has_recipe:
            quantizers = None if is_read else quantizers_of_groups(self, ctx)
            is_read = quantizers is None
        groups = grouped.groups_of(extras[0], x, is_read=is_read, is_padded=quantizers is not None)
        out = None if output is None else output.view(-1, self.out_features)
        wants_wgrad = ctx.requires_grad and any(ctx.params_require_grad[: self.main_grad_count])
        wants_dgrad = ctx.requires_grad and ctx.input_requires_grad
        ctx.group_sizes = groups.sizes  # type: ignore[attr-defined]
        ctx.quantizers = quantizers  # type: ignore[attr-defined]
        ctx.is_loop = ctx.has_recipe and quantizers is None  # type: ignore[attr-defined]
        saved: list[torch.Tensor | None]
        if ctx.is_loop:
            weights = self._weights(ctx, dtype)
            is_stack = are_quantized(weights) and weights[0].dim() == 3
            if is_stack:
                keep_stack(ctx, weights[0], self.quantizer_values("forward")[1::2], wants_dgrad)
                weights = matrices(weights[0])
            wanted = (wants_wgrad, wants_dgrad and not is_stack)
            made_weights = self._looped_weights(ctx, weights, dtype, wants_dgrad, is_first)
            x = materialize(x)
            out = x.new_empty(x.shape[0], self.out_features) if out is None else out
            y, saved = loop_forward(self, ctx, x, weights, made_weights, groups, out, wanted)
            saved = [None, None, *saved]
        else:
            weight = self.stacked_weight(ctx, dtype)
            products = products_of_forward(ctx, groups, quantizers, dtype)
            is_quantized = ctx.backward_override is None
            made_x = products.input(x, quantizers, is_kept=wants_wgrad and is_quantized)
            made = self.weight_operand(ctx, products, weight, quantizers, is_first)
            y = products.forward(made_x, made, self.out_features)
            y = y if out is None else out.copy_(y)
            saved = [*groups.places(), kept(ctx, x, made_x, wants_wgrad)]
            saved.append(
                self.saved_weight(
                    ctx, weight, made, quantizers, wants_dgrad, is_own=is_first is None
                )
            )
        scales = extras[1].reshape(-1) if self.scale_bias else None
        y, bias = self.add_biases(ctx, groups.ends, scales, y)
        if ctx.requires_grad:
            ctx.save_for_backward(groups.ends, scales, bias, *saved)
        # Not the caller's tensor itself, of which autograd would make a part of the graph.
        y = y.view(shape) if output is None else output.detach()
        return write_output(y, next_op_input_quantizer), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        (ctx,) = basic_op_ctxs
        ends, scales, bias, padded_ends, tiles, *saved = ctx.saved_tensors
        self.check_versions(ctx)
        dtype = ctx.compute_dtype
        assert dtype is not None
        if ctx.grad_input_buffer is not None and overlap(ctx.grad_input_buffer, grad_output):
            raise InputError("GroupedLinear got a buffer grad_input in the memory of the gradient.")
        dy = cast(plain(grad_output, dtype), dtype).reshape(-1, self.out_features)
        groups = Groups.at(ends, ctx.group_sizes, padded_ends, tiles, len(dy))
        shape = (*grad_output.shape[:-1], self.in_features)
        buffer = ctx.grad_input_buffer
        out = None if buffer is None else buffer.view(-1, self.in_features)
        wants_wgrad = any(ctx.params_require_grad[: self.main_grad_count])
        wants_dgrad = ctx.input_requires_grad
        if ctx.is_loop:
            sizes = (self.num_groups, self.out_features, self.in_features)
            wanted = (wants_wgrad, wants_dgrad)
            gather_noted_reads(self._parts("weight"))
            if "separate_weights" in ctx.__dict__:
                saved[self.num_groups :] = kept_matrices(ctx)
            dx, make_wgrads = loop_backward(ctx, dy, saved, groups, out, sizes, wanted)
        elif wants_wgrad or wants_dgrad:
            x, weight = saved
            products = products_of_backward(ctx, groups, dtype)
            made = products.gradient(dy, ctx.quantizers, dgrad=wants_dgrad, wgrad=wants_wgrad)
            dx = None
            if wants_dgrad:
                dx = products.dgrad(made, self.weight_of_backward(ctx, weight, dtype))
            dx = dx if out is None or dx is None else out.copy_(dx)
            make_wgrads = functools.partial(products.wgrad, made, x) if wants_wgrad else None
        else:
            dx = make_wgrads = None
        if dx is not None:
            dx = write_grad_input(buffer if buffer is not None else dx.view(shape), ctx)
        dweights: Sequence[torch.Tensor | None] = [None] * self.main_grad_count
        if make_wgrads is not None:
            dweights = self.weight_gradients(ctx, make_wgrads)
        dbiases, dscales = self.bias_gradients(ctx, dy, groups, scales, bias)
        dscales = None if dscales is None else dscales.view(grad_output.shape[:-1])
        return dx, [(*dweights, *dbiases)], [(None, dscales) if self.scale_bias else (None,)]

    # -- parts of a pass, of which a fused op makes its own --------------------------------

    def add_biases(
        self,
        ctx: OperationContext,
        ends: torch.Tensor,
        scales: torch.Tensor | None,
        y: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``y`` with the biases of its groups, and the biases if the gradient of scales reads them.

        ``scales``, one for each row, are those of ``scale_bias``.
        """
        if not self.has_bias:
            return y, None
        bias = self._stacked("bias", y.dtype)
        y = add_bias(ends, bias, None if scales is None else cast(scales, y.dtype), y)
        wants_dscales = self.scale_bias and ctx.extra_inputs_require_grad[1]
        if not (ctx.requires_grad and wants_dscales):
            return y, None
        self._note_versions(ctx, "bias")
        return y, bias

    def bias_gradients(
        self,
        ctx: OperationContext,
        dy: torch.Tensor,
        groups: Groups,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[Sequence[torch.Tensor | None], torch.Tensor | None]:
        """The gradients of the biases that autograd gets, and of :meth:`add_biases`' scales."""
        dbiases: Sequence[torch.Tensor | None] = [None] * len(self._names.get("bias", ()))
        if any(ctx.params_require_grad[self.main_grad_count :]):
            dbiases = self.bias_parts(ctx, grouped.sums(dy, groups, scales))
        if bias is None or scales is None:
            return dbiases, None
        products = (dy.float() * reference.of_rows(groups.ends, bias, dy.shape[0]).float()).sum(-1)
        return dbiases, reference.zero_tail(groups.ends, products).to(scales.dtype)

    def bias_parts(
        self, ctx: OperationContext, summed: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of the biases that autograd gets, from those of all groups ``[G, N]``."""
        parts = [summed] if self.single_grouped_bias else summed
        require_grad = ctx.params_require_grad[self.main_grad_count :]
        return [p if w else None for p, w in zip(parts, require_grad, strict=True)]

    # -- checks -----------------------------------------------------------------------

    def _check(self, shape: tuple[int, ...], extras: Sequence[Any]) -> None:
        """Check the shapes of the input and of the extra inputs: tensors, or their specs."""
        name = self._sized()
        if shape[-1] != self.in_features:
            raise InputError(
                f"{name} got an input of shape {tuple(shape)}; its last dimension must be "
                f"{self.in_features}."
            )
        sizes = extras[0]
        if sizes.dtype not in INDEX_DTYPES:
            raise InputError(f"{name} got split sizes of {sizes.dtype}; they must be integers.")
        if tuple(sizes.shape) != (self.num_groups,):
            raise InputError(
                f"{name} got split sizes of shape {tuple(sizes.shape)}; it takes one for each of "
                f"its {self.num_groups} groups."
            )
        if self.scale_bias and tuple(extras[1].shape) != tuple(shape[:-1]):
            raise InputError(
                f"{name} got scales of shape {tuple(extras[1].shape)} for an input of shape "
                f"{tuple(shape)}; it takes one scale per row, {tuple(shape[:-1])}."
            )

    def _check_buffer(
        self,
        name: str,
        buffer: torch.Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if buffer is None:
            return
        if not isinstance(buffer, torch.Tensor):
            raise InputTypeError(
                f"GroupedLinear takes a tensor as buffer {name}; got {type(buffer).__name__}."
            )
        given = (tuple(buffer.shape), buffer.dtype, buffer.device, buffer.is_contiguous())
        if given != (tuple(shape), dtype, device, True):
            raise InputError(
                f"GroupedLinear got a buffer {name} of shape {tuple(buffer.shape)}, {buffer.dtype} "
                f"on {buffer.device} with strides {buffer.stride()}; it takes a contiguous one of "
                f"shape {tuple(shape)}, {dtype} on {device}."
            )
        if buffer.requires_grad:
            raise InputError(f"GroupedLinear got a buffer {name} that requires a gradient.")


def _fill(weight: torch.Tensor) -> None:
    """Initialise one weight, or each of several, as torch.nn.Linear does."""
    if is_distributed(weight):  # whose ranks have some of the weights, or rows of one
        bound = 1 / math.sqrt(weight.shape[-1])
        torch.nn.init.uniform_(weight, -bound, bound)
        return
    for each in weight if weight.dim() == 3 else [weight]:
        torch.nn.init.kaiming_uniform_(each, a=math.sqrt(5))
