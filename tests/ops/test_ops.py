"""Every basic op alone: values and gradients against fp64, and what it promises its caller."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import (
    ACTIVATIONS,
    CASES,
    DTYPES,
    NORMS,
    SCALED_ACTIVATIONS,
    Case,
    Draw,
    as_tuple,
    assert_no_worse_than_torch,
    case,
    leaf,
    params_of,
    random_tensor,
    randomize,
    run_autocast_formula,
    run_formula,
    run_module,
)
from said import holds, said

import fuser
from fuser.basic_ops import basic_linear, pointwise_ops
from fuser.basic_ops.activation import ScaledActivation
from fuser.fused_ops import linear
from fuser.reference import activation
from fuser.specs import TensorSpec

LEADING = {"2-D": (6,), "3-D": (2, 3), "one-row": (1,), "1-D": (), "odd": (13,)}
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
# One row holds few values, and the worst of few errors says little.
DRAWS, ONE_ROW_DRAWS = range(8), range(16)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


every_op = pytest.mark.parametrize("op_case", CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=short)


def made(op_case: Case, dtype: torch.dtype) -> torch.nn.Module:
    return randomize(op_case.make(dtype))


def main_input(
    op_case: Case, dtype: torch.dtype, leading: tuple[int, ...] = (4,), seed: int = 3
) -> torch.Tensor:
    return random_tensor((*leading, *op_case.shape), dtype, seed, op_case.spread)


def extra_inputs(op_case: Case, x: torch.Tensor, seed: int = 7) -> list[torch.Tensor]:
    """The extra inputs that the op takes with a main input ``x``."""
    if op_case.extra is None:
        return []
    shape = x.shape if op_case.extra == "same" else x.shape[:-1]
    return [random_tensor(shape, x.dtype, seed)]


def by_name(
    x: torch.Tensor, op: torch.nn.Module, extras: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Every tensor of a call by name, in the order of the formula's arguments."""
    return {"x": x, **params_of(op), **{f"extra {k}": t for k, t in enumerate(extras)}}


def draw(op_case: Case, op: torch.nn.Module, x: torch.Tensor, seed: int = 7) -> Draw:
    """Run ``op`` and its formula on ``x`` as it lies in memory."""
    extras = extra_inputs(op_case, x, seed)
    tensors = by_name(x, op, extras)
    return Draw(
        run_module(op, x.detach().requires_grad_(), [leaf(e) for e in extras]),
        run_formula(op_case.plain, tensors, x.dtype),
        run_formula(op_case.formula, tensors, torch.float64),
    )


# -- values and gradients ----------------------------------------------------------


@pytest.mark.sampled
@every_op
@every_dtype
@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING)
def test_output_and_every_gradient_are_no_worse_than_torch(
    op_case: Case, dtype: torch.dtype, leading: tuple[int, ...]
) -> None:
    op = made(op_case, dtype)
    seeds = ONE_ROW_DRAWS if math.prod(leading) == 1 else DRAWS
    inputs = [main_input(op_case, dtype, leading, seed) for seed in seeds]
    assert_no_worse_than_torch(*[draw(op_case, op, x, 100 + k) for k, x in enumerate(inputs)])


@pytest.mark.sampled
@every_op
@every_dtype
@pytest.mark.parametrize("layout", ["transposed", "swapped", "strided"])
def test_a_non_contiguous_input_gives_the_same(
    op_case: Case, dtype: torch.dtype, layout: str
) -> None:
    op, shape = made(op_case, dtype), (4, 3, *op_case.shape)
    draws = []
    for seed in DRAWS:
        if layout == "transposed":
            x = random_tensor(shape[::-1], dtype, seed, op_case.spread)
            x = x.permute(*range(x.dim())[::-1])
        elif layout == "swapped":
            x = random_tensor((3, 4, *shape[2:]), dtype, seed, op_case.spread).transpose(0, 1)
        else:
            x = random_tensor((*shape[:-1], 2 * shape[-1]), dtype, seed, op_case.spread)[..., ::2]
        assert not x.is_contiguous()
        draws.append(draw(op_case, op, x, 100 + seed))
    assert_no_worse_than_torch(*draws)


@every_op
def test_an_expanded_output_gradient_gives_the_same(op_case: Case) -> None:
    op, draws = made(op_case, torch.float32), []
    for seed in DRAWS:
        x = main_input(op_case, torch.float32, (2, 3), seed)
        tensors = by_name(x, op, extra_inputs(op_case, x, 100 + seed))
        results = []
        for form, dtype in ((op_case.plain, torch.float32), (op_case.formula, torch.float64)):
            leaves = {name: leaf(t, dtype) for name, t in tensors.items()}
            sum(y.sum() for y in as_tuple(form(*leaves.values()))).backward()
            results.append({name: t.grad for name, t in leaves.items()})
        op.zero_grad()
        ours = {name: leaf(t) for name, t in tensors.items() if name == "x" or "extra" in name}
        sum(y.sum() for y in as_tuple(op(*ours.values()))).backward()
        grads = {name: t.grad for name, t in (*ours.items(), *op.named_parameters())}
        draws.append(Draw(grads, *results))
    assert_no_worse_than_torch(*draws)


