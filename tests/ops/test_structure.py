"""The structure of an op, which graphs of torch.compile compare, after something of it is set."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn import Parameter

import fuser
from fuser.op import fusible


def test_another_parameter_or_buffer_makes_no_structure() -> None:
    """FSDP2 sets each parameter four times a step."""
    op = fuser.BasicLinear(8, 4)
    op.register_buffer("kept", torch.zeros(2))
    before = op._structure
    with mock.patch.object(fusible, "structure_of", side_effect=AssertionError("made again")):
        op.weight = Parameter(torch.ones(4, 8))
        op.kept = torch.ones(2)
    assert op._structure == before


@pytest.mark.parametrize("value", [None, Parameter(torch.ones(4))], ids=["removed", "added"])
def test_a_parameter_that_comes_or_goes_makes_another_structure(value: Parameter | None) -> None:
    op = fuser.Bias(4)
    if value is not None:
        op.bias = None  # type: ignore[assignment]
    before = op._structure
    op.bias = value  # type: ignore[assignment]
    assert op._structure != before
    assert op._structure == fusible.structure_of(op)


def test_a_plain_attribute_makes_another_structure() -> None:
    op = fuser.RMSNorm(8, eps=1e-5)
    before = op._structure
    op.eps = 1e-3
    assert op._structure != before
