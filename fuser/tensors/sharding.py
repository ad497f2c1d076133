"""Shards of quantized parameters: the rows that one rank of ``fully_shard`` (FSDP2) keeps.

A shard is a quantized tensor of this rank's rows. A write to it, such as an optimizer's, is
quantized as a write to the whole parameter would be: an amax of the whole tensor is reduced over
the ranks that have its rows. ``tensors/gathering.py`` makes the whole parameter of the shards.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fuser.doors import PASSES
from fuser.errors import InputError
from fuser.formats import ceil_div
from fuser.tensors.base import USAGES, QuantizedTensor
from fuser.tensors.dispatch import HANDLERS, aten, new_zeros
from fuser.tensors.quantizer import Quantizer, RankRows, quantized_parts
from fuser.torch_private import (
    FSDP2,
    free_with,
    fsdp_caller,
    fsdp_params,
    gathered_tensor,
    reshards_after_forward,
)


@dataclass(eq=False)
class Sharding:
    """What a shard knows of the parameter that it is a part of; shared by all views of the shard.

    The rows are split over ``group``, None for one rank; it is not pickled. ``rows`` is the number
    of rows of the shard, as a matrix. Rows of zeros may follow, so that the shards of all ranks are
    equally large.
    """

    group: torch.distributed.ProcessGroup | None
    rows: int
    is_exact: bool
    """Whether the bytes of shards, and their scales, are those of the whole parameter."""
    high_precision_init_val: torch.Tensor | None = None
    """The shard's rows of the values before quantization, if they were kept."""
    is_agreed: bool = False
    """Whether the ranks were found to have one scale, in a format with one for the tensor."""
    has_new_bytes: bool = False
    """Whether bytes and their scale were copied into the shard since it was last gathered."""
    backward_reads: set[str] = field(default_factory=set)
    """The copies that backwards to come read, as the ops said in their forward."""

    def __deepcopy__(self, memo: dict[int, object]) -> Sharding:
        return replace(self, backward_reads=set())  # the group itself cannot be copied

    def write(self, quantizer: Quantizer, values: torch.Tensor) -> RankRows:
        """A write to this shard: its amax is reduced, if the format has one."""
        self.is_agreed = True
        return RankRows(quantizer, values, self.group if self.is_exact and self.ranks > 1 else None)

    @property
    def ranks(self) -> int:
        """The number of ranks that have rows of the parameter."""
        return size_of(self.group)


def _new_zeros(func: object, tensor: Any, shape: list[int], **kwargs: Any) -> Any:
    is_asked = isinstance(tensor, QuantizedTensor) and not kwargs.keys() - {"pin_memory"}
    shard = _zeros_of_shard(tensor, shape) if is_asked else None
    return new_zeros(func, tensor, shape, **kwargs) if shard is None else shard


HANDLERS[aten.new_zeros.default] = _new_zeros


