"""Bad input: a sentence with the values in it, nothing left half-changed, the next call works."""

# mypy: disable-error-code="call-arg"
# Calls with wrong arguments are what many of these tests are about.

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import oracles
import pytest
import torch
from models import mlp
from said import holds, said, sentence

import fuser
import fuser.runtime.pipeline
from fuser.basic_ops.moe import BLOCK
from fuser.op import BasicOperation, FusedOperation, OperationContext
from fuser.specs import TensorSpec


def x_of(*shape: int, **kwargs: Any) -> torch.Tensor:
    return oracles.random_tensor(shape, torch.float32, 11).to(**kwargs)


class Silent(BasicOperation):
    """Passes its input on, and tells the planner nothing about its output."""

    def op_forward(
        self, ctx: OperationContext, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output, ()


# -- models ---------------------------------------------------------------------------


def with_extras() -> fuser.Sequential:
    """Wants two extra inputs: one like x, and one scale a row."""
    ops = (fuser.Linear(8, 8), fuser.AddExtraInput(), fuser.GELU(), fuser.ScaledSwiGLU())
    return oracles.randomize(fuser.Sequential(*ops))


def entered(context: contextlib.AbstractContextManager[Any]) -> None:
    with context:
        pass


def sequence(*ops: torch.nn.Module) -> Callable[[], fuser.Sequential]:
    """A maker of pipelines of copies of ``ops``."""
    return lambda: oracles.randomize(fuser.Sequential(*copy.deepcopy(ops)))


@dataclass(frozen=True)
class Case:
    """A bad call of a model, the good call that must still work, and what the sentence holds."""

    name: str
    make: Callable[[], fuser.Sequential]
    bad: tuple[Any, ...]
    words: tuple[str, ...]
    good: tuple[Any, ...] = (x_of(3, 8),)
    kind: type[Exception] = fuser.InputError
    meta_would_do: bool = False
    """Whether the bad tensors are fine for planning: meta tensors stand for any."""
    shows_at_run: bool = False
    """Whether planning cannot know, because an op did not tell what it returns."""

    def __str__(self) -> str:
        return self.name


X = x_of(3, 8)
GOOD_EXTRAS = (X, x_of(3, 8), x_of(3))
WANTED = ("AddExtraInput", "ScaledSwiGLU")
FLOATS = ("torch.float32", "torch.float16", "torch.bfloat16")


class _Anything:
    """Not a tensor."""

    def __repr__(self) -> str:
        return "<anything>"


NO_TENSORS = (None, 3, 2.5, [1.0, 2.0], "text", np.zeros((3, 8), np.float32), _Anything())


def described(value: Any) -> tuple[str, ...]:
    return (type(value).__name__, f"{value!r}"[:12])


CASES = (
    # the number of extra inputs
    *(
        Case(
            f"{len(extras)} extra inputs instead of 2",
            with_extras,
            (X, *extras),
            ("takes 2 extra inputs", f"got {len(extras)}", *WANTED),
            GOOD_EXTRAS,
        )
        for extras in ((), (x_of(3, 8),), (x_of(3, 8), x_of(3), x_of(3)))
    ),
    Case("an extra input nobody wants", mlp, (X, X), ("takes 0 extra inputs", "got 1")),
    Case(
        "no extra input in a mixed model",
        sequence(fuser.GELU(), torch.nn.Identity(), fuser.AddExtraInput()),
        (X,),
        ("takes 1 extra input (for op 1, AddExtraInput)", "got 0"),
        (X, X),
    ),
    # what is no tensor
    *(
        Case(
            f"{type(value).__name__} as input",
            mlp,
            (value,),
            ("input", "must be a tensor", *described(value)),
            kind=fuser.InputTypeError,
        )
        for value in NO_TENSORS
    ),
    *(
        Case(
            f"{type(value).__name__} as extra input",
            with_extras,
            (X, X, value),
            ("extra input 1", "op 4", "ScaledSwiGLU", "must be a tensor", *described(value)),
            GOOD_EXTRAS,
            fuser.InputTypeError,
        )
        for value in NO_TENSORS
    ),
    # dtypes
    *(
        Case(f"input of {dtype}", mlp, (x_of(3, 8).to(dtype),), ("input", str(dtype), *FLOATS))
        for dtype in (torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)
    ),
    *(
        Case(
            f"extra input of {dtype}",
            with_extras,
            (X, x_of(3, 8).to(dtype), x_of(3)),
            ("AddExtraInput", str(dtype), *FLOATS),
            GOOD_EXTRAS,
        )
        for dtype in (torch.int64, torch.float64, torch.bool, torch.complex64)
    ),
    *(
        Case(
            f"scales of {dtype}",
            with_extras,
            (X, x_of(3, 8), x_of(3).to(dtype)),
            ("ScaledSwiGLU", str(dtype), *FLOATS),
            GOOD_EXTRAS,
        )
        for dtype in (torch.int64, torch.float64)
    ),
    Case(
        "int64 extra input behind an op that tells nothing",
        sequence(Silent(), fuser.AddExtraInput()),
        (X, torch.ones(3, 8, dtype=torch.int64)),
        ("AddExtraInput", "torch.int64"),
        (X, X),
    ),
    Case(
        "int64 scales behind an op that tells nothing",
        sequence(Silent(), fuser.ScaledSReLU()),
        (X, torch.ones(3, dtype=torch.int64)),
        ("ScaledSReLU", "torch.int64"),
        (X, x_of(3)),
    ),
    # feature sizes
    Case("too few features", mlp, (x_of(3, 7),), ("Linear(8, 12)", "(3, 7)", "must be 8", "op 0")),
    Case("transposed input", mlp, (x_of(8, 3),), ("Linear(8, 12)", "(8, 3)", "module 0")),
    *(
        Case(
            f"wrong features at a {type(op).__name__} behind {type(before[-1]).__name__}",
            sequence(*before, op),
            (x_of(2, 3, 7),),
            (*words, "(2, 3, 7)", "8"),
            shows_at_run=isinstance(before[0], Silent),
        )
        for op, words in (
            (fuser.Linear(8, 4), ("Linear(8, 4)",)),
            (fuser.BasicLinear(8, 4), ("BasicLinear(8, 4)",)),
            (fuser.Bias(8), ("Bias(8)",)),
            (fuser.LayerNorm(8), ("LayerNorm((8,))",)),
            (fuser.RMSNorm(8), ("RMSNorm((8,))",)),
        )
        for before in ((fuser.GELU(),), (Silent(), fuser.ConstantScale(2.0)))
    ),
    Case(
        "a norm over more dimensions than there are",
        sequence(fuser.LayerNorm((3, 8))),
        (x_of(8),),
        ("LayerNorm((3, 8))", "(8,)"),
    ),
    Case("odd width of a GLU", sequence(fuser.SwiGLU()), (x_of(3, 7),), ("multiple of 2", "7")),
    Case(
        "odd width of a GLU later on",
        sequence(fuser.ConstantScale(2.0), fuser.GEGLU()),
        (x_of(3, 7),),
        ("multiple of 2", "7"),
    ),
    Case(
        "width that does not interleave",
        sequence(fuser.SwiGLU(glu_interleave_size=4)),
        (x_of(3, 12),),
        ("multiple of 8", "12"),
    ),
    Case(
        "odd width of a scaled GLU",
        sequence(fuser.ScaledSwiGLU()),
        (x_of(3, 7), x_of(3)),
        ("multiple of 2", "7"),
        (X, x_of(3)),
    ),
    # extra inputs of other shapes, those that torch would broadcast among them
    *(
        Case(
            f"extra input of shape {shape}",
            with_extras,
            (X, x_of(*shape), x_of(3)),
            ("AddExtraInput", str(shape), "(3, 8)"),
            GOOD_EXTRAS,
        )
        for shape in ((3, 7), (4, 8), (1, 8), (8,), (1, 3, 8))
    ),
    *(
        Case(
            f"scales of shape {shape}",
            with_extras,
            (X, x_of(3, 8), x_of(*shape)),
            ("ScaledSwiGLU", str(shape), "(3,)"),
            GOOD_EXTRAS,
        )
        for shape in ((3, 1), (4,), (1,), ())
    ),
    Case(
        "extra input of another shape where nothing fuses",
        sequence(fuser.GELU(), fuser.AddExtraInput()),
        (X, x_of(3, 4)),
        ("AddExtraInput", "(3, 4)", "(3, 8)"),
        (X, X),
    ),
    # shapes that mean nothing
    Case("a feature dimension of size zero", mlp, (x_of(3, 0),), ("(3, 0)", "last dimension")),
    Case(
        "a feature dimension of size zero into an op of any width",
        sequence(fuser.GELU()),
        (x_of(3, 0),),
        ("(3, 0)", "last dimension"),
    ),
    Case("a number as a tensor", mlp, (x_of(),), ("no dimensions",)),
    Case(
        "a reshape that does not fit",
        sequence(fuser.ReLU(), fuser.Reshape((-1, 4))),
        (x_of(3, 7),),
        ("Reshape((-1, 4))", "(3, 7)", "21 elements"),
    ),
    Case(
        "a reshape to a fixed shape that does not fit",
        sequence(fuser.Reshape((4, 6)), fuser.ReLU()),
        (x_of(3, 7),),
        ("Reshape((4, 6))", "(3, 7)", "21 elements"),
    ),
    # devices
    Case(
        "a meta input of a model on the CPU",
        mlp,
        (X.to("meta"),),
        ("meta", "cpu", "input"),
        meta_would_do=True,
    ),
    Case(
        "a meta extra input",
        with_extras,
        (X, x_of(3, 8), x_of(3).to("meta")),
        ("meta", "cpu", "extra input 1", "ScaledSwiGLU"),
        GOOD_EXTRAS,
        meta_would_do=True,
    ),
)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


# -- what holds for all of them ----------------------------------------------------------


def state_of(model: fuser.Sequential) -> list[Any]:
    """Parameters, gradients, plans and torch's random state."""
    return [
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        {name: parameter._version for name, parameter in model.named_parameters()},
        len(model.plans),
        torch.get_rng_state(),
    ]


def assert_unchanged(model: fuser.Sequential, before: list[Any]) -> None:
    state, grads, versions, plans, rng = before
    now = state_of(model)
    for old, new in ((state, now[0]), (grads, now[1])):
        assert old.keys() == new.keys()
        for name, value in old.items():
            assert (value is None) == (new[name] is None), name
            assert value is None or torch.equal(value, new[name]), name
    assert now[2] == versions
    assert now[3] == plans
    assert torch.equal(now[4], rng)


def assert_sentence(error: BaseException, words: tuple[str, ...]) -> None:
    sentence = str(error)
    assert sentence.endswith("."), sentence
    missing = [word for word in words if word not in sentence]
    assert not missing, f"{missing} not in: {sentence}"


def results_of(model: fuser.Sequential, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Outputs and parameter gradients of a good call."""
    model.zero_grad()
    outputs = oracles.as_tuple(model(*args))
    if any(y.requires_grad for y in outputs):
        torch.autograd.backward([y.square().sum() for y in outputs])
    return [*outputs, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.sampled
@every_case
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_a_bad_call_of_a_running_model_is_refused_and_changes_nothing(
    case: Case, fusions: Any
) -> None:
    model = case.make()
    model.fusions = fusions
    expected = results_of(model, case.good)
    before = state_of(model)
    with pytest.raises(case.kind) as caught:
        model(*case.bad)
    assert type(caught.value) is case.kind
    assert_sentence(caught.value, case.words)
    assert_unchanged(model, before)
    for found, wanted in zip(results_of(model, case.good), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(model.plans) == before[3]


@pytest.mark.sampled
@every_case
@pytest.mark.parametrize("training", [True, False])
def test_a_bad_first_call_is_refused_and_leaves_no_plan(case: Case, training: bool) -> None:
    model = case.make()
    before = state_of(model)
    with torch.set_grad_enabled(training), pytest.raises(case.kind) as caught:
        model(*case.bad)
    assert_sentence(caught.value, case.words)
    if case.shows_at_run:
        before[3] = len(model.plans)
    assert_unchanged(model, before)
    fresh = case.make()
    for found, wanted in zip(
        results_of(model, case.good), results_of(fresh, case.good), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert case.shows_at_run or model.plans == fresh.plans


KNOWN_WHEN_PLANNED = [case for case in CASES if not case.meta_would_do and not case.shows_at_run]


@pytest.mark.parametrize("case", KNOWN_WHEN_PLANNED, ids=str)
def test_planning_refuses_what_a_call_would_refuse(case: Case) -> None:
    model = case.make()
    before = state_of(model)
    with pytest.raises(case.kind) as caught:
        model.plan(*case.bad)
    assert_sentence(caught.value, case.words)
    assert_unchanged(model, before)


def test_every_error_is_of_its_builtin_kind_too() -> None:
    assert issubclass(fuser.InputError, ValueError)
    assert issubclass(fuser.InputTypeError, TypeError)
    assert issubclass(fuser.StateError, RuntimeError)
    for kind in (fuser.InputError, fuser.InputTypeError, fuser.StateError):
        assert issubclass(kind, fuser.FuserError)


def test_an_op_called_alone_checks_as_a_pipeline_does() -> None:
    with pytest.raises(
        fuser.InputError,
        match=said("grouped-linear-shape-last-dimension", "BasicLinear(8, 4)", (3, 7)),
    ):
        fuser.BasicLinear(8, 4)(x_of(3, 7))
    with pytest.raises(
        fuser.InputError,
        match=said("checks-pipeline", "1 extra input (for op 0, AddExtraInput)", 0),
    ):
        fuser.AddExtraInput()(X)
    with pytest.raises(fuser.InputTypeError, match=said("checks-tensor", None, "NoneType")):
        fuser.Linear(8, 4)(None)


def test_a_model_whose_sizes_disagree_names_the_op() -> None:
    model = fuser.Sequential(fuser.Linear(8, 12), fuser.GELU(), fuser.Linear(13, 8))
    before = state_of(model)
    for call in (model, model.plan):
        with pytest.raises(
            fuser.InputError,
            match=said("grouped-linear-shape-last-dimension", "Linear(13, 8)", (3, 12)),
        ):
            call(X)
        assert_unchanged(model, before)
    model[2] = fuser.Linear(12, 8)
    assert model(X).shape == (3, 8)


# -- parameters -------------------------------------------------------------------------------


def test_parameters_of_other_dtypes_are_refused() -> None:
    model = mlp()
    expected = model(X)
    model.double()
    with pytest.raises(fuser.InputError) as caught:
        model(X)
    assert_sentence(caught.value, ("parameter of shape (12, 8)", "torch.float64", *FLOATS))
    torch.testing.assert_close(model.float()(X), expected)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_parameter_on_another_device_is_refused(is_running: bool) -> None:
    model = mlp()
    if is_running:
        model(X)
    weight = model[2].weight
    plans = model.plans
    model[2].weight = torch.nn.Parameter(weight.detach().to("meta"))
    if not is_running:
        # Else the first call would take the weight for a deferred one, and make it.
        model[2].basic_ops[0].pre_first_fuser_forward = lambda: None
    with pytest.raises(fuser.InputError) as caught:
        model(X)
    assert_sentence(caught.value, ("(8, 12)", "meta", "cpu"))
    assert model.plans == plans
    model[2].weight = weight
    torch.testing.assert_close(model(X), mlp()(X))


def test_a_bad_first_call_does_not_make_deferred_parameters() -> None:
    for bad in ((None,), (X, X), (x_of(3, 7),), (X.double(),)):
        model = fuser.Sequential(
            fuser.Linear(8, 4, device="meta"), fuser.RMSNorm(4, device="meta"), fuser.GELU()
        )
        rng = torch.get_rng_state()
        with pytest.raises(fuser.FuserError):
            model(*bad)
        assert all(parameter.is_meta for parameter in model.parameters()), bad
        assert torch.equal(torch.get_rng_state(), rng)
        assert model(X).shape == (3, 4)


def test_supported_dtypes_may_be_mixed_and_the_weight_decides() -> None:
    """What ``api.md`` promises: the compute dtype is the weight's."""
    for weight_dtype, input_dtype in itertools.permutations(oracles.DTYPES, 2):
        model = mlp().to(weight_dtype)
        x = oracles.leaf(X, input_dtype)
        y = model(x)
        assert y.dtype == weight_dtype
        y.float().sum().backward()
        assert x.grad.dtype == input_dtype
        assert {p.grad.dtype for p in model.parameters()} == {weight_dtype}
        reference = mlp()(X)
        assert (y.float() - reference).norm() < 0.03 * reference.norm()


def test_a_reparametrized_weight_is_refused_or_right() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    op = oracles.randomize(fuser.BasicLinear(8, 4))
    plain = torch.nn.Linear(8, 4, bias=False)
    plain.weight = torch.nn.Parameter(op.weight.detach().clone())
    for module in (op, plain):
        torch.nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    plain(X).sum().backward()
    try:
        y = fuser.Sequential(op)(X)
        y.sum().backward()
    except fuser.FuserError as error:
        refusal = str(error)
    else:
        refusal = ""
        torch.testing.assert_close(y, plain(X))
        found = op.parametrizations.weight.original.grad
        torch.testing.assert_close(found, plain.parametrizations.weight.original.grad)
    assert not refusal or "weight" in refusal


# -- op_kwargs --------------------------------------------------------------------------------


class Scaling(Silent):
    """Takes a keyword argument."""

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        factor: float = 1.0,
    ) -> torch.Tensor:
        return input_ * factor


def kwargs_model() -> fuser.Sequential:
    ops = (fuser.Linear(8, 8), fuser.GELU(), Scaling(), torch.nn.Tanh())
    return oracles.randomize(fuser.Sequential(*ops))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (4, ("4",)),
        (-5, ("-5",)),
        (3, ("3", "Tanh")),
        ("1", ("'1'",)),
        (None, ("None",)),
        (1.0, ("1.0",)),
        (fuser.GELU(), ("GELU",)),
        (torch.nn.Tanh(), ("Tanh",)),
    ],
    ids=repr,
)
def test_an_unknown_target_of_op_kwargs_is_refused(target: Any, words: tuple[str, ...]) -> None:
    model = kwargs_model()
    expected = results_of(model, (X,))
    before = state_of(model)
    with pytest.raises(fuser.InputError) as caught:
        model(X, op_kwargs={target: {"factor": 2.0}})
    known = ("0 Linear", "1 GELU", "2 Scaling", "3 Tanh")
    assert_sentence(caught.value, ("op_kwargs", *words, *known))
    assert_unchanged(model, before)
    for found, wanted in zip(results_of(model, (X,)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_known_targets_of_op_kwargs_are_an_op_or_an_index() -> None:
    model = kwargs_model()
    expected = torch.tanh(3 * torch.atanh(model(X)))
    for target in (2, -2, model[2]):
        torch.testing.assert_close(model(X, op_kwargs={target: {"factor": 3.0}}), expected)


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize("target", [0, 1])
def test_a_keyword_that_an_op_does_not_take_is_refused_fused_or_not(
    target: int, fusions: Any
) -> None:
    model = mlp(fusions=fusions)
    with pytest.raises(TypeError, match=said("checks-no-keyword-argument", None, holds("factor"))):
        model(X, op_kwargs={target: {"factor": 3.0}})
    torch.testing.assert_close(model(X), mlp()(X))


@pytest.mark.parametrize(
    ("op", "extras"),
    [
        (fuser.MoeDispatch(4), (torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))),
        (fuser.MoeCombine(), (torch.arange(3, dtype=torch.int32).view(3, 1),)),
        (fuser.ScaledSwiGLU(), (torch.ones(3),)),
        (fuser.AdaptiveLayerNorm(8), (torch.ones(3, 8), torch.ones(3, 8))),
        (fuser.AddExtraInput(), (X,)),
        (fuser.MakeExtraOutput(), ()),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("keyword", ["factor", BLOCK])
def test_an_op_with_extra_tensors_refuses_a_keyword_that_it_does_not_take(
    op: Any, extras: Any, keyword: str
) -> None:
    """Also the one that a pipeline itself gives to MoeDispatch."""
    words = said("checks-no-keyword-argument", holds(type(op).__name__), repr(keyword), "none")
    model, given = fuser.Sequential(op), {keyword: 3}
    model(X, *extras)
    with pytest.raises(fuser.InputTypeError, match=words):
        model(X, *extras, op_kwargs={0: given})
    with pytest.raises(fuser.InputTypeError, match=words):
        op(X, *extras, **given)


def tripled(self: Any, ctxs: Any, x: torch.Tensor, **kwargs: Any) -> Any:
    return x * kwargs["basic_op_kwargs"][0]["scale"], [()]


class AddsScaled(fuser.AddExtraInput):
    def step_forward(self, ctxs: Any, x: torch.Tensor, inputs: Any) -> Any:
        return x * inputs.kwargs[0]["scale"], ()


def test_a_method_of_a_user_gets_any_keyword() -> None:
    own = fuser.AddExtraInput()
    own.fuser_forward = types.MethodType(tripled, own)  # type: ignore[method-assign]
    for op in (own, AddsScaled()):
        y = fuser.Sequential(op)(X, X, op_kwargs={0: {"scale": 3.0}})
        torch.testing.assert_close(y, X * 3.0)


# -- channels ---------------------------------------------------------------------------------


def test_a_channel_without_producer_is_refused_until_it_has_one() -> None:
    make, add = fuser.MakeExtraOutput(), fuser.AddExtraInput().set_extra_input_channel(0, "skip")
    model = fuser.Sequential(make, fuser.GELU(), add)
    for call in (model, model.plan):
        with pytest.raises(fuser.InputError) as caught:
            call(X)
        assert_sentence(caught.value, ("'skip'", "no producer", "op 2 (AddExtraInput)"))
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    torch.testing.assert_close(model(X), oracles.gelu(X) + X)


def test_a_channel_with_two_producers_is_refused_until_it_has_one() -> None:
    first, second = (fuser.MakeExtraOutput().set_extra_output_channel(0, "skip") for _ in range(2))
    add = fuser.AddExtraInput().set_extra_input_channel(0, "skip")
    model = fuser.Sequential(first, fuser.GELU(), second, add)
    with pytest.raises(fuser.InputError) as caught:
        model(X)
    assert_sentence(
        caught.value,
        ("'skip'", "two producers", "op 0 (MakeExtraOutput)", "op 2 (MakeExtraOutput)"),
    )
    second.set_extra_output_channel(0, "another")
    torch.testing.assert_close(model(X)[0], oracles.gelu(X) + X)


def test_a_channel_read_before_it_is_produced_is_refused_until_the_order_is_right() -> None:
    make = fuser.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False)
    add = fuser.AddExtraInput().set_extra_input_channel(0, "skip")
    model = fuser.Sequential(add, fuser.GELU(), make)
    with pytest.raises(fuser.InputError) as caught:
        model(X)
    assert_sentence(
        caught.value, ("'skip'", "op 0 (AddExtraInput)", "op 2 (MakeExtraOutput)", "before")
    )
    torch.testing.assert_close(fuser.Sequential(make, fuser.GELU(), add)(X), oracles.gelu(X) + X)


@pytest.mark.parametrize("index", [-1, 1, 5])
def test_a_channel_of_an_extra_that_an_op_does_not_have_is_refused(index: int) -> None:
    op = fuser.MakeExtraOutput()
    with pytest.raises(IndexError) as caught:
        op.set_extra_output_channel(index, "skip")
    assert isinstance(caught.value, fuser.InputError)
    assert_sentence(caught.value, ("'skip'", str(index), "MakeExtraOutput", "1"))
    with pytest.raises(
        fuser.InputError,
        match=said("channels-asks-count-0", "'skip'", "input 0", "MakeExtraOutput"),
    ):
        op.set_extra_input_channel(0, "skip")
    torch.testing.assert_close(fuser.Sequential(op)(X)[0], X)


@pytest.mark.parametrize(
    ("index", "name", "flag", "error", "said"),
    [
        (0, 7, True, TypeError, ("named by a str", "7")),
        (0, None, True, TypeError, ("named by a str", "None")),
        (0, "", True, ValueError, ("empty name", "MakeExtraOutput")),
        ("0", "skip", True, TypeError, ("'skip'", "number", "'0'")),
        (True, "skip", True, TypeError, ("'skip'", "number", "True")),
        (0, "skip", 1, TypeError, ("output_to_caller", "'skip'", "True or False", "1")),
        (0, "skip", None, TypeError, ("output_to_caller", "'skip'", "True or False", "None")),
    ],
)
def test_a_channel_has_a_number_a_name_and_a_flag_of_the_right_type(
    index: Any, name: Any, flag: Any, error: type[Exception], said: tuple[str, ...]
) -> None:
    op = fuser.MakeExtraOutput()
    with pytest.raises(error) as caught:
        op.set_extra_output_channel(index, name, output_to_caller=flag)
    assert isinstance(caught.value, fuser.FuserError)
    assert_sentence(caught.value, said)
    if flag is True:
        with pytest.raises(error):
            fuser.AddExtraInput().set_extra_input_channel(index, name)
    torch.testing.assert_close(fuser.Sequential(op)(X), (X, X))


def test_rebinding_a_channel_after_a_pipeline_has_captured_the_op_is_refused() -> None:
    make = fuser.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False)
    add = fuser.AddExtraInput().set_extra_input_channel(0, "skip")
    model = fuser.Sequential(make, fuser.GELU(), add)
    expected = model(X)
    with pytest.raises(
        fuser.StateError, match=said("channels-cannot-bound-pipeline", "'other'", "MakeExtraOutput")
    ):
        make.set_extra_output_channel(0, "other")
    with pytest.raises(
        fuser.StateError, match=said("channels-cannot-bound-pipeline", "'other'", "AddExtraInput")
    ):
        add.set_extra_input_channel(0, "other")
    torch.testing.assert_close(model(X), expected)


# -- fusions and ops that misbehave -----------------------------------------------------------


class _Bad(FusedOperation):
    """A fusion to break in one way or another."""

    window: ClassVar[Any] = (fuser.GELU, fuser.ConstantScale)
    side = "forward"
    fuser_forward: Any = None  # only planned
    fuser_backward: Any = None


def broken_pipeline(*fusions: type[FusedOperation]) -> fuser.Sequential:
    ops = (fuser.Linear(8, 8), fuser.GELU(), fuser.ConstantScale(2.0))
    return oracles.randomize(fuser.Sequential(*ops, fusions=fusions))


@pytest.mark.parametrize("method", ["refuses", "kernels"])
@pytest.mark.parametrize("side", ["forward", "backward", "joint"])
def test_a_fusion_that_raises_when_asked_is_named_and_left_out(method: str, side: str) -> None:
    def fails(*ops: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("division by a careless author")

    broken = type("Careless", (_Bad,), {"side": side, method: staticmethod(fails)})
    model = broken_pipeline(broken)
    words = ("Careless", "ZeroDivisionError", "division by a careless author")
    with pytest.warns(UserWarning, match=said("planner-used-asked-about", "Careless")) as caught:
        y = model(X)
    warning = str(caught[0].message)
    assert all(word in warning for word in (*words, "2-3"))
    (refusal,) = model.plans[0].refusals
    assert (refusal.fusion, refusal.side, refusal.ops) == ("Careless", side, (2, 3))
    assert all(word in refusal.reason for word in words)
    assert all(word in str(model.plans[0]) for word in words)
    torch.testing.assert_close(y, broken_pipeline()(X))
    y.sum().backward()
    assert model[0].weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)


def test_a_broken_fusion_does_not_keep_a_good_one_from_running() -> None:
    class Careless(_Bad):
        window = (fuser.BasicLinear, fuser.Bias)

        @classmethod
        def refuses(cls, *ops: Any, key: Any) -> str | None:
            raise KeyError("missing")

    model = mlp(fusions=(Careless, *fuser.FUSIONS))
    with pytest.warns(UserWarning, match=said("planner-used-asked-about", "Careless")):
        y = model(X)
    assert "ForwardLinearBiasActivation" in {step.fusion for step in model.plans[0].forward}
    torch.testing.assert_close(y, mlp()(X))


@pytest.mark.parametrize("kernels", [(), (("one", 1),), (("two", 2), ("one", 1))])
def test_kernels_that_do_not_cover_the_window_are_refused_with_the_numbers(kernels: Any) -> None:
    broken = type("Short", (_Bad,), {"kernels": classmethod(lambda cls, *ops, side, key: kernels)})
    model = broken_pipeline(broken)
    torch.testing.assert_close(model(X), broken_pipeline()(X))
    (refusal,) = model.plans[0].refusals
    assert (refusal.fusion, refusal.ops) == ("Short", (2, 3))
    assert "2 ops" in refusal.reason
    assert str(kernels) in refusal.reason


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what a test registered."""
    monkeypatch.setattr(fuser.runtime.pipeline, "_registered", fuser.runtime.pipeline._registered)


REGISTER = (
    fuser.register_forward_fusion,
    fuser.register_backward_fusion,
    fuser.register_forward_backward_fusion,
)


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize("register", REGISTER, ids=lambda function: function.__name__)
@pytest.mark.parametrize("how", ["too few", "too many", "another order", "foreign"])
def test_a_registered_fusion_that_does_not_cover_the_pipeline_is_refused(
    register: Any, how: str
) -> None:
    def careless_fusion(ops: list[Any], *, recipe: Any) -> list[Any]:
        changed = {
            "too few": ops[:-1],
            "too many": [*ops, ops[0]],
            "another order": ops[::-1],
            "foreign": [*ops[:-1], fuser.ConstantScale(2.0)],
        }
        return changed[how]

    model = broken_pipeline()
    expected = results_of(model, (X,))
    plans = model.plans
    nothing_registered = fuser.runtime.pipeline._registered
    register(careless_fusion)
    before = state_of(model)
    with pytest.raises(fuser.StateError) as caught:
        model(X)
    names = "BasicLinear, Bias, GELU, ConstantScale"
    assert_sentence(caught.value, ("careless_fusion", "cover", names))
    assert_unchanged(model, before)
    fuser.runtime.pipeline._registered = nothing_registered
    for found, wanted in zip(results_of(model, (X,)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert model.plans == plans


@pytest.mark.usefixtures("_registry")
def test_a_registered_fused_op_over_half_a_pair_of_ops_is_refused() -> None:
    def half(ops: list[Any], *, recipe: Any) -> list[Any]:
        return [*ops[:2], _Bad([ops[2]])]

    fuser.register_forward_fusion(half)
    with pytest.raises(
        fuser.StateError,
        match=said(
            "registered-returned-ops-do", "half", holds("GELU, ConstantScale"), holds("Bias, GELU")
        ),
    ):
        broken_pipeline()(X)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"side": ""}, ("side ''", "'forward', 'backward' or 'joint'")),
        ({"window": ()}, ("window ()",)),
        ({}, ("has no fuser_forward, which a forward fusion must implement",)),
        ({"side": "backward"}, ("has no fuser_backward, which a backward fusion",)),
        (
            {"side": "joint", "fuser_forward": FusedOperation.forward},
            ("has no fuser_backward, which a joint fusion",),
        ),
    ],
    ids=["no side", "no window", "no forward", "no backward", "half of both"],
)
def test_a_fusion_that_could_not_run_is_refused_at_once(
    broken: dict[str, Any], words: tuple[str, ...]
) -> None:
    whole = {"window": (fuser.GELU, fuser.ConstantScale), "side": "forward"}
    with pytest.raises(fuser.InputTypeError) as caught:
        broken_pipeline(type("Halved", (FusedOperation,), {**whole, **broken}))
    assert_sentence(caught.value, ("Halved", *words))


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize("side", ["forward", "backward", "joint"])
def test_a_registered_fused_op_that_could_not_run_is_refused(side: str) -> None:
    class Halved(FusedOperation):
        pass

    register = REGISTER[["forward", "backward", "joint"].index(side)]
    register(lambda ops, *, recipe: [*ops[:2], Halved(ops[2:])])
    with pytest.raises(fuser.InputTypeError, match=r"Halved has no fuser_(for|back)ward"):
        broken_pipeline()(X)


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize("register", REGISTER, ids=lambda function: function.__name__)
def test_only_functions_are_registered(register: Any) -> None:
    before = fuser.runtime.pipeline._registered
    for what in (_Bad, _Bad([fuser.GELU()]), None):
        with pytest.raises(fuser.InputTypeError, match=said("pipeline-registered-function-list")):
            register(what)
    assert fuser.runtime.pipeline._registered == before


class _NoTuple(fuser.BasicOperation):
    """Returns the gradient of its input alone."""

    def op_forward(self, ctx: Any, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        ctx.save_for_backward(input_)
        return input_ * input_

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1])
def test_a_backward_that_returns_no_tuple_is_named(rows: int, before: int) -> None:
    # A tensor of two rows comes apart like a pair.
    model = fuser.Sequential(*[fuser.GELU() for _ in range(before)], _NoTuple(), fuser.GELU())
    with pytest.raises(fuser.StateError) as caught:
        model(x_of(rows, 8).requires_grad_()).sum().backward()
    assert str(caught.value) == sentence("basic-op-backward-returns", "_NoTuple", "Tensor")


def test_a_backward_that_returns_three_values_is_named() -> None:
    class Three(_NoTupleBehindAnExtra):
        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            return grad_output, (), ()

    with pytest.raises(fuser.StateError, match=said("basic-op-backward-returns", "Three", "tuple")):
        Three()(x_of(3, 8).requires_grad_(), x_of(3, 8)).sum().backward()


class _NoTupleBehindAnExtra(_NoTuple):
    """The same of an op with an extra input, which is run by ``fuser_backward``."""

    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        return self.op_forward(basic_op_ctxs[0], input_), [()]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_backward_of_an_op_with_an_extra_input_that_returns_no_tuple_is_named(rows: int) -> None:
    x = x_of(rows, 8).requires_grad_()
    with pytest.raises(
        fuser.StateError, match=said("basic-op-backward-returns", holds("Extra"), "Tensor")
    ):
        fuser.Sequential(_NoTupleBehindAnExtra(), fuser.GELU())(x, x_of(rows, 8)).sum().backward()


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("side", ["forward", "backward"])
def test_a_fusion_that_returns_something_else_is_named(rows: int, side: str) -> None:
    def same(self: Any, ctxs: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        return x * 1 if side == "forward" else (x * 1, [(), ()])

    body = {"side": side, f"fuser_{side}": same, "window": (fuser.GELU, fuser.ConstantScale)}
    fusion = type("Odd", (FusedOperation,), body)
    model = fuser.Sequential(fuser.GELU(), fuser.ConstantScale(2.0), fusions=(fusion,))
    wanted = {
        "forward": "(output, extra_outputs); it returned a Tensor.",
        "backward": "(grad_input, param_grads, grad_extra_inputs); it returned a tuple of 2.",
    }
    with pytest.raises(fuser.StateError) as caught:
        model(x_of(rows, 8).requires_grad_()).sum().backward()
    assert str(caught.value) == f"Odd.fuser_{side} returns {wanted[side]}"


class _RowOfNoTuple(_NoTuple):
    """Returns a tensor where a row of tensors belongs, as of an op with one."""

    num_extra_inputs = 1

    def __init__(self, part: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.part = part

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        return self.op_forward(basic_op_ctxs[0], input_), [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **kwargs: Any) -> Any:
        result: list[Any] = [grad_output, [(grad_output.sum(0),)], [(grad_output,)]]
        result[self.part] = [grad_output.sum(0)]
        return tuple(result)


@pytest.mark.parametrize("part", [1, 2])
def test_an_op_that_returns_a_tensor_for_a_row_of_gradients_is_named(part: int) -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(fuser.StateError) as caught:
        fuser.Sequential(_RowOfNoTuple(part), fuser.GELU())(x, torch.ones_like(x)).sum().backward()
    assert str(caught.value) == (
        "_RowOfNoTuple.fuser_backward returns (grad_input, param_grads, grad_extra_inputs); it "
        "returned a Tensor."
    )


_WRONG: dict[str, tuple[Any, str]] = {
    "forward: dict": ({"output": X, "extra_outputs": []}, "it returned a dict."),
    "forward: str": ("xy", "it returned a str."),
    "forward: set": ({1, 2}, "it returned a set."),
    "forward: output": (("x", [(), ()]), "must be a tensor; it is a str."),
    "forward: no rows": ((X, None), "returned None in the place of its rows of extra outputs"),
    "forward: int for rows": ((X, 3), "it returned a int as its extra_outputs."),
    "forward: dict for rows": ((X, {}), "it returned a dict as its extra_outputs."),
    "forward: one row": ((X, (X, X)), "it returned a Tensor."),
    "forward: str for a row": ((X, ["a", ()]), "a str as the extra outputs of an op."),
    "forward: str in a row": ((X, [("a",), ()]), "a str among its extra outputs."),
    "backward: dict": ({"dx": X, "dw": [], "extras": []}, "it returned a dict."),
    "backward: str": ("xyz", "it returned a str."),
    "backward: gradient": (({"dx": X}, [(), ()], [(), ()]), "a tensor or None; it is a dict."),
    "backward: int for rows": ((X, 3, [(), ()]), "it returned a int as its param_grads."),
    "backward: dict for rows": ((X, {"w": X}, ()), "it returned a dict as its param_grads."),
}


class Rows:
    """As programs had them before iterators: a length and items."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        return self.rows[place]


@pytest.mark.parametrize("kind", [iter, list, tuple, lambda rows: map(tuple, rows), Rows])
def test_rows_may_be_anything_that_has_an_order(kind: Any) -> None:
    class Tripling(BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **kwargs: Any) -> Any:
            rows = [(input_ * 3,)]
            return input_ * 2, Rows(*rows) if kind is Rows else kind(rows)

        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
            return grad_output * 2, [()], [()]

    y, extra = fuser.Sequential(Tripling())(X.clone().requires_grad_())
    torch.testing.assert_close((y, extra), (X * 2, X * 3))


@pytest.mark.parametrize("name", _WRONG)
@pytest.mark.parametrize("tail", [[], [fuser.Bias(8)]], ids=["last", "before"])
def test_a_fusion_that_returns_another_kind_is_named(name: str, tail: list[Any]) -> None:
    side, (result, words) = name.partition(":")[0], _WRONG[name]

    def wrong(self: Any, ctxs: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        return result

    body = {"side": side, f"fuser_{side}": wrong, "window": (fuser.GELU, fuser.ConstantScale)}
    fusion = type("Odd", (FusedOperation,), body)
    ops = (fuser.Bias(8), fuser.GELU(), fuser.ConstantScale(2.0), *tail)
    with pytest.raises(fuser.StateError) as caught:
        fuser.Sequential(*ops, fusions=(fusion,))(X.clone().requires_grad_()).sum().backward()
    assert "Odd" in str(caught.value)
    assert words in str(caught.value)


class _OddOp(_NoTuple):
    """Returns what it was given, from the method that was named."""

    def __init__(self, method: str, result: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.method, self.result = method, result

    def op_forward(self, ctx: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        return self.result if self.method == "op_forward" else input_ * self.weight

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("method", "result", "words"),
    [
        ("op_forward", {"y": X}, "must be a tensor; it is a dict."),
        ("op_forward", "y", "must be a tensor; it is a str."),
        ("op_backward", {"dx": X, "dw": X}, "it returned a dict."),
        ("op_backward", "xy", "it returned a str."),
        ("op_backward", ("x", (None,)), "must be a tensor or None; it is a str."),
        ("op_backward", (X, 3), "it returned a int as its param_grads."),
        ("op_backward", (X, {"w": X}), "it returned a dict as its param_grads."),
        ("op_backward", (X, ["w"]), "a str as the gradient of its parameter 0, which must be"),
    ],
)
@pytest.mark.parametrize("around", [[], [fuser.Bias(8)]], ids=["alone", "between"])
def test_an_op_that_returns_another_kind_is_named(
    method: str, result: Any, words: str, around: list[Any]
) -> None:
    model = fuser.Sequential(*around, _OddOp(method, result), *around)
    with pytest.raises(fuser.StateError) as caught:
        model(X.clone().requires_grad_()).sum().backward()
    assert "_OddOp" in str(caught.value)
    assert words in str(caught.value)


class _OneOfEach(fuser.BasicOperation):
    num_extra_inputs = num_extra_outputs = 1


@pytest.mark.parametrize("part", ["outputs", "inputs"])
@pytest.mark.parametrize("wrong", ["x", 3, ["x"], [3], [{"a": X}], [("x",)], {"a": X}])
def test_an_op_that_returns_other_kinds_for_extra_tensors_is_named(part: str, wrong: Any) -> None:
    def forward(self: Any, ctxs: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        return x * 1, wrong if part == "outputs" else [(x * 2,)]

    def backward(self: Any, ctxs: Any, dy: torch.Tensor, **kwargs: Any) -> Any:
        return dy, [()], wrong

    methods: dict[str, Any] = {"fuser_forward": forward, "fuser_backward": backward}
    op = type("Odd", (_OneOfEach,), methods)()
    x = X.clone().requires_grad_()
    with pytest.raises(fuser.StateError, match=f"extra.{part}") as caught:
        fuser.Sequential(op, fuser.GELU())(x, torch.ones_like(x))[0].sum().backward()
    assert "Odd.fuser_" in str(caught.value)


@pytest.mark.parametrize("part", ["extras", "all"])
def test_what_a_backward_returns_for_extra_inputs_that_it_has_not_is_not_read(part: str) -> None:
    def backward(self: Any, ctxs: Any, dy: torch.Tensor, **kwargs: Any) -> Any:
        return dy * 2, [(), ()], dy if part == "all" else [dy, dy]

    window = (fuser.GELU, fuser.ConstantScale)
    body = {"side": "backward", "fuser_backward": backward, "window": window}
    fusion = type("Doubling", (FusedOperation,), body)
    x = X.clone().requires_grad_()
    fuser.Sequential(fuser.GELU(), fuser.ConstantScale(2.0), fusions=(fusion,))(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_an_op_that_fails_by_itself_is_not_blamed_for_what_it_returns() -> None:
    class Fails(_NoTuple):
        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            raise ValueError("not today")

    model = fuser.Sequential(fuser.Linear(8, 8), Fails(), fuser.Linear(8, 8), fuser.GELU())
    with pytest.raises(ValueError, match=r"^not today$"):
        model(X).sum().backward()


def test_a_fused_op_of_nothing_is_refused() -> None:
    with pytest.raises(fuser.InputError, match=said("fused-given-no-give", "_Bad")):
        _Bad([])


class _Overeager(fuser.BasicOperation):
    """Returns more gradients than it has parameters."""

    num_extra_inputs = 1
    num_extra_outputs = 1
    extra_outputs = 1
    parameter_gradients = 0
    extra_gradients = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        return input_ * 1, [(input_ * 2,) * self.extra_outputs]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **kwargs: Any) -> Any:
        return (
            grad_output,
            [(grad_output,) * self.parameter_gradients],
            [(grad_output,) * self.extra_gradients],
        )


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("extra_outputs", 2, ("_Overeager", "extra outputs", "[1]", "[2]")),
        ("extra_outputs", 0, ("_Overeager", "extra outputs", "[1]", "[0]")),
        ("parameter_gradients", 1, ("_Overeager", "0 parameters", "1 gradients")),
        ("extra_gradients", 0, ("_Overeager", "extra inputs", "[1]", "[0]")),
        ("extra_gradients", 3, ("_Overeager", "extra inputs", "[1]", "[3]")),
    ],
)
def test_an_op_that_returns_a_wrong_number_of_tensors_is_refused_with_the_numbers(
    attribute: str, value: int, words: tuple[str, ...]
) -> None:
    op = _Overeager()
    model = oracles.randomize(fuser.Sequential(fuser.Linear(8, 8), op))
    expected = results_of(model, (X, X))
    model.zero_grad()
    setattr(op, attribute, value)
    with pytest.raises(fuser.StateError) as caught:
        model(X, X)[0].sum().backward()
    assert_sentence(caught.value, words)
    assert all(parameter.grad is None for parameter in model.parameters())
    delattr(op, attribute)
    for found, wanted in zip(results_of(model, (X, X)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class _Withholding(fuser.FusedOperation):
    """Runs the forward of a scale and a MakeExtraOutput, and returns no extra output."""

    window = (fuser.ConstantScale, fuser.MakeExtraOutput)
    side = "forward"

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        return 2 * input_, [(), (None,)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("goes_to", ["the caller", "op 2 (AddExtraInput)"])
def test_an_extra_output_that_is_none_is_refused_with_its_reader(
    goes_to: str, training: bool
) -> None:
    make, add = fuser.MakeExtraOutput(), fuser.AddExtraInput()
    if goes_to != "the caller":
        make.set_extra_output_channel(0, "x", output_to_caller=False)
        add.set_extra_input_channel(0, "x")
    model = fuser.Sequential(fuser.ConstantScale(2.0), make, add, fusions=(_Withholding,))
    extras = [X] if goes_to == "the caller" else []
    with torch.set_grad_enabled(training), pytest.raises(fuser.StateError) as caught:
        model(X, *extras)
    assert_sentence(
        caught.value, ("_Withholding", "None", "extra output 0 of op 1 (MakeExtraOutput)", goes_to)
    )


@pytest.mark.parametrize("after", [[], [fuser.GELU()]], ids=["last", "first"])
@pytest.mark.parametrize("extras", [0, 1])
def test_an_op_that_returns_no_output_is_named(after: list[Any], extras: int) -> None:
    class Forgetful(Silent):
        num_extra_outputs = extras

        def op_forward(self, *args: Any, **kwargs: Any) -> Any:
            return None

        def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().fuser_forward(*args, **kwargs) if not extras else (None, [(X,)])

    for training in (True, False):
        model = fuser.Sequential(fuser.Bias(8), Forgetful(), *after)
        with torch.set_grad_enabled(training), pytest.raises(fuser.StateError) as caught:
            model(X)
        assert_sentence(caught.value, ("Forgetful", "ops 1 to 1", "None"))


@pytest.mark.parametrize("missing", ["forward", "backward"])
@pytest.mark.parametrize("extras", [0, 1])
def test_an_op_without_a_method_says_which_one(missing: str, extras: int) -> None:
    methods = {
        "op_forward": Silent.op_forward,
        "op_backward": Silent.op_backward,
        "fuser_forward": _Overeager.fuser_forward,
        "fuser_backward": _Overeager.fuser_backward,
    }
    prefix = "fuser" if extras else "op"
    del methods[f"{prefix}_{missing}"]
    kept = {name: method for name, method in methods.items() if name.startswith(prefix)}
    numbers = {"num_extra_inputs": extras, "num_extra_outputs": 0, "extra_outputs": 0}
    rest = {"parameter_gradients": 0, "extra_gradients": extras}
    half = type("Half", (fuser.BasicOperation,), {**kept, **numbers, **rest})
    with pytest.raises(fuser.StateError) as caught:
        fuser.Sequential(half())(x_of(3, 8).requires_grad_(), *[X] * extras).sum().backward()
    assert_sentence(caught.value, ("Half", f"{extras} extra inputs", f"{prefix}_{missing}"))


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_an_op_with_extra_tensors_is_not_run_by_the_methods_of_an_op_without(kind: str) -> None:
    half = type("Half", (Silent,), {f"num_extra_{kind}": 2})
    extras = [X, X] if kind == "inputs" else []
    for op in (half(), fuser.Sequential(half(), fuser.GELU())):
        with pytest.raises(fuser.StateError) as caught:
            op(X, *extras)
        assert_sentence(caught.value, ("Half", f"2 extra {kind}", "fuser_forward"))
    specs = half().extra_output_specs(TensorSpec((3, 8), torch.float32), ())
    assert len(specs) == (2 if kind == "outputs" else 0)


class _FailsInBackward(Silent):
    """Fails in backward as long as its flag is set."""

    is_failing = True

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        if self.is_failing:
            raise OverflowError("in the middle of backward")
        return grad_output, ()


def test_a_backward_that_fails_half_way_leaves_no_gradients() -> None:
    op = _FailsInBackward()
    model = oracles.randomize(fuser.Sequential(fuser.Linear(8, 8), op, fuser.Linear(8, 8)))
    x = x_of(3, 8).requires_grad_()
    y = model(x)
    with pytest.raises(OverflowError, match="in the middle of backward"):
        y.sum().backward(retain_graph=True)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    op.is_failing = False
    y.sum().backward()
    found = x.grad.clone()
    x.grad = None
    model(x).sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=0, atol=0)


# -- constructors -----------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fuser.BasicLinear(0, 4), ("BasicLinear", "in_features=0")),
        (lambda: fuser.BasicLinear(4, -2), ("BasicLinear", "out_features=-2")),
        (lambda: fuser.Linear(-1, 4), ("in_features=-1",)),
        (lambda: fuser.Bias(0), ("Bias", "0")),
        (lambda: fuser.Bias(-3), ("Bias", "-3")),
        (lambda: fuser.LayerNorm(0), ("LayerNorm", "0")),
        (lambda: fuser.RMSNorm((4, -1)), ("RMSNorm", "normalized_shape[1]=-1")),
        (lambda: fuser.LayerNorm(()), ("LayerNorm", "()")),
        (lambda: fuser.Dropout(2), ("Dropout", "p=2")),
        (lambda: fuser.Dropout(-0.5), ("Dropout", "p=-0.5")),
        (lambda: fuser.Dropout(NAN), ("Dropout", "p=nan")),
        (lambda: fuser.SwiGLU(glu_interleave_size=0), ("swiglu", "glu_interleave_size 0")),
        (lambda: fuser.ScaledSwiGLU(-4), ("swiglu", "glu_interleave_size -4")),
        (lambda: fuser.SiTUGLU(beta1=0.0), ("situglu", "0.0")),
        (lambda: fuser.SiTUGLU(beta2=-1.0), ("situglu", "-1.0")),
        (lambda: fuser.SiTUGLU(beta2=INF), ("situglu", "inf")),
        (lambda: fuser.ScaledSiTUGLU(beta1=NAN), ("situglu", "nan")),
        (lambda: fuser.ClampedSwiGLU(limit=-7.0), ("clamped_swiglu", "-7.0")),
        (lambda: fuser.ClampedSwiGLU(alpha=INF), ("clamped_swiglu", "inf")),
        (lambda: fuser.Linear(4, 4, dtype=torch.float64), ("torch.float64",)),
        (lambda: fuser.Bias(4, dtype=torch.int32), ("torch.int32",)),
        (lambda: fuser.LayerNorm(4, dtype=torch.float64), ("torch.float64",)),
        (lambda: fuser.Linear(4, 4, tensor_parallel_mode="diagonal"), ("'diagonal'", "'column'")),
        (lambda: fuser.Reshape((-1, -1)), ("Reshape", "(-1, -1)")),
        (lambda: fuser.Reshape((-2, 4)), ("Reshape", "(-2, 4)")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_constructor_arguments_are_refused(
    make: Callable[[], Any], words: tuple[str, ...]
) -> None:
    rng = torch.get_rng_state()
    with pytest.raises(fuser.InputError) as caught:
        make()
    assert_sentence(caught.value, words)
    assert torch.equal(torch.get_rng_state(), rng)


RECIPE = fuser.recipe.MXFP8BlockScaling()
OPS = [value for value in vars(fuser).values() if isinstance(value, type)]
OPS = [cls for cls in OPS if issubclass(cls, fuser.FusibleOperation) and cls.__name__ != "Identity"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: fuser.Linear(4, 4, False),
            sentence(
                "errors-without-give-others",
                "Linear",
                "3 arguments",
                "2 (in_features, out_features)",
                "Linear",
                "4, 4, bias=False",
            ),
        ),
        (
            lambda: fuser.RMSNorm(64, 1e-6),
            sentence(
                "errors-without-give-others",
                "RMSNorm",
                "2 arguments",
                "1 (normalized_shape)",
                "RMSNorm",
                "64, eps=1e-06",
            ),
        ),
        (
            lambda: fuser.GroupedLinear(2, 4, 4, False, device="cpu"),
            sentence(
                "errors-without-give-others",
                "GroupedLinear",
                "4 arguments",
                "3 (num_groups, in_features, out_features)",
                "GroupedLinear",
                "2, 4, 4, bias=False",
            ),
        ),
        (
            lambda: fuser.Dropout(0.5, True),
            sentence("errors-without-name-takes", "Dropout", "2 arguments", "1 (p)", "none"),
        ),
        (
            lambda: fuser.GELU(aproximate="none"),
            "GELU takes no argument 'aproximate'; it takes approximate, cache_quantized_input. "
            "Did you mean approximate?",
        ),
        (
            lambda: fuser.SiLU(inplace=True),
            "SiLU takes no argument 'inplace'; it takes cache_quantized_input.",
        ),
        (
            lambda: fuser.RMSNorm(4, elementwise_affine=False),
            "RMSNorm takes no argument 'elementwise_affine'; it takes normalized_shape, eps, "
            "device, dtype, zero_centered_gamma, sm_margin. A gain that is frozen, "
            "weight.requires_grad_(False), remains 1.",
        ),
        (
            lambda: fuser.Linear(4, 4, params_dtype=torch.float32),
            "Linear takes no argument 'params_dtype'; it takes in_features, out_features, bias, "
            "device, dtype, tensor_parallel_mode, tensor_parallel_group, sequence_parallel, "
            "rng_state_tracker_function, accumulate_into_main_grad. That is dtype here. "
            "fuser.modules.Linear takes the arguments of te.Linear.",
        ),
        (lambda: fuser.Bias(), "Bias got no size; it takes size, device, dtype, tensor_parallel, "),
        (
            lambda: fuser.Linear(4, in_features=3, out_features=4),  # type: ignore[misc]
            sentence("errors-twice-place", "Linear", "in_features", "in_features"),
        ),
        (
            lambda: fuser.autocast("cpu", dtype=torch.bfloat16),
            "autocast takes no argument 'dtype'; it takes enabled, calibrating, recipe, "
            "amax_reduction_group. torch.autocast(device, dtype=...) chooses a dtype, and the two "
            "nest.",
        ),
        (
            lambda: fuser.autocast(recip=RECIPE),
            "autocast takes no argument 'recip'; it takes enabled, calibrating, recipe, "
            "amax_reduction_group. Did you mean recipe?",
        ),
        *(
            (call, f"{name}. Enter its context around the call: with fuser.autocast(recipe=...).")
            for call, name in (
                (
                    lambda: fuser.Sequential(fuser.GELU(), recipe=RECIPE),
                    "Sequential takes no argument 'recipe'; it takes fusions, memory_budget",
                ),
                (
                    lambda: mlp()(X, recipe=RECIPE),
                    "The call of a Sequential takes no argument 'recipe'; it takes input, "
                    "op_kwargs",
                ),
                (
                    lambda: fuser.Linear(8, 8, device="cpu")(X, recipe=RECIPE),
                    "The call of a Linear takes no argument 'recipe'; it takes input, "
                    "basic_op_kwargs",
                ),
                (
                    lambda: fuser.GELU()(X, recipe=RECIPE),
                    "Op 0 (GELU) takes no keyword argument 'recipe'; it takes none",
                ),
                (
                    lambda: mlp().plan(X, recipe=RECIPE),
                    "The plan of a Sequential takes no argument 'recipe'; it takes input, "
                    "training, device",
                ),
                (
                    lambda: fuser.modules.LayerNormMLP(8, 8, device="cpu").plan(X, recipe=RECIPE),
                    "The plan of a LayerNormMLP takes no argument 'recipe'; it takes input, "
                    "training, device",
                ),
                (
                    lambda: fuser.modules.GroupedLinear(1, 8, 8).plan(X, [4], recipe=RECIPE),
                    "The plan of a GroupedLinear takes no argument 'recipe'; it takes inp, "
                    "m_splits, training, device",
                ),
            )
        ),
        (
            lambda: fuser.recipe.DelayedScaling(margn=1),
            "DelayedScaling takes no argument 'margn'; it takes margin, fp8_format, "
            "amax_history_len, amax_compute_algo, reduce_amax, backward_override, fp8_dpa, "
            "fp8_mha, scaling_factor_compute_algo, override_linear_precision. Did you mean margin?",
        ),
        (
            lambda: fuser.recipe.QParams(power_2_scales=True),
            "QParams takes no argument 'power_2_scales'; it takes power_2_scale, ",
        ),
        (
            lambda: fuser.recipe.MMParams(True, False),
            "MMParams got 2 arguments without a name, and takes 1 (use_split_accumulator).",
        ),
        (
            lambda: entered(fuser.quantized_model_init(recip=RECIPE)),
            "quantized_model_init takes no argument 'recip'; it takes enabled, recipe, "
            "preserve_high_precision_init_val. Did you mean recipe?",
        ),
        (
            lambda: fuser.Sequential([fuser.GELU(), fuser.GELU()]),
            sentence("sequential-takes-modules-argument", "a list", " Write Sequential(*modules)."),
        ),
        (
            lambda: fuser.Sequential(fuser.GELU() for _ in range(2)),
            sentence("sequential-takes-modules-argument", "a generator", " Write Sequential(*mod"),
        ),
        (
            lambda: fuser.Sequential(fuser.GELU(), fuser.SiLU),
            sentence("sequential-takes-modules-argument", "the class SiLU", " Write SiLU(...)."),
        ),
        (
            lambda: fuser.Sequential(fuser.GELU(), "GELU"),
            sentence("sequential-takes-modules-argument", "'GELU'", ""),
        ),
    ],
)
def test_wrong_arguments_are_named_with_what_to_write(
    call: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(fuser.InputTypeError) as caught:
        call()
    assert str(caught.value).startswith(sentence)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("cls", [*fuser.recipe.RECIPES, fuser.recipe.CustomRecipe])
def test_every_recipe_names_an_argument_that_it_does_not_take(cls: type[Any]) -> None:
    with pytest.raises(
        fuser.InputTypeError, match=said("errors-takes-no-argument", cls.__name__, "'colour'")
    ):
        cls(colour=1)


@pytest.mark.parametrize(
    ("make", "op", "size"),
    [
        (lambda size: fuser.Linear(size, 4), "Linear", "in_features"),
        (lambda size: fuser.Linear(4, size), "Linear", "out_features"),
        (lambda size: fuser.modules.Linear(size, 4), "Linear", "in_features"),
        (lambda size: fuser.BasicLinear(4, size), "BasicLinear", "out_features"),
        (fuser.Bias, "Bias", "size"),
        (fuser.RMSNorm, "RMSNorm", "normalized_shape"),
        (lambda size: fuser.LayerNorm((3, size)), "LayerNorm", "normalized_shape[1]"),
        (fuser.AdaptiveLayerNorm, "AdaptiveLayerNorm", "hidden_size"),
        (lambda size: fuser.GroupedLinear(size, 4, 4), "GroupedLinear", "num_groups"),
        (lambda size: fuser.modules.GroupedLinear(2, 4, size), "GroupedLinear", "out_features"),
        (lambda size: fuser.moe.Router(8, size, 1), "Router", "num_experts"),
    ],
)
def test_a_size_is_a_positive_integer(make: Callable[[Any], Any], op: str, size: str) -> None:
    for given, hint in (("4", True), (4.0, True), (4.5, False), ("four", False), (True, False)):
        with pytest.raises(fuser.InputTypeError) as caught:
            make(given)
        sentence = f"{op} takes an int as {size}; got {given!r}."
        assert str(caught.value) == sentence + (f" Write {size}=4." if hint else "")
    for given in (0, -4):
        with pytest.raises(fuser.InputError) as refused:
            make(given)
        assert str(refused.value) == f"{op} got {size}={given}; it must be positive."
    make(np.int64(4))


@pytest.mark.parametrize("cls", OPS, ids=lambda cls: cls.__name__)
def test_every_op_names_an_argument_that_it_does_not_take(cls: type[Any]) -> None:
    if inspect.isabstract(cls) or cls.__module__ == "fuser.op.fused":
        pytest.skip("nobody makes one")
    with pytest.raises(
        fuser.InputTypeError, match=said("errors-takes-no-argument", cls.__name__, "'colour'")
    ):
        cls(colour=1)
    assert "args" not in inspect.signature(cls).parameters


def test_a_type_error_of_a_body_remains_and_classes_of_users_are_named() -> None:
    with pytest.raises(TypeError, match="invalid combination") as caught:
        fuser.Linear(8, 4, device=1.5)
    assert type(caught.value) is TypeError

    class Own(fuser.Linear):
        def __init__(self, size: int) -> None:
            super().__init__(size, size, False)

    with pytest.raises(
        fuser.InputTypeError, match=said("errors-without-give-others", "Linear", "3 arguments")
    ):
        Own(4)
    with pytest.raises(TypeError, match=r"Own.__init__\(\) takes 2 positional") as caught:
        Own(4, 5)
    assert type(caught.value) is TypeError


GATED = (fuser.Linear(8, 16), fuser.SwiGLU(), fuser.Linear(16, 8))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            lambda: fuser.Sequential(*GATED),
            sentence(
                "grouped-linear-shape-last-dimension",
                "Linear(16, 8)",
                (3, 8),
                "16. It is op 3 (module 2); its input is the output of SwiGLU, op 2 (module 1), "
                "which halves the last dimension, from 16 to 8",
            ),
        ),
        (
            lambda: fuser.Sequential({"up": GATED[0], "gate": GATED[1], "down": GATED[2]}),
            sentence(
                "grouped-linear-shape-last-dimension",
                "Linear(16, 8)",
                (3, 8),
                "16. It is op 3 (module down); its input is the output of SwiGLU, op 2 (module "
                "gate), which halves the last dimension, from 16 to 8",
            ),
        ),
        (
            lambda: fuser.Sequential(fuser.GELU(), torch.nn.Identity(), fuser.RMSNorm(8), GATED[2]),
            sentence(
                "grouped-linear-shape-last-dimension",
                "Linear(16, 8)",
                (3, 8),
                "16. It is op 2 (module 3); its input is the output of RMSNorm, op 1 (module 2)",
            ),
        ),
        (
            lambda: fuser.Sequential(GATED[2], fuser.GELU()),
            sentence(
                "grouped-linear-shape-last-dimension",
                "Linear(16, 8)",
                (3, 8),
                "16. It is op 0 (module 0), the first of its pipeline",
            ),
        ),
        (
            lambda: fuser.ops.OperationFuser([fuser.GELU(), GATED[2]]),
            sentence(
                "grouped-linear-shape-last-dimension",
                "Linear(16, 8)",
                (3, 8),
                "16. It is op 1; its input is the output of GELU, op 0",
            ),
        ),
        (
            lambda: GATED[2],
            sentence("grouped-linear-shape-last-dimension", "Linear(16, 8)", (3, 8), 16),
        ),
    ],
)
def test_an_op_that_cannot_take_its_input_is_placed_between_its_neighbours(
    model: Callable[[], Any], sentence: str
) -> None:
    for _ in range(2):
        with pytest.raises(fuser.InputError) as caught:
            model()(X)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_a_running_model_places_the_op_too(fusions: Any) -> None:
    """Where a plan is known, and the op itself finds the wrong shape."""
    model = fuser.Sequential(fuser.GELU(), fuser.BasicLinear(8, 4), fusions=fusions)
    for x in (X, X, X):
        model(x)
    with pytest.raises(fuser.InputError) as caught:
        model(x_of(3, 7))
    assert str(caught.value) == sentence(
        "grouped-linear-shape-last-dimension",
        "BasicLinear(8, 4)",
        (3, 7),
        "8. It is op 1 (module 1); its input is the output of GELU, op 0 (module 0)",
    )
    assert len(model.plans) == 1


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize(
    ("make", "name", "shape", "words"),
    [
        (lambda: fuser.Linear(8, 8), "weight", (4, 8), "Linear(8, 8) has a weight of shape (4, 8)"),
        (lambda: fuser.Linear(8, 8), "weight", (8, 4), "Linear(8, 8) has a weight of shape (8, 4)"),
        (lambda: fuser.Linear(8, 8), "bias", (4,), "has a bias of shape (4,); it must be (8,)."),
        (lambda: fuser.Bias(8), "bias", (4,), "Bias, whose output has 8 features, has a bias of"),
        (lambda: fuser.RMSNorm(8), "weight", (4,), "RMSNorm((8,)) has a weight of shape (4,)"),
        (lambda: fuser.LayerNorm(8), "bias", (4,), "LayerNorm((8,)) has a bias of shape (4,)"),
    ],
)
def test_a_parameter_of_another_shape_is_named_and_no_op_after_it(
    make: Callable[[], Any], name: str, shape: tuple[int, ...], words: str, is_running: bool
) -> None:
    model = oracles.randomize(fuser.Sequential(make(), fuser.GELU(), fuser.Bias(8)))
    expected = model(X) if is_running else None
    kept = getattr(model[0], name)
    setattr(model[0], name, torch.nn.Parameter(torch.zeros(shape)))
    with pytest.raises(fuser.InputError) as caught:
        model(X)
    assert_sentence(caught.value, (words, str(shape), f"it must be {tuple(kept.shape)}"))
    setattr(model[0], name, kept)
    assert expected is None or torch.equal(model(X), expected)


def test_a_linear_without_bias_cannot_be_given_one() -> None:
    linear: Any = oracles.randomize(fuser.Linear(8, 4, bias=False))
    expected = linear(X)
    with pytest.raises(fuser.InputError, match=said("linear-made-bias-false")):
        linear.bias = torch.nn.Parameter(torch.ones(4))
    assert linear.bias is None
    linear.bias = None
    torch.testing.assert_close(linear(X), expected)


# -- what looks bad and works -------------------------------------------------------------------

WORKS = (
    mlp,
    sequence(fuser.RMSNorm(8), fuser.LayerNorm(8), fuser.L2Normalization()),
    sequence(fuser.BasicLinear(8, 8), fuser.ConstantScale(2.0)),
    sequence(fuser.BasicLinear(8, 8), fuser.ConstantScale(2.0), fuser.AddExtraInput()),
    sequence(fuser.Linear(8, 8), fuser.AddExtraInput(), fuser.MakeExtraOutput(), fuser.RMSNorm(8)),
    sequence(fuser.GELU(), fuser.MakeExtraOutput(), fuser.BasicLinear(8, 4)),
    sequence(fuser.Bias(8), fuser.SwiGLU(), fuser.ScaledSReLU()),
    sequence(fuser.SwiGLU(glu_interleave_size=2), fuser.SiTUGLU(), fuser.ReLU()),
    sequence(fuser.Reshape((-1, 4)), fuser.Dropout(0.5), fuser.Bias(4)),
)


def extras_for(model: fuser.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.zeros(x.shape if isinstance(op, fuser.AddExtraInput) else x.shape[:-1])
        for op in model
        for _ in range(getattr(op, "num_extra_inputs", 0))
    ]


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 8)])
@pytest.mark.parametrize("make", WORKS)
def test_an_empty_batch_works(make: Callable[[], fuser.Sequential], shape: tuple[int, ...]) -> None:
    model = make()
    x = torch.zeros(shape, requires_grad=True)
    extras = [extra.requires_grad_() for extra in extras_for(model, x)]
    outputs = oracles.as_tuple(model(x, *extras))
    assert all(y.numel() == 0 and y.shape[-1] > 0 for y in outputs)
    torch.autograd.backward([y.sum() for y in outputs])
    assert x.grad.shape == x.shape
    for extra in extras:
        assert extra.grad.shape == extra.shape
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter))
    full = torch.ones(3, 8)
    assert model(full, *extras_for(model, full)) is not None


