"""Fused operations: what a fusion's author subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from fuser.errors import InputError, StateError
from fuser.graph_break import breaks_graph
from fuser.op.fusible import FusibleOperation


class _FixedOps(torch.nn.ModuleList):
    """The basic ops of a fused one: pipelines hold on to them, so they stay what they are."""

    def __init__(self, ops: Iterable[FusibleOperation]) -> None:
        super().__init__(ops)
        self._is_fixed = True

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        names = ", ".join(type(op).__name__ for op in self)
        raise StateError(
            f"The basic ops [{names}] of a fused operation cannot be exchanged: replace the whole "
            "operation, or a parameter of the basic op."
        )

    __setitem__ = __delitem__ = insert = pop = _refuse

    def append(self, module: torch.nn.Module) -> Any:
        return self._refuse() if hasattr(self, "_is_fixed") else super().append(module)

    def extend(self, modules: Iterable[torch.nn.Module]) -> Any:
        return self._refuse() if hasattr(self, "_is_fixed") else super().extend(modules)


class _NoParameters(dict[str, Any]):
    """The parameters of a fused op itself: none can be put, taken or deleted here."""

    def __init__(self, owner: type, members: Sequence[FusibleOperation]) -> None:
        super().__init__()
        self._owner = owner.__name__
        self._members = " and ".join(type(op).__name__ for op in members)

    def _refuse(self, name: str, *value: Any) -> Any:
        raise StateError(
            f"{self._owner} has no parameter {name!r} of its own, and cannot be given one: "
            f"parameters are those of its basic ops, {self._members}. Change, prune or normalize "
            f"one of those instead, as in {self._owner.lower()}.basic_ops[0]."
        )

    __missing__ = __setitem__ = __delitem__ = _refuse


class FusedOperation(FusibleOperation):
    """One class for one way to run a window of basic ops at once.

    Holds nothing of its own: parameters and saved state stay with the basic
    ops. A fusion that the planner may find by itself names its ``window`` (op
    types, and the patterns of :mod:`fuser.plan`) and its ``side``:

    - ``"forward"`` and ``"backward"`` fusions are interchangeable with that
      half of the unfused ops: same outputs, same saved state;
    - a ``"joint"`` fusion replaces both halves, which need only be equivalent
      as a pair.

    Parameters
    ----------
    basic_ops
        The ops that this one replaces, in their order.
    """

    # The grouping module sets this to its class; ops are on a lower floor.
    grouping_class: ClassVar[Callable[..., Any]]

    window: ClassVar[tuple[Any, ...]] = ()
    side: ClassVar[str] = ""
    recomputes: ClassVar[bool] = False
    """Whether a joint fusion saves the window's input alone, and what is computed from it again in
    backward is not."""

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        self.basic_ops = _FixedOps(basic_ops)
        if not len(self.basic_ops):
            raise InputError(f"{type(self).__name__} was given no basic ops to replace.")
        # The same ops as a tuple: unpacking a ModuleList costs 2 us a call.
        self.members: tuple[Any, ...] = tuple(self.basic_ops)
        self._parameters = _NoParameters(type(self), self.members)

    @property
    def is_fused_op(self) -> bool:
        return True

    # Typed so that a fusion may name its window's ops as parameters.
    @classmethod
    def refuses(cls, *ops: Any, **key: Any) -> str | None:
        """Why this fusion cannot run these ops, as a sentence; None if it can.

        Called as ``refuses(*ops, key=key)``. ``ops`` are what the elements of
        ``window`` matched: an op, None for an absent ``Optional``, a tuple for
        ``Many``. ``key`` is the plan key narrowed to the window's ops.
        """
        return None

    @classmethod
    def kernels(cls, *ops: Any, **where: Any) -> tuple[tuple[str, int], ...]:
        """What is launched, in order: a name, and how many ops it finishes.

        Called as ``kernels(*ops, side=side, key=key)``, with ``ops`` and
        ``key`` as in :meth:`refuses`. The numbers add up to the length of the
        window; backward counts from its last op to its first. The default is
        one kernel for all of it.
        """
        return ((cls.__name__, len(where["key"].ops)),)

    @classmethod
    def fuses_quantize(cls, *ops: Any, **where: Any) -> bool:
        """As of a basic op; called as ``fuses_quantize(*ops, side=side, key=key)``."""
        return False

    def get_input_quantizer(self) -> Any | None:
        return self.members[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Any | None:
        return self.members[-1].get_grad_output_quantizer()

    def pre_first_fuser_forward(self) -> None:
        for op in self.members:
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.members:
            op.pre_fuser_forward(requires_grad=requires_grad)

    @breaks_graph
    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the basic ops of this operation as a pipeline of their own.

        A basic op with hooks is called as the module it is. What is bound to a channel with no
        other end in here is an extra input or output of the call like every other.
        """
        grouping = self._own_grouping()
        keywords = None if basic_op_kwargs is None else grouping.keywords(basic_op_kwargs)
        result: torch.Tensor | tuple[torch.Tensor, ...]
        result = grouping.run(input, extra_inputs, keywords)
        return result

    def _own_grouping(self) -> Any:
        """The basic ops as pipelines and modules, grouped anew when hooks have changed."""
        try:
            runner = self._runner
        except AttributeError:
            runner = None
        if runner is None or not runner.is_current():
            runner = self._runner = type(self).grouping_class(
                self.members, name=type(self).__name__, is_open=True, previous=runner
            )
        return runner
