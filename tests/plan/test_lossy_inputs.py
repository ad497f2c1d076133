"""Inputs of activations that are kept in FP8: bits of the rounded values, bytes, and plans."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from said import said
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import gemm
from fuser import recipe as recipes
from fuser.cuda.launch import Kernel, Launch
from fuser.formats import DType
from fuser.precision.quantizer_for import make_quantizer
from fuser.reference import block_scaling as reference
from fuser.tensors import Float8BlockwiseQTensor, QuantizedTensor

T, H, F = 128, 128, 448
BF16, F32 = torch.bfloat16, torch.float32
CURRENT = recipes.Float8CurrentScaling()
RECIPES: dict[str, Any] = {
    "none": None,
    "current": CURRENT,
    "delayed": recipes.DelayedScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "high precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": recipes.Float8CurrentScaling(backward_override="dequantized"),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
LOSSY = fuser.activation_memory_budget(1, lossy_activation_inputs=True)
EVERYTHING = fuser.activation_memory_budget(None)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is emulated"),
    pytest.mark.sampled(most=12),
]

Parts = tuple[list[torch.nn.Module], list[torch.nn.Module]]


def swiglu(width: int = F) -> Parts:
    """The ops before an activation, and those from it on."""
    return [fuser.RMSNorm(H), fuser.Linear(H, 2 * width)], [fuser.SwiGLU(), fuser.Linear(width, H)]


def gelu(width: int = F) -> Parts:
    return [fuser.Linear(H, width)], [fuser.GELU(), fuser.Linear(width, H)]


def model_of(make: Callable[[], Parts] = gelu) -> fuser.Sequential:
    before, after = make()
    return fuser.Sequential(*before, *after)


def under(recipe: Any) -> Any:
    return contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe)


def on(place: str) -> Any:
    return on_kernels() if place == "kernels" else contextlib.nullcontext()


def leaf(dtype: torch.dtype, rows: int = T, seed: int = 1) -> torch.Tensor:
    return oracles.leaf(oracles.random_tensor((rows, H), dtype, seed))


def rounded(z: torch.Tensor) -> torch.Tensor:
    """``z`` in E4M3 with a scale for 128 elements of a row, by the reference."""
    data, scale_inv, *_ = reference.quantize(
        z.detach(), DType.kFloat8E4M3, block_dim=1, columnwise=False
    )
    assert data is not None
    assert scale_inv is not None
    return reference.dequantize(
        data, scale_inv, DType.kFloat8E4M3, z.dtype, block_dim=1, columnwise=False
    )


def assert_equal(found: Any, expected: Any, *, sums: float = 0.0) -> None:
    """Bits are equal; ``sums``: but sums of rows, of one dimension, may be in another order."""
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        if sums and one.dim() == 1:
            torch.testing.assert_close(one, other, rtol=sums, atol=sums * float(other.abs().max()))
        else:
            assert torch.equal(one, other)


SUMS = {F32: 1e-5, BF16: 0.02}


# -- bits ---------------------------------------------------------------------------------


def gradients_of_rounded(
    parts: Parts, x: torch.Tensor, dy: torch.Tensor, recipe: Any
) -> list[torch.Tensor]:
    """Of x and the parameters, by pipelines whose backward reads a rounded z that is given."""
    before, after = (fuser.Sequential(*ops) for ops in parts)
    activation = after[0]
    with EVERYTHING, under(recipe):
        z = before(x)
        z_rounded = rounded(z).requires_grad_()
        y = after(z_rounded)
        with torch.no_grad():
            h, h_rounded = (fuser.Sequential(activation)(values) for values in (z, z_rounded))
    dz, dweight, *others = torch.autograd.grad(y, (z_rounded, *after.parameters()), dy)
    if recipe is CURRENT:  # the copy for wgrad has the scale of the forward
        quantizers = (make_quantizer(recipe, role) for role in ("input", "grad_output"))
        of_h, of_dy = (q.with_usage(rowwise=False, columnwise=True) for q in quantizers)
        amaxes = of_h.amaxes_of(h)
        assert amaxes is not None
        columns = of_h.with_amaxes(amaxes)(h_rounded)
        dweight = gemm.quantized_wgrad(of_dy(dy), columns, dy.dtype, is_split=True)
    return [*torch.autograd.grad(z, (x, *before.parameters()), dz), dweight, *others]


@pytest.mark.parametrize("recipe", [None, CURRENT, RECIPES["mxfp8"]])
@pytest.mark.parametrize("make", [gelu, swiglu])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("place", ["torch", "kernels"])
def test_gradients_are_those_of_the_rounded_input_and_the_output_is_exact(
    make: Any, recipe: Any, dtype: torch.dtype, place: str
) -> None:
    torch.manual_seed(0)
    before, after = make()
    model = fuser.Sequential(*before, *after).to(dtype)
    x, dy = leaf(dtype), oracles.random_tensor((T, H), dtype, 2)
    leaves = (x, *model.parameters())
    with on(place):
        with under(recipe):
            exact = model(x)
            with LOSSY:
                y = model(x)
        assert torch.equal(y, exact)
        found = torch.autograd.grad(y, leaves, dy)
        expected = gradients_of_rounded((before, after), x, dy, recipe)
        assert_equal(found, expected, sums=SUMS[dtype])
        *_, of_last_bias = others = torch.autograd.grad(exact, leaves, dy)
        for one, other in zip(found, others, strict=True):
            error = (one - other).float().norm() / other.float().norm()
            assert (error == 0) if other is of_last_bias else (0 < error < 0.1)


def gradients(
    model: fuser.Sequential, x: torch.Tensor, recipe: Any, *extras: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    with LOSSY, under(recipe):
        y = model(x, *extras)
    dy = oracles.random_tensor(tuple(y.shape), y.dtype, 3)
    return torch.autograd.grad(y, (x, *model.parameters()), dy)


def random_ops(seed: int) -> list[torch.nn.Module]:
    chooses = random.Random(seed)
    ops: list[torch.nn.Module] = []
    width = H
    for _ in range(chooses.randint(3, 8)):
        kind = chooses.choice(["linear", "linear", "norm", "activation", "gated", "bias", "scale"])
        if kind == "linear":
            out = chooses.choice([64, 128, 192, 272])
            ops.append(fuser.Linear(width, out, bias=chooses.random() < 0.5))
            width = out
        elif kind == "norm":
            ops.append(fuser.RMSNorm(width))
        elif kind == "activation":
            activation: Any = chooses.choice([fuser.GELU, fuser.SReLU, fuser.SiLU])
            ops.append(activation(cache_quantized_input=chooses.random() < 0.2))
        elif kind == "gated" and width % 32 == 0:
            ops.append(fuser.SwiGLU())
            width //= 2
        elif kind == "bias":
            ops.append(fuser.Bias(width))
        elif kind == "scale":
            ops.append(fuser.ConstantScale(0.5))
    return [*ops, fuser.Linear(width, H), fuser.GELU(), fuser.Linear(H, H)]


@pytest.mark.parametrize("seed", range(16))
def test_fusions_and_what_else_is_computed_again_change_no_bits(seed: int) -> None:
    recipe = list(RECIPES.values())[seed % len(RECIPES)]
    dtype = (BF16, F32)[seed % 2]
    ops, found = random_ops(seed), []
    for fusions in (fuser.FUSIONS, ()):
        model = copy.deepcopy(fuser.Sequential(*ops, fusions=fusions).to(dtype))
        torch.manual_seed(seed)  # of stochastic rounding
        with on("kernels" if seed % 3 == 0 else "torch"):
            found.append(gradients(model, leaf(dtype), recipe))
    assert_equal(*found, sums=SUMS[dtype])


@pytest.mark.parametrize("place", ["torch", "kernels"])
@pytest.mark.parametrize(("rows", "width"), [(5, 72), (33, 200), (1, 8), (0, 128)])
def test_any_number_of_rows_and_columns(place: str, rows: int, width: int) -> None:
    """The last block of a row has the columns that are left."""
    before, after = gelu(width)
    model = fuser.Sequential(*before, *after)
    x = leaf(F32, rows)
    dy = oracles.random_tensor((rows, H), F32, 3)
    with on(place):
        found = gradients(model, x, None)
        expected = gradients_of_rounded((before, after), x, dy, None)
    assert_equal(found, expected, sums=SUMS[F32])
    assert any(op.rounds_input for op in key_of(model, x).ops)


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
def test_kernels_quantize_once_and_dequantize_once_more(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside these two launches a step has the launches of one with exact inputs."""
    symbols: list[str] = []
    call = Kernel.__call__

    def noted(kernel: Kernel, launch: Launch, *args: Any) -> None:
        symbols.append(kernel.symbol)
        call(kernel, launch, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    model, x = with_residual().to(BF16), leaf(BF16)
    launched = []
    for budget in (fuser.activation_memory_budget(1), LOSSY):
        symbols.clear()
        with on_kernels(), budget, under(recipe):
            y = model(x)
        with on_kernels():
            torch.autograd.grad(y.sum(), (x, *model.parameters()))
        launched.append(list(symbols))
    exact, lossy = launched
    more = list((Counter(lossy) - Counter(exact)).elements())
    assert not Counter(exact) - Counter(lossy)
    assert len(more) == 2
    assert "Block1dStore" in more[0]
    assert "BlockProducer" in more[1]
    assert any(s.startswith("fuser_tiled_pair<") for s in lossy) is (recipe is not None)


def test_a_backward_may_run_twice() -> None:
    model, x = model_of(), leaf(BF16)
    model.to(BF16)
    with LOSSY:
        y = model(x).sum()
    first = torch.autograd.grad(y, (x, *model.parameters()), retain_graph=True)
    assert_equal(torch.autograd.grad(y, (x, *model.parameters())), first)


def test_with_a_budget_of_none_only_the_input_of_the_activation_is_rounded() -> None:
    model, x = model_of().to(BF16), leaf(BF16)
    with EVERYTHING:
        y = model(x)
    expected = torch.autograd.grad(y.sum(), tuple(model.parameters()))
    with fuser.activation_memory_budget(None, lossy_activation_inputs=True):
        y = model(x)
    first, _, second, _ = torch.autograd.grad(y.sum(), tuple(model.parameters()))
    assert not torch.equal(first, expected[0])
    assert torch.equal(second, expected[2])


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
def test_a_graph_of_torch_compile_rounds_too(recipe: Any) -> None:
    torch._dynamo.reset()
    counters["stats"].clear()
    model, x = model_of(swiglu).to(BF16), leaf(BF16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def gradients_of(function: Any) -> tuple[torch.Tensor, ...]:
        with under(recipe):
            y = function(x)
        return torch.autograd.grad(y.square().sum(), (x, *model.parameters()))

    exact = gradients_of(model)
    with LOSSY:
        lossy = gradients_of(model)
    for budget, expected, graphs in (
        (LOSSY, lossy, 1),
        (fuser.activation_memory_budget(1), exact, 2),
        (LOSSY, lossy, 2),
    ):
        with budget:
            assert_equal(gradients_of(compiled), expected)
        assert counters["stats"]["unique_graphs"] == graphs
    assert not torch.equal(lossy[0], exact[0])


# -- experts --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, *(RECIPES[name] for name in ("current", "mxfp8"))])
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize("place", ["torch", "kernels"])
def test_experts_round_the_input_of_their_activation(recipe: Any, fusions: Any, place: str) -> None:
    """MXFP8 has no scale of the forward: its products are those of a z that is given rounded."""
    torch.manual_seed(0)
    up, down = (fuser.GroupedLinear(2, *sizes, bias=False) for sizes in ((H, 2 * F), (F, H)))
    model = fuser.Sequential(up, fuser.ScaledSwiGLU(), down, fusions=fusions).to(BF16)
    x, scales = leaf(BF16), torch.rand(T).to(BF16).requires_grad_()
    sizes, dy = torch.tensor([T // 4, T - T // 4]), oracles.random_tensor((T, H), BF16, 2)
    leaves = (x, scales, up.weight0, up.weight1)
    with on(place):
        with LOSSY, under(recipe):
            y = model(x, sizes, scales, sizes)
        found = torch.autograd.grad(y, (*leaves, down.weight0, down.weight1), dy)
        after = fuser.Sequential(*model[1:], fusions=fusions)
        with EVERYTHING, under(recipe):
            z = fuser.Sequential(up)(x, sizes)
            z_rounded = rounded(z).requires_grad_()
            y = after(z_rounded, scales, sizes)
    given = (z_rounded, scales, down.weight0, down.weight1)
    with on(place):
        dz, dscales, *last = torch.autograd.grad(y, given, dy)
        dx, *first = torch.autograd.grad(z, (x, up.weight0, up.weight1), dz)
    assert_equal(found[:4], (dx, dscales, *first))
    if recipe is not CURRENT:
        assert_equal(found[4:], last)


# -- bytes ----------------------------------------------------------------------------------


def kept_bytes(model: fuser.Sequential, x: torch.Tensor, recipe: Any = None) -> int:
    """The memory of the tensors that a forward saves, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_quantized = isinstance(tensor, QuantizedTensor)
        for buffer in tensor.buffers().values() if is_quantized else [tensor]:
            if buffer is not None and buffer.untyped_storage().data_ptr() not in own:
                sizes[buffer.untyped_storage().data_ptr()] = buffer.untyped_storage().nbytes()
        return tensor

    with under(recipe), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(sizes.values())


def with_residual() -> fuser.Sequential:
    return fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        fuser.RMSNorm(H),
        fuser.Linear(H, 2 * F, bias=False),
        fuser.SwiGLU(),
        fuser.Linear(F, H, bias=False),
        fuser.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


@pytest.mark.parametrize(
    ("make", "exact", "lossy"), [(with_residual, 16.0, 9.22), (model_of, 9.0, 5.61)]
)
def test_about_half_of_the_bytes_are_left(make: Any, exact: float, lossy: float) -> None:
    """Bytes a token for each of H columns, with F of 3.5 H."""
    model, x = make().to(BF16), leaf(BF16)
    assert kept_bytes(model, x) / (T * H) == pytest.approx(exact, abs=0.05)
    with LOSSY:
        assert kept_bytes(model, x) / (T * H) == pytest.approx(lossy, abs=0.05)


# -- plans ----------------------------------------------------------------------------------


def key_of(model: fuser.Sequential, x: torch.Tensor) -> Any:
    with LOSSY:
        return model.plan(x).key


class OwnGELU(fuser.GELU):
    """A user's op, which may read what it saves."""

    def op_forward(self, ctx: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().op_forward(ctx, input_, *args, **kwargs)


class Nothing(fuser.FusedOperation):
    window = (fuser.Reshape, fuser.Reshape)
    side = "joint"

    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    fuser_backward = fuser_forward


def is_rounded(op: torch.nn.Module, **options: Any) -> bool:
    model = fuser.Sequential(fuser.Linear(H, H), op, fuser.Linear(H, H), **options)
    return any(op_key.rounds_input for op_key in key_of(model, leaf(F32)).ops)


def test_only_activations_of_this_library_round_and_never_in_fusions_of_users() -> None:
    assert is_rounded(fuser.GELU())
    assert not is_rounded(OwnGELU())
    assert not is_rounded(fuser.GELU(cache_quantized_input=True))
    assert not is_rounded(fuser.GELU(), fusions=[*fuser.FUSIONS, Nothing])
    assert not is_rounded(fuser.RMSNorm(H))
    replaced = fuser.GELU()
    replaced.op_forward = types.MethodType(type(replaced).op_forward, replaced)  # type: ignore[method-assign]
    assert not is_rounded(replaced)  # whoever has set the method may read what it saves
    model = fuser.Sequential(fuser.Linear(H, H), fuser.GELU(), fuser.Linear(H, H))
    assert not any(op.rounds_input for op in model.plan(leaf(F32)).key.ops)


def test_a_call_without_gradients_rounds_nothing() -> None:
    model = model_of()
    with LOSSY:
        plan = model.plan(leaf(F32), training=False)
    assert not any(op.rounds_input for op in plan.key.ops)


def test_in_a_checkpoint_nothing_is_rounded() -> None:
    model, x = model_of().to(BF16), leaf(BF16)
    expected = torch.autograd.grad(model(x).sum(), (x, *model.parameters()))
    with LOSSY:
        y: Any = checkpoint(model, x, use_reentrant=False)
        found = torch.autograd.grad(y.sum(), (x, *model.parameters()))
    assert_equal(found, expected)


def test_the_budget_of_one_sequential_may_round() -> None:
    model, x = fuser.Sequential(*model_of(), memory_budget=LOSSY).to(BF16), leaf(BF16)
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        model(x)
    assert [type(t) for t in saved].count(Float8BlockwiseQTensor) == 1
    assert repr(LOSSY).endswith("lossy_activation_inputs=True)")


def test_a_pipeline_that_is_cut_for_hooks_rounds_too() -> None:
    width = 1024
    ops = [part for _ in range(3) for part in (fuser.BasicLinear(width, width), fuser.GELU())]
    model = fuser.Sequential(*ops).to(BF16)
    x = oracles.leaf(oracles.random_tensor((32, width), BF16, 1))
    expected = gradients(model, x, None)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    with LOSSY:
        assert model.plan(x).cuts
    found = gradients(model, x, None)
    assert torch.equal(found[0], expected[0])  # of weights, what is rebuilt is kept at a cut


@pytest.mark.parametrize("recipe", ["none", "current"])
def test_a_plan_says_what_is_rounded(recipe: str) -> None:
    model, x = model_of().to(BF16), leaf(BF16)
    with LOSSY, under(RECIPES[recipe]):
        plan = model.plan(x)
    line = "  2  GELU         input 464 B rounded to FP8 1x128 E4M3 (output of a product)"
    assert line in str(plan).splitlines()
    assert "rounded to FP8 1x128 E4M3" in plan.to_dot()
    written = json.loads(json.dumps(plan.to_dict()))
    assert any("rounded to FP8 1x128 E4M3" in text for text in written["sentences"]["kept"])
    assert [k["rounded_to"] for k in written["kept"] if k["ops"] == [2]] == ["FP8 1x128 E4M3"]
    assert not any(k["rounded_to"] for k in written["kept"] if k["ops"] != [2])
    (forward,) = (step for step in plan.forward if 2 in step.ops)
    (backward,) = (step for step in plan.backward if 2 in step.ops)
    assert "quantize to keep" in forward.kernel.split(", ")
    assert "dequantize" in backward.kernel.split(", ")


def test_a_chain_is_refused_with_the_reason() -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.ConstantScale(2.0))
    with LOSSY:
        plan = model.plan(leaf(BF16), device="h200")
    reasons = [refusal.reason for refusal in plan.refusals if refusal.fusion == "PointwiseChain"]
    assert "GELU caches its input quantized; a chain does not." in reasons


def test_a_budget_of_zero_keeps_no_input_to_round() -> None:
    with pytest.raises(fuser.InputError, match=said("rebuilt-activation-memory-lossy")):
        fuser.activation_memory_budget(0, lossy_activation_inputs=True)
