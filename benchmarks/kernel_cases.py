"""The table of memory-bound kernels: bytes and operations of each, and calls of each variant."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import plain_torch as plain
import torch
from peers import Calls, compiled, in_torch, liger, te_quantizer, torchao, transformer_engine
from plain_torch import E4M3, EPS
from timing import Call

from fuser.chain import Stage
from fuser.cuda import (
    fp8_scaling,
    mxfp8,
    normalization,
    normalization_backward,
    permutation,
    pointwise,
)
from fuser.cuda.launch import kernels_support
from fuser.formats import MXFP8_BLOCK, MXFP8_SWIZZLED, NumberFormat, mxfp8_scale_shape
from fuser.functional import normalization as norm_ops
from fuser.functional import pointwise as ops
from fuser.functional.amax import amax as amax_of
from fuser.functional.delayed_scaling import update_delayed
from fuser.functional.grouped import padded_groups, padded_rows
from fuser.functional.lazy import LazyTensor, materialize
from fuser.functional.permutation import gathered_rows
from fuser.functional.permutation import permute as permute_rows
from fuser.reference import mxfp8 as mxfp8_reference
from fuser.reference import normalization as norms
from fuser.reference import permutation as permutation_reference
from fuser.reference.activation import activation, activation_backward
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fuser.tensors.group_formats import Float8GroupsQuantizer

STATES, HISTORY = 100, 1024
EXPERTS = 64
# Default rows and columns. The blocks of all formats divide those of the CPU.
SHAPES = {"cuda": (16384, 14336), "cpu": (256, 256)}


class Inputs:
    """Makes a row's tensors: ``[M, K]`` in ``dtype`` on ``device``, random by ``seed``."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: str, seed: int) -> None:
        self.M, self.K, self.dtype, self.device = rows, columns, dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normally distributed values, ``[M, K]`` without a shape."""
        return torch.randn(
            shape or (self.M, self.K),
            generator=self.generator,
            device=self.device,
            dtype=dtype or self.dtype,
        )

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An output, ``[M, K]`` without a shape."""
        return torch.empty(shape or (self.M, self.K), device=self.device, dtype=dtype or self.dtype)

    def kernel(self, launch: Call, reference: Call) -> Call:
        """A launch, or its reference if kernels do not run."""
        return launch if kernels_support(self.empty(1)) else reference


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Parameters
    ----------
    name
        The computation.
    make
        A function that returns the variants' calls on one set of inputs, fuser's first.
    moves
        Bytes that must move for an element of ``[M, K]``: a formula in ``b`` (bytes of an
        element), ``M`` and ``K``.
    flop
        Operations per element, in the same form; a transcendental counts as one.
    target
        The target, as a fraction of the copy bandwidth; None without a target.
    columns
        K, if it is not the table's.
    rows
        M, if it is not the table's.
    """

    name: str
    make: Callable[[Inputs], Calls]
    moves: str
    flop: str
    target: float | None = None
    columns: int | None = None
    rows: int | None = None

    def per_element(self, formula: str, inputs: Inputs) -> float:
        """The value of one of the row's formulas."""
        names = {"b": inputs.dtype.itemsize, "M": inputs.M, "K": inputs.K}
        return float(eval(formula, {"__builtins__": {}}, names))


# -- activations --------------------------------------------------------------

SWIGLU = (Stage("swiglu"),)
GELU = (Stage("gelu"),)
BIAS_GELU = (Stage("bias"), Stage("gelu"))


def swiglu(inputs: Inputs) -> Calls:
    x, y = inputs.normal(inputs.M, 2 * inputs.K), inputs.empty()

    def with_liger(ops: Any) -> Call:
        gate, linear = (part.contiguous() for part in x.chunk(2, -1))
        return lambda: ops.swiglu_forward(gate, linear)

    return {
        "fuser": inputs.kernel(
            lambda: pointwise.pointwise(SWIGLU, x, (None,), y),
            lambda: activation(Stage("swiglu"), x),
        ),
        **in_torch(plain.swiglu, x),
        **liger("swiglu", with_liger),
        **transformer_engine(lambda tex: lambda: tex.swiglu(x, None)),
    }


