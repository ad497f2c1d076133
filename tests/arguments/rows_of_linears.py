"""Rows of the arguments of linears, biases, and linears with adapters of low rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import oracles
import torch
from argument_checks import (
    BF16,
    FP32,
    QUANTIZED,
    TOLERANCES,
    Tracker,
    accumulates,
    added,
    added_in_backward,
    agrees,
    agrees_quantized,
    gathered,
    is_drawn_by_the_tracker,
    is_on_meta_until_its_first_call,
    leaves,
    near,
    parameters_are_in,
    rank_0_of_2,
    refuses,
    scattered,
)
from argument_rows import Of, sets
from oracles import Formula, random_tensor

import fuser

X = random_tensor((4, 6), BF16, 1)
ALONE = "the group of one rank"
"""Stands for a group that there is only while the check runs."""


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _linears(name: str, formula: Formula) -> None:
    """Rows that ``BasicLinear`` and ``Linear`` have."""
    cls: Callable[..., Any] = getattr(fuser, name)
    path = f"fuser.{name}"
    has_bias = name == "Linear"

    @sets(path, in_features=Of(6, instead=5), out_features=Of(8, instead=7))
    def sizes_of_a_linear(given: dict[str, Any]) -> None:
        sizes = {"in_features": 6, "out_features": 8, **given}
        assert tuple(cls(**sizes).weight.shape) == (8, 6)
        agrees(partial(cls, **sizes), formula, X)
        agrees_quantized(partial(cls, **sizes), formula, X, has_stored=True)
        refuses(lambda: cls(**sizes)(torch.zeros(4, 5)), "its last dimension must be 6")

    @sets(path, device="meta")
    def device_of_a_linear(given: dict[str, Any]) -> None:
        op = cls(6, 8, **given)
        is_on_meta_until_its_first_call(op, X.float())
        tensors = [X.double(), *(p.detach().double() for p in op.parameters())]
        near(op(X.float()), formula(*tensors), TOLERANCES[FP32])

    @sets(path, dtype=BF16)
    def dtype_of_a_linear(given: dict[str, Any]) -> None:
        op = cls(6, 8, **given)
        parameters_are_in(op, BF16)
        assert op(X).dtype is BF16

    @sets(path, tensor_parallel_mode="column")
    def each_rank_has_a_part_of_the_weight(given: dict[str, Any]) -> None:
        for mode, shape in (("column", (4, 6)), ("row", (8, 3))):
            own = {"tensor_parallel_mode": mode} if given else given
            with rank_0_of_2():
                op = cls(6, 8, **own)
                assert tuple(op.weight.shape) == shape
                assert f"{mode} parallel over 2 ranks" in repr(op)
                is_row = mode == "row"
                if has_bias:
                    assert tuple(op.bias.shape) == ((8,) if is_row else (4,))
                check_parallel(
                    partial(cls, 6, 8, **own),
                    (_same, added) if is_row else (added_in_backward, _same),
                    X[:, : shape[1]],
                )

    def check_parallel(make: Any, communication: tuple[Formula, Formula], x: torch.Tensor) -> None:
        """Between two communications the product and the bias, which the twin adds too."""
        before, after = communication

        def of_ranks(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
            return after(formula(before(x), *parameters))

        agrees(make, of_ranks, x)
        agrees_quantized(make, of_ranks, x)

    @sets(path, tensor_parallel_group=ALONE)
    def ranks_of_a_linear(given: dict[str, Any]) -> None:
        with rank_0_of_2() as alone:
            own = {"tensor_parallel_group": alone} if given else given
            for mode in ("column", "row"):
                op = cls(6, 8, tensor_parallel_mode=mode, **own)
                assert tuple(op.weight.shape) == (8, 6)
                assert "ranks" not in str(fuser.Sequential(op).plan(X.float().requires_grad_()))
                agrees(
                    partial(cls, 6, 8, tensor_parallel_mode=mode, **own),
                    formula,
                    X,
                )

    @sets(path, sequence_parallel=True)
    def rows_of_a_sequence_are_sharded(given: dict[str, Any]) -> None:
        refuses(lambda: cls(6, 8, **given), "sequence_parallel")
        with rank_0_of_2():
            for mode, communication, forward, backward in (
                ("column", (gathered, _same), "all-gather input", "reduce-scatter grad_input"),
                ("row", (_same, scattered), "reduce-scatter output", "all-gather grad_output"),
            ):

                def make(dtype: torch.dtype, mode: str = mode) -> Any:
                    return cls(6, 8, dtype=dtype, tensor_parallel_mode=mode, **given)

                op = make(FP32)
                x = X[:, : op.weight.shape[1]]
                plan = str(fuser.Sequential(op).plan(x.float().requires_grad_()))
                sides = plan.partition("  backward ")
                assert f"{forward} (2 ranks" in sides[0]
                assert f"{backward} (2 ranks" in sides[2]
                check_parallel(make, communication, x)

    @sets(path, rng_state_tracker_function=Tracker)
    def a_tracker_draws_the_weight(given: dict[str, Any]) -> None:
        is_drawn_by_the_tracker(lambda: cls(32, 16, **given), lambda op: [op.weight])

    @sets(path, accumulate_into_main_grad=True)
    def the_weight_gradient_goes_into_main_grad(given: dict[str, Any]) -> None:
        accumulates(
            partial(cls, 6, 8, **given),
            formula,
            X,
            weights=lambda op: [op.weight],
        )
        accumulates(  # in a fusion of the linear with the addition
            lambda dtype: fuser.Sequential(
                cls(6, 8, dtype=dtype, **given), fuser.Bias(8, dtype=dtype), fuser.SiLU()
            ),
            lambda x, *others: oracles.silu(formula(x, *others[:-1]) + others[-1]),
            X,
            weights=lambda model: [model[0].weight],
        )


_linears("BasicLinear", oracles.linear)
_linears("Linear", oracles.linear_bias)


@sets("fuser.Linear", bias=False)
def _a_linear_without_bias(given: dict[str, Any]) -> None:
    op = fuser.Linear(6, 8, **given)
    assert op.bias is None
    assert [name for name, _ in op.named_parameters()] == ["basic_ops.0.weight"]
    agrees(partial(fuser.Linear, 6, 8, **given), oracles.linear, X)
    agrees_quantized(partial(fuser.Linear, 6, 8, **given), oracles.linear, X, has_stored=True)


# -- Bias -------------------------------------------------------------------------------


@sets("fuser.Bias", size=Of(6, instead=5))
def _size_of_a_bias(given: dict[str, Any]) -> None:
    assert torch.equal(fuser.Bias(**given).bias, torch.zeros(6))
    agrees(partial(fuser.Bias, **given), oracles.bias, X)
    agrees_quantized(partial(fuser.Bias, **given), oracles.bias, X)
    refuses(lambda: fuser.Bias(**given)(torch.zeros(4, 5)), "its last dimension must be 6")


@sets("fuser.Bias", device="meta")
def _device_of_a_bias(given: dict[str, Any]) -> None:
    op = fuser.Bias(6, **given)
    is_on_meta_until_its_first_call(op, X.float())
    assert torch.equal(op(X.float()), X.float())


@sets("fuser.Bias", dtype=BF16)
def _dtype_of_a_bias(given: dict[str, Any]) -> None:
    op = fuser.Bias(6, **given)
    parameters_are_in(op, BF16)
    assert op(X).dtype is BF16


@sets("fuser.Bias", tensor_parallel=True)
def _each_rank_has_a_part_of_the_bias(given: dict[str, Any]) -> None:
    with rank_0_of_2():
        op = fuser.Bias(12, **given)
        assert tuple(op.bias.shape) == (6,)
        assert "parallel over 2 ranks" in repr(op)
        agrees(partial(fuser.Bias, 12, **given), oracles.bias, X)
        agrees_quantized(partial(fuser.Bias, 12, **given), oracles.bias, X)
        refuses(lambda: fuser.Bias(5, **given), "5")


@sets("fuser.Bias", tensor_parallel_group=ALONE)
def _ranks_of_a_bias(given: dict[str, Any]) -> None:
    with rank_0_of_2() as alone:
        own = {"tensor_parallel_group": alone} if given else given
        agrees(partial(fuser.Bias, 6, tensor_parallel=True, **own), oracles.bias, X)


# -- LoRALinear -------------------------------------------------------------------------


def lora(scale: float = 1.0, *, has_bias: bool = True) -> Formula:
    def formula(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        a, b = rest[-2:]
        y = x @ weight.T + scale * (x @ a.T) @ b.T
        return y + rest[0] if has_bias else y

    return formula


def _lora(given: dict[str, Any], **others: Any) -> Callable[..., Any]:
    sizes = {"in_features": 6, "out_features": 8, "rank": 2, **others}
    return partial(fuser.LoRALinear, **{**sizes, **given})


@sets(
    "fuser.LoRALinear",
    in_features=Of(6, instead=5),
    out_features=Of(8, instead=7),
    rank=Of(2, instead=3),
)
def _sizes_of_adapters(given: dict[str, Any]) -> None:
    op = _lora(given)(dtype=FP32)
    shapes = {name: tuple(parameter.shape) for name, parameter in op.named_parameters()}
    assert shapes == {"weight": (8, 6), "bias": (8,), "lora_A": (2, 6), "lora_B": (8, 2)}
    agrees(_lora(given), lora(), X)
    agrees_quantized(_lora(given), lora(), X, has_stored=True)


@sets("fuser.LoRALinear", alpha=5.0)
def _factor_of_the_adapters(given: dict[str, Any]) -> None:
    agrees(_lora(given), lora(2.5), X)
    agrees_quantized(_lora(given), lora(2.5), X, has_stored=True)
    op = _lora(given)(dtype=FP32)
    with torch.no_grad():
        op.lora_B.fill_(0.25)
    exact = op.weight.double() + 2.5 * op.lora_B.double() @ op.lora_A.double()
    near(op.merged_weight(), exact, TOLERANCES[FP32])


@sets("fuser.LoRALinear", dropout=0.5)
def _dropout_before_adapters(given: dict[str, Any]) -> None:
    for dtype in TOLERANCES:
        op = fuser.LoRALinear(6, 6, rank=6, bias=False, dtype=dtype, **given)
        check_dropout(op, [op.weight], [op.lora_A, op.lora_B], dtype)


def check_dropout(
    op: Any,
    frozen: list[torch.Tensor],
    adapters: list[torch.Tensor],
    dtype: torch.dtype,
    *extras: Any,
) -> None:
    """With adapters that are the identity, and weights of zero, the output is the dropout."""
    with torch.no_grad():
        for weight in frozen:
            weight.zero_()
        for adapter in adapters:
            adapter.copy_(torch.eye(6).expand_as(adapter))
    (x,) = leaves([1 + random_tensor((64, 6), BF16, 3).abs().to(dtype)])
    y = op(x, *extras)
    is_kept = y != 0
    assert 0.3 < float(is_kept.float().mean()) < 0.7
    torch.testing.assert_close(y, 2 * x * is_kept)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, 2 * is_kept.to(dtype))
    torch.testing.assert_close(op.eval()(x, *extras), x.detach())


@sets("fuser.LoRALinear", bias=False)
def _adapters_without_bias(given: dict[str, Any]) -> None:
    assert "bias" not in _lora(given)(dtype=FP32).state_dict()
    agrees(_lora(given), lora(has_bias=False), X)
    agrees_quantized(_lora(given), lora(has_bias=False), X, has_stored=True)


@sets("fuser.LoRALinear", device="meta")
def _device_of_adapters(given: dict[str, Any]) -> None:
    op = _lora(given)(dtype=FP32)
    is_on_meta_until_its_first_call(op, X.float())
    assert torch.equal(op.lora_B, torch.zeros(8, 2))
    near(op(X.float()), X.double() @ op.weight.double().T, TOLERANCES[FP32])


@sets("fuser.LoRALinear", dtype=BF16)
def _dtype_of_adapters(given: dict[str, Any]) -> None:
    op = fuser.LoRALinear(6, 8, rank=2, **given)
    parameters_are_in(op, BF16)
    assert op(X).dtype is BF16


@sets("fuser.LoRALinear", adapter_dtype=FP32)
def _adapters_in_another_dtype(given: dict[str, Any]) -> None:
    op = _lora(given)(dtype=BF16)
    assert {p.dtype for p in (op.weight, op.bias)} == {BF16}
    assert {p.dtype for p in (op.lora_A, op.lora_B)} == {FP32}
    agrees(_lora(given), lora(), X, dtypes=(BF16,))
    agrees_quantized(_lora(given), lora(), X, has_stored=True)
    # Products with adapters of fp32 do not round to bf16: 1 + 2^-10 is one there.
    with torch.no_grad():
        op.weight.zero_()
        op.bias.zero_()
        op.lora_A.fill_(1 + 2**-10)
        op.lora_B.fill_(1.0)
    y = op(torch.ones(1, 6, dtype=BF16))
    assert y.dtype is BF16
    near(y, torch.full((1, 8), 12.0).double(), QUANTIZED)
    y.sum().backward()
    assert op.lora_A.grad.dtype is FP32
    exact = torch.full((8, 2), 6 * (1 + 2**-10)).double()
    near(op.lora_B.grad, exact, TOLERANCES[FP32])
