"""Recomputations by torch's activation checkpointing, and the conditions of what they repeat.

A pipeline called in a checkpointed function notes down what it ran under, with the checkpoint. When
the checkpoint calls the function again, each call of a pipeline is given the conditions of the call
that it repeats. Anything else that runs in a backward, such as a hook, is a forward like any other.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.utils import checkpoint

from fuser.precision.contexts import UNQUANTIZED, AutocastState, current_state

_autograd = torch._C._autograd
_top_hooks = _autograd._top_saved_tensors_default_hooks
_graph_task = torch._C._current_graph_task_id
_is_forward_ad_enabled = torch._C._is_fwd_grad_enabled

Ops = tuple[Any, ...]


class _Calls:
    """The calls of pipelines in one run of a checkpointed function, and how many were repeated."""

    def __init__(self, outer: tuple[_Calls, ...]) -> None:
        self.outer = outer
        """Those of the checkpoints around this one."""
        # By op and not by pipeline: hooks that come or go after the forward regroup the ops. An op
        # is known by its attributes, which it shares with its twin that runs when it is called.
        self._conditions: dict[int, list[AutocastState]] = {}
        self._repeated: dict[Any, dict[int, int]] = {}
        self._ops: dict[int, Any] = {}

    def note(self, ops: Ops, conditions: AutocastState) -> None:
        for op in ops:
            self._ops[id(op.__dict__)] = op  # kept, so that no other op gets the number
            self._conditions.setdefault(id(op.__dict__), []).append(conditions)

    def next(self, ops: Ops, recomputation: Any) -> AutocastState | None:
        """The conditions of the call that this one repeats; None where the forward had no such.

        ``recomputation`` names the one that runs: a graph that is retained has several.
        """
        repeated = self._repeated.setdefault(recomputation, {})
        found = None
        for op in reversed(ops):
            key = id(op.__dict__)
            index = repeated[key] = repeated.get(key, -1) + 1
            conditions = self._conditions.get(key, ())
            found = conditions[index] if index < len(conditions) else found
        return found


# By what torch holds as long as a recomputation may come: the frame of a checkpoint, or the node
# of a reentrant one.
_calls: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()


def state_of_forward(ops: Ops) -> AutocastState | None:
    """In a recomputation: what the call of ``ops`` that this one repeats ran under; else None.

    A call in a checkpointed function is noted down, for its own recomputation.
    """
    hooks = _top_hooks(True)
    if hooks is None and _graph_task() == -1 and not _may_be_in_function():
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


def is_checkpointed_forward() -> bool:
    """Whether a reentrant checkpoint runs its forward, without gradients, and a backward follows.

    Nothing else tells such a forward from evaluation.
    """
    return _may_be_in_function() and bool(_surroundings(None)[1])


def _may_be_in_function() -> bool:
    """Whether the forward of an autograd function may run: torch turns forward-mode AD off there.

    It does so in inference mode too, which no backward follows.
    """
    return not _is_forward_ad_enabled() and not torch.is_inference_mode_enabled()


# -- what torch's checkpoints are known by ----------------------------------------------


def _inner_code(function: Any, name: str) -> CodeType:
    """The code of the function of that name inside ``function``."""
    constants = function.__code__.co_consts
    return next(c for c in constants if isinstance(c, CodeType) and c.co_name == name)


class _Codes:
    """The code objects of torch's checkpoints that are looked for.

    Raises
    ------
    AttributeError, StopIteration, ValueError
        If this torch has a checkpoint that is written otherwise.
    """

    def __init__(self) -> None:
        hook, rehook = checkpoint._checkpoint_hook, checkpoint._recomputation_hook
        self.pack = _inner_code(hook.__init__, "pack_hook")
        self.unpack = _inner_code(hook.__init__, "unpack_hook")
        self.frame_cell = self.pack.co_freevars.index("frame")
        self.recomputing_unpack = _inner_code(rehook.__init__, "unpack_hook")
        self.reentrant_forward = checkpoint.CheckpointFunction.forward.__code__
        self.reentrant_backward = checkpoint.CheckpointFunction.backward.__code__
        self.engine = torch.autograd.graph._engine_run_backward.__code__
        for code, names in (
            (self.unpack, ("frame", "gid")),
            (self.reentrant_forward, ("ctx",)),
            (self.reentrant_backward, ("ctx",)),
        ):
            for name in names:
                (code.co_varnames + code.co_cellvars + code.co_freevars).index(name)


@functools.cache
def _known_codes() -> _Codes | None:
    """Those of this torch; None, and a warning, where it has others."""
    try:
        return _Codes()
    except (AttributeError, StopIteration, ValueError) as error:
        warnings.warn(
            f"fuser does not know the activation checkpointing of torch {torch.__version__} "
            f"({error!r}): what it recomputes runs under no recipe, unless fuser.autocast is "
            "entered inside the checkpointed function.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _surroundings(
    hooks: tuple[Any, Any] | None,
) -> tuple[Callable[[Ops], AutocastState | None] | None, list[_Calls]]:
    """What the running code repeats, None if nothing, and the checkpoints whose forward it is in.

    The nearest recomputation counts, and checkpoints inside it. A backward that
    runs inside either is neither: what it calls, it calls itself.
    """
    codes = _known_codes()
    if codes is None:
        return None, []
    repeats: Callable[[Ops], AutocastState | None] | None = None
    checkpoints: list[_Calls] = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not codes.engine:
        code = frame.f_code
        if code is codes.unpack:
            found = frame.f_locals
            repeats = _repetition(found["frame"], found["gid"])
            break
        if code is codes.reentrant_backward:
            repeats = _repetition(frame.f_locals["ctx"], _graph_task())
            break
        if code is codes.reentrant_forward:
            node = frame.f_locals["ctx"]
            if node.next_functions:  # gradients were on: a backward may come
                checkpoints.append(_calls_of(node))
        frame = frame.f_back  # type: ignore[assignment]
    checkpoints += _open_checkpoints(hooks, codes)
    return repeats, checkpoints


def _repetition(key: Any, recomputation: Any) -> Callable[[Ops], AutocastState | None]:
    calls = _calls.get(key)
    if calls is None:
        # Nothing was noted: no autocast had been entered then.
        return lambda ops: UNQUANTIZED
    return lambda ops: calls.next(ops, recomputation)


def _calls_of(key: Any, outer: tuple[_Calls, ...] = ()) -> _Calls:
    return _calls.get(key) or _calls.setdefault(key, _Calls(outer))


def _open_checkpoints(hooks: tuple[Any, Any] | None, codes: _Codes) -> tuple[_Calls, ...]:
    """The checkpoints, not reentrant ones, whose function runs here for the first time."""
    if hooks is None:
        return ()
    frame = _frame_of(hooks, codes)
    known = None if frame is None else _calls.get(frame)
    if known is not None:
        return known, *known.outer
    frames = []
    for installed in _installed_hooks(hooks):
        if getattr(installed[1], "__code__", None) is codes.recomputing_unpack:
            break
        frame = _frame_of(installed, codes)
        if frame is not None:
            frames.append(frame)
    found: tuple[_Calls, ...] = ()
    for frame in reversed(frames):
        found = (_calls_of(frame, found), *found)
    return found


def _frame_of(hooks: tuple[Any, Any], codes: _Codes) -> Any:
    """The frame of the checkpoint that has installed ``hooks``; None if nobody such has."""
    pack = hooks[0]
    if getattr(pack, "__code__", None) is not codes.pack:
        return None
    return pack.__closure__[codes.frame_cell].cell_contents


def _installed_hooks(top: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    """The hooks for saved tensors that are installed here, the innermost first.

    Torch shows the innermost alone, so they are taken off and put back.
    """
    if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return [top]  # none could be put back
    found: list[tuple[Any, Any]] = []
    try:
        while (hooks := _top_hooks(True)) is not None:
            found.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()
    finally:
        for pack, unpack in reversed(found):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found