def swiglu_backward(inputs: Inputs) -> Calls:
    x, dy = inputs.normal(inputs.M, 2 * inputs.K), inputs.normal()
    dx = inputs.empty(inputs.M, 2 * inputs.K)
    return {
        "fuser": inputs.kernel(
            lambda: pointwise.pointwise_backward(SWIGLU, dy, x, (None,), dx, (None,)),
            lambda: activation_backward(Stage("swiglu"), dy, x),
        ),
        **in_torch(plain.swiglu_backward, dy, x),
        **transformer_engine(lambda tex: lambda: tex.dswiglu(dy, x, None)),
    }


def gelu(inputs: Inputs) -> Calls:
    x, y = inputs.normal(), inputs.empty()
    return {
        "fuser": inputs.kernel(
            lambda: pointwise.pointwise(GELU, x, (None,), y),
            lambda: activation(Stage("gelu"), x),
        ),
        **in_torch(plain.gelu, x),
        **transformer_engine(lambda tex: lambda: tex.gelu(x, None)),
    }


def bias_gelu(inputs: Inputs) -> Calls:
    x, bias, y = inputs.normal(), inputs.normal(inputs.K), inputs.empty()
    return {
        "fuser": inputs.kernel(
            lambda: pointwise.pointwise(BIAS_GELU, x, (bias, None), y),
            lambda: activation(Stage("gelu"), x + bias),
        ),
        **in_torch(plain.bias_gelu, x, bias),
    }


def bias_gelu_backward(inputs: Inputs) -> Calls:
    x, dy, bias = inputs.normal(), inputs.normal(), inputs.normal(inputs.K)
    dx, dbias = inputs.empty(), inputs.empty(inputs.K)
    size = pointwise.workspace_size(BIAS_GELU, inputs.M, inputs.K, inputs.dtype, (True, False))
    workspace = inputs.empty(size, dtype=torch.float32)

    def launch() -> None:
        pointwise.pointwise_backward(BIAS_GELU, dy, x, (bias, None), dx, (dbias, None), workspace)

    return {
        "fuser": inputs.kernel(
            launch, lambda: activation_backward(Stage("gelu"), dy, x + bias).sum(0)
        ),
        **in_torch(plain.bias_gelu_backward, dy, x, bias),
        # Without the addition before the activation, which costs nothing.
        **transformer_engine(lambda tex: lambda: tex.dbias_dgelu(dy, x, None)),
    }


# -- FP8 with one scale a tensor ----------------------------------------------


def amax(inputs: Inputs) -> Calls:
    x = inputs.normal()
    return {"fuser": lambda: amax_of(x), **in_torch(plain.eager_amax, x, compile_as=plain.amax)}


def current(inputs: Inputs, *, columnwise: bool) -> Calls:
    x, quantizer = inputs.normal(), Float8CurrentScalingQuantizer(columnwise=columnwise)
    return {
        "fuser": lambda: quantizer.buffers_of(x),
        **in_torch(plain.current_row_col if columnwise else plain.current_row, x),
        **te_quantizer(
            "float8_tensor:Float8CurrentScalingQuantizer",
            x,
            device=inputs.device,
            rowwise=True,
            columnwise=columnwise,
        ),
    }


def delayed(inputs: Inputs) -> Calls:
    x, largest = inputs.normal(), torch.zeros(1, device=inputs.device)
    scale = torch.full((1,), 64.0, device=inputs.device)
    quantizer = Float8Quantizer(scale, largest)
    return {
        "fuser": lambda: quantizer.buffers_of(x),
        **in_torch(plain.delayed, x, scale),
        **te_quantizer(
            "float8_tensor:Float8Quantizer",
            x,
            scale=scale,
            amax=largest.clone(),
            rowwise=True,
            columnwise=True,
        ),
    }


def dequantize(inputs: Inputs) -> Calls:
    tensor: Any = Float8CurrentScalingQuantizer(columnwise=False)(inputs.normal())
    return {
        "fuser": tensor.dequantize,
        **in_torch(plain.dequantize, tensor._rowwise_data, tensor._scale_inv),
    }


