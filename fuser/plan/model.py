"""Plans of whole models: pipelines and other modules in the order of their calls, as text and dict.

A module that no pipeline runs is a box with its calls of torch. Repeated layers are shown once.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser.plan.devices import Device
from fuser.plan.plain_torch import COMPILED, EAGER
from fuser.plan.plan import Baseline, Drawn, FusionPlan
from fuser.report.text import columns, format_bytes, format_flops, format_time

OPTIMIZER = "optimizer"  # the place of its step


@dataclass(frozen=True)
class TorchModule:
    """A call of a module that no pipeline runs: what its own code calls of torch.

    ``flops`` and ``nbytes`` are those of both sides; ``calls`` the names of torch's operators, each
    with their number; ``eager`` and ``compiled`` the modelled times.
    """

    flops: float
    nbytes: float
    calls: tuple[tuple[str, int], ...]
    eager: Baseline
    compiled: Baseline


@dataclass(frozen=True)
class ModelPart:
    """Calls of alike modules: one call, its ``paths``, and the class of the module.

    ``content`` is the plan of a pipeline, or the box of another module.
    """

    paths: tuple[str, ...]
    name: str
    content: FusionPlan | TorchModule

    @property
    def count(self) -> int:
        """The number of calls."""
        return len(self.paths)

    @property
    def place(self) -> str:
        """All paths as one text, such as ``layers.0-31.mlp``."""
        return joined_paths(self.paths) or "(the model)"

    @property
    def flops(self) -> float:
        """Operations of all calls, forward and backward."""
        if isinstance(self.content, TorchModule):
            return self.count * self.content.flops
        steps = self.content.forward + self.content.backward
        return self.count * self.content.nominal_tokens * sum(s.flops_per_token for s in steps)

    @property
    def nbytes(self) -> float:
        """Bytes that all calls move, forward and backward."""
        if isinstance(self.content, TorchModule):
            return self.count * self.content.nbytes
        steps = self.content.forward + self.content.backward
        return self.count * self.content.nominal_tokens * sum(s.bytes_per_token for s in steps)

    def microseconds(self, side: str) -> float:
        """The modelled time of all calls as planned: other modules run as eager torch."""
        if isinstance(self.content, TorchModule):
            return self.count * float(getattr(self.content.eager, side))
        return self.count * sum(step.microseconds for step in self.content.steps(side))

    def baseline(self, name: str) -> float:
        """The modelled time of all calls in plain torch; as planned if there is no baseline."""
        if isinstance(self.content, TorchModule):
            one = self.content.eager if name == EAGER else self.content.compiled
            return self.count * one.microseconds
        known = {one.name: one.microseconds for one in self.content.baselines}
        return self.count * known.get(name, self.content.microseconds)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step, as far as a plan knows them.

    ``kept`` is what forward keeps for backward, with the other modules as eager calls; ``moments``
    are those of an optimizer.
    """

    parameters: int = 0
    gradients: int = 0
    kept: float = 0.0
    moments: int = 0

    @property
    def at_once(self) -> float:
        """The larger of what is held after forward, and after backward."""
        return self.parameters + self.moments + max(self.kept, self.gradients)

    def sentences(self, device: Device) -> list[str]:
        """All of it, in two lines."""
        of = f", of {format_bytes(device.memory)}" if device.memory else ""
        moments = f", optimizer {format_bytes(self.moments)}" if self.moments else ""
        return [
            f"memory: parameters {format_bytes(self.parameters)}{moments}, and "
            f"{format_bytes(self.kept)} kept for backward or {format_bytes(self.gradients)} of "
            "gradients:",
            f"{format_bytes(self.at_once)} or more at once{of}",
        ]


