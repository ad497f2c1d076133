"""CUDA sources, installation checks and argument encoding, as far as they need no GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulator import emulated
from fresh import python
from paths import ROOT
from said import holds, said

from fuser.cuda import launch as launching
from fuser.cuda import module
from fuser.cuda.arguments import Struct, encode, float32, int32, int64
from fuser.cuda.launch import Kernel, Launch
from fuser.cuda.module import Installation, Obstacle, obstacle
from fuser.cuda.probe import probe
from fuser.errors import InputError, InputTypeError, KernelUnavailable, StateError

HERE = Installation(
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
    device_count=1,
    cupy_packages=("cupy-cuda13x",),
    cupy_version="14.2.0",
    cupy_cuda=13000,
)


class OnDevice(torch.Tensor):
    """A tensor that says it is on a CUDA device, for encoding alone."""

    is_cuda = True
    device_index = 0

    def get_device(self) -> int:
        return self.device_index


def on_device(index: int = 0) -> torch.Tensor:
    tensor = torch.zeros(4).as_subclass(OnDevice)
    tensor.device_index = index
    return tensor


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernel sources, in force for this test."""
    copy = tmp_path / "kernels"
    shutil.copytree(module.KERNELS, copy)
    (copy / "fuser").mkdir(exist_ok=True)
    (copy / "fuser" / "extra.cuh").write_text("#pragma once\n")
    monkeypatch.setattr(module, "KERNELS", copy)
    return copy


# -- import and sources -----------------------------------------------------------


def test_importing_fuser_imports_no_cupy() -> None:
    code = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "cupy", "something imported cupy"

