"""Memory budgets of a plan: what each would keep for backward, and the modelled time of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fuser.report.text import columns, format_bytes, format_time


@dataclass(frozen=True)
class BudgetCost:
    """What a plan keeps for backward under one :class:`~fuser.activation_memory_budget`.

    ``nbytes`` are kept for inputs of the planned shape, ``weight_bytes`` of them by copies of
    quantized weights and the others by tensors of the tokens, ``bytes_per_token`` for each.
    Backward computes the ``inputs`` of these ops again and quantizes the ``weights`` of those;
    ``repeats_forward``: it runs forward again. ``microseconds`` is the modelled time of the steps
    of forward and backward, for the tokens that the plan is modelled for. Modules between pipelines
    are not counted.
    """

    memory_budget: float | None
    keep_weight_copies: bool | None
    lossy_activation_inputs: bool
    nbytes: float
    weight_bytes: int
    bytes_per_token: float
    microseconds: float
    inputs: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    repeats_forward: bool = False

    def __str__(self) -> str:
        return (
            f"{self.memory_budget}"
            + ", keep_weight_copies=False" * (not self.keep_weight_copies)
            + ", keep_weight_copies=True" * (self.memory_budget == 1 and self.weight_bytes > 0)
            + ", lossy_activation_inputs=True" * self.lossy_activation_inputs
        )

    @property
    def again(self) -> str:
        """What backward computes again, as text."""
        if self.repeats_forward:
            return "forward"
        parts = (("inputs", self.inputs), ("weights", self.weights))
        return "; ".join(f"{name} of {', '.join(map(str, ops))}" for name, ops in parts if ops)

    def __add__(self, other: BudgetCost) -> BudgetCost:
        """The costs of two pipelines under one budget."""
        names = ("nbytes", "weight_bytes", "bytes_per_token", "microseconds", "inputs", "weights")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def moved(self, by: int) -> BudgetCost:
        """The same with ops whose indices are larger by ``by``."""
        inputs, weights = (tuple(i + by for i in ops) for ops in (self.inputs, self.weights))
        return replace(self, inputs=inputs, weights=weights)


@dataclass(frozen=True)
class MemoryCurve:
    """The budgets of a training plan, from the most memory to the least; none without a backward.

    As text it is a table. Budgets that keep the same bytes as an earlier one are left out of it,
    and of iteration.
    """

    every: tuple[BudgetCost, ...] = ()
    tokens: int = 0
    """The rows of the planned input."""
    nominal_tokens: int = 0
    """The tokens of the modelled times."""

    def __iter__(self) -> Iterator[BudgetCost]:
        seen: set[tuple[float, int]] = set()
        for cost in self.every:
            if (place := (cost.nbytes, cost.weight_bytes)) not in seen:
                seen.add(place)
                yield cost

    def __str__(self) -> str:
        if not self.every:
            return "kept for backward: nothing needs a gradient"
        heading = ("budget", "a token", "weights", "all", f"step of {self.nominal_tokens}", "again")
        rows = [
            (
                str(cost),
                format_bytes(cost.bytes_per_token),
                format_bytes(cost.weight_bytes),
                format_bytes(cost.nbytes),
                format_time(cost.microseconds),
                cost.again or "nothing",
            )
            for cost in self
        ]
        rows.insert(0, heading)
        # The last column, which is text, to the left.
        numbers = columns([row[:-1] for row in rows], left=1)
        lines = (f"{line}  {row[-1]}" for line, row in zip(numbers, rows, strict=True))
        return "\n".join([f"kept for backward of {self.tokens} tokens", *lines])

    def to_dict(self) -> list[dict[str, object]]:
        """The table as plain lists, strings and numbers, ready for JSON."""
        return [
            {**vars(cost), "inputs": list(cost.inputs), "weights": list(cost.weights)}
            for cost in self
        ]

    def followed_by(self, other: MemoryCurve, by: int) -> MemoryCurve:
        """The budgets of two pipelines; ``by``: the number of ops of this one."""
        moved = tuple(cost.moved(by) for cost in other.every)
        if not (self.every and moved):
            return self if self.every else replace(other, every=moved)
        every = (first + second for first, second in zip(self.every, moved, strict=True))
        return replace(self, every=tuple(every))

    def with_inputs(self, sizes: Iterable[int]) -> MemoryCurve:
        """Those of several pipelines, whose inputs have these bytes: a budget of 0 keeps them."""
        nbytes = sum(sizes)
        every = (
            replace(cost, nbytes=nbytes, bytes_per_token=nbytes / self.tokens)
            if cost.repeats_forward
            else cost
            for cost in self.every
        )
        return replace(self, every=tuple(every))
