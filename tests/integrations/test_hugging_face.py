"""Models of transformers, converted: values, files, generation, training, compilation."""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hugging_face_models as models
import pytest
import torch
from said import said

import fuser
from fuser.modules.decoder import Decoder
from fuser.plan.transformers import Transformer

transformers: Any = pytest.importorskip(
    "transformers", reason="tests of other libraries need `pip install -e .[integrations]`"
)

# torch computes these with other roundings: a tanh that is written out, and probabilities that are
# multiplied after the last product, where fuser multiplies before it.
OTHER_ROUNDINGS = ("GPT-2", "BLOOM", "Mixtral", "Qwen2-MoE", "Qwen3-MoE", "gpt-oss")


def trained(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of all parameters."""
    model.zero_grad()
    logits = models.logits_of(model, inputs)
    logits.float().square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("name", models.MODELS)
def test_a_converted_model_has_its_logits_gradients_and_keys(name: str) -> None:
    model, inputs = models.MODELS[name]().eval(), models.inputs_of(name)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    expected = trained(model, inputs)
    report = fuser.convert(model)
    assert report.converted, str(report)
    actual = trained(model, inputs)
    if name in OTHER_ROUNDINGS:
        torch.testing.assert_close(actual["logits"], expected["logits"], rtol=0, atol=5e-7)
    else:
        assert torch.equal(actual["logits"], expected["logits"])
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(actual[key], value, rtol=0, atol=2e-6 * largest, msg=key)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    fuser.revert(model)
    assert_same(trained(model, inputs), expected)


def test_the_decoder_that_the_command_line_plans_is_converted_as_llama() -> None:
    sizes = Transformer("tiny", 3, 256, 512, 8, 4, 1000, head_dim=32, sequence=64)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
    )

    def rows(model: torch.nn.Module) -> list[tuple[str, str]]:
        report = fuser.convert(model, recipe="current")
        return sorted((r.path.removeprefix("model."), r.text) for r in report.rows + report.left)

    assert rows(Decoder(sizes, device="meta")) == rows(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2", "Phi3", "BERT", "ViT"])
def test_torchs_order_of_rounding_gives_the_logits_in_bf16(name: str) -> None:
    model, inputs = models.MODELS[name]().eval().bfloat16(), models.inputs_of(name)
    if "pixel_values" in inputs:
        inputs = {"pixel_values": inputs["pixel_values"].bfloat16()}
    expected = trained(model, inputs)["logits"]
    fuser.convert(model, rounding="torch", norms="all", linears="all")
    assert torch.equal(trained(model, inputs)["logits"], expected)
    fuser.revert(model)
    fuser.convert(model)
    largest = float(expected.abs().max())
    torch.testing.assert_close(
        trained(model, inputs)["logits"], expected, rtol=0, atol=0.05 * largest
    )


@pytest.mark.parametrize("recipe", [None, fuser.recipe.Float8CurrentScaling()], ids=["no", "fp8"])
def test_experts_are_an_implementation_of_transformers(recipe: Any) -> None:
    importlib.import_module("fuser.integrations.transformers")
    inputs = models.inputs_of("Mixtral")
    plain = trained(models.causal("Mixtral").eval(), inputs)
    model: Any = models.causal("Mixtral", experts_implementation="fuser").eval()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        found = trained(model, inputs)
    assert found.keys() == plain.keys()
    same = recipe is None
    for name, value in plain.items():
        largest = float(value.abs().max())
        distance = float((found[name] - value).abs().max())
        assert distance <= (2e-6 if same else 0.3) * largest, name
    assert torch.allclose(found["logits"], plain["logits"], atol=1e-6) == same
    copied = copy.deepcopy(model)
    assert torch.equal(models.logits_of(copied, inputs), models.logits_of(model, inputs))
    model.model.layers[0].mlp.experts.gate_up_proj = torch.nn.Parameter(torch.randn(4, 8, 64))
    with pytest.raises(fuser.FuserError, match="gate_up_proj has another shape"):
        model(**inputs)


def test_other_experts_of_transformers_are_refused_in_a_sentence() -> None:
    importlib.import_module("fuser.integrations.transformers")
    model = models.causal("gpt-oss", experts_implementation="fuser")
    sentence = said("transformers-experts-implementation-fuser", "GptOssExperts", "it has biases")
    with pytest.raises(fuser.FuserError, match=sentence):
        model(**models.inputs_of("Llama"))
    report = fuser.convert(model)
    assert not report.converted
    (reason,) = {row.text for row in report.refused}
    assert "it has biases" in reason


EXPERTS = {
    "gpt_oss.GptOss": "ClampedSwiGLU",
    "openai_privacy_filter.OpenAIPrivacyFilter": "ClampedSwiGLU",
    "minimax_m3_vl.MiniMaxM3VL": "ClampedSwiGLU",
    "deepseek_v4.DeepseekV4": "ClampedSwiGLU",
    "aria.Aria": "SwiGLU",
}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_any_layout_have_the_values_of_each_implementation(
    name: str, implementation: str
) -> None:
    family, _, prefix = name.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    model = getattr(module, f"{prefix}Experts")(models.config_of_experts(implementation))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x, probs = torch.randn(12, 32), torch.rand(12, 2)
    chosen = torch.rand(12, 4).argsort(-1)[:, :2]

    def results() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
        y = model(leaves[0], chosen, leaves[1])
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [*leaves, *model.parameters()])]

    expected = results()
    report = fuser.convert(model)
    assert [row.text for row in report.converted] == [
        f"4 experts: gate_up_proj, {EXPERTS[name]}, down_proj"
    ], str(report)
    for found, value in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=3e-6 * float(value.abs().max()))


LAYERS = {
    "Llama": "add, RMSNorm, gate_proj and up_proj, SwiGLU, down_proj, residual",
    "Gemma": "add, RMSNorm (1 + weight), gate_proj and up_proj, GEGLU, down_proj, residual",
    "Phi3": "add, RMSNorm, gate_up_proj, SwiGLU, down_proj, residual",
    "GPT-2": "c_fc, GELU, c_proj, dropout",
    "ViT": "add, LayerNorm, fc1, GELU, fc2, residual",
    "Mixtral": "4 experts: gate_up_proj, SwiGLU, down_proj",
    "gpt-oss": "4 experts: gate_up_proj, ClampedSwiGLU, down_proj",
    "OPT": "LayerNorm, fc1, ReLU, fc2",
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_runs_as_few_pipelines_as_it_can(name: str) -> None:
    report = fuser.convert(models.MODELS[name]())
    assert [row.text for row in report.converted] == 2 * [LAYERS[name]]


def saved_and_loaded(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: torch.nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("name", ["Llama tied", "Phi3", "Qwen3-MoE", "gpt-oss", "OPT"])
def test_copies_stay_converted(
    name: str, copied: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    model, inputs = models.MODELS[name]().eval(), models.inputs_of(name)
    count = len(fuser.convert(model, recipe=fuser.recipe.Float8CurrentScaling()).converted)
    expected = trained(model, inputs)
    other = copied(model)
    assert_same(trained(other, inputs), expected)
    assert type(other) is type(model)
    assert fuser.revert(other) >= count


@pytest.mark.parametrize("name", ["Llama", "Llama tied", "Phi3", "Mixtral", "Gemma", "gpt-oss"])
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_files_of_a_converted_model_are_those_of_the_model(
    name: str, shard: str, tmp_path: Path
) -> None:
    model: Any = models.MODELS[name]().eval()
    inputs = models.inputs_of(name)
    expected = models.logits_of(model, inputs)
    model.save_pretrained(tmp_path / "plain", max_shard_size=shard)
    fuser.convert(model)
    converted_logits = models.logits_of(model, inputs)
    model.save_pretrained(tmp_path / "converted", max_shard_size=shard)
    names = [sorted(f.name for f in (tmp_path / d).iterdir()) for d in ("plain", "converted")]
    assert names[0] == names[1]
    for file in (tmp_path / "plain").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "converted" / file.name).read_bytes()
    loaded: Any = type(model).from_pretrained(tmp_path / "converted").eval()
    assert torch.equal(models.logits_of(loaded, inputs), expected)
    assert fuser.convert(loaded).converted
    assert torch.equal(models.logits_of(loaded, inputs), converted_logits)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT-2", "Qwen3-MoE"])
def test_generation_with_a_cache_gives_the_same_tokens(name: str) -> None:
    model: Any = models.MODELS[name]().eval()
    inputs = models.inputs_of(name)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    fuser.convert(model)
    for use_cache in (True, False):
        assert torch.equal(model.generate(**inputs, **options, use_cache=use_cache), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE", "BERT"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, use_reentrant: bool) -> None:
    model: Any = models.MODELS[name]().train()
    inputs = models.inputs_of(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    fuser.convert(model, recipe=fuser.recipe.Float8CurrentScaling())
    expected = trained(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    assert_same(trained(model, inputs), expected)


@pytest.mark.parametrize("recipe", [None, fuser.recipe.MXFP8BlockScaling()], ids=["no", "mxfp8"])
def test_a_llama_compiles_to_one_graph_with_the_same_bits(recipe: Any) -> None:
    model, inputs = models.MODELS["Llama"]().eval(), models.inputs_of("Llama")
    fuser.convert(model, recipe=recipe)
    expected = trained(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = trained(compiled, inputs)
    assert_same({k.removeprefix("_orig_mod."): v for k, v in actual.items()}, expected)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = models.inputs_of("Llama", seed=index % 4)["input_ids"][0]
        return {"input_ids": tokens, "labels": tokens}


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    arguments: Any = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "save_steps": 3,
        "max_steps": 6,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
        "weight_decay": 0.1,
        **options,
    }
    settings = transformers.TrainingArguments(**arguments)
    return transformers.Trainer(model=model, args=settings, train_dataset=Tokens())


def losses_of(training: Any) -> list[float]:
    return [row["loss"] for row in training.state.log_history if "loss" in row]


@pytest.mark.parametrize("recipe", [None, fuser.recipe.DelayedScaling()], ids=["no", "delayed"])
def test_trainer_trains_saves_and_resumes(recipe: Any, tmp_path: Path) -> None:
    plain = trainer(models.MODELS["Llama"](), tmp_path / "plain")
    plain.train()
    model: Any = models.MODELS["Llama"]()
    fuser.convert(model, recipe=recipe)
    training = trainer(model, tmp_path / "converted")
    training.train()
    expected, found = losses_of(plain), losses_of(training)
    assert found[-1] < found[0] - 0.1
    tolerance = 1e-5 if recipe is None else 0.05
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0)
    resumed_model: Any = models.MODELS["Llama"]()
    fuser.convert(resumed_model, recipe=recipe)
    resumed = trainer(resumed_model, tmp_path / "converted")
    resumed.train(resume_from_checkpoint=str(tmp_path / "converted" / "checkpoint-3"))
    # The history of delayed scaling is not in a checkpoint of Trainer: it starts again.
    tolerance = 1e-6 if recipe is None else 0.05
    torch.testing.assert_close(
        torch.tensor(losses_of(resumed)[-3:]), torch.tensor(found[-3:]), rtol=tolerance, atol=0
    )


def test_norm_gains_and_biases_have_no_weight_decay(tmp_path: Path) -> None:
    names = []
    for is_converted in (False, True):
        model: Any = models.MODELS["Llama with biases"]()
        if is_converted:
            fuser.convert(model, norms="all", linears="all")
        training = trainer(model, tmp_path)
        names.append(training.get_decay_parameter_names(model))
    assert names[0] == names[1]
    assert not any("norm" in name for name in names[1])


def test_a_model_is_loaded_into_a_converted_one(tmp_path: Path) -> None:
    """``from_pretrained`` of a class that converts itself: parameter by parameter."""

    class Converted(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            fuser.convert(self)

    plain: Any = models.MODELS["Llama"]().eval()
    plain.save_pretrained(tmp_path)
    inputs = models.inputs_of("Llama")
    loaded = Converted.from_pretrained(tmp_path).eval()
    assert torch.equal(models.logits_of(loaded, inputs), models.logits_of(plain, inputs))
    for layer in loaded.model.layers:
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    assert fuser.revert(loaded) >= 2
