"""Training steps of grouped linears as Megatron-LM makes them, against a loop of experts in fp64.

Weight gradients go into views of one flat fp32 buffer, over two microbatches, at once or by
``backward_dw``; an optimizer with fp32 weights then reads that buffer.
"""

from __future__ import annotations

import math
from typing import Any

import oracles
import pytest
import torch

import fuser

EXPERTS, HIDDEN, WIDTH, ROWS = 3, 32, 24, 40
MICROBATCHES = ((17, 0, 20), (0, 40, 0))  # the first has rows of no expert
STEPS, RATE = 3, 0.05


class Trainer:
    """A grouped MLP, a flat buffer of gradients, fp32 weights, and the hooks of a data-parallel
    wrapper.

    Parameters
    ----------
    is_overwritten
        The first microbatch of a step overwrites the buffer, which is not cleared then.
    is_delayed
        ``backward_dw`` computes weight gradients, after all backwards or after each.
    zeros
        Stand-in gradients are zeros, which the hook adds.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        layout: dict[str, bool],
        is_overwritten: bool,
        zeros: bool,
        **how: Any,
    ) -> None:
        options = {"accumulate_into_main_grad": True, "dtype": dtype, "device": "cpu"}
        self.is_delayed = how["delay_wgrad_compute"]
        self.up = fuser.GroupedLinear(EXPERTS, HIDDEN, 2 * WIDTH, **options, **layout, **how)
        self.down = fuser.GroupedLinear(EXPERTS, WIDTH, HIDDEN, **options, **layout, **how)
        self.model = fuser.Sequential(self.up, fuser.ScaledSwiGLU(), self.down)
        oracles.randomize(self.model)
        self.is_overwritten = is_overwritten
        parameters = list(self.model.parameters())
        self.flat = torch.empty(sum(p.numel() for p in parameters))
        parts = self.flat.split([p.numel() for p in parameters])
        self.master = {p: p.detach().float().clone() for p in parameters}
        self.calls = 0
        weights = {p for name, p in self.model.named_parameters() if "weight" in name}
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.main_grad = part.view(parameter.shape)
            if parameter in weights:
                parameter.zero_out_wgrad = zeros
            parameter.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(self.take_gradient)
        for op in (self.up, self.down):
            op.register_wgrad_accumulation_and_reduce_hooks(self.count)

    def count(self) -> None:
        self.calls += 1

    @staticmethod
    def take_gradient(parameter: Any) -> None:
        """Move a gradient that is not in the buffer yet, as a data-parallel wrapper does."""
        is_zeroed = getattr(parameter, "zero_out_wgrad", False)
        if parameter.grad is not None and (not parameter.grad_added_to_main_grad or is_zeroed):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def step(self, batches: list[tuple[torch.Tensor, ...]], after_each: bool) -> None:
        self.flat.fill_(math.nan if self.is_overwritten else 0.0)
        for parameter in self.master:
            parameter.grad_added_to_main_grad = False
            if not hasattr(parameter, "zero_out_wgrad"):
                parameter.main_grad.zero_()  # a bias, whose gradient is never written there
        for number, (x, sizes, scales, dy) in enumerate(batches):
            self.choose_overwriting(number)
            y = self.model(x, sizes, scales, sizes)
            y.backward(dy)
            if after_each:
                self.write_weight_gradients()
        for number in range(0 if after_each else len(batches)):
            self.choose_overwriting(number)
            self.write_weight_gradients()
        with torch.no_grad():
            for parameter, master in self.master.items():
                assert parameter.grad is None
                master.sub_(parameter.main_grad, alpha=RATE)
                parameter.copy_(master)

    def choose_overwriting(self, microbatch: int) -> None:
        for parameter in self.master:
            parameter.overwrite_main_grad = self.is_overwritten and microbatch == 0

    def write_weight_gradients(self) -> None:
        self.down.backward_dw()
        self.up.backward_dw()


class Loop:
    """The same training of separate experts in fp64."""

    def __init__(self, trainer: Trainer) -> None:
        self.parameters = {
            f"{i}.{what}{g}": part.detach().double().clone().requires_grad_()
            for i, op in ((0, trainer.up), (2, trainer.down))
            for what in ("weight", "bias")
            for g, part in enumerate(parts_of(op, what))
        }

    def step(self, batches: list[tuple[torch.Tensor, ...]]) -> None:
        for x, sizes, scales, dy in batches:
            start = 0
            for g, size in enumerate(sizes.tolist()):
                rows = slice(start, start + size)
                own = {i: (self[i, "weight", g], self[i, "bias", g]) for i in (0, 2)}
                a, b = torch.nn.functional.linear(x[rows].double(), *own[0]).chunk(2, -1)
                h = torch.nn.functional.silu(a) * b * scales[rows, None].double()
                torch.nn.functional.linear(h, *own[2]).backward(dy[rows].double())
                start += size
        with torch.no_grad():
            for parameter in self.parameters.values():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=RATE)
                parameter.grad = None

    def __getitem__(self, place: tuple[int, str, int]) -> torch.Tensor:
        i, what, g = place
        return self.parameters[f"{i}.{what}{g}"]


def parts_of(op: fuser.GroupedLinear, what: str) -> list[torch.Tensor]:
    """The weights, or biases, of each expert."""
    one = getattr(op, what, None)
    return [getattr(op, f"{what}{g}") for g in range(EXPERTS)] if one is None else list(one)


def batches_of(step: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Input, split sizes, scales and gradient of the output of each microbatch."""
    found: list[tuple[torch.Tensor, ...]] = []
    for number, sizes in enumerate(MICROBATCHES):
        seed = 10 * step + 4 * number
        shapes = ((ROWS, HIDDEN), (ROWS,), (ROWS, HIDDEN))
        x, scales, dy = (
            oracles.random_tensor(shape, dtype, seed + k) for k, shape in enumerate(shapes)
        )
        found.append((x, torch.tensor(sizes), scales, dy / 8))
    return found


