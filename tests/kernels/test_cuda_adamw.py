"""The kernels of a step of AdamW, in the emulator."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import adamw_cases as cases
import pytest
import torch
from adamw_cases import BF16, F16, F32
from emulator import emulated, prepare
from kernel_instantiations import steps_into_stores
from said import said

from fuser.cuda import adamw as launchers
from fuser.cuda.launch import Kernel
from fuser.errors import InputError
from fuser.functional.adamw import adamw
from fuser.te.pytorch import optimizers
from fuser.te.pytorch.optimizers import FusedAdam
from fuser.tensors import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
)
from fuser.tensors.writes import write_updated

prepare(*launchers.instantiations(), *steps_into_stores())


@cases.EVERY_DTYPE
@pytest.mark.parametrize(
    ("shape", "offset"), [((20, 24), 0), ((3, 5, 8), 1), ((7,), 0), ((), 0), ((2, 0), 0)], ids=str
)
def test_weights_and_state_have_the_bits_of_the_reference(
    dtype: torch.dtype, of_gradient: torch.dtype, shape: tuple[int, ...], offset: int
) -> None:
    cases.check_values(emulated, "cpu", shape, dtype, of_gradient, offset)


@cases.EVERY_QUANTIZER
def test_a_tensor_is_quantized_by_the_step(name: str) -> None:
    cases.check_write(emulated, "cpu", name, (160, 288), BF16, BF16)


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8", "nvfp4", "block"])
@pytest.mark.parametrize(
    ("shape", "offset", "dtype", "of_gradient"),
    [
        ((160, 288), 0, F32, F32),
        ((32, 64), 0, F16, F32),
        ((160, 288), 1, BF16, F32),  # no vectors: the step first, then the quantizer
        ((20, 44), 0, BF16, BF16),
    ],
    ids=str,
)
def test_other_dtypes_shapes_and_alignments(
    name: str,
    shape: tuple[int, int],
    offset: int,
    dtype: torch.dtype,
    of_gradient: torch.dtype,
) -> None:
    cases.check_write(emulated, "cpu", name, shape, dtype, of_gradient, offset)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("delayed", ["Fp8Store"]),
        ("mxfp8", ["Mxfp8Store"]),
        ("mxfp8 squares", ["Mxfp8SquareStore"]),
        ("squares", ["Block2dStore"]),
        ("current", ["fuser_adamw", "RoundedProducer"]),
        ("nvfp4", ["fuser_adamw", "RoundedProducer"]),
    ],
)
def test_one_kernel_takes_the_step_and_quantizes(
    name: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two where the scale follows from the amax of all new weights."""
    launched: list[str] = []
    call = Kernel.__call__

    def noted(kernel: Kernel, *args: Any) -> None:
        launched.append(kernel.symbol)
        call(kernel, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    step = cases.step_of((256, 128), BF16, "cpu")
    quantizer = cases.of_device(cases.QUANTIZERS[name], "cpu")
    target = quantizer(step.master.to(BF16))
    with emulated():
        write_updated(target, adamw(step, BF16))
    assert len(launched) == len(kernels)
    assert all(part in symbol for part, symbol in zip(kernels, launched, strict=True))
    assert sum("AdamW" in symbol or "fuser_adamw" in symbol for symbol in launched) == 1


def test_a_read_only_tensor_is_refused_before_the_step() -> None:
    step = cases.step_of((128, 128), BF16, "cpu")
    before = cases.copied(step)
    target = cases.QUANTIZERS["mxfp8"](step.master.to(BF16)).with_usage("rowwise")
    with emulated(), pytest.raises(RuntimeError, match=said("base-read-only-layout")):
        write_updated(target, adamw(step, BF16))
    cases.assert_taken(step, before)  # as it was


def test_launchers_refuse_tensors_of_other_shapes() -> None:
    step = cases.step_of((8, 16), BF16, "cpu")
    wrong = step._replace(exp_avg=step.exp_avg[:4])
    with (
        emulated(),
        pytest.raises(InputError, match=said("checks-needs-contiguous-strides", None, "exp_avg")),
    ):
        launchers.adamw(wrong, BF16)
    with (
        emulated(),
        pytest.raises(InputError, match=said("checks-needs-contiguous-strides", None, "constants")),
    ):
        launchers.producer(step._replace(constants=step.constants[:3]), BF16)


# -- steps of all parameters together -----------------------------------------------


def parameters() -> list[torch.nn.Parameter]:
    """In 16 bits, also strided, and in formats with and without an amax of the whole tensor."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(BF16)

    scales = torch.full((1,), 64.0), torch.zeros(1)
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


@pytest.mark.parametrize("master_weights", [False, True])
def test_steps_of_all_parameters_are_repeated_with_the_bits_of_the_reference(
    master_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"weight_decay": 0.1, "master_weights": master_weights}
    options["use_decoupled_grad"] = True
    ours, theirs = (FusedAdam(parameters(), **options) for _ in range(2))
    one_by_one: set[int] = set()
    now: list[int] = []
    step_once = optimizers._step_once

    def noted(*given: Any) -> None:
        one_by_one.update(now[-1:])
        step_once(*given)

    monkeypatch.setattr(optimizers, "_step_once", noted)
    expected = run_steps(theirs, lambda _: None)
    with emulated():
        found = run_steps(ours, now.append)
    for number, (some, others) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(some, others, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other), number
    repeated = set(range(len(STEPS))) - one_by_one
    assert repeated == {2, 3, 4, 7, 8, 9, 10, 11, 14}, [
        s and s.refusal for s in ours._repeated.values()
    ]
    assert pickle.loads(pickle.dumps(ours))._repeated == {}
