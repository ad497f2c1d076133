"""Amaxes of delayed scaling over ranks: one list of states on all ranks, one reduction a step.

Every rank of a group sends the amaxes of the same states, in the same places, so all messages have
one size. A state that recorded nothing on a rank in a step is absent there, -1: its step ends with
the amaxes of the ranks that used it. Ranks add states to the list together. They know an op by its
number among the ops of their processes, from the oldest or from the newest, so ranks that run
different ops have made the same ones.

A rank that used a state without a place says so in the reduction. If all ranks say it, they add
their states at once. Otherwise they do so in the next step, which also ends this one of the new
states: the other ranks read the flag a step late, because on a GPU they would wait for the device.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fuser.communication import Group, resolved
from fuser.errors import InputError, StateError
from fuser.formats import DType
from fuser.precision.delayed_scaling import DelayedScales, StateIdentity, alike
from fuser.precision.op_numbers import existing_ops
from fuser.recipe import DelayedScaling
from fuser.torch_private import foreach_copy_

Result = TypeVar("Result")


def _described(op: Any) -> str:
    return f"{type(op).__name__}({op.extra_repr()})"


def _names_of(states: Sequence[DelayedScales]) -> str:
    """The ops of states, for errors."""
    owners = [op for op in existing_ops() if not set(op._delayed.values()).isdisjoint(states)]
    return ", ".join(map(_described, owners)) or "ops that no longer exist"


def amaxes_over_ranks(
    states: Mapping[DelayedScales, Group | None],
) -> dict[DelayedScales, torch.Tensor | None] | None:
    """Answer ``ParameterSource.amaxes``: the amaxes of each state, reduced over its group."""
    by_group = _by_group(states)
    if not by_group:
        return None
    amaxes: dict[DelayedScales, torch.Tensor | None] = dict.fromkeys(states)
    for group, some in by_group:
        for state in some:
            del amaxes[state]
        amaxes |= reduction_over(group).reduce(some, group)
    return amaxes


def _by_group(
    states: Mapping[DelayedScales, Group | None],
) -> list[tuple[Group, list[DelayedScales]]]:
    """The states whose amaxes are reduced, by their group of two ranks or more."""
    reduced = [state for state in states if state._recipe and state._recipe.reduce_amax]
    by_group: dict[Group, list[DelayedScales]] = {}
    for some in alike(reduced, lambda state: id(states[state])):
        try:
            group = resolved("Delayed scaling", states[some[0]])
        except StateError as error:
            raise StateError(f"{error} It reduces amaxes of {_names_of(some)}.") from None
        if dist.get_world_size(group) > 1:
            by_group.setdefault(group, []).extend(some)
    # By name: ranks that use groups in different orders would wait for each other.
    return sorted(by_group.items(), key=lambda item: item[0].group_name)


class _PlaceInList(NamedTuple):
    """The place of a state in the list."""

    recipe: DelayedScaling
    dtypes: Sequence[DType]


Flags = Callable[[], tuple[bool, bool]]
"""Reads whether some ranks, and whether all, used a state without a place."""
Used = dict[tuple[int, str], DelayedScaling]
"""The recipes of states, by the number of the op and the mode of the state."""


class _NewStates(NamedTuple):
    """What a rank tells the others before they add states to the list."""

    used: Used
    ops: list[str]
    gone: list[int]
    """The places in the list whose states no longer exist."""


class AmaxReduction:
    """The list of the states whose amaxes the ranks of one group reduce."""

    def __init__(self) -> None:
        self._places: dict[StateIdentity, _PlaceInList] = {}
        # What is sent: two flags, and the amaxes of each state, which are views of it.
        self._message = torch.empty(0, device="cpu")
        self._amaxes: dict[StateIdentity, torch.Tensor] = {}
        # The message of a rank that used no state; and of one that used one without a place.
        self._blank: tuple[torch.Tensor, ...] = ()
        self._flags: Flags | None = None
        # States without a place, of the last step, and states whose op no longer exists.
        self._late: list[DelayedScales] = []
        self._without_op: weakref.WeakSet[StateIdentity] = weakref.WeakSet()

    def reduce(
        self, states: Sequence[DelayedScales], group: Group
    ) -> list[tuple[DelayedScales, torch.Tensor]]:
        """End a step in which this rank used ``states``.

        Returns the states that have a place, with their amaxes over the ranks, -1 for a state that
        no rank used. Raises InputError on every rank, if they used different ops, and have not made
        the same ones. Raises StateError if another rank does not take part.
        """
        # A state that was replaced, by loading a checkpoint, has no later step.
        used = [s for s in dict.fromkeys((*self._late, *states)) if s._identity.state() is s]
        device = next((s.scale.device for s in states if s.scale.is_cuda), states[0].scale.device)
        flags, self._late, self._flags = self._flags, [], None
        if flags is not None and flags()[0]:
            self._add(used, device, group)
        late = self._exchange(used, device, group)
        if late and self._flags is not None and self._flags()[1]:
            self._add(used, device, group)
            late = self._exchange(used, device, group)
        self._late = late
        ended = []
        for identity, amaxes in self._amaxes.items():
            state = identity.state()
            if state is None:
                continue
            if state._recipe is None:  # it was loaded, and not used since
                state.prepare(*self._places[identity], device)
            ended.append((state, amaxes.to(state.scale.device)))
        return ended

    def _without_place(self, states: Sequence[DelayedScales]) -> list[DelayedScales]:
        """Those that are not in the list, or in it with another recipe."""
        late = []
        for state in states:
            place, recipe = self._places.get(state._identity), state._recipe
            if place is None or (place.recipe is not recipe and place.recipe != recipe):
                late.append(state)
        return [state for state in late if state._identity not in self._without_op]

    def _exchange(
        self, states: Sequence[DelayedScales], device: torch.device, group: Group
    ) -> list[DelayedScales]:
        """Reduce the amaxes of states; returns those without a place, which are not sent."""
        late = self._without_place(states)
        if self._message.device != device or not self._blank:
            self._lay_out(device)
        self._message.copy_(self._blank[bool(late)])
        sent = [s for s in states if s._identity in self._amaxes and s not in late]
        if sent:
            amaxes = [s.amax_history[0] for s in sent]
            foreach_copy_([self._amaxes[s._identity] for s in sent], amaxes)
        message = self._message
        _communicate(group, lambda: dist.all_reduce(message, dist.ReduceOp.MAX, group=group))
        self._flags = _flags_of(message)
        return late

    def _lay_out(self, device: torch.device) -> None:
        sizes = [len(place.dtypes) for place in self._places.values()]
        with torch.inference_mode(False):  # it outlives an inference region
            flags, absent = torch.eye(2, device=device), torch.full((sum(sizes),), -1.0).to(device)
            self._blank = (torch.cat([flags[1], absent]), torch.cat([flags[0], absent]))
            self._message = torch.empty_like(self._blank[0])
            parts = torch.split(self._message[2:], sizes)
        self._amaxes = dict(zip(self._places, parts, strict=True))

    def _add(self, states: Sequence[DelayedScales], device: torch.device, group: Group) -> None:
        """Add the states that any rank has used to the list, on every rank."""
        gc.collect()  # an op counts as long as it exists, which must not depend on the collector
        ops = [op for op in existing_ops() if any(map(op.num_quantizers, _MODES))]
        numbers = {
            state._identity: (number, mode)
            for number, op in enumerate(ops)
            for mode, state in op._delayed.items()
        }
        recipes: Used = {}
        for state in states:
            if state._identity not in numbers:
                self._without_op.add(state._identity)
            elif state._recipe is not None:
                recipes[numbers[state._identity]] = state._recipe
        gone = [n for n, identity in enumerate(self._places) if identity.state() is None]
        described = [_described(op) for op in ops]
        used, gone = _agreed(_NewStates(recipes, described, gone), group)
        for identity in [list(self._places)[n] for n in gone]:
            del self._places[identity]
        for (number, mode), recipe in sorted(used.items(), key=lambda item: item[0]):
            op = ops[number]
            missing, dtypes, _ = op._delayed_state(mode, recipe, device)
            if missing._recipe != recipe:
                missing.prepare(recipe, dtypes, device)
            self._places[missing._identity] = _PlaceInList(recipe, dtypes)
        self._lay_out(device)


_MODES = ("forward", "backward")
_reductions: weakref.WeakKeyDictionary[Group, AmaxReduction] = weakref.WeakKeyDictionary()


def reduction_over(group: Group) -> AmaxReduction:
    """The reduction of a group."""
    return _reductions.setdefault(group, AmaxReduction())


def _flags_of(message: torch.Tensor) -> Flags | None:
    """The flags of a reduced message; nothing waits for the device until they are read."""
    event = None
    if not message.is_cuda:
        flags = message[:2].clone()
    elif torch.cuda.is_current_stream_capturing():
        return None
    else:
        flags = torch.empty(2, dtype=torch.float32, device="cpu", pin_memory=True)
        flags.copy_(message[:2], non_blocking=True)
        event = torch.cuda.current_stream().record_event()

    def read() -> tuple[bool, bool]:
        if event is not None:
            event.synchronize()
        some, not_all = flags.tolist()
        return some == 1, not_all != 1

    return read


# -- agreement ----------------------------------------------------------------------


def _agreed(here: _NewStates, group: Group) -> tuple[Used, list[int]]:
    """The states that any rank used, and the places in the list that no rank needs.

    Raises InputError on every rank, if their ops do not tell which states are the same.
    """
    prefix = here.ops[: max((number + 1 for number, _ in here.used), default=0)]
    text = repr((sorted(here.used.items(), key=lambda item: item[0]), prefix, here.gone))
    digests = _gathered(hashlib.sha256(text.encode()).hexdigest(), group)
    if len(set(digests)) == 1:
        return here.used, here.gone
    steps = _gathered(here, group)
    gone_on_all = sorted(set.intersection(*(set(step.gone) for step in steps)))
    if len({repr(_from_the_end(step)) for step in steps}) == 1:
        return here.used, gone_on_all
    ranks = dist.get_process_group_ranks(group)
    for number, ops in enumerate(zip_longest(*(step.ops for step in steps), fillvalue="none")):
        if len(set(ops)) > 1:
            listed = ", ".join(f"{op} on rank {rank}" for rank, op in zip(ranks, ops, strict=True))
            raise InputError(
                f"Delayed scaling reduces amaxes over the ranks {ranks}, which ran different ops, "
                "and cannot tell which of them are the same, because the ranks have also made "
                f"different ops: number {number} of those that quantize is {listed}. Make the same "
                "ops in the same order on every rank, also copies of a model; or reduce over other "
                "ranks, by autocast(amax_reduction_group=...), or over none, by "
                "DelayedScaling(reduce_amax=False)."
            )
    used: Used = {}
    for step in steps:
        for (number, mode), recipe in step.used.items():
            if used.setdefault((number, mode), recipe) != recipe:
                listed = "; ".join(
                    f"rank {rank} has {other.used.get((number, mode), 'not run it')}"
                    for rank, other in zip(ranks, steps, strict=True)
                )
                raise InputError(
                    f"Delayed scaling reduces amaxes over the ranks {ranks}, which ran "
                    f"{here.ops[number]} under different recipes: {listed}."
                    " Enter autocast with one recipe on every rank."
                )
    return used, gone_on_all


def _from_the_end(step: _NewStates) -> tuple[object, ...]:
    """The ops that a rank ran, counted from the newest, and those that it made after them.

    They are equal if a rank has made further ops before the model that all ranks run.
    """
    count = len(step.ops)
    used = sorted(
        (number - count, mode, repr(recipe)) for (number, mode), recipe in step.used.items()
    )
    return used, step.ops[min((number for number, _ in step.used), default=count) :]


def _gathered(item: Result, group: Group) -> list[Result]:
    """The objects of all ranks."""
    objects: list[Result] = [item] * dist.get_world_size(group)
    _communicate(group, lambda: dist.all_gather_object(objects, item, group=group))
    return objects


def _communicate(group: Group, collective: Callable[[], object]) -> None:
    """Run a collective. Raises StateError if another rank does not take part."""
    try:
        collective()
    except RuntimeError as error:
        raise StateError(
            "Delayed scaling reduces amaxes at the end of a step over the ranks "
            f"{dist.get_process_group_ranks(group)}, and not all of them took part: {error}. On "
            "every rank of the group, each step must quantize in at least one op and end with the "
            "same number of backwards; a rank that raised an error takes no part either. "
            "DelayedScaling(reduce_amax=False) reduces nothing."
        ) from error
