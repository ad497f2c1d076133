"""Memory-bound functions in plain torch, as a user without fuser would write them.

The benchmarks compare kernels with these functions, eager and through torch.compile. They need not
give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fuser.formats import DType
from fuser.reference import normalization as norms

E4M3 = DType.kFloat8E4M3
EPS = 1e-5


# -- activations ---------------------------------------------------------------


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, linear = x.chunk(2, -1)
    return F.silu(gate) * linear


def swiglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, linear = x.chunk(2, -1)
    d_gate = torch.ops.aten.silu_backward(dy * linear, gate)
    return torch.cat([d_gate, dy * F.silu(gate)], -1)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias, approximate="tanh")


def bias_gelu_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.ops.aten.gelu_backward(dy, x + bias, approximate="tanh")
    return dx, dx.sum(0)


# -- quantizing ----------------------------------------------------------------


def eager_amax(x: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    return norm


def amax(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax().float()


def cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() * scale).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)


def current_row(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = E4M3.max / amax(x)
    return cast(x, scale), scale.reciprocal()


def current_row_col(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    row, scale_inv = current_row(x)
    return row, row.view(torch.uint8).t().contiguous(), scale_inv


def delayed(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    row = cast(x, scale)
    return row, row.view(torch.uint8).t().contiguous(), scale.reciprocal(), amax(x)


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    return (data.view(torch.float8_e4m3fn).float() * scale_inv).to(torch.bfloat16)


def transpose(data: torch.Tensor) -> torch.Tensor:
    return data.t().contiguous()


def quantize_blocks(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with a power-of-two scale for each block: torch's side of every block format."""
    blocks = x.float().view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    most = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-30)
    scale = torch.exp2(torch.floor(torch.log2(E4M3.max / most)))
    return cast(blocks, scale).view(x.shape), scale.reciprocal()[:, 0, :, 0]


def blocks_1x128(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    col, col_scale = quantize_blocks(x, 128, 1)
    return *quantize_blocks(x, 1, 128), col.view(torch.uint8).t().contiguous(), col_scale


def blocks_128x128(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    row, scale = quantize_blocks(x, 128, 128)
    return row, scale, row.view(torch.uint8).t().contiguous()


def mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *quantize_blocks(x, 1, 32), *quantize_blocks(x, 32, 1)


def mxfp8_square(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return quantize_blocks(x, 32, 32)


def dequantize_rows(data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """``scale_inv`` ``[M, blocks]`` in fp32, or the exponents of powers of two in uint8."""
    if scale_inv.dtype == torch.uint8:
        scale_inv = torch.exp2(scale_inv.float() - 127)
    blocks = data.view(torch.float8_e4m3fn).float().view(*scale_inv.shape, -1)
    return (blocks * scale_inv[..., None]).view(data.shape).to(torch.bfloat16)


# -- norms ---------------------------------------------------------------------


def rmsnorm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, gamma.shape, gamma, EPS)


def layernorm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, gamma.shape, gamma, beta, EPS)


def add_rmsnorm(
    x: torch.Tensor, extra: torch.Tensor, gamma: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    z = x + extra
    return z, F.rms_norm(z, gamma.shape, gamma, EPS)


def rmsnorm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> Any:
    dx, d_gain = norms.rmsnorm_backward(dy, x, gamma.float(), rstd)
    return dx, d_gain.to(gamma.dtype)  # type: ignore[union-attr]


def eager_rmsnorm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> Any:
    if not x.is_cuda:  # if torch has no such kernel
        return rmsnorm_backward(dy, x, gamma, rstd)
    return torch.ops.aten._fused_rms_norm_backward(dy, x, gamma.shape, rstd, gamma, [True, True])


def eager_rmsnorm_backward_add(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor, extra: torch.Tensor
) -> Any:
    dx, dgamma = eager_rmsnorm_backward(dy, x, gamma, rstd)
    return dx + extra, dgamma


def rmsnorm_backward_add(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor, extra: torch.Tensor
) -> Any:
    dx, dgamma = rmsnorm_backward(dy, x, gamma, rstd)
    return dx + extra, dgamma


def layernorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    beta: torch.Tensor,
) -> Any:
    if not x.is_cuda:  # torch needs one dtype here
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
    wanted = [True, True, True]
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, gamma.shape, mean, rstd, gamma, beta, wanted
    )


# -- permutation by expert -----------------------------------------------------


def sort_by_expert(expert_indices: torch.Tensor, experts: int) -> Any:
    keys, order = expert_indices.view(-1).sort(stable=True)
    bounds = torch.arange(experts + 1, device=keys.device)
    return torch.searchsorted(keys, bounds).diff(), order, order.argsort()


def permute(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x[tokens]


def unpermute(y: torch.Tensor, inverse_map: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    return (y[inverse_map].float() * probs[..., None]).sum(1).to(y.dtype)


def unpermute_backward(
    dout: torch.Tensor,
    y: torch.Tensor,
    assignments: torch.Tensor,
    inverse_map: torch.Tensor,
    probs: torch.Tensor,
) -> Any:
    rows = dout[assignments // inverse_map.shape[1]].float()
    dy = (rows * probs.view(-1)[assignments, None]).to(dout.dtype)
    return dy, (rows * y.float()).sum(1)[inverse_map]
