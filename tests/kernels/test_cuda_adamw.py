"""The kernels of a step of AdamW, in the emulator."""

from __future__ import annotations

import contextlib
from typing import Any

import adamw_cases as cases
import pytest
import torch
from adamw_cases import BF16, F16, F32
from address_graphs import on_cpu_graphs
from emulator import emulated, prepare
from kernel_instantiations import steps_into_stores
from said import said

from fuser.cuda import adamw as launchers
from fuser.cuda.launch import Kernel
from fuser.errors import InputError
from fuser.functional.adamw import adamw
from fuser.functional.lazy import materialize
from fuser.te.pytorch import optimizers
from fuser.te.pytorch.optimizers import FusedAdam
from fuser.tensors import Float8CurrentScalingQuantizer, MXFP8Quantizer
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


@pytest.mark.parametrize("master_weights", [False, True])
def test_steps_of_all_parameters_are_repeated_with_the_bits_of_the_reference(
    master_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.check_steps(emulated, "cpu", monkeypatch, master_weights=master_weights)


def test_steps_of_many_groups_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = [torch.nn.Parameter(torch.zeros(8, 8, dtype=BF16)) for _ in range(6)]
    groups = [{"params": [one], "lr": 0.1 * n} for n, one in enumerate(trained, 1)]
    optimizer, counts = FusedAdam(groups), [0]
    step_once = optimizers._step_once

    def noted(*given: Any) -> None:
        counts[-1] += 1
        step_once(*given)

    monkeypatch.setattr(optimizers, "_step_once", noted)
    with emulated():
        for _ in range(4):
            for parameter in trained:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            counts.append(0)
    assert counts == [6, 6, 0, 0, 0]
    for n, parameter in enumerate(trained, 1):
        torch.testing.assert_close(parameter, torch.full_like(parameter, -0.4 * n))


def test_a_step_whose_addresses_come_back_is_replayed_as_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU: the weights are those of steps without graphs."""
    held, constants = torch.zeros(9), FusedAdam._constants
    monkeypatch.setattr(FusedAdam, "_constants", lambda *given: held.copy_(constants(*given)))
    found = []
    for graphs in (contextlib.nullcontext, on_cpu_graphs):
        trained = [torch.nn.Parameter(torch.zeros(8, 8, dtype=BF16)) for _ in range(4)]
        optimizer = FusedAdam(trained, lr=0.1, master_weights=True)
        for number, parameter in enumerate(trained):
            parameter.grad = torch.full_like(parameter, number - 1.5)
        with emulated(), graphs():
            for _ in range(8):
                optimizer.step()
            (sequence,) = optimizer._repeated[0].values()
        found.append([parameter.detach() for parameter in trained])
    assert all(map(torch.equal, *found))
    assert sequence is not None
    assert sequence.graphs, sequence.no_graphs
    assert sequence.graphs[0].hits


def test_a_parameter_that_is_rows_of_another_tensor_is_noticed_there_in_each_step() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(128, 64, generator=generator).to(BF16)
    gradients = [torch.randn(64, 64, generator=generator).to(BF16) for _ in range(5)]
    found = []
    for running in (contextlib.nullcontext, emulated):
        root = MXFP8Quantizer()(values)
        optimizer = FusedAdam([torch.nn.Parameter(root[64:])], lr=0.1)
        (part,) = optimizer.param_groups[0]["params"]
        steps = []
        with running():
            for gradient in gradients:
                part.grad, version = gradient, root._version
                optimizer.step()
                assert root._version > version
                steps.append(root.dequantize())
        found.append(steps)
    assert all(map(torch.equal, *found))


def test_parameters_with_one_gradient_have_their_own_in_later_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(9, 16, 32, generator=generator).to(BF16)
    found = []
    for running in (contextlib.nullcontext, emulated):
        one, other = (torch.nn.Parameter(values.clone()) for _ in range(2))
        optimizer = FusedAdam([one, other], lr=0.1)
        with running():
            for number, gradient in enumerate(gradients):
                one.grad = gradient
                other.grad = gradient if number < 4 else -gradient
                optimizer.step()
        found.append((one, other))
    assert all(map(torch.equal, *found))


class _Counting(Float8CurrentScalingQuantizer):
    """A user's quantizer, whose result depends on more than its values."""

    calls = 0

    def buffers_of(self, rows: Any) -> dict[str, torch.Tensor | None]:
        type(self).calls += 1
        return super().buffers_of(materialize(rows) * self.calls)


def test_a_users_quantizer_is_called_in_each_step() -> None:
    """Of one that does not say that it ``is_repeatable`` nothing is recorded."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(6, 64, 64, generator=generator).to(BF16)
    found = []
    for running in (contextlib.nullcontext, emulated):
        _Counting.calls = 0
        parameter = torch.nn.Parameter(_Counting()(values))
        optimizer = FusedAdam([parameter], lr=0.1, master_weights=True)
        steps = []
        with running():
            for gradient in gradients:
                parameter.grad = gradient
                optimizer.step()
                steps.append(parameter.dequantize())
        assert _Counting.calls == 6
        found.append(steps)
    assert all(map(torch.equal, *found))
