"""Recorded passes as graphs that are found by addresses: bits, and what ends a graph."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import re
import sys
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from address_graphs import CpuCapturer, on_cpu_graphs
from fresh import python
from pipeline_kernels import on_kernels
from recordable_op import Square, with_square
from test_recorded import BF16, BLOCKS, MODELS, PAIRS, RECIPES, under

import fuser
from fuser.cuda import launch, pass_graphs, sequence
from fuser.cuda.pass_graphs import PassGraphs
from fuser.runtime.compiled_runner import PipelineRunner
from fuser.tensors import Float8CurrentScalingQuantizer

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

STEPS = 7


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with on_kernels():
        yield


@pytest.fixture
def capturer() -> Iterator[CpuCapturer]:
    with on_cpu_graphs() as found:
        yield found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[PassGraphs]:
    """The graphs of all sequences of the test."""
    found: list[PassGraphs] = []
    init = PassGraphs.__init__

    def noted(self: PassGraphs, device: int) -> None:
        init(self, device)
        found.append(self)

    monkeypatch.setattr(PassGraphs, "__init__", noted)
    return found


class Steps:
    """Steps of a model whose input is always in the same memory."""

    def __init__(self, model: torch.nn.Module, shape: Any, recipe: Any) -> None:
        self.model, self.recipe = model, recipe
        self.x = torch.zeros(shape, dtype=BF16, requires_grad=True)
        self.dy: torch.Tensor | None = None

    def run(self, number: int) -> list[list[float]]:
        """Output and gradients as lists: nothing keeps the memory of a step."""
        made = torch.Generator().manual_seed(number)
        self.x.data.copy_(torch.randn(self.x.shape, generator=made))
        torch.manual_seed(number)
        with under(self.recipe):
            y = self.model(self.x)
        if self.dy is None:
            self.dy = torch.zeros_like(y)
        self.dy.copy_(torch.randn(y.shape, generator=made))
        y.backward(self.dy)
        tensors = [y.detach(), self.x.grad, *(p.grad for p in self.model.parameters())]
        found = [[] if t is None else t.double().flatten().tolist() for t in tensors]
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None
        return found


def without_graphs(model: torch.nn.Module, shape: Any, recipe: Any, count: int) -> list[Any]:
    fuser.graph_passes(False)
    try:
        steps = Steps(model, shape, recipe)
        return [steps.run(i) for i in range(count)]
    finally:
        fuser.graph_passes(True)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "recipe_name"), PAIRS)
def test_replayed_steps_have_the_bits_of_played_ones(
    name: str, recipe_name: str, capturer: CpuCapturer, graphs: list[PassGraphs]
) -> None:
    (make, shape), recipe = MODELS[name], RECIPES[recipe_name]
    model = make()
    expected = without_graphs(copy.deepcopy(model), shape, recipe, STEPS)
    assert not capturer.captures
    graphs.clear()
    steps = Steps(model, shape, recipe)
    for i in range(STEPS):
        assert steps.run(i) == expected[i], i
    assert all(0 < each.count <= pass_graphs.MOST_GRAPHS for each in graphs if each.hits)
    if name in BLOCKS:
        assert sum(each.hits for each in graphs) >= len(graphs) * STEPS // 3


def test_another_parameter_in_other_memory_is_read(
    capturer: CpuCapturer, graphs: list[PassGraphs]
) -> None:
    make, shape = MODELS["gelu"]
    model = make()
    other = copy.deepcopy(model)
    steps = Steps(model, shape, None)
    for i in range(STEPS):
        steps.run(i)
    before = [each.hits for each in graphs]
    assert all(before)
    for each in (model, other):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.data = parameter.data.clone() + 0.5
    expected = without_graphs(other, shape, None, STEPS)
    for i in range(STEPS):
        assert steps.run(i) == expected[i], i
    assert all(each.hits > hits for each, hits in zip(graphs, before, strict=False))


def test_a_backward_whose_graph_may_come_frees_what_its_forward_packed(
    capturer: CpuCapturer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its launches have read it: it is the memory of a whole pass."""
    make, shape = MODELS["swiglu"]
    model, run = make(), PassGraphs.run
    is_freed: list[bool] = []

    def watched(self: PassGraphs, body: Any, addresses: Any, tensors: Any) -> None:
        self.refusal = "it is never captured"
        (packed,) = [weakref.ref(t) for t in tensors if t.dtype is torch.uint8]

        def launches(tensors: list[torch.Tensor]) -> None:
            body(tensors)
            is_freed.append(packed() is None)

        run(self, launches, addresses, tensors)

    monkeypatch.setattr(PassGraphs, "run", watched)
    steps = Steps(model, shape, None)
    for i in range(STEPS):
        steps.run(i)
    count = len(is_freed) // 2
    assert count >= 2
    assert is_freed == [False, True] * count, "a forward keeps it for its backward"


