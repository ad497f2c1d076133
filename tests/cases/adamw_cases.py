"""Steps of AdamW by kernels, against the same formula in plain torch, on a CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import every_format as formats
import pytest
import torch

from fuser.formats import ceil_div
from fuser.functional.adamw import Step, adamw
from fuser.functional.lazy import LazyTensor
from fuser.reference import adamw as reference
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fuser.tensors.stacks import Float8StackQuantizer, NVFP4StackQuantizer
from fuser.tensors.writes import write_updated

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
QUANTIZERS: dict[str, Any] = {
    **formats.QUANTIZERS,
    "delayed": Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1)),
    "delayed parameter": Float8Quantizer(torch.full((1,), 1024.0), torch.zeros(1), saturates=False),
    "squares": Float8BlockQuantizer(block_scaling_dim=2),
    "mxfp8 squares": MXFP8Quantizer(with_2d_quantization=True),
    "nvfp4 squares": NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 hadamard": NVFP4Quantizer(with_rht=True),
    "stack": Float8StackQuantizer(stacked_rows=128),
    "nvfp4 stack": NVFP4StackQuantizer(stacked_rows=128),
    "rowwise alone": MXFP8Quantizer(columnwise=False),
}
EVERY_QUANTIZER = pytest.mark.parametrize("name", QUANTIZERS)
EVERY_DTYPE = pytest.mark.parametrize(
    ("dtype", "of_gradient"),
    [(BF16, BF16), (BF16, F32), (F16, F16), (F16, F32), (F32, F32)],
    ids=str,
)


def step_of(
    shape: tuple[int, ...], of_gradient: torch.dtype, device: str, offset: int = 0, seed: int = 0
) -> Step:
    """A step in the middle of training; ``offset`` elements before each tensor in its memory."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(dtype: torch.dtype = F32) -> torch.Tensor:
        n = torch.Size(shape).numel()
        values = torch.randn(n + offset, generator=generator).to(dtype)
        return values.to(device)[offset:].view(shape)

    count, lr = torch.tensor([7.0, 1e-2], dtype=torch.float64)
    options: Any = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    constants = reference.constants_of(count, lr, **options, is_decoupled=seed % 2 == 0)
    gradient = drawn(of_gradient)
    return Step(drawn(), gradient, drawn(), drawn().abs(), constants.to(device))


def copied(step: Step) -> Step:
    return Step(*(tensor.clone() for tensor in step))


def expected_of(step: Step, dtype: torch.dtype) -> tuple[Step, torch.Tensor]:
    """The tensors after the step, on the CPU, and the weights in ``dtype``."""
    after = Step(*(tensor.cpu().clone() for tensor in step))
    reference.adamw(*after)
    return after, after.master.to(dtype)


def assert_taken(step: Step, expected: Step) -> None:
    for name, found in step._asdict().items():
        assert torch.equal(found.cpu(), getattr(expected, name)), name


def check_values(
    running: Callable[[], AbstractContextManager[Any]],
    device: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    of_gradient: torch.dtype,
    offset: int = 0,
) -> None:
    """Weights that are not quantized have the bits of the reference, and so has the state."""
    step = step_of(shape, of_gradient, device, offset)
    after, values = expected_of(step, dtype)
    out = torch.empty(shape, dtype=dtype, device=device)
    with running():
        found = adamw(step, dtype, values=out)
        found = found.tensor() if isinstance(found, LazyTensor) else found
    assert_taken(step, after)
    assert torch.equal(out.cpu(), values)
    assert torch.equal(found.cpu(), values)


def check_write(
    running: Callable[[], AbstractContextManager[Any]],
    device: str,
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    of_gradient: torch.dtype,
    offset: int = 0,
) -> None:
    """A quantized tensor gets the bytes of the new weights in ``dtype``, in its own buffers."""
    quantizer: Quantizer = QUANTIZERS[name]
    if "stack" in name:
        shape = (ceil_div(shape[0], 128) * 128, ceil_div(shape[1], 16) * 16)
    ours, theirs = of_device(quantizer, device), of_device(quantizer, "cpu")
    start = step_of(shape, of_gradient, device, offset)
    target = ours(start.master.to(dtype))
    theirs(start.master.cpu().to(dtype))
    target._quantizer = ours  # as that of a weight, which records amaxes
    addresses = [b.data_ptr() for b in target.buffers().values() if b is not None]
    for seed in range(3):
        step = step_of(shape, of_gradient, device, offset, seed)
        after, values = expected_of(step, dtype)
        version = target._version
        with running():
            updated = adamw(step, dtype)
            write_updated(target, updated)
        assert_taken(step, after)
        expected = theirs(values)
        for buffer, found in target.buffers().items():
            wanted = getattr(expected, buffer)
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found.cpu(), wanted), (seed, buffer)
        assert target._version > version
        assert addresses == [b.data_ptr() for b in target.buffers().values() if b is not None]
        if isinstance(ours, Float8Quantizer):
            assert isinstance(theirs, Float8Quantizer)
            assert ours.amax is not None
            assert theirs.amax is not None
            assert torch.equal(ours.amax.cpu(), theirs.amax)


def of_device(quantizer: Quantizer, device: str) -> Quantizer:
    """The quantizer, with a state of its own on the device."""
    if not isinstance(quantizer, Float8Quantizer):
        return quantizer
    assert quantizer.amax is not None
    scale, amax = (one.clone().to(device) for one in (quantizer.scale, quantizer.amax))
    return replace(quantizer, scale=scale, amax=amax)
