"""Loads of a distributed checkpoint chunk by chunk into a tensor with one scale, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as planners

import fuser
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is emulated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:The function definition"),
]

RECIPES = [Float8CurrentScaling(), DelayedScaling(), NVFP4BlockScaling()]
WIDTH, ROWS, CHUNK = 64, 64, 16


class Chunks(default_planner.DefaultSavePlanner):
    """Saves lists of tensors as the chunks of one, as several ranks do."""

    def set_up_planner(self, state_dict: Any, *_: Any, **__: Any) -> None:
        self.state_dict, self.is_coordinator = state_dict, True

    def create_local_plan(self) -> planners.SavePlan:
        items = []
        for name, chunks in self.state_dict.items():
            rows = sum(len(chunk) for chunk in chunks)
            for start, chunk in zip(starts(chunks), chunks, strict=True):
                data = planners.TensorWriteData(
                    chunk=meta.ChunkStorageMetadata(torch.Size([start, 0]), chunk.shape),
                    properties=meta.TensorProperties.create_from_tensor(torch.empty(0)),
                    size=torch.Size([rows, WIDTH]),
                )
                index = meta.MetadataIndex(name, torch.Size([start, 0]))
                kind = planners.WriteItemType.SHARD
                items.append(planners.WriteItem(index=index, type=kind, tensor_data=data))
        return planners.SavePlan(items, planner_data={})

    def create_global_plan(self, all_plans: Any) -> Any:
        return default_planner.create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: planners.SavePlan) -> planners.SavePlan:
        return new_plan

    def resolve_data(self, write_item: Any) -> Any:
        chunks = self.state_dict[write_item.index.fqn]
        at = dict(zip(starts(chunks), chunks, strict=True))
        return at[write_item.index.offset[0]]


def starts(chunks: Sequence[torch.Tensor]) -> list[int]:
    return [sum(len(before) for before in chunks[:i]) for i in range(len(chunks))]


def weight(recipe: Recipe, scale: float, rows: int = ROWS) -> torch.Tensor:
    """A quantized weight whose values have this scale."""
    with fuser.quantized_model_init(recipe=recipe):
        linear = fuser.BasicLinear(WIDTH, rows, device="cpu")
    with torch.no_grad():
        linear.weight.copy_(torch.randn(rows, WIDTH) * scale)
    return linear.weight.detach()


def saved(folder: Path, chunks: Sequence[torch.Tensor]) -> Path:
    copies = {"weight": [chunk.clone() for chunk in chunks]}
    dcp.save(copies, checkpoint_id=folder, planner=Chunks(), no_dist=True)
    return folder


def in_chunks(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor[i : i + CHUNK] for i in range(0, ROWS, CHUNK)]


def load(target: torch.Tensor, folder: Path, planner: Any = None) -> None:
    dcp.load({"weight": target}, checkpoint_id=folder, planner=planner, no_dist=True)


def values(tensor: Any) -> torch.Tensor:
    dequantized: torch.Tensor = tensor.dequantize()
    return dequantized


@pytest.mark.parametrize("recipe", RECIPES)
def test_chunks_of_one_tensor_are_loaded_with_their_bytes(recipe: Recipe, tmp_path: Path) -> None:
    """One checkpoint after another, of larger and of smaller values."""
    large, small, target = (weight(recipe, scale) for scale in (7.0, 0.01, 1.0))
    folders = [saved(tmp_path / name, in_chunks(w)) for name, w in (("a", large), ("b", small))]
    for which in (0, 1, 0, 0, 1):
        load(target, folders[which])
        assert torch.equal(values(target), values((large, small)[which]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_chunks_that_were_quantized_apart_keep_their_values(recipe: Recipe, tmp_path: Path) -> None:
    parts = [weight(recipe, 1.0 + i, rows=CHUNK) for i in range(4)]
    target = weight(recipe, 1.0)
    load(target, saved(tmp_path / "parts", parts))
    for part, found in zip(parts, in_chunks(target), strict=True):
        error = (values(found) - values(part)).norm() / values(part).norm()
        assert error < 0.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_unquantized_chunk_before_quantized_ones_keeps_its_values(
    recipe: Recipe, tmp_path: Path
) -> None:
    small, target = weight(recipe, 0.01), weight(recipe, 1.0)
    first, *others = in_chunks(small)
    load(target, saved(tmp_path / "mixed", [values(first), *others]))
    error = (values(target) - values(small)).norm() / values(small).norm()
    assert error < 0.05


def test_after_chunks_writes_have_the_scale_that_came_with_them(tmp_path: Path) -> None:
    large, target = weight(DelayedScaling(), 700.0), weight(DelayedScaling(), 1.0)
    load(target, saved(tmp_path / "large", in_chunks(large)))
    quantizer: Any = target._quantizer
    assert torch.equal(quantizer.scale, large._scale_inv.reciprocal())
    assert quantizer.scale < 1
    assert not quantizer.amax.any()


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), Float8BlockScaling()])
def test_chunks_that_cut_blocks_change_both_copies(recipe: Recipe, tmp_path: Path) -> None:
    source, target = weight(recipe, 7.0), weight(recipe, 1.0)
    load(target, saved(tmp_path / "blocks", in_chunks(source)))
    for usage in ("rowwise", "columnwise"):
        found: Any = target.with_usage(usage)
        error = (values(found) - values(source)).norm() / values(source).norm()
        assert error < 0.05


class Fails(default_planner.DefaultLoadPlanner):
    """A load that ends after its second chunk."""

    committed = 0

    def commit_tensor(self, *_: Any) -> None:
        self.committed += 1
        if self.committed == 2:
            raise OSError("the disk is full")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_load_after_one_that_failed_has_its_bytes(recipe: Recipe, tmp_path: Path) -> None:
    large, small, target = (weight(recipe, scale) for scale in (7.0, 0.01, 1.0))
    folder = saved(tmp_path / "a", in_chunks(large))
    with pytest.raises(BaseException, match="the disk is full"):
        load(target, folder, Fails())
    load(target, saved(tmp_path / "b", in_chunks(small)))
    assert torch.equal(values(target), values(small))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_load_into_rows_of_a_tensor_keeps_the_others(recipe: Recipe, tmp_path: Path) -> None:
    whole, part = weight(recipe, 1.0), weight(recipe, 1.0, rows=2 * CHUNK)
    before = values(whole)[: 2 * CHUNK]
    load(whole[2 * CHUNK :], saved(tmp_path / "part", [part[:CHUNK], part[CHUNK:]]))
    error = (values(whole)[: 2 * CHUNK] - before).norm() / before.norm()
    assert error < 0.05
    loaded = values(whole)[2 * CHUNK :]
    assert (loaded - values(part)).norm() <= 0.05 * values(part).norm()
