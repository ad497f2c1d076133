"""A GPU, its links and its host: measured rates, and the time of collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fuser.errors import InputError
from fuser.plan.devices import DEVICES, Device, Rate

# Products of forward and backward, FLOP/s, by recipe. A recipe without an entry runs in bf16 on
# dequantized operands if the GPU emulates it, and is refused otherwise.
PRECISIONS = ("bf16", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling")


def _steps(rates: Mapping[str, Rate]) -> dict[str, float]:
    return {name: rate.step for name, rate in rates.items() if name in PRECISIONS}


DENSE, GROUPED = _steps(DEVICES["h200"].dense), _steps(DEVICES["h200"].grouped)
# Steps that communicate nothing and that the GPU limits take 0.92 to 1.15 of the modelled time on
# the host of benchmarks/results/ranks_h200.csv: power, copies, passes over amaxes.
UNMODELLED = 1.03
# A collective beside a layer's compute takes multiprocessors and power from it: the step is longer
# by this share of the collective (docs/scale.md, "Overlap").
BESIDE = 0.65

# A collective begins when the last rank is there. With this start and the rate of NVLink, seven
# measured times of exchanges alone are within 14% (docs/scale.md, "Four GPUs").
START = 40e-6
# NCCL's own model of its latency: src/graph/tuning.cc, baseLat and hwLat, protocol Simple. A
# collective costs BASE; a ring costs a hop for each of its steps, a tree for each of its levels.
BASE = 8.4e-6 + START
RING_HOP = {"NVLink": 3.4e-6, "network": 14.0e-6}
TREE_HOP = {"NVLink": 4.0e-6, "network": 14.0e-6}
# A few bytes go through a tree of protocol LL.
SMALL_BASE = 6.8e-6 + START
SMALL_HOP = {"NVLink": 0.6e-6, "network": 5.0e-6}


@dataclass(frozen=True)
class Ranks:
    """A group of ranks: how many, and how many of them are in one node."""

    size: int
    in_node: int

    @property
    def nodes(self) -> int:
        """The nodes that the group is spread over."""
        return self.size // self.in_node


@dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU receives over each link, and seconds of latency."""

    nvlink: float = 0.0
    network: float = 0.0
    latency: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.nvlink + other.nvlink,
            self.network + other.network,
            self.latency + other.latency,
        )

    def __mul__(self, times: float) -> Traffic:
        return Traffic(self.nvlink * times, self.network * times, self.latency * times)


def ring(whole: float, ranks: Ranks) -> Traffic:
    """An all-gather to ``whole`` bytes on every rank, or a reduce-scatter of as many.

    Each rank receives all but its own part. The rings of NCCL leave a node through every GPU of
    the group in turn, so that one in ``in_node`` of these bytes comes over the network.
    """
    if ranks.size == 1:
        return Traffic()
    received = whole * (ranks.size - 1) / ranks.size
    outside = received / ranks.in_node if ranks.nodes > 1 else 0.0
    hops = (ranks.size - ranks.nodes) * RING_HOP["NVLink"] + (ranks.nodes - 1) * RING_HOP["network"]
    return Traffic(received - outside, outside, BASE + hops)


def all_reduce(whole: float, ranks: Ranks) -> Traffic:
    """A sum of ``whole`` bytes over ``ranks``: a ring there and back, or a tree if it is faster."""
    if ranks.size == 1:
        return Traffic()
    one_way = ring(whole, ranks)
    ring_hops = 2 * (one_way.latency - BASE)
    return Traffic(
        2 * one_way.nvlink, 2 * one_way.network, BASE + min(ring_hops, _tree(ranks, TREE_HOP))
    )


def one_number(ranks: Ranks) -> Traffic:
    """An all-reduce of one number, or of a few, such as amaxes: latency alone."""
    if ranks.size == 1:
        return Traffic()
    return Traffic(latency=SMALL_BASE + _tree(ranks, SMALL_HOP))


