"""Gradients of a pipeline's node arrive where torch's would, in the dtypes of the forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import every_format as formats
import models
import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from test_random_pipelines import Blend
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser.plan import cuts
from fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

WIDTH, ROWS = 32, 64
WAYS = ("one node", "cut", "recorded", "recorded and cut")


@pytest.fixture(autouse=True)
def small_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "FIRST_BYTES", 1)
    monkeypatch.setattr(cuts, "BUCKET_BYTES", 1)


@contextlib.contextmanager
def running(way: str, model: torch.nn.Module) -> Iterator[int]:
    """The number of steps after which the model runs in that way."""
    if "cut" in way:
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    if "recorded" in way:
        with on_kernels():
            yield 3
    else:
        yield 1


# -- outputs without a gradient ----------------------------------------------------------


def with_extra_outputs() -> fuser.Sequential:
    torch.manual_seed(0)
    linear = functools.partial(fuser.Linear, WIDTH, WIDTH)
    return fuser.Sequential(
        linear(), fuser.MakeExtraOutput(), linear(), fuser.GELU(), fuser.MakeExtraOutput(), linear()
    )


def with_residuals() -> fuser.Sequential:
    """The first extra output is also read by a later op, and the second by the caller alone."""
    model = with_extra_outputs()
    model[1].set_extra_output_channel(0, "residual", output_to_caller=True)
    add = fuser.AddExtraInput().set_extra_input_channel(0, "residual")
    return fuser.Sequential(*model, add, fuser.Linear(WIDTH, WIDTH))


def plain(
    x: torch.Tensor, params: list[torch.Tensor], residual: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    linear = torch.nn.functional.linear
    first = linear(x, *params[:2])
    second = torch.nn.functional.gelu(linear(first, *params[2:4]), approximate="tanh")
    y = linear(second, *params[4:6])
    return (linear(y + first, *params[6:]) if residual else y), first, second


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (1, 2), (0, 1), (0, 1, 2)], ids=str)
def test_parameters_that_a_loss_does_not_reach_get_no_gradient(
    used: tuple[int, ...], residual: bool, way: str
) -> None:
    model = with_residuals() if residual else with_extra_outputs()
    with running(way, model) as steps:
        for step in range(steps):
            model.zero_grad()
            x = oracles.random_tensor((ROWS, WIDTH), torch.float32, step).requires_grad_()
            outputs = model(x)
            sum(outputs[place].square().sum() for place in used).backward()
    exact = [p.detach().double().requires_grad_() for p in model.parameters()]
    z = x.detach().double().requires_grad_()
    outputs = plain(z, exact, residual)
    sum(outputs[place].square().sum() for place in used).backward()
    torch.testing.assert_close(x.grad.double(), z.grad, rtol=1e-4, atol=1e-4)
    for parameter, truth in zip(model.parameters(), exact, strict=True):
        assert (parameter.grad is None) == (truth.grad is None)
        if truth.grad is not None:
            torch.testing.assert_close(parameter.grad.double(), truth.grad, rtol=1e-4, atol=1e-3)


def test_an_extra_input_that_a_loss_does_not_reach_gets_no_gradient() -> None:
    model = fuser.Sequential(
        fuser.AddExtraInput(), fuser.MakeExtraOutput(), fuser.GELU(), fuser.AddExtraInput()
    )
    x, first, second = (torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(3))
    _, extra = model(x, first, second)
    extra.sum().backward()
    assert second.grad is None
    assert torch.equal(x.grad, torch.ones(ROWS, WIDTH))
    assert torch.equal(first.grad, torch.ones(ROWS, WIDTH))


@pytest.mark.parametrize("way", WAYS[:2])
def test_the_op_that_makes_a_needed_extra_output_is_reached(way: str) -> None:
    """A user's op with ``y = x + e / 2`` and an extra output ``x - e``."""
    model = fuser.Sequential(Blend(), fuser.Linear(WIDTH, WIDTH), fuser.Linear(WIDTH, WIDTH))
    with running(way, model):
        x, extra = (torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(2))
        _, difference = model(x, extra)
        difference.sum().backward()
    assert torch.equal(x.grad, torch.ones(ROWS, WIDTH))
    assert torch.equal(extra.grad, -torch.ones(ROWS, WIDTH))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "last",
    [
        lambda: fuser.Linear(WIDTH, WIDTH // 2),
        fuser.SwiGLU,
        lambda: fuser.Reshape((-1,)),
        lambda: fuser.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
    ],
    ids=["linear", "glu", "reshape", "dtype"],
)
def test_an_extra_output_alone_has_gradients_if_the_main_output_has_another_shape_or_dtype(
    last: Any, way: str
) -> None:
    first = fuser.Linear(WIDTH, WIDTH)
    model = fuser.Sequential(first, fuser.MakeExtraOutput(), last())
    with running(way, model) as steps:
        for step in range(steps):
            model.zero_grad()
            x = oracles.random_tensor((ROWS, WIDTH), torch.float32, step).requires_grad_()
            y, extra = model(x)
            extra.square().sum().backward()
    assert (y.shape, y.dtype) != (extra.shape, extra.dtype)
    z, weight, bias = (t.detach().double().requires_grad_() for t in (x, first.weight, first.bias))
    torch.nn.functional.linear(z, weight, bias).square().sum().backward()
    for found, exact in ((x, z), (first.weight, weight), (first.bias, bias)):
        torch.testing.assert_close(found.grad.double(), exact.grad, rtol=1e-4, atol=1e-3)
    assert all(parameter.grad is None for parameter in model[2].parameters())


