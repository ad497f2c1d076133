"""A step of an optimizer between forward and backward is refused, whoever counts its writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import fuser
from fuser import recipe as recipes

CURRENT = recipes.Float8CurrentScaling()
REFUSED = r"modified by an inplace operation|was changed|was written"


class Foreign(torch.optim.Optimizer):
    """As those of other libraries, whose kernels write where torch does not look."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.5)


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "another library's": Foreign,
}
BUDGETS: dict[str, Any] = {
    "default": {"memory_budget": 1},
    "without copies": {"memory_budget": 1, "keep_weight_copies": False},
    "inputs alone": {"memory_budget": 0},
    "everything": {"memory_budget": None},
}


def made() -> fuser.Sequential:
    torch.manual_seed(0)
    return fuser.Sequential(
        fuser.LayerNorm(64), fuser.Linear(64, 128), fuser.SwiGLU(), fuser.Linear(64, 32)
    )


def data() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_step_before_the_backward_is_refused(optimizer: str, budget: str, recipe: Any) -> None:
    model, x = made(), data()
    stepping = OPTIMIZERS[optimizer](list(model.parameters()))
    with (
        fuser.activation_memory_budget(**BUDGETS[budget]),
        fuser.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        model(x).square().sum().backward()
        y = model(x)
        stepping.step()
        with pytest.raises((RuntimeError, fuser.StateError), match=REFUSED):
            y.square().sum().backward()
        model(x).square().sum().backward()  # the next step works


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_of_other_parameters_changes_nothing(optimizer: str, budget: str) -> None:
    """As in adversarial training."""
    found = []
    for steps_between in (False, True):
        model, other, x = made(), made(), data()
        stepping = OPTIMIZERS[optimizer](list(other.parameters()))
        other(x).sum().backward()
        x.grad = None
        with fuser.activation_memory_budget(**BUDGETS[budget]):
            y = model(x)
            if steps_between:
                stepping.step()
            y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_parameters_without_a_gradient_are_as_they_were() -> None:
    model = made()
    model[1].weight.requires_grad_(False)
    stepping = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x = data()
    model(x).sum().backward()
    before = {name: p._version for name, p in model.named_parameters()}
    stepping.step()
    for name, parameter in model.named_parameters():
        assert (parameter._version > before[name]) == (parameter.grad is not None), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_so_it_is_of_a_converted_model(optimizer: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(64), torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64)
    )
    fuser.convert(model, recipe=CURRENT, keep=())
    stepping, x = OPTIMIZERS[optimizer](list(model.parameters())), data()
    for budget in BUDGETS.values():
        with fuser.activation_memory_budget(**budget):
            model(x).square().sum().backward()
            y = model(x)
        stepping.step()
        with pytest.raises((RuntimeError, fuser.StateError), match=REFUSED):
            y.square().sum().backward()
