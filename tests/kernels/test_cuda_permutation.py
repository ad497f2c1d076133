"""The kernels of the permutation by expert, in the emulator."""

from __future__ import annotations

from typing import Any

import emulator
import permutation_cases as cases
import pytest
import torch
from permutation_cases import Routing
from quantize_cases import EMULATOR, Input, assert_same
from said import said

from fuser.cuda import permutation
from fuser.errors import InputError, KernelUnavailable
from fuser.moe import permute

emulator.prepare(*permutation.instantiations())

WITH_PROBS = pytest.mark.parametrize("with_probs", [False, True], ids=["sum", "weighted"])
WITH_DOT = pytest.mark.parametrize("with_dot", [False, True], ids=["dy", "dy and dprobs"])


@cases.EVERY_SORT
def test_assignments_are_sorted_by_expert_and_then_by_token(routing: Routing) -> None:
    cases.check_sort(EMULATOR, routing)


@cases.EVERY_MOVE
def test_tokens_are_copied_to_the_rows_of_their_experts(routing: Routing) -> None:
    for like in cases.MATRICES[::3]:
        cases.check_permute(EMULATOR, routing, like)


@cases.EVERY_MATRIX
def test_tokens_of_every_layout_are_copied(like: Input) -> None:
    cases.check_permute(EMULATOR, Routing(11, 3, 4, 5), like)


@WITH_PROBS
@cases.EVERY_MOVE
def test_the_rows_of_a_token_are_added(routing: Routing, with_probs: bool) -> None:
    for like in cases.MATRICES[1::3]:
        cases.check_unpermute(EMULATOR, routing, like, with_probs)


@WITH_PROBS
@cases.EVERY_MATRIX
def test_rows_of_every_layout_are_added(like: Input, with_probs: bool) -> None:
    cases.check_unpermute(EMULATOR, Routing(11, 3, 4, 5), like, with_probs)


@WITH_DOT
@cases.EVERY_MOVE
def test_the_gradients_of_rows_and_probabilities_are_the_references(
    routing: Routing, with_dot: bool
) -> None:
    for like in cases.MATRICES[2::3]:
        cases.check_unpermute_backward(EMULATOR, routing, like, with_dot)


@WITH_DOT
@cases.EVERY_MATRIX
def test_gradients_of_every_layout_are_the_references(like: Input, with_dot: bool) -> None:
    cases.check_unpermute_backward(EMULATOR, Routing(11, 3, 4, 5), like, with_dot)


# -- with gradients -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [1, 37, 128])
@pytest.mark.parametrize("capacity", [40, 70, 81])
def test_kernels_give_the_results_and_gradients_of_torch(
    dtype: torch.dtype, columns: int, capacity: int
) -> None:
    torch.manual_seed(0)
    x, probs = torch.randn(23, columns).to(dtype), torch.rand(23, 3)
    indices = Routing(23, 3, 5).indices()
    expected = cases.layer(x, indices, probs, 5, capacity)
    with emulator.emulated():
        got = cases.layer(x, indices, probs, 5, capacity)
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same(a, b, f"result {number}")
    assert all(tensor.isfinite().all() for tensor in got)


def test_probabilities_of_other_dtypes_and_strided_gradients_are_taken() -> None:
    torch.manual_seed(0)
    x, probs = torch.randn(40, 23).t(), torch.rand(3, 23).bfloat16().t()
    indices = Routing(23, 3, 5).indices()
    expected = cases.layer(x, indices, probs, 5, 70)
    with emulator.emulated():
        got = cases.layer(x, indices, probs, 5, 70)
        copied = x.detach().requires_grad_()
        permuted = permute(copied, indices, num_experts=5)
        permuted.x.sum().backward()  # an expanded gradient
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same(a, b, f"result {number}")
    assert copied.grad is not None
    assert torch.equal(copied.grad, (indices >= 0).sum(1, keepdim=True).expand(23, 40).float())


