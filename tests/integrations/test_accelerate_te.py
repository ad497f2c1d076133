"""accelerate trains a model of Hugging Face by ``mixed_precision="fp8"`` on the layers of fuser."""

from __future__ import annotations

import accelerate_te_models as models
import pytest
from ranks import results_of

pytest.importorskip(
    "accelerate", reason="tests of other libraries need `pip install -e .[integrations]`"
)


def test_a_model_trains_under_both_kinds_of_recipes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    (results,) = results_of(models.cases, tmp_path_factory.mktemp("one"), 1)["train"]
    assert isinstance(results, dict), results
    exact = results["fp32"]
    assert not exact["has layers"]
    for name in models.KWARGS:
        found = results[name]
        assert found["has layers"]
        assert found["down"] == "fuser.te.pytorch.layers"
        assert found["keys"] == exact["keys"]
        assert found["losses"] != exact["losses"]
        assert found["losses"][-1] < found["losses"][0] - 0.5
        for loss, expected in zip(found["losses"], exact["losses"], strict=True):
            assert abs(loss - expected) < 0.1
    assert results["missing"] == {}
