"""The executor: one autograd node, no wasted gradient, and what autograd's users expect of one."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import linecache
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import oracles
import pytest
import torch
from models import mlp
from pipeline_kernels import on_kernels
from said import holds, said
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fuser
from fuser.op import BasicOperation, FusedOperation, OperationContext
from fuser.source import SourceCode
from fuser.specs import TensorSpec

aten = torch.ops.aten
GEMMS = {aten.mm.default, aten.addmm.default, aten.addmm_.default, aten.bmm.default}


def block(in_place: bool = False, **kwargs: Any) -> fuser.Sequential:
    """Every kind of wiring: x and the normed sum go out, an extra comes in, a channel inside."""
    ops = (
        fuser.MakeExtraOutput(in_place=in_place),
        fuser.RMSNorm(8),
        fuser.MakeExtraOutput().set_extra_output_channel(0, "normed", output_to_caller=False),
        fuser.Linear(8, 16),
        fuser.SwiGLU(),
        fuser.Linear(8, 8),
        fuser.AddExtraInput(in_place=in_place),
        fuser.MakeExtraOutput(in_place=in_place),
        fuser.LayerNorm(8),
        fuser.BasicLinear(8, 8),
        fuser.ConstantScale(0.5),
        fuser.AddExtraInput().set_extra_input_channel(0, "normed"),
    )
    return oracles.randomize(fuser.Sequential(*ops, **kwargs))


def plain_block(
    x: torch.Tensor,
    gamma: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor,
    w3: torch.Tensor,
    extra: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """:func:`block` in plain torch."""
    normed = oracles.rmsnorm()(x, gamma)
    hidden = oracles.gated(oracles.silu)(oracles.linear_bias(normed, w1, b1))
    total = oracles.linear_bias(hidden, w2, b2) + extra
    y = 0.5 * (oracles.layernorm()(total, gain, shift) @ w3.T) + normed
    return y, x.clone(), total


def inputs(*shapes: tuple[int, ...], requires_grad: bool = True) -> list[torch.Tensor]:
    return [
        oracles.random_tensor(shape, torch.float32, 30 + number).requires_grad_(requires_grad)
        for number, shape in enumerate(shapes)
    ]


def gradients(
    outputs: Sequence[torch.Tensor], leaves: Iterable[torch.Tensor], **kwargs: Any
) -> list[torch.Tensor | None]:
    """Gradients for one random output gradient each."""
    cotangents = [oracles.random_tensor(y.shape, y.dtype, 90 + n) for n, y in enumerate(outputs)]
    return list(torch.autograd.grad(outputs, list(leaves), cotangents, **kwargs))


def assert_same(actual: Iterable[Any], expected: Iterable[Any], **tolerances: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerances)


class _Spy(BasicOperation):
    """Doubles its input, saves it in any case, and remembers it weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: list[weakref.ref[torch.Tensor]] = []
        self.started = 0

    def pre_first_fuser_forward(self) -> None:
        time.sleep(0.05)
        self.started += 1

    def op_forward(
        self, ctx: OperationContext, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        double = input_ * 2
        ctx.save_for_backward(double)
        self.refs.append(weakref.ref(double))
        return double + 0

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        assert ctx.saved_tensors is not None
        (double,) = ctx.saved_tensors
        assert double is not None
        return grad_output * 2, ()


class _Gemms(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in GEMMS
        return func(*args, **(kwargs or {}))


# -- one node, and nothing that nobody asked for ---------------------------------------


def test_a_pipeline_is_one_autograd_node() -> None:
    x, extra = inputs((3, 8), (3, 8))
    y, first, second = block()(x, extra)
    assert y.grad_fn is first.grad_fn is second.grad_fn
    names = {type(node).__name__ for node, _ in y.grad_fn.next_functions if node is not None}
    assert names == {"AccumulateGrad"}
    leaves = [node.variable for node, _ in y.grad_fn.next_functions if node is not None]
    assert leaves[0] is x
    assert leaves[-1] is extra


def test_all_results_equal_plain_torch() -> None:
    model = block()
    x, extra = inputs((3, 8), (3, 8))
    outputs = model(x, extra)
    found = gradients(outputs, [x, *model.parameters(), extra])
    leaves = [oracles.leaf(t, torch.float64) for t in (x, *model.parameters(), extra)]
    expected = plain_block(*leaves)
    expected_grads = gradients(expected, leaves)
    for actual, exact in zip([*outputs, *found], [*expected, *expected_grads], strict=True):
        torch.testing.assert_close(actual, exact.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize(
    ("trainable", "x_requires_grad", "gemms"),
    [
        ({"w1", "b1", "w2", "b2"}, True, 4),
        ({"w1", "b1", "w2", "b2"}, False, 3),
        ({"w2"}, False, 1),
        ({"b2"}, False, 0),
        ({"b1"}, False, 1),
        ({"w1"}, False, 2),
        (set(), True, 2),
        ({"w2"}, True, 3),
    ],
)
def test_backward_runs_only_the_gemms_that_are_wanted(
    trainable: set[str], x_requires_grad: bool, gemms: int, fusions: Any
) -> None:
    model = mlp(fusions=fusions)
    for name, parameter in zip(("w1", "b1", "w2", "b2"), model.parameters(), strict=True):
        parameter.requires_grad_(name in trainable)
    (x,) = inputs((3, 8), requires_grad=x_requires_grad)
    y = model(x)
    with _Gemms() as counted:
        y.backward(torch.ones(3, 8))
    assert counted.count == gemms
    has_gradient = {
        name
        for name, parameter in zip(("w1", "b1", "w2", "b2"), model.parameters(), strict=True)
        if parameter.grad is not None
    }
    assert has_gradient == trainable
    assert (x.grad is not None) == x_requires_grad


def saved_by(call: Callable[..., Any]) -> tuple[list[tuple[int, ...]], Any]:
    """Shapes of the tensors that autograd keeps for ``call``, and its result."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    return shapes, result


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_saved(mode: Any) -> None:
    x, extra = inputs((3, 8), (3, 8))
    expected = block()(x, extra)
    with mode():
        shapes, outputs = saved_by(lambda: block()(x, extra))
    assert shapes == []
    assert all(y.grad_fn is None for y in outputs)
    assert_same(outputs, expected)


def test_nothing_is_saved_if_nothing_is_trainable() -> None:
    model = block().requires_grad_(False)
    x, extra = inputs((3, 8), (3, 8), requires_grad=False)
    shapes, outputs = saved_by(lambda: model(x, extra))
    assert shapes == []
    assert not any(y.requires_grad for y in outputs)


def test_a_linear_saves_what_its_gradients_read() -> None:
    for x_grad, weight_grad, expected in (
        (True, True, [(3, 8), (5, 8)]),
        (False, True, [(3, 8)]),
        (True, False, [(5, 8)]),
    ):
        (x,) = inputs((3, 8), requires_grad=x_grad)
        model = fuser.Sequential(fuser.BasicLinear(8, 5)).requires_grad_(weight_grad)
        shapes, _ = saved_by(lambda model=model, x=x: model(x))
        assert shapes == expected


@pytest.mark.parametrize(
    "frozen",
    [
        lambda: fuser.RMSNorm(8),
        lambda: fuser.LayerNorm(8),
        lambda: fuser.L2Normalization(),
        lambda: fuser.Linear(8, 8),
        lambda: fuser.GELU(),
        lambda: fuser.Dropout(0.5),
        _Spy,
    ],
    ids=["RMSNorm", "LayerNorm", "L2Normalization", "Linear", "GELU", "Dropout", "custom"],
)
def test_ops_before_the_first_gradient_save_nothing(frozen: Callable[[], Any]) -> None:
    model = fuser.Sequential(frozen().requires_grad_(False), fuser.BasicLinear(8, 5))
    (x,) = inputs((3, 8), requires_grad=False)
    shapes, _ = saved_by(lambda: model(x))
    assert shapes == [(3, 8)]


def test_a_frozen_extra_input_gets_no_gradient() -> None:
    x, extra = inputs((3, 8), (3, 8))
    model = block()
    y = model(x, extra.requires_grad_(False))[0]
    y.sum().backward()
    assert extra.grad is None
    assert x.grad is not None


# -- forward and backward in any order --------------------------------------------------


def test_several_forwards_before_one_backward() -> None:
    model = mlp()
    batches = [oracles.random_tensor((n, 8), torch.float32, n) for n in (2, 3, 5)]
    losses = [model(x).square().sum() for x in batches]
    sum(losses).backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for x in reversed(batches):
        model(x).square().sum().backward()
    assert_same(together, [p.grad for p in model.parameters()])


def test_backwards_may_come_in_any_order() -> None:
    model = mlp()
    first, second = inputs((2, 8), (4, 8))
    expected = [gradients([model(x)], [x, *model.parameters()]) for x in (first, second)]
    y_first, y_second = model(first), model(second)
    assert_same(gradients([y_second], [second, *model.parameters()]), expected[1])
    assert_same(gradients([y_first], [first, *model.parameters()]), expected[0])


def test_a_pipeline_can_follow_itself() -> None:
    model = mlp()
    (x,) = inputs((3, 8))
    leaves = [oracles.leaf(t, torch.float64) for t in (x, *model.parameters())]

    def plain(x: torch.Tensor, w1: Any, b1: Any, w2: Any, b2: Any) -> torch.Tensor:
        for _ in range(2):
            x = oracles.linear_bias(oracles.gelu(oracles.linear_bias(x, w1, b1)), w2, b2)
        return x

    expected = gradients([plain(*leaves)], leaves)
    found = gradients([model(model(x))], [x, *model.parameters()])
    assert_same(found, [g.float() for g in expected], rtol=1e-4, atol=1e-3)


def test_one_op_may_stand_twice_in_a_pipeline() -> None:
    linear: Any = oracles.randomize(fuser.Linear(8, 8))
    model = fuser.Sequential(linear, fuser.GELU(), linear)
    (x,) = inputs((3, 8))
    leaves = [oracles.leaf(t, torch.float64) for t in (x, linear.weight, linear.bias)]
    hidden = oracles.gelu(oracles.linear_bias(*leaves))
    expected = gradients([oracles.linear_bias(hidden, *leaves[1:])], leaves)
    found = gradients([model(x)], [x, linear.weight, linear.bias])
    assert_same(found, [g.float() for g in expected], rtol=1e-4, atol=1e-4)


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    model = block()
    x, extra = inputs((3, 8), (3, 8))
    outputs = model(x, extra)
    leaves = [x, extra, *model.parameters()]
    first = gradients(outputs, leaves, retain_graph=True)
    second = gradients(outputs, leaves)
    assert_same(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(outputs, leaves)


class _ManyDropouts(torch.nn.Module):
    """Random numbers inside: a recomputation has to draw the same."""

    def __init__(self) -> None:
        super().__init__()
        self.pipeline = fuser.Sequential(fuser.Linear(8, 8), fuser.Dropout(0.5), fuser.GELU())
        oracles.randomize(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pipeline(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("make", [mlp, _ManyDropouts])
def test_activation_checkpointing_changes_nothing(
    make: Callable[[], torch.nn.Module], use_reentrant: bool
) -> None:
    model = make()
    results = []
    for wrap in (False, True):
        (x,) = inputs((3, 8))
        torch.manual_seed(5)
        y = checkpoint(model, x, use_reentrant=use_reentrant) if wrap else model(x)
        model.zero_grad()
        y.square().sum().backward()
        results.append([y, x.grad, *[p.grad.clone() for p in model.parameters()]])
    assert_same(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_a_block_with_extras_changes_nothing(use_reentrant: bool) -> None:
    model = block()
    results = []
    for wrap in (False, True):
        x, extra = inputs((3, 8), (3, 8))
        args = (x, extra)
        outputs = checkpoint(model, *args, use_reentrant=use_reentrant) if wrap else model(*args)
        model.zero_grad()
        cotangents = [oracles.random_tensor(y.shape, y.dtype, 9) for y in outputs]
        torch.autograd.backward(outputs, cotangents)
        grads = [p.grad.clone() for p in model.parameters()]
        results.append([*outputs, x.grad, extra.grad, *grads])
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("recipe", [None, fuser.recipe.MXFP8BlockScaling()], ids=["plain", "mxfp8"])
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_selective_checkpointing_may_keep_what_a_gemm_returns(recipe: Any, fusions: Any) -> None:
    contexts = functools.partial(
        create_selective_checkpoint_contexts, [*GEMMS, aten.linear.default]
    )
    ops: tuple[Any, ...]
    ops = (fuser.Linear(32, 32), fuser.AddExtraInput(), fuser.Linear(32, 32), fuser.GELU())
    ops += (fuser.BasicLinear(32, 32), fuser.ConstantScale(2.0), fuser.AddExtraInput())
    model = oracles.randomize(fuser.Sequential(*ops, fusions=fusions))
    leaves = [*inputs((32, 32), (32, 32), (32, 32)), *model.parameters()]

    def run(*given: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y: torch.Tensor = model(*given)
            return y

    expected = gradients([run(*leaves[:3])], leaves)
    y = checkpoint(run, *leaves[:3], use_reentrant=False, context_fn=contexts)
    assert_same(gradients([y], leaves), expected, rtol=0, atol=0)


def test_a_copy_made_between_forward_and_backward_is_independent() -> None:
    model = mlp()
    (x,) = inputs((3, 8))
    y = model(x)
    twin = copy.deepcopy(model)
    gradients_of_model = gradients([y], model.parameters())
    assert all(p.grad is None for p in twin.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(gradients([twin(x)], twin.parameters()), gradients_of_model)
    assert not model(x).any()


# -- parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_a_replaced_parameter_is_the_one_that_is_used(fusions: Any) -> None:
    model = mlp(fusions=fusions)
    (x,) = inputs((3, 8))
    model(x).sum().backward()
    old = model[0].weight
    old.grad = None
    new = torch.nn.Parameter(torch.zeros_like(old))
    model[0].weight = new
    model[2].bias = torch.nn.Parameter(torch.full((8,), 7.0))
    y = model(x)
    hidden = oracles.gelu(model[0].bias)
    torch.testing.assert_close(y, (hidden @ model[2].weight.T + 7.0).expand(3, 8))
    y.sum().backward()
    assert new.grad is not None
    assert model[2].bias.grad is not None
    assert old.grad is None


def test_a_parameter_replaced_by_another_dtype_is_planned_anew() -> None:
    model = fuser.Sequential(fuser.BasicLinear(8, 8), fuser.GELU())
    (x,) = inputs((3, 8))
    assert model(x).dtype == torch.float32
    model[0].weight = torch.nn.Parameter(model[0].weight.detach().bfloat16())
    y = model(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert model[0].weight.grad.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    assert len(model.plans) == 2


def test_a_parameter_replaced_between_forward_and_backward_gets_no_gradient() -> None:
    model = mlp()
    (x,) = inputs((3, 8))
    expected = gradients([model(x)], [x, model[2].weight])
    old = model[2].weight
    y = model(x)
    model[2].weight = torch.nn.Parameter(torch.zeros_like(old))
    assert_same(gradients([y], [x, old]), expected)


def test_functional_call_uses_the_given_parameters() -> None:
    model = mlp()
    (x,) = inputs((3, 8))
    given = {name: oracles.leaf(p * 2) for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, given, (x,))
    found = gradients([y], given.values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert_same(found, gradients([model(x)], model.parameters()))


def test_freezing_and_unfreezing_takes_effect_at_the_next_call() -> None:
    model = mlp()
    (x,) = inputs((3, 8), requires_grad=False)
    for frozen in (True, False, True):
        model.zero_grad()
        model[0].requires_grad_(not frozen)
        model(x).sum().backward()
        assert (model[0].weight.grad is None) == frozen
        assert model[2].weight.grad is not None
    assert len(model.plans) == 2


# -- modes --------------------------------------------------------------------------------


def test_evaluation_and_training_alternate() -> None:
    model = fuser.Sequential(fuser.Linear(8, 8), fuser.Dropout(0.5), fuser.Linear(8, 8))
    (x,) = inputs((3, 8))
    for _ in range(2):
        evaluated = model.eval()(x)
        with torch.no_grad():
            assert_same([model(x)], [evaluated])
        with torch.inference_mode():
            inferred = model(x)
        assert inferred.is_inference()
        assert_same([inferred.clone()], [evaluated])
        assert not torch.equal(model.train()(x), evaluated)
        evaluated.sum().backward()
    assert len(model.plans) == 2


def test_torch_autocast_runs_in_bf16_and_gives_fp32_gradients() -> None:
    model = block()
    x, extra = inputs((3, 8), (3, 8))
    leaves = [x, *model.parameters(), extra]
    exact = plain_block(*(leaf.double() for leaf in leaves))
    expected = gradients(model(x, extra), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x, extra)
    # Backward runs outside the region, as torch recommends.
    found = gradients([y.float() for y in outputs], leaves)
    assert [g.dtype for g in found] == [torch.float32] * len(found)
    for actual, truth in zip([*outputs, *found], [*exact, *expected], strict=True):
        error = (actual.double() - truth.double()).norm() / truth.double().norm()
        assert error < 0.05
    assert len(model.plans) == 2
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        mlp_output = mlp()(x)
    assert mlp_output.dtype == torch.bfloat16
    assert_same(gradients(model(x, extra), leaves), expected)


# All of them: what counts is whether both are dtypes, and differ.
@pytest.mark.parametrize(
    "dtypes",
    [*itertools.product([None, torch.bfloat16], [None, torch.bfloat16, torch.float16])],
    ids=str,
)
def test_a_backward_runs_in_the_dtypes_of_its_forward_whatever_autocast_is_around_it(
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
) -> None:
    inside, around = dtypes
    model = mlp(64, 128)
    (x,) = inputs((32, 64))
    leaves, dy = [x, *model.parameters()], torch.randn(32, 64)

    def run(around: torch.dtype | None) -> list[torch.Tensor]:
        with torch.autocast("cpu", inside, enabled=inside is not None):
            y = model(x)
        with torch.autocast("cpu", around, enabled=around is not None):
            return list(torch.autograd.grad(y, leaves, dy.to(y.dtype)))

    assert_same(run(around), run(None))


# -- higher derivatives -----------------------------------------------------------------------


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_a_graph_of_the_gradients_is_refused_with_a_sentence(fusions: Any) -> None:
    model = mlp(fusions=fusions)
    (x,) = inputs((3, 8))
    with pytest.raises(fuser.StateError, match=said("diagnose-pipeline-differentiated-twice")):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(fuser.StateError, match=said("diagnose-pipeline-differentiated-twice")):
        model(x).sum().backward(create_graph=True)
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    model(x).sum().backward()
    y = x.detach().requires_grad_()
    mlp(fusions=fusions)(y).sum().backward()
    assert_same([x.grad], [y.grad])


@pytest.mark.parametrize("make", [mlp, lambda: fuser.Sequential(fuser.GELU())])
def test_a_second_derivative_by_the_input_is_refused_and_not_zero(make: Any) -> None:
    model = make()
    (x,) = inputs((3, 8))
    with pytest.raises(fuser.StateError, match=said("diagnose-pipeline-differentiated-twice")):
        torch.autograd.functional.hessian(lambda x: model(x).sum(), x.detach())


# -- which outputs the loss uses ----------------------------------------------------------------


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_the_loss_may_use_any_of_the_outputs(used: tuple[int, ...], fusions: Any) -> None:
    model = block(fusions=fusions)
    x, extra = inputs((3, 8), (3, 8))
    leaves = [x, *model.parameters(), extra]
    outputs = model(x, extra)
    found = gradients([outputs[n] for n in used], leaves, allow_unused=True)
    exact_leaves = [oracles.leaf(t, torch.float64) for t in leaves]
    exact = plain_block(*exact_leaves)
    expected = gradients([exact[n] for n in used], exact_leaves, allow_unused=True)
    for grad, truth, leaf in zip(found, expected, leaves, strict=True):
        wanted = torch.zeros_like(leaf) if truth is None else truth.float()
        actual = torch.zeros_like(leaf) if grad is None else grad
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_of_an_extra_output_alone_has_gradients_in_the_dtype_of_the_model(
    dtype: torch.dtype,
) -> None:
    model = fuser.Sequential(fuser.Linear(8, 8), fuser.MakeExtraOutput(), fuser.Linear(8, 16))
    model.to(dtype)
    (x,) = inputs((4, 8))
    x = x.detach().to(dtype).requires_grad_()
    weight, bias = model[0].parameters()
    seen: list[torch.dtype] = []
    entering = x * 1
    entering.register_hook(lambda grad: seen.append(grad.dtype))
    y, made = model(entering)
    dy = torch.randn(4, 8).to(dtype)
    found = torch.autograd.grad(made, [x, weight, bias], dy)
    plain = torch.nn.functional.linear(x, weight, bias)
    expected = torch.autograd.grad(plain, [x, weight, bias], dy)
    assert y.shape == (4, 16)
    assert seen == [dtype]
    assert [grad.dtype for grad in found] == [dtype] * 3
    for grad, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, exact, rtol=2e-2, atol=2e-2)


class TwoDtypes(BasicOperation):
    """Its extra outputs, of two dtypes, are unlike its input, as planning takes them to be."""

    num_extra_outputs = 2

    def __init__(self) -> None:
        super().__init__()
        self.grads: list[Any] = []

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
        rows = torch.arange(input_.shape[0])
        return 2 * input_, [(input_.float().sum(1), rows)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        (self.grads,) = basic_op_grad_extra_outputs
        return 2 * grad_output, [()], [()]


class DescribedDtypes(TwoDtypes):
    """Tells what they are."""

    def extra_output_specs(self, spec: Any, extras: Any) -> Any:
        rows = spec.shape[:1]
        return TensorSpec(rows, torch.float32), TensorSpec(rows, torch.int64)


class TakesRows(BasicOperation):
    """Adds numbers of rows to its input, from a channel of integers."""

    num_extra_inputs = 1

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: torch.Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Any:
        ((rows,),) = basic_op_extra_inputs
        assert not rows.requires_grad
        return input_ + rows[:, None], [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **_: Any) -> Any:
        return grad_output, [()], [(None,)]


@pytest.mark.parametrize("make", [TwoDtypes, DescribedDtypes])
def test_extra_outputs_without_gradients_get_zeros_in_their_own_dtype_and_integers_none(
    make: type[TwoDtypes],
) -> None:
    op = make().set_extra_output_channel(1, "rows", output_to_caller=False)
    taking = TakesRows().set_extra_input_channel(0, "rows")
    model = fuser.Sequential(fuser.Bias(8, dtype=torch.bfloat16), op, fuser.GELU(), taking)
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    y, sums = model(x)
    assert sums.dtype is torch.float32
    y.sum().backward()
    first, second = op.grads
    assert (first.shape, first.dtype, bool(first.any())) == ((4,), torch.float32, False)
    assert second is None
    plan = model.plan(x)
    (rows,) = plan.key.ops[3].extra_inputs
    if make is DescribedDtypes:
        assert (rows.dtype, rows.requires_grad) == (torch.int64, False)
        assert [channel.has_gradient for channel in plan.channels] == [False]


def test_a_channel_needs_a_gradient_if_what_writes_it_does() -> None:
    """And not if the first op does: here that one is frozen, and the input needs none."""
    made = fuser.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    add = fuser.AddExtraInput().set_extra_input_channel(0, "x")
    frozen, trained = fuser.Bias(8), fuser.Linear(8, 8)
    frozen.requires_grad_(False)
    model = fuser.Sequential(frozen, trained, made, fuser.GELU(), add)
    (x,) = inputs((4, 8), requires_grad=False)
    dy = torch.randn(4, 8)
    assert [t.requires_grad for t in model.plan(x).key.ops[5].extra_inputs] == [True]
    found = torch.autograd.grad(model(x), list(trained.parameters()), dy)
    plain = torch.nn.functional.linear(x + frozen.bias, *trained.parameters())
    exact = torch.nn.functional.gelu(plain, approximate="tanh") + plain
    expected = torch.autograd.grad(exact, list(trained.parameters()), dy)
    for grad, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, truth, rtol=1e-4, atol=1e-5)


def test_a_method_that_is_set_on_an_op_returns_a_pair_and_a_tensor_is_none() -> None:
    model = fuser.Sequential(fuser.Bias(8), fuser.ConstantScale(2.0))
    (x,) = inputs((2, 8))
    model[1].op_backward = lambda ctx, grad_output: [2 * grad_output, ()]
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 8), 2.0))
    model[1].op_backward = lambda ctx, grad_output: 2 * grad_output  # of two rows
    with pytest.raises(fuser.StateError, match=r"ConstantScale\.op_backward returns"):
        model(x).sum().backward()


def test_an_extra_output_without_gradient_is_not_differentiable() -> None:
    model = fuser.Sequential(fuser.MakeExtraOutput(), fuser.Linear(8, 8), fuser.MakeExtraOutput())
    (x,) = inputs((3, 8), requires_grad=False)
    y, before, after = model(x)
    assert (y.requires_grad, before.requires_grad, after.requires_grad) == (True, False, True)
    torch.testing.assert_close(before, x)
    (y.sum() + after.sum()).backward()
    torch.testing.assert_close(model[1].bias.grad, torch.full((8,), 6.0))


def test_a_channel_that_fans_out_sums_gradients() -> None:
    ops = [fuser.MakeExtraOutput().set_extra_output_channel(0, "x"), fuser.ReLU()]
    ops += [fuser.AddExtraInput().set_extra_input_channel(0, "x") for _ in range(3)]
    (x,) = inputs((3, 8))
    y, echoed = fuser.Sequential(*ops)(x)
    torch.testing.assert_close(y, torch.relu(x) + 3 * x)
    (y.sum() + 10 * echoed.sum()).backward()
    torch.testing.assert_close(x.grad, (x > 0).float() + 13)


# -- the caller's tensors -----------------------------------------------------------------------


def awkward(grad: torch.Tensor, how: str) -> torch.Tensor:
    """The values of ``grad``, laid out otherwise."""
    if how == "transposed":
        return grad.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "strided":
        wide = torch.full((*grad.shape[:-1], 2 * grad.shape[-1]), float("nan"))
        wide[..., ::2] = grad
        return wide[..., ::2]
    return grad.clone()


@pytest.mark.parametrize("how", ["transposed", "strided"])
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_output_gradients_may_lie_anyhow_in_memory(how: str, fusions: Any) -> None:
    model = block(fusions=fusions)
    x, extra = inputs((4, 3, 8), (4, 3, 8))
    leaves = [x, extra, *model.parameters()]
    outputs = model(x, extra)
    grads = [oracles.random_tensor(y.shape, y.dtype, n) for n, y in enumerate(outputs)]
    expected = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    found = torch.autograd.grad(outputs, leaves, [awkward(g, how) for g in grads])
    assert_same(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_the_gradient_of_a_sum_is_one_number_expanded(fusions: Any) -> None:
    for make in (block, mlp):
        model = make(fusions=fusions)
        given = inputs((4, 3, 8), (4, 3, 8))[: 2 if make is block else 1]
        leaves = [*given, *model.parameters()]
        outputs = oracles.as_tuple(model(*given))
        ones = [torch.ones_like(y) for y in outputs]
        expected = torch.autograd.grad(outputs, leaves, ones, retain_graph=True)
        found = torch.autograd.grad(sum(y.sum() for y in outputs), leaves)
        assert_same(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["transposed", "strided"])
def test_inputs_may_lie_anyhow_in_memory(how: str) -> None:
    model = block()
    x, extra = inputs((4, 3, 8), (4, 3, 8))
    leaves = [x, extra, *model.parameters()]
    expected = model(x, extra)
    outputs = model(awkward(x, how), awkward(extra, how))
    assert_same(outputs, expected)
    assert_same(gradients(outputs, leaves), gradients(expected, leaves), rtol=1e-4, atol=1e-4)


SCALARS: list[Any] = [
    lambda: [fuser.ConstantScale(3.0)],
    lambda: [fuser.GELU(), fuser.Identity(), fuser.SReLU()],
    lambda: [fuser.Dropout(0.0), fuser.AddExtraInput()],
    lambda: [fuser.ConstantScale(2.0), fuser.MakeExtraOutput(), fuser.QGELU()],
    lambda: [fuser.GELU(cache_quantized_input=True)],
]


@pytest.mark.parametrize("make", SCALARS)
@pytest.mark.parametrize("recipe", [None, fuser.recipe.MXFP8BlockScaling()], ids=["plain", "mxfp8"])
def test_pointwise_ops_take_a_tensor_without_dimensions(make: Any, recipe: Any) -> None:
    model = fuser.Sequential(*make())
    ops: list[Any] = list(model)
    count = sum(op.num_extra_inputs for op in ops)
    results = []
    for shape in ((), (1,)):
        leaves = [oracles.leaf(torch.full(shape, value)) for value in (0.7, -0.4)[: 1 + count]]
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            plan = model.plan(*leaves)
            outputs = oracles.as_tuple(model(*leaves))
        assert [y.shape for y in outputs] == [torch.Size(shape)] * len(outputs)
        grads = gradients([y.reshape(()) for y in outputs], leaves)
        results.append([plan, *(t.reshape(()) for t in (*outputs, *grads))])
    assert results[0].pop(0) == results[1].pop(0)
    assert_same(*results, rtol=0, atol=0)
    with torch.no_grad():
        assert oracles.as_tuple(model(*leaves))[0].shape == (1,)
        y, *_ = oracles.as_tuple(model(*(leaf.detach().reshape(()) for leaf in leaves)))
        assert y.shape == ()


@pytest.mark.parametrize(
    ("ops", "named"),
    [
        ([fuser.GELU(), fuser.Bias(1)], (1, "Bias")),
        ([fuser.BasicLinear(1, 1)], (0, "BasicLinear")),
        ([fuser.SwiGLU()], (0, "SwiGLU")),
        ([fuser.Identity(), _Spy()], (1, "_Spy")),
    ],
)
def test_an_op_that_needs_a_dimension_is_named(ops: list[Any], named: tuple[int, str]) -> None:
    model = fuser.Sequential(*ops)
    for call in (model, model.plan):
        with pytest.raises(fuser.InputError, match=said("checks-dimensions-needs-least", *named)):
            call(torch.tensor(1.0))


def test_a_scalar_input_refuses_an_extra_input_with_dimensions() -> None:
    with pytest.raises(fuser.InputError, match=said("add-extra-input-shape-main-two")):
        fuser.AddExtraInput()(torch.tensor(1.0), torch.ones(1))
    with pytest.raises(fuser.InputTypeError, match=said("checks-tensor", None, "float")):
        fuser.AddExtraInput()(torch.tensor(1.0), 2.0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_a_callers_tensors_are_never_changed(in_place: bool, fusions: Any) -> None:
    model = block(in_place=in_place, fusions=fusions)
    x, extra = inputs((3, 8), (3, 8))
    versions = [x._version, extra._version]
    outputs = model(x, extra)
    grads = [oracles.random_tensor(y.shape, y.dtype, n) for n, y in enumerate(outputs)]
    given = [x, extra, *grads]
    before = [t.detach().clone() for t in given]
    torch.autograd.backward(outputs, grads)
    assert_same([t.detach() for t in given], before, rtol=0, atol=0)
    assert [x._version, extra._version] == versions
    assert [g._version for g in grads] == [0, 0, 0]


@pytest.mark.parametrize(
    "ops",
    [
        [fuser.Identity()],
        [fuser.AddExtraInput()],
        [fuser.MakeExtraOutput(), fuser.AddExtraInput()],
        [fuser.Quantize(), fuser.AddExtraInput(), fuser.Bias(8)],
    ],
    ids=lambda ops: "-".join(type(op).__name__ for op in ops),
)
def test_accumulated_gradients_share_no_memory(ops: list[BasicOperation]) -> None:
    model = fuser.Sequential(*copy.deepcopy(ops))
    count = sum(op.num_extra_inputs for op in ops)
    x, *extras = inputs(*[(3, 8)] * (1 + count))
    outputs = oracles.as_tuple(model(x, *extras))
    grads = [torch.ones(3, 8) for _ in outputs]
    torch.autograd.backward(outputs, grads)
    tensors = [x.grad, *(extra.grad for extra in extras), *grads]
    assert len({t.data_ptr() for t in tensors}) == len(tensors)


@pytest.mark.parametrize("what", ["input", "weight"])
def test_changing_a_saved_tensor_before_backward_is_noticed(what: str) -> None:
    model = mlp()
    (x,) = inputs((3, 8))
    y = model(x)
    with torch.no_grad():
        (x if what == "input" else model[2].weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    model(x).sum().backward()


def test_changing_an_extra_output_before_backward_is_noticed_or_harmless() -> None:
    model = fuser.Sequential(fuser.BasicLinear(8, 8), fuser.MakeExtraOutput(), fuser.GELU())
    (x,) = inputs((3, 8))
    (expected,) = torch.autograd.grad(model(x)[0].sum(), x)
    y, hidden = model(x)
    with torch.no_grad():
        hidden.mul_(3)
    try:
        (found,) = torch.autograd.grad(y.sum(), x)
    except RuntimeError as error:
        complaint = str(error)
    else:
        complaint = ""
        torch.testing.assert_close(found, expected)
    assert not complaint or "modified by an inplace operation" in complaint


def test_changing_what_was_not_saved_is_allowed() -> None:
    model = fuser.Sequential(fuser.Bias(8), fuser.ConstantScale(3.0))
    (x,) = inputs((3, 8))
    y = model(x)
    with torch.no_grad():
        x.zero_()
        model[0].bias.zero_()
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3, 8), 3.0))


# -- memory ---------------------------------------------------------------------------------------


def spied() -> tuple[fuser.Sequential, _Spy]:
    spy = _Spy()
    return fuser.Sequential(fuser.Linear(8, 8), spy, fuser.Linear(8, 8)), spy


def alive(spy: _Spy) -> bool:
    return any(ref() is not None for ref in spy.refs)


def test_saved_tensors_are_freed_by_backward() -> None:
    model, spy = spied()
    (x,) = inputs((3, 8))
    gc.disable()
    try:
        y = model(x)
        assert alive(spy)
        y.sum().backward()
        assert not alive(spy)
        assert y is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("retained", [False, True])
def test_what_an_op_saved_is_freed_when_its_backward_is_done(retained: bool) -> None:
    """So that a pipeline holds no more of what ops saved than they would one by one."""
    first, last = _Spy(), _Spy()
    seen = []

    def backward(ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        seen.append((alive(first), alive(last)))
        return _Spy.op_backward(first, ctx, grad_output)

    first.op_backward = backward  # type: ignore[method-assign]
    model = fuser.Sequential(fuser.Linear(8, 8), first, fuser.GELU(), last, fuser.Linear(8, 8))
    (x,) = inputs((3, 8))
    gc.disable()
    try:
        y = model(x).sum()
        if retained:
            y.backward(retain_graph=True)
        y.backward()
    finally:
        gc.enable()
    assert seen == ([(True, True)] if retained else []) + [(True, False)]


def test_a_backward_that_fails_keeps_nothing_alive() -> None:
    model, spy = spied()
    (x,) = inputs((3, 8))

    def backward(ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        raise ArithmeticError("of this test")

    spy.op_backward = backward  # type: ignore[method-assign]
    gc.disable()
    try:
        y = model(x).sum()
        with pytest.raises(ArithmeticError, match="of this test"):
            y.backward()
        assert not alive(spy)
        with pytest.raises(RuntimeError, match="a second time"):
            y.backward()
    finally:
        gc.enable()


def test_saved_tensors_live_as_long_as_the_graph_and_no_longer() -> None:
    model, spy = spied()
    (x,) = inputs((3, 8))
    gc.disable()
    try:
        y = model(x)
        y.sum().backward(retain_graph=True)
        assert alive(spy)
        del y
        assert not alive(spy)
        with torch.no_grad():
            model(x)
        assert not alive(spy)
    finally:
        gc.enable()


def test_a_dropped_model_is_freed() -> None:
    model = mlp()
    (x,) = inputs((3, 8))
    model(x).sum().backward()
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None


# -- threads --------------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """``work(0)``, ``work(1)`` ... at the same time; their results."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def one(number: int) -> None:
        barrier.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise errors[0]
    return results


def test_threads_may_share_a_module() -> None:
    model = block()
    batches = [
        [oracles.random_tensor((3 + n, 8), torch.float32, s).requires_grad_() for s in (n, 50 + n)]
        for n in range(2)
    ]

    def step(number: int) -> list[torch.Tensor | None]:
        x, extra = batches[number]
        for _ in range(20):
            found = gradients(model(x, extra), [x, extra, *model.parameters()])
        return found

    expected = [step(number) for number in range(2)]
    for found, wanted in zip(in_threads(2, step), expected, strict=True):
        assert_same(found, wanted)


def test_threads_that_race_for_the_first_call_start_the_ops_once() -> None:
    model, spy = spied()
    (x,) = inputs((3, 8))
    first, second = in_threads(2, lambda number: model(x).detach())
    assert_same([first], [second])
    assert spy.started == 1


def test_backward_may_run_in_another_thread_than_forward() -> None:
    model = block()
    x, extra = inputs((3, 8), (3, 8))
    leaves = [x, extra, *model.parameters()]
    expected = gradients(model(x, extra), leaves)
    outputs = model(x, extra)
    (found,) = in_threads(1, lambda number: gradients(outputs, leaves))
    assert_same(found, expected)


# -- torch's transforms ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "function"),
    [
        (torch.func.vmap, "vmap"),
        (torch.func.grad, "grad"),
        (torch.func.jacrev, "grad"),
        (lambda f: lambda x: torch.func.vjp(f, x), "grad"),
        (lambda f: lambda x: torch.func.jvp(f, (x,), (x,)), "jvp"),
    ],
    ids=["vmap", "grad", "jacrev", "vjp", "jvp"],
)
def test_a_functorch_transform_is_refused_by_name_and_leaves_the_model_as_it_was(
    transform: Any, function: str
) -> None:
    model, (x,) = mlp(), inputs((3, 8))
    expected = model(x)
    with pytest.raises(
        fuser.StateError,
        match=said("diagnose-pipeline-runs-fused", holds(f"torch.func.{function}", ": ")),
    ):
        transform(lambda x: model(x).sum())(x)
    assert_same([model(x)], [expected])


def with_tangent(model: fuser.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The forward-mode derivative of ``model`` at ``x`` by ``x``."""
    with forward_ad.dual_level():
        tangent: torch.Tensor | None = forward_ad.unpack_dual(
            model(forward_ad.make_dual(x, x))
        ).tangent
    assert tangent is not None
    return tangent


@pytest.mark.parametrize("wanted", [True, False])
def test_forward_mode_is_refused_or_right(wanted: bool) -> None:
    model, (x,) = mlp(), inputs((3, 8), requires_grad=False)
    if wanted:
        with pytest.raises(
            fuser.StateError,
            match=said("diagnose-pipeline-runs-fused", holds("forward_ad: use backward mode")),
        ):
            with_tangent(model, x)
        return
    model.requires_grad_(False)
    plain = torch.nn.Sequential(
        torch.nn.Linear(8, 12), torch.nn.GELU("tanh"), torch.nn.Linear(12, 8)
    )
    with torch.no_grad():
        for own, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            own.copy_(theirs)
    plain.requires_grad_(False)
    torch.testing.assert_close(with_tangent(model, x), with_tangent(plain, x))


def test_transforms_that_kernels_would_not_see_are_refused() -> None:
    model, (x,) = mlp().requires_grad_(False), inputs((3, 8), requires_grad=False)
    with on_kernels():
        for call in (with_tangent, lambda model, x: torch.func.vmap(model)(x)):
            with pytest.raises(fuser.StateError, match=r"forward_ad|torch\.func\.vmap"):
                call(model, x)
        model(x)


BATCHED: dict[str, Callable[[], list[Any]]] = {
    "plain": lambda: [fuser.Linear(8, 12), fuser.GELU(), fuser.Linear(12, 8)],
    "gated": lambda: [fuser.Linear(8, 12), fuser.SwiGLU(), fuser.Linear(6, 8)],
    "gated in blocks": lambda: [fuser.SwiGLU(glu_interleave_size=2), fuser.Linear(4, 8)],
    "clamped": lambda: [fuser.Linear(8, 12), fuser.ClampedSwiGLU(), fuser.Linear(6, 8)],
}


@pytest.mark.parametrize("warm", [False, True], ids=["first", "recorded"])
@pytest.mark.parametrize("name", BATCHED)
def test_gradients_in_a_batch_are_those_of_each(name: str, warm: bool) -> None:
    model, (x, dy) = fuser.Sequential(*BATCHED[name]()), inputs((3, 8), (4, 3, 8))
    dy = dy.detach()
    for _ in range(4 * warm):
        model(x).sum().backward()
    y = model(x)
    wanted = (x, *model.parameters())
    found = torch.autograd.grad(y, wanted, dy, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, wanted, one, retain_graph=True) for one in dy]
    for grad, alone in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(grad, torch.stack(alone))


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize(
    "recipe", [fuser.recipe.Float8CurrentScaling(), fuser.recipe.DelayedScaling()], ids=str
)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "recorded"])
def test_a_quantized_pipeline_refuses_gradients_in_a_batch(recipe: Any, warm: bool) -> None:
    def step(model: Any, x: torch.Tensor) -> Any:
        with fuser.autocast(recipe=recipe):
            return model(x)

    torch.manual_seed(0)
    model: Any = fuser.Sequential(fuser.Linear(32, 64), fuser.SwiGLU(), fuser.Linear(32, 32))
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(4 * warm):
        step(model, x).sum().backward()
    twin, dy = copy.deepcopy(model), torch.randn(16, 32)
    y, expected = step(model, x), torch.autograd.grad(step(twin, x), x, dy)
    with pytest.raises(fuser.StateError, match=said("diagnose-gradients-in-a-batch")):
        torch.autograd.grad(y, x, torch.randn(4, 16, 32), is_grads_batched=True, retain_graph=True)
    assert_same(torch.autograd.grad(y, x, dy), expected)
    both = [torch.autograd.grad(step(each, x), x, dy)[0] for each in (model, twin)]
    assert torch.equal(*both)


def test_kernels_refuse_gradients_in_a_batch() -> None:
    model, (x, dy) = mlp(), inputs((3, 8), (4, 3, 8))
    with on_kernels(), pytest.raises(fuser.StateError, match=said("diagnose-gradients-in-a-batch")):
        torch.autograd.grad(model(x), x, dy.detach(), is_grads_batched=True)


# -- torch.compile ---------------------------------------------------------------------------------


def test_a_compiled_module_equals_the_eager_one() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)
            self.pipeline = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.pipeline(torch.tanh(self.first(x))) * 2)

    model = Model()
    (x,) = inputs((3, 8))
    expected = gradients([model(x)], [x, *model.parameters()])
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert_same([compiled(x)], [model(x)])
        assert_same(gradients([compiled(x)], [x, *model.parameters()]), expected)
    with torch.no_grad():
        assert_same([compiled(x)], [model(x)])
    torch._dynamo.reset()


class OwnGELU(fuser.GELU):
    """An op of a user, which graphs of torch.compile do not contain."""

    def op_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().op_forward(*args, **kwargs)


# torch 2.11 makes a frame of what follows a graph break, also if that breaks the graph at once.
FRAMES = 11 if torch.__version__.startswith("2.11.") else 10


@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("build", "frames"),
    [
        (lambda: fuser.Sequential(OwnGELU(), fuser.GELU()), FRAMES),
        (lambda: fuser.OperationFuser([fuser.GELU(), fuser.Bias(8)]), 3),
    ],
    ids=["an op of a user", "pipeline"],
)
def test_a_compiled_graph_breaks_once_at_a_call_that_cannot_be_in_it_and_traces_nothing_of_it(
    build: Any, frames: int, training: bool, called: bool
) -> None:
    first, second = build(), build()
    (x,) = inputs((3, 8))
    if called:
        first(x)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(second(torch.sin(first(torch.tanh(x)))))

    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, backend=backend)
    with torch.set_grad_enabled(training):
        for _ in range(3):
            assert_same([compiled(x)], [model(x)])
    assert graphs == [[torch.tanh], [torch.sin], [torch.cos]]
    # Frames without operations around a container's call are compiled too.
    assert counters["frames"]["total"] <= frames
    torch._dynamo.reset()


def test_a_whole_graph_is_refused_with_the_reason() -> None:
    model = fuser.OperationFuser([fuser.GELU(), fuser.Bias(8)])
    (x,) = inputs((3, 8))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fuser plans and runs a pipeline"):
        torch.compile(lambda x: model(x) * 2, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()


# -- fused and custom ops --------------------------------------------------------------------------


class _ScaledTwice(FusedOperation):
    """Two constant scales as one product, with its own idea of what to save."""

    window = (fuser.ConstantScale, fuser.ConstantScale)
    side = "joint"

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **kwargs: Any
    ) -> Any:
        first, second = (op.scale for op in self.basic_ops)
        basic_op_ctxs[0].save_for_backward(torch.tensor(first * second))
        return input_ * (first * second), [(), ()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **kwargs: Any
    ) -> Any:
        (factor,) = basic_op_ctxs[0].saved_tensors
        return grad_output * factor, [(), ()], [(), ()]


def test_a_joint_fusion_gets_in_backward_what_it_saved_in_forward() -> None:
    ops = (fuser.Linear(8, 8), fuser.ConstantScale(3.0), fuser.ConstantScale(0.5), fuser.GELU())
    fused = fuser.Sequential(*ops, fusions=(_ScaledTwice,))
    unfused = fuser.Sequential(*copy.deepcopy(ops), fusions=())
    (x,) = inputs((3, 8))
    plan = fused.plan(x)
    assert "_ScaledTwice" in {step.fusion for step in plan.forward}
    assert "_ScaledTwice" in {step.fusion for step in plan.backward}
    results = [
        [model(x), *gradients([model(x)], [x, *model.parameters()])] for model in (fused, unfused)
    ]
    assert_same(*results)
    with torch.no_grad():
        assert_same([fused(x)], [unfused(x)])


class _Scaling(BasicOperation):
    """Multiplies by a power of its own that grows from call to call, kept on the context."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base
        self.calls = 0

    def op_forward(
        self, ctx: OperationContext, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self.calls += 1
        ctx.factor = factor = self.base**self.calls
        return input_ * factor

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output * ctx.factor, ()


def test_what_an_op_sets_on_its_context_is_its_own_and_that_calls() -> None:
    model = fuser.Sequential(_Scaling(2.0), _Scaling(3.0), fuser.GELU(), fusions=())
    xs = [torch.full((2, 4), 1e-3, requires_grad=True) for _ in range(3)]
    outputs = [model(x) for x in xs]
    for number in (1, 2, 0):
        (found,) = gradients([outputs[number]], [xs[number]])
        factor = 6.0 ** (number + 1)
        x = torch.full((2, 4), 1e-3, requires_grad=True)
        (expected,) = gradients([oracles.gelu(x * factor)], [x])
        torch.testing.assert_close(found, expected)


class _Columns(BasicOperation):
    """Takes four columns, says so when asked, and looks at nothing when it runs."""

    def __init__(self, words: str = "") -> None:
        super().__init__()
        self.words = words

    def output_spec(self, spec: Any, extras: Any, autocast: Any) -> Any:
        if spec.shape[-1] != 4:
            raise fuser.InputError(f"_Columns takes 4 columns and got {spec.shape[-1]}.")
        return spec

    def op_forward(
        self, ctx: OperationContext, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.words:
            raise RuntimeError(self.words)
        return input_ @ torch.eye(4)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output, ()


@pytest.mark.parametrize("training", [True, False])
def test_what_torch_refuses_is_a_sentence_where_the_op_knows_one(training: bool) -> None:
    model = fuser.Sequential(fuser.GELU(), _Columns(), fuser.Linear(4, 2))
    with torch.set_grad_enabled(training):
        model(torch.ones(3, 4))
        with pytest.raises(fuser.InputError, match="_Columns takes 4 columns and got 5") as caught:
            model(torch.ones(3, 5))
        assert "mat1 and mat2" in str(caught.value.__context__)
        with pytest.raises(
            fuser.InputError, match=said("grouped-linear-shape-last-dimension", "Linear(4, 2)")
        ) as caught:
            fuser.Sequential(fuser.GELU(), _Rounding(), fuser.Linear(4, 2))(torch.ones(3, 5))
        assert model(torch.ones(3, 4)).shape == (3, 2)


def test_an_error_of_torchs_that_no_op_explains_goes_out_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        fuser.Sequential(fuser.GELU(), _Columns("out of luck"))(torch.ones(3, 4))
    assert type(caught.value) is RuntimeError
    assert caught.value.__context__ is None


class _Rounding(BasicOperation):
    """Rounds to bf16, and does not tell the planner."""

    def op_forward(
        self, ctx: OperationContext, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return input_.bfloat16()

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output.float(), ()


@pytest.mark.parametrize(
    "ops",
    [
        [_Rounding(), fuser.MakeExtraOutput(), fuser.BasicLinear(8, 8)],
        [_Rounding(), fuser.MakeExtraOutput(), fuser.RMSNorm(8)],
        [_Rounding(), fuser.ConstantScale(2.0), fuser.Linear(8, 8), fuser.GELU()],
    ],
    ids=lambda ops: "-".join(type(op).__name__ for op in ops),
)
def test_an_op_may_change_the_dtype_without_telling(ops: list[BasicOperation]) -> None:
    results = []
    for fusions in (fuser.FUSIONS, ()):
        model = oracles.randomize(fuser.Sequential(*copy.deepcopy(ops), fusions=fusions))
        (x,) = inputs((3, 8))
        outputs = oracles.as_tuple(model(x))
        results.append([*outputs, *gradients(outputs, [x, *model.parameters()])])
    assert_same(*results, rtol=0.02, atol=0.02)


class _Failing(_Spy):
    """Fails in forward."""

    def op_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise KeyError("on purpose")


def test_a_traceback_shows_the_source_of_the_plan_that_ran() -> None:
    (x,) = inputs((3, 8))
    counts = range(1, 21)
    models = [fuser.Sequential(*[fuser.GELU()] * n, _Failing(), fusions=()) for n in counts]
    for model in models:
        model.plan(x)
        for _ in range(20):
            fuser.Sequential(fuser.SiLU()).plan(x)
    for count, model in zip(counts, models, strict=True):
        with pytest.raises(KeyError, match="on purpose") as caught:
            model(x)
        (code,) = {
            entry.frame.code.raw
            for entry in caught.traceback
            if entry.frame.code.raw.co_filename.startswith("<fuser plan")
        }
        source = linecache.getlines(code.co_filename)
        assert sum("# GELU" in line for line in source) == 2 * count


def test_equal_sources_are_compiled_once_and_shown_until_the_last_function_goes() -> None:
    def made(value: int) -> Any:
        src = SourceCode(value=value)
        with src.block("def twice():"):
            src.add("return 2 * value")
        return src.functions("example")["twice"]

    one, other = made(1), made(2)
    assert (one(), other()) == (2, 4)
    assert one.__code__ is other.__code__
    filename = one.__code__.co_filename
    del one
    assert "return 2 * value" in "".join(linecache.getlines(filename))
    del other
    assert not linecache.getlines(filename)
    assert made(3)() == 6


def test_a_dropped_plan_frees_its_generated_source() -> None:
    def sources() -> int:
        return sum(str(name).startswith("<fuser plan") for name in linecache.cache)

    (x,) = inputs((3, 8))
    gc.collect()
    before = sources()
    for _ in range(20):
        fuser.Sequential(fuser.SiLU())(x)
    gc.collect()
    assert sources() <= before


def test_a_profile_has_a_range_for_every_step_of_the_plan() -> None:
    model = fuser.Sequential(fuser.Linear(8, 8), fuser.GELU(), fuser.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = model(x)
        y.sum().backward()
    (plan,) = model.plans
    names = {event.name for event in profile.events()}
    for side, steps in (("forward", plan.forward), ("backward", plan.backward)):
        for step in steps:
            ops = f"{step.ops[0]}" if len(step.ops) == 1 else f"{step.ops[0]}-{step.ops[-1]}"
            runs_as = step.fusion or plan.ops[step.ops[0]]
            assert f"fuser {side} {ops} {runs_as}" in names
    assert torch.equal(model(x), y)
