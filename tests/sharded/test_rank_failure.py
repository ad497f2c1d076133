"""A rank that dies: the others end with an error, and the last checkpoint is whole."""

from __future__ import annotations

import datetime
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from needs import skip_without_ports
from ranks import end_with_parent, start_method
from torch.distributed.fsdp import fully_shard

import fuser
from fuser.recipe import Float8CurrentScaling

RECIPE = Float8CurrentScaling()
TIMEOUT = 20.0
DIED = 3  # the exit status of a rank that dies


def plain() -> Any:
    torch.manual_seed(0)
    with fuser.quantized_model_init(recipe=RECIPE):
        return fuser.Sequential(
            fuser.Linear(64, 128, device="cpu"), fuser.GELU(), fuser.Linear(128, 64, device="cpu")
        )


def sharded() -> Any:
    return fully_shard(plain())


def tensor_parallel() -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cpu", "sequence_parallel": True, "bias": False}
    return fuser.Sequential(
        fuser.Linear(64, 128, tensor_parallel_mode="column", **options),
        fuser.GELU(),
        fuser.Linear(128, 64, tensor_parallel_mode="row", **options),
    )


MODELS = {"fully_shard": sharded, "tensor parallel": tensor_parallel}


def step(model: Any) -> None:
    with fuser.autocast(recipe=RECIPE):
        y = model(torch.ones(32, 64, requires_grad=True))
    y.square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None


def train(rank: int, name: str, end: str, folder: str) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    model = MODELS[name]()
    for _ in range(3):
        step(model)
    if name == "fully_shard":
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/checkpoint")
    dist.barrier()
    if rank == 1:
        while end == "hangs" and not Path(folder, "survivor.pt").exists():
            time.sleep(0.1)
        os._exit(DIED)
    error = "no error"
    try:
        step(model)
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    torch.save(error, f"{folder}/survivor.pt")
    os._exit(0)  # nothing that waits for the other rank


@pytest.mark.parametrize(
    ("name", "end"),
    [("fully_shard", "dies"), ("fully_shard", "hangs"), ("tensor parallel", "dies")],
)
def test_the_others_end_with_an_error_and_the_last_checkpoint_loads(
    name: str, end: str, tmp_path: Path
) -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    skip_without_ports()
    context = torch.multiprocessing.get_context(start_method())
    processes = [
        context.Process(target=train, args=(rank, name, end, str(tmp_path))) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0, DIED]
    error = torch.load(tmp_path / "survivor.pt")
    assert "Error" in error, error
    if name == "fully_shard":
        model = plain()
        state = model.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it loads in one process
            dcp.load(state, checkpoint_id=str(tmp_path / "checkpoint"))
        model.load_state_dict(state)
        before = plain()[0].weight.dequantize()
        assert not torch.equal(model[0].weight.dequantize(), before)
        step(model)
