"""Train a small Llama of transformers as it is, converted, and converted under a recipe.

Needs ``pip install -e .[integrations]``. Prints the loss and the time of a step of each.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import fuser

RECIPES = {
    "current": fuser.recipe.Float8CurrentScaling,
    "delayed": fuser.recipe.DelayedScaling,
    "mxfp8": fuser.recipe.MXFP8BlockScaling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="current")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    for name in ("transformers", "converted", f"converted, {options.recipe}"):
        model = llama().to(options.device)
        if name != "transformers":
            recipe = RECIPES[options.recipe]() if "," in name else None
            report = fuser.convert(model, recipe=recipe)
            print(report)
        losses, seconds = trained(model, options.steps, options.device)
        print(
            f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {1000 * seconds:.1f} ms a step\n",
            flush=True,
        )


def llama() -> Any:
    """A Llama of 1.4 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    return LlamaForCausalLM(config)


def trained(model: Any, steps: int, device: str) -> tuple[list[float], float]:
    """The losses of steps on rows that count upwards, and the median time of one."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, times = [], []
    for _ in range(steps):
        start = torch.randint(256, (8, 1), generator=generator)
        tokens = ((start + torch.arange(64)) % 256).to(device)
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    return losses, sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
