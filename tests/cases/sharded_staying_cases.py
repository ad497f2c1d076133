"""Cases: parameters that stay gathered after forward (``reshard_after_forward=False``)."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from ranks import device_type
from sharded_models import (
    EXACT,
    RECIPES,
    assert_same_bytes,
    each,
    inputs,
    linears,
    loss_of,
    resharded,
    said,
    sharded,
    unsharded,
)
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.errors import StateError

WIDTHS = (256, 512)
NUMEL = 3 * WIDTHS[0] * WIDTHS[1]
DERIVED = ("current", "delayed", "blocks of 128x128")
"""Formats of which one copy is the transpose of the other."""


class _Gathers(TorchDispatchMode):
    """Notes the bytes that each all-gather returns, of whatever code."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            outputs = torch.utils._pytree.tree_leaves(args[0])
            self.sizes.append(sum(output.nbytes for output in outputs))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def all_gathers() -> Iterator[list[int]]:
    """The bytes of all-gathers inside."""
    with _Gathers() as noted:
        yield noted.sizes


def products(name: str, *, is_quantized: bool = True) -> fuser.Sequential:
    """Three linears without biases, equal on all ranks; the weights are all that is gathered."""
    inner, outer = WIDTHS
    torch.manual_seed(1)
    with fuser.quantized_model_init(enabled=is_quantized, recipe=RECIPES[name]()):
        return fuser.Sequential(
            fuser.Linear(inner, outer, bias=False),
            fuser.GELU(),
            fuser.Linear(outer, inner, bias=False),
            fuser.Linear(inner, outer, bias=False),
        )


def staying(name: str, **options: Any) -> Any:
    return sharded(products(name), reshard_after_forward=False, **options)


def assert_same_step(layers: Any, reference: Any, recipe: Any, seed: int) -> None:
    """One step on equal data of all ranks has the bits of the unsharded model."""
    x, own = (inputs(reference, seed).requires_grad_() for _ in range(2))
    for model, data in ((layers, x), (reference, own)):
        loss_of(model, data, recipe).backward()
    assert torch.equal(x.grad, own.grad)
    for parameter, twin in zip(layers.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), twin.grad)


@each()
def a_gathering_of_a_parameter_that_stays_is_of_one_copy(name: str) -> None:
    """In all, a forward and a backward gather what those of resharded parameters do, or half."""
    recipe = RECIPES[name]()
    most = (0.29 if "nvfp4" in name else 0.52) * 2 * NUMEL + 64
    for is_quantized in (True, False):
        if name == "delayed" and not is_quantized:
            continue
        layers = products(name, is_quantized=is_quantized)
        if not is_quantized:
            fuser.distributed.gather_quantized(layers, recipe)
        sharded(layers, reshard_after_forward=False)
        reference = products(name, is_quantized=is_quantized)
        loss_of(layers, inputs(layers, 1), recipe).backward()  # ranks agree on scales
        loss_of(reference, inputs(layers, 1), recipe).backward()
        for model in (layers, reference):
            model.zero_grad()
        x, own = (inputs(layers, 2).requires_grad_() for _ in range(2))
        with all_gathers() as forward:
            loss = loss_of(layers, x, recipe)
        with all_gathers() as backward:
            loss.backward()
        assert 0 < sum(forward) <= most, (sum(forward), most)
        assert sum(backward) <= most, (sum(backward), most)
        assert (not backward) == (name in DERIVED), backward
        loss_of(reference, own, recipe).backward()
        assert torch.equal(x.grad, own.grad)
        for parameter, twin in zip(layers.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter.grad.full_tensor(), twin.grad)


