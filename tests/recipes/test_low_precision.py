"""Pipelines under every recipe: quantized forward and backward, and the backward override."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import every_format as formats
import models
import oracles
import pytest
import torch
import torch.utils.checkpoint

import fuser
from fuser import recipe as recipes
from fuser.precision.quantizer_for import make_quantizer

FORMATS = formats.STATELESS
OVERRIDES = (None, "high_precision", "dequantized")
every_format = pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
every_override = pytest.mark.parametrize("override", OVERRIDES)

# Relative error of one rounding to the format's mantissa, the worst element of
# a block: 2^-4 for E4M3, 2^-2 for E2M1 (between 4 and 6).
ROUNDING = dict.fromkeys(FORMATS.values(), 2**-4) | {recipes.NVFP4BlockScaling: 2**-2}


def block(**options: Any) -> fuser.Sequential:
    return models.residual_block(64, 64, channel="r", **options)


def results(model: torch.nn.Module, recipe: Any, rows: int = 96) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)  # of stochastic rounding
    x = oracles.random_tensor((rows, 64), torch.float32, 1).requires_grad_()
    model.zero_grad(set_to_none=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(oracles.random_tensor(y.shape, torch.float32, 2))
    return {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


# -- one linear, by hand --------------------------------------------------------------


def one_linear(recipe: Any) -> dict[str, torch.Tensor]:
    """What numerics.md says a linear computes: operands quantized as each GEMM reads them."""
    x = oracles.random_tensor((96, 64), torch.float32, 1)
    weight = oracles.random_tensor((32, 64), torch.float32, 100)
    dy = oracles.random_tensor((96, 32), torch.float32, 2)
    qx, qw, qdy = (
        make_quantizer(recipe, role)(t)
        for role, t in (("input", x), ("weight", weight), ("grad_output", dy))
    )

    def copy(tensor: fuser.QuantizedTensor, which: str) -> torch.Tensor:
        return tensor.with_usage(which).dequantize()

    out = {"y": copy(qx, "rowwise") @ copy(qw, "rowwise").T}
    override = recipe.backward_override
    if override is None:
        out["dx"] = copy(qdy, "rowwise") @ copy(qw, "columnwise")
        # Both have the Hadamard transform or neither, so that the product needs no inverse.
        columns = (t.transformed_columns(torch.float32) for t in (qdy, qx))
        out["weight"] = next(columns).T @ next(columns)
    elif override == "high_precision":
        out |= {"dx": dy @ weight, "weight": dy.T @ x}
    else:
        out |= {"dx": dy @ copy(qw, "rowwise"), "weight": dy.T @ copy(qx, "rowwise")}
    return out


@every_format
@every_override
def test_a_linear_computes_what_the_formats_say(make: Any, override: str | None) -> None:
    options = {"disable_stochastic_rounding": True} if "NVFP4" in make.__name__ else {}
    recipe = make(backward_override=override, **options)
    op = oracles.randomize(fuser.BasicLinear(64, 32))
    found = results(op, recipe)
    # The same GEMMs on the same operands, bit for bit.
    for name, value in one_linear(recipe).items():
        assert torch.equal(found[name], value), name


@every_format
def test_an_override_leaves_the_forward_as_it_is(make: Any) -> None:
    forwards = [results(block(), make(backward_override=o))["y"] for o in OVERRIDES]
    assert torch.equal(forwards[0], forwards[1])
    assert torch.equal(forwards[0], forwards[2])
    assert not torch.equal(forwards[0], results(block(), None)["y"])


@every_format
@every_override
def test_fused_equals_unfused_bit_for_bit(make: Any, override: str | None) -> None:
    recipe = make(backward_override=override)
    fused, unfused = results(block(), recipe), results(block(fusions=()), recipe)
    assert same(fused, unfused)


@every_format
def test_errors_are_those_of_the_format(make: Any) -> None:
    exact, found = results(block(), None), results(block(), make())
    assert not same(exact, found)
    # Two GEMMs in a row, three quantized operands each side: a handful of roundings.
    for name, value in exact.items():
        error = (found[name] - value).norm() / value.norm()
        assert error < 4 * ROUNDING[make], f"{name} is off by {error:.3g}"


@every_format
def test_a_gradient_under_an_override_is_nearer_to_the_exact_one(make: Any) -> None:
    exact = results(block(), None)
    errors = {
        override: sum(
            float((value - exact[name]).norm() / exact[name].norm())
            for name, value in results(block(), make(backward_override=override)).items()
        )
        for override in OVERRIDES
    }
    assert errors["high_precision"] < errors["dequantized"] < errors[None]


# -- what is saved -------------------------------------------------------------------


@pytest.fixture
def saved() -> Iterator[list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield tensors


@every_format
@pytest.mark.parametrize("override", ["dequantized", None])
def test_backward_is_handed_one_quantized_copy(
    make: Any, override: str | None, saved: list[torch.Tensor]
) -> None:
    op = oracles.randomize(fuser.BasicLinear(64, 32))
    x = oracles.random_tensor((96, 64), torch.float32, 1).requires_grad_()
    with fuser.autocast(recipe=make(backward_override=override)):
        y = op(x)
    kept = [t for t in saved if isinstance(t, fuser.QuantizedTensor)]
    assert len(kept) == 2
    before = [{n: b.data_ptr() for n, b in t.buffers().items() if b is not None} for t in kept]
    for tensor in kept:
        usage = tensor._usage()
        assert usage.rowwise == (override == "dequantized")
        assert usage.columnwise == (override is None)
    y.sum().backward()
    after = [{n: b.data_ptr() for n, b in t.buffers().items() if b is not None} for t in kept]
    assert before == after


@every_format
def test_high_precision_saves_the_originals(make: Any, saved: list[torch.Tensor]) -> None:
    op = oracles.randomize(fuser.BasicLinear(64, 32))
    x = oracles.random_tensor((96, 64), torch.float32, 1).requires_grad_()
    with fuser.autocast(recipe=make(backward_override="high_precision")):
        op(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr(), op.weight.data_ptr()]


# -- plans, nesting, adjacent ops ------------------------------------------------------


def test_switching_the_override_between_two_steps_plans_once_each() -> None:
    model = block()
    for _ in range(3):
        for override in OVERRIDES:
            results(model, recipes.MXFP8BlockScaling(backward_override=override))
    assert len(model.plans) == len(OVERRIDES)


def test_the_plan_says_why_a_gemm_has_no_epilogue() -> None:
    model = block()
    x = torch.empty(96, 64, device="meta")
    with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
        plan = model.plan(x)
    reasons = [r.reason for r in plan.refusals if r.fusion == "ForwardLinearBiasActivation"]
    assert reasons
    assert all("emulated" in reason for reason in reasons)


NEIGHBOURS = {
    "linear-linear": lambda: (fuser.Linear(64, 64), fuser.Linear(64, 64)),
    "linear-quantize": lambda: (fuser.Linear(64, 64), fuser.Quantize()),
    "quantize-linear": lambda: (fuser.Quantize(backward=True), fuser.Linear(64, 64)),
    "quantize-gelu": lambda: (fuser.Quantize(), fuser.GELU(), fuser.Linear(64, 64)),
    "quantize-norm": lambda: (fuser.Quantize(True, True), fuser.RMSNorm(64)),
    "quantize-bias": lambda: (fuser.Quantize(), fuser.Bias(64), fuser.Quantize(False, True)),
}


@pytest.mark.sampled(most=24)
@every_format
@every_override
@pytest.mark.parametrize("ops", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_any_neighbours_work_together(ops: Any, override: str | None, make: Any) -> None:
    recipe = make(backward_override=override)
    model = oracles.randomize(fuser.Sequential(*ops()))
    x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
    with fuser.autocast(recipe=recipe):
        y = model(x)
    y.sum().backward()
    exact = oracles.run_module(model, x.detach().requires_grad_())["output 0"]
    assert (y.detach().dequantize() if isinstance(y, fuser.QuantizedTensor) else y).shape == (
        32,
        64,
    )
    error = (torch.zeros(()) + y.detach() - exact).norm() / exact.norm()
    assert error < 4 * ROUNDING[make]
    assert torch.isfinite(x.grad).all()


def test_quantize_is_the_identity_outside_autocast() -> None:
    x = oracles.random_tensor((3, 5), torch.float32, 1)
    assert torch.equal(fuser.Quantize(True, True)(x), x)


def test_a_disabled_autocast_inside_another_runs_in_high_precision() -> None:
    model = block()
    plain = results(model, None)["y"]
    x = oracles.random_tensor((96, 64), torch.float32, 1)
    with fuser.autocast(recipe=recipes.MXFP8BlockScaling()), fuser.autocast(enabled=False):
        assert torch.equal(model(x), plain)


# -- activation checkpointing ------------------------------------------------------------


@every_override
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_under_the_recipe_of_the_forward(
    override: str | None, use_reentrant: bool
) -> None:
    recipe = recipes.MXFP8BlockScaling(backward_override=override)
    model = block()
    expected = results(model, recipe)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(recipe=recipe):
            return model(x)

    checkpoint = torch.utils.checkpoint.checkpoint
    cotangent = oracles.random_tensor((96, 64), torch.float32, 2)
    for where in ("inside", "outside"):
        x = oracles.random_tensor((96, 64), torch.float32, 1).requires_grad_()
        model.zero_grad(set_to_none=True)
        if where == "inside":
            y = checkpoint(forward, x, use_reentrant=use_reentrant)
        else:
            with fuser.autocast(recipe=recipe):
                y = checkpoint(model, x, use_reentrant=use_reentrant)
        y.backward(cotangent)
        assert torch.equal(x.grad, expected["dx"]), where
        assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


# -- delayed scaling -------------------------------------------------------------------


def test_delayed_scaling_uses_the_amaxes_of_earlier_steps() -> None:
    op = oracles.randomize(fuser.BasicLinear(64, 32))
    recipe = recipes.DelayedScaling(amax_history_len=3)
    x = oracles.random_tensor((96, 64), torch.float32, 1) * 2**-9  # subnormal in E4M3 unscaled
    dy = oracles.random_tensor((96, 32), torch.float32, 2)
    exact = x @ op.weight.detach().T
    errors = []
    for _ in range(2):
        with fuser.autocast(recipe=recipe):
            y = op(x)
        y.backward(dy)
        errors.append(float((y.detach() - exact).norm() / exact.norm()))
    assert errors[0] > 0.1 > 2 * errors[1]
    forward, backward = (op._delayed[mode].scale for mode in ("forward", "backward"))
    amaxes = torch.stack([x.abs().max(), op.weight.detach().abs().max()])
    # torch computes number / tensor through a reciprocal, which rounds twice.
    assert torch.equal(forward, torch.full((2,), 448.0) / amaxes)
    assert torch.equal(backward, torch.full((1,), 57344.0) / dy.abs().max())


def test_delayed_scales_go_through_checkpoints_and_copies() -> None:
    def step(model: torch.nn.Module, size: float = 1.0) -> torch.Tensor:
        x = size * oracles.random_tensor((96, 64), torch.float32, 1)
        with fuser.autocast(recipe=recipes.DelayedScaling(amax_history_len=3)):
            y: torch.Tensor = model(x)
        y.sum().backward()
        return y.detach()

    model = block()
    for size in (1.0, 1.0, 30.0):  # the last step's amax is not in a scale yet
        step(model, size)
    state = model.state_dict()
    assert all(t.dtype in (torch.float32, torch.uint8) for t in state.values())
    loaded, twin, fresh = block(), copy.deepcopy(model), block()
    loaded.load_state_dict(state)
    fresh.load_state_dict({k: v for k, v in state.items() if not k.endswith("_extra_state")})
    expected = step(model)
    assert torch.equal(step(loaded), expected)
    assert torch.equal(step(twin), expected)
    assert not torch.equal(step(fresh), expected)  # without the state: scales of 1


# -- what a user's quantizer makes -------------------------------------------------


def test_a_users_quantizer_may_make_one_copy_or_the_same_tensor_again() -> None:
    @dataclass(frozen=True)
    class RowsAlone(fuser.Float8CurrentScalingQuantizer):
        def buffers_of(self, rows: Any) -> dict[str, torch.Tensor | None]:
            buffers = super().buffers_of(rows)
            return {**buffers, "_columnwise_data": None} if self.rowwise else buffers

    kept: dict[Any, Any] = {}

    @dataclass(frozen=True)
    class Frozen(fuser.Float8CurrentScalingQuantizer):
        def __call__(self, tensor: Any) -> Any:
            if self not in kept:
                kept[self] = super().__call__(tensor)
            return kept[self]

    def factory(role: str) -> Any:
        return Frozen() if role == "weight" else RowsAlone()

    torch.manual_seed(0)
    model = fuser.Sequential(fuser.BasicLinear(32, 32))
    x = torch.randn(16, 32, requires_grad=True)
    results = []
    for _ in range(3):
        with fuser.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
            y = model(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        results.append((y.detach(), dx))
    (weight,) = kept.values()
    assert weight._data is not None
    for y, dx in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(dx, results[0][1])


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.Float8BlockScaling(),
        recipes.CustomRecipe(
            qfactory=lambda role: fuser.Float8BlockQuantizer(
                block_scaling_dim=2 if role == "weight" else 1
            )
        ),
    ],
    ids=["block", "custom"],
)
def test_a_quantizer_is_that_of_the_role_which_an_op_says_now(recipe: recipes.Recipe) -> None:
    class Op(fuser.BasicLinear):
        first = "input"

        def quantizer_roles(self, mode: str) -> tuple[str, ...]:
            return (self.first, "weight") if mode == "forward" else ("grad_output",)

    op = Op(32, 32)
    with fuser.autocast(recipe=recipe):
        dims = []
        for op.first in ("input", "weight"):
            dims.append(op.get_quantizer("forward", 0).block_scaling_dim)
            assert op.quantizer_value("forward", 0).block_scaling_dim == dims[-1]
    assert dims == [1, 2]
