"""Normalizations into stores: one kernel against the row kernel and the store one after the other.

The quantize launchers say how each store is launched over a matrix; :class:`Into` puts a producer
in the matrix's place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from normalization_cases import (
    BF16,
    F16,
    F32,
    Case,
    Recorder,
    backward,
    backward_producer,
    forward,
    inputs_of,
    placed,
    producer,
    same_bits,
)
from quantize_cases import (
    E4M3,
    block_format,
    buffers,
    fp8_format,
    mxfp8_format,
    nvfp4_format,
    rows_format,
)

from fuser.cuda import block_scaling, fp8_scaling, mxfp8, nvfp4, rowwise_scaling
from fuser.cuda import launch as launching
from fuser.cuda.arguments import Producer, Struct, int32, int64
from fuser.cuda.launch import Kernel, Launch, tiles
from fuser.formats import fp8_block_scale_shape, mxfp8_scale_shape, nvfp4_scale_shape

SOURCES = Path(__file__).parents[1] / "emulator" / "kernels"
SOURCE = "norm_stores"

Outputs = dict[str, torch.Tensor]
Running = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]
"""A context in which launchers run, and must write the given tensors completely."""


class Into(launching.LaunchBackend):
    """Runs kernels of tiles that load a matrix with a producer in the matrix's place."""

    def __init__(self, inner: launching.LaunchBackend, made: Producer) -> None:
        self.inner, self.made = inner, made

    def run(self, kernel: Kernel, launch: Launch, args: tuple[Any, ...]) -> None:
        found = re.fullmatch(r"fuser_tiled<fuser::LoadProducer<[^>]*>, (.*)>", kernel.symbol)
        assert found, kernel.symbol
        store = found[1] if self.made.is_aligned else found[1].replace("true>", "false>")
        instead = Kernel(SOURCE, f"fuser_norm_store<{self.made.type}, {store}>")
        self.inner.run(instead, launch, (self.made.argument, *args[1:]))


@contextmanager
def into(made: Producer) -> Iterator[None]:
    """Inside, launchers of stores take the producer for their matrix."""
    before = launching.backend
    launching.backend = Into(before, made)
    try:
        yield
    finally:
        launching.backend = before


# -- stores -------------------------------------------------------------------

# Each makes its outputs, and a function that launches over a matrix.
Store = Callable[[torch.Tensor], tuple[Outputs, Callable[[torch.Tensor], None]]]


