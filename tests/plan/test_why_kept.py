"""The reason that a plan gives for each tensor that it keeps for backward."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from said import sentence

import fuser
from fuser import recipe as recipes
from fuser.communication import PlannedGroup
from fuser.plan.plan import FusionPlan

T, H = 32, 64
EVERYTHING = sentence("why-kept-everything-activation-memory")
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")


def linear() -> fuser.BasicLinear:
    return fuser.BasicLinear(H, H)


def plan_of(*ops: torch.nn.Module, recipe: Any = None, **options: Any) -> FusionPlan:
    with contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe):
        model = fuser.Sequential(*ops, **options)
        return model.plan(torch.empty(T, H, requires_grad=True))


def reasons(plan: FusionPlan) -> dict[tuple[int, str], str]:
    """By op and name, of the tensors that are kept and counted there."""
    kept = [k for k in plan.kept if k.nbytes or k.bytes_per_token]
    assert all(k.reason for k in kept)
    assert not any(k.reason for k in plan.kept if k not in kept)
    return {(k.ops[0], k.name): k.reason for k in kept}


class OwnGELU(fuser.GELU):
    """A user's op, which may compute anything."""

    def op_forward(self, ctx: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().op_forward(ctx, input_, *args, **kwargs)


class Module(torch.nn.Module):
    """One that keeps the shape."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


def test_inputs_of_pipelines_and_products_and_what_ops_save_are_kept() -> None:
    plan = plan_of(fuser.RMSNorm(H), fuser.Linear(H, H), fuser.GELU(), linear())
    assert reasons(plan) == {
        (0, "input"): "the pipeline's input",
        (0, "statistics"): "saved by the op itself",
        (3, "input"): sentence("why-kept-output-product"),
    }


@pytest.mark.parametrize(
    ("ops", "reader", "reason"),
    [
        ((linear(), fuser.AddExtraInput(), linear()), 2, sentence("why-kept-output-product")),
        ((fuser.Bias(H), linear()), 1, "op 0 (Bias) cannot compute it again"),
        (
            (linear(), fuser.RMSNorm(H), fuser.Identity(), linear()),
            3,
            "op 2 (Identity) hands it on",
        ),
        (
            (linear(), fuser.RMSNorm(H), fuser.Identity(), fuser.Bias(H), linear()),
            4,
            "op 3 (Bias) cannot compute it again",
        ),
        ((linear(), fuser.RMSNorm(H), fuser.Bias(H), linear()), 3, "op 2 (Bias) cannot compute it"),
        (
            (linear(), fuser.GELU(cache_quantized_input=True), linear()),
            2,
            "op 1 (GELU) cannot compute it again",
        ),
        (
            (linear(), OwnGELU(), linear()),
            2,
            sentence("why-kept-user-op-computed", "op 1 (OwnGELU)"),
        ),
        ((linear(), OwnGELU(), linear()), 1, sentence("why-kept-user-op-may")),
        ((fuser.RMSNorm(H), fuser.GELU(), linear()), 1, "only inputs of linears are computed"),
        ((fuser.Identity(), linear()), 1, "the pipeline's input"),
    ],
)
def test_what_earlier_ops_cannot_compute_again_is_kept(
    ops: tuple[torch.nn.Module, ...], reader: int, reason: str
) -> None:
    extras = sum(getattr(op, "num_extra_inputs", 0) for op in ops)
    x = torch.empty(T, H, requires_grad=True)
    plan = fuser.Sequential(*ops).plan(x, *[x] * extras)
    assert reasons(plan)[reader, "input"].startswith(reason)


def test_what_a_frozen_op_does_not_save_is_kept() -> None:
    model = fuser.Sequential(fuser.RMSNorm(H).requires_grad_(False), linear())
    plan = model.plan(torch.empty(T, H))
    assert reasons(plan) == {(1, "input"): sentence("why-kept-needs-no-gradient", "op 0 (RMSNorm)")}


def test_with_a_budget_of_none_everything_is_kept_and_copies_of_weights_by_default() -> None:
    ops, recipe = (fuser.RMSNorm(H), linear()), recipes.Float8CurrentScaling()
    with fuser.activation_memory_budget(None):
        assert reasons(plan_of(*ops))[1, "input"] == EVERYTHING
    assert (1, "input") not in reasons(plan_of(*ops))
    found = reasons(plan_of(*ops, recipe=recipe))
    assert found[1, "weight"] == sentence("why-kept-keep-weight-copies", 4096)


def test_what_a_quantizer_may_quantize_otherwise_is_kept() -> None:
    recipe = recipes.CustomRecipe(qfactory=lambda role: fuser.MXFP8Quantizer())
    with fuser.activation_memory_budget(1, keep_weight_copies=False):
        found = reasons(plan_of(fuser.RMSNorm(H), linear(), recipe=recipe))
    other = sentence("why-kept-quantized-could-bytes")
    assert found[1, "input"] == found[1, "weight"] == other


def test_what_a_users_fusion_or_function_may_read_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(fuser.FusedOperation):
        window = (fuser.Reshape, fuser.Reshape)
        side = "joint"

        def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

        fuser_backward = fuser_forward

    ops = (fuser.RMSNorm(H), linear())
    plan = plan_of(*ops, fusions=[*fuser.FUSIONS, Nothing])
    by_fusion = sentence("why-kept-user-fusion-may", "Nothing")
    assert reasons(plan)[1, "input"] == by_fusion
    with fuser.activation_memory_budget(1, keep_weight_copies=False):
        recipe = recipes.Float8CurrentScaling()
        plan = plan_of(*ops, fusions=[*fuser.FUSIONS, Nothing], recipe=recipe)
    assert reasons(plan)[1, "weight"] == by_fusion
    known = fuser.runtime.pipeline._registered
    changed = dataclasses.replace(known, forward=(lambda ops, *, recipe: ops,))
    monkeypatch.setattr(fuser.runtime.pipeline, "_registered", changed)
    assert reasons(plan_of(*ops))[1, "input"] == sentence("why-kept-registered-function-may")


def test_the_module_that_ends_a_pipeline_is_named() -> None:
    activation = fuser.GELU()
    activation.register_forward_hook(lambda *args: None)
    found = reasons(plan_of(linear(), activation, linear()))
    by_hooks = "input of a pipeline: GELU is called as a module, it has hooks"
    assert found == {
        (0, "input"): "the pipeline's input",
        (1, "input"): by_hooks,
        (2, "input"): by_hooks,
    }
    found = reasons(plan_of(linear(), Module(), linear()))
    assert found[1, "input"].endswith("Module is called as a module, it is not an op of fuser")


def test_hooks_of_parameters_are_named() -> None:
    width = 1024
    ops = [part for _ in range(3) for part in (fuser.BasicLinear(width, width), fuser.GELU())]
    model = fuser.Sequential(*ops)
    x = torch.empty(T, width, requires_grad=True)
    assert all("hooks" not in reason for reason in reasons(model.plan(x)).values())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    plan = model.plan(x)
    cut = plan.cuts[-1]
    assert reasons(plan)[cut, "input"] == f"the pipeline is cut before op {cut} for hooks"


def test_what_other_ranks_sent_is_kept() -> None:
    group = PlannedGroup(2)
    gathering = fuser.BasicLinear(
        H,
        H,
        tensor_parallel_mode="column",
        tensor_parallel_group=group,
        sequence_parallel=True,
    )
    found = reasons(plan_of(fuser.RMSNorm(H), gathering))
    assert found[1, "input"] == sentence("why-kept-gathered-other-ranks")
    found = reasons(plan_of(fuser.AllGather(group), linear()))
    assert found[1, "input"] == sentence("why-kept-other-ranks", "op 0 (AllGather)")


def test_tokens_are_kept_in_place_of_their_rows() -> None:
    model = fuser.Sequential(fuser.MoeDispatch(4), fuser.GroupedLinear(4, H, H, bias=False))
    x = torch.empty(T, H, requires_grad=True)
    sizes = torch.full((4,), T // 2, dtype=torch.int32)
    plan = model.plan(x, torch.zeros(T, 2, dtype=torch.int32), torch.empty(T, 2), sizes)
    assert reasons(plan)[0, "input"] == "in place of the copies of its rows"


def test_reasons_are_in_print_and_dict() -> None:
    plan = plan_of(fuser.RMSNorm(H), linear(), fuser.GELU(), linear())
    line = "  2  GELU         input 256 B (output of a product)"
    assert line in str(plan).splitlines()
    written = plan.to_dict()
    assert [k["reason"] for k in written["kept"] if k["ops"] == [2]] == [
        sentence("why-kept-output-product")
    ]
    assert any("(output of a product)" in text for text in written["sentences"]["kept"])
    assert "(output of a product)" in plan.to_dot()


@pytest.mark.parametrize(
    ("op", "extras"),
    [
        (lambda: fuser.LayerNorm(H), ()),
        (lambda: fuser.RMSNorm(H), ()),
        (lambda: fuser.L2Normalization(), ()),
        (lambda: fuser.AdaptiveLayerNorm(H), ((T, H), (T, H))),
        (lambda: fuser.AdaptiveLayerNorm(H, batch_dim=1), ((2, H), (2, H))),
        (lambda: fuser.GELU(cache_quantized_input=True), ()),
        (lambda: fuser.SwiGLU(cache_quantized_input=True), ()),
        (lambda: fuser.LoRALinear(H, H, rank=4), ()),
        (lambda: fuser.Bias(H), ()),
    ],
)
def test_statistics_are_the_bytes_that_an_op_saves_beside_its_inputs(op: Any, extras: Any) -> None:
    """As torch's hooks of saved tensors get them, without the memory of inputs and parameters."""
    model = fuser.Sequential(op())
    x = torch.randn(T, 2, H, requires_grad=True)
    others = [torch.randn(shape, requires_grad=True) for shape in extras]
    given = {t.untyped_storage().data_ptr() for t in (x, *others, *model.parameters())}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        is_quantized = isinstance(tensor, fuser.QuantizedTensor)
        for part in tensor._memory() if is_quantized else [tensor]:
            saved[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = model(x, *others)
    kept = [k for k in model.plan(x, *others).kept if k.name == "statistics"]
    stated = sum(k.nbytes + k.bytes_per_token * 2 * T for k in kept)
    assert stated == sum(size for place, size in saved.items() if place not in given)
    assert y.requires_grad
