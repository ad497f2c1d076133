"""Checkpoints of a training run, which another number of ranks can load."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

import fuser
from fuser.demo.parallel import Ranks, local, own_experts

# One entry for each tensor of the optimizer, by the name of its parameter.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def folders(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, by step."""
    paths = (path for path in folder.glob("step-*") if path.name[5:].isdigit())
    return sorted(paths, key=lambda path: int(path.name[5:]))


def problem_with(options: Any) -> str | None:
    """An error message if options of checkpoints do not fit, otherwise None."""
    if options.checkpoint not in (None, options.resume) and folders(options.checkpoint):
        return (
            f"--checkpoint {options.checkpoint} has {folders(options.checkpoint)[-1].name} of "
            "another run: name another folder, or go on with that run by --resume."
        )
    if options.resume is None:
        return None
    if not (paths := folders(options.resume)):
        return f"--resume {options.resume} has no checkpoint; --checkpoint writes folders step-N."
    done = int(paths[-1].name[5:])
    if options.seconds is None and done >= options.steps:
        return f"--resume {options.resume} is after {done} steps, and --steps is {options.steps}."
    return None


def save(folder: Path, step: int, model: Any, optimizer: Any, ranks: Ranks) -> None:
    """Save the state after ``step`` steps as ``folder/step-N``, and remove earlier ones.

    The folder gets this name after it is complete; a run that ends earlier leaves the one before.
    """
    part, earlier = folder / f"step-{step}.part", folders(folder)
    if ranks.is_first:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    barrier(ranks)
    saved = whole(state(model, optimizer), model, ranks)
    with without_warning():
        dcp.save(saved, checkpoint_id=part, no_dist=ranks.mesh is None)  # type: ignore[attr-defined]
    if ranks.is_first:
        part.rename(folder / f"step-{step}")
        for path in earlier:
            shutil.rmtree(path)
    barrier(ranks)


def load(folder: Path, model: Any, optimizer: Any, ranks: Ranks) -> int:
    """Load the last checkpoint of ``folder`` into model and optimizer; returns its steps."""
    recipe = ranks.options.make_recipe()
    if isinstance(recipe, fuser.recipe.DelayedScaling):
        fuser.distributed.init_delayed_scaling(model, recipe)
    last = folders(folder)[-1]
    held = state(model, optimizer)
    loaded = whole(held, model, ranks)
    with without_warning():
        dcp.load(loaded, checkpoint_id=last, no_dist=ranks.mesh is None)  # type: ignore[attr-defined]
    for key, values in held.items():  # tensors were loaded in place
        values.update({k: v for k, v in loaded[key].items() if not isinstance(v, torch.Tensor)})
    set_state_dict(
        model,
        optimizer,
        model_state_dict=held["model"],
        optim_state_dict=held["optimizer"],
        options=FLAT,
    )
    return int(last.name[5:])


def state(model: Any, optimizer: Any) -> dict[str, dict[str, Any]]:
    """The state of a run, by names that do not depend on the number of ranks."""
    of_model, of_optimizer = get_state_dict(model, optimizer, options=FLAT)
    return {"model": of_model, "optimizer": of_optimizer}


def whole(state: dict[str, dict[str, Any]], model: Any, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """``state`` with the experts of all ranks as one tensor, of which this rank has a part."""
    own = {id(p) for block in model.feed_forward for p in own_experts(block)}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in own]

    def of_all(name: str, value: Any) -> Any:
        is_part = isinstance(value, torch.Tensor) and value.dim() == 3
        if not is_part or not any(expert in name for expert in names):
            return value
        placement = Shard(1) if isinstance(value, DTensor) else Replicate()
        return DTensor.from_local(local(value), ranks.mesh, [placement, Shard(0)], run_check=False)

    return {key: {n: of_all(n, v) for n, v in values.items()} for key, values in state.items()}


def barrier(ranks: Ranks) -> None:
    """Wait for all ranks."""
    if ranks.mesh is not None:
        dist.barrier()


@contextlib.contextmanager
def without_warning() -> Iterator[None]:
    """Without torch's warning that one process saves and loads alone, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
