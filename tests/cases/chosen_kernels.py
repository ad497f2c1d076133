"""The kernels that plans name on each GPU, as a text in ``golden/chosen_kernels.txt``.

``python tests/cases/chosen_kernels.py`` writes it: a plan that changes is a difference to review.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fuser
from fuser import recipe as recipes
from fuser.plan.devices import DEVICES

FILE = Path(__file__).parent.parent / "golden" / "chosen_kernels.txt"
HIDDEN, WIDTH, ROWS, GROUPS = 256, 512, 512, 4
OPTIONS: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}


def linear(inputs: int, outputs: int, **options: Any) -> fuser.Linear:
    return fuser.Linear(inputs, outputs, **{**OPTIONS, **options})


def gated() -> list[Any]:
    return [
        fuser.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        fuser.RMSNorm(HIDDEN, **OPTIONS),
        linear(HIDDEN, 2 * WIDTH, bias=False),
        fuser.SwiGLU(),
        linear(WIDTH, HIDDEN, bias=False),
        fuser.AddExtraInput().set_extra_input_channel(0, "x"),
    ]


def experts() -> list[Any]:
    grouped: dict[str, Any] = {"bias": False, "single_grouped_weight": True, **OPTIONS}
    return [
        fuser.GroupedLinear(GROUPS, HIDDEN, 2 * WIDTH, **grouped),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(GROUPS, WIDTH, HIDDEN, **grouped),
    ]


def adapters(**options: Any) -> Any:
    return fuser.LoRALinear(HIDDEN, HIDDEN, rank=16, **{**OPTIONS, **options})


def merged() -> Any:
    op = adapters(device="cpu")
    op.merge()
    return op.to("meta")


def quantized_experts() -> Any:
    with fuser.quantized_model_init(recipe=recipes.Float8CurrentScaling()):
        return fuser.GroupedLinear(GROUPS, HIDDEN, WIDTH, dtype=torch.bfloat16, device="cpu")


SPLITS = torch.empty(GROUPS, device="meta", dtype=torch.int64)
# Each with the shapes of its extra inputs.
PIPELINES: dict[str, tuple[Callable[[], list[Any]], tuple[torch.Tensor, ...]]] = {
    "gelu": (lambda: [linear(HIDDEN, WIDTH), fuser.GELU(), linear(WIDTH, HIDDEN)], ()),
    "gated": (gated, ()),
    "norm, linear, dropout": (
        lambda: [fuser.LayerNorm(HIDDEN, **OPTIONS), linear(HIDDEN, HIDDEN), fuser.Dropout(0.1)],
        (),
    ),
    "scale and add": (
        lambda: [linear(HIDDEN, HIDDEN), fuser.ConstantScale(0.5), fuser.AddExtraInput()],
        (torch.empty(ROWS, HIDDEN, **OPTIONS),),
    ),
    "pointwise": (lambda: [fuser.SiLU(), fuser.Bias(HIDDEN, **OPTIONS), fuser.GELU()], ()),
    "adapters": (lambda: [fuser.LoRALinear(HIDDEN, HIDDEN, rank=16, **OPTIONS)], ()),
    "fp32": (
        lambda: [linear(HIDDEN, WIDTH, dtype=torch.float32), fuser.GELU()],
        (),
    ),
    "experts": (
        experts,
        (
            SPLITS,
            torch.empty(ROWS, device="meta"),
            SPLITS,
        ),
    ),
    "one norm": (lambda: [fuser.L2Normalization()], ()),
    "one cached activation": (lambda: [fuser.GELU(cache_quantized_input=True)], ()),
    "one scaled activation": (
        lambda: [fuser.ScaledSwiGLU()],
        (torch.empty(ROWS, device="meta"),),
    ),
    "frozen linear": (
        lambda: [fuser.GELU(), linear(HIDDEN, HIDDEN).requires_grad_(False)],
        (),
    ),
    "quantize": (lambda: [fuser.Quantize(backward=True)], ()),
    "quantize gradients": (lambda: [fuser.Quantize(forward=False, backward=True)], ()),
    "adapters with dropout, trained bias": (lambda: [adapters(dropout=0.5)], ()),
    "adapters in fp32": (lambda: [adapters(dtype=torch.float32)], ()),
    "merged adapters": (lambda: [merged()], ()),
    "adapters of experts in fp32": (
        lambda: [
            fuser.LoRAGroupedLinear(
                GROUPS, HIDDEN, WIDTH, rank=16, adapter_dtype=torch.float32, **OPTIONS
            )
        ],
        (SPLITS,),
    ),
    "quantized experts with biases": (lambda: [quantized_experts()], (SPLITS,)),
}
RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "current, high_precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
    "current, dequantized": recipes.Float8CurrentScaling(backward_override="dequantized"),
    "rowwise": recipes.Float8RowwiseScaling(),
    "128-block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
FP32 = ("fp32", "adapters in fp32")
# GPUs without a device to plan for, by compute capability.
MORE = {"sm_89": (8, 9), "sm_103": (10, 3), "sm_121": (12, 1)}
# Pipelines whose plans are alike under the other recipes.
OTHERS = {
    "pointwise": ("none", "current"),
    "fp32": ("none", "current", "mxfp8"),
    "one norm": ("none",),
    "one cached activation": ("none", "current"),
    "one scaled activation": ("none", "current"),
    "frozen linear": ("none", "current"),
    "quantize": ("none", "current", "current, high_precision"),
    "quantize gradients": ("current", "current, high_precision"),
    "adapters with dropout, trained bias": ("none", "current"),
    "adapters in fp32": ("none", "current"),
    "merged adapters": ("none", "current"),
    "adapters of experts in fp32": ("none", "current"),
    "quantized experts with biases": ("current",),
}


def chosen(pipeline: str, recipe: str, arch: tuple[int, int]) -> str:
    """The steps of a training plan, each with what runs it and its kernels."""
    make, extras = PIPELINES[pipeline]
    ops = [op for module in make() for op in getattr(module, "basic_ops", [module])]
    if pipeline == "adapters":
        ops[0].weight.requires_grad_(False)
    if "trained bias" in pipeline:
        ops[0].bias.requires_grad_(True)
    dtype = torch.float32 if pipeline in FP32 else torch.bfloat16
    x = torch.empty(ROWS, HIDDEN, device="meta", dtype=dtype, requires_grad=True)
    given = RECIPES[recipe]
    with fuser.autocast(enabled=given is not None, recipe=given):
        _, plan = fuser.OperationFuser(ops).plan_for_gpu(arch, x, *extras)
    lines = []
    for side, steps in (("forward", plan.forward), ("backward", plan.backward)):
        for step in steps:
            where = "-".join(map(str, dict.fromkeys((step.ops[0], step.ops[-1]))))
            name = step.fusion or type(ops[step.ops[0]]).__name__
            lines.append(f"    {side:8}  {where:3}  {name}: {step.kernel or '(no kernel)'}\n")
    return "".join(lines)


def table() -> str:
    """All pipelines under all recipes; GPUs whose plans are equal are named together."""
    archs: dict[tuple[int, int], list[str]] = {}
    for name, arch in {**{name: device.arch for name, device in DEVICES.items()}, **MORE}.items():
        assert arch is not None
        archs.setdefault(arch, []).append(name)
    text = ""
    for pipeline, recipe in itertools.product(PIPELINES, RECIPES):
        if recipe not in OTHERS.get(pipeline, RECIPES):
            continue
        plans: dict[str, list[str]] = {}
        for arch, names in archs.items():
            plans.setdefault(chosen(pipeline, recipe, arch), []).extend(names)
        text += f"{pipeline}; recipe {recipe}\n"
        for plan, names in plans.items():
            text += f"  {', '.join(names)}\n{plan}"
    return text


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
