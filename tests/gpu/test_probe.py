"""The probe on a GPU: values, streams, graphs, threads, devices, compile errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from said import holds, said
from streams import SLEEP_CYCLES

import fuser
from fuser.cuda import module
from fuser.cuda.arguments import float32, int64
from fuser.cuda.launch import Kernel, Launch
from fuser.cuda.probe import MAX_BLOCKS, THREADS, probe
from fuser.errors import InputError, KernelUnavailable, StateError
from fuser.testing import doctor

SCALE = 0.37


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Kernels are compiled, and torch's own are loaded, before any test of streams."""
    if torch.cuda.is_available():
        check(*run(torch.randn(3, device="cuda")))


def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The input and what the probe writes over a poisoned output."""
    y = torch.full_like(x, float("nan"))
    probe(x, y, SCALE)
    return x, y


def expected(x: torch.Tensor) -> torch.Tensor:
    """The same in fp64 with the fp32 scale, rounded once."""
    i = torch.arange(x.numel(), dtype=torch.float64, device=x.device).view(x.shape)
    return (float(np.float32(SCALE)) * x.double() + i).float()


def check(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(y, expected(x), rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    "shape", [(1,), (255,), (256,), (257,), (3, 5, 7), (THREADS * MAX_BLOCKS * 3 + 11,)]
)
def test_every_element_is_scale_times_x_plus_its_index(shape: tuple[int, ...]) -> None:
    check(*run(torch.randn(shape, device="cuda")))


def test_an_empty_tensor_launches_nothing() -> None:
    y = run(torch.empty(0, 4, device="cuda"))[1]
    assert y.shape == (0, 4)
    torch.cuda.synchronize()


def test_elements_outside_the_output_are_left_alone() -> None:
    whole = torch.full((1000,), float("nan"), device="cuda")
    x = torch.randn(100, device="cuda")
    probe(x, whole[300:400], SCALE)
    check(x, whole[300:400])
    assert int(whole.isnan().sum()) == 900


def test_a_wrong_number_of_threads_shows_in_the_values() -> None:
    """The probe proves that grid and block arrive: given more threads, it leaves gaps."""
    x = torch.randn(1024, device="cuda")
    y = torch.full_like(x, float("nan"))
    kernel = Kernel("probe", "fuser_probe")
    kernel(Launch((2,), (128,)), x, y, int64(1024), int64(512), float32(SCALE))
    written = ~y.isnan()
    assert written.view(2, 512)[:, :256].all()
    assert not written.view(2, 512)[:, 256:].any()


def test_the_launch_is_on_torchs_current_stream() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(4096, device="cuda")
    values = torch.randn(4096, device="cuda")
    y = torch.full_like(x, float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(values)
        probe(x, y, SCALE)
    assert not stream.query()  # the launch did not wait
    stream.synchronize()
    check(values, y)


def test_a_captured_launch_replays_over_new_values() -> None:
    x = torch.randn(1000, device="cuda")
    y = torch.full_like(x, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        probe(x, y, SCALE)
    assert y.isnan().all()  # capturing runs nothing
    for _ in range(2):
        x.normal_()
        graph.replay()
        check(x, y)


class ProbeBothWays(torch.autograd.Function):
    """The probe in forward and in backward, with notes of where the backward ran."""

    seen: dict[str, Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return run(x)[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (values,) = ctx.saved_tensors
        ProbeBothWays.seen = {
            "thread": threading.get_ident(),
            "stream": torch.cuda.current_stream().cuda_stream,
        }
        late = torch.zeros_like(values)
        torch.cuda._sleep(SLEEP_CYCLES)
        late.copy_(values)
        return run(late)[1], None


def test_a_backward_launches_from_the_autograd_thread_on_the_forwards_stream() -> None:
    x = torch.randn(4096, device="cuda", requires_grad=True)
    values = torch.randn(4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = ProbeBothWays.apply(x, values)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    stream.synchronize()
    check(x.detach(), y.detach())
    check(values, grad)
    assert ProbeBothWays.seen["thread"] != threading.get_ident()
    assert ProbeBothWays.seen["stream"] == stream.cuda_stream


def test_forward_and_backward_are_captured_together() -> None:
    x = torch.randn(512, device="cuda", requires_grad=True)
    values = torch.randn(512, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(ProbeBothWays.apply(x, values), x, torch.ones_like(x))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ProbeBothWays.apply(x, values)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    values.normal_()
    graph.replay()
    torch.cuda.synchronize()
    check(x.detach(), y.detach())
    check(values, grad)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_launch_goes_to_the_tensors_device_not_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    check(*run(torch.randn(777, device="cuda:1")))
    assert torch.cuda.current_device() == 0
    with pytest.raises(
        InputError,
        match=said("arguments-others-all-device", holds("on cuda:1 as argument 1"), "cuda", 0),
    ):
        probe(torch.zeros(2, device="cuda:0"), torch.zeros(2, device="cuda:1"), 1.0)


# -- compiling ----------------------------------------------------------------------


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernel sources, in force for this test."""
    copy = tmp_path / "kernels"
    shutil.copytree(module.KERNELS, copy)
    (copy / "fuser").mkdir(exist_ok=True)
    monkeypatch.setattr(module, "KERNELS", copy)
    monkeypatch.setattr(module, "compile_failure", None)
    forget_kernels()
    yield copy
    forget_kernels()


