"""Inputs and gradients that torch's collectives have not finished; tensors without memory.

The pipelines run on kernels, which read memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import oracles
import pytest
import torch
import torch.distributed as dist
from pipeline_kernels import on_kernels
from said import holds, said
from strict_cublaslt import strict_cublaslt

import fuser
from fuser.errors import InputTypeError

if dist.is_available():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed")
BF16 = torch.bfloat16


def pipelines() -> dict[str, fuser.Sequential]:
    torch.manual_seed(0)
    return {
        "chain": fuser.Sequential(fuser.GELU(), fuser.ConstantScale(0.5)),
        "norm": fuser.Sequential(fuser.RMSNorm(64, dtype=BF16)),
        "linear": fuser.Sequential(
            fuser.RMSNorm(64, dtype=BF16), fuser.Linear(64, 64, dtype=BF16), fuser.GELU()
        ),
        "nothing": fuser.Sequential(fuser.Identity()),
        "sum": fuser.Sequential(fuser.Linear(64, 64, dtype=BF16), fuser.AddExtraInput()),
    }


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with on_kernels(), strict_cublaslt():
        yield


def unfinished(values: torch.Tensor, *, requires_grad: bool = False) -> Any:
    return AsyncCollectiveTensor(values).requires_grad_(requires_grad)


class Delivered(torch.autograd.Function):
    """An identity whose gradient comes from a collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        delivered: torch.Tensor = unfinished(grad.clone())
        return delivered


@pytest.mark.parametrize("recipe", [None, fuser.recipe.MXFP8BlockScaling()], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", pipelines())
def test_unfinished_inputs_and_gradients_are_waited_for(
    name: str, requires_grad: bool, recipe: Any
) -> None:
    count = 2 if name == "sum" else 1
    values = [oracles.random_tensor((32, 64), BF16, seed) for seed in range(count)]
    found = []
    for is_plain in (True, False, False):
        model = pipelines()[name]
        given: list[Any] = [
            v.clone().requires_grad_(requires_grad)
            if is_plain
            else unfinished(v.clone(), requires_grad=requires_grad)
            for v in values
        ]
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(*given)
        if y.requires_grad:
            last = y if is_plain else Delivered.apply(y)
            last.backward(oracles.random_tensor((32, 64), BF16, 9))
        grads = [t.grad for t in (*given, *model.parameters())]
        found.append([y.detach() + 0, *(g + 0 for g in grads if g is not None)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)


def test_a_tensor_without_memory_is_refused_by_name() -> None:
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, values: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
            made.values_ = values
            return made

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            args = tuple(a.values_ if isinstance(a, Wrapped) else a for a in args)
            return func(*args, **(kwargs or {}))

    chain = pipelines()["chain"]
    x = oracles.random_tensor((32, 64), BF16, 1)
    expected = chain(x)
    with pytest.raises(
        InputTypeError,
        match=said("arguments-memory-freed-other", holds("a Wrapped of shape (32, 64)")),
    ):
        chain(Wrapped(x))
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(
        InputTypeError,
        match=said("arguments-memory-freed-other", holds("a Tensor of shape (32, 64)")),
    ):
        chain(freed)
    assert torch.equal(chain(x), expected)
