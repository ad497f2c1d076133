"""fuser.modules.GroupedLinear: the op as a layer that is called with the sizes of the groups."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import oracles
import pytest
import torch
from said import holds, said

import fuser
from fuser import modules
from fuser import recipe as recipes
from fuser.communication import PlannedGroup

G, K, N, T = 3, 32, 48, 64
SPLITS = (20, 0, 40)
FP32, BF16 = torch.float32, torch.bfloat16


def made(**options: Any) -> modules.GroupedLinear:
    return oracles.randomize(modules.GroupedLinear(G, K, N, device="cpu", **options))


def x_of(seed: int = 1) -> torch.Tensor:
    return oracles.random_tensor((T, K), FP32, seed).requires_grad_()


LAYOUTS = {
    "separate": ({}, ("weight0", "weight1", "weight2", "bias0", "bias1", "bias2")),
    "one of each": (
        {"single_grouped_weight": True, "single_grouped_bias": True},
        ("weight", "bias"),
    ),
}
every_layout = pytest.mark.parametrize(("options", "names"), LAYOUTS.values(), ids=LAYOUTS)


@every_layout
def test_a_layer_is_its_op(options: dict[str, bool], names: tuple[str, ...]) -> None:
    layer = made(**options)
    assert tuple(name for name, _ in layer.named_parameters()) == names
    assert tuple(layer.state_dict()) == (*names, "_extra_state")
    op = fuser.GroupedLinear(G, K, N, device="cpu", **options)
    op.load_state_dict(layer.state_dict())
    x = x_of()
    y = op(x, torch.tensor(SPLITS))
    for splits in (list(SPLITS), SPLITS, torch.tensor(SPLITS), torch.tensor(SPLITS).int()):
        assert torch.equal(layer(x, splits), y)
    layer(x, SPLITS).sum().backward()
    dx, x.grad = x.grad, None
    y.sum().backward()
    assert torch.equal(dx, x.grad)
    assert all(torch.equal(getattr(layer, n).grad, getattr(op, n).grad) for n in names)
    plan = layer.plan(x, SPLITS)
    assert plan.ops == ("GroupedLinear",)
    assert plan.backward
    assert not layer.plan(x, SPLITS, training=False).backward


@every_layout
def test_a_layer_without_biases_has_none(options: dict[str, bool], names: tuple[str, ...]) -> None:
    layer = made(bias=False, **options)
    weights = [name for name in names if "weight" in name]
    assert list(layer.state_dict()) == [*weights, "_extra_state"]
    assert all(getattr(layer, name) is None for name in names if "bias" in name)
    assert layer(x_of(), SPLITS).shape == (T, N)


@every_layout
def test_an_init_method_gets_each_weight(options: dict[str, bool], names: tuple[str, ...]) -> None:
    shapes = []

    def init(weight: torch.Tensor) -> None:
        shapes.append(tuple(weight.shape))
        weight.fill_(float(len(shapes)))

    layer = modules.GroupedLinear(G, K, N, device="cpu", init_method=init, **options)
    assert shapes == [(N, K)] * G
    shapes.clear()
    layer.reset_parameters()
    weights = layer.weight if options else [layer.weight0, layer.weight1, layer.weight2]
    assert [float(w.detach().mean()) for w in weights] == [1, 2, 3]


def test_separate_weights_share_one_buffer_also_after_a_move() -> None:
    layer = made()
    for moved in (layer, layer.to(BF16), copy.deepcopy(layer).to(FP32)):
        weights = [moved.weight0, moved.weight1, moved.weight2]
        steps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(weights)}
        assert steps == {N * K * weights[0].element_size()}
        x = x_of().to(weights[0].dtype)
        assert moved(x, SPLITS).dtype is weights[0].dtype


@pytest.mark.parametrize("convert", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_trains_apart(convert: Any) -> None:
    layer = made()
    twin = convert(layer)
    assert torch.equal(layer(x_of(), SPLITS), twin(x_of(), SPLITS))
    twin(x_of(), SPLITS).sum().backward()
    assert twin.weight0.grad is not None
    assert layer.weight0.grad is None


def test_parameters_on_meta_are_made_at_the_first_call_or_by_reset_parameters() -> None:
    layer = modules.GroupedLinear(G, K, N, device="meta")
    with torch.device("cpu"):
        assert layer(x_of(), SPLITS).any()
    assert layer.weight2.any()
    other = modules.GroupedLinear(G, K, N, device="meta").to_empty(device="cpu")
    other.reset_parameters()
    assert other(x_of(), SPLITS).isfinite().all()


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_weights_are_quantized_at_every_call() -> None:
    layer = made(dtype=BF16)
    x = x_of().bfloat16()
    with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
        layer(x, SPLITS, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight0.zero_()
            layer.bias0.zero_()
        assert not layer(x, SPLITS, is_first_microbatch=False)[: SPLITS[0]].any()


def test_gradients_go_into_main_grad_and_may_be_left() -> None:
    plainly = made(bias=False)
    layer = made(bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    called = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    for each in (plainly, layer):
        each(x_of(), SPLITS).square().sum().backward()
    assert not layer.weight0.main_grad.any()
    layer.backward_dw()
    assert called == [1]
    for name, parameter in plainly.named_parameters():
        assert torch.equal(getattr(layer, name).main_grad, parameter.grad)


@pytest.mark.parametrize(
    ("splits", "error", "words"),
    [
        ([20, 44], fuser.InputError, said("grouped-linear-groups-give-each", 2, 3)),
        (
            torch.tensor([20, 44]),
            fuser.InputError,
            said("grouped-linear-split-each-groups", None, (2,)),
        ),
        (
            [20, 20, 20.0],
            fuser.InputTypeError,
            said("grouped-linear-takes-ints-integer", [20, 20, 20.0]),
        ),
        (64, fuser.InputTypeError, said("grouped-linear-takes-ints-integer", 64)),
        (
            torch.ones(3),
            fuser.InputError,
            said("grouped-linear-split-sizes-integers", None, "torch.float32"),
        ),
        ([20, 20, 30], fuser.InputError, said("grouped-sum-more-rows", 70, 64)),
        ([20, -1, 30], fuser.InputError, said("grouped-split-not-negative", "20, -1, 30")),
    ],
)
def test_sizes_that_do_not_fit_get_a_sentence(splits: Any, error: Any, words: str) -> None:
    layer = made()
    with pytest.raises(error, match=words):
        layer(x_of(), splits)
    assert layer(x_of(), SPLITS).shape == (T, N)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"return_bias": True},
            said("arguments-takes-only", None, "return_bias", True, "a layer adds its bias itself"),
        ),
        (
            {"tp_size": 2},
            said("arguments-takes-only", None, "tp_size", 2, "a layer runs on one rank"),
        ),
        (
            {"ub_overlap_rs": True},
            said(
                "arguments-takes-only",
                None,
                "ub_overlap_rs",
                True,
                holds("communication is not overlapped"),
            ),
        ),
        (
            {"save_original_input": True},
            said("arguments-takes-only", None, "save_original_input", True),
        ),
        (
            {"parallel_mode": "both"},
            said("parameters-none-column-row", "GroupedLinear", "parallel_mode", "'both'"),
        ),
        (
            {"sequence_parallel": True},
            said("parameters-sequence-parallel-true", None, "parallel_mode"),
        ),
    ],
)
def test_arguments_of_the_original_are_taken_if_they_are_off(
    options: dict[str, Any], words: str
) -> None:
    names = ("return_bias", "ub_overlap_rs", "ub_overlap_ag", "save_original_input")
    off = {**dict.fromkeys(names, False), "tp_size": 1, "tp_group": None, "ub_name": "experts"}
    modules.GroupedLinear(G, K, N, device="cpu", parallel_mode=None, **off)
    with pytest.raises(fuser.InputError, match=words):
        modules.GroupedLinear(G, K, N, device="cpu", **options)
    with pytest.raises(TypeError, match=said("arguments-no-leave-out", None, "'colour'")):
        modules.GroupedLinear(G, K, N, colour="red")  # type: ignore[call-arg]


def test_tensor_parallelism_over_ranks_is_refused() -> None:
    with pytest.raises(
        fuser.InputError, match=said("parallel-tensor-parallelism-version", None, "column", 2)
    ):
        modules.GroupedLinear(G, K, N, parallel_mode="column", tp_group=PlannedGroup(2))
