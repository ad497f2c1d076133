"""torchtitan's own Llama, built from a configuration that fuser has converted."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import titan_like
import torch
import torchtitan_models as models
from paths import ROOT
from ranks import results_of

import fuser

for name in ("torchtitan", "triton"):
    pytest.importorskip(name, reason=f"{name} is not installed: see docs/torchtitan.md.")
titan: Any = importlib.import_module("fuser.integrations.torchtitan")

CURRENT = fuser.recipe.Float8CurrentScaling()


def built(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model as torchtitan's trainer builds it: on meta, with another default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = config.build()
    finally:
        torch.set_default_dtype(before)
    model.verify_module_protocol()
    return models.initialized(model)


def trained(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits, and the gradients of all parameters."""
    model.zero_grad()
    y = model(x)
    y.float().square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **grads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fuse_qkv", [True, False])
@pytest.mark.parametrize("name", ["converter", "override"])
def test_a_converted_configuration_builds_the_same_model(
    name: str, fuse_qkv: bool, dtype: torch.dtype
) -> None:
    plain = built(models.config(fuse_qkv=fuse_qkv), dtype)
    model = built(models.CONVERSIONS[name](models.config(fuse_qkv=fuse_qkv)), dtype)
    assert {n: v.dtype for n, v in model.state_dict().items()} == {
        n: v.dtype for n, v in plain.state_dict().items()
    }
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert isinstance(model, type(plain))
    assert type(model).__name__ == "Llama3Model"
    x = models.tokens()
    y, count = titan_like.counted(model, x)
    # Both layers; the converter also joins the last norm and the head.
    assert count == (3 if name == "converter" else 2)
    found, expected = trained(model, x), trained(plain, x)
    assert found.keys() == expected.keys()
    if dtype is torch.float32:
        assert torch.equal(y, expected["y"])
    for key, value in expected.items():
        largest, bound = float(value.abs().max()), 2e-6 if dtype is torch.float32 else 0.05
        torch.testing.assert_close(found[key], value, rtol=0, atol=bound * largest, msg=key)


