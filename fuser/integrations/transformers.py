"""Experts of transformers on fuser: importing this registers ``experts_implementation="fuser"``."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fuser.conversion.experts import experts_chain
from fuser.conversion.leaves import activation_like
from fuser.conversion.unit import ChainPipeline
from fuser.errors import StateError

_PIPELINE = "_fuser_experts"


def experts_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of a module of experts of transformers, as one pipeline.

    Parameters
    ----------
    experts
        A module with ``gate_up_proj``, ``[experts, 2 * width, hidden]``, and ``down_proj``,
        ``[experts, hidden, width]``.
    hidden_states
        ``[tokens, hidden]``.
    top_k_index, top_k_weights
        ``[tokens, k]``: the experts of each token, where the number of experts itself stands for
        none, and the factors of their outputs.

    Raises
    ------
    StateError
        If the experts are no gated ones with SiLU, or have biases or another layout.
    """
    pipeline: ChainPipeline | None = experts.__dict__.get(_PIPELINE)
    if pipeline is None:
        _check(experts)
        pipeline = ChainPipeline(experts_chain(experts, "gate_up_proj", "down_proj"), experts)
        experts.__dict__[_PIPELINE] = pipeline
    refusal = pipeline.chain.refusal(experts)
    if refusal is not None:
        raise StateError(
            f'experts_implementation="fuser" cannot run {type(experts).__name__}: {refusal}. '
            'Use "grouped_mm" or "eager".'
        )
    y: torch.Tensor = pipeline(
        experts, [hidden_states, top_k_index, top_k_weights], is_quantized=True
    )
    return y


def _check(experts: Any) -> None:
    known = activation_like(experts.act_fn) if hasattr(experts, "act_fn") else None
    custom = getattr(type(experts), "_apply_gate", None)
    has_own_gate = custom is not None and custom.__module__ != ALL_EXPERTS_FUNCTIONS.__module__
    facts = {
        "it has no gate": not getattr(experts, "has_gate", True),
        "it has biases": getattr(experts, "has_bias", False),
        "its weights are [in, out]": getattr(experts, "is_transposed", False),
        "gate and up alternate": not getattr(experts, "is_concatenated", True),
        "it has a norm after each expert": getattr(experts, "has_post_expert_norm", False),
        "it has a gate of its own": has_own_gate,
        "its activation is not SiLU": known is None or known.op != "SiLU",
    }
    for sentence, is_so in facts.items():
        if is_so:
            raise StateError(
                f'experts_implementation="fuser" cannot run {type(experts).__name__}: {sentence}. '
                'Use "grouped_mm" or "eager".'
            )


ALL_EXPERTS_FUNCTIONS.register("fuser", experts_forward)
