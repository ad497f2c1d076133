"""A linear whose output chooses experts keeps torch's values under every recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convert import CURRENT
from torch import nn
from torch.nn import functional as F

import fuser
from fuser.conversion import routers as conversion_routers

HIDDEN, COUNT = 64, 48


def routers(model: nn.Module) -> list[str]:
    linears = [path for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    return conversion_routers.routers(model, linears)


class Choice(nn.Module):
    """The best of what another module has computed."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.argmax(-1)


def after(rounds: int, x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(rounds)):
        x = x + 1
    return x


class Choosing(nn.Module):
    """Experts, chosen by what ``route`` makes of a linear's output."""

    def __init__(self, route: Callable[[Any, torch.Tensor], Any], layers: int = 1) -> None:
        super().__init__()
        self.scorer = nn.Linear(HIDDEN, COUNT, bias=False)
        self.hidden = nn.Linear(HIDDEN, HIDDEN)
        self.bias = nn.Parameter(torch.zeros(COUNT))
        self.up = nn.Parameter(torch.randn(COUNT, HIDDEN, HIDDEN) / 8)
        self.mixer = nn.Linear(HIDDEN, HIDDEN)
        self.choice = Choice()
        self._route = route

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self._route(self, x)
        y: torch.Tensor = self.mixer(torch.einsum("th,thf->tf", x, self.up[chosen]))
        return y


USES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "topk": lambda m, x: m.scorer(x).topk(2, -1).indices[:, 0],
    "a softmax before": lambda m, x: torch.topk(F.softmax(m.scorer(x).float(), -1), 1)[1][:, 0],
    "a bias that is added": lambda m, x: (m.scorer(x).sigmoid() + m.bias).topk(2)[1][:, 1],
    "argmax": lambda m, x: m.scorer(x).argmax(-1),
    "sort": lambda m, x: torch.sort(m.scorer(x), -1, descending=True)[1][:, 0],
    "multinomial": lambda m, x: torch.multinomial(m.scorer(x).softmax(-1), 1)[:, 0],
    "the place of a maximum": lambda m, x: m.scorer(x).softmax(-1).max(-1)[1],
    "the place of a maximum by its name": lambda m, x: torch.max(m.scorer(x), dim=-1).indices,
    "sizes that are unpacked": lambda m, x: m.scorer(x).view(*x.shape[:-1], COUNT).argmax(-1),
    "another module": lambda m, x: m.choice(m.scorer(x)),
    "a branch on values": lambda m, x: None if x.max() > 1e9 else m.scorer(x).argmax(-1),
    "its other side": lambda m, x: None if x.max() < 1e9 else m.scorer(x).argmax(-1),
    "a loop of as many rounds as rows": lambda m, x: after(x.shape[0], m.scorer(x)).argmax(-1),
    "masked": lambda m, x: torch.where(x[:, :1] > 9, -1.0, m.scorer(x)).topk(1)[1][:, 0],
}


class WithALoop(nn.Module):
    """As in transformers before 5: the rows of each expert are found, which no trace follows."""

    def __init__(self) -> None:
        super().__init__()
        self.scorer = nn.Linear(HIDDEN, COUNT, bias=False)
        self.projection = nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.projection(x)
        probs, chosen = self.scorer(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows, choice = (chosen == index).nonzero(as_tuple=True)
            y[rows] += probs[rows, choice, None] * self.experts[index](x[rows])
        return y


def of_names(name: str, *beside: str) -> nn.Module:
    """A module whose forward cannot be followed, with a linear of this name."""
    module = nn.Module()
    module.forward = lambda x: x
    setattr(module, name, nn.Linear(HIDDEN, COUNT))
    for other in beside:
        setattr(module, other, nn.ModuleList([nn.Linear(HIDDEN, HIDDEN)]))
    return module


def with_parameter(module: nn.Module, name: str) -> nn.Module:
    module.register_parameter(name, nn.Parameter(torch.zeros(COUNT)))
    return module


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, COUNT)


@pytest.mark.parametrize("use", USES)
def test_a_linear_whose_output_is_ranked_is_a_router(use: str) -> None:
    model = nn.ModuleList([Choosing(USES[use]), Choosing(USES[use])])
    assert routers(model) == ["0.scorer", "1.scorer"]


@pytest.mark.parametrize(
    "read",
    [
        lambda m, x: m.scorer(x).max(-1)[0].long(),
        lambda m, x: m.scorer(x).max().long(),
        lambda m, x: loop_without_end(m.scorer(x))[:, 0].long(),
    ],
    ids=["values", "all", "a loop without an end"],
)
def test_a_linear_of_which_no_place_is_read_is_no_router(read: Any) -> None:
    assert routers(Choosing(read)) == []


def loop_without_end(x: torch.Tensor) -> torch.Tensor:
    while x.abs().max() > 1:
        x = x / 2
    return x


class Counting(nn.Module):
    """Counts its calls, and is in a module that does."""

    calls: torch.Tensor

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.scorer = nn.Linear(HIDDEN, COUNT) if inner else nn.Identity()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = self.scorer(x)
        return x if self.inner is None else self.inner(x).argmax(-1)


