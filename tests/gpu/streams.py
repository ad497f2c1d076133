"""Launchers under CUDA graphs and on two streams: the same bits as a plain launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from quantize_cases import GPU, Input, assert_same

# Long enough on any GPU, 0.2 s, that a launch on the wrong stream runs before it ends, and that the
# host gets there, where 15 processes share a GPU.
SLEEP_CYCLES = 400_000_000

Run = Callable[[torch.Tensor], list[torch.Tensor]]
"""Makes outputs, launches over an input, returns the outputs."""


def check_replay(run: Run, case: Input) -> None:
    """A captured launch runs over the values that are there when it is replayed."""
    values = case.on(GPU)
    x = torch.zeros_like(values)
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x)
    for scale in (1.0, 0.25):
        x.copy_(values * scale)
        graph.replay()
        for got, expected in zip(captured, run(x), strict=True):
            assert_same(got, expected, "replayed")


def check_two_streams(run: Run, case: Input) -> None:
    """Launches wait for what is before them on their own stream, and for nothing else."""
    values = case.on(GPU)
    expected = run(values)
    x = torch.zeros_like(values)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(values)
        late = run(x)
    early = run(values)
    torch.cuda.current_stream().synchronize()
    assert not side.query()
    side.synchronize()
    for outputs in (early, late):
        for got, wanted in zip(outputs, expected, strict=True):
            assert_same(got, wanted, "on a stream")
