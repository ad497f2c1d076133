"""Tensor and sequence parallel layers: the modes of their linears, and marks on their norms."""

from __future__ import annotations

from typing import Any

from fuser import fused_ops
from fuser.communication import group_size
from fuser.errors import InputError
from fuser.op import BasicOperation


def without_size(layer: str, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` without ``tp_size``, which must be the size of the group.

    Raises
    ------
    InputError
    """
    options = dict(options)
    size = options.pop("tp_size", 1)
    if size != 1:
        group = options.get("tp_group", options.get("tensor_parallel_group"))
        ranks = group_size(layer, group)
        if size != ranks:
            raise InputError(
                f"{layer} got tp_size={size}, and its tp_group has {ranks} "
                f"{'rank' if ranks == 1 else 'ranks'}."
            )
    return options


def refuse_row(layer: str, taken: dict[str, Any]) -> None:
    """Refuse a row parallel linear after a norm, which needs all features of its input.

    Raises
    ------
    InputError
    """
    if taken.get("tensor_parallel_mode") != "row":
        return
    ranks = group_size(layer, taken.get("tensor_parallel_group"))
    if ranks > 1:
        raise InputError(
            f"{layer} got parallel_mode='row' over {ranks} ranks; its norm reads all "
            "features of the input, of which each rank would have a part. Use 'column'."
        )


def modes_of_mlp(
    layer: str, taken: dict[str, Any], is_parallel: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the first and of the second linear: column and row parallel.

    Raises
    ------
    InputError
        If a mode is given for both.
    """
    mode = taken.get("tensor_parallel_mode")
    if mode is not None and group_size(layer, taken.get("tensor_parallel_group")) > 1:
        raise InputError(
            f"{layer} got parallel_mode={mode!r}, and its two linears have two modes: "
            "set_parallel_mode=True makes the first column and the second row parallel."
        )
    if not is_parallel:
        return taken, taken
    return (
        {**taken, "tensor_parallel_mode": "column"},
        {**taken, "tensor_parallel_mode": "row"},
    )


def mark_norm(norm: BasicOperation, linear: fused_ops.Linear) -> None:
    """Set ``sequence_parallel`` on the parameters of a norm of some rows of a sequence.

    Their gradients are sums over these rows: a trainer adds those of all ranks, as that of
    Megatron-LM does for parameters with this attribute.
    """
    op = linear.members[0]
    if op.sequence_parallel and op.tensor_parallel_size > 1:
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
