"""fuser.inspect: its numbers against plain torch, the bits of inspected steps, and what counts."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import pickle
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cpu_graphs
import every_format as formats
import oracles
import pytest
import torch
from one_launch_experts import one_by_one
from pipeline_kernels import on_kernels
from said import holds, said
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.inspection import InspectionReport, Row
from fuser.precision.quantizer_for import make_quantizer
from fuser.report.inspection import SCALE, lay_out_inspection
from fuser.report.picture import Box, Text
from fuser.tensors import quantizer as quantizing
from fuser.tensors.observation import observing

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def step(model: Any, x: torch.Tensor, dy: torch.Tensor | None, recipe: Any, *extras: Any) -> Any:
    """Output and gradients of a step, which leaves no gradient behind."""
    x = x.clone().requires_grad_()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extras)
    y.backward(torch.ones_like(y) if dy is None else dy)
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [y.detach().clone(), x.grad, *grads]


def rows_by_tensor(report: InspectionReport) -> dict[tuple[str, str, str], Row]:
    return {(row.layer, row.tensor, row.copy): row for row in report.rows()}


def decibels(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    noise = (exact.double() - rounded.double()).square().sum()
    return 10 * math.log10(exact.double().square().sum() / noise)


def share(chosen: torch.Tensor, of: torch.Tensor) -> float:
    return (chosen & (of != 0)).sum().item() / (of != 0).sum().item()


def wide(*shape: int, seed: int) -> torch.Tensor:
    """Values over many powers of two, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(12 * torch.randn(shape, generator=generator))
    return values * (torch.rand(shape, generator=generator) > 0.1)


# -- values -------------------------------------------------------------------------------


def test_numbers_of_current_scaling_are_those_of_a_cast_of_torch() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 48))
    x, dy, weight = wide(32, 64, seed=1), wide(32, 48, seed=2), wide(48, 64, seed=3)
    with torch.no_grad():
        model[0].weight.copy_(weight)
    with fuser.inspect(model) as report:
        step(model, x, dy, recipes.Float8CurrentScaling())
    rows = rows_by_tensor(report)
    assert set(rows) == {("0", tensor, "both") for tensor in ("input", "weight", "grad_output")}
    for name, exact, dtype in (
        ("input", x, E4M3),
        ("weight", weight, E4M3),
        ("grad_output", dy, E5M2),
    ):
        row, amax = rows["0", name, "both"], exact.abs().max()
        scale = torch.finfo(dtype).max / amax
        rounded = (exact * scale).to(dtype).float() / scale
        assert row.amax == amax.item()
        assert row.underflow == share(rounded == 0, exact) > 0.1
        assert row.saturation == 0
        assert row.snr_db == pytest.approx(decibels(exact, rounded), abs=1e-3)
        assert row.bf16_snr_db == pytest.approx(decibels(exact, exact.bfloat16()), abs=1e-3)
        assert (row.values, row.op) == (exact.numel(), "BasicLinear")
        assert row.side == ("backward" if name == "grad_output" else "both")


def test_values_too_large_for_a_scale_of_an_earlier_step_saturate() -> None:
    """The first scale of delayed scaling is 1: 448 is the largest value, and 464 rounds to it."""
    model = fuser.Sequential(fuser.BasicLinear(64, 64))
    x = 200 * torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    x[0, :3] = torch.tensor([463.9, 464.1, -1000.0])
    with fuser.inspect(model) as report:
        step(model, x, None, recipes.DelayedScaling())
    row = rows_by_tensor(report)["0", "input", "both"]
    assert row.saturation == share(x.abs() > 464, x) > 0
    clamped = x.clamp(-448, 448).to(E4M3).float()
    assert row.snr_db == pytest.approx(decibels(x, clamped), abs=1e-3)