def forget_kernels() -> None:
    """Make the next launch load its kernel anew, as another process would."""
    for cached in (module.kernel, module.function, module._compiled):
        cached.cache_clear()


TEMPLATE = """
#include <fuser/offset.cuh>

template <typename T, int kFactor>
__global__ void fuser_fill(T* y, long long n) {
    extern __shared__ T shared[];
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    shared[threadIdx.x] = static_cast<T>(kFactor * i + kOffset);
    if (i < n) {
        y[i] = shared[threadIdx.x];
    }
}
"""


def fill(shared_bytes: int = 4 * THREADS) -> torch.Tensor:
    """``3 i`` plus the header's offset, by a template's instantiation."""
    y = torch.full((THREADS,), -1, dtype=torch.int32, device="cuda")
    kernel = Kernel("fill", "fuser_fill<int, 3>")
    kernel(Launch((1,), (THREADS,), shared_bytes), y, int64(THREADS))
    return y.cpu()


def test_a_template_is_instantiated_and_an_edited_header_is_seen(kernels: Path) -> None:
    (kernels / "fill.cu").write_text(TEMPLATE)
    for offset in (5, 6):
        (kernels / "fuser" / "offset.cuh").write_text(f"constexpr int kOffset = {offset};\n")
        forget_kernels()
        assert torch.equal(fill(), 3 * torch.arange(THREADS, dtype=torch.int32) + offset)


def test_a_kernel_may_ask_for_all_the_shared_memory_of_a_block(kernels: Path) -> None:
    (kernels / "fill.cu").write_text(TEMPLATE)
    (kernels / "fuser" / "offset.cuh").write_text("constexpr int kOffset = 7;\n")
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    assert most > 48 * 1024
    for shared_bytes in (most, 64 * 1024, most):
        assert torch.equal(fill(shared_bytes), 3 * torch.arange(THREADS, dtype=torch.int32) + 7)


def test_a_compile_error_names_the_real_file_and_line(kernels: Path) -> None:
    (kernels / "broken.cu").write_text("// one\n// two\nint three = ;\n")
    with (
        pytest.raises(KernelUnavailable) as raised,
        pytest.warns(match=said("module-torch-work-kernels")),
    ):
        module.kernel("broken", "fuser_broken", 0)
    message = str(raised.value)
    assert "fuser/cuda/kernels/broken.cu does not compile for sm_" in message
    assert "fuser/cuda/kernels/broken.cu(3): error" in message


def test_where_a_kernel_does_not_compile_torch_trains_and_the_plan_says_why(kernels: Path) -> None:
    for name in ("pointwise", "normalization", "mxfp8"):
        (kernels / f"{name}.cu").write_text("int three = ;\n")
    model = fuser.Sequential(
        *(fuser.RMSNorm(64), fuser.Linear(64, 128), fuser.SwiGLU(), fuser.ConstantScale(0.5))
    ).to("cuda", torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with pytest.warns(match=said("module-torch-work-kernels", holds("normalization.cu"))):
        y = model(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert "without fuser's kernels: fuser/cuda/kernels/normalization.cu" in str(model.plan(x))
    assert doctor.diagnose().exit_status == 1


COMPILE_AND_CHECK = """
import torch
from fuser.cuda.probe import probe
x = torch.ones(1000, device="cuda")
y = torch.empty_like(x)
probe(x, y, 2.0)
torch.testing.assert_close(y, 2 + torch.arange(1000.0, device="cuda"))
"""


def test_processes_that_compile_at_once_into_one_new_cache_all_work(tmp_path: Path) -> None:
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path / "cache")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE_AND_CHECK], env=environment, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for process in started:
        errors = process.communicate()[1]
        assert process.returncode == 0, errors.decode()


@pytest.mark.parametrize("when", ["before CuPy is imported", "after"])
def test_a_cache_folder_that_cannot_be_written_is_a_sentence_and_torch_runs(
    when: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    code = f"""
import shutil, torch, fuser
if {when == "after"}:
    import cupy
    shutil.rmtree({str(cache)!r}, ignore_errors=True)
    open({str(cache)!r}, "w").close()
model = fuser.Sequential(fuser.RMSNorm(64, device="cuda"), fuser.SwiGLU(), fuser.ConstantScale(2.0))
model(torch.randn(8, 64, device="cuda")).sum().backward()
print(model.plan(torch.randn(8, 64, device="cuda")))
"""
    if when != "after":
        cache.write_text("no folder")  # which stops a superuser as well
    environment = {**os.environ, "CUPY_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "without fuser's kernels" in found.stdout
    assert "set CUPY_CACHE_DIR to a folder that can be written" in found.stdout


def test_a_missing_kernel_is_named() -> None:
    with pytest.raises(
        StateError, match=said("module-no-kernel", holds("probe.cu"), "fuser_nothing")
    ):
        module.kernel("probe", "fuser_nothing", 0)


def test_kernels_are_available_and_the_doctor_agrees() -> None:
    assert module.kernels_unavailable() is None
    diagnosis = doctor.diagnose()
    assert diagnosis.exit_status == 0, str(diagnosis)
    assert diagnosis.probe is not None
    assert diagnosis.probe.error is None
    assert "and CUDA kernels compile and run" in diagnosis.verdict