class WithoutGradient(torch.autograd.Function):
    """The identity, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [fuser.Sequential, torch.nn.Sequential])
def test_no_gradient_of_an_output_gives_none_of_the_inputs(
    kind: type[torch.nn.Sequential], way: str
) -> None:
    ops = [torch.nn, torch.nn] if kind is torch.nn.Sequential else [fuser, fuser]
    model = kind(*(library.Linear(WIDTH, WIDTH) for library in ops))
    with running(way, model) as steps:
        for _ in range(steps):
            x = torch.ones(ROWS, WIDTH, requires_grad=True)
            WithoutGradient.apply(model(x)).sum().backward()
            assert all(leaf.grad is None for leaf in (x, *model.parameters()))


# -- torch's autocast --------------------------------------------------------------------


def gradients(
    model: torch.nn.Module,
    dtype: torch.dtype,
    forward: torch.dtype | None,
    backward: torch.dtype | None,
) -> list[Any]:
    """Gradients of a step whose two passes run in such dtypes of torch's autocast."""
    model.zero_grad()
    x = oracles.random_tensor((ROWS, WIDTH), dtype, 1).requires_grad_()
    with torch.autocast("cpu", forward or torch.bfloat16, enabled=forward is not None):
        y = model(x)
    dy = oracles.random_tensor((ROWS, WIDTH), dtype, 2).to(y.dtype)
    with torch.autocast("cpu", backward or torch.bfloat16, enabled=backward is not None):
        y.backward(dy)
    return [x.grad, *(p.grad for p in model.parameters())]


