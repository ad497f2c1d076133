"""The context of an op: which gradients are needed, and what its forward used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from torch.func import functional_call

import fuser
from fuser.op import BasicOperation, OperationContext
from fuser.recipe import Float8CurrentScaling, MXFP8BlockScaling

N = 32


def x_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return oracles.random_tensor(shape or (N, N), torch.float32, seed)


def first(output: Any) -> torch.Tensor:
    """The main output, alone or before extra ones."""
    y: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return y


# -- which gradients are wanted -----------------------------------------------------------------


class Asking(BasicOperation):
    """The identity; remembers whether its input said that it wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> torch.Tensor:
        self.found.append(input_.requires_grad)
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output, ()


class SquaredNorm(BasicOperation):
    """Hands x on, and its rows' squared norms as an extra output."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **rest: Any) -> Any:
        basic_op_ctxs[0].save_for_backward(input_)
        return input_, [(input_.square().sum(-1),)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        (x,), ((grad,),) = basic_op_ctxs[0].saved_tensors, basic_op_grad_extra_outputs
        return grad_output + 2 * x * grad[:, None], [()], [()]


class Times(BasicOperation):
    """Scales rows; gives a gradient only to scales that say that they want one."""

    num_extra_inputs = 1

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: torch.Tensor, *, basic_op_extra_inputs: Any, **rest: Any
    ) -> Any:
        ((scales,),), (ctx,) = basic_op_extra_inputs, basic_op_ctxs
        ctx.wants_dscales = scales.requires_grad
        ctx.save_for_backward(input_, scales)
        return input_ * scales[:, None], [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **rest: Any) -> Any:
        (ctx,) = basic_op_ctxs
        x, scales = ctx.saved_tensors
        dscales = (grad_output * x).sum(-1) if ctx.wants_dscales else None
        return grad_output * scales[:, None], [()], [(dscales,)]


def by_norm(returned: bool) -> fuser.Sequential:
    return fuser.Sequential(
        SquaredNorm().set_extra_output_channel(0, "norm", output_to_caller=returned),
        fuser.ConstantScale(3.0),
        Times().set_extra_input_channel(0, "norm"),
    )


@pytest.mark.parametrize("returned", [False, True])
def test_an_extra_input_from_a_channel_says_that_its_gradient_is_wanted(returned: bool) -> None:
    x = x_of(4, 8).requires_grad_()
    y, *norms = by_norm(returned)(x) if returned else (by_norm(returned)(x),)
    expected_norm = x.square().sum(-1)
    expected = torch.autograd.grad(
        (3 * x * expected_norm[:, None]).sum() + (5 * expected_norm.sum() if returned else 0), x
    )
    found = torch.autograd.grad(y.sum() + sum(5 * norm.sum() for norm in norms), x)
    torch.testing.assert_close(found, expected)


def test_an_extra_input_from_a_channel_says_that_no_gradient_is_wanted() -> None:
    class Never(Times):
        def fuser_forward(self, *args: Any, basic_op_extra_inputs: Any, **rest: Any) -> Any:
            assert not basic_op_extra_inputs[0][0].requires_grad
            return super().fuser_forward(*args, basic_op_extra_inputs=basic_op_extra_inputs, **rest)

    model = fuser.Sequential(
        SquaredNorm().set_extra_output_channel(0, "norm", output_to_caller=False),
        fuser.Linear(8, 8),
        Never().set_extra_input_channel(0, "norm"),
    )
    model(x_of(4, 8)).sum().backward()
    assert model[1].weight.grad is not None


@pytest.mark.parametrize("before", [fuser.ConstantScale, lambda scale: fuser.Linear(N, N)])
def test_the_main_input_of_a_users_op_says_whether_its_gradient_is_wanted(before: Any) -> None:
    model = fuser.Sequential(before(2.0), Asking(), fuser.Linear(N, N), Asking())
    model[0].requires_grad_(False)
    for wanted in (True, False):
        x = x_of().requires_grad_(wanted)
        y = model(x)
        assert [model[1].found.pop(), model[3].found.pop()] == [wanted, True]
        y.sum().backward()
        assert (x.grad is not None) == wanted


def test_an_input_that_is_quantized_for_a_users_op_says_it_too() -> None:
    class Quantizing(Asking):
        def num_quantizers(self, mode: str) -> int:
            return 1

    model = fuser.Sequential(fuser.GELU(), Quantizing(), fuser.BasicLinear(N, N))
    with fuser.autocast(recipe=MXFP8BlockScaling()):
        model(x_of().requires_grad_()).sum().backward()
    assert model[1].found == [True]


@pytest.mark.parametrize("count", [1, 2])
def test_the_input_of_a_users_op_may_be_returned_to_the_caller(count: int) -> None:
    model = fuser.Sequential(fuser.ConstantScale(2.0), *(Asking() for _ in range(count)))
    x = x_of(4, 8).requires_grad_()
    y = model(x)
    assert (y.is_leaf, y._is_view()) == (False, False)
    y.mul_(3)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 6.0))


def test_a_context_says_which_parameters_and_extra_inputs_want_a_gradient() -> None:
    found = []

    class Recording(fuser.LayerNorm):
        def op_forward(self, ctx: OperationContext, *args: Any, **kwargs: Any) -> Any:
            found.append((ctx.params_require_grad, ctx.input_requires_grad))
            return super().op_forward(ctx, *args, **kwargs)

    norm = Recording(N)
    norm.bias.requires_grad_(False)
    fuser.Sequential(norm)(x_of())
    assert found == [((True, False), False)]


@pytest.mark.parametrize("returned", [False, True])
def test_a_gradient_that_does_not_come_is_zeros_like_the_extra_output(returned: bool) -> None:
    found = []

    class Means(BasicOperation):
        """Hands x on, and its rows' means in fp32 as an extra output."""

        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **rest: Any) -> Any:
            return input_, [(input_.float().mean(-1),)]

        def fuser_backward(
            self, basic_op_ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
        ) -> Any:
            ((grad,),) = basic_op_grad_extra_outputs
            found.append(grad)
            return grad_output, [()], [()]

    class Ignoring(Times):
        def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **rest: Any) -> Any:
            return 2 * input_, [()]

        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **rest: Any) -> Any:
            return 2 * grad_output, [()], [(None,)]

    ops: list[Any] = [Means()]
    if not returned:
        ops[0].set_extra_output_channel(0, "means", output_to_caller=False)
        ops += [fuser.Identity(), Ignoring().set_extra_input_channel(0, "means")]
    first(fuser.Sequential(*ops)(x_of(4, 8).bfloat16().requires_grad_())).sum().backward()
    (grad,) = found
    assert (grad.shape, grad.dtype) == ((4,), torch.float32)
    assert not grad.any()


