"""What fuser.convert takes and what it leaves: models, and a line for each module that counts.

A line is here if its choice is right: a choice that changes for a reason changes its line.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from said import said
from test_convert import CURRENT, HIDDEN, WIDTH, GatedMLP, PreNorm
from torch import nn
from torch.nn import functional as F

import fuser

READ = ", which read one tensor, as one product"
QKV = "q and k and v" + READ
LAYER = "add, LayerNorm, gate and up, SwiGLU, down, residual"
NEVER = ", never quantized"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return y


class Layer(nn.Module):
    """Attention, then ``feed_forward``."""

    def __init__(self, feed_forward: Callable[[], nn.Module] = PreNorm) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = feed_forward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(x + self.attention(self.norm(x)))
        return y


class Experts(nn.Module):
    """Experts of transformers: a gated feed-forward for each, in two parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * WIDTH, HIDDEN) / 8)
        self.down_proj = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / 8)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(len(self.gate_up_proj)):
            rows, place = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[rows], self.gate_up_proj[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert])
            result = result.index_add(0, rows, y * top_k_weights[rows, place, None])
        return result


class Mixture(nn.Module):
    """A router of ``count`` experts, which are in two parameters, and one for all tokens."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, count, bias=False)
        self.experts = Experts(count)
        self.shared = GatedMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        probs, chosen = self.router(rows).softmax(-1).topk(2)
        y: torch.Tensor = self.experts(rows, chosen, probs).view_as(x) + self.shared(x)
        return y


class Model(nn.Module):
    """Layers, and heads by name, each with its outputs."""

    def __init__(
        self, feed_forward: Callable[[], nn.Module] = PreNorm, count: int = 3, **heads: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, HIDDEN)
        self.layers = nn.ModuleList(Layer(feed_forward) for _ in range(count))
        self.norm = nn.LayerNorm(HIDDEN)
        self.names = list(heads)
        for name, outputs in heads.items():
            setattr(self, name, nn.Linear(HIDDEN, outputs, bias=False))

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return [getattr(self, name)(self.norm(x)) for name in self.names]


class Small(nn.Module):
    """Linears alone, of sizes around the smallest that are converted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(64, 64), nn.Linear(64, 64)
        self.few_outputs, self.few_inputs = nn.Linear(64, 31), nn.Linear(31, 64)
        self.enough_outputs, self.enough_inputs = nn.Linear(64, 32), nn.Linear(32, 64)
        self.one_output, self.gate = nn.Linear(64, 1), nn.Linear(64, 8)
        self.end = nn.Linear(64, 64)


@dataclass(frozen=True)
class Choice:
    """A model, the options of its conversion, and lines of the report by path; None: no line."""

    model: Callable[[], nn.Module]
    lines: dict[str, str | None]
    options: dict[str, Any] = field(default_factory=lambda: {"recipe": CURRENT})


# Of a model in which neither the first nor the last linear is in it.
OF_A_LAYER: dict[str, str | None] = {
    "layers.1": LAYER,
    "layers.1.norm": None,
    "layers.0.attention.q": f"linear{NEVER}",
    "layers.0.attention": "k and v" + READ,
    "layers.1.attention": QKV,
    "layers.1.attention.q": None,
    "layers.1.attention.o": "linear",
    "embed": None,
}
WITHOUT_LINEARS: dict[str, str | None] = {
    "layers.0": LAYER,
    "layers.2": LAYER,
    "layers.0.attention.q": None,
    "layers.1.norm": None,
    "": "LayerNorm, lm_head",
}
EVERY = {"recipe": CURRENT, "keep": ()}
MIXTURE = "4 experts: gate_up_proj, SwiGLU, down_proj"
SHARED = "gate and up, SwiGLU, down"


def chain() -> list[nn.Module]:
    return [nn.Linear(HIDDEN, 96), nn.GELU(), nn.Linear(96, HIDDEN)]


def hooked(model: nn.Module) -> nn.Module:
    """Its last child has a hook, which no pipeline around it would call."""
    *_, last = model.children()
    last.register_forward_hook(lambda module, args, y: 2 * y)
    return model


