"""Graphs whose guards torch does not measure.

Dynamo measures the guards of each new graph once, for a line of its log, and empties the caches of
the processor first: 30 to 60 ms a graph, and whatever ran before is slow again.
"""

from __future__ import annotations

import sys


def leave_guards_unmeasured() -> None:
    """From now on, if Dynamo has been imported; the check of a guard is what it was."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.__dict__["profile_guard_manager"] = _no_measurement


def _no_measurement(*_: object) -> float:
    return 0.0
