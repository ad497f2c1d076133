"""Linear, LayerNormLinear and LayerNormMLP: a norm, linears and an activation as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from fuser import basic_ops, fused_ops
from fuser.basic_ops.activation import ActivationName
from fuser.errors import InputError
from fuser.modules.arguments import LayerOptions, linear_arguments, one_of_two
from fuser.modules.layer import InitMethod, InputLayer, Place
from fuser.modules.parallel import check_mode, mark_norm, modes_of_mlp, refuse_row, without_size
from fuser.op import BasicOperation

if TYPE_CHECKING:
    from typing_extensions import Unpack

Normalization = Literal["LayerNorm", "RMSNorm"]
NORMALIZATIONS: dict[str, Callable[..., BasicOperation]] = {
    "LayerNorm": basic_ops.LayerNorm,
    "RMSNorm": basic_ops.RMSNorm,
}
ACTIVATIONS = {
    cls.__name__.lower(): cls
    for cls in vars(basic_ops).values()
    if isinstance(cls, type)
    and issubclass(cls, basic_ops.Activation)
    and cls is not basic_ops.Activation
} | {"clamped_swiglu": basic_ops.ClampedSwiGLU}


class Linear(InputLayer):
    """``y = x @ weight.T + bias``.

    Parameters
    ----------
    in_features, out_features
        Last dimension of the input and of the output.
    bias
        Whether there is one.
    init_method
        Called with the weight to initialise it; None initialises as
        ``torch.nn.Linear`` does.
    params_dtype, dtype
        Of the parameters; two names of one argument.
    device
        Of the parameters.
    parallel_mode, tp_group, sequence_parallel, get_rng_state_tracker, fuse_wgrad_accumulation
        ``tensor_parallel_mode``, ``tensor_parallel_group``, ``sequence_parallel``,
        ``rng_state_tracker_function`` and ``accumulate_into_main_grad`` of
        ``BasicLinear``; these names are accepted too.
    name
        A name for a custom recipe's factory.
    options
        Arguments of other libraries' layers of this name, with the values that
        turn them off.

    Raises
    ------
    InputError
        If such an argument is turned on.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        taken = linear_arguments(type(self), without_size("Linear", options))
        check_mode("Linear", taken)
        factory = _factory(device, params_dtype, dtype)
        linear = _linear(in_features, out_features, bias, name or "", {**factory, **taken})
        places = _linear_places(linear)
        super().__init__(linear, places=places, init_methods={"weight": init_method})
        self.in_features, self.out_features = in_features, out_features

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}{self._parallel_text()}"