def linears(library: Any, activation: type[torch.nn.Module]) -> Any:
    torch.manual_seed(0)
    return library.Sequential(
        library.Linear(WIDTH, WIDTH),
        library.Linear(WIDTH, WIDTH),
        activation(),
        library.Linear(WIDTH, WIDTH),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backward", [torch.bfloat16, torch.float16])
def test_a_backward_inside_autocast_has_the_precision_of_its_forward(
    way: str, backward: torch.dtype
) -> None:
    """Torch: "Backward ops run in the same type that autocast chose for corresponding forward
    ops". In float32, outside and inside in turn, against float64 in plain torch."""
    model = linears(fuser, fuser.ReLU)
    exact = linears(torch.nn, torch.nn.ReLU).double()
    with torch.no_grad():
        for parameter, truth in zip(model.parameters(), exact.parameters(), strict=True):
            truth.copy_(parameter)
    truths = gradients(exact, torch.float64, None, None)
    with running(way, model) as steps:
        for step in range(2 * steps):
            found = gradients(model, torch.float32, None, backward if step % 2 else None)
            for gradient, truth in zip(found, truths, strict=True):
                error = (gradient.double() - truth).norm() / truth.norm()
                assert error < 1e-5, step


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("backward", [torch.bfloat16, torch.float16])
def test_a_backward_inside_autocast_has_the_bits_of_one_outside(
    way: str, backward: torch.dtype
) -> None:
    """Of a forward under autocast, as of linears of torch."""
    model = linears(fuser, fuser.ReLU)
    peer = linears(torch.nn, torch.nn.ReLU)
    peer.load_state_dict(dict(zip(peer.state_dict(), model.parameters(), strict=True)))
    expected = gradients(peer, torch.float32, torch.bfloat16, None)
    with running(way, model):
        for inside in (None, backward):
            found = gradients(model, torch.float32, torch.bfloat16, inside)
            for gradient, other in zip(found, expected, strict=True):
                torch.testing.assert_close(gradient, other, rtol=2e-2, atol=2e-2)
        outside = gradients(model, torch.float32, torch.bfloat16, None)
        for gradient, other in zip(found, outside, strict=True):
            assert torch.equal(gradient, other)


# -- some of the gradients ------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.count += any(kind in name for kind in ("::mm", "::addmm", "::bmm", "::_scaled_mm"))
        return func(*args, **(kwargs or {}))


def experts() -> fuser.Sequential:
    return fuser.Sequential(
        fuser.GroupedLinear(3, WIDTH, 2 * WIDTH),
        fuser.SwiGLU(),
        fuser.GroupedLinear(3, WIDTH, WIDTH, bias=True),
    )


def adapters() -> fuser.Sequential:
    linear = functools.partial(fuser.LoRALinear, WIDTH, WIDTH, rank=4)
    return fuser.Sequential(fuser.LayerNorm(WIDTH), linear(), fuser.GELU(), linear())


SOME_OF = {
    "linears": lambda: models.mlp(WIDTH, WIDTH),
    "residual": lambda: models.residual_block(WIDTH, WIDTH),
    "channels": with_residuals,
    "experts": experts,
    "adapters": adapters,
}


@pytest.mark.sampled
@pytest.mark.parametrize("recipe_name", ["none", *formats.STATELESS])
@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.parametrize("name", SOME_OF)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_parts_have_the_bits_of_one_backward(
    way: str, name: str, budget: int, override: str | None, recipe_name: str
) -> None:
    """Of the input first and of the parameters then, as schedules of pipelines ask; the other way
    round; of one parameter; and of all again, through the same node."""
    recipe = None
    if recipe_name != "none":
        given = formats.STATELESS[recipe_name]
        recipe = formats.deterministic(given, backward_override=override)
    model = SOME_OF[name]()
    splits = [torch.tensor([16, 0, 48])] * 2 if name == "experts" else []
    weights: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    x = oracles.random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()
    dy = oracles.random_tensor((ROWS, WIDTH), torch.float32, 2)
    with running(way, model) as steps, fuser.activation_memory_budget(budget):
        for _ in range(steps):
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x, *splits)
                y = y[0] if isinstance(y, tuple) else y
            grad = functools.partial(torch.autograd.grad, y, grad_outputs=dy, retain_graph=True)
            inputs = [x, *weights]
            asked: list[list[torch.Tensor]] = [
                [x],
                weights,
                weights[1:2],
                [x, *weights[-1:]],
                inputs,
            ]
            found = [grad(some) for some in asked]
            expected = {id(t): g for t, g in zip(inputs, grad(inputs), strict=True)}
            for some, gradients_of in zip(asked, found, strict=True):
                for tensor, gradient in zip(some, gradients_of, strict=True):
                    assert torch.equal(gradient, expected[id(tensor)])
            del y


@pytest.mark.parametrize("recipe_name", ["current", "mxfp8"])
@pytest.mark.parametrize("name", ["linears", "residual", "experts"])
def test_the_gradient_of_one_tensor_alone_is_computed(name: str, recipe_name: str) -> None:
    """By kernels, also where it is computed beside a gradient that nothing else needs."""
    recipe = formats.deterministic(formats.STATELESS[recipe_name])
    model = SOME_OF[name]()
    splits = [torch.tensor([16, 0, 48])] * 2 if name == "experts" else []
    x = oracles.random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()
    dy = oracles.random_tensor((ROWS, WIDTH), torch.float32, 2)
    with running("recorded", model):
        with fuser.autocast(recipe=recipe):
            y = model(x, *splits)
        inputs: list[torch.Tensor] = [x, *model.parameters()]
        expected = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        for tensor, gradient in zip(inputs, expected, strict=True):
            (alone,) = torch.autograd.grad(y, [tensor], dy, retain_graph=True)
            assert torch.equal(alone, gradient)


