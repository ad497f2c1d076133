"""Native quantized GEMMs, on a stand-in for a Hopper chip that is as strict as cuBLASLt."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_launch_experts import one_by_one
from pipeline_kernels import on_kernels

import fuser
from fuser import recipe as recipes
from fuser.formats import ceil_div, round_up
from fuser.gemm import matmul as gemm
from fuser.gemm import native as native_gemm
from fuser.precision.availability import emulation, runs_natively
from fuser.recipe import MMParams
from fuser.runtime import pipeline

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (fuser.DType.kFloat8E4M3, fuser.DType.kFloat8E5M2)


class StrictTensorCores:
    """``torch._scaled_mm`` with the limits it has on a GPU; computes in fp64 and keeps count."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale_result: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> torch.Tensor:
        (m, k), n = a.shape, b.shape[1]
        assert b.shape[0] == k
        assert k % 16 == 0
        assert n % 16 == 0
        assert a.stride() == (k, 1)
        assert b.stride() == (1, k)
        assert E4M3 in (a.dtype, b.dtype)
        assert {a.dtype, b.dtype} <= {E4M3, E5M2}
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert all(t.data_ptr() % 16 == 0 for t in (a, b, scale_a, scale_b))
        if bias is not None:
            assert out_dtype in (torch.bfloat16, torch.float16)
            assert bias.dtype == out_dtype
            assert bias.shape == (n,)
            assert bias.data_ptr() % 16 == 0
        a_scale, kind_a = self.spread(scale_a, m, k)
        b_scale, kind_b = self.spread(scale_b.t(), n, k)
        assert (kind_a, kind_b) != ("128x128", "128x128")
        for kind in ("tensor", "row"):
            assert (kind_a == kind) == (kind_b == kind)
        self.calls.append((f"{kind_a} x {kind_b}", use_fast_accum))
        product = (a.double() * a_scale) @ (b.t().double() * b_scale).t()
        if bias is not None:
            product = product + bias.double()
        return product.to(out_dtype)

    @staticmethod
    def spread(scale: torch.Tensor, rows: int, k: int) -> tuple[torch.Tensor, str]:
        """One factor an element, and the kind that torch's checks make of the scale."""
        blocks = ceil_div(k, 128)
        if scale.numel() == 1 and scale.dim() < 2:
            return scale.double().expand(rows, k), "tensor"
        if scale.shape == (rows, 1) and blocks != 1:  # of one block, it may be either
            assert scale.is_contiguous()
            return scale.double().expand(rows, k), "row"
        if scale.shape == (rows, blocks):
            assert scale.stride(0) == 1
            assert scale.stride(1) == rows or blocks == 1
            return scale.double().repeat_interleave(128, 1)[:, :k], "1x128"
        assert scale.shape == (ceil_div(rows, 128), blocks)
        # Some versions of torch want the one stride, some the other.
        assert scale.stride() == (blocks, 1) == (round_up(blocks, 4), 1)
        spread = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return spread[:rows, :k], "128x128"


@contextlib.contextmanager
def stand_in_for_hopper() -> Iterator[StrictTensorCores]:
    cores = StrictTensorCores()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_gemm, "scaled_mm", cores)
        patch.setattr(native_gemm, "torch_cuda", lambda: (13, 0))
        for module in (gemm, pipeline):
            patch.setattr(module, "architecture", lambda device: (9, 0))
        native_gemm.native_gemm.cache_clear()
        yield cores
    native_gemm.native_gemm.cache_clear()


@pytest.fixture
def hopper() -> Iterator[StrictTensorCores]:
    with stand_in_for_hopper() as cores:
        yield cores


NATIVE = {
    "current": recipes.Float8CurrentScaling(),
    "current-E4M3": recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3),
    "delayed": recipes.DelayedScaling(),
    "rowwise": recipes.Float8RowwiseScaling(),
    "block": recipes.Float8BlockScaling(),
    "block-1D": recipes.Float8BlockScaling(w_block_scaling_dim=1),
    "block-2D-input": recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
}

STACKED = {name: recipe for name, recipe in NATIVE.items() if name not in ("delayed", "rowwise")}


