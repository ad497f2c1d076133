"""GroupedLinear: a linear for each group of rows, as in mixtures of experts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fuser.basic_ops.grouped_loop import LoopedProduct
from fuser.basic_ops.grouped_parameters import GroupParameters
from fuser.basic_ops.grouped_products import (
    GroupedProduct,
    product_at_once,
    quantizers_of_each,
    quantizers_of_groups,
    quantizes_groups_of,
    rows_of_groups,
)
from fuser.basic_ops.linear_operands import gemm_name, quantizes_weight_again, takes_rebuilt_input
from fuser.basic_ops.shared_memory import overlap
from fuser.cuda import grouped_gemm
from fuser.errors import InputError, InputTypeError
from fuser.formats import GROUP_TILE, tile_count
from fuser.functional.lazy import LazyTensor, materialize
from fuser.gemm import grouped
from fuser.gemm.quantized_groups import sums_of
from fuser.op import (
    BasicOperation,
    Contexts,
    OperationContext,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    Values,
    check_sizes,
    default_device,
    default_dtype,
    write_grad_input,
    write_output,
)
from fuser.precision.quantizer_for import role_format
from fuser.recipe import Recipe
from fuser.specs import PlanKey, Product, QuantSpec, TensorSpec

INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class GroupedLinear(GroupParameters):
    """``y_g = x_g @ weight_g.T (+ bias_g)``: a linear for each group of consecutive rows.

    The first extra input, ``split_sizes``, is an integer tensor ``[num_groups]`` with the number of
    rows of each group, on the device of the input or on the CPU. A group may be empty. Rows after
    the last group belong to none: their output and their gradients are zeros, and no value in them
    reaches any other result.

    With fp16 and bf16 operands on a Hopper or Blackwell GPU all groups are one launch, and the
    sizes are not read on the host: the op can be captured in a CUDA graph, and its output may be
    replayed with other sizes. There negative sizes count as zero, and groups end at the last row.
    The same holds under recipes of current and delayed scaling, blocks of 128, MXFP8 and NVFP4,
    which quantize the operands of all groups in one launch; on a CPU, too, these quantize all
    groups together. Elsewhere each group has its own product, and sizes on a GPU are read.

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

    can_quantize_output: tuple[str, ...] = ("forward", "backward")
    step_keywords = None  # output, grad_input and is_first_microbatch
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
        sizes = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        check_sizes("GroupedLinear", **sizes)
        self.num_groups = num_groups
        self.in_features, self.out_features = in_features, out_features
        self._take_parameter_init(is_one=single_grouped_weight)
        self.has_bias = bias
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias
        self.scale_bias = scale_bias and bias
        self.num_extra_inputs = 1 + self.scale_bias
        self._rng_state_tracker_function = rng_state_tracker_function
        is_one = {"weight": single_grouped_weight, "bias": single_grouped_bias}
        self._names = {
            kind: (kind,) if one else tuple(f"{kind}{g}" for g in range(num_groups))
            for kind, one in is_one.items()
            if kind == "weight" or bias
        }
        self.parameter_names = [*itertools.chain(*self._names.values())]
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
        self._reset(itertools.chain(*self._names.values()))

    def _reset(self, names: Iterable[str]) -> None:
        super()._reset(names)
        self._pack()

    def pre_first_fuser_forward(self) -> None:
        names = itertools.chain(*self._names.values())
        on_meta = [name for name in names if getattr(self, name).is_meta]
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

    def product(self, spec: TensorSpec, output: TensorSpec) -> Product:
        rows = math.prod(spec.shape[:-1])
        weights = self.in_features * self.out_features
        operands = (rows * self.in_features, self.num_groups * weights, rows * self.out_features)
        return Product(2 * rows * weights, operands, self.num_groups)

    def runs_at_once(self, key: PlanKey) -> bool:
        """Whether all groups are one product, for which the host reads no split sizes."""
        dtype = key.autocast_dtype or self._dtype
        is_one = dtype is not torch.float32 and key.arch is not None and key.arch[0] in (9, 10)
        if key.recipe is not None and key.device == "cpu":
            is_one = is_one or grouped.multiplies_quantized(torch.device("cpu"), dtype)
        return is_one and not self.check_device_splits and quantizes_groups_of(key.recipe)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        (op,), recipe, weights = key.ops, key.recipe, self.main_grad_count
        biases = weights + len(self._names.get("bias", ()))
        is_quantized = recipe is not None and (side == "forward" or recipe.quantizes_backward)
        product = functools.partial(self._product_name, key, is_quantized)
        quantize = f"{'grouped' if self.runs_at_once(key) else f'{self.num_groups} x'} quantize"
        if side == "forward":
            is_launched = {
                f"{quantize} input": is_quantized,
                f"{quantize} weight": is_quantized and op.params[0].format is None,
                product("mm", "input", "weight"): True,
                "grouped add": self.has_bias,
            }
        else:
            wants_wgrad = any(param.requires_grad for param in op.params[:weights])
            wants_wgrad = wants_wgrad and not self.delay_wgrad_compute
            is_launched = {
                f"{quantize} grad_output": is_quantized,
                product("dgrad mm", "grad_output", "weight"): op.input_requires_grad,
                product("wgrad mm", "grad_output", "input"): wants_wgrad,
                "grouped sum": any(param.requires_grad for param in op.params[weights:biases]),
            }
        return tuple(name for name, is_one in is_launched.items() if is_one)

    def _product_name(self, key: PlanKey, is_quantized: bool, name: str, a: str, b: str) -> str:
        """The kernels of a product, which multiplies the tensors of roles ``a`` and ``b``."""
        count, recipe = self.num_groups, key.recipe
        if not self.runs_at_once(key):
            one = gemm_name(name, a, b, key, self.quantizer_format) if is_quantized else name
            return f"{count} x {one}"
        if recipe is None or not is_quantized:
            return f"grouped {name} of {count}"
        has_kernel = key.arch == (9, 0) and grouped_gemm.is_aligned(
            (self.out_features, self.in_features)
        )
        formats = self.quantizer_format(recipe, a), self.quantizer_format(recipe, b)
        if has_kernel and sums_of(*formats, True) is not None:
            return f"grouped {name.replace('mm', 'scaled_mm')} of {count} (native)"
        return f"grouped {name} of {count} (emulated)"

    def notes(self, key: PlanKey, rows: int) -> tuple[str, ...]:
        """Groups, split sizes, padding, and what the bits of a row depend on."""
        is_one, recipe = self.runs_at_once(key), key.recipe
        how = (
            "one launch for all; split sizes are not read on the host, so that a CUDA graph can "
            "contain it."
            if is_one
            else "one after the other; split sizes are read on the host."
        )
        notes = (
            f"{self.num_groups} groups, {how}",
            padding_note(recipe, self.num_groups, rows, is_one_launch=is_one),
            bits_note(recipe, key.autocast_dtype or self._dtype),
        )
        return tuple(note for note in notes if note is not None)

    def num_quantizers(self, mode: str) -> int:
        return (2 if mode == "forward" else 1) * self.num_groups

    def quantizer_roles(self, mode: str) -> tuple[str, ...]:
        """Of each group: its input and its weight; or its gradient."""
        roles = ("input", "weight") if mode == "forward" else ("grad_output",)
        return roles * self.num_groups

    def input_quantization(self, key: PlanKey) -> QuantSpec | None:
        """None: each group has scales of its own, so that this op quantizes for itself."""
        return None

    grad_output_quantization = input_quantization

    def takes_rebuilt_input(self, key: PlanKey) -> bool:
        """Unless each group is quantized alone."""
        is_plain = key.recipe is None or key.recipe.backward_override == "high_precision"
        return (is_plain or self.runs_at_once(key)) and takes_rebuilt_input(self, key)

    def quantizes_weight_again(self, key: PlanKey) -> bool:
        """Unless each group is quantized alone."""
        return self.runs_at_once(key) and quantizes_weight_again(self, key)

    def take_rebuilt_input(self, ctx: OperationContext, values: Values) -> None:
        is_lazy = isinstance(values, LazyTensor) and values.is_of_groups
        if values.dtype is not ctx.compute_dtype or not is_lazy:
            values = materialize(values)
        ctx.rebuilt_input = rows_of_groups(values, ctx)

    def equal_extra(
        self, ops: Sequence[BasicOperation], place: int
    ) -> tuple[int, Callable[[torch.Tensor, torch.Tensor], None]] | None:
        """Split sizes are those of a linear before it, if both are parts of one expert.

        Then they have equal numbers of groups, and only pointwise ops between them. After other
        ops the groups may differ.
        """
        last = next((i for i in range(place)[::-1] if not hasattr(ops[i], "stage")), None)
        before = None if last is None else ops[last]
        if last is None or not isinstance(before, GroupedLinear):
            return None
        if before.num_groups != self.num_groups:
            return None
        return last, functools.partial(check_equal_sizes, (last, place))

    # -- running --------------------------------------------------------------------

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        """``op_kwargs`` may have ``is_first_microbatch``, and buffers of the caller.

        ``is_first_microbatch`` is as in :class:`BasicLinear`: True quantizes the weights and keeps
        them, False uses the kept ones. A buffer, ``output`` or ``grad_input``, belongs to one call
        until its result has been read: two calls that share one overwrite each other's results.
        """
        (ctx,), extras, options = ctxs, inputs.extras, dict(inputs.kwargs[0])
        output, grad_input = options.pop("output", None), options.pop("grad_input", None)
        is_first = options.pop("is_first_microbatch", None)
        if options:
            raise InputError(
                f"GroupedLinear got {', '.join(options)}; it takes output, grad_input and "
                "is_first_microbatch."
            )
        self._check(x.shape, extras)
        dtype = ctx.compute_dtype = ctx.autocast_dtype or self._dtype
        shape = (*x.shape[:-1], self.out_features)
        self._check_buffer("output", output, shape, dtype, x)
        self._check_buffer("grad_input", grad_input, x.shape, dtype, x)
        matrix = rows_of_groups(x, ctx)
        product = self._product(ctx, extras[0], matrix)
        y = product.forward(matrix, extras, is_first, keeps_input=ctx.keeps_input)
        if grad_input is not None and ctx.requires_grad:
            ctx.state = ctx.state._replace(grad_input=grad_input)
        # Not the caller's tensor itself, of which autograd would make a part of the graph.
        y = y.view(shape) if output is None else output.copy_(y.view(shape)).detach()
        return write_output(y, inputs.quantizer), ()

    def _product(self, ctx: OperationContext, split_sizes: torch.Tensor, x: Any) -> GroupedProduct:
        """The product of all groups at once if they can be quantized so, else one by one."""
        is_read = self._reads_sizes(ctx, x)
        quantizers = None
        if ctx.has_recipe:
            quantizers = None if is_read else quantizers_of_groups(self, ctx)
            is_read = quantizers is None
        groups = grouped.groups_of(
            split_sizes, x, is_read=is_read, is_padded=quantizers is not None
        )
        if ctx.has_recipe and quantizers is None:
            return LoopedProduct(self, ctx, groups, quantizers_of_each(self, ctx))
        return product_at_once(self, ctx, groups, quantizers)

    def _reads_sizes(self, ctx: OperationContext, x: Any) -> bool:
        """Whether the host needs split sizes, unless a quantizer of groups is missing."""
        has_product = grouped.multiplies_quantized if ctx.has_recipe else grouped.has_grouped_mm
        return self.check_device_splits or not has_product(x.device, x.dtype)

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (ctx,) = ctxs
        buffer, matrix = ctx.state.grad_input, rows_of_groups(dy, ctx)
        if buffer is not None and overlap(buffer, dy):
            raise InputError(
                "GroupedLinear got a buffer grad_input in the memory of the gradient."
                " Give it memory of its own."
            )
        product = GroupedProduct.of_backward(self, ctx, matrix.shape[0])
        dx, grads, extras = product.backward([matrix], dy.shape[:-1])
        if dx is not None:
            dx = dx.view(*dy.shape[:-1], self.in_features)
            dx = write_grad_input(dx if buffer is None else buffer.copy_(dx), ctx)
        return dx, grads, extras

    # -- checks -----------------------------------------------------------------------

    def _check(self, shape: tuple[int, ...], extras: Sequence[torch.Tensor | TensorSpec]) -> None:
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
        input_: torch.Tensor,
    ) -> None:
        if buffer is None:
            return
        device = input_.device
        if not isinstance(buffer, torch.Tensor):
            raise InputTypeError(
                f"GroupedLinear takes a tensor as buffer {name}; got {type(buffer).__name__}."
            )
        layout = (tuple(buffer.shape), buffer.dtype, buffer.device, buffer.is_contiguous())
        if layout != (tuple(shape), dtype, device, True):
            raise InputError(
                f"GroupedLinear got a buffer {name} of shape {tuple(buffer.shape)}, {buffer.dtype} "
                f"on {buffer.device} with strides {buffer.stride()}; it takes a contiguous one of "
                f"shape {tuple(shape)}, {dtype} on {device}."
            )
        if buffer.requires_grad:
            raise InputError(
                f"GroupedLinear got a buffer {name} that requires a gradient. Give its detach()."
            )
        if overlap(buffer, input_):
            raise InputError(
                f"GroupedLinear got a buffer {name} in the memory of its input."
                " Give it memory of its own."
            )


