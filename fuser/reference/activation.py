"""Activations and gated linear units in plain torch: values and derivatives.

All functions compute in fp32 and round once, to the dtype of the input.
The gate of a gated unit is the first half of the last dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fuser.chain import STAGES, Stage
from fuser.torch_private import gelu_backward, sigmoid_backward, silu_backward, threshold_backward

QGELU_ALPHA = 1.702
# SwiGLU of 2048 x 5632 bf16 on two cores takes half the time with 2**17 to 2**19 elements a step.
CACHED_ELEMENTS = 2**18


@dataclass(frozen=True)
class _Function:
    """f(x), and backward(dy, x) = dy * f'(x); fp32 in, fp32 out.

    A gated one is f(gate, linear), and backward has both gradients, one after the other.
    """

    forward: Callable[..., torch.Tensor]
    backward: Callable[..., Any]


def _srelu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return dy * (2 * torch.relu(x))


def _qgelu_backward(dy: torch.Tensor, x: torch.Tensor, alpha: float) -> torch.Tensor:
    s = torch.sigmoid(alpha * x)
    return dy * (s + alpha * x * s * (1 - s))


def _qgelu(alpha: float) -> _Function:
    return _Function(
        lambda x: x * torch.sigmoid(alpha * x), lambda dy, x: _qgelu_backward(dy, x, alpha)
    )


_GELU, _GELU_ERF = (
    _Function(
        functools.partial(F.gelu, approximate=form),
        functools.partial(gelu_backward, approximate=form),
    )
    for form in ("tanh", "none")
)
_QGELU = _qgelu(QGELU_ALPHA)
_RELU = _Function(torch.relu, lambda dy, x: threshold_backward(dy, x, 0))
_SILU = _Function(F.silu, silu_backward)
_SRELU = _Function(lambda x: torch.relu(x).square(), _srelu_backward)
_SIGMOID = _Function(torch.sigmoid, lambda dy, x: sigmoid_backward(dy, torch.sigmoid(x)))
_IDENTITY = _Function(lambda x: x, lambda dy, x: dy)


def _soft_clipped_silu(beta: float) -> _Function:
    """beta tanh(x / beta) sigmoid(x)."""

    def backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        t, s = torch.tanh(x / beta), torch.sigmoid(x)
        return dy * ((1 - t * t) * s + beta * t * s * (1 - s))

    return _Function(lambda x: beta * torch.tanh(x / beta) * torch.sigmoid(x), backward)


def _soft_clip(beta: float) -> _Function:
    """beta tanh(x / beta)."""
    return _Function(
        lambda x: beta * torch.tanh(x / beta),
        lambda dy, x: dy * (1 - torch.tanh(x / beta).square()),
    )


def _clamped_gate(limit: float, alpha: float) -> _Function:
    """g sigmoid(alpha g) with g = min(x, limit); the gradient is 0 above the limit.

    Releases of torch differ in the gradient of ``clamp`` at its bound; here it is that of the
    inside, as in Transformer Engine's kernels.
    """
    return _Function(
        lambda x: _qgelu(alpha).forward(torch.where(x > limit, limit, x)),
        lambda dy, x: torch.where(x <= limit, _qgelu_backward(dy, x, alpha), 0.0),
    )


def _clamped_linear(limit: float, offset: float) -> _Function:
    """clamp(x, -limit, limit) + offset; the gradient is 0 beyond the limits."""
    return _Function(
        lambda x: torch.where(x < -limit, -limit, torch.where(x > limit, limit, x)) + offset,
        lambda dy, x: torch.where(x.abs() <= limit, dy, 0.0),
    )


def _soft_clipped_srelu(beta: float) -> _Function:
    """(beta tanh(max(x, 0) / beta))^2."""

    def backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        t = torch.tanh(torch.relu(x) / beta)
        return dy * (2 * beta * t * (1 - t * t))

    return _Function(lambda x: (beta * torch.tanh(torch.relu(x) / beta)).square(), backward)


# name -> the function, given the scalars
_UNARY: dict[str, Callable[..., _Function]] = {
    "gelu": lambda: _GELU,
    "gelu_erf": lambda: _GELU_ERF,
    "qgelu": lambda: _QGELU,
    "relu": lambda: _RELU,
    "srelu": lambda: _SRELU,
    "silu": lambda: _SILU,
    "tanh_srelu": _soft_clipped_srelu,
}

# name -> (function of the gate, function of the linear part), given the scalars
_GATED: dict[str, Callable[..., tuple[_Function, _Function]]] = {
    "glu": lambda: (_SIGMOID, _IDENTITY),
    "geglu": lambda: (_GELU, _IDENTITY),
    "geglu_erf": lambda: (_GELU_ERF, _IDENTITY),
    "qgeglu": lambda: (_QGELU, _IDENTITY),
    "reglu": lambda: (_RELU, _IDENTITY),
    "sreglu": lambda: (_SRELU, _IDENTITY),
    "swiglu": lambda: (_SILU, _IDENTITY),
    "situglu": lambda beta1, beta2: (_soft_clipped_silu(beta1), _soft_clip(beta2)),
    "clamped_swiglu": lambda limit, alpha, offset: (
        _clamped_gate(limit, alpha),
        _clamped_linear(limit, offset),
    ),
}


def _function_of(stage: Stage) -> _Function:
    """The function of a stage, of the library's or of one that a user has registered."""
    traits, scalars = STAGES[stage.name], stage.scalars
    if traits.forward is not None and traits.backward is not None:
        forward, backward = traits.forward, traits.backward
        return _Function(
            lambda *parts: forward(*parts, *scalars), lambda dy, *x: backward(dy, *x, *scalars)
        )
    if not stage.is_gated:
        return _UNARY[stage.name](*scalars)
    f, g = _GATED[stage.name](*scalars)

    def gated_backward(
        dy: torch.Tensor, gate: torch.Tensor, linear: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        yield f.backward(dy * g.forward(linear), gate)
        yield g.backward(dy * f.forward(gate), linear)

    def gated(gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        return f.forward(gate) * g.forward(linear)

    return _Function(gated, gated_backward)


# Functions that torch runs in one kernel in any dtype, computing in fp32.
NATIVE = {"gelu": _GELU, "gelu_erf": _GELU_ERF, "relu": _RELU, "silu": _SILU}


def activation(stage: Stage, x: torch.Tensor) -> torch.Tensor:
    """``stage`` of ``x``; shape ``[..., n]``, or ``[..., n / 2]`` if gated; dtype of x."""
    native = NATIVE.get(stage.name)
    if native is not None:
        return native.forward(x)
    features = stage.output_features(x.shape[-1])
    return _rounded(lambda x: _forward_fp32(stage, x), features, x)


def activation_backward(stage: Stage, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of the input ``x``, in x's shape and dtype, from that of the output."""
    native = NATIVE.get(stage.name)
    if native is not None and dy.dtype is x.dtype:
        grad: torch.Tensor = native.backward(dy, x)
        return grad
    stage.output_features(x.shape[-1])
    return _rounded(lambda x, dy: _backward_fp32(stage, dy.float(), x), x.shape[-1], x, dy)


def scaled_activation(stage: Stage, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``stage(x) * scales[..., None]``: one factor a row; one rounding, to x's dtype."""
    return (_forward_fp32(stage, x) * scales.float().unsqueeze(-1)).to(x.dtype)


def scaled_activation_backward(
    stage: Stage,
    dy: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor,
    *,
    wants_dscales: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``x`` and of ``scales``, each in its own shape and dtype.

    The gradient of ``scales`` is None if it is not needed.
    """
    dy = dy.float()
    dscales = None
    if wants_dscales:
        dscales = (dy * _forward_fp32(stage, x)).sum(-1).to(scales.dtype)
    dx = _backward_fp32(stage, dy * scales.float().unsqueeze(-1), x).to(x.dtype)
    return dx, dscales


def _rounded(
    function: Callable[..., torch.Tensor], features: int, x: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """``function`` of rows, which returns rows of ``features`` in fp32, rounded to x's dtype.

    On a CPU large tensors are computed some rows at a time: all fp32 values of one step would not
    stay in the caches.
    """
    tensors = (x, *others)
    is_split = (
        x.device.type == "cpu"
        and x.dtype is not torch.float32
        and x.numel() > CACHED_ELEMENTS
        and all(tensor.is_contiguous() for tensor in tensors)
        and not torch.compiler.is_compiling()
    )
    if not is_split:
        return function(*tensors).to(x.dtype)
    rows = [tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    y = torch.empty(rows[0].shape[0], features, dtype=x.dtype)
    step = max(1, CACHED_ELEMENTS // x.shape[-1])
    for begin in range(0, len(y), step):
        some = slice(begin, begin + step)
        y[some] = function(*(tensor[some] for tensor in rows))
    return y.view(*x.shape[:-1], features)


def step_by_step(stage: Stage, x: torch.Tensor) -> torch.Tensor:
    """``stage`` of ``x`` as a script of plain torch has it: every step in the dtype of x."""
    gate_and_linear = x.chunk(2, -1) if stage.is_gated and stage.interleave is None else None
    return _forward(stage, x, gate_and_linear)


def _forward_fp32(stage: Stage, x: torch.Tensor) -> torch.Tensor:
    return _forward(stage, x.float())


def _forward(
    stage: Stage, x: torch.Tensor, halves: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    function = _function_of(stage)
    if not stage.is_gated:
        return function.forward(x)
    y = function.forward(*(halves or _halves(stage, x)))
    return y if stage.interleave is None else y.flatten(-2)


def _backward_fp32(stage: Stage, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x, function = x.float(), _function_of(stage)
    if not stage.is_gated:
        grad: torch.Tensor = function.backward(dy, x)
        return grad
    # Both gradients are in one tensor: concatenating two would move them again.
    dx = dy.new_empty(x.shape)  # like dy, which may be a batch of gradients
    halves = _halves(stage, x)
    grads = function.backward(dy.reshape(halves[0].shape), *halves)
    for half, grad_of_half in zip(_halves(stage, dx), grads, strict=True):
        half.copy_(grad_of_half)
    return dx


def _halves(stage: Stage, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and linear part of ``x``: ``[..., n / 2]``, or blocks ``[..., n / (2 w), w]``.

    Both are views if ``x`` is contiguous.
    """
    features = stage.output_features(x.shape[-1])
    width = stage.interleave
    if width is None:
        return x[..., :features], x[..., features:]
    blocks = x.reshape(*x.shape[:-1], features // width, 2, width)
    return blocks[..., 0, :], blocks[..., 1, :]
