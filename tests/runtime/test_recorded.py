"""Recorded passes of a plan: the same bits as the plan's own code, and when they are not used."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import every_format as formats
import models
import oracles
import pytest
import torch
from fresh import python
from pipeline_kernels import on_kernels
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser import recipe as recipes
from fuser.cuda import launch, pass_graphs, sequence
from fuser.runtime import recorded
from fuser.runtime.recorded import RecordedPasses

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16 = torch.bfloat16
# Launched, recorded, and repeated twice.
STEPS = 4
# Delayed scaling makes its states first, and needs some steps until scales change.
DELAYED_STEPS = 6


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with on_kernels():
        yield


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sequences of recorded passes that were repeated."""
    found: list[Any] = []
    play = recorded._played

    def noted(which: sequence.LaunchSequence, *given: Any) -> Any:
        found.append(which)
        return play(which, *given)

    monkeypatch.setattr(recorded, "_played", noted)
    return found


def in_normal() -> fuser.Sequential:
    linear = functools.partial(fuser.Linear, dtype=BF16)
    return fuser.Sequential(
        fuser.LayerNorm(32, dtype=BF16), linear(32, 32), fuser.Dropout(0.3), linear(32, 32)
    )


def with_quantize() -> fuser.Sequential:
    linear = fuser.Linear(32, 32, dtype=BF16)
    return fuser.Sequential(fuser.Quantize(backward=True), linear, fuser.SiLU())


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "gelu": (lambda: models.mlp(32, 32, dtype=BF16), (32, 32)),
    "gelu 3d": (lambda: models.mlp(32, 32, dtype=BF16), (2, 16, 32)),
    "swiglu": (lambda: models.residual_block(32, 32, dtype=BF16), (32, 32)),
    "dropout": (in_normal, (32, 32)),
    "quantize": (with_quantize, (32, 32)),
}
BLOCKS = ("gelu", "swiglu")
RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": recipes.DelayedScaling(amax_history_len=3),
    **{
        f"{name} {override}": formats.deterministic(recipe, backward_override=override)
        for name, recipe in formats.STATELESS.items()
        for override in (None, "high_precision", "dequantized")
    },
}


def under(recipe: Any) -> Any:
    return contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe)