def model_of(widths: tuple[int, int, int], **options: Any) -> fuser.Sequential:
    a, b, c = widths
    layers = (fuser.Linear(a, b, **options), fuser.GELU(), fuser.Linear(b, c, **options))
    return oracles.randomize(fuser.Sequential(*layers))


def run(model: fuser.Sequential, recipe: Any, rows: int) -> dict[str, Any]:
    parameter = next(model.parameters())
    width = model[0].members[0].in_features
    x = oracles.random_tensor((rows, width), parameter.dtype, 1).requires_grad_()
    model.zero_grad(set_to_none=True)
    with fuser.autocast(recipe=recipe):
        y = model(x)
    y.backward(oracles.random_tensor(y.shape, y.dtype, 2))
    return {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("recipe", NATIVE.values(), ids=NATIVE)
@pytest.mark.parametrize(
    ("widths", "rows"), [((512, 1024, 512), 256), ((40, 72, 24), 33), ((136, 520, 200), 130)]
)
def test_native_products_equal_emulated_ones(
    recipe: Any, widths: tuple[int, int, int], rows: int
) -> None:
    emulated = run(model_of(widths), recipe, rows)
    with stand_in_for_hopper() as cores:
        native = run(model_of(widths), recipe, rows)
    assert len(cores.calls) == 6
    for name, value in emulated.items():
        # fp32 accumulation against fp64: a rounding of the second GEMM's input may flip.
        error = (native[name] - value).norm() / value.norm()
        assert error < 1e-2, name


@pytest.mark.parametrize("recipe", NATIVE.values(), ids=NATIVE)
@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(*[st.integers(1, 300)] * 3)
def test_native_products_of_any_shape_equal_emulated_ones(
    recipe: Any, rows: int, a: int, b: int
) -> None:
    """Of one linear, so that no rounding comes between its GEMMs."""

    def one() -> fuser.Sequential:
        return oracles.randomize(fuser.Sequential(fuser.Linear(a, b)))

    emulated = run(one(), recipe, rows)
    with stand_in_for_hopper() as cores:
        native = run(one(), recipe, rows)
    assert len(cores.calls) == 3
    for name, value in emulated.items():
        assert native[name].shape == value.shape
        torch.testing.assert_close(native[name], value, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("recipe", NATIVE.values(), ids=NATIVE)
def test_native_products_of_parts_of_a_weight_equal_emulated_ones(recipe: Any) -> None:
    """The scales of a part begin anywhere in those of the whole."""

    def part(rows: slice) -> fuser.Sequential:
        torch.manual_seed(0)
        with fuser.quantized_model_init(recipe=recipe):
            whole = fuser.Linear(160, 640, bias=False)
            op: Any = fuser.Linear(160, 512, bias=False)
        op.weight = torch.nn.Parameter(whole.weight.detach()[rows])
        return fuser.Sequential(op)

    for rows in (slice(0, 512), slice(128, 640)):
        emulated = run(part(rows), recipe, 48)
        with stand_in_for_hopper() as cores:
            native = run(part(rows), recipe, 48)
        assert len(cores.calls) == 3
        for name, value in emulated.items():
            torch.testing.assert_close(native[name], value, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("recipe", STACKED.values(), ids=STACKED)
def test_native_products_of_experts_of_one_parameter_equal_emulated_ones(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one(monkeypatch)
    with fuser.quantized_model_init(recipe=recipe):
        op = fuser.GroupedLinear(3, 160, 128, bias=False, single_grouped_weight=True)
    x, splits = oracles.random_tensor((48, 160), torch.float32, 1), torch.tensor([10, 0, 38])

    def step() -> tuple[torch.Tensor, ...]:
        given = x.clone().requires_grad_()
        with fuser.autocast(recipe=recipe):
            y = op(given, splits)
        return y, *torch.autograd.grad(y.square().sum(), (given, op.weight))

    emulated = step()
    with stand_in_for_hopper() as cores:
        native = step()
    assert len(cores.calls) == 6
    for found, value in zip(native, emulated, strict=True):
        error = (found - value).norm() / value.norm()
        assert error < 1e-2


def move_biases(model: fuser.Sequential) -> None:
    """Give every bias the address of an element in another tensor."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            whole = torch.zeros(len(parameter) + 1, dtype=parameter.dtype, device=parameter.device)
            parameter.data = whole[1:].copy_(parameter.data)
            assert parameter.data_ptr() % 16


@pytest.mark.parametrize("recipe", NATIVE.values(), ids=NATIVE)
def test_a_bias_begins_at_any_address(recipe: Any, hopper: StrictTensorCores) -> None:
    model = model_of((128, 48, 128), dtype=torch.bfloat16)
    expected = run(copy.deepcopy(model), recipe, 48)
    move_biases(model)
    for name, value in run(model, recipe, 48).items():
        assert torch.equal(value, expected[name]), name


def test_a_bias_rides_on_the_gemm_of_blocks(hopper: StrictTensorCores) -> None:
    model = model_of((128, 40, 128), dtype=torch.bfloat16)
    fused = run(model, NATIVE["block"], 48)
    calls = list(hopper.calls)
    assert len(calls) == 6
    expected = run(fuser.Sequential(*model, fusions=()), NATIVE["block"], 48)
    for name in ("y", "dx"):
        error = (fused[name].double() - expected[name].double()).norm() / expected[name].norm()
        assert error < 2**-6, name
    with fuser.autocast(recipe=NATIVE["block"]):
        plan = model.plan(torch.empty(48, 128, dtype=torch.bfloat16, requires_grad=True))
    assert plan.forward[0].fusion == "ForwardLinearBiasActivation"


def test_the_plan_says_native_and_a_bias_rides_on_the_gemm(hopper: StrictTensorCores) -> None:
    model = model_of((64, 128, 64), dtype=torch.bfloat16)
    with fuser.autocast(recipe=NATIVE["current"]):
        plan = model.plan(torch.empty(32, 64, dtype=torch.bfloat16, requires_grad=True))
    first = plan.forward[0]
    assert first.fusion == "ForwardLinearBiasActivation"
    assert "FP8 mm (native)" in first.kernel
    assert any("dgrad FP8 mm (native)" in step.kernel for step in plan.backward)
    fused = run(model, NATIVE["current"], 32)
    unfused = fuser.Sequential(*model, fusions=())
    assert hopper.calls == [("tensor x tensor", True)] * 2 + [("tensor x tensor", False)] * 4
    expected = run(unfused, NATIVE["current"], 32)
    for name in ("y", "dx"):
        error = (fused[name].double() - expected[name].double()).norm() / expected[name].norm()
        assert error < 2**-6, name


def test_a_bias_is_refused_where_the_gemm_takes_none(hopper: StrictTensorCores) -> None:
    def reasons(recipe: Any, dtype: torch.dtype) -> str:
        with fuser.autocast(recipe=recipe):
            plan = model_of((64, 64, 64), dtype=dtype).plan(torch.empty(32, 64, dtype=dtype))
        return " ".join(refusal.reason for refusal in plan.refusals)

    assert "FP8 mm takes no bias in torch.float32" in reasons(NATIVE["current"], torch.float32)
    assert "FP8 128-block mm takes no bias in torch.float32" in reasons(
        NATIVE["block"], torch.float32
    )
    assert "emulated" in reasons(recipes.MXFP8BlockScaling(), torch.bfloat16)


@pytest.mark.parametrize("flags", [(True, False, True), (False, True, False)])
def test_accumulators_are_those_of_the_recipe(
    flags: tuple[bool, bool, bool], hopper: StrictTensorCores
) -> None:
    fprop, dgrad, wgrad = (MMParams(use_split_accumulator=flag) for flag in flags)
    recipe = recipes.Float8CurrentScaling(
        fp8_gemm_fprop=fprop, fp8_gemm_dgrad=dgrad, fp8_gemm_wgrad=wgrad
    )
    op = oracles.randomize(fuser.BasicLinear(64, 32))
    x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
    with fuser.autocast(recipe=recipe):
        y = op(x)
    y.sum().backward()
    assert [fast for _, fast in hopper.calls] == [not flag for flag in flags]


@pytest.mark.parametrize("recipe", NATIVE.values(), ids=NATIVE)
def test_an_empty_batch_runs_and_gives_zero_weight_gradients(
    recipe: Any, hopper: StrictTensorCores
) -> None:
    found = run(model_of((64, 32, 64)), recipe, 0)
    assert found["y"].shape == (0, 64)
    assert not any(found[name].any() for name in found if "weight" in name)


@pytest.mark.parametrize("recipe", NATIVE.values(), ids=NATIVE)
def test_native_weight_gradients_add_up_in_main_grad(
    recipe: Any, hopper: StrictTensorCores
) -> None:
    plain = oracles.randomize(fuser.BasicLinear(64, 32, dtype=torch.bfloat16))
    op = fuser.BasicLinear(64, 32, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    op.load_state_dict(plain.state_dict())
    op.weight.main_grad = torch.ones(32, 64)
    for linear in (plain, op):
        x = oracles.random_tensor((48, 64), torch.bfloat16, 1).requires_grad_()
        with fuser.autocast(recipe=recipe):
            y = linear(x)
        y.backward(oracles.random_tensor(y.shape, y.dtype, 2))
    assert plain.weight.grad is not None
    assert op.weight.grad is None
    error = op.weight.main_grad - 1 - plain.weight.grad.float()
    assert error.abs().max() <= 2**-8 * plain.weight.grad.float().abs().max()


def test_a_native_weight_gradient_comes_to_main_grad_unrounded(hopper: StrictTensorCores) -> None:
    op = oracles.randomize(
        fuser.BasicLinear(64, 32, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    )
    x = oracles.random_tensor((48, 64), torch.bfloat16, 1)
    dy = oracles.random_tensor((48, 32), torch.bfloat16, 2)
    op.weight.main_grad = torch.zeros(32, 64)
    with fuser.autocast(recipe=NATIVE["current"]):
        op(x).backward(dy)
        quantizers: list[Any] = [op.get_quantizer(mode, 0) for mode in ("backward", "forward")]
        operands = [quantize(t) for quantize, t in zip(quantizers, (dy, x), strict=True)]
    a, b = (t.dequantize(dtype=torch.float64) for t in operands)
    error = (op.weight.main_grad - a.T @ b).norm() / (a.T @ b).norm()
    assert error < 2**-20


@pytest.mark.parametrize("after", [[], [fuser.GELU], [fuser.AddExtraInput]], ids=str)
def test_a_kept_weight_serves_a_native_gemm_with_its_epilogue(
    after: list[Any], hopper: StrictTensorCores
) -> None:
    quantized: list[Any] = []

    class Counting(fuser.tensors.Float8CurrentScalingQuantizer):
        def buffers_of(self, rows: Any) -> Any:
            quantized.append(rows.shape)
            return super().buffers_of(rows)

    linear = fuser.Linear(64, 32, dtype=torch.bfloat16)
    model = oracles.randomize(fuser.Sequential(linear, *(make() for make in after)))
    x = oracles.random_tensor((48, 64), torch.bfloat16, 1)
    extras = [torch.ones(48, 32, dtype=torch.bfloat16)] * (after == [fuser.AddExtraInput])
    with fuser.autocast(recipe=recipes.CustomRecipe(lambda role: Counting())):
        found = [
            model(x, *extras, op_kwargs={linear: {"is_first_microbatch": flag}})
            for flag in (True, False, False)
        ]
    assert model.plans[0].forward[0].fusion is not None
    assert quantized.count(torch.Size([32, 64])) == 1
    assert all(torch.equal(one, found[0]) for one in found)


# -- a scale and an addend ----------------------------------------------------

SCALED = {name: NATIVE[name] for name in ("current", "current-E4M3", "block", "block-1D")}


def scaled_linear(scale: float, dtype: torch.dtype, **options: Any) -> fuser.Sequential:
    model = fuser.Sequential(
        fuser.BasicLinear(256, 384, dtype=dtype), fuser.ConstantScale(scale), **options
    )
    return oracles.randomize(model)


def gradients(
    model: fuser.Sequential, recipe: Any, wanted: tuple[bool, bool] = (True, True)
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of the input and of the weight, None where it is not wanted."""
    weight = model[0].weight.requires_grad_(wanted[1])
    weight.grad = None
    x = oracles.random_tensor((144, 256), weight.dtype, 1).requires_grad_(wanted[0])
    with fuser.autocast(recipe=recipe):
        y = model(x)
    y.backward(oracles.random_tensor(y.shape, y.dtype, 2))
    return x.grad, weight.grad


def fusion_of(model: fuser.Sequential) -> str | None:
    (plan,) = model.plans
    return plan.backward[0].fusion


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("scale", [0.25, -2.0])
@pytest.mark.parametrize("recipe", SCALED.values(), ids=SCALED)
def test_a_native_gemm_takes_a_scale_of_its_gradient(
    recipe: Any, scale: float, wanted: tuple[bool, bool], hopper: StrictTensorCores
) -> None:
    """A power of two is exact wherever it is multiplied, so that no bit differs."""
    fused = scaled_linear(scale, torch.bfloat16)
    unfused = scaled_linear(scale, torch.bfloat16, fusions=())
    for ours, alone in zip(
        gradients(fused, recipe, wanted), gradients(unfused, recipe, wanted), strict=True
    ):
        assert (ours is None) == (alone is None)
        assert ours is None or torch.equal(ours, alone)
    assert len(hopper.calls) == 2 * (1 + sum(wanted))
    assert (fusion_of(fused), fusion_of(unfused)) == ("BackwardLinearScale", None)


@pytest.mark.parametrize("recipe", SCALED.values(), ids=SCALED)
def test_a_scale_in_a_native_gemm_is_as_exact_as_one_that_is_rounded_first(
    recipe: Any, hopper: StrictTensorCores
) -> None:
    scale = -0.3
    fused = scaled_linear(scale, torch.bfloat16)
    unfused = scaled_linear(scale, torch.bfloat16, fusions=())
    x = oracles.random_tensor((144, 256), torch.bfloat16, 1).double()
    dy = scale * oracles.random_tensor((144, 384), torch.bfloat16, 2).double()
    truths = (dy @ fused[0].weight.detach().double(), dy.t() @ x)
    results = (gradients(fused, recipe), gradients(unfused, recipe))
    for truth, ours, alone in zip(truths, *results, strict=True):
        errors = [(found.double() - truth).norm() / truth.norm() for found in (ours, alone)]
        assert errors[0] <= 1.05 * errors[1] < 0.1
    assert fusion_of(fused) == "BackwardLinearScale"


@pytest.mark.parametrize("recipe", SCALED.values(), ids=SCALED)
def test_a_scaled_weight_gradient_adds_up_in_main_grad(
    recipe: Any, hopper: StrictTensorCores
) -> None:
    model = scaled_linear(-0.5, torch.bfloat16)
    _, expected = gradients(model, recipe)
    op = fuser.BasicLinear(256, 384, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    op.load_state_dict(model[0].state_dict())
    op.weight.main_grad = torch.ones(384, 256)
    accumulating = fuser.Sequential(op, fuser.ConstantScale(-0.5))
    assert gradients(accumulating, recipe)[1] is None
    assert fusion_of(accumulating) == "BackwardLinearScale"
    error = op.weight.main_grad - 1 - expected.float()
    assert error.abs().max() <= 2**-8 * expected.float().abs().max()


def test_delayed_scaling_records_the_amax_of_the_scaled_gradient(hopper: StrictTensorCores) -> None:
    model = scaled_linear(-0.5, torch.bfloat16)
    x = torch.ones(144, 256, dtype=torch.bfloat16, requires_grad=True)
    with fuser.autocast(recipe=recipes.DelayedScaling(amax_history_len=2)):
        y = model(x)
    y.backward(torch.full_like(y, 16.0))
    assert fusion_of(model) is None
    assert float(model[0]._delayed["backward"].amax_history[-1]) == 8.0


def test_the_plan_says_where_the_scale_goes_and_where_a_kernel_makes_it_cheaper_alone(
    hopper: StrictTensorCores,
) -> None:
    x = torch.empty(32, 256, dtype=torch.bfloat16, requires_grad=True)
    with fuser.autocast(recipe=NATIVE["current"]):
        (step,) = scaled_linear(0.5, torch.bfloat16).plan(x).backward
        assert step.kernel == (
            "quantize grad_output, mul scale_inv, dgrad FP8 mm (native), "
            "mul scale_inv, wgrad FP8 mm (native)"
        )
        with on_kernels():
            plan = scaled_linear(0.5, torch.bfloat16).plan(x)
    # The kernel that quantizes multiplies on its way.
    assert [step.fusion for step in plan.backward] == [None, None]
    (reason,) = (r.reason for r in plan.refusals if r.fusion == "BackwardLinearScale")
    assert reason.startswith("possible, but the chosen cover is ")


def refusal(ops: list[Any], fusion: str, recipe: Any) -> str:
    x = torch.empty(32, 64, dtype=torch.bfloat16, requires_grad=True)
    model = fuser.Sequential(*ops)
    extras = [torch.empty_like(x)] * any(isinstance(op, fuser.AddExtraInput) for op in ops)
    with fuser.autocast(recipe=recipe):
        plan = model.plan(x, *extras)
    (reason,) = (refusal.reason for refusal in plan.refusals if refusal.fusion == fusion)
    return reason


def test_an_epilogue_that_a_quantized_gemm_lacks_is_named(hopper: StrictTensorCores) -> None:
    linear = fuser.BasicLinear(64, 64, dtype=torch.bfloat16)
    scale, add, make = fuser.ConstantScale(2.0), fuser.AddExtraInput(), fuser.MakeExtraOutput()
    custom = recipes.CustomRecipe(qfactory=lambda role: fuser.Float8CurrentScalingQuantizer())
    emulated = "the quantized GEMM is emulated here, and has no epilogue."
    for name, row in (("current", "FP8 mm"), ("delayed", "FP8 mm"), ("block", "FP8 128-block mm")):
        sentence = f"{row} takes no addend: torch has it, and no cuBLASLt could be loaded."
        for ops, fusion in (
            ([linear, add], "ForwardLinearBiasAdd"),
            ([linear, scale, add], "ForwardLinearScaleAdd"),
            ([make, linear], "BackwardLinearAdd"),
        ):
            assert refusal(ops, fusion, NATIVE[name]) == sentence
            assert refusal(ops, fusion, recipes.MXFP8BlockScaling()) == emulated
    scaled = ([linear, scale], "BackwardLinearScale")
    assert refusal(*scaled, recipes.MXFP8BlockScaling()) == emulated
    for recipe in (NATIVE["delayed"], custom):
        name = type(recipe).__name__
        sentence = f"{name} may record the amax of scale * dy, and here dy would be quantized."
        assert refusal(*scaled, recipe) == sentence


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(48,), (2, 24)])
def test_dgrad_scales_its_product_and_not_the_addend(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    dy = oracles.random_tensor((*shape, 32), torch.bfloat16, 1)
    weight = oracles.random_tensor((32, 64), torch.bfloat16, 2)
    addend = oracles.random_tensor((*shape, 64), dtype, 3)
    exact = -0.25 * dy.double() @ weight.double() + addend.double()
    found = gemm.dgrad(dy, weight, -0.25, addend)
    assert found.shape == exact.shape
    assert (found - exact).norm() < 2**-7 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, -0.5])
@pytest.mark.parametrize("has_addend", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_emulated_product_is_that_of_values_in_the_dtype_of_the_product(
    has_bias: bool, has_addend: bool, scale: float, dtype: torch.dtype
) -> None:
    shapes = ((48, 32), (64, 32), (64,), (48, 64))
    x, weight, bias, addend = (
        oracles.random_tensor(shape, dtype, seed) for seed, shape in enumerate(shapes)
    )
    # Of values in fp32, and with more bits than bf16 has.
    qx, qw = map(fuser.NVFP4Quantizer(), (x.float(), weight.float()))
    found = gemm.quantized_linear(
        *(qx, qw, dtype),
        is_split=True,
        bias=bias if has_bias else None,
        scale=scale,
        addend=addend if has_addend else None,
    )
    expected = scale * torch.nn.functional.linear(rows_of(qx, dtype), rows_of(qw, dtype))
    if has_bias and scale == 1.0:
        expected = torch.nn.functional.linear(rows_of(qx, dtype), rows_of(qw, dtype), bias)
    elif has_bias:
        expected = expected + bias
    expected = expected + addend if has_addend else expected
    assert found.dtype is dtype
    assert torch.equal(found, expected)


def rows_of(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    values: torch.Tensor = tensor.with_usage("rowwise").dequantize(dtype=dtype)
    return values


class ScaleAndAdd(fuser.FusedOperation):
    """What another writes: a scale and an addend, whatever the recipe."""

    window = (fuser.MakeExtraOutput, fuser.BasicLinear, fuser.ConstantScale)
    side = "backward"

    def fuser_backward(
        self, ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        _, linear, scale = self.members
        ((extra,), *_) = basic_op_grad_extra_outputs
        dx, grads = linear.op_backward(ctxs[1], grad_output, scale.scale, extra)
        return dx, [(), grads, ()], [(), (), ()]


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "emulated"])
def test_a_scale_and_an_addend_that_another_fusion_gives_a_quantized_linear_are_used(
    is_native: bool,
) -> None:
    def run(fusions: Any) -> list[torch.Tensor]:
        ops = (fuser.MakeExtraOutput(), fuser.BasicLinear(64, 64), fuser.ConstantScale(-4.0))
        model = oracles.randomize(fuser.Sequential(*ops, fusions=fusions))
        x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
        with fuser.autocast(recipe=NATIVE["current"]):
            outputs = model(x)
        grads = [oracles.random_tensor((32, 64), torch.float32, seed) for seed in (2, 3)]
        torch.autograd.backward(outputs, grads)
        assert bool(fusions) == any(step.fusion for step in model.plans[0].backward)
        return [x.grad, model[1].weight.grad]

    with stand_in_for_hopper() if is_native else contextlib.nullcontext():
        for ours, alone in zip(run((ScaleAndAdd,)), run(()), strict=True):
            assert torch.equal(ours, alone)


def test_recipes_without_a_native_gemm_are_emulated_on_hopper(hopper: StrictTensorCores) -> None:
    run(model_of((64, 64, 64)), recipes.MXFP8BlockScaling(), 32)
    run(model_of((64, 64, 64)), recipes.NVFP4BlockScaling(), 32)
    # Current scaling with a weight that is kept in MXFP8: no chip multiplies the two.
    with fuser.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        mixed = fuser.Sequential(fuser.BasicLinear(64, 64))
    with fuser.autocast(recipe=NATIVE["current"]):
        plan = mixed.plan(torch.empty(32, 64))
        mixed(torch.zeros(32, 64))
    assert plan.forward[0].kernel == "quantize input, mm (emulated)"
    assert hopper.calls == []


def test_a_native_gemm_is_had_on_its_chips_from_its_first_cuda_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = (fuser.Float8CurrentScalingQuantizer(t).format for t in DTYPES)
    rows, squares = (fuser.Float8BlockQuantizer(block_scaling_dim=dim).format for dim in (1, 2))

    def is_had(a: Any, b: Any, arch: tuple[int, int], cuda: tuple[int, int] = (13, 0)) -> bool:
        native_gemm.native_gemm.cache_clear()
        monkeypatch.setattr(native_gemm, "torch_cuda", lambda: cuda)
        return native_gemm.native_gemm(a, b, arch) is not None

    chips = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
    assert [is_had(one, one, arch) for arch in chips] == [False, False, *[True] * 5]
    assert [is_had(rows, squares, arch) for arch in chips] == [arch == (9, 0) for arch in chips]
    versions = ((12, 0), (12, 1), (12, 8), (12, 9), (13, 0))
    assert [is_had(one, one, (9, 0), v) for v in versions] == [False, *[True] * 4]
    assert [is_had(rows, rows, (9, 0), v) for v in versions] == [*[False] * 3, True, True]
    # Tensor cores want E4M3 on one side, and blocks of rows on one side.
    assert [is_had(*pair, (9, 0)) for pair in ((one, other), (other, one))] == [True, True]
    assert not is_had(other, other, (9, 0))
    assert not is_had(squares, squares, (9, 0))
    assert not is_had(rows, one, (9, 0))


def test_a_gemm_with_a_scale_a_row_is_had_of_e4m3_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_gemm, "torch_cuda", lambda: (12, 9))
    native_gemm.native_gemm.cache_clear()
    one, other = (fuser.Float8RowwiseQuantizer(t).format for t in DTYPES)
    chips = ((8, 9), (9, 0), (10, 0), (12, 0))
    found = [native_gemm.native_gemm(one, one, arch) is not None for arch in chips]
    assert found == [False, True, False, False]
    assert native_gemm.native_gemm(one, other, (9, 0)) is None
    monkeypatch.setattr(native_gemm, "torch_cuda", lambda: (12, 8))
    native_gemm.native_gemm.cache_clear()
    assert native_gemm.native_gemm(one, one, (9, 0)) is None
    native_gemm.native_gemm.cache_clear()


def test_a_recipe_says_where_it_is_emulated_and_what_is_native(hopper: StrictTensorCores) -> None:
    assert runs_natively(NATIVE["block"], (9, 0))
    assert not runs_natively(NATIVE["block"], (10, 0))
    assert emulation(NATIVE["current"], (9, 0)) is None
    sentence = emulation(recipes.MXFP8BlockScaling(), (9, 0))
    assert sentence is not None
    assert "emulated on compute capability 9.0" in sentence
    native = "DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling"
    assert sentence.endswith(f"Native there: {native}.")
    assert str(emulation(NATIVE["current"], None)).endswith("slower than unquantized.")


def test_the_warning_comes_once_for_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuser.precision.availability._warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for override in (None, "dequantized"):
            with fuser.autocast(recipe=recipes.MXFP8BlockScaling(backward_override=override)):
                fuser.BasicLinear(64, 64)(torch.zeros(32, 64))  # this line
    (warning,) = caught
    assert warning.filename == __file__
    assert Path(__file__).read_text().splitlines()[warning.lineno - 1].endswith("# this line")
    assert str(warning.message).startswith("MXFP8BlockScaling is emulated on a CPU")
    assert warning.category is fuser.EmulationWarning


def test_a_suite_that_makes_errors_of_warnings_can_name_that_of_emulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fuser.precision.availability._warned", set())
    model, x = fuser.Sequential(fuser.Linear(64, 64)), torch.zeros(32, 64)
    with warnings.catch_warnings(), fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
        warnings.simplefilter("error")
        for _ in range(2):  # the first error does not use the warning up
            with pytest.raises(fuser.EmulationWarning):
                model(x)
        warnings.filterwarnings("ignore", category=fuser.EmulationWarning)
        assert torch.equal(model(x), model(x))
    assert issubclass(fuser.EmulationWarning, fuser.FuserWarning)
    assert issubclass(fuser.FuserWarning, UserWarning)


@pytest.mark.parametrize(
    "ask",
    [
        fuser.is_fp8_available,
        fuser.is_mxfp8_available,
        fuser.is_fp8_block_scaling_available,
        fuser.is_nvfp4_available,
    ],
)
def test_every_format_is_available_and_says_how(ask: Any) -> None:
    assert ask() is True
    is_there, reason = ask(return_reason=True)
    assert is_there is True
    assert torch.cuda.is_available() or "is emulated on a CPU" in reason


class Scaled(fuser.FusedOperation):
    """A forward that another writes: the linear's product takes the scale that follows it."""

    window = (fuser.BasicLinear, fuser.Bias, fuser.ConstantScale)
    side = "forward"

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
        linear, bias, scale = self.members
        y = linear.matmul(basic_op_ctxs[0], input_, scale.scale * bias.bias, scale=scale.scale)
        return y, [(), (), ()]


@pytest.mark.parametrize("recipe", [None, NATIVE["current"]], ids=["none", "current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)])
def test_a_product_has_its_scale_without_an_addend_too(
    shape: tuple[int, ...], dtype: torch.dtype, recipe: Any
) -> None:
    found = []
    for fusions in ((Scaled,), ()):
        ops = (fuser.BasicLinear(64, 64), fuser.Bias(64), fuser.ConstantScale(-4.0))
        model = oracles.randomize(fuser.Sequential(*ops, fusions=fusions).to(dtype))
        x = oracles.random_tensor(shape, dtype, 1)
        with torch.no_grad(), fuser.autocast(enabled=recipe is not None, recipe=recipe):
            found.append(model(x).double())
        assert bool(fusions) == any(step.fusion for step in model.plans[0].forward)
    assert (found[0] - found[1]).norm() < 2**-6 * found[1].norm()
