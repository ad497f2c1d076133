"""The passes of compiled graphs: a pipeline's forward and backward as functions of tensors.

A graph names its passes by their contents: the structure of a pipeline, and what else its plan
depends on. They run copies of the pipeline, over the tensors that the graph gives. A forward
returns the outputs and the tensors that backward reads. On fake tensors the same code runs, and
launches nothing.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

from fuser.communication import WeakGroup
from fuser.errors import StateError
from fuser.functional.random_seeds import given_seeds, rounding_seeds
from fuser.op import BasicOperation
from fuser.precision.contexts import (
    AROUND,
    INSIDE,
    AutocastState,
    autocast,
    current_recipe,
    current_state,
    is_autocast_entered,
    recomputing_under,
    use_autocast,
)
from fuser.precision.delayed_scaling import (
    end_with_backward,
    evaluation,
)
from fuser.precision.numbered_calls import (
    ForwardCall,
    Number,
    forward_call,
    is_recomputation,
    note_forward,
    numbers_in,
    ops_of,
)
from fuser.precision.recomputation import (
    is_checkpointed_forward,
    may_be_checkpointed,
    state_of_forward,
)
from fuser.recipe import DelayedScaling, Recipe
from fuser.runtime.compiled_runner import PipelineRunner, quantizing
from fuser.runtime.compiled_values import Facts, GivenBack, GivenTensors, Noted, Tensors
from fuser.runtime.diagnose import refuse_transform
from fuser.runtime.pipeline import OperationFuser
from fuser.torch_private import (
    forward_ad_level,
    graph_task,
)

lock = threading.RLock()
NO_CONTEXT = contextlib.nullcontext()


def _no_grad() -> contextlib.AbstractContextManager[None]:
    """``torch.no_grad()``, where it changes something."""
    return torch.no_grad() if torch.is_grad_enabled() else NO_CONTEXT


class Passes:
    """Forward and backward of pipelines of one structure, over tensors with the same facts."""

    def __init__(self, pipeline: OperationFuser, facts: Facts, recipe: Recipe | None) -> None:
        self.facts = facts
        self.recipe = recipe
        names = ", ".join(type(op).__name__ for op in pipeline.basic_ops)
        self.noted = Noted(facts, recipe, f"pipeline of {names}")
        self.output_count = 1 + len(pipeline.returned)
        self.is_inside = facts.recipe_key.startswith(INSIDE)
        """Whether the graph itself enters autocast."""
        self.is_around = facts.recipe_key.startswith(AROUND)
        """Whether an autocast around the graph replaces that of a conversion."""
        self.is_delayed = isinstance(recipe, DelayedScaling) and bool(
            quantizing(pipeline.basic_ops)
        )
        """Whether an op has states."""
        self._pipeline = pipeline
        self._runner = PipelineRunner(self.noted, pipeline)
        # Under delayed scaling each pipeline has its own states, and recordings that hold them.
        self._runners: weakref.WeakKeyDictionary[BasicOperation, tuple[list[int], PipelineRunner]]
        self._runners = weakref.WeakKeyDictionary()

    def runners(self) -> list[PipelineRunner]:
        """What runs the copies of the pipeline."""
        return [self._runner, *(runner for _, runner in self._runners.values())]

    # -- forward -------------------------------------------------------------------

    def forward(self, given: GivenTensors, *, is_fake: bool) -> list[torch.Tensor]:
        """The outputs, and the saved tensors that are neither inputs nor outputs."""
        # So what is saved does not depend on ties of weights, nor on tensors that a graph merges.
        given = given.distinct(self.facts.first)
        if not is_fake:
            if forward_ad_level() >= 0:
                refuse_transform()
            for first, second, check in self._pipeline.equal_extras:
                check(given.extras[first], given.extras[second])
            replayed = self._replayed(given)
            if replayed is not None:
                return replayed
        given = given.in_own_storages()
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

    def _replayed(self, given: GivenTensors) -> list[torch.Tensor] | None:
        """The results of a recorded forward; None if a forward must find its conditions first."""
        facts = self.facts
        if may_be_checkpointed(is_grad_enabled=facts.is_grad_enabled) or facts.rounds:
            return None
        if not self.is_inside:
            recipe = current_recipe()
            if recipe is not self.recipe and recipe != self.recipe:
                return None  # it is refused
            if self.is_around and not is_autocast_entered():
                return None  # so is this
        elif self.is_delayed:
            return None
        if not self.is_delayed:
            with lock, _no_grad():
                return self._runner.replayed(given)
        if not facts.is_grad_enabled:
            return None
        numbers = numbers_in(given.host)
        ops = ops_of(numbers)
        with lock, _no_grad():
            runner = self._runner_of(ops)
            try:
                state = self._state_of_step()
                results = runner.replayed(given)
            finally:
                runner.forget_states()
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
        self, given: GivenTensors, numbers: list[Number], stack: contextlib.ExitStack
    ) -> list[torch.Tensor]:
        ops = ops_of(numbers)
        runner = self._runner_of(ops)
        stack.callback(runner.forget_states)
        if is_recomputation(ops[0], numbers[0]):
            if not self.facts.is_checkpointed:
                raise StateError(
                    f"A graph recomputes a {self.noted.title} under delayed scaling outside of a "
                    "checkpoint, and the scales of its forward are gone. Compile with "
                    "torch._functorch.config.activation_memory_budget = 1, or use another recipe."
                )
            stack.enter_context(recomputing_under(forward_call(numbers[0]).state))
            return runner.forward(given, is_fake=False)
        if self.is_inside:
            stack.enter_context(autocast(recipe=self.recipe))
        again = state_of_forward(tuple(ops))
        # Noted as passes under other recipes look for it, which have no numbers of ops.
        of_structure = state_of_forward(self._pipeline.basic_ops)
        again = of_structure if again is None else again
        if again is not None:
            self._check_recomputation(again)
            stack.enter_context(recomputing_under(again))
        elif current_recipe() != self.recipe:
            raise StateError(
                f"A compiled {self.noted.title} runs under {self.recipe} in a backward, in a "
                f"thread under {current_recipe()}. Enter fuser.autocast in what runs there."
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
        runner: PipelineRunner,
        state: AutocastState,
    ) -> None:
        call = None
        if runner.plan.needs_backward:
            if state.group is not None:
                state = state._replace(group=WeakGroup(state.group))
            modes = [op._delayed.get("backward") for op in ops]
            call = ForwardCall(state, [weakref.ref(scales) for scales in modes if scales])
        note_forward(numbers, ops, call)

    def _runner_of(self, ops: list[BasicOperation]) -> PipelineRunner:
        """The runner of the pipeline with these ops, over their states until it forgets them."""
        identities = list(map(id, ops))
        known, runner = self._runners.get(ops[0], (None, None))
        if runner is None or known != identities:
            runner = PipelineRunner(self.noted, self._pipeline)
            self._runners[ops[0]] = (identities, runner)
        runner.use_states_of(ops)
        return runner

    # -- backward ------------------------------------------------------------------

    def gradients(self, results: Tensors) -> list[torch.Tensor]:
        """The wanted gradients, from the results of :meth:`backward`."""
        alone = iter(results)
        return [next(alone) if s is None else s.of(results) for s in self.noted.slices]

    def backward(self, given: GivenBack, *, is_fake: bool) -> list[torch.Tensor]:
        """The memory of the gradients of inputs that require one; see :class:`Slice`."""
        with lock, _no_grad(), self._given_seeds((), given.host, draw=1):
            if is_fake or not self.is_delayed:
                return self._runner.backward(given, is_fake=is_fake)
            numbers = numbers_in(given.host[: len(given.host) - self.facts.rounds])
            ops = ops_of(numbers)
            call = forward_call(numbers[0])
            runner = self._runner_of(ops)
            try:
                gradients = runner.backward(given, is_fake=False)
            finally:
                runner.forget_states()
            group = call.state.group
            if group is not None:
                group = group(runner.plan.described)
            states = [reference() for reference in call.gradients]
            living = [state for state in states if state is not None]
            end_with_backward(living, group, call.state.region)
            return gradients

    # -- conditions ----------------------------------------------------------------

    def _given_seeds(
        self, dropout: Tensors, host: Tensors, *, draw: int
    ) -> contextlib.AbstractContextManager[None]:
        """Seeds of the graph; ``draw`` is 0 in forward and 1 in backward, whose seeds differ."""
        if not dropout and not self.facts.rounds:
            return NO_CONTEXT
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
        if self.is_around and not is_autocast_entered():
            raise StateError(
                f"A compiled {self.noted.title} of a converted module was called outside of "
                "fuser.autocast, under the recipe of its conversion, while another thread is in "
                "an autocast, which its graph took for one around this call. Enter fuser.autocast "
                "inside the compiled function if threads use different recipes."
            )
        if recipe is not self.recipe and recipe != self.recipe:
            raise StateError(
                f"A compiled {self.noted.title} runs under {self.recipe}, which another thread "
                f"uses, and this thread is under {recipe}. Enter fuser.autocast inside the "
                "compiled function if threads use different recipes."
            )

    def _check_recomputation(self, again: AutocastState) -> None:
        """Refuse a recomputation under another recipe than that of its forward."""
        if again.recipe != self.recipe:
            here, there = (
                "without a recipe" if recipe is None else f"under {recipe}"
                for recipe in (self.recipe, again.recipe)
            )
            raise StateError(
                f"A compiled {self.noted.title} is recomputed {here}, and its forward ran {there}. "
                "Enter fuser.autocast inside the checkpointed function."
            )
