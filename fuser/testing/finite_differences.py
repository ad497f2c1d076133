"""Finite differences: the slopes of a function of tensors, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# The number of elements of a tensor whose slope is measured; each takes two calls.
ELEMENTS = 16
# Relative to max(1, |x|): a step, and the error of a slope relative to the largest slope.
FINE, FINE_RTOL = 2.0**-28, 1e-5
# Formulas that compute in fp32 inside do not change with the fine step. Their rounding error
# divided by the coarse step is 4e-6 of a value.
COARSE, COARSE_RTOL = 2.0**-7, 2e-3


class Slopes:
    """The slopes of the weighted sum of a function's outputs in the elements of one tensor.

    Parameters
    ----------
    function
        Returns the outputs, float64, for the current contents of ``x``.
    weights
        One tensor for each output, in its shape.
    x
        A contiguous float64 tensor that the function reads; changed during the measurement, and
        then restored.
    """

    def __init__(
        self,
        function: Callable[[], Sequence[torch.Tensor]],
        weights: Sequence[torch.Tensor],
        x: torch.Tensor,
    ) -> None:
        self.function, self.weights, self.x = function, weights, x.view(-1)
        self.base = function()

    def at(self, i: int, step: float) -> tuple[float, float]:
        """The slopes on both sides of element ``i``, the smaller one first."""
        before = self.x[i].item()
        sides = []
        for h in (step * max(1.0, abs(before)), -step * max(1.0, abs(before))):
            self.x[i] = before + h
            there = self.x[i].item()
            moved = self.function()
            rows = zip(moved, self.base, self.weights, strict=True)
            rise = sum(float(((y - y0) * w).sum()) for y, y0, w in rows)
            sides.append(rise / (there - before))
        self.x[i] = before
        return min(sides), max(sides)


def wrong_slope(
    slopes: Slopes, shape: torch.Size, gradient: torch.Tensor | None, generator: torch.Generator
) -> str | None:
    """The end of a sentence about ``gradient`` if it is not the slope; else None.

    At a kink every slope between those of the two sides is correct. A ``gradient`` of None
    means zeros; ``generator`` chooses the elements if there are more than ``ELEMENTS``.
    """
    if gradient is not None and gradient.shape != shape:
        return f"has shape {tuple(gradient.shape)} and not {tuple(shape)}."
    count = shape.numel()
    gradients = (
        torch.zeros(count) if gradient is None else gradient.detach().cpu().double().flatten()
    )
    chosen = torch.randperm(count, generator=generator)[:ELEMENTS].tolist()
    measured = {i: slopes.at(i, FINE) for i in chosen}
    magnitudes = [abs(side) for sides in measured.values() for side in sides]
    scale = max([*magnitudes, float(gradients.abs().max()) if count else 0.0])
    wrong = [i for i in chosen if _distance(float(gradients[i]), measured[i]) > FINE_RTOL * scale]
    coarse = {i: slopes.at(i, COARSE) for i in wrong}
    is_fp32 = any(_distance(sum(measured[i]) / 2, coarse[i]) > COARSE_RTOL * scale for i in wrong)
    if is_fp32:
        scale = max(scale, *(abs(side) for sides in coarse.values() for side in sides))
        wrong = [
            i for i in wrong if _distance(float(gradients[i]), coarse[i]) > COARSE_RTOL * scale
        ]
        measured = coarse
    if not wrong:
        return None
    worst = max(wrong, key=lambda i: _distance(float(gradients[i]), measured[i]))
    place = [int(k) for k in torch.unravel_index(torch.tensor(worst), shape)]
    return (
        f"differs from finite differences by up to "
        f"{_distance(float(gradients[worst]), measured[worst]):.3g}, at {place}: "
        f"{float(gradients[worst]):.6g} instead of {sum(measured[worst]) / 2:.6g}."
    )


def _distance(value: float, sides: tuple[float, float]) -> float:
    """The distance of ``value`` from the range between two slopes; infinity for a NaN."""
    if value != value:
        return float("inf")
    return max(sides[0] - value, value - sides[1], 0.0)
