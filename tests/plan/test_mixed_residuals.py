"""Residual streams in fp32 around blocks in 16 bits, as torch's autocast makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from fusion_cases import refusal
from oracles import leaf, random_tensor
from pipeline_kernels import on_kernels

import fuser
from fuser.cuda.launch import Kernel, Launch

pytestmark = pytest.mark.sampled(most=12)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS, WIDTH = 7, 40


def block(norm: Any, channel: str, has_bias: bool) -> list[torch.nn.Module]:
    """``x + W2 swiglu(W1 norm(x))``."""
    make = fuser.MakeExtraOutput()
    return [
        make.set_extra_output_channel(0, channel, output_to_caller=False),
        norm(WIDTH),
        fuser.Linear(WIDTH, 2 * WIDTH, bias=has_bias),
        fuser.SwiGLU(),
        fuser.Linear(WIDTH, WIDTH, bias=has_bias),
        fuser.AddExtraInput().set_extra_input_channel(0, channel),
    ]


def two_blocks(norm: Any, fusions: Any = fuser.FUSIONS, has_bias: bool = False) -> Any:
    """Two blocks with parameters in fp32: 12 basic ops, 16 with biases."""
    ops = [*block(norm, "a", has_bias), *block(norm, "b", has_bias)]
    return oracles.randomize(fuser.Sequential(*ops, fusions=fusions))


@contextlib.contextmanager
def autocast(dtype: torch.dtype, recipe: Any = None) -> Iterator[None]:
    """Torch's autocast to ``dtype`` on kernels, with a recipe if there is one."""
    quantized = contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe)
    with on_kernels(), torch.autocast("cpu", dtype=dtype), quantized:
        yield


def trained(
    model: Any, dtype: torch.dtype, recipe: Any = None, steps: int = 1
) -> dict[str, torch.Tensor]:
    """The last output and every gradient of steps on a residual in fp32."""
    with autocast(dtype, recipe):
        for step in range(steps):
            x = leaf(random_tensor((ROWS, WIDTH), F32, 2 * step + 1))
            y = model(x)
            y.backward(random_tensor((ROWS, WIDTH), F32, 2 * step + 2))
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


# -- plans ----------------------------------------------------------------------


@pytest.mark.parametrize("norm", [fuser.RMSNorm, fuser.LayerNorm])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_sum_between_two_blocks_is_in_the_kernel_of_the_next_norm(
    norm: Any, dtype: torch.dtype
) -> None:
    """It reads 2 + 4 bytes an element, and writes the sum in 4 and the norm in 2."""
    x = torch.empty(ROWS, WIDTH, requires_grad=True)
    with autocast(dtype):
        plan = two_blocks(norm).plan(x)
    name = norm.__name__
    (step,) = [step for step in plan.forward if 7 in step.ops]
    assert (step.ops, step.fusion) == ((5, 6, 7), f"ForwardAdd{name}")
    assert step.kernel == f"add_{name.lower()}"
    count = norm.num_statistics
    parameters = 4 * WIDTH * count / plan.nominal_tokens
    assert step.bytes_per_token == WIDTH * (2 + 4 + 4 + 2) + 4 * count + parameters
    last = plan.forward[-1]
    assert (last.ops, last.fusion, last.kernel) == ((11,), None, "add")


@pytest.mark.parametrize("norm", [fuser.RMSNorm, fuser.LayerNorm])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_gradient_of_the_sum_is_written_in_both_dtypes_by_one_kernel(
    norm: Any, dtype: torch.dtype
) -> None:
    """It reads 2 + 4 + 4 bytes an element, and writes 4 for the residual and 2 for the linear."""
    x = torch.empty(ROWS, WIDTH, requires_grad=True)
    with autocast(dtype):
        plan = two_blocks(norm).plan(x)
    name = norm.__name__
    (step,) = [step for step in plan.backward if 7 in step.ops]
    assert (step.ops, step.fusion) == ((5, 6, 7), f"BackwardAdd{name}")
    assert step.kernel == f"{name.lower()}_backward_add_cast"
    count = norm.num_statistics
    parameters = 2 * 4 * WIDTH * count / plan.nominal_tokens
    assert step.bytes_per_token == WIDTH * (2 + 4 + 4 + 4 + 2) + 4 * count + parameters
    last = plan.backward[0]
    assert (last.ops, last.fusion, last.kernel) == ((11,), None, "cast")
    assert last.bytes_per_token == WIDTH * (4 + 2)


def test_the_gradient_of_a_sum_of_one_dtype_is_that_of_its_terms() -> None:
    with on_kernels():
        plan = two_blocks(fuser.RMSNorm).plan(torch.empty(ROWS, WIDTH, requires_grad=True))
    (step,) = [step for step in plan.backward if 7 in step.ops]
    assert (step.ops, step.kernel) == ((6, 7), "rmsnorm_backward_add")
    assert all(r.fusion != "BackwardAddRMSNorm" for r in plan.refusals)
    assert [s.kernel for s in plan.backward if s.ops in ((5,), (11,))] == ["", ""]