def check_equal_sizes(ops: tuple[int, int], first: torch.Tensor, second: torch.Tensor) -> None:
    """Refuse other split sizes for the second of two ops; on other devices they are not read."""
    if first is second:
        return
    is_readable = first.device.type == second.device.type == "cpu"
    if not is_readable or first.shape != second.shape:  # which the op refuses
        return
    sizes, others = first.tolist(), second.tolist()
    if sizes != others:
        raise InputError(
            f"The grouped MLP of ops {ops[0]} to {ops[1]} got split sizes "
            f"[{grouped.listed(sizes)}] for its first GroupedLinear and [{grouped.listed(others)}] "
            "for its second; they must be equal, unless the linears are in two pipelines."
        )


OWN_BITS = "The bits of a row depend on that row and its group alone"


def padding_note(
    recipe: Recipe | None, groups: int, rows: int, *, is_one_launch: bool
) -> str | None:
    """The rows that quantizing adds to ``rows`` rows in groups.

    None if it adds no rows, if there are none, or if the recipe is custom. A group ends on average
    in the middle of its last tile, or block of a format.
    """
    if recipe is None or recipe.custom():
        return None
    multiple = GROUP_TILE if is_one_launch else role_format(recipe, "input").multiple
    if multiple == 1 or rows == 0:  # of a dispatch with a capacity of 0
        return None
    more = groups * multiple // 2
    text = (
        f"Each group is padded to a multiple of {multiple} rows: about {multiple // 2} more a "
        f"group, of {rows} rows {_percent(more, rows)}."
    )
    if not is_one_launch:
        return text
    buffer = tile_count(rows, groups) * GROUP_TILE
    return (
        f"{text} Sizes are not known when memory is allocated, so a padded matrix of T rows has "
        f"up to T + {GROUP_TILE - 1} x {groups} rows: here {buffer}, "
        f"{_percent(buffer - rows, rows)}."
    )


