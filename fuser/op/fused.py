"""Fused operations: the base class for authors of fusions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch.compiler import is_compiling

from fuser.doors import PASSES
from fuser.errors import InputError, InputTypeError, StateError, refuse_unknown
from fuser.op.fusible import FusibleOperation
from fuser.specs import QuantSpec
from fuser.tensors import Quantizer


class _FixedOps(torch.nn.ModuleList):
    """The basic ops of a fused op. They cannot be exchanged, because pipelines hold them."""

    def __init__(self, ops: Iterable[FusibleOperation]) -> None:
        super().__init__(ops)
        self._is_fixed = True

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        names = ", ".join(type(op).__name__ for op in self)
        raise StateError(
            f"The basic ops [{names}] of a fused operation cannot be exchanged: replace the whole "
            "operation, or a parameter of the basic op."
        )

    __setitem__ = __delitem__ = insert = pop = _refuse

    def __setattr__(self, name: str, value: Any) -> None:
        # As libraries that replace modules by their paths do.
        if isinstance(value, torch.nn.Module) and hasattr(self, "_is_fixed"):
            self._refuse()
        super().__setattr__(name, value)

    def append(self, module: torch.nn.Module) -> Any:
        return self._refuse() if hasattr(self, "_is_fixed") else super().append(module)

    def extend(self, modules: Iterable[torch.nn.Module]) -> Any:
        return self._refuse() if hasattr(self, "_is_fixed") else super().extend(modules)


class _NoParameters(dict[str, torch.nn.Parameter | None]):
    """The parameters of a fused op itself: always empty, and cannot be changed."""

    def __init__(self, owner: type, members: Sequence[FusibleOperation]) -> None:
        super().__init__()
        self._owner = owner.__name__
        self._members = " and ".join(type(op).__name__ for op in members)

    def _refuse(self, name: str, *value: object) -> NoReturn:
        raise StateError(
            f"{self._owner} has no parameter {name!r} of its own, and cannot be given one: "
            f"parameters are those of its basic ops, {self._members}. Change, prune or normalize "
            f"one of those instead, as in {self._owner.lower()}.basic_ops[0]."
        )

    __missing__ = __setitem__ = __delitem__ = _refuse


FusionSide = Literal["", "forward", "backward", "joint"]
"""Where a fusion replaces ops; empty if the planner does not know it."""


class FusedOperation(FusibleOperation):
    """One way to run a window of basic ops together.

    It has no state: parameters and saved tensors belong to the basic ops. A
    fusion for the planner has a ``window`` (op types, and the patterns of
    :mod:`fuser.plan`) and a ``side``:

    - a ``"forward"`` or ``"backward"`` fusion can replace that half of the
      unfused ops: it has the same outputs and saves the same tensors;
    - a ``"joint"`` fusion replaces both halves, and only the two together must
      be equivalent to the ops.

    Parameters
    ----------
    basic_ops
        The ops that this one replaces, in their order. Fusions that te.ops has take them by
        keyword too: ``ForwardLinearBiasAdd(linear=..., bias=None, add=...)``.
    """

    window: ClassVar[tuple[object, ...]] = ()
    side: ClassVar[FusionSide] = ""
    communicates: ClassVar[bool] = False
    """Whether the fusion does the communication of its basic ops (``BasicOperation.collectives``).
    If it does not, it is refused for ops that communicate on its side."""
    recomputes: ClassVar[bool] = False
    """Whether a joint fusion saves only the window's input, and computes the rest again in
    backward."""
    step_rebuild: ClassVar[Any]
    """Of such a fusion: ``(contexts, input or None) -> output``, in backward, with forward's bits;
    the input is None if the fusion saved it."""
    member_names: ClassVar[tuple[str, ...]] = ()
    """Names of the ops, in their order, by which a fusion of te.ops takes them as keywords."""
    makes_channels: ClassVar[bool] = False
    """Whether the window may have channels from one of its ops to another. The extra inputs that
    they end at are None in ``fuser_forward``: the fusion makes them itself."""

    def __init__(
        self, basic_ops: Iterable[FusibleOperation] = (), **named: FusibleOperation | None
    ) -> None:
        super().__init__()
        ops = list(basic_ops)
        self._set_members(self._by_name(ops, named) if named else ops)

    def _by_name(
        self, unnamed: Sequence[FusibleOperation], named: Mapping[str, FusibleOperation | None]
    ) -> list[FusibleOperation]:
        """The ops that were given by ``member_names``, in their order."""
        unknown = [name for name in named if name not in self.member_names]
        if unknown:
            taken = ", ".join(("basic_ops", *self.member_names))
            raise InputTypeError(
                f"{type(self).__name__} takes no argument {unknown[0]!r}; it takes {taken}."
            )
        if unnamed or len(named) < len(self.member_names):
            got = ", ".join([*["basic_ops"] * bool(unnamed), *named])
            raise InputTypeError(
                f"{type(self).__name__} got {got}; give basic_ops alone, or each of "
                f"{', '.join(self.member_names)}, None for one that is not there."
            )
        ops = [named[name] for name in self.member_names]
        return [op for op in ops if op is not None]

    def _set_members(self, basic_ops: Iterable[FusibleOperation]) -> None:
        self.basic_ops = _FixedOps(basic_ops)
        if not len(self.basic_ops):
            raise InputError(
                f"{type(self).__name__} was given no basic ops to replace. Give one or more."
            )
        # The same ops as a tuple: unpacking a ModuleList costs 2 us a call.
        self.members: tuple[Any, ...] = tuple(self.basic_ops)
        self._parameters = _NoParameters(type(self), self.members)

    @property
    def is_fused_op(self) -> bool:
        return True

    @property
    def _step_ops(self) -> Sequence[Any]:
        return self.members

    # These types let a fusion name the ops of its window as parameters.
    @classmethod
    def refuses(cls, *ops: Any, **key: Any) -> str | None:
        """The reason why this fusion cannot run these ops, as a sentence; None if it can.

        An empty reason leaves no line in the plan, where the fusion would do no work of an op.
        Called as ``refuses(*ops, key=key)``. ``ops`` has an entry for each
        element of ``window``: the op that it matched, None for an absent
        ``Optional``, a tuple for ``Many``. ``key`` is the plan key narrowed to
        the window's ops.
        """
        return None

    @classmethod
    def kernels(cls, *ops: Any, **where: Any) -> tuple[tuple[str, int], ...]:
        """The kernels in the order of their launch: a name, and how many ops it finishes.

        Called as ``kernels(*ops, side=side, key=key)``, with ``ops`` and
        ``key`` as in :meth:`refuses`. The numbers add up to the length of the
        window; backward counts from its last op to its first. The default is
        one kernel for the whole window.
        """
        return ((cls.__name__, len(where["key"].ops)),)

    @classmethod
    def fuses_quantize(cls, *ops: Any, **where: Any) -> bool:
        """As for a basic op; called as ``fuses_quantize(*ops, side=side, key=key)``."""
        return False

    @classmethod
    def sends(cls, *ops: Any, **where: Any) -> Mapping[str, QuantSpec]:
        """The tensors that it sends quantized and its ops as values, with their formats, by name.

        Called as ``sends(*ops, side=side, key=key)``; the names are those of ``Collective``.
        """
        return {}

    def get_input_quantizer(self) -> Quantizer | None:
        quantizer: Quantizer | None = self.members[0].get_input_quantizer()
        return quantizer

    def get_grad_output_quantizer(self) -> Quantizer | None:
        quantizer: Quantizer | None = self.members[-1].get_grad_output_quantizer()
        return quantizer

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._take_plain_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def pre_first_fuser_forward(self) -> None:
        for op in self.members:
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.members:
            op.pre_fuser_forward(requires_grad=requires_grad)

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
        **unknown: NoReturn,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the basic ops of this operation as a pipeline of their own.

        A basic op with hooks is called as a module. An extra input or output whose channel has no
        other end among these ops is an ordinary one of this call.
        """
        if is_compiling():
            keywords = {"basic_op_kwargs": basic_op_kwargs} if basic_op_kwargs else {}
            traced: torch.Tensor | tuple[torch.Tensor, ...]
            traced = PASSES.guest.traced_call(self, input, extra_inputs, keywords | unknown)
            return traced
        if unknown:
            refuse_unknown(f"The call of a {type(self).__name__}", FusedOperation.forward, unknown)
        segments = self._own_segments()
        op_kwargs = None if basic_op_kwargs is None else segments.keywords(basic_op_kwargs)
        result: torch.Tensor | tuple[torch.Tensor, ...]
        result = segments.run(input, extra_inputs, op_kwargs)
        return result

    def _own_segments(self) -> Any:
        """The basic ops as pipelines and modules, divided again after hooks change."""
        try:
            runner = self._runner
        except AttributeError:
            runner = None
        if runner is None or not runner.is_current():
            runner = self._runner = type(self).runner_of(self, runner)
        return runner
