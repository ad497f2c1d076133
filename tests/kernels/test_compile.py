"""Every kernel compiles for every architecture, without a GPU, and keeps its data in registers."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import compiled_kernels
import nvrtc
import pytest
from compiled_kernels import (
    ALL,
    OTHERS,
    TOGETHER,
    kind,
    library_for,
    share,
    step_within,
    symbols_of,
)
from kernel_instantiations import instantiations, kernels_of
from needs import needs_nvrtc
from nvrtc import CAPABILITIES, CompileError, Resources, compiled, resources
from paths import EMULATOR_KERNELS
from samples import sample
from scripts import refusal_by

from fuser.cuda import module
from fuser.cuda.launch import Kernel


@functools.cache
def sampled(symbols: tuple[str, ...]) -> frozenset[str]:
    """Those symbols of a source in which each pair of arguments of its templates occurs."""
    return frozenset(symbols[i] for i in sample([re.findall(r"[\w:]+", s) for s in symbols]))


def parts() -> list[Any]:
    """Source, architecture and number of each part of the symbols that one test compiles."""
    return [
        pytest.param(name, capability, first, id=f"{name}-{module.arch_name(capability)}-{first}")
        for name in instantiations()
        for capability in nvrtc.capabilities_of(module.KERNELS, name)
        for first in range(0, len(symbols_of(name, capability)), TOGETHER)
    ]


@needs_nvrtc
@pytest.mark.parametrize(("name", "capability", "first"), parts())
def test_kernels_compile_and_spill_nothing(
    name: str,
    capability: tuple[int, int],
    first: int,
    record_property: Callable[[str, object], None],
    pytestconfig: pytest.Config,
) -> None:
    start = time.perf_counter()
    symbols = symbols_of(name, capability)
    part = symbols[first : first + TOGETHER]
    if not pytestconfig.option.full:
        record = compiled_kernels.read()
        if compiled_kernels.is_recorded(name, capability, record):
            entry = record[name][module.arch_name(capability)]
            assert entry["kernels"] == len(symbols)
            assert 0 < entry["registers"] <= 255
            record_property("recorded", len(part))
            return
        if capability == ALL:
            part = tuple(symbol for symbol in part if symbol in sampled(symbols))
    kernels = compiled(module.KERNELS, name, part, capability, library_for(capability))
    record_property("compiled", [(str(k), k.registers) for k in kernels])
    record_property("seconds", time.perf_counter() - start)
    in_memory = [str(k) for k in kernels if k.spill_bytes or k.stack_bytes]
    assert not in_memory, "local memory is used:\n" + "\n".join(in_memory)
    assert all(0 < k.registers <= 255 for k in kernels)


def test_every_source_has_a_launcher_that_names_its_kernels() -> None:
    sources = {path.stem for path in module.KERNELS.glob("*.cu")}
    assert sources == set(instantiations()), (
        "A .cu without kernels here is never compiled: its launcher module needs a Kernel, or a "
        "function instantiations() that returns Kernels."
    )


def test_a_launcher_names_kernels_as_attributes_and_by_a_function() -> None:
    launcher = ModuleType("launcher")
    launcher.FUSER_X = Kernel("x", "fuser_x")
    assert kernels_of(launcher) == {Kernel("x", "fuser_x")}
    made = (Kernel("y", f"fuser_y<{t}>") for t in ("float", "int"))
    launcher.instantiations = lambda: made
    assert {kernel.symbol for kernel in kernels_of(launcher)} == {
        *("fuser_x", "fuser_y<float>", "fuser_y<int>")
    }


def test_many_kernels_are_shared_out_among_the_architectures() -> None:
    known = {"x": tuple(f"fuser_x<{i}>" for i in range(100)), "y": ("fuser_y",)}
    for budget in (101, 200, 303, 505, 10_000):
        step = step_within(known, budget)
        shares = {c: share(known["x"], c, step) for c in CAPABILITIES}
        assert shares[ALL] == known["x"]
        assert all(share(known["y"], c, step) == ("fuser_y",) for c in CAPABILITIES)
        assert sum(map(len, shares.values())) <= max(budget, 104)
        others = [symbol for c in OTHERS for symbol in shares[c]]
        assert len(others) == len(set(others)) or budget > 200
    assert all(share(known["x"], c, step_within(known, 505)) == known["x"] for c in CAPABILITIES)
    half = [set(share(known["x"], c, 2)) for c in OTHERS]
    assert set().union(*half) == set(known["x"])


def test_every_architecture_compiles_each_kind_of_kernel() -> None:
    assert kind("fuser_tiled<fuser::LoadProducer<float, true>, fuser::Mxfp8Store<A, true>>") == (
        *("fuser_tiled", "LoadProducer", "Mxfp8Store"),
    )
    for symbols in instantiations().values():
        for capability in CAPABILITIES:
            some = share(symbols, capability, step_within(instantiations()))
            assert set(map(kind, some)) == set(map(kind, symbols))
            assert len(set(some)) == len(some)
        assert set(map(kind, sampled(symbols))) == set(map(kind, symbols))
    assert sum(map(len, map(sampled, instantiations().values()))) < 1000


# -- the check itself -----------------------------------------------------------

SPILLS = """
template <int kValues>
__global__ void __launch_bounds__(1024, 2) fuser_spill(float* y, int n) {
    float values[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) { values[i] = y[i * n]; }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kValues; ++i) { y[i * n + 1] = values[i] * values[kValues - 1 - i]; }
}
"""


@needs_nvrtc
def test_spills_are_seen(tmp_path: Path) -> None:
    (tmp_path / "spill.cu").write_text(SPILLS)
    few, many = compiled(tmp_path, "spill", ("fuser_spill<4>", "fuser_spill<64>"), (9, 0))
    assert (few.symbol, few.arch, few.spill_bytes, few.stack_bytes) == (
        *("fuser_spill<4>", "sm_90a"),
        *(0, 0),
    )
    assert many.spill_bytes > 0
    assert 0 < few.registers < many.registers <= 32


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("// one\nint two = ;\n", r"x\.cu for sm_80:\nx\.cu\(2\): error"),
        ("__global__ void fuser_y() {}\n", r"x\.cu for sm_80 has no kernel fuser_x"),
        ('extern "C" __global__ void fuser_x() { int unused; }\n', "warning .* never referenced"),
        ("#include <vector>\n", "vector"),
    ],
)
def test_a_compile_error_names_the_file_and_the_reason(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "x.cu").write_text(text)
    with pytest.raises(CompileError, match=words):
        compiled(tmp_path, "x", ("fuser_x",), (8, 0))


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The symbols of every compilation, which begin with an empty folder of kept results."""
    made: list[tuple[str, ...]] = []
    compile_now = nvrtc._compile

    def noted(path: Path, symbols: tuple[str, ...], *arguments: Any) -> Any:
        made.append(symbols)
        return compile_now(path, symbols, *arguments)

    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(nvrtc.compilation, "cache", lambda: tmp_path / "kept")
    monkeypatch.setattr(nvrtc, "_compile", noted)
    return made