def step(model: torch.nn.Module, x: torch.Tensor, recipe: Any = None) -> list[Any]:
    """Output and gradients of one step."""
    x = x.clone().requires_grad_()
    with under(recipe):
        y = model(x)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
    y.backward(dy)
    found = [y.detach().clone(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedPasses, "find", lambda self, *_: None)


def assert_equal(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


# -- bits ---------------------------------------------------------------------


# Every recipe with the two blocks; the others with some recipes.
SOME = ("none", "delayed", "current None", "mxfp8 None")
PAIRS = [
    (name, recipe) for name in MODELS for recipe in RECIPES if name in BLOCKS or recipe in SOME
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "recipe_name"), PAIRS)
def test_recorded_steps_have_the_bits_of_the_plans_own_code(
    name: str, recipe_name: str, played: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (make, shape), recipe = MODELS[name], RECIPES[recipe_name]
    model = make()
    other = copy.deepcopy(model)
    count = DELAYED_STEPS if recipe is not None and recipe.delayed() else STEPS
    inputs = [torch.randn(shape, dtype=BF16) for _ in range(count)]
    torch.manual_seed(0)
    found = [step(model, x, recipe) for x in inputs]
    assert len(played) >= 4, "forward and backward, twice"
    unrecorded(monkeypatch)
    torch.manual_seed(0)
    for one, x in zip(found, inputs, strict=True):
        assert_equal(one, step(other, x, recipe))


@pytest.mark.parametrize("recipe", [None, recipes.DelayedScaling()], ids=["none", "delayed"])
def test_evaluation_is_recorded_apart_from_training(recipe: Any, played: list[Any]) -> None:
    model = MODELS["gelu"][0]()
    xs = [torch.randn(64, 32, dtype=BF16) for _ in range(6)]
    other = copy.deepcopy(model)
    for i, x in enumerate(xs):
        trained = step(model, x, recipe)
        with torch.no_grad(), under(recipe):
            evaluated = model(x)
        expected = step(other, x, recipe)
        assert_equal(trained, expected)
        assert recipe is not None or torch.equal(evaluated, trained[0]), i
    assert len(played) > len(xs)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("asked", ["", "added", "zeros", "overwrite", "in turn"])
@pytest.mark.parametrize("name", ["none", "current None", "delayed"])
def test_recorded_backwards_add_to_main_grad(
    name: str, asked: str, dtype: torch.dtype, played: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = fuser.BasicLinear(32, 64, dtype=BF16, accumulate_into_main_grad=True)
    model = fuser.Sequential(fuser.RMSNorm(32, dtype=BF16), linear, fuser.SiLU())
    inputs = [torch.randn(64, 32, dtype=BF16) for _ in range(STEPS)]

    def run(model: Any) -> list[list[Any]]:
        weight = model[1].weight
        weight.main_grad = torch.zeros(64, 32, dtype=dtype)
        weight.overwrite_main_grad = asked == "overwrite"
        weight.zero_out_wgrad = asked == "zeros"
        found = []
        for number, x in enumerate(inputs):
            if asked in ("added", "zeros"):
                weight.grad_added_to_main_grad = False
            if asked == "in turn":  # as Megatron-LM: the first of some microbatches overwrites
                weight.overwrite_main_grad = number % 2 == 0
            made = step(model, x, RECIPES[name])
            assert getattr(weight, "grad_added_to_main_grad", None) in (True, None)
            if asked != "zeros":
                made = [*made[:2], weight.main_grad.clone()]  # the stand-in has no values
            found.append([*made, weight.main_grad.clone()])
        return found

    other = copy.deepcopy(model)
    found = run(model)
    assert played
    unrecorded(monkeypatch)
    for one, expected in zip(found, run(other), strict=True):
        assert_equal(one, expected)


def test_a_recorded_backward_follows_what_a_weight_asks_of_its_main_grad(
    played: list[Any],
) -> None:
    """Each option alone, when the backwards with the other ones are recorded."""
    linear = fuser.BasicLinear(32, 64, accumulate_into_main_grad=True)
    weight: Any = linear.weight
    x, dy = torch.randn(16, 32), torch.randn(16, 64)
    product, model = dy.t() @ x, fuser.Sequential(linear)
    stands_in = {"grad_added_to_main_grad": False}
    for asked in (
        *({}, {"overwrite_main_grad": True}, stands_in),
        *({**stands_in, "zero_out_wgrad": True}, stands_in, {}),
    ):
        for name in ("overwrite_main_grad", "grad_added_to_main_grad", "zero_out_wgrad"):
            weight.__dict__.pop(name, None)
        for name, value in asked.items():
            setattr(weight, name, value)
        weight.main_grad = torch.zeros(64, 32)
        for count in range(1, 4):
            weight.grad = None
            freed = [torch.ones(64, 32) for _ in range(8)]  # what memory without values holds
            del freed
            model(x).backward(dy)
            times = 1 if "overwrite_main_grad" in asked else count
            torch.testing.assert_close(weight.main_grad, times * product)
            assert (weight.grad is not None) == ("grad_added_to_main_grad" in asked)
            assert "zero_out_wgrad" not in asked or not weight.grad.any()
    assert played


# -- what a recording depends on --------------------------------------------------


def test_an_attribute_that_changes_counts_from_the_next_call(played: list[Any]) -> None:
    model = fuser.Sequential(fuser.RMSNorm(32, dtype=BF16), fuser.GELU())
    x = torch.randn(64, 32, dtype=BF16)
    before = [step(model, x) for _ in range(4)][-1]
    assert played
    model[0].eps = 10.0
    changed = [step(model, x) for _ in range(4)]
    assert not torch.equal(before[0], changed[0][0])
    for other in changed:
        assert_equal(other, changed[0])


def test_an_attribute_that_becomes_a_tensor_counts_from_the_next_call(played: list[Any]) -> None:
    model = fuser.Sequential(fuser.ConstantScale(2.0), fuser.GELU())
    x = torch.randn(64, 32, dtype=BF16)
    for _ in range(4):
        model(x)
    assert played
    model[0].scale = torch.tensor(5.0)
    for _ in range(4):
        torch.testing.assert_close(
            model(x), torch.nn.functional.gelu(5 * x, approximate="tanh"), rtol=2e-2, atol=2e-2
        )


def test_a_state_that_is_set_counts_from_the_next_call() -> None:
    models_ = [fuser.Sequential(fuser.RMSNorm(32, dtype=BF16), fuser.GELU()) for _ in range(2)]
    x = torch.randn(64, 32, dtype=BF16)
    for model in models_:
        for _ in range(4):
            model(x)
    models_[0][0].__setstate__({**models_[1][0].__getstate__(), "eps": 10.0})
    assert not torch.equal(models_[0](x), models_[1](x))


def test_threads_that_record_one_layout_at_once_get_the_same_bits() -> None:
    model = MODELS["gelu"][0]()
    x = torch.randn(64, 32, dtype=BF16)
    expected = step(copy.deepcopy(model), x)
    step(model, x)
    backend: Any = launch.backend
    started: list[threading.Thread] = []
    run = backend.run

    def meanwhile(*args: Any) -> None:
        if not started:  # the second call is being recorded: another thread calls too
            started.append(threading.Thread(target=lambda: others.append(call())))
            started[0].start()
            started[0].join()
        run(*args)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        return leaf, model(leaf)

    others: list[Any] = []
    backend.run = meanwhile
    try:
        pairs = [call()]
    finally:
        del backend.run
    pairs += [*others, call(), call()]
    assert len(pairs) == 4
    dy = torch.randn(64, 32, dtype=BF16, generator=torch.Generator().manual_seed(3))
    for leaf, y in pairs:
        y.backward(dy)
        assert torch.equal(y, expected[0])
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected[1])


def test_the_recipe_of_the_last_forward_is_known_after_recorded_ones() -> None:
    model = MODELS["gelu"][0]()
    op = model[0].basic_ops[0]
    for _ in range(5):
        for name, kind in (("current None", "Float8Current"), ("delayed", "Float8Quantizer")):
            step(model, torch.ones(64, 32, dtype=BF16), RECIPES[name])
            assert kind in type(op.get_quantizer("forward", 0)).__name__


def test_setting_an_attribute_to_what_it_is_records_nothing_anew(played: list[Any]) -> None:
    model = MODELS["dropout"][0]()
    for _ in range(3):
        step(model, torch.randn(64, 32, dtype=BF16))
    count = len(played)
    for _ in range(3):
        model.train()
        step(model, torch.randn(64, 32, dtype=BF16))
    assert len(played) == count + 6


def test_dropout_draws_a_new_mask_in_each_recorded_step_and_none_in_evaluation() -> None:
    model = MODELS["dropout"][0]()
    x = torch.randn(64, 32, dtype=BF16)
    trained = [step(model, x)[0] for _ in range(5)]
    assert len({tuple(y.flatten().tolist()) for y in trained}) == 5
    model.eval()
    evaluated = [step(model, x)[0] for _ in range(5)]
    assert all(torch.equal(y, evaluated[0]) for y in evaluated)


def test_other_shapes_strides_and_addresses_are_other_recordings() -> None:
    """Each input differs from the first in one of them alone."""
    first = torch.randn(64, 64, dtype=BF16)[:, :32]
    shifted = torch.randn(64 * 64 + 1, dtype=BF16)[1:].view(64, 64)[:, :32]
    model = oracles.randomize(fuser.Sequential(fuser.GELU(), fuser.Bias(32, dtype=BF16)))
    for _ in range(4):
        for x in (first, first.contiguous(), shifted, first[:40]):
            tensors = {"x": x, **oracles.params_of(model)}
            plain, exact = (
                oracles.run_formula(lambda x, bias: gelu(x) + bias, tensors, dtype)
                for dtype in (BF16, torch.float64)
            )
            results = oracles.run_module(model, x.detach().requires_grad_())
            oracles.assert_no_worse_than_torch(oracles.Draw(results, plain, exact))


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def test_an_input_that_is_also_an_extra_input_is_read_in_both_places(played: list[Any]) -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.AddExtraInput(), fuser.Bias(32, dtype=BF16))
    for _ in range(4):  # recorded with two tensors, and then called with one twice
        x = torch.randn(64, 32, dtype=BF16)
        extra = torch.randn(64, 32, dtype=BF16)
        model(x, extra)
    for _ in range(2):
        x = torch.randn(64, 32, dtype=BF16)
        expected = model(x, x.clone())
        assert torch.equal(model(x, x), expected)
    assert played


def test_a_tensor_that_is_given_twice_is_recorded_apart_from_two_tensors(played: list[Any]) -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.AddExtraInput(), fuser.AddExtraInput())
    for _ in range(4):
        x, one, two = (torch.randn(64, 32, dtype=BF16) for _ in range(3))
        once, twice = model(x, one, two), model(x, one, one)
        assert torch.equal(twice, model(x, one, one.clone()))
        assert torch.equal(once, model(x, one.clone(), two))
    assert len({id(which) for which in played}) == 2
    x, one = (torch.randn(64, 32, dtype=BF16, requires_grad=True) for _ in range(2))
    for _ in range(4):
        found = torch.autograd.grad(model(x, one, one).sum(), (x, one))
        assert torch.equal(found[1], torch.full_like(one, 2))


