"""Calls that differ in one field of the launch key never share cached launches."""

from __future__ import annotations

import pytest
from launch_cache_cases import Pair, check, pairs
from pipeline_kernels import on_kernels


@pytest.mark.parametrize("pair", pairs(), ids=str)
def test_calls_that_differ_in_one_field_get_their_own_launches(pair: Pair) -> None:
    check(pair, on_kernels)
