"""Baselines of a plan: plain torch computes what the ops do, and makes the calls of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser.plan import plain_torch
from fuser.plan.devices import CPU, DEVICES, Device
from fuser.plan.plan import Baseline
from fuser.plan.torch_calls import TorchCall, TorchCalls, compiled_seconds, eager_seconds

WIDTH, ROWS = 16, 6
H100 = DEVICES["h100"]

# Of each kind an op that takes ``WIDTH`` columns and returns as many.
OPS: dict[str, Callable[[], fuser.op.BasicOperation]] = {
    "linear": lambda: fuser.BasicLinear(WIDTH, WIDTH, device="cpu"),
    "bias": lambda: fuser.Bias(WIDTH, device="cpu"),
    "lora": lambda: fuser.LoRALinear(WIDTH, WIDTH, rank=4, alpha=3.0, device="cpu"),
    "activation": fuser.GELU,
    "scale": lambda: fuser.ConstantScale(0.5),
    "norm": lambda: fuser.LayerNorm(WIDTH, device="cpu"),
    "add": fuser.AddExtraInput,
    "extra output": fuser.MakeExtraOutput,
}


def in_plain_torch(pipeline: fuser.OperationFuser, x: Any, *extras: Any) -> list[torch.Tensor]:
    """The outputs of the baseline, whose tensors are those of the pipeline in place of meta."""
    graph, _ = pipeline.plan_for_gpu((9, 0), x, *extras)
    run = plain_torch._PlainRun(graph)
    run.x, run.given = x, dict(enumerate(extras))
    run.params = [list(op.parameters()) for op in graph.ops]
    return run.forward()


def positions(pair: list[str]) -> Iterator[list[str]]:
    """The pair alone, which is a beginning and an end, and in the middle."""
    yield pair
    yield ["activation", *pair, "scale"]


@pytest.mark.parametrize("first", OPS)
def test_the_baseline_of_each_pair_of_ops_has_the_values_of_the_pipeline(first: str) -> None:
    x = oracles.random_tensor((ROWS, WIDTH), torch.float32, 1)
    for second in OPS:
        for names in positions([first, second]):
            ops = [oracles.randomize(OPS[name](), seed) for seed, name in enumerate(names)]
            pipeline = fuser.OperationFuser(ops)
            count = sum(op.num_extra_inputs for op in ops)
            extras = [oracles.random_tensor(x.shape, x.dtype, 10 + n) for n in range(count)]
            assert_same_values(pipeline, x, *extras)


def assert_same_values(pipeline: fuser.OperationFuser, x: Any, *extras: Any) -> None:
    expected, found = pipeline(x, *extras), in_plain_torch(pipeline, x, *extras)
    for one, other in zip(found, oracles.as_tuple(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=repr(pipeline.basic_ops))


def merged() -> fuser.LoRALinear:
    op = oracles.randomize(fuser.LoRALinear(WIDTH, WIDTH, rank=4, device="cpu"))
    op.merge()
    return op


Extras = tuple[tuple[int, ...], ...]
OPTIONS: dict[str, tuple[Callable[[], fuser.op.BasicOperation], Extras]] = {
    "quantize": (lambda: fuser.Quantize(True, True), ()),
    "of a batch": (lambda: fuser.AdaptiveLayerNorm(WIDTH, eps=0.5), ((3, WIDTH), (3, WIDTH))),
    "of a batch in the middle": (
        lambda: fuser.AdaptiveLayerNorm(WIDTH, batch_dim=1),
        ((2, WIDTH), (2, WIDTH)),
    ),
    "with a dimension of one": (
        lambda: fuser.AdaptiveLayerNorm(WIDTH),
        ((3, 1, WIDTH), (3, 1, WIDTH)),
    ),
    "with a dimension of one before": (
        lambda: fuser.AdaptiveLayerNorm(WIDTH, batch_dim=1),
        ((1, 2, WIDTH), (1, 2, WIDTH)),
    ),
    "layer norm": (lambda: fuser.LayerNorm(WIDTH, eps=0.5, device="cpu"), ()),
    "rms norm": (lambda: fuser.RMSNorm(WIDTH, eps=0.5, device="cpu"), ()),
    "no bias": (lambda: fuser.LoRALinear(WIDTH, 8, rank=1, bias=False, device="cpu"), ()),
    "merged": (merged, ()),
}


@pytest.mark.parametrize(("make", "shapes"), OPTIONS.values(), ids=OPTIONS)
def test_the_baseline_has_the_options_of_an_op(make: Any, shapes: Extras) -> None:
    op = make()
    pipeline = fuser.OperationFuser([op if op.__dict__.get("is_merged") else oracles.randomize(op)])
    x = oracles.random_tensor((3, 2, WIDTH), torch.float32, 1)
    extras = [oracles.random_tensor(s, x.dtype, 10 + n) for n, s in enumerate(shapes)]
    assert_same_values(pipeline, x, *extras)


# -- calls -------------------------------------------------------------------------------

Script = Callable[..., Any]


def meta(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=grad)


def modelled(
    script: Script, leaves: Sequence[torch.Tensor], device: Device = H100
) -> list[Baseline]:
    """The times of a script that somebody would write."""
    calls: dict[str, list[TorchCall]] = {"forward": [], "backward": []}
    mode = TorchCalls(calls["forward"].append)
    with mode:
        outputs = oracles.as_tuple(script(*leaves))
    places = [place for output in outputs for place in mode._parts(output)]
    ends = [output for output in outputs if output.requires_grad]
    if ends:
        mode._listed = calls["backward"].append
        grads = [torch.empty_like(end) for end in ends]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with mode:
            torch.autograd.grad(ends, wanted, grads, allow_unused=True)
    eager = [1e6 * eager_seconds(calls[side], device, side) for side in calls]
    compiled = [
        1e6 * s for s in compiled_seconds(calls["forward"], calls["backward"], places, device)
    ]
    return [Baseline("torch eager", *eager), Baseline("torch.compile", *compiled)]


def assert_baselines(plan: fuser.FusionPlan, expected: list[Baseline]) -> None:
    for one, other in zip(plan.baselines, expected, strict=True):
        assert one.name == other.name
        for side in ("forward", "backward"):
            assert getattr(one, side) == pytest.approx(getattr(other, side)), side


def assert_modelled(model: fuser.Sequential, script: Script, *given: Any, **options: Any) -> None:
    """``given``: the input, the extra inputs, and after them the parameters of the script."""
    ops = [op for module in model for op in getattr(module, "basic_ops", [module])]
    count = 1 + sum(op.num_extra_inputs for op in ops)
    plan = model.plan(*given[:count], device="h100", **options)
    assert_baselines(plan, modelled(script, given))


def linear(bias: bool = True) -> fuser.Linear:
    return fuser.Linear(WIDTH, WIDTH, bias=bias, device="meta")


def weight(grad: bool = True) -> torch.Tensor:
    return meta(WIDTH, WIDTH, grad=grad)


def test_the_calls_of_linears_are_those_of_the_gradients_that_are_wanted() -> None:
    def script(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, params[0], params[1]) * 0.5, params[2])

    for frozen in range(4):  # none, or one of the parameters
        for grad in (True, False):
            model = fuser.Sequential(linear(), fuser.ConstantScale(0.5), linear(bias=False))
            params = [weight(), meta(WIDTH), weight()]
            for place, parameter in enumerate(model.parameters(), start=1):
                parameter.requires_grad_(place != frozen)
                params[place - 1].requires_grad_(place != frozen)
            assert_modelled(model, script, meta(ROWS, WIDTH, grad=grad), *params)


def test_the_calls_of_evaluation_are_those_of_forward() -> None:
    model = fuser.Sequential(linear(), fuser.Dropout(0.5)).eval()
    given = meta(ROWS, WIDTH, grad=False), weight(grad=False), meta(WIDTH, grad=False)
    assert_modelled(model, F.linear, *given, training=False)


def test_the_calls_of_torchs_autocast_cast_what_they_read() -> None:
    def script(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(torch.bfloat16), w, b) * 0.5

    ops = [*linear().basic_ops, fuser.ConstantScale(0.5)]
    params = [meta(WIDTH, WIDTH, dtype=torch.bfloat16), meta(WIDTH, dtype=torch.bfloat16)]
    x = meta(ROWS, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = fuser.OperationFuser(ops).plan_on(None, x)
    assert_baselines(plan, modelled(script, [x, *params], CPU))


@pytest.mark.parametrize("frozen", range(4))
def test_the_calls_of_extra_tensors_are_those_of_the_gradients_that_are_wanted(
    frozen: int,
) -> None:
    norm = fuser.AdaptiveLayerNorm(WIDTH)
    model = fuser.Sequential(fuser.MakeExtraOutput(), norm, fuser.AddExtraInput())

    def script(x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor, other: Any) -> Any:
        return F.layer_norm(x, (WIDTH,)) * (1 + gain) + shift + other, x

    given = [meta(ROWS, WIDTH, grad=place != frozen) for place in range(4)]
    assert_modelled(model, script, *given)


@pytest.mark.parametrize("frozen", [1, 2])
def test_a_gradient_of_one_value_a_batch_is_a_sum_of_its_own(frozen: int) -> None:
    """Of the extra inputs of one op each has its own need of a gradient."""
    model = fuser.Sequential(fuser.AdaptiveLayerNorm(WIDTH, batch_dim=1))

    def script(x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor) -> Any:
        gain, shift = gain.view(1, 2, -1), shift.view(1, 2, -1)
        return F.layer_norm(x, (WIDTH,)) * (1 + gain) + shift

    shapes = ((ROWS, 2, WIDTH), (2, WIDTH), (2, WIDTH))
    given = [meta(*shape, grad=place != frozen) for place, shape in enumerate(shapes)]
    assert_modelled(model, script, *given)


@pytest.mark.parametrize("has_one_weight", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [8, 6], ids=["divided", "not divided"])
def test_the_calls_of_grouped_linears_are_batched_products_of_equal_groups(
    rows: int, has_bias: bool, has_one_weight: bool
) -> None:
    """Backward computes the gradients of weights and biases too."""
    groups = 4 if rows == 8 else 1
    sizes = torch.empty(4, dtype=torch.int64, device="meta")
    weights = [meta(groups, 8, WIDTH), meta(groups, WIDTH, 8)]
    biases = [meta(groups, 8), meta(groups, WIDTH)] if has_bias else []

    def script(x: torch.Tensor, _: Any, __: Any, *given: torch.Tensor) -> torch.Tensor:
        for place in range(2):
            y = torch.bmm(x.reshape(groups, -1, x.shape[-1]), given[place].transpose(1, 2))
            if has_bias:
                y = y + given[2 + place][:, None]
            x = y.reshape(rows, -1)
        return x

    options: dict[str, Any] = {
        "bias": has_bias,
        "single_grouped_weight": has_one_weight,
        "device": "meta",
    }
    model = fuser.Sequential(
        fuser.GroupedLinear(4, WIDTH, 8, **options), fuser.GroupedLinear(4, 8, WIDTH, **options)
    )
    assert_modelled(model, script, meta(rows, WIDTH), sizes, sizes, *weights, *biases)


def test_frozen_groups_have_no_gradient_of_their_weights() -> None:
    model = fuser.Sequential(fuser.GroupedLinear(4, WIDTH, 8, bias=False, device="meta"))
    model.requires_grad_(False)
    sizes, weight = torch.empty(4, dtype=torch.int64, device="meta"), meta(4, 8, WIDTH, grad=False)
    assert_modelled(
        model,
        lambda x, _, w: torch.bmm(x.reshape(4, -1, WIDTH), w.transpose(1, 2)).reshape(8, 8),
        *(meta(8, WIDTH), sizes, weight),
    )


@pytest.mark.parametrize("place", [0, 3])
def test_one_trained_group_has_the_products_of_all(place: int) -> None:
    """A gradient of weights is one product of all groups."""
    model = fuser.Sequential(fuser.GroupedLinear(4, WIDTH, 8, bias=False, device="meta"))
    model.requires_grad_(False)
    getattr(model[0], f"weight{place}").requires_grad_()
    sizes = torch.empty(4, dtype=torch.int64, device="meta")
    assert_modelled(
        model,
        lambda x, _, w: torch.bmm(x.reshape(4, -1, WIDTH), w.transpose(1, 2)).reshape(8, 8),
        *(meta(8, WIDTH), sizes, meta(4, 8, WIDTH)),
    )


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_the_calls_of_adapters_are_those_of_three_products(kind: str, dropout: float) -> None:
    """The first of which has no gradient of its weight."""
    of_group = (4, WIDTH, WIDTH) if kind == "grouped" else (WIDTH, WIDTH)
    frozen = meta(*of_group, grad=False)
    pair = (meta(4, 2, WIDTH), meta(4, WIDTH, 2)) if kind == "grouped" else None
    down, up = pair or (meta(2, WIDTH), meta(WIDTH, 2))
    sizes = [torch.empty(4, dtype=torch.int64, device="meta")] * (kind == "grouped")

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if kind == "linear":
            return F.linear(x, w)
        return torch.bmm(x.reshape(4, -1, x.shape[-1]), w.transpose(1, 2)).reshape(8, -1)

    def script(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *_, frozen, down, up = rest
        y = product(x, frozen)
        dropped = F.dropout(x, dropout, training=True)
        return torch.add(y, product(product(dropped, down), up), alpha=2.0)

    options: dict[str, Any] = {
        "rank": 2,
        "alpha": 4.0,
        "bias": False,
        "dropout": dropout,
        "device": "meta",
    }
    op: Any = (
        fuser.LoRAGroupedLinear(4, WIDTH, WIDTH, **options)
        if kind == "grouped"
        else fuser.LoRALinear(WIDTH, WIDTH, **options)
    )
    if kind == "linear":
        op.weight.requires_grad_(False)
    given = (meta(8, WIDTH), *sizes, frozen, down, up)
    assert_modelled(fuser.Sequential(op), script, *given)


def calls_of(norm: torch.nn.Module, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """The calls of a norm's forward and of its backward."""
    x = torch.empty(8, WIDTH, device="meta", dtype=dtype, requires_grad=True)
    forward: list[TorchCall] = []
    backward: list[TorchCall] = []
    with TorchCalls(forward.append):
        y = norm(x)
    with TorchCalls(backward.append):
        torch.autograd.grad(y, x, torch.empty_like(y, device="meta"))
    return [call.name for call in forward], [call.name for call in backward if call.flops == 0]


@pytest.mark.parametrize("eps", [None, 1e-6])
def test_an_rms_norm_of_torch_is_one_kernel_as_on_a_gpu(eps: float | None) -> None:
    norm = torch.nn.RMSNorm(WIDTH, eps=eps, device="meta", dtype=torch.bfloat16)
    forward, backward = calls_of(norm, torch.bfloat16)
    assert len(forward) == 1
    assert [name for name in backward if "norm" in name] == backward
    assert calls_of(torch.nn.RMSNorm(WIDTH, elementwise_affine=False), torch.float32)[0] == forward
    mixed, _ = calls_of(norm, torch.float32)
    assert len(mixed) > 1
