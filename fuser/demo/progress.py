"""Reports of a training run: a progress bar, or lines if there is no terminal."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import Any, Protocol


class Reporter(Protocol):
    """The reports that :func:`train` makes."""

    def advanced(self, done: float) -> None:
        """Report one more step, and the part of the run that is done, 1 at the end."""

    def reported(self, step: int, loss: float, rate: float) -> None:
        """Report the mean training loss since the last report, and tokens per second."""

    def validated(self, step: int, loss: float) -> None:
        """Report the validation loss after ``step`` steps."""

    def close(self) -> None:
        """End the run."""


def make_bar(total: float, **options: Any) -> Any:
    """A tqdm bar; None if tqdm is missing or stdout is not a terminal."""
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return tqdm(total=total, file=sys.stdout, dynamic_ncols=True, **options)
    return None


class Progress:
    """A progress bar for one run, or lines if there is no terminal."""

    def __init__(self, name: str) -> None:
        self.done = 0.0
        self.started = time.perf_counter()
        print(f"\nTraining with {name} feed-forward blocks:")
        self.bar = make_bar(
            1.0, bar_format="{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}"
        )

    def advanced(self, done: float) -> None:
        """Count one more step."""
        if self.bar is not None:
            self.bar.update(done - self.done)
        self.done = done

    def reported(self, step: int, loss: float, rate: float) -> None:
        """Show the mean training loss since the last report, and tokens per second."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"step {step}, loss {loss:.3f}, {rate:,.0f} tokens/s")
            return
        left = (time.perf_counter() - self.started) * (1 - self.done) / self.done
        line = f"{self._at(step)}loss {loss:.4f}  {rate:>10,.0f} tokens/s"
        print(f"{line}  {left:>5.0f} s left", flush=True)

    def validated(self, step: int, loss: float) -> None:
        """Show the validation loss, in both of its units."""
        bits = loss / math.log(2)
        line = f"{self._at(step)}validation loss {loss:.4f} nats/byte = {bits:.4f} bits/byte"
        if self.bar is not None:
            self.bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def _at(self, step: int) -> str:
        return f"  {self.done:>4.0%}  step {step:>5}  "

    def close(self) -> None:
        """End the run."""
        if self.bar is not None:
            self.bar.close()
