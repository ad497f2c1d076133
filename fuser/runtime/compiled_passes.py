"""The passes of compiled graphs: a pipeline's forward and backward as functions of tensors.

A graph names its passes by their contents: the structure of a pipeline, and what else its plan
depends on. They run copies of the pipeline, over the tensors that the graph gives. A forward
returns the outputs and the tensors that backward reads. On fake tensors the same code runs, and
launches nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Parameter

from fuser.communication import WeakGroup
from fuser.cuda.launch import dry_run
from fuser.errors import StateError
from fuser.functional.random_seeds import given_seeds, rounding_seeds
from fuser.gemm.matmul import architecture
from fuser.op import BasicOperation, OperationContext
from fuser.plan.planner import make_plan
from fuser.precision.amax_reduction import forget_op
from fuser.precision.availability import warn_if_emulated
from fuser.precision.contexts import (
    INSIDE,
    AutocastState,
    autocast,
    current_recipe,
    current_state,
    recomputing_under,
    use_autocast,
)
from fuser.precision.delayed_scaling import (
    end_with_backward,
    evaluation,
    record_until_backward_ends,
)
from fuser.precision.numbered_calls import (
    ForwardCall,
    Number,
    forward_call,
    is_recomputation,
    note_forward,
    numbers_in,
    op_number,
    ops_of,
)
from fuser.precision.recomputation import (
    is_checkpointed_forward,
    may_be_checkpointed,
    state_of_forward,
)
from fuser.recipe import DelayedScaling, Recipe
from fuser.runtime.diagnose import refuse_transform
from fuser.runtime.executor import CompiledPlan
from fuser.runtime.known_parameters import KnownParameters, ParameterLayout, tensor_guard
from fuser.runtime.pipeline import OperationFuser, registered_fusions
from fuser.runtime.recorded import Part, RecordedForward, context_of, put_together, taken_apart
from fuser.tensors import QuantizedTensor
from fuser.torch_private import (
    forward_ad_level,
    graph_task,
    is_any_autocast_enabled,
    outside_fake_mode,
    size_hint,
    storage_of,
    without_autocast,
)

Tensors: TypeAlias = Sequence[torch.Tensor]
Sizes: TypeAlias = Sequence["int | torch.SymInt"]
Ends: TypeAlias = "tuple[int, ...] | None"
"""The ends of the ops' saved tensors; None of a recorded forward."""
Contexts: TypeAlias = list[tuple[type[OperationContext], dict[str, Any]]]
"""The class and the attributes of each op's context."""
Specs: TypeAlias = tuple[Any, ...]
"""Shape and dtype of every extra output."""
TensorFacts: TypeAlias = tuple[str, torch.dtype, bool]
"""Of a tensor: the name of its class, its dtype, and whether it requires a gradient."""

MOST_LAYOUTS = 256
MOST_SIZES = 4096

lock = threading.RLock()


class Facts(NamedTuple):
    """What a plan depends on besides the structure of its pipeline."""

    recipe_key: str
    is_grad_enabled: bool
    device: str
    no_kernels: str | None
    """Why fuser's kernels do not run on the device; None if they run."""
    autocast: torch.dtype | None
    parameter_count: int
    first: tuple[int, ...]
    """For each extra input, the first one that is the same tensor."""
    tensors: tuple[TensorFacts, ...]
    """The input, the parameters, and the extra inputs."""
    training: tuple[bool, ...]
    rounds: bool
    """Whether the recipe rounds at random."""
    is_checkpointed: bool
    """Whether a checkpoint in the graph runs the forward again."""
    registered: str = ""
    """The process and the number of its functions that plan or run; empty for fuser's own."""


