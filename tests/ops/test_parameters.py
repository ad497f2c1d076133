"""An op's parameters: found by name, wherever torch's tools have put them; and its own alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from said import said
from torch.nn.utils import parametrize, prune, remove_weight_norm, spectral_norm, weight_norm

import fuser

N = 8

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")


def x_of(seed: int = 1) -> torch.Tensor:
    return oracles.random_tensor((6, N), torch.float32, seed)


def train(module: torch.nn.Module, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    """Outputs and gradients of the named parameters over ``steps`` of SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        y = module(x)
        y.backward(x_of(10 + step))
        found.append(y.detach())
        named = sorted(module.named_parameters())
        found += [torch.zeros(()) if p.grad is None else p.grad.clone() for _, p in named]
        optimizer.step()
    return found


def assert_trains_alike(module: torch.nn.Module, plain: torch.nn.Module) -> None:
    for found, expected in zip(train(module, x_of()), train(plain, x_of()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


# -- by name, and not by place ---------------------------------------------------------------


def delete_and_set(op: torch.nn.Module) -> torch.nn.Module:
    weight = op.weight
    del op.weight
    op.weight = weight
    return op


def prune_and_remove(op: torch.nn.Module) -> torch.nn.Module:
    prune.custom_from_mask(op, "weight", torch.arange(op.weight.numel()).view_as(op.weight) % 2)
    pruned: torch.nn.Module = prune.remove(op, "weight")
    return pruned


def parametrize_and_remove(op: torch.nn.Module) -> torch.nn.Module:
    parametrize.register_parametrization(op, "weight", Doubled())
    return parametrize.remove_parametrizations(op, "weight")


REORDERINGS = [delete_and_set, prune_and_remove, parametrize_and_remove]
COPIES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda op: op,
    "copied": copy.deepcopy,
    "pickled": lambda op: pickle.loads(pickle.dumps(op)),
}


@pytest.mark.parametrize("reorder", REORDERINGS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("is_called_before", [False, True])
def test_each_gradient_goes_to_its_parameter_though_they_were_registered_anew(
    reorder: Callable[[Any], Any], copied: str, is_called_before: bool
) -> None:
    plain = oracles.randomize(torch.nn.LayerNorm(N))
    op = fuser.LayerNorm(N)
    op.load_state_dict(plain.state_dict())
    if is_called_before:
        op(x_of())
    op = COPIES[copied](reorder(op))
    assert [name for name, _ in op.named_parameters()] == ["bias", "weight"]
    assert_trains_alike(fuser.Sequential(op), reorder(plain))


class Affine(fuser.BasicOperation):
    """y = x * a + b, for parameters ``a`` and ``b`` of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((N,), 2.0))
        self.b = torch.nn.Parameter(torch.full((N,), 3.0))

    def op_forward(
        self,
        ctx: fuser.OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, self.a)
        return input_ * self.a + self.b

    def op_backward(self, ctx: fuser.OperationContext, grad_output: torch.Tensor) -> Any:
        x, a = ctx.saved_tensors
        return grad_output * a, ((grad_output * x).sum(0), grad_output.sum(0))


class PlainAffine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((N,), 2.0))
        self.b = torch.nn.Parameter(torch.full((N,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b


class DeclaredAffine(Affine):
    """Its gradients come in the declared order, its parameters in another."""

    parameter_names = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        del self.a
        self.a = torch.nn.Parameter(torch.full((N,), 2.0))


class NestedAffine(Affine):
    """Holds its second parameter in a module of its own."""

    parameter_names = ("a", "shift.b")

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Module()
        self.shift.b = self.b
        del self.b

    @property
    def b(self) -> Any:
        return self.shift.b

    @b.deleter
    def b(self) -> None:
        del self._parameters["b"]


def test_the_order_of_a_users_op_is_that_in_which_its_parameters_were_first_registered() -> None:
    op = Affine()
    a = op.a
    del op.a
    op.a = a
    assert [name for name, _ in op.named_parameters()] == ["b", "a"]
    assert_trains_alike(copy.deepcopy(op), PlainAffine())
    assert_trains_alike(op, PlainAffine())


def test_a_users_op_may_name_the_order_of_its_parameters() -> None:
    op = DeclaredAffine()
    assert [name for name, _ in op.named_parameters()] == ["b", "a"]
    assert_trains_alike(op, PlainAffine())


def test_a_users_op_may_name_a_parameter_of_a_module_that_it_holds() -> None:
    plain, op = PlainAffine(), NestedAffine()
    x = x_of()
    for module in (plain, op):
        module(x).square().sum().backward()
    torch.testing.assert_close(op.a.grad, plain.a.grad)
    torch.testing.assert_close(op.shift.b.grad, plain.b.grad)


def test_a_users_op_without_names_takes_a_parameter_that_is_registered_later() -> None:
    class Late(Affine):
        def __init__(self) -> None:
            super().__init__()
            b = self.b
            del self.b
            self.register_parameter("b", None)
            self.kept = (b,)

    op: Any = Late()
    x = x_of()
    op.op_backward = lambda ctx, dy: (dy, (dy.sum(0),))
    op.op_forward = lambda ctx, x, **_: x * op.a
    op(x)
    op.b = op.kept[0]
    del op.op_forward, op.op_backward
    y = op(x.clone().requires_grad_())
    y.sum().backward()
    torch.testing.assert_close(op.b.grad, torch.full((N,), 6.0))
    torch.testing.assert_close(op.a.grad, x.sum(0))


# -- computed by a hook ----------------------------------------------------------------------


def pruned(name: str) -> Callable[[Any], Any]:
    def change(op: Any) -> Any:
        value = getattr(op, name)
        return prune.custom_from_mask(op, name, torch.arange(value.numel()).view_as(value) % 3 > 0)

    return change


def hooked(op: Any) -> Any:
    """The weight is computed from a parameter of another name, by a hook of the user's."""
    source = torch.nn.Parameter(op.weight.detach().clone())
    del op.weight
    op.w0 = source
    op.register_forward_pre_hook(lambda op, inputs: setattr(op, "weight", 3 * op.w0))
    return op


def spectral(op: Any) -> Any:
    torch.manual_seed(0)  # of the vector that the power iteration starts from
    return spectral_norm(op)


def linears() -> tuple[torch.nn.Module, torch.nn.Module]:
    plain = oracles.randomize(torch.nn.Linear(N, N, bias=False))
    op = fuser.BasicLinear(N, N)
    op.weight = torch.nn.Parameter(plain.weight.detach().clone())
    return op, plain


def norms() -> tuple[torch.nn.Module, torch.nn.Module]:
    plain = oracles.randomize(torch.nn.LayerNorm(N))
    op = fuser.LayerNorm(N)
    op.load_state_dict(plain.state_dict())
    return op, plain


def rmsnorms() -> tuple[torch.nn.Module, torch.nn.Module]:
    plain = oracles.randomize(torch.nn.RMSNorm(N, eps=1e-5))
    op = fuser.RMSNorm(N)
    op.load_state_dict(plain.state_dict())
    return op, plain


class PlainBias(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.arange(N).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def biases() -> tuple[torch.nn.Module, torch.nn.Module]:
    plain, op = PlainBias(), fuser.Bias(N)
    op.load_state_dict(plain.state_dict())
    return op, plain


COMPUTED = [
    (linears, pruned("weight")),
    (linears, weight_norm),
    (linears, spectral),
    (linears, hooked),
    (norms, pruned("weight")),
    (norms, pruned("bias")),
    (norms, weight_norm),
    (norms, hooked),
    (rmsnorms, pruned("weight")),
    (rmsnorms, weight_norm),
    (biases, pruned("bias")),
    (lambda: (Affine(), PlainAffine()), pruned("a")),
    (lambda: (DeclaredAffine(), PlainAffine()), pruned("b")),
]


@pytest.mark.parametrize(("make", "change"), COMPUTED)
@pytest.mark.parametrize("is_called_before", [False, True])
def test_a_parameter_that_a_hook_computes_hands_its_gradient_on(
    make: Any, change: Callable[[Any], Any], is_called_before: bool
) -> None:
    op, plain = make()
    if is_called_before:
        op(x_of())
    assert_trains_alike(change(op), change(plain))


@pytest.mark.parametrize(("make", "change"), COMPUTED[:5])
def test_in_a_sequential_the_hook_that_computes_a_parameter_runs_too(
    make: Any, change: Callable[[Any], Any]
) -> None:
    op, plain = make()
    model = fuser.Sequential(fuser.Identity(), change(op), fuser.GELU())
    expected = torch.nn.Sequential(
        torch.nn.Identity(), change(plain), torch.nn.GELU(approximate="tanh")
    )
    assert_trains_alike(model, expected)


def test_a_computed_parameter_may_become_a_plain_one_again() -> None:
    op, plain = linears()
    for change in (weight_norm, remove_weight_norm, pruned("weight"), prune.remove):
        for module in (op, plain):
            change(module, *(("weight",) if change is prune.remove else ()))
        assert_trains_alike(op, plain)


def test_a_hook_that_comes_after_the_first_call_of_a_sequential_runs() -> None:
    op, plain = linears()
    model = fuser.Sequential(op)
    model(x_of())
    pruned("weight")(op)
    pruned("weight")(plain)
    assert_trains_alike(model, torch.nn.Sequential(plain))


def test_a_hook_on_the_basic_op_of_a_composite_runs() -> None:
    plain = oracles.randomize(torch.nn.Linear(N, N))
    linear: Any = fuser.Linear(N, N)
    linear.weight, linear.bias = copy.deepcopy(plain.weight), copy.deepcopy(plain.bias)
    pruned("weight")(linear.basic_ops[0])
    pruned("weight")(plain)
    model = fuser.Sequential(linear)
    for _ in range(2):
        for module in (model, plain):
            module.zero_grad()
            module(x_of()).sum().backward()
        torch.testing.assert_close(linear.basic_ops[0].weight_orig.grad, plain.weight_orig.grad)


def test_a_pipeline_made_by_hand_names_the_op_whose_hook_it_would_leave_out() -> None:
    op: Any = linears()[0]
    pruned("weight")(op)
    with pytest.raises(
        fuser.StateError, match=said("pipeline-op-parameter-hook", 1, "BasicLinear")
    ):
        fuser.OperationFuser([fuser.Identity(), op])(x_of())


def test_a_tensor_in_the_place_of_a_parameter_is_the_one_that_is_used() -> None:
    op: Any = fuser.BasicLinear(N, N)
    del op.weight
    op.weight = torch.randn(N, N, requires_grad=True)
    y = op(x_of())
    torch.testing.assert_close(y, F.linear(x_of(), op.weight))
    y.sum().backward()
    torch.testing.assert_close(op.weight.grad, x_of().sum(0).expand(N, N))


# -- refused ---------------------------------------------------------------------------------


class Counting(fuser.Identity):
    """Counts its forwards."""

    calls = 0

    def op_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        Counting.calls += 1
        return super().op_forward(*args, **kwargs)


def add_parameter(op: fuser.BasicLinear) -> str:
    op.extra = torch.nn.Parameter(torch.ones(1))
    return "extra"


def add_module(op: fuser.BasicLinear) -> str:
    op.lora = torch.nn.Linear(2, 2, bias=False)
    return "lora.weight"


@pytest.mark.parametrize("add", [add_parameter, add_module], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_called_before", [False, True])
def test_a_parameter_that_is_not_the_ops_own_is_refused_before_anything_runs(
    add: Callable[[Any], str], is_called_before: bool
) -> None:
    op = fuser.BasicLinear(N, N)
    model = fuser.Sequential(Counting(), op)
    if is_called_before:
        model(x_of())
    name = add(op)
    before = Counting.calls
    # After a call it is noticed at the next planning, here for an input that wants a gradient.
    said = rf"Op 1 \(BasicLinear\) holds a parameter '{name}' that is not its own.*'weight'"
    with pytest.raises(fuser.StateError, match=said):
        model(x_of().requires_grad_())
    assert Counting.calls == before
    delattr(op, name.partition(".")[0])
    assert model(x_of().requires_grad_()).shape == (6, N)


def test_an_op_without_parameters_is_given_none() -> None:
    op = fuser.GELU()
    op.slope = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(
        fuser.StateError, match=said("parameter-slots-holds-not-gradient", None, "'slope'", "none")
    ):
        fuser.Sequential(op)(x_of())


def test_a_subclass_that_computes_with_one_more_parameter_names_it() -> None:
    class Shifted(fuser.BasicLinear):
        parameter_names: Any = ("weight", "shift")

        def __init__(self) -> None:
            super().__init__(N, N)
            self.shift = torch.nn.Parameter(torch.zeros(N))

        def op_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().op_forward(*args, **kwargs) + self.shift

        def op_backward(self, ctx: Any, grad_output: torch.Tensor, *args: Any) -> Any:
            dx, grads = super().op_backward(ctx, grad_output, *args)
            return dx, (*grads, grad_output.sum(0))

    op, plain = Shifted(), torch.nn.Linear(N, N)
    plain.weight = torch.nn.Parameter(op.weight.detach().clone())
    for module in (op, plain):
        module(x_of()).square().sum().backward()
    expected = (F.linear(x_of(), plain.weight).mul(2)).sum(0)
    torch.testing.assert_close(op.shift.grad, expected)


@pytest.mark.parametrize(
    "tool",
    [
        lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
        weight_norm,
        spectral_norm,
        lambda linear: linear.register_parameter("lora", torch.nn.Parameter(torch.ones(1))),
    ],
    ids=["prune", "weight_norm", "spectral_norm", "register"],
)
def test_a_composite_says_that_its_basic_ops_hold_its_parameters(
    tool: Callable[[Any], Any],
) -> None:
    linear = fuser.Linear(N, N)
    expected, state = linear(x_of()), list(linear.state_dict())
    with pytest.raises(
        fuser.StateError,
        match=said("fused-no-own-parameters", "Linear", None, "BasicLinear and Bias"),
    ):
        tool(linear)
    assert list(linear.state_dict()) == state
    assert torch.equal(linear(x_of()), expected)
    assert torch.equal(copy.deepcopy(linear)(x_of()), expected)
    assert torch.equal(pickle.loads(pickle.dumps(linear))(x_of()), expected)


@pytest.mark.parametrize("make", [lambda: fuser.BasicLinear(N, N), lambda: fuser.LayerNorm(N)])
@pytest.mark.parametrize("is_called_before", [False, True])
def test_a_parametrized_op_is_refused_by_name_and_runs_without_it(
    make: Callable[[], Any], is_called_before: bool
) -> None:
    op = make()
    if is_called_before:
        op(x_of())
    parametrize.register_parametrization(op, "weight", Doubled())
    with pytest.raises(
        fuser.StateError, match=said("parameter-slots-parametrized-fuser-gradients", None, "weight")
    ):
        op(x_of())
    parametrize.remove_parametrizations(op, "weight", leave_parametrized=False)
    assert op(x_of()).shape == (6, N)


# -- what plans are made of ------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, fuser.recipe.MXFP8BlockScaling()], ids=["", "mxfp8"])
def test_a_plan_costs_the_weight_that_a_hook_computes(recipe: Any) -> None:
    # Its sources come first among the op's parameters, and the first is one number a row.
    plain, op = fuser.BasicLinear(32, 32), weight_norm(fuser.BasicLinear(32, 32))
    x = oracles.random_tensor((32, 32), torch.float32, 1)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        plans = [module._own_pipeline().plan(x) for module in (plain, op)]
    assert plans[0].forward == plans[1].forward
    assert plans[0].backward == plans[1].backward
