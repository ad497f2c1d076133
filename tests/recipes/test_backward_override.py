"""The backward override against a chain rule written by hand: forward quantized, backward exact.

The oracle runs every op alone and unquantized, but for linears, which quantize their operands,
multiply what those stand for, and differentiate as the override says. All comparisons are exact,
so scales are powers of two: a fused scale is a factor of the GEMM, before its sum is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import every_format as formats
import oracles
import pytest
import torch

import fuser
from fuser import recipe as recipes
from fuser.precision.quantizer_for import make_quantizer
from fuser.tensors import QuantizedTensor

RECIPES = {
    **formats.STATELESS,
    "current-pow2": lambda **kw: recipes.Float8CurrentScaling(use_power_2_scales=True, **kw),
    "mxfp8-2D": lambda **kw: recipes.MXFP8BlockScaling(enable_2d_quantization=True, **kw),
}
OVERRIDES = ("high_precision", "dequantized")
every_recipe = pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES)
every_override = pytest.mark.parametrize("override", OVERRIDES)
# Windows that fuse, forward or backward, and those of adjacent linears.
WINDOWS: dict[str, Callable[[], list[fuser.FusibleOperation]]] = {
    "linear": lambda: [fuser.BasicLinear(64, 32)],
    "norm, linear": lambda: [fuser.RMSNorm(64), fuser.Linear(64, 32)],
    "layernorm, linear, activation": lambda: [
        fuser.LayerNorm(64),
        fuser.Linear(64, 128),
        fuser.SwiGLU(),
    ],
    "activation, linear": lambda: [fuser.GELU(), fuser.Linear(64, 32)],
    "linear, bias, activation, linear": lambda: [
        fuser.Linear(64, 64),
        fuser.GELU(),
        fuser.Linear(64, 32),
    ],
    "linear, bias, add": lambda: [fuser.Linear(64, 32), fuser.AddExtraInput()],
    "linear, scale, add": lambda: [
        fuser.BasicLinear(64, 32),
        fuser.ConstantScale(0.5),
        fuser.AddExtraInput(),
    ],
    "linear, scale": lambda: [fuser.BasicLinear(64, 32), fuser.ConstantScale(-2.0)],
    "add, norm, linear": lambda: [
        fuser.AddExtraInput(),
        fuser.RMSNorm(64),
        fuser.BasicLinear(64, 32),
    ],
    "linear, linear": lambda: [fuser.BasicLinear(64, 64), fuser.BasicLinear(64, 32)],
    "quantize gradients, linear": lambda: [
        fuser.Quantize(forward=False, backward=True),
        fuser.BasicLinear(64, 32),
        fuser.Quantize(forward=False, backward=True),
    ],
}
EXTRA_WIDTHS = {"linear, bias, add": 32, "linear, scale, add": 32, "add, norm, linear": 64}


class LinearByHand(torch.autograd.Function):
    """``y = q(x) q(w).T``; backward of the operands that the override names."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Any) -> torch.Tensor:
        qx, qw = (
            make_quantizer(recipe, role)(t).with_usage("rowwise").dequantize()
            for role, t in (("input", x), ("weight", weight))
        )
        is_exact = recipe.backward_override == "high_precision"
        ctx.save_for_backward(*((x, weight) if is_exact else (qx, qw)))
        return torch.nn.functional.linear(qx, qw)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        return dy[0] @ weight, dy[0].t() @ x, None


def by_hand(
    model: fuser.Sequential, recipe: Any, x: torch.Tensor, extras: list[torch.Tensor]
) -> torch.Tensor:
    """The pipeline op by op: linears by hand, the others as fuser runs them unquantized."""
    remaining = list(extras)
    for module in model:
        for op in module.members if isinstance(module, fuser.FusedOperation) else (module,):
            if isinstance(op, fuser.BasicLinear):
                x = LinearByHand.apply(x, op.weight, recipe)
            elif op.num_extra_inputs:
                x = op(x, remaining.pop(0))
            else:
                x = op(x)
    return x


def gradients(
    run: Callable[..., torch.Tensor], model: fuser.Sequential, name: str, rows: int
) -> dict[str, Any]:
    torch.manual_seed(5)
    x = oracles.random_tensor((rows, 64), torch.float32, 1).requires_grad_()
    extras = []
    if name in EXTRA_WIDTHS:
        extra = oracles.random_tensor((rows, EXTRA_WIDTHS[name]), torch.float32, 3)
        extras.append(extra.requires_grad_())
    model.zero_grad(set_to_none=True)
    y = run(x, *extras)
    y.backward(oracles.random_tensor(y.shape, torch.float32, 2))
    found = {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in model.named_parameters()}}
    return found | {f"extra {k}": extra.grad for k, extra in enumerate(extras)}


