"""Training steps of sharded models, converted and not: each runs on a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import titan_like
import torch
import torch.nn.functional as F
from ranks import RANKS, device_type
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fuser

STEPS = 3


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.get_submodule("layers").children())


def replicated(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model)


def sharded(model: torch.nn.Module, parts: str, **options: Any) -> torch.nn.Module:
    mesh = init_device_mesh(device_type(), (RANKS,))
    for layer in layers_of(model):
        if parts == "feed forwards":
            fully_shard(layer.get_submodule("feed_forward"), mesh=mesh, **options)
        if parts != "root":
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def tensor_parallel(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh(device_type(), (RANKS,))
    for layer in layers_of(model):
        styles = {
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, styles)
    return model


WRAPPERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "DDP": replicated,
    "FSDP2 layers": functools.partial(sharded, parts="layers"),
    "FSDP2 kept whole": functools.partial(sharded, parts="layers", reshard_after_forward=False),
    "FSDP2 feed forwards": functools.partial(sharded, parts="feed forwards"),
    "FSDP2 root": functools.partial(sharded, parts="root"),
    "tensor parallel": tensor_parallel,
}
ORDERS = ("convert first", "wrap first")


def steps(wrap: Callable[[torch.nn.Module], torch.nn.Module], order: str, rank: int) -> Any:
    """The losses and parameters of a few steps, and how many pipelines a forward ran."""
    torch.manual_seed(0)
    model: torch.nn.Module = titan_like.TitanLike().to(device_type())
    if order == "convert first":
        fuser.convert(model)
    model = wrap(model)
    if order == "wrap first":
        fuser.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, counts = [], []
    for step in range(STEPS):
        model.train()  # as training loops do, also in the middle of training
        tokens = titan_like.tokens(seed=10 * step + rank).to(device_type())
        logits, count = titan_like.counted(model, tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        counts.append(count)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {"losses": losses, "parameters": [p.detach().cpu() for p in whole], "counts": counts}


def cases() -> dict[str, Callable[[int], Any]]:
    return {
        f"{name}, {order}": functools.partial(steps, wrap, order)
        for name, wrap in WRAPPERS.items()
        for order in ("not converted", *ORDERS)
    }
