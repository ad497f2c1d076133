"""What a forward runs under: the recipe in force, its region, and what parameters are made in."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from fuser.errors import InputError, InputTypeError
from fuser.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from fuser.role_quantizers import make_quantizer
from fuser.tensors import QuantizedTensor

_active_recipe: ContextVar[Recipe | None] = ContextVar("fuser_recipe", default=None)
current_recipe = _active_recipe.get
"""The recipe of the innermost :class:`autocast`, or None outside one."""


# -- regions ------------------------------------------------------------------


class Region:
    """An outermost autocast, from its entry to its exit: one step of delayed scaling's forward.

    ``recorded`` are the states (delayed_scaling.py) that recorded amaxes in it,
    each with the group that these are reduced over. ``past_scales`` are the
    scales that it ran with, of states that have others now.
    """

    def __init__(self) -> None:
        self.recorded: dict[Any, Any] = {}
        self.past_scales: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()

    def end(self) -> None:
        """End the step of every state that recorded amaxes."""
        recorded, self.recorded = self.recorded, {}
        if recorded:
            next(iter(recorded)).end_step(recorded)


@dataclass(frozen=True, eq=False)
class _Scope:
    """One entered autocast, inside another or the outermost."""

    group: Any
    region: Region
    outer: _Scope | None
    outer_recipe: Recipe | None


_scope: ContextVar[_Scope | None] = ContextVar("fuser_scope", default=None)
_is_used = False


def is_autocast_used() -> bool:
    """Whether this process has ever entered one; until then nobody need look for quantized data."""
    return _is_used


class autocast(contextlib.ContextDecorator):
    """Run pipelines quantized under ``recipe``: a context, or a decorator; nests and re-enters.

    Parameters
    ----------
    enabled
        Off where False, also inside another autocast.
    calibrating
        Accepted for compatibility.
    recipe
        ``DelayedScaling()`` if None.
    amax_reduction_group
        The ranks over which delayed scaling takes the maximum of its amaxes,
        once a step; None for all of them. Every rank of it must train then.

    Raises
    ------
    InputTypeError
        If ``recipe`` is none.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any | None = None,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise InputTypeError(
                f"autocast got the recipe {recipe!r}; it takes one of fuser.recipe's classes, "
                "such as MXFP8BlockScaling()."
            )
        self.calibrating = calibrating
        self.amax_reduction_group = amax_reduction_group
        self.recipe = (recipe or DelayedScaling()) if enabled else None

    def __enter__(self) -> None:
        global _is_used
        _is_used = True
        outer = _scope.get()
        region = Region() if outer is None else outer.region
        _scope.set(_Scope(self.amax_reduction_group, region, outer, current_recipe()))
        _active_recipe.set(self.recipe)

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        scope = _scope.get()
        assert scope is not None
        _scope.set(scope.outer)
        _active_recipe.set(scope.outer_recipe)
        if scope.outer is None and exc_type is None:
            scope.region.end()


# -- recomputation ------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """What a forward ran under, for whoever runs it again or ends its step.

    The recipe, the region, None outside every autocast, and the group over
    which amaxes are reduced; the ops of the pipeline that ran; and whether an
    autocast inside another was in force, so that others may have run under that.
    """

    recipe: Recipe | None = None
    region: Region | None = None
    group: Any = None
    ops: Any = None
    is_nested: bool = False


def current_conditions(ops: Any) -> Conditions:
    """What a forward of ``ops`` runs under at this moment."""
    scope = _scope.get()
    is_nested = scope is not None and scope.outer is not None
    return Conditions(current_recipe(), current_region(), current_group(), ops, is_nested)


_recomputed: ContextVar[Conditions | None] = ContextVar("fuser_recomputed", default=None)
recomputed_conditions = _recomputed.get
"""The conditions of the forward that is being recomputed; None where none is."""


@contextlib.contextmanager
def recomputing_under(conditions: Conditions) -> Iterator[None]:
    """Run a forward again, in a backward, under the conditions of the first time."""
    recipe, recomputed = _active_recipe.get(), _recomputed.get()
    _active_recipe.set(conditions.recipe)
    _recomputed.set(conditions)
    try:
        yield
    finally:
        _active_recipe.set(recipe)
        _recomputed.set(recomputed)


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_in_autocast() -> bool:
    """Whether an autocast is entered, be it a disabled one."""
    return _scope.get() is not None


def current_region() -> Region | None:
    """The region of the forward that runs, or is recomputed; None outside every autocast."""
    scope, conditions = _scope.get(), _recomputed.get()
    if conditions is not None:
        return conditions.region
    return None if scope is None else scope.region


def current_group() -> Any | None:
    """The group over which amaxes are reduced here."""
    scope, conditions = _scope.get(), _recomputed.get()
    if conditions is not None:
        return conditions.group
    return None if scope is None else scope.group


# -- parameters ---------------------------------------------------------------


@dataclass(frozen=True)
class ParameterInit:
    """What parameters made under :class:`quantized_model_init` become."""

    recipe: Recipe
    preserve_high_precision_init_val: bool


_parameter_init: ContextVar[ParameterInit | None] = ContextVar("fuser_init", default=None)
current_parameter_init = _parameter_init.get
"""What :func:`quantized_model_init` makes of parameters here; None outside one."""


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Make the weights of linears in the format of ``recipe``; their only copy is quantized.

    Parameters
    ----------
    enabled
        Off where False, also inside another region.
    recipe
        ``Float8CurrentScaling()`` if None. Delayed scaling has no scale for a
        weight before its first step, and is refused. Under a
        ``backward_override`` weights have their rowwise copy alone, which is
        all that such a backward reads; a later backward without the override
        quantizes the other copy from the weight's values at every step.
    preserve_high_precision_init_val
        Keep the initial values on the CPU, for an optimizer's master weights:
        ``weight.get_high_precision_init_val()`` gives them, and
        ``weight.clear_high_precision_init_val()`` frees them.

    Raises
    ------
    InputError
        If ``recipe`` is DelayedScaling.
    """
    recipe = recipe or Float8CurrentScaling()
    if enabled and isinstance(recipe, DelayedScaling):
        raise InputError(
            "quantized_model_init got DelayedScaling, which has no scale for a weight before its "
            "first step; use Float8CurrentScaling or a block-scaled recipe."
        )
    chosen = ParameterInit(recipe, preserve_high_precision_init_val) if enabled else None
    token = _parameter_init.set(chosen)
    try:
        yield
    finally:
        _parameter_init.reset(token)


def initialised_weight(
    weight: torch.nn.Parameter, init: ParameterInit | None
) -> torch.nn.Parameter:
    """``weight``, or its quantized stand-in for a linear that was made under ``init``."""
    if init is None:
        return weight
    quantizer = make_quantizer(init.recipe, "weight")
    # Under an override nothing reads the columnwise copy. Without one, it is made here: not every
    # format can make it from the other.
    quantizer = quantizer.with_usage(rowwise=True, columnwise=init.recipe.quantizes_backward)
    quantized = quantizer(weight.detach())
    parameter = torch.nn.Parameter(quantized, requires_grad=weight.requires_grad)
    if init.preserve_high_precision_init_val:
        assert isinstance(parameter, QuantizedTensor)
        parameter.set_high_precision_init_val(weight.detach().cpu().clone())
    return parameter
