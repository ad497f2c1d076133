"""Activation checkpointing under recipes, and the steps of delayed scaling: what ends them."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import models
import oracles
import pytest
import torch
from said import holds, said
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch_logs import reset_tensor_log

import fuser
from fuser import recipe as recipes
from fuser import torch_private
from fuser.precision import contexts, recomputation

pytestmark = pytest.mark.sampled(most=12)

Step = Callable[[fuser.Sequential, torch.Tensor], torch.Tensor]
every_kind = pytest.mark.parametrize("use_reentrant", [False, True])
MXFP8 = recipes.MXFP8BlockScaling()
DELAYED = recipes.DelayedScaling(amax_history_len=4)


mlp = partial(models.mlp, 32, 64)


def tensor(seed: int, rows: int = 32) -> torch.Tensor:
    return oracles.random_tensor((rows, 32), torch.float32, seed)


def grads(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found  # type: ignore[return-value]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def states(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every scale and history of delayed scaling in ``model``."""
    return [value for name, value in model.state_dict().items() if name.endswith("_extra_state")]


def run(model: fuser.Sequential, recipe: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Forward under ``recipe``, checkpointed if there are ``options`` for that."""
    context = contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe)
    with context:
        return checkpoint(model, x, **options) if options else model(x)


# -- the recipe of the forward ----------------------------------------------------------


BETWEEN = {
    "nothing": None,
    "evaluation without a recipe": lambda model: model(tensor(9)),
    "evaluation under a recipe": lambda model: run(model, MXFP8, tensor(9)),
    "evaluation under another override": lambda model: run(
        model, recipes.MXFP8BlockScaling(backward_override="dequantized"), tensor(9)
    ),
    "evaluation with other scales": lambda model: run(
        model, recipes.Float8CurrentScaling(use_power_2_scales=True), tensor(9)
    ),
}
RECIPES = {
    "plain": None,
    "mxfp8": MXFP8,
    "current": recipes.Float8CurrentScaling(),
    "high precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "delayed": DELAYED,
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def followed(model: fuser.Sequential) -> Any:
    """``model`` with an op of torch's after it, which asks for its saved tensor first."""
    return lambda x: torch.nn.functional.softsign(model(x))


@every_kind
@pytest.mark.parametrize("wrap", [lambda model: model, followed], ids=["alone", "with softsign"])
@pytest.mark.parametrize("between", BETWEEN)
@every_recipe
def test_a_recomputation_runs_under_the_conditions_of_its_forward(
    recipe: Any, between: str, wrap: Any, use_reentrant: bool
) -> None:
    """Whatever the model ran under since."""
    model, x = mlp(), tensor(1).requires_grad_()
    run(wrap(model), recipe, x).sum().backward()
    expected = grads(model)
    again = mlp()
    y = run(wrap(again), recipe, x, use_reentrant=use_reentrant)
    run_between = BETWEEN[between]
    if run_between is not None:
        with torch.no_grad():
            run_between(again)
    y.sum().backward()
    assert equal(grads(again), expected)


@contextlib.contextmanager
def hooked(module: torch.nn.Module) -> Any:
    handle = module.register_forward_hook(lambda *args: None)
    try:
        yield
    finally:
        handle.remove()


HOOKED = {
    "an op": lambda model: model[1],
    "a composite": lambda model: model[2],
    "an op of a composite": lambda model: model[2].basic_ops[0],
}


@every_kind
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("place", HOOKED.values(), ids=HOOKED)
@every_recipe
def test_hooks_that_are_there_only_in_the_forward_or_only_in_the_backward_change_no_gradient(
    recipe: Any, place: Any, when: str, use_reentrant: bool
) -> None:
    """They take pipelines apart, and a recomputation finds the calls that it repeats."""
    model, x = mlp(), tensor(1).requires_grad_()
    run(model, recipe, x).sum().backward()
    expected = grads(model)
    again, nothing = mlp(), contextlib.nullcontext
    with hooked(place(again)) if when == "forward" else nothing():
        y = run(again, recipe, x, use_reentrant=use_reentrant)
    with hooked(place(again)) if when == "backward" else nothing():
        y.sum().backward()
    for found, wanted in zip(grads(again), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@every_kind
def test_outside_autocast_a_recomputation_is_plain_whatever_the_recipe_before(
    use_reentrant: bool,
) -> None:
    model, x = mlp(), tensor(1).requires_grad_()
    model(x).sum().backward()
    expected = grads(model)
    run(model, MXFP8, x)
    y = checkpoint(model, x, use_reentrant=use_reentrant)
    run(model, MXFP8, x)
    with fuser.autocast(recipe=MXFP8):
        y.sum().backward()
    assert equal(grads(model), expected)


def test_a_checkpoint_from_before_the_first_autocast_is_recomputed_plainly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = mlp(), tensor(1).requires_grad_()
    followed(model)(x).sum().backward()
    expected = grads(model)
    monkeypatch.setattr(contexts, "is_autocast_used", False)
    y = checkpoint(followed(model), x, use_reentrant=False)
    with fuser.autocast(recipe=MXFP8):
        y.sum().backward()
    assert equal(grads(model), expected)


@every_kind
def test_every_call_of_a_shared_pipeline_is_recomputed_as_it_ran(use_reentrant: bool) -> None:
    """One model three times in one function: quantized, plain, quantized otherwise."""
    model, x = mlp(), tensor(1).requires_grad_()

    def thrice(x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(model(x))
        with fuser.autocast(enabled=False):
            second = torch.tanh(model(first))
        with fuser.autocast(recipe=RECIPES["high precision"]):
            return torch.tanh(model(second))

    def step(function: Any) -> list[torch.Tensor]:
        with fuser.autocast(recipe=MXFP8):
            y = function(x)
        with torch.no_grad():
            model(x)
        y.sum().backward()
        return grads(model)

    expected = step(thrice)
    assert equal(step(lambda x: checkpoint(thrice, x, use_reentrant=use_reentrant)), expected)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
@every_recipe
def test_checkpoints_may_be_nested(recipe: Any, outer: bool, inner: bool) -> None:
    first, second = mlp(), mlp()

    def step(is_checkpointed: bool) -> list[torch.Tensor]:
        for op in (*first.modules(), *second.modules()):
            if isinstance(op, fuser.BasicLinear):
                op._delayed = {}
        x = tensor(1).requires_grad_()

        def of(function: Any, x: torch.Tensor, use_reentrant: bool) -> Any:
            return (
                checkpoint(function, x, use_reentrant=use_reentrant)
                if is_checkpointed
                else function(x)
            )

        def both(x: torch.Tensor) -> torch.Tensor:
            # Torch's ops save tensors of the outer function before and after the inner one.
            h = torch.sin(of(twice, torch.sin(x), inner))
            return torch.sin(of(followed(second), h, inner))

        def twice(x: torch.Tensor) -> torch.Tensor:
            with fuser.autocast(enabled=False):
                h = followed(first)(x)
            return followed(first)(h)  # type: ignore[no-any-return]

        with contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe):
            y = of(both, x, outer)
        with torch.no_grad():
            first(x)
            run(second, recipes.Float8CurrentScaling(use_power_2_scales=True), x)
        y.sum().backward()
        return [*grads(first), *grads(second), *states(first), *states(second)]

    expected = step(False)
    assert equal(step(True), expected)


def test_a_backward_inside_a_checkpointed_function_takes_no_part_in_its_calls() -> None:
    """What it recomputes for itself, it recomputes again when the function is."""
    model, x = mlp(), tensor(1).requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        h = x.detach().requires_grad_()
        inner = checkpoint(followed(model), h, use_reentrant=False)
        (slope,) = torch.autograd.grad(inner.sum(), h)
        with fuser.autocast(enabled=False):
            return torch.sin(model(torch.sin(x) + slope))

    found = []
    for options in ({}, {"use_reentrant": False}):
        run(function, MXFP8, x, **options).sum().backward()
        found.append(grads(model))
    assert equal(found[1], found[0])


@every_recipe
def test_a_retained_graph_is_recomputed_alike_every_time(recipe: Any) -> None:
    found = []
    for options in ({}, {"use_reentrant": False}):
        model, x = mlp(), tensor(1).requires_grad_()
        y = run(followed(model), recipe, x, **options)
        for _ in range(3):
            y.sum().backward(retain_graph=True)
            found.append(grads(model))
            with torch.no_grad():
                model(x)
    assert all(map(equal, found[3:], found[:3]))


def test_a_recomputation_outside_a_backward_is_one_too() -> None:
    """A node that is asked for its saved tensor has it recomputed."""
    model, x = mlp(), tensor(1).requires_grad_()
    squared = run(lambda x: torch.square(model(x)), MXFP8, x, use_reentrant=False)
    expected = run(model, MXFP8, x)
    assert torch.equal(squared.grad_fn._saved_self, expected)


@pytest.mark.parametrize("kind", ["early stop off", "debug", "selective", "hooks in", "hooks out"])
def test_other_ways_to_checkpoint_are_recomputed_alike(kind: str) -> None:
    model, x = mlp(), tensor(1).requires_grad_()
    recipe = RECIPES["high precision"]
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)

    def function(x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(x)
        if kind != "hooks in":
            return torch.sin(model(h))
        with hooks:
            h = model(h)
        return torch.sin(h)

    def selective() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    options = {
        "early stop off": {"early_stop": False},
        "debug": {"debug": True},
        "selective": {"context_fn": selective},
    }.get(kind, {})

    run(function, recipe, x).sum().backward()
    expected = grads(model)
    with hooks if kind == "hooks out" else contextlib.nullcontext():
        y = run(function, recipe, x, use_reentrant=False, **options)
    with torch.no_grad():
        model(x)
    y.sum().backward()
    reset_tensor_log()
    assert equal(grads(model), expected)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_selective_checkpointing_may_keep_matrix_products_at_every_step(recipe: Any) -> None:
    """It refuses a recomputation that calls torch otherwise than its forward did."""

    def train(**options: Any) -> list[Any]:
        model, found = mlp(), []
        for k, scale in enumerate((1.0, 30.0, 0.1)):
            x = (scale * tensor(k)).requires_grad_()
            run(lambda x: torch.tanh(model(x)), recipe, x, **options).sum().backward()
            found += [x.grad, *grads(model)]
        return found

    def selective() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    assert equal(train(use_reentrant=False, context_fn=selective), train())


# -- any other forward in a backward -----------------------------------------------------


def in_tensor_hook(model: Any, x: torch.Tensor, forward: Any) -> torch.Tensor:
    x.register_hook(lambda grad: forward())
    return model(x)  # type: ignore[no-any-return]


def in_accumulation_hook(model: Any, x: torch.Tensor, forward: Any) -> torch.Tensor:
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: forward())
    return model(x)  # type: ignore[no-any-return]


def in_custom_function(model: Any, x: torch.Tensor, forward: Any) -> torch.Tensor:
    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            forward()
            return grads[0]

    return Calling.apply(model(x))  # type: ignore[no-any-return]


def in_hook_inside_a_checkpoint(model: Any, x: torch.Tensor, forward: Any) -> torch.Tensor:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(x)
        if torch.is_grad_enabled():
            h.register_hook(lambda grad: forward())
        return model(h)  # type: ignore[no-any-return]

    return checkpoint(function, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize(
    "place",
    [in_tensor_hook, in_accumulation_hook, in_custom_function, in_hook_inside_a_checkpoint],
)
def test_a_forward_in_a_backward_that_repeats_none_runs_under_what_is_in_force(
    place: Any, with_grad: bool, is_quantized: bool
) -> None:
    model, x = mlp(), tensor(1).requires_grad_()
    current = recipes.Float8CurrentScaling()
    expected = run(model, current if is_quantized else None, tensor(2)).detach()
    found: list[torch.Tensor] = []

    def forward() -> None:
        with torch.set_grad_enabled(with_grad):
            found.append(model(tensor(2)).detach())

    with fuser.autocast(recipe=MXFP8):
        y = place(model, x, forward)
    with fuser.autocast(recipe=current) if is_quantized else contextlib.nullcontext():
        y.sum().backward()
    assert found
    assert all(torch.equal(one, expected) for one in found)


# -- what is noted -----------------------------------------------------------------------


@every_kind
def test_nothing_is_noted_for_longer_than_the_graph_lives(use_reentrant: bool) -> None:
    gc.collect()
    before = len(recomputation._calls)
    y = run(followed(mlp()), MXFP8, tensor(1).requires_grad_(), use_reentrant=use_reentrant)
    assert len(recomputation._calls) == before + 1
    y.sum().backward()
    del y
    assert len(recomputation._calls) == before


def test_hooks_for_saved_tensors_are_there_after_a_call_as_before() -> None:
    top = torch_private.saved_tensor_hooks
    model, x = mlp(), tensor(1).requires_grad_()
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            seen.append(top(True))
            y = model(x)
            seen.append(top(True))
        seen.append(top(True))
        return y

    run(function, MXFP8, x, use_reentrant=False)
    assert seen[0] == seen[1]
    assert seen[1][0].__code__ is not seen[2][0].__code__
    assert seen[2][0].__qualname__.startswith("_checkpoint_hook")
    assert top(True) is None


def test_this_torchs_checkpoints_are_known_and_others_are_said_not_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert recomputation._known_codes() is not None
    monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_hook")
    recomputation._known_codes.cache_clear()
    try:
        with pytest.warns(fuser.FuserWarning, match=said("recomputation-fuser-does-not")):
            assert recomputation._known_codes() is None
        model, x = mlp(), tensor(1).requires_grad_()
        assert model(x).shape == run(model, MXFP8, x).shape
    finally:
        monkeypatch.undo()
        recomputation._known_codes.cache_clear()


def test_an_autocast_disabled_inside_the_function_stays_disabled() -> None:
    model, x = mlp(), tensor(1).requires_grad_()

    def unquantized(x: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(enabled=False):
            return model(x)

    unquantized(x).sum().backward()
    expected = grads(model)
    with fuser.autocast(recipe=MXFP8):
        y = checkpoint(unquantized, x, use_reentrant=False)
        model(x)
    y.sum().backward()
    assert equal(grads(model), expected)


@every_kind
@pytest.mark.parametrize("recipe", [MXFP8, DELAYED], ids=["mxfp8", "delayed"])
def test_microbatches_may_interleave(recipe: Any, use_reentrant: bool) -> None:
    expected: list[list[torch.Tensor]] = []
    for options in ({}, {"use_reentrant": use_reentrant}):
        model, found = mlp(), []
        for _ in range(3):
            inputs = [(tensor(k) * 3.0**k).requires_grad_() for k in range(3)]
            outputs = [run(followed(model), recipe, x, **options) for x in inputs]
            for y in reversed(outputs):
                y.sum().backward()
            found.append([*grads(model), *states(model)])
        expected = expected or found
    assert all(map(equal, found, expected))


@every_kind
def test_an_autocast_inside_the_function_counts_in_its_recomputation_whatever_ran_since(
    use_reentrant: bool,
) -> None:
    model, x = mlp(), tensor(1).requires_grad_()

    def quantized(x: torch.Tensor) -> torch.Tensor:
        return run(model, MXFP8, x)

    quantized(x).sum().backward()
    expected = grads(model)
    y = checkpoint(quantized, x, use_reentrant=use_reentrant)
    with torch.no_grad():
        run(model, recipes.Float8CurrentScaling(), x)
    y.sum().backward()
    assert equal(grads(model), expected)


def test_a_saved_tensor_that_comes_back_otherwise_is_named() -> None:
    model, x = mlp(), tensor(1).requires_grad_()

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        return kept.dequantize() if isinstance(kept, fuser.QuantizedTensor) else kept

    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, unpack):
        y = run(model, MXFP8, x)
    with pytest.raises(
        fuser.StateError,
        match=said(
            "diagnose-saved-back-activation", 0, "BasicLinear", holds("MXFP8"), "unquantized"
        ),
    ):
        y.sum().backward()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_of_several_ops_that_save_the_one_whose_tensor_comes_back_otherwise_is_named(
    index: int,
) -> None:
    model = fuser.Sequential(*(fuser.BasicLinear(32, 32) for _ in range(3)))
    kept: list[Any] = []  # of each op its input and its weight

    def unpack(number: int) -> Any:
        return kept[number].dequantize() if number == 2 * index else kept[number]

    def pack(tensor: torch.Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = run(model, MXFP8, tensor(1).requires_grad_())
    assert len(kept) == 6
    with pytest.raises(
        fuser.StateError, match=said("diagnose-saved-back-activation", index, "BasicLinear")
    ):
        y.sum().backward()


# -- delayed scaling ----------------------------------------------------------------------


def steps(model: fuser.Sequential, step: Step, count: int = 4) -> list[list[torch.Tensor]]:
    """Gradients and states after each of several steps with growing inputs."""
    found = []
    for k in range(count):
        y = step(model, (tensor(k) * 3.0**k).requires_grad_())
        (y * 1e-3).sum().backward()
        found.append([y.detach(), *grads(model), *states(model)])
    return found


def inside(use_reentrant: bool) -> Step:
    def step(model: fuser.Sequential, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(
            lambda x: run(model, DELAYED, x), x, use_reentrant=use_reentrant
        )
        return y

    return step


def outside(use_reentrant: bool) -> Step:
    return lambda model, x: run(model, DELAYED, x, use_reentrant=use_reentrant)


def preceded(step: Step) -> Step:
    """With an op behind whose saved tensor comes first, so that it starts the recomputation."""

    def squared(model: fuser.Sequential, x: torch.Tensor) -> torch.Tensor:
        class Squared:
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return torch.square(model(x))

        return step(Squared(), x)

    return squared


@every_kind
@pytest.mark.parametrize("make", [outside, inside])
@pytest.mark.parametrize("wrap", [lambda step: step, preceded], ids=["alone", "with square"])
def test_delayed_scaling_with_checkpointing_equals_without(
    make: Any, wrap: Any, use_reentrant: bool
) -> None:
    """Outputs, gradients, scales and histories, bit for bit, after each of four steps."""
    plain = steps(mlp(), wrap(lambda model, x: run(model, DELAYED, x)))
    for found, expected in zip(steps(mlp(), wrap(make(use_reentrant))), plain, strict=True):
        assert equal(found, expected)


def resumed(model: fuser.Sequential) -> fuser.Sequential:
    fresh = mlp()
    fresh.load_state_dict(model.state_dict())
    return fresh


# What becomes of a model in the middle of its training: itself or another, and its recipe.
CHANGES: dict[
    str, tuple[Callable[[fuser.Sequential], fuser.Sequential], recipes.DelayedScaling]
] = {
    "loaded": (resumed, DELAYED),
    "copied": (copy.deepcopy, DELAYED),
    "margin": (lambda model: model, recipes.DelayedScaling(amax_history_len=4, margin=1)),
    "format": (
        lambda model: model,
        recipes.DelayedScaling(amax_history_len=4, fp8_format=recipes.Format.E4M3),
    ),
    "history": (lambda model: model, recipes.DelayedScaling(amax_history_len=2)),
}


@every_kind
@pytest.mark.parametrize(("change", "later"), CHANGES.values(), ids=CHANGES)
def test_delayed_scaling_goes_on_alike_with_checkpointing_and_without(
    change: Any, later: recipes.DelayedScaling, use_reentrant: bool
) -> None:
    """After a resume or a change of recipe; a reentrant one first asks for gradients' quantizers
    in the recomputation."""

    def train(**options: Any) -> list[torch.Tensor]:
        model, results = mlp(), []
        for step in range(5):
            model = change(model) if step == 2 else model
            x = (tensor(step) * 2.0**step).requires_grad_()
            run(model, DELAYED if step < 2 else later, x, **options).square().sum().backward()
            results += [x.grad, *grads(model), *states(model)]
        return results  # type: ignore[return-value]

    assert equal(train(use_reentrant=use_reentrant), train())


def test_pipelines_under_different_recipes_may_share_a_checkpoint() -> None:
    """The first under the recipe outside, the last in high precision; or each in its own region."""
    first, last = mlp(), mlp()

    def high_precision_head(x: torch.Tensor) -> torch.Tensor:
        h = first(x)
        with fuser.autocast(enabled=False):
            return last(h)

    def two_regions(x: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(recipe=DELAYED):
            h = first(x)
        with fuser.autocast(recipe=DELAYED):
            return last(h)

    def train(function: Any, recipe: Any, is_checkpointed: bool) -> list[list[torch.Tensor]]:
        for model in (first, last):
            oracles.randomize(model)
            for op in (0, 2):
                model[op].members[0]._delayed = {}
        found = []
        for k in range(3):
            x = (tensor(k) * 3.0**k).requires_grad_()
            with contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe):
                y = checkpoint(function, x, use_reentrant=False) if is_checkpointed else function(x)
            y.sum().backward()
            found.append([*grads(first), *grads(last), *states(first), *states(last)])
        return found

    for function, recipe in ((high_precision_head, MXFP8), (two_regions, None)):
        plain, again = (train(function, recipe, flag) for flag in (False, True))
        assert all(map(equal, again, plain)), function.__name__


def test_a_frozen_pipeline_gets_scales_too() -> None:
    model = mlp().requires_grad_(False)
    for _ in range(2):
        run(model, DELAYED, tensor(1))
    assert float(model[0].members[0]._delayed["forward"].scale[0]) != 1.0


@pytest.mark.parametrize("change", [resumed, copy.deepcopy], ids=["loaded", "copied"])
def test_a_model_with_a_state_goes_on_with_its_first_linear_frozen(change: Any) -> None:
    """Whose gradients' state is there, and is not used."""
    model = mlp()
    run(model, DELAYED, tensor(1)).sum().backward()
    grads(model)
    model = change(model)
    before = model[0].basic_ops[0]._delayed["backward"].packed()
    results = []
    for options in ({}, {"use_reentrant": False}):
        again = copy.deepcopy(model)
        again[0].requires_grad_(False)
        run(again, DELAYED, tensor(2), **options).sum().backward()
        assert torch.equal(again[0].basic_ops[0]._delayed["backward"].packed(), before)
        results.append(grads(again[2]))
    run(model, DELAYED, tensor(2)).sum().backward()
    expected = grads(model[2])
    assert all(equal(found, expected) for found in results)


def test_evaluation_under_a_shorter_history_leaves_training_as_it_is() -> None:
    model = mlp()
    steps(model, lambda model, x: run(model, DELAYED, x), 3)
    before = states(model)
    with torch.no_grad():
        run(model, recipes.DelayedScaling(amax_history_len=1), tensor(5))
    assert equal(states(model), before)


def test_a_kept_weight_survives_checkpointing_under_delayed_scaling() -> None:
    def train(**options: Any) -> list[torch.Tensor]:
        model, found = mlp(), []
        linears = [model[0], model[2]]
        for _ in range(3):
            for is_first in (True, False):
                kwargs = {op: {"is_first_microbatch": is_first} for op in linears}
                x = tensor(1).requires_grad_()

                def forward(x: torch.Tensor, kwargs: Any = kwargs) -> torch.Tensor:
                    return model(x, op_kwargs=kwargs)

                with fuser.autocast(recipe=DELAYED):
                    y = checkpoint(forward, x, **options) if options else forward(x)
                (y * 1e-3).sum().backward()
            found += grads(model)
        return found

    assert equal(train(use_reentrant=False), train())


def test_a_failed_backward_leaks_nothing() -> None:
    from fuser.precision.delayed_scaling import MAX_BACKWARDS, _backwards

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError("on purpose")

    model = mlp()
    for _ in range(MAX_BACKWARDS + 3):
        y = run(model, DELAYED, Failing.apply(tensor(1).requires_grad_()))
        with pytest.raises(RuntimeError, match="on purpose"):
            y.sum().backward()
    assert len(_backwards) <= MAX_BACKWARDS


def test_gradients_are_scaled_even_if_the_first_pipeline_gets_none() -> None:
    first, second = mlp(), mlp()
    for _ in range(3):
        with fuser.autocast(recipe=DELAYED):
            first(tensor(1))
            y = second(tensor(2).requires_grad_())
        (y * 1e-6).sum().backward()
    scale = second[0].members[0]._delayed["backward"].scale
    assert float(scale) > 1e3


def test_evaluation_leaves_training_as_it_is() -> None:
    model = mlp()
    steps(model, lambda model, x: run(model, DELAYED, x), 2)
    before = states(model)
    x = 1000 * tensor(5)
    with torch.no_grad():
        run(model, DELAYED, x)
    with fuser.autocast(recipe=DELAYED), torch.no_grad():
        model(x)
    with torch.inference_mode():
        run(model, DELAYED, x)
    for use_reentrant in (False, True):
        with torch.no_grad():
            run(model, DELAYED, x.requires_grad_(), use_reentrant=use_reentrant)
    assert equal(states(model), before)


def test_a_forward_that_fails_ends_no_step() -> None:
    model = mlp()
    steps(model, lambda model, x: run(model, DELAYED, x), 2)
    scales = [state.clone() for state in states(model)]

    def fail() -> None:
        with fuser.autocast(recipe=DELAYED):
            model(1000 * tensor(5).requires_grad_())
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    for found, expected in zip(states(model), scales, strict=True):
        count = int(expected[0]) if expected.numel() else 0
        assert torch.equal(found[2 : 2 + count], expected[2 : 2 + count])


def test_two_autocasts_that_do_not_know_of_each_other_end_their_own_steps() -> None:
    model = mlp()
    with fuser.autocast(recipe=DELAYED):
        model(tensor(1).requires_grad_())
        before = model[0].members[0]._delayed["forward"].scale.clone()
        with fuser.autocast(enabled=False):
            pass
        assert torch.equal(model[0].members[0]._delayed["forward"].scale, before)
    assert not torch.equal(model[0].members[0]._delayed["forward"].scale, before)


def test_a_forward_without_a_backward_keeps_no_model_alive() -> None:
    model = mlp()
    run(model, DELAYED, tensor(1).requires_grad_())
    gone = weakref.ref(model[0].members[0]._delayed["forward"])
    del model
    gc.collect()
    assert gone() is None


def test_a_tensor_from_training_can_be_written_to() -> None:
    model = fuser.Sequential(fuser.Quantize())
    y = run(model, DELAYED, tensor(1).requires_grad_())
    history = model[0]._delayed["forward"].amax_history.clone()
    with torch.no_grad():
        y.detach().mul_(100.0)
    assert torch.equal(model[0]._delayed["forward"].amax_history, history)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_state_is_fp32_whatever_torchs_default(dtype: torch.dtype) -> None:
    model = mlp()
    torch.set_default_dtype(dtype)
    try:
        run(model, DELAYED, tensor(1).requires_grad_()).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    state = model[0].members[0]._delayed["forward"]
    assert state.scale.dtype == state.amax_history.dtype == torch.float32


def test_a_checkpoint_without_state_takes_the_state_away() -> None:
    model = mlp()
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    expected = steps(mlp(), lambda model, x: run(model, DELAYED, x), 2)
    steps(model, lambda model, x: run(model, DELAYED, x), 3)
    model.load_state_dict(fresh)
    found = steps(model, lambda model, x: run(model, DELAYED, x), 2)
    assert all(map(equal, found, expected))


def test_a_truncated_state_is_refused_with_the_numbers() -> None:
    op = fuser.BasicLinear(32, 32)
    with pytest.raises(
        fuser.InputError, match=said("delayed-scaling-needs-numbers-history", None, 12, 2, None, 3)
    ):
        op.set_extra_state(torch.tensor([2.0, 4.0, 1.0]))


# -- ops and parameters that others wrote or made -------------------------------------------


class ScaledLinear(fuser.BasicOperation):
    """A linear written against the original's interface: it counts its quantizers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(32))

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def op_forward(
        self,
        ctx: Any,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> Any:
        of_input: Any = self.get_quantizer("forward", 0)
        of_weight: Any = self.get_quantizer("forward", 1)
        x, weight = of_input(input_).dequantize(), of_weight(self.weight).dequantize()
        ctx.save_for_backward(x, weight)
        ctx.previous = prev_op_grad_output_quantizer
        y = x @ weight.t()
        return y if next_op_input_quantizer is None else next_op_input_quantizer(y)

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = grad_output @ weight
        return (dx if ctx.previous is None else ctx.previous(dx)), (grad_output.t() @ x,)


@pytest.mark.parametrize("recipe", [MXFP8, DELAYED], ids=["mxfp8", "delayed"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_custom_op_may_count_its_quantizers_and_call_its_neighbours(
    recipe: Any, is_frozen: bool
) -> None:
    linears = [oracles.randomize(fuser.BasicLinear(32, 32)) for _ in range(2)]
    model = fuser.Sequential(linears[0], ScaledLinear(), linears[1])
    linears[0].weight.requires_grad_(not is_frozen)
    x = tensor(1) if is_frozen else tensor(1).requires_grad_()
    y = run(model, recipe, x)
    y.sum().backward()
    plain = tensor(1) @ linears[0].weight.detach().T @ linears[1].weight.detach().T
    assert (y - plain).norm() / plain.norm() < 0.2
    assert (x.grad is None) == is_frozen


def test_gradients_that_leave_a_pipeline_are_plain() -> None:
    model = fuser.Sequential(
        fuser.Quantize(False, True),
        fuser.AddExtraInput(),
        fuser.Quantize(False, True),
        fuser.BasicLinear(32, 32),
    )
    x, extra = tensor(1).requires_grad_(), tensor(2).requires_grad_()
    with fuser.autocast(recipe=MXFP8):
        model(x, extra).sum().backward()
    assert type(x.grad) is torch.Tensor
    assert type(extra.grad) is torch.Tensor


def test_a_quantized_tensor_is_not_quantized_again_on_the_way() -> None:
    recipe = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    linear = oracles.randomize(fuser.BasicLinear(32, 32))
    found = []
    for between in ([], [fuser.Dropout(0.3).eval()], [fuser.Dropout(0.0)], [fuser.Identity()]):
        model = fuser.Sequential(fuser.Quantize(), *between, linear)
        run(model, recipe, tensor(1)).sum().backward()
        found.append(grads(linear))
    assert all(equal(one, found[0]) for one in found)
    arrives = fuser.MXFP8Quantizer()(tensor(1))
    with fuser.autocast(recipe=recipe):
        assert fuser.Sequential(fuser.Quantize())(arrives) is arrives


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_deferred_parameter_is_quantized_if_its_module_was_made_so(is_inside: bool) -> None:
    """Where the module was made decides, not where it first ran."""
    with fuser.quantized_model_init(enabled=is_inside, recipe=MXFP8):
        linear = fuser.BasicLinear(32, 32, device="meta")
    with fuser.quantized_model_init(enabled=not is_inside, recipe=MXFP8):
        linear(tensor(1))
    assert isinstance(linear.weight, fuser.MXFP8Tensor) == is_inside
    linear.reset_parameters()
    assert isinstance(linear.weight, fuser.MXFP8Tensor) == is_inside


def test_initial_values_are_plain_after_every_reset() -> None:
    with fuser.quantized_model_init(recipe=MXFP8, preserve_high_precision_init_val=True):
        linear = fuser.BasicLinear(32, 32)
    linear.reset_parameters()
    assert type(linear.weight.get_high_precision_init_val()) is torch.Tensor


def test_a_factory_gives_every_op_quantizers_of_its_own() -> None:
    asked: list[str] = []

    def factory(role: str) -> Any:
        asked.append(role)
        return fuser.Float8Quantizer()

    model = mlp()
    recipe = recipes.CustomRecipe(qfactory=factory)
    for _ in range(2):
        run(model, recipe, tensor(1).requires_grad_()).sum().backward()
    with fuser.autocast(recipe=recipe):
        quantizers = {id(model[i].members[0].get_quantizer("forward", 0)) for i in (0, 2)}
    assert len(quantizers) == 2

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, role: str) -> Any:
            return fuser.Float8Quantizer()

    with pytest.raises(fuser.InputError, match=said("recipe-factory-cannot-hashed")):
        recipes.CustomRecipe(qfactory=Unhashable())
    assert len(pickle.loads(pickle.dumps(model))) == 3


class LinearBias(fuser.FusedOperation):
    """A forward fusion as others write one: plain operands, saved by the linear."""

    window = (fuser.BasicLinear, fuser.Bias)
    side = "forward"

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        linear, bias = self.members
        x, weight = linear.operands(basic_op_ctxs[0], input_)
        return torch.nn.functional.linear(x, weight, bias.bias), ((), ())


def test_a_custom_fusion_may_run_a_linear_unquantized_under_a_recipe() -> None:
    plain = oracles.randomize(fuser.Sequential(fuser.Linear(32, 32)))
    model = fuser.Sequential(*plain, fusions=(LinearBias,))
    x = tensor(1).requires_grad_()
    for recipe, one in ((None, plain), (MXFP8, model)):
        run(one, recipe, x).sum().backward()
        if recipe is None:
            expected = grads(one)
    assert model.plans[0].forward[0].fusion == "LinearBias"
    assert equal(grads(model), expected)
