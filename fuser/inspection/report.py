"""The report of an inspector: rows of tensors, as a table, a dict and a picture, and a ranking."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fuser.functional.grouped import PaddedGroups
from fuser.inspection.measure import MeasuredSums, copies_of, measured, together
from fuser.report.text import columns, format_share, listed
from fuser.tensors import QuantizedTensor

ROLES = ("input", "weight", "grad_output")
COPIES = ("both", "rowwise", "columnwise")
_HEADER: tuple[str, ...] = (
    *("layer", "tensor", "pass", "copy", "format", "amax"),
    *("to zero", "saturated", "SNR dB", "bf16 dB"),
)
# The operands of each product, and the copies that it reads of them.
PRODUCTS = {
    "forward": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
}


class QuantizingOp(NamedTuple):
    """An op that quantizes: the path of its module in the model, and its class."""

    layer: str
    op: str
    is_spare: bool = False
    """Whether it runs where a converted module that holds it does not run its pipeline."""


@dataclass(frozen=True)
class Row:
    """What one quantized tensor of an op lost, over one inspected call or several.

    Shares are of the values that are not zero. They are None where they have no meaning: without a
    source, and in a copy that a Hadamard transform has mixed.

    Parameters
    ----------
    layer, op
        The path of the op's module in the model, and its class.
    tensor
        ``"input"``, ``"weight"`` or ``"grad_output"``, the gradient of the output.
    side
        The pass that reads it: ``"forward"``, ``"backward"`` or ``"both"``.
    copy
        The copy of which this is: ``"rowwise"`` or ``"columnwise"``; ``"both"`` in a format in
        which one is the transpose of the other.
    format
        The number format, such as ``"FP8 E4M3"``.
    values
        How many values were quantized.
    amax
        The largest magnitude before quantization; without a source that of the quantized values.
    underflow
        The share that became zero.
    saturation
        The share that was too large for its scale: more than half a step above the largest value.
    snr_db
        10 log10 of the sum of squares over that of the errors; infinite without errors. None
        without a source: of a weight that is stored quantized, or was quantized before the call.
    bf16_snr_db
        The same of the source rounded to bf16; infinite if the source has 16 bits.
    """

    layer: str
    op: str
    tensor: str
    side: str
    copy: str
    format: str
    values: int
    amax: float
    underflow: float | None
    saturation: float | None
    snr_db: float | None
    bf16_snr_db: float | None

    def to_dict(self) -> dict[str, Any]:
        """The fields; numbers that JSON lacks are ``"exact"`` and ``"not finite"``."""
        return {name: _in_json(name, value) for name, value in vars(self).items()}


class LayerScore(NamedTuple):
    """How well the worst product of a layer is represented.

    ``snr_db`` is the ratio in its result: errors of the two operands are taken as independent and
    of mean zero, so their shares of noise add. ``product`` is ``"forward"``, ``"dgrad"`` or
    ``"wgrad"``, and ``tensor`` that of its operands with the lower ratio.
    """

    layer: str
    op: str
    snr_db: float
    product: str
    tensor: str


# By whether a recipe was active; None if the op did not run.
_REASONS = {None: "it did not run", False: "no recipe was active", True: "nothing was quantized"}

Key = tuple[int, str, str]
"""The id of an op's attributes, the role of the tensor, and the copy."""


