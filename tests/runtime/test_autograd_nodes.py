"""Pipelines as several autograd nodes, if gradients are needed during backward."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_kernels import on_kernels
from said import holds, said
from samples import examples
from test_random_pipelines import (
    Experiment,
    Program,
    Setting,
    Stretch,
    deterministic,
    programs,
    run_settings,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.basic_ops import BasicLinear
from fuser.plan import cuts
from fuser.plan.cuts import BUCKET_BYTES, FIRST_BYTES, Gap
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fuser.runtime import recorded
from fuser.runtime.cut import CuttablePlan
from fuser.runtime.executor import CompiledPlan
from fuser.runtime.known_parameters import ParameterLayout, QuantizedFacts
from fuser.tensors import QuantizedTensor

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

RECIPES: tuple[Recipe | None, ...] = (
    None,
    Float8CurrentScaling(),
    DelayedScaling(amax_history_len=3),
    MXFP8BlockScaling(),
    Float8BlockScaling(),
    NVFP4BlockScaling(),
    Float8CurrentScaling(backward_override="dequantized"),
    MXFP8BlockScaling(backward_override="high_precision"),
)

MLP_WIDTH = 64


@pytest.fixture
def small_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes end after any parameter."""
    monkeypatch.setattr(cuts, "FIRST_BYTES", 1)
    monkeypatch.setattr(cuts, "BUCKET_BYTES", 1)


@contextlib.contextmanager
def in_ddp(bucket_bytes: int = 1, is_synchronized: bool = True) -> Iterator[None]:
    """As inside the forward of a DistributedDataParallel with such buckets."""
    ddp = types.SimpleNamespace(
        require_backward_grad_sync=is_synchronized,
        bucket_bytes_cap=bucket_bytes,
        bucket_bytes_cap_default=bucket_bytes == BUCKET_BYTES,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "_active_ddp_module", ddp)
        yield


def mlp_blocks(
    count: int = 2, residual: bool = False, bias: bool = False, width: int = MLP_WIDTH
) -> fuser.Sequential:
    torch.manual_seed(0)
    ops: list[torch.nn.Module] = []
    for number in range(count):
        block: list[Any] = [
            fuser.RMSNorm(width),
            fuser.Linear(width, 2 * width, bias=bias),
            fuser.GELU(),
            fuser.Linear(2 * width, width, bias=bias),
        ]
        if residual:
            start, end = fuser.MakeExtraOutput(), fuser.AddExtraInput()
            start.set_extra_output_channel(0, f"residual {number}", output_to_caller=False)
            end.set_extra_input_channel(0, f"residual {number}")
            block = [start, *block, end]
        ops += block
    return fuser.Sequential(*ops)


def linears(count: int, width: int) -> fuser.Sequential:
    torch.manual_seed(0)
    ops = [[fuser.Linear(width, width, bias=False), fuser.GELU()] for _ in range(count)]
    return fuser.Sequential(*(op for pair in ops for op in pair))


def hook(model: torch.nn.Module, function: Any = lambda parameter: None) -> list[Any]:
    return [p.register_post_accumulate_grad_hook(function) for p in model.parameters()]


def node_count(output: torch.Tensor) -> int:
    """The number of pipelines' nodes in the graph of ``output``."""
    seen: set[Any] = set()
    left = [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [edge for edge, _ in node.next_functions]
    return sum("Pipeline" in type(node).__name__ for node in seen)


def train(
    model: torch.nn.Module,
    recipe: Recipe | None = None,
    steps: int = 3,
    call: Callable[..., torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    width: int = MLP_WIDTH,
) -> tuple[list[torch.Tensor], int]:
    """Outputs, gradients, scales and amax histories of some steps; and the number of nodes."""
    results: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    count = 0
    for _ in range(steps):
        x = torch.randn(128, width, generator=generator).to(dtype).requires_grad_()
        model.zero_grad()
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = (call or model)(x)
        count = node_count(y)
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
        results += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    for module in model.modules():
        if isinstance(module, BasicLinear):
            results += [module.get_extra_state()]
    return results, count


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b), number


# -- numbers ----------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cuts_change_no_bits(
    small_nodes: None, recipe: Recipe | None, dtype: torch.dtype, residual: bool, bias: bool
) -> None:
    whole, count = train(mlp_blocks(residual=residual, bias=bias).to(dtype), recipe, dtype=dtype)
    assert count == 1
    model = mlp_blocks(residual=residual, bias=bias).to(dtype)
    hook(model)
    cut, count = train(model, recipe, dtype=dtype)
    assert count >= 4
    assert_equal(whole, cut)