def transpose(inputs: Inputs) -> Calls:
    data = inputs.normal().to(torch.float8_e4m3fn).view(torch.uint8)
    out = torch.empty(data.shape[::-1], dtype=data.dtype, device=data.device)
    launch = inputs.kernel(
        lambda: fp8_scaling.transpose(data, out=out), lambda: plain.transpose(data)
    )
    return {"fuser": launch, **in_torch(plain.transpose, data)}


def delayed_update(inputs: Inputs) -> Calls:
    count = inputs.K
    stored = inputs.normal(count, inputs.M, 1, dtype=torch.float32).abs_()
    histories, stacked = list(stored), stored[:, :, 0].t().clone()
    scales = list(torch.ones(count, device=inputs.device).split(1))
    largest = torch.full((count,), E4M3.max, device=inputs.device)
    maxima, scale = list(largest.split(1)), torch.ones_like(largest)

    # An update sets the place of the next step's amax to 0, and skips a tensor without one, so
    # that both variants write amaxes first: one more kernel each.
    def update() -> None:
        stored[:, 0].fill_(1.0)
        update_delayed(histories, scales, maxima)

    def in_eager() -> None:
        stacked[0].fill_(1.0)
        most = stacked.amax(0)
        scale.copy_(torch.where(most > 0, E4M3.max / most, scale))
        rolled = stacked.roll(-1, 0)
        rolled[0].zero_()
        stacked.copy_(rolled)

    return {"fuser": update, "eager": in_eager}


# -- blocks -------------------------------------------------------------------


def blocks_of_128(inputs: Inputs, *, block_dim: Literal[1, 2]) -> Calls:
    x, quantizer = inputs.normal(), Float8BlockQuantizer(block_scaling_dim=block_dim)
    return {
        "fuser": lambda: quantizer.buffers_of(x),
        **in_torch(plain.blocks_1x128 if block_dim == 1 else plain.blocks_128x128, x),
        **te_quantizer(
            "float8_blockwise_tensor:Float8BlockQuantizer",
            x,
            rowwise=True,
            columnwise=True,
            block_scaling_dim=block_dim,
        ),
    }


def dequantize_blocks_of_128(inputs: Inputs, *, columnwise: bool) -> Calls:
    tensor: Any = Float8BlockQuantizer(
        rowwise=not columnwise, columnwise=columnwise, block_scaling_dim=1
    )(inputs.normal())
    calls: Calls = {"fuser": tensor.dequantize}
    if not columnwise:
        data, scale = tensor._rowwise_data, tensor._rowwise_scale_inv
        calls |= in_torch(plain.dequantize_rows, data, scale[:, : inputs.M].t())
    return calls


def mxfp8_copies(inputs: Inputs, *, square: bool = False) -> Calls:
    x, quantizer = inputs.normal(), MXFP8Quantizer(with_2d_quantization=square)
    calls: Calls = {
        "fuser": lambda: quantizer.buffers_of(x),
        **in_torch(plain.mxfp8_square if square else plain.mxfp8, x),
    }
    if square:
        return calls
    calls |= torchao(
        "prototype.mx_formats",
        lambda formats: (
            lambda: (
                compiled(formats("mx_tensor").to_mx)(x, torch.float8_e4m3fn, 32),
                formats("kernels").triton_to_mxfp8_dim1(x, 32),
            )
        ),
    )
    return calls | te_quantizer("mxfp8_tensor:MXFP8Quantizer", x, rowwise=True, columnwise=True)


def mxfp8_swizzled(inputs: Inputs) -> Calls:
    x, (m, k) = inputs.normal(), (inputs.M, inputs.K)
    row, col = (inputs.empty(dtype=torch.uint8) for _ in range(2))
    row_scale = inputs.empty(*mxfp8_scale_shape(m, k, False), dtype=torch.uint8)
    col_scale = inputs.empty(*mxfp8_scale_shape(m, k, True)[::-1], dtype=torch.uint8)

    def launch() -> None:
        mxfp8.quantize(
            NumberFormat("MXFP8", E4M3, MXFP8_SWIZZLED, MXFP8_BLOCK),
            x,
            {
                "_rowwise_data": row,
                "_rowwise_scale_inv": row_scale,
                "_columnwise_data": col,
                "_columnwise_scale_inv": col_scale,
            },
        )

    return {"fuser": inputs.kernel(launch, lambda: mxfp8_reference.quantize(x, E4M3))}


