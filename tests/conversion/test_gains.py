"""What the report of a conversion says that an option would bring: modelled times."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from said import said
from torch import nn

import fuser
from fuser.conversion.gains import device_at
from fuser.plan.plain_torch import EAGER

HIDDEN, TOKENS = 1024, 8192
CURRENT = fuser.recipe.Float8CurrentScaling()


class Parts(nn.Module):
    """A norm and linears, none of which is in a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.first, self.middle, self.last = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.value = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.first(self.norm(x)).tanh()).tanh()
        z: torch.Tensor = self.value(self.last(y).tanh())
        return z


def parts() -> Parts:
    return Parts().bfloat16()


def linear() -> nn.Module:
    return nn.Linear(HIDDEN, HIDDEN).bfloat16()


def planned(model: nn.Module, device: str = "h200") -> dict[str, fuser.FusionPlan]:
    """The plans of a converted model's pipelines for as many tokens, by path."""
    x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with fuser.autocast(recipe=CURRENT):
        return fuser.plan(model, x, device=device).plans


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_times_are_those_of_the_model_before_and_after_the_option(device: str) -> None:
    model = parts()
    kept = fuser.convert(model, recipe=CURRENT).gains(device)
    before = planned(model, device)
    fuser.convert(model, recipe=CURRENT, norms="all", keep=())
    after = planned(model, device)
    baselines = {one.name: one.microseconds for one in after["norm"].baselines}
    assert kept == {
        "norm": (baselines[EAGER], after["norm"].microseconds),
        "first": (before["first"].microseconds, after["first"].microseconds),
        "last": (before["last"].microseconds, after["last"].microseconds),
    }


def test_a_linear_that_a_recipe_would_convert_is_eager_torch_before() -> None:
    model = parts()
    gains = fuser.convert(model).gains()
    assert set(gains) == {"norm", "middle"}  # first and last would not be quantized
    fuser.convert(model, recipe=fuser.recipe.DelayedScaling())
    x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with fuser.autocast(enabled=False):
        plain = fuser.plan(model, x, device="h200").plans["middle"]
    with fuser.autocast(recipe=fuser.recipe.DelayedScaling()):
        quantized = fuser.plan(model, x, device="h200").plans["middle"]
    baselines = {one.name: one.microseconds for one in plain.baselines}
    assert gains["middle"] == (baselines[EAGER], quantized.microseconds)


def test_chains_that_are_never_quantized_have_times_of_their_fusions() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, 2048), nn.GELU(), nn.Linear(2048, HIDDEN)).bfloat16()
    assert fuser.convert(model).gains() == {}  # without a recipe none is meant to be quantized
    gains = fuser.convert(model, recipe=CURRENT).gains()
    now = planned(model)[""].microseconds
    fuser.convert(model, recipe=CURRENT, keep=())
    assert gains == {"": (now, planned(model)[""].microseconds)}


def test_a_weight_that_is_not_trained_costs_no_gradient() -> None:
    model = parts()
    trained = fuser.convert(model).gains()["middle"]
    model.middle.requires_grad_(False)
    frozen = fuser.convert(model).gains()["middle"]
    assert frozen[0] < 0.8 * trained[0]
    assert frozen[1] < trained[1]


@pytest.mark.parametrize(
    "change", [lambda m: m.requires_grad_(False), lambda m: m.float()], ids=["frozen", "fp32"]
)
def test_modules_that_differ_in_one_thing_have_times_of_their_own(change: Any) -> None:
    model, other = parts(), parts()
    change(model.last)
    change(other.first)
    gains, others = (fuser.convert(each, recipe=CURRENT).gains() for each in (model, other))
    assert gains["first"] == others["last"]
    assert gains["last"] == others["first"]
    assert gains["first"] != gains["last"]


def test_nothing_is_said_of_what_no_option_changes() -> None:
    def without_norms(**options: Any) -> set[str]:
        return set(fuser.convert(parts(), **options).gains()) - {"norm"}

    assert without_norms(filter=lambda path, module: path != "middle") == set()
    assert without_norms(linears="all") == set()
    # A norm alone is torch's under it, and so is what an activation would fuse with.
    assert set(fuser.convert(parts(), recipe=CURRENT, rounding="torch").gains()) == {
        "first",
        "last",
    }
    assert fuser.convert(nn.RMSNorm(HIDDEN, eps=1e-6)).gains() == {}
    # The width of the input of an activation is told by nothing.
    for layers, expected in (([nn.GELU(), linear()], set()), ([linear(), nn.GELU()], {""})):
        assert set(fuser.convert(nn.Sequential(*layers), recipe=CURRENT).gains()) == expected
    changed = parts()
    changed.middle.weight = nn.Parameter(changed.middle.weight.to(torch.complex64))
    assert "middle" not in fuser.convert(changed).gains()


def test_the_text_has_the_sum_of_a_line_and_says_that_it_is_modelled() -> None:
    model = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2)).bfloat16()
    report = fuser.convert(model)
    now, then = (sum(pair) for pair in zip(*report.gains().values(), strict=True))
    assert f"in an eager model: {now:.1f} us, then {then:.1f} us\n" in str(report)
    assert "modelled: forward and backward of 8192 tokens" in str(report)
    assert str(report).endswith("on H200 (measured rates)")
    assert "(measured rates); quantized under DelayedScaling" in str(fuser.convert(parts()))
    assert "modelled" not in str(fuser.convert(model, norms="all"))


def test_a_copy_of_a_report_has_the_times_and_plain_data_has_no_plans() -> None:
    report = fuser.convert(parts(), recipe=CURRENT)
    for other in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert other == report
        assert other.gains() == report.gains()
    assert set(json.loads(json.dumps(report.to_dict()))) == {"rows", "note", "routers", "left"}


def test_the_device_is_that_of_the_model_if_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GeForce RTX 5090": "rtx5090", "?": "h200"}
    for name, expected in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda place, name=name: name)
        assert device_at(torch.device("cuda")) == expected
    assert device_at(torch.device("cpu")) == "h200"
    with pytest.raises(fuser.InputError, match=said("devices-no-device-plan", repr("h300"), None)):
        fuser.convert(nn.LayerNorm(HIDDEN)).gains("h300")
