"""Cases: the demos' models on several ranks against one process with the whole batch."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from paths import EXAMPLES
from torch.distributed.tensor import DTensor

sys.path.append(str(EXAMPLES))

import train_moe

from fuser.demo import checkpoints, parallel, train_lm
from fuser.demo.corpus import Corpus

Case = Callable[[], None]
TINY = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch_size": 4, "steps": 6}
EXPERTS = {"experts": 4, "balance": 0.0}  # the balancing loss is that of a rank's own tokens
# Runs differ by rounding alone; under a recipe parts of a tensor also have scales of their own, and
# then a gradient is nearly as close to the unquantized one as that of one process is.
EXACT, NEARLY = 1e-5, 1.5
# The losses of the few steps of a run, in nats per byte.
LOSS, LOSS_QUANTIZED = 1e-5, 5e-3

train_lm.VALIDATION_BATCHES = 2  # of 16, to be fast


class Silent:
    """Reports that print nothing; a run that dies at a step raises KeyboardInterrupt."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.steps, self.dies_at = 0, dies_at

    def advanced(self, done: float) -> None:
        self.steps += 1
        if self.steps == self.dies_at:
            raise KeyboardInterrupt

    def reported(self, step: int, loss: float, rate: float) -> None: ...

    def validated(self, step: int, loss: float) -> None: ...

    def close(self) -> None: ...


def script_of(flags: dict[str, Any]) -> Any:
    """The script that has these flags: experts make it that of mixtures."""
    return train_moe if "experts" in flags else train_lm


