"""Contexts: autocast with its recipe and amax steps, and quantized_model_init."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from fuser.communication import Group, GroupArgument, resolved
from fuser.errors import InputTypeError, refuse_unknown
from fuser.recipe import DelayedScaling, Recipe
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.observation import Steps, observing
from fuser.torch_private import call_while_tracing, graph_break, traced_graph, traced_subject

Function = TypeVar("Function", bound=Callable[..., Any])


def default_recipe() -> Recipe:
    """The recipe of :class:`autocast` and :func:`quantized_model_init` if none is given.

    It is ``DelayedScaling()`` on every device, so that a script computes the
    same results on all of them.
    """
    return DelayedScaling()


_active_recipe: ContextVar[Recipe | None] = ContextVar("fuser_recipe", default=None)
current_recipe = _active_recipe.get
"""The recipe of the innermost :class:`autocast`, or None outside one."""


# -- torch.compile --------------------------------------------------------------

# Dynamo cannot read a ContextVar, so it guards on this: the key of the recipe that was set last, by
# whichever thread that is in an autocast.
_recipe_key = ""
_is_entered = False
"""Whether a thread is in an autocast, also in one that turns quantization off."""
_keys_of_threads: dict[int, str] = {}
INSIDE = "inside "
"""The beginning of the key of a recipe that was entered in a graph, whatever its callers use."""
AROUND = "around "
"""That of one that an autocast around the graph gives to code with a recipe of its own."""


class EnteredInGraph:
    """The autocasts that traced code is in; Dynamo does not see it.

    A checkpoint in a graph takes no write of traced code into anything outside of it.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        """Those of their recipes, the innermost last."""
        self._called: set[int] = set()

    def are_called_again(self, ops: Iterable[object]) -> bool:
        """Whether one of ``ops`` has been called in the outermost of them; notes that all are.

        The step of delayed scaling of an autocast that a graph enters ends with each op.
        """
        called = set(map(id, ops))
        is_again = not called.isdisjoint(self._called)
        self._called |= called
        return is_again

    def enter(self, key: str) -> None:
        if not self.keys:
            self._called = set()
        self.keys.append(INSIDE + key)


_entered_in_graphs: weakref.WeakKeyDictionary[Any, EnteredInGraph] = weakref.WeakKeyDictionary()


def entered_in(context: Any) -> EnteredInGraph:
    """The autocasts that the code is in which Dynamo traces."""
    return _entered_in_graphs.setdefault(traced_graph(context), EnteredInGraph())


def _enter_traced(context: Any) -> None:
    entered_in(context).enter(traced_subject(context))


def _enter_default_traced(context: Any) -> None:
    entered = entered_in(context)
    key = traced_subject(context)
    if entered.keys or key == AROUND:
        entered.keys.append(entered.keys[-1] if entered.keys else AROUND)
    else:
        entered.enter(key)


def _exit_traced(context: Any) -> None:
    entered_in(context).keys.pop()


def recipe_key_here() -> str:
    """For traced code outside of the autocasts that it enters: the key of the recipe in effect.

    Empty without one.
    """
    return _recipe_key


def use_autocast() -> None:
    """Note that data may be quantized in this process."""
    global is_autocast_used
    is_autocast_used = True


# -- steps --------------------------------------------------------------------

# One scale for each tensor that the state quantizes.
PastScales = dict[Recipe | None, tuple[torch.Tensor, ...]]


class AmaxStep:
    """One step of delayed scaling's forward, inside an outermost autocast.

    It begins with the autocast, or after the previous step. It ends with the
    autocast or with a backward through one of its pipelines, whichever comes
    first. ``recorded`` are the states (precision/delayed_scaling.py) that recorded
    amaxes in it, each with the process group over which they are reduced.
    ``past_scales`` are the scales of the step, by recipe, for states whose scales
    have changed since; they are kept only if ``may_be_recomputed``, which means
    that a checkpointed function ran in the step.
    """

    def __init__(self) -> None:
        self.recorded: dict[Any, Any] = {}
        self.past_scales: weakref.WeakKeyDictionary[Any, PastScales] = weakref.WeakKeyDictionary()
        self.may_be_recomputed = False
        self.is_over = False

    def take(self) -> dict[Any, Any]:
        """End this step: return and clear its states. Later forwards belong to another step."""
        self.is_over = True
        recorded, self.recorded = self.recorded, {}
        return recorded

    def end(self) -> None:
        """End the step of every state that recorded amaxes."""
        recorded = self.take()
        if recorded:
            next(iter(recorded)).end_step(recorded)