def empty(like: torch.Tensor, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.full(shape, 0xA5, dtype=torch.uint8, device=like.device).to(dtype)


def bytes_of(like: torch.Tensor) -> Outputs:
    m, k = like.shape
    return {"row": empty(like, m, k), "col": empty(like, k, m)}


def delayed(like: torch.Tensor) -> tuple[Outputs, Callable[[torch.Tensor], None]]:
    outputs = {**bytes_of(like), "scale_inv": empty(like, 1, dtype=F32)}
    scale, amax = torch.full((1,), 7.3, device=like.device), torch.zeros(1, device=like.device)

    def run(x: torch.Tensor) -> None:
        fp8_scaling.quantize(fp8_format(), x, buffers(**outputs), scale=scale, recorded=amax)

    return outputs, run


def current(like: torch.Tensor) -> tuple[Outputs, Callable[[torch.Tensor], None]]:
    outputs = {**bytes_of(like), "scale_inv": empty(like, 1, dtype=F32)}
    amax = torch.full((1,), 3.7, device=like.device)
    return outputs, lambda x: fp8_scaling.quantize(
        fp8_format(), x, buffers(**outputs), amax_value=amax
    )


def blocks(like: torch.Tensor, dim: int) -> tuple[Outputs, Callable[[torch.Tensor], None]]:
    m, k = like.shape
    row_shape, col_shape = (fp8_block_scale_shape(m, k, c, dim) for c in (False, True))
    outputs = {
        **bytes_of(like),
        "row_scale_inv": empty(like, *row_shape, dtype=F32),
        "col_scale_inv": empty(like, *col_shape, dtype=F32),
    }
    return outputs, lambda x: block_scaling.quantize(block_format(E4M3, dim), x, buffers(**outputs))


def by_rows(like: torch.Tensor) -> tuple[Outputs, Callable[[torch.Tensor], None]]:
    m, k = like.shape
    outputs = {
        **bytes_of(like),
        "row_scale_inv": empty(like, m, dtype=F32),
        "col_scale_inv": empty(like, k, dtype=F32),
    }

    def run(x: torch.Tensor) -> None:
        amaxes = {
            "row_amax": torch.full((m,), 3.0, device=like.device),
            "col_amax": torch.full((k,), 5.0, device=like.device),
        }
        rowwise_scaling.quantize(rows_format(), x, buffers(**outputs), **amaxes)

    return outputs, run


def mx(like: torch.Tensor, is_square: bool) -> tuple[Outputs, Callable[[torch.Tensor], None]]:
    m, k = like.shape
    outputs = {
        "row": empty(like, m, k),
        "row_scale": empty(like, *mxfp8_scale_shape(m, k, False)),
        "col": empty(like, m, k),
        "col_scale": empty(like, *mxfp8_scale_shape(m, k, True)),
    }
    return outputs, lambda x: mxfp8.quantize(mxfp8_format(E4M3, is_square), x, buffers(**outputs))


def nv(like: torch.Tensor, **options: Any) -> tuple[Outputs, Callable[[torch.Tensor], None]]:
    m, k = like.shape
    amax = torch.full((1,), 5.0, device=like.device)
    outputs = {
        "row": empty(like, m, k // 2),
        "row_scale": empty(like, *nvfp4_scale_shape(m, k, False)),
        "col": empty(like, k, m // 2),
        "col_scale": empty(like, *nvfp4_scale_shape(m, k, True)),
    }
    return outputs, lambda x: nvfp4.quantize(nvfp4_format(), x, buffers(**outputs), amax, **options)


# Any size; multiples of 32.
ANY: dict[str, Store] = {
    "current": current,
    "delayed": delayed,
    "1x128": lambda like: blocks(like, 1),
    "128x128": lambda like: blocks(like, 2),
    "rowwise": by_rows,
}
STORES: dict[str, Store] = ANY | {
    "mxfp8": lambda like: mx(like, False),
    "mxfp8-2d": lambda like: mx(like, True),
    "nvfp4": nv,
    "nvfp4-transformed": lambda like: nv(like, hadamard=True, stochastic=True, seed=3),
}

# Of 32 x 32 blocks; of any size; spaced and at an offset.
BLOCKS = (
    Case("rmsnorm", BF16, BF16, BF16, 160, 288, adds=True),
    Case("layernorm", BF16, BF16, F32, 32, 160, adds=True, is_zero_centered=True),
)
ODD = (
    Case("rmsnorm", BF16, BF16, F16, 130, 264, is_zero_centered=True),
    Case("rmsnorm", F32, BF16, F32, 16, 136, adds=True),
    Case("rmsnorm", F32, F32, BF16, 48, 40, adds=True),
    Case("layernorm", F16, F16, F16, 9, 31, adds=True),
    Case("layernorm", F32, F16, F32, 17, 72),
    Case("layernorm", F32, F32, F16, 16, 24, is_zero_centered=True),
    Case("rmsnorm", BF16, BF16, BF16, 20, 64, adds=True, offset=1),
    Case("layernorm", BF16, BF16, BF16, 20, 64, adds=True, spacing=8),
    Case("rmsnorm", BF16, BF16, BF16, 20, 64, adds=True, spacing=3),
    Case("l2norm", BF16, BF16, F32, 33, 48),
)
LARGE = (
    *(
        Case(norm, x, y, F32, 544, 1536, adds=adds)
        for norm in ("rmsnorm", "layernorm")
        for x, y in ((BF16, BF16), (F16, F16), (F32, BF16), (F32, F32))
        for adds in (False, True)
    ),
    Case("rmsnorm", BF16, BF16, BF16, 4096, 8192, adds=True),
    Case("layernorm", BF16, BF16, BF16, 2048, 4096, adds=True, is_zero_centered=True),
)


# -- checks -------------------------------------------------------------------


def two_passes(
    case: Case, running: Running, device: str = "cpu"
) -> tuple[tuple[torch.Tensor, Producer], tuple[torch.Tensor, Producer]]:
    """y and dx as the row kernels write them, and their producers from statistics alone."""
    given = inputs_of(case, device)
    written = forward(case, given, running)
    statistics = forward(case, given, running, has_y=False)
    if case.adds:
        given["x"] = placed(statistics["z"], case.spacing, case.offset)
    dx = backward(case, given, written, running)["dx"]
    statistics |= backward(case, given, written, running, has_dx=False, has_means=True)
    return (
        (written["y"], producer(case, given, statistics)),
        (dx, backward_producer(case, given, statistics)),
    )


def values(made: Producer, running_own: Running, device: str = "cpu") -> torch.Tensor:
    """What a producer makes, as it is."""
    out = torch.empty(made.rows, made.columns, dtype=made.dtype, device=device)
    kernel = Kernel(SOURCE, f"fuser_norm_store<{made.type}, PlainStore>")
    with running_own((out,)):
        sizes = (int64(made.rows), int32(made.columns))
        kernel(tiles(made.rows, made.columns), made.argument, Struct((out,)), *sizes)
    return out


def check_values(case: Case, running: Running, running_own: Running, device: str = "cpu") -> None:
    for expected, made in two_passes(case, running, device):
        assert same_bits(values(made, running_own, device), expected)


def check_store(
    name: str, case: Case, running: Running, running_own: Running, device: str = "cpu"
) -> None:
    for matrix, made in two_passes(case, running, device):
        expected, run = STORES[name](matrix)
        with running(tuple(expected.values())):
            run(matrix)
        got, run = STORES[name](matrix)
        with running_own(tuple(got.values())), into(made):
            run(matrix)
        for output in expected:
            assert same_bits(got[output], expected[output]), output


def kernels_of(names: Sequence[str | None], cases: Sequence[Case]) -> tuple[Kernel, ...]:
    """The kernels that these checks launch besides the launchers' own; None checks values."""
    recorder = Recorder()
    for case in cases:
        for matrix, made in two_passes(case, recorder.running):
            for name in names:
                if name is None:
                    values(made, recorder.running)
                    continue
                _, run = STORES[name](matrix)
                with recorder.running(()), into(made):
                    run(matrix)
    return tuple(kernel for kernel in recorder.kernels if kernel.module == SOURCE)
