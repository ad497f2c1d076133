"""The torch reference of delayed scaling: casts, histories, scales."""

from __future__ import annotations

from typing import Any

import number_formats as ref
import numpy as np
import pytest
import torch
from format_cases import (
    E4M3,
    E5M2,
    FLT_MAX,
    NAN,
    NUMPY,
    MetaOnly,
    Random,
    all_same,
    amaxes,
    deterministic,
    fp32_of,
    randoms,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from said import said

from fuser.errors import InputError
from fuser.formats import DType
from fuser.reference import fp8_scaling


@given(
    x=randoms(largest=60),
    scale=st.sampled_from([1.0, 3.0, 2.0**-126, FLT_MAX, 149.33333]),
    fmt=st.sampled_from((E4M3, E5M2)),
)
@settings(max_examples=40, **deterministic)
def test_a_delayed_cast_uses_the_given_scale_and_measures_the_amax(
    x: Random, scale: float, fmt: DType
) -> None:
    t = x.tensor()
    held = torch.tensor([scale])
    row, col, scale_inv, amax = fp8_scaling.quantize_delayed(t, held, fmt)
    codes = NUMPY[fmt].encode(ref.product(fp32_of(t), held.numpy()))
    assert all_same((row, col, scale_inv), (codes, codes.T, ref.quotient(1, held.numpy())))
    assert amax.dtype == torch.float32
    assert np.array_equal(amax.numpy(), [np.abs(fp32_of(t)).max()], equal_nan=True)
    assert held.item() == torch.tensor(scale).item()


@given(
    steps=st.lists(st.tuples(amaxes, amaxes, amaxes), min_size=1, max_size=12),
    length=st.integers(1, 5),
    margin=st.integers(-1, 3),
    algorithm=st.sampled_from(["max", "most_recent"]),
    as_tensor=st.booleans(),
)
@settings(max_examples=100, **deterministic)
def test_delayed_scales_follow_the_loop_of_their_definition(
    steps: list[tuple[float, float, float]],
    length: int,
    margin: int,
    algorithm: str,
    as_tensor: bool,
) -> None:
    largest = [448.0, 57344.0, 448.0] if as_tensor else [448.0] * 3
    max_fp8 = torch.tensor(largest) if as_tensor else 448.0
    history, scale = torch.zeros(length, 3), torch.tensor([1.0, 2.0, 5.0])
    found: list[list[tuple[float, list[float]]]] = [[], [], []]
    for step in steps:
        history[0] = torch.tensor(step)
        update: Any = fp8_scaling.update_delayed
        assert update(history, scale, max_fp8, margin=margin, algorithm=algorithm) is None
        for n in range(3):
            found[n].append((scale[n].item(), sorted(history[:, n].tolist())))
            if step[n] != 0:
                assert history[0, n] == 0
    for n, start in enumerate((1.0, 2.0, 5.0)):
        own = [step[n] for step in steps]
        assert found[n] == ref.delayed_scale_loop(own, length, largest[n], start, margin, algorithm)


def test_a_history_that_is_full_forgets_its_oldest_amax() -> None:
    history, scale = torch.zeros(3, 1), torch.ones(1)
    seen = []
    for amax in (64.0, 4.0, 2.0, 1.0, 0.0, 0.0, 1.0):
        history[0] = amax
        fp8_scaling.update_delayed(history, scale, 448.0)
        seen.append(448.0 / scale.item())
    assert seen == [64, 64, 64, 4, 2, 2, 2]


def test_the_newest_amax_goes_to_the_end_of_the_history_and_the_others_move_up() -> None:
    history, scale = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.ones(1)
    fp8_scaling.update_delayed(history, scale, 448.0)
    assert history.flatten().tolist() == [0.0, 3.0, 4.0, 1.0]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_nan_amax_leaves_the_scale_and_falls_out_of_the_history(algorithm: str) -> None:
    history, scale = torch.zeros(2, 2), torch.tensor([3.0, 3.0])
    history[0] = torch.tensor([NAN, 1.0])
    fp8_scaling.update_delayed(history, scale, 448.0, algorithm=algorithm)
    assert scale.tolist() == [3.0, 448.0]
    for _ in range(2):
        history[0] = 2.0
        fp8_scaling.update_delayed(history, scale, 448.0, algorithm=algorithm)
    assert scale.tolist() == [224.0, 224.0]
    assert not history.isnan().any()


def test_an_unknown_amax_algorithm_is_refused_with_the_two_known_ones() -> None:
    with pytest.raises(InputError, match=said("fp8-scaling-algorithm-max-most", "'mean'")):
        fp8_scaling.update_delayed(torch.zeros(2, 1), torch.ones(1), 448.0, algorithm="mean")


def test_updating_delayed_scales_reads_nothing_back_from_the_device() -> None:
    history, scale = torch.zeros(2, 3, device="meta"), torch.ones(3, device="meta")
    max_fp8 = torch.full((3,), 448.0, device="meta")
    with MetaOnly():
        fp8_scaling.update_delayed(history, scale, max_fp8)
        fp8_scaling.update_delayed(history, scale, 448.0, margin=1, algorithm="most_recent")
