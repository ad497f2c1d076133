"""Recognition of linears, norms and activations by the values that they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fuser import basic_ops
from fuser.conversion.allowed import enters_contexts
from fuser.conversion.held_objects import tensors_of
from fuser.conversion.modules import (
    attributes_of,
    bare,
    forward_of,
    original_class,
    written_attributes,
)
from fuser.conversion.parts import (
    ACTIVATIONS,
    ActivationPart,
    Function,
    KnownActivation,
    LinearPart,
    NormPart,
)
from fuser.op import FusibleOperation, HiddenOps

SMALLEST_LINEAR = 32
"""A linear alone with fewer inputs or outputs stays torch's: a router or a score."""


EPS_OF_FP32 = torch.finfo(torch.float32).eps

NEVER_CALLED = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
"""A linear of which nn.MultiheadAttention reads the weight."""


def _probe() -> torch.Tensor:
    """Inputs of an activation: a dense middle, and values that a clamp would change."""
    large = torch.logspace(1, 30, 59, dtype=torch.float32)
    return torch.cat([torch.linspace(-12, 12, 4802), large, -large])


def activation_like(function: Function) -> KnownActivation | None:
    """The activation with the values and gradients of ``function``, on a CPU in fp32; or None."""
    x = _probe()
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))
    y, grad = _tried(function, x)
    # An activation is a function of each value alone, of any shape.
    permuted, _ = _tried(function, x[order].reshape(3, -1))
    if y is None or permuted is None or not _is_like(permuted, y[order].reshape(3, -1)):
        return None
    for known in ACTIVATIONS:
        expected, expected_grad = _tried(known.function, x)
        if _is_like(y, expected) and _is_like(grad, expected_grad, loose=True):
            return known
    return None


def is_identity(function: Function) -> bool:
    """Whether a function returns what it gets, and its gradient."""
    x = _probe()
    y, grad = _tried(function, x)
    return y is not None and grad is not None and bool((y == x).all() and (grad == 1).all())