RECIPES = {
    "plain": None,
    "fp8": Float8CurrentScaling(),
    "fp8, exact backward": Float8CurrentScaling(backward_override="high_precision"),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("weight_requires_grad", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_backward_fusion_finds_in_a_linears_context_what_its_forward_ran_with(
    name: str, weight_requires_grad: bool, autocast: torch.dtype | None
) -> None:
    found: dict[str, Any] = {}

    class Reading(fuser.FusedOperation):
        """The gradient of a linear's input, by what its context says alone."""

        window = (fuser.BasicLinear, fuser.ConstantScale)
        side = "backward"

        def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **rest: Any) -> Any:
            ctx = basic_op_ctxs[0]
            names: tuple[str, ...] = ("dtype", "weight_requires_grad", "input_requires_grad")
            names += ("with_quantized_compute", "input_quantizer", "weight_quantizer")
            names += ("grad_output_quantizer", "grad_input_quantizer")
            found.update((name, getattr(ctx, name)) for name in names)
            _, weight = ctx.saved_tensors
            return grad_output.to(ctx.dtype) @ weight.to(ctx.dtype), [(None,), ()], [(), ()]

    model = fuser.Sequential(fuser.BasicLinear(N, N), fuser.ConstantScale(1.0), fusions=(Reading,))
    model[0].weight.requires_grad_(weight_requires_grad)
    x, recipe = x_of().requires_grad_(), RECIPES[name]
    with (
        fuser.autocast(enabled=recipe is not None, recipe=recipe),
        torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None),
    ):
        y = model(x)
        y.sum().backward()
    assert x.grad is not None
    assert found["dtype"] is (autocast or torch.float32)
    assert found["weight_requires_grad"] is weight_requires_grad
    assert found["input_requires_grad"] is True
    assert found["with_quantized_compute"] is (name == "fp8")
    is_quantized = {key: value is not None for key, value in found.items() if "quantizer" in key}
    assert is_quantized == {
        "input_quantizer": recipe is not None,
        "weight_quantizer": recipe is not None,
        "grad_output_quantizer": name == "fp8",
        "grad_input_quantizer": False,
    }