@pytest.mark.parametrize("residual", [False, True])
def test_cuts_change_no_bits_under_torch_autocast(small_nodes: None, residual: bool) -> None:
    def call(model: torch.nn.Module) -> Any:
        return torch.autocast("cpu", torch.bfloat16)(model)

    whole = mlp_blocks(residual=residual, bias=True)
    cut = copy.deepcopy(whole)
    hook(cut)
    results, count = train(cut, call=call(cut))
    assert count >= 4
    assert_equal(train(whole, call=call(whole))[0], results)


def test_a_quantized_tensor_passes_a_cut(
    small_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp_blocks()
    x = torch.randn(128, MLP_WIDTH)
    entering: list[bool] = []
    leaving: list[bool] = []
    call = CompiledPlan.call

    def noted(part: CompiledPlan, input_: torch.Tensor, *given: Any) -> Any:
        entering.append(isinstance(input_, QuantizedTensor))
        y: Any = call(part, input_, *given)
        y.grad_fn.register_prehook(lambda grads: leaving.append(is_quantized(grads)))
        return y

    def is_quantized(grads: Any) -> bool:
        return isinstance(grads[0], QuantizedTensor)

    monkeypatch.setattr(CompiledPlan, "call", noted)
    hook(model)
    with fuser.autocast(recipe=MXFP8BlockScaling()):
        plan = model.plan(x)
        model(x).sum().backward()
    starts = [node.ops[0] for node in plan.nodes]
    keys = plan.key.ops
    assert entering == [keys[op].input is not None for op in starts]
    # From the last node to the first; the caller's gradient comes to the last.
    assert leaving == [False, *(keys[op].grad_input is not None for op in reversed(starts[1:]))]
    assert any(entering)
    assert any(leaving)
    takes = [node.takes_quantized for node in plan.nodes]
    assert takes == [a or b for a, b in zip(entering, [False, *reversed(leaving[1:])], strict=True)]
    assert "a quantized tensor passes the cut before" in " ".join(str(plan).split())


def channel_of_readers(pattern: str, output_to_caller: bool) -> fuser.Sequential:
    """A linear, whose output goes to the channel that every "A" of ``pattern`` adds."""
    torch.manual_seed(0)
    start = fuser.MakeExtraOutput()
    start.set_extra_output_channel(0, "kept", output_to_caller=output_to_caller)
    ops: list[torch.nn.Module] = [fuser.Linear(MLP_WIDTH, MLP_WIDTH, bias=False), start]
    for letter in pattern:
        if letter == "A":
            add = fuser.AddExtraInput()
            add.set_extra_input_channel(0, "kept")
            ops.append(add)
        else:
            ops.append(fuser.Linear(MLP_WIDTH, MLP_WIDTH) if letter == "L" else fuser.GELU())
    return fuser.Sequential(*ops)


@pytest.mark.parametrize("pattern", ["LALAGAGA", "LAGALAGAGALAA", "LAGALALAGALAGA"])
@pytest.mark.parametrize("output_to_caller", [False, True])
def test_gradients_of_a_channel_are_added_in_the_order_of_one_node(
    small_nodes: None, pattern: str, output_to_caller: bool
) -> None:
    results = []
    for wait in (contextlib.nullcontext, in_ddp):
        model = channel_of_readers(pattern, output_to_caller)
        x = oracles.random_tensor((32, MLP_WIDTH), torch.float32, 1).requires_grad_()
        with wait():
            y, *kept = model(x) if output_to_caller else (model(x),)
        (y.sin().sum() + sum(each.square().sum() for each in kept)).backward()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert_equal(*results)


@pytest.mark.parametrize(("pattern", "last"), [("GLLALLL", 3), ("GLLALALL", 4)])
def test_a_tensor_of_a_channel_is_freed_after_its_last_reader(
    small_nodes: None, monkeypatch: pytest.MonkeyPatch, pattern: str, last: int
) -> None:
    """The second node makes it, and node ``last`` reads it last; nothing saves it."""
    refs: list[Any] = []
    alive: list[bool] = []
    call = CompiledPlan.call

    def noted(part: CompiledPlan, input_: Any, params: Any, extras: Any, *given: Any) -> Any:
        alive.append(any(ref() is not None for ref in refs))
        results: Any = call(part, input_, params, extras, *given)
        if isinstance(results, tuple):
            refs.append(weakref.ref(results[1]))
        return results

    monkeypatch.setattr(CompiledPlan, "call", noted)
    model = channel_of_readers(pattern, output_to_caller=False)
    with in_ddp():
        model(torch.randn(4, MLP_WIDTH, requires_grad=True))
    assert len(refs) == 1
    assert len(alive) > last
    assert alive == [2 < number <= last for number in range(1, len(alive) + 1)]


@given(program=programs(), setting=run_settings)
@settings(**deterministic, max_examples=examples(150))
def test_random_pipelines_have_equal_bits_with_cuts(program: Program, setting: Setting) -> None:
    compare_cut(program, setting, None)


@given(
    program=programs(unit=8),
    setting=run_settings,
    recipe=st.sampled_from((Float8CurrentScaling(), DelayedScaling(), MXFP8BlockScaling())),
)
@settings(**deterministic, max_examples=examples(60))
def test_random_quantized_pipelines_have_equal_bits_with_cuts(
    program: Program, setting: Setting, recipe: Recipe
) -> None:
    setting.leading = (32, *setting.leading[:1])
    compare_cut(program, setting, recipe)


def compare_cut(program: Program, setting: Setting, recipe: Recipe | None) -> None:
    setting.mode = "grad"
    found = []
    for wait in (contextlib.nullcontext, in_ddp):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuts, "FIRST_BYTES", 1)
            experiment = Experiment(program, setting, torch.float32)
            with wait(), fuser.autocast(enabled=recipe is not None, recipe=recipe):
                found.append(experiment.fused())
    (outputs, grads, kinds), (cut_outputs, cut_grads, cut_kinds) = found
    assert kinds == cut_kinds
    for name, y in outputs.items():
        assert type(y) is type(cut_outputs[name]), name
        assert torch.equal(y, cut_outputs[name]), name
    for name, grad in grads.items():
        other = cut_grads[name]
        assert (grad is None) == (other is None), name
        assert grad is None or torch.equal(grad, other), name


