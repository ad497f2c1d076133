"""OperationFuser: one run of ops, checked at the door, planned once a key, and then only run."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from fuser.availability import warn_if_emulated
from fuser.catalog import FUSIONS
from fuser.errors import BlockSizeError, InputError, InputTypeError, StateError
from fuser.executor import Run
from fuser.formats import NumberFormat, check_multiple
from fuser.gemm import architecture
from fuser.graph import OpGraph, extra_input_sources, with_emissions
from fuser.op import (
    COMPUTE_DTYPES,
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    autocast_dtype,
    default_device,
)
from fuser.plan import FusionPlan
from fuser.plan_key import OpKey, PlanKey, TensorKey, TensorSpec
from fuser.planner import FusionFunction, RegisteredFusions, make_plan
from fuser.precision import (
    current_recipe,
    is_in_backward,
    recomputing_under,
    role_format,
)
from fuser.recipe import Recipe
from fuser.tensors import QuantizedTensor

_registered = RegisteredFusions()
_registered_version = 0

# A recipe with a fresh closure at every step would plan at every step: the
# oldest plans are dropped past this many.
MAX_PLANS = 256
# Asked at every call: a name here is found 0.1 us sooner than three dots deep.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled

# What a plan may depend on of a tensor, in one C call. A parameter's device is
# looked at when planning, and when a run fails: its comparison costs 0.15 us.
_described = operator.attrgetter("dtype", "requires_grad", "device")
_described_param = operator.attrgetter("dtype", "requires_grad", "is_meta")


class OperationFuser:
    """A pipeline of basic ops that is planned once for each plan key and then only run.

    Parameters
    ----------
    ops
        The operations in order; fused ones count as the basic ops they hold.
    fusions
        The fusion classes the planner may use.

    Raises
    ------
    InputError
        If a channel has two producers, none, or one that comes too late.
    """

    def __init__(
        self,
        ops: Iterable[FusibleOperation],
        fusions: Sequence[type[FusedOperation]] = FUSIONS,
    ) -> None:
        for fusion in fusions if isinstance(fusions, Sequence) else [fusions]:
            if not (isinstance(fusion, type) and issubclass(fusion, FusedOperation)):
                raise InputTypeError(
                    f"fusions is a sequence of FusedOperation classes; got {fusion!r}."
                )
            if fusion.side not in ("", "forward", "backward", "joint"):
                raise InputError(
                    f"{fusion.__name__}.side is {fusion.side!r}; it is 'forward', 'backward' or "
                    "'joint'."
                )
        basic_ops: list[BasicOperation] = []
        for op in ops:
            members = op.basic_ops if isinstance(op, FusedOperation) else (op,)
            for member in members:
                if not isinstance(member, BasicOperation):
                    raise InputTypeError(
                        f"A pipeline is made of fuser's operations; got {type(member).__name__}."
                    )
                basic_ops.append(member)
        self.basic_ops = tuple(basic_ops)
        self.fusions = tuple(fusions)
        self.sources = extra_input_sources(self.basic_ops)
        self.num_extra_inputs = sum(
            source.caller_index is not None for row in self.sources for source in row
        )
        self.planned_count = 0
        self._plans: dict[PlanKey, Run] = {}
        self._runs: dict[tuple[Any, ...], Run] = {}
        self._is_started = False
        self._last_recipe: Recipe | None = None
        self._start_lock = threading.Lock()
        self._hooked = [
            (index, op)
            for index, op in enumerate(self.basic_ops)
            if type(op).pre_fuser_forward is not FusibleOperation.pre_fuser_forward
        ]
        for basic_op in self.basic_ops:
            basic_op._captured = True

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or an unpickled pipeline plans anew.
        return OperationFuser, (list(self.basic_ops), self.fusions)

    def _find_param_slots(self) -> None:
        """Where each op's parameters live: a replaced parameter is found in its old place."""
        slots: list[tuple[dict[str, Any], str]] = []
        counts: list[int] = []
        for index, op in enumerate(self.basic_ops):
            if is_parametrized(op):
                raise StateError(
                    f"Op {index} ({type(op).__name__}) has a parametrized "
                    f"{' and '.join(op.parametrizations)}; fuser gives gradients to an op's own "  # type: ignore[arg-type]
                    "parameters only. Remove the parametrization, or use a torch module here."
                )
            seen: set[int] = set()
            before = len(slots)
            for module in op.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        slots.append((module._parameters, name))
            counts.append(len(slots) - before)
        self._param_owners = [owner for owner, _ in slots]
        self._param_names = [name for _, name in slots]
        self._param_counts = counts

    def _refuse_lost_param(self) -> None:
        places = iter(zip(self._param_owners, self._param_names, strict=True))
        for index, (op, count) in enumerate(zip(self.basic_ops, self._param_counts, strict=True)):
            for owner, name in (next(places) for _ in range(count)):
                if name not in owner:
                    raise StateError(
                        f"Op {index} ({type(op).__name__}) has no parameter {name!r} any more: a "
                        "pipeline reads parameters from where they stood at its first call. Wrap "
                        "or shard the Sequential as a whole, or use a torch module here."
                    )

    def _params(self) -> list[torch.Tensor]:
        """The parameters that the ops hold at this moment."""
        return list(map(operator.getitem, self._param_owners, self._param_names))

    @property
    def plans(self) -> tuple[FusionPlan, ...]:
        """Every plan cached so far."""
        return tuple(run.plan for run in self._plans.values())

    # -- calling --------------------------------------------------------------

    def __call__(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the pipeline.

        Returns the output, or a tuple of it and the extra outputs that are
        not kept inside by a channel.

        Raises
        ------
        InputError, InputTypeError
            If the inputs do not fit; nothing has run then.
        """
        if _is_dynamo_compiling():
            # Planning is no tensor program; dynamo breaks its graph around the call.
            return _call_eagerly(self, input, extra_inputs, basic_op_kwargs)
        if not self._is_started:
            self._start(input, extra_inputs)
        recipe = current_recipe()
        if recipe is None and self._last_recipe is not None and is_in_backward():
            # Activation checkpointing recomputes outside the autocast of its forward.
            with recomputing_under(self._last_recipe):
                return self(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        try:
            params = self._params()
            device = "cpu" if input.is_cpu else _autocast_device(input)
            quick = (
                recipe,
                _is_grad_enabled(),
                _is_autocast_enabled(device) and torch.get_autocast_dtype(device),
                _registered_version,
                input.shape[-1] == 0,  # refused, so never in the table
                *map(_described, (input, *extra_inputs)),
                *map(_described_param, params),
            )
        except (AttributeError, IndexError):  # not tensors, or no dimensions
            self._check_kinds(input, params, extra_inputs)
            raise
        except KeyError:
            self._refuse_lost_param()
            raise
        run = self._runs.get(quick)
        if run is None:
            run = self._plan_run(input, params, extra_inputs, False)
            _keep(self._runs, quick, run)
        self._last_recipe = recipe
        if basic_op_kwargs is not None:
            self._check_kwargs(basic_op_kwargs)
        for index, op in self._hooked:
            op.pre_fuser_forward(requires_grad=run.requires_grad[index])
        try:
            return run(input, params, extra_inputs, basic_op_kwargs)
        except RuntimeError:
            self._check_devices(input, params, extra_inputs, False)
            raise
        except BlockSizeError:
            self._check_block_sizes(input, extra_inputs, run.key)
            raise

    def plan(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, training: bool = True
    ) -> FusionPlan:
        """The plan that a call with such inputs would run; nothing runs.

        Tensors on the meta device stand for tensors on the parameters' device.
        """
        if not self._is_started:
            self._find_param_slots()
        params = self._params()
        with torch.set_grad_enabled(training):
            return self._plan_run(input, params, extra_inputs, True).plan

    def output_like(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> torch.Tensor:
        """A meta tensor like the main output for such inputs."""
        params = self._params()
        device = self._check_devices(input, params, extra_inputs, only_planning=True)
        graph = self._graph(input, extra_inputs, autocast_dtype(device.type))
        needs_grad = any(t.requires_grad for t in (input, *params, *extra_inputs))
        spec = graph.line[-1]
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=needs_grad)

    def _start(self, input_: torch.Tensor, extra_inputs: Sequence[torch.Tensor]) -> None:
        """Before the first call: check its tensors, then let the ops make what they deferred."""
        with self._start_lock:
            if self._is_started:
                return
            self._find_param_slots()
            self._check_before_start(input_, extra_inputs)
            if input_.is_meta:
                return  # on the meta device a model runs to learn shapes, and stays there
            # Deferred parameters are made beside the input, for training too.
            with torch.inference_mode(False), torch.no_grad(), input_.device:
                for op in self.basic_ops:
                    op.pre_first_fuser_forward()
            self._find_param_slots()
            self._is_started = True

    def _check_before_start(
        self, input_: torch.Tensor, extra_inputs: Sequence[torch.Tensor]
    ) -> None:
        """Refuse a bad first call while deferred parameters are still on meta."""
        params = self._params()
        self._check_kinds(input_, params, extra_inputs)
        made = params if input_.is_meta else [p for p in params if not p.is_meta]
        device = self._check_devices(input_, made, extra_inputs, False)
        self._graph(input_, extra_inputs, autocast_dtype(device.type))

    # -- planning -------------------------------------------------------------

    def _plan_run(
        self,
        input_: torch.Tensor,
        params: list[torch.Tensor],
        extra_inputs: Sequence[torch.Tensor],
        only_planning: bool,
    ) -> Run:
        """Check the tensors, build the plan key, and plan unless an equal key was planned."""
        self._check_kinds(input_, params, extra_inputs)
        device = self._check_devices(input_, params, extra_inputs, only_planning)
        autocast = autocast_dtype(device.type)
        graph = self._graph(input_, extra_inputs, autocast)
        key = PlanKey(
            ops=self._op_keys(graph, input_, params, extra_inputs),
            recipe=current_recipe(),
            autocast_dtype=autocast,
            device=device.type,
            arch=architecture(device),
            fusions=self.fusions,
            registered=_registered,
        )
        key = with_emissions(self.basic_ops, key)
        run = self._plans.get(key)
        if run is None:
            if key.recipe is not None:
                warn_if_emulated(key.recipe, key.arch)
            planned = make_plan(graph, key, _registered)
            run = Run(
                planned.plan,
                key,
                self.basic_ops,
                self.sources,
                self._param_counts,
                planned.forward,
                planned.backward,
            )
            self.planned_count += 1
            _keep(self._plans, key, run)
        return run

    def _graph(
        self,
        input_: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        autocast: torch.dtype | None,
    ) -> OpGraph:
        return OpGraph(
            self.basic_ops,
            self.sources,
            TensorSpec(tuple(input_.shape), input_.dtype),
            [TensorSpec(tuple(t.shape), t.dtype) for t in extra_inputs],
            autocast,
        )

    def _op_keys(
        self,
        graph: OpGraph,
        input_: torch.Tensor,
        params: list[torch.Tensor],
        extra_inputs: Sequence[torch.Tensor],
    ) -> tuple[OpKey, ...]:
        enabled = torch.is_grad_enabled()
        main_requires = enabled and input_.requires_grad
        remaining = iter(params)
        keys: list[OpKey] = []
        for i, count in enumerate(self._param_counts):
            own = tuple(
                TensorKey(p.dtype, enabled and p.requires_grad, _format(p))
                for p in (next(remaining) for _ in range(count))
            )
            extras = tuple(
                TensorKey(
                    spec.dtype,
                    enabled and extra_inputs[source.caller_index].requires_grad
                    if source.caller_index is not None
                    else keys[source.producer or 0].requires_grad,
                )
                for source, spec in zip(self.sources[i], graph.extra_inputs[i], strict=True)
            )
            requires = main_requires or any(t.requires_grad for t in (*own, *extras))
            keys.append(OpKey(graph.line[i].dtype, requires, main_requires, own, extras))
            main_requires = requires
        return tuple(keys)

    # -- checking -------------------------------------------------------------

    def extra_input_takers(self) -> list[str]:
        """Each op that takes extra inputs from the caller, and how many, for messages."""
        return [
            f"op {i} ({type(op).__name__}) {sum(s.caller_index is not None for s in row)}"
            for i, (op, row) in enumerate(zip(self.basic_ops, self.sources, strict=True))
            if any(s.caller_index is not None for s in row)
        ]

    def _wrong_extra_count(self, given: int) -> str:
        wanting = self.extra_input_takers()
        who = f": {', '.join(wanting)}" if wanting else ""
        return f"The pipeline takes {self.num_extra_inputs} extra inputs and got {given}{who}."

    def _check_kinds(
        self,
        input_: Any,
        params: Sequence[torch.Tensor],
        extra_inputs: Sequence[Any],
    ) -> None:
        if len(extra_inputs) != self.num_extra_inputs:
            raise InputError(self._wrong_extra_count(len(extra_inputs)))
        for what, value in [("input", input_), *self._extra_names(extra_inputs)]:
            if not isinstance(value, torch.Tensor):
                raise InputTypeError(
                    f"The {what} must be a tensor; got {type(value).__name__} ({value!r:.60})."
                )
        if input_.dim() == 0:
            raise InputError("The input has no dimensions; it needs at least one.")
        if input_.shape[-1] == 0:
            raise InputError(
                f"The input has shape {tuple(input_.shape)}; its last dimension must not be empty."
            )
        named = [("input", input_), *((f"parameter of shape {tuple(p.shape)}", p) for p in params)]
        for what, tensor in named:
            if tensor.dtype not in COMPUTE_DTYPES:
                allowed = ", ".join(str(dtype) for dtype in COMPUTE_DTYPES)
                raise InputError(f"The {what} is {tensor.dtype}; a pipeline runs in {allowed}.")

    def _check_block_sizes(
        self, input_: torch.Tensor, extra_inputs: Sequence[torch.Tensor], key: PlanKey
    ) -> None:
        """Name the op whose tensor does not divide into the blocks of its format."""
        assert key.recipe is not None
        graph = self._graph(input_, extra_inputs, key.autocast_dtype)
        for i, op in enumerate(self.basic_ops):
            shapes = {
                "input": graph.line[i].shape,
                "weight": tuple(getattr(op, "weight", input_).shape),
                "grad_output": graph.line[i + 1].shape,
            }
            for role in (*op.quantizer_roles("forward"), *op.quantizer_roles("backward")):
                *leading, last = shapes[role]
                what = f"op {i} ({type(op).__name__}) under {type(key.recipe).__name__} quantizes "
                what += f"its {role.replace('_', ' ')} of shape {tuple(shapes[role])}, and "
                number_format = role_format(key.recipe, role)
                check_multiple(
                    what + number_format.name, math.prod(leading), last, number_format.multiple
                )

    def _check_kwargs(self, kwargs: list[dict[str, Any]]) -> None:
        for index, (op, given) in enumerate(zip(self.basic_ops, kwargs, strict=True)):
            taken = _keyword_names(type(op))
            for name in given:
                if taken is not None and name not in taken:
                    takes = ", ".join(taken) or "none"
                    raise InputTypeError(
                        f"Op {index} ({type(op).__name__}) takes no keyword argument {name!r}; "
                        f"it takes {takes}."
                    )

    def _extra_names(self, extra_inputs: Sequence[Any]) -> list[tuple[str, Any]]:
        """Each extra input from the caller, with a name that says which op takes it."""
        names = {
            source.caller_index: f"extra input {source.caller_index} (for op {i}, "
            f"{type(self.basic_ops[i]).__name__})"
            for i, row in enumerate(self.sources)
            for source in row
        }
        return [(names[k], value) for k, value in enumerate(extra_inputs)]

    def _check_devices(
        self,
        input_: torch.Tensor,
        params: Sequence[torch.Tensor],
        extra_inputs: Sequence[torch.Tensor],
        only_planning: bool,
    ) -> torch.device:
        """The one device of all tensors; while planning, meta tensors stand for any."""
        named = [
            ("input", input_),
            *((f"parameter of shape {tuple(p.shape)}", p) for p in params),
            *self._extra_names(extra_inputs),
        ]
        if only_planning:
            named = [(what, tensor) for what, tensor in named if not tensor.is_meta]
            if not named:
                return default_device(None)
        first_name: str = named[0][0]
        first: torch.Tensor = named[0][1]
        for what, tensor in named:
            if tensor.device != first.device:
                raise InputError(
                    f"The {first_name} is on {first.device} and the {what} on {tensor.device}; "
                    "a pipeline runs on one device."
                )
        return first.device


def _format(tensor: torch.Tensor) -> NumberFormat | None:
    return tensor.format if isinstance(tensor, QuantizedTensor) else None


def _autocast_device(tensor: torch.Tensor) -> str:
    """The device type whose autocast counts for ``tensor``; meta has none, the CPU's is asked."""
    if tensor.is_cuda:
        return "cuda"
    return "cpu" if tensor.is_meta else tensor.device.type


def _keep(table: dict[Any, Run], key: Any, run: Run) -> None:
    if len(table) >= MAX_PLANS:
        table.pop(next(iter(table)), None)
    table[key] = run


@functools.cache
def _keyword_names(cls: type[BasicOperation]) -> tuple[str, ...] | None:
    """The keyword arguments that an op of this class takes from its caller; None for any."""
    if cls.fuser_forward is not BasicOperation.fuser_forward:
        return None
    parameters = list(inspect.signature(cls.op_forward).parameters.values())[3:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    own = ("prev_op_grad_output_quantizer", "next_op_input_quantizer")
    return tuple(p.name for p in parameters if p.name not in own)


def _call_eagerly(
    fuser: OperationFuser,
    input_: torch.Tensor,
    extra_inputs: tuple[torch.Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Run a pipeline outside of dynamo's trace; only called while it traces."""
    disable: Callable[..., Any] = torch.compiler.disable
    result: torch.Tensor | tuple[torch.Tensor, ...] = disable(OperationFuser.__call__)(
        fuser, input_, *extra_inputs, basic_op_kwargs=kwargs
    )
    return result


def register_forward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register ``func(ops, *, recipe) -> ops``, which may put in forward-only fused ops.

    Registered functions run before the planner, whose fusions cover what is
    left. ``prepend`` runs this one before those registered earlier. A class in
    ``Sequential(..., fusions=...)`` is the better way: it can refuse with a
    reason and is weighed against the others.
    """
    _register("forward", op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """As :func:`register_forward_fusion`, for backward-only fused ops."""
    _register("backward", op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """As :func:`register_forward_fusion`, for fused ops that replace both halves."""
    _register("joint", op_fusion_func, prepend)


def _register(side: str, function: FusionFunction, prepend: bool) -> None:
    global _registered, _registered_version
    _registered_version += 1
    present = getattr(_registered, side)
    changed = (function, *present) if prepend else (*present, function)
    _registered = replace(_registered, **{side: changed})


FusibleOperation.pipeline_class = OperationFuser
