"""The recipe of a conversion is in effect whoever calls: the model, a part of it, or a library."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from said import said, sentence
from test_convert import CURRENT, HIDDEN, GatedMLP, data
from torch import nn
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes

MXFP8 = recipes.MXFP8BlockScaling()
FULL_GRAPH: dict[str, Any] = {"backend": "eager", "fullgraph": True}
DELAYED = recipes.DelayedScaling(amax_history_len=2)


class Body(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedMLP() for _ in range(layers))
        self.mixer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        y: torch.Tensor = self.mixer(x)
        return y


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.body = Body(layers)
        self.head = nn.Linear(HIDDEN, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


def made(layers: int = 2) -> Any:
    torch.manual_seed(0)
    return Model(layers)


def converted(recipe: Any = CURRENT, layers: int = 2) -> Any:
    """Graphs are made of one layer: tracing a layer takes most of a second."""
    model = made(layers)
    fuser.convert(model, recipe=recipe, keep=())
    return model


def layer_by_layer(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.body.layers:
        x = x + layer(x)
    y: torch.Tensor = model.head(model.body.mixer(x))
    return y


def with_a_forward_on_top(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As TRL does, whose forward calls the body and computes the loss in parts."""
    model.forward = lambda x: model.head(model.body(x))
    y: torch.Tensor = model(x)
    return y


