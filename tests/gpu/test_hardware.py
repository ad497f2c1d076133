"""The instructions of ``fuser/core/hardware.cuh`` give the bits of their plain fallbacks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulator.conversions import check, hard_inputs, launch_for, outputs_for
from paths import EMULATOR_KERNELS

from fuser.cuda import module
from fuser.cuda.arguments import int64
from fuser.cuda.launch import Kernel, Launch

SOURCE = EMULATOR_KERNELS / "conversions.cu"


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of the tests among fuser's own."""
    copy = tmp_path / "kernels"
    shutil.copytree(module.KERNELS, copy)
    shutil.copy(SOURCE, copy)
    monkeypatch.setattr(module, "KERNELS", copy)
    caches = (module.function, module.kernel, module._compiled)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("kernel", ["fuser_convert", "fuser_convert_by_integers"])
def test_conversions_to_8_and_4_bits_are_right_for_every_input(kernel: str) -> None:
    x = hard_inputs().cuda()
    outputs = outputs_for(x)
    Kernel("conversions", kernel)(launch_for(x), x, *outputs, int64(x.numel() // 2))
    check(x, *outputs)


@pytest.mark.parametrize(("element", "size"), [("uint4", 16), ("uint2", 8), ("unsigned", 4)])
def test_streaming_loads_and_stores_copy(element: str, size: int) -> None:
    x = torch.randint(0, 256, (size * 1000,), dtype=torch.uint8, device="cuda")
    y = torch.zeros_like(x)
    Kernel("conversions", f"fuser_copy<{element}>")(Launch((16,), (64,)), x, y, int64(1000))
    assert torch.equal(x, y)
