"""Models under ``fully_shard`` (FSDP2) on several ranks, and common code of their cases."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import oracles
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fuser
from fuser import recipe as recipes
from fuser.tensors import gathering, master_weight

RECIPES: dict[str, Callable[..., recipes.Recipe]] = {
    "current": recipes.Float8CurrentScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "blocks of 128x128": recipes.Float8BlockScaling,
    "blocks of 1x128": functools.partial(recipes.Float8BlockScaling, w_block_scaling_dim=1),
    "nvfp4": functools.partial(recipes.NVFP4BlockScaling, disable_stochastic_rounding=True),
    "nvfp4 4over6": functools.partial(
        recipes.NVFP4BlockScaling, disable_stochastic_rounding=True, nvfp4_4over6="weights"
    ),
    "nvfp4 of 1x16": functools.partial(
        recipes.NVFP4BlockScaling, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "rowwise": recipes.Float8RowwiseScaling,
    "delayed": functools.partial(recipes.DelayedScaling, amax_history_len=4),
}
WIDTHS = {"blocks of 128x128": (256, 512), "blocks of 1x128": (256, 512)}
"""In and out features of which each of two ranks has whole blocks."""
SMALL = (64, 128)

CASES: dict[str, Callable[[], None]] = {}


def each(
    *names: str, into: dict[str, Callable[[], None]] = CASES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a case of a function for each format; all formats if none is named."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for name in names or RECIPES:
            into[f"{function.__name__} [{name}]"] = functools.partial(function, name)
        return function

    return add


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Make a case of a function."""
    CASES[function.__name__] = function
    return function


def rank() -> int:
    return dist.get_rank()


def ranks() -> int:
    return dist.get_world_size()


def model(name: str, widths: tuple[int, int] | None = None, **options: Any) -> fuser.Sequential:
    """Three linears and an activation, quantized under a recipe; equal on all ranks."""
    inner, outer = widths or WIDTHS.get(name, SMALL)
    torch.manual_seed(1)
    with fuser.quantized_model_init(recipe=RECIPES[name](), **options):
        return fuser.Sequential(
            fuser.Linear(inner, outer),
            fuser.GELU(),
            fuser.Linear(outer, inner),
            fuser.Linear(inner, outer, bias=False),
        )


def plain_model(widths: tuple[int, int], dtype: torch.dtype = torch.float32) -> fuser.Sequential:
    """The same with unquantized weights."""
    inner, outer = widths
    torch.manual_seed(1)
    return fuser.Sequential(
        fuser.Linear(inner, outer, dtype=dtype),
        fuser.GELU(),
        fuser.Linear(outer, inner, dtype=dtype),
        fuser.Linear(inner, outer, bias=False, dtype=dtype),
    )


def linear(recipe: recipes.Recipe, inner: int, outer: int, **options: Any) -> fuser.Sequential:
    """One linear, equal on all ranks."""
    torch.manual_seed(1)
    with fuser.quantized_model_init(recipe=recipe, **options):
        return fuser.Sequential(fuser.Linear(inner, outer))


def changed(layers: fuser.Sequential) -> fuser.Sequential:
    """The model with other values."""
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(1.5).add_(0.25)
    return layers


def linears(layers: Iterable[Any]) -> list[Any]:
    return [layer for layer in layers if isinstance(layer, fuser.Linear)]


def sharded(layers: fuser.Sequential, *, each_layer: bool = True, **options: Any) -> Any:
    """The model under ``fully_shard``: each of its linears, and then the rest."""
    for layer in linears(layers) if each_layer else ():
        fully_shard(layer, **options)
    return fully_shard(layers, **options)


def inputs(layers: Any, seed: int, rows: int = 32) -> torch.Tensor:
    return oracles.random_tensor((rows, layers[0].weight.shape[1]), torch.float32, seed)


def loss_of(layers: Any, x: torch.Tensor, recipe: Any) -> torch.Tensor:
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y: torch.Tensor = layers(x)
    return y.square().mean()


def shard_of(parameter: Any) -> Any:
    return parameter._local_tensor