def _tree(ranks: Ranks, hop: Mapping[str, float]) -> float:
    """Seconds of the hops of a tree: a chain in each node, a binary tree of nodes; both ways."""
    return 2 * ((ranks.in_node - 1) * hop["NVLink"] + math.log2(ranks.nodes) * hop["network"])


def all_to_all(sent: float, ranks: Ranks) -> Traffic:
    """An exchange of ``sent`` bytes a rank, evenly over all ranks; its own part stays.

    NCCL's model has no latency for it. Here all messages are sent at once, and cost one hop.
    """
    if ranks.size == 1:
        return Traffic()
    inside, outside = ranks.in_node - 1, ranks.size - ranks.in_node
    hop = RING_HOP["network" if outside else "NVLink"]
    return Traffic(sent * inside / ranks.size, sent * outside / ranks.size, BASE + hop)


@dataclass(frozen=True)
class Hardware:
    """A GPU: FLOP/s of products, bytes a second of memory and links, and bytes of memory.

    ``dense`` and ``grouped`` have the rates of products by recipe; those of a recipe in
    ``emulated`` are of bf16, on dequantized operands. ``peak`` is the nominal bf16 rate, to which a
    step's use of FLOPs (MFU) refers. ``nvlink`` and ``network`` are in one direction, for one GPU;
    ``network`` is nominal. The host takes ``host`` times as long as the one that was measured
    (``host.py``); 0 leaves it out. A step takes ``unmodelled`` times as long as its formulas say.
    ``is_measured``: rates, bandwidth and NVLink were measured on this GPU.
    """

    name: str
    dense: Mapping[str, float]
    grouped: Mapping[str, float]
    attention: float
    peak: float
    memory_bandwidth: float
    memory: float
    nvlink: float
    network: float
    emulated: tuple[str, ...]
    is_measured: bool
    unmodelled: float = UNMODELLED
    host: float = 1.0

    def products(self, recipe: str, *, is_grouped: bool) -> float:
        """FLOP/s of the products of ``recipe``.

        Raises
        ------
        InputError
            If there is no measurement.
        """
        rates = self.grouped if is_grouped else self.dense
        if recipe not in rates and recipe not in self.emulated:
            raise InputError(
                f"There is no rate of products for {recipe} on {self.name}; there are rates for "
                f"{', '.join((*rates, *self.emulated))}. Give one with --tflops."
            )
        return rates.get(recipe, rates["bf16"])

    def is_emulated(self, recipe: str) -> bool:
        """Whether operands are dequantized before the product."""
        return recipe in self.emulated

    def with_products(self, recipe: str, rate: float) -> Hardware:
        """This GPU with ``rate`` FLOP/s for the products of ``recipe``, which are native."""
        return replace(
            self,
            dense={**self.dense, recipe: rate},
            grouped={**self.grouped, recipe: rate},
            emulated=tuple(name for name in self.emulated if name != recipe),
        )

    def seconds(self, traffic: Traffic) -> float:
        """The time of ``traffic``: both links work at once, after the latency."""
        links = max(traffic.nvlink / self.nvlink, traffic.network / self.network)
        return links + traffic.latency


def _hardware(device: Device, network: float) -> Hardware:
    """A device of fuser's table with the ``network`` of its usual machine, bytes a second."""
    return Hardware(
        device.name,
        dense := _steps(device.dense),
        _steps(device.grouped),
        attention=device.attention,
        peak=device.peak,
        memory_bandwidth=device.bandwidth,
        memory=device.memory,
        nvlink=device.link,
        network=network,
        emulated=(
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
            *(name for name in PRECISIONS if name not in dense),
        ),
        is_measured=device.is_measured,
    )


# Networks as in DGX systems: 400 Gb/s, on an A100 200.
NETWORKS = {"h200": 50e9, "h100": 50e9, "a100": 25e9, "b200": 50e9}
GPUS = {name: _hardware(DEVICES[name], network) for name, network in NETWORKS.items()}
H200 = GPUS["h200"]