sys.meta_path.insert(0, Refuse())
import fuser, fuser.cuda.module, fuser.cuda.launch, fuser.cuda.probe, fuser.testing.doctor
assert "cupy" not in sys.modules
"""
    run = python(["-c", code])
    assert run.returncode == 0, run.stderr


def test_every_kernel_source_is_package_data() -> None:
    assert (module.KERNELS / "probe.cu").is_file()
    patterns = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in [*module.KERNELS.rglob("*.cu"), *module.KERNELS.rglob("*.cuh")]:
        folder = path.parent.relative_to(module.KERNELS.parent.parent).as_posix()
        assert f'"{folder}/*{path.suffix}"' in patterns, f"{path} would not be installed"


def test_the_digest_changes_with_any_source_and_with_its_name(kernels: Path) -> None:
    digests = [module.sources_digest(kernels), module.sources_digest(kernels)]
    assert digests[0] == digests[1]
    with (kernels / "probe.cu").open("a", encoding="utf-8") as file:
        file.write("\n")
    digests.append(module.sources_digest(kernels))
    text = (kernels / "probe.cu").read_text(encoding="utf-8")
    (kernels / "probe.cu").write_text(text[:-1] + " ", encoding="utf-8")
    digests.append(module.sources_digest(kernels))
    (kernels / "fuser" / "extra.cuh").write_text("#pragma once\nint edited;\n")
    digests.append(module.sources_digest(kernels))
    (kernels / "fuser" / "extra.cuh").rename(kernels / "fuser" / "renamed.cuh")
    digests.append(module.sources_digest(kernels))
    (kernels / "new.cu").write_text("")
    digests.append(module.sources_digest(kernels))
    assert len(set(digests[1:])) == 6


def test_the_digest_tells_apart_where_one_file_ends_and_the_next_begins(tmp_path: Path) -> None:
    for folder, first, second in (("one", "ab", "c"), ("two", "a", "bc")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.cu").write_text(first)
        (tmp_path / folder / "y.cu").write_text(second)
    assert module.sources_digest(tmp_path / "one") != module.sources_digest(tmp_path / "two")


def test_the_options_hold_the_digest_the_headers_folder_and_the_architecture(
    kernels: Path,
) -> None:
    options = module.compile_options(kernels, (9, 0))
    assert f"-DFUSER_SOURCES={module.sources_digest(kernels)}" in options
    assert f"-I{kernels}" in options
    assert "-std=c++17" in options
    assert "-arch=sm_90a" in options


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")],
)
def test_architectures_from_hopper_on_get_their_own_instructions(
    capability: tuple[int, int], arch: str
) -> None:
    assert module.arch_name(capability) == arch


# -- why kernels are not available --------------------------------------------------


def test_a_matching_installation_has_no_problems() -> None:
    assert obstacle(HERE) is None
    cuda12 = dataclasses.replace(
        HERE, torch_cuda="12.8", cupy_cuda=12090, cupy_packages=("cupy-cuda12x",)
    )
    assert obstacle(cuda12) is None
    assert obstacle(dataclasses.replace(HERE, cupy_packages=())) is None  # built from source


NO_CUPY: dict[str, Any] = {"cupy_packages": (), "cupy_version": None, "cupy_cuda": None}


@pytest.mark.parametrize(
    ("changes", "words", "commands"),
    [
        ({"torch_cuda": None}, ["2.11.0+cu130", "without CUDA", "pytorch.org"], ()),
        ({"device_count": 0}, ["CUDA 13.0", "no CUDA device", "CUDA_VISIBLE_DEVICES"], ()),
        ({"torch_cuda": "11.8"}, ["CUDA 11.8", "12 or 13"], ()),
        (NO_CUPY, ["CuPy", "not installed"], ("pip install cupy-cuda13x",)),
        ({**NO_CUPY, "torch_cuda": "12.8"}, ["not installed"], ("pip install cupy-cuda12x",)),
        (
            {"cupy_packages": ("cupy-cuda12x",), "cupy_cuda": 12090},
            ["CuPy 14.2.0", "CUDA 12", "torch 2.11.0+cu130", "CUDA 13"],
            ("pip uninstall -y cupy-cuda12x", "pip install cupy-cuda13x"),
        ),
        (
            {**NO_CUPY, "cupy_packages": ("cupy-cuda12x", "cupy-cuda13x")},
            ["cupy-cuda12x and cupy-cuda13x", "overwrite"],
            ("pip uninstall -y cupy-cuda12x cupy-cuda13x", "pip install cupy-cuda13x"),
        ),
        (
            {**NO_CUPY, "cupy_packages": ("cupy-cuda13x",), "cupy_error": "ImportError: libx"},
            ["cannot be imported", "ImportError: libx"],
            ("pip uninstall -y cupy-cuda13x", "pip install cupy-cuda13x"),
        ),
        (
            {**NO_CUPY, "cupy_error": "PermissionError: /home/me", "lacks_cache": True},
            ["cannot be imported (PermissionError: /home/me)", "set CUPY_CACHE_DIR"],
            (),
        ),
    ],
)
def test_an_obstacle_is_a_sentence_with_the_commands_that_remove_it(
    changes: dict[str, Any], words: list[str], commands: tuple[str, ...]
) -> None:
    found = obstacle(dataclasses.replace(HERE, **changes))
    assert found is not None
    assert all(word in found.reason for word in words), found.reason
    assert found.reason.endswith(".")
    assert found.commands == commands
    assert all(f"`{command}`" in str(found) for command in commands)


def test_the_installation_is_read_from_torch_and_the_installed_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    found = module.installation()
    assert found.torch_version == torch.__version__
    assert found.torch_cuda == torch.version.cuda
    assert (found.cupy_version, found.cupy_error) == (None, None)


def test_two_cupys_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["cupy-cuda12x", "numpy", "cupy-cuda13x", "cupy-cuda13x", "cupyish"]
    monkeypatch.setattr(
        module.importlib.metadata,
        "distributions",
        lambda: [types.SimpleNamespace(metadata={"Name": name}) for name in names],
    )
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it would raise
    found = module.installation()
    assert found.cupy_packages == ("cupy-cuda12x", "cupy-cuda13x")
    assert found.cupy_error is None


def test_a_cupy_that_raises_on_import_is_reported_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_cupy_packages", lambda: ("cupy-cuda13x",))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "cupy", None)
    error = module.installation().cupy_error
    assert error is not None
    assert error.startswith(("ImportError", "ModuleNotFoundError"))


def test_a_cupy_that_is_imported_and_built_for_another_cuda_than_torch_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = types.ModuleType("cupy")
    cupy.__version__ = "14.2.0"
    driver = types.SimpleNamespace(get_build_version=lambda: 12090)
    cupy.cuda = types.SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(module, "_cupy_packages", lambda: ("cupy-cuda12x",))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = module.installation()
    assert (found.cupy_version, found.cupy_cuda_major, found.torch_cuda_major) == ("14.2.0", 12, 13)
    reason = module.missing_requirement.__wrapped__()
    assert reason is not None
    assert "CuPy 14.2.0 is built for CUDA 12 and torch" in reason
    assert "for CUDA 13; they must be the same." in reason
    assert "`pip uninstall -y cupy-cuda12x`, then `pip install cupy-cuda13x`" in reason


@pytest.fixture
def unavailable(monkeypatch: pytest.MonkeyPatch) -> Obstacle:
    """A reason why kernels cannot run, in force for this test."""
    reason = Obstacle("There is no GPU in this test.", ("pip install gpu",))
    monkeypatch.setattr(module, "missing_requirement", lambda: str(reason))
    return reason


def test_a_kernel_that_cannot_run_says_why(unavailable: Obstacle) -> None:
    with pytest.raises(
        StateError,
        match=said(
            "module-kernel-cannot-run",
            "fuser_probe",
            holds("no GPU in this test", "pip install gpu"),
        ),
    ):
        module.kernel("probe", "fuser_probe", 0)


# -- compiling, with a stand-in for CuPy ------------------------------------------


class CompileException(Exception):
    """Stands for CuPy's."""


