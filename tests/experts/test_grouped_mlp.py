"""GroupedMLP: the bits of the ops one by one, in fewer steps and less memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection
from typing import Any

import oracles
import pytest
import torch
from every_format import RECIPES
from one_launch_experts import one_by_one
from pipeline_kernels import on_kernels
from said import holds, said, sentence
from test_grouped_products import PADDED, InFp64, at_once  # noqa: F401 - a fixture
from test_grouped_products import pytestmark as of_products
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.basic_ops.grouped_products import quantizes_groups_of
from fuser.cuda.launch import Kernel
from fuser.errors import InputError, StateError
from fuser.functional import pointwise
from fuser.functional.lazy import materialize
from fuser.fused_ops import GroupedMLP, grouped_mlp
from fuser.op import OperationContext
from fuser.reference import grouped as reference

pytestmark = [of_products, pytest.mark.sampled(most=12)]

BF16, FP32 = torch.bfloat16, torch.float32
G, K, F, T = 4, 32, 64, 300
SPLITS = (130, 0, 47, 100)
UNFUSED = tuple(fusion for fusion in fuser.FUSIONS if fusion is not GroupedMLP)
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "SwiGLU": fuser.ScaledSwiGLU,
    "SwiGLU, interleaved": lambda **o: fuser.ScaledSwiGLU(glu_interleave_size=8, **o),
    "SiTUGLU": fuser.ScaledSiTUGLU,
    "ClampedQGeGLU": fuser.ScaledClampedQGeGLU,
    "SReLU": fuser.ScaledSReLU,
}
OVERRIDES = {
    "bf16": lambda: None,
    **PADDED,
    "current, exact": lambda: recipes.Float8CurrentScaling(backward_override="high_precision"),
    "MXFP8, exact": lambda: recipes.MXFP8BlockScaling(backward_override="high_precision"),
    "block, dequantized": lambda: recipes.Float8BlockScaling(backward_override="dequantized"),
}
EVERY_RECIPE = pytest.mark.parametrize("make", OVERRIDES.values(), ids=OVERRIDES)


@pytest.fixture
def groups_at_once(at_once: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """All groups are one product here, and plans know it."""
    at_once()

    def runs_at_once(self: fuser.GroupedLinear, key: Any) -> bool:
        return quantizes_groups_of(key.recipe)

    monkeypatch.setattr(fuser.GroupedLinear, "runs_at_once", runs_at_once)


def mlp(
    activation: Any = None, dtype: torch.dtype = BF16, fusions: Any = fuser.FUSIONS, **options: Any
) -> fuser.Sequential:
    torch.manual_seed(0)
    activation = fuser.ScaledSwiGLU() if activation is None else activation
    options = {"dtype": dtype, "device": "cpu", "bias": False, **options}
    width = 2 * F if activation.function.is_gated else F
    ops = (
        fuser.GroupedLinear(G, K, width, **options),
        activation,
        fuser.GroupedLinear(G, F, K, **options),
    )
    model = fuser.Sequential(*ops, fusions=fusions)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)
    return model


def tensors(dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    """NaN in the rows after the last group."""
    generator = torch.Generator().manual_seed(1)
    found = {
        "x": torch.randn(T, K, generator=generator),
        "scales": torch.rand(T, generator=generator),
        "dy": torch.randn(T, K, generator=generator),
    }
    for value in found.values():
        value[sum(SPLITS) :] = float("nan")
    return {name: value.to(dtype) for name, value in found.items()}


def run(model: fuser.Sequential, recipe: Any = None, steps: int = 2) -> list[Any]:
    given, found = tensors(model[0]._dtype), []
    leaves = [given["x"].requires_grad_(), given["scales"].requires_grad_()]
    sizes = torch.tensor(SPLITS)
    for _ in range(steps):
        for leaf in (*leaves, *model.parameters()):
            leaf.grad = None
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            extras = [[sizes, leaves[1]][: op.num_extra_inputs] for op in (model[0], model[2])]
            y = model(leaves[0], *extras[0], leaves[1], *extras[1])
        y.backward(given["dy"])
        found += [y.detach(), *(leaf.grad for leaf in (*leaves, *model.parameters()))]
    return found


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), place
        assert one.isfinite().all()


def plan_of(model: fuser.Sequential, recipe: Any = None) -> fuser.FusionPlan:
    given, sizes = tensors(model[0]._dtype), torch.tensor(SPLITS)
    extras = [[sizes, given["scales"]][: op.num_extra_inputs] for op in (model[0], model[2])]
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        return model.plan(given["x"].requires_grad_(), *extras[0], given["scales"], *extras[1])


def is_fused(model: fuser.Sequential, recipe: Any = None) -> bool:
    plan = plan_of(model, recipe)
    sides = (plan.forward, plan.backward)
    return all([step.fusion for step in side] == ["GroupedMLP"] for side in sides)


@pytest.mark.sampled
@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("name", ACTIVATIONS)
@EVERY_RECIPE
def test_bits_are_those_of_the_ops(make: Callable[[], Any], name: str) -> None:
    for again in (False, True):
        model = mlp(ACTIVATIONS[name](activation_recompute_in_mlp=again))
        assert is_fused(copy.deepcopy(model), make())
        alone = mlp(ACTIVATIONS[name](), fusions=UNFUSED)
        assert_equal(run(model, make()), run(alone, make()))


AGAIN = said("scaled-activation-recompute-mlp-true", "ScaledSwiGLU")


def test_an_activation_that_nothing_computes_again_is_refused_in_training() -> None:
    model = mlp(fuser.ScaledSwiGLU(activation_recompute_in_mlp=True), fusions=UNFUSED)
    with pytest.raises(fuser.StateError, match=AGAIN):
        run(model)
    model[1].activation_recompute_in_mlp = False
    run(model)
    model[1].activation_recompute_in_mlp = True
    given = tensors()
    with torch.no_grad():  # nothing is saved, so nothing is computed again
        model(given["x"], torch.tensor(SPLITS), given["scales"], torch.tensor(SPLITS))


def test_an_activation_in_a_chain_is_refused_too() -> None:
    scaled = fuser.ScaledSwiGLU(activation_recompute_in_mlp=True)
    model = fuser.Sequential(fuser.Bias(2 * K, device="cpu", dtype=BF16), scaled)
    x = torch.ones(T, 2 * K, dtype=BF16, requires_grad=True)
    with on_kernels():
        assert [step.fusion for step in model.plan(x, torch.ones(T)).forward] == ["PointwiseChain"]
        with pytest.raises(fuser.StateError, match=AGAIN):
            model(x, torch.ones(T))


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("name", ["current", "delayed"])
def test_the_plan_says_whether_an_activation_is_computed_again(name: str) -> None:
    model = mlp(fuser.ScaledSwiGLU(activation_recompute_in_mlp=True))
    recipes_of = {"current": recipes.Float8CurrentScaling(), "delayed": recipes.DelayedScaling()}
    text = " ".join(str(plan_of(model, recipes_of[name])).split())
    assert "Backward computes the scaled activation again." in text


@pytest.mark.usefixtures("groups_at_once")
@EVERY_RECIPE
def test_of_one_group(make: Callable[[], Any]) -> None:
    """One quantizer of one group is not one quantizer of all groups."""
    found = []
    for again, fusions in ((True, fuser.FUSIONS), (False, fuser.FUSIONS), (False, UNFUSED)):
        torch.manual_seed(0)
        options = {"dtype": BF16, "device": "cpu", "bias": False}
        model = fuser.Sequential(
            fuser.GroupedLinear(1, K, 2 * F, **options),
            fuser.ScaledSwiGLU(activation_recompute_in_mlp=again),
            fuser.GroupedLinear(1, F, K, **options),
            fusions=fusions,
        )
        steps, recipe = [], make()
        for scale in (1.0, 8.0, 0.5, 3.0):
            given, sizes = tensors(), torch.tensor([T - 40])
            x = (scale * given["x"]).requires_grad_()
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x, sizes, given["scales"], sizes)
            y.backward(given["dy"])
            grads = [param.grad.clone() for param in model.parameters()]
            state = [v.clone() for v in model.state_dict().values()]
            steps += [y.detach(), x.grad, *grads, *state]
        found.append(steps)
    for each in found[1:]:
        for one, other in zip(found[0], each, strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("make", [lambda: None, recipes.MXFP8BlockScaling], ids=["bf16", "MXFP8"])
def test_scales_in_fp32_get_gradients_in_fp32(make: Callable[[], Any]) -> None:
    found = []
    for fusions in (fuser.FUSIONS, UNFUSED):
        model = mlp(fusions=fusions, bias=True, scale_bias=True)
        given, sizes, recipe = tensors(), torch.tensor(SPLITS), make()
        scales = [given["scales"].float().requires_grad_() for _ in range(3)]
        with InFp64():
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(given["x"], sizes, scales[0], scales[1], sizes, scales[2])
            y.backward(given["dy"])
        found.append([each.grad for each in scales])
    for one, other in zip(*found, strict=True):
        assert one.dtype is torch.float32
        assert torch.equal(one, other)


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"bias": True, "scale_bias": True},
        {"single_grouped_weight": True},
        {"bias": True, "scale_bias": True, "single_grouped_bias": True},
    ],
    ids=str,
)
@EVERY_RECIPE
def test_biases_and_layouts(make: Callable[[], Any], options: dict[str, bool]) -> None:
    found, expected = (run(mlp(fusions=f, **options), make()) for f in (fuser.FUSIONS, UNFUSED))
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        # Sums of rows have other rows of zeros in between.
        assert torch.allclose(one, other, rtol=0.01, atol=0.01), place
        assert one.isfinite().all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("options", [{}, {"bias": True, "scale_bias": True}], ids=str)
def test_in_fp32_on_a_cpu(name: str, options: dict[str, bool]) -> None:
    for again in (False, True):
        model = mlp(ACTIVATIONS[name](activation_recompute_in_mlp=again), FP32, **options)
        assert is_fused(model)
        alone = mlp(ACTIVATIONS[name](), FP32, UNFUSED, **options)
        assert_equal(run(model), run(alone))


FROZEN = {
    "x": lambda m: [],
    "up": lambda m: list(m[0].parameters()),
    "down": lambda m: list(m[2].parameters()),
    "one of up": lambda m: [m[0].weight1],
}


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("frozen", [*FROZEN, "all but x", "all but scales"])
@EVERY_RECIPE
def test_what_is_frozen_gets_no_gradient(make: Callable[[], Any], frozen: str) -> None:
    """And the others get what they get alone."""
    found = []
    for fusions in (fuser.FUSIONS, UNFUSED):
        model = mlp(fusions=fusions)
        params = list(model.parameters()) if "but" in frozen else FROZEN[frozen](model)
        for param in params:
            param.requires_grad_(False)
        given, sizes = tensors(), torch.tensor(SPLITS)
        x = given["x"].requires_grad_(frozen not in ("x", "all but scales"))
        scales = given["scales"].requires_grad_(frozen != "all but x")
        with fuser.autocast(enabled=make() is not None, recipe=make()):
            y = model(x, sizes, scales, sizes)
        y.backward(given["dy"])
        found.append([x.grad, scales.grad, *(param.grad for param in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


KINDS = ("x", "0.weight", "0.bias", "2.weight", "2.bias", "of up", "of h", "of down")
"""Leaves of an MLP with scaled biases: the last three are scales."""


def leaves_of(model: fuser.Sequential, frozen: Collection[str]) -> dict[str, torch.Tensor]:
    """The leaves by name, which begin with those of KINDS; some of them frozen."""
    given = tensors(model[0]._dtype)
    generator = torch.Generator().manual_seed(2)
    leaves: dict[str, torch.Tensor] = {"x": given["x"], "of h": given["scales"].float()}
    for name in ("of up", "of down") if model[0].scale_bias else ():
        leaves[name] = torch.rand(T, generator=generator)
    leaves |= dict(model.named_parameters())
    for name, leaf in leaves.items():
        leaf.requires_grad_(not name.startswith(tuple(frozen)))
    return leaves


def step_of(model: fuser.Sequential, leaves: dict[str, torch.Tensor], recipe: Any) -> None:
    sizes, dy = torch.tensor(SPLITS), tensors(model[0]._dtype)["dy"]
    extras = [[sizes, leaves[name]] if name in leaves else [sizes] for name in ("of up", "of down")]
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(leaves["x"], *extras[0], leaves["of h"], *extras[1])
    if y.requires_grad:
        y.backward(dy)


def gradients_in_fp64(
    model: fuser.Sequential, leaves: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradients of all leaves, by torch's autograd and a loop over the groups."""
    count, function = sum(SPLITS), model[1].function
    wide = {n: leaf.detach().double().requires_grad_() for n, leaf in leaves.items()}
    formula = oracles.formula_of(function)
    ones, parts = torch.ones(T).double(), []
    scales = [wide.get(name, ones) for name in ("of up", "of h", "of down")]
    groups = zip(*(each[:count].split(SPLITS) for each in (wide["x"], *scales)), strict=True)
    for g, (x, of_up, of_h, of_down) in enumerate(groups):
        up, down = ([wide[f"{i}.{what}{g}"] for what in ("weight", "bias")] for i in (0, 2))
        h = formula(x @ up[0].t() + of_up[:, None] * up[1]) * of_h[:, None]
        parts.append(h @ down[0].t() + of_down[:, None] * down[1])
    dy = tensors(model[0]._dtype)["dy"][:count].double()
    grads = torch.autograd.grad(torch.cat(parts), list(wide.values()), dy)
    return dict(zip(wide, grads, strict=True))