def _zeros_of_shard(tensor: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor | None:
    """Zeros for a shard of ``tensor`` if ``fully_shard`` is asking, or ``tensor`` is a shard."""
    sharding, quantizer = tensor._sharding, tensor._quantizer
    if sharding is None:
        param = fsdp_caller("FSDPParam", "_init_sharded_param")
        if param is None:
            return None
        sharding, quantizer = _new_sharding(tensor, param), tensor._usage()
    zeros = torch.zeros(tuple(shape), dtype=tensor.dtype, device=tensor.device)
    if tensor._sharding is None:
        kept = _usage_of_shard(tensor, quantizer, sharding.is_exact)
    else:
        kept = {usage: tensor._has(usage) for usage in USAGES}
    shard: QuantizedTensor = quantizer.unbound().with_usage(**kept)(zeros)
    shard._quantizer = quantizer
    shard._sharding = sharding
    return shard


def shard_of_values(
    values: torch.Tensor, quantizer: Any, group: Any, shape: Sequence[int], *, is_kept: bool = False
) -> QuantizedTensor:
    """This rank's shard of a parameter of ``shape``, quantized from its ``values``.

    ``quantizer`` is that of the whole parameter; ``group`` the ranks that have rows of it, which
    all call this. ``is_kept``: keep a copy of the values on the CPU.
    """
    (shard,) = shards_of_values([(values, quantizer, shape)], group)
    if is_kept:
        shard._sharding.high_precision_init_val = values.detach().cpu().clone()
    return shard


def shards_of_values(
    parameters: Sequence[tuple[torch.Tensor, Quantizer, Sequence[int]]],
    group: torch.distributed.ProcessGroup | None,
    joints: Sequence[Hashable] = (),
    known: dict[Any, Any] | None = None,
) -> list[QuantizedTensor]:
    """This rank's shards of several parameters, given as arguments of :func:`shard_of_values`.

    One reduction for all amaxes; so all ranks of ``group`` give the parameters in the same order.
    ``joints``: of each parameter, as of :class:`Part`. ``known``: what earlier calls noted of the
    same parameters, whose launches are repeated.
    """
    shardings, writes = [], []
    joints = joints or [None] * len(parameters)
    for (values, quantizer, shape), joint in zip(parameters, joints, strict=True):
        whole = quantizer.tensor_class(
            {}, tuple(shape), values.dtype, torch.device("meta"), quantizer
        )
        is_whole = is_exact(whole, quantizer, size_of(group))
        sharding = Sharding(group, values.shape[:-1].numel(), is_whole)
        of_shard = quantizer.with_usage(**_usage_of_shard(whole, quantizer, is_whole))
        shardings.append(sharding)
        writes.append(sharding.write(of_shard, values)._replace(joint=joint))

    def made() -> tuple[tuple[torch.Tensor | None, ...], ...]:
        return tuple([tuple(shard.buffers().values()) for shard in quantized_parts(writes)])

    sources = [write.values for write in writes]
    if known is None or not all(quantizer.is_repeatable for _, quantizer, _ in parameters):
        rows = made()
    else:
        which = tuple([None if joint is None else joints.index(joint) for joint in joints])
        arguments = (which, *[(quantizer, tuple(shape)) for _, quantizer, shape in parameters])
        groups = () if group is None else (group,)
        _, rows = PASSES.guest.repeated_launches(known, arguments, sources, made, groups)
    shards = []
    for row, sharding, (values, quantizer, _) in zip(rows, shardings, parameters, strict=True):
        kind = quantizer.tensor_class
        buffers = dict(zip(kind.buffer_names, row, strict=True))
        shard = kind(buffers, tuple(values.shape), values.dtype, values.device, quantizer)
        shard._sharding = sharding
        shards.append(shard)
    return shards


class Gathered(NamedTuple):
    """Who gathers a parameter: torch's ``FSDPParam``, and its group.

    While it gathers, also the ``FSDPState`` of the module whose pass reads the parameter; None if a
    user asks for it.
    """

    param: Any
    group: Any
    state: Any = None


def gathered_by(parameters: Sequence[torch.Tensor]) -> list[Gathered]:
    """Who gathers these parameters, of those that ``fully_shard`` gathers."""
    if FSDP2 not in sys.modules:
        return []
    for parameter in parameters:
        if parameter not in _gatherers:
            gatherer = _find_gatherer(parameter)
            if gatherer is not None:  # torch swaps no parameter that has a weak reference
                _gatherers[parameter] = gatherer
    return [Gathered(*(one() for one in _gatherers[p])) for p in parameters if p in _gatherers]


def memory_of(parameters: Sequence[torch.Tensor], before: Any) -> GatheredMemory | None:
    """Answer ``ParameterSource.memory_of``: what ``fully_shard`` gathers into, and frees."""
    gathered = gathered_by(parameters)
    if not gathered:
        return None
    is_same = isinstance(before, GatheredMemory) and before.is_of(gathered)
    return before if is_same else GatheredMemory(gathered)


class GatheredMemory:
    """The memory of gathered parameters, which ``fully_shard`` frees."""

    def __init__(self, gathered: Sequence[Gathered]) -> None:
        self._gathered = gathered
        self._freed: torch.Tensor | None = None  # with the memory of the parameters

    def is_of(self, gathered: Sequence[Gathered]) -> bool:
        """Whether it is that of these."""
        params, others = ([one.param for one in members] for members in (self._gathered, gathered))
        return len(params) == len(others) and all(map(operator.is_, params, others))

    def is_freed_after_forward(self) -> bool:
        """Whether it is freed before the next forward or backward."""
        return any(reshards_after_forward(one.group) for one in self._gathered)

    def lasts(self) -> bool:
        """Whether it has not been freed since :meth:`begin`."""
        return self._freed is not None and self._freed.untyped_storage().size() > 0

    def begin(self) -> None:
        """The memory is there."""
        if self._freed is None:
            self._freed = torch.empty(1, dtype=torch.uint8, device="cpu")
            for one in self._gathered:
                free_with(one.param, self._freed)
        self._freed.untyped_storage().resize_(1)


# By gathered parameter, its ``FSDPParam`` and group, which have references to it.
_gatherers = WeakTensorKeyDictionary()


def _find_gatherer(parameter: torch.Tensor) -> tuple[Any, Any] | None:
    """A gathered parameter has no reference to torch's objects: this looks through all of them."""
    for param, group in fsdp_params():
        if gathered_tensor(param) is parameter:
            return weakref.ref(param), weakref.ref(group)
    return None


def initialise_shard(
    parameter: Any,
    fill: Callable[[torch.Tensor], object],
    make: Callable[..., QuantizedTensor] | None,
    part: tuple[int, Sequence[int]] | None = None,
) -> None:
    """Initialise a sharded parameter in place: ``fill`` it, and quantize this rank's shard.

    ``make`` quantizes the shard's values (:func:`shard_of_values`); None leaves them unquantized.
    ``part`` is the dimension and the ranks of tensor parallelism, whose parts have scales of their
    own; None without it.
    """
    mesh, placements, shape = parameter.device_mesh, parameter.placements, list(parameter.shape)
    if parameter.is_meta:
        raise InputError(
            f"A sharded parameter of shape {tuple(shape)} on the meta device is initialised after "
            "model.to_empty(device=...)."
        )
    split = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    ranks_of = torch.distributed.get_process_group_ranks
    if part is not None and split and ranks_of(mesh.get_group(split[-1])) == list(part[1]):
        split.pop()  # fully_shard splits parts: its dimension of the mesh comes first
        shape[part[0]] //= len(part[1])
    if make is not None and (len(split) > 1 or any(placements[d].dim != 0 for d in split)):
        raise InputError(
            f"A parameter of shape {tuple(parameter.shape)} has the placements {placements}; a "
            "quantized parameter, or its part of a tensor parallel linear, is sharded along "
            "dimension 0, over one dimension of the mesh."
        )
    local = parameter._local_tensor
    values = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    whole = type(parameter).from_local(
        values, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    with torch.no_grad():
        fill(whole)
        if make is None:
            local.copy_(values)
            return
        group = mesh.get_group(split[0]) if split else None
        parameter._local_tensor = make(values, group=group, shape=tuple(shape))


def _new_sharding(tensor: QuantizedTensor, param: Any) -> Sharding:
    """The sharding of ``tensor``, which ``param``, an ``FSDPParam``, divides into shards."""
    description = f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
    if (dim := param.fsdp_placement.dim) != 0:
        raise InputError(
            f"fully_shard was asked to shard {description} along dimension {dim}; a quantized "
            "parameter is sharded along dimension 0."
        )
    other = param.post_forward_mesh_info
    if other is not None and other != param.mesh_info:
        raise InputError(
            f"fully_shard was asked to reshard {description} to {other.shard_mesh_size} ranks "
            "after forward; for a quantized parameter reshard_after_forward is True or False."
        )
    check_is_of_one_format(tensor._quantizer, description)
    group = getattr(param.mesh_info, "shard_process_group", None)
    size = ceil_div(tensor.shape[0], size_of(group))
    start = min(size * (0 if group is None else group.rank()), tensor.shape[0])
    stop = min(start + size, tensor.shape[0])
    values = tensor.get_high_precision_init_val()
    if values is not None:
        values = values[start:stop].clone()
    rows = (stop - start) * tensor.shape[1:-1].numel()
    return Sharding(group, rows, is_exact(tensor, tensor._usage(), size_of(group)), values)


def check_is_of_one_format(quantizer: Quantizer, description: str) -> None:
    """Refuse to shard a parameter whose two copies are in two formats."""
    if quantizer.format.parts is not None:
        raise InputError(
            f"{description} has its copies in two formats, {quantizer.format}, and is not sharded: "
            "make its module outside of quantized_model_init, and weights are sharded unquantized."
        )


def _usage_of_shard(whole: QuantizedTensor, quantizer: Any, is_whole: bool) -> dict[str, bool]:
    """The copies that a shard has, of those that the whole tensor has.

    Only the rowwise copy, if the other is derived after the gathering or if rows cut blocks.
    """
    usage = {name: bool(getattr(quantizer, name)) for name in USAGES}
    if usage["rowwise"] and (whole.derives_columnwise or not is_whole):
        usage["columnwise"] = False
    return usage


def is_exact(
    whole: QuantizedTensor, quantizer: Quantizer, ranks: int, shape: torch.Size | None = None
) -> bool:
    """Whether the bytes of shards are those of the whole tensor, for all of its copies.

    ``shape`` is that of the whole tensor, if ``whole`` is a shard. True if shards are equal and
    whole blocks; of any size if one scale belongs to all rows and the columnwise copy is derived.
    A scale of the whole tensor must be one that a quantizer reduces over ranks.
    """
    shape = whole.shape if shape is None else shape
    rows = shape[:-1].numel()
    if ranks == 1:
        return True
    units = whole._layout.rows
    has_shared_scale = any(name not in units for name in whole.buffer_names)
    if has_shared_scale and type(quantizer).amaxes_of is Quantizer.amaxes_of:
        return False
    if has_shared_scale and whole.derives_columnwise and quantizer.rowwise:
        return True
    if shape[0] % ranks:
        return False
    # A shard has the rowwise copy alone if the other is made from it.
    kept = USAGES[:1] if whole.derives_columnwise and quantizer.rowwise else USAGES
    names = [n for usage in kept if getattr(quantizer, usage) for n in whole._names(usage)]
    return all(rows // ranks % units[name][1] == 0 for name in names if name in units)


def size_of(group: torch.distributed.ProcessGroup | None) -> int:
    return 1 if group is None else int(group.size())