INCLUDING = """
#include <fuser/one.cuh>
template <class T> __global__ void fuser_x(T* y) { *y = number(); }
"""


@needs_nvrtc
def test_a_kernel_is_compiled_again_after_any_change_and_not_otherwise(
    tmp_path: Path, compilations: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    (sources / "fuser").mkdir(parents=True)
    two = sources / "fuser" / "two.cuh"
    (sources / "fuser" / "one.cuh").write_text("#include <fuser/two.cuh>\n")
    two.write_text("__device__ inline int number() { return 1; }\n")
    (sources / "x.cu").write_text(INCLUDING)
    oldest, newest = nvrtc.libraries()[0], nvrtc.libraries()[-1]
    ints, floats = "fuser_x<int>", "fuser_x<float>"
    changes: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
        (lambda: compiled(sources, "x", (ints,), (9, 0), newest), (ints,)),
        (lambda: compiled(sources, "x", (floats, ints), (9, 0), newest), (floats,)),
        (lambda: compiled(sources, "x", (ints,), (8, 0), newest), (ints,)),
        (lambda: two.write_text(two.read_text().replace("1", "2")), (ints,)),
        (lambda: (sources / "x.cu").write_text(INCLUDING + "\n"), (ints,)),
        (lambda: monkeypatch.setattr(nvrtc, "CUPY_OPTIONS", ("-ftz=false",)), (ints,)),
    ]
    if oldest is not newest:
        changes.append((lambda: compiled(sources, "x", (ints,), (9, 0), oldest), (ints,)))
    for change, expected in changes:
        compilations.clear()
        change()
        first = compiled(sources, "x", (ints,), (9, 0), newest)
        assert compilations == [expected]
        assert compiled(sources, "x", (ints,), (9, 0), newest) == first
        assert compilations == [expected]


