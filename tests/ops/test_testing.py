"""``fuser.testing.check``: right ops and fusions pass, and each planted mistake is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from said import holds, said

import fuser
from fuser.precision import delayed_scaling
from fuser.testing import allow_float64, check

PLAIN = (None,)
FP8 = (fuser.recipe.Float8CurrentScaling(),)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(0))


def biased(size: int = 12) -> fuser.Bias:
    op = fuser.Bias(size, device="cpu")
    torch.nn.init.normal_(op.bias, generator=torch.Generator().manual_seed(1))
    return op


class Square(fuser.BasicOperation):
    """y = x^2."""

    def op_forward(
        self,
        ctx: fuser.OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_)
        return input_ * input_

    def op_backward(self, ctx: fuser.OperationContext, grad_output: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output, ()


class Gain(fuser.BasicOperation):
    """y = x * gain[column]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.linspace(0.5, 2, size, device="cpu"))

    def op_forward(self, ctx: fuser.OperationContext, input_: torch.Tensor, **_: Any) -> Any:
        ctx.save_for_backward(input_, self.gain)
        return input_ * self.gain

    def op_backward(self, ctx: fuser.OperationContext, grad_output: torch.Tensor) -> Any:
        x, gain = ctx.saved_tensors
        return grad_output * gain, [(grad_output * x).flatten(0, -2).sum(0)]


