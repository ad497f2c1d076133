"""Plans of whole models: which pipelines and boxes, once or repeated, and that nothing changes."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from said import holds, said

import fuser
from fuser.modules.decoder import Decoder
from fuser.plan.devices import CPU, DEVICES, H200
from fuser.plan.model import ModelPart, ModelPlan, TorchModule, joined_paths
from fuser.plan.transformers import PRESETS, Transformer
from fuser.precision.contexts import current_recipe
from fuser.recipe import DelayedScaling, Float8CurrentScaling
from fuser.runtime import model_plan

HIDDEN, HEADS = 64, 4


class Attention(torch.nn.Module):
    def __init__(this) -> None:  # another name than self
        super().__init__()
        this.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        this.out = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(this, x: torch.Tensor) -> torch.Tensor:
        heads = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in this.qkv(x).chunk(3, -1)
        )
        query, key, value = heads
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = this.out(y.transpose(1, 2).flatten(2))
        return output


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = fuser.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = fuser.Sequential(
            fuser.RMSNorm(HIDDEN),
            fuser.Linear(HIDDEN, 4 * HIDDEN),
            torch.nn.Dropout(0.1),
            fuser.SwiGLU(),
            fuser.Linear(2 * HIDDEN, HIDDEN),
        )
        self.last = fuser.modules.LayerNormMLP(HIDDEN, 2 * HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        y: torch.Tensor = self.last(x + self.mlp(x))
        return y


class Model(torch.nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


TOKENS = torch.zeros(2, 32, dtype=torch.int64)


def model_on(device: str, layers: int = 3) -> Model:
    with torch.device(device):
        return Model(layers)


def part(plan: ModelPlan, place: str) -> ModelPart:
    (found,) = (one for one in plan.parts if one.place == place)
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_pipeline_is_found_and_repeated_layers_are_one_part(device: str) -> None:
    plan = fuser.plan(model_on(device), TOKENS)
    assert [(one.place, one.count, one.name) for one in plan.parts] == [
        ("embedding", 1, "Embedding"),
        ("layers.0-2.norm", 3, "RMSNorm"),
        ("layers.0-2.attention.qkv", 3, "Linear"),
        ("layers.0-2.attention", 3, "Attention"),
        ("layers.0-2.attention.out", 3, "Linear"),
        ("layers.0-2", 3, "Layer"),
        ("layers.0-2.mlp", 3, "Sequential"),
        ("layers.0-2.mlp.2", 3, "Dropout"),
        ("layers.0-2.mlp", 3, "Sequential"),
        ("layers.0-2.last", 3, "LayerNormMLP"),
    ]
    assert set(plan.plans) == {
        f"layers.{i}.{name}" for i in range(3) for name in ("norm", "mlp", "last")
    }
    assert plan.device is (CPU if device == "cpu" else H200)


def test_boxes_have_the_operations_of_their_own_calls() -> None:
    plan = fuser.plan(model_on("meta", 1), TOKENS)
    rows, width = TOKENS.numel(), HIDDEN
    qkv, attention = part(plan, "layers.0.attention.qkv"), part(plan, "layers.0.attention")
    assert qkv.flops == 3 * 2 * rows * width * 3 * width
    pairs = TOKENS.shape[0] * TOKENS.shape[1] ** 2 / 2  # the others are masked
    assert attention.flops == (1 + 2.5) * 4 * pairs * width
    assert isinstance(attention.content, TorchModule)
    assert dict(attention.content.calls)["scaled_dot_product_attention"] == 1
    assert part(plan, "layers.0.attention.out").flops == 3 * 2 * rows * width * width
    add = part(plan, "layers.0").content
    assert isinstance(add, TorchModule)
    assert add.calls == (("add", 2),)
    assert add.nbytes == 3 * 2 * 3 * 4 * rows * width  # both sides; two reads and a write


def test_without_gradients_there_is_one_side() -> None:
    plan = fuser.plan(model_on("meta", 1), TOKENS, training=False)
    assert plan.sides == ("forward",)
    assert all(one.microseconds("backward") == 0 for one in plan.parts)
    assert not any(content.backward for content in plan.plans.values())
    assert part(plan, "layers.0.attention.qkv").flops == 2 * TOKENS.numel() * 3 * HIDDEN**2


def test_a_pipeline_is_planned_as_its_sequential_plans_itself() -> None:
    model = model_on("meta", 1)
    x = torch.empty(2, 32, HIDDEN, device="meta", requires_grad=True)
    with fuser.autocast(recipe=Float8CurrentScaling()):
        whole = fuser.plan(model, TOKENS, device="h200")
        alone = model.layers[0].last.plan(x, device="h200")
    assert whole.plans["layers.0.last"] == alone
    assert whole.device is DEVICES["h200"]


def test_each_layer_has_the_recipe_of_its_own_call() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                fuser.Sequential(fuser.Linear(HIDDEN, HIDDEN, device="meta")) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                with fuser.autocast(enabled=i in (1, 2), recipe=Float8CurrentScaling()):
                    x = layer(x)
            return x

    plan = fuser.plan(Mixed(), torch.empty(32, HIDDEN, device="meta"), device="h200")
    recipes = {one.place: one.content.key.recipe for one in plan.parts}
    # The first input needs no gradient.
    assert recipes == {
        "layers.0": None,
        "layers.1-2": Float8CurrentScaling(),
        "layers.3": None,
    }


def test_layers_of_other_sizes_are_other_parts() -> None:
    layers = [fuser.Sequential(fuser.Linear(64, 64, device="meta")) for _ in range(4)]
    layers[2] = fuser.Sequential(fuser.Linear(64, 64, bias=False, device="meta"))
    model = torch.nn.Sequential(*layers)
    plan = fuser.plan(model, torch.empty(8, 64, device="meta", requires_grad=True))
    assert [one.place for one in plan.parts] == ["0-1,3", "2"]


def test_totals_are_the_sums_of_the_parts() -> None:
    plan = fuser.plan(model_on("meta"), TOKENS, device="h200")
    sums = [part.microseconds(side) for part in plan.parts for side in plan.sides]
    assert plan.microseconds == pytest.approx(sum(sums))
    three, one = plan, fuser.plan(model_on("meta", 1), TOKENS, device="h200")
    layers = [sum(p.baseline("torch eager") for p in m.parts[1:]) for m in (three, one)]
    assert layers[0] == pytest.approx(3 * layers[1])
    assert plan.compiled_microseconds < plan.microseconds
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["microseconds"] == pytest.approx(plan.microseconds)
    assert sum(entry["count"] for entry in data["parts"]) == 28


# -- nothing changes ----------------------------------------------------------------------------


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """What a plan might change: parameters, hooks, attributes and cached plans.

    A container divides its modules into pipelines at its first plan or call, and notes that in ops.
    """
    notes = ("_segments", "_segments_lock", "_pipeline", "_changes", "_captured")
    result: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in notes:
                result[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
        if isinstance(module, fuser.Sequential):
            result[f"{name} plans"] = module.plans
    return result


@pytest.mark.parametrize("recipe", [None, DelayedScaling()])
def test_planning_changes_nothing_and_the_model_runs_as_before(recipe: Any) -> None:
    torch.manual_seed(0)
    model = model_on("cpu", 1).eval()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    before, random = state_of(model), torch.get_rng_state()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        fuser.plan(model, TOKENS)
        fuser.plan(model, TOKENS, device="h200")
    assert torch.equal(torch.get_rng_state(), random)
    after = state_of(model)
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] or before[name] == after[name] for name in before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert model(TOKENS).shape == (2, 32, HIDDEN)
    assert model_plan.observer() is None
    assert model_plan.ModelObserver.calls is None


def test_other_threads_run_their_models_meanwhile() -> None:
    model = fuser.Sequential(fuser.Linear(4, 4, device="cpu"))
    x = torch.ones(2, 4, device="cpu")
    expected = model(x)
    results: list[torch.Tensor] = []

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: results.append(model(REAL)))
            thread.start()
            thread.join()
            return x

    global REAL
    REAL = x
    fuser.plan(Waits(), x)
    (result,) = results
    torch.testing.assert_close(result, expected)


REAL = torch.empty(0)


def test_layers_on_meta_stay_there() -> None:
    layer = fuser.modules.LayerNormMLP(16, 32, device="meta")
    fuser.plan(layer, torch.empty(4, 16))
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert not layer._has_run


# -- models of all kinds --------------------------------------------------------------------------


def test_a_model_without_pipelines_is_boxes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
    plan = fuser.plan(model, torch.empty(4, 8))
    assert [one.name for one in plan.parts] == ["Linear", "LayerNorm", "GELU"]
    assert not plan.plans
    assert plan.baseline("torch eager") == pytest.approx(plan.microseconds)
    assert "1.00x this plan" in str(plan)


def test_a_pipeline_alone_and_an_op_alone_are_models() -> None:
    x = torch.empty(4, 8)
    for model in (fuser.Sequential(fuser.GELU()), fuser.GELU(), fuser.Linear(8, 8, device="cpu")):
        plan = fuser.plan(model, x)
        assert [one.paths for one in plan.parts] == [("",)]
        assert "(the model)" in str(plan)


def test_compiled_and_checkpointed_modules_and_budgets_are_planned() -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = fuser.Sequential(
                fuser.Linear(8, 8, device="cpu"), fuser.GELU(), memory_budget=0
            )
            self.other = torch.compile(fuser.Sequential(fuser.Linear(8, 8, device="cpu")))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.utils.checkpoint.checkpoint(self.block, self.block(x), use_reentrant=False)
            result: torch.Tensor = self.other(y)
            return result

    plan = fuser.plan(Checkpointed(), torch.empty(4, 8, requires_grad=True))
    assert sum(one.count for one in plan.parts if not isinstance(one.content, TorchModule)) == 3


def test_keyword_arguments_and_nested_inputs_are_the_models() -> None:
    class Model(torch.nn.Module):
        def forward(self, pair: Any, *, scale: torch.Tensor, times: int) -> torch.Tensor:
            result: torch.Tensor = (pair["a"] + pair["b"]) * scale * times
            return result

    x = torch.empty(4, 8)
    plan = fuser.plan(Model(), {"a": x, "b": x}, scale=torch.empty(8), times=3)
    assert plan.inputs == ("[4, 8] float32", "[4, 8] float32", "[8] float32")
    (box,) = plan.parts
    assert isinstance(box.content, TorchModule)
    assert box.content.calls == (("add", 1), ("mul", 2))


TINY = Transformer("tiny", 2, 256, 512, 8, 4, 1000, head_dim=32, sequence=64)

BLOCKS = Transformer("blocks", 2, 256, 512, 0, 0, 0, sequence=64)
MOE = Transformer("moe", 2, 256, 128, 8, 4, 1000, 32, 64, experts=8, top_k=2)


@pytest.mark.parametrize(
    "sizes",
    [
        TINY,
        MOE,
        BLOCKS,
    ],
    ids=lambda sizes: sizes.name,
)
def test_decoders_have_the_operations_that_their_sizes_say(sizes: Transformer) -> None:
    model = Decoder(sizes, device="meta", dtype=torch.bfloat16)
    fuser.convert(model)
    tokens = 128
    plan = fuser.plan(model, *model.example(tokens, training=True), device="h200")
    flops = sum(one.flops for one in plan.parts)
    router = 6 * sizes.layers * tokens * sizes.hidden * sizes.experts
    # Backward of attention is 2.5 times forward here, and twice in `flops_per_token`.
    attention = sizes.layers * 2 * sizes.sequence * sizes.attention_features * tokens
    assert flops == pytest.approx(tokens * sizes.flops_per_token + router + 0.5 * attention)


@pytest.mark.parametrize("sizes", [TINY, MOE, BLOCKS], ids=lambda sizes: sizes.name)
def test_decoders_have_the_weights_that_their_sizes_say(sizes: Transformer) -> None:
    """And those of norms and routers; no linear has a bias."""
    model = Decoder(sizes, device="meta")
    norms = sizes.layers * (1 + bool(sizes.heads)) + bool(sizes.vocab)
    router = sizes.layers * sizes.experts * sizes.hidden
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sizes.parameters + norms * sizes.hidden + router
    assert not [name for name in model.state_dict() if "bias" in name]


@pytest.mark.parametrize("sizes", [TINY, MOE], ids=lambda sizes: sizes.name)
def test_decoders_run(sizes: Transformer) -> None:
    torch.manual_seed(0)
    model = Decoder(sizes, device="cpu", dtype=torch.float32)
    tokens = torch.randint(0, 1000, (2, 16))
    y = model(tokens)
    assert y.shape == (2, 16, 1000)
    loss = torch.nn.functional.cross_entropy(y.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(model(tokens, tokens), loss)
    with fuser.converted(model):
        torch.testing.assert_close(model(tokens), y)
    # Causal: logits do not depend on later tokens.
    changed = torch.cat([tokens[:, :8], torch.randint(0, 1000, (2, 8))], 1)
    torch.testing.assert_close(model(changed)[:, :8], y[:, :8])
    y.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_more_tokens_than_a_sequence_are_whole_sequences() -> None:
    model = Decoder(TINY, device="meta")
    assert [x.shape for x in model.example(192, training=True)] == [(3, 64)] * 2
    assert [x.shape for x in model.example(10)] == [(1, 10)]
    with pytest.raises(fuser.InputError, match=said("decoder-tokens-no-whole", 100, 64)):
        model.example(100)


def test_the_named_models_have_the_parameters_of_their_names() -> None:
    for name, billions in (("llama3-8b", 8.03), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.5)):
        assert PRESETS[name].parameters / 1e9 == pytest.approx(billions, rel=2e-3), name


# -- converted models, and memory -----------------------------------------------------------------


def test_a_converted_model_is_planned_on_meta_as_with_memory() -> None:
    """Gate and up are one weight in both, and nothing joins them at each call."""
    texts = []
    for device in ("meta", "cpu"):
        model = Decoder(BLOCKS, device=device)
        fuser.convert(model, recipe="current", keep=())
        texts.append(str(fuser.plan(model, *model.example(64), device="h200")))
    assert texts[0] == texts[1]
    assert "[DecoderLayer]" not in texts[0]


def test_calls_without_gradients_have_no_backward() -> None:
    class Halves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = x.abs()
            return x * scale

    x = torch.empty(4096, 4096, requires_grad=True)
    (part,) = fuser.plan(Halves(), x).parts
    moved = 4 * 4096**2 / CPU.bandwidth * 1e6
    launch = CPU.launch * 1e6
    assert part.microseconds("forward") == pytest.approx(5 * moved + 2 * launch)
    assert part.microseconds("backward") == pytest.approx(2 * (3 * moved + launch))


def saved_bytes(model: torch.nn.Module, *inputs: torch.Tensor) -> int:
    """What torch saves for backward in a call, besides the parameters."""
    memories: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memories[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(*inputs)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del y
    return sum(memory.nbytes() for key, memory in memories.items() if key not in own)


class Block(torch.nn.Module):
    """Two linears of one input, and what torch computes with both."""

    def __init__(self) -> None:
        super().__init__()
        options = {"device": torch.device("cpu"), "bias": False}
        self.left = torch.nn.Linear(HIDDEN, HIDDEN, **options)
        self.right = torch.nn.Linear(HIDDEN, HIDDEN, **options)
        self.last = torch.nn.Linear(HIDDEN, HIDDEN, **options)
        self.frozen = torch.nn.Linear(HIDDEN, HIDDEN, **options).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        y: torch.Tensor = self.frozen(self.last((self.left(x).sin() * self.right(x)).exp()))
        return y


@pytest.mark.parametrize("linears", ["none", "all"])
def test_kept_memory_is_what_torch_saves(linears: Any) -> None:
    model, x = Block(), torch.randn(32, HIDDEN, requires_grad=True)
    fuser.convert(model, linears=linears)
    memory = fuser.plan(model, x).memory
    assert memory.kept == saved_bytes(model, x)
    sizes = [4 * HIDDEN**2 * count for count in (4, 3)]
    assert (memory.parameters, memory.gradients) == tuple(sizes)
    assert memory.at_once == memory.parameters + max(memory.kept, memory.gradients)


def test_attention_keeps_its_inputs_and_its_output() -> None:
    class Attends(torch.nn.Module):
        def forward(self, qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = qkv.chunk(3, -1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v.exp())

    qkv = torch.empty(2, 4, 64, 3 * 16, requires_grad=True)
    # The three inputs are one memory, exp keeps its output, which attention reads.
    assert fuser.plan(Attends(), qkv).memory.kept == qkv.nbytes + 2 * qkv.nbytes // 3


class WithoutShift(fuser.op.BasicOperation):
    """A user's op with the place of a parameter that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("shift", None)

    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> Any:
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return 2 * grad_output, ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_is_planned_in_its_dtype(dtype: torch.dtype) -> None:
    pipeline = fuser.Sequential(fuser.RMSNorm(64), fuser.Linear(64, 32), WithoutShift())
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), pipeline, torch.nn.Linear(32, 8))
    model.to("meta", dtype)
    x = torch.empty(4, 16, dtype=dtype, device="meta")
    plan = fuser.plan(model, x, device="h200")
    (own,) = plan.plans.values()
    assert own.key.dtype_name() == str(dtype).removeprefix("torch.")
    x = torch.empty(4, 64, dtype=dtype, device="meta", requires_grad=True)
    assert own.activation_bytes == pipeline.plan(x, device="h200").activation_bytes
    last = plan.parts[-1].content
    assert isinstance(last, TorchModule)
    itemsize = dtype.itemsize
    once = (4 * 32 + 32 * 8 + 8 + 4 * 8) * itemsize
    assert last.nbytes == 3 * once