def assert_near(
    leaves: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], bound: float
) -> None:
    """Each leaf that requires a gradient has that, and no other one has any."""
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == leaf.requires_grad, name
        if leaf.grad is not None:
            error = (leaf.grad.double() - exact[name]).norm()
            assert error <= bound * exact[name].norm(), (name, error / exact[name].norm())


@pytest.mark.parametrize("scale_bias", [False, True], ids=["bias", "scaled bias"])
@pytest.mark.parametrize("name", ["SwiGLU", "SReLU"])
def test_in_fp32_every_set_of_leaves_gets_its_gradients(name: str, scale_bias: bool) -> None:
    """Against fp64, whichever leaves are frozen."""
    kinds = KINDS if scale_bias else [kind for kind in KINDS if kind not in ("of up", "of down")]
    model = mlp(ACTIVATIONS[name](), FP32, bias=True, scale_bias=scale_bias)
    exact = gradients_in_fp64(model, leaves_of(model, ()))
    for count in range(len(kinds)):
        for frozen in itertools.combinations(kinds, count):
            model.zero_grad(set_to_none=True)
            leaves = leaves_of(model, frozen)
            step_of(model, leaves, None)
            assert_near(leaves, exact, 1e-5)


def assert_leaves_alone(
    model: fuser.Sequential, recipe: recipes.Recipe, *, and_others: bool
) -> None:
    """Each kind of leaves alone gets its gradients; and the others get theirs without it."""
    kinds = [kind for kind in KINDS if model[0].scale_bias or kind not in ("of up", "of down")]
    exact = gradients_in_fp64(model, leaves_of(model, ()))
    bound = 0.4 if recipe.nvfp4() else 0.15
    for kind in kinds:
        alone = [other for other in kinds if other != kind]
        for frozen in (alone, [kind]) if and_others else (alone,):
            model.zero_grad(set_to_none=True)
            leaves = leaves_of(model, frozen)
            step_of(model, leaves, recipe)
            assert_near(leaves, exact, bound)


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("scale_bias", [False, True], ids=["bias", "scaled bias"])
@pytest.mark.parametrize("make", PADDED.values(), ids=PADDED)
def test_under_a_recipe_leaves_get_their_gradients_whatever_is_frozen(
    make: Callable[[], Any], scale_bias: bool
) -> None:
    if make is recipes.DelayedScaling:
        pytest.skip("the scales of the first step are 1")
    model = mlp(bias=True, scale_bias=scale_bias)
    assert is_fused(copy.deepcopy(model), make()) or scale_bias
    assert_leaves_alone(model, make(), and_others=True)


