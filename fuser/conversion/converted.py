"""The class of a converted module: its own as a base, and a forward that runs a pipeline."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuser.conversion.modules import child_of, joint, original_class, prefixes
from fuser.conversion.parts import LinearPart
from fuser.conversion.unit import Runner, Unit
from fuser.errors import FuserWarning
from fuser.op import BasicOperation, FusedOperation
from fuser.precision.contexts import current_recipe, default_autocast, is_autocast_entered
from fuser.recipe import Recipe
from fuser.runtime.joined_weights import join
from fuser.torch_private import call_while_tracing, call_with_writes, traced_subject, users_level

RECIPE, RUNNER = "_fuser_recipe", "_fuser_runner"
UNIT, SCALES = "_fuser_unit", "_fuser_scales"
"""In the state of a copy or a pickle: those of the runner, in place of it."""


class Converted:
    """The mixin of converted modules."""

    def __getstate__(self) -> dict[str, Any]:
        own = getattr(super(), "__getstate__", None)
        state: dict[str, Any] = self.__dict__ if own is None else own()
        state = {name: value for name, value in state.items() if name != RUNNER}
        runner = runner_of(self)  # type: ignore[arg-type]
        if runner is None:
            return state
        unit = runner.present_unit(self)  # type: ignore[arg-type]
        state = {**state, UNIT: unit}
        return state if unit.change else {**state, SCALES: runner.scales}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        unit, scales = (self.__dict__.pop(name, None) for name in (UNIT, SCALES))
        if unit is not None:
            runner = Runner(unit, self)  # type: ignore[arg-type]
            if scales is not None:
                runner.scales = scales
            set_conversion(self, runner, None)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle creates the class again where it is loaded.
        return _blank, (original_class(self),), self.__getstate__()  # type: ignore[arg-type]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        join_weights(self)  # type: ignore[arg-type]
        return result

    def train(self, mode: bool = True) -> Any:
        # What loads a model part by part, as from_pretrained does, ends with eval().
        join_weights(self)  # type: ignore[arg-type]
        return super().train(mode)  # type: ignore[misc]


def _blank(cls: type) -> object:
    converted = _converted_class(cls)
    return object.__new__(converted)


@functools.cache
def _converted_class(cls: Any) -> Any:
    """The subclass of a module's class; it has the same name."""

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        recipe = self.__dict__.get(RECIPE)
        if recipe is None or is_autocast_entered():
            return _run(self, cls, args, keywords)
        with default_autocast(recipe=recipe):
            return _run(self, cls, args, keywords)

    # Trainer and PEFT look at the names of arguments. inspect would find them through __wrapped__
    # too, but accelerate sets the innermost function that it finds there as the forward.
    functools.update_wrapper(forward, cls.forward)
    del forward.__wrapped__  # type: ignore[attr-defined]
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    members = {**names, "forward": forward, "_class_before_fuser": cls}
    return type(cls.__name__, (Converted, cls), members)


