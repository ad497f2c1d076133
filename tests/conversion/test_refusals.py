"""What a converted module was converted from, changed in one respect: its own forward decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from joined_products import output_of
from said import said
from test_convert import (
    HIDDEN,
    WIDTH,
    GatedMLP,
    PackedMLP,
    PreNorm,
    data,
    pipelines_run,
    results,
    seeded,
)
from torch import nn
from torch.nn import functional as F

import fuser

BF16 = torch.bfloat16


class Doubling(nn.Parameter):
    """A weight whose products are doubled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            y = func(*args, **(kwargs or {}))
            return 2 * y if func in (F.linear, F.layer_norm) else y


class DoublingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def doubling(child: Any) -> None:
    child.__class__ = DoublingLinear


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


OF_A_LINEAR: dict[str, Callable[[Any], Any]] = {
    "weight of a class": lambda c: setattr(c, "weight", Doubling(c.weight.detach())),
    "another class": doubling,
    "bias added": lambda c: setattr(c, "bias", drawn(len(c.weight))),
    "forward hook": lambda c: c.register_forward_hook(lambda m, args, y: 2 * y),
    "hook before": lambda c: c.register_forward_pre_hook(lambda m, args: (2 * args[0],)),
    "backward hook": lambda c: c.register_full_backward_hook(lambda m, dx, dy: (2 * dx[0],)),
    "hook before backward": lambda c: c.register_full_backward_pre_hook(lambda m, dy: (2 * dy[0],)),
    "forward of its own": lambda c: setattr(c, "forward", lambda x: 2 * F.linear(x, c.weight)),
    "weight in fp64": lambda c: c.to(torch.float64),
    "weight of another": lambda c: setattr(c, "weight", drawn(*c.weight.shape)),
    "weight frozen": lambda c: c.weight.requires_grad_(False),
}
WHEN = pytest.mark.parametrize("calls", [0, 3])


def outcome(model: nn.Module) -> Any:
    """The results, or that a call raises."""
    try:
        return results(model, data())
    except RuntimeError:
        return None


def assert_own_forward_decides(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], Any], calls: int
) -> Any:
    """Values and gradients after a change are those of a model that was never converted.

    Returns them; None if both raise.
    """
    plain, model = seeded(make), seeded(make)
    assert fuser.convert(model).converted
    for _ in range(calls):
        results(model, data())
    for one in (plain, model):
        torch.manual_seed(7)
        change(one)
    for _ in range(2):
        expected, found = outcome(plain), outcome(model)
        assert (found is None) == (expected is None)
        if expected is None:
            continue
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=1e-6 * float(value.abs().max()), msg=name
            )
    return expected


