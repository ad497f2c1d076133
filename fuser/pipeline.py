"""OperationFuser: one run of ops, its cached plans, and the autograd node that walks a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser.catalog import FUSIONS
from fuser.errors import InputError, InputTypeError, StateError
from fuser.graph import OpGraph, Source, extra_input_sources
from fuser.op import (
    COMPUTE_DTYPES,
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationContext,
    autocast_dtype,
    default_device,
)
from fuser.plan import FusionPlan
from fuser.plan_key import OpKey, PlanKey, TensorKey, TensorSpec
from fuser.planner import FusionFunction, Planned, RegisteredFusions, make_plan
from fuser.precision import current_recipe

_registered = RegisteredFusions()


@dataclass(frozen=True)
class _Step:
    """One operation of a plan, with what it takes to call it."""

    op: FusibleOperation
    indices: tuple[int, ...]
    has_extra_outputs: bool


class _Run:
    """A plan ready to be walked: steps, and what needs gradients under its key."""

    def __init__(self, planned: Planned, key: PlanKey, ops: Sequence[BasicOperation]) -> None:
        self.plan = planned.plan
        self.forward = [_make_step(op, indices, ops) for op, indices in planned.forward]
        self.backward = [_make_step(op, indices, ops) for op, indices in planned.backward]
        self.requires_grad = [op.requires_grad for op in key.ops]
        self.input_requires_grad = [op.input_requires_grad for op in key.ops]
        self.needs_backward = key.requires_grad
        self.is_quantized = key.recipe is not None


def _make_step(
    op: FusibleOperation, indices: tuple[int, ...], ops: Sequence[BasicOperation]
) -> _Step:
    return _Step(op, indices, any(ops[i].num_extra_outputs for i in indices))


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
        basic_ops: list[BasicOperation] = []
        for op in ops:
            members = op.basic_ops if isinstance(op, FusedOperation) else (op,)
            for member in members:
                assert isinstance(member, BasicOperation)
                basic_ops.append(member)
        self.basic_ops = tuple(basic_ops)
        self.fusions = tuple(fusions)
        self.sources = extra_input_sources(self.basic_ops)
        self.num_extra_inputs = sum(
            source.caller_index is not None for row in self.sources for source in row
        )
        self.planned_count = 0
        self._plans: dict[PlanKey, _Run] = {}
        self._runs: dict[tuple[Any, ...], _Run] = {}
        self._is_started = False
        self._find_static_facts()
        for basic_op in self.basic_ops:
            basic_op._captured = True

    def _find_static_facts(self) -> None:
        """Collect what every call needs and no call changes."""
        self._no_kwargs: list[dict[str, Any]] = [{} for _ in self.basic_ops]
        self._hooked = [
            (i, op)
            for i, op in enumerate(self.basic_ops)
            if type(op).pre_fuser_forward is not FusibleOperation.pre_fuser_forward
        ]
        # Extra outputs that go back to the caller.
        self._returned = [
            (i, k)
            for i, op in enumerate(self.basic_ops)
            for k in range(op.num_extra_outputs)
            if op._output_channels.get(k, ("", True))[1]
        ]
        self._has_extras = any(op.num_extra_inputs or op.num_extra_outputs for op in self.basic_ops)

    def _find_param_slots(self) -> None:
        """Where each op's parameters live: a replaced parameter is found in its old place."""
        self._param_slots: list[tuple[dict[str, Any], str]] = []
        self._param_counts: list[int] = []
        for op in self.basic_ops:
            seen: set[int] = set()
            before = len(self._param_slots)
            for module in op.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        self._param_slots.append((module._parameters, name))
            self._param_counts.append(len(self._param_slots) - before)

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
        if not self._is_started:
            self._start(input)
        params = [slot[name] for slot, name in self._param_slots]
        run = self._find_run(input, params, extra_inputs)
        for index, op in self._hooked:
            op.pre_fuser_forward(requires_grad=run.requires_grad[index])
        kwargs = self._no_kwargs if basic_op_kwargs is None else basic_op_kwargs
        if run.needs_backward:
            result: torch.Tensor | tuple[torch.Tensor, ...] = _PipelineFunction.apply(
                self, run, kwargs, len(params), input, *params, *extra_inputs
            )
            return result
        output, _, produced = self._forward(run, input, extra_inputs, kwargs)
        if not self._returned:
            return output
        return (output, *(produced[place] for place in self._returned))

    def plan(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, training: bool = True
    ) -> FusionPlan:
        """The plan that a call with such inputs would run; nothing runs.

        Tensors on the meta device stand for tensors on the parameters' device.
        """
        if not self._is_started:
            self._find_param_slots()
        params = [slot[name] for slot, name in self._param_slots]
        with torch.set_grad_enabled(training):
            return self._find_run(input, params, extra_inputs, only_planning=True).plan

    def output_like(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> torch.Tensor:
        """A meta tensor like the main output for such inputs."""
        params = [slot[name] for slot, name in self._param_slots]
        device = self._check_devices(input, params, extra_inputs, only_planning=True)
        graph = self._graph(input, extra_inputs, autocast_dtype(device.type))
        needs_grad = any(t.requires_grad for t in (input, *params, *extra_inputs))
        spec = graph.line[-1]
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=needs_grad)

    def _start(self, input_: torch.Tensor) -> None:
        # On the meta device a model runs to learn shapes, and stays there.
        if not (isinstance(input_, torch.Tensor) and input_.is_meta):
            for op in self.basic_ops:
                op.pre_first_fuser_forward()
            self._is_started = True
        self._find_param_slots()

    # -- planning -------------------------------------------------------------

    def _find_run(
        self,
        input_: torch.Tensor,
        params: list[torch.Tensor],
        extra_inputs: Sequence[torch.Tensor],
        only_planning: bool = False,
    ) -> _Run:
        """The run for these tensors, planned if no earlier call had the like."""
        if len(extra_inputs) != self.num_extra_inputs:
            raise InputError(self._wrong_extra_count(len(extra_inputs)))
        tensors = [input_, *params, *extra_inputs]
        try:
            is_cuda = input_.is_cuda
            quick = (
                current_recipe(),
                torch.is_grad_enabled(),
                autocast_dtype("cuda" if is_cuda else "cpu"),
                only_planning,
                id(_registered),
                *[t.dtype for t in tensors],
                *[t.requires_grad for t in tensors],
                *[t.device for t in tensors],
            )
            features = input_.shape[-1]
        except (AttributeError, IndexError):
            self._check_kinds(input_, params, extra_inputs)
            raise
        if not features:
            raise InputError(
                f"The input has shape {tuple(input_.shape)}; its last dimension must not be empty."
            )
        run = self._runs.get(quick)
        if run is None:
            run = self._plan_run(input_, params, extra_inputs, only_planning)
            self._runs[quick] = run
        return run

    def _plan_run(
        self,
        input_: torch.Tensor,
        params: list[torch.Tensor],
        extra_inputs: Sequence[torch.Tensor],
        only_planning: bool,
    ) -> _Run:
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
            arch=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            fusions=self.fusions,
            registered=_registered,
        )
        run = self._plans.get(key)
        if run is None:
            run = _Run(make_plan(graph, key, _registered), key, self.basic_ops)
            self.planned_count += 1
            self._plans[key] = run
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
                TensorKey(p.dtype, enabled and p.requires_grad)
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

    def _wrong_extra_count(self, given: int) -> str:
        wanting = [
            f"op {i} ({type(op).__name__}) {sum(s.caller_index is not None for s in row)}"
            for i, (op, row) in enumerate(zip(self.basic_ops, self.sources, strict=True))
            if any(s.caller_index is not None for s in row)
        ]
        who = f": {', '.join(wanting)}" if wanting else ""
        return f"The pipeline takes {self.num_extra_inputs} extra inputs and got {given}{who}."

    def _check_kinds(
        self,
        input_: Any,
        params: Sequence[torch.Tensor],
        extra_inputs: Sequence[Any],
    ) -> None:
        for what, value in [("input", input_), *self._extra_names(extra_inputs)]:
            if not isinstance(value, torch.Tensor):
                raise InputTypeError(
                    f"The {what} must be a tensor; got {type(value).__name__} ({value!r:.60})."
                )
        if input_.dim() == 0:
            raise InputError("The input has no dimensions; it needs at least one.")
        named = [("input", input_), *((f"parameter of shape {tuple(p.shape)}", p) for p in params)]
        for what, tensor in named:
            if tensor.dtype not in COMPUTE_DTYPES:
                allowed = ", ".join(str(dtype) for dtype in COMPUTE_DTYPES)
                raise InputError(f"The {what} is {tensor.dtype}; a pipeline runs in {allowed}.")

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
        first_name, first = named[0]
        for what, tensor in named:
            if tensor.device != first.device:
                raise InputError(
                    f"The {first_name} is on {first.device} and the {what} on {tensor.device}; "
                    "a pipeline runs on one device."
                )
        return first.device

    # -- running --------------------------------------------------------------

    def _forward(
        self,
        run: _Run,
        input_: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, list[OperationContext], dict[tuple[int, int], torch.Tensor]]:
        """Walk the forward steps.

        Returns the output, the contexts, and every extra output by ``(op, index)``.
        """
        ctxs = []
        for requires, input_requires in zip(
            run.requires_grad, run.input_requires_grad, strict=True
        ):
            ctx = OperationContext()
            ctx.requires_grad = requires
            ctx.input_requires_grad = input_requires
            ctxs.append(ctx)
        produced: dict[tuple[int, int], torch.Tensor] = {}
        x = input_
        for step in run.forward:
            indices = step.indices
            x, extra_outputs = step.op.fuser_forward(
                [ctxs[i] for i in indices],
                x,
                basic_op_extra_inputs=(
                    [self._extras_of(i, extra_inputs, produced) for i in indices]
                    if self._has_extras
                    else [()] * len(indices)
                ),
                prev_op_grad_output_quantizer=(
                    self._neighbour_quantizer(indices[0] - 1, "get_grad_output_quantizer")
                    if run.is_quantized
                    else None
                ),
                next_op_input_quantizer=(
                    self._neighbour_quantizer(indices[-1] + 1, "get_input_quantizer")
                    if run.is_quantized
                    else None
                ),
                basic_op_kwargs=[kwargs[i] for i in indices],
            )
            if step.has_extra_outputs:
                self._collect(step, extra_outputs, produced)
        return x, ctxs, produced

    def _extras_of(
        self,
        index: int,
        extra_inputs: Sequence[torch.Tensor],
        produced: dict[tuple[int, int], torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        return tuple(
            extra_inputs[source.caller_index]
            if source.caller_index is not None
            else produced[_place_of(source)]
            for source in self.sources[index]
        )

    def _neighbour_quantizer(self, index: int, question: str) -> Any:
        if 0 <= index < len(self.basic_ops):
            return getattr(self.basic_ops[index], question)()
        return None

    def _collect(
        self,
        step: _Step,
        given: Iterable[Iterable[torch.Tensor]],
        produced: dict[tuple[int, int], torch.Tensor],
    ) -> None:
        wanted = [self.basic_ops[i].num_extra_outputs for i in step.indices]
        rows = _rows(step, "extra outputs", given, wanted)
        for index, row in zip(step.indices, rows, strict=True):
            for k, value in enumerate(row):
                assert value is not None
                produced[index, k] = value

    def _backward(
        self,
        run: _Run,
        ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        grad_extras: dict[tuple[int, int], torch.Tensor],
        channel_specs: dict[tuple[int, int], TensorSpec],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Walk the backward steps.

        ``grad_extras`` holds the gradients of the extra outputs from the
        caller; those from channels are summed into it on the way. Returns the
        gradients of the input, of the parameters and of the caller's extra
        inputs, the last two flat.
        """
        param_grads: list[Sequence[torch.Tensor | None]] = [
            (None,) * count for count in self._param_counts
        ]
        caller_grads: list[torch.Tensor | None] = [None] * self.num_extra_inputs
        dx: torch.Tensor | None = grad_output
        for step in run.backward:
            if dx is None:
                raise StateError(
                    f"The backward of {type(step.op).__name__} (ops {step.indices}) cannot run: "
                    "the step after it returned no gradient for its input."
                )
            indices = step.indices
            dx, given_params, given_extras = step.op.fuser_backward(
                [ctxs[i] for i in indices],
                dx,
                basic_op_grad_extra_outputs=(
                    [self._grads_of(i, grad_output, grad_extras, channel_specs) for i in indices]
                    if step.has_extra_outputs
                    else [()] * len(indices)
                ),
            )
            counts = [self._param_counts[i] for i in indices]
            for i, row in zip(indices, _rows(step, "parameters", given_params, counts), strict=True):
                param_grads[i] = row
            if self._has_extras:
                counts = [self.basic_ops[i].num_extra_inputs for i in indices]
                rows = _rows(step, "extra inputs", given_extras, counts)
                for i, row in zip(indices, rows, strict=True):
                    self._route_grads(i, row, caller_grads, grad_extras)
            for i in indices:
                ctxs[i].saved_tensors = None
        if not run.input_requires_grad[0]:
            dx = None
        return dx, [grad for row in param_grads for grad in row], caller_grads

    def _grads_of(
        self,
        index: int,
        grad_output: torch.Tensor,
        grad_extras: dict[tuple[int, int], torch.Tensor],
        channel_specs: dict[tuple[int, int], TensorSpec],
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of an op's extra outputs; zeros where none came back on a channel."""
        row = []
        for k in range(self.basic_ops[index].num_extra_outputs):
            grad = grad_extras.get((index, k))
            if grad is None:
                spec = channel_specs[index, k]
                grad = grad_output.new_zeros(spec.shape, dtype=spec.dtype)
            row.append(grad)
        return tuple(row)

    def _route_grads(
        self,
        index: int,
        grads: Sequence[torch.Tensor | None],
        caller_grads: list[torch.Tensor | None],
        grad_extras: dict[tuple[int, int], torch.Tensor],
    ) -> None:
        """Hand the gradients of an op's extra inputs to the caller or up their channels."""
        for source, grad in zip(self.sources[index], grads, strict=True):
            if source.caller_index is not None:
                caller_grads[source.caller_index] = grad
            elif grad is not None:
                place = _place_of(source)
                earlier = grad_extras.get(place)
                grad_extras[place] = grad if earlier is None else earlier + grad


def _place_of(source: Source) -> tuple[int, int]:
    assert source.producer is not None and source.producer_output is not None
    return source.producer, source.producer_output


def _rows(
    step: _Step, what: str, given: Iterable[Iterable[Any] | None], wanted: list[int]
) -> list[tuple[torch.Tensor | None, ...]]:
    """One row of tensors for each basic op of a step; ops without any may leave theirs out."""
    rows = [() if row is None else tuple(row) for row in given]
    rows += [()] * (len(wanted) - len(rows))
    if [len(row) for row in rows] != wanted:
        raise StateError(
            f"{type(step.op).__name__} stands for ops {step.indices} with {wanted} {what}, and "
            f"returned {[len(row) for row in rows]}."
        )
    return rows


class _PipelineFunction(torch.autograd.Function):
    """The one autograd node of a pipeline."""

    @staticmethod
    def forward(
        ctx: Any,
        fuser: OperationFuser,
        run: _Run,
        kwargs: list[dict[str, Any]],
        num_params: int,
        input_: torch.Tensor,
        *params_and_extra_inputs: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        extra_inputs = params_and_extra_inputs[num_params:]
        output, op_ctxs, produced = fuser._forward(run, input_, extra_inputs, kwargs)
        to_save: list[torch.Tensor | None] = []
        ranges: list[tuple[int, int] | None] = []
        for op_ctx in op_ctxs:
            tensors = op_ctx.to_save
            if tensors is None:
                ranges.append(None)
                continue
            ranges.append((len(to_save), len(to_save) + len(tensors)))
            to_save += tensors
            op_ctx.to_save = None
        ctx.save_for_backward(*to_save)
        ctx.state = (fuser, run, op_ctxs, ranges)
        ctx.channel_specs = {
            place: TensorSpec(tuple(tensor.shape), tensor.dtype)
            for place, tensor in produced.items()
        }
        if not fuser._returned:
            return output
        outputs = [output]
        without_grad = []
        for place in fuser._returned:
            tensor = produced[place]
            # Autograd wants a tensor object of its own for each output.
            if not run.requires_grad[place[0]]:
                tensor = tensor.detach()
                without_grad.append(tensor)
            elif any(tensor is other for other in outputs):
                tensor = tensor.view_as(tensor)
            outputs.append(tensor)
        ctx.mark_non_differentiable(*without_grad)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return _run_backward(ctx, grad_outputs)
        # create_graph=True: first gradients are right, second ones are refused.
        with torch.no_grad():
            grads = _run_backward(ctx, grad_outputs)
        anchor = torch.zeros((), requires_grad=True)
        return tuple(g if g is None else _OnceDifferentiable.apply(anchor, g) for g in grads)


def _run_backward(
    ctx: Any, grad_outputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor | None, ...]:
    fuser, run, op_ctxs, ranges = ctx.state
    saved = ctx.saved_tensors
    for op_ctx, where in zip(op_ctxs, ranges, strict=True):
        if where is not None:
            op_ctx.saved_tensors = saved[where[0] : where[1]]
    grad_output, *grad_returned = grad_outputs
    grad_extras = dict(zip(fuser._returned, grad_returned, strict=True))
    dx, param_grads, extra_grads = fuser._backward(
        run, op_ctxs, grad_output, grad_extras, ctx.channel_specs
    )
    return (None, None, None, None, dx, *param_grads, *extra_grads)


class _OnceDifferentiable(torch.autograd.Function):
    """Passes a gradient on, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        raise StateError(
            "A fuser pipeline cannot be differentiated twice: its backward runs fused "
            "operations that have no derivative of their own. Compute this part with plain "
            "torch modules if you need second derivatives."
        )


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


def register_forward_backward_fusion(
    op_fusion_func: FusionFunction, prepend: bool = False
) -> None:
    """As :func:`register_forward_fusion`, for fused ops that replace both halves."""
    _register("joint", op_fusion_func, prepend)


def _register(side: str, function: FusionFunction, prepend: bool) -> None:
    global _registered
    present = getattr(_registered, side)
    changed = (function, *present) if prepend else (*present, function)
    _registered = replace(_registered, **{side: changed})


FusibleOperation.pipeline_class = OperationFuser
