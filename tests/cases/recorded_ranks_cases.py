"""Cases of recorded passes that communicate: each runs on a rank, recorded and not."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import expert_parallel_models
import oracles
import pytest
import torch
import torch.distributed as dist
from address_graphs import on_cpu_graphs
from on_torch import use_torch, without_recordings
from one_launch_experts import in_one_launch
from ranks import RANKS, device_type, part
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.communication import collectives
from fuser.cuda import repeated
from fuser.fused_ops.grouped_mlp import GroupedMLP
from fuser.runtime import recorded
from fuser.tensors import gathering

BF16 = torch.bfloat16
HIDDEN, TOKENS, STEPS = 128, 256, 8
RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": recipes.Float8CurrentScaling,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=2),
    "mxfp8": recipes.MXFP8BlockScaling,
    "block": recipes.Float8BlockScaling,
}
Tensors = tuple[torch.Tensor, ...]


def as_recorded(patch: pytest.MonkeyPatch) -> None:
    """Let passes be recorded on a CPU, too; kernels of a GPU run on one."""
    if device_type() == "cpu":
        use_torch(patch)


def graphs() -> contextlib.AbstractContextManager[Any]:
    """The stand-in for graphs on a CPU; a GPU has its own."""
    return on_cpu_graphs() if device_type() == "cpu" else contextlib.nullcontext()


def mlp(*, has_shards: bool) -> fuser.Sequential:
    torch.manual_seed(0)
    linear = functools.partial(
        fuser.Linear, HIDDEN, HIDDEN, dtype=BF16, sequence_parallel=has_shards
    )
    return fuser.Sequential(
        fuser.RMSNorm(HIDDEN, dtype=BF16),
        linear(tensor_parallel_mode="column"),
        fuser.GELU(),
        linear(tensor_parallel_mode="row"),
    )


def collective_ops() -> fuser.Sequential:
    torch.manual_seed(0)
    linear = fuser.Linear(HIDDEN, HIDDEN, dtype=BF16)
    return fuser.Sequential(
        *(fuser.AllGather(), linear, fuser.GELU(), fuser.ReduceScatter()),
        fuser.AllReduce(reduce_in_backward=True),
    )


@contextlib.contextmanager
def counted(name: str) -> Iterator[list[Any]]:
    """The replays, or the collectives, in their order."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if name == "replays":
            play = recorded._played

            def played(sequence: Any, *given: Any) -> Any:
                found.append(sequence)
                return play(sequence, *given)

            patch.setattr(recorded, "_played", played)
        else:
            for function in ("_all_gather", "_reduce_scatter"):
                patch.setattr(collectives, function, noted(collectives, function, found))
            for function in ("all_reduce", "all_to_all_single"):
                patch.setattr(dist, function, noted(dist, function, found))
        yield found


def noted(module: Any, name: str, found: list[Any]) -> Callable[..., Any]:
    function = getattr(module, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        found.append((name, *[tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]))
        return function(*args, **kwargs)

    return called


def step(model: Any, inputs: Tensors, dy: torch.Tensor, recipe: Any) -> list[torch.Tensor | None]:
    """Output, gradients of inputs and of parameters."""
    model.zero_grad()
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(*leaves)
    y, *others = y if isinstance(y, tuple) else (y,)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *others, *(t.grad for t in leaves), *(p.grad for p in model.parameters())]


Change = Callable[[int, Any, Tensors], Tensors]
"""By the number of the step: a change of the model, and the inputs in this layout."""


