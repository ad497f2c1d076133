"""Forward and backward of a GPT of Megatron-LM: its own layers, and fuser as Transformer Engine.

Four layers of Llama-3-8B's shape, a vocabulary of 32 000, 4 sequences of 2048 tokens, in bf16:
Megatron-LM's own unfused layers, its layers of Transformer Engine's modules, and its op fuser,
without a recipe and under its FP8 recipes. Its own layers have an unfused attention, with a softmax
of the whole matrix; the others have torch's. Needs megatron-core; on a CPU sizes are small, to try
the script.

    python benchmarks/megatron_gpt.py --out out/megatron_gpt.csv
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from evidence import Sink, provenance, say
from model_steps import measured_steps, table
from options import new_parser, parsed
from timing import Call

import fuser.te

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its batches."""

    layers: int = 4
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    groups: int = 8
    vocabulary: int = 32000
    context: int = 2048
    batch: int = 4


SIZES = {"cuda": Sizes(), "cpu": Sizes(2, 256, 384, 4, 2, 512, 64, 2)}
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "own layers": ("own", {}),
    "modules": ("modules", {}),
    "op fuser": ("op fuser", {}),
    "modules, tensorwise": ("modules", TENSORWISE),
    "op fuser, tensorwise": ("op fuser", TENSORWISE),
    "op fuser, delayed": ("op fuser", DELAYED),
    "op fuser, blockwise": ("op fuser", BLOCKWISE),
}


@contextlib.contextmanager
def megatron(device: str) -> Any:
    """Megatron-LM on one rank, with fuser as Transformer Engine."""
    warnings.simplefilter("ignore")
    fuser.te.install()
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29519")
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    on_cpu: Any = contextlib.nullcontext()
    if device == "cpu":
        on_cpu = mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu"))
    with on_cpu:
        random.model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
        yield
    dist.destroy_process_group()


def gpt(variant: str, sizes: Sizes, device: str) -> Any:
    """The model of a variant."""
    kind, recipe = VARIANTS[variant]
    configs = importlib.import_module("megatron.core.transformer.transformer_config")
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    models = importlib.import_module("megatron.core.models.gpt")
    config = configs.TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.width,
        ffn_hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.groups,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=kind == "own" and device == "cuda",
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=device == "cpu",
        params_dtype=BF16,
        bf16=True,
        **recipe,
    )
    if kind == "own":
        layers = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    else:
        layers = specs.get_gpt_layer_with_transformer_engine_spec(
            use_te_op_fuser=kind == "op fuser"
        )
    torch.manual_seed(0)
    model = models.GPTModel(
        config,
        layers,
        vocab_size=sizes.vocabulary,
        max_sequence_length=sizes.context,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    return model.to(device, BF16)


def steps(variant: str, sizes: Sizes, device: str) -> Call:
    """A call that is forward and backward over one batch."""
    model = gpt(variant, sizes, device)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context), device=device)
    positions = torch.arange(sizes.context, device=device).expand(sizes.batch, -1)
    square = torch.ones(sizes.context, sizes.context, dtype=torch.bool, device=device)
    mask = square.triu(1)[None, None]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.set_is_first_microbatch()
        model(tokens, positions, mask, labels=tokens).mean().backward()

    return step


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    parser = new_parser(__doc__, {})
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="by default all of them")
    given = parsed(parser, argv, {})
    if given.chart:
        parser.error("megatron_gpt.py draws no chart.")
    if importlib.util.find_spec("megatron") is None:
        parser.error("megatron_gpt.py needs megatron-core: pip install megatron-core==0.16.1.")
    device, sizes = given.device, SIZES[given.device]
    where = provenance(device, BF16, given.commit)
    print("  ".join(f"{name} {value}" for name, value in where.items()))

    def maker(name: str) -> Callable[[], Call]:
        return lambda: steps(name, sizes, device)

    with megatron(device):
        makers = {name: maker(name) for name in given.variants or VARIANTS}
        records = measured_steps(makers, sizes.batch * sizes.context, device, given.rounds)
    say(table(records).replace("/ eager", "/ first"))
    Sink(given.out, where).write(records)


if __name__ == "__main__":
    main()
