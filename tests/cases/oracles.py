"""Oracles: the formula of each basic op in plain torch, and the rule results are held to.

Formulas are differentiable and take any floating dtype. In float64 they are the
truth, with gradients from torch's autograd; in the dtype under test they are the
"plain torch" that fuser is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

import fuser
from fuser.basic_ops import activation
from fuser.chain import Stage

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Formula = Callable[..., Any]
M = TypeVar("M", bound=torch.nn.Module)


# -- formulas: the main input, then parameters, then extra inputs ------------------


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


def bias(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x + b


def linear_bias(x: torch.Tensor, weight: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x @ weight.T + b


def grouped_linear(
    *, bias: bool, scale_bias: bool, single_grouped_weight: bool, single_grouped_bias: bool
) -> Formula:
    """Linears of groups of rows: parameters as the op has them, split sizes, and scales if any."""

    def formula(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        parts = list(rest)
        scales = parts.pop() if scale_bias else None
        sizes = parts.pop().tolist()
        weights = list(parts.pop(0)) if single_grouped_weight else parts[: len(sizes)]
        parts = parts[0 if single_grouped_weight else len(sizes) :]
        biases = list(parts[0]) if single_grouped_bias and bias else parts
        rows = x.reshape(-1, x.shape[-1])
        more = rows.shape[0] - sum(sizes)
        found = []
        start = 0
        for g, size in enumerate(sizes):
            own = slice(start, start + size)
            y = rows[own] @ weights[g].T
            if bias:
                factor = 1 if scales is None else scales.reshape(-1)[own, None]
                y = y + factor * biases[g]
            found.append(y)
            start += size
        found.append(rows.new_zeros(more, weights[0].shape[0]))
        return torch.cat(found).reshape(*x.shape[:-1], weights[0].shape[0])

    return formula


def layernorm(dims: int = 1, eps: float = 1e-5, zero_centered: bool = False) -> Formula:
    over = tuple(range(-dims, 0))

    def formula(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(over, keepdim=True)
        variance = (centered * centered).mean(over, keepdim=True)
        return centered / torch.sqrt(variance + eps) * (gamma + int(zero_centered)) + beta

    return formula


def rmsnorm(dims: int = 1, eps: float = 1e-5, zero_centered: bool = False) -> Formula:
    over = tuple(range(-dims, 0))

    def formula(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        mean_square = (x * x).mean(over, keepdim=True)
        return x / torch.sqrt(mean_square + eps) * (gamma + int(zero_centered))

    return formula


def torch_layernorm(
    shape: tuple[int, ...], eps: float = 1e-5, zero_centered: bool = False
) -> Formula:
    return lambda x, gamma, beta: F.layer_norm(x, shape, gamma + int(zero_centered), beta, eps)


def torch_rmsnorm(
    shape: tuple[int, ...], eps: float = 1e-5, zero_centered: bool = False
) -> Formula:
    return lambda x, gamma: F.rms_norm(x, shape, gamma + int(zero_centered), eps)


def l2norm(eps: float = 1e-6) -> Formula:
    return lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gelu(x: torch.Tensor) -> torch.Tensor:
    # (1 + tanh(z)) / 2, without its cancellation far below 0.
    return x * torch.sigmoid(2 * 0.79788456 * (x + 0.044715 * x * x * x))


def gelu_erf(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:  # 1 + erf loses all digits below -8.3
        y: torch.Tensor = 0.5 * x * torch.special.erfc(-(0.5**0.5) * x)
        return y
    return F.gelu(x, approximate="none")


def qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * torch.relu(x)


def tanh_srelu(scale: float) -> Formula:
    return lambda x: torch.square(scale * torch.tanh(torch.relu(x) / scale))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def halves(x: torch.Tensor, interleave: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and linear part: the two halves of the last dimension, or alternating blocks."""
    columns = range(x.shape[-1])
    width = interleave or x.shape[-1] // 2
    gate = [c for c in columns if c // width % 2 == 0]
    rest = [c for c in columns if c // width % 2 == 1]
    return x[..., gate], x[..., rest]


def gated(act: Formula, interleave: int | None = None) -> Formula:
    def formula(x: torch.Tensor) -> Any:
        a, b = halves(x, interleave)
        return act(a) * b

    return formula


def situglu(beta1: float = 4.0, beta2: float = 25.0, interleave: int | None = None) -> Formula:
    def formula(x: torch.Tensor) -> torch.Tensor:
        a, b = halves(x, interleave)
        gate = beta1 * torch.tanh(a / beta1) * torch.sigmoid(a)
        return gate * (beta2 * torch.tanh(b / beta2))

    return formula


def clamped_swiglu(
    limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0, interleave: int | None = None
) -> Formula:
    def formula(x: torch.Tensor) -> torch.Tensor:
        a, b = halves(x, interleave)
        # The gradient at a bound is that of the inside, whatever torch's clamp has.
        g = torch.where(a > limit, limit, a)
        linear = torch.where(b < -limit, -limit, torch.where(b > limit, limit, b))
        return g * torch.sigmoid(alpha * g) * (linear + offset)

    return formula


def scaled(act: Formula) -> Formula:
    return lambda x, scales: act(x) * scales.unsqueeze(-1)


# -- every op with its formula -----------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One op with its arguments, its formula, and the inputs it wants.

    ``native`` is what torch itself offers for it, where that is not the formula.

    ``extra`` says what shape an extra input has: ``"same"`` as the main input,
    ``"rows"`` for its leading dimensions, None without one. ``spread`` is the
    standard deviation of the inputs. ``follows_autocast`` is False where the
    output has the dtype of the input even under torch's autocast. ``has_kink``
    is True where the derivative jumps.
    """

    name: str
    make: Callable[[torch.dtype], torch.nn.Module]
    formula: Formula
    shape: tuple[int, ...]
    extra: str | None = None
    spread: float = 1.0
    follows_autocast: bool = True
    has_kink: bool = False
    native: Formula | None = None

    @property
    def plain(self) -> Formula:
        """What a user of plain torch would write."""
        return self.native or self.formula

    def __str__(self) -> str:
        return self.name


def _plain(op: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Make an op that has no parameters."""
    return lambda dtype: op(*args, **kwargs)


def _typed(op: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Make an op whose parameters are in the dtype under test."""
    return lambda dtype: op(*args, dtype=dtype, **kwargs)


# By name of the stage: the formula in plain torch, differentiable, of scalars and interleave.
FORMULAS: dict[str, Callable[..., Formula]] = {
    "gelu": lambda scalars, width: gelu,
    "gelu_erf": lambda scalars, width: gelu_erf,
    "qgelu": lambda scalars, width: qgelu,
    "relu": lambda scalars, width: torch.relu,
    "srelu": lambda scalars, width: srelu,
    "silu": lambda scalars, width: silu,
    "tanh_srelu": lambda scalars, width: tanh_srelu(*scalars),
    "glu": lambda scalars, width: gated(torch.sigmoid, width),
    "geglu": lambda scalars, width: gated(gelu, width),
    "geglu_erf": lambda scalars, width: gated(gelu_erf, width),
    "qgeglu": lambda scalars, width: gated(qgelu, width),
    "reglu": lambda scalars, width: gated(torch.relu, width),
    "sreglu": lambda scalars, width: gated(srelu, width),
    "swiglu": lambda scalars, width: gated(silu, width),
    "situglu": lambda scalars, width: situglu(*(*scalars, width)),
    "clamped_swiglu": lambda scalars, width: clamped_swiglu(*(*scalars, width)),
}


def formula_of(stage: Stage) -> Formula:
    """The formula of an activation with these scalars and interleaving."""
    return FORMULAS[stage.name](stage.scalars, stage.interleave)


ACTIVATION_CLASSES: tuple[Any, ...] = tuple(
    cls
    for cls in map(vars(fuser).get, activation.__all__)
    if isinstance(cls, type) and issubclass(cls, fuser.Activation) and cls is not fuser.Activation
)
"""Those whose rows are not scaled."""
_KINKS = ("ReLU", "ReGLU", "ClampedSwiGLU")
_SPREADS = {"SiTUGLU": 3.0, "ClampedSwiGLU": 6.0}


def _activation(cls: Any) -> Case:
    """A class with its defaults, on odd sizes: 7 columns, or two halves of 5."""
    stage, name = cls().function, cls.__name__
    columns, spread = 10 if stage.is_gated else 7, _SPREADS.get(name, 1.0)
    formula = formula_of(stage)
    return Case(name, _plain(cls), formula, (columns,), spread=spread, has_kink=name in _KINKS)


ACTIVATIONS = (
    *map(_activation, ACTIVATION_CLASSES),
    Case("GELU-erf", _plain(fuser.GELU, approximate="none"), gelu_erf, (7,)),
    Case("GEGLU-erf", _plain(fuser.GEGLU, approximate="none"), gated(gelu_erf), (10,)),
    Case(
        "SwiGLU-interleaved-1", _plain(fuser.SwiGLU, glu_interleave_size=1), gated(silu, 1), (10,)
    ),
    Case(
        "SwiGLU-interleaved-3", _plain(fuser.SwiGLU, glu_interleave_size=3), gated(silu, 3), (18,)
    ),
    Case(
        "SiTUGLU-interleaved-2",
        _plain(fuser.SiTUGLU, beta1=1.5, beta2=2.5, glu_interleave_size=2),
        situglu(1.5, 2.5, 2),
        (12,),
        spread=3.0,
    ),
    Case(
        "ClampedSwiGLU-interleaved-2",
        _plain(
            fuser.ClampedSwiGLU, limit=1.5, alpha=0.7, glu_linear_offset=-0.5, glu_interleave_size=2
        ),
        clamped_swiglu(1.5, 0.7, -0.5, 2),
        (12,),
        spread=2.0,
        has_kink=True,
    ),
)

SCALED_ACTIVATIONS = (
    Case("ScaledSReLU", _plain(fuser.ScaledSReLU), scaled(srelu), (7,), "rows"),
    Case(
        "ScaledTanhSReLU",
        _plain(fuser.ScaledTanhSReLU, tanh_clamp_scale=1.5),
        scaled(tanh_srelu(1.5)),
        (7,),
        "rows",
        2.0,
    ),
    Case("ScaledSwiGLU", _plain(fuser.ScaledSwiGLU), scaled(gated(silu)), (10,), "rows"),
    Case(
        "ScaledSwiGLU-interleaved-3",
        _plain(fuser.ScaledSwiGLU, 3),
        scaled(gated(silu, 3)),
        (18,),
        "rows",
    ),
    Case("ScaledSiTUGLU", _plain(fuser.ScaledSiTUGLU), scaled(situglu()), (10,), "rows", 3.0),
    Case(
        "ScaledSiTUGLU-interleaved-2",
        _plain(fuser.ScaledSiTUGLU, 2, beta1=1.5, beta2=2.5),
        scaled(situglu(1.5, 2.5, 2)),
        (12,),
        "rows",
        3.0,
    ),
    Case(
        "ScaledClampedQGeGLU",
        _plain(fuser.ScaledClampedQGeGLU),
        scaled(clamped_swiglu()),
        (10,),
        "rows",
        6.0,
    ),
    Case(
        "ScaledClampedQGeGLU-interleaved-2",
        _plain(fuser.ScaledClampedQGeGLU, 2, limit=1.5, alpha=0.7, glu_linear_offset=-0.5),
        scaled(clamped_swiglu(1.5, 0.7, -0.5, 2)),
        (12,),
        "rows",
        2.0,
    ),
)

NORMS = (
    Case(
        "LayerNorm",
        _typed(fuser.LayerNorm, 7),
        layernorm(),
        (7,),
        native=torch_layernorm((7,)),
    ),
    Case(
        "LayerNorm-zero-centered",
        _typed(fuser.LayerNorm, 7, eps=0.1, zero_centered_gamma=True),
        layernorm(eps=0.1, zero_centered=True),
        (7,),
        native=torch_layernorm((7,), eps=0.1, zero_centered=True),
    ),
    Case(
        "LayerNorm-3x5",
        _typed(fuser.LayerNorm, (3, 5)),
        layernorm(2),
        (3, 5),
        native=torch_layernorm((3, 5)),
    ),
    Case("RMSNorm", _typed(fuser.RMSNorm, 7), rmsnorm(), (7,), native=torch_rmsnorm((7,))),
    Case(
        "RMSNorm-zero-centered",
        _typed(fuser.RMSNorm, (7,), eps=0.1, zero_centered_gamma=True),
        rmsnorm(eps=0.1, zero_centered=True),
        (7,),
        native=torch_rmsnorm((7,), eps=0.1, zero_centered=True),
    ),
    Case(
        "RMSNorm-3x5",
        _typed(fuser.RMSNorm, (3, 5)),
        rmsnorm(2),
        (3, 5),
        native=torch_rmsnorm((3, 5)),
    ),
    Case("L2Normalization", _plain(fuser.L2Normalization), l2norm(), (7,)),
    Case("L2Normalization-eps", _plain(fuser.L2Normalization, eps=0.5), l2norm(0.5), (7,)),
)

CASES = (
    Case("BasicLinear", _typed(fuser.BasicLinear, 7, 5), linear, (7,)),
    Case("Linear", _typed(fuser.Linear, 7, 5), linear_bias, (7,)),
    Case("Linear-no-bias", _typed(fuser.Linear, 7, 5, bias=False), linear, (7,)),
    Case("Bias", _typed(fuser.Bias, 7), bias, (7,)),
    *NORMS,
    *ACTIVATIONS,
    *SCALED_ACTIVATIONS,
    Case(
        "ConstantScale",
        _plain(fuser.ConstantScale, -1.25),
        lambda x: x * -1.25,
        (7,),
        follows_autocast=False,
    ),
    Case("Dropout-0", _plain(fuser.Dropout, 0.0), lambda x: x.clone(), (7,)),
    Case("Dropout-eval", lambda dtype: fuser.Dropout(0.5).eval(), lambda x: x.clone(), (7,)),
    Case(
        "AddExtraInput",
        _plain(fuser.AddExtraInput),
        lambda x, extra: x + extra,
        (7,),
        "same",
        follows_autocast=False,
    ),
    Case(
        "MakeExtraOutput",
        _plain(fuser.MakeExtraOutput),
        lambda x: (x.clone(), x.clone()),
        (7,),
        follows_autocast=False,
    ),
    Case(
        "Reshape",
        _plain(fuser.Reshape, (-1, 2)),
        lambda x: x.reshape(-1, 2),
        (6,),
        follows_autocast=False,
    ),
    Case("Identity", _plain(fuser.Identity), lambda x: x.clone(), (7,), follows_autocast=False),
    Case(
        "Quantize",
        _plain(fuser.Quantize, True, True),
        lambda x: x.clone(),
        (7,),
        follows_autocast=False,
    ),
)


def case(name: str) -> Case:
    """The case of that name."""
    return next(c for c in CASES if c.name == name)


# -- running both sides ------------------------------------------------------------


def random_tensor(
    shape: Sequence[int], dtype: torch.dtype, seed: int, spread: float = 1.0
) -> torch.Tensor:
    """Normal values, exactly representable in ``dtype``; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator, device="cpu") * spread
    return values.to(torch.get_default_device(), dtype)


def randomize(module: M, seed: int = 100) -> M:
    """Give every parameter normal values; returns the module."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(random_tensor(parameter.shape, parameter.dtype, seed + number))
    return module


def under(name: str) -> Callable[[str], str]:
    """For messages of ``torch.testing``: with the name of what was compared."""
    return lambda message: f"{name}: {message}"


def params_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Detached copies of the parameters, by name, in the order of the formula's arguments."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def leaf(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy in ``dtype`` that collects a gradient."""
    return tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_()


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def backward(outputs: Any, leaves: dict[str, torch.Tensor], seed: int = 50) -> dict[str, Any]:
    """Outputs and the gradient of every leaf, by name, for random output gradients.

    A tensor that got no gradient is None.
    """
    outputs = as_tuple(outputs)
    cotangents = [
        random_tensor(y.shape, torch.bfloat16, seed + k).to(y) for k, y in enumerate(outputs)
    ]
    wanted = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
    torch.autograd.backward([y for y, _ in wanted], [g for _, g in wanted])
    results = {f"output {k}": y.detach() for k, y in enumerate(outputs)}
    return results | {f"gradient of {name}": tensor.grad for name, tensor in leaves.items()}


def run_formula(
    formula: Formula, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    """Outputs and every gradient of ``formula(*tensors)``, computed in ``dtype``."""
    leaves = {name: leaf(tensor, dtype) for name, tensor in tensors.items()}
    return backward(formula(*leaves.values()), leaves)


def run_autocast_formula(
    formula: Formula, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    """As :func:`run_formula`, with leaves in their own dtype and arithmetic in ``dtype``."""
    leaves = {name: leaf(tensor) for name, tensor in tensors.items()}
    return backward(formula(*(tensor.to(dtype) for tensor in leaves.values())), leaves)


def run_module(
    module: torch.nn.Module,
    x: torch.Tensor,
    extras: Sequence[torch.Tensor] = (),
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """Outputs and every gradient of ``module(x, *extras)``, parameters included.

    ``x`` and ``extras`` collect gradients if and only if they require them.
    Only the forward runs under torch's autocast, as torch wants it.
    """
    module.zero_grad(set_to_none=True)
    leaves = {"x": x, **{f"extra {k}": extra for k, extra in enumerate(extras)}}
    leaves |= dict(module.named_parameters())
    for tensor in leaves.values():
        tensor.grad = None
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        outputs = module(x, *extras)
    return backward(outputs, leaves)


# -- the rule ----------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """What fuser, plain torch and fp64 made of the same random tensors, by name.

    ``arithmetic`` is the dtype of the arithmetic where results are cast on.
    """

    actual: dict[str, Any]
    plain: dict[str, Any]
    exact: dict[str, Any]
    arithmetic: torch.dtype | None = None


def worst_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """``max |actual - exact|``; 0 for empty tensors."""
    if not exact.numel():
        return 0.0
    return float((actual.double() - exact.double()).abs().max())


def one_ulp(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """One unit in the last place of the largest value: ``eps`` of it; 0 for empty tensors."""
    return torch.finfo(dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0


def outputs_of(draw: Draw) -> Draw:
    """The same without the gradients."""
    outputs = (
        {name: value for name, value in results.items() if name.startswith("output")}
        for results in (draw.actual, draw.plain, draw.exact)
    )
    return Draw(*(*outputs, draw.arithmetic))


def assert_no_worse_than_torch(*draws: Draw) -> None:
    """At most twice as wrong as plain torch in the same dtype, measured against fp64.

    Holds for every name, of the worst error in all draws: a single small tensor
    can be right by luck. For the same reason one unit in the last place of the
    largest value, the roundings of one product and one sum, is always allowed.
    Shapes and dtypes must be plain torch's, and so must be None.
    """
    for name in draws[0].exact:
        errors, allowed = [], []
        for draw in draws:
            actual, plain, exact = draw.actual[name], draw.plain[name], draw.exact[name]
            assert (actual is None) == (plain is None), f"{name} is {actual}"
            if actual is None:
                continue
            assert (actual.shape, actual.dtype) == (plain.shape, plain.dtype), name
            errors.append(worst_error(actual, exact))
            allowed.append(
                2 * worst_error(plain, exact) + one_ulp(exact, draw.arithmetic or plain.dtype)
            )
        assert max(errors, default=0.0) <= max(allowed, default=0.0), (
            f"{name} is off by {max(errors):.3g}; allowed is {max(allowed):.3g}"
        )
    assert all(set(d.actual) == set(d.plain) == set(d.exact) for d in draws)
