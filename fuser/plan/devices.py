"""Devices that plans are made for: rates of products, of memory and of links, each with its source.

The rates of an H200 are measured. Other GPUs are taken to reach the shares of their nominal rates
that an H200 reaches of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fuser.errors import InputError


@dataclass(frozen=True)
class Rate:
    """FLOP/s of products: in ``step``, the three of forward and backward; and in forward alone."""

    step: float
    forward: float

    @property
    def backward(self) -> float:
        """In backward, which has two thirds of the operations of a step."""
        return 2 / (3 / self.step - 1 / self.forward)

    def on(self, side: str) -> float:
        """On ``"forward"`` or ``"backward"``."""
        return self.forward if side == "forward" else self.backward

    def __mul__(self, share: float) -> Rate:
        return Rate(self.step * share, self.forward * share)


def _constant(rate: float) -> Rate:
    return Rate(rate, rate)


@dataclass(frozen=True)
class Device:
    """A device as plans model it.

    ``dense`` and ``grouped`` are the rates of products by recipe, and ``"bf16"`` and ``"fp32"``
    those of unquantized ones (fp32 without TF32); a recipe without an entry runs in bf16 on
    dequantized operands. ``peak`` is the nominal bf16 rate without sparsity. ``bandwidth`` is bytes
    a second that a copy reads and writes, ``launch`` the seconds of a launch on the host, ``link``
    bytes a second to another rank, ``memory`` bytes. ``attention`` is the rate of a step of
    attention. ``arch`` is the compute capability, None for a CPU. ``is_measured``: rates,
    bandwidth and link were measured.
    """

    name: str
    arch: tuple[int, int] | None
    dense: Mapping[str, Rate]
    grouped: Mapping[str, Rate]
    peak: float
    bandwidth: float
    launch: float
    link: float
    memory: float
    attention: float
    source: str
    is_measured: bool = False

    def products(self, precision: str, *, is_grouped: bool) -> Rate:
        """The rate of products in ``precision``, the name of a recipe's class or of a dtype."""
        rates = self.grouped if is_grouped else self.dense
        return rates.get(precision, rates["bf16"])

    def describe(self) -> str:
        """The name, and whether its rates were measured."""
        return f"{self.name} ({'measured' if self.is_measured else 'nominal'} rates)"


def precision_of(dtype: torch.dtype) -> str:
    """The name of the rate of products of unquantized operands of ``dtype``."""
    return "fp32" if dtype is torch.float32 else "bf16"


# Products of forward and backward on an H200, and of forward alone.
# Dense: the six products of RMSNorm-Linear-SwiGLU-Linear-add at T 8192, H 4096, F 14336
# (benchmarks/results/pipelines_h200_gemms_alone.csv, "GEMMs alone"). Rowwise: docs/dev/facts.md,
# "FP8 GEMMs of torch". fp32: the share of the nominal 67 TFLOP/s that bf16 reaches of 989.
_DENSE = {
    "fp32": _constant(67e12 * 672.8 / 989),
    "bf16": Rate(672.8e12, 698.3e12),
    "DelayedScaling": Rate(1311.3e12, 1347.2e12),
    "Float8CurrentScaling": Rate(1311.1e12, 1345.5e12),
    "Float8RowwiseScaling": _constant(1290e12),
    "Float8BlockScaling": Rate(992.7e12, 1161.3e12),
}
# Experts: 8 experts at T 32768, H 4096, F 14336. bf16: benchmarks/results/grouped_h200.csv,
# "products alone" as a graph. FP8: 26.6 ms of products in a step (benchmarks/README.md). Blocks of
# 128: forward and dgrad, and wgrad (docs/dev/facts.md, "Grouped FP8 products").
_GROUPED = {
    "fp32": _DENSE["fp32"],
    "bf16": _constant(661.3e12),
    "DelayedScaling": _constant(1302e12),
    "Float8CurrentScaling": _constant(1302e12),
    "Float8BlockScaling": Rate(939e12, 1060.5e12),
}
H200 = Device(
    "H200",
    (9, 0),
    _DENSE,
    _GROUPED,
    peak=989e12,
    # Copies move 4.2 TB/s, a launch costs about 5 us of host time (docs/dev/facts.md).
    bandwidth=4.2e12,
    launch=5e-6,
    # NVLink in one direction, nominal 450 GB/s, and a step of attention: docs/dev/facts.md,
    # "Several GPUs" and "Eight layers".
    link=3e11,
    memory=141e9,
    attention=374e12,
    source="benchmarks/results; NVIDIA's data sheet of the H200 SXM",
    is_measured=True,
)
_BANDWIDTH, _LINK, _FP8_PEAK = 4.8e12, 450e9, 1979e12  # nominal, of an H200


