"""Compiled steps of models that communicate, and the same steps launched: each runs on a rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import RANKS, device_type
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fuser
from fuser import recipe as recipes
from fuser.distributed import Colwise, Replicated, Rowwise

WIDTH, TOKENS, STEPS, EXPERTS = 64, 16, 3, 4
RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": recipes.Float8CurrentScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=3, reduce_amax=False),
    "delayed over ranks": lambda: recipes.DelayedScaling(amax_history_len=3),
}


def mlp(*, has_shards: bool, is_parallel: bool = True) -> fuser.Sequential:
    linear = functools.partial(fuser.Linear, sequence_parallel=has_shards)
    modes: list[Any] = ["column", "row"] if is_parallel else [None, None]
    return fuser.Sequential(
        fuser.RMSNorm(WIDTH),
        linear(WIDTH, 4 * WIDTH, bias=False, tensor_parallel_mode=modes[0]),
        fuser.SwiGLU(),
        linear(2 * WIDTH, WIDTH, tensor_parallel_mode=modes[1]),
    )


def distributed_mlp(*, has_shards: bool) -> fuser.Sequential:
    """With parameters that are DTensors."""
    layers = fuser.Sequential(
        fuser.RMSNorm(WIDTH),
        fuser.Linear(WIDTH, 4 * WIDTH),
        fuser.SwiGLU(glu_interleave_size=32),
        fuser.Linear(2 * WIDTH, WIDTH),
    )
    styles = {"0": Replicated, "1": Colwise, "3": Rowwise}
    plan = {name: style(sequence_parallel=has_shards) for name, style in styles.items()}
    mesh = init_device_mesh(device_type(), (RANKS,))
    return parallelize_module(layers, mesh, plan)  # type: ignore[return-value]


def experts(capacity: int | None) -> fuser.Sequential:
    group = dist.group.WORLD
    dispatch = fuser.MoeDispatch(EXPERTS, capacity=capacity, expert_parallel_group=group)
    for index, channel in enumerate(("sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    own = EXPERTS // RANKS
    up = fuser.GroupedLinear(own, WIDTH, 2 * WIDTH, bias=False)
    down = fuser.GroupedLinear(own, WIDTH, WIDTH, bias=False)
    return fuser.Sequential(
        dispatch,
        up.set_extra_input_channel(0, "sizes"),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        down.set_extra_input_channel(0, "sizes"),
        fuser.MoeCombine(expert_parallel_group=group).set_extra_input_channel(0, "rows"),
    )


MODELS: dict[str, Callable[[], fuser.Sequential]] = {
    "tensor parallel": lambda: mlp(has_shards=False),
    "sequence parallel": lambda: mlp(has_shards=True),
    "tensor parallel DTensors": lambda: distributed_mlp(has_shards=False),
    "sequence parallel DTensors": lambda: distributed_mlp(has_shards=True),
    "collectives": lambda: fuser.Sequential(
        *(fuser.BasicLinear(WIDTH, WIDTH), fuser.AllGather(), fuser.GELU()),
        *(fuser.ReduceScatter(), fuser.AllReduce(reduce_in_backward=True)),
    ),
    "experts": lambda: experts(64),
    "experts without capacity": lambda: experts(None),
    "fully_shard": lambda: mlp(has_shards=False, is_parallel=False),
    "data parallel": lambda: mlp(has_shards=False, is_parallel=False),
}
IN_BLOCKS = ("fully_shard", "data parallel")


class Blocks(torch.nn.Module):
    """Three of them; with a router before each if they are experts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(MODELS[name]() for _ in range(3))
        self.router = torch.nn.Linear(WIDTH, EXPERTS) if name.startswith("experts") else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.router is None:
                x = x + block(x)
            else:
                probs, indices = self.router(x).softmax(-1).topk(2)
                x = x + block(x, indices, probs)
        return x


def steps(name: str, recipe: Any, rank: int, *, is_compiled: bool) -> list[torch.Tensor]:
    """Losses, gradients of inputs, and parameters, of some steps of SGD."""
    # On a GPU experts in fp32 read sizes on the host, which ends a graph.
    dtype = torch.bfloat16 if name.startswith("experts") else torch.float32
    model = Blocks(name).to(device_type(), dtype)
    function: Any = model
    if is_compiled and name in IN_BLOCKS:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    elif is_compiled:
        is_whole = name != "experts without capacity"
        function = torch.compile(model, backend="aot_eager", fullgraph=is_whole)
    if name == "fully_shard":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if name == "data parallel":
        function = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random, found = torch.Generator().manual_seed(10 + rank), []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, WIDTH, generator=random, device="cpu").to(device_type(), dtype)
        x.requires_grad_()
        with fuser.autocast(recipe=recipe) if recipe else contextlib.nullcontext():
            y = function(x)
        optimizer.zero_grad()
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), x.grad]
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    return [*found, *(p.detach().clone() for p in local)]


def compared(name: str, recipe: str, rank: int) -> dict[str, Any]:
    expected = steps(name, RECIPES[recipe](), rank, is_compiled=False)
    torch._dynamo.reset()
    counters.clear()
    found = steps(name, RECIPES[recipe](), rank, is_compiled=True)
    pairs = zip(found, expected, strict=True)
    return {
        "same": all(torch.equal(one, other) for one, other in pairs),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": [
            reason for reason in counters["graph_break"] if "outside of the graph" in reason
        ],
    }


def names() -> list[tuple[str, str]]:
    """Each model, with the recipes whose communication differs."""
    found = [(name, recipe) for name in MODELS for recipe in ("none", "current")]
    found += [(name, "delayed") for name in ("experts", "tensor parallel")]
    # Experts of different ranks would share scales.
    others = ("sequence parallel", "sequence parallel DTensors", *IN_BLOCKS)
    return found + [(name, recipe) for name in others for recipe in ("mxfp8", "delayed over ranks")]


def cases() -> dict[str, Any]:
    return {f"{n} [{r}]": functools.partial(compared, n, r) for n, r in names()}
