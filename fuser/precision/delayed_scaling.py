"""Delayed scaling: scales, amax histories, and the ends of steps.

A step of the forward ends as described in precision/contexts.py; a step of the gradients ends with
the backward. Evaluation records no amax, so it does not change training. A recomputation records
none either, and quantizes with the scales of its forward.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fuser.communication import Group, is_initialized
from fuser.doors import PARAMETERS
from fuser.errors import FuserWarning, InputError
from fuser.formats import DType
from fuser.functional.delayed_scaling import update_delayed
from fuser.precision.contexts import AmaxStep, AutocastState, current_state, recomputed_state
from fuser.precision.recomputation import may_be_in_function
from fuser.recipe import DelayedScaling
from fuser.tensors import Float8Quantizer, Quantizer
from fuser.torch_private import graph_task, users_level, when_backward_ends

FLOAT32_MAX = torch.finfo(torch.float32).max

_is_evaluating: ContextVar[bool] = ContextVar("fuser_is_evaluating", default=False)


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    """Context for a forward without a backward: it records no amax."""
    token = _is_evaluating.set(True)
    try:
        yield
    finally:
        _is_evaluating.reset(token)


class _Uses(threading.local):
    """The lists to which this thread adds the states of the current step, one a context."""

    noted: tuple[list[DelayedScales], ...] = ()


_uses = _Uses()


@contextlib.contextmanager
def noting_uses() -> Iterator[list[DelayedScales]]:
    """Context that returns a list, and adds the states that a forward inside records in.

    Also those that a context inside it notes.
    """
    used: list[DelayedScales] = []
    outer = _uses.noted
    _uses.noted = (*outer, used)
    try:
        yield used
    finally:
        _uses.noted = outer


class Quantizing(NamedTuple):
    """What ops quantize with in the pass that runs now."""

    quantizers: list[list[Float8Quantizer]]
    """Of states: the same lists, as long as they have the same quantizers."""
    scales: list[torch.Tensor] | None = None
    """The scales that a recomputation reads in the place of those of forward; else None."""


def delayed_quantizers(
    recipe: DelayedScaling, states: Iterable[Mapping[str, DelayedScales]], device: torch.device
) -> Quantizing | None:
    """What the ops of ``states`` quantize with; None if a state must be made for ``recipe`` first.

    A recomputation has the scales of its forward, from before the steps that have ended since.
    """
    again = recomputed_state()
    quantizers: list[list[Float8Quantizer]] = []
    scales: list[torch.Tensor] = []
    for of_op in states:
        for state in of_op.values():
            if state.mode == "forward" and again is not None:
                read = state.scales_of_forward(recipe, again, device)
                if read is None:
                    return None
                scales += read
            elif state.mode == "forward" or state.scale.numel():
                current = state.quantizers_under(recipe)
                if current is None:
                    return None
                quantizers.append(current)
    return Quantizing(quantizers, None if again is None else scales)


def note_uses(states: Sequence[DelayedScales]) -> None:
    """Add states to the current step: the forward that runs now records amaxes in them."""
    for noted in _uses.noted:
        noted.extend(states)
    _, region, group, _ = current_state()
    if region is None or _held is not None:
        return
    for state in states:
        region.recorded[state] = group
        if region.may_be_recomputed:
            state._regions[weakref.ref(region)] = None


def reduces_amaxes_over(group: Group | None) -> bool:
    """Whether delayed scaling, in the forward that runs now, reduces amaxes over ``group``.

    All ranks of it then have one scale.
    """
    recipe, _, over, _ = current_state()
    if not (isinstance(recipe, DelayedScaling) and recipe.reduce_amax and is_initialized()):
        return False
    ranks = torch.distributed.get_process_group_ranks
    return over is None or set(ranks(group)) <= set(ranks(over))


def mixes_amaxes_of(group: Group | None) -> bool:
    """Whether two or more ranks of a group then have one scale."""
    recipe, _, over, _ = current_state()
    if not (isinstance(recipe, DelayedScaling) and recipe.reduce_amax and is_initialized()):
        return False
    ranks = torch.distributed.get_process_group_ranks
    shared = set(ranks(group)) if over is None else set(ranks(group)) & set(ranks(over))
    return len(shared) > 1


# The states whose gradients were recorded in it, if steps are held; of the whole process, because
# autograd's threads record gradients.
_held: list[DelayedScales] | None = None


@contextlib.contextmanager
def holding_steps() -> Iterator[list[DelayedScales]]:
    """Context in which no step ends; returns the states of gradients that are recorded in it."""
    global _held
    outer, _held = _held, []
    try:
        yield _held
    finally:
        _held = outer


def holds_steps() -> bool:
    """Whether steps are held: a graph is captured, and nothing that runs is a step of training."""
    return _held is not None


is_evaluating = _is_evaluating.get
"""Whether the forward that runs now records no amax."""


class StateIdentity:
    """Identifies an op's states, old and new, so that a step and other ranks know them."""

    state: weakref.ref[DelayedScales]
    """The newest."""


