"""Training steps under DistributedDataParallel: how much of backward its reductions can overlap.

The model is one pipeline of 16 modules, Linear and GELU, in bf16: by default T 8192 on each GPU, H
4096, 32 MiB a weight. Variants: "cut", the pipeline as several autograd nodes, which is what fuser
runs inside DistributedDataParallel; "one node", the same pipeline without cuts, as outside of it;
and "torch eager", the same model in torch.nn. "first gradient" is the time from the start of
backward until the first bucket of gradients is ready to be reduced, as a share of the time of
backward with its reductions. Variants alternate; rank 0 writes the results. On a CPU (gloo) sizes
are small, to try the script.

    torchrun --nproc-per-node 2 benchmarks/data_parallel.py --out out/ddp.csv
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from evidence import Sink, progress, provenance, say
from options import new_parser, parsed
from pipelines import BF16, RECIPES
from timing import Timing
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import fuser

SIZES = {"cuda": (8192, 4096, 16), "cpu": (64, 512, 16)}
WARM_UP = 5


class OneNode(torch.nn.Module):
    """A model that does not see the DistributedDataParallel around it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        active = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = None
        try:
            return self.model(x)
        finally:
            DistributedDataParallel._active_ddp_module = active


def fuser_model(hidden: int, count: int, device: str) -> torch.nn.Module:
    options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    pairs = [(fuser.Linear(hidden, hidden, **options), fuser.GELU()) for _ in range(count)]
    return fuser.Sequential(*(op for pair in pairs for op in pair))


def torch_model(hidden: int, count: int, device: str) -> torch.nn.Module:
    options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    gelu = functools.partial(torch.nn.GELU, approximate="tanh")
    pairs = [(torch.nn.Linear(hidden, hidden, **options), gelu()) for _ in range(count)]
    return torch.nn.Sequential(*(op for pair in pairs for op in pair))


class Moment:
    """A moment on the device."""

    def __init__(self, device: str) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        self.time = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def until(self, other: Moment) -> float:
        """Seconds from this moment to ``other``; the device must have finished."""
        if self.event is None or other.event is None:
            return other.time - self.time
        return float(self.event.elapsed_time(other.event)) / 1e3


@dataclass
class Run:
    """A variant: the seconds of its steps, and the shares of backward to the first gradient."""

    name: str
    recipe: str
    ddp: DistributedDataParallel
    context: Callable[[], Any]
    steps: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)
    """The seconds until the host has launched a step, on a device that was idle before."""
    first: Moment | None = None

    def watch(self, device: str) -> None:
        """Note when the first bucket of a backward is ready."""

        def note(bucket: Any) -> Any:
            self.first = self.first or Moment(device)
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        self.ddp.register_comm_hook(None, lambda state, bucket: note(bucket))

    def step(self, x: torch.Tensor, dy: torch.Tensor, device: str) -> None:
        """Forward, backward and reduction, timed."""
        self.first = None
        self.ddp.zero_grad()
        dist.barrier()
        start = Moment(device)
        with self.context():
            y = self.ddp(x)
        backward = Moment(device)
        y.backward(dy)
        end = Moment(device)
        if device == "cuda":
            torch.cuda.synchronize()
        assert self.first is not None
        self.steps.append(start.until(end))
        self.shares.append(backward.until(self.first) / backward.until(end))
        self.hosts.append(end.time - start.time)

    def row(self) -> dict[str, object]:
        """The medians, and the spread of the steps."""
        step, share = Timing.of(self.steps[WARM_UP:]), Timing.of(self.shares[WARM_UP:])
        return {
            "variant": self.name,
            "recipe": self.recipe,
            "first gradient": round(share.median, 3),
            "step ms": round(step.median * 1e3, 3),
            "p20": round(step.p20 * 1e3, 3),
            "p80": round(step.p80 * 1e3, 3),
            "host ms": round(Timing.of(self.hosts[WARM_UP:]).median * 1e3, 3),
        }


def runs(sizes: tuple[int, int], recipes: list[str], device: str) -> list[Run]:
    """Every variant, each with a model of its own."""
    found = []
    for recipe in (BF16, *recipes):
        context: Callable[[], Any] = contextlib.nullcontext
        if recipe != BF16:
            chosen = getattr(fuser.recipe, RECIPES[recipe])()
            context = functools.partial(fuser.autocast, recipe=chosen)
        models = {
            "cut": fuser_model(*sizes, device),
            "one node": OneNode(fuser_model(*sizes, device)),
        }
        if recipe == BF16:
            models["torch eager"] = torch_model(*sizes, device)
        for name, model in models.items():
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
            found.append(Run(name, recipe, ddp, context))
            found[-1].watch(device)
    return found


def measured(sizes: Sequence[int], options: Any, rank: int) -> list[dict[str, object]]:
    """A row of results for each variant; the models are freed on return."""
    (tokens, hidden, count), device = sizes, options.device
    torch.manual_seed(rank)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    chosen = runs((hidden, count), options.recipes, device)
    rounds = range(WARM_UP + options.rounds)
    for _ in progress(rounds, "rounds") if rank == 0 else rounds:
        for run in chosen:
            run.step(x, dy, device)
    return [run.row() for run in chosen]


def main(argv: list[str] | None = None) -> None:
    """Measure on all ranks; print and write on the first."""
    names = ("tokens", "hidden", "modules")
    texts = {
        name: f"default: {SIZES['cuda'][i]}, on a CPU {SIZES['cpu'][i]}"
        for i, name in enumerate(names)
    }
    parser = new_parser(__doc__, texts)
    help_text = "of fuser, beside bf16; default: current"
    parser.add_argument(
        "--recipes", nargs="*", default=["current"], choices=list(RECIPES), help=help_text
    )
    options = parsed(parser, argv, texts)
    if options.chart:
        parser.error("data_parallel.py draws no chart.")
    device = options.device
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    given = [getattr(options, name) or SIZES[device][i] for i, name in enumerate(names)]
    rows = measured(given, options, rank)
    if rank == 0:
        where = {"ranks": dist.get_world_size(), **dict(zip(names, given, strict=True))}
        where = {**provenance(device, torch.bfloat16, options.commit), **where}
        say(",".join(map(str, rows[0])))
        for row in rows:
            say(",".join(map(str, row.values())))
        Sink(options.out, where).write(rows)
    # A process aborted once at its end, probably because a thread of gloo still freed tensors. The
    # models are gone now, and with them the last users of the group, which ends its threads.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
