"""Whole models inside torch.compile: those of the examples and of Hugging Face, memory, caches."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import other_sums
import pytest
import torch
from fresh import python
from needs import needs_compiler
from paths import BENCHMARKS, EXAMPLES, ROOT
from test_compiled import (
    CURRENT,
    DELAYED,
    WIDTH,
    Blocks,
    _nothing_compiled_yet,
    assert_equal,
    graphs,
    rows,
    step,
    under,
    whole,
)
from torch._dynamo.utils import counters

import fuser
from fuser.runtime import compiled_runner, pipeline

sys.path[:0] = [str(EXAMPLES), str(BENCHMARKS)]
train_lm, train_moe, memory_meter = (
    importlib.import_module(name) for name in ("fuser.demo.train_lm", "train_moe", "memory_meter")
)

__all__ = ["_nothing_compiled_yet"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")
RECIPES = [None, CURRENT, DELAYED]
SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch_size": 2}


# -- models without a break -----------------------------------------------------------------


def language_model() -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    model, _ = train_lm.make_models(train_lm.Options(**SMALL))
    text = torch.arange(32).view(2, 16)
    return model, lambda model: train_lm.next_byte_loss(model, (text, text.roll(1)))


def mixture_of_experts() -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    model, _ = train_moe.make_models(train_moe.Options(**SMALL))
    text = torch.arange(32).view(2, 16)

    def loss(trained: Any) -> torch.Tensor:
        text_loss = train_lm.next_byte_loss(trained, (text, text.roll(1)))
        found: torch.Tensor = text_loss + model.auxiliary_loss()
        return found

    return model, loss


def llama() -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    """A Llama of Hugging Face, whose feed-forward blocks are pipelines."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = fuser.Sequential(
            fuser.Linear(WIDTH, 4 * WIDTH, bias=False),
            fuser.SwiGLU(),
            fuser.Linear(2 * WIDTH, WIDTH, bias=False),
        )
    text = torch.arange(32).view(2, 16)
    return model, lambda model: model(input_ids=text, labels=text).loss


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("make", [language_model, mixture_of_experts, llama])
def test_a_model_is_one_graph_and_has_the_loss_and_the_gradients_of_eager_steps(
    make: Callable[[], tuple[torch.nn.Module, Callable[..., torch.Tensor]]], recipe: Any
) -> None:
    found = []
    for compiles in (False, True):
        model, loss_of = make()
        trained = whole(model) if compiles else model
        with under(recipe):
            loss = loss_of(trained)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert not counters["graph_break"]
    assert graphs() == 1
    # A quantized operand magnifies what a softmax rounds otherwise.
    close = {"rtol": 1e-4, "atol": 1e-6} if recipe is None else {"rtol": 0.1, "atol": 0.01}
    torch.testing.assert_close(found[1], found[0], **close)