def compared(
    model: Any, inputs: Tensors, dy: torch.Tensor, recipe: Callable[[], Any], change: Change
) -> dict[str, Any]:
    """The steps of two copies, recorded and not: equal bits and equal collectives."""
    results, sent = [], []
    replays = hits = 0
    for is_recorded in (True, False):
        own, own_recipe, each_step = copy.deepcopy(model), recipe(), []
        with contextlib.ExitStack() as stack:
            stack.enter_context(graphs() if is_recorded else without_recordings())
            played = stack.enter_context(counted("replays"))
            collected = stack.enter_context(counted("collectives"))
            for number in range(STEPS):
                given = change(number, own, tuple(t + number for t in inputs))
                each_step += step(own, given, dy, own_recipe)
        results.append(each_step)
        # Messages of amaxes are as long as the list of states, to which each copy adds its own.
        sent.append([one for one in collected if any(len(shape) > 1 for shape in one[1:])])
        replays += len(played)
        hits += sum(graph.hits for sequence in {*played} for graph in sequence.graphs)
    pairs = list(zip(*results, strict=True))
    same = [a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs]
    is_sent_alike = sent[0] == sent[1]
    found = {"same": all(same), "sent": is_sent_alike, "count": len(sent[0])}
    return {**found, "plays": replays, "hits": hits}


def plain(number: int, model: Any, inputs: Tensors) -> Tensors:
    return inputs


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def other_layouts_on_rank(rank: int) -> Change:
    """One rank has a layout in some steps that the other one has not."""

    def change(number: int, model: Any, inputs: Tensors) -> Tensors:
        return (turned(inputs[0]), *inputs[1:]) if number % 3 == rank else inputs

    return change


def other_groups(number: int, model: Any, inputs: Tensors) -> Tensors:
    """A new group of the same ranks at step 3; attributes of one op change at step 4."""
    if number == 3:
        for op in model.modules():
            if isinstance(op, fuser.BasicLinear):
                op.tensor_parallel_group = dist.new_group(list(range(RANKS)))
    if number == 4:
        model[0].eps = 0.5
    return inputs


def of_mlp(recipe: Callable[[], Any], has_shards: bool, rank: int, change: Any) -> dict[str, Any]:
    x = oracles.random_tensor((TOKENS, HIDDEN), BF16, 1)
    dy = oracles.random_tensor((TOKENS, HIDDEN), BF16, 2)
    if has_shards:
        x, dy = part(x, rank, 0), part(dy, rank, 0)
    with pytest.MonkeyPatch.context() as patch:
        as_recorded(patch)
        chosen = change(rank) if change is other_layouts_on_rank else change
        return compared(mlp(has_shards=has_shards), (x,), dy, recipe, chosen)


def of_ops(rank: int) -> dict[str, Any]:
    x = part(oracles.random_tensor((TOKENS, HIDDEN), BF16, 1), rank, 0)
    with pytest.MonkeyPatch.context() as patch:
        as_recorded(patch)
        return compared(collective_ops(), (x,), x, recipes.MXFP8BlockScaling, plain)


def of_experts(recipe: Callable[[], Any], capacity: int | None, rank: int) -> dict[str, Any]:
    given = expert_parallel_models.Given(RANKS)
    x, indices, probs, dy = given.of(rank)
    with pytest.MonkeyPatch.context() as patch:
        as_recorded(patch)
        if recipe() is None and device_type() == "cpu":
            in_one_launch(patch)
        model = expert_parallel_models.layer(dist.group.WORLD, capacity=capacity)
        keep = lambda number, _, ts: (ts[0], indices, ts[2])  # noqa: E731
        return compared(model, (x, indices, probs), dy, recipe, keep)


class BySizes(GroupedMLP):
    """Reads all rows that it gets."""

    def step_forward(self, ctxs: Any, x: Any, inputs: Any) -> Any:
        assert x.shape[0] == int(inputs.extras[0].sum())
        return super().step_forward(ctxs, x, inputs)


class Weighted(fuser.BasicOperation):
    """Multiplies by the mean probability of the rows of experts."""

    parameter_names = ()
    num_extra_inputs = 1

    def op_forward(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def op_backward(self, *_: Any) -> Any:
        raise NotImplementedError

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **given: Any) -> Any:
        ((probs,),) = given["basic_op_extra_inputs"]
        return input_ * probs.float().mean().to(input_.dtype), [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **given: Any) -> Any:
        return grad_output, [()], [(None,)]


