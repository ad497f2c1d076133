"""Cases of experts on several ranks: each rank's results, and those of one rank with all tokens."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import oracles
import pytest
import torch
import torch.distributed as dist
from expert_parallel_models import (
    BF16,
    CHANNELS,
    CHOICES,
    EXPERTS,
    FP32,
    HIDDEN,
    LAYERS,
    RECIPES,
    WIDTH,
    Given,
    at_once,
    compared,
    flat,
    layer,
    part_of,
    step,
)
from pipeline_kernels import on_kernels
from said import said as pattern_of

import fuser
from fuser import recipe as recipes
from fuser.basic_ops import grouped_products, moe
from fuser.basic_ops.grouped_products import quantizes_groups_of
from fuser.runtime import graphs
from fuser.runtime.recorded import refusal_of


def steps_of(recipe: recipes.Recipe) -> int:
    """Of a recipe with states the third step is the first whose scales are of two amaxes."""
    return 3 if recipe.delayed() else 2


def fused(recipe: Any, rank: int, **options: Any) -> dict[str, Any]:
    """All experts at once, their plan, and what a rank sends of tokens, in bytes a row."""
    sent: list[float] = []
    send = dist.all_to_all_single

    def noted(out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() == 2 and x.shape[1] > 1 and x.dtype != torch.int32:
            sent.append(x.shape[1] * x.element_size())
        return send(out, x, *args, **kwargs)

    with at_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", noted)
        found = compared(rank, recipe=recipe, steps=steps_of(recipe), **options)
        model = layer(dist.group.WORLD, BF16, **options)
        x, indices, probs, _ = Given(dist.get_world_size()).of(rank)
        with fuser.autocast(recipe=recipe):
            plan = model.plan(x.requires_grad_(), indices, probs.requires_grad_())
    first = [plan.forward[0].fusion, plan.backward[-1].fusion]
    return {**found, "first": first, "plan": str(plan), "sent": sent[:4]}


def bytes_of(recipe: Any, rank: int, **options: Any) -> dict[str, Any]:
    """Layers whose tokens are sent as bytes."""
    with at_once():
        return compared(rank, recipe=recipe, **options)


def frozen_on_one_rank(recipe: Any, rank: int) -> dict[str, Any]:
    """The experts of the first rank are frozen: all ranks communicate alike."""
    ranks = dist.get_world_size()
    with at_once():
        model, alone = layer(dist.group.WORLD), layer(None)
        for op in (model[1], model[3]):
            op.requires_grad_(rank != 0)
        found, expected = [], []
        for seed in range(2):
            data = Given(ranks, seed=seed)
            found += flat(step(model, data.of(rank), recipe))[:3]
            expected += flat(part_of(step(alone, data.all(), recipe), data, rank, ranks))[:3]
    return {"found": found, "expected": expected}


def bytes_in_both_copies(recipe: Any, rank: int) -> dict[str, Any]:
    """As on a Hopper GPU, where the weight gradients read a columnwise copy."""
    with at_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_products, "reads_columns", lambda *args: True)
        return compared(rank, recipe=recipe)


def sizes_of_the_caller(rank: int) -> dict[str, Any]:
    """Groups that are not the experts of the dispatch, whose scales no other rank knows."""
    x, indices, probs, _ = Given(dist.get_world_size()).of(rank)
    sizes = torch.tensor([11, 40 - rank])
    results = []
    for fusions in (fuser.FUSIONS, ()):
        torch.manual_seed(0)
        options: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": BF16}
        dispatch = fuser.MoeDispatch(EXPERTS, capacity=120, expert_parallel_group=dist.group.WORLD)
        for index in range(3):
            dispatch.set_extra_output_channel(index, CHANNELS[index], output_to_caller=index != 1)
        model = fuser.Sequential(
            dispatch,
            fuser.GroupedLinear(2, HIDDEN, 2 * WIDTH, **options),
            fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
            fuser.GroupedLinear(2, WIDTH, HIDDEN, **options),
            fusions=fusions,
        )
        leaf = x.clone().requires_grad_()
        with at_once(), fuser.autocast(recipe=recipes.Float8CurrentScaling()):
            y = model(leaf, indices, probs, sizes, sizes)[0]
        y.backward(torch.ones_like(y))
        results.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    return dict(zip(("found", "expected"), results, strict=True))


def kernels(recipe: Any, rank: int, **options: Any) -> dict[str, Any]:
    """On the emulator, as on a GPU, where no index is read."""
    with pytest.MonkeyPatch.context() as patch, at_once(), on_kernels():
        patch.setattr(moe, "check_values", lambda *args: None)
        patch.setattr(moe, "_check_rows", lambda *args: None)
        return compared(rank, recipe=recipe, **options)


def autocast(rank: int) -> dict[str, Any]:
    with torch.autocast("cpu", BF16):
        return compared(rank, dtype=FP32)


def checkpointed(use_reentrant: bool, rank: int) -> dict[str, Any]:
    model = layer(dist.group.WORLD)
    data = Given(dist.get_world_size()).of(rank)
    recipe = recipes.Float8CurrentScaling()
    plain = flat(step(model, data, recipe))
    call = functools.partial(fuser.checkpoint, model, use_reentrant=use_reentrant)
    return {"found": flat(step(model, data, recipe, call)), "expected": plain}


def torch_checkpointed(use_reentrant: bool, rank: int) -> dict[str, Any]:
    model = layer(dist.group.WORLD)
    data = Given(dist.get_world_size()).of(rank)
    call = functools.partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=use_reentrant)
    return {
        "found": flat(step(model, data, None, call)),
        "expected": flat(step(model, data)),
    }


def captured(recipe: Any, rank: int) -> dict[str, Any]:
    """A layer with a capacity as a CUDA graph, which is replayed with other routings."""
    ranks = dist.get_world_size()
    found, expected = [], []
    model, plain = layer(dist.group.WORLD, capacity=120), layer(dist.group.WORLD, capacity=120)
    x, indices, probs, _ = Given(ranks).of(rank)
    sample = (x.requires_grad_(), indices, probs.requires_grad_())
    fuser.make_graphed_callables(model, sample, enabled=recipe is not None, recipe=recipe)
    for seed in range(3):
        data = Given(ranks, seed=seed).of(rank)
        found += [t.clone() for t in flat(step(model, data, recipe))]
        expected += flat(step(plain, data, recipe))
    return {"found": found, "expected": expected}


def evaluation(rank: int) -> dict[str, Any]:
    """Without gradients, and with a frozen input or frozen probabilities."""
    model = layer(dist.group.WORLD)
    x, indices, probs, dy = Given(dist.get_world_size()).of(rank)
    (y, dx, dprobs), _ = step(model, (x, indices, probs, dy))
    found = []
    with torch.no_grad():
        found.append(model.eval()(x, indices, probs))
    leaf = x.clone().requires_grad_()
    layer_ = layer(dist.group.WORLD)
    layer_(leaf, indices, probs).backward(dy)
    other = probs.clone().requires_grad_()
    layer(dist.group.WORLD)(x, indices, other).backward(dy)
    frozen = layer(dist.group.WORLD).requires_grad_(False)
    third = x.clone().requires_grad_()
    frozen(third, indices, probs).backward(dy)
    found += [leaf.grad, other.grad, third.grad]
    return {"found": found, "expected": [y, dx, dprobs, dx]}


def accumulated(rank: int) -> dict[str, Any]:
    """The gradients of two microbatches."""
    ranks = dist.get_world_size()
    results = []
    for group in (dist.group.WORLD, None):
        model = layer(group)
        for number in range(2):
            data = Given(ranks, seed=number)
            x, indices, probs, dy = data.all() if group is None else data.of(rank)
            model(x, indices, probs).backward(dy)
        grads = [p.grad for p in model.parameters()]
        results.append(grads if group is not None else [g.chunk(ranks)[rank] for g in grads])
    return dict(zip(("found", "expected"), results, strict=True))


def returned(rank: int) -> dict[str, Any]:
    """The outputs of a dispatch for the caller, and a combine of the caller's tensors."""
    ranks = dist.get_world_size()
    data = Given(ranks, FP32)
    x, indices, probs, _ = data.of(rank)
    dispatch = fuser.MoeDispatch(EXPERTS, expert_parallel_group=dist.group.WORLD)
    combine = fuser.MoeCombine(expert_parallel_group=dist.group.WORLD)
    rows, sizes, row_probs, places = dispatch(x, indices, probs)
    local = EXPERTS // ranks
    whole = fuser.MoeDispatch(EXPERTS)(data.x, data.indices, data.probs)
    ends = [0, *whole[1].cumsum(0).tolist()]
    own = slice(ends[rank * local], ends[(rank + 1) * local])
    y = combine(rows * row_probs[:, None], places)
    expected = fuser.MoeCombine()(whole[0] * whole[2][:, None], whole[3])
    return {
        "found": [rows, sizes, row_probs, y, combine(rows * row_probs[:, None], places.clone())],
        "expected": [
            *(whole[0][own], whole[1][rank * local : (rank + 1) * local], whole[2][own]),
            *[expected.split(data.counts)[rank]] * 2,
        ],
    }