@every_op
@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
def test_an_empty_batch_has_the_right_shapes_and_zero_gradients(
    op_case: Case, leading: tuple[int, ...]
) -> None:
    empty = draw(op_case, made(op_case, torch.float32), main_input(op_case, torch.float32, leading))
    assert_no_worse_than_torch(empty)
    for name, tensor in empty.actual.items():
        assert name.startswith("output") or not tensor.any(), name


@every_op
def test_under_autocast_the_output_is_bf16_and_gradients_keep_their_dtype(op_case: Case) -> None:
    op, draws = made(op_case, torch.float32), []
    for seed in DRAWS:
        x = main_input(op_case, torch.float32, seed=seed)
        extras = extra_inputs(op_case, x, 100 + seed)
        tensors = by_name(x, op, extras)
        actual = run_module(op, leaf(x), [leaf(e) for e in extras], torch.bfloat16)
        exact = run_formula(op_case.formula, tensors, torch.float64)
        if op_case.follows_autocast:
            plain = run_autocast_formula(op_case.plain, tensors, torch.bfloat16)
        else:
            plain = run_formula(op_case.plain, tensors, torch.float32)
        expected = torch.bfloat16 if op_case.follows_autocast else torch.float32
        draws.append(Draw(actual, plain, exact, arithmetic=expected))
        assert actual["output 0"].dtype == expected
        assert all(t.dtype == torch.float32 for name, t in actual.items() if "gradient" in name)
    assert_no_worse_than_torch(*draws)


@every_op
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_an_op_tells_the_plan_the_shape_and_dtype_of_its_output(
    op_case: Case, autocast: torch.dtype | None
) -> None:
    for dtypes in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        op, x = made(op_case, dtypes[0]), main_input(op_case, dtypes[1])
        extras = extra_inputs(op_case, x)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            found = as_tuple(op(x, *extras))
        spec, *others = [TensorSpec(tuple(t.shape), t.dtype) for t in (x, *extras)]
        more: tuple[TensorSpec, ...] = ()
        for basic in getattr(op, "basic_ops", [op]):
            of_op = others if basic.num_extra_inputs else []
            more = basic.extra_output_specs(spec, of_op)
            spec = basic.output_spec(spec, of_op, autocast)
        expected = [TensorSpec(tuple(t.shape), t.dtype) for t in found]
        assert [spec, *more] == expected, dtypes


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=short)
@pytest.mark.parametrize("op_case", [*ACTIVATIONS, *SCALED_ACTIVATIONS, *NORMS], ids=str)
def test_sixteen_bit_results_are_fp32_results_rounded_once(
    op_case: Case, dtype: torch.dtype
) -> None:
    op, x = made(op_case, dtype), main_input(op_case, dtype, (8,))
    extras = extra_inputs(op_case, x)
    actual = run_module(op, leaf(x), [leaf(e) for e in extras])
    exact = run_formula(op_case.formula, by_name(x, op, extras), torch.float64)
    for name, value in actual.items():
        truth = exact[name]
        # Half an ulp of each value (of the smallest normal below it), and fewer
        # than 64 fp32 roundings of the largest value on the way there.
        info = torch.finfo(dtype)
        half_ulp = truth.abs().clamp(min=info.smallest_normal) * info.eps / 2
        inside = 64 * torch.finfo(torch.float32).eps * truth.abs().max()
        excess = (value.double() - truth).abs() - half_ulp - inside
        assert (excess <= 0).all(), f"{name} exceeds one rounding by {float(excess.max()):.3g}"


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=short)
@pytest.mark.parametrize("op_case", ACTIVATIONS, ids=str)
def test_an_activation_that_is_computed_some_rows_at_a_time_has_the_same_bits(
    op_case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, x = made(op_case, dtype), main_input(op_case, dtype, (3, 7))
    whole = run_module(op, leaf(x))
    monkeypatch.setattr(activation, "CACHED_ELEMENTS", 4 * x.shape[-1])  # 21 rows, 4 at a time
    split = run_module(op, leaf(x))
    for name, value in whole.items():
        assert torch.equal(value, split[name]), name


@pytest.mark.parametrize("name", ["BasicLinear", "Linear", "Bias", "LayerNorm", "RMSNorm"])
def test_the_weight_decides_the_dtype_and_each_gradient_keeps_its_own(name: str) -> None:
    op_case = case(name)
    op, x = made(op_case, torch.float32), main_input(op_case, torch.bfloat16)
    actual = run_module(op, leaf(x))
    assert actual["output 0"].dtype == torch.float32
    assert actual["gradient of x"].dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in op.parameters())
    tensors = by_name(x, op, [])
    exact = run_formula(op_case.formula, tensors, torch.float64)
    plain = run_formula(lambda x, *rest: op_case.plain(x.float(), *rest), tensors, torch.float32)
    plain["gradient of x"] = plain["gradient of x"].to(torch.bfloat16)
    assert_no_worse_than_torch(Draw(actual, plain, exact))


