"""Launches of norms: dtypes, sizes, alignment, checks and producers, for forward and backward.

x and y have dtypes of their own, see :func:`takes`. A gradient has the dtype of its tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fuser.cuda.arguments import ELEMENTS, TILE_RUN, Producer, Struct, float32, int32, int64
from fuser.cuda.checks import boolean
from fuser.cuda.launch import Launch
from fuser.errors import InputError

PARAMETER_TYPES = {None: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""Dtypes of parameters to ``ParameterType`` of the kernels."""

DTYPE_PAIRS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)
"""The dtypes of x and y that kernels support."""

VECTOR_BYTES = 16
# In kernels, rows and columns are ints, and so are their sums with the size of the grid.
MAX_SIZE = 2**29

# -- dtypes -------------------------------------------------------------------


def takes(x_dtype: torch.dtype, y_dtype: torch.dtype) -> bool:
    """Whether kernels support an x and a y of these dtypes, forward and backward.

    y may have the dtype of x, or be fp16 or bf16 if x is fp32. If x has 16 bits, y has the same
    dtype: bf16 to fp32, which fp32 parameters without autocast would give, is not supported.
    """
    return (x_dtype, y_dtype) in DTYPE_PAIRS


def takes_addend(x_dtype: torch.dtype, addend_dtype: torch.dtype, y_dtype: torch.dtype) -> bool:
    """Whether the forward makes y from the sum of tensors of these two dtypes, in either order.

    Two of one dtype; or one in fp32, and one of 16 bits in the dtype of y, as autocast gives: the
    sum is then fp32.
    """
    z_dtype = torch.promote_types(x_dtype, addend_dtype)
    is_mixed = {x_dtype, addend_dtype} == {torch.float32, y_dtype}
    return takes(z_dtype, y_dtype) and (x_dtype is addend_dtype or is_mixed)


