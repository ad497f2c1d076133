"""Random pipelines equal a plain-torch model in outputs, extra outputs and every gradient."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import oracles
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from samples import examples

import fuser
from fuser.op import BasicOperation, OperationContext

Shape = tuple[int, ...]
Formula = Callable[..., Any]

deterministic = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow],
}


# -- two custom ops -----------------------------------------------------------------


class Stretch(BasicOperation):
    """``y = x * weight``: a user's op, written with ``op_forward`` and no planning facts."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))

    def op_forward(
        self, ctx: OperationContext, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, self.weight)
        return input_ * self.weight

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_weight = (grad_output * x).reshape(-1, weight.numel()).sum(0)
        return grad_output * weight, (grad_weight,)


class Blend(BasicOperation):
    """``y = x + e / 2`` and an extra output ``x - e``: a user's op with both kinds of extras."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        **others: Any,
    ) -> Any:
        ((extra,),) = basic_op_extra_inputs
        return input_ + extra / 2, [(input_ - extra,)]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> Any:
        ((grad_extra,),) = basic_op_grad_extra_outputs
        return grad_output + grad_extra, [()], [(grad_output / 2 - grad_extra,)]


# -- programs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """The groups of rows of a ``GroupedLinear``: their number, and whether there are more rows."""

    count: int
    has_more_rows: bool

    def split_sizes(self, rows: int, seed: int) -> torch.Tensor:
        """Random sizes, some of which are 0; the same ones for the same numbers."""
        generator = torch.Generator().manual_seed(seed + self.count)
        ends = torch.randint(rows + 1, (self.count,), generator=generator).sort().values
        if not self.has_more_rows:
            ends[-1] = rows
        return ends.diff(prepend=ends.new_zeros(1))


@dataclass
class Piece:
    """One op: how fuser makes it, its formula, and how it is wired.

    The formula gets the main input, the parameters and the extra inputs, and
    returns the output, or a pair with the extra output. ``extra`` is the shape
    of an extra input: ``"same"`` as the main input or ``"rows"``. With ``groups``
    there are split sizes before it.
    """

    label: str
    make: Callable[[torch.dtype], torch.nn.Module]
    formula: Formula
    reshape: Callable[[Shape], Shape] = lambda shape: shape
    extra: str | None = None
    groups: Groups | None = None
    reads: str | None = None
    has_extra_output: bool = False
    writes: str | None = None
    is_returned: bool = True

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints a piece of a failing example."""
        wires = [f"<- {self.reads or 'caller'}"] if self.extra else []
        if self.has_extra_output:
            wires += [f"-> {self.writes}"] if self.writes else []
            wires += ["-> caller"] if self.is_returned else []
        printer.text(" ".join([self.label, *wires]))


