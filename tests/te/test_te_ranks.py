"""Layers and functions of fuser.te on two ranks, beside one rank."""

from __future__ import annotations

from typing import Any

import pytest
import te_ranks_cases as of_ranks
import torch
from ranks import RANKS, part, results_of
from torch.nn import functional as F


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results_of(of_ranks.cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("case", "smoothing"), [("entropy", 0.0), ("smoothed", 0.1)])
def test_cross_entropy_over_ranks_is_that_of_the_whole_vocabulary(
    results: dict[str, list[Any]], case: str, smoothing: float
) -> None:
    logits = of_ranks.random(of_ranks.BATCH, of_ranks.LENGTH, of_ranks.CLASSES).requires_grad_()
    target = of_ranks.targets()
    loss = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
    ).view_as(target)
    (loss * of_ranks.random(*target.shape, seed=1)).sum().backward()
    for rank, found in enumerate(results[case]):
        assert isinstance(found, dict), found
        torch.testing.assert_close(found["loss"], loss.detach().cpu())
        torch.testing.assert_close(found["dx"], part(logits.grad.cpu(), rank, -1))


@pytest.mark.parametrize("case", ["row", "row of shards"])
def test_a_row_parallel_bias_has_the_gradient_of_its_rows(
    results: dict[str, list[Any]], case: str
) -> None:
    hidden, length = of_ranks.HIDDEN, of_ranks.LENGTH
    weight, bias = of_ranks.random(hidden, hidden), of_ranks.random(hidden, seed=1)
    x, dy = of_ranks.random(length, hidden, seed=2), of_ranks.random(length, hidden, seed=3)
    y = x @ weight.T + bias
    for rank, found in enumerate(results[case]):
        assert isinstance(found, dict), found
        rows = dy if case == "row" else part(dy, rank, 0)
        torch.testing.assert_close(found["db"], rows.sum(0).cpu())
        torch.testing.assert_close(found["y"], (y if case == "row" else part(y, rank, 0)).cpu())
        torch.testing.assert_close(found["dx"], part(dy @ weight, rank, 1).cpu())
        torch.testing.assert_close(found["dw"], part(dy.T @ x, rank, 1).cpu())


@pytest.mark.parametrize("case", ["layer", "layer of shards"])
def test_a_parallel_transformer_layer_is_that_of_one_rank(
    results: dict[str, list[Any]], case: str
) -> None:
    for differences in results[case]:
        assert isinstance(differences, dict), differences
        assert differences.pop("y") < 1e-4
        assert max(differences.values()) < 1e-5, differences


def test_rows_are_gathered_and_scattered(results: dict[str, list[Any]]) -> None:
    whole = torch.cat([of_ranks.random(4, 3, seed=rank) for rank in range(RANKS)]).cpu()
    for rank, found in enumerate(results["rows"]):
        assert isinstance(found, dict), found
        assert torch.equal(found["gathered"], whole)
        torch.testing.assert_close(found["summed"], part(3 * whole, rank, 0))


def test_a_parallel_mode_over_one_rank_shares_nothing(results: dict[str, list[Any]]) -> None:
    for found in results["alone"]:
        assert isinstance(found, dict), found
        assert len(found) == 8
        assert all(found.values()), found


def test_a_weight_whose_shards_ranks_write_has_the_scale_of_the_whole(
    results: dict[str, list[Any]],
) -> None:
    for found in results["shards"]:
        assert isinstance(found, dict), found
        assert torch.equal(found["found"], found["expected"])
        assert torch.equal(*found["scales"])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_small_steps_of_shards_are_kept_in_master_weights(
    results: dict[str, list[Any]], dtype: str
) -> None:
    """Ten steps of 1e-4, which no format keeps, from the values before quantization."""
    for found in results[f"steps in {dtype}"]:
        assert isinstance(found, dict), found
        expected = torch.full_like(found["moved"], -1e-3)
        torch.testing.assert_close(found["moved"], expected, atol=1e-6, rtol=0.0)