def _percent(more: int, rows: int) -> str:
    return f"{100 * more / rows:.1f}% more"


def bits_note(recipe: Recipe | None, dtype: torch.dtype) -> str | None:
    """A note on other rows that change the bits of a row; None if that is not known."""
    if recipe is None:
        is_torchs = dtype is torch.float32
        but = ", if torch's product does not depend on the number of rows" if is_torchs else ""
        return f"{OWN_BITS}{but}."
    if recipe.custom():
        return None
    if recipe.delayed():
        return f"{OWN_BITS}, and on scales of earlier steps."
    shared = {role: _rows_of_a_scale(recipe, role) for role in ("input", "grad_output")}
    if not recipe.quantizes_backward:
        del shared["grad_output"]
    sharing = [
        f"its {tensor} shares a scale with {shared[role]} of its group"
        for role, tensor in (("input", "input"), ("grad_output", "gradient"))
        if shared.get(role)
    ]
    if not sharing:
        return f"{OWN_BITS}."
    return f"The bits of a row may depend on other rows: {', and '.join(sharing)}."


def _rows_of_a_scale(recipe: Recipe, role: str) -> str:
    """The rows with which a row shares a scale; empty if it has scales of its own."""
    layout = role_format(recipe, role).layout
    names = {*layout.rowwise, *layout.shared}
    if not names <= layout.rows.keys():
        return "all rows"
    most = max(layout.rows[name][1] for name in names)
    return f"{most - 1} rows" if most > 1 else ""