def test_a_parameter_that_is_replaced_or_resized_is_read_anew() -> None:
    model = fuser.Sequential(fuser.RMSNorm(32, dtype=BF16), fuser.Linear(32, 32, dtype=BF16))
    x = torch.randn(64, 32, dtype=BF16)
    for _ in range(4):
        step(model, x)
    weight = torch.randn(32, 32, dtype=BF16)
    model[1].weight.data = weight.t()  # the same address later, other strides
    assert_equal(step(model, x), step(copy.deepcopy(model), x))
    model[1].weight.data = weight.t().contiguous()
    assert_equal(step(model, x), step(copy.deepcopy(model), x))
    model[1].weight = torch.nn.Parameter(weight.t().contiguous())
    assert_equal(step(model, x), step(copy.deepcopy(model), x))


def test_a_loaded_state_of_delayed_scaling_is_used_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = RECIPES["delayed"]
    model = models.mlp(32, 64, dtype=BF16)
    xs = [torch.randn(64, 32, dtype=BF16) * 2**i for i in range(12)]
    for x in xs[:5]:
        step(model, x, recipe)
    state = copy.deepcopy(model.state_dict())
    for x in xs[5:10]:
        step(model, x, recipe)
    model.load_state_dict(state)
    found = [step(model, x, recipe) for x in xs]
    unrecorded(monkeypatch)
    other = models.mlp(32, 64, dtype=BF16)
    other(xs[0])
    other.load_state_dict(state)
    for one, x in zip(found, xs, strict=True):
        assert_equal(one, step(other, x, recipe))