def options_of(flags: dict[str, Any]) -> Any:
    """The options of this rank's run."""
    world = parallel.World(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    return script_of(flags).Options(**TINY, **flags, world=world)


def options_alone(flags: dict[str, Any]) -> Any:
    """The options of one process that does the same."""
    alone = {"tp": 1, "sp": False, "ep": 1, "fsdp": "none"}
    return replace(options_of(flags), world=parallel.World(), **alone)


def corpus() -> Corpus:
    generator = torch.Generator().manual_seed(3)
    texts = (
        torch.randint(97, 123, (size,), dtype=torch.uint8, generator=generator)
        for size in (5000, 700)
    )
    return Corpus(Path(), *texts)


def made(flags: dict[str, Any], options: Any) -> tuple[Any, parallel.Ranks]:
    """The model for these options, and its ranks."""
    model, _ = script_of(flags).make_models(options)
    ranks = parallel.Ranks(options)
    ranks.parallelize(model)
    if ranks.mesh is None and "experts" not in flags:
        for block in model.feed_forward:
            parallel.interleave(block)
    ranks.shard(model)
    return model, ranks


def gradients(model: Any, ranks: parallel.Ranks, options: Any) -> dict[str, torch.Tensor]:
    """Gradients of the first batch, and those after clipping, of whole parameters."""
    _, batch = next(train_lm.training_batches(corpus().training, options, ranks))
    with options.autocast():
        loss = train_lm.next_byte_loss(ranks.trained(model), batch)
    (loss + model.auxiliary_loss()).backward()
    found = {f"{name}, raw": value for name, value in whole_gradients(model, ranks).items()}
    ranks.clip_gradients(model, max_norm=0.1)
    return found | whole_gradients(model, ranks)


def whole_gradients(model: Any, ranks: parallel.Ranks) -> dict[str, torch.Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    if ranks.mesh is not None:
        grads = checkpoints.whole({"": grads}, model, ranks)[""]
    return {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        for name, grad in grads.items()
    }


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def train(flags: dict[str, Any], options: Any, dies_at: int | None = None) -> Any:
    """A run of the script's training loop."""
    model, ranks = made(flags, options)
    return train_lm.train("fuser", model, corpus(), options, Silent(dies_at), ranks=ranks)


@functools.cache
def gradients_alone(alone: Any) -> dict[str, torch.Tensor]:
    """Of one process, whose options several modes share."""
    return gradients(*made(flags_of(alone), alone), alone)


@functools.cache
def run_alone(alone: Any) -> Any:
    return train(flags_of(alone), alone)


def flags_of(options: Any) -> dict[str, Any]:
    """What :func:`script_of` asks of flags."""
    return EXPERTS if hasattr(options, "experts") else {}


def agrees_with_one_process(flags: dict[str, Any]) -> None:
    options, alone = options_of(flags), options_alone(flags)
    is_exact = options.recipe == "none"
    found, expected = gradients(*made(flags, options), options), gradients_alone(alone)
    assert found.keys() == expected.keys()
    unquantized = expected
    if not is_exact:
        unquantized = gradients_alone(replace(alone, recipe="none"))
    for name, value in unquantized.items():
        error, usual = (relative_error(of[name], value) for of in (found, expected))
        assert error < EXACT + NEARLY * usual, (name, error, usual)
    run, reference = train(flags, options), run_alone(alone)
    limit = LOSS if is_exact else LOSS_QUANTIZED
    assert run.losses == pytest.approx(reference.losses, abs=limit)
    assert list(run.validation) == list(reference.validation)
    assert list(run.validation.values()) == pytest.approx(
        list(reference.validation.values()), abs=limit
    )
    assert run.losses[-1] < run.losses[0] - 0.1
    assert run.traffic
    assert not reference.traffic


def goes_on_from_a_checkpoint(flags: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """A run that dies is resumed on other ranks, and by one process, as if it had not died."""
    folder = shared_folder()
    saved = options_of(flags | {"checkpoint": folder})
    with pytest.raises(KeyboardInterrupt):
        train(flags, saved, dies_at=5)
    assert [path.name for path in sorted(folder.iterdir())] == ["step-4"]
    expected = train(flags, options_of(flags))
    limit = LOSS if saved.recipe == "none" else LOSS_QUANTIZED
    for changed in (*others, None):
        options = options_alone(flags) if changed is None else options_of(changed)
        run = train(changed or flags, replace(options, resume=folder))
        assert run.start == 4
        assert list(run.steps) == [5, 6]
        assert run.losses == pytest.approx(expected.losses[4:], abs=limit), changed
        assert run.validation[4] == pytest.approx(expected.validation[4], abs=limit), changed


class Clock:
    """A clock that is faster on higher ranks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.1 * (1 + dist.get_rank())
        return self.now


def ranks_with_other_clocks_take_the_same_steps() -> None:
    with mock.patch.object(train_lm, "time", Clock()):
        run = train({}, replace(options_of({}), seconds=3.0))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (run.learning_rates, run.losses, run.validation))
    assert all(of_rank == everyone[0] for of_rank in everyone)
    assert 3 < len(run.losses) < 30


def shared_folder() -> Path:
    """A new folder, the same on all ranks."""
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    return Path(names[0])


MODES: dict[str, dict[str, Any]] = {
    "replicas": {},
    "fsdp": {"fsdp": "values"},
    "fsdp quantized, current": {"fsdp": "quantized", "recipe": "current"},
    "tp": {"tp": 2},
    "tp sp": {"tp": 2, "sp": True},
    "tp sp, mxfp8": {"tp": 2, "sp": True, "recipe": "mxfp8"},
    "tp sp fsdp": {"tp": 2, "sp": True, "fsdp": "values"},
    "mixture fsdp": EXPERTS | {"fsdp": "values"},
    "ep": EXPERTS | {"ep": 2},
    "ep, mxfp8": EXPERTS | {"ep": 2, "recipe": "mxfp8"},
    "ep fsdp": EXPERTS | {"ep": 2, "fsdp": "values"},
}
RESUMED: dict[str, tuple[str, list[str]]] = {
    "tp sp": ("tp sp", ["fsdp", "tp sp fsdp"]),
    "fsdp quantized": ("fsdp quantized, current", []),
    "ep": ("ep", ["mixture fsdp", "ep fsdp"]),
}
CASES: dict[str, Case] = {
    **{
        f"{name} agrees with one process": functools.partial(agrees_with_one_process, flags)
        for name, flags in MODES.items()
    },
    "ranks with other clocks take the same steps": ranks_with_other_clocks_take_the_same_steps,
    **{
        f"{name} goes on from a checkpoint": functools.partial(
            goes_on_from_a_checkpoint, MODES[mode], [MODES[other] for other in others]
        )
        for name, (mode, others) in RESUMED.items()
    },
}
