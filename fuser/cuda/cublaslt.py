"""Products that torch has no call for, by cuBLASLt: a matrix is added where the result is written.

``torch._scaled_mm`` adds no matrix, and ``torch.addmm`` copies its addend before it adds to it.
The library is the one that torch has loaded. Functions and constants: cublasLt.h.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from fuser.errors import StateError
from fuser.torch_private import cuda_device, cuda_stream


class Scales(enum.IntEnum):
    """How the scales of a quantized operand are arranged: ``cublasLtMatmulMatrixScale_t``."""

    TENSOR = 0
    ROWS = 3
    BLOCKS_1X128 = 4
    BLOCKS_128X128 = 5


# cudaDataType_t.
_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_COMPUTE_32F = 68
_EPILOGUE_BIAS = 4
# cublasLtMatmulDescAttributes_t.
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_A_SCALE, _B_SCALE, _FAST_ACCUM, _BIAS_TYPE, _A_MODE, _B_MODE = 17, 18, 25, 26, 31, 32
# cublasLtMatmulPreferenceAttributes_t.
_WORKSPACE, _REDUCTION, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
# Parts of a split product are added in fp32, not in the format of the result.
_REDUCTION_IN_32F = 2
# The workspace that torch gives a product on Hopper.
_WORKSPACE_BYTES = 32 << 20
# Bytes of an address, and of a quantized row, that the kernels read at once.
_ALIGNMENT = 16
# A process whose shapes never repeat must not fill the memory.
MOST_PRODUCTS = 1024
# The address of scales while an algorithm is chosen, which reads nothing there.
_SOME_ADDRESS = 1 << 20


class _Algorithm(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def library(device_type: str) -> ctypes.CDLL | None:
    """cuBLASLt as torch has loaded it, for tensors of this device type; None if it has none.

    A build of torch for CUDA loads the library on a machine without a GPU too.
    """
    return _loaded() if device_type == "cuda" else None


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    mode = getattr(os, "RTLD_NOLOAD", None)
    if mode is None or torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}", mode=mode)
    except OSError:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cublasLtMatmul.argtypes = (pointer,) * 14 + (size, pointer)
    library.cublasLtMatmulDescSetAttribute.argtypes = (pointer, ctypes.c_int, pointer, size)
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = (pointer, ctypes.c_int, pointer, size)
    library.cublasLtMatrixLayoutCreate.argtypes = (
        pointer,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
    )
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = (
        *(pointer,) * 7,
        ctypes.c_int,
        pointer,
        pointer,
    )
    return library


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    """The handle of a device; threads may share it."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


class Operands(NamedTuple):
    """The matrices of a product ``out = alpha * a @ b (+ addend) (+ bias)``."""

    out: torch.Tensor
    """``[M, N]``, overwritten; it may be the addend itself."""
    a: torch.Tensor
    """``[M, K]`` with one dimension of stride 1; in 8 bits that is K."""
    b: torch.Tensor
    """``[K, N]``, as ``a``."""
    addend: torch.Tensor | None = None
    """``[M, N]`` in the dtype of ``out``."""
    bias: torch.Tensor | None = None
    """``[N]``."""


Modes = tuple[Scales, Scales]
"""How the scales of ``a`` and ``b`` are arranged."""


def serves(operands: Operands, *, modes: Modes | None = None, is_split: bool = True) -> bool:
    """Whether :func:`multiply` takes these arguments; it depends on their layouts alone."""
    out, a, b, addend, bias = operands
    if library(out.device.type) is None or 0 in (*a.shape, *b.shape):
        return False
    if out.shape != (a.shape[0], b.shape[1]):
        return False
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % _ALIGNMENT):
        return False
    matrices = [out, a, b]
    if addend is not None:
        if addend.dtype is not out.dtype or addend.shape != out.shape or addend.stride(1) != 1:
            return False
        matrices.append(addend)
    if any(t.dtype not in _TYPES or not _is_stored(t) for t in matrices):
        return False
    addresses = [t.data_ptr() for t in matrices]
    if 0 in addresses or any(address % _ALIGNMENT for address in addresses):
        return False
    # torch decides how fp32 operands are multiplied.
    if out.stride(1) != 1 or a.dtype is torch.float32 or b.dtype is torch.float32:
        return False
    # 8-bit operands are read along the dimension that the product contracts.
    is_along = a.stride(1) == b.stride(0) == 1
    is_even = not any(n % _ALIGNMENT for n in (*a.shape, *b.shape))
    if modes is not None and not (is_along and is_even):
        return False
    return _product(operands, modes, is_split) is not None


