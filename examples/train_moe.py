"""Train a byte-level language model with mixtures of experts, out of fuser pipelines.

The model of ``python -m fuser demo``, with a router and experts in place of each feed-forward
block. It trains for most of a minute, or of ``--seconds``, and repeats the first steps with experts
in plain torch. It draws how many tokens each expert got.

    python examples/train_moe.py
    python examples/train_moe.py --experts 16 --experts-per-token 4 --seconds 20
    python examples/train_moe.py --device cuda --dtype bfloat16 --width 1024 --heads 16 --cuda-graph
    torchrun --nproc-per-node 2 examples/train_moe.py --ep 2
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fuser
from fuser.demo import parallel, train_lm
from fuser.demo.corpus import library_corpus
from fuser.demo.parallel import Ranks
from fuser.demo.progress import Progress as Reports

# Steps of the experts that are timed with --cuda-graph, eager and as a graph.
TIMED_STEPS = 50


@dataclass(frozen=True)
class Options(train_lm.Options):
    """The command line; that of the demo, and the experts.

    ``balance`` is the factor of the load-balancing loss, which keeps a router from sending all
    tokens to few experts.
    """

    experts: int = 8
    experts_per_token: int = 2
    balance: float = 0.01
    cuda_graph: bool = False

    @property
    def rows(self) -> int:
        """The rows of experts in a step of one rank: ``experts_per_token`` for each token."""
        return self.batch_size // self.data_ranks * self.context * self.experts_per_token


# -- models -------------------------------------------------------------------


class Mixture(nn.Module):
    """``x`` plus the sum of the outputs of each token's experts, by their probabilities.

    Subclasses compute the experts. An expert is ``down(swiglu(up(x)))``; all of them together
    multiply ``experts_per_token / 2`` times as much as the feed-forward block of the demo.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.width
        self.norm = nn.RMSNorm(width, eps=1e-5, device=options.device)
        self.router = fuser.moe.Router(
            width,
            options.experts,
            options.experts_per_token,
            aux_loss_coefficient=options.balance,
            device=options.device,
        )
        self.auxiliary_loss: torch.Tensor | float = 0.0
        self.load: torch.Tensor | None = None
        """For each expert, the number of this rank's tokens in the last forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, 1)
        routing = self.router(tokens)
        self.auxiliary_loss = routing.load_balancing_loss
        return x + self.mixed(tokens, routing).view_as(x)

    def mixed(self, tokens: torch.Tensor, routing: fuser.moe.Routing) -> torch.Tensor:
        """The output for each token."""
        raise NotImplementedError


class FusedMixture(Mixture):
    """Experts as one pipeline, over rows that are sorted by expert.

    Several ranks can share the experts: then the pipeline also sends tokens to the ranks of their
    experts, and returns their outputs.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.options = options
        self.is_spread = False
        up, down = self.linears(options.experts)
        self.experts = fuser.Sequential(
            OrderedDict(up=up, activation=fuser.ScaledSwiGLU(), down=down)
        )

    def linears(self, count: int) -> tuple[fuser.GroupedLinear, fuser.GroupedLinear]:
        """Both linears of ``count`` experts."""
        width, hidden = self.options.width, 3 * self.options.width // 2
        made: dict[str, Any] = {
            "bias": False,
            "single_grouped_weight": True,
            "device": self.options.device,
        }
        return (
            fuser.GroupedLinear(count, width, 2 * hidden, **made),
            fuser.GroupedLinear(count, hidden, width, **made),
        )

    def spread(self, group: Any) -> None:
        """Keep this rank's part of the experts; all ranks have equal weights before."""
        count = self.options.experts // group.size()
        first = group.get_local_rank() * count
        up, down = self.linears(count)
        pairs: Any = ((up, self.experts.up), (down, self.experts.down))
        with torch.no_grad():
            for part, whole in pairs:
                part.weight.copy_(whole.weight[first : first + count])
        dispatch = fuser.MoeDispatch(self.options.experts, expert_parallel_group=group)
        for index, channel in enumerate(("split sizes", "probs", "rows")):
            dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
        combine = fuser.MoeCombine(expert_parallel_group=group)
        self.experts = fuser.Sequential(
            OrderedDict(
                dispatch=dispatch,
                up=up.set_extra_input_channel(0, "split sizes"),
                activation=fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
                down=down.set_extra_input_channel(0, "split sizes"),
                combine=combine.set_extra_input_channel(0, "rows"),
            )
        )
        self.is_spread = True

    def mixed(self, tokens: torch.Tensor, routing: fuser.moe.Routing) -> torch.Tensor:
        if self.is_spread:
            chosen = routing.expert_indices
            self.load = chosen.flatten().bincount(minlength=self.options.experts)
            return self.experts(tokens, chosen, routing.probs)
        rows = fuser.moe.permute(
            tokens, routing.expert_indices, routing.probs, num_experts=self.router.num_experts
        )
        assert rows.probs is not None
        self.load = rows.split_sizes
        y = self.experts(rows.x, rows.split_sizes, rows.probs, rows.split_sizes)
        return fuser.moe.unpermute(y, rows)


