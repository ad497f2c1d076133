"""Rows of the arguments of pipelines, fused ops, collectives, and ops without parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import oracles
import torch
from argument_checks import (
    BF16,
    E4M3,
    FP32,
    TOLERANCES,
    added,
    added_in_backward,
    agrees,
    agrees_quantized,
    gathered,
    leaves,
    rank_0_of_2,
    refuses,
    saved_by,
    scattered,
    untyped,
)
from argument_rows import Of, ignores, sets
from oracles import Formula, random_tensor
from torch.testing import assert_close

import fuser

X = random_tensor((4, 6), BF16, 1)
ALONE = "the group of one rank"
"""Stands for a group that there is only while the check runs."""


@sets("fuser.ConstantScale", scale=Of(-1.25, instead=1.0))
def _factor_of_a_scale(given: dict[str, Any]) -> None:
    def formula(x: torch.Tensor) -> torch.Tensor:
        return -1.25 * x

    agrees(untyped(fuser.ConstantScale, **given), formula, X)
    agrees_quantized(untyped(fuser.ConstantScale, **given), formula, X)
    agrees(  # in fusions of a linear, which take the scale into their products
        lambda dtype: fuser.Sequential(
            fuser.BasicLinear(6, 8, dtype=dtype),
            fuser.ConstantScale(**given),
            fuser.AddExtraInput(),
        ),
        lambda x, weight, extra: formula(x @ weight.T) + extra,
        X,
        random_tensor((4, 8), BF16, 3),
    )


@sets("fuser.Dropout", p=Of(0.25, instead=0.75))
def _probability_of_zeros(given: dict[str, Any]) -> None:
    op = fuser.Dropout(**given)
    for dtype, factor in ((FP32, 1.0), (BF16, 1.0), (FP32, 0.5)):
        run = fuser.Sequential(op, fuser.ConstantScale(factor)) if factor != 1.0 else op
        (x,) = leaves([1 + random_tensor((64, 32), BF16, 3).abs().to(dtype)])
        y = run(x)
        is_kept = y != 0
        assert 0.7 < float(is_kept.float().mean()) < 0.8
        exact = factor * x.double() * is_kept / 0.75
        assert_close(y.double(), exact, rtol=TOLERANCES[dtype], atol=0.0)
        y.backward(torch.ones_like(y))
        mask = factor * is_kept.double() / 0.75
        assert_close(x.grad.double(), mask, rtol=TOLERANCES[dtype], atol=0.0)
    assert torch.equal(op.eval()(x), x)
    assert torch.equal(fuser.Dropout(1.0)(x), torch.zeros_like(x))


@sets("fuser.Reshape", shape=Of((3, -1), instead=(2, 12)))
def _shape_of_the_output(given: dict[str, Any]) -> None:
    agrees(untyped(fuser.Reshape, **given), lambda x: x.reshape(3, 8), X)
    agrees_quantized(untyped(fuser.Reshape, **given), lambda x: x.reshape(3, 8), X)
    refuses(lambda: fuser.Reshape(**given)(torch.zeros(4)), "do not fit")


# -- Quantize ---------------------------------------------------------------------------


def _in_e4m3(x: torch.Tensor) -> torch.Tensor:
    scale = 448.0 / x.detach().float().abs().max()
    return (x.detach().float() * scale).to(torch.float8_e4m3fn).float() / scale


def _quantized(
    given: dict[str, Any],
) -> tuple[Any, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Output, input, gradient of the input, and of the output, of ``Quantize`` alone."""
    (x,) = leaves([random_tensor((4, 6), FP32, 3)])
    grad = random_tensor((4, 6), FP32, 4)
    with fuser.autocast(recipe=E4M3):
        y = fuser.Quantize(**given)(x)
        y.backward(grad)
    return y, x, x.grad, grad


@sets("fuser.Quantize", forward=False)
def _values_are_not_quantized(given: dict[str, Any]) -> None:
    y, x, dx, grad = _quantized({"forward": True})
    assert isinstance(y, fuser.QuantizedTensor)
    assert_close(y.dequantize(), _in_e4m3(x))
    y, x, dx, grad = _quantized(given)
    assert type(y) is torch.Tensor
    assert torch.equal(y, x)
    assert torch.equal(dx, grad)


@sets("fuser.Quantize", backward=True)
def _gradients_are_quantized(given: dict[str, Any]) -> None:
    for forward in (True, False):
        _, _, dx, grad = _quantized({"forward": forward, **given})
        assert_close(dx, _in_e4m3(grad))
        assert not torch.equal(dx, grad)


# -- communication ----------------------------------------------------------------------

