"""Reports: one step in lines, variants side by side, and the same batch on more GPUs."""

from __future__ import annotations

import bisect
import contextlib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fuser.errors import InputError
from fuser.plan.transformers import Transformer
from fuser.recipe import Float8CurrentScaling, Recipe
from fuser.report.text import columns, format_bytes, format_time
from fuser_forecast.hardware import H200, Hardware
from fuser_forecast.mesh import ANY, Mesh, Sizes, meshes
from fuser_forecast.result import TrainingStep, Variant
from fuser_forecast.step import training_step

BATCH = 2**24
TOKENS = 4096  # of a microbatch on a GPU, or a sequence if that is longer
MOST_TOKENS = 2**18
COUNTS = tuple(2**power for power in range(3, 15))  # 8 to 16384 GPUs


@dataclass(frozen=True)
class Scaled:
    """One batch on a number of GPUs: a step of every variant, on the best mesh for it."""

    gpus: int
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

    def network_limit(self, index: int) -> int | None:
        """The least number of GPUs that make the network busier than compute, or None."""
        counts = (one.gpus for one in self.elsewhere if not one.steps[index].hides_network)
        return min(counts, default=None)

    def __str__(self) -> str:
        step = self.here.steps[-1]
        mesh, model, hardware = step.mesh, self.model, self.hardware
        experts = f" x ep {mesh.ep} inside" if model.experts else ""
        sizes = f"{model.parameters / 1e9:.1f} billion weights"
        if model.experts:
            sizes += f", {model.active_parameters / 1e9:.1f} for a token"
        batch = f"{step.tokens * step.microbatches * mesh.gpus:,} tokens"
        recompute = ", every layer's forward recomputed" if step.recompute else ""
        waiting = f", {step.host:.0%} waiting for the host" if step.host >= 0.005 else ""
        rows = [
            (line.name, *_traffic(line.nvlink, line.network), *_times(line.busy, line.exposed))
            for line in step.lines
        ]
        lines = [
            f"Training step of {model.name} on {mesh.gpus} {hardware.name}: "
            f"{_count(mesh.replicas, 'replica')} x fsdp {mesh.fsdp} x tp {mesh.tp}{experts}, "
            f"nodes of {mesh.gpus_per_node}",
            f"  {sizes}; {batch} in {_count(step.microbatches, 'microbatch')} of {step.tokens} a "
            f"GPU",
            f"  {self._rates()}{recompute}",
            "",
            *columns(
                [(f"time, {step.variant.name}", "NVLink", "network", "busy", "exposed"), *rows],
                left=1,
            ),
            f"  step {_seconds(step.modelled)}, {step.exposed:.0%} of it exposed communication"
            f"{waiting}",
            f"  times {hardware.unmodelled:g} for what is not modelled: {_seconds(step.seconds)}",
            "",
            *columns(
                [
                    (f"memory of a GPU, {step.variant.name}", ""),
                    *((name, _gigabytes(nbytes)) for name, nbytes in step.memory),
                    (
                        "total",
                        f"{_gigabytes(step.memory_bytes)} of {_gigabytes(hardware.memory)}"
                        f"{'' if step.fits else ', which does not fit'}",
                    ),
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
            "variant", "mesh", "step", "tokens/s a GPU", "MFU", "NVLink", "network", "exposed",
            "memory", "limit",
        )  # fmt: skip

    def _summary(self, step: TrainingStep) -> tuple[str, ...]:
        times = (
            _seconds(step.seconds),
            f"{step.tokens_per_second:.0f}",
            f"{step.mfu:.2f}",
            f"{step.exposed:.0%}",
        )
        *speed, exposed = times if step.fits else ["-"] * len(times)
        return (
            step.variant.name,
            self._mesh(step),
            *speed,
            *_traffic(
                sum(line.nvlink for line in step.lines), sum(line.network for line in step.lines)
            ),
            exposed,
            _gigabytes(step.memory_bytes),
            step.limit,
        )

    def _counts(self) -> list[tuple[str, ...]]:
        names = [step.variant.name for step in self.here.steps]
        rows = [("GPUs", "tokens/GPU", *names)]
        for one in self.elsewhere:
            cells = (
                f"{self._mesh(step)}: {_seconds(step.seconds)}, {step.exposed:.0%}"
                f"{f', {step.limit}' * (step.limit in ('network', 'host'))}"
                if step.fits
                else "-"
                for step in one.steps
            )
            first = one.steps[0]
            rows.append((str(one.gpus), str(first.tokens * first.microbatches), *cells))
        return rows

    def _mesh(self, step: TrainingStep) -> str:
        mesh = step.mesh
        sizes = (mesh.replicas, mesh.fsdp, mesh.tp, *((mesh.ep,) if self.model.experts else ()))
        return "x".join(map(str, sizes)) + "r" * step.recompute

    def _limits(self) -> list[str]:
        limits = (
            f"{step.variant.name} {self.network_limit(index) or 'none'}"
            for index, step in enumerate(self.here.steps)
        )
        ep = " x ep inside" if self.model.experts else ""
        return [
            f"  mesh: replicas x fsdp x tp{ep}, r with recomputation; then the step, and its "
            "exposed share",
            "  - does not fit into memory; network, host: it is busiest",
            f"  GPUs that make the network busier than compute: {', '.join(limits)}",
        ]

    def _least(self) -> list[str]:
        """The sentence on the least microbatches."""
        mesh = self.here.steps[-1].mesh
        if mesh.shards.nodes == 1 and mesh.expert_shards.nodes == 1:
            return []
        counts = (
            f"{step.variant.name} {least or 'none'}"
            for step, least in zip(self.here.steps, self.least_tokens, strict=True)
        )
        return [f"  tokens of a microbatch that hide the network: {', '.join(counts)}"]

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
        step = self.here.steps[-1]
        share = step.bytes_travel
        cut = f" Of the weights {1 - share:.0%} travel as values: shards cut their blocks."
        measured = "" if hardware.is_measured else "; rates are nominal, not measured"
        return textwrap.wrap(
            "Values travel: FSDP, TP and EP send bf16. Bytes travel: weights, inputs and gradients "
            "that are gathered or dispatched are sent as quantized bytes and scales."
            + (cut if 1 - share > 0 and step.mesh.shards.size > 1 else "")
            + f" Memory of {hardware.name} {hardware.memory_bandwidth / 1e12:.1f} TB/s, NVLink "
            f"{hardware.nvlink / 1e9:.0f} GB/s, network {hardware.network * 8 / 1e9:.0f} Gb/s a "
            f"GPU{measured}. Times of the host are {hardware.host:g} of those that were measured. "
            "MFU is of the nominal bf16 rate, half of FP8's. A forecast: docs/scale.md has the "
            "formulas.",
            96,
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, strings and numbers, ready for JSON."""

        def scaled(one: Scaled) -> dict[str, Any]:
            return {
                "gpus": one.gpus,
                "steps": [
                    {
                        "variant": step.variant.name,
                        "mesh": asdict(step.mesh),
                        "recompute": step.recompute,
                        "tokens": step.tokens,
                        "microbatches": step.microbatches,
                        "seconds": step.seconds,
                        "modelled_seconds": step.modelled,
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
            "hardware": self.hardware.name,
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


@dataclass(frozen=True)
class _Forecast:
    """A step of one batch, on any mesh."""

    model: Transformer
    variants: tuple[Variant, ...]
    batch: int
    tokens: int | None
    recompute: bool | None
    hardware: Hardware

    def step(self, mesh: Mesh, recompute: bool, variant: Variant) -> TrainingStep:
        size, times = microbatches(self.model, mesh, self.batch, self.tokens)
        return training_step(
            self.model,
            mesh,
            variant,
            tokens=size,
            microbatches=times,
            recompute=recompute,
            hardware=self.hardware,
        )

    def best(self, gpus: int, sizes: Sizes) -> Scaled:
        """Every variant on the mesh on which it is fastest, of those that fit into memory.

        If none fits, on the mesh with the least memory. Of equal meshes the first: without
        recomputation, then the smallest tp, fsdp and ep.

        Raises
        ------
        InputError
            If no mesh fits the model, the number of GPUs and the batch.
        """
        allowed: list[Mesh] = []
        refusals: list[InputError] = []
        for mesh in meshes(self.model, gpus, sizes):
            try:
                microbatches(self.model, mesh, self.batch, self.tokens)
            except InputError as error:
                refusals.append(error)
            else:
                allowed.append(mesh)
        if not allowed:
            raise refusals[-1]  # of the largest tp, which allows the smallest batch
        choices = (False, True) if self.recompute is None else (self.recompute,)
        return Scaled(
            gpus,
            tuple(
                min(
                    (self.step(mesh, again, variant) for again in choices for mesh in allowed),
                    key=_order,
                )
                for variant in self.variants
            ),
        )


def _order(step: TrainingStep) -> tuple[bool, float]:
    """Steps that fit into memory by their time, before others by their memory."""
    return (False, step.seconds) if step.fits else (True, step.memory_bytes)


def scale(
    model: Transformer,
    gpus: int,
    recipe: Recipe | None = None,
    *,
    sizes: Sizes = ANY,
    batch: int = BATCH,
    tokens: int | None = None,
    recompute: bool | None = None,
    hardware: Hardware = H200,
    counts: Sequence[int] = COUNTS,
) -> ScaleReport:
    """Model a step of ``batch`` tokens on the best meshes of ``gpus``, and of ``counts``.

    Parameters
    ----------
    recipe
        ``Float8CurrentScaling()`` if None.
    sizes
        The sizes of meshes that are given. Of the meshes that they leave, each variant runs on the
        one on which it is fastest and fits into memory. On ``counts`` replicas are chosen.
    tokens
        The most tokens of a microbatch on one GPU; :data:`TOKENS` or one sequence if None.
    recompute
        Whether every layer keeps its input alone, and backward computes its forward again; chosen
        if None.

    Raises
    ------
    InputError
        If no mesh fits, or the batch is not whole sequences for each tensor parallel group.
    """
    recipe = Float8CurrentScaling() if recipe is None else recipe
    variants = (
        Variant("bf16"),
        Variant("values travel", recipe),
        Variant("bytes travel", recipe, quantized_traffic=True),
    )
    forecast = _Forecast(model, variants, batch, tokens, recompute, hardware)
    here = forecast.best(gpus, sizes)
    elsewhere = []
    for count in counts:
        # A number of GPUs that the sizes, the model or the batch do not allow is left out.
        with contextlib.suppress(InputError):
            elsewhere.append(forecast.best(count, replace(sizes, replicas=None)))
    least = tuple(
        least_tokens(model, step.mesh, step.variant, recompute=step.recompute, hardware=hardware)
        for step in here.steps
    )
    return ScaleReport(model, here, tuple(elsewhere), least, hardware)


def least_tokens(
    model: Transformer, mesh: Mesh, variant: Variant, *, recompute: bool, hardware: Hardware
) -> int | None:
    """The least tokens of a microbatch on one GPU with which compute is as busy as the network.

    Compute grows with tokens, and the traffic of weights does not. None if there are none up to
    :data:`MOST_TOKENS`.
    """
    least = math.lcm(model.sequence, mesh.tp) // mesh.tp

    def is_hidden(times: int) -> bool:
        tokens = times * least
        options: dict[str, Any] = {"recompute": recompute, "hardware": hardware}
        return training_step(model, mesh, variant, tokens=tokens, **options).hides_network

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


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _traffic(nvlink: float, network: float) -> tuple[str, str]:
    return tuple(format_bytes(n) if n else "" for n in (nvlink, network))  # type: ignore[return-value]


def _times(busy: float, exposed: float) -> tuple[str, str]:
    return _seconds(busy), _seconds(exposed)


def _seconds(seconds: float) -> str:
    return format_time(seconds * 1e6)


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"