def test_a_forward_that_is_followed_changes_no_buffer() -> None:
    model = Counting(Counting())
    assert routers(model) == ["scorer"]
    assert [float(buffer) for buffer in model.buffers()] == [0, 0]


@pytest.mark.parametrize("model", [WithALoop, lambda: nn.Sequential(nn.ReLU(), WithALoop())])
def test_a_forward_is_followed_to_its_first_loop(model: Callable[[], nn.Module]) -> None:
    """The projection before, which the experts may read, is not counted."""
    (path,) = routers(model())
    assert path.endswith("scorer")


def test_a_layer_that_the_choice_alone_reads_belongs_to_the_router() -> None:
    behind = Choosing(lambda m, x: m.scorer(m.hidden(x).relu()).argmax(-1))
    assert routers(behind) == ["scorer", "hidden"]

    def shared(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.hidden(x)
        m.mixer(h)
        y: torch.Tensor = m.scorer(h).argmax(-1)
        return y

    assert routers(Choosing(shared)) == ["scorer"]

    def behind_an_activation(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.hidden(x)
        m.mixer(h)
        y: torch.Tensor = m.scorer(h.relu()).argmax(-1)
        return y

    assert routers(Choosing(behind_an_activation)) == ["scorer"]


@pytest.mark.parametrize("name", ["default", "keywords", "places"])
def test_a_router_is_found_in_a_forward_with_optional_arguments(name: str) -> None:
    class Default(Choosing):
        def forward(self, x: torch.Tensor, k: int = 2, mask: torch.Tensor | None = None) -> Any:
            if mask is not None:
                return x * mask
            return x[self.scorer(x).topk(k).indices[:, 0]]

    class Keywords(Choosing):
        def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
            return x[self.scorer(x).argmax(-1)]

    class Places(Choosing):
        def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
            return x[self.scorer(x).argmax(-1)]

    kinds: dict[str, Any] = {"default": Default, "keywords": Keywords, "places": Places}
    assert routers(kinds[name](USES["argmax"])) == ["scorer"]


def test_a_router_of_several_layers_may_be_a_module() -> None:
    model: Any = Choosing(lambda m, x: m.scorer(x).topk(2)[1][:, 0])
    model.scorer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, COUNT))
    assert routers(model) == ["scorer.0", "scorer.2"]
    model.scorer = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(4)))
    assert routers(model) == []  # a model whose output is ranked


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (lambda: of_names("router"), ["router"]),
        (lambda: of_names("router_projection"), ["router_projection"]),
        (lambda: of_names("gate", "experts"), ["gate"]),
        (lambda: of_names("gate", "shared_expert"), ["gate"]),
        (lambda: with_parameter(of_names("gate"), "expert_bias"), ["gate"]),
        (lambda: with_parameter(of_names("gate"), "bias"), []),
        (lambda: of_names("gate", "up"), []),
        (lambda: of_names("gate_proj", "experts"), []),
        (TopKRouter, ["layer"]),
    ],
)
def test_names_say_where_a_forward_cannot_be_followed(
    module: Callable[[], nn.Module], expected: list[str]
) -> None:
    assert routers(module()) == expected


@pytest.mark.parametrize("linears", ["recipe", "all"])
@pytest.mark.parametrize("keep", [(), ("first", "last")], ids=["none", "ends"])
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_router_has_torchs_bits_and_a_line_in_the_report(linears: Any, keep: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Choosing(USES["topk"]) for _ in range(2)))
    x = torch.randn(32, HIDDEN)
    expected = F.linear(x, model[1].scorer.weight)
    report = fuser.convert(model, recipe=CURRENT, keep=keep, linears=linears)
    with fuser.autocast(recipe=CURRENT):
        assert torch.equal(model[1].scorer(x), expected)
        assert torch.equal(model[1].mixer(x), model[1].mixer(x))
    assert report.routers == ("0.scorer", "1.scorer")
    assert "routers, in high precision:\n    2 x *.scorer" in str(report)
    assert not any(row.path.endswith("scorer") for row in report.converted)


class Net(nn.Module):
    """A clock before the first layer, and a value head behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = nn.Linear(3, HIDDEN)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, COUNT)
        self.head = nn.Linear(HIDDEN, 96)
        self.value = nn.Linear(HIDDEN, 1)
        self.router_of_heads = nn.Linear(HIDDEN, COUNT)


def test_the_first_and_the_last_linear_are_those_that_would_be_quantized() -> None:
    model = Net()
    report = fuser.convert(model, recipe=CURRENT)
    quantized = [row.path for row in report.converted if "never quantized" not in row.text]
    assert quantized == ["middle"]
    assert {row.path for row in report.converted} == {"first", "middle", "head"}


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_router_that_is_a_chain_is_not_quantized() -> None:
    torch.manual_seed(0)
    model: Any = Choosing(lambda m, x: m.scorer(x).topk(2)[1][:, 0])
    model.scorer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, COUNT))
    x = torch.randn(32, HIDDEN)
    expected = model.scorer(x)
    report = fuser.convert(model, recipe=CURRENT, keep=())
    (row,) = (row for row in report.converted if row.path == "scorer")
    assert row.text.endswith("never quantized")
    torch.testing.assert_close(model.scorer(x), expected, rtol=1e-5, atol=1e-5)
