"""Rows of the arguments of grouped linears, also of those with adapters of low rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import oracles
import torch
from argument_checks import (
    BF16,
    E4M3,
    FP32,
    QUANTIZED,
    TOLERANCES,
    Tracker,
    accumulates,
    agrees,
    agrees_quantized,
    fill,
    is_drawn_by_the_tracker,
    is_on_meta_until_its_first_call,
    leaves,
    near,
    parameters_are_in,
)
from argument_rows import Of, sets
from oracles import Formula, random_tensor
from rows_of_linears import check_dropout

import fuser

ROWS = 7
X = random_tensor((ROWS, 6), BF16, 1)
SCALES = random_tensor((ROWS,), BF16, 2)
SPLITS = ([5], [0, 5], [1, 2, 4])
"""Sizes of one group to three: one of no rows, of one row, and rows of no group."""


def grouped(given: dict[str, Any], *, rank: int = 0, factor: float = 1.0) -> Formula:
    """The formula of a grouped linear with these arguments; with a rank, of one with adapters."""
    options = {
        "bias": True,
        "single_grouped_weight": False,
        "single_grouped_bias": False,
        "scale_bias": False,
    }
    options.update({name: value for name, value in given.items() if name in options})

    def formula(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        sizes = rest[-2 if options["scale_bias"] and options["bias"] else -1].tolist()
        if not rank:
            y: torch.Tensor = oracles.grouped_linear(**options)(x, *rest)
            return y
        weights = 1 if options["single_grouped_weight"] else len(sizes)
        biases = (1 if options["single_grouped_bias"] else len(sizes)) * options["bias"]
        end = weights + biases
        a, b = rest[end : end + weights], rest[end + weights : end + 2 * weights]
        others = (*rest[:end], *rest[end + 2 * weights :])
        y = oracles.grouped_linear(**options)(x, *others)
        if options["single_grouped_weight"]:
            a, b = tuple(a[0]), tuple(b[0])
        parts = x.split([*sizes, len(x) - sum(sizes)])
        added = [part @ a[g].T @ b[g].T for g, part in enumerate(parts[:-1])]
        return y + factor * torch.cat([*added, y.new_zeros(len(parts[-1]), y.shape[1])])

    return formula


def check(
    make: Callable[..., Any],
    given: dict[str, Any],
    *,
    expected: dict[str, Any],
    rank: int = 0,
    factor: float = 1.0,
) -> None:
    """Compare for one, two and three groups, also quantized."""
    has_scales = expected.get("scale_bias", False) and expected.get("bias", True)
    extras = (SCALES,) if has_scales else ()
    formula = grouped(expected, rank=rank, factor=factor)
    for sizes in SPLITS:
        own = {"num_groups": len(sizes), **given}
        inputs = (X, torch.tensor(sizes), *extras)
        agrees(
            partial(make, **own),
            formula,
            *inputs,
            in_pipelines=len(sizes) == 3,
        )
        agrees_quantized(
            partial(make, **own),
            formula,
            *inputs,
            tolerance=1.5 * QUANTIZED if rank else QUANTIZED,  # of few rows, and few columns
            has_stored=not expected.get("single_grouped_weight", False),
        )


def _rows_of_both(name: str, others: dict[str, Any]) -> None:
    """Rows that ``GroupedLinear`` and ``LoRAGroupedLinear`` have."""
    cls: Any = getattr(fuser, name)
    path = f"fuser.{name}"
    rank = others.get("rank", 0)
    kinds = ("weight", "lora_A", "lora_B") if rank else ("weight",)

    def make(**given: Any) -> Any:
        return cls(**{"num_groups": 2, "in_features": 6, "out_features": 8, **others, **given})

    def shapes(op: Any) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in op.named_parameters()}

    @sets(
        path,
        num_groups=Of(2, instead=3),
        in_features=Of(6, instead=5),
        out_features=Of(8, instead=7),
    )
    def sizes_of_groups(given: dict[str, Any]) -> None:
        found = shapes(make(**given))
        assert {name: found[name] for name in found if "lora" not in name} == {
            "weight0": (8, 6),
            "weight1": (8, 6),
            "bias0": (8,),
            "bias1": (8,),
        }
        given = {name: size for name, size in given.items() if name != "num_groups"}
        check(make, given, expected={}, rank=rank)

    @sets(path, bias=False)
    def groups_without_bias(given: dict[str, Any]) -> None:
        assert not [name for name in shapes(make(**given)) if "bias" in name]
        check(make, given, expected={"bias": False}, rank=rank)

    @sets(path, single_grouped_weight=True)
    def one_weight_for_all_groups(given: dict[str, Any]) -> None:
        found = shapes(make(**given))
        assert found.get("weight") == (2, 8, 6)
        assert {name for name in found if "bias" not in name} == set(kinds)
        check(make, given, expected={"single_grouped_weight": True}, rank=rank)

    @sets(path, single_grouped_bias=True)
    def one_bias_for_all_groups(given: dict[str, Any]) -> None:
        found = shapes(make(**given))
        assert found.get("bias") == (2, 8)
        assert "bias0" not in found
        check(make, given, expected={"single_grouped_bias": True}, rank=rank)

    @sets(path, scale_bias=True)
    def rows_scale_their_bias(given: dict[str, Any]) -> None:
        check(make, given, expected={"scale_bias": True}, rank=rank)
        both = {"scale_bias": True, "single_grouped_bias": True}
        check(make, {**given, "single_grouped_bias": True}, expected=both, rank=rank)
        op = make(bias=False, **given)  # nothing is scaled
        assert op.num_extra_inputs == 1

    @sets(path, dtype=BF16)
    def dtype_of_groups(given: dict[str, Any]) -> None:
        for is_one in (False, True):
            op = make(single_grouped_weight=is_one, single_grouped_bias=is_one, **given)
            parameters_are_in(op, BF16)
            assert op(X, torch.tensor([3, 4])).dtype is BF16

    @sets(path, device="meta")
    def device_of_groups(given: dict[str, Any]) -> None:
        for is_one in (False, True):
            op = make(single_grouped_weight=is_one, single_grouped_bias=is_one, **given)
            inputs = (X.float(), torch.tensor([3, 4]))
            is_on_meta_until_its_first_call(op, *inputs)
            tensors = [p.detach().double() for p in op.parameters()]
            own = {"single_grouped_weight": is_one, "single_grouped_bias": is_one}
            exact = grouped(own, rank=rank)(X.double(), *tensors, inputs[1])
            near(op(*inputs), exact, TOLERANCES[FP32])
            assert float(exact.abs().max()) > 0


_rows_of_both("GroupedLinear", {})
_rows_of_both("LoRAGroupedLinear", {"rank": 2})


# -- GroupedLinear alone ----------------------------------------------------------------


def _weights(op: Any) -> list[Any]:
    return [p for name, p in op.named_parameters() if "weight" in name]


@sets("fuser.GroupedLinear", rng_state_tracker_function=Tracker)
def _a_tracker_draws_the_weights(given: dict[str, Any]) -> None:
    for groups in (1, 3):
        for is_one in (False, True):
            is_drawn_by_the_tracker(
                partial(
                    fuser.GroupedLinear, groups, 16, 128, single_grouped_weight=is_one, **given
                ),
                _weights,
            )


@sets("fuser.GroupedLinear", accumulate_into_main_grad=True)
def _weight_gradients_go_into_main_grad(given: dict[str, Any]) -> None:
    for is_one in (False, True):
        for sizes in ([5], [0, 5], [1, 2, 4]):
            accumulates(
                partial(
                    fuser.GroupedLinear, len(sizes), 6, 128, single_grouped_weight=is_one, **given
                ),
                grouped({"single_grouped_weight": is_one}),
                X,
                torch.tensor(sizes),
                weights=_weights,
            )


@sets("fuser.GroupedLinear", delay_wgrad_compute=True)
def _weight_gradients_come_later(given: dict[str, Any]) -> None:
    for dtype, tolerance, recipe in (
        (FP32, TOLERANCES[FP32], None),
        (BF16, TOLERANCES[BF16], None),
        (BF16, QUANTIZED, E4M3),
    ):
        for is_one in (False, True):
            check_delayed(
                partial(fuser.GroupedLinear, 2, 6, 8, single_grouped_weight=is_one, **given),
                grouped({"single_grouped_weight": is_one}),
                dtype,
                tolerance,
                recipe,
            )


def check_delayed(make: Any, formula: Formula, dtype: Any, tolerance: float, recipe: Any) -> None:
    """Two backwards leave two weight gradients, which come in order; others do not wait."""
    op, sizes = make(dtype=dtype), torch.tensor([3, 4])
    parameters = fill(op)
    weights = _weights(op)
    exact = [p.detach().double().requires_grad_() for p in parameters]
    calls = []
    op.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    totals = []
    for factor in (1.0, 2.0):
        (x,) = leaves([X.to(dtype)])
        x64 = x.detach().double().requires_grad_()
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            op(x, sizes).backward(factor * random_tensor((ROWS, 8), dtype, 5))
        formula(x64, *exact, sizes).backward(factor * random_tensor((ROWS, 8), dtype, 5).double())
        near(x.grad, x64.grad, tolerance)
        assert all(weight.grad is None for weight in weights)
        totals.append([p.grad.clone() for p in exact])
    for parameter, one in zip(parameters, exact, strict=True):
        if not any(parameter is weight for weight in weights):
            near(parameter.grad, one.grad, tolerance)
    for call, total in enumerate(totals):
        op.backward_dw()
        assert len(calls) == call + 1
        for parameter, one in zip(parameters, total, strict=True):
            if any(parameter is weight for weight in weights):
                near(parameter.grad, one, tolerance)


# -- LoRAGroupedLinear alone ------------------------------------------------------------


def _lora(**given: Any) -> Any:
    return fuser.LoRAGroupedLinear(
        **{"num_groups": 2, "in_features": 6, "out_features": 8, "rank": 2, **given}
    )


@sets("fuser.LoRAGroupedLinear", rank=Of(2, instead=3))
def _rank_of_each_group(given: dict[str, Any]) -> None:
    op = _lora(**given)
    for g in range(2):
        assert tuple(getattr(op, f"lora_A{g}").shape) == (2, 6)
        assert tuple(getattr(op, f"lora_B{g}").shape) == (8, 2)
    check(_lora, given, expected={}, rank=2)


@sets("fuser.LoRAGroupedLinear", alpha=5.0)
def _factor_of_each_group(given: dict[str, Any]) -> None:
    check(_lora, given, expected={}, rank=2, factor=2.5)
    for is_one in (False, True):
        op = _lora(single_grouped_weight=is_one, **given)
        fill(op)
        w, a, b = (
            torch.stack([p.detach().double() for n, p in op.named_parameters() if kind in n])
            for kind in ("weight", "lora_A", "lora_B")
        )
        exact = (w + 2.5 * b @ a).reshape(2, 8, 6)
        near(op.merged_weight(), exact, TOLERANCES[FP32])


@sets("fuser.LoRAGroupedLinear", dropout=0.5)
def _dropout_before_the_adapters_of_groups(given: dict[str, Any]) -> None:
    for dtype in TOLERANCES:
        for is_one in (False, True):
            op = fuser.LoRAGroupedLinear(
                2, 6, 6, rank=6, bias=False, dtype=dtype, single_grouped_weight=is_one, **given
            )
            adapters = [p for name, p in op.named_parameters() if "lora" in name]
            check_dropout(op, _weights(op), adapters, dtype, torch.tensor([0, 64]))
            assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in adapters)


@sets("fuser.LoRAGroupedLinear", adapter_dtype=FP32)
def _adapters_of_groups_in_another_dtype(given: dict[str, Any]) -> None:
    for is_one in (False, True):
        options = {"single_grouped_weight": is_one, "dtype": BF16}
        op = _lora(**options, **given)
        dtypes = {name: p.dtype for name, p in op.named_parameters()}
        assert {d for name, d in dtypes.items() if "lora" in name} == {FP32}
        assert {d for name, d in dtypes.items() if "lora" not in name} == {BF16}
        formula = grouped(options, rank=2)
        inputs = (X, torch.tensor([3, 4]))
        make = partial(_lora, single_grouped_weight=is_one, **given)
        agrees(make, formula, *inputs, dtypes=(BF16,))
        agrees_quantized(make, formula, *inputs)
        op(X, inputs[1]).sum().backward()
        assert {p.grad.dtype for name, p in op.named_parameters() if "lora" in name} == {FP32}
