"""Executor: runs the generated code of a plan as one autograd node.

``CompiledPlan.source`` is the code (``runtime/codegen.py``). While torch's profiler is active,
every step runs in a range with the plan's name for it, in recorded passes too;
``torch.autograd.profiler.emit_nvtx()`` turns these into NVTX ranges.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fuser.communication import WeakGroup, finished
from fuser.cuda.arguments import PLAIN_OR_NONE
from fuser.doors import PASSES
from fuser.errors import FuserError
from fuser.op import BasicOperation, Counter, autocast_dtype
from fuser.plan.graph import OpGraph
from fuser.plan.parameter_slots import find_slots
from fuser.plan.plan import FusionPlan
from fuser.precision import contexts
from fuser.precision.contexts import UNQUANTIZED, current_state
from fuser.precision.delayed_scaling import (
    DelayedScales,
    end_with_backward,
    evaluation,
)
from fuser.precision.recomputation import is_checkpointed_forward, is_in_checkpoint
from fuser.recipe import DelayedScaling
from fuser.runtime.codegen import PlanCodegen
from fuser.runtime.diagnose import (
    check_grad_shapes,
    refuse_batched_gradients,
    refuse_other_kinds,
    refuse_output,
    refuse_second_derivative,
    refuse_transform,
)
from fuser.runtime.gradient_paths import (
    Needed,
    accumulating_leaf,
    needed_gradients,
    needing,
    of_reached,
    readers,
)
from fuser.runtime.known_parameters import LayoutOfCall
from fuser.runtime.saved_tensors import put_together, taken_apart
from fuser.specs import OpKey
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.observation import note_run, observed, observing
from fuser.torch_private import (
    call_backward_directly,
    forward_ad_level,
    is_any_autocast_enabled,
    is_functorch_active,
    is_of_batched_gradients,
    is_profiler_enabled,
    will_run_node,
    without_autocast,
)


class CompiledPlan:
    """A plan ready to be called; ``contents`` are the arguments of :class:`PlanCodegen`."""

    can_be_cut = False
    """Whether a call may have several autograd nodes."""

    def __init__(self, plan: FusionPlan, *contents: Any) -> None:
        self.plan = plan
        self.code = code = PlanCodegen(*contents)
        self.key, self.ops = key, ops = code.key, code.ops
        self.places, self.source, self.saving = code.places, code.source, code.saving
        sources, param_counts, neighbours = code.sources, code.param_counts, code.neighbours
        self.requires_grad = [op.requires_grad for op in key.ops]
        self.needs_backward = key.requires_grad
        self.runs_kernels = key.no_kernels is None
        self.is_delayed = isinstance(key.recipe, DelayedScaling)
        # The ops that read a gradient which this backward makes: also the one before a cut.
        before = () if neighbours.before is None else neighbours.before[:1]
        self.grad_readers = [*before, *ops]
        self.readers = readers(sources, param_counts)
        self.extra_count = sum(source.producer is None for row in sources for source in row)
        # The extra outputs that go to the caller.
        self.returned = [n for n, place in enumerate(code.places) if place in code.returned]
        # The ops that add to a main_grad, and the positions of these parameters in the inputs; None
        # for one without a gradient.
        self.accumulating = [
            (i, positions)
            for i, op in enumerate(ops)
            if op.accumulates_into_main_grad
            and any(positions := _main_grad_positions(op, key.ops[i], 1 + sum(param_counts[:i])))
        ]
        self._forward, self._backward = code.functions()
        # By op, what reads numbers on the host before a pass, and the places of the extra inputs.
        self.counters: dict[int, tuple[Counter, list[Any]]] = {}
        steps = [op for side in code.steps.values() for op, _ in side]
        counting = [i for i, op in enumerate(ops) if type(op).counter is not BasicOperation.counter]
        if counting and not (self.runs_kernels and all(not op.is_external for op in steps)):
            counting = []  # what is not fuser's may read unused rows
        for i in counting:
            taken = [source.caller_index for source in sources[i]]
            count = ops[i].counter(ops[i + 1 :])
            if count and None not in taken and all(place[0] != i for place in code.returned):
                self.counters[i] = (count, taken)
        # A quantized tensor that arrives or leaves cannot be recorded.
        is_whole = neighbours.before is None and neighbours.after is None
        # The input, and the first parameter that needs a gradient. Only if a backward does not need
        # one of these two, it is found out which others it needs: each question costs 0.4 us.
        params = [param for op in key.ops for param in op.params]
        of_params = [1 + place for place, param in enumerate(params) if param.requires_grad]
        self.asked = ([0] if key.ops[0].input_requires_grad else []) + of_params[:1]
        self.recorded = (
            PASSES.guest.recorded(self, steps) if is_whole and self.runs_kernels else None
        )
        """Where recorded passes are kept; None if the steps must run at each call."""
        # The attributes of the ops that store the recipe of their last forward.
        modes = ("forward", "backward") if self.is_delayed else ()
        self.recipe_states = [
            op.__dict__
            for i, op in enumerate(ops)
            if i in code.constant_ops or any(map(op.num_quantizers, modes))
        ]

    def recording_apart(self) -> CompiledPlan:
        """The same plan, without its recordings."""
        plan = copy.copy(self)
        if self.recorded is not None:
            plan.recorded = self.recorded.emptied()
        return plan

    def described(self) -> str:
        """The ops of a pipeline under delayed scaling, for errors."""
        return f"{', '.join(type(op).__name__ for op in self.ops)} under delayed scaling"

    def forward(self, input_: Any, extra_inputs: Any, kwargs: Any) -> Any:
        """The first call of the generated forward: it checks the output, and stores shapes.

        It then replaces this method on the object by the generated function. A bound method
        there would be a cycle, which keeps the ops until the garbage collector runs.
        """
        # Before the forward, in which an op may release a parameter or make one.
        slots = [find_slots(op, type(op).__name__) for op in self.ops]
        shapes = (
            [tuple(input_.shape) if self.key.ops[0].input_requires_grad else None]
            + [
                tuple(tensor.shape) if tensor.requires_grad else None
                for tensor in extra_inputs[: self.extra_count]
            ],
            [
                [
                    tuple(owner[name].shape) if tensor.requires_grad else None
                    for (owner, name), tensor in zip(row, op_key.params, strict=True)
                ]
                for row, op_key in zip(slots, self.key.ops, strict=True)
            ],
        )
        results = self._forward(input_, extra_inputs, kwargs)
        if not isinstance(results[0], torch.Tensor):
            refuse_output(self.code.steps["forward"][-1][0], results[0])
        if self._backward is not None:
            results[2][0].first_shapes = (tuple(input_.shape), *shapes)
        self.forward = self._forward  # type: ignore[method-assign]
        return results

    def backward(self, contexts: Any, *rest: Any) -> Any:
        """The first call of the generated backward: it checks the shapes of gradients.

        If it fails, the next forward and backward are checked again.
        """
        try:
            grads = self._backward(contexts, *rest)
            shapes = contexts[0].__dict__.get("first_shapes")
            if shapes is not None:
                _, inputs, params = shapes
                check_grad_shapes(self.ops, inputs, params, grads[1:])
        except BaseException:
            self.__dict__.pop("forward", None)
            raise
        self.backward = self._backward  # type: ignore[method-assign]
        return grads

    def run(
        self,
        input_: torch.Tensor,
        others: Sequence[torch.Tensor],
        extra_inputs: Any,
        kwargs: Any,
        layout: LayoutOfCall,
    ) -> Any:
        """The results of forward; ``others`` are parameters, of ``layout``, and extra inputs.

        Seeds may follow the extra inputs, which a forward is given for its dropouts: a recording
        reads them as inputs.
        """
        if type(input_) is not torch.Tensor or not _PLAIN.issuperset(map(type, extra_inputs)):
            input_, *extra_inputs = map(finished, (input_, *extra_inputs))
            others = (*others[: len(others) - len(extra_inputs)], *extra_inputs)
        if self.counters:
            kwargs = self._counted(input_, extra_inputs, kwargs)
        steps = observing.steps
        of_parameters, with_buffers = layout
        if self.recorded is not None and of_parameters is not None and steps is None:
            tensors, extra_count = (input_, *others), len(extra_inputs)
            recording = self.recorded.find(
                tensors, extra_count, of_parameters, kwargs, with_buffers
            )
            if recording is not None:
                recorded, keywords, groups = recording
                for state in self.recipe_states:
                    state["_last_recipe"] = self.key.recipe
                forward = self.in_ranges[0]
                args = (input_, extra_inputs, kwargs)
                return recorded.run(tensors, keywords, groups, forward, *args)
        run = self.in_ranges[0] if is_profiler_enabled() else self.forward
        if steps is not None:
            note_run(self.ops, steps, has_recipe=self.key.recipe is not None)
            run = observed(run, steps)
        return run(input_, extra_inputs, kwargs)

    def _counted(self, input_: Any, extra_inputs: Any, kwargs: Any) -> list[dict[str, Any]]:
        """The keyword arguments of each op, with what is read before a pass."""
        rows: list[dict[str, Any]] = [{**row} for row in kwargs or [{}] * len(self.ops)]
        for i, (count, taken) in self.counters.items():
            rows[i] |= count(input_, [extra_inputs[place] for place in taken])
        return rows

    @functools.cached_property
    def in_ranges(self) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """``forward`` and ``backward`` with every step in a range of torch's profiler.

        Recordings are made of these, so that their steps have ranges too.
        """
        names = self.code.names
        return self.code.functions(
            {name: _in_range(title, names[name]) for name, title in self.code.titles.items()}
        )

    def part_of_backward(
        self, ctx: Any, needed: Needed, grads: tuple[torch.Tensor | None, ...]
    ) -> Callable[..., Any] | None:
        """What runs in place of ``backward`` for some of its gradients; None if all of it does.

        ``ctx`` is the node's context in torch, and ``grads`` are those of the outputs.
        """
        return None

    def with_nodes(
        self,
        plan: FusionPlan,
        graph: OpGraph,
        input_: torch.Tensor,
        params: tuple[torch.Tensor, ...],
        extra_inputs: tuple[torch.Tensor, ...],
    ) -> FusionPlan:
        """``plan`` with the autograd nodes of such a call."""
        return plan

    def call(
        self,
        input_: torch.Tensor,
        params: tuple[torch.Tensor, ...],
        extra_inputs: tuple[torch.Tensor, ...],
        kwargs: list[dict[str, Any]] | None,
        layout: LayoutOfCall,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run forward; under autograd if anything needs a gradient.

        ``layout`` is that of the parameters.
        """
        result: torch.Tensor | tuple[torch.Tensor, ...]
        if self.needs_backward:
            if is_functorch_active():
                refuse_transform()
            try:
                result = _apply(
                    (self, extra_inputs, kwargs, layout), input_, *params, *extra_inputs
                )
            except (
                NotImplementedError
            ):  # raised by torch for an input with a forward-mode derivative
                if forward_ad_level() >= 0:
                    refuse_transform()
                raise
            return result
        if self.runs_kernels and (is_functorch_active() or forward_ad_level() >= 0):
            refuse_transform()
        others = (*params, *extra_inputs)
        if self.is_delayed and not _is_grad_enabled() and not is_checkpointed_forward():
            with evaluation():
                output, produced = self.run(input_, others, extra_inputs, kwargs, layout)
        else:
            output, produced = self.run(input_, others, extra_inputs, kwargs, layout)
        if not self.returned:
            return output if output._base is None else _for_caller(output, input_)
        outputs = (output, *[produced[n] for n in self.returned])
        return tuple([_for_caller(tensor, input_) for tensor in outputs])