@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.parametrize("name", ["linears", "residual", "experts"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_parts_under_delayed_scaling(way: str, name: str, budget: int) -> None:
    """Near those of all: each backward ends a step, so that scales differ."""
    recipe = DelayedScaling(amax_history_len=3)
    model = SOME_OF[name]()
    splits = [torch.tensor([16, 0, 48])] * 2 if name == "experts" else []
    weights: list[torch.Tensor] = list(model.parameters())
    x = oracles.random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()
    dy = oracles.random_tensor((ROWS, WIDTH), torch.float32, 2)
    with running(way, model) as steps, fuser.activation_memory_budget(budget):
        for step in range(steps + 2):
            with fuser.autocast(recipe=recipe):
                y = model(x, *splits)
            grad = functools.partial(torch.autograd.grad, y, grad_outputs=dy, retain_graph=True)
            apart = [*grad([x]), *grad(weights)]
            for gradient, other in zip(apart, grad([x, *weights]), strict=True):
                largest = 0.1 if step else 1.0  # the first scales are 1
                assert (gradient - other).norm() <= largest * other.norm()


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), MXFP8BlockScaling()])
def test_products_of_gradients_that_are_not_needed_do_not_run(recipe: Recipe | None) -> None:
    model = models.mlp(WIDTH, WIDTH)
    weights = [model[0].weight, model[2].weight]
    x = oracles.random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    # The weights' before those of x, which keep what the weights' need.
    asked = {
        "all": [x, *weights],
        "weights": weights,
        "last": weights[1:],
        "x": [x],
        "rest": weights,
    }
    counts = {}
    for name, tensors in asked.items():
        with Products() as products:
            torch.autograd.grad(y, tensors, torch.ones_like(y), retain_graph=True)
        counts[name] = products.count
    # A gradient of the first weight needs one of the last linear's input; so the last has both.
    assert counts == {"all": 4, "weights": 3, "last": 2, "x": 2, "rest": 2}


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), DelayedScaling()])
def test_the_parts_of_torchs_schedules_without_bubbles_are_one_backward(
    recipe: Recipe | None,
) -> None:
    stages = pytest.importorskip("torch.distributed.pipelining._backward")
    x = oracles.random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()
    dy = oracles.random_tensor((ROWS, WIDTH), torch.float32, 2)
    found = []
    for is_split in (False, True):
        model = models.residual_block(WIDTH, WIDTH)
        weights = [*model.parameters()]
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        counts = []
        if is_split:
            with Products() as products:
                (dx,), groups = stages.stage_backward_input([y], [dy], [x], iter(weights))
            counts.append(products.count)
            with Products() as products:
                stages.stage_backward_weight(iter(weights), groups)
            counts.append(products.count)
            assert counts == [2, 2]
            found.append([dx, *(p.grad for p in weights)])
        else:
            found.append([*torch.autograd.grad(y, [x, *weights], dy)])
    for gradient, other in zip(*found, strict=True):
        assert torch.equal(gradient, other)


def of_another(dy: torch.Tensor) -> torch.Tensor:
    return 2 * dy


def of_one_that_was_written(dy: torch.Tensor) -> torch.Tensor:
    return dy.mul_(2)


@pytest.mark.parametrize("changed", [of_another, of_one_that_was_written])
def test_gradients_of_parameters_are_of_the_gradient_that_is_given(changed: Any) -> None:
    """And not of the one for which those of the input were asked before."""
    model = models.mlp(WIDTH, WIDTH)
    weights = [*model.parameters()]
    x = oracles.random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()
    dy = oracles.random_tensor((ROWS, WIDTH), torch.float32, 2)
    y = model(x)
    torch.autograd.grad(y, [x], dy, retain_graph=True)
    dy = changed(dy)
    found = torch.autograd.grad(y, weights, dy, retain_graph=True)
    for gradient, other in zip(found, torch.autograd.grad(y, weights, dy), strict=True):
        assert torch.equal(gradient, other)
