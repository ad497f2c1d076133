"""Chains of pointwise ops for tests: random tensors, kernels, plain torch and fp64 on them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import oracles
import torch
from pointwise_instantiations import (
    BIAS_GELU,
    EVERYTHING,
    GELU_ERF,
    LINEAR,
    SCALED_SRELU,
    SWIGLU,
    TWO_HALVES,
)

from fuser.chain import ACTIVATIONS, Stage, Stages
from fuser.cuda.pointwise import pointwise, pointwise_backward, workspace_size, writes_output
from fuser.reference import chain as reference
from fuser.reference.dropout import dropout_mask

SCALARS = {
    "situglu": (4.0, 25.0),
    "clamped_swiglu": (1.5, 1.702, 1.0),
    "tanh_srelu": (1.5,),
}

Emulated = Callable[..., AbstractContextManager[None]]


def no_emulator(**_: Any) -> AbstractContextManager[None]:
    """In the place of ``emulated`` where kernels run on a GPU."""
    return nullcontext()


@dataclass(frozen=True)
class Case:
    """A chain with a shape of its output, a dtype, and what backward is asked for.

    ``wanted`` are the stages whose operand's gradient is; ``pads`` says how many elements lie in
    front of every tensor, and behind every row of x and dy, so that 1 makes all of them
    misaligned.
    """

    stages: Stages
    rows: int = 3
    columns: int = 16
    dtype: torch.dtype = torch.bfloat16
    wanted: tuple[int, ...] = ()
    saved: int = 0
    scales: torch.dtype = torch.float32
    pads: int = 0
    spread: float = 1.0

    def __str__(self) -> str:
        names = "+".join(f"{'scaled_' * s.is_scaled}{s.name}" for s in self.stages)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{names}-{self.rows}x{self.columns}-{dtype}" + f"-pads{self.pads}" * bool(self.pads)

    def width(self, i: int) -> int:
        """Columns of the output of stage ``i``; of the chain's input for -1."""
        return self.columns * (1 + any(stage.is_gated for stage in self.stages[i + 1 :]))


def activation(name: str, interleave: int | None = None) -> Stage:
    """A stage with typical scalars."""
    return Stage(name, SCALARS.get(name, ()), interleave)


# -- tensors ------------------------------------------------------------------


@dataclass
class Tensors:
    """The inputs of a case, and outputs for them."""

    x: torch.Tensor
    dy: torch.Tensor
    operands: list[torch.Tensor | None]
    y: torch.Tensor
    dx: torch.Tensor
    grads: list[torch.Tensor | None]
    workspace: torch.Tensor


def padded(like: torch.Tensor, pads: int, rows_too: bool = False) -> torch.Tensor:
    """A copy with ``pads`` other elements in front, and behind every row."""
    if not pads:
        return like.clone()
    if rows_too:
        rows, columns = like.shape
        whole = torch.zeros(rows + 1, columns + pads, dtype=like.dtype, device=like.device)
        view = whole.view(-1)[pads:].as_strided(like.shape, (columns + pads, 1))
    else:
        whole = torch.zeros(like.numel() + pads, dtype=like.dtype, device=like.device)
        view = whole[pads:].view(like.shape)
    return view.copy_(like)


