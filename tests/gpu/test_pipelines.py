"""Pipelines on the GPU: the same results as fp64, no synchronisation, graphs, streams."""

from __future__ import annotations

from typing import Any

import every_format as formats
import models
import oracles
import pytest
import torch
from recordable_op import Square, with_square
from said import holds, said
from torch.autograd import forward_ad

import fuser

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def block(dtype: torch.dtype, width: int = 64) -> fuser.Sequential:
    """A pre-norm feed-forward block whose residual stays inside."""
    return models.residual_block(width, 2 * width, device="cuda", dtype=dtype)


def linear_gelu_linear(dtype: torch.dtype, width: int = 64) -> fuser.Sequential:
    return models.mlp(width, 2 * width, device="cuda", dtype=dtype)


RECIPES = {"plain": None, **{name: cls() for name, cls in formats.RECIPES.items()}}


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("default_device", ["meta", "cpu"])
def test_a_pipeline_runs_on_the_device_of_its_tensors(recipe: Any, default_device: str) -> None:
    model = block(torch.bfloat16)
    x = oracles.random_tensor((64, 64), torch.bfloat16, 1).to("cuda").requires_grad_()
    with torch.device(default_device):
        for _ in range(3):  # the third time, launches are made again
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x)
            y.sum().backward()
    assert {t.device.type for t in (y, x.grad, *(p.grad for p in model.parameters()))} == {"cuda"}


def test_a_delayed_scale_may_have_no_dimensions() -> None:
    x = oracles.random_tensor((64, 64), torch.bfloat16, 1).to("cuda")
    scale, amax = torch.tensor(2.0, device="cuda"), torch.tensor(0.0, device="cuda")
    found = fuser.Float8Quantizer(scale, amax)(x)
    expected = fuser.Float8Quantizer(scale.reshape(1), torch.zeros(1, device="cuda"))(x)
    assert torch.equal(found._data, expected._data)
    assert amax == x.float().abs().max()


def test_a_forward_mode_derivative_is_refused_and_not_dropped() -> None:
    model = block(torch.float32).requires_grad_(False)
    x = oracles.random_tensor((64, 64), torch.float32, 1).to("cuda")
    with (
        pytest.raises(
            fuser.StateError, match=said("diagnose-pipeline-runs-fused", holds("forward_ad"))
        ),
        forward_ad.dual_level(),
    ):
        model(forward_ad.make_dual(x, x))
    with pytest.raises(
        fuser.StateError, match=said("diagnose-pipeline-runs-fused", holds("torch.func.vmap"))
    ):
        torch.func.vmap(model)(x[None])


@every_dtype
@pytest.mark.parametrize("case", oracles.CASES, ids=str)
def test_every_op_is_as_right_as_torch(case: oracles.Case, dtype: torch.dtype) -> None:
    draws = []
    for seed in range(8):
        module = oracles.randomize(case.make(dtype).to("cuda"), seed=100 + 10 * seed)
        shape = (6, 4, *case.shape)
        x = oracles.random_tensor(shape, dtype, seed, case.spread).to("cuda")
        extras = []
        if case.extra is not None:
            extra_shape = shape if case.extra == "same" else shape[:-1]
            extras = [oracles.random_tensor(extra_shape, dtype, 7 + seed).to("cuda")]
        named = {f"extra {k}": extra for k, extra in enumerate(extras)}
        tensors = {"x": x, **oracles.params_of(module), **named}
        draws.append(
            oracles.Draw(
                oracles.run_module(module, oracles.leaf(x), [oracles.leaf(e) for e in extras]),
                oracles.run_formula(case.formula, tensors, dtype),
                oracles.run_formula(case.formula, tensors, torch.float64),
            )
        )
    oracles.assert_no_worse_than_torch(*draws)