@pytest.mark.usefixtures("groups_at_once")
def test_leaves_alone_get_their_gradients_from_kernels() -> None:
    """Of biases alone no gradient is quantized, so that no kernel leaves sums beside one."""
    with on_kernels():
        assert_leaves_alone(mlp(bias=True), recipes.MXFP8BlockScaling(), and_others=False)


def test_an_evaluation_saves_nothing() -> None:
    model, given, sizes = mlp(), tensors(), torch.tensor(SPLITS)
    with torch.no_grad():
        y = model(given["x"], sizes, given["scales"], sizes)
    assert y.grad_fn is None
    wanted = mlp(fusions=UNFUSED)(given["x"], sizes, given["scales"], sizes)
    assert torch.equal(y, wanted)


def test_recomputing_saves_less() -> None:
    def saved_bytes(again: bool) -> int:
        model, given = mlp(fuser.ScaledSwiGLU(activation_recompute_in_mlp=again)), tensors()
        sizes, kept = torch.tensor(SPLITS), {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(given["x"].requires_grad_(), sizes, given["scales"], sizes)
        return sum(kept.values())

    with fuser.activation_memory_budget(None):
        assert saved_bytes(False) - saved_bytes(True) == T * F * 2
    assert saved_bytes(False) == saved_bytes(True)


def test_sizes_that_differ_are_refused_on_the_host() -> None:
    model, given = mlp(), tensors()
    sizes, other = torch.tensor(SPLITS), torch.tensor(SPLITS[::-1])
    words = said("shared-sizes-grouped-mlp-ops", None, None, "130, 0, 47, 100", "100, 47, 0, 130")
    with pytest.raises(InputError, match=words):
        model(given["x"], sizes, given["scales"], other)
    y = model(given["x"], sizes, given["scales"], sizes.clone())
    assert torch.equal(y, model(given["x"], sizes, given["scales"], sizes.int()))


def test_sizes_of_two_tensors_run_the_ops_one_by_one(groups_at_once: None) -> None:
    """With the same sizes, or with others that a GPU holds and the host does not know."""
    model, given = mlp(fuser.ScaledSwiGLU()), tensors()
    up, activation, down = copy.deepcopy(model)
    sizes, other = torch.tensor(SPLITS), torch.tensor([100, 47, 30, 100])
    fused = fuser.fused_ops.GroupedMLP(list(model))
    contexts = [OperationContext() for _ in range(3)]
    for context in contexts:
        context.requires_grad = False
    y, _ = fused.fuser_forward(
        contexts,
        given["x"],
        basic_op_extra_inputs=[(sizes,), (given["scales"],), (other,)],
        prev_op_grad_output_quantizer=None,
        next_op_input_quantizer=None,
        basic_op_kwargs=[{}, {}, {}],
    )
    assert torch.equal(y, down(activation(up(given["x"], sizes), given["scales"]), other))


def test_buffers_of_the_caller_are_used() -> None:
    """By the ops one by one."""
    model, given, sizes = mlp(), tensors(), torch.tensor(SPLITS)
    wanted = model(given["x"], sizes, given["scales"], sizes)
    out, wide = torch.empty(T, K, dtype=BF16), torch.empty(T, 2 * F, dtype=BF16)
    grad = torch.empty(T, K, dtype=BF16)
    x = given["x"].requires_grad_()
    kwargs = {0: {"output": wide, "grad_input": grad}, 2: {"output": out}}
    y = model(x, sizes, given["scales"], sizes, op_kwargs=kwargs)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(y, wanted)
    assert wide[: sum(SPLITS)].any()
    y.backward(given["dy"])
    assert torch.equal(x.grad, grad)


def test_main_grad_and_delayed_weight_gradients() -> None:
    expected = mlp()
    run(expected, steps=1)
    for options in (
        {"accumulate_into_main_grad": True},
        {"delay_wgrad_compute": True},
        {"accumulate_into_main_grad": True, "delay_wgrad_compute": True},
    ):
        model = mlp(**options)
        has_main_grad = "accumulate_into_main_grad" in options
        for param in model.parameters():
            if has_main_grad:
                param.main_grad = torch.ones(param.shape)
                param.grad_added_to_main_grad = False
        given, sizes = tensors(), torch.tensor(SPLITS)
        model(given["x"].requires_grad_(), sizes, given["scales"], sizes).backward(given["dy"])
        if "delay_wgrad_compute" in options:
            assert all(p.grad is None for p in model.parameters())
            model[0].backward_dw()
            model[2].backward_dw()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            if has_main_grad:
                assert torch.allclose(ours.main_grad - 1, theirs.grad.float(), atol=0.02)
            else:
                assert torch.equal(ours.grad, theirs.grad)


def test_a_weight_changed_between_forward_and_backward_is_noticed() -> None:
    for place, name in itertools.product((0, 2), ("weight0", "weight3")):
        model, given, sizes = mlp(), tensors(), torch.tensor(SPLITS)
        y = model(given["x"].requires_grad_(), sizes, given["scales"].requires_grad_(), sizes)
        with torch.no_grad():
            getattr(model[place], name).add_(1)
        with pytest.raises((StateError, RuntimeError), match=r"changed in place|modified by an in"):
            y.backward(given["dy"])


@pytest.mark.parametrize("name", ["weight0", "weight3", "bias0", "bias2"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_scaled_bias_is_watched_beside_the_weights(place: int, name: str) -> None:
    """Also where each parameter counts its own changes, as after a move."""
    model = copy.deepcopy(mlp(bias=True, scale_bias=True)).to("cpu")
    leaves, sizes = leaves_of(model, ()), torch.tensor(SPLITS)
    y = model(leaves["x"], sizes, leaves["of up"], leaves["of h"], sizes, leaves["of down"])
    with torch.no_grad():
        getattr(model[place], name).add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an in"):
        y.backward(tensors()["dy"])
    assert all(leaf.grad is None for leaf in leaves.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    given, sizes, found = tensors(), torch.tensor(SPLITS), []
    for is_checkpointed in (False, True):
        model = mlp()
        x = given["x"].clone().requires_grad_()
        if is_checkpointed:
            y = checkpoint(model, x, sizes, given["scales"], sizes, use_reentrant=reentrant)
        else:
            y = model(x, sizes, given["scales"], sizes)
        y.backward(given["dy"])
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert_equal(*found)


def test_other_shapes_than_a_matrix() -> None:
    model, given, sizes = mlp(), tensors(), torch.tensor(SPLITS)
    x = given["x"].view(3, 100, K).requires_grad_()
    scales = given["scales"].view(3, 100).requires_grad_()
    y = model(x, sizes, scales, sizes)
    y.backward(given["dy"].view_as(y))
    flat = run(mlp(), steps=1)
    assert_equal([y.detach().view(T, K), x.grad.view(T, K), scales.grad.view(T)], flat[:3])


# -- on kernels -------------------------------------------------------------------------


@pytest.fixture
def symbols(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched."""
    found: list[str] = []
    call = Kernel.__call__

    def noted(kernel: Kernel, launch: Any, *args: Any) -> None:
        found.append(kernel.symbol)
        call(kernel, launch, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    return found


Sums = dict[str, tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Of the last backward of a GroupedMLP with biases: the gradients of scales and of biases.

    In fp64, each with the sum of its magnitudes: from the gradient of h and from z, and from the
    gradient of z as a kernel writes it.
    """
    found: Sums = {}
    backward = grouped_mlp.scaled_activation_bias_backward

    def noted(function: Any, dh: Any, z: Any, scales: Any, groups: Any, **options: Any) -> Any:
        dz, _ = pointwise.chain_backward((function.scaled,), dh, z, (scales,), (False,))
        dz = materialize(dz).double()
        inside = torch.arange(128) < groups.tiles[:, 2:3]
        group = torch.where(inside, groups.tiles[:, :1], -1).flatten()
        of_groups = [dz[group == g] for g in range(len(groups.ends))]
        h = oracles.formula_of(function)(z.double())
        products = reference.unpad(dh.double() * h, groups.ends, groups.padded_ends, groups.rows)
        for name, rows, dim in (("scales", [products], 1), ("biases", of_groups, 0)):
            sums = [torch.stack([r.sum(dim), r.abs().sum(dim)]) for r in rows]
            found[name] = tuple(torch.stack(sums, 1))
        return backward(function, dh, z, scales, groups, **options)

    monkeypatch.setattr(grouped_mlp, "scaled_activation_bias_backward", noted)
    return found


ON_KERNELS = [
    *((name, "SwiGLU") for name in PADDED),
    *(("mxfp8", name) for name in ACTIVATIONS if name != "SwiGLU"),
    *(("current", name) for name in ("SwiGLU, interleaved", "SReLU")),
]


@pytest.mark.sampled
@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize(("recipe", "name"), ON_KERNELS, ids=str)
def test_one_kernel_makes_and_sums_and_quantizes_the_gradient_of_z(
    recipe: str, name: str, symbols: list[str], exact_sums: Sums
) -> None:
    """Sums are in another order than those of the ops alone; all else has their bits."""
    make, found = PADDED[recipe], []
    for fusions, again in ((fuser.FUSIONS, False), (fuser.FUSIONS, True), (UNFUSED, False)):
        activation = ACTIVATIONS[name](activation_recompute_in_mlp=again)
        model = mlp(activation, fusions=fusions, bias=True)
        with on_kernels():
            found.append(run(model, make(), steps=1))
        if len(found) == 1:
            own = [s for s in symbols if "BackwardProducer" in s or "pointwise_backward" in s]
            del own[0]  # what this test launches to know the gradient
            is_twice = recipe in ("current", "nvfp4")
            beside = [s for s in own if beside_of(s) == (True, True)]
            assert len(own) == 1 + is_twice, own
            assert len(beside) == 1
            assert all(beside_of(s) == (False, False) for s in own if s not in beside)
            assert sum("fuser_sum_groups" in s for s in symbols) == 1
            assert sum("fuser_sum_parts" in s for s in symbols) == 1
    fused, repeated, alone = found
    assert_equal(fused, repeated)
    names = ["y", "x", "scales", *(n for n, _ in model.named_parameters())]
    of_biases = [place for place, each in enumerate(names) if each.startswith("0.bias")]
    for place, (one, other) in enumerate(zip(fused, alone, strict=True)):
        assert one.isfinite().all()
        if place != 2 and place not in of_biases:
            assert torch.equal(one, other), names[place]
    # One rounding to bf16; an activation is off by 2^-16 of itself, and sums by less.
    scales, biases = exact_sums["scales"], exact_sums["biases"]
    for one, (exact, most) in (
        (fused[2], [each[0] for each in scales]),
        (torch.stack([fused[place] for place in of_biases]), biases),
    ):
        off = (one.double() - exact).abs()
        assert (off <= 2**-8 * exact.abs() + 2**-15 * most).all(), (off / most).max()
    assert not fused[2][sum(SPLITS) :].any()
    assert not fused[of_biases[SPLITS.index(0)]].any()


def beside_of(symbol: str) -> tuple[bool, bool]:
    """Whether a kernel leaves the gradients of scales, and of biases, beside its values."""
    chain = symbol.partition("ScaledActivation<")[2]
    scaled, _, flags = chain.partition(">>, ")
    return scaled.endswith("true"), flags.startswith("true")


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("frozen", ["scales", "biases", "both", "one bias"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_kernel_leaves_only_sums_that_are_wanted(
    frozen: str, dtype: torch.dtype, symbols: list[str]
) -> None:
    model = mlp(dtype=dtype, bias=True)
    biases = [getattr(model[0], f"bias{g}") for g in range(G)]
    for bias in {"biases": biases, "both": biases, "one bias": biases[:1]}.get(frozen, []):
        bias.requires_grad_(False)
    given, sizes = tensors(dtype), torch.tensor(SPLITS)
    scales = given["scales"].requires_grad_(frozen not in ("scales", "both"))
    with on_kernels():
        with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
            y = model(given["x"].requires_grad_(), sizes, scales, sizes)
        y.backward(given["dy"])
    (made,) = (s for s in symbols if "BackwardProducer" in s or "pointwise_backward" in s)
    assert beside_of(made) == (scales.requires_grad, biases[-1].requires_grad)
    assert (scales.grad is None) == (not scales.requires_grad)
    assert [b.grad is None for b in biases] == [not b.requires_grad for b in biases]


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize(
    "options",
    [{"bias": True}, {"bias": True, "single_grouped_bias": True}],
    ids=str,
)
def test_sums_beside_are_those_of_later_calls_too(options: dict[str, bool]) -> None:
    """Of recorded passes; the same bits in every step."""
    model = mlp(**options)
    with on_kernels():
        found = run(model, recipes.MXFP8BlockScaling(), steps=5)
    each = len(found) // 5
    for step in range(1, 5):
        assert_equal(found[step * each : (step + 1) * each], found[:each])
    with on_kernels():
        assert_equal(run(mlp(**options), recipes.MXFP8BlockScaling(), steps=1), found[:each])


@pytest.mark.usefixtures("groups_at_once")
def test_sums_of_a_gradient_that_a_format_pads(exact_sums: Sums) -> None:
    """MXFP8 of 40 columns: the gradient of z is written, padded to 64, and quantized."""
    torch.manual_seed(0)
    options = {"dtype": BF16, "device": "cpu", "bias": True}
    ops = (fuser.GroupedLinear(G, K, 40, **options), fuser.ScaledSReLU())
    model = fuser.Sequential(*ops, fuser.GroupedLinear(G, 40, K, **options))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)
    with on_kernels():
        found = run(model, recipes.MXFP8BlockScaling(), steps=1)
    exact, most = exact_sums["biases"]
    one = torch.stack([getattr(model[0], f"bias{g}").grad for g in range(G)])
    assert ((one.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-20 * most).all()
    assert all(each.isfinite().all() for each in found)


# -- microbatches -----------------------------------------------------------------------


def microbatches(
    model: fuser.Sequential,
    recipe: Any,
    firsts: list[bool | None],
    places: tuple[int, ...] = (0, 2),
) -> list[Any]:
    """Output and accumulated gradients of microbatches whose linears get these flags."""
    found, sizes = [], torch.tensor(SPLITS)
    for seed, first in enumerate(firsts):
        given = tensors()
        x = (given["x"] * (seed + 1)).requires_grad_()
        kwargs = {model[place]: {"is_first_microbatch": first} for place in places}
        with fuser.autocast(recipe=recipe):
            y = model(x, sizes, given["scales"], sizes, op_kwargs=kwargs)
        y.backward(given["dy"])
        found += [y.detach(), x.grad]
    return [*found, *(param.grad for param in model.parameters())]


KEEPING = {name: make for name, make in PADDED.items() if name != "delayed"}


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, UNFUSED], ids=["fused", "unfused"])
@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": True}], ids=str)
def test_weights_of_the_first_microbatch_are_kept(
    make: Callable[[], Any], fusions: Any, options: Any, request: pytest.FixtureRequest
) -> None:
    for is_at_once in (False, True):
        if is_at_once:
            request.getfixturevalue("groups_at_once")
        model, plain = (mlp(fusions=fusions, **options) for _ in range(2))
        found = microbatches(model, make(), [True, False, False])
        kept = next(iter(model[0]._kept_weight.values())).made
        assert_equal(found, microbatches(plain, make(), [None] * 3))
        assert next(iter(model[0]._kept_weight.values())).made is kept
        with torch.no_grad():
            for each in (model, plain):
                next(each.parameters()).mul_(2)
        for each in (model, plain):
            each.zero_grad()
        # A changed weight is quantized again, whatever the flag says.
        assert_equal(microbatches(model, make(), [False]), microbatches(plain, make(), [None]))
        assert next(iter(model[0]._kept_weight.values())).made is not kept


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, UNFUSED], ids=["fused", "unfused"])
@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("place", [0, 2], ids=["first", "second"])
def test_one_linear_alone_may_keep_its_weights(
    place: int, make: Callable[[], Any], fusions: Any, request: pytest.FixtureRequest
) -> None:
    for is_at_once in (False, True):
        if is_at_once:
            request.getfixturevalue("groups_at_once")
        model, plain = (mlp(fusions=fusions) for _ in range(2))
        found = microbatches(model, make(), [True, False, False, None, False], (place,))
        assert_equal(found, microbatches(plain, make(), [None] * 5))
        assert [bool(model[at]._kept_weight) for at in (place, 2 - place)] == [True, False]


def test_kept_weights_serve_a_backward_after_an_evaluation(groups_at_once: None) -> None:
    model, plain = mlp(), mlp()
    recipe, given, sizes = recipes.MXFP8BlockScaling(), tensors(), torch.tensor(SPLITS)
    kwargs = {op: {"is_first_microbatch": True} for op in (model[0], model[2])}
    with torch.no_grad(), fuser.autocast(recipe=recipe):
        model(given["x"], sizes, given["scales"], sizes, op_kwargs=kwargs)
    found = microbatches(model, recipe, [False])
    assert_equal(found, microbatches(plain, recipe, [None]))
    copied = copy.deepcopy(model)
    assert copied[0]._kept_weight is None
    model.load_state_dict(plain.state_dict())
    assert model[0]._kept_weight is None


# -- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_the_ops_run_where_each_group_is_quantized_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES[name]()
    assert is_fused(mlp(), recipe) == quantizes_groups_of(recipe)  # on a CPU too
    one_by_one(monkeypatch)
    plan = plan_of(mlp(), recipe)
    reasons = [refusal.reason for refusal in plan.refusals if refusal.fusion == "GroupedMLP"]
    assert reasons == [
        f"under {type(recipe).__name__} here, each group is quantized and multiplied alone."
    ]


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        (
            lambda: (fuser.GroupedLinear(2, 8, 8), fuser.GroupedLinear(3, 4, 8)),
            sentence("grouped-mlp-linears-groups", 2, 3),
        ),
        (
            lambda: (fuser.GroupedLinear(2, 8, 8), fuser.GroupedLinear(2, 4, 8, dtype=BF16)),
            sentence("grouped-mlp-linears-compute", "torch.float32", "torch.bfloat16"),
        ),
    ],
)
def test_linears_that_do_not_match_are_refused(ops: Any, words: str) -> None:
    up, down = ops()
    model = fuser.Sequential(up, fuser.ScaledSwiGLU(), down)
    sizes = [torch.full((op.num_groups,), 1) for op in (up, down)]
    plan = model.plan(torch.ones(4, 8), sizes[0], torch.ones(4), sizes[1])
    assert words in [refusal.reason for refusal in plan.refusals]


def test_wrong_shapes_are_named_by_their_op() -> None:
    model, given, sizes = mlp(), tensors(), torch.tensor(SPLITS)
    with pytest.raises(InputError, match=said("grouped-linear-scales-scale-per", "ScaledSwiGLU")):
        model(given["x"], sizes, given["scales"][1:], sizes)
    with pytest.raises(
        InputError, match=said("recipe-takes", None, None, holds("one for each of its 4 groups"))
    ):
        model(given["x"], sizes[1:], given["scales"], sizes[1:])
    with pytest.raises(InputError, match=said("grouped-sum-more-rows", 554, 300)):
        model(given["x"], 2 * sizes, given["scales"], 2 * sizes)
    assert model(given["x"], sizes, given["scales"], sizes).isfinite().all()


def test_the_sums_of_groups_without_rows_are_zeros() -> None:
    sums = reference.sum_groups(torch.zeros(0, 8), torch.zeros(0, 4, dtype=torch.int32), 3)
    assert torch.equal(sums, torch.zeros(3, 8))


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("budget", [1, None])
@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=["none", "current"])
def test_the_second_linear_alone_may_be_trained(recipe: Any, budget: int | None) -> None:
    """Its input is computed again from that of the activation, of which nobody wants a gradient."""
    found = []
    for fusions in (fuser.FUSIONS, ()):
        model = mlp(fusions=fusions)
        model[0].requires_grad_(False)
        given, sizes = tensors(BF16), torch.tensor(SPLITS)
        with (
            fuser.activation_memory_budget(budget),
            fuser.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            y = model(given["x"], sizes, given["scales"], sizes)
        y.backward(given["dy"])
        found.append([y.detach(), *(p.grad for p in model[2].parameters())])
        assert all(p.grad is None for p in model[0].parameters())
    for one, other in zip(*found, strict=True):
        rows = slice(sum(SPLITS)) if one.shape[0] == T else slice(None)
        torch.testing.assert_close(one[rows], other[rows], rtol=2**-6, atol=2**-6)