class InspectedStep:
    """One inspected call of the model, with its backward."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.recipes: dict[int, bool] = {}
        """By op that ran, whether a recipe was active."""
        self.formats: dict[Key, str] = {}
        self._sums: dict[Key, list[torch.Tensor]] = {}

    def ran(self, op: int, *, has_recipe: bool) -> None:
        self.recipes[op] = has_recipe or self.recipes.get(op, False)

    @torch.no_grad()
    def saw(
        self,
        op: int,
        role: str,
        tensors: Sequence[QuantizedTensor],
        groups: object | None,
        *,
        is_repeated: bool,
    ) -> None:
        assert groups is None or isinstance(groups, PaddedGroups)
        sums_of_copies: dict[str, list[torch.Tensor]] = {}
        for tensor in tensors:
            for copy, sums in _measured_once(tensor, groups).items():
                sums_of_copies.setdefault(copy, []).append(sums)
        for copy, of_copy in sums_of_copies.items():
            key = (op, role, copy)
            if is_repeated and key in self._sums:
                continue
            self.formats[key] = str(tensors[0].format)
            self._sums.setdefault(key, []).append(together(of_copy))

    def sums(self) -> dict[Key, MeasuredSums]:
        """The sums of each copy; waits for the device."""
        return {key: MeasuredSums(*together(parts).tolist()) for key, parts in self._sums.items()}


def _measured_once(tensor: QuantizedTensor, groups: PaddedGroups | None) -> dict[str, torch.Tensor]:
    """The sums of each copy; of a tensor that another op read before, those of that time."""
    seen = tensor._observation
    if seen is not None and seen.source is None:
        known: dict[str, torch.Tensor] = seen.measured
        return known
    sums = {copy: measured(tensor, copy, groups) for copy in copies_of(tensor)}
    if seen is not None:
        seen.measured, seen.source = sums, None
    return sums


class InspectionReport:
    """What an inspector found; complete when the backward of the last call has run."""

    def __init__(self, places: Mapping[int, QuantizingOp], every: int) -> None:
        self.places = places
        """The ops that can quantize, by the ids of their attributes, in the order of the model."""
        self._every = every
        self._steps: list[InspectedStep] = []
        self.calls = 0
        """The calls of the model in training."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the inspected calls; the first is 1."""
        return tuple(step.number for step in self._steps)

    def next_step(self) -> InspectedStep | None:
        """Count a call; the step that inspects it, or None."""
        self.calls += 1
        if (self.calls - 1) % self._every:
            return None
        step = InspectedStep(self.calls)
        self._steps.append(step)
        return step

    def rows(self, step: int | None = None) -> tuple[Row, ...]:
        """The rows in the order of the model, over all inspected calls, or of one by its number."""
        chosen = [inspected for inspected in self._steps if step in (None, inspected.number)]
        all_sums: dict[Key, list[MeasuredSums]] = {}
        formats: dict[Key, str] = {}
        for inspected in chosen:
            formats |= inspected.formats
            for key, sums in inspected.sums().items():
                all_sums.setdefault(key, []).append(sums)
        known = {key: _added(parts) for key, parts in all_sums.items()}
        return tuple(
            _row(place, role, copy, formats[op, role, copy], known[op, role, copy])
            for op, place in self.places.items()
            for role in ROLES
            for copy in COPIES
            if (op, role, copy) in known
        )

    def ranked(self) -> tuple[LayerScore, ...]:
        """The layers with a product, that of the lowest ratio first: keep the first in 16 bits.

        A layer has the ratio of the worst of its three products. Operands without a source, such
        as quantized parameters, count as exact.
        """
        scores = []
        rows = self.rows()
        for layer, op in dict.fromkeys((place.layer, place.op) for place in self.places.values()):
            of_op = {(r.tensor, r.copy): r for r in rows if (r.layer, r.op) == (layer, op)}
            if not any(tensor == "weight" for tensor, _ in of_op):
                continue
            products = [_score(layer, op, name, of_op) for name in PRODUCTS]
            if any(products):
                scores.append(min(filter(None, products), key=_order))
        return tuple(sorted(scores, key=_order))

    @property
    def not_quantized(self) -> dict[str, str]:
        """By the path of an op that could quantize and did not in an inspected call: why."""
        ran: dict[int, bool] = {}
        quantized = {key[0] for step in self._steps for key in step.formats}
        for step in self._steps:
            for op, has_recipe in step.recipes.items():
                ran[op] = ran.get(op, False) or has_recipe
        return {
            place.layer: _REASONS[ran.get(op)]
            for op, place in self.places.items()
            if op not in quantized and not (place.is_spare and op not in ran)
        }

    @property
    def reason(self) -> str:
        """Why there are no rows; empty if there are some."""
        if any(step.formats for step in self._steps):
            return ""
        if not self.places:
            return (
                "The model has no op that quantizes: no Linear, GroupedLinear or Quantize of fuser."
                " Convert it first, with fuser.convert."
            )
        if not self.calls:
            return (
                "The model was not called with gradients enabled, so no step was inspected."
                " Call it outside of no_grad()."
            )
        reasons = set(self.not_quantized.values())
        calls = f"{len(self._steps)} inspected call{'s' * (len(self._steps) > 1)}"
        if reasons == {"no recipe was active"}:
            return (
                f"Nothing was quantized in {calls}: no recipe was active. Enter "
                "fuser.autocast(recipe=...) around the model."
            )
        return f"Nothing was quantized in {calls}: {listed(sorted(reasons))} in its ops."

    # -- output --------------------------------------------------------------------

    def __str__(self) -> str:
        rows, missing = self.rows(), self.not_quantized
        if not rows:
            return self.reason
        numbers = ", ".join(map(str, self.steps))
        lines = [f"Quantized tensors of call {numbers}, of {self.calls} in training", ""]
        cells = [_HEADER]
        layer = None
        for row in rows:
            name = f"{row.layer or '(model)'} {row.op}"
            shares = _percent(row.underflow), _percent(row.saturation)
            ratios = _decibels(row.snr_db), _decibels(row.bf16_snr_db)
            kind = row.tensor, row.side, row.copy, row.format
            first = "" if name == layer else name
            cells.append((first, *kind, f"{row.amax:.3g}", *shares, *ratios))
            layer = name
        lines += columns(cells, left=5)
        if missing:
            lines += ["", "not quantized"]
            lines += columns([(path or "(model)", why) for path, why in missing.items()], left=2)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<InspectionReport of {len(self.steps)} of {self.calls} calls>"

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON: the rows over all calls and of each, the ranking, what is missing."""
        return {
            "calls": self.calls,
            "steps": list(self.steps),
            "rows": [row.to_dict() for row in self.rows()],
            "rows_of_steps": {
                str(step): [row.to_dict() for row in self.rows(step)] for step in self.steps
            },
            "ranked": [
                score._asdict() | {"snr_db": _in_json("snr_db", score.snr_db)}
                for score in self.ranked()
            ],
            "not_quantized": self.not_quantized,
            "reason": self.reason,
        }

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the ratio of each tensor as a bar into an SVG, PNG or HTML file; returns the path.

        Raises
        ------
        InputError
            If the path has another suffix.
        StateError
            If matplotlib is missing.
        """
        from fuser.report.draw import draw

        return draw(self.to_dict(), str(self), path)


