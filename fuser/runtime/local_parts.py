"""Parameters over several ranks: who answers what the core asks of them.

During a forward a pipeline replaces DTensor parameters by their local tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fuser.basic_ops import BasicLinear, Bias
from fuser.basic_ops.linear_parallel import Parallelism
from fuser.communication import WeakGroup, is_distributed, ranks_of, start_all_reduce
from fuser.doors import PARAMETERS, Fill, ParameterSource
from fuser.errors import InputError, StateError
from fuser.op import BasicOperation
from fuser.precision.amax_reduction import amaxes_over_ranks
from fuser.runtime.call_key import CallKeyReader
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.sharding import initialise_shard, memory_of, shard_of_values
from fuser.torch_private import spec_of
from fuser.wrapper_tensor import WrapperTensor


class _LocalPart(torch.autograd.Function):
    """The local tensor of a ``DTensor``, whose gradient has the placements of the ``DTensor``.

    ``group``: the gradients of its ranks are added. ``reader`` names the op if its backward reads
    the parameter: a write to a ``DTensor`` does not change the version of its local tensor, so
    torch would not notice a write between forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Any, group: Any, reader: str | None) -> torch.Tensor:
        ctx.parameter, ctx.version = parameter, _version(parameter)
        ctx.group = None if group is None else WeakGroup(group)
        ctx.reader = reader
        return _alias_of_local(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        from torch.distributed.tensor import DTensor

        (grad,), spec = grads, spec_of(ctx.parameter)
        if ctx.reader is not None and _version(ctx.parameter) != ctx.version:
            raise StateError(
                f"A DTensor of shape {tuple(spec.shape)}, a parameter of {ctx.reader}, was changed "
                "in place after the forward whose backward runs now: that backward has read the "
                "new values."
                " Write to it after the backward."
            )
        if ctx.group is not None:
            grad = start_all_reduce(grad, ctx.group("a parameter of some rows")).wait()
        whole = DTensor.from_local(
            grad,
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=spec.shape,
            stride=spec.stride,
        )
        return whole, None, None


# As for pipelines: torch's wrapper of ``apply`` is for functorch, and costs 10 us.
_apply: Callable[..., Any] = super(torch.autograd.Function, _LocalPart).apply


def _alias_of_local(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter._local_tensor
    return local.detach() if isinstance(local, WrapperTensor) else local.view_as(local)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def local_parts(
    ops: Sequence[BasicOperation], places: CallKeyReader, parameters: Sequence[torch.Tensor]
) -> contextlib.AbstractContextManager[None] | None:
    """Answer ``ParameterSource.local_parts``: for ``DTensor`` parameters, their local tensors."""
    return _placed(ops, places) if any(map(is_distributed, parameters)) else None


@contextlib.contextmanager
def _placed(ops: Sequence[BasicOperation], places: CallKeyReader) -> Iterator[None]:
    """Put the local tensors of DTensors into the ``places`` of the parameters of ``ops``.

    Refuses a ``DTensor`` that is not placed as its op is sharded; nothing has changed then.
    """
    distributed = [
        (held, name, held[name], op, check_placement(op, name, held[name]))
        for op, held, name in _owned(ops, places)
        if is_distributed(held[name])
    ]
    check_gates(ops)
    try:
        for held, name, parameter, op, group in distributed:
            part: Any
            if parameter.requires_grad and torch.is_grad_enabled():
                part = _apply(parameter, group, None if isinstance(op, Bias) else type(op).__name__)
            else:
                part = _alias_of_local(parameter)
            part.whole_parameter = parameter  # for weights.py
            held[name] = part
        yield
    finally:
        for held, name, parameter, _, _ in distributed:
            part, local = held[name], parameter._local_tensor
            if isinstance(local, QuantizedTensor) and isinstance(part, QuantizedTensor):
                local._quantizer = part._quantizer  # an op may have given it a new state's
            held[name] = parameter


def are_gathered(ops: Sequence[BasicOperation], places: CallKeyReader) -> bool:
    """Whether a parameter is sharded beyond its op's own placement, as ``fully_shard`` does."""
    return any(
        sum(not placement.is_replicate() for placement in held[name].placements)
        > (op.placement_of(name)[0] is not None)
        for op, held, name in _owned(ops, places)
        if is_distributed(held[name])
    )


def _owned(
    ops: Sequence[BasicOperation], places: CallKeyReader
) -> Iterator[tuple[BasicOperation, Any, str]]:
    """The op of each parameter, and its slot: a mapping and the name in it."""
    owners = (op for op, count in zip(ops, places.counts, strict=True) for _ in range(count))
    for op, (held, name) in zip(owners, places.slots, strict=True):
        yield op, held, name


def check_placement(op: BasicOperation, name: str, parameter: Any) -> Any:
    """Check a ``DTensor`` that is parameter ``name`` of ``op``.

    Returns the process group over which its gradient is added; None if it is not.
    """
    kind = type(op).__name__
    if op.accumulates_into_main_grad:
        raise InputError(
            f"{kind}.{name} is a DTensor, and the op was made with accumulate_into_main_grad=True, "
            "which adds the gradient to a buffer of this rank: use a plain tensor as parameter, or "
            "leave that argument out."
        )
    mesh, placements = parameter.device_mesh, parameter.placements
    split = [i for i, p in enumerate(placements) if not p.is_replicate() and mesh.size(i) > 1]
    dim, group = op.placement_of(name)
    if dim is None and not split:
        return _group_of_rows(op, name, mesh)
    ranks = None if dim is None else ranks_of(kind, group)
    if dim is not None and len(split) == 1:
        from torch.distributed.tensor import Shard

        placement = placements[split[0]]
        is_whole_part = type(placement) is Shard and parameter.shape[dim] % len(ranks or ()) == 0
        if is_whole_part and placement.dim == dim:
            mesh_ranks = ranks_of(kind, mesh.get_group(split[0]))
            if mesh_ranks == ranks:
                return None
    expected = (
        "this op is not tensor parallel, and takes a DTensor that every rank has as a whole. Shard "
        "the op too, by parallelize_module with fuser.distributed.Colwise or Rowwise; if "
        "fully_shard has sharded the parameter, call the module that was given to fully_shard."
        if dim is None
        else f"this op takes Shard(dim={dim}), in equal parts, over the ranks {ranks} of its "
        "tensor_parallel_group."
    )
    raise InputError(
        f"{kind}.{name} is a DTensor of shape {tuple(parameter.shape)} with the placements "
        f"{tuple(placements)} on the ranks {mesh.mesh.tolist()}; {expected}"
    )


def _group_of_rows(op: BasicOperation, name: str, mesh: Any) -> Any:
    """The group over which the gradient of a parameter on every rank of ``mesh`` is added."""
    if not op.rows_are_sharded or mesh.size() == 1:
        return None
    if mesh.ndim != 1:
        raise InputError(
            f"{type(op).__name__}.{name} is a DTensor on a mesh of {mesh.ndim} dimensions, and its "
            "op has some rows of a sequence on each rank. Its gradients are added over the mesh, "
            "which must have one dimension."
        )
    return mesh.get_group()


def check_gates(ops: Sequence[BasicOperation]) -> None:
    """Refuse an activation whose gates are not on the ranks of their values.

    Without interleaving an activation takes the first half of its features as gates. If the weight
    before it is a ``DTensor``, each rank has consecutive outputs of the whole linear, and all gates
    are on the first half of the ranks.
    """
    linear: BasicLinear | None = None
    for op in ops:
        if isinstance(op, BasicLinear):
            is_column = op.placement_of("weight")[0] == 0 and is_distributed(op.weight)
            linear = op if is_column else None
            continue
        function = getattr(op, "function", None)
        if linear is None or function is None or not getattr(function, "is_gated", False):
            continue
        if function.interleave is None:
            raise InputError(
                f"{type(op).__name__} gets {linear.local_out_features} consecutive ones of the "
                f"{linear.out_features} outputs of a BasicLinear whose weight is a DTensor. It "
                "would take the first half of these as gates, but the gates are the first half of "
                "all outputs. Use a glu_interleave_size: then gates and values alternate in blocks "
                "of that many outputs."
            )
        linear = None


class ShardedParameters(ParameterSource):
    """Ranks have parts of parameters, and reduce amaxes."""

    parallelism = staticmethod(Parallelism)
    amaxes = staticmethod(amaxes_over_ranks)
    local_parts = staticmethod(local_parts)
    are_gathered = staticmethod(are_gathered)
    memory_of = staticmethod(memory_of)

    def initialise(self, op: Any, name: str, fill: Fill, quantizer: Quantizer | None) -> None:
        make = None
        if quantizer is not None:
            is_kept = op._init.preserve_high_precision_init_val
            make = functools.partial(shard_of_values, quantizer=quantizer, is_kept=is_kept)
        dim, group = op.placement_of(name)
        part = None if dim is None else (dim, ranks_of(type(op).__name__, group))
        initialise_shard(getattr(op, name), fill, make, part)


PARAMETERS.open(ShardedParameters())