# -- what an op promises its caller ------------------------------------------------


@every_op
def test_the_callers_tensors_are_never_changed(op_case: Case) -> None:
    op, x = made(op_case, torch.float32), main_input(op_case, torch.float32)
    x, extras = leaf(x), [leaf(e) for e in extra_inputs(op_case, x)]
    before = [t.detach().clone() for t in (x, *extras, *op.parameters())]
    outputs = as_tuple(op(x, *extras))
    cotangents = [random_tensor(y.shape, y.dtype, 11) for y in outputs]
    given = [c.clone() for c in cotangents]
    torch.autograd.backward(outputs, cotangents)
    with torch.no_grad():
        op(x, *extras)
    after = [x, *extras, *op.parameters(), *cotangents]
    for was, now in zip([*before, *given], after, strict=True):
        assert torch.equal(was, now)
    memory = [t.grad.untyped_storage().data_ptr() for t in (x, *extras, *op.parameters())]
    assert len(set(memory)) == len(memory), "two gradients share memory"


@every_op
def test_only_the_gradients_that_were_asked_for_are_made(op_case: Case) -> None:
    op, x = made(op_case, torch.float32), main_input(op_case, torch.float32)
    inputs = [x, *extra_inputs(op_case, x)]
    params = list(op.parameters())
    full = run_module(op, leaf(inputs[0]), [leaf(e) for e in inputs[1:]])
    names = ["x", *(f"extra {k}" for k in range(len(inputs) - 1)), *params_of(op)]
    for wanted in itertools.product((False, True), repeat=len(names)):
        if not any(wanted):
            continue
        for parameter, want in zip(params, wanted[len(inputs) :], strict=True):
            parameter.requires_grad_(want)
        main, *extras = [
            t.clone().requires_grad_(want)
            for t, want in zip(inputs, wanted[: len(inputs)], strict=True)
        ]
        some = run_module(op, main, extras)
        for name, want in zip(names, wanted, strict=True):
            grad = some[f"gradient of {name}"]
            assert (grad is not None) == want, (name, wanted)
            assert grad is None or torch.equal(grad, full[f"gradient of {name}"]), (name, wanted)


@every_op
@every_dtype
def test_nan_in_the_input_reaches_the_output_where_the_formula_takes_it(
    op_case: Case, dtype: torch.dtype
) -> None:
    op, x = made(op_case, dtype), main_input(op_case, dtype)
    x[1, ..., 0] = x[2, ..., -1] = math.nan
    extras = extra_inputs(op_case, x)
    tensors = by_name(x, op, extras).values()
    actual = as_tuple(op(x, *extras))
    exact = as_tuple(op_case.formula(*(t.double() for t in tensors)))
    for ours, truth in zip(actual, exact, strict=True):
        assert truth.isnan().any()
        assert torch.equal(ours.isnan(), truth.isnan())


