"""Kernels that do not compile: torch does their work, from the call in which that is found on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import every_format as formats
import pytest
import torch
from oracles import leaf, random_tensor
from pipeline_kernels import on_kernels
from said import said

import fuser
from fuser import recipe as recipes
from fuser.chain import Stage
from fuser.cuda import launch, module
from fuser.cuda.launch import Kernel, Launch, LaunchBackend
from fuser.cuda.module import Obstacle
from fuser.errors import KernelUnavailable
from fuser.formats import DType
from fuser.functional import normalization, pointwise
from fuser.functional.amax import amax
from fuser.functional.delayed_scaling import update_delayed
from fuser.functional.lazy import LazyTensor, materialize

BF16, F32 = torch.bfloat16, torch.float32
REASON = "swiglu.cu does not compile (error: expected a semicolon)."


def fail(kernel: Kernel) -> None:
    """What :mod:`fuser.cuda.module` does where a kernel does not compile."""
    module.disable_kernels(Obstacle(REASON))
    raise KernelUnavailable(f"{kernel.symbol} cannot run.")


class Broken(LaunchBackend):
    """Takes tensors on the CPU, and has no kernel that compiles."""

    device_type = "cpu"

    def refusal(self) -> str | None:
        return None

    def run(self, kernel: Kernel, launch: Launch, args: tuple[Any, ...]) -> None:
        fail(kernel)

    def multiprocessors(self, device: torch.device) -> int:
        return 4

    def shared_bytes(self, device: torch.device) -> int:
        return 227 * 1024


@contextmanager
def nothing_compiles() -> Iterator[None]:
    """Inside, the first kernel of a pipeline on the CPU does not compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "backend", Broken())
        patch.setattr(module, "compile_failure", None)
        patch.setattr(pointwise, "FEW_ELEMENTS", 0)
        yield


def flat(results: Any) -> list[Any]:
    """What a function returned: tensors, quantized ones by their buffers, and None."""
    if isinstance(results, (tuple, list)):
        return [part for result in results for part in flat(result)]
    if hasattr(results, "buffers") and not isinstance(results, torch.nn.Module):
        return list(results.buffers().values())
    if isinstance(results, dict):
        return list(results.values())
    return [results]


def assert_same(found: Any, expected: Any) -> None:
    pairs = list(zip(flat(found), flat(expected), strict=True))
    assert any(one is not None for one, _ in pairs)
    for one, other in pairs:
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


# -- functions ------------------------------------------------------------------

X, DY, HALF = (random_tensor((32, n), BF16, seed) for n, seed in ((64, 1), (64, 2), (32, 3)))
SCALES = random_tensor((32,), F32, 4).abs()
E4M3 = DType.kFloat8E4M3
BYTES = torch.arange(32 * 64, dtype=torch.uint8).view(32, 64) % 120
ONE = torch.ones(1)


def updated() -> tuple[torch.Tensor, ...]:
    states = torch.rand(4, 2, generator=torch.Generator().manual_seed(1)), torch.ones(2)
    update_delayed([states[0]], [states[1]], [torch.full((2,), 448.0)])
    return states


def delayed() -> tuple[Any, ...]:
    amax = torch.zeros(1)
    return fuser.Float8Quantizer(ONE, amax).buffers_of(X), amax


