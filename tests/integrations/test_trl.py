"""Trainers of TRL, whose forward calls the body of the model and computes the loss in parts."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

import fuser

REASON = "tests of other libraries need `pip install -e .[integrations]`"
trl: Any = pytest.importorskip("trl", reason=REASON)
datasets: Any = pytest.importorskip("datasets", reason=REASON)
peft: Any = pytest.importorskip("peft", reason=REASON)
tokenizers: Any = pytest.importorskip("tokenizers", reason=REASON)
transformers: Any = pytest.importorskip("transformers", reason=REASON)

CURRENT = fuser.recipe.Float8CurrentScaling()
WORDS, LENGTH, STEPS = 96, 24, 3
pytestmark = pytest.mark.filterwarnings("ignore")


def language_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> Any:
    words = {"<pad>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, WORDS)}}
    model = tokenizers.models.WordLevel(words, unk_token="w2")
    by_words = tokenizers.Tokenizer(model)
    by_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=by_words, pad_token="<pad>", eos_token="</s>"
    )


def data() -> Any:
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(2, WORDS, (4 * STEPS, LENGTH), generator=random).tolist()
    return datasets.Dataset.from_dict({"input_ids": rows})


def options(folder: Path, **others: Any) -> dict[str, Any]:
    """What the configurations of trainers have in common."""
    return {
        "output_dir": str(folder),
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **others,
    }


def trainer_of(model: Any, folder: Path, *, lora: bool = False, checkpointing: bool = False) -> Any:
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": 4}
    arguments = trl.SFTConfig(**options(folder, gradient_checkpointing=checkpointing, **sizes))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if lora else None
    return trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=data(),
        processing_class=tokenizer(),
        peft_config=config,
    )


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "lora": {"lora": True},
    "checkpoints": {"checkpointing": True},
    "lora in checkpoints": {"lora": True, "checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_converted_model_trains_quantized_before_and_after_the_trainer_has_it(
    way: str, tmp_path: Path
) -> None:
    found: dict[str, list[float]] = {}
    for name in ("not converted", "converted", "trainer's model converted"):
        model = language_model()
        if name == "converted":
            fuser.convert(model, recipe=CURRENT)
        trainer = trainer_of(model, tmp_path / name, **WAYS[way])
        if name == "trainer's model converted":
            assert fuser.convert(trainer.model, recipe=CURRENT).converted
        found[name] = losses_of(trainer)
        assert len(found[name]) == STEPS
    plain, first, second = found.values()
    assert first != plain
    assert second != plain
    torch.testing.assert_close(torch.tensor(first), torch.tensor(plain), rtol=0.02, atol=0)
    torch.testing.assert_close(torch.tensor(second), torch.tensor(plain), rtol=0.02, atol=0)
    if way in ("plain", "checkpoints"):
        assert first == second


def test_checkpoints_keep_the_numbers_of_a_quantized_model(tmp_path: Path) -> None:
    found = []
    for way in ("plain", "checkpoints"):
        model = language_model()
        fuser.convert(model, recipe=CURRENT)
        found.append(losses_of(trainer_of(model, tmp_path / way, **WAYS[way])))
    assert found[0] == found[1]


def test_preferences_are_learned_by_a_quantized_model(tmp_path: Path) -> None:
    """DPO shares the forward of the trainers of TRL."""
    rows = [{"prompt": "w3 w4", "chosen": "w5 w6", "rejected": "w7 w8"}] * 4
    found = []
    for is_converted in (False, True):
        model = language_model()
        if is_converted:
            fuser.convert(model, recipe=CURRENT)
        sizes = {"max_steps": 2, "per_device_train_batch_size": 2}
        folder = tmp_path / str(is_converted)
        arguments = trl.DPOConfig(**options(folder, gradient_checkpointing=False, **sizes))
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=copy.deepcopy(language_model()),
            args=arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
        )
        found.append(losses_of(trainer))
    assert found[0] != found[1]
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=0.1, atol=0)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    exec(block, names)
    assert len(names["trainer"].state.log_history) > 0