@pytest.mark.parametrize(("is_on_kernels", "reason"), [(True, "the norm rounds"), (False, "")])
def test_a_gradient_that_the_norms_kernel_does_not_round_is_cast_alone(
    is_on_kernels: bool, reason: str
) -> None:
    ops = fuser.AddExtraInput(), fuser.MakeExtraOutput(), fuser.RMSNorm(WIDTH)
    tensors = [torch.empty(ROWS, WIDTH, dtype=d, requires_grad=True) for d in (F16, F32)]
    context = on_kernels() if is_on_kernels else contextlib.nullcontext()
    with context, torch.autocast("cpu", dtype=BF16):
        plan = fuser.Sequential(*ops).plan(*tensors)
    found = refusal(plan, "BackwardAddRMSNorm", (0, 1, 2))
    assert found == (
        plan.key.no_kernels or f"{reason} its gradient to {BF16}, and the main input is {F16}."
    )
    assert [step.ops for step in plan.backward] == [(1, 2), (0,)]
    assert plan.backward[-1].kernel == "cast"


@pytest.mark.parametrize(("dtype", "element"), [(BF16, "fuser::bf16"), (F16, "fuser::fp16")])
def test_a_step_launches_the_norms_kernel_that_adds(
    dtype: torch.dtype, element: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbols: list[str] = []
    call = Kernel.__call__

    def noted(kernel: Kernel, launch: Launch, *args: Any) -> None:
        symbols.append(kernel.symbol)
        call(kernel, launch, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    trained(two_blocks(fuser.RMSNorm), dtype)
    norms = [symbol for symbol in symbols if symbol.startswith("fuser_norm<")]
    alone = f"fuser_norm<fuser::RMSNorm, float, {element}, true, true>"
    forward = [alone, f"{alone.removesuffix('>')}, {element}>"]
    assert norms == forward
    # The kernels of backward also store the rows for the wgrad of the linears.
    backward = [symbol for symbol in symbols if symbol.startswith("fuser_norm_backward<")]
    assert [symbol.endswith("true>") for symbol in backward] == [True, True]


@pytest.mark.parametrize(
    ("main", "extra", "autocast_dtype"), [(F16, BF16, BF16), (BF16, F32, F16), (BF16, F16, None)]
)
@pytest.mark.parametrize("norm", [fuser.RMSNorm, fuser.LayerNorm])
def test_a_sum_of_other_dtypes_is_refused_with_the_three_dtypes(
    norm: Any, main: torch.dtype, extra: torch.dtype, autocast_dtype: torch.dtype | None
) -> None:
    model = fuser.Sequential(fuser.AddExtraInput(), norm(WIDTH))
    tensors = [torch.empty(ROWS, WIDTH, dtype=dtype) for dtype in (main, extra)]
    under = contextlib.nullcontext() if autocast_dtype is None else autocast(autocast_dtype)
    with on_kernels(), under:
        plan = model.plan(*tensors)
    reason = refusal(plan, f"ForwardAdd{norm.__name__}", (0, 1))
    y = autocast_dtype or F32
    assert reason == f"no kernel adds {extra} to {main} and normalizes the sum to {y}."


# -- values -----------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("norm", [fuser.RMSNorm, fuser.LayerNorm])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_fused_blocks_have_the_bits_of_the_ops_one_by_one(
    norm: Any, dtype: torch.dtype, has_bias: bool
) -> None:
    expected = trained(two_blocks(norm, (), has_bias), dtype)
    fusions = tuple(fusion for fusion in fuser.FUSIONS if "Norm" in fusion.__name__)
    found = trained(two_blocks(norm, fusions, has_bias), dtype)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is F32
        assert torch.equal(found[name], value), name


def test_repeated_steps_have_the_bits_of_the_ops_one_by_one() -> None:
    """Later steps are recorded and repeated."""
    expected = trained(two_blocks(fuser.LayerNorm, ()), BF16, steps=5)
    fusions = tuple(fusion for fusion in fuser.FUSIONS if "Norm" in fusion.__name__)
    found = trained(two_blocks(fuser.LayerNorm, fusions), BF16, steps=5)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", formats.RECIPES)
def test_quantized_blocks_have_the_bits_of_the_ops_one_by_one(name: str) -> None:
    recipe = formats.RECIPES[name]()
    fusions = tuple(fusion for fusion in fuser.FUSIONS if "Norm" in fusion.__name__)
    torch.manual_seed(5)  # of stochastic rounding
    expected = trained(two_blocks(fuser.RMSNorm, ()), BF16, recipe)
    torch.manual_seed(5)
    found = trained(two_blocks(fuser.RMSNorm, fusions), BF16, recipe)
    for tensor, value in expected.items():
        assert torch.equal(found[tensor], value), tensor


@pytest.mark.parametrize("order", ["main", "extra"])
@pytest.mark.parametrize("wants_sum", [True, False])
def test_either_term_of_a_sum_may_be_the_one_in_fp32(order: str, wants_sum: bool) -> None:
    """Each gradient has the dtype of its term."""

    def run(fusions: Any) -> list[Any]:
        make = [fuser.MakeExtraOutput()] * wants_sum
        model = fuser.Sequential(
            fuser.AddExtraInput(), *make, fuser.RMSNorm(WIDTH), fusions=fusions
        )
        dtypes = (F32, BF16) if order == "main" else (BF16, F32)
        x, extra = (leaf(random_tensor((ROWS, WIDTH), d, k)) for k, d in enumerate(dtypes))
        with autocast(BF16):
            made = model(x, extra)
            outputs = made if wants_sum else (made,)
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        assert (x.grad.dtype, extra.grad.dtype) == dtypes
        return [*(output.detach() for output in outputs), x.grad, extra.grad]

    for found, expected in zip(run(fuser.FUSIONS), run(()), strict=True):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
