"""NVFP4's stochastic rounding in the torch reference, and the random words of Philox."""

from __future__ import annotations

import math
from typing import Any

import number_formats as ref
import numpy as np
import pytest
import torch
from format_cases import Random, identical, same

from fuser.reference import nvfp4

# One of each interval of E2M1, of both signs, beside values that it holds exactly.
BETWEEN = [0.125, 0.8, 1.1, -1.75, 2.25, 3.9, -4.5, 5.9, -0.3, 0.0, -0.0, 0.5, -3.0, 1e-3, 1.999]


def draws(rows: int, **options: Any) -> np.ndarray:
    """Codes ``[rows, 15]`` of BETWEEN, in blocks whose factor is 1."""
    x = torch.tensor([[6.0, *BETWEEN]] * rows)
    row, scale, *_ = nvfp4.quantize(x, columnwise=False, stochastic=True, **options)
    assert scale[:rows, 0].eq(0x7E).all()
    codes = ref.unpacked(row.numpy())
    assert (codes[:, 0] == 7).all()
    return codes[:, 1:]


def test_stochastic_rounding_is_unbiased_over_seeds_and_reaches_both_neighbours_only() -> None:
    rows, seeds = 512, 64
    codes = np.concatenate([draws(rows, seed=seed) for seed in range(seeds)])
    values = ref.E2M1.decode(codes)
    grid = np.concatenate((-ref.E2M1.values[::-1], ref.E2M1.values))
    for n, x in enumerate(torch.tensor(BETWEEN).double().tolist()):
        floor, ceiling = grid[grid <= x].max(), grid[grid >= x].min()
        assert set(values[:, n]) == {floor, ceiling}
        # Hoeffding: a mean of N draws from [floor, ceiling] is off by more with chance 1e-9.
        bound = (ceiling - floor) * math.sqrt(math.log(2 / 1e-9) / (2 * rows * seeds))
        assert abs(values[:, n].mean() - x) <= bound + 2.0**-24


def test_one_seed_draws_its_elements_independently() -> None:
    rows = 4096
    up = ref.E2M1.decode(draws(rows, seed=20)[:, :8])
    up = up == up.max(axis=0)
    correlation = np.corrcoef(up.T) - np.eye(8)
    neighbours = [np.corrcoef(up[:-1, n], up[1:, n])[0, 1] for n in range(8)]
    # Six standard deviations of the correlation of independent draws.
    assert np.abs(correlation).max() < 6 / math.sqrt(rows)
    assert np.abs(neighbours).max() < 6 / math.sqrt(rows)


def test_equal_seeds_round_equally_and_other_seeds_and_offsets_do_not() -> None:
    first = draws(64, seed=7)
    assert np.array_equal(draws(64, seed=7), first)
    assert np.array_equal(draws(64, seed=7, offset=0), first)
    others = [{"seed": 8}, {"seed": 7 + 2**32}, {"seed": 7, "offset": 1}]
    others += [{"seed": 7, "offset": 16}, {"seed": 7, "offset": 2**34}]
    for other in others:
        assert not np.array_equal(draws(64, **other), first)


def test_an_offset_skips_elements() -> None:
    assert np.array_equal(draws(64, seed=7)[16:], draws(48, seed=7, offset=16 * 16))


def test_the_copies_of_a_tensor_round_independently() -> None:
    # A symmetric tensor: with one stream both copies would be the same.
    x = Random(64, 64, seed=21).tensor()
    row, _, _, col, _, _ = nvfp4.quantize(x + x.T, stochastic=True, seed=1)
    assert not identical(row, col)


def test_values_that_e2m1_holds_do_not_change_under_stochastic_rounding() -> None:
    x = torch.from_numpy(ref.E2M1.decode(np.arange(256, dtype=np.uint8) % 16)).float()
    expected = nvfp4.quantize(x.view(16, 16))
    for a, b in zip(nvfp4.quantize(x.view(16, 16), stochastic=True), expected, strict=True):
        assert identical(a, b)


def test_philox_has_the_known_answers() -> None:
    # Random123's: counter, key, result.
    ones = 0xFFFFFFFF
    assert ref.philox_4x32_10((0, 0, 0, 0), (0, 0)) == (
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8
    )  # fmt: skip
    assert ref.philox_4x32_10((ones,) * 4, (ones, ones)) == (
        0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD
    )  # fmt: skip
    # Digits of pi.
    assert ref.philox_4x32_10(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    ) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize(
    ("seed", "offset", "stream"),
    [
        (0, 0, 0),
        (1, 3, 1),
        (2**32 + 5, 2**34 - 7, 0),
        (2**63 - 1, 4 * (2**32 - 1), 1),
        (0xFFFFFFFF, 2**40 + 2, 0xFFFFFFFF),
        (-1, 1, 0),
    ],
)
def test_random_words_are_those_of_philox(seed: int, offset: int, stream: int) -> None:
    shape = torch.Size((3, 5))
    words = nvfp4.random_words(seed, offset, shape, stream, torch.device("cpu"))
    assert same(words, ref.random_words(seed, offset, tuple(shape), stream))
    if (seed, offset, stream) == (0, 0, 0):
        assert words[0, :4].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
