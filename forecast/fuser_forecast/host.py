"""The time of the host in a layer: launches, hooks and maps, as measured on one host.

Measured on 2026-11-28 on a host of four H200 (b523989, benchmarks/results/ranks_h200.csv), which is
a slow one: other hosts take a part of it (``Hardware.host``).
"""

from __future__ import annotations

from fuser.plan.transformers import Transformer
from fuser.recipe import DelayedScaling, Recipe
from fuser_forecast.mesh import Mesh

# Seconds of forward and backward.
# One pipeline without communication. Between the 0.5 ms of steps_h200.csv, on a faster host, and
# the 2.1 ms that a step of one took, which the GPU limited.
PIPELINE = 1.5e-3
# The pipelines around attention, rotary embedding and attention: eight layers take 67 ms.
ATTENTION = 67e-3 / 8 - PIPELINE
# What a tensor parallel pipeline adds: 4.1 ms under delayed scaling, 2.8 without communication.
TENSOR = 1.3e-3
# FSDP2's hooks of a layer: eight layers take 74 ms.
SHARDS = (74e-3 - 67e-3) / 8
# The hooks of a weight whose bytes are gathered, four in a layer: eight layers take 114 ms.
GATHERED = (114e-3 - 74e-3) / 8 / 4
# An update of delayed scaling's scales: one pipeline takes 2.8 ms with it.
SCALES = 2.8e-3 - PIPELINE
# A pipeline of experts that are spread over ranks, which runs in Python; by recipe.
EXPERTS = {
    "bf16": 6.5e-3,
    "Float8CurrentScaling": 12.0e-3,
    "DelayedScaling": 14.0e-3 - SCALES,
    "Float8BlockScaling": 7.9e-3,
}
OTHER_EXPERTS = EXPERTS["Float8BlockScaling"]
# The GPU waits while the host reads the counts of rows and makes maps: steps in bf16 take 1.8 to
# 2.2 ms more than the experts and the exchanges alone.
MAPS = 1.9e-3


def host_seconds(
    model: Transformer, mesh: Mesh, recipe: Recipe | None, *, is_sharded: bool, gathered: int
) -> float:
    """Seconds of forward and backward of a layer; bytes of ``gathered`` weights are gathered."""
    name = "bf16" if recipe is None else type(recipe).__name__
    seconds = EXPERTS.get(name, OTHER_EXPERTS) if mesh.ep > 1 else PIPELINE
    seconds += ATTENTION * bool(model.heads)
    if mesh.tp > 1:
        seconds += TENSOR * (2 * bool(model.heads) + (not model.experts))
    return seconds + SHARDS * is_sharded + GATHERED * gathered


def scales_seconds(recipe: Recipe | None) -> float:
    """Seconds of a microbatch to update scales."""
    return SCALES * isinstance(recipe, DelayedScaling)
