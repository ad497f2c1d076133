"""``DelayedScaling(override_linear_precision=(False, False, True))``: exact weight gradients."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from said import holds, said

import fuser
from fuser.precision.availability import runs_natively
from fuser.recipe import CustomRecipe, DelayedScaling, Format
from fuser.tensors import IdentityQuantizer

F32 = torch.float32
EXACT = (False, False, True)
RECIPE = DelayedScaling(override_linear_precision=EXACT, amax_history_len=3)
PLAIN = DelayedScaling(amax_history_len=3)


def fp8(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Values in FP8 with a scale, in fp64."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype).double() / scale


def scale_after(amax: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(torch.finfo(dtype).max) / torch.tensor(amax))


@pytest.mark.parametrize("kernels", [False, True])
def test_forward_and_dgrad_read_fp8_and_wgrad_the_values(kernels: bool) -> None:
    """Three steps: the scales of each are those of the steps before, in plain torch."""
    op = oracles.randomize(fuser.BasicLinear(32, 48))
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    seen: dict[str, list[float]] = {"x": [], "w": [], "dy": []}

    def scale(name: str, dtype: torch.dtype) -> float:
        return scale_after(max(seen[name][-3:]), dtype) if seen[name] else 1.0

    with on_kernels() if kernels else contextlib.nullcontext():
        for step in range(3):
            x = oracles.leaf(oracles.random_tensor((24, 32), F32, step))
            dy = oracles.random_tensor((24, 48), F32, 10 + step) * 3
            op.zero_grad()
            with fuser.autocast(recipe=RECIPE):
                y = op(x)
            y.backward(dy)
            qx = fp8(x.detach(), scale("x", e4m3), e4m3)
            qw = fp8(op.weight.detach(), scale("w", e4m3), e4m3)
            qdy = fp8(dy, scale("dy", e5m2), e5m2)
            expected = {
                "y": (y.detach(), qx @ qw.T),
                "dx": (x.grad, qdy @ qw),
                "dw": (op.weight.grad, dy.double().T @ x.detach().double()),
            }
            for name, (found, exact) in expected.items():
                error = (found.double() - exact).abs().max()
                assert error < 1e-5 * exact.abs().max(), (step, name)
            for name, value in (("x", x), ("w", op.weight), ("dy", dy)):
                seen[name].append(float(value.detach().abs().max()))


def test_scales_and_histories_are_those_of_the_recipe_without_it() -> None:
    one = oracles.randomize(
        fuser.Sequential(
            fuser.RMSNorm(32), fuser.Linear(32, 32), fuser.GELU(), fuser.Linear(32, 16)
        )
    )
    other = copy.deepcopy(one)
    for model, recipe in ((one, RECIPE), (other, PLAIN)):
        for step in range(3):
            x = oracles.leaf(oracles.random_tensor((16, 32), F32, step))
            with fuser.autocast(recipe=recipe):
                y = model(x)
            y.backward(oracles.random_tensor((16, 16), F32, 7))
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert one[1].weight.grad is not None
    assert not torch.equal(one[1].weight.grad, other[1].weight.grad)


def test_a_model_has_exact_weight_gradients_of_its_own_values() -> None:
    """The second linear reads what the activation wrote, and not what forward rounded of it."""
    model = fuser.Sequential(fuser.BasicLinear(32, 32), fuser.GELU(), fuser.BasicLinear(32, 16))
    oracles.randomize(model)
    x = oracles.random_tensor((16, 32), F32, 1)
    dy = oracles.random_tensor((16, 16), F32, 2)
    with fuser.autocast(recipe=RECIPE):
        y = model(x)
    y.backward(dy)
    of_weights, of_grads = torch.float8_e4m3fn, torch.float8_e5m2
    first, second = (fp8(model[i].weight.detach(), 1.0, of_weights) for i in (0, 2))
    z = (fp8(x, 1.0, of_weights) @ first.T).requires_grad_()
    h = torch.nn.functional.gelu(z, approximate="tanh")
    h.backward(fp8(dy, 1.0, of_grads) @ second)
    assert z.grad is not None
    expected = {0: z.grad.T @ x.double(), 2: dy.double().T @ h.detach()}
    for i, exact in expected.items():
        assert (model[i].weight.grad.double() - exact).abs().max() < 1e-5 * exact.abs().max(), i


@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "memory"])
def test_recomputed_inputs_give_the_same_weight_gradients(how: str) -> None:
    model = oracles.randomize(
        fuser.Sequential(
            fuser.RMSNorm(32), fuser.Linear(32, 64), fuser.SwiGLU(), fuser.Linear(32, 16)
        )
    )
    other = copy.deepcopy(model)
    results = []
    for is_plain in (True, False):
        run = model if is_plain else other
        for step in range(3):
            run.zero_grad()
            x = oracles.leaf(oracles.random_tensor((16, 32), F32, step))
            with fuser.autocast(recipe=RECIPE):
                if is_plain:
                    y = run(x)
                elif how == "memory":
                    with fuser.activation_memory_budget(0):
                        y = run(x)
                else:
                    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=how == "reentrant")
            y.backward(oracles.random_tensor((16, 16), F32, 7))
        results.append([y.detach(), x.grad, *(p.grad for p in run.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_experts_have_exact_weight_gradients() -> None:
    op: Any = oracles.randomize(fuser.GroupedLinear(2, 32, 32, bias=False))
    x = oracles.leaf(oracles.random_tensor((48, 32), F32, 1))
    dy = oracles.random_tensor((48, 32), F32, 2)
    with fuser.autocast(recipe=RECIPE):
        y = op(x, torch.tensor([16, 32]))
    y.backward(dy)
    for weight, rows in ((op.weight0, slice(0, 16)), (op.weight1, slice(16, 48))):
        exact = dy[rows].double().T @ x.detach()[rows].double()
        assert (weight.grad.double() - exact).abs().max() < 1e-5 * exact.abs().max()
        qx, qw = (fp8(v.detach(), 1.0, torch.float8_e4m3fn) for v in (x[rows], weight))
        assert (y[rows].double() - qx @ qw.T).abs().max() < 1e-4


def test_main_grad_gets_the_exact_gradient() -> None:
    op = oracles.randomize(fuser.BasicLinear(32, 16, accumulate_into_main_grad=True))
    op.weight.main_grad = torch.ones(16, 32)
    x = oracles.random_tensor((8, 32), F32, 1)
    dy = oracles.random_tensor((8, 16), F32, 2)
    with fuser.autocast(recipe=RECIPE):
        op(x).backward(dy)
    exact = 1 + dy.double().T @ x.double()
    assert (op.weight.main_grad.double() - exact).abs().max() < 1e-5


def test_the_plan_and_the_recipe_show_it() -> None:
    assert RECIPE != PLAIN
    assert hash(RECIPE) != hash(PLAIN)
    assert "override_linear_precision=(False, False, True)" in str(RECIPE)
    model = fuser.Sequential(fuser.RMSNorm(32), fuser.BasicLinear(32, 32))
    x = torch.randn(16, 32)
    with on_kernels(), fuser.autocast(recipe=RECIPE):
        plan = model.plan(x)
    assert "FP8 E4M3 / unquantized" in str(plan)
    (linear,) = [step for step in plan.backward if "dgrad" in step.kernel]
    assert "dgrad mm (emulated), wgrad mm" in linear.kernel
    assert "wgrad mm (emulated)" not in linear.kernel
    assert "rmsnorm_rows" not in str(plan)


def test_on_a_gpu_forward_and_dgrad_are_native() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64), fuser.BasicLinear(64, 64)).bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with fuser.autocast(recipe=RECIPE):
        text = str(fuser.plan(model, x, device="h200"))
    assert "FP8 mm (native)" in text
    assert "dgrad FP8 mm (native), wgrad mm" in text
    assert "emulated" not in text
    assert runs_natively(RECIPE, (9, 0))


@pytest.mark.parametrize(
    "triple", [(True, False, False), (False, True, True), (True, True, True), None]
)
def test_other_triples_are_refused(triple: Any) -> None:
    words = said(
        "recipe-takes",
        None,
        holds("override_linear_precision "),
        "(False, False, False) or (False, False, True)",
    )
    with pytest.raises(fuser.InputError, match=words):
        DelayedScaling(override_linear_precision=triple)
    assert DelayedScaling(fp8_format=Format.HYBRID, override_linear_precision=EXACT)


def unquantized(role: Any) -> Any:
    return IdentityQuantizer()


@pytest.mark.parametrize("recipe", [RECIPE, CustomRecipe(qfactory=unquantized)])
def test_an_input_that_is_changed_before_backward_is_an_error(recipe: Any) -> None:
    """Its values are not copied, so that the gradient would be one of other values."""
    for op in (fuser.Linear(32, 16), fuser.Sequential(fuser.Linear(32, 32), fuser.Linear(32, 16))):
        for _ in range(3):
            x = oracles.leaf(oracles.random_tensor((16, 32), F32, 1))
            values = x * 1.0
            with fuser.autocast(recipe=recipe):
                y = op(values)
            with torch.no_grad():
                values.mul_(2.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
