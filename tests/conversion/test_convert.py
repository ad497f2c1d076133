"""fuser.convert on modules of torch alone."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import operator
import pickle
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import titan_like
import torch
from joined_products import output_of
from said import holds, said
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torchtitan_ranks_cases import on_meta

import fuser
from fuser.conversion.leaves import activation_like
from fuser.conversion.unit import Runner
from fuser.runtime import joined_weights
from fuser.tensors.master_weight import MasterWeight

HIDDEN, WIDTH = 64, 96
CURRENT = fuser.recipe.Float8CurrentScaling()


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.up = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.down = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


class PackedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 2 * WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down(F.silu(gate) * up)
        return y


class TwoLinears(nn.Module):
    """Two linears, and a function of the first one's output between."""

    def __init__(self, function: Callable[..., Any], widen: int = 1) -> None:
        super().__init__()
        self.one = nn.Linear(HIDDEN, widen * WIDTH)
        self.two = nn.Linear(WIDTH, HIDDEN)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.two(self.function(self.one(x)))
        return y


class PreNorm(nn.Module):
    """x + dropout(mlp(norm(x)))."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = GatedMLP()
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.mlp(self.norm(x)))
        return y


def seeded(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return factory()


def data(seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, HIDDEN, generator=generator).requires_grad_()


def results(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the gradients of the input and of all parameters that need one."""
    model.zero_grad()
    leaf = x.detach().clone()
    leaf.requires_grad_(x.is_floating_point())
    y = output_of(model, leaf)
    y.float().square().mean().backward()
    found = {"y": y.detach(), **({"dx": leaf.grad} if leaf.grad is not None else {})}
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, bits: bool = True
) -> None:
    """Outputs to the last bit, unless ``bits`` is False; gradients within 1e-6 of the largest."""
    assert actual.keys() == expected.keys()
    assert torch.equal(actual["y"], expected["y"]) or not bits
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=1e-6 * float(value.abs().max()), msg=name
        )


def pipelines_run(model: nn.Module, x: torch.Tensor) -> int:
    """How many pipelines a call of the model runs."""
    with torch.no_grad():
        _, count = titan_like.counted(model, x)
    return count


FEED_FORWARDS: dict[str, Callable[[], nn.Module]] = {
    "gated": GatedMLP,
    "gated with biases": lambda: GatedMLP(bias=True),
    "packed": PackedMLP,
    "gelu": lambda: TwoLinears(nn.GELU()),
    "gelu tanh": lambda: TwoLinears(nn.GELU(approximate="tanh")),
    "relu function": lambda: TwoLinears(torch.relu),
    "silu written out": lambda: TwoLinears(lambda h: h * torch.sigmoid(h)),
    "squared relu": lambda: TwoLinears(lambda h: F.relu(h).square()),
    "nn.Sequential": lambda: nn.Sequential(
        nn.Linear(HIDDEN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, HIDDEN)
    ),
    "identity between": lambda: TwoLinears(nn.Sequential(nn.Identity(), nn.SiLU())),
    "pre-norm": PreNorm,
    "two layers": lambda: nn.Sequential(PreNorm(), PreNorm()),
}


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_a_converted_feed_forward_has_the_values_of_its_own_forward(name: str) -> None:
    model, x = seeded(FEED_FORWARDS[name]), data()
    keys, expected = list(model.state_dict()), results(model, x)
    report = fuser.convert(model)
    assert report.converted, str(report)
    assert not report.refused, str(report)
    assert pipelines_run(model, x) == len(report.converted)
    assert_same(results(model, x), expected, bits="written out" not in name)
    assert list(model.state_dict()) == keys
    assert fuser.revert(model) >= 1
    assert pipelines_run(model, x) == 0
    assert_same(results(model, x), expected)


class LookAlike(nn.Module):
    """A gated feed-forward whose product is ``combine(gate, up)``."""

    def __init__(self, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, WIDTH)
        self.up = nn.Linear(HIDDEN, WIDTH)
        self.down = nn.Linear(WIDTH, HIDDEN)
        self.combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.combine(self.gate(x), self.up(x)))
        return y


class PackedLookAlike(PackedMLP):
    """A packed feed-forward whose product is ``combine(gate, up)``."""

    def __init__(self, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down(self.combine(gate, up))
        return y


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gate first": lambda g, u: F.silu(g) * u,
    "gate last": lambda g, u: u * F.silu(g),
    "function": lambda g, u: torch.mul(u, F.silu(g)),
    "method": lambda g, u: u.mul(F.silu(g)),
    "written out": lambda g, u: u * (g * torch.sigmoid(g)),
}


class Residual(nn.Module):
    """The sum of a norm's input and of what a feed-forward makes of its output."""

    def __init__(self, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = GatedMLP()
        self.add = add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, self.mlp(self.norm(x)))


SUMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "residual first": lambda x, y: x + y,
    "residual last": lambda x, y: y + x,
    "function": lambda x, y: torch.add(y, x),
    "method": lambda x, y: y.add(x),
}


@pytest.mark.parametrize(
    ("kind", "combine"),
    [
        pytest.param(kind, combine, id=f"{kind.__name__}-{name}")
        for kinds, ways in (((LookAlike, PackedLookAlike), PRODUCTS), ((Residual,), SUMS))
        for kind in kinds
        for name, combine in ways.items()
    ],
)
def test_products_and_sums_are_converted_in_either_order(kind: Any, combine: Any) -> None:
    model, x = seeded(lambda: kind(combine)), data()
    expected = results(model, x)
    report = fuser.convert(model)
    assert len(report.converted) == 1, str(report)
    assert not report.left, str(report)
    assert pipelines_run(model, x) == 1
    assert_same(results(model, x), expected, bits=False)
    torch.testing.assert_close(results(model, x)["y"], expected["y"], rtol=1e-5, atol=1e-6)


