"""Training in the order of torchtitan: built and converted on meta, wrapped, sharded, then filled.

The functions are written for these tests, which run without torchtitan.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import titan_like
import torch
import torch.nn.functional as F
from ranks import RANKS, device_type
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fuser

STEPS = 3


@contextlib.contextmanager
def on_meta(dtype: torch.dtype) -> Iterator[None]:
    """The contexts in which torchtitan builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def initialized(model: torch.nn.Module, device: str) -> torch.nn.Module:
    """A model that was built on meta, with random values that no rank or dtype changes."""
    model.to_empty(device=device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            full = torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5
            if "norm" in name:
                full = 1 + 0.1 * full
            copy_into(p, full)
    return model.train()


def copy_into(p: torch.Tensor, full: torch.Tensor) -> None:
    if isinstance(p, torch.distributed.tensor.DTensor):
        full = torch.distributed.tensor.distribute_tensor(
            full.to(p.device, p.dtype), p.device_mesh, p.placements
        )
    p.copy_(full)


def selective() -> Any:
    """Every second product is kept, as torchtitan's selective checkpointing does."""
    counts = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def wrapped(model: Any, checkpointing: str, is_compiled: bool, dtype: torch.dtype) -> None:
    """Checkpoint and compile each block, then shard the parts of the model."""
    for name, block in model.layers.named_children():
        if checkpointing:
            options = {"context_fn": selective} if checkpointing == "selective" else {}
            model.layers.register_module(
                name, checkpoint_wrapper(block, early_stop=False, **options)
            )
        if is_compiled:
            model.layers[name].compile(backend="aot_eager", fullgraph=True)
    mesh = init_device_mesh(device_type(), (RANKS,))
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    parts = [model.tok_embeddings, *model.layers.values(), [model.norm, model.lm_head], model]
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=policy)


def trained(
    options: dict[str, Any] | None,
    checkpointing: str,
    is_compiled: bool,
    dtype: torch.dtype,
    rank: int,
) -> Any:
    """Losses and the state of a few steps, and how many pipelines each forward ran."""
    torch._dynamo.reset()
    with on_meta(torch.float32):
        model = titan_like.TitanLike()
        if options is not None:
            fuser.convert(model, **options)
    wrapped(model, checkpointing, is_compiled, dtype)
    initialized(model, device_type())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, counts = [], []
    for step in range(STEPS):
        x = titan_like.tokens(seed=10 * step + rank).to(device_type())
        logits, count = titan_like.counted(model, x)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        counts.append(count)
    state: dict[str, Any] = model.state_dict()
    return {
        "losses": losses,
        "state": {name: value.full_tensor().cpu() for name, value in state.items()},
        "counts": counts,
    }


WAYS = {
    "sharded": ("", False, torch.float32),
    "in bf16": ("", False, torch.bfloat16),
    "checkpointed": ("full", False, torch.float32),
    "selectively checkpointed": ("selective", False, torch.float32),
    "compiled": ("", True, torch.float32),
    "checkpointed and compiled": ("full", True, torch.float32),
}
CONVERSIONS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "converted": {},
    "fp8": {"recipe": fuser.recipe.Float8CurrentScaling()},
}


PLAIN = ("sharded", "in bf16")
"""Ways whose model without fuser runs: checkpoints and graphs change no value of one."""


def plain_of(way: str) -> str:
    """The case of the model without fuser that a way is compared with."""
    return f"{way if way in PLAIN else PLAIN[0]}, plain"


def cases() -> dict[str, Callable[[int], Any]]:
    return {
        f"{way}, {name}": functools.partial(trained, CONVERSIONS[name], *WAYS[way])
        for way in WAYS
        for name in CONVERSIONS
        if name != "plain" or way in PLAIN
    }
