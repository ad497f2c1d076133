"""Native quantized GEMMs: formats, compute capabilities, and the library call of each.

Operands are bytes ``[rows, inner]``, row-major, with the scales that formats.py describes; a
product is ``a @ b.T``. A product without a row in this table is emulated (gemm/matmul.py). The
limits are those of ``torch._scaled_mm``, which calls cuBLASLt. Where a matrix is added to a
product, and where torch would need padded data, it is called without torch (cuda/cublaslt.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fuser.cuda import cublaslt
from fuser.cuda.cublaslt import Scales
from fuser.formats import FP8_BLOCK, DType, NumberFormat, round_up
from fuser.tensors import Operand
from fuser.torch_private import scaled_mm

# cuBLASLt takes FP8 sizes in multiples of 16 elements; other sizes are padded with zeros.
ALIGNMENT = 16
# The version of GPUs that need not be here: their plans are the same on every machine.
CUDA_ELSEWHERE = (13, 0)
# Four blocks of 128. Versions of torch expect different strides for 128x128 scales, except if
# the number of blocks is a multiple of four.
INNER_ALIGNMENT_2D = 4 * FP8_BLOCK
# By the name of a format, the arrangement of its scales.
SCALES = {
    "FP8": Scales.TENSOR,
    "FP8 rowwise": Scales.ROWS,
    "FP8 1x128": Scales.BLOCKS_1X128,
    "FP8 128x128": Scales.BLOCKS_128X128,
}


@dataclass(frozen=True)
class NativeGemm:
    """One native GEMM: a row of the table.

    Parameters
    ----------
    name
        The name that a plan shows.
    formats
        Every pair of formats that it multiplies, by name.
    archs
        Compute capabilities: major ones such as ``9``, or exact ones such as ``(8, 9)``.
    cuda
        The first CUDA version whose cuBLASLt has it.
    run
        ``run(a, b, out_dtype, is_split, bias)`` returns the product in ``out_dtype``; the bias
        is an epilogue in fp16 and bf16.
        If ``is_split``, partial sums are added to fp32 registers more often, which is slower and
        more accurate on Hopper.
    takes_e5m2
        Whether one of the operands may be E5M2; never both.
    """

    name: str
    formats: tuple[tuple[str, str], ...]
    archs: tuple[int | tuple[int, int], ...]
    cuda: tuple[int, int]
    run: Callable[[Operand, Operand, torch.dtype, bool, torch.Tensor | None], torch.Tensor]
    takes_e5m2: bool = True

    def serves(
        self, a: NumberFormat, b: NumberFormat, arch: tuple[int, int], cuda: tuple[int, int]
    ) -> bool:
        """Whether it multiplies operands ``a`` and ``b`` on compute capability ``arch``.

        ``cuda`` is the version of CUDA there.
        """
        return (
            (a.name, b.name) in self.formats
            # Tensor cores multiply E5M2 with E4M3 only.
            and DType.kFloat8E4M3 in (a.element, b.element)
            and (self.takes_e5m2 or a.element is b.element)
            and (arch in self.archs or arch[0] in self.archs)
            and cuda >= self.cuda
        )


@functools.cache
def torch_cuda() -> tuple[int, int]:
    """The CUDA version of this build of torch; without CUDA it only plans for GPUs elsewhere."""
    if torch.version.cuda is None:
        return CUDA_ELSEWHERE
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def tensorwise(
    a: Operand, b: Operand, out_dtype: torch.dtype, is_split: bool, bias: torch.Tensor | None
) -> torch.Tensor:
    """``a @ b.T (+ bias)`` of FP8 with one scale a tensor."""
    scales = (_at_16_bytes(a.scale_inv), _at_16_bytes(b.scale_inv))
    return _by_rows(a, b, scales, out_dtype, is_split, bias)


def rowwise(
    a: Operand, b: Operand, out_dtype: torch.dtype, is_split: bool, bias: torch.Tensor | None
) -> torch.Tensor:
    """``a @ b.T (+ bias)`` of FP8 with one scale a row: ``[M, 1]`` of a, ``[1, N]`` of b."""
    columns = round_up(b.data.shape[0], ALIGNMENT)
    scales = (_at_16_bytes(a.scale_inv), _at_16_bytes(_padded(b.scale_inv, (columns,))))
    return _by_rows(a, b, (scales[0][:, None], scales[1][None]), out_dtype, is_split, bias)


def blockwise(
    a: Operand, b: Operand, out_dtype: torch.dtype, is_split: bool, bias: torch.Tensor | None
) -> torch.Tensor:
    """``a @ b.T (+ bias)`` of FP8 in blocks of 128: both 1x128, or one of them 128x128."""
    are_2d = [operand.format.name == "FP8 128x128" for operand in (a, b)]
    inner = round_up(a.data.shape[1], INNER_ALIGNMENT_2D if any(are_2d) else FP8_BLOCK)
    if inner != a.data.shape[1]:  # cuBLASLt itself does not need padded data
        result = by_cublaslt(_new(a, b, out_dtype), a, b, is_split, bias)
        if result is not None:
            return result
    data, scales = [], []
    for operand, is_2d in zip((a, b), are_2d, strict=True):
        rows = round_up(operand.data.shape[0], ALIGNMENT)
        data.append(_elements(operand, (rows, inner)))
        scale = operand.scale_inv
        # 1x128 scales are stored with one row for each block; transposed, with one column.
        scales.append(scale if is_2d else _padded(scale, (inner // FP8_BLOCK, rows)).t())
    pair = (scales[0], scales[1].t())
    bias = None if bias is None else _padded(bias, (data[1].shape[0],))
    product = _multiply(data[0], data[1], pair, out_dtype, is_split, bias)
    return product[: a.data.shape[0], : b.data.shape[0]]


def product(
    row: NativeGemm,
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    is_split: bool,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale * a @ b.T (+ bias) (+ addend)`` by ``row``: one kernel where cuBLASLt takes it.

    With an ``addend`` the sum is in the dtype of the addend.
    """
    if addend is not None or scale != 1.0:
        out = _new(a, b, out_dtype if addend is None else addend.dtype)
        result = by_cublaslt(out, a, b, is_split, bias, scale, addend)
        if result is not None:
            return result
    if scale != 1.0:
        a = a._replace(scale_inv=a.scale_inv * scale)
    y = row.run(a, b, out_dtype, is_split, bias)
    return y if addend is None else y + addend


