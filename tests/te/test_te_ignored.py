"""Arguments that Transformer Engine has and that change nothing here: they are accepted, results
are the same, and the document lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rows_of_te  # noqa: F401 - lists the arguments
import torch
from argument_rows import IGNORED
from paths import ROOT

import fuser
from fuser.te import pytorch as te
from fuser.te.pytorch import custom_recipes, master_weights, optimizers, recipes, rope
from fuser.te.pytorch.operations import BasicLinear

HERE = "fuser.te.pytorch"
DOCUMENT = ROOT / "docs" / "te_programs.md"
OURS = {key: reason for key, reason in IGNORED.items() if key[0].startswith("fuser.te")}

X = torch.linspace(-1.0, 1.0, 80).view(5, 2, 8)
ROWS = X[:, 0]
QKV = torch.linspace(-1.0, 1.0, 6 * 2 * 4 * 8).view(6, 2, 4, 8)
MASK = torch.tensor([[True, False], [True, True], [False, True]])
ANGLES = te.RotaryPositionEmbedding(8)(6)

VALUES: dict[str, Any] = {
    "bootstrap_backend": "gloo",
    "chunk_size": 512,
    "cp_comm_type": "a2a",
    "cp_global_ranks": [0, 1],
    "cp_rank": 1,
    "cu_seqlens": torch.tensor([0, 6]),
    "device": "cpu",
    "dtype": torch.bfloat16,
    "max_token_num": 64,
    "micro_batch_size": 2,
    "name": "layer",
    "num_gemms": 3,
    "pad_offsets": torch.tensor([0, 1]),
    "params_dtype": torch.bfloat16,
    "qk_norm_eps": 0.5,
    "quantization_modes": [],
    "role": fuser.QuantizerRole("linear", "grad_output"),
    "seq_length": 512,
    "shape": [64, 16],
    "sm_margin": 4,
    "tp_size": 2,
    "ub_cfgs": {},
    "ub_name": "fc1",
}
"""Values that turn arguments on; others are True."""


def layer(name: str, *sizes: Any) -> Any:
    """The outputs and gradients of a layer that is made with what a row ignores."""

    def run(given: dict[str, Any]) -> Any:
        module = getattr(te, name)(*sizes, **given)
        splits = ([3, 2],) if name == "GroupedLinear" else ()
        y = module(X if name in ("MultiheadAttention", "TransformerLayer") else ROWS, *splits)
        y.sum().backward()
        return [y.detach(), *(parameter.grad for parameter in module.parameters())]

    return run


def attention(made: dict[str, Any], called: dict[str, Any]) -> Any:
    return te.DotProductAttention(4, 8, **made)(QKV, QKV, QKV, **called)


def grouped_attention(given: dict[str, Any]) -> Any:
    module = te.DotProductAttention(4, 8)
    module.set_context_parallel_group(**{"cp_group": None, **given})
    return module(QKV, QKV, QKV)


def block_attention(given: dict[str, Any]) -> Any:
    module = te.MultiheadAttention(8, 4)
    module.set_context_parallel_group(**{"cp_group": None, **given})
    return module(X)


def step(name: str) -> Any:
    def run(given: dict[str, Any]) -> Any:
        parameter = torch.nn.Parameter(ROWS.clone())
        parameter.grad = torch.ones_like(parameter)
        getattr(optimizers, name)([parameter], lr=0.1, **given).step()
        return parameter.detach()

    return run


def initialized(given: dict[str, Any]) -> Any:
    parameter = torch.nn.Parameter(ROWS.clone())
    optimizer = optimizers.FusedAdam([parameter])
    optimizer.initialize_state(parameter, **given)
    return dict(optimizer.state[parameter])


def written(given: dict[str, Any]) -> Any:
    with fuser.quantized_model_init(recipe=fuser.recipe.Float8CurrentScaling()):
        weight: Any = te.Linear(32, 16, bias=False).weight
    values = torch.linspace(-1.0, 1.0, 512)
    master_weights.cast_master_weights_to_fp8([weight], [values], [0], None, **given)
    return weight.dequantize()


def offloaded(given: dict[str, Any]) -> Any:
    context, _ = te.get_cpu_offload_context(True, **given)
    x = X.clone().requires_grad_()
    with context:
        y = x.exp()
    y.sum().backward()
    return x.grad


def scaled(given: dict[str, Any]) -> Any:
    call = {"chunk_size": 0, **given}
    target = torch.zeros_like(X)
    flag = torch.zeros(1)
    optimizers.multi_tensor_scale(noop_flag=flag, tensor_lists=[[X], [target]], scale=2.0, **call)
    return [target, flag]


def norm(given: dict[str, Any]) -> Any:
    call = {"chunk_size": 0, "noop_flag": torch.zeros(1), **given}
    return optimizers.multi_tensor_l2norm(tensor_lists=[[X]], **call)


def rotated(given: dict[str, Any]) -> Any:
    return rope.apply_rotary_pos_emb(QKV, ANGLES, **given)


def rotated_parts(given: dict[str, Any]) -> Any:
    qkv = QKV.reshape(6, 2, 1, 32)
    return rope.apply_fused_qkv_rotary_pos_emb(qkv, ANGLES, ANGLES, [16, 8, 8], **given)


def unpermuted(given: dict[str, Any]) -> Any:
    rows, row_map = te.moe_permute(ROWS[:3], MASK)
    return te.moe_unpermute(rows, row_map, restore_shape=(3, 8), **given)


def with_a_meta(given: dict[str, Any]) -> Any:
    module = te.Linear(8, 8)
    module.init_fp8_metadata(**given)
    return module(ROWS).detach()


CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Linear": layer("Linear", 8, 6),
    "LayerNormLinear": layer("LayerNormLinear", 8, 6),
    "LayerNormMLP": layer("LayerNormMLP", 8, 12),
    "GroupedLinear": layer("GroupedLinear", 2, 8, 6),
    "LayerNorm": layer("LayerNorm", 8),
    "RMSNorm": layer("RMSNorm", 8),
    "MultiheadAttention": layer("MultiheadAttention", 8, 4),
    "TransformerLayer": layer("TransformerLayer", 8, 12, 4),
    "DotProductAttention": lambda given: attention(given, {}),
    "DotProductAttention.forward": lambda given: attention({}, given),
    "DotProductAttention.set_context_parallel_group": grouped_attention,
    "MultiheadAttention.set_context_parallel_group": block_attention,
    "layers.TransformerEngineBaseModule.init_fp8_metadata": with_a_meta,
    "moe_permute": lambda given: te.moe_permute(ROWS[:3], MASK, **given),
    "moe_unpermute": unpermuted,
    "rope.apply_rotary_pos_emb": rotated,
    "rope.apply_fused_qkv_rotary_pos_emb": rotated_parts,
    "parallel_cross_entropy": lambda given: te.parallel_cross_entropy(
        ROWS, torch.arange(5), **given
    ),
    "get_cpu_offload_context": offloaded,
    "initialize_ub": lambda given: te.initialize_ub(**given),
    "operations.BasicLinear": lambda given: BasicLinear(8, 6, **given)(ROWS).detach(),
    "recipes.DelayedScaling": lambda given: recipes.DelayedScaling(**given),
    "custom_recipes.high_precision_factory": lambda given: custom_recipes.high_precision_factory(
        **{"role": None, **given}
    ),
    "custom_recipes.mxfp8_factory": lambda given: custom_recipes.mxfp8_factory(
        **{"role": None, **given}
    ),
    "optimizers.FusedAdam": step("FusedAdam"),
    "optimizers.FusedSGD": step("FusedSGD"),
    "optimizers.FusedAdam.initialize_state": initialized,
    "optimizers.multi_tensor_l2norm": norm,
    "optimizers.multi_tensor_scale": scaled,
    "master_weights.cast_master_weights_to_fp8": written,
}
"""By path below ``fuser.te.pytorch`` a result of a call with some arguments more."""


def are_equal(some: Any, other: Any) -> bool:
    if isinstance(some, torch.Tensor):
        return torch.equal(some, other)
    if isinstance(some, (list, tuple)):
        return all(map(are_equal, some, other))
    if isinstance(some, dict):
        return some.keys() == other.keys() and all(are_equal(some[k], other[k]) for k in some)
    return bool(some == other)


@pytest.mark.filterwarnings("ignore:.* ignores .*")
@pytest.mark.parametrize(("path", "argument"), OURS)
def test_an_ignored_argument_is_taken_and_changes_nothing(path: str, argument: str) -> None:
    results = []
    for given in ({}, {argument: VALUES.get(argument, True)}):
        torch.manual_seed(0)
        results.append(CALLS[path.removeprefix(f"{HERE}.")](given))
    assert are_equal(*results)


def alike(path: str) -> list[str]:
    """What is at a path, and the norms that share its constructor, which has one row for both."""
    norms = {name: getattr(te, name) for name in ("LayerNorm", "RMSNorm")}
    if path not in norms:
        return [path]
    return [name for name, norm in norms.items() if norm.__init__ is norms[path].__init__]


def lines() -> list[str]:
    """The rows of the document's table: a reason, and the arguments by what takes them."""
    by_reason: dict[str, dict[tuple[str, ...], list[str]]] = {}
    paths = dict.fromkeys(path for path, _ in OURS)
    for reason in dict.fromkeys(OURS.values()):
        takers = by_reason.setdefault(reason, {})
        for path in paths:
            names = tuple(name for (own, name), why in OURS.items() if (own, why) == (path, reason))
            if names:
                takers.setdefault(names, []).extend(alike(path.removeprefix(f"{HERE}.")))
    rows = []
    for reason, takers in by_reason.items():
        texts = [
            f"{', '.join(f'`{path}`' for path in own)}: {', '.join(f'`{name}`' for name in names)}"
            for names, own in takers.items()
        ]
        rows.append(f"| {'; '.join(texts)} | {reason} |")
    return rows


def test_the_document_lists_the_ignored_arguments() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.split("| ignored | why |\n|---|---|\n")[1].split("\n\n")[0]
    assert table.strip().splitlines() == lines()
