"""The report of a conversion: what runs a pipeline, what does not and why."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch

from fuser.conversion.gains import Gains
from fuser.errors import InputTypeError
from fuser.report.text import format_time


@dataclass(frozen=True)
class ConversionRow:
    """A module in the report of a conversion.

    Parameters
    ----------
    path, cls
        The module, and the name of its class.
    is_converted
        Whether it runs a pipeline now.
    text
        What the pipeline computes, or why there is none.
    """

    path: str
    cls: str
    is_converted: bool
    text: str


IN_PLACE = (
    "fuser.convert changes the model in place and returns a report on it. Write "
    "fuser.convert(model), and go on with model."
)


# What the second of two times is, by the title of the rows.
THEN = {"converted": "quantized", "left to torch": "then"}


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did: printed, a table with a row for each kind of module.

    ``note`` is a sentence on the whole model, or empty. ``routers`` has the paths of the linears
    whose output chooses, such as experts: they are never quantized. ``left`` has the other linears
    and norms that stay torch's, each with its reason.
    """

    rows: tuple[ConversionRow, ...]
    note: str
    routers: tuple[str, ...]
    left: tuple[ConversionRow, ...]
    _gains: Gains = field(repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        # ``model = fuser.convert(model)``, as other libraries have it.
        if not name.startswith("_") and hasattr(torch.nn.Module, name):
            raise AttributeError(f"A ConversionReport has no {name!r}: {IN_PLACE}")
        return object.__getattribute__(self, name)  # Python's own sentence

    def __call__(self, *args: object, **keywords: object) -> NoReturn:
        """Refused: a report is no model.

        Raises
        ------
        InputTypeError
            Always.
        """
        raise InputTypeError(f"A ConversionReport was called as a model: {IN_PLACE}")

    @property
    def converted(self) -> tuple[ConversionRow, ...]:
        """The modules that run a pipeline now."""
        return tuple(row for row in self.rows if row.is_converted)

    @property
    def refused(self) -> tuple[ConversionRow, ...]:
        """The modules that look as if they could, and do not."""
        return tuple(row for row in self.rows if not row.is_converted)

    def gains(self, device: str | None = None) -> dict[str, tuple[float, float]]:
        """What options would bring: two modelled times of modules, by their paths.

        They are microseconds of forward and backward of 8192 tokens. Of a module that is left to
        torch: as it is, and with the option that its row names, quantized under the recipe. Of one
        that is never quantized: as it is, and with ``keep=()``. None is measured.

        Parameters
        ----------
        device
            A GPU that need not be here: ``"h200"``, ``"h100"``, ``"a100"``, ``"b200"`` or
            ``"rtx5090"``. Without it, that of the model, or an H200.

        Raises
        ------
        InputError
            If there is no such device.
        """
        return self._gains.times(device)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "_gains"}

    def __str__(self) -> str:
        count = len(self.converted)
        runs = "1 module runs a pipeline" if count == 1 else f"{count} modules run pipelines"
        stays = f", {len(self.refused)} not converted" * bool(self.refused)
        lines = [f"fuser.convert: {runs}{stays}"]
        of_titles = {
            "converted": self.converted,
            "not converted": self.refused,
            "left to torch": self.left,
        }
        times = self.gains()
        for title, rows in of_titles.items():
            kinds: dict[tuple[str, str, bool], list[str]] = {}
            for row in rows:
                name = f"{_starred(row.path) or 'the model'} ({row.cls})"
                kinds.setdefault((name, row.text, row.path in times), []).append(row.path)
            width = max((len(name) for name, *_ in kinds), default=0)
            lines += [f"{title}:"] * bool(kinds)
            for (name, text, has_times), alike in kinds.items():
                line = f"{len(alike):5d} x {name:{width}}  {text}"
                if has_times:
                    now, then = (sum(times[path][i] for path in alike) for i in (0, 1))
                    line += f": {format_time(now)}, {THEN[title]} {format_time(then)}"
                lines.append(line)
        if self.routers:
            routers = Counter(map(_starred, self.routers))
            lines.append("routers, in high precision:")
            lines += [f"{n:5d} x {path}" for path, n in routers.items()]
        if times:
            lines.append(f"times of all modules of a line, modelled: {self._gains.conditions}")
        return "\n".join([*lines, *([self.note] if self.note else ())])


def _starred(path: str) -> str:
    """A path with a star for each number, which layers that are alike have in common."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