class LayerNormLinear(InputLayer):
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
    init_method
        Called with the linear's weight to initialise it; None initialises as
        ``torch.nn.Linear`` does.
    params_dtype, dtype
        Of the parameters; two names of one argument.
    device
        Of the parameters.
    name
        A name for a custom recipe's factory.
    options
        Arguments of parallel linears and of other libraries, as in :class:`Linear`.

    Raises
    ------
    InputError
        If the normalization has another name, or as :class:`Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        factory = _factory(device, params_dtype, dtype)
        taken = linear_arguments(type(self), without_size("LayerNormLinear", options))
        check_mode("LayerNormLinear", taken)
        refuse_row("LayerNormLinear", taken)
        norm = _norm(
            normalization, in_features, eps=eps, zero_centered_gamma=zero_centered_gamma, **factory
        )
        linear = _linear(in_features, out_features, bias, name or "", {**factory, **taken})
        mark_norm(norm, linear)
        places = {**_norm_places(norm), **_linear_places(linear)}
        super().__init__(norm, linear, places=places, init_methods={"weight": init_method})
        self.in_features, self.out_features = in_features, out_features
        self.normalization, self.eps = normalization, eps
        self.zero_centered_gamma = zero_centered_gamma

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"normalization={self.normalization!r}{self._parallel_text()}"
        )


class LayerNormMLP(InputLayer):
    """A norm, a linear, an activation and a linear back: a transformer's feed-forward block.

    Parameters
    ----------
    hidden_size
        Last dimension of the input and of the output.
    ffn_hidden_size
        Last dimension of the activation's output; a gated activation's input
        is twice as wide, and its first half is the gate.
    eps
        Of the norm.
    bias
        Whether the linears have one.
    normalization
        ``"LayerNorm"`` or ``"RMSNorm"``.
    zero_centered_gamma
        The norm's gain is ``1 + gamma``.
    params_dtype, dtype
        Of the parameters; two names of one argument.
    device
        Of the parameters.
    activation
        The lower-case name of an activation op, such as ``"gelu"``, the tanh form, or ``"swiglu"``.
    activation_params
        Keyword arguments of that op: ``{"approximate": "none"}`` for the erf form of GELU or GEGLU.
    init_method, output_layer_init_method
        Called with the weight of the first and of the second linear.
    name
        A name for a custom recipe's factory, which gets it with ``.fc1`` and ``.fc2``.
    options
        As in :class:`Linear`, and ``set_parallel_mode``: the first linear is column parallel and
        the second row parallel, over ``tp_group``. Each rank has ``ffn_hidden_size / ranks``
        features between them; of a gated activation, these of the gate and of the other half.

    Raises
    ------
    InputError
        If there is no such normalization or activation, or as :class:`Linear`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        activation: ActivationName = "gelu",
        activation_params: dict[str, Any] | None = None,
        zero_centered_gamma: bool = False,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        if activation not in ACTIVATIONS:
            raise InputError(
                f"activation is {activation!r}; it is one of {', '.join(sorted(ACTIVATIONS))}."
            )
        factory = _factory(device, params_dtype, dtype)
        others = without_size("LayerNormMLP", options)
        is_parallel = others.pop("set_parallel_mode", False)
        taken = {**factory, **linear_arguments(type(self), others)}
        of_fc1, of_fc2 = modes_of_mlp(
            "LayerNormMLP", taken, ffn_hidden_size, is_parallel=is_parallel
        )
        norm = _norm(
            normalization, hidden_size, eps=eps, zero_centered_gamma=zero_centered_gamma, **factory
        )
        act = ACTIVATIONS[activation](**(activation_params or {}))
        width = ffn_hidden_size * (2 if act.function.is_gated else 1)
        first, second = (f"{name}.{part}" if name else part for part in ("fc1", "fc2"))
        fc1 = _linear(hidden_size, width, bias, first, of_fc1)
        fc2 = _linear(ffn_hidden_size, hidden_size, bias, second, of_fc2)
        mark_norm(norm, fc1)
        of_linears = {**_linear_places(fc1, "fc1_"), **_linear_places(fc2, "fc2_")}
        init_methods = {"fc1_weight": init_method, "fc2_weight": output_layer_init_method}
        places = {**_norm_places(norm), **of_linears}
        super().__init__(norm, fc1, act, fc2, places=places, init_methods=init_methods)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.normalization, self.activation, self.eps = normalization, activation, eps
        self.zero_centered_gamma = zero_centered_gamma

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"normalization={self.normalization!r}, activation={self.activation!r}"
            f"{self._parallel_text()}"
        )


# -- ops ------------------------------------------------------------------------------


def _factory(device: object, params_dtype: object, dtype: object) -> dict[str, Any]:
    return {"device": device, "dtype": one_of_two("params_dtype", params_dtype, "dtype", dtype)}


def _linear(
    in_features: int, out_features: int, bias: bool, name: str, options: dict[str, Any]
) -> fused_ops.Linear:
    linear = fused_ops.Linear(in_features, out_features, bias=bias, **options)
    linear.members[0].name = name
    return linear


def _norm(name: str, size: int, **options: Any) -> BasicOperation:
    if name not in NORMALIZATIONS:
        raise InputError(f"normalization is {name!r}; it is {' or '.join(NORMALIZATIONS)}.")
    return NORMALIZATIONS[name](size, **options)


def _norm_places(norm: BasicOperation) -> dict[str, Place | None]:
    has_bias = isinstance(norm, basic_ops.LayerNorm)
    places: dict[str, Place | None] = {"layer_norm_weight": (norm, "weight")}
    return {**places, **({"layer_norm_bias": (norm, "bias")} if has_bias else {})}


def _linear_places(linear: fused_ops.Linear, prefix: str = "") -> dict[str, Place | None]:
    bias = None if linear.bias_op is None else (linear.bias_op, "bias")
    return {f"{prefix}weight": (linear.members[0], "weight"), f"{prefix}bias": bias}