def test_autocast_of_torch_is_not_applied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.mlp(32, 64)
    x = torch.randn(64, 32)

    def run(model: Any) -> list[Any]:
        with torch.autocast("cpu", dtype=BF16):
            y = model(x)
        outside = torch.autograd.grad(y.float().sum(), list(model.parameters()), retain_graph=True)
        with torch.autocast("cpu", dtype=BF16):
            inside = torch.autograd.grad(y.float().sum(), list(model.parameters()))
        return [y.detach(), *outside, *inside]

    other = copy.deepcopy(model)
    found = [run(model) for _ in range(5)]
    unrecorded(monkeypatch)
    for one in found:
        assert_equal(one, run(other))


# -- backward -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "current None", "block None"])
def test_a_retained_graph_gives_the_same_gradients_twice(name: str) -> None:
    model = MODELS["swiglu"][0]()
    for _ in range(5):
        x = torch.randn(64, 32, dtype=BF16, requires_grad=True)
        with under(RECIPES[name]):
            y = model(x)
        first = torch.autograd.grad(y.sum(), [x, *model.parameters()], retain_graph=True)
        second = torch.autograd.grad(y.sum(), [x, *model.parameters()])
        assert_equal(list(first), list(second))


def test_a_gradient_of_another_layout_runs_the_plans_own_backward_first() -> None:
    model = MODELS["gelu"][0]()
    for _ in range(4):
        step(model, torch.randn(64, 32, dtype=BF16))
    for make in (lambda y: y.sum(), lambda y: y.t().contiguous().sum(), lambda y: y[::2].sum()):
        for _ in range(3):
            x = torch.randn(64, 32, dtype=BF16, requires_grad=True)
            (grad,) = torch.autograd.grad(make(model(x)), x)
            (expected,) = torch.autograd.grad(make(copy.deepcopy(model)(x)), x)
            assert torch.equal(grad, expected)


