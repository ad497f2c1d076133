"""Train a byte-level language model whose feed-forward blocks are fuser pipelines.

The text is the source of the Python standard library, which every machine has.
The demo takes a minute, or ``--seconds``. It trains for most of this time. Then it
repeats the first steps with plain torch modules, from the same weights and on the
same batches, and compares the losses of the two runs.

    python -m fuser demo
    python -m fuser demo --seconds 30
    python -m fuser demo --device cuda --dtype bfloat16 --width 1024 --heads 16
    torchrun --nproc-per-node 2 -m fuser demo --fsdp quantized --recipe mxfp8
    torchrun --nproc-per-node 2 -m fuser demo --tp 2 --sp
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fuser
from fuser.demo import checkpoints, parallel
from fuser.demo.corpus import Batch, Corpus, library_corpus, windows
from fuser.demo.parallel import Ranks
from fuser.demo.progress import Progress, Reporter
from fuser.report.text import format_bytes

VOCABULARY = 256
VALIDATION_BATCHES = 16
# Number of reports of the training loss in a run; every second report validates.
REPORTS = 20
REPORTS_PER_VALIDATION = 2

# The time of all, unless the command line gives one or gives the steps.
SECONDS = 60.0
# Parts of it at whose ends the training, the text and the plain run are over; pictures are drawn
# in the rest. A machine with two free cores samples and compares in less.
TRAINED, SAMPLED, COMPARED = 0.75, 0.83, 0.95
# The learning rate rises over this part of the training.
WARMUP = 0.1
# Later the losses of two runs differ because training magnifies rounding.
COMPARED_STEPS = 100
# On a GPU the plain run takes at least this part of the steps, to measure its speed.
SPEED_PART = 0.2

RECIPES = {"none": None, **fuser.recipe.NAMES}
OVERRIDES = ("none", *fuser.recipe.BACKWARD_OVERRIDES)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Options(parallel.RankOptions):
    """The command line. ``dtype`` is that of torch's autocast; parameters are float32.

    A run takes ``steps`` or, if ``seconds`` is given, the steps and validations
    that fit into this time; :class:`Timetable` divides the time of all. ``recipe``
    quantizes the linears of the feed-forward blocks in training and validation;
    sampling, whose windows have any length, is not quantized.
    """

    steps: int = 1000
    seconds: float | None = None
    layers: int = 3
    width: int = 160
    heads: int = 5
    context: int = 128
    batch_size: int = 8
    learning_rate: float = 2e-3
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    recipe: str = "none"
    override: str = "none"
    out: Path = Path("out")
    compile: bool = False
    compare: bool = True
    prompt: str = "def "
    temperature: float = 0.5
    top_k: int = 20
    sample_bytes: int = 400

    @property
    def compute_dtype(self) -> torch.dtype:
        """That of torch's autocast."""
        return DTYPES[self.dtype]

    def make_recipe(self) -> fuser.recipe.Recipe | None:
        """The recipe with its override."""
        make_recipe = RECIPES[self.recipe]
        override: dict[str, Any] = (
            {} if self.override == "none" else {"backward_override": self.override}
        )
        return None if make_recipe is None else make_recipe(**override)

    def autocast(self, is_quantized: bool = True) -> contextlib.ExitStack:
        """The context manager in which the model runs."""
        stack, dtype = contextlib.ExitStack(), self.compute_dtype
        stack.enter_context(torch.autocast(self.device, dtype, enabled=dtype is not torch.float32))
        recipe = self.make_recipe()
        if recipe is not None and is_quantized:
            stack.enter_context(fuser.autocast(recipe=recipe))
        return stack


# -- model --------------------------------------------------------------------


def fused_feed_forward(width: int, hidden: int, device: str) -> nn.Module:
    """``x + down(swiglu(up(rmsnorm(x))))`` as one pipeline.

    The first op exposes x on the channel "residual" and the last one adds it
    back, so the planner sees the residual connection too.
    """
    fork, join = fuser.MakeExtraOutput(), fuser.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join.set_extra_input_channel(0, "residual")
    return fuser.Sequential(
        fork,
        fuser.RMSNorm(width, device=device),
        fuser.Linear(width, 2 * hidden, device=device),
        fuser.SwiGLU(),
        fuser.Linear(hidden, width, device=device),
        join,
    )


