"""The base classes of operations: what an op is, what it may be asked, what it saves."""

from __future__ import annotations

import abc
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import overrides
from torch.utils._device import DeviceContext

from fuser.errors import InputError, InputIndexError, InputTypeError, StateError
from fuser.formats import DType, NumberFormat
from fuser.functional.lazy import LazyTensor, kernels_run_on, written
from fuser.graph_break import breaks_graph
from fuser.module_calls import module_calls, noting
from fuser.precision.contexts import current_recipe
from fuser.precision.delayed_scaling import DelayedScales
from fuser.precision.quantizer_for import fp8_dtype, make_quantizer, role_format
from fuser.recipe import CustomRecipe, DelayedScaling, Recipe
from fuser.specs import PlanKey, QuantSpec, TensorSpec
from fuser.tensors import QuantizedTensor, Quantizer

COMPUTE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# An op keeps the quantizers of that many recipes: of as many as a pipeline keeps plans.
MAX_RECIPES = 256

_RUNNING_METHODS = (
    *("op_forward", "op_backward", "fuser_forward", "fuser_backward"),
    *("pre_first_fuser_forward", "pre_fuser_forward"),
)

Grads = Iterable[torch.Tensor | None]
_ByPlace = dict[tuple[str, int, str], Quantizer]


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of torch's autocast on ``device_type``, or None where it is off."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype``; itself if it is already (0.6 us faster than ``to``)."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def write_output(values: torch.Tensor | LazyTensor, quantizer: Any | None) -> torch.Tensor:
    """``values`` as the op that reads them next wants them: quantized, or as they are for None.

    What is quantized stays as it is: a second time would round again. What is
    not in memory yet is written here, plainly or quantized.
    """
    if quantizer is None:
        return values if type(values) is torch.Tensor else written(values)
    if isinstance(values, QuantizedTensor):
        return values
    quantized: torch.Tensor = quantizer(values)
    return quantized


def write_grad_input(grad_input: torch.Tensor | LazyTensor, ctx: OperationContext) -> torch.Tensor:
    """The gradient of an op's main input as the op before wants it.

    It is quantized from the dtype in which the input arrived, as the op before
    would quantize it.
    """
    quantizer = ctx.grad_input_quantizer
    if quantizer is None:
        return grad_input if type(grad_input) is torch.Tensor else written(grad_input)
    if grad_input.dtype is not ctx.input_dtype:
        grad_input = written(grad_input)
        if not isinstance(grad_input, QuantizedTensor):
            grad_input = grad_input.to(ctx.input_dtype)
    return write_output(grad_input, quantizer)


def quantizes_values(side: str, key: PlanKey) -> bool:
    """Whether kernels run here that quantize what they make, as the neighbour on ``side`` wants it.

    Not for quantizers of the user, which may take tensors alone, and not for a
    gradient that must be cast first.
    """
    if not kernels_run_on(key.device) or isinstance(key.recipe, CustomRecipe):
        return False
    return side == "forward" or key.autocast_dtype in (None, key.ops[0].input_dtype)


def default_device(device: torch.device | str | None) -> torch.device:
    """The device for new parameters.

    ``None`` means torch's default device if one was set, else CUDA if there is
    one, else the CPU.
    """
    if device is not None:
        return torch.device(device)
    chosen = torch.get_default_device()
    if chosen.type == "cpu" and torch.cuda.is_available() and not _default_device_was_set():
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _default_device_was_set() -> bool:
    """Whether the user chose torch's default device, here or through ``with device:``."""
    # torch has no public question for this; a set device is a DeviceContext on
    # the function-mode stack.
    stack: list[Any] = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, DeviceContext) for mode in stack)


