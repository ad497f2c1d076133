"""Rows of the arguments of Transformer Engine's linears, feed-forward blocks and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from argument_rows import Of, ignores, refuses, set_in, sets
from torch.nn import functional as F
from torch.testing import assert_close

import fuser
from fuser import recipe
from fuser.communication import PlannedGroup
from fuser.te import pytorch as te
from fuser.te.pytorch import layers
from fuser.te.pytorch.distributed import CudaRNGStatesTracker

Given = dict[str, Any]
Parameters = dict[str, torch.Tensor]

TWO = PlannedGroup(2)
SIZES: dict[str, dict[str, int]] = {
    "Linear": {"in_features": 8, "out_features": 6},
    "LayerNormLinear": {"in_features": 8, "out_features": 6},
    "LayerNormMLP": {"hidden_size": 8, "ffn_hidden_size": 12},
    "GroupedLinear": {"num_gemms": 2, "in_features": 8, "out_features": 6},
}
ROWS = [3, 2]
"""The rows of the groups of a grouped linear."""

_OVERLAPS = (
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)
_NO_OVERLAP = "communication is not overlapped with GEMMs"
_NOTHING_KEPT = "`backward_override` of the recipe says what is kept for backward"
_OF_LINEARS = (
    *("accumulate_into_main_grad", "device", "dtype", "name", "rng_state_tracker_function"),
    *("save_original_input", "ub_name"),
)
_OF_NORMED = ("return_layernorm_output", "return_layernorm_output_gathered")
OPTIONS: dict[str, tuple[str, ...]] = {
    "fuser.te.pytorch.Linear": (
        *(*_OF_LINEARS, *_OVERLAPS),
        *("delay_wgrad_compute", "parameters_split", "symmetric_ar_type"),
    ),
    "fuser.te.pytorch.LayerNormLinear": (
        *(*_OF_LINEARS, *_OVERLAPS, *_OF_NORMED, "rng_tracker_name"),
        *("delay_wgrad_compute", "parameters_split", "symmetric_ar_type"),
    ),
    "fuser.te.pytorch.LayerNormMLP": (
        *(*_OF_LINEARS, *_OVERLAPS, *_OF_NORMED, "rng_tracker_name"),
        *("activation", "activation_params", "checkpoint", "delay_wgrad_compute"),
        *("fuse_wgrad_accumulation", "get_rng_state_tracker", "micro_batch_size", "normalization"),
        *("params_dtype", "seq_length", "set_parallel_mode", "symmetric_ar_type"),
        *("tp_group", "tp_size", "zero_centered_gamma"),
    ),
    "fuser.te.pytorch.GroupedLinear": (
        *(*_OF_LINEARS, "ub_overlap_ag", "ub_overlap_rs", "delay_wgrad_compute"),
        *("single_grouped_bias", "single_grouped_weight", "use_grouped_tensor"),
    ),
    "fuser.te.pytorch.LayerNorm": ("device", "sm_margin"),
}
METHODS = (
    *(f"fuser.te.pytorch.{name}.forward" for name in SIZES),
    "fuser.te.pytorch.layers.TransformerEngineBaseModule.init_fp8_metadata",
    "fuser.te.pytorch.layers.TransformerEngineBaseModule.set_tensor_parallel_group",
)


def close(values: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(values.double(), expected.double(), atol=2e-5, rtol=2e-5)


def filled(module: Any) -> Any:
    """``module`` with values in its parameters that all count: biases and gains too."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 2)
    return module


def parameters_of(module: torch.nn.Module) -> Parameters:
    """The parameters in fp64, for a reference and its gradients."""
    return {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in module.named_parameters()
    }


def normed(
    x: torch.Tensor,
    parameters: Parameters,
    prefix: str = "layer_norm_",
    *,
    eps: float = 1e-5,
    kind: str = "LayerNorm",
    is_zero_centered: bool = False,
) -> torch.Tensor:
    """A norm by its formula, in fp64."""
    x = x.double()
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    gain = parameters[f"{prefix}weight"].double() + float(is_zero_centered)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain
    bias = parameters.get(f"{prefix}bias")
    return y if bias is None else y + bias.double()


