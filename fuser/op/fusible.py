"""The base class of all operations, basic and fused."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from fuser.errors import StateError, explains_arguments
from fuser.op.context import OperationContext
from fuser.op.module_calls import module_calls, noting
from fuser.op.state import Stateful
from fuser.op.step import Contexts, Grads, StepGrads, StepInputs, StepOutputs, Tensors, rows
from fuser.op.structure import structure_of
from fuser.specs import PlanKey
from fuser.tensors import Quantizer

COMPUTE_METHODS = (
    *("op_forward", "op_backward", "fuser_forward", "fuser_backward"),
    *("step_forward", "step_backward"),
)
"""The methods that define what an op or a fusion computes."""
_RUNNING_METHODS = (*COMPUTE_METHODS, "pre_first_fuser_forward", "pre_fuser_forward")

CallResult: TypeAlias = "torch.Tensor | Any"
"""What a call returns, for type checkers: a tensor, or a tuple of it and the extra outputs.

The ops decide which of the two, and their types do not show it. So a checker knows the attributes
of a tensor, and accepts what is done with a tuple.
"""

QUANTIZER_METHODS = (
    *("num_quantizers", "quantizer_roles", "quantizer_value", "get_quantizer"),
    *("get_input_quantizer", "get_grad_output_quantizer"),
)
METHODS = ("forward", *COMPUTE_METHODS, "__class__", *QUANTIZER_METHODS)
"""Attributes that change how an op runs if they are set on the object."""


class _SetByInit:
    """An attribute that ``torch.nn.Module.__init__`` sets. Without that call, reading it raises.

    Python prefers the object's own attribute, so this costs nothing after ``__init__``.
    """

    def __get__(self, op: object, cls: type) -> _SetByInit:
        if op is None:
            return self
        raise _no_init(cls)


def _no_init(cls: type) -> StateError:
    return StateError(
        f"{cls.__name__}.__init__ does not call super().__init__(), which must come first in it."
    )


_ABSENT = object()
_changes = itertools.count(1)


class FusibleOperation(Stateful, abc.ABC):
    """An operation that a pipeline can run: basic, or the fusion of basic ones."""

    # What runs the op alone; not part of the state, so that a copy makes its own.
    __slots__ = ("_runner",)
    _runner: Any
    runner_of: ClassVar[Callable[[Any, Any], Any]]
    is_external: ClassVar[bool] = False
    """Whether code outside this library runs in the op's forward or backward."""
    stores_rebuilt_output: ClassVar[bool] = False
    """Whether backward stores the ``rebuilt_output`` of the last op's context, if a kernel can."""

    register_forward_pre_hook = noting("register_forward_pre_hook")
    register_forward_hook = noting("register_forward_hook")
    register_backward_hook = noting("register_backward_hook")
    register_full_backward_pre_hook = noting("register_full_backward_pre_hook")
    register_full_backward_hook = noting("register_full_backward_hook")

    _forward_hooks: Any = _SetByInit()
    _backward_hooks: Any = _SetByInit()

    def __setattr__(self, name: str, value: Any) -> None:
        is_change = self.__dict__.get(name, _ABSENT) is not value
        held = self._holds(name)
        try:
            super().__setattr__(name, value)
        except AttributeError:
            if "_parameters" not in self.__dict__:
                raise _no_init(type(self)) from None
            raise
        holds = self._holds(name)
        if is_change and holds is None:
            self._count_change()
            if name == "training":  # graphs read it apart
                return
        # FSDP2 sets each parameter four times a step.
        is_same_structure = holds is not None and holds == held
        if is_change and not is_same_structure and "_structure" in self.__dict__:
            self._describe()
        if name in METHODS:
            module_calls.change()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        methods = (getattr(cls, name, None) for name in _RUNNING_METHODS)
        modules = {getattr(method, "__module__", None) or __name__ for method in methods}
        cls.is_external = any(module.partition(".")[0] != "fuser" for module in modules)
        if "__init__" in cls.__dict__ and cls.__module__.partition(".")[0] == "fuser":
            init = explains_arguments(cls.__dict__["__init__"], FusibleOperation._describe)
            type.__setattr__(cls, "__init__", init)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._count_change()
        self._describe()
        if name in METHODS:
            module_calls.change()

    def _holds(self, name: str) -> bool | None:
        """Whether a parameter or buffer of that name has a tensor; None if there is none."""
        for kept in ("_parameters", "_buffers"):
            tensors = self.__dict__.get(kept)
            if tensors and name in tensors:
                return tensors[name] is not None
        return None

    def implementation(self) -> tuple[object, ...]:
        """The code that runs this op: its class, and methods that were set on the object."""
        return (type(self), *(self.__dict__.get(name) for name in METHODS))

    def _count_change(self) -> None:
        # Recorded passes are valid as long as this is the same.
        self.__dict__["_changes"] = next(_changes)

    def _describe(self) -> None:
        # Graphs of torch.compile are valid as long as this is the same.
        self.__dict__["_structure"] = structure_of(self)

    def has_own_methods(self) -> bool:
        """Whether methods that run this op were set on the object."""
        return not self.__dict__.keys().isdisjoint(METHODS)

    if TYPE_CHECKING:

        def __call__(
            self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: object
        ) -> CallResult: ...

    @property
    @abc.abstractmethod
    def is_fused_op(self) -> bool:
        """Whether this op is the fusion of one or more basic ops."""

    def notes(self, key: PlanKey, rows: int) -> tuple[str, ...]:
        """Sentences about the op that its plan shows, such as what it pads.

        ``key`` is the plan key narrowed to this op or to the ops that it fuses, and ``rows`` the
        rows of its main input at the plan's nominal token count. A fused op adds notes to those of
        its basic ops.
        """
        return ()

    def pre_first_fuser_forward(self) -> None:
        """Called once, before the first forward of a pipeline that holds this op."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before each forward of a pipeline that holds this op."""

    def get_input_quantizer(self) -> Quantizer | None:
        """The quantizer that this op wants for its input, if any."""
        return None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer that this op wants for the gradient of its output, if any."""
        return None

    # -- running ------------------------------------------------------------------

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        """Run forward. This library's own classes define this, and others ``fuser_forward``.

        A plan calls the one that a class defines.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no forward of its own. Implement fuser_forward."
        )

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        """Run backward, from the gradients of the output and of the extra outputs."""
        raise NotImplementedError(
            f"{type(self).__name__} has no backward of its own. Implement fuser_backward."
        )

    @property
    def _step_ops(self) -> Sequence[Any]:
        """The basic ops of this operation."""
        return (self,)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        """Run forward for every basic op of this operation.

        Returns the output and, for each basic op, its extra outputs.
        """
        extras = tuple(itertools.chain(*basic_op_extra_inputs))
        inputs = StepInputs(extras, next_op_input_quantizer, basic_op_kwargs)
        output, outputs = self.step_forward(basic_op_ctxs, input_, inputs)
        return output, rows(outputs, [op.num_extra_outputs for op in self._step_ops])

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        """Run backward for every basic op of this operation.

        Returns the gradient of the input and, for each basic op, the gradients
        of its parameters and of its extra inputs.
        """
        grad_extras = tuple(itertools.chain(*basic_op_grad_extra_outputs))
        grad_input, params, extras = self.step_backward(basic_op_ctxs, grad_output, grad_extras)
        ops = self._step_ops
        named = [op.parameter_names for op in ops]
        counts = [len([*ops[i].parameters()] if n is None else n) for i, n in enumerate(named)]
        extra_counts = [op.num_extra_inputs for op in ops]
        return grad_input, rows(params, counts), rows(extras, extra_counts)

    def __getstate__(self) -> dict[str, object]:
        # Without the slot.
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._count_change()
        self._describe()


def runs_ops_alone(function: Callable[[Any, Any], Any]) -> None:
    """Register what makes the runner of an op that is called alone, in a later package.

    It is called with the op, and with the runner that the op had before or None.
    """
    FusibleOperation.runner_of = staticmethod(function)
