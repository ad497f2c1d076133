"""Basic operations: the base class for authors of ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.compiler import is_compiling

from fuser.communication import GroupArgument
from fuser.doors import PASSES, VIEW
from fuser.errors import StateError
from fuser.formats import DType, NumberFormat
from fuser.op.channels import ChannelBindings
from fuser.op.context import OperationContext
from fuser.op.fusible import QUANTIZER_METHODS, FusibleOperation
from fuser.op.module_calls import module_calls
from fuser.op.parameters import default_device
from fuser.op.state import is_tried
from fuser.op.step import Grads, Values
from fuser.precision.contexts import current_recipe
from fuser.precision.delayed_scaling import DelayedScales
from fuser.precision.op_numbers import note_op
from fuser.precision.quantizer_for import make_quantizer, role_format
from fuser.recipe import CustomRecipe, DelayedScaling, Recipe, fp8_dtype
from fuser.specs import Collective, PlanKey, Product, QuantSpec, TensorSpec
from fuser.tensors import Float8Quantizer, QuantizedTensor, Quantizer
from fuser.torch_private import gradient_hooks

# An op keeps the quantizers of this many custom recipes; a pipeline keeps as many plans.
MAX_RECIPES = 256

_ByPlace = dict[tuple[str, int, str], Quantizer]

Counter = Callable[[torch.Tensor, Sequence[torch.Tensor]], Mapping[str, Any]]
"""Of :meth:`BasicOperation.counter`."""


class BasicOperation(ChannelBindings, FusibleOperation):
    """A single operation. It owns its parameters, its quantizers and its saved tensors.

    Subclasses implement :meth:`op_forward` and :meth:`op_backward`, or, with
    extra inputs or outputs, ``fuser_forward`` and ``fuser_backward``. The
    attributes below tell the planner which bytes the op moves through memory;
    the defaults fit an op that keeps the shape and saves its input.
    """

    # runtime/pipeline.py sets this to its class: ops may not import a later package.

    name: str = ""
    """A name for the op, which a custom recipe's factory gets; users may set it."""
    module_type: str = ""
    """The kind of op, which such a factory gets too."""
    part_of: str = ""
    """The class that a user named to get this op, for messages; empty if it is the op's own."""
    takes_scalars: bool = False
    """Whether the main input may have no dimensions; the op then gets it in shape [1]."""
    takes_floating_extras: bool = False
    """Whether every extra input must have one of the dtypes that pipelines run in."""
    num_groups: int = 1
    """The number of its weights that each read a part of the rows."""
    index_extras: tuple[int, ...] = ()
    """Extra inputs of a few integers, such as split sizes: their number does not grow with the
    tokens, and they may also be on the CPU."""
    saves_input: bool = True
    """Whether backward reads the op's main input."""
    rebuilds_output: bool = False
    """Whether :meth:`rebuild` can compute the output again in backward."""
    copies_input: bool = False
    """Whether the output has copies of the rows of the main input, so that to save the input for
    :meth:`rebuild` takes less memory than to save the output."""
    can_round_input: bool = False
    """Whether the op can save its main input in FP8, if the plan says so."""
    is_recordable: bool = True
    """Whether the op's passes do nothing that a recording would not repeat, such as queueing.

    A class of a user says so by setting it: then dtypes, shapes, strides and attributes of the op
    decide what its passes call, values do not, and they have no effect but their results. A
    pipeline with the op is then recorded, and on a GPU replayed as a CUDA graph."""
    accumulates_into_main_grad: bool = False
    """Whether backward adds gradients of the op's first parameters to their ``main_grad``."""
    main_grad_count: int = 1
    """The number of these parameters."""
    draws_seed: bool = False
    """Whether a forward in training draws the seed of a mask, as ``Dropout`` does."""
    passes_gradient_on: bool = False
    """Whether the gradient of the input is the gradient of the output, unchanged."""
    grad_input_dtype: str = "grad_output"
    """The tensor whose dtype the gradient of the input has: ``"grad_output"`` if it follows the
    gradient that arrives, ``"input"`` or ``"output"`` if it does not."""
    passes_gradient_to_extras: bool = False
    """Whether the gradient of every extra input is the gradient of the output, unchanged."""
    parameter_names: Sequence[str] | None = None
    """Names of the op's parameters, in the order in which backward returns their gradients.

    The op has exactly these parameters. A parameter of a submodule is named by its path, such as
    ``"gate.weight"``. None means all parameters: first the op's own, in the order in which their
    names were first registered, then those of its submodules."""
    backward_attributes: tuple[str, ...] | type[tuple[Any, ...]] = ()
    """Attributes of the op that a plan copies into the context, for every forward that runs it,
    fused or not: the fields of a ``NamedTuple``, which is then the context's ``state``, or names,
    which are then attributes of the context."""
    runs_in_graph: bool = False
    """Whether this is the copy that passes of compiled graphs run, over the graph's tensors."""
    rows_are_sharded: bool = False
    """Whether each rank has some rows of the input, so that gradients of parameters that are
    DTensors are sums over these rows, which backward adds over the ranks of the mesh."""
    step_keywords: tuple[str, ...] | None = ()
    """The keyword arguments of a caller that ``step_forward`` takes; None if it checks them."""
    can_quantize_output: tuple[str, ...] = ()
    """Sides on which the op can quantize for its neighbour: ``"forward"`` its output,
    ``"backward"`` the gradient of its input. On other sides the neighbour quantizes."""

    def __init__(self) -> None:
        super().__init__()
        self._input_channels: dict[int, str] = {}
        self._output_channels: dict[int, tuple[str, bool]] = {}
        self._captured = False
        self._delayed: dict[str, DelayedScales] = {}
        self._registered_names: list[str] = []
        # Of every custom recipe.
        self._made_quantizers: dict[Recipe, _ByPlace] = {}
        # For code outside this library: the recipe of the last forward, and quantizers it got.
        self._last_recipe: Recipe | None = None
        self._quantizer_views: dict[tuple[str, int], Any] = {}
        self._number = note_op(self)
        PASSES.guest.new_op(self)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "get_quantizer" in cls.__dict__:  # the library then uses that method too
            cls.quantizer_value = cls._quantizer_value_of_view  # type: ignore[method-assign]
        # The class that defines a method says whose it is; a wrapper may copy the method's names.
        owners = [
            next(c for c in cls.__mro__ if name in c.__dict__).__module__
            for name in QUANTIZER_METHODS
        ]
        cls._has_constant_quantizers = (
            all(owner.partition(".")[0] == "fuser" for owner in owners)
            and cls.quantizer_value is not cls._quantizer_value_of_view
        )

    _has_constant_quantizers: ClassVar[bool] = True

    @property
    def is_fused_op(self) -> bool:
        return False

    # -- questions of the planner ---------------------------------------------

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec | None:
        """The spec of the main output, from the specs of the main input and the extra inputs.

        ``autocast`` is the dtype of torch's autocast, None if it is off. The default returns
        None: the output is not known. The planner then assumes the input's shape and dtype, and
        does not check later ops. If running the op raises, fuser calls this method again with the
        actual input.

        Raises
        ------
        InputError
            If the op cannot take this input.
        """
        return None

    def extra_output_specs(
        self, spec: TensorSpec, extras: Sequence[TensorSpec]
    ) -> tuple[TensorSpec, ...]:
        """Shape and dtype of each extra output, from the specs of main input and extra inputs.

        The default takes them for tensors like the input. Where they are not, plans count wrong
        bytes, and the first call warns.
        """
        return (spec,) * self.num_extra_outputs

    def product(self, spec: TensorSpec, output: TensorSpec) -> Product | None:
        """The matrix product of forward, for main input and output; None for an op without one."""
        return None

    def saved_bytes(self, spec: TensorSpec) -> int:
        """Bytes that the op saves for backward besides its input, such as statistics or a mask.

        They grow with the tokens: what a call saves once, such as a seed, does not count.
        """
        return 0

    def equal_extra(
        self, ops: Sequence[BasicOperation], place: int
    ) -> tuple[int, Callable[[torch.Tensor, torch.Tensor], None]] | None:
        """An op before this one whose first extra input must be equal to its own, and a check.

        Ops with ``index_extras`` are asked. ``place`` is that of this op among ``ops``, and the
        check raises InputError for two tensors that differ.
        """
        return None

    def kept_input(self, key: PlanKey) -> QuantSpec | None:
        """How the op keeps its main input, if it keeps it quantized; else None."""
        return None

    def kept_weight(self, key: PlanKey) -> QuantSpec | None:
        """The quantized copy of the op's first parameter that backward reads; None without one."""
        return None

    def takes_rebuilt_input(self, key: PlanKey) -> bool:
        """Whether backward reads the main input, and takes one that is computed again."""
        return False

    @property
    def can_defer_wgrad(self) -> bool:
        """Whether :meth:`op_backward` leaves the gradients of parameters if a context says so."""
        return False

    def deferred_gradients(self, ctx: OperationContext) -> Grads:
        """The parameters' gradients of a backward with ``ctx.defers_wgrad``, after it."""
        raise NotImplementedError

    def quantizes_weight_again(self, key: PlanKey) -> bool:
        """Whether backward quantizes the op's weight again, and forward need not keep that."""
        return False

    def rebuild(self, ctx: OperationContext, input_: Values | None) -> Values:
        """In backward, the output of the forward of ``ctx`` again, with the same bits.

        ``input_`` is the main input; None for an op that saved it.
        """
        raise NotImplementedError

    def take_rebuilt_input(self, ctx: OperationContext, values: Values) -> None:
        """Put the main input among the saved tensors of ``ctx``, as forward would have saved it."""
        raise NotImplementedError

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        """Names of the kernels that the op launches in ``"forward"`` or ``"backward"``.

        Empty for an op that returns views or references. ``key`` is the plan key narrowed to
        this op.
        """
        return (type(self).__name__,)

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can contain the op."""
        return self.is_recordable and not self.process_groups

    @property
    def process_groups(self) -> tuple[GroupArgument, ...]:
        """The groups over which its passes communicate: a recording has them as inputs."""
        return ()

    def counter(self, following: Sequence[BasicOperation]) -> Counter | None:
        """What reads a number on the host before each pass, on which sizes in the pass depend.

        It gets the main input of the pipeline and the op's extra inputs, and returns keyword
        arguments of the op. ``following`` are the ops after it. None, as here: nothing is read.
        """
        return None

    def collectives(self, side: str, key: PlanKey) -> tuple[Collective, ...]:
        """The communication of the op on ``"forward"`` or ``"backward"``, in its order.

        ``key`` is narrowed to this op. A fusion of an op that communicates must do it too, and
        say so by ``FusedOperation.communicates``.
        """
        return ()

    def context_constants(self, key: PlanKey) -> dict[str, object]:
        """Attributes of the op's contexts that have one value in all calls of a plan."""
        return {}

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        """Whether the kernel that computes the op's output also quantizes it.

        If not, a separate kernel quantizes. On ``"backward"`` the output is the gradient of the
        op's input.
        """
        return False

    def quantizes(self, side: str, key: PlanKey) -> dict[str, QuantSpec]:
        """Tensors that arrive unquantized on ``side`` and that this op quantizes, by role."""
        return {}

    # -- parameters -----------------------------------------------------------

    def placement_of(self, name: str) -> tuple[int | None, GroupArgument]:
        """How a ``DTensor`` that is parameter ``name`` must be placed.

        The dimension that is sharded, and the process group over whose ranks; ``(None, None)`` if
        every rank has the whole parameter.
        """
        return None, None

    def arrange_parameters(self) -> bool:
        """Move parameters in memory to where passes read them at once; whether any was moved.

        A pipeline asks after a parameter was replaced or moved. They stay the same objects.
        """
        return False

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        # torch's own order changes when a parameter is deleted and set again.
        if name not in self._registered_names:
            self._registered_names.append(name)

    def initialise(self, name: str, fill: Callable[[torch.Tensor], object]) -> None:
        """Fill parameter ``name`` in place; if it is on meta, allocate it on the default device.

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
        """Give parameter ``name`` the contents of ``fresh``. It stays the same object.

        An optimizer that holds it continues with it, and it keeps its attributes.

        Raises
        ------
        StateError
            If a graph or a hook holds the parameter, or a hook computes it.
        """
        old = self._parameters.get(name)
        why = "it is computed by a hook"
        if old is not None and not old._backward_hooks and not gradient_hooks(old):
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
        """The quantization that this op wants for its main input; None for unquantized.

        ``key`` is narrowed to this op. The usage is that of forward and backward together.
        """
        return self._wanted("forward", key)

    def grad_output_quantization(self, key: PlanKey) -> QuantSpec | None:
        """The quantization that this op wants for its output's gradient; None for unquantized."""
        if key.recipe is None or not key.recipe.quantizes_backward:
            return None
        return self._wanted("backward", key)

    def output_quantization(
        self, side: str, key: PlanKey, wanted: QuantSpec | None
    ) -> QuantSpec | None:
        """The quantization of the op's output, or on ``"backward"`` of its input's gradient.

        ``wanted`` is the quantization that the op which reads it wants.
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
        """Roles of the quantizers of ``mode``: the input, then weights; or gradients."""
        count = self.num_quantizers(mode)
        if mode == "backward":
            return ("grad_output",) * count
        return ("input", *["weight"] * (count - 1)) if count else ()

    def quantizer_format(self, recipe: Recipe, role: str) -> NumberFormat:
        """The format in which this op quantizes tensors of ``role``."""
        if not isinstance(recipe, CustomRecipe):
            return role_format(recipe, role)
        places = [
            (mode, self.quantizer_roles(mode).index(role))
            for mode in ("forward", "backward")
            if role in self.quantizer_roles(mode)
        ]
        if not places:  # a subclass may give its quantizers other roles
            return make_quantizer(recipe, role, module_type=self.module_type, name=self.name).format
        return self._made_quantizer(recipe, *places[0]).format

    def quantizer_value(
        self, mode: str, index: int, device: torch.device | None = None
    ) -> Quantizer | None:
        """Quantizer ``index`` of ``mode`` as ops of this library use it; None outside an autocast.

        A frozen value. Delayed scaling's state is made on ``device``, that of
        the op's parameters if it is None.
        """
        recipe = current_recipe()
        return None if recipe is None else self._quantizer_under(recipe, mode, index, device)

    def quantizer_values(self, mode: str) -> list[Quantizer | None]:
        """:meth:`quantizer_value` of every index of ``mode``.

        Delayed scaling's state is looked up once, which matters for the hundreds of a grouped op.
        """
        recipe, count = current_recipe(), self.num_quantizers(mode)
        is_own = self._has_constant_quantizers
        is_own = is_own and self.__dict__.keys().isdisjoint(QUANTIZER_METHODS)
        if not (is_own and isinstance(recipe, DelayedScaling)):
            return [self.quantizer_value(mode, index) for index in range(count)]
        self.__dict__["_last_recipe"] = recipe
        state, dtypes, device = self._delayed_state(mode, recipe)
        quantizers: list[Quantizer | None] = [
            state.quantizer(recipe, dtypes, index, device) for index in range(count)
        ]
        if recipe.override_linear_precision[2]:
            return [self._of_role(q, recipe, mode, i) for i, q in enumerate(quantizers) if q]
        return quantizers

    def constant_quantizer(self, recipe: Recipe, mode: str, index: int) -> Quantizer | None:
        """:meth:`quantizer_value` if it is the same at every call, so that a plan can hold it.

        None for delayed scaling and custom recipes, whose quantizers belong to an op's state, and
        for an op whose quantizers code outside this library chooses.
        """
        if recipe.delayed() or recipe.custom() or not self._has_constant_quantizers:
            return None
        if not self.__dict__.keys().isdisjoint(QUANTIZER_METHODS):
            return None
        return self._made_quantizer(recipe, mode, index)

    def context_values(self, key: PlanKey) -> dict[str, object]:
        """Values that each call of the plan puts into the op's context, by attribute.

        Unlike :meth:`context_constants`, they live no longer than the plan.
        """
        return {}

    def _quantizer_value_of_view(
        self, mode: str, index: int, device: torch.device | None = None
    ) -> Quantizer | None:
        view = self.get_quantizer(mode, index)
        return view and view.with_usage(rowwise=view.rowwise, columnwise=view.columnwise)

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
        if recipe is not None:
            value: Quantizer | None = self._quantizer_under(recipe, mode, index, device)
        else:
            value = self._last_quantizer(mode, index)
        if value is None:
            return None
        view: Quantizer = VIEW.guest.of(value, self._quantizer_views.get((mode, index)))
        self._quantizer_views[mode, index] = view
        return view

    def _quantizer_under(
        self, recipe: Recipe, mode: str, index: int, device: torch.device | None = None
    ) -> Quantizer:
        if self.__dict__["_last_recipe"] is not recipe:
            self.__dict__["_last_recipe"] = recipe  # torch's own setting takes 1 us
        if isinstance(recipe, DelayedScaling):
            state, dtypes, device = self._delayed_state(mode, recipe, device)
            quantizer = state.quantizer(recipe, dtypes, index, device)
            is_changed = recipe.override_linear_precision[2]
            return self._of_role(quantizer, recipe, mode, index) if is_changed else quantizer
        return self._made_quantizer(recipe, mode, index)

    def _of_role(
        self, quantizer: Quantizer, recipe: DelayedScaling, mode: str, index: int
    ) -> Quantizer:
        """The quantizer; with the values for products that read no quantized ones."""
        role = self.quantizer_roles(mode)[index]
        if recipe.keeps_columns(role) and isinstance(quantizer, Float8Quantizer):
            return quantizer.with_exact_columns
        return quantizer

    def _made_quantizer(self, recipe: Recipe, mode: str, index: int) -> Quantizer:
        role = self.quantizer_roles(mode)[index]
        if not isinstance(recipe, CustomRecipe):
            return make_quantizer(recipe, role)
        # Plans rely on the factory being called once for each quantizer of an op.
        kept = self._made_quantizers.get(recipe)
        if kept is None:
            while len(self._made_quantizers) >= MAX_RECIPES:
                self._made_quantizers.pop(next(iter(self._made_quantizers)), None)
            kept = self._made_quantizers.setdefault(recipe, {})
        quantizer = kept.get((mode, index, role))
        if quantizer is None:
            quantizer = make_quantizer(recipe, role, module_type=self.module_type, name=self.name)
            quantizer = kept.setdefault((mode, index, role), quantizer)
        return quantizer

    def _delayed_state(
        self, mode: str, recipe: DelayedScaling, device: torch.device | None = None
    ) -> tuple[DelayedScales, list[DType], torch.device]:
        """Delayed scaling's state for ``mode``, its formats under ``recipe``, and its device."""
        if device is None:
            # An op's own come first; torch's iterator looks through all modules below.
            parameters = (p for p in self._parameters.values() if p is not None)
            parameter = next(itertools.chain(parameters, self.parameters()), None)
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
            last = None if state is None else state.last_quantizer(index)
            return last and self._of_role(last, recipe, mode, index)
        return self._made_quantizer(recipe, mode, index)

    def get_input_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    # -- running --------------------------------------------------------------

    # These types let an op name its own keyword arguments, or take none.
    def op_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward of an op without extra inputs or outputs; returns the output.

        Called as ``op_forward(ctx, input_, prev_op_grad_output_quantizer=...,
        next_op_input_quantizer=..., **kwargs)``: the quantizer that the op
        before wants for gradients, the quantizer that the op after wants for
        its input, and the caller's ``op_kwargs`` for this op.
        """
        raise StateError(self._missing_method("forward"))

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        """Backward of such an op; returns the gradients of the input and of the parameters."""
        raise StateError(self._missing_method("backward"))

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        quantizers = {
            "prev_op_grad_output_quantizer": prev_op_grad_output_quantizer,
            "next_op_input_quantizer": next_op_input_quantizer,
        }
        if type(self).step_forward is not FusibleOperation.step_forward:
            return super().fuser_forward(
                basic_op_ctxs,
                input_,
                basic_op_extra_inputs=basic_op_extra_inputs,
                basic_op_kwargs=basic_op_kwargs,
                **quantizers,
            )
        if self.num_extra_inputs or self.num_extra_outputs:
            raise StateError(self._missing_method("forward"))
        return self.op_forward(basic_op_ctxs[0], input_, **quantizers, **basic_op_kwargs[0]), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        if type(self).step_backward is not FusibleOperation.step_backward:
            return super().fuser_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs
            )
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

    def forward(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the op alone, as a pipeline of one op with cached plans.

        Here a channel has no other end, so an extra input or output that is bound to a channel is
        an ordinary one of this call.
        """
        if is_compiling():
            traced: torch.Tensor | tuple[torch.Tensor, ...]
            traced = PASSES.guest.traced_call(self, input, extra_inputs, kwargs)
            return traced
        result: torch.Tensor | tuple[torch.Tensor, ...] = self._own_pipeline()(
            input, *extra_inputs, basic_op_kwargs=[kwargs] if kwargs else None
        )
        return result

    def _own_pipeline(self) -> Any:
        """The pipeline of this op alone, made at the first call and kept."""
        try:
            pipeline, version = self._runner
        except AttributeError:
            pipeline = version = None
        if version is not module_calls.version:
            version = module_calls.version
            if pipeline is None or pipeline.implementations != (self.implementation(),):
                # A pipeline holds its ops. This one holds a second object with this op's state: a
                # reference cycle would keep parameters until the garbage collector runs.
                twin = object.__new__(type(self))
                object.__setattr__(twin, "__dict__", self.__dict__)
                pipeline = type(self).runner_of(twin, None)
            self._runner = (pipeline, version)
        return pipeline

    # -- state ----------------------------------------------------------------

    def get_extra_state(self) -> torch.Tensor:
        """Delayed scaling's state as an fp32 tensor; an empty uint8 tensor if there is none."""
        if not any(state.scale.numel() for state in self._delayed.values()):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        states = (self._delayed.get(mode, DelayedScales(mode)) for mode in ("forward", "backward"))
        return torch.cat([state.packed() for state in states])

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Load such a state. The state of other libraries is pickled bytes, and is ignored."""
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
        if is_tried():
            return
        # A checkpoint without state comes from an op without state.
        for mode, previous in self._delayed.items():
            loaded[mode].succeed(previous)
        self._delayed = loaded

    def plain_names(self) -> dict[str, str | None]:
        is_ours = type(self).get_extra_state is BasicOperation.get_extra_state
        return {"_extra_state": None} if is_ours else {}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # An op that may get a state always has the key, and an empty tensor before: torch's
        # distributed checkpoints read only what the model asks for, and would skip the state.
        if not (self.num_quantizers("forward") or self.num_quantizers("backward")):
            state = destination.get(f"{prefix}_extra_state")
            if isinstance(state, torch.Tensor) and not state.numel():
                del destination[f"{prefix}_extra_state"]

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
        before = dict(self._parameters)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name, parameter in self._parameters.items():
            assigned = getattr(parameter, "_local_tensor", parameter)
            if parameter is not before.get(name) and isinstance(assigned, QuantizedTensor):
                assigned._leave_state()  # that of the op that it was saved from
                has_state = prefix + "_extra_state" in state_dict
                if "forward" in self._delayed and not has_state:  # amaxes of values that are gone
                    self._delayed["forward"].amax_history[:1].zero_()
        # A checkpoint of plain modules has no extra state, and needs none.
        if prefix + "_extra_state" in missing_keys:
            missing_keys.remove(prefix + "_extra_state")

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._number = note_op(self)
        PASSES.guest.new_op(self)

    def __getstate__(self) -> dict[str, object]:
        # A factory may be a closure, which cannot be pickled. A copy calls it again.
        return {
            **super().__getstate__(),
            "_captured": False,
            "_made_quantizers": {},
            "_last_recipe": None,
            "_quantizer_views": {},
            "_next_call": None,
        }
