"""Layers: a norm, linears and an activation as one pipeline in one module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuser import basic_ops, fused_ops
from fuser.basic_ops.collectives import CollectiveOperation
from fuser.errors import InputError, InputTypeError, StateError
from fuser.modules.parallel import mark_norm, modes_of_mlp, refuse_row, without_size
from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.plan.plan import FusionPlan
from fuser.sequential import Sequential
from fuser.tensors import QuantizedTensor

NORMALIZATIONS: dict[str, Any] = {"LayerNorm": basic_ops.LayerNorm, "RMSNorm": basic_ops.RMSNorm}
ACTIVATIONS = {
    cls.__name__.lower(): cls
    for cls in vars(basic_ops).values()
    if isinstance(cls, type)
    and issubclass(cls, basic_ops.Activation)
    and cls is not basic_ops.Activation
} | {"clamped_swiglu": basic_ops.ClampedSwiGLU}

# More arguments of other libraries' layers: the value that turns each off, and the reason why
# fuser accepts only that value.
_SHARDING = "a layer runs on one rank"
_OVERLAP = "communication is not overlapped with GEMMs"
OFF: dict[str, tuple[Any, str]] = {
    "return_bias": (False, "a layer adds its bias itself"),
    "return_layernorm_output": (False, "a layer returns its output alone"),
    "return_layernorm_output_gathered": (False, "a layer returns its output alone"),
    "parameters_split": (None, "a layer has one weight and one bias for each linear"),
    "delay_wgrad_compute": (False, "a weight's gradient is computed in the backward"),
    "save_original_input": (False, "backward_override of the recipe says what is kept"),
    "symmetric_ar_type": (None, _SHARDING),
    "tp_size": (1, _SHARDING),
    "set_parallel_mode": (False, _SHARDING),
    "checkpoint": (False, "fuser.checkpoint computes any module again"),
    **{
        f"ub_{name}": (False, _OVERLAP)
        for name in (
            *("overlap_ag", "overlap_rs", "overlap_rs_dgrad", "overlap_rs_fprop"),
            *("overlap_ag_fprop", "overlap_ag_dgrad", "bulk_wgrad", "bulk_dgrad"),
        )
    },
}
# Arguments for work that fuser does not do; they change no result.
IGNORED = ("ub_name", "seq_length", "micro_batch_size")

Place = tuple[BasicOperation, str]
InitMethod = Callable[[torch.Tensor], Any]


class Layer(torch.nn.Module):
    """A pipeline under one name: ``ops`` holds it, and parameters are the layer's own.

    The ops are not submodules. Each call gives them the layer's parameters, so
    that they use a parameter that was replaced, sharded or swapped.

    Parameters
    ----------
    places
        For the name of each parameter: the op that uses it, and its name in
        that op; None if there is no such parameter.
    init_methods
        Functions that initialise weights of linears, by name; None for the
        op's own initialisation.
    """

    ops: Sequential

    def __init__(
        self,
        *ops: FusibleOperation,
        places: dict[str, Place | None],
        init_methods: dict[str, InitMethod | None],
    ) -> None:
        super().__init__()
        object.__setattr__(self, "ops", Sequential(*ops))
        self._places = {name: place for name, place in places.items() if place is not None}
        self._init_methods = {name: init for name, init in init_methods.items() if init is not None}
        self._has_run = False
        for name, place in places.items():
            parameter = None if place is None else place[0]._parameters[place[1]]
            self.register_parameter(name, parameter)
        if not self._is_on_meta():
            self._run_init_methods()

    def forward(
        self,
        input: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor:
        """Run the layer on ``[..., in_features]``.

        ``is_first_microbatch`` is as in ``BasicLinear``: True quantizes weights
        and keeps them, False uses the kept ones, None quantizes at every call.

        Raises
        ------
        InputError
            If a quantized output or gradient is asked for: put ``Quantize`` ops
            around linears for that.
        """
        if fp8_output or fp8_grad:
            raise InputError(
                f"{type(self).__name__} got fp8_output={fp8_output} and fp8_grad={fp8_grad}; a "
                "layer quantizes neither output nor gradient. Use fuser.Quantize in a Sequential."
            )
        kwargs = None
        if is_first_microbatch is not None:
            linears = [op for op in self.ops if isinstance(op, fused_ops.Linear)]
            kwargs = {op: {"is_first_microbatch": is_first_microbatch} for op in linears}
        return self.run(input, op_kwargs=kwargs)

    def run(self, *inputs: torch.Tensor, op_kwargs: Any = None) -> torch.Tensor:
        """The output of the ops, with the parameters of the layer.

        Raises
        ------
        StateError
            If parameters on meta have an ``init_method``.
        """
        self._hand_parameters_to_ops()
        if not self._has_run and self._init_methods and self._is_on_meta():
            raise StateError(
                f"{type(self).__name__} is on meta and has an init_method: call to_empty(device=) "
                "and reset_parameters() before its first forward."
            )
        output = self.ops(*inputs, op_kwargs=op_kwargs)
        if not self._has_run:
            if self._is_on_meta():
                self._take_parameters_of_ops()  # the ops have allocated them
            self._has_run = True
        assert isinstance(output, torch.Tensor)
        return output

    def plan(self, input: torch.Tensor, *, training: bool = True) -> FusionPlan:
        """The plan of a call with such an input, as from ``Sequential.plan``."""
        self._hand_parameters_to_ops()
        return self.ops.plan(input, training=training)

    def reset_parameters(self) -> None:
        """Initialise the parameters as the ops do. Parameters on meta are allocated first."""
        self._hand_parameters_to_ops()
        for _, op in self._basic_ops():
            if op._parameters:
                op.reset_parameters()  # type: ignore[operator]
        self._take_parameters_of_ops()
        self._run_init_methods()

    def train(self, mode: bool = True) -> Any:
        self.ops.train(mode)
        return super().train(mode)

    def _run_init_methods(self) -> None:
        for name, init_method in self._init_methods.items():
            linear, name_in_op = self._places[name]
            weight = getattr(linear, name_in_op)
            if isinstance(weight, QuantizedTensor):
                data = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                weight = torch.nn.Parameter(data, requires_grad=weight.requires_grad)
            tracker: Any = linear._rng_state_tracker_function
            context = tracker().fork() if tracker is not None else contextlib.nullcontext()
            with context, torch.no_grad():
                init_method(weight)
            if isinstance(linear, (basic_ops.BasicLinear, basic_ops.GroupedLinear)):
                fresh = linear.as_parameter(weight, name_in_op)
                linear._parameters[name_in_op] = self._parameters[name] = fresh

    # -- parameters and state ---------------------------------------------------

    def _is_on_meta(self) -> bool:
        return any(p is not None and p.is_meta for p in self._parameters.values())

    def _hand_parameters_to_ops(self) -> None:
        own = self._parameters
        try:
            for name, (op, name_in_op) in self._places.items():
                op._parameters[name_in_op] = own[name]
        except KeyError:
            raise StateError(
                f"{type(self).__name__} has no parameter {name!r} any more: it computes with its "
                "own parameters only. Remove the parametrization or pruning that has replaced it, "
                "or use a torch module here."
            ) from None

    def _take_parameters_of_ops(self) -> None:
        for name, (op, name_in_op) in self._places.items():
            self._parameters[name] = op._parameters[name_in_op]

    def _basic_ops(self) -> Iterator[tuple[str, BasicOperation]]:
        """The basic ops, each with its path as a submodule."""
        for i, op in enumerate(self.ops):
            if isinstance(op, FusedOperation):
                for k, member in enumerate(op.members):
                    yield f"ops.{i}.basic_ops.{k}", member
            else:
                assert isinstance(op, BasicOperation)
                yield f"ops.{i}", op

    def _ops_with_state(self) -> Iterator[tuple[str, BasicOperation]]:
        """Of :meth:`_basic_ops` those that save a state: the same on any number of ranks."""
        for path, op in self._basic_ops():
            if not isinstance(op, CollectiveOperation):
                yield path, op

    def get_extra_state(self) -> torch.Tensor:
        """Delayed scaling's state of all ops, each after its length, as an fp32 tensor.

        An empty uint8 tensor if there is none.
        """
        states = [op.get_extra_state() for _, op in self._ops_with_state()]
        if not any(state.numel() for state in states):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        parts = [
            (torch.tensor([float(state.numel())], device="cpu"), state.float()) for state in states
        ]
        return torch.cat([tensor for part in parts for tensor in part])

    def set_extra_state(self, state: Any) -> None:
        """Load such a state. The state of other libraries is pickled bytes, and is ignored."""
        is_ours = isinstance(state, torch.Tensor) and (
            not state.numel() or state.dtype is torch.float32
        )
        if not is_ours:
            return
        for _, op in self._ops_with_state():
            length = int(state[0]) if state.numel() else 0
            own, state = state[1 : 1 + length], state[1 + length :]
            op.set_extra_state(own if length else own.byte())

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a state of the layer, or one of its ops with the names of their parameters."""
        paths = {id(op): path for path, op in self._basic_ops()}
        for name, (op, name_in_op) in self._places.items():
            value = state_dict.pop(f"{prefix}{paths[id(op)]}.{name_in_op}", None)
            if value is not None:
                state_dict.setdefault(prefix + name, value)
        for path, op in self._basic_ops():
            state = state_dict.pop(f"{prefix}{path}._extra_state", None)
            if state is not None:
                op.set_extra_state(state)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + "_extra_state" in missing_keys:
            missing_keys.remove(prefix + "_extra_state")


