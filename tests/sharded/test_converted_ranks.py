"""Converted models that are replicated, sharded or tensor parallel train as they would without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from converted_ranks_cases import ORDERS, WRAPPERS, cases
from ranks import results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results_of(cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_follows_the_model_that_is_not_converted(
    results: dict[str, list[Any]], wrapper: str, order: str
) -> None:
    pairs = zip(results[f"{wrapper}, {order}"], results[f"{wrapper}, not converted"], strict=True)
    for found, expected in pairs:
        for each in (found, expected):
            assert isinstance(each, dict), each[1]
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            found["parameters"], expected["parameters"], rtol=1e-4, atol=1e-5
        )
        # The output, and the feed-forwards of two layers but where their weights are DTensors or
        # a wrapper runs hooks around a part of the layer.
        whole = 1 if wrapper == "tensor parallel" else 3
        assert found["counts"] == [whole] * len(found["counts"])
        assert set(expected["counts"]) == {0}