def dequantize_mxfp8(inputs: Inputs) -> Calls:
    tensor: Any = MXFP8Quantizer(columnwise=False)(inputs.normal())
    scale = tensor._rowwise_scale_inv[: inputs.M, : inputs.K // 32]
    return {
        "fuser": tensor.dequantize,
        **in_torch(plain.dequantize_rows, tensor._rowwise_data, scale),
    }


def nvfp4_copies(inputs: Inputs, **options: Any) -> Calls:
    x, quantizer = inputs.normal(), NVFP4Quantizer(**options)
    return {
        "fuser": lambda: quantizer.buffers_of(x),
        **te_quantizer(
            "nvfp4_tensor:NVFP4Quantizer",
            x,
            columnwise=options.get("columnwise", True),
            with_rht=options.get("with_rht", False),
            with_post_rht_amax=options.get("with_rht", False),
            with_2d_quantization=options.get("with_2d_quantization", False),
            stochastic_rounding=options.get("stochastic_rounding", False),
        ),
    }


def dequantize_nvfp4(inputs: Inputs, *, columnwise: bool) -> Calls:
    quantizer = NVFP4Quantizer(rowwise=not columnwise, columnwise=columnwise)
    return {"fuser": quantizer(inputs.normal()).dequantize}


# -- norms --------------------------------------------------------------------


def norm_workspace(x: torch.Tensor, *, has_beta: bool) -> torch.Tensor | None:
    if not kernels_support(x):
        return None
    shape = normalization_backward.workspace_shape(x, has_beta=has_beta)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def rmsnorm(inputs: Inputs) -> Calls:
    x, gamma, y = inputs.normal(), inputs.normal(inputs.K), inputs.empty()
    rstd, gain = inputs.empty(inputs.M, dtype=torch.float32), gamma.float()
    tensors = normalization.Forward(x, gamma=gamma, y=y, rstd=rstd)
    return {
        "fuser": inputs.kernel(
            lambda: normalization.norm_forward(tensors, eps=EPS),
            lambda: norms.rmsnorm(x, gain, EPS, x.dtype),
        ),
        **in_torch(plain.rmsnorm, x, gamma),
        **liger(
            "rms_norm",
            lambda ops: lambda: ops.rms_norm_forward(x, gamma, EPS, 0.0, "llama", None),
        ),
        **transformer_engine(
            lambda tex: (
                lambda: tex.rmsnorm_fwd(x, gamma, EPS, None, None, tex.DType.kBFloat16, 0, False)
            )
        ),
    }


def layernorm(inputs: Inputs) -> Calls:
    x, gamma, beta = inputs.normal(), inputs.normal(inputs.K), inputs.normal(inputs.K)
    y, (mean, rstd) = inputs.empty(), inputs.empty(2, inputs.M, dtype=torch.float32)
    gain = gamma.float()
    tensors = normalization.Forward(x, gamma=gamma, beta=beta, y=y, mean=mean, rstd=rstd)
    return {
        "fuser": inputs.kernel(
            lambda: normalization.norm_forward(tensors, eps=EPS),
            lambda: norms.layernorm(x, gain, beta, EPS, x.dtype),
        ),
        **in_torch(plain.layernorm, x, gamma, beta),
        **liger("layer_norm", lambda ops: lambda: ops.layer_norm_forward(x, gamma, beta, EPS)),
        **transformer_engine(
            lambda tex: (
                lambda: tex.layernorm_fwd(
                    x, gamma, beta, EPS, None, None, tex.DType.kBFloat16, 0, False
                )
            )
        ),
    }


def add_rmsnorm(inputs: Inputs) -> Calls:
    x, extra, gamma = inputs.normal(), inputs.normal(), inputs.normal(inputs.K)
    y, z, rstd = inputs.empty(), inputs.empty(), inputs.empty(inputs.M, dtype=torch.float32)
    gain = gamma.float()
    tensors = normalization.Forward(x, extra, gamma, y=y, z=z, rstd=rstd)
    return {
        "fuser": inputs.kernel(
            lambda: normalization.norm_forward(tensors, eps=EPS),
            lambda: norms.rmsnorm(x + extra, gain, EPS, x.dtype),
        ),
        **in_torch(plain.add_rmsnorm, x, extra, gamma),
        **liger(
            "fused_add_rms_norm",
            lambda ops: lambda: ops.fused_add_rms_norm_forward(x, extra, gamma, EPS, 0.0, "llama"),
        ),
    }


def rmsnorm_backward(inputs: Inputs, *, adds: bool) -> Calls:
    x, dy, gamma = inputs.normal(), inputs.normal(), inputs.normal(inputs.K)
    extra = inputs.normal() if adds else None
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    dx, dgamma, gain = inputs.empty(), inputs.empty(inputs.K), gamma.float()
    tensors = normalization_backward.Backward(
        *(dy, x, gamma, None, None, rstd, extra),
        dx=dx,
        workspace=norm_workspace(x, has_beta=False),
    )

    def launch() -> None:
        normalization_backward.norm_backward(tensors, dgamma=dgamma)

    calls: Calls = {
        "fuser": inputs.kernel(launch, lambda: norms.rmsnorm_backward(dy, x, gain, rstd))
    }
    if extra is None:
        calls |= in_torch(
            plain.eager_rmsnorm_backward, dy, x, gamma, rstd, compile_as=plain.rmsnorm_backward
        )
        return calls | transformer_engine(
            lambda tex: lambda: tex.rmsnorm_bwd(dy, x, rstd[:, 0], gamma, 0, False)
        )
    calls |= in_torch(
        plain.eager_rmsnorm_backward_add,
        dy,
        x,
        gamma,
        rstd,
        extra,
        compile_as=plain.rmsnorm_backward_add,
    )
    return calls | transformer_engine(
        lambda tex: lambda: tex.rmsnorm_bwd_add(dy, x, extra, rstd[:, 0], gamma, 0, False)
    )


def layernorm_backward(inputs: Inputs) -> Calls:
    x, dy = inputs.normal(), inputs.normal()
    gamma, beta = inputs.normal(inputs.K), inputs.normal(inputs.K)
    x32 = x.float()
    mean = x32.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x32.var(-1, unbiased=False, keepdim=True) + EPS)
    del x32
    dx, (dgamma, dbeta), gain = inputs.empty(), inputs.empty(2, inputs.K), gamma.float()
    tensors = normalization_backward.Backward(
        *(dy, x, gamma, None, mean, rstd), dx=dx, workspace=norm_workspace(x, has_beta=True)
    )

    def launch() -> None:
        normalization_backward.norm_backward(tensors, dgamma=dgamma, dbeta=dbeta)

    return {
        "fuser": inputs.kernel(launch, lambda: norms.layernorm_backward(dy, x, gain, mean, rstd)),
        **in_torch(plain.layernorm_backward, dy, x, gamma, mean, rstd, beta),
        **transformer_engine(
            lambda tex: lambda: tex.layernorm_bwd(dy, x, mean[:, 0], rstd[:, 0], gamma, 0, False)
        ),
    }