@each(*EXACT)
def three_steps_with_parameters_that_stay_are_those_of_the_unsharded_model(name: str) -> None:
    layers, reference, recipe = staying(name), products(name), RECIPES[name]()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (layers, reference)]
    for step in range(3):
        assert_same_step(layers, reference, recipe, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for weight, layer in zip(unsharded(layers), linears(reference), strict=True):
            assert_same_bytes(weight, layer.weight)
        resharded(layers)


@each("mxfp8", "nvfp4", "rowwise")
def a_backward_gathers_all_columns_of_a_group_at_once(name: str) -> None:
    layers, reference, recipe = products(name), products(name), RECIPES[name]()
    fully_shard(layers)  # torch lets the root stay gathered
    loss = loss_of(layers, inputs(layers, 1).requires_grad_(), recipe)
    with all_gathers() as backward:
        loss.backward()
    assert len(backward) == 1
    layers.zero_grad()
    assert_same_step(layers, reference, recipe, 2)


@each("mxfp8")
def what_no_backward_reads_is_not_gathered_in_it(name: str) -> None:
    """The columns of a first layer whose input needs no gradient, and those of other formats."""
    recipe = RECIPES[name]()
    for override in ("high_precision", "dequantized"):
        loss = loss_of(
            staying(name), inputs(products(name), 1), RECIPES[name](backward_override=override)
        )
        with all_gathers() as backward:
            loss.backward()
        assert not backward
    layers = staying(name)
    loss = loss_of(layers, inputs(layers, 1), recipe)
    with all_gathers() as backward:
        loss.backward()
    assert len(backward) == 2


@each("mxfp8", "current", "blocks of 128x128", "rowwise")
def one_copy_of_a_parameter_that_stays_is_in_memory(name: str) -> None:
    layers, recipe = staying(name), RECIPES[name]()
    seen: list[tuple[bool, bool]] = []

    def look(module: Any, *_: Any) -> None:
        memory = module.weight._gathering.memory
        names = ("_rowwise_data", "_columnwise_data")
        seen.append(tuple(memory[name].untyped_storage().size() > 0 for name in names))

    op = layers[2].basic_ops[0]
    op.register_forward_hook(look)
    op.register_full_backward_hook(look)
    loss_of(layers, inputs(layers, 1).requires_grad_(), recipe).backward()
    assert seen == [(True, False), (False, True)]
    memory = [
        tensor
        for layer in (layers[0], layers[2], layers[3])
        for group in _groups(layer)
        for param in group.fsdp_params
        for tensor in param._unsharded_param._gathering.memory.values()
    ]
    assert not any(tensor.untyped_storage().size() for tensor in memory)


def _groups(layer: Any) -> list[Any]:
    state = layer._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if found is None else list(found)


@each("mxfp8", "current", "nvfp4", "rowwise")
def parameters_may_stay_over_several_microbatches(name: str) -> None:
    """The first one gathers each copy, and the others nothing."""
    layers, reference, recipe = staying(name), products(name), RECIPES[name]()
    for micro in range(3):
        layers.set_requires_gradient_sync(micro == 2)
        layers.set_reshard_after_backward(micro == 2)
        x, own = (inputs(layers, micro).requires_grad_() for _ in range(2))
        with all_gathers() as found:
            loss_of(layers, x, recipe).backward()
        loss_of(reference, own, recipe).backward()
        assert torch.equal(x.grad, own.grad)
        if micro:
            assert not found
    for parameter, twin in zip(layers.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), twin.grad, rtol=1e-5, atol=1e-7)


@each("mxfp8", "current", "blocks of 1x128")
def two_forwards_may_come_before_their_backwards(name: str) -> None:
    layers, reference, recipe = staying(name), products(name), RECIPES[name]()
    for is_last_said in (False, True):
        x = [inputs(layers, seed).requires_grad_() for seed in (1, 2)]
        own = [inputs(layers, seed).requires_grad_() for seed in (1, 2)]
        losses = [loss_of(layers, one, recipe) for one in x]
        for place in (1, 0):
            layers.set_is_last_backward(place == 0 or not is_last_said)
            losses[place].backward()
            loss_of(reference, own[place], recipe).backward()
            assert torch.equal(x[place].grad, own[place].grad)


@each("mxfp8", "rowwise", "current")
def layers_of_one_group_that_stay_may_be_recomputed_one_by_one(name: str) -> None:
    """The columns of all are gathered with the first, and the rows of the others still read."""
    layers, reference, recipe = products(name), products(name), RECIPES[name]()
    for layer in linears(layers):
        kept = layer.forward
        layer.forward = functools.partial(checkpoint, kept, use_reentrant=False)
    fully_shard(layers, reshard_after_forward=False)
    for seed in (1, 2):
        assert_same_step(layers, reference, recipe, seed)
        for each_model in (layers, reference):
            each_model.zero_grad()


@each("mxfp8", "rowwise", "current")
def forwards_of_parameters_that_stay_may_be_recomputed(name: str) -> None:
    for use_reentrant in (False, True):
        layers, reference, recipe = staying(name), products(name), RECIPES[name]()
        x, own = (inputs(layers, 1).requires_grad_() for _ in range(2))
        with fuser.autocast(recipe=recipe):
            y = checkpoint(layers, x, use_reentrant=use_reentrant)
            expected = reference(own)
        assert torch.equal(y, expected)
        for output in (y, expected):
            output.square().mean().backward()
        assert torch.equal(x.grad, own.grad)


@each("mxfp8", "current")
def evaluation_between_steps_leaves_no_old_bytes(name: str) -> None:
    """An evaluated model stays gathered until a backward, as in torch."""
    layers, reference, recipe = staying(name), products(name), RECIPES[name]()
    for step in range(2):
        with torch.no_grad():
            x = inputs(layers, 10 + step)
            assert torch.equal(loss_of(layers, x, recipe), loss_of(reference, x, recipe))
        assert_same_step(layers, reference, recipe, step)
        for model in (layers, reference):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            model.zero_grad()


