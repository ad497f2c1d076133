"""accelerate alone: a converted model that it prepares trains, saves and loads as a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import titan_like
import torch
import torch.nn.functional as F

import fuser

accelerate: Any = pytest.importorskip(
    "accelerate", reason="tests of other libraries need `pip install -e .[integrations]`"
)

CURRENT = fuser.recipe.Float8CurrentScaling()
STEPS, PARTS = 3, 2


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def batches(first: int = 0) -> list[torch.Tensor]:
    return [titan_like.tokens(seed) for seed in range(first, first + STEPS * PARTS)]


def converted(options: dict[str, Any] | None) -> torch.nn.Module:
    model = titan_like.titan()
    if options is not None:
        fuser.convert(model, **options)
    return model


def plain_loop(model: torch.nn.Module) -> list[float]:
    """Steps of several batches each, without accelerate."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for index, tokens in enumerate(batches()):
        loss = loss_of(model(tokens), tokens)
        (loss / PARTS).backward()
        losses.append(float(loss.detach()))
        if index % PARTS == PARTS - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


class Training:
    """A model and an optimizer in the hands of accelerate."""

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=PARTS, **options
        )
        self.own = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def losses(self, first: int = 0) -> list[float]:
        losses = []
        for tokens in batches(first):
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model(tokens), tokens)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


OPTIONS: dict[str, dict[str, Any]] = {"no recipe": {}, "current": {"recipe": CURRENT}}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_several_batches_are_those_of_the_plain_loop(name: str) -> None:
    reference = converted(OPTIONS[name])
    expected = plain_loop(reference)
    training = Training(converted(OPTIONS[name]))
    assert training.losses() == expected
    state = training.model.state_dict()
    for key, value in reference.state_dict().items():
        assert torch.equal(state[key], value), key
    without = plain_loop(converted(None))
    assert len(set(expected)) == STEPS * PARTS
    bound = 1e-5 if name == "no recipe" else 0.02
    torch.testing.assert_close(torch.tensor(expected), torch.tensor(without), rtol=bound, atol=0)
    assert expected != without or name == "no recipe"


@pytest.mark.parametrize("name", OPTIONS)
def test_a_saved_state_is_loaded_into_a_model_of_another_start(name: str, tmp_path: Path) -> None:
    training = Training(converted(OPTIONS[name]))
    training.losses()
    training.accelerator.save_state(str(tmp_path / "state"))
    expected = training.losses(first=50)
    plain = Training(converted(None))
    plain.losses()
    plain.accelerator.save_state(str(tmp_path / "plain"))
    names = [sorted(f.name for f in (tmp_path / d).iterdir()) for d in ("state", "plain")]
    assert names[0] == names[1]
    torch.manual_seed(7)
    other = titan_like.TitanLike()
    fuser.convert(other, **OPTIONS[name])
    again = Training(other)
    again.accelerator.load_state(str(tmp_path / "state"))
    assert again.losses(first=50) == expected
    assert titan_like.counted(again.model, titan_like.tokens())[1] > 2


def test_the_model_comes_out_as_it_went_in(tmp_path: Path) -> None:
    model = converted({})
    training = Training(model)
    training.losses()
    out = training.accelerator.unwrap_model(training.model)
    assert out is model
    assert titan_like.counted(out, titan_like.tokens())[1] == 3
    training.accelerator.save_model(training.model, str(tmp_path))
    files = pytest.importorskip("safetensors.torch")
    saved = files.load_file(tmp_path / "model.safetensors")
    plain = titan_like.TitanLike()
    plain.load_state_dict(saved)
    assert torch.equal(plain(titan_like.tokens()), out(titan_like.tokens()))
    fuser.revert(out)
    assert torch.equal(plain(titan_like.tokens()), out(titan_like.tokens()))


def test_mixed_precision_of_accelerate_reaches_pipelines() -> None:
    found = {}
    for name in ("plain", "converted"):
        training = Training(converted(None if name == "plain" else {}), mixed_precision="bf16")
        found[name] = torch.tensor(training.losses())
        # accelerate puts a forward around that of the class, and takes it off again.
        assert "forward" in training.own.__dict__
        count = titan_like.counted(training.model, titan_like.tokens())[1]
        out = training.accelerator.unwrap_model(training.model, keep_fp32_wrapper=False)
        assert out is training.own
        assert out.forward.__func__ is type(out).forward
        for _ in range(2):
            assert titan_like.counted(out, titan_like.tokens())[1] == count
        assert count == (0 if name == "plain" else 3)
    torch.testing.assert_close(found["converted"], found["plain"], rtol=0.02, atol=0)
    assert not torch.equal(found["converted"], torch.tensor(plain_loop(converted({}))))


def test_a_recipe_is_given_before_accelerate_or_after_it() -> None:
    found = {name: [0.0] for name in ("before", "after", "none")}
    for name in found:
        training = Training(
            converted({"recipe": CURRENT} if name == "before" else {}), mixed_precision="bf16"
        )
        if name == "after":
            fuser.convert(training.model, recipe=CURRENT)
        found[name] = training.losses()
    assert found["before"] == found["after"] != found["none"]
    torch.testing.assert_close(
        torch.tensor(found["before"]), torch.tensor(found["none"]), rtol=0.02, atol=0
    )