class PlainFeedForward(nn.Module):
    """The same block in plain torch modules, with the parameters in the same order."""

    def __init__(self, width: int, hidden: int, device: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5, device=device)
        self.up = nn.Linear(width, 2 * hidden, device=device)
        self.down = nn.Linear(hidden, width, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, linear = self.up(self.norm(x)).chunk(2, dim=-1)
        y: torch.Tensor = x + self.down(F.silu(gate) * linear)
        return y


class AttentionBlock(nn.Module):
    """Causal self-attention with its norm and residual connection."""

    def __init__(self, width: int, heads: int, device: str) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width, eps=1e-5, device=device)
        self.qkv = nn.Linear(width, 3 * width, bias=False, device=device)
        self.out = nn.Linear(width, width, bias=False, device=device)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        split = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, head, length, size]
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: torch.Tensor = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return y


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021) of ``x``: ``[..., length, size]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class LanguageModel(nn.Module):
    """A decoder-only transformer over bytes: ``[batch, length]`` to logits for the next byte.

    ``feed_forward(width, hidden, device)`` makes the feed-forward block of each layer.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, options: Options, feed_forward: Callable[[int, int, str], nn.Module]
    ) -> None:
        super().__init__()
        width, device, layers = options.width, options.device, range(options.layers)
        self.embedding = nn.Embedding(VOCABULARY, width, device=device)
        self.attention = nn.ModuleList(AttentionBlock(width, options.heads, device) for _ in layers)
        self.feed_forward = nn.ModuleList(feed_forward(width, 3 * width, device) for _ in layers)
        self.norm = nn.RMSNorm(width, eps=1e-5, device=device)
        self.head = nn.Linear(width, VOCABULARY, bias=False, device=device)

        pairs = width // options.heads // 2
        frequencies = 1000.0 ** (-torch.arange(pairs, device=device) / pairs)
        angles = torch.arange(options.context, device=device)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[-1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(text)
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x = feed_forward(attention(x, cos, sin))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def auxiliary_loss(self) -> torch.Tensor | float:
        """The losses of the feed-forward blocks in the last forward, such as for their balance."""
        return sum(getattr(block, "auxiliary_loss", 0.0) for block in self.feed_forward)


def make_models(options: Options) -> tuple[LanguageModel, LanguageModel]:
    """The model with fuser pipelines, and the plain torch model, with the same initial weights."""
    torch.manual_seed(options.seed)
    fused = LanguageModel(options, fused_feed_forward)
    plain = LanguageModel(options, PlainFeedForward)
    with torch.no_grad():
        for ours, theirs in zip(plain.parameters(), fused.parameters(), strict=True):
            ours.copy_(theirs)
    return fused, plain


# -- training -----------------------------------------------------------------


def training_batches(
    text: torch.Tensor, options: Options, ranks: Ranks = parallel.ALONE, first: int = 1
) -> Iterator[tuple[int, Batch]]:
    """Steps from ``first`` on, without end, and this rank's part of their batches.

    Batches are at random places, the same for the same seed.
    """
    generator = torch.Generator().manual_seed(options.seed)
    for step in itertools.count(1):
        starts = torch.randint(
            len(text) - options.context, (options.batch_size,), generator=generator
        )
        if step >= first:
            yield step, windows(text, ranks.part(starts), options.context)


@dataclass
class Run:
    """Measurements of one training run; losses are in nats per byte.

    ``losses`` and ``learning_rates`` have one entry per step. ``validation`` maps the
    number of steps to a loss, and is empty in the comparison run. ``rates`` has the
    tokens per second of each report, of all ranks together. ``start`` is the number of
    steps before the first, of a run that goes on with another. ``traffic`` has the bytes
    that a rank gives to collectives in the first step, by kind.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    start: int = 0
    traffic: Counter[str] = field(default_factory=Counter)

    @property
    def steps(self) -> range:
        """The numbers of the steps, from 1."""
        return range(self.start + 1, self.start + len(self.losses) + 1)

    @property
    def tokens_per_second(self) -> float:
        """The speed of the fastest report, because other programs can only slow a report down."""
        return max(self.rates)


