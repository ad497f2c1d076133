"""A LightningModule with a converted model trains, saves and loads as the plain loop does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import titan_like
import torch
import torch.nn.functional as F
from paths import ROOT

import fuser

lightning: Any = pytest.importorskip(
    "lightning", reason="tests of other libraries need `pip install -e .[integrations]`"
)

CURRENT = fuser.recipe.Float8CurrentScaling()
STEPS = 6


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class Plain(lightning.LightningModule):  # type: ignore[misc]
    """A model that is not converted."""

    is_counted = False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.model = titan_like.TitanLike()
        self.options = options
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.counts: list[int] = []

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        if self.is_counted:
            _, count = titan_like.counted(self.model, tokens)
            self.counts.append(count)
        loss = loss_of(self.model, tokens)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, tokens: torch.Tensor, index: int) -> None:
        self.validated.append(float(loss_of(self.model, tokens).detach()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Converted(Plain):
    """Converted where it is made."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        fuser.convert(self.model, **options)


class ConvertedByHook(Plain):
    """Converted in the hook in which Lightning makes large models."""

    def configure_model(self) -> None:
        fuser.convert(self.model, **self.options)


def batches() -> list[torch.Tensor]:
    """Those of an epoch, of which there are two."""
    return [titan_like.tokens(seed) for seed in range(STEPS // 2)]


def trainer(folder: Path, **options: Any) -> Any:
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": STEPS,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 1.0,
        **options,
    }
    return lightning.Trainer(**settings)


def fitted(cls: Any, folder: Path, arguments: Any = None, **options: Any) -> tuple[Any, Any]:
    module = cls(**(arguments or {}))
    module.is_counted = True
    training = trainer(folder, **options)
    loaders: list[Any] = [torch.utils.data.DataLoader(batches(), batch_size=None) for _ in range(2)]
    training.fit(module, *loaders)
    return module, training


def plain_loop(options: dict[str, Any] | None) -> tuple[list[float], torch.nn.Module]:
    """The same steps without Lightning."""
    torch.manual_seed(0)
    model = titan_like.TitanLike()
    if options is not None:
        fuser.convert(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in 2 * batches():
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize("cls", [Converted, ConvertedByHook])
@pytest.mark.parametrize("options", [{}, {"recipe": CURRENT}], ids=["no recipe", "current"])
def test_training_is_that_of_the_plain_loop(
    cls: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    module, _ = fitted(cls, tmp_path, options)
    losses, model = plain_loop(options)
    assert module.losses == losses
    state = module.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    without, _ = plain_loop(None)
    bound = 0.02 if options else 1e-5
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(without), rtol=bound, atol=0)
    assert losses != without or not options
    assert set(module.counts) == {11 if options else 3}
    # Validation runs in inference mode, with the values of training.
    fuser.revert(module)
    module.eval()
    if not options:
        for value, tokens in zip(module.validated[-len(batches()) :], batches(), strict=True):
            assert value == pytest.approx(float(loss_of(module.model, tokens)), rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_precisions_of_lightning_are_followed(precision: str, tmp_path: Path) -> None:
    found = {}
    for cls in (Plain, Converted, ConvertedByHook):
        module, _ = fitted(cls, tmp_path / cls.__name__, precision=precision)
        found[cls] = torch.tensor(module.losses)
        assert set(module.counts) == ({0} if cls is Plain else {3})
        assert module.model.lm_head.weight.dtype is (
            torch.bfloat16 if precision == "bf16-true" else torch.float32
        )
    for cls in (Converted, ConvertedByHook):
        torch.testing.assert_close(found[cls], found[Plain], rtol=0.02, atol=0)
    assert torch.equal(found[Converted], found[ConvertedByHook])


def test_a_checkpoint_is_that_of_the_plain_module_and_resumes(tmp_path: Path) -> None:
    module, training = fitted(Converted, tmp_path, max_steps=STEPS // 2)
    training.save_checkpoint(tmp_path / "half.ckpt")
    _, plain_training = fitted(Plain, tmp_path, max_steps=STEPS // 2)
    plain_training.save_checkpoint(tmp_path / "plain.ckpt")
    files = [torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in ("half", "plain")]
    assert files[0]["state_dict"].keys() == files[1]["state_dict"].keys()
    assert files[0].keys() == files[1].keys()
    tokens = titan_like.tokens(99)
    expected = module.model.eval()(tokens)
    for cls in (Plain, Converted):
        loaded = cls.load_from_checkpoint(tmp_path / "half.ckpt", weights_only=True).eval()
        assert torch.equal(loaded.model(tokens), expected)
    resumed = {}
    for cls in (Plain, Converted):
        module = cls()
        loader: Any = torch.utils.data.DataLoader(batches(), batch_size=None)
        options = {"ckpt_path": tmp_path / "half.ckpt", "weights_only": True}
        trainer(tmp_path).fit(module, loader, **options)
        resumed[cls] = torch.tensor(module.losses)
    assert len(resumed[Converted]) == STEPS // 2
    torch.testing.assert_close(resumed[Converted], resumed[Plain], rtol=1e-5, atol=0)


def test_a_compiled_module_trains_the_same(tmp_path: Path) -> None:
    torch._dynamo.reset()
    module = Converted(recipe=CURRENT)
    for layer in module.model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    trainer(tmp_path).fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    losses, _ = plain_loop({"recipe": CURRENT})
    assert module.losses == losses


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "lightning.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})
