"""fuser.modules: layers that are pipelines."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from argument_checks import Tracker
from said import holds, said

import fuser
from fuser import modules
from fuser import recipe as recipes
from fuser.communication import PlannedGroup
from fuser.modules import arguments
from fuser.op import modules_and_ops
from fuser.tensors.master_weight import MasterWeight


def x_of(*shape: int) -> torch.Tensor:
    return oracles.random_tensor(shape, torch.float32, 1).requires_grad_()


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "sreglu", "relu"])
def test_a_layernorm_mlp_is_its_ops(normalization: str, activation: str) -> None:
    mlp = modules.LayerNormMLP(64, 96, normalization=normalization, activation=activation)
    oracles.randomize(mlp)
    norm, up, act, down = mlp.ops
    assert type(norm).__name__ == normalization
    assert act.function.name == activation
    x = x_of(5, 64)
    torch.testing.assert_close(mlp(x), down(act(up(norm(x)))))
    linear, plan = ("BasicLinear", "Bias"), mlp.plan(x)
    assert plan.ops == (normalization, *linear, type(act).__name__, *linear)
    assert plan.backward
    assert not mlp.plan(x, training=False).backward


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize(
    "make", [recipes.Float8CurrentScaling, recipes.MXFP8BlockScaling, recipes.Float8BlockScaling]
)
def test_under_an_override_the_mlp_equals_its_halves_bit_for_bit(make: type, override: str) -> None:
    whole = oracles.randomize(modules.LayerNormMLP(64, 96, activation="relu"))
    first, second = modules.LayerNormLinear(64, 96), modules.Linear(96, 64)
    first.ops[0].load_state_dict(whole.ops[0].state_dict())
    first.ops[1].load_state_dict(whole.ops[1].state_dict())
    second.ops[0].load_state_dict(whole.ops[3].state_dict())
    grads = []
    for call in (whole, lambda x: second(fuser.ReLU()(first(x)))):
        x = x_of(32, 64)
        with fuser.autocast(recipe=make(backward_override=override)):
            y = call(x)
        y.backward(oracles.random_tensor((32, 64), torch.float32, 2))
        grads.append((y.detach(), x.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])
    for a, b in zip(whole.parameters(), [*first.parameters(), *second.parameters()], strict=True):
        assert torch.equal(a.grad, b.grad)


def test_options_reach_the_ops() -> None:
    layer = modules.LayerNormLinear(
        8, 4, bias=False, eps=0.5, zero_centered_gamma=True, dtype=torch.bfloat16
    )
    norm: Any
    linear: Any
    norm, linear = layer.ops
    assert (norm.eps, norm.zero_centered_gamma) == (0.5, True)
    assert linear.bias is None
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"normalization": "BatchNorm"}, ("'BatchNorm'", "LayerNorm or RMSNorm")),
        ({"activation": "tanh"}, ("'tanh'", "swiglu")),
    ],
)
def test_unknown_names_are_refused_with_those_there_are(
    options: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(fuser.InputError) as caught:
        modules.LayerNormMLP(8, 8, **options)
    assert all(word in str(caught.value) for word in words)


def test_a_layer_keeps_quantized_weights_across_microbatches() -> None:
    layer = modules.LayerNormMLP(64, 128)
    x = torch.randn(32, 64)
    with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):
        plain = layer(x)
        outputs = [layer(x, is_first_microbatch=is_first) for is_first in (True, False)]
    assert all(torch.equal(y, plain) for y in outputs)
    linears = [op.members[0] for op in layer.ops if isinstance(op, fuser.Linear)]
    assert all(linear._kept_weight is not None for linear in linears)


# -- parameters under the names of te's layers --------------------------------------------

LAYERS = {
    "Linear": (lambda **options: modules.Linear(64, 96, **options), ("weight", "bias")),
    "LayerNormLinear": (
        lambda **options: modules.LayerNormLinear(64, 96, **options),
        ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    ),
    "RMSNormLinear": (
        lambda **options: modules.LayerNormLinear(64, 96, normalization="RMSNorm", **options),
        ("layer_norm_weight", "weight", "bias"),
    ),
    "LayerNormMLP": (
        lambda **options: modules.LayerNormMLP(64, 96, activation="swiglu", **options),
        (
            *("layer_norm_weight", "layer_norm_bias"),
            *("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
        ),
    ),
}
every_layer = pytest.mark.parametrize(("make", "names"), LAYERS.values(), ids=LAYERS)


@every_layer
def test_parameters_have_the_names_of_tes_layers(make: Any, names: tuple[str, ...]) -> None:
    layer = make()
    assert tuple(name for name, _ in layer.named_parameters()) == names
    assert tuple(layer.state_dict()) == (*names, "_extra_state")
    assert all(getattr(layer, name) is layer._parameters[name] for name in names)
    empty = layer.state_dict()["_extra_state"]
    assert (empty.numel(), empty.dtype) == (0, torch.uint8)
    outer = torch.nn.Sequential(layer)
    assert [name for name, _ in outer.named_parameters()] == [f"0.{name}" for name in names]


@every_layer
def test_a_layer_without_biases_has_none(make: Any, names: tuple[str, ...]) -> None:
    layer = make(bias=False)
    biases = [name for name in names if name in ("bias", "fc1_bias", "fc2_bias")]
    assert biases
    assert all(getattr(layer, name) is None for name in biases)
    assert set(layer.state_dict()) == {*names, "_extra_state"} - {*biases}


@every_layer
def test_state_goes_from_layer_to_layer(make: Any, names: tuple[str, ...]) -> None:
    layer, other = oracles.randomize(make()), make()
    other.load_state_dict(layer.state_dict())
    x = x_of(32, 64)
    assert torch.equal(layer(x), other(x))


@every_layer
def test_state_without_extra_state_or_with_that_of_another_library_loads(
    make: Any, names: tuple[str, ...]
) -> None:
    layer, other = oracles.randomize(make()), make()
    state = layer.state_dict()
    del state["_extra_state"]
    other.load_state_dict(state)
    foreign = torch.tensor(list(b"pickled"), dtype=torch.uint8)
    for extra in (foreign, io.BytesIO(b"pickled"), b"pickled", None):
        other.load_state_dict({**state, "_extra_state": extra})
    assert torch.equal(layer(x_of(32, 64)), other(x_of(32, 64)))


@every_layer
def test_state_saved_of_the_ops_of_a_layer_loads(make: Any, names: tuple[str, ...]) -> None:
    layer, other = oracles.randomize(make()), make()
    state = {f"0.ops.{name}": value for name, value in layer.ops.state_dict().items()}
    torch.nn.Sequential(other).load_state_dict(state)
    assert torch.equal(layer(x_of(32, 64)), other(x_of(32, 64)))


def test_delayed_scaling_goes_on_where_the_saved_layer_stopped() -> None:
    recipe = recipes.DelayedScaling(amax_history_len=3)

    def step(layer: Any, seed: int) -> torch.Tensor:
        x = oracles.random_tensor((32, 64), torch.float32, seed)
        with fuser.autocast(recipe=recipe):
            y: torch.Tensor = layer(x)
        y.sum().backward()
        return y.detach()

    layer = oracles.randomize(modules.LayerNormMLP(64, 96))
    for seed in range(3):
        step(layer, seed)
    for saved in (layer.state_dict(), {f"ops.{k}": v for k, v in layer.ops.state_dict().items()}):
        other = modules.LayerNormMLP(64, 96)
        other.load_state_dict(copy.deepcopy(saved))
        twin = copy.deepcopy(layer)
        for seed in range(3, 6):
            assert torch.equal(step(other, seed), step(twin, seed))


@every_layer
def test_every_parameter_of_a_layer_gets_the_gradient_of_its_formula(
    make: Any, names: tuple[str, ...]
) -> None:
    layer = oracles.randomize(make())
    x = x_of(5, 64)
    layer(x).square().sum().backward()
    for name in names:
        assert getattr(layer, name).grad is not None
    plain = {name: getattr(layer, name).detach().clone().requires_grad_() for name in names}
    h = x.detach()
    if "layer_norm_bias" in names:
        h = F.layer_norm(h, (64,), plain["layer_norm_weight"], plain["layer_norm_bias"])
    elif "layer_norm_weight" in names:
        h = F.rms_norm(h, (64,), plain["layer_norm_weight"], 1e-5)
    if "weight" in names:
        h = F.linear(h, plain["weight"], plain["bias"])
    else:
        a, b = F.linear(h, plain["fc1_weight"], plain["fc1_bias"]).chunk(2, -1)
        h = F.linear(F.silu(a) * b, plain["fc2_weight"], plain["fc2_bias"])
    h.square().sum().backward()
    for name in names:
        torch.testing.assert_close(
            getattr(layer, name).grad, plain[name].grad, rtol=1e-4, atol=1e-3
        )


def test_a_replaced_parameter_is_the_one_that_is_used() -> None:
    layer = oracles.randomize(modules.LayerNormLinear(64, 96))
    x = x_of(5, 64)
    layer(x)
    layer.weight = torch.nn.Parameter(torch.zeros(96, 64))
    layer.bias = torch.nn.Parameter(torch.ones(96))
    y = layer(x)
    assert torch.equal(y, torch.ones(5, 96))
    y.sum().backward()
    assert layer.weight.grad is not None
    halved = torch.func.functional_call(layer, {"bias": torch.full((96,), 0.5)}, (x,))
    assert torch.equal(halved, torch.full((5, 96), 0.5))
    assert torch.equal(layer(x), torch.ones(5, 96))
    assert "sum" in [step.kernel for step in layer.plan(x).backward]
    layer.bias = torch.nn.Parameter(torch.ones(96), requires_grad=False)
    assert "sum" not in [step.kernel for step in layer.plan(x).backward]


@pytest.mark.parametrize("convert", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_trains_apart(convert: Any) -> None:
    layer = oracles.randomize(modules.LayerNormMLP(64, 96))
    twin = convert(layer)
    x = x_of(5, 64)
    assert torch.equal(layer(x), twin(x))
    with torch.no_grad():
        twin.fc1_weight.zero_()
    assert not torch.equal(layer(x), twin(x))
    twin(x).sum().backward()
    assert twin.fc2_weight.grad is not None
    assert layer.fc2_weight.grad is None


def test_a_layer_moves_to_another_dtype_and_back_from_meta() -> None:
    layer = modules.LayerNormMLP(64, 96).to(torch.bfloat16)
    assert layer(x_of(5, 64).bfloat16()).dtype is torch.bfloat16
    empty = modules.LayerNormMLP(64, 96, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert torch.equal(empty.layer_norm_weight, torch.ones(64))
    assert empty.fc1_weight.std() > 0
    assert torch.isfinite(empty(x_of(5, 64))).all()


def test_eval_reaches_the_ops() -> None:
    layer = modules.Linear(64, 64)
    assert not any(op.training for op in layer.eval().ops)
    assert all(op.training for op in layer.train().ops)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_an_init_method_initialises_the_weights(is_quantized: bool) -> None:
    def init(value: float) -> Any:
        return lambda weight: torch.nn.init.constant_(weight, value)

    with fuser.quantized_model_init(enabled=is_quantized, recipe=recipes.Float8CurrentScaling()):
        layer = modules.LayerNormMLP(
            64, 96, init_method=init(0.5), output_layer_init_method=init(0.25)
        )
    for _ in range(2):
        for weight, value in ((layer.fc1_weight, 0.5), (layer.fc2_weight, 0.25)):
            assert isinstance(weight, fuser.QuantizedTensor) == is_quantized
            plain = weight.dequantize() if is_quantized else weight
            assert torch.equal(plain, torch.full_like(plain, value))
        layer.reset_parameters()


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(modules.Linear, 64, 96),
        functools.partial(modules.LayerNormLinear, 64, 96),
        functools.partial(
            modules.LayerNormMLP, 64, 96, output_layer_init_method=torch.nn.init.normal_
        ),
        functools.partial(modules.GroupedLinear, 2, 64, 96),
    ],
    ids=lambda make: make.func.__name__,
)
def test_an_init_method_draws_from_the_generator_of_the_tracker(make: Any) -> None:
    def weights_of(layer: Any) -> list[torch.Tensor]:
        return [p for name, p in layer.named_parameters() if "weight" in name and p.dim() == 2]

    options = {"init_method": torch.nn.init.normal_, "get_rng_state_tracker": Tracker}
    before = torch.get_rng_state()
    layer = make(**options)
    assert torch.equal(torch.get_rng_state(), before)
    for weight in weights_of(layer):
        with Tracker().fork():
            assert torch.equal(weight, torch.nn.init.normal_(torch.empty_like(weight)))
    assert len(weights_of(layer)) == 1 + (type(layer).__name__ in ("LayerNormMLP", "GroupedLinear"))


def test_a_parametrized_layer_is_refused_with_the_parameters_name() -> None:
    layer = modules.Linear(64, 64)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    with pytest.raises(
        fuser.StateError, match=said("layer-no-parameter-any", holds("Linear"), "'weight'")
    ):
        layer(x_of(5, 64))


@pytest.mark.parametrize("make", [make for make, _ in LAYERS.values()], ids=LAYERS)
@pytest.mark.parametrize(
    "option",
    ["return_bias", "checkpoint", "parameters_split", "delay_wgrad_compute", "ub_overlap_ag"],
)
def test_what_a_layer_lacks_is_accepted_off_and_refused_on(make: Any, option: str) -> None:
    default, _ = arguments.OFF[option]
    make(**{option: default, "ub_name": "qkv"})
    with pytest.raises(
        fuser.InputError,
        match=said("arguments-takes-only", None, option, None, None, repr(default)),
    ):
        make(**{option: 2})
    with pytest.raises(TypeError, match=said("arguments-no-leave-out", None, "'colour'")):
        make(colour="red")


def test_tp_size_is_that_of_the_group() -> None:
    modules.LayerNormLinear(64, 64, tp_size=1, tp_group=None)
    with pytest.raises(
        fuser.InputError, match=said("parallel-tp-size-group", "LayerNormMLP", 2, "1 rank")
    ):
        modules.LayerNormMLP(64, 64, tp_size=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda **ranks: modules.Linear(64, 64, sequence_parallel=True, **ranks),
            said("parameters-sequence-parallel-true", "Linear", "parallel_mode"),
        ),
        (
            lambda **ranks: modules.LayerNormLinear(64, 64, sequence_parallel=True, **ranks),
            said("parameters-sequence-parallel-true", "LayerNormLinear", "parallel_mode"),
        ),
        (
            lambda **ranks: modules.LayerNormMLP(64, 64, sequence_parallel=True, **ranks),
            said("parallel-sequence-true-without", "LayerNormMLP"),
        ),
        *(
            (
                lambda mode=mode, **ranks: modules.LayerNormMLP(
                    64, 64, parallel_mode=mode, **ranks
                ),
                said("parallel-two-linears-modes", "LayerNormMLP", repr(mode)),
            )
            for mode in ("column", "row")
        ),
        (
            lambda **ranks: modules.LayerNormLinear(64, 64, parallel_mode="rows", **ranks),
            said("parameters-none-column-row", "LayerNormLinear", "parallel_mode", "'rows'"),
        ),
        (
            lambda **ranks: modules.LayerNormMLP(
                64, 63, activation="swiglu", set_parallel_mode=True, **ranks
            ),
            said("groups-do-divide-rank", "LayerNormMLP's ffn_hidden_size", 63, 2),
        ),
    ],
)
def test_errors_about_ranks_name_the_arguments_of_the_layer(make: Any, words: str) -> None:
    with pytest.raises(fuser.InputError, match=words):
        make(device="meta", tp_group=PlannedGroup(2))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_norm_of_some_rows_of_a_sequence_is_marked_for_trainers(
    normalization: str, sequence_parallel: bool
) -> None:
    ranks: Any = {"device": "meta", "tp_group": PlannedGroup(2), "normalization": normalization}
    ranks["sequence_parallel"] = sequence_parallel
    for layer in (
        modules.LayerNormLinear(64, 64, parallel_mode="column", **ranks),
        modules.LayerNormMLP(64, 64, set_parallel_mode=True, **ranks),
    ):
        marked = {n for n, p in layer.named_parameters() if getattr(p, "sequence_parallel", False)}
        norm = {name for name, _ in layer.named_parameters() if name.startswith("layer_norm_")}
        assert marked == (norm if sequence_parallel else set())
        assert len(norm) == 1 + (normalization == "LayerNorm")


def test_arguments_have_the_names_of_tes_layers_and_those_of_ops() -> None:
    for options in (
        {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True},
        {"dtype": torch.bfloat16, "accumulate_into_main_grad": True},
    ):
        layer = modules.LayerNormMLP(64, 96, 1e-3, **options)
        assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
        assert layer.ops[0].eps == 1e-3
        assert all(op.members[0]._accumulate_into_main_grad for op in layer.ops[1::2])
    with pytest.raises(fuser.InputError, match=said("arguments-layer-two-names")):
        modules.Linear(4, 4, dtype=torch.float32, params_dtype=torch.float16)
    with pytest.raises(fuser.InputError, match=said("layer-fp8-output-grad", None, True)):
        modules.Linear(4, 4)(torch.ones(2, 4), fp8_output=True)
    clamped = modules.LayerNormMLP(
        64, 96, activation="clamped_swiglu", activation_params={"limit": 2.0}
    )
    assert clamped.ops[2].function.scalars[0] == 2.0


def test_a_factory_gets_the_layers_name() -> None:
    roles: set[tuple[str, str]] = set()

    def factory(role: Any) -> Any:
        roles.add((role.module_type, role.name))
        return fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)

    block = torch.nn.Sequential(
        modules.LayerNormMLP(64, 64, name="mlp"),
        modules.Linear(64, 64, name="head"),
        modules.LayerNormMLP(64, 64),
    )
    with fuser.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
        block(x_of(32, 64))
    names = ("mlp.fc1", "mlp.fc2", "head", "fc1", "fc2")
    assert roles == {("linear", name) for name in names}
    roles.clear()
    with fuser.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
        modules.Linear(64, 64)(x_of(32, 64))
        for options in ({}, {"name": "experts"}):
            modules.GroupedLinear(2, 64, 64, **options)(x_of(64, 64), [32, 32])
    assert {name for _, name in roles} == {"", "experts"}


@pytest.mark.parametrize("make", [fuser.GELU, fuser.Sequential, torch.nn.Tanh])
def test_gather_quantized_refuses_what_has_no_linear(make: Any) -> None:
    with pytest.raises(
        fuser.InputError, match=said("gather-quantized-without-basic-module", make.__name__)
    ):
        fuser.distributed.gather_quantized(make(), recipes.Float8CurrentScaling())


def test_gather_quantized_leaves_frozen_weights_frozen() -> None:
    model = fuser.Sequential(fuser.Linear(64, 64), fuser.BasicLinear(64, 64), fuser.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    expected = {name: p.requires_grad for name, p in model.named_parameters()}
    fuser.distributed.gather_quantized(model, fuser.recipe.Float8CurrentScaling())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == expected
    assert type(model[1].weight) is not torch.nn.Parameter


def test_gather_quantized_asks_for_one_quantizer_of_a_weight_of_two_ops() -> None:
    names: list[str] = []

    def factory(role: Any) -> Any:
        names.append(role.name)
        return fuser.MXFP8Quantizer()

    model = fuser.Sequential(fuser.BasicLinear(64, 64), fuser.BasicLinear(64, 64))
    model[1].weight = model[0].weight
    fuser.distributed.gather_quantized(model, recipes.CustomRecipe(qfactory=factory))
    assert model[1].weight is model[0].weight
    assert names == ["0"]


def test_gather_quantized_takes_the_weights_of_layers_and_of_ops() -> None:
    model = torch.nn.Sequential(
        fuser.modules.LayerNormMLP(64, 128), fuser.Sequential(fuser.Linear(64, 64))
    )
    fuser.distributed.gather_quantized(model, fuser.recipe.Float8CurrentScaling())
    weights = {
        path for path, parameter in model.named_parameters() if isinstance(parameter, MasterWeight)
    }
    assert weights == {"0.fc1_weight", "0.fc2_weight", "1.0.basic_ops.0.weight"}
    linears = [op for _, op in modules_and_ops(model) if isinstance(op, fuser.BasicLinear)]
    kinds: list[type] = [type(op._parameters["weight"]) for op in linears]
    assert kinds == [MasterWeight] * 3


def test_of_two_keys_of_one_parameter_a_layer_loads_its_own() -> None:
    layer, other = modules.Linear(8, 4), modules.Linear(8, 4)
    state = {**other.state_dict(), "ops.0.basic_ops.0.weight": torch.zeros(4, 8)}
    layer.load_state_dict(state)
    assert torch.equal(layer.weight, other.weight)
