"""A stand-in for CUDA graphs on a CPU, for tests of what surrounds them.

A capture notes the operations of torch with the memory of their arguments, and undoes what they
wrote, as nothing runs in a capture. A replay repeats them: with the memory of the capture, whatever
its modules have by then, and without Python of the modules. Memory that a graph allocates is NaN
until the first replay.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser.runtime import graphs
from fuser.wrapper_tensor import WrapperTensor

Tensors = list[torch.Tensor]


def tensors_in(value: Any) -> Tensors:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def in_place(tensor: Any) -> Any:
    """A tensor with the same memory, which follows no ``.data`` of the given one."""
    return torch.ops.aten.alias.default(tensor) if isinstance(tensor, torch.Tensor) else tensor


class StandIn(TorchDispatchMode):
    """A graph: the operations that were called in it."""

    captured: int = 0
    """The number of captures now."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, Tensors]] = []
        self._undo: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, WrapperTensor) for kind in types):
            return NotImplemented  # the operations on the parts of it are noted
        args, kwargs = pytree.tree_map(in_place, (args, kwargs or {}))
        if func._schema.is_mutable:
            self._undo += [(tensor, tensor.clone()) for tensor in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, list(map(in_place, tensors_in(result)))))
        return result

    def end(self) -> None:
        """End the capture: undo writes, and poison what was allocated."""
        given = {
            tensor.untyped_storage().data_ptr()
            for _, args, kwargs, _ in self._calls
            for tensor in tensors_in((args, kwargs))
        }
        allocated: dict[int, torch.Tensor] = {}
        seen: set[int] = set()
        for _, args, kwargs, results in self._calls:
            seen |= {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))} - set(
                allocated
            )
            for tensor in results:
                place = tensor.untyped_storage().data_ptr()
                if place not in seen:
                    allocated.setdefault(place, tensor)
        del given
        for tensor, values in reversed(self._undo):
            tensor.copy_(values)
        for tensor in allocated.values():
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensor.fill_(float("nan"))
        self._undo.clear()

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, results in self._calls:
            for ours, fresh in zip(results, tensors_in(func(*args, **kwargs)), strict=True):
                if ours.untyped_storage().data_ptr() != fresh.untyped_storage().data_ptr():
                    ours.copy_(fresh)


@contextlib.contextmanager
def capture(graph: StandIn, pool: Any = None) -> Iterator[None]:
    StandIn.captured += 1
    try:
        with graph:
            yield
    finally:
        StandIn.captured -= 1
        graph.end()


def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``make_graphed_callables`` capture such graphs, of modules on the CPU."""
    pools = itertools.count()
    for name, value in {
        "synchronize": lambda *_: None,
        "stream": lambda *_: contextlib.nullcontext(),
        "CUDAGraph": StandIn,
        "graph": capture,
        "graph_pool_handle": lambda: (next(pools), 0),
        "is_current_stream_capturing": lambda: StandIn.captured > 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    make = graphs.make_graphed_callables

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            return make(*args, **kwargs)

    monkeypatch.setattr(fuser, "make_graphed_callables", on_cpu)
    monkeypatch.setattr(graphs, "_new_stream", lambda: None)
    monkeypatch.setattr(graphs, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(graphs, "_refusing_to_wait", contextlib.nullcontext)
