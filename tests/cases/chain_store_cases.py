"""Chains into quantized stores: one kernel against the chain and the store one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pointwise_cases
import torch
from kernel_instantiations import BIAS_GELU, BIAS_SWIGLU, GELU, SWIGLU
from pointwise_cases import Case, activation, tensors_of
from quantize_cases import (
    E4M3,
    Place,
    assert_same,
    block_format,
    buffers,
    fp8_format,
    mxfp8_format,
    nvfp4_format,
    rows_format,
)

from fuser.cuda import block_scaling, fp8_scaling, mxfp8, nvfp4, pointwise, rowwise_scaling
from fuser.cuda.arguments import Producer
from fuser.formats import fp8_block_scale_shape, mxfp8_scale_shape, nvfp4_scale_shape
from fuser.reference import chain as reference

Matrix = torch.Tensor | Producer
Outputs = dict[str, torch.Tensor]


# -- stores -------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """A quantize launcher with its options, and the sizes its format takes: multiples of ``step``.

    ``run(place, x, rows, columns)`` returns every output, with the amax that is measured first.
    """

    name: str
    step: int
    run: Callable[[Place, Matrix, int, int], Outputs]

    def __str__(self) -> str:
        return self.name


def measured(place: Place, x: Matrix, launcher: Callable[..., None], count: int) -> torch.Tensor:
    out = torch.zeros(count, device=place.device)
    with place.launching():
        launcher(x, out=out)
    return out


def current(place: Place, x: Matrix, m: int, k: int) -> Outputs:
    amax = measured(place, x, fp8_scaling.amax, 1)
    outputs = {"row": place.empty((m, k)), "col": place.empty((k, m))}
    outputs["scale_inv"] = place.empty((1,), torch.float32)
    with place.launching(*outputs.values()):
        fp8_scaling.quantize(fp8_format(), x, buffers(**outputs), amax_value=amax)
    return {**outputs, "amax": amax}


def row_alone(place: Place, x: Matrix, m: int, k: int) -> Outputs:
    outputs = {"row": place.empty((m, k)), "scale_inv": place.empty((1,), torch.float32)}
    amax = torch.full((1,), 3.0, device=place.device)
    with place.launching(*outputs.values()):
        fp8_scaling.quantize(fp8_format(), x, buffers(**outputs), amax_value=amax)
    return outputs


def delayed(place: Place, x: Matrix, m: int, k: int) -> Outputs:
    outputs = {"row": place.empty((m, k)), "col": place.empty((k, m))}
    outputs["scale_inv"] = place.empty((1,), torch.float32)
    amax, scale = torch.zeros(1, device=place.device), torch.full((1,), 7.3, device=place.device)
    with place.launching(*outputs.values()):
        fp8_scaling.quantize(fp8_format(), x, buffers(**outputs), scale=scale, recorded=amax)
    return {**outputs, "amax": amax}


def blocks(block_dim: int) -> Callable[[Place, Matrix, int, int], Outputs]:
    def run(place: Place, x: Matrix, m: int, k: int) -> Outputs:
        shapes = [fp8_block_scale_shape(m, k, c, block_dim) for c in (False, True)]
        outputs = {
            "row": place.empty((m, k)),
            "row_scale_inv": place.empty(shapes[0], torch.float32),
            "col": place.empty((k, m)),
            "col_scale_inv": place.empty(shapes[1], torch.float32),
        }
        with place.launching(*outputs.values()):
            block_scaling.quantize(block_format(E4M3, block_dim), x, buffers(**outputs))
        return outputs

    return run


def by_rows(place: Place, x: Matrix, m: int, k: int) -> Outputs:
    amaxes = {
        "row_amax": torch.zeros(m, device=place.device),
        "col_amax": torch.zeros(k, device=place.device),
    }
    with place.launching():
        rowwise_scaling.amaxes(x, **amaxes)
    outputs = {
        "row": place.empty((m, k)),
        "row_scale_inv": place.empty((m,), torch.float32),
        "col": place.empty((k, m)),
        "col_scale_inv": place.empty((k,), torch.float32),
    }
    with place.launching(*outputs.values()):
        rowwise_scaling.quantize(rows_format(), x, buffers(**outputs), **amaxes)
    return {**outputs, **amaxes}


def mx(two_dimensional: bool, swizzled: bool) -> Callable[[Place, Matrix, int, int], Outputs]:
    def run(place: Place, x: Matrix, m: int, k: int) -> Outputs:
        col_shape = mxfp8_scale_shape(m, k, True)
        outputs = {
            "row": place.empty((m, k)),
            "row_scale": place.empty(mxfp8_scale_shape(m, k, False)),
            "col": place.empty((m, k)),
            "col_scale": place.empty(col_shape[::-1] if swizzled else col_shape),
        }
        with place.launching(*outputs.values()):
            mxfp8.quantize(mxfp8_format(E4M3, two_dimensional, swizzled), x, buffers(**outputs))
        return outputs

    return run


def nv(place: Place, x: Matrix, m: int, k: int, **options: Any) -> Outputs:
    amax = torch.full((1,), 5.0, device=place.device)
    outputs = {
        "row": place.empty((m, k // 2)),
        "row_scale": place.empty(nvfp4_scale_shape(m, k, False)),
        "col": place.empty((k, m // 2)),
        "col_scale": place.empty(nvfp4_scale_shape(m, k, True)),
    }
    with place.launching(*outputs.values()):
        nvfp4.quantize(nvfp4_format(), x, buffers(**outputs), amax, **options)
    return outputs


def nv_transformed(place: Place, x: Matrix, m: int, k: int) -> Outputs:
    amaxes = measured(place, x, nvfp4.hadamard_amax, 2)
    return {**nv(place, x, m, k, hadamard=True, stochastic=True, seed=3), "amaxes": amaxes}


STORES = (
    Store("current", 1, current),
    Store("delayed", 1, delayed),
    Store("1x128", 1, blocks(1)),
    Store("128x128", 1, blocks(2)),
    Store("rowwise", 1, by_rows),
    Store("mxfp8", 32, mx(False, False)),
    Store("mxfp8-swizzled", 32, mx(False, True)),
    Store("mxfp8-2d", 32, mx(True, True)),
    Store("nvfp4", 16, nv),
)
ONE_STORE = STORES[2]
NVFP4_TRANSFORMED = Store("nvfp4-transformed", 16, nv_transformed)
ROW_ALONE = Store("row", 1, row_alone)


# -- chains -------------------------------------------------------------------

INTERLEAVED = (activation("swiglu", 16),)
CHAINS = {
    "gelu": Case(GELU),
    "swiglu": Case(SWIGLU),
    "interleaved": Case(INTERLEAVED),
    "bias_gelu": Case(BIAS_GELU, wanted=(0,), saved=1),
}
ERF = Case((activation("gelu_erf"),))
TWO_HALVES = Case(BIAS_SWIGLU, wanted=(0,))


@dataclass(frozen=True)
class Made:
    """A chain's output or its dx: by a producer, and by the chain's own kernel."""

    producer: Producer
    values: torch.Tensor
    sums: torch.Tensor | None = None


def made(case: Case, place: Place, backward: bool) -> Made:
    """The values of ``case`` there; backward with sums where a bias's gradient is wanted."""
    t = tensors_of(case, device=place.device)
    size = (case.rows, case.columns)
    if not backward:
        with place.launching(t.y):
            pointwise.pointwise(case.stages, t.x, t.operands, t.y)
        return Made(pointwise.forward_producer(case.stages, t.x, t.operands, *size), t.y)
    saved = reference.forward(case.stages[: case.saved], t.x, t.operands[: case.saved])
    saved = pointwise_cases.padded(saved, case.pads, rows_too=True)
    operands = [None if i < case.saved else operand for i, operand in enumerate(t.operands)]
    with place.launching(t.dx, *t.grads):
        pointwise.pointwise_backward(
            *(case.stages, t.dy, saved, operands, t.dx, t.grads, t.workspace), saved=case.saved
        )
    sums = None
    if case.wanted:
        sums = torch.full(pointwise.sums_shape(*t.dx.shape), torch.nan, device=place.device)
    producer = pointwise.backward_producer(
        *(case.stages, t.dy, saved, operands, *size), saved=case.saved, sums=sums
    )
    return Made(producer, t.dx, sums)


