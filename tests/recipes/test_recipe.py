"""Recipes and autocast: values equal by contents, read from the environment once, scoped."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import pickle
import re
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import every_format as formats
import pytest
import torch
from said import holds, said

import fuser
from fuser.precision.contexts import current_recipe
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

VARIABLE = "NVTE_BACKWARD_OVERRIDE"


def quantizer_factory(role: Any) -> None:
    """A stand-in for a user's quantizer factory."""


def another_factory(role: Any) -> None:
    """Another one."""


@dataclasses.dataclass(frozen=True)
class Custom(CustomRecipe):
    """A custom recipe with a factory of its own."""

    qfactory: Any = quantizer_factory


RECIPES = (
    *formats.RECIPES.values(),
    Custom,
)
OVERRIDABLE = tuple(recipe for recipe in RECIPES if recipe is not DelayedScaling)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_overridable = pytest.mark.parametrize("recipe", OVERRIDABLE)

# A recipe announces that this version computes in high precision; the test of
# that looks for it, the others do not want to hear it.


@pytest.fixture(autouse=True)
def _no_override_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def pipeline() -> Iterator[fuser.OperationFuser]:
    torch.manual_seed(0)
    yield fuser.OperationFuser([fuser.Linear(32, 64), fuser.GELU(), fuser.Linear(64, 32)])
    assert current_recipe() is None


# -- recipes are values -----------------------------------------------------------


@every_recipe
def test_a_recipe_is_frozen(recipe: type[Recipe]) -> None:
    made = recipe()
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, getattr(made, field.name))


@every_recipe
def test_recipes_are_equal_and_hash_alike_by_contents(recipe: type[Recipe]) -> None:
    assert recipe() == recipe()
    assert recipe() is not recipe()
    assert len({recipe(), recipe()}) == 1
    assert copy.deepcopy(recipe()) == recipe()
    assert pickle.loads(pickle.dumps(recipe())) == recipe()


@pytest.mark.parametrize("cls", [*RECIPES, fuser.recipe.QParams, MMParams])
def test_a_flag_takes_true_and_false_alone(cls: type[Any]) -> None:
    unset = ("fp8_dpa", "fp8_mha", "follows_recipe")
    for field in dataclasses.fields(cls):
        if field.type == "bool" and field.name not in unset:
            for given in ("0", None, Format.E4M3):
                with pytest.raises(
                    fuser.InputError,
                    match=said("recipe-takes", cls.__name__, holds(field.name), "True or False"),
                ):
                    cls(**{field.name: given})


def test_recipes_of_two_kinds_are_never_equal() -> None:
    assert len({recipe() for recipe in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (
            DelayedScaling,
            {
                "margin": 1,
                "fp8_format": Format.E4M3,
                "amax_history_len": 16,
                "amax_compute_algo": "most_recent",
                "reduce_amax": False,
            },
        ),
        (
            Float8CurrentScaling,
            {
                "use_power_2_scales": True,
                "fp8_format": Format.E4M3,
                "fp8_gemm_fprop": MMParams(use_split_accumulator=True),
                "fp8_gemm_dgrad": MMParams(use_split_accumulator=False),
                "fp8_gemm_wgrad": MMParams(use_split_accumulator=False),
                "backward_override": "dequantized",
            },
        ),
        (
            MXFP8BlockScaling,
            {
                "fp8_format": Format.HYBRID,
                "enable_2d_quantization": True,
                "backward_override": "high_precision",
            },
        ),
        (
            Float8BlockScaling,
            {
                "use_f32_scales": True,
                "fp8_format": Format.HYBRID,
                "w_block_scaling_dim": 1,
                "backward_override": "high_precision",
            },
        ),
        (NVFP4BlockScaling, {"backward_override": "dequantized"}),
        (Custom, {"qfactory": another_factory}),
    ],
)
def test_every_field_makes_another_recipe(recipe: type[Recipe], changes: dict[str, Any]) -> None:
    made = [recipe(), *(recipe(**{name: value}) for name, value in changes.items())]
    assert len(set(made)) == 1 + len(changes)
    for name, value in changes.items():
        assert recipe(**{name: value}) == dataclasses.replace(recipe(), **{name: value})