def columnwise_alone(quantizer: fuser.Quantizer) -> torch.Tensor:
    return quantizer(X).with_usage("columnwise").dequantize()


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "amax": lambda: amax(X),
    "current": lambda: fuser.Float8CurrentScalingQuantizer().buffers_of(X),
    "delayed": delayed,
    "fp8 dequantize": lambda: fuser.Float8CurrentScalingQuantizer()(X).dequantize(),
    "transpose": lambda: columnwise_alone(fuser.Float8CurrentScalingQuantizer()),
    "update": updated,
    "mxfp8": lambda: fuser.MXFP8Quantizer().buffers_of(X),
    "mxfp8 dequantize": lambda: columnwise_alone(fuser.MXFP8Quantizer()),
    "block": lambda: fuser.Float8BlockQuantizer(block_scaling_dim=1).buffers_of(X),
    "block dequantize": lambda: columnwise_alone(fuser.Float8BlockQuantizer()),
    "nvfp4": lambda: fuser.NVFP4Quantizer(with_rht=True).buffers_of(X),
    "nvfp4 dequantize": lambda: columnwise_alone(fuser.NVFP4Quantizer()),
    "rmsnorm, of gamma alone": lambda: normalization.norm_backward(
        DY, X, [DY[0]], [SCALES[:, None]], (False, True)
    ),
    "layernorm, of both parameters alone": lambda: normalization.norm_backward(
        DY, X, [DY[0], DY[1]], [SCALES[:, None]] * 2, (False, True, True)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_whose_kernel_does_not_compile_gives_what_torch_gives(name: str) -> None:
    expected = FUNCTIONS[name]()
    with nothing_compiles(), pytest.warns(match=said("module-torch-work-kernels")):
        found = FUNCTIONS[name]()
    assert_same(found, expected)


def stage_operands() -> tuple[tuple[Stage, ...], list[torch.Tensor | None]]:
    stages: tuple[Stage, ...] = (
        Stage("bias"),
        Stage("swiglu", is_scaled=True),
        Stage("dropout", (0.3,)),
    )
    stages = (*stages, Stage("add_extra_input"), Stage("constant_scale", (0.5,)), Stage("gelu"))
    seed = torch.tensor([3, 4])
    return stages, [DY[0], SCALES, seed, HALF, None, None]


def flattened(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lazy values, and the tensors beside them without the sequences in which they are."""
    values, *beside = result
    return values, *flat(beside)


def chain_backward() -> tuple[Any, ...]:
    stages, operands = stage_operands()
    wanted = (True, True, False, True, False, False)
    return flattened(pointwise.chain_backward(stages, HALF, X, operands, wanted))


VALUES: dict[str, Callable[[], Any]] = {
    "activation": lambda: pointwise.chain((Stage("swiglu"),), X),
    "activation backward": lambda: flattened(
        pointwise.chain_backward((Stage("qgelu"),), DY, X, (None,), (False,))
    ),
    "activation and bias backward": lambda: flattened(
        pointwise.chain_backward(
            (Stage("bias"), Stage("swiglu")), HALF, X, (None, None), (True, False), saved=1
        )
    ),
    "scaled": lambda: pointwise.chain((Stage("glu").scaled,), X, (SCALES,)),
    "scaled backward": lambda: flattened(
        pointwise.chain_backward((Stage("glu").scaled,), HALF, X, (leaf(SCALES),), (True,))
    ),
    "dropout": lambda: pointwise.dropout(X, torch.tensor([3, 4]), 0.3),
    "rmsnorm": lambda: flattened(
        normalization.norm(X, [DY[0]], 1e-5, BF16, extra=DY, wants_sum=True)
    ),
    "rmsnorm of a sum": lambda: flattened(normalization.norm(X, [DY[0]], 1e-5, BF16, extra=DY)),
    "layernorm": lambda: flattened(
        normalization.norm(X, [DY[0], DY[1]], 1e-5, BF16, zero_centered=True)
    ),
    "l2norm": lambda: flattened(normalization.norm(X, [], 1e-5, BF16)),
    "rmsnorm backward": lambda: flattened(
        normalization.norm_backward(
            DY, X, [DY[0]], [SCALES[:, None]], (True, True), zero_centered=True, d_extra=DY
        )
    ),
    "layernorm backward": lambda: flattened(
        normalization.norm_backward(
            DY, X, [DY[0], DY[1]], [SCALES[:, None]] * 2, (True, False, True)
        )
    ),
    "l2norm backward": lambda: flattened(
        normalization.norm_backward(DY, X, [], [SCALES[:, None]], (True,))
    ),
}
QUANTIZERS: dict[str, Callable[[Any], Any]] = {
    "plain": materialize,
    "mxfp8": fuser.MXFP8Quantizer(),
    "block": fuser.Float8BlockQuantizer(),
    "current": fuser.Float8CurrentScalingQuantizer(),
    "nvfp4": fuser.NVFP4Quantizer(),
}


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_lazy_tensors_whose_kernel_does_not_compile_are_computed_by_torch(
    make: Callable[[], Any], quantizer: Any
) -> None:
    def run() -> list[Any]:
        values, *beside = made if isinstance(made := make(), tuple) else (made,)
        is_values.append(isinstance(values, LazyTensor))
        return [quantizer(values), *beside]

    is_values: list[bool] = []
    with torch.no_grad():
        expected = run()
        with nothing_compiles(), pytest.warns(match=said("module-torch-work-kernels")):
            found = run()
    assert is_values == [False, True]
    assert_same(found, expected)


def test_a_chain_by_torch_equals_its_kernels() -> None:
    def run() -> list[Any]:
        values, *grads = chain_backward()
        return [materialize(pointwise.chain(stages, X, operands)), materialize(values), *grads]

    stages, operands = stage_operands()
    with on_kernels():
        expected = run()
    with nothing_compiles(), pytest.warns(match=said("module-torch-work-kernels")):
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


# -- pipelines ------------------------------------------------------------------


def block() -> fuser.Sequential:
    """A residual, norms, activations and a chain of pointwise ops around linears."""
    torch.manual_seed(1)
    return fuser.Sequential(
        *(fuser.AddExtraInput(), fuser.MakeExtraOutput(), fuser.LayerNorm(32, dtype=BF16)),
        *(fuser.Linear(32, 64, dtype=BF16), fuser.SwiGLU(), fuser.Bias(32, dtype=BF16)),
        *(fuser.Linear(32, 32, bias=False, dtype=BF16), fuser.RMSNorm(32, dtype=BF16)),
        fuser.Linear(32, 32, bias=False, dtype=BF16),
    )


def trained(model: fuser.Sequential, recipe: Any, steps: int = 2) -> list[torch.Tensor]:
    """Outputs and gradients of some steps."""
    found = []
    for step in range(steps):
        x, extra = (leaf(random_tensor((32, 32), BF16, 10 * step + k)) for k in range(2))
        with fuser.autocast(recipe=recipe, enabled=recipe is not None):
            y, other = model(x, extra)
        (y.sum() + other.sum()).backward()
        found += [y.detach(), other.detach(), x.grad, extra.grad]
        found += [p.grad.clone() for p in model.parameters()]
    return found


RECIPES = {
    "none": None,
    **{name: formats.deterministic(cls) for name, cls in formats.RECIPES.items()},
    "delayed": recipes.DelayedScaling(amax_history_len=2),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_pipeline_whose_first_kernel_does_not_compile_trains_with_torchs_bits(
    recipe: Any,
) -> None:
    expected = trained(block(), recipe)
    with nothing_compiles(), pytest.warns(match=said("module-torch-work-kernels")) as warned:
        found = trained(block(), recipe)
    assert (
        len([w for w in warned if re.search(said("module-torch-work-kernels"), str(w.message))])
        == 1
    )
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["none", "current", "mxfp8"])
def test_a_pipeline_trains_whichever_of_its_kernels_does_not_compile(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is launched before goes on running; all else must be torch's from then on."""
    launched: list[Kernel] = []
    call = Kernel.__call__
    last = 10**6

    def counted(kernel: Kernel, launch: Launch, *args: Any) -> None:
        if kernel not in launched:
            if len(launched) == last:
                fail(kernel)
            launched.append(kernel)
        call(kernel, launch, *args)

    monkeypatch.setattr(Kernel, "__call__", counted)
    with on_kernels():
        expected = trained(block(), RECIPES[name], steps=1)
        for last in range(len(launched)):
            launched.clear()
            monkeypatch.setattr(module, "compile_failure", None)
            # As in a new process: no launch is cached.
            with on_kernels(), pytest.warns(match=said("module-torch-work-kernels")):
                found = trained(block(), RECIPES[name], steps=1)
            assert len(launched) == last
            for one, other in zip(found, expected, strict=True):
                scale = other.float().abs().max()
                assert (one.float() - other.float()).abs().max() <= 0.05 * scale, last


def test_a_plan_after_the_failure_says_why_and_runs_no_chain() -> None:
    model = block()
    x = leaf(random_tensor((32, 32), BF16, 1))
    with nothing_compiles():
        before = model.plan(x, x)
        with pytest.warns(match=said("module-torch-work-kernels")):
            trained(model, None, steps=1)
        after = model.plan(x, x)
    assert "PointwiseChain" in [step.fusion for step in before.forward]
    assert "PointwiseChain" not in [step.fusion for step in after.forward]
    (refusal,) = [r for r in after.refusals if r.fusion == "PointwiseChain"]
    assert refusal.reason == REASON
    assert before.key.no_kernels is None
    assert f"\n  plain torch, without fuser's kernels: {REASON}\n" in str(after)
