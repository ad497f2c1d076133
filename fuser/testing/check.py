"""``check``: tests an op or a fusion of your own against reference values, under every recipe."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser.basic_ops import Quantize
from fuser.errors import EmulationWarning, FuserWarning, InputError, InputTypeError
from fuser.fused_ops.catalog import FUSIONS
from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.op.parameters import allow_float64
from fuser.precision.contexts import autocast
from fuser.recipe import BACKWARD_OVERRIDES as OVERRIDES
from fuser.recipe import RECIPES as RECIPE_CLASSES
from fuser.recipe import BackwardOverride, Recipe
from fuser.sequential import Sequential
from fuser.specs import TensorSpec
from fuser.tensors import QuantizedTensor
from fuser.testing.compare import Tolerance, difference, tolerance_of
from fuser.testing.finite_differences import Slopes, wrong_slope

RECIPES: tuple[Recipe | None, ...] = (None, *(cls() for cls in RECIPE_CLASSES))
"""The recipes that ``check`` runs by default; None is no recipe."""

BACKWARD_OVERRIDES: tuple[BackwardOverride | None, ...] = (None, *OVERRIDES)
"""The default overrides, which are applied to each recipe that supports them."""

Tensors = dict[str, torch.Tensor | None]
Classes = tuple[type[FusedOperation], ...]


def check(
    module: torch.nn.Module,
    *inputs: torch.Tensor,
    reference: Callable[..., Any] | None = None,
    recipes: Sequence[Recipe | None] = RECIPES,
    backward_overrides: Sequence[BackwardOverride | None] = BACKWARD_OVERRIDES,
    atol: float | None = None,
    rtol: float | None = None,
    seed: int = 0,
) -> None:
    """Raise AssertionError if ``module`` computes wrong values, forward or backward.

    1. Gradients: in float64 and unfused, against autograd's gradients of ``reference``, or against
       finite differences of the module's own forward. Outputs are compared with those of
       ``reference`` too.
    2. Fusions: outputs and gradients of the fused ops against those of the unfused ops. Every
       fusion of your own must run at least once.
    3. Recipes: both again, or the op against its own float64 values, without a recipe and under
       each recipe, in training and in inference. Under a recipe the input and the gradient of the
       output are quantized. No input may be changed.
    4. Output specs: the results of ``output_spec`` and ``extra_output_specs``, which the planner
       reads, against the outputs.

    The module itself is not changed: copies of it run.

    Parameters
    ----------
    module
        An op; a fusion of ops, ``MyFusion([first, second])``; a ``Sequential``, with its fusions;
        or any module. In the dtype of its inputs.
    inputs
        The main input, ``[..., features]``, and the extra inputs. Use few rows of random values:
        finite differences call the op again for every element. float32, float16 or bfloat16;
        gradients of floating-point inputs are checked.
    reference
        The same function in PyTorch, ``reference(*inputs, *parameters)``, with the parameters
        in the order of ``module.named_parameters()``. Returns the main output, or a tuple of it and
        the extra outputs. Called in float64.
    recipes
        The recipes to run under; None is no recipe, and ``(None,)`` is the fastest check.
    backward_overrides
        The values of ``backward_override`` for each recipe that supports it.
    atol, rtol
        Tolerances that replace those of the dtype or format, in step 3 and for the fused ops in
        step 2. Without a recipe ``|error| <= atol + rtol * max |expected|`` for every element;
        under a recipe the root mean square of the errors is compared with that of the expected
        values.
    seed
        Seed of the module's random numbers and of the gradients of its outputs.

    Raises
    ------
    AssertionError
        If anything differs, or a forward or backward fails. One sentence names the op, the recipe,
        the tensor and the largest error.
    InputError, InputTypeError
        If there is no input, or ``module`` is not a module.
    """
    subject = _subject(module)
    if not inputs or not all(isinstance(x, torch.Tensor) for x in inputs):
        kinds = ", ".join(type(x).__name__ for x in inputs) or "nothing"
        raise InputError(
            f"check takes a module and its input tensors; after the module it got {kinds}."
        )
    with _quiet(), torch.random.fork_rng(devices=[]):
        truth = _truth(subject, inputs, reference, seed)
        _check_specs(subject, inputs, truth)
        in_inference = _in_inference(subject, inputs, seed)
        ran: set[str] = set()
        refusals: dict[str, str] = {}
        for recipe in _with_overrides(recipes, backward_overrides):
            tolerance = tolerance_of(recipe, inputs[0].dtype, atol, rtol)
            for is_training in (True, False):
                where = f"{_named(recipe)}, in {'training' if is_training else 'inference'}"
                said = f"{subject.name} {where}"
                run = functools.partial(
                    _run, subject, inputs, recipe, is_training, seed, said, ran, refusals
                )
                expected = truth if is_training else in_inference
                against = "its reference" if reference is not None else "its float64 values"
                if subject.fusions:
                    unfused = run(())
                    if recipe is None:
                        # Fused and unfused ops may run the same kernel. Each op rounds once.
                        rounded = replace(tolerance, rtol=len(subject.modules) * tolerance.rtol)
                        of_unfused = f"{subject.name}, unfused {where}"
                        _compare(of_unfused, unfused, expected, rounded, against)
                    expected, against = unfused, "the unfused ops"
                actual = run(subject.fusions)
                _compare(said, actual, expected, tolerance, against)
    for fusion in subject.required:
        if fusion.__name__ not in ran:
            why = refusals.get(fusion.__name__)
            raise AssertionError(
                f"{fusion.__name__} ran nowhere: "
                + (
                    f"it refuses because {why}"
                    if why
                    else f"its window {_window(fusion)} matches "
                    f"none of {subject.ops}, or the planner finds other steps cheaper."
                )
            )


# -- the subject --------------------------------------------------------------


@dataclass(frozen=True)
class _Subject:
    """The modules to check, in order, and the fusions in which they may run."""

    name: str
    modules: tuple[torch.nn.Module, ...]
    names: tuple[str, ...]
    """The names of its parameters."""
    fusions: Classes
    required: Classes
    """Fusions that must run."""

    @property
    def ops(self) -> str:
        """The names of its modules."""
        return " + ".join(type(module).__name__ for module in self.modules)

    def copies(self) -> tuple[list[torch.nn.Module], list[torch.nn.Parameter]]:
        """Copies of the modules, and their parameters in the order of ``names``."""
        modules, parameters = copy.deepcopy((list(self.modules), self._parameters()))
        return modules, parameters

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(torch.nn.ModuleList(self.modules).parameters())


def _subject(module: Any) -> _Subject:
    if not isinstance(module, torch.nn.Module):
        argument = f"the class {module.__name__}" if isinstance(module, type) else repr(module)
        raise InputTypeError(
            f"check takes a module, such as an op or MyFusion([first, second]); got {argument}."
        )
    names = tuple(name for name, _ in module.named_parameters())
    name = type(module).__name__
    if isinstance(module, FusedOperation) and type(module).window:
        fusion = type(module)
        return _Subject(name, tuple(module.basic_ops), names, (fusion,), (fusion,))
    if isinstance(module, Sequential):
        ops = ", ".join(type(op).__name__ for op in module)
        own = tuple(fusion for fusion in module.fusions if fusion not in FUSIONS)
        return _Subject(f"{name}({ops})", tuple(module), names, module.fusions, own)
    return _Subject(name, (module,), names, (), ())


def _named(recipe: Recipe | None) -> str:
    if recipe is None:
        return "without a recipe"
    override = recipe.backward_override
    return f"under {type(recipe).__name__}" + (
        f" with backward_override={override!r}" if override is not None else ""
    )


def _window(fusion: type[FusedOperation]) -> str:
    names = (getattr(element, "__name__", type(element).__name__) for element in fusion.window)
    return f"({', '.join(names)})"


def _with_overrides(
    recipes: Sequence[Recipe | None], overrides: Sequence[BackwardOverride | None]
) -> Iterator[Recipe | None]:
    for recipe in recipes:
        if recipe is None or not recipe.accepts_backward_override:
            yield recipe
            continue
        for override in overrides:
            yield replace(recipe, backward_override=override)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=EmulationWarning)
        # Every evaluation here is the first call of copies, whose scales no step has set.
        warnings.filterwarnings("ignore", "An op runs in evaluation", FuserWarning)
        yield


# -- runs ---------------------------------------------------------------------


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def _leaves(inputs: Sequence[torch.Tensor], *, with_grad: bool) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_(with_grad and _is_real(x)) for x in inputs]


def _outputs(result: Any) -> list[torch.Tensor]:
    tensors = list(result) if isinstance(result, (tuple, list)) else [result]
    return [y.dequantize() if isinstance(y, QuantizedTensor) else y for y in tensors]


def _weights(outputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """A gradient for each output, with the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y.device) for y in outputs
    ]


