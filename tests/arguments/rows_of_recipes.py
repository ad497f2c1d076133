"""Rows of the arguments of recipes: what linears compute, against the formats in fp64."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import operands_in_fp64 as formats
import pytest
import torch
from argument_rows import Of, sets
from number_formats import E4M3, E5M2, delayed_scale_loop
from operands_in_fp64 import (
    Format,
    Operands,
    Product,
    around,
    assert_experts_compute,
    assert_linear_computes,
    samples,
)

import fuser
from fuser import gemm
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
    recipe_named,
)
from fuser.recipe import Format as FloatFormat

Given = dict[str, Any]


def path_of(cls: type) -> str:
    return f"fuser.recipe.{cls.__name__}"


def computes(
    make: Any,
    operands: Operands,
    argument: str,
    value: Any,
    *,
    in_bf16: bool = False,
    **others: Any,
) -> None:
    """A row: a linear under the recipe multiplies these operands; in experts each group does.

    ``in_bf16``, where scales are powers of two, a linear of 16 bits does so too.
    """

    @sets(path_of(make), **{argument: value})
    def operands_of_products(given: Given) -> None:
        recipe = make(**others, **given)
        assert_linear_computes(recipe, operands)
        if in_bf16:
            assert_linear_computes(recipe, operands, torch.bfloat16)
        assert_experts_compute(recipe, operands)


def refusal_of(call: Callable[[], object]) -> str:
    """The sentence of the error that a call raises; empty without one."""
    try:
        call()
    except fuser.InputError as error:
        return str(error)
    return ""


def refuses(path: str, make: Any, words: str, **values: Any) -> None:
    """Rows of arguments that are there for their names: another value is refused, with a reason."""

    @sets(path, **values)
    def sentence_of_the_refusal(given: Given) -> None:
        sentence = refusal_of(lambda: make(**given))
        assert words in sentence
        assert all(name in sentence for name in given)


# -- formats and scales --------------------------------------------------------------

one, rows, blocks, mxfp8, nvfp4 = (
    formats.one_scale,
    formats.rows,
    formats.blocks,
    formats.mxfp8,
    formats.nvfp4,
)
HYBRID, ALL_E4M3 = FloatFormat.HYBRID, FloatFormat.E4M3


def all_of(operand: Format) -> Operands:
    return Operands(operand, operand, operand)


CURRENT = Operands(one(), one(), one(E5M2))
ROWWISE = all_of(rows())
BLOCK = Operands(blocks(1), blocks(2), blocks(1))
MXFP8 = all_of(mxfp8())
computes(
    Float8CurrentScaling,
    Operands(one(pow2=True), one(pow2=True), one(E5M2, pow2=True)),
    "use_power_2_scales",
    True,
    in_bf16=True,
)
computes(Float8CurrentScaling, all_of(one()), "fp8_format", ALL_E4M3)
computes(Float8RowwiseScaling, all_of(rows(pow2=True)), "use_power_2_scales", True, in_bf16=True)
computes(Float8RowwiseScaling, Operands(rows(), rows(), rows(E5M2)), "fp8_format", HYBRID)
computes(
    Float8BlockScaling,
    Operands(blocks(1, pow2=False), blocks(2, pow2=False), blocks(1, pow2=False)),
    "use_f32_scales",
    True,
)
computes(
    Float8BlockScaling, BLOCK._replace(grad=blocks(1, E5M2)), "fp8_format", HYBRID, in_bf16=True
)
computes(Float8BlockScaling, all_of(blocks(1)), "w_block_scaling_dim", 1, in_bf16=True)
of_one_dim: dict[str, Any] = {"w_block_scaling_dim": 1, "in_bf16": True}
computes(
    Float8BlockScaling,
    all_of(blocks(1))._replace(input=blocks(2)),
    "x_block_scaling_dim",
    2,
    **of_one_dim,
)
computes(
    Float8BlockScaling,
    all_of(blocks(1))._replace(grad=blocks(2)),
    "grad_block_scaling_dim",
    2,
    **of_one_dim,
)
computes(MXFP8BlockScaling, MXFP8._replace(grad=mxfp8(E5M2)), "fp8_format", HYBRID, in_bf16=True)
computes(
    MXFP8BlockScaling,
    MXFP8._replace(weight=mxfp8(is_square=True)),
    "enable_2d_quantization",
    True,
    in_bf16=True,
)

# -- NVFP4 ----------------------------------------------------------------------------

TURNED = nvfp4(hadamard=True)
NVFP4 = Operands(TURNED, nvfp4(is_square=True), TURNED)
PLAIN_NVFP4 = Operands(nvfp4(), nvfp4(is_square=True), nvfp4())
exactly: dict[str, Any] = {"disable_stochastic_rounding": True}
untransformed: dict[str, Any] = {**exactly, "disable_rht": True}
computes(NVFP4BlockScaling, NVFP4, "disable_stochastic_rounding", True)
computes(NVFP4BlockScaling, PLAIN_NVFP4, "disable_rht", True, **exactly)
computes(
    NVFP4BlockScaling, NVFP4._replace(weight=nvfp4()), "disable_2d_quantization", True, **exactly
)
computes(
    NVFP4BlockScaling,
    NVFP4._replace(input=nvfp4(hadamard=True, of_rows=True)),
    "row_scaled_activation",
    True,
    **exactly,
)


def four_over_six(
    argument: str, value: Any, of_input: Given, of_weight: Given, **scope: Any
) -> None:
    operands = PLAIN_NVFP4._replace(
        input=nvfp4(**of_input), weight=nvfp4(is_square=True, **of_weight)
    )
    computes(NVFP4BlockScaling, operands, argument, value, **untransformed, **scope)


absolute, square = {"error": "MAE", "largest": 256}, {"error": "MSE", "largest": 256}
four_over_six("nvfp4_4over6", "all", absolute, absolute)
four_over_six("nvfp4_4over6_err_mode", "MSE", square, square, nvfp4_4over6="all")
of_448 = {"error": "MAE"}
# Of "weights", a part of a block of the samples has two errors that are equal.
four_over_six("nvfp4_4over6_e4m3_use_256", "activations", absolute, of_448, nvfp4_4over6="all")


# -- parameters of one role -----------------------------------------------------------

ROLES = {"fwd_inp": "input", "fwd_weight": "weight", "bwd_grad": "grad"}
FLOOR = 1e6
"""Above the amaxes of the samples, so that it is the amax of each scale."""
for _make, _plain, _floored in (
    (Float8CurrentScaling, CURRENT, lambda to: one(to, eps=FLOOR)),
    (Float8RowwiseScaling, ROWWISE, lambda to: rows(to, eps=FLOOR)),
    (Float8BlockScaling, BLOCK, None),
):
    for _name, _role in ROLES.items():
        _to = E5M2 if _make is Float8CurrentScaling and _role == "grad" else E4M3
        _dim = 2 if _role == "weight" else 1
        _floor = blocks(_dim, pow2=False, eps=FLOOR) if _floored is None else _floored(_to)
        _operands = _plain._replace(**{_role: _floor})
        computes(_make, _operands, f"fp8_quant_{_name}", QParams(amax_epsilon=FLOOR))
computes(
    NVFP4BlockScaling, NVFP4._replace(input=nvfp4()), "fp4_quant_fwd_inp", QParams(), **exactly
)
computes(
    NVFP4BlockScaling, NVFP4._replace(weight=nvfp4()), "fp4_quant_fwd_weight", QParams(), **exactly
)
computes(
    NVFP4BlockScaling, NVFP4._replace(grad=nvfp4()), "fp4_quant_bwd_grad", QParams(), **exactly
)


@sets("fuser.recipe.QParams", power_2_scale=True, amax_epsilon=FLOOR)
def _scales_of_inputs(given: Given) -> None:
    recipe = Float8CurrentScaling(fp8_quant_fwd_inp=QParams(**given))
    options = {"power_2_scale": {"pow2": True}, "amax_epsilon": {"eps": FLOOR}}
    expected = one(**options.get(next(iter(given), ""), {"pow2": True, "eps": FLOOR}))
    assert_linear_computes(recipe, CURRENT._replace(input=expected))


@sets("fuser.recipe.QParams", random_hadamard_transform=True, fp4_2d_quantization=True)
def _blocks_of_inputs(given: Given) -> None:
    recipe = NVFP4BlockScaling(**untransformed, fp4_quant_fwd_inp=QParams(**given))
    expected = nvfp4(is_square=True) if "fp4_2d_quantization" in given else TURNED
    assert_linear_computes(recipe, PLAIN_NVFP4._replace(input=expected))


@sets("fuser.recipe.QParams", stochastic_rounding=True)
def _rounding_of_inputs(given: Given) -> None:
    """Of equal values between two of the format, as many go up as their place says."""
    recipe = NVFP4BlockScaling(**untransformed, fp4_quant_fwd_inp=QParams(**given))
    linear = fuser.BasicLinear(16, 16)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(16))
    x = torch.full((1024, 16), 2.25)
    x[:, 0] = 6.0
    with fuser.autocast(recipe=recipe):
        y = linear(x)
    assert torch.equal(y[:, 0], x[:, 0])
    rest = y[:, 1:].detach()
    assert set(rest.unique().tolist()) == {2.0, 3.0}
    assert abs(float(rest.mean()) - 2.25) < 0.02


# -- accumulators ----------------------------------------------------------------------

PASSES = {"fprop": "quantized_linear", "dgrad": "quantized_dgrad", "wgrad": "quantized_wgrad"}


@contextlib.contextmanager
def _noting_accumulators() -> Iterator[dict[str, bool]]:
    """By pass: whether its product was asked for a split accumulator."""
    found: dict[str, bool] = {}

    def noting(name: str, product: Any) -> Any:
        def noted(*args: Any, is_split: bool, **keywords: Any) -> Any:
            found[name] = is_split
            return product(*args, is_split=is_split, **keywords)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name, function in PASSES.items():
            patch.setattr(gemm, function, noting(name, getattr(gemm, function)))
        yield found


def accumulates(make: Any, operands: Operands, default: tuple[bool, bool, bool]) -> None:
    """Rows of the parameters of the three products: one alone changes."""
    for place, name in enumerate(PASSES):
        expected = [is_split != (at == place) for at, is_split in enumerate(default)]

        @sets(path_of(make), **{f"fp8_gemm_{name}": MMParams(not default[place])})
        def accumulators(given: Given, expected: list[bool] = expected) -> None:
            with _noting_accumulators() as found:
                assert_linear_computes(make(**given), operands)
            assert [found[name] for name in PASSES] == expected
            assert list(make(**given).split_accumulators) == expected


accumulates(Float8CurrentScaling, CURRENT, (False, True, True))
accumulates(Float8RowwiseScaling, ROWWISE, (False, True, True))
accumulates(Float8BlockScaling, BLOCK, (True, True, True))


@sets("fuser.recipe.MMParams", use_split_accumulator=False)
def _accumulator_of_dgrad(given: Given) -> None:
    recipe = Float8RowwiseScaling(fp8_gemm_dgrad=MMParams(**given))
    for check in (assert_linear_computes, assert_experts_compute):
        with _noting_accumulators() as found:
            check(recipe, ROWWISE)
        assert found == {"fprop": False, "dgrad": False, "wgrad": True}


# -- the override of backward ----------------------------------------------------------


def overrides(make: Any, operands: Operands, value: str, **others: Any) -> None:
    """Rows of ``backward_override``, of which the check tries both values."""

    @sets(path_of(make), backward_override=value)
    def operands_of_backward(given: Given) -> None:
        assert_linear_computes(make(**others, **given), operands._replace(override=value))
        other = "dequantized" if value == "high_precision" else "high_precision"
        recipe = make(**others, backward_override=other)
        assert_linear_computes(recipe, operands._replace(override=other))
        assert_experts_compute(make(**others, **given), operands._replace(override=value))


overrides(Float8CurrentScaling, CURRENT, "dequantized")
overrides(Float8RowwiseScaling, ROWWISE, "high_precision")
overrides(Float8BlockScaling, BLOCK, "dequantized")
overrides(MXFP8BlockScaling, MXFP8, "high_precision")
overrides(NVFP4BlockScaling, NVFP4, "dequantized")


def mixed(role: Any) -> fuser.Quantizer:
    """The quantizers of a user: a format for each role."""
    return {
        "input": fuser.MXFP8Quantizer(),
        "weight": fuser.Float8CurrentScalingQuantizer(fuser.DType.kFloat8E5M2),
        "grad_output": fuser.Float8RowwiseQuantizer(),
    }[str(role)]


MIXED = Operands(mxfp8(), one(E5M2), rows())
overrides(CustomRecipe, MIXED, "dequantized", qfactory=mixed)


@sets(
    "fuser.recipe.CustomRecipe",
    qfactory=Of(mixed, instead=lambda role: fuser.Float8CurrentScalingQuantizer()),
)
def _operands_of_the_factory(given: Given) -> None:
    assert_linear_computes(CustomRecipe(**given), MIXED)
    assert_experts_compute(CustomRecipe(**given), MIXED)


@sets("fuser.recipe.Recipe", backward_override="dequantized")
def _override_of_any_recipe(given: Given) -> None:
    recipe = Recipe(**given)
    assert not recipe.quantizes_backward
    assert recipe == Recipe(backward_override="dequantized") != Recipe()


# -- delayed scaling -------------------------------------------------------------------

SIZES = (1.0, 16.0, 0.5, 0.25, 0.125)
"""Of the input, the weight and the gradient, step by step."""


def assert_steps_compute(
    recipe: Any,
    *,
    length: int = 1024,
    algorithm: str = "max",
    margin: int = 0,
    of_grads: Any = E5M2,
    exact_wgrad: bool = False,
    factor: float = 1.0,
    in_experts: bool = False,
) -> None:
    """Steps of a linear under a recipe or in a context: scales are those of the defining loop.

    ``factor`` is how much larger the amaxes of another rank are.
    """
    of_x, of_weight, of_dy = samples()
    linear: Any = (
        fuser.GroupedLinear(1, formats.INPUTS, formats.OUTPUTS, bias=False)
        if in_experts
        else fuser.BasicLinear(formats.INPUTS, formats.OUTPUTS)
    )
    (parameter,) = linear.parameters()
    rows_of_groups = (torch.tensor([len(of_x)]),) if in_experts else ()
    seen: list[tuple[float, ...]] = []
    for size in SIZES:
        x, weight, dy = of_x * size, of_weight * size, of_dy * size
        with torch.no_grad():
            parameter.copy_(weight)
        parameter.grad = None
        leaf = x.clone().requires_grad_()
        with around(recipe):
            y = linear(leaf, *rows_of_groups)
        y.backward(dy)
        scales = [1.0, 1.0, 1.0]
        for place, largest in enumerate((448.0, 448.0, of_grads.max)):
            steps = [factor * amaxes[place] for amaxes in seen]
            loop = delayed_scale_loop(steps, length, largest, 1.0, margin, algorithm)
            scales[place] = loop[-1][0] if loop else 1.0
        operands = Operands(
            formats.a_scale(scales[0]),
            formats.a_scale(scales[1]),
            formats.a_scale(scales[2], of_grads),
        )
        exact = operands.products(x.numpy(), weight.numpy(), dy.numpy())
        if exact_wgrad:
            exact["dw"] = Product.of(dy.numpy().T, x.numpy())
        found = {"y": y, "dx": leaf.grad, "dw": parameter.grad}
        for name, tensor in found.items():
            exact[name].assert_equals(tensor, f"{name} at size {size}")
        seen.append(tuple(float(tensor.abs().max()) for tensor in (x, weight, dy)))


@sets("fuser.recipe.DelayedScaling", margin=3)
def _scales_with_a_margin(given: Given) -> None:
    assert_steps_compute(DelayedScaling(**given), margin=3)
    assert_steps_compute(DelayedScaling(**given), margin=3, in_experts=True)


@sets("fuser.recipe.DelayedScaling", fp8_format=ALL_E4M3)
def _scales_of_gradients_in_e4m3(given: Given) -> None:
    assert_steps_compute(DelayedScaling(**given), of_grads=E4M3)
    assert_steps_compute(DelayedScaling(**given), of_grads=E4M3, in_experts=True)


@sets("fuser.recipe.DelayedScaling", amax_history_len=2)
def _scales_from_the_last_two_amaxes(given: Given) -> None:
    assert_steps_compute(DelayedScaling(**given), length=2)
    assert_steps_compute(DelayedScaling(**given), length=2, in_experts=True)


@sets("fuser.recipe.DelayedScaling", amax_compute_algo="most_recent")
def _scales_from_the_last_amax(given: Given) -> None:
    assert_steps_compute(DelayedScaling(**given), algorithm="most_recent")
    assert_steps_compute(DelayedScaling(**given), algorithm="most_recent", in_experts=True)


@sets("fuser.recipe.DelayedScaling", override_linear_precision=(False, False, True))
def _weight_gradients_of_the_values(given: Given) -> None:
    assert_steps_compute(DelayedScaling(**given), exact_wgrad=True)
    assert_steps_compute(DelayedScaling(**given), exact_wgrad=True, in_experts=True)


@contextlib.contextmanager
def beside_a_larger_rank(
    factor: float, first: int = 0, own: list[Any] | None = None
) -> Iterator[list[Any]]:
    """In a process group of two, whose other rank has amaxes ``factor`` times as large.

    It stands in for ranks: reductions multiply, from element ``first`` on. Yields the groups over
    which they went. A group of its own is added to ``own``.
    """
    distributed = torch.distributed
    groups: list[Any] = []

    def largest(tensor: torch.Tensor, op: Any = None, group: Any = None, **_: Any) -> None:
        groups.append(group)
        tensor[first:] = torch.where(tensor[first:] > 0, tensor[first:] * factor, tensor[first:])

    def gathered(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        if own is not None:
            own.append(distributed.new_group([0]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "get_world_size", lambda group=None: 2)
            patch.setattr(distributed, "all_reduce", largest)
            patch.setattr(distributed, "all_gather_object", gathered)
            yield groups
    finally:
        distributed.destroy_process_group()


FLAGS = 2
"""Elements of a message of delayed scaling before its amaxes."""


@sets("fuser.recipe.DelayedScaling", reduce_amax=False)
def _amaxes_of_this_rank(given: Given) -> None:
    with beside_a_larger_rank(4.0, FLAGS) as groups:
        assert_steps_compute(DelayedScaling(), factor=4.0)
        assert groups
        assert_steps_compute(DelayedScaling(**given))


# -- arguments with one value -------------------------------------------------------------

of_all: tuple[tuple[Any, Given], ...] = (
    (Recipe, {}),
    (Float8CurrentScaling, {}),
    (Float8RowwiseScaling, {}),
    (Float8BlockScaling, {}),
    (MXFP8BlockScaling, {}),
    (NVFP4BlockScaling, {}),
    (DelayedScaling, {}),
    (CustomRecipe, {"qfactory": mixed}),
)
for _any, _options in of_all:
    refuses(
        path_of(_any),
        functools.partial(_any, **_options),
        "attention is not quantized",
        fp8_dpa=True,
        fp8_mha=True,
    )
refuses(
    path_of(DelayedScaling),
    DelayedScaling,
    "set by the one formula",
    scaling_factor_compute_algo=lambda *_: 1.0,
)
refuses(
    path_of(DelayedScaling), DelayedScaling, "Float8CurrentScaling", backward_override="dequantized"
)
refuses(path_of(MXFP8BlockScaling), MXFP8BlockScaling, "follow from amaxes alone", margin=1)
refuses(path_of(NVFP4BlockScaling), NVFP4BlockScaling, "it takes E2M1", fp4_format=ALL_E4M3)
refuses(path_of(NVFP4BlockScaling), NVFP4BlockScaling, "it takes E4M3", fp8_format=HYBRID)


# -- names and roles ------------------------------------------------------------------------


@sets("fuser.recipe.recipe_named", name=Of("rowwise", instead="current"))
def _recipe_of_a_name(given: Given) -> None:
    assert recipe_named(**given) == Float8RowwiseScaling()
    assert_linear_computes(recipe_named(**given), ROWWISE)


@sets("fuser.QuantizerRole", module_type="linear", tensor_type="weight", name="second")
def _role_that_a_factory_gets(given: Given) -> None:
    """Each of its three fields tells the tensor; the factory makes this one's of row scales."""
    whole = {"module_type": "linear", "tensor_type": "weight", "name": "second"}
    others = {name: value for name, value in whole.items() if name not in given}
    chosen = fuser.QuantizerRole(**(others if given else {}), **given)

    def factory(role: Any) -> fuser.Quantizer:
        is_chosen = role == chosen
        assert is_chosen == (hash(role) == hash(chosen) and vars(role) == vars(chosen))
        return fuser.Float8RowwiseQuantizer() if is_chosen else fuser.MXFP8Quantizer()

    x, weight, _ = (tensor.numpy() for tensor in samples())
    first, second = (fuser.BasicLinear(formats.INPUTS, formats.OUTPUTS) for _ in range(2))
    first.name, second.name = "first", "second"
    for linear, of_weight in ((first, mxfp8()), (second, rows())):
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight))
        with fuser.autocast(recipe=CustomRecipe(factory)):
            y = linear(torch.from_numpy(x))
        product = Product.of(mxfp8()(x).rowwise, of_weight(weight).rowwise.T)
        product.assert_equals(y, linear.name)