@WHEN
def test_a_forward_that_a_class_gets_later_is_seen(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As patches of libraries set it, on all modules of the class at once."""

    class MLP(GatedMLP):
        """A class of this test alone."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def patched(self: GatedMLP, x: torch.Tensor) -> torch.Tensor:
        return 2 * GatedMLP.forward(self, x)

    def change(model: nn.Module) -> None:
        monkeypatch.setattr(MLP, "forward", patched)

    assert_own_forward_decides(MLP, change, calls)


@pytest.mark.sampled(most=18)
@WHEN
@pytest.mark.parametrize("child", ["gate", "up", "down"])
@pytest.mark.parametrize("change", OF_A_LINEAR)
def test_a_change_of_any_linear_is_seen(change: str, child: str, calls: int) -> None:
    """Of the first, of the second of two that run as one, and of the last."""

    def of_child(model: nn.Module) -> None:
        OF_A_LINEAR[change](model.get_submodule(child))

    found = assert_own_forward_decides(GatedMLP, of_child, calls)
    assert (found is None) == (change == "weight in fp64")


@WHEN
@pytest.mark.parametrize("child", ["gate", "up", "down"])
def test_a_bias_that_is_removed_is_seen(child: str, calls: int) -> None:
    def remove(model: nn.Module) -> None:
        model.get_submodule(child).bias = None  # type: ignore[assignment]

    assert assert_own_forward_decides(lambda: GatedMLP(bias=True), remove, calls) is not None


@WHEN
@pytest.mark.parametrize("child", ["gate", "up"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_two_linears_of_which_one_is_in_another_dtype_do_not_run_as_one(
    dtype: torch.dtype, child: str, calls: int
) -> None:
    def change(model: nn.Module) -> None:
        model.get_submodule(child).to(dtype)

    assert assert_own_forward_decides(GatedMLP, change, calls) is None


@WHEN
@pytest.mark.parametrize("child", ["gate", "up"])
def test_under_autocast_they_run_in_its_dtype(child: str, calls: int) -> None:
    plain, model = seeded(GatedMLP), seeded(GatedMLP)
    fuser.convert(model)
    for _ in range(calls):
        model(data())
    outputs = []
    for one in (plain, model):
        one.get_submodule(child).to(BF16)
        with torch.autocast("cpu", BF16):
            outputs.append(one(data()))
    assert torch.equal(*outputs)


SIZES = [(WIDTH - 6, WIDTH + 6), (WIDTH + 6, WIDTH - 6), (1, 2 * WIDTH - 1), (WIDTH, WIDTH + 8)]


@WHEN
@pytest.mark.parametrize("are_replaced", [False, True], ids=["weights", "linears"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_two_linears_of_other_sizes_do_not_run_as_one(
    sizes: tuple[int, int], are_replaced: bool, calls: int
) -> None:
    """Also if there are as many rows together, which torch refuses to multiply."""

    def change(model: nn.Module) -> None:
        for name, size in zip(("gate", "up"), sizes, strict=True):
            if are_replaced:
                setattr(model, name, nn.Linear(HIDDEN, size, bias=False))
            else:
                model.get_submodule(name).weight = drawn(size, HIDDEN)

    assert assert_own_forward_decides(GatedMLP, change, calls) is None


@WHEN
@pytest.mark.parametrize("width", [WIDTH - 8, 8])
def test_all_linears_of_another_size_compute_with_it(width: int, calls: int) -> None:
    def change(model: nn.Module) -> None:
        for name in ("gate", "up"):
            model.get_submodule(name).weight = drawn(width, HIDDEN)
        model.get_submodule("down").weight = drawn(HIDDEN, width)

    assert assert_own_forward_decides(GatedMLP, change, calls) is not None


@WHEN
def test_a_packed_linear_of_another_size_computes_with_it(calls: int) -> None:
    def change(model: nn.Module) -> None:
        model.get_submodule("gate_up").weight = drawn(2 * WIDTH - 16, HIDDEN)
        model.get_submodule("down").weight = drawn(HIDDEN, WIDTH - 8)

    assert assert_own_forward_decides(PackedMLP, change, calls) is not None


OF_A_NORM: dict[str, Callable[[Any], Any]] = {
    "weight of a class": lambda c: setattr(c, "weight", Doubling(c.weight.detach())),
    "bias of a class": lambda c: setattr(c, "bias", Doubling(torch.randn(HIDDEN))),
    "no bias": lambda c: setattr(c, "bias", None),
    "no parameters": lambda c: c.__dict__["_parameters"].update(bias=None, weight=None),
    "another weight": lambda c: setattr(c, "weight", drawn(HIDDEN)),
    "larger eps": lambda c: setattr(c, "eps", 0.5),
    "forward hook": lambda c: c.register_forward_hook(lambda m, args, y: 2 * y),
    "in fp64": lambda c: c.to(torch.float64),
}


@pytest.mark.sampled
@WHEN
@pytest.mark.parametrize("change", OF_A_NORM)
def test_a_change_of_a_norm_is_seen(change: str, calls: int) -> None:
    def of_norm(model: nn.Module) -> None:
        OF_A_NORM[change](model.get_submodule("norm"))

    found = assert_own_forward_decides(PreNorm, of_norm, calls)
    assert (found is None) == (change == "in fp64")


# -- norms with several numbers ------------------------------------------------------


class Norm(nn.Module):
    """A norm that holds numbers besides its eps, in any order of their sizes."""

    def __init__(self, kind: str, eps: float, others: dict[str, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))
        if kind == "layer norm":
            self.bias = nn.Parameter(torch.randn(HIDDEN))
        self.kind, self.variance_epsilon = kind, eps
        self.__dict__.update(others)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "layer norm":
            return F.layer_norm(x, (HIDDEN,), self.weight, self.bias, self.variance_epsilon)
        shift = 1.0 if self.kind == "rms norm, 1 + weight" else 0.0
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return y * (self.weight + shift)


class Normed(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.norm = Norm(*args)
        self.mlp = GatedMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.norm(x))
        return y


OTHERS: tuple[dict[str, float], ...] = (
    {},
    {"std": 1e-7},
    {"std": 0.02},
    {"std": 1e-7, "momentum": 0.1},
    {"negative": -1e-3, "one": 1.0, "std": 2e-3, "smallest": 1e-12},
)


@pytest.mark.sampled(most=12)
@pytest.mark.parametrize("others", OTHERS, ids=str)
@pytest.mark.parametrize("eps", [1e-3, 1e-5])
@pytest.mark.parametrize("kind", ["layer norm", "rms norm", "rms norm, 1 + weight"])
def test_the_eps_of_a_norm_is_found_among_its_numbers(
    kind: str, eps: float, others: dict[str, float]
) -> None:
    """Smaller and larger ones. Rows are so small that another eps would show."""
    plain, model = (seeded(lambda: Normed(kind, eps, others)) for _ in range(2))
    report = fuser.convert(model)
    assert pipelines_run(model, data()) == 1
    assert "Norm" in report.converted[-1].text
    assert not report.refused
    for spread in (1e-3, 1.0):
        x = (spread * data()).detach().requires_grad_()
        for name, value in results(plain, x).items():
            found = results(model, x)[name]
            atol = 2e-5 * float(value.abs().max())
            torch.testing.assert_close(found, value, rtol=0, atol=atol, msg=name)
    fuser.revert(model)
    alone = fuser.convert(model, norms="all", filter=lambda path, module: "mlp" not in path)
    assert [row.path for row in alone.converted] == ["norm"]
    x = 1e-3 * data().detach()
    torch.testing.assert_close(model.norm(x), plain.norm(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["layer norm", "rms norm"])
def test_a_norm_without_its_eps_among_its_numbers_stays(kind: str) -> None:
    class Fixed(Norm):
        @property
        def variance_epsilon(self) -> float:
            return 1e-3

        @variance_epsilon.setter
        def variance_epsilon(self, value: float) -> None:
            pass

    model = seeded(lambda: Normed(kind, 1e-3, {"std": 0.02}))
    model.norm = Fixed(kind, 1e-3, {"std": 0.02})
    x = (1e-3 * data()).detach().requires_grad_()
    expected = results(model, x)
    report = fuser.convert(model, norms="all")
    assert not any("Norm" in row.text for row in report.converted)
    found = results(model, x)
    assert all(torch.allclose(found[name], value) for name, value in expected.items())


class DoubledInTraining(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return 2 * y if self.training else y


@pytest.mark.parametrize("in_training", [True, False])
@pytest.mark.parametrize("kind", ["layer norm", "rms norm"])
def test_a_norm_whose_mode_decides_stays(kind: str, in_training: bool) -> None:
    """In the mode in which it is converted, and in the other one later."""
    model = seeded(lambda: Normed(kind, 1e-3, {})).train(in_training)
    model.norm = DoubledInTraining(kind, 1e-3, {}).train(in_training)
    expected = [output_of(model.train(mode), data()) for mode in (True, False)]
    report = fuser.convert(model.train(in_training), norms="all")
    assert not any("Norm" in row.text for row in report.converted)
    found = [output_of(model.train(mode), data()) for mode in (True, False)]
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(*found)


# -- second derivatives ------------------------------------------------------------------------


def penalty(model: nn.Module, x: torch.Tensor, *, is_transformed: bool) -> list[torch.Tensor]:
    """The gradients of a gradient penalty: of the input, and of the parameters."""
    x = x.detach().requires_grad_()
    if is_transformed:
        grad = torch.func.grad(lambda x: model(x).square().sum())(x)
    else:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    model.zero_grad()
    grad.square().sum().backward()
    return [t.grad for t in (x, *model.parameters()) if t.grad is not None]


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("make", [GatedMLP, PreNorm])
def test_second_derivatives_of_a_converted_module_are_those_of_its_own_forward(
    make: Callable[[], nn.Module], recipe: str | None
) -> None:
    model, x = seeded(make), data()
    expected = penalty(model, x, is_transformed=False)
    fuser.convert(model, recipe=recipe, keep=(), linears="all")
    with pytest.raises(fuser.StateError, match=said("diagnose-pipeline-differentiated-twice")):
        penalty(model, x, is_transformed=False)
    found = penalty(model, x, is_transformed=True)
    assert len(found) == len(expected) == 1 + len(list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
