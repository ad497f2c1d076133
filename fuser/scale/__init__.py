"""A forecast of a training step on many GPUs: its time by parts, its memory and its limit."""

from fuser.scale.hardware import H200, Hardware
from fuser.scale.mesh import Mesh
from fuser.scale.model import PRESETS, Transformer
from fuser.scale.report import ScaleReport, scale
from fuser.scale.result import Line, TrainingStep, Variant
from fuser.scale.step import training_step

__all__ = [
    "H200",
    "PRESETS",
    "Hardware",
    "Line",
    "Mesh",
    "ScaleReport",
    "TrainingStep",
    "Transformer",
    "Variant",
    "scale",
    "training_step",
]
