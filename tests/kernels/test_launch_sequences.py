"""Launch sequences: recorded launches run the same kernels over new tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from emulator import emulated
from pipeline_kernels import on_kernels

import fuser
from fuser.chain import Stage
from fuser.cuda import launch, module, repeated, sequence
from fuser.cuda.arguments import Struct, encode, int32, int64, layout_of
from fuser.cuda.launch import Kernel, Launch
from fuser.cuda.sequence import LaunchSequence
from fuser.errors import KernelUnavailable
from fuser.formats import DType, NumberFormat
from fuser.functional import pointwise
from fuser.functional.delayed_scaling import update_delayed
from fuser.reference import fp8_scaling as reference
from fuser.tensors import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)

BF16, F32 = torch.bfloat16, torch.float32
KERNEL = Kernel("probe", "fuser_probe")
GRID = Launch((2, 3), (32,))


class Noting(launch.LaunchBackend):
    """Runs nothing, and notes launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Kernel, Launch, tuple[Any, ...]]] = []

    def run(self, kernel: Kernel, launch: Launch, args: tuple[Any, ...]) -> None:
        self.launches.append((kernel, launch, args))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kernel, Launch, tuple[Any, ...]]]:
    backend = Noting()
    monkeypatch.setattr(launch, "backend", backend)
    return backend.launches