def sized(case: Case, store: Store, *, odd: bool = False, large: bool = False) -> Case:
    """The case in a shape that the store takes: of several tiles, with edges."""
    step = store.step
    if large:
        return replace(case, rows=1024 + 3 * step * odd, columns=2048 + 48 * step * odd)
    if not odd:
        return replace(case, rows=144 if step < 32 else 160, columns=80 if step < 32 else 96)
    # Sizes that no vector fits, or else views that are not aligned.
    if step == 1 and not any(stage.interleave for stage in case.stages):
        return replace(case, rows=131, columns=37)
    return replace(case, rows=step if step > 1 else 17, columns=32 if step < 32 else 64, pads=1)


def check(case: Case, store: Store, place: Place, *, backward: bool) -> None:
    """The bytes of the chain into the store are those of the chain, then the store."""
    one = made(case, place, backward)
    rows, columns = one.values.shape
    wanted = store.run(place, one.values, rows, columns)
    got = store.run(place, one.producer, rows, columns)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same(got[name], value, name)
    if one.sums is not None:
        check_sums(one, case, place)


def check_sums(one: Made, case: Case, place: Place) -> None:
    """The sums of tiles add up to dx's: in fp32, so as exactly as a sum of so many can be."""
    assert one.sums is not None
    exact = one.values.double().sum(0)
    magnitude = one.values.double().abs().sum(0)
    gradient = place.empty((one.values.shape[1],), case.dtype)
    with place.launching(gradient):
        pointwise.sum_parts(one.sums, gradient)
    allowed = 2**-20 * magnitude + torch.finfo(case.dtype).eps * exact.abs()
    assert ((gradient.double() - exact).abs() <= allowed).all()
