"""Basic operations: what an op's author subclasses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from fuser.errors import StateError
from fuser.formats import DType, NumberFormat
from fuser.graph_break import breaks_graph
from fuser.module_calls import module_calls
from fuser.op.channels import ChannelBindings
from fuser.op.context import OperationContext
from fuser.op.fusible import FusibleOperation, Grads
from fuser.op.parameters import default_device
from fuser.precision.contexts import current_recipe
from fuser.precision.delayed_scaling import DelayedScales
from fuser.precision.quantizer_for import fp8_dtype, make_quantizer, role_format
from fuser.recipe import CustomRecipe, DelayedScaling, Recipe
from fuser.specs import PlanKey, QuantSpec, TensorSpec
from fuser.tensors import Quantizer

# An op keeps the quantizers of that many recipes: of as many as a pipeline keeps plans.
MAX_RECIPES = 256

_ByPlace = dict[tuple[str, int, str], Quantizer]


class BasicOperation(ChannelBindings, FusibleOperation):
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
        """The op's extra outputs for a main input like ``spec``."""
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