def of_counted_experts(name: str, load: str, rank: int) -> dict[str, Any]:
    """Steps whose experts get other rows each time: the bits of rows in no blocks, unrecorded."""
    recipe = RECIPES[name]
    if name == "delayed":
        recipe = functools.partial(recipes.DelayedScaling, amax_history_len=2, reduce_amax=False)
    tokens = 1024 if load == "one sender" else 128
    x = oracles.random_tensor((tokens, expert_parallel_models.HIDDEN), BF16, 10 + rank)
    dy = oracles.random_tensor(tuple(x.shape), BF16, 20 + rank)
    rows = [part.abs() for part in oracles.random_tensor((STEPS, tokens, 4), BF16, 30 + rank)]
    if load == "one sender":  # one rank sends all of its rows to itself, the other an eighth
        rows = [row + row.new_tensor([9, 9, 0, 0]) for row in rows]
    indices = [row.topk(2).indices for row in rows]
    if load == "one sender" and rank:
        for each in indices:
            each[tokens // 8 :] = -1
    if load == "none":
        indices = [each.masked_fill(each >= 0, -1) for each in indices]
    probs = oracles.random_tensor((tokens, 2), BF16, 40 + rank).abs().float()
    found: list[list[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        as_recorded(patch)
        if device_type() == "cpu":
            in_one_launch(patch)
        for is_recorded in (True, False):
            fusions = [BySizes if f is GroupedMLP else f for f in fuser.FUSIONS]
            model = expert_parallel_models.layer(
                dist.group.WORLD,
                returns=load == "returned",
                fusions=fusions if load == "a user's fusion" else fuser.FUSIONS,
            )
            if load == "another op":
                model = fuser.Sequential(*model[:4], fuser.GELU(), model[4])
            own, results = recipe(), []
            with contextlib.ExitStack() as stack:
                if load == "read later":
                    model.append(Weighted().set_extra_input_channel(0, "probs"))
                if load == "one host" and is_recorded:  # tokens travel as values
                    model[0].may_cross_hosts = False
                if not is_recorded:
                    own_patch = stack.enter_context(pytest.MonkeyPatch.context())
                    own_patch.setattr(fuser.MoeDispatch, "counter", lambda *_: None)
                stack.enter_context(graphs() if is_recorded else without_recordings())
                played = stack.enter_context(counted("replays"))
                for number, each in enumerate(indices):
                    if load == "a capacity later" and number == 4:
                        model[0].capacity = 2 * tokens
                    results += step(model, (x, each, probs), dy, own)
            found.append([results, len(played)])
    (recorded_, plays), (expected, _) = found
    same = [
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(recorded_, expected, strict=True)
    ]
    return {"same": all(same), "plays": plays}


def destroyed(rank: int) -> dict[str, Any]:
    """The backward of a replay whose group is gone, and a forward with it."""
    x = oracles.random_tensor((TOKENS, HIDDEN), BF16, 1)
    group = dist.new_group(list(range(RANKS)))
    with pytest.MonkeyPatch.context() as patch:
        as_recorded(patch)
        model = mlp(has_shards=False)
        for op in model.modules():
            if isinstance(op, fuser.BasicLinear):
                op.tensor_parallel_group = group
        for _ in range(STEPS):
            y = model(x.requires_grad_())
            y.sum().backward()
        y = model(x)
        dist.destroy_process_group(group)
        found = {}
        for name, call in (("backward", y.sum().backward), ("forward", lambda: model(x))):
            with pytest.raises(fuser.StateError) as error:
                call()
            found[name] = str(error.value)
        return found


def two_amax_groups(has_shards: bool, rank: int) -> dict[str, Any]:
    """Steps in turn under two groups: bits of a copy that is not recorded, and scales by hand."""
    own = [dist.new_group([other]) for other in range(RANKS)][rank]
    groups = (dist.new_group(list(range(RANKS))), own)
    recipe = recipes.DelayedScaling(amax_history_len=1)
    x = (1 + rank) * part(oracles.random_tensor((TOKENS, HIDDEN), BF16, 1), rank, 0)
    results, scales, replays = [], [], 0
    for is_recorded in (True, False):
        model, found = mlp(has_shards=has_shards)[1:], []
        with contextlib.ExitStack() as stack:
            as_recorded(stack.enter_context(pytest.MonkeyPatch.context()))
            if not is_recorded:
                stack.enter_context(without_recordings())
            played = stack.enter_context(counted("replays"))
            for number in range(STEPS):
                leaf = (x * 2**number).requires_grad_()
                group = groups[number % 2]
                with fuser.autocast(recipe=recipe, amax_reduction_group=group):
                    y = model(leaf)
                y.backward(torch.ones_like(y))
                found += [y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]
                amaxes = [2**number * x.abs().max().float() for _ in range(RANKS)]
                if number % 2 == 0 or has_shards:  # the rows of all ranks are gathered
                    dist.all_gather(amaxes, amaxes[rank].clone())
                state = model[0].basic_ops[0]._delayed["forward"]
                scales.append((float(state.scale[0]), 448 / float(max(amaxes))))
        replays += len(played)
        results.append(found)
    same = [torch.equal(one, other) for one, other in zip(*results, strict=True)]
    return {"same": all(same), "scales": scales, "plays": replays}


def ranks_that_differ(rank: int) -> dict[str, Any]:
    """A replay on one rank and other rows on the other: all ranks raise, on a CPU."""
    x = oracles.random_tensor((TOKENS, HIDDEN), BF16, 1)
    with pytest.MonkeyPatch.context() as patch:
        as_recorded(patch)
        model = mlp(has_shards=False)
        for _ in range(STEPS):
            model(x)
        with pytest.raises(fuser.InputError) as error:
            model(x if rank else x[: TOKENS // 2])
        return {"error": str(error.value)}


def dense() -> fuser.Sequential:
    return fuser.Sequential(
        fuser.RMSNorm(HIDDEN, dtype=BF16),
        fuser.Linear(HIDDEN, 2 * HIDDEN, bias=False, dtype=BF16),
        fuser.SwiGLU(),
        fuser.Linear(HIDDEN, HIDDEN, bias=False, dtype=BF16),
    )


def two_experts(**options: Any) -> fuser.Sequential:
    return fuser.Sequential(
        fuser.GroupedLinear(2, HIDDEN, 2 * HIDDEN, bias=False, dtype=BF16, **options),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(2, HIDDEN, HIDDEN, bias=False, dtype=BF16, **options),
    )


def sharded_block(recipe: Any, weights: str, how: str) -> Any:
    torch.manual_seed(0)
    with fuser.quantized_model_init(enabled=weights == "quantized", recipe=recipe):
        block = dense()
        if how == "two in flight":  # without a norm, whose gradient needs that of the linear
            block = fuser.Sequential(*block[1:])
        if how.startswith("experts"):
            block = two_experts(single_grouped_weight=how == "experts in a stack")
    if weights == "gathered":
        fuser.distributed.gather_quantized(block, recipe)
    mesh = init_device_mesh(device_type(), (RANKS,))
    return fully_shard(block, mesh=mesh, reshard_after_forward=how != "stays gathered")


def trained_shards(name: str, weights: str, how: str, rank: int, *, is_recorded: bool) -> Any:
    """Outputs, gradients and shards of some steps; the copies that were gathered; the replays."""
    recipe = RECIPES[name]()
    block = sharded_block(recipe, weights, how)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    x = part(oracles.random_tensor((TOKENS, HIDDEN), BF16, 1), rank, 0)
    found: list[Any] = []
    copies: list[Any] = []
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        as_recorded(patch)
        extras: tuple[Any, ...] = ()
        if how.startswith("experts"):
            if device_type() == "cpu":
                in_one_launch(patch)
            sizes = torch.tensor([TOKENS // 4, TOKENS // 4])
            extras = (sizes, torch.ones(TOKENS // 2, dtype=BF16), sizes)
        read = gathering._copies_read

        def noted_copies(*given: Any) -> Any:
            copies.append(read(*given))
            return copies[-1]

        patch.setattr(gathering, "_copies_read", noted_copies)
        stack.enter_context(graphs() if is_recorded else without_recordings())
        played = stack.enter_context(counted("replays"))
        repeats: list[bool] = []
        repeat = repeated.constant_launches

        def noted_repeat(*given: Any) -> Any:
            result = repeat(*given)
            repeats.append(result[0])
            return result

        patch.setattr(repeated, "constant_launches", noted_repeat)
        for number in range(STEPS):
            leaf = (x + number).requires_grad_(how != "weights alone" or number % 2 == 0)
            if how == "unsharded by hand" and number % 3 == 0:
                block.unshard()
            with fuser.autocast(recipe=recipe):
                if how == "checkpoint":
                    y = checkpoint(block, leaf, use_reentrant=False)
                else:
                    y = block(leaf, *extras)
                if how == "two in flight":  # the backward of one reads less
                    y = y + block(leaf.detach())
            if how == "unsharded by hand" and number % 3 == 1:
                block.unshard()
            if how == "evaluation between":
                with torch.no_grad(), fuser.autocast(recipe=recipe):
                    found.append(block(leaf))
            (y.float() ** 2).mean().backward()
            grads = [p.grad.to_local().clone() for p in block.parameters()]
            found += [y.detach(), *grads] + ([leaf.grad] if leaf.requires_grad else [])
            if how == "bytes are loaded" and number == STEPS // 2:
                state = {n: p.detach().clone() for n, p in block.state_dict().items()}
                block.load_state_dict(state, assign=weights == "quantized")
            optimizer.step()
            optimizer.zero_grad()
        found += [p.to_local().detach().clone() for p in block.parameters()]
    values = [t.dequantize() if hasattr(t, "dequantize") else t for t in found]
    return values, copies, len(played), sum(repeats)


def of_shards(name: str, weights: str, how: str, rank: int) -> dict[str, Any]:
    one, copies, plays, repeats = trained_shards(name, weights, how, rank, is_recorded=True)
    other, own_copies, *none = trained_shards(name, weights, how, rank, is_recorded=False)
    assert none == [0, 0]
    same = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    facts = {"same": same, "sent": copies == own_copies, "count": len(copies), "plays": plays}
    return {**facts, "repeats": repeats}


SHARDS = [
    (name, weights, "plain")
    for name in ("current", "delayed", "block", "mxfp8")
    for weights in ("quantized", "gathered")
    if (name, weights) != ("delayed", "gathered")  # refused
]
SHARDS += [
    (name, weights, how)
    for how in (
        *("stays gathered", "checkpoint", "evaluation between", "weights alone"),
        *("bytes are loaded", "unsharded by hand", "two in flight"),
    )
    for name, weights in (("current", "quantized"), ("block", "quantized"), ("block", "gathered"))
]
SHARDS += [
    (name, weights, how)
    for how in ("experts", "experts in a stack")
    for name, weights in (("mxfp8", "quantized"), ("block", "quantized"), ("block", "gathered"))
]


COUNTED: list[tuple[str, str]] = [
    *((name, "equal") for name in RECIPES),
    ("none", "one sender"),
    ("none", "none"),
    ("none", "returned"),  # the rows have a reader that would see unused ones
    ("none", "another op"),
    ("none", "read later"),
    ("none", "a capacity later"),
    ("none", "a user's fusion"),
    *((name, "one host") for name in ("current", "delayed")),
]


def cases() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name, recipe in RECIPES.items():
        for has_shards in (False, True):
            for change in (plain, other_layouts_on_rank, other_groups):
                run = functools.partial(of_mlp, recipe, has_shards, change=change)
                found[f"mlp [{name}, {has_shards}, {change.__name__}]"] = run
    for name in ("none", "current", "mxfp8"):
        found[f"experts {name}"] = functools.partial(of_experts, RECIPES[name], 120)
    found["experts without a capacity"] = functools.partial(of_experts, RECIPES["none"], None)
    for name, load in COUNTED:
        found[f"counted [{name}, {load}]"] = functools.partial(of_counted_experts, name, load)
    for has_shards in (False, True):
        found[f"amax groups {has_shards}"] = functools.partial(two_amax_groups, has_shards)
    for row in SHARDS:
        found[f"shards [{', '.join(row)}]"] = functools.partial(of_shards, *row)
    found |= {"ops": of_ops, "destroyed": destroyed}
    if device_type() == "cpu":  # NCCL waits
        found["differ"] = ranks_that_differ
    return found