TABLE = {
    "a decoder": Choice(
        lambda: Model(lm_head=128), {**OF_A_LAYER, "": f"LayerNorm, lm_head{NEVER}"}
    ),
    "a head of one output": Choice(lambda: Model(score=1), OF_A_LAYER),
    "a value head behind the head": Choice(lambda: Model(lm_head=128, value=1), OF_A_LAYER),
    "a value head before the head": Choice(
        lambda: Model(value=1, lm_head=128),
        {**OF_A_LAYER, "": f"LayerNorm, value; LayerNorm, lm_head{NEVER}"},
    ),
    "no kept linear": Choice(
        lambda: Model(lm_head=128),
        {
            "layers.0": LAYER,
            "layers.0.attention": QKV,
            "layers.2.attention": QKV,
            "": "LayerNorm, lm_head",
        },
        EVERY,
    ),
    "a pattern": Choice(
        lambda: Model(lm_head=128),
        {
            "layers.0.attention.o": f"linear{NEVER}",
            "layers.2.attention.o": f"linear{NEVER}",
            "layers.0.attention": QKV,
            "layers.0": LAYER,
            "": "LayerNorm, lm_head",
        },
        {"recipe": CURRENT, "keep": ("*.o",)},
    ),
    "one linear of a chain": Choice(
        lambda: Model(lm_head=128),
        {
            "layers.0": LAYER,
            "layers.1": LAYER + NEVER,
            "layers.2": LAYER,
            "layers.1.attention": QKV,
            "": "LayerNorm, lm_head",
        },
        {"recipe": CURRENT, "keep": ("layers.1.mlp.mlp.up",)},
    ),
    "two patterns": Choice(
        lambda: Model(lm_head=128),
        {
            "layers.0": LAYER + NEVER,
            "layers.1": LAYER,
            "layers.2.attention.v": f"linear{NEVER}",
            "layers.2.attention": "q and k" + READ,
        },
        {"recipe": CURRENT, "keep": ("layers.0.mlp.*", "layers.2.attention.v")},
    ),
    "no recipe": Choice(lambda: Model(lm_head=128), WITHOUT_LINEARS, {"keep": ()}),
    "no recipe, all linears": Choice(
        lambda: Model(lm_head=128),
        {**WITHOUT_LINEARS, "layers.0.attention": QKV},
        {"keep": (), "linears": "all"},
    ),
    "chains alone": Choice(
        lambda: Model(lm_head=128), WITHOUT_LINEARS, {**EVERY, "linears": "none"}
    ),
    "all norms": Choice(
        lambda: Model(lm_head=128),
        {"layers.1.norm": "LayerNorm", "layers.1": LAYER, "norm": None, "": "LayerNorm, lm_head"},
        {**EVERY, "norms": "all"},
    ),
    "no norms": Choice(
        lambda: Model(lm_head=128),
        {
            "layers.1.norm": None,
            "layers.1.mlp": "gate and up, SwiGLU, down, add",
            "lm_head": "linear",
            "": None,
        },
        {**EVERY, "norms": "none"},
    ),
    "a filter of a linear": Choice(
        lambda: Model(lm_head=128),
        {
            "layers.0": LAYER,
            "layers.1": None,
            "layers.1.mlp.mlp": "the filter leaves out layers.1.mlp.mlp.up",
            "layers.1.mlp.mlp.down": "linear",
            "layers.1.mlp.mlp.up": None,
            "layers.1.attention": QKV,
        },
        {**EVERY, "filter": lambda path, module: path != "layers.1.mlp.mlp.up"},
    ),
    "a mixture of experts": Choice(
        lambda: Model(Mixture, lm_head=128),
        {
            "layers.1.mlp.router": None,
            "layers.0.mlp.experts": MIXTURE,
            "layers.2.mlp.experts": MIXTURE,
            "layers.1.mlp.shared": SHARED,
            "layers.1.attention": QKV,
            "": f"LayerNorm, lm_head{NEVER}",
        },
    ),
    "shared experts kept": Choice(
        lambda: Model(Mixture, lm_head=128),
        {
            "layers.0.mlp.experts": MIXTURE,
            "layers.0.mlp.shared": SHARED + NEVER,
            "layers.2.mlp.shared": SHARED + NEVER,
        },
        {"recipe": CURRENT, "keep": ("*.shared.*",)},
    ),
    "small linears": Choice(
        Small,
        {
            "few_outputs": None,
            "few_inputs": None,
            "one_output": None,
            "gate": None,
            "enough_outputs": "linear",
            "enough_inputs": "linear",
            "middle": "linear",
            "end": f"linear{NEVER}",
        },
    ),
    "small linears alone": Choice(
        lambda: nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)),
        {"": f"0, GELU, 2{NEVER}"},
    ),
    "a chain with hooks in it": Choice(
        lambda: hooked(nn.Sequential(nn.LayerNorm(HIDDEN), nn.Sequential(*chain()))),
        {"": None, "1": "0, GELU, 2"},
        EVERY,
    ),
}
"""Left out, until they are right: which linears are the first and the last ones of a model with
several heads, and routers of 32 experts or more."""


@pytest.mark.parametrize("name", TABLE)
def test_convert_takes_and_leaves_what_the_table_says(name: str) -> None:
    choice = TABLE[name]
    model = choice.model()
    assert choice.lines.keys() <= dict(model.named_modules()).keys()
    report = fuser.convert(model, **choice.options)
    lines = {row.path: row.text for row in report.rows}
    assert len(lines) == len(report.rows)
    assert {path: lines.get(path) for path in choice.lines} == choice.lines, str(report)


# -- what is left, and the report ----------------------------------------------------------


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.first, self.middle, self.last = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.router, self.value = nn.Linear(HIDDEN, 48), nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.first(self.norm(x)).tanh()).tanh()
        z: torch.Tensor = self.value(self.last(y))
        return z