@dataclass(frozen=True)
class Timetable:
    """When the parts of a demo end, which began at ``started`` and takes ``seconds`` in all.

    ``started`` is a value of ``time.perf_counter``. Without ``seconds`` no part has an end.
    """

    started: float
    seconds: float | None
    ranks: Ranks = parallel.ALONE

    def left(self, part: float) -> float:
        """The seconds until this part of the time is over, the same on all ranks."""
        if self.seconds is None:
            return math.inf
        passed = self.ranks.agreed(time.perf_counter() - self.started)
        return part * self.seconds - passed

    def for_training(self, options: Options) -> Options:
        """``options`` with the time that the training has."""
        if self.seconds is None:
            return options
        # Also if the imports took longer than that.
        return replace(options, seconds=max(self.left(TRAINED), 0.1 * self.seconds))

    def __str__(self) -> str:
        if self.seconds is None:
            return "As long as --steps take: reports say how much time is left.\n"
        return (
            f"This takes {self.seconds:.0f} s: training until second "
            f"{TRAINED * self.seconds:.0f}, then the first steps in plain torch, and files.\n"
        )

    def taken(self) -> str:
        """A sentence on the time from the start to now."""
        return f"\nThis took {time.perf_counter() - self.started:.0f} s."


class Schedule:
    """The schedule of a run: the part that is done after a step, and the learning rates."""

    reports = REPORTS

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        self.started = time.perf_counter()

    def done(self, step: int) -> float:
        """The part of the run that is done after ``step`` steps, or by now; 1 ends it."""
        if self.options.seconds is None:
            return step / self.options.steps
        passed = self.ranks.agreed(time.perf_counter() - self.started)
        return min(1.0, passed / self.options.seconds)

    def learning_rate(self, step: int) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.done(step), self.options)


class FirstSteps(Schedule):
    """A schedule that repeats the first learning rates of another run, while there is time."""

    # A report covers as many steps as in a run of which these steps are SPEED_PART.
    reports = math.ceil(SPEED_PART * REPORTS)

    def __init__(self, learning_rates: Sequence[float], table: Timetable | None) -> None:
        self.learning_rates, self.table = learning_rates, table

    def done(self, step: int) -> float:
        if self.table is not None and self.table.left(COMPARED) <= 0:
            return 1.0
        return step / len(self.learning_rates)

    def learning_rate(self, step: int) -> float:
        return self.learning_rates[step - 1]


def train(
    name: str,
    model: LanguageModel,
    corpus: Corpus,
    options: Options,
    progress: Reporter | None = None,
    learning_rates: Sequence[float] | None = None,
    ranks: Ranks = parallel.ALONE,
    table: Timetable | None = None,
) -> Run:
    """Train ``model`` in place, with reports to ``progress``, by default a :class:`Progress`.

    With ``learning_rates`` of another run it repeats the first steps of that run, one
    for each rate or as many as ``table`` has time for, without validation and checkpoints.
    """
    run = Run(name)
    progress = progress or Progress(name)
    trained = ranks.trained(model)
    if options.compile:  # validation and samples, whose windows have other lengths, run as they are
        compiled: Any = torch.compile(trained, dynamic=False)
        trained = compiled
    optimizer = make_optimizer(model, options)
    if options.resume is not None and learning_rates is None:
        run.start = checkpoints.load(options.resume, model, optimizer, ranks)
    # float16 gradients underflow unless the loss is scaled up.
    scaler = torch.amp.GradScaler(options.device, enabled=options.dtype == "float16")
    schedule = (
        Schedule(options, ranks) if learning_rates is None else FirstSteps(learning_rates, table)
    )

    def validate(step: int) -> None:
        if learning_rates is None:
            run.validation[step] = validation_loss(model, corpus.validation, options, ranks)
            progress.validated(step, run.validation[step])

    validate(run.start)
    losses: list[torch.Tensor] = []
    reported = 0
    started = time.perf_counter()
    for step, batch in training_batches(corpus.training, options, ranks, run.start + 1):
        run.learning_rates.append(schedule.learning_rate(step))
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rates[-1]
        with ranks.counting(run.traffic if step == run.start + 1 else None):
            losses.append(training_step(trained, model, batch, optimizer, scaler, options, ranks))
        done = schedule.done(step)
        progress.advanced(done)
        # A division may round down what should be a whole number.
        part = int(done * schedule.reports + 1e-9)
        if part == reported:
            continue
        reported, is_over = part, part == schedule.reports
        # Reading losses waits for the device, so it happens once per report.
        run.losses += ranks.mean(torch.stack(losses)).tolist()
        seconds = time.perf_counter() - started
        run.rates.append(len(losses) * batch[0].numel() * ranks.size / seconds)
        progress.reported(step, statistics.fmean(run.losses[-len(losses) :]), run.rates[-1])
        losses.clear()
        if is_over or len(run.rates) % REPORTS_PER_VALIDATION == 0:
            validate(step)
            if options.checkpoint is not None and learning_rates is None:
                checkpoints.save(options.checkpoint, step, model, optimizer, ranks)
        if is_over:
            break
        started = time.perf_counter()
    progress.close()
    return run