def with_a_wrapped_forward(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As accelerate does."""
    own = model.forward
    model.forward = functools.wraps(own)(lambda *args: own(*args).float())
    y: torch.Tensor = model(x)
    return y


class Repeated(torch.autograd.Function):
    """A checkpoint that a program writes by hand: its backward runs the forward again."""

    @staticmethod
    def forward(ctx: Any, run: nn.Module, x: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        y: torch.Tensor = run(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        y.backward(*grads)
        return None, x.grad, None


def in_a_thread(model: Any, x: torch.Tensor) -> torch.Tensor:
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(layer_by_layer(model, x)))
    thread.start()
    thread.join()
    return results[0]


def in_another_model(model: Any, x: torch.Tensor) -> torch.Tensor:
    other = nn.Sequential(nn.Identity(), model.body, nn.Sequential(model.head))
    y: torch.Tensor = other(x)
    return y


def after_to(model: Any, x: torch.Tensor) -> torch.Tensor:
    return layer_by_layer(model.double().to("cpu").float(), x)


def compiled_parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    body: Any = torch.compile(model.body, **FULL_GRAPH)
    y: torch.Tensor = model.head(body(x))
    return y


DOORS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "the body": lambda model, x: model.head(model.body(x)),
    "layer by layer": layer_by_layer,
    "a forward on top": with_a_forward_on_top,
    "a wrapped forward": with_a_wrapped_forward,
    "checkpoints": lambda model, x: model.head(checkpoint(model.body, x, use_reentrant=False)),
    "reentrant checkpoints": lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=True)),
    "a copy": lambda model, x: layer_by_layer(copy.deepcopy(model), x),
    "a pickle": lambda model, x: layer_by_layer(pickle.loads(pickle.dumps(model)), x),
    "a shallow copy": lambda model, x: layer_by_layer(copy.copy(model), x),
    "a checkpoint by hand": lambda m, x: m.head(Repeated.apply(m.body, x, m.head.weight)),
    "a checkpoint of fuser": lambda model, x: model.head(fuser.checkpoint(model.body, x)),
    "a thread": in_a_thread,
    "another model": in_another_model,
    "after to()": after_to,
    "compiled": compiled_parts,
}


def step(call: Callable[..., torch.Tensor], model: Any) -> list[torch.Tensor]:
    x = data().requires_grad_()
    y = call(model, x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def plain_call(model: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return y


@functools.cache
def expected_and_plain(recipe: Any, layers: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A step of the model under a recipe, and of the model that was not converted."""
    return step(plain_call, converted(recipe, layers)), step(plain_call, made(layers))


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", [CURRENT, MXFP8, DELAYED], ids=["current", "mxfp8", "delayed"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_every_door_computes_what_the_model_does(door: str, recipe: Any) -> None:
    layers = 1 if door == "compiled" else 2
    expected, plain = expected_and_plain(recipe, layers)
    found = step(DOORS[door], converted(recipe, layers))
    for one, other, unquantized in zip(found, expected, plain, strict=True):
        assert torch.equal(one, other)
        assert not torch.allclose(one, unquantized, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_first", [True, False], ids=["convert first", "forward first"])
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_model_with_a_forward_of_its_own_can_be_converted(is_first: bool) -> None:
    model = made()
    if not is_first:
        model.forward = functools.partial(type(model).forward, model)
    fuser.convert(model, recipe=CURRENT, keep=())
    if is_first:
        model.forward = functools.partial(type(model).forward, model)
    for one, other in zip(step(plain_call, model), step(plain_call, converted()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.sampled
@pytest.mark.parametrize("outer", [None, MXFP8], ids=["off", "mxfp8"])
@pytest.mark.parametrize("door", ["the model", "the body", "layer by layer"])
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_an_autocast_around_the_call_wins(door: str, outer: Any) -> None:
    model, x = converted(layers=1), data()
    call = DOORS.get(door, plain_call)
    with fuser.autocast(enabled=outer is not None, recipe=outer):
        found = call(model, x)
    expected = plain_call(made(layers=1) if outer is None else converted(outer, layers=1), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(call(model, x), plain_call(converted(layers=1), x))  # and not afterwards


@pytest.fixture(scope="module")
def compiled_at() -> Iterator[Callable[[str], tuple[Any, Any, torch.Tensor]]]:
    """A model of one layer called at a door, and the compiled call, which has run; each once."""
    torch._dynamo.reset()

    @functools.cache
    def compiled(door: str) -> tuple[Any, Any, torch.Tensor]:
        model, x = converted(layers=1), data()
        call = functools.partial(DOORS.get(door, plain_call), model)

        def alone(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = call(x)
            return y

        graph = torch.compile(alone, **FULL_GRAPH)
        return call, graph, graph(x)

    yield compiled
    torch._dynamo.reset()


@pytest.mark.sampled(most=4)
@pytest.mark.parametrize("is_outer", [True, False], ids=["around the graph", "in the graph"])
@pytest.mark.parametrize("outer", [None, MXFP8], ids=["off", "mxfp8"])
@pytest.mark.parametrize("door", ["the model", "layer by layer"])
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_so_it_does_in_compiled_calls(
    door: str, outer: Any, is_outer: bool, compiled_at: Callable[[str], Any]
) -> None:
    call, compiled, first = compiled_at(door)
    x = data()
    autocast = functools.partial(fuser.autocast, enabled=outer is not None, recipe=outer)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with autocast():
            y: torch.Tensor = call(x)
            return y

    if is_outer:
        with autocast():
            found = compiled(x)
    else:
        found = torch.compile(inside, **FULL_GRAPH)(x)
    assert torch.equal(first, call(x))
    with autocast():
        assert torch.equal(found, call(x))
    assert not torch.equal(found, first)
    assert torch.equal(compiled(x), first)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_model_that_was_compiled_can_be_converted() -> None:
    torch._dynamo.reset()
    model, x = made(layers=1), data()
    compiled: Any = torch.compile(model, backend="aot_eager")
    before = compiled(x)
    fuser.convert(compiled, recipe=CURRENT, keep=())
    found = compiled(x)
    assert torch.equal(found, plain_call(converted(layers=1), x))
    assert not torch.allclose(found, before, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_each_part_under_delayed_scaling_has_the_scales_of_the_whole() -> None:
    """A step that ends with each part has the numbers of one that ends with the model."""
    whole, parts = converted(DELAYED), converted(DELAYED)
    for seed in range(3):
        x = (seed + 1) * data()
        assert torch.equal(layer_by_layer(parts, x), plain_call(whole, x))


def test_without_a_recipe_nothing_is_quantized() -> None:
    model = made()
    fuser.convert(model)
    x = data()
    torch.testing.assert_close(layer_by_layer(model, x), plain_call(made(), x))


class Scaled(nn.Module):
    """Between its chains something else runs, and the sum has a factor."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.up, self.mid, self.down = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.alpha = alpha

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        h = self.down(torch.relu(self.up(x)))
        h = torch.add(h, x, alpha=self.alpha)
        y: torch.Tensor = torch.add(x, self.down(torch.relu(self.mid(h))), alpha=self.alpha)
        return y


@pytest.mark.parametrize("alpha", [1.0, 2.0, -0.5])
def test_the_factor_of_a_sum_counts(alpha: float) -> None:
    torch.manual_seed(0)
    model, plain = Scaled(alpha), Scaled(alpha)
    plain.load_state_dict(model.state_dict())
    fuser.convert(model, linears="all")
    torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-5)


def test_an_argument_that_is_given_twice_is_the_error_of_the_own_forward() -> None:
    model = converted()
    for module in (model.body.mixer, model.body.layers[0]):
        with pytest.raises(TypeError, match="multiple values"):
            module(data(), **{"input" if module is model.body.mixer else "x": data()})


# -- forwards that no recipe can quantize --------------------------------------------------------


def with_a_hook_for_all(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As torch's counter of operations sets them."""
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        return plain_call(model, x)
    finally:
        handle.remove()


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_under_hooks_for_all_modules_each_linear_is_quantized() -> None:
    model, x = made(), data()
    fuser.convert(model, recipe=CURRENT, keep=(), filter=lambda path, m: isinstance(m, nn.Linear))
    expected = plain_call(model, x)
    assert not torch.allclose(expected, plain_call(made(), x), rtol=1e-4, atol=1e-6)
    assert torch.equal(with_a_hook_for_all(converted(), x), expected)


class WithPipeline(nn.Module):
    """A module with a pipeline of fuser's own in it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = fuser.Sequential(fuser.Linear(HIDDEN, HIDDEN), fuser.GELU())
        self.mixer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mixer(self.own(x))
        return y


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_pipelines_of_fuser_in_a_part_run_under_the_recipe_too() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(WithPipeline(), nn.Linear(HIDDEN, HIDDEN))
    x = data()
    plain = model[0](x)
    fuser.convert(model, recipe=CURRENT, keep=("1",))
    found = model[0](x)
    with fuser.autocast(recipe=CURRENT):
        assert torch.equal(found, model[0](x))
    assert torch.equal(copy.deepcopy(model)[0](x), found)
    assert not torch.allclose(found, plain, rtol=1e-4, atol=1e-6)
    # Called by itself, a pipeline is as it always was.
    assert not torch.equal(found, model[0].mixer(model[0].own(x)))
    fuser.revert(model)
    assert torch.equal(model[0](x), plain)


def pruned(model: Any) -> str:
    nn.utils.prune.identity(model.head, "weight")
    return "the weight of it is a NoneType"


def parametrized(model: Any) -> str:
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Identity())
    return "the weight of it is a NoneType"


def replicated(model: Any) -> str:
    model.head._is_replica = True
    return "replicas of torch.nn.DataParallel share a pipeline"


CHANGES = {"pruned": pruned, "parametrized": parametrized, "replica": replicated}


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if w.category is fuser.FuserWarning]


@pytest.fixture
def may_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["fuser.conversion.converted"], "_has_warned", False)


def head_of(change: str) -> tuple[Any, torch.Tensor, str]:
    model, x = converted(), data()
    reason = CHANGES[change](model)
    return (
        model,
        x,
        sentence("converted-fuser-convert-runs", "Linear", "Float8CurrentScaling", reason),
    )


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("may_warn")
def test_a_linear_that_cannot_be_quantized_any_more_warns_once(
    change: str, is_compiled: bool
) -> None:
    model, x, expected = head_of(change)
    torch._dynamo.reset()
    call: Any = torch.compile(model.head, backend="aot_eager") if is_compiled else model.head
    assert warnings_of(lambda: call(x)) == [expected]
    assert warnings_of(lambda: call(2 * x)) == []


@pytest.mark.usefixtures("may_warn")
def test_nothing_is_said_where_no_recipe_was_meant_or_its_linears_are_quantized() -> None:
    model, x, _ = head_of("pruned")
    with fuser.autocast(enabled=False):
        assert warnings_of(lambda: model.head(x)) == []
    chain = converted()
    chain.body.layers[0].act = nn.Tanh()  # its linears run, each by itself
    assert warnings_of(lambda: chain(x)) == []
    kept = made()
    fuser.convert(kept, recipe=CURRENT, keep=("head",))
    pruned(kept)
    assert warnings_of(lambda: kept(x)) == []
    fuser.convert(kept)
    assert warnings_of(lambda: kept(x)) == []


@pytest.mark.usefixtures("may_warn")
def test_a_chain_whose_linears_were_not_converted_warns() -> None:
    model, x = made(), data()
    fuser.convert(model, recipe=CURRENT, keep=(), linears="none")
    model.body.layers[0].act = nn.Tanh()
    (message,) = warnings_of(lambda: model.body.layers[0](x))
    assert message.startswith("A GatedMLP that fuser.convert has converted")


@pytest.mark.usefixtures("may_warn")
def test_linears_inside_of_converted_children_are_quantized() -> None:
    model, x = nn.Sequential(GatedMLP(), nn.SiLU(), GatedMLP()), data()
    report = fuser.convert(model, recipe=CURRENT, keep=(), linears="none")
    assert report.converted[-1].path == ""
    model[1] = nn.Sigmoid()
    assert warnings_of(lambda: model(x)) == []


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_compiled_part_takes_no_autocast_of_another_thread_for_its_own() -> None:
    torch._dynamo.reset()
    model, x = converted(layers=1), data()
    compiled: Any = torch.compile(model, **FULL_GRAPH)
    expected = compiled(x)
    refused = said("compiled-passes-converted-module-called", None)
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with fuser.autocast(enabled=False):
            entered.set()
            left.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    try:
        for _ in range(4):
            with pytest.raises(fuser.StateError, match=refused):
                compiled(x)
        with fuser.autocast(recipe=MXFP8):  # the last that was entered
            found = compiled(x)
    finally:
        left.set()
        thread.join()
    assert torch.equal(found, plain_call(converted(MXFP8, layers=1), x))
    assert torch.equal(compiled(x), expected)


def test_a_linear_that_is_never_called_is_not_said_to_be_converted() -> None:
    """torch's attention reads the weight of its last projection."""
    report = fuser.convert(nn.MultiheadAttention(HIDDEN, 1), recipe=CURRENT)
    assert (report.rows, report.left) == ((), ())


def test_a_linear_with_a_forward_of_its_own_is_left_with_that_reason() -> None:
    model = made()
    model.head.forward = functools.partial(nn.Linear.forward, model.head)
    model.body.mixer.double()
    report = fuser.convert(model, recipe=CURRENT)
    assert {row.path: row.text for row in report.left} == {
        "body.mixer": "the weight of it is torch.float64",
        "head": "it has a forward of its own",
    }
    assert report.gains().keys().isdisjoint(("body.mixer", "head"))
