"""Recorded passes with keyword arguments: microbatches that read quantized weights kept before.

The yardstick is a copy of the model whose passes are never recorded: it sees the same calls and the
same changes of weights between them, and has the same bits, wherever a kept weight is stale too.
Ops compute with torch, whose calls are recorded, so nothing is compiled.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import cpu_graphs
import every_format as formats
import models
import oracles
import pytest
import torch
from said import said
from test_random_replays import on_torch, same, without_recordings  # noqa: F401 - a fixture
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.errors import InputError
from fuser.gemm import grouped
from fuser.runtime import recorded

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is emulated"),
    pytest.mark.usefixtures("on_torch"),
]

BF16 = torch.bfloat16
ROWS, WIDTH = 64, 32
RECIPES: dict[str, Any] = {
    name: formats.deterministic(cls)
    for name, cls in formats.RECIPES.items()
    if cls is not recipes.DelayedScaling
}
RECIPES["delayed"] = recipes.DelayedScaling(amax_history_len=3)
SOME = ("current", "delayed", "mxfp8")
CURRENT = recipes.Float8CurrentScaling()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sequences of recorded passes that were repeated."""
    return noted(monkeypatch, "_played")


def noted(patch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """The first arguments of the calls of a function of ``recorded``."""
    found: list[Any] = []
    function = getattr(recorded, name)

    def noting(*args: Any, **options: Any) -> Any:
        found.append(args[0])
        return function(*args, **options)

    patch.setattr(recorded, name, noting)
    return found


# -- models ---------------------------------------------------------------------------------------


class Called:
    """A model, and how it is called for a microbatch."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def device(self) -> torch.device:
        found: torch.device = next(self.model.parameters()).device
        return found

    def __call__(self, x: torch.Tensor, flag: Any) -> torch.Tensor:
        y: torch.Tensor = self.model(x, is_first_microbatch=flag)
        return y


class InSequence(Called):
    """A Sequential, some of whose ops get the flag."""

    def __init__(self, model: Any, places: tuple[int, ...]) -> None:
        super().__init__(model)
        self.places = places

    def __call__(self, x: torch.Tensor, flag: Any) -> torch.Tensor:
        kwargs = None
        if flag is not None:
            flags = flag if isinstance(flag, list) else [flag] * len(self.places)
            pairs = zip(self.places, flags, strict=True)
            kwargs = {place: {"is_first_microbatch": each} for place, each in pairs}
        y: torch.Tensor = self.model(x, *self.extras(), op_kwargs=kwargs)
        return y

    def extras(self) -> tuple[torch.Tensor, ...]:
        return ()


class Experts(InSequence):
    def extras(self) -> tuple[torch.Tensor, ...]:
        sizes = torch.tensor([10, 0, 30, 24], device=self.device)
        return sizes, torch.linspace(0.5, 1.5, ROWS, device=self.device).to(BF16), sizes


def experts(**options: Any) -> Called:
    options = {"dtype": BF16, "device": "cpu", "bias": False, **options}
    model = fuser.Sequential(
        fuser.GroupedLinear(4, WIDTH, 128, **options),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(4, 64, WIDTH, **options),
    )
    return Experts(oracles.randomize(model), (0, 2))


def layer_of(kind: str) -> Called:
    torch.manual_seed(1)
    options = {"params_dtype": BF16, "device": "cpu"}
    widths = (WIDTH, 64) if kind == "LayerNormMLP" else (WIDTH, WIDTH)
    return Called(getattr(fuser.modules, kind)(*widths, **options))


def quantized_parameters() -> Called:
    with fuser.quantized_model_init(recipe=CURRENT):
        return InSequence(models.mlp(WIDTH, 64, randomized=False, dtype=BF16), (0, 2))


def mlp(*places: int) -> Called:
    return InSequence(models.mlp(WIDTH, 64, dtype=BF16), places or (0, 2))


def alone() -> Called:
    return Called(oracles.randomize(fuser.BasicLinear(WIDTH, WIDTH, dtype=BF16)))


MODELS: dict[str, Callable[[], Called]] = {
    "mlp": mlp,
    "one linear of two": functools.partial(mlp, 2),
    "swiglu": lambda: InSequence(models.residual_block(WIDTH, WIDTH, dtype=BF16), (2, 4)),
    "alone": alone,
    "LayerNormMLP": functools.partial(layer_of, "LayerNormMLP"),
    "LayerNormLinear": functools.partial(layer_of, "LayerNormLinear"),
}
EXPERTS: dict[str, Callable[[], Called]] = {
    "experts": experts,
    "one weight": functools.partial(experts, single_grouped_weight=True),
}


def at_once(patch: pytest.MonkeyPatch) -> None:
    """Products of all groups are one call of torch, as on a GPU."""
    patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: dtype is BF16)


# -- scripts --------------------------------------------------------------------------------------

Event = Any
T, F, N = True, False, None


def weights_of(called: Called) -> list[torch.nn.Parameter]:
    return [p for name, p in called.model.named_parameters() if "weight" in name and p.dim() > 1]


def scaled(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict with other values of the parameters."""
    return {n: v if "extra_state" in n else v * 1.25 for n, v in state.items()}


def changed(called: Called, how: str) -> None:
    """Change the weights by a way that a user has."""
    model, weights = called.model, weights_of(called)
    with torch.no_grad():
        if how == "write":
            weights[-1].mul_(1.5)
        elif how == "write all":
            torch._foreach_mul_(weights, 0.75)
        elif how == "uncounted":
            for weight in weights:
                weight.data.mul_(3)
        elif how == "data":
            weights[0].data = weights[0].data * 2
        elif how == "replaced":
            for module in model.modules():
                for name, weight in list(module._parameters.items()):
                    if weight is weights[0]:
                        setattr(module, name, torch.nn.Parameter(weight * 2))
        elif how == "load":
            model.load_state_dict(scaled(model.state_dict()))
        elif how == "assign":
            model.load_state_dict(scaled(model.state_dict()), assign=True)
        elif how == "apply":
            model.float().to(BF16)
        elif how == "step":
            for weight in weights:
                weight.grad = torch.full_like(weight, 0.125)
            torch.optim.AdamW(weights, lr=0.25, fused=True).step()
            model.zero_grad(set_to_none=True)
        elif how == "copy":
            called.model = copy.deepcopy(model)
        elif how == "freeze":
            for weight in weights:
                weight.requires_grad_(not weight.requires_grad)
        else:
            raise AssertionError(how)


CHANGES = (
    *("write", "write all", "uncounted", "data", "replaced", "load", "assign", "apply", "step"),
    *("copy", "freeze"),
)


def ran(called: Called, recipe: Any, script: list[Event], mode: str = "train") -> list[Any]:
    """Outputs, gradients and states of scaling of the calls of a script."""
    log: list[Any] = []
    for number, event in enumerate(script):
        if isinstance(event, str) and event in CHANGES:
            changed(called, event)
            continue
        how, flag = event if isinstance(event, tuple) else (mode, event)
        x = oracles.random_tensor((ROWS, WIDTH), BF16, number).to(called.device)
        if how == "fewer":
            x = x[: ROWS // 2].clone()
        x.requires_grad_(how != "no_grad")
        with fuser.autocast(recipe=recipe), torch.set_grad_enabled(how != "no_grad"):
            if how.startswith("checkpoint"):
                is_reentrant = how == "checkpoint, reentrant"
                y = checkpoint(called, x, flag, use_reentrant=is_reentrant)
            else:
                y = called(x, flag)
        log.append(y.detach().clone())
        if how != "no_grad":
            y.backward(oracles.random_tensor(tuple(y.shape), BF16, 100 + number).to(called.device))
            log += [x.grad, *(p.grad for p in called.model.parameters())]
            called.model.zero_grad(set_to_none=True)
        for module in ops_of(called):
            for state in module._delayed.values():
                log += [state.scale.clone(), state.amax_history.clone()]
    return log


def ops_of(called: Called) -> list[Any]:
    roots = [getattr(called.model, "ops", called.model)]
    return [m for root in roots for m in root.modules() if isinstance(m, fuser.BasicOperation)]


def assert_same(
    make: Callable[[], Called], recipe: Any, script: list[Event], mode: str = "train"
) -> list[Any]:
    """Check a script against a copy without recordings; returns its results."""
    called = make()
    other = copy.deepcopy(called)
    found = ran(called, recipe, script, mode)
    with without_recordings():
        expected = ran(other, recipe, script, mode)
    wrong = [i for i, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair)]
    assert not wrong, (len(found), wrong)
    return found


# Two steps make a recording of each kind of call, the others repeat them.
WARM = [T, F, F, N] * 4


# -- bits -----------------------------------------------------------------------------------------


@pytest.mark.sampled(most=12)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_microbatches_are_replayed_with_the_bits_of_the_plans_own_code(
    name: str, recipe: Any, played: list[Any]
) -> None:
    """Steps of several microbatches; every flag is replayed, and a write between steps is seen."""
    script = [*WARM, "step", T, F, F, N, "write", F, F, N, "uncounted", T, F, N]
    assert_same(MODELS[name], recipe, script)
    assert len(played) >= 2 * (len(script) - 11), "forward and backward of most calls"


@pytest.mark.sampled(most=12)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", EXPERTS)
def test_microbatches_of_experts_have_the_bits_of_the_plans_own_code(
    name: str, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are replayed too: see ``gpu/test_microbatches_on_a_gpu.py``."""
    at_once(monkeypatch)
    script = [*WARM, "step", T, F, N, "write", F, F, "uncounted", T, F, "replaced", F, "data", F]
    assert_same(EXPERTS[name], recipe, script)


@pytest.mark.sampled(most=12)
@pytest.mark.parametrize("flag", [T, F, N])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recipe", [CURRENT, RECIPES["delayed"]], ids=["current", "delayed"])
def test_a_weight_that_changed_is_read_as_without_recordings(
    recipe: Any, change: str, flag: bool | None
) -> None:
    assert_same(mlp, recipe, [*WARM, change, flag, F, F, change, F, flag, T, F, N])


@pytest.mark.sampled
@pytest.mark.parametrize("change", [one for one in CHANGES if one not in ("uncounted", "freeze")])
@pytest.mark.parametrize("name", ["mlp", "alone", "LayerNormMLP"])
def test_a_change_that_is_noticed_is_noticed_by_a_replay(name: str, change: str) -> None:
    """Against no microbatches at all, which shares no kept weight with them."""
    called = MODELS[name]()
    ran(called, CURRENT, WARM)
    changed(called, change)
    other = copy.deepcopy(called)
    for flag in (F, F, T, F):
        found, expected = ran(called, CURRENT, [flag]), ran(other, CURRENT, [None])
        assert all(map(same, found, expected)), flag


def test_a_first_microbatch_sees_a_write_that_nobody_counts() -> None:
    called = mlp()
    ran(called, CURRENT, WARM)
    before = ran(called, CURRENT, [T])
    changed(called, "uncounted")
    assert all(map(same, ran(called, CURRENT, [F]), before)), "the write was counted"
    other = copy.deepcopy(called)
    for flag in (T, F, F):
        assert all(map(same, ran(called, CURRENT, [flag]), ran(other, CURRENT, [None]))), flag


@pytest.mark.parametrize("recipe", [CURRENT, RECIPES["delayed"]], ids=["current", "delayed"])
def test_each_linear_has_a_flag_of_its_own(recipe: Any, played: list[Any]) -> None:
    flags = [[one, other] for one in (T, F, N) for other in (T, F, N)]
    script = [flags[0], *flags * 3, "uncounted", *flags, "write", *flags[::-1], "uncounted"]
    assert_same(mlp, recipe, [*script, *flags[3:]])
    assert len(played) > len(script)


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", [RECIPES[name] for name in SOME], ids=SOME)
@pytest.mark.parametrize("mode", ["no_grad", "checkpoint", "checkpoint, reentrant"])
def test_other_modes_of_calls_have_the_bits_of_the_plans_own_code(mode: str, recipe: Any) -> None:
    assert_same(mlp, recipe, [*WARM, "write", F, F, "uncounted", T, F], mode)


MIXED = [
    [("no_grad", T), F, F, ("no_grad", T), F, ("no_grad", F), T, ("no_grad", F), N] * 3,
    [("checkpoint, reentrant", T), F, ("checkpoint", F), T, ("checkpoint, reentrant", F)] * 4,
    [("fewer", T), F, ("fewer", F), T, ("fewer", N), F, ("fewer", F)] * 4,
    [T, "freeze", F, "freeze", F, "freeze", T, F, "freeze", F] * 3,
    [T, F, "write"] * 5,
    [F, "write"] * 6,
    [F, "uncounted"] * 5 + [T, F],
]


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", [RECIPES[name] for name in SOME], ids=SOME)
@pytest.mark.parametrize("script", MIXED, ids=[str(i) for i in range(len(MIXED))])
def test_mixed_calls_have_the_bits_of_the_plans_own_code(script: list[Any], recipe: Any) -> None:
    assert_same(mlp, recipe, script)


def test_a_weight_kept_under_another_recipe_or_dtype_is_quantized_anew() -> None:
    """Also by a replay: what is kept differs in one of both alone."""

    def run(called: Called) -> list[Any]:
        log = []
        pairs = list(itertools.permutations(("current", "mxfp8", "delayed"), 2))
        for first, second in pairs * 4:
            log += [*ran(called, RECIPES[first], [T]), *ran(called, RECIPES[second], [F, F, N])]
        for dtype in (torch.float16, BF16) * 4:
            with torch.autocast("cpu", dtype):
                log += ran(called, CURRENT, [T])
            log += ran(called, CURRENT, [F, F, N])
        return log

    called = mlp()
    other = copy.deepcopy(called)
    found = run(called)
    with without_recordings():
        expected = run(other)
    assert all(map(same, found, expected))


def test_two_containers_of_one_op_share_what_it_keeps() -> None:
    """A first microbatch of one is replayed; the other then reads the new weight."""
    op, extra = alone().model, alone().model
    one = InSequence(fuser.Sequential(op, extra), (0,))
    two = InSequence(fuser.Sequential(op, fuser.GELU()), (0,))
    for _ in range(4):
        for called in (one, two):
            ran(called, CURRENT, [T, F, F])
    op.weight.data.mul_(2)
    ran(one, CURRENT, [T])
    found = ran(two, CURRENT, [F])
    assert all(map(same, found, ran(copy.deepcopy(two), CURRENT, [None])))


def test_one_op_twice_in_a_pipeline_keeps_one_weight() -> None:
    def make() -> Called:
        op = alone().model
        return InSequence(fuser.Sequential(op, fuser.GELU(), op), (0,))

    assert_same(make, CURRENT, [*WARM, "write", F, F, "uncounted", T, F, F, N])


def test_quantized_parameters_have_the_bits_of_the_plans_own_code() -> None:
    assert_same(quantized_parameters, CURRENT, [*WARM, T, F, F, N])


def test_captures_keep_nothing_and_replays_read_no_kept_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu_graphs.use_stand_in(monkeypatch)

    class First(torch.nn.Module):
        def __init__(self, flag: bool | None) -> None:
            super().__init__()
            self.layer = fuser.modules.Linear(WIDTH, WIDTH, params_dtype=BF16, device="cpu")
            self.flag = flag

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, is_first_microbatch=self.flag)

    sample = oracles.random_tensor((ROWS, WIDTH), BF16, 1)
    for flag in (T, F):
        torch.manual_seed(0)
        module = First(flag)
        called = Called(module.layer)
        ran(called, CURRENT, WARM)  # recordings of each kind, and a kept weight
        fuser.make_graphed_callables(module, (sample.clone().requires_grad_(),), recipe=CURRENT)
        assert module.layer.ops[0].basic_ops[0]._kept_weight is None
        module.layer.weight.data.mul_(2)
        with fuser.autocast(recipe=CURRENT):
            y = module(sample.clone().requires_grad_())
            expected = copy.deepcopy(module.layer)(sample.clone().requires_grad_())
        assert torch.equal(y, expected)
        found = ran(called, CURRENT, [F, F])
        assert all(map(same, found, ran(Called(copy.deepcopy(module.layer)), CURRENT, [N, N])))


# -- what is recorded, and when -------------------------------------------------------------------


def test_a_call_that_comes_once_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = noted(monkeypatch, "record")
    called = mlp()
    ran(called, CURRENT, [T, F, N])
    assert made == []
    ran(called, CURRENT, [T])
    assert len(made) == 2, "a forward and its backward"


def test_a_kept_weight_is_no_change_of_its_op(played: list[Any]) -> None:
    called = mlp()
    ran(called, CURRENT, [N] * 3)
    count = len(played)
    ran(called, CURRENT, [T, N, F, N, T, N])
    assert len(played) >= count + 2 * 3


def test_recordings_hold_no_weight_and_nothing_kept() -> None:
    called = alone()
    ran(called, CURRENT, WARM)
    gone = weakref.ref(called.model.weight)
    kept = next(iter(called.model._kept_weight.values()))
    form = weakref.ref(kept.made)
    del kept
    called.model.weight = torch.nn.Parameter(called.model.weight.detach() * 2)
    gc.collect()
    assert gone() is None
    assert form() is None


@pytest.mark.parametrize("flag", [0, 1, 0.0, 2.5, "", "yes"])
def test_other_constants_count_by_their_truth(flag: Any, played: list[Any]) -> None:
    script = [T, *[flag] * 5, F, flag, "uncounted", flag, F]
    assert_same(mlp, CURRENT, script)
    assert len(played) >= 8


def test_a_tensor_as_keyword_argument_is_read_at_each_call(played: list[Any]) -> None:
    called, flag = alone(), torch.tensor(True)
    for number in range(6):
        flag.fill_(number % 2 == 0)
        changed(called, "uncounted")
        is_first = bool(flag)
        found = ran(called, CURRENT, [flag])
        if is_first:
            expected = ran(copy.deepcopy(called), CURRENT, [None])
        assert all(map(same, found, expected)), number
    assert not played


def test_buffers_of_the_caller_are_written_at_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once(monkeypatch)
    op = oracles.randomize(fuser.GroupedLinear(2, WIDTH, WIDTH, dtype=BF16, device="cpu"))
    sizes = torch.tensor([40, 24])
    for number in range(5):
        x = oracles.random_tensor((ROWS, WIDTH), BF16, number)
        out = torch.zeros(ROWS, WIDTH, dtype=BF16)
        expected = op(x, sizes)
        op(x, sizes, output=out)
        assert torch.equal(out, expected)


def test_a_keyword_argument_that_an_op_does_not_take_is_refused_at_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once(monkeypatch)
    op = fuser.GroupedLinear(2, WIDTH, WIDTH, dtype=BF16, device="cpu")
    x, sizes = oracles.random_tensor((ROWS, WIDTH), BF16, 1), torch.tensor([40, 24])
    for _ in range(4):
        with pytest.raises(
            InputError, match=said("grouped-linear-output-first-microbatch", "wrong")
        ):
            op(x, sizes, wrong=True)
