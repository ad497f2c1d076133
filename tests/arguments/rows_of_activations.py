"""Rows of the arguments of activations, also of those with a scale for each row."""

from __future__ import annotations

from typing import Any

import oracles
import torch
from argument_checks import (
    BF16,
    FP32,
    TOLERANCES,
    agrees,
    agrees_quantized,
    fill,
    in_fp64,
    leaves,
    near,
    refuses,
    results,
    saved_by,
    untyped,
)
from argument_rows import Of, sets
from oracles import Formula, random_tensor

import fuser

X = random_tensor((6, 12), BF16, 1, 3.0)
SCALES = random_tensor((6,), BF16, 2)


def _clamped_swiglu(
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int | None = None,
) -> Formula:
    return oracles.clamped_swiglu(limit, alpha, glu_linear_offset, glu_interleave_size)


# By name of the class: the formula with arguments of the constructor.
GATED: dict[str, Any] = {
    "SwiGLU": lambda glu_interleave_size=None: oracles.gated(oracles.silu, glu_interleave_size),
    "SiTUGLU": lambda beta1=4.0, beta2=25.0, glu_interleave_size=None: oracles.situglu(
        beta1, beta2, glu_interleave_size
    ),
    "ClampedSwiGLU": _clamped_swiglu,
}
SCALED = {
    "ScaledSwiGLU": "SwiGLU",
    "ScaledSiTUGLU": "SiTUGLU",
    "ScaledClampedQGeGLU": "ClampedSwiGLU",
}
VALUES = {
    "glu_interleave_size": 2,
    "beta1": 1.5,
    "beta2": 2.5,
    "limit": 1.25,
    "alpha": 0.5,
    "glu_linear_offset": -0.5,
}


def _row_of_gated(name: str, argument: str) -> None:
    cls, value = getattr(fuser, name), VALUES[argument]
    formula = GATED[SCALED.get(name, name)](**{argument: value})
    extras: tuple[torch.Tensor, ...] = ()
    if name in SCALED:
        formula, extras = oracles.scaled(formula), (SCALES,)

    @sets(f"fuser.{name}", **{argument: value})
    def values_of_a_gated_activation(given: dict[str, Any]) -> None:
        agrees(untyped(cls, **given), formula, X, *extras)
        agrees_quantized(untyped(cls, **given), formula, X, *extras)


for _name in (*GATED, *SCALED):
    for _argument in VALUES:
        if _argument in GATED[SCALED.get(_name, _name)].__code__.co_varnames:
            _row_of_gated(_name, _argument)


@sets("fuser.GEGLU", approximate="none")
def _the_erf_form(given: dict[str, Any]) -> None:
    for dtype, is_seen in ((FP32, True), (BF16, False)):  # bf16 has three digits
        for cls, formula in (
            (fuser.GELU, oracles.gelu_erf),
            (fuser.GEGLU, oracles.gated(oracles.gelu_erf)),
        ):
            agrees(untyped(cls, **given), formula, X, dtypes=(dtype,))
            plan = str(fuser.Sequential(cls(**given)).plan(X.to(dtype)))
            assert ("_erf" in plan) or not is_seen


@sets("fuser.ScaledTanhSReLU", tanh_clamp_scale=Of(1.5, instead=3.0))
def _the_soft_bound(given: dict[str, Any]) -> None:
    formula = oracles.scaled(oracles.tanh_srelu(1.5))
    agrees(untyped(fuser.ScaledTanhSReLU, **given), formula, X, SCALES)
    agrees_quantized(untyped(fuser.ScaledTanhSReLU, **given), formula, X, SCALES)


# -- what an activation keeps -----------------------------------------------------------

CACHING: dict[str, dict[str, Formula]] = {
    "Activation": {
        cls.__name__: oracles.formula_of(cls().function)
        for cls in oracles.ACTIVATION_CLASSES
        if cls.__init__ is fuser.Activation.__init__
    },
    "GEGLU": {"GELU": oracles.gelu, "GEGLU": oracles.gated(oracles.gelu)},
    **{name: {name: formula()} for name, formula in GATED.items()},
}