def _tried(
    function: Function, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """The values of a function and their derivatives; None if it is none of such values."""
    leaf = x.clone().requires_grad_()
    try:
        with torch.enable_grad():
            given = leaf * 1  # a function may write into it
            y = function(given)
            (grad,) = torch.autograd.grad(y.sum(), leaf)
    except Exception:
        return None, None
    if not isinstance(y, torch.Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        return None, None
    return y.detach(), grad


def _is_like(y: torch.Tensor | None, expected: torch.Tensor | None, *, loose: bool = False) -> bool:
    if y is None or expected is None:
        return False
    if loose:  # derivatives of formulas that overflow
        inner = expected.isfinite() & y.isfinite()
        return bool(inner.float().mean() > 0.9) and torch.allclose(
            y[inner], expected[inner], rtol=1e-3, atol=1e-3
        )
    return torch.allclose(y, expected, rtol=1e-5, atol=2e-6, equal_nan=True)


def activation_part(known: KnownActivation, *, is_gated: bool) -> ActivationPart | None:
    """The part of an activation, or of one that is multiplied with a second half."""
    op = known.gated_op if is_gated else known.op
    if not op or not hasattr(basic_ops, op):
        return None
    return ActivationPart(op, known.options)


def is_fuser(module: torch.nn.Module) -> bool:
    """Whether a module is fuser's own, and needs no conversion."""
    return isinstance(module, (FusibleOperation, HiddenOps))


def linear_part(module: torch.nn.Module, name: str) -> LinearPart | None:
    """The part of a module that is a linear, also with weights ``[in, out]``; else None."""
    weight = _own_parameters(module, 2)
    if weight is None or isinstance(module, NEVER_CALLED):
        return None
    is_transposed = False if _has_linears_forward(module) else _is_transposed(module)
    if is_transposed is None:
        return None
    rows, columns = weight.shape
    shape = (columns, rows) if is_transposed else (rows, columns)
    return LinearPart((name,), shape, module._parameters.get("bias") is not None, is_transposed)


def _has_linears_forward(module: torch.nn.Module) -> bool:
    """Whether a module is torch's linear, or a subclass that calls as it does: no need to try."""
    cls: Any = original_class(module)
    plain = torch.nn.Linear
    return (cls.forward, cls.__call__) == (plain.forward, plain.__call__)


def _is_transposed(module: torch.nn.Module) -> bool | None:
    """Whether a linear's weights are ``[in, out]``; None if it is no linear."""
    code = getattr(forward_of(module), "__code__", None)
    if isinstance(module, torch.nn.Embedding) or (code is not None and enters_contexts(code)):
        return None
    generator = torch.Generator().manual_seed(0)
    rows, columns = module._parameters["weight"].shape  # type: ignore[union-attr]
    for is_transposed in (False, True):
        weight = torch.randn(rows, columns, generator=generator)
        values = {"weight": weight}
        if module._parameters.get("bias") is not None:
            bias = torch.randn(columns if is_transposed else rows, generator=generator)
            values["bias"] = bias
        x = torch.randn(3, 2, rows if is_transposed else columns, generator=generator)
        x[1] *= 1e4  # which a clamp would change

        def linear(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
            return F.linear(x, weight.t() if is_transposed else weight, *bias)  # noqa: B023

        if are_close(_called(module, values, x), linear(x, *values.values())):
            return is_transposed if _is_trained_as(module, values, x, linear) else None
    return None


def _is_trained_as(
    module: torch.nn.Module,
    values: dict[str, torch.Tensor],
    x: torch.Tensor,
    function: Callable[..., torch.Tensor],
) -> bool:
    """Whether a module has the gradients of ``function``, and gives 16 bits for 16 bits.

    ``function`` gets the input and the parameters.
    """
    tried = bare(module, values).requires_grad_()
    leaves = [t.clone().requires_grad_() for t in (x, *values.values())]
    weights = torch.randn(x.shape[0], generator=torch.Generator().manual_seed(1))
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            y = tried(leaves[0])
            expected = function(*leaves)
            parts = weights.reshape(-1, *[1] * (y.dim() - 1)) / y.detach().abs().amax().clamp(1e-30)
            of = [leaves[0], *(tried.get_parameter(name) for name in values)]
            grads = torch.autograd.grad((y * parts).sum(), of, allow_unused=True)
            others = torch.autograd.grad((expected * parts).sum(), leaves)
    except Exception:
        return False
    small = {name: value.bfloat16() for name, value in values.items()}
    in_16_bits = _called(module, small, x.bfloat16())
    is_rounded = in_16_bits is not None and in_16_bits.dtype is torch.bfloat16
    return is_rounded and all(
        grad is not None
        and bool(torch.isclose(grad, other, rtol=1e-3, atol=1e-4 * float(other.abs().max())).all())
        for grad, other in zip(grads, others, strict=True)
    )


def norm_part(module: torch.nn.Module, name: str) -> NormPart | None:
    """The part of a module that is a layer norm or an RMS norm over its last dimension."""
    weight = _own_parameters(module, 1)
    if weight is None:
        return None
    has_bias = module._parameters.get("bias") is not None
    (size,) = weight.shape
    generator = torch.Generator().manual_seed(0)
    values = {"weight": torch.randn(size, generator=generator)}
    if has_bias:
        values["bias"] = torch.randn(size, generator=generator)
    # Rows so small that eps shows, and so large that a clamp would.
    x = torch.randn(12, size, generator=generator) * torch.logspace(-5, 4, 12)[:, None] + 1e-4
    y = _called(module, values, x)
    # Over the last dimension, of however many there are.
    deeper = _called(module, values, x.reshape(3, 4, size))
    if y is None or deeper is None or not _rows_are_close(deeper.reshape(y.shape), y):
        return None
    floats = {v for v in module.__dict__.values() if isinstance(v, float) and 0 < v < 1}
    if module.__dict__.get("eps", 0.0) is None and _has_eps_of_fp32(module, values, x):
        floats.add(EPS_OF_FP32)
    for eps in sorted(floats):
        for is_zero_centered in (False,) if has_bias else (False, True):

            def norm(x: Any, weight: Any, bias: Any = None) -> Any:
                if has_bias:
                    return F.layer_norm(x, (size,), weight, bias, eps)  # noqa: B023
                return F.rms_norm(x, (size,), eps=eps) * (weight + is_zero_centered)  # noqa: B023

            if _rows_are_close(y, norm(x, *values.values())):
                op = "LayerNorm" if has_bias else "RMSNorm"
                part = NormPart(name, op, size, eps, is_zero_centered)
                return part if _is_trained_as(module, values, x, norm) else None
    return None


def _has_eps_of_fp32(
    module: torch.nn.Module, values: dict[str, torch.Tensor], x: torch.Tensor
) -> bool:
    """Whether an RMS norm without an eps takes that of fp32 in 16 bits too.

    torch's does, on a CPU and on a GPU; its documentation names that of the dtype of the input.
    """
    values, x = {name: value.bfloat16() for name, value in values.items()}, x.bfloat16()
    expected = F.rms_norm(x, x.shape[-1:], values["weight"], EPS_OF_FP32)
    y = _called(module, values, x)
    return y is not None and torch.equal(y, expected)


def _own_parameters(module: torch.nn.Module, dim: int) -> torch.Tensor | None:
    """The weight of a module with a weight of ``dim`` dimensions and no more than a bias."""
    if is_fuser(module) or module._modules or tensors_of(module):
        return None
    present = {name: p for name, p in module._parameters.items() if p is not None}
    weight = present.get("weight")
    if weight is None or weight.dim() != dim or set(present) - {"weight", "bias"}:
        return None
    return weight


def _called(
    module: torch.nn.Module, values: dict[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor | None:
    """What a module's forward returns for ``x`` with other parameters; None if it raises."""
    results = []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for is_training in (False, True):
                tried = bare(module, values).train(is_training)
                before = attributes_of(tried)
                results.append(tried(x.clone()))
                if attributes_of(tried) != before or written_attributes(tried):
                    return None  # it keeps something
    except Exception:
        return None
    y, in_training = results
    if not isinstance(y, torch.Tensor) or not isinstance(in_training, torch.Tensor):
        return None
    return y if torch.equal(y, in_training) else None


def are_close(y: object, expected: object) -> bool:
    """Whether two results are tensors alike, within 1e-5 of the largest value."""
    if not isinstance(y, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return False
    if (y.shape, y.dtype) != (expected.shape, expected.dtype):
        return False
    return torch.allclose(y, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def _rows_are_close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether each row is, to the largest value of the row."""
    if y.shape != expected.shape or y.dtype != expected.dtype:
        return False
    largest = expected.abs().amax(-1, keepdim=True)
    return bool(((y - expected).abs() <= 2e-6 * largest).all())
