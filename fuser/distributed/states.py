"""Preparing a model for ``torch.distributed.checkpoint``: DTensors, and states of full size."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from fuser.basic_ops import GroupedLinear, MoeDispatch
from fuser.communication import ranks_of
from fuser.errors import InputError
from fuser.op import BasicOperation, modules_and_ops
from fuser.recipe import DelayedScaling
from fuser.tensors import QuantizedTensor


def distribute_parameters(module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
    """Make the parameters of a model that was built with process groups DTensors, in place.

    Parts of weights and biases become local tensors of DTensors with ``Shard(0)``, column
    parallel, or ``Shard(1)``, row parallel; other parameters of ops get ``Replicate()``. Then
    ``torch.distributed.checkpoint`` knows the whole parameters. Nothing is communicated, and
    memory is shared. Call it before ``fully_shard`` and before optimizers are made.

    Parameters
    ----------
    module
        Its ops and layers are sharded over the ranks of the mesh, or not sharded.
    device_mesh
        A mesh of one dimension.

    Returns
    -------
    ``module``.

    Raises
    ------
    InputError
        If an op is sharded over other ranks, if a parameter is a ``DTensor`` or another wrapper
        already, or if ranks of the mesh have different experts; nothing has changed then.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    ranks = ranks_of("distribute_parameters", device_mesh)
    dims: dict[int, tuple[Parameter, int | None]] = {}
    ops = _ops_of(module)
    dispatches = [op for op in ops if isinstance(op, MoeDispatch) and op.expert_parallel_size > 1]
    for op in ops:
        if isinstance(op, GroupedLinear):
            _check_experts(op, dispatches, ranks)
        for name, parameter in op._parameters.items():
            if parameter is None:
                continue
            dim, group = op.placement_of(name)
            kind = f"{type(op).__name__}.{name} of shape {tuple(parameter.shape)}"
            if not isinstance(parameter, QuantizedTensor) and type(parameter) is not Parameter:
                raise InputError(
                    f"distribute_parameters got {kind}, which is a {type(parameter).__name__}; it "
                    "takes plain and quantized parameters, before gather_quantized and fully_shard."
                )
            op_ranks = ranks if dim is None else ranks_of(kind, group)
            if op_ranks != ranks:
                raise InputError(
                    f"distribute_parameters got a mesh of the ranks {ranks}, and {kind} is a part "
                    f"over the ranks {op_ranks}."
                    " Give it the mesh that the model was sharded over."
                )
            dims[id(parameter)] = parameter, dim
    distributed = {
        key: Parameter(
            DTensor.from_local(
                parameter.detach(),
                device_mesh,
                [Replicate() if dim is None else Shard(dim)],
                run_check=False,
            ),
            requires_grad=parameter.requires_grad,
        )
        for key, (parameter, dim) in dims.items()
    }
    for op in ops:  # layers mark the norms of some rows of a sequence
        marked = (getattr(p, "sequence_parallel", False) for p in op._parameters.values())
        op.rows_are_sharded = op.rows_are_sharded or any(marked)
    for owner in (*module.modules(), *ops):
        for name, parameter in owner._parameters.items():
            if id(parameter) in distributed:
                owner._parameters[name] = distributed[id(parameter)]
    return module


def _check_experts(op: GroupedLinear, dispatches: list[MoeDispatch], ranks: list[int]) -> None:
    """Refuse a linear of experts of this rank, if other ranks of the mesh have other experts."""
    for dispatch in dispatches:
        spread = ranks_of("MoeDispatch", dispatch.expert_parallel_group)
        if len(set(spread) & set(ranks)) > 1:
            raise InputError(
                f"distribute_parameters got a mesh of the ranks {ranks}, and a model with "
                f"GroupedLinear({op.num_groups}, {op.in_features}, {op.out_features}) and a "
                f"MoeDispatch of {dispatch.num_experts} experts on the ranks {spread}: each rank "
                "has other experts, by the same names. Give it the other parts of the model; for "
                "a checkpoint, make one DTensor of the experts of all ranks, in the state."
            )


def init_delayed_scaling(module: torch.nn.Module, recipe: DelayedScaling) -> torch.nn.Module:
    """Make the states of delayed scaling that a training step under ``recipe`` would make.

    ``torch.distributed.checkpoint`` loads into tensors of the saved size: call it before a
    checkpoint of a trained model is loaded into a new one. States that exist stay.

    Parameters
    ----------
    module
        Its ops get states for forward and backward, with scales of 1 and histories of zeros.
    recipe
        That of the training.

    Returns
    -------
    ``module``.

    Raises
    ------
    InputError
        If the recipe is another one than ``DelayedScaling``.
    """
    if not isinstance(recipe, DelayedScaling):
        raise InputError(
            f"init_delayed_scaling got the recipe {recipe!r}, whose scales are no state; it takes "
            "a DelayedScaling."
        )
    for op in _ops_of(module):
        for mode in ("forward", "backward"):
            if op.num_quantizers(mode):
                state, dtypes, device = op._delayed_state(mode, recipe)
                state.prepare(recipe, dtypes, device)
    return module


def _ops_of(module: torch.nn.Module) -> list[BasicOperation]:
    """The basic ops of a model, also those of layers."""
    return [op for _, op in modules_and_ops(module) if isinstance(op, BasicOperation)]
