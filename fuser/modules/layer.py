"""The base of layers: a pipeline in one module, with parameters and state of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fuser import basic_ops, fused_ops
from fuser.basic_ops.basic_linear import parallel_text
from fuser.basic_ops.collectives import CollectiveOperation
from fuser.errors import InputError, StateError, refuse_unknown
from fuser.op import BasicOperation, FusedOperation, FusibleOperation, HiddenOps
from fuser.plan.plan import FusionPlan
from fuser.runtime.model_plan import observer
from fuser.sequential import OpKwargs, Sequential
from fuser.tensors import QuantizedTensor

if TYPE_CHECKING:
    from typing_extensions import Self

Place = tuple[BasicOperation, str]
InitMethod = Callable[[torch.Tensor], object]


class Layer(HiddenOps):
    """A pipeline under one name: ``ops`` holds it, and parameters are the layer's own.

    The ops are not submodules. Each call gives them the layer's parameters, so that they use a
    parameter that was replaced, sharded or swapped.

    ``places``: for the name of each parameter: the op that uses it, and its name in that op; None
    if there is no such parameter. ``init_methods``: functions that initialise weights of linears,
    by name; None for the op's own initialisation.
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

    def run(self, *inputs: torch.Tensor, op_kwargs: OpKwargs | None = None) -> torch.Tensor:
        """The output of the ops, with the parameters of the layer.

        Raises StateError if parameters on meta have an ``init_method``.
        """
        self.hand_parameters_to_ops()
        is_first = not self._has_run and observer() is None
        if is_first and self._init_methods and self._is_on_meta():
            raise StateError(
                f"{type(self).__name__} is on meta and has an init_method: call to_empty(device=) "
                "and reset_parameters() before its first forward."
            )
        output = self.ops(*inputs, op_kwargs=op_kwargs)
        if is_first:
            if self._is_on_meta():
                self._take_parameters_of_ops()  # the ops have allocated them
            self._has_run = True
        assert isinstance(output, torch.Tensor)
        return output

    def reset_parameters(self) -> None:
        """Initialise the parameters as the ops do. Parameters on meta are allocated first."""
        self.hand_parameters_to_ops()
        for _, op in self._basic_ops():
            if op._parameters:
                op.reset_parameters()  # type: ignore[operator]
        self._take_parameters_of_ops()
        self._run_init_methods()

    def train(self, mode: bool = True) -> Self:
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

    def hand_parameters_to_ops(self) -> None:
        """Give the ops the parameters of the layer, as each call does."""
        parameters = self._parameters
        try:
            for name, (op, name_in_op) in self._places.items():
                op._parameters[name_in_op] = parameters[name]
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

    def _parallel_text(self) -> str:
        """What the repr says of the ranks that share the linears."""
        return parallel_text([op.members[0] for op in self.ops if isinstance(op, fused_ops.Linear)])

    def _ops_with_state(self) -> Iterator[tuple[str, BasicOperation]]:
        """Of :meth:`_basic_ops` those that save a state: the same on any number of ranks."""
        for path, op in self._basic_ops():
            if not isinstance(op, CollectiveOperation):
                yield path, op

    def plain_names(self) -> dict[str, str | None]:
        return {"_extra_state": None}

    def get_extra_state(self) -> torch.Tensor:
        """Delayed scaling's state of all ops, each after its length, as an fp32 tensor.

        An empty uint8 tensor if there is none.
        """
        states = [op.get_extra_state() for _, op in self._ops_with_state()]
        if not any(state.numel() for state in states):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        lengths = [torch.tensor([float(state.numel())], device="cpu") for state in states]
        pairs = zip(lengths, states, strict=True)
        return torch.cat([tensor for length, state in pairs for tensor in (length, state.float())])

    def set_extra_state(self, state: object) -> None:
        """Load such a state. The state of other libraries is pickled bytes, and is ignored."""
        if not isinstance(state, torch.Tensor):
            return
        if state.numel() and state.dtype is not torch.float32:
            return
        for _, op in self._ops_with_state():
            length = int(state[0]) if state.numel() else 0
            of_op, state = state[1 : 1 + length], state[1 + length :]
            op.set_extra_state(of_op if length else of_op.byte())

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


class InputLayer(Layer):
    """A layer that is called with its input."""

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

    if TYPE_CHECKING:
        __call__ = forward

    def plan(
        self,
        input: torch.Tensor,
        *,
        training: bool = True,
        device: str | None = None,
        **unknown: NoReturn,
    ) -> FusionPlan:
        """The plan of a call with such an input, as from ``Sequential.plan``."""
        if unknown:
            refuse_unknown(f"The plan of a {type(self).__name__}", InputLayer.plan, unknown)
        self.hand_parameters_to_ops()
        return self.ops.plan(input, training=training, device=device)