def mxfp8_by_hand(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 along rows, whose scales are the powers of two that hold their amax."""
    blocks = x.view(-1, 32)
    amax = blocks.abs().amax(1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return ((blocks / scale).to(E4M3).float() * scale).view(x.shape)


def test_the_copies_of_a_format_with_blocks_have_rows_of_their_own() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64))
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x *= torch.exp2(torch.arange(64.0) / 2)  # columns that differ: blocks along rows lose more
    with fuser.inspect(model) as report:
        step(model, x, None, recipes.MXFP8BlockScaling())
    rows = rows_by_tensor(report)
    rowwise, columnwise = rows["0", "input", "rowwise"], rows["0", "input", "columnwise"]
    by_rows, by_columns = mxfp8_by_hand(x), mxfp8_by_hand(x.t().contiguous()).t()
    for row, rounded, side in ((rowwise, by_rows, "forward"), (columnwise, by_columns, "backward")):
        assert row.snr_db == pytest.approx(decibels(x, rounded), abs=1e-3)
        assert row.underflow == share(rounded == 0, x)
        assert row.side == side
    assert rowwise.underflow > 0 == columnwise.underflow


def test_elements_that_a_transform_mixes_have_a_ratio_and_no_shares() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64))
    with fuser.inspect(model) as report:
        step(model, torch.randn(64, 64), torch.randn(64, 64), recipes.NVFP4BlockScaling())
    rows = rows_by_tensor(report)
    rowwise, columnwise = rows["0", "input", "rowwise"], rows["0", "input", "columnwise"]
    assert rowwise.underflow is not None
    assert columnwise.underflow is columnwise.saturation is None
    assert columnwise.snr_db == pytest.approx(rowwise.snr_db, abs=2)
    assert 15 < rowwise.snr_db < 25  # E2M1 has a bit of mantissa


def test_a_source_of_16_bits_is_exact_beside_bf16() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64, dtype=BF16))
    x = torch.randn(32, 64).bfloat16()
    with fuser.inspect(model) as report:
        step(model, x, None, recipes.Float8CurrentScaling())
    row = rows_by_tensor(report)["0", "input", "both"]
    assert row.bf16_snr_db == math.inf
    amax = x.float().abs().max()
    rounded = (x.float() * (448 / amax)).to(E4M3).float() / (448 / amax)
    assert row.snr_db == pytest.approx(decibels(x, rounded), abs=1e-3)
    assert row.to_dict()["bf16_snr_db"] == "exact"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["larger", "smaller"])
def test_the_numbers_of_several_calls_are_those_of_all_their_values(order: Any) -> None:
    xs = [(1.0, 100.0)[i] * wide(32, 64, seed=i) for i in order]
    model = fuser.Sequential(fuser.BasicLinear(64, 48))
    with fuser.inspect(model) as report:
        for x in xs:
            step(model, x, None, recipes.Float8CurrentScaling())
    scales = [torch.finfo(E4M3).max / x.abs().max() for x in xs]
    rounded = torch.cat([(x * s).to(E4M3).float() / s for x, s in zip(xs, scales, strict=True)])
    exact, row = torch.cat(xs), rows_by_tensor(report)["0", "input", "both"]
    assert (row.amax, row.values) == (float(exact.abs().max()), exact.numel())
    assert row.underflow == share(rounded == 0, exact)
    assert row.snr_db == pytest.approx(decibels(exact, rounded), abs=1e-3)
    with fuser.inspect(model) as report:
        for i in order:
            step(model, (math.nan, 1.0)[i] * xs[0], None, recipes.Float8CurrentScaling())
    assert math.isnan(rows_by_tensor(report)["0", "input", "both"].amax)


def test_values_that_are_not_finite_are_called_so() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64))
    x = torch.randn(32, 64)
    x[3, 4] = math.nan
    with fuser.inspect(model) as report:
        step(model, x, None, recipes.Float8CurrentScaling())
    row = next(row for row in report.rows() if row.tensor == "input")
    assert row.to_dict()["snr_db"] == row.to_dict()["amax"] == "not finite"
    assert "not finite" in str(report)
    assert report.ranked()[0].tensor == "input"
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("one_launch", [True, False])
def test_the_rows_of_experts_add_up_and_their_padding_does_not_count(
    one_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not one_launch:
        one_by_one(monkeypatch)
    model = fuser.Sequential(fuser.GroupedLinear(3, 64, 128, dtype=BF16))
    sizes = torch.tensor([40, 0, 53], dtype=torch.int32)
    x, dy = torch.randn(100, 64).bfloat16(), torch.randn(100, 128).bfloat16()
    x[93:], dy[93:] = 1000.0, 1000.0  # rows of no group
    with fuser.inspect(model) as report:
        step(model, x, dy, recipes.Float8CurrentScaling(), sizes)
    rows = rows_by_tensor(report)
    for name, values, dtype in (("input", x, E4M3), ("grad_output", dy, E5M2)):
        groups = [values[:40].float(), values[40:93].float()]
        scales = [torch.finfo(dtype).max / group.abs().max() for group in groups]
        rounded = [(g * s).to(dtype).float() / s for g, s in zip(groups, scales, strict=True)]
        row = rows["0", name, "both"]
        assert row.values == 93 * values.shape[1]
        assert row.amax == max(group.abs().max().item() for group in groups)
        assert row.underflow == share(torch.cat(rounded) == 0, torch.cat(groups))
        assert row.snr_db == pytest.approx(
            decibels(torch.cat(groups), torch.cat(rounded)), abs=1e-3
        )
    assert rows["0", "weight", "both"].values == 3 * 64 * 128


# -- bits -----------------------------------------------------------------------------------


def gated_block() -> fuser.Sequential:
    torch.manual_seed(0)
    return fuser.Sequential(
        fuser.RMSNorm(64, dtype=BF16),
        fuser.Linear(64, 128, dtype=BF16),
        fuser.SwiGLU(),
        fuser.Linear(64, 64, dtype=BF16),
        fuser.GELU(),
        fuser.Linear(64, 64, dtype=BF16),
    )


def several_steps(model: Any, recipe: Any, *extras: Any) -> list[torch.Tensor]:
    """Outputs, gradients and states of four steps: from the third on passes are repeated."""
    torch.manual_seed(1)
    dtype, found = next(model.parameters()).dtype, list[torch.Tensor]()
    for _ in range(4):
        x, dy = torch.randn(96, 64).to(dtype), torch.randn(96, 64).to(dtype) / 8
        found += step(model, x, dy, recipe, *extras)
    return found + [value for name, value in model.state_dict().items() if "_extra_state" in name]


def assert_inspection_changes_no_bit(
    make: Callable[[], Any], recipe: Any, *extras: Any
) -> InspectionReport:
    model = make()
    with fuser.inspect(model, every=2) as report:
        inspected = several_steps(model, recipe, *extras)
    for one, other in zip(inspected, several_steps(make(), recipe, *extras), strict=True):
        assert torch.equal(one, other)
    assert report.steps == (1, 3)
    assert not report.not_quantized
    return report


def mixed_recipe(role: Any) -> Any:
    is_gradient = role.tensor_type == "grad_output"
    recipe = recipes.MXFP8BlockScaling() if is_gradient else recipes.Float8CurrentScaling()
    return make_quantizer(recipe, role.tensor_type)


RECIPES: dict[str, Callable[[], Any]] = {
    **formats.RECIPES,
    "custom": lambda: recipes.CustomRecipe(qfactory=mixed_recipe),
    "dequantized": lambda: recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "high_precision": lambda: recipes.MXFP8BlockScaling(backward_override="high_precision"),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_inspected_step_has_the_bits_of_any_other(recipe: Any) -> None:
    report = assert_inspection_changes_no_bit(gated_block, recipe())
    assert {row.layer for row in report.rows()} == {"1", "3", "5"}
    inputs = [row.values for row in report.rows() if row.tensor == "input"]
    assert set(inputs) == {len(report.steps) * 96 * 64}


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_inspected_step_on_kernels_has_the_bits_of_any_other(recipe: Any) -> None:
    """Norms and activations there quantize values that are never written, and sum biases' parts."""
    with on_kernels():
        report = assert_inspection_changes_no_bit(gated_block, recipe())
    plain = assert_inspection_changes_no_bit(gated_block, recipe())
    for one, other in zip(report.rows(), plain.rows(), strict=True):
        assert (one.layer, one.tensor, one.copy, one.values) == (
            *(other.layer, other.tensor, other.copy),
            other.values,
        )
        assert one.snr_db == pytest.approx(other.snr_db, abs=0.5)


def test_sums_beside_a_quantized_gradient_keep_their_order_on_kernels() -> None:
    """A gradient that is stored sums that of its bias in another order; bf16 would hide it."""

    def make() -> fuser.Sequential:
        torch.manual_seed(0)
        return fuser.Sequential(fuser.Linear(64, 64), fuser.GELU(), fuser.Linear(64, 64))

    with on_kernels():
        assert_inspection_changes_no_bit(make, recipes.Float8CurrentScaling())


def experts() -> fuser.Sequential:
    torch.manual_seed(0)
    up = fuser.GroupedLinear(3, 64, 256, dtype=BF16)
    return fuser.Sequential(up, fuser.ScaledSwiGLU(), fuser.GroupedLinear(3, 128, 64, dtype=BF16))


@pytest.mark.parametrize("recipe", formats.RECIPES.values(), ids=formats.RECIPES)
def test_an_inspected_step_of_experts_has_the_bits_of_any_other(recipe: Any) -> None:
    sizes = torch.tensor([40, 0, 50], dtype=torch.int32)
    report = assert_inspection_changes_no_bit(experts, recipe(), sizes, torch.rand(96), sizes)
    assert {row.layer for row in report.rows()} == {"0", "2"}


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "nvfp4"])
def test_an_inspected_step_of_experts_on_kernels_has_the_bits_of_any_other(recipe: str) -> None:
    sizes = torch.tensor([40, 0, 50], dtype=torch.int32)
    extras = sizes, torch.rand(96), sizes
    with on_kernels():
        assert_inspection_changes_no_bit(experts, formats.RECIPES[recipe](), *extras)