COLLECTIVES: tuple[tuple[Any, Formula, str], ...] = (
    (fuser.AllGather, gathered, "all-gather"),
    (fuser.ReduceScatter, scattered, "reduce-scatter"),
    (fuser.AllReduce, added, "all-reduce"),
)


def _row_of_a_group(path: str, *cases: tuple[Any, Formula, str]) -> None:
    @sets(path, process_group=ALONE)
    def the_group_communicates(given: dict[str, Any]) -> None:
        with rank_0_of_2() as alone:
            for op, formula, kind in cases:
                agrees(untyped(op), formula, X)
                agrees_quantized(untyped(op), formula, X)
                own = {"process_group": alone} if given else given
                assert op(**own).process_group is alone
                agrees(untyped(op, **own), lambda x: x * 1, X)
                assert kind not in str(fuser.Sequential(op(**own)).plan(X.float()))


_row_of_a_group("fuser.AllGather", *COLLECTIVES[:2])
_row_of_a_group("fuser.AllReduce", COLLECTIVES[2])


@sets("fuser.AllReduce", reduce_in_backward=True)
def _gradients_of_all_ranks_are_added(given: dict[str, Any]) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return added_in_backward(added(x))

    def formula(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with rank_0_of_2():
        agrees(untyped(fuser.AllReduce, **given), formula, X)
        agrees_quantized(untyped(fuser.AllReduce, **given), formula, X)
        plan = fuser.Sequential(fuser.AllReduce(**given)).plan(X.float().requires_grad_())
        assert "all-reduce grad_input (2 ranks" in str(plan)


for _op in ("AddExtraInput", "MakeExtraOutput"):
    ignores(f"fuser.{_op}", "a tensor of the caller is never changed", "in_place")


# -- pipelines --------------------------------------------------------------------------


class AddsOne(fuser.FusedOperation):
    """A fusion that is wrong, so that a pipeline which uses it is off by one."""

    window = (fuser.ConstantScale, fuser.ConstantScale)
    side = "forward"

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: torch.Tensor, **rest: Any
    ) -> tuple[torch.Tensor, list[tuple[()]]]:
        y: torch.Tensor = input_
        for op in self.basic_ops:
            y = y * op.scale
        return y + 1, [() for _ in self.basic_ops]


def _of_scales(make: Callable[..., Any]) -> None:
    """A pipeline of three ops of which the first two are fused, and then the last two."""
    for ops, steps in (
        ([fuser.ConstantScale(2.0), fuser.ConstantScale(3.0), fuser.GELU()], (2, 1)),
        ([fuser.GELU(), fuser.ConstantScale(2.0), fuser.ConstantScale(3.0)], (1, 2)),
    ):
        pipeline = make(ops)
        (x,) = leaves([X.float()])
        y = pipeline(x)
        gelu = oracles.gelu(x.detach())
        is_first = steps == (2, 1)
        exact = oracles.gelu(6 * x.detach() + 1) if is_first else 6 * gelu + 1
        assert_close(y.detach(), exact)
        assert [len(step.ops) for step in pipeline.plans[0].forward] == list(steps)


@sets("fuser.Sequential", fusions=(AddsOne,))
def _fusions_of_a_container(given: dict[str, Any]) -> None:
    _of_scales(lambda ops: fuser.Sequential(*ops, **given))
    model = fuser.Sequential(*(fuser.ConstantScale(2.0) for _ in range(2)), **given)
    for same in (model[:], model.__add__([]), 1 * model):
        assert_close(same(X.float()), 4 * X.float() + 1)
    assert_close(fuser.Sequential(model, fuser.Identity())(X.float()), 4 * X.float() + 1)


@sets("fuser.OperationFuser", fusions=(AddsOne,))
def _fusions_of_a_pipeline(given: dict[str, Any]) -> None:
    _of_scales(lambda ops: fuser.OperationFuser(ops, **given))


@sets("fuser.OperationFuser", ops=Of("a scale and a composite", instead="the scale alone"))
def _ops_of_a_pipeline(given: dict[str, Any]) -> None:
    def make(dtype: torch.dtype) -> Any:
        ops: list[Any] = [fuser.ConstantScale(2.0)]
        if given["ops"] != "the scale alone":
            ops = [*ops, fuser.Linear(6, 8, dtype=dtype), fuser.GELU()]
        return _Module(fuser.OperationFuser(**{**given, "ops": iter(ops)}), ops)

    agrees(
        make, lambda x, w, b: oracles.gelu(oracles.linear_bias(2 * x, w, b)), X, in_pipelines=False
    )
    names = [type(op).__name__ for op in make(FP32).pipeline.basic_ops]
    assert names == ["ConstantScale", "BasicLinear", "Bias", "GELU"]
    refuses(lambda: fuser.OperationFuser(torch.nn.Sequential(torch.nn.ReLU())), "got ReLU")


