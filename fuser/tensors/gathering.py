"""Gathering of quantized parameters that ``fully_shard`` (FSDP2) has sharded.

Before a forward or a backward, the bytes and scales of the copies that the pass reads are gathered
from all ranks. If a parameter stays gathered from forward to backward, the backward adds the copy
that it reads: it makes it of the other copy, or gathers it. The buffers of the whole parameter are
made once; their memory is freed and allocated again by ``fully_shard``. So a copy that an op saved
in forward, and that was not gathered there, is right in backward.

If the rows of a rank cut blocks of the format, or are fewer on the last rank, the values of shards
are gathered in their nominal dtype, and quantized after that.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fuser.errors import StateError
from fuser.recipe import Recipe
from fuser.tensors.base import USAGES, QuantizedTensor, fitted
from fuser.tensors.quantizer import Quantizer
from fuser.tensors.sharding import Gathered, Sharding, check_is_of_one_format, is_exact, size_of
from fuser.torch_private import (
    forwards_without_backward,
    fsdp_callers,
    graph_task,
    is_last_backward,
    local_shard,
    reshards_after_forward,
    saved_tensor_hooks,
    training_state,
)


class _OfForward(NamedTuple):
    """The shard of which a forward gathered the rowwise copy alone, and its version then."""

    shard: QuantizedTensor
    version: int | None


@dataclass(eq=False)
class Gathering:
    """The buffers of a whole parameter, whose memory exists from an unshard to a reshard.

    ``shard`` is this rank's, which an optimizer writes. ``memory`` has a flat tensor for each
    buffer, by name; ``freed`` is the list of tensors that ``fully_shard`` frees at a reshard.
    """

    shape: torch.Size
    shard: QuantizedTensor
    buffers: dict[str, torch.Tensor | None]
    memory: dict[str, torch.Tensor]
    backward_reads: set[str]
    group: weakref.ref[Any]  # torch's group of parameters
    freed: list[torch.Tensor] = field(default_factory=list)
    of_forward: _OfForward | None = None
    """Set if the backward of that forward gets the parameter as it is, and may read columns."""
    recipe: Recipe | None = None
    """That under which ops read the parameter, if its shards are unquantized."""

    def allocated(self, name: str) -> torch.Tensor:
        """The buffer ``name``, with memory."""
        memory, buffer = self.memory[name], self.buffers[name]
        assert buffer is not None
        storage, size = memory.untyped_storage(), memory.numel() * memory.itemsize
        if storage.size() != size:
            storage.resize_(size)
        return buffer

    @property
    def held(self) -> tuple[str, ...]:
        """The names of the buffers that are in memory."""
        return tuple(
            [n for n, m in self.memory.items() if m.untyped_storage().nbytes() or not m.numel()]
        )

    @property
    def quantizer(self) -> Any:
        """That of the shard, which writes of an optimizer use; None if it is not quantized."""
        return getattr(self.shard, "_quantizer", None)

    @property
    def joint(self) -> Any:
        """The weights that ``gather_quantized`` took with it as one; None if it is alone."""
        state = getattr(self.shard, "_state", None)
        return state and state.joint

    def holds(self, names: Sequence[str]) -> bool:
        """Whether the copy with these buffers is in memory."""
        memory = self.memory[names[0]]
        return memory.untyped_storage().nbytes() > 0 or memory.numel() == 0

    def free(self, names: Sequence[str]) -> None:
        """Free the memory of the copy with these buffers."""
        for name in names:
            self.memory[name].untyped_storage().resize_(0)

    def complete(self, usage: str) -> bool:
        """In backward, make the copy that the forward left out; False if there is none to make.

        It is made of the other copy, or gathered. Of torch's group of parameters all copies that
        backward reads are gathered together; all ranks read the first of them at the same place.
        StateError if the shard was written since the forward.
        """
        if not (usage == "columnwise" and self.lacks_columns() and _is_in_backward()):
            return False
        _complete(self)
        return True

    def lacks_columns(self) -> bool:
        """Whether this parameter has stayed gathered since a forward that left out this copy."""
        if self.of_forward is None:
            return False
        shard = self.of_forward.shard
        return self.holds(shard.rowwise_names) and not self.holds(shard.columnwise_names)

    def note_backward_read(self, usage: str | None) -> None:
        """Note the copy that a backward will read, None for no copy, for the gathering before it.

        If the forward may be recomputed, which hooks on saved tensors tell, the backward needs
        every copy.
        """
        is_hooked = saved_tensor_hooks(False) is not None
        self.backward_reads.update(USAGES if is_hooked else (usage or NOTHING,))

    def waits_for_columns(self) -> bool:
        """Whether an op said that its backward reads this copy, which is not made here."""
        assert self.of_forward is not None
        derives = self.of_forward.shard.derives_columnwise
        return "columnwise" in self.backward_reads and not derives


def gather_noted_reads(tensors: Sequence[torch.Tensor | None]) -> None:
    """At the start of a backward, of gathered parameters: make the copies that it reads.

    For an op that may read none of them, as a grouped linear without rows: other ranks, which have
    rows, gather. No effect on other tensors.
    """
    for tensor in tensors:
        gathering: Gathering | None = getattr(tensor, "_gathering", None)
        if gathering is not None and "columnwise" in gathering.backward_reads:
            gathering.complete("columnwise")


NOTHING = "nothing"


# -- the framework's calls -------------------------------------------------------------


class _Sent(NamedTuple):
    """What is being gathered."""

    copies: tuple[str, ...]  # those that the pass reads
    names: tuple[str, ...]  # of buffers, or VALUES
    shapes: tuple[tuple[int, ...], ...]  # of this rank's parts
    scale: torch.Tensor | None  # of the whole tensor, if it did not travel with the bytes
    gathering: Gathering


VALUES = "values"


class KnownSignature:
    """A method that knows its signature, for which torch asks at each gathering.

    Without it inspect makes one each time, which takes 21 us.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        _, *others = inspect.signature(function).parameters.values()
        self._signature = inspect.Signature(others)

    def __get__(self, tensor: Any, owner: type) -> Callable[..., Any]:
        if tensor is None:
            return self._function
        bound = functools.partial(self._function, tensor)
        bound.__signature__ = self._signature  # type: ignore[attr-defined]
        return bound