def test_positional_arguments_stand_in_the_documented_order() -> None:
    assert DelayedScaling(2, Format.E4M3, 16, "most_recent", False) == DelayedScaling(
        margin=2,
        fp8_format=Format.E4M3,
        amax_history_len=16,
        amax_compute_algo="most_recent",
        reduce_amax=False,
    )
    assert Float8CurrentScaling(True, Format.E4M3) == Float8CurrentScaling(
        use_power_2_scales=True, fp8_format=Format.E4M3
    )
    assert MXFP8BlockScaling(Format.HYBRID, True) == MXFP8BlockScaling(
        fp8_format=Format.HYBRID, enable_2d_quantization=True
    )
    assert Float8BlockScaling(True, Format.HYBRID, 2, 1, 1) == Float8BlockScaling(
        use_f32_scales=True,
        fp8_format=Format.HYBRID,
        x_block_scaling_dim=2,
        w_block_scaling_dim=1,
        grad_block_scaling_dim=1,
    )
    assert CustomRecipe(quantizer_factory) == CustomRecipe(qfactory=quantizer_factory)
    assert CustomRecipe(quantizer_factory) != CustomRecipe(another_factory)


@pytest.mark.parametrize("given", [None, "mxfp8", MXFP8BlockScaling()])
def test_a_custom_recipe_without_a_factory_is_refused_when_it_is_made(given: Any) -> None:
    with pytest.raises(fuser.InputTypeError, match=said("recipe-needs-qfactory-quantizer")):
        CustomRecipe(given)
    with pytest.raises(fuser.InputTypeError, match=said("recipe-needs-qfactory-quantizer", "None")):
        CustomRecipe()


def test_defaults_are_the_documented_ones() -> None:
    delayed = DelayedScaling()
    assert (delayed.margin, delayed.fp8_format) == (0, Format.HYBRID)
    assert (delayed.amax_history_len, delayed.amax_compute_algo) == (1024, "max")
    assert delayed.reduce_amax is True
    current = Float8CurrentScaling()
    assert (current.use_power_2_scales, current.fp8_format) == (False, Format.HYBRID)
    mxfp8 = MXFP8BlockScaling()
    assert (mxfp8.fp8_format, mxfp8.enable_2d_quantization) == (Format.E4M3, False)
    block = Float8BlockScaling()
    assert (block.use_f32_scales, block.fp8_format) == (False, Format.E4M3)
    dims = (block.x_block_scaling_dim, block.w_block_scaling_dim, block.grad_block_scaling_dim)
    assert dims == (1, 2, 1)
    assert {member.name for member in Format} == {"E2M1", "E4M3", "E5M2", "HYBRID"}
    assert all(recipe().backward_override is None for recipe in RECIPES)


def test_a_recipe_says_which_one_it_is() -> None:
    questions = {
        "delayed": DelayedScaling,
        "float8_current_scaling": Float8CurrentScaling,
        "mxfp8": MXFP8BlockScaling,
        "float8_block_scaling": Float8BlockScaling,
        "nvfp4": NVFP4BlockScaling,
        "custom": Custom,
    }
    for recipe in RECIPES:
        answers = {question: getattr(recipe(), question)() for question in questions}
        assert answers == {question: recipe is own for question, own in questions.items()}


# -- backward_override ------------------------------------------------------------


@every_overridable
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_backward_override_is_kept(recipe: type[Recipe], override: str | None) -> None:
    assert recipe(backward_override=override).backward_override == override


@every_overridable
@pytest.mark.parametrize("override", ["", "HIGH_PRECISION", "quantized", 1])
def test_another_backward_override_is_refused_with_the_accepted_values(
    recipe: type[Recipe], override: Any
) -> None:
    with pytest.raises(fuser.InputError) as caught:
        recipe(backward_override=override)
    sentence = str(caught.value)
    for part in (recipe.__name__, repr(override), "'high_precision'", "'dequantized'", "None"):
        assert part in sentence