@each("mxfp8", "rowwise")
def a_shard_that_is_written_before_the_backward_is_refused(name: str) -> None:
    """Its columns would be those of other values than the forward's."""
    layers, recipe = staying(name), RECIPES[name]()
    x = inputs(layers, 1).requires_grad_()
    loss = loss_of(layers, x, recipe)
    with torch.no_grad():
        for group in _groups(layers[2]):
            for param in group.fsdp_params:
                param.sharded_param.mul_(2)
    sentence = said(StateError, loss.backward)
    assert f"of shape ({WIDTHS[0]}, {WIDTHS[1]}) was written between a forward" in sentence


@each("current", "blocks of 128x128")
def a_copy_that_is_made_of_the_other_has_the_values_of_the_forward(name: str) -> None:
    """Also if the shard was written since: the whole parameter has the old bytes."""
    layers, reference, recipe = staying(name), products(name), RECIPES[name]()
    x, own = (inputs(layers, 1).requires_grad_() for _ in range(2))
    loss, expected = loss_of(layers, x, recipe), loss_of(reference, own, recipe)
    with torch.no_grad():
        for group in _groups(layers[2]):
            for param in group.fsdp_params:
                param.sharded_param.mul_(2)
    for one in (loss, expected):
        one.backward()
    assert torch.equal(x.grad, own.grad)


@each("mxfp8", "current")
def a_module_of_torch_reads_parameters_that_stay(name: str) -> None:
    """Its backward reads the values of the copy that is in memory, which are the forward's."""

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = products(name)[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight)

    module, x = Product(), torch.randn(32, WIDTHS[0], device=device_type(), requires_grad=True)
    values = module.weight.dequantize().detach()
    fully_shard(module, reshard_after_forward=False)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, values.sum(0).expand_as(x), rtol=1e-4, atol=1e-5)


@each()
def a_write_to_a_gathered_parameter_without_all_of_its_copies_is_refused(name: str) -> None:
    """Between forward and backward, and after the reshard; nothing is changed, nor plain tensors.

    The backward is that of a forward without the write, as the write did not happen.
    """
    recipe, layers, reference = RECIPES[name](), staying(name), products(name)
    loss = loss_of(layers, inputs(reference, 1), recipe)
    own = loss_of(reference, inputs(reference, 1), recipe)
    weight, plain = linears(layers)[0].weight.detach(), torch.ones(WIDTHS[::-1])
    other, flag = weight._quantizer.unbound()(plain.to(weight.device)), torch.ones(1)
    writes = (
        weight.zero_,
        lambda: weight.quantize_(plain),
        lambda: weight.quantize_(plain, noop_flag=flag),
        lambda: weight.copy_(other),
        lambda: weight[:128].zero_(),
        lambda: weight[3:5, 2:4].fill_(1),
        lambda: torch._foreach_add_([plain, weight], 1.0),
        weight.share_memory_,
    )
    for when in ("rowwise copy of", "no copy of"):
        for write in writes:
            assert "sharded parameter" in (found := said(StateError, write).lower()), found
        assert when in said(StateError, weight.zero_)
        assert torch.equal(plain, torch.ones_like(plain))
        if when == "rowwise copy of":
            for one in (loss, own):
                one.backward()
            for parameter, twin in zip(layers.parameters(), reference.parameters(), strict=True):
                assert torch.equal(parameter.grad.full_tensor(), twin.grad)
            resharded(layers)


@each()
def copies_of_a_gathered_parameter_have_the_values_that_are_in_memory(name: str) -> None:
    """Deep, pickled and copied into another tensor; after the reshard each is refused."""
    layers, expected = staying(name), products(name)[0].weight.dequantize()
    loss = loss_of(layers, inputs(layers, 1), RECIPES[name]())
    weight = linears(layers)[0].weight

    def into_another() -> Any:
        other = weight._quantizer.unbound()(torch.zeros(weight.shape, device=weight.device))
        return other.copy_(weight.detach())

    kinds = (
        lambda: copy.deepcopy(weight),
        lambda: pickle.loads(pickle.dumps(weight)),
        weight.detach().clone,
        into_another,
    )
    made = [kind() for kind in kinds]
    loss.backward()
    resharded(layers)
    again = weight._quantizer.unbound()(expected).dequantize()  # of the copy that is not there
    for kind, each_made in zip(kinds, made, strict=True):
        found = each_made.dequantize()
        assert torch.equal(found, expected) or (kind is into_another and torch.equal(found, again))
    for kind in kinds:
        assert "no copy of it was gathered" in said(StateError, kind)
