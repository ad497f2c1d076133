"""Megatron-LM's GPT on the layers of fuser.te, beside its own unfused layers."""

from __future__ import annotations

import importlib.util
from typing import Any

import megatron_models as models
import pytest
import torch
from ranks import results_of

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "tests of other libraries need `pip install -e .[integrations]`", allow_module_level=True
    )

FP32 = 2e-6
"""How far losses, and gradients over their largest value, may be from those of other sums."""
OTHER_GELU = 2e-4
"""The same where Megatron-LM has the erf form of GELU and its op fuser the tanh form of te.ops."""


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = results_of(models.on_one_rank, tmp_path_factory.mktemp("one"), 1)
    return {name: rank for name, (rank,) in results.items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(models.on_two_ranks, tmp_path_factory.mktemp("two"))


def check_dense(differences: Any) -> None:
    assert isinstance(differences, dict), differences
    for (name, kind, _), (loss, grads) in differences.items():
        reach = OTHER_GELU if "GELU" in name and kind == "op fuser" else FP32
        assert max(loss, grads) < reach, (name, kind, loss, grads)


def check_recipes(results: Any) -> None:
    assert isinstance(results, dict), results
    assert set(results) == set(models.RECIPES)
    for name, (is_same, difference) in results.items():
        assert is_same, name
        assert 0 < difference < 0.05, (name, difference)


def test_dense_layers_compute_as_its_own(single: dict[str, Any]) -> None:
    check_dense(single["dense"])


def test_tensor_and_sequence_parallel_layers_compute_as_its_own(pair: dict[str, Any]) -> None:
    for differences in pair["dense"]:
        check_dense(differences)
        assert any(has_shards for _, _, has_shards in differences)


def test_its_recipes_run_on_modules_and_on_ops_with_the_same_bits(
    single: dict[str, Any], pair: dict[str, Any]
) -> None:
    for results in (single["recipes"], *pair["recipes"]):
        check_recipes(results)


def test_experts_compute_as_its_own(single: dict[str, Any]) -> None:
    differences = single["experts"]
    assert isinstance(differences, dict), differences
    assert len(differences) == 4
    for loss, grads in differences.values():
        assert loss < FP32
        assert grads < FP32


def test_experts_run_under_its_recipes(single: dict[str, Any]) -> None:
    results = single["expert recipes"]
    assert isinstance(results, dict), results
    assert set(results) == set(models.RECIPES)
    assert all(0 < difference < 0.05 for difference in results.values()), results


def test_losses_of_a_training_are_those_of_its_own_layers(single: dict[str, Any]) -> None:
    losses = single["training"]
    assert isinstance(losses, list), losses
    for own, here in losses:
        assert abs(own - here) < 1e-3
    assert losses[-1][0] < losses[0][0] - 0.5


def test_its_data_parallel_training_computes_as_with_its_own_layers(
    single: dict[str, Any], pair: dict[str, Any]
) -> None:
    for results in (single["data parallel"], *pair["data parallel"]):
        assert isinstance(results, dict), results
        expected, _ = results["own", False]
        assert len(results) == 6
        for name, (steps, _) in results.items():
            for step, of_own in zip(steps, expected, strict=True):
                assert step == pytest.approx(of_own, abs=1e-4), name
        assert expected[0][0] != expected[-1][0]
    first, second = pair["data parallel"]
    for name, (_, values) in first.items():
        assert torch.equal(values, second[name][1]), name
    (loss, norm), (loss_of_second, norm_of_second) = (
        results["own", False][0][0] for results in (first, second)
    )
    assert loss != loss_of_second  # other batches
    assert norm == norm_of_second  # the mean of their gradients


def test_weights_that_are_gathered_in_fp8_train_with_the_same_losses(
    single: dict[str, Any], pair: dict[str, Any]
) -> None:
    for results in (single["gathered weights"], *pair["gathered weights"]):
        assert isinstance(results, dict), results
        (expected, is_quantized), (losses, is_quantized_there) = results[False], results[True]
        assert (is_quantized, is_quantized_there) == (False, True)
        assert losses == expected
        assert len(set(losses)) == 4


def test_checkpoints_load_both_ways(single: dict[str, Any], pair: dict[str, Any]) -> None:
    for results in (single["checkpoints"], *pair["checkpoints"]):
        assert results == {"own to te": True, "te to own": True}


def test_states_of_experts_are_in_its_checkpoints(
    single: dict[str, Any], pair: dict[str, Any]
) -> None:
    for results in (single["expert states"], *pair["expert states"]):
        assert isinstance(results, dict), results
        assert len(results) >= 4
        assert all(results.values()), results
    assert len(single["expert states"]) == 6


def test_it_has_other_ways_for_what_is_missing(single: dict[str, Any]) -> None:
    names = single["missing"]
    assert isinstance(names, dict), names
    assert set(names) <= {
        "transformer_engine.pytorch.cpp_extensions",
        "transformer_engine.pytorch.cpu_offload_v1",
        "transformer_engine.pytorch.ep",
        "transformer_engine.pytorch.graph.restore_fp8_tensors",
        "transformer_engine.pytorch.graph.save_fp8_tensors",
        "transformer_engine.pytorch.ops.basic.grouped_linear",
        "transformer_engine.pytorch.tensor.grouped_tensor",
    }