def left_of(**options: Any) -> dict[str, str]:
    report = fuser.convert(Parts(), **options)
    paths = {row.path for row in (*report.converted, *report.left)} | set(report.routers)
    assert paths == {name for name, _ in Parts().named_children()}
    assert not {row.path for row in report.converted} & {row.path for row in report.left}
    return {row.path: row.text for row in report.left}


def test_the_report_has_what_is_left_to_torch_with_the_reason() -> None:
    small = "64 to 1 features: of fewer than 32 no format gains"
    norm = 'outside of chains: norms="all" makes it one kernel in an eager model'
    alone = 'outside of chains: recipe=, or linears="all", converts it'
    linears = dict.fromkeys(("first", "middle", "last"), alone)
    assert left_of() == {"norm": norm, **linears, "value": small}
    assert left_of(recipe=CURRENT) == {"norm": norm, "value": small}
    assert left_of(recipe=CURRENT, norms="all", linears="all") == {"value": small}
    filter_ = {"filter": lambda path, module: path not in ("middle", "norm")}
    for options in (filter_, {**filter_, "norms": "all", "linears": "all"}):
        filtered = left_of(recipe=CURRENT, **options)
        assert filtered["middle"] == filtered["norm"] == "the filter leaves it out"
        assert {"middle", "norm"}.isdisjoint(fuser.convert(Parts(), **options).gains())
    assert f"left to torch:\n    1 x norm (LayerNorm)  {norm}" in str(fuser.convert(Parts()))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "rms": lambda: nn.RMSNorm(HIDDEN),
    "rms with an eps": lambda: nn.RMSNorm(HIDDEN, eps=1e-6),
    "rms without a weight": lambda: nn.RMSNorm(HIDDEN, elementwise_affine=False),
    "layer": lambda: nn.LayerNorm(HIDDEN),
    "layer without a bias": lambda: nn.LayerNorm(HIDDEN, bias=False),
    "layer without a weight": lambda: nn.LayerNorm(HIDDEN, elementwise_affine=False),
    "layer of two dimensions": lambda: nn.LayerNorm((2, HIDDEN)),
}
WITH_PIPELINES = ("rms", "rms with an eps", "layer")


@pytest.mark.parametrize("norms", ["fused", "all", "none"])
def test_every_norm_of_torch_is_in_a_list_of_the_report(norms: str) -> None:
    model = nn.ModuleDict({name: make() for name, make in NORMS.items()})
    report = fuser.convert(model, norms=norms)
    converted = {row.path for row in report.converted}
    assert converted == (set(WITH_PIPELINES) if norms == "all" else set())
    left = {row.path: row.text for row in report.left}
    assert left.keys() == NORMS.keys() - converted
    for name in NORMS.keys() - set(WITH_PIPELINES):
        assert "of the last dimension alone" in left[name]


def test_without_a_recipe_nothing_is_said_of_quantization() -> None:
    of_all = fuser.convert(Parts(), linears="all")
    assert "quantized" not in str(of_all)
    quantizing = fuser.convert(Parts(), recipe=CURRENT)
    kept = [row.path for row in quantizing.converted if row.text.endswith(NEVER)]
    assert kept == ["first", "last"]


def test_a_report_that_is_taken_for_the_model_says_what_to_write() -> None:
    report: Any = fuser.convert(Parts())
    with pytest.raises(fuser.InputTypeError, match=said("convert-conversion-called-changes")):
        report(torch.ones(2, HIDDEN))
    for name in ("parameters", "to", "train", "state_dict"):
        with pytest.raises(
            AttributeError, match=said("convert-conversion-report-changes", repr(name))
        ):
            getattr(report, name)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = report.other
    assert copy.deepcopy(report) == report == pickle.loads(pickle.dumps(report))


def test_a_recipe_may_be_given_by_its_name() -> None:
    found = []
    for recipe in ("current", CURRENT):
        torch.manual_seed(0)
        model = Parts()
        fuser.convert(model, recipe=recipe)
        found.append(model(torch.linspace(-1, 1, 8 * HIDDEN).view(8, HIDDEN)))
    assert torch.equal(*found)
    with pytest.raises(fuser.InputError, match="no recipe 'curent'; there are delayed, current"):
        fuser.convert(Parts(), recipe="curent")


@pytest.mark.parametrize(
    ("count", "others", "line"),
    [
        (1, 0, "1 module runs a pipeline"),
        (2, 0, "2 modules run pipelines"),
        (1, 1, "1 module runs a pipeline, 1 not converted"),
        (0, 2, "0 modules run pipelines, 2 not converted"),
    ],
)
def test_the_first_line_counts_modules(count: int, others: int, line: str) -> None:
    def feed_forward(act: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 96), act, nn.Linear(96, 64))

    model = nn.ModuleList(feed_forward(nn.SiLU()) for _ in range(count))
    model.extend(feed_forward(nn.Mish()) for _ in range(others))
    model.append(nn.LayerNorm(64))  # left to torch
    assert str(fuser.convert(model)).split("\n")[0] == f"fuser.convert: {line}"
