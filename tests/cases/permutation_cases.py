"""Inputs of the permutation kernels, and their results against the reference, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from quantize_cases import INF, NAN, Input, Place, assert_same

from fuser.cuda import permutation as kernels
from fuser.moe import permute, unpermute
from fuser.reference import permutation as reference


@dataclass(frozen=True)
class Routing:
    """Expert indices ``[tokens, choices]``, and the rows of the permuted matrix.

    ``rows`` is ``tokens * choices`` plus ``more_rows``, which may be negative. ``kind``:
    ``random``, with some -1; ``full``, without; ``one``, all in one expert; ``none``, all dropped;
    ``outside``, with indices outside of the experts.
    """

    tokens: int
    choices: int
    experts: int
    more_rows: int = 0
    kind: str = "random"
    dtype: torch.dtype = torch.int64

    def __str__(self) -> str:
        sizes = f"{self.tokens}x{self.choices}-of-{self.experts}-{self.more_rows:+}"
        return f"{sizes}-{self.kind}-{str(self.dtype)[6:]}"

    @property
    def rows(self) -> int:
        """The rows of the permuted matrix."""
        return max(0, self.tokens * self.choices + self.more_rows)

    def indices(self, seed: int = 0) -> torch.Tensor:
        """The indices, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.tokens, self.choices)
        indices = torch.randint(self.experts, shape, generator=generator, dtype=self.dtype)
        if self.kind in ("random", "outside"):
            indices[torch.rand(shape, generator=generator) < 0.2] = -1
        if self.kind == "one":
            indices.fill_(self.experts - 1)
        if self.kind == "none":
            indices.fill_(-1)
        if self.kind == "outside":
            # 2^32 and 2^32 - 1 are 0 and -1 in 32 bits.
            wide = self.dtype == torch.int64
            wrong = [self.experts, -7, 2**31 - 1, 2**32 if wide else -(2**31), -(2**31)]
            indices.view(-1)[: len(wrong)] = torch.tensor(wrong, dtype=self.dtype)[
                : indices.numel()
            ]
        return indices

    def maps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``row_map`` and ``inverse_map``, by the reference, on the CPU."""
        _, row_map, inverse_map = reference.sort_by_expert(self.indices(), self.experts, self.rows)
        return row_map, inverse_map


SORTS = (
    Routing(0, 2, 3),
    Routing(0, 2, 3, 5),
    Routing(1, 1, 1, kind="full"),
    Routing(7, 2, 4),
    Routing(33, 3, 5, dtype=torch.int32),
    Routing(100, 2, 8, 40),
    Routing(100, 2, 8, -130, kind="full"),
    Routing(50, 1, 300, kind="outside"),
    Routing(50, 1, 3, kind="outside", dtype=torch.int32),
    Routing(64, 4, 7, kind="one"),
    Routing(64, 4, 7, kind="none"),
    Routing(30, 8, 1024, kind="full"),
    Routing(2048, 2, 16, kind="full"),
    Routing(2049, 2, 16, dtype=torch.int32),
    Routing(1500, 4, 130, -777),
    Routing(3001, 3, 2, 9, kind="outside"),
)
MOVES = (
    Routing(0, 2, 3, 5),
    Routing(5, 1, 3, kind="full"),
    Routing(17, 2, 4),
    Routing(9, 3, 4, -11),
    Routing(6, 5, 4, 40),
    Routing(4, 8, 40, kind="full"),
    Routing(6, 2, 4, kind="none"),
)
# Columns, dtypes and layouts: one column, odd ones, a part of a vector, several blocks.
MATRICES = (
    Input(0, 1, torch.float32),
    Input(0, 7),
    Input(0, 64, torch.float16),
    Input(0, 264, torch.float32),
    Input(0, 2056),
    Input(0, 40, torch.bfloat16, "shifted"),
    Input(0, 40, torch.float16, "rows"),
    Input(0, 22, torch.float32, "odd rows"),
    Input(0, 1031, torch.float16, "odd rows"),
)
EVERY_SORT = pytest.mark.parametrize("routing", SORTS, ids=str)
EVERY_MOVE = pytest.mark.parametrize("routing", MOVES, ids=str)
EVERY_MATRIX = pytest.mark.parametrize("like", MATRICES, ids=str)


def check_sort(place: Place, routing: Routing) -> None:
    """The split sizes and both maps are the reference's."""
    indices = routing.indices().to(place.device)
    split_sizes = place.empty((routing.experts,), torch.int32)
    row_map = place.empty((routing.rows,), torch.int32)
    inverse_map = place.empty(indices.shape, torch.int32)
    shape = kernels.counts_shape(indices.numel(), routing.experts)
    counts = None if shape is None else place.empty(shape, torch.int32)
    with place.launching(split_sizes, row_map, inverse_map, counts):
        kernels.sort_by_expert(indices, split_sizes, row_map, inverse_map, counts)
    expected = reference.sort_by_expert(routing.indices(), routing.experts, routing.rows)
    names = ("split_sizes", "row_map", "inverse_map")
    for name, got, wanted in zip(names, (split_sizes, row_map, inverse_map), expected, strict=True):
        assert_same(got, wanted, name)