@every_op
def test_eval_no_grad_and_inference_mode_give_the_training_output(op_case: Case) -> None:
    op, x = made(op_case, torch.float32), main_input(op_case, torch.float32)
    extras = extra_inputs(op_case, x)
    trained = as_tuple(op(leaf(x), *extras))
    assert all(y.requires_grad for y in trained)
    op.eval()
    evaluated = as_tuple(op(leaf(x), *extras))
    with torch.no_grad():
        ungraded = as_tuple(op(leaf(x), *extras))
    with torch.inference_mode():
        inferred = as_tuple(op(x.clone(), *extras))
        assert all(y.is_inference() for y in inferred)
    assert all(y.grad_fn is None for y in ungraded)
    for results in (evaluated, ungraded, inferred):
        for ours, expected in zip(results, trained, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda **kw: fuser.GELU(**kw),
        lambda **kw: fuser.SwiGLU(**kw),
        lambda **kw: fuser.SiTUGLU(**kw),
        lambda **kw: fuser.ClampedSwiGLU(**kw),
    ],
    ids=["GELU", "SwiGLU", "SiTUGLU", "ClampedSwiGLU"],
)
def test_cache_quantized_input_leaves_the_output_and_rounds_the_backward(make: Any) -> None:
    x = random_tensor((4, 8), torch.float32, 1)
    rounded = fuser.Float8CurrentScalingQuantizer()(x).dequantize()
    plain, of_rounded = (run_module(make(), leaf(value)) for value in (x, rounded))
    cached = run_module(make(cache_quantized_input=True), leaf(x))
    assert torch.equal(cached["output 0"], plain["output 0"])
    assert torch.equal(cached["gradient of x"], of_rounded["gradient of x"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gelu_without_approximation_is_torchs_default_and_the_default_is_not(
    dtype: torch.dtype,
) -> None:
    x = random_tensor((64, 64), dtype, 1)
    expected = torch.nn.GELU()(x.double())
    rounding = 4 * torch.finfo(dtype).eps * x.abs().max()
    for erf in (fuser.GELU("none"), fuser.GELU(approximate="none")):
        assert (erf(x).double() - expected).abs().max() <= rounding
    tanh = torch.nn.GELU("tanh")(x.double())
    assert (tanh - expected).abs().max() > 4e-4
    for default in (fuser.GELU(), fuser.GELU("tanh")):
        assert (default(x).double() - tanh).abs().max() <= rounding
    mlp = fuser.modules.LayerNormMLP(64, 64, activation_params={"approximate": "none"})
    assert mlp.ops[2].approximate == "none"


@pytest.mark.parametrize("cls", [fuser.GELU, fuser.GEGLU])
def test_the_form_of_a_gelu_is_in_its_text_its_copies_and_its_plan(cls: Any) -> None:
    name = cls.__name__
    for form, kernel in (("tanh", name.lower()), ("none", f"{name.lower()}_erf")):
        op = cls(form)
        for copied in (op, copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
            assert repr(copied) == f"{name}(approximate={form!r})"
        plan = str(fuser.Sequential(op).plan(torch.ones(4, 8, requires_grad=True)))
        assert f" {kernel} " in plan
        assert f" {kernel}_backward " in plan
    with pytest.raises(AttributeError):
        op.approximate = "tanh"


@pytest.mark.parametrize("cls", [fuser.GELU, fuser.GEGLU])
@pytest.mark.parametrize("approximate", ["erf", None, True, ["none"], "Tanh"])
def test_another_form_of_gelu_is_refused_in_a_sentence(cls: Any, approximate: Any) -> None:
    words = said("activation-approximate-tanh-default", cls.__name__, repr(approximate))
    with pytest.raises(fuser.InputError, match=words):
        cls(approximate)


OF_OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sizes of a batch": (
        lambda **given: fuser.L2Normalization(eps=1e-6, **given),
        {"seq_length": 128, "micro_batch_size": 2},
    ),
    "margins of each mode": (
        lambda **given: fuser.RMSNorm(8, **given),
        {"sm_margin": {"forward": 4, "backward": 4, "inference": 0}},
    ),
    "one margin": (lambda **given: fuser.LayerNorm(8, **given), {"sm_margin": 4}),
    "recomputation": (
        lambda **given: fuser.ScaledSwiGLU(**given),
        {"activation_recompute_in_mlp": False},
    ),
    "a bias of one rank": (
        lambda **given: fuser.Bias(8, **given),
        {"tensor_parallel": True, "tensor_parallel_group": None},
    ),
    "a linear of one rank": (
        lambda **given: fuser.BasicLinear(8, 8, **given),
        {"tensor_parallel_mode": "column", "sequence_parallel": True},
    ),
}


@pytest.mark.parametrize(("make", "given"), OF_OTHERS.values(), ids=OF_OTHERS)
def test_arguments_of_other_libraries_change_nothing(
    make: Callable[..., Any], given: dict[str, Any]
) -> None:
    """Without a process group; sizes of parameters, values and gradients are those without them."""
    plain, op = randomize(make()), randomize(make(**given))
    x, scales = torch.randn(3, 8), torch.rand(3)
    found = []
    for each in (plain, op):
        inputs = [leaf(x.clone()), *[leaf(scales.clone())] * each.num_extra_inputs]
        y = each(*inputs)
        gradients = torch.autograd.grad(y.square().sum(), [*inputs, *each.parameters()])
        found.append([y.detach(), *gradients])
        assert not each.process_groups
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert list(op.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("kind", ["input", "output"])
def test_in_place_is_accepted_and_still_changes_no_tensor_of_the_caller(kind: str) -> None:
    op = (
        fuser.AddExtraInput(in_place=True)
        if kind == "input"
        else fuser.MakeExtraOutput(in_place=True)
    )
    x, extra = leaf(torch.ones(2, 3)), leaf(torch.full((2, 3), 2.0))
    outputs = as_tuple(op(x, extra) if kind == "input" else op(x))
    cotangents = [torch.full((2, 3), 5.0), torch.full((2, 3), 7.0)][: len(outputs)]
    torch.autograd.backward(outputs, cotangents)
    assert torch.equal(x, torch.ones(2, 3))
    assert torch.equal(extra, torch.full((2, 3), 2.0))
    assert [float(c[0, 0]) for c in cotangents] == [5.0, 7.0][: len(outputs)]
    assert torch.equal(x.grad, torch.full((2, 3), 5.0 if kind == "input" else 12.0))


# -- single ops --------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("interleave", [None, 1, 2], ids=["halves", "blocks-1", "blocks-2"])
@every_dtype
def test_gradient_is_exactly_zero_where_clamped(
    dtype: torch.dtype, interleave: int | None, scaled: bool
) -> None:
    gates = torch.tensor([[-100.0, -3.0, 3.0, 3.5], [50.0, 3.0, -8.0, 100.0]])
    rest = torch.tensor([[3.0, -3.0, 3.5, -3.5], [2.5, -100.0, 100.0, 0.0]])
    width = interleave or 4
    blocks = [t.unflatten(-1, (-1, width)) for t in (gates, rest)]
    x = leaf(torch.stack(blocks, dim=-2).flatten(1).to(dtype))
    arguments = {"limit": 3.0, "glu_interleave_size": interleave}
    if scaled:
        y = fuser.ScaledClampedQGeGLU(**arguments)(x, torch.ones(2, dtype=dtype))
    else:
        y = fuser.ClampedSwiGLU(**arguments)(x)
    y.backward(torch.ones_like(y))
    d_gate, d_rest = x.grad.unflatten(-1, (-1, 2, width)).unbind(-2)
    d_gate, d_rest = d_gate.flatten(1), d_rest.flatten(1)
    assert (d_gate[gates > 3.0] == 0).all()
    assert (d_rest[rest.abs() > 3.0] == 0).all()
    # At the limit itself nothing is clamped; where the gate's value is 0 (far
    # below zero) the linear part gets nothing either way.
    assert (d_gate[(gates == 3.0) & (rest != -3.0)] != 0).all()
    assert (d_rest[(rest.abs() <= 3.0) & (gates > -10)] != 0).all()


def test_a_limit_cuts_the_gate_above_only_and_the_linear_part_on_both_sides() -> None:
    op = fuser.ClampedSwiGLU(limit=1.0, alpha=1.0, glu_linear_offset=0.0)
    x = torch.tensor([[9.0, 0.5], [1.0, 0.5], [0.5, 9.0], [0.5, 1.0], [0.5, -9.0], [0.5, -1.0]])
    y = op(x)
    assert torch.equal(y[0::2], y[1::2])
    assert op(torch.tensor([[-9.0, 1.0]])) != op(torch.tensor([[-1.0, 1.0]]))


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("op", [fuser.SiTUGLU, fuser.ScaledSiTUGLU])
@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_situglu_refuses_a_beta_that_is_not_finite_and_positive(
    op: Any, name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=str(value)):
        op(**{name: value})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fuser.BasicLinear(0, 4), said("parameters-positive", None, "in_features", 0)),
        (lambda: fuser.BasicLinear(4, -1), said("parameters-positive", None, "out_features", -1)),
        (lambda: fuser.Linear(4, 0), said("parameters-positive", None, "out_features", 0)),
        (
            lambda: fuser.BasicLinear(4, 4, tensor_parallel_mode="diagonal"),
            said("parameters-none-column-row", None, None, "'diagonal'"),
        ),
        (
            lambda: fuser.BasicLinear(4, 4, sequence_parallel=True),
            said("parameters-sequence-parallel-true", None, "tensor_parallel_mode"),
        ),
        (
            lambda: fuser.Linear(4, 4, sequence_parallel=True),
            said("parameters-sequence-parallel-true", None, "tensor_parallel_mode"),
        ),
        (lambda: fuser.Bias(0), said("parameters-positive", None, "size", 0)),
        (lambda: fuser.LayerNorm(0), said("parameters-positive", None, "normalized_shape", 0)),
        (
            lambda: fuser.RMSNorm((4, 0)),
            said("parameters-positive", None, "normalized_shape[1]", 0),
        ),
        (lambda: fuser.Dropout(1.5), said("dropout-p-probability-between", 1.5)),
        (lambda: fuser.Dropout(-0.1), said("dropout-p-probability-between", -0.1)),
        (lambda: fuser.Dropout(math.nan), said("dropout-p-probability-between", "nan")),
        (lambda: fuser.SwiGLU(glu_interleave_size=0), said("chain-glu-interleave-size", None, 0)),
        (lambda: fuser.ClampedSwiGLU(limit=0.0), said("chain-all-finite-first", None, holds(0.0))),
        (
            lambda: fuser.ClampedSwiGLU(limit=math.nan),
            said("chain-all-finite-first", None, holds("nan")),
        ),
        (
            lambda: fuser.ScaledClampedQGeGLU(limit=-7.0),
            said("chain-all-finite-first", None, holds(-7.0)),
        ),
        (
            lambda: fuser.Linear(4, 4, dtype=torch.float64),
            said("parameters-float32-float16-bfloat16", "torch.float64"),
        ),
        (
            lambda: fuser.LayerNorm(4, dtype=torch.int32),
            said("parameters-float32-float16-bfloat16", "torch.int32"),
        ),
    ],
)
def test_an_argument_that_cannot_be_used_is_a_sentence_with_its_value(
    make: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fuser.BasicLinear(5, 4, tensor_parallel_mode="row"),
            said("groups-do-divide-rank", holds("BasicLinear"), 5, 2),
        ),
        (
            lambda: fuser.Linear(5, 4, tensor_parallel_mode="row"),
            said("groups-do-divide-rank", holds("Linear"), 5, 2),
        ),
        (
            lambda: fuser.BasicLinear(4, 7, tensor_parallel_mode="column"),
            said("groups-do-divide-rank", holds("BasicLinear"), 7, 2),
        ),
        (
            lambda: fuser.Bias(3, tensor_parallel=True),
            said("groups-do-divide-rank", "Bias's size", 3, 2),
        ),
    ],
)
def test_a_size_that_the_ranks_do_not_divide_is_refused(
    make: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    for module in (basic_linear, pointwise_ops, linear):
        monkeypatch.setattr(module, "group_size", lambda op, group: 2)
    with pytest.raises(fuser.InputError, match=words):
        make()


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


# What fits, what does not, and what the sentence must say.
MISFITS = [
    (lambda: fuser.BasicLinear(4, 2), [ones(3, 4)], [ones(3, 5)], ValueError, r"\(3, 5\).*4"),
    (lambda: fuser.Linear(4, 2), [ones(3, 4)], [ones(3, 5)], ValueError, r"\(3, 5\).*4"),
    (lambda: fuser.Bias(4), [ones(3, 4)], [ones(3, 5)], ValueError, r"\(3, 5\).*4"),
    (lambda: fuser.LayerNorm(4), [ones(3, 4)], [ones(3, 5)], ValueError, r"\(3, 5\).*4"),
    (lambda: fuser.RMSNorm((3, 4)), [ones(3, 4)], [ones(4)], ValueError, r"\(4,\).*\(3, 4\)"),
    (
        fuser.SwiGLU,
        [ones(3, 4)],
        [ones(3, 5)],
        ValueError,
        said("chain-splits-last-dimension", None, 2, 5),
    ),
    (
        lambda: fuser.SwiGLU(glu_interleave_size=3),
        [ones(3, 6)],
        [ones(3, 8)],
        ValueError,
        said("chain-splits-last-dimension", None, 6, 8),
    ),
    (
        fuser.ScaledSReLU,
        [ones(3, 4), ones(3)],
        [ones(3, 4), ones(4)],
        ValueError,
        r"\(4,\).*\(3, 4\)",
    ),
    (
        fuser.ScaledSwiGLU,
        [ones(3, 4), ones(3)],
        [ones(3, 4), ones(3, 1)],
        ValueError,
        said("grouped-linear-scales-scale-per", None, (3, 1), None, (3,)),
    ),
    (
        fuser.ScaledSwiGLU,
        [ones(3, 4), ones(3)],
        [ones(3, 5), ones(3)],
        ValueError,
        said("chain-splits-last-dimension", None, 2, 5),
    ),
    (
        fuser.ScaledSReLU,
        [ones(3, 4), ones(3)],
        [ones(3, 4), ones(3, dtype=torch.int64)],
        ValueError,
        "int64",
    ),
    (
        fuser.AddExtraInput,
        [ones(3, 4), ones(3, 4)],
        [ones(3, 4), ones(3, 1)],
        ValueError,
        said("add-extra-input-shape-main-two", (3, 1), (3, 4)),
    ),
    (
        fuser.AddExtraInput,
        [ones(3, 4), ones(3, 4)],
        [ones(3, 4), ones(3, 4, dtype=torch.int32)],
        ValueError,
        "int32",
    ),
    (
        fuser.AddExtraInput,
        [ones(3, 4), ones(3, 4)],
        [ones(3, 4), ones(3, 4, device="meta")],
        ValueError,
        said("checks-pipeline-runs-device", None, "cpu", None, "meta"),
    ),
    (
        fuser.AddExtraInput,
        [ones(3, 4), ones(3, 4)],
        [ones(3, 4)],
        ValueError,
        said("checks-pipeline", holds("1 extra"), 0),
    ),
    (fuser.AddExtraInput, [ones(3, 4), ones(3, 4)], [ones(3, 4), 2.0], TypeError, "float"),
    (
        fuser.GELU,
        [ones(3, 4)],
        [ones(3, 4), ones(3, 4)],
        ValueError,
        said("checks-pipeline", holds("0 extra"), 1),
    ),
    (
        lambda: fuser.Reshape((-1, 5)),
        [ones(2, 5)],
        [ones(3, 4)],
        ValueError,
        said("reshape-input-whose-elements", None, (3, 4), 12),
    ),
    (fuser.GELU, [ones(3, 4)], [ones(3, 4, dtype=torch.int64)], ValueError, "int64"),
    (fuser.GELU, [ones(3, 4)], [ones(3, 4, dtype=torch.float64)], ValueError, "float64"),
    (
        lambda: fuser.RMSNorm(4),
        [ones(3, 4)],
        [torch.tensor(1.0)],
        ValueError,
        said("checks-dimensions-needs-least"),
    ),
    (fuser.GELU, [ones(3, 4)], [ones(3, 0)], ValueError, said("checks-last-dimension-not", (3, 0))),
    (fuser.GELU, [ones(3, 4)], [[1.0, 2.0]], TypeError, "list"),
    (fuser.GELU, [ones(3, 4)], [None], TypeError, "NoneType"),
    (fuser.GELU, [ones(3, 4)], ["x"], TypeError, "str"),
    (
        lambda: fuser.Linear(4, 4),
        [ones(3, 4)],
        [ones(3, 4, device="meta")],
        ValueError,
        said("checks-pipeline-runs-device", None, "meta", None, "cpu"),
    ),
]


@pytest.mark.parametrize("planned", [False, True], ids=["first-call", "after-a-good-call"])
@pytest.mark.parametrize(("make", "good", "bad", "kind", "said"), MISFITS)
def test_an_input_that_does_not_fit_is_a_sentence_and_the_next_call_works(
    make: Any, good: list[Any], bad: list[Any], kind: type[Exception], said: str, planned: bool
) -> None:
    expected = make()
    op = copy.deepcopy(expected)
    if planned:
        op(*good)
    for _ in range(2):
        with pytest.raises(kind, match=said):
            op(*bad)
    assert torch.equal(op(*good), expected(*good))


def test_reshape_takes_one_open_size_and_its_gradient_has_the_inputs_shape() -> None:
    x = leaf(random_tensor((2, 3, 4), torch.float32, 1))
    y = fuser.Reshape((4, -1))(x)
    assert torch.equal(y, x.reshape(4, 6))
    y.backward(torch.arange(24.0).view(4, 6))
    assert torch.equal(x.grad, torch.arange(24.0).view(2, 3, 4))


@pytest.mark.parametrize(
    ("main", "extra"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_add_extra_input_promotes_and_each_gradient_has_its_inputs_dtype(
    main: torch.dtype, extra: torch.dtype
) -> None:
    x, e = leaf(random_tensor((3, 4), main, 1)), leaf(random_tensor((3, 4), extra, 2))
    y = fuser.AddExtraInput()(x, e)
    assert y.dtype == torch.float32
    assert torch.equal(y, x.float() + e.float())
    # A plan knows it: bytes a token of what goes in and of what comes out.
    line = fuser.Sequential(fuser.AddExtraInput()).plan(x, e).activation_bytes
    assert line == (4 * main.itemsize, 4 * 4)
    y.backward(torch.full_like(y, 0.5))
    assert (x.grad.dtype, e.grad.dtype) == (main, extra)
    assert torch.equal(x.grad.float(), torch.full((3, 4), 0.5))


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_make_extra_output_sums_the_gradients_of_the_outputs_that_were_used(
    used: tuple[int, ...],
) -> None:
    x = leaf(random_tensor((3, 4), torch.float32, 1))
    outputs = fuser.MakeExtraOutput()(x)
    assert all(torch.equal(y, x) for y in outputs)
    sum((outputs[k] * (k + 2)).sum() for k in used).backward()
    assert torch.equal(x.grad, torch.full((3, 4), float(sum(k + 2 for k in used))))


def test_zero_centered_gamma_starts_at_zero_and_means_a_gain_of_one() -> None:
    x = random_tensor((3, 8), torch.float32, 1)
    for op in (fuser.LayerNorm, fuser.RMSNorm):
        centered, plain = op(8, zero_centered_gamma=True), op(8)
        assert not centered.weight.any()
        assert (plain.weight == 1).all()
        assert torch.equal(centered(x), plain(x))


HAVE_PARAMETERS = [case for case in CASES if list(case.make(torch.float32).parameters())]


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=short)
@pytest.mark.parametrize("op_case", HAVE_PARAMETERS, ids=str)
def test_parameters_on_meta_are_allocated_with_their_dtypes_and_flags(
    op_case: Case, dtype: torch.dtype
) -> None:
    for is_reset in (False, True):
        with torch.device("meta"):
            op = op_case.make(dtype)
        first, *others = op.parameters()
        first.requires_grad_(False)
        assert all(parameter.is_meta for parameter in op.parameters())
        with torch.device("cpu"):
            if is_reset:
                for basic in getattr(op, "basic_ops", [op]):
                    basic.reset_parameters()
            else:
                op(main_input(op_case, dtype))
        assert {parameter.device.type for parameter in op.parameters()} == {"cpu"}
        assert {parameter.dtype for parameter in op.parameters()} == {dtype}
        flags = [parameter.requires_grad for parameter in op.parameters()]
        assert flags == [False] + [True] * len(others)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("name", ["BasicLinear", "Bias", "RMSNorm"])
def test_a_parameter_on_meta_that_has_hooks_is_not_allocated(name: str, register: str) -> None:
    with torch.device("meta"):
        op = case(name).make(torch.float32)
    (parameter,) = op.parameters()
    getattr(parameter, register)(lambda *_: None)
    with torch.device("cpu"), pytest.raises(fuser.StateError, match="it has hooks"):
        op.reset_parameters()
    assert parameter.is_meta


def test_basic_linear_starts_as_torch_linear_does_and_bias_at_zero() -> None:
    torch.manual_seed(5)
    ours = fuser.Linear(16, 4)
    torch.manual_seed(5)
    weight = torch.empty(4, 16)
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    assert torch.equal(ours.weight, weight)
    assert not ours.bias.any()


def test_a_tracker_forks_the_random_state_in_which_the_weight_is_made() -> None:
    entered = []

    class Tracker:
        def fork(self) -> Any:
            entered.append(True)
            return torch.random.fork_rng(devices=[])

    torch.manual_seed(5)
    before = torch.get_rng_state()
    fuser.BasicLinear(4, 4, rng_state_tracker_function=Tracker)
    assert entered == [True]
    assert torch.equal(torch.get_rng_state(), before)


# -- dropout -----------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_dropout_zeroes_or_scales_and_backward_uses_the_same_mask(
    dtype: torch.dtype, p: float
) -> None:
    torch.manual_seed(0)
    # No element is zero, so a zero in the output is a dropped one.
    x = leaf(random_tensor((16, 33), dtype, 1).abs() + 0.5)
    g = random_tensor((16, 33), dtype, 2)
    y = fuser.Dropout(p)(x)
    y.backward(g)
    kept = y != 0
    assert kept.any()
    assert not kept.all()
    keep = 1 - p
    for ours, source in ((y, x), (x.grad, g)):
        exact = torch.where(kept, source.detach().double() / keep, 0.0)
        # As torch's own dropout: one rounding of the factor, one of the product,
        # half an ulp each, and their product.
        eps = torch.finfo(dtype).eps
        allowed = exact.abs() * (eps + eps * eps)
        assert ((ours.double() - exact).abs() <= allowed).all()


def test_dropout_keeps_the_mean_and_drops_with_the_given_probability() -> None:
    torch.manual_seed(0)
    p, count = 0.3, 40_000
    y = fuser.Dropout(p)(torch.ones(count))
    # Each kept with probability 1 - p: five standard deviations of a mean of
    # `count` draws, crossed by chance once in 1.7 million seeds.
    sigma = math.sqrt(p * (1 - p) / count)
    assert abs(float((y == 0).double().mean()) - p) <= 5 * sigma
    assert abs(float(y.double().mean()) - 1) <= 5 * sigma / (1 - p) + torch.finfo(y.dtype).eps


def test_dropout_draws_anew_each_call_and_the_seed_repeats_it() -> None:
    op, x = fuser.Dropout(0.5), torch.ones(64)
    torch.manual_seed(3)
    first, second = op(x), op(x)
    torch.manual_seed(3)
    assert torch.equal(op(x), first)
    assert not torch.equal(first, second)


def test_dropout_with_probability_one_gives_zeros_and_zero_gradients() -> None:
    x = leaf(random_tensor((4, 5), torch.float32, 1))
    y = fuser.Dropout(1.0)(x)
    assert not y.any()
    y.backward(torch.ones_like(y))
    assert not x.grad.any()


def test_dropout_follows_train_and_eval_between_calls() -> None:
    op, x = fuser.Dropout(0.5), torch.ones(64)
    assert (op(x) == 0).any()
    assert torch.equal(op.eval()(x), x)
    assert (op.train()(x) == 0).any()


def test_dropout_backward_keeps_the_mask_of_its_forward_when_mode_changes_between() -> None:
    op, x = fuser.Dropout(0.5), leaf(torch.ones(64))
    y = op(x)
    op.eval()
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, y.detach())