class Linear(Layer):
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
        **options: Any,
    ) -> None:
        linear = _linear(
            in_features,
            out_features,
            bias,
            name or "",
            {
                "device": device,
                "dtype": one_of_two("params_dtype", params_dtype, "dtype", dtype),
                **linear_arguments(type(self), without_size("Linear", options)),
            },
        )
        super().__init__(
            linear, places=_linear_places(linear), init_methods={"weight": init_method}
        )
        self.in_features, self.out_features = in_features, out_features

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class LayerNormLinear(Layer):
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
    init_method, params_dtype, dtype, device, name, options
        As in :class:`Linear`.

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
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        factory = {
            "device": device,
            "dtype": one_of_two("params_dtype", params_dtype, "dtype", dtype),
        }
        taken = linear_arguments(type(self), without_size("LayerNormLinear", options))
        refuse_row("LayerNormLinear", taken)
        linear_options = {**factory, **taken}
        norm = _norm(
            normalization, in_features, eps=eps, zero_centered_gamma=zero_centered_gamma, **factory
        )
        linear = _linear(in_features, out_features, bias, name or "", linear_options)
        mark_norm(norm, linear)
        super().__init__(
            norm,
            linear,
            places={**_norm_places(norm), **_linear_places(linear)},
            init_methods={"weight": init_method},
        )
        self.in_features, self.out_features = in_features, out_features
        self.normalization, self.eps = normalization, eps
        self.zero_centered_gamma = zero_centered_gamma

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"normalization={self.normalization!r}"
        )