def test_an_extra_output_has_a_gradient_in_some_steps_and_none_in_others() -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput(), fuser.RMSNorm(32, dtype=BF16), fuser.Linear(32, 32, dtype=BF16)
    )
    parameters = [parameter.detach() for parameter in oracles.randomize(model).parameters()]

    def formula(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gain, weight, bias = (parameter.to(x.dtype) for parameter in parameters)
        return torch.nn.functional.linear(oracles.rmsnorm()(x, gain), weight, bias), x

    for i in range(8):
        x = torch.randn(64, 32, dtype=BF16)
        grads = []
        for function, dtype in ((model, BF16), (formula, BF16), (formula, torch.float64)):
            leaf = oracles.leaf(x, dtype)
            y, extra = function(leaf)
            loss = y.sum() if i % 2 else (y + extra).sum()
            grads.append({"dx": torch.autograd.grad(loss, leaf)[0]})
        oracles.assert_no_worse_than_torch(oracles.Draw(*grads))


def test_saved_tensor_hooks_get_the_quantized_tensors(played: list[Any]) -> None:
    model, recipe = MODELS["gelu"][0](), RECIPES["current None"]
    for _ in range(4):
        expected = step(model, torch.ones(64, 32, dtype=BF16), recipe)
    count, packed = len(played), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(type(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = step(model, torch.ones(64, 32, dtype=BF16), recipe)
    assert_equal(found, expected)
    assert len(played) == count
    assert fuser.Float8Tensor in packed


def test_a_gradient_that_torch_negates_lazily_is_negated() -> None:
    model = MODELS["gelu"][0]()
    grads = []
    for i in range(6):
        x = torch.ones(64, 32, dtype=BF16).requires_grad_()
        dy = torch.ones(64, 32, dtype=BF16)
        model(x).backward(torch._neg_view(dy) if i % 2 else dy)
        assert x.grad is not None
        grads.append(-x.grad if i % 2 else x.grad)
    assert_equal(grads[1:], grads[:-1])


@pytest.mark.parametrize("shape", [(64, 32), (-1, 32)])
def test_the_output_is_a_view_as_often_as_that_of_the_plans_own_code(shape: Any) -> None:
    residual = fuser.MakeExtraOutput()
    for ops in ([], [residual]):
        model = fuser.Sequential(*ops, fuser.BasicLinear(32, 32, dtype=BF16), fuser.Reshape(shape))
        are_views = []
        for _ in range(4):
            y = model(torch.randn(64, 32, dtype=BF16, requires_grad=True))
            are_views.append((y[0] if ops else y)._is_view())
        assert len(set(are_views)) == 1


def test_a_tensor_without_memory_has_the_error_of_the_plans_own_code() -> None:
    model = fuser.Sequential(fuser.GELU())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="memory format"):
            model(torch.randn(64, 32).to_sparse())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["none", "current None", "delayed"])
def test_checkpointed_blocks_have_the_bits_of_plain_ones(name: str, use_reentrant: bool) -> None:
    model, recipe = MODELS["swiglu"][0](), RECIPES[name]
    other = copy.deepcopy(model)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        made = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
        assert isinstance(made, torch.Tensor)
        return made

    for _ in range(STEPS):
        x = torch.randn(64, 32, dtype=BF16)
        results = []
        for run, owner in ((checkpointed, model), (other, other)):
            leaf = x.clone().requires_grad_()
            with under(recipe):
                y = run(leaf)
            y.backward(torch.ones_like(y))
            results.append([y.detach(), leaf.grad, *(p.grad for p in owner.parameters())])
            owner.zero_grad(set_to_none=True)
        assert_equal(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputations_under_delayed_scaling_are_repeated_with_the_scales_of_their_forwards(
    use_reentrant: bool, played: list[Any]
) -> None:
    """Steps end between a forward and its recomputation, of two forwards the last one's first."""
    recipe = RECIPES["delayed"]
    model = models.residual_block(32, 32, dtype=BF16)
    other = copy.deepcopy(model)

    def results(run: Callable[[torch.Tensor], Any], inputs: list[torch.Tensor]) -> list[Any]:
        outputs, leaves = [], [x.clone().requires_grad_() for x in inputs]
        for leaf in leaves:
            with under(recipe):
                outputs.append(run(leaf))
        plays.append(len(played))
        for y in reversed(outputs):
            y.backward(torch.ones_like(y))
        plays.append(len(played))
        owner = model if run is checkpointed else other
        grads = [p.grad for p in owner.parameters()]
        owner.zero_grad(set_to_none=True)
        return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves), *grads]

    def checkpointed(x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)

    for i in range(8):
        plays: list[int] = []
        inputs = [torch.randn(64, 32, dtype=BF16) * 2 ** (i + n) for n in range(2)]
        assert_equal(results(checkpointed, inputs), results(other, inputs))
    first, last, *_ = plays
    assert last - first == 4, "two forwards and two backwards, in the backward of the checkpoints"


