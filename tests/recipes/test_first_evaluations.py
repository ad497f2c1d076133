"""Evaluations under delayed scaling before a step has set the scales."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from said import said
from test_recomputed_by_hand import ByHand
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.precision import delayed_scaling

RECIPE = fuser.recipe.DelayedScaling(amax_history_len=4)
SENTENCE = said("delayed-scaling-scales-not-set")


@pytest.fixture(autouse=True)
def _no_other_warning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(delayed_scaling, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* is emulated")
        yield


def library() -> Any:
    return fuser.Sequential(fuser.Linear(32, 32), fuser.GELU(), fuser.Linear(32, 32))


def converted() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    fuser.convert(model, keep=())
    return model


MODELS = [library, converted]


def called(model: Any, x: torch.Tensor) -> Any:
    with fuser.autocast(recipe=RECIPE):
        return model(x)


def evaluated(model: Any) -> None:
    with torch.no_grad():
        called(model.eval(), torch.randn(16, 32))


def trained(model: Any) -> Any:
    called(model, torch.randn(16, 32)).sum().backward()
    return model


@pytest.mark.parametrize("made", MODELS)
def test_an_evaluation_before_a_step_warns_once(made: Callable[[], Any]) -> None:
    with pytest.warns(fuser.FuserWarning, match=SENTENCE):
        evaluated(made())
    evaluated(made())


def test_a_converted_model_with_a_loaded_state_warns() -> None:
    """Its keys are those of the plain model, which has no scales."""
    model = converted()
    model.load_state_dict(trained(converted()).state_dict())
    with pytest.warns(fuser.FuserWarning, match=SENTENCE):
        evaluated(model)


@pytest.mark.parametrize("made", MODELS)
def test_scales_that_a_step_has_set_do_not(made: Callable[[], Any]) -> None:
    model = trained(made())
    evaluated(model)
    evaluated(copy.deepcopy(model))


def test_scales_of_a_state_do_not() -> None:
    model = library()
    model.load_state_dict(trained(library()).state_dict())
    evaluated(model)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "by hand"])
def test_the_forward_of_a_recomputation_does_not(way: str) -> None:
    model, x = library(), torch.randn(16, 32).requires_grad_()

    def function(x: torch.Tensor) -> Any:
        return called(model, x)

    if way == "by hand":
        y: Any = ByHand.apply(function, x)
    else:
        y = checkpoint(function, x, use_reentrant=way == "reentrant")
    y.sum().backward()
