"""No look for garbage while modules are imported and tests collected; later a rare one.

Imported first: what imports and collection make stays, and each look would go through all of it.
"""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 10, 10)
"""torch.compile makes objects by the ten thousand, and most of them live as long as a graph."""

gc.disable()


def look_for_garbage() -> None:
    """From now on, and never again at what there is: a look from a fork would copy it, too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
