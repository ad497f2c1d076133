"""What Megatron-LM asks of Transformer Engine's names beyond the layers, on a CPU."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import fuser
from fuser import modules, recipe
from fuser.te.pytorch import attention, distributed, layers


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


# -- states of experts ---------------------------------------------------------------


def grouped(groups: int = 3, steps: int = 2) -> layers.GroupedLinear:
    layer = layers.GroupedLinear(groups, 16, 32)
    for seed in range(steps):
        torch.manual_seed(seed)
        sizes = list(range(1, groups + 1))
        with fuser.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            layer(torch.randn(sum(sizes), 16), sizes).square().sum().backward()
    return layer


def numbers(layer: layers.GroupedLinear) -> torch.Tensor:
    """The state of the op, in fp32."""
    return modules.GroupedLinear.get_extra_state(layer)


def test_a_state_of_experts_has_the_keys_that_programs_take_apart() -> None:
    layer = grouped()
    (op,) = layer.ops
    content = pickle.loads(layer.get_extra_state().numpy().tobytes())
    assert layer.fp8_meta["fp8_checkpoint"]
    assert layer.fp8_meta["recipe"].amax_history_len == 4
    forward = op.get_extra_state()[2:8].view(3, 2)
    scales = content["scale_fwd"].view(3, 3)
    assert torch.equal(scales[:2], forward.T)
    assert torch.equal(scales[2], torch.ones(3))
    assert content["amax_history_fwd"].shape == (4, 9)
    assert content["amax_history_fwd"].view(4, 3, 3)[1:, :2].amax(0).gt(0).all()
    assert content["scale_bwd"].view(2, 3)[0].ne(1).all()
    assert content["amax_history_bwd"].shape == (4, 6)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_state_of_experts_is_saved_and_loaded(steps: int) -> None:
    layer, again = grouped(steps=steps), grouped(steps=1)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(numbers(again), numbers(layer))
    outputs = []
    for each in (layer, again):
        with fuser.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            outputs.append(each(torch.full((6, 16), 0.3), [1, 2, 3]))
    assert torch.equal(*outputs)
    plain = layers.GroupedLinear(3, 16, 32)
    plain.set_extra_state(numbers(layer))
    assert torch.equal(numbers(plain), numbers(layer))


def test_a_state_of_experts_in_evaluation_has_no_amaxes_of_gradients() -> None:
    layer = layers.GroupedLinear(2, 16, 32)
    with fuser.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
        layer(torch.randn(4, 16), [1, 3])
    again = layers.GroupedLinear(2, 16, 32)
    again.set_extra_state(layer.get_extra_state())
    content = pickle.loads(again.get_extra_state().numpy().tobytes())
    assert torch.equal(content["scale_bwd"], torch.ones(4))
    assert not content["amax_history_bwd"].any()


class _Elsewhere:
    """A class of another library, in the state of its layer."""

    was_read = False

    def __setstate__(self, state: Any) -> None:
        type(self).was_read = True

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def test_a_state_of_another_library_is_not_read_and_another_number_of_groups_is_refused() -> None:
    layer = grouped()
    before = numbers(layer)
    content = {"recipe": _Elsewhere(), "scale_fwd": torch.ones(9)}
    data = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
    layer.set_extra_state(data)
    assert not _Elsewhere.was_read
    assert torch.equal(numbers(layer), before)
    sentence = "of 2 groups got a state of delayed scaling with 9 scales in its forward"
    with pytest.raises(fuser.InputError, match=sentence):
        grouped(2).set_extra_state(layer.get_extra_state())


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