@every_overridable
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_the_environment_gives_the_default_when_the_recipe_is_built(
    recipe: type[Recipe], override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_before = recipe()
    monkeypatch.setenv(VARIABLE, override)
    built_under = recipe()
    assert built_before.backward_override is None
    assert built_under.backward_override == override
    assert built_under == recipe(backward_override=override)
    assert recipe(backward_override=None).backward_override is None
    monkeypatch.delenv(VARIABLE)
    assert built_under.backward_override == override
    assert recipe().backward_override is None


@every_overridable
def test_an_empty_variable_is_no_override(
    recipe: type[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert recipe().backward_override is None


@every_overridable
def test_a_wrong_value_in_the_environment_is_refused(
    recipe: type[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "sometimes")
    with pytest.raises(
        fuser.InputError, match=said("recipe-backward-values-none", recipe.__name__, "'sometimes'")
    ):
        recipe()


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_delayed_scaling_refuses_an_override_and_names_who_takes_one(override: str) -> None:
    with pytest.raises(fuser.InputError) as caught:
        DelayedScaling(backward_override=override)
    sentence = str(caught.value)
    assert sentence.startswith("DelayedScaling")
    assert repr(override) in sentence
    assert all(recipe.__name__ in sentence for recipe in OVERRIDABLE)


@pytest.mark.parametrize("value", ["high_precision", "dequantized", "sometimes"])
def test_delayed_scaling_ignores_the_environment(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert DelayedScaling() == DelayedScaling(backward_override=None)
    assert DelayedScaling().backward_override is None


def test_the_environment_is_not_read_while_a_pipeline_runs(
    pipeline: fuser.OperationFuser, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = MXFP8BlockScaling()
    x = torch.randn(32, 32)
    with fuser.autocast(recipe=recipe):
        pipeline(x)
        monkeypatch.setenv(VARIABLE, "high_precision")
        pipeline(x)
    assert pipeline.planned_count == 1
    assert pipeline.plans[0].key.recipe == MXFP8BlockScaling(backward_override=None)


# -- autocast ---------------------------------------------------------------------


def test_autocast_sets_the_recipe_and_takes_it_back() -> None:
    recipe = Float8CurrentScaling()
    assert current_recipe() is None
    with fuser.autocast(recipe=recipe):
        assert current_recipe() is recipe
    assert current_recipe() is None


def test_autocast_without_a_recipe_means_delayed_scaling() -> None:
    with fuser.autocast():
        assert current_recipe() == DelayedScaling()


def test_the_innermost_autocast_counts() -> None:
    outer, inner = Float8CurrentScaling(), MXFP8BlockScaling()
    with fuser.autocast(recipe=outer):
        with fuser.autocast(recipe=inner):
            assert current_recipe() is inner
            with fuser.autocast(enabled=False, recipe=inner):
                assert current_recipe() is None
            assert current_recipe() is inner
        assert current_recipe() is outer
        with fuser.autocast(recipe=outer):
            assert current_recipe() is outer
        assert current_recipe() is outer
    assert current_recipe() is None


def test_one_autocast_object_can_be_entered_again_and_inside_itself() -> None:
    recipe = MXFP8BlockScaling()
    region = fuser.autocast(recipe=recipe)
    for _ in range(2):
        with region:
            assert current_recipe() is recipe
            with region:
                assert current_recipe() is recipe
            assert current_recipe() is recipe
        assert current_recipe() is None
    other = Float8CurrentScaling()
    with region, fuser.autocast(recipe=other):
        with region:
            assert current_recipe() is recipe
        assert current_recipe() is other


def test_autocast_decorates_a_function() -> None:
    recipe = MXFP8BlockScaling()

    @fuser.autocast(recipe=recipe)
    def inside() -> Recipe | None:
        return current_recipe()

    assert [inside(), inside()] == [recipe, recipe]
    assert current_recipe() is None


def test_an_exception_restores_the_outer_recipe() -> None:
    outer, inner = Float8CurrentScaling(), MXFP8BlockScaling()

    def fails_inside() -> None:
        with fuser.autocast(recipe=inner):
            raise KeyError("gone")

    with fuser.autocast(recipe=outer):
        with pytest.raises(KeyError, match="gone"):
            fails_inside()
        assert current_recipe() is outer
    assert current_recipe() is None


def test_a_recipe_of_one_thread_is_not_seen_by_another() -> None:
    seen: list[Recipe | None] = []
    with fuser.autocast(recipe=MXFP8BlockScaling()):
        thread = threading.Thread(target=lambda: seen.append(current_recipe()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("kind", ["generator", "coroutine", "async generator"])
def test_autocast_refuses_to_decorate_what_runs_after_its_call(kind: str) -> None:
    def generator() -> Iterator[None]:
        yield

    async def coroutine() -> None:
        pass

    async def asynchronous() -> AsyncIterator[None]:
        yield

    function = {"generator": generator, "coroutine": coroutine}.get(kind, asynchronous)
    with pytest.raises(
        fuser.InputTypeError,
        match=said("contexts-autocast-cannot-decorate", holds(function.__name__)),
    ):
        fuser.autocast(recipe=MXFP8BlockScaling())(function)


def _suspended(recipe: Recipe) -> Iterator[Recipe | None]:
    """A generator that has entered an autocast, and is not done."""

    def inside() -> Iterator[Recipe | None]:
        with fuser.autocast(recipe=recipe):
            yield current_recipe()

    generator = inside()
    assert next(generator) is recipe
    return generator


def test_a_generator_that_ends_late_takes_its_own_autocast_back_and_no_other() -> None:
    outer, inner = Float8CurrentScaling(), MXFP8BlockScaling()
    generator = _suspended(outer)
    with fuser.autocast(recipe=inner):
        generator.close()
        assert current_recipe() is inner
    assert current_recipe() is None


def test_generators_that_end_in_another_order_leave_no_recipe() -> None:
    recipes = [Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]
    generators = [_suspended(recipe) for recipe in recipes]
    for k, left in ((1, recipes[2]), (2, recipes[0]), (0, None)):
        generators[k].close()
        assert current_recipe() is left


def test_an_autocast_left_in_another_thread_changes_nothing_there() -> None:
    generator = contextvars.copy_context().run(_suspended, Float8CurrentScaling())
    seen: list[Recipe | None] = []

    def other() -> None:
        own = MXFP8BlockScaling()
        with fuser.autocast(recipe=own):
            generator.close()
            seen.append(current_recipe())
        seen.append(current_recipe())

    # What it has entered stays entered here, so that is a context of its own.
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert isinstance(seen[0], MXFP8BlockScaling)
    assert seen[1] is None


def test_both_contexts_have_the_default_recipe() -> None:
    from fuser.precision.contexts import default_recipe

    assert default_recipe() == DelayedScaling()
    with fuser.autocast():
        assert current_recipe() == default_recipe()
    with fuser.quantized_model_init():
        weight: Any = fuser.Linear(32, 32).weight
    assert type(weight) is fuser.Float8Tensor
    with fuser.quantized_model_init(recipe=default_recipe()):
        assert type(fuser.Linear(32, 32).weight._quantizer) is type(weight._quantizer)


def test_quantized_model_init_is_off_where_it_says_so_and_back_on_after() -> None:
    with fuser.quantized_model_init(enabled=False):
        assert type(fuser.Linear(32, 32).weight) is torch.nn.Parameter
    with fuser.quantized_model_init(recipe=MXFP8BlockScaling()):
        with fuser.quantized_model_init(enabled=False, recipe=Float8CurrentScaling()):
            assert type(fuser.Linear(32, 32).weight) is torch.nn.Parameter
        assert isinstance(fuser.Linear(32, 32).weight, fuser.MXFP8Tensor)
    assert type(fuser.Linear(32, 32).weight) is torch.nn.Parameter


# -- the quantizers of an op --------------------------------------------------------


EVERY_KIND = (
    DelayedScaling(amax_history_len=2),
    Float8CurrentScaling(),
    MXFP8BlockScaling(),
    Float8BlockScaling(),
    NVFP4BlockScaling(),
    CustomRecipe(lambda role: fuser.MXFP8Quantizer()),
)


@pytest.mark.parametrize("recipe", EVERY_KIND, ids=lambda recipe: type(recipe).__name__)
def test_outside_autocast_an_op_gives_the_quantizers_it_used_last(recipe: Recipe) -> None:
    op = fuser.BasicLinear(32, 32)
    asked = [("forward", 0), ("forward", 1), ("backward", 0)]
    assert [op.get_quantizer(*which) for which in asked] == [None] * 3
    x = torch.randn(32, 32, requires_grad=True)
    with fuser.autocast(recipe=recipe):
        op(x).sum().backward()
        expected = [op.get_quantizer(*which) for which in asked]
    for before in (Float8CurrentScaling(use_power_2_scales=True), DelayedScaling()):
        for each in (before, recipe):
            with fuser.autocast(recipe=each):
                op(x).sum().backward()
        # No quantizer was asked for inside of the autocast.
        assert [str(op.get_quantizer(*which)) for which in asked] == [*map(str, expected)]
        expected = [op.get_quantizer(*which) for which in asked]
    assert [op.get_quantizer(*which) for which in asked] == expected
    assert (op.get_input_quantizer(), op.get_grad_output_quantizer()) == (expected[0], expected[2])
    with fuser.autocast(enabled=False):
        assert op.get_quantizer("forward", 0) == expected[0]
    if recipe.delayed():
        scale = op.get_quantizer("forward", 0).scale
        amax = x.detach().abs().max().reshape(1)
        # Torch multiplies a number by the reciprocal of a tensor, which is rounded twice.
        assert torch.equal(scale, torch.full_like(amax, 448) / amax)


class Asking(fuser.BasicOperation):
    """An op that quantizes wherever it is given a quantizer, and notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def num_quantizers(self, mode: str) -> int:
        return 1

    def op_forward(self, ctx: Any, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.given.append(self.get_quantizer("forward", 0))
        return input_.clone()

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        self.given.append(self.get_quantizer("backward", 0))
        return grad_output, ()


def test_a_pipeline_outside_autocast_asks_no_op_for_the_last_quantizer() -> None:
    asking, linear = Asking(), fuser.Linear(32, 32)
    alone, before = fuser.Sequential(asking), fuser.Sequential(asking, linear)
    x = torch.randn(32, 32, requires_grad=True)
    plain = before(x)
    with fuser.autocast(recipe=MXFP8BlockScaling()):
        before(x).sum().backward()
    assert asking.given[1] == asking.get_quantizer("forward", 0) is not None
    asking.given.clear()
    again = before(x)
    alone(again).sum().backward()
    assert torch.equal(again, plain)
    assert asking.given == [None] * 4


def test_every_recipe_content_is_planned_once(pipeline: fuser.OperationFuser) -> None:
    x = torch.randn(32, 32)
    recipes = [
        None,
        MXFP8BlockScaling(),
        MXFP8BlockScaling(enable_2d_quantization=True),
        MXFP8BlockScaling(backward_override="dequantized"),
        MXFP8BlockScaling(backward_override="high_precision"),
        Float8CurrentScaling(),
        Float8CurrentScaling(use_power_2_scales=True),
    ]
    for _ in range(3):
        for recipe in recipes:
            # A fresh object with the same contents: contents count, not identity.
            with fuser.autocast(enabled=recipe is not None, recipe=copy.copy(recipe)):
                pipeline(x)
    assert pipeline.planned_count == len(recipes) == len(pipeline.plans)
    assert [plan.key.recipe for plan in pipeline.plans] == recipes


def test_the_plan_names_the_recipe(pipeline: fuser.OperationFuser) -> None:
    x = torch.randn(32, 32)
    recipe = MXFP8BlockScaling(backward_override="dequantized")
    with fuser.autocast(recipe=recipe):
        text = str(pipeline.plan(x))
    assert re.search(r"MXFP8BlockScaling\(.*backward_override='dequantized'", text)
    assert "no recipe" in str(pipeline.plan(x))