def _run(self: Any, cls: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    runner: Runner | None = self.__dict__.get(RUNNER)
    if runner is not None:
        if runner.shared is not None:
            product, name = runner.shared
            output = product.output_of(name, self, args, keywords)
            if output is not None:
                return output
        refusal = runner.refusal(self)
        if runner.product is not None:
            if refusal is None:
                during = runner.product.during
                if torch.compiler.is_dynamo_compiling():
                    return call_with_writes(during, self, cls.forward, args, keywords)
                return during(self, cls.forward, args, keywords)
            return cls.forward(self, *args, **keywords)  # each linear computes its own product
        if refusal is None:
            bound = runner.bound(args, keywords)
            if bound is not None:
                return runner.run(self, *bound)
            refusal = "its pipeline does not take the arguments of this call"
        if torch.compiler.is_dynamo_compiling():
            call_while_tracing(_warn_traced, self)
        else:
            _warn_if_unquantized(self, refusal, current_recipe())
    return cls.forward(self, *args, **keywords)


def _warn_traced(context: Any) -> None:
    module = traced_subject(context)
    refusal = module.__dict__[RUNNER].unit.refusal(module) or (
        "an attribute or a child of it was changed, or its pipeline does not take the arguments"
    )
    recipe = current_recipe() if is_autocast_entered() else module.__dict__.get(RECIPE)
    _warn_if_unquantized(module, refusal, recipe)


def _warn_if_unquantized(module: Any, refusal: str, recipe: Recipe | None) -> None:
    """Warn, once in a process, of a forward that a recipe should quantize, and nothing does."""
    global _has_warned
    unit: Unit = module.__dict__[RUNNER].unit
    if _has_warned or recipe is None or not unit.is_quantized or not _is_plain(module, unit):
        return
    _has_warned = True
    warnings.warn(
        f"A {original_class(module).__name__} that fuser.convert has converted runs its own "
        f"forward, unquantized under {type(recipe).__name__}: {refusal}. Call fuser.convert after "
        "such a change, whose report says what it does not convert.",
        FuserWarning,
        stacklevel=users_level(),
    )


_has_warned = False


def _is_plain(module: torch.nn.Module, unit: Unit) -> bool:
    """Whether a product of a module's own forward is torch's: no converted child computes it."""
    for chain in unit.chains:
        classes = dict(chain.replaced)
        if not (classes and chain.linears) and any(part.weights for part in chain.parts):
            return True
        for path in chain.linears:
            inner = [child_of(module, above) for above in prefixes(path)]
            is_converted_inside = any(child is None or runner_of(child) for child in inner)
            if not is_converted_inside and type(inner[-1]) is classes.get(path):
                return True
    return False


def set_conversion(module: torch.nn.Module, runner: Runner | None, recipe: Recipe | None) -> None:
    """Convert a module: set what runs its unit, and the recipe under which it and all it holds run.

    The recipe applies to each call outside of an autocast, also if a trainer calls a part alone.
    """
    if not is_converted(module):
        cls: Any = type(module)
        module.__class__ = _converted_class(cls)
    for name, value in ((RUNNER, runner), (RECIPE, recipe)):
        # Also None: Dynamo has no guard for an absent key, and another module of the class that is
        # compiled later would run its graph.
        module.__dict__[name] = value if value is not None else module.__dict__.get(name)
    if runner is not None and (product := runner.product) is not None:
        for name in product.names:
            linear = child_of(module, name)
            if linear is not None and (of_linear := runner_of(linear)) is not None:
                of_linear.shared = product, name
    join_weights(module)


def why_no_subclass(module: torch.nn.Module) -> str | None:
    """Why a module's class has no converted subclass; None if it has."""
    cls: Any = original_class(module)
    try:
        _converted_class(cls)
    except Exception as error:
        return f"its class has no subclass without arguments ({error})"
    return None


def is_converted(module: torch.nn.Module) -> bool:
    """Whether a module has been converted."""
    return isinstance(module, Converted)


def runner_of(module: torch.nn.Module) -> Runner | None:
    """What runs the unit of a converted module."""
    return module.__dict__.get(RUNNER)


def recipe_of(module: torch.nn.Module) -> Recipe | None:
    """The recipe of a module's conversion."""
    return module.__dict__.get(RECIPE)


def ops_of_conversions(
    model: torch.nn.Module,
) -> Iterator[tuple[str, FusedOperation | BasicOperation, bool]]:
    """The ops with weights in the pipelines of converted modules, by the paths of the weights.

    The last item says whether the module is inside of another that runs a pipeline in its place.
    """
    replaced: set[str] = set()
    for path, module in model.named_modules():
        runner = runner_of(module)
        if runner is None:
            continue
        is_spare = path in replaced
        replaced.update(joint(path, name) for name in runner.unit.watched if name)
        for pipeline in runner.pipelines.values():
            for name, op in pipeline.linears:
                yield joint(path, name), op, is_spare


def joined_linears(model: torch.nn.Module) -> list[list[tuple[str, Any]]]:
    """The linears, with their paths, that quantized pipelines of converted modules read as one.

    Or alone. Not those whose weights are ``[in, out]``, nor those that a module around them runs
    otherwise.
    """
    read_as_one = []
    seen: set[str] = set()
    for path, module in model.named_modules():  # a module comes before those in it
        runner = runner_of(module)
        chains = [] if runner is None else runner.unit.chains
        for part in itertools.chain.from_iterable(chain.parts for chain in chains):
            if not isinstance(part, LinearPart) or runner is None:
                continue
            linears = {joint(path, name): child_of(module, name) for name in part.names}
            is_first = seen.isdisjoint(linears) and None not in linears.values()
            seen.update(linears)
            unit = runner.unit
            is_read = unit.is_quantized and not (unit.is_in_kept or part.is_transposed)
            if is_first and is_read:
                read_as_one.append([*linears.items()])
    return read_as_one


def unset_conversion(module: torch.nn.Module) -> None:
    """Give a converted module its own class again."""
    if "_class_before_fuser" in type(module).__dict__:
        module.__class__ = original_class(module)
        for name in (RUNNER, RECIPE):
            module.__dict__.pop(name, None)
        return
    # Another library, such as FSDP2, has made a class of the converted one. It stays, and its
    # forward is the module's own.
    module.__dict__.update({RUNNER: None, RECIPE: None})


def join_weights(module: torch.nn.Module) -> None:
    """Move the weights that a pipeline uses as one into one memory, if they are not."""
    runner = runner_of(module)
    for chain in () if runner is None else runner.unit.chains:
        for part in chain.parts:
            if not isinstance(part, LinearPart) or len(part.names) == 1:
                continue
            with contextlib.suppress(AttributeError):  # the children were replaced
                linears: list[Any] = [module.get_submodule(name) for name in part.names]
                join([linear.weight for linear in linears])
                if part.has_bias:
                    join([linear.bias for linear in linears])


def converted_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every converted module of a model."""
    return (module for module in model.modules() if is_converted(module))
