"""DistributedDataParallel on two ranks: gradients come during backward, with equal bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import oracles
import pytest
import torch
import torch.distributed as dist
from ranks import RANKS, results_of
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from fuser.runtime.cut import CutPlan, CuttablePlan

WIDTH, ROWS, LINEARS = 512, 32, 8  # 1 MiB each
RECIPES: dict[str, Recipe | None] = {
    "no recipe": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "mxfp8": MXFP8BlockScaling(),
}


def model_of(count: int = LINEARS, dtype: torch.dtype = torch.float32) -> fuser.Sequential:
    torch.manual_seed(0)
    pairs = [
        (fuser.Linear(WIDTH, WIDTH, bias=False, dtype=dtype), fuser.GELU()) for _ in range(count)
    ]
    return fuser.Sequential(*(op for pair in pairs for op in pair))


def batch(rank: int, step: int) -> torch.Tensor:
    return oracles.random_tensor((ROWS, WIDTH), torch.float32, 100 * step + rank)


class Nodes:
    """The number of autograd nodes of each cut call, noted while this context is open."""

    def __enter__(self) -> list[int]:
        self.call = CutPlan.call
        counts: list[int] = []

        def call(plan: CutPlan, *args: Any) -> Any:
            counts.append(len(plan.nodes))
            return self.call(plan, *args)

        CutPlan.call = call  # type: ignore[method-assign, assignment]
        return counts

    def __exit__(self, *error: object) -> None:
        CutPlan.call = self.call  # type: ignore[method-assign]


class Whole:
    """A context in which a DistributedDataParallel is not seen."""

    def __enter__(self) -> None:
        self.waiting = CuttablePlan.waiting
        patched: Any = CuttablePlan
        patched.waiting = lambda plan, params: None

    def __exit__(self, *error: object) -> None:
        CuttablePlan.waiting = self.waiting  # type: ignore[method-assign]


def reference(rank: int, recipe: Recipe | None, steps: int = 2) -> list[torch.Tensor]:
    """Gradients of pipelines of one node, reduced afterwards as DDP does."""
    model = model_of()
    results = []
    for step in range(steps):
        model.zero_grad()
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(batch(rank, step))
        y.square().sum().backward()
        for parameter in model.parameters():
            grad = torch.div(parameter.grad, RANKS)
            dist.all_reduce(grad)
            results.append(grad)
    return results


def trained(
    rank: int,
    recipe: Recipe | None,
    steps: int = 2,
    run: Callable[[Any, torch.Tensor], torch.Tensor] = lambda ddp, x: ddp(x),
    **options: Any,
) -> tuple[list[torch.Tensor], list[int]]:
    ddp = DistributedDataParallel(model_of(), **{"bucket_cap_mb": 2, **options})
    results = []
    with Nodes() as counts:
        for step in range(steps):
            ddp.zero_grad()
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = run(ddp, batch(rank, step))
            y.square().sum().backward()
            results += [parameter.grad.clone() for parameter in ddp.parameters()]
    return results, counts


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def gradients(recipe: Recipe | None, **options: Any) -> Callable[[int], Any]:
    def case(rank: int) -> Any:
        wanted = reference(rank, recipe)
        found, counts = trained(rank, recipe, **options)
        with Whole():
            whole, none = trained(rank, recipe, **options)
        return {
            "equal": equal(wanted, found),
            "equal to one node": equal(whole, found),
            "nodes": counts,
            "nodes of one": none,
        }

    return case


def accumulated(rank: int) -> Any:
    """Two microbatches, the first without reduction."""
    results = []
    for is_whole in (False, True):
        ddp = DistributedDataParallel(model_of(), bucket_cap_mb=2)
        with Nodes() as counts:
            if is_whole:
                with Whole():
                    microbatches(ddp, rank)
            else:
                microbatches(ddp, rank)
        results.append(([parameter.grad for parameter in ddp.parameters()], counts))
    (cut, counts), (whole, _) = results
    return {"equal": equal(cut, whole), "nodes": counts}


def microbatches(ddp: DistributedDataParallel, rank: int) -> None:
    with ddp.no_sync():
        ddp(batch(rank, 0)).square().sum().backward()
    ddp(batch(rank, 1)).square().sum().backward()


class _Checkpointed(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.model, x, use_reentrant=False)


def checkpointed(rank: int) -> Any:
    wanted = reference(rank, None)
    ddp = DistributedDataParallel(_Checkpointed(model_of()), bucket_cap_mb=2)
    found = []
    with Nodes() as counts:
        for step in range(2):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().sum().backward()
            found += [parameter.grad.clone() for parameter in ddp.parameters()]
    return {"equal": equal(wanted, found), "nodes": counts}


def watch(ddp: DistributedDataParallel, note: Callable[..., Any]) -> None:
    """Call ``note`` with each bucket, before it is reduced."""
    # torch reads annotations, and refuses names: a lambda has none.
    ddp.register_comm_hook(
        None, lambda state, bucket: (note(bucket), allreduce_hook(None, bucket))[1]
    )


def order(rank: int) -> Any:
    """The parameters in the order in which their gradients were ready to reduce."""
    model = model_of()
    names = {id(p): n for n, p in enumerate(model.parameters())}
    ddp = DistributedDataParallel(model, bucket_cap_mb=2)
    buckets: list[list[int]] = []

    watch(ddp, lambda bucket: buckets.append([names[id(p)] for p in bucket.parameters()]))
    for step in range(3):
        buckets.clear()
        ddp(batch(rank, step)).square().sum().backward()
    return buckets


class Products(TorchDispatchMode):
    """Counts products while it is open."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def shares(rank: int) -> Any:
    """The products before the first reduction, as a share of those of backward."""
    found = {}
    for name, context in (("cut", contextlib.nullcontext()), ("whole", Whole())):
        ddp = DistributedDataParallel(model_of(16))
        counts: list[int] = []
        products = Products()
        watch(ddp, lambda _, counts=counts, products=products: counts.append(products.count))
        for step in range(3):  # buckets are made anew after the first
            ddp.zero_grad()
            with context:
                loss = ddp(batch(rank, step)).sum()
            counts.clear()
            products.count = 0
            with products:
                loss.backward()
        found[name] = counts[0] / products.count
    return found