class CUDADriverError(Exception):
    """Stands for CuPy's."""


class FakeRawModule:
    """Records what it was asked to compile; the only kernels it knows are ``found``."""

    made: list[FakeRawModule]
    found = ("fuser_probe", "fuser_probe<float, 4>")

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.made.append(self)

    def compile(self) -> None:
        if "syntax error" in self.arguments["code"]:
            raise CompileException(
                "fuser/cuda/kernels/probe.cu(2): warning: odd\n\n"
                'fuser/cuda/kernels/probe.cu(3): error: expected a ";"\n1 error detected'
            )
        if "no room" in self.arguments["code"]:
            raise PermissionError(13, "Permission denied", "/home/cache")

    def get_function(self, symbol: str) -> tuple[FakeRawModule, str]:
        if symbol not in self.found:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        return self, symbol


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeRawModule]]:
    """CuPy replaced by a recorder, and a Hopper GPU that is not there."""

    class Recorder(FakeRawModule):
        made: list[FakeRawModule] = []  # noqa: RUF012
        module = types.SimpleNamespace(ptr=1)

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> Device:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    cupy = types.ModuleType("cupy")
    cupy.RawModule = Recorder
    cupy.cuda = types.SimpleNamespace(
        Device=Device,
        driver=types.SimpleNamespace(CUDADriverError=CUDADriverError),
        compiler=types.SimpleNamespace(CompileException=CompileException),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(module, "missing_requirement", lambda: None)
    monkeypatch.setattr(module, "compile_failure", None)
    monkeypatch.setattr(module, "_loaded", [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    caches = (module.function, module.kernel, module._compiled)
    for cached in caches:
        cached.cache_clear()
    yield Recorder
    for cached in caches:
        cached.cache_clear()


def test_a_source_is_compiled_once_for_each_device_and_by_nvrtc(
    fake_cupy: type[FakeRawModule], kernels: Path
) -> None:
    handle = module.kernel("probe", "fuser_probe", 0)
    assert module.kernel("probe", "fuser_probe", 0) is handle
    assert len(fake_cupy.made) == 1
    module.kernel("probe", "fuser_probe", 1)
    assert len(fake_cupy.made) == 2
    arguments = fake_cupy.made[0].arguments
    assert arguments["backend"] == "nvrtc"
    assert arguments["options"] == module.compile_options(kernels, (9, 0))
    assert arguments["name_expressions"] is None
    first, rest = arguments["code"].split("\n", 1)
    assert first == '#line 1 "fuser/cuda/kernels/probe.cu"'
    assert rest == (kernels / "probe.cu").read_text(encoding="utf-8")


def test_a_template_is_compiled_for_its_instantiation(fake_cupy: type[FakeRawModule]) -> None:
    _, symbol = module.kernel("probe", "fuser_probe<float, 4>", 0)
    assert symbol == "fuser_probe<float, 4>"
    assert fake_cupy.made[0].arguments["name_expressions"] == ("fuser_probe<float, 4>",)


def test_a_compile_error_names_the_file_and_holds_the_log(
    fake_cupy: type[FakeRawModule], kernels: Path
) -> None:
    (kernels / "probe.cu").write_text("syntax error")
    with (
        pytest.raises(KernelUnavailable) as raised,
        pytest.warns(UserWarning, match=said("module-torch-work-kernels")),
    ):
        module.kernel("probe", "fuser_probe", 0)
    message = str(raised.value)
    assert message.startswith("fuser/cuda/kernels/probe.cu does not compile for sm_90a:\n")
    assert 'probe.cu(3): error: expected a ";"' in message


def test_kernels_take_tensors_of_their_device_and_dtypes_unless_they_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with emulated():
        assert launching.kernels_support(torch.zeros(1))
        assert launching.kernels_support(torch.zeros(1, dtype=torch.uint8))
        assert not launching.kernels_support(torch.zeros(1, dtype=torch.float64))
        assert not launching.kernels_support(torch.zeros(1, device="meta"))
        monkeypatch.setattr(launching.backend, "refusal", lambda: "there is no CuPy.")
        assert not launching.kernels_support(torch.zeros(1))
        assert launching.kernel_refusal("cpu") == "there is no CuPy."


def test_after_a_compile_error_no_kernel_is_taken_and_one_warning_says_why(
    fake_cupy: type[FakeRawModule], kernels: Path
) -> None:
    x = torch.zeros(1)
    module.kernel("mxfp8", "fuser_probe", 0)
    (kernels / "probe.cu").write_text("syntax error")
    with emulated():
        assert launching.kernels_support(x)
        with (
            pytest.raises(KernelUnavailable),
            pytest.warns(match=said("module-torch-work-kernels", holds("compile"))) as warned,
        ):
            module.kernel("probe", "fuser_probe", 0)
        assert not launching.kernels_support(x)
    sentence = (
        "fuser/cuda/kernels/probe.cu does not compile for sm_90a (CompileException: "
        'fuser/cuda/kernels/probe.cu(3): error: expected a ";"). Run `python -m fuser doctor`.'
    )
    assert module.kernels_unavailable() == sentence
    assert [str(w.message) for w in warned] == [
        f"{sentence} From here on torch does the work of kernels."
    ]
    with pytest.raises(
        KernelUnavailable, match=said("module-does-not-compile", holds("fuser_other cannot run"))
    ):
        module.kernel("nvfp4", "fuser_other", 0)
    assert module.kernel("mxfp8", "fuser_probe", 0)  # what is compiled stays


@pytest.mark.parametrize("folder", [None, "/mnt/cache"])
def test_a_cache_folder_that_cannot_be_written_is_named_with_what_to_set(
    fake_cupy: type[FakeRawModule],
    kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str | None,
) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    if folder is not None:
        monkeypatch.setenv("CUPY_CACHE_DIR", folder)
    (kernels / "probe.cu").write_text("no room")
    shown = folder or "~/.cupy/kernel_cache"
    with (
        pytest.raises(
            KernelUnavailable,
            match=said("module-does-not-compile", None, None, holds("Permission denied")),
        ),
        pytest.warns(match=rf"\(PermissionError: .* in {shown}: set CUPY_CACHE_DIR to"),
    ):
        module.kernel("probe", "fuser_probe", 0)


def test_a_missing_source_or_kernel_is_named(fake_cupy: type[FakeRawModule]) -> None:
    with pytest.raises(
        StateError,
        match=said("sources-no-kernel", "fuser/cuda/kernels/nowhere.cu", holds(" probe")),
    ):
        module.kernel("nowhere", "fuser_x", 0)
    with pytest.raises(
        StateError, match=said("module-no-kernel", holds("probe.cu"), "fuser_x", holds("NOT_FOUND"))
    ):
        module.kernel("probe", "fuser_x", 0)


# -- launching --------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(0,), (4, 0), (0, 4), (4, 2, 0), (4, 0, 2), (0, 4, 2)])
def test_an_empty_grid_launches_nothing(
    grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    heard: list[Any] = []
    backend = types.SimpleNamespace(run=lambda *args: ran.append(args))
    monkeypatch.setattr(launching, "backend", backend)
    monkeypatch.setattr(launching.recording, "listener", lambda *args: heard.append(args))
    kernel = Kernel("probe", "fuser_probe")
    kernel(Launch(grid, (256,)), int64(0))
    assert ran == heard == []
    full = Launch(tuple(max(size, 1) for size in grid), (256,))
    kernel(full, int64(0))
    assert ran == heard == [(kernel, full, (int64(0),))]


@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes", "words"),
    [
        ((-1,), (32,), 0, said("launch-tuple-ints", "grid (-1,)")),
        ((1,), (0,), 0, said("launch-tuple-ints", "block (0,)")),
        ((1,), (1025,), 0, said("launch-tuple-ints", "block (1025,)")),
        ((1,), (64, 32), 0, said("launch-block-threads-most", None, 2048)),
        ((1,), (1, 1, 65), 0, said("launch-tuple-ints", "block (1, 1, 65)")),
        ((1, 65536), (32,), 0, said("launch-tuple-ints", "grid (1, 65536)")),
        ((), (32,), 0, said("launch-tuple-ints", "grid ()")),
        ((1, 1, 1, 1), (32,), 0, said("launch-tuple-ints", "grid (1, 1, 1, 1)")),
        ((1.0,), (32,), 0, said("launch-tuple-ints", "grid (1.0,)")),
        (1, (32,), 0, said("launch-tuple-ints", "grid 1")),
        ((1,), (32,), -4, said("launch-bytes-shared-memory", -4)),
    ],
)
def test_a_launch_outside_cudas_limits_is_refused(
    grid: Any, block: Any, shared_bytes: int, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        Launch(grid, block, shared_bytes)


def test_a_launch_and_a_kernel_are_frozen_values() -> None:
    assert Launch((4,), (256,)) == Launch((4,), (256,), 0)
    assert hash(Kernel("probe", "fuser_probe")) == hash(Kernel("probe", "fuser_probe"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Launch((4,), (256,)).grid = (5,)  # type: ignore[misc]


def test_a_kernel_symbol_starts_with_the_packages_name() -> None:
    with pytest.raises(InputError, match=said("launch-symbols-start-fuser", "'probe'")):
        Kernel("probe", "probe")


def test_the_launch_passes_shape_arguments_and_torchs_stream_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []
    found: list[tuple[Any, ...]] = []
    bound: list[int] = []

    def function(name: str, symbol: str, device: int, *, has_dynamic_memory: bool) -> int:
        found.append((name, symbol, device, has_dynamic_memory))
        return 99

    def launches(*args: int) -> None:
        *sizes, shared, stream, params, extra = args
        words = (ctypes.c_size_t * 5).from_address(extra)
        size = ctypes.c_size_t.from_address(words[3]).value
        calls.append((*sizes, shared, stream, params, ctypes.string_at(words[1], size)))
        assert (words[0], words[2], words[4]) == (1, 2, 0)

    monkeypatch.setattr(module, "function", function)
    monkeypatch.setattr(module, "driver_launch", lambda: launches)
    monkeypatch.setattr(module, "bind_context", bound.append)
    monkeypatch.setattr(launching, "_slot", launching._ArgumentBuffer())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "cuda_device", lambda: 0)
    monkeypatch.setattr(launching, "cuda_stream", lambda device: 7000 + device)
    x = on_device()
    kernel = Kernel("probe", "fuser_probe")
    kernel(Launch((2, 3), (64,)), x, int32(5))
    packed = struct.pack("<qi", x.data_ptr(), 5)
    assert calls == [(99, 2, 3, 1, 64, 1, 1, 0, 7000, 0, packed)]
    kernel(Launch((2,), (8, 4), 1024), int32(1), Struct((x, int32(2))), np.uint8(3))
    packed = struct.pack("<i4xqi4xB", 1, x.data_ptr(), 2, 3)
    assert calls[1:] == [(99, 2, 1, 1, 8, 4, 1, 1024, 7000, 0, packed)]
    assert found == [("probe", "fuser_probe", 0, False), ("probe", "fuser_probe", 0, True)]
    assert bound == [0]
    with pytest.raises(
        InputError, match=said("launch-kernel-bytes-arguments", "fuser_probe", 4104)
    ):
        kernel(Launch((2,), (64,)), *[x] * 513)


# -- arguments --------------------------------------------------------------------


def test_arguments_arrive_with_the_width_they_were_given() -> None:
    x = on_device()
    scalars = (int32(-5), int64(2**40), float32(0.5), np.uint8(3), np.bool_(True), np.float64(2))
    encoded = encode("fuser_x", (x, None, *scalars))
    assert encoded.device == 0
    packed = struct.pack(encoded.format, *encoded.values)
    assert packed == struct.pack("<qqi4xqfB?2xd", x.data_ptr(), 0, -5, 2**40, 0.5, 3, True, 2.0)


def test_without_a_tensor_the_device_is_open() -> None:
    assert encode("fuser_x", (int32(1),)) == ("@i", [1], None)


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        (
            5,
            said(
                "arguments-know-int32-int64",
                holds("Kernel fuser_x got ", "Python int 5 as argument 1"),
                5,
                5,
            ),
        ),
        (
            2.5,
            said(
                "arguments-know-size-float32",
                holds("Kernel fuser_x got ", "Python float 2.5 as argument 1"),
                2.5,
            ),
        ),
        (
            True,
            said(
                "arguments-know-numpy-bool",
                holds("Kernel fuser_x got ", "Python bool True as argument 1"),
            ),
        ),
        (
            "x",
            said(
                "arguments-take-cuda-none",
                holds("Kernel fuser_x got ", "object of type str as argument 1"),
            ),
        ),
        (
            (1, 2),
            said("arguments-take-cuda-none", holds("Kernel fuser_x got ", "object of type tuple")),
        ),
        (
            np.zeros(3),
            said(
                "arguments-take-cuda-none",
                holds("Kernel fuser_x got ", "numpy array of 3 elements of float64"),
            ),
        ),
        (
            np.zeros(1),
            said(
                "arguments-take-cuda-none",
                holds("Kernel fuser_x got ", "numpy array of 1 elements of float64"),
            ),
        ),
        (
            np.zeros(2, dtype=[("a", np.int32)]),
            said(
                "arguments-take-cuda-none",
                holds("Kernel fuser_x got ", "numpy array of 2 elements"),
            ),
        ),
        (
            np.str_("x"),
            said("arguments-take-cuda-none", holds("Kernel fuser_x got ", "object of type str_")),
        ),
        (
            torch.float32,
            said("arguments-take-cuda-none", holds("Kernel fuser_x got ", "object of type dtype")),
        ),
    ],
)
def test_an_argument_without_a_width_is_refused(arg: Any, words: str) -> None:
    with pytest.raises(InputTypeError, match=words):
        encode("fuser_x", (int32(1), arg))


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=said(
            "arguments-kernels-read-write", holds("fuser_x got a tensor on cpu as argument 0")
        ),
    ):
        encode("fuser_x", (torch.zeros(2),))
    with pytest.raises(
        InputError,
        match=said(
            "arguments-kernels-read-write", holds("fuser_x got a tensor on meta as argument 1")
        ),
    ):
        encode("fuser_x", (on_device(), torch.zeros(2, device="meta")))
    with pytest.raises(
        InputError,
        match=said(
            "arguments-others-all-device", holds("a tensor on cuda:1 as argument 1"), "cuda", 0
        ),
    ):
        encode("fuser_x", (on_device(), on_device(1)))


@pytest.mark.parametrize(
    ("make", "value"),
    [(int32, 2**31), (int32, -(2**31) - 1), (int64, 2**63), (float32, 1e39), (float32, -1e300)],
)
def test_a_scalar_that_does_not_fit_is_refused(make: Any, value: float) -> None:
    with pytest.raises(InputError, match=f"does not fit a kernel's {make.__name__} argument"):
        make(value)


def test_the_limits_and_the_special_values_fit() -> None:
    assert int32(2**31 - 1) == 2**31 - 1
    assert int64(-(2**63)) == -(2**63)
    assert float32(float("inf")) == float("inf")
    assert np.isnan(float32(float("nan")))
    assert float32(3.4028234663852886e38) == np.finfo(np.float32).max


# -- the probe's launcher ------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (
            torch.zeros(4, dtype=torch.float64),
            torch.zeros(4),
            said("probe-takes-contiguous-float32", "x", "torch.float64"),
        ),
        (
            torch.zeros(4, 4),
            torch.zeros(4, 4).t(),
            said("probe-takes-contiguous-float32", "y", None, None, (1, 4)),
        ),
        (torch.zeros(4), torch.zeros(5), said("probe-writes-many-elements", (4,), (5,))),
        (
            torch.zeros(4),
            torch.zeros(4),
            said("arguments-kernels-read-write", holds("tensor on cpu")),
        ),
    ],
)
def test_the_probe_refuses_tensors_that_it_does_not_support(
    x: torch.Tensor, y: torch.Tensor, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        probe(x, y, 1.0)


def test_a_process_that_ends_after_an_error_unloads_no_kernel(
    fake_cupy: type[FakeRawModule],
) -> None:
    """CuPy would print an ignored exception for each module, as the driver then refuses."""
    module.kernel("probe", "fuser_probe", 0)
    (loaded,) = module._loaded
    assert loaded is fake_cupy.module
    loaded.ptr = 7
    module.leave_loaded()
    assert loaded.ptr == 0


AT_THE_END = """
from fuser.cuda import module

class Module:  # as CuPy's
    ptr = 1
    def __del__(self):
        if self.ptr:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

module._loaded.append(Module())
raise SystemExit("an error")
"""


def test_the_end_of_a_process_prints_its_own_error_alone() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=300
    )
    assert ended.stderr.strip().splitlines() == ["an error"]
