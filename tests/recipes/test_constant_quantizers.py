"""Quantizers that are constants of a plan, and ops whose quantizers are not."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser import recipe as recipes
from fuser.op import OperationContext
from fuser.runtime import codegen

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

RECIPES = {
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "custom": recipes.CustomRecipe(qfactory=lambda role: fuser.MXFP8Quantizer()),
}


class Shared(fuser.BasicLinear):
    """Two linears in one op, both of which run with its context; the sum of the outputs."""

    parameter_names: Any = ("weight", "inner.weight")

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.inner = Narrow(size, size)

    def op_forward(
        self, ctx: OperationContext, input_: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        first = super().op_forward(ctx, input_, None, None)
        return first + self.inner.op_forward(ctx, input_, None, None)


class Narrow(fuser.BasicLinear):
    """A linear whose input and weight have the format of a gradient."""

    def quantizer_roles(self, mode: str) -> tuple[str, ...]:
        return ("grad_output",) * self.num_quantizers(mode)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_two_linears_that_share_a_context_have_quantizers_of_their_own(recipe: Any) -> None:
    torch.manual_seed(0)
    op = Shared(32).requires_grad_(False)
    op.inner.weight.mul_(1e7)  # under delayed scaling, the other weight's scale would cut it off
    alone = fuser.Sequential(fuser.BasicLinear(32, 32)), fuser.Sequential(Narrow(32, 32))
    for model, weight in zip(alone, (op.weight, op.inner.weight), strict=True):
        model[0].weight.data.copy_(weight)
    x, model = torch.randn(32, 32), fuser.Sequential(op)
    for _ in range(3):
        with fuser.autocast(recipe=recipe):
            y = model(x)
            expected = [one.requires_grad_(False)(x) for one in alone]
    assert (y - sum(expected)).norm() <= 1e-6 * y.norm()


class Composite(fuser.BasicOperation):
    """An op that is not a linear, and runs one with its own context."""

    parameter_names = ("inner.weight",)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = fuser.BasicLinear(size, size)

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.inner.op_forward(ctx, input_, None, None)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return self.inner.op_backward(ctx, grad_output)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_op_may_run_a_linear_with_its_own_context(recipe: Any) -> None:
    op = Composite(32)
    alone = fuser.Sequential(fuser.BasicLinear(32, 32))
    alone[0].weight.data.copy_(op.inner.weight)
    x = torch.randn(32, 32)
    results = []
    for model, weight in ((fuser.Sequential(op), op.inner.weight), (alone, alone[0].weight)):
        leaf = x.clone().requires_grad_()
        with fuser.autocast(recipe=recipe):
            y = model(leaf)
        y.backward(x)
        results.append((y.detach(), leaf.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_quantizer_that_a_subclass_sets_gets_the_usages_that_backward_reads() -> None:
    class Custom(fuser.BasicLinear):
        chosen = fuser.MXFP8Quantizer(rowwise=True, columnwise=False)

        def op_forward(self, ctx: OperationContext, *args: Any, **kwargs: Any) -> torch.Tensor:
            y = super().op_forward(ctx, *args, **kwargs)
            ctx.grad_output_quantizer = self.chosen
            return y

    x = torch.randn(32, 32)
    grads = []
    for kind in (Custom, fuser.BasicLinear):
        torch.manual_seed(1)
        model = fuser.Sequential(kind(32, 32))
        with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
            y = model(x)
        y.backward(x)
        grads.append(model[0].weight.grad)
    assert torch.equal(*grads)


def test_roles_that_are_set_on_an_op_count_from_the_next_call() -> None:
    model = fuser.Sequential(fuser.BasicLinear(32, 32))
    x, op = torch.randn(32, 32), model[0]

    def run() -> torch.Tensor:
        with torch.no_grad(), fuser.autocast(recipe=recipes.Float8CurrentScaling()):
            return model(x)

    before = run()
    op.quantizer_roles = lambda mode: ("grad_output",) * op.num_quantizers(mode)
    assert not torch.equal(run(), before)
    del op.quantizer_roles
    assert torch.equal(run(), before)


def test_a_wrapped_method_is_its_users_and_not_a_constant() -> None:
    class Wrapped(fuser.BasicLinear):
        role = "input"

        @functools.wraps(fuser.BasicLinear.quantizer_roles)
        def quantizer_roles(self, mode: str) -> tuple[str, ...]:  # type: ignore[override]
            return (self.role,) * self.num_quantizers(mode)

    class Absent(fuser.BasicOperation):
        get_input_quantizer = None  # type: ignore[assignment]

    recipe = recipes.Float8CurrentScaling()
    assert fuser.BasicLinear(32, 32).constant_quantizer(recipe, "forward", 0) is not None
    assert Wrapped(32, 32).constant_quantizer(recipe, "forward", 0) is None
    assert not Absent._has_constant_quantizers


def test_without_a_backward_nothing_asks_for_its_quantizer() -> None:
    def factory(role: Any) -> fuser.Quantizer:
        assert role.tensor_type != "grad_output"
        return fuser.MXFP8Quantizer()

    model = fuser.Sequential(fuser.BasicLinear(32, 32))
    with torch.no_grad(), fuser.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
        model(torch.randn(32, 32))
    delayed = fuser.Sequential(fuser.BasicLinear(32, 32)).requires_grad_(False)
    with fuser.autocast(recipe=recipes.DelayedScaling()):
        delayed(torch.randn(32, 32))
    assert list(delayed[0]._delayed) == ["forward"]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_op_quantize_looks_up_no_constant_quantizer(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_constant = not (recipe.delayed() or recipe.custom())
    model = fuser.Sequential(fuser.Quantize(backward=True), fuser.ReLU())
    x = torch.randn(32, 32, requires_grad=True)
    with fuser.autocast(recipe=recipe):
        first = model(x)
    first.sum().backward()
    looked_up = []
    value = fuser.Quantize.quantizer_value

    def counted(self: Any, mode: str, *args: Any) -> Any:
        looked_up.append(mode)
        return value(self, mode, *args)

    monkeypatch.setattr(fuser.Quantize, "quantizer_value", counted)
    with fuser.autocast(recipe=recipe):
        second = model(x)
    assert recipe.delayed() or torch.equal(first, second)
    assert looked_up == ([] if is_constant else ["backward", "forward"])


def test_contexts_of_many_recipes_share_a_class() -> None:
    model = fuser.Sequential(fuser.BasicLinear(32, 32))
    counts = []
    for i in range(8):
        recipe = recipes.Float8CurrentScaling(
            fp8_quant_fwd_inp=recipes.QParams(amax_epsilon=2.0**-i)
        )
        with torch.no_grad(), fuser.autocast(recipe=recipe):
            model(torch.randn(32, 32))
        counts.append(codegen._context_class.cache_info().currsize)
    assert len(set(counts)) == 1


# -- errors ---------------------------------------------------------------------------


class Fails(TorchDispatchMode):
    """Raises an error where torch computes the gradient of a GELU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "gelu_backward" in str(func):
            raise torch.OutOfMemoryError("no memory")
        return func(*args, **(kwargs or {}))


