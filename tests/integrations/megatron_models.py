"""A small GPT of Megatron-LM on CPUs: of torch's own modules, and of the layers of fuser.te.

Each function is a case of tests/cases/ranks.py, in a process of its own: there Transformer Engine's
import paths are those of fuser.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import fuser.te
from fuser.tensors import QuantizedTensor

VOCABULARY, LENGTH, BATCH = 128, 32, 2
DENSE: dict[str, dict[str, Any]] = {
    "RMSNorm, SwiGLU": {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    },
    "LayerNorm, GELU, biases": {
        "normalization": "LayerNorm",
        "activation_func": F.gelu,
        "add_bias_linear": True,
        "add_qkv_bias": True,
    },
}
EXPERTS: dict[str, Any] = {
    **DENSE["RMSNorm, SwiGLU"],
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 1e-2,
}
RECIPES = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}


@contextlib.contextmanager
def megatron(ranks: int = 1, **sizes: int) -> Any:
    """Megatron-LM on CPUs, with fuser as Transformer Engine: its own code asks for a GPU."""
    warnings.simplefilter("ignore")
    fuser.te.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, **sizes)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(torch.cuda, "current_stream", return_value=None),
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
    ):
        # The tracker of fuser.te has states of the CPU where there is no GPU.
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
        yield parallel_state


def model(layers: Callable[[Any], Any], ranks: int = 1, **options: Any) -> Any:
    """A GPT with two layers, the same values whatever its layers are made of."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "use_cpu_initialization": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            "tensor_model_parallel_size": ranks,
            **options,
        }
    )
    torch.manual_seed(1)
    return GPTModel(
        config,
        layers(config),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        parallel_output=True,
    )


def own_layers(config: Any) -> Any:
    """Layers of Megatron-LM's own modules."""
    from megatron.core.models.gpt import gpt_layer_specs

    return gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        normalization=config.normalization,
    )


def te_layers(config: Any, *, op_fuser: bool = False) -> Any:
    """Layers of Transformer Engine's modules, which are those of fuser here."""
    from megatron.core.models.gpt import gpt_layer_specs

    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        use_te_op_fuser=op_fuser,
    )


op_fuser_layers = functools.partial(te_layers, op_fuser=True)
KINDS = {"own": own_layers, "modules": te_layers, "op fuser": op_fuser_layers}


def te_name(name: str) -> str:
    """The name in layers of Transformer Engine of a parameter of Megatron-LM's own layers."""
    for own, there in (
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
        ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ):
        name = name.replace(own, there)
    return name


def copy_values(source: Any, target: Any) -> None:
    """Give ``target`` the values of ``source``, a model of Megatron-LM's own layers."""
    values = dict(source.named_parameters())
    named = {} if target.config.num_moe_experts else {te_name(n): p for n, p in values.items()}
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if not target.config.num_moe_experts:
                parameter.copy_(named[name])
            else:
                parameter.copy_(value_of_experts(values, name))


def value_of_experts(values: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The value of a parameter of a layer of experts, whose norms stay apart before experts."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    part, _, number = name.rpartition(".weight")
    if number.isdigit():
        head, _, linear = part.rpartition(".")
        name = f"{head}.local_experts.{number}.{linear}.weight"
    return values[name]


def batch(seed: int = 5) -> tuple[torch.Tensor, ...]:
    """Tokens, positions, the causal mask, and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    return tokens, positions, mask, labels


def step(gpt: Any, group: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses of tokens, and the gradients; those of a part of a sequence are added."""
    tokens, positions, mask, labels = batch()
    gpt.zero_grad()
    gpt.set_is_first_microbatch()  # a step of its own, whose weights are quantized again
    loss = gpt(tokens, positions, mask, labels=labels)
    loss.mean().backward()
    grads = {}
    for name, parameter in gpt.named_parameters():
        grad = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=group)
        grads[name] = grad.clone()
    return loss.detach(), grads


