"""Models under ``fully_shard`` (FSDP2) on several ranks, against unsharded models."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gc
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.errors import InputError, StateError

RECIPES: dict[str, Callable[..., recipes.Recipe]] = {
    "current": recipes.Float8CurrentScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "blocks of 128x128": recipes.Float8BlockScaling,
    "blocks of 1x128": functools.partial(recipes.Float8BlockScaling, w_block_scaling_dim=1),
    "nvfp4": functools.partial(recipes.NVFP4BlockScaling, disable_stochastic_rounding=True),
    "nvfp4 of 1x16": functools.partial(
        recipes.NVFP4BlockScaling, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "rowwise": recipes.Float8RowwiseScaling,
    "delayed": functools.partial(recipes.DelayedScaling, amax_history_len=4),
}
WIDTHS = {"blocks of 128x128": (256, 512), "blocks of 1x128": (256, 512)}
"""In and out features of which each of two ranks has whole blocks."""
SMALL = (64, 128)
ODD = {"rowwise"}
"""Formats whose shards are never exact."""

CASES: dict[str, Callable[[], None]] = {}


def each(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a case of a function for each format; all formats if none is named."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for name in names or RECIPES:
            CASES[f"{function.__name__} [{name}]"] = functools.partial(function, name)
        return function

    return add


def one(function: Callable[[], None]) -> Callable[[], None]:
    """Make a case of a function."""
    CASES[function.__name__] = function
    return function


def rank() -> int:
    return dist.get_rank()


def ranks() -> int:
    return dist.get_world_size()


# -- models ------------------------------------------------------------------------------


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


def linear(recipe: recipes.Recipe, inner: int, outer: int, **options: Any) -> fuser.Sequential:
    """One linear, equal on all ranks."""
    torch.manual_seed(1)
    with fuser.quantized_model_init(recipe=recipe, **options):
        return fuser.Sequential(fuser.Linear(inner, outer))


def linears(layers: Iterable[Any]) -> list[Any]:
    return [layer for layer in layers if isinstance(layer, fuser.Linear)]


def sharded(layers: fuser.Sequential, *, each_layer: bool = True, **options: Any) -> Any:
    """The model under ``fully_shard``: each of its linears, and then the rest."""
    for layer in linears(layers) if each_layer else ():
        fully_shard(layer, **options)
    return fully_shard(layers, **options)


def inputs(layers: Any, seed: int, rows: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, layers[0].weight.shape[1], generator=generator)


def loss_of(layers: Any, x: torch.Tensor, recipe: Any) -> torch.Tensor:
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = layers(x)
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
    padded = torch.zeros(rows, weight.shape[1], dtype=own.dtype)
    padded[: len(own)] = own
    every = [torch.empty_like(padded) for _ in range(ranks())]
    dist.all_gather(every, padded)
    return local._quantizer.unbound()(torch.cat(every)[: weight.shape[0]])


# -- bytes -------------------------------------------------------------------------------


@each()
def gathered_bytes_are_those_of_the_unsharded_parameter(name: str) -> None:
    reference, layers = model(name), sharded(model(name))
    for layer, own in zip(linears(layers), linears(reference), strict=True):
        local = shard_of(layer.weight)
        assert isinstance(layer.weight, DTensor)
        assert type(local) is type(own.weight.detach())
        assert local.shape[0] == own.weight.shape[0] // ranks()
    odd = [expected_of_shards(layer.weight) for layer in linears(layers)]
    for found, own, of_shards in zip(unsharded(layers), linears(reference), odd, strict=True):
        assert isinstance(found, torch.nn.Parameter)
        assert_same_bytes(found, of_shards if name in ODD else own.weight)


@each()
def shards_that_cut_blocks_are_gathered_as_values_and_quantized(name: str) -> None:
    layers = sharded(model(name, (40, 50)))
    expected = [expected_of_shards(layer.weight) for layer in linears(layers)]
    is_whole = name in ("current", "delayed")  # one scale: no block is cut
    for weight, of_shards, own in zip(
        unsharded(layers), expected, linears(model(name, (40, 50))), strict=True
    ):
        assert_same_bytes(weight, own.weight if is_whole else of_shards)


@each()
def the_last_rank_may_have_fewer_rows_or_none(name: str) -> None:
    for out in (33, 3, 1):
        layer, own = (linear(RECIPES[name](), 32, out) for _ in range(2))
        fully_shard(layer)
        is_whole = name in ("current", "delayed")
        expected = own[0].weight if is_whole else expected_of_shards(layer[0].weight)
        layer.unshard()
        assert_same_bytes(layer[0].weight, expected)
        layer.reshard()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (layer, own)]
        x = torch.randn(32, 32)
        for m in (layer, own):
            loss_of(m, x, RECIPES[name]()).backward()
        for optimizer in optimizers:
            optimizer.step()
        if is_whole:
            layer.unshard()
            assert_same_bytes(layer[0].weight, own[0].weight)


# -- training ------------------------------------------------------------------------------


def train(
    name: str, layers: Any, reference: Any, *, steps: int = 3, compute: str = "same", **options: Any
) -> None:
    """Steps of both models on the data of all ranks: outputs, gradients and bytes are equal."""
    recipe = RECIPES[name]() if compute == "same" else None
    make = functools.partial(torch.optim.SGD, lr=0.5, **options)
    optimizer, other = make(layers.parameters()), make(reference.parameters())
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
            torch.testing.assert_close(parameter.grad.full_tensor(), own.grad, rtol=1e-5, atol=1e-7)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        if name not in ODD:
            for weight, own in zip(unsharded(layers), linears(reference), strict=True):
                assert_same_bytes(weight, own.weight)
            resharded(layers)


EXACT = [name for name in RECIPES if name not in ODD | {"delayed"}]


@each(*EXACT)
def three_steps_are_those_of_the_unsharded_model(name: str) -> None:
    train(name, sharded(model(name)), model(name))


@each(*EXACT)
def three_steps_in_high_precision_are_those_of_the_unsharded_model(name: str) -> None:
    """FP8 parameters without autocast: backward reads what forward read."""
    train(name, sharded(model(name)), model(name), compute="high precision")


@each("current", "mxfp8")
def parameters_may_stay_gathered_from_forward_to_backward(name: str) -> None:
    train(name, sharded(model(name), reshard_after_forward=False), model(name))


@each("current", "mxfp8")
def a_whole_pipeline_may_be_one_group(name: str) -> None:
    layers = sharded(model(name), each_layer=False)
    train(name, layers, model(name))


@each("current", "nvfp4")
def the_amax_of_an_optimizer_step_is_that_of_all_ranks(name: str) -> None:
    """The largest value moves from rank to rank."""
    for make in (functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW):
        layers, reference = sharded(model(name)), model(name)
        optimizers = [make(m.parameters(), lr=0.1) for m in (layers, reference)]
        for step in range(3):
            for weight, own in zip(layers.parameters(), reference.parameters(), strict=True):
                own.grad = torch.zeros(own.shape)
                own.grad[step * (len(own) // 2) % len(own)] = 3.0 + step
                part = own.grad.chunk(ranks())[rank()].clone()
                weight.grad = DTensor.from_local(part, weight.device_mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
            for weight, layer in zip(unsharded(layers), linears(reference), strict=True):
                assert_same_bytes(weight, layer.weight)
            resharded(layers)


@one
def weights_of_delayed_scaling_have_one_scale_on_all_ranks() -> None:
    """Also if a write is too large for the scale of earlier steps, and without reduced amaxes."""
    recipe = recipes.DelayedScaling(amax_history_len=4, reduce_amax=False)
    layers, own = (linear(recipe, 64, 32) for _ in range(2))
    fully_shard(layers)
    for value in (0.5, 900.0, 2.0, 2.0):
        new = torch.full((32, 64), 0.25)
        new[3, 5] = value  # of the first rank
        x = torch.ones(16, 64)
        for m in (layers, own):
            with torch.no_grad():
                part = new.chunk(ranks())[rank()] if m is layers else new
                (shard_of(m[0].weight) if m is layers else m[0].weight).copy_(part)
            with fuser.autocast(recipe=recipe):
                y = m(x.clone().requires_grad_())
            y.sum().backward()
        layers.unshard()
        assert_same_bytes(layers[0].weight, own[0].weight)
        layers.reshard()


@one
def delayed_scaling_trains_as_on_one_rank_with_all_data() -> None:
    layers, reference, recipe = sharded(model("delayed")), model("delayed"), RECIPES["delayed"]()
    # fully_shard averages the gradients of ranks, and one rank sums them.
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    other = torch.optim.SGD(reference.parameters(), lr=0.5 / ranks())
    for step in range(3):
        parts = [inputs(reference, 10 * step + place) for place in range(ranks())]
        for m, x in ((layers, parts[rank()]), (reference, torch.cat(parts))):
            with fuser.autocast(recipe=recipe):
                y = m(x.requires_grad_())
            y.square().sum().mul(0.01).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        for weight, layer in zip(unsharded(layers), linears(reference), strict=True):
            assert torch.equal(weight._scale_inv, layer.weight._scale_inv)
            # Sums over rows are made in another order, and a few values round differently.
            assert (weight._data != layer.weight._data).float().mean() < 0.01
        resharded(layers)


@one
def weights_of_delayed_scaling_follow_the_state_of_their_op() -> None:
    """A state that is loaded replaces that of the op; writes to the shard are recorded in it."""
    layers, recipe = sharded(model("delayed")), RECIPES["delayed"]()
    other = sharded(model("delayed"))
    for m in (layers, other):
        loss_of(m, inputs(m, 1), recipe).backward()
    layers.load_state_dict(other.state_dict())
    for _ in range(2):
        loss_of(layers, inputs(layers, 1), recipe).backward()
        for layer in linears(layers):
            (state,) = (
                op._delayed["forward"] for op in layer.basic_ops if op.num_quantizers("forward")
            )
            shard = shard_of(layer.weight)
            assert shard._quantizer.scale is state.parameter_quantizer(1).scale
            with torch.no_grad():
                layer.weight.mul_(1.0)
            assert float(state.amax_history[0, 1]) > 0


# -- what is gathered ------------------------------------------------------------------------


@contextlib.contextmanager
def gathers() -> Iterator[list[tuple[str, int]]]:
    """The gatherings of quantized parameters inside: the names of buffers, and a rank's bytes."""
    found: list[tuple[str, int]] = []
    cls = fuser.QuantizedTensor
    kept = cls.fsdp_pre_all_gather

    def noting(
        self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        parts, sent = kept(self, mesh, outer_size, outer_stride, module, mp_policy)
        found.append((", ".join(sent.names), sum(part.nbytes for part in parts)))
        return parts, sent

    cls.fsdp_pre_all_gather = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        cls.fsdp_pre_all_gather = kept  # type: ignore[method-assign]


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


@one
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


def said(error: type[Exception], call: Callable[[], Any]) -> str:
    """The sentence of the error that ``call`` raises."""
    try:
        call()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__} was raised.")


