"""State: checkpoints, replaced parameters, devices and dtypes, deferred init, main_grad."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracles import (
    DTYPES,
    Draw,
    assert_no_worse_than_torch,
    leaf,
    params_of,
    random_tensor,
    randomize,
    run_formula,
    run_module,
    worst_error,
)
from said import Said, said

import fuser

pytestmark = pytest.mark.sampled(most=12)

N = 6
FP32, BF16 = torch.float32, torch.bfloat16


def tensor(dtype: torch.dtype = FP32, seed: int = 1) -> torch.Tensor:
    return random_tensor((4, N), dtype, seed)


def mlp(**kwargs: Any) -> fuser.Sequential:
    return fuser.Sequential(
        fuser.LayerNorm(N, **kwargs),
        fuser.Linear(N, 16, **kwargs),
        fuser.SwiGLU(),
        fuser.Linear(8, N, bias=False, **kwargs),
    )


PARAMETERS = [
    "0.weight",
    "0.bias",
    "1.basic_ops.0.weight",
    "1.basic_ops.1.bias",
    "3.basic_ops.0.weight",
]
EXTRA_STATES = ["1.basic_ops.0._extra_state", "3.basic_ops.0._extra_state"]
OLD_EXTRA_STATES = [
    *EXTRA_STATES,
    *("0._extra_state", "1.basic_ops.1._extra_state", "2._extra_state"),
]


# -- checkpoints -------------------------------------------------------------------


def test_state_dict_has_the_keys_that_checkpoints_have() -> None:
    assert list(fuser.Linear(N, N).state_dict()) == [
        "basic_ops.0.weight",
        "basic_ops.0._extra_state",
        "basic_ops.1.bias",
    ]
    assert set(fuser.Linear(N, N, bias=False).state_dict()) == {
        "basic_ops.0.weight",
        "basic_ops.0._extra_state",
    }
    assert set(mlp().state_dict()) == {*PARAMETERS, *EXTRA_STATES}


def test_named_parameters_are_those_of_the_basic_ops() -> None:
    model = mlp()
    assert [name for name, _ in model.named_parameters()] == PARAMETERS
    assert model[1].weight is model[1].basic_ops[0].weight
    assert model[1].bias is model[1].basic_ops[1].bias
    assert len(list(model.parameters())) == len(PARAMETERS)


def test_calling_and_planning_leave_no_trace_in_the_state() -> None:
    model = mlp()
    before = list(model.state_dict()), repr(model)
    model(tensor()).sum().backward()
    model.plan(tensor())
    model[0](tensor())
    assert (list(model.state_dict()), repr(model)) == before


@pytest.mark.parametrize("key", EXTRA_STATES)
def test_extra_state_is_an_empty_tensor_of_bytes(key: str) -> None:
    extra = mlp().state_dict()[key]
    assert type(extra) is torch.Tensor
    assert (extra.dtype, extra.shape) == (torch.uint8, (0,))


def same_output(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    return torch.equal(first(tensor()), second(tensor()))


@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_a_state_dict_loads_strictly_both_ways(called: bool, assign: bool) -> None:
    source, target = randomize(mlp()), mlp()
    if called:
        target(tensor())
    assert not same_output(source, target)
    result = target.load_state_dict(source.state_dict(), assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same_output(source, target)


def test_state_goes_through_a_file_without_pickled_objects() -> None:
    source, target, file = randomize(mlp()), mlp(), io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert same_output(source, target)


def test_a_checkpoint_without_extra_state_loads_strictly() -> None:
    source, target = randomize(mlp()), mlp()
    state = {k: v for k, v in source.state_dict().items() if not k.endswith("_extra_state")}
    assert set(state) == set(PARAMETERS)
    result = target.load_state_dict(state, strict=True)
    assert not result.missing_keys
    assert same_output(source, target)


def test_weights_of_plain_torch_modules_load_under_their_keys() -> None:
    source = torch.nn.Linear(N, 5)
    target = fuser.Linear(N, 5)
    target.load_state_dict(
        {"basic_ops.0.weight": source.weight, "basic_ops.1.bias": source.bias}, strict=True
    )
    assert torch.equal(target(tensor()), source(tensor()))


class Bomb:
    """Sets ``exploded`` when it is unpickled."""

    exploded = False

    @staticmethod
    def explode() -> Bomb:
        Bomb.exploded = True
        return Bomb()

    def __reduce__(self) -> tuple[Any, ...]:
        return Bomb.explode, ()


def _as_bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    "wrap", [_as_bytes_tensor, io.BytesIO, lambda data: None], ids=["tensor", "file", "none"]
)
def test_extra_state_of_another_library_is_accepted_and_never_unpickled(wrap: Any) -> None:
    source, target = randomize(mlp()), mlp()
    state = source.state_dict()
    for key in OLD_EXTRA_STATES:
        state[key] = wrap(pickle.dumps({"recipe": Bomb()}))
    result = target.load_state_dict(state, strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert not Bomb.exploded
    assert same_output(source, target)
    assert target.state_dict()[EXTRA_STATES[0]].numel() == 0


@pytest.mark.parametrize("missing", PARAMETERS)
def test_a_missing_parameter_is_still_an_error(missing: str) -> None:
    state = mlp().state_dict()
    del state[missing]
    with pytest.raises(RuntimeError, match=missing):
        mlp().load_state_dict(state)


def test_an_unexpected_key_and_a_wrong_shape_are_still_errors() -> None:
    state = mlp().state_dict()
    with pytest.raises(RuntimeError, match=r"7\.weight"):
        mlp().load_state_dict({**state, "7.weight": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        mlp().load_state_dict({**state, "0.weight": torch.ones(N + 1)})


def test_an_old_checkpoint_with_an_empty_state_of_every_op_loads_strictly() -> None:
    source, target = randomize(mlp()), mlp()
    empty = torch.empty(0, dtype=torch.uint8)
    target.load_state_dict({**source.state_dict(), **dict.fromkeys(OLD_EXTRA_STATES, empty)})
    assert same_output(source, target)
    with pytest.raises(RuntimeError, match=r'Unexpected.*"4._extra_state"'):
        target.load_state_dict({**source.state_dict(), "4._extra_state": empty})


# -- plain keys --------------------------------------------------------------------


def torchs_mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.LayerNorm(N),
        torch.nn.Linear(N, 16),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Linear(16, N, bias=False),
    )


def our_mlp(**kwargs: Any) -> fuser.Sequential:
    return fuser.Sequential(
        fuser.LayerNorm(N, **kwargs),
        fuser.Linear(N, 16, **kwargs),
        fuser.GELU(),
        fuser.Linear(16, N, bias=False, **kwargs),
    )


class Block(torch.nn.Module):
    """A user's module, whose state dict torch's own method loads."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([layers])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[0](x)
        return y


WRAPPERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "alone": lambda layers: layers,
    "in a module": Block,
}


@pytest.mark.parametrize("where", WRAPPERS)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_a_state_of_torchs_layers_loads_strictly(where: str, assign: bool) -> None:
    wrap = WRAPPERS[where]
    source, target = wrap(randomize(torchs_mlp())), wrap(our_mlp())
    state = source.state_dict()
    before = dict(state)
    result = target.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert list(state) == list(before)
    assert all(map(torch.equal, target.parameters(), source.parameters()))
    torch.testing.assert_close(target(tensor()), source(tensor()))


def test_a_state_of_torchs_linear_loads_into_a_linear_alone() -> None:
    source, target = torch.nn.Linear(N, 5), fuser.Linear(N, 5)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(tensor()), source(tensor()))


def test_a_plain_state_dict_loads_strictly_into_torchs_layers_and_into_these() -> None:
    source, plain, other = randomize(our_mlp()), torchs_mlp(), our_mlp()
    state = source.plain_state_dict()
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    other.load_state_dict(state)
    assert all(map(torch.equal, plain.parameters(), source.parameters()))
    assert same_output(source, other)
    assert state["1.weight"].data_ptr() == source[1].weight.data_ptr()
    assert list(source.state_dict()) != list(state)  # on request alone


@pytest.mark.parametrize("where", WRAPPERS)
def test_the_hook_makes_every_state_dict_of_a_module_plain(where: str) -> None:
    wrap = WRAPPERS[where]
    source, plain = wrap(randomize(our_mlp())), wrap(torchs_mlp())
    source.register_state_dict_post_hook(fuser.plain_keys)
    plain.load_state_dict(source.state_dict())
    assert all(map(torch.equal, plain.parameters(), source.parameters()))


def test_a_module_under_two_names_has_plain_keys_under_both() -> None:
    """As torch's: a tied module is in the state twice."""
    shared, torchs = our_mlp(), torchs_mlp()
    model = torch.nn.ModuleDict({"first": shared, "second": shared})
    plain = torch.nn.ModuleDict({"first": torchs, "second": torchs})
    model.register_state_dict_post_hook(fuser.plain_keys)
    assert set(model.state_dict()) == set(plain.state_dict())


def test_a_hook_below_leaves_the_other_keys_of_a_module_as_they_are() -> None:
    model = fuser.Sequential(fuser.Linear(N, N), our_mlp())
    model[1].register_state_dict_post_hook(fuser.plain_keys)
    keys = {"0.basic_ops.0.weight", "0.basic_ops.1.bias", "0.basic_ops.0._extra_state"}
    assert set(model.state_dict()) == keys | {f"1.{key}" for key in torchs_mlp().state_dict()}