def by_cublaslt(
    out: torch.Tensor,
    a: Operand,
    b: Operand,
    is_split: bool,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """``out``, with ``scale * a @ b.T (+ bias) (+ addend)`` in it; None if cuBLASLt cannot."""
    if cublaslt.library(out.device.type) is None or out.dim() != 2:
        return None
    x, w = (operand.data.view(operand.format.element.torch_dtype) for operand in (a, b))
    modes = SCALES[a.format.name], SCALES[b.format.name]
    scales = (a.scale_inv, b.scale_inv)
    if any(scale.data_ptr() % ALIGNMENT or not scale.is_contiguous() for scale in scales):
        return None
    operands = cublaslt.Operands(out, x, w.t(), addend, bias)
    if not cublaslt.serves(operands, modes=modes, is_split=is_split):
        return None
    return cublaslt.multiply(operands, scales=scales, modes=modes, alpha=scale, is_split=is_split)


def _new(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(a.data.shape[0], b.data.shape[0], dtype=dtype, device=a.data.device)


def _by_rows(
    a: Operand,
    b: Operand,
    scales: tuple[torch.Tensor, torch.Tensor],
    out_dtype: torch.dtype,
    is_split: bool,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The product of data whose rows are padded to whole runs of 16."""
    (rows, inner), (columns, _) = a.data.shape, b.data.shape
    padded_inner, padded_columns = round_up(inner, ALIGNMENT), round_up(columns, ALIGNMENT)
    product = _multiply(
        _elements(a, (rows, padded_inner)),
        _elements(b, (padded_columns, padded_inner)),
        scales,
        out_dtype,
        is_split,
        None if bias is None else _padded(bias, (padded_columns,)),
    )
    return product if columns == padded_columns else product[:, :columns]


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    out_dtype: torch.dtype,
    is_split: bool,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    if not (a.numel() and b.numel()):
        product = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
        return product if bias is None else product + bias
    if bias is not None:
        bias = _at_16_bytes(bias)
    return scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=out_dtype, use_fast_accum=not is_split)


def _elements(operand: Operand, shape: tuple[int, int]) -> torch.Tensor:
    return _padded(operand.data, shape).view(operand.format.element.torch_dtype)


def _at_16_bytes(vector: torch.Tensor) -> torch.Tensor:
    """Scales or a bias at an address that cuBLASLt takes; those of a part begin anywhere."""
    return vector if vector.data_ptr() % 16 == 0 else vector.clone()


def _padded(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` padded with zeros at its end to ``shape``; itself if it has that shape."""
    if tuple(tensor.shape) == shape:
        return tensor
    missing = [size - have for size, have in zip(shape, tensor.shape, strict=True)]
    return F.pad(tensor, [n for size in reversed(missing) for n in (0, size)])


NATIVE_GEMMS = (
    NativeGemm(
        "FP8 mm",
        formats=(("FP8", "FP8"),),
        archs=((8, 9), 9, 10, 12),
        cuda=(12, 1),
        run=tensorwise,
    ),
    # Elsewhere torch calls CUTLASS, which has no fp32 output. torch tests E4M3 operands alone.
    NativeGemm(
        "FP8 rowwise mm",
        formats=(("FP8 rowwise", "FP8 rowwise"),),
        archs=(9,),
        cuda=(12, 9),
        run=rowwise,
        takes_e5m2=False,
    ),
    NativeGemm(
        "FP8 128-block mm",
        formats=(
            ("FP8 1x128", "FP8 128x128"),
            ("FP8 128x128", "FP8 1x128"),
            ("FP8 1x128", "FP8 1x128"),
        ),
        archs=(9,),
        cuda=(12, 9),
        run=blockwise,
    ),
)


@functools.lru_cache(maxsize=4096)
def native_gemm(
    a: NumberFormat, b: NumberFormat, arch: tuple[int, int] | None, *, is_elsewhere: bool = False
) -> NativeGemm | None:
    """The row that multiplies ``a`` and ``b`` on ``arch`` (None: no CUDA); None: emulate.

    ``is_elsewhere``: the GPU need not be here, and this machine's version of CUDA does not count.
    """
    if arch is None:
        return None
    cuda = CUDA_ELSEWHERE if is_elsewhere else torch_cuda()
    return next((row for row in NATIVE_GEMMS if row.serves(a, b, arch, cuda)), None)