def _added(parts: Sequence[MeasuredSums]) -> MeasuredSums:
    """The sums over several calls."""
    amax, *others = zip(*parts, strict=True)
    largest = math.nan if any(map(math.isnan, amax)) else max(amax)
    return MeasuredSums(largest, *map(sum, others))


def _row(place: QuantizingOp, role: str, copy: str, format_: str, sums: MeasuredSums) -> Row:
    side = {"both": "both", "rowwise": "forward", "columnwise": "backward"}[copy]
    return Row(
        layer=place.layer,
        op=place.op,
        tensor=role,
        side="backward" if role == "grad_output" else side,
        copy=copy,
        format=format_,
        values=int(sums.values),
        amax=sums.amax,
        underflow=_share(sums.underflows, sums.nonzeros),
        saturation=_share(sums.saturations, sums.nonzeros),
        snr_db=_ratio(sums.signal, sums.noise, sums.nonzeros),
        bf16_snr_db=_ratio(sums.signal, sums.noise_of_bf16, sums.nonzeros),
    )


def _share(part: float, whole: float) -> float | None:
    if math.isnan(whole) or math.isnan(part):
        return None
    return part / whole if whole else 0.0


def _ratio(signal: float, noise: float, nonzeros: float) -> float | None:
    """In dB; None without a source, NaN if values are not finite."""
    if math.isnan(nonzeros):
        return None
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _score(
    layer: str, op: str, product: str, rows: Mapping[tuple[str, str], Row]
) -> LayerScore | None:
    """The score of one product of a layer; None if no operand of it was measured."""
    known: list[tuple[float, str]] = []
    for tensor, copy in PRODUCTS[product]:
        other = "columnwise" if copy == "rowwise" else "rowwise"
        copies = [rows[tensor, c] for c in (copy, "both", other) if (tensor, c) in rows]
        if copies and copies[0].snr_db is not None:
            known.append((copies[0].snr_db, tensor))
    if not known or (product != "forward" and all(t != "grad_output" for _, t in known)):
        return None
    if any(math.isnan(ratio) for ratio, _ in known):
        return LayerScore(layer, op, math.nan, product, next(t for r, t in known if math.isnan(r)))
    noise = sum(10 ** (-ratio / 10) for ratio, _ in known)
    ratio = math.inf if not noise else -10 * math.log10(noise)
    return LayerScore(layer, op, ratio, product, min(known)[1])


def _order(score: LayerScore) -> tuple[bool, float]:
    """Values that are not finite come first."""
    is_finite = not math.isnan(score.snr_db)
    return is_finite, score.snr_db if is_finite else 0.0


def _in_json(name: str, value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "exact" if name.endswith("snr_db") and value == math.inf else "not finite"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return format_share(share) if share else "0"


def _decibels(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    if math.isfinite(ratio):
        return f"{ratio:.1f}"
    return "exact" if ratio == math.inf else "not finite"
