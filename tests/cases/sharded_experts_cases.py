"""Cases: experts under ``fully_shard`` (FSDP2), with plain parameters, on two ranks."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from ranks import device_type
from samples import combinations
from sharded_models import RECIPES, rank, ranks, said, shard_of
from sharded_models import each as each_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fuser
from fuser.errors import StateError
from fuser.fused_ops import GroupedMLP
from fuser.gemm import grouped

CASES: dict[str, Callable[[], None]] = {}
each = functools.partial(each_of, into=CASES)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


HIDDEN, WIDTH, TOKENS, TOP_K = 64, 96, 48, 2
EVERY = (None, *RECIPES)
KINDS = {
    "separate": {},
    "one weight": {"single_grouped_weight": True},
    "one weight and bias": {"single_grouped_weight": True, "single_grouped_bias": True},
    "one bias": {"single_grouped_bias": True},
}


def recipe_of(name: str, **options: Any) -> Any:
    return None if name == "unquantized" else RECIPES[name](**options)


def mixture(experts: int = 4, **options: Any) -> fuser.Sequential:
    """A layer of experts as one pipeline with channels; equal on all ranks."""
    torch.manual_seed(1)
    dispatch = fuser.MoeDispatch(experts)
    for index, channel in enumerate(("split sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    made = fuser.Sequential(
        dispatch,
        fuser.GroupedLinear(experts, HIDDEN, 2 * WIDTH, **options).set_extra_input_channel(
            0, "split sizes"
        ),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        fuser.GroupedLinear(experts, WIDTH, HIDDEN, **options).set_extra_input_channel(
            0, "split sizes"
        ),
        fuser.MoeCombine().set_extra_input_channel(0, "rows"),
    )
    oracles.randomize(made)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.1)
    return made


def inputs(seed: int, experts: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """Tokens, their experts, of which the first gets none, and probabilities."""
    x = oracles.random_tensor((TOKENS, HIDDEN), torch.float32, seed).to(dtype)
    scores = oracles.random_tensor((TOKENS, experts), torch.float32, seed + 1)
    scores[:, 0] = -100.0
    probs, chosen = scores.softmax(-1).topk(min(TOP_K, experts))
    return x.requires_grad_(), chosen, probs.to(dtype).requires_grad_()


def loss_of(layers: Any, given: tuple[Any, Any, Any], recipe: Any) -> torch.Tensor:
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y: torch.Tensor = layers(*given)
    return y.float().square().mean()


def sharded(layers: Any, how: str = "each", **options: Any) -> Any:
    """``fully_shard`` of each grouped linear and of the pipeline; of the first; of all as one."""
    if how != "all":
        fully_shard(layers[1], **options)
    if how == "each":
        fully_shard(layers[3], **options)
    return layers if how == "first" else fully_shard(layers, **options)


def train(
    layers: Any, reference: Any, recipe: Any, *, steps: int = 3, experts: int = 4, lr: float = 0.5
) -> None:
    """Steps of both models on the data of all ranks: outputs, gradients and weights are equal."""
    make = functools.partial(torch.optim.SGD, lr=lr)
    optimizer, other = make(layers.parameters()), make(reference.parameters())
    for step in range(steps):
        given = inputs(10 * step + rank(), experts)
        loss = loss_of(layers, given, recipe)
        loss.backward()
        for place in range(ranks()):
            of_place = inputs(10 * step + place, experts)
            expected = loss_of(reference, of_place, recipe)
            (expected / ranks()).backward()
            if place == rank():
                torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
                for own, its in ((given[0], of_place[0]), (given[2], of_place[2])):
                    torch.testing.assert_close(own.grad, ranks() * its.grad, rtol=1e-5, atol=1e-8)
        check_gradients(layers, reference)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
        if own.requires_grad:
            torch.testing.assert_close(whole(parameter), own, rtol=1e-5, atol=1e-6)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(layers: Any, reference: Any) -> None:
    for (name, parameter), own in zip(
        layers.named_parameters(), reference.parameters(), strict=True
    ):
        if not isinstance(parameter, DTensor):
            continue
        if not own.requires_grad:
            assert parameter.grad is None, name
            continue
        found = whole(parameter.grad)
        torch.testing.assert_close(
            found, own.grad, rtol=1e-4, atol=1e-5 * float(own.grad.abs().max()), msg=name
        )


@each("unquantized", *(name for name in RECIPES if name != "delayed"))
def three_steps_are_those_of_the_unsharded_experts(name: str) -> None:
    for options, how in combinations([*KINDS.values()], ("each", "first", "all")):
        train_alike(mixture, name, how, options)


def train_alike(make: Any, name: str, how: str, options: Any) -> None:
    layers, reference = sharded(make(**options), how), make(**options)
    if how != "first":
        train(layers, reference, recipe_of(name))
        return
    # Of a part of the parameters alone the gradients are averaged.
    given, own = inputs(1, 4), inputs(1, 4)
    for m, x in ((layers, given), (reference, own)):
        loss_of(m, x, recipe_of(name)).backward()
    check_gradients(layers, reference)
    assert torch.equal(given[0].grad, own[0].grad)


def adapted(recipe: Any, **options: Any) -> fuser.Sequential:
    """Those of :func:`mixture`, frozen, and quantized with a recipe, with adapters."""
    with fuser.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        layers = mixture(**options)
    make = functools.partial(fuser.LoRAGroupedLinear.from_linear, rank=4, alpha=2)
    made = [make(op) if isinstance(op, fuser.GroupedLinear) else op for op in layers]
    for name, parameter in fuser.Sequential(*made).named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return fuser.Sequential(*made)


@each("unquantized", "current", "mxfp8", "rowwise")
def adapters_of_experts_are_those_of_the_unsharded_experts(name: str) -> None:
    recipe = recipe_of(name)
    train(sharded(adapted(recipe)), adapted(recipe), recipe)
    train(
        sharded(adapted(None, **KINDS["one weight"])), adapted(None, **KINDS["one weight"]), recipe
    )


@each("current", "mxfp8", "nvfp4", "blocks of 128x128", "rowwise")
def overrides_of_the_backward_are_those_of_the_unsharded_experts(name: str) -> None:
    for override in ("high_precision", "dequantized"):
        for options in (KINDS["separate"], KINDS["one weight"]):
            recipe = recipe_of(name, backward_override=override)
            train(sharded(mixture(**options)), mixture(**options), recipe, steps=2)


@each("unquantized", "current", "mxfp8")
def experts_may_stay_gathered_from_forward_to_backward(name: str) -> None:
    for options in KINDS.values():
        layers = sharded(mixture(**options), reshard_after_forward=False)
        train(layers, mixture(**options), recipe_of(name))


@each("unquantized", "current", "mxfp8")
def ranks_may_have_different_numbers_of_experts(name: str) -> None:
    for options in KINDS.values():
        layers = sharded(mixture(3, **options))
        if "single_grouped_weight" in options:
            assert shard_of(layers[1].weight).shape[0] == (2, 1)[rank()]
        train(layers, mixture(3, **options), recipe_of(name), experts=3)
    train(sharded(mixture(1)), mixture(1), recipe_of(name), experts=1)


@each("delayed")
def delayed_scaling_trains_the_unsharded_experts(name: str) -> None:
    """All ranks with the same data, so that scales are equal."""
    for options in KINDS.values():
        layers, reference = sharded(mixture(**options)), mixture(**options)
        recipe, other = (RECIPES[name](reduce_amax=False) for _ in range(2))
        for step in range(3):
            losses = [
                loss_of(m, inputs(step, 4), r) for m, r in ((layers, recipe), (reference, other))
            ]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            check_gradients(layers, reference)


@each("unquantized", "current", "mxfp8")
def a_mixed_precision_policy_sets_the_dtype_of_experts(name: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in KINDS.values():
        layers, reference = sharded(mixture(**options), mp_policy=policy), mixture(**options)
        reference.bfloat16()
        losses = [
            loss_of(m, inputs(1, 4, torch.bfloat16), recipe_of(name)) for m in (layers, reference)
        ]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
            found = parameter.grad.full_tensor()
            assert found.dtype is torch.float32
            atol = 1e-2 * float(own.grad.abs().max())
            torch.testing.assert_close(found, own.grad.float(), rtol=2e-2, atol=atol)


@each("unquantized", "current", "mxfp8")
def gradients_of_experts_are_accumulated_over_microbatches(name: str) -> None:
    for options, reshards in combinations([*KINDS.values()], (True, False)):
        layers, reference = sharded(mixture(**options)), mixture(**options)
        for micro in range(3):
            layers.set_requires_gradient_sync(micro == 2)
            layers.set_reshard_after_backward(reshards or micro == 2)
            loss_of(layers, inputs(10 * micro + rank(), 4), recipe_of(name)).backward()
            for place in range(ranks()):
                loss = loss_of(reference, inputs(10 * micro + place, 4), recipe_of(name))
                (loss / ranks()).backward()
        check_gradients(layers, reference)


@each("unquantized", "mxfp8")
def experts_on_meta_are_sharded_and_then_initialised(name: str) -> None:
    for experts in (4, 3):
        for options in KINDS.values():
            with torch.device("meta"):
                layers = fuser.Sequential(fuser.GroupedLinear(experts, HIDDEN, WIDTH, **options))
            sharded(layers, "all")
            parameters = list(layers.parameters())
            layers.to_empty(device=device_type())
            with torch.no_grad():
                for parameter in parameters:
                    shard_of(parameter).fill_(float("nan"))
            layers[0].reset_parameters()
            assert all(a is b for a, b in zip(parameters, layers.parameters(), strict=True))
            for of_name, parameter in layers.named_parameters():
                values = parameter.full_tensor()
                if "bias" in of_name:
                    assert not values.any()
                    continue
                assert torch.isfinite(values).all()
                assert 0.9 * HIDDEN**-0.5 < float(values.abs().max()) <= HIDDEN**-0.5
                if values.dim() == 3:
                    assert not torch.equal(values[0], values[1])
            x = oracles.random_tensor((16, HIDDEN), torch.float32, 1).requires_grad_()
            with fuser.autocast(enabled=name != "unquantized", recipe=recipe_of(name)):
                y = layers(x, torch.tensor([16 // experts] * experts))
            y.square().mean().backward()
            assert all(p.grad is not None for p in parameters)


class Chain(torch.nn.Sequential):
    """Grouped linears one after the other, each called as a module."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, split_sizes: torch.Tensor
    ) -> torch.Tensor:
        for layer in self:
            x = layer(x, split_sizes)
        return x