def test_the_times_of_a_box_are_those_of_its_products_at_their_rates() -> None:
    rows, inputs, outputs = 8192, 4096, 8192
    model = torch.nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)
    x = torch.empty(rows, inputs, device="meta", dtype=torch.bfloat16)
    (box,) = (part.content for part in fuser.plan(model, x, device="h200").parts)
    assert isinstance(box, TorchModule)
    flops, rate = 2 * rows * inputs * outputs, H200.dense["bf16"]
    assert box.flops == 3 * flops
    forward = flops / rate.forward + H200.launch
    backward = 2 * (flops / rate.on("backward") + H200.launch)
    assert box.eager.forward == pytest.approx(forward * 1e6)
    assert box.eager.backward == pytest.approx(backward * 1e6)


class Attends(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value)


def test_the_backward_of_attention_takes_two_and_a_half_times_its_forward() -> None:
    given = [
        torch.empty(8, 16, 2048, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    (box,) = (part.content for part in fuser.plan(Attends(), *given, device="h200").parts)
    assert isinstance(box, TorchModule)
    assert box.calls == (("scaled_dot_product_attention", 1),)
    flops = 2 * 2 * 8 * 16 * 2048**2 * 128
    assert box.flops == 3.5 * flops
    assert box.eager.forward == pytest.approx((flops / H200.attention + H200.launch) * 1e6)
    assert box.eager.backward == pytest.approx(2.5 * box.eager.forward)


def test_an_optimizer_is_a_part_of_the_step() -> None:
    model = Decoder(TINY, device="meta", dtype=torch.bfloat16)
    plan = fuser.plan(model, *model.example(64, training=True), device="h200")
    whole = plan.with_adamw(model.parameters())
    size = 2 * sum(p.numel() for p in model.parameters())
    seconds = 7 * size / DEVICES["h200"].bandwidth + DEVICES["h200"].launch
    for before, after in (
        (plan.microseconds, whole.microseconds),
        (plan.compiled_microseconds, whole.compiled_microseconds),
        *((plan.baseline(name), whole.baseline(name)) for name in ("torch eager", "torch.compile")),
    ):
        assert after - before == pytest.approx(seconds * 1e6)
    assert whole.memory.at_once - plan.memory.at_once == 2 * size
    said_of = [" ".join(each.memory.sentences(H200)) for each in (plan, whole)]
    assert [", optimizer " in sentences for sentences in said_of] == [False, True]


# -- refusals -------------------------------------------------------------------------------------


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(fuser.InputTypeError, match=said("model-plan-fuser-plans-torch", 3)):
        fuser.plan(3, torch.empty(2, 2))


def test_a_forward_that_reads_values_is_refused_in_a_sentence_and_the_next_call_works() -> None:
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(fuser.InputError, match=said("model-plan-cannot-planned-inputs", "Reads")):
        fuser.plan(Reads(), torch.empty(2, 2))
    assert model_plan.observer() is None
    assert model_plan.ModelObserver.calls is None
    assert current_recipe() is None
    assert fuser.plan(torch.nn.GELU(), torch.empty(2, 2)).parts


def test_a_forward_that_raises_is_named_without_a_log_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "handle", lambda logger, record: logged.append(record))
    inner = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(4, 8, device="cpu"))
    model = torch.nn.ModuleDict({"body": inner})
    model.forward = lambda x: model["body"](x)
    sentence = said("model-plan-cannot-planned-inputs", None, "the forward of body.1, a Linear")
    with pytest.raises(fuser.InputError, match=sentence):
        fuser.plan(model, torch.empty(2, 3))
    assert not logged
    assert fuser.plan(model, torch.empty(2, 4)).parts