def dropped(policy: str, rank: int) -> dict[str, Any]:
    """A capacity that drops assignments: those after a block, of each pair of ranks."""
    ranks, block = dist.get_world_size(), 7
    local = EXPERTS // ranks
    data = Given(ranks)
    kept = data.indices.clone()
    for source, span in enumerate(torch.arange(sum(data.counts)).split(data.counts)):
        for target in range(ranks):
            taken = [
                (t, j)
                for t in span.tolist()
                for j in range(CHOICES)
                if data.indices[t, j] // local == target
            ]
            if policy == "probs":
                taken.sort(key=lambda place: -float(data.probs[place]))
            assert source or len(taken) > block
            for t, j in taken[block:]:
                kept[t, j] = -1
    model = layer(dist.group.WORLD, capacity=ranks * block, drop_policy=policy)
    found = flat(step(model, data.of(rank)))
    data.indices = kept
    expected = flat(part_of(step(layer(), data.all()), data, rank, ranks))
    return {"found": found, "expected": expected}


def unused_rows(rank: int) -> dict[str, Any]:
    """NaN in unused rows reaches nothing."""
    x, indices, probs, dy = Given(dist.get_world_size(), FP32).of(rank)
    group = dist.group.WORLD
    dispatch = fuser.MoeDispatch(EXPERTS, capacity=160, expert_parallel_group=group)
    combine = fuser.MoeCombine(expert_parallel_group=group)
    results = []
    for poison in (0.0, float("nan")):
        leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
        rows, sizes, row_probs, places = dispatch(leaves[0], indices, leaves[1])
        is_unused = torch.arange(len(rows)) >= sizes.sum()
        assert is_unused.any()
        assert not rows[is_unused].any()
        assert not row_probs[is_unused].any()
        dirty = rows.detach().masked_fill(is_unused[:, None], poison).requires_grad_()
        y = combine(dirty, places)
        y.backward(dy)
        grads = [torch.ones_like(rows), torch.ones_like(row_probs)]
        for each in grads:
            each[is_unused] = poison
        torch.autograd.backward((rows, row_probs), grads)
        results.append([y.detach(), dirty.grad, *(leaf.grad for leaf in leaves)])
    return dict(zip(("expected", "found"), results, strict=True))


