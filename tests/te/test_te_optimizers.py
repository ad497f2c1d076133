"""Steps of FusedAdam and FusedSGD in every format, against torch's in fp32."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import every_format as formats
import pytest
import torch
from emulator import emulated

import fuser
from fuser.te.pytorch import optimizers as fused

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STORED: dict[str, Any] = {"fp32": F32, "bf16": BF16, "fp16": F16, **formats.RECIPES}
QUANTIZED = [name for name in STORED if name in formats.RECIPES]
SHAPE = (64, 32)


def weight_in(stored: str, seed: int = 0) -> Any:
    """A weight of normal values, in the dtype or the format of a recipe."""
    torch.manual_seed(seed)
    if stored not in formats.RECIPES:
        return torch.nn.Parameter(torch.randn(SHAPE).to(STORED[stored]))
    with fuser.quantized_model_init(recipe=formats.deterministic(formats.RECIPES[stored])):
        weight: Any = fuser.BasicLinear(SHAPE[1], SHAPE[0], dtype=BF16).weight
    assert isinstance(weight, fuser.QuantizedTensor)
    with torch.no_grad():
        weight.copy_(torch.randn(SHAPE).to(BF16))
    return weight


def values_of(weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, fuser.QuantizedTensor):
        return weight.dequantize(dtype=F32)
    return weight.detach().float().clone()


def rounded_as(weight: Any, values: torch.Tensor) -> torch.Tensor:
    """The values in fp32 as the weight would hold them."""
    if not isinstance(weight, fuser.QuantizedTensor):
        return values.to(weight.dtype).float()
    twin = weight.detach().clone()
    twin.quantize_(values.to(weight.dtype))
    return values_of(twin)


def assert_held(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Whether a weight holds ``values``, rounded; the last bit of an fp32 may round otherwise."""
    found, expected = values_of(weight), rounded_as(weight, values)
    if weight.dtype is F32 and not isinstance(weight, fuser.QuantizedTensor):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        return
    assert int((found != expected).sum()) <= max(1, found.numel() // 100)
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.35 * largest)


class Steps(NamedTuple):
    """An optimizer, and torch's of which it takes the steps."""

    ours: Any
    theirs: Any
    options: dict[str, Any]


def assert_steps_are_torchs(
    stored: str, has_master: bool, steps: Steps, own: dict[str, Any], tensor_lr: bool = False
) -> None:
    """Three steps, each from the values that the weight has, or from its master weight."""
    weight = weight_in(stored)
    plain = torch.nn.Parameter(values_of(weight))
    rates = (torch.tensor(0.05), torch.tensor(0.05)) if tensor_lr else (0.05, 0.05)
    optimizer = steps.ours([weight], lr=rates[0], master_weights=has_master, **steps.options, **own)
    reference = steps.theirs([plain], lr=rates[1], **steps.options)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        gradient = torch.randn(SHAPE, generator=generator).to(weight.dtype)
        weight.grad, plain.grad = gradient, gradient.float()
        version = weight._version
        optimizer.step()
        reference.step()
        assert weight._version > version
        assert_held(weight, plain.detach())
        if has_master and stored != "fp32":
            master = optimizer.state[weight]["master_param"]
            assert master.dtype is F32
            torch.testing.assert_close(master, plain.detach(), rtol=1e-5, atol=1e-6)
        elif not has_master:
            assert "master_param" not in optimizer.state[weight]
            with torch.no_grad():
                plain.copy_(values_of(weight))


# A decay of a tenth a step: wider than half a step of four bits.
ADAM: dict[str, Any] = {"weight_decay": 2.0, "betas": (0.8, 0.95), "eps": 1e-3}