def linear(x: torch.Tensor, parameters: Parameters, name: str, has_bias: bool) -> torch.Tensor:
    weight, _, number = name.partition("weight")
    y = x.double() @ parameters[name].double().T
    return y + parameters[f"{weight}bias{number}"].double() if has_bias else y


def reference(
    name: str,
    parameters: Parameters,
    x: torch.Tensor,
    *,
    has_bias: bool = True,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **norm: Any,
) -> torch.Tensor:
    """The output of a layer by its formula, in fp64."""
    if name == "GroupedLinear":
        if "weight" in parameters:
            groups = enumerate(parameters["weight"].unbind())
            parameters = parameters | {f"weight{i}": weight for i, weight in groups}
        if "bias" in parameters:
            groups = enumerate(parameters["bias"].unbind())
            parameters = parameters | {f"bias{i}": bias for i, bias in groups}
        parts = enumerate(x.split(ROWS))
        return torch.cat([linear(rows, parameters, f"weight{i}", has_bias) for i, rows in parts])
    if name != "Linear":
        x = normed(x, parameters, **norm)
    if name == "LayerNormMLP":
        h = linear(x, parameters, "fc1_weight", has_bias)
        h = F.gelu(h, approximate="tanh") if activation is None else activation(h)
        return linear(h, parameters, "fc2_weight", has_bias)
    return linear(x, parameters, "weight", has_bias)


def swiglu(h: torch.Tensor) -> torch.Tensor:
    gate, values = h.chunk(2, dim=-1)
    return F.silu(gate) * values


def tracker_of(**seeds: int) -> Callable[[], CudaRNGStatesTracker]:
    """A function that returns one tracker, with states of these seeds."""
    tracker = CudaRNGStatesTracker()
    for name, seed in seeds.items():
        tracker.add(name.replace("_", "-"), seed)
    return lambda: tracker


