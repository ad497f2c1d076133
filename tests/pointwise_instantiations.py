"""The chains that the compile check and the tests use, and the kernels of these chains."""

from __future__ import annotations

import torch

from fuser.chain import ACTIVATIONS, STAGES, Stage, Stages
from fuser.cuda import pointwise
from fuser.cuda.arguments import ELEMENTS
from fuser.cuda.chain import chain_of
from fuser.cuda.launch import Kernel
from fuser.cuda.pointwise import (
    backward_kernel,
    backward_producer_type,
    forward_kernel,
    forward_producer_type,
)

GELU = (Stage("gelu"),)
GELU_ERF = (Stage("gelu_erf"),)
SWIGLU = (Stage("swiglu"),)
BIAS_SWIGLU = (Stage("bias"), Stage("swiglu"))
BIAS_GELU = (Stage("bias"), Stage("gelu"))
SCALED_SRELU = (Stage("srelu", is_scaled=True),)
SCALED_SWIGLU = (Stage("swiglu", is_scaled=True),)
LINEAR = (
    *(Stage("bias"), Stage("dropout", (0.3,))),
    *(Stage("constant_scale", (0.7,)), Stage("add_extra_input")),
)
TWO_HALVES = (Stage("silu"), Stage("add_extra_input"), Stage("geglu"), Stage("relu"))
EVERYTHING = (
    *(Stage("bias"), Stage("constant_scale", (0.7,)), Stage("swiglu", is_scaled=True)),
    *(Stage("dropout", (0.3,)), Stage("add_extra_input")),
)


def producer_types(
    stages: Stages,
    dtype: torch.dtype,
    *,
    aligned: bool = True,
    saved: int = 0,
    with_sums: bool = False,
    scales: torch.dtype = torch.float32,
    with_row_parts: bool = False,
) -> tuple[str, str]:
    """The C++ types of a chain's forward producer and of its backward producer."""
    scale_dtypes = tuple(scales if stage.is_scaled else None for stage in stages)
    forward = chain_of(stages, dtype, scale_dtypes)
    has_grad = tuple(with_row_parts and stage.is_scaled for stage in stages)
    backward = chain_of(stages, dtype, scale_dtypes, has_grad, saved)
    return (
        forward_producer_type(forward, aligned),
        backward_producer_type(backward, with_sums, aligned),
    )


def instantiations() -> tuple[Kernel, ...]:
    """The kernels that the tests compile and run; other chains are instantiated on demand.

    Every activation forward and backward in bf16, some chains in every dtype with and without
    vectors, and every kind of stage with the gradient of its operand.
    """
    bf16, fp32 = torch.bfloat16, torch.float32
    kernels = [*pointwise.instantiations()]

    def add(
        stages: Stages,
        dtype: torch.dtype,
        *,
        vectors: tuple[bool, ...] = (True,),
        with_grad: tuple[int, ...] = (),
        saved: int = 0,
        scales: torch.dtype = fp32,
        with_amax: bool = False,
    ) -> None:
        scale_dtypes = tuple(scales if stage.is_scaled else None for stage in stages)
        grads = tuple(i in with_grad for i in range(len(stages)))
        forward = chain_of(stages, dtype, scale_dtypes)
        backward = chain_of(stages, dtype, scale_dtypes, grads, saved)
        for has_vectors in vectors:
            vector = forward.widest if has_vectors else 1
            kernels.append(forward_kernel(forward, vector, with_amax))
            kernels.append(backward_kernel(backward, vector, with_amax, with_output=False))
            if backward.writes_output and not with_amax:
                kernels.append(backward_kernel(backward, vector, False, with_output=True))

    for name in ACTIVATIONS:
        add((Stage(name, (1.0,) * STAGES[name].scalars),), bf16)
    for dtype in ELEMENTS:
        add(GELU, dtype, vectors=(True, False))
        add(GELU_ERF, dtype)
        add(SWIGLU, dtype, vectors=(True, False))
        add(BIAS_GELU, dtype, vectors=(True, False), with_grad=(0,), saved=1)
    add(BIAS_SWIGLU, bf16, vectors=(True, False), with_grad=(0,))
    add(GELU, bf16, with_amax=True)
    add(BIAS_GELU, bf16, with_grad=(0,))
    add(BIAS_GELU, bf16, with_grad=(0,), saved=1, with_amax=True)
    add(SCALED_SRELU, bf16, with_grad=(0,), scales=bf16)
    add(SCALED_SWIGLU, bf16, with_grad=(0,))
    add(LINEAR, bf16, with_grad=(0, 3))
    add(TWO_HALVES, bf16, with_grad=(1,))
    for dtype in (bf16, fp32):
        add(SCALED_SWIGLU, dtype, vectors=(True, False), scales=dtype)
        add(EVERYTHING, dtype, vectors=(True, False), with_grad=(0, 2, 4))
    return tuple(kernels)
