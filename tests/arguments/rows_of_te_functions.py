"""Rows of the arguments of Transformer Engine's functions: positions, losses, ranks, factories."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from argument_rows import Of, ignores, refuses, sets
from rows_of_te_attention import rotated
from rows_of_te_experts import OTHER_TOKENS, TOKENS, seeded
from rows_of_te_layers import Given, close, tracker_of
from torch.nn import functional as F

import fuser
import fuser.te
from fuser.recipe import QuantizerRole
from fuser.runtime import graphs
from fuser.te import pytorch as te
from fuser.te.pytorch import (
    cpu_offload,
    cross_entropy,
    custom_recipes,
    distributed,
    recipes,
    rope,
)

HERE = "fuser.te.pytorch"
_TRACKER = f"{HERE}.CudaRNGStatesTracker"
_ROPE = f"{HERE}.RotaryPositionEmbedding"
_APPLY = f"{HERE}.rope.apply_rotary_pos_emb"
_APPLY_QKV = f"{HERE}.rope.apply_fused_qkv_rotary_pos_emb"

OPTIONS: dict[str, tuple[str, ...]] = {
    f"{HERE}.initialize_ub": (
        *("shape", "tp_size", "use_fp8", "quantization_modes", "dtype", "ub_cfgs"),
        "bootstrap_backend",
    ),
    f"{HERE}.recipes.DelayedScaling": ("device", "interval", "params_dtype"),
}
METHODS = (
    *(f"{_TRACKER}.{name}" for name in ("add", "fork", "set_states")),
    f"{_ROPE}.forward",
)


# -- rotary embedding ------------------------------------------------------------------


def angles(
    length: int,
    dim: int,
    *,
    base: float = 10000.0,
    scale: float = 1.0,
    offset: int = 0,
    is_interleaved: bool = False,
) -> torch.Tensor:
    """``[length, 1, 1, dim]`` by the formula, in fp64."""
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    half = torch.outer((torch.arange(length, dtype=torch.float64) + offset) * scale, frequencies)
    whole = torch.stack((half, half), -1).flatten(-2) if is_interleaved else half.repeat(1, 2)
    return whole[:, None, None]


def _row_of_angles(argument: str, value: Any, dim: int = 8, **settings: Any) -> None:
    @sets(_ROPE, **{argument: value})
    def _angles_of_positions(given: Given) -> None:
        close(te.RotaryPositionEmbedding(**{"dim": 8, **given})(6), angles(6, dim, **settings))


_row_of_angles("dim", Of(12, instead=8), dim=12)
_row_of_angles("rotary_percent", 0.5, dim=4)
_row_of_angles("rotary_base", 100.0, base=100.0)
_row_of_angles("interleaved", True, is_interleaved=True)


@sets(_ROPE, seq_len_interpolation_factor=4)
def _positions_of_a_model_that_has_learned_fewer(given: Given) -> None:
    close(te.RotaryPositionEmbedding(8, **given)(12), angles(12, 8))
    learned = te.RotaryPositionEmbedding(8, pretrained_max_position_embeddings=16, **given)
    close(learned(12), angles(12, 8, scale=1 / 4))


@sets(_ROPE, pretrained_max_position_embeddings=4)
def _positions_beyond_all_learned_ones(given: Given) -> None:
    embedding = te.RotaryPositionEmbedding(8, seq_len_interpolation_factor=2, **given)
    close(embedding(8), angles(8, 8, scale=1 / 2))
    close(embedding(12), angles(12, 8, scale=4 / 12))


@sets(f"{_ROPE}.forward", max_seq_len=Of(5, instead=4), offset=3)
def _which_positions(given: Given) -> None:
    offset = 0 if "max_seq_len" in given else 3
    y = te.RotaryPositionEmbedding(8)(**{"max_seq_len": 5, **given})
    close(y, angles(5, 8, offset=offset))


_T, _OTHER_T = seeded(6, 2, 4, 8), seeded(6, 2, 4, 8, seed=1)
_STARTS = torch.tensor([2, 5])


def _own(freqs: torch.Tensor) -> torch.Tensor:
    """The angles as a row of positions, which broadcasts over batch and heads."""
    return freqs.flatten(0, -2)[:, None, None]


@sets(_APPLY, t=Of(_T, instead=_OTHER_T), freqs=Of(angles(6, 4), instead=angles(6, 4, offset=1)))
def _rotated_features(given: Given) -> None:
    y = rope.apply_rotary_pos_emb(**{"t": _T, "freqs": angles(6, 4), **given})
    close(y, rotated(_T, _own(angles(6, 4))))


@sets(_APPLY, interleaved=True)
def _pairs_of_neighbours(given: Given) -> None:
    freqs = angles(6, 8, is_interleaved=True)
    y = rope.apply_rotary_pos_emb(_T, freqs, **given)
    close(y, rotated(_T, _own(freqs), is_interleaved=True))


@sets(_APPLY, tensor_format="bshd")
def _the_batch_first(given: Given) -> None:
    y = rope.apply_rotary_pos_emb(_T.transpose(0, 1), angles(9, 8), **given)
    close(y.transpose(0, 1), rotated(_T, _own(angles(6, 8))))


@sets(_APPLY, cu_seqlens=torch.tensor([0, 2, 6]))
def _packed_sequences(given: Given) -> None:
    y = rope.apply_rotary_pos_emb(_T[:, 0], angles(9, 8), "thd", **given)
    freqs = _own(angles(9, 8))[:, 0]
    close(y, torch.cat((rotated(_T[:2, 0], freqs[:2]), rotated(_T[2:, 0], freqs[:4]))))


@sets(_APPLY, start_positions=_STARTS)
def _sequences_that_begin_later(given: Given) -> None:
    freqs = angles(12, 8)
    moved = torch.stack([_own(freqs)[start : start + 6, 0] for start in _STARTS.tolist()], dim=1)
    close(rope.apply_rotary_pos_emb(_T, freqs, **given), rotated(_T, moved))
    batched = rope.apply_rotary_pos_emb(_T.transpose(0, 1), freqs, "bshd", **given)
    close(batched.transpose(0, 1), rotated(_T, moved))
    packed = rope.apply_rotary_pos_emb(
        _T[:, 0], freqs, "thd", cu_seqlens=torch.tensor([0, 2, 6]), **given
    )
    moved = _own(freqs)[:, 0]
    parts = (rotated(_T[:2, 0], moved[2:4]), rotated(_T[2:, 0], moved[5:9]))
    close(packed, torch.cat(parts))


@sets(_APPLY, cp_size=2)
def _whole_sequences(given: Given) -> None:
    refuses(lambda: rope.apply_rotary_pos_emb(_T, angles(6, 8), **given), "cp_size=2")


ignores(_APPLY, "the values are the same", "fused")
ignores(_APPLY, "sequences are not shared by ranks", "cp_rank")

_QKV = seeded(6, 2, 2, 32)
_SPLIT = [16, 8, 8]


def _parts(qkv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, **options: Any) -> list[Any]:
    queries, keys, values = qkv.double().split(_SPLIT, dim=-1)
    queries = queries.reshape(6, 2, 4, 8)
    return [rotated(queries, q, **options), rotated(keys, k, **options), values]


def _row_of_qkv(argument: str, value: Any, freqs: Any = None, **options: Any) -> None:
    @sets(_APPLY_QKV, **{argument: value})
    def _queries_keys_and_values(given: Given) -> None:
        plain = angles(12, 8, **({"is_interleaved": True} if options else {}))
        call: Given = {"qkv": _QKV, "q_freqs": plain, "k_freqs": plain}
        call |= {"qkv_split_arg_list": _SPLIT, **given}
        q = _own(plain)[:6] if freqs is None else freqs
        expected = _parts(_QKV, q, q, **options)
        for part, own in zip(rope.apply_fused_qkv_rotary_pos_emb(**call), expected, strict=True):
            close(part, own)


_row_of_qkv("qkv", Of(_QKV, instead=seeded(6, 2, 2, 32, seed=1)))
_row_of_qkv("qkv_split_arg_list", Of(_SPLIT, instead=[8, 8, 16]))
_row_of_qkv("interleaved", True, is_interleaved=True)
_row_of_qkv(
    "start_positions",
    _STARTS,
    torch.stack([_own(angles(12, 8))[start : start + 6, 0] for start in (2, 5)], dim=1),
)


@sets(_APPLY_QKV, q_freqs=Of(2, instead=0), k_freqs=Of(4, instead=0))
def _angles_of_queries_and_of_keys(given: Given) -> None:
    offsets = {"q_freqs": 0, "k_freqs": 0, **given}
    call = {name: angles(6, 8, offset=offset) for name, offset in offsets.items()}
    own = {"q_freqs": 2} if "q_freqs" in given else {"k_freqs": 4}
    q, k = (_own(angles(6, 8, offset=own.get(name, 0))) for name in ("q_freqs", "k_freqs"))
    parts = rope.apply_fused_qkv_rotary_pos_emb(_QKV, qkv_split_arg_list=_SPLIT, **call)
    for part, expected in zip(parts, _parts(_QKV, q, k), strict=True):
        close(part, expected)


@sets(_APPLY_QKV, tensor_format="bshd")
def _queries_with_the_batch_first(given: Given) -> None:
    plain = angles(9, 8)
    parts = rope.apply_fused_qkv_rotary_pos_emb(_QKV.transpose(0, 1), plain, plain, _SPLIT, **given)
    freqs = _own(plain)[:6]
    for part, expected in zip(parts, _parts(_QKV, freqs, freqs), strict=True):
        close(part.transpose(0, 1), expected)


@sets(_APPLY_QKV, cp_size=2)
def _whole_sequences_of_queries(given: Given) -> None:
    plain = angles(6, 8)
    refuses(
        lambda: rope.apply_fused_qkv_rotary_pos_emb(_QKV, plain, plain, _SPLIT, **given),
        "cp_size=2",
    )


ignores(_APPLY_QKV, "packed sequences are refused", "cu_seqlens")
ignores(_APPLY_QKV, "sequences are not shared by ranks", "cp_rank")


# -- losses ----------------------------------------------------------------------------

_ENTROPY = f"{HERE}.parallel_cross_entropy"
_CLASSES = seeded(2, 4, 10)
_TARGET = torch.tensor([[1, 3, 9, 0], [2, 3, 3, 7]])


def _row_of_entropy(argument: str, value: Any, **settings: Any) -> None:
    @sets(_ENTROPY, **{argument: value})
    def _cross_entropy_and_its_gradient(given: Given) -> None:
        logits = given.get("inp", _CLASSES).clone().requires_grad_()
        loss = te.parallel_cross_entropy(**{"target": _TARGET, **given, "inp": logits})
        exact = _CLASSES.double().requires_grad_()
        expected = F.cross_entropy(
            exact.flatten(0, 1), _TARGET.flatten(), reduction="none", **settings
        ).view(2, 4)
        close(loss, expected)
        loss.square().sum().backward()
        expected.square().sum().backward()
        close(logits.grad, exact.grad)


_row_of_entropy("inp", Of(_CLASSES, instead=2 * _CLASSES))
_row_of_entropy("target", Of(_TARGET, instead=_TARGET.roll(1)))
_row_of_entropy("label_smoothing", 0.2, label_smoothing=0.2)
_row_of_entropy("ignore_idx", 3, ignore_index=3)
ignores(_ENTROPY, "nothing is read by the host", "is_cg_capturable")


@sets(_ENTROPY, reduce_loss=True)
def _the_mean_over_targets_that_are_read(given: Given) -> None:
    target = _TARGET.masked_fill(_TARGET == 3, -100)
    logits, exact = _CLASSES.clone().requires_grad_(), _CLASSES.double().requires_grad_()
    loss = te.parallel_cross_entropy(logits, target, **given)
    expected = F.cross_entropy(exact.flatten(0, 1), target.flatten())
    close(loss, expected)
    loss.backward()
    expected.backward()
    close(logits.grad, exact.grad)


@sets(_ENTROPY, dist_process_group="both ranks")
def _columns_that_ranks_share(given: Given) -> None:
    others, own = _CLASSES.chunk(2, dim=-1)
    largest = _CLASSES.amax(-1)

    def reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        """Add what the other rank has."""
        assert group == "both ranks"
        if op is dist.ReduceOp.MAX:
            tensor.copy_(torch.maximum(tensor, others.amax(-1)))
            return
        values = others - largest[..., None]
        at_target = values.gather(-1, _TARGET.clamp(max=4)[..., None])[..., 0]
        sums = (values.exp().sum(-1), at_target.masked_fill(_TARGET > 4, 0.0), values.sum(-1))
        tensor += torch.stack(sums)

    ranks = SimpleNamespace(
        get_world_size=lambda group: 2,
        get_rank=lambda group: 1,
        all_reduce=reduce,
        ReduceOp=dist.ReduceOp,
    )
    with mock.patch.object(cross_entropy, "dist", ranks):
        loss = te.parallel_cross_entropy(own, _TARGET, **given)
    exact = F.cross_entropy(_CLASSES.double().flatten(0, 1), _TARGET.flatten(), reduction="none")
    close(loss, exact.view(2, 4))


# -- ranks and random states -----------------------------------------------------------


@contextlib.contextmanager
def ranks_of(group: str, ranks: int) -> Iterator[None]:
    """``group`` has ``ranks`` ranks, of which this process is the last; all ranks are 8."""

    def size(group_: Any = None) -> int:
        return ranks if group_ == group else 8

    def gather(out: torch.Tensor, inp: torch.Tensor, group: Any, async_op: bool) -> Any:
        out.copy_(torch.cat([inp + i for i in range(size(group))]))
        return "a handle" if async_op else None

    def scatter(out: torch.Tensor, inp: torch.Tensor, group: Any, async_op: bool) -> Any:
        out.copy_(inp.chunk(size(group))[-1])
        return "a handle" if async_op else None

    stubs = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda group=None: size(group),
        get_rank=lambda group=None: size(group) - 1,
        all_gather_into_tensor=gather,
        reduce_scatter_tensor=scatter,
    )
    with mock.patch.object(distributed, "dist", stubs):
        yield


@sets(f"{HERE}.distributed.get_distributed_world_size", group="some")
def _the_ranks_of_a_group(given: Given) -> None:
    with ranks_of("some", 2):
        assert distributed.get_distributed_world_size(**given) == 2


@sets(f"{HERE}.distributed.get_distributed_rank", group="some")
def _this_rank_of_a_group(given: Given) -> None:
    with ranks_of("some", 2):
        assert distributed.get_distributed_rank(**given) == 1


@sets(
    f"{HERE}.distributed.gather_along_first_dim",
    inp=Of(TOKENS, instead=OTHER_TOKENS),
    process_group=Of("some", instead="others"),
    async_op=True,
)
def _rows_of_all_ranks(given: Given) -> None:
    with ranks_of("some", 2):
        call = {"inp": TOKENS, "process_group": "some", **given}
        rows, handle = distributed.gather_along_first_dim(**call)
    assert torch.equal(rows, torch.cat((TOKENS, TOKENS + 1)))
    assert handle == ("a handle" if given.keys() <= {"async_op"} else None)


@sets(f"{HERE}.distributed.gather_along_first_dim", quantizer="a quantizer")
def _rows_are_gathered_plain(given: Given) -> None:
    with ranks_of("some", 2):
        refuses(lambda: distributed.gather_along_first_dim(TOKENS, "some", **given), "a quantizer")


@sets(
    f"{HERE}.distributed.reduce_scatter_along_first_dim",
    inp=Of(TOKENS[:4], instead=OTHER_TOKENS[:4]),
    tp_group=Of("some", instead="others"),
    async_op=True,
)
def _this_ranks_rows_of_a_sum(given: Given) -> None:
    with ranks_of("some", 2):
        call = {"inp": TOKENS[:4], "tp_group": "some", **given}
        rows, handle = distributed.reduce_scatter_along_first_dim(**call)
    assert torch.equal(rows, TOKENS[2:4])
    assert handle == ("a handle" if given.keys() <= {"async_op"} else None)


@sets(
    f"{HERE}.distributed.activation_recompute_forward",
    activation_recompute=True,
    recompute_phase=True,
)
def _what_a_checkpoint_says(given: Given) -> None:
    def answers() -> set[str]:
        both = {
            "activation_recompute": distributed.is_fp8_activation_recompute_enabled(),
            "recompute_phase": distributed.in_fp8_activation_recompute_phase(),
        }
        return {name for name, value in both.items() if value}

    with distributed.activation_recompute_forward(**given):
        assert given
        assert answers() == given.keys()
    assert not answers()


def _draws(seed: int) -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(seed))


@sets(f"{_TRACKER}.add", name=Of("some", instead="another"), seed=Of(7, instead=8))
def _a_state_of_a_name_and_a_seed(given: Given) -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add(**{"name": "some", "seed": 7, **given})
    for seed, name in ((7, "another"), (8, "some")):
        refuses(lambda: tracker.add(name=name, seed=seed + (seed == 8)), name)  # noqa: B023
    with tracker.fork("some"):
        assert torch.equal(torch.randn(4), _draws(7))


@sets(f"{_TRACKER}.fork", name="some")
def _random_numbers_of_a_state(given: Given) -> None:
    tracker = tracker_of(model_parallel_rng=6, some=7)()
    before = torch.get_rng_state()
    both = []
    for _ in range(2):  # the second goes on where the first has ended
        with tracker.fork(**given):
            both.append(torch.randn(16))
    drawn = torch.Generator().manual_seed(7)
    assert torch.equal(torch.stack(both), torch.randn(2, 16, generator=drawn))
    assert torch.equal(torch.get_rng_state(), before)


@sets(f"{_TRACKER}.set_states", states=Of(7, instead=8))
def _states_that_are_set(given: Given) -> None:
    tracker, other = te.CudaRNGStatesTracker(), tracker_of(some=given["states"])()
    tracker.set_states(other.get_states())
    assert distributed.get_all_rng_states() is tracker.states_
    with tracker.fork("some"):
        assert torch.equal(torch.randn(4), _draws(7))


# -- contexts, factories, import paths -------------------------------------------------

_OFFLOAD = f"{HERE}.get_cpu_offload_context"


@sets(_OFFLOAD, enabled=True, num_layers=2, model_layers=3)
def _layers_whose_saved_tensors_are_moved(given: Given) -> None:
    own: Given = {"enabled": True, "num_layers": 1, "model_layers": 1}
    expected = {"enabled": [1, 1, 1, 1], "num_layers": [1, 1, 0, 1], "model_layers": [1, 0, 0, 1]}
    layers = {"num_layers": 3, "model_layers": 3}
    (name,) = given or {"enabled": None}
    options = {
        "enabled": own | given,
        "num_layers": own | layers | given,
        "model_layers": own | given,
    }
    call = options[name] if given else {}
    moved = []
    with mock.patch.object(cpu_offload, "DEVICE", "cpu"):
        context, synchronize = te.get_cpu_offload_context(**call)
        for _ in range(4):
            with mock.patch.object(torch.Tensor, "copy_", autospec=True) as copies:
                x = torch.ones(3, requires_grad=True)
                with context:
                    y = x.exp()
                moved.append(copies.call_count)
            assert synchronize(y) is y
    assert moved == expected[name]


@sets(_OFFLOAD, offload_activations=False, offload_weights=True)
def _activations_alone_are_moved(given: Given) -> None:
    refuses(lambda: te.get_cpu_offload_context(True, **given), *(f"{name}=" for name in given))


@sets(_OFFLOAD, manual_synchronization=True)
def _layers_start_their_copies(given: Given) -> None:
    refuses(lambda: te.get_cpu_offload_context(True, **given), "manual_synchronization=True")
    te.get_cpu_offload_context(False, **given)


ignores(
    _OFFLOAD,
    "a copy has memory of its own",
    *("double_buffering", "retain_pinned_cpu_buffers", "offload_stream"),
)
ignores(f"{HERE}.initialize_ub", "there are no userbuffers", *OPTIONS[f"{HERE}.initialize_ub"])
ignores(f"{HERE}.operations.BasicLinear", "there are no userbuffers", "userbuffers_options")
ignores(
    f"{HERE}.recipes.DelayedScaling",
    "a recipe has no dtype and no device; `interval` is of older versions",
    *OPTIONS[f"{HERE}.recipes.DelayedScaling"],
)
ignores(f"{HERE}.custom_recipes.high_precision_factory", "no tensor is quantized", "role")

_MXFP8, _NVFP4 = fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3), fuser.NVFP4Quantizer
_IDENTITY = fuser.IdentityQuantizer()
_OF_GRADIENTS: dict[str, Any] = {
    "current_scaling": fuser.Float8CurrentScalingQuantizer(fuser.DType.kFloat8E5M2),
    "current_scaling_ref": fuser.Float8CurrentScalingQuantizer(fuser.DType.kFloat8E5M2),
    "high_precision_fwd_mxfp8_bwd": _MXFP8,
    "mxfp8_fwd_high_precision_bwd": _IDENTITY,
    "mxfp8_fwd_nvfp4_bwd": _NVFP4(with_rht=True, stochastic_rounding=True),
    "nvfp4": _NVFP4(with_rht=True, stochastic_rounding=True),
    "nvfp4_1d_weight": _NVFP4(with_rht=True, stochastic_rounding=True),
    "nvfp4_row_scaled_fwd_high_precision_bwd": _IDENTITY,
}
"""By factory its quantizer of a gradient, which is not that of an input."""
_OF_WEIGHTS: dict[str, Any] = {
    "float8_block_scaling": fuser.Float8BlockQuantizer(
        fuser.DType.kFloat8E4M3, block_scaling_dim=2
    ),
    "nvfp4_ref_rht_2d": _NVFP4(with_2d_quantization=True),
}
"""By factory its quantizer of a weight, which is not that of an input."""


def _row_of_a_factory(name: str, tensor: str, expected: Any) -> None:
    roles = [QuantizerRole("linear", kind) for kind in (tensor, "input")]

    @sets(f"{HERE}.custom_recipes.{name}_factory", role=Of(roles[0], instead=roles[1]))
    def _the_quantizer_of_a_role(given: Given) -> None:
        assert getattr(custom_recipes, f"{name}_factory")(**given) == expected


for _name, _quantizer in _OF_GRADIENTS.items():
    _row_of_a_factory(_name, "grad_output", _quantizer)
for _name, _quantizer in _OF_WEIGHTS.items():
    _row_of_a_factory(_name, "weight", _quantizer)


@sets(
    f"{HERE}.custom_recipes.nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
    role=Of(QuantizerRole("grouped_linear", "input"), instead=QuantizerRole("linear", "input")),
)
def _the_rows_of_experts(given: Given) -> None:
    quantizer: Any = custom_recipes.nvfp4_row_scaled_fwd_mxfp8_bwd_factory(**given)
    assert isinstance(quantizer, fuser.HybridQuantizer)
    x = seeded(32, 64)
    rows = quantizer.with_usage(rowwise=True, columnwise=False)(x).dequantize()
    assert torch.equal(rows, _NVFP4(row_scaled_nvfp4=True)(x).dequantize())


ignores(f"{HERE}.custom_recipes.mxfp8_factory", "all tensors are E4M3 in blocks of 32", "role")


@sets("fuser.te.install", version="2.4.0")
def _the_version_that_programs_are_told(given: Given) -> None:
    modules = {n: m for n, m in sys.modules.items() if not n.startswith("transformer_engine")}
    classes = [getattr(recipes, name) for name in recipes.__all__]
    with (
        mock.patch.dict(sys.modules, modules, clear=True),
        mock.patch.object(sys, "meta_path", list(sys.meta_path)),
        contextlib.ExitStack() as stack,
    ):
        for cls in classes:  # they are named by that path, which later tests do not have
            stack.enter_context(mock.patch.object(cls, "__module__", cls.__module__))
        fuser.te.install(**given)
        assert sys.modules["transformer_engine"].__version__ == "2.4.0"
        assert importlib.metadata.version("transformer-engine") == "2.4.0"


# -- graphs ----------------------------------------------------------------------------------

GRAPHED = f"{HERE}.make_graphed_callables"


def passed_on(given: Given) -> Given:
    """What fuser.make_graphed_callables gets, whose arguments have rows of their own."""
    call = {"modules": torch.nn.Linear(1, 1), "sample_args": (torch.ones(1),), **given}
    signature = inspect.signature(fuser.make_graphed_callables)
    with mock.patch.object(graphs, "make_graphed_callables") as theirs:
        te.make_graphed_callables(**call)
    bound = signature.bind(*theirs.call_args.args, **theirs.call_args.kwargs)
    return dict(bound.arguments)


def _row_of_graphs(argument: str, value: Any, newer: str, expected: Any, instead: Any) -> None:
    is_needed = argument in ("modules", "sample_args")

    @sets(GRAPHED, **{argument: Of(value, instead=instead) if is_needed else value})
    def _is_passed_on(given: Given) -> None:
        assert passed_on(given)[newer] == expected


_RECIPE = fuser.recipe.MXFP8BlockScaling()
for _argument, _value, _newer, _expected in (
    *((name, name, name, name) for name in ("modules", "sample_args", "pool")),
    ("num_warmup_iters", 5, "num_warmup_iters", 5),
    ("allow_unused_input", True, "allow_unused_input", True),
    ("enabled", (True, True), "enabled", True),
    ("fp8_enabled", False, "enabled", False),
    ("recipe", _RECIPE, "recipe", _RECIPE),
    ("fp8_recipe", _RECIPE, "recipe", _RECIPE),
    ("amax_reduction_group", "ranks", "amax_reduction_group", "ranks"),
    ("fp8_group", "ranks", "amax_reduction_group", "ranks"),
):
    _row_of_graphs(_argument, _value, _newer, _expected, "another")


@sets(
    GRAPHED,
    sample_kwargs=({}, {"mask": torch.ones(1)}),
    calibrating=True,
    fp8_calibrating=True,
    cache_quantized_params=True,
    fp8_weight_caching=True,
    retain_graph_in_backward=True,
    _order=[1, -1],
    _num_layers_per_chunk=[2],
    _reuse_graph_input_output_buffers=True,
)
def _graphs_without(given: Given) -> None:
    newer = {"fp8_calibrating": "calibrating", "fp8_weight_caching": "cache_quantized_params"}
    refuses(lambda: passed_on(given), *(newer.get(name, name) for name in given))
