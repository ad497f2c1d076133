"""Quantized parameters on four ranks: shards on two that two others repeat, and few rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import sharded_models as cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import device_type
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fuser
from fuser.errors import InputError


def three_steps_on_a_mesh_of_replicas_are_those_of_the_unsharded_model(name: str) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    layers = cases.sharded(cases.model(name), mesh=mesh)
    local = cases.shard_of(layers[0].weight)
    assert local.shape[0] == layers[0].weight.shape[0] // 2
    assert local._sharding.group is mesh.get_group("shard")
    cases.train(name, layers, cases.model(name), steps=2)


def some_ranks_have_no_rows(name: str) -> None:
    """5 rows: 2, 2, 1 and none."""
    recipe = cases.RECIPES[name]()
    layer, own = (cases.linear(recipe, 32, 5) for _ in range(2))
    cases.sharded(layer)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (layer, own)]
    assert cases.shard_of(layer[0].weight).shape[0] == [2, 2, 1, 0][cases.rank()]
    x = torch.randn(32, 32)
    for _ in range(2):
        for m in (layer, own):
            cases.loss_of(m, x, recipe).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        (weight,) = cases.unsharded(layer)
        if name == "current":
            cases.assert_same_bytes(weight, own[0].weight)
        assert isinstance(weight, fuser.QuantizedTensor)
        torch.testing.assert_close(
            weight.dequantize(), own[0].weight.dequantize(), rtol=0.3, atol=0.05
        )
        cases.resharded(layer)


def rows_that_do_not_divide_on_a_mesh_of_replicas(name: str) -> None:
    """5 rows: 3 and 2, on the first two ranks and on the last two."""
    recipe = cases.RECIPES[name]()
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    layer, own = (cases.linear(recipe, 32, 5) for _ in range(2))
    cases.sharded(layer, mesh=mesh)
    assert cases.shard_of(layer[0].weight).shape[0] == [3, 2, 3, 2][cases.rank()]
    x = torch.randn(32, 32)
    for _ in range(2):
        for m in (layer, own):
            cases.loss_of(m, x, recipe).backward()
            with torch.no_grad():
                for parameter in m.parameters():
                    parameter.sub_(parameter.grad, alpha=4.0)
                    parameter.grad = None
        (weight,) = cases.unsharded(layer)
        cases.assert_same_bytes(weight, own[0].weight)
        cases.resharded(layer)


def resharding_to_another_mesh_is_refused(name: str) -> None:
    layers = cases.model(name)
    sentence = cases.said(
        InputError, lambda: cases.sharded(layers, reshard_after_forward=2, each_layer=False)
    )
    assert "MXFP8Tensor of shape (128, 64) to 2 ranks after forward" in sentence


def checkpoints_are_loaded_with_their_bytes_on_other_numbers_of_ranks(name: str) -> None:
    """From four to three, to two and to one, and from each of them to four. NVFP4's not to three,
    whose rows cut blocks."""
    recipe, folder = cases.RECIPES[name](), cases.shared_folder()
    layers = cases.sharded(cases.model(name))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    for seed in range(3):  # delayed scaling has a scale of its own then
        cases.loss_of(layers, cases.inputs(layers, seed), recipe).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(layers.state_dict(), checkpoint_id=f"{folder}/4")
    expected = [weight.detach().clone() for weight in cases.unsharded(layers)]
    cases.resharded(layers)

    def loaded(source: str, ranks: int) -> list[Any]:
        """The weights after a load on so many ranks into other values; saved, if others saved."""
        mesh = DeviceMesh(device_type(), list(range(ranks)))  # all ranks make it
        if cases.rank() >= ranks:
            return []
        other = cases.changed(cases.model(name))
        if name == "delayed":
            fuser.distributed.init_delayed_scaling(other, recipe)
        group = None
        if ranks > 1:
            group = mesh.get_group()
            cases.sharded(other, mesh=mesh)
        how = {"no_dist": True} if ranks == 1 else {"process_group": group}
        state = other.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{source}", **how)
        other.load_state_dict(state)
        if ranks < 4:
            dcp.save(other.state_dict(), checkpoint_id=f"{folder}/{ranks}", **how)
        weights = cases.unsharded(other) if ranks > 1 else [x.weight for x in cases.linears(other)]
        return [weight.detach().clone() for weight in weights]

    weights = []
    for ranks in (2, 1) if name == "nvfp4" else (3, 2, 1):
        weights += loaded("4", ranks)
        dist.barrier()
        weights += loaded(str(ranks), 4)
    for found, own in zip(weights, itertools.cycle(expected), strict=False):
        cases.assert_same_bytes(found, own)


CASES: dict[str, Callable[[], None]] = {
    f"{function.__name__} [{name}]": functools.partial(function, name)
    for function, names in (
        (
            three_steps_on_a_mesh_of_replicas_are_those_of_the_unsharded_model,
            ("current", "mxfp8", "nvfp4"),
        ),
        (resharding_to_another_mesh_is_refused, ("mxfp8",)),
        (
            checkpoints_are_loaded_with_their_bytes_on_other_numbers_of_ranks,
            ("current", "delayed", "nvfp4"),
        ),
        (some_ranks_have_no_rows, tuple(cases.RECIPES)),
        (rows_that_do_not_divide_on_a_mesh_of_replicas, ("current",)),
    )
    for name in names
}
