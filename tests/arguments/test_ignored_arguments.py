"""Arguments of ops and layers that are accepted and change nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import arguments_listed  # noqa: F401  imported for its rows
import pytest
import rows_of_layers
import torch
from argument_checks import leaves, results
from argument_rows import IGNORED, found
from oracles import random_tensor
from paths import ROOT

import fuser
from fuser.modules.arguments import GroupedOptions, LayerOptions

FP32 = torch.float32
X = random_tensor((4, 6), FP32, 1)
VALUES = {
    "sm_margin": 4,
    "seq_length": 2,
    "micro_batch_size": 2,
    "in_place": True,
    "ub_name": "qkv",
}
MAKE: dict[str, Callable[..., Any]] = {
    "fuser.LayerNorm": lambda **given: fuser.LayerNorm(6, **given),
    "fuser.L2Normalization": fuser.L2Normalization,
    "fuser.AddExtraInput": fuser.AddExtraInput,
    "fuser.MakeExtraOutput": fuser.MakeExtraOutput,
    "fuser.modules.Linear": rows_of_layers.LAYERS["Linear"][0],
    "fuser.modules.LayerNormLinear": rows_of_layers.LAYERS["LayerNormLinear"][0],
    "fuser.modules.LayerNormMLP": rows_of_layers.LAYERS["LayerNormMLP"][0],
    "fuser.modules.GroupedLinear": lambda **given: fuser.modules.GroupedLinear(2, 6, 8, **given),
}
EXTRAS: dict[str, Callable[[], torch.Tensor]] = {
    "fuser.AddExtraInput": lambda: random_tensor((4, 6), FP32, 2),
    "fuser.modules.GroupedLinear": lambda: torch.tensor([1, 3]),
}


def _of_ops() -> list[tuple[str, str]]:
    names = [name for name in IGNORED if not name[0].startswith("fuser.te.")]
    return [name for name in names if _is_op(found(name[0]))]


def _is_op(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, torch.nn.Module)


@pytest.mark.parametrize(("path", "argument"), _of_ops(), ids=str)
def test_an_ignored_argument_changes_no_bit_and_no_tensor_of_the_caller(
    path: str, argument: str
) -> None:
    found_by_value = []
    for given in ({}, {argument: VALUES[argument]}):
        torch.manual_seed(0)
        op = MAKE[path](**given)
        inputs = leaves([X, *([EXTRAS[path]()] if path in EXTRAS else [])])
        before = [tensor.detach().clone() for tensor in inputs]
        found_by_value.append(results(op, inputs, [*inputs, *op.parameters()]))
        assert all(map(torch.equal, inputs, before))
    without, with_it = found_by_value
    assert without.keys() == with_it.keys()
    for name, tensor in without.items():
        assert torch.equal(tensor, with_it[name]), name
    assert any(bool(tensor.any()) for tensor in without.values())


def test_the_margin_of_each_pass_is_accepted() -> None:
    margins = {"forward": 1, "backward": 2}
    for norm in (fuser.LayerNorm, fuser.RMSNorm):
        y = norm(6, sm_margin=margins)(X)
        assert torch.equal(y, norm(6)(X))


@pytest.mark.parametrize(("path", "argument"), _of_ops(), ids=str)
def test_the_documents_print_an_ignored_argument(path: str, argument: str) -> None:
    text = (ROOT / "docs" / "te_ops.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## Arguments that change nothing")
    rows = [row.split("|") for row in section.partition("\n## ")[0].splitlines() if "|" in row]
    owner = "fuser.modules" if path.startswith("fuser.modules.") else path.rpartition(".")[2]
    assert any(f"`{argument}`" in row[1] and f"`{owner}`" in row[2] for row in rows)
    assert any(IGNORED[path, argument] in row[3] for row in rows)


def test_options_of_layers_are_those_of_their_types() -> None:
    options = rows_of_layers.OPTIONS
    assert set(options["fuser.modules.GroupedLinear"]) == set(GroupedOptions.__annotations__)
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP"):
        assert set(options[f"fuser.modules.{name}"]) == set(LayerOptions.__annotations__)


@pytest.mark.parametrize("path", rows_of_layers.OPTIONS)
def test_a_layer_takes_the_options_of_its_list_and_no_others(path: str) -> None:
    with pytest.raises(fuser.InputTypeError, match="takes no argument 'ub_overlap'"):
        MAKE[path](ub_overlap=False)
    for name in rows_of_layers.IGNORED:
        MAKE[path](**{name: None})