@pytest.mark.parametrize("make", [our_mlp, lambda: fuser.modules.LayerNormMLP(N, 16)])
def test_a_plain_state_dict_has_neither_quantized_tensors_nor_scales(make: Any) -> None:
    recipe = fuser.recipe.DelayedScaling()
    with fuser.quantized_model_init(recipe=recipe):
        model = make()
    with fuser.autocast(recipe=recipe):
        model(tensor()).sum().backward()
    assert any(v.numel() for k, v in model.state_dict().items() if k.endswith("_extra_state"))
    state = model.plain_state_dict()
    assert not any("_extra_state" in key or "basic_ops" in key for key in state)
    assert {type(value) for value in state.values()} == {torch.Tensor}
    for value, parameter in zip(state.values(), model.parameters(), strict=True):
        is_quantized = isinstance(parameter, fuser.QuantizedTensor)
        assert torch.equal(value, parameter.dequantize() if is_quantized else parameter)


def test_keys_of_both_kinds_for_one_parameter_are_refused() -> None:
    model = our_mlp()
    state = {**model.state_dict(), "1.weight": torch.zeros(16, N)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "1.weight"'):
        model.load_state_dict(state)


def scaled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.clone() if k.endswith("_extra_state") else v * 2 for k, v in state.items()}


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "sequential": our_mlp,
    "linear": lambda: fuser.Linear(N, N),
    "norm": lambda: fuser.RMSNorm(N),
    "layer": lambda: fuser.modules.LayerNormMLP(N, 16),
    "batch-norm": lambda: fuser.Sequential(fuser.Linear(N, N), torch.nn.BatchNorm1d(N)),
}
WRONG: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    r"Missing key\(s\)": lambda s, last: {k: v for k, v in s.items() if k != last},
    r"Unexpected key\(s\) in state_dict: \"9.x\"": lambda s, last: {**s, "9.x": torch.ones(1)},
    "size mismatch for": lambda s, last: {**s, last: torch.ones(3, 5)},
    "expected torch.Tensor": lambda s, last: {**s, last: None},
    said("delayed-scaling-needs-numbers-history"): lambda s, last: {
        k: v[:-3] if k.endswith("_extra_state") else v for k, v in s.items()
    },
}


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize(
    ("model", "wrong"),
    # A norm has no state of delayed scaling.
    [(m, w) for m in MODELS for w in WRONG if m != "norm" or not isinstance(w, Said)],
)
def test_a_state_that_is_refused_changes_nothing(model: Any, wrong: str, assign: bool) -> None:
    model, recipe = randomize(MODELS[model]()), fuser.recipe.DelayedScaling()
    with fuser.autocast(recipe=recipe):
        model(tensor()).sum().backward()
    given = copy.deepcopy(model.state_dict())
    with fuser.autocast(recipe=recipe):  # amaxes that the given state does not have
        model(9 * tensor()).sum().backward()
    state = model.state_dict()
    before = {key: (value.clone(), value._version) for key, value in state.items()}
    parameters = list(model.parameters())
    last = [key for key, _ in model.named_parameters()][-1]
    given = WRONG[wrong](scaled(given), last)
    grads = {key: value.requires_grad for key, value in given.items() if value is not None}
    with pytest.raises((RuntimeError, fuser.InputError), match=wrong):
        model.load_state_dict(given, assign=assign)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, (value, _) in before.items())
    assert all(after[k]._version == n for k, (_, n) in before.items() if "extra" not in k)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert {k: v.requires_grad for k, v in given.items() if v is not None} == grads
    model.load_state_dict(scaled(state), assign=assign)
    assert all(torch.equal(p, 2 * before[k][0]) for k, p in model.named_parameters())


def test_a_state_that_is_refused_leaves_references_of_other_modules_as_they_are() -> None:
    model = fuser.Sequential(torch.nn.RNN(N, N, batch_first=True))
    expected = model(tensor())[0]
    with pytest.raises(RuntimeError, match="Unexpected"):
        model.load_state_dict({**scaled(model.state_dict()), "x": torch.ones(1)})
    assert torch.equal(model(tensor())[0], expected)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_hook_of_a_user_runs_once_in_a_load(kind: str) -> None:
    calls = []
    model = our_mlp()
    register = getattr(model[0], f"register_load_state_dict_{kind}_hook")
    register(lambda *args: calls.append(args))
    model.load_state_dict(model.state_dict())
    assert len(calls) == 1


def test_an_assigned_state_is_used_by_a_model_that_was_made_on_meta() -> None:
    source = randomize(mlp())
    target = mlp(device="meta")
    target.load_state_dict(source.state_dict(), assign=True)
    assert same_output(source, target)


# -- replaced parameters -----------------------------------------------------------


def _set_on_linear(linear: fuser.Linear, name: str, value: Any) -> None:
    setattr(linear, name, value)


def _set_on_basic_op(linear: fuser.Linear, name: str, value: Any) -> None:
    setattr(linear.basic_ops[0 if name == "weight" else 1], name, value)


def _register_on_linear(linear: fuser.Linear, name: str, value: Any) -> None:
    linear.register_parameter(name, value)