class SwappedHalves(PackedMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down(F.silu(gate) * up)
        return y


class Interleaved(PackedMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.gate_up(x)
        y: torch.Tensor = self.down(F.silu(h[..., ::2]) * h[..., 1::2])
        return y


class InTrainingOnly(GatedMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if self.training else y * 2


class WithAnOption(GatedMLP):
    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        y = super().forward(x)
        return y if scale is None else y * scale


class Counting(GatedMLP):
    """Keeps what it has seen: an effect besides its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.gate(x)
        y: torch.Tensor = self.down(self.act(self.seen) * self.up(x))
        return y


class ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


def with_scaled_linear() -> nn.Module:
    mlp = GatedMLP()
    mlp.down = ScaledLinear(WIDTH, HIDDEN, bias=False)
    return mlp


def patched() -> nn.Module:
    mlp = GatedMLP()
    mlp.forward = lambda x: 3 * x  # type: ignore[method-assign]
    return mlp


def patched_child() -> nn.Module:
    mlp = GatedMLP()
    mlp.down.forward = lambda x: x[..., :HIDDEN]  # type: ignore[method-assign,assignment]
    return mlp


def hooked_child() -> nn.Module:
    mlp = GatedMLP()
    mlp.up.register_forward_hook(lambda module, args, output: 2 * output)
    return mlp


class WithoutAutocast(GatedMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class GateWithoutGradient(GatedMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = self.act(self.gate(x))
        y: torch.Tensor = self.down(gate * self.up(x))
        return y


class Function(nn.Module):
    """An activation that is a function and keeps numbers under private names."""

    def __init__(self, function: Callable[..., Any], number: float = 0.0) -> None:
        super().__init__()
        self._number = number
        self.function = function

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.function(h, self._number)
        return y


class DropPath(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.bernoulli(torch.full_like(h[..., :1], 0.5)) if self.training else h


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -grad


class Recorder(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.seen = h
        return h


class Pair(nn.Module):
    """Two activations of one class with different numbers."""

    def __init__(self) -> None:
        super().__init__()
        relu = Function(lambda h, k: torch.relu(h) if k == 0 else F.gelu(h), 0.0)
        gelu = Function(relu.function, 1.0)
        self.one, self.two = TwoLinears(relu), TwoLinears(gelu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.two(torch.sin(self.one(x)))
        return y


class ResidualOfAnInput(nn.Module):
    """An activation that writes into the module's input."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.mlp = TwoLinears(nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        y: torch.Tensor = self.mlp(self.act(x)) + x
        return y


def between(module: nn.Module) -> Callable[[], nn.Module]:
    """A module between an activation and the second linear."""
    return lambda: TwoLinears(nn.Sequential(nn.ReLU(), copy.deepcopy(module)))


LOOK_ALIKES: dict[str, Callable[[], nn.Module]] = {
    "clamped gate": lambda: LookAlike(lambda g, u: F.silu(g.clamp(max=7.0)) * u),
    "clamped up": lambda: LookAlike(lambda g, u: F.silu(g) * u.clamp(-7.0, 7.0)),
    "gate clamped at a large value": lambda: LookAlike(lambda g, u: F.silu(g.clamp(max=1e5)) * u),
    "scaled product": lambda: LookAlike(lambda g, u: F.silu(g) * u * 0.5),
    "up + 1": lambda: LookAlike(lambda g, u: F.silu(g) * (u + 1)),
    "both activated": lambda: LookAlike(lambda g, u: F.silu(g) * F.silu(u)),
    "sum": lambda: LookAlike(lambda g, u: F.silu(g) + u),
    "gate of itself": lambda: LookAlike(lambda g, u: F.silu(g) * g),
    "softmax": lambda: LookAlike(lambda g, u: F.softmax(g, -1) * u),
    "tanh": lambda: LookAlike(lambda g, u: torch.tanh(g) * u),
    "dropout in between": lambda: LookAlike(lambda g, u: F.silu(F.dropout(g, 0.5)) * u),
    "rounded": lambda: LookAlike(lambda g, u: F.silu(g).half().float() * u),
    "swapped halves": SwappedHalves,
    "interleaved halves": Interleaved,
    "other values in evaluation": InTrainingOnly,
    "a branch on an argument": WithAnOption,
    "a relu in place, by its place": lambda: TwoLinears(lambda h: F.relu(h, True) + h),
    "drop path": between(DropPath()),
    "alpha dropout": between(nn.AlphaDropout(0.5)),
    "a reversed gradient": between(Function(lambda h, k: Reversed.apply(h))),
    "a recorder": between(Recorder()),
    "no gradient": lambda: TwoLinears(lambda h: torch.relu(h).detach()),
    "two activations of one class": Pair,
    "an input that is written to": ResidualOfAnInput,
    "a norm over other dimensions": lambda: nn.Sequential(
        nn.Unflatten(0, (2, 1)), nn.GroupNorm(1, 1), nn.Flatten(0, 1), TwoLinears(nn.ReLU())
    ),
    "a batch norm": lambda: nn.Sequential(
        nn.Linear(HIDDEN, WIDTH),
        nn.Flatten(0, 1),
        nn.BatchNorm1d(WIDTH, affine=False),
        nn.ReLU(),
        nn.Linear(WIDTH, HIDDEN),
    ),
    "another dtype": lambda: nn.Sequential(
        TwoLinears(nn.ReLU()), Function(lambda h, k: h.double())
    ),
    "a part without autocast": WithoutAutocast,
    "a part without gradients": GateWithoutGradient,
    "a scaled linear": with_scaled_linear,
    "a patched forward": patched,
    "a patched child": patched_child,
    "a hooked child": hooked_child,
    "a softmax between": lambda: TwoLinears(nn.Softmax(-1)),
    "a sum between": lambda: TwoLinears(lambda h: h + h.mean()),
    "a learned slope": lambda: TwoLinears(nn.PReLU()),
    "a random slope": lambda: TwoLinears(nn.RReLU()),
    "a scaled gelu": lambda: TwoLinears(lambda h: 1.01 * F.gelu(h)),
    "half of a gate": lambda: TwoLinears(lambda h: F.silu(h[..., :WIDTH]), widen=2),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_computes_as_before(name: str, training: bool) -> None:
    model, x = seeded(LOOK_ALIKES[name]).train(training), data()
    torch.manual_seed(1)
    expected = results(model, x)
    fuser.convert(model)
    torch.manual_seed(1)
    actual = results(model, x)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_a_forward_that_sets_attributes_stays_and_is_not_touched() -> None:
    class Counted(GatedMLP):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = self.gate(x)
            return super().forward(x)

    model = seeded(Counted)
    report = fuser.convert(model)
    assert report.refused[0].text == "its forward sets attributes"
    assert "calls" not in model.__dict__
    assert "last" not in model.__dict__


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda calls: calls.add_(1),
    "+=": lambda calls: operator.iadd(calls, 1),
    "a view": lambda calls: calls[:1].add_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_buffer_that_a_forward_writes_is_written_by_each_call_and_no_conversion(
    write: str,
) -> None:
    class Counting(GatedMLP):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            WRITES[write](self.calls)
            return super().forward(x)

    model = nn.Sequential(seeded(Counting))
    fuser.convert(model)
    assert model[0].calls == 0
    model(data())
    assert model[0].calls == 1


class Noting(GatedMLP):
    """Notes its calls in what it holds besides parameters and buffers."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.calls, self.seen, self.last = torch.zeros(1), [0], {"x": 0}
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return super().forward(x)


NOTES: dict[str, tuple[Callable[[Noting], object], str]] = {
    "calls": (lambda module: module.calls.add_(1), "writes into calls"),
    "seen": (lambda module: module.seen.append(1), "calls append of list"),
    "last": (lambda module: module.last.update(x=module.last["x"] + 1), "calls update of dict"),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_a_forward_writes_into_is_written_by_each_call_and_no_conversion(name: str) -> None:
    write, does = NOTES[name]
    model, plain = seeded(lambda: Noting(write)), seeded(lambda: Noting(write))
    (refused,) = fuser.convert(model).refused
    assert refused.text == f"its forward {does}"
    for _ in range(2):
        for each in (model, plain):
            each(data())
    assert (model.calls, model.seen, model.last) == (plain.calls, plain.seen, plain.last)


def test_trials_of_a_norm_write_into_nothing_that_it_holds() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(64)), torch.zeros(())
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for count in (self.calls, self.steps):
                count.add_(1)
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    norm = Counted()
    fuser.convert(nn.Sequential(nn.Linear(64, 64), norm, nn.Linear(64, 64)), norms="all")
    assert norm.calls == norm.steps == 0


def test_a_model_of_which_a_parameter_has_no_shape_yet_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    with pytest.raises(fuser.InputError, match=r"whose 1\.weight has no shape yet"):
        fuser.convert(model)
    model(torch.randn(4, 64))
    assert fuser.convert(model, linears="all").converted


def test_a_dropout_and_a_norm_that_were_replaced_are_used() -> None:
    for rounding, name, instead in (
        ("fused", "dropout", nn.Identity()),
        ("torch", "norm", nn.Identity()),
    ):
        plain, model, x = seeded(lambda: PreNorm(0.5)), seeded(lambda: PreNorm(0.5)), data()
        fuser.convert(model, rounding=rounding)
        for m in (plain, model):
            setattr(m, name, instead)
            torch.manual_seed(1)
        expected = results(plain, x)
        torch.manual_seed(1)
        assert_same(results(model, x), expected)
    model = seeded(PreNorm)
    fuser.convert(model)
    model.get_submodule("dropout").p = 0.5  # type: ignore[assignment]
    assert not torch.equal(model(x), model(x))


def test_a_converted_model_takes_the_options_of_the_next_call() -> None:
    model, x = seeded(titan_like.TitanLike).bfloat16(), titan_like.tokens()
    expected = results(model, x)
    fuser.convert(model, recipe=CURRENT)
    fuser.convert(model, rounding="torch")
    assert torch.equal(results(model, x)["y"], expected["y"])


def test_a_residual_after_a_norm() -> None:
    class PostNorm(PreNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            y: torch.Tensor = h + self.mlp(h)
            return y

    model, x = seeded(PostNorm), data()
    expected = results(model, x)
    assert fuser.convert(model).converted
    assert_same(results(model, x), expected)


def test_contexts_of_a_forward_are_not_lost() -> None:
    for factory in (WithoutAutocast, GateWithoutGradient):
        report = fuser.convert(nn.Sequential(seeded(factory)))
        assert not report.converted
        assert report.refused[0].text == "its forward has a with statement"


def test_fp64_stays_and_comes_back() -> None:
    model, x = seeded(GatedMLP).double(), data().detach().double()
    expected = results(model, x)
    assert "is torch.float64" in fuser.convert(model).refused[0].text
    assert_same(results(model, x), expected)
    model.float()
    assert fuser.convert(model).converted
    model.double()
    assert results(model, x)["y"].dtype is torch.float64
    assert pipelines_run(model, x) == 0
    assert pipelines_run(model.float(), x.float()) == 1


def test_contexts_around_convert_change_nothing() -> None:
    x = data()
    expected = results(seeded(GatedMLP), x)
    for context in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu")):
        model = seeded(GatedMLP)
        with context:
            assert fuser.convert(model).converted
        assert_same(results(model, x), expected)
        fuser.revert(model)
        assert_same(results(model, x), expected)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = seeded(lambda: GatedMLP().float())
        assert fuser.convert(model).converted
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_class_without_subclasses_is_refused_before_anything_has_changed() -> None:
    class Tagged(GatedMLP):
        def __init_subclass__(cls, *, tag: str, **others: Any) -> None:
            super().__init_subclass__(**others)

    model, x = nn.ModuleList([seeded(GatedMLP), seeded(Tagged)]), data()
    report = fuser.convert(model)
    assert [row.path for row in report.converted] == ["0"]
    assert "its class has no subclass without arguments" in report.refused[0].text
    assert pipelines_run(model[1], x) == 0


def test_a_norm_or_linear_whose_class_has_no_subclass_is_left_with_that_reason() -> None:
    class TaggedNorm(nn.LayerNorm):
        def __init_subclass__(cls, *, tag: str) -> None:
            super().__init_subclass__()

    class TaggedLinear(nn.Linear):
        def __init_subclass__(cls, *, tag: str) -> None:
            super().__init_subclass__()

    model = nn.ModuleDict({"norm": TaggedNorm(HIDDEN), "linear": TaggedLinear(HIDDEN, HIDDEN)})
    report = fuser.convert(model, norms="all", linears="all")
    assert not report.converted
    assert [row.path for row in report.left] == ["norm", "linear"]
    assert all("has no subclass without arguments" in row.text for row in report.left)
    assert not report.gains()


def test_a_look_alike_is_in_the_report_with_the_reason() -> None:
    report = fuser.convert(nn.Sequential(seeded(LOOK_ALIKES["clamped gate"])))
    assert [(row.path, row.cls) for row in report.refused] == [("0", "LookAlike")]
    assert "LookAlike" in str(report)


class BranchOnValues(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        y: torch.Tensor = self.two(F.gelu(h) if h.sum() > 0 else F.relu(h))
        return y


def of_tensor(name: str) -> str:
    return f"its forward calls the method {name} of a tensor, which is not an activation of fuser"


REASONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "module": (lambda: TwoLinears(nn.Mish()), "function (Mish) is not an activation of fuser"),
    "in nn.Sequential": (
        lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.Mish(), nn.Linear(WIDTH, HIDDEN)),
        "1 (Mish) is not an activation of fuser",
    ),
    "gate": (
        lambda: LookAlike(lambda g, u: F.mish(g) * u),
        "its forward calls mish, which is not an activation of fuser",
    ),
    "parameter": (lambda: TwoLinears(nn.PReLU()), "function (PReLU) is not an activation of fuser"),
    "function": (
        lambda: TwoLinears(torch.sin),
        "its forward calls sin, which is not an activation of fuser",
    ),
    "functions": (
        lambda: TwoLinears(lambda h: h * torch.tanh(h)),
        "its forward calls tanh and mul, together no activation of fuser",
    ),
    "clamp": (lambda: LookAlike(lambda g, u: F.silu(g.clamp(max=7.0)) * u), of_tensor("clamp")),
    "clamped up": (lambda: LookAlike(lambda g, u: F.silu(g) * u.clamp(-7.0)), of_tensor("clamp")),
    "reshape": (lambda: TwoLinears(lambda h: F.gelu(h).reshape(h.shape)), of_tensor("reshape")),
    "hook": (lambda: hooked(TwoLinears(nn.ReLU())), "function (ReLU) has hooks"),
    "control flow": (
        lambda: BranchOnValues(torch.relu),
        "its forward has an if or a loop on a tensor",
    ),
    "order": (
        SwappedHalves,
        "its forward is not a chain of linears, norms and activations that fuser has",
    ),
}


def hooked(model: nn.Module) -> nn.Module:
    model.get_submodule("function").register_forward_hook(lambda module, args, output: output * 2)
    return model


@pytest.mark.parametrize("name", REASONS)
def test_the_report_names_what_ends_a_chain(name: str) -> None:
    make, reason = REASONS[name]
    report = fuser.convert(nn.ModuleList([make()]))
    assert [(row.path, row.text) for row in report.refused] == [("0", reason)]


def change_lora(mlp: nn.Module) -> None:
    base = mlp.get_submodule("gate")
    lora = nn.Sequential(base, nn.Linear(WIDTH, WIDTH))
    mlp.gate = lora


def change_hook(mlp: nn.Module) -> None:
    mlp.get_submodule("up").register_forward_hook(lambda module, args, output: output * 2)


def change_forward(mlp: nn.Module) -> None:
    mlp.get_submodule("up").forward = lambda x: x.repeat(1, 1, 2)[..., :WIDTH]


def change_prune(mlp: nn.Module) -> None:
    prune.random_unstructured(mlp.get_submodule("down"), "weight", amount=0.5)


def change_weight_norm(mlp: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(mlp.get_submodule("gate"))


def change_activation(mlp: nn.Module) -> None:
    mlp.act = nn.Tanh()


def change_parameter(mlp: nn.Module) -> None:
    mlp.get_submodule("up").weight = nn.Parameter(torch.randn(WIDTH, HIDDEN))


def change_data(mlp: nn.Module) -> None:
    weight = mlp.get_submodule("up").weight
    assert isinstance(weight, nn.Parameter)
    weight.data = torch.randn(WIDTH, HIDDEN)


def change_size(mlp: nn.Module) -> None:
    mlp.gate, mlp.up = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8)
    mlp.down = nn.Linear(8, HIDDEN)


def change_bias(mlp: nn.Module) -> None:
    mlp.get_submodule("down").bias = nn.Parameter(torch.randn(HIDDEN))


def change_attribute(mlp: nn.Module) -> None:
    mlp.get_submodule("act").__dict__["slope"] = 2.0


CHANGES = (
    change_attribute,
    *(change_lora, change_hook, change_forward, change_prune, change_weight_norm),
    *(change_activation, change_parameter, change_data, change_size, change_bias),
)


@pytest.mark.parametrize("when", ["after a call", "before any call"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_child_that_was_changed_is_what_runs(
    change: Callable[[nn.Module], None], when: str
) -> None:
    plain, model, x = seeded(GatedMLP), seeded(GatedMLP), data()
    fuser.convert(model)
    if when == "after a call":
        model(x)
    for mlp in (plain, model):
        torch.manual_seed(7)
        change(mlp)
    assert_same(results(model, x), results(plain, x))


def change_eps(block: nn.Module) -> None:
    block.get_submodule("norm").eps = 0.5  # type: ignore[assignment]


def change_mode(block: nn.Module) -> None:
    block.eval()


def change_shape(block: nn.Module) -> None:
    norm = block.get_submodule("norm")
    norm.normalized_shape = (*norm.normalized_shape,)  # type: ignore[assignment, misc]
    norm.normalized_shape = [*norm.normalized_shape]  # type: ignore[assignment, misc]


def change_class(block: nn.Module) -> None:
    block.get_submodule("mlp.act").__class__ = type("Act", (nn.SiLU,), {})


def change_order(block: nn.Module) -> None:
    mlp = block.get_submodule("mlp")
    mlp.gate, mlp.up = mlp.up, mlp.gate


def change_buffer(block: nn.Module) -> None:
    block.get_submodule("mlp.act").register_buffer("table", torch.ones(3))


def change_dtype(block: nn.Module) -> None:
    weight = block.get_submodule("mlp.down").weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.double()


BLOCK_CHANGES = (
    *(change_eps, change_mode, change_shape, change_class, change_order, change_buffer),
    change_dtype,
)


def inside(change: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    @functools.wraps(change)
    def of_mlp(block: nn.Module) -> None:
        change(block.get_submodule("mlp"))

    return of_mlp


@pytest.mark.parametrize(
    "change", [*BLOCK_CHANGES, *map(inside, CHANGES)], ids=lambda change: change.__name__
)
def test_children_are_looked_at_again_after_a_change_alone(
    change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str | None] = []
    whole = Runner._refusal

    def counting(*args: Any) -> str | None:
        looked.append(whole(*args))
        return looked[-1]

    monkeypatch.setattr(Runner, "_refusal", counting)
    plain, model, x = seeded(PreNorm), seeded(PreNorm), data()
    fuser.convert(model)
    for _ in range(3):
        model(x)
    assert looked == [None]
    for each in (plain, model):
        torch.manual_seed(7)
        change(each)
    with contextlib.suppress(RuntimeError):  # the forward may not take such a child
        found, expected = (output_of(each, x) for each in (model, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    # Another parameter of the same kind is read by every call.
    assert (len(looked) > 1) == (change.__name__ not in ("change_parameter", "change_data"))


def test_a_child_that_was_replaced_is_not_kept_alive() -> None:
    model, x = seeded(PreNorm), data()
    fuser.convert(model)
    model(x)
    down = model.get_submodule("mlp.down")
    gone = weakref.ref(down), weakref.ref(down.weight)
    del down
    model.get_submodule("mlp").down = nn.Linear(WIDTH, HIDDEN, bias=False)
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_hooks_for_every_module_see_the_children() -> None:
    model, x = seeded(GatedMLP), data()
    fuser.convert(model)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(type(module).__name__)
    )
    try:
        model(x)
    finally:
        handle.remove()
    assert seen == ["Linear", "SiLU", "Linear", "Linear", "GatedMLP"]
    model(x)
    assert len(seen) == 5


def test_gate_and_up_are_one_memory_and_stay_the_same_parameters() -> None:
    model = seeded(GatedMLP)
    gate, up = model.get_submodule("gate").weight, model.get_submodule("up").weight
    assert isinstance(gate, nn.Parameter)
    assert isinstance(up, nn.Parameter)
    values = gate.clone(), up.clone()
    fuser.convert(model)
    assert model.get_submodule("gate").weight is gate
    assert torch.equal(gate, values[0])
    assert torch.equal(up, values[1])

    def is_one() -> bool:
        one, two = (model.get_submodule(n).weight for n in ("gate", "up"))
        assert isinstance(one, nn.Parameter)
        assert isinstance(two, nn.Parameter)
        return two.data_ptr() == one.data_ptr() + one.nbytes

    assert is_one()
    model.to(torch.bfloat16)
    assert is_one()
    model = copy.deepcopy(model)
    assert is_one()


def test_a_weight_written_to_between_forward_and_backward_is_an_error() -> None:
    model, x = seeded(GatedMLP), data()
    fuser.convert(model)
    for name in ("gate", "up", "down"):
        y = model(x).sum()
        with torch.no_grad():
            weight = model.get_submodule(name).weight
            assert isinstance(weight, nn.Parameter)
            weight.add_(1)
        # torch's sentence, or that of weights which are read as one.
        sentence = r"modified by an inplace operation|changed in place between forward and backward"
        with pytest.raises(RuntimeError, match=sentence):
            y.backward()
    model(x).sum().backward()


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, saved_and_loaded, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("has_run", [True, False])
def test_copies_are_converted_and_their_own(
    copied: Callable[[nn.Module], nn.Module], has_run: bool
) -> None:
    model, x = seeded(titan_like.TitanLike), titan_like.tokens()
    expected = results(model, x)
    fuser.convert(model, recipe=CURRENT)
    if has_run:
        model(x)
    quantized = results(model, x)
    assert not torch.equal(quantized["y"], expected["y"])
    other = copied(model)
    assert type(other).__name__ == "TitanLike"
    assert isinstance(other, titan_like.TitanLike)
    assert pipelines_run(other, x) == pipelines_run(model, x) > 4
    assert_same(results(other, x), quantized)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert_same(results(model, x), quantized)
    fuser.revert(model)
    assert_same(results(model, x), expected)


@pytest.mark.parametrize("recipe", [None, CURRENT, fuser.recipe.DelayedScaling()], ids=str)
def test_both_checkpointings_give_the_same_gradients(recipe: Any) -> None:
    found = []
    for way in (None, True, False):
        model, x = seeded(lambda: nn.Sequential(PreNorm(), PreNorm())), data()
        fuser.convert(model, recipe=recipe)

        def forward(x: torch.Tensor, model: nn.Module = model, way: Any = way) -> Any:
            return model(x) if way is None else checkpoint(model, x, use_reentrant=way)

        y = forward(x)
        y.square().mean().backward()
        found.append({"y": y.detach(), "dx": x.grad}
                     | {n: p.grad for n, p in model.named_parameters()})  # fmt: skip
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, value in found[0].items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["no recipe", "current"])
@pytest.mark.parametrize("memory_budget", [None, 1, 0])
def test_every_memory_budget_gives_the_same_gradients(memory_budget: Any, recipe: Any) -> None:
    model, x = seeded(lambda: nn.Sequential(PreNorm(), PreNorm())), data()
    fuser.convert(model, recipe=recipe)
    expected = results(model, x)
    with fuser.activation_memory_budget(memory_budget):
        actual = results(model, x)
        assert all(torch.equal(actual[name], value) for name, value in expected.items())
        y = model(x).sum()
        with torch.no_grad():
            next(model.parameters()).add_(1)
        with pytest.raises(RuntimeError, match=r"was changed between|modified by an inplace"):
            y.backward()


@pytest.mark.parametrize(
    "holder",
    [
        lambda m: fuser.Sequential(m, fuser.GELU()),
        lambda m: fuser.Sequential(fuser.Sequential(m, m), fuser.GELU(), m),
        lambda m: lambda x: checkpoint(m, x, use_reentrant=False),
    ],
    ids=["pipeline", "pipelines", "checkpoint"],
)
def test_a_backward_outside_of_a_budget_of_0_repeats_converted_modules(holder: Any) -> None:
    model, x = seeded(PreNorm), data()
    call = holder(model)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        leaf = x.detach().clone().requires_grad_()
        with fuser.activation_memory_budget(0):
            loss = call(leaf).square().sum()
        loss.backward()
        return [leaf.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    expected = gradients()
    fuser.convert(model)
    for found, value in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, value)


def test_two_threads_call_one_module() -> None:
    model, x = seeded(GatedMLP), data()
    weight = model.get_submodule("up").weight
    fuser.convert(model)
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.clone()  # apart from gate's: each call copies
    expected = results(model, x)

    def call(_: int) -> list[torch.Tensor]:
        leaf = x.detach().clone().requires_grad_()
        y = model(leaf)
        return [y, *torch.autograd.grad(y.square().mean(), [leaf, *model.parameters()])]

    with ThreadPoolExecutor(4) as pool:
        for y, *grads in pool.map(call, range(24)):
            assert torch.equal(y, expected["y"])
            for grad, name in zip(grads, list(expected)[1:], strict=True):
                assert torch.equal(grad, expected[name])


def test_a_dropout_in_training_has_torchs_random_numbers() -> None:
    plain, model, x = seeded(lambda: PreNorm(0.5)), seeded(lambda: PreNorm(0.5)), data()
    fuser.convert(model)
    for m in (plain, model):
        torch.manual_seed(11)
        m(x)
    torch.manual_seed(11)
    expected = results(plain, x)
    torch.manual_seed(11)
    assert_same(results(model, x), expected)
    for m in (plain, model):
        m.eval()
    assert_same(results(model, x), results(plain, x))


def test_a_recipe_is_that_of_the_whole_model_and_keep_leaves_linears_out() -> None:
    x = titan_like.tokens()
    plain = results(seeded(titan_like.TitanLike), x)
    found = {}
    every = ("layers.*.*",)
    for name, options in {
        "first and last kept": {},
        "nothing kept": {"keep": ()},
        "all kept": {"keep": ("*",)},
        "layers kept": {"keep": every, "linears": "none"},
    }.items():
        model = seeded(titan_like.TitanLike)
        fuser.convert(model, recipe=CURRENT, **options)
        found[name] = results(model, x)
    assert not torch.equal(found["first and last kept"]["y"], plain["y"])
    assert not torch.equal(found["nothing kept"]["y"], found["first and last kept"]["y"])
    assert_same(found["all kept"], plain)
    # Kept linears are unquantized inside of any autocast.
    model = seeded(titan_like.TitanLike)
    fuser.convert(model, keep=("*",))
    with fuser.autocast(recipe=CURRENT):
        assert_same(results(model, x), plain)
    model = seeded(titan_like.TitanLike)
    fuser.convert(model)
    with fuser.autocast(recipe=CURRENT):
        assert not torch.equal(results(model, x)["y"], plain["y"])


def test_a_kept_linear_does_not_take_quantization_from_other_blocks() -> None:
    x = data()
    blocks = seeded(lambda: nn.Sequential(PreNorm(), PreNorm(), PreNorm()))
    report = fuser.convert(blocks, recipe=CURRENT)
    of_block = ", ".join(("LayerNorm", "gate and up", "SwiGLU", "down", "residual"))
    assert {row.path: row.text for row in report.converted} == {
        "0": f"{of_block}, never quantized",
        "1": of_block,
        "2": f"{of_block}, never quantized",
    }
    y = blocks(x)
    only_middle = seeded(lambda: nn.Sequential(PreNorm(), PreNorm(), PreNorm()))
    fuser.convert(only_middle[1], recipe=CURRENT, keep=())
    torch.testing.assert_close(y, only_middle(x), rtol=0, atol=1e-6)
    assert not torch.allclose(y, seeded(lambda: nn.Sequential(*(PreNorm() for _ in range(3))))(x))


def test_a_linear_in_a_chain_that_is_kept_is_not_gathered_quantized() -> None:
    """Neither the one that ``keep`` names nor those of its chain, whatever module is given."""
    for kept in ("gate", "down"):
        model = seeded(lambda: nn.Sequential(PreNorm(), PreNorm()))
        fuser.convert(model, recipe=CURRENT, keep=(f"0.*{kept}",))
        kept_block, other = model.children()
        linears = [m for m in kept_block.modules() if isinstance(m, nn.Linear)]
        assert len(linears) == 3
        for given in (kept_block, *linears, *copy.deepcopy(linears)):
            with pytest.raises(fuser.InputError, match="that runs quantized"):
                fuser.distributed.gather_quantized(given, CURRENT)
        fuser.distributed.gather_quantized(other.mlp.down, CURRENT)
        gathered = [p for p, w in model.named_parameters() if isinstance(w, MasterWeight)]
        assert gathered == ["1.mlp.down.weight"]


def test_an_argument_too_many_is_not_dropped() -> None:
    class Layer(GatedMLP):
        def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
            return super().forward(x)

    model, x = seeded(Layer), data()
    expected = output_of(model, x)
    assert fuser.convert(model).converted
    assert torch.equal(model(x, anything=3), expected)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        model(x, x)


def test_delayed_scaling_is_one_step_a_model() -> None:
    """Two calls under one autocast, and a model whose forward enters it, have the same scales."""
    recipe = fuser.recipe.DelayedScaling(amax_history_len=4)
    x = data()
    inner, outer = seeded(lambda: nn.Sequential(PreNorm(), PreNorm())), None
    outer = copy.deepcopy(inner)
    fuser.convert(inner, recipe=recipe, keep=())
    fuser.convert(outer, keep=())
    for _ in range(3):
        actual = results(inner, x)
        with fuser.autocast(recipe=recipe):
            y = outer(x)
        outer.zero_grad()
        y.square().mean().backward()
    assert torch.equal(actual["y"], y)
    for name, p in outer.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, actual[name])


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["no recipe", "current"])
def test_a_compiled_model_is_one_graph_with_the_same_bits(recipe: Any) -> None:
    model, x = seeded(titan_like.TitanLike), titan_like.tokens()
    plain = results(model, x)
    fuser.convert(model, recipe=recipe)
    expected = results(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = results(compiled, x)
    for name, value in expected.items():
        key = name if name in ("y", "dx") else f"_orig_mod.{name}"
        assert torch.equal(actual[key], value), name
    assert torch.equal(actual["y"], plain["y"]) == (recipe is None)


class Checkpointed(nn.Module):
    """Blocks in checkpoints, as of a model with gradient checkpointing."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(("block", "rounding"), [(PreNorm, "fused"), (GatedMLP, "torch")])
@pytest.mark.parametrize("recipe", [None, CURRENT, fuser.recipe.DelayedScaling()], ids=str)
def test_a_checkpoint_in_a_compiled_graph_needs_no_setting(
    recipe: Any, block: Callable[[], nn.Module], rounding: Any
) -> None:
    model, x = seeded(lambda: Checkpointed(block)), data()
    fuser.convert(model, recipe=recipe, rounding=rounding)
    expected = results(copy.deepcopy(model), x)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = results(compiled, x)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    for name, value in expected.items():
        key = name if name in ("y", "dx") else f"_orig_mod.{name}"
        assert torch.equal(actual[key], value), name


def test_a_call_between_two_graphs_has_the_parameters_of_the_converted_module() -> None:
    """A block that is called twice in the autocast of a model breaks the graph."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = PreNorm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.block(torch.sin(self.block(x)))
            return y

    model, x = seeded(Repeated), data()
    fuser.convert(model, recipe=fuser.recipe.DelayedScaling(), keep=())
    expected = results(copy.deepcopy(model), x)
    torch._dynamo.reset()
    counters.clear()
    actual = results(torch.compile(model, backend="aot_eager"), x)
    assert "called twice in an autocast" in str(counters)
    for name, value in expected.items():
        key = name if name in ("y", "dx") else f"_orig_mod.{name}"
        assert torch.equal(actual[key], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_on_meta_is_converted_and_filled_later(dtype: torch.dtype) -> None:
    expected = seeded(titan_like.TitanLike)
    with on_meta(dtype):
        model = titan_like.TitanLike().to(torch.float32)
        report = fuser.convert(model, recipe=CURRENT)
    assert str(report) == str(fuser.convert(copy.deepcopy(expected), recipe=CURRENT))
    model.to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())
    fuser.convert(expected, recipe=CURRENT)
    x = titan_like.tokens()
    assert_same(results(model, x), results(expected, x))


@pytest.mark.parametrize("make", [GatedMLP, PackedMLP, PreNorm])
@pytest.mark.parametrize("recipe", [None, CURRENT])
def test_a_converted_module_on_meta_says_so(
    make: Callable[[], nn.Module], recipe: fuser.recipe.Recipe | None
) -> None:
    """torch multiplies by a weight on meta, and returns whatever memory holds."""
    with on_meta(torch.float32):
        model = make()
    fuser.convert(model, recipe=recipe)
    name, parameter = next(model.named_parameters())
    for _ in range(2):
        with pytest.raises(
            fuser.StateError,
            match=said(
                "unit-shape-meta-device", type(model).__name__, name, tuple(parameter.shape), "cpu"
            ),
        ):
            model(data())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model(data().to("meta")).is_meta  # shapes alone, as in torch
    expected = seeded(make)
    model.to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())
    fuser.convert(expected, recipe=recipe)
    assert torch.equal(model(data()), expected(data()))


def test_loading_with_assign_gives_the_loaded_values() -> None:
    model, other, x = seeded(GatedMLP), seeded(GatedMLP, seed=5), data()
    fuser.convert(model)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert_same(results(model, x), results(other, x))


def test_training_follows_the_plain_model() -> None:
    losses = []
    for is_converted in (False, True):
        model, x = seeded(titan_like.TitanLike), titan_like.tokens()
        if is_converted:
            fuser.convert(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            rows.append(float(loss.detach()))
        losses.append(rows)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=0)
    assert losses[0][-1] < 0.5 * losses[0][0]


def test_frozen_parameters_get_no_gradient() -> None:
    model, x = seeded(PreNorm), data()
    model.get_submodule("mlp.gate").requires_grad_(False)
    expected = results(model, x)
    fuser.convert(model)
    assert_same(results(model, x), expected)
    assert "mlp.gate.weight" not in expected


def test_a_context_leaves_the_model_as_it_was_before() -> None:
    model, x = seeded(titan_like.TitanLike), titan_like.tokens()
    fuser.convert(model.get_submodule("layers.0"))
    plain = results(model, x)
    with fuser.converted(model, recipe=CURRENT) as report:
        assert {"layers.0", "layers.1", ""} <= {row.path for row in report.converted}
        assert not torch.equal(results(model, x)["y"], plain["y"])
    assert pipelines_run(model, x) == 1
    assert_same(results(model, x), plain)
    with pytest.raises(ValueError, match="stop"), fuser.converted(model):
        raise ValueError("stop")
    assert pipelines_run(model, x) == 1


def test_the_filter_leaves_out_a_module_and_every_chain_with_it() -> None:
    model = seeded(titan_like.TitanLike)
    report = fuser.convert(model, filter=lambda path, module: path != "layers.0.feed_forward.w3")
    converted = [row.path for row in report.converted]
    assert "layers.0" not in converted
    assert "layers.0.feed_forward" not in converted
    assert "layers.1" in converted
    refused = {row.path: row.text for row in report.refused}
    assert refused["layers.0.feed_forward"] == "the filter leaves out layers.0.feed_forward.w3"


class RMSNormOfItsDtype(nn.RMSNorm):
    """Without an eps it takes that of its input's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("cls", "eps"), [(nn.RMSNorm, None), (nn.RMSNorm, 1e-6), (RMSNormOfItsDtype, None)]
)
def test_an_rms_norm_without_an_eps_has_the_values_of_torch(
    cls: type[nn.RMSNorm], eps: float | None, dtype: torch.dtype
) -> None:
    """In rows so small that its eps is most of what they are divided by."""
    model = nn.Sequential(cls(HIDDEN, eps=eps), nn.Linear(HIDDEN, HIDDEN, bias=False))
    with torch.no_grad():
        model.get_parameter("0.weight").uniform_(0.5, 2)
    exact = copy.deepcopy(model.to(dtype)).double()
    report = fuser.convert(model)
    assert len(report.converted) == (cls is nn.RMSNorm)
    x = (data() * torch.logspace(-5, 1, 5)[:, None]).to(dtype).detach()
    y = model(x).double()
    used = eps or torch.finfo(torch.float32 if cls is nn.RMSNorm else dtype).eps
    square = x.double().square().mean(-1, keepdim=True)
    normed = x.double() / (square + used).sqrt() * exact.get_parameter("0.weight")
    expected = exact[1](normed)
    rows = expected.abs().amax(-1, keepdim=True)
    assert ((y - expected).abs() <= 4 * torch.finfo(dtype).eps * rows).all()


def test_an_eps_that_is_set_later_is_seen() -> None:
    model: Any = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    plain, x = copy.deepcopy(model), data().detach()
    fuser.convert(model)
    for each in (plain, model):
        each[0].eps = 0.5
    assert torch.equal(model(x), plain(x))


def test_norms_alone_and_linears_alone_are_asked_for() -> None:
    counts = {}
    for norms in ("fused", "all"):
        for linears in ("none", "all"):
            model = seeded(titan_like.TitanLike)
            report = fuser.convert(model, norms=norms, linears=linears)
            counts[norms, linears] = len(report.converted)
            plain, x = seeded(titan_like.TitanLike), titan_like.tokens()
            assert torch.equal(model(x), output_of(plain, x))
    none = fuser.convert(seeded(titan_like.TitanLike), norms="none")
    assert not any("RMSNorm" in row.text for row in none.converted)
    assert any("w1 and w3" in row.text for row in none.converted)
    one = counts["fused", "none"]
    # Each of two layers has a norm and four linears outside of its chain.
    assert counts == {
        ("fused", "none"): one,
        ("fused", "all"): one + 8,
        ("all", "none"): one + 2,
        ("all", "all"): one + 10,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_order_of_rounding_gives_torchs_bits(dtype: torch.dtype) -> None:
    x = titan_like.tokens()
    expected = results(seeded(titan_like.TitanLike).to(dtype), x)
    distances = {}
    for rounding in ("fused", "torch"):
        model = seeded(titan_like.TitanLike).to(dtype)
        report = fuser.convert(model, rounding=rounding)
        assert report.converted
        found = results(model, x)
        distances[rounding] = float((found["y"] - expected["y"]).abs().max())
    assert distances["torch"] == 0 < distances["fused"]


def test_other_arguments_and_modules_are_refused_in_a_sentence_and_nothing_changes() -> None:
    model, x = seeded(PreNorm), data()
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (x, {}, said("convert-fuser-takes-module", "Tensor")),
        (model, {"recipe": 8}, said("convert-takes-recipe-none", "int")),
        (model, {"recipe": "fp8"}, said("recipe-no", "'fp8'")),
        (
            model,
            {"linears": "some"},
            said("convert-fuser", "linears", "'some'", "recipe, all, none"),
        ),
        (model, {"norms": True}, said("convert-fuser", "norms", True, "fused, all, none")),
        (
            model,
            {"rounding": "exact"},
            said("convert-fuser", "rounding", "'exact'", "fused, torch"),
        ),
        (model, {"keep": "first"}, said("convert-sequence-patterns-string", "'first'")),
        (
            model,
            {"keep": ("*.q_proj",)},
            said("convert-matches-no-linear", None, holds("mlp.gate")),
        ),
        (
            nn.Sequential(model, seeded(LOOK_ALIKES["tanh"])),
            {"strict": True},
            said("convert-strict-true-converted", holds("1 (LookAl")),
        ),
    ]
    for module, options, sentence in refusals:
        with pytest.raises(fuser.FuserError, match=sentence):
            fuser.convert(module, **options)
        assert pipelines_run(model, x) == 0
        assert type(model) is PreNorm
    assert fuser.convert(model, strict=True).converted


def tangent(model: nn.Module, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(model(dual)).tangent


def with_parameters(model: nn.Module, x: torch.Tensor) -> Callable[[Any], Any]:
    return lambda values: torch.func.functional_call(model, values, (x,)).sum()


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "grad": lambda model, x: torch.func.grad(lambda t: model(t).sum())(x),
    "forward-mode AD": tangent,
    "of parameters": lambda model, x: torch.func.grad(with_parameters(model, x))(
        dict(model.named_parameters())
    ),
    "ensemble": lambda model, x: torch.func.vmap(with_parameters(model, x))(
        {name: torch.stack([p, 2 * p]) for name, p in model.named_parameters()}
    ),
    "hessian": lambda model, x: torch.func.hessian(lambda t: model(t).sum())(x[0, 0]),
}


@pytest.mark.parametrize("after_a_call", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_torch_func_has_the_values_of_the_own_forward(
    name: str, after_a_call: bool
) -> None:
    model, plain, x = seeded(PreNorm), seeded(PreNorm), data().detach()
    fuser.convert(model)
    if after_a_call:
        model(x)
    found, expected = (TRANSFORMS[name](each, x) for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert pipelines_run(model, x) == 1


def test_other_calls_of_a_converted_forward_are_those_of_the_class() -> None:
    model, x = seeded(GatedMLP), data()
    expected = output_of(model, x)
    fuser.convert(model)
    assert torch.equal(model(x=x), expected)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        model(x, x)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model()
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        model(x, scale=2)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        model(x, x=2 * x)
    assert torch.equal(model(x), expected)


def removed(model: Any) -> None:
    del model.layers["0"]


def added(model: Any) -> None:
    model.layers["2"] = copy.deepcopy(model.layers["0"])


def first_stage(model: Any) -> None:
    del model.layers["1"]
    model.norm = model.lm_head = None


def last_stage(model: Any) -> None:
    del model.layers["0"]
    model.tok_embeddings = None


@pytest.mark.parametrize("change", [removed, added, first_stage, last_stage])
def test_a_model_that_loops_over_layers_may_lose_and_get_some(
    change: Callable[[nn.Module], None],
) -> None:
    model, plain = seeded(titan_like.TitanLike), seeded(titan_like.TitanLike)
    report = fuser.convert(model)
    assert "" in [row.path for row in report.converted]
    for each in (model, plain):
        change(each)
    x = titan_like.tokens() if plain.tok_embeddings is not None else torch.randn(2, 12, HIDDEN)
    assert torch.equal(model(x), output_of(plain, x))
    assert pipelines_run(model, x) == len(plain.get_submodule("layers")._modules)


def test_a_subclass_of_a_linear_is_not_tried_with_weights_of_its_size() -> None:
    class Linear(nn.Linear):
        """As the linears of torchtitan: of a class of its own, with torch's forward."""

    class Scaled(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    with torch.device("meta"):
        large = nn.ModuleList([Linear(1 << 20, 1 << 20), Linear(64, 64)])
    assert len(fuser.convert(large, linears="all").converted) == 2
    assert not fuser.convert(Scaled(64, 64), linears="all").converted


def test_joined_weights_have_storages_of_their_own() -> None:
    """Two tensors of one storage are a tied weight to safetensors and accelerate."""
    model, plain = seeded(titan_like.TitanLike), seeded(titan_like.TitanLike)
    fuser.convert(model)
    mlp = model.get_submodule("layers.0.feed_forward")
    one, other = mlp.w1.weight, mlp.w3.weight
    assert other.data_ptr() == one.data_ptr() + one.nbytes
    for p in model.parameters():
        assert p.untyped_storage().nbytes() == p.nbytes
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    before = one.data_ptr()
    model.train()
    assert one.data_ptr() == before
    # They outlive the model, and may go to other processes.
    fuser.revert(model)
    values = plain.get_submodule("layers.0.feed_forward.w3").weight.detach().clone()
    del model, mlp, one
    gc.collect()
    assert torch.equal(other, values)
    other.share_memory_()
    assert torch.equal(other, values)


def test_weights_that_processes_share_stay_where_they_are() -> None:
    model, plain = seeded(GatedMLP), seeded(GatedMLP)
    model.share_memory()
    before = [p.data_ptr() for p in model.parameters()]
    assert fuser.convert(model).converted
    x = data()
    torch.testing.assert_close(model(x), plain(x))
    assert [p.data_ptr() for p in model.parameters()] == before
    assert all(p.is_shared() for p in model.parameters())


class Halved(torch.autograd.Function):
    """Returns what it gets, and halves the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] / 2


class HalfGradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halved: torch.Tensor = Halved.apply(x)
        return halved


def test_what_returns_its_input_and_changes_its_gradient_is_no_identity() -> None:
    for between in (HalfGradient(), nn.Identity()):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(64, 96), between, nn.Linear(96, 64), nn.GELU())
        plain = copy.deepcopy(model)
        assert fuser.convert(model).converted
        found = []
        for each in (model, plain):
            x = data().requires_grad_()
            y = each(x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, each[0].weight.grad])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def memory_of(mlp: Any) -> Any:
    return joined_weights.memory_of([mlp.gate.weight, mlp.up.weight])


def test_parameters_of_a_converted_model_can_be_swapped() -> None:
    """As ``model.to`` does by torch.__future__.set_swap_module_params_on_conversion."""
    model, plain, x = seeded(GatedMLP), seeded(GatedMLP), data()
    fuser.convert(model)
    model(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_same(results(model, x), results(plain, x))


def test_a_block_and_its_part_join_weights_once() -> None:
    model = seeded(PreNorm)
    fuser.convert(model.mlp)
    address = model.mlp.gate.weight.data_ptr()
    fuser.convert(model)
    for _ in range(3):
        model.train().eval()
        assert model.mlp.gate.weight.data_ptr() == address


def test_memory_that_parameters_have_left_is_given_back() -> None:
    model = seeded(GatedMLP)
    fuser.convert(model)
    memory = weakref.ref(memory_of(model))
    model.to(torch.float64)
    assert memory() is None
    model.to(torch.float32)
    memory = weakref.ref(memory_of(model))
    del model
    gc.collect()
    assert memory() is None


def test_a_forward_around_a_converted_model_calls_its_pipelines() -> None:
    """As accelerate sets it, and takes it off by ``__wrapped__``."""
    model: Any = seeded(lambda: nn.Sequential(PreNorm(), PreNorm()))
    x = data()
    fuser.convert(model, recipe=CURRENT, keep=())
    expected, count = titan_like.counted(model, x)
    model._original_forward, forward = model.forward, model.forward
    model._is_accelerate_prepared = True
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    found, present = titan_like.counted(model, x)
    assert present == count > 0
    assert torch.equal(found, expected)
    del model.forward, model._original_forward
    assert not hasattr(type(model).forward, "__wrapped__")
    assert list(inspect.signature(model.forward).parameters) == ["input"]


def test_layers_that_are_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if their attributes are other objects of one value, such as the shapes of norms."""
    looked_at: list[type] = []
    conversion = sys.modules["fuser.conversion.convert"]  # the package has the function's name
    find = conversion._find_unit

    def counting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        looked_at.append(type(module))
        return find(module, *args, **kwargs)

    monkeypatch.setattr(conversion, "_find_unit", counting)
    counts = []
    for layers in (2, 5):
        looked_at.clear()
        report = fuser.convert(titan_like.TitanLike(layers=layers))
        assert len(report.converted) == layers + 1
        counts.append(len(looked_at))
    assert counts[0] == counts[1]
    # Another value is another kind.
    looked_at.clear()
    model = titan_like.TitanLike(layers=2)
    norm: Any = model.get_submodule("layers.1.ffn_norm")
    norm.normalized_shape = (1, HIDDEN)
    fuser.convert(model)
    assert len(looked_at) > counts[0]


def test_the_plan_of_a_converted_model_has_its_pipelines_and_nothing_of_their_weights() -> None:
    model, x = nn.Sequential(*(seeded(PreNorm, seed) for seed in range(3))), data()
    own = fuser.plan(model, x)
    assert not own.plans
    fuser.convert(model)
    for device in (None, "h200"):
        plan = fuser.plan(model, x, device=device)
        assert list(plan.plans) == ["0", "1", "2"]
        # gate and up are one weight in memory: no other operation joins them
        assert {type(part.content) for part in plan.parts} == {fuser.FusionPlan}
    assert "SwiGLU" in str(next(iter(plan.plans.values())))
    assert_same(results(model, x), results(seeded_copy(model), x))


def seeded_copy(model: nn.Module) -> nn.Module:
    """The same model, not converted."""
    twin = copy.deepcopy(model)
    assert fuser.revert(twin)
    return twin


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_converted_model_is_inspected_by_the_paths_of_its_linears() -> None:
    model, x = titan_like_model(), titan_like.tokens()
    fuser.convert(model, recipe=CURRENT)
    with fuser.inspect(model) as report:
        model(x).float().square().mean().backward()
    layers = {row.layer for row in report.rows()}
    assert "layers.0.feed_forward.w1 and w3" in layers
    assert {"layers.1.feed_forward.w2", "layers.0.attention.wk"} <= layers
    assert {score.layer for score in report.ranked()} == layers
    # the first and the last linear are kept, and what an outer pipeline runs is named once
    assert report.not_quantized == {
        "layers.0.attention.wq": "no recipe was active",
        "lm_head": "no recipe was active",
    }
    # a child with a hook: the block's own forward runs, and with it the linears of their own
    model.get_submodule("layers.0.feed_forward.w1").register_forward_hook(lambda *_: None)
    with fuser.inspect(model) as report:
        model(x).float().square().mean().backward()
    layers = {row.layer for row in report.rows()}
    assert "layers.0.feed_forward.w3" in layers
    assert report.not_quantized["layers.0.feed_forward.w1 and w3"] == "it did not run"


def titan_like_model() -> Any:
    return seeded(titan_like.TitanLike)


def test_a_report_says_if_a_recipe_quantizes_nothing() -> None:
    def chain() -> nn.Module:
        layers = (nn.Linear(HIDDEN, HIDDEN), nn.GELU())
        return nn.Sequential(*layers, nn.Linear(HIDDEN, HIDDEN), nn.GELU(), *layers[:1])

    sentence = "No linear is quantized: keep=('first', 'last') holds those of every chain"
    assert sentence in str(fuser.convert(chain(), recipe=CURRENT))
    beside = nn.ModuleList([chain(), nn.LayerNorm(HIDDEN)])
    report = fuser.convert(beside, recipe=CURRENT, norms="all")
    assert sentence in report.note
    assert [row.path for row in report.converted] == ["0.0", "0.2", "1"]
    assert not fuser.convert(chain(), recipe=CURRENT, keep=()).note
    assert not fuser.convert(chain()).note
    assert not fuser.convert(titan_like_model(), recipe=CURRENT).note


# -- sums with what torch broadcasts -------------------------------------------------------


class Summed(nn.Module):
    """Adds another input to the rows after a feed-forward, or to those before it."""

    def __init__(self, is_after: bool, *, is_first: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, 48)
        self.is_after = is_after
        self.is_first = is_first

    def forward(self, x: torch.Tensor, other: Any) -> torch.Tensor:
        y: torch.Tensor
        if self.is_after:
            y = self.down(F.gelu(self.up(x))) + other
        elif self.is_first:
            y = self.down(F.gelu(self.up(other + x)))
        else:
            y = self.down(F.gelu(self.up(x + other)))
        return y


OTHERS: dict[str, Callable[[int], Any]] = {
    "the shape": lambda width: torch.randn(2, 5, width),
    "positions": lambda width: torch.randn(1, 5, width),
    "a row": lambda width: torch.randn(width),
    "a column": lambda width: torch.randn(2, 5, 1),
    "a scalar": lambda width: torch.tensor(1.5),
    "more rows": lambda width: torch.randn(3, 2, 5, width),
    "a number": lambda width: 2.0,
    "integers": lambda width: torch.arange(2 * 5 * width).view(2, 5, width) % 7,
}


PLACES = {
    "after": lambda: Summed(True),
    "before": lambda: Summed(False),
    "first": lambda: Summed(False, is_first=True),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", OTHERS)
def test_a_sum_broadcasts_as_in_torch(other: str, place: str) -> None:
    torch.manual_seed(0)
    is_after = place == "after"
    model, plain = PLACES[place](), PLACES[place]()
    plain.load_state_dict(model.state_dict())
    fuser.convert(model)
    given, found = OTHERS[other](48 if is_after else HIDDEN), []
    for each in (model, plain):
        x, added = data().detach().requires_grad_(), copy.deepcopy(given)
        leaves = [x]
        if isinstance(added, torch.Tensor) and added.is_floating_point():
            leaves.append(added.requires_grad_())
        y = each(x, added)
        found.append([y, *torch.autograd.grad(y.square().sum(), [*leaves, *each.parameters()])])
    for one, expected in zip(*found, strict=True):
        assert one.dtype is expected.dtype
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [torch.randn(2, 5, 48).double(), 1j, torch.tensor(1j)])
def test_a_sum_in_a_dtype_of_no_pipeline_is_that_of_the_own_forward(other: Any) -> None:
    model = Summed(True)
    expected = model(data(), other)
    fuser.convert(model)
    found = model(data(), other)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


def test_a_sum_that_widens_rows_is_refused_with_the_shapes() -> None:
    torch.manual_seed(0)
    model = Summed(True)
    fuser.convert(model)
    with pytest.raises(fuser.StateError, match=said("unit-converted-adds-tensors", "Summed")):
        model(data(), torch.randn(2, 5, 7))
    assert model(data(), 0.0).shape == (2, 5, 48)


@pytest.mark.parametrize("is_after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize(
    "other",
    [0.3, True, torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64), torch.arange(48) % 3],
    ids=["a number", "a bool", "a scalar", "a scalar in fp64", "integers"],
)
@pytest.mark.parametrize("way", ["bf16", "autocast"])
def test_a_number_in_a_sum_does_not_widen_its_dtype(way: str, other: Any, is_after: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    model, plain = Summed(is_after).to(dtype), Summed(is_after).to(dtype)
    plain.load_state_dict(model.state_dict())
    if isinstance(other, torch.Tensor) and other.dim() and not is_after:
        other = other.repeat(2)[:HIDDEN]
    fuser.convert(model)
    x = data().detach().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"), torch.no_grad():
        found, expected = model(x, other), plain(x, other)
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("other", OTHERS)
def test_a_sum_with_an_input_of_the_call_is_in_the_pipeline(other: str) -> None:
    for is_after in (True, False):
        model = seeded(functools.partial(Summed, is_after))
        fuser.convert(model)
        given = OTHERS[other](48 if is_after else HIDDEN)
        assert titan_like.counted(lambda x, m=model, y=given: m(x, y), data())[1] == 1


# -- chains that are one part of a forward, which is not tried as a whole --------------------


class Packed(nn.Module):
    """A packed feed-forward, and the sum with another input."""

    def __init__(self, inputs: int, packed: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(inputs, packed)
        self.down = nn.Linear(packed - packed // 2, inputs)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down(F.silu(gate) * up) + other
        return y


class Steep(nn.Module):
    """An activation with an argument."""

    def forward(self, x: torch.Tensor, slope: float = 1.0) -> torch.Tensor:
        return F.silu(slope * x)


class WithSteep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(48, 64), nn.Linear(48, 64), nn.Linear(64, 48)
        self.act = Steep()

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        h = self.act(self.gate(x), slope=3.0) * self.up(x)
        y: torch.Tensor = self.down(h) + other
        return y


PARTS: dict[str, tuple[Callable[[], nn.Module], int, list[str]]] = {
    "halves of odd inputs": (lambda: Packed(33, 96), 33, ["gate_up, SwiGLU, down, add"]),
    "halves of unequal sizes": (lambda: Packed(48, 3), 48, []),
    "an argument of an activation": (WithSteep, 48, ["down, add"]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_forward_has_the_values_of_its_own_forward(name: str) -> None:
    make, width, texts = PARTS[name]
    model, plain = seeded(make), seeded(make)
    report = fuser.convert(model)
    x, other = torch.randn(2, 5, 2 * width).chunk(2, -1)
    torch.testing.assert_close(model(x, other), plain(x, other), rtol=1e-5, atol=1e-5)
    assert [row.text for row in report.converted] == texts


@pytest.mark.parametrize("rounding", ["fused", "torch"])
def test_a_dropout_in_a_chain_is_called_with_its_hooks(rounding: Any) -> None:
    model, x, calls = seeded(lambda: TwoLinears(nn.Dropout(0.5))), data(), []
    fuser.convert(model, rounding=rounding)
    assert pipelines_run(model, x) == 1
    model.get_submodule("function").register_forward_hook(lambda *_: calls.append(1))
    assert pipelines_run(model, x) == 1
    assert calls == [1]


class Scaling(nn.Module):
    def forward(self, x: torch.Tensor, **options: float) -> torch.Tensor:
        return x * options.get("scale", 1.0)


class Flipped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)


class WithKeywords(TwoLinears):
    """Of its steps the first alone gets the keyword arguments of a call."""

    def __init__(self) -> None:
        super().__init__(F.gelu)
        self.scaling, self.flipped = Scaling(), Flipped()

    def forward(self, x: torch.Tensor, **options: float) -> torch.Tensor:
        h = self.flipped(self.scaling(x, **options))
        y: torch.Tensor = self.two(self.function(self.one(h)))
        return y


def test_keyword_arguments_go_to_the_step_that_takes_them_alone() -> None:
    model, plain, x = seeded(WithKeywords), seeded(WithKeywords), data()
    assert len(fuser.convert(model).converted) == 1
    for options in ({}, {"scale": 3.0}):
        torch.testing.assert_close(model(x, **options), plain(x, **options))


def test_a_conversion_of_a_module_alone_leaves_its_children() -> None:
    model = seeded(GatedMLP)
    fuser.convert(model)
    model.to_empty(device="meta", recurse=False)
    assert not any(p.is_meta for p in model.parameters())


# -- weights that are no memory of their own ------------------------------------------------


def in_16_bits(mlp: Any) -> object:
    return mlp.gate.to(torch.bfloat16)


def with_an_alias(mlp: Any) -> object:
    return mlp.up.weight.detach()


def in_a_larger_tensor(mlp: Any) -> object:
    whole = torch.randn(2 * WIDTH, HIDDEN)
    mlp.gate.weight = nn.Parameter(whole[:WIDTH])
    return whole


@pytest.mark.parametrize("change", [in_16_bits, with_an_alias, in_a_larger_tensor])
@pytest.mark.parametrize("is_before", [True, False])
def test_weights_that_cannot_be_joined_stay_where_they_are(change: Any, is_before: bool) -> None:
    model = seeded(GatedMLP)
    if not is_before:
        with torch.device("meta"):
            fuser.convert(model := GatedMLP())
        model.to_empty(device="cpu")
        for linear in (model.gate, model.up):  # with memory of their own
            linear.weight = nn.Parameter(torch.randn(WIDTH, HIDDEN))
    kept = change(model)
    before = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    if is_before:
        fuser.convert(model)
    model.train()
    assert [(p.data_ptr(), p.dtype) for p in model.parameters()] == before
    del kept


# -- linears and norms of other classes ------------------------------------------------------


class InOut(nn.Module):
    """A linear with weights ``[in, out]``, as in transformers' GPT-2."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 8)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class OutIn(nn.Module):
    """The same with weights ``[out, in]``."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 8)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [HIDDEN, WIDTH])
@pytest.mark.parametrize("kind", [InOut, OutIn])
def test_a_linear_of_another_class_is_known_by_its_values(
    kind: Any, width: int, bias: bool
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(kind(HIDDEN, width, bias), nn.GELU(), kind(width, HIDDEN, bias))

    model, plain, x = seeded(make), seeded(make), data()
    fuser.convert(model)
    assert pipelines_run(model, x) == 1
    assert_same(results(model, x), results(plain, x), bits=False)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


class WithWeightAndBias(nn.Module):
    """What has the parameters and the eps of a norm, and is none."""

    def __init__(self, function: Callable[..., torch.Tensor], has_bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))
        self.bias = nn.Parameter(torch.randn(HIDDEN)) if has_bias else None
        self.eps, self.function = 1e-5, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, (HIDDEN,), self.weight, self.bias, self.eps)


def of_sequences(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Of three dimensions alone."""
    _, _, _ = x.shape
    return F.layer_norm(x, *rest)


NO_NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "a scale and a shift": lambda x, size, weight, bias, eps: x * weight + bias + eps,
    "sequences alone": of_sequences,
    "of the shifted input": lambda x, *rest: F.layer_norm(x + 1, *rest) + x,
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_has_parameters_like_a_norm_and_is_none_stays(name: str) -> None:
    model, plain = (seeded(lambda: WithWeightAndBias(NO_NORMS[name])) for _ in range(2))
    assert not fuser.convert(model, norms="all").converted
    assert torch.equal(model(data()), plain(data()))


def test_an_activation_is_known_by_its_formula_for_any_shape() -> None:
    formulas: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "GELU none": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        "GELU tanh": lambda x: (
            0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        ),
        "SiLU": lambda x: x / (1 + torch.exp(-x)),
    }
    for name, function in formulas.items():
        known = activation_like(function)
        assert known is not None, name
        assert " ".join([known.op, *(value for _, value in known.options)]) == name
    assert activation_like(lambda x: F.silu(x) if x.dim() == 1 else F.relu(x)) is None


def test_a_conversion_draws_no_random_numbers() -> None:
    model = nn.ModuleList([InOut(HIDDEN, WIDTH, True), GatedMLP(), PreNorm(0.5), nn.RMSNorm(64)])
    model.append(WithWeightAndBias(F.layer_norm))
    before = torch.get_rng_state()
    fuser.convert(model, norms="all", linears="all")
    assert torch.equal(torch.get_rng_state(), before)