@needs_nvrtc
def test_a_failed_compilation_is_not_kept(
    tmp_path: Path, compilations: list[tuple[str, ...]]
) -> None:
    (tmp_path / "x.cu").write_text("// one\nint two = ;\n")
    for count in (1, 2):
        with pytest.raises(CompileError, match="error"):
            compiled(tmp_path, "x", ("fuser_x",), (8, 0))
        assert len(compilations) == count


@needs_nvrtc
def test_the_emulators_own_kernels_are_cuda_too() -> None:
    folder = EMULATOR_KERNELS
    oldest = nvrtc.libraries()[0]  # CUDA's own headers, which are included, are as old
    symbols = ("fuser_transpose<float>", "fuser_collectives", "fuser_numbers", "fuser_many")
    assert all(k.spill_bytes == 0 for k in compiled(folder, "features", symbols, (9, 0), oldest))
    copies = [f"fuser_copy<{element}>" for element in ("uint4", "uint2", "unsigned")]
    for capability in CAPABILITIES:
        kernels = compiled(folder, "conversions", ("fuser_convert", *copies), capability, oldest)
        assert all(k.spill_bytes == k.stack_bytes == 0 for k in kernels)


def test_products_of_hopper_are_compiled_for_hopper_alone() -> None:
    names = {n for n in instantiations() if len(nvrtc.capabilities_of(module.KERNELS, n)) == 1}
    assert names == {"grouped_gemm"}
    assert nvrtc.capabilities_of(module.KERNELS, "grouped_gemm") == ((9, 0),)


def test_a_log_is_read() -> None:
    log = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1xIfEvv' for 'sm_80'
ptxas info    : Function properties for _Z1xIfEvv
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 4224 bytes smem, 376 bytes cmem[0]
ptxas info    : Compiling entry function 'fuser_y' for 'sm_80'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 9 registers, used 0 barriers
"""
    assert resources(log) == {"_Z1xIfEvv": (14, 28, 8, 4224), "fuser_y": (9, 0, 0, 0)}
    assert "14 registers   28 spilled    8 stack" in str(Resources("x", "sm_80", 14, 28, 8, 4224))


@needs_nvrtc
def test_the_table_is_of_the_named_sources_and_architectures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert nvrtc.main(["probe", "--arch", "sm_90a", "--arch", "sm_80"]) == 0
    *kernels, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in kernels] == ["sm_90a", "sm_80"]
    assert last == "2 compilations; 0 keep data in local memory"


@pytest.mark.parametrize("arguments", [["nothing"], ["probe", "--arch", "sm_90"]])
def test_an_unknown_source_or_architecture_is_answered_with_a_sentence(
    arguments: list[str],
) -> None:
    assert arguments[-1] in refusal_by(nvrtc.main, arguments)
