"""PEFT on linears of fuser: every way to name targets, the values, saving, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import leaf, random_tensor
from paths import ROOT
from said import holds, said, sentence

import fuser

peft = pytest.importorskip(
    "peft", reason="PEFT is not installed: pip install 'fuser-ops[integrations]' runs these tests."
)

from fuser.integrations.peft import LoraLinear, get_peft_model, prepared  # noqa: E402

N, LAYERS = 16, 3
FP32 = torch.float32
KINDS: dict[str, tuple[Any, Any, Any]] = {
    # The container of a layer, its linears and its activation.
    "torch": (torch.nn.Sequential, torch.nn.Linear, lambda: torch.nn.GELU(approximate="tanh")),
    "ops in a Sequential": (fuser.Sequential, fuser.Linear, fuser.GELU),
    "ops in torch's Sequential": (torch.nn.Sequential, fuser.Linear, fuser.GELU),
    "modules": (torch.nn.Sequential, fuser.modules.Linear, fuser.GELU),
    "modules in a Sequential": (fuser.Sequential, fuser.modules.Linear, fuser.GELU),
}
OURS = [kind for kind in KINDS if kind != "torch"]


class Model(torch.nn.Module):
    """Layers of two linears, and a head of torch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        container, linear, activation = KINDS[kind]
        self.layers = torch.nn.ModuleList(
            container(
                OrderedDict(
                    up=linear(N, 2 * N), act=activation(), down=linear(2 * N, N, bias=False)
                )
            )
            for _ in range(LAYERS)
        )
        self.head = torch.nn.Linear(N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        y: torch.Tensor = self.head(x)
        return y


def pair(kind: str) -> tuple[Model, Model]:
    """A model with linears of fuser, and one of torch with the same values."""
    torch.manual_seed(0)
    ours, theirs = Model(kind), Model("torch")
    ours.load_state_dict(theirs.state_dict(), strict=False)
    state = OrderedDict(ours.state_dict())
    fuser.plain_keys(ours, state, "", {})
    assert all(map(torch.equal, state.values(), theirs.state_dict().values()))
    return ours, theirs


def adapters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def step(model: torch.nn.Module, seed: int = 1, recipe: Any = None) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    x = leaf(random_tensor((4, 8, N), FP32, seed))
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(random_tensor(y.shape, FP32, 99))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}


def compare(ours: Any, theirs: Any, *, is_trained: bool = True) -> None:
    """Equal steps with the same random adapters."""
    assert list(adapters(ours)) == list(adapters(theirs))
    for seed, (one, other) in enumerate(
        zip(adapters(ours).values(), adapters(theirs).values(), strict=True)
    ):
        assert one.requires_grad is is_trained
        values = random_tensor(one.shape, FP32, seed)
        one.data.copy_(values)
        other.data.copy_(values)
    for again in range(3):  # a later call is recorded
        found, expected = step(ours, again), step(theirs, again)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-4)


WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "suffixes": ({"target_modules": ["up", "head"]}, ["0.up", "1.up", "2.up", "head"]),
    "a regular expression": (
        {"target_modules": r".*\.[01]\.(up|down)"},
        ["0.down", "0.up", "1.down", "1.up"],
    ),
    "all linears": (
        {"target_modules": "all-linear"},
        ["0.down", "0.up", "1.down", "1.up", "2.down", "2.up", "head"],
    ),
    "some layers": (
        {
            "target_modules": ["up", "down"],
            "layers_to_transform": [0, 2],
            "layers_pattern": "layers",
        },
        ["0.down", "0.up", "2.down", "2.up"],
    ),
    "without some": (
        {"target_modules": "all-linear", "exclude_modules": ["layers.1.up", "head"]},
        ["0.down", "0.up", "1.down", "2.down", "2.up"],
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OURS)
def test_every_way_to_name_targets_finds_those_that_torchs_linears_would_be(
    kind: str, way: str
) -> None:
    arguments, expected = WAYS[way]
    ours, theirs = pair(kind)
    found = get_peft_model(ours, peft.LoraConfig(r=4, lora_alpha=8, **arguments))
    layers = {
        n.split(".lora_")[0].removeprefix("base_model.model.layers.") for n in adapters(found)
    }
    assert sorted(n.removeprefix("base_model.model.") for n in layers) == expected
    compare(found, peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=8, **arguments)))


