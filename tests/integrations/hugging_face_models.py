"""Small models of transformers with their inputs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

VOCABULARY = 96
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# The classes of the config and of the model, and what the config gets beside TEXT.
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama with biases": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "Mistral": ("Mistral", {"head_dim": 16}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Gemma": ("Gemma", {"head_dim": 16}),
    "Gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "Phi3": ("Phi3", {}),
    "Starcoder2": ("Starcoder2", {"residual_dropout": 0.1}),
    "Seed-OSS": ("SeedOss", {"head_dim": 16, "residual_dropout": 0.1}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "Qwen3-MoE": ("Qwen3Moe", {**EXPERTS, "head_dim": 16}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "OPT": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}


def config_of_experts(implementation: str) -> Any:
    """What the classes of experts read of a config."""
    return types.SimpleNamespace(
        num_local_experts=4,
        moe_num_experts=4,
        hidden_size=32,
        intermediate_size=48,
        hidden_act="silu",
        swiglu_alpha=1.702,
        swiglu_limit=1.5,
        _experts_implementation=implementation,
    )


def causal(name: str, **options: Any) -> torch.nn.Module:
    """A causal language model, of two layers unless ``options`` say otherwise."""
    import transformers

    family, own = CAUSAL[name]
    config = getattr(transformers, f"{family}Config")(**(TEXT | own | options))
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model


def gpt2() -> torch.nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bloom() -> torch.nn.Module:
    import transformers

    config = transformers.BloomConfig(
        hidden_size=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.BloomForCausalLM(config)
    return model


def bert() -> torch.nn.Module:
    import transformers

    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {key: TEXT[key] for key in (*keys, "vocab_size", "max_position_embeddings")}
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    return model


def vit() -> torch.nn.Module:
    import transformers

    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {key: TEXT[key] for key in keys}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=8)
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.ViTForImageClassification(config)
    return model


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    **{name: functools.partial(causal, name) for name in CAUSAL},
    "GPT-2": gpt2,
    "BLOOM": bloom,
    "BERT": bert,
    "ViT": vit,
}
"""Every model of the tests, in evaluation after ``MODELS[name]().eval()``."""


def inputs_of(name: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Inputs of a model."""
    generator = torch.Generator().manual_seed(seed)
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": tokens}


def logits_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of a model."""
    output = model(**inputs)
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits
