"""A user's script for the type checker; ``test_typed_script.py`` checks it, nothing runs it.

A comment "refused:" holds words of the message about its line. Other lines have no message.
"""

from __future__ import annotations

import torch

import fuser
from fuser.recipe import (
    BackwardOverride,
    DelayedScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)


def choose(override: BackwardOverride | None) -> list[Recipe]:
    recipes = [
        MXFP8BlockScaling(backward_override=override),
        DelayedScaling(amax_compute_algo="most_recent"),
        Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
        NVFP4BlockScaling(nvfp4_4over6_err_mode="MSE"),
    ]
    MXFP8BlockScaling(backward_override="dequantised")  # refused: "backward_override"
    DelayedScaling(amax_compute_algo="min")  # refused: "amax_compute_algo"
    Float8BlockScaling(x_block_scaling_dim=3)  # refused: "x_block_scaling_dim"
    fuser.Float8BlockQuantizer(block_scaling_dim=3)  # refused: "block_scaling_dim"
    NVFP4BlockScaling(nvfp4_4over6="all")  # refused: "nvfp4_4over6"
    NVFP4BlockScaling(nvfp4_4over6_e4m3_use_256="some")  # refused: "nvfp4_4over6_e4m3_use_256"
    NVFP4BlockScaling(nvfp4_4over6_err_mode="RMS")  # refused: "nvfp4_4over6_err_mode"
    fuser.autocast(recipe="mxfp8")  # refused: "recipe"
    return [*recipes]


def make_ops() -> None:
    fuser.Linear(4, 4, tensor_parallel_mode="column")
    fuser.Linear(4, 4, tensor_parallel_mode="col")  # refused: "tensor_parallel_mode"
    fuser.BasicLinear(4, 4, tensor_parallel_mode="rows")  # refused: "tensor_parallel_mode"
    fuser.Linear(4, 4, biass=True)  # refused: "biass"
    fuser.Linear(4, 4, False)  # refused: Too many positional arguments
    fuser.GELU("none"), fuser.GEGLU(approximate="tanh")
    fuser.GELU(approximate="erf")  # refused: "approximate"
    fuser.GEGLU("erf")  # refused: "GEGLU"
    fuser.MoeDispatch(8, drop_policy="probs")
    fuser.MoeDispatch(8, drop_policy="prob")  # refused: "drop_policy"
    fuser.RmsNorm(4)  # refused: "RmsNorm"


def make_layers() -> None:
    fuser.modules.Linear(4, 4, parallel_mode="row", tp_size=1, ub_name="qkv")
    fuser.modules.Linear(4, 4, parallel_mode="rows")  # refused: "parallel_mode"
    fuser.modules.Linear(4, 4, sequence_paralel=True)  # refused: "sequence_paralel"
    fuser.modules.LayerNormLinear(4, 4, normalization="RMSNorm")
    fuser.modules.LayerNormLinear(4, 4, normalization="RmsNorm")  # refused: "normalization"
    fuser.modules.LayerNormMLP(4, 8, activation="swiglu", set_parallel_mode=True)
    fuser.modules.LayerNormMLP(4, 8, activation="swigl")  # refused: "activation"
    fuser.modules.GroupedLinear(2, 4, 8, delay_wgrad_compute=True, return_bias=False)
    fuser.modules.GroupedLinear(2, 4, 8, return_biass=False)  # refused: "return_biass"


def make_experts(x: torch.Tensor, indices: torch.Tensor, policy: fuser.moe.DropPolicy) -> None:
    fuser.moe.Router(4, 8, 2, score="sigmoid")
    fuser.moe.Router(4, 8, 2, score="sigmoids")  # refused: "score"
    rows: torch.Tensor = fuser.moe.permute(x, indices, num_experts=8, drop_policy=policy).x
    fuser.moe.permute(rows, indices, num_experts=8, drop_policy="last")  # refused: "drop_policy"


class Squares(fuser.FusedOperation):
    side = "forward"


class Cubes(fuser.FusedOperation):
    side = "foreward"  # refused: "FusedOperation"


def check_op(op: fuser.BasicOperation, x: torch.Tensor) -> None:
    fuser.testing.check(op, x, backward_overrides=(None, "high_precision"))
    fuser.testing.check(op, x, backward_overrides=("highest",))  # refused: "backward_overrides"