def test_steps_that_are_not_inspected_keep_no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64))
    with fuser.inspect(model, every=3) as report:
        step(model, torch.randn(32, 64), None, recipes.MXFP8BlockScaling())
        with monkeypatch.context() as patch:
            patch.setattr(quantizing, "keep_source", None)  # a call would raise
            step(model, torch.randn(32, 64), None, recipes.MXFP8BlockScaling())
    assert (report.calls, report.steps) == (2, (1,))
    assert observing.steps is observing.now is None


def test_an_error_in_an_inspected_call_leaves_no_observation() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64))
    with fuser.inspect(model) as report:
        with pytest.raises(
            fuser.InputError, match=said("grouped-linear-shape-last-dimension", None, None, 64)
        ):
            step(model, torch.randn(32, 63), None, recipes.MXFP8BlockScaling())
        assert observing.steps is observing.now is None
        step(model, torch.randn(32, 64), None, recipes.MXFP8BlockScaling())
    assert report.rows(2)
    step(model, torch.randn(32, 64), None, recipes.MXFP8BlockScaling())
    assert report.calls == 2


# -- what counts -----------------------------------------------------------------------------


class Two(torch.nn.Module):
    """Two pipelines; the first in a checkpoint, reentrant or not, or in none."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first = fuser.Sequential(fuser.RMSNorm(64), fuser.Linear(64, 64))
        self.second = fuser.Sequential(fuser.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is not None:
            h = checkpoint(self.first, x, use_reentrant=self.reentrant)
            assert isinstance(h, torch.Tensor)
        else:
            h = self.first(x)
        y: torch.Tensor = self.second(h)
        return y


def report_of(model: Any, call: Any = None, calls: int = 3, every: int = 2) -> InspectionReport:
    torch.manual_seed(2)
    with fuser.inspect(model, every=every) as report:
        for _ in range(calls):
            x = torch.randn(64, 64, requires_grad=True)
            with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
                y = (model if call is None else call)(x)
            y.square().sum().backward()
    return report


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_not_counted_again(reentrant: bool) -> None:
    expected = report_of(Two())
    assert report_of(Two(reentrant)).to_dict() == expected.to_dict()
    model = Two()  # all of it in the checkpoint
    around = report_of(model, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert around.to_dict() == expected.to_dict()
    assert expected.steps == (1, 3)


def test_a_forward_that_runs_again_for_memory_is_not_counted_again() -> None:
    def block(budget: float) -> fuser.Sequential:
        torch.manual_seed(0)
        layers = fuser.Linear(64, 64), fuser.GELU(), fuser.Linear(64, 64)
        return fuser.Sequential(*layers, memory_budget=budget)

    assert report_of(block(0)).to_dict() == report_of(block(1)).to_dict()


def test_a_backward_after_the_context_belongs_to_its_forward() -> None:
    inside, model = report_of(Two(), calls=1), Two()
    torch.manual_seed(2)
    x = torch.randn(64, 64, requires_grad=True)
    with fuser.inspect(model) as report, fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
        y = model(x)
    assert {row.tensor for row in report.rows()} == {"input", "weight"}
    y.square().sum().backward()
    assert report.to_dict() == inside.to_dict()


def test_backwards_of_microbatches_belong_to_their_forwards() -> None:
    model, xs = Two(), [torch.randn(64, 64) for _ in range(2)]
    with (
        fuser.inspect(model, every=2) as report,
        fuser.autocast(recipe=recipes.MXFP8BlockScaling()),
    ):
        first, second = map(model, xs)
    second.square().sum().backward()
    assert {row.tensor for row in report.rows()} == {"input", "weight"}
    first.square().sum().backward()
    gradients = [row for row in report.rows(1) if row.tensor == "grad_output"]
    assert {row.values for row in gradients} == {64 * 64}


def test_a_copy_of_an_inspected_model_is_not_inspected() -> None:
    model = Two()
    with fuser.inspect(model) as report:
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for each in copies:
            step(each, torch.randn(32, 64), None, recipes.MXFP8BlockScaling())
    assert report.calls == 0


def test_evaluation_is_not_counted() -> None:
    model = Two()
    with fuser.inspect(model) as report, torch.no_grad():
        model(torch.randn(8, 64))
    assert report.calls == 0
    assert "not called with gradients enabled" in report.reason == str(report)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_compiled_model_is_inspected_uncompiled_and_runs_compiled_between(recipe: str) -> None:
    def run(model: Any, **options: Any) -> InspectionReport:
        torch.manual_seed(2)
        with fuser.inspect(model, every=2) as report:
            for _ in range(4):
                step(
                    options.get("call", model), torch.randn(64, 64), None, formats.RECIPES[recipe]()
                )
        return report

    expected, graphs = run(Two()), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def counted(*args: Any) -> Any:
            graphs.append(torch.compiler.is_compiling())
            return graph.forward(*args)

        return counted

    torch._dynamo.reset()
    compiled = torch.compile(Two(), fullgraph=True, backend=backend)
    assert run(compiled).to_dict() == expected.to_dict()
    assert len(graphs) == 2  # of four calls
    model = Two()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert run(model, call=compiled).to_dict() == expected.to_dict()
    assert len(graphs) == 2  # the whole context leaves it out
    step(compiled, torch.randn(64, 64), None, formats.RECIPES[recipe]())
    assert len(graphs) == 3


def test_an_inspected_call_replays_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_graphs.use_stand_in(monkeypatch)
    model, recipe = fuser.Sequential(fuser.Linear(64, 64)), recipes.MXFP8BlockScaling()
    sample = torch.randn(32, 64, requires_grad=True)
    fuser.make_graphed_callables(model, (sample,), enabled=True, recipe=recipe)
    with fuser.inspect(model, every=2) as report:
        found = [step(model, sample.detach(), None, recipe) for _ in range(2)]
    assert {row.tensor for row in report.rows()} == {"input", "weight", "grad_output"}
    assert model.forward._graph._forward_graph.replays == 1
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_quantized_parameters_have_an_amax_and_no_ratio() -> None:
    with fuser.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        model = fuser.Sequential(fuser.BasicLinear(64, 64))
    with fuser.inspect(model) as report:
        step(model, torch.randn(32, 64), None, recipes.MXFP8BlockScaling())
    rows = rows_by_tensor(report)
    weight = rows["0", "weight", "rowwise"]
    assert weight.amax == model[0].weight.detach().dequantize().abs().max().item()
    assert (weight.underflow, weight.snr_db) == (None, None)
    (score,) = report.ranked()
    assert score.snr_db == pytest.approx(rows["0", "input", "columnwise"].snr_db, abs=1)


def test_a_quantize_op_and_the_linear_that_reads_it_have_the_same_numbers() -> None:
    model = fuser.Sequential(fuser.Quantize(), fuser.BasicLinear(64, 64))
    with fuser.inspect(model) as report:
        step(model, torch.randn(32, 64), None, recipes.Float8CurrentScaling())
    rows = rows_by_tensor(report)
    assert rows["0", "input", "both"].snr_db == rows["1", "input", "both"].snr_db
    assert [score.layer for score in report.ranked()] == ["1"]


def test_the_ops_of_a_layer_have_its_path() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = fuser.modules.LayerNormMLP(64, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)

    report = report_of(Model())
    assert dict.fromkeys((row.layer, row.op) for row in report.rows()) == dict.fromkeys(
        [("mlp.ops.1", "Linear"), ("mlp.ops.3", "Linear")]
    )


# -- the report -------------------------------------------------------------------------------


def test_the_layer_that_loses_most_is_ranked_first() -> None:
    model = fuser.Sequential(*(fuser.BasicLinear(64, 64) for _ in range(3)))
    x = torch.randn(64, 64)
    recipe = recipes.DelayedScaling()
    step(model, x, None, recipe)
    with torch.no_grad():
        model[1].weight.mul_(100)  # above the scale of the step before
    with fuser.inspect(model) as report:
        step(model, x, None, recipe)
    ratios = [score.snr_db for score in report.ranked()]
    assert ratios == sorted(ratios)
    assert report.rows()[3].layer == "1"
    assert (
        next(row for row in report.rows() if row.layer == "1" and row.tensor == "weight").snr_db < 3
    )
    last = report.ranked()[-1].layer
    assert last != "1"


@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()])
@pytest.mark.parametrize(
    ("coarse", "product"),
    [("input", "forward"), ("weight", "forward"), ("grad_output", "dgrad")],
)
def test_the_operand_that_loses_most_is_named(coarse: str, product: str, recipe: Any) -> None:
    tensors = {name: torch.ones(64, 64) for name in ("input", "weight", "grad_output")}
    tensors[coarse][:, ::2] = 1.0625  # between two values of every format; ones are exact
    model = fuser.Sequential(fuser.BasicLinear(64, 64))
    with torch.no_grad():
        model[0].weight.copy_(tensors["weight"])
    with fuser.inspect(model) as report:
        step(model, tensors["input"], tensors["grad_output"], recipe)
    assert {row.tensor for row in report.rows() if row.snr_db != math.inf} == {coarse}
    (score,) = report.ranked()
    assert (score.tensor, score.product) == (coarse, product)


def test_the_ratio_of_a_ranked_product_is_that_of_its_result() -> None:
    """Of a forward, the worst product under an override, against fp64."""
    model = fuser.Sequential(fuser.BasicLinear(2048, 512))
    x, weight = torch.randn(512, 2048), model[0].weight.detach()
    with fuser.inspect(model) as report:
        y, *_ = step(model, x, None, recipes.NVFP4BlockScaling(backward_override="high_precision"))
    (score,) = report.ranked()
    assert score.product == "forward"
    exact = x.double() @ weight.double().T
    assert score.snr_db == pytest.approx(decibels(exact, y), abs=0.5)


def test_a_report_is_json_a_table_and_a_picture(tmp_path: Path) -> None:
    report = report_of(Two(), calls=3)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found == report.to_dict()
    assert set(found["rows_of_steps"]) == {"1", "3"}
    both = [found["rows_of_steps"][number][0]["values"] for number in ("1", "3")]
    assert found["rows"][0]["values"] == sum(both)
    lines = str(report).splitlines()
    assert lines[0] == "Quantized tensors of call 1, 3, of 3 in training"
    assert len(lines) == 3 + len(report.rows())
    svg = report.draw(tmp_path / "report.svg").read_text()
    texts = [e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text")]
    assert {"first.1 Linear", "second.0 Linear", "weight, columnwise"} <= set(texts)
    assert str(report).splitlines()[-1].strip() in report.draw(tmp_path / "a.html").read_text()
    assert report.draw(tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(
        fuser.InputError, match=said("draw-picture-drawn", None, holds("report.gif"))
    ):
        report.draw(tmp_path / "report.gif")


def test_a_share_of_nearly_all_values_is_100_percent_in_the_table_and_in_the_picture() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64))
    x = torch.full((32, 64), 1e-9)
    x[0, 0] = 1.0
    with fuser.inspect(model) as report:
        step(model, x, None, recipes.Float8CurrentScaling())
    row = next(row for row in report.rows() if row.tensor == "input")
    assert row.underflow == 2047 / 2048
    assert " 100% " in str(report)
    items = lay_out_inspection(report.to_dict()).items
    texts = [item.string for item in items if isinstance(item, Text)]
    assert [text for text in texts if text.endswith(", 100% to zero")]


def test_bars_are_as_long_as_ratios_and_texts_do_not_overlap() -> None:
    report = report_of(Two(), calls=1)
    picture = lay_out_inspection(report.to_dict())
    bars = [item for item in picture.items if isinstance(item, Box) and item.tip]
    ratios = [row.snr_db for row in report.rows()]
    assert [bar.width for bar in bars] == pytest.approx([SCALE * (r or 0) / 60 for r in ratios])
    texts = [item.bounds for item in picture.items if isinstance(item, Text)]
    for i, (left, top, right, bottom) in enumerate(texts):
        assert 0 <= left < right <= picture.width
        assert 0 <= top < bottom <= picture.height
        for other in texts[:i]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (torch.nn.Sequential(torch.nn.Linear(64, 64)), "has no op that quantizes"),
        (fuser.Sequential(fuser.Linear(64, 64)), "no recipe was active"),
    ],
)
def test_an_empty_report_says_why(model: Any, sentence: str, tmp_path: Path) -> None:
    with fuser.inspect(model) as report:
        step(model, torch.randn(8, 64), None, None)
    assert not report.rows()
    assert not report.ranked()
    assert sentence in report.reason == str(report)
    assert report.to_dict()["reason"] == report.reason
    assert sentence in report.draw(tmp_path / "empty.svg").read_text()


def test_ops_that_were_not_quantized_are_named_with_the_reason() -> None:
    class Model(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fuser.autocast(enabled=False):
                y: torch.Tensor = self.first(x)
            return y

    report = report_of(Model(), calls=1)
    assert report.not_quantized == {"first.1": "no recipe was active", "second.0": "it did not run"}
    assert "it did not run and no recipe was active" in report.reason


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["last", "first"])
def test_a_recipe_was_active_if_it_was_in_one_of_the_calls_of_an_op(order: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ops = fuser.Sequential(fuser.Quantize(forward=False, backward=True), fuser.GELU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in order:
                with fuser.autocast(enabled=i == 1, recipe=without_gradients):
                    x = self.ops(x)
            return x

    without_gradients = recipes.MXFP8BlockScaling(backward_override="dequantized")
    assert report_of(Model(), calls=1).not_quantized == {"ops.0": "nothing was quantized"}


# -- refusals ---------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(error: type[Exception], sentence: str, model: Any, **options: Any) -> Iterator[None]:
    with pytest.raises(error, match=sentence), fuser.inspect(model, **options):
        pass
    yield


def test_a_model_has_one_inspector_at_a_time() -> None:
    model = Two()
    with (
        fuser.inspect(model),
        refused(
            fuser.StateError, said("inspector-open-already-time", "first.1", "Linear"), model.first
        ),
    ):
        with fuser.inspect(Two()) as other:
            step(model, torch.randn(8, 64), None, recipes.MXFP8BlockScaling())
        assert other.calls == 0
    assert report_of(model, calls=1).rows()


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (fuser.Linear(8, 8), {}, said("inspector-model-contains-ops", "the op Linear")),
        (3, {}, said("inspector-model-contains-ops", 3)),
        (fuser.Sequential(), {"every": 1.5}, said("inspector-takes-integer-every", 1.5)),
        (fuser.Sequential(), {"every": True}, said("inspector-takes-integer-every", True)),
        (fuser.Sequential(), {"every": 0}, said("inspector-every-least-1", 0)),
    ],
)
def test_wrong_arguments_are_refused(model: Any, options: Any, sentence: str) -> None:
    error = fuser.InputError if options.get("every") == 0 else fuser.InputTypeError
    with refused(error, sentence, model, **options):
        pass


def test_random_tensors_are_what_they_were() -> None:
    """An inspected call draws no random number."""
    model = fuser.Sequential(fuser.Dropout(0.5), fuser.Linear(64, 64))
    x = oracles.random_tensor((32, 64), torch.float32, 1)
    torch.manual_seed(3)
    plain = step(model, x, None, recipes.NVFP4BlockScaling())
    torch.manual_seed(3)
    with fuser.inspect(model):
        inspected = step(model, x, None, recipes.NVFP4BlockScaling())
    for one, other in zip(plain, inspected, strict=True):
        assert torch.equal(one, other)
