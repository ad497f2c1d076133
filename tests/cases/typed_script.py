"""A user's script for the type checker; ``test_typed_script.py`` checks it, nothing runs it.

A comment "refused:" holds words of the message about its line. Other lines have no message.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

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
    NVFP4BlockScaling(nvfp4_4over6="some")  # refused: "nvfp4_4over6"
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


def make_sharded(group: ProcessGroup, mesh: DeviceMesh) -> None:
    fuser.Linear(4, 4, tensor_parallel_mode="row", tensor_parallel_group=mesh)
    fuser.Linear(4, 4, tensor_parallel_group=4)  # refused: "tensor_parallel_group"
    fuser.modules.Linear(4, 4, tp_group=group)
    fuser.modules.Linear(4, 4, tp_group="tp")  # refused: "tp_group"
    fuser.AllReduce(group)
    fuser.AllReduce("tp")  # refused: "AllReduce"
    fuser.autocast(amax_reduction_group=group)
    fuser.autocast(amax_reduction_group=0)  # refused: "amax_reduction_group"


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


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pipe = fuser.Sequential(fuser.MakeExtraOutput(), fuser.Linear(4, 4), fuser.GELU())
        self.mlp = fuser.modules.LayerNormMLP(4, 8)
        self.experts = fuser.modules.GroupedLinear(2, 4, 4)
        self.router = fuser.moe.Router(4, 2, 1)

    @fuser.autocast(recipe=MXFP8BlockScaling())
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, residual = self.pipe(x, op_kwargs={1: {"is_first_microbatch": True}})
        y = self.experts(self.mlp(y + residual, is_first_microbatch=True), [2, 2])
        loss: torch.Tensor = self.router(y).load_balancing_loss
        return fuser.checkpoint(self.tail, y) + loss

    def tail(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.pipe[1].weight
        part: fuser.Sequential = self.pipe[1:]
        if isinstance(y := part(x), tuple):
            y = y[0]
        return part(x + weight.sum()) + fuser.Linear(4, 4)(x).relu() + y


def call(block: Block, x: torch.Tensor) -> None:
    block.forward(x).summ()  # refused: "summ"
    block.forward(4)  # refused: "forward"
    print(block.pipe(x).shapes)  # refused: "shapes"
    block.pipe([4.0])  # refused: "Sequential"
    block.pipe(x, op_kwarg={})  # refused: "op_kwarg"
    block.pipe[1:].plan(x).drawn()  # refused: "drawn"
    block.pipe[1.5]  # refused: "Sequential"
    number: float = block.pipe(x)  # refused: "float"
    fuser.GELU()(x).summ()  # refused: "summ"
    fuser.GELU()(number)  # refused: "Tensor"
    block.mlp(x).summ()  # refused: "summ"
    block.mlp(x, is_first_microbatches=True)  # refused: "is_first_microbatches"
    block.experts(x)  # refused: Too few arguments
    print(block.router(x).indices)  # refused: "indices"
    fuser.checkpoint(block.forward, x).summ()  # refused: "summ"