def test_running_out_of_memory_in_backward_stays_that_error() -> None:
    model = fuser.Sequential(fuser.Linear(64, 64), fuser.GELU(), fuser.Linear(64, 64))
    for _ in range(2):
        y = model(torch.randn(8, 64, requires_grad=True))
        with Fails(), pytest.raises(torch.OutOfMemoryError):
            y.sum().backward()


def test_the_class_of_an_op_can_be_inspected() -> None:
    names = [name for name, _ in inspect.getmembers(fuser.BasicLinear)]
    assert "op_forward" in names


def test_a_gradient_of_a_tensor_that_needs_none_may_have_any_shape() -> None:
    class Placeholder(fuser.BasicLinear):
        def op_backward(self, ctx: OperationContext, *args: Any) -> Any:
            dx, _ = super().op_backward(ctx, *args)
            return dx, (dx.new_empty(1),)

    model = fuser.Sequential(Placeholder(8, 8))
    weight = model[0].weight.requires_grad_(False)
    for _ in range(2):  # the first step checks shapes
        x, dy = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
        model(x).backward(dy)
        torch.testing.assert_close(x.grad, (dy.double() @ weight.double()).float())
        assert weight.grad is None


def test_an_op_may_release_its_parameter_between_forward_and_backward() -> None:
    class Parked(fuser.BasicOperation):
        parameter_names = ("scale",)

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((4,), 2.0))

        def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
            ctx.save_for_backward(input_)
            y = input_ * self.scale
            self.kept, self.scale.data = self.scale.data, torch.empty(0)
            return y

        def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
            self.scale.data = self.kept
            (x,) = ctx.saved_tensors
            return grad_output * self.scale, ((grad_output * x).sum(0),)

    model = fuser.Sequential(Parked())
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward()
    torch.testing.assert_close(model[0].scale.grad, x.detach().sum(0))


@pytest.mark.parametrize("error", [KeyError, AttributeError, RuntimeError, ValueError])
@pytest.mark.parametrize("side", ["forward", "backward"])
def test_a_failed_call_keeps_no_input_alive(error: type[Exception], side: str) -> None:
    class Failing(fuser.BasicOperation):
        def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
            if side == "forward":
                raise error("on purpose")
            return input_.clone()

        def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
            raise error("on purpose")

    def run() -> weakref.ref[torch.Tensor]:
        x = torch.randn(4, 4, requires_grad=True)
        try:
            fuser.Sequential(Failing())(x).sum().backward()
        except error:
            return weakref.ref(x)
        raise AssertionError("it did not fail")

    run()
    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()