@pytest.mark.parametrize("is_on_device", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("adam_w", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("has_master", [True, False], ids=["master", "alone"])
@pytest.mark.parametrize("stored", STORED)
def test_adam_takes_the_steps_of_torch(
    stored: str, has_master: bool, adam_w: bool, is_on_device: bool
) -> None:
    cls = torch.optim.AdamW if adam_w else torch.optim.Adam
    own = {"adam_w_mode": adam_w, "capturable": is_on_device}
    steps = Steps(fused.FusedAdam, cls, ADAM)
    assert_steps_are_torchs(stored, has_master, steps, own, tensor_lr=is_on_device)


@pytest.mark.parametrize("adam_w", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("stored", ["bf16", "mxfp8"])
def test_adam_without_decay_takes_the_steps_of_torch(stored: str, adam_w: bool) -> None:
    cls = torch.optim.AdamW if adam_w else torch.optim.Adam
    steps = Steps(fused.FusedAdam, cls, {"weight_decay": 0.0})
    assert_steps_are_torchs(stored, True, steps, {"adam_w_mode": adam_w})


SGD = (
    {"momentum": 0.0},
    {"momentum": 0.0, "weight_decay": 2.0},
    {"momentum": 0.9, "weight_decay": 2.0, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.5},
)


@pytest.mark.parametrize("options", SGD, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("has_master", [True, False], ids=["master", "alone"])
@pytest.mark.parametrize("stored", STORED)
def test_sgd_takes_the_steps_of_torch(
    stored: str, has_master: bool, options: dict[str, Any]
) -> None:
    steps = Steps(fused.FusedSGD, torch.optim.SGD, options)
    assert_steps_are_torchs(stored, has_master, steps, {})


@pytest.mark.parametrize("cls", ["AdamW", "SGD"])
@pytest.mark.parametrize("has_master", [True, False], ids=["master", "alone"])
@pytest.mark.parametrize("stored", QUANTIZED)
def test_master_weights_alone_begin_with_the_values_before_quantization(
    stored: str, has_master: bool, cls: str
) -> None:
    """A weight without one is updated from the values that it has."""
    torch.manual_seed(0)
    scaling = formats.deterministic(formats.RECIPES[stored])
    with fuser.quantized_model_init(recipe=scaling, preserve_high_precision_init_val=True):
        weight: Any = fuser.BasicLinear(SHAPE[1], SHAPE[0], dtype=BF16).weight
    first, present = weight.get_high_precision_init_val().float(), values_of(weight)
    begun = first if has_master else present
    plain = torch.nn.Parameter(begun.clone())
    weight.grad = torch.randn(SHAPE).to(BF16)
    plain.grad = weight.grad.float()
    ours: Any = {"AdamW": fused.FusedAdam, "SGD": fused.FusedSGD}[cls]
    ours([weight], lr=0.1, weight_decay=0.5, master_weights=has_master).step()
    getattr(torch.optim, cls)([plain], lr=0.1, weight_decay=0.5).step()
    assert_held(weight, plain.detach())
    other = plain.detach() - begun + (present if has_master else first)
    assert int((rounded_as(weight, other) != values_of(weight)).sum()) > 2 * SHAPE[0]
    assert weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("stored", ["fp32", "bf16", "current"])
def test_gradients_are_read_from_where_the_optimizer_is_told(stored: str) -> None:
    weight: Any = weight_in(stored)
    plain = torch.nn.Parameter(values_of(weight))
    optimizer = fused.FusedAdam([weight], 0.05, use_decoupled_grad=True, master_weights=True)
    reference = torch.optim.AdamW([plain], 0.05, weight_decay=0.0)
    for seed in range(2):
        torch.manual_seed(seed)
        weight.grad = torch.full(SHAPE, 7.0, dtype=weight.dtype)  # not read
        weight.decoupled_grad = plain.grad = torch.randn(SHAPE)  # in fp32, whatever the weight
        optimizer.step()
        reference.step()
        assert_held(weight, plain.detach())
    optimizer.zero_grad()
    assert weight.decoupled_grad is None
    before = values_of(weight)
    weight.grad = torch.ones(SHAPE, dtype=weight.dtype)
    optimizer.step()
    assert torch.equal(values_of(weight), before)


@pytest.mark.parametrize("name", ["grad", "decoupled_grad"])
def test_gradients_that_are_set_to_zeros_stay_in_their_memory(name: str) -> None:
    weight, other = (torch.nn.Parameter(torch.ones(SHAPE)) for _ in range(2))
    options = {"use_decoupled_grad": name == "decoupled_grad"}
    optimizer = fused.FusedAdam([weight, other], 0.05, **options)
    gradient = torch.ones(SHAPE)
    setattr(weight, name, gradient)
    optimizer.zero_grad(set_to_none=False)
    assert getattr(weight, name) is gradient
    assert not gradient.any()
    assert getattr(other, name, None) is None
    optimizer.zero_grad()
    assert getattr(weight, name) is None


def test_each_group_has_its_options_and_its_count_of_steps() -> None:
    """Of groups of mixed dtypes, with a parameter that gets no gradient at first."""
    stored = ("bf16", "fp32", "fp16", "mxfp8")
    options: tuple[dict[str, Any], ...] = (
        {"lr": 0.05, "weight_decay": 2.0},
        {"lr": 0.2, "betas": (0.5, 0.6)},
    )
    weights = [[weight_in(name, seed) for name in stored] for seed in (0, 1)]
    plain = [[torch.nn.Parameter(values_of(weight)) for weight in group] for group in weights]
    optimizer = fused.FusedAdam(
        [{"params": group, **own} for group, own in zip(weights, options, strict=True)],
        master_weights=True,
    )
    references = [
        torch.optim.AdamW(group, **{"weight_decay": 0.0, **own})
        for group, own in zip(plain, options, strict=True)
    ]
    for step in range(3):
        for place, (group, twins) in enumerate(zip(weights, plain, strict=True)):
            for number, (weight, twin) in enumerate(zip(group, twins, strict=True)):
                torch.manual_seed(10 * step + number)
                gradient = torch.randn(SHAPE).to(weight.dtype)
                has_one = step > 0 or place == 0
                weight.grad = gradient if has_one else None
                twin.grad = gradient.float() if has_one else None
        optimizer.step()
        for reference in references:
            reference.step()
        for group, twins in zip(weights, plain, strict=True):
            for weight, twin in zip(group, twins, strict=True):
                assert_held(weight, twin.detach())
    assert [group["step"] for group in optimizer.param_groups] == [3, 2]


@pytest.mark.parametrize("has_master", [True, False])
@pytest.mark.parametrize("stored", ["bf16", "fp16", "fp32"])
def test_views_in_16_bits_are_updated_and_their_neighbours_are_not(
    stored: str, has_master: bool
) -> None:
    for make in (lambda whole: whole[:, :4], lambda whole: whole.t()[:4], lambda whole: whole[1:]):
        whole = torch.randn(6, 6).to(STORED[stored])
        before = whole.clone()
        weight = torch.nn.Parameter(make(whole))
        plain = torch.nn.Parameter(weight.detach().float().contiguous().clone())
        gradient = torch.randn(weight.shape).to(weight.dtype)
        weight.grad, plain.grad = gradient, gradient.float()
        fused.FusedAdam([weight], 0.05, weight_decay=2.0, master_weights=has_master).step()
        torch.optim.AdamW([plain], 0.05, weight_decay=2.0).step()
        assert_held(weight, plain.detach())
        make(before).copy_(weight.detach())
        assert torch.equal(whole, before)


# -- by kernels ----------------------------------------------------------------------


@contextmanager
def on(device: str) -> Iterator[None]:
    """Torch's path, or kernels that write without torch's knowledge."""
    if device == "kernels":
        with emulated():
            yield
    else:
        yield


DEVICES = ["torch", "kernels"]


@pytest.mark.parametrize("cls", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("stored", ["fp32", "bf16", "current", "mxfp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_after_a_step_is_refused(device: str, stored: str, cls: str) -> None:
    """Its gradient of the input would be of weights that the forward did not have.

    Nothing but the optimizer sees decoupled gradients, so it alone can raise the version.
    """
    weight: Any = weight_in(stored)
    x = torch.randn(4, SHAPE[1], dtype=weight.dtype).requires_grad_()
    options = {"use_decoupled_grad": True} if cls == "FusedAdam" else {}
    optimizer = getattr(fused, cls)([weight], 0.1, master_weights=True, **options)
    name = "decoupled_grad" if options else "grad"
    setattr(weight, name, torch.ones(SHAPE, dtype=weight.dtype))
    if stored in formats.RECIPES:
        op = fuser.BasicLinear(SHAPE[1], SHAPE[0], device="meta", dtype=BF16)
        op.weight = weight
        recipe = formats.deterministic(formats.RECIPES[stored])
        with fuser.autocast(recipe=recipe):
            y = op(x)
    else:
        y = torch.nn.functional.linear(x, weight)
    with on(device):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"in.?place|changed"):
        y.sum().backward()


INFINITE, NAN = float("inf"), float("nan")
HARD: dict[str, dict[str, float]] = {
    "an infinite weight": {"weight": INFINITE},
    "a weight of minus infinity": {"weight": -INFINITE},
    "a weight that is NaN": {"weight": NAN},
    "an infinite gradient": {"gradient": INFINITE},
    "a gradient that is NaN": {"gradient": NAN},
    "a subnormal gradient": {"gradient": 1e-39},
    "a gradient whose square overflows": {"gradient": 1e30},
    "both infinite": {"weight": INFINITE, "gradient": -INFINITE},
}


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("adam_w", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("device", DEVICES)
def test_one_hard_value_among_others_is_stepped_as_in_torch(
    device: str, adam_w: bool, decay: float
) -> None:
    cls = torch.optim.AdamW if adam_w else torch.optim.Adam
    torch.manual_seed(0)
    count = len(HARD)
    weights, gradients = torch.randn(2, count, 16)
    for row, hard in enumerate(HARD.values()):
        weights[row, 2 * row % 16] = hard.get("weight", 1.0)
        gradients[row, 2 * row % 16] = hard.get("gradient", 1.0)
    ours = torch.nn.Parameter(weights.to(BF16))
    theirs = torch.nn.Parameter(ours.detach().float())
    optimizer = fused.FusedAdam(
        [ours], 0.05, weight_decay=decay, adam_w_mode=adam_w, master_weights=True, eps=1e-3
    )
    ours.grad, theirs.grad = gradients.to(BF16), gradients.to(BF16).float()
    with on(device):
        optimizer.step()
    reference = cls([theirs], 0.05, weight_decay=decay, eps=1e-3)
    reference.step()
    state, wanted = optimizer.state[ours], reference.state[theirs]
    pairs = {
        "weights": (state["master_param"], theirs.detach()),
        "exp_avg": (state["exp_avg"], wanted["exp_avg"]),
        "exp_avg_sq": (state["exp_avg_sq"], wanted["exp_avg_sq"]),
    }
    for name, (found, expected) in pairs.items():
        for row, what in enumerate(HARD):
            torch.testing.assert_close(
                *(found[row], expected[row]), equal_nan=True, rtol=1e-5, atol=1e-6,
                msg=f"{name}, {what}",
            )  # fmt: skip
    assert torch.equal(ours.detach().isnan(), theirs.isnan())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adam_w_mode": False, "capturable": True},
        {"master_weights": True, "use_decoupled_grad": True},
    ],
    ids=["default", "adam", "decoupled"],
)
def test_a_pickled_optimizer_has_its_options(options: dict[str, Any]) -> None:
    optimizer = fused.FusedAdam([torch.nn.Parameter(torch.ones(4))], 0.05, **options)
    again = pickle.loads(pickle.dumps(optimizer))
    for name in ("adam_w_mode", "capturable", "master_weights", "use_decoupled_grad"):
        assert getattr(again, name) == getattr(optimizer, name), name


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_a_parameter_in_fp32_has_no_master_weight(layout: str) -> None:
    """Else a value that is set would be overwritten by the next step."""
    memory = torch.ones(8, 12)
    value = {"contiguous": memory, "transposed": memory.t(), "strided": memory[:, ::2]}[layout]
    weight = torch.nn.Parameter(value)
    optimizer = fused.FusedAdam([weight], 0.5, master_weights=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert "master_param" not in optimizer.state[weight]
    with torch.no_grad():
        weight.fill_(100.0)
    optimizer.step()
    assert float(weight.detach().min()) > 98.0
