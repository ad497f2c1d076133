"""The logger of checkpoints that torch debugs."""

from __future__ import annotations

import logging


def reset_tensor_log() -> None:
    """Torch leaves it on and alone: in the next test pytest would listen to it, and raise."""
    log = logging.getLogger("LoggingTensor")
    log.setLevel(logging.NOTSET)
    log.propagate = True
    log.filters.clear()
