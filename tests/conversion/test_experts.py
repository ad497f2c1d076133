"""Experts as transformers has them, without the library: converted, changed, and look-alikes."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from said import said
from test_convert import pipelines_run
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import fuser
from fuser.conversion.experts import experts_chain
from fuser.conversion.unit import ChainPipeline

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

E, HIDDEN, WIDTH, TOKENS = 4, 32, 48, 10
RECIPES: dict[str, Any] = {
    "none": None,
    "current": fuser.recipe.Float8CurrentScaling(),
    "mxfp8": fuser.recipe.MXFP8BlockScaling(),
}


class Experts(nn.Module):
    """A gated feed-forward for each expert, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * WIDTH, HIDDEN) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(E, HIDDEN, WIDTH) * 0.2)

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[e])

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(E):
            token, place = torch.where(top_k_index == e)
            y = self.expert(hidden_states[token], e) * top_k_weights[token, place, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out


class Transposed(Experts):
    """The weights are ``[in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, HIDDEN, 2 * WIDTH) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(E, WIDTH, HIDDEN) * 0.2)

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = (x @ self.gate_up_proj[e]).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.down_proj[e]


class GptOss(Transposed):
    """With biases, columns of gate and up that alternate, and bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj_bias = nn.Parameter(torch.randn(E, 2 * WIDTH))
        self.down_proj_bias = nn.Parameter(torch.randn(E, HIDDEN))
        self.alpha, self.limit = 1.702, 1.5

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate_up = x @ self.gate_up_proj[e] + self.gate_up_proj_bias[e]
        return self.gated(gate_up) @ self.down_proj[e] + self.down_proj_bias[e]

    def forward(self, hidden_states: Any, router_indices: Any, routing_weights: Any) -> Any:
        return super().forward(hidden_states, router_indices, routing_weights)


class InHalves(GptOss):
    """Gate and up are halves."""

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class ClampedSilu(Experts):
    """SwiGLU with bounds, as in HY."""

    def __init__(self) -> None:
        super().__init__()
        self.swiglu_limit = 0.75

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
        limit = self.swiglu_limit
        y = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return F.linear(y, self.down_proj[e])


class AlternatingSwiGLU(Experts):
    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate_up = F.linear(x, self.gate_up_proj[e])
        return F.linear(F.silu(gate_up[..., ::2]) * gate_up[..., 1::2], self.down_proj[e])


class AnyArguments(Experts):
    """Whose forward is that of an implementation, chosen by its config, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"experts_implementation": "eager"}

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        return Experts.forward(self, *args, **keywords)


class AnyArgumentsAlone(AnyArguments):
    def __init__(self) -> None:
        super().__init__()
        del self.config


class Block(nn.Module):
    """A router and experts."""

    def __init__(self, make: Callable[[], Experts] = Experts, k: int = 2) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(HIDDEN, E, bias=False)
        self.experts = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, experts = self.router(x).softmax(-1).topk(self.k, dim=-1)
        y: torch.Tensor = self.experts(x, experts, probs)
        return y


def made(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def data() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))


def results(model: nn.Module, x: torch.Tensor, recipe: Any = None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(leaf)
    y.float().square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert leaf.grad is not None
    return {"y": y.detach(), "x": leaf.grad, **grads}


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = 1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm()
        assert error <= bound * value.double().norm() + 1e-12, name


@pytest.mark.sampled
@pytest.mark.parametrize("k", [1, 2, E])
@pytest.mark.parametrize("make", [Experts, AnyArguments])
@pytest.mark.parametrize("name", RECIPES)
def test_converted_experts_have_the_values_of_their_loop(
    name: str, make: Callable[[], Experts], k: int
) -> None:
    plain, model = (made(lambda: Block(make, k)) for _ in range(2))
    keys = list(model.state_dict())
    report = fuser.convert(model)
    (row,) = report.converted
    assert (row.path, row.text) == ("experts", "4 experts: gate_up_proj, SwiGLU, down_proj")
    assert not report.refused
    assert list(model.state_dict()) == keys
    assert pipelines_run(model, data()) == 1
    exact = results(copy.deepcopy(plain).double(), data().double())
    for _ in range(3):
        found = results(model, data(), RECIPES[name])
        assert_close(found, exact, 1e-5 if name == "none" else 0.2)
        is_exact = (found["y"].double() - exact["y"]).norm() < 1e-5 * exact["y"].norm()
        assert bool(is_exact) is (name == "none")  # quantized under a recipe
    fuser.revert(model)
    assert pipelines_run(model, data()) == 0
    assert_close(results(model, data()), exact)


LAYOUTS = (Transposed, GptOss, InHalves, ClampedSilu, AlternatingSwiGLU)


@pytest.mark.parametrize(
    ("name", "make"),
    [*(("none", make) for make in LAYOUTS), ("current", GptOss), ("mxfp8", GptOss)],
)
def test_experts_of_other_layouts_have_the_values_of_their_loop(
    name: str, make: Callable[[], Experts]
) -> None:
    plain, model = (made(lambda: Block(make)) for _ in range(2))
    if name != "none":  # a rounded value may be on the other side of a bound, in its gradient too
        plain.experts.limit = model.experts.limit = 7.0
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    (row,) = fuser.convert(model).converted
    gate = "SwiGLU" if make in (Transposed, AlternatingSwiGLU) else "ClampedSwiGLU"
    assert row.text == f"4 experts: gate_up_proj, {gate}, down_proj"
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes
    model.load_state_dict(plain.state_dict())
    x = 2 * data()
    assert pipelines_run(model, x) == 1
    exact = results(copy.deepcopy(plain).double(), x.double())
    for _ in range(3):
        assert_close(results(model, x, RECIPES[name]), exact, 1e-5 if name == "none" else 0.2)


@pytest.mark.parametrize("is_at_once", [False, True], ids=["by group", "at once"])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_of_transposed_weights_are_not_copied(
    name: str, is_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd copies a gradient with other strides than its parameter."""
    if is_at_once:  # as on a GPU that multiplies groups
        monkeypatch.setattr(fuser.GroupedLinear, "runs_at_once", lambda self, key: True)
    model = made(lambda: Block(GptOss))
    exact = results(copy.deepcopy(model).double(), data().double())
    fuser.convert(model)
    strides: dict[str, tuple[int, ...]] = {}
    weights = {key: p for key, p in model.experts.named_parameters() if p.dim() == 3}
    for key, weight in weights.items():
        weight.register_hook(lambda grad, key=key: strides.update({key: grad.stride()}))
    assert_close(results(model, data(), RECIPES[name]), exact, 1e-5 if name == "none" else 0.3)
    if name == "none" or is_at_once:
        assert strides == {key: weight.stride() for key, weight in weights.items()}


class OfSequences(Experts):
    """Tokens of sequences are rows inside, and sequences again."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        shape = hidden_states.shape
        rows = hidden_states.reshape(-1, shape[-1])
        return super().forward(rows, top_k_index, top_k_weights).view(shape)


def test_tokens_of_sequences_with_choices_of_rows_keep_their_shape() -> None:
    torch.manual_seed(0)
    model = OfSequences()
    plain, x = copy.deepcopy(model), torch.randn(2, 5, HIDDEN)
    probs, chosen = torch.rand(10, E).topk(2)
    assert fuser.convert(model).converted
    for tokens in (x, x.view(10, HIDDEN)):
        y = model(tokens, chosen, probs)
        assert y.shape == tokens.shape
        torch.testing.assert_close(y, plain(tokens, chosen, probs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("make", [Experts, GptOss])
def test_weights_of_tokens_of_another_dtype_are_those_of_the_own_forward(
    make: Callable[[], Experts], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = made(make), made(make)
    fuser.convert(model)
    probs, chosen = torch.rand(TOKENS, E).topk(2)
    found, expected = (one(data(), chosen, (3 * probs).to(dtype)) for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["fuser.conversion.converted"], "_has_warned", False)
    sentence = said("converted-fuser-convert-runs", *[None] * 3)
    with (
        fuser.autocast(recipe=RECIPES["current"]),
        pytest.warns(fuser.FuserWarning, match=sentence),
    ):
        model(data(), chosen, probs.to(dtype))


def test_a_conversion_of_experts_draws_no_random_numbers() -> None:
    model = made(Experts)
    before = torch.get_rng_state()
    assert fuser.convert(model).converted
    assert torch.equal(torch.get_rng_state(), before)


class ByName(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, experts = self.router(x).softmax(-1).topk(self.k, dim=-1)
        y: torch.Tensor = self.experts(x, routing_weights=probs, router_indices=experts)
        return y


def test_experts_in_torchs_autocast_have_the_dtype_of_their_tokens() -> None:
    model, plain = (made(Block) for _ in range(2))
    fuser.convert(model)
    x = data()
    probs, experts = plain.router(x).softmax(-1).topk(2, dim=-1)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (each.experts(x, experts, probs) for each in (model, plain))
    assert found.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_experts_take_their_inputs_by_name() -> None:
    plain, model = (made(lambda: ByName(GptOss)) for _ in range(2))
    fuser.convert(model)
    assert pipelines_run(model, data()) == 1
    assert_close(results(model, data()), results(plain, data()))


def test_experts_with_biases_compile() -> None:
    torch._dynamo.reset()
    plain, model = (made(lambda: Block(GptOss)) for _ in range(2))
    fuser.convert(model)
    model.compile(backend="aot_eager", fullgraph=True)
    assert_close(results(model, data()), results(plain, data()))
    with torch.no_grad():
        for one in (plain, model):
            one.experts.down_proj_bias.mul_(3)
    assert_close(results(model, data()), results(plain, data()))


def test_a_forward_of_any_arguments_without_a_config_is_not_taken_for_experts() -> None:
    model = made(lambda: Block(AnyArgumentsAlone))
    report = fuser.convert(model)
    (row,) = report.refused
    assert row.text == "its forward does not take tokens, experts and their weights"
    assert pipelines_run(model, data()) == 0


def test_an_expert_of_another_rank_gets_nothing() -> None:
    """Its index is the number of experts here."""
    experts, model = made(Experts), made(Experts)
    fuser.convert(model)
    x, probs = data(), torch.rand(TOKENS, 2)
    chosen = torch.stack([torch.randperm(E + 1)[:2] for _ in range(TOKENS)])
    assert (chosen == E).any()
    torch.testing.assert_close(model(x, chosen, probs), experts(x, chosen, probs))
    nowhere = torch.full((TOKENS, 2), E)
    assert not model(x, nowhere, probs).any()
    for none in (model, experts):
        assert none(x[:0], chosen[:0], probs[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("frozen", "make"),
    [
        *((name, Experts) for name in ("gate_up_proj", "down_proj", "router", "all")),
        *((name, GptOss) for name in ("proj_bias", "gate_up_proj", "down_proj_bias", "all")),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_frozen_experts_get_no_gradient(
    frozen: str, make: Callable[[], Experts], training: bool
) -> None:
    plain, model = (made(lambda: Block(make)).train(training) for _ in range(2))
    fuser.convert(model)
    for one in (plain, model):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(frozen != "all" and frozen not in name)
    assert_close(results(model, data()), results(plain, data()))


COPIES: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_converted_experts_are_converted(name: str) -> None:
    plain, model = (made(lambda: Block(AnyArguments)) for _ in range(2))
    fuser.convert(model)
    twin = COPIES[name](model)
    with torch.no_grad():
        model.experts.down_proj.zero_()
    assert pipelines_run(twin, data()) == 1
    assert_close(results(twin, data()), results(plain, data()))


# -- look-alikes ---------------------------------------------------------------------


@pytest.mark.parametrize("name", COPIES)
def test_a_module_that_holds_a_pipeline_of_its_experts_is_copied_with_it(name: str) -> None:
    """As the experts of transformers with an implementation of this library."""
    experts = made(Experts)
    experts.pipeline = ChainPipeline(experts_chain(experts, "gate_up_proj", "down_proj"), experts)
    other = COPIES[name](experts)
    other.gate_up_proj.data.mul_(2)
    x, chosen = data(), torch.tensor([[0, 1]] * len(data()))
    inputs = (x, chosen, torch.full(chosen.shape, 0.5))
    for each in (experts, other):
        y = each.pipeline(each, inputs, is_quantized=False)
        torch.testing.assert_close(y, each(*inputs))


class Gelu(Experts):
    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
        return F.linear(F.gelu(gate) * up, self.down_proj[e])


class Swapped(Experts):
    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        up, gate = F.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[e])


class Clamped(Experts):
    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up_proj[e]).clamp(max=7.0).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[e])


class ScaledBefore(Experts):
    """The weight of an expert multiplies its input."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(E):
            token, place = torch.where(top_k_index == e)
            y = self.expert(hidden_states[token] * top_k_weights[token, place, None], e)
            out = out.index_add(0, token, y)
        return out


class Averaged(Experts):
    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        shares = top_k_weights / top_k_weights.sum(-1, keepdim=True)
        return super().forward(hidden_states, top_k_index, shares)


class Shared(Experts):
    """One expert for all tokens beside those that are chosen."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        y = super().forward(hidden_states, top_k_index, top_k_weights)
        return y + self.expert(hidden_states, 0)


class Overwriting(Experts):
    """The last expert of a token is the only one."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(E):
            token, place = torch.where(top_k_index == e)
            y = self.expert(hidden_states[token], e) * top_k_weights[token, place, None]
            out = out.index_copy(0, token, y)
        return out


class WithBiases(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(E, HIDDEN))

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        return super().expert(x, e) + self.bias[e]


class WithOneBias(GptOss):
    def __init__(self) -> None:
        super().__init__()
        del self.down_proj_bias
        self.register_parameter("down_proj_bias", None)

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate_up = x @ self.gate_up_proj[e] + self.gate_up_proj_bias[e]
        return self.gated(gate_up) @ self.down_proj[e]


class BiasOfEachToken(GptOss):
    """The last bias is added once for each expert, whatever the weight of that expert."""

    def forward(self, hidden_states: Any, router_indices: Any, routing_weights: Any) -> Any:
        out = torch.zeros_like(hidden_states)
        for e in range(E):
            token, place = torch.where(router_indices == e)
            y = self.expert(hidden_states[token], e) - self.down_proj_bias[e]
            y = y * routing_weights[token, place, None] + self.down_proj_bias[e]
            out = out.index_add(0, token, y)
        return out


class GateFirst(GptOss):
    """Up is before the gate."""

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super().gated(gate_up.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


class BoundedBelow(GptOss):
    """The gate is clamped on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 8.0

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(-self.limit, self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class BoundedAbove(GptOss):
    """Up is clamped on one side."""

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.clamp(max=self.limit).unflatten(-1, (-1, 2)).unbind(-1)
        y: torch.Tensor = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        return y


class WithoutOffset(GptOss):
    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return up * (gate * torch.sigmoid(gate * self.alpha))


class ScaledInTraining(GptOss):
    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super().gated(gate_up) * (2 if self.training else 1)


class DetachedWeights(GptOss):
    def forward(self, hidden_states: Any, router_indices: Any, routing_weights: Any) -> Any:
        return super().forward(hidden_states, router_indices, routing_weights.detach())


class WeightsOfAnySign(Experts):
    """Tokens are weighted by what their weights are without a sign."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights.abs())


class DetachedExperts(GptOss):
    """The last linear is never trained."""

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate_up = x @ self.gate_up_proj[e] + self.gate_up_proj_bias[e]
        return self.gated(gate_up) @ self.down_proj[e].detach() + self.down_proj_bias[e]


class WithBuffer(Experts):
    """A buffer of one, which a state dict may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        return super().expert(x, e) * self.scale


class WithLinear(AnyArguments):
    """A linear inside, which has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(HIDDEN, E)


class WithTensor(Experts):
    """A tensor that is no buffer, which may be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        return super().expert(x, e) * self.scale


class WithCapacity(Experts):
    """The last tokens of an expert that has too many are left out."""

    capacity = 1000

    def most(self, tokens: int) -> int:
        return self.capacity

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(E):
            found = torch.where(top_k_index == e)
            token, place = (index[: self.most(len(hidden_states))] for index in found)
            y = self.expert(hidden_states[token], e) * top_k_weights[token, place, None]
            out = out.index_add(0, token, y)
        return out


class WithShare(WithCapacity):
    """The capacity is a share of all tokens."""

    def most(self, tokens: int) -> int:
        return tokens * 3 // 4 + 4


class OfTheFirstToken(Experts):
    """All tokens go to the experts of the first one."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        chosen = top_k_index[:1].expand_as(top_k_index)
        return super().forward(hidden_states, chosen, top_k_weights)


LOOK_ALIKES = (
    *(WithTensor, WithCapacity, WithShare, OfTheFirstToken),
    *(Gelu, Swapped, Clamped, ScaledBefore, Averaged, Shared, Overwriting, WithBiases),
    *(WithOneBias, BiasOfEachToken, GateFirst, BoundedBelow, BoundedAbove, WithoutOffset),
    *(ScaledInTraining, DetachedWeights, WeightsOfAnySign, DetachedExperts, WithBuffer, WithLinear),
)


@pytest.mark.parametrize("make", LOOK_ALIKES)
def test_experts_of_another_kind_stay_as_they_are(make: Callable[[], Experts]) -> None:
    plain, model = (made(lambda: Block(make)) for _ in range(2))
    report = fuser.convert(model)
    assert [row.path for row in report.refused] == ["experts"]
    assert not report.converted
    found, expected = results(model, data()), results(plain, data())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# -- changes -------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Loud(nn.Parameter):
    """A weight whose products are doubled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            y = func(*args, **(kwargs or {}))
            return 2 * y if func is torch.Tensor.__getitem__ else y


def other(experts: Any, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(getattr(experts, name).shape, dtype=dtype)


NAMES = ("gate_up_proj", "down_proj")
CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "parametrized": lambda e, name: parametrize.register_parametrization(e, name, Doubled()),
    "of another class": lambda e, name: setattr(e, name, Loud(other(e, name))),
    "another parameter": lambda e, name: setattr(e, name, nn.Parameter(other(e, name))),
    "other data": lambda e, name: setattr(getattr(e, name), "data", other(e, name)),
    "narrower rows": lambda e, name: setattr(
        e, name, nn.Parameter(other(e, name)[:, :-8].contiguous())
    ),
    "fewer experts": lambda e, name: setattr(e, name, nn.Parameter(other(e, name)[:-1])),
    "in fp64": lambda e, name: setattr(e, name, nn.Parameter(other(e, name, torch.float64))),
    "in bf16": lambda e, name: setattr(e, name, nn.Parameter(other(e, name, torch.bfloat16))),
    "a hook": lambda e, name: e.register_forward_hook(lambda m, args, y: 3 * y),
    "a forward": lambda e, name: e.__dict__.update(forward=lambda *args: 3 * args[0]),
}


def outcome(model: nn.Module, x: torch.Tensor) -> Any:
    """The results; None if a call raises."""
    with contextlib.suppress(RuntimeError, IndexError):
        return results(model, x)
    return None


@pytest.mark.sampled(most=12)
@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_experts_compute_what_their_own_forward_does(
    change: str, name: str, calls: int
) -> None:
    """Or raise, where it does."""
    assert_changes_count(Experts, change, name, calls)


def assert_changes_count(make: Callable[[], Experts], change: str, name: str, calls: int) -> None:
    plain, model = (made(lambda: Block(make)) for _ in range(2))
    fuser.convert(model)
    for _ in range(calls):
        model(data())
    for one in (plain, model):
        torch.manual_seed(7)
        CHANGES[change](one.experts, name)
    expected = outcome(plain, data())
    found = outcome(model, data())
    assert (found is None) == (expected is None)
    if expected is not None:
        assert_close(found, expected)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["gate_up_proj_bias", "down_proj_bias"])
@pytest.mark.parametrize(
    "change", ["parametrized", "another parameter", "other data", "narrower rows", "in bf16"]
)
def test_changed_biases_are_those_of_the_experts_own_forward(change: str, name: str) -> None:
    assert_changes_count(GptOss, change, name, 1)


class WithActivation(Experts):
    """The activation is a module, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[e])


@pytest.mark.parametrize(
    "change",
    [
        lambda experts: setattr(experts, "act_fn", nn.GELU()),
        lambda experts: experts.act_fn.register_forward_hook(lambda m, args, y: 3 * y),
        lambda experts: setattr(experts.act_fn, "forward", torch.tanh),
    ],
    ids=["another", "a hook", "a forward"],
)
def test_a_changed_activation_counts(change: Callable[[Any], object]) -> None:
    plain, model = (made(lambda: Block(WithActivation)) for _ in range(2))
    fuser.convert(model)
    assert pipelines_run(model, data()) == 1
    for one in (plain, model):
        change(one.experts)
    assert pipelines_run(model, data()) == 0
    assert_close(results(model, data()), results(plain, data()))


class OfConfig(GptOss):
    """The bound is that of a config, beside one of the module that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(limit=self.limit)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        limit = self.config.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def test_a_changed_bound_of_a_config_counts() -> None:
    plain, model = (made(lambda: Block(OfConfig)) for _ in range(2))
    assert fuser.convert(model).converted
    assert pipelines_run(model, data()) == 1
    for one in (plain, model):
        one.experts.config.limit = 0.5
    assert pipelines_run(model, data()) == 0
    assert_close(results(model, data()), results(plain, data()))


@pytest.mark.parametrize("name", ["limit", "alpha"])
def test_a_changed_bound_counts(name: str) -> None:
    plain, model = (made(lambda: Block(GptOss)) for _ in range(2))
    fuser.convert(model)
    model(data())
    for one in (plain, model):
        setattr(one.experts, name, 0.5)
    assert pipelines_run(model, data()) == 0
    assert_close(results(model, data()), results(plain, data()))
    fuser.convert(model)
    assert pipelines_run(model, data()) == 1
    assert_close(results(model, data()), results(plain, data()))


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        *((Experts, dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
        *((GptOss, dtype) for dtype in (torch.float64, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_experts_of_a_model_in_another_dtype_compute_in_it(
    when: str, make: Callable[[], Experts], dtype: torch.dtype
) -> None:
    plain, model = (made(lambda: Block(make)) for _ in range(2))
    if when == "after":
        fuser.convert(model)
        model(data())
    plain, model = plain.to(dtype), model.to(dtype)
    if when == "before":
        fuser.convert(model)
    x = data().to(dtype)
    bound = {torch.float64: 1e-12, torch.float16: 5e-3}.get(dtype, 3e-2)
    assert_close(results(model, x), results(plain, x), bound)