class PlainMixture(Mixture):
    """The same in plain torch, one expert after the other; parameters in the same order."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        width, hidden, count = options.width, 3 * options.width // 2, options.experts
        made: dict[str, Any] = {"device": options.device}
        up = torch.empty(count, 2 * hidden, width, **made)
        down = torch.empty(count, width, hidden, **made)
        self.experts = nn.ParameterList([up, down])

    def mixed(self, tokens: torch.Tensor, routing: fuser.moe.Routing) -> torch.Tensor:
        up, down = self.experts
        indices, probs = routing.expert_indices, routing.probs
        self.load = indices.flatten().bincount(minlength=self.router.num_experts)
        total = torch.zeros(tokens.shape, device=tokens.device)
        for expert in range(self.router.num_experts):
            places, choices = (indices == expert).nonzero(as_tuple=True)
            gate, linear = F.linear(tokens[places], up[expert]).chunk(2, dim=-1)
            scaled = F.silu(gate) * linear * probs[places, choices, None]
            total = total.index_add(0, places, F.linear(scaled, down[expert]).float())
        return total.to(tokens.dtype)


def make_models(options: Options) -> tuple[train_lm.LanguageModel, train_lm.LanguageModel]:
    """The model with fuser's experts, and the one in plain torch, with the same weights."""
    torch.manual_seed(options.seed)
    fused = train_lm.LanguageModel(options, lambda *_: FusedMixture(options))
    plain = train_lm.LanguageModel(options, lambda *_: PlainMixture(options))
    with torch.no_grad():
        for ours, theirs in zip(plain.parameters(), fused.parameters(), strict=True):
            ours.copy_(theirs)
    return fused, plain


# -- load of the experts --------------------------------------------------------


class Progress(Reports):
    """Reports of a run, with the tokens of each expert between two reports.

    ``loads`` has a row for each report: by layer, the share of each expert. ``steps`` has the
    step of each.
    """

    def __init__(
        self, name: str, model: train_lm.LanguageModel, ranks: Ranks = parallel.ALONE
    ) -> None:
        super().__init__(name)
        self.model, self.ranks = model, ranks
        self.loads: list[list[list[float]]] = []
        self.steps: list[int] = []
        self.sums: torch.Tensor | None = None

    def advanced(self, done: float) -> None:
        super().advanced(done)
        blocks: Any = self.model.feed_forward
        found = torch.stack([block.load for block in blocks]).long()
        self.sums = found if self.sums is None else self.sums + found

    def reported(self, step: int, loss: float, rate: float) -> None:
        super().reported(step, loss, rate)
        assert self.sums is not None
        sums = self.ranks.sum(self.sums)
        shares = sums / sums.sum(-1, keepdim=True)
        self.loads.append(shares.tolist())
        self.steps.append(step)
        self.sums = None