@pytest.mark.parametrize("in_pipeline", [False, True], ids=["alone", "in-a-pipeline"])
@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("replace", [_set_on_linear, _set_on_basic_op, _register_on_linear])
def test_a_replaced_parameter_is_the_one_that_is_used_and_gets_the_gradient(
    replace: Callable[..., None], name: str, called: bool, in_pipeline: bool
) -> None:
    linear = fuser.Linear(N, 5)
    model = fuser.Sequential(linear, fuser.ConstantScale(1.0)) if in_pipeline else linear
    if called:
        model(tensor()).sum().backward()
        linear.zero_grad()
    old = getattr(linear, name)
    new = torch.nn.Parameter(random_tensor(old.shape, FP32, 9))
    replace(linear, name, new)
    assert getattr(linear, name) is new
    assert {id(p) for p in linear.parameters()} == {id(linear.weight), id(linear.bias)}
    y = model(tensor())
    assert torch.allclose(y, tensor() @ linear.weight.T + linear.bias)
    y.sum().backward()
    assert new.grad is not None
    assert old.grad is None


def test_a_replaced_parameter_of_another_dtype_decides_the_output() -> None:
    linear: Any = fuser.Linear(N, 5, bias=False)
    linear(tensor())
    linear.weight = torch.nn.Parameter(linear.weight.detach().to(BF16))
    y = linear(tensor(BF16))
    assert y.dtype == BF16
    y.sum().backward()
    assert linear.weight.grad.dtype == BF16


def test_a_replaced_norm_parameter_is_used() -> None:
    norm = fuser.RMSNorm(N)
    before = norm(tensor())
    norm.weight = torch.nn.Parameter(torch.full((N,), 2.0))
    assert torch.equal(norm(tensor()), 2 * before)


def test_a_linear_without_bias_has_none_and_cannot_be_given_one() -> None:
    linear: Any = fuser.Linear(N, 5, bias=False)
    assert linear.bias is None
    linear.bias = None
    with pytest.raises(ValueError, match=said("linear-made-bias-false")):
        linear.bias = torch.nn.Parameter(torch.zeros(5))
    assert torch.allclose(linear(tensor()), tensor() @ linear.weight.T)


@pytest.mark.parametrize("value", [torch.zeros(5, N), 3.0, "x"], ids=["tensor", "number", "text"])
def test_a_parameter_cannot_be_replaced_by_something_else(value: Any) -> None:
    linear: Any = fuser.Linear(N, 5)
    kept = linear.weight
    with pytest.raises(TypeError):
        linear.weight = value
    assert linear.weight is kept


def test_a_shared_weight_collects_both_gradients() -> None:
    first = fuser.Linear(N, N, bias=False)
    second: Any = fuser.Linear(N, N, bias=False)
    second.weight = first.weight
    model = fuser.Sequential(first, fuser.GELU(), second)
    randomize(model)
    draws = []
    for seed in range(8):

        def formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x @ weight.T, approximate="tanh") @ weight.T

        tensors = {"x": tensor(seed=seed), **params_of(model)}
        plain, exact = (run_formula(formula, tensors, d) for d in (FP32, torch.float64))
        draws.append(Draw(run_module(model, leaf(tensors["x"])), plain, exact))
    assert_no_worse_than_torch(*draws)


def test_an_optimizer_trains_the_parameters_it_was_given() -> None:
    model = randomize(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = params_of(model)
    model(tensor()).square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, torch.add(before[name], grads[name], alpha=-0.1))


# -- devices and dtypes ------------------------------------------------------------