def training_step(
    trained: nn.Module,
    model: LanguageModel,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    options: Options,
    ranks: Ranks,
) -> torch.Tensor:
    """Forward, backward and clipped update; returns the loss of the text, on its device.

    ``trained`` is ``model``, or what :meth:`Ranks.shard` wraps it in.
    """
    with options.autocast():
        loss = next_byte_loss(trained, batch)
    scaler.scale(loss + model.auxiliary_loss()).backward()
    scaler.unscale_(optimizer)
    ranks.clip_gradients(model, max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach()


def next_byte_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats per byte, in float32 under autocast too."""
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": some, "weight_decay": decay}
        for parameters, decay in ((matrices, 0.1), (vectors, 0.0))
        for some in parallel.alike(parameters)
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(done: float, options: Options) -> float:
    """Linear warmup over a tenth of the training, then a cosine down to a tenth of the peak.

    ``done`` is the part of the training that is over. It is more than 0 at the first
    step too, so that this step has a learning rate.
    """
    done = max(done, WARMUP / 100)
    if done <= WARMUP:
        return options.learning_rate * done / WARMUP
    return options.learning_rate * (
        0.55 + 0.45 * math.cos(math.pi * (done - WARMUP) / (1 - WARMUP))
    )


@torch.no_grad()
def validation_loss(
    model: nn.Module, text: torch.Tensor, options: Options, ranks: Ranks = parallel.ALONE
) -> float:
    """Mean loss in nats per byte over windows spread evenly over the held-out text."""
    count = VALIDATION_BATCHES * options.batch_size
    last = len(text) - options.context - 1
    starts = torch.arange(count) * last // count
    losses = []
    for part in starts.split(options.batch_size):
        with options.autocast():
            batch = windows(text, ranks.part(part), options.context)
            losses.append(next_byte_loss(model, batch))
    return ranks.mean(torch.stack(losses).mean()).item()


# -- sampling -----------------------------------------------------------------


@torch.inference_mode()
def sample(model: nn.Module, options: Options, table: Timetable | None = None) -> bytes:
    """The prompt, continued by ``options.sample_bytes`` bytes sampled from the model.

    There are fewer if the time that ``table`` has for them is over. Each is sampled from
    the ``top_k`` likeliest bytes at ``temperature``; at temperature 0 it is the likeliest.
    """
    generator = torch.Generator().manual_seed(options.seed)
    text = list(options.prompt.encode(errors="surrogateescape"))
    for _ in range(options.sample_bytes):
        if table is not None and table.left(SAMPLED) <= 0:
            break
        window = torch.tensor([text[-options.context :]], device=options.device)
        with options.autocast(is_quantized=False):
            logits = model(window)[0, -1].float().cpu()
        values, candidates = logits.topk(min(options.top_k, VOCABULARY))
        if options.temperature == 0:
            text.append(int(candidates[0]))
            continue
        chances = torch.softmax(values / options.temperature, dim=-1)
        text.append(int(candidates[torch.multinomial(chances, 1, generator=generator)]))
    return bytes(text)


# -- results ------------------------------------------------------------------


def plan_of_one_block(model: LanguageModel, options: Options) -> fuser.FusionPlan:
    """The plan of a training step for one feed-forward block, from a meta tensor."""
    shape = (options.batch_size // options.data_ranks, options.context, options.width)
    block: Any = model.feed_forward[0]
    with options.autocast():
        plan: fuser.FusionPlan = block.plan(torch.empty(shape, device="meta", requires_grad=True))
    return plan


def loss_differences(runs: Sequence[Run]) -> list[float]:
    """The difference of the training losses of two runs, at each step of both."""
    fused, plain = runs
    return [abs(a - b) for a, b in zip(fused.losses, plain.losses, strict=False)]


def print_results(runs: Sequence[Run], plan: fuser.FusionPlan, options: Options) -> None:
    """Print the result of the run, the savings of the plan and the difference of two runs."""
    before, *_, after = runs[0].validation.values()
    print(
        f"\nResults of {counted(len(runs[0].losses), 'step')} with fuser blocks\n"
        f"  validation loss   {before:.4f} nats/byte before, {after:.4f} after "
        f"({after / math.log(2):.4f} bits/byte)"
    )
    for side in ("forward", "backward"):
        fused, unfused = plan.steps(side), plan.steps(side, fused=False)
        print(
            f"  {f'{side} plan':<17} {counted(len(fused), 'step')} instead of {len(unfused)}, "
            f"{bytes_moved(fused)} a token and block instead of {bytes_moved(unfused)}"
        )
    if options.world.size > 1:
        print(
            f"  {options.world.size} ranks           "
            f"{runs[0].tokens_per_second:,.0f} tokens/s together, in the fastest report\n"
            f"  sent in a step    {parallel.listed(runs[0].traffic)}, by one rank"
        )
    if len(runs) == 2:
        print_comparison(runs)
    if options.device == "cpu":
        print(
            "\nA CPU shows the losses and the plan, not the speed: fuser's kernels are for GPUs, "
            "and here\ntorch does their work. With --device cuda the speed is compared too."
        )
    elif len(runs) == 2:
        fused_rate, plain_rate = (run.tokens_per_second for run in runs)
        print(
            f"\nSpeed on {torch.cuda.get_device_name()}: fuser {fused_rate:,.0f} tokens/s, plain "
            f"{plain_rate:,.0f}; {fused_rate / plain_rate:.2f}x."
        )


def bytes_moved(steps: Iterable[fuser.Step]) -> str:
    """The bytes per token that the steps of a plan move through memory, as text."""
    return format_bytes(sum(step.bytes_per_token for step in steps))


def counted(count: int, noun: str) -> str:
    """``1 step`` or ``2 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_comparison(runs: Sequence[Run]) -> None:
    """Sentences on the difference of two runs' training losses, and its reason."""
    differences = loss_differences(runs)
    largest, count = max(differences), len(differences)
    rounding = torch.finfo(torch.float32).eps * max(runs[1].losses)
    print(
        f"\nThe first {counted(count, 'step')} with plain torch blocks, from the same weights on "
        "the same batches\n"
        f"  largest difference of the training losses: {largest:.1e} nats/byte, at step "
        f"{differences.index(largest) + 1}\n"
        f"  (float32 rounds a loss by up to {rounding / 2:.1e}; the two runs round in different "
        "places, a --recipe\n  quantizes the first one, and training magnifies what differs)"
    )


def write_results(out: Path, runs: Sequence[Run], plan: fuser.FusionPlan) -> None:
    """Write ``losses.csv`` and, with matplotlib, ``loss.png`` and ``plan.svg``."""
    write_losses(out / "losses.csv", runs)
    written = ["losses.csv"]
    try:
        draw_losses(out / "loss.png", runs)
        plan.draw(out / "plan.svg")
        written += ["loss.png", "plan.svg"]
    except ImportError:
        print("\nNo loss.png and plan.svg: they need matplotlib; pip install matplotlib.")
    print_paths(out, written)


def print_paths(out: Path, names: Iterable[str]) -> None:
    """Print where files were written, a line each."""
    print("\nWritten:")
    for name in names:
        print(f"  {out / name}")


def write_losses(path: Path, runs: Sequence[Run]) -> None:
    """Write the training losses as CSV: a column per run, empty after its last step."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", *(run.name for run in runs)])
        losses = zip_longest(*(run.losses for run in runs), fillvalue="")
        rows.writerows([step, *row] for step, row in enumerate(losses, start=runs[0].start + 1))


def draw_losses(path: Path, runs: Sequence[Run]) -> None:
    """Draw training and validation loss by step and, for two runs, their difference below.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4 + len(runs)), layout="constrained")
    heights = [3, 1][: len(runs)]
    panels = figure.subplots(len(runs), squeeze=False, height_ratios=heights)[:, 0]
    losses, run = panels[0], runs[0]
    # The second run is drawn dashed on the first one, with which it agrees.
    for one, color, style in zip(runs, ("tab:blue", "tab:red"), ("-", "--"), strict=False):
        mean = smoothed(one.losses, span=smoothing_span(run.losses))
        label = f"{one.name}, {counted(len(one.losses), 'step')}, smoothed"
        losses.plot(one.steps, one.losses, color=color, lw=0.5, alpha=0.3)
        losses.plot(one.steps, mean, color=color, ls=style, label=label)
    losses.plot(
        list(run.validation),
        list(run.validation.values()),
        "o",
        color="tab:blue",
        label=f"{run.name}, validation",
    )
    figure.suptitle("Byte-level language model of the Python standard library")
    losses.set_ylabel("loss (nats/byte)")
    # Above the panels, so that it covers no curve.
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False}
    losses.legend(ncols=1 + len(runs), fontsize="small", **above)
    bits = losses.secondary_yaxis(
        "right", functions=(lambda x: x / math.log(2), lambda x: x * math.log(2))
    )
    bits.set_ylabel("bits/byte")
    bits.spines.right.set_visible(False)
    if len(runs) == 2:
        differences = loss_differences(runs)
        first = range(1, len(differences) + 1)
        panels[1].plot(first, differences, ".", color="gray", ms=3, label="each step")
        largest = list(accumulate(differences, max))
        panels[1].plot(first, largest, color="black", lw=1, label="largest so far")
        if largest[-1] > 0:
            panels[1].set_yscale("log")
        panels[1].set_ylabel("difference\n(nats/byte)")
        panels[1].legend(ncols=2, fontsize="small", **above)
    for panel in panels:
        panel.set_xlabel("step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def smoothing_span(losses: Sequence[float], parts: int = 100) -> int:
    """The steps on each side of one that its mean has: one of this many parts of all."""
    return math.ceil(len(losses) / parts)


def smoothed(losses: Sequence[float], span: int) -> list[float]:
    """The mean of the losses of each step and ``span`` steps on each side of it."""
    return [statistics.fmean(losses[max(0, i - span) : i + span + 1]) for i in range(len(losses))]


# -- command line -------------------------------------------------------------


def parse(argv: list[str] | None) -> Options:
    """The options. For a bad option argparse prints an error and exits with status 2."""
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m fuser demo",
        description="Train a language model out of fuser pipelines on Python's own source.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    length = parser.add_mutually_exclusive_group()
    add_length(length)
    add_training_options(parser, default)
    add = parser.add_argument
    add("--recipe", choices=tuple(RECIPES), default=default.recipe, help="low precision")
    add("--override", choices=OVERRIDES, default=default.override, help="how backward runs then")
    add("--compile", action="store_true", help="compile training steps by torch.compile")
    add(
        "--no-compare",
        dest="compare",
        action="store_false",
        default=argparse.SUPPRESS,  # this action has no default in its help
        help="skip the plain run",
    )
    parallel.add_options(parser, is_mixture=False)
    add("--prompt", default=default.prompt, help="start of the sampled text")
    add("--temperature", type=float, default=default.temperature, help="of sampling")
    add("--top-k", type=int, default=default.top_k, help="sample among so many bytes")
    add("--sample-bytes", type=int, default=default.sample_bytes, help="bytes to sample")
    given = vars(parser.parse_args(argv))
    if "steps" in given:
        given["seconds"] = None
    return checked(parser, Options(**given, world=parallel.World.from_environment()))


def add_length(length: Any) -> None:
    """Add the options of the time or the steps to a group of options that exclude each other."""
    length.add_argument("--seconds", type=float, default=SECONDS, help="time of all that it does")
    length.add_argument(
        "--steps", type=int, default=argparse.SUPPRESS, help="training steps, in place of a time"
    )


def add_training_options(parser: argparse.ArgumentParser, default: Options) -> None:
    """Add the options of every training run except its length: sizes, device, output folder."""
    add = parser.add_argument
    add("--layers", type=int, default=default.layers, help="transformer layers")
    add("--width", type=int, default=default.width, help="features of the residual stream")
    add("--heads", type=int, default=default.heads, help="attention heads")
    add("--context", type=int, default=default.context, help="bytes the model sees at once")
    add("--batch-size", type=int, default=default.batch_size, help="windows a step")
    add("--learning-rate", type=float, default=default.learning_rate, help="its peak")
    add("--seed", type=int, default=default.seed, help="of weights, batches and sampling")
    add("--device", choices=("cpu", "cuda"), default=default.device, help="where to train")
    add("--dtype", choices=tuple(DTYPES), default=default.dtype, help="of torch's autocast")
    add("--out", type=Path, metavar="DIR", default=default.out, help="where results go")


def checked(parser: argparse.ArgumentParser, options: Options) -> Options:
    """``options``, after making their folder; the parser refuses bad options."""
    for find_problem in (problem_with, parallel.problem_with, checkpoints.problem_with):
        if problem := find_problem(options):
            parser.error(problem)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} is no folder and cannot become one: {error.strerror}.")
    return options


