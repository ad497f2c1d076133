"""The emulator's Hopper: barriers, the copy engine, registers and products of warpgroups.

Its kernels are in ``tests/emulator/kernels``: ``sm90.cu`` and ``sm90_faults.cu``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from emulator import KernelError, emulated, prepare
from number_formats import E4M3, E5M2, SmallFloat
from paths import EMULATOR_KERNELS

from fuser.cuda import launch as launching
from fuser.cuda.arguments import Struct, float32, int32
from fuser.cuda.launch import Kernel, Launch

FORMATS = {"kE4m3": E4M3, "kE5m2": E5M2}
COPIES = {
    "kOddBytes": "load_bytes at .*sm90_faults.cu:.* copies 248 bytes",
    "kOddSource": "a source that is 8 bytes beyond a multiple of 16",
    "kOddPlace": "load_bytes at .* a place that is 8 bytes beyond a multiple of 16",
    "kOddBoxPlace": "load_box at .* a place that is 64 bytes beyond a multiple of 128",
    "kBeyondSource": "READ of size(.|\n)*at byte 256 of argument 1, which has 256 bytes",
    "kBeyondShared": "of dynamic shared memory, which has 9472 bytes",
    "kOutsideShared": "load_bytes at .* gets an address outside of shared memory",
    "kNotInitialised": "arrive_expecting at .* not initialised, at byte 0 of shared variable full",
    "kInitialisedTwice": "init_barrier at .* initialises .* again",
    "kNotPublished": "load_box at .* not published",
    "kNoCount": "a count of 0; it is 1 to 1048575",
    "kOverwritten": "arrive_expecting at .* has been overwritten, at byte 0 of shared variable f",
    "kTooManyArrivals": "arrive at .* is arrival 2 of a phase .* whose count is 1",
    "kTooFewBytes": "deadlocks(.|\n)*for 0 arrivals and -256 bytes at the barrier",
    "kTooManyBytes": r"deadlocks(.|\n)*64 threads \(0 to 63\) wait in wait at .*sm90_faults.cu:.*"
    ", parity 0, for 0 arrivals and 16 bytes at the barrier at byte 0 of shared variable full",
    "kNobodyArrives": "deadlocks(.|\n)*for 1 arrivals and -8448 bytes",
    "kReadBeforeWait": "argument 2 .* not the same",
    "kNoWait": "ends before 8192 bytes land",
}
PRODUCTS = {
    "kOddOperand": "add_product at .*sm90_faults.cu.* begins at a multiple of 32 bytes in the fi",
    "kOperandOutside": "operand at .* gets an address outside of shared memory",
    "kNoSwizzle": "gets the descriptor 0x.*; its swizzle is 128 bytes",
    "kNotBegun": "add_product at .* without begin_products",
    "kNotBegunAgain": "add_product at .* without begin_products",
    "kReadBeforeWait": "argument 1 .* not the same",
    "kWrittenBeforeWait": "wait_for_products at .* sums were written before",
    "kWaitForNothing": "ends before the product of add_product at",
    "kNotClosed": "ends before the product of add_product at",
    "kNoWait": "ends before the product of add_product at",
    "kThreeWarps": r"deadlocks(.|\n)*96 threads \(0 to 95\) wait in add_product at ",
    "kTwoOperands": "call add_product at .* with different arguments",
    "kTwoPlaces": "meet in two calls: add_product at .* and add_product at ",
    "kReleasedEarly": "argument 1 .* not the same",
}
REGISTERS = {
    "kNotEights": "gets 60 registers; it is a multiple of 8 from 24 to 256",
    "kTooFew": "gets 16 registers",
    "kHalf": r"deadlocks(.|\n)*64 threads \(256 to 319\) wait in give_registers_back",
    "kTooMany": r"deadlocks(.|\n)*128 threads .* wait in take_registers at .*, for 248 registers; "
    "the block has 504, the others 272",
    "kGiveMore": "asks for 176 registers, and the warpgroup has 168",
    "kTakeLess": "asks for 160 registers, and the warpgroup has 168",
}


def product_kernel(a: str, b: str, sums: int) -> Kernel:
    return Kernel("sm90", f"fuser_product<Fp8::{a}, Fp8::{b}, {sums}>")


LOAD = Kernel("sm90", "fuser_load")
STAGES = {meets: Kernel("sm90_faults", f"fuser_stages<{meets}>") for meets in ("true", "false")}
prepare(LOAD, *(product_kernel(a, b, n) for a in FORMATS for b in FORMATS for n in (64, 128)))
FAULTS = {
    (kind, name): Kernel("sm90_faults", f"fuser_{kernel}<{kind}::{name}>")
    for kind, kernel, names in (
        ("Copy", "copy", COPIES),
        ("Product", "multiply", PRODUCTS),
        ("Registers", "registers", REGISTERS),
    )
    for name in ("kRight", *names)
}
prepare(*FAULTS.values(), *STAGES.values())


def map_of(
    matrix: torch.Tensor, box_rows: int, changes: Mapping[str, int] = MappingProxyType({})
) -> Struct:
    """The argument for a TensorMap of a matrix of bytes, inside ``emulated()``."""
    backend: Any = launching.backend
    fields = list(backend.tensor_map(matrix, box_rows))
    for place, word in changes.items():
        names = ("address", "columns", "rows", "row_bytes", "width", "box_rows")
        fields[names.index(place)] = np.uint64(word)
    return Struct(tuple(fields))


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def swizzled(box: torch.Tensor) -> torch.Tensor:
    """A box [rows, 128] as it is in shared memory: 16-byte chunk c of row r is at c ^ r % 8."""
    rows = torch.arange(len(box))[:, None]
    places = torch.arange(8)[None] ^ rows % 8
    return box.view(-1, 8, 16)[rows, places].reshape(len(box), 128)


# -- copies ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "row", "box_rows"),
    [(0, 0, 64), (128, 64, 128), (256, 0, 8), (100, 90, 16), (-5, -3, 256), (400, 0, 8)],
)
def test_a_box_is_swizzled_and_zero_outside_of_the_matrix(
    column: int, row: int, box_rows: int
) -> None:
    storage, extra = random_bytes(100, 320), random_bytes(48)
    matrix = storage[:, :300]
    y = torch.empty((box_rows * 128 + 48,), dtype=torch.uint8)
    with emulated(sources=EMULATOR_KERNELS, written=(y,)):
        LOAD(
            *(Launch((2,), (64,), box_rows * 128 + 48 + 1024), map_of(matrix, box_rows)),
            *(int32(column), int32(row), int32(box_rows), extra, int32(48), y),
        )
    padded = torch.zeros(100 + 600, 300 + 800, dtype=torch.uint8)
    padded[300:400, 400:700] = matrix
    box = padded[300 + row :, 400 + column :][:box_rows, :128]
    assert torch.equal(y[: box_rows * 128].view(-1, 128), swizzled(box.contiguous()))
    assert torch.equal(y[box_rows * 128 :], extra)


@pytest.mark.parametrize("readers", [1, 3])
def test_bytes_go_through_stages_that_take_turns(readers: int) -> None:
    x = torch.randint(-100, 100, (9, 32), dtype=torch.int32)
    y = torch.empty(readers, 32, dtype=torch.int32)
    with emulated(sources=EMULATOR_KERNELS, written=(y,)):
        STAGES["true"](Launch((1,), (32 * (readers + 1),)), x, y, int32(9))
    assert torch.equal(y, (x * torch.arange(1, 10)[:, None]).sum(0).int().expand(readers, 32))


def test_a_stage_that_is_released_before_all_lanes_have_read_it_is_found() -> None:
    x = torch.randint(-100, 100, (9, 32), dtype=torch.int32)
    y = torch.empty(3, 32, dtype=torch.int32)
    words = "argument 1 .* not the same when a warp runs to its next barrier"
    with emulated(sources=EMULATOR_KERNELS), pytest.raises(KernelError, match=words):
        STAGES["false"](Launch((1,), (128,)), x, y, int32(9))


@pytest.mark.parametrize("mistake", ["kRight", *COPIES])
def test_mistakes_in_copies_are_found(mistake: str) -> None:
    matrix, extra = random_bytes(64, 128), random_bytes(256)
    y = torch.zeros(256, dtype=torch.uint8)
    launch = Launch((1,), (64,), 64 * 128 + 256 + 1024)
    kernel = FAULTS["Copy", mistake]
    with emulated(sources=EMULATOR_KERNELS):
        if mistake == "kRight":
            kernel(launch, map_of(matrix, 64), extra, y)
            assert torch.equal(y[128:192], extra[:64])
        else:
            with pytest.raises(KernelError, match=COPIES[mistake]):
                kernel(launch, map_of(matrix, 64), extra, y)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 65}, "at byte 8192 of argument 0, which has 8192 bytes"),
        ({"box_rows": 257}, "load_box at .* a box of 257 rows; it has 1 to 256"),
        ({"width": 64}, "a box of 64 columns with a swizzle of 128 bytes"),
        ({"row_bytes": 120}, "a matrix with rows that is 8 bytes beyond a multiple of 16"),
    ],
)
def test_a_map_that_is_not_its_matrix_is_found(changes: dict[str, int], words: str) -> None:
    matrix, y = random_bytes(64, 128), torch.zeros(256, dtype=torch.uint8)
    kernel, launch = FAULTS["Copy", "kRight"], Launch((1,), (64,), 256 * 128 + 1024)
    with emulated(sources=EMULATOR_KERNELS), pytest.raises(KernelError, match=words):
        kernel(launch, map_of(matrix, 72, changes), random_bytes(256), y)


@pytest.mark.parametrize(
    ("rows", "columns", "first", "box_rows", "words"),
    [
        (64, 128, 0, 257, "a box of 257 rows"),
        (0, 128, 0, 64, "a matrix of 0 rows and 128 columns"),
        (64, 100, 0, 64, "rows of 100 bytes"),
        (64, 128, 8, 64, "address 0x.*8, no multiple"),
    ],
)
def test_a_map_that_the_driver_refuses_is_refused(
    rows: int, columns: int, first: int, box_rows: int, words: str
) -> None:
    memory = torch.zeros(rows * columns + 16, dtype=torch.uint8)
    matrix = memory[first : first + rows * columns].view(rows, columns)
    backend: Any
    with emulated():
        backend = launching.backend
        with pytest.raises(KernelError, match=words):
            backend.tensor_map(matrix, box_rows)


# -- products -------------------------------------------------------------------


def decoded(codes: torch.Tensor, small: SmallFloat) -> np.ndarray[Any, Any]:
    """fp64 values of finite codes."""
    values = codes.numpy()
    found: np.ndarray[Any, Any] = np.where(values & 128, -1.0, 1.0) * small.values[values & 127]
    return found


@pytest.mark.parametrize("sums", [64, 128])
@pytest.mark.parametrize("b_format", FORMATS)
@pytest.mark.parametrize("a_format", FORMATS)
def test_products_are_those_of_the_values(a_format: str, b_format: str, sums: int) -> None:
    # Every finite code: E4M3 has one NaN, E5M2 infinities and NaNs.
    counts = {"kE4m3": 127, "kE5m2": 124}
    for blocks, start in ((1, 0.0), (2, 3.0)):
        a, b = (
            torch.randint(0, counts[name], (rows, 128 * blocks), dtype=torch.uint8)
            | (torch.randint(0, 2, (rows, 128 * blocks)) * 128).byte()
            for name, rows in ((a_format, 64), (b_format, 2 * sums))
        )
        y = torch.empty(64, 2 * sums)
        launch = Launch((1,), (128,), (64 + 2 * sums) * 128 + 1024)
        with emulated(sources=EMULATOR_KERNELS, written=(y,)):
            product_kernel(a_format, b_format, sums)(
                *(launch, map_of(a, 64), map_of(b, 2 * sums), y, int32(blocks), float32(start))
            )
        left, right = decoded(a, FORMATS[a_format]), decoded(b, FORMATS[b_format])
        bound = 2.0**-20 * (np.abs(left) @ np.abs(right).T + abs(start))
        assert (np.abs(y.numpy() - (start + left @ right.T)) <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
def test_infinities_and_nans_go_through_products(name: str) -> None:
    a = torch.zeros(64, 128, dtype=torch.uint8)
    b = torch.full((128, 128), 0x38 if name == "kE4m3" else 0x3C, dtype=torch.uint8)  # 1
    a[3, 5], a[60, 127] = 0x7F, 0x7C if name == "kE5m2" else 0x7F
    y = torch.empty(64, 128)
    with emulated(sources=EMULATOR_KERNELS, written=(y,)):
        product_kernel(name, name, 64)(
            *(Launch((1,), (128,), 192 * 128 + 1024), map_of(a, 64), map_of(b, 128)),
            *(y, int32(1), float32(0.0)),
        )
    assert y[3].isnan().all()
    assert (y[60].isposinf() if name == "kE5m2" else y[60].isnan()).all()
    assert (y[[row for row in range(64) if row not in (3, 60)]] == 0).all()


@pytest.mark.parametrize("mistake", ["kRight", *PRODUCTS])
def test_mistakes_in_products_are_found(mistake: str) -> None:
    matrix = torch.randint(0, 100, (128, 256), dtype=torch.uint8)
    y = torch.zeros(256)
    launch = Launch((1,), (160,), 128 * 128 + 1024)
    kernel = FAULTS["Product", mistake]
    with emulated(sources=EMULATOR_KERNELS):
        if mistake == "kRight":
            kernel(launch, map_of(matrix, 128), y)
            values = decoded(matrix, E4M3)
            total = sum(part[:64] @ part.T for part in (values[:, :32], values[:, 128:160]))
            np.testing.assert_allclose(float(y.double().sum()), total.sum(), rtol=1e-5)
        else:
            with pytest.raises(KernelError, match=PRODUCTS[mistake]):
                kernel(launch, map_of(matrix, 128), y)


# -- registers ------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["kRight", *REGISTERS])
def test_mistakes_in_registers_are_found(mistake: str) -> None:
    y = torch.zeros(384, dtype=torch.int32)
    kernel, launch = FAULTS["Registers", mistake], Launch((1,), (384,))
    with emulated(sources=EMULATOR_KERNELS):
        if mistake == "kRight":
            kernel(launch, y)
            assert (y == 1).all()
        else:
            with pytest.raises(KernelError, match=REGISTERS[mistake]):
                kernel(launch, y)


def test_a_part_of_a_warpgroup_has_no_registers_to_give() -> None:
    y = torch.zeros(64, dtype=torch.int32)
    with (
        emulated(sources=EMULATOR_KERNELS),
        pytest.raises(KernelError, match="a warpgroup of 64 threads"),
    ):
        FAULTS["Registers", "kRight"](Launch((1,), (64,)), y)
