"""Rows of the arguments of functions and contexts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cpu_graphs
import operands_in_fp64 as formats
import other_sums
import pytest
import torch
import torch.nn.functional as F
from argument_rows import Of, ignores, sets
from operands_in_fp64 import Operands, Product, assert_linear_computes, samples
from rows_of_recipes import (
    CURRENT,
    FLAGS,
    Given,
    all_of,
    assert_steps_compute,
    beside_a_larger_rank,
    refusal_of,
    refuses,
)
from torch import nn
from torch.testing import assert_close
from torch_logs import reset_tensor_log

import fuser
from fuser.cuda import pass_graphs
from fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from fuser.runtime import pipeline

INPUTS, OUTPUTS = formats.INPUTS, formats.OUTPUTS
UNQUANTIZED = all_of(formats.unquantized)
MXFP8 = all_of(formats.mxfp8())
TORCHS = ("context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state")
OF_CONVERT = ("recipe", "filter", "linears", "norms", "keep", "rounding", "strict")

OPTIONS: dict[str, tuple[str, ...]] = {
    "fuser.autocast": (),
    "fuser.checkpoint": TORCHS,
    "fuser.converted": OF_CONVERT,
    "fuser.quantized_model_init": (),
}


def numpy(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]


# -- autocast ------------------------------------------------------------------------


@contextlib.contextmanager
def _without_the_old_names_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fuser.fp8_", DeprecationWarning)
        yield


def autocasts(path: str, make: Callable[..., Any], recipe: str, group: str) -> None:
    """Rows of ``autocast``, by its names of the recipe and of the group."""

    def made(**given: Any) -> Any:
        with _without_the_old_names_warning():
            return make(**given)

    @sets(path, enabled=False)
    def no_quantization(given: Given) -> None:
        with fuser.autocast(recipe=Float8CurrentScaling()):
            assert_linear_computes(made(**{recipe: MXFP8BlockScaling()}, **given), UNQUANTIZED)

    @sets(path, **{recipe: MXFP8BlockScaling()})
    def operands_of_the_recipe(given: Given) -> None:
        assert_linear_computes(made(**given), MXFP8)

    @sets(path, **{group: "a group of its own"})
    def scales_of_the_ranks_of_a_group(given: Given) -> None:
        own: list[Any] = []
        with beside_a_larger_rank(4.0, FLAGS, own) as groups:
            context = made(**dict.fromkeys(given, own[0]))
            assert_steps_compute(context, factor=4.0)
            assert set(groups) == set(own)

    ignores(path, "scales are measured where tensors are quantized", "calibrating")


autocasts("fuser.autocast", fuser.autocast, "recipe", "amax_reduction_group")
autocasts("fuser.fp8_autocast", fuser.fp8_autocast, "fp8_recipe", "fp8_group")


# -- quantized parameters --------------------------------------------------------------


def makes_weights(path: str, make: Callable[..., Any]) -> None:
    def weight_made(**given: Any) -> Any:
        with _without_the_old_names_warning(), make(**given):
            return fuser.BasicLinear(INPUTS, OUTPUTS).weight

    @sets(path, enabled=False)
    def plain_weights(given: Given) -> None:
        with fuser.quantized_model_init(recipe=Float8CurrentScaling()):
            assert type(weight_made(**given)) is nn.Parameter

    @sets(path, recipe=Float8CurrentScaling())
    def bytes_of_initial_weights(given: Given) -> None:
        weight = weight_made(preserve_high_precision_init_val=True, **given)
        (values,) = numpy(weight.get_high_precision_init_val())
        exact = torch.from_numpy(formats.one_scale()(values).rowwise)
        assert_close(weight.dequantize().double(), exact, rtol=1e-6, atol=0)

    @sets(path, preserve_high_precision_init_val=True)
    def initial_values(given: Given) -> None:
        """Those before they were rounded, drawn as by a linear of plain weights."""
        torch.manual_seed(3)
        weight = weight_made(recipe=Float8CurrentScaling(), **given)
        torch.manual_seed(3)
        plain = fuser.BasicLinear(INPUTS, OUTPUTS).weight
        assert torch.equal(weight.get_high_precision_init_val(), plain)


makes_weights("fuser.quantized_model_init", fuser.quantized_model_init)
makes_weights("fuser.fp8_model_init", fuser.fp8_model_init)


# -- memory ------------------------------------------------------------------------------


def bytes_kept(model: nn.Module, x: torch.Tensor) -> int:
    """Of what a forward keeps for its backward beside the parameters, each memory once."""
    kept: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.buffers().values() if isinstance(tensor, fuser.QuantizedTensor) else [tensor]
        for part in parts:
            if part is not None and part.data_ptr() not in own:
                storage = part.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(kept.values())


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


@sets("fuser.activation_memory_budget", memory_budget=Of(None, instead=1))
def _normalized_rows_that_are_kept(given: Given) -> None:
    """None keeps the input of a linear after a norm, which 1 computes again."""
    x, model = leaf(64, 32), fuser.Sequential(fuser.RMSNorm(32), fuser.BasicLinear(32, 32))
    with fuser.activation_memory_budget(1):
        least = bytes_kept(model, x)
    with fuser.activation_memory_budget(**given):
        assert bytes_kept(model, x) - least == x.nbytes
        model(x).sum().backward()
    norm = x.detach() * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + model[0].eps)
    assert_close(model[1].weight.grad, norm.sum(0).expand(32, 32))


@sets("fuser.activation_memory_budget", keep_weight_copies=False)
def _columns_of_weights_that_are_not_kept(given: Given) -> None:
    linear = fuser.BasicLinear(INPUTS, OUTPUTS)
    x, _, _ = samples()
    budget = fuser.activation_memory_budget(1, **given)
    with fuser.autocast(recipe=Float8CurrentScaling()):
        whole = bytes_kept(linear, x.clone().requires_grad_())
        with budget:
            assert whole - bytes_kept(linear, x.clone().requires_grad_()) >= INPUTS * OUTPUTS
    both = contextlib.ExitStack()
    both.enter_context(budget)
    both.enter_context(fuser.autocast(recipe=Float8CurrentScaling()))
    assert_linear_computes(both, CURRENT)


@sets("fuser.activation_memory_budget", lossy_activation_inputs=True)
def _gradients_of_rounded_inputs(given: Given) -> None:
    x, dy = leaf(29, INPUTS), leaf(29, INPUTS).detach().flip(0)
    with fuser.activation_memory_budget(1, **given):
        y = fuser.Sequential(fuser.GELU())(x)
    assert_close(y, F.gelu(x, approximate="tanh"))
    y.backward(dy)
    (values,) = numpy(x)
    rounded = torch.from_numpy(formats.blocks(1)(values).rowwise).requires_grad_()
    F.gelu(rounded, approximate="tanh").backward(dy.double())
    assert x.grad is not None
    assert rounded.grad is not None
    assert_close(x.grad.double(), rounded.grad, rtol=1e-5, atol=1e-6)


class Halves(nn.Module):
    """Half of the input, with what runs in it noted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.is_grad_enabled())
        return x.sin() / 2


