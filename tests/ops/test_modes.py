"""Modes are kept: training, what is frozen, and channels, by ``from_linear``, copies and merges."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import random_tensor

import fuser
from fuser import recipe as recipes

IN, OUT, RANK, GROUPS = 32, 64, 4, 3
SIZES = (5, 0, 7)
BOTH = (True, False)


def rows() -> torch.Tensor:
    return random_tensor((sum(SIZES), IN), torch.float32, 1)


def extras(model: Any) -> list[torch.Tensor]:
    """The extra inputs of a grouped linear, none of a linear."""
    found = [torch.tensor(SIZES)] if isinstance(model, fuser.GroupedLinear) else []
    return found + ([torch.rand(sum(SIZES))] if getattr(model, "scale_bias", False) else [])


LINEARS: dict[str, Callable[..., Any]] = {
    "torch": lambda bias: torch.nn.Linear(IN, OUT, bias=bias),
    "linear": lambda bias: fuser.Linear(IN, OUT, bias=bias),
    "module": lambda bias: fuser.modules.Linear(IN, OUT, bias=bias),
    "grouped": lambda bias: fuser.GroupedLinear(GROUPS, IN, OUT, bias=bias, device="cpu"),
    "stacked": lambda bias: fuser.GroupedLinear(
        GROUPS, IN, OUT, bias=bias, device="cpu", single_grouped_weight=True
    ),
}


def adapted(linear: Any, **options: Any) -> Any:
    grouped = isinstance(linear, fuser.GroupedLinear)
    cls = fuser.LoRAGroupedLinear if grouped else fuser.LoRALinear
    return cls.from_linear(linear, rank=RANK, **options)


def adapters_of(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name.startswith("lora_")}


def with_random_adapters(model: Any) -> Any:
    with torch.no_grad():
        for seed, parameter in enumerate(adapters_of(model).values()):
            parameter.copy_(random_tensor(parameter.shape, parameter.dtype, seed))
    return model


@pytest.mark.parametrize("has_bias", BOTH)
@pytest.mark.parametrize("is_trained", BOTH)
@pytest.mark.parametrize("in_training", BOTH)
@pytest.mark.parametrize("kind", LINEARS)
def test_adapters_are_in_the_mode_of_their_linear(
    kind: str, in_training: bool, is_trained: bool, has_bias: bool
) -> None:
    """Whether it was frozen or not, its parameters are, and the adapters are trained."""
    linear = LINEARS[kind](has_bias).train(in_training).requires_grad_(is_trained)
    expected = linear(rows(), *extras(linear)).detach()
    model = adapted(linear, dropout=0.5)
    assert model.training is in_training
    assert linear.training is in_training
    own = adapters_of(model)
    assert all(p.requires_grad is (name in own) for name, p in model.named_parameters())
    assert {name for name, _ in model.named_parameters()} - set(own) == {
        name.rpartition(".")[2] for name, _ in linear.named_parameters()
    }
    assert torch.equal(model(rows(), *extras(model)), expected)  # B is zero
    with_random_adapters(model)
    draws = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        draws.append(model(rows(), *extras(model)))
    assert torch.equal(*draws) is not in_training


@pytest.mark.parametrize("scaling", [recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()])
@pytest.mark.parametrize("in_training", BOTH)
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_adapters_of_quantized_weights_are_in_the_mode_of_their_linear(
    kind: str, in_training: bool, scaling: recipes.Recipe
) -> None:
    with fuser.quantized_model_init(recipe=scaling):
        model = adapted(LINEARS[kind](True).train(in_training), dropout=0.5)
    assert model.training is in_training
    assert all(p.requires_grad is n.startswith("lora_") for n, p in model.named_parameters())


COPIES: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: saved_and_loaded(model),
}


def saved_and_loaded(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def modes_of(model: Any) -> tuple[Any, ...]:
    are_trained = {name: p.requires_grad for name, p in model.named_parameters()}
    return model.training, model.is_merged, model.scale, model.dropout_probability, are_trained


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("is_merged", BOTH)
@pytest.mark.parametrize("in_training", BOTH)
@pytest.mark.parametrize("kind", ["linear", "grouped", "stacked"])
def test_a_copy_has_every_mode(kind: str, in_training: bool, is_merged: bool, name: str) -> None:
    linear = LINEARS[kind](True).train(in_training)
    model = with_random_adapters(adapted(linear, alpha=3.0, dropout=0.25))
    first, *_ = adapters_of(model).values()
    first.requires_grad_(False)
    before = modes_of(model)
    if is_merged:
        model.merge()
    twin = COPIES[name](model)
    assert modes_of(twin) == modes_of(model)
    for one in (model, twin):
        one.eval()
    assert torch.equal(twin(rows(), *extras(twin)), model(rows(), *extras(model)))
    if is_merged:
        twin.unmerge()
        assert modes_of(twin.train(in_training)) == before
        assert model.is_merged  # not of the copy


@pytest.mark.parametrize("in_training", BOTH)
@pytest.mark.parametrize(("a_trained", "b_trained"), list(itertools.product(BOTH, BOTH)))
@pytest.mark.parametrize("kind", ["linear", "grouped", "stacked"])
def test_unmerged_adapters_are_trained_as_before(
    kind: str, a_trained: bool, b_trained: bool, in_training: bool
) -> None:
    """Each of them, if some are frozen; twice, for what the first left; and of a changed choice."""
    model = with_random_adapters(adapted(LINEARS[kind](True), dropout=0.25)).train(in_training)
    own = adapters_of(model)
    for turn in range(2):
        chosen = {
            name: (a_trained if name.startswith("lora_A") else b_trained) ^ bool(turn)
            for name in own
        }
        if len(own) > 2:  # one expert alone
            chosen["lora_A1"] = not chosen["lora_A1"]
        for name, parameter in own.items():
            parameter.requires_grad_(chosen[name])
        before = modes_of(model)
        model.merge()
        assert not any(p.requires_grad for p in model.parameters())
        assert model.training is in_training
        model.unmerge()
        assert modes_of(model) == before
        assert {name: p.requires_grad for name, p in own.items()} == chosen


@pytest.mark.parametrize("scale_bias", BOTH)
@pytest.mark.parametrize("kind", ["linear", "grouped", "stacked"])
def test_a_bias_that_is_trained_stays_so_through_merges(kind: str, scale_bias: bool) -> None:
    if kind == "linear":
        model = adapted(LINEARS[kind](True))
    else:
        linear = fuser.GroupedLinear(
            *(GROUPS, IN, OUT),
            scale_bias=scale_bias,
            single_grouped_weight=kind == "stacked",
            single_grouped_bias=kind == "stacked",
            device="cpu",
        )
        model = adapted(linear)
    with_random_adapters(model)
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    assert biases
    for bias in biases:
        bias.requires_grad_(True)
    more = extras(model)
    for change in (lambda: None, model.merge, model.unmerge):
        change()
        assert all(bias.requires_grad for bias in biases)
        model.zero_grad()
        model(rows(), *more).sum().backward()
        total = sum(float(bias.grad.sum()) for bias in biases if bias.grad is not None)
        weight = float(more[1].sum()) if len(more) > 1 else sum(SIZES)
        assert total == pytest.approx(OUT * weight, rel=1e-5)


def test_channels_and_layouts_are_those_of_the_linear() -> None:
    for layout in itertools.product(BOTH, BOTH, BOTH):
        weight, bias, scaled = layout
        linear = fuser.GroupedLinear(
            *(GROUPS, IN, OUT),
            single_grouped_weight=weight,
            single_grouped_bias=bias,
            scale_bias=scaled,
            device="cpu",
        )
        linear.set_extra_input_channel(0, "split sizes")
        model = adapted(linear)
        names = ("single_grouped_weight", "single_grouped_bias", "scale_bias", "has_bias")
        assert all(getattr(model, name) is getattr(linear, name) for name in names)
        assert model._input_channels == linear._input_channels == {0: "split sizes"}
        model.set_extra_input_channel(0, "another")
        assert linear._input_channels == {0: "split sizes"}  # a copy


@pytest.mark.parametrize("in_training", BOTH)
@pytest.mark.parametrize("kind", ["linear", "grouped", "stacked"])
def test_a_merged_op_computes_in_every_mode_what_the_formula_does(
    kind: str, in_training: bool
) -> None:
    """A merged one drops nothing; one that is not merged again drops in training."""
    model = with_random_adapters(adapted(LINEARS[kind](True), alpha=2.0, dropout=0.5))
    model.train(in_training)
    state = {name: p.detach().double() for name, p in model.named_parameters()}
    if kind == "linear":
        weights = [state["weight"] + 0.5 * state["lora_B"] @ state["lora_A"]]
        biases, parts = [state["bias"]], [rows().double()]
    else:
        parts = list(rows().double().split(SIZES))
        names = ("weight", "lora_A", "lora_B")
        stacks = [
            state[name] if name in state else [state[f"{name}{g}"] for g in range(GROUPS)]
            for name in names
        ]
        weights = [w + 0.5 * b @ a for w, a, b in zip(*stacks, strict=True)]
        biases = [state[f"bias{g}"] for g in range(GROUPS)]
    pairs = zip(parts, weights, biases, strict=True)
    expected = torch.cat([x @ weight.T + bias for x, weight, bias in pairs])
    for is_merged in (True, False):
        (model.merge if is_merged else model.unmerge)()
        found = [model(rows(), *extras(model)).double() for _ in range(3)]
        if is_merged or not in_training:
            for y in found:
                torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        else:
            assert not torch.equal(found[0], found[1])
