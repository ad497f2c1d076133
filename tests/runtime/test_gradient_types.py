"""A gradient that leaves a pipeline is a plain tensor, whatever op computed it, however it ran."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.op import BasicOperation, OperationContext
from fuser.plan import cuts
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fuser.tensors import Float8CurrentScalingQuantizer

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

WIDTH, ROWS = 32, 64
BF16 = torch.bfloat16
RECIPES: tuple[Recipe, ...] = (
    Float8CurrentScaling(),
    DelayedScaling(amax_history_len=2),
    MXFP8BlockScaling(),
    Float8BlockScaling(),
    Float8RowwiseScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
)
QUANTIZER = Float8CurrentScalingQuantizer()


class QuantizedGradients(BasicOperation):
    """``y = (x + e) * weight`` of a user, with quantized gradients, and a view of one for ``e``."""

    num_extra_inputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH,), 1.5, dtype=BF16))

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        **others: Any,
    ) -> Any:
        ((extra,),) = basic_op_extra_inputs
        basic_op_ctxs[0].save_for_backward(input_, extra, self.weight)
        return (input_ + extra) * self.weight, [()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **others: Any
    ) -> Any:
        x, extra, weight = basic_op_ctxs[0].saved_tensors
        d_sum = grad_output * weight
        d_weight = QUANTIZER((grad_output * (x + extra)).sum(0))
        some_columns = QUANTIZER(torch.cat([d_sum, d_sum], 1))[:, :WIDTH]
        return QUANTIZER(d_sum), [(d_weight,)], [(some_columns,)]


def linear() -> fuser.Linear:
    return fuser.Linear(WIDTH, WIDTH, dtype=BF16)


def quantizing() -> fuser.Quantize:
    return fuser.Quantize(forward=False, backward=True)


def residual() -> list[torch.nn.Module]:
    start, end = fuser.MakeExtraOutput(), fuser.AddExtraInput()
    start.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    return [quantizing(), start, quantizing(), linear(), linear(), quantizing(), end, linear()]


# The ops that a pipeline begins with, before two linears.
FIRST: dict[str, Callable[[], Sequence[torch.nn.Module]]] = {
    "quantize": lambda: [fuser.Quantize(True, True)],
    "quantize the gradient": lambda: [quantizing()],
    "linear": lambda: [linear()],
    "activation": lambda: [fuser.GELU(), quantizing()],
    "norm": lambda: [fuser.RMSNorm(WIDTH, dtype=BF16), quantizing()],
    "identity": lambda: [fuser.Identity(), quantizing()],
    "extra input": lambda: [fuser.AddExtraInput(), quantizing()],
    "two extra inputs": lambda: [
        fuser.AddExtraInput(),
        linear(),
        fuser.AddExtraInput(),
        quantizing(),
    ],
    "residual": residual,
    "a user's op": lambda: [QuantizedGradients()],
}
Call = Callable[..., torch.Tensor]


def hooked(model: fuser.Sequential) -> Call:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def recomputed(use_reentrant: bool) -> Callable[[fuser.Sequential], Call]:
    return lambda model: lambda *inputs: checkpoint(model, *inputs, use_reentrant=use_reentrant)


WAYS: dict[str, Callable[[fuser.Sequential], Call]] = {
    "one node": lambda model: model,
    "cut": hooked,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "recomputed": recomputed(use_reentrant=False),
    "recomputed and cut": lambda model: recomputed(use_reentrant=True)(hooked(model)),
}


@pytest.fixture(autouse=True)
def small_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "FIRST_BYTES", 1)
    monkeypatch.setattr(cuts, "BUCKET_BYTES", 1)


def model_of(first: str) -> fuser.Sequential:
    torch.manual_seed(0)
    return fuser.Sequential(*FIRST[first](), linear(), linear())


def under(recipe: Recipe | None) -> Any:
    return contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe)


def inputs_of(first: str, seed: int = 0) -> list[torch.Tensor]:
    count = 1 + {"extra input": 1, "two extra inputs": 2, "a user's op": 1}.get(first, 0)
    return [
        oracles.random_tensor((ROWS, WIDTH), BF16, 10 * seed + number).requires_grad_()
        for number in range(count)
    ]


def all_plain(gradients: Iterable[torch.Tensor | None]) -> bool:
    return all(type(gradient) is torch.Tensor for gradient in gradients)


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=str)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("way", ["one node", "cut"])
def test_gradients_of_leaves_are_plain(first: str, way: str, recipe: Recipe | None) -> None:
    """And microbatches add up as torch adds plain tensors, without a rounding to a format."""
    model = model_of(first)
    call = WAYS[way](model)
    leaves = inputs_of(first)
    parts = []
    for step in range(3):
        dy = oracles.random_tensor((ROWS, WIDTH), BF16, 100 + step)
        with under(recipe):
            y = call(*leaves)
        # Under delayed scaling a second backward would have other scales.
        y.backward(dy)
        assert all_plain(leaf.grad for leaf in (*leaves, *model.parameters()))
        parts.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    again = model_of(first)
    call = WAYS[way](again)
    for step in range(3):
        dy = oracles.random_tensor((ROWS, WIDTH), BF16, 100 + step)
        with under(recipe):
            y = call(*leaves)
        y.backward(dy)
    for leaf, *gradients in zip(leaves, *parts, strict=True):
        assert type(leaf.grad) is torch.Tensor
        assert torch.equal(leaf.grad, gradients[0] + gradients[1] + gradients[2])


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=str)
@pytest.mark.parametrize("first", ["quantize", "two extra inputs", "residual", "a user's op"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_plain_however_a_pipeline_runs(first: str, way: str, recipe: Recipe) -> None:
    model = model_of(first)
    call = WAYS[way](model)
    leaves = inputs_of(first)
    with under(recipe):
        y = call(*leaves)
    y.backward(torch.ones_like(y))
    assert all_plain(leaf.grad for leaf in (*leaves, *model.parameters()))


@pytest.mark.parametrize("way", ["one node", "cut"])
def test_gradients_of_recorded_passes_are_plain(way: str) -> None:
    with on_kernels():
        model = model_of("quantize")
        call = WAYS[way](model)
        for _ in range(4):
            (x,) = inputs_of("quantize")
            with under(MXFP8BlockScaling()):
                y = call(x)
            y.backward(torch.ones_like(y))
            assert type(x.grad) is torch.Tensor


class Watch(torch.autograd.Function):
    """The identity of torch's autograd; it notes the type of its gradient."""

    seen: ClassVar[list[type]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Watch.seen.append(type(gradient))
        return gradient


@pytest.mark.parametrize("first", ["quantize", "two extra inputs", "residual", "a user's op"])
@pytest.mark.parametrize("way", ["one node", "cut"])
def test_whatever_takes_a_gradient_gets_a_plain_tensor(first: str, way: str) -> None:
    """An op of torch or a pipeline before it, hooks, and a caller of torch.autograd.grad."""
    model = model_of(first)
    call = WAYS[way](model)
    before = fuser.Sequential(linear(), fuser.GELU())
    leaves = inputs_of(first)
    Watch.seen, hook_types = [], []
    entering = [Watch.apply(leaf) for leaf in leaves]
    entering[0] = before(entering[0])
    for tensor in entering:
        tensor.retain_grad()
        tensor.register_hook(lambda gradient: hook_types.append(type(gradient)))
    with under(MXFP8BlockScaling()):
        y = call(*entering)
    found = torch.autograd.grad(y.sum(), [*entering, *leaves], retain_graph=True)
    y.sum().backward()
    assert all_plain([*found, *(tensor.grad for tensor in (*entering, *leaves))])
    assert {*Watch.seen, *hook_types} == {torch.Tensor}
    assert len(Watch.seen) == len(hook_types) == 2 * len(leaves)


@pytest.mark.parametrize("way", ["one node", "cut"])
def test_the_gradient_of_a_quantized_input_is_plain(way: str) -> None:
    model = model_of("linear")
    call = WAYS[way](model)
    with under(MXFP8BlockScaling()):
        quantized = fuser.Sequential(linear(), fuser.Quantize())(inputs_of("linear")[0])
        leaf = quantized.detach().requires_grad_()
        assert isinstance(leaf, fuser.QuantizedTensor)
        quantized.retain_grad()
        (call(quantized) + call(leaf)).sum().backward()
    assert all_plain([quantized.grad, leaf.grad])


@pytest.mark.parametrize("way", ["one node", "cut"])
@pytest.mark.parametrize("op", [fuser.Identity, fuser.MakeExtraOutput, fuser.AddExtraInput])
def test_a_quantized_gradient_of_a_caller_does_not_pass_through(
    op: Callable[[], torch.nn.Module], way: str
) -> None:
    model = fuser.Sequential(op())
    call = WAYS[way](model)
    leaves = inputs_of("extra input" if op is fuser.AddExtraInput else "linear")
    outputs = oracles.as_tuple(call(*leaves))
    dy = QUANTIZER(oracles.random_tensor((ROWS, WIDTH), BF16, 5))
    for gradient in torch.autograd.grad(outputs[:1], leaves, [dy]):
        assert type(gradient) is torch.Tensor
        assert torch.equal(gradient, dy.dequantize())
