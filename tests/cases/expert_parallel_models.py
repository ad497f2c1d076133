"""A layer of experts on some ranks or on one, its inputs, and the results of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
import torch.distributed as dist
from ranks import device_type

import fuser
from fuser import recipe as recipes
from fuser.basic_ops.grouped_products import quantizes_groups_of
from fuser.gemm import grouped
from fuser.recipe import BACKWARD_OVERRIDES

EXPERTS, CHOICES, HIDDEN, WIDTH = 4, 2, 64, 64
TOKENS = (30, 17, 0, 9)  # of each rank
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CHANNELS = ("split_sizes", "probs", "rows")


def device() -> torch.device:
    """That of this rank."""
    return torch.device(device_type())


def layer(
    group: Any = None,
    dtype: torch.dtype = BF16,
    *,
    pieces: bool = False,
    returns: bool = False,
    bias: bool = False,
    single: bool = True,
    fusions: Any = fuser.FUSIONS,
    **options: Any,
) -> fuser.Sequential:
    """A layer of experts; of this rank's, if there is a group. Parameters are those of one rank."""
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    local = EXPERTS // ranks
    dispatch = fuser.MoeDispatch(EXPERTS, expert_parallel_group=group, **options)
    for index, channel in enumerate(CHANNELS):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=returns)
    linears = []
    for seed, (k, n) in enumerate(((HIDDEN, 2 * WIDTH), (WIDTH, HIDDEN))):
        op = fuser.GroupedLinear(
            *(local, k, n),
            bias=bias,
            single_grouped_weight=single,
            single_grouped_bias=single,
            dtype=dtype,
            device=device(),
        )
        whole = {"weight": oracles.random_tensor((EXPERTS, n, k), FP32, 10 + seed) * k**-0.5}
        if bias:
            whole["bias"] = oracles.random_tensor((EXPERTS, n), FP32, 20 + seed)
        for what, values in whole.items():
            own = values[rank * local : (rank + 1) * local].to(dtype)
            with torch.no_grad():
                for each, value in zip(op._parts(what), [own] if single else own, strict=True):
                    each.copy_(value)
        linears.append(op.set_extra_input_channel(0, "split_sizes"))
    ops: list[Any] = [
        dispatch,
        linears[0],
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        linears[1],
        fuser.MoeCombine(expert_parallel_group=group).set_extra_input_channel(0, "rows"),
    ]
    if pieces:
        ops = [part for op in ops for part in (torch.nn.Identity(), op)]
    return fuser.Sequential(*ops, fusions=fusions)


class Given:
    """Tokens, expert indices, probabilities and gradients of all ranks, in their order."""

    def __init__(
        self,
        ranks: int,
        dtype: torch.dtype = BF16,
        *,
        counts: tuple[int, ...] = TOKENS,
        k: int = CHOICES,
        seed: int = 0,
        dropped: float = 0.2,
        unused: int | None = None,
        probs_dtype: torch.dtype = FP32,
    ) -> None:
        self.counts = counts[:ranks]
        total = sum(self.counts)
        generator = torch.Generator(device()).manual_seed(seed)
        order = torch.rand(total, EXPERTS, generator=generator)
        if unused is not None:
            order[:, unused] = 2
        indices = order.argsort(1)[:, :k]
        is_dropped = torch.rand(indices.shape, generator=generator) < dropped
        self.indices = indices.masked_fill(is_dropped, -1)
        self.probs = (torch.rand(total, k, generator=generator) + 0.1).to(probs_dtype)
        self.x = oracles.random_tensor((total, HIDDEN), dtype, seed + 1)
        self.x[self.counts[0] :] *= 3  # other scales on each rank
        self.dy = oracles.random_tensor((total, HIDDEN), dtype, seed + 2)

    def of(self, rank: int) -> tuple[torch.Tensor, ...]:
        """The tensors of one rank."""
        return tuple(t.split(self.counts)[rank].clone() for t in self.all())

    def all(self) -> tuple[torch.Tensor, ...]:
        """Those of all ranks."""
        return tuple(t.to(device()) for t in (self.x, self.indices, self.probs, self.dy))