class LayerNormMLP(Layer):
    """A norm, a linear, an activation and a linear back: a transformer's feed-forward block.

    Parameters
    ----------
    hidden_size
        Last dimension of the input and of the output.
    ffn_hidden_size
        Last dimension of the activation's output; a gated activation's input
        is twice as wide.
    eps, bias, normalization, zero_centered_gamma, params_dtype, dtype, device, options
        As in :class:`LayerNormLinear`.
    activation
        The lower-case name of an activation op, such as ``"gelu"`` or ``"swiglu"``.
    activation_params
        Keyword arguments of that op.
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
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        zero_centered_gamma: bool = False,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise InputError(
                f"activation is {activation!r}; it is one of {', '.join(sorted(ACTIVATIONS))}."
            )
        factory = {
            "device": device,
            "dtype": one_of_two("params_dtype", params_dtype, "dtype", dtype),
        }
        options = without_size("LayerNormMLP", options)
        is_parallel = options.pop("set_parallel_mode", False)
        taken = {**factory, **linear_arguments(type(self), options)}
        of_fc1, of_fc2 = modes_of_mlp("LayerNormMLP", taken, is_parallel)
        norm = _norm(
            normalization, hidden_size, eps=eps, zero_centered_gamma=zero_centered_gamma, **factory
        )
        act = ACTIVATIONS[activation](**(activation_params or {}))
        width = ffn_hidden_size * (2 if act.function.is_gated else 1)
        first, second = (f"{name}.{part}" if name else part for part in ("fc1", "fc2"))
        fc1 = _linear(hidden_size, width, bias, first, of_fc1)
        fc2 = _linear(ffn_hidden_size, hidden_size, bias, second, of_fc2)
        mark_norm(norm, fc1)
        super().__init__(
            norm,
            fc1,
            act,
            fc2,
            places={
                **_norm_places(norm),
                **_linear_places(fc1, "fc1_"),
                **_linear_places(fc2, "fc2_"),
            },
            init_methods={"fc1_weight": init_method, "fc2_weight": output_layer_init_method},
        )
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.normalization, self.activation, self.eps = normalization, activation, eps
        self.zero_centered_gamma = zero_centered_gamma

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"normalization={self.normalization!r}, activation={self.activation!r}"
        )


# -- arguments ------------------------------------------------------------------------


def one_of_two(first: str, value: Any, second: str, other: Any) -> Any:
    """The value of an argument with two names."""
    if value is not None and other is not None and value != other:
        raise InputError(
            f"A layer got {first} {value} and {second} {other}, two names of one argument."
        )
    return other if value is None else value


# Arguments of a linear op, by their other names.
_LINEAR_NAMES = {
    "parallel_mode": "tensor_parallel_mode",
    "tp_group": "tensor_parallel_group",
    "get_rng_state_tracker": "rng_state_tracker_function",
    "fuse_wgrad_accumulation": "accumulate_into_main_grad",
    "sequence_parallel": "sequence_parallel",
}


def linear_arguments(layer: type, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments in ``options`` that the linear op takes. Refuses arguments that are on."""
    names = {**_LINEAR_NAMES, **{name: name for name in _LINEAR_NAMES.values()}}
    taken = {}
    for name, value in options.items():
        if name in names:
            taken[names[name]] = value
        elif name in OFF:
            default, reason = OFF[name]
            if value != default:
                raise InputError(
                    f"{layer.__name__} got {name}={value!r}; {reason}, so it takes only "
                    f"{default!r}."
                )
        elif name not in IGNORED:
            raise InputTypeError(f"{layer.__name__} takes no argument {name!r}.")
    return taken


def _linear(
    in_features: int, out_features: int, bias: bool, name: str, options: dict[str, Any]
) -> fused_ops.Linear:
    linear = fused_ops.Linear(in_features, out_features, bias=bias, **options)
    linear.members[0].name = name
    return linear


def _norm(name: str, size: int, **options: Any) -> Any:
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