def test_options_are_those_of_convert_and_reach_it() -> None:
    signature = inspect.signature(fuser.convert).parameters
    options = {f.name: f.default for f in dataclasses.fields(titan.FuserConverter.Config)}
    assert options == {n: p.default for n, p in signature.items() if n != "model"}
    x, plain = models.tokens(), built(models.config())
    expected = plain(x)
    for recipe in (CURRENT, "current", "Float8CurrentScaling"):
        model = built(titan.converted(models.config(), recipe=recipe, keep=("*.wo", "lm_head")))
        fuser.convert(plain, recipe=CURRENT, keep=("*.wo", "lm_head"))
        assert torch.equal(model(x), plain(x))
        assert not torch.equal(model(x), expected)
    bf16 = built(models.config(), torch.bfloat16)
    rounded = built(titan.converted(models.config(), rounding="torch"), torch.bfloat16)
    assert torch.equal(rounded(x), bf16(x))
    assert not torch.equal(built(titan.converted(models.config()), torch.bfloat16)(x), bf16(x))
    filtered = titan.converted(
        models.config(), filter=lambda path, _: not path.startswith("layers")
    )
    assert titan_like.counted(built(filtered), x)[1] == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recipe": "fp4"}, "There is no recipe 'fp4'"),
        ({"keep": ("output",)}, "keep has 'output', which matches no linear"),
        ({"linears": "some"}, "got linears='some'"),
    ],
)
def test_a_wrong_option_is_refused_when_the_model_is_built(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(fuser.InputError, match=sentence):
        built(titan.converted(models.config(), **options))
    with pytest.raises(TypeError, match="layers"):
        titan.converted(models.config(), layers=2)


def test_a_factory_converts_the_blocks_that_it_names() -> None:
    from torchtitan.config import override
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.decoder import TransformerBlock

    def last_block(config: Any) -> Any:
        return titan.converted(config, recipe=CURRENT, keep=())

    override(target=TransformerBlock.Config, fqns=["*layers.1"])(last_block)
    config = models.config()
    name = f"{last_block.__module__}.{last_block.__name__}"
    lines = apply_overrides(OverrideConfig(imports=[name]), config)
    assert [line.split(":")[1].split()[0] for line in lines] == ["layers.1"]
    model, plain = built(config), built(models.config())
    fuser.convert(plain.layers["1"], recipe=CURRENT, keep=())
    x = models.tokens()
    assert titan_like.counted(model, x)[1] == 3  # the chain, and two linears of the attention
    assert torch.equal(model(x), plain(x))


def test_the_configuration_can_be_written_and_copied() -> None:
    config = titan.converted(models.config(), recipe=CURRENT)
    written = json.loads(json.dumps(config.to_dict()))
    assert written["conversion"]["keep"] == ["first", "last"]
    assert "Float8CurrentScaling" in json.dumps(written["conversion"]["recipe"])
    x = models.tokens()
    model = built(copy.deepcopy(config))
    assert torch.equal(model(x), built(config)(x))
    assert titan_like.counted(copy.deepcopy(model), x)[1] == titan_like.counted(model, x)[1] > 4


def test_a_head_that_the_loss_calls_is_not_quantized() -> None:
    """As ChunkedLossWrapper does: the model returns hidden states, and the loss calls the head."""
    model = built(titan.converted(models.config(), recipe=CURRENT, keep=()))
    plain, x = built(models.config()), models.tokens()
    fuser.convert(plain, recipe=CURRENT, keep=())
    whole = model(x)
    model._skip_lm_head = plain._skip_lm_head = True
    hidden = model(x)
    assert torch.equal(hidden, plain(x))
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
    assert torch.equal(model.lm_head(hidden), logits)
    assert not torch.equal(whole, logits)


def test_stages_of_a_pipeline_are_copies_without_some_layers() -> None:
    model, plain = (built(make(models.config())) for make in (titan.converted, models.unchanged))
    x = models.tokens()
    for each in (model, plain):
        first, last = copy.deepcopy(each), copy.deepcopy(each)
        del first.layers["1"], last.layers["0"]
        first.norm = first.lm_head = last.tok_embeddings = None
        each.y = last(first(x))
    assert torch.equal(model.y, plain.y)
    assert titan_like.counted(last, first(x))[1] == 0  # the plain one
    assert torch.equal(plain.y, plain(x))


@pytest.mark.parametrize("order", ["fuser first", "LoRA first"])
def test_adapters_of_torchtitan_stay_adapters(order: str) -> None:
    from torchtitan.components.lora import LoRAConverter

    lora = LoRAConverter.Config(rank=4, target_modules=["wo", "w2"])
    steps = [titan.FuserConverter.Config(), lora]
    config, plain = models.config(), lora.build().convert(models.config())
    for step in steps if order == "fuser first" else steps[::-1]:
        config = step.build().convert(config)
    model, expected = built(config), built(plain)
    for each in (model, expected):
        generator = torch.Generator().manual_seed(3)
        for name, p in each.named_parameters():
            if "lora_b" in name:
                p.data.copy_(torch.randn(p.shape, generator=generator))
    x = models.tokens()
    assert torch.equal(model(x), expected(x))
    found = trained(model, x)
    assert list(found) == list(trained(expected, x))
    assert any("lora_a" in name for name in found)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    several = results_of(models.cases, tmp_path_factory.mktemp("ranks"))
    single = results_of(models.single_cases, tmp_path_factory.mktemp("rank"), count=1)
    return several | single


@pytest.mark.parametrize("name", [n for n in models.CONVERSIONS if n != "plain"])
@pytest.mark.parametrize("way", [*models.WAYS, *models.SINGLE])
def test_training_by_torchtitans_own_functions_follows_the_model_without_fuser(
    results: dict[str, list[Any]], way: str, name: str
) -> None:
    is_exact = way != "in bf16" and "fp8" not in name
    pairs = zip(results[f"{way}, {name}"], results[f"{way}, plain"], strict=True)
    for found, expected in pairs:
        for each in (found, expected):
            assert isinstance(each, dict), each[1]
        assert list(found["state"]) == list(expected["state"])
        bound = 1e-5 if is_exact else 0.02
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=bound, atol=0)
        if is_exact:
            torch.testing.assert_close(found["state"], expected["state"], rtol=1e-4, atol=1e-4)
        # FSDP2 has hooks at the last norm. Under a recipe the linears of the attention and, by
        # the converter, the head run pipelines too.
        fewest = {"converter": 2, "override": 2, "converter, fp8": 7, "override, fp8": 6}
        assert found["counts"] == [fewest[name]] * models.STEPS
        assert set(expected["counts"]) == {0}
        assert "fp8" not in name or found["losses"] != expected["losses"]


@pytest.mark.parametrize("way", models.REFUSED)
def test_parallelism_in_which_no_pipeline_would_run_is_refused(
    results: dict[str, list[Any]], way: str
) -> None:
    for kind, _ in results[way]:
        assert kind.startswith("InputError: A model that fuser has converted got"), kind
        value = "full_dtensor" if way == "full_dtensor" else "tensor_parallel_degree=2"
        assert value in kind


def test_without_torchtitan_there_is_a_sentence() -> None:
    code = "import sys; sys.modules['torchtitan'] = None; import fuser.integrations.torchtitan"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: fuser.integrations.torchtitan needs torchtitan 0.3 or later" in run.stderr


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "torchtitan.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})
