"""Training on several GPUs: steps under FSDP2, and a tensor and sequence parallel MLP.

`fsdp`: 8 blocks RMSNorm-Linear-SwiGLU-Linear-add, each a unit of `fully_shard`, forward and
backward, and with a step of SGD. Variants: bf16 parameters in torch (eager, compiled) and in fuser;
quantized parameters; bf16 parameters whose shards are quantized before they are gathered, in fuser
and in torchao. `llama`: the plain model of llama_layers.py, each layer a unit, with torch's fused
AdamW; in torch, eager and compiled, and converted by fuser, its weights gathered in bf16 or
quantized. `tp`: Linear-GELU-Linear, column and row parallel with sequence parallel rows, in fuser
and in torch's DTensor. Each rank has the tokens of one GPU (`fsdp`, `llama`) or its part of them
(`tp`). Variants run alternately (timing.py), on the same ranks; times are those of the slowest
rank. On a CPU sizes are small, to try the script.

    torchrun --nproc-per-node 2 benchmarks/sharded.py --out out/sharded.csv
    torchrun --nproc-per-node 2 benchmarks/sharded.py --cases tp
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import llama_layers
import torch
import torch.distributed as dist
from evidence import Sink, provenance, say
from options import new_parser, parsed
from peers import library
from pipelines import BF16, BLOCKS, RECIPES, Context, Sizes, SwiGLUBlock
from timing import Call, Failure, Result, Timing, clock, measure
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fuser
import fuser.recipe

SIZES = {"cuda": (8192, 4096, 14336), "cpu": (128, 256, 512)}
LAYERS = {"cuda": 8, "cpu": 2}
CASES = ("fsdp", "llama", "tp")
USUAL = ("current", "delayed", "128-block", "mxfp8")
SWIGLU = BLOCKS["swiglu"]


@dataclass(frozen=True)
class Variant:
    """A way to train: its name, and a model on this rank with the context of its forward.

    ``after_step`` is called with the model after each step of the optimizer.
    """

    name: str
    make: Callable[[], tuple[torch.nn.Module, Context]]
    after_step: Callable[[torch.nn.Module], object] | None = None
    reads_text: bool = False
    """Whether the model takes bytes of a text and returns the loss."""


@dataclass(frozen=True)
class Run:
    """The settings that all variants of a run share."""

    sizes: Sizes
    layers: int
    mesh: DeviceMesh
    recipes: tuple[str, ...]
    is_compiled: bool

    @property
    def device(self) -> str:
        return self.mesh.device_type

    @property
    def text_sizes(self) -> llama_layers.Sizes:
        """Of the model that takes text."""
        return dataclasses.replace(llama_layers.SIZES[self.device], layers=self.layers)

    @property
    def options(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": torch.bfloat16}


def autocast(name: str) -> Context:
    """The context of a forward in bf16 or under a recipe."""
    if name == BF16:
        return contextlib.nullcontext
    return functools.partial(fuser.autocast, recipe=recipe_of(name))


def recipe_of(name: str) -> fuser.recipe.Recipe:
    recipe: fuser.recipe.Recipe = getattr(fuser.recipe, RECIPES[name])()
    return recipe


# -- FSDP2 ----------------------------------------------------------------------


def sharded(run: Run, blocks: list[torch.nn.Module]) -> torch.nn.Module:
    """A stack of blocks under FSDP2, each a unit."""
    for block in blocks:
        fully_shard(block, mesh=run.mesh)
    model = torch.nn.Sequential(*blocks)
    fully_shard(model, mesh=run.mesh)
    return model


def fsdp_in_torch(run: Run, *, is_compiled: bool) -> tuple[torch.nn.Module, Context]:
    blocks: list[torch.nn.Module] = [SwiGLUBlock(run.sizes, run.options) for _ in range(run.layers)]
    for block in blocks if is_compiled else ():
        block.compile(dynamic=False)
    return sharded(run, blocks), contextlib.nullcontext


def fsdp_in_fuser(run: Run, name: str, weights: str) -> tuple[torch.nn.Module, Context]:
    """Blocks with shards in bf16, ``"quantized"``, or quantized when they are ``"gathered"``."""
    is_quantized = weights == "quantized"
    recipe = recipe_of(name) if is_quantized else None
    with fuser.quantized_model_init(enabled=is_quantized, recipe=recipe):
        blocks = [SWIGLU.as_ops(fuser, run.sizes, run.options) for _ in range(run.layers)]
    if weights == "gathered":
        for block in blocks:
            fuser.distributed.gather_quantized(block, recipe_of(name))
    return sharded(run, blocks), autocast(name)


def fsdp_in_torchao(run: Run) -> tuple[torch.nn.Module, Context]:
    """torchao's FP8 linears, whose shards are quantized before they are gathered; compiled."""
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    blocks: list[torch.nn.Module] = []
    for _ in range(run.layers):
        block = float8.convert_to_float8_training(
            SwiGLUBlock(run.sizes, run.options), config=config
        )
        if run.is_compiled:
            block.compile(dynamic=False)
        blocks.append(block)
    return sharded(run, blocks), contextlib.nullcontext