class Given(NamedTuple):
    """The tensors that a graph gives to a forward."""

    x: torch.Tensor
    params: Tensors
    extras: Tensors
    seeds: Tensors
    """Those of each dropout."""
    host: Tensors
    """On the CPU: the numbers of the calls of ops with quantizers, and the seed of roundings."""

    def distinct(self, first: Sequence[int]) -> Given:
        """The same tensors, each another object; but ``extras[i]`` is ``extras[first[i]]``."""
        tensors = (self.x, *self.params, *self.extras)
        is_distinct = len(set(map(id, tensors))) == len(tensors)
        if is_distinct and len(set(first)) == len(first):
            return self
        seen: set[int] = set()
        each: list[torch.Tensor] = []
        for tensor in tensors:
            each.append(tensor.detach() if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        count = 1 + len(self.params)
        extras = [each[count + i] for i in first]
        return self._replace(x=each[0], params=each[1:count], extras=extras)

    def sizes(self) -> list[int | torch.SymInt]:
        """Sizes and strides, which are numbers or symbols."""
        tensors = (self.x, *self.params, *self.extras)
        return [size for tensor in tensors for size in [*tensor.shape, *tensor.stride()]]

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors that backward may read."""
        return (self.x, *self.params, *self.extras, *self.seeds)


class GivenBack(NamedTuple):
    """What a graph gives to a backward, besides parameters."""

    sizes: Sizes
    """Those of :meth:`Given.sizes` in forward."""
    inputs: Sequence[int]
    outputs: Sequence[int]
    """The numbers of the inputs and of the outputs among the saved tensors."""
    grads: Sequence[torch.Tensor | None]
    saved: Tensors
    """The saved tensors that forward returned, then the inputs and the outputs among them."""


class Place(NamedTuple):
    """Where a saved tensor is: it is, or views, an input, an output or another saved tensor."""

    kind: str
    """"input", "output" or "saved"."""
    number: int
    view: tuple[torch.Size, tuple[int, ...], int | torch.SymInt] | None = None
    """Size, stride and offset in that tensor, if it is a view."""

    def of(self, tensors: Tensors | dict[int, torch.Tensor]) -> torch.Tensor:
        """The saved view, of one of the inputs, outputs or saved tensors."""
        tensor = tensors[self.number]
        assert self.view is not None
        size, stride, offset = self.view
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class Slice(NamedTuple):
    """Where a gradient is that shares memory with others, such as those of experts."""

    number: int
    """That of the result which has the memory of all of them, as a vector."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, results: Tensors | dict[int, torch.Tensor]) -> torch.Tensor:
        """The gradient."""
        return results[self.number].as_strided(self.size, self.stride, self.offset)

    def end(self) -> int:
        """Where the gradient ends in that memory."""
        steps = zip(self.size, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)


class Saved(NamedTuple):
    """What a forward saves for backward."""

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    others: int = 0
    """The number of other tensors."""


class _Pass(NamedTuple):
    """What a backward needs of its forward besides tensors; equal for equal sizes."""

    places: list[Place]
    made: tuple[int, ...]
    """The saved tensors that are neither inputs nor outputs."""
    recorded: RecordedForward | None
    copied: tuple[bool, ...]
    """Whether each output is a copy, because the forward returned a view of an input."""
    contexts: Contexts
    parts: list[Part]
    ends: Ends
    specs: Specs


class Passes:
    """Forward and backward of pipelines of one structure, over tensors with the same facts."""

    def __init__(self, pipeline: OperationFuser, facts: Facts, recipe: Recipe | None) -> None:
        self.facts = facts
        self.recipe = recipe
        self.output_count = 1 + len(pipeline.returned)
        self.wanted = [requires_grad for _, _, requires_grad in facts.tensors]
        """Whether each tensor requires a gradient."""
        self.saved = Saved()
        """What the forward that was traced last saves. Graphs of other layouts save other sets."""
        self._traced: set[Saved] = set()
        self.slices: list[Slice | None] = []
        """Of each wanted gradient, its place if it shares memory; noted when it is traced."""
        self.is_inside = facts.recipe_key.startswith(INSIDE)
        """Whether the graph itself enters autocast."""
        self.is_delayed = isinstance(recipe, DelayedScaling)
        self._pipeline = pipeline
        self._runner = _Runner(self, pipeline)
        # Under delayed scaling each pipeline has its own states, and recordings that hold them.
        self._runners: weakref.WeakKeyDictionary[BasicOperation, tuple[list[int], _Runner]]
        self._runners = weakref.WeakKeyDictionary()

    def note_saved(self, saved: Saved, *, is_fake: bool) -> None:
        """Note what a graph saves; check it of a forward that runs, whose graph was traced here."""
        if is_fake:
            self.saved = saved
            self._traced.add(saved)
        elif self._traced and saved not in self._traced:
            raise StateError(
                f"A compiled {self.title()} saved other tensors than when it was traced: {saved}, "
                f"and not {' or '.join(map(str, self._traced))}."
            )

    def runners(self) -> list[_Runner]:
        """What runs the copies of the pipeline."""
        return [self._runner, *(runner for _, runner in self._runners.values())]

    def title(self) -> str:
        return "pipeline of " + ", ".join(type(op).__name__ for op in self._pipeline.basic_ops)

    # -- forward -------------------------------------------------------------------

    def forward(self, given: Given, *, is_fake: bool) -> list[torch.Tensor]:
        """The outputs, and the saved tensors that are neither inputs nor outputs."""
        # So what is saved does not depend on ties of weights, nor on tensors that a graph merges.
        given = given.distinct(self.facts.first)
        if not is_fake:
            if forward_ad_level() >= 0:
                refuse_transform()
            replayed = self._replayed(given)
            if replayed is not None:
                return replayed
        with lock, torch.no_grad(), contextlib.ExitStack() as stack:
            if self.recipe is not None:
                use_autocast()
            stack.enter_context(self._given_seeds(given.seeds, given.host, draw=0))
            if is_fake:
                stack.enter_context(recomputing_under(AutocastState(self.recipe)))
                return self._runner.forward(given, is_fake=True)
            self._check_recipe()
            if not self.is_delayed:
                stack.enter_context(recomputing_under(AutocastState(self.recipe)))
                again = state_of_forward(self._pipeline.basic_ops)
                if again is not None:
                    self._check_recomputation(again)
                return self._runner.forward(given, is_fake=False)
            numbers = numbers_in(given.host[: len(given.host) - self.facts.rounds])
            return self._delayed_forward(given, numbers, stack)

    def _replayed(self, given: Given) -> list[torch.Tensor] | None:
        """The results of a recorded forward; None if a forward must find its conditions first."""
        facts = self.facts
        if may_be_checkpointed(is_grad_enabled=facts.is_grad_enabled) or facts.rounds:
            return None
        if not self.is_inside:
            recipe = current_recipe()
            if recipe is not self.recipe and recipe != self.recipe:
                return None  # it is refused
        elif self.is_delayed:
            return None
        if not self.is_delayed:
            with lock, torch.no_grad():
                return self._runner.replayed(given)
        if not facts.is_grad_enabled:
            return None
        numbers = numbers_in(given.host)
        ops = ops_of(numbers)
        with lock, torch.no_grad():
            runner = self._runner_of(ops)
            state = self._state_of_step()
            results = runner.replayed(given)
            if results is not None:
                self._note_forward(numbers, ops, runner, state)
            return results

    def _state_of_step(self) -> AutocastState:
        """The state of a forward that runs now; its step keeps scales if it may be run again."""
        state = current_state()
        if state.region is not None and self.facts.is_checkpointed:
            state.region.may_be_recomputed = True
        return state

    def _delayed_forward(
        self, given: Given, numbers: list[Number], stack: contextlib.ExitStack
    ) -> list[torch.Tensor]:
        ops = ops_of(numbers)
        runner = self._runner_of(ops)
        if is_recomputation(ops[0], numbers[0]):
            if not self.facts.is_checkpointed:
                raise StateError(
                    f"A graph recomputes a {self.title()} under delayed scaling outside of a "
                    "checkpoint, and the scales of its forward are gone. Compile with "
                    "torch._functorch.config.activation_memory_budget = 1, or use another recipe."
                )
            stack.enter_context(recomputing_under(forward_call(numbers[0]).state))
            return runner.forward(given, is_fake=False)
        if self.is_inside:
            stack.enter_context(autocast(recipe=self.recipe))
        again = state_of_forward(tuple(ops))
        if again is not None:
            self._check_recomputation(again)
            stack.enter_context(recomputing_under(again))
        elif current_recipe() != self.recipe:
            raise StateError(
                f"A compiled {self.title()} runs under {self.recipe} in a backward, in a thread "
                f"under {current_recipe()}. Enter fuser.autocast in what runs there."
            )
        if not self.facts.is_grad_enabled and not is_checkpointed_forward():
            stack.enter_context(evaluation())
        state = self._state_of_step()
        results = runner.forward(given, is_fake=False)
        self._note_forward(numbers, ops, runner, state)
        return results

    def _note_forward(
        self,
        numbers: list[Number],
        ops: list[BasicOperation],
        runner: _Runner,
        state: AutocastState,
    ) -> None:
        call = None
        if runner.plan.needs_backward:
            group = None if state.group is None else WeakGroup(state.group)
            modes = [op._delayed.get("backward") for op in ops]
            gradients = tuple([weakref.ref(scales) for scales in modes if scales is not None])
            call = ForwardCall(state._replace(group=group), gradients)
        note_forward(numbers, ops, call)

    def _runner_of(self, ops: list[BasicOperation]) -> _Runner:
        """The runner of the pipeline with these ops, over their states."""
        identities = list(map(id, ops))
        known, runner = self._runners.get(ops[0], (None, None))
        if runner is None or known != identities:
            runner = _Runner(self, copied(self._pipeline))
            self._runners[ops[0]] = (identities, runner)
        runner.use_states_of(ops)
        return runner

    # -- backward ------------------------------------------------------------------

    def gradients(self, results: Tensors) -> list[torch.Tensor]:
        """The wanted gradients, from the results of :meth:`backward`."""
        alone = iter(results)
        return [next(alone) if s is None else s.of(results) for s in self.slices]

    def backward(
        self, given: GivenBack, params: Tensors, host: Tensors, *, is_fake: bool
    ) -> list[torch.Tensor]:
        """The memory of the gradients of inputs that require one; see :class:`Slice`."""
        with lock, torch.no_grad(), self._given_seeds((), host, draw=1):
            if is_fake or not self.is_delayed:
                return self._runner.backward(given, params, is_fake=is_fake)
            numbers = numbers_in(host[: len(host) - self.facts.rounds])
            ops = ops_of(numbers)
            call = forward_call(numbers[0])
            runner = self._runner_of(ops)
            gradients = runner.backward(given, params, is_fake=False)
            group = call.state.group
            if group is not None:
                group = group(runner.plan.described)
            for reference in call.gradients:
                state = reference()
                if state is not None:
                    record_until_backward_ends(state, group)
            if call.state.region is not None and call.state.region.recorded:
                end_with_backward(call.state.region)
            return gradients

    # -- conditions ----------------------------------------------------------------

    def _given_seeds(
        self, dropout: Tensors, host: Tensors, *, draw: int
    ) -> contextlib.AbstractContextManager[None]:
        """Seeds of the graph; ``draw`` is 0 in forward and 1 in backward, whose seeds differ."""
        if not dropout and not self.facts.rounds:
            return contextlib.nullcontext()
        rounding: Iterator[int] = iter(())
        if self.facts.rounds:
            first = host[-1]
            number = 0 if type(first) is not torch.Tensor else int(first)
            rounding = rounding_seeds(number ^ draw)
        return given_seeds(dropout, rounding)

    def _check_recipe(self) -> None:
        """Refuse a call under another recipe than the traced one, which another thread set."""
        if self.is_inside or graph_task() != -1:
            return
        recipe = current_recipe()
        if recipe is not self.recipe and recipe != self.recipe:
            raise StateError(
                f"A compiled {self.title()} runs under {self.recipe}, which another thread uses, "
                f"and this thread is under {recipe}. Enter fuser.autocast inside the compiled "
                "function if threads use different recipes."
            )

    def _check_recomputation(self, again: AutocastState) -> None:
        """Refuse a recomputation under another recipe than that of its forward."""
        if again.recipe != self.recipe:
            raise StateError(
                f"A compiled {self.title()} is recomputed under {self.recipe}, and its forward "
                f"ran under {again.recipe}. Enter fuser.autocast inside the checkpointed function."
            )


class _Runner:
    """Runs a copy of a pipeline over the tensors of each call."""

    def __init__(self, passes: Passes, pipeline: OperationFuser) -> None:
        self.ops = pipeline.basic_ops
        self._passes = passes
        self._pipeline = pipeline
        self._plan: CompiledPlan | None = None
        self._known = KnownParameters(pipeline.basic_ops)
        self._no_parameters = pipeline._slots.tensors()
        self._layouts: dict[tuple[int, ...], tuple[Any, ParameterLayout | None]] = {}
        # Those of recorded forwards, which are the same for each repetition.
        self._recorded_passes: dict[RecordedForward, _Pass] = {}
        # Those whose gradients share no memory with saved tensors and parameters.
        self._sound: weakref.WeakSet[RecordedForward] = weakref.WeakSet()
        # Apart for fake tensors: a backward may be traced after a forward has run.
        self._known_passes: dict[bool, dict[tuple[int | str, ...], _Pass]] = {False: {}, True: {}}

    @property
    def plan(self) -> CompiledPlan:
        assert self._plan is not None  # a forward comes first
        return self._plan

    def use_states_of(self, ops: Sequence[BasicOperation]) -> None:
        """Use delayed scaling's states of ``ops``, those of the pipeline that have quantizers."""
        for own, op in zip(quantizing(self.ops), ops, strict=True):
            own.__dict__["_delayed"] = op._delayed

    # -- forward -------------------------------------------------------------------

    def replayed(self, given: Given) -> list[torch.Tensor] | None:
        """The results of a recorded forward, as of an eager one; None if there is none."""
        if not self._recorded_passes:
            return None
        plan, (x, params, extras, seeds, _) = self.plan, given
        layout = self._layout(params)
        if plan.recorded is None or layout is None:
            return None
        tensors = (x, *params, *extras, *seeds)
        found = plan.recorded.find(tensors, len(extras) + len(seeds), layout, None)
        known = None if found is None else self._recorded_passes.get(found[0])
        if found is None or known is None:
            return None
        recorded, keywords, groups = found
        output, produced, _, saved, *_ = recorded.run(tensors, keywords, groups, _no_forward)
        returned = (output, *[produced[n] for n in plan.returned])
        outputs = [
            tensor.clone() if is_copied else tensor
            for tensor, is_copied in zip(returned, known.copied, strict=True)
        ]
        return [*outputs, *[saved[i] for i in known.made]]

    def forward(self, given: Given, *, is_fake: bool) -> list[torch.Tensor]:
        inputs, (x, params, extras, seeds, _) = given.inputs, given
        if is_fake:
            self._forget_states()
        with self._conditions(params):
            plan = self._planned(inputs)
            if is_fake:
                with dry_run():
                    results = plan._forward(x, extras, None)
            else:
                others = (*extras, *seeds)
                results = plan.run(x, inputs[1:], others, None, self._layout(params))
            output, produced, *rest = results
            if any(isinstance(t, QuantizedTensor) for t in (output, *produced)):
                raise StateError(
                    f"A {self._passes.title()} returns a quantized tensor, which is not supported "
                    "inside torch.compile."
                )
            taken = set(map(storage_of, inputs))
            returned = (output, *(produced[n] for n in plan.returned))
            outputs = [_own(tensor, taken) for tensor in returned]
            if not rest:
                return outputs
            copied = tuple(map(operator.is_not, outputs, returned))
            made = self._keep(given, outputs, copied, *rest, is_fake=is_fake)
        return [*outputs, *made]

    def _keep(
        self,
        given: Given,
        outputs: Tensors,
        copied: tuple[bool, ...],
        ctxs: Any,
        saved: Tensors,
        ends: Ends,
        specs: Specs,
        *,
        is_fake: bool,
    ) -> list[torch.Tensor]:
        """Note what backward needs besides tensors; the saved tensors that are not elsewhere."""
        passes = self._known_passes[is_fake]
        recorded: RecordedForward | None = None
        contexts: Contexts = []
        parts: list[Part] = []
        if ends is None:
            recorded, held = ctxs[0], saved
        else:
            parts, held = taken_apart(saved)
            contexts = [(type(context), dict(context.__dict__)) for context in ctxs]
        key = _key(given.sizes())
        made: list[torch.Tensor] = []
        places = [_place(tensor, given.inputs, outputs, made) for tensor in held]
        numbers = {
            kind: {p.number for p in places if p.kind == kind} for kind in ("input", "output")
        }
        inputs, outs = (tuple(sorted(numbers[kind])) for kind in ("input", "output"))
        where = Saved(inputs, outs, len(made))
        self._passes.note_saved(where, is_fake=is_fake)
        while key not in passes and len(passes) >= MOST_SIZES:
            passes.pop(next(iter(passes)))
        of_made = tuple(next(i for i, t in enumerate(held) if t is tensor) for tensor in made)
        known = _Pass(places, of_made, recorded, copied, contexts, parts, ends, specs)
        passes[key] = known
        if recorded is not None:
            while len(self._recorded_passes) >= MOST_LAYOUTS:
                self._recorded_passes.pop(next(iter(self._recorded_passes)))
            self._recorded_passes[recorded] = known
        return made

    # -- backward ------------------------------------------------------------------

    def backward(self, given: GivenBack, params: Tensors, *, is_fake: bool) -> list[torch.Tensor]:
        plan, (sizes, of_inputs, of_outputs, grads, saved) = self.plan, given
        known = self._known_passes[is_fake].get(_key(sizes))
        if known is None:
            raise StateError(
                f"A compiled {self._passes.title()} runs the backward of a forward that is not "
                f"known: it ran in another process, or {MOST_SIZES} other layouts ago."
            )
        inputs = len(saved) - len(of_inputs) - len(of_outputs)
        outputs = inputs + len(of_inputs)
        groups: dict[str, Tensors | dict[int, torch.Tensor]] = {
            "saved": saved[:inputs],
            "input": dict(zip(of_inputs, saved[inputs:outputs], strict=True)),
            "output": dict(zip(of_outputs, saved[outputs:], strict=True)),
        }
        held = [
            place.of(groups[place.kind]) if place.view else groups[place.kind][place.number]
            for place in known.places
        ]
        extras: list[torch.Tensor | None] | None = None
        if known.specs:
            extras = [None] * len(plan.places)
            for n, grad in zip(plan.returned, grads[1:], strict=True):
                extras[n] = grad
        assert grads[0] is not None  # the operation makes zeros
        dy = grads[0].contiguous()
        if known.recorded is not None:
            backward = functools.partial(self._recorded_backward, params)
            result = known.recorded.backward(backward, held, {}, dy, extras, {})
        else:
            contexts = [context_of(*each) for each in known.contexts]
            tensors = [put_together(known.parts, held)]
            run = plan._backward if is_fake else plan.backward
            state = AutocastState(self._passes.recipe)
            dry = dry_run() if is_fake else contextlib.nullcontext()
            with self._conditions(params), recomputing_under(state), dry:
                result = run(contexts, tensors, known.ends, dy, extras, known.specs)
        taken = {storage_of(grad) for grad in grads if grad is not None}
        is_sound = known.recorded in self._sound
        if not is_sound:
            others = set(map(storage_of, (*saved, *params)))
            is_sound = others.isdisjoint(storage_of(g) for g in result[1:] if g is not None)
            taken |= others
            if is_sound and known.recorded is not None:
                self._sound.add(known.recorded)
        wanted = [g for g, is_one in zip(result[1:], self._passes.wanted, strict=True) if is_one]
        gradients = [gradient for gradient in wanted if gradient is not None]
        if len(gradients) != len(wanted):
            raise StateError(
                f"The backward of a compiled {self._passes.title()} returned no gradient for an "
                "input that requires one."
            )
        if is_fake or not self._passes.slices:
            self._passes.slices = _slices(gradients, taken)
        return _together(gradients, self._passes.slices, taken)

    def _recorded_backward(self, params: Tensors, *args: Any) -> Any:
        """The plan's own code, which a backward that is not recorded yet runs."""
        with (
            self._conditions(params),
            recomputing_under(AutocastState(self._passes.recipe)),
        ):
            backward = self.plan.in_ranges[1]
            assert backward is not None
            return backward(*args)

    # -- conditions ----------------------------------------------------------------

    @contextlib.contextmanager
    def _conditions(self, params: Tensors) -> Iterator[None]:
        """The parameters and the autocast of the traced call."""
        facts = self._passes.facts
        with contextlib.ExitStack() as stack:
            if facts.autocast is not None:
                stack.enter_context(torch.autocast(facts.device, dtype=facts.autocast))
            elif is_any_autocast_enabled():  # around a backward
                stack.enter_context(without_autocast())
            self._give(params)
            for op, training in zip(self.ops, facts.training, strict=True):
                op.__dict__["training"] = training
            try:
                yield
            finally:
                self._give(self._no_parameters)

    def _forget_states(self) -> None:
        """Delayed scaling's states of fake tensors are no longer than a pass."""
        for op in self.ops:
            op.__dict__["_delayed"] = {}

    def _planned(self, inputs: Tensors) -> CompiledPlan:
        if self._plan is None:
            pipeline, facts = self._pipeline, self._passes.facts
            device = inputs[0].device
            with outside_fake_mode(), torch.set_grad_enabled(facts.is_grad_enabled):
                # Seeds are no inputs of a plan.
                like = [
                    torch.empty(
                        [size_hint(size) for size in tensor.shape],
                        dtype=tensor.dtype,
                        device="meta",
                    ).requires_grad_(requires_grad)
                    for tensor, (_, _, requires_grad) in zip(inputs, facts.tensors, strict=False)
                ]
                x, params = like[0], tuple(like[1 : 1 + facts.parameter_count])
                extras = like[1 + facts.parameter_count :]
                graph = pipeline._graph(x, extras, facts.autocast)
                key = pipeline._plan_key(
                    pipeline._op_keys(graph, x, params, extras),
                    autocast_dtype=facts.autocast,
                    device=device.type,
                    arch=architecture(device),
                    no_kernels=facts.no_kernels,
                )
                if key.recipe is not None:
                    warn_if_emulated(key.recipe, key.arch)
                planned = make_plan(graph, key, registered_fusions())
            self._plan = CompiledPlan(
                planned.plan,
                key,
                pipeline.basic_ops,
                pipeline.sources,
                pipeline.returned,
                pipeline._slots.counts,
                planned.forward,
                planned.backward,
            )
        return self._plan

    def _give(self, params: Tensors) -> None:
        for (held, name), parameter in zip(self._pipeline._slots.slots, params, strict=True):
            held[name] = parameter

    def _layout(self, params: Tensors) -> ParameterLayout | None:
        addresses = tuple(map(torch.Tensor.data_ptr, params))
        guard, layout = self._layouts.get(addresses, (None, None))
        if guard is None or not guard(*params):
            layout = self._known.renew(params)[1]
            while len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[addresses] = (tensor_guard(params), layout)
        return layout


def _no_forward(*_: Any) -> Any:
    raise StateError("A recording is incomplete.")  # only complete ones are known


def quantizing(ops: Sequence[BasicOperation]) -> list[BasicOperation]:
    """The ops with quantizers, and so with states under delayed scaling."""
    return [op for op in ops if any(map(op.num_quantizers, ("forward", "backward")))]


def copied(pipeline: OperationFuser) -> OperationFuser:
    """A pipeline of the same structure, without the memory of the parameters."""
    memo: dict[int, Any] = {}
    for op in pipeline.basic_ops:
        memo[id(op._delayed)] = {}
        for parameter in op.parameters():
            like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = Parameter(like, requires_grad=parameter.requires_grad)
    ops = [copy.deepcopy(op, memo) for op in pipeline.basic_ops]
    for op in ops:
        op.__dict__["runs_in_graph"] = True
        forget_op(op_number(op))
    twin = OperationFuser(ops, pipeline.fusions, open_channels=pipeline.open_channels)
    twin._find_parameters()
    twin._is_started = True
    return twin


def _own(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """``tensor``, or a copy if its storage is taken: results of operations share no memory."""
    tensor = tensor.clone() if storage_of(tensor) in taken else tensor
    taken.add(storage_of(tensor))
    return tensor


def _slices(gradients: Tensors, taken: set[int]) -> list[Slice | None]:
    """Where the gradients are that share memory with others of them alone."""
    storages = [storage_of(gradient) for gradient in gradients]
    shared = [s for s in dict.fromkeys(storages) if storages.count(s) > 1 and s not in taken]
    alone = sum(storage not in shared for storage in storages)
    return [
        Slice(alone + shared.index(storage), g.size(), g.stride(), int(g.storage_offset()))
        if storage in shared
        else None
        for g, storage in zip(gradients, storages, strict=True)
    ]


def _together(
    gradients: Tensors, slices: Sequence[Slice | None], taken: set[int]
) -> list[torch.Tensor]:
    """The gradients that share no memory, then the memory of others; copies where needed."""
    results = [_own(g, taken) for g, place in zip(gradients, slices, strict=True) if place is None]
    shared: dict[int, list[tuple[torch.Tensor, Slice]]] = {}
    for gradient, place in zip(gradients, slices, strict=True):
        if place is not None:
            shared.setdefault(place.number, []).append((gradient, place))
    for members in shared.values():
        storage, size = storage_of(members[0][0]), max(place.end() for _, place in members)
        is_there = storage not in taken and all(
            (storage_of(g), g.storage_offset(), g.stride()) == (storage, s.offset, s.stride)
            for g, s in members
        )
        memory = members[0][0].as_strided((size,), (1,), 0) if is_there else None
        if memory is None:  # a recording may have other places
            memory = members[0][0].new_empty(size)
            for gradient, place in members:
                place.of({place.number: memory}).copy_(gradient)
        taken.add(storage_of(memory))
        results.append(memory)
    return results


def _place(
    tensor: torch.Tensor, inputs: Tensors, outputs: Tensors, made: list[torch.Tensor]
) -> Place:
    """Where a saved tensor is; a new one is added to ``made``."""
    for kind, tensors in (("input", inputs), ("output", outputs), ("saved", made)):
        for number, other in enumerate(tensors):
            if tensor is other:
                return Place(kind, number)
    for kind, tensors in (("input", inputs), ("output", outputs), ("saved", made)):
        for number, other in enumerate(tensors):
            if storage_of(tensor) == storage_of(other):
                offset = tensor.storage_offset() - other.storage_offset()
                view = (tensor.size(), tensor.stride(), offset)
                return Place(kind, number, view)
    made.append(tensor)
    return Place("saved", len(made) - 1)


def _key(sizes: Sizes) -> tuple[int | str, ...]:
    return tuple([size if type(size) is int else str(size) for size in sizes])
