"""Epilogues of a linear's GEMMs: what they can do besides the product, or why they cannot.

Keys begin with the linear.
"""

from __future__ import annotations

import torch

from fuser.basic_ops.basic_linear import BasicLinear
from fuser.basic_ops.linear_operands import gemm_name, native_row
from fuser.communication import is_distributed
from fuser.cuda import cublaslt
from fuser.specs import PlanKey

EMULATED_GEMM = "the quantized GEMM is emulated here, and has no epilogue."


def has_cublaslt(key: PlanKey) -> bool:
    """Whether cuBLASLt can be called without torch on the device of ``key``."""
    return key.is_elsewhere or cublaslt.library(key.device) is not None


def bias_refusal(linear: BasicLinear, key: PlanKey, bias: torch.Tensor) -> str | None:
    """The reason why ``bias`` cannot be an epilogue of the forward GEMM; None if it can."""
    compute = linear._compute_dtype(key)
    if linear._parallel is not None and linear._parallel.mode == "row":
        return "the products of the ranks are added first, and the bias after that."
    if key.recipe is not None:
        row = native_row("input", "weight", key, linear.quantizer_format)
        if row is None:
            return EMULATED_GEMM
        if compute == torch.float32:
            return f"{row.name} takes no bias in {compute}."
    if key.autocast_dtype is None and linear.weight.dtype != bias.dtype:
        return f"the weight is {linear.weight.dtype} and the bias {bias.dtype}."
    # A plan sees whole DTensors, a call the parts of this rank.
    outputs = linear.out_features if is_distributed(bias) else linear.local_out_features
    if bias.numel() != outputs:
        return f"the linear has {outputs} outputs and the bias {bias.numel()}."
    return None


def biased_gemm(linear: BasicLinear, key: PlanKey) -> str:
    """The name of the forward GEMM with a bias as its epilogue."""
    return "addmm" if key.recipe is None else linear.kernels("forward", key.window(0, 1))[0]


def addend_refusal(linear: BasicLinear, side: str, key: PlanKey) -> str | None:
    """The reason why the forward GEMM, or dgrad, cannot add a tensor; None if it can."""
    reason = parallel_refusal(linear, side)
    if reason is not None:
        return reason
    if key.recipe is None or (side == "backward" and not key.recipe.quantizes_backward):
        return None
    role = "input" if side == "forward" else "grad_output"
    row = native_row(role, "weight", key, linear.quantizer_format)
    if row is None:
        return EMULATED_GEMM
    if not has_cublaslt(key):
        return f"{row.name} takes no addend: torch has it, and no cuBLASLt could be loaded."
    return None


def parallel_refusal(linear: BasicLinear, side: str) -> str | None:
    """The reason why the ranks of a parallel linear cannot add a tensor to their products."""
    if linear._parallel is None or (side == "backward" and linear._parallel.mode == "row"):
        return None
    return (
        f"the linear is {linear._parallel.mode} parallel over {linear._parallel.ranks} ranks, and "
        "a tensor is not added on each."
    )


def added_gemm(linear: BasicLinear, side: str, key: PlanKey) -> str:
    """The name of the forward GEMM, or dgrad, which also adds a tensor."""
    prefix = "" if side == "forward" else "dgrad "
    if key.recipe is None or (side == "backward" and not key.recipe.quantizes_backward):
        return f"{prefix}addmm"
    role = "input" if side == "forward" else "grad_output"
    name = gemm_name(f"{prefix}mm", role, "weight", key, linear.quantizer_format)
    return name.replace("mm (", "addmm (")


def adds_in_gemm(linear: BasicLinear, key: PlanKey) -> bool:
    """Whether cuBLASLt makes the forward GEMM, and adds a bias and a tensor, also one in fp32."""
    is_narrow = linear._compute_dtype(key) in (torch.float16, torch.bfloat16)
    return is_narrow and has_cublaslt(key) and addend_refusal(linear, "forward", key) is None


def grad_scale_refusal(linear: BasicLinear, key: PlanKey) -> str | None:
    """The reason why the backward GEMMs cannot scale the output's gradient; None if they can."""
    recipe, op = key.recipe, key.ops[0]
    if recipe is None or not recipe.quantizes_backward:
        return None
    if recipe.delayed() or recipe.custom():
        # Quantizing dy without the scale would record the amax of another tensor.
        name = type(recipe).__name__
        return f"{name} may record the amax of scale * dy, and here dy would be quantized."
    readers = {"weight": op.input_requires_grad, "input": op.params[0].requires_grad}
    roles = [role for role, is_read in readers.items() if is_read]
    rows = [native_row("grad_output", role, key, linear.quantizer_format) for role in roles]
    return EMULATED_GEMM if None in rows else None
