"""The price of computing tensors again in backward: steps with and without, interleaved.

A block, or a layer of experts, runs forward and backward in one CUDA graph, and launched: with a
plan that keeps every tensor, with the default plan, with one that keeps no copies of weights
either, and with one that keeps inputs of activations in FP8. Also the bytes held before backward.

    python benchmarks/rebuilt.py --out out/rebuilt.csv
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from evidence import Sink, progress, provenance, say
from options import new_parser, parsed
from pipelines import BF16, BLOCKS, RECIPES, USUAL, Sizes, with_fuser
from timing import Failure, clock, measure

import fuser

SIZES = {"cuda": (8192, 4096, 14336), "cpu": (64, 64, 128)}
# Of Qwen3-30B-A3B: tokens, hidden and intermediate size, experts, and experts of a token.
OF_EXPERTS = {"cuda": ((8192, 2048, 768), 128, 8), "cpu": ((64, 64, 32), 4, 2)}
WAYS = {
    "everything kept": fuser.activation_memory_budget(None),
    "budget 1": fuser.activation_memory_budget(1),
    "no weight copies": fuser.activation_memory_budget(1, keep_weight_copies=False),
    "lossy inputs": fuser.activation_memory_budget(1, lossy_activation_inputs=True),
    "budget 0": fuser.activation_memory_budget(0),
}
Arguments = tuple[torch.Tensor, ...]


def experts(sizes: Sizes, count: int, chosen: int, options: dict[str, Any]) -> Any:
    """A layer of experts, without its router, and its inputs after the tokens."""
    dispatch = fuser.MoeDispatch(count)
    for k, name in enumerate(("sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(k, name, output_to_caller=False)
    options = {"bias": False, "single_grouped_weight": True, **options}
    linear = functools.partial(fuser.GroupedLinear, num_groups=count, **options)
    hidden, intermediate = sizes.hidden, sizes.intermediate
    model = fuser.Sequential(
        dispatch,
        linear(in_features=hidden, out_features=2 * intermediate).set_extra_input_channel(
            0, "sizes"
        ),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        linear(in_features=intermediate, out_features=hidden).set_extra_input_channel(0, "sizes"),
        fuser.MoeCombine().set_extra_input_channel(0, "rows"),
    )
    scores = torch.rand(sizes.tokens, count, device=options["device"])
    probs, indices = scores.topk(chosen)
    return model, (indices, probs.to(options["dtype"]).requires_grad_())


def step_of(
    block: str,
    recipe: str,
    sizes: Sizes,
    device: str,
    budget: fuser.activation_memory_budget,
) -> tuple[Callable[[], None], int]:
    """A training step, warmed up, and the bytes held before its backward (on a GPU)."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    extras: Arguments = ()
    model, context = with_fuser(recipe, BLOCKS["gelu"], Sizes(1, 16, 16), options)
    if block == "experts":
        _, count, chosen = OF_EXPERTS[device]
        model, extras = experts(sizes, count, chosen, options)
    else:
        model, context = with_fuser(recipe, BLOCKS[block], sizes, options)
    x = torch.randn(sizes.tokens, sizes.hidden, requires_grad=True, **options)
    dy = torch.randn_like(x)
    held = [0]

    def step() -> None:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        with budget, context():
            y = model(x, *extras)
        if device == "cuda":
            held[0] = torch.cuda.memory_allocated() - before - y.nbytes
        y.backward(dy)
        for tensor in (x, *extras, *model.parameters()):
            tensor.grad = None

    for _ in range(4):
        step()
    return step, held[0]


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    names = ("tokens", "hidden", "intermediate")
    parser = new_parser(__doc__, dict.fromkeys(names, "of the blocks"))
    blocks = ["swiglu", "gelu", "experts"]
    parser.add_argument("--blocks", nargs="*", default=blocks, choices=blocks)
    parser.add_argument("--recipes", nargs="*", default=[BF16, *USUAL], choices=[BF16, *RECIPES])
    options = parsed(parser, argv, dict.fromkeys(names, ""))
    device = options.device
    defaults = dict(zip(names, SIZES[device], strict=True))
    sizes = Sizes(**{name: getattr(options, name) or defaults[name] for name in names})
    where = provenance(device, torch.bfloat16, options.commit)
    rows: list[dict[str, Any]] = []
    for block in options.blocks:
        own = Sizes(*OF_EXPERTS[device][0]) if block == "experts" else sizes
        for recipe in progress(options.recipes, block):
            ways = dict(WAYS)
            if recipe == BF16:
                del ways["no weight copies"]
            steps = {way: step_of(block, recipe, own, device, ways[way]) for way in ways}
            for timer in (True, False) if device == "cuda" else (False,):
                calls = {way: step for way, (step, _) in steps.items()}
                found = measure([calls], clock(device, is_captured=timer), rounds=options.rounds)
                kept = found["everything kept"]
                for way, result in found.items():
                    row = {"block": block, **vars(own), "recipe": recipe, "plan": way}
                    row["way"] = "graph" if timer else "launched"
                    row["held bytes"] = steps[way][1]
                    if isinstance(result, Failure):
                        rows.append(row | {"failure": result.reason})
                        continue
                    ratio = 0.0 if isinstance(kept, Failure) else result.median / kept.median
                    row |= {"ms": round(result.median * 1e3, 4), "/ kept": ratio, "failure": ""}
                    row["host ms"] = round(result.host * 1e3, 4)
                    rows.append(row)
                    say(
                        f"{block:<8}{recipe:<10}{row['way']:<10}{way:<18}{row['ms']:9.3f} ms "
                        f"{ratio:6.4f}  {row['held bytes'] / 1e6:9.1f} MB"
                    )
            del steps
            if device == "cuda":
                torch.cuda.empty_cache()
    Sink(options.out, where).write(rows)


if __name__ == "__main__":
    main()
