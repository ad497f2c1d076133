"""Cases: the copies that are gathered, and the lifetime of their memory."""

from __future__ import annotations

import functools
import gc
import itertools
from typing import Any

import torch
from ranks import device_type
from sharded_models import (
    RECIPES,
    SMALL,
    WIDTHS,
    assert_same_bytes,
    case,
    each,
    gathers,
    inputs,
    linear,
    linears,
    loss_of,
    model,
    plain_model,
    rank,
    ranks,
    reductions,
    resharded,
    said,
    shard_of,
    sharded,
    unsharded,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.errors import StateError
from fuser.precision.quantizer_for import make_quantizer


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
    for step in range(6):
        loss_of(layers, inputs(layers, step).requires_grad_(), recipe).backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        buffers = gathered_memory(layers)
        assert len(buffers) == len(linears(layers)) * (4 if name == "mxfp8" else 3)
        assert not any(memory.untyped_storage().size() for memory in buffers), step
        counts.append(sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor)))
    # A thread of gloo may hold a tensor for a moment; what each step leaves would add up.
    steady = counts[1:]
    assert steady[-1] - steady[0] < len(steady) - 1, counts


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


def gathered_quantized(names: tuple[str, str, str]) -> Any:
    """A model whose linears are gathered in these formats."""
    layers = plain_model(SMALL)
    for layer, name in zip(linears(layers), names, strict=True):
        fuser.distributed.gather_quantized(layer, RECIPES[name]())
    return layers


def assert_gathered(layers: Any, names: tuple[str, str, str]) -> None:
    """The gathered bytes are those of the whole weights as they are now."""
    resharded(layers)
    wholes = [layer.weight.full_tensor().detach() for layer in linears(layers)]
    for weight, whole, name in zip(unsharded(layers), wholes, names, strict=True):
        assert_same_bytes(weight, make_quantizer(RECIPES[name](), "weight")(whole))
    resharded(layers)


@each("current", "nvfp4", "mxfp8")
def weights_that_are_gathered_together_reduce_their_amaxes_together(name: str) -> None:
    """In each forward, and not in backward; of a group of all layers, and of one for each."""
    names, is_scaled = (name,) * 3, name != "mxfp8"
    for each_layer, numbers in ((False, [3]), (True, [1, 1, 1])):
        layers = sharded(gathered_quantized(names), each_layer=each_layer)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.5, foreach=True)
        for step in range(3):
            with reductions() as found:
                loss = loss_of(layers, inputs(layers, step).requires_grad_(), RECIPES[name]())
            assert found == numbers * is_scaled
            with reductions() as found:
                loss.backward()
                optimizer.step()
            assert found == []
            assert_gathered(layers, names)


@case
def weights_of_several_formats_are_gathered_together() -> None:
    for names, numbers in (
        (("current", "mxfp8", "nvfp4"), [2]),
        (("mxfp8", "nvfp4", "mxfp8"), [1]),
        (("mxfp8", "rowwise", "blocks of 1x128"), [SMALL[1]]),
    ):
        layers = sharded(gathered_quantized(names), each_layer=False)
        for step in range(2):
            with reductions() as found, torch.no_grad():
                loss_of(layers, inputs(layers, step), None)
            assert found == numbers, names
            assert_gathered(layers, names)
            with torch.no_grad():
                for layer in linears(layers):
                    shard_of(layer.weight).mul_(1 + rank())