@pytest.mark.parametrize("make", WORKS)
def test_a_non_contiguous_input_works(make: Callable[[], fuser.Sequential]) -> None:
    values = oracles.random_tensor((4, 2, 8), torch.float32, 5)
    results = []
    for x in (values.clone(), values.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        model = make().eval()
        x.requires_grad_()
        outputs = oracles.as_tuple(model(x, *extras_for(model, x)))
        torch.autograd.backward([y.square().sum() for y in outputs])
        results.append([*outputs, x.grad, *(p.grad for p in model.parameters())])
    assert not x.is_contiguous()
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_empty_sequential_returns_its_input() -> None:
    assert fuser.Sequential()(X) is X
    with pytest.raises(fuser.InputError, match=said("segments-takes", None, "0 extra inputs", 1)):
        fuser.Sequential()(X, X)


# -- what is given instead of a recipe, a fusion or a name ------------------------------


class Squares(FusedOperation):
    """A fusion that only its ``window`` may keep from being used."""

    side = "forward"
    window: ClassVar[Any] = (Silent,)

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        return input_, [()]


def over(given: Any) -> type[FusedOperation]:
    return type("Over", (Squares,), {"window": given})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fuser.autocast(fuser.recipe.MXFP8BlockScaling()),
            said("contexts-enabled-first-argument", None, None, "autocast"),
        ),
        (
            lambda: fuser.autocast(enabled="no"),
            said("contexts-enabled-first-argument", None, "'no'"),
        ),
        (
            lambda: fuser.autocast(enabled=None),
            said("contexts-enabled-first-argument", None, "None"),
        ),
        (lambda: fuser.autocast(lambda x: x), said("contexts-enabled-first-argument")),
        (
            lambda: fuser.quantized_model_init(fuser.recipe.MXFP8BlockScaling()).__enter__(),
            said("contexts-enabled-first-argument", None, None, "quantized_model_init"),
        ),
        (
            lambda: fuser.quantized_model_init(recipe="mxfp8").__enter__(),
            said("contexts-takes-fuser-classes", "quantized_model_init", "'mxfp8'"),
        ),
        (
            lambda: fuser.Sequential(Silent(), fusions=Squares),
            said("pipeline-sequence-fused-operation"),
        ),
        (lambda: setattr(mlp(), "fusions", Squares), said("pipeline-sequence-fused-operation")),
        (
            lambda: fuser.Sequential(Silent(), fusions=(Squares([Silent()]),)),
            said("pipeline-sequence-fused-operation"),
        ),
        (
            lambda: fuser.Sequential(fusions=(over((Silent(),)),)),
            said("window-tuple-op-classes", "Over", holds("(Silent(),")),
        ),
        (
            lambda: fuser.Sequential(fusions=(over(("Silent",)),)),
            said("window-tuple-op-classes", "Over", ("Silent",)),
        ),
        (lambda: fuser.Sequential(fusions=(over(Silent),)), said("window-tuple-op-classes")),
    ],
)
def test_another_thing_than_a_recipe_or_a_fusion_is_refused_at_once(make: Any, words: str) -> None:
    with pytest.raises(fuser.errors.InputTypeError, match=words):
        make()