# -- cases: what a rank runs ---------------------------------------------------------


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of gradients, over the largest value of each."""
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-9))
        for name, value in expected.items()
    )


def dense(rank: int, *, ranks: int) -> dict[Any, Any]:
    """Losses and gradients of layers of fuser.te, less those of Megatron-LM's own layers."""
    differences = {}
    with megatron(ranks) as state:
        group = state.get_tensor_model_parallel_group()
        for name, options in DENSE.items():
            own = model(own_layers, ranks, **options)
            loss, grads = step(own)
            expected = {te_name(n): grad for n, grad in grads.items()}
            for kind, layers in (("modules", te_layers), ("op fuser", op_fuser_layers)):
                for has_shards in (False, True)[:ranks]:
                    gpt = model(layers, ranks, sequence_parallel=has_shards, **options)
                    copy_values(own, gpt)
                    there, found = step(gpt, group)
                    differences[name, kind, has_shards] = (
                        float((there - loss).abs().max()),
                        furthest(found, expected),
                    )
    return differences


def recipes(rank: int, *, ranks: int) -> dict[str, Any]:
    """Whether the op fuser computes as the modules, and how far losses are from fp32."""
    results = {}
    options = DENSE["RMSNorm, SwiGLU"]
    with megatron(ranks):
        own = model(own_layers, ranks, **options)
        exact, _ = step(own)
        for name, scaling in RECIPES.items():
            steps = []
            for layers in (te_layers, op_fuser_layers):
                gpt = model(layers, ranks, **options, **scaling)
                copy_values(own, gpt)
                steps.append([step(gpt) for _ in range(2)])
            modules, ops = steps
            is_same = all(
                torch.equal(a, b) and all(torch.equal(x, y[n]) for n, x in grads.items())
                for (a, grads), (b, y) in zip(modules, ops, strict=True)
            )
            results[name] = is_same, float((modules[0][0] - exact).abs().max())
    return results


def experts(rank: int) -> dict[Any, Any]:
    """Differences as in :func:`dense`, of grouped linears, permutations and routers of fuser.te."""
    differences = {}
    with megatron():
        own = model(own_layers, **EXPERTS)
        loss, grads = step(own)
        for permutes in (False, True):
            for routes in (False, True):
                gpt = model(
                    te_layers,
                    moe_grouped_gemm=True,
                    moe_permute_fusion=permutes,
                    moe_router_fusion=routes,
                    **EXPERTS,
                )
                copy_values(own, gpt)
                there, found = step(gpt)
                expected = {name: value_of_experts(grads, name) for name in found}
                differences[permutes, routes] = (
                    float((there - loss).abs().max()),
                    furthest(found, expected),
                )
    return differences


def expert_recipes(rank: int) -> dict[str, float]:
    """How far losses of experts under recipes are from fp32, after a step."""
    results = {}
    with megatron():
        own = model(own_layers, **EXPERTS)
        exact, _ = step(own)
        for name, scaling in RECIPES.items():
            gpt = model(te_layers, moe_grouped_gemm=True, **EXPERTS, **scaling)
            copy_values(own, gpt)
            step(gpt)
            results[name] = float((step(gpt)[0] - exact).abs().max())
    return results


def training(rank: int) -> list[tuple[float, float]]:
    """Losses of steps: Megatron-LM's own layers with torch's AdamW, fuser.te with its own."""
    options = DENSE["RMSNorm, SwiGLU"]
    with megatron():
        from megatron.core.optimizer import Adam

        own = model(own_layers, **options)
        gpt = model(op_fuser_layers, **options)
        copy_values(own, gpt)
        assert Adam.__module__ == "fuser.te.pytorch.optimizers"
        optimizers = (
            torch.optim.AdamW(own.parameters(), 1e-2, weight_decay=0.1),
            Adam(gpt.parameters(), 1e-2, weight_decay=0.1),
        )
        losses = []
        for seed in range(8):
            tokens, positions, mask, labels = batch(seed % 2)
            pair = []
            for net, optimizer in zip((own, gpt), optimizers, strict=True):
                optimizer.zero_grad()
                loss = net(tokens, positions, mask, labels=labels).mean()
                loss.backward()
                optimizer.step()
                pair.append(float(loss.detach()))
            losses.append((pair[0], pair[1]))
    return losses


