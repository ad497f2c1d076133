"""cuBLASLt called without torch, against fp64."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import oracles
import pytest
import torch
from test_cublaslt import block, close, step, with_main_grads
from test_quantized_gemm import NATIVE

from fuser import gemm
from fuser.cuda import cublaslt
from fuser.cuda.cublaslt import Scales
from fuser.precision.availability import runs_natively

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def library() -> None:
    if cublaslt.library("cuda") is None:
        pytest.skip("torch has loaded no cuBLASLt")


def values(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return oracles.random_tensor(shape, dtype, seed).cuda()


def assert_close(found: torch.Tensor, exact: torch.Tensor) -> None:
    allowed = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-12}[found.dtype]
    assert (found.double() - exact).norm() <= allowed * exact.norm()


@pytest.mark.parametrize(
    "shape", [(512, 2816, 1024), (64, 48, 32), (37, 24, 40), (1, 8, 16), (33, 7, 5), (130, 129, 8)]
)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_a_product_with_an_addend(
    shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    m, n, k = shape
    x, weight = values(m, k, seed=1, dtype=dtype), values(n, k, seed=2, dtype=dtype)
    addend, bias = values(m, n, seed=3, dtype=dtype), values(n, seed=4, dtype=dtype)
    exact = x.double() @ weight.double().t() + addend.double() + has_bias * bias.double()
    kept = addend.clone()
    y = gemm.linear_add(x, weight, addend, bias=bias if has_bias else None)
    assert_close(y, exact)
    assert torch.equal(addend, kept)
    scaled = gemm.linear_add(x, weight, addend, scale=-0.5)
    assert_close(scaled, addend.double() - 0.5 * (x.double() @ weight.double().t()))
    dy, added = values(m, n, seed=5, dtype=dtype), values(m, k, seed=6, dtype=dtype)
    exact = 2.0 * (dy.double() @ weight.double()) + added.double()
    assert_close(gemm.dgrad(dy, weight, 2.0, added), exact)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_an_addend_in_fp32_gets_the_product_before_it_is_rounded(dtype: torch.dtype) -> None:
    x, weight = values(130, 32, seed=1, dtype=dtype), values(64, 32, seed=2, dtype=dtype)
    bias, addend = values(64, seed=3, dtype=dtype), values(130, 64, seed=4, dtype=FP32)
    exact = x.double() @ weight.double().t() + addend.double()
    out = torch.empty_like(addend)
    assert cublaslt.serves(cublaslt.Operands(out, x, weight.t(), addend))
    assert not cublaslt.serves(cublaslt.Operands(out, x, weight.t(), addend, bias))
    assert_close(gemm.linear_add(x, weight, addend), exact)
    added = gemm.linear_add(x, weight, addend, bias=bias)
    assert (added.double() - exact - bias.double()).norm() <= 2**-8 * exact.norm()


def test_operands_that_overlap_are_left_to_torch() -> None:
    x, weight = values(1, 32, seed=1).expand(64, 32), values(48, 32, seed=2)
    addend = values(1, 48, seed=3).expand(64, 48)
    exact = x.double() @ weight.double().t() + addend.double()
    assert_close(gemm.linear_add(x, weight, addend), exact)
    assert_close(gemm.linear_add(x.contiguous(), weight, addend), exact)
    assert_close(gemm.linear_add(x, weight, addend.contiguous()), exact)


def spread(scale: torch.Tensor, mode: Scales, rows: int, inner: int) -> torch.Tensor:
    wide = scale.double()
    if mode is Scales.TENSOR:
        return wide.expand(rows, inner)
    if mode is Scales.ROWS:
        return wide[:, None].expand(rows, inner)
    if mode is Scales.BLOCKS_1X128:
        return wide.t().repeat_interleave(128, 1)[:, :inner]
    return wide.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :inner]


def scales(mode: Scales, rows: int, inner: int, seed: int) -> torch.Tensor:
    blocks = -(-inner // 128)
    shape: tuple[int, ...] = {
        Scales.TENSOR: (),
        Scales.ROWS: (rows,),
        Scales.BLOCKS_1X128: (blocks, rows),
        Scales.BLOCKS_128X128: (-(-rows // 128), -(-blocks // 4) * 4),
    }[mode]
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) + 0.5).cuda()


PAIRS = (
    *[(mode, mode) for mode in (Scales.TENSOR, Scales.ROWS, Scales.BLOCKS_1X128)],
    (Scales.BLOCKS_1X128, Scales.BLOCKS_128X128),
    (Scales.BLOCKS_128X128, Scales.BLOCKS_1X128),
)


@pytest.mark.parametrize("shape", [(512, 1024, 2816), (64, 48, 384), (48, 272, 400), (16, 16, 16)])
@pytest.mark.parametrize("modes", PAIRS, ids=lambda modes: f"{modes[0].name}-{modes[1].name}")
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
def test_quantized_products(
    shape: tuple[int, int, int], modes: tuple[Scales, Scales], out_dtype: torch.dtype
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("scales of rows and blocks are for Hopper")
    m, n, k = shape
    for pair in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        if E5M2 in pair and modes[0] is Scales.ROWS:
            continue
        a, b = values(m, k, seed=1).to(pair[0]), values(n, k, seed=2).to(pair[1])
        scale_a, scale_b = scales(modes[0], m, k, 3), scales(modes[1], n, k, 4)
        left = a.double() * spread(scale_a, modes[0], m, k)
        product = left @ (b.double() * spread(scale_b, modes[1], n, k)).t()
        given: dict[str, Any] = {"scales": (scale_a, scale_b), "modes": modes, "alpha": -0.5}
        added = values(m, n, seed=5, dtype=out_dtype)
        bias = values(n, seed=6) if out_dtype is BF16 else None
        for addend in (None, added):
            out = torch.empty_like(added)
            operands = cublaslt.Operands(out, a, b.t(), addend, bias)
            assert cublaslt.serves(operands, modes=modes)
            cublaslt.multiply(operands, **given)
            exact = -0.5 * product
            exact = exact if addend is None else exact + addend.double()
            assert_close(out, exact if bias is None else exact + bias.double())
        cublaslt.multiply(cublaslt.Operands(added, a, b.t(), added), **given)  # onto its addend
        assert_close(added, values(m, n, seed=5, dtype=out_dtype).double() - 0.5 * product)


@pytest.mark.parametrize("rows", [144, 33])
@pytest.mark.parametrize("recipe", [None, *NATIVE.values()], ids=["none", *NATIVE])
def test_a_block_with_addends_equals_one_without_the_library(
    recipe: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recipe is not None and not runs_natively(recipe, torch.cuda.get_device_capability()):
        pytest.skip("emulated here")
    model = with_main_grads(block(256, 384).cuda())
    found = [step(model, recipe, rows) for _ in range(4)]
    monkeypatch.setattr(cublaslt, "library", lambda device_type: None)
    other = with_main_grads(block(256, 384).cuda())
    expected = [step(other, recipe, rows) for _ in range(4)]
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs, 0.05 if recipe is not None else 2**-7)


def test_threads_multiply_at_the_same_time() -> None:
    """Each has its own descriptors, whose scale it changes for each product."""
    a, b = values(512, 512, seed=1).to(E4M3), values(512, 512, seed=2).to(E4M3)
    product = a.double() @ b.double().t()
    factors = [torch.full((), float(i), device="cuda") for i in range(1, 9)]
    failures: list[Any] = []

    def work(factor: torch.Tensor, one: torch.Tensor) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    for scale in (factor, one):
                        out = torch.empty(512, 512, device="cuda")
                        modes = (Scales.TENSOR, Scales.TENSOR)
                        given: dict[str, Any] = {"scales": (scale, one), "modes": modes}
                        cublaslt.multiply(cublaslt.Operands(out, a, b.t()), **given)
                        assert_close(out, scale.double() * product)
        except BaseException as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(f, factors[0])) for f in factors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_product_is_captured_in_a_graph() -> None:
    x, weight, addend = values(64, 32, seed=1), values(48, 32, seed=2), values(64, 48, seed=3)
    gemm.linear_add(x, weight, addend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemm.linear_add(x, weight, addend)
    x.copy_(values(64, 32, seed=7))
    graph.replay()
    assert torch.equal(y, gemm.linear_add(x, weight, addend))


def test_a_product_runs_on_the_device_of_its_operands() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, weight, addend = (
        values(*shape, seed=1).to("cuda:1") for shape in ((64, 32), (48, 32), (64, 48))
    )
    y = gemm.linear_add(x, weight, addend)
    assert y.device == x.device
    assert torch.cuda.current_device() == 0
    assert_close(y, x.double() @ weight.double().t() + addend.double())


ENDS = """
import gc
import torch, fuser
from fuser.cuda import cublaslt

linear = fuser.BasicLinear(64, 64, device="cuda", dtype=torch.bfloat16)
model = fuser.Sequential(linear, fuser.AddExtraInput())
x, residual = (torch.randn(32, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
for _ in range(4):
    model(x, residual)
assert any(isinstance(held, cublaslt._Matmul) for held in gc.get_objects())
"""


def test_a_process_with_products_ends_without_a_word() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
