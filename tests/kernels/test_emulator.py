"""The emulator: kernels that use CUDA as kernels do give the right values, and mistakes are found.

Its kernels are in ``tests/emulator/kernels``: ``features.cu``, ``faults.cu`` and ``conversions.cu``
for the functions of ``fuser/core/hardware.cuh``.
"""

from __future__ import annotations

import struct
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulator import KernelError, backend, emulated, prepare, why_unavailable
from emulator import compile as compilation
from emulator import worker as workers
from emulator.conversions import check, hard_inputs, launch_for, outputs_for
from kernel_instantiations import instantiations
from paths import EMULATOR_KERNELS
from said import holds, said

from fuser.cuda import launch as launching
from fuser.cuda.arguments import Struct, encode, float32, int32, int64
from fuser.cuda.launch import Kernel, Launch, multiprocessors
from fuser.cuda.probe import probe
from fuser.errors import InputError, InputTypeError
from fuser.formats import DType
from fuser.reference import fp8_scaling, nvfp4

needs_emulator = pytest.mark.skipif(
    why_unavailable() is not None, reason=f"needs the emulator: {why_unavailable()}"
)

FEATURES = {
    name: Kernel("features", f"fuser_{name}")
    for name in (
        *("where", "collectives", "atomics", "predicates", "numbers", "intrinsics", "many"),
        *("double", "steps", "row_sum<float, 64>", "row_sum<__nv_bfloat16, 128>"),
        *("transpose<float>", "transpose<unsigned char>"),
    )
}
FAULTS = {
    name: Kernel("faults", f"fuser_{name}")
    for name in (
        *("read_at", "write_at", "vector_at", "static_shared_at<int>", "static_shared_at<short>"),
        *("dynamic_shared_at", "write_some", "add_to", "forget_barrier", "read_garbage"),
        *("sum_in_any_order", "leave_before_barrier", "two_barriers", "divergent_shuffle"),
        *("shuffle_beyond_the_block", "shuffle_outside_the_mask", "spin", "trap"),
        *("read_copies<0>", "read_copies<1>", "copy_over"),
        *("sum_again<1>", "sum_again<2>", "read_stages<1>", "read_stages<2>"),
    )
}
prepare(*FEATURES.values(), *FAULTS.values())


def run(name: str, launch: Launch, *args: Any, written: Any = (), **options: Any) -> None:
    """One launch of a kernel of features.cu or faults.cu in the emulator."""
    with emulated(sources=EMULATOR_KERNELS, written=written, **options):
        {**FEATURES, **FAULTS}[name](launch, *args)


def fault(words: str, name: str, launch: Launch, *args: Any, **options: Any) -> str:
    """The message of a launch that must fail with ``words``."""
    with pytest.raises(KernelError, match=words) as raised:
        run(name, launch, *args, **options)
    message = str(raised.value)
    assert message.startswith(f"fuser_{name} (Launch(grid="), message
    return message


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int32)