@each("current", "nvfp4")
def amaxes_are_reduced_at_each_gathering_that_quantizes(name: str) -> None:
    """With prefetching, weights that are frozen, microbatches, and weights that stay gathered."""
    names, recipe = (name,) * 3, RECIPES[name]()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for frozen, stays, offload in itertools.product((False, True), (False, True), (False, True)):
        layers = gathered_quantized(names)
        first, last = fuser.Sequential(*layers[:3]), fuser.Sequential(layers[3])
        whole = torch.nn.Sequential(first, last)
        for p in layers[2].parameters():
            p.requires_grad_(not frozen)
        pinned = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
        options: dict[str, Any] = {
            "reshard_after_forward": not stays,
            "mp_policy": policy,
            **pinned,
        }
        for one in (first, last, whole):
            fully_shard(one, **options)
        first.set_modules_to_forward_prefetch([last])
        for micro in range(3):
            whole.set_requires_gradient_sync(micro == 2)
            whole.set_reshard_after_backward(not stays or micro == 2)
            with reductions() as found:
                x = inputs(layers, micro).bfloat16().requires_grad_()
                loss_of(whole, x, recipe).backward()
            is_gathered = micro == 0 or not stays
            assert found == ([1, 1, 1] if offload else [2, 1]) * is_gathered, (frozen, stays, found)
        with torch.no_grad():
            for layer in linears(layers):
                shard_of(layer.weight).data.mul_(1 + rank())
        wholes = [layer.weight.full_tensor().to(device_type()) for layer in linears(layers)]
        for one in (first, last):
            one.unshard()
        for layer, values in zip(linears(layers), wholes, strict=True):
            quantizer = make_quantizer(recipe, "weight")
            assert_same_bytes(layer.weight, quantizer(values.detach().bfloat16()))