@sets(
    "fuser.checkpoint",
    function=Of(lambda x: x.sin() / 2, instead=lambda x: x.cos()),
)
def _values_of_the_function(given: Given) -> None:
    x = leaf(4)
    fuser.checkpoint(args_of(given)[0], x).sum().backward()
    assert_close(x.grad, x.detach().cos() / 2)


def args_of(given: Given) -> tuple[Any, ...]:
    return tuple(given.values())


@sets("fuser.checkpoint", use_reentrant=False)
def _graph_of_the_first_run(given: Given) -> None:
    """torch's reentrant one runs the function without gradients first."""
    x, function = leaf(4), Halves()
    fuser.checkpoint(function, x, **given).sum().backward()
    assert function.seen == [True, True]
    assert_close(x.grad, x.detach().cos() / 2)


refuses(
    "fuser.checkpoint",
    lambda **given: fuser.checkpoint(Halves(), leaf(4), **given),
    "kept on the rank that computed them",
    distribute_saved_activations=True,
)
ignores("fuser.checkpoint", "saved activations are not distributed", "tp_group")


class Tracker:
    """A generator beside torch's own; its state is bytes, or as for CUDA graphs the generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.gives_bytes = True

    def get_states(self) -> dict[str, Any]:
        return {"own": self.generator.get_state() if self.gives_bytes else self.generator}

    def set_states(self, states: dict[str, Any]) -> None:
        if self.gives_bytes:
            self.generator.set_state(states["own"])
        else:
            self.generator = states["own"]

    def masked(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


TRACKER = Tracker()


@sets("fuser.checkpoint", get_rng_state_tracker=lambda: TRACKER)
def _random_numbers_of_the_first_run(given: Given) -> None:
    for gives_bytes in (True, False):
        TRACKER.gives_bytes = gives_bytes
        x = leaf(64)
        y = fuser.checkpoint(TRACKER.masked, x, **given)
        after = TRACKER.generator.get_state()
        y.sum().backward()
        assert_close(x.grad, y.detach() / x.detach())
        assert torch.equal(TRACKER.generator.get_state(), after)


def masked(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape)


@sets("fuser.checkpoint", preserve_rng_state=False)
def _random_numbers_of_torch(given: Given) -> None:
    """Are drawn again, so that backward multiplies by others."""
    torch.manual_seed(0)
    x = leaf(64)
    y = fuser.checkpoint(masked, x, **given)
    again = torch.rand(64)
    torch.manual_seed(0)
    torch.rand(64)
    y.sum().backward()
    assert_close(x.grad, again)


NOTED: list[str] = []


@contextlib.contextmanager
def noting(name: str) -> Iterator[None]:
    NOTED.append(name)
    yield


@sets("fuser.checkpoint", context_fn=lambda: (noting("first"), noting("second")))
def _contexts_of_both_runs(given: Given) -> None:
    NOTED.clear()
    fuser.checkpoint(Halves(), leaf(4), use_reentrant=False, **given).sum().backward()
    assert NOTED == ["first", "second"]


def _error_of_backward(function: nn.Module, **given: Any) -> str:
    y = fuser.checkpoint(function, leaf(4), use_reentrant=False, **given)
    try:
        y.backward()
    except Exception as error:
        return str(error)
    return ""


@sets("fuser.checkpoint", determinism_check="none")
def _shapes_that_are_not_compared(given: Given) -> None:
    assert "metadata" in _error_of_backward(Differing())
    assert "metadata" not in _error_of_backward(Differing(), **given)


class Differing(nn.Module):
    """Keeps a vector, and in the second run a matrix of as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        factor = torch.ones((1, 4) if self.runs == 2 else (4,))
        return (x * factor).sum()