@pytest.mark.sampled(most=12)
@pytest.mark.parametrize("zeros", [False, True], ids=["no zeros", "zeros"])
@pytest.mark.parametrize("is_overwritten", [False, True], ids=["added", "overwritten"])
@pytest.mark.parametrize("when", ["in backward", "after each", "after both"])
@pytest.mark.parametrize("is_one", [False, True], ids=["separate", "one weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_two_microbatches_equal_a_loop_of_experts(
    dtype: torch.dtype, is_one: bool, when: str, is_overwritten: bool, zeros: bool
) -> None:
    layout = {"single_grouped_weight": is_one, "single_grouped_bias": is_one}
    is_delayed = when != "in backward"
    trainer = Trainer(dtype, layout, is_overwritten, zeros, delay_wgrad_compute=is_delayed)
    loop = Loop(trainer)
    for step in range(STEPS):
        batches = batches_of(step, dtype)
        trainer.step(batches, after_each=when != "after both")
        loop.step(batches)
    assert trainer.calls == 2 * STEPS * len(MICROBATCHES) * is_delayed
    bound = 1e-5 if dtype is torch.float32 else 0.02
    for i, op in ((0, trainer.up), (2, trainer.down)):
        for what in ("weight", "bias"):
            for g, part in enumerate(parts_of(op, what)):
                expected = loop[i, what, g].detach()
                error = (part.detach().double() - expected).norm() / expected.norm()
                assert error <= bound, (i, what, g, float(error))


def test_an_expert_without_rows_leaves_its_part_of_the_buffer() -> None:
    trainer = Trainer(torch.float32, {}, False, False, delay_wgrad_compute=False)
    x, sizes, scales, dy = batches_of(0, torch.float32)[1]
    trainer.flat.fill_(3.0)
    trainer.model(x, sizes, scales, sizes).backward(dy)
    for op in (trainer.up, trainer.down):
        assert bool((op.weight0.main_grad == 3).all())
        assert bool((op.weight1.main_grad != 3).any())
        assert bool((op.weight2.main_grad == 3).all())