@dataclass
class Program:
    """A pipeline as a list of pieces, and the width of its input."""

    width: int
    pieces: list[Piece] = field(default_factory=list)

    def module(self, dtype: torch.dtype, **kwargs: Any) -> fuser.Sequential:
        """The pipeline in fuser, in evaluation mode, with random parameters."""
        ops = []
        for piece in self.pieces:
            op = piece.make(dtype)
            if piece.reads is not None:
                op.set_extra_input_channel(0, piece.reads)
            if piece.writes is not None:
                op.set_extra_output_channel(0, piece.writes, output_to_caller=piece.is_returned)
            ops.append(op)
        model = fuser.Sequential(*ops, **kwargs).eval()
        oracles.randomize(model)
        with torch.no_grad():
            for parameter in model.parameters():
                # Keeps values near one through any number of layers.
                parameter.mul_(1 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.5)
        return model

    def plain(
        self,
        x: torch.Tensor,
        params: Sequence[Sequence[torch.Tensor]],
        extras: Iterable[torch.Tensor],
        jitter: Formula,
    ) -> tuple[torch.Tensor, ...]:
        """The same in plain torch: the output and the extra outputs for the caller.

        ``jitter`` is applied to all values that enter or leave an op.
        """
        given_extras = iter(extras)
        channels: dict[str, torch.Tensor] = {}
        returned: list[torch.Tensor] = []
        for piece, own in zip(self.pieces, params, strict=True):
            values = [x, *own]
            if piece.groups is not None:
                values.append(next(given_extras))
            if piece.extra is not None:
                values.append(channels[piece.reads] if piece.reads else next(given_extras))
            result = piece.formula(*(jitter(v) if v.is_floating_point() else v for v in values))
            x, *produced = map(jitter, result if piece.has_extra_output else (result,))
            if piece.writes is not None:
                channels[piece.writes] = produced[0]
            if piece.has_extra_output and piece.is_returned:
                returned += produced
        return (x, *returned)

    def extras(self, leading: Shape, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        """Extra inputs of a caller, for leading dimensions ``leading``."""
        shape: Shape = (*leading, self.width)
        found: list[torch.Tensor] = []
        for piece in self.pieces:
            if piece.groups is not None:
                rows = math.prod(shape[:-1])
                found.append(piece.groups.split_sizes(rows, seed))
            if piece.extra is not None and piece.reads is None:
                extra_shape = shape if piece.extra == "same" else shape[:-1]
                found.append(oracles.random_tensor(extra_shape, dtype, seed + 1 + len(found)))
            shape = piece.reshape(shape)
        return found


def narrower(shape: Shape) -> Shape:
    return (*shape[:-1], shape[-1] // 2)


def plain_op(op: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda dtype: op(*args, **kwargs)


def typed_op(op: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda dtype: op(*args, dtype=dtype, **kwargs)


def passes(x: torch.Tensor) -> torch.Tensor:
    return x


class _Jitter(torch.autograd.Function):
    """Moves a value, and the gradient that comes back, by up to one rounding."""

    @staticmethod
    def forward(ctx: Any, eps: float, generator: torch.Generator, x: torch.Tensor) -> torch.Tensor:
        ctx.eps, ctx.generator = eps, generator
        return x * (1 + eps * (2 * torch.rand(x.shape, generator=generator) - 1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, _Jitter.forward(ctx, ctx.eps, ctx.generator, grad)


# Name, formula, and by which power the largest values grow: a budget keeps
# chains of them inside fp16's range.
POINTWISE: tuple[tuple[type[Any], Formula, int], ...] = (
    (fuser.GELU, oracles.gelu, 1),
    (fuser.QGELU, oracles.qgelu, 1),
    (fuser.ReLU, torch.relu, 1),
    (fuser.SReLU, oracles.srelu, 2),
    (fuser.SiLU, oracles.silu, 1),
)
GATED: tuple[tuple[type[Any], dict[str, Any], Formula, int], ...] = (
    (fuser.GLU, {}, oracles.gated(torch.sigmoid), 1),
    (fuser.GEGLU, {}, oracles.gated(oracles.gelu), 2),
    (fuser.QGEGLU, {}, oracles.gated(oracles.qgelu), 2),
    (fuser.ReGLU, {}, oracles.gated(torch.relu), 2),
    (fuser.SReGLU, {}, oracles.gated(oracles.srelu), 3),
    (fuser.SwiGLU, {}, oracles.gated(oracles.silu), 2),
    (fuser.SwiGLU, {"glu_interleave_size": 2}, oracles.gated(oracles.silu, 2), 2),
    (fuser.SiTUGLU, {}, oracles.situglu(), 1),
    (fuser.SiTUGLU, {"glu_interleave_size": 1}, oracles.situglu(interleave=1), 1),
    (fuser.ClampedSwiGLU, {"limit": 1.5}, oracles.clamped_swiglu(1.5), 1),
)
SCALED: tuple[tuple[Any, dict[str, Any], Formula, int], ...] = (
    (fuser.ScaledSwiGLU, {}, oracles.scaled(oracles.gated(oracles.silu)), 3),
    (fuser.ScaledSiTUGLU, {}, oracles.scaled(oracles.situglu()), 2),
    (
        fuser.ScaledClampedQGeGLU,
        {"glu_interleave_size": 2},
        oracles.scaled(oracles.clamped_swiglu(interleave=2)),
        2,
    ),
)


def norms(width: int) -> list[Piece]:
    """Every normalization over ``width`` columns."""
    found = [Piece("L2Normalization", plain_op(fuser.L2Normalization), oracles.l2norm())]
    for zero_centered in (False, True):
        for op, oracle in ((fuser.LayerNorm, oracles.layernorm), (fuser.RMSNorm, oracles.rmsnorm)):
            found.append(
                Piece(
                    f"{op.__name__}({width}, zero_centered_gamma={zero_centered})",
                    typed_op(op, width, zero_centered_gamma=zero_centered),
                    oracle(zero_centered=zero_centered),
                )
            )
    return found


def flattened(shape: Shape) -> Shape:
    return (math.prod(shape[:-1]), shape[-1])


def split_in_two(shape: Shape) -> Shape:
    return (math.prod(shape[:-1]), 2, shape[-1] // 2)


class _Writer:
    """Writes a program op by op, and keeps what the next op may be.

    Widths are multiples of twice the ``unit``.
    """

    def __init__(self, draw: st.DrawFn, budget: int, unit: int) -> None:
        self.draw = draw
        self.unit = unit
        self.width = self.draw_width()
        self.budget = self.left = budget
        self.layout = 0
        self.has_more_rows = not draw(st.integers(0, 3))
        self.has_zero_rows = False
        self.channels: dict[str, tuple[int, int]] = {}
        self.program = Program(self.width)

    def draw_width(self) -> int:
        return self.unit * self.draw(st.sampled_from((4, 6, 8, 12)))

    def add(self, piece: Piece) -> None:
        self.program.pieces.append(piece)

    def linear(self) -> None:
        out = self.draw_width()
        kind = self.draw(st.sampled_from(("BasicLinear", "Linear", "Linear without bias")))
        sizes = (self.width, out)
        make, formula = {
            "BasicLinear": (typed_op(fuser.BasicLinear, *sizes), oracles.linear),
            "Linear": (typed_op(fuser.Linear, *sizes), oracles.linear_bias),
            "Linear without bias": (typed_op(fuser.Linear, *sizes, bias=False), oracles.linear),
        }[kind]
        self.add(Piece(f"{kind}{sizes}", make, formula, lambda shape: (*shape[:-1], out)))
        self.width = out

    def grouped_linear(self) -> None:
        """Norms may not follow rows of no group, which are 0: these have no direction."""
        out, draw = self.draw_width(), self.draw
        groups = Groups(draw(st.integers(1, 4)), self.has_more_rows)
        bias = draw(st.sampled_from(("none", "added", "scaled")))
        options = {
            "bias": bias != "none",
            "scale_bias": bias == "scaled",
            "single_grouped_weight": draw(st.booleans()),
            "single_grouped_bias": draw(st.booleans()),
        }
        sizes = (groups.count, self.width, out)
        self.add(
            Piece(
                f"GroupedLinear{sizes}({options}, {groups})",
                typed_op(fuser.GroupedLinear, *sizes, **options),
                oracles.grouped_linear(**options),
                lambda shape: (*shape[:-1], out),
                extra="rows" if bias == "scaled" else None,
                groups=groups,
            )
        )
        self.width = out
        self.has_zero_rows = self.has_zero_rows or groups.has_more_rows

    def bias(self) -> None:
        self.add(Piece(f"Bias({self.width})", typed_op(fuser.Bias, self.width), oracles.bias))

    def norm(self) -> None:
        # Two values have no direction left once normalized, and zeros none.
        if self.width >= 4 and not self.has_zero_rows:
            self.add(self.draw(st.sampled_from(norms(self.width))))
            self.left = self.budget

    def activation(self) -> None:
        op, formula, power = self.draw(st.sampled_from(POINTWISE))
        if self.spend(power):
            self.add(Piece(op.__name__, plain_op(op), formula))

    def gated(self) -> None:
        op, arguments, formula, power = self.draw(st.sampled_from(GATED))
        if self.width % (4 * self.unit) == 0 and self.spend(power):
            label = f"{op.__name__}({arguments})"
            self.add(Piece(label, plain_op(op, **arguments), formula, narrower))
            self.width //= 2

    def scaled_gated(self) -> None:
        op, arguments, formula, power = self.draw(st.sampled_from(SCALED))
        if self.width % (4 * self.unit) == 0 and self.spend(power):
            label = f"{op.__name__}({arguments})"
            self.add(Piece(label, plain_op(op, **arguments), formula, narrower, extra="rows"))
            self.width //= 2

    def scaled_srelu(self) -> None:
        if self.spend(3):
            formula = oracles.scaled(oracles.srelu)
            self.add(Piece("ScaledSReLU", plain_op(fuser.ScaledSReLU), formula, extra="rows"))

    def spend(self, power: int) -> bool:
        """Whether the values may still grow by such a power."""
        if power > self.left:
            return False
        self.left //= power
        return True

    def constant_scale(self) -> None:
        scale = self.draw(st.sampled_from((-1.5, 0.25, 1.0, 2.0)))
        label = f"ConstantScale({scale})"
        self.add(Piece(label, plain_op(fuser.ConstantScale, scale), lambda x: x * scale))

    def nothing(self) -> None:
        """An op that passes its input on."""
        label, make = self.draw(
            st.sampled_from(
                (
                    ("Identity", plain_op(fuser.Identity)),
                    ("Quantize", plain_op(fuser.Quantize, True, True)),
                    ("Dropout in eval", plain_op(fuser.Dropout, 0.5)),
                )
            )
        )
        self.add(Piece(label, make, passes))

    def reshape(self) -> None:
        shape: tuple[int, ...]
        if self.width % (4 * self.unit) == 0 and self.draw(st.booleans()):
            shape, rule = (-1, 2, self.width // 2), split_in_two
        else:
            shape, rule = (-1, self.width), flattened
        formula: Formula = lambda x: x.reshape(shape)  # noqa: E731
        self.add(Piece(f"Reshape({shape})", plain_op(fuser.Reshape, shape), formula, rule))
        self.width = shape[-1]
        self.layout += 1

    def custom(self) -> None:
        width = self.width
        make: Callable[[torch.dtype], torch.nn.Module] = lambda dtype: Stretch(width, dtype)  # noqa: E731
        self.add(Piece(f"Stretch({width})", make, lambda x, weight: x * weight))

    def blend(self) -> None:
        formula: Formula = lambda x, e: (x + e / 2, x - e)  # noqa: E731
        piece = Piece("Blend", plain_op(Blend), formula, extra="same", has_extra_output=True)
        self.add(self.wired_output(self.wired_input(piece)))

    def add_extra_input(self) -> None:
        piece = Piece("AddExtraInput", plain_op(fuser.AddExtraInput), torch.add, extra="same")
        self.add(self.wired_input(piece))

    def make_extra_output(self) -> None:
        piece = Piece(
            "MakeExtraOutput",
            plain_op(fuser.MakeExtraOutput),
            lambda x: (x, x),
            has_extra_output=True,
        )
        self.add(self.wired_output(piece))

    def wired_input(self, piece: Piece) -> Piece:
        """Read from a channel if one carries this shape, or from the caller."""
        here = (self.layout, self.width)
        fitting = [name for name, shape in self.channels.items() if shape == here]
        if fitting and self.draw(st.integers(0, 3)):
            piece.reads = self.draw(st.sampled_from(fitting))
        return piece

    def wired_output(self, piece: Piece) -> Piece:
        """Write to a channel, to the caller, or to both."""
        where = self.draw(st.sampled_from(("caller", "channel", "both")))
        if where != "caller":
            piece.writes = f"channel {len(self.channels)}"
            self.channels[piece.writes] = (self.layout, self.width)
        piece.is_returned = where != "channel"
        return piece

    KINDS = (
        *("linear", "bias", "activation", "gated", "norm", "add_extra_input"),
        *("make_extra_output", "scaled_gated", "scaled_srelu", "constant_scale"),
        *("nothing", "reshape", "custom", "blend", "grouped_linear"),
    )
    # Neighbours that the shipped fusions look for; chance alone rarely makes them.
    PHRASES = (
        *(("linear", "activation"), ("linear", "bias", "gated"), ("bias", "activation")),
        *(("linear", "add_extra_input"), ("linear", "constant_scale", "add_extra_input")),
        *(("linear", "bias", "add_extra_input"), ("make_extra_output", "linear")),
        *(("make_extra_output", "norm"), ("linear", "constant_scale")),
        *(("add_extra_input", "norm"), ("add_extra_input", "make_extra_output", "norm")),
        *(("grouped_linear", "scaled_gated", "grouped_linear"), ("linear", "grouped_linear")),
    )

    def write(self, count: int) -> Program:
        while len(self.program.pieces) < count:
            one = st.sampled_from(self.KINDS).map(lambda kind: (kind,))
            for kind in self.draw(one | st.sampled_from(self.PHRASES)):
                getattr(self, kind)()
        return self.program


@st.composite
def programs(draw: st.DrawFn, budget: int = 8, unit: int = 1) -> Program:
    """Random pipelines of 1 to 10 ops whose shapes fit, with widths in multiples of 2 ``unit``."""
    return _Writer(draw, budget, unit).write(draw(st.integers(1, 8)))


leadings = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@dataclass
class Setting:
    """What a run may vary beside the program."""

    leading: Shape
    mode: str
    x_requires_grad: bool
    seed: int
    flags: list[bool]
    """Whether parameters and extra inputs need gradients, taken in turn."""
    used: list[bool]
    """Whether outputs take part in the loss, taken in turn."""


run_settings = st.builds(
    Setting,
    leading=leadings,
    mode=st.sampled_from(("grad", "grad", "grad", "no_grad", "inference")),
    x_requires_grad=st.booleans(),
    seed=st.integers(0, 10**6),
    flags=st.lists(st.sampled_from((True, True, False)), min_size=1, max_size=8),
    used=st.lists(st.sampled_from((True, True, True, False)), min_size=1, max_size=4),
)

MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def turn(flags: Sequence[bool], number: int) -> bool:
    return flags[number % len(flags)]


Results = dict[str, torch.Tensor | None]


def collect(
    outputs: Any, leaves: dict[str, torch.Tensor], setting: Setting
) -> tuple[Results, Results]:
    """Outputs and gradients by name, for random output gradients; unused outputs get none."""
    outputs = oracles.as_tuple(outputs)
    loss = []
    for number, y in enumerate(outputs):
        cotangent = oracles.random_tensor(y.shape, torch.bfloat16, setting.seed + 1000 + number)
        if y.requires_grad and turn(setting.used, number):
            loss.append((y, cotangent.to(y.dtype)))
    # Without grad, what an op passes on by reference still is the caller's leaf.
    if loss and setting.mode == "grad":
        torch.autograd.backward([y for y, _ in loss], [g for _, g in loss])
    return (
        {f"output {number}": y.detach() for number, y in enumerate(outputs)},
        {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()},
    )


class Experiment:
    """One program under one setting: the same tensors for fuser and for plain torch."""

    def __init__(self, program: Program, setting: Setting, dtype: torch.dtype) -> None:
        self.program, self.setting, self.dtype = program, setting, dtype
        shape = (*setting.leading, program.width)
        self.x = oracles.random_tensor(shape, dtype, setting.seed)
        self.extras = program.extras(setting.leading, dtype, setting.seed)

    def leaves(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Fresh copies of the inputs."""
        x = self.x.to(dtype, copy=True).requires_grad_(self.setting.x_requires_grad)
        extras = [
            extra.to(dtype, copy=True).requires_grad_(turn(self.setting.flags, 3 * number + 1))
            if extra.is_floating_point()
            else extra
            for number, extra in enumerate(self.extras)
        ]
        return x, extras

    def freeze(self, model: torch.nn.Module) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(turn(self.setting.flags, number))

    def fused(
        self, splits: Sequence[str] = ("",), **kwargs: Any
    ) -> tuple[Results, Results, tuple[bool, ...]]:
        """Outputs, gradients, and which outputs are differentiable, by fuser."""
        model = split(self.program.module(self.dtype, **kwargs), splits)
        self.freeze(model)
        x, extras = self.leaves(self.dtype)
        with MODES[self.setting.mode]():
            outputs = model(x, *extras)
        leaves = {
            "x": x,
            **{f"extra {number}": extra for number, extra in enumerate(extras)},
            **dict(model.named_parameters()),
        }
        differentiable = tuple(y.requires_grad for y in oracles.as_tuple(outputs))
        return (*collect(outputs, leaves, self.setting), differentiable)

    def plain(
        self, dtype: torch.dtype, noise: int | None = None
    ) -> tuple[Results, Results, tuple[bool, ...]]:
        """The same by plain torch in ``dtype``.

        With ``noise``, the seed of it, all that enters or leaves an op, values
        and gradients, is moved by up to one rounding of the dtype under test.
        """
        jitter = passes
        if noise is not None:
            generator = torch.Generator().manual_seed(noise)
            jitter = functools.partial(_Jitter.apply, torch.finfo(self.dtype).eps, generator)
        model = self.program.module(self.dtype).to(dtype)
        self.freeze(model)
        x, extras = self.leaves(dtype)
        with MODES[self.setting.mode]():
            params = [list(module.parameters()) for module in model]
            outputs = self.program.plain(x, params, extras, jitter)
        leaves = {
            "x": x,
            **{f"extra {number}": extra for number, extra in enumerate(extras)},
            **dict(model.named_parameters()),
        }
        differentiable = tuple(y.requires_grad for y in outputs)
        return (*collect(outputs, leaves, self.setting), differentiable)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Euclidean norm of the difference."""
    return float((a.double() - b.double()).norm())


def split(model: fuser.Sequential, splits: Sequence[str]) -> fuser.Sequential:
    """``model`` with hooks on ops and other modules between them, as ``splits`` say in turn."""
    modules: dict[str, torch.nn.Module] = {}
    for number, module in enumerate(model):
        how = splits[number % len(splits)]
        if how == "module":
            modules[f"before {number}"] = torch.nn.Identity()
        elif how == "hook":
            module.register_forward_hook(lambda *args: None)
        elif how == "inner hook":
            list(module.modules())[-1].register_full_backward_hook(lambda *args: None)
        modules[str(number)] = module
    return fuser.Sequential(modules, fusions=model.fusions)


SPLITS = ("", "", "module", "hook", "inner hook")


def check(program: Program, setting: Setting, dtype: torch.dtype) -> None:
    """Hold fuser, fused and unfused, to the errors that plain torch makes in ``dtype``."""
    experiment = Experiment(program, setting, dtype)
    *exact, differentiable = experiment.plain(torch.float64)
    truths = exact[0] | exact[1]
    allowed = allowed_errors(experiment, truths)
    for fusions in (fuser.FUSIONS, ()):
        *results, fuser_differentiable = experiment.fused(fusions=fusions)
        assert fuser_differentiable == differentiable
        assert [list(part) for part in results] == [list(part) for part in exact]
        for name, value in (results[0] | results[1]).items():
            truth = truths[name]
            if truth is None:
                assert value is None, f"{name} is {value}, and the loss does not reach it"
                continue
            assert value is not None, f"{name} is missing"
            assert (value.shape, value.dtype) == (truth.shape, dtype), name
            error = distance(value, truth)
            assert error <= allowed[name], f"{name}: off by {error:.3g}, not {allowed[name]:.3g}"


def allowed_errors(experiment: Experiment, truths: Results) -> dict[str, float]:
    """How far each result may be from the truth, by what the same arithmetic does elsewhere.

    Twice the error of plain torch in the same dtype, which may be small by luck,
    and eight times (an op rounds more than once inside) what random roundings
    between the ops do to the truth. A wrong formula is off by far more.
    """
    eps = torch.finfo(experiment.dtype).eps
    outputs, grads, _ = experiment.plain(experiment.dtype)
    rounded = [experiment.plain(torch.float64, noise=seed) for seed in range(4)]
    allowed = {}
    for name, truth in truths.items():
        same_dtype = (outputs | grads)[name]
        if truth is None or same_dtype is None:
            continue
        moved = max(distance((part[0] | part[1])[name], truth) for part in rounded)
        allowed[name] = 2 * distance(same_dtype, truth) + 8 * moved + eps * float(truth.norm())
    return allowed


@settings(max_examples=examples(280), **deterministic)
@given(programs(), run_settings)
def test_random_pipelines_equal_plain_torch(program: Program, setting: Setting) -> None:
    event(f"mode {setting.mode}")
    check(program, setting, torch.float32)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@settings(max_examples=examples(150), **deterministic)
@given(programs(), run_settings, st.lists(st.sampled_from(SPLITS), min_size=1, max_size=10))
def test_random_pipelines_in_pieces_equal_whole_ones(
    program: Program, setting: Setting, splits: list[str]
) -> None:
    experiment = Experiment(program, setting, torch.float32)
    whole, pieces = experiment.fused(), experiment.fused(splits)
    assert pieces[2] == whole[2]
    for results, expected in zip(pieces[:2], whole[:2], strict=True):
        assert list(results) == list(expected)
        for name, value in results.items():
            wanted = expected[name]
            assert (value is None) == (wanted is None), name
            if value is not None:
                # Gradients of a tensor that many read are added in another order.
                torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


@settings(max_examples=examples(100), **deterministic)
@given(programs(budget=3), run_settings, st.sampled_from((torch.bfloat16, torch.float16)))
def test_random_pipelines_equal_plain_torch_in_16_bits(
    program: Program, setting: Setting, dtype: torch.dtype
) -> None:
    check(program, setting, dtype)


# Formats that pad to whole blocks.
IN_BLOCKS = (
    fuser.recipe.MXFP8BlockScaling(),
    fuser.recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    fuser.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    fuser.recipe.NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True
    ),
)
RECIPES = (
    fuser.recipe.Float8CurrentScaling(),
    fuser.recipe.Float8CurrentScaling(use_power_2_scales=True),
    fuser.recipe.Float8RowwiseScaling(),
    fuser.recipe.Float8BlockScaling(),
    fuser.recipe.Float8BlockScaling(
        use_f32_scales=True, w_block_scaling_dim=1, grad_block_scaling_dim=2
    ),
    fuser.recipe.DelayedScaling(amax_history_len=2),
    *IN_BLOCKS,
)


@settings(max_examples=examples(160), **deterministic)
@given(programs(), run_settings, st.sampled_from(RECIPES))
def test_under_a_recipe_fused_equals_unfused_bit_for_bit(
    program: Program, setting: Setting, recipe: fuser.recipe.Recipe
) -> None:
    check_fused_equals_unfused(Experiment(program, setting, torch.float32), recipe)


@settings(max_examples=examples(80), **deterministic)
@given(programs(unit=16), run_settings, st.sampled_from(IN_BLOCKS))
def test_in_whole_blocks_fused_equals_unfused_bit_for_bit(
    program: Program, setting: Setting, recipe: fuser.recipe.Recipe
) -> None:
    whole = dataclasses.replace(setting, leading=(*setting.leading, 32))
    check_fused_equals_unfused(Experiment(program, whole, torch.float32), recipe)


def check_fused_equals_unfused(experiment: Experiment, recipe: fuser.recipe.Recipe) -> None:
    with fuser.autocast(recipe=recipe):
        fused, unfused = (experiment.fused(fusions=f) for f in (fuser.FUSIONS, ()))
    for part, other in zip(fused[:2], unfused[:2], strict=True):
        for name, value in part.items():
            assert (value is None) == (other[name] is None), name
            if value is not None:
                torch.testing.assert_close(value, other[name], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=examples(100), **deterministic)
@given(programs(), run_settings)
def test_frozen_leaves_get_no_gradient(program: Program, setting: Setting) -> None:
    experiment = Experiment(program, setting, torch.float32)
    model = program.module(torch.float32)
    experiment.freeze(model)
    x, extras = experiment.leaves(torch.float32)
    with MODES[setting.mode]():
        outputs = model(x, *extras)
    collect(outputs, {}, setting)
    for leaf in (x, *extras, *model.parameters()):
        assert leaf.requires_grad or leaf.grad is None


@settings(max_examples=examples(100), **deterministic)
@given(programs(), run_settings)
def test_the_number_of_tokens_does_not_change_the_plan(program: Program, setting: Setting) -> None:
    def plan(leading: Shape) -> fuser.FusionPlan:
        model = program.module(torch.float32)
        Experiment(program, setting, torch.float32).freeze(model)
        extras = [extra.to("meta") for extra in program.extras(leading, torch.float32, 0)]
        x = torch.empty((*leading, program.width), device="meta")
        return model.plan(x.requires_grad_(setting.x_requires_grad), *extras)

    assert plan(setting.leading) == plan((5,)) == plan((2, 3))


def test_random_pipelines_reach_every_fusion() -> None:
    """Else the tests above would show less than they seem to."""
    fired: set[str] = set()

    @settings(max_examples=400, **deterministic)
    @given(programs(), run_settings)
    def look(program: Program, setting: Setting) -> None:
        model = program.module(torch.float32)
        Experiment(program, setting, torch.float32).freeze(model)
        extras = [extra.to("meta") for extra in program.extras((5,), torch.float32, 0)]
        x = torch.empty(5, program.width, device="meta")
        plan = model.plan(x.requires_grad_(setting.x_requires_grad), *extras)
        fired.update(step.fusion for step in plan.forward + plan.backward if step.fusion)

    look()
    # Chains run on kernels alone; test_kernels_in_pipelines.py has random ones. A dispatch takes
    # integers; test_dispatched_experts.py has its layers.
    elsewhere = {"PointwiseChain", "DispatchedExperts"}
    assert fired == {fusion.__name__ for fusion in fuser.FUSIONS} - elsewhere