def test_microbatches_in_flight_have_graphs_of_their_own(capturer: CpuCapturer) -> None:
    make, shape = MODELS["swiglu"]
    model = make()
    other = copy.deepcopy(model)

    # In memory of their own: that of others may come back elsewhere.
    xs = [torch.empty(shape, dtype=BF16, requires_grad=True) for _ in range(3)]
    dy = torch.ones_like(model(xs[0]))

    def run(model: torch.nn.Module, order: list[int]) -> list[list[float]]:
        for x in xs:
            x.grad = None
            x.data.normal_()
        ys = [model(x) for x in xs]
        for i in order:
            ys[i].backward(dy)
        grads = [x.grad for x in xs] + [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return [grad.double().flatten().tolist() for grad in grads if grad is not None]

    def all_of(model: torch.nn.Module) -> list[Any]:
        torch.manual_seed(1)
        return [run(model, [0, 1, 2] if i % 2 else [2, 0, 1]) for i in range(STEPS)]

    found = all_of(model)
    assert capturer.captures >= 3
    fuser.graph_passes(False)
    try:
        assert all_of(other) == found
    finally:
        fuser.graph_passes(True)


def said(model: Any, shape: Any, recipe: Any = None) -> list[tuple[str | None, str]]:
    """How the plan says that the calls until then have run."""
    with under(recipe):
        plan = model.plan(torch.empty(shape, dtype=BF16, device="meta", requires_grad=True))
    assert plan.to_dict()["replays"] == [
        {"ops": [*note.ops], "text": note.text, "fusion": None, "side": note.side}
        for note in plan.replays
    ]
    words = " ".join(str(plan).split())
    assert all(note.text in words for note in plan.replays)
    assert bool(plan.replays) == ("calls until here" in words)
    return [(note.side, note.text) for note in plan.replays]


@pytest.mark.parametrize("recipe_name", ["none", "delayed"])
def test_a_plan_says_which_passes_are_graphs(
    recipe_name: str, capturer: CpuCapturer, graphs: list[PassGraphs]
) -> None:
    make, shape = MODELS["swiglu"]
    model, recipe = make(), RECIPES[recipe_name]
    assert said(model, shape, recipe) == []
    steps = Steps(model, shape, recipe)
    for number in range(3 if recipe_name == "delayed" else 2):  # the first makes the states
        steps.run(number)
    found = [("forward", "recorded: it has not been repeated")]
    assert said(model, shape, recipe)[:1] == found
    for number in range(STEPS):
        steps.run(number)
    texts = [
        (side, f"a CUDA graph in {one.hits} of {one.calls} repetitions, found by the addresses of "
         f"tensors; {one.count} in all, which added {one.count}.0 kB to the memory that graphs "
         "share")
        for side, one in zip(("forward", "backward"), graphs, strict=True)
    ]  # fmt: skip
    assert min(one.hits for one in graphs) > 0
    assert said(model, shape, recipe) == texts
    fuser.graph_passes(False)
    try:
        off = "launched call by call: graphs are turned off"
        assert said(model, shape, recipe) == [("forward", off), ("backward", off)]
    finally:
        fuser.graph_passes(True)


def test_a_plan_says_why_passes_are_no_graphs(
    capturer: CpuCapturer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = MODELS["swiglu"]
    few = fuser.Sequential(fuser.RMSNorm(shape[-1], dtype=BF16))
    steps = Steps(few, shape, None)
    for number in range(4):
        steps.run(number)
    reason = "launched call by call: it has too few launches"
    assert said(few, shape) == [("forward", reason), ("backward", reason)]

    model = make()
    capturer.error = RuntimeError("no memory\nand more")
    steps = Steps(model, shape, None)
    for number in range(STEPS):
        steps.run(number)
    reason = "launched call by call: its capture failed: no memory"
    assert said(model, shape) == [("forward", reason), ("backward", reason)]

    class Own(fuser.RMSNorm):
        """Code of a user."""

    reason = "step by step: Own runs code that is not fuser's, and does not say that is_recordable "
    reason += "is True"
    assert said(fuser.Sequential(Own(shape[-1], dtype=BF16)), shape) == [(None, reason)]
    Own.is_recordable = False
    reason = "step by step: Own says that is_recordable is False"
    assert said(fuser.Sequential(Own(shape[-1], dtype=BF16)), shape) == [(None, reason)]
    norm = fuser.RMSNorm(shape[-1], dtype=BF16)
    vars(norm)["op_forward"] = norm.op_forward
    reason = "step by step: RMSNorm has a method of its own, which was set on the object"
    assert said(fuser.Sequential(norm), shape) == [(None, reason)]
    experts = fuser.GroupedLinear(2, 64, 64, bias=False, dtype=BF16, delay_wgrad_compute=True)
    x, sizes = torch.empty(8, 64, dtype=BF16, device="meta"), torch.tensor([4, 4])
    plan = fuser.Sequential(experts).plan(x, sizes)
    reason = "step by step: GroupedLinear leaves weight gradients to backward_dw"
    assert [note.text for note in plan.replays] == [reason]
    monkeypatch.setattr(fuser.RMSNorm, "is_recordable", False)  # as of a dispatch between ranks
    reason = "step by step: RMSNorm reads a number of rows on the host"
    assert said(fuser.Sequential(fuser.RMSNorm(shape[-1], dtype=BF16)), shape) == [(None, reason)]
    custom = fuser.recipe.CustomRecipe(qfactory=lambda _: Float8CurrentScalingQuantizer())
    assert said(make(), shape, custom) == [(None, "step by step: the recipe is custom")]


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_a_pipeline_with_a_users_op_that_says_so_is_replayed(
    recipe_name: str, capturer: CpuCapturer, graphs: list[PassGraphs]
) -> None:
    recipe, shape = RECIPES[recipe_name], (64, 32)

    def run() -> list[Any]:
        steps = Steps(with_square(), shape, recipe)
        found = []
        for number in range(STEPS):
            if number == STEPS - 1:
                steps.model[3].scale.data.fill_(0.5)
            found.append(steps.run(number))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Square, "is_recordable", False)
        expected = run()
    assert not capturer.captures
    assert run() == expected
    assert capturer.captures >= 2
    assert sum(each.hits for each in graphs) >= len(graphs) * STEPS // 3


class SquareBias(fuser.FusedOperation):
    """A user's fusion: Square and a bias in one pass."""

    window = (Square, fuser.Bias)
    side = "forward"

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **_: Any) -> Any:
        square, bias = self.basic_ops
        basic_op_ctxs[0].save_for_backward(input_, square.scale)
        return torch.addcmul(bias.bias, input_, input_), [(), ()]