# -- reasons to cut ---------------------------------------------------------------------


def test_a_pipeline_is_one_node_unless_gradients_are_needed_early() -> None:
    model = linears(8, 512)  # 1 MiB each
    x = torch.randn(2, 512)
    assert node_count(model(x)) == 1
    handles = hook(model)
    assert node_count(model(x)) == 8  # an eighth of all
    with torch.no_grad():
        assert model(x).grad_fn is None
    for handle in handles:
        handle.remove()
    assert node_count(model(x)) == 1
    with in_ddp(3 * 2**20):
        assert node_count(model(x)) == 3  # 3, 3 and 2 MiB
    with in_ddp(BUCKET_BYTES):
        assert node_count(model(x)) == 2  # 1 MiB, and the rest
    with in_ddp(3 * 2**20, is_synchronized=False):
        assert node_count(model(x)) == 1
    assert node_count(model(x)) == 1


def test_a_hook_on_the_largest_parameter_of_a_node_is_enough() -> None:
    model = linears(8, 512)
    model[0].basic_ops[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    assert node_count(model(torch.randn(2, 512))) == 8


def test_a_short_pipeline_is_never_cut() -> None:
    model = linears(8, 128)  # 0.5 MiB
    hook(model)
    with in_ddp():
        assert node_count(model(torch.randn(2, 128))) == 1
    assert not model.plan(torch.randn(2, 128)).nodes


def test_frozen_parameters_do_not_count() -> None:
    model = linears(8, 512)
    hook(model)
    for op in model[:12]:
        op.requires_grad_(False)
    x = torch.randn(2, 512, requires_grad=True)
    plan = model.plan(x)
    assert [node.ops[0] for node in plan.nodes] == [0, 14]
    model[12].requires_grad_(False)
    assert not model.plan(x).nodes


# -- places of cuts ---------------------------------------------------------------------


def test_a_node_ends_after_as_many_bytes_as_a_bucket() -> None:
    model = linears(16, 1024)  # 4 MiB each
    x = torch.randn(2, 1024)
    with in_ddp(BUCKET_BYTES):
        plan = model.plan(x)
    held = [len([i for i in node.ops if plan.ops[i] == "BasicLinear"]) for node in plan.nodes]
    assert held == [1, 7, 7, 1]
    assert all(plan.ops[node.ops[0]] == "BasicLinear" for node in plan.nodes)


def test_with_hooks_a_node_ends_after_an_eighth_of_the_gradients() -> None:
    model = linears(16, 1024)  # 64 MiB
    hook(model)
    plan = model.plan(torch.randn(2, 1024))
    held = [len([i for i in node.ops if plan.ops[i] == "BasicLinear"]) for node in plan.nodes]
    assert held == [1, *[2] * 7, 1]


MIB = 2**20


def hand_made(op_bytes: Sequence[int], gaps: Iterable[Gap], microseconds: float = 1e6) -> cuts.Cuts:
    """The cuts of ops with such bytes of gradients, whose backward takes so long."""
    found = cuts.Cuts.__new__(cuts.Cuts)
    found._bytes, found._microseconds = list(op_bytes), microseconds
    found.gaps = {gap.op: gap for gap in gaps}
    return found


def anywhere(count: int) -> list[Gap]:
    return [Gap(op, False, 0) for op in range(1, count)]


def sizes_of_nodes(op_bytes: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The MiB of gradients of each node, in the order of backward."""
    ends = (*chosen, len(op_bytes))
    sizes = [sum(op_bytes[i:j]) / MIB for i, j in zip((0, *chosen), ends, strict=True)]
    return [round(size) for size in reversed(sizes)]


@pytest.mark.parametrize(
    ("op_bytes", "microseconds", "sizes"),
    [
        ([MIB] * 64, 1e6, [1, *[8] * 7, 7]),  # an eighth
        ([20 * MIB] * 16, 1e6, [20, *[40] * 7, 20]),  # 25 MiB are less than an eighth
        ([10 * MIB] * 16, 1e6, [10, *[20] * 7, 10]),
        ([MIB] * 64, 800.0, [1, *[8] * 7, 7]),
        ([MIB] * 64, 400.0, [1, 16, 16, 16, 15]),  # 100 us are a quarter
        ([MIB] * 64, 300.0, [1, 22, 22, 19]),  # and a third: 21.3 MiB
        ([MIB] * 64, 150.0, [1, 25, 25, 13]),  # 25 MiB whatever they take
        ([MIB] * 16, 50.0, [1, 15]),
        ([MIB // 2] * 8, 1e6, [1, 1, 1, 1]),  # 1 MiB at least
        ([MIB // 2] * 8, 0.0, [1, 3]),
    ],
)
def test_sizes_of_nodes_if_hooks_wait(
    op_bytes: list[int], microseconds: float, sizes: list[int]
) -> None:
    found = hand_made(op_bytes, anywhere(len(op_bytes)), microseconds).at()
    assert sizes_of_nodes(op_bytes, found) == sizes


@pytest.mark.parametrize(
    ("gaps", "chosen"),
    [
        # The node that ends before op 8 has 2 MiB at gap 6, and a better gap may be at 4 or 5.
        ([Gap(6, True, 0), Gap(4, False, 0)], 4),
        ([Gap(6, True, 0), Gap(5, False, 0), Gap(4, False, 0)], 5),
        ([Gap(6, True, 0), Gap(3, False, 0)], 6),  # too far
        ([Gap(6, False, 0), Gap(4, False, 0)], 6),
        ([Gap(6, False, 1), Gap(4, True, 0)], 6),  # a quantized tensor counts more than a channel
        ([Gap(6, True, 0), Gap(4, False, 3)], 4),
        ([Gap(6, False, 2), Gap(5, False, 1), Gap(4, False, 0)], 4),  # the fewest channels
        ([Gap(6, False, 2), Gap(5, False, 0), Gap(4, False, 0)], 5),
        ([Gap(7, False, 0), Gap(6, True, 0)], 6),  # too near
        ([Gap(5, True, 0), Gap(3, False, 0)], 3),  # 2 MiB from the first gap that is possible
        ([Gap(5, True, 0), Gap(2, False, 0)], 5),
    ],
)
def test_a_better_gap_nearby_is_chosen(gaps: list[Gap], chosen: int) -> None:
    assert hand_made([MIB] * 8, gaps).at((2 * MIB, 100 * MIB)) == (chosen,)


def test_a_node_at_the_start_has_gradients_of_its_own() -> None:
    """1 MiB of them, as every node."""
    assert hand_made([MIB, 0, MIB, MIB], anywhere(4)).at((MIB, MIB)) == (2, 3)
    assert hand_made([MIB - 4, 0, MIB, MIB], anywhere(4)).at((MIB, MIB)) == (3,)
    assert hand_made([0, 0, MIB, MIB], anywhere(4)).at((MIB, MIB)) == (3,)


def test_no_cut_is_inside_a_step_of_forward_or_backward(small_nodes: None) -> None:
    linear = functools.partial(fuser.BasicLinear, MLP_WIDTH, MLP_WIDTH)
    # Of bias and activation alone, only backward is fused.
    pair = (fuser.ConstantScale(2.0), fuser.Bias(MLP_WIDTH), fuser.GELU())
    model = fuser.Sequential(*mlp_blocks(residual=True, bias=True), linear(), *pair, linear())
    x = torch.randn(4, MLP_WIDTH)
    plan = model.plan(x)
    model(x)
    pipeline = model._current_segments().only
    assert pipeline is not None
    run = pipeline._last[1]
    assert isinstance(run, CuttablePlan)
    cut_at = set(run.cuts.gaps)
    assert {node.ops[0] for node in plan.nodes if node.is_cut} <= cut_at
    assert any(len(step.ops) > 1 for step in plan.forward)
    starts = {step.ops[0] for step in plan.forward}
    assert any(not starts.isdisjoint(step.ops[1:]) for step in plan.backward)
    for step in (*plan.forward, *plan.backward):
        assert cut_at.isdisjoint(step.ops[1:])


def test_no_cut_is_beside_a_users_op(small_nodes: None) -> None:
    width = 16
    ops = [fuser.BasicLinear(width, width), Stretch(width, torch.float32)]
    model = fuser.Sequential(*ops, fuser.BasicLinear(width, width), fuser.BasicLinear(width, width))
    with in_ddp():
        plan = model.plan(torch.randn(4, width))
        assert [node.ops[0] for node in plan.nodes] == [0, 3]


def test_no_cut_is_where_autograd_would_convert_a_gradient(small_nodes: None) -> None:
    """The gradient of a float32 tensor comes out of a bfloat16 linear as bfloat16."""
    ops = [fuser.BasicLinear(16, 16, dtype=torch.bfloat16), fuser.Bias(16, dtype=torch.float32)]
    model = fuser.Sequential(*ops, fuser.BasicLinear(16, 16, dtype=torch.bfloat16))
    with in_ddp():
        assert not model.plan(torch.randn(4, 16, dtype=torch.bfloat16)).nodes


def test_no_cut_is_between_the_uses_of_one_tensor(small_nodes: None) -> None:
    model = linears(6, 16)
    model[6].basic_ops[0].weight = model[2].basic_ops[0].weight
    handles = hook(model)
    x = torch.randn(4, 16, requires_grad=True)
    plan = model.plan(x)
    assert not {4, 5, 6} & {node.ops[0] for node in plan.nodes}
    assert len(plan.nodes) == 4
    cut = [*torch.autograd.grad(model(x).sum(), [x, *model.parameters()])]
    for handle in handles:
        handle.remove()
    assert_equal(list(torch.autograd.grad(model(x).sum(), [x, *model.parameters()])), cut)


# -- times of gradients -----------------------------------------------------------------


def test_the_first_gradient_comes_in_the_first_quarter_of_backward() -> None:
    model = linears(16, 512)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(mark)
    y = model(torch.randn(4, 512))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.sum().backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [e.name for e in events if e.name.startswith(("gradient", "fuser backward"))]
    steps = [name for name in names if name.startswith("fuser")]
    assert len(set(steps)) == len(steps) == 32
    assert steps[0] == "fuser backward 31 GELU"  # the plan's own numbers
    assert names.index("gradient") <= len(steps) / 4
    assert names.count("gradient") == 16


def test_gradients_come_evenly_if_hooks_wait() -> None:
    """As those of torch's own modules, and not in two portions."""
    model = linears(8, 512)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(mark)
    y = model(torch.randn(4, 512))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.sum().backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [e.name for e in events if e.name.startswith(("gradient", "fuser backward"))]
    linear, gradient = "BasicLinear", "gradient"
    order = [gradient if name == gradient else name.split()[-1] for name in names]
    assert order == ["GELU", linear, gradient] * 8


def mark(parameter: torch.Tensor) -> None:
    with torch.profiler.record_function("gradient"):
        parameter.grad = None


class LiveGradients(torch.utils._python_dispatch.TorchDispatchMode):
    """The most matrices like the parameters that were in memory beside them at a time."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        self.shape = parameters[0].shape
        self.live = self.most = 0
        self.seen = {p.untyped_storage()._cdata for p in parameters}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape:
            storage = result.untyped_storage()
            place = storage._cdata
            if place not in self.seen:
                self.seen.add(place)
                self.live += 1
                self.most = max(self.most, self.live)
                weakref.finalize(result, self.dropped, place)
        return result

    def dropped(self, place: int) -> None:
        self.live -= 1
        self.seen.discard(place)


def most_live_gradients(depth: int, is_hooked: bool) -> int:
    width = 48
    model = linears(depth, width)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    if is_hooked:
        hook(model, step)
    y = model(torch.randn(8, width)).sum()
    with LiveGradients(list(model.parameters())) as found:
        y.backward()
    most: int = found.most
    return most


def test_an_optimizer_in_backward_holds_few_gradients_at_any_depth(small_nodes: None) -> None:
    assert most_live_gradients(8, is_hooked=False) >= 8
    assert most_live_gradients(16, is_hooked=False) >= 16
    few = most_live_gradients(8, is_hooked=True)
    assert few <= 3
    assert most_live_gradients(16, is_hooked=True) == few


def test_an_optimizer_in_backward_gives_equal_parameters(small_nodes: None) -> None:
    whole, cut = linears(6, 16), linears(6, 16)
    x = torch.randn(8, 16)

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    hook(cut, step)
    for _ in range(3):
        whole(x).square().sum().backward()
        for parameter in whole.parameters():
            step(parameter)
        cut(x).square().sum().backward()
    assert_equal(list(whole.parameters()), list(cut.parameters()))


# -- with other features ----------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [None, DelayedScaling(), MXFP8BlockScaling()], ids=str)
@pytest.mark.parametrize("waits", ["hooks", "ddp"])
def test_recomputed_forwards_have_equal_bits(
    small_nodes: None, use_reentrant: bool, recipe: Recipe | None, waits: str
) -> None:
    def checkpointed(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor) -> Any:
            with in_ddp() if waits == "ddp" and model is cut else contextlib.nullcontext():
                return checkpoint(model, x, use_reentrant=use_reentrant)

        return call

    whole = mlp_blocks(residual=True, bias=True)
    cut = copy.deepcopy(whole)
    plain, _ = train(copy.deepcopy(whole), recipe)
    if waits == "hooks":
        hook(cut)
    results, count = train(cut, recipe, call=checkpointed(cut))
    assert use_reentrant or count >= 4
    assert_equal(train(whole, recipe, call=checkpointed(whole))[0], results)
    assert_equal(plain, results)


def test_a_recomputation_is_cut_as_its_forward(small_nodes: None) -> None:
    model = linears(4, 16)
    pipeline = model._current_segments().only
    counts: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        counts.append(node_count(y))
        return y * 1

    with in_ddp():
        y = checkpoint(function, torch.randn(4, 16), use_reentrant=False)
    y.sum().backward()
    assert pipeline is not None
    assert counts[0] == 4
    # The recomputation stops at the last tensor that it needs, in the last node.
    run = pipeline._last[1]
    assert run._last is not None


def test_copies_and_pickles_are_cut(small_nodes: None) -> None:
    model = linears(4, 16)
    x = torch.randn(4, 16)
    hook(model)
    model(x).sum().backward()
    other = copy.deepcopy(model)
    assert node_count(other(x)) == 1  # torch copies no hooks of parameters
    hook(other)
    assert node_count(other(x)) == 4


def test_keyword_arguments_reach_the_ops_of_all_nodes(small_nodes: None) -> None:
    class Scale(fuser.ConstantScale):
        def op_forward(  # type: ignore[override]
            self, ctx: Any, input_: Any, factor: float = 1.0, **others: Any
        ) -> Any:
            return super().op_forward(ctx, input_ * factor, **others)

    ops = linears(6, 16)
    model = fuser.Sequential(*ops[:2], Scale(1.0), *ops[2:], Scale(1.0))
    x = torch.randn(4, 16)
    given = {model[2]: {"factor": 2.0}, model[-1]: {"factor": 3.0}}
    whole = model(x, op_kwargs=given)
    hook(model)
    cut = model(x, op_kwargs=given)
    assert node_count(cut) > node_count(whole) == 1
    assert torch.equal(whole, cut)


def test_a_failed_call_does_not_change_the_next_one(small_nodes: None) -> None:
    model = linears(4, 16)
    hook(model)
    with pytest.raises(Exception, match=said("grouped-linear-shape-last-dimension", holds(16))):
        model(torch.randn(4, 12))
    results = model(torch.randn(4, 16))
    results.sum().backward()
    with pytest.raises(
        Exception, match=said("grouped-linear-shape-last-dimension", None, holds(12))
    ):
        model(torch.randn(4, 12))
    assert node_count(model(torch.randn(4, 16))) == 4


def test_composites_and_modules_between_pipelines_are_cut(small_nodes: None) -> None:
    pair = linears(4, 16)
    model = fuser.Sequential(*pair, torch.nn.Identity(), *linears(4, 16))
    hook(model)
    x = torch.randn(4, 16)
    plan = model.plan(x)
    assert [node.ops[0] for node in plan.nodes] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [node.is_cut for node in plan.nodes] == [False, True, True, True] * 2
    assert "runs as 8 autograd nodes, cut before ops 2, 4, 6, 10, 12 and 14" in str(plan)
    assert node_count(model(x)) == 8


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", RECIPES[:5], ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_cuts_change_no_bits_of_kernels_and_recorded_passes(
    small_nodes: None, monkeypatch: pytest.MonkeyPatch, recipe: Recipe | None, residual: bool
) -> None:
    played: list[Any] = []
    play = recorded._played

    def counted(*given: Any) -> Any:
        played.append(1)
        return play(*given)

    monkeypatch.setattr(recorded, "_played", counted)
    found = []
    with on_kernels():
        for wait in (contextlib.nullcontext, in_ddp):
            model = mlp_blocks(residual=residual, bias=residual).to(torch.bfloat16)
            played.clear()
            with wait():
                found.append(train(model, recipe, steps=5, dtype=torch.bfloat16))
    (whole, one), (cut, count) = found
    assert one == 1
    assert count >= 3
    assert_equal(whole, cut)
    # Recorded in the second step, and repeated in the three after it, forward and backward.
    assert recipe is not None or len(played) == 2 * 3 * count


def test_nodes_of_one_memory_are_recorded(
    small_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters that are views of one buffer are known by their places in each node."""
    ops = [[fuser.GroupedLinear(3, 32, 32, bias=False), fuser.GELU()] for _ in range(2)]
    model = fuser.Sequential(*(op for pair in ops for op in pair)).to(torch.bfloat16)
    other = copy.deepcopy(model)
    sizes = torch.tensor([8, 16, 8])
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    found = []
    with on_kernels():
        for each, wait in ((model, contextlib.nullcontext), (other, in_ddp)):
            for _ in range(4):
                each.zero_grad()
                with wait():
                    y = each(x, sizes, sizes)
                y.square().sum().backward()
            found.append([y.detach(), *(p.grad for p in each.parameters())])
            assert node_count(y) == 1 + (wait is in_ddp)
    assert_equal(*found)


def test_the_layout_of_a_part_counts_from_its_first_parameter() -> None:
    layout = ParameterLayout(((1, 3), (6, 2)))
    assert layout.part(2, 8).runs == ((0, 2), (4, 2))
    assert layout.part(3, 7).runs == ()  # one parameter of each run
    assert layout.part(2, 8) is layout.part(2, 8)
    one, other = (QuantizedFacts(fuser.Float8Tensor, (name,), (), ()) for name in "ab")
    layout = ParameterLayout((), quantized=[(2, one), (5, other)])
    assert layout.part(1, 6).quantized == [(1, one), (4, other)]
    assert layout.part(2, 5).quantized == [(0, one)]


# -- reports ----------------------------------------------------------------------------


def test_the_plan_shows_nodes_and_the_reason_for_cuts(tmp_path: Path) -> None:
    model = linears(8, 512)
    x = torch.randn(4, 512)
    text = " ".join(str(model.plan(x)).split())
    assert (
        "1 autograd node; 8 with hooks of parameters, cut before ops 2, 4, 6, 8, 10, 12 and 14; "
        "inside DDP about one a bucket"
    ) in text
    handles = hook(model)
    plan = model.plan(x)
    text = " ".join(str(plan).split())
    assert (
        "runs as 8 autograd nodes, cut before ops 2, 4, 6, 8, 10, 12 and 14: hooks of parameters "
        "wait for gradients; a node gives an eighth of them or 25 MiB, unless that takes less than "
        "100 us"
    ) in text
    assert plan.to_dict()["nodes"][7]["ops"] == [14, 15]
    plan.draw(tmp_path / "plan.svg")
    assert "autograd" in (tmp_path / "plan.svg").read_text()
    for handle in handles:
        handle.remove()
    with in_ddp(BUCKET_BYTES):
        text = " ".join(str(model.plan(x)).split())
        assert (
            "runs as 2 autograd nodes, cut before op 14: DistributedDataParallel waits for "
            "gradients; a node gives those of a bucket"
        ) in text
    assert "autograd node" not in str(model.plan(x, training=False))


def test_the_least_size_is_that_of_the_first_bucket_of_ddp() -> None:
    assert FIRST_BYTES == torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
