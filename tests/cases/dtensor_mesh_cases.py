"""Cases: tensor parallel parts that ``fully_shard`` (FSDP2) shards too, on 2 x 2 ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensor_cases import (
    HIDDEN,
    LIMITS,
    RECIPES,
    WIDTH,
    Case,
    assert_close,
    inputs,
    mlp,
    step,
    values_of,
)
from ranks import device_type
from sharded_models import rank, shared_folder
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fuser
from fuser.distributed import Colwise, Replicated, Rowwise, gather_quantized, init_delayed_scaling
from fuser.recipe import MXFP8BlockScaling

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@functools.cache
def mesh() -> Any:
    return init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))


def place() -> tuple[int, int]:
    """The rank in both dimensions of the mesh."""
    return mesh()["dp"].get_local_rank(), mesh()["tp"].get_local_rank()


def shard(layers: Any, **options: Any) -> Any:
    for layer in (layers[1], layers[3]):
        fully_shard(layer, mesh=mesh()["dp"], **options)
    return fully_shard(layers, mesh=mesh()["dp"], **options)


def by_dtensors(layers: Any, **options: Any) -> Any:
    plan = {"0": Replicated, "1": Colwise, "3": Rowwise}
    plan = {path: style(sequence_parallel=True) for path, style in plan.items()}
    return shard(parallelize_module(layers, mesh()["tp"], plan), **options)


def by_groups(whole: Any, recipe: Any, *, is_gathered_quantized: bool = False) -> Any:
    """The same with parts that are plain tensors, before ``fully_shard``."""
    options = {"tensor_parallel_group": mesh()["tp"], "sequence_parallel": True}
    with fuser.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        layers = fuser.Sequential(
            fuser.RMSNorm(HIDDEN),
            fuser.Linear(HIDDEN, WIDTH, tensor_parallel_mode="column", **options),
            fuser.GELU(),
            fuser.Linear(WIDTH, HIDDEN, tensor_parallel_mode="row", **options),
        )
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            value = dict(whole.named_parameters())[name]
            if isinstance(value, fuser.QuantizedTensor):
                value = value.dequantize()
            parameter.copy_(part(name, value))
    return shard(layers)


def part(name: str, value: torch.Tensor) -> torch.Tensor:
    """The part of a rank of the parameter ``name``."""
    dim = {"1.basic_ops.0.weight": 0, "1.basic_ops.1.bias": 0, "3.basic_ops.0.weight": 1}
    return value.chunk(2, dim[name])[place()[1]] if name in dim else value


def train(name: str, *, is_quantized: bool, has_dtensors: bool) -> None:
    """Three steps on the data of two replicas, compared with one rank."""
    recipe = RECIPES[name]()
    of_weights = recipe if is_quantized else None
    whole = mlp(of_weights)
    layers = by_dtensors(mlp(of_weights)) if has_dtensors else by_groups(whole, of_weights)
    kind = type(layers[1].weight.to_local())
    assert (kind is torch.Tensor) == (not is_quantized)
    dp, tp = place()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, layers)]
    limit = LIMITS[name]
    for turn in range(3):
        outputs = [step(whole, inputs(10 * turn + replica), recipe) for replica in range(2)]
        for parameter in whole.parameters():
            parameter.grad.div_(2)
        x = inputs(10 * turn + dp).chunk(2)[tp].clone().requires_grad_()
        assert_close(step(layers, x, recipe), outputs[dp].chunk(2)[tp], limit)
        if not has_dtensors:  # the trainer's part, with groups
            norm = layers[0].weight.grad.to_local()
            dist.all_reduce(norm, group=mesh()["tp"].get_group())
        for (key, parameter), other in zip(
            layers.named_parameters(), whole.parameters(), strict=True
        ):
            grad = other.grad if has_dtensors else part(key, other.grad)
            assert_close(parameter.grad.full_tensor(), grad, 2 * limit)
        if has_dtensors:
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (whole, layers)]
            assert_close(norms[1].full_tensor(), norms[0], limit)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


for _name in RECIPES:
    for _has_dtensors in (True, False):
        for _is_quantized in (False, True) if _name != "unquantized" else (False,):
            _title = f"{_name}, {'DTensors' if _has_dtensors else 'groups'}"
            _title += ", quantized parameters" if _is_quantized else ""
            CASES[f"training on a mesh is that of one rank [{_title}]"] = functools.partial(
                train, _name, is_quantized=_is_quantized, has_dtensors=_has_dtensors
            )


@case
def mixed_precision_and_kept_gathered_parameters_are_those_of_one_rank() -> None:
    recipe = MXFP8BlockScaling()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for options in ({}, {"reshard_after_forward": False}):
        layers = by_dtensors(mlp(recipe), mp_policy=policy, **options)
        dp, tp = place()
        x = inputs(dp).chunk(2)[tp].bfloat16()
        y = step(layers, x.requires_grad_(), recipe)
        assert y.dtype is torch.bfloat16
        assert all(p.grad.dtype is p.dtype is torch.float32 for p in layers.parameters())
        results.append([y, *(p.grad.full_tensor() for p in layers.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    expected = step(mlp(recipe).bfloat16(), inputs(dp).bfloat16(), recipe)
    assert_close(results[0][0].float(), expected.chunk(2)[tp].float(), 0.02)


def checkpoints(name: str) -> None:
    """From the mesh to one rank and back, and a full state."""
    recipe, folder = RECIPES[name](), shared_folder()
    layers = by_dtensors(mlp(recipe))
    whole = values_of(mlp(recipe))
    limit = 0.04 if recipe is not None else 1e-6
    dcp.save(layers.state_dict(), checkpoint_id=folder)
    if rank() == 0:
        alone = mlp(recipe, seed=9)
        state = alone.state_dict()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        alone.load_state_dict(state)
        found = values_of(alone)
        for key, value in whole.items():
            if "extra" not in key:
                assert_close(found[key], value, limit)
        dcp.save(alone.state_dict(), checkpoint_id=f"{folder}/one", no_dist=True)
    dist.barrier()
    for source in (folder, f"{folder}/one"):
        loaded = by_dtensors(mlp(recipe, seed=9))
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=source)
        loaded.load_state_dict(state)
        for key, value in values_of(loaded).items():
            if "extra" not in key:
                assert_close(value, whole[key], limit)
        step(loaded, inputs(place()[0]).chunk(2)[place()[1]], recipe)
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(layers, options=options)
    for key, part in full.items():
        assert type(part) is torch.Tensor
        if part.numel() and "extra" not in key:
            assert_close(part, whole[key], limit)
    loaded = by_dtensors(mlp(recipe, seed=9))
    set_model_state_dict(loaded, dict(full), options=options)
    for key, value in values_of(loaded).items():
        if "extra" not in key:
            assert_close(value, whole[key], limit)


for _name in RECIPES:
    CASES[f"checkpoints of a mesh [{_name}]"] = functools.partial(checkpoints, _name)


@case
def a_trained_state_of_delayed_scaling_is_loaded_into_a_new_model() -> None:
    recipe, folder = RECIPES["delayed"](), shared_folder()
    dp, tp = place()
    x = inputs(dp).chunk(2)[tp]
    layers = by_dtensors(mlp(None))
    for _ in range(2):
        step(layers, x.clone().requires_grad_(), recipe)
        layers.zero_grad()
    dcp.save(layers.state_dict(), checkpoint_id=folder)
    loaded = init_delayed_scaling(by_dtensors(mlp(None, seed=9)), recipe)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    for m in (layers, loaded):
        step(m, x.clone().requires_grad_(), recipe)
    found, expected = values_of(loaded), values_of(layers)
    assert found.keys() == expected.keys()
    assert sum("extra" in key for key in found) == 2
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key
    for p, other in zip(loaded.parameters(), layers.parameters(), strict=True):
        assert torch.equal(p.grad.full_tensor(), other.grad.full_tensor())


@case
def a_model_on_meta_is_initialised_on_a_mesh() -> None:
    for recipe in (None, MXFP8BlockScaling()):
        with torch.device("meta"):
            layers = by_dtensors(mlp(recipe))
        layers.to_empty(device=device_type())
        torch.manual_seed(rank())
        for module in layers.modules():
            if isinstance(module, (fuser.BasicLinear, fuser.Bias, fuser.RMSNorm)):
                module.reset_parameters()
        whole = mlp()
        whole.load_state_dict(values_of(layers), strict=False)
        for weight in (whole[1].weight, whole[3].weight):
            largest = float(weight.abs().max()) * weight.shape[1] ** 0.5
            assert 0.9 < largest < 1.1
        dp, tp = place()
        x = inputs(dp).chunk(2)[tp]
        expected = step(whole, inputs(dp), recipe).chunk(2)[tp]
        assert_close(step(layers, x, recipe), expected)


@case
def unquantized_parts_are_gathered_quantized() -> None:
    recipe = MXFP8BlockScaling()
    torch.manual_seed(1)
    whole = fuser.Sequential(fuser.Linear(HIDDEN, WIDTH, bias=False))
    layers = fuser.Sequential(
        fuser.Linear(
            *(HIDDEN, WIDTH),
            bias=False,
            tensor_parallel_mode="column",
            tensor_parallel_group=mesh()["tp"],
        )
    )
    dp, tp = place()
    with torch.no_grad():
        layers[0].weight.copy_(whole[0].weight.chunk(2)[tp])
    fully_shard(gather_quantized(layers, recipe), mesh=mesh()["dp"])
    assert_close(step(layers, inputs(dp), recipe), step(whole, inputs(dp), recipe).chunk(2, 1)[tp])