class _OnCpus(TorchFunctionMode):
    """Tensors that Megatron-LM's optimizers ask a GPU for are on the CPU, and have the names of
    types that these look for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        options = dict(kwargs or {})
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return func(*args, **options)


def data_parallel(rank: int, *, ranks: int) -> dict[Any, Any]:
    """Losses and norms of steps of Megatron-LM's DDP, with its two kinds of optimizers."""
    options = DENSE["RMSNorm, SwiGLU"]
    results = {}
    with megatron(), _OnCpus():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        start = model(own_layers, **options)
        for name, layers in KINDS.items():
            for is_distributed in (False, True):
                gpt = model(layers, **options)
                (copy_values if layers is not own_layers else _copy)(start, gpt)
                net = DistributedDataParallel(
                    gpt.config,
                    DistributedDataParallelConfig(use_distributed_optimizer=is_distributed),
                    gpt,
                )
                optimizer = get_megatron_optimizer(
                    OptimizerConfig(
                        lr=1e-2, clip_grad=1.0, use_distributed_optimizer=is_distributed
                    ),
                    [net],
                )
                steps = []
                for seed in range(4):
                    net.zero_grad_buffer()
                    optimizer.zero_grad()
                    tokens, positions, mask, labels = batch(seed * ranks + rank)
                    loss = net(tokens, positions, mask, labels=labels).mean()
                    loss.backward()
                    net.finish_grad_sync()
                    _, norm, _ = optimizer.step()
                    steps.append((float(loss.detach()), float(norm)))
                total = torch.cat([p.detach().flatten() for p in gpt.parameters()])
                results[name, is_distributed] = steps, total
    return results


def gathered_weights(rank: int, *, ranks: int) -> dict[bool, Any]:
    """Losses of steps of the distributed optimizer, with FP8 weights gathered and without."""
    options = {**DENSE["RMSNorm, SwiGLU"], **RECIPES["tensorwise"], "bf16": True}
    results = {}
    # gloo gathers no tensors of two dtypes together, and the type of a weight is asked for.
    of_type = mock.patch.object(QuantizedTensor, "type", return_value="torch.cuda.BFloat16Tensor")
    with megatron(), _OnCpus(), of_type:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            param_and_grad_buffer,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module

        apart = mock.patch.object(
            param_and_grad_buffer,
            "_coalescing_manager",
            return_value=contextlib.nullcontext(),
        )
        for is_quantized in (False, True):
            model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
            gpt = model(
                te_layers,
                **options,
                params_dtype=torch.bfloat16,
                use_cpu_initialization=False,  # which keeps what weights were before it
                fp8_param=is_quantized,
            )
            net = DistributedDataParallel(
                gpt.config,
                DistributedDataParallelConfig(
                    use_distributed_optimizer=True, fp8_param_gather=is_quantized
                ),
                Float16Module(gpt.config, gpt),
            )
            optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    lr=1e-3, use_distributed_optimizer=True, bf16=True, fp8_recipe="tensorwise"
                ),
                [net],
            )
            losses = []
            for seed in range(4):
                net.zero_grad_buffer()
                optimizer.zero_grad()
                gpt.set_is_first_microbatch()
                tokens, positions, mask, labels = batch(seed * ranks + rank)
                loss = net(tokens, positions, mask, labels=labels).float().mean()
                loss.backward()
                net.finish_grad_sync()
                with apart:
                    optimizer.step()
                losses.append(float(loss.detach()))
            weight = gpt.decoder.layers[0].mlp.linear_fc1.weight
            results[is_quantized] = losses, isinstance(weight, QuantizedTensor)
    return results


def _copy(source: Any, target: Any) -> None:
    target.load_state_dict(source.state_dict())


def checkpoints(rank: int, *, ranks: int) -> dict[str, bool]:
    """Whether a distributed checkpoint of either kind of layers gives the other the same values."""
    options = DENSE["RMSNorm, SwiGLU"]
    results = {}
    with megatron(ranks) as state:
        from megatron.core import dist_checkpointing

        metadata = {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}
        for name, kinds in {
            "own to te": (own_layers, te_layers),
            "te to own": (te_layers, own_layers),
        }.items():
            first, second = (model(kind, ranks, **options) for kind in kinds)
            with torch.no_grad():
                for parameter in second.parameters():
                    parameter.zero_()
            with _folder(rank) as folder:
                dist_checkpointing.save(first.sharded_state_dict(metadata=metadata), folder)
                dist.barrier()
                state_dict = dist_checkpointing.load(
                    second.sharded_state_dict(metadata=metadata), folder
                )
                second.load_state_dict(state_dict, strict=False)
            expected = {te_name(n): p for n, p in first.named_parameters()}
            results[name] = all(
                torch.equal(p, expected[te_name(n)]) for n, p in second.named_parameters()
            )
    return results