# -- options of fully_shard --------------------------------------------------------------


@each("current", "mxfp8", "blocks of 1x128")
def gradients_are_accumulated_over_microbatches(name: str) -> None:
    for reshards in (True, False):
        layers, reference, recipe = sharded(model(name)), model(name), RECIPES[name]()
        for step in range(2):
            for micro in range(3):
                layers.set_requires_gradient_sync(micro == 2)
                layers.set_reshard_after_backward(reshards or micro == 2)
                seed = 100 * step + 10 * micro
                x = inputs(layers, seed + rank()).requires_grad_()
                loss_of(layers, x, recipe).backward()
                for place in range(ranks()):
                    x_place = inputs(reference, seed + place).requires_grad_()
                    (loss_of(reference, x_place, recipe) / ranks()).backward()
            for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
                grad = parameter.grad.full_tensor()
                torch.testing.assert_close(grad, own.grad, rtol=1e-5, atol=1e-7)


@each("current", "nvfp4")
def gradients_are_clipped_by_the_norm_of_all_ranks(name: str) -> None:
    layers, reference, recipe = sharded(model(name)), model(name), RECIPES[name]()
    x = inputs(layers, 1)
    for m in (layers, reference):
        loss_of(m, x, recipe).backward()
    found = torch.nn.utils.clip_grad_norm_(layers.parameters(), 1e-3)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    torch.testing.assert_close(found.full_tensor(), expected)
    for m in (layers, reference):
        torch.optim.SGD(m.parameters(), lr=64.0).step()
    for weight, layer in zip(unsharded(layers), linears(reference), strict=True):
        torch.testing.assert_close(weight.dequantize(), layer.weight.dequantize())