@every_dtype
@pytest.mark.parametrize("make", [block, linear_gelu_linear])
def test_a_pipeline_is_as_right_on_the_gpu_as_on_the_cpu_in_fp32(
    make: Any, dtype: torch.dtype
) -> None:
    model = make(dtype)
    x = oracles.random_tensor((32, 64), dtype, 1).to("cuda").requires_grad_()
    on_gpu = oracles.run_module(model, x)
    unfused = make(dtype)
    unfused.fusions = ()
    plain = oracles.run_module(unfused, x.detach().clone().requires_grad_())
    exact_x = x.detach().cpu().float().requires_grad_()
    exact = oracles.run_module(make(dtype).to("cpu", torch.float32), exact_x)
    for name, value in exact.items():
        scale = value.norm()
        error = (on_gpu[name].cpu().float() - value).norm() / scale
        unfused_error = (plain[name].cpu().float() - value).norm() / scale
        # TF32 is off by default; one rounding of every value is always allowed.
        assert error <= 2 * unfused_error + torch.finfo(dtype).eps, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [fuser.RMSNorm, fuser.LayerNorm])
def test_a_norms_gradient_and_another_are_added_before_they_are_rounded(
    norm: Any, dtype: torch.dtype
) -> None:
    """The error of one rounding; the ops alone round the norm's gradient too, and have more."""
    x = oracles.random_tensor((4096, 256), dtype, 1).to("cuda").requires_grad_()
    grads = [oracles.random_tensor(x.shape, dtype, seed).to("cuda") for seed in (2, 3)]
    found: list[Any] = []
    for fusions in (fuser.FUSIONS, ()):
        op = oracles.randomize(norm(256, dtype=dtype).cpu()).cuda()
        model = fuser.Sequential(fuser.MakeExtraOutput(), op, fusions=fusions)
        found += torch.autograd.grad(model(x), x, grads)
    exact = x.detach().double().requires_grad_()
    formula = {fuser.RMSNorm: oracles.rmsnorm(), fuser.LayerNorm: oracles.layernorm()}[norm]
    y = formula(exact, *(parameter.detach().double() for parameter in op.parameters()))
    (truth,) = torch.autograd.grad(y, exact, grads[0].double())
    truth += grads[1]

    def error(dx: torch.Tensor) -> float:
        return (dx.double() - truth).square().mean().sqrt().item()

    fused, unfused, once = map(error, (*found, truth.to(dtype)))
    assert fused <= 1.01 * once
    assert unfused > 1.1 * once