# -- values into quantized stores ---------------------------------------------

Made = torch.Tensor | LazyTensor
Quantize = Callable[[Inputs], Callable[[Made], object]]


def into_current(_: Inputs) -> Callable[[Made], object]:
    return Float8CurrentScalingQuantizer().buffers_of


def into_delayed(inputs: Inputs) -> Callable[[Made], object]:
    scale = torch.full((1,), 64.0, device=inputs.device)
    return Float8Quantizer(scale, torch.zeros(1, device=inputs.device)).buffers_of


def into_blocks(_: Inputs) -> Callable[[Made], object]:
    return Float8BlockQuantizer(block_scaling_dim=1).buffers_of


def into_mxfp8(_: Inputs) -> Callable[[Made], object]:
    return MXFP8Quantizer().buffers_of


def made_swiglu(inputs: Inputs) -> Callable[[], Made]:
    x = inputs.normal(inputs.M, 2 * inputs.K)
    return lambda: ops.chain((Stage("swiglu"),), x)


def made_swiglu_backward(inputs: Inputs) -> Callable[[], Made]:
    x, dy = inputs.normal(inputs.M, 2 * inputs.K), inputs.normal()
    return lambda: ops.chain_backward((Stage("swiglu"),), dy, x, (None,), (False,))[0]


