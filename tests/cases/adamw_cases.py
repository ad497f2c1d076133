"""Steps of AdamW by kernels, against the same formula in plain torch, on a CPU or on a GPU."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import every_format as formats
import pytest
import torch

from fuser.formats import ceil_div
from fuser.functional.adamw import AdamWStep, adamw
from fuser.functional.lazy import LazyTensor
from fuser.reference import adamw as reference
from fuser.te.pytorch import optimizers
from fuser.te.pytorch.optimizers import FusedAdam
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
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
) -> AdamWStep:
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
    return AdamWStep(drawn(), gradient, drawn(), drawn().abs(), constants.to(device))


def copied(step: AdamWStep) -> AdamWStep:
    return AdamWStep(*(tensor.clone() for tensor in step))


def expected_of(step: AdamWStep, dtype: torch.dtype) -> tuple[AdamWStep, torch.Tensor]:
    """The tensors after the step, on the CPU, and the weights in ``dtype``."""
    after = AdamWStep(*(tensor.cpu().clone() for tensor in step))
    reference.adamw(*after)
    return after, after.master.to(dtype)


def assert_taken(step: AdamWStep, expected: AdamWStep) -> None:
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


# -- steps of all parameters together -----------------------------------------------


def parameters(device: str) -> list[torch.nn.Parameter]:
    """In 16 bits, also strided, and in formats with and without an amax of the whole tensor."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, BF16)

    scales = torch.full((1,), 64.0, device=device), torch.zeros(1, device=device)
    plain = [values(32, 64), values(7), values(64, 32).t()]
    quantizers = (
        Float8CurrentScalingQuantizer(),
        MXFP8Quantizer(),
        NVFP4Quantizer(),
        Float8Quantizer(*scales, saturates=False),
    )
    quantized = [quantizer(values(64, 96)) for quantizer in quantizers]
    for quantizer, tensor in zip(quantizers, quantized, strict=True):
        tensor._quantizer = quantizer  # as that of a weight, which records amaxes
    return [torch.nn.Parameter(tensor, requires_grad=True) for tensor in (*plain, *quantized)]


def bytes_of(parameter: torch.Tensor) -> list[torch.Tensor | None]:
    if isinstance(parameter, QuantizedTensor):
        return list(parameter.buffers().values())
    return [parameter.detach()]


# What each step changes: the rate, which parameters have gradients, gradients' strides and dtype.
STEPS: list[dict[str, Any]] = [
    *({}, {}, {}, {"lr": 0.1}, {"lr": 0.01}),
    *({"without": 0}, {"without": 0}, {"without": 0}, {}),
    *({"is_strided": True}, {"is_strided": True}, {}),
    *({"in_fp32": 3}, {"in_fp32": 3}, {"in_fp32": 3}),
]


def run_steps(optimizer: FusedAdam, before: Callable[[int], None]) -> list[list[Any]]:
    """The bytes and states of all parameters after each step."""
    trained = optimizer.param_groups[0]["params"]
    found: list[list[Any]] = []
    for number, change in enumerate(STEPS):
        for place, parameter in enumerate(trained):
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            gradient = gradient.to(parameter.device)
            if change.get("is_strided") and gradient.dim() == 2:
                gradient = gradient.t().contiguous().t()
            is_left_out = place == change.get("without")
            dtype = F32 if place == change.get("in_fp32") else parameter.dtype
            parameter.decoupled_grad = None if is_left_out else gradient.to(dtype)
        optimizer.param_groups[0]["lr"] = change.get("lr", 0.05)
        versions = [parameter._version for parameter in trained]
        before(number)
        optimizer.step()
        for place, (parameter, version) in enumerate(zip(trained, versions, strict=True)):
            assert (parameter._version > version) == (place != change.get("without"))
        tensors = [*map(bytes_of, trained), *(optimizer.state[p].values() for p in trained)]
        found.append([t if t is None else t.clone() for t in itertools.chain(*tensors)])
    return found


def check_steps(
    running: Callable[[], AbstractContextManager[Any]],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    master_weights: bool,
) -> None:
    """Steps of all parameters are repeated, with the bits of the reference on a CPU."""
    options: Any = {"weight_decay": 0.1, "master_weights": master_weights}
    options["use_decoupled_grad"] = True
    ours, theirs = (FusedAdam(parameters(where), **options) for where in (device, "cpu"))
    one_by_one: set[int] = set()
    now: list[int] = []
    step_once = optimizers._step_once

    def noted(*given: Any) -> None:
        one_by_one.update(now[-1:])
        step_once(*given)

    monkeypatch.setattr(optimizers, "_step_once", noted)
    expected = run_steps(theirs, lambda _: None)
    with running():
        found = run_steps(ours, now.append)
    for number, (some, others) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(some, others, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one.cpu(), other), number
    repeated = set(range(len(STEPS))) - one_by_one
    assert repeated == {2, 3, 4, 7, 8, 9, 10, 11, 14}
    assert pickle.loads(pickle.dumps(ours))._repeated == {}
