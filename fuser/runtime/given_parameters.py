"""Parameters that ops do not keep: each call of their pipeline gives them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from fuser.op import FusedOperation, FusibleOperation
from fuser.plan.parameter_slots import find_slots

Result = TypeVar("Result")


class ParameterPlaces:
    """The places of the parameters of all ops in ``modules``, in their order."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        ops: list[Any] = []
        for module in modules:
            if isinstance(module, FusedOperation):
                ops += module.members
            elif isinstance(module, FusibleOperation):
                ops.append(module)
        self._places = [place for op in ops for place in find_slots(op, type(op).__name__)]
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_places": self._places}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def called_with(
        self, values: Sequence[torch.Tensor], call: Callable[..., Result], *args: Any
    ) -> Result:
        """``call(*args)`` with ``values`` in these places, outside of graphs."""
        with self._lock:  # two threads would give the ops two parameters
            before = [held[name] for held, name in self._places]
            try:
                for (held, name), value in zip(self._places, values, strict=True):
                    held[name] = value
                return call(*args)
            finally:
                # A joined weight would otherwise live, with its graph, until the next call.
                for (held, name), value in zip(self._places, before, strict=True):
                    held[name] = value


class GivenParameters(NamedTuple):
    """The parameters of one call, and their places.

    A graph takes ``values`` as they are, without a write into an op: a checkpoint inside of a graph
    takes no write into what is outside of it.
    """

    places: ParameterPlaces
    values: Sequence[torch.Tensor]
