"""A layer of experts on several ranks, forward and backward: dispatch, grouped MLP and combine.

Variants: fuser with exact traffic and with a capacity, in bf16 and under recipes; the same in
torch with `all_to_all_single` and `grouped_mm`; and the four exchanges of rows alone. All run
alternately; a time is that of the slowest rank. On CPUs sizes are small, to try the script.

    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py --out out/expert_parallel.csv
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from evidence import Sink, provenance, say
from options import new_parser, parsed
from timing import Call, Failure, HostClock, Result, Timing, clock
from torch.nn import functional as F

import fuser
from fuser import recipe as recipes

# Experts, choices, tokens of a rank, hidden and intermediate width.
SIZES = {
    "cuda": (
        (64, 8, 2048, 2048, 1024),
        (128, 8, 8192, 2048, 768),  # Qwen3-30B-A3B
        (32, 4, 8192, 4096, 2048),
    ),
    "cpu": ((4, 2, 64, 32, 48),),
}
# Rows of a capacity over those of equal load.
SLACK = 1.25
WARM_UP = 4
COLUMNS = ("ms", "p20", "p80", "host ms")


class Case:
    """The tensors of one size on this rank, which all variants share."""

    def __init__(self, size: tuple[int, int, int, int, int], device: torch.device) -> None:
        self.experts, self.k, self.tokens, self.hidden, self.width = size
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(self.rank)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.x = torch.randn(self.tokens, self.hidden, requires_grad=True, **options)
        self.dy = torch.randn(self.tokens, self.hidden, **options)
        scores = torch.rand(self.tokens, self.experts, device=device)
        self.probs, self.indices = scores.topk(self.k)
        self.probs.requires_grad_()
        shapes = (2 * self.width, self.hidden), (self.hidden, self.width)
        self.up, self.down = (
            torch.nn.Parameter(torch.randn(self.experts // self.ranks, n, k, **options) * k**-0.5)
            for n, k in shapes
        )

    @property
    def capacity(self) -> int:
        """Rows of a rank, of whole tiles from each rank."""
        block = SLACK * self.tokens * self.k / self.ranks
        return self.ranks * -(-int(block) // 128) * 128


def in_fuser(case: Case, recipe: Any = None, *, has_capacity: bool = False) -> Call:
    group, local = dist.group.WORLD, case.experts // case.ranks
    capacity = case.capacity if has_capacity else None
    dispatch = fuser.MoeDispatch(case.experts, capacity=capacity, expert_parallel_group=group)
    for index, channel in enumerate(("sizes", "probs", "places")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    options: dict[str, Any] = {"bias": False, "single_grouped_weight": True, "device": "meta"}
    up = fuser.GroupedLinear(local, case.hidden, 2 * case.width, **options)
    down = fuser.GroupedLinear(local, case.width, case.hidden, **options)
    up.weight, down.weight = case.up, case.down
    combine = fuser.MoeCombine(expert_parallel_group=group)
    model = fuser.Sequential(
        dispatch,
        up.set_extra_input_channel(0, "sizes"),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        down.set_extra_input_channel(0, "sizes"),
        combine.set_extra_input_channel(0, "places"),
    )

    def forward() -> torch.Tensor:
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y: torch.Tensor = model(case.x, case.indices, case.probs)
        return y

    return forward


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; the gradient returns."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sent, received = ctx.sizes
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


def in_torch(case: Case) -> Call:
    exchange: Any = _Exchange.apply

    def forward() -> torch.Tensor:
        flat = case.indices.view(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=case.experts).view(case.ranks, -1)
        arrived = torch.empty_like(counts)
        dist.all_to_all_single(arrived, counts)
        sent, received = torch.stack([counts.sum(1), arrived.sum(1)]).tolist()
        rows = exchange(case.x[order // case.k], sent, received)
        scales = exchange(case.probs.view(-1)[order], sent, received)
        experts = torch.arange(counts.shape[1], device=flat.device).repeat(case.ranks)
        experts = experts.repeat_interleave(arrived.view(-1), output_size=len(rows))
        places = experts.argsort(stable=True)
        ends = arrived.sum(0).cumsum(0).int()
        z = F.grouped_mm(rows[places], case.up.transpose(1, 2), offs=ends)
        gate, linear = z.chunk(2, -1)
        h = (F.silu(gate) * linear * scales[places, None]).to(z.dtype)
        y = F.grouped_mm(h, case.down.transpose(1, 2), offs=ends)
        y = exchange(torch.empty_like(y).index_copy(0, places, y), received, sent)
        return torch.zeros_like(case.x).index_add(0, order // case.k, y)

    return forward


def exchanges(case: Case) -> Call:
    """The rows of dispatch and combine, in both directions, of equal sizes."""
    rows = case.x.detach().repeat_interleave(case.k, 0)
    out = torch.empty_like(rows)

    def run() -> None:
        for _ in range(4):
            dist.all_to_all_single(out, rows)

    return run


RECIPES = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(reduce_amax=False),
    "128-block": recipes.Float8BlockScaling(),
    "MXFP8": recipes.MXFP8BlockScaling(),
}
VARIANTS: dict[str, Callable[[Case], Call]] = {
    "fuser": in_fuser,
    "fuser capacity": partial(in_fuser, has_capacity=True),
    **{f"fuser {name}": partial(in_fuser, recipe=each) for name, each in RECIPES.items()},
    **{
        f"fuser {name} capacity": partial(in_fuser, recipe=RECIPES[name], has_capacity=True)
        for name in ("current", "delayed", "128-block")
    },
    "torch": in_torch,
    "exchanges alone": exchanges,
}


def step_of(name: str, case: Case) -> Call:
    """Forward and backward; gradients are None first."""
    call = VARIANTS[name](case)
    if name == "exchanges alone":
        return call

    def step() -> None:
        y: Any = call()
        y.backward(case.dy)
        for leaf in (case.x, case.probs, case.up, case.down):
            leaf.grad = None

    return step


def slowest(seconds: float, device: torch.device) -> float:
    """The longest time over the ranks."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def measured(case: Case, timer: HostClock, rounds: int, device: torch.device) -> dict[str, Result]:
    """A time, or a failure of all ranks, for each variant."""
    calls: dict[str, Call] = {}
    results: dict[str, Result] = {}
    for name in VARIANTS:
        error = None
        try:
            calls[name] = step_of(name, case)
            for _ in range(WARM_UP):
                calls[name]()
        except Exception as caught:  # a variant that all ranks refuse must not stop the others
            error = caught
            calls.pop(name, None)
        if slowest(float(error is not None), device):
            results[name] = Failure.of(error or RuntimeError("another rank failed"))
            calls.pop(name, None)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        names = list(calls)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            slowest(0.0, device)  # the ranks begin together
            reading = timer.sample(calls[name])
            timer.wait()
            if number:
                samples[name].append(slowest(reading(), device))
    for name, found in samples.items():
        host = [slowest(each, device) for each in timer.host(calls[name])]
        results[name] = Timing.of(found, host=host)
    return results