@sets("fuser.checkpoint", debug=True)
def _operations_in_the_error(given: Given) -> None:
    try:
        error = _error_of_backward(Differing(), **given)
    finally:
        reset_tensor_log()
    assert "Operations executed during recomputation" in error


class Counting(nn.Module):
    """What comes after the last tensor that is kept is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        self.ends += 1
        return y


@sets("fuser.checkpoint", early_stop=False)
def _end_of_the_second_run(given: Given) -> None:
    x, function = leaf(4), Counting()
    fuser.checkpoint(function, x, use_reentrant=False, **given).sum().backward()
    assert function.ends == 2
    assert_close(x.grad, x.detach().cos())


# -- conversion -----------------------------------------------------------------------------


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.up = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.down = nn.Linear(OUTPUTS, INPUTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class TwoLinears(nn.Module):
    """Two linears and a function between them, which is no activation of fuser."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.two = nn.Linear(OUTPUTS, INPUTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.two(torch.erf(self.one(x)))
        return y


def _chained(model: TwoLinears, first: Operands, second: Operands) -> Product:
    """The output of the two linears, each with operands in its formats."""
    x, one, two = numpy(samples()[0], model.one.weight, model.two.weight)
    h = torch.from_numpy(Product.of(first.input(x).rowwise, first.weight(one).rowwise.T).values)
    (h,) = numpy(torch.erf(h.float()))
    return Product.of(second.input(h).rowwise, second.weight(two).rowwise.T)


