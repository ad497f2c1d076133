"""The result of modelling a step: lines of time, and memory by contents."""

from __future__ import annotations

from dataclasses import dataclass

from fuser.recipe import Recipe
from fuser_forecast.hardware import Hardware, Traffic
from fuser_forecast.mesh import Mesh

# Of a GPU's memory. The rest is for buffers of NCCL, workspaces of libraries and fragments.
USABLE = 0.92


@dataclass(frozen=True)
class Variant:
    """The quantized parts of a step: products, by ``recipe``; traffic, if ``quantized_traffic``.

    With quantized traffic FSDP gathers weights as ``fuser.distributed.gather_quantized`` does.
    """

    name: str
    recipe: Recipe | None = None
    quantized_traffic: bool = False


@dataclass(frozen=True)
class Line:
    """A part of a step on one GPU: its bytes over links, and seconds.

    ``kind`` is ``"compute"``, ``"NVLink"``, ``"network"`` or ``"host"``. ``busy`` is the time of
    the part alone, ``exposed`` the time by which it makes the step longer.
    """

    name: str
    kind: str
    busy: float
    exposed: float
    nvlink: float = 0.0
    network: float = 0.0


@dataclass(frozen=True)
class TrainingStep:
    """A modelled step: ``lines`` of time, and ``memory``, bytes by contents.

    ``bytes_travel`` is the share of the weights that are gathered quantized.
    """

    mesh: Mesh
    variant: Variant
    recompute: bool
    tokens: int
    microbatches: int
    lines: tuple[Line, ...]
    memory: tuple[tuple[str, float], ...]
    flops: float
    bytes_travel: float
    hardware: Hardware

    @property
    def modelled(self) -> float:
        """Seconds of the step by its lines."""
        return sum(line.exposed for line in self.lines)

    @property
    def seconds(self) -> float:
        """The time of the step to expect: :attr:`modelled`, times what is not modelled."""
        return self.modelled * self.hardware.unmodelled

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one GPU a second."""
        return self.tokens * self.microbatches / self.seconds

    @property
    def mfu(self) -> float:
        """The model's FLOPs over those that the GPU's nominal bf16 rate allows."""
        return self.flops / self.seconds / self.hardware.peak

    @property
    def memory_bytes(self) -> float:
        """All bytes of memory."""
        return sum(nbytes for _, nbytes in self.memory)

    def busy(self, kind: str) -> float:
        """Seconds for which ``kind`` is busy."""
        return sum(line.busy for line in self.lines if line.kind == kind)

    @property
    def exposed(self) -> float:
        """The share of the modelled step by which communication makes it longer."""
        links = ("NVLink", "network")
        return sum(line.exposed for line in self.lines if line.kind in links) / self.modelled

    @property
    def host(self) -> float:
        """The share of the modelled step in which the GPU waits for the host."""
        return sum(line.exposed for line in self.lines if line.kind == "host") / self.modelled

    @property
    def hides_network(self) -> bool:
        """Whether compute is busy as long as the network."""
        return self.busy("network") <= self.busy("compute")

    @property
    def busiest(self) -> str:
        """The kind of line that is busy longest: ``"compute"``, ``"NVLink"``, and so on."""
        return max(("compute", "NVLink", "network", "host"), key=self.busy)

    @property
    def limit(self) -> str:
        """``"memory"`` if the step does not fit, otherwise :attr:`busiest`."""
        return self.busiest if self.fits else "memory"

    @property
    def fits(self) -> bool:
        """Whether the memory of a GPU holds the step."""
        return self.memory_bytes <= USABLE * self.hardware.memory


def line_of(name: str, traffic: Traffic, busy: float, exposed: float) -> Line:
    """A line of communication."""
    kind = "network" if traffic.network else "NVLink"
    return Line(name, kind, busy, exposed, traffic.nvlink, traffic.network)


def repeated(line: Line, times: int) -> Line:
    """``line``, ``times`` times."""
    return Line(
        line.name,
        line.kind,
        line.busy * times,
        line.exposed * times,
        line.nvlink * times,
        line.network * times,
    )


def added(line: Line, other: Line) -> Line:
    """Two lines of one name as one."""
    return Line(
        line.name,
        line.kind,
        line.busy + other.busy,
        line.exposed + other.exposed,
        line.nvlink + other.nvlink,
        line.network + other.network,
    )
