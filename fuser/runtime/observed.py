"""Observed calls: what a plan of a whole model sees of the pipelines that its forward runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fuser.doors import OBSERVER, Observer
from fuser.plan.devices import Device
from fuser.plan.graph import OpGraph
from fuser.plan.plain_torch import baselines_of
from fuser.plan.plan import FusionPlan

Observe = Callable[[Any, Any, tuple[Any, ...]], Any]
"""``observe(pipeline, input, extra_inputs)`` returns what the call returns."""

_lock = threading.Lock()


class _Observer(threading.local):
    observe: Observe | None = None


_observer = _Observer()


def observer() -> Observe | None:
    """What every call of a pipeline on this thread is given to, in place of running; or None."""
    return _observer.observe


class ModelObserver(Observer):
    """Calls are observed while a context of this process is open; plans have baselines."""

    calls = None
    count = 0
    """The open contexts."""

    @classmethod
    def add(cls, contexts: int) -> None:
        """Count more contexts, or fewer."""
        with _lock:
            cls.count += contexts
            cls.calls = staticmethod(observer) if cls.count else None

    def costs(
        self,
        graph: OpGraph,
        plan: FusionPlan,
        key_under: Any,
        registered: Any,
        target: Device | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        fields = super().costs(graph, plan, key_under, registered, target, **others)
        return fields if target is None else {**fields, "baselines": baselines_of(graph, target)}


OBSERVER.open(ModelObserver())


@contextlib.contextmanager
def observing(observe: Observe) -> Iterator[None]:
    """Context in which pipelines do not run on this thread: ``observe`` answers their calls."""
    ModelObserver.add(1)
    outer, _observer.observe = _observer.observe, observe
    try:
        yield
    finally:
        _observer.observe = outer
        ModelObserver.add(-1)
