"""What Megatron-LM asks of Transformer Engine's names beyond the layers, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuser
from fuser.te.pytorch import attention, distributed


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# -- recomputation -------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_has_the_random_states_of_its_forward(use_reentrant: bool) -> None:
    def dropped(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        with tracker.fork("a"):
            return torch.nn.functional.dropout(x, 0.5) * scale

    results = []
    for is_checkpointed in (False, True):
        tracker = distributed.CudaRNGStatesTracker()
        tracker.add("a", 1)
        x = torch.ones(64, requires_grad=True)
        outputs = []
        for _ in range(2):  # the second forward draws other numbers, before any backward
            if is_checkpointed:
                y = fuser.checkpoint(
                    dropped,
                    x,
                    scale=3.0,
                    use_reentrant=use_reentrant,
                    get_rng_state_tracker=lambda tracker=tracker: tracker,
                )
            else:
                y = dropped(x, scale=3.0)
            outputs.append(y)
        assert not torch.equal(*outputs)
        outputs[0].sum().backward()
        with tracker.fork("a"):
            results.append((outputs[0].detach(), x.grad, torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_recomputation_that_fails_leaves_the_random_states() -> None:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("a", 1)
    fails = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("a"):
            if fails:
                raise ValueError("again")
            return x * torch.rand(3)

    x = torch.ones(3, requires_grad=True)
    y = fuser.checkpoint(function, x, get_rng_state_tracker=lambda: tracker)
    before = tracker.get_states()
    fails.append(True)
    with pytest.raises(ValueError, match="again"):
        y.sum().backward()
    assert torch.equal(tracker.get_states()["a"], before["a"])


# -- attention -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no_mask", "causal", "padding", "bias"])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_returns_the_largest_logit_of_each_head(
    kind: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ROWS", 3)
    q = torch.randn(7, 2, 4, 8)
    k, v = torch.randn(2, 7, 2, groups, 8).unbind()
    mask = torch.rand(2, 1, 1, 7) < 0.5
    bias = torch.randn(1, 4, 7, 7)
    logits = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(4 // groups, 2)) * 0.3
    call: dict[str, Any] = {"attn_mask_type": kind}
    if kind == "causal":
        logits = logits.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), float("-inf"))
    elif kind == "padding":
        logits = logits.masked_fill(mask, float("-inf"))
        call["attention_mask"] = mask
    elif kind == "bias":
        logits = logits + bias
        call = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
        call["attn_mask_type"] = "no_mask"
    options: dict[str, Any] = {"num_gqa_groups": groups, "softmax_scale": 0.3}
    output, largest = attention.DotProductAttention(4, 8, return_max_logit=True, **options)(
        q, k, v, **call
    )
    torch.testing.assert_close(largest, logits.amax((0, 2, 3)))
    assert torch.equal(output, attention.DotProductAttention(4, 8, **options)(q, k, v, **call))


def test_attention_refuses_a_mask_of_integers() -> None:
    q = torch.randn(5, 2, 4, 8)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.int64)
    with pytest.raises(fuser.InputError, match=r"mask of torch.int64; give one of torch.bool"):
        attention.DotProductAttention(4, 8, attn_mask_type="padding")(q, q, q, mask)
