"""Reports: one step in lines, variants side by side, and the same batch on more GPUs."""

from __future__ import annotations

import bisect
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fuser.errors import InputError
from fuser.plan.text import columns, format_bytes, format_time
from fuser.recipe import Float8CurrentScaling, Recipe
from fuser.scale.hardware import H200, Hardware
from fuser.scale.mesh import Mesh, make_mesh
from fuser.scale.model import Transformer
from fuser.scale.result import TrainingStep, Variant
from fuser.scale.step import training_step

BATCH = 2**24
TOKENS = 4096  # of a microbatch on a GPU, or a sequence if that is longer
MOST_TOKENS = 2**18
COUNTS = tuple(2**power for power in range(3, 15))  # 8 to 16384 GPUs


@dataclass(frozen=True)
class Scaled:
    """One batch on one mesh, in every variant."""

    mesh: Mesh
    steps: tuple[TrainingStep, ...]


@dataclass(frozen=True)
class ScaleReport:
    """The steps of a model on a mesh, and on 8 to 16384 GPUs.

    ``here`` has the variants: bf16; the recipe with bf16 traffic; the recipe with quantized
    traffic, of which ``str()`` shows every line. ``elsewhere`` has the numbers of GPUs that the
    model and the batch allow. ``least_tokens`` has, for each variant, the tokens of a microbatch on
    one GPU with which compute on this mesh is as long as the network's work, None if no number is.
    """

    model: Transformer
    here: Scaled
    elsewhere: tuple[Scaled, ...]
    least_tokens: tuple[int | None, ...]
    hardware: Hardware
    recompute: bool

    def network_limit(self, index: int) -> int | None:
        """The least number of GPUs at which the network is busiest in variant ``index``, or None.

        The step may not fit into memory there.
        """
        counts = (one.mesh.gpus for one in self.elsewhere if one.steps[index].busiest == "network")
        return min(counts, default=None)

    def __str__(self) -> str:
        step = self.here.steps[-1]
        mesh, model, hardware = self.here.mesh, self.model, self.hardware
        experts = f" x ep {mesh.ep} inside" if model.experts else ""
        sizes = f"{model.parameters / 1e9:.1f} billion weights"
        if model.experts:
            sizes += f", {model.active_parameters / 1e9:.1f} for a token"
        batch = f"{step.tokens * step.microbatches * mesh.gpus:,} tokens"
        recompute = ", every layer's forward recomputed" if self.recompute else ""
        rows = [
            (line.name, *_traffic(line.nvlink, line.network), *_times(line.busy, line.exposed))
            for line in step.lines
        ]
        lines = [
            f"Training step of {model.name} on {mesh.gpus} {hardware.name}: "
            f"{_count(mesh.replicas, 'replica')} x fsdp {mesh.fsdp} x tp {mesh.tp}{experts}, "
            f"nodes of {mesh.gpus_per_node}",
            f"  {sizes}; {batch} in {_count(step.microbatches, 'microbatch')} of {step.tokens} a "
            f"GPU{recompute}",
            f"  {self._rates()}",
            "",
            *columns(
                [(f"time, {step.variant.name}", "NVLink", "network", "busy", "exposed"), *rows],
                left=1,
            ),
            f"  step {_seconds(step.seconds)}, {step.exposed:.0%} of it exposed communication",
            "",
            *columns(
                [
                    (f"memory of a GPU, {step.variant.name}", ""),
                    *((name, _gigabytes(nbytes)) for name, nbytes in step.memory),
                    ("total", f"{_gigabytes(step.memory_bytes)} of {_gigabytes(hardware.memory)}"),
                ],
                left=1,
            ),
            "",
            *columns([self._heading(), *map(self._summary, self.here.steps)], left=1),
            *self._least(),
        ]
        if self.elsewhere:
            lines += ["", *columns(self._counts(), left=1), *self._limits()]
        return "\n".join((*lines, "", *self._notes()))

    def _heading(self) -> tuple[str, ...]:
        return (
            "variant", "step", "tokens/s a GPU", "MFU", "NVLink", "network", "exposed", "memory",
            "limit",
        )  # fmt: skip

    def _summary(self, step: TrainingStep) -> tuple[str, ...]:
        return (
            step.variant.name,
            _seconds(step.seconds),
            f"{step.tokens_per_second:.0f}",
            f"{step.mfu:.2f}",
            *_traffic(
                sum(line.nvlink for line in step.lines), sum(line.network for line in step.lines)
            ),
            f"{step.exposed:.0%}",
            _gigabytes(step.memory_bytes),
            step.limit,
        )

    def _counts(self) -> list[tuple[str, ...]]:
        names = [step.variant.name for step in self.here.steps]
        rows = [("GPUs", "mesh", "tokens/GPU", *names)]
        for one in self.elsewhere:
            mesh, first = one.mesh, one.steps[0]
            cells = (
                f"{_seconds(step.seconds)}, {step.exposed:.0%}, {step.limit}" for step in one.steps
            )
            shape = f"{mesh.replicas} x {mesh.fsdp} x {mesh.tp}"
            rows.append((str(mesh.gpus), shape, str(first.tokens * first.microbatches), *cells))
        return rows

    def _limits(self) -> list[str]:
        found = (
            f"{step.variant.name} {self.network_limit(index) or 'none'}"
            for index, step in enumerate(self.here.steps)
        )
        return [
            "  mesh: replicas x fsdp x tp; then step, exposed share of it, limit",
            f"  GPUs that make the network busier than compute: {', '.join(found)}",
        ]

    def _least(self) -> list[str]:
        """The sentence on the least microbatches."""
        if self.here.mesh.shards.nodes == 1 and self.here.mesh.expert_shards.nodes == 1:
            return []
        found = (
            f"{step.variant.name} {least or 'none'}"
            for step, least in zip(self.here.steps, self.least_tokens, strict=True)
        )
        return [f"  tokens of a microbatch that hide the network: {', '.join(found)}"]

    def _rates(self) -> str:
        """The recipe, and how its products run."""
        recipe, hardware = self.here.steps[-1].variant.recipe, self.hardware
        name = type(recipe).__name__
        how = "emulated in bf16" if hardware.is_emulated(name) else "native"
        rates = [hardware.products(name, is_grouped=False) / 1e12]
        if self.model.experts:
            rates.append(hardware.products(name, is_grouped=True) / 1e12)
        words = f"{rates[0]:.0f} TFLOP/s" + "".join(f", of experts {r:.0f}" for r in rates[1:])
        return f"{name}: products are {how}, {words}"

    def _notes(self) -> list[str]:
        hardware = self.hardware
        share = self.here.steps[-1].bytes_travel
        cut = f" Of the weights {1 - share:.0%} travel as values: shards cut their blocks."
        return textwrap.wrap(
            "Values travel: FSDP, TP and EP send bf16. Bytes travel: weights, inputs and gradients "
            "that are gathered or dispatched are sent as quantized bytes and scales."
            + (cut if 1 - share > 0 and self.here.mesh.shards.size > 1 else "")
            + f" Memory {hardware.memory_bandwidth / 1e12:.1f} TB/s, NVLink "
            f"{hardware.nvlink / 1e9:.0f} GB/s, network {hardware.network * 8 / 1e9:.0f} Gb/s a "
            "GPU. MFU is of the nominal bf16 rate. A forecast: docs/scale.md has the formulas.",
            96,
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, strings and numbers, ready for JSON."""

        def scaled(one: Scaled) -> dict[str, Any]:
            return {
                "mesh": asdict(one.mesh),
                "steps": [
                    {
                        "variant": step.variant.name,
                        "tokens": step.tokens,
                        "microbatches": step.microbatches,
                        "seconds": step.seconds,
                        "tokens_per_second": step.tokens_per_second,
                        "mfu": step.mfu,
                        "exposed": step.exposed,
                        "limit": step.limit,
                        "memory_bytes": step.memory_bytes,
                        "memory": dict(step.memory),
                        "lines": [asdict(line) for line in step.lines],
                    }
                    for step in one.steps
                ],
            }

        return {
            "model": {
                **asdict(self.model),
                "parameters": self.model.parameters,
                "active_parameters": self.model.active_parameters,
            },
            "recompute": self.recompute,
            "here": scaled(self.here),
            "least_tokens": {
                step.variant.name: least
                for step, least in zip(self.here.steps, self.least_tokens, strict=True)
            },
            "elsewhere": [scaled(one) for one in self.elsewhere],
            "network_limit": {
                step.variant.name: self.network_limit(index)
                for index, step in enumerate(self.here.steps)
            },
        }


def scale(
    model: Transformer,
    mesh: Mesh,
    recipe: Recipe | None = None,
    *,
    batch: int = BATCH,
    tokens: int | None = None,
    recompute: bool = False,
    hardware: Hardware = H200,
    fsdp: int | None = None,
    counts: Sequence[int] = COUNTS,
) -> ScaleReport:
    """Model a step of ``batch`` tokens on ``mesh``, and the same step on ``counts`` of GPUs.

    Parameters
    ----------
    recipe
        ``Float8CurrentScaling()`` if None.
    tokens
        The most tokens of a microbatch on one GPU; :data:`TOKENS` or one sequence if None.
    fsdp
        The shards on other numbers of GPUs; None chooses, as :func:`make_mesh` does.

    Raises
    ------
    InputError
        If the batch is not whole sequences for each tensor parallel group.
    """
    recipe = Float8CurrentScaling() if recipe is None else recipe
    variants = (
        Variant("bf16"),
        Variant("values travel", recipe),
        Variant("bytes travel", recipe, quantized_traffic=True),
    )

    def on(mesh: Mesh) -> Scaled:
        size, times = microbatches(model, mesh, batch, tokens)
        return Scaled(
            mesh,
            tuple(
                training_step(
                    model,
                    mesh,
                    variant,
                    tokens=size,
                    microbatches=times,
                    recompute=recompute,
                    hardware=hardware,
                )
                for variant in variants
            ),
        )

    elsewhere = []
    here = on(mesh)
    for count in counts:
        node = mesh.gpus_per_node
        try:
            other = make_mesh(model, count, fsdp=fsdp, tp=mesh.tp, ep=mesh.ep, gpus_per_node=node)
            elsewhere.append(on(other))
        except InputError:
            continue  # this model, mesh or batch does not fit this number of GPUs
    least = tuple(
        least_tokens(model, mesh, variant, recompute=recompute, hardware=hardware)
        for variant in variants
    )
    return ScaleReport(model, here, tuple(elsewhere), least, hardware, recompute)


def least_tokens(
    model: Transformer, mesh: Mesh, variant: Variant, *, recompute: bool, hardware: Hardware
) -> int | None:
    """The least tokens of a microbatch on one GPU with which the network is not the busiest.

    Compute grows with tokens, and the traffic of weights does not. None if there are none up to
    :data:`MOST_TOKENS`.
    """
    least = math.lcm(model.sequence, mesh.tp) // mesh.tp

    def is_hidden(times: int) -> bool:
        tokens = times * least
        options: dict[str, Any] = {"recompute": recompute, "hardware": hardware}
        return training_step(model, mesh, variant, tokens=tokens, **options).busiest != "network"

    choices = range(1, max(2, MOST_TOKENS // least + 1))
    index = bisect.bisect_left(choices, True, key=is_hidden)
    return choices[index] * least if index < len(choices) else None


def microbatches(model: Transformer, mesh: Mesh, batch: int, tokens: int | None) -> tuple[int, int]:
    """Tokens of a microbatch on one GPU, at most ``tokens``, and the number of microbatches.

    Raises
    ------
    InputError
        If the batch is not whole sequences for each tensor parallel group.
    """
    least = math.lcm(model.sequence, mesh.tp) // mesh.tp
    of_gpu, rest = divmod(batch, mesh.gpus)
    if rest or of_gpu < least or of_gpu % least:
        raise InputError(
            f"A batch of {batch} tokens on {mesh.gpus} GPUs is {batch / mesh.gpus:.10g} a GPU; "
            f"with tp {mesh.tp} and sequences of {model.sequence} it must be a multiple of {least}."
        )
    most = max(TOKENS, least) if tokens is None else tokens
    if most < least:
        raise InputError(
            f"A microbatch of {most} tokens a GPU is less than a sequence of {model.sequence} for "
            f"a tensor parallel group of {mesh.tp}; it must be {least} or more."
        )
    size = next(n for n in range(min(most, of_gpu) // least * least, 0, -least) if of_gpu % n == 0)
    return size, of_gpu // size


# -- text -----------------------------------------------------------------------------


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def _traffic(nvlink: float, network: float) -> tuple[str, str]:
    return tuple(format_bytes(n) if n else "" for n in (nvlink, network))  # type: ignore[return-value]


def _times(busy: float, exposed: float) -> tuple[str, str]:
    return _seconds(busy), _seconds(exposed)


def _seconds(seconds: float) -> str:
    return format_time(seconds * 1e6)


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"