Call = Callable[..., torch.Tensor]


def step(model: Any, given: tuple[torch.Tensor, ...], recipe: Any = None, call: Any = None) -> Any:
    """Output, gradients of tokens and probabilities, and those of the parameters."""
    x, indices, probs, dy = given
    leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
    model.zero_grad()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = (call or model)(leaves[0], indices, leaves[1])
    y.backward(dy.to(y.dtype))
    of_tokens = [y.detach(), *(leaf.grad for leaf in leaves)]
    return of_tokens, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def part_of(whole: Any, given: Given, rank: int, ranks: int) -> Any:
    """This rank's part of the results of one rank."""
    of_tokens, of_params = whole
    if len(of_params) > 4:  # a parameter for each expert
        count = len(of_params) // EXPERTS
        local = EXPERTS // ranks
        groups = [of_params[i * EXPERTS : (i + 1) * EXPERTS] for i in range(count)]
        own = [p for group in groups for p in group[rank * local : (rank + 1) * local]]
    else:
        own = [p.chunk(ranks)[rank] for p in of_params]
    return [t.split(given.counts)[rank] for t in of_tokens], own


def compared(
    rank: int,
    *,
    recipe: Any = None,
    dtype: torch.dtype = BF16,
    steps: int = 2,
    of_group: Any = None,
    given: dict[str, Any] | None = None,
    whole: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Some steps on all ranks, and on one. ``whole``: other options of the latter."""
    ranks = dist.get_world_size()
    model = layer(dist.group.WORLD, dtype, **options)
    alone = layer(None, dtype, **{**options, **(whole or {})})
    found, expected = [], []
    for seed in range(steps):
        data = Given(ranks, dtype, seed=seed, **(given or {}))
        found += flat(step(model, data.of(rank), recipe))
        expected += flat(part_of(step(alone, data.all(), recipe), data, rank, ranks))
    return {"found": found, "expected": expected}


def flat(results: Any) -> list[torch.Tensor]:
    of_tokens, of_params = results
    return [*of_tokens, *of_params]


def recipes_of() -> dict[str, Any]:
    """Every recipe with every override; amaxes of delayed scaling are not reduced."""
    found: dict[str, Any] = {}
    for name, cls in formats.RECIPES.items():
        for override in (None, *BACKWARD_OVERRIDES):
            if override is not None and not cls.accepts_backward_override:
                continue
            options: dict[str, Any] = {} if override is None else {"backward_override": override}
            if issubclass(cls, recipes.DelayedScaling):
                options |= {"reduce_amax": False, "amax_history_len": 2}
            found[f"{name} {override}"] = formats.deterministic(cls, **options)
    return found


RECIPES = recipes_of()
LAYERS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": FP32},
    "fp16": {"dtype": FP16},
    "bf16": {},
    "biases": {"bias": True},
    "separate weights": {"single": False, "bias": True},
    "in pieces": {"pieces": True},
    "not fused": {"fusions": ()},
    "one choice": {"given": {"k": 1}},
    "no drops": {"given": {"dropped": 0.0}},
    "all dropped": {"given": {"dropped": 1.0}},
    "an expert without rows": {"given": {"unused": 3}},
    "a rank without tokens": {"given": {"counts": (0, 21)}},
    "no tokens": {"given": {"counts": (0, 0)}},
    "probs in bf16": {"given": {"probs_dtype": BF16}},
    "capacity": {"capacity": 120, "whole": {"capacity": 100}},
    "capacity probs": {
        "capacity": 120,
        "drop_policy": "probs",
        "whole": {"capacity": 100, "drop_policy": "probs"},
    },
    "capacity in pieces": {"capacity": 120, "pieces": True},
    "capacity 0": {"capacity": 0, "whole": {"capacity": 0}},
}


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """All experts are one product, as on a Hopper GPU, and plans know it."""

    def runs_at_once(self: Any, key: Any) -> bool:
        return quantizes_groups_of(key.recipe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: dtype is not FP32)
        patch.setattr(fuser.GroupedLinear, "runs_at_once", runs_at_once)
        yield