def converts(path: str, around: Callable[..., Any]) -> None:
    """Rows of the options of a conversion; ``around(model, **options)`` yields its report."""
    quantizing: Given = {"recipe": Float8CurrentScaling()}
    x = samples()[0] / 256

    def paths(report: fuser.ConversionReport) -> set[str]:
        return {row.path for row in report.converted}

    @sets(path, model=Of(Gated(), instead=nn.Identity()))
    def chain_of_a_model(given: Given) -> None:
        model = given["model"]
        expected = model(x).detach()
        with around(model) as report:
            assert paths(report) == {""}
            assert isinstance(fuser.plan(model, x).plans[""], fuser.FusionPlan)
            assert_close(model(x), expected)

    @sets(path, recipe=Float8CurrentScaling())
    def operands_of_the_recipe(given: Given) -> None:
        model = TwoLinears()
        with around(model, keep=(), **given):
            y = model(samples()[0])
        _chained(model, CURRENT, CURRENT).assert_equals(y, "y")

    @sets(path, keep=("one",))
    def linears_that_are_not_quantized(given: Given) -> None:
        model = TwoLinears()
        with around(model, **quantizing, **given) as report:
            y = model(samples()[0])
        texts = {row.path: "never quantized" in row.text for row in report.converted}
        assert texts == {"one": True, "two": False}
        _chained(model, UNQUANTIZED, CURRENT).assert_equals(y, "y")

    @sets(path, filter=lambda path, module: path != "two")
    def modules_that_are_left_out(given: Given) -> None:
        model = TwoLinears()
        with around(model, keep=(), **quantizing, **given) as report:
            y = model(samples()[0])
        assert paths(report) == {"one"}
        _chained(model, CURRENT, UNQUANTIZED).assert_equals(y, "y")

    @sets(path, linears="all")
    def linears_alone(given: Given) -> None:
        model = TwoLinears()
        with around(model, **given) as report:
            assert paths(report) == {"one", "two"}
            plan = fuser.plan(model, samples()[0])
            assert set(plan.plans) == {"one", "two"}
            y = model(samples()[0])
        _chained(model, UNQUANTIZED, UNQUANTIZED).assert_equals(y, "y")

    @sets(path, norms="all")
    def norms_alone(given: Given) -> None:
        model = nn.Sequential(nn.LayerNorm(INPUTS), nn.Tanh())
        with around(model, **given) as report:
            assert paths(report) == {"0"}
            y = model(x)
        exact = F.layer_norm(x.double(), (INPUTS,)).tanh()
        assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)

    @sets(path, rounding="torch")
    def bits_in_16_bits(given: Given) -> None:
        torch.manual_seed(0)
        model = Gated().bfloat16()
        expected = model(16 * x.bfloat16())
        with around(model, **given):
            is_other = model(16 * x.bfloat16()) != expected
        # None, but where sums are added in another order; without the argument 0.29 of them.
        assert is_other.float().mean() <= (0.15 if other_sums.IS_TRIED else 0)

    @sets(path, strict=True)
    def look_alike_that_is_an_error(given: Given) -> None:
        def convert() -> None:
            with around(TwoLinears(), **given):
                pass

        assert "fuser.convert(strict=True)" in refusal_of(convert)


@contextlib.contextmanager
def _converting(model: nn.Module, **options: Any) -> Iterator[fuser.ConversionReport]:
    try:
        yield fuser.convert(model, **options)
    finally:
        fuser.revert(model)


converts("fuser.convert", _converting)
converts("fuser.converted", fuser.converted)
GATED = Gated()


@sets("fuser.revert", model=Of(GATED, instead=nn.Identity()))
def _class_of_a_converted_module(given: Given) -> None:
    fuser.convert(GATED)
    assert type(GATED) is not Gated
    assert fuser.revert(**given) == 1
    assert type(GATED) is Gated


# -- plans, reports ---------------------------------------------------------------------------


def block() -> fuser.Sequential:
    return fuser.Sequential(fuser.RMSNorm(32), fuser.Linear(32, 64), fuser.GELU())


@sets("fuser.plan", model=Of(block(), instead=nn.Identity()))
def _pipelines_of_a_model(given: Given) -> None:
    model = given["model"]
    plan = fuser.plan(model, torch.empty(8, 32, device="meta"))
    assert plan.parameters == 32 + 64 * 32 + 64
    (part,) = plan.plans.values()
    assert part.key == model.plan(torch.empty(8, 32)).key
    assert [each.flops for each in plan.parts] == [3 * 2 * 8 * 32 * 64]


@sets("fuser.plan", training=False)
def _passes_of_a_plan(given: Given) -> None:
    x = torch.empty(8, 32)
    plan = fuser.plan(block(), x, **given)
    assert plan.sides == ("forward",)
    whole = fuser.plan(block(), x)
    assert 0 < plan.microseconds < whole.microseconds
    (part,) = plan.plans.values()
    assert not part.backward