@pytest.mark.sampled
@every_recipe
@every_override
@pytest.mark.parametrize("rows", [96, 0])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_equals_the_chain_rule_by_hand(
    name: str, override: str, make: Any, rows: int
) -> None:
    recipe = make(backward_override=override)
    model = oracles.randomize(fuser.Sequential(*WINDOWS[name]()))

    def quantized(x: torch.Tensor, *extras: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(recipe=recipe):
            y = model(x, *extras)
        assert isinstance(y, torch.Tensor)
        return y

    found = gradients(quantized, model, name, rows)
    expected = gradients(lambda x, *e: by_hand(model, recipe, x, list(e)), model, name, rows)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert not any(isinstance(value, QuantizedTensor) for value in found.values())


@every_recipe
@pytest.mark.parametrize("name", WINDOWS)
def test_the_forward_has_the_same_bytes_with_and_without_an_override(name: str, make: Any) -> None:
    model = oracles.randomize(fuser.Sequential(*WINDOWS[name]()))
    x = oracles.random_tensor((96, 64), torch.float32, 1)
    extras = [
        oracles.random_tensor((96, width), torch.float32, 3)
        for window, width in EXTRA_WIDTHS.items()
        if window == name
    ]
    outputs = []
    for override in (None, *OVERRIDES):
        with fuser.autocast(recipe=make(backward_override=override)):
            outputs.append(model(x.clone().requires_grad_(), *extras).detach())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@every_recipe
def test_what_dequantized_saves_is_rowwise_only_and_stays_where_it_is(make: Any) -> None:
    saved: list[QuantizedTensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, QuantizedTensor):
            saved.append(tensor)
        return tensor

    model = oracles.randomize(fuser.Sequential(*WINDOWS["linear, bias, activation, linear"]()))
    x = oracles.random_tensor((96, 64), torch.float32, 1).requires_grad_()
    with (
        fuser.autocast(recipe=make(backward_override="dequantized")),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        y = model(x)
    # With plans of memory the second input is quantized again.
    assert len(saved) == (3 if hasattr(fuser, "activation_memory_budget") else 4)

    def layout() -> list[dict[str, int | None]]:
        return [
            {name: None if b is None else b.data_ptr() for name, b in tensor.buffers().items()}
            for tensor in saved
        ]

    before = layout()
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert layout() == before
    for buffers in before:
        absent = [name for name, pointer in buffers.items() if pointer is None]
        assert all("columnwise" in name or name == "_transpose" for name in absent)
        assert len(absent) >= 1


@every_override
def test_a_step_under_one_override_does_not_change_the_next_under_another(override: str) -> None:
    """Switching between two steps of one model equals two models with one setting each."""
    name = "linear, bias, activation, linear"
    kinds = [override, None, "dequantized", override]

    def step(model: fuser.Sequential, kind: str | None) -> dict[str, Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            with fuser.autocast(recipe=recipes.MXFP8BlockScaling(backward_override=kind)):
                return model(x)

        return gradients(run, model, name, 96)

    switching = oracles.randomize(fuser.Sequential(*WINDOWS[name]()))
    for kind in kinds:
        fresh = oracles.randomize(fuser.Sequential(*WINDOWS[name]()))
        found, expected = step(switching, kind), step(fresh, kind)
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert len(switching.plans) == len(set(kinds))


@pytest.mark.parametrize("arrives", ["input", "weight"])
@every_recipe
def test_dequantized_reads_the_rowwise_copy_of_an_operand_that_arrives_quantized(
    make: Any, arrives: str
) -> None:
    """Also if it has a columnwise copy, whose scales are of other blocks."""
    recipe = make(backward_override="dequantized")
    both = {
        role: make_quantizer(recipe, role).with_usage(rowwise=True, columnwise=True)
        for role in ("input", "weight")
    }
    linear = oracles.randomize(fuser.BasicLinear(64, 32))
    x = oracles.random_tensor((96, 64), torch.float32, 1) * torch.logspace(-3, 3, 96)[:, None]
    dy = oracles.random_tensor((96, 32), torch.float32, 2)
    qx, qw = both["input"](x), both["weight"](linear.weight.detach())
    expected = {
        "dx": dy @ qw.with_usage("rowwise").dequantize(),
        "dw": dy.t() @ qx.with_usage("rowwise").dequantize(),
    }
    if arrives == "weight":
        linear.weight = torch.nn.Parameter(qw)
    given = (qx if arrives == "input" else x).requires_grad_()
    with fuser.autocast(recipe=recipe):
        y = linear(given)
    y.backward(dy)
    assert torch.equal(given.grad, expected["dx"])
    assert torch.equal(linear.weight.grad, expected["dw"])