@pytest.mark.parametrize("length", [0, -1, 2.5, None])
def test_a_history_of_no_steps_is_refused(length: Any) -> None:
    with pytest.raises(fuser.InputError, match=said("recipe-delayed-history-len", length)):
        fuser.recipe.DelayedScaling(amax_history_len=length)


def test_names_of_te_that_are_elsewhere_or_absent_say_so() -> None:
    for name in fuser.modules.__all__:
        assert hasattr(fuser, name) or name in ("LayerNormLinear", "LayerNormMLP")
    with pytest.raises(AttributeError, match=r"it is fuser\.modules\.LayerNormMLP"):
        fuser.LayerNormMLP  # noqa: B018
    with pytest.raises(AttributeError, match="has no attention"):
        fuser.TransformerLayer  # noqa: B018
    for name, words in {
        "Secuential": "'Secuential'. Did you mean fuser.Sequential?",
        "RmsNorm": "'RmsNorm'. Did you mean fuser.RMSNorm?",
        "moe_permute": "'moe_permute': it is fuser.moe.permute, and in a pipeline the op "
        "fuser.MoeDispatch.",
        "Colwise": "'Colwise': it is fuser.distributed.Colwise.",
        "MXFP8BlockScaling": "'MXFP8BlockScaling': it is fuser.recipe.MXFP8BlockScaling.",
        "convert_to_float8_training": "'convert_to_float8_training': it is fuser.convert(model, "
        "recipe=fuser.recipe.Float8CurrentScaling()).",
        "apply_to_llama": "'apply_to_llama': fuser.convert(model) finds what it can run, in models "
        "of any family.",
        "Float8LinearConfig": "'Float8LinearConfig': a recipe of fuser.recipe says it, in "
        "fuser.convert(model, recipe=...).",
        "math": "'math'",  # which a module of this library imports
        "__wrapped__": "'__wrapped__'",
        "Anything": "'Anything'",
    }.items():
        with pytest.raises(AttributeError) as caught:
            getattr(fuser, name)
        assert str(caught.value) == f"module 'fuser' has no attribute {words}"
    for module, name, words in (
        (fuser.recipe, "DelayedScalng", ". Did you mean fuser.recipe.DelayedScaling?"),
        (fuser.recipe, "autocast", ": it is fuser.autocast."),
        (fuser.recipe, "MXFP8", ": it is fuser.recipe.MXFP8BlockScaling."),
        (fuser.recipe, "NVFP4", ": it is fuser.recipe.NVFP4BlockScaling."),
        (fuser.recipe, "dataclas", ""),  # not a name of this library
        (fuser.modules, "LayerNormMlp", ". Did you mean fuser.modules.LayerNormMLP?"),
        (fuser.modules, "RMSNorm", ": it is fuser.RMSNorm."),
        (fuser.modules, "TransformerLayer", ": this library has no attention."),
        (fuser.modules, "__wrapped__", ""),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(module, name)
        assert str(caught.value) == f"module {module.__name__!r} has no attribute {name!r}{words}"