class StateMemory(NamedTuple):
    """The memory of a state under a recipe, and the quantizers that read and write it."""

    recipe: DelayedScaling
    scale: torch.Tensor
    amax_history: torch.Tensor
    quantizers: list[Float8Quantizer]


class DelayedScales:
    """Delayed scaling's state for the tensors that one op quantizes in forward or in backward.

    ``scale`` fp32 [n] and ``amax_history`` fp32 [length, n], plain tensors. Row
    0 of the history collects the amaxes of the current step; the rows after it
    are those of earlier steps, the oldest first. ``mode`` is ``"forward"`` or
    ``"backward"``.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.scale = torch.empty(0, dtype=torch.float32, device="cpu")
        self.amax_history = torch.empty(0, 0, dtype=torch.float32, device="cpu")
        self._recipe: DelayedScaling | None = None
        self._quantizers: list[Float8Quantizer] = []
        self._of_parameters: dict[int, Float8Quantizer] = {}
        # The recorded updates of this state with others.
        self._updates: dict[Any, Any] = {}
        self._identity = StateIdentity()
        self._identity.state = weakref.ref(self)
        # Steps that used the current scales and whose forward may be recomputed.
        self._regions: dict[weakref.ref[AmaxStep], None] = {}

    def quantizer(
        self, recipe: DelayedScaling, dtypes: Sequence[DType], index: int, device: torch.device
    ) -> Quantizer:
        """The quantizer of tensor ``index``, on ``device``; it reads and writes this state.

        In evaluation it only reads, and so does the forward's quantizer in a recomputation. The
        gradients' quantizer may be made in evaluation first: a reentrant checkpoint runs its
        forward without gradients.
        """
        is_other = self._is_other(recipe, device)
        again = recomputed_state() if self.mode == "forward" else None
        is_reading = again is not None or _is_evaluating.get()
        past = None if again is None else self._past_scales(recipe, again)
        if past is not None:
            return Float8Quantizer(past[index].to(device), None, dtypes[index])
        if is_other and is_reading and self.scale.numel():
            scale = self._scale_under(recipe, dtypes)
            return Float8Quantizer(scale[index : index + 1].to(device), None, dtypes[index])
        if is_other:
            if self.mode == "forward" and again is None and is_reading:
                _warn_of_evaluation()
            self.prepare(recipe, dtypes, device)
        quantizer = self._quantizers[index]
        if self.mode == "backward":
            return quantizer
        if is_reading:
            return quantizer.unbound()
        note_uses((self,))
        return quantizer

    def _past_scales(
        self, recipe: DelayedScaling, again: AutocastState
    ) -> Sequence[torch.Tensor] | None:
        """The scales of a forward that is repeated, if steps have ended since it."""
        if again.region is None:
            return None
        return again.region.past_scales.get(self._identity, {}).get(recipe)

    def scales_of_forward(
        self, recipe: DelayedScaling, again: AutocastState, device: torch.device
    ) -> Sequence[torch.Tensor] | None:
        """What the quantizers of a recomputation read; None if they make scales of their own."""
        past = self._past_scales(recipe, again)
        if past is None and not self._is_other(recipe, device):
            past = [quantizer.scale for quantizer in self._quantizers]
        return past if past and past[0].device == device else None

    def quantizers_under(self, recipe: DelayedScaling) -> list[Float8Quantizer] | None:
        """The quantizers, the same list as long as they are the same; None before they are made."""
        is_same = recipe is self._recipe or recipe == self._recipe
        return self._quantizers if is_same and self._quantizers else None

    def parameter_quantizer(self, index: int) -> Float8Quantizer | None:
        """The quantizer that parameter ``index`` keeps; None until the state is made for a recipe.

        A write to the parameter, such as an optimizer's, is quantized with the
        scale at that time, and recorded in the current step. Values that are too large
        for the scale, for example from a checkpoint, are not clamped.
        """
        if not self._quantizers:
            return None
        quantizer = self._of_parameters.get(index)
        if quantizer is None:
            quantizer = replace(self._quantizers[index], saturates=False)
            self._of_parameters[index] = quantizer
        return quantizer

    def keep_scale(self, index: int, scale_inv: torch.Tensor) -> None:
        """Take the scale of the bytes of parameter ``index``, unless there is a history."""
        scale, past = self.scale[index], self.amax_history[1:, index]
        is_fresh = (scale == 1) & (past == 0).all()
        scale.copy_(torch.where(is_fresh, scale_inv[0].reciprocal(), scale))

    def prepare(
        self, recipe: DelayedScaling, dtypes: Sequence[DType], device: torch.device
    ) -> None:
        """Make the state for ``recipe`` on ``device``, or adapt it, unless it is for these.

        Quantizers that were returned before keep their scale, for backwards that
        are still to run.
        """
        if not self._is_other(recipe, device):
            return
        count = len(dtypes)
        if self.scale.numel() not in (0, count):
            raise InputError(
                f"Delayed scaling's state is for {self.scale.numel()} tensors, and the op that "
                f"holds it quantizes {count} in its {self.mode}."
                " Load the state of a model of the same ops."
            )
        with torch.inference_mode(False):  # the state outlives an inference region
            if self.scale.numel():
                self._leave_past_scale()
                self.scale = self._scale_under(recipe, dtypes).to(device)
                history = _resized(self.amax_history, recipe.amax_history_len)
                self.amax_history = history.to(device)
            else:
                options: dict[str, Any] = {"dtype": torch.float32, "device": device}
                self.scale = torch.ones(count, **options)
                self.amax_history = torch.zeros(recipe.amax_history_len, count, **options)
            self._quantizers = [
                Float8Quantizer(self.scale[i : i + 1], self.amax_history[0, i : i + 1], dtype)
                for i, dtype in enumerate(dtypes)
            ]
            self._max = _maxima(dtypes, device)
        self._of_parameters = {}
        self._recipe = recipe

    def _is_other(self, recipe: DelayedScaling, device: torch.device) -> bool:
        is_same = recipe is self._recipe or recipe == self._recipe
        return not is_same or device != self.scale.device

    def last_quantizer(self, index: int) -> Quantizer | None:
        """The quantizer of the last call, with the current scale; None before the first call."""
        return self._quantizers[index] if self._quantizers else None

    def _scale_under(self, recipe: DelayedScaling, dtypes: Sequence[DType]) -> torch.Tensor:
        """The current scales, for the formats and the margin of ``recipe``.

        They change in the ratio of the formats' largest values; the scales of a state
        that has recorded no tensor stay 1. A state from a checkpoint does not contain
        the formats of its scales: no scale becomes larger than its history allows.
        """
        scale, past = self.scale, self.amax_history[1:]
        largest = _maxima(dtypes, scale.device) * 2.0**-recipe.margin
        if self._recipe is not None:
            ratio = largest / (self._max.to(scale.device) * 2.0**-self._recipe.margin)
            is_fresh = (scale == 1) & (past == 0).all(0)
            scale = torch.where(is_fresh, scale, (scale * ratio).clamp(max=FLOAT32_MAX))
        if len(past):
            seen = past[-1] if recipe.amax_compute_algo == "most_recent" else past.amax(0)
            limit = largest / seen
            is_limit = (seen > 0) & (seen < math.inf) & (limit < scale)
            scale = torch.where(is_limit, limit, scale)
        return scale

    # -- steps ------------------------------------------------------------------

    def _leave_past_scale(self) -> None:
        """Before an update: store the scale in the steps whose forward used it."""
        regions, self._regions = self._regions, {}
        past: tuple[torch.Tensor, ...] = ()
        for reference in regions:
            region = reference()
            if region is not None:
                # Sliced here: selective checkpointing refuses a recomputation that makes more calls
                # to torch than its forward made.
                past = past or self.scale.clone().unsqueeze(1).unbind()
                region.past_scales.setdefault(self._identity, {})[self._recipe] = past

    @staticmethod
    def end_step(states: Mapping[DelayedScales, Group | None]) -> None:
        """Reduce the amaxes of ``states`` over their groups, then roll histories and set scales.

        A state that was loaded or copied and not used since has recorded nothing. Over
        ranks, the steps of states that only another rank has used end too.
        """
        states = {state: group for state, group in states.items() if state._recipe is not None}
        amaxes = PARAMETERS.guest.amaxes(states) if is_initialized() else None
        ended: Iterable[DelayedScales] = states if amaxes is None else amaxes
        for state in ended:
            state._leave_past_scale()
        for some in alike(ended, lambda state: (state._recipe, state.scale.device)):
            recipe = some[0]._recipe
            assert recipe is not None  # such a state is left out above
            update_delayed(
                [state.amax_history for state in some],
                [state.scale for state in some],
                [state._max for state in some],
                None if amaxes is None else [amaxes[state] for state in some],
                margin=recipe.margin,
                algorithm=recipe.amax_compute_algo,
                cache=some[0]._updates,
            )

    def succeed(self, previous: DelayedScales) -> None:
        """Replace an op's state from before a checkpoint was loaded.

        Forwards that ran with ``previous`` are recomputed with its scales.
        """
        previous._leave_past_scale()
        self._identity = previous._identity
        self._identity.state = weakref.ref(self)

    # -- memory that a CUDA graph reads and writes --------------------------------

    def memory(self) -> StateMemory:
        """The memory of this state, which holds it as long as the result lives."""
        assert self._recipe is not None  # it was used
        return StateMemory(self._recipe, self.scale, self.amax_history, self._quantizers)

    def is_in(self, memory: StateMemory) -> bool:
        """Whether this state is in ``memory``, and so under the same recipe."""
        return self._quantizers is memory.quantizers

    def move_into(self, memory: StateMemory) -> None:
        """Continue in ``memory``, of a state under the same recipe; the numbers stay the same."""
        if not self.is_in(memory):
            memory.scale.copy_(self.scale)
            memory.amax_history.copy_(self.amax_history)
            _, self.scale, self.amax_history, self._quantizers = memory
            self._of_parameters = {}

    def leave(self, memory: StateMemory) -> None:
        """Leave ``memory`` to the state that replaces this one, whose steps are over."""
        if self.is_in(memory):
            self.scale, self.amax_history = self.scale.clone(), self.amax_history.clone()
            self._recipe = None

    def snapshot(self) -> Callable[[], None]:
        """A function that gives this state the memory and the numbers back that it has now."""
        attributes, numbers = dict(vars(self)), (self.scale.clone(), self.amax_history.clone())

        def restore() -> None:
            vars(self).update(attributes)
            self.scale.copy_(numbers[0])
            self.amax_history.copy_(numbers[1])

        return restore

    # -- packing into a plain tensor ------------------------------------------------

    def packed(self) -> torch.Tensor:
        """The state as one fp32 tensor on the CPU: n, length, scales, history row by row."""
        length, count = self.amax_history.shape
        sizes = torch.tensor([count, length], dtype=torch.float32, device="cpu")
        return torch.cat([sizes, self.scale.cpu(), self.amax_history.flatten().cpu()])

    @classmethod
    def unpacked(cls, packed: torch.Tensor, mode: str) -> tuple[DelayedScales, torch.Tensor]:
        """The state at the start of ``packed``, a result of :meth:`packed`, and the rest of it.

        Raises InputError if ``packed`` is shorter than the sizes at its start require.
        """
        state = cls(mode)
        count, length = (int(size) for size in packed[:2]) if len(packed) > 1 else (0, -1)
        start, stop = 2 + count, 2 + count + count * length
        if length < 0 or len(packed) < stop:
            raise InputError(
                f"Delayed scaling's {mode} state needs {max(stop, 2)} numbers for {count} tensors "
                f"with a history of {max(length, 0)}; the checkpoint has {len(packed)}."
                " Load the state of a model of the same ops."
            )
        state.scale = packed[2:start].clone()
        state.amax_history = packed[start:stop].view(length, count).clone()
        return state, packed[stop:]

    def __getstate__(self) -> dict[str, object]:
        return {"mode": self.mode, "scale": self.scale, "amax_history": self.amax_history}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["mode"])  # type: ignore[misc]
        self.__dict__.update(state)


def _warn_of_evaluation() -> None:
    """Warn, once in a process, of an op that evaluates before a step has set its scales.

    Not in an autograd function, whose backward may compute a forward of training again.
    """
    global _has_warned
    if _has_warned or may_be_in_function():
        return
    warnings.warn(
        "An op runs in evaluation under DelayedScaling with scales that no step has set: they are "
        "1, at which small values lose their bits, and evaluation does not change them. Run a few "
        "steps of training first, copy or pickle the trained model, which keeps its scales, or "
        "evaluate under Float8CurrentScaling.",
        FuserWarning,
        stacklevel=users_level(),
    )
    _has_warned = True


_has_warned = False


class _EndOfBackward:
    """The effects at the end of one backward: steps of gradients and of forwards end."""

    def __init__(self) -> None:
        # By weak references: a backward that fails never ends.
        self.states: dict[weakref.ref[DelayedScales], Group | None] = {}
        self.regions: dict[weakref.ref[AmaxStep], None] = {}


# The running backwards, by autograd's number of each.
_backwards: dict[int, _EndOfBackward] = {}
_backwards_lock = threading.Lock()
# More than can be nested, as reentrant checkpoints nest them.
MAX_BACKWARDS = 64


def end_with_backward(
    states: Iterable[DelayedScales], group: Group | None, region: AmaxStep | None
) -> None:
    """Make the steps of gradients and of a forward end when the current backward ends.

    ``states`` are those of the gradients, whose amaxes are reduced over ``group``, and ``region``
    is the forward's step.
    """
    if _held is not None:
        _held.extend(states)
        return
    with _backwards_lock:  # a backward over several devices has a thread for each
        running = _running_backward()
        for state in states:
            running.states[weakref.ref(state)] = group
        if region is not None and region.recorded:
            running.regions[weakref.ref(region)] = None


def _running_backward() -> _EndOfBackward:
    task = graph_task()
    if task not in _backwards:
        # The entry of a backward that failed is still here; it never ends.
        while len(_backwards) >= MAX_BACKWARDS:
            _backwards.pop(next(iter(_backwards)))
        _backwards[task] = _EndOfBackward()
        when_backward_ends(lambda: _end_backward(task))
    return _backwards[task]


def _end_backward(task: int) -> None:
    with _backwards_lock:
        backward = _backwards.pop(task, None)
    if backward is None:
        return
    states: dict[DelayedScales, Group | None] = {}
    for region in [reference() for reference in backward.regions]:
        if region is not None:
            states |= region.take()
    for reference, group in backward.states.items():
        state = reference()
        if state is not None:
            states[state] = group
    DelayedScales.end_step(states)


def _resized(history: torch.Tensor, length: int) -> torch.Tensor:
    """``history`` with ``length`` rows: row 0, and the newest of the others at the end."""
    if len(history) == length:
        return history
    resized = history.new_zeros(length, history.shape[1])
    resized[0] = history[0]
    kept = min(len(history), length) - 1
    if kept:
        resized[-kept:] = history[-kept:]
    return resized


def _maxima(dtypes: Sequence[DType], device: torch.device) -> torch.Tensor:
    """The largest value of each format, fp32 [n]."""
    return torch.tensor([dtype.max for dtype in dtypes], dtype=torch.float32, device=device)


def alike(
    states: Iterable[DelayedScales], key: Callable[[DelayedScales], Hashable]
) -> list[list[DelayedScales]]:
    """``states`` grouped by the result of ``what``, in their order."""
    groups: dict[Hashable, list[DelayedScales]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)
    return list(groups.values())