def test_a_users_fusion_says_so_too(capturer: CpuCapturer, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, fusions = (64, 32), (*fuser.FUSIONS, SquareBias)

    def run() -> tuple[list[Any], set[str]]:
        torch.manual_seed(0)
        ops = (fuser.Linear(32, 32, dtype=BF16), Square(), fuser.Bias(32, dtype=BF16))
        model = fuser.Sequential(*ops, fuser.Linear(32, 32, dtype=BF16), fusions=fusions)
        steps = Steps(model, shape, None)
        found = [steps.run(number) for number in range(STEPS)]
        assert "SquareBias" in {step.fusion for step in model.plan(steps.x).forward}
        return found, {text for _, text in said(model, shape)}

    expected, texts = run()
    assert texts == {"step by step: a fusion is not fuser's, or it is cut"}
    monkeypatch.setattr(SquareBias, "is_recordable", True, raising=False)
    found, texts = run()
    assert found == expected
    assert all(text.startswith("a CUDA graph in") for text in texts), texts


def test_what_a_users_op_does_unseen_is_not_repeated() -> None:
    """Values that are read on the host, tensors from elsewhere, writes of a foreign kernel."""

    def reads_value(x: torch.Tensor) -> torch.Tensor:
        return x * x.float().abs().max().item()

    elsewhere = torch.full((32,), 2.0, dtype=BF16)

    def written_by_others(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        y.numpy(force=True) if x.dtype is not BF16 else y.view(torch.int16).numpy().fill(16256)
        return y

    def read_after(x: torch.Tensor) -> torch.Tensor:
        return written_by_others(x) + x

    functions = {
        reads_value: "aten._local_scalar_dense.default reads values",
        elsewhere.mul: "it reads or returns a tensor that is neither an input nor its own",
        written_by_others: "it reads memory that neither torch nor fuser wrote",
        read_after: "it reads memory that neither torch nor fuser wrote",
    }
    for function, reason in functions.items():

        class Own(fuser.BasicOperation):
            is_recordable = True

            def op_forward(self, ctx: Any, input_: Any, **_: Any) -> Any:
                return function(input_)  # noqa: B023

        model = fuser.Sequential(fuser.GELU(), Own())
        with torch.no_grad():
            for _ in range(4):
                x = torch.randn(8, 32, dtype=BF16)
                assert torch.equal(model(x), function(fuser.GELU()(x)))
        (note,) = model.plan(x).replays
        assert note.text == f"step by step: {reason}"


def test_a_form_with_out_has_the_arguments_of_its_operation() -> None:
    aten = torch.ops.aten
    found = {
        aten.sum.default: aten.sum.out,
        aten.sum.dim_IntList: torch.sum,
        aten.sigmoid.default: aten.sigmoid.out,
        aten.mul.Scalar: aten.mul.Scalar_out,
        aten.where.self: aten.where.self_out,
        aten.native_layer_norm.default: None,  # of three results
        aten.randint.default: None,
    }
    assert {function: sequence.out_of(function) for function in found} == found


def test_a_pass_whose_capture_fails_is_played_and_says_why(
    capturer: CpuCapturer, graphs: list[PassGraphs]
) -> None:
    make, shape = MODELS["gelu"]
    model = make()
    expected = without_graphs(copy.deepcopy(model), shape, None, STEPS)
    capturer.error = RuntimeError("a library allocates\nand more")
    graphs.clear()
    steps = Steps(model, shape, None)
    assert [steps.run(i) for i in range(STEPS)] == expected
    assert {each.refusal for each in graphs} == {"its capture failed: a library allocates"}
    capturer.error = None
    for _ in range(3):  # the second call with equal addresses would be captured
        steps.run(0)
    assert not capturer.captures


def test_a_stream_or_a_setting_of_products_has_graphs_of_its_own(
    capturer: CpuCapturer, graphs: list[PassGraphs]
) -> None:
    make, shape = MODELS["gelu"]
    steps = Steps(make(), shape, None)
    for i in range(STEPS):
        steps.run(i)
    captures = capturer.captures
    capturer.setting = "another"
    for i in range(STEPS):
        steps.run(i)
    assert capturer.captures == 2 * captures


def test_graphs_of_a_stream_hold_what_their_captures_took_from_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserved = [100]

    def memory_reserved(device: int) -> int:
        assert device == 3
        return reserved[0]

    fakes = {
        "CUDAGraph": mock.Mock,
        "Stream": mock.Mock,
        "graph_pool_handle": object,
        "is_current_stream_capturing": bool,
        "memory_reserved": memory_reserved,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(pass_graphs, "cuda_stream", lambda device: 7)
    capturer = pass_graphs.Capturer()

    def taking(nbytes: int) -> Any:
        def body(tensors: list[torch.Tensor]) -> None:
            reserved[0] += nbytes

        return capturer.capture(3, body, [])

    assert capturer.nbytes == 0
    graphs = [taking(50), taking(0), taking(-20)]
    assert [graph.nbytes for graph in graphs] == [50, 0, 0]
    assert capturer.nbytes == 50
    del graphs[0]
    assert capturer.nbytes == 50, "another graph has the memory too"
    graphs.clear()
    gc.collect()
    assert capturer.nbytes == 0
    graphs.append(taking(8))
    assert capturer.nbytes == 8
    monkeypatch.setattr(torch.cuda, "memory_reserved", mock.Mock(side_effect=RuntimeError))
    graphs.append(taking(8))
    assert (graphs[-1].nbytes, capturer.nbytes) == (0, 8)


def test_graphs_are_off_where_a_user_says_so(capturer: CpuCapturer) -> None:
    make, shape = MODELS["gelu"]
    without_graphs(make(), shape, None, STEPS)
    assert not capturer.captures


def test_a_switch_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(fuser.InputTypeError, match=r"graph_passes takes True or False, got 0\."):
        fuser.graph_passes(0)
    assert pass_graphs.Switch.is_on


@pytest.mark.parametrize(("value", "is_on"), [("0", False), ("1", True)])
def test_a_variable_of_the_environment_turns_graphs_off(value: str, is_on: bool) -> None:
    code = "from fuser.cuda import pass_graphs; print(pass_graphs.Switch.is_on)"
    paths = os.pathsep.join(sys.path)
    run = python(["-c", code], {"FUSER_GRAPH_PASSES": value, "PYTHONPATH": paths})
    assert run.stdout.strip() == str(is_on), run.stderr


def test_results_that_leave_a_graph_have_the_options_of_their_calls(capturer: CpuCapturer) -> None:
    x, w, b = (torch.randn(4, 4) for _ in range(3))

    def calls() -> tuple[torch.Tensor, ...]:
        product = torch.addmm(b, x, w, beta=2, alpha=0.5)
        return product, x.sum(0, dtype=torch.float64), torch.add(b, w, alpha=3)

    made, result, slotted = sequence.record([x, w, b], calls, with_calls=True)
    made.result = slotted(result)
    made.drop_names()
    for _ in range(6):
        found = made.play((x, w, b))
        assert all(map(torch.equal, found, calls()))
    assert made.graphs, made.no_graphs
    assert made.graphs[0].hits


@pytest.mark.parametrize("place", [0, 1])
def test_calls_that_draw_numbers_for_a_tensor_are_in_no_graph(
    place: int, capturer: CpuCapturer
) -> None:
    inputs = [torch.full((4, 4), 0.5), torch.full((4, 4), 0.5)]

    def calls() -> tuple[torch.Tensor, ...]:
        inputs[place].mul_(2)  # a draw before it would have other probabilities
        drawn = torch.bernoulli(inputs[place])
        return drawn + 1, drawn * 2, drawn - 3

    made, result, slotted = sequence.record(inputs, calls, with_calls=True)
    made.returns(slotted(result))
    for _ in range(4):
        for x in inputs:
            x.fill_(0.5)
        assert made.play(inputs)[0].eq(2).all()
    assert made.no_graphs == "aten.bernoulli.default draws numbers for a tensor"


def test_a_profiled_repetition_leaves_the_graphs_of_others(capturer: CpuCapturer) -> None:
    x = torch.randn(4, 4)

    def calls() -> tuple[torch.Tensor, ...]:
        return x + 1, x * 2, x - 3

    made, result, slotted = sequence.record([x], calls, with_calls=True)
    made.returns(slotted(result))
    for _ in range(4):
        made.play([x])
    before = made.described()
    # The first repetition takes new blocks, whose addresses come in any order.
    assert re.match("a CUDA graph in [23] of 4 repetitions", before), before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert all(map(torch.equal, made.play([x]), calls()))
    assert made.described() == before


def test_a_pass_that_does_nothing_is_repeated(capturer: CpuCapturer) -> None:
    model = fuser.Sequential(fuser.Identity())
    for _ in range(4):
        x = torch.randn(8, 8, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert torch.equal(y, x)
        assert x.grad is not None
        assert x.grad.eq(1).all()


def noted(tensor: torch.Tensor) -> None:
    """Stands for a collective."""


def test_a_view_of_a_piece_that_is_read_after_its_graph_is_taken_before_it(
    capturer: CpuCapturer,
) -> None:
    x = torch.randn(4, 8)

    def calls() -> tuple[Any, ...]:
        y = (x + 1) * 2
        saved = y * 3
        flat = y.view(-1)
        launch.call_each_time(noted, flat)
        return torch.exp(flat.abs().sqrt() + 1), (), (y, saved)

    made, result, slotted = sequence.record([x], calls, with_calls=True)
    made.returns(slotted(result))
    made.drop_names()
    assert made.pack(made.result[2]) == [0, 1]
    for step in range(6):
        x = torch.randn(4, 8) if step % 3 == 0 else x
        output, _, (packed,) = made.play([x], True)
        expected = calls()
        assert torch.equal(output, expected[0])
        for piece, tensor in zip(made.pieces, expected[2], strict=True):
            assert torch.equal(piece.of(packed), tensor)
    assert len(made.graphs) == 2, made.no_graphs


def test_pieces_are_in_memory_of_their_own_if_nothing_reads_the_last_buffer(
    capturer: CpuCapturer,
) -> None:
    x = torch.ones(8, 8)

    def calls() -> tuple[Any, ...]:
        y = x * 2
        return (y + 1) * 3, (), (y, torch.zeros(64, 8))

    made, result, slotted = sequence.record([x], calls, with_calls=True)
    made.returns(slotted(result))
    made.drop_names()
    assert made.pack(made.result[2]) == [0, 1]
    for _ in range(4):
        output, _, (packed,) = made.play([x], True)
        assert torch.equal(output, calls()[0])
        assert [piece.of(packed).unique().tolist() for piece in made.pieces] == [[2], [0]]


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_tensors_that_are_joined_leave_a_graph(join: Any, capturer: CpuCapturer) -> None:
    """Scales of experts are, which their backward reads."""
    x, w = (torch.randn(2, 3, 4, 5) for _ in range(2))
    half = torch.randn(2, 3, 4, 5, dtype=torch.float16)

    def calls() -> tuple[torch.Tensor, ...]:
        last = [each.to(memory_format=torch.channels_last) for each in (x, w)]
        whole = join([x, w, x]), join([w, x], 1), join([x, w], dim=-1)
        return *whole, join(last, 1), join([x.transpose(0, 1), w.transpose(0, 1)]), join([half, x])

    made, result, slotted = sequence.record([x, w, half], calls, with_calls=True)
    made.result = slotted(result)
    made.drop_names()
    for _ in range(6):
        found, expected = made.play((x, w, half)), calls()
        assert all(map(torch.equal, found, expected))
        for one, other in zip(found, expected, strict=True):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            one.fill_(7)  # its memory comes back
        for each in (x, w, half):
            each.normal_()
    assert made.graphs, made.no_graphs
    assert made.graphs[0].hits


def test_memory_that_is_made_like_a_tensors_leaves_a_graph(capturer: CpuCapturer) -> None:
    """Gradients of experts are made so, with zeros for those without rows."""
    x, w = (torch.randn(4, 4) for _ in range(2))

    def calls() -> tuple[torch.Tensor, ...]:
        product, zeros = x.new_empty(2, 4, 4), x.new_zeros(3, 4, dtype=torch.float64)
        torch.mul(x, w, out=product[0])
        torch.add(x, w, out=product[1])
        zeros[0].add_(x[0])
        return product, zeros, x * 2

    made, result, slotted = sequence.record([x, w], calls, with_calls=True)
    made.result = slotted(result)
    made.drop_names()
    for _ in range(6):
        found = made.play((x, w))
        assert all(map(torch.equal, found, calls()))
        for each in found:  # whose memory comes back
            each.fill_(7)
    assert made.graphs, made.no_graphs
    assert made.graphs[0].hits


@pytest.mark.parametrize("below", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [(16,), (8, 16), (2, 4, 16)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_below_autograd_leaves_a_graph_as_its_product(
    shape: tuple[int, ...], with_bias: bool, below: Any, capturer: CpuCapturer
) -> None:
    """In an operation of torch.compile torch does not take a linear apart, and has no ``out``."""
    with below():
        x, w = (torch.randn(size, dtype=BF16) for size in (shape, (16, 16)))
        b = torch.randn(16, dtype=BF16)

        def calls() -> tuple[torch.Tensor, ...]:
            y = F.linear(x, w, b if with_bias else None)
            return y, F.linear(y, w), x * 2

        made, result, slotted = sequence.record([x, w, b], calls, with_calls=True)
        made.result = slotted(result)
        for _ in range(6):
            assert all(map(torch.equal, made.play((x, w, b)), calls()))
    assert made.graphs, made.no_graphs
    assert made.graphs[0].hits


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe_name", ["none", "current None", "delayed"])
def test_a_weight_that_autocast_casts_is_cast_in_the_graph(
    recipe_name: str,
    is_compiled: bool,
    capturer: CpuCapturer,
    graphs: list[PassGraphs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals: list[str] = []
    before: list[sequence.Action] = []
    in_units = sequence.LaunchSequence._units

    def noted(self: sequence.LaunchSequence, *given: Any) -> Any:
        units, refusal = in_units(self, *given)
        refusals.append(refusal)
        before.extend(action for unit in units for action in unit.first or ())
        return units, refusal

    monkeypatch.setattr(sequence.LaunchSequence, "_units", noted)
    make, shape = MODELS["swiglu"]
    model, expected = make().float(), make().float()
    expected.load_state_dict(model.state_dict())
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
    x = torch.randn(shape)
    for _ in range(4):
        with torch.autocast("cpu", dtype=BF16), under(RECIPES[recipe_name]):
            y = called(x)
        y.sum().backward()
        fuser.graph_passes(False)
        with torch.autocast("cpu", dtype=BF16), under(RECIPES[recipe_name]):
            z = expected(x)
        z.sum().backward()
        fuser.graph_passes(True)
        assert torch.equal(y, z)
    for of_model, of_expected in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(of_model.grad, of_expected.grad)
    assert {*refusals} <= {"", "it has too few launches"}
    assert len(graphs) >= 2
    calls = [action.function for action in before if type(action) is sequence.RecordedCall]
    assert all(type(function) is torch._ops.OpOverload and function.is_view for function in calls)
    assert not {"to", "reshape", "contiguous"} & {f.overloadpacket.__name__ for f in calls}


def test_an_operation_with_kernels_of_its_own_is_one_call() -> None:
    """torch also has some as calls of others, with other bits, for devices without a kernel."""
    aten = torch.ops.aten
    with torch.no_grad():
        x, dy = torch.randn(8, 64, dtype=BF16), torch.randn(8, 64, dtype=BF16)

        def calls() -> tuple[torch.Tensor, ...]:
            return aten.silu_backward(dy, x), F.layer_norm(x, (64,)), x.to(torch.float32)

        made, result, slotted = sequence.record([x, dy], calls, with_calls=True)
        made.result = slotted(result)
        assert all(map(torch.equal, made.play((x, dy)), calls()))
    functions = [
        action.function for action in made.actions if type(action) is sequence.RecordedCall
    ]
    expected = (aten.silu_backward, aten.native_layer_norm, aten._to_copy)
    assert functions == [packet.default for packet in expected]


def test_results_of_replayed_operations_share_no_memory(
    capturer: CpuCapturer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum's two gradients are that of its result, and an operation returns a copy of each."""
    shared: list[bool] = []
    backward = PipelineRunner.backward

    def noted(self: PipelineRunner, given: Any, *, is_fake: bool) -> list[torch.Tensor]:
        results = backward(self, given, is_fake=is_fake)
        if not is_fake:
            taken = {tensor.data_ptr() for tensor in (*given.grads, *given.saved, *given.params)}
            places = [tensor.data_ptr() for tensor in results]
            shared.append(len({*places} - taken) < len(places))
        return results

    monkeypatch.setattr(PipelineRunner, "backward", noted)
    model = fuser.Sequential(fuser.RMSNorm(64, dtype=BF16), fuser.AddExtraInput(), fuser.Bias(64))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, other = (torch.randn(16, 64, dtype=BF16, requires_grad=True) for _ in range(2))
    dy = torch.randn(16, 64, dtype=BF16)
    for _ in range(6):
        compiled(x, other).backward(dy)
        assert torch.equal(other.grad, dy)
        model.zero_grad()
        x.grad = other.grad = None
    assert len(shared) == 6
    assert not any(shared)


@pytest.mark.parametrize("recipe_name", ["none", "current None", "delayed"])
def test_what_a_backward_alone_reads_is_in_one_tensor(
    recipe_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences: list[sequence.LaunchSequence] = []
    pack = sequence.LaunchSequence.pack

    def noted(self: sequence.LaunchSequence, slots: Any) -> list[int]:
        sequences.append(self)
        return pack(self, slots)

    monkeypatch.setattr(sequence.LaunchSequence, "pack", noted)
    make, shape = MODELS["swiglu"]
    model, x = make(), torch.randn(shape, dtype=BF16, requires_grad=True)
    for _ in range(3):
        with under(RECIPES[recipe_name]):
            y = model(x)
        *others, last = y.grad_fn.saved_tensors
    (one,) = sequences
    assert last.dtype == torch.uint8
    assert len(one.pieces) >= 2
    assert len(others) + len(one.pieces) == len(one.result[2])
    assert {each.untyped_storage().data_ptr() for each in others}.isdisjoint(
        {last.untyped_storage().data_ptr()}
    )
    bytes_of_pieces = [piece.layout.nbytes for piece in one.pieces]
    padding = last.nbytes - sum(bytes_of_pieces)
    assert 0 <= padding < len(one.pieces) * sequence.PIECE_ALIGNMENT
    ends = [piece.offset + piece.layout.nbytes for piece in one.pieces]
    assert all(end <= piece.offset for end, piece in zip(ends, one.pieces[1:], strict=False))
    assert ends[-1] <= last.nbytes
    assert not any(piece.offset % sequence.PIECE_ALIGNMENT for piece in one.pieces)


def test_another_name_of_a_tensor_is_left_out_and_not_what_is_done_by_it() -> None:
    x = torch.randn(8, 64)

    def calls() -> torch.Tensor:
        made = x + 1
        name = made.view(8, 64)
        name.mul_(2)
        return made * 3 + name.t().sum()

    made, result, slotted = sequence.record([x], calls, with_calls=True)
    made.result = slotted(result)
    made.drop_names()
    for x in (torch.randn(8, 64), torch.randn(8, 64)):
        assert torch.equal(made.play((x,)), calls())
    functions = [
        action.function for action in made.actions if type(action) is sequence.RecordedCall
    ]
    aten = torch.ops.aten
    own = aten.add.Tensor, aten.mul_.Tensor, aten.mul.Tensor
    assert functions == [*own, aten.t.default, aten.sum.default, aten.add.Tensor]


@pytest.mark.parametrize("is_enough", [True, False])
def test_results_are_packed_if_there_are_as_many_calls_as_a_graph_needs(is_enough: bool) -> None:
    x = torch.randn(8, 64)
    count = pass_graphs.FEWEST_CALLS - (not is_enough)

    def calls() -> tuple[torch.Tensor, ...]:
        return tuple(x + i for i in range(count))

    made, result, slotted = sequence.record([x], calls, with_calls=True)
    made.result = ((), (), slotted(result))
    assert made.pack(made.result[2]) == list(range(count)) * is_enough


def test_a_result_that_leaves_otherwise_too_is_in_memory_of_its_own() -> None:
    x = torch.randn(8, 64)

    def calls() -> tuple[Any, ...]:
        one, other, third, fourth = x + 1, x * 2, x * 3, x * 4
        return one, (other[:4],), (one, other, third, fourth)

    made, result, slotted = sequence.record([x], calls, with_calls=True)
    made.result = slotted(result)
    made.drop_names()
    assert made.pack(made.result[2]) == [2, 3]
    for inputs in (x, torch.randn(8, 64)):
        one, (part,), (kept, other, last) = made.play((inputs,), True)
        assert kept is one
        assert torch.equal(one, inputs + 1)
        assert torch.equal(other, inputs * 2)
        assert torch.equal(part, other[:4])
        third, fourth = (piece.of(last) for piece in made.pieces)
        assert torch.equal(third, inputs * 3)
        assert torch.equal(fourth, inputs * 4)
    assert len(made.play((x,))[2]) == 4


def test_pieces_that_are_added_to_begin_with_zeros() -> None:
    x = torch.randn(8)

    def calls() -> tuple[Any, ...]:
        total, other = torch.zeros(8), torch.empty(8)
        total.add_(x)
        other.copy_(x)
        return x * 2, (), (total, other)

    made, result, slotted = sequence.record([x], calls, with_calls=True)
    made.result = slotted(result)
    made.drop_names()
    assert made.pack(made.result[2]) == [0, 1]
    for _ in range(2):  # garbage comes back
        _, _, (last,) = made.play((x,), True)
        assert all(torch.equal(piece.of(last), x) for piece in made.pieces)
        last.fill_(255)
        del last


# -- which addresses have graphs ------------------------------------------------


class Runs:
    """A sequence whose calls have the addresses that are given, and what was run."""

    def __init__(self) -> None:
        self.graphs = PassGraphs(0)
        self.played = 0

    def __call__(self, *addresses: int) -> bool:
        """Whether a call is replayed."""
        hits = self.graphs.hits

        def body(tensors: list[torch.Tensor]) -> None:
            self.played += 1
            tensors.clear()

        tensors = [torch.zeros(1)]
        self.graphs.run(body, addresses, tensors)
        assert not tensors, "what a call is given is freed"
        return self.graphs.hits > hits


def test_the_second_call_with_the_same_addresses_is_captured(capturer: CpuCapturer) -> None:
    runs = Runs()
    assert [runs(1), runs(2), runs(1), runs(1), runs(2)] == [False, False, True, True, True]
    assert runs.graphs.count == capturer.captures == 2


def test_each_of_many_blocks_that_share_a_sequence_has_a_graph(capturer: CpuCapturer) -> None:
    runs, blocks = Runs(), range(48)
    found = [[runs(block) for block in blocks] for _ in range(3)]
    assert [all(replayed) for replayed in found] == [False, True, True]
    assert runs.graphs.count == len(blocks)


def test_a_process_has_no_more_graphs_than_its_memory_is_for(
    capturer: CpuCapturer, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = len(pass_graphs._AddressGraph.of_process)
    monkeypatch.setattr(pass_graphs, "MOST_OF_PROCESS", others + 3)
    first, second = Runs(), Runs()
    assert [first(i // 2) for i in range(4)] == [False, True, False, True]
    assert [second(i // 2) for i in range(4)] == [False, True, False, False]
    monkeypatch.setattr(pass_graphs, "MOST_OF_PROCESS", others + 4)
    assert [second(1), second(1)] == [True, True]


def test_more_addresses_in_turn_than_graphs_leave_the_first_ones(capturer: CpuCapturer) -> None:
    runs = Runs()
    count = pass_graphs.MOST_GRAPHS + 2
    for _ in range(3):
        replayed = [runs(i) for i in range(count)]
    assert replayed == [True] * pass_graphs.MOST_GRAPHS + [False] * 2
    assert capturer.captures == pass_graphs.MOST_GRAPHS


def test_addresses_that_come_back_sooner_take_the_place_of_the_oldest(
    capturer: CpuCapturer,
) -> None:
    runs = Runs()
    for _ in range(2):
        for i in range(pass_graphs.MOST_GRAPHS):
            runs(i)
    for i in range(1, pass_graphs.MOST_GRAPHS):
        assert runs(i)
    assert [runs(100), runs(100), runs(0), runs(1)] == [False, True, False, True]


def test_a_sequence_whose_addresses_never_come_back_looks_seldom(capturer: CpuCapturer) -> None:
    runs = Runs()
    for i in range(pass_graphs.PATIENCE):
        assert not runs(i)
    assert not runs(-1), "it does not look"
    assert not runs(-1)
    for i in range(pass_graphs.PATIENCE):
        runs(1000 + i)
    assert [runs(-1), runs(-1)] == [False, True]


def test_each_pause_in_vain_is_twice_as_long_up_to_the_longest(
    capturer: CpuCapturer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_graphs, "LONGEST_PAUSE", 4 * pass_graphs.PATIENCE)
    runs, looked = Runs(), list[int]()

    def place(device: int) -> tuple[()]:
        looked.append(runs.graphs.calls)
        return ()

    monkeypatch.setattr(capturer, "place", place)
    for i in range(20 * pass_graphs.PATIENCE):
        runs(i)
    gaps = [after - before for before, after in itertools.pairwise(looked) if after > before + 1]
    assert gaps == [pass_graphs.PATIENCE * k for k in (1, 2, 4, 4, 4)]