def partners_of(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes that y can have for an x of ``dtype``."""
    return tuple(y for x, y in DTYPE_PAIRS if x == dtype)


# -- sizes --------------------------------------------------------------------


def sizes_of(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    strides: tuple[int, int, int],
    launch: Launch,
    *,
    is_aligned: bool,
    zero_centered_gamma: bool,
    eps: float = 0.0,
    prefetch_depth: int = 0,
) -> Struct:
    """The struct ``Sizes``. No gamma means L2 normalization: a sum, and a gain of 1."""
    parameter = None if gamma is None else gamma.dtype
    flags = (is_aligned, zero_centered_gamma)
    return _sizes(
        strides, *x.shape, x.dtype, parameter, launch.block[0], *flags, eps, prefetch_depth
    )


@functools.lru_cache(maxsize=1024)
def _sizes(
    strides: tuple[int, int, int],
    rows: int,
    columns: int,
    x: torch.dtype,
    parameter: torch.dtype | None,
    lanes: int,
    is_aligned: bool,
    zero_centered_gamma: bool,
    eps: float,
    prefetch_depth: int,
) -> Struct:
    has_parameters = parameter is not None
    vectors = vectors_of(columns, x.itemsize, lanes)
    integers = (rows, columns, vectors, prefetch_depth, PARAMETER_TYPES[parameter], is_aligned)
    return Struct(
        (
            *map(int64, strides),
            *map(int32, integers),
            float32(1.0 if zero_centered_gamma or not has_parameters else 0.0),
            float32(1.0 / columns if has_parameters else 1.0),
            float32(eps),
        )
    )


def vectors_of(columns: int, element_bytes: int, threads: int = 1) -> int:
    """The largest number of vectors of a thread, with ``threads`` threads a row."""
    return -(-columns * element_bytes // (VECTOR_BYTES * threads))


def whole_warps(threads: int) -> int:
    """``threads`` rounded up to a multiple of 32."""
    return -(-threads // 32) * 32


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def row_strides(
    x: torch.Tensor, extra: torch.Tensor | None, dy: torch.Tensor | None
) -> tuple[int, int, int]:
    """The row strides of ``Sizes``, in its order; 0 for a missing tensor."""
    return (
        x.stride(0),
        0 if extra is None else extra.stride(0),
        0 if dy is None else dy.stride(0),
    )


def are_aligned(
    columns: int, x: torch.Tensor, strides: tuple[int, ...], *others: torch.Tensor | None
) -> bool:
    """Whether every row of all tensors begins at a vector boundary and has whole vectors."""
    address = x.data_ptr()
    for tensor in others:
        if tensor is not None:
            address |= tensor.data_ptr()
    elements = columns
    for stride in strides:
        elements |= stride
    return address % VECTOR_BYTES == 0 and elements * x.element_size() % VECTOR_BYTES == 0


def fill_tiles(columns: int, strides: tuple[int, ...], *tensors: torch.Tensor | None) -> bool:
    """Whether the threads of a tile may read 8 elements at a time in every tensor."""
    addresses = (tensor.data_ptr() for tensor in tensors if tensor is not None)
    return all(size % TILE_RUN == 0 for size in (columns, *strides)) and all(
        address % VECTOR_BYTES == 0 for address in addresses
    )


# -- kernels and producers ----------------------------------------------------


def norm_types(norm: str, x: torch.dtype, other: torch.dtype) -> str:
    """The first template arguments of every norm's kernel: the norm, the dtype of x and of y."""
    return f"fuser::{norm}, {ELEMENTS[x]}, {ELEMENTS[other]}"


def tile_producer(
    name: str,
    types: tuple[str, ...],
    tensors: tuple[torch.Tensor | None, ...],
    strides: tuple[int, ...],
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    zero_centered_gamma: bool,
    aligned: bool,
) -> Producer:
    """A norm's producer of ``dtype`` and the shape of x; ``types`` are its template arguments."""
    offset = float32(float(zero_centered_gamma))
    return Producer(
        f"fuser::{name}<{', '.join((*types, boolean(aligned)))}>",
        Struct((*tensors, *map(int64, strides), offset)),
        *(*x.shape, dtype, aligned),
    )


# -- checks -------------------------------------------------------------------


def checked_shape(function: str, x: torch.Tensor) -> tuple[int, int]:
    """Check x, and return its rows and columns."""
    if x.dtype not in ELEMENTS or x.dim() != 2 or max(x.shape) > MAX_SIZE or x.shape[1] == 0:
        raise InputError(
            f"{function} takes x of shape [rows, columns], with columns, up to {MAX_SIZE} of each, "
            f"in fp32, fp16 or bf16; got {_shown(x)}."
        )
    check_tensor(function, "x", x, (x.dtype,), x.shape, is_spaced=True)
    return x.shape[0], x.shape[1]


def check_y_dtype(function: str, x: torch.dtype, y: torch.dtype) -> None:
    """Refuse a dtype of y that no kernel supports."""
    if not takes(x, y):
        partners = " or ".join(map(_name, partners_of(x)))
        raise InputError(f"{function} makes y in {partners} from x in {_name(x)}; got {_name(y)}.")


def checked_norm(
    function: str,
    x: torch.Tensor,
    parameters: Sequence[tuple[str, torch.Tensor | None]],
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    amax: torch.Tensor | None = None,
) -> str:
    """Check parameters, gamma first, statistics and an amax; return the norm's C++ name."""
    rows, columns = x.shape
    check_parameters(function, columns, parameters)
    check_statistics(function, rows, mean, rstd, amax)
    (_, gamma), *others = parameters
    of_layernorm = [name for name, t in (("mean", mean), *others) if t is not None]
    for name, tensor in (("gamma", gamma), *others):
        if of_layernorm and tensor is None:
            raise lacks(function, of_layernorm[0], name)
    return "LayerNorm" if of_layernorm else "RMSNorm"


def lacks(function: str, there: str, missing: str) -> InputError:
    """The refusal of a LayerNorm without one of its tensors."""
    return InputError(f"{function} got {there} without {missing}; a LayerNorm has both.")


def parameter_type(gamma: torch.Tensor | None) -> str:
    """The C++ type of a producer's gamma and beta."""
    return "fuser::NoParameters" if gamma is None else ELEMENTS[gamma.dtype]


def check_parameters(
    function: str, columns: int, named: Sequence[tuple[str, torch.Tensor | None]]
) -> None:
    """Check parameters: all have one dtype, which may be any."""
    for name, tensor in named:
        check_tensor(function, name, tensor, tuple(ELEMENTS), (columns,))
    dtypes = {name: tensor.dtype for name, tensor in named if tensor is not None}
    if len(set(dtypes.values())) > 1:
        said = " and ".join(f"{name} in {_name(dtype)}" for name, dtype in dtypes.items())
        raise InputError(f"{function} got {said}; they must have one dtype.")


def check_statistics(
    function: str,
    rows: int,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    """Check statistics, one number a row each, and the amax, one number."""
    for name, tensor, count in (("mean", mean, rows), ("rstd", rstd, rows), ("amax", amax, 1)):
        check_tensor(function, name, tensor, (torch.float32,), count)


def check_tensor(
    function: str,
    name: str,
    tensor: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...] | int,
    is_spaced: bool = False,
) -> None:
    """Check a tensor. ``shape`` may be a number of elements; ``is_spaced`` allows distant rows."""
    if tensor is None:
        return
    has_shape = tensor.shape == shape or tensor.numel() == shape
    has_layout = tensor.is_contiguous() or (is_spaced and tensor.stride(-1) == 1)
    if tensor.dtype not in dtypes or not has_shape or not has_layout:
        layout = "the elements of a row side by side" if is_spaced else "contiguous"
        raise InputError(
            f"{function} takes {name} in {' or '.join(map(_name, dtypes))}, "
            f"{f'{shape} elements' if isinstance(shape, int) else f'of shape {tuple(shape)}'}, "
            f"{layout}; got {_shown(tensor)}."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