def tensors_of(case: Case, seed: int = 0, device: str = "cpu") -> Tensors:
    """Random inputs, the same for the same seed and any ``pads``."""
    rows, columns, dtype = case.rows, case.columns, case.dtype

    def random(*shape: int, number: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        tensor = oracles.random_tensor(shape, dtype, 1000 * seed + number, case.spread)
        return tensor.to(device)

    operands: list[torch.Tensor | None] = []
    grads: list[torch.Tensor | None] = []
    for i, stage in enumerate(case.stages):
        operand = None
        if stage.is_scaled:
            operand = random(rows, number=i, dtype=case.scales)
        elif stage.name == "bias":
            operand = padded(random(case.width(i), number=i), case.pads)
        elif stage.name == "add_extra_input":
            operand = padded(random(rows, case.width(i), number=i), case.pads)
        elif stage.name == "dropout":
            operand = torch.tensor([seed - 2**40, 2**62 + seed], device=device)
        operands.append(operand)
        wanted = i in case.wanted and operand is not None
        grads.append(padded(torch.zeros_like(operand), case.pads) if wanted else None)
    x = padded(random(rows, case.width(-1), number=100), case.pads, rows_too=True)
    dy = padded(random(rows, columns, number=101), case.pads, rows_too=True)
    size = workspace_size(case.stages, rows, columns, dtype, [grad is not None for grad in grads])
    return Tensors(
        x=x,
        dy=dy,
        operands=operands,
        y=padded(torch.zeros(rows, columns, dtype=dtype, device=device), case.pads),
        dx=padded(torch.zeros(rows, case.width(-1), dtype=dtype, device=device), case.pads),
        grads=grads,
        workspace=torch.full((size,), float("nan"), device=device),
    )


# -- the three ways -----------------------------------------------------------


def run_kernels(case: Case, t: Tensors, emulated: Emulated = no_emulator) -> dict[str, Any]:
    """Output and gradients by the kernels."""
    with emulated(written=(t.y,)):
        pointwise(case.stages, t.x, t.operands, t.y)
    run_backward(case, t, emulated)
    return named(t.y, t.dx, t.grads)


def run_backward(
    case: Case,
    t: Tensors,
    emulated: Emulated = no_emulator,
    y: torch.Tensor | None = None,
    *,
    overwrites_dy: bool = False,
) -> None:
    """The gradients by the kernel, which also writes ``y``; that is dy if it ``overwrites_dy``."""
    saved = reference.forward(case.stages[: case.saved], t.x, t.operands[: case.saved])
    has_activation = any(stage.is_activation for stage in case.stages)
    written = [tensor for tensor in (t.dx, *t.grads) if tensor is not None]
    if y is not None and not overwrites_dy:
        written.append(y)
    operands = [None if i < case.saved else operand for i, operand in enumerate(t.operands)]
    with emulated(written=written):
        pointwise_backward(
            case.stages,
            t.dy,
            saved if has_activation else None,
            operands,
            t.dx,
            t.grads,
            t.workspace,
            saved=case.saved,
            y=y,
        )


def check_stored_output(
    case: Case, t: Tensors, expected: dict[str, Any], emulated: Emulated = no_emulator
) -> None:
    """The kernel for the gradients stores the output too, with the same bits, also over dy."""
    if not writes_output(case.stages, case.dtype, t.operands, t.grads, case.saved):
        return
    for overwrites_dy in (True, False):
        y = padded(t.dy if overwrites_dy else torch.zeros_like(t.dy), case.pads)
        own = replace(
            t,
            dy=y if overwrites_dy else t.dy,
            dx=padded(torch.full_like(t.dx, float("nan")), case.pads),
            grads=[g if g is None else padded(torch.zeros_like(g), case.pads) for g in t.grads],
        )
        run_backward(case, own, emulated, y, overwrites_dy=overwrites_dy)
        for name, value in named(y, own.dx, own.grads).items():
            assert torch.equal(value, expected[name]), (name, overwrites_dy)


def run_plain(case: Case, t: Tensors) -> dict[str, Any]:
    """The same by the reference, stage by stage in the dtype of the case."""
    y = reference.forward(case.stages, t.x, t.operands)
    dx, grads = reference.backward(case.stages, t.dy, t.x, t.operands)
    wanted = [grad if i in case.wanted else None for i, grad in enumerate(grads)]
    return named(y, dx, wanted)


def run_exact(case: Case, t: Tensors) -> dict[str, Any]:
    """The same by the formulas in fp64, with gradients by autograd."""
    x = oracles.leaf(t.x, torch.float64)
    leaves: list[torch.Tensor | None] = []
    y = x
    for stage, operand in zip(case.stages, t.operands, strict=True):
        value = None
        if stage.name == "dropout":
            (p,) = stage.scalars
            assert operand is not None
            y = y * dropout_mask(operand, tuple(y.shape), p) / (1 - p)
        elif stage.name == "constant_scale":
            y = y * stage.scalars[0]
        else:
            value = None if operand is None else oracles.leaf(operand, torch.float64)
            y = _applied(stage, y, value)
        leaves.append(value)
    y.backward(t.dy.double())
    grads = [
        leaf.grad if leaf is not None and i in case.wanted else None
        for i, leaf in enumerate(leaves)
    ]
    assert x.grad is not None
    return named(y.detach(), x.grad, grads)


def _applied(stage: Stage, y: torch.Tensor, operand: torch.Tensor | None) -> torch.Tensor:
    if not stage.is_activation:
        assert operand is not None
        return y + operand
    formula = oracles.formula_of(stage)
    result: torch.Tensor = formula(y) if operand is None else oracles.scaled(formula)(y, operand)
    return result


def named(y: torch.Tensor, dx: torch.Tensor, grads: list[torch.Tensor | None]) -> dict[str, Any]:
    """Results by name."""
    return {"output": y, "dx": dx, **{f"grad {i}": g for i, g in enumerate(grads) if g is not None}}


def check(
    case: Case, emulated: Emulated = no_emulator, device: str = "cpu", seeds: int = 2
) -> None:
    """The kernels are at most twice as wrong as the reference, measured against fp64."""
    draws = []
    for seed in range(seeds):
        t = tensors_of(case, seed, device)
        actual = run_kernels(case, t, emulated)
        check_stored_output(case, t, actual, emulated)
        draws.append(oracles.Draw(actual, run_plain(case, t), run_exact(case, t)))
    oracles.assert_no_worse_than_torch(*draws)


def check_erf_gelu(
    dtype: torch.dtype, emulated: Emulated = no_emulator, device: str = "cpu"
) -> None:
    """Every element of the erf GELU is within 2^-19 of itself and a rounding, far below 0 too.

    Near 0, where torch is right to an ulp or two, fp32 is within 2^-22.5.

    0.5 (1 + erf) has lost all digits of fp32 at -5.5, so that torch is no measure there.
    """
    x = torch.linspace(-12, 12, 6000, device=device).to(dtype).view(-1, 40)
    y, dx, dy = torch.empty_like(x), torch.empty_like(x), torch.ones_like(x)
    with emulated(written=(y,)):
        pointwise(GELU_ERF, x, [None], y)
    with emulated(written=(dx,)):
        pointwise_backward(GELU_ERF, dy, x, [None], dx, [None])
    exact = x.double()
    integral = 0.5 * torch.special.erfc(-(0.5**0.5) * exact)
    product = exact * torch.exp(-0.5 * exact.square()) / (2 * torch.pi) ** 0.5
    # The slope is a sum: near its root the terms count. In 16 bits subnormals are rounded too.
    for actual, value, terms in (
        (y, exact * integral, (exact * integral).abs()),
        (dx, integral + product, integral + product.abs()),
    ):
        number = torch.finfo(dtype)
        own = torch.where(exact.abs() < 0.5, 2**-22.5, 2**-19) if number.bits == 32 else 2**-19
        allowed = (number.eps / 2 + own) * terms + number.smallest_normal * number.eps
        assert ((actual.double() - value).abs() <= allowed).all()


# -- tables -------------------------------------------------------------------

# Rows and columns: one element, odd ones, tails, several blocks a row, many rows.
SHAPES = ((1, 1), (1, 24), (7, 9), (5, 64), (2, 4104), (70, 8), (37, 272))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# Every activation in bf16, and the erf GELU, whose formula depends on the dtype, in the others.
ACTIVATION_CASES = (
    *(Case((activation(name),), 3, 40, spread=2.0) for name in ACTIVATIONS),
    *(Case(GELU_ERF, 3, 40, dtype, spread=2.0) for dtype in (torch.float32, torch.float16)),
)

# SwiGLU, and GELU behind a bias that is not added again, in every dtype and shape.
DTYPE_CASES = tuple(
    case
    for dtype in DTYPES
    for rows, columns in SHAPES
    for case in (
        Case(SWIGLU, rows, columns, dtype),
        Case(BIAS_GELU, rows, columns, dtype, wanted=(0,), saved=1),
    )
)

# Every kind of stage, with the gradients of operands.
CHAIN_CASES = tuple(
    case
    for rows, columns in ((5, 64), (70, 24), (2, 4104))
    for case in (
        Case(BIAS_GELU, rows, columns, wanted=(0,)),
        Case(SCALED_SRELU, rows, columns, wanted=(0,), scales=torch.bfloat16),
        Case(LINEAR, rows, columns, wanted=(0, 3)),
        Case(TWO_HALVES, rows, columns, wanted=(1,)),
        Case(EVERYTHING, rows, columns, torch.bfloat16, wanted=(0, 2, 4)),
        Case(EVERYTHING, rows, columns, torch.float32, wanted=(0, 2, 4)),
        Case(EVERYTHING, rows, columns + 3, torch.bfloat16, wanted=(0, 2, 4)),
        Case(EVERYTHING, rows, columns + 3, torch.float32, wanted=(0, 2, 4)),
    )
)

# Blocks of gate and linear columns: of whole vectors, and of any width.
INTERLEAVED_CASES = tuple(
    Case((activation("swiglu", interleave),), 5, columns)
    for interleave, columns in ((8, 32), (32, 64), (1, 8), (3, 24), (12, 48))
)


def misaligned(case: Case) -> Case:
    """The same on views at odd offsets, with odd strides between rows."""
    return replace(case, pads=1)