@pytest.mark.parametrize("kind", OURS)
def test_ranks_and_alphas_of_single_layers_and_variants_are_pefts(kind: str) -> None:
    options = {
        "rank_pattern": {r"layers\.1\.up": 2},
        "alpha_pattern": {"down": 32},
        "use_rslora": True,
        "use_dora": True,
    }
    ours, theirs = pair(kind)
    config = peft.LoraConfig(target_modules=["up", "down"], **options)
    found = get_peft_model(ours, config)
    ranks = {tuple(p.shape) for n, p in adapters(found).items() if "1.up.lora_A" in n}
    assert ranks == {(2, N)}
    compare(found, peft.get_peft_model(theirs, config))


@pytest.mark.parametrize("kind", OURS)
def test_merging_disabling_and_several_adapters_are_pefts(kind: str) -> None:
    config = peft.LoraConfig(target_modules=["up", "down"])
    ours, theirs = pair(kind)
    one, other = get_peft_model(ours, config), peft.get_peft_model(theirs, config)
    compare(one, other)
    x = random_tensor((4, N), FP32, 5)

    def same() -> None:
        torch.testing.assert_close(one(x), other(x), rtol=1e-5, atol=1e-4)

    for model in (one, other):
        model.merge_adapter(safe_merge=True)
    same()
    for model in (one, other):
        model.unmerge_adapter()
    same()
    with one.disable_adapter(), other.disable_adapter():
        same()
    second = peft.LoraConfig(target_modules=["up"], r=2, init_lora_weights=False)
    for model, each in ((one, prepared(ours, second)), (other, second)):
        torch.manual_seed(7)
        model.add_adapter("second", each)
        model.set_adapter("second")
    same()
    merged = one.merge_and_unload()
    assert not adapters(merged)
    torch.testing.assert_close(merged(x), other(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", OURS)
def test_adapters_are_saved_and_loaded_also_into_torchs_linears(kind: str, tmp_path: Path) -> None:
    ours, theirs = pair(kind)
    fresh = copy.deepcopy(ours)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(ours, config)
    model.save_pretrained(tmp_path)
    x = random_tensor((4, N), FP32, 5)
    plain = peft.PeftModel.from_pretrained(theirs, tmp_path)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-5, atol=1e-4)
    saved = prepared(fresh, peft.LoraConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(fresh, tmp_path, config=saved)
    assert torch.equal(again(x), model(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("kind", OURS)
def test_a_compiled_model_computes_the_same(kind: str) -> None:
    ours, _ = pair(kind)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(ours, config)
    expected = step(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = step(compiled)
    assert found["y"].shape == expected["y"].shape
    for name in ("y", "x"):
        torch.testing.assert_close(found[name], expected[name])


RECIPES: dict[str, Callable[[], Any]] = {
    "current": fuser.recipe.Float8CurrentScaling,
    "mxfp8": fuser.recipe.MXFP8BlockScaling,
}


@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", OURS)
def test_a_recipe_quantizes_the_base_and_not_the_adapters(
    kind: str, name: str, is_quantized: bool
) -> None:
    recipe = RECIPES[name]()
    with fuser.quantized_model_init(enabled=is_quantized, recipe=recipe):
        model = Model(kind)
    config = peft.LoraConfig(target_modules=["up"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    layer = model.layers[0].up
    assert isinstance(layer, LoraLinear)
    x = random_tensor((32, N), FP32, 1)
    with fuser.autocast(recipe=recipe):
        y, base = layer(x), layer.base_layer(x)
    scale, a, b = layer.scaling["default"], layer.lora_A["default"], layer.lora_B["default"]
    assert torch.equal(y, base + b(a(x)) * scale)
    assert not torch.equal(base, layer.base_layer(x)) or is_quantized
    assert {n for n in step(adapted, recipe=recipe) if n not in ("y", "x")} == set(
        adapters(adapted)
    )
    if is_quantized:
        with pytest.raises(fuser.StateError, match=said("peft-whose-steps-wider")):
            adapted.merge_adapter()


def test_an_op_alone_is_a_target_and_a_regular_expression_may_miss_all() -> None:
    model = fuser.Sequential(OrderedDict(first=fuser.BasicLinear(N, N), act=fuser.GELU()))
    expected = model(random_tensor((4, N), FP32, 1))
    found = get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert list(adapters(found)) == [
        "base_model.model.first.lora_A.default.weight",
        "base_model.model.first.lora_B.default.weight",
    ]
    assert torch.equal(found(random_tensor((4, N), FP32, 1)), expected)
    with pytest.raises(ValueError, match=r"not found|No modules were targeted"):
        get_peft_model(Model("modules"), peft.LoraConfig(target_modules="nothing.*"))


def other_layers() -> fuser.Sequential:
    return fuser.Sequential(
        OrderedDict(
            up=fuser.Linear(N, N),
            norm=fuser.RMSNorm(N),
            mlp=fuser.modules.LayerNormMLP(N, N),
            lora=fuser.LoRALinear(N, N, rank=2),
            experts=fuser.GroupedLinear(2, N, N),
            adapted=fuser.LoRAGroupedLinear(2, N, N, rank=2, single_grouped_weight=True),
        )
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a layer": ({"target_modules": ["up", "mlp"]}, "'mlp' is a fuser LayerNormMLP"),
    "a norm": ({"target_modules": r"norm|up"}, "'norm' is a fuser RMSNorm that takes no adapters"),
    "experts": (
        {"target_modules": ["experts"]},
        r"'experts' is a fuser GroupedLinear .*: PEFT has none for it; fuser.LoRAGroupedLinear",
    ),
    "experts with adapters": (
        {"target_modules": ["adapted"]},
        "'adapted' is a fuser LoRAGroupedLinear that .*: it has adapters of its own",
    ),
    "adapters": ({"target_modules": ["lora"]}, sentence("peft-adapters-own")),
    "a basic op": ({"target_modules": r".*basic_ops\.0"}, "it is a part of 'up'"),
    "all": (
        {"target_modules": "all-linear"},
        r"leave out the linears in 'mlp', a LayerNormMLP; 'experts', a GroupedLinear: name",
    ),
    "a parameter": (
        {"target_modules": ["up"], "target_parameters": ["up.weight"]},
        "names 'up.weight', a parameter of an op of fuser",
    ),
    "a parameter of an op": (
        {"target_modules": [], "target_parameters": ["basic_ops.0.weight"]},
        r"names 'up.basic_ops.0.weight'",
    ),
    "a parameter of a layer": (
        {"target_modules": [], "target_parameters": ["mlp.fc1_weight"]},
        r"names 'mlp.fc1_weight'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_takes_no_adapters_is_refused_and_the_model_stays_as_it_is(what: str) -> None:
    arguments, sentence = REFUSED[what]
    model = other_layers()
    before = [*map(id, model.modules())], [p.requires_grad for p in model.parameters()]
    config = peft.LoraConfig(**arguments)
    with pytest.raises(fuser.InputError, match=sentence):
        get_peft_model(model, config)
    assert ([*map(id, model.modules())], [p.requires_grad for p in model.parameters()]) == before
    found = get_peft_model(model, peft.LoraConfig(target_modules=["up"]))
    assert len(adapters(found)) == 6  # two of each op that has adapters of its own


def test_other_methods_and_decompositions_of_quantized_weights_are_refused() -> None:
    model = fuser.Sequential(OrderedDict(up=fuser.Linear(N, N)))
    with pytest.raises(
        fuser.InputError, match=said("peft-takes-no-adapters", None, None, holds("IA3"))
    ):
        get_peft_model(model, peft.IA3Config(target_modules=["up"], feedforward_modules=[]))
    with fuser.quantized_model_init(recipe=fuser.recipe.Float8CurrentScaling()):
        quantized = fuser.Sequential(OrderedDict(up=fuser.Linear(N, N)))
    for options in ({"init_lora_weights": "pissa"}, {"use_dora": True}):
        config = peft.LoraConfig(target_modules=["up"], **options)
        with pytest.raises(fuser.InputError, match="its weight is quantized"):
            get_peft_model(quantized, config)
        get_peft_model(copy.deepcopy(model), config)


def test_the_configuration_of_the_caller_stays_as_it_is() -> None:
    config = peft.LoraConfig(target_modules="all-linear")
    prepared(Model("modules"), config)
    assert config.target_modules == "all-linear"
    assert config._custom_modules is None


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def experts_step(model: Any, inputs: Any, recipe: Any = None) -> dict[str, Any]:
    """The logits, and the gradients of the adapters, by names without those of PEFT's wrappers."""
    model.zero_grad(set_to_none=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        logits = model(**inputs).logits
    logits.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": logits.detach(), **grads}


@pytest.mark.parametrize("order", ["converted first", "PEFT first"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_converted_experts_with_pefts_parameters_run_their_own_forward(
    name: str, order: str
) -> None:
    """And not the pipeline, also if that has run before: PEFT computes the weights at each call."""
    pytest.importorskip("transformers", reason="transformers is not installed.")
    import hugging_face_models as models

    config = peft.LoraConfig(r=4, target_parameters=EXPERTS, init_lora_weights=False)
    inputs, base = models.inputs_of(name), models.causal(name).eval()
    torch.manual_seed(1)
    plain = peft.get_peft_model(copy.deepcopy(base), config)
    model = base
    if order == "converted first":
        assert fuser.convert(model).converted
        without = model(**inputs).logits
    torch.manual_seed(1)
    adapted = get_peft_model(model, config)
    if order == "PEFT first":
        assert fuser.convert(adapted).converted
        with adapted.disable_adapter():
            without = adapted(**inputs).logits
    for _ in range(2):
        found, expected = experts_step(adapted, inputs), experts_step(plain, inputs)
        assert found.keys() == expected.keys()
        assert sum("lora_" in key for key in found) == 2 * 2 * 2  # A and B, weights, layers
        assert not torch.allclose(found["y"], without, rtol=1e-2, atol=1e-2)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)
    with adapted.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(
            adapted(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-5
        )
    merged = adapted.merge_and_unload()
    assert torch.equal(merged(**inputs).logits, merged(**inputs).logits)
    torch.testing.assert_close(merged(**inputs).logits, expected["y"], rtol=1e-4, atol=1e-5)


def test_merged_experts_of_a_converted_model_are_quantized_and_adapted_ones_are_not() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed.")
    import hugging_face_models as models

    inputs, recipe = models.inputs_of("Mixtral"), fuser.recipe.Float8CurrentScaling()
    config = peft.LoraConfig(r=4, target_parameters=EXPERTS, init_lora_weights=False)
    model = models.causal("Mixtral").eval()
    torch.manual_seed(1)
    plain = get_peft_model(copy.deepcopy(model), config)
    fuser.convert(model, linears="none", recipe=recipe)
    torch.manual_seed(1)
    adapted = get_peft_model(model, config)
    assert torch.equal(adapted(**inputs).logits, plain(**inputs).logits)
    merged, merged_plain = adapted.merge_and_unload(), plain.merge_and_unload()
    error = (merged(**inputs).logits - merged_plain(**inputs).logits).abs().max()
    assert 1e-4 < error < 0.1


def test_an_implementation_of_experts_refuses_pefts_parameters_in_a_sentence() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed.")
    import hugging_face_models as models

    import fuser.integrations.transformers  # registers it

    model = models.causal("Mixtral", experts_implementation="fuser").eval()
    inputs = models.inputs_of("Mixtral")
    expected = model(**inputs).logits
    adapted = get_peft_model(model, peft.LoraConfig(r=4, target_parameters=EXPERTS))
    with pytest.raises(fuser.StateError, match="gate_up_proj is computed at each call, as by PEFT"):
        adapted(**inputs)
    with adapted.disable_adapter():
        assert torch.equal(adapted(**inputs).logits, expected)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "peft.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(compile(code, "snippet", "exec"), names)
    x = torch.randn(4, 64)
    assert len(adapters(names["again"])) == 4
    assert torch.equal(names["again"](x), names["base"](x))