def _nominal(
    name: str,
    arch: tuple[int, int],
    peaks: Mapping[str, float],
    bandwidth: float,
    memory: float,
    link: float,
    source: str,
) -> Device:
    """A GPU that reaches the shares of its nominal rates that an H200 reaches of its own.

    ``peaks`` are nominal FLOP/s without sparsity, by precision; ``bandwidth`` and ``link`` are
    nominal too.
    """
    of_h200 = {"bf16": H200.peak, "fp32": 67e12}
    rates = {
        name: _DENSE[name] * (peak / of_h200.get(name, _FP8_PEAK)) for name, peak in peaks.items()
    }
    return replace(
        H200,
        name=name,
        arch=arch,
        dense=rates,
        grouped=rates,
        peak=peaks["bf16"],
        bandwidth=bandwidth * H200.bandwidth / _BANDWIDTH,
        link=link * H200.link / _LINK,
        memory=memory,
        attention=H200.attention * peaks["bf16"] / H200.peak,
        source=source,
        is_measured=False,
    )


# Nominal rates without sparsity, with fp32 sums; NVLink in one direction.
DEVICES = {
    "h200": H200,
    # The chip of an H200 with other memory.
    "h100": replace(
        H200,
        name="H100",
        bandwidth=3.35e12 * H200.bandwidth / _BANDWIDTH,
        memory=80e9,
        source="NVIDIA's data sheet of the H100 SXM",
        is_measured=False,
    ),
    "a100": _nominal(
        "A100",
        (8, 0),
        {"bf16": 312e12, "fp32": 19.5e12},
        bandwidth=2.039e12,
        memory=80e9,
        link=300e9,
        source="NVIDIA's data sheet of the A100 80GB SXM",
    ),
    "b200": _nominal(
        "B200",
        (10, 0),
        {
            "bf16": 2250e12,
            "fp32": 75e12,
            "DelayedScaling": 4500e12,
            "Float8CurrentScaling": 4500e12,
        },
        bandwidth=8e12,
        memory=180e9,
        link=900e9,
        source="NVIDIA's data sheet of the HGX B200, an eighth of it",
    ),
    "rtx5090": _nominal(
        "RTX 5090",
        (12, 0),
        {
            "bf16": 209.5e12,
            "fp32": 104.8e12,
            "DelayedScaling": 419e12,
            "Float8CurrentScaling": 419e12,
        },
        bandwidth=1.792e12,
        memory=32e9,
        link=64e9,
        source="NVIDIA's paper on the RTX Blackwell architecture, appendix A; PCIe 5.0 x16 as link",
    ),
}

# Nominal figures of two cores: memory, a call of torch, gloo between two processes of a host.
CPU = Device(
    "CPU",
    None,
    {"bf16": _constant(1e11)},
    {"bf16": _constant(1e11)},
    peak=1e11,
    bandwidth=2e10,
    launch=2e-6,
    link=1e9,
    memory=0,
    attention=1e11,
    source="estimated for two cores",
)


def device_named(name: str) -> Device:
    """The device of a short name, such as ``"h200"``.

    Raises InputError if there is none of this name.
    """
    if not isinstance(name, str) or name.lower() not in DEVICES:
        raise InputError(
            f"There is no device {name!r} to plan for; there are {', '.join(DEVICES)}."
        )
    return DEVICES[name.lower()]


def device_of(kind: str) -> Device:
    """What a plan of this machine is modelled on: ``kind`` is ``"cuda"``, ``"cpu"`` or another."""
    return CPU if kind == "cpu" else H200