@each("unquantized", "current", "mxfp8")
def no_copy_of_separate_weights_is_kept_from_forward_to_backward(name: str) -> None:
    """Of 10 layers at most those of two layers are in memory, besides quantized operands."""
    recipe = recipe_of(name, **({"backward_override": "high_precision"} if recipe_of(name) else {}))
    gc.collect()  # of other cases
    one_layer = 4 * 64 * 64 * 4
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(weights_in_memory(one_layer))

    for options in KINDS.values():
        torch.manual_seed(1)
        layers = [fuser.GroupedLinear(4, 64, 64, bias=False, **options) for _ in range(10)]
        model = Chain(*layers)
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        layers[-1].register_forward_hook(look)
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
            model(x, torch.tensor([8, 8, 8, 8])).square().mean().backward()
        assert one_layer <= seen.pop() <= 3 * one_layer


def weights_in_memory(one_layer: int) -> int:
    """Bytes of tensors that are as large as a weight of a layer, or as its weights together."""
    found = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.size()
    return sum(size for size in found.values() if size in (one_layer, one_layer // 4))


@each("unquantized", "current", "mxfp8", "nvfp4", "delayed", "blocks of 1x128")
def the_fusion_of_experts_is_that_of_the_unsharded_experts(name: str) -> None:
    """As on a GPU: all experts are one product, and the three ops in the middle one fusion."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: dtype is torch.bfloat16)
        patch.setattr(fuser.GroupedLinear, "runs_at_once", lambda self, key: True)
        fused = []
        together = GroupedMLP._together

        def noting(*args: Any) -> Any:
            fused.append(True)
            return together(*args)

        patch.setattr(GroupedMLP, "_together", noting)
        for options, how in combinations([*KINDS.values()], ("all", "each")):
            layers = sharded(mixture(**options), how, mp_policy=policy)
            reference = mixture(**options).bfloat16()
            recipes = [recipe_of(name), recipe_of(name)]
            if name == "delayed":
                recipes = [recipe_of(name, reduce_amax=False) for _ in range(2)]
            for step in range(3):
                given = [inputs(step, 4, torch.bfloat16) for _ in range(2)]
                losses = [
                    loss_of(m, x, r)
                    for m, x, r in zip((layers, reference), given, recipes, strict=True)
                ]
                assert torch.equal(*losses), (options, how, step)
                # A linear that was given to fully_shard is called as a module.
                if device_type() == "cpu" or step == 0:  # later steps are recorded
                    assert len(fused) == (2 if how == "all" else 1)
                fused.clear()
                for loss in losses:
                    loss.backward()
                for place in (0, 2):
                    assert torch.equal(given[0][place].grad, given[1][place].grad)
            for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
                found, expected = whole(parameter.grad), own.grad.to(parameter.dtype)
                scale = float(expected.abs().max())
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * scale)


def linear(kind: str, **options: Any) -> Any:
    """A linear, or linears of four groups: a pipeline that takes rows and ``op_kwargs``."""
    torch.manual_seed(1)
    if kind == "dense":
        return fuser.Sequential(fuser.BasicLinear(64, 64))
    return fuser.Sequential(fuser.GroupedLinear(4, 64, 64, bias=False, **KINDS[kind]))


def microbatch(layers: Any, kind: str, x: torch.Tensor, recipe: Any, is_first: bool | None) -> Any:
    extras = () if kind == "dense" else (torch.tensor([8, 8, 8, 8]),)
    kwargs = None if is_first is None else {0: {"is_first_microbatch": is_first}}
    with fuser.autocast(recipe=recipe):
        y = layers(x, *extras, op_kwargs=kwargs)
    y.square().mean().backward()
    return y.detach()


def by_optimizer(layers: Any) -> None:
    torch.optim.SGD(layers.parameters(), lr=8.0).step()


def by_hand(layers: Any) -> None:
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(-1.5)


def by_data(layers: Any) -> None:
    for parameter in layers.parameters():
        shard_of(parameter).data.mul_(-1.5)


def by_state(layers: Any) -> None:
    state = {key: value for key, value in layers.state_dict().items() if value.numel()}
    with torch.no_grad():
        for value in state.values():
            value._local_tensor.mul_(-1.5)


@each("current", "mxfp8", "rowwise", "nvfp4")
def kept_quantized_weights_are_those_of_the_last_gathering(name: str) -> None:
    """The weights change between microbatches, in ways that torch counts and does not count."""
    kinds, changes = ("dense", "separate", "one weight"), (by_optimizer, by_hand, by_data, by_state)
    for (kind, change), reshards in combinations(
        [*itertools.product(kinds, changes)], (True, False)
    ):
        layers = linear(kind)
        fully_shard(layers, reshard_after_forward=reshards)
        recipe = recipe_of(name)
        x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
        seen = []
        for is_first in (True, False):
            seen.append(microbatch(layers, kind, x, recipe, is_first))
        assert torch.equal(*seen)
        seen.append(microbatch(layers, kind, x, recipe, None))
        assert torch.equal(*seen[-2:])
        change(layers)
        found = microbatch(layers, kind, x, recipe, False)
        expected = microbatch(layers, kind, x, recipe, None)
        assert not torch.equal(found, seen[0])
        assert torch.equal(found, expected), (kind, change, reshards)


@each("current", "mxfp8")
def quantized_weights_are_kept_while_they_are_gathered(name: str) -> None:
    for kind in ("dense", "separate", "one weight"):
        for reshards in (True, False):
            layers = linear(kind)
            op = layers[0]
            fully_shard(layers, reshard_after_forward=reshards)
            layers.set_reshard_after_backward(False)
            x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
            made = []
            for is_first in (True, False, False):
                microbatch(layers, kind, x, recipe_of(name), is_first)
                kept = None if op._kept_weight is None else next(iter(op._kept_weight.values()))
                made.append(None if kept is None else kept.made)
            assert all(one is made[0] for one in made)
            assert (made[0] is None) == reshards
            layers.reshard()
            microbatch(layers, kind, x, recipe_of(name), False)
            if not reshards:
                assert next(iter(op._kept_weight.values())).made is not made[0]


@case
def gradients_that_fully_shard_would_not_see_are_refused() -> None:
    x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
    for name in ("delay_wgrad_compute", "accumulate_into_main_grad"):
        for options in KINDS.values():
            layers = fuser.Sequential(fuser.GroupedLinear(4, 64, 64, **{name: True}, **options))
            fully_shard(layers)
            for parameter in layers.parameters():
                parameter.main_grad = torch.zeros_like(parameter)
            sentence = said(StateError, lambda m=layers: m(x, torch.tensor([8, 8, 8, 8])))
            assert f"GroupedLinear(4, 64, 64) has {name}=True" in sentence
            assert "that fully_shard gathers" in sentence
            with torch.no_grad():
                layers(x, torch.tensor([8, 8, 8, 8]))


@case
def weights_that_are_gathered_stay_in_the_memory_of_torch() -> None:
    """A call joins weights in separate memory, and torch fills that of gathered ones again."""
    for reshards in (True, False):
        layers = linear("separate")
        op = layers[0]
        fully_shard(layers, reshard_after_forward=reshards)
        x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
        for factor in (1.0, -2.0):
            with torch.no_grad():
                for parameter in layers.parameters():
                    parameter.mul_(factor)
            wholes = [parameter.full_tensor() for parameter in layers.parameters()]
            layers.unshard()
            places = [parameter.data_ptr() for parameter in layers.parameters()]
            with torch.no_grad():
                layers(x, torch.tensor([8, 8, 8, 8]))
            layers.unshard()
            assert all(p.is_contiguous() for p in op.parameters())
            if not reshards:
                assert [p.data_ptr() for p in layers.parameters()] == places
            for parameter, whole in zip(layers.parameters(), wholes, strict=True):
                assert torch.equal(parameter, whole)
            layers.reshard()
