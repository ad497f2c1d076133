"""Modelled times of plans for a GPU, beside those that were measured on it."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from oracles import DTYPES
from paths import ROOT
from said import said

import fuser
from fuser.cuda import cublaslt
from fuser.gemm import native
from fuser.plan.devices import (
    CPU,
    DEVICES,
    H200,
    Device,
    device_named,
    device_of,
    precision_of,
)
from fuser.plan.plain_torch import PLAIN
from fuser.plan.torch_calls import (
    ATTENTION,
    TorchCall,
    TorchCalls,
    compiled_seconds,
    eager_seconds,
)
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    recipe_named,
)

RESULTS = ROOT / "benchmarks" / "results"
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "128-block": Float8BlockScaling(),
}
META = torch.device("meta")
BF16 = H200.dense["bf16"]


@pytest.fixture
def weight_copies() -> Iterator[None]:
    """Forward quantizes weights for backward too, whatever the number of rows."""
    with fuser.activation_memory_budget(1, keep_weight_copies=True):
        yield


def linear(inputs: int, outputs: int) -> fuser.Linear:
    return fuser.Linear(inputs, outputs, bias=False, device=META, dtype=torch.bfloat16)


def gelu_block(hidden: int, width: int) -> fuser.Sequential:
    return fuser.Sequential(linear(hidden, width), fuser.GELU(), linear(width, hidden))


def swiglu_block(hidden: int, width: int) -> fuser.Sequential:
    fork = fuser.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    return fuser.Sequential(
        fork,
        fuser.RMSNorm(hidden, device=META, dtype=torch.bfloat16),
        linear(hidden, 2 * width),
        fuser.SwiGLU(),
        linear(width, hidden),
        fuser.AddExtraInput().set_extra_input_channel(0, "x"),
    )


BLOCKS = {
    "Linear-GELU-Linear": gelu_block,
    "RMSNorm-Linear-SwiGLU-Linear-add": swiglu_block,
}


def rows_of(name: str) -> Iterator[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def planned(
    model: fuser.Sequential,
    rows: int,
    hidden: int,
    recipe: Recipe | None,
    *,
    training: bool = True,
    device: str = "h200",
) -> fuser.FusionPlan:
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, device=META, requires_grad=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        return model.plan(x, training=training, device=device)


@cache
def deviations() -> dict[str, float]:
    """Modelled over measured time less 1, of each row of the two blocks on an H200."""
    result = {}
    for row in rows_of("pipelines_h200.csv"):
        tokens, hidden, width = (int(row[k]) for k in ("tokens", "hidden", "intermediate"))
        plan = planned(
            BLOCKS[row["block"]](hidden, width),
            tokens,
            hidden,
            RECIPES[row["recipe"]],
            training=row["pass"] != "forward",
        )
        modelled = plan.microseconds
        if row["library"] != "fuser":
            (modelled,) = (b.microseconds for b in plan.baselines if b.name == row["library"])
        name = f"{row['block']}, {row['pass']}, {row['variant']}"
        result[name] = modelled / 1e3 / float(row["ms"]) - 1
    return result


def test_the_blocks_that_were_measured_are_modelled_within_a_tenth() -> None:
    found = deviations()
    assert len(found) == 24
    worst = max(found, key=lambda name: abs(found[name]))
    assert abs(found[worst]) < 0.10, f"{worst}: {found[worst]:+.1%}"


def test_fp8_shows_its_gain_on_a_gpu_and_not_on_this_machine() -> None:
    block = swiglu_block(4096, 14336)
    plain, current = (planned(block, 8192, 4096, RECIPES[name]) for name in ("bf16", "current"))
    measured = {
        row["recipe"]: float(row["ms"])
        for row in rows_of("pipelines_h200.csv")
        if row["library"] == "fuser" and row["block"][:3] == "RMS" and "backward" in row["pass"]
    }
    gain = plain.microseconds / current.microseconds
    assert gain == pytest.approx(measured["bf16"] / measured["current"], rel=0.1)
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device=META, requires_grad=True)
    cpu = fuser.Sequential(fuser.Linear(256, 256, device="cpu"))
    with fuser.autocast(recipe=Float8CurrentScaling()):
        here = cpu.plan(x[:, :256])
    assert here.device is CPU
    assert "(emulated)" in here.forward[0].kernel


def test_experts_of_the_size_whose_rates_were_measured_are_modelled_within_15_percent() -> None:
    found = {}
    recipes = {f"fuser {name}".removesuffix(" bf16"): recipe for name, recipe in RECIPES.items()}
    for row in rows_of("grouped_h200.csv"):
        if row["variant"] not in recipes or (row["way"], row["experts"]) != ("graph", "8"):
            continue
        experts, rows, hidden, width = (
            int(row[k]) for k in ("experts", "tokens", "hidden", "intermediate")
        )
        up, down = (
            fuser.GroupedLinear(
                experts,
                *sizes,
                bias=False,
                single_grouped_weight=True,
                device=META,
                dtype=torch.bfloat16,
            )
            for sizes in ((hidden, 2 * width), (width, hidden))
        )
        recipe = recipes[row["variant"]]
        x = torch.empty(rows, hidden, dtype=torch.bfloat16, device=META, requires_grad=True)
        splits = torch.empty(experts, dtype=torch.int32, device=META)
        probs = torch.empty(rows, device=META)
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            plan = fuser.Sequential(up, fuser.ScaledSwiGLU(), down).plan(
                x, splits, probs, splits, device="h200"
            )
        found[row["variant"]] = plan.microseconds / 1e3 / float(row["ms"]) - 1
    assert len(found) == 4
    assert all(abs(deviation) < 0.15 for deviation in found.values()), found


# -- the terms of a step -------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_linear_takes_the_time_of_its_operations_at_the_rate_of_its_format(device: str) -> None:
    chip = DEVICES[device]
    rows, size = 16384, 8192
    plan = planned(fuser.Sequential(linear(size, size)), rows, size, None, device=device)
    (forward,), (backward,) = plan.forward, plan.backward
    flops = 2 * size * size
    assert (forward.flops_per_token, backward.flops_per_token) == (flops, 2 * flops)
    rate = chip.dense["bf16"]
    seconds = rows * flops / rate.forward
    assert forward.product_microseconds == pytest.approx(seconds * 1e6)
    assert forward.microseconds == pytest.approx((seconds + chip.launch) * 1e6)
    seconds = rows * 2 * flops / rate.backward
    assert backward.microseconds == pytest.approx((seconds + 2 * chip.launch) * 1e6)
    whole = (forward.product_microseconds + backward.product_microseconds) / 1e6
    assert whole == pytest.approx(rows * 3 * flops / rate.step)


def test_a_frozen_weight_saves_one_of_the_products_of_backward() -> None:
    layer = linear(8192, 8192)
    layer.weight.requires_grad_(False)
    plan = planned(fuser.Sequential(layer), 8192, 8192, None)
    assert plan.backward[0].flops_per_token == plan.forward[0].flops_per_token


def test_an_input_without_a_gradient_saves_the_other_product_of_backward() -> None:
    x = torch.empty(8192, 8192, dtype=torch.bfloat16, device=META)
    plan = fuser.Sequential(linear(8192, 8192), linear(8192, 8192)).plan(x, device="h200")
    flops = 2 * 8192**2
    assert [step.flops_per_token for step in plan.forward] == [flops, flops]
    assert [step.flops_per_token for step in plan.backward] == [2 * flops, flops]


@pytest.mark.usefixtures("weight_copies")
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["none", "current"])
def test_a_grouped_linear_has_the_rate_of_groups(groups: int, recipe: Recipe | None) -> None:
    rows, size = 8192, 4096
    up = fuser.GroupedLinear(
        groups,
        size,
        size,
        bias=False,
        single_grouped_weight=True,
        device=META,
        dtype=torch.bfloat16,
    )
    x = torch.empty(rows, size, dtype=torch.bfloat16, device=META, requires_grad=True)
    splits = torch.empty(groups, dtype=torch.int32, device=META)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        plan = fuser.Sequential(up).plan(x, splits, device="h200")
    rate = H200.grouped["bf16" if recipe is None else "Float8CurrentScaling"]
    seconds = 2 * rows * size**2 / rate.forward
    assert plan.forward[0].product_microseconds == pytest.approx(seconds * 1e6)
    if recipe is not None:  # values are read twice, once for the amax, and both copies written
        seconds += (rows * size + groups * size**2) * (2 * 2 + 2) / H200.bandwidth
        launches = len(plan.forward[0].kernel.split(", "))
        rest = plan.forward[0].microseconds / 1e6 - launches * H200.launch
        assert rest >= seconds
    assert plan.backward[0].flops_per_token == 2 * plan.forward[0].flops_per_token


@pytest.mark.parametrize("device", [*DEVICES.values(), CPU], ids=lambda device: device.name)
def test_attention_takes_the_time_of_its_operations_at_its_own_rate(device: Device) -> None:
    for side in ("forward", "backward"):
        call = TorchCall(ATTENTION, 10**15, "bf16", {}, {})
        seconds = 1e15 / min(device.attention, device.peak) + device.launch
        assert call.seconds(device, side) == pytest.approx(seconds)
        rate = device.products("fp32", is_grouped=False).on(side)
        product = TorchCall("mm", 10**15, "fp32", {}, {})
        assert product.seconds(device, side) == pytest.approx(1e15 / rate + device.launch)
        moving = TorchCall("mm", 1, "fp32", {(0, 0): 10**12}, {(1, 0): 10**12})
        assert moving.seconds(device, side) == pytest.approx(
            2e12 / device.bandwidth + device.launch
        )


def test_a_product_of_few_rows_takes_the_time_of_its_weight() -> None:
    size = 8192
    plan = planned(fuser.Sequential(linear(size, size)), 4, size, None, training=False)
    moved = 2 * (size * size + 2 * 4 * size)
    seconds = moved / H200.bandwidth + H200.launch
    assert plan.forward[0].microseconds == pytest.approx(seconds * 1e6)
    assert plan.nominal_tokens == 4


@pytest.mark.parametrize("rows", [4, 8192])
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_the_time_of_products_has_no_time_of_quantizing_and_dequantizing(
    recipe: str, rows: int
) -> None:
    size = 4096
    plan = planned(fuser.Sequential(linear(size, size)), rows, size, recipe_named(recipe))
    # mxfp8 is emulated: bf16 operands. dgrad reads dy and w, wgrad dy and x.
    width, rate = {"current": (1, H200.dense["Float8CurrentScaling"]), "mxfp8": (2, BF16)}[recipe]
    tokens, weight = rows * size, size * size
    forward = width * (tokens + weight) + 2 * tokens
    backward = width * (3 * tokens + weight) + 2 * (tokens + weight)
    flops = 2 * rows * size * size
    for (step,), moved, done, at in (
        (plan.forward, forward, flops, rate.forward),
        (plan.backward, backward, 2 * flops, rate.backward),
    ):
        products = max(done / at, moved / H200.bandwidth) * 1e6
        assert step.product_microseconds == pytest.approx(products, rel=1e-3)
        assert step.microseconds > step.product_microseconds + 1e6 * H200.launch


ROWS, INPUTS, OUTPUTS = 8192, 4096, 16384
"""Of products that take the time of their operations, so that the rest is beside them."""
READ, WRITTEN, WEIGHT = ROWS * INPUTS, ROWS * OUTPUTS, INPUTS * OUTPUTS


def beside(step: fuser.Step) -> float:
    """Microseconds of a step in which no product runs."""
    return step.microseconds - step.product_microseconds


def moving(elements: float, nbytes: int = 2) -> Any:
    """Microseconds in which an H200 reads or writes them."""
    return pytest.approx(elements * nbytes / H200.bandwidth * 1e6)


@pytest.mark.usefixtures("weight_copies")
@pytest.mark.parametrize("name", ["none", "current", "delayed", "rowwise", "block", "mxfp8"])
def test_a_forward_takes_the_time_of_its_launches_and_of_what_it_quantizes(name: str) -> None:
    recipe = None if name == "none" else recipe_named(name)
    for training in (False, True):
        model = fuser.Sequential(linear(INPUTS, OUTPUTS))
        (step,) = planned(model, ROWS, INPUTS, recipe, training=training).forward
        names = step.kernel.split(", ")
        assert names[:-1] == (["quantize input", "quantize weight"] if recipe else [])
        nbytes = step.bytes_per_token * ROWS
        quantized = nbytes - 2 * (READ + WEIGHT + WRITTEN)
        if recipe is not None:  # written and read, both copies for a backward
            least = 2 * (1 + training) * (READ + WEIGHT)
            assert least <= quantized <= 1.1 * least
        read = {"current": 2, "mxfp8": 1 + 2}.get(name, 0)  # for an amax; and written dequantized
        seconds = (quantized + read * (READ + WEIGHT)) / H200.bandwidth + len(names) * H200.launch
        assert beside(step) == pytest.approx(seconds * 1e6)
        assert step.cover_microseconds == pytest.approx(
            (nbytes / H200.bandwidth + len(names) * H200.launch) * 1e6
        )


@pytest.mark.usefixtures("weight_copies")
def test_current_scaling_reads_what_it_quantizes_once_more_for_an_amax() -> None:
    block = fuser.Sequential(
        fuser.RMSNorm(INPUTS, device=META, dtype=torch.bfloat16),
        *(linear(INPUTS, OUTPUTS), fuser.GELU(), linear(OUTPUTS, INPUTS)),
    )
    current, delayed = (planned(block, ROWS, INPUTS, RECIPES[n]) for n in ("current", "delayed"))
    more = {
        side: {
            one.ops: beside(one) - beside(other)
            for one, other in zip(current.steps(side), delayed.steps(side), strict=True)
        }
        for side in ("forward", "backward")
    }
    assert more == {
        # A norm and an activation quantize their outputs, and read their inputs again.
        "forward": {
            (0,): moving(READ),
            (1,): moving(WEIGHT),
            (2,): moving(WRITTEN),
            (3,): moving(WEIGHT),
        },
        # Inputs that are computed again; of the activation's backward both that it reads.
        "backward": {
            (3,): moving(READ + WRITTEN),
            (2,): moving(2 * WRITTEN),
            (1,): moving(READ),
            (0,): pytest.approx(0, abs=1e-6),
        },
    }
    alone = [
        planned(fuser.Sequential(linear(INPUTS, OUTPUTS)), ROWS, INPUTS, RECIPES[name])
        for name in ("current", "delayed")
    ]
    forward, backward = (
        beside(one) - beside(other)
        for (one,), (other,) in (
            [plan.steps(side) for plan in alone] for side in ("forward", "backward")
        )
    )
    assert (forward, backward) == (moving(READ + WEIGHT), moving(WRITTEN))


@pytest.mark.usefixtures("weight_copies")
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_each_step_moves_the_bytes_of_its_tensors_in_their_formats(recipe: str) -> None:
    block = fuser.Sequential(
        fuser.RMSNorm(INPUTS, device=META, dtype=torch.bfloat16),
        *(linear(INPUTS, OUTPUTS), fuser.GELU(), linear(OUTPUTS, INPUTS)),
    )
    plan = planned(block, ROWS, INPUTS, RECIPES[recipe])
    statistics, gamma = 4 * ROWS, 2 * INPUTS
    of_weight = 2 * WEIGHT + 2 * 2 * WEIGHT  # read, and both copies written and read
    products = "dgrad FP8 mm (native), wgrad FP8 mm (native)"
    expected = [
        ("rmsnorm_rows, rmsnorm", 2 * READ + READ + statistics + gamma),
        ("quantize weight, FP8 mm (native)", READ + of_weight + 2 * WRITTEN),
        ("gelu", 2 * WRITTEN + WRITTEN),
        ("quantize weight, FP8 mm (native)", WRITTEN + of_weight + 2 * READ),
        (
            f"gelu again, quantize grad_output, quantize input, {products}",
            # The gradient and the input of the activation are read, and their copies are.
            (2 + 2 * 2) * READ + (2 + 2 + 1) * WRITTEN + 2 * 2 * WEIGHT + 2 * WRITTEN,
        ),
        ("gelu_backward", (2 + 2 + 2) * WRITTEN),
        (
            f"rmsnorm again, quantize input, {products}",
            2 * WRITTEN + (2 + 1 + 2 + 2) * READ + 2 * 2 * WEIGHT,
        ),
        ("rmsnorm_backward", (2 + 2 + 2) * READ + statistics + 2 * gamma),
    ]
    found = [(step.kernel, step.bytes_per_token * ROWS) for step in (*plan.forward, *plan.backward)]
    scales = 64  # of a tensor, and amaxes
    counted: list[Any] = [(names, pytest.approx(n, abs=scales)) for names, n in expected]
    assert found == counted


def test_what_leaves_a_pipeline_quantized_has_the_bytes_of_its_format() -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.Quantize())
    plan = planned(model, 1024, 4096, DelayedScaling(), training=False)
    assert plan.activation_bytes == (2 * 4096, 2 * 4096, 2 * 4096 + 8 / 1024)
    assert [step.emits is not None for step in plan.forward] == [False] * (
        len(plan.forward) - 1
    ) + [True]


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(("recipe", "reads"), [("current", 2), ("delayed", 1)])
def test_a_grouped_linear_quantizes_its_operands_forward_and_its_gradient_backward(
    recipe: str, reads: int, is_kept: bool
) -> None:
    groups, rows, inputs, outputs = 4, 8192, 4096, 2048
    options: Any = {"device": META, "dtype": torch.bfloat16, "single_grouped_weight": True}
    model = fuser.Sequential(fuser.GroupedLinear(groups, inputs, outputs, bias=False, **options))
    x = torch.empty(rows, inputs, dtype=torch.bfloat16, device=META, requires_grad=True)
    splits = torch.empty(groups, dtype=torch.int32, device=META)
    budget = fuser.activation_memory_budget(1, keep_weight_copies=is_kept)
    with budget, fuser.autocast(recipe=RECIPES[recipe]):
        plan = model.plan(x, splits, device="h200")
    weights = groups * inputs * outputs
    # Of weights that are quantized again forward writes one copy, and backward reads the values.
    for (step,), elements, more in (
        (plan.forward, rows * inputs + weights, -weights),
        (plan.backward, rows * outputs, (2 + 1) * weights),
    ):
        moved = elements * (2 * reads + 2) + more * (not is_kept)
        seconds = moved / H200.bandwidth
        seconds += len(step.kernel.split(", ")) * H200.launch
        assert beside(step) == pytest.approx(seconds * 1e6, rel=1e-4)


def test_a_recipe_that_a_gpu_emulates_is_slower_there_than_no_recipe() -> None:
    block = swiglu_block(1024, 4096)
    times = {
        name: planned(block, 8192, 1024, recipe, device="a100").microseconds
        for name, recipe in RECIPES.items()
    }
    assert min(times, key=times.__getitem__) == "bf16"
    emulated = planned(block, 8192, 1024, MXFP8BlockScaling(), device="h200")
    assert emulated.microseconds > planned(block, 8192, 1024, None).microseconds
    assert "(emulated)" in str(emulated)


# TFLOP/s of a step and of forward alone, by precision; measured on an H200 and an H100's are the
# same. The others: the nominal rate, times 672.8 of 989 in bf16 and 1311 of 1979 in FP8.
HOPPER = {
    "bf16": (672.8, 698.3),
    "fp32": (45.579, 45.579),
    "DelayedScaling": (1311.3, 1347.2),
    "Float8CurrentScaling": (1311.1, 1345.5),
    "Float8RowwiseScaling": (1290, 1290),
    "Float8BlockScaling": (992.7, 1161.3),
}
HOPPER_GROUPED = {
    "bf16": (661.3, 661.3),
    "fp32": (45.579, 45.579),
    "DelayedScaling": (1302, 1302),
    "Float8CurrentScaling": (1302, 1302),
    "Float8BlockScaling": (939, 1060.5),
}
A100 = {"bf16": (212.25, 220.29), "fp32": (13.266, 13.266)}
B200 = {
    "bf16": (1530.64, 1588.65),
    "fp32": (51.021, 51.021),
    "DelayedScaling": (2981.73, 3063.37),
    "Float8CurrentScaling": (2981.28, 3059.5),
}
RTX5090 = {
    "bf16": (142.519, 147.921),
    "fp32": (71.294, 71.294),
    "DelayedScaling": (277.632, 285.234),
    "Float8CurrentScaling": (277.59, 284.874),
}
CORES = {"bf16": (0.1, 0.1)}
# Compute capability; dense rates; rates of groups; nominal TFLOP/s in bf16; TB/s of a copy;
# microseconds of a launch; GB/s of a link; GB of memory; TFLOP/s of attention.
FIGURES: dict[str, tuple[Any, ...]] = {
    "H200": ((9, 0), HOPPER, HOPPER_GROUPED, 989, 4.2, 5, 300, 141, 374),
    "H100": ((9, 0), HOPPER, HOPPER_GROUPED, 989, 2.93125, 5, 300, 80, 374),
    "A100": ((8, 0), A100, A100, 312, 1.784125, 5, 200, 80, 117.985),
    "B200": ((10, 0), B200, B200, 2250, 7, 5, 600, 180, 850.86),
    "RTX 5090": ((12, 0), RTX5090, RTX5090, 209.5, 1.568, 5, 42.6667, 32, 79.2245),
    "CPU": (None, CORES, CORES, 0.1, 0.02, 2, 1, 0, 0.1),
}
SOURCES = {"H200": "results", "A100": "A100", "RTX 5090": "Blackwell", "CPU": "two cores"}


@pytest.mark.parametrize("device", [*DEVICES.values(), CPU], ids=lambda device: device.name)
def test_each_figure_of_a_device_is_that_of_the_table(device: Device) -> None:
    of_rates = [
        {name: (rate.step / 1e12, rate.forward / 1e12) for name, rate in rates.items()}
        for rates in (device.dense, device.grouped)
    ]
    arch, dense, grouped, *numbers = FIGURES[device.name]
    assert device.arch == arch
    for found, expected in zip(of_rates, (dense, grouped), strict=True):
        assert found == {name: pytest.approx(each, rel=1e-4) for name, each in expected.items()}
    figures = {
        "peak": device.peak / 1e12,
        "bandwidth": device.bandwidth / 1e12,
        "launch": device.launch * 1e6,
        "link": device.link / 1e9,
        "memory": device.memory / 1e9,
        "attention": device.attention / 1e12,
    }
    assert list(figures.values()) == pytest.approx(numbers, rel=1e-4)
    assert SOURCES.get(device.name, device.name) in device.source
    assert device.is_measured == (device.name == "H200")
    rates = "measured" if device.is_measured else "nominal"
    assert device.describe() == f"{device.name} ({rates} rates)"
    others = {"name", "arch", "dense", "grouped", "source", "is_measured"}
    assert {field.name for field in dataclasses.fields(Device)} == {*figures, *others}


def test_a_step_takes_the_time_of_forward_and_of_twice_as_many_operations() -> None:
    for rate in [rate for device in DEVICES.values() for rate in device.dense.values()]:
        assert 1 / rate.on("forward") + 2 / rate.on("backward") == pytest.approx(3 / rate.step)
        assert rate.on("forward") == rate.forward


def test_a_recipe_without_a_rate_runs_at_that_of_bf16() -> None:
    for device in DEVICES.values():
        for is_grouped in (False, True):
            rates = device.grouped if is_grouped else device.dense
            for name in (*HOPPER, "MXFP8BlockScaling"):
                rate = device.products(name, is_grouped=is_grouped)
                assert rate == rates[name if name in rates else "bf16"]
    assert [precision_of(dtype) for dtype in DTYPES] == ["fp32", "bf16", "bf16"]


def test_this_machine_is_modelled_on_a_cpu_or_an_h200() -> None:
    assert [device_of(kind).name for kind in ("cpu", "cuda", "meta")] == ["CPU", "H200", "H200"]
    assert [device_named(name).name for name in ("RTX5090", "h100")] == ["RTX 5090", "H100"]


def test_shapes_are_those_of_the_present_input_though_a_plan_is_cached() -> None:
    model = fuser.Sequential(fuser.GELU())
    for columns in (16, 32):
        plan = model.plan(torch.empty(8, columns))
        assert plan.features == (columns, columns)
        assert plan.forward[0].bytes_per_token == 2 * 4 * columns


def test_a_plan_for_a_device_is_not_kept_for_calls() -> None:
    model = fuser.Sequential(fuser.Linear(16, 16, device="cpu"))
    plan = model.plan(torch.empty(8, 16), device="H200")
    assert (plan.key.device, plan.key.arch) == ("cuda", (9, 0))
    assert plan.target is DEVICES["h200"]
    assert not model.plans


@pytest.mark.parametrize("recipe", [None, "current", "rowwise", "block"])
def test_a_plan_for_a_device_is_the_same_whatever_libraries_this_machine_has(
    recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = fuser.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    add = fuser.AddExtraInput().set_extra_input_channel(0, "x")
    block = fuser.Sequential(
        fork, linear(1024, 1024), fuser.ConstantScale(0.5), linear(1024, 1024), add
    )
    known = None if recipe is None else recipe_named(recipe)
    texts = set()
    for library in (None, object()):
        for cuda in ((12, 4), (13, 0)):
            native.native_gemm.cache_clear()
            monkeypatch.setattr(cublaslt, "library", lambda kind, found=library: found)
            monkeypatch.setattr(native, "torch_cuda", lambda found=cuda: found)
            texts.add(str(planned(block, 8192, 1024, known)))
    native.native_gemm.cache_clear()
    (text,) = texts
    # What an H200 with a newest CUDA runs: it adds in the product, and multiplies quantized.
    assert "(emulated)" not in text
    assert "no cuBLASLt could be loaded" not in text
    assert "mul scale_inv" not in text


@pytest.mark.parametrize("name", ["tpu", "", 3])
def test_an_unknown_device_names_the_known_ones(name: str) -> None:
    model = fuser.Sequential(fuser.GELU())
    with pytest.raises(
        fuser.InputError,
        match=said("devices-no-device-plan", None, "h200, h100, a100, b200, rtx5090"),
    ):
        model.plan(torch.empty(2, 2), device=name)
    assert isinstance(device_named("b200"), Device)


def test_layers_take_a_device() -> None:
    x = torch.empty(8, 16)
    mlp = fuser.modules.LayerNormMLP(16, 32, device="cpu")
    assert mlp.plan(x, device="h100").device is DEVICES["h100"]
    grouped = fuser.modules.GroupedLinear(2, 16, 32, device="cpu")
    assert grouped.plan(x, [4, 4], device="b200").device is DEVICES["b200"]


def test_the_text_has_shapes_operations_and_plain_torch() -> None:
    text = str(planned(swiglu_block(4096, 14336), 8192, 4096, Float8CurrentScaling()))
    assert "columns" in text
    assert "4096 -> 28672" in text
    assert "234.9 M" in text
    assert "torch eager, in bfloat16: " in text
    assert "torch.compile, in bfloat16: " in text
    assert text.split("Modelled for ")[1].startswith("8192 tokens on H200 (measured rates)")


# -- plain torch ---------------------------------------------------------------------------


def value_of(op: fuser.BasicOperation, x: torch.Tensor, *extras: torch.Tensor) -> torch.Tensor:
    """What the table of plain torch computes for an op."""
    write = next(PLAIN[cls] for cls in type(op).__mro__ if cls in PLAIN)
    params = tuple(parameter.detach() for parameter in op.parameters())
    return write(op, x, extras, params)


@pytest.mark.parametrize(
    "op",
    [
        fuser.GELU(),
        fuser.GELU(approximate="none"),
        fuser.SiLU(),
        fuser.SReLU(),
        fuser.QGELU(),
        fuser.SwiGLU(),
        fuser.GEGLU(),
        fuser.SwiGLU(glu_interleave_size=4),
        fuser.ClampedSwiGLU(),
        fuser.SiTUGLU(),
        fuser.Bias(16, device="cpu"),
        fuser.BasicLinear(16, 8, device="cpu"),
        fuser.ConstantScale(0.5),
        fuser.Dropout(0.5).eval(),
        fuser.L2Normalization(),
        fuser.LayerNorm(16, device="cpu"),
        fuser.RMSNorm(16, device="cpu"),
        fuser.Reshape((3, 32)),
        fuser.Identity(),
    ],
    ids=repr,
)
def test_plain_torch_computes_what_the_op_computes(op: fuser.BasicOperation) -> None:
    x = torch.randn(6, 16)
    for parameter in op.parameters():
        torch.nn.init.normal_(parameter)
    torch.testing.assert_close(value_of(op, x), op(x), atol=1e-5, rtol=1e-5)


def test_plain_torch_computes_what_ops_with_extra_inputs_compute() -> None:
    x, other, rows = torch.randn(6, 16), torch.randn(6, 16), torch.rand(6)
    add, scaled = fuser.AddExtraInput(), fuser.ScaledSwiGLU()
    torch.testing.assert_close(value_of(add, x, other), add(x, other))
    torch.testing.assert_close(value_of(scaled, x, rows), scaled(x, rows))
    norm = fuser.AdaptiveLayerNorm(16)
    scale, shift = torch.randn(6, 16), torch.randn(6, 16)
    torch.testing.assert_close(value_of(norm, x, scale, shift), norm(x, scale, shift))


def test_eager_calls_move_what_each_reads_and_writes() -> None:
    listed: list[TorchCall] = []
    x = torch.empty(8, 16, device=META)
    with TorchCalls(listed.append):
        gate, values = x.chunk(2, -1)
        torch.nn.functional.silu(gate) * values
    assert [(call.name, call.nbytes) for call in listed] == [
        ("silu", 2 * 4 * 8 * 8),
        ("mul", 3 * 4 * 8 * 8),
    ]
    assert eager_seconds(listed, H200, "forward") == pytest.approx(
        5 * 256 / H200.bandwidth + 2 * H200.launch
    )
    # One kernel reads both halves and writes the result.
    together, _ = compiled_seconds(listed, (), list(listed[-1].writes), H200)
    assert together == pytest.approx(3 * 256 / H200.bandwidth + H200.launch)


def test_a_compiled_backward_reads_what_forward_wrote_and_computes_the_rest_again() -> None:
    forward: list[TorchCall] = []
    backward: list[TorchCall] = []
    x = torch.empty(64, 64, device=META, requires_grad=True)
    mode = TorchCalls(forward.append)
    with mode:
        y = torch.tanh(x * 2)  # tanh's backward reads its output
        z = y.sin()  # sin's reads y
    mode = TorchCalls(backward.append)
    with mode:
        torch.autograd.grad(z, x, torch.empty_like(z))
    outputs = list(forward[-1].writes)
    ahead, back = compiled_seconds(forward, backward, outputs, H200)
    size = 4 * 64 * 64
    assert ahead == pytest.approx(2 * size / H200.bandwidth + H200.launch)
    # It reads the gradient and x, from which y is computed again, and writes the gradient of x.
    assert back == pytest.approx(3 * size / H200.bandwidth + H200.launch)


def test_pipelines_with_ops_of_users_have_no_baseline() -> None:
    class Own(fuser.BasicOperation):
        def op_forward(self, ctx: Any, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return input_

    plan = fuser.Sequential(Own()).plan(torch.empty(4, 4), training=False, device="h200")
    assert plan.baselines == ()
    assert "plain torch" not in str(plan)


@pytest.mark.parametrize("frozen", [0, 1])
def test_the_weight_gradients_of_groups_count_if_any_weight_is_trained(frozen: int) -> None:
    def backward_of(*names: str) -> float:
        op = fuser.GroupedLinear(2, 4096, 4096, bias=False, device="meta", dtype=torch.bfloat16)
        for name in names:
            getattr(op, name).requires_grad_(False)
        x = torch.empty(8192, 4096, device="meta", dtype=torch.bfloat16, requires_grad=True)
        sizes = torch.empty(2, dtype=torch.int64, device="meta")
        plan = fuser.Sequential(op).plan(x, sizes, device="h200")
        return sum(step.microseconds for step in plan.backward)

    some = backward_of(f"weight{frozen}")
    assert some == pytest.approx(backward_of(), rel=0.02)
    assert some > 1.2 * backward_of("weight0", "weight1")
