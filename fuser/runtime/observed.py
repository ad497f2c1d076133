"""Observed calls: what a plan of a whole model sees of the pipelines that its forward runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

Observe = Callable[[Any, Any, tuple[Any, ...]], Any]
"""``observe(pipeline, input, extra_inputs)`` returns what the call returns."""

observing_threads = 0
"""How many contexts of this process observe calls: without any, no call looks further."""

_lock = threading.Lock()


class _Observer(threading.local):
    observe: Observe | None = None


_observer = _Observer()


def observer() -> Observe | None:
    """What every call of a pipeline on this thread is given to, in place of running; or None."""
    return _observer.observe


@contextlib.contextmanager
def observing(observe: Observe) -> Iterator[None]:
    """Context in which pipelines do not run on this thread: ``observe`` answers their calls."""
    global observing_threads
    with _lock:
        observing_threads += 1
    outer, _observer.observe = _observer.observe, observe
    try:
        yield
    finally:
        _observer.observe = outer
        with _lock:
            observing_threads -= 1
