"""Training on the ranks that torchrun starts: mesh, sharding, data of each rank, sums over ranks.

The ranks form a mesh. Ranks of one tensor parallel or expert parallel group are neighbours; over
the other dimension parameters are replicated or, with ``--fsdp``, sharded.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fuser
from fuser.report.text import format_bytes
from fuser.torch_private import TorchDispatchMode, leave_out_of_ddp, pytree, schema_of

# Gates and values of a SwiGLU alternate in blocks of this many outputs if ranks may share them:
# then a rank's consecutive outputs have both. It does not depend on the number of ranks, so that a
# checkpoint can be loaded on another number.
GLU_BLOCK = 16
FSDP = ("none", "values", "quantized")
COLLECTIVES = {
    "all-gather": ("allgather", "all_gather"),
    "reduce-scatter": ("reduce_scatter",),
    "all-reduce": ("allreduce",),
    "all-to-all": ("alltoall",),
}


@dataclass(frozen=True)
class World:
    """The place of this process among those that torchrun started; by default it is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> World:
        """The place that torchrun's environment variables give."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not {*names, "MASTER_ADDR"} <= os.environ.keys():
            return cls()
        return cls(*(int(os.environ[name]) for name in names))

    @contextlib.contextmanager
    def one_voice(self) -> Iterator[None]:
        """Silence prints and warnings, but not errors, of all ranks except the first."""
        if self.rank == 0:
            yield
            return
        with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield


@dataclass(frozen=True)
class RankOptions:
    """The options of ranks and checkpoints, from the command line.

    ``fsdp`` is the form of gathered weights: ``"none"``, ``"values"``, or ``"quantized"``, the
    bytes and scales of the recipe. Mixtures of experts have ``ep``, other models ``tp`` and ``sp``.
    """

    world: World = World()
    tp: int = 1
    sp: bool = False
    ep: int = 1
    fsdp: str = "none"
    checkpoint: Path | None = None
    resume: Path | None = None

    @property
    def data_ranks(self) -> int:
        """Ranks with different windows; with ``sp`` also those of a tensor parallel group."""
        return self.world.size if self.sp else self.world.size // self.tp


def add_options(parser: argparse.ArgumentParser, *, is_mixture: bool) -> None:
    """Add the options of several ranks and of checkpoints."""
    add = parser.add_argument
    if is_mixture:
        add("--ep", type=int, default=1, metavar="N", help="ranks that share the experts")
    else:
        add("--tp", type=int, default=1, metavar="N", help="ranks that share each linear")
        switch: dict[str, Any] = {"action": "store_true", "default": argparse.SUPPRESS}
        add("--sp", **switch, help="these ranks share the rows between linears too")
    choices = FSDP[:2] if is_mixture else FSDP
    add(
        "--fsdp",
        nargs="?",
        choices=choices,
        default=FSDP[0],
        const=FSDP[1],
        help="shard parameters; gather values"
        + ("" if is_mixture else ", or the bytes and scales of --recipe"),
    )
    add("--checkpoint", type=Path, metavar="DIR", help="save here at every validation")
    add("--resume", type=Path, metavar="DIR", help="continue from the last checkpoint here")


def problem_with(options: Any) -> str | None:
    """An error message if options do not fit the number of ranks, otherwise None."""
    size, tp, ep = options.world.size, options.tp, options.ep
    for name in ("tp", "ep"):
        count = getattr(options, name)
        if count < 1:
            return f"--{name} is {count}; it must be at least 1."
        if size % count:
            return (
                f"--{name} {count} takes a multiple of {count} ranks, and this run has {size}; "
                f"torchrun --nproc-per-node {count} starts {count}."
            )
    if options.sp and tp == 1:
        return "--sp shares rows among tensor parallel ranks, and --tp is 1."
    ranks = options.data_ranks
    if options.fsdp != "none" and ranks == 1:
        if size == 1:
            return (
                "--fsdp shards over ranks, and this run has 1; "
                "torchrun --nproc-per-node 2 starts 2."
            )
        return (
            f"--fsdp shards over ranks with different windows, and {size} ranks with --tp {tp} "
            f"have the same; add --sp, or start {2 * tp} ranks."
        )
    if options.batch_size % ranks:
        return (
            f"--batch-size {options.batch_size} gives {ranks} ranks different numbers of windows."
        )
    hidden = 3 * options.width
    if hidden % (math.gcd(hidden, GLU_BLOCK) * tp):
        return (
            f"--width {options.width} makes {hidden} hidden features in blocks of "
            f"{math.gcd(hidden, GLU_BLOCK)}, which --tp {tp} does not divide."
        )
    if options.fsdp == "quantized":
        if options.recipe in ("none", "delayed"):
            return f"--fsdp quantized does not go with --recipe {options.recipe}."
        if options.override == "high_precision":
            return (
                "--fsdp quantized does not go with --override high_precision, which reads values."
            )
        if tp > 1:
            return f"--fsdp quantized does not go with --tp {tp}."
    if ep > 1 and options.recipe == "delayed":
        return f"--recipe delayed does not go with --ep {ep}: ranks have different experts."
    if options.dtype == "float16" and (size > 1 or options.checkpoint or options.resume):
        return (
            "--dtype float16 scales the loss by a state that is neither shared by ranks nor saved; "
            "use bfloat16."
        )
    if options.device == "cuda" and options.world.local_rank >= torch.cuda.device_count():
        return f"{size} ranks need a GPU each, and torch sees {torch.cuda.device_count()}."
    return None


class Ranks:
    """The ranks of a run, seen from this one: how they divide data and parameters.

    Parameters
    ----------
    options
        Those of the script; with more than one rank the process group has been started.
    """

    def __init__(self, options: Any) -> None:
        self.options = options
        self.size: int = options.data_ranks
        self.index = 0
        self.wrapped: dict[int, nn.Module] = {}
        self.mesh: DeviceMesh | None = None
        self.data_mesh: DeviceMesh | None = None
        if options.world.size == 1:
            return
        inner = options.tp * options.ep
        names = ("dp", "tp" if options.tp > 1 else "ep")
        shape = (options.world.size // inner, inner)
        self.mesh = init_device_mesh(options.device, shape, mesh_dim_names=names)
        self.data_mesh = self.mesh["dp"]
        if self.size > self.data_mesh.size():  # all ranks have different windows
            every = (options.world.size,)
            self.data_mesh = init_device_mesh(options.device, every, mesh_dim_names=("data",))
        self.index = self.data_mesh.get_local_rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank prints, and writes the files of the run."""
        return bool(self.options.world.rank == 0)

    # -- data ---------------------------------------------------------------------

    def part(self, windows: torch.Tensor) -> torch.Tensor:
        """The windows of this rank, of those of a batch."""
        return windows.chunk(self.size)[self.index]

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The mean over all windows, of means over the windows of each rank."""
        return self.sum(losses) / self.size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks with different windows; ``values`` may change."""
        if self.data_mesh is not None:
            dist.all_reduce(values, group=self.data_mesh.get_group())
        return values

    def agreed(self, value: float) -> float:
        """The first rank's value, on all of them: their clocks differ."""
        if self.mesh is None:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(shared, src=0)
        return float(shared)

    # -- model --------------------------------------------------------------------

    def parallelize(self, model: Any) -> None:
        """Give this rank its part of the feed-forward blocks, in place."""
        options = self.options
        for block in model.feed_forward:
            if not isinstance(block, fuser.Sequential):  # a mixture of experts
                if options.ep > 1:
                    assert self.mesh is not None
                    block.spread(self.mesh["ep"])
                continue
            if options.world.size > 1 or options.checkpoint or options.resume:
                interleave(block)
            if options.tp > 1:
                styles = fuser.distributed
                plan = {"1": styles.Replicated, "2": styles.Colwise, "4": styles.Rowwise}
                styles_by_path = {
                    path: style(sequence_parallel=options.sp) for path, style in plan.items()
                }
                assert self.mesh is not None
                parallelize_module(block, self.mesh["tp"], styles_by_path)

    def shard(self, model: Any) -> None:
        """Shard parameters over the ranks with different windows, or replicate them."""
        if self.mesh is None or self.data_mesh is None:
            return
        if self.options.fsdp != "none":
            self._fully_shard(model)
        elif self.size > 1:
            parts = set(map(id, parts_of(model)))
            ignored = [name for name, p in model.named_parameters() if id(p) in parts]
            ignored += [name for name, _ in model.named_buffers()]  # constant, not to be sent
            leave_out_of_ddp(model, ignored)
            self.wrapped[id(model)] = DistributedDataParallel(
                model, process_group=self.data_mesh.get_group()
            )
        self._average_gradients_of_parts(model)

    def trained(self, model: nn.Module) -> nn.Module:
        """The module that a training step calls in place of ``model``."""
        return self.wrapped.get(id(model), model)

    def _fully_shard(self, model: Any) -> None:
        assert self.mesh is not None
        options, outer = self.options, self.mesh["dp"]
        if options.fsdp == "quantized":
            for block in model.feed_forward:
                if isinstance(block, fuser.Sequential):
                    fuser.distributed.gather_quantized(block, options.make_recipe())
        compute = options.compute_dtype
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute is torch.float32 else compute,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        # Parts are sharded over fewer ranks than other parameters: those that have the same part.
        if outer.size() > 1:
            for block in model.feed_forward:
                if is_tensor_parallel(block):
                    fully_shard(block, mesh=outer, mp_policy=policy)
                elif own_experts(block):
                    # The experts are dimension 0, which expert parallel ranks have shared already.
                    fully_shard(
                        block.experts,
                        mesh=outer,
                        mp_policy=policy,
                        shard_placement_fn=lambda _: Shard(1),
                    )
        every: dict[str, Any] = {
            "mesh": self.data_mesh,
            "mp_policy": policy,
            "ignored_params": parts_of(model),
        }
        for block in (*model.attention, *model.feed_forward):
            if not is_tensor_parallel(block):
                fully_shard(block, **every)
        fully_shard(model, **every)

    def _average_gradients_of_parts(self, model: Any) -> None:
        """Make gradients of parts means over all windows, as those of other parameters are.

        Before, gradients of experts, and of linears that gather rows, are sums over the ranks that
        share the experts or rows.
        """
        assert self.mesh is not None
        options, outer = self.options, self.mesh["dp"]
        count = self.size // outer.size()
        group = outer.get_group() if options.fsdp == "none" and outer.size() > 1 else None
        if group is not None:
            count = self.size

        def average(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            grad = local(parameter.grad)
            if group is not None:
                dist.all_reduce(grad, group=group)
            grad /= count

        if count > 1:
            for parameter in parts_of(model):
                parameter.register_post_accumulate_grad_hook(average)

    def clip_gradients(self, model: Any, max_norm: float) -> None:
        """Scale gradients so that the norm of those of all ranks is at most ``max_norm``."""
        experts = {id(p) for block in model.feed_forward for p in own_experts(block)}
        kinds = alike(model.parameters(), experts)
        if len(kinds) == 1:
            nn.utils.clip_grad_norm_(kinds[0], max_norm)
            return
        squares = []
        for parameters in kinds:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            square = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
            if id(parameters[0]) in experts:
                assert self.mesh is not None
                dist.all_reduce(square, group=self.mesh["ep"].get_group())
            squares.append(square)
        total = torch.stack(squares).sum().sqrt()
        for parameters in kinds:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total)

    # -- description --------------------------------------------------------------

    def counting(
        self, bytes_by_kind: Counter[str] | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Count what this rank gives to collectives into the counter, if there is one."""
        if bytes_by_kind is None or self.mesh is None:
            return contextlib.nullcontext()
        return Traffic(bytes_by_kind)

    def described(self, model: Any, whole: int) -> str:
        """The sharding as text, for a model that has ``whole`` parameters on one rank."""
        if self.mesh is None:
            return ""
        options, outer = self.options, self.mesh["dp"].size()
        dimensions = [f"{outer} data parallel"]
        if options.tp > 1:
            rows = " and sequence" if options.sp else ""
            dimensions.append(f"{options.tp} tensor{rows} parallel")
        if options.ep > 1:
            dimensions.append(f"{options.ep} expert parallel")
        over = f"over {self.size} ranks"
        sharded = {
            "none": f"replicated {over}, DistributedDataParallel"
            if self.size > 1
            else "on each rank",
            "values": f"sharded {over}, fully_shard",
            "quantized": f"sharded {over}, fully_shard; blocks gather bytes of {options.recipe}",
        }[options.fsdp]
        own = sum(local(p).numel() for p in model.parameters())
        lines = [
            f"{options.world.size} ranks: {' x '.join(dimensions)}",
            f"  windows of a step     {options.batch_size // self.size} of {options.batch_size} "
            "on each rank",
        ]
        if options.tp > 1:
            lines.append(f"  feed-forward blocks   column and row parallel over {options.tp} ranks")
        if options.ep > 1:
            lines.append(
                f"  experts               {options.experts // options.ep} of {options.experts} of "
                "a layer on each rank"
            )
        other = "all parameters" if options.tp * options.ep == 1 else "other parameters"
        lines.append(f"  {other:<21} {sharded}")
        lines.append(f"  parameters of a rank  {own:,} of {whole:,}")
        return "\n".join(["", *lines, ""])


ALONE = Ranks(RankOptions())
"""One process."""


@contextlib.contextmanager
def started(options: Any) -> Iterator[Ranks]:
    """The ranks of a run, with their process group; the first rank alone prints."""
    world = options.world
    if world.size == 1:
        yield Ranks(options)
        return
    backend, device = "gloo", None
    if options.device == "cuda":
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device)
    with world.one_voice():
        yield Ranks(options)
    # After an error torchrun ends the other ranks, which may wait for this one.
    dist.barrier()
    dist.destroy_process_group()


# -- parameters -------------------------------------------------------------------


def interleave(block: fuser.Sequential) -> None:
    """Let gates and values alternate in blocks, in place; the block computes the same."""
    linear = block[2]
    size = math.gcd(linear.weight.shape[0] // 2, GLU_BLOCK)
    with torch.no_grad():
        for parameter in (linear.weight, linear.bias):
            parameter.copy_(fuser.interleave_glu_tensor(parameter.detach(), size))
    block[3] = fuser.SwiGLU(glu_interleave_size=size)


def is_tensor_parallel(block: nn.Module) -> bool:
    """Whether parameters of a feed-forward block are parts over a tensor parallel mesh."""
    return isinstance(block, fuser.Sequential) and any(
        isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ())
        for p in block.parameters()
    )


def own_experts(block: Any) -> list[nn.Parameter]:
    """The weights of a rank's own experts; empty if experts are not spread over ranks."""
    return list(block.experts.parameters()) if getattr(block, "is_spread", False) else []


def parts_of(model: Any) -> set[nn.Parameter]:
    """Parameters of which a tensor parallel or expert parallel rank has a part."""
    return {
        p
        for block in model.feed_forward
        for p in (block.parameters() if is_tensor_parallel(block) else own_experts(block))
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def alike(
    parameters: Iterable[torch.Tensor], apart: Iterable[int] = ()
) -> list[list[torch.Tensor]]:
    """Parameters in lists that torch takes together, of one mesh each; ``apart`` has ids."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault((mesh, id(parameter) in apart), []).append(parameter)
    return list(by_mesh.values())


# -- traffic ----------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank gives to collectives, by kind."""

    def __init__(self, bytes_by_kind: Counter[str]) -> None:
        super().__init__()
        self.bytes = bytes_by_kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = schema_of(func).name.partition("::")[2]
            for kind, stems in COLLECTIVES.items():
                if any(stem in name for stem in stems):
                    # In place calls of c10d have the outputs first, except for sums.
                    is_output_first = func.namespace == "c10d" and kind != "all-reduce"
                    given = args[1] if is_output_first else args[0]
                    tensors = pytree.tree_leaves(given)
                    self.bytes[kind] += sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def listed(bytes_by_kind: Counter[str]) -> str:
    """Bytes of collectives by kind, as text."""
    texts = (f"{kind} {format_bytes(size)}" for kind, size in sorted(bytes_by_kind.items()))
    return ", ".join(texts) or "nothing"
