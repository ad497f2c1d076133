"""The cross entropy and the moved rows of Transformer Engine's paths, each option by formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser.te.pytorch import cross_entropy, padding, permutation

BF16, F32 = torch.bfloat16, torch.float32
CLASSES = 7


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("ignored", [-100, -1, 3])
def test_ignored_classes_count_for_nothing(
    ignored: int, smoothing: float, is_mean: bool, dtype: torch.dtype
) -> None:
    """In the loss, in its gradient, and in the number by which a mean divides."""
    logits = (30 * torch.randn(3, 5, CLASSES)).to(dtype)
    target = torch.randint(0, CLASSES, (3, 5))
    target[0, :2] = ignored
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = cross_entropy.parallel_cross_entropy(
        ours, target, smoothing, is_mean, ignore_idx=ignored
    )
    log_probs = exact.log_softmax(-1)
    is_read = target != ignored
    place = target.clamp(0, CLASSES - 1)
    losses = -(1 - smoothing) * log_probs.gather(-1, place[..., None])[..., 0]
    losses = (losses - smoothing * log_probs.mean(-1)) * is_read
    expected = losses.sum() / is_read.sum() if is_mean else losses
    assert found.dtype is F32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(found.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    tolerance = 1e-5 if dtype is F32 else 2**-7
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_mean", [False, True])
def test_a_batch_of_ignored_targets_alone_has_the_loss_0(is_mean: bool) -> None:
    logits = torch.randn(4, CLASSES).requires_grad_()
    loss = cross_entropy.parallel_cross_entropy(logits, torch.full((4,), -100), 0.1, is_mean)
    loss.sum().backward()
    assert not loss.any()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_of_no_token_give_and_get_nothing(
    dtype: torch.dtype, more: int, weighted: bool
) -> None:
    """Rows after the copies: zeros in the copies' gradients, whatever is in them."""
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]).bool()
    count = int(mask.sum())
    x = torch.randn(4, 5).to(dtype)
    rows, ids = permutation.moe_permute(x, mask, count + more)
    rows = rows.clone()
    rows[count:] = 9.0
    probs = torch.rand(4, 3) * mask
    options: dict[str, Any] = {"merging_probs": probs} if weighted else {"restore_shape": x.shape}
    leaf = rows.requires_grad_()
    y = permutation.moe_unpermute(leaf, ids, **options)
    factors = probs if weighted else mask.float()
    tolerance = 1e-5 if dtype is F32 else 2**-6
    expected = x.float() * factors.sum(1, keepdim=True)
    torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
    dy = torch.randn(4, 5).to(dtype)
    y.backward(dy)
    token, expert = ids
    assert leaf.grad is not None
    assert not leaf.grad[count:].any()
    wanted = dy[token[:count]].float() * factors[token[:count], expert[:count], None]
    torch.testing.assert_close(leaf.grad[:count].float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("align", [1, 2, 4, None])
@pytest.mark.parametrize("sizes", [[3, 0, 5], [4, 4, 0], [0, 0, 1]])
def test_padded_rows_and_their_gradients_come_back(sizes: list[int], align: int | None) -> None:
    x = torch.randn(sum(sizes), 3).requires_grad_()
    y, padded = padding.Fp8Padding(3, align)(x, sizes)
    step = 16 if align is None else align
    assert padded == [-(-size // step) * step for size in sizes]
    parts = list(zip(y.split(padded), x.split(sizes), strict=True))
    assert all(torch.equal(own[: len(part)], part) for own, part in parts)
    assert not any(own[len(part) :].any() for own, part in parts)
    back = padding.Fp8Unpadding(3, align)(y * 2, sizes)
    assert torch.equal(back, 2 * x)
    weights = torch.randn(back.shape)
    (back * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * weights)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_gradients_of_sorted_chunks_go_back_to_their_rows(order: list[int]) -> None:
    sizes, index = torch.tensor([2, 0, 3]), torch.tensor(order)
    x, probs = torch.randn(5, 3).requires_grad_(), torch.rand(5).requires_grad_()
    y, p = permutation.moe_sort_chunks_by_index_with_probs(x, probs, sizes, index)
    parts = [x.split(sizes.tolist())[i] for i in index.tolist()]
    assert torch.equal(y, torch.cat(parts))
    dy, dp = torch.randn(5, 3), torch.randn(5)
    torch.autograd.backward((y, p), (dy, dp))
    places = torch.cat([torch.arange(5).split(sizes.tolist())[i] for i in index.tolist()])
    assert x.grad is not None
    assert probs.grad is not None
    assert torch.equal(x.grad[places], dy)
    assert torch.equal(probs.grad[places], dp)
