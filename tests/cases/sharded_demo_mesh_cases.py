"""Cases: the demos' models on meshes of 2 x 2 ranks."""

from __future__ import annotations

import functools

from sharded_demo_cases import MODES, Case, agrees_with_one_process, goes_on_from_a_checkpoint

CASES: dict[str, Case] = {
    **{
        f"{name} agrees with one process": functools.partial(agrees_with_one_process, MODES[name])
        for name in ("tp", "tp sp fsdp", "ep", "ep fsdp")
    },
    **{
        f"{name} goes on from a checkpoint": functools.partial(
            goes_on_from_a_checkpoint, MODES[name], []
        )
        for name in ("ep fsdp",)
    },
}