@each(*EXACT)
def a_mixed_precision_policy_sets_the_dtype_of_the_compute(name: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers, reference = sharded(model(name), mp_policy=policy), model(name)
    reference.bfloat16()
    recipe = RECIPES[name]()
    x = inputs(layers, 1).bfloat16()
    for compute in (recipe, None):
        losses = [loss_of(m, x.clone().requires_grad_(), compute) for m in (layers, reference)]
        assert losses[0].dtype is torch.bfloat16
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
        assert parameter.dtype is parameter.grad.dtype is torch.float32
        found = parameter.grad.full_tensor()
        torch.testing.assert_close(
            found, own.grad.float(), rtol=2e-2, atol=2e-2 * float(found.abs().max())
        )


@each("mxfp8")
def one_op_of_a_pipeline_with_channels_may_be_sharded(name: str) -> None:
    def layers() -> fuser.Sequential:
        torch.manual_seed(1)
        with fuser.quantized_model_init(recipe=RECIPES[name]()):
            return fuser.Sequential(
                fuser.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False),
                fuser.BasicLinear(64, 64),
                fuser.GELU(),
                fuser.BasicLinear(64, 64),
                fuser.AddExtraInput().set_extra_input_channel(0, "skip"),
                fuser.RMSNorm(64),
            )

    own, reference, recipe = layers(), layers(), RECIPES[name]()
    fully_shard(own[3])
    x, twin = (torch.randn(32, 64, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    x.requires_grad_()
    twin.requires_grad_()
    losses = [loss_of(own, x, recipe), loss_of(reference, twin, recipe)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert isinstance(own[3].weight, DTensor)
    assert not isinstance(own[1].weight, DTensor)
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(own[3].weight.grad.full_tensor(), reference[3].weight.grad)
    torch.testing.assert_close(own[1].weight.grad, reference[1].weight.grad)


@each()
def evaluation_and_inference_gather_too(name: str) -> None:
    layers, reference, recipe = sharded(model(name, SMALL)), model(name, SMALL), RECIPES[name]()
    x = inputs(layers, 1)
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with context(), fuser.autocast(recipe=recipe):
            found, expected = layers(x), reference(x)
        if name != "delayed":
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    found.sum().backward()


@each("current", "mxfp8")
def a_mesh_of_replicas_has_whole_parameters(name: str) -> None:
    mesh = init_device_mesh("cpu", (ranks(), 1), mesh_dim_names=("replicate", "shard"))
    layers = sharded(model(name), mesh=mesh)
    train(name, layers, model(name), steps=2)


@each("current", "mxfp8")
def a_model_may_be_sharded_after_it_has_run(name: str) -> None:
    layers, reference, recipe = model(name), model(name), RECIPES[name]()
    loss_of(layers, inputs(layers, 1), recipe).backward()
    layers.zero_grad()
    train(name, sharded(layers), reference, steps=2)


@each("current", "mxfp8")
def shards_may_be_kept_on_the_cpu(name: str) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    train(name, sharded(model(name), offload_policy=policy), model(name), steps=2)


@each("mxfp8", "current", "nvfp4")
def layers_of_modules_are_sharded(name: str) -> None:
    def layer() -> Any:
        torch.manual_seed(1)
        with fuser.quantized_model_init(recipe=RECIPES[name]()):
            return fuser.modules.LayerNormMLP(64, 128)

    own, reference, recipe = layer(), layer(), RECIPES[name]()
    fully_shard(own)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (own, reference)]
    for step in range(2):
        grads = []
        for m in (own, reference):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
            loss_of(m, x.requires_grad_(), recipe).backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own.unshard()
    for found, expected in zip(own.parameters(), reference.parameters(), strict=True):
        if isinstance(expected, fuser.QuantizedTensor):
            assert_same_bytes(found, expected)
        else:
            assert torch.equal(found, expected)


@each("mxfp8", "current")
def the_plan_of_a_sharded_model_is_that_of_the_model(name: str) -> None:
    layers, recipe = model(name), RECIPES[name]()
    x = inputs(layers, 1).requires_grad_()
    with fuser.autocast(recipe=recipe):
        expected = str(layers.plan(x))
        assert str(sharded(layers, each_layer=False).plan(x)) == expected


@each("current", "blocks of 128x128", "mxfp8")
def views_of_a_gathered_parameter_have_its_values(name: str) -> None:
    """Also of the transposed copy, in forward, where one copy is there, and in backward."""
    layers, own = sharded(model(name)), model(name)[0].weight.dequantize()
    seen: list[bool] = []

    def look(module: Any, *_: Any) -> None:
        weight = module.weight.detach()
        half = len(own) // 2
        for found, expected in (
            (weight.t(), own.t()),
            (weight[:half], own[:half]),
            (weight.split(half)[1], own.split(half)[1]),
            (weight.view(2, half, -1), own.view(2, half, -1)),
            (weight.view(-1)[3:9], own.view(-1)[3:9]),
            (weight.as_strided((half, own.shape[1]), (own.shape[1], 1)), own[:half]),
            (weight.clone(), own),
            (weight[:, 2:5], own[:, 2:5]),
        ):
            seen.append(torch.allclose(found.dequantize(), expected, rtol=0.1, atol=1e-2))
        assert not weight.new_zeros(weight.shape).dequantize().any()

    layers[0].basic_ops[0].register_forward_hook(look)
    layers[0].basic_ops[0].register_full_backward_pre_hook(look)
    loss_of(layers, inputs(layers, 1).requires_grad_(), RECIPES[name]()).backward()
    assert len(seen) == 16
    assert all(seen), seen


# -- values ------------------------------------------------------------------------------


@each("current", "mxfp8", "nvfp4")
def initial_values_are_kept_by_shards(name: str) -> None:
    layers = model(name, preserve_high_precision_init_val=True)
    kept = [layer.weight.get_high_precision_init_val() for layer in linears(layers)]
    sharded(layers)
    for layer, values in zip(linears(layers), kept, strict=True):
        local = layer.weight.to_local()
        assert torch.equal(local.get_high_precision_init_val(), values.chunk(ranks())[rank()])
        local.clear_high_precision_init_val()
        assert layer.weight.to_local().get_high_precision_init_val() is None


@each("current", "nvfp4", "mxfp8")
def ranks_may_be_initialised_with_different_values(name: str) -> None:
    torch.manual_seed(5 + rank())
    with fuser.quantized_model_init(recipe=RECIPES[name]()):
        layers = fuser.Sequential(fuser.Linear(64, 64))
    own = layers[0].weight.dequantize().chunk(ranks())[rank()]
    fully_shard(layers)
    layers.unshard()
    weight = layers[0].weight
    found = weight.dequantize().chunk(ranks())[rank()]
    torch.testing.assert_close(found, own, rtol=0.3 if name == "nvfp4" else 0.07, atol=0.01)
    assert_same_on_all_ranks([b for b in weight.buffers().values() if b is not None])


def assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        every = [torch.empty_like(tensor) for _ in range(ranks())]
        dist.all_gather(every, tensor)
        assert all(torch.equal(one, every[0]) for one in every)


@each()
def full_tensors_and_copies_of_shards_have_the_values(name: str) -> None:
    layers, reference = sharded(model(name)), model(name)
    for layer, own in zip(linears(layers), linears(reference), strict=True):
        values = own.weight.dequantize()
        full = layer.weight.full_tensor()
        torch.testing.assert_close(full, values)
        local = layer.weight.to_local()
        assert isinstance(local, fuser.QuantizedTensor)
        alone = pickle.loads(pickle.dumps(local.detach()))
        assert alone._sharding is None
        assert torch.equal(alone.dequantize(), local.dequantize())
        twin = copy.deepcopy(local.detach())
        assert torch.equal(twin.dequantize(), local.dequantize())
        assert local.detach().clone()._sharding is None
        assert getattr(local._quantizer, "group", None) is None


@each()
def a_model_on_meta_is_sharded_and_then_initialised(name: str) -> None:
    for widths in (WIDTHS.get(name, SMALL), (33, 32)):
        with torch.device("meta"):
            layers = model(name, widths, preserve_high_precision_init_val=True)
        sharded(layers)
        parameters = list(layers.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        assert all(p.is_meta for p in parameters)
        layers.to_empty(device="cpu")
        for module in layers.modules():
            if isinstance(module, (fuser.BasicLinear, fuser.Bias)):
                module.reset_parameters()
        assert [id(p) for p in layers.parameters()] == [id(p) for p in parameters]
        for layer in linears(layers):
            local = shard_of(layer.weight)
            assert isinstance(local, fuser.QuantizedTensor)
            kept = local.get_high_precision_init_val()
            assert torch.isfinite(kept).all()
            assert kept.std() > 0
            torch.testing.assert_close(
                local.dequantize(), kept, rtol=0.3, atol=0.2 * float(kept.abs().max())
            )
        expected = [expected_of_shards(layer.weight) for layer in linears(layers)]
        for weight, values in zip(unsharded(layers), expected, strict=True):
            if name in ("current", "nvfp4", "mxfp8") or widths == (33, 32):
                torch.testing.assert_close(weight.dequantize(), values.dequantize())
        resharded(layers)
        before = loss_of(layers, inputs(layers, 1), RECIPES[name]())
        before.backward()
        optimizer.step()
        after = loss_of(layers, inputs(layers, 1), RECIPES[name]())
        assert torch.isfinite(after)
        assert not torch.equal(after, before)


# -- unquantized weights that are gathered quantized -----------------------------------------


def plain_model(widths: tuple[int, int], dtype: torch.dtype = torch.float32) -> fuser.Sequential:
    inner, outer = widths
    torch.manual_seed(1)
    return fuser.Sequential(
        fuser.Linear(inner, outer, dtype=dtype),
        fuser.GELU(),
        fuser.Linear(outer, inner, dtype=dtype),
        fuser.Linear(inner, outer, bias=False, dtype=dtype),
    )


@each(*[name for name in RECIPES if name != "delayed"])
def unquantized_weights_are_gathered_quantized(name: str) -> None:
    """Three steps are those of the unsharded model, which quantizes weights at each call."""
    for widths in (WIDTHS.get(name, SMALL), (40, 50)):
        reference, recipe = plain_model(widths), RECIPES[name]()
        layers = sharded(fuser.distributed.gather_quantized(plain_model(widths), recipe))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.05)
        other = torch.optim.AdamW(reference.parameters(), lr=0.05)
        for step in range(3):
            x = inputs(reference, step)
            with gathers() as found:
                loss = loss_of(layers, x, recipe)
                loss.backward()
            expected = loss_of(reference, x, recipe)
            expected.backward()
            assert torch.equal(loss, expected)
            if widths != (40, 50) and name not in ODD:
                assert all("data" in names and "values" not in names for names, _ in found)
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
            for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
                assert type(parameter.full_tensor()) is torch.Tensor
                torch.testing.assert_close(parameter.full_tensor(), own, rtol=1e-5, atol=1e-6)


@one
def half_of_the_bytes_of_bf16_weights_are_gathered() -> None:
    recipe = RECIPES["mxfp8"]()
    layers = fuser.distributed.gather_quantized(plain_model(SMALL, torch.bfloat16), recipe)
    sharded(layers)
    with gathers() as found:
        loss_of(layers, inputs(layers, 1).bfloat16().requires_grad_(), recipe).backward()
    plain = sum(layer.weight.numel() * 2 // ranks() for layer in linears(layers))
    assert sum(size for _, size in found) <= 0.52 * 2 * plain
    assert all(p.grad.dtype is p.dtype is torch.bfloat16 for p in layers.parameters())


@one
def unquantized_weights_on_meta_are_gathered_quantized() -> None:
    recipe = RECIPES["current"]()
    with torch.device("meta"):
        layers = fuser.distributed.gather_quantized(plain_model(SMALL), recipe)
    sharded(layers)
    layers.to_empty(device="cpu")
    for module in layers.modules():
        if isinstance(module, (fuser.BasicLinear, fuser.Bias)):
            module.reset_parameters()
    state = {
        name: value.full_tensor() for name, value in layers.state_dict().items() if value.numel()
    }
    reference = plain_model(SMALL)
    reference.load_state_dict(state, strict=False)
    x = inputs(reference, 1)
    policy = [loss_of(m, x, recipe) for m in (layers, reference)]
    assert torch.equal(*policy)
    folder = shared_folder()
    dcp.save(layers.state_dict(), checkpoint_id=folder)
    other = sharded(fuser.distributed.gather_quantized(plain_model((64, 128)), recipe))
    loaded = other.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded)
    assert torch.equal(loss_of(other, x, recipe), policy[0])


@one
def what_cannot_be_gathered_quantized_is_refused() -> None:
    gather = fuser.distributed.gather_quantized
    assert "DelayedScaling" in said(
        InputError, lambda: gather(plain_model(SMALL), RECIPES["delayed"]())
    )
    quantized, recipe = model("mxfp8"), RECIPES["mxfp8"]()
    sentence = said(InputError, lambda: gather(quantized, recipe))
    assert "weight of shape (128, 64), which is quantized already" in sentence
    layers = sharded(plain_model(SMALL))
    assert "which is sharded already" in said(InputError, lambda: gather(layers, recipe))
    assert "a GELU without" in said(InputError, lambda: gather(fuser.GELU(), recipe))


# -- checkpoints ---------------------------------------------------------------------------


def shared_folder() -> str:
    """A new folder, the same on all ranks; removed at the end of the process of the first."""
    names = [tempfile.mkdtemp() if rank() == 0 else ""]
    dist.broadcast_object_list(names)
    if rank() == 0:
        atexit.register(shutil.rmtree, names[0], ignore_errors=True)
    return names[0]


def changed(layers: fuser.Sequential) -> fuser.Sequential:
    """The model with other values."""
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(1.5).add_(0.25)
    return layers


@each("current", "mxfp8", "blocks of 128x128", "nvfp4", "delayed")
def checkpoints_of_shards_are_loaded_with_their_bytes(name: str) -> None:
    """From two ranks, to two ranks and to one; and from one to two."""
    folder, reference = shared_folder(), model(name)
    layers = sharded(model(name))
    dcp.save(layers.state_dict(), checkpoint_id=f"{folder}/two")
    if rank() == 0:
        dcp.save(reference.state_dict(), checkpoint_id=f"{folder}/one", no_dist=True)
        alone = changed(model(name))
        state = alone.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/two", no_dist=True)
        alone.load_state_dict(state)
    dist.barrier()
    for source in ("two", "one"):
        loaded = sharded(changed(model(name)))
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{source}")
        loaded.load_state_dict(state)
        for found, own in zip(linears(loaded), linears(layers), strict=True):
            found, own = shard_of(found.weight), shard_of(own.weight)
            if source == "two":
                assert_same_bytes(found, own)
            assert found._sharding is not None
        for weight, layer in zip(unsharded(loaded), linears(reference), strict=True):
            check_loaded(name, weight, layer.weight, is_exact=name not in ODD)
    if rank() == 0:
        for found, layer in zip(linears(alone), linears(reference), strict=True):
            check_loaded(name, found.weight, layer.weight, is_exact=name in INDEPENDENT)
    dist.barrier()


INDEPENDENT = ("mxfp8", "blocks of 128x128", "blocks of 1x128")
"""Formats in which a part of a tensor has the bytes of the whole."""


def check_loaded(name: str, found: Any, expected: Any, *, is_exact: bool) -> None:
    if is_exact:
        assert_same_bytes(found, expected)
    largest = float(expected.dequantize().abs().max())
    step = 0.15 if "nvfp4" in name else 0.04
    torch.testing.assert_close(
        found.dequantize(), expected.dequantize(), rtol=step, atol=step * largest
    )


@each("current", "mxfp8", "nvfp4", "blocks of 128x128")
def a_full_state_dict_has_plain_values_and_is_loaded_into_shards(name: str) -> None:
    layers, reference = sharded(model(name)), model(name)
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(layers, options=options)
    expected = reference.state_dict()
    assert full.keys() == expected.keys()
    for key, value in full.items():
        if isinstance(expected[key], fuser.QuantizedTensor):
            assert type(value) is torch.Tensor
            torch.testing.assert_close(value, expected[key].dequantize())
    loaded = sharded(changed(model(name)))
    set_model_state_dict(loaded, dict(full), options=options)
    for weight, layer in zip(unsharded(loaded), linears(reference), strict=True):
        torch.testing.assert_close(weight.dequantize(), layer.weight.dequantize())
    resharded(loaded)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(loaded, dict(full) if rank() == 0 else {}, options=options)
    for weight, layer in zip(unsharded(loaded), linears(reference), strict=True):
        torch.testing.assert_close(weight.dequantize(), layer.weight.dequantize())
    resharded(loaded)
    train(name, sharded(model(name)), model(name), steps=1)


@each("current", "mxfp8")
def an_assigned_state_dict_of_shards_is_used(name: str) -> None:
    layers, loaded, reference = sharded(model(name)), sharded(changed(model(name))), model(name)
    state = {key: value.detach().clone() for key, value in layers.state_dict().items()}
    loaded.load_state_dict(state, assign=True)
    train(name, loaded, reference, steps=1)


@each("current", "mxfp8", "nvfp4")
def conversions_of_a_sharded_model_keep_its_bytes(name: str) -> None:
    layers, reference = sharded(model(name)), model(name)
    layers.bfloat16()
    for layer in linears(layers):
        assert layer.weight.dtype is torch.bfloat16
        assert shard_of(layer.weight)._sharding is not None
    for weight, layer in zip(unsharded(layers), linears(reference), strict=True):
        assert weight.dtype is torch.bfloat16
        assert_same_bytes(weight, layer.weight)


@one
def what_cannot_be_sharded_is_refused() -> None:
    layer = fuser.BasicLinear(64, 64)
    with fuser.quantized_model_init(recipe=RECIPES["mxfp8"]()):
        layer = fuser.BasicLinear(64, 64)
    sentence = said(InputError, lambda: fully_shard(layer, shard_placement_fn=lambda p: Shard(1)))
    assert "shard a MXFP8Tensor of shape (64, 64) along dimension 1" in sentence
    local = model("current")[0].weight
    sentence = said(
        StateError, lambda: local.fsdp_pre_all_gather(None, local.shape, (), layer, None)
    )
    assert "was called by other code than fully_shard" in sentence


@one
def bytes_of_different_tensors_in_the_shards_are_refused() -> None:
    layers = sharded(model("current"))
    loss_of(layers, inputs(layers, 1), None)
    resharded(layers)
    local = shard_of(layers[0].weight)
    with torch.no_grad():
        local.copy_(fuser.Float8CurrentScalingQuantizer()(torch.randn(local.shape) * (1 + rank())))
    sentence = said(StateError, lambda: layers[0].unshard())
    assert "have the scales or amaxes" in sentence
    assert f"{float(local._scale_inv):.9g}" in sentence