def _input_name(place: int) -> str:
    return "the input" if place == 0 else f"extra input {place - 1}"


def _trained(
    inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The inputs and parameters that require gradients, by the names of these in messages."""
    named = [(_input_name(i), x) for i, x in enumerate(inputs)]
    named += [(f"parameter {n}", p) for n, p in zip(names, parameters, strict=True)]
    return {f"the gradient of {name}": x for name, x in named if x.requires_grad}


def _gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    seed: int,
) -> Tensors:
    """Outputs, and the gradients of inputs and parameters, by their names in messages."""
    gradients: Tensors = {
        "the output" if i == 0 else f"extra output {i - 1}": y for i, y in enumerate(outputs)
    }
    named = _trained(inputs, parameters, names)
    with_graph = [
        (y, w.to(y.dtype))
        for y, w in zip(outputs, _weights(outputs, seed), strict=True)
        if y.requires_grad
    ]
    if with_graph and named:
        tensors, weights = zip(*with_graph, strict=True)
        grads = torch.autograd.grad(tensors, list(named.values()), weights, allow_unused=True)
        gradients |= dict(zip(named, grads, strict=True))
    else:
        gradients |= dict.fromkeys(named)
    return gradients


def _run(
    subject: _Subject,
    inputs: Sequence[torch.Tensor],
    recipe: Recipe | None,
    is_training: bool,
    seed: int,
    said: str,
    ran: set[str],
    refusals: dict[str, str],
    fusions: Classes,
) -> Tensors:
    """Outputs and, in training, gradients; adds the fusions that ran and the refusals."""
    modules, parameters = subject.copies()
    if recipe is not None:
        # Ops before and after that quantize; other modules take unquantized tensors.
        before = [Quantize(True, True)] if isinstance(modules[0], FusibleOperation) else []
        after = [Quantize(True, True)] if isinstance(modules[-1], FusibleOperation) else []
        modules = [*before, *modules, *after]
    model = Sequential(*modules, fusions=fusions).train(is_training)
    leaves = _leaves(inputs, with_grad=is_training)
    with _failing(said, "forward"), torch.set_grad_enabled(is_training):
        torch.manual_seed(seed)
        with autocast(enabled=recipe is not None, recipe=recipe):
            outputs = _outputs(model(*leaves))
            if subject.required and fusions:
                plan = model.plan(*leaves)
                steps = (*plan.forward, *plan.backward)
                ran.update(step.fusion for step in steps if step.fusion is not None)
                refusals.update({r.fusion: r.reason for r in plan.refusals})
    with _failing(said, "backward"):
        trained, names = (parameters, subject.names) if is_training else ([], ())
        results = _gradients(outputs, leaves, trained, names, seed)
    for place, (x, leaf) in enumerate(zip(inputs, leaves, strict=True)):
        if not torch.equal(x, leaf.detach()) and not x.isnan().any():
            raise AssertionError(
                f"{said}: {_input_name(place)} is changed in place. Return a new tensor."
            )
    return results


@contextmanager
def _failing(said: str, half: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        hint = ""
        if half == "backward" and "values to unpack" in str(error):
            hint = ". Does the forward save what this backward reads?"
        raise AssertionError(
            f"{said}: {half} raises {type(error).__name__}: {error}{hint}"
        ) from error


def _compare(
    said: str, actual: Tensors, expected: Tensors, tolerance: Tolerance, against: str
) -> None:
    count, expected_count = (
        sum(not name.startswith("the gradient") for name in t) for t in (actual, expected)
    )
    if count != expected_count:
        raise AssertionError(f"{said}: it returns {count} tensors, and {against} {expected_count}.")
    for name, tensor in actual.items():
        how = difference(tensor, expected.get(name), tolerance)
        if how is not None:
            raise AssertionError(f"{said}, against {against}: {name} {how}")


# -- reference values ---------------------------------------------------------


def _truth(
    subject: _Subject,
    inputs: Sequence[torch.Tensor],
    reference: Callable[..., Any] | None,
    seed: int,
) -> Tensors:
    """Outputs and gradients in float64, after a check of those of the unfused ops."""
    modules, parameters = subject.copies()
    model = Sequential(*modules, fusions=()).double()
    leaves = _leaves(
        [x.double().contiguous() if _is_real(x) else x for x in inputs], with_grad=True
    )
    said = f"{subject.ops} in float64"

    def function() -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [y.clone() for y in _outputs(model(*leaves))]  # an output may be an input

    with allow_float64():
        with _failing(said, "forward"):
            outputs = function()
        with _failing(said, "backward"):
            results = _gradients(outputs, leaves, parameters, subject.names, seed)
        if reference is not None:
            own = [p.detach().clone().requires_grad_(p.requires_grad) for p in parameters]
            given = _leaves(leaves, with_grad=True)
            torch.manual_seed(seed)
            expected = _gradients(
                _outputs(reference(*given, *own)), given, own, subject.names, seed
            )
            # The library's formulas compute in fp32 inside.
            tolerance = tolerance_of(None, torch.float32, None, None)
            _compare(said, results, expected, tolerance, "its reference")
            return expected
        weights = _weights(outputs, seed)
        generator = torch.Generator().manual_seed(seed)
        for name, x in _trained(leaves, parameters, subject.names).items():
            with torch.no_grad():
                slopes = Slopes(function, weights, x.detach())
                how = wrong_slope(slopes, x.shape, results[name], generator)
            if how is not None:
                raise AssertionError(f"{said}: {name} {how}")
    return results


def _check_specs(subject: _Subject, inputs: Sequence[torch.Tensor], results: Tensors) -> None:
    """Compare the output specs of a single op with its outputs."""
    op = subject.modules[0]
    if len(subject.modules) > 1 or not isinstance(op, BasicOperation):
        return
    spec, *extras = (TensorSpec(tuple(x.shape), x.dtype) for x in inputs)
    told = {"the output": op.output_spec(spec, extras, None)}
    specs = op.extra_output_specs(spec, extras)
    told |= {f"extra output {k}": extra_spec for k, extra_spec in enumerate(specs)}
    for name, extra_spec in told.items():
        output = results.get(name)
        if extra_spec is None or output is None:
            continue
        shape = tuple(output.shape)
        if extra_spec.shape != shape:
            method = "output_spec" if name == "the output" else "extra_output_specs"
            raise AssertionError(
                f"{subject.name}: {name} has shape {shape}, and {method} tells the planner "
                f"{extra_spec.shape}."
            )


def _in_inference(subject: _Subject, inputs: Sequence[torch.Tensor], seed: int) -> Tensors:
    """Outputs in float64 of the modules in inference, where a dropout is the identity."""
    modules, _ = subject.copies()
    model = Sequential(*modules, fusions=()).double().eval()
    leaves = [x.double() if _is_real(x) else x for x in inputs]
    torch.manual_seed(seed)
    said = f"{subject.name} in float64, in inference"
    with allow_float64(), _failing(said, "forward"), torch.no_grad():
        return _gradients(_outputs(model(*leaves)), (), (), (), seed)