def test_torch_runs_if_a_kernel_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*arguments: Any, **options: Any) -> None:
        raise KernelUnavailable("This kernel does not compile.")

    names = ("sort_by_expert", "permute", "unpermute", "unpermute_backward")
    x, probs, indices = torch.randn(23, 8), torch.rand(23, 3), Routing(23, 3, 5).indices()
    expected = cases.layer(x, indices, probs, 5, 70)
    for name in names:
        monkeypatch.setattr(permutation, name, unavailable)
    with emulator.emulated():
        got = cases.layer(x, indices, probs, 5, 70)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# -- refusals -----------------------------------------------------------------


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"expert_indices": torch.zeros(4, 2)},
            said("permutation-indices-int32-int64", "sort_by_expert", "torch.float32"),
        ),
        ({"expert_indices": int32(4)}, said("permutation-row-token-t", "sort_by_expert", (4,))),
        (
            {"expert_indices": int32(2, 4).t()},
            said(
                "checks-needs-contiguous-strides",
                "sort_by_expert",
                "expert_indices",
                None,
                None,
                None,
                None,
                (1, 4),
            ),
        ),
        (
            {"split_sizes": int32(1025)},
            said("permutation-1-experts-not", "sort_by_expert", 1024, 1025),
        ),
        (
            {"split_sizes": torch.zeros(3)},
            said("checks-needs-contiguous-strides", "sort_by_expert", "split_sizes", "torch.int32"),
        ),
        (
            {"row_map": torch.zeros(8)},
            said("checks-needs-contiguous-strides", None, "row_map", "torch.int32"),
        ),
        (
            {"inverse_map": int32(4, 3)},
            said(
                "checks-needs-contiguous-strides",
                "sort_by_expert",
                "inverse_map",
                None,
                (4, 2),
                None,
                (4, 3),
            ),
        ),
        (
            {"counts": int32(1, 3)},
            said("permutation-assignments-counts-shape", "sort_by_expert", 8, "None"),
        ),
    ],
)
def test_the_sort_refuses_tensors_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "expert_indices": int32(4, 2),
        "split_sizes": int32(3),
        "row_map": int32(8),
        "inverse_map": int32(4, 2),
        "counts": None,
    }
    with pytest.raises(InputError, match=words):
        permutation.sort_by_expert(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"dout": torch.zeros(4, 8, dtype=torch.float64)},
            said("checks-float32-float16-bfloat16", None, "torch.float64"),
        ),
        ({"dout": torch.zeros(8, 4).t()}, "element by element"),
        (
            {"row_map": torch.zeros(8)},
            said("checks-needs-contiguous-strides", None, "row_map", "torch.int32"),
        ),
        (
            {"inverse_map": int32(3, 2)},
            said(
                "checks-needs-contiguous-strides", None, "inverse_map", None, (4, 2), None, (3, 2)
            ),
        ),
        (
            {"probs": torch.zeros(4, 2, dtype=torch.bfloat16)},
            said("checks-needs-contiguous-strides", None, "probs", "torch.float32"),
        ),
        (
            {"dy": torch.zeros(7, 8)},
            said("checks-needs-contiguous-strides", None, "dy", None, (8, 8), None, (7, 8)),
        ),
        ({"dprobs": None}, said("permutation-both-dprobs-neither")),
        (
            {"y": torch.zeros(7, 8)},
            said("permutation-needs-y-shape", None, (8, 8), "torch.float32", (7, 8)),
        ),
    ],
)
def test_the_launchers_of_rows_refuse_tensors_that_do_not_fit(
    change: dict[str, Any], words: str
) -> None:
    arguments: dict[str, Any] = {
        "dout": torch.zeros(4, 8),
        "y": torch.zeros(8, 8),
        "row_map": int32(8),
        "inverse_map": int32(4, 2),
        "probs": torch.zeros(4, 2),
        "dy": torch.zeros(8, 8),
        "dprobs": torch.zeros(4, 2),
    }
    with pytest.raises(InputError, match=words):
        permutation.unpermute_backward(**{**arguments, **change})
