"""Weights that a converted module uses as one are read in compiled graphs where they lie."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import every_format as formats
import pytest
import torch
from needs import needs_compiler
from pipeline_kernels import on_kernels
from test_compiled_changes import _nothing_compiled_yet
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.runtime import compiled
from fuser.runtime.graph_parameters import JoinedPart
from fuser.runtime.joined_weights import memory_of

__all__ = ["_nothing_compiled_yet"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

HIDDEN, WIDTH = 64, 128
CURRENT = recipes.Float8CurrentScaling()
DELAYED = recipes.DelayedScaling(amax_history_len=3)
RECIPES: dict[str, Any] = {
    "none": None,
    **{name: formats.deterministic(recipe) for name, recipe in formats.STATELESS.items()},
    "high precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
    "delayed": DELAYED,
}
JOINED = ("gate.weight", "up.weight", "gate.bias", "up.bias")


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), in sizes that every recipe takes."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, WIDTH, bias=bias) for _ in range(2))
        self.down = nn.Linear(WIDTH, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def converted(recipe: Any = None, bias: bool = True, frozen: tuple[str, ...] = ()) -> Any:
    torch.manual_seed(0)
    model = MLP(bias)
    assert fuser.convert(model, recipe=recipe, keep=()).converted
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return nn.Sequential(model)  # a module given to torch.compile itself runs outside of graphs


def rows(seed: int = 0, count: int = 32) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def weights_of(model: Any) -> list[torch.Tensor]:
    return [model[0].gate.weight, model[0].up.weight]


def step(model: Any, call: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The output, the gradients, and the parameters after a step of SGD."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    (y.float() * torch.linspace(-1, 2, HIDDEN)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.01 * p.grad
    return [y.detach(), leaf.grad, *gradients, *(p.detach().clone() for p in model.parameters())]


def assert_equal(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


class Graphs:
    """A backend that keeps the operations of forward and backward graphs."""

    def __init__(self) -> None:
        self.operations: list[list[str]] = []
        self.results: list[list[Any]] = []
        self.backend = aot_autograd(fw_compiler=self._kept, bw_compiler=self._kept)

    def _kept(self, module: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        self.operations.append([str(node.target) for node in nodes])
        results = module.graph.output_node().args[0]
        values = [node.meta.get("val") for node in results if node is not None]
        self.results.append([(v.shape, v.dtype) for v in values if isinstance(v, torch.Tensor)])
        return module.forward


@pytest.mark.sampled
@pytest.mark.parametrize("frozen", [(), JOINED[::2], JOINED[1::2], JOINED], ids=len)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_compiled_steps_have_the_bits_of_eager_ones_and_copy_no_weight(
    recipe: Any, bias: bool, frozen: tuple[str, ...]
) -> None:
    frozen = tuple(name for name in frozen if bias or not name.endswith("bias"))
    model, graphs = converted(recipe, bias, frozen), Graphs()
    other = copy.deepcopy(model)
    call = torch.compile(model, backend=graphs.backend, fullgraph=True)
    for number in range(4):
        assert_equal(step(model, call, rows(number)), step(other, other, rows(number)))
    forward, backward = graphs.operations
    for operations, own in (forward, "fuser.forward"), (backward, "fuser.backward"):
        assert any(own in name or own.replace(".", ".host_") in name for name in operations)
        assert not any("cat" in name or "clone" in name for name in operations), operations
    # What backward reads is not copied for it either.
    assert ((2 * WIDTH, HIDDEN), torch.float32) not in graphs.results[0]


def test_weights_that_lie_in_one_memory_are_a_view_of_it() -> None:
    gate, up = weights_of(converted())
    whole = JoinedPart(2).tensor([gate, up])
    assert (whole.data_ptr(), whole.shape) == (gate.data_ptr(), (2 * WIDTH, HIDDEN))
    assert not whole.requires_grad
    up.data = up.data.clone()
    whole = JoinedPart(2).tensor([gate, up])
    assert whole.data_ptr() != gate.data_ptr()
    assert torch.equal(whole, torch.cat([gate, up]))


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
@pytest.mark.parametrize("after", [0, 4])
def test_make_fx_traces_a_product_of_several_weights(after: int, recipe: Any) -> None:
    """Its graph reads the parameters themselves, also after they have changed."""
    model, x = converted(recipe), rows(1)
    for number in range(after):
        step(model, model, rows(number))

    def gradients(leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = model(leaf)
        return y, *torch.autograd.grad((y * y).sum(), [leaf, *model.parameters()])

    graph = make_fx(gradients)(rows(2).requires_grad_())
    step(model, model, rows(3))
    with torch.no_grad():
        found = graph(x)
    assert_equal([*found], [*gradients(x.requires_grad_())])


def test_make_fx_before_the_dispatcher_traces_a_forward_with_joined_weights() -> None:
    model = converted(None)
    graph = make_fx(lambda x: model(x), pre_dispatch=True)(rows(2))
    step(model, model, rows(3))
    assert_equal([graph(rows(1))], [model(rows(1))])


def moved(model: Any) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def loaded(model: Any) -> None:
    model.load_state_dict({name: p.detach() / 2 for name, p in model.state_dict().items()})


def assigned(model: Any) -> None:
    state = {name: p.detach() / 2 for name, p in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def with_data(*names: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name in names:
            parameter = model[0].get_parameter(name)
            parameter.data = parameter.data / 2

    return change


CHANGES = {
    "moved": moved,
    "loaded": loaded,
    "assigned": assigned,
    "data of gate": with_data("gate.weight", "gate.bias"),
    "data of up": with_data("up.weight"),
    "data of both": with_data(*JOINED),
}


@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=["none", "current", "delayed"])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_move_between_calls_count(change: str, recipe: Any) -> None:
    model = converted(recipe)
    other = copy.deepcopy(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for number in range(6):
        if number == 3:
            for each in (model, other):
                CHANGES[change](each)
        assert_equal(step(model, call, rows(number)), step(other, other, rows(number)))
    is_joined = memory_of(weights_of(model)) is not None
    assert is_joined == (change in ("moved", "loaded"))


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
@pytest.mark.parametrize("is_joined", [True, False])
def test_passes_over_joined_weights_are_recorded_wherever_these_lie(
    is_joined: bool, recipe: Any
) -> None:
    model = converted(recipe)
    if not is_joined:
        with_data(*JOINED)(model)
    other = copy.deepcopy(model)
    assert (memory_of(weights_of(model)) is not None) == is_joined
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = set(compiled._passes)
    with on_kernels():
        for number in range(4):
            assert_equal(step(model, call, rows(number)), step(other, other, rows(number)))
        (name,) = set(compiled._passes) - before
        (runner,) = compiled._passes[name].runners()
        assert runner.plan.recorded is not None
        described = dict(runner.plan.recorded.described())
    assert described.keys() == {"forward", "backward"}
    assert not any(text.startswith("step by step") for text in described.values()), described


@pytest.mark.parametrize("name", [*JOINED, "down.weight"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_write_between_forward_and_backward_is_refused(backend: str, name: str) -> None:
    model = converted()
    y = torch.compile(model, backend=backend, fullgraph=True)(rows().requires_grad_())
    with torch.no_grad():
        model[0].get_parameter(name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=["none", "current", "delayed"])
def test_passes_keep_no_memory_that_parameters_have_left(recipe: Any) -> None:
    model = converted(recipe)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for number in range(3):
        step(model, call, rows(number))
    memory: Any = memory_of(weights_of(model))
    reference = weakref.ref(memory)
    del memory
    model.to(torch.bfloat16)
    gc.collect()
    assert reference() is None


def test_frozen_weights_have_no_gradient() -> None:
    for frozen in ((), ("gate.weight",), ("up.weight",), ("gate.weight", "up.weight")):
        model = converted(None, False, frozen)
        step(model, torch.compile(model, backend="aot_eager", fullgraph=True), rows())
        gradients = {name: p.grad is None for name, p in model[0].named_parameters()}
        assert [name for name, is_frozen in gradients.items() if is_frozen] == [*frozen]


def test_biases_of_two_dtypes_are_joined_by_the_graph() -> None:
    model = converted()
    model[0].up.bias = nn.Parameter(model[0].up.bias.detach().to(torch.bfloat16))
    other, graphs = copy.deepcopy(model), Graphs()
    call = torch.compile(model, backend=graphs.backend, fullgraph=True)
    assert_equal(step(model, call, rows()), step(other, other, rows()))
    assert sum("cat" in name for name in graphs.operations[0]) == 1


@needs_compiler
@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
def test_inductor_has_the_bits_for_any_number_of_rows(recipe: Any) -> None:
    model = converted(recipe)
    other = copy.deepcopy(model)
    call = torch.compile(model, dynamic=True, fullgraph=True)
    for number, count in enumerate((32, 64, 64, 96)):
        x = rows(number, count)
        assert_equal(step(model, call, x), step(other, other, x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_in_a_graph_joins_the_weights_again(reentrant: bool) -> None:
    model = converted(CURRENT)
    other = copy.deepcopy(model)

    def again(x: torch.Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=reentrant)

    call = torch.compile(again, backend="aot_eager", fullgraph=True)
    for number in range(3):
        assert_equal(step(model, call, rows(number)), step(other, other, rows(number)))


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
def test_an_exported_program_joins_its_own_weights(recipe: Any) -> None:
    model = converted(recipe)
    program = torch.export.export(model, (rows().requires_grad_(),), strict=True)
    assert not any("cat" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded_program = torch.export.load(file).module()
    other = copy.deepcopy(model)
    for number in range(3):
        expected = step(other, other, rows(number))
        assert_equal(step(loaded_program, loaded_program, rows(number)), expected)
