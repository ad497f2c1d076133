"""Recomputation by torch's activation checkpointing, under the autocast state of its forward.

A pipeline that is called in a checkpointed function stores its autocast state with the checkpoint.
When the checkpoint runs the function again, each call of a pipeline receives the state of the call
that it repeats. Other code that runs in a backward, such as a hook, is treated as a forward.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import FuserWarning
from fuser.precision.contexts import UNQUANTIZED, AutocastState, current_state, is_autocast_entered
from fuser.recipe import Recipe
from fuser.torch_private import (
    CheckpointCode,
    Hooks,
    all_saved_tensor_hooks,
    graph_task,
    is_forward_ad_enabled,
    saved_tensor_hooks,
    users_level,
)

Ops = tuple[Any, ...]


class _Calls:
    """The calls of pipelines in one run of a checkpointed function, and how many were repeated."""

    def __init__(self, outer: tuple[_Calls, ...]) -> None:
        self.outer = outer
        """The calls of the checkpoints around this one."""
        # Keyed by op and not by pipeline: hooks that are added or removed after the forward regroup
        # the ops. The key is the op's attribute dict, shared with the implementation that runs.
        self._conditions: dict[int, list[AutocastState]] = {}
        self._repeated: dict[object, dict[int, int]] = {}
        self._ops: dict[int, Any] = {}

    def note(self, ops: Ops, conditions: AutocastState) -> None:
        for op in ops:
            self._ops[id(op.__dict__)] = op  # kept alive, so that no other op gets its id
            self._conditions.setdefault(id(op.__dict__), []).append(conditions)

    def next(self, ops: Ops, recomputation: object) -> AutocastState | None:
        """The state of the call that this one repeats; None if the forward had no such call.

        ``recomputation`` identifies the running recomputation: a retained graph has several.
        """
        repeated = self._repeated.setdefault(recomputation, {})
        call_conditions = None
        for op in reversed(ops):
            key = id(op.__dict__)
            index = repeated[key] = repeated.get(key, -1) + 1
            conditions = self._conditions.get(key, ())
            call_conditions = conditions[index] if index < len(conditions) else call_conditions
        return call_conditions


# Keyed by the object that torch keeps while a recomputation is possible: the frame of a checkpoint,
# or the node of a reentrant one.
_calls: weakref.WeakKeyDictionary[object, _Calls] = weakref.WeakKeyDictionary()


def state_of_forward(ops: Ops) -> AutocastState | None:
    """In a recomputation: the state of the call of ``ops`` that this one repeats; else None.

    The state of a call in a checkpointed function is stored for its recomputation.
    """
    hooks = saved_tensor_hooks(True)
    if hooks is None and graph_task() == -1 and not may_be_in_function():
        return None
    repeats, checkpoints = _surroundings(hooks)
    conditions = None if repeats is None else repeats(ops)
    if checkpoints:
        noted = current_state() if conditions is None else conditions
        if noted.region is not None:
            noted.region.may_be_recomputed = True
        for calls in checkpoints:
            calls.note(ops, noted)
    return conditions


def may_be_checkpointed(*, is_grad_enabled: bool) -> bool:
    """Whether a checkpoint may run the code here, now or again; false is found in few calls."""
    if graph_task() != -1 or saved_tensor_hooks(True) is not None:
        return True
    return not is_grad_enabled and may_be_in_function()  # a reentrant one runs without gradients


def is_checkpointed_forward() -> bool:
    """Whether a reentrant checkpoint is running its forward, without gradients, before a backward.

    Nothing else distinguishes such a forward from evaluation.
    """
    return may_be_in_function() and bool(_surroundings(None)[1])


def is_recomputation() -> bool:
    """Whether torch runs a checkpointed function again here."""
    if saved_tensor_hooks(True) is None and graph_task() == -1 and not may_be_in_function():
        return False
    codes = _known_codes()
    return codes is not None and codes.running()[0] is not None


def is_in_checkpoint() -> bool:
    """Whether a checkpoint of torch keeps, or discards, what is saved for a backward now."""
    hooks = saved_tensor_hooks(True)
    codes = None if hooks is None else _known_codes()
    if hooks is None or codes is None:
        return False
    return codes.frame_of(hooks) is not None or codes.are_of_recomputation(hooks)


def warn_if_unquantized_in_backward(before: Recipe, ops: Sequence[object]) -> None:
    """Warn, once in a process, of a call in a backward without the recipe of the last forward.

    A recomputation that a program writes by hand, as Megatron-LM's, is no checkpoint of torch: it
    has the recipe that is in effect where it runs.
    """
    global _has_warned
    if _has_warned or graph_task() == -1 or is_autocast_entered():
        return
    names = ", ".join(type(op).__name__ for op in ops)
    warnings.warn(
        f"A pipeline of {names} runs in a backward, without a recipe, and its last forward had "
        f"{type(before).__name__}: a recomputation of that forward would have other numbers. Enter "
        "fuser.autocast inside of the function that is computed again, or use fuser.checkpoint.",
        FuserWarning,
        stacklevel=users_level(),
    )
    _has_warned = True


_has_warned = False


def may_be_in_function() -> bool:
    """Whether the forward of an autograd function may be running.

    torch turns forward-mode AD off there; also in inference mode, which no backward follows.
    """
    return not is_forward_ad_enabled() and not torch.is_inference_mode_enabled()


# -- detection of torch's checkpoints ---------------------------------------------------


@functools.cache
def _known_codes() -> CheckpointCode | None:
    """The code objects of this torch; None, and a warning, if they are not known."""
    try:
        return CheckpointCode()
    except (AttributeError, StopIteration, ValueError) as error:
        warnings.warn(
            f"fuser does not know the activation checkpointing of torch {torch.__version__} "
            f"({error!r}): recomputed pipelines run without a recipe, unless fuser.autocast is "
            "entered inside the checkpointed function.",
            FuserWarning,
            stacklevel=2,
        )
        return None


def _surroundings(
    hooks: Hooks | None,
) -> tuple[Callable[[Ops], AutocastState | None] | None, list[_Calls]]:
    """The run that the current code repeats, None if none, and the checkpoints around it.

    Only the nearest recomputation counts, with the checkpoints inside it. Code in a
    backward that runs inside a recomputation or a checkpoint belongs to neither.
    """
    codes = _known_codes()
    if codes is None:
        return None, []
    recomputation, nodes = codes.running()
    # If gradients were on, a backward may come.
    checkpoints = [_calls_of(node) for node in nodes if node.next_functions]
    checkpoints += _open_checkpoints(hooks, codes)
    return None if recomputation is None else _repetition(*recomputation), checkpoints


def _repetition(key: object, recomputation: object) -> Callable[[Ops], AutocastState | None]:
    calls = _calls.get(key)
    if calls is None:
        # Nothing was stored: no autocast had been entered then.
        return lambda ops: UNQUANTIZED
    return lambda ops: calls.next(ops, recomputation)


def _calls_of(key: object, outer: tuple[_Calls, ...] = ()) -> _Calls:
    return _calls.get(key) or _calls.setdefault(key, _Calls(outer))


def _open_checkpoints(hooks: Hooks | None, codes: CheckpointCode) -> tuple[_Calls, ...]:
    """The non-reentrant checkpoints whose function runs here for the first time."""
    if hooks is None:
        return ()
    frame = codes.frame_of(hooks)
    known = None if frame is None else _calls.get(frame)
    if known is not None:
        return known, *known.outer
    frames = []
    for installed in all_saved_tensor_hooks(hooks):
        if codes.are_of_recomputation(installed):
            break
        frame = codes.frame_of(installed)
        if frame is not None:
            frames.append(frame)
    checkpoints: tuple[_Calls, ...] = ()
    for frame in reversed(frames):
        checkpoints = (_calls_of(frame, checkpoints), *checkpoints)
    return checkpoints