def fsdp_pre_all_gather(
    self: QuantizedTensor,
    mesh: object,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: torch.nn.Module,
    mp_policy: object,
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """What ``fully_shard`` gathers: the bytes and scales of this shard that the pass needs."""
    return gather(self, calling_gatherer(self), outer_size)


def gather(
    shard: QuantizedTensor, gathered: Gathered, outer_size: torch.Size
) -> tuple[tuple[torch.Tensor, ...], _Sent]:
    """What :func:`fsdp_pre_all_gather` returns of a shard."""
    param, group, _ = gathered
    if shard._sharding is None:  # made by the user, or loaded in place of the parameter
        check_is_of_one_format(shard._quantizer, f"A parameter of shape {tuple(outer_size)}")
        ranks_group = getattr(param.mesh_info, "shard_process_group", None)
        is_whole = is_exact(shard, shard._quantizer, size_of(ranks_group), outer_size)
        shard._sharding = Sharding(ranks_group, shard._matrix()[0], is_whole)
    sharding, quantizer = shard._sharding, shard._quantizer
    copies = _copies_read(quantizer, sharding, gathered)
    ranks, is_even = sharding.ranks, outer_size[0] % sharding.ranks == 0
    gathering = _gathering(shard, param, group, outer_size, ranks)
    gathering.shard, gathering.backward_reads = local_shard(param), sharding.backward_reads
    gathering.of_forward = gathering.recipe = None
    if copies == USAGES[:1] and quantizer.columnwise and not reshards_after_forward(group):
        version = None if shard.is_inference() else shard._version
        gathering.of_forward = _OfForward(shard, version)
    gathering.freed.clear()
    param.all_gather_outputs = []
    if ranks == 1:  # the framework gathers nothing then
        empty = torch.empty(0, dtype=torch.uint8, device=param.device)
        return (empty,), _Sent(copies, (), (), None, gathering)
    padded, scale = tuple(param.padded_sharded_param_size), None
    if sharding.is_exact:
        _agree(shard, param, sharding)
        parts = _parts(shard, copies, padded, is_even=is_even)
        if not is_even:
            scale = _scale_of_first(shard, sharding)
    else:
        source = shard.high_precision_source
        parts = {VALUES: fitted(shard._values() if source is None else source, 0, padded[0])}
    units = shard._layout.rows
    for name, part in parts.items():
        memory = gathering.memory.get(name)
        is_shared = memory is not None and name in units and units[name][0] == 0
        if is_shared and memory.numel() == part.numel() * ranks:  # type: ignore[union-attr]
            param.all_gather_outputs.append(memory)
        else:
            options = {"dtype": part.dtype, "device": param.device}
            output = torch.empty(part.numel() * ranks, **options)
            output.untyped_storage().resize_(0)  # allocated later, on the stream that computes
            param.all_gather_outputs.append(output)
    shapes = tuple(tuple(part.shape) for part in parts.values())
    return tuple(parts.values()), _Sent(copies, tuple(parts), shapes, scale, gathering)


def calling_gatherer(tensor: torch.Tensor) -> Gathered:
    """Torch's objects that call ``fsdp_pre_all_gather`` of ``tensor`` now; other code may not."""
    callers = fsdp_callers()
    param, group = callers.get("FSDPParam"), callers.get("FSDPParamGroup")
    if param is None or group is None:
        raise StateError(
            f"fsdp_pre_all_gather of a {type(tensor).__name__} of shape {tuple(tensor.shape)} was "
            f"called by other code than fully_shard of torch {torch.__version__}, or by a version "
            "of it that is not known here; the copies that the pass reads are unknown."
        )
    return Gathered(param, group, callers.get("FSDPState"))


def fsdp_post_all_gather(
    self: QuantizedTensor,
    all_gather_outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> Any:
    """Make the whole parameter for ``fully_shard``, or fill the buffers of ``out``, made before.

    StateError if bytes with other scales were copied into some of the shards, in a format with one
    scale for the whole tensor.
    """
    sent: _Sent = metadata
    gathering = sent.gathering
    if not sent.names:
        _fill_from_shard(self, sent)
    elif sent.names == (VALUES,):
        _fill_from_values(self, sent, all_gather_outputs[0])
    else:
        _fill_from_parts(self, sent, all_gather_outputs)
    gathering.freed.extend(gathering.memory.values())
    if out is not None:
        return None
    buffer = next(iter(gathering.memory.values()))
    quantizer = self._quantizer
    whole = type(self)(gathering.buffers, gathering.shape, param_dtype, buffer.device, quantizer)
    whole._gathering = gathering
    return whole, gathering.freed


# -- this rank's part --------------------------------------------------------------------


def _copies_read(quantizer: Quantizer, sharding: Sharding, gathered: Gathered) -> tuple[str, ...]:
    """The copies that a gathered parameter needs until it is resharded.

    Forward reads the rowwise copy. Backward reads what the ops said in their forward. If they said
    nothing, as ops of others do, it needs every copy; if they said that they read none, any copy
    will do. A parameter that stays gathered after backward needs every copy, and one that stays
    gathered after forward is completed in backward, unless that would gather its values twice.
    """
    copies = tuple([name for name in USAGES if getattr(quantizer, name)])
    if len(copies) == 1:
        return copies
    _, group, running = gathered
    state = training_state(group)
    # After a forward that failed, the state is still that of a forward, also for ``unshard()``.
    if state == "FORWARD" and running is not None and not _is_in_backward():
        if not forwards_without_backward(group):  # no backward is still to come
            sharding.backward_reads.clear()
        if reshards_after_forward(group) or sharding.is_exact:
            return ("rowwise",)
    # By ``set_is_last_backward`` forwards before it are over. If not, this gathering may be a
    # prefetch for a backward that was before, which the next forward then takes.
    is_last = running is None or is_last_backward(running)
    if state == "PRE_BACKWARD" and group.reshard_after_backward and is_last:
        reads = sharding.backward_reads
        read = tuple([name for name in copies if name in reads])
        return read or (copies[:1] if reads else copies)
    return copies


def _is_in_backward() -> bool:
    return graph_task() != -1


def _gathering(
    shard: QuantizedTensor, param: Any, group: Any, shape: torch.Size, ranks: int
) -> Gathering:
    """The buffers of the whole parameter: those of the gatherings before, or new ones."""
    known = _gathering_of(param)
    if known is not None:
        return known
    quantizer, held = shard._quantizer, shard.buffers()
    layout = shard._layout.shapes(shape.numel() // shape[-1], shape[-1])
    unused = {n for usage in USAGES if not getattr(quantizer, usage) for n in shard._names(usage)}
    # Of the two copies, each of which a shard may lack, buffers in the same place are alike.
    pairs = zip(shard.rowwise_names, shard.columnwise_names, strict=True)
    other = {name: pair[name == pair[0]] for pair in pairs for name in pair}
    buffers: dict[str, torch.Tensor | None] = dict.fromkeys(layout)
    memory: dict[str, torch.Tensor] = {}
    with torch.inference_mode(False):
        for name in (name for name in layout if name not in unused):
            like = held[name] if held[name] is not None else held[other[name]]
            assert like is not None
            size = torch.Size(layout[name])
            numel = size.numel()
            if shard.derives_columnwise and name == shard.rowwise_names[0]:
                # The last rank sends as many rows as the others, and they follow its own.
                numel = max(numel, param.padded_sharded_param_size.numel() * ranks)
            flat = torch.empty(numel, dtype=like.dtype, device=param.device)
            memory[name], buffers[name] = flat, flat[: size.numel()].view(size)
            flat.untyped_storage().resize_(0)  # allocated later, on the stream that computes
    return Gathering(shape, shard, buffers, memory, set(), weakref.ref(group))


def _gathering_of(param: Any) -> Gathering | None:
    """The gathering of the parameter of torch's ``FSDPParam``, after its first one."""
    whole = getattr(param, "_unsharded_param", None)
    gathering: Gathering | None = getattr(
        getattr(whole, "_local_tensor", whole), "_gathering", None
    )
    return gathering


def _parts(
    shard: QuantizedTensor, copies: Sequence[str], padded: tuple[int, ...], *, is_even: bool
) -> dict[str, torch.Tensor]:
    """What this rank sends of the buffers of ``copies``, by name, without the scales of padding.

    ``padded`` is the shape of a shard of the first rank. Shards that are not even send bytes in
    that shape, and no scale of the whole tensor.
    """
    sent = ("rowwise",) if shard.derives_columnwise else copies
    left_out = {n for usage in USAGES if usage not in sent for n in shard._names(usage)}
    units, rows = shard._layout.rows, torch.Size(padded[:-1]).numel()
    columns = shard._layout.unpadded_columns(padded[-1])
    parts: dict[str, torch.Tensor] = {}
    for name, buffer in shard.buffers().items():
        if buffer is None or name in left_out:
            continue
        if name not in units:
            if is_even:
                parts[name] = buffer.detach()
            continue
        (dim, unit), part = units[name], buffer.detach()
        if name in columns:
            part = part.narrow(1 - dim, 0, columns[name])
        parts[name] = fitted(part, dim, rows // unit).contiguous()
        if not is_even:
            parts[name] = parts[name].view(padded)
    return parts


# -- scales of a whole tensor ---------------------------------------------------------------


def _agree(shard: QuantizedTensor, param: Any, sharding: Sharding) -> None:
    """Before the first gathering, if ranks were initialised with different values: one scale.

    All ranks call this, once for each parameter.
    """
    scales = _scales_of_tensor(shard)
    if sharding.is_agreed or not scales:
        return
    sharding.is_agreed = True
    mine = torch.cat(scales)
    scales_of_ranks = [torch.empty_like(mine) for _ in range(sharding.ranks)]
    torch.distributed.all_gather(scales_of_ranks, mine, group=sharding.group)
    if not all(torch.equal(one, scales_of_ranks[0]) for one in scales_of_ranks):
        kept = local_shard(param)  # not the copy of it on another device
        kept.quantize_(kept._values())
        if kept is not shard:
            shard.quantize_(kept._values().to(shard.device))
    sharding.has_new_bytes = False


def _scales_of_tensor(shard: QuantizedTensor) -> list[torch.Tensor]:
    """The scales or amaxes that belong to all rows, in a fixed order; those that the shard has."""
    units, buffers = shard._layout.rows, shard.buffers()
    names = (name for name in shard.buffer_names if name not in units)
    return [buffer for name in names if (buffer := buffers[name]) is not None]


def _scale_of_first(shard: QuantizedTensor, sharding: Sharding) -> torch.Tensor:
    """The scale of the first rank, which always has rows; all ranks call this.

    ``fully_shard`` takes no part of another shape than the shard's if shards are not even.
    """
    (scale_here,) = _scales_of_tensor(shard)
    scale = scale_here.clone()
    torch.distributed.broadcast(scale, group=sharding.group, group_src=0)
    if shard.numel():
        _check_scales(shard, sharding, torch.stack([scale, scale_here]))
    return scale


def _check_scales(shard: QuantizedTensor, sharding: Sharding, scales: torch.Tensor) -> None:
    """Refuse different scales, if bytes were copied into this shard; costs a synchronization."""
    if not sharding.has_new_bytes:
        return
    by_rank = scales.view(len(scales), -1)
    differs = (by_rank != by_rank[0]).any(0)
    for column in by_rank[:, differs].t().tolist():
        different = sorted({one for one in column if not math.isnan(one)})
        if len(different) < 2:
            continue
        raise StateError(
            f"The shards of a {type(shard).__name__} have the scales or amaxes "
            f"{', '.join(f'{one:.9g}' for one in different)}, and the whole tensor has one. Bytes "
            "of another tensor were copied into some of the shards: copy the parts of one tensor "
            "into all of them, or values that are not quantized."
        )
    sharding.has_new_bytes = False


# -- the whole parameter -----------------------------------------------------------------


def _fill_from_shard(shard: QuantizedTensor, sent: _Sent) -> None:
    """The whole parameter on one rank."""
    source, gathering = shard.compact(), sent.gathering
    for name, buffer in source.buffers().items():
        if buffer is not None and name in gathering.memory:
            gathering.allocated(name).copy_(buffer)
    _derive(shard, sent)


def _fill_from_values(shard: QuantizedTensor, sent: _Sent, values: torch.Tensor) -> None:
    """The copies that are wanted, quantized from the gathered values."""
    gathering = sent.gathering
    usage = {name: name in sent.copies for name in USAGES}
    whole = values.view(-1, *gathering.shape[1:])[: gathering.shape[0]]
    quantized = shard._quantizer.unbound().with_usage(**usage)(whole)
    for name, buffer in quantized.buffers().items():
        if buffer is not None:
            gathering.allocated(name).copy_(buffer)
    values.untyped_storage().resize_(0)


def _fill_from_parts(shard: QuantizedTensor, sent: _Sent, outputs: Sequence[torch.Tensor]) -> None:
    """The whole parameter from the bytes and scales of all ranks; padding of scales is zero."""
    gathering, sharding = sent.gathering, shard._sharding
    assert sharding is not None
    units = shard._layout.rows
    if sent.scale is not None:
        gathering.allocated("_scale_inv").copy_(sent.scale)
        if sent.scale.is_cuda:  # it was allocated on the stream of the collectives
            sent.scale.record_stream(torch.cuda.current_stream())
    for name, output, shape in zip(sent.names, outputs, sent.shapes, strict=True):
        memory = gathering.memory[name]
        if output.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
            continue  # gathered in place
        buffer = gathering.allocated(name)
        parts = output.view(sharding.ranks, *shape)
        if name not in units:
            _check_scales(shard, sharding, parts)
            buffer.copy_(parts[0])
        else:
            dim = units[name][0]
            if dim == 1:
                parts = parts.transpose(0, 1)
            sizes = (*shape[:dim], sharding.ranks * shape[dim], *shape[dim + 1 :])
            if sizes != tuple(buffer.shape):
                buffer.zero_()
            target = buffer[tuple(map(slice, sizes))]
            target.view(*sizes[:dim], sharding.ranks, *shape[dim:]).copy_(parts)
        output.untyped_storage().resize_(0)
    _derive(shard, sent)


def _derive(shard: QuantizedTensor, sent: _Sent) -> None:
    """Make the columnwise copy of the rowwise one, in a format where it can be, if it is read."""
    gathering = sent.gathering
    if not shard.derives_columnwise or gathering.buffers[shard.rowwise_names[0]] is None:
        return
    if "columnwise" in sent.copies:
        out = {name: gathering.allocated(name) for name in shard.columnwise_names}
        shard.derive("columnwise", gathering.buffers, out)
    if "rowwise" not in sent.copies:
        gathering.free(shard.rowwise_names)


# -- copies that a backward adds -------------------------------------------------------------


def _complete(first: Gathering) -> None:
    """Make the columnwise copy of ``first``, or gather it with all of its group that are read."""
    group = first.group()
    assert group is not None
    assert first.of_forward is not None
    completed = [first]
    if first.of_forward.shard.derives_columnwise:
        _derive(first.of_forward.shard, _Sent(USAGES, (), (), None, first))
    else:
        pairs = [(param, _gathering_of(param)) for param in group.fsdp_params]
        lacking = [(p, g) for p, g in pairs if g is not None and g.lacks_columns()]
        read = [(p, g) for p, g in lacking if g is first or g.waits_for_columns()]
        _gather_columns(read)
        completed = [gathering for _, gathering in read]
    for gathering in completed:
        assert gathering.of_forward is not None
        # As for a parameter that is gathered for backward, whose module then frees it.
        if group.reshard_after_backward and "rowwise" not in gathering.backward_reads:
            gathering.free(gathering.of_forward.shard.rowwise_names)
        gathering.of_forward = None


def _gather_columns(gathered: Sequence[tuple[Any, Gathering]]) -> None:
    """Gather the columnwise copies of parameters of one group, each with its ``FSDPParam``."""
    sends: list[tuple[QuantizedTensor, _Sent]] = []
    parts: list[torch.Tensor] = []
    for param, gathering in gathered:
        assert gathering.of_forward is not None
        shard, version = gathering.of_forward
        if version is not None and shard._version != version:
            raise StateError(
                f"A shard of a {type(shard).__name__} of shape {tuple(gathering.shape)} was "
                "written between a forward and its backward, which gathers the columnwise copy "
                "that belongs to the values of the forward. Write it after the backward, or give "
                "fully_shard reshard_after_forward=True, with which backward reads new values."
            )
        parts_of_shard = _parts(
            shard, USAGES[1:], tuple(param.padded_sharded_param_size), is_even=True
        )
        shapes = tuple(tuple(part.shape) for part in parts_of_shard.values())
        sends.append((shard, _Sent(USAGES[1:], tuple(parts_of_shard), shapes, None, gathering)))
        parts += parts_of_shard.values()
    sharding = sends[0][0]._sharding
    sent_bytes = torch.cat([part.view(-1).view(torch.uint8) for part in parts])
    every = sent_bytes.new_empty(sharding.ranks, len(sent_bytes))
    _all_gather(every.view(-1), sent_bytes, group=sharding.group)
    pieces = torch.split(every, [part.nbytes for part in parts], dim=1)
    outputs = [
        piece.contiguous().view(part.dtype) for piece, part in zip(pieces, parts, strict=True)
    ]
    for shard, sent in sends:
        count = len(sent.names)
        _fill_from_parts(shard, sent, outputs[:count])
        del outputs[:count]


_all_gather = getattr(torch.distributed, "all_gather_single", None) or (
    torch.distributed.all_gather_into_tensor
)


QuantizedTensor.fsdp_pre_all_gather = KnownSignature(fsdp_pre_all_gather)  # type: ignore[assignment]
QuantizedTensor.fsdp_post_all_gather = fsdp_post_all_gather