@pytest.mark.parametrize("change", ["state loaded", "other recipe"])
def test_a_recomputation_after_its_scales_were_replaced_has_those_of_its_forward(
    change: str,
) -> None:
    recipe, shorter = RECIPES["delayed"], recipes.DelayedScaling(amax_history_len=2, margin=1)
    model = models.residual_block(32, 32, dtype=BF16)
    other = copy.deepcopy(model)

    def checkpointed(x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    for i in range(7):
        x, found = torch.randn(64, 32, dtype=BF16) * 2**i, []
        for run, owner in ((checkpointed, model), (other, other)):
            leaf = x.clone().requires_grad_()
            with under(recipe):
                y = run(leaf)
            if i == 5 and change == "state loaded":
                state = copy.deepcopy(owner.state_dict())
                scales = {name: value for name, value in state.items() if "extra_state" in name}
                assert scales
                owner.load_state_dict(scales, strict=False)
            elif i == 5:
                with under(shorter):
                    owner(x * 100)
            y.backward(torch.ones_like(y))
            found.append([y.detach(), leaf.grad, *(p.grad for p in owner.parameters())])
            owner.zero_grad(set_to_none=True)
        assert_equal(*found)


def test_without_graphs_a_recorded_backward_frees_what_it_has_read(
    played: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_graphs.Switch, "is_on", False)
    model = MODELS["swiglu"][0]()
    for _ in range(4):
        step(model, torch.randn(64, 32, dtype=BF16))
    saved: list[Any] = []
    alive: list[int] = []
    play, mm = recorded._played, torch.mm

    def watched(which: Any, tensors: Any, *options: Any) -> Any:
        if isinstance(tensors, list):  # a backward, whose last tensor is the gradient
            plain = (t for t in tensors[:-1] if not isinstance(t, torch.nn.Parameter))
            saved.extend(map(weakref.ref, plain))
        return play(which, tensors, *options)

    def product(*args: torch.Tensor) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in saved))
        return mm(*args)

    written = [function for which in played for function in which._written.values()]
    for names in (function.__globals__ for function in written):
        names |= {name: product for name, value in names.items() if value is mm}
    monkeypatch.setattr(recorded, "_played", watched)
    step(model, torch.randn(64, 32, dtype=BF16))
    assert alive[-1] < alive[-4], alive


# -- what is not recorded ---------------------------------------------------------


class Doubled(fuser.GELU):
    """A user's op that counts its calls."""

    calls = 0

    def op_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        type(self).calls += 1
        made: torch.Tensor = 2 * super().op_forward(*args, **kwargs)
        return made


def test_a_users_op_runs_at_each_call(played: list[Any]) -> None:
    model = fuser.Sequential(fuser.Linear(32, 32, dtype=BF16), Doubled())
    for _ in range(5):
        model(torch.randn(64, 32, dtype=BF16))
    assert Doubled.calls == 5
    assert not played