class Work:
    """A function over one tensor, repeated from its first call on, and how often it was called."""

    def __init__(self, beside: Callable[[torch.Tensor], Any] = lambda x: None) -> None:
        self.calls = 0
        self.beside = beside
        self.again = Repeated(self.run)

    def __call__(self, x: torch.Tensor) -> Any:
        return self.again(x)

    def run(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        self.calls += 1
        amax = torch.zeros(1, device=x.device)
        out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        KERNEL(GRID, x, amax, int64(x.numel()))
        self.beside(x)
        KERNEL(GRID, Struct((out, None, int32(3), amax)), x)
        return {"out": out, "none": None}


class Repeated:
    """A function that is called once, and then repeated, if what it did can be."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.sequence: LaunchSequence | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.sequence is None:
            run = functools.partial(self.function, *tensors)
            self.sequence, result, slotted = sequence.record(tensors, run)
            self.sequence.returns(slotted(result))
            return result
        if self.sequence.is_complete:
            return self.sequence.play(tensors)
        return self.function(*tensors)


# -- when -----------------------------------------------------------------------


def test_a_repetition_launches_the_same_over_its_own_tensors(noted: list[Any]) -> None:
    work = Work()
    inputs = [torch.ones(4, 8, dtype=BF16) for _ in range(5)]
    results = [work(x) for x in inputs]
    assert work.calls == 1
    assert len(noted) == 10
    for i, x in enumerate(inputs):
        (first, grid, (read, amax, count)), (second, _, (store, again)) = noted[2 * i : 2 * i + 2]
        assert (first, second, grid) == (KERNEL, KERNEL, GRID)
        assert read is x
        assert again is x
        assert count == np.int64(32)
        out, none, three, same = store.fields
        assert out is results[i]["out"]
        assert (none, three) == (None, np.int32(3))
        assert same is amax
        assert amax.tolist() == [0.0]
        assert results[i]["none"] is None
    assert len({result["out"].data_ptr() for result in results}) == 5


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(8, 4, dtype=BF16),
        torch.ones(4, 8, dtype=torch.float16),
        torch.ones(4, 16, dtype=BF16)[:, :8],
        torch.ones(33, dtype=BF16)[1:].view(4, 8),
    ],
    ids=["shape", "dtype", "strides", "alignment"],
)
def test_a_layout_is_all_that_launches_depend_on_but_the_address(other: torch.Tensor) -> None:
    layout = layout_of(torch.ones(4, 8, dtype=BF16))
    assert layout == layout_of(torch.zeros(4, 8, dtype=BF16))
    assert layout != layout_of(other)


@pytest.mark.parametrize(
    "beside",
    [
        lambda x: x + 1,
        lambda x: x.sum().item(),
        lambda x: torch.rand(1),
        lambda x: torch.empty(8, 8).t().new_empty(3).fill_(0),
        lambda x: KERNEL(GRID, torch.ones(3)),
        lambda x: KERNEL(GRID, x[1:]),
        lambda x: KERNEL(GRID, x[:1]),
    ],
)
def test_a_function_that_does_more_is_not_repeated(
    beside: Callable[[torch.Tensor], Any], noted: list[Any]
) -> None:
    work = Work(beside)
    for _ in range(4):
        work(torch.ones(4, 8))
    assert work.calls == 4


@pytest.mark.parametrize("beside", [lambda x: x.view(4, 8).detach(), lambda x: x.data_ptr()])
def test_another_name_of_a_tensor_is_nothing_more(
    beside: Callable[[torch.Tensor], Any], noted: list[Any]
) -> None:
    work = Work(beside)
    for _ in range(4):
        work(torch.ones(4, 8))
    assert work.calls == 1


@pytest.mark.parametrize("rows", [slice(1, 3), slice(2)], ids=["inner", "first"])
def test_a_repetition_returns_the_same_view_of_its_allocation(
    rows: slice, noted: list[Any]
) -> None:
    def run(x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = torch.empty(x.shape)
        KERNEL(GRID, x, out)
        return {"out": out[rows, ::2]}

    again = Repeated(run)
    for _ in range(4):
        part = again(torch.ones(4, 8))["out"]
        _, out = noted[-1][2]
        expected = out[rows, ::2]
        assert part.data_ptr() == expected.data_ptr()
        assert (part.shape, part.stride()) == (expected.shape, expected.stride())
    assert len(noted) == 4


@pytest.mark.parametrize("with_calls", [True, False])
@pytest.mark.parametrize("make", [torch.empty_like, torch.zeros_like])
def test_an_allocation_with_other_strides_is_repeated_with_them_or_not_at_all(
    make: Callable[[torch.Tensor], torch.Tensor], with_calls: bool, noted: list[Any]
) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        out = make(x)
        KERNEL(GRID, x, out)
        return out

    rows, columns = torch.ones(4, 8), torch.ones(8, 4).t()
    for x in (rows, columns):
        made, result, slotted = sequence.record(
            (x,), functools.partial(run, x), with_calls=with_calls
        )
        made.result = slotted(result)
        assert made.is_complete == (with_calls or x is rows)
        if made.is_complete:
            assert made.play((x,)).stride() == result.stride() == x.stride()


def test_tensors_of_subclasses_have_no_layout() -> None:
    class Mine(torch.Tensor):
        pass

    assert layout_of(torch.ones(4, 8).as_subclass(Mine)) is None


def test_a_function_that_fails_leaves_no_recording(noted: list[Any]) -> None:
    def fail(x: torch.Tensor) -> None:
        if work.calls == 1:
            raise KernelUnavailable("no kernel")

    work = Work(fail)
    with pytest.raises(KernelUnavailable):
        work(torch.ones(4, 8))
    assert launch.recording.listener is None
    for _ in range(3):
        work(torch.ones(4, 8))
    assert work.calls == 2


# -- what -----------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver is given in the place of launches: a GPU in the place of the CPU."""
    given: list[Any] = []
    buffer, size = bytearray(4096), type("Size", (), {"value": 0})()

    def launches(function: int, *rest: int) -> None:
        given.append((function, rest, bytes(buffer[: size.value])))

    def memset(address: int, byte: int, count: int, stream: int) -> None:
        given.append(("memset", address, byte, count, stream))

    ready = launch.Prepared(77, GRID.sizes, 0, struct.Struct("i"))
    monkeypatch.setattr(launch, "backend", launch.LaunchBackend())
    monkeypatch.setattr(launch.LaunchBackend, "run", lambda *_: None)
    monkeypatch.setattr(sequence, "begin", lambda device: (launches, buffer, size, 55, 66))
    monkeypatch.setattr(
        sequence,
        "prepared",
        lambda kernel, grid, format_, device: ready._replace(packer=struct.Struct(format_)),
    )
    monkeypatch.setattr(sequence, "encode", lambda symbol, args: encode(symbol, args, "cpu"))
    monkeypatch.setattr(module, "driver_memset", lambda: memset)
    monkeypatch.setattr(sequence, "cuda_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return given


def test_a_launch_sequence_gives_the_driver_the_bytes_of_a_launch(driver: list[Any]) -> None:
    work = Work()
    work(torch.ones(4, 8, dtype=BF16))
    assert driver == []
    for _ in range(2):
        x = torch.ones(4, 8, dtype=BF16)
        result = work(x)
        (_, amax, byte, count, stream), (function, where, first), (_, _, second) = driver
        driver.clear()
        assert (byte, count, stream) == (0, 16, 55)
        assert (function, where) == (77, (2, 3, 1, 32, 1, 1, 0, 55, 0, 66))
        assert first == struct.pack("@PPq", x.data_ptr(), amax, 32)
        assert second == struct.pack("@PPiP0PP", result["out"].data_ptr(), 0, 3, amax, x.data_ptr())


def test_a_launch_sequence_keeps_numbers_that_have_no_literal(driver: list[Any]) -> None:
    values = [np.float32(v) for v in (float("inf"), float("-inf"), 0.1)] + [np.bool_(True)]

    def run(x: torch.Tensor) -> torch.Tensor:
        KERNEL(GRID, x, *values)
        return x

    work, x = Repeated(run), torch.ones(4)
    assert all(work(x) is x for _ in range(2))
    ((_, _, sent),) = driver
    assert sent == struct.pack("@Pfff?", x.data_ptr(), *values)


# -- quantizers -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(20, 40), (136, 40)], ids=["one tile", "more"])
def test_repeated_launches_of_a_quantizer_give_the_references_bytes(shape: tuple[int, int]) -> None:
    quantizer = Float8CurrentScalingQuantizer()
    generator = torch.Generator().manual_seed(0)
    with emulated():
        again = Repeated(quantizer.buffers_of)
        for i in range(3):
            x = torch.randn(shape, generator=generator).to(BF16) * (i + 1)
            made = list(again(x).values())
            expected = reference.quantize_current(x, DType.kFloat8E4M3)
            assert all(map(torch.equal, made, expected))
    assert again.sequence is not None
    assert again.sequence.is_complete


def test_repeated_launches_of_delayed_scaling_use_the_state_of_each_call() -> None:
    def quantized(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> Any:
        return Float8Quantizer(scale, amax).buffers_of(x)

    again = Repeated(quantized)
    with emulated():
        for i in range(1, 4):
            scale, amax = torch.tensor([2.0**i]), torch.zeros(1)
            made = again(torch.full((16, 16), 3.0 * i, dtype=BF16), scale, amax)
            assert amax.item() == 3.0 * i
            assert made["_scale_inv"].item() == 2.0**-i
            values = made["_rowwise_data"].view(torch.float8_e4m3fn).float()
            assert torch.equal(values, torch.full((16, 16), 3.0 * i * 2**i))
    assert again.sequence is not None
    assert again.sequence.is_complete


def test_cached_updates_of_delayed_scales_depend_on_margin_and_algorithm() -> None:
    cache: dict[Any, Any] = {}
    history, scale, largest = torch.zeros(3, 1), torch.ones(1), torch.tensor([448.0])
    with emulated():
        for margin, algorithm in [(0, "max"), (3, "max"), (0, "most_recent")] * 4:
            history.copy_(torch.tensor([[2.0], [0.0], [8.0]]))
            scale.fill_(1)
            expected = (history.clone(), scale.clone())
            reference.update_delayed(*expected, 448.0, margin=margin, algorithm=algorithm)
            options: dict[str, Any] = {"margin": margin, "algorithm": algorithm}
            update_delayed([history], [scale], [largest], **options, cache=cache)
            assert torch.equal(history, expected[0])
            assert torch.equal(scale, expected[1])
    assert len(cache) == 3
    assert all(sequence.is_complete for sequence in cache.values())


def test_a_cached_update_depends_on_which_states_with_amaxes_of_other_ranks_it_has() -> None:
    cache: dict[Any, Any] = {}
    histories = [torch.zeros(3, 1) for _ in range(2)]
    scales, largest = [torch.ones(1) for _ in range(2)], [torch.tensor([448.0])] * 2
    amax = torch.tensor([4.0])
    with emulated():
        for amaxes in [(amax, None), (None, amax), None] * 4:
            for history in histories:
                history.copy_(torch.tensor([[2.0], [0.0], [1.0]]))
            update_delayed(histories, scales, largest, amaxes, cache=cache)
            newest = [2.0 if each is None else 4.0 for each in amaxes or (None, None)]
            assert [448 / scale.item() for scale in scales] == newest
            for history, expected in zip(histories, newest, strict=True):
                assert history.flatten().tolist() == [0.0, 1.0, expected]


def test_a_cached_update_of_other_states_is_recorded_anew_and_few_are_kept() -> None:
    cache: dict[Any, Any] = {}
    with emulated():
        for i in [*range(7), *range(7), *range(7)]:
            states = [torch.full((2, 1), 1.0 + i), torch.ones(1), torch.tensor([448.0])]
            for _ in range(3):
                states[0][0] = 2.0 + i
                update_delayed(*([state] for state in states), cache=cache)
                assert states[1].item() == pytest.approx(448.0 / (2.0 + i))
    assert len(cache) == repeated.MOST_KNOWN


def test_a_stochastic_quantizer_draws_new_numbers_at_each_call() -> None:
    x = torch.linspace(-3, 3, 32 * 32).view(32, 32).to(BF16)
    quantizer = fuser.NVFP4Quantizer(stochastic_rounding=True)
    with on_kernels():
        drawn = [quantizer(x)._rowwise_data for _ in range(4)]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_quantizer_that_draws_numbers_is_not_repeatable_and_others_are() -> None:
    for quantizer in (
        Float8CurrentScalingQuantizer(),
        Float8Quantizer(),
        fuser.MXFP8Quantizer(),
        fuser.Float8BlockQuantizer(),
        fuser.NVFP4Quantizer(),
        fuser.NVFP4Quantizer(stochastic_rounding=True, seed=3),
    ):
        assert quantizer.is_repeatable
    assert not fuser.NVFP4Quantizer(stochastic_rounding=True).is_repeatable
    assert not Mine().is_repeatable


@dataclass(frozen=True)
class Mine(fuser.MXFP8Quantizer):
    """A user's, which does more than launch."""

    accepts_lazy = True
    seen: list[Any] = field(default_factory=list, kw_only=True, compare=False)

    def buffers_of(self, rows: Any) -> dict[str, torch.Tensor | None]:
        self.seen.append(rows)
        return super().buffers_of(rows)

    def from_kernel(self, x: Any) -> dict[str, torch.Tensor | None]:
        self.seen.append(x)
        return super().from_kernel(x)


def test_a_users_own_quantizer_is_called_every_time() -> None:
    quantizer, x = Mine(), torch.ones(32, 32, dtype=BF16)
    with on_kernels():
        for _ in range(4):
            quantizer(x)
            quantizer(pointwise.chain((Stage("gelu"),), x))
    assert len(quantizer.seen) == 16


def test_a_copy_of_a_quantizer_has_its_fields_and_nothing_derived() -> None:
    mine = NumberFormat("mine", DType.kFloat8E4M3)

    @dataclass(frozen=True)
    class Named(fuser.MXFP8Quantizer):
        format: NumberFormat = mine

    named = Named()
    assert copy.deepcopy(named).format == mine
    quantizer = Float8CurrentScalingQuantizer()
    assert quantizer.format.name == "FP8"
    assert set(quantizer.__getstate__()).isdisjoint(("_family", "format"))
