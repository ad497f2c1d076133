"""Layers for people who want a layer: a norm, linears and an activation as one pipeline."""

from __future__ import annotations

from typing import Any

import torch

from fuser import basic_ops, fused_ops
from fuser.errors import InputError
from fuser.op import FusibleOperation
from fuser.plan import FusionPlan
from fuser.sequential import Sequential

NORMALIZATIONS = {"LayerNorm": basic_ops.LayerNorm, "RMSNorm": basic_ops.RMSNorm}
ACTIVATIONS = {
    cls.__name__.lower(): cls
    for cls in vars(basic_ops).values()
    if isinstance(cls, type)
    and issubclass(cls, basic_ops.Activation)
    and cls is not basic_ops.Activation
}


class _Layer(torch.nn.Module):
    """A pipeline behind a name: ``ops`` holds it."""

    def __init__(self, *ops: FusibleOperation) -> None:
        super().__init__()
        self.ops = Sequential(*ops)

    def forward(
        self, input: torch.Tensor, *, is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        """Run the layer on ``[..., in_features]``.

        ``is_first_microbatch`` is as in ``BasicLinear``: True quantizes weights
        and keeps them, False takes the kept ones, None quantizes at every call.
        """
        kwargs = None
        if is_first_microbatch is not None:
            linears = [op for op in self.ops if isinstance(op, fused_ops.Linear)]
            kwargs = {op: {"is_first_microbatch": is_first_microbatch} for op in linears}
        output = self.ops(input, op_kwargs=kwargs)
        assert isinstance(output, torch.Tensor)
        return output

    def plan(self, input: torch.Tensor, *, training: bool = True) -> FusionPlan:
        """What a call with such an input would run; as ``Sequential.plan``."""
        return self.ops.plan(input, training=training)


class Linear(_Layer):
    """``y = x @ weight.T + bias``; arguments as in ``fuser.Linear``."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(fused_ops.Linear(in_features, out_features, **options))


class LayerNormLinear(_Layer):
    """A norm and a linear.

    Parameters
    ----------
    in_features, out_features
        Last dimension of the input and of the output.
    eps
        Of the norm.
    bias
        Whether the linear has one.
    normalization
        ``"LayerNorm"`` or ``"RMSNorm"``.
    zero_centered_gamma
        The norm's gain is ``1 + gamma``.
    device, dtype
        Of the parameters.

    Raises
    ------
    InputError
        If the normalization is another.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        norm = _norm(normalization)
        super().__init__(
            norm(
                in_features,
                eps=eps,
                device=device,
                dtype=dtype,
                zero_centered_gamma=zero_centered_gamma,
            ),
            fused_ops.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype),
        )


class LayerNormMLP(_Layer):
    """A norm, a linear, an activation and a linear back: a transformer's feed-forward block.

    Parameters
    ----------
    hidden_size
        Last dimension of the input and of the output.
    ffn_hidden_size
        Last dimension of the activation's output; a gated activation's input
        is twice as wide.
    eps, bias, normalization, zero_centered_gamma, device, dtype
        As in :class:`LayerNormLinear`.
    activation
        The lower-case name of an activation op, such as ``"gelu"`` or ``"swiglu"``.

    Raises
    ------
    InputError
        If the normalization or the activation is none that there is.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        norm = _norm(normalization)
        if activation not in ACTIVATIONS:
            raise InputError(
                f"activation is {activation!r}; it is one of {', '.join(sorted(ACTIVATIONS))}."
            )
        act = ACTIVATIONS[activation]()
        width = ffn_hidden_size * (2 if act.functor.is_gated else 1)
        super().__init__(
            norm(
                hidden_size,
                eps=eps,
                device=device,
                dtype=dtype,
                zero_centered_gamma=zero_centered_gamma,
            ),
            fused_ops.Linear(hidden_size, width, bias=bias, device=device, dtype=dtype),
            act,
            fused_ops.Linear(ffn_hidden_size, hidden_size, bias=bias, device=device, dtype=dtype),
        )


def _norm(name: str) -> type[basic_ops.LayerNorm] | type[basic_ops.RMSNorm]:
    if name not in NORMALIZATIONS:
        raise InputError(f"normalization is {name!r}; it is {' or '.join(NORMALIZATIONS)}.")
    return NORMALIZATIONS[name]  # type: ignore[return-value]