def problem_with(options: Options) -> str | None:
    """An error message if options do not fit, otherwise None."""
    for name in ("steps", "layers", "width", "heads", "context", "batch_size", "top_k"):
        value = getattr(options, name)
        if value < 1:
            return f"--{name.replace('_', '-')} is {value}; it must be at least 1."
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        return f"--seconds is {options.seconds:g}; it must be positive and finite."
    size, left_over = divmod(options.width, options.heads)
    if left_over or size % 2:
        return (
            f"--width {options.width} does not give each of --heads {options.heads} "
            "the same even number of features."
        )
    if not 0 < options.learning_rate < math.inf:
        return f"--learning-rate is {options.learning_rate}; it must be positive and finite."
    if not 0 <= options.temperature < math.inf:
        return f"--temperature is {options.temperature}; it must be finite and not negative."
    if options.sample_bytes < 0:
        return f"--sample-bytes is {options.sample_bytes}; it must not be negative."
    if not -(2**63) <= options.seed < 2**64:
        return f"--seed is {options.seed}; it must fit into 64 bits."
    if not options.prompt:
        return "--prompt is empty; the model continues at least one byte."
    if options.override != "none" and options.recipe in ("none", "delayed"):
        return f"--override {options.override} does not go with --recipe {options.recipe}."
    if options.device == "cuda" and not torch.cuda.is_available():
        return "--device is cuda, but torch sees no CUDA device."
    return None