# -- compiling ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["fixed", "any number of rows"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_equal_blocks_of_a_graph_are_traced_as_often_as_one(
    recipe: Any, is_dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("_forward", "_backward"):
        run = getattr(compiled_runner.PipelineRunner, name)

        def counted(self: Any, *args: Any, is_fake: bool, run: Any = run) -> Any:
            calls.extend([run] * is_fake)
            return run(self, *args, is_fake=is_fake)

        monkeypatch.setattr(compiled_runner.PipelineRunner, name, counted)
    counts = []
    for blocks in (1, 6):
        torch._dynamo.reset()
        calls.clear()
        torch.manual_seed(0)
        # No other test traces passes of this width.
        model = Blocks(blocks, width=80 + 16 * blocks)
        with under(recipe):
            x = torch.randn(8, 80 + 16 * blocks, requires_grad=True)
            if is_dynamic:
                torch._dynamo.mark_dynamic(x, 0)
            whole(model)(x).sum().backward()
        counts.append(len(calls))
    assert counts[0] == counts[1] <= 3


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_equal_blocks_of_a_graph_are_planned_once(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, calls = pipeline.make_plan, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return plan(*args)

    monkeypatch.setattr(pipeline, "make_plan", counted)
    torch._dynamo.reset()
    # No other test traces passes of this width.
    compiled, x = whole(Blocks(4, width=208)), torch.randn(8, 208, requires_grad=True)
    for _ in range(3):
        with under(recipe):
            y = compiled(x)
        y.sum().backward()
    assert len(calls) == 1


def test_the_results_of_a_layout_are_not_those_of_another() -> None:
    model, x = Blocks(1), rows(32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    for given in (x, x[:16], x.view(2, 16, WIDTH), x[::2], x[:16]):
        assert_equal(step(compiled, model, given), step(model, model, given))
    two = whole(lambda x: torch.cat((model(x), model(x[:16]))))
    other = torch.cat((model(x), model(x[:16])))
    assert torch.equal(two(x), other)


SCRIPT = """
import json, sys, torch, fuser
from torch._dynamo.utils import counters

def found(width, format):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = fuser.Sequential(fuser.RMSNorm(32), fuser.Linear(32, int(width)), fuser.GELU())
    x = torch.linspace(-1, 1, 16 * 32).view(16, 32).requires_grad_()
    with fuser.autocast(enabled=format == "fp8", recipe=fuser.recipe.Float8CurrentScaling()):
        y = torch.compile(lambda x: model(x), fullgraph=True)(x)
        expected = model(x)
    y.sum().backward()
    assert torch.equal(y, expected)
    hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
    return [sum(hits), float(y.sum()), float(x.grad.sum())]

print(json.dumps([found(*argument.split()) for argument in sys.argv[1:]]))
"""


@needs_compiler
def test_processes_share_a_folder_of_compiled_graphs(tmp_path: Path) -> None:
    """Another process finds graphs of the same passes, and none of others."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(*layouts: str) -> list[Any]:
        done = python(["-W", "ignore", "-c", SCRIPT, *layouts], env)
        assert done.returncode == 0, done.stderr
        found: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    (first,) = run("32 -")
    again, other, quantized = run("32 -", "48 -", "32 fp8")
    assert first[0] == other[0] == quantized[0] == 0
    assert again[0] > 0
    assert again[1:] == first[1:]
    assert quantized[1:] != first[1:]


# -- memory ---------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(("recipe", "most"), [(None, 1.02), (CURRENT, 1.03)], ids=["none", "fp8"])
def test_the_peak_memory_of_many_blocks_is_that_of_an_eager_step(recipe: Any, most: float) -> None:
    """A graph holds what a block saved until its backward has returned; an eager step does not."""
    peaks = []
    for compiles in (False, True):
        model = Blocks(24)
        x = rows(256)
        trained = torch.compile(model, fullgraph=True) if compiles else model

        def one_step(trained: Any = trained, model: Any = model, x: Any = x) -> None:
            with under(recipe):
                trained(x).sum().backward()

        for _ in range(3):  # compiled, and recorded
            one_step()
        with other_sums.own_order():
            peaks.append(memory_meter.measure({"step": one_step}, "cpu")["step"].peak)
        del model, trained, one_step
        gc.collect()
    assert peaks[1] <= most * peaks[0]


# -- inputs that share memory ---------------------------------------------------------------


def _parts(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return t[:24].view(8, 3, WIDTH), t[24:32], t[32:]


INPUTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "views": _parts,
    "apart": lambda t: tuple(part.clone() for part in _parts(t)),
    "turned": lambda t: (_parts(t)[0], _parts(t)[2], _parts(t)[1]),
    "first": lambda t: (t[16:].view(8, 3, WIDTH), t[:8], t[8:16]),
}


@pytest.mark.parametrize("order", [("views", "turned"), ("apart", "first"), ("first", "apart")])
@pytest.mark.parametrize("is_one", [True, False], ids=["one graph", "two graphs"])
def test_a_saved_view_is_one_of_its_own_input(order: tuple[str, str], is_one: bool) -> None:
    """AdaptiveLayerNorm saves a view of its scale, which may share memory with its input."""
    torch.manual_seed(0)
    model = fuser.Sequential(fuser.AdaptiveLayerNorm(WIDTH), fuser.Linear(WIDTH, WIDTH))
    other = copy.deepcopy(model)

    def both(model: Any, t: torch.Tensor) -> torch.Tensor:
        one, two = (model(*INPUTS[name](n * t)) for n, name in enumerate(order, 1))
        return torch.cat((one, 2 * two))

    def apart(t: torch.Tensor) -> torch.Tensor:
        one, two = (
            whole(lambda t, name=name: model(*INPUTS[name](t)))(n * t)
            for n, name in enumerate(order, 1)
        )
        return torch.cat((one, 2 * two))

    compiled = whole(lambda t: both(model, t)) if is_one else apart
    for _ in range(2):
        found = step(compiled, model, rows(40))
        for one, wanted in zip(found, step(lambda t: both(other, t), other, rows(40)), strict=True):
            torch.testing.assert_close(one, wanted)


def test_inputs_of_a_graph_may_be_views_of_one_tensor() -> None:
    """Of which the trace knows nothing."""
    model = fuser.Sequential(fuser.AdaptiveLayerNorm(WIDTH), fuser.Linear(WIDTH, WIDTH))
    compiled = whole(lambda *parts: model(*parts))
    for name in ("apart", "views", "first", "turned", "apart"):
        leaves = [rows(40).requires_grad_() for _ in range(2)]
        given = [INPUTS[name](2 * leaf) for leaf in leaves]
        found = []
        for function, parts, leaf in zip((compiled, model), given, leaves, strict=True):
            model.zero_grad()
            y = function(*parts)
            (y * torch.linspace(-1, 2, WIDTH)).sum().backward()
            found.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
        assert_equal(*found)


def test_parameters_that_are_views_of_one_buffer() -> None:
    """What is saved of one does not depend on where the others are."""

    def model_of(order: tuple[int, ...]) -> fuser.Sequential:
        model = fuser.Sequential(*(fuser.RMSNorm((4, 16)) for _ in range(3)))
        memory = torch.linspace(0.5, 2, 3 * WIDTH).view(3, 4, 16)
        for op, place in zip(model, order, strict=True):
            op.weight = torch.nn.Parameter(memory[place])
        return model

    models = [model_of(order) for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0))]
    compiled = [whole(lambda x, model=model: model(x)) for model in models]
    x = rows().view(32, 4, 16)
    expected = [step(model, model, x) for model in models]
    for model, one, wanted in zip(models, compiled, expected, strict=True):
        assert_equal(step(one, model, x), wanted)
    outputs = [one(x.clone().requires_grad_()) for one in compiled]  # all before their backwards
    for model, y, wanted in zip(models, outputs, expected, strict=True):
        model.zero_grad()
        (y * torch.linspace(-1, 2, 16)).sum().backward()
        assert_equal([p.grad for p in model.parameters()], wanted[2:])


# -- gradients that torch gets wrong elsewhere ------------------------------------------------


@needs_compiler
def test_gradients_of_views_of_a_weight_and_of_a_tensor_that_is_given_twice() -> None:
    """What graphs with a ``torch.autograd.Function`` get wrong in torch 2.11 (pytorch 180642)."""

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.add = fuser.Sequential(fuser.AddExtraInput(), fuser.GELU())
            self.scale = fuser.Sequential(fuser.ConstantScale(0.5), fuser.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = self.add(self.weight.T, self.weight.T)
            return self.scale(x @ turned) + self.add(x, x) @ self.scale(self.weight)

    model = Head()
    other, x = copy.deepcopy(model), rows()
    expected = step(other, other, x)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        found = step(whole(model, backend), model, x)
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one, wanted)