def _is_stored(matrix: torch.Tensor) -> bool:
    """Whether rows, or columns, are one after the other in memory, and none is in another."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    if right == 1:
        return down >= columns or rows == 1
    return down == 1 and (right >= rows or columns == 1)


def multiply(
    operands: Operands,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    modes: Modes | None = None,
    alpha: float = 1.0,
    is_split: bool = True,
) -> torch.Tensor:
    """``out = alpha * a @ b (+ addend) (+ bias)``, accumulated in fp32 and rounded once.

    8-bit operands have fp32 ``scales`` in these ``modes``; ``is_split`` says whether sums of their
    products are added to fp32 registers more often. StateError if cuBLASLt has no such product: ask
    :func:`serves` first. Returns ``out``; use that one, as selective checkpointing may have kept
    another.
    """
    scale_a, scale_b = scales or (None, None)
    mode_a, mode_b = modes or (0, 0)
    out: torch.Tensor = torch.ops.fuser.multiply(
        *operands, scale_a, scale_b, mode_a, mode_b, alpha, is_split
    )
    return out


# An operation of torch, so that recorded passes and torch's tools observe it.
_operations = torch.library.Library("fuser", "DEF")  # type: ignore[no-untyped-call]
_operations.define(  # type: ignore[no-untyped-call]
    "multiply(Tensor(a!) out, Tensor a, Tensor b, Tensor? addend, Tensor? bias, Tensor? scale_a, "
    "Tensor? scale_b, int mode_a, int mode_b, float alpha, bool is_split) -> Tensor(a!)"
)


class _Products(threading.local):
    """The products of a thread, by layout: a call writes addresses into their descriptors."""

    def __init__(self) -> None:
        self.found: dict[Hashable, _Matmul | None] = {}


_products = _Products()


def _product(operands: Operands, modes: Modes | None, is_split: bool) -> _Matmul | None:
    """The product of these layouts, made once a thread; None if cuBLASLt has none."""
    out, a, b, addend, bias = operands
    key = (
        a.get_device(),
        a.dtype,
        b.dtype,
        out.dtype,
        a.shape,
        b.shape,
        a.stride(),
        b.stride(),
        out.stride(),
        None if addend is None else addend.stride(),
        None if bias is None else bias.dtype,
        modes,
        is_split,
    )
    try:
        return _products.found[key]
    except KeyError:
        while len(_products.found) >= MOST_PRODUCTS:
            _products.found.pop(next(iter(_products.found)))
        product = _products.found[key] = _made(operands, modes, is_split)
        return product


def _made(operands: Operands, modes: Modes | None, is_split: bool) -> _Matmul | None:
    """A new product of these layouts; None if cuBLASLt has none."""
    if library(operands.a.device.type) is None:
        return None
    product = _Matmul(operands, modes, is_split)
    return product if product.is_found else None


Find = Callable[[Operands, "Modes | None", bool], "_Matmul | None"]


def _run(find: Find, *args: Any) -> torch.Tensor:
    """The operation, with the product that ``find`` returns."""
    operands = Operands(*args[:5])
    scale_a, scale_b, mode_a, mode_b, alpha, is_split = args[5:]
    modes = None if scale_a is None else (mode_a, mode_b)
    product = find(operands, modes, is_split)
    if product is None:
        out, a, b, _, _ = operands
        raise StateError(
            f"cuBLASLt has no product of {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype} "
            f"into {out.dtype} on {a.device}; multiply with torch instead."
        )
    product.run(operands, scale_a, scale_b, alpha)
    return operands.out


class Repeated:
    """The operation at one place of a recorded pass, where all layouts are the same at each call.

    It has descriptors of its own, for each thread, so that most addresses in them stay.
    """

    def __init__(self) -> None:
        self.products: dict[int, _Matmul | None] = {}

    def __call__(self, *args: Any) -> torch.Tensor:
        product = self.products.get(threading.get_ident())
        if product is None:
            return _run(self._new, *args)
        product.run(args[:5], args[5], args[6], args[9])
        out: torch.Tensor = args[0]
        return out

    def _new(self, *layouts: Any) -> _Matmul | None:
        product = self.products[threading.get_ident()] = _made(*layouts)
        return product


_operations.impl(  # type: ignore[no-untyped-call]
    "multiply", functools.partial(_run, _product), "CompositeExplicitAutograd"
)
_operations.impl("multiply", lambda out, *_: out, "Meta")  # type: ignore[no-untyped-call]


class _Matmul:
    """The descriptors of one product, and its algorithm.

    cuBLASLt's matrices are column-major, so it computes the transpose: ``out.T = b.T @ a.T``. Its
    first operand is ``b``.
    """

    def __init__(self, operands: Operands, modes: Modes | None, is_split: bool) -> None:
        out, a, b, addend, bias = operands
        lt = _library()
        self.device, self.index = a.device, a.get_device()
        self.layouts: list[ctypes.c_void_p] = []
        self.handle = _handle(self.index)
        self.matmul, self.set = lt.cublasLtMatmul, lt.cublasLtMatmulDescSetAttribute
        self.description = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.description), _COMPUTE_32F, 0)
        # Not at the end of the process, when neither torch nor the library need be there.
        weakref.finalize(self, _destroy, lt, self.description, self.layouts).atexit = False
        self._describe(_TRANSA, ctypes.c_int32(b.stride(1) != 1))
        self._describe(_TRANSB, ctypes.c_int32(a.stride(1) != 1))
        if modes:
            self._describe(_FAST_ACCUM, ctypes.c_int8(not is_split))
            self._describe(_A_MODE, ctypes.c_int32(modes[1]))
            self._describe(_B_MODE, ctypes.c_int32(modes[0]))
        if bias is not None:
            self._describe(_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
            self._describe(_BIAS_TYPE, ctypes.c_int32(_TYPES[bias.dtype]))
        self.addresses = [ctypes.c_uint64() for _ in range(3)]
        if modes:  # without an address, no algorithm is found for scales of blocks
            for held, attribute in zip(self.addresses, (_A_SCALE, _B_SCALE), strict=False):
                held.value = _SOME_ADDRESS
                self._describe(attribute, held)
        for matrix in (b, a, out if addend is None else addend, out):
            self.layouts.append(_layout(matrix))
        self.alpha = ctypes.c_float()
        self.beta = ctypes.c_float(addend is not None)
        self.algorithm = _Algorithm()
        values = (self.alpha, self.beta, self.algorithm)
        self.values_at = tuple(map(ctypes.addressof, values))
        self.is_found = self._choose()

    def _describe(self, attribute: int, value: Any) -> None:
        status = self.set(
            self.description, attribute, ctypes.addressof(value), ctypes.sizeof(value)
        )
        _check(status, "cublasLtMatmulDescSetAttribute")

    def _choose(self) -> bool:
        """Ask for the algorithm that is estimated to be the fastest; whether there is one."""
        lt, preference, count = _library(), ctypes.c_void_p(), ctypes.c_int()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        preferences = [
            (_WORKSPACE, ctypes.c_uint64(_WORKSPACE_BYTES)),
            (_REDUCTION, ctypes.c_uint32(_REDUCTION_IN_32F)),
            *((name, ctypes.c_uint32(_ALIGNMENT)) for name in _ALIGNMENTS),
        ]
        for name, value in preferences:
            lt.cublasLtMatmulPreferenceSetAttribute(
                preference, name, ctypes.addressof(value), ctypes.sizeof(value)
            )
        status = lt.cublasLtMatmulAlgoGetHeuristic(
            self.handle,
            self.description,
            *self.layouts,
            preference,
            1,
            ctypes.addressof(self.algorithm),
            ctypes.addressof(count),
        )
        lt.cublasLtMatmulPreferenceDestroy(preference)
        return not status and count.value > 0 and not self.algorithm.status

    def run(
        self,
        operands: Sequence[Any],
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        alpha: float,
    ) -> None:
        """Launch the product of :class:`Operands` on torch's current stream."""
        out, a, b, addend, bias = operands
        if self.index != cuda_device():
            with torch.cuda.device(self.device):
                self.run(operands, scale_a, scale_b, alpha)
            return
        pointers = ((_A_SCALE, scale_b), (_B_SCALE, scale_a), (_BIAS_POINTER, bias))
        for held, (attribute, tensor) in zip(self.addresses, pointers, strict=True):
            if tensor is not None and held.value != (address := tensor.data_ptr()):
                held.value = address
                self._describe(attribute, held)
        self.alpha.value = alpha
        alpha_at, beta_at, algorithm_at = self.values_at
        layout_b, layout_a, layout_added, layout_out = self.layouts
        nbytes, workspace = self.algorithm.workspace, None
        if nbytes:
            workspace = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        out_at = out.data_ptr()
        status = self.matmul(
            self.handle,
            self.description,
            alpha_at,
            b.data_ptr(),
            layout_b,
            a.data_ptr(),
            layout_a,
            beta_at,
            out_at if addend is None else addend.data_ptr(),
            layout_added,
            out_at,
            layout_out,
            algorithm_at,
            None if workspace is None else workspace.data_ptr(),
            nbytes,
            cuda_stream(self.index),
        )
        if status:
            _check(status, "cublasLtMatmul")


def _destroy(lt: Any, description: ctypes.c_void_p, layouts: list[ctypes.c_void_p]) -> None:
    for layout in layouts:
        lt.cublasLtMatrixLayoutDestroy(layout)
    lt.cublasLtMatmulDescDestroy(description)


def _layout(matrix: torch.Tensor) -> ctypes.c_void_p:
    """The descriptor of a matrix as it is in memory, column by column."""
    rows, columns = matrix.shape
    if matrix.stride(1) == 1:
        rows, columns, stride = columns, rows, matrix.stride(0)
    else:
        stride = matrix.stride(1)
    layout = ctypes.c_void_p()
    sizes = (rows, columns, max(stride, rows))
    _call("cublasLtMatrixLayoutCreate", ctypes.addressof(layout), _TYPES[matrix.dtype], *sizes)
    return layout


def _library() -> ctypes.CDLL:
    library = _loaded()
    assert library is not None
    return library


def _call(name: str, *args: Any) -> None:
    """Call a function of the library."""
    _check(getattr(_library(), name)(*args), name)


def _check(status: int, name: str) -> None:
    if status:
        raise StateError(f"{name} of cuBLASLt failed with status {status}.")
