"""Tensors that backward computes again: bits, bytes kept, and when everything is kept."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from said import said
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.basic_ops.linear_parallel import Parallelism
from fuser.cuda.launch import Kernel, Launch
from fuser.errors import KernelUnavailable
from fuser.functional import normalization, pointwise
from fuser.tensors import QuantizedTensor

T, H, F = 128, 128, 256
BF16, F32 = torch.bfloat16, torch.float32
RECIPES: dict[str, Any] = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "rowwise": recipes.Float8RowwiseScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    **{
        f"{name}, {override}": make(backward_override=override)
        for name, make in (
            ("current", recipes.Float8CurrentScaling),
            ("nvfp4", recipes.NVFP4BlockScaling),
        )
        for override in recipes.BACKWARD_OVERRIDES
    },
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is emulated"),
    pytest.mark.sampled(most=12),
]


# Also of weights, which by default are kept.
LEAST = fuser.activation_memory_budget(1, keep_weight_copies=False)
EVERYTHING = fuser.activation_memory_budget(None)


@pytest.fixture
def budget() -> Iterator[None]:
    with LEAST:
        yield


within_budget = pytest.mark.usefixtures("budget")


def swiglu(norm: Any = fuser.RMSNorm) -> fuser.Sequential:
    return fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        norm(H),
        fuser.Linear(H, 2 * F, bias=False),
        fuser.SwiGLU(),
        fuser.Linear(F, H, bias=False),
        fuser.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def gelu() -> fuser.Sequential:
    return fuser.Sequential(fuser.Linear(H, F), fuser.GELU(), fuser.Linear(F, H))


def with_dropout() -> fuser.Sequential:
    return fuser.Sequential(
        *(fuser.LayerNorm(H), fuser.Linear(H, F), fuser.SReLU(), fuser.Dropout(0.3)),
        fuser.Linear(F, H),
    )


def of_l2() -> fuser.Sequential:
    return fuser.Sequential(fuser.L2Normalization(), fuser.BasicLinear(H, F), fuser.GEGLU())


MODELS: dict[str, Callable[[], fuser.Sequential]] = {
    "swiglu": swiglu,
    "layernorm": lambda: swiglu(fuser.LayerNorm),
    "gelu": gelu,
    "dropout": with_dropout,
    "l2": of_l2,
}


def under(recipe: Any) -> Any:
    return contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe)


def results(
    make: Callable[[], fuser.Sequential], recipe: Any, dtype: torch.dtype, steps: int = 3
) -> list[torch.Tensor]:
    """Outputs and gradients of some steps of SGD, with weights of their usual size."""
    torch.manual_seed(0)
    model = make().to(dtype)
    found = []
    for step in range(steps):
        x = oracles.leaf(oracles.random_tensor((T, H), dtype, step))
        with under(recipe):
            y = model(x)
        y.backward(0.02 * oracles.random_tensor(tuple(y.shape), dtype, 10 + step))
        gradients = [tensor.grad for tensor in (x, *model.parameters())]
        found += [y.detach(), *(grad.clone() for grad in gradients if grad is not None)]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(1e-4 * parameter.grad)
                parameter.grad = None
    return found


def assert_rebuilt_bits(
    make: Callable[[], fuser.Sequential],
    recipe: Any,
    dtype: torch.dtype,
    budget: fuser.activation_memory_budget = LEAST,
) -> None:
    with EVERYTHING:
        expected = results(make, recipe, dtype)
    with budget:
        found = results(make, recipe, dtype)
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.sampled
@every_recipe
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("place", ["torch", "kernels"])
def test_gradients_have_the_bits_of_a_plan_that_keeps_everything(
    make: Any, recipe: Any, dtype: torch.dtype, place: str
) -> None:
    with on_kernels() if place == "kernels" else contextlib.nullcontext():
        assert_rebuilt_bits(make, recipe, dtype)


KINDS = ("linear", "norm", "activation", "gated", "dropout", "bias")


def random_model(seed: int) -> fuser.Sequential:
    """Ops in a random order, with linears among them."""
    chooses = random.Random(seed)
    ops: list[torch.nn.Module] = []
    width = H
    for _ in range(chooses.randint(4, 9)):
        kind = chooses.choice([*KINDS, "linear"])
        if kind == "linear":
            out = chooses.choice([64, 128, 192])
            ops.append(fuser.Linear(width, out, bias=chooses.random() < 0.5))
            width = out
        elif kind == "norm":
            norm: Any = chooses.choice([fuser.RMSNorm, fuser.LayerNorm])
            ops.append(norm(width, zero_centered_gamma=chooses.random() < 0.5))
        elif kind == "activation":
            activation: Any = chooses.choice([fuser.GELU, fuser.ReLU, fuser.SiLU])
            ops.append(activation(cache_quantized_input=chooses.random() < 0.2))
        elif kind == "gated" and width >= 64:
            ops.append(fuser.SwiGLU())
            width //= 2
        elif kind == "dropout":
            ops.append(fuser.Dropout(chooses.choice([0.0, 0.2])))
        elif kind == "bias":
            ops.append(fuser.Bias(width))
    return fuser.Sequential(*ops, fuser.Linear(width, H))


@pytest.mark.parametrize("name", ["none", "current", "mxfp8, dequantized", "mxfp8"])
def test_a_linear_rounds_what_it_computes_again_to_its_own_dtype(name: str) -> None:
    recipe = RECIPES.get(name, recipes.MXFP8BlockScaling(backward_override="dequantized"))
    found = []
    for budget in (EVERYTHING, LEAST):
        torch.manual_seed(0)
        model = fuser.Sequential(fuser.RMSNorm(H), fuser.BasicLinear(H, F, dtype=BF16))
        with budget, under(recipe):
            y = model(oracles.random_tensor((T, H), F32, 1))
        y.backward(oracles.random_tensor((T, F), BF16, 2))
        found.append([y, model[0].weight.grad, model[1].weight.grad])
    assert all(map(torch.equal, *found))


@within_budget
@pytest.mark.parametrize("name", ["none", "current", "block", "nvfp4, dequantized"])
def test_a_weight_alone_gets_the_gradient_of_a_whole_backward(name: str) -> None:
    model, recipe = gelu().to(BF16), RECIPES[name]
    weights = [model[0].weight, model[2].weight]
    found = []
    for wanted in (weights, weights[1:], weights[:1]):
        with under(recipe):
            y = model(oracles.leaf(oracles.random_tensor((T, H), BF16, 1)))
        grads = torch.autograd.grad(y, wanted, oracles.random_tensor((T, H), BF16, 2))
        found.append(dict(zip(map(id, wanted), grads, strict=True)))
    for some in found[1:]:
        assert all(torch.equal(grad, found[0][weight]) for weight, grad in some.items())


@pytest.mark.parametrize("seed", range(30))
def test_random_pipelines_have_the_bits_of_plans_that_keep_everything(seed: int) -> None:
    recipe = list(RECIPES.values())[seed % len(RECIPES)]
    dtype = (BF16, F32)[seed % 2]
    drawn = (LEAST, fuser.activation_memory_budget(1), fuser.activation_memory_budget(0))[
        seed % 5 % 3
    ]
    with on_kernels() if seed % 3 == 0 else contextlib.nullcontext():
        assert_rebuilt_bits(lambda: random_model(seed), recipe, dtype, drawn)


PAIRED = ["current", "delayed", "block", "mxfp8"]


@pytest.fixture
def symbols(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The symbols of the kernels that are launched."""
    launched: list[str] = []
    call = Kernel.__call__

    def noted(kernel: Kernel, launch: Launch, *args: Any) -> None:
        launched.append(kernel.symbol)
        call(kernel, launch, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    return launched


@within_budget
@pytest.mark.parametrize("recipe", PAIRED)
def test_one_launch_quantizes_an_activation_again_and_its_gradient(
    recipe: str, symbols: list[str]
) -> None:
    with on_kernels():
        results(swiglu, RECIPES[recipe], BF16, steps=1)
    (pair,) = [symbol for symbol in symbols if symbol.startswith("fuser_tiled_pair<")]
    assert "PointwiseBackwardProducer" in pair
    assert "PointwiseProducer" in pair


def scaled() -> fuser.Sequential:
    return fuser.Sequential(fuser.Linear(H, 2 * F), fuser.ScaledSwiGLU(), fuser.Linear(F, H))


STORING: dict[str, tuple[Callable[[], fuser.Sequential], int]] = {
    "swiglu": (swiglu, 2),
    "layernorm": (lambda: swiglu(fuser.LayerNorm), 2),
    "gelu": (gelu, 1),
    "dropout": (with_dropout, 2),
    "scaled": (scaled, 1),
    "two": (lambda: fuser.Sequential(*gelu(), fuser.SiLU(), fuser.Linear(H, F)), 2),
}
"""Models, and how many inputs of their linears are computed again."""


@pytest.mark.parametrize("name", STORING)
@pytest.mark.parametrize("override", [None, "high_precision"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_no_launch_computes_an_unquantized_input_again_alone(
    name: str, override: str | None, dtype: torch.dtype, symbols: list[str]
) -> None:
    """Backward has the launches of a plan that keeps everything, and some store one more tensor."""
    make, count = STORING[name]
    recipe = override and recipes.Float8CurrentScaling(backward_override=override)
    launched, found = [], []
    for budget in (EVERYTHING, fuser.activation_memory_budget(1)):
        torch.manual_seed(0)
        model = make().to(dtype)
        x = oracles.leaf(oracles.random_tensor((T, H), dtype, 1))
        with budget, on_kernels(), under(recipe):
            y = model(x, *[x[:, 0].detach().contiguous()] * (make is scaled))
            symbols.clear()
            found.append(torch.autograd.grad(y.square().sum(), (x, *model.parameters())))
        launched.append([symbol.rpartition(", ") for symbol in symbols])
    kept, again = launched
    assert [symbol for symbol, *_ in again] == [symbol for symbol, *_ in kept]
    stored = [one for one, other in zip(again, kept, strict=True) if one != other]
    assert [last for *_, last in stored] == ["true>"] * count
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("refused", ["true>", "fuser_sum_parts", "fuser_norm_parameter"])
@pytest.mark.parametrize("make", [gelu, swiglu, MODELS["layernorm"]])
def test_without_a_kernel_torch_goes_on_from_what_is_left(
    refused: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether nothing of the gradient was computed yet, or dy was overwritten already."""
    call = Kernel.__call__

    def refusing(kernel: Kernel, launch: Launch, *args: Any) -> None:
        if "backward" in kernel.symbol and kernel.symbol.endswith(refused):
            raise KernelUnavailable("there is none")
        if kernel.symbol.startswith(refused):
            raise KernelUnavailable("there is none")
        call(kernel, launch, *args)

    with on_kernels():
        expected = results(make, None, F32, steps=2)
        monkeypatch.setattr(Kernel, "__call__", refusing)
        found = results(make, None, F32, steps=2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def outputs_of_others() -> Iterator[tuple[Any, Any, Callable[[Any], Any]]]:
    """An output, the output it must be, and a backward that reads other tensors."""
    x, other = (oracles.random_tensor((T, 2 * F), F32, seed) for seed in (1, 2))
    scales, others = torch.rand(T), torch.rand(T)
    gain, gains = torch.rand(2 * F), torch.rand(2 * F)
    rstd = torch.rand(T, 1)
    stage, dy = fuser.SwiGLU().function, oracles.random_tensor((T, F), F32, 3)

    def activation(output: Any) -> Any:
        return pointwise.chain_backward((stage,), dy.clone(), x, (None,), (False,), output=output)[
            0
        ]

    def scaled(output: Any) -> Any:
        return pointwise.chain_backward(
            (stage.scaled,), dy.clone(), x, (scales,), (False,), output=output
        )[0]

    def norm(output: Any) -> Any:
        given = (x.clone(), x, (gain,), (rstd,), (True, True))
        return normalization.norm_backward(*given, output=output)[0]

    def normalized(
        z: torch.Tensor, gamma: torch.Tensor, zero_centered: bool = False, of: Any = rstd
    ) -> Any:
        y, *_ = normalization.norm(z, (gamma,), 1e-5, F32, zero_centered=zero_centered)
        return normalization.with_statistics(y, [of])

    glu = fuser.GLU().function
    for make, backward in (
        (lambda: pointwise.chain((stage,), other), activation),
        (lambda: pointwise.chain((glu,), x), activation),
        (lambda: pointwise.chain((stage.scaled,), x, (others,)), scaled),
        (lambda: pointwise.chain((stage,), x), scaled),
        (lambda: normalized(other, gain), norm),
        (lambda: normalized(x, gains), norm),
        (lambda: normalized(x, gain, zero_centered=True), norm),
        (lambda: normalized(x, gain, of=rstd.clone()), norm),
    ):
        yield make(), make().tensor(), backward


def test_an_output_of_other_tensors_is_computed_from_those() -> None:
    with on_kernels():
        for output, expected, backward in outputs_of_others():
            backward(output).tensor()
            assert torch.equal(output.tensor(), expected)


def test_a_linear_of_several_ranks_computes_its_gradients_at_once() -> None:
    linear = fuser.BasicLinear(F, H)
    assert linear.can_defer_wgrad
    linear._parallel = Parallelism("row", 2, has_shards=False)
    assert not linear.can_defer_wgrad


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gradients_of_weights_that_come_later_go_into_main_grads(dtype: torch.dtype) -> None:
    found = []
    for budget in (EVERYTHING, LEAST):
        torch.manual_seed(0)
        linear = functools.partial(fuser.Linear, accumulate_into_main_grad=True, dtype=dtype)
        model = fuser.Sequential(fuser.RMSNorm(H), linear(H, F), fuser.GELU(), linear(F, H))
        model.to(dtype)
        for parameter in model.parameters():
            parameter.main_grad = torch.ones_like(parameter, dtype=F32)
        with budget, on_kernels():
            for step in range(2):
                x = oracles.leaf(oracles.random_tensor((T, H), dtype, step))
                model(x).square().sum().backward()
        found.append([parameter.main_grad for parameter in model.parameters()])
    assert all((grad != 1).any() for grad in found[0] if grad.dim() == 2)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", PAIRED)
@pytest.mark.parametrize("rows", [1, 100, 300])
@pytest.mark.parametrize(("features", "name"), [(200, "swiglu"), (136, "gelu"), (264, "swiglu")])
def test_pairs_of_tiles_have_the_bits_of_two_launches_at_every_edge(
    recipe: str, rows: int, features: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> fuser.Sequential:
        gate = 2 if name == "swiglu" else 1
        op = fuser.SwiGLU() if name == "swiglu" else fuser.GELU()
        return fuser.Sequential(
            fuser.Linear(H, gate * features), op, fuser.Linear(features, H, bias=False)
        )

    monkeypatch.setattr(sys.modules[__name__], "T", rows)
    with on_kernels():
        assert_rebuilt_bits(make, RECIPES[recipe], BF16)


@within_budget
@pytest.mark.parametrize("recipe", PAIRED)
def test_without_its_kernel_a_pair_is_computed_by_torch(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_kernels():
        expected = results(swiglu, RECIPES[recipe], BF16, steps=2)
        refused: list[str] = []
        call = Kernel.__call__

        def refusing(kernel: Kernel, launch: Launch, *args: Any) -> None:
            if "PointwiseProducer" in kernel.symbol and refused:
                raise KernelUnavailable("there is none")
            if "PointwiseBackwardProducer" in kernel.symbol:
                refused.append(kernel.symbol)
                raise KernelUnavailable("there is none")
            call(kernel, launch, *args)

        monkeypatch.setattr(Kernel, "__call__", refusing)
        found = results(swiglu, RECIPES[recipe], BF16, steps=2)
    assert refused
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.02)


# -- what is kept ---------------------------------------------------------------------


class Kept:
    """The memory of saved tensors, without that of parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._sizes: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        is_quantized = isinstance(tensor, QuantizedTensor)
        buffers = tensor.buffers().values() if is_quantized else [tensor]
        for buffer in buffers:
            if buffer is not None and buffer.numel() > 4:  # scales
                storage = buffer.untyped_storage()
                if storage.data_ptr() not in self._own:
                    self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())


def kept_bytes(model: fuser.Sequential, recipe: Any, dtype: torch.dtype = BF16) -> int:
    x = oracles.leaf(oracles.random_tensor((T, H), dtype, 1))
    kept = Kept(model)
    with under(recipe), torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
        model(x)
    return kept.nbytes


@within_budget
@every_recipe
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_a_block_keeps_what_its_backward_cannot_compute_again(name: str, recipe: Any) -> None:
    """The input, and the output of the first linear; no weight twice."""
    model = MODELS[name]().to(BF16)
    statistics = 4 if name == "swiglu" else 0
    first_output = 2 * F if name == "swiglu" else F
    needed = T * (2 * H + 2 * first_output + statistics)
    assert kept_bytes(model, recipe) <= 1.02 * needed


@within_budget
@every_recipe
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_plan_states_what_is_kept(make: Any, recipe: Any) -> None:
    model = make().to(BF16)
    x = oracles.leaf(oracles.random_tensor((T, H), BF16, 1))
    with under(recipe):
        plan = model.plan(x)
    stated = plan.kept_bytes_per_token * T + sum(kept.nbytes for kept in plan.kept)
    measured = kept_bytes(model, recipe)
    assert abs(measured - stated) <= 0.01 * measured


@pytest.mark.parametrize("single", [False, True], ids=["weights apart", "one weight"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_plan_states_what_a_grouped_linear_keeps(groups: int, single: bool) -> None:
    """The copies of all experts; beside them, rows of padding: less than a tile for each expert."""
    for recipe in RECIPES.values():
        options: dict[str, Any] = {"bias": False, "single_grouped_weight": single, "dtype": BF16}
        model = fuser.Sequential(fuser.GroupedLinear(groups, H, F, **options))
        x = oracles.leaf(oracles.random_tensor((groups * 128, H), BF16, 1))
        sizes, kept = torch.full((groups,), 128), Kept(model)
        with under(recipe):
            plan = model.plan(x, sizes)
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
                model(x, sizes)
        stated = plan.kept_bytes_per_token * len(x) + sum(each.nbytes for each in plan.kept)
        padding = 1.1 * (groups - 1) * 128 * H
        assert -0.01 * stated <= kept.nbytes - stated <= 0.01 * stated + padding, recipe


@pytest.mark.parametrize("trained", ["0", "2", "02", "012", ""])
def test_experts_of_which_some_are_frozen_compute_their_input_again(trained: str) -> None:
    """A gradient of one of the weights is enough, and with none the input is not needed."""
    linear = fuser.GroupedLinear(3, H, F, bias=False, dtype=BF16).requires_grad_(False)
    for group in trained:
        getattr(linear, f"weight{group}").requires_grad_()
    model = fuser.Sequential(fuser.GELU(), linear)
    x = oracles.leaf(oracles.random_tensor((3 * 128, H), BF16, 1))
    plan = model.plan(x, torch.full((3,), 128))
    inputs = [kept for kept in plan.kept if (kept.name, kept.ops) == ("input", (1,))]
    assert [kept.is_rebuilt for kept in inputs] == [True] * bool(trained)
    assert plan.kept_bytes_per_token * len(x) == x.nbytes


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_of_kept_inputs_has_fewer_bytes(seed: int) -> None:
    """Of all sets of main inputs from which norms, activations and dropouts give those of linears.

    Other ops read their own inputs as they were.
    """
    model = random_model(seed).to(BF16)
    plan = model.plan(torch.empty(T, H, dtype=BF16, requires_grad=True))
    ops = [op for part in model for op in getattr(part, "basic_ops", [part])]
    nbytes, count = plan.activation_bytes, len(ops)
    readers = [i for i, op in enumerate(ops) if op.saves_input]
    fixed = {i for i in readers if not isinstance(ops[i], fuser.BasicLinear)}
    passes_on = [i for i, op in enumerate(ops) if is_the_same(op)]

    def gives(kept: set[int], i: int) -> bool:
        while i not in kept:
            i -= 1
            if i < 0 or not (ops[i].rebuilds_output or i in passes_on):
                return False
        return True

    inputs = [i for i in range(count) if i not in passes_on or i == 0]
    fewest = min(
        sum(nbytes[i] for i in chosen)
        for size in range(len(inputs) + 1)
        for chosen in itertools.combinations(inputs, size)
        if fixed <= {*chosen} and all(gives({*chosen}, i) for i in readers)
    )
    found = sum(kept.bytes_per_token for kept in plan.kept if kept.name == "input")
    assert found == pytest.approx(fewest)


def is_the_same(op: Any) -> bool:
    """Whether the output of the op is its input."""
    return isinstance(op, fuser.Dropout) and op.dropout_probability == 0


@within_budget
def test_a_printed_plan_says_what_is_kept_and_what_is_computed_again() -> None:
    x = torch.empty(T, H, dtype=BF16, requires_grad=True)
    with fuser.autocast(recipe=RECIPES["current"]):
        text = str(swiglu().to(BF16).plan(x))
    assert (
        """
kept for backward: 1.3 kB a token
  1  RMSNorm      input 256 B (the pipeline's input), statistics 4 B (saved by the op itself)
  2  BasicLinear  input computed again by 1, weight quantized again, which moves 196.6 kB
  3  SwiGLU       input 1.0 kB (output of a product)
  4  BasicLinear  input computed again by 3, weight quantized again, which moves 98.3 kB
"""
        in text
    )
    assert "swiglu again" in text


# -- when it is kept -------------------------------------------------------------------


class OwnGELU(fuser.GELU):
    """A user's op, which may compute anything."""

    def op_forward(self, ctx: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().op_forward(ctx, input_, *args, **kwargs) * 2

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return super().op_backward(ctx, grad_output * 2)


def is_rebuilt(model: fuser.Sequential) -> list[bool]:
    key = model.plan(torch.empty(T, H, requires_grad=True)).key
    return [not op.keeps_input for op in key.ops]


@within_budget
def test_what_a_users_op_computed_is_kept() -> None:
    def with_activation(op: fuser.GELU) -> list[bool]:
        return is_rebuilt(fuser.Sequential(fuser.BasicLinear(H, F), op, fuser.BasicLinear(F, H)))

    assert with_activation(fuser.GELU()) == [False, False, True]
    assert not any(with_activation(OwnGELU()))
    assert not any(with_activation(fuser.GELU(cache_quantized_input=True)))


@within_budget
def test_with_a_users_fusion_everything_is_kept() -> None:
    class Nothing(fuser.FusedOperation):
        window = (fuser.Reshape, fuser.Reshape)
        side = "joint"

        def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

        fuser_backward = fuser_forward

    ops = [fuser.BasicLinear(H, F), fuser.GELU(), fuser.BasicLinear(F, H)]
    model = fuser.Sequential(*ops, fusions=[*fuser.FUSIONS, Nothing])
    assert not any(is_rebuilt(model))


@within_budget
def test_a_frozen_op_saves_nothing_so_its_output_is_kept() -> None:
    model = fuser.Sequential(fuser.RMSNorm(H), fuser.BasicLinear(H, F))
    model[0].weight.requires_grad_(False)
    x = torch.randn(T, H)
    plan = model.plan(x)
    assert plan.key.ops[1].keeps_input
    y = model(x)
    y.sum().backward()
    assert model[1].weight.grad is not None


@within_budget
@pytest.mark.parametrize("recipe", [RECIPES["none"], RECIPES["current"]], ids=["none", "current"])
def test_a_weight_that_changed_since_forward_is_refused(recipe: Any) -> None:
    model = gelu()
    x = torch.randn(T, H, requires_grad=True)
    with under(recipe):
        y = model(x)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@within_budget
def test_the_weights_of_a_first_microbatch_keep_both_copies() -> None:
    model = fuser.Sequential(fuser.BasicLinear(H, F))
    made = []
    for is_first in (True, False):
        x = torch.randn(T, H, requires_grad=True)
        with fuser.autocast(recipe=RECIPES["current"]):
            y = model(x, op_kwargs={0: {"is_first_microbatch": is_first}})
        y.sum().backward()
        (kept,) = model[0]._kept_weight.values()
        made.append(kept.made)
    assert made[0] is made[1]
    assert made[0]._has("rowwise")
    assert made[0]._has("columnwise")


@within_budget
def test_fifty_steps_hold_no_more_than_one() -> None:
    model = swiglu()

    def alive() -> int:
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    counts = []
    for step in range(50):
        x = torch.randn(T, H, requires_grad=True)
        with fuser.autocast(recipe=RECIPES["delayed"]):
            y = model(x)
        y.sum().backward()
        del x, y
        model.zero_grad()
        if step in (3, 49):
            counts.append(alive())
    assert counts[1] <= counts[0]  # what other tests left may go meanwhile


@within_budget
def test_a_retained_graph_gives_the_same_gradients_twice() -> None:
    model = swiglu()
    x = torch.randn(T, H, requires_grad=True)
    with fuser.autocast(recipe=RECIPES["current"]):
        y = model(x).sum()
    inputs = (x, *model.parameters())
    first = torch.autograd.grad(y, inputs, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(y, inputs), strict=True):
        assert torch.equal(one, other)


@within_budget
@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["none", "current"])
@pytest.mark.parametrize("when", ["never", "forward", "backward"])
def test_checkpoints_match_what_is_saved_if_hooks_come_and_go(recipe: Any, when: str) -> None:
    def gradients(in_checkpoint: bool) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        model = swiglu()
        x = oracles.leaf(oracles.random_tensor((T, H), F32, 1))
        hooks = []
        if when == "forward" and in_checkpoint:
            hooks.append(model[3].register_forward_hook(lambda *args: None))
        with under(recipe):
            y = checkpoint(model, x, use_reentrant=False) if in_checkpoint else model(x)
        for hook in hooks:
            hook.remove()
        if when == "backward" and in_checkpoint:
            model[3].register_forward_hook(lambda *args: None)
        return torch.autograd.grad(y.square().sum(), (x, *model.parameters()))

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@within_budget
def test_delayed_scales_that_a_step_changed_are_not_those_of_the_forward() -> None:
    """Both steps end before their backward: the first scale is 1, the second is not."""
    for make in (gelu, swiglu):
        torch.manual_seed(0)
        model = make()
        x = oracles.leaf(100 * oracles.random_tensor((T, H), F32, 1))
        with fuser.autocast(recipe=recipes.DelayedScaling(amax_history_len=1)):
            first = model(x)
        with fuser.autocast(recipe=recipes.DelayedScaling(amax_history_len=1)):
            model(x)
        inputs = (x, *model.parameters())
        late = torch.autograd.grad(first.sum(), inputs)
        torch.manual_seed(0)
        model = make()
        with fuser.autocast(recipe=recipes.DelayedScaling(amax_history_len=1)):
            y = model(x)
        for one, other in zip(
            late, torch.autograd.grad(y.sum(), (x, *model.parameters())), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("given", [0.5, 2, True, "1"])
def test_other_budgets_are_refused(given: Any) -> None:
    with pytest.raises(
        fuser.InputError, match=said("rebuilt-activation-compute-again", repr(given))
    ):
        fuser.activation_memory_budget(given)


def test_a_budget_ends_with_its_context_and_with_an_error() -> None:
    assert any(is_rebuilt(gelu()))
    with contextlib.suppress(KeyError), EVERYTHING:
        assert not any(is_rebuilt(gelu()))
        with fuser.activation_memory_budget(1), EVERYTHING, LEAST:
            assert any(is_rebuilt(gelu()))
        assert not any(is_rebuilt(gelu()))
        raise KeyError
    assert any(is_rebuilt(gelu()))


@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["none", "current"])
def test_copies_of_weights_are_kept_by_default(recipe: Any) -> None:
    """The bytes of a plan that keeps everything, less those of inputs of linears."""
    model = swiglu().to(BF16)
    with LEAST:
        least = kept_bytes(model, recipe)
    weights = 0 if recipe is None else sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert kept_bytes(model, recipe) == least + weights


# -- budget 0, and budgets of one Sequential ---------------------------------------------


@every_recipe
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_with_a_budget_of_zero_only_the_input_is_kept(make: Any, recipe: Any) -> None:
    model = make().to(BF16)
    with fuser.activation_memory_budget(0):
        assert kept_bytes(model, recipe) == T * H * 2
    assert_rebuilt_bits(make, recipe, BF16, fuser.activation_memory_budget(0))


def test_a_budget_of_zero_keeps_nothing_without_gradients_and_runs_forward_once() -> None:
    model, calls = swiglu(), [0]
    model.memory_budget = fuser.activation_memory_budget(0)
    model[1].register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    with torch.no_grad():
        model(torch.randn(T, H))
    assert calls == [1]
    model(torch.randn(T, H, requires_grad=True)).sum().backward()
    assert calls == [3]


def replace_parameter(model: Any) -> None:
    """By one of the same version, so that nothing but the parameter differs."""
    old = model[0].weight
    new = torch.nn.Parameter(old.detach().clone())
    while new._version < old._version:
        new.add_(1)
    assert new._version == old._version
    model[0].weight = new


def swap_parameters(model: Any) -> None:
    """Two gains of one version."""
    one, other = model[0], model[4]
    one.weight, other.weight = other.weight, one.weight


CHANGES: dict[str, Callable[[Any], Any]] = {
    "gain": lambda model: model[0].weight.mul_(2),
    "last gain": lambda model: model[4].weight.mul_(2),
    "weight": lambda model: model[1].weight.mul_(2),
    "epsilon": lambda model: setattr(model[0], "eps", 0.5),
    "probability": lambda model: setattr(model[3], "dropout_probability", 0.5),
    "op": lambda model: model.__setitem__(2, fuser.GLU()),
    "parameter": replace_parameter,
    "parameters in another order": swap_parameters,
    "module of torch": lambda model: model.__setitem__(5, torch.nn.Tanh()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_with_a_budget_of_zero_a_change_before_backward_is_refused(change: Any) -> None:
    ops: list[torch.nn.Module] = [
        fuser.RMSNorm(H),
        fuser.Linear(H, 2 * H),
        fuser.SwiGLU(),
        fuser.Dropout(0.1),
    ]
    ops += [fuser.RMSNorm(H), torch.nn.Tanh()]
    model = fuser.Sequential(*ops, memory_budget=0)
    x = torch.randn(T, H, requires_grad=True)
    y = model(x)
    with torch.no_grad():
        change(model)  # ``ops`` keeps what it replaces, whose id would be free else
    with pytest.raises(fuser.StateError, match=said("repeated-forward-parameter-changed-between")):
        y.sum().backward()
    model(x).sum().backward()
    assert x.grad is not None


def test_with_a_budget_of_zero_parameters_of_a_functional_call_are_refused() -> None:
    model = gelu()
    model.memory_budget = fuser.activation_memory_budget(0)
    given = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    y = torch.func.functional_call(model, given, (torch.randn(T, H, requires_grad=True),))
    with pytest.raises(fuser.StateError, match=said("repeated-forward-parameter-changed-between")):
        y.sum().backward()


def test_with_a_budget_of_zero_a_buffer_is_refused() -> None:
    model = fuser.Sequential(fuser.GroupedLinear(2, H, H, bias=False), memory_budget=0)
    x, sizes = torch.randn(T, H, requires_grad=True), torch.full((2,), T // 2)
    with pytest.raises(fuser.InputError, match=said("repeated-forward-kwargs-buffer-output")):
        model(x, sizes, op_kwargs={0: {"output": torch.empty(T, H)}})
    model(x, sizes, op_kwargs={0: {"grad_input": torch.empty(T, H)}}).sum().backward()


def test_a_sequential_has_a_budget_of_its_own() -> None:
    model = fuser.Sequential(*swiglu(), memory_budget=None)
    by_default = kept_bytes(model, None)
    model.memory_budget = 0
    assert kept_bytes(model, None) == T * H * 2
    model.memory_budget = EVERYTHING
    with EVERYTHING:
        everything = kept_bytes(swiglu().to(F32), None)
    assert kept_bytes(model, None) == everything > by_default
    assert not any(is_rebuilt(model))
    assert model[1:].memory_budget is EVERYTHING
    assert (model * 2).memory_budget is EVERYTHING
    assert copy.deepcopy(model).memory_budget.limit == EVERYTHING.limit
    assert repr(model.memory_budget) == (
        "activation_memory_budget(None, keep_weight_copies=None, lossy_activation_inputs=False)"
    )
    nested = fuser.Sequential(fuser.Sequential(*gelu()), torch.nn.Identity(), memory_budget=0)
    assert kept_bytes(nested, None) == T * H * 2


@pytest.mark.parametrize("budget", [0, 1, EVERYTHING], ids=["0", "1", "everything"])
def test_a_forward_of_a_subclass_runs_once_under_a_budget_of_its_own(budget: Any) -> None:
    class Doubled(fuser.Sequential):
        def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(2 * input, *args, **kwargs)

    x = torch.randn(T, H, requires_grad=True)
    y = Doubled(fuser.GELU(), memory_budget=budget)(x)
    torch.testing.assert_close(y, fuser.GELU()(2 * x))


def test_wrong_keywords_are_named_under_a_budget_of_zero_too() -> None:
    model = fuser.Sequential(fuser.GELU(), memory_budget=0)
    for wrong in ([1], {0: 3}):
        with pytest.raises(fuser.InputTypeError):
            model(torch.randn(T, H, requires_grad=True), op_kwargs=wrong)


def test_a_wrong_budget_of_a_sequential_changes_nothing() -> None:
    model = fuser.Sequential(fuser.GELU(), memory_budget=0)
    with pytest.raises(fuser.InputError, match=said("rebuilt-activation-compute-again", 0.25)):
        model.memory_budget = 0.25
    assert model.memory_budget is not None
    assert model.memory_budget.limit.memory_budget == 0
    with pytest.raises(fuser.InputError, match=said("rebuilt-activation-compute-again", 0.25)):
        fuser.Sequential(fuser.GELU(), memory_budget=0.25)


@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["none", "current"])
def test_a_graph_of_torch_compile_belongs_to_its_budget(recipe: Any) -> None:
    torch._dynamo.reset()
    counters["stats"].clear()
    model = swiglu()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(T, H, requires_grad=True)

    def gradients(function: Any) -> tuple[torch.Tensor, ...]:
        with under(recipe):
            y = function(x)
        return torch.autograd.grad(y.square().sum(), (x, *model.parameters()))

    with EVERYTHING:
        expected = gradients(model)
    for budget, graphs in ((LEAST, 1), (EVERYTHING, 2), (LEAST, 2), (EVERYTHING, 2)):
        with budget:
            for one, other in zip(gradients(compiled), expected, strict=True):
                torch.testing.assert_close(one, other)
        assert counters["stats"]["unique_graphs"] == graphs


def saved_bytes(function: Any, model: torch.nn.Module) -> int:
    """What one call of ``function`` keeps for backward, without the parameters of ``model``."""
    kept = Kept(model)
    x = oracles.leaf(oracles.random_tensor((T, H), BF16, 1))
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
        function(x)
    return kept.nbytes


BUDGETS: dict[str, fuser.activation_memory_budget | None] = {
    "none": None,
    "everything": EVERYTHING,
    "default": fuser.activation_memory_budget(1),
    "least": LEAST,
    "lossy": fuser.activation_memory_budget(1, lossy_activation_inputs=True),
    "inputs alone": fuser.activation_memory_budget(0),
}


@pytest.mark.parametrize(
    ("own", "around"),
    [
        *(("none", around) for around in BUDGETS if around not in ("none", "inputs alone")),
        *((own, "least") for own in BUDGETS if own not in ("none", "least")),
        ("least", "everything"),
    ],
)
def test_a_compiled_call_keeps_the_bytes_of_an_eager_one(own: str, around: str) -> None:
    """The budget of the Sequential counts, and else that around the call; in a graph 0 is 1."""
    torch._dynamo.reset()
    model = swiglu().to(BF16)
    model.memory_budget = BUDGETS[own]
    of_eager = copy.deepcopy(model)
    if own == "inputs alone":
        of_eager.memory_budget = BUDGETS["default"]
    compiled = torch.compile(lambda x: model(x), fullgraph=True, backend="eager")
    with under(RECIPES["current"]), BUDGETS[around]:
        expected = saved_bytes(of_eager, of_eager)
        assert [saved_bytes(compiled, model) for _ in range(3)] == [expected] * 3


# -- experts ------------------------------------------------------------------------------

EXPERTS, CHOSEN = 4, 2


def experts(*, has_norm: bool = False, **options: Any) -> fuser.Sequential:
    dispatch = fuser.MoeDispatch(EXPERTS)
    for k, name in enumerate(("sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(k, name, output_to_caller=False)
    linear = fuser.GroupedLinear
    return fuser.Sequential(
        *[fuser.RMSNorm(H)] * has_norm,
        dispatch,
        linear(EXPERTS, H, 2 * F).set_extra_input_channel(0, "sizes"),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        linear(EXPERTS, F, H, bias=False).set_extra_input_channel(0, "sizes"),
        fuser.MoeCombine().set_extra_input_channel(0, "rows"),
        **options,
    )


def tokens(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random_ = torch.Generator("cpu").manual_seed(seed)
    order = torch.rand(T, EXPERTS, generator=random_, device="cpu").argsort(1)
    x, probs = torch.randn(T, H, generator=random_), torch.rand(T, CHOSEN, generator=random_)
    leaves = [t.to(dtype).requires_grad_() for t in (x, probs)]
    return leaves[0], order[:, :CHOSEN], leaves[1]


def results_of_experts(
    recipe: Any, dtype: torch.dtype, budget: fuser.activation_memory_budget, **options: Any
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = experts(**options).to(dtype)
    found = []
    for step in range(2):  # the second has other delayed scales
        given = tokens(dtype, step)
        with under(recipe), budget:
            y = model(*given)
        leaves = (given[0], given[2], *model.parameters())
        grads = torch.autograd.grad(y, leaves, oracles.random_tensor((T, H), dtype, step))
        found += [y.detach(), *grads]
    return found


@pytest.mark.sampled
@every_recipe
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize("place", ["torch", "kernels"])
def test_experts_have_the_bits_of_a_plan_that_keeps_everything(
    recipe: Any, dtype: torch.dtype, has_norm: bool, fusions: Any, place: str
) -> None:
    options: dict[str, Any] = {"has_norm": has_norm, "fusions": fusions}
    with on_kernels() if place == "kernels" else contextlib.nullcontext():
        expected = results_of_experts(recipe, dtype, EVERYTHING, **options)
        found = results_of_experts(recipe, dtype, LEAST, **options)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


BEFORE: dict[str, Callable[[], torch.nn.Module]] = {
    "rmsnorm": lambda: fuser.RMSNorm(H),
    "layernorm": lambda: fuser.LayerNorm(H),
    "l2": fuser.L2Normalization,
    "gelu": fuser.GELU,
    "dropout": lambda: fuser.Sequential(fuser.RMSNorm(H), fuser.Dropout(0.2)),
    "linear and gelu": lambda: fuser.Sequential(fuser.BasicLinear(H, H), fuser.GELU()),
}


@pytest.mark.sampled
@every_recipe
@pytest.mark.parametrize("make", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("place", ["torch", "kernels"])
def test_a_grouped_linear_reads_what_any_op_before_it_computes_again(
    make: Any, recipe: Any, place: str
) -> None:
    found = []
    for budget in (EVERYTHING, LEAST):
        torch.manual_seed(0)
        before = make()
        ops = list(before) if isinstance(before, fuser.Sequential) else [before]
        model = fuser.Sequential(*ops, fuser.GroupedLinear(2, H, F, bias=False)).to(BF16)
        x = oracles.leaf(oracles.random_tensor((T, H), BF16, 1))
        with budget, on_kernels() if place == "kernels" else contextlib.nullcontext():
            with under(recipe):
                y = model(x, torch.tensor([T // 4, T - T // 4]))
            found.append(torch.autograd.grad(y.sum(), (x, *model.parameters())))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
@pytest.mark.parametrize("place", ["torch", "kernels"])
@pytest.mark.parametrize("changed", ["input", "scales"])
def test_late_gradients_are_of_what_the_backward_read(
    recipe: str, place: str, changed: str
) -> None:
    found = []
    for budget in (EVERYTHING, LEAST):
        torch.manual_seed(0)
        late = fuser.GroupedLinear(
            2, F, H, bias=False, delay_wgrad_compute=True, accumulate_into_main_grad=True
        )
        model = fuser.Sequential(fuser.ScaledSwiGLU(), late).to(BF16)
        for parameter in late.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=F32)
        x = oracles.leaf(oracles.random_tensor((T, 2 * F), BF16, 1))
        scales = torch.rand(T).to(BF16).requires_grad_()
        with budget, on_kernels() if place == "kernels" else contextlib.nullcontext():
            with under(RECIPES[recipe]):
                y = model(x, scales, torch.tensor([T // 4, T - T // 4]))
            y.sum().backward()
            with torch.no_grad():
                (x if changed == "input" else scales).mul_(3)
            late.backward_dw()
        found.append([parameter.main_grad for parameter in late.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.any()
        assert torch.equal(one, other)


@pytest.mark.parametrize("count", [1, EXPERTS])
@pytest.mark.parametrize("place", ["torch", "kernels"])
def test_delayed_scales_of_experts_are_those_of_the_forward(count: int, place: str) -> None:
    """Two steps end before the backward of the first: its scales are 1, the later ones are not."""
    recipe, found = recipes.DelayedScaling(amax_history_len=1), []
    linear = functools.partial(fuser.GroupedLinear, dtype=BF16, bias=False)
    sizes = torch.full((count,), T // count)
    for budget, steps in ((EVERYTHING, 1), (LEAST, 1), (LEAST, 3)):
        torch.manual_seed(0)
        model = fuser.Sequential(linear(count, H, 2 * F), fuser.ScaledSwiGLU(), linear(count, F, H))
        x = oracles.leaf(30 * oracles.random_tensor((T, H), BF16, 1))
        given = (sizes, torch.ones(T, dtype=BF16), sizes)
        with budget, on_kernels() if place == "kernels" else contextlib.nullcontext():
            outputs = []
            for _ in range(steps):
                with fuser.autocast(recipe=recipe):
                    outputs.append(model(x, *given))
            found.append(torch.autograd.grad(outputs[0].sum(), (x, *model.parameters())))
    for gradients in found[1:]:
        for one, other in zip(gradients, found[0], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("has_norm", [False, True])
def test_experts_keep_tokens_and_not_the_copies_of_their_rows(has_norm: bool) -> None:
    """Also the output of the first linear, and maps of a few bytes a row."""
    model = experts(has_norm=has_norm).to(BF16)
    kept = Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
        model(*tokens(BF16))
    rows = T * CHOSEN
    needed = 2 * T * H + 2 * rows * 2 * F
    assert needed <= kept.nbytes <= needed + 16 * rows
    plan = model.plan(*tokens(BF16))
    assert plan.kept_bytes_per_token * T == pytest.approx(kept.nbytes, rel=0.02)
    first = [kept for kept in plan.kept if kept.ops == (has_norm,)]
    assert has_norm or first[0].bytes_per_token == 2 * H


def test_rows_from_other_ranks_are_kept() -> None:
    dispatch = fuser.MoeDispatch(EXPERTS)
    assert dispatch.rebuilds_output
    dispatch.expert_parallel_size = 2
    assert not dispatch.rebuilds_output


def test_a_norm_is_computed_again_with_its_own_epsilon() -> None:
    def make() -> fuser.Sequential:
        return fuser.Sequential(fuser.RMSNorm(H, eps=0.5), fuser.BasicLinear(H, F))

    assert_rebuilt_bits(make, None, F32)