def fsdp_variants(run: Run) -> Iterator[Variant]:
    in_torch = functools.partial(fsdp_in_torch, run)
    yield Variant("torch bf16", functools.partial(in_torch, is_compiled=False))
    if run.is_compiled:
        yield Variant("torch.compile bf16", functools.partial(in_torch, is_compiled=True))
    yield Variant("fuser bf16", functools.partial(fsdp_in_fuser, run, BF16, "bf16"))
    for name in run.recipes:
        for weights in ("bf16", "quantized", "gathered"):
            if (name, weights) != ("delayed", "gathered"):  # refused
                make = functools.partial(fsdp_in_fuser, run, name, weights)
                yield Variant(f"fuser {name}, {weights} weights", make)
    if library("torchao"):
        float8 = importlib.import_module("torchao.float8")
        yield Variant(
            "torchao current, gathered weights",
            functools.partial(fsdp_in_torchao, run),
            float8.precompute_float8_dynamic_scale_for_fsdp,
        )


# -- a model under FSDP2 ---------------------------------------------------------


def llama(run: Run, name: str, how: str, *, is_compiled: bool) -> tuple[torch.nn.Module, Context]:
    """The model in torch (``"plain"``), or converted, its weights gathered in bf16 or quantized."""
    model: Any = llama_layers.plain(run.text_sizes, run.device)
    if how != "plain":
        fuser.convert(model, linears="all", keep=("head",))
    if how == "gathered":
        fuser.distributed.gather_quantized(model.layers, recipe_of(name))
    for layer in model.layers if is_compiled else ():
        layer.compile(dynamic=False)
    for layer in model.layers:
        fully_shard(layer, mesh=run.mesh)
    fully_shard(model, mesh=run.mesh)
    return model, autocast(name)


def llama_variants(run: Run) -> Iterator[Variant]:
    ways = [(BF16, "plain", "torch bf16")]
    for name in run.recipes:
        ways.append((name, "converted", f"converted {name}, bf16 weights"))
        if name != "delayed":  # refused
            ways.append((name, "gathered", f"converted {name}, gathered weights"))
    for name, how, title in ways:
        for is_compiled in (False, True) if run.is_compiled else (False,):
            make = functools.partial(llama, run, name, how, is_compiled=is_compiled)
            yield Variant(title + ", compiled" * is_compiled, make, reads_text=True)


# -- tensor and sequence parallel ------------------------------------------------


def tp_in_torch(run: Run, *, is_compiled: bool) -> tuple[torch.nn.Module, Context]:
    """The MLP as DTensors."""
    model = BLOCKS["gelu"].as_torch(run.sizes, run.options | {"bias": False})
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, run.mesh, plan)
    if is_compiled:
        model.compile(dynamic=False)
    return model, contextlib.nullcontext


def tp_in_fuser(run: Run, name: str) -> tuple[torch.nn.Module, Context]:
    """The MLP as one pipeline."""
    options = run.options | {
        "bias": False,
        "tensor_parallel_group": run.mesh.get_group(),
        "sequence_parallel": True,
    }
    hidden, intermediate = run.sizes.hidden, run.sizes.intermediate
    model = fuser.Sequential(
        fuser.Linear(hidden, intermediate, tensor_parallel_mode="column", **options),
        fuser.GELU(),
        fuser.Linear(intermediate, hidden, tensor_parallel_mode="row", **options),
    )
    return model, autocast(name)


def tp_variants(run: Run) -> Iterator[Variant]:
    in_torch = functools.partial(tp_in_torch, run)
    yield Variant("DTensor bf16", functools.partial(in_torch, is_compiled=False))
    if run.is_compiled:
        yield Variant("DTensor compiled bf16", functools.partial(in_torch, is_compiled=True))
    for name in (BF16, *run.recipes):
        yield Variant(f"fuser {name}", functools.partial(tp_in_fuser, run, name))


# -- measuring ------------------------------------------------------------------


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """The bytes that this rank gives to all-gathers and reduce-scatters, except for DTensor's."""
    counts = {"gathered": 0, "reduced": 0}
    own = importlib.import_module("fuser.communication.collectives")
    places = (  # torch 2.13 renames the functions
        (dist, "all_gather_into_tensor", "gathered"),
        (dist, "all_gather_single", "gathered"),
        (own, "_all_gather", "gathered"),
        (dist, "reduce_scatter_tensor", "reduced"),
        (dist, "reduce_scatter_single", "reduced"),
        (own, "_reduce_scatter", "reduced"),
    )

    def counting(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            counts[kind] += tensors[1].numel() * tensors[1].element_size()
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for module, name, kind in places:
            if hasattr(module, name):
                call = counting(getattr(module, name), kind)
                stack.enter_context(mock.patch.object(module, name, call))
        yield counts


def steps(run: Run, variant: Variant, rows: int) -> dict[str, Call]:
    """The timed calls of a variant; gradients are None first."""
    torch.manual_seed(0)
    model, context = variant.make()
    if variant.reads_text:
        return text_steps(run, model, context)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.randn(rows, run.sizes.hidden, requires_grad=True, **run.options)
    dy = torch.randn(rows, run.sizes.hidden, **run.options)

    def backward() -> None:
        with context():
            y = model(x)
        y.backward(dy)
        if isinstance(x.grad, AsyncCollectiveTensor):  # a sum that DTensor has only started
            x.grad.wait()
        x.grad = None

    def train() -> None:
        backward()
        optimizer.zero_grad()

    def step() -> None:
        backward()
        optimizer.step()
        if variant.after_step is not None:
            variant.after_step(model)
        optimizer.zero_grad()

    return {"forward + backward": train, "with SGD": step}


def text_steps(run: Run, model: torch.nn.Module, context: Context) -> dict[str, Call]:
    """The same of a model that takes text, with AdamW."""
    is_fused = run.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=is_fused)
    sizes = run.text_sizes
    text = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context + 1), device=run.device)

    def train() -> None:
        with context():
            loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.zero_grad()

    def step() -> None:
        with context():
            loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"forward + backward": train, "with AdamW": step}