def saved_bytes(rank: int) -> dict[str, Any]:
    """The bytes that a layer saves, and the rows of its experts."""
    data = Given(dist.get_world_size())
    x, indices, probs, _ = data.of(rank)
    sizes: list[int] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda t: t):
        layer(dist.group.WORLD)(x.requires_grad_(), indices, probs.requires_grad_())
    local = EXPERTS // dist.get_world_size()
    return {"saved": sum(sizes), "received": int((data.indices // local == rank).sum())}


def plans(rank: int) -> dict[str, Any]:
    x, indices, probs, _ = Given(dist.get_world_size()).of(rank)
    found: dict[str, Any] = {}
    for name, options in (("exact", {}), ("capacity", {"capacity": 120})):
        model = layer(dist.group.WORLD, **options)
        plan = model.plan(x.requires_grad_(), indices, probs.requires_grad_())
        found[name] = str(plan)
        found[f"{name} kernels"] = [s.kernel for s in (*plan.forward, *plan.backward)]
        found[f"{name} link"] = [s.link_bytes_per_token for s in (*plan.forward, *plan.backward)]
        found[f"{name} recorded"] = [refusal_of(op) is None for op in model]
        with pytest.raises((fuser.StateError, fuser.InputError)) as error:
            graphs._check_module(0, model, ())
        found[f"{name} captured"] = str(error.value)
    return found


def copies(rank: int) -> dict[str, Any]:
    group = dist.new_group(list(range(dist.get_world_size())))
    model = layer(group)
    data = Given(dist.get_world_size()).of(rank)
    copied = copy.deepcopy(model)
    with pytest.raises(fuser.StateError, match=pattern_of("groups-cannot-pickled-belongs")):
        pickle.dumps(model)
    pickle.loads(pickle.dumps(layer()))
    return {"found": flat(step(copied, data)), "expected": flat(step(model, data))}


def said(call: Any) -> str:
    with pytest.raises((fuser.InputError, fuser.StateError)) as error:
        call()
    return str(error.value)


def refused(rank: int) -> dict[str, Any]:
    """Bad arguments, and calls of ranks that differ; the next call of each works."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(ranks)]
    data = Given(ranks).of(rank)
    x, indices, probs, _ = data

    def made(**options: Any) -> Any:
        return lambda: fuser.MoeDispatch(
            **{"num_experts": EXPERTS, "expert_parallel_group": group, **options}
        )

    found = {
        "experts": said(made(num_experts=5)),
        "capacity": said(made(capacity=5)),
        "no member": said(made(expert_parallel_group=alone[1 - rank])),
        "combine": said(lambda: fuser.MoeCombine(expert_parallel_group=alone[1 - rank])),
        "other size": said(lambda: setattr(made()(), "expert_parallel_group", alone[rank])),
    }
    assert fuser.MoeDispatch(EXPERTS, expert_parallel_group=alone[rank]).expert_parallel_size == 1
    wide = oracles.random_tensor((len(x), HIDDEN + 64 * rank), BF16, 1)
    for name, call in (
        ("ranks differ in experts", lambda: made(num_experts=2 + 2 * rank)()(x, *routing(data))),
        ("ranks differ in capacity", lambda: made(capacity=60 + 2 * rank)()(x, indices, probs)),
        ("ranks differ in k", lambda: made()()(x, indices[:, rank:], probs[:, rank:])),
        ("ranks differ in hidden", lambda: made()()(wide, indices, probs)),
        ("ranks differ in dtype", lambda: made()()(x.float() if rank else x, indices, probs)),
        (
            "ranks differ in dtype of probs",
            lambda: made()()(x, indices, probs.bfloat16() if rank else probs),
        ),
        ("ranks differ in gradients", lambda: made()()(_leaf(x, rank == 0), indices, probs)),
    ):
        found[name] = said(call)
    with fuser.autocast(recipe=(recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling())[rank]):
        found["ranks differ in recipe"] = said(lambda: made()()(x, indices, probs))
    with at_once(), fuser.autocast(recipe=recipes.Float8CurrentScaling()):
        other = layer(group, fusions=() if rank else fuser.FUSIONS)
        found["ranks differ in fusions"] = said(lambda: other(_leaf(x, True), indices, probs))
    model = layer(group)
    with fuser.autocast(recipe=recipes.DelayedScaling()):
        found["delayed"] = said(lambda: model(x, indices, probs))
    expected = flat(step(layer(group), data))
    both = flat(step(model, data))
    beyond = indices.clone()
    beyond[2, 1] = EXPERTS
    found["index"] = said(lambda: model(x, beyond, probs))
    half = layer(group)
    half[4] = fuser.MoeCombine().set_extra_input_channel(0, "rows")
    found["combine without a group"] = said(lambda: half(x, indices, probs))
    combine = fuser.MoeCombine(expert_parallel_group=group)
    rows, _, _, places = made()()(x, indices, probs)
    found["rows of another"] = said(lambda: combine(rows[:-1], places))
    found["places of one rank"] = said(lambda: combine(rows, places[: len(x) // 2]))
    found["too small"] = said(lambda: combine(rows, places[:3]))
    again = flat(step(model, data))
    return {"said": found, "found": both + again, "expected": expected * 2}


def _leaf(x: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return x.clone().requires_grad_(requires_grad)


def routing(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of two experts, and probabilities."""
    _, indices, probs, _ = data
    return indices.clamp(max=1), probs


def own_amaxes(rank: int) -> dict[str, Any]:
    """Delayed scaling whose amaxes are reduced over ranks with the same experts: this one."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    recipe = recipes.DelayedScaling(amax_history_len=2)

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        with fuser.autocast(recipe=recipe, amax_reduction_group=groups[rank]):
            yield

    ranks = dist.get_world_size()
    found: list[Any] = []
    expected: list[Any] = []
    model, alone = layer(dist.group.WORLD), layer()
    for seed in range(3):
        data = Given(ranks, seed=seed)
        for results, of, given in ((found, model, data.of(rank)), (expected, alone, data.all())):
            x, indices, probs, dy = given
            leaf = x.clone().requires_grad_()
            of.zero_grad()
            with within():
                y = of(leaf, indices, probs)
            y.backward(dy)
            grads = [p.grad.clone() for p in of.parameters()]
            if of is alone:
                grads = [g.chunk(ranks)[rank] for g in grads]
                y, dx = (t.split(data.counts)[rank] for t in (y, leaf.grad))
            else:
                dx = leaf.grad
            results += [y.detach(), dx, *grads]
    return {"found": found, "expected": expected}


CASES: dict[str, Callable[[int], Any]] = {
    **{
        f"recipe {n}": functools.partial(compared, recipe=r, steps=steps_of(r))
        for n, r in RECIPES.items()
    },
    **{f"layer {n}": functools.partial(compared, **options) for n, options in LAYERS.items()},
    **{
        f"at once {n}": functools.partial(fused, r)
        for n, r in RECIPES.items()
        if quantizes_groups_of(r)
    },
    **{
        f"bytes {r} {n}": functools.partial(bytes_of, RECIPES[f"{r} None"], **options)
        for r in ("current", "delayed")
        for n, options in LAYERS.items()
        if n not in ("fp32", "in pieces", "not fused", "capacity in pieces")
    },
    **{
        f"bytes in both copies {r}": functools.partial(bytes_in_both_copies, RECIPES[f"{r} None"])
        for r in ("current", "delayed")
    },
    **{
        f"frozen on one rank {n}": functools.partial(frozen_on_one_rank, RECIPES[n])
        for n in ("current None", "current high_precision", "nvfp4 high_precision")
    },
    "bytes of a large amax_epsilon": functools.partial(
        bytes_of,
        recipes.Float8CurrentScaling(fp8_quant_fwd_inp=recipes.QParams(amax_epsilon=16.0)),
    ),
    "sizes of the caller": sizes_of_the_caller,
    **{
        f"kernels {name} {capacity}": functools.partial(kernels, recipe, capacity=capacity)
        for name, recipe in (
            ("none", None),
            ("current", RECIPES["current None"]),
            ("delayed", RECIPES["delayed None"]),
        )
        for capacity in (None, 120)
    },
    "autocast": autocast,
    **{f"checkpoint {u}": functools.partial(checkpointed, u) for u in (True, False)},
    **{f"torch checkpoint {u}": functools.partial(torch_checkpointed, u) for u in (True, False)},
    "evaluation": evaluation,
    "accumulated": accumulated,
    "returned": returned,
    **{f"dropped {p}": functools.partial(dropped, p) for p in ("position", "probs")},
    "unused rows": unused_rows,
    "copies": copies,
    "own amaxes": own_amaxes,
    "refused": refused,
}


def cases() -> dict[str, Callable[[int], Any]]:
    return {**CASES, "plans": plans, "saved": saved_bytes}


def cases_on_gpus() -> dict[str, Callable[[int], Any]]:
    """For two GPUs."""
    named = ("recipe", "layer", "dropped", "checkpoint", "autocast", "returned", "own amaxes")
    found = {name: case for name, case in CASES.items() if name.startswith(named)}
    graphs = {"none": None, "current": recipes.Float8CurrentScaling()}
    for name, recipe in graphs.items():
        found[f"captured {name}"] = functools.partial(captured, recipe)
    return found


def cases_of_four() -> dict[str, Callable[[int], Any]]:
    names = (
        *("recipe current None", "layer fp32", "layer capacity", "dropped position", "returned"),
        "bytes current capacity",  # each rank has one expert, whose first row is that of an unused
    )
    return {name: CASES[name] for name in names}