MAKERS = {
    "Linear": lambda **kwargs: fuser.Linear(N, N, **kwargs),
    "BasicLinear": lambda **kwargs: fuser.BasicLinear(N, N, **kwargs),
    "Bias": lambda **kwargs: fuser.Bias(N, **kwargs),
    "LayerNorm": lambda **kwargs: fuser.LayerNorm(N, **kwargs),
    "RMSNorm": lambda **kwargs: fuser.RMSNorm(N, **kwargs),
    "RMSNorm-zero-centered": lambda **kwargs: fuser.RMSNorm(N, zero_centered_gamma=True, **kwargs),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture
def default_device() -> Iterator[Callable[[str], None]]:
    """Sets torch's default device until the test ends."""
    yield torch.set_default_device
    torch.set_default_device(None)


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """Sets torch's default dtype until the test ends."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def kinds(module: torch.nn.Module, what: str) -> set[Any]:
    return {getattr(p, what) for p in module.parameters()}


@every_maker
def test_no_device_means_torchs_default_device_if_one_was_set(
    make: Callable[..., torch.nn.Module], default_device: Callable[[str], None]
) -> None:
    default_device("meta")
    assert kinds(make(), "device") == {torch.device("meta")}
    assert kinds(make(device="cpu"), "device") == {torch.device("cpu")}
    default_device("cpu")
    assert kinds(make(), "device") == {torch.device("cpu")}


@every_maker
def test_no_device_means_the_device_of_the_context(make: Callable[..., torch.nn.Module]) -> None:
    with torch.device("meta"):
        assert kinds(make(), "device") == {torch.device("meta")}
        with torch.device("cpu"):
            assert kinds(make(), "device") == {torch.device("cpu")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
@every_maker
def test_no_device_and_no_cuda_means_the_cpu(make: Callable[..., torch.nn.Module]) -> None:
    assert kinds(make(), "device") == {torch.device("cpu")}


@pytest.mark.parametrize("chosen", [None, "cpu"], ids=["nothing-set", "cpu-set"])
def test_with_cuda_no_device_means_cuda_unless_the_cpu_was_set(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch, default_device: Callable[[str], None]
) -> None:
    from fuser.op import default_device as device_for

    if chosen is None and torch.cuda.is_available():
        pytest.skip("where there is a GPU, tests run with the CPU as the default device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    if chosen is not None:
        default_device(chosen)
    assert device_for(None) == torch.device(chosen or "cuda:3")
    assert device_for("cpu") == torch.device("cpu")
    with torch.device("cpu"):
        assert device_for(None) == torch.device("cpu")


@every_maker
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_dtype_means_torchs_default_dtype(
    make: Callable[..., torch.nn.Module],
    dtype: torch.dtype,
    default_dtype: Callable[[torch.dtype], None],
) -> None:
    assert kinds(make(), "dtype") == {FP32}
    assert kinds(make(dtype=dtype), "dtype") == {dtype}
    default_dtype(dtype)
    assert kinds(make(), "dtype") == {dtype}


CASTS: dict[str, tuple[Callable[[torch.nn.Module], Any], torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), BF16),
    "to-dtype": (lambda m: m.to(BF16), BF16),
    "to-keyword": (lambda m: m.to(dtype=torch.float16), torch.float16),
    "to-and-back": (lambda m: m.half().float(), FP32),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
def test_a_cast_model_runs_in_its_new_dtype(cast: str, called: bool) -> None:
    change, dtype = CASTS[cast]
    model = randomize(mlp())
    if called:
        model(tensor()).sum().backward()
    change(model)
    assert kinds(model, "dtype") == {dtype}

    def formula(
        x: torch.Tensor, g: Any, b: Any, w1: Any, b1: Any, w2: torch.Tensor
    ) -> torch.Tensor:
        a, c = (torch.nn.functional.layer_norm(x, (N,), g, b) @ w1.T + b1).chunk(2, -1)
        y: torch.Tensor = (torch.nn.functional.silu(a) * c) @ w2.T
        return y

    draws = []
    for seed in range(8):
        tensors = {"x": tensor(dtype, seed), **params_of(model)}
        plain, exact = (run_formula(formula, tensors, d) for d in (dtype, torch.float64))
        draws.append(Draw(run_module(model, leaf(tensors["x"])), plain, exact))
    assert_no_worse_than_torch(*draws)


# -- meta device and deferred initialisation ---------------------------------------


@every_maker
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_parameters_on_meta_are_made_at_the_first_forward_as_if_made_at_once(
    make: Callable[..., torch.nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    expected = make(dtype=dtype)
    deferred = make(dtype=dtype, device="meta")
    assert kinds(deferred, "is_meta") == {True}
    torch.manual_seed(5)
    deferred(tensor(dtype))
    for ours, theirs in zip(deferred.parameters(), expected.parameters(), strict=True):
        assert not ours.is_meta
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_a_deferred_model_trains_from_its_first_forward() -> None:
    torch.manual_seed(5)
    expected = mlp()
    model = mlp(device="meta")
    torch.manual_seed(5)
    x = leaf(tensor())
    y = model(x)
    assert torch.equal(y, expected(tensor()))
    y.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in model.parameters())
    made = list(model.parameters())
    model(tensor())
    assert all(a is b for a, b in zip(made, model.parameters(), strict=True))


@every_maker
def test_a_frozen_parameter_on_meta_stays_frozen(make: Callable[..., torch.nn.Module]) -> None:
    op = make(device="meta").requires_grad_(False)
    assert not op(tensor()).requires_grad
    assert kinds(op, "requires_grad") == {False}


@every_maker
@pytest.mark.parametrize("recipe", [None, fuser.recipe.MXFP8BlockScaling()], ids=["", "quantized"])
def test_an_optimizer_made_before_the_first_forward_trains_a_deferred_model(
    make: Callable[..., torch.nn.Module], recipe: Any
) -> None:
    with fuser.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        if recipe is not None:
            deferred: torch.nn.Module = fuser.Linear(32, 32, device="meta")
        else:
            deferred = make(device="meta")
    held = list(deferred.parameters())
    for number, parameter in enumerate(held):
        parameter.number = number
    optimizer = torch.optim.SGD(held, lr=0.5)
    x = tensor() if recipe is None else random_tensor((32, 32), FP32, 1)
    with torch.no_grad():
        before = deferred(x)
    deferred(x).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(deferred(x), before)
    assert all(a is b for a, b in zip(held, deferred.parameters(), strict=True))
    assert [parameter.number for parameter in deferred.parameters()] == list(range(len(held)))
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in held)


def test_a_parameter_that_two_ops_share_on_meta_is_made_once_and_stays_shared() -> None:
    model = fuser.Sequential(fuser.BasicLinear(N, N, device="meta"), fuser.BasicLinear(N, N))
    model[1].weight = model[0].weight
    y = model(tensor())
    assert model[0].weight is model[1].weight
    weight = model[0].weight.detach()
    torch.testing.assert_close(y, tensor() @ weight.T @ weight.T)


def test_resetting_a_quantized_weight_keeps_the_parameter() -> None:
    with fuser.quantized_model_init(recipe=fuser.recipe.Float8CurrentScaling()):
        linear = fuser.BasicLinear(N, N)
    weight, before = linear.weight, linear.weight.dequantize().clone()
    linear.reset_parameters()
    assert linear.weight is weight
    assert not torch.equal(weight.dequantize(), before)


@every_maker
def test_a_parameter_on_meta_that_has_hooks_is_refused_with_the_way_out(
    make: Callable[..., torch.nn.Module],
) -> None:
    model = fuser.Sequential(make(device="meta"))
    seen: list[torch.Tensor] = []
    first = next(model.parameters())
    handle = first.register_hook(seen.append)
    with pytest.raises(fuser.StateError, match=said("basic-cannot-give-parameter-hooks")):
        model(tensor())
    assert next(model.parameters()) is first
    handle.remove()
    assert model(tensor()).shape == (4, N)


def test_a_parameter_on_meta_that_a_graph_holds_is_refused_with_the_way_out() -> None:
    linear = fuser.BasicLinear(N, N, device="meta")
    graph = linear(tensor().to("meta"))
    view = linear.weight.view(-1)
    with pytest.raises(
        fuser.StateError, match=said("basic-cannot-give-something-holds", None, "'weight'")
    ):
        linear(tensor())
    del graph, view
    assert linear(tensor()).shape == (4, N)


def test_parameters_are_deferred_to_the_default_device(
    default_device: Callable[[str], None],
) -> None:
    linear = fuser.Linear(N, N, device="meta")
    default_device("cpu")
    assert linear(tensor()).device.type == "cpu"


def test_deferred_initialisation_runs_in_the_fork_of_the_tracker() -> None:
    entered = []

    class Tracker:
        def fork(self) -> Any:
            entered.append(True)
            return torch.random.fork_rng(devices=[])

    linear = fuser.Linear(N, N, device="meta", rng_state_tracker_function=Tracker)
    assert entered == []
    linear(tensor())
    linear(tensor())
    assert entered == [True]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_meta_input_gives_meta_shapes_and_makes_nothing(device: str) -> None:
    model = mlp(device="meta")
    model.append(fuser.MakeExtraOutput()).append(fuser.Linear(N, 3, device="meta"))
    for leading in ((4,), (2, 3), (0,)):
        y, made = model(torch.empty(*leading, N, device="meta"))
        assert y.is_meta
        assert made.is_meta
        assert (y.shape, made.shape) == ((*leading, 3), (*leading, N))
        assert y.dtype == FP32
    assert kinds(model, "is_meta") == {True}
    if device == "cpu":
        del y, made  # whose graph holds the parameters that are made now
        y, _ = model(tensor())
        assert kinds(model, "is_meta") == {False}
        assert y.shape == (4, 3)


def test_a_meta_forward_has_a_meta_backward() -> None:
    model = mlp(device="meta")
    x = torch.empty(4, N, device="meta", requires_grad=True)
    model(x).sum().backward()
    assert x.grad.is_meta
    assert x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_planning_makes_no_parameters() -> None:
    model = mlp(device="meta")
    plan = model.plan(torch.empty(4, N, device="meta"))
    assert kinds(model, "is_meta") == {True}
    assert plan.forward
    model(tensor())
    assert kinds(model, "is_meta") == {False}
    assert plan in model.plans


def test_a_model_emptied_onto_a_device_and_reset_is_initialised() -> None:
    linear = fuser.Linear(N, N, device="meta").to_empty(device="cpu")
    torch.manual_seed(5)
    for op in linear.basic_ops:
        op.reset_parameters()
    torch.manual_seed(5)
    expected = fuser.Linear(N, N)
    assert torch.equal(linear.weight, expected.weight)
    assert torch.equal(linear.bias, expected.bias)


# -- main_grad ---------------------------------------------------------------------


def _alone(linear: fuser.BasicLinear) -> fuser.Sequential:
    return fuser.Sequential(linear)


def _scaled(linear: fuser.BasicLinear) -> fuser.Sequential:
    return fuser.Sequential(linear, fuser.ConstantScale(-1.5))


def _with_extra_output(linear: fuser.BasicLinear) -> fuser.Sequential:
    return fuser.Sequential(fuser.MakeExtraOutput(), linear)


# Each way in which a linear's backward runs, with the fusion that runs it.
BACKWARDS = {
    "unfused": (_alone, None),
    "scaled": (_scaled, "BackwardLinearScale"),
    "added": (_with_extra_output, "BackwardLinearAdd"),
}
every_backward = pytest.mark.parametrize(("wrap", "fusion"), BACKWARDS.values(), ids=BACKWARDS)


def accumulating(dtype: torch.dtype) -> fuser.BasicLinear:
    linear = fuser.BasicLinear(N, 5, dtype=dtype, accumulate_into_main_grad=True)
    randomize(linear)
    linear.weight.main_grad = torch.full((5, N), 0.25)
    return linear


@every_backward
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_gradients_add_up_in_fp32_main_grad(
    wrap: Callable[..., fuser.Sequential], fusion: str | None, dtype: torch.dtype
) -> None:
    linear = accumulating(dtype)
    plain = fuser.BasicLinear(N, 5, dtype=dtype)
    plain.weight = torch.nn.Parameter(linear.weight.detach().clone())
    model, reference = wrap(linear), wrap(plain)
    main_grad = linear.weight.main_grad
    exact = torch.full((5, N), 0.25, dtype=torch.float64)
    rounding = 0.0
    for step in (1, 2):
        x = leaf(tensor(dtype, step))
        ours = run_module(model, x)
        theirs = run_module(reference, leaf(x))
        assert linear.weight.grad is None
        assert torch.equal(ours["gradient of x"], theirs["gradient of x"])
        factor = -1.5 if fusion == "BackwardLinearScale" else 1.0
        # The gradient of the first output is the same in every run of the oracle.
        dy = random_tensor((4, 5), BF16, 50).double()
        exact += factor * dy.T @ x.detach().double()
        # fp32 sums: one rounding for each of the 4 rows and for the addition.
        rounding += 5 * torch.finfo(FP32).eps * float(exact.abs().max())
        assert linear.weight.main_grad is main_grad
        assert worst_error(main_grad, exact) <= rounding
    fired = [step.fusion for step in model.plans[0].backward if step.fusion]
    assert fired == ([fusion] if fusion else [])


@every_backward
@pytest.mark.parametrize("recipe", [None, fuser.recipe.Float8CurrentScaling()], ids=str)
def test_a_main_grad_that_is_to_be_overwritten_gets_the_gradient_alone(
    wrap: Callable[..., fuser.Sequential], fusion: str | None, recipe: Any
) -> None:
    linear = accumulating(FP32)
    added = torch.zeros(5, N)
    stale = torch.full((5, N), math.nan)
    for main_grad, is_overwritten in ((added, False), (stale, True)):
        linear.weight.main_grad = main_grad
        linear.weight.overwrite_main_grad = is_overwritten
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            run_module(wrap(linear), leaf(tensor()))
    assert added.any()
    assert torch.equal(stale, added)


def test_the_buffer_of_a_sharded_parameter_is_asked_for_at_each_backward() -> None:
    linear = accumulating(FP32)
    buffers = [torch.zeros(5, N), torch.zeros(5, N)]
    waiting = iter(buffers)
    linear.weight.__fsdp_param__ = True
    linear.weight.get_main_grad = lambda: next(waiting)
    for _ in buffers:
        linear(leaf(tensor())).sum().backward()
    assert buffers[0].any()
    assert torch.equal(*buffers)
    assert linear.weight.main_grad is buffers[1]


@every_backward
def test_without_main_grad_the_backward_says_so_and_the_next_one_works(
    wrap: Callable[..., fuser.Sequential], fusion: str | None
) -> None:
    linear = accumulating(FP32)
    del linear.weight.main_grad
    model = wrap(linear)

    def backward() -> None:
        outputs = model(leaf(tensor()))
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()

    with pytest.raises(RuntimeError, match=said("main-grad-accumulates-weight-into")):
        backward()
    linear.weight.main_grad = torch.zeros(5, N)
    backward()
    assert linear.weight.main_grad.any()


@every_backward
@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("shape", [(5 * N,), (N, 5), (1, 5, N), (1, N)])
def test_a_main_grad_of_another_shape_is_refused_and_left_as_it_is(
    wrap: Callable[..., fuser.Sequential],
    fusion: str | None,
    shape: tuple[int, ...],
    overwrites: bool,
) -> None:
    linear = accumulating(FP32)
    linear.weight.main_grad = torch.full(shape, 7.0)
    linear.weight.overwrite_main_grad = overwrites
    model = wrap(linear)

    def backward() -> None:
        outputs = model(leaf(tensor()))
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()

    with pytest.raises(fuser.InputError, match=said("main-grad-adds-weight-give", (5, N))):
        backward()
    assert bool((linear.weight.main_grad == 7).all())
    linear.weight.main_grad = torch.zeros(5, N)
    backward()
    assert linear.weight.main_grad.any()


@every_backward
@pytest.mark.parametrize("zero_out", [False, True], ids=["any-values", "zeros"])
def test_grad_added_to_main_grad_is_set_and_a_stand_in_gradient_fires_the_hooks(
    wrap: Callable[..., fuser.Sequential], fusion: str | None, zero_out: bool
) -> None:
    linear = accumulating(BF16)
    weight = linear.weight
    weight.grad_added_to_main_grad = False
    if zero_out:
        weight.zero_out_wgrad = True
    seen: list[torch.Tensor] = []
    weight.register_hook(lambda grad: seen.append(grad))
    outputs = wrap(linear)(leaf(tensor(BF16)))
    (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()
    assert weight.grad_added_to_main_grad is True
    (stand_in,) = seen
    assert (stand_in.shape, stand_in.dtype) == (weight.shape, weight.dtype)
    assert not zero_out or not stand_in.any()
    assert not torch.equal(weight.main_grad, torch.full((5, N), 0.25))


def test_a_frozen_weight_leaves_main_grad_alone() -> None:
    linear = accumulating(FP32)
    linear.weight.requires_grad_(False)
    linear(leaf(tensor())).sum().backward()
    assert torch.equal(linear.weight.main_grad, torch.full((5, N), 0.25))


ASKS_FOR_X: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "autograd.grad": lambda y, x: torch.autograd.grad(y, x, torch.ones_like(y)),
    "backward(inputs=)": lambda y, x: y.sum().backward(inputs=[x]),
}


@every_backward
@pytest.mark.parametrize("ask", ASKS_FOR_X.values(), ids=ASKS_FOR_X)
def test_a_backward_that_leaves_the_weight_out_leaves_main_grad_alone(
    wrap: Callable[..., fuser.Sequential],
    fusion: str | None,
    ask: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    linear, x = accumulating(FP32), leaf(tensor())
    out = wrap(linear)(x)
    y = out[0] if isinstance(out, tuple) else out
    before = linear.weight.main_grad.clone()
    ask(y, x)
    assert torch.equal(linear.weight.main_grad, before)
    assert linear.weight.grad is None


@pytest.mark.parametrize("recipe", [None, fuser.recipe.Float8CurrentScaling()], ids=["", "fp8"])
def test_a_gradient_of_the_weight_that_is_asked_for_is_returned(recipe: Any) -> None:
    linear = accumulating(FP32)
    plain = fuser.BasicLinear(N, 5)
    plain.weight = torch.nn.Parameter(linear.weight.detach().clone())
    found: list[torch.Tensor] = []
    for op in (linear, plain):
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = op(tensor())
        found += torch.autograd.grad(y, op.weight, torch.ones_like(y))
    assert torch.equal(*found)
    assert torch.equal(linear.weight.main_grad, torch.full((5, N), 0.25))
    linear(tensor()).sum().backward(inputs=[linear.weight])
    assert linear.weight.grad is None
    assert not torch.equal(linear.weight.main_grad, torch.full((5, N), 0.25))


def test_a_value_of_functional_call_gets_its_gradient_and_main_grad_is_left_alone() -> None:
    linear = accumulating(FP32)
    value, product = leaf(linear.weight.detach() * 2), leaf(linear.weight.detach())
    for given in (value, 2 * product):
        y = torch.func.functional_call(linear, {"weight": given}, (tensor(),))
        y.sum().backward()
    expected = tensor().sum(0).expand(5, N)
    torch.testing.assert_close(value.grad, expected)
    torch.testing.assert_close(product.grad, 2 * expected)
    assert torch.equal(linear.weight.main_grad, torch.full((5, N), 0.25))


def test_a_weight_that_is_replaced_before_its_backward_keeps_its_main_grad() -> None:
    linear = accumulating(FP32)
    old = linear.weight
    y = linear(tensor())
    linear.weight = torch.nn.Parameter(old.detach().clone())
    linear.weight.main_grad = torch.zeros(5, N)
    y.sum().backward()
    torch.testing.assert_close(old.main_grad, 0.25 + tensor().sum(0).expand(5, N))
    assert not linear.weight.main_grad.any()


def test_main_grad_of_a_replaced_weight_is_the_one_that_is_used() -> None:
    linear: Any = fuser.Linear(N, 5, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(5, N)
    old = linear.weight
    linear(tensor()).sum().backward()
    linear.weight = torch.nn.Parameter(old.detach().clone())
    linear.weight.main_grad = torch.zeros(5, N)
    kept = old.main_grad.clone()
    linear(tensor()).sum().backward()
    assert torch.equal(old.main_grad, kept)
    assert torch.equal(linear.weight.main_grad, kept)
    assert linear.bias.grad is not None


def test_under_autocast_an_fp32_weight_adds_a_bf16_product_to_main_grad() -> None:
    linear = accumulating(FP32)
    x = tensor()
    with torch.autocast("cpu", BF16):
        y = linear(leaf(x))
    y.backward(torch.ones_like(y))
    exact = 0.25 + torch.ones(5, 4, dtype=torch.float64) @ x.to(BF16).double()
    # The operands are exact in bf16: fp32 sums of 4 rows and one addition.
    assert worst_error(linear.weight.main_grad, exact) <= 5 * torch.finfo(FP32).eps * float(
        exact.abs().max()
    )