def main(argv: list[str] | None = None) -> None:
    """Measure on all ranks; the first one prints, and writes to ``--out``."""
    options = parsed(new_parser(__doc__, {}), argv, {})
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    is_first = dist.get_rank() == 0
    where = provenance(options.device, torch.bfloat16, options.commit)
    sink = Sink(options.out if is_first else None, where)
    if is_first:
        print("  ".join(f"{name} {value}" for name, value in where.items()))
    for size in SIZES[options.device]:
        case = Case(size, device)
        timer = clock(options.device, is_captured=False)
        found = measured(case, timer, options.rounds, device)
        sizes = dict(zip(("experts", "k", "tokens", "hidden", "intermediate"), size, strict=True))
        if is_first:
            say(f"\n{case.ranks} ranks, " + ", ".join(f"{n} {v}" for n, v in sizes.items()))
        for name in VARIANTS:
            result = found[name]
            row: dict[str, Any] = {"ranks": case.ranks, **sizes, "variant": name}
            row |= dict.fromkeys((*COLUMNS, "failure"), "")
            if isinstance(result, Timing):
                times = (result.median, result.p20, result.p80, result.host)
                for column, each in zip(COLUMNS, times, strict=True):
                    row[column] = round(each * 1e3, 4)
            else:
                row["failure"] = result.reason
            sink.write([row])
            if is_first:
                shown = "".join(f"{row[column]:>10}" for column in COLUMNS)
                say(f"{name:<24}{shown}  {row['failure']}")
    # Threads of gloo have then done with the tensors of the last collective (data_parallel.py).
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