class Layer:
    """What the rows of one of the layers share."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, f"fuser.te.pytorch.{name}"

    def __call__(self, **given: Any) -> Any:
        return getattr(te, self.name)(**{**SIZES[self.name], **given})

    def run(self, layer: Any, x: torch.Tensor, **given: Any) -> Any:
        return layer(x, ROWS, **given) if self.name == "GroupedLinear" else layer(x, **given)

    def weights(self, layer: Any) -> list[torch.nn.Parameter]:
        return [p for n, p in layer.named_parameters() if "weight" in n and "norm" not in n]

    def plan(self, layer: Any, x: torch.Tensor) -> str:
        return str(layer.plan(x))


def _rows_of_parameters(layer: Layer) -> None:
    path = layer.path

    @sets(path, bias=False)
    def _a_layer_without_a_bias(given: Given) -> None:
        module, x = filled(layer(**given)), torch.randn(5, 8)
        y = reference(layer.name, parameters_of(module), x, has_bias=False)
        close(layer.run(module, x), y)

    @sets(path, init_method=lambda weight: weight.fill_(0.25))
    def _what_a_weight_begins_with(given: Given) -> None:
        module = layer(**given)
        weights = layer.weights(module)
        first = 1 if layer.name == "LayerNormMLP" else len(weights)
        assert all(bool((weight == 0.25).all()) for weight in weights[:first])
        assert not any(bool((weight == 0.25).any()) for weight in weights[first:])

    def _weights(given: Given, seeds: dict[str, int]) -> list[torch.Tensor]:
        """Those of a layer, whose tracker has these seeds."""
        function = tracker_of(**seeds)
        module = layer(**{name: function if v is True else v for name, v in given.items()})
        return [weight.detach() for weight in layer.weights(module)]

    def _are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, some, others))

    @sets(path, get_rng_state_tracker=True, rng_state_tracker_function=True)
    def _a_tracker_draws_the_weights(given: Given) -> None:
        some, again, others = (_weights(given, {"model_parallel_rng": seed}) for seed in (5, 5, 6))
        assert _are_equal(some, again)
        assert not _are_equal(some, others)

    @sets(path, rng_tracker_name="other")
    def _the_state_of_that_name_draws_them(given: Given) -> None:
        given = {"get_rng_state_tracker": True, **given}
        some, again, others = (
            _weights(given, {"model_parallel_rng": own, "other": other})
            for own, other in ((1, 5), (2, 5), (1, 6))
        )
        assert _are_equal(some, again)
        assert not _are_equal(some, others)

    @sets(path, fuse_wgrad_accumulation=True, accumulate_into_main_grad=True)
    def _gradients_in_main_grad(given: Given) -> None:
        module, x = filled(layer(**given)), torch.randn(5, 8)
        for weight in layer.weights(module):
            weight.main_grad = torch.ones_like(weight)
        y = layer.run(module, x)
        dy = torch.randn_like(y)
        y.backward(dy)
        parameters = parameters_of(module)
        reference(layer.name, parameters, x).backward(dy.double())
        for name, parameter in module.named_parameters():
            if hasattr(parameter, "main_grad"):
                close(parameter.main_grad - 1.0, parameters[name].grad)

    @sets(path, params_dtype=torch.bfloat16, dtype=torch.bfloat16)
    def _parameters_in_16_bits(given: Given) -> None:
        module, x = filled(layer(**given)), torch.randn(5, 8).bfloat16()
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
        y = reference(layer.name, parameters_of(module), x)
        assert_close(layer.run(module, x).double(), y, atol=0.1, rtol=0.05)

    @sets(path, device="meta")
    def _parameters_on_meta(given: Given) -> None:
        assert all(parameter.is_meta for parameter in layer(**given).parameters())

    @sets(path, name="head")
    def _the_name_that_a_factory_gets(given: Given) -> None:
        names: set[str] = set()

        def factory(role: Any) -> Any:
            names.add(role.name)
            return fuser.IdentityQuantizer()

        with fuser.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
            layer.run(layer(**given), torch.randn(5, 8))
        assert names == ({"head.fc1", "head.fc2"} if layer.name == "LayerNormMLP" else {"head"})


def _rows_of_ranks(layer: Layer) -> None:
    path, is_mlp = layer.path, layer.name == "LayerNormMLP"
    mode: Given = {"set_parallel_mode": True} if is_mlp else {"parallel_mode": "column"}
    name, whole = ("fc1_weight", 12) if is_mlp else ("weight", 6)

    def _a_rank_has_half_of_the_features(given: Given) -> None:
        module = layer(**given)
        weight = module.get_parameter(name)
        assert weight.shape == (whole // 2, 8)
        assert module.tp_size == 2
        assert weight.tensor_model_parallel
        assert weight.partition_dim == 0
        assert weight.partition_stride == 1
        assert ("AllReduce" in layer.plan(module, torch.randn(4, 8))) == is_mlp

    for argument, value in {"tp_group": TWO, **mode}.items():
        rest = {key: other for key, other in {"tp_group": TWO, **mode}.items() if key != argument}

        @sets(path, **{argument: value})
        def _with_the_other_argument(given: Given, rest: Given = rest) -> None:
            _a_rank_has_half_of_the_features(rest | given)

    @sets(path, tp_size=2)
    def _ranks_are_those_of_the_group(given: Given) -> None:
        refuses(lambda: layer(**mode, **given), f"{layer.name} got tp_size=2", "1 rank")

    @sets(path, sequence_parallel=True)
    def _a_rank_has_some_rows(given: Given) -> None:
        module = layer(tp_group=TWO, **mode, **given)
        assert module.sequence_parallel
        plan = layer.plan(module, torch.randn(4, 8))
        assert ("ReduceScatter" in plan) == is_mlp
        if layer.name != "Linear":
            assert module.layer_norm_weight.sequence_parallel
            return
        assert module.ops[0].members[0].sequence_parallel
        last = layer(tp_group=TWO, parallel_mode="row", **given)
        assert last.weight.shape == (6, 4)
        assert (last.weight.partition_dim, last.bias.partition_dim) == (1, -1)
        assert last.bias.sequence_parallel
        assert "ReduceScatter" in layer.plan(last, torch.randn(4, 4))


def _rows_of_norms(layer: Layer) -> None:
    path = layer.path

    def _rows(argument: str, value: Any, **settings: Any) -> None:
        @sets(path, **{argument: value})
        def _the_norm_before_the_linear(given: Given) -> None:
            module, x = filled(layer(**given)), torch.randn(5, 8)
            y = reference(layer.name, parameters_of(module), x, **settings)
            close(layer.run(module, x), y)

    _rows("eps", 0.5, eps=0.5)
    _rows("normalization", "RMSNorm", kind="RMSNorm")
    _rows("zero_centered_gamma", True, is_zero_centered=True)


def _rows_of_calls(layer: Layer) -> None:
    path = f"{layer.path}.forward"
    first, other = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()

    @sets(path, inp=Of(first, instead=other))
    def _the_output_of_an_input(given: Given) -> None:
        module = filled(layer())
        rest = {"m_splits": ROWS} if layer.name == "GroupedLinear" else {}
        y = module(**given, **rest)
        close(y, reference(layer.name, parameters_of(module), first))

    @sets(path, is_first_microbatch=False)
    def _later_microbatches_use_the_kept_weight(given: Given) -> None:
        module, x = filled(layer()), torch.randn(5, 8)
        with fuser.autocast(recipe=recipe.Float8CurrentScaling()), torch.no_grad():
            y = layer.run(module, x, is_first_microbatch=True)
            for weight in layer.weights(module):
                weight.data.mul_(2.0)  # which torch does not count
            assert torch.equal(layer.run(module, x, **given), y)

    if layer.name == "GroupedLinear":
        return

    @sets(path, fp8_output=True, fp8_grad=True)
    def _outputs_are_not_quantized(given: Given) -> None:
        refuses(lambda: layer()(torch.randn(5, 8), **given), *given, "=True")


def _refused(layer: Layer, *arguments: str, value: Any = True) -> None:
    for argument in arguments:

        @sets(layer.path, **{argument: value})
        def _what_is_not_here(given: Given, argument: str = argument) -> None:
            refuses(lambda: layer(**given), layer.name, f"{argument}=")


def _rows_of_names(layer: Layer) -> None:
    @sets(layer.path, ub_name="qkv")
    def _an_attribute_that_programs_read(given: Given) -> None:
        assert layer(**given).ub_name == "qkv"

    ignores(layer.path, _NOTHING_KEPT, "save_original_input")
    ignores(layer.path, _NO_OVERLAP, *(n for n in OPTIONS[layer.path] if n in _OVERLAPS))


LINEAR, NORM_LINEAR, MLP, GROUPED = map(Layer, SIZES)
for _layer in (LINEAR, NORM_LINEAR, MLP, GROUPED):
    _rows_of_parameters(_layer)
    _rows_of_calls(_layer)
for _layer in (LINEAR, NORM_LINEAR, GROUPED):
    _rows_of_names(_layer)
for _layer in (LINEAR, NORM_LINEAR, MLP):
    _rows_of_ranks(_layer)
for _layer in (NORM_LINEAR, MLP):
    _rows_of_norms(_layer)
    _refused(_layer, "return_layernorm_output", "return_layernorm_output_gathered")
_refused(LINEAR, "delay_wgrad_compute", "parameters_split", "symmetric_ar_type")
_refused(NORM_LINEAR, "delay_wgrad_compute", "parameters_split", "symmetric_ar_type")
_refused(MLP, "delay_wgrad_compute", "symmetric_ar_type", "checkpoint", "return_bias")
ignores(MLP.path, _NO_OVERLAP, *_OVERLAPS, "ub_name")
ignores(MLP.path, _NOTHING_KEPT, "save_original_input")
ignores(MLP.path, "a layer takes any number of rows", "seq_length", "micro_batch_size")

# -- sizes -----------------------------------------------------------------------------


def _row_of_a_size(layer: Layer, argument: str, value: int, instead: int) -> None:
    @sets(layer.path, **{argument: Of(value, instead=instead)})
    def _a_size(given: Given) -> None:
        module, x = filled(layer(**given)), torch.randn(5, 8)
        y = layer.run(module, x)
        assert getattr(module, argument) == value
        close(y, reference(layer.name, parameters_of(module), x))


for _layer in (LINEAR, NORM_LINEAR, GROUPED):
    _row_of_a_size(_layer, "in_features", 8, 12)
    _row_of_a_size(_layer, "out_features", 4, 6)
_row_of_a_size(MLP, "hidden_size", 8, 16)
_row_of_a_size(MLP, "ffn_hidden_size", 20, 12)
_row_of_a_size(GROUPED, "num_gemms", 2, 3)


# -- what some layers have alone -------------------------------------------------------


@sets(LINEAR.path, return_bias=True)
def _a_linear_returns_its_bias(given: Given) -> None:
    module, x = filled(LINEAR(**given)), torch.randn(5, 8)
    y, bias = module(x)
    close(y, reference("Linear", parameters_of(module), x, has_bias=False))
    assert torch.equal(bias, module.bias)


@sets(NORM_LINEAR.path, return_bias=True)
def _a_linear_after_a_norm_returns_its_bias(given: Given) -> None:
    module, x = filled(NORM_LINEAR(**given)), torch.randn(5, 8)
    y, bias = module(x)
    close(y, reference("LayerNormLinear", parameters_of(module), x, has_bias=False))
    assert torch.equal(bias, module.bias)


@sets(GROUPED.path, return_bias=True)
def _a_grouped_linear_returns_its_biases(given: Given) -> None:
    module, x = filled(GROUPED(**given)), torch.randn(5, 8)
    y, biases = module(x, ROWS)
    close(y, reference("GroupedLinear", parameters_of(module), x, has_bias=False))
    assert torch.equal(torch.stack(biases), torch.stack([module.bias0, module.bias1]))


@sets(MLP.path, activation="swiglu")
def _a_gated_block(given: Given) -> None:
    module, x = filled(MLP(**given)), torch.randn(5, 8)
    assert module.fc1_weight.shape == (24, 8)
    close(module(x), reference("LayerNormMLP", parameters_of(module), x, activation=swiglu))


@sets(MLP.path, activation_params={"approximate": "none"})
def _the_erf_form_of_gelu(given: Given) -> None:
    module, x = filled(MLP(**given)), 3 * torch.randn(5, 8)
    exact = reference("LayerNormMLP", parameters_of(module), x, activation=F.gelu)
    assert_close(module(x).double(), exact, atol=2e-5, rtol=0.0)


@sets(MLP.path, output_layer_init_method=lambda weight: weight.fill_(0.25))
def _what_the_second_weight_begins_with(given: Given) -> None:
    module = MLP(**given)
    assert (module.fc2_weight == 0.25).all()
    assert not (module.fc1_weight == 0.25).any()


@sets(GROUPED.path, delay_wgrad_compute=True)
def _weight_gradients_that_are_left(given: Given) -> None:
    module, x = filled(GROUPED(**given)), torch.randn(5, 8)
    y = module(x, ROWS)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert module.weight0.grad is None
    module.backward_dw()
    parameters = parameters_of(module)
    reference("GroupedLinear", parameters, x).backward(dy.double())
    for name, parameter in module.named_parameters():
        close(parameter.grad, parameters[name].grad)


for _kind in ("weight", "bias"):

    @sets(GROUPED.path, **{f"single_grouped_{_kind}": True})
    def _one_parameter_of_all_groups(given: Given, kind: str = _kind) -> None:
        module, x = filled(GROUPED(**given)), torch.randn(5, 8)
        assert module.get_parameter(kind).shape[0] == 2
        assert not hasattr(module, f"{kind}0")
        close(module(x, ROWS), reference("GroupedLinear", parameters_of(module), x))


@sets(GROUPED.path, parallel_mode="column")
def _a_mode_over_ranks_is_refused(given: Given) -> None:
    refuses(lambda: GROUPED(tp_group=TWO, **given), "GroupedLinear got 2 ranks")


@sets(GROUPED.path, tp_group=TWO)
def _a_group_of_ranks_is_refused_with_a_mode(given: Given) -> None:
    refuses(lambda: GROUPED(parallel_mode="row", **given), "GroupedLinear got 2 ranks")


@sets(GROUPED.path, tp_size=2)
def _a_number_of_ranks_is_refused_with_a_mode(given: Given) -> None:
    refuses(lambda: GROUPED(parallel_mode="row", **given), "GroupedLinear got 2 ranks")


ignores(GROUPED.path, "a grouped linear runs on one rank", "sequence_parallel")
ignores(GROUPED.path, "every way of running groups has the same values", "use_grouped_tensor")


@sets(GROUPED.path + ".forward", m_splits=Of([3, 2], instead=[2, 3]))
def _rows_of_each_group(given: Given) -> None:
    module, x = filled(GROUPED()), torch.randn(5, 8)
    close(module(x, **given), reference("GroupedLinear", parameters_of(module), x))


# -- norms -----------------------------------------------------------------------------


NORM = "fuser.te.pytorch.LayerNorm"
"""Of both norms, which share a constructor."""


def norms(given: Given) -> dict[str, Any]:
    """Both norms by their names."""
    shape = {} if "hidden_size" in given else {"normalized_shape": 8}
    return {
        name: filled(getattr(te, name)(**{**shape, **given})) for name in ("LayerNorm", "RMSNorm")
    }


def _rows_of_norms_alone(arguments: Given, size: int = 8, **settings: Any) -> None:
    @sets(NORM, **arguments)
    def _values_of_a_norm(given: Given) -> None:
        for name, module in norms(given).items():
            x = torch.randn(5, size)
            y = normed(x, dict(module.named_parameters()), "", kind=name, **settings)
            close(module(x), y)


_rows_of_norms_alone({"eps": 0.5}, eps=0.5)
_rows_of_norms_alone({"zero_centered_gamma": True}, is_zero_centered=True)
_rows_of_norms_alone({"normalized_shape": Of(12, instead=8), "hidden_size": 12}, size=12)


@sets(NORM, params_dtype=torch.bfloat16, dtype=torch.bfloat16)
def _gains_in_16_bits(given: Given) -> None:
    for name, module in norms(given).items():
        x = torch.randn(5, 8).bfloat16()
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
        y = normed(x, dict(module.named_parameters()), "", kind=name)
        assert_close(module(x).double(), y, atol=0.05, rtol=0.02)


@sets(NORM, device="meta")
def _gains_on_meta(given: Given) -> None:
    assert te.LayerNorm(8, **given).weight.is_meta
    assert te.RMSNorm(8, **given).weight.is_meta


@sets(NORM, sequence_parallel=True)
def _marks_of_a_part_of_the_rows(given: Given) -> None:
    for module in norms(given).values():
        assert all(parameter.sequence_parallel for parameter in module.parameters())


ignores(NORM, "kernels take the multiprocessors that they need", "sm_margin")


# -- what layers share -----------------------------------------------------------------

_BASE = "fuser.te.pytorch.layers.TransformerEngineBaseModule"


@sets(f"{_BASE}.set_tensor_parallel_group", tp_group=Of(TWO, instead=PlannedGroup(4)))
def _the_group_of_a_layer(given: Given) -> None:
    module, group = LINEAR(tp_group=PlannedGroup(2), parallel_mode="row"), given["tp_group"]
    module.set_tensor_parallel_group(group)
    assert module.tp_group is group
    assert module.ops[0].members[-1].process_group is group


ignores(f"{_BASE}.init_fp8_metadata", "a recipe's state is made when it is used", "num_gemms")


@sets(
    "fuser.te.pytorch.layers.get_dummy_wgrad",
    shape=Of((3, 4), instead=(4, 3)),
    dtype=Of(torch.bfloat16, instead=torch.float16),
    zero=True,
)
def _a_gradient_that_is_not_read(given: Given) -> None:
    given = {"shape": (3, 4), "dtype": torch.bfloat16, "zero": True} | (given or {"zero": False})
    torch.use_deterministic_algorithms(True)  # memory that is not written is NaN then
    try:
        gradient = layers.get_dummy_wgrad(**given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert gradient.shape == (3, 4)
    assert gradient.dtype is torch.bfloat16
    assert not gradient.any()


set_in(
    "tests/te/test_te_layers.py::test_biases_that_are_returned_are_reset_to_zeros",
    "fuser.te.pytorch.layers.TransformerEngineBaseModule.reset_parameters",
    "defer_init",
)
