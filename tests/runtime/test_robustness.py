"""What a demanding user does next: hooks, threads, in-place ops, copies, late changes."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import oracles
import pytest
import torch
from models import mlp
from said import said
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser.reference import normalization as reference


def x_of(*shape: int) -> torch.Tensor:
    return oracles.random_tensor(shape, torch.float32, 1)


# -- in-place ops on an output -----------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: fuser.Linear(8, 8),
        lambda: fuser.RMSNorm(8),
        lambda: fuser.LayerNorm(8),
        lambda: fuser.SwiGLU(glu_interleave_size=2),
    ],
    ids=["Linear", "RMSNorm", "LayerNorm", "SwiGLU-interleaved"],
)
def test_an_output_may_be_written_to(make: Any) -> None:
    op = oracles.randomize(make())
    x = x_of(2, 3, 8).requires_grad_()
    expected = torch.relu(op(x))
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    y = fuser.Sequential(op, torch.nn.ReLU(inplace=True))(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, expected)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("norm", [fuser.RMSNorm, fuser.LayerNorm])
def test_the_sum_before_a_norm_may_be_written_to_after_its_backward(norm: Any) -> None:
    model = fuser.Sequential(fuser.AddExtraInput(), fuser.MakeExtraOutput(), norm(8))
    x, extra = x_of(2, 3, 8).requires_grad_(), x_of(2, 3, 8)
    y, z = model(x, extra)
    assert model.plans[0].forward[0].fusion == f"ForwardAdd{norm.__name__}"
    (y.sum() + z.sum()).backward()
    z.mul_(2)
    assert torch.equal(z, 2 * (x + extra))


@pytest.mark.parametrize("adds", [False, True], ids=["norm", "addition and norm"])
@pytest.mark.parametrize(
    ("norm", "like"), [(fuser.RMSNorm, torch.nn.RMSNorm), (fuser.LayerNorm, torch.nn.LayerNorm)]
)
def test_an_output_of_a_call_without_gradients_may_be_multiplied_by_a_parameter(
    norm: Any, like: Any, adds: bool
) -> None:
    # torch refuses this of a view that was made without gradients.
    first = [fuser.AddExtraInput(), fuser.MakeExtraOutput()] if adds else []
    model = fuser.Sequential(*first, norm(8))
    x, extra = x_of(2, 3, 8), x_of(2, 3, 8)
    for _ in range(4):  # also what is recorded
        gain = torch.full((8,), 2.0, requires_grad=True)
        with torch.no_grad():
            outputs = model(x, extra) if adds else (model(x),)
            expected = (like(8, eps=1e-5)(x + extra), x + extra) if adds else (like(8, 1e-5)(x),)
        for output, before in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output.mul_(gain), 2 * before)
            (found,) = torch.autograd.grad(output.sum(), gain)
            torch.testing.assert_close(found, before.sum(dim=(0, 1)))


@pytest.mark.parametrize("is_grad_enabled", [False, True])
@pytest.mark.parametrize("norm", [fuser.RMSNorm, fuser.LayerNorm])
def test_the_sum_before_a_frozen_norm_has_its_forward_mode_derivative(
    norm: Any, is_grad_enabled: bool
) -> None:
    ops = [fuser.AddExtraInput(), fuser.MakeExtraOutput(), norm(8)]
    model = fuser.Sequential(*ops).requires_grad_(False)
    x, extra = x_of(2, 3, 8), x_of(2, 3, 8)
    tangent = torch.linspace(-1.0, 1.0, 48).view(2, 3, 8)
    with torch.set_grad_enabled(is_grad_enabled), forward_ad.dual_level():
        _, z = model(forward_ad.make_dual(x, tangent), extra)
        found = forward_ad.unpack_dual(z).tangent
    assert found is not None
    assert torch.equal(found, tangent)


@pytest.mark.parametrize(
    "ops",
    [
        lambda: [fuser.Reshape((-1,))],
        lambda: [fuser.Identity(), fuser.Reshape((4, -1)), fuser.Reshape((-1,))],
        lambda: [fuser.Reshape((-1,)), fuser.MakeExtraOutput()],
    ],
)
@pytest.mark.parametrize("taken", [lambda x: x[1:], lambda x: x], ids=["of a view", "of all"])
def test_a_view_of_the_callers_tensor_cannot_be_written_to(ops: Any, taken: Any) -> None:
    # The write would change x, and the gradient of x would not know.
    x = x_of(3, 8).requires_grad_()
    source = x * 1
    kept = source.detach().clone()
    y = fuser.Sequential(*ops())(taken(source))
    y = y[0] if isinstance(y, tuple) else y
    assert y._is_view()
    with pytest.raises(RuntimeError, match="is a view and"):
        y.mul_(2)
    assert torch.equal(source, kept)
    y.sum().backward()
    expected = torch.zeros_like(x)
    taken(expected).fill_(1)
    assert torch.equal(x.grad, expected)


# -- hooks -----------------------------------------------------------------------------


def test_hooks_of_an_op_in_a_sequential_run() -> None:
    model, seen = mlp(), []
    expected = model(x_of(3, 8))
    model = copy.deepcopy(model)
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model[0].register_forward_pre_hook(lambda module, args: seen.append("before"))
    assert torch.equal(model(x_of(3, 8)), expected)
    assert seen == ["before", torch.Size([3, 12])]


def test_an_op_with_hooks_still_gets_its_extra_inputs() -> None:
    add, seen = fuser.AddExtraInput(), []
    add.register_forward_hook(lambda module, args, output: seen.append(len(args)))
    x = x_of(3, 8)
    y = fuser.Sequential(fuser.Identity(), add, fuser.ConstantScale(2.0))(x, x)
    assert torch.equal(y, 4 * x)
    assert seen == [2]


# -- threads ---------------------------------------------------------------------------


def test_a_thread_that_comes_while_another_groups_waits_for_it() -> None:
    model = mlp()
    expected = copy.deepcopy(model)(x_of(3, 8))
    original, inside, results = fuser.runtime.segments.extra_input_sources, threading.Event(), []

    def slow(*args: Any) -> Any:
        inside.set()
        threading.Event().wait(0.2)
        return original(*args)

    def call() -> None:
        results.append(model(x_of(3, 8)))

    replacement: Any = slow
    fuser.runtime.segments.extra_input_sources = replacement
    try:
        first = threading.Thread(target=call)
        first.start()
        assert inside.wait(60)
        second = threading.Thread(target=call)
        second.start()
        for thread in (first, second):
            thread.join()
    finally:
        fuser.runtime.segments.extra_input_sources = original
    assert [torch.equal(y, expected) for y in results] == [True, True]


def test_one_autocast_decorator_serves_two_threads_at_once() -> None:
    barrier, seen = threading.Barrier(2, timeout=60), []

    @fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling())
    def inside() -> None:
        barrier.wait()
        seen.append(fuser.precision.contexts.current_recipe())
        barrier.wait()

    threads = [threading.Thread(target=inside) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [fuser.recipe.MXFP8BlockScaling()] * 2


# -- what is held, and for how long --------------------------------------------------------


def test_a_used_model_is_freed_without_the_cycle_collector() -> None:
    gc.disable()
    try:
        model = mlp()
        model(x_of(3, 8)).sum().backward()
        gone = weakref.ref(model[0].weight)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_failed_backward_keeps_no_tensor() -> None:
    class Failing(fuser.BasicOperation):
        def op_forward(self, ctx: Any, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return input_ * 1

        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            raise KeyError("broken")

    # The output of the scale, which the activation saves, is nobody else's.
    model = fuser.Sequential(Failing(), fuser.ConstantScale(2.0), fuser.GELU())
    y = model(x_of(3, 8).requires_grad_())
    with pytest.raises(KeyError, match="broken"):
        y.sum().backward()
    contexts = y.grad_fn.call[1]
    assert len(contexts) == 3
    assert all(ctx.saved_tensors is None for ctx in contexts)


def test_plans_of_ever_new_recipes_are_not_kept_for_ever() -> None:
    model = fuser.Sequential(fuser.Identity())
    for _ in range(fuser.runtime.pipeline.MAX_PLANS + 20):
        recipe = fuser.recipe.CustomRecipe(lambda role: None)
        with fuser.autocast(recipe=recipe):
            model(x_of(2, 8))
    assert len(model.plans) == fuser.runtime.pipeline.MAX_PLANS


# -- late changes ----------------------------------------------------------------------


def test_the_ops_of_a_composite_cannot_be_exchanged_one_by_one() -> None:
    linear = fuser.Linear(8, 4)
    with pytest.raises(fuser.StateError, match=said("fused-operation-cannot-exchanged")):
        linear.basic_ops[1] = fuser.Bias(4)
    with pytest.raises(fuser.StateError, match=said("fused-operation-cannot-exchanged")):
        setattr(linear.basic_ops, "1", fuser.Bias(4))
    twin = copy.deepcopy(linear)
    assert torch.equal(twin.weight, linear.weight)


def test_a_parameter_that_was_taken_away_is_a_sentence() -> None:
    model = mlp()
    model(x_of(3, 8))
    weight = model[0].basic_ops[0]._parameters.pop("weight")
    with pytest.raises(
        fuser.StateError,
        match=said("parameter-slots-any-more-never", "Op 0 (BasicLinear)", "'weight'"),
    ):
        model(x_of(3, 8))
    model[0].basic_ops[0].register_parameter("weight", weight)
    assert model(x_of(3, 8)).shape == (3, 8)


def test_a_pipeline_can_be_pickled() -> None:
    pipeline = fuser.OperationFuser(list(mlp()))
    y = pipeline(x_of(3, 8))
    assert torch.equal(pickle.loads(pickle.dumps(pipeline))(x_of(3, 8)), y)


def test_repetition_keeps_the_fusions() -> None:
    model = fuser.Sequential(fuser.GELU(), fusions=())
    assert isinstance(model * 2, fuser.Sequential)
    assert (model * 2).fusions == ()
    assert len(model * 2) == 2


@pytest.mark.parametrize("fusions", [fuser.GELU, (fuser.GELU,), ("x",)])
def test_fusions_that_are_none_are_refused(fusions: Any) -> None:
    with pytest.raises(fuser.InputTypeError, match=said("pipeline-sequence-fused-operation")):
        fuser.OperationFuser([fuser.GELU()], fusions)


# -- registered fusions --------------------------------------------------------------------


def test_a_registered_fusion_of_a_shared_op_stays_at_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pair(fuser.FusedOperation):
        def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
            linear, bias = self.members
            return input_ @ linear.weight.T + bias.bias, [(), ()]

    monkeypatch.setattr(fuser.runtime.pipeline, "_registered", fuser.runtime.pipeline._registered)
    fuser.register_forward_fusion(lambda ops, recipe: [*ops[:2], Pair(ops[2:])])
    linear, bias = oracles.randomize(fuser.BasicLinear(8, 8)), oracles.randomize(fuser.Bias(8))
    model = fuser.Sequential(linear, fuser.GELU(), linear, bias)
    with torch.no_grad():
        y = model(x_of(3, 8))
    expected = oracles.gelu(x_of(3, 8) @ linear.weight.T) @ linear.weight.T + bias.bias
    torch.testing.assert_close(y, expected.detach())
    assert model.plans[0].forward[-1].ops == (2, 3)


# -- deferred parameters -------------------------------------------------------------------


def test_parameters_made_in_inference_mode_can_be_trained() -> None:
    model = fuser.Sequential(fuser.RMSNorm(8, device="meta"), fuser.Linear(8, 4, device="meta"))
    with torch.inference_mode():
        model(x_of(3, 8))
    model(x_of(3, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_loaded_parameter_is_not_made_again() -> None:
    norm = fuser.LayerNorm(8, device="meta")
    norm.load_state_dict({"bias": torch.full((8,), 3.0)}, strict=False, assign=True)
    y = norm(torch.zeros(2, 8))
    assert torch.equal(y, torch.full((2, 8), 3.0))


# -- no gradient that nobody asked for --------------------------------------------------------


def test_frozen_norms_and_scales_compute_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []
    original = reference.rmsnorm_backward

    def noting(*args: Any) -> Any:
        wanted.append(args[4])
        return original(*args)

    monkeypatch.setattr(
        reference,
        "rmsnorm_backward",
        noting,
    )
    norm = fuser.RMSNorm(8)
    norm(x_of(3, 8)).sum().backward()
    norm.weight.requires_grad_(False)
    norm(x_of(3, 8).requires_grad_()).sum().backward()
    assert wanted == [(False, True), (True, False)]


def test_frozen_scales_of_an_activation_cost_no_sum() -> None:
    class Seeing(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    for is_wanted in (True, False):
        x, scales = x_of(3, 8).requires_grad_(), x_of(3).requires_grad_(is_wanted)
        y = fuser.ScaledSwiGLU()(x, scales)
        with Seeing() as backward:
            y.backward(torch.ones_like(y))
        assert (torch.ops.aten.sum in backward.seen) == is_wanted
