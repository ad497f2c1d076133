"""What a recipe says of its quantizers takes effect where it says so; roles for factories."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from said import holds, said

import fuser
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

ROLES = {"input": "fwd_inp", "weight": "fwd_weight", "grad_output": "bwd_grad"}
RECIPES = tuple(cls for cls in formats.RECIPES.values() if cls is not NVFP4BlockScaling)
every_role = pytest.mark.parametrize("role", ROLES)


# -- parameters of quantizers ---------------------------------------------------------


@every_role
@pytest.mark.parametrize("make", [cls for cls in RECIPES if "amax_epsilon" in cls.taken_params])
def test_an_amax_epsilon_holds_for_the_tensors_that_it_is_given_for(make: Any, role: str) -> None:
    recipe = make(**{f"fp8_quant_{ROLES[role]}": QParams(amax_epsilon=16.0, power_2_scale=True)})
    x, weight, dy = (oracles.random_tensor((128, 128), torch.float32, k) * 1e-2 for k in range(3))
    small = {"input": x, "weight": weight, "grad_output": dy}
    for one in ROLES:
        quantizer = make_quantizer(recipe, one)
        largest = 1 / (quantizer.format.element.max / 16)
        scale_inv = next(b for n, b in quantizer(small[one]).buffers().items() if "scale_inv" in n)
        assert (scale_inv.max() >= largest) == (one == role)


@every_role
def test_an_amax_epsilon_changes_what_a_pipeline_computes(role: str) -> None:
    coarse = Float8CurrentScaling(
        **{f"fp8_quant_{ROLES[role]}": QParams(amax_epsilon=1e6, power_2_scale=False)}
    )
    model = oracles.randomize(fuser.Sequential(fuser.BasicLinear(64, 64)))
    results = []
    for recipe in (Float8CurrentScaling(), coarse):
        x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
        model.zero_grad()
        with fuser.autocast(recipe=recipe):
            y = model(x)
        y.backward(oracles.random_tensor((32, 64), torch.float32, 2))
        results.append((y.detach(), x.grad, model[0].weight.grad))
    # Outputs, input gradients and weight gradients each read two of the three roles.
    reads = (("input", "weight"), ("grad_output", "weight"), ("grad_output", "input"))
    for fine, other, roles in zip(*results, reads, strict=True):
        assert torch.equal(fine, other) == (role not in roles)
    assert len(model.plans) == 2


def test_what_is_not_given_follows_from_the_other_fields_and_changes_with_them() -> None:
    names = [f"fp8_quant_{name}" for name in ROLES.values()]
    for recipe, is_pow2 in (
        (Float8CurrentScaling(), False),
        (Float8CurrentScaling(use_power_2_scales=True), True),
        (dataclasses.replace(Float8CurrentScaling(), use_power_2_scales=True), True),
        (dataclasses.replace(Float8CurrentScaling(True), use_power_2_scales=False), False),
        (Float8BlockScaling(), True),
        (dataclasses.replace(Float8BlockScaling(), use_f32_scales=True), False),
    ):
        assert [getattr(recipe, name) for name in names] == [QParams(power_2_scale=is_pow2)] * 3
    plain = NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True)
    assert plain.fp4_quant_fwd_inp == plain.fp4_quant_fwd_weight == QParams()
    assert plain.fp4_quant_bwd_grad == QParams(stochastic_rounding=True)
    full = dataclasses.replace(plain, disable_rht=False, disable_2d_quantization=False)
    assert full == NVFP4BlockScaling()
    assert full.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert full.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)


def test_what_is_given_stays_when_another_field_changes() -> None:
    given = QParams(amax_epsilon=0.5)
    recipe = Float8CurrentScaling(fp8_quant_fwd_inp=given)
    changed = dataclasses.replace(recipe, use_power_2_scales=True)
    assert changed.fp8_quant_fwd_inp == given
    assert changed.fp8_quant_fwd_weight == QParams(power_2_scale=True)
    # Made from one that followed the recipe, it no longer does.
    own = dataclasses.replace(Float8CurrentScaling().fp8_quant_fwd_inp, amax_epsilon=0.5)
    assert dataclasses.replace(changed, fp8_quant_fwd_inp=own) == changed


def test_a_subclass_may_name_parameters_of_its_own() -> None:
    class Careful(Float8CurrentScaling):
        fp8_quant_bwd_grad = QParams(amax_epsilon=0.25)

    assert make_quantizer(Careful(), "grad_output").amax_epsilon == 0.25
    assert make_quantizer(Careful(), "input").amax_epsilon == 0
    assert Careful(fp8_quant_bwd_grad=QParams()).fp8_quant_bwd_grad == QParams()


def test_parameters_are_part_of_the_value() -> None:
    recipes = [
        Float8CurrentScaling(),
        *(
            Float8CurrentScaling(**{f"fp8_quant_{name}": QParams(amax_epsilon=epsilon)})
            for name in ROLES.values()
            for epsilon in (0.5, 0.25)
        ),
        *(
            NVFP4BlockScaling(**{f"fp4_quant_{name}": params})
            for name in ROLES.values()
            for params in (QParams(fp4_2d_quantization=True, stochastic_rounding=True),)
        ),
    ]
    assert len(set(recipes)) == len(recipes)
    for recipe in recipes:
        for twin in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
            assert twin == recipe
            assert hash(twin) == hash(recipe)
    assert str(recipes[0]) == "Float8CurrentScaling()"
    assert str(recipes[1]) == "Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=0.5))"


@every_role
def test_nvfp4_quantizes_each_role_as_its_parameters_say(role: str) -> None:
    params = QParams(
        random_hadamard_transform=True, stochastic_rounding=True, fp4_2d_quantization=True
    )
    quantizer = make_quantizer(NVFP4BlockScaling(**{f"fp4_quant_{ROLES[role]}": params}), role)
    assert quantizer.with_rht
    assert quantizer.stochastic_rounding
    assert quantizer.with_2d_quantization


# -- what there is none of ------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_dpa", "fp8_mha"])
@pytest.mark.parametrize("recipe", [*RECIPES, NVFP4BlockScaling])
def test_quantized_attention_is_accepted_off_and_refused_on(recipe: Any, name: str) -> None:
    assert recipe(**{name: False}) == recipe()
    assert getattr(recipe(), name) is False
    with pytest.raises(
        fuser.InputError,
        match=said("recipe-only-accepted-value", recipe.__name__, name, True, holds("attention")),
    ):
        recipe(**{name: True})


@pytest.mark.parametrize(
    ("recipe", "off", "on"),
    [
        (NVFP4BlockScaling, {"nvfp4_4over6": "none"}, {"nvfp4_4over6": "some"}),
        (NVFP4BlockScaling, {"nvfp4_4over6_err_mode": "MAE"}, {"nvfp4_4over6_err_mode": "L1"}),
        (NVFP4BlockScaling, {"fp4_format": Format.E2M1}, {"fp4_format": Format.E4M3}),
        (NVFP4BlockScaling, {"fp8_format": Format.E4M3}, {"fp8_format": Format.HYBRID}),
        (MXFP8BlockScaling, {"margin": 0}, {"margin": 1}),
        (
            DelayedScaling,
            {"scaling_factor_compute_algo": None},
            {"scaling_factor_compute_algo": len},
        ),
    ],
)
def test_what_is_not_here_is_accepted_off_and_refused_on(
    recipe: type[Recipe], off: dict[str, Any], on: dict[str, Any]
) -> None:
    assert recipe(**off) == recipe()
    (name,) = on
    with pytest.raises(fuser.InputError, match=rf"{recipe.__name__} got {name}"):
        recipe(**on)


@pytest.mark.parametrize(
    ("recipe", "name", "params", "words"),
    [
        (Float8CurrentScaling, "fp8_quant_fwd_inp", {"stochastic_rounding": True}, "amax_epsilon"),
        (Float8BlockScaling, "fp8_quant_bwd_grad", {"fp4_2d_quantization": True}, "power_2_scale"),
        (NVFP4BlockScaling, "fp4_quant_fwd_inp", {"amax_epsilon": 1.0}, "stochastic_rounding"),
    ],
)
def test_parameters_that_no_quantizer_of_the_recipe_has_are_refused(
    recipe: Any, name: str, params: dict[str, Any], words: str
) -> None:
    (param,) = params
    with pytest.raises(
        fuser.InputError,
        match=said("recipe-quantizers-leave-rest", None, name, param, None, holds(words)),
    ):
        recipe(**{name: QParams(**params)})


@pytest.mark.parametrize("epsilon", [-1.0, float("inf"), float("nan")])
def test_an_amax_epsilon_is_finite_and_not_negative(epsilon: float) -> None:
    with pytest.raises(fuser.InputError, match=said("recipe-qparams-epsilon-finite")):
        QParams(amax_epsilon=epsilon)


def test_formats_say_their_largest_values() -> None:
    assert {form.name: tuple(form.value) for form in Format} == {
        "E2M1": (6, 6),
        "E4M3": (448, 448),
        "E5M2": (57344, 57344),
        "HYBRID": (448, 57344),
    }
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)


def test_a_recipe_and_its_class_answer_which_one_it_is() -> None:
    for one in (DelayedScaling, DelayedScaling(), Float8CurrentScaling, Float8CurrentScaling()):
        assert one.float8_per_tensor_scaling()
    assert not MXFP8BlockScaling.float8_per_tensor_scaling()
    assert MXFP8BlockScaling.mxfp8()


# -- roles ----------------------------------------------------------------------------


def test_a_factory_is_asked_once_for_each_quantizer_of_an_op() -> None:
    asked: list[Any] = []

    def factory(role: Any) -> Any:
        asked.append(role)
        return fuser.Float8CurrentScalingQuantizer(fuser.DType.kFloat8E4M3)

    model = fuser.Sequential(fuser.Linear(32, 32), fuser.GELU(), fuser.Linear(32, 32))
    model[0].members[0].name, model[2].members[0].name = "fc1", "fc2"
    recipe = CustomRecipe(qfactory=factory)
    x = torch.randn(32, 32, requires_grad=True)
    with fuser.autocast(recipe=recipe):
        model.plan(x)
        for _ in range(2):
            model(x).sum().backward()
            model.eval()(x)
            model.train()
    seen = [(role.module_type, role.tensor_type, role.name) for role in asked]
    assert sorted(seen) == [
        ("linear", tensor, name) for tensor in sorted(ROLES) for name in ("fc1", "fc2")
    ]
    with fuser.autocast(recipe=Float8CurrentScaling()):
        model(x)
    with fuser.autocast(recipe=recipe):
        model(x)
    assert len(asked) == 6


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_an_op_that_ran_under_a_factory_is_copied_without_it(duplicate: Any) -> None:
    """Neither the factory nor its quantizers can be pickled; a copy asks the factory anew."""

    class Local(fuser.MXFP8Quantizer):
        pass

    asked: list[Any] = []

    def factory(role: Any) -> Any:
        asked.append(role)
        return Local()

    op, x = fuser.BasicLinear(32, 32), torch.randn(32, 32, requires_grad=True)
    with fuser.autocast(recipe=CustomRecipe(qfactory=factory)):
        op(x).sum().backward()
        handed = op.get_quantizer("forward", 0)
        count = len(asked)
        twin = duplicate(op)
        assert type(twin.get_quantizer("forward", 0)) is type(handed)
        assert twin.get_quantizer("forward", 0) is not handed
        assert torch.equal(twin(x), op(x))
        assert len(asked) == 2 * count
    assert duplicate(op).get_quantizer("forward", 0) is None


def test_a_plan_is_that_of_the_formats_that_a_factory_gives_each_op() -> None:
    """The factory tells ops apart by name; each linear is quantized as it says."""

    def factory(role: Any) -> Any:
        fp8 = fuser.DType.kFloat8E4M3
        return (
            fuser.MXFP8Quantizer(fp8)
            if role.name == "mx"
            else fuser.Float8BlockQuantizer(
                fp8, block_scaling_dim=2 if role.tensor_type == "weight" else 1
            )
        )

    model = oracles.randomize(fuser.Sequential(fuser.Linear(64, 64), fuser.Linear(64, 64)))
    model[1].members[0].name = "mx"
    x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
    with fuser.autocast(recipe=CustomRecipe(qfactory=factory)):
        text = str(model.plan(x))
        y = model(x)
    assert "MXFP8 E4M3" in text
    assert "FP8 1x128 E4M3" in text
    h = x.detach()
    for linear, recipe in zip(
        list(model), (Float8BlockScaling(), MXFP8BlockScaling()), strict=True
    ):
        with fuser.autocast(recipe=recipe):
            h = linear(h)
    assert torch.equal(y, h)


def test_a_role_is_equal_to_the_name_of_its_tensor_and_to_a_role_of_the_same_contents() -> None:
    role = fuser.QuantizerRole("linear", "weight", "fc1")
    assert role == "weight"
    assert role != "input"
    assert {"weight": 1, "input": 2}[role] == 1
    assert role == fuser.QuantizerRole(module_type="linear", tensor_type="weight", name="fc1")
    assert role != fuser.QuantizerRole("linear", "weight", "fc2")
    assert f"{role}" == "weight"
    with pytest.raises(dataclasses.FrozenInstanceError):
        role.name = "fc2"  # type: ignore[misc]
    assert fuser.QuantizerRole() == fuser.QuantizerRole("", "", "")


def test_quantized_weights_are_made_by_the_factory_too() -> None:
    roles: list[Any] = []

    def factory(role: Any) -> Any:
        roles.append(role)
        return fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)

    with fuser.quantized_model_init(recipe=CustomRecipe(qfactory=factory)):
        linear = fuser.BasicLinear(32, 32)
    assert isinstance(linear.weight, fuser.MXFP8Tensor)
    assert roles == [fuser.QuantizerRole("linear", "weight", "")]