def write_loads(out: Path, progress: Progress) -> None:
    """Write ``experts.csv`` and, with matplotlib, ``experts.png``."""
    with (out / "experts.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        experts = range(len(progress.loads[0][0]))
        rows.writerow(["step", "layer", *(f"expert {i}" for i in experts)])
        for step, layers in zip(progress.steps, progress.loads, strict=True):
            rows.writerows([step, i, *shares] for i, shares in enumerate(layers))
    written = ["experts.csv"]
    try:
        draw_loads(out / "experts.png", progress)
        written.append("experts.png")
    except ImportError:
        print("\nNo experts.png: drawing it needs matplotlib; pip install matplotlib.")
    train_lm.print_paths(out, written)


def draw_loads(path: Path, progress: Progress) -> None:
    """Draw the share of each expert over time, a panel for each layer.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    layers, experts = len(progress.loads[0]), len(progress.loads[0][0])
    figure = Figure(figsize=(8, 1.2 + 1.9 * layers), layout="constrained")
    panels = figure.subplots(layers, squeeze=False, sharex=True)[:, 0]
    for layer, panel in enumerate(panels):
        shares = [[100 * row[layer][i] for row in progress.loads] for i in range(experts)]
        names = [f"expert {i}" for i in range(experts)]
        panel.stackplot(progress.steps, shares, labels=names, edgecolor="white", lw=0.4)
        panel.set_ylabel(f"layer {layer}\ntokens (%)")
        panel.set_ylim(0, 100)
        panel.margins(x=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step")
    figure.suptitle("Tokens of each expert")
    handles, names = panels[0].get_legend_handles_labels()
    above: dict[str, Any] = {"loc": "outside right upper", "fontsize": "small", "frameon": False}
    figure.legend(handles[::-1], names[::-1], **above)  # in the order of the areas
    figure.savefig(path, dpi=150)


# -- CUDA graph -------------------------------------------------------------------


def time_graph(model: train_lm.LanguageModel, options: Options) -> tuple[float, float]:
    """Milliseconds of forward and backward of one layer's experts: eager, and as CUDA graphs."""
    block: Any = model.feed_forward[0]
    experts = block.experts
    dtype = train_lm.DTYPES[options.dtype]
    made: dict[str, Any] = {"device": options.device, "requires_grad": True}
    x = torch.randn(options.rows, options.width, dtype=dtype, **made)
    probs = torch.rand(options.rows, **made)
    splits = block.load.clone()
    dy = torch.randn_like(x)

    def timed(call: Any) -> float:
        times: list[float] = []
        for _ in range(TIMED_STEPS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            with options.autocast():
                y = call(x, splits, probs, splits)
            y.backward(dy.to(y.dtype))
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        experts.zero_grad(set_to_none=True)
        return statistics.median(times[TIMED_STEPS // 5 :])

    eager = timed(experts)
    # A graph must not read 16-bit copies of weights that autocast keeps from outside of it.
    is_narrow = dtype is not torch.float32
    with options.autocast(), torch.autocast("cuda", dtype, is_narrow, cache_enabled=False):
        graphed = fuser.make_graphed_callables(experts, (x, splits, probs, splits))
    return eager, timed(graphed)


# -- command line -----------------------------------------------------------------


def plan_of_the_experts(model: train_lm.LanguageModel, options: Options) -> fuser.FusionPlan:
    """The plan of a training step for the experts of one layer, from meta tensors."""
    block: Any = model.feed_forward[0]
    experts: fuser.Sequential = block.experts
    made: dict[str, Any] = {"device": "meta", "requires_grad": True}
    if options.ep > 1:
        tokens = options.rows // options.experts_per_token
        x = torch.empty(tokens, options.width, **made)
        probs = torch.empty(tokens, options.experts_per_token, **made)
        with options.autocast():
            return experts.plan(
                x, torch.empty(probs.shape, dtype=torch.int64, device="meta"), probs
            )
    x = torch.empty(options.rows, options.width, **made)
    probs = torch.empty(options.rows, **made)
    splits = torch.empty(options.experts, dtype=torch.int32, device="meta")
    with options.autocast():
        return experts.plan(x, splits, probs, splits)


def parse(argv: list[str] | None) -> Options:
    """The options. For a bad option argparse prints an error and exits with status 2."""
    default = Options()
    parser = argparse.ArgumentParser(
        prog=Path(__file__).name,
        description="Train a language model with mixtures of experts on Python's own source.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    length = parser.add_mutually_exclusive_group()
    train_lm.add_length(length)
    train_lm.add_training_options(parser, default)
    add = parser.add_argument
    add("--experts", type=int, default=default.experts, help="experts of a layer")
    add("--experts-per-token", type=int, default=default.experts_per_token, help="of them")
    add("--balance", type=float, default=default.balance, help="factor of the balancing loss")
    add("--recipe", choices=tuple(train_lm.RECIPES), default=default.recipe, help="low precision")
    add("--override", choices=train_lm.OVERRIDES, default=default.override, help="of backward")
    parallel.add_options(parser, is_mixture=True)
    add("--cuda-graph", action="store_true", help="time the experts as CUDA graphs; needs a GPU")
    add(
        "--no-compare",
        dest="compare",
        action="store_false",
        default=argparse.SUPPRESS,
        help="skip the plain run",
    )
    given = vars(parser.parse_args(argv))
    if "steps" in given:
        given["seconds"] = None
    options = Options(**given, world=parallel.World.from_environment())
    if options.experts < 1 or not 1 <= options.experts_per_token <= options.experts:
        parser.error(
            f"--experts-per-token is {options.experts_per_token}; it must be 1 to "
            f"--experts {options.experts}."
        )
    if not options.balance >= 0:
        parser.error(f"--balance is {options.balance}; it must not be negative.")
    if options.experts % max(options.ep, 1):
        parser.error(f"--ep {options.ep} does not divide --experts {options.experts}.")
    groups = options.world.size // max(options.ep, 1)
    if options.ep > 1 and options.fsdp != "none" and options.width % groups:
        parser.error(
            f"--width {options.width} does not divide over {groups} ranks with the same experts, "
            "which --fsdp shards by features."
        )
    if options.cuda_graph and options.world.size > 1:
        parser.error(f"--cuda-graph is for one process, and this run has {options.world.size}.")
    if options.cuda_graph and options.device != "cuda":
        parser.error(f"--cuda-graph needs --device cuda; --device is {options.device}.")
    train_lm.checked(parser, options)
    return options


def main(argv: list[str] | None = None) -> int:
    """Train, repeat the first steps without fuser, compare, draw; returns the exit status."""
    started = time.perf_counter()
    with parallel.World.from_environment().one_voice():
        options = parse(argv)
        print(train_lm.Timetable(started, options.seconds))
        corpus = library_corpus(options.context)
    if corpus is None:
        return 1
    with parallel.started(options) as ranks:
        corpus = corpus.to(options.device)
        model, plain = make_models(options)
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{count:,} parameters on {options.device}, "
            f"{options.experts} experts a layer, {options.experts_per_token} for each token; "
            f"{len(corpus.training):,} bytes to train on and {len(corpus.validation):,} held out, "
            f"from {corpus.root}.\n"
        )
        ranks.parallelize(model)
        plan = plan_of_the_experts(model, options)
        print(f"The experts of one layer in training:\n{plan}")
        ranks.shard(model)
        print(ranks.described(model, count), end="")

        table = train_lm.Timetable(started, options.seconds, ranks)
        progress = Progress("fuser", model, ranks)
        trained = table.for_training(options)
        runs = [train_lm.train("fuser", model, corpus, trained, progress, ranks=ranks)]
        runs += train_lm.repeated(runs[0], plain, corpus, options, table)

        train_lm.print_results(runs, plan, options)
        last = progress.loads[-1]
        print("\nExperts with the most and the fewest tokens at the end, in % of all:")
        for layer, shares in enumerate(last):
            print(f"  layer {layer}   {100 * max(shares):.1f} and {100 * min(shares):.1f}")
        if options.cuda_graph:
            eager, graph = time_graph(model, options)
            print(
                f"\nForward and backward of the experts of a layer: {eager:.3f} ms launched, "
                f"{graph:.3f} ms as CUDA graphs; {eager / graph:.2f}x."
            )
        if ranks.is_first:
            train_lm.write_results(options.out, runs, plan)
            write_loads(options.out, progress)
        print(table.taken())
    return 0


if __name__ == "__main__":
    sys.exit(main())