# -- what the forward saw -----------------------------------------------------------------------


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: fuser.Linear(N, N),
    "Linear-GELU": lambda: fuser.Sequential(fuser.Linear(N, N), fuser.GELU()),
    "LayerNorm": lambda: fuser.LayerNorm(N),
    "RMSNorm": lambda: fuser.RMSNorm(N),
    "Bias": lambda: fuser.Bias(N),
    "add-LayerNorm": lambda: fuser.Sequential(fuser.MakeExtraOutput(), fuser.LayerNorm(N)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["plain", "fp8"])
@pytest.mark.parametrize("module_is_frozen", [True, False])
def test_values_of_functional_call_get_their_gradients_whatever_the_module_wants(
    name: str, recipe: Any, module_is_frozen: bool
) -> None:
    model = oracles.randomize(MODULES[name]())
    own = copy.deepcopy(model)
    values = {k: oracles.leaf(p) for k, p in model.named_parameters()}
    model.requires_grad_(not module_is_frozen)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = first(functional_call(model, values, (x_of(),)))
        z = first(own(x_of()))
    y.backward(x_of(seed=2))
    z.backward(x_of(seed=2))
    for key, parameter in own.named_parameters():
        assert torch.equal(values[key].grad, parameter.grad)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", MODULES)
def test_frozen_values_of_functional_call_get_no_gradient(name: str) -> None:
    model = MODULES[name]()
    values = {k: p.detach().clone() for k, p in model.named_parameters()}
    x = x_of().requires_grad_()
    first(functional_call(model, values, (x,))).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


# An op in a pipeline; the attributes that are changed; and its values between forward and backward.
CHANGES: list[tuple[Callable[[], list[Any]], int, str, Any]] = [
    (lambda: [fuser.ConstantScale(2.0)], 0, "scale", 5.0),
    (lambda: [fuser.BasicLinear(N, N), fuser.ConstantScale(2.0)], 1, "scale", 5.0),
    (
        lambda: [fuser.BasicLinear(N, N), fuser.ConstantScale(2.0), fuser.Identity()],
        1,
        "scale",
        5.0,
    ),
    (lambda: [fuser.RMSNorm(N)], 0, "zero_centered_gamma", True),
    (lambda: [fuser.LayerNorm(N)], 0, "zero_centered_gamma", True),
    (lambda: [fuser.L2Normalization()], 0, "eps", 1.0),
    (lambda: [fuser.RMSNorm(N)], 0, "eps", 1.0),
    (lambda: [fuser.MakeExtraOutput(), fuser.RMSNorm(N)], 1, "zero_centered_gamma", True),
    (lambda: [fuser.SiTUGLU()], 0, "function", fuser.SiTUGLU(beta1=0.5).function),
    (lambda: [fuser.GELU()], 0, "cache_quantized_input", True),
    (lambda: [fuser.GELU(cache_quantized_input=True)], 0, "cache_quantized_input", False),
    (
        lambda: [fuser.Bias(N), fuser.ClampedSwiGLU()],
        1,
        "function",
        fuser.ClampedSwiGLU(limit=0.1).function,
    ),
]