class _Module(torch.nn.Module):
    """A pipeline with the parameters of its ops."""

    def __init__(self, pipeline: Any, ops: list[Any]) -> None:
        super().__init__()
        self.pipeline, self.ops = pipeline, torch.nn.ModuleList(ops)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.pipeline(*inputs)


@sets("fuser.OperationFuser", open_channels=("a", "b"))
def _channels_with_an_end_outside(given: dict[str, Any]) -> None:
    def ops(channels: str = "ab") -> list[Any]:
        first = fuser.MakeExtraOutput().set_extra_output_channel(
            0, channels[0], output_to_caller=False
        )
        last = fuser.AddExtraInput().set_extra_input_channel(0, channels[-1])
        return [first, fuser.ConstantScale(3.0), last]

    def formula(x: torch.Tensor, extra: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 3 * x + extra, x * 1

    extra = random_tensor(X.shape, BF16, 3)
    agrees(
        untyped(_Module, fuser.OperationFuser(ops(), **given), ops()),
        formula,
        X,
        extra,
        in_pipelines=False,
    )
    refuses(lambda: fuser.OperationFuser(ops("bc"), **given), "c")
    inside = fuser.OperationFuser(ops("c"), **given)
    assert_close(inside(X.float()), 4 * X.float())


@sets("fuser.FusedOperation", basic_ops=Of("three ops", instead="two of them"))
def _ops_of_a_fused_op(given: dict[str, Any]) -> None:
    def make(dtype: torch.dtype) -> Any:
        ops = [fuser.BasicLinear(6, 8, dtype=dtype), fuser.Bias(8, dtype=dtype), fuser.GELU()]
        return fuser.FusedOperation(ops if given["basic_ops"] == "three ops" else ops[:2])

    agrees(make, lambda x, w, b: oracles.gelu(oracles.linear_bias(x, w, b)), X)
    agrees_quantized(make, lambda x, w, b: oracles.gelu(oracles.linear_bias(x, w, b)), X)
    refuses(lambda: fuser.FusedOperation([]), "no basic ops")


# -- what a container keeps -------------------------------------------------------------

LOSSY = fuser.activation_memory_budget(1, lossy_activation_inputs=True)


@sets("fuser.Sequential", memory_budget=0)
def _a_budget_of_zero_keeps_the_inputs(given: dict[str, Any]) -> None:
    for dtype, recipe in ((FP32, None), (BF16, E4M3)):
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            assert _kept(dtype, **given) == {(4, 6): 1}  # x
            hidden, wide, narrow = (4, 6), (4, 16), (4, 8)
            assert _kept(dtype) == {hidden: 1, wide: 1}  # that of the norm, of the activation
            everything = fuser.activation_memory_budget(None)
            assert _kept(dtype, memory_budget=everything) == {hidden: 2, wide: 1, narrow: 1}
            assert _kept(dtype, memory_budget=LOSSY) == {hidden: 1, wide: 1}
    agrees(partial(_block, **given), _block_formula, X)
    agrees_quantized(partial(_block, **given), _block_formula, X)
    model = _block(FP32, **given)
    for same in (model[:], model.__add__([]), 1 * model):
        assert same.memory_budget is model.memory_budget
    refuses(lambda: fuser.Sequential(memory_budget=0.5), "0.5")


def _kept(dtype: torch.dtype, **options: Any) -> Counter[tuple[int, ...]]:
    """Shapes of the tensors of four rows that a block keeps, and how many there are of each."""
    model = _block(dtype, **options)
    kept = saved_by(lambda: model(*leaves([X.to(dtype)])))
    return Counter(tuple(t.shape) for t in kept if len(t) == 4 and t.numel() > 4)


def _block(dtype: torch.dtype, **options: Any) -> fuser.Sequential:
    return fuser.Sequential(
        fuser.RMSNorm(6, dtype=dtype),
        fuser.Linear(6, 16, dtype=dtype),
        fuser.SwiGLU(),
        fuser.Linear(8, 6, dtype=dtype),
        **options,
    )


def _block_formula(x: torch.Tensor, gain: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> torch.Tensor:
    hidden = oracles.linear_bias(oracles.rmsnorm()(x, gain), w1, b1)
    y: torch.Tensor = oracles.linear_bias(oracles.gated(oracles.silu)(hidden), w2, b2)
    return y
