"""Names and arguments of other libraries that fuser does not have, for the errors about them."""

from __future__ import annotations

import inspect
import sys

_NOT_HERE = {
    **dict.fromkeys(
        ("LayerNormLinear", "LayerNormMLP"), "it is fuser.modules.{name}, where te's modules are"
    ),
    **dict.fromkeys(
        ("TransformerLayer", "MultiheadAttention", "DotProductAttention"),
        "this library has no attention",
    ),
    "moe_permute": "it is fuser.moe.permute, and in a pipeline the op fuser.MoeDispatch",
    "moe_unpermute": "it is fuser.moe.unpermute, and in a pipeline the op fuser.MoeCombine",
    **dict.fromkeys(
        ("FusedAdam", "FusedSGD"),
        "it is in fuser.te.pytorch.optimizers; torch.optim takes this library's parameters too",
    ),
    # torchao, Liger Kernel, and short names of formats: docs/migrate.md.
    **dict.fromkeys(
        ("convert_to_float8_training", "quantize_", "apply_fp8_autowrap", "fp8_autowrap"),
        "it is fuser.convert(model, recipe=fuser.recipe.Float8CurrentScaling())",
    ),
    "Float8LinearConfig": "a recipe of fuser.recipe says it, in fuser.convert(model, recipe=...)",
    **dict.fromkeys(
        ("apply_to_llama", "apply_liger_kernel_to_llama", "AutoLigerKernelForCausalLM"),
        "fuser.convert(model) finds what it can run, in models of any family",
    ),
    "FP8": "it is fuser.recipe.Float8CurrentScaling",
    "MXFP8": "it is fuser.recipe.MXFP8BlockScaling",
    "NVFP4": "it is fuser.recipe.NVFP4BlockScaling",
    "FusedLayerNorm": "it is fuser.LayerNorm",
    "FusedRMSNorm": "it is fuser.RMSNorm",
}


def instead_of(name: str) -> str:
    """What is here instead of a name of another library; empty if ``name`` is none."""
    return _NOT_HERE.get(name, "").format(name=name)


def hint_of(name: str, argument: str) -> str:
    """What to write instead of an argument of Transformer Engine that ``name`` does not take."""
    hint = "That is dtype here." if (name, argument) == ("Linear", "params_dtype") else ""
    layer = getattr(sys.modules.get("fuser.modules"), name, None)
    if layer is not None and argument in inspect.signature(layer).parameters:
        hint = f"{hint} fuser.modules.{name} takes the arguments of te.{name}.".lstrip()
    return hint