# -- launchers run in it --------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (255,), (257,), (3, 5, 7), (0, 4)])
def test_a_launcher_runs_on_cpu_tensors(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(shape), torch.empty(shape)
    with emulated(written=(y,)):
        probe(x, y, 0.37)
    i = torch.arange(x.numel(), dtype=torch.float64).view(shape)
    expected = (float(np.float32(0.37)) * x.double() + i).float()
    torch.testing.assert_close(y, expected, rtol=2**-23, atol=0)


def test_outside_the_emulator_cpu_tensors_are_refused_again() -> None:
    x, y = torch.randn(4), torch.empty(4)
    with emulated(), pytest.raises(RuntimeError, match="stop here"):
        raise RuntimeError("stop here")
    with pytest.raises(
        InputError, match=said("arguments-kernels-read-write", holds("tensor on cpu as argument 0"))
    ):
        probe(x, y, 1.0)


def test_arguments_are_checked_as_on_a_gpu() -> None:
    with (
        emulated(),
        pytest.raises(
            InputTypeError,
            match=said("arguments-know-int32-int64", holds("the Python int 3 as argument 1")),
        ),
    ):
        Kernel("probe", "fuser_probe")(Launch((1,), (1,)), torch.zeros(1), 3)
    with (
        emulated(),
        pytest.raises(
            InputError,
            match=said("arguments-kernels-read-write", holds("a tensor on meta "), "CPU"),
        ),
    ):
        Kernel("probe", "fuser_probe")(Launch((1,), (1,)), torch.zeros(1, device="meta"))


def test_launchers_learn_the_emulators_multiprocessors() -> None:
    with emulated(multiprocessors=3):
        assert multiprocessors(torch.device("cpu")) == 3


def test_on_a_gpu_multiprocessors_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def properties(device: torch.device) -> types.SimpleNamespace:
        asked.append(device)
        return types.SimpleNamespace(multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    launching._properties.cache_clear()
    device = torch.device("cuda", 0)
    assert [multiprocessors(device), multiprocessors(device)] == [132, 132]
    assert asked == [device]
    launching._properties.cache_clear()


def test_a_struct_argument_lies_as_c_lays_it_out() -> None:
    fields = (np.bool_(True), int32(-2), None, np.float16(1.0), int64(5), np.uint8(7))
    encoded = encode("fuser_x", (Struct(fields),))
    expected = struct.pack("<?3xiQe6xqB7x", True, -2, 0, 1.0, 5, 7)
    assert (struct.pack(encoded.format, *encoded.values), encoded.device) == (expected, None)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ((), InputError, said("arguments-no-fields-struct", None, 0)),
        (
            (int32(1), Struct((int32(1),))),
            InputTypeError,
            said(
                "arguments-take-cuda-none",
                holds("in argument 0, got an object of type Struct as field 1"),
            ),
        ),
        (
            (np.zeros(1, dtype="V8"),),
            InputTypeError,
            said("arguments-take-cuda-none", holds("numpy array of 1 elements of ", " as field 0")),
        ),
    ],
)
def test_a_struct_of_nothing_and_a_struct_in_a_struct_are_refused(
    fields: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        encode("fuser_x", (Struct(fields),))


def test_a_struct_names_its_place_when_a_field_is_wrong() -> None:
    with pytest.raises(
        InputTypeError,
        match=said(
            "arguments-know-int32-int64", holds("fuser_x, in argument 1, got the Python int 3")
        ),
    ):
        encode("fuser_x", (int32(0), Struct((int32(1), 3))))
    with pytest.raises(
        InputError,
        match=said(
            "arguments-kernels-read-write", holds("fuser_x, in argument 0, got a tensor on cpu")
        ),
    ):
        encode("fuser_x", (Struct((torch.zeros(1),)),))


@needs_emulator
def test_a_kernel_that_the_compile_check_does_not_know_is_an_error() -> None:
    assert "fuser_probe" in instantiations()["probe"]
    with emulated(), pytest.raises(KernelError, match=r"fuser_new of probe\.cu .* instantiations"):
        Kernel("probe", "fuser_new")(Launch((1,), (1,)))


# -- what kernels use -----------------------------------------------------------


def test_indices_have_three_dimensions() -> None:
    y = torch.empty(2 * 3 * 2, 4 * 2 * 3, dtype=torch.int32)
    run("where", Launch((2, 3, 2), (4, 2, 3)), y, written=(y,))
    expected = 1000 * torch.arange(12)[:, None] + torch.arange(24)
    assert torch.equal(y, expected.int())


@pytest.mark.parametrize("columns", [1, 31, 64, 1000])
def test_a_block_reduces_a_row(columns: int) -> None:
    x, y = integers(5, columns), torch.empty(5)
    run("row_sum<float, 64>", Launch((5,), (64,)), x.float(), y, int32(columns), written=(y,))
    assert torch.equal(y, x.sum(1).float())
    half = x.bfloat16()
    run("row_sum<__nv_bfloat16, 128>", Launch((5,), (128,)), half, y, int32(columns), written=(y,))
    assert torch.equal(y, x.sum(1).float())


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 16), (33, 17), (5, 70)])
@pytest.mark.parametrize(("element", "dtype"), [("float", "int32"), ("unsigned char", "uint8")])
def test_a_tile_of_dynamic_shared_memory_transposes(
    rows: int, columns: int, element: str, dtype: str
) -> None:
    x = torch.randint(0, 200, (rows, columns), dtype=getattr(torch, dtype))
    y = torch.empty(columns, rows, dtype=x.dtype)
    launch = Launch((-(-columns // 16), -(-rows // 16)), (16, 16), 16 * 17 * x.element_size())
    run(f"transpose<{element}>", launch, x, y, int32(rows), int32(columns), written=(y,))
    assert torch.equal(y, x.t())


def test_warp_collectives() -> None:
    x = torch.randint(-100, 100, (32,))
    y = torch.empty(16, 32, dtype=torch.int64)
    run("collectives", Launch((1,), (32,)), x, y, written=(y,))
    lane = torch.arange(32)
    positive = sum(int(value > 0) << i for i, value in enumerate(x))
    same = torch.tensor([sum(int(a & 3 == b & 3) << i for i, b in enumerate(x)) for a in x])
    expected = [
        x[5].expand(32),
        x[(lane & ~7) | ((lane + 1) & 7)],
        torch.where(lane >= 3, x[lane - 3], x),
        torch.where(lane % 16 >= 1, x[lane - 1], x),
        torch.where(lane < 29, x[(lane + 3) % 32], x),
        torch.where(lane % 16 < 15, x[(lane + 1) % 32], x),
        x[lane ^ 17],
        x[lane ^ 3],
        torch.tensor(positive).expand(32),
        torch.tensor(1).expand(32),
        (x > 0).all().long().expand(32),
        x.sum().expand(32),
        x.min().expand(32),
        x.max().expand(32),
        same,
        torch.where(lane < 16, x[2], x[20]),
    ]
    for row, (got, wanted) in enumerate(zip(y, expected, strict=True)):
        assert torch.equal(got, wanted), f"row {row}"


def test_atomics_meet_across_blocks_and_one_block_is_the_last() -> None:
    x = integers(1000)
    y = torch.tensor([0, -1000, 1000, 0], dtype=torch.int32)
    total, largest = torch.zeros(1), torch.zeros(1)
    z = torch.empty(2, dtype=torch.int32)
    launch = Launch((8,), (128,))
    run("atomics", launch, x, y, total, largest, z, int32(1000), written=(z,))
    assert y.tolist() == [-1, int(x.max()), int(x.min()), 77]
    assert z.tolist() == [int(x.sum()), 8]
    assert (float(total), float(largest)) == (1000.0, float(x.abs().max()))


@pytest.mark.parametrize("threads", [1, 32, 50, 1024])
def test_predicates_go_through_the_whole_block(threads: int) -> None:
    for x in (integers(threads), torch.ones(threads, dtype=torch.int32)):
        y = torch.empty(3, threads, dtype=torch.int32)
        run("predicates", Launch((1,), (threads,)), x, y, written=(y,))
        expected = [int((x > 0).sum()), int((x == 7).any()), int((x > 0).all())]
        assert torch.equal(y, torch.tensor(expected, dtype=torch.int32)[:, None].expand_as(y))


def test_cudas_number_types_round_and_fp32_subnormals_are_flushed() -> None:
    x = torch.randn(16, 8).bfloat16()
    x[0, :4] = torch.tensor([float("inf"), -0.0, 2.0**-120, 1e4])
    y = torch.empty_like(x)
    h, q = torch.empty(16, 8, dtype=torch.float16), torch.empty(16, 8, dtype=torch.uint8)
    tiny = torch.tensor([-1.0, 2.0**-126, -1.0, -1.0, -1.0, -1.0])
    run("numbers", Launch((1,), (16,)), x, y, h, q, tiny, written=(y, h, q))
    assert torch.equal(y, x * 2)
    assert torch.equal(h, x.half())
    assert torch.equal(q, x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert tiny.tolist() == [0.0, 2.0**-126, 2.0**-126, 0.0, 0.0, 2.0**-149]


def test_intrinsics() -> None:
    a, b = 0x40490FDB, 0x12F45678  # a is pi
    x = torch.tensor([a, b], dtype=torch.int32)
    y = torch.empty(14, dtype=torch.int32)
    run("intrinsics", Launch((1,), (1,)), x, y, written=(y,))
    pi = np.uint32(a).view(np.float32)
    bits = [int(np.float32(v).view(np.uint32)) for v in (pi * np.float32(3), 0.5, 8.0)]
    fused = int(np.float32(float(pi) * 3 + 1).view(np.uint32))
    both = b << 32 | a
    expected = [bin(a).count("1"), 1, 1, int(f"{a:032b}"[::-1], 2), 0x12560F0F, a * b >> 32]
    expected[4] = int.from_bytes([(both >> 8 * i) & 255 for i in (1, 2, 5, 7)], "little")
    expected += [(both << 7 & (1 << 64) - 1) >> 32, bits[0], fused, 2 + 3 + 2, bits[1], bits[2]]
    expected += [b, 2**31 - 1]
    assert [value & 0xFFFFFFFF for value in y.tolist()] == expected


def test_structs_hold_tensors_and_arguments_come_in_every_kind() -> None:
    inputs = [torch.randn(n) for n in (3, 100, 1)]
    outputs = [torch.empty_like(x) for x in inputs]
    many = Struct((*inputs, *outputs, *(int32(x.numel()) for x in inputs), float32(2.0)))
    arguments = (many, None, np.float64(0.25), np.bool_(True))
    run("many", Launch((2,), (32,)), *arguments, written=outputs)
    for x, y in zip(inputs, outputs, strict=True):
        assert torch.equal(y, 2 * x + 0.25)


def test_tensors_that_share_bytes_share_memory() -> None:
    x = torch.randn(100)
    expected = 2 * x
    run("double", Launch((1,), (128,)), x, x, int32(100))
    assert torch.equal(x, expected)
    whole = torch.arange(10.0)
    run("double", Launch((1,), (32,)), whole[1:6], whole[3:8], int32(5), deterministic=False)
    assert whole[8:].tolist() == [8.0, 9.0]
    assert not torch.equal(whole[3:8], torch.arange(3.0, 8.0))


@pytest.mark.parametrize("every_launch", [True, False])
def test_of_a_pipeline_the_first_launch_of_each_kernel_runs_in_every_order(
    every_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[int] = []
    run_once = backend._worker.run

    def noted(request: Any, schedule: int, poison: int) -> Any:
        orders.append(schedule)
        return run_once(request, schedule, poison)

    monkeypatch.setattr(backend._worker, "run", noted)
    monkeypatch.setattr(backend, "_examined", set())
    monkeypatch.delenv(backend.FULL, raising=False)
    y = torch.empty(1024, dtype=torch.int32)
    steps = (Launch((1,), (1024,)), y, int32(1))
    with emulated(sources=EMULATOR_KERNELS, every_launch=every_launch):
        for _ in range(2):
            FEATURES["steps"](*steps)
    assert orders == [0, 1, 2, *([0, 1, 2] if every_launch else [0])]
    orders.clear()
    with emulated(sources=EMULATOR_KERNELS, every_launch=every_launch, written=(y,)):
        FEATURES["steps"](*steps)
    assert orders == [0, 1, 2]
    assert y.tolist() == [(i + 1) % 1024 for i in range(1024)]


def test_a_thousand_threads_take_many_steps() -> None:
    y = torch.empty(1024, dtype=torch.int32)
    run("steps", Launch((1,), (1024,)), y, int32(1), written=(y,))
    run("steps", Launch((1,), (1024,)), y, int32(50), written=(y,))
    assert torch.equal(y, (torch.arange(1024, dtype=torch.int32) + 50) % 1024)


# -- fuser/core/hardware.cuh -----------------------------------------------------------


@pytest.mark.parametrize("kernel", ["fuser_convert", "fuser_convert_by_integers"])
def test_conversions_to_8_and_4_bits_are_right_for_every_input(kernel: str) -> None:
    x = hard_inputs()
    e4m3, e5m2, e2m1 = outputs = outputs_for(x)
    with emulated(sources=EMULATOR_KERNELS, written=outputs):
        Kernel("conversions", kernel)(launch_for(x), x, *outputs, int64(x.numel() // 2))
    check(x, *outputs)
    one = torch.ones(1)
    assert torch.equal(e4m3, fp8_scaling.cast(x, one, DType.kFloat8E4M3))
    assert torch.equal(e5m2, fp8_scaling.cast(x, one, DType.kFloat8E5M2))
    assert torch.equal(
        torch.stack([e2m1 & 15, e2m1 >> 4], 1).flatten(), nvfp4.cast_e2m1_(x.clone())
    )


@pytest.mark.parametrize(("element", "size"), [("uint4", 16), ("uint2", 8), ("unsigned", 4)])
def test_streaming_loads_and_stores_copy(element: str, size: int) -> None:
    x = torch.randint(0, 256, (size * 100,), dtype=torch.uint8)
    y = torch.empty_like(x)
    with emulated(sources=EMULATOR_KERNELS, written=(y,)):
        Kernel("conversions", f"fuser_copy<{element}>")(Launch((2,), (64,)), x, y, int64(100))
    assert torch.equal(x, y)


# -- mistakes that are found ----------------------------------------------------

ONE = Launch((1,), (1,))


@pytest.mark.parametrize(("index", "offset"), [(100, 400), (-1, -4), (131, 524)])
def test_an_access_outside_a_tensor_names_the_place_and_the_argument(
    index: int, offset: int
) -> None:
    storage = torch.zeros(300)  # what lies around the tensor is no excuse
    x, y = storage[100:200], torch.zeros(1)
    words = f"at byte {offset} of argument 0, which has 400 bytes"
    message = fault(words, "read_at", ONE, x, y, int32(index))
    assert "READ of size 4" in message
    assert "tests/emulator/kernels/faults.cu:5" in message
    assert "in fuser_read_at, block (0, 0, 0), thread (0, 0, 0)" in message
    assert "WRITE of size 4" in fault(words, "write_at", ONE, x, int32(index))


def test_a_write_before_a_tensor_at_an_odd_address_is_found() -> None:
    for first in (101, 102, 103):
        x = torch.zeros(300)[first:200]
        fault("argument 0", "write_at", ONE, x, int32(-1))


def test_the_last_element_is_inside() -> None:
    x, y = torch.arange(300.0)[100:203], torch.zeros(1)
    for index in (0, 102):
        run("read_at", ONE, x, y, int32(index), written=(y,))
        assert y.tolist() == [100 + index]


def test_a_misaligned_vector_access_is_found() -> None:
    x, y = torch.zeros(9), torch.zeros(4)
    run("vector_at", ONE, x[4:8], y, written=(y,))
    message = fault("misaligned address", "vector_at", ONE, x[1:5], y)
    assert "tests/emulator/kernels/faults.cu:10" in message
    assert "requires 16 byte alignment" in message
    assert "in fuser_vector_at, block (0, 0, 0), thread (0, 0, 0)" in message


@pytest.mark.parametrize(("element", "dtype"), [("int", torch.int32), ("short", torch.int16)])
@pytest.mark.parametrize("index", [-1, 10])
def test_an_access_outside_a_static_shared_array_is_found(
    element: str, dtype: torch.dtype, index: int
) -> None:
    y = torch.zeros(1, dtype=dtype)
    name = f"static_shared_at<{element}>"
    offset, size = index * y.element_size(), 10 * y.element_size()
    words = f"at byte {offset} of shared variable tile, which has {size} bytes"
    assert "tests/emulator/kernels/faults.cu:18" in fault(words, name, ONE, y, int32(index))
    run(name, ONE, y, int32(9), written=(y,))


@pytest.mark.parametrize("index", [-1, 10])
def test_an_access_outside_dynamic_shared_memory_is_found(index: int) -> None:
    y = torch.zeros(1)
    launch = Launch((1,), (1,), shared_bytes=40)
    words = f"at byte {4 * index} of dynamic shared memory, which has 40 bytes"
    fault(words, "dynamic_shared_at", launch, y, int32(index))
    run("dynamic_shared_at", launch, y, int32(9), written=(y,))
    fault("shared memory, which has 0 bytes", "dynamic_shared_at", ONE, y, int32(0))


SHARED = """
extern "C" __global__ void fuser_x(float* y) {
    %s;
    const float4 four = *reinterpret_cast<const float4*>(&x[0]);
    y[threadIdx.x] = four.x + four.y + four.z + four.w;
}
"""


@pytest.mark.parametrize(
    ("declaration", "shared_bytes", "words"),
    [
        ("__shared__ float x[4]", 0, "misaligned"),
        ("extern __shared__ float x[]", 16, "misaligned"),
        ("__shared__ __align__(16) float x[4]", 0, None),
        ("__shared__ float4 x[2][3]", 0, None),
        ("extern __shared__ __align__(16) float x[]", 16, None),
        ("extern __shared__ alignas(16) unsigned char x[]", 12, "dynamic shared memory, .* 12 by"),
        ("__shared__ float4 x[3073]", 0, "49168 bytes of static shared memory, and 49152 is"),
        ("extern __shared__ float4 x[]", 2**18, "262144 bytes of shared memory; a block has"),
        ("__shared__ float x[4], z[4]", 0, "the emulator understands"),
    ],
)
def test_shared_memory_is_as_large_and_as_aligned_as_it_says(
    tmp_path: Path, declaration: str, shared_bytes: int, words: str | None
) -> None:
    (tmp_path / "x.cu").write_text(SHARED % declaration)
    kernel, launch = Kernel("x", "fuser_x"), Launch((1,), (1,), shared_bytes)
    if words is None:
        with emulated(sources=tmp_path, deterministic=False):
            kernel(launch, torch.zeros(1))
        return
    with emulated(sources=tmp_path), pytest.raises(KernelError, match=words):
        kernel(launch, torch.zeros(1))


def test_an_output_that_is_not_written_is_found() -> None:
    y = torch.zeros(100)
    launch = Launch((1,), (64,))
    with pytest.raises(KernelError, match=r"200 bytes, the first at 4, of output 0 .*float32"):
        run("write_some", launch, y, int32(100), written=(y,))
    with pytest.raises(KernelError, match=r"400 bytes, the first at 0, of output 1"):
        run("write_some", launch, y[::2], int32(99), written=(y[::2], torch.zeros(100)))


def test_launches_write_an_output_together_and_torch_may_too() -> None:
    y = torch.empty(100)
    with emulated(written=(y,), sources=EMULATOR_KERNELS):
        FAULTS["write_some"](Launch((1,), (64,)), y, int32(100))
        FAULTS["write_some"](Launch((1,), (64,)), y[1:], int32(99))
    assert torch.equal(y, torch.ones(100))
    z = torch.empty(100)
    with emulated(written=(z,), sources=EMULATOR_KERNELS):
        z.fill_(3.0)
        FAULTS["write_some"](Launch((1,), (64,)), z, int32(100))
    assert z.tolist() == [1.0, 3.0] * 50


def test_a_write_between_the_elements_of_a_strided_tensor_is_found() -> None:
    storage = torch.zeros(10, 6)
    columns = storage[:, :4]
    with pytest.raises(KernelError, match=r"between the elements of argument 0 \(float32, shape"):
        run("write_some", Launch((1,), (32,)), columns, int32(58))
    run("write_some", Launch((1,), (1,)), columns, int32(58))
    assert storage.sum() == 1.0


def test_an_unwritten_output_that_is_read_is_found() -> None:
    y = torch.zeros(32)
    launch = Launch((1,), (32,))
    run("add_to", launch, y)
    assert torch.equal(y, torch.ones(32))
    fault("unwritten memory", "add_to", launch, y, written=(y,))


@pytest.mark.parametrize("name", ["forget_barrier", "read_garbage"])
def test_a_missing_barrier_and_shared_memory_that_nobody_wrote_are_found(name: str) -> None:
    y = torch.zeros(64, dtype=torch.int32)
    fault("argument 0 .* not the same", name, Launch((1,), (64,)), y)


@pytest.mark.parametrize("threads", [64, 96])
def test_a_buffer_that_takes_no_turn_is_found_when_warps_run_ahead(threads: int) -> None:
    """Between its barriers a warp meets its lanes, where threads that run in step wait for all."""
    # A later row has the larger maximum: what is read too late is another number.
    x = integers(8, 32) + 200 * torch.arange(8, dtype=torch.int32)[:, None]
    y = torch.zeros(threads, dtype=torch.int32)
    launch, rounds = Launch((2,), (threads,)), int32(8)
    run("sum_again<2>", launch, y, rounds, written=(y,))
    run("read_stages<2>", launch, x, y, rounds, written=(y,))
    words = "argument 0 .* not the same when a warp runs to its next barrier"
    fault(words, "sum_again<1>", launch, y, rounds)
    fault(words.replace("0", "1"), "read_stages<1>", launch, x, y, rounds)


def test_a_sum_in_any_order_has_to_be_allowed() -> None:
    x, y = torch.logspace(0, -4, 1024), torch.zeros(1)
    launch = Launch((8,), (128,))
    fault("argument 1 .* not the same", "sum_in_any_order", launch, x, y)
    run("sum_in_any_order", launch, x, y, deterministic=False)
    torch.testing.assert_close(y[0], x.sum())


def test_a_copy_lands_when_a_thread_waits_for_it_and_not_before() -> None:
    x, launch = integers(64, 4), Launch((1,), (32,))
    y = torch.zeros_like(x)
    run("read_copies<0>", launch, x, y)
    assert torch.equal(x, y)
    fault("argument 1 .* not the same", "read_copies<1>", launch, x, y)
    fault("argument 1 .* not the same", "copy_over", launch, x, y)
    views = (torch.zeros(64 * 4 + 1, dtype=torch.int32)[1:], y)
    fault("copy of 16 bytes is not aligned", "read_copies<0>", launch, *views)


def test_a_barrier_that_some_threads_never_reach_names_them() -> None:
    y = torch.zeros(64, dtype=torch.int32)
    message = fault("deadlocks", "leave_before_barrier", Launch((1,), (64,)), y)
    assert "in fuser_leave_before_barrier, block (0, 0, 0)" in message
    assert "40 threads (0 to 39) wait in __syncthreads at " in message
    assert "24 threads (40 to 63) returned" in message


def test_threads_that_meet_in_two_barriers_are_found() -> None:
    y = torch.zeros(64, dtype=torch.int32)
    fault("meet in two barriers: .*faults.cu:6", "two_barriers", Launch((1,), (64,)), y)


def test_a_shuffle_that_half_of_its_lanes_never_reach_names_them() -> None:
    y = torch.zeros(32, dtype=torch.int32)
    message = fault("deadlocks", "divergent_shuffle", Launch((1,), (32,)), y)
    assert "16 threads (0 to 15) wait in __shfl_xor_sync" in message
    assert "mask 0xffffffff" in message
    assert "16 threads (16 to 31) wait in __syncthreads" in message


def test_a_shuffle_from_no_thread_is_found() -> None:
    y = torch.zeros(20, dtype=torch.int32)
    words = "__shfl_down_sync at .*faults.cu:.* reads lane 2., which took no part"
    fault(words, "shuffle_beyond_the_block", Launch((1,), (20,)), y)
    words = "called by lane 16, which its mask 0x0000ffff leaves out"
    fault(words, "shuffle_outside_the_mask", Launch((1,), (20,)), y)


def test_a_kernel_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SECONDS", 1)
    from emulator import backend

    backend._worker.stop()
    y = torch.zeros(1, dtype=torch.int32)
    message = fault("does not end", "spin", Launch((1,), (2,)), y)
    assert "in fuser_spin, block (0, 0, 0), thread (0, 0, 0)" in message


def test_a_trap_is_an_error() -> None:
    run("trap", ONE, torch.zeros(1, dtype=torch.int32))
    fault("__trap at .*faults.cu", "trap", ONE, torch.ones(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.zeros(1),), "takes 2 arguments, and the launch has 1"),
        (
            (torch.zeros(1), int64(0)),
            "Argument 1 is a integer of 8 bytes, and the kernel takes a integer of 4",
        ),
        ((torch.zeros(1), float32(0)), "a floating-point number of 4 .* takes a integer"),
        ((int64(0), int32(0)), "Argument 0 is a integer of 8 bytes, .* takes a pointer"),
    ],
)
def test_arguments_that_do_not_fit_the_kernel_are_found(args: Any, words: str) -> None:
    fault(words, "write_at", ONE, *args)


def test_a_kernel_that_does_not_compile_names_the_real_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text("// one\n// two\nint three = ;\n")
    with emulated(sources=tmp_path), pytest.raises(KernelError, match=r"broken\.cu:3:13: error"):
        Kernel("broken", "fuser_x")(ONE)
    (tmp_path / "broken.cu").write_text("#include <vector>\n")
    with emulated(sources=tmp_path), pytest.raises(KernelError, match=r"broken\.cu includes vec"):
        Kernel("broken", "fuser_x")(ONE)
    with emulated(sources=tmp_path), pytest.raises(KernelError, match=r"no .*nowhere\.cu"):
        Kernel("nowhere", "fuser_x")(ONE)


def test_an_edited_header_is_seen(tmp_path: Path) -> None:
    (tmp_path / "fuser").mkdir()
    (tmp_path / "fill.cu").write_text(
        "#include <fuser/offset.cuh>\n"
        'extern "C" __global__ void fuser_fill(int* y) { y[threadIdx.x] = kOffset; }\n'
    )
    for offset in (5, 6):
        (tmp_path / "fuser" / "offset.cuh").write_text(f"constexpr int kOffset = {offset};\n")
        y = torch.empty(3, dtype=torch.int32)
        with emulated(written=(y,), sources=tmp_path):
            Kernel("fill", "fuser_fill")(Launch((1,), (3,)), y)
        assert y.tolist() == [offset] * 3


def test_a_kernel_is_compiled_again_for_the_headers_that_it_includes_alone(tmp_path: Path) -> None:
    (tmp_path / "fuser").mkdir()
    headers = {
        "used": "#include <fuser/deep.cuh>\n",
        "deep": "constexpr int kOne = 1;\n",
        "other": "constexpr int kTwo = 2;\n",
    }
    for name, text in headers.items():
        (tmp_path / "fuser" / f"{name}.cuh").write_text(text)
    (tmp_path / "fill.cu").write_text(
        "#include <fuser/used.cuh>\n"
        'extern "C" __global__ void fuser_fill(int* y) { y[0] = kOne; }\n'
    )

    def compiled() -> Path:
        return compilation.library(tmp_path, "fill", ("fuser_fill",))

    before = compiled()
    (tmp_path / "fuser" / "other.cuh").write_text("constexpr int kTwo = 3;\n")
    assert compiled() == before
    (tmp_path / "fuser" / "deep.cuh").write_text("constexpr int kOne = 2;\n")
    assert compiled() != before


def test_a_machine_without_the_tools_skips_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilation, "why_unavailable", lambda: "there is no g++ here.")
    before = launching.backend
    with (
        pytest.raises(pytest.skip.Exception, match=r"emulator: there is no g\+\+ here"),
        emulated(),
    ):
        pass
    assert launching.backend is before


@pytest.mark.parametrize(
    ("name", "nothing", "words"),
    [("which", None, r"no g\+\+"), ("cuda_include", None, "nvidia-cuda-runtime-cu12")],
)
@needs_emulator
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, nothing: None, words: str
) -> None:
    holder = compilation.shutil if name == "which" else compilation
    monkeypatch.setattr(holder, name, lambda *args: nothing)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(compilation.why_unavailable.__wrapped__())