def _in_range(title: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(title):
            return function(*args, **kwargs)

    return ranged


def _main_grad_positions(op: BasicOperation, key: OpKey, first: int) -> tuple[int | None, ...]:
    """The positions in the inputs of an op's parameters with a ``main_grad``, from ``first``."""
    needing = [param.requires_grad for param in key.params[: op.main_grad_count]]
    return tuple(first + i if is_wanted else None for i, is_wanted in enumerate(needing))


def _for_caller(output: torch.Tensor, input_: torch.Tensor) -> torch.Tensor:
    """An output that was reshaped here as no view: the caller may write to it."""
    base = output._base
    if base is None or output is input_ or base is input_ or base is input_._base:
        return output
    return output if forward_ad_level() >= 0 else output.detach()  # which drops derivatives


def _kinds(saved: Iterable[torch.Tensor | None]) -> list[Quantizer | None]:
    """The quantizer of each saved tensor; None for unquantized tensors."""
    return [t._quantizer if isinstance(t, QuantizedTensor) else None for t in saved]


def _shares_values(saved: torch.Tensor | None) -> bool:
    """Whether a tensor may have the memory of values that the caller can change in place.

    Its buffers have their version counter, which torch compares before backward.
    """
    if not isinstance(saved, QuantizedTensor):
        return False
    form = saved._quantizer.format
    return any(part.is_unquantized for part in form.parts or (form,))


class _PipelineFunction(torch.autograd.Function):
    """The one autograd node of a pipeline."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Any, ...],
        input_: torch.Tensor,
        *params_and_extra_inputs: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        run, extra_inputs, kwargs, layout = call
        results = run.run(input_, params_and_extra_inputs, extra_inputs, kwargs, layout)
        output, produced, op_ctxs, saved, ends, specs = results
        parts = None
        if ends is not None and (
            not PLAIN_OR_NONE.issuperset(map(type, saved)) and any(map(_shares_values, saved))
            if run.recorded is None
            else is_in_checkpoint()
        ):
            parts, saved = taken_apart(saved)
        ctx.to_save = saved  # the only effect of save_for_backward, without the 0.4 us of its call
        ctx.materialize_grads = False  # as set_materialize_grads
        conditions, kept = UNQUANTIZED, None
        states: Sequence[DelayedScales] = ()
        if contexts.is_autocast_used:
            conditions = current_state()
            if conditions.group is not None:
                conditions = conditions._replace(group=WeakGroup(conditions.group))
            if ends is not None and parts is None:
                kept = _kinds(saved)
            if run.is_delayed:
                # The current states: loading a checkpoint before the backward replaces them.
                states = [
                    op._delayed["backward"] for op in run.grad_readers if "backward" in op._delayed
                ]
        ctx.call = (run, op_ctxs, ends, specs, conditions, kept, parts, states)
        if not run.returned:
            return output if output._base is None else _for_caller(output, input_)
        outputs = [_for_caller(output, input_)]
        without_grad = []
        for n in run.returned:
            tensor = _for_caller(produced[n], input_)
            # Autograd requires a separate tensor object for each output.
            if not run.requires_grad[run.places[n][0]]:
                tensor = tensor.detach()
                without_grad.append(tensor)
            elif any(tensor is other for other in outputs):
                tensor = tensor.view_as(tensor)
            outputs.append(tensor)
        ctx.mark_non_differentiable(*without_grad)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if _is_grad_enabled():
            refuse_second_derivative()
        run, op_ctxs, ends, specs, conditions, kept, parts, states = ctx.call
        key = run.key
        if is_any_autocast_enabled() and autocast_dtype(key.device) is not key.autocast_dtype:
            # Backward runs in the dtypes of the forward, as torch documents for autocast.
            with without_autocast():
                return _PipelineFunction.backward(ctx, *grad_outputs)
        if not _PLAIN.issuperset(map(type, grad_outputs)):
            grad_outputs = tuple(map(finished, grad_outputs))
            if grad_outputs[0] is None:
                # Extra outputs alone have a gradient.
                grad_extras = grad_outputs[1:]
                return of_reached(
                    lambda dy: _PipelineFunction.backward(ctx, dy, *grad_extras),
                    grad_extras,
                    [run.places[n][0] for n in run.returned],
                    specs,
                    run.readers,
                )
        grads_of_extras: list[torch.Tensor | None] | None = None
        if specs:
            grads_of_extras = [None] * len(run.places)
            for n, grad in zip(run.returned, grad_outputs[1:], strict=True):
                grads_of_extras[n] = grad
        saved = ctx.saved_tensors
        if parts is not None:
            saved = put_together(parts, saved)
        if kept is not None and (kinds := _kinds(saved)) != kept:
            refuse_other_kinds(run.ops, run.saving, ends, kept, kinds)
        edges = ctx.next_functions
        owners = {
            i: tuple([p and accumulating_leaf(edges[p]) for p in positions])
            for i, positions in run.accumulating
        }
        needed = None
        try:
            for place in run.asked:
                if not will_run_node(edges[place][0]):
                    needed = needed_gradients(edges)
                    break
        except RuntimeError:  # torch cannot tell for a leaf that torch.autograd.grad was given
            needed = needed_gradients(edges)
        part = None if needed is None else run.part_of_backward(ctx, needed, grad_outputs)
        # From here on only the generated code holds them, unless the graph is retained.
        held = [saved] if ends is not None else list(saved)
        del saved
        ctx.maybe_clear_saved_tensors()
        result: tuple[torch.Tensor | None, ...]
        try:
            # The gradient of a sum is one number with zero strides, which every GEMM
            # that reads it would copy; it is copied once here.
            if ends is None:
                recorded, versions, parameters = op_ctxs
                result = recorded.backward(
                    part or run.in_ranges[1],
                    held,
                    versions,
                    parameters,
                    grad_outputs[0].contiguous(),
                    grads_of_extras,
                    owners,
                    needed,
                    is_part=part is not None,
                )
            else:
                backward = run.in_ranges[1] if is_profiler_enabled() else run.backward
                backward = part or backward
                for i, weights in owners.items():
                    op_ctxs[i].main_grad_owners = weights
                if needed is not None:
                    op_ctxs = needing(op_ctxs, needed)
                if conditions.inspected is not None:
                    backward = observed(backward, conditions.inspected)
                result = backward(
                    op_ctxs, held, ends, grad_outputs[0].contiguous(), grads_of_extras, specs
                )
            group = conditions.group
            if group is not None:
                group = group(run.described) if states else None
            region = conditions.region
            if states or (region is not None and region.recorded):
                end_with_backward(states, group, region)
            return result
        except BaseException as error:
            # Finished steps have dropped their tensors; this drops those of the others.
            for op_ctx in op_ctxs if ends is not None else ():
                op_ctx.saved_tensors = None
            grads = [grad for grad in grad_outputs if grad is not None]
            is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, FuserError)
            if is_of_torch and any(map(is_of_batched_gradients, grads)):
                refuse_batched_gradients(error)
            raise


_PLAIN = frozenset([torch.Tensor])

# torch wraps ``apply`` for functorch's transforms. The wrapper costs 2 us, and no such transform
# is allowed here.
_is_grad_enabled = torch.is_grad_enabled
_apply: Callable[..., Any] = super(torch.autograd.Function, _PipelineFunction).apply

call_backward_directly(_PipelineFunction)