def matrix(
    place: Place, rows: int, like: Input, poisoned: torch.Tensor | None = None
) -> torch.Tensor:
    """A matrix in the layout of ``like``; ``poisoned`` rows are NaN and infinity."""
    x = Input(rows, like.k, like.dtype, like.layout).on(place)
    if poisoned is not None:
        where = poisoned.nonzero().flatten().tolist()
        for number, row in enumerate(where):
            x[row] = (NAN, INF)[number % 2]
    return x


def probabilities(place: Place, routing: Routing, inverse_map: torch.Tensor) -> torch.Tensor:
    """fp32 ``[T, k]``; NaN where an assignment is dropped."""
    generator = torch.Generator().manual_seed(3)
    probs = torch.rand(inverse_map.shape, generator=generator)
    return probs.masked_fill(inverse_map < 0, NAN).to(place.device)


def check_permute(place: Place, routing: Routing, like: Input) -> None:
    """Rows are moved, and rows without an assignment are 0; dropped tokens are not read."""
    row_map, inverse_map = routing.maps()
    x = matrix(place, routing.tokens, like, (inverse_map < 0).all(1))
    y = place.empty((routing.rows, like.k), like.dtype, int(like.layout == "shifted"))
    with place.launching(y):
        kernels.permute(x, row_map.to(place.device), inverse_map.to(place.device), y)
    assert_same(y, reference.permute(x.cpu(), row_map, inverse_map), "y")
    assert y.isfinite().all()


def check_unpermute(place: Place, routing: Routing, like: Input, with_probs: bool) -> None:
    """The sums are the reference's, and nothing of rows without an assignment is in them."""
    row_map, inverse_map = routing.maps()
    y = matrix(place, routing.rows, like, row_map < 0)
    probs = probabilities(place, routing, inverse_map) if with_probs else None
    out = place.empty((routing.tokens, like.k), like.dtype, int(like.layout == "shifted"))
    with place.launching(out):
        kernels.unpermute(y, inverse_map.to(place.device), probs, out)
    expected = reference.unpermute(y.cpu(), inverse_map, None if probs is None else probs.cpu())
    assert_same(out, expected, "out")
    assert out.isfinite().all()


def check_unpermute_backward(place: Place, routing: Routing, like: Input, with_dot: bool) -> None:
    """Both gradients are the reference's; rows without an assignment get and give 0."""
    row_map, inverse_map = routing.maps()
    dout = matrix(place, routing.tokens, like, (inverse_map < 0).all(1))
    y = matrix(place, routing.rows, like, row_map < 0) if with_dot else None
    probs = probabilities(place, routing, inverse_map)
    dy = place.empty((routing.rows, like.k), like.dtype, int(like.layout == "shifted"))
    dprobs = place.empty(inverse_map.shape, torch.float32) if with_dot else None
    maps = (row_map.to(place.device), inverse_map.to(place.device))
    with place.launching(dy, dprobs):
        kernels.unpermute_backward(dout, y, *maps, probs, dy, dprobs)
    expected = reference.unpermute_backward(
        dout.cpu(), None if y is None else y.cpu(), row_map, inverse_map, probs.cpu()
    )
    assert_same(dy, expected[0], "dy")
    assert_same(dprobs, expected[1], "dprobs")
    assert dy.isfinite().all()
    assert dprobs is None or dprobs.isfinite().all()


# -- with gradients -----------------------------------------------------------


def layer(
    x: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor, experts: int, capacity: int
) -> list[torch.Tensor]:
    """Everything that permute, unpermute and their gradients return, unused rows made NaN."""
    x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
    permuted = permute(x, indices, probs, num_experts=experts, capacity=capacity)
    assert permuted.probs is not None
    is_unused = permuted.row_map < 0
    y = permuted.x.masked_fill(is_unused[:, None], NAN)
    out = unpermute(y, permuted, probs=probs) + unpermute(permuted.x, permuted)
    dx, dprobs, dy = torch.autograd.grad(
        (out, permuted.probs),
        (x, probs, y),
        (out.detach(), permuted.probs.detach().masked_fill(is_unused, NAN)),
    )
    maps = [permuted.split_sizes, permuted.row_map, permuted.inverse_map]
    return [*maps, permuted.x, permuted.probs, out, dx, dprobs, dy]
