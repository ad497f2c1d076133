"""The launch cache: cached launches run the same kernels over new tensors."""

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
from fuser.cuda import launch, launch_cache, module, sequence
from fuser.cuda.arguments import Struct, encode, int32, int64
from fuser.cuda.launch import Kernel, Launch
from fuser.cuda.launch_cache import cached_launches
from fuser.errors import KernelUnavailable
from fuser.formats import DType, NumberFormat
from fuser.functional import normalization, pointwise
from fuser.functional.delayed_scaling import update_delayed
from fuser.reference import fp8_scaling as reference
from fuser.tensors import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    NVFP4Quantizer,
    Quantizer,
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
    """A function over one tensor, and how often it was called."""

    def __init__(self, beside: Callable[[torch.Tensor], Any] = lambda x: None) -> None:
        self.calls = 0
        self.beside = beside

    def __call__(self, x: torch.Tensor, *others: torch.Tensor | None, what: Any = 0) -> Any:
        return cached_launches(what, (x, *others), lambda: self.run(x))

    def run(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        self.calls += 1
        amax = torch.zeros(1, device=x.device)
        out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        KERNEL(GRID, x, amax, int64(x.numel()))
        self.beside(x)
        KERNEL(GRID, Struct((out, None, int32(3), amax)), x)
        return {"out": out, "none": None}


# -- when -----------------------------------------------------------------------


def test_the_third_call_of_a_layout_launches_without_the_function(noted: list[Any]) -> None:
    work = Work()
    inputs = [torch.ones(4, 8, dtype=BF16) for _ in range(5)]
    results = [work(x) for x in inputs]
    assert work.calls == 2
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
def test_a_tensor_of_another_layout_is_recorded_anew(other: torch.Tensor, noted: list[Any]) -> None:
    work = Work()
    for _ in range(3):
        work(torch.ones(4, 8, dtype=BF16))
    assert work.calls == 2
    work(other)
    assert work.calls == 3
    work(torch.ones(4, 8, dtype=BF16), what=1)
    work(torch.ones(4, 8, dtype=BF16), None)
    assert work.calls == 5
    work(torch.ones(4, 8, dtype=BF16))
    assert work.calls == 5


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
def test_a_function_that_does_more_is_called_every_time(
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
    assert work.calls == 2


@pytest.mark.parametrize("rows", [slice(1, 3), slice(2)], ids=["inner", "first"])
def test_a_cached_launch_returns_the_same_view_of_its_allocation(
    rows: slice, noted: list[Any]
) -> None:
    def run(x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = torch.empty(x.shape)
        KERNEL(GRID, x, out)
        return {"out": out[rows, ::2]}

    for _ in range(4):
        x = torch.ones(4, 8)
        part = cached_launches("part", (x,), functools.partial(run, x))["out"]
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


def test_launches_over_tensor_subclasses_are_not_cached(noted: list[Any]) -> None:
    class Mine(torch.Tensor):
        pass

    work = Work()
    for _ in range(4):
        work(torch.ones(4, 8).as_subclass(Mine))
    assert work.calls == 4
    assert not launch.backend.sequences


def test_one_tensor_as_two_arguments_has_an_entry_of_its_own(noted: list[Any]) -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        cached_launches("add", (x, y), lambda: KERNEL(GRID, x, y))

    a, b = torch.ones(4), torch.ones(4)
    for pair in ((a, a), (a, a), (a, a), (a, b), (b, a), (b, b)):
        add(*pair)
        _, _, given = noted[-1]
        assert given[0] is pair[0]
        assert given[1] is pair[1]
    assert len(noted) == 6


def test_a_function_that_fails_is_asked_again(noted: list[Any]) -> None:
    def fail(x: torch.Tensor) -> None:
        if work.calls <= 2:
            raise KernelUnavailable("no kernel")

    work = Work(fail)
    for _ in range(2):
        with pytest.raises(KernelUnavailable):
            work(torch.ones(4, 8))
    assert launch.recording.listener is None
    for _ in range(3):
        work(torch.ones(4, 8))
    assert work.calls == 3


def test_layouts_that_never_return_do_not_pile_up(
    noted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_cache, "MOST_SEQUENCES", 8)
    work = Work()
    for rows in range(1, 30):
        work(torch.ones(rows, 8))
    assert len(launch.backend.sequences) <= 8


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
    for _ in range(2):
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

    def work(x: torch.Tensor) -> torch.Tensor:
        def run() -> torch.Tensor:
            KERNEL(GRID, x, *values)
            return x

        return cached_launches("numbers", (x, None), run)

    x = torch.ones(4)
    assert all(work(x) is x for _ in range(3))
    ((_, _, sent),) = driver
    assert sent == struct.pack("@Pfff?", x.data_ptr(), *values)


# -- quantizers -------------------------------------------------------------------


def counted(quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the quantizer's own work."""
    calls: list[Any] = []
    inner = type(quantizer).from_kernel

    def from_kernel(self: Quantizer, x: Any, *args: Any) -> Any:
        calls.append(x)
        return inner(self, x, *args)

    monkeypatch.setattr(type(quantizer), "from_kernel", from_kernel)
    return calls


@pytest.mark.parametrize("shape", [(20, 40), (136, 40)], ids=["one tile", "more"])
def test_cached_launches_of_a_quantizer_give_the_references_bytes(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = Float8CurrentScalingQuantizer()
    calls = counted(quantizer, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    with emulated():
        for i in range(4):
            x = torch.randn(shape, generator=generator).to(BF16) * (i + 1)
            made = quantizer(x)
            row, col, scale_inv = reference.quantize_current(x, DType.kFloat8E4M3)
            assert torch.equal(made._data, row)
            assert torch.equal(made._transpose, col)
            assert torch.equal(made._scale_inv, scale_inv)
    assert len(calls) == 2


def test_cached_launches_of_delayed_scaling_use_the_state_of_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = counted(Float8Quantizer(), monkeypatch)
    with emulated():
        for i in range(1, 5):
            scale, amax = torch.tensor([2.0**i]), torch.zeros(1)
            x = torch.full((16, 16), 3.0 * i, dtype=BF16)
            made = Float8Quantizer(scale, amax)(x)
            assert amax.item() == 3.0 * i
            assert made._scale_inv.item() == 2.0**-i
            assert torch.equal(made.dequantize(), x)
    assert len(calls) == 2


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
    assert len(cache) == launch_cache.MOST_CONSTANT


NVFP4: dict[str, Any] = {
    "both": {},
    "row": {"columnwise": False},
    "col": {"rowwise": False},
    "2d": {"with_2d_quantization": True},
    "hadamard": {"with_rht": True},
    "no signs": {"with_rht": True, "with_random_sign_mask": False},
    "stochastic": {"stochastic_rounding": True, "seed": 3},
}


@pytest.mark.parametrize("options", NVFP4.values(), ids=NVFP4)
@pytest.mark.parametrize("shape", [(32, 48), (5, 40)], ids=["whole", "padded"])
@pytest.mark.parametrize("source", ["tensor", "values"])
def test_cached_launches_of_nvfp4_give_the_references_bytes_and_new_amaxes(
    options: dict[str, Any], shape: tuple[int, int], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = NVFP4Quantizer(**options)
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    gelu = Stage("gelu")
    with on_kernels():
        plain = [pointwise.activation(gelu, x.to(BF16)).tensor() for x in inputs]
    expected = [quantizer(x) for x in plain]
    calls = counted(quantizer, monkeypatch)
    with on_kernels():
        made = [
            quantizer(pointwise.activation(gelu, x.to(BF16)) if source == "values" else y)
            for x, y in zip(inputs, plain, strict=True)
        ]
    assert len(calls) == 2
    for one, other in zip(made, expected, strict=True):
        for name, buffer in other.buffers().items():
            found = one.buffers()[name]
            assert (found is None) == (buffer is None)
            assert found is None or torch.equal(found, buffer), name
    amaxes = [t for one in made for t in (one._amax_rowwise, one._amax_columnwise) if t is not None]
    assert len({t.data_ptr() for t in amaxes}) == len(amaxes)


@pytest.mark.parametrize("what", ["forward", "backward", "rmsnorm", "rmsnorm backward"])
@pytest.mark.parametrize("rows", [16, 144])
def test_cached_launches_over_lazy_tensors_give_the_uncached_bytes(
    what: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = Float8CurrentScalingQuantizer()
    stage, gamma = Stage("gelu"), torch.linspace(0.5, 1.5, 32).to(BF16)

    def quantized(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        x, dy = (torch.randn(rows, 32, generator=generator).to(BF16) for _ in range(2))
        beside: list[torch.Tensor | None] = []
        if what == "forward":
            values: Any = pointwise.activation(stage, x)
        elif what == "backward":
            values, *beside = pointwise.activation_bias_backward(stage, dy, x)
        elif what == "rmsnorm":
            values, *beside = normalization.rmsnorm(x, gamma, 1e-5, BF16)
        else:
            rstd = torch.ones(rows, 1)
            wanted = (True, True)
            values, *beside = normalization.rmsnorm_backward(dy, x, gamma, rstd, wanted)
        made = quantizer(values)
        return [*made.buffers().values(), *(t for t in beside if t is not None)]

    first: list[list[torch.Tensor]] = []
    for seed in range(4):
        with on_kernels():
            first.append(quantized(seed))
    calls = counted(quantizer, monkeypatch)
    with on_kernels():
        again = [quantized(seed) for seed in range(4)]
    assert len(calls) == 2
    for one, other in zip(first, again, strict=True):
        assert len(one) == len(other) == 3 + (what != "forward")
        assert all(map(torch.equal, one, other))


def test_a_stochastic_quantizer_draws_new_numbers_at_each_call() -> None:
    x = torch.linspace(-3, 3, 32 * 32).view(32, 32).to(BF16)
    quantizer = fuser.NVFP4Quantizer(stochastic_rounding=True)
    with on_kernels():
        drawn = [quantizer(x)._rowwise_data for _ in range(4)]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_quantizers_that_launch_the_same_share_launch_sequences() -> None:
    quantizer = Float8CurrentScalingQuantizer()
    assert quantizer.launch_key == Float8CurrentScalingQuantizer().launch_key is not None
    for other in (
        Float8CurrentScalingQuantizer(columnwise=False),
        Float8CurrentScalingQuantizer(DType.kFloat8E5M2),
        Float8CurrentScalingQuantizer(amax_epsilon=1.0),
        Float8CurrentScalingQuantizer(force_pow_2_scales=True),
        Float8Quantizer(),
        fuser.MXFP8Quantizer(),
        fuser.MXFP8Quantizer(with_2d_quantization=True),
        fuser.Float8BlockQuantizer(),
        fuser.Float8BlockQuantizer(block_scaling_dim=1),
    ):
        assert other.launch_key is not None
        assert other.launch_key != quantizer.launch_key
    keys = [fuser.NVFP4Quantizer(**options).launch_key for options in NVFP4.values()]
    assert None not in keys
    assert len(set(keys)) == len(keys)


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
            quantizer(pointwise.activation(Stage("gelu"), x))
    assert len(quantizer.seen) == 16


def test_cached_launches_inside_a_recording_are_recorded(noted: list[Any]) -> None:
    inner = Work()

    def outer(x: torch.Tensor) -> Any:
        return cached_launches("outer", (x,), lambda: inner(x))

    for _ in range(3):
        inner(torch.ones(4, 8))
    for _ in range(4):
        noted.clear()
        outer(torch.ones(4, 8))
        assert len(noted) == 2


def test_a_copy_of_a_quantizer_has_its_fields_and_nothing_derived() -> None:
    mine = NumberFormat("mine", DType.kFloat8E4M3)

    @dataclass(frozen=True)
    class Named(fuser.MXFP8Quantizer):
        format: NumberFormat = mine

    named = Named()
    assert copy.deepcopy(named).format == mine
    quantizer = Float8CurrentScalingQuantizer()
    assert quantizer.launch_key is not None
    assert quantizer.format.name == "FP8"
    assert set(quantizer.__getstate__()).isdisjoint(("launch_key", "_family", "format"))
