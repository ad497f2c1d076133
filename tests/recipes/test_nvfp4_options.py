"""Options of NVFP4BlockScaling that torch alone computes: values, plans and refusals."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import oracles
import pytest
import torch
from fusion_cases import WINDOWS, Window
from pipeline_kernels import on_kernels
from said import said

import fuser
from fuser.cuda.launch import Kernel, Launch
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import NVFP4BlockScaling, QParams

ROWS = {"row_scaled_activation": True}
WEIGHTS = {"nvfp4_4over6": "weights"}
INPUTS = {"nvfp4_4over6": "activations", "nvfp4_4over6_err_mode": "MSE"}
ALL = {"nvfp4_4over6": "all", "nvfp4_4over6_e4m3_use_256": "none", **ROWS}
OPTIONS = [ROWS, WEIGHTS, INPUTS, ALL]
of_inputs = pytest.mark.parametrize("options", [ROWS, INPUTS, ALL], ids=str)
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)
F32 = torch.float32


def recipe_of(options: dict[str, Any], **others: Any) -> NVFP4BlockScaling:
    """A recipe whose gradients are NVFP4 of the default kind, without randomness."""
    return NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, **options, **others
    )


def test_only_inputs_are_row_scaled() -> None:
    roles = ("input", "weight", "grad_output")
    made: dict[str, Any] = {role: make_quantizer(recipe_of(ROWS), role) for role in roles}
    assert [each.row_scaled_nvfp4 for each in made.values()] == [True, False, False]


def test_row_scaled_inputs_have_no_square_blocks() -> None:
    with pytest.raises(fuser.InputError, match=said("recipe-row-scaled-activation")):
        NVFP4BlockScaling(
            row_scaled_activation=True, fp4_quant_fwd_inp=QParams(fp4_2d_quantization=True)
        )


@pytest.mark.parametrize(
    ("scope", "of_256", "expected"),
    [
        ("none", "all", {"input": None, "weight": None}),
        ("weights", "all", {"input": None, "weight": 256}),
        ("weights", "activations", {"input": None, "weight": 448}),
        ("activations", "activations", {"input": 256, "weight": None}),
        ("all", "weights", {"input": 448, "weight": 256}),
        ("all", "none", {"input": 448, "weight": 448}),
        ("all", "all", {"input": 256, "weight": 256}),
    ],
)
def test_scopes_say_which_tensors_choose_scales_and_which_have_256(
    scope: Any, of_256: Any, expected: dict[str, int | None]
) -> None:
    recipe = NVFP4BlockScaling(
        disable_rht=True,
        nvfp4_4over6=scope,
        nvfp4_4over6_e4m3_use_256=of_256,
        nvfp4_4over6_err_mode="MSE",
    )
    for role, largest in {**expected, "grad_output": None}.items():
        quantizer: Any = make_quantizer(recipe, role)
        assert quantizer.nvfp4_use_4over6 is (largest is not None)
        assert quantizer.nvfp4_e4m3_max == (largest or 448)
        assert quantizer.nvfp4_4over6_err_mode == ("MAE" if largest is None else "MSE")


def test_four_over_six_of_inputs_needs_no_hadamard_transform() -> None:
    NVFP4BlockScaling(nvfp4_4over6="weights")
    for scope in ("activations", "all"):
        with pytest.raises(
            fuser.InputError,
            match=said(
                "recipe-nvfp4block-nvfp4-4over6", repr(scope), None, "random_hadamard_transform"
            ),
        ):
            NVFP4BlockScaling(nvfp4_4over6=scope)
    params = QParams(stochastic_rounding=True)
    with pytest.raises(
        fuser.InputError,
        match=said(
            "recipe-nvfp4block-nvfp4-4over6", None, "fp4_quant_fwd_weight", "stochastic_rounding"
        ),
    ):
        NVFP4BlockScaling(nvfp4_4over6="weights", fp4_quant_fwd_weight=params)


def test_four_over_six_weights_are_parameters_that_train() -> None:
    recipe = recipe_of(WEIGHTS)
    with fuser.quantized_model_init(recipe=recipe):
        model = fuser.Linear(32, 32, bias=False)
    values = oracles.random_tensor((32, 32), F32, 1)
    quantizer = make_quantizer(recipe, "weight")
    with torch.no_grad():
        model.weight.copy_(values)
    assert torch.equal(model.weight.dequantize(), quantizer(values).dequantize())
    before = model.weight.detach().clone()
    x = oracles.random_tensor((32, 32), F32, 2)
    with fuser.autocast(recipe=recipe):
        model(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    stepped = before.dequantize() - 0.01 * model.weight.grad
    assert torch.equal(model.weight.dequantize(), quantizer(stepped).dequantize())


@every_option
def test_stacked_experts_of_the_option_are_refused(options: dict[str, Any]) -> None:
    recipe = recipe_of(options)
    is_refused = make_quantizer(recipe, "weight").format.has_kernel is False
    refusal = pytest.raises(
        fuser.InputError, match=said("grouped-quantized-weights-made-inside-model")
    )
    with refusal if is_refused else contextlib.nullcontext():  # noqa: SIM117
        with fuser.quantized_model_init(recipe=recipe):
            fuser.GroupedLinear(2, 32, 128, bias=False, single_grouped_weight=True)


@every_option
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_products_are_those_of_the_quantized_operands(
    options: dict[str, Any], override: Any
) -> None:
    """In fp64, of operands that the quantizers make; rows differ by many powers of two."""
    recipe = recipe_of(options, backward_override=override)
    op = oracles.randomize(fuser.BasicLinear(64, 32))
    x = oracles.random_tensor((48, 64), F32, 1) * torch.logspace(-3, 3, 48)[:, None]
    dy = oracles.random_tensor((48, 32), F32, 2)
    roles = ("input", "weight", "grad_output")
    of_x, of_w, of_dy = (
        make_quantizer(recipe, role)(value.detach())
        for role, value in zip(roles, (x, op.weight, dy), strict=True)
    )
    x.requires_grad_()
    with fuser.autocast(recipe=recipe):
        y = op(x)
    y.backward(dy)

    def values(tensor: Any, usage: str) -> torch.Tensor:
        read: torch.Tensor = tensor.with_usage(usage).dequantize().double()
        return read

    if override is None:
        grad = values(of_dy, "rowwise"), values(of_dy, "columnwise")
        read = values(of_w, "columnwise"), values(of_x, "columnwise")
    else:
        grad = dy.double(), dy.double()
        read = op.weight.detach().double(), x.detach().double()
        if override == "dequantized":
            read = values(of_w, "rowwise"), values(of_x, "rowwise")
    expected = {
        "y": (y, values(of_x, "rowwise") @ values(of_w, "rowwise").T),
        "dx": (x.grad, grad[0] @ read[0]),
        "dw": (op.weight.grad, grad[1].T @ read[1]),
    }
    for name, (found, exact) in expected.items():
        assert (found.double() - exact).abs().max() < 1e-5 * exact.abs().max(), name


@every_option
def test_a_recipe_with_the_option_has_a_plan_of_its_own(options: dict[str, Any]) -> None:
    recipe, off = recipe_of(options), recipe_of({})
    assert recipe != off
    assert hash(recipe) != hash(off)
    assert recipe == recipe_of(options)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    (option,) = list(options)[:1]
    assert option in str(recipe)
    model = fuser.Sequential(fuser.Linear(32, 32), fuser.GELU(), fuser.Linear(32, 32))
    x = torch.randn(32, 32)
    with fuser.autocast(recipe=recipe):
        on = model(x)
        assert option in str(model.plan(x))
    with fuser.autocast(recipe=off):
        assert not torch.equal(model(x), on)
    with fuser.autocast(recipe=recipe):
        assert torch.equal(model(x), on)


@every_option
def test_a_checkpoint_continues_with_the_same_bits(options: dict[str, Any], tmp_path: Any) -> None:
    def step(model: torch.nn.Module) -> list[torch.Tensor]:
        x = oracles.random_tensor((32, 32), F32, 5)
        with fuser.autocast(recipe=recipe_of(options)):
            model(x).square().sum().backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    first = oracles.randomize(fuser.Sequential(fuser.Linear(32, 32), fuser.Linear(32, 32)))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = fuser.Sequential(fuser.Linear(32, 32), fuser.Linear(32, 32))
    second.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert all(map(torch.equal, step(first), step(second)))


# -- kernels --------------------------------------------------------------------------


# Of each fusion and number of ops one window: an activation's chain has a kernel of its own.
ONE_OF_EACH = list({(w.fusion, len(w.cases)): w for w in WINDOWS}.values())


def _nvfp4_symbols(launched: list[str]) -> set[str]:
    return {symbol for symbol in launched if "Nvfp4" in symbol or "Hadamard" in symbol}


@of_inputs
@pytest.mark.parametrize("window", ONE_OF_EACH, ids=str)
def test_no_fusion_writes_nvfp4_of_the_option_by_a_kernel(
    window: Window, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is read by a linear, and its input's gradient by the linear before it."""
    launched: list[str] = []
    call = Kernel.__call__

    def noted(kernel: Kernel, launch: Launch, *args: Any) -> None:
        launched.append(kernel.symbol)
        call(kernel, launch, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    recipe = recipe_of(options, backward_override="high_precision")
    inner = window.model()
    inputs = window.inputs(F32, 1)
    with torch.no_grad():
        features = fuser.Sequential(*inner)(*inputs)
    features = (features[0] if isinstance(features, tuple) else features).shape[-1]
    model = fuser.Sequential(*inner, fuser.BasicLinear(features, 16))
    oracles.randomize(model)

    def run() -> torch.Tensor:
        with fuser.autocast(recipe=recipe):
            y = model(*inputs)
        out: torch.Tensor = y[0] if isinstance(y, tuple) else y
        out.square().sum().backward()
        return out.detach()

    expected = run()
    with on_kernels():
        weight = make_quantizer(recipe, "weight")
        for op in model:
            if isinstance(op, fuser.BasicLinear):
                usage = {"rowwise": True, "columnwise": False}
                weight.with_usage(**usage)(op.weight.detach()).dequantize()
        of_weights = _nvfp4_symbols(launched)
        launched.clear()
        found = run()
    assert _nvfp4_symbols(launched) <= of_weights
    # Values before the quantizer may differ by a rounding, which moves an element by one step.
    assert (found - expected).norm() <= 0.2 * expected.norm()


@of_inputs
def test_a_plan_counts_a_pass_that_quantizes_after_the_kernel(options: dict[str, Any]) -> None:
    model = fuser.Sequential(fuser.RMSNorm(64), fuser.BasicLinear(64, 64))
    x = torch.randn(32, 64)
    kernels = []
    for recipe in (recipe_of({}), recipe_of(options)):
        with on_kernels(), fuser.autocast(recipe=recipe):
            kernels.append([step.kernel for step in model.plan(x).forward])
    assert kernels[0][0] == "rmsnorm_rows, rmsnorm"
    assert kernels[1][0] == "rmsnorm, quantize"


@every_option
def test_kernels_write_the_bytes_of_torch_where_there_is_none(options: dict[str, Any]) -> None:
    recipe = recipe_of(options)
    x = oracles.random_tensor((64, 64), torch.bfloat16, 1)
    for role in ("input", "weight"):
        quantizer = make_quantizer(recipe, role)
        expected = quantizer(x)
        with on_kernels():
            found = quantizer(x)
            values = found.dequantize()
        assert torch.equal(values, expected.dequantize())
        buffers: dict[str, Any] = found.buffers()
        for name, buffer in buffers.items():
            assert torch.equal(buffer, getattr(expected, name)), name


@every_option
def test_experts_quantize_their_groups_alone(options: dict[str, Any]) -> None:
    """No launch quantizes all groups: the plan says so, and each group is a linear of its own."""
    recipe = recipe_of(options)
    op = oracles.randomize(fuser.GroupedLinear(3, 32, 32, bias=False))
    x = oracles.random_tensor((80, 32), F32, 1)
    sizes = torch.tensor([16, 48, 16])
    with fuser.autocast(recipe=recipe):
        y = op(x, sizes)
    start = 0
    for g, size in enumerate(sizes.tolist()):
        one = fuser.BasicLinear(32, 32)
        with torch.no_grad():
            one.weight.copy_(getattr(op, f"weight{g}"))
        with fuser.autocast(recipe=recipe):
            assert torch.equal(one(x[start : start + size]), y[start : start + size])
        start += size
    with fuser.autocast(recipe=recipe_of({})):
        assert not torch.equal(op(x, sizes), y)
    with on_kernels(), fuser.autocast(recipe=recipe):
        assert torch.equal(op(x, sizes), y)
    quantizer = make_quantizer(recipe, "weight" if options is WEIGHTS else "input")
    with pytest.raises(fuser.InputError, match=said("grouped-quantizes-groups-launch")):
        fuser.GroupedTensor.quantize(x, sizes, quantizer)