@dataclass(frozen=True)
class ModelPlan(Drawn):
    """What a call of a model runs: ``parts`` in the order of their first calls.

    ``name`` is the model's class, ``inputs`` describes the arguments, ``parameters`` is the number
    of weights. ``memory`` is that of a training step, of zeros if backward is not planned.
    """

    name: str
    inputs: tuple[str, ...]
    parameters: int
    training: bool
    device: Device
    parts: tuple[ModelPart, ...]
    memory: StepMemory = StepMemory()

    def with_adamw(self, parameters: Iterable[torch.Tensor]) -> ModelPlan:
        """The plan with a step of ``torch.optim.AdamW(fused=True)``, in the column of backward.

        It reads parameters, gradients and two moments, all of the same dtypes, and writes all but
        the gradients.
        """
        size = sum(parameter.nbytes for parameter in parameters)
        microseconds = (7 * size / self.device.bandwidth + self.device.launch) * 1e6
        times = (Baseline(name, 0.0, microseconds) for name in (EAGER, COMPILED))
        step = ModelPart(
            (OPTIMIZER,), "AdamW", TorchModule(0.0, 7 * size, (("_fused_adamw_", 1),), *times)
        )
        memory = replace(self.memory, moments=2 * size)
        return replace(self, parts=(*self.parts, step), memory=memory)

    @property
    def plans(self) -> dict[str, FusionPlan]:
        """The plan of each pipeline, by the path of its module."""
        return {
            path: part.content
            for part in self.parts
            for path in part.paths
            if isinstance(part.content, FusionPlan)
        }

    @property
    def microseconds(self) -> float:
        """The modelled time of a call, and of its backward."""
        return sum(part.microseconds(side) for part in self.parts for side in self.sides)

    @property
    def compiled_microseconds(self) -> float:
        """The same if torch.compile compiles the other modules."""
        return sum(
            part.baseline(COMPILED)
            if isinstance(part.content, TorchModule)
            else sum(part.microseconds(side) for side in self.sides)
            for part in self.parts
        )

    @property
    def sides(self) -> tuple[str, ...]:
        """``"forward"``, and in training ``"backward"``."""
        return ("forward", "backward") if self.training else ("forward",)

    def baseline(self, name: str) -> float:
        """Modelled microseconds in ``"torch eager"`` or ``"torch.compile"``."""
        return sum(part.baseline(name) for part in self.parts)

    def __repr__(self) -> str:
        pipelines = sum(isinstance(part.content, FusionPlan) for part in self.parts)
        others = len(self.parts) - pipelines
        return (
            f"<ModelPlan of {self.name}: {pipelines} pipelines, {others} other modules; "
            f"{', '.join(self.inputs)}>"
        )

    def __str__(self) -> str:
        side = "training" if self.training else "no grad"
        lines = [
            f"Plan of {self.name}, {format_flops(self.parameters)} parameters: {side}",
            f"  inputs {', '.join(self.inputs)}",
            "",
        ]
        heading = ("module", "calls", "runs as", "FLOP", *self.sides, EAGER, COMPILED)
        rows = [heading]
        pipelines: list[tuple[str, FusionPlan]] = []
        for part in self.parts:
            kind = f"[{part.name}]"
            if isinstance(part.content, FusionPlan):
                pipelines.append((part.place, part.content))
                kind = f"pipeline {len(pipelines)} of {part.name}"
            times = [part.microseconds(s) for s in self.sides]
            times += [part.baseline(EAGER), part.baseline(COMPILED)]
            flops = format_flops(part.flops)
            rows.append((part.place, str(part.count), kind, flops, *map(format_time, times)))
        totals = [sum(part.microseconds(side) for part in self.parts) for side in self.sides]
        totals += [self.baseline(EAGER), self.baseline(COMPILED)]
        flops = format_flops(sum(part.flops for part in self.parts))
        rows.append(("all", "", "", flops, *map(format_time, totals)))
        lines += columns(rows, left=3)
        has_optimizer = any(part.paths == (OPTIMIZER,) for part in self.parts)
        lines += ["", *(f"  {line}" for line in self.summary())]
        for number, (place, plan) in enumerate(pipelines, 1):
            lines += ["", f"pipeline {number}, {place}: {plan.key.describe()}"]
            for side in self.sides:
                lines += plan.side_lines(side)
        lines += [
            "",
            *textwrap.wrap(
                f"Modelled on {self.device.describe()}. Modules in brackets run in torch, as eager "
                "calls"
                + (
                    "; backward is taken as twice forward, of attention 2.5 times." * self.training
                    or "."
                )
                + " The optimizer runs after backward, and is in its column." * has_optimizer
                + " torch.compile is modelled module by module.",
                width=96,
            ),
        ]
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """The modelled time beside that of plain torch, and the memory, in sentences."""
        planned, compiled = self.microseconds, self.compiled_microseconds
        boxes = [part for part in self.parts if isinstance(part.content, TorchModule)]
        in_boxes = sum(part.microseconds(side) for part in boxes for side in self.sides)
        eager, in_compile = self.baseline(EAGER), self.baseline(COMPILED)
        return [
            f"as planned {format_time(planned)}, of which other modules {format_time(in_boxes)}; "
            f"within torch.compile {format_time(compiled)}",
            f"{EAGER} {format_time(eager)}, {eager / planned if planned else 1.0:.2f}x this plan",
            f"{COMPILED} {format_time(in_compile)}, "
            f"{in_compile / compiled if compiled else 1.0:.2f}x this plan within torch.compile",
            *(self.memory.sentences(self.device) if self.training else ()),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain lists, strings and numbers, ready for JSON."""
        return {
            "name": self.name,
            "inputs": list(self.inputs),
            "parameters": self.parameters,
            "training": self.training,
            "device": self.device.describe(),
            "microseconds": self.microseconds,
            "compiled_microseconds": self.compiled_microseconds,
            "baselines": {name: self.baseline(name) for name in (EAGER, COMPILED)},
            "memory": {**vars(self.memory), "at_once": self.memory.at_once},
            "parts": [self._part_dict(part) for part in self.parts],
            "sentences": self.summary(),
        }

    def _part_dict(self, part: ModelPart) -> dict[str, Any]:
        content = part.content
        return {
            "paths": list(part.paths),
            "place": part.place,
            "name": part.name,
            "count": part.count,
            "flops": part.flops,
            "bytes": part.nbytes,
            **{side: part.microseconds(side) for side in self.sides},
            "baselines": {name: part.baseline(name) for name in (EAGER, COMPILED)},
            "plan": content.to_dict() if isinstance(content, FusionPlan) else None,
            "calls": {} if isinstance(content, FusionPlan) else dict(content.calls),
        }


def grouped(calls: Iterable[ModelPart]) -> tuple[ModelPart, ...]:
    """``calls`` with alike ones as one part: equal content, and paths that differ in numbers."""
    parts: list[ModelPart] = []
    by_template: dict[tuple[str, str], list[int]] = {}
    for call in calls:
        (path,) = call.paths
        places = by_template.setdefault((re.sub(NUMBER, "*", path), call.name), [])
        for place in places:
            if parts[place].content == call.content:
                known = parts[place]
                parts[place] = ModelPart((*known.paths, path), known.name, known.content)
                break
        else:
            places.append(len(parts))
            parts.append(call)
    return tuple(parts)


NUMBER = r"(?<![^.])\d+(?![^.])"


def joined_paths(paths: Sequence[str]) -> str:
    """Paths that differ in numbers as one: ``layers.0-2,5.mlp``; or the first, with ``...``."""
    distinct = list(dict.fromkeys(paths))
    split = [path.split(".") for path in distinct]
    differ = [i for i, names in enumerate(zip(*split, strict=True)) if len({*names}) > 1]
    if len(differ) != 1:
        return distinct[0] + (" ..." if differ else "")
    numbers = sorted(int(names[differ[0]]) for names in split)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    spans = (str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    names = [*split[0]]
    names[differ[0]] = ",".join(spans)
    return ".".join(names)