def default_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype for new parameters: ``dtype``, or torch's default.

    Raises
    ------
    InputError
        If it is none of fp32, fp16 and bf16.
    """
    chosen = dtype if dtype is not None else torch.get_default_dtype()
    if chosen not in COMPUTE_DTYPES:
        raise InputError(f"Parameters are float32, float16 or bfloat16; got {chosen}.")
    return chosen


def check_parallelism(op: str, mode: str | None, group: Any | None, sequence: bool = False) -> None:
    """Refuse sharding that an op cannot do: this version runs on one rank.

    ``op`` is its name, ``mode`` None, ``"column"`` or ``"row"``, and ``sequence`` whether the
    sequence is to be sharded too, which a mode decides how.

    Raises
    ------
    InputError
    """
    if mode not in (None, "column", "row"):
        raise InputError(f"tensor_parallel_mode is {mode!r}; it is None, 'column' or 'row'.")
    if mode is None:
        if sequence:
            raise InputError(
                f"{op} got sequence_parallel=True and no tensor_parallel_mode, which says what is "
                "gathered or scattered; it is 'column' or 'row'."
            )
        return
    ranks = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
    if ranks > 1:
        raise InputError(
            f"{op} was asked for {mode} tensor parallelism over {ranks} ranks; this version of "
            "fuser runs on one."
        )


class OperationContext:
    """What one basic op keeps between one forward and its backward.

    Ops may set attributes of their own. Tensors go through
    :meth:`save_for_backward` and come back as ``saved_tensors``.
    """

    # What every call writes is in slots: five contexts cost 0.3 us less.
    __slots__ = ("__dict__", "saved_tensors", "to_save")

    requires_grad: bool = True
    """Whether any backward reaches this op."""
    input_requires_grad: bool = True
    """Whether the gradient of the op's main input is wanted."""
    params_require_grad: tuple[bool, ...] = ()
    """Whether the gradient of each of the op's parameters is wanted."""
    extra_inputs_require_grad: tuple[bool, ...] = ()
    """Whether the gradient of each extra input is wanted, also of one that comes on a channel."""
    autocast_dtype: torch.dtype | None = None
    """The dtype of torch's autocast in the forward, None where it is off."""
    has_recipe: bool = False
    """Whether the forward runs under a recipe."""
    backward_override: str | None = None
    """The recipe's override: how backward gets its operands, None for quantized ones."""
    split_accumulators: tuple[bool, bool, bool] = (False, True, True)
    """Whether the quantized GEMMs of forward, dgrad and wgrad use split accumulators."""
    input_dtype: torch.dtype = torch.float32
    """The dtype in which the op's main input arrives."""
    grad_input_quantizer: Any | None = None
    """What the op before wants the gradient of the main input in, None for plain."""
    grad_output_quantizer: Any | None = None
    """What this op quantizes the gradient of its output with, where it does."""
    main_grad_owner: torch.Tensor | None = None
    """In backward: the weight to whose ``main_grad`` the gradient of the op's first parameter is
    added; None where that is returned, or not wanted."""
    compute_dtype: torch.dtype | None = None
    """The dtype that a linear's operands have, or are dequantized to."""
    to_save: tuple[torch.Tensor | None, ...] | None
    saved_tensors: Any
    """In backward: what the forward saved, in its order."""

    def __init__(self) -> None:
        self.to_save = self.saved_tensors = None

    if TYPE_CHECKING:  # an op's own attributes

        def __getattr__(self, name: str) -> Any: ...

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep ``tensors`` for the backward; called in the forward."""
        self.to_save = tensors


METHODS = ("forward", "op_forward", "op_backward", "fuser_forward", "fuser_backward", "__class__")
"""What changes how an op is run, when it is set on the object."""


class FusibleOperation(torch.nn.Module, abc.ABC):
    """An operation that a pipeline can run: basic, or the fusion of basic ones."""

    # What runs the op when it is called alone; not part of its state, so that a copy makes its own.
    __slots__ = ("_runner",)
    _runner: Any
    # Makes of a quantizer what code outside this library is handed: called with the quantizer, and
    # with what was made before for the same place, or None. The package sets it.
    quantizer_view: ClassVar[Callable[[Any, Any], Any]] = staticmethod(lambda value, before: value)
    is_external: ClassVar[bool] = False
    """Whether code outside this library runs in the op's forward or backward."""

    register_forward_pre_hook = noting("register_forward_pre_hook")
    register_forward_hook = noting("register_forward_hook")
    register_backward_hook = noting("register_backward_hook")
    register_full_backward_pre_hook = noting("register_full_backward_pre_hook")
    register_full_backward_hook = noting("register_full_backward_hook")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in METHODS:
            module_calls.change()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        methods = (getattr(cls, name, None) for name in _RUNNING_METHODS)
        modules = {getattr(method, "__module__", None) or __name__ for method in methods}
        cls.is_external = any(module.partition(".")[0] != "fuser" for module in modules)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in METHODS:
            module_calls.change()

    def implementation(self) -> tuple[Any, ...]:
        """What runs this op: its class, and methods that were set on the object itself."""
        return (type(self), *(self.__dict__.get(name) for name in METHODS))

    @property
    @abc.abstractmethod
    def is_fused_op(self) -> bool:
        """Whether this op is the fusion of one or more basic ops."""

    def pre_first_fuser_forward(self) -> None:
        """Called once, before the first forward of a pipeline that holds this op."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before each forward of a pipeline that holds this op."""

    def get_input_quantizer(self) -> Any | None:
        """The quantizer this op wants its input in, if any."""
        return None

    def get_grad_output_quantizer(self) -> Any | None:
        """The quantizer this op wants the gradient of its output in, if any."""
        return None

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
        """Run forward for every basic op of this operation.

        Returns the output and, for each basic op, its extra outputs.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward of its own.")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        """Run backward for every basic op of this operation.

        Returns the gradient of the input and, for each basic op, those of its
        parameters and of its extra inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} has no backward of its own.")

    def __getstate__(self) -> dict[str, Any]:
        # Without the slot.
        return self.__dict__.copy()