def made_gelu(inputs: Inputs) -> Callable[[], Made]:
    x = inputs.normal()
    return lambda: ops.chain((Stage("gelu"),), x)


def made_bias_gelu_backward(inputs: Inputs) -> Callable[[], Made]:
    """The sum before the activation, from the saved tensors of a linear of the pipeline."""
    x, dy = inputs.normal(), inputs.normal()
    stages = (Stage("bias"), Stage("gelu"))
    of_bias = (stages, dy, x, (None, None), (True, False))
    return lambda: ops.chain_backward(*of_bias, saved=1)[0]


def made_rmsnorm(inputs: Inputs, *, adds: bool) -> Callable[[], Made]:
    x, gamma = inputs.normal(), inputs.normal(inputs.K)
    extra = inputs.normal() if adds else None
    return lambda: norm_ops.norm(x, (gamma,), EPS, x.dtype, extra=extra, wants_sum=adds)[0]


def stored(
    inputs: Inputs, *, made: Callable[[Inputs], Callable[[], Made]], into: Quantize
) -> Calls:
    """The kernel that computes and quantizes the values, and two kernels for the two steps."""
    make, quantize = made(inputs), into(inputs)

    def fused() -> None:
        values = make()
        quantize(values)
        if isinstance(values, LazyTensor):
            values.finish()

    return {"fuser": fused, "unfused": lambda: quantize(materialize(make()))}


# -- permutation by expert ----------------------------------------------------