@sets("fuser.plan", device="h200")
def _device_of_a_plan(given: Given) -> None:
    plan = fuser.plan(block().to("meta"), torch.empty(8, 32, device="meta"), **given)
    assert "H200" in plan.device.name
    assert plan.device.arch == (9, 0)
    (part,) = plan.plans.values()
    assert "sm_90" in str(part)


def _inspected(given: Given) -> tuple[Any, torch.Tensor]:
    model = given.get("model") or fuser.Sequential(fuser.Linear(32, 32))
    options = {name: value for name, value in given.items() if name != "model"}
    x = leaf(16, 32).detach()
    with fuser.inspect(model, **options) as report:
        for factor in (1.0, 2.0, 4.0, 8.0, 16.0):
            with fuser.autocast(recipe=Float8CurrentScaling()):
                y = model((factor * x).requires_grad_())
            y.sum().backward()
    return report, x


@sets("fuser.inspect", every=2)
def _calls_that_are_inspected(given: Given) -> None:
    report, x = _inspected(given)
    assert report.steps == (1, 3, 5)
    amaxes = [
        row.amax for step in report.steps for row in report.rows(step) if row.tensor == "input"
    ]
    assert amaxes == [factor * float(x.abs().max()) for factor in (1.0, 4.0, 16.0)]


@sets(
    "fuser.inspect",
    model=Of(nn.Sequential(fuser.Sequential(fuser.Linear(32, 32))), instead=nn.Linear(32, 32)),
)
def _layers_of_a_model(given: Given) -> None:
    report, _ = _inspected(given)
    assert {row.layer for row in report.rows()} == {"0.0"}


for _function, _recipe in (
    (fuser.is_fp8_available, "Float8CurrentScaling"),
    (fuser.is_fp8_block_scaling_available, "Float8BlockScaling"),
    (fuser.is_mxfp8_available, "MXFP8BlockScaling"),
    (fuser.is_nvfp4_available, "NVFP4BlockScaling"),
):

    @sets(f"fuser.{_function.__name__}", return_reason=True)
    def _reason_on_a_cpu(given: Given, function: Any = _function, recipe: str = _recipe) -> None:
        """Values are the same on a CPU, which has no products of these formats."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            is_available, reason = function(**given)
        assert is_available
        assert f"{recipe} is emulated on a CPU" in reason


@sets("fuser.is_bf16_available", return_reason=True)
def _reason_of_an_old_gpu(given: Given) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
        is_available, reason = fuser.is_bf16_available(**given)  # type: ignore[misc]
    assert not is_available
    assert "8.0; the current device has 7.5" in reason


@sets(
    "fuser.TensorSpec",
    shape=Of((3, 5), instead=(3, 4)),
    dtype=Of(torch.bfloat16, instead=torch.float32),
)
def _bytes_of_a_spec(given: Given) -> None:
    spec = fuser.TensorSpec(**{"shape": (3, 5), "dtype": torch.bfloat16, **given})
    assert spec.nbytes == torch.empty(3, 5, dtype=torch.bfloat16).nbytes
    assert spec == fuser.TensorSpec((3, 5), torch.bfloat16)


# -- tensors of gated units, states -------------------------------------------------------


def _interleaved(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks of ``size`` rows in turn: of the gate, of the linear part."""
    half = len(tensor) // 2
    order = [
        part * half + first + i
        for first in range(0, half, size)
        for part in (0, 1)
        for i in range(size)
    ]
    return tensor[order]


ROWS = torch.arange(24.0).view(12, 2)


@sets(
    "fuser.interleave_glu_tensor",
    tensor=Of(ROWS, instead=-ROWS),
    interleave_size=Of(2, instead=3),
)
def _rows_of_gate_and_linear_part_in_turn(given: Given) -> None:
    made = fuser.interleave_glu_tensor(**{"tensor": ROWS, "interleave_size": 2, **given})
    assert torch.equal(made, _interleaved(ROWS, 2))


@sets(
    "fuser.deinterleave_glu_tensor",
    tensor=Of(_interleaved(ROWS, 2), instead=ROWS),
    interleave_size=Of(2, instead=3),
)
def _rows_apart_again(given: Given) -> None:
    whole = {"tensor": _interleaved(ROWS, 2), "interleave_size": 2, **given}
    assert torch.equal(fuser.deinterleave_glu_tensor(**whole), ROWS)


