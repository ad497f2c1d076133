"""``transformer_engine.pytorch.tensor.utils``: FP8 weights that an optimizer of shards writes.

The bytes of weights are parts of one buffer, of which each rank writes a shard; then the ranks
gather the buffer. Weights have one scale each (``Float8CurrentScaling``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fuser.errors import InputError
from fuser.te.pytorch.distributed import get_distributed_world_size
from fuser.tensors import Float8CurrentScalingQuantizer, Float8Tensor

__all__ = [
    "cast_master_weights_to_fp8",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]


def replace_raw_data(tensor: Float8Tensor, new_raw_data: torch.Tensor) -> None:
    """Move the bytes of ``tensor`` into ``new_raw_data``, uint8, with as many elements.

    Raises
    ------
    InputError
        If the tensor has other scales than one, or the buffer does not fit.
    """
    data = _bytes("replace_raw_data", tensor)
    if new_raw_data.dtype != torch.uint8 or new_raw_data.numel() != data.numel():
        raise InputError(
            f"replace_raw_data got {new_raw_data.numel()} elements of {new_raw_data.dtype} for a "
            f"tensor of {data.numel()} bytes; give as many, of torch.uint8."
        )
    with torch.no_grad():
        new_raw_data.detach().copy_(data.view(new_raw_data.shape))
    initial = tensor.get_high_precision_init_val()
    tensor._data = new_raw_data.detach().view(data.shape)
    if initial is not None:  # the values are the same
        tensor.set_high_precision_init_val(initial)


def quantize_master_weights(
    model_weights: Sequence[Float8Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write this rank's shards of weights, with the scales of the whole weights.

    Parameters
    ----------
    model_weights
        The weights, whose scales are set on every rank.
    master_weights
        For each this rank's shard of new values, flat; None without one. Rounded to the dtype of
        the weight first.
    start_offsets
        For each shard its first place in the flat weight.
    group
        The ranks that have the shards, over which amaxes are reduced.
    fsdp_shard_model_weights
        For each the bytes to write in place of the weight's, of the size of the shard.
    manual_post_all_gather_processing
        Accepted: transposed copies are dropped, and made again where they are read.

    Raises
    ------
    InputError
        If a weight does not have a scale of its current values, or the lists differ in length.
    """
    targets = fsdp_shard_model_weights or [None] * len(model_weights)
    lists = (model_weights, master_weights, start_offsets, targets)
    if len({len(each) for each in lists}) > 1:
        raise InputError(
            f"quantize_master_weights got lists of {[len(each) for each in lists]} elements; give "
            "lists of one length."
        )
    if not model_weights:
        return
    data = [_bytes("quantize_master_weights", weight) for weight in model_weights]
    shards = [
        None if master is None or not master.numel() else master.detach().to(weight.dtype).flatten()
        for weight, master in zip(model_weights, master_weights, strict=True)
    ]
    amaxes = torch.zeros(len(data), dtype=torch.float32, device=data[0].device)
    for amax, shard in zip(amaxes, shards, strict=True):
        if shard is not None:
            amax.copy_(shard.abs().amax())
    if get_distributed_world_size(group) > 1:
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    parts = zip(
        model_weights, data, shards, start_offsets, targets, torch.split(amaxes, 1), strict=True
    )
    for weight, whole, shard, start, target, amax in parts:
        values = whole.new_zeros(1, dtype=weight.dtype) if shard is None else shard
        quantizer = weight._quantizer.with_usage(rowwise=True, columnwise=False)
        quantized: Any = quantizer.with_amaxes(amax)(values[None])
        with torch.no_grad():
            weight._scale_inv.copy_(quantized._scale_inv)
            if shard is None:
                continue
            if target is None:
                assert start is not None
                target = whole.view(-1)[start : start + shard.numel()]
            target.view(torch.uint8).copy_(quantized._data.view(target.shape))
    post_all_gather_processing(model_weights)


cast_master_weights_to_fp8 = quantize_master_weights


def post_all_gather_processing(model_weights: Sequence[Float8Tensor]) -> None:
    """Say that bytes of weights were written by a collective: transposed copies are dropped."""
    for weight in model_weights:
        weight._data = _bytes("post_all_gather_processing", weight)


def _bytes(name: str, weight: Float8Tensor) -> torch.Tensor:
    """The bytes of a weight with one scale, of its current values."""
    data = weight._data if isinstance(weight, Float8Tensor) else None
    if data is None or not isinstance(weight._quantizer, Float8CurrentScalingQuantizer):
        raise InputError(
            f"{name} got a {type(weight).__name__} of {getattr(weight, '_quantizer', None)}; "
            "shards are written of weights with one scale of their current values. Use "
            "Float8CurrentScaling, 'tensorwise' in Megatron-LM."
        )
    return data
