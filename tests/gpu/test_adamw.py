"""Steps of AdamW on a GPU: bits of the reference, bytes of the quantizers, graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import adamw_cases as cases
import every_format as formats
import pytest
import torch
from adamw_cases import BF16, F32

import fuser
from fuser.te.pytorch import optimizers as fused

running = contextlib.nullcontext
SHAPES = [((20, 24), 0), ((3, 5, 8), 1), ((7,), 0), ((), 0), ((2, 0), 0), ((1024, 4096), 0)]


@cases.EVERY_DTYPE
@pytest.mark.parametrize(("shape", "offset"), SHAPES, ids=str)
def test_weights_and_state_have_the_bits_of_the_reference(
    dtype: torch.dtype, of_gradient: torch.dtype, shape: tuple[int, ...], offset: int
) -> None:
    cases.check_values(running, "cuda", shape, dtype, of_gradient, offset)


@cases.EVERY_QUANTIZER
@cases.EVERY_DTYPE
@pytest.mark.parametrize(
    ("shape", "offset"), [((160, 288), 0), ((20, 44), 0), ((160, 288), 1), ((2048, 1536), 0)]
)
def test_a_tensor_is_quantized_by_the_step(
    name: str,
    dtype: torch.dtype,
    of_gradient: torch.dtype,
    shape: tuple[int, int],
    offset: int,
) -> None:
    cases.check_write(running, "cuda", name, shape, dtype, of_gradient, offset)


def experts(recipe: Any, **options: Any) -> Any:
    with fuser.quantized_model_init(recipe=recipe):
        return fuser.GroupedLinear(4, 256, 384, bias=False, dtype=BF16, device="cuda", **options)


def dense(recipe: Any) -> Any:
    with fuser.quantized_model_init(recipe=recipe):
        return fuser.Linear(256, 384, dtype=BF16, device="cuda")


MODELS: dict[str, Callable[[Any], Any]] = {
    "dense": dense,
    "experts": experts,
    "one weight": lambda recipe: experts(recipe, single_grouped_weight=True),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", formats.RECIPES)
def test_a_captured_step_writes_what_quantizing_the_master_writes(name: str, model: str) -> None:
    """Five steps, the last two in a graph, beside torch's AdamW, whose values are quantized."""
    recipe = formats.deterministic(formats.RECIPES[name])
    if model == "one weight" and name in ("delayed", "rowwise"):
        pytest.skip(f"{name} scaling has no weight of all groups")
    torch.manual_seed(0)
    layer = MODELS[model](recipe)
    optimizer = fused.FusedAdam(
        layer.parameters(), 1e-2, weight_decay=0.1, capturable=True, master_weights=True
    )
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in layer.parameters()]
    reference = torch.optim.AdamW(masters, 1e-2, weight_decay=0.1)
    theirs = reference.param_groups[0]["params"]
    gradients = [torch.randn(p.shape, device="cuda", dtype=BF16) for p in layer.parameters()]
    for p, q, g in zip(layer.parameters(), theirs, gradients, strict=True):
        p.grad, q.grad = g, g.float()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(2):
        graph.replay()
    for _ in range(5):
        reference.step()
    torch.cuda.synchronize()
    for p, q in zip(layer.parameters(), theirs, strict=True):
        master = optimizer.state[p]["master_param"]
        torch.testing.assert_close(master, q.detach(), atol=1e-6, rtol=1e-5)
        values = master.to(BF16)
        if not isinstance(p, fuser.QuantizedTensor):
            assert torch.equal(p.detach(), values)
            continue
        again = p.detach().clone()
        again.quantize_(values)
        if name == "delayed":  # a later step may have another scale; the amax is of these values
            assert torch.equal(again._scale_inv, p._scale_inv)
        for buffer, found in p.buffers().items():
            assert found is None or torch.equal(found, again.buffers()[buffer]), buffer


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_step_reads_nothing_back(dtype: torch.dtype) -> None:
    layer = fuser.Linear(256, 256, dtype=dtype, device="cuda")
    optimizer = fused.FusedAdam(layer.parameters(), 1e-3, master_weights=True, capturable=True)
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("master_weights", [False, True])
def test_steps_of_all_parameters_are_repeated_with_the_bits_of_the_reference(
    master_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.check_steps(running, "cuda", monkeypatch, master_weights=master_weights)
