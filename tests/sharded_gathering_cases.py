"""Cases: the copies that are gathered, and the lifetime of their memory."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from sharded_models import (
    RECIPES,
    case,
    each,
    gathers,
    inputs,
    linear,
    linears,
    loss_of,
    model,
    rank,
    ranks,
    said,
    sharded,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.errors import StateError


@each("current", "mxfp8", "nvfp4", "blocks of 1x128")
def a_pass_gathers_the_copy_that_it_reads(name: str) -> None:
    layers, recipe = sharded(model(name)), RECIPES[name]()
    numel = layers[0].weight.numel() // ranks()
    bits = 4.5 if "nvfp4" in name else 8.25
    loss_of(layers, inputs(layers, 1), recipe).backward()
    for compute, usage in ((recipe, "columnwise"), (None, "rowwise")):
        if name == "current":
            usage = "rowwise"  # of which the other is the transpose
        with gathers() as forward:
            loss = loss_of(layers, inputs(layers, 1).requires_grad_(), compute)
        with gathers() as backward:
            loss.backward()
        assert len(forward) == len(backward) == 3
        for names, size in forward:
            assert "rowwise" in names
            assert size <= numel * bits / 8 + 8
        for names, size in backward:
            copies = {one.split("_")[1 if "amax" not in one else 2] for one in names.split(", ")}
            assert usage in copies
            assert copies <= {usage, "scale"}
            assert size <= numel * bits / 8 + 8


@each("mxfp8")
def a_backward_that_does_not_read_a_weight_gathers_one_copy(name: str) -> None:
    """That of the first layer, whose input needs no gradient."""
    layers = sharded(linear(RECIPES[name](), 64, 128))
    for recipe in (RECIPES[name](), None):
        loss = loss_of(layers, inputs(layers, 1), recipe)
        with gathers() as backward:
            loss.backward()
        assert [names for names, _ in backward] == ["_rowwise_data, _rowwise_scale_inv"]


@each("mxfp8", "current")
def an_override_of_the_backward_reads_the_rowwise_copy(name: str) -> None:
    for override in ("high_precision", "dequantized"):
        recipe = RECIPES[name](backward_override=override)
        layers, reference = sharded(model(name)), model(name)
        x, own = (inputs(reference, rank()).requires_grad_() for _ in range(2))
        loss = loss_of(layers, x, recipe)
        with gathers() as backward:
            loss.backward()
        assert not any("columnwise" in names for names, _ in backward)
        loss_of(reference, own, recipe).backward()
        assert torch.equal(x.grad, own.grad)


@each("mxfp8")
def a_forward_that_is_recomputed_has_every_copy_in_backward(name: str) -> None:
    for use_reentrant in (False, True):
        for is_inside in (False, True):
            layers, reference = model(name), model(name)
            recipe = RECIPES[name]()
            for layer in linears(layers):
                if is_inside:
                    kept = layer.forward
                    layer.forward = functools.partial(checkpoint, kept, use_reentrant=use_reentrant)
            sharded(layers)
            x, own = (inputs(reference, rank()).requires_grad_() for _ in range(2))
            with fuser.autocast(recipe=recipe):
                run = (
                    layers
                    if is_inside
                    else functools.partial(checkpoint, layers, use_reentrant=use_reentrant)
                )
                y = run(x)
                expected = reference(own)
            y.square().mean().backward()
            expected.square().mean().backward()
            assert torch.equal(y, expected)
            torch.testing.assert_close(x.grad, own.grad)


@each("mxfp8", "current")
def nothing_remains_in_memory_after_a_step(name: str) -> None:
    layers, recipe = sharded(model(name)), RECIPES[name]()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    counts = []
    for step in range(4):
        loss_of(layers, inputs(layers, step).requires_grad_(), recipe).backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        buffers = gathered_memory(layers)
        assert len(buffers) == len(linears(layers)) * (4 if name == "mxfp8" else 3)
        assert not any(memory.untyped_storage().size() for memory in buffers), step
        counts.append(sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor)))
    assert counts[-1] == counts[-2]


def gathered_memory(layers: Any) -> list[torch.Tensor]:
    """The memory of all gathered quantized parameters."""
    found = []
    for layer in linears(layers):
        (group,) = param_groups(layer)
        for param in group.fsdp_params:
            gathering = getattr(param._unsharded_param, "_gathering", None)
            found += [] if gathering is None else list(gathering.memory.values())
    return found


def param_groups(layer: Any) -> list[Any]:
    """The groups of parameters that ``fully_shard`` made for a module."""
    state = layer._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if found is None else list(found)


@each("mxfp8", "current")
def the_memory_of_a_run_does_not_grow_from_layer_to_layer(name: str) -> None:
    """In forward and backward, at most two of 8 layers are gathered at a time."""
    torch.manual_seed(1)
    with fuser.quantized_model_init(recipe=RECIPES[name]()):
        layers = fuser.Sequential(*(fuser.Linear(64, 64) for _ in range(8)))
    sharded(layers)
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(m.untyped_storage().size() for m in gathered_memory_so_far(layers)))

    for layer in layers:
        layer.register_forward_hook(look)
        layer.register_full_backward_pre_hook(look)
    for _ in range(2):
        seen.clear()
        loss_of(layers, inputs(layers, 1).requires_grad_(), RECIPES[name]()).backward()
    assert len(seen) == 16
    one_layer = 64 * 64 * 2.2
    assert max(seen) <= 3 * one_layer, seen


def gathered_memory_so_far(layers: Any) -> list[torch.Tensor]:
    has_begun = [
        layer
        for layer in linears(layers)
        if all(hasattr(p, "_unsharded_param") for g in param_groups(layer) for p in g.fsdp_params)
    ]
    return gathered_memory(has_begun)


@case
def a_copy_that_was_not_gathered_is_refused() -> None:
    layers = sharded(model("mxfp8"))
    layer = linears(layers)[0]
    seen: list[str] = []

    def read(module: Any, args: Any, output: Any) -> None:
        weight = module.weight
        seen.append(said(StateError, lambda: weight.operand("columnwise")))
        assert weight.operand("rowwise").data.shape == weight.shape
        assert weight.dequantize().shape == weight.shape
        kept.append(weight)

    kept: list[Any] = []
    layer.basic_ops[0].register_forward_hook(read)
    loss_of(layers, inputs(layers, 1), RECIPES["mxfp8"]())
    assert "The columnwise copy of a sharded parameter, a MXFP8Tensor of shape (128, 64)" in seen[0]
    assert "while rowwise of it was gathered" in seen[0]
    assert "no copy" in said(StateError, lambda: kept[0].dequantize())
    assert "no copy" in said(StateError, lambda: kept[0].clone())


@case
def the_gathered_bytes_are_freed_after_their_transpose_was_made() -> None:
    layers, recipe = sharded(model("current")), RECIPES["current"]()
    seen: list[tuple[bool, bool]] = []

    def look(module: Any, *_: Any) -> None:
        memory = module.weight._gathering.memory
        names = ("_rowwise_data", "_columnwise_data")
        seen.append(tuple(memory[name].untyped_storage().size() > 0 for name in names))

    op = linears(layers)[1].basic_ops[0]
    op.register_forward_hook(look)
    op.register_full_backward_pre_hook(look)
    loss_of(layers, inputs(layers, 1).requires_grad_(), recipe).backward()
    assert seen == [(True, False), (False, True)]


@each("mxfp8", "current", "blocks of 128x128")
def matrices_of_a_stack_are_split_by_the_matrix(name: str) -> None:
    """A parameter of three matrices: two of them on the first rank, and one on the second."""
    torch.manual_seed(1)
    with fuser.quantized_model_init(recipe=RECIPES[name]()):
        weight = fuser.BasicLinear(256, 3 * 256).weight
    module = torch.nn.Identity()
    module.weight = torch.nn.Parameter(weight.detach().view(3, 256, 256))
    expected = weight.dequantize().view(3, 256, 256)
    fully_shard(module)
    assert module.weight._local_tensor.shape[0] == (2, 1)[rank()]
    module.unshard()
    torch.testing.assert_close(module.weight.dequantize(), expected, rtol=0.1, atol=1e-3)