@case
def a_gathering_that_failed_leaves_no_old_weights() -> None:
    """The first weights of a group were quantized when another one could not be gathered."""
    names = ("current",) * 3
    layers = sharded(gathered_quantized(names), each_layer=False)
    middle = shard_of(linears(layers)[1].weight)
    kept = type(middle).fsdp_pre_all_gather

    def fails(
        self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        if self is middle:
            raise StateError("This weight is not gathered.")
        return kept(self, mesh, outer_size, outer_stride, module, mp_policy)

    type(middle).fsdp_pre_all_gather = fails
    try:
        said(StateError, lambda: loss_of(layers, inputs(layers, 1), RECIPES["current"]()))
    finally:
        type(middle).fsdp_pre_all_gather = kept
    with torch.no_grad():
        for layer in linears(layers):
            shard_of(layer.weight).mul_(3 + rank())
    assert_gathered(layers, names)


@each("current", "mxfp8")
def values_that_are_set_after_a_gathering_that_failed_are_gathered(name: str) -> None:
    """By ``data``, which no version counts; in a forward, and between forward and backward."""
    for sets_data in (True, False):
        layers = sharded(gathered_quantized((name,) * 3), each_layer=False)
        masters = [shard_of(layer.weight) for layer in linears(layers)]
        loss_of(layers, inputs(layers, 1).requires_grad_(), RECIPES[name]())
        said(StateError, lambda layers=layers, last=masters[-1]: _gather_without(layers, last))
        for place, master in enumerate(masters):
            values = torch.full_like(master._plain, 0.5 + place + rank())
            if sets_data:
                master.data = values
                assert master._state.shard is None  # nothing of the old values is gathered
            else:
                master.copy_(values)
        for place, layer in enumerate(linears(layers)):
            whole = layer.weight.full_tensor()
            assert torch.equal(whole[0], torch.full_like(whole[0], 0.5 + place))
            assert torch.equal(whole[-1], torch.full_like(whole[-1], 0.5 + place + ranks() - 1))
        assert_gathered(layers, (name,) * 3)


def _gather_without(layers: Any, refused: Any) -> None:
    """Gather the weights of a forward of which one fails, after the others were quantized."""
    resharded(layers)
    kept = type(refused).fsdp_pre_all_gather

    def fails(
        self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        if self is refused:
            raise StateError("This weight is not gathered.")
        return kept(self, mesh, outer_size, outer_stride, module, mp_policy)

    type(refused).fsdp_pre_all_gather = fails
    try:
        loss_of(layers, inputs(layers, 1), None)
    finally:
        type(refused).fsdp_pre_all_gather = kept


@each("current", "mxfp8", "nvfp4", "blocks of 128x128", "rowwise")
def weights_are_quantized_from_the_dtype_of_the_policy(name: str) -> None:
    """fp32 values that bf16 rounds over the edge between two scales, and between two bytes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    layers = plain_model(WIDTHS.get(name, SMALL))
    with torch.no_grad():
        for layer in linears(layers):
            layer.weight.add_(torch.randn_like(layer.weight) / 64)
            # The amax of each row, column and block is just above a power of two times 448 / 256.
            layer.weight.clamp_(-1.75 * (1 + 2**-12), 1.75 * (1 + 2**-12))
            layer.weight[::8, ::8] = 1.75 * (1 + 2**-12)
    for layer in linears(layers):
        fuser.distributed.gather_quantized(layer, RECIPES[name]())
    wholes = [layer.weight.detach()._plain.clone() for layer in linears(layers)]
    sharded(layers, mp_policy=policy)
    quantizer = make_quantizer(RECIPES[name](), "weight")
    for weight, whole in zip(unsharded(layers), wholes, strict=True):
        assert weight.dtype is torch.bfloat16
        expected = quantizer(whole.bfloat16())
        assert_same_bytes(weight, expected)
        of_fp32 = quantizer(whole)
        assert any(
            not torch.equal(buffer, of_fp32.buffers()[key])
            for key, buffer in expected.buffers().items()
            if buffer is not None
        )


@case
def a_model_with_assigned_copies_of_gathered_weights_gathers_its_own() -> None:
    """As a teacher that follows a student: it runs between the student's forward and backward."""
    names, recipe = ("mxfp8",) * 3, RECIPES["mxfp8"]()
    student, teacher = (sharded(gathered_quantized(names)) for _ in range(2))
    state = {name: value.clone() for name, value in student.state_dict().items()}
    teacher.load_state_dict(state, assign=True)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(-2)
    gradients = []
    for is_between in (False, True):
        x = inputs(student, 1).requires_grad_()
        loss = loss_of(student, x, recipe)
        if is_between:
            loss_of(teacher, inputs(teacher, 2), recipe).backward()
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@case
def a_weight_of_two_ops_is_one_weight_that_is_gathered_once() -> None:
    """``gather_quantized`` keeps it one parameter, also if the paths to it differ."""
    for kind in ("linears", "experts"):
        torch.manual_seed(1)
        if kind == "linears":
            layers = fuser.Sequential(fuser.BasicLinear(64, 64), fuser.BasicLinear(64, 64))
            names = ["weight"]
        else:
            layers = fuser.Sequential(
                *(fuser.GroupedLinear(2, 64, 64, bias=False) for _ in range(2))
            )
            names = ["weight0", "weight1"]
        for tied in names:
            setattr(layers[1], tied, getattr(layers[0], tied))
        getattr(layers[0], names[0]).requires_grad_(False)
        fuser.distributed.gather_quantized(layers, RECIPES["mxfp8"]())
        for tied in names:
            assert getattr(layers[0], tied) is getattr(layers[1], tied)
        flags = [p.requires_grad for p in layers.parameters()]
        assert flags == [False, *[True] * (len(names) - 1)]
        if kind == "experts":
            continue
        layers[0].weight.requires_grad_(True)
        reference = fuser.Sequential(fuser.BasicLinear(64, 64), fuser.BasicLinear(64, 64))
        reference[0].weight = reference[1].weight
        with torch.no_grad():
            reference[0].weight.copy_(layers[0].weight)
        fully_shard(layers)
        x = inputs(layers, 2)
        with gathers() as found:
            loss_of(layers, x, RECIPES["mxfp8"]()).backward()
        assert len(found) == 1
        loss_of(reference, x, RECIPES["mxfp8"]()).backward()
        assert layers[0].weight is layers[1].weight
        torch.testing.assert_close(
            layers[0].weight.grad.full_tensor(), reference[0].weight.grad, rtol=1e-5, atol=1e-8
        )
