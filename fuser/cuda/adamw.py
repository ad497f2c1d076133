"""Launchers of a step of AdamW: the functions of ``fuser.reference.adamw``.

The weights of a step are in fp32, and a parameter has them rounded to its dtype, or quantized:
:func:`producer` makes the rounded values for a kernel that quantizes, and takes the step there.
InputError if a tensor does not match its description.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fuser.cuda.arguments import ELEMENTS, TILE_RUN, Producer, Struct, int64
from fuser.cuda.checks import boolean, check_buffer, check_element, is_aligned
from fuser.cuda.launch import Kernel, Launch
from fuser.formats import ceil_div

THREADS = 256


class AdamWStep(NamedTuple):
    """The tensors of a step: fp32 and contiguous, of one shape.

    The gradient may have the dtype of the parameter; constants are those of the reference.
    """

    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    constants: torch.Tensor


def adamw(
    step: AdamWStep,
    dtype: torch.dtype,
    *,
    values: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    """Take the step, in one pass.

    Moves 24 bytes an element, those of the gradient, and those of ``values``: the new weights in
    ``dtype``, that of the parameter. ``amax``, fp32 ``[1]``, not negative, is raised to the amax of
    the rounded weights; a NaN is above all numbers.
    """
    launcher = "adamw"
    _check(launcher, step)
    check_buffer(launcher, "values", values, dtype, step.master.shape)
    check_buffer(launcher, "amax", amax, torch.float32, (1,))
    n = step.master.numel()
    is_wide = n % TILE_RUN == 0 and is_aligned(values, 16) and are_aligned(step)
    count = TILE_RUN if is_wide else 1
    kernel = _adamw(ELEMENTS[dtype], check_element(launcher, step.gradient), count)
    kernel(_launch(n, count), Struct(tuple(step)), values, amax, int64(n))


def producer(step: AdamWStep, dtype: torch.dtype) -> Producer:
    """The producer of the new weights, rounded to ``dtype``; its kernel takes the step.

    It reads 12 bytes an element and the gradient, and writes 12. The step :func:`are_aligned`.
    """
    launcher = "adamw"
    _check(launcher, step, alignment=16)
    element = check_element(launcher, step.gradient)

    def of(writes: bool) -> Producer:
        kind = producer_type(ELEMENTS[dtype], element, writes)
        m, k = step.master.shape
        return Producer(kind, Struct(tuple(step)), m, k, dtype, is_aligned=True)

    return of(True)._replace(alone=of(False))


def rounded_producer(x: torch.Tensor, dtype: torch.dtype) -> Producer:
    """The producer that loads fp32 ``[M, K]``, at 16 bytes, and rounds it to ``dtype``."""
    m, k = x.shape
    check_buffer("rounded_producer", "x", x, torch.float32, (m, k), 16)
    kind = rounded_type(ELEMENTS[dtype])
    return Producer(kind, Struct((x, int64(k))), m, k, dtype, is_aligned=True)


def are_aligned(step: AdamWStep) -> bool:
    """Whether rows and tensors begin at multiples of 16 bytes, as :func:`producer` takes them."""
    tensors = step[:-1]
    return step.master.shape[-1] % TILE_RUN == 0 and all(is_aligned(x, 16) for x in tensors)


def _check(launcher: str, step: AdamWStep, alignment: int = 1) -> None:
    shape = tuple(step.master.shape)
    for name, tensor in step._asdict().items():
        if name == "constants":
            check_buffer(launcher, name, tensor, torch.float32, (9,))
        else:
            dtype = tensor.dtype if name == "gradient" else torch.float32
            check_buffer(launcher, name, tensor, dtype, shape, alignment)


@functools.lru_cache(maxsize=1024)
def _launch(n: int, count: int) -> Launch:
    return Launch((max(1, ceil_div(n, THREADS * count)),), (THREADS,))


# -- kernels ------------------------------------------------------------------


@functools.cache
def _adamw(element: str, gradient: str, count: int) -> Kernel:
    return Kernel("adamw", f"fuser_adamw<{element}, {gradient}, {count}>")


def producer_type(element: str, gradient: str, writes: bool) -> str:
    """The C++ type of :func:`producer`."""
    return f"fuser::AdamWProducer<{element}, {gradient}, {boolean(writes)}>"


def rounded_type(element: str) -> str:
    """The C++ type of :func:`rounded_producer`."""
    return f"fuser::RoundedProducer<{element}>"


def element_types() -> tuple[tuple[str, str], ...]:
    """The dtype of a parameter, and of its gradient: the same or fp32."""
    elements = ELEMENTS.values()
    return tuple(dict.fromkeys((element, of) for element in elements for of in (element, "float")))


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel of its own; ``tests/kernel_instantiations.py`` has the producers."""
    return tuple(_adamw(*types, count) for types in element_types() for count in (1, TILE_RUN))