def test_a_method_that_is_set_on_an_op_runs_at_each_call(played: list[Any]) -> None:
    model = fuser.Sequential(fuser.GELU())
    for _ in range(4):
        model(torch.randn(64, 32, dtype=BF16))
    assert played
    calls = []
    inner = model[0].op_forward

    def op_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        made: torch.Tensor = inner(*args, **kwargs)
        return made

    model[0].op_forward = op_forward
    for _ in range(4):
        model(torch.randn(64, 32, dtype=BF16))
    assert len(calls) == 4


@pytest.mark.parametrize("name", ["none", "current None", "delayed"])
def test_a_profiled_step_is_what_runs_without_a_profiler(name: str, played: list[Any]) -> None:
    """The trace has the same work, in ranges of the same names as that of a first step."""
    model, other, recipe = MODELS["swiglu"][0](), MODELS["swiglu"][0](), RECIPES[name]
    other.load_state_dict(model.state_dict())
    inputs = [torch.randn(64, 32, dtype=BF16) for _ in range(DELAYED_STEPS)]
    names = []
    for i, x in enumerate(inputs):
        is_profiled = i in (0, 1, DELAYED_STEPS - 1)
        activities, count = [torch.profiler.ProfilerActivity.CPU], len(played)
        with torch.profiler.profile(activities=activities) if is_profiled else under(None) as trace:
            found = step(model, x, recipe)
        assert i < DELAYED_STEPS - 1 or len(played) == count + 2, "forward and backward"
        assert_equal(found, step(other, x, recipe))
        if is_profiled:
            names.append(sorted({e.name for e in trace.events() if e.name.startswith("fuser ")}))
    assert names[0] == names[1] == names[2]
    assert any(name.startswith("fuser forward") for name in names[0])
    assert any(name.startswith("fuser backward") for name in names[0])


RETURNS_ITS_ARGUMENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda x: x[:2].to(x.dtype) + 1,
    "float, read twice": lambda x: (rows := x.t().float()) + rows,
    "flatten": lambda x: x[0].flatten() + 1,
    "of an own tensor": lambda x: (x * 2).to(x.dtype) + 1,
    "contiguous": lambda x: x[:2].expand_as(x[:2]).resolve_neg().contiguous() + 1,
}


@pytest.mark.parametrize("name", RETURNS_ITS_ARGUMENT)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_call_that_returns_its_own_argument_is_repeated(name: str, mode: Any) -> None:
    function = RETURNS_ITS_ARGUMENT[name]
    with mode():
        x, other = torch.randn(4, 3), torch.randn(4, 3)
        made, result, slotted = sequence.record([x], lambda: function(x), with_calls=True)
        made.result = slotted(result)
        made.drop_names()
        assert made.is_complete
        for _ in range(2):
            assert torch.equal(made.play((other,)), function(other))


WRITES_A_CONSTANT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "copy_": lambda state, x: state.copy_(x * 2) + 1,
    "out": lambda state, x: torch.add(x, 1, out=state) * 2,
    "_foreach_maximum_": lambda state, x: (torch._foreach_maximum_([state], [x]), x + state)[1],
    "not read again": lambda state, x: (state.copy_(x), x + 1)[1],
}


@pytest.mark.parametrize("name", WRITES_A_CONSTANT)
def test_a_constant_that_is_written_in_place_is_written_again(name: str) -> None:
    function = WRITES_A_CONSTANT[name]
    states = torch.zeros(4, 3), torch.zeros(4, 3)
    x, other = torch.randn(4, 3), torch.randn(4, 3)
    made, result, slotted = sequence.record(
        [x], lambda: function(states[0], x), constants=[states[0]], with_calls=True
    )
    made.result = slotted(result)
    made.drop_names()
    assert made.is_complete
    assert torch.equal(result, function(states[1], x))
    for tensor in (other, x + 1, other):
        assert torch.equal(made.play((tensor,)), function(states[1], tensor))
        assert torch.equal(*states)


