"""Tensor and sequence parallel linears on two ranks compute what one rank computes."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import every_format
import oracles
import pytest
import torch
from ranks import RANKS, device_type, part, results_of
from said import said
from torch.utils._pytree import tree_map_only

import fuser
from fuser import gemm
from fuser.communication import start_quantized_gather
from fuser.recipe import Recipe

ROWS, FEATURES, OUTPUTS = 256, 256, 256  # a rank's part has whole blocks of every format
OVERRIDES = (None, "high_precision", "dequantized")
# The largest relative error of a rounding, of the formats of gradients.
EPSILONS = {"nvfp4": 0.25}

Tensors = dict[str, torch.Tensor]


def recipes() -> dict[str, Recipe | None]:
    """Every recipe with every override that it takes, and none."""
    found: dict[str, Recipe | None] = {"unquantized": None}
    for name, cls in every_format.RECIPES.items():
        for override in OVERRIDES if cls.accepts_backward_override else (None,):
            options = {"backward_override": override} if override else {}
            found[f"{name} {override}"] = every_format.deterministic(cls, **options)
    return found


MODES = {
    f"{mode}{' sequence' * sequence}": (mode, sequence)
    for mode in ("column", "row")
    for sequence in (False, True)
}


@functools.cache
def whole(mode: str) -> Tensors:
    """Input, weight and gradient of the output, whose amaxes depend on the rank.

    Along rows, which sequence parallel ranks reduce; parts along features have equal amaxes.
    """
    made = {
        "x": oracles.random_tensor((ROWS, FEATURES), torch.float32, 1),
        "weight": oracles.random_tensor((OUTPUTS, FEATURES), torch.float32, 2),
        "dy": oracles.random_tensor((ROWS, OUTPUTS), torch.float32, 3),
    }
    for tensor in made.values():
        tensor.clamp_(-3, 3)
        rows, columns = (torch.arange(size) for size in tensor.shape)
        tensor[(rows[:, None] + columns) % 8 == 0] = 4.0  # in every row and column of every part
    for name in ("x", "dy"):
        made[name][ROWS // 2 :] *= 3
    return made


@contextlib.contextmanager
def operands_seen() -> Iterator[dict[str, Any]]:
    """The quantized operands of the products in this context, by product."""
    seen: dict[str, Any] = {}
    names = ("quantized_linear", "quantized_dgrad", "quantized_wgrad")
    originals = {name: getattr(gemm, name) for name in names}

    def watched(name: str, a: Any, b: Any, *args: Any, **options: Any) -> Any:
        usages = {
            "quantized_linear": ("rowwise", "rowwise"),
            "quantized_dgrad": ("rowwise", "columnwise"),
            "quantized_wgrad": ("columnwise", "columnwise"),
        }[name]
        for usage, place, tensor in zip(usages, ("first", "second"), (a, b), strict=True):
            operand = tensor.operand(usage)
            seen[f"{name} {place}"] = (operand.data.clone(), operand.scale_inv.clone())
        return originals[name](a, b, *args, **options)

    try:
        for name in names:
            setattr(gemm, name, functools.partial(watched, name))
        yield seen
    finally:
        for name, original in originals.items():
            setattr(gemm, name, original)


def train(linear: Any, recipe: Recipe | None, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Any]:
    """Two equal steps; the results and operands of the second, which on a GPU is recorded."""
    found: dict[str, Any] = {}
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        linear.weight.grad = None
        with operands_seen() as seen:
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = linear(leaf)
            y.backward(dy)
        found = {"y": y.detach(), "dx": leaf.grad, "dw": linear.weight.grad, "operands": seen}
    return found


def parallel_case(mode: str, sequence: bool, recipe: Recipe | None, rank: int) -> Any:
    tensors = whole(mode)
    linear = fuser.BasicLinear(
        FEATURES,
        OUTPUTS,
        tensor_parallel_mode=mode,
        sequence_parallel=sequence,
    )
    dim = 0 if mode == "column" else 1
    with torch.no_grad():
        linear.weight.copy_(part(tensors["weight"], rank, dim))
    x, dy = tensors["x"], tensors["dy"]
    if mode == "column":
        x = part(x, rank, 0) if sequence else x
        dy = part(dy, rank, 1)
    else:
        x = part(x, rank, 1)
        dy = part(dy, rank, 0) if sequence else dy
    return train(linear, recipe, x, dy)


# Whole blocks of a format in the rows of a rank, and scales that are padded.
GATHERED = {
    f"{type(quantizer).__name__} {rows} {usage}": (quantizer, rows, usage)
    for quantizer, block in (
        (fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3), 32),
        (fuser.NVFP4Quantizer(with_rht=False, stochastic_rounding=False), 16),
    )
    for rows in (block, 3 * block, 5 * block)
    for usage in ("rowwise", "columnwise")
}


def gathered_rows(quantizer: Any, rows: int, usage: str, rank: int) -> Any:
    """The operand of gathered rows, and that of the whole; the first row of a rank has its amax."""
    x = oracles.random_tensor((RANKS * rows, 96), torch.float32, 1).clamp_(-3, 3).to(device_type())
    x[::rows] = 4.0
    own = quantizer(part(x, rank, 0))
    gathered = start_quantized_gather(own, usage, torch.distributed.group.WORLD).wait()
    pairs = [tensor.operand(usage) for tensor in (gathered, quantizer(x))]
    return [(operand.data.clone(), operand.scale_inv.clone()) for operand in pairs]


SCALES = {
    f"{'equal' if are_equal else 'other'} scales, {usage}": (usage, are_equal)
    for usage in ("rowwise", "columnwise")
    for are_equal in (True, False)
}


def gathered_scales(usage: str, are_equal: bool, rank: int) -> Any:
    """The values of gathered rows that each rank has quantized with its own scale."""
    scale = torch.tensor([1.0 if are_equal else 1.0 + rank], device=device_type())
    own = fuser.Float8Quantizer(scale, torch.zeros_like(scale), fuser.DType.kFloat8E4M3)
    rows = own(torch.full((32, 32), 1.0 + rank, device=device_type()))
    group = torch.distributed.group.WORLD
    try:
        whole = start_quantized_gather(rows, usage, group, checks_scales=True).wait()
    except fuser.StateError as error:
        return str(error)
    operand = whole.operand(usage)
    return operand.data.view(torch.float8_e4m3fn).float() * operand.scale_inv


def cases() -> dict[str, Any]:
    gathered = {
        name: functools.partial(gathered_rows, *options) for name, options in GATHERED.items()
    } | {name: functools.partial(gathered_scales, *options) for name, options in SCALES.items()}
    return gathered | {
        f"{place}, {name}": functools.partial(parallel_case, mode, sequence, recipe)
        for place, (mode, sequence) in MODES.items()
        for name, recipe in recipes().items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results_of(cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", GATHERED)
def test_rows_of_ranks_with_padded_scales_are_gathered_as_the_whole(
    results: dict[str, list[Any]], name: str
) -> None:
    for each in results[name]:
        assert isinstance(each, list), each[1]
        for mine, other in zip(*each, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", SCALES)
def test_scales_that_all_rows_share_are_equal_in_either_copy(
    results: dict[str, list[Any]], name: str
) -> None:
    usage, are_equal = SCALES[name]
    for found in results[name]:
        if are_equal:
            rows = torch.tensor([1.0, 2.0]).repeat_interleave(32)[:, None].expand(64, 32)
            expected = rows if usage == "rowwise" else rows.T
            assert torch.equal(found.cpu(), expected)
        elif device_type() == "cpu":
            assert re.search(said("quantized-gather-cannot-gathered-ranks"), found)
        else:
            assert found.isnan().all()


@functools.cache
def on_one_rank(mode: str, name: str) -> dict[str, Any]:
    with torch.device(device_type()):  # that of the ranks, for the same products
        tensors = whole(mode)
        linear = fuser.BasicLinear(FEATURES, OUTPUTS)
        with torch.no_grad():
            linear.weight.copy_(tensors["weight"])
        found = train(linear, recipes()[name], tensors["x"], tensors["dy"])
    on_cpu: dict[str, Any] = tree_map_only(torch.Tensor, torch.Tensor.cpu, found)
    return on_cpu


def joined(mode: str, sequence: bool, ranks: list[Any]) -> Tensors:
    """The whole tensors of the results of all ranks."""
    dims = {
        ("column", False): {"y": 1, "dx": None, "dw": 0},
        ("column", True): {"y": 1, "dx": 0, "dw": 0},
        ("row", False): {"y": None, "dx": 1, "dw": 1},
        ("row", True): {"y": 0, "dx": 1, "dw": 1},
    }[mode, sequence]
    whole = {}
    for name, dim in dims.items():
        parts = [each[name] for each in ranks]
        if dim is None:
            assert torch.equal(*parts), f"{name} differs between the ranks"
        whole[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return whole


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("place", MODES)
def test_two_ranks_compute_what_one_rank_computes(
    results: dict[str, list[Any]], place: str, name: str
) -> None:
    ranks = results[f"{place}, {name}"]
    assert isinstance(ranks[0], dict), ranks[0][1]
    expected = on_one_rank(MODES[place][0], name)
    found = joined(*MODES[place], ranks)
    for what, value in found.items():
        error = (value - expected[what]).norm() / expected[what].norm()
        # Where scales are equal only the order of sums differs. FP8 products of a GPU's forward
        # are added with 14 bits ("fast accumulation").
        limit = EPSILONS.get(name.partition(" ")[0], 1e-5 if device_type() == "cpu" else 2**-11)
        assert error < limit, f"{what}: {error}"


@pytest.mark.parametrize("name", [name for name in recipes() if name != "unquantized"])
@pytest.mark.parametrize("place", ["column sequence", "row sequence"])
def test_gathered_operands_have_the_bytes_and_scales_of_one_rank(
    results: dict[str, list[Any]], place: str, name: str
) -> None:
    expected = on_one_rank(MODES[place][0], name)["operands"]
    is_quantized = name.endswith(" None")
    if place == "column sequence":
        wanted = ["quantized_linear first", *["quantized_wgrad second"] * is_quantized]
    else:
        wanted = ["quantized_dgrad first", "quantized_wgrad first"] if is_quantized else []
    for each in results[f"{place}, {name}"]:
        for operand in wanted:
            for mine, other in zip(each["operands"][operand], expected[operand], strict=True):
                assert torch.equal(mine, other), operand