@pytest.mark.parametrize(("make", "index", "name", "value"), CHANGES)
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_a_scalar_that_changes_between_forward_and_backward_is_the_forwards(
    make: Callable[[], list[Any]], index: int, name: str, value: Any, fusions: Any
) -> None:
    model = oracles.randomize(fuser.Sequential(*make(), fusions=fusions))
    before = getattr(model[index], name)
    grads = []
    for late in (before, value):
        x = x_of().requires_grad_()
        y = first(model(x))
        setattr(model[index], name, late)
        y.backward(x_of(y.shape[-2], y.shape[-1], seed=2))
        setattr(model[index], name, before)
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_scaled_activation_keeps_the_scalars_of_its_forward() -> None:
    op, scales = fuser.ScaledSiTUGLU(), x_of(N)
    grads = []
    for beta in (4.0, 0.5):
        x = x_of().requires_grad_()
        y = op(x, scales)
        op.function = fuser.SiTUGLU(beta1=beta).function
        y.sum().backward()
        grads.append(x.grad)
        op.function = fuser.SiTUGLU().function
    assert torch.equal(*grads)


@pytest.mark.parametrize("late", [0.1, 0.0])
def test_dropout_scales_its_gradient_as_its_forward_did(late: float) -> None:
    op, x = fuser.Dropout(0.5), torch.ones(64, 8, requires_grad=True)
    y = op(x)
    op.dropout_probability = late
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize(
    ("make", "name", "late"),
    [
        (lambda: fuser.Dropout(0.5), "dropout_probability", 0.1),
        (lambda: fuser.RMSNorm(N), "eps", 1.0),
        (lambda: fuser.LayerNorm(N), "zero_centered_gamma", True),
        (lambda: fuser.SiTUGLU(), "function", fuser.SiTUGLU(beta1=0.5).function),
    ],
)
def test_what_backward_computes_again_has_the_scalars_of_the_forward(
    make: Callable[[], Any], name: str, late: Any
) -> None:
    """The input of a linear, for the gradient of its weight."""
    op = make()
    linear = fuser.BasicLinear(N // (1 + (name == "function")), N)
    model = fuser.Sequential(fuser.GELU(), op, linear)
    before = getattr(op, name)
    grads = []
    for value in (before, late):
        torch.manual_seed(0)  # the same mask
        y = first(model(x_of().requires_grad_()))
        setattr(op, name, value)
        y.backward(x_of(seed=2))
        setattr(op, name, before)
        grads.append(linear.weight.grad)
        linear.weight.grad = None
    assert torch.equal(*grads)


def test_a_fusion_of_the_user_that_runs_the_forward_leaves_the_scale_to_the_backward() -> None:
    class Doubling(fuser.FusedOperation):
        window = (fuser.ConstantScale,)
        side = "forward"

        def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **rest: Any) -> Any:
            return input_ * self.members[0].scale, [()]

    model = fuser.Sequential(fuser.Bias(N), fuser.ConstantScale(2.0), fusions=(Doubling,))
    x = x_of().requires_grad_()
    y = model(x)
    model[1].scale = 7.0
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_gradients_of_a_leading_quantize_add_up_without_another_rounding() -> None:
    op, x = fuser.Quantize(forward=False, backward=True), x_of().requires_grad_()
    total = torch.zeros(N, N)
    for step in range(3):
        dy = x_of(seed=10 + step) * 10**step
        with fuser.autocast(recipe=Float8CurrentScaling()):
            y = op(x)
        (rounded,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        assert not torch.equal(rounded, dy)
        y.backward(dy)
        total += rounded
    assert type(x.grad) is torch.Tensor
    assert torch.equal(x.grad, total)