FREED = """
import gc, sys, weakref
import torch, fuser
from fuser.cuda import launch

class Here(launch.LaunchBackend):
    device_type = "cpu"
    def refusal(self): return None

launch.backend = Here()
torch.set_default_device("cpu")
gc.disable()
model = fuser.Sequential(fuser.Linear(32, 32, bias=False), fuser.Reshape((-1, 32)))
for _ in range(int(sys.argv[1])):
    model(torch.ones(8, 32, requires_grad=True)).sum().backward()
run = next(iter(next(iter(model._current_segments().pipelines()))._plans.values()))
assert len(run.recorded._forwards) == (sys.argv[1] > "1")
refs = [weakref.ref(model), *map(weakref.ref, model.parameters())]
del model, run
assert all(ref() is None for ref in refs), [ref() for ref in refs]
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.parametrize("calls", [1, 2, 4], ids=["run", "recorded", "repeated"])
def test_a_model_is_freed_with_its_last_reference(calls: int) -> None:
    """In a process of its own: the first recorded call of one imported torch._dynamo."""
    run = python(["-c", FREED, str(calls)])
    assert run.returncode == 0, run.stderr


def test_a_write_through_a_view_of_a_whole_tensor_is_repeated() -> None:
    def add_one(x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        whole = made.view(made.shape)
        whole.add_(1)
        return made

    x = torch.randn(4, 3)
    made, result, slotted = sequence.record([x], lambda: add_one(x), with_calls=True)
    made.result = slotted(result)
    made.drop_names()
    other = torch.randn(4, 3)
    assert made.is_complete
    assert torch.equal(made.play((other,)), add_one(other))


@pytest.mark.parametrize("is_read_otherwise", [False, True])
def test_a_tensor_that_is_read_as_one_view_alone_is_allocated_as_that_view(
    is_read_otherwise: bool,
) -> None:
    def turned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = torch.empty(4, 3, dtype=torch.int32)
        whole = made.view(torch.float32).t()
        whole.copy_(x)
        return (whole + 1, made.sum()) if is_read_otherwise else (whole + 1,)

    x = torch.randn(3, 4)
    made, result, slotted = sequence.record([x], lambda: turned(x), with_calls=True)
    made.result = slotted(result)
    made.drop_names()
    other = torch.randn(3, 4)
    made.play((other,))
    names: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Noted():
        found = made.play((other,))
    assert all(map(torch.equal, found, turned(other)))
    is_view = any(name.startswith(("view", "t.")) for name in names)
    assert is_view == is_read_otherwise, names


def test_memory_of_another_device_is_not_recorded() -> None:
    x = torch.randn(4)
    made, result, slotted = sequence.record(
        [x], lambda: torch.zeros(3, device="meta"), with_calls=True
    )
    assert slotted(result) is None
    assert not made.is_complete, "it returns what it has not made"


def test_a_strided_view_with_a_place_in_its_storage_is_not_repeated() -> None:
    """Where another input begins in its own storage is another place."""
    whole = torch.arange(16.0)
    x = whole[4:12]

    def strided(*place: int) -> tuple[Any, torch.Tensor, Any]:
        return sequence.record(
            [x], lambda: x.as_strided((2, 2), (4, 1), *place) + 1, with_calls=True
        )

    made, result, slotted = strided()
    made.result = slotted(result)
    assert torch.equal(made.play((whole[:8],)), torch.tensor([[1.0, 2.0], [5.0, 6.0]]))
    for place in (4, 6):
        made, _, _ = strided(place)
        assert made.refusal == "it reads memory beside a tensor"


def test_a_recording_that_cannot_be_repeated_says_why() -> None:
    x = torch.randn(4)
    made, _, _ = sequence.record([x], lambda: (x + 1).sum().item(), with_calls=True)
    assert made.refusal == "aten._local_scalar_dense.default reads values"
    other = torch.randn(4)
    made, _, _ = sequence.record([x], lambda: x + other, with_calls=True)
    assert "neither an input nor its own" in str(made.refusal)


def test_a_thread_may_record_while_another_one_asks_how_passes_have_run() -> None:
    passes = recorded.RecordedPasses((), None)

    class Recording:
        last_use = 0

        def described(self) -> list[tuple[str | None, str]]:
            passes._forwards["another"] = Recording()  # type: ignore[assignment]
            return [("forward", "recorded")]

    passes._forwards["one"] = Recording()  # type: ignore[assignment]
    assert passes.described() == [("forward", "recorded")]