def expert_states(rank: int, *, ranks: int) -> dict[str, bool]:
    """Whether a distributed checkpoint of experts holds the states of delayed scaling.

    It is saved with all experts on each rank, and loaded with a part of them on each.
    """
    options: dict[str, Any] = {
        **EXPERTS,
        **RECIPES["delayed"],
        "moe_grouped_gemm": True,
        "fp8_amax_history_len": 4,
    }
    with _folder(rank) as folder:
        with megatron() as state:
            from megatron.core import dist_checkpointing

            metadata = {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}
            first = model(te_layers, **options)
            for _ in range(3):
                step(first)
            dist_checkpointing.save(first.sharded_state_dict(metadata=metadata), folder)
            expected = _states(first)
            loss, _ = step(first)
        with megatron(expert_model_parallel_size=ranks) as state:
            metadata = {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}
            second = model(te_layers, **options, expert_model_parallel_size=ranks)
            loaded = dist_checkpointing.load(second.sharded_state_dict(metadata=metadata), folder)
            second.load_state_dict(loaded, strict=False)
            results = {}
            for name, states in _states(second).items():
                own = slice(rank * len(states), (rank + 1) * len(states))
                results[name] = len(states) == 4 // ranks and all(
                    torch.equal(a, b) for a, b in zip(states, expected[name][own], strict=True)
                )
                assert not torch.equal(states[0], states[1]), "experts have one state"
            if ranks == 1:
                results["loss"] = torch.equal(step(second)[0], loss)
                fresh = model(te_layers, **options)
                fresh.load_state_dict(
                    {n: v for n, v in loaded.items() if "_extra_state" not in n}, strict=False
                )
                results["loss without states"] = not torch.equal(step(fresh)[0], loss)
    return results


def _states(gpt: Any) -> dict[str, list[torch.Tensor]]:
    """By grouped linear, for each expert: its scales, then the amaxes of its input and weight."""
    found = {}
    for name, layer in gpt.named_modules():
        if hasattr(layer, "num_gemms") and hasattr(layer, "fp8_meta"):
            content = pickle.loads(layer.get_extra_state().numpy().tobytes())
            parts = []
            for expert in range(layer.num_gemms):
                of_expert = [
                    content[key].view(-1, rows, layer.num_gemms)[..., expert].flatten()
                    for key, rows in (
                        ("scale_fwd", 3),
                        ("scale_bwd", 2),
                        ("amax_history_fwd", 3),
                        ("amax_history_bwd", 2),
                    )
                ]
                parts.append(torch.cat(of_expert))
            found[name] = parts
    return found


@contextlib.contextmanager
def _folder(rank: int) -> Any:
    """A folder that all ranks know, removed after its use."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    try:
        yield folder[0]
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(Path(folder[0]))


def missing(rank: int) -> dict[str, int]:
    """What Megatron-LM has asked for and not got, for which it has other ways."""
    with megatron():
        from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401
    return fuser.te.missing()


def on_one_rank() -> dict[str, Callable[[int], Any]]:
    return {
        "dense": functools.partial(dense, ranks=1),
        "recipes": functools.partial(recipes, ranks=1),
        "experts": experts,
        "expert recipes": expert_recipes,
        "training": training,
        "data parallel": functools.partial(data_parallel, ranks=1),
        "gathered weights": functools.partial(gathered_weights, ranks=1),
        "checkpoints": functools.partial(checkpoints, ranks=1),
        "expert states": functools.partial(expert_states, ranks=1),
        "missing": missing,
    }


def on_two_ranks() -> dict[str, Callable[[int], Any]]:
    return {
        "dense": functools.partial(dense, ranks=2),
        "recipes": functools.partial(recipes, ranks=2),
        "data parallel": functools.partial(data_parallel, ranks=2),
        "gathered weights": functools.partial(gathered_weights, ranks=2),
        "checkpoints": functools.partial(checkpoints, ranks=2),
        "expert states": functools.partial(expert_states, ranks=2),
    }