def test_a_wrong_input_of_a_pipeline_is_its_own_error() -> None:
    model = torch.nn.Sequential(fuser.Sequential(fuser.Linear(8, 8, device="cpu")))
    with pytest.raises(
        fuser.InputError, match=said("grouped-linear-shape-last-dimension", None, holds(16))
    ):
        fuser.plan(model, torch.empty(4, 16))


# -- text and picture -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "joined"),
    [
        (["a.0.b", "a.1.b", "a.2.b", "a.5.b"], "a.0-2,5.b"),
        (["a.b"], "a.b"),
        (["a.b", "a.b"], "a.b"),
        (["a.0.b.1", "a.1.b.0"], "a.0.b.1 ..."),
        (["3", "4"], "3-4"),
        (["a.10", "a.9", "a.2"], "a.2,9-10"),
        ([f"a.{i}.b" for i in range(12)], "a.0-11.b"),
    ],
)
def test_paths_that_differ_in_one_number_are_one(paths: list[str], joined: str) -> None:
    assert joined_paths(paths) == joined


def test_a_picture_shows_each_part_once_with_its_count(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = fuser.plan(model_on("meta"), TOKENS, device="h200")
    text = plan.draw(tmp_path / "plan.svg").read_text(encoding="utf-8")
    for one in plan.parts:
        assert f">{one.place}<" in text
    assert text.count(">layers.0-2.norm<") == 1
    assert ">3 \N{MULTIPLICATION SIGN}<" in text
    assert ">Attention, not of fuser<" in text
    assert ">1.00x<" in text
    assert ">Linear<" in text
    assert ">64 \N{RIGHTWARDS ARROW} 256<" in text
    page = plan.draw(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<title>Plan of Model</title>" in page
    assert plan.draw(tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(fuser.InputError, match=said("draw-picture-drawn", None, holds("pdf"))):
        plan.draw(tmp_path / "plan.pdf")
