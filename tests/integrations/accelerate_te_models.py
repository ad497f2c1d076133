"""accelerate's ``mixed_precision="fp8"`` on the layers of fuser.te, as cases of ranks.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import fuser.te

STEPS = 4
KWARGS: dict[str, dict[str, Any]] = {
    "delayed": {"fp8_format": "HYBRID", "amax_history_len": 4, "amax_compute_algo": "max"},
    "mxfp8": {"fp8_format": "E4M3", "use_mxfp8_block_scaling": True},
}


def train(rank: int) -> dict[str, Any]:
    """Losses in fp32 and by recipe, and what accelerate made of the model."""
    warnings.simplefilter("ignore")
    fuser.te.install()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TERecipeKwargs, has_transformer_engine_layers
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(2))
    results: dict[str, Any] = {}
    for name in (None, *KWARGS):
        AcceleratorState._reset_state(reset_partial_state=True)
        precision: dict[str, Any] = {}
        if name is not None:
            precision = {
                "mixed_precision": "fp8",
                "kwargs_handlers": [TERecipeKwargs(**KWARGS[name])],
            }
        accelerator = Accelerator(cpu=True, **precision)
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(sizes)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for _ in range(STEPS):
            output = model(input_ids=tokens, labels=tokens)
            accelerator.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(output.loss.detach()))
        plain = accelerator.unwrap_model(model)
        results[name or "fp32"] = {
            "losses": losses,
            "has layers": has_transformer_engine_layers(plain),
            "down": type(plain.model.layers[0].mlp.down_proj).__module__,
            "keys": sorted(k for k in plain.state_dict() if not k.endswith("_extra_state")),
        }
    results["missing"] = fuser.te.missing()
    return results


def cases() -> dict[str, Callable[[int], Any]]:
    return {"train": train}