PLAIN = nn.Sequential(nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 64), nn.GELU("tanh"))
OPS = block()


@sets(
    "fuser.plain_keys",
    module=Of(OPS, instead=nn.Identity()),
    state_dict=Of(OPS.state_dict(prefix="model."), instead=OPS.state_dict(prefix="other.")),
    prefix=Of("model.", instead=""),
)
def _names_of_torchs_modules(given: Given) -> None:
    """The dict changes in place, as in a hook of torch."""
    state = dict(given.get("state_dict", OPS.state_dict(prefix="model.")))
    arguments = {"module": OPS, "prefix": "model.", "local_metadata": {}}
    fuser.plain_keys(**{**arguments, **given, "state_dict": state})
    own = {name.removeprefix("model."): value for name, value in state.items()}
    PLAIN.load_state_dict(own)
    x = leaf(4, 32).detach()
    assert_close(PLAIN(x), OPS(x))


ignores("fuser.plain_keys", "torch gives it to every hook", "local_metadata")


# -- fusions that are registered ----------------------------------------------------------


class Sixfold(fuser.FusedOperation):
    """Two scales of 2 and 3 at once, in forward and in backward."""

    def __init__(self, ops: Any) -> None:
        super().__init__(ops)
        NOTED.append("made")

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
        NOTED.append("forward")
        return input_ * 6, [() for _ in basic_op_ctxs]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **_: Any) -> Any:
        NOTED.append("backward")
        return grad_output * 6, [() for _ in basic_op_ctxs], [() for _ in basic_op_ctxs]


def sixfold(ops: list[Any], *, recipe: Any) -> list[Any]:
    NOTED.append("asked")
    are_scales = all(isinstance(op, fuser.ConstantScale) for op in ops)
    return [Sixfold(ops)] if are_scales and len(ops) == 2 else ops


def keeping(ops: list[Any], *, recipe: Any) -> list[Any]:
    NOTED.append("kept")
    return ops


@contextlib.contextmanager
def _registry_of_its_own() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_registered", pipeline.RegisteredFusions())
        NOTED.clear()
        yield


def registers(path: str, register: Callable[..., None], *sides: str) -> None:
    def run() -> None:
        x = leaf(4)
        model = fuser.Sequential(fuser.ConstantScale(2.0), fuser.ConstantScale(3.0))
        y = model(x)
        y.sum().backward()
        assert_close(y, 6 * x)
        assert_close(x.grad, torch.full((4,), 6.0))

    @sets(path, op_fusion_func=Of(sixfold, instead=keeping))
    def passes_of_the_op(given: Given) -> None:
        with _registry_of_its_own():
            register(**given)
            run()
            assert [each for each in NOTED if each in ("forward", "backward")] == list(sides)

    @sets(path, prepend=True)
    def order_of_functions(given: Given) -> None:
        with _registry_of_its_own():
            register(keeping)
            register(sixfold, **given)
            run()
            asked = [each for each in NOTED if each in ("asked", "kept")]
            assert asked[:2] == ["asked", "kept"]


registers("fuser.register_forward_fusion", fuser.register_forward_fusion, "forward")
registers("fuser.register_backward_fusion", fuser.register_backward_fusion, "backward")
registers(
    "fuser.register_forward_backward_fusion",
    fuser.register_forward_backward_fusion,
    *("forward", "backward"),
)


# -- graphs --------------------------------------------------------------------------------


def graphed(*args: Any, **given: Any) -> Any:
    """Modules whose graphs a stand-in captures, on a CPU."""
    made: Any = fuser.make_graphed_callables(*args, **given)
    return made


@contextlib.contextmanager
def _capturing() -> Iterator[list[Any]]:
    """Yields the pools of memory that captures were given."""
    pools: list[Any] = []

    def capture(graph: Any, pool: Any = None) -> Any:
        pools.append(pool)
        return cpu_graphs.capture(graph, pool)

    with pytest.MonkeyPatch.context() as patch:
        cpu_graphs.use_stand_in(patch)
        patch.setattr(torch.cuda, "graph", capture)
        yield pools


class Linear(nn.Module):
    """A linear of the samples, and a parameter of which its output does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = fuser.BasicLinear(INPUTS, OUTPUTS)
        self.unused = nn.Parameter(torch.zeros(1))
        self.calls = 0
        with torch.no_grad():
            self.linear.weight.copy_(samples()[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.linear(x)
        return y


def _replayed(module: Linear, operands: Operands, context: Any = None) -> None:
    """A call of a graphed module, whose values are those of its own forward."""
    calls, (x, weight, dy) = module.calls, samples()
    module.zero_grad()
    given = x.clone().requires_grad_()
    with context or contextlib.nullcontext():
        y = module(given)
    y.backward(dy)
    assert module.calls == calls
    exact = operands.products(*numpy(x, weight, dy))
    exact["y"].assert_equals(y, "y")
    exact["dx"].assert_equals(_grad(given), "dx")
    exact["dw"].assert_equals(_grad(module.linear.weight), "dw")


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _sample() -> torch.Tensor:
    return torch.zeros_like(samples()[0]).requires_grad_()


GRAPHED = "fuser.make_graphed_callables"
UNUSED: Given = {"allow_unused_input": True}
MODULE = Linear()


@sets(GRAPHED, modules=Of(MODULE, instead=Linear()))
def _module_that_replays(given: Given) -> None:
    with _capturing():
        made = graphed(**given, sample_args=(_sample(),), **UNUSED)
        _replayed(MODULE, UNQUANTIZED)
        assert made is MODULE
    del MODULE.forward


@sets(GRAPHED, sample_args=Of((_sample(),), instead=(torch.zeros(1, INPUTS),)))
def _tensors_that_a_graph_takes(given: Given) -> None:
    with _capturing():
        module = graphed(Linear(), **given, **UNUSED)
        _replayed(module, UNQUANTIZED)


@sets(GRAPHED, num_warmup_iters=5)
def _calls_before_the_capture(given: Given) -> None:
    """And one more, and that of the capture."""
    with _capturing():
        module = graphed(Linear(), (_sample(),), **given, **UNUSED)
        assert module.calls == 7
        _replayed(module, UNQUANTIZED)


@sets(GRAPHED, allow_unused_input=True)
def _parameters_without_a_gradient(given: Given) -> None:
    with _capturing():
        module = graphed(Linear(), (_sample(),), **given)
        _replayed(module, UNQUANTIZED)
        assert module.unused.grad is None


@sets(GRAPHED, enabled=False)
def _graph_without_quantization(given: Given) -> None:
    with _capturing():
        with fuser.autocast(recipe=Float8CurrentScaling()):
            module = graphed(Linear(), (_sample(),), **given, **UNUSED)
        _replayed(module, UNQUANTIZED)


@sets(GRAPHED, recipe=MXFP8BlockScaling())
def _operands_in_a_graph(given: Given) -> None:
    """Those of the argument, also where another recipe is in effect."""
    with _capturing():
        with fuser.autocast(recipe=Float8CurrentScaling()):
            module = graphed(Linear(), (_sample(),), **given, **UNUSED)
        _replayed(module, MXFP8, fuser.autocast(recipe=MXFP8BlockScaling()))


@sets(GRAPHED, amax_reduction_group="a group of its own")
def _ranks_of_the_scales_of_a_graph(given: Given) -> None:
    own: list[Any] = []
    with beside_a_larger_rank(4.0, FLAGS, own) as groups, _capturing():
        group = dict.fromkeys(given, own[0])
        module = graphed(Linear(), (_sample(),), recipe=DelayedScaling(), **group, **UNUSED)
        x, _, dy = samples()
        for _ in range(2):
            module(x.clone().requires_grad_()).backward(dy)
    assert groups
    assert set(groups) == set(own)


@sets(GRAPHED, pool=(77, 0))
def _memory_of_a_graph(given: Given) -> None:
    with _capturing() as pools:
        module = graphed(Linear(), (_sample(),), **given, **UNUSED)
        assert pools == [(77, 0), (77, 0)]
        _replayed(module, UNQUANTIZED)


@sets("fuser.graph_passes", enabled=False)
def _passes_without_graphs(given: Given) -> None:
    fuser.graph_passes(**given)
    try:
        assert not pass_graphs.Switch.is_on
    finally:
        fuser.graph_passes(True)
    assert pass_graphs.Switch.is_on