def cases() -> Mapping[str, Callable[[int], Any]]:
    return {
        **{f"gradients {name}": gradients(recipe) for name, recipe in RECIPES.items()},
        "gradients in buckets": gradients(None, gradient_as_bucket_view=True),
        "gradients of a static graph": gradients(None, static_graph=True),
        "gradients unused": gradients(None, find_unused_parameters=True),
        "accumulated": accumulated,
        "checkpointed": checkpointed,
        "order": order,
        "shares": shares,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results_of(cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith("gradients")])
def test_gradients_are_those_of_one_node(results: dict[str, list[Any]], name: str) -> None:
    for each in results[name]:
        assert isinstance(each, dict), each[1]
        assert each["equal"]
        assert each["equal to one node"]
        assert each["nodes"] == [4, 4]  # of 2 MiB
        assert each["nodes of one"] == []


def test_a_forward_without_reduction_is_one_node(results: dict[str, list[Any]]) -> None:
    for each in results["accumulated"]:
        assert isinstance(each, dict), each[1]
        assert each["equal"]
        assert each["nodes"] == [4]


def test_a_checkpointed_forward_is_cut_in_its_recomputation(
    results: dict[str, list[Any]],
) -> None:
    for each in results["checkpointed"]:
        assert isinstance(each, dict), each[1]
        assert each["equal"]
        assert each["nodes"] == [4, 4, 4, 4]  # two forwards, each recomputed


def test_buckets_are_reduced_from_the_last_op_to_the_first(results: dict[str, list[Any]]) -> None:
    for buckets in results["order"]:
        assert isinstance(buckets[0], list), buckets[1]
        assert [sorted(bucket) for bucket in buckets] == [[6, 7], [4, 5], [2, 3], [0, 1]]


def test_the_first_bucket_is_reduced_in_the_first_quarter_of_backward(
    results: dict[str, list[Any]],
) -> None:
    for each in results["shares"]:
        assert isinstance(each, dict), each[1]
        assert 0 < each["cut"] <= 0.25
        assert each["whole"] >= 2 * each["cut"]