class BasicOperation(FusibleOperation):
    """A single operation: owns its parameters, its quantizers and what it saves.

    Subclasses implement :meth:`op_forward` and :meth:`op_backward`, or, with
    extra inputs or outputs, ``fuser_forward`` and ``fuser_backward``. The
    attributes below tell the planner what the op moves through memory; the
    defaults suit an op that keeps the shape and saves its input.
    """

    # The pipeline module sets this to its class; ops are on a lower floor.
    pipeline_class: ClassVar[Callable[..., Any]]

    name: str = ""
    """What a custom recipe's factory is told to tell ops apart; anybody may set it."""
    module_type: str = ""
    """The kind of op that such a factory is told."""
    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    takes_scalars: bool = False
    """Whether the main input may have no dimensions; the op is then handed a shape of [1]."""
    takes_floating_extras: bool = False
    """Whether extra inputs must be in one of the dtypes that pipelines run in."""
    saves_input: bool = True
    """Whether backward reads the op's main input."""
    accumulates_into_main_grad: bool = False
    """Whether backward adds the gradient of the op's first parameter to its ``main_grad``."""
    passes_gradient_on: bool = False
    """Whether the gradient of the input is that of the output, whatever else backward launches."""
    parameter_names: Sequence[str] | None = None
    """The op's parameters, in the order in which backward returns their gradients.

    The op has each of them and no others; one of a submodule is named by its path,
    ``"gate.weight"``. None means the op's own parameters in the order in which their names
    were first registered, and after them those of its submodules."""
    backward_attributes: tuple[str, ...] = ()
    """Attributes of the op that its backward reads from the context, as they were in the forward;
    a fusion that runs one half of the op finds them there too."""
    can_quantize_output: tuple[str, ...] = ()
    """Where the op quantizes what it hands on for a neighbour that asks, ``"forward"`` its output
    and ``"backward"`` the gradient of its input; elsewhere the neighbour quantizes."""

    def __init__(self) -> None:
        super().__init__()
        self._input_channels: dict[int, str] = {}
        self._output_channels: dict[int, tuple[str, bool]] = {}
        self._captured = False
        self._delayed: dict[str, DelayedScales] = {}
        self._registered_names: list[str] = []
        # What the recipe asked last gave, and every recipe.
        self._quantizers: tuple[Recipe, _ByPlace] | None = None
        self._made_quantizers: dict[Recipe, _ByPlace] = {}
        # For code outside this library: the recipe of the last forward, what it was handed.
        self._last_recipe: Recipe | None = None
        self._quantizer_views: dict[tuple[str, int], Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "get_quantizer" in cls.__dict__:  # holds for what this library asks, too
            cls.quantizer_value = cls._quantizer_value_of_view  # type: ignore[method-assign]

    @property
    def is_fused_op(self) -> bool:
        return False

    # -- what the planner asks ------------------------------------------------

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec | None:
        """The op's main output for a main input like ``spec`` and such extra inputs.

        ``autocast`` is the dtype of torch's autocast, None where it is off. The
        default, None, means that the op does not tell: planning then assumes
        the input's shape and dtype, and checks nothing further down. Asked
        again with what really arrived when running the op raises.

        Raises
        ------
        InputError
            If the op cannot take such an input.
        """
        return None

    def extra_output_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Shape and dtype of each extra output, for a main input like ``spec``.

        The default takes them for tensors like the input. Where they are not, plans count wrong
        bytes, and the first call warns.
        """
        return (spec,) * self.num_extra_outputs

    def saved_bytes(self, spec: TensorSpec) -> int:
        """Bytes saved for backward besides the op's input: statistics, masks."""
        return 0

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        """Names of what is launched in ``"forward"`` or ``"backward"``.

        Empty for an op that only passes views or references on. ``key`` is the
        plan key narrowed to this op.
        """
        return (type(self).__name__,)

    def context_constants(self, key: PlanKey) -> dict[str, Any]:
        """Attributes of the op's contexts that are the same in all calls of one plan."""
        return {}

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        """Whether what the op hands on quantized is written so by the kernel that makes it.

        If not, quantizing is a kernel of its own.
        """
        return False

    def quantizes(self, side: str, key: PlanKey) -> dict[str, QuantSpec]:
        """What this op quantizes on ``side`` because it arrives plain: how, by role."""
        return {}

    # -- parameters -----------------------------------------------------------

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        # torch's own order changes when a parameter is deleted and set again.
        if name not in self._registered_names:
            self._registered_names.append(name)

    def initialise(self, name: str, fill: Callable[[torch.Tensor], Any]) -> None:
        """Fill parameter ``name`` in place; one on meta is made first, on the default device.

        Raises
        ------
        StateError
            As :meth:`renew`.
        """
        parameter = getattr(self, name)
        if not parameter.is_meta:
            fill(parameter)
            return
        data = torch.empty_like(parameter, device=default_device(None))
        fresh = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
        fill(fresh)
        self.renew(name, fresh)

    def renew(self, name: str, fresh: torch.nn.Parameter) -> None:
        """Give parameter ``name`` the contents of ``fresh``; it stays the object that it is.

        An optimizer that was made before goes on with it, and it keeps its attributes.

        Raises
        ------
        StateError
            If a graph or a hook holds the parameter, or a hook computes it.
        """
        old = self._parameters.get(name)
        why = "it is computed by a hook"
        if old is not None and not old._backward_hooks and not old._post_accumulate_grad_hooks:
            fresh.__dict__.update({**old.__dict__, **fresh.__dict__})
            try:
                torch.utils.swap_tensors(old, fresh)  # type: ignore[no-untyped-call]
                return
            except RuntimeError as error:
                why = f"something holds it, such as the graph of a call on meta ({error})"
        elif old is not None:
            why = "it has hooks"
        raise StateError(
            f"{type(self).__name__} cannot give its parameter {name!r} new contents in place: "
            f"{why}. Call model.to_empty(device=...) and then reset_parameters() of its ops before "
            "an optimizer, a graph or a hook is given the parameters."
        )

    # -- quantizers -----------------------------------------------------------

    def input_quantization(self, key: PlanKey) -> QuantSpec | None:
        """How this op wants its main input, None for plain; ``key`` is narrowed to this op.

        The copies are those that this op reads, forward and backward.
        """
        return self._wanted("forward", key)

    def grad_output_quantization(self, key: PlanKey) -> QuantSpec | None:
        """How this op wants the gradient of its output, None for plain."""
        if key.recipe is None or not key.recipe.quantizes_backward:
            return None
        return self._wanted("backward", key)

    def emitted(self, side: str, key: PlanKey, wanted: QuantSpec | None) -> QuantSpec | None:
        """How this op hands on its output (``"forward"``) or the gradient of its input.

        ``wanted`` is how the neighbour that reads it wants it.
        """
        return wanted if side in self.can_quantize_output else None

    def _wanted(self, mode: str, key: PlanKey) -> QuantSpec | None:
        roles = self.quantizer_roles(mode)
        if key.recipe is None or not roles:
            return None
        form = self.quantizer_format(key.recipe, roles[0])
        return QuantSpec(form, rowwise=True, columnwise=True)

    def num_quantizers(self, mode: str) -> int:
        """Number of quantizers in ``mode``, ``"forward"`` or ``"backward"``."""
        return 0

    def quantizer_roles(self, mode: str) -> tuple[str, ...]:
        """What the quantizers of ``mode`` are for: the input, then weights; or gradients."""
        count = self.num_quantizers(mode)
        if mode == "backward":
            return ("grad_output",) * count
        return ("input", *["weight"] * (count - 1)) if count else ()

    def quantizer_format(self, recipe: Recipe, role: str) -> NumberFormat:
        """The format in which this op quantizes what has such a role."""
        if not isinstance(recipe, CustomRecipe):
            return role_format(recipe, role)
        modes = ("forward", "backward")
        at = next(
            (mode, self.quantizer_roles(mode).index(role))
            for mode in modes
            if role in self.quantizer_roles(mode)
        )
        return self._made_quantizer(recipe, *at).format

    def quantizer_value(
        self, mode: str, index: int, device: torch.device | None = None
    ) -> Quantizer | None:
        """Quantizer ``index`` of ``mode`` as ops of this library use it; None outside an autocast.

        A frozen value. Delayed scaling's state is made on ``device``, that of
        the op's parameters if it is None.
        """
        recipe = current_recipe()
        if recipe is None:
            return None
        kept = self._quantizers
        if kept is not None and kept[0] is recipe is self._last_recipe:
            made = kept[1].get((mode, index, self.quantizer_roles(mode)[index]))
            if made is not None:
                return made
        return self._quantizer_under(recipe, mode, index, device)

    def _quantizer_value_of_view(
        self, mode: str, index: int, device: torch.device | None = None
    ) -> Quantizer | None:
        given = self.get_quantizer(mode, index)
        return given and given.with_usage(rowwise=given.rowwise, columnwise=given.columnwise)

    def get_quantizer(
        self, mode: str, index: int, device: torch.device | None = None
    ) -> Quantizer | None:
        """Quantizer ``index`` of ``mode`` for code outside this library; None where there is none.

        It can be changed, by ``set_usage`` for one, and is the same object at the next call; what
        this library quantizes does not follow it. Outside every autocast it is the quantizer of
        the op's last forward, so that a backward may ask for it. ``device`` is as in
        :meth:`quantizer_value`.
        """
        recipe = current_recipe()
        if recipe is None:
            value = self._last_quantizer(mode, index)
            if value is None:
                return None
        else:
            value = self._quantizer_under(recipe, mode, index, device)
        before = self._quantizer_views.get((mode, index))
        view: Quantizer = type(self).quantizer_view(value, before)
        self._quantizer_views[mode, index] = view
        return view

    def _quantizer_under(
        self, recipe: Recipe, mode: str, index: int, device: torch.device | None = None
    ) -> Quantizer:
        if self.__dict__["_last_recipe"] is not recipe:
            self.__dict__["_last_recipe"] = recipe  # torch's own setting takes 1 us
        if isinstance(recipe, DelayedScaling):
            state, dtypes, device = self._delayed_state(mode, recipe, device)
            return state.quantizer(recipe, dtypes, index, device)
        return self._made_quantizer(recipe, mode, index)

    def _made_quantizer(self, recipe: Recipe, mode: str, index: int) -> Quantizer:
        kept = self._quantizers
        if kept is None or (kept[0] is not recipe and kept[0] != recipe):
            made_for = self._made_quantizers
            if len(made_for) >= MAX_RECIPES:
                made_for.pop(next(iter(made_for)))
            kept = self._quantizers = (recipe, made_for.setdefault(recipe, {}))
        role = self.quantizer_roles(mode)[index]
        made = kept[1].get((mode, index, role))
        if made is None:
            # A custom recipe's factory is asked once for each quantizer of an op: plans rely on it.
            made = make_quantizer(recipe, role, module_type=self.module_type, name=self.name)
            made = kept[1].setdefault((mode, index, role), made)
        return made

    def _delayed_state(
        self, mode: str, recipe: DelayedScaling, device: torch.device | None = None
    ) -> tuple[DelayedScales, list[DType], torch.device]:
        """Delayed scaling's state for ``mode``; the formats under ``recipe``; where it belongs."""
        if device is None:
            # An op's own come first; torch's iterator looks through all modules below.
            own = (p for p in self._parameters.values() if p is not None)
            parameter = next(itertools.chain(own, self.parameters()), None)
            device = default_device(None) if parameter is None else parameter.device
        dtypes = [fp8_dtype(recipe.fp8_format, role) for role in self.quantizer_roles(mode)]
        state = self._delayed.get(mode)
        if state is None:
            state = self._delayed.setdefault(mode, DelayedScales(mode))
        return state, dtypes, device

    def _last_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """The quantizer of the last forward, if that ran under a recipe."""
        recipe = self._last_recipe
        if recipe is None:
            return None
        if isinstance(recipe, DelayedScaling):
            state = self._delayed.get(mode)
            return None if state is None else state.last_quantizer(index)
        return self._made_quantizer(recipe, mode, index)

    def get_input_quantizer(self) -> Any | None:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Any | None:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    # -- running --------------------------------------------------------------

    # Typed so that an op may name the keyword arguments it takes, or take none.
    def op_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward of an op without extra inputs or outputs; returns the output.

        Called as ``op_forward(ctx, input_, prev_op_grad_output_quantizer=...,
        next_op_input_quantizer=..., **kwargs)`` with the quantizer that the op
        before wants gradients in, the one that the op after wants its input
        in, and the caller's ``op_kwargs`` for this op.
        """
        raise StateError(self._missing_method("forward"))

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        """Backward of such an op: gradient of the input, gradients of the parameters."""
        raise StateError(self._missing_method("backward"))

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
        if self.num_extra_inputs or self.num_extra_outputs:
            raise StateError(self._missing_method("forward"))
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        result = self.op_backward(basic_op_ctxs[0], grad_output)
        if not isinstance(result, tuple) or len(result) != 2:
            raise StateError(
                f"{type(self).__name__}.op_backward returns (grad_input, param_grads); it returned "
                f"a {type(result).__name__}."
            )
        grad_input, grad_params = result
        return grad_input, [grad_params], [()]

    def _missing_method(self, side: str) -> str:
        prefix = "fuser" if self.num_extra_inputs or self.num_extra_outputs else "op"
        return (
            f"{type(self).__name__} has {self.num_extra_inputs} extra inputs and "
            f"{self.num_extra_outputs} extra outputs, so it must implement {prefix}_{side}."
        )

    @breaks_graph
    def forward(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the op alone; planned once and cached like any pipeline.

        A channel has no other end here: what is bound to one is an extra input or output of the
        call like every other.
        """
        result: torch.Tensor | tuple[torch.Tensor, ...] = self._own_pipeline()(
            input, *extra_inputs, basic_op_kwargs=[kwargs] if kwargs else None
        )
        return result

    def _own_pipeline(self) -> Any:
        """The pipeline of this op alone, made once and kept."""
        try:
            pipeline, version = self._runner
        except AttributeError:
            pipeline = version = None
        if version is not module_calls.version:
            version = module_calls.version
            if pipeline is None or pipeline.implementations != (self.implementation(),):
                # A pipeline holds its ops, so this one holds another object with the state of this
                # op: a cycle would keep parameters until the garbage collector runs.
                twin = object.__new__(type(self))
                object.__setattr__(twin, "__dict__", self.__dict__)
                pipeline = type(self).pipeline_class([twin], open_channels=self.channels)
            self._runner = (pipeline, version)
        return pipeline

    # -- channels -------------------------------------------------------------

    def set_extra_output_channel(
        self, index: int, name: str, *, output_to_caller: bool = True
    ) -> BasicOperation:
        """Route extra output ``index`` to later extra inputs bound to ``name``.

        With ``output_to_caller=False`` the pipeline does not return it as well.
        Returns the op itself.

        Raises
        ------
        InputIndexError
            If the op has no such extra output.
        InputError, InputTypeError
            If the name is empty, or an argument is of another type.
        StateError
            If a pipeline has captured the op already.
        """
        self._check_channel("output", index, self.num_extra_outputs, name)
        if not isinstance(output_to_caller, bool):
            raise InputTypeError(
                f"output_to_caller of channel {name!r} is True or False; got {output_to_caller!r}."
            )
        self._output_channels[index] = (name, output_to_caller)
        return self

    def set_extra_input_channel(self, index: int, name: str) -> BasicOperation:
        """Take extra input ``index`` from the channel ``name`` instead of the caller.

        Returns the op itself. Raises as :meth:`set_extra_output_channel`.
        """
        self._check_channel("input", index, self.num_extra_inputs, name)
        self._input_channels[index] = name
        return self

    def returns_extra_output(self, index: int) -> bool:
        """Whether extra output ``index`` goes back to the caller."""
        return self._output_channels.get(index, ("", True))[1]

    @property
    def channels(self) -> frozenset[str]:
        """The names of the channels that extra inputs and outputs are bound to."""
        return frozenset(self._input_channels.values()) | {
            name for name, _ in self._output_channels.values()
        }

    def _check_channel(self, kind: str, index: int, count: int, name: str) -> None:
        if not isinstance(name, str):
            raise InputTypeError(f"A channel is named by a str; got {name!r}.")
        if not name:
            raise InputError(
                f"Extra {kind} {index} of {type(self).__name__} got a channel with an empty name."
            )
        if not isinstance(index, int) or isinstance(index, bool):
            raise InputTypeError(
                f"Channel {name!r} asks for an extra {kind} by its number; got {index!r}."
            )
        if not 0 <= index < count:
            raise InputIndexError(
                f"Channel {name!r} asks for extra {kind} {index} of {type(self).__name__}, "
                f"which has {count}."
            )
        if self._captured:
            raise StateError(
                f"Channel {name!r} cannot be bound: a pipeline has captured this "
                f"{type(self).__name__} already. Bind channels before the first call or plan."
            )

    # -- state ----------------------------------------------------------------

    def get_extra_state(self) -> torch.Tensor:
        """Delayed scaling's state as a plain fp32 tensor; empty and uint8 where there is none."""
        if not any(state.scale.numel() for state in self._delayed.values()):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        states = (self._delayed.get(mode, DelayedScales(mode)) for mode in ("forward", "backward"))
        return torch.cat([state.packed() for state in states])

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Take such state; that of other libraries is pickled bytes, and not read."""
        if not isinstance(state, torch.Tensor):
            return
        loaded = {mode: DelayedScales(mode) for mode in self._delayed}
        if state.numel():
            if state.dtype is not torch.float32:
                return
            for mode in ("forward", "backward"):
                scales, state = DelayedScales.unpacked(state, mode)
                if scales.scale.numel():
                    loaded[mode] = scales
        # Without any state the checkpoint's op had none.
        for mode, previous in self._delayed.items():
            loaded[mode].succeed(previous)
        self._delayed = loaded

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # A checkpoint of plain modules has no extra state, and needs none.
        if prefix + "_extra_state" in missing_keys:
            missing_keys.remove(prefix + "_extra_state")

    def __getstate__(self) -> dict[str, Any]:
        # A factory may be a closure, which cannot be pickled; a copy asks it anew.
        return {
            **super().__getstate__(),
            "_captured": False,
            "_quantizers": None,
            "_made_quantizers": {},
            "_last_recipe": None,
            "_quantizer_views": {},
        }


QUANTIZER_ARGUMENTS = ("prev_op_grad_output_quantizer", "next_op_input_quantizer")
"""What ``op_forward`` gets by keyword from its pipeline."""


@functools.cache
def pipeline_arguments(cls: type[BasicOperation]) -> tuple[str, ...]:
    """The arguments of an op's forward that its pipeline gives, and no caller may."""
    if cls.fuser_forward is not BasicOperation.fuser_forward:
        return ()  # it gets the caller's as a dict of their own
    parameters = list(inspect.signature(cls.op_forward).parameters.values())[1:3]
    named = (p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    return (*named, *QUANTIZER_ARGUMENTS)


@functools.cache
def keyword_names(cls: type[BasicOperation]) -> tuple[str, ...] | None:
    """The keyword arguments that an op of this class takes from its caller; None for any."""
    if cls.fuser_forward is not BasicOperation.fuser_forward:
        return None
    parameters = list(inspect.signature(cls.op_forward).parameters.values())[3:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.name not in QUANTIZER_ARGUMENTS)


class _FixedOps(torch.nn.ModuleList):
    """The basic ops of a fused one: pipelines hold on to them, so they stay what they are."""

    def __init__(self, ops: Iterable[FusibleOperation]) -> None:
        super().__init__(ops)
        self._is_fixed = True

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        names = ", ".join(type(op).__name__ for op in self)
        raise StateError(
            f"The basic ops [{names}] of a fused operation cannot be exchanged: replace the whole "
            "operation, or a parameter of the basic op."
        )

    __setitem__ = __delitem__ = insert = pop = _refuse

    def append(self, module: torch.nn.Module) -> Any:
        return self._refuse() if hasattr(self, "_is_fixed") else super().append(module)

    def extend(self, modules: Iterable[torch.nn.Module]) -> Any:
        return self._refuse() if hasattr(self, "_is_fixed") else super().extend(modules)


class _NoParameters(dict[str, Any]):
    """The parameters of a fused op itself: none can be put, taken or deleted here."""

    def __init__(self, owner: type, members: Sequence[FusibleOperation]) -> None:
        super().__init__()
        self._owner = owner.__name__
        self._members = " and ".join(type(op).__name__ for op in members)

    def _refuse(self, name: str, *value: Any) -> Any:
        raise StateError(
            f"{self._owner} has no parameter {name!r} of its own, and cannot be given one: "
            f"parameters are those of its basic ops, {self._members}. Change, prune or normalize "
            f"one of those instead, as in {self._owner.lower()}.basic_ops[0]."
        )

    __missing__ = __setitem__ = __delitem__ = _refuse


class FusedOperation(FusibleOperation):
    """One class for one way to run a window of basic ops at once.

    Holds nothing of its own: parameters and saved state stay with the basic
    ops. A fusion that the planner may find by itself names its ``window`` (op
    types, and the patterns of :mod:`fuser.plan`) and its ``side``:

    - ``"forward"`` and ``"backward"`` fusions are interchangeable with that
      half of the unfused ops: same outputs, same saved state;
    - a ``"joint"`` fusion replaces both halves, which need only be equivalent
      as a pair.

    Parameters
    ----------
    basic_ops
        The ops that this one replaces, in their order.
    """

    # The grouping module sets this to its class; ops are on a lower floor.
    grouping_class: ClassVar[Callable[..., Any]]

    window: ClassVar[tuple[Any, ...]] = ()
    side: ClassVar[str] = ""
    recomputes: ClassVar[bool] = False
    """Whether a joint fusion saves the window's input alone, and what is computed from it again in
    backward is not."""

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        self.basic_ops = _FixedOps(basic_ops)
        if not len(self.basic_ops):
            raise InputError(f"{type(self).__name__} was given no basic ops to replace.")
        # The same ops as a tuple: unpacking a ModuleList costs 2 us a call.
        self.members: tuple[Any, ...] = tuple(self.basic_ops)
        self._parameters = _NoParameters(type(self), self.members)

    @property
    def is_fused_op(self) -> bool:
        return True

    # Typed so that a fusion may name its window's ops as parameters.
    @classmethod
    def refuses(cls, *ops: Any, **key: Any) -> str | None:
        """Why this fusion cannot run these ops, as a sentence; None if it can.

        Called as ``refuses(*ops, key=key)``. ``ops`` are what the elements of
        ``window`` matched: an op, None for an absent ``Optional``, a tuple for
        ``Many``. ``key`` is the plan key narrowed to the window's ops.
        """
        return None

    @classmethod
    def kernels(cls, *ops: Any, **where: Any) -> tuple[tuple[str, int], ...]:
        """What is launched, in order: a name, and how many ops it finishes.

        Called as ``kernels(*ops, side=side, key=key)``, with ``ops`` and
        ``key`` as in :meth:`refuses`. The numbers add up to the length of the
        window; backward counts from its last op to its first. The default is
        one kernel for all of it.
        """
        return ((cls.__name__, len(where["key"].ops)),)

    @classmethod
    def fuses_quantize(cls, *ops: Any, **where: Any) -> bool:
        """As of a basic op; called as ``fuses_quantize(*ops, side=side, key=key)``."""
        return False

    def get_input_quantizer(self) -> Any | None:
        return self.members[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Any | None:
        return self.members[-1].get_grad_output_quantizer()

    def pre_first_fuser_forward(self) -> None:
        for op in self.members:
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.members:
            op.pre_fuser_forward(requires_grad=requires_grad)

    @breaks_graph
    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the basic ops of this operation as a pipeline of their own.

        A basic op with hooks is called as the module it is. What is bound to a channel with no
        other end in here is an extra input or output of the call like every other.
        """
        grouping = self._own_grouping()
        keywords = None if basic_op_kwargs is None else grouping.keywords(basic_op_kwargs)
        result: torch.Tensor | tuple[torch.Tensor, ...]
        result = grouping.run(input, extra_inputs, keywords)
        return result

    def _own_grouping(self) -> Any:
        """The basic ops as pipelines and modules, grouped anew when hooks have changed."""
        try:
            runner = self._runner
        except AttributeError:
            runner = None
        if runner is None or not runner.is_current():
            runner = self._runner = type(self).grouping_class(
                self.members, name=type(self).__name__, is_open=True, previous=runner
            )
        return runner
