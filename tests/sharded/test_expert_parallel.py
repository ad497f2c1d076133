"""Experts on two and four ranks: the bits of one rank that has all tokens."""

from __future__ import annotations

import re
from typing import Any

import expert_parallel_cases as experts
import expert_parallel_models as models
import pytest
import torch
from other_sums import assert_equal_sums
from ranks import results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results_of(experts.cases, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def results_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results_of(experts.cases_of_four, tmp_path_factory.mktemp("ranks"), 4)


def checked(results: dict[str, list[Any]], name: str) -> list[Any]:
    for each in results[name]:
        assert isinstance(each, dict), each[1]
    return results[name]


def assert_equal(of_ranks: list[Any]) -> None:
    for rank, each in enumerate(of_ranks):
        assert len(each["found"]) == len(each["expected"]) > 0
        for place, (a, b) in enumerate(zip(each["found"], each["expected"], strict=True)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), (rank, place)
            if a.dim() == 2 and a.shape[1] <= models.CHOICES:
                # Gradients of probabilities: each is a sum of a row, of as many as the rank has.
                assert_equal_sums(a, b, f"rank {rank}, {place}")
            else:
                assert torch.equal(a, b), (rank, place)


@pytest.mark.parametrize("name", experts.CASES)
def test_experts_on_two_ranks_have_the_bits_of_one(
    results: dict[str, list[Any]], name: str
) -> None:
    assert_equal(checked(results, name))


@pytest.mark.parametrize("name", experts.cases_of_four())
def test_experts_on_four_ranks_have_the_bits_of_one(
    results_of_four: dict[str, list[Any]], name: str
) -> None:
    assert_equal(checked(results_of_four, name))


@pytest.mark.parametrize("name", [n for n in experts.CASES if n.startswith("at once")])
def test_tokens_are_sent_as_bytes_if_an_expert_has_one_scale(
    results: dict[str, list[Any]], name: str
) -> None:
    row = models.HIDDEN
    for each in checked(results, name):
        # A quantizer reads rows by index, unless the weight gradients read their values.
        is_gathered = "high_precision" not in name
        is_fused = name.split()[2] in ("current", "delayed") and is_gathered
        assert each["first"] == (["DispatchedExperts"] * 2 if is_gathered else [None, None])
        # Tokens and rows of the experts in forward, then both gradients.
        assert each["sent"] == [row if is_fused else 2 * row, 2 * row, 2 * row, 2 * row]
        sent = f"all-to-all FP8 E4M3 rowwise output (2 ranks: {row} B/token)"
        values = f"all-to-all output (2 ranks: {2 * row} B/token)"
        assert (sent if is_fused else values) in each["plan"]
        assert ("Bytes are sent; ranks first agree" in each["plan"]) == is_fused


def test_a_rank_saves_tensors_of_its_rows_and_its_tokens_alone(
    results: dict[str, list[Any]],
) -> None:
    """Inputs of both products, the activation's input and probabilities, weights, and places."""
    features = models.HIDDEN + 2 * models.WIDTH + models.WIDTH
    weights = 2 * 3 * models.WIDTH * models.HIDDEN * 2
    for rank, each in enumerate(checked(results, "saved")):
        tokens, k = models.TOKENS[rank], models.CHOICES
        places = 4 * (tokens * k + each["received"] + 4 + k)
        assert each["saved"] <= each["received"] * (2 * features + 4) + weights + 2 * places + 64


def test_a_plan_has_every_all_to_all_with_its_bytes(results: dict[str, list[Any]]) -> None:
    row = models.HIDDEN * 2
    for each in checked(results, "plans")[:1]:  # of 30 tokens, and the plans of ranks are alike
        text = each["exact"]
        # Two rows a token, half of them for the other rank; probabilities are in fp32.
        assert each["exact link"] == [row + 4, 0, row, row, 0, row + 4]
        for kernel in (
            "all-to-all output (2 ranks: 128 B/token)",
            "all-to-all probs (2 ranks: 4 B/token)",
            "all-to-all input (2 ranks: 128 B/token), unpermute to ranks, unpermute",
            "permute to ranks, permute, all-to-all grad_input (2 ranks: 128 B/token)",
            "all-to-all grad_output (2 ranks: 128 B/token)",
            "all-to-all grad of probs (2 ranks: 4 B/token)",
        ):
            assert any(kernel in kernels for kernels in each["exact kernels"])
        note = " ".join(text.split("notes")[1].split())
        assert "4 experts on 2 ranks, 2 on each; ranks first exchange" in note
        assert "read the sizes on the host; none is dropped" in note
        # 120 rows for 30 tokens.
        assert each["capacity link"] == [2 * (row + 4), 0, 2 * row, 2 * row, 0, 2 * (row + 4)]
        note = " ".join(each["capacity"].split())
        assert "120 rows on each rank, 60 from each rank; sizes are not read on the host" in note


def test_ops_over_ranks_are_recorded_and_captured_with_a_capacity_alone(
    results: dict[str, list[Any]],
) -> None:
    for each in checked(results, "plans"):
        assert each["exact recorded"] == [False, True, True, True, True]
        assert each["capacity recorded"] == [True] * 5
        assert "no capacity, so that the numbers of rows are read" in each["exact captured"]
        assert "a CUDA graph reads memory of the GPU" in each["capacity captured"]


SENTENCES = {
    "experts": "MoeDispatch's num_experts is 5, and 2 ranks do not divide it",
    "capacity": "MoeDispatch's capacity is 5, and 2 ranks do not divide it",
    "no member": "MoeDispatch got a process group of which rank {rank} is not a member",
    "combine": "MoeCombine got a process group of which rank {rank} is not a member",
    "other size": "made for experts on 2 ranks, and got an expert_parallel_group of 1",
    "ranks differ in experts": "rank 0 has num_experts 2; rank 1 has num_experts 4",
    "ranks differ in capacity": "rank 0 has capacity 60; rank 1 has capacity 62",
    "ranks differ in k": "rank 0 has k 2; rank 1 has k 1",
    "ranks differ in hidden": r"input \[..., 64\] .* input \[..., 128\] ",
    "ranks differ in dtype": "in bfloat16; .* in float32",
    "ranks differ in dtype of probs": "rank 0 has probs in float32; rank 1 has probs in bfloat16",
    "ranks differ in gradients": r"gradients \[True, False\].* gradients \[False, False\]",
    "ranks differ in fusions": "sent by the experts.* sent at once",
    "ranks differ in recipe": r"recipe Float8CurrentScaling\(\).* recipe MXFP8BlockScaling\(\)",
    "delayed": r"experts of different ranks would share scales. Use .*\(reduce_amax=False\)",
    "index": "MoeDispatch got expert index 4 for token 2, choice 1",
    "combine without a group": "MoeCombine has experts on one rank, .* Give both ops the same",
    "rows of another": "MoeCombine got an input of .* rows, and ranks that received",
    "places of one rank": "MoeCombine got an input of .* rows, and .* belongs to fewer rows",
    "too small": r"rows, and \(3, 2\) as the shape of extra output 2 of a MoeDispatch over 2",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_every_rank_gets_the_error_message(results: dict[str, list[Any]], name: str) -> None:
    for rank, each in enumerate(checked(results, "refused")):
        assert re.search(SENTENCES[name].format(rank=rank), each["said"][name])
