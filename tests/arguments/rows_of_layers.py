"""Rows of the arguments of layers: ``fuser.modules``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import oracles
import torch
from argument_checks import (
    BF16,
    E4M3,
    FP32,
    QUANTIZED,
    TOLERANCES,
    Tracker,
    accumulates,
    added,
    added_in_backward,
    agrees,
    agrees_quantized,
    fill,
    gathered,
    is_drawn_by_the_tracker,
    is_on_meta_until_its_first_call,
    near,
    parameters_are_in,
    rank_0_of_2,
    refuses,
    scattered,
)
from argument_rows import Of, ignores, sets
from oracles import Formula, random_tensor
from rows_of_groups import check as check_groups
from rows_of_groups import check_delayed, grouped

import fuser
from fuser import modules
from fuser.modules import layers

X = random_tensor((4, 6), BF16, 1)
SIZES = torch.tensor([1, 3])

# Options that change what a layer does.
TAKEN = (
    "parallel_mode",
    "tensor_parallel_mode",
    "tp_group",
    "tensor_parallel_group",
    "tp_size",
    "sequence_parallel",
    "set_parallel_mode",
    "get_rng_state_tracker",
    "rng_state_tracker_function",
    "fuse_wgrad_accumulation",
    "accumulate_into_main_grad",
)
# Options for work that a layer does not do; it refuses to be asked for it.
REFUSED = {
    **dict.fromkeys(
        (
            *("return_bias", "return_layernorm_output", "return_layernorm_output_gathered"),
            *("save_original_input", "checkpoint", "ub_overlap_ag", "ub_overlap_rs"),
            *("ub_overlap_rs_dgrad", "ub_overlap_rs_fprop", "ub_overlap_ag_fprop"),
            *("ub_overlap_ag_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad"),
        ),
        True,
    ),
    "parameters_split": ("query", "key"),
    "symmetric_ar_type": "multimem_all_reduce",
}
IGNORED = ("ub_name", "seq_length", "micro_batch_size")
NAMES = (*TAKEN, *REFUSED, *IGNORED)
OPTIONS = {
    "fuser.modules.GroupedLinear": NAMES,
    **dict.fromkeys(
        (f"fuser.modules.{name}" for name in ("LayerNormLinear", "LayerNormMLP", "Linear")),
        (*NAMES, "delay_wgrad_compute"),
    ),
}
ALONE, EVERYONE = "the group of one rank", "the group of all ranks"
"""Stand for groups that there are only while a check runs."""

Make = Callable[..., Any]


def _linear(**options: Any) -> Any:
    return modules.Linear(**{"in_features": 6, "out_features": 8, **options})


def _norm_linear(**options: Any) -> Any:
    return modules.LayerNormLinear(**{"in_features": 6, "out_features": 8, **options})


def _mlp(**options: Any) -> Any:
    return modules.LayerNormMLP(**{"hidden_size": 6, "ffn_hidden_size": 8, **options})


class _Grouped(modules.GroupedLinear):
    """With defaults for its sizes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"num_gemms": 2, "in_features": 6, "out_features": 8, **options})


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _of_linear(
    *, bias: bool = True, before: Formula = _same, after: Formula = _same, **_: Any
) -> Formula:
    def formula(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> Any:
        y = before(x) @ weight.mT
        return after(y + rest[0] if bias else y)

    return formula


def _of_norm_linear(
    *,
    normalization: str = "LayerNorm",
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    **others: Any,
) -> Formula:
    norm = {"LayerNorm": oracles.layernorm, "RMSNorm": oracles.rmsnorm}[normalization]
    count = 2 if normalization == "LayerNorm" else 1

    def formula(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        normed = norm(eps=eps, zero_centered=zero_centered_gamma)(x, *parameters[:count])
        return _of_linear(**others)(normed, *parameters[count:])

    return formula


def _of_mlp(
    *,
    act: Formula = oracles.gelu,
    bias: bool = True,
    before: Formula = _same,
    after: Formula = _same,
    **others: Any,
) -> Formula:
    def formula(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        count = 2 if bias else 1
        first, second = parameters[:-count], parameters[-count:]
        hidden = act(_of_norm_linear(bias=bias, before=before, **others)(x, *first))
        return _of_linear(bias=bias, after=after)(hidden, *second)

    return formula


# By name: how to make the layer, its formula, and the names of its weights.
LAYERS: dict[str, tuple[Make, Callable[..., Formula], tuple[str, ...]]] = {
    "Linear": (_linear, _of_linear, ("weight",)),
    "LayerNormLinear": (_norm_linear, _of_norm_linear, ("weight",)),
    "LayerNormMLP": (_mlp, _of_mlp, ("fc1_weight", "fc2_weight")),
}


def check(make: Make, given: dict[str, Any], formula: Formula) -> None:
    agrees(partial(make, **given), formula, X, in_pipelines=False)


def check_quantized(make: Make, given: dict[str, Any], formula: Formula) -> None:
    """A layer is a pipeline of its own, under the recipe."""
    agrees_quantized(partial(make, **given), formula, X, tolerance=0.3, has_stored=True)


def _named(layer: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(layer, name) for name in names]


# -- sizes, and rows that all layers have -----------------------------------------------


@sets("fuser.modules.Linear", in_features=Of(6, instead=5), out_features=Of(8, instead=7))
def _sizes_of_a_linear_layer(given: dict[str, Any]) -> None:
    assert tuple(_linear(**given).weight.shape) == (8, 6)
    check(_linear, given, _of_linear())


@sets("fuser.modules.LayerNormLinear", in_features=Of(6, instead=5), out_features=Of(8, instead=7))
def _sizes_of_a_norm_and_a_linear(given: dict[str, Any]) -> None:
    layer = _norm_linear(**given)
    shapes = [tuple(p.shape) for p in layer.parameters()]
    assert shapes == [(6,), (6,), (8, 6), (8,)]
    check(_norm_linear, given, _of_norm_linear())


@sets("fuser.modules.LayerNormMLP", hidden_size=Of(6, instead=5), ffn_hidden_size=Of(8, instead=7))
def _sizes_of_a_feed_forward_block(given: dict[str, Any]) -> None:
    shapes = {name: tuple(p.shape) for name, p in _mlp(**given).named_parameters()}
    assert shapes["fc1_weight"] == (8, 6)
    assert shapes["fc2_weight"] == (6, 8)
    check(_mlp, given, _of_mlp())
    wide = {name: tuple(p.shape) for name, p in _mlp(activation="glu", **given).named_parameters()}
    assert wide["fc1_weight"] == (16, 6)
    assert wide["fc2_weight"] == (6, 8)


def _rows(name: str, make: Make, formula: Callable[..., Formula], names: tuple[str, ...]) -> None:
    path = f"fuser.modules.{name}"

    @sets(path, bias=False)
    def a_layer_without_bias(given: dict[str, Any]) -> None:
        layer = make(**given)
        assert [n for n, _ in layer.named_parameters() if "bias" in n and "norm" not in n] == []
        check(make, given, formula(bias=False))
        check_quantized(make, given, formula(bias=False))

    @sets(path, params_dtype=BF16, dtype=BF16)
    def dtype_of_a_layer(given: dict[str, Any]) -> None:
        layer = make(**given)
        parameters_are_in(layer, BF16)
        assert layer(X).dtype is BF16
        refuses(lambda: make(params_dtype=BF16, dtype=FP32), "two names of one argument")

    @sets(path, device="meta")
    def device_of_a_layer(given: dict[str, Any]) -> None:
        layer = make(**given)
        assert all(p.is_meta for p in layer.parameters())
        y = layer(X.float())
        parameters = [p.detach().double() for p in layer.parameters()]
        assert all(p.device.type == "cpu" for p in layer.parameters())
        near(y, formula()(X.double(), *parameters), TOLERANCES[FP32])

    @sets(path, init_method=lambda weight: weight.fill_(0.25))
    def a_function_initialises_the_weight(given: dict[str, Any]) -> None:
        check_init(make, given, names[0], names[1:])

    @sets(path, name="mine")
    def name_in_roles(given: dict[str, Any]) -> None:
        parts = ["mine"] if len(names) == 1 else ["mine.fc1", "mine.fc2"]
        assert _names_of_roles(make(dtype=BF16, **given), X) == set(parts)

    def draws(given: dict[str, Any]) -> None:
        sizes = {"ffn_hidden_size": 32} if name == "LayerNormMLP" else {"out_features": 32}
        is_drawn_by_the_tracker(
            lambda: make(**sizes, **given), lambda layer: _named(layer, names), each_alone=True
        )

    sets(path, get_rng_state_tracker=Tracker, rng_state_tracker_function=Tracker)(draws)

    @sets(path, fuse_wgrad_accumulation=True, accumulate_into_main_grad=True)
    def gradients_of_weights_go_into_main_grad(given: dict[str, Any]) -> None:
        for bias in (True, False):
            accumulates(
                partial(make, bias=bias, **given),
                formula(bias=bias),
                X,
                weights=lambda layer: _named(layer, names),
            )


def check_init(make: Make, given: dict[str, Any], own: str, others: tuple[str, ...]) -> None:
    """One weight is what the function makes of it; others, and biases, are as ever."""
    layer = make(**given)
    for step in ("made", "reset"):
        assert torch.equal(getattr(layer, own), torch.full_like(getattr(layer, own), 0.25)), step
        for name in others:
            assert float(getattr(layer, name).detach().std()) > 0
        with torch.no_grad():
            getattr(layer, own).zero_()
        layer.reset_parameters()
    with fuser.quantized_model_init(recipe=E4M3):
        weight = getattr(make(**given), own)
    near(weight.dequantize(), torch.full(weight.shape, 0.25), 1e-6)


def _names_of_roles(layer: Any, *inputs: Any) -> set[str]:
    """The names that the factory of a custom recipe gets."""
    names: set[str] = set()

    def factory(role: fuser.QuantizerRole) -> Any:
        names.add(role.name)
        return fuser.Float8CurrentScalingQuantizer()

    with fuser.autocast(recipe=fuser.recipe.CustomRecipe(qfactory=factory)):
        layer(*inputs)
    return names


for _name, _layer in LAYERS.items():
    _rows(_name, *_layer)


# -- norms and activations --------------------------------------------------------------


def _rows_of_norms(name: str, make: Make, formula: Callable[..., Formula]) -> None:
    def row(argument: str, value: Any) -> None:
        @sets(f"fuser.modules.{name}", **{argument: value})
        def a_norm_before_linears(given: dict[str, Any]) -> None:
            others = {} if argument == "normalization" else {"normalization": "RMSNorm"}
            for more in ({}, others):
                expected = formula(**{argument: value}, **more)
                check(make, {**more, **given}, expected)
                check_quantized(make, {**more, **given}, expected)

    for argument, value in {
        "eps": 0.75,
        "normalization": "RMSNorm",
        "zero_centered_gamma": True,
    }.items():
        row(argument, value)


_rows_of_norms("LayerNormLinear", _norm_linear, _of_norm_linear)
_rows_of_norms("LayerNormMLP", _mlp, _of_mlp)

ACTIVATIONS: dict[str, Formula] = {
    name: oracles.formula_of(cls().function) for name, cls in layers.ACTIVATIONS.items()
}


@sets("fuser.modules.LayerNormMLP", activation="swiglu")
def _activation_between_linears(given: dict[str, Any]) -> None:
    check(_mlp, given, _of_mlp(act=ACTIVATIONS["swiglu"]))
    check_quantized(_mlp, given, _of_mlp(act=ACTIVATIONS["swiglu"]))
    for name, act in ACTIVATIONS.items():  # bf16 rounds around the kink of a ReLU
        own = {"activation": name}
        agrees(
            partial(_mlp, **own),
            _of_mlp(act=act),
            X,
            dtypes=(FP32,),
            in_pipelines=False,
        )


@sets("fuser.modules.LayerNormMLP", activation_params={"approximate": "none"})
def _arguments_of_the_activation(given: dict[str, Any]) -> None:
    check(_mlp, given, _of_mlp(act=oracles.gelu_erf))
    check(
        _mlp,
        {"activation": "geglu", **given},
        _of_mlp(act=oracles.gated(oracles.gelu_erf)),
    )
    own = {"limit": 0.5, "alpha": 0.7}
    act = oracles.clamped_swiglu(0.5, 0.7)
    check(_mlp, {"activation": "clamped_swiglu", "activation_params": own}, _of_mlp(act=act))


@sets("fuser.modules.LayerNormMLP", output_layer_init_method=lambda weight: weight.fill_(0.25))
def _a_function_initialises_the_last_weight(given: dict[str, Any]) -> None:
    check_init(_mlp, given, "fc2_weight", ("fc1_weight",))


# -- ranks ------------------------------------------------------------------------------


def _on_two_ranks(make: Make, given: dict[str, Any], formula: Formula, x: torch.Tensor = X) -> None:
    agrees(partial(make, **given), formula, x, in_pipelines=False)
    agrees_quantized(partial(make, **given), formula, x, tolerance=0.3)


def _rows_of_ranks(name: str, make: Make, formula: Callable[..., Formula]) -> None:
    path = f"fuser.modules.{name}"
    is_column, is_both = {"parallel_mode": "column"}, {"set_parallel_mode": True}
    spread = is_both if name == "LayerNormMLP" else is_column

    @sets(path, parallel_mode="column", tensor_parallel_mode="column")
    def each_rank_has_a_part_of_a_layer(given: dict[str, Any]) -> None:
        (argument,) = given or ("parallel_mode",)
        with rank_0_of_2():
            if name == "LayerNormMLP":
                refuses(lambda: make(**given), "set_parallel_mode=True makes the first column")
                return
            layer = make(**given)
            assert "column parallel over 2 ranks" in repr(layer)
            assert tuple(layer.weight.shape) == (4, 6)
            _on_two_ranks(make, given, formula(before=added_in_backward))
            row = {argument: "row"}
            if name == "LayerNormLinear":
                refuses(lambda: make(**row), "'row' over 2 ranks; its norm reads all")
            else:
                assert tuple(make(**row).weight.shape) == (8, 3)
                _on_two_ranks(make, row, formula(after=added), X[:, :3])
        refuses(lambda: make(**{argument: "wide"}), "wide")

    @sets(path, tp_group=ALONE, tensor_parallel_group=ALONE)
    def ranks_of_a_layer(given: dict[str, Any]) -> None:
        with rank_0_of_2() as alone:
            own = {**spread, **dict.fromkeys(given, alone)}
            assert "ranks" not in repr(make(**own))
            _on_two_ranks(make, own, formula())

    @sets(path, tp_size=2)
    def number_of_ranks(given: dict[str, Any]) -> None:
        refuses(lambda: make(**given), "got tp_size=2, and its tp_group has 1 rank")
        with rank_0_of_2() as alone:
            assert "over 2 ranks" in repr(make(**spread, **given))
            refuses(lambda: make(tp_group=alone, **spread, **given), "has 1 rank")

    @sets(path, sequence_parallel=True)
    def a_layer_has_rows_of_a_sequence(given: dict[str, Any]) -> None:
        refuses(lambda: make(**given), "sequence_parallel")
        with rank_0_of_2():
            own = {**spread, **given}
            layer = make(**own)
            marks = {n: hasattr(p, "sequence_parallel") for n, p in layer.named_parameters()}
            assert marks == {n: "layer_norm" in n for n in marks}
            communication = {"before": gathered}
            if name == "LayerNormMLP":
                communication["after"] = scattered
            _on_two_ranks(make, own, formula(**communication))

    if name != "LayerNormMLP":

        @sets(path, set_parallel_mode=True)
        def one_linear_has_one_mode(given: dict[str, Any]) -> None:
            refuses(lambda: make(**given), f"{name} got set_parallel_mode=True; a layer runs on")


for _name, (_make, _formula, _) in LAYERS.items():
    _rows_of_ranks(_name, _make, _formula)


@sets("fuser.modules.LayerNormMLP", set_parallel_mode=True)
def _column_and_row_parallel_linears(given: dict[str, Any]) -> None:
    with rank_0_of_2():
        layer = _mlp(**given)
        assert "column and row parallel over 2 ranks" in repr(layer)
        shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
        assert (shapes["fc1_weight"], shapes["fc2_weight"]) == ((4, 6), (6, 4))
        for bias in (True, False):
            own = {"bias": bias, **given}
            formula = _of_mlp(bias=bias, before=added_in_backward, after=added)
            _on_two_ranks(_mlp, own, formula)
        gated = _of_mlp(act=ACTIVATIONS["swiglu"], before=added_in_backward, after=added)
        _on_two_ranks(_mlp, {"activation": "swiglu", **given}, gated)


# -- GroupedLinear ----------------------------------------------------------------------


def _groups(*, num_groups: int = 2, **options: Any) -> Any:
    return _Grouped(**{"num_gemms": num_groups, **options})


PATH = "fuser.modules.GroupedLinear"


@sets(PATH, num_gemms=Of(2, instead=3), in_features=Of(6, instead=5), out_features=Of(8, instead=7))
def _sizes_of_a_grouped_layer(given: dict[str, Any]) -> None:
    shapes = {name: tuple(p.shape) for name, p in _Grouped(**given).named_parameters()}
    weights = {"weight0": (8, 6), "weight1": (8, 6)}
    assert shapes == {**weights, "bias0": (8,), "bias1": (8,)}
    others = {name: size for name, size in given.items() if name != "num_gemms"}
    check_groups(_groups, others, expected={})


def _row_of_groups(argument: str, value: bool) -> None:
    @sets(PATH, **{argument: value})
    def parameters_of_a_grouped_layer(given: dict[str, Any]) -> None:
        names = [name for name, _ in _Grouped(**given).named_parameters()]
        assert {
            "bias": "bias0" not in names,
            "single_grouped_weight": "weight" in names,
            "single_grouped_bias": "bias" in names,
        }[argument]
        check_groups(_groups, given, expected={argument: value})


_row_of_groups("bias", False)
_row_of_groups("single_grouped_weight", True)
_row_of_groups("single_grouped_bias", True)


@sets(PATH, params_dtype=BF16, dtype=BF16)
def _dtype_of_a_grouped_layer(given: dict[str, Any]) -> None:
    layer = _Grouped(**given)
    parameters_are_in(layer, BF16)
    assert layer(X, SIZES).dtype is BF16
    refuses(lambda: _Grouped(params_dtype=BF16, dtype=FP32), "two names of one argument")


@sets(PATH, device="meta")
def _device_of_a_grouped_layer(given: dict[str, Any]) -> None:
    for is_one in (False, True):
        layer = _Grouped(single_grouped_weight=is_one, **given)
        is_on_meta_until_its_first_call(layer, X.float(), SIZES)
        parameters = [p.detach().double() for p in layer.parameters()]
        exact = grouped({"single_grouped_weight": is_one})(X.double(), *parameters, SIZES)
        near(layer(X.float(), SIZES), exact, TOLERANCES[FP32])


@sets(PATH, init_method=lambda weight: weight.copy_(torch.eye(*weight.shape)))
def _a_function_initialises_each_weight(given: dict[str, Any]) -> None:
    for is_one in (False, True):
        layer = _Grouped(single_grouped_weight=is_one, **given)
        for _ in ("made", "reset"):
            for weight in layer.weight if is_one else (layer.weight0, layer.weight1):
                assert torch.equal(weight, torch.eye(8, 6))
            fill(layer)
            layer.reset_parameters()


@sets(PATH, delay_wgrad_compute=True)
def _weight_gradients_of_a_layer_come_later(given: dict[str, Any]) -> None:
    for dtype, tolerance, recipe in (
        (FP32, TOLERANCES[FP32], None),
        (BF16, TOLERANCES[BF16], None),
        (BF16, QUANTIZED, E4M3),
    ):
        for is_one in (False, True):
            check_delayed(
                partial(_Grouped, single_grouped_weight=is_one, **given),
                grouped({"single_grouped_weight": is_one}),
                dtype,
                tolerance,
                recipe,
            )


@sets(PATH, name="mine")
def _name_in_roles_of_groups(given: dict[str, Any]) -> None:
    assert _names_of_roles(_Grouped(dtype=BF16, **given), X, SIZES) == {"mine"}


def _weights(layer: Any) -> list[Any]:
    return [p for name, p in layer.named_parameters() if "weight" in name]


@sets(PATH, get_rng_state_tracker=Tracker, rng_state_tracker_function=Tracker)
def _a_tracker_draws_the_weights_of_a_layer(given: dict[str, Any]) -> None:
    for is_one in (False, True):
        is_drawn_by_the_tracker(
            partial(_Grouped, out_features=128, single_grouped_weight=is_one, **given),
            _weights,
        )


@sets(PATH, fuse_wgrad_accumulation=True, accumulate_into_main_grad=True)
def _weight_gradients_of_a_layer_go_into_main_grad(given: dict[str, Any]) -> None:
    for is_one in (False, True):
        accumulates(
            partial(_Grouped, out_features=128, single_grouped_weight=is_one, **given),
            grouped({"single_grouped_weight": is_one}),
            X,
            SIZES,
            weights=_weights,
        )


@sets(PATH, parallel_mode="column", tensor_parallel_mode="column")
def _groups_are_on_one_rank(given: dict[str, Any]) -> None:
    with rank_0_of_2() as alone:
        refuses(lambda: _Grouped(**given), "column tensor parallelism over 2 ranks")
        refuses(lambda: _Grouped(**dict.fromkeys(given, "row")), "row tensor parallelism")
        _check_one_rank({**given, "tp_group": alone})
    _check_one_rank(given)


@sets(PATH, tp_group=ALONE, tensor_parallel_group=ALONE)
def _group_of_one_rank(given: dict[str, Any]) -> None:
    with rank_0_of_2() as alone:
        _check_one_rank({"parallel_mode": "column", **dict.fromkeys(given, alone)})


def _check_one_rank(given: dict[str, Any]) -> None:
    agrees(partial(_Grouped, **given), grouped({}), X, SIZES, in_pipelines=False)


@sets(PATH, sequence_parallel=True)
def _rows_of_groups_are_on_one_rank(given: dict[str, Any]) -> None:
    refuses(lambda: _Grouped(**given), "sequence_parallel")
    _check_one_rank({"parallel_mode": "column", **given})


# -- options that are refused, or ignored -----------------------------------------------


def _row_of_a_refusal(name: str, make: Make, argument: str, value: Any) -> None:
    @sets(f"fuser.modules.{name}", **{argument: value})
    def a_layer_does_not_do_that(given: dict[str, Any]) -> None:
        off = False if value is True else 1 if argument == "tp_size" else None
        owner = "_Grouped" if name == "GroupedLinear" else name
        refuses(
            lambda: make(**given),
            rf"{owner} got {argument}=.*, so it takes only {off}",
        )
        make(**{argument: off})


for _name, _make in {
    **{n: layer[0] for n, layer in LAYERS.items()},
    "GroupedLinear": _Grouped,
}.items():
    _on = dict(REFUSED)
    if _name == "GroupedLinear":
        _on |= {"tp_size": 2, "set_parallel_mode": True}
    else:
        _on["delay_wgrad_compute"] = True
    for _argument, _value in _on.items():
        _row_of_a_refusal(_name, _make, _argument, _value)
    _path = f"fuser.modules.{_name}"
    ignores(_path, "it names a buffer for communication during products", "ub_name")
    ignores(_path, "the input has these sizes", "seq_length", "micro_batch_size")