def routing(
    inputs: Inputs, tokens: int, choices: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random expert indices, and the split sizes and maps of their permutation."""
    shape, experts = (tokens, choices), EXPERTS
    indices = torch.randint(experts, shape, generator=inputs.generator, device=inputs.device)
    return indices, *permutation_reference.sort_by_expert(indices, experts, tokens * choices)


def sort_by_expert(inputs: Inputs) -> Calls:
    routed = routing(inputs, inputs.M, inputs.K)
    indices, outputs = routed[0], routed[1:]
    shape = permutation.counts_shape(indices.numel(), EXPERTS)
    counts = None if shape is None else inputs.empty(*shape, dtype=torch.int32)
    return {
        "fuser": inputs.kernel(
            lambda: permutation.sort_by_expert(indices, *outputs, counts),
            lambda: permutation_reference.sort_by_expert(indices, EXPERTS, indices.numel()),
        ),
        **in_torch(plain.sort_by_expert, indices, EXPERTS),
    }


def permute(inputs: Inputs, *, choices: int) -> Calls:
    maps = routing(inputs, inputs.M, choices)[2:]
    x, y = inputs.normal(), inputs.empty(inputs.M * choices, inputs.K)
    return {
        "fuser": inputs.kernel(
            lambda: permutation.permute(x, *maps, y),
            lambda: permutation_reference.permute(x, *maps),
        ),
        **in_torch(plain.permute, x, maps[0] // choices),
    }


def permute_and_quantize(inputs: Inputs, *, choices: int) -> Calls:
    """Current scaling of all experts' rows, from the tokens or from a permuted copy of them."""
    _, split_sizes, *maps = routing(inputs, inputs.M, choices)
    x, rows = inputs.normal(), inputs.M * choices
    groups = padded_groups(split_sizes, EXPERTS, rows, x.device)
    quantizer = Float8GroupsQuantizer(groups)
    return {
        "fuser": lambda: quantizer(padded_rows(gathered_rows(x, *maps), groups)),
        "unfused": lambda: quantizer(padded_rows(permute_rows(x, *maps), groups)),
    }


def unpermute(inputs: Inputs, *, choices: int) -> Calls:
    _, _, _, inverse_map = routing(inputs, inputs.M, choices)
    y, out = inputs.normal(inputs.M * choices, inputs.K), inputs.empty()
    probs = inputs.normal(inputs.M, choices, dtype=torch.float32)
    return {
        "fuser": inputs.kernel(
            lambda: permutation.unpermute(y, inverse_map, probs, out),
            lambda: permutation_reference.unpermute(y, inverse_map, probs),
        ),
        **in_torch(plain.unpermute, y, inverse_map, probs),
    }


def unpermute_backward(inputs: Inputs, *, choices: int) -> Calls:
    maps = routing(inputs, inputs.M, choices)[2:]
    dout, y = inputs.normal(), inputs.normal(inputs.M * choices, inputs.K)
    probs = inputs.normal(inputs.M, choices, dtype=torch.float32)
    dy, dprobs = torch.empty_like(y), torch.empty_like(probs)
    return {
        "fuser": inputs.kernel(
            lambda: permutation.unpermute_backward(dout, y, *maps, probs, dy, dprobs),
            lambda: permutation_reference.unpermute_backward(dout, y, *maps, probs),
        ),
        **in_torch(plain.unpermute_backward, dout, y, *maps, probs),
    }


# -- the table ----------------------------------------------------------------

CASES = (
    Case("SwiGLU", swiglu, "3*b", "5", 0.97),
    Case("SwiGLU backward", swiglu_backward, "5*b", "10", 0.97),
    Case("GELU", gelu, "2*b", "9", 0.95),
    Case("bias+GELU", bias_gelu, "2*b", "10", 0.95),
    Case("bias+GELU backward, dbias", bias_gelu_backward, "3*b", "18", 0.93),
    Case("amax", amax, "b", "2"),
    Case("FP8 current row", functools.partial(current, columnwise=False), "2*b + 1", "5"),
    Case("FP8 current row+col", functools.partial(current, columnwise=True), "2*b + 2", "5", 0.93),
    Case("FP8 delayed row+col", delayed, "b + 2", "5"),
    Case(
        "FP8 1x128 row+col",
        functools.partial(blocks_of_128, block_dim=1),
        "b + 2 + 8/128",
        "8",
        0.90,
    ),
    Case(
        "FP8 128x128 row+col",
        functools.partial(blocks_of_128, block_dim=2),
        "b + 2 + 8/128**2",
        "5",
        0.93,
    ),
    Case("MXFP8 row+col", mxfp8_copies, "b + 2 + 2/32", "8", 0.90),
    Case("MXFP8 row+col 32x32", functools.partial(mxfp8_copies, square=True), "b + 2 + 2/32", "5"),
    Case("MXFP8 row+col swizzled", mxfp8_swizzled, "b + 2 + 2/32", "8"),
    Case(
        "NVFP4 row",
        functools.partial(nvfp4_copies, columnwise=False),
        "2*b + 1/2 + 1/16",
        "7",
        0.85,
    ),
    Case("NVFP4 row+col", nvfp4_copies, "2*b + 1 + 2/16", "12"),
    Case(
        "NVFP4 row+col 16x16",
        functools.partial(nvfp4_copies, with_2d_quantization=True),
        "2*b + 1 + 2/16",
        "7",
    ),
    Case(
        "NVFP4 row+col Hadamard",
        functools.partial(nvfp4_copies, with_rht=True),
        "2*b + 1 + 2/16",
        "22",
    ),
    Case(
        "NVFP4 row+col stochastic",
        functools.partial(nvfp4_copies, stochastic_rounding=True, seed=0),
        "2*b + 1 + 2/16",
        "30",
    ),
    Case("dequantize FP8", dequantize, "1 + b", "1"),
    Case(
        "dequantize FP8 1x128 row",
        functools.partial(dequantize_blocks_of_128, columnwise=False),
        "1 + 4/128 + b",
        "1",
    ),
    Case(
        "dequantize FP8 1x128 col",
        functools.partial(dequantize_blocks_of_128, columnwise=True),
        "1 + 4/128 + b",
        "1",
    ),
    Case("dequantize MXFP8 row", dequantize_mxfp8, "1 + 1/32 + b", "1"),
    Case(
        "dequantize NVFP4 row",
        functools.partial(dequantize_nvfp4, columnwise=False),
        "1/2 + 1/16 + b",
        "1",
    ),
    Case(
        "dequantize NVFP4 col",
        functools.partial(dequantize_nvfp4, columnwise=True),
        "1/2 + 1/16 + b",
        "1",
    ),
    Case("FP8 transpose", transpose, "2", "0"),
    *(
        Case(name, make, moves, flop, 0.92 if "RMS" in name else None, columns=columns)
        for columns in (4096, 8192)
        for name, make, moves, flop in (
            ("RMSNorm", rmsnorm, "2*b + 4/K", "4"),
            ("LayerNorm", layernorm, "2*b + 8/K", "7"),
            ("add+RMSNorm", add_rmsnorm, "4*b + 4/K", "5"),
            ("RMSNorm backward", functools.partial(rmsnorm_backward, adds=False), "3*b + 4/K", "9"),
            (
                "RMSNorm backward+add",
                functools.partial(rmsnorm_backward, adds=True),
                "4*b + 4/K",
                "10",
            ),
            ("LayerNorm backward", layernorm_backward, "3*b + 8/K", "13"),
        )
    ),
    # Bytes that are read, written (copies and scales) and left as sums.
    *(
        Case(
            f"{name} -> {store}",
            functools.partial(stored, made=made, into=into),
            f"{reads} + {2 * lines}{f' + {scale * lines}/{block}' if scale else ''}{sums}",
            flop,
            0.88,
        )
        for name, made, reads, lines, sums, flop in (
            ("SwiGLU", made_swiglu, "2*b", 1, "", "8"),
            ("SwiGLU backward", made_swiglu_backward, "3*b", 2, "", "16"),
            ("GELU", made_gelu, "b", 1, "", "12"),
            ("bias+GELU backward", made_bias_gelu_backward, "2*b", 1, " + 8/128", "21"),
        )
        # Bytes of the scales of a block, for both copies.
        for store, into, scale, block in (
            ("FP8 delayed", into_delayed, 0, 1),
            ("1x128", into_blocks, 8, 128),
            ("MXFP8", into_mxfp8, 2, 32),
        )
    ),
    # The scale needs the amax first, so everything is read twice.
    Case(
        "GELU -> FP8 current",
        functools.partial(stored, made=made_gelu, into=into_current),
        "2*b + 2",
        "21",
        0.88,
    ),
    # A tile has parts of rows, whose statistics are needed first: x, or the sum, is read again.
    *(
        Case(
            f"{name} -> {store}",
            functools.partial(stored, made=functools.partial(made_rmsnorm, adds=adds), into=into),
            moves,
            "9",
            0.92,
            columns=columns,
        )
        for columns in (4096, 8192)
        for name, adds, store, into, moves in (
            ("RMSNorm", False, "FP8 delayed", into_delayed, "2*b + 2 + 8/K"),
            ("RMSNorm", False, "FP8 current", into_current, "2*b + 2 + 8/K"),
            ("add+RMSNorm", True, "FP8 delayed", into_delayed, "4*b + 2 + 8/K"),
        )
    ),
    # M tokens of K columns, each with k experts. The indices of the sort are [M, K], in int64.
    Case("sort by expert", sort_by_expert, "16", "1", rows=16384, columns=8),
    *(
        Case(f"{name}, k = {k}", functools.partial(make, choices=k), moves, flop, 0.9, columns=2048)
        for k in (2, 8)
        for name, make, moves, flop in (
            ("permute", permute, f"{1 + k}*b + {8 * k}/K", "0"),
            ("unpermute", unpermute, f"{1 + k}*b + {8 * k}/K", f"{2 * k}"),
            ("unpermute backward", unpermute_backward, f"{1 + 2 * k}*b + {16 * k}/K", f"{3 * k}"),
        )
    ),
    # M tokens to k M rows. The first of a token's experts reads it for the amax and again for the
    # bytes, and the others find it in L2. Both copies are written. The padding is not counted.
    *(
        Case(
            f"permute -> FP8 current, k = {k}",
            functools.partial(permute_and_quantize, choices=k),
            f"2*b + {2 * k} + {8 * k}/K",
            f"{3 * k}",
            columns=2048,
        )
        for k in (2, 8)
    ),
    # M is the length of a history and K the number of tensors, each with a history of its own.
    Case("delayed update, 100 tensors", delayed_update, "8", "1", rows=HISTORY, columns=STATES),
)