def main(argv: list[str] | None = None, started: float | None = None) -> int:
    """Train, sample, repeat the first steps without fuser, compare; returns the exit status.

    ``started`` is the value that ``time.perf_counter`` had when the demo began, by default now.
    """
    started = time.perf_counter() if started is None else started
    with parallel.World.from_environment().one_voice():
        options = parse(argv)
        print(Timetable(started, options.seconds))
        corpus = library_corpus(options.context)
    if corpus is None:
        return 1
    with parallel.started(options) as ranks:
        corpus = corpus.to(options.device)
        model, plain = make_models(options)
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{count:,} parameters on {options.device}; "
            f"{len(corpus.training):,} bytes to train on and {len(corpus.validation):,} held out, "
            f"from {corpus.root}.\n"
        )
        ranks.parallelize(model)
        plan = plan_of_one_block(model, options)
        print(f"One feed-forward block in training:\n{plan}")
        ranks.shard(model)
        print(ranks.described(model, count), end="")

        table = Timetable(started, options.seconds, ranks)
        runs = [train("fuser", model, corpus, table.for_training(options), ranks=ranks)]
        text = sample(model, options, table)
        count = len(text) - len(options.prompt.encode(errors="surrogateescape"))
        print(f"\nThe model continues {options.prompt!r} by {counted(count, 'byte')}:\n")
        print(text.decode(errors="replace"))
        runs += repeated(runs[0], plain, corpus, options, table)

        print_results(runs, plan, options)
        if ranks.is_first:
            write_results(options.out, runs, plan)
        print(table.taken())
    return 0


def repeated(
    run: Run, plain: LanguageModel, corpus: Corpus, options: Options, table: Timetable
) -> list[Run]:
    """The first steps of ``run`` again, with plain torch blocks; empty if they are not compared."""
    if not options.compare:
        return []
    if run.start:
        print(f"\nNo run with plain torch blocks: this run went on after step {run.start}.")
        return []
    table.ranks.shard(plain)
    rates = run.learning_rates[: compared_steps(len(run.losses), options)]
    how: dict[str, Any] = {"ranks": table.ranks, "table": table}
    return [train("plain", plain, corpus, options, learning_rates=rates, **how)]


def compared_steps(steps: int, options: Options) -> int:
    """The number of steps in plain torch: few for the losses, more to measure a GPU's speed."""
    needed = COMPARED_STEPS
    if options.device != "cpu":
        needed = max(needed, math.ceil(SPEED_PART * steps))
    return min(steps, needed)
