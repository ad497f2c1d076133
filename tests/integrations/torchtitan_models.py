"""A small Llama of torchtitan, and its training on ranks of gloo: with and without fuser."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import titan_like
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RANKS, device_type
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

VOCABULARY, HIDDEN, WIDTH, STEPS = 96, 64, 96, 3
Convert = Callable[[Any], Any]


def config(*, fuse_qkv: bool = True) -> Any:
    """Of two layers, with an attention that a CPU has."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=HIDDEN,
        n_heads=4,
        hidden_dim=WIDTH,
        fuse_qkv=fuse_qkv,
        rope=ComplexRoPE.Config(dim=HIDDEN // 4, max_seq_len=64, theta=500000, scaling="llama"),
        attn_backend="varlen",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    norm_init = {"weight": torch.nn.init.ones_}
    normal = {"weight": functools.partial(torch.nn.init.normal_, std=0.5)}
    found = llama3.Llama3Model.Config(
        dim=HIDDEN,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=HIDDEN, param_init=normal
        ),
        norm=RMSNorm.Config(normalized_shape=HIDDEN, param_init=norm_init),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=VOCABULARY, param_init=normal),
        layers=layers,
    )
    set_llama3_sharding_config(found, enable_sp=True)  # as its update_from_config does
    return found


def initialized(model: Any) -> Any:
    """A model that was built on meta, with values, as torchtitan's trainer gives them."""
    torch.manual_seed(0)
    model.to_empty(device=device_type())
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def tokens(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (2, 16), generator=generator)


@dataclass(frozen=True)
class Way:
    """How a model is trained: arguments of torchtitan's parallelize functions."""

    backend: str = "partial_dtensor"
    checkpointing: str | None = None
    is_compiled: bool = False
    dtype: str = "float32"
    tensor_parallel: int = 1


def parallelized(model: Any, way: Way) -> Any:
    """A model on meta after torchtitan's own function for a Llama."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.llama3 import parallelize_llama

    parallel_dims.device_type = device_type()
    utils.set_spmd_backend(way.backend)
    parallelism = ParallelismConfig(
        spmd_backend=way.backend, tensor_parallel_degree=way.tensor_parallel
    )
    ranks = dist.get_world_size()
    dims = ParallelDims.from_config(parallelism, ranks)
    dims.build_mesh()
    kinds = {"full": FullAC.Config, "selective": SelectiveAC.Config}
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=way.dtype),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=way.is_compiled, backend="aot_eager"),
        ac_config=kinds[way.checkpointing]() if way.checkpointing else None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # torchtitan sets 1, for which gloo has no sum
            module.set_gradient_divide_factor(float(ranks))
    return model


def trained(convert: Convert, way: Way, rank: int) -> Any:
    """Losses and parameters of a few steps, and how many pipelines each forward ran."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model = convert(config()).build()
    model.verify_module_protocol()
    model = initialized(parallelized(model, way))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, counts = [], []
    for step in range(STEPS):
        x = tokens(10 * step + rank).to(device_type())
        logits, count = titan_like.counted(model, x)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        counts.append(count)
    state = model.state_dict()
    return {
        "losses": losses,
        "state": {name: whole(value).detach().cpu() for name, value in state.items()},
        "counts": counts,
    }


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def unchanged(config: Any) -> Any:
    return config


def by_converter(config: Any, **options: Any) -> Any:
    from fuser.integrations.torchtitan import FuserConverter

    return FuserConverter.Config(**options).build().convert(config)


def by_override(config: Any, **options: Any) -> Any:
    from torchtitan.config.override import OverrideConfig, apply_overrides

    name = "fuser.integrations.torchtitan.fuser_blocks"
    apply_overrides(OverrideConfig(imports=[(name, options)]), config)
    return config


CONVERSIONS: dict[str, Convert] = {
    "plain": unchanged,
    "converter": by_converter,
    "override": by_override,
    "converter, fp8": functools.partial(by_converter, recipe="current"),
    "override, fp8": functools.partial(by_override, recipe="current"),
}
WAYS = {
    "sharded": Way(),
    "in bf16": Way(dtype="bfloat16"),
    "selectively checkpointed": Way(checkpointing="selective"),
    "checkpointed and compiled": Way(checkpointing="full", is_compiled=True),
}
SINGLE = {
    "torchtitan's default backend": Way("spmd_types"),
    "its default backend, compiled": Way("spmd_types", "selective", is_compiled=True),
}
REFUSED = {
    "tensor parallel": Way(tensor_parallel=RANKS),
    "tensor parallel, default backend": Way("spmd_types", tensor_parallel=RANKS),
    "full_dtensor": Way("full_dtensor"),
}


def cases() -> dict[str, Callable[[int], Any]]:
    """On several ranks."""
    ways = {
        f"{way}, {name}": (WAYS[way], CONVERSIONS[name]) for way in WAYS for name in CONVERSIONS
    }
    ways.update({way: (REFUSED[way], CONVERSIONS["converter"]) for way in REFUSED})
    return {name: functools.partial(trained, convert, way) for name, (way, convert) in ways.items()}


def single_cases() -> dict[str, Callable[[int], Any]]:
    """On one rank: torch 2.13 shards what torchtitan's default backend makes on one alone."""
    return {
        f"{way}, {name}": functools.partial(trained, CONVERSIONS[name], SINGLE[way])
        for way in SINGLE
        for name in CONVERSIONS
    }
