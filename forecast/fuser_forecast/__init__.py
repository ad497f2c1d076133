"""A forecast of a training step on many GPUs: its time by parts, its memory and its limit."""

from fuser.plan.transformers import PRESETS, Transformer
from fuser_forecast.hardware import GPUS, H200, Hardware
from fuser_forecast.mesh import Mesh, Sizes
from fuser_forecast.report import ScaleReport, scale
from fuser_forecast.result import Line, TrainingStep, Variant
from fuser_forecast.step import training_step

__all__ = [
    "GPUS",
    "H200",
    "PRESETS",
    "Hardware",
    "Line",
    "Mesh",
    "ScaleReport",
    "Sizes",
    "TrainingStep",
    "Transformer",
    "Variant",
    "scale",
    "training_step",
]
