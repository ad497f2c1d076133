"""Parameters of ops: default device, default dtype, and checks of sharding."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, SupportsIndex, get_args

import torch

from fuser.communication import is_distributed
from fuser.errors import InputError, InputTypeError
from fuser.torch_private import is_default_device_set

ParallelMode = Literal["column", "row"]
COMPUTE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# An integer that is a float or a text.
_WHOLE = re.compile(r"(\d+)(\.0*)?")


def default_device(device: torch.device | str | None) -> torch.device:
    """The device for new parameters.

    ``None`` means torch's default device if the user set one, else CUDA if there
    is one, else the CPU.
    """
    if device is not None:
        return torch.device(device)
    chosen = torch.get_default_device()
    if chosen.type == "cpu" and torch.cuda.is_available() and not is_default_device_set():
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def default_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype for new parameters: ``dtype``, or torch's default.

    Raises
    ------
    InputError
        If it is not fp32, fp16 or bf16.
    """
    chosen = dtype if dtype is not None else torch.get_default_dtype()
    if chosen not in COMPUTE_DTYPES:
        raise InputError(f"Parameters are float32, float16 or bfloat16; got {chosen}.")
    return chosen


def fill_weight(weight: torch.Tensor) -> None:
    """Initialise one weight ``[N, K]``, or each of several ``[G, N, K]``, as torch.nn.Linear."""
    if is_distributed(weight):  # whose ranks have some of the weights, or rows of one
        bound = 1 / math.sqrt(weight.shape[-1])
        torch.nn.init.uniform_(weight, -bound, bound)
        return
    for matrix in weight if weight.dim() == 3 else [weight]:
        torch.nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))


def check_parameter(op: str, name: str, parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a parameter that was replaced by one of another shape; ``op`` names its op.

    A ``DTensor`` has the shape of the whole. Other libraries that shard leave flat or empty
    tensors in the place of parameters outside of a forward.

    Raises
    ------
    InputError
    """
    actual = tuple(parameter.shape)
    is_whole = len(actual) == len(shape) and parameter.numel() and not is_distributed(parameter)
    if actual != shape and is_whole:
        raise InputError(f"{op} has a {name} of shape {actual}; it must be {shape}.")


def check_sizes(op: str, **sizes: object) -> None:
    """Refuse sizes that are not positive integers; each has the name of its argument.

    Raises
    ------
    InputTypeError
        If one is not an integer.
    InputError
        If one is not positive.
    """
    for name, size in sizes.items():
        if not isinstance(size, SupportsIndex) or isinstance(size, bool):
            whole = _WHOLE.fullmatch(str(size))
            hint = f" Write {name}={whole[1]}." if whole else ""
            raise InputTypeError(f"{op} takes an int as {name}; got {size!r:.60}.{hint}")
        if operator.index(size) <= 0:
            raise InputError(f"{op} got {name}={size}; it must be positive.")


def check_parallel_mode(
    op: str, mode: str | None, sequence: bool = False, argument: str = "tensor_parallel_mode"
) -> None:
    """Refuse an unknown mode; it is None, ``"column"`` or ``"row"``.

    ``op`` is its name, and ``argument`` the name of the argument. ``sequence`` says whether to
    shard the sequence too, which needs a mode.

    Raises
    ------
    InputError
    """
    if mode is not None and mode not in get_args(ParallelMode):
        raise InputError(f"{op} got {argument}={mode!r}; it is None, 'column' or 'row'.")
    if mode is None and sequence:
        raise InputError(
            f"{op} got sequence_parallel=True and no {argument}, which says what is gathered or "
            "scattered; it is 'column' or 'row'."
        )


_dtypes: ContextVar[tuple[torch.dtype, ...]] = ContextVar("dtypes", default=COMPUTE_DTYPES)


def compute_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that inputs and parameters may have in this thread."""
    return _dtypes.get()


@contextmanager
def allow_float64() -> Iterator[None]:
    """Inside, pipelines of this thread take float64, for ``torch.autograd.gradcheck``.

    Formulas that an op computes in float32, as activations of the library are, stay in float32. A
    pipeline that was called inside keeps its plan for float64, and takes it afterwards too.
    """
    token = _dtypes.set((*COMPUTE_DTYPES, torch.float64))
    try:
        yield
    finally:
        _dtypes.reset(token)