GATED = [getattr(fuser, name) for name in fuser.__all__ if re.search("GLU$|GeGLU$", name)]


@pytest.mark.parametrize("op", GATED)
def test_the_gate_is_the_first_half_and_the_docstring_says_so(op: Any) -> None:
    assert "gate ``a`` is the first half of the last dimension" in " ".join(op.__doc__.split())
    scales = [torch.ones(1)] if issubclass(op, ScaledActivation) else []
    closed, open_ = torch.tensor([[-40.0, 3.0]]), torch.tensor([[3.0, -40.0]])
    assert op()(closed, *scales).abs() < 1e-6
    assert op()(open_, *scales).abs() > 1


def test_every_gated_op_was_asked_for_its_gate() -> None:
    names = {op.__name__ for op in GATED}
    assert {"GLU", "GEGLU", "SwiGLU", "ClampedSwiGLU", "ScaledSwiGLU", "ScaledSiTUGLU"} <= names


@pytest.mark.parametrize("is_added", [True, False])
def test_a_bias_that_another_rank_adds_is_zeros_in_the_dtype_of_autocast(is_added: bool) -> None:
    """As of a row parallel linear, whose first rank adds it."""
    op = fuser.Bias(8)
    op.is_added = is_added
    with torch.no_grad():
        op.bias.fill_(1.0)
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = fuser.Sequential(op)(x)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, x + is_added)
