"""Pipelines whose pointwise ops and norms run on kernels: in the emulator, against plain torch."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import leaf, random_tensor
from pipeline_kernels import on_kernels
from said import said, sentence
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser import recipe as recipes
from fuser.chain import Stage
from fuser.cuda import launch
from fuser.cuda.launch import Kernel, Launch
from fuser.functional import pointwise
from fuser.functional.lazy import LazyTensor
from fuser.fused_ops import (
    BackwardActivationBias,
    BackwardAddLayerNorm,
    BackwardAddRMSNorm,
    PointwiseChain,
)
from fuser.op import BasicOperation

pytestmark = pytest.mark.sampled(most=12)

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched; of tiles' kernels, what makes the values."""
    names: list[str] = []
    call = Kernel.__call__

    def noted(kernel: Kernel, launch: Launch, *args: Any) -> None:
        name, _, arguments = kernel.symbol.removeprefix("fuser_").partition("<")
        if name == "tiled_pair":
            names.extend(re.findall(r"\w+Producer\b", arguments))
        else:
            of_tile = arguments.removeprefix("fuser::").partition("<")[0]
            names.append(of_tile if name == "tiled" else name)
        call(kernel, launch, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    return names


# -- single ops ---------------------------------------------------------------

ON_KERNELS = (
    *("LayerNorm-zero-centered", "LayerNorm-3x5", "RMSNorm", "L2Normalization-eps"),
    *("GELU", "SwiGLU-interleaved-3", "SiTUGLU", "ClampedSwiGLU", "ScaledSwiGLU", "ScaledSReLU"),
)


@pytest.mark.parametrize("name", ON_KERNELS)
def test_an_op_is_as_right_on_kernels_as_torch(name: str, launched: list[str]) -> None:
    case = oracles.case(name)
    draws = []
    for seed in range(4):
        op = oracles.randomize(case.make(BF16), seed=100 + 10 * seed)
        shape = (3, 2, *case.shape)
        x = random_tensor(shape, BF16, seed, case.spread)
        extras = [random_tensor(shape[:-1], BF16, 7 + seed)] if case.extra else []
        tensors = {"x": x, **oracles.params_of(op)}
        tensors |= {f"extra {k}": extra for k, extra in enumerate(extras)}
        with on_kernels():
            actual = oracles.run_module(op, leaf(x), [leaf(extra) for extra in extras])
        draws.append(
            oracles.Draw(
                actual,
                oracles.run_formula(case.formula, tensors, BF16),
                oracles.run_formula(case.formula, tensors, torch.float64),
            )
        )
    oracles.assert_no_worse_than_torch(*draws)
    assert len(launched) >= 2 * len(draws)


def test_dropout_on_kernels_has_the_references_mask_forward_and_backward() -> None:
    def run() -> list[Any]:
        torch.manual_seed(3)
        x = leaf(random_tensor((5, 24), BF16, 1))
        y = fuser.Dropout(0.3)(x)
        y.backward(random_tensor((5, 24), BF16, 2))
        return [y.detach(), x.grad]

    expected = run()
    with on_kernels():
        found = run()
    assert all(map(torch.equal, found, expected))
    assert torch.equal(found[0] == 0, found[1] == 0)


@pytest.mark.parametrize("make", [fuser.Bias, fuser.ConstantScale, fuser.AddExtraInput])
def test_a_lone_sum_or_product_is_left_to_torch(make: Any, launched: list[str]) -> None:
    op = {fuser.Bias: (8,), fuser.ConstantScale: (0.5,), fuser.AddExtraInput: ()}[make]
    module_ = oracles.randomize(make(*op))
    x = random_tensor((4, 8), F32, 1)
    extras = [random_tensor((4, 8), F32, 2)] * (make is fuser.AddExtraInput)
    expected = module_(x, *extras)
    with on_kernels():
        assert torch.equal(module_(x, *extras), expected)
    assert launched == []


# -- what kernels do not take ---------------------------------------------------


def test_turned_strided_and_empty_inputs_give_the_same_results() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        model = oracles.randomize(fuser.Sequential(fuser.RMSNorm(8), fuser.SwiGLU()))
        x = x.detach().requires_grad_()
        y = model(x)
        y.backward(torch.ones_like(y))
        return [y.detach(), x.grad, model[0].weight.grad]

    base = random_tensor((8, 16), F32, 1)
    inputs = (base[:, :8].t(), base[:, 3:11], base.view(2, 8, 8).transpose(0, 1), base[:0, 8:])
    with on_kernels():
        found = [run(x) for x in inputs]
    for x, actual in zip(inputs, found, strict=True):
        for value, plain in zip(actual, run(x), strict=True):
            torch.testing.assert_close(value, plain)


def test_parameters_with_gaps_between_their_elements_give_the_same_results() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        norm = fuser.LayerNorm(8)
        norm.weight, norm.bias = (
            torch.nn.Parameter(random_tensor((16,), F32, seed)[::2]) for seed in (2, 3)
        )
        y = norm(x)
        return [y, *torch.autograd.grad(y, (x, norm.weight, norm.bias), torch.ones_like(y))]

    x = random_tensor((4, 8), F32, 1).requires_grad_()
    with on_kernels():
        found = run(x)
    for actual, plain in zip(found, run(x), strict=True):
        torch.testing.assert_close(actual, plain)


def lazily_negated(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a view of ``-x``, as the imaginary part of a conjugate is."""
    return torch._neg_view(-x)


NEGATED: dict[str, tuple[Any, int]] = {
    "activation": (lambda: fuser.GELU(), 0),
    "bias": (lambda: fuser.Sequential(fuser.Bias(32, dtype=BF16), fuser.GELU()), 0),
    "extra input": (lambda: fuser.Sequential(fuser.AddExtraInput(), fuser.GELU()), 2),
    "scales": (lambda: fuser.ScaledSwiGLU(), 1),
    "norm": (lambda: fuser.LayerNorm(32, dtype=BF16), 0),
    "sum and norm": (
        lambda: fuser.Sequential(
            fuser.AddExtraInput(), fuser.MakeExtraOutput(), fuser.RMSNorm(32, dtype=BF16)
        ),
        2,
    ),
    "quantized": (lambda: fuser.Sequential(fuser.GELU(), fuser.BasicLinear(32, 32, dtype=BF16)), 0),
}


@pytest.mark.parametrize("name", NEGATED)
def test_a_tensor_that_torch_has_yet_to_negate_gives_the_same_results(
    name: str, launched: list[str]
) -> None:
    """Main and extra inputs, parameters and gradients; the first calls are those that are kept."""
    make, dims = NEGATED[name]

    def run(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        op = oracles.randomize(make())
        for parameter in op.parameters():
            parameter.data = change(parameter.data)
        x = change(random_tensor((32, 32), BF16, 1)).requires_grad_()
        extras = [change(random_tensor((32, 32)[:dims], BF16, 2)).requires_grad_()] * (dims > 0)
        with fuser.autocast(name == "quantized", recipe=recipes.Float8CurrentScaling()):
            outputs = oracles.as_tuple(op(x, *extras))
        grads = [change(random_tensor(y.shape, y.dtype, 3)) for y in outputs]
        leaves = [x, *extras, *op.parameters()]
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]

    with on_kernels():
        expected = [run(lambda x: x) for _ in range(3)][-1]
        found = run(lazily_negated)
    assert launched
    for actual, plain in zip(found, expected, strict=True):
        assert torch.equal(actual, plain)


def test_dtypes_that_no_kernel_takes_run_in_torch(launched: list[str]) -> None:
    def run(op: Any, x: torch.Tensor, *extras: torch.Tensor) -> list[torch.Tensor | None]:
        op = oracles.randomize(op)
        x = leaf(x)
        y = op(x, *extras)
        y.backward(random_tensor(y.shape, y.dtype, 5))
        return [y.detach(), x.grad, *(p.grad for p in op.parameters())]

    mixed = fuser.LayerNorm(8)
    mixed.bias = torch.nn.Parameter(mixed.bias.detach().to(BF16))
    x = random_tensor((3, 8), BF16, 1)
    calls: list[Any] = [
        (fuser.RMSNorm(8, dtype=F32), x),
        (mixed, x.float()),
        (fuser.AddExtraInput(), x, x.float()),
    ]
    expected = [run(*call) for call in calls]
    with on_kernels():
        found = [run(*call) for call in calls]
    assert launched == []
    for actual, plain in zip(found, expected, strict=True):
        assert all(map(torch.equal, actual, plain))


# -- fused ops ----------------------------------------------------------------


def residual(norm: type[Any], returns_sum: bool) -> fuser.Sequential:
    """An addition and a norm; with ``returns_sum`` its input goes on beside them."""
    ops = [fuser.AddExtraInput(), *[fuser.MakeExtraOutput()] * returns_sum, norm(16)]
    return oracles.randomize(fuser.Sequential(*ops))


@pytest.mark.parametrize("returns_sum", [False, True])
@pytest.mark.parametrize("norm", [fuser.RMSNorm, fuser.LayerNorm])
def test_an_addition_and_a_norm_are_one_kernel_each_way(
    norm: type[Any], returns_sum: bool, launched: list[str]
) -> None:
    def run(model: fuser.Sequential) -> dict[str, Any]:
        x, extra = (leaf(random_tensor((2, 3, 16), F32, seed)) for seed in (1, 2))
        return oracles.run_module(model, x, [extra])

    expected = run(residual(norm, returns_sum))
    with on_kernels():
        model = residual(norm, returns_sum)
        plan = str(model.plan(leaf(torch.empty(6, 16)), torch.empty(6, 16)))
        found = run(model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=oracles.under(name))
    kernel = norm.__name__.lower()
    assert f"add_{kernel}" in plan
    assert (f"{kernel}_backward_add" in plan) == returns_sum
    assert launched == ["norm", "norm_backward", "norm_parameter_gradients"]


@pytest.mark.parametrize("returns_sum", [False, True])
def test_an_evaluation_writes_the_sum_before_a_norm_only_if_it_is_returned(
    returns_sum: bool,
) -> None:
    model = residual(fuser.RMSNorm, returns_sum)
    x, extra = (random_tensor((6, 16), F32, seed) for seed in (1, 2))
    written: list[torch.Tensor] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if "empty" in func._opname and result.nbytes >= x.nbytes:
                written.append(result)
            return result

    with on_kernels(), torch.no_grad(), Noting():
        model(x, extra)
    assert len(written) == 1 + returns_sum


def test_an_activation_and_its_bias_are_one_kernel_backward(launched: list[str]) -> None:
    def run(model: fuser.Sequential) -> dict[str, Any]:
        return oracles.run_module(model, leaf(random_tensor((2, 3, 16), F32, 1)))

    def make() -> fuser.Sequential:
        fusions = (BackwardActivationBias,)
        return oracles.randomize(fuser.Sequential(fuser.Bias(16), fuser.SwiGLU(), fusions=fusions))

    expected = run(make())
    with on_kernels():
        model = make()
        plan = str(model.plan(leaf(torch.empty(6, 16))))
        found = run(model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=oracles.under(name))
    assert "swiglu_backward_bias" in plan
    assert launched == ["pointwise", "pointwise_backward", "sum_parts"]


def test_without_kernels_the_plan_names_what_torch_runs() -> None:
    assert not launch.kernels_support(torch.empty(1))
    plan = str(residual(fuser.RMSNorm, True).plan(leaf(torch.empty(6, 16)), torch.empty(6, 16)))
    assert "add, rmsnorm" in plan
    assert "rmsnorm_backward, add_" in plan


# -- chains -------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """Pointwise ops that one kernel runs each way, and how many extra inputs they take."""

    make: Callable[[torch.dtype], list[Any]]
    extras: tuple[str, ...] = ()
    columns: int = 16

    def model(self, dtype: torch.dtype, fusions: Any = fuser.FUSIONS) -> fuser.Sequential:
        return oracles.randomize(fuser.Sequential(*self.make(dtype), fusions=fusions))

    def run(self, model: fuser.Sequential, dtype: torch.dtype) -> dict[str, Any]:
        torch.manual_seed(5)
        x = random_tensor((2, 3, self.columns), dtype, 1)
        shapes = {"same": x.shape, "half": (2, 3, self.columns // 2), "rows": (2, 3)}
        extras = [
            leaf(random_tensor(shapes[kind], dtype, 2 + k)) for k, kind in enumerate(self.extras)
        ]
        return oracles.run_module(model, leaf(x), extras)


CHAINS = {
    "bias, activation, scale": Chain(
        lambda dtype: [fuser.Bias(16, dtype=dtype), fuser.GELU(), fuser.ConstantScale(0.7)]
    ),
    "sums around a gate": Chain(
        lambda _: [fuser.AddExtraInput(), fuser.SwiGLU(), fuser.AddExtraInput()], ("same", "half")
    ),
    "two activations": Chain(
        lambda dtype: [fuser.SiLU(), fuser.Bias(16, dtype=dtype), fuser.ReGLU(), fuser.SReLU()]
    ),
    "scaled, dropped, biased": Chain(
        lambda dtype: [fuser.ScaledSwiGLU(), fuser.Dropout(0.3), fuser.Bias(8, dtype=dtype)],
        ("rows",),
    ),
    "nothing that is saved": Chain(
        lambda dtype: [fuser.Bias(16, dtype=dtype), fuser.AddExtraInput(), fuser.Dropout(0.5)],
        ("same",),
    ),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_chain_has_the_bits_of_its_ops_one_by_one_in_one_kernel_each_way(
    chain: Chain, launched: list[str]
) -> None:
    with on_kernels():
        expected = chain.run(chain.model(BF16, ()), BF16)
        launched.clear()
        found = chain.run(chain.model(BF16), BF16)
    for name, value in expected.items():
        if name.endswith("bias"):
            # Summed over rows in another order than torch sums them in.
            torch.testing.assert_close(found[name], value)
        else:
            assert torch.equal(found[name], value), name
    assert launched[0] == "pointwise"
    assert [name for name in launched[1:] if name != "sum_parts"] == ["pointwise_backward"]


LINKS = ("bias", "scale", "add", "dropout", "gelu", "srelu", "swiglu", "scaled")


@settings(max_examples=5, derandomize=True, deadline=None, database=None)
@given(st.lists(st.sampled_from(LINKS), min_size=2, max_size=5))
def test_random_runs_of_pointwise_ops_have_the_same_bits_fused(links: list[str]) -> None:
    def run(fusions: Any) -> dict[str, Any]:
        torch.manual_seed(5)
        width, ops, extras = 32, [], []
        for number, link in enumerate(links):
            if link == "add":
                extras.append(leaf(random_tensor((3, width), BF16, number)))
            elif link == "scaled":
                extras.append(leaf(random_tensor((3,), BF16, number)))
            makers: dict[str, Callable[[], Any]] = {
                "bias": functools.partial(fuser.Bias, width, dtype=BF16),
                "scale": functools.partial(fuser.ConstantScale, 0.7),
                "add": fuser.AddExtraInput,
                "dropout": functools.partial(fuser.Dropout, 0.3),
                "gelu": fuser.GELU,
                "srelu": fuser.SReLU,
                "swiglu": fuser.SwiGLU,
                "scaled": fuser.ScaledSReLU,
            }
            ops.append(makers[link]())
            width //= 1 + (link == "swiglu")
        model = oracles.randomize(fuser.Sequential(*ops, fusions=fusions))
        return oracles.run_module(model, leaf(random_tensor((3, 32), BF16, 9)), extras)

    with on_kernels():
        expected, found = run(()), run((PointwiseChain,))
    for name, value in expected.items():
        if name.endswith("bias"):
            torch.testing.assert_close(found[name], value)
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_scalars_that_change_between_forward_and_backward_are_the_forwards(fusions: Any) -> None:
    def run(is_changed: bool) -> torch.Tensor | None:
        torch.manual_seed(5)
        ops = (fuser.ConstantScale(2.0), fuser.SiTUGLU(), fuser.Dropout(0.5))
        model = fuser.Sequential(*ops, fusions=fusions)
        x = leaf(random_tensor((4, 16), BF16, 1))
        y = model(x)
        if is_changed:
            model[0].scale, model[2].dropout_probability = 5.0, 0.1
            model[1].function = fuser.SiTUGLU(beta1=0.5).function
        y.backward(random_tensor((4, 8), BF16, 2))
        return x.grad

    with on_kernels():
        expected, found = run(False), run(True)
    assert torch.equal(found, expected)


def test_a_chain_runs_without_gradients_in_evaluation_and_with_frozen_parameters(
    launched: list[str],
) -> None:
    def run(model: fuser.Sequential) -> list[Any]:
        x = random_tensor((4, 16), BF16, 1)
        with torch.no_grad():
            found = [model.eval()(x)]
        model[0].bias.requires_grad_(False)
        x = leaf(x)
        found.append(model(x))
        found[-1].backward(random_tensor((4, 8), BF16, 2))
        return [*found, x.grad, model[0].bias.grad]

    def make(fusions: Any) -> fuser.Sequential:
        ops = (fuser.Bias(16, dtype=BF16), fuser.Dropout(0.5), fuser.SwiGLU())
        return oracles.randomize(fuser.Sequential(*ops, fusions=fusions))

    with on_kernels():
        expected = run(make(()))
        launched.clear()
        found = run(make(fuser.FUSIONS))
    assert expected.pop() is found.pop() is None
    assert all(map(torch.equal, found, expected))
    assert launched == ["pointwise", "pointwise", "pointwise_backward"]


def test_a_chain_that_does_nothing_now_launches_nothing(launched: list[str]) -> None:
    x = leaf(random_tensor((4, 8), F32, 1))
    model = fuser.Sequential(fuser.Dropout(0.0), fuser.Dropout(0.0))
    with on_kernels():
        y = model(x)
        y.backward(torch.ones(4, 8))
        assert "dropout+dropout" in str(model.plan(x))
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones(4, 8))
    assert launched == []


class Means(BasicOperation):
    """``y = x``, and the mean of each row as an extra output."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        return input_, [(input_.mean(-1),)]

    def fuser_backward(
        self, ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ((d_means,),) = basic_op_grad_extra_outputs
        columns = grad_output.shape[-1]
        return grad_output + d_means.unsqueeze(-1) / columns, [()], [()]


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_tensor_from_a_channel_gets_its_gradient(is_fused: bool) -> None:
    ops = (
        Means().set_extra_output_channel(0, "means", output_to_caller=False),
        fuser.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        fuser.ScaledSReLU().set_extra_input_channel(0, "means"),
        fuser.AddExtraInput().set_extra_input_channel(0, "x"),
        fuser.SiLU(),
    )
    model = fuser.Sequential(*ops, fusions=fuser.FUSIONS if is_fused else ())
    x, dy = leaf(random_tensor((4, 8), F32, 1)), random_tensor((4, 8), F32, 2)
    with on_kernels():
        model(x).backward(dy)
    exact = leaf(x, torch.float64)
    scaled = torch.relu(exact).square() * exact.mean(-1, keepdim=True)
    torch.nn.functional.silu(scaled + exact).backward(dy.double())
    assert exact.grad is not None
    torch.testing.assert_close(x.grad, exact.grad.float())


REFUSALS: dict[str, tuple[Callable[[], list[Any]], tuple[Any, ...], str]] = {
    "two gates": (
        lambda: [fuser.SwiGLU(), fuser.GLU()],
        (),
        sentence("pointwise-chain-halves-columns-most", "SwiGLU and GLU"),
    ),
    "a cached input": (
        lambda: [fuser.GELU(cache_quantized_input=True), fuser.ConstantScale(2.0)],
        (),
        sentence("pointwise-chain-caches-input-quantized", "GELU"),
    ),
    "two dtypes": (
        lambda: [fuser.GELU(), fuser.Bias(16, dtype=BF16)],
        (),
        sentence("pointwise-chain-begins", "torch.float32", "torch.bfloat16 is the result of Bias"),
    ),
    "another extra input": (
        lambda: [fuser.GELU(), fuser.AddExtraInput()],
        (torch.empty(4, 16, dtype=BF16),),
        sentence(
            "pointwise-chain-begins",
            "torch.float32",
            "torch.bfloat16 is the extra input of AddExtraInput",
        ),
    ),
}


@pytest.mark.parametrize(("make", "extras", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_a_chain_is_refused_with_the_reason(
    make: Callable[[], list[Any]], extras: tuple[Any, ...], reason: str
) -> None:
    with on_kernels():
        plan = fuser.Sequential(*make()).plan(leaf(torch.empty(4, 16)), *extras)
    (refusal,) = [r for r in plan.refusals if r.fusion == "PointwiseChain"]
    assert refusal.reason == reason


def test_without_kernels_a_chain_is_refused_once_however_many_windows_it_has() -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.ConstantScale(2.0), fuser.SiLU())
    (refusal,) = model.plan(leaf(torch.empty(4, 16))).refusals
    assert refusal.ops == (0, 1, 2)
    assert refusal.reason == sentence("launch-kernels-run-cuda", "cpu")


def test_a_chain_moves_its_input_its_operands_and_its_output() -> None:
    model = CHAINS["sums around a gate"].model(F32)
    x, same, half = (leaf(torch.empty(4, n)) for n in (16, 16, 8))
    with on_kernels():
        plan = model.plan(x, same, half)
    (forward,), (backward,) = plan.forward, plan.backward
    # x, the two extra inputs and the output.
    assert forward.bytes_per_token == 4 * (16 + 16 + 8 + 8)
    # dy, x and the first extra input again, and dx, which is the gradient of both.
    assert backward.bytes_per_token == 4 * (8 + 16 + 16 + 16)
    assert forward.kernel == "add+swiglu+add"


# -- quantized on the way -------------------------------------------------------

RECIPES = {
    **{name: cls() for name, cls in formats.RECIPES.items()},
    "delayed": recipes.DelayedScaling(amax_history_len=2),
    "mxfp8-dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "current-high_precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
}
QUANTIZERS = formats.QUANTIZER_CLASSES


# These add to a norm's gradient before they round it: other bits than those of the ops alone.
ADDING_NORMS = (BackwardAddLayerNorm, BackwardAddRMSNorm)


def layer(fusions: Any, width: int = 32) -> fuser.Sequential:
    """Norms and activations in front of linears and behind them, with a residual."""
    ops = (
        *(fuser.AddExtraInput(), fuser.MakeExtraOutput(), fuser.LayerNorm(width, dtype=BF16)),
        *(fuser.Linear(width, 2 * width, dtype=BF16), fuser.SwiGLU()),
        *(fuser.Linear(width, width, bias=False, dtype=BF16), fuser.RMSNorm(width, dtype=BF16)),
        fuser.Linear(width, width, bias=False, dtype=BF16),
    )
    return oracles.randomize(fuser.Sequential(*ops, fusions=fusions))


def trained(
    model: fuser.Sequential, recipe: Any, shape: tuple[int, ...] = (2, 16, 32)
) -> dict[str, torch.Tensor]:
    """Everything that training makes: outputs, gradients, state of delayed scaling in two steps."""
    found: dict[str, Any] = {}
    for step in range(1 + isinstance(recipe, recipes.DelayedScaling)):
        torch.manual_seed(5)  # of stochastic rounding
        x, extra = (leaf(random_tensor(shape, BF16, 10 * step + k)) for k in range(2))
        with fuser.autocast(recipe=recipe):
            outputs = model(x, extra)
        results = oracles.backward(outputs, {"x": x, "extra": extra})
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found |= {f"{step} {name}": value for name, value in (results | grads).items()}
    state = model.state_dict().items()
    return found | {name: value for name, value in state if name.endswith("_extra_state")}


@pytest.mark.parametrize("name", [*RECIPES, "mxfp8 unfused"])
def test_quantizing_a_lazy_tensor_gives_the_bytes_of_quantizing_the_stored_tensor(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES[name.removesuffix(" unfused")]
    fusions = () if name.endswith(" unfused") else fuser.FUSIONS
    with on_kernels():
        found = trained(layer(fusions), recipe)
        made = set(launched)
        for quantizer in QUANTIZERS:
            monkeypatch.setattr(quantizer, "accepts_lazy", False)
        expected = trained(layer(fusions), recipe)
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        if tensor.endswith("bias"):
            # The same rounded values, summed tile by tile.
            torch.testing.assert_close(found[tensor], value)
        else:
            assert torch.equal(found[tensor], value), tensor
    in_forward = {"NormProducer", "PointwiseProducer"}
    in_backward = {"NormBackwardProducer", "PointwiseBackwardProducer"}
    assert in_forward <= made or recipe.backward_override == "high_precision"
    assert in_backward <= made or not recipe.quantizes_backward


@pytest.mark.parametrize("through_channel", [False, True])
def test_the_extra_input_of_a_chain_gets_the_plain_gradient_where_the_main_one_is_quantized(
    through_channel: bool,
) -> None:
    """Both gradients of a sum are the same; the linear before reads its own quantized."""

    def run(fusions: Any) -> tuple[dict[str, torch.Tensor], set[Any]]:
        torch.manual_seed(5)
        add = fuser.AddExtraInput()
        ops = [fuser.Linear(32, 32, bias=False, dtype=BF16), add, fuser.GELU()]
        extras = [leaf(random_tensor((32, 32), BF16, 2))]
        if through_channel:
            add.set_extra_input_channel(0, "x")
            made = fuser.MakeExtraOutput()
            ops.insert(0, made.set_extra_output_channel(0, "x", output_to_caller=False))
            extras = []
        model = oracles.randomize(fuser.Sequential(*ops, fusions=fusions))
        with fuser.autocast(recipe=RECIPES["mxfp8"]):
            found = oracles.run_module(model, leaf(random_tensor((32, 32), BF16, 1)), extras)
        return found, {step.fusion for step in model.plans[0].backward}

    with on_kernels():
        (expected, _), (found, fused) = run(()), run((PointwiseChain,))
    assert "PointwiseChain" in fused
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", RECIPES)
def test_shapes_that_no_block_divides_have_the_bits_of_a_plain_tensor_quantized(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On kernels, in calls that are launched, recorded and repeated."""
    recipe, shape = RECIPES[name], (3, 7, 24)
    with on_kernels():
        model = layer(fuser.FUSIONS, 24)
        found = [trained(copy.deepcopy(model), recipe, shape) for _ in range(4)]
        for quantizer in QUANTIZERS:
            monkeypatch.setattr(quantizer, "accepts_lazy", False)
        expected = trained(layer(ADDING_NORMS, 24), recipe, shape)
    for results in found:
        for tensor, value in expected.items():
            if tensor.endswith("bias"):
                torch.testing.assert_close(results[tensor], value)
            else:
                assert torch.equal(results[tensor], value), tensor


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_no_plan_on_kernels_has_a_quantize_kernel_after_a_norm_or_an_activation(
    recipe: Any,
) -> None:
    x, extra = (leaf(torch.empty(32, 32, dtype=BF16)) for _ in range(2))
    with on_kernels(), fuser.autocast(recipe=recipe):
        plan = layer(fuser.FUSIONS).plan(x, extra)
    kernels = [step.kernel for step in (*plan.forward, *plan.backward)]
    assert not [k for k in kernels if k.endswith(", quantize")], kernels
    with fuser.autocast(recipe=recipe):
        plan = layer(fuser.FUSIONS).plan(x, extra)
    on_cpu = [step.kernel for step in plan.forward]
    is_emitted = recipe.backward_override != "high_precision"
    assert any(k.endswith(", quantize") for k in on_cpu) == is_emitted


def test_a_group_reduces_the_amax_of_a_lazy_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, op, group: t.mul_(2))
    quantizer = fuser.Float8CurrentScalingQuantizer().bound_to("a group")
    stage = Stage("swiglu")
    x, dy = random_tensor((3, 16, 32), BF16, 1), random_tensor((3, 16, 16), BF16, 2)
    of_bias = ((Stage("bias"), stage), dy, x, (None, None), (True, False))
    with on_kernels():
        for make in (
            lambda: (pointwise.chain((stage,), x), [None, None]),
            lambda: pointwise.chain_backward(*of_bias, saved=1),
        ):
            (values, (dbias, _)), (other, (other_dbias, _)) = make(), make()
            assert isinstance(values, LazyTensor)
            found, expected = quantizer(values), quantizer(other.tensor())
            for name, buffer in expected.buffers().items():
                assert torch.equal(found.buffers()[name], buffer), name
            assert dbias is None or torch.equal(dbias, other_dbias)
            assert found.shape == expected.shape == values.shape


@pytest.mark.parametrize(
    "make",
    [
        fuser.NVFP4Quantizer,
        lambda: fuser.NVFP4Quantizer(with_rht=True),
        lambda: fuser.Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1)),
        lambda: fuser.Float8Quantizer(torch.full((1,), 999.0), torch.zeros(1), saturates=False),
    ],
    ids=["nvfp4", "nvfp4 transformed", "delayed", "delayed without saturation"],
)
def test_kernels_use_the_amax_of_a_group(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, op, group: t.mul_(2))
    x = random_tensor((32, 64), BF16, 1)
    other, one = make(), make()
    expected = other.bound_to("a group")(x)
    with on_kernels():
        found = one.bound_to("a group")(x)
    for name, buffer in expected.buffers().items():
        assert torch.equal(found.buffers()[name], buffer), name
    amax = x.abs().max().float() * 2
    if isinstance(one, fuser.Float8Quantizer):
        assert one.amax == other.amax == amax
    else:
        assert found._amax_rowwise == amax
    assert found._quantizer == found._quantizer.unbound()


def test_a_quantizer_of_the_user_gets_tensors() -> None:
    class Mine(fuser.MXFP8Quantizer):
        def buffers_of(self, rows: torch.Tensor) -> dict[str, torch.Tensor | None]:
            assert type(rows) is torch.Tensor
            return super().buffers_of(rows)

    recipe = recipes.CustomRecipe(qfactory=lambda role: Mine())
    with on_kernels(), fuser.autocast(recipe=recipe):
        model = fuser.Sequential(fuser.GELU(), fuser.Linear(32, 32, dtype=BF16))
        x = leaf(random_tensor((32, 32), BF16, 1))
        model(x).sum().backward()
        assert ", quantize" in str(model.plan(x))


@pytest.mark.parametrize("runs_kernels", [False, True])
def test_a_delayed_scale_may_have_no_dimensions_and_its_amax_is_raised(runs_kernels: bool) -> None:
    x = random_tensor((32, 32), BF16, 1)
    scale, amax = torch.tensor(2.0), torch.tensor(0.0)
    with on_kernels() if runs_kernels else contextlib.nullcontext():
        found = fuser.Float8Quantizer(scale, amax)(x)
        expected = fuser.Float8Quantizer(scale.reshape(1), torch.zeros(1))(x)
    assert torch.equal(found._data, expected._data)
    assert torch.equal(found._scale_inv, expected._scale_inv)
    assert amax.shape == ()
    assert amax == x.float().abs().max()
    scale.fill_(4.0)  # read at every call, from the caller's memory
    assert fuser.Float8Quantizer(scale, amax)(x)._scale_inv == 0.25
    with pytest.raises(
        fuser.InputError, match=said("fp8-float8quantizer-shape-element", "scale", (2,))
    ):
        fuser.Float8Quantizer(torch.ones(2), amax)


def test_empty_values_are_quantized_and_their_sums_are_zero() -> None:
    x, dy = torch.empty(0, 64, dtype=BF16), torch.empty(0, 32, dtype=BF16)
    with on_kernels():
        stages = (Stage("bias"), Stage("swiglu"))
        values, (dbias, _) = pointwise.chain_backward(
            stages, dy, x, (None, None), (True, False), saved=1
        )
        assert fuser.MXFP8Quantizer()(values).shape == (0, 64)
    assert torch.equal(dbias, torch.zeros(64, dtype=BF16))


def test_small_plain_activations_are_torchs_and_quantized_ones_are_not(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.BasicLinear(32, 32, dtype=BF16))
    x = random_tensor((32, 32), BF16, 0)
    with on_kernels():
        for few, quantized, expected in (
            (2**20, False, False),
            (0, False, True),
            (2**20, True, True),
        ):
            monkeypatch.setattr(pointwise, "FEW_ELEMENTS", few)
            launched.clear()
            with fuser.autocast(enabled=quantized, recipe=recipes.Float8CurrentScaling()):
                y = model(leaf(x))
            y.backward(random_tensor((32, 32), BF16, 1))
            assert any("pointwise" in name.lower() for name in launched) == expected