def unsharded(layers: Any) -> list[Any]:
    """The quantized weights, gathered."""
    for module in (*linears(layers), layers):
        if hasattr(module, "unshard"):
            module.unshard()
    return [layer.weight for layer in linears(layers)]


def resharded(layers: Any) -> None:
    for module in (*linears(layers), layers):
        if hasattr(module, "reshard"):
            module.reshard()


def assert_same_bytes(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert found.shape == expected.shape
    for name, buffer in expected.buffers().items():
        other = getattr(found, name)
        assert (other is None) == (buffer is None), name
        if buffer is not None:
            assert other.dtype is buffer.dtype
            assert torch.equal(other, buffer), f"{name}: {(other != buffer).sum()} differ"


def expected_of_shards(weight: Any) -> Any:
    """A gathered weight, by definition: the shards' values gathered, and then quantized."""
    local = shard_of(weight)
    own = local.dequantize()
    rows = -(-weight.shape[0] // ranks())
    padded = torch.zeros(rows, *weight.shape[1:], dtype=own.dtype)
    padded[: len(own)] = own
    every = [torch.empty_like(padded) for _ in range(ranks())]
    dist.all_gather(every, padded)
    return local._quantizer.unbound()(torch.cat(every)[: weight.shape[0]])


def train(
    name: str, layers: Any, reference: Any, *, steps: int = 3, compute: str = "same", **options: Any
) -> None:
    """Steps of both models on the data of all ranks: outputs, gradients and bytes are equal."""
    recipe = RECIPES[name]() if compute == "same" else None
    optimizer, other = (
        torch.optim.SGD(m.parameters(), lr=0.5, **options) for m in (layers, reference)
    )
    for step in range(steps):
        x = inputs(reference, 10 * step + rank()).requires_grad_()
        loss = loss_of(layers, x, recipe)
        loss.backward()
        for place in range(ranks()):
            x_place = inputs(reference, 10 * step + place).requires_grad_()
            of_place = loss_of(reference, x_place, recipe)
            (of_place / ranks()).backward()
            if place == rank():
                torch.testing.assert_close(loss, of_place, rtol=1e-6, atol=0)
                torch.testing.assert_close(x.grad, ranks() * x_place.grad, rtol=1e-5, atol=1e-8)
        for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
            grad = parameter.grad.full_tensor().to(own.device)  # from the CPU if offloaded
            torch.testing.assert_close(grad, own.grad, rtol=1e-5, atol=1e-7)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        for weight, own in zip(unsharded(layers), linears(reference), strict=True):
            assert_same_bytes(weight, own.weight)
        resharded(layers)


EXACT = [name for name in RECIPES if name != "delayed"]


@contextlib.contextmanager
def gathers() -> Iterator[list[tuple[str, int]]]:
    """The gatherings of quantized parameters inside: the names of buffers, and a rank's bytes."""
    found: list[tuple[str, int]] = []
    gather = gathering.gather

    def noting(*given: Any) -> Any:
        parts, sent = gather(*given)
        found.append((", ".join(sent.names), sum(part.nbytes for part in parts)))
        return parts, sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "gather", noting)
        patch.setattr(master_weight, "gather", noting)
        yield found


@contextlib.contextmanager
def reductions() -> Iterator[list[int]]:
    """The reductions of maxima inside: how many numbers each has."""
    found: list[int] = []
    kept = dist.all_reduce

    def noting(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
        if op == dist.ReduceOp.MAX:
            found.append(tensor.numel())
        return kept(tensor, op, group=group, **more)

    dist.all_reduce = noting  # type: ignore[assignment]
    try:
        yield found
    finally:
        dist.all_reduce = kept


def said(error: type[Exception], call: Callable[..., Any]) -> str:
    """The sentence of the error that ``call`` raises."""
    try:
        call()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__} was raised.")


def shared_folder() -> str:
    """A new folder, the same on all ranks; removed at the end of the process of the first."""
    names = [tempfile.mkdtemp() if rank() == 0 else ""]
    dist.broadcast_object_list(names)
    if rank() == 0:
        atexit.register(shutil.rmtree, names[0], ignore_errors=True)
    return names[0]