@pytest.mark.parametrize(
    "recipe", [None, fuser.recipe.Float8CurrentScaling()], ids=["plain", "FP8"]
)
def test_a_tensor_that_torch_has_yet_to_negate_gives_the_same_results(recipe: Any) -> None:
    """A view of ``-x`` without its sign in memory, as the imaginary part of a conjugate is."""
    model = linear_gelu_linear(torch.bfloat16, 256)
    norm = oracles.randomize(fuser.RMSNorm(256, dtype=torch.bfloat16).cpu()).cuda()
    model = fuser.Sequential(fuser.GELU(), norm, *model)
    x, dy = (oracles.random_tensor((8192, 256), torch.bfloat16, k).cuda() for k in (1, 2))

    def run(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        with fuser.autocast(recipe is not None, recipe=recipe):
            y = model(x)
        return [y, *torch.autograd.grad(y, (x, *model.parameters()), dy)]

    expected = [run(x, dy) for _ in range(3)][-1]
    for actual, plain in zip(run(*map(torch._neg_view, (-x, -dy))), expected, strict=True):
        assert torch.equal(actual, plain)


@every_dtype
def test_gelu_is_a_gemm_epilogue_without_gradients(dtype: torch.dtype) -> None:
    model = linear_gelu_linear(dtype)
    x = oracles.random_tensor((32, 64), dtype, 1).to("cuda")
    with torch.no_grad():
        y = model(x)
    assert "addmm+gelu" in str(model.plan(x, training=False))
    assert "addmm+gelu" not in str(model.plan(x))
    with_grad = model(x)
    scale = with_grad.abs().max()
    # One rounding less: the pre-activation is never written.
    assert (y - with_grad).abs().max() <= 4 * torch.finfo(dtype).eps * scale


@every_dtype
def test_the_erf_gelu_is_no_gemm_epilogue_and_is_torchs(dtype: torch.dtype) -> None:
    linear = fuser.Linear(64, 64, device="cuda", dtype=dtype)
    x = oracles.random_tensor((32, 64), dtype, 1).to("cuda")
    model = fuser.Sequential(linear, fuser.GELU("none"))
    with torch.no_grad():
        y = model(x)
        exact = linear(x).double()
    assert "addmm+gelu" not in str(model.plan(x, training=False))
    expected = torch.nn.functional.gelu(exact)
    # The tanh form would be off by 4.7e-4, which 16 bits do not show.
    allowed = 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (y.double() - expected).abs().max() <= allowed


def test_a_step_in_steady_state_never_waits_for_the_device() -> None:
    model = block(torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
        with torch.no_grad():
            linear_gelu = model(x)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.isfinite(linear_gelu).all()


@pytest.mark.parametrize("make", [block, linear_gelu_linear])
def test_forward_and_backward_capture_into_a_graph(make: Any) -> None:
    model = make(torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = None
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
        y.sum().backward()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    captured = (y.clone(), x.grad.clone(), *(p.grad.clone() for p in model.parameters()))
    x.grad = None
    model.zero_grad(set_to_none=True)
    again = model(x)
    again.sum().backward()
    eager = (again, x.grad, *(p.grad for p in model.parameters()))
    for replayed, direct in zip(captured, eager, strict=True):
        torch.testing.assert_close(replayed, direct, rtol=0, atol=0)


def test_forward_under_one_stream_and_backward_under_another() -> None:
    model = block(torch.float32)
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), x)[0]
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    first.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        loss = model(x).square().sum()
    second.wait_stream(first)
    with torch.cuda.stream(second):
        (grad,) = torch.autograd.grad(loss, x)
    torch.cuda.synchronize()
    torch.testing.assert_close(grad, expected)


def test_autocast_runs_in_its_dtype_and_returns_gradients_in_the_parameters() -> None:
    model = block(torch.float32)
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
        plan = model.plan(x)
    y.sum().backward()
    assert "autocast bfloat16" in str(plan)
    assert y.dtype is torch.float32  # the residual stream is fp32, as in torch
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_main_grad_gets_the_gemms_fp32_accumulator() -> None:
    linear = fuser.Linear(
        64, 128, bias=False, device="cuda", dtype=torch.bfloat16, accumulate_into_main_grad=True
    )
    linear.weight.main_grad = torch.ones(128, 64, device="cuda")
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    linear(x).backward(dy)
    exact = 1 + dy.double().T @ x.double()
    # 256 products accumulated in fp32: far below one rounding to bf16.
    assert (linear.weight.main_grad - exact).abs().max() <= 1e-4 * exact.abs().max()
    assert linear.weight.grad is None


def test_mixed_devices_are_refused_by_name() -> None:
    model = linear_gelu_linear(torch.float32)
    with pytest.raises(fuser.InputError, match=r"input is on cpu.*parameter.*on cuda:0"):
        model(torch.randn(4, 64, device="cpu"))
    assert model(torch.randn(4, 64, device="cuda")).shape == (4, 64)


def test_parameters_are_made_on_the_gpu_by_default() -> None:
    assert fuser.Linear(8, 8).weight.is_cuda
    with torch.device("cpu"):
        assert not fuser.Linear(8, 8).weight.is_cuda
    assert not fuser.Linear(8, 8, device="cpu").weight.is_cuda
    deferred = fuser.Linear(8, 8, device="meta")
    assert deferred(torch.randn(2, 8, device="cuda")).is_cuda


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_users_op_that_says_so_is_in_the_graphs_of_its_pipeline(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = oracles.random_tensor((64, 32), torch.bfloat16, 1).to("cuda").requires_grad_()

    def steps() -> tuple[fuser.Sequential, list[Any]]:
        torch.manual_seed(1)
        model, found = with_square("cuda"), []
        for _ in range(8):
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x)
            y.backward(torch.ones_like(y))
            tensors = (y, x.grad, *(p.grad for p in model.parameters()))
            found.append([t.detach().double().flatten().tolist() for t in tensors])
            del y, tensors
            x.grad = None
            model.zero_grad(set_to_none=True)
        return model, found

    model, found = steps()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        texts = [note.text for note in model.plan(x).replays]
    assert any(text.startswith("a CUDA graph in") for text in texts), texts
    monkeypatch.setattr(Square, "is_recordable", False)
    _, expected = steps()
    assert found == expected