def slowest(results: dict[str, Result]) -> dict[str, Result]:
    """The results of the slowest rank; a failure if any rank has one."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    worst: dict[str, Result] = {}
    for name in results:
        found = [of_rank[name] for of_rank in everyone]
        failed = [result for result in found if isinstance(result, Failure)]
        worst[name] = failed[0] if failed else max(found, key=lambda timing: timing.median)
    return worst


def measured(case: str, run: Run, rounds: int, device: str) -> list[dict[str, Any]]:
    """A record for each variant and call of a case."""
    variants = {"fsdp": fsdp_variants, "llama": llama_variants, "tp": tp_variants}
    found = variants[case](run)
    rows = run.sizes.tokens // (run.mesh.size() if case == "tp" else 1)
    calls: dict[str, dict[str, Call]] = {}
    traffic: dict[str, dict[str, int]] = {}
    peaks: dict[str, int] = {}
    failures: dict[str, Result] = {}
    for variant in found:
        if dist.get_rank() == 0:
            say(f"{case}: {variant.name}")
        try:
            made = steps(run, variant, rows)
            for call in (*made.values(), *made.values()):  # compiled, recorded, and repeated
                call()
            with counted() as counts:
                made["forward + backward"]()
            traffic[variant.name] = counts
            peaks[variant.name] = peak_of(made["forward + backward"], device)
            calls[variant.name] = made
        except Exception as error:  # a variant that fails must not stop the others
            failures[variant.name] = Failure.of(error)
    records = []
    titles = ["forward + backward"]
    titles += {"fsdp": ["with SGD"], "llama": ["with AdamW"], "tp": []}[case]
    for title in titles:
        ready = {name: made[title] for name, made in calls.items()}
        timer = clock(device, is_captured=False)
        results = slowest({**failures, **measure([ready], timer, rounds=rounds)})
        for name, result in results.items():
            records.append(
                {
                    "case": case,
                    "call": title,
                    "variant": name,
                    "ranks": run.mesh.size(),
                    **described(result),
                    "MB gathered": megabytes(traffic.get(name, {}).get("gathered")),
                    "MB reduced": megabytes(traffic.get(name, {}).get("reduced")),
                    "peak MB": megabytes(peaks.get(name)),
                }
            )
    return records


def described(result: Result) -> dict[str, Any]:
    if isinstance(result, Timing):
        times = {
            "ms": result.median,
            "ms 20%": result.p20,
            "ms 80%": result.p80,
            "host ms": result.host,
        }
        return {name: f"{1e3 * t:.4g}" for name, t in times.items()} | {"failure": ""}
    return {"ms": "", "ms 20%": "", "ms 80%": "", "host ms": "", "failure": result.reason}


def megabytes(count: int | None) -> str:
    """The count in MB; empty if it is 0 or unknown."""
    return f"{count / 1e6:.4g}" if count else ""


def peak_of(call: Call, device: str) -> int:
    """Bytes that a call needs at its peak, beyond those before it; 0 on a CPU."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main(argv: list[str] | None = None) -> None:
    names = {
        "tokens": "of each GPU",
        "hidden": "width",
        "intermediate": "width",
        "layers": "blocks",
    }
    parser = new_parser(__doc__ or "", names)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=USUAL)
    options = parsed(parser, argv, names)
    device = options.device
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, which gives each process its rank.")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    chosen = (options.tokens, options.hidden, options.intermediate)
    sizes = Sizes(*(own or usual for own, usual in zip(chosen, SIZES[device], strict=True)))
    run = Run(
        sizes,
        options.layers or LAYERS[device],
        mesh,
        tuple(options.recipes),
        not options.no_compile and device == "cuda",
    )
    is_first = dist.get_rank() == 0
    sink = Sink(
        options.out if is_first else None, provenance(device, torch.bfloat16, options.commit)
    )
    for case in options.cases:
        records = measured(case, run, options.rounds, device)
        sink.write(records)
        for record in records if is_first else ():
            say("  ".join(str(value) for value in record.values() if value != ""))
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