class SquareBias(fuser.FusedOperation):
    """y = x^2 + b."""

    window = (Square, fuser.Bias)
    side = "forward"

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
        basic_op_ctxs[0].save_for_backward(input_)
        return self.sum(input_, self.basic_ops[1].bias), [(), ()]

    def sum(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(bias, x, x)


def failure(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check(*args, **kwargs)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# -- what is right passes -----------------------------------------------------


def test_a_right_op_passes_under_every_recipe(x: torch.Tensor) -> None:
    check(Square(), x)
    check(Gain(12), x, reference=lambda x, gain: x * gain)


def test_a_check_warns_of_nothing(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_scaling, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(fuser.Sequential(Square(), fuser.Linear(12, 8)), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_right_op_passes_in_short_dtypes(x: torch.Tensor, dtype: torch.dtype) -> None:
    check(Gain(12).to(dtype), x.to(dtype), recipes=(None, *FP8))


@pytest.mark.parametrize(
    "make",
    [
        fuser.GELU,
        fuser.ReLU,
        fuser.SwiGLU,
        fuser.MakeExtraOutput,
        lambda: fuser.Dropout(0.3),
        lambda: fuser.LayerNorm(12, device="cpu"),
        lambda: fuser.Linear(12, 8, device="cpu"),
        lambda: torch.nn.Linear(12, 8, device="cpu"),
    ],
)
def test_ops_of_the_library_and_modules_pass(
    x: torch.Tensor, make: Callable[[], torch.nn.Module]
) -> None:
    check(make(), x, recipes=(None, *FP8))


def test_an_op_with_extra_inputs_passes(x: torch.Tensor) -> None:
    check(fuser.AddExtraInput(), x, x.flip(0), recipes=PLAIN)
    check(fuser.ScaledSwiGLU(), x, torch.rand(5), recipes=PLAIN)


def test_a_right_fusion_passes_alone_and_in_a_sequential(x: torch.Tensor) -> None:
    check(SquareBias([Square(), biased()]), x)
    ops = (fuser.RMSNorm(12, device="cpu"), Square(), biased())
    check(fuser.Sequential(*ops, fusions=(*fuser.FUSIONS, SquareBias)), x, recipes=(None, *FP8))


def test_the_module_and_its_inputs_stay_as_they_are(x: torch.Tensor) -> None:
    op, before, random = Gain(12), x.clone(), torch.get_rng_state()
    check(op, x, recipes=(None, *FP8))
    assert torch.equal(x, before)
    assert x.grad is None
    assert op.gain.grad is None
    assert op.gain.dtype is torch.float32
    assert torch.equal(torch.get_rng_state(), random)


def test_gradcheck_works_where_float64_is_allowed(x: torch.Tensor) -> None:
    wide = x.double().requires_grad_()
    with pytest.raises(ValueError, match=said("checks-pipeline-runs", None, holds("float64"))):
        Square()(wide)
    with allow_float64():
        assert torch.autograd.gradcheck(Square(), (wide,))
        assert torch.autograd.gradcheck(fuser.Sequential(Square(), biased().double()), (wide,))
    with pytest.raises(ValueError, match=said("checks-pipeline-runs", None, holds("float64"))):
        Square()(wide)


# -- planted mistakes ---------------------------------------------------------


def test_a_wrong_gradient_is_found_by_finite_differences_and_by_a_reference(
    x: torch.Tensor,
) -> None:
    class WrongSlope(Square):
        def op_backward(self, ctx: fuser.OperationContext, grad_output: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return x * grad_output, ()

    said = failure(WrongSlope(), x)
    assert said.startswith(
        "WrongSlope in float64: the gradient of the input differs from finite differences by up to"
    )
    assert " instead of " in said
    said = failure(WrongSlope(), x, reference=torch.square)
    assert said.startswith(
        "WrongSlope in float64, against its reference: the gradient of the input differs"
    )


def test_a_gradient_without_a_value_is_wrong(x: torch.Tensor) -> None:
    class Undefined(Square):
        def op_backward(self, ctx: fuser.OperationContext, grad_output: torch.Tensor) -> Any:
            dx, grads = super().op_backward(ctx, grad_output)
            dx[0, -1] = float("nan")
            return dx, grads

    assert "differs from finite differences by up to inf, at [0, 11]" in failure(Undefined(), x)
    assert "the gradient of the input" in failure(Undefined(), x, reference=torch.square)


def test_a_wrong_gradient_of_a_parameter_is_named(x: torch.Tensor) -> None:
    class Unsummed(Gain):
        def op_backward(self, ctx: fuser.OperationContext, grad_output: torch.Tensor) -> Any:
            x, gain = ctx.saved_tensors
            return grad_output * gain, [(grad_output * x)[0]]

    assert "the gradient of parameter gain differs" in failure(Unsummed(12), x)

    class Forgotten(Gain):
        def op_backward(self, ctx: fuser.OperationContext, grad_output: torch.Tensor) -> Any:
            return grad_output * ctx.saved_tensors[1], [None]

    said = failure(Forgotten(12), x, reference=lambda x, gain: x * gain)
    assert "the gradient of parameter gain is missing" in said


def test_a_wrong_output_is_found_by_the_reference(x: torch.Tensor) -> None:
    said = failure(Square(), x, reference=lambda x: x * x + 1)
    assert said.startswith("Square in float64, against its reference: the output differs by up to")


def test_a_missing_save_is_a_sentence(x: torch.Tensor) -> None:
    class Unsaved(Square):
        def op_forward(self, ctx: fuser.OperationContext, input_: torch.Tensor, **_: Any) -> Any:
            return input_ * input_

    said = failure(Unsaved(), x)
    assert said.startswith("Unsaved in float64: backward raises ")
    assert said.endswith("Does the forward save what this backward reads?")


def test_an_input_that_is_changed_in_place_is_named(x: torch.Tensor) -> None:
    class InPlace(Square):
        def op_forward(self, ctx: fuser.OperationContext, input_: torch.Tensor, **_: Any) -> Any:
            ctx.save_for_backward(input_.clone())
            return input_.mul_(input_) if not ctx.requires_grad else input_ * input_

    said = failure(InPlace(), x, recipes=PLAIN)
    assert said == (
        "InPlace without a recipe, in inference: the input is changed in place. "
        "Return a new tensor."
    )


def test_a_wrong_scale_under_a_recipe_is_found_with_the_recipe_named(x: torch.Tensor) -> None:
    class WrongScale(Square):
        def op_forward(self, ctx: fuser.OperationContext, input_: torch.Tensor, **_: Any) -> Any:
            values = input_.dequantize()
            if isinstance(input_, fuser.QuantizedTensor):
                values = values * 1.5
            ctx.save_for_backward(values)
            return values * values

    check(WrongScale(), x, recipes=PLAIN)
    said = failure(WrongScale(), x, recipes=FP8)
    assert said.startswith(
        "WrongScale under Float8CurrentScaling, in training, against its float64 values: the "
        "output differs by up to "
    )
    assert "in root mean square" in said


def test_a_mistake_under_one_backward_override_is_found(x: torch.Tensor) -> None:
    class Overridden(Square):
        def op_backward(self, ctx: fuser.OperationContext, grad_output: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return (3 if ctx.backward_override == "dequantized" else 2) * x * grad_output, ()

    said = failure(Overridden(), x, recipes=FP8)
    assert "under Float8CurrentScaling with backward_override='dequantized', in training" in said
    assert "the gradient of the input differs" in said


def test_a_fusion_that_forgets_its_bias_is_found(x: torch.Tensor) -> None:
    class Biasless(SquareBias):
        def sum(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return x * x

    said = failure(Biasless([Square(), biased()]), x)
    assert said.startswith(
        "Biasless without a recipe, in training, against the unfused ops: the output differs by "
    )
    said = failure(
        fuser.Sequential(Square(), biased(), fusions=(*fuser.FUSIONS, Biasless)), x, recipes=PLAIN
    )
    assert said.startswith("Sequential(Square, Bias) without a recipe")


def test_a_fusion_that_saves_the_wrong_tensor_is_found(x: torch.Tensor) -> None:
    class WrongSave(SquareBias):
        def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **rest: Any) -> Any:
            result = super().fuser_forward(basic_op_ctxs, input_, **rest)
            basic_op_ctxs[0].save_for_backward(result[0])
            return result

    said = failure(WrongSave([Square(), biased()]), x, recipes=PLAIN)
    assert "against the unfused ops: the gradient of the input differs" in said


def test_a_mistake_in_inference_alone_is_found(x: torch.Tensor) -> None:
    class Careless(Square):
        def op_forward(self, ctx: fuser.OperationContext, input_: torch.Tensor, **_: Any) -> Any:
            ctx.save_for_backward(input_)
            return input_ * input_ if ctx.requires_grad or input_.dtype is torch.float64 else input_

    said = failure(Careless(), x, recipes=PLAIN)
    assert said.startswith("Careless without a recipe, in inference, against its float64 values")


def test_a_fusion_that_never_runs_is_an_error_with_its_refusal(x: torch.Tensor) -> None:
    class Refusing(SquareBias):
        @classmethod
        def refuses(cls, *ops: Any, key: fuser.PlanKey) -> str | None:
            return "it is Sunday."

    said = failure(Refusing([Square(), biased()]), x, recipes=PLAIN)
    assert said == "Refusing ran nowhere: it refuses because it is Sunday."
    model = fuser.Sequential(Square(), fusions=(SquareBias,))
    said = failure(model, x, recipes=PLAIN)
    assert said.startswith("SquareBias ran nowhere: its window (Square, Bias) matches none of ")


def test_a_shape_that_an_op_tells_wrongly_is_named(x: torch.Tensor) -> None:
    class Halved(Square):
        def output_spec(self, spec: fuser.TensorSpec, extras: Any, autocast: Any) -> Any:
            return fuser.TensorSpec((*spec.shape[:-1], spec.shape[-1] // 2), spec.dtype)

    assert failure(Halved(), x, recipes=PLAIN) == (
        "Halved: the output has shape (5, 12), and output_spec tells the planner (5, 6)."
    )

    class Sums(fuser.BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
            return input_, [(input_.sum(-1, keepdim=True),)]

        def fuser_backward(
            self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
        ) -> Any:
            return grad_output + basic_op_grad_extra_outputs[0][0], [()], [()]

    with pytest.warns(
        UserWarning,
        match=said("diagnose-extra-plans-count", None, None, None, None, None, None, "Sums"),
    ):
        words = failure(Sums(), x, recipes=PLAIN)
    assert words == (
        "Sums: extra output 0 has shape (5, 1), and extra_output_specs tells the planner (5, 12)."
    )


def test_tolerances_can_be_given(x: torch.Tensor) -> None:
    class Rough(Square):
        def op_forward(self, ctx: fuser.OperationContext, input_: torch.Tensor, **_: Any) -> Any:
            ctx.save_for_backward(input_)
            return input_ * input_ * (1 if input_.dtype is torch.float64 else 1.001)

    assert "rtol=2e-05" in failure(Rough(), x, recipes=PLAIN)
    check(Rough(), x, recipes=PLAIN, rtol=1e-2)
    check(Rough(), x, recipes=PLAIN, rtol=0, atol=0.1)


def test_a_missing_input_and_a_class_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(fuser.InputError, match=said("check-takes-input-after", "nothing")):
        check(Square())
    with pytest.raises(
        fuser.InputTypeError, match=said("check-such-op-my", "the class SquareBias")
    ):
        check(SquareBias, x)