def _in_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in E4M3 with one scale, by which the largest becomes 448."""
    scale = 448.0 / x.detach().float().abs().max()
    return (x.detach().float() * scale).to(torch.float8_e4m3fn).double() / scale.double()


def _row_of_caching(path: str, formulas: dict[str, Formula]) -> None:
    @sets(f"fuser.{path}", cache_quantized_input=True)
    def backward_reads_the_input_in_e4m3(given: dict[str, Any]) -> None:
        for name, formula in formulas.items():
            for dtype, tolerance in TOLERANCES.items():
                _check_caching(getattr(fuser, name)(**given), formula, dtype, tolerance)


def _check_caching(op: Any, formula: Formula, dtype: torch.dtype, tolerance: float) -> None:
    kept = saved_by(lambda: op(*leaves([X.to(dtype)])))
    assert [isinstance(tensor, fuser.QuantizedTensor) for tensor in kept] == [True]
    for factor in (1.0, 0.5):
        run = op if factor == 1.0 else fuser.Sequential(op, fuser.ConstantScale(factor))
        (x,) = leaves([X.to(dtype)])
        actual = results(run, [x], [x])
        (exact_x, rounded) = in_fp64([x, _in_e4m3(x)])
        near(actual["output 0"], factor * formula(exact_x), tolerance)
        exact = results(formula, [rounded], [rounded])
        near(actual["gradient 0"], factor * exact["gradient 0"], tolerance)


for _path, _formulas in CACHING.items():
    _row_of_caching(_path, _formulas)


RECOMPUTED: dict[str, tuple[Formula, dict[str, Any]]] = {
    "ScaledSReLU": (oracles.srelu, {}),
    "ScaledTanhSReLU": (oracles.tanh_srelu(3.0), {"tanh_clamp_scale": 3.0}),
    **{name: (GATED[plain](), {}) for name, plain in SCALED.items()},
}


def _row_of_recomputing(name: str, formula: Formula, others: dict[str, Any]) -> None:
    cls = getattr(fuser, name)

    @sets(f"fuser.{name}", activation_recompute_in_mlp=True)
    def experts_keep_no_activation(given: dict[str, Any]) -> None:
        refuses(
            lambda: cls(**others, **given)(*leaves([X.float(), SCALES.float()])),
            rf"{name}\(activation_recompute_in_mlp=True\) trains only inside",
        )
        with torch.no_grad():
            y = cls(**others, **given)(X.float(), SCALES.float())
        near(y, oracles.scaled(formula)(X.double(), SCALES.double()), TOLERANCES[FP32])
        for sizes in ([6], [2, 4], [0, 1, 4]):
            _check_experts(cls(**others, **given), formula, sizes)


def _check_experts(activation: Any, formula: Formula, sizes: list[int]) -> None:
    """Two grouped linears with the activation between them: it is not saved, and not missed."""
    with torch.no_grad():
        width = formula(torch.zeros(1, 12)).shape[-1]
    options = {"dtype": FP32, "bias": False, "single_grouped_weight": True}
    model = fuser.Sequential(
        fuser.GroupedLinear(len(sizes), 5, 12, **options),
        activation,
        fuser.GroupedLinear(len(sizes), width, 5, **options),
    )
    parameters = fill(model, 0.5)
    splits = torch.tensor(sizes)
    x, scales = leaves([random_tensor((6, 5), FP32, 7), SCALES.float()])
    shapes = [tuple(t.shape) for t in saved_by(lambda: model(x, splits, scales, splits))]
    assert (6, 5) in shapes
    assert (6, 12) in shapes
    if width != 12:
        assert (6, width) not in shapes
    else:
        assert shapes.count((6, 12)) == 1  # the activation's input
    actual = results(model, [x, splits, scales, splits], [x, *parameters, scales])

    def plain(x: torch.Tensor, up: Any, down: Any, scales: Any) -> torch.Tensor:
        rows = [
            (formula(rows @ up[g].T) * own[:, None]) @ down[g].T
            for g, (rows, own) in enumerate(zip(x.split(parts), scales.split(parts), strict=True))
            if g < len(sizes)
        ]
        return torch.cat([*rows, x.new_zeros(6 - sum(sizes), 5)])

    parts = [*sizes, 6 - sum(sizes)]
    tensors = in_fp64([x, *parameters, scales])
    exact = results(plain, tensors, tensors)
    for key, tensor in exact.items():
        near(actual[key], tensor, 10 * TOLERANCES[FP32], name=key)


for _name, (_formula, _others) in RECOMPUTED.items():
    _row_of_recomputing(_name, _formula, _others)