class _Regions:
    """The steps of an outermost autocast and of all autocasts inside it, one after another."""

    last: AmaxStep | None = None  # None before the first forward

    def current(self) -> AmaxStep:
        if self.last is None or self.last.is_over:
            self.last = AmaxStep()
        return self.last


@dataclass(frozen=True, eq=False)
class _AutocastFrame:
    """One entered autocast."""

    owner: autocast
    recipe: Recipe | None
    group: Group | None
    regions: _Regions
    outer_recipe: Recipe | None


_scopes: ContextVar[tuple[_AutocastFrame, ...]] = ContextVar("fuser_scopes", default=())
"""The autocasts entered in this thread or task, the innermost last."""

is_autocast_used = False
"""Whether this process has ever entered an autocast; before, no data can be quantized."""


class autocast(contextlib.ContextDecorator):
    """Run pipelines quantized under ``recipe``: a context manager or decorator; nests, re-enters.

    It is in effect for the thread, or asyncio task, that entered it. A new thread
    starts without one, so the replicas of ``torch.nn.DataParallel`` run
    unquantized unless the module itself enters it. A backward needs no autocast.
    A recomputation of :func:`torch.utils.checkpoint.checkpoint` runs as the first
    run did; for a recomputation by other means, enter autocast inside the
    recomputed function.

    Under :class:`~fuser.recipe.DelayedScaling` the scales of the forward are
    updated when the outermost autocast ends, and at the end of a backward
    through its pipelines. So an autocast around every step and one around the
    whole training loop give the same numbers.

    Parameters
    ----------
    enabled
        False turns quantization off, also inside another autocast.
    calibrating
        Accepted for compatibility; has no effect.
    recipe
        None is ``DelayedScaling()``, in FP8, as in Transformer Engine, and not "no quantization":
        for that, ``autocast(enabled=recipe is not None, recipe=recipe)``.
    amax_reduction_group
        The ranks over which delayed scaling takes the maximum of its amaxes, once a
        step: a process group, or a device mesh of one dimension; None for all ranks.
        Every rank of the group must then train the same model, and enter autocast at the
        same places: each step quantizes in at least one op on every rank, and ends with
        as many backwards. Ops may differ,
        such as experts without tokens, if all ranks have made the same ops in the
        same order; the amaxes of an op are those of the ranks that ran it.

    Raises
    ------
    InputTypeError
        If ``enabled`` is not a bool, or ``recipe`` not a recipe, or there is any other argument,
        or if a generator or a coroutine is decorated, because its body runs after its call.
    InputError
        If ``amax_reduction_group`` is no process group, or this rank is not in it. On
        every rank, at the end of a step, if ranks ran different ops and have not made
        the same ones.
    StateError
        If ``amax_reduction_group`` has been destroyed. At the end of a step, if not all
        ranks take part in the reduction.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: GroupArgument = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            refuse_unknown("autocast", autocast.__init__, unknown)
        _check_arguments("autocast", enabled, recipe)
        self.calibrating = calibrating
        if amax_reduction_group is not None:
            amax_reduction_group = resolved("autocast", amax_reduction_group)
        self.amax_reduction_group = amax_reduction_group
        self.recipe = (recipe or default_recipe()) if enabled else None
        self._key = "" if self.recipe is None else self.recipe._key

    def __call__(self, func: Function) -> Function:
        """``func``, with every call run in this context."""
        is_generator = inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func)
        if is_generator or inspect.iscoroutinefunction(func):
            raise InputTypeError(
                f"autocast cannot decorate {func.__qualname__}, a generator or coroutine, which "
                "runs after its call has returned. Enter autocast in its body."
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        global is_autocast_used, _is_entered, _recipe_key
        if is_dynamo_compiling():
            if self.amax_reduction_group is not None:
                graph_break(
                    "autocast with an amax_reduction_group is entered in a graph: enter it around "
                    "the compiled function."
                )
            call_while_tracing(_enter_traced, self._key)
            return
        is_autocast_used = _is_entered = True
        _keys_of_threads.pop(get_ident(), None)
        _keys_of_threads[get_ident()] = _recipe_key = self._key  # the last
        scopes = _scopes.get()
        regions = scopes[-1].regions if scopes else _Regions()
        scope = _AutocastFrame(
            self, self.recipe, self.amax_reduction_group, regions, outer_recipe=current_recipe()
        )
        _scopes.set((*scopes, scope))
        _active_recipe.set(self.recipe)

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        global _is_entered, _recipe_key
        if is_dynamo_compiling():
            call_while_tracing(_exit_traced, self._key)
            return
        scopes = _scopes.get()
        place = len(scopes) - 1
        while place >= 0 and scopes[place].owner is not self:
            place -= 1
        if place < 0:
            return  # entered in another thread: a generator was finalized in this one
        scope, inner = scopes[place], scopes[place + 1 :]
        if inner:
            # A generator leaves its autocast before autocasts that were entered after it.
            inner = (replace(inner[0], outer_recipe=scope.outer_recipe), *inner[1:])
        else:
            _active_recipe.set(scope.outer_recipe)
        left = (*scopes[:place], *inner)
        _scopes.set(left)
        active = current_recipe()
        _keys_of_threads.pop(get_ident(), None)
        if left:
            _keys_of_threads[get_ident()] = "" if active is None else active._key
        _recipe_key = next(reversed(_keys_of_threads.values()), "")
        _is_entered = bool(_keys_of_threads)
        if not left and exc_type is None and scope.regions.last is not None:
            scope.regions.last.end()


class default_autocast(autocast):
    """An autocast to be entered unless :func:`is_autocast_entered`.

    Traced code always enters it: another one that its graph has entered, or that a thread is in
    around the graph, stays in effect.
    """

    def __enter__(self) -> None:
        if is_dynamo_compiling():
            call_while_tracing(_enter_default_traced, AROUND if _is_entered else self._key)
            return
        super().__enter__()


def is_autocast_entered() -> bool:
    """Whether this code is in an autocast, or recomputes a forward under what that had.

    Never in traced code, which runs later, in any thread.
    """
    if is_dynamo_compiling():
        return False
    return bool(_scopes.get()) or recomputed_state() is not None


def _check_arguments(name: str, enabled: object, recipe: object) -> None:
    if enabled not in (True, False):
        raise InputTypeError(
            f"{name} got enabled={enabled!r}, its first argument, which is True or False. Give a "
            f"recipe by its name: {name}(recipe=...); a decorator is written with brackets."
        )
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputTypeError(
            f"{name} got the recipe {recipe!r}; it takes one of fuser.recipe's classes, "
            "such as MXFP8BlockScaling()."
        )


# -- recomputation ------------------------------------------------------------


class AutocastState(NamedTuple):
    """The precision settings of a forward, for code that runs it again or ends its step.

    The recipe; the amax step, None outside every autocast; the process group
    over which amaxes are reduced; and the inspectors that observe the forward, if any.
    """

    recipe: Recipe | None = None
    region: AmaxStep | None = None
    group: Any = None
    inspected: Steps | None = None


UNQUANTIZED = AutocastState()
"""The settings of a forward outside every autocast."""


def current_state() -> AutocastState:
    """The settings of a forward that runs now."""
    again = _recomputed.get()
    if again is not None:
        return again
    scopes = _scopes.get()
    if not scopes:
        return UNQUANTIZED
    scope = scopes[-1]
    region = scope.regions.current()
    return AutocastState(scope.recipe, region, scope.group, observing.steps)


_recomputed: ContextVar[AutocastState | None] = ContextVar("fuser_recomputed", default=None)
recomputed_state = _recomputed.get
"""The settings of the forward that is being recomputed; None if there is none."""


@contextlib.contextmanager
def recomputing_under(conditions: AutocastState) -> Iterator[None]:
    """Run a forward again, in a backward, with the settings of its first run."""
    recipe, recomputed = _active_recipe.get(), _recomputed.get()
    seen = observing.steps, observing.is_repeated
    _active_recipe.set(conditions.recipe)
    _recomputed.set(conditions)
    observing.steps, observing.is_repeated = conditions.inspected, True
    try:
        yield
    finally:
        _active_recipe.set(recipe)
        _recomputed.set(recomputed)
        observing.steps, observing.is_repeated = seen


# -- parameters ---------------------------------------------------------------


@dataclass(frozen=True)
class ParameterInit:
    """The options of :class:`quantized_model_init` for new parameters."""

    recipe: Recipe
    preserve_high_precision_init_val: bool


_parameter_init: ContextVar[ParameterInit | None] = ContextVar("fuser_init", default=None)
current_parameter_init = _parameter_init.get
"""The options in effect for new parameters here; None outside every context."""


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
    **unknown: NoReturn,
) -> Iterator[None]:
    """Make the weights of linears in the format of ``recipe``; there is no unquantized copy.

    Parameters
    ----------
    enabled
        False turns it off, also inside another such context.
    recipe
        :func:`default_recipe` if None.

        Under :class:`~fuser.recipe.DelayedScaling` the initial weights are quantized
        with scale 1, which leaves few bits or none for small weights. A write to the
        weights, such as an optimizer's, is quantized with the scale from earlier
        weights, and records its amax for the next step. If values of the write are
        too large for that scale, the write uses the scale of its own amax. A weight that
        is loaded quantized keeps its scale: writes before the next forward use it, and
        later ones too as long as no amax of the weight has been recorded or loaded.

        Under a ``backward_override`` weights have the rowwise usage alone, because
        such a backward reads no other. A later backward without the override
        quantizes the columnwise data from the weight's values at every step.
    preserve_high_precision_init_val
        Keep the initial values on the CPU, for an optimizer's master weights:
        ``weight.get_high_precision_init_val()`` returns them, and
        ``weight.clear_high_precision_init_val()`` frees them.

    Raises
    ------
    InputTypeError
        If ``enabled`` is not a bool, or ``recipe`` not a recipe, or there is any other argument.
    """
    if unknown:
        refuse_unknown("quantized_model_init", quantized_model_init, unknown)
    _check_arguments("quantized_model_init", enabled, recipe)
    recipe = recipe or default_recipe()
    chosen = ParameterInit(recipe, preserve_high_precision_init_val) if enabled else None
    token = _parameter_init.set(chosen)
    try:
        yield
    finally:
        _parameter_init.reset(token)


def weight_quantizer(init: ParameterInit, quantizer: Quantizer) -> Quantizer:
    """``quantizer`` with the usages that a weight made under ``init`` has."""
    # Under an override no product is columnwise. Without one its data is made here, because
    # not every format can make it from rowwise data.
    return quantizer.with_usage(rowwise=True, columnwise=init.recipe.quantizes_backward)


def initialised_weight(
    weight: torch.nn.Parameter, init: ParameterInit, quantizer: Quantizer
) -> torch.nn.Parameter:
    """The parameter for ``weight`` of a linear made under ``init``, quantized by ``quantizer``."""
    quantizer = weight_quantizer(init, quantizer)
    quantized = quantizer(weight.detach())
    # For delayed scaling, a quantizer that records the amax of writes.
    quantized._quantizer = quantizer
    parameter = torch.nn.Parameter(quantized, requires_grad=weight.requires_grad)
    if init.preserve_high_precision_init_val:
        assert isinstance(parameter, QuantizedTensor)
        parameter.set_high_precision_init_val(weight.detach().cpu().clone())
    return parameter
