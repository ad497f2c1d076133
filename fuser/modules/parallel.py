"""Tensor and sequence parallel layers: the modes of their linears, and marks on their norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuser import fused_ops
from fuser.communication import divided, group_size
from fuser.errors import InputError
from fuser.op import BasicOperation, check_parallel_mode


def without_size(layer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` without ``tp_size``; refuse one that is not the size of the group."""
    options = dict(options)
    size = options.pop("tp_size", 1)
    if size != 1:
        group = options.get("tp_group", options.get("tensor_parallel_group"))
        ranks = group_size(layer, group)
        if size != ranks:
            raise InputError(
                f"{layer} got tp_size={size}, and its tp_group has {ranks} "
                f"{'rank' if ranks == 1 else 'ranks'}."
                " Leave tp_size out."
            )
    return options


def check_mode(layer: str, taken: dict[str, Any]) -> None:
    """Refuse an unknown mode, and rows that are sharded without a mode."""
    mode, sequence = taken.get("tensor_parallel_mode"), taken.get("sequence_parallel", False)
    check_parallel_mode(layer, mode, sequence, argument="parallel_mode")


def refuse_row(layer: str, taken: dict[str, Any]) -> None:
    """Refuse a row parallel linear after a norm, which needs all features of its input."""
    if taken.get("tensor_parallel_mode") != "row":
        return
    ranks = group_size(layer, taken.get("tensor_parallel_group"))
    if ranks > 1:
        raise InputError(
            f"{layer} got parallel_mode='row' over {ranks} ranks; its norm reads all "
            "features of the input, of which each rank would have a part. Use 'column'."
        )


def refuse_ranks(layer: str, taken: dict[str, Any]) -> None:
    """Refuse a mode over several ranks, for a layer that runs on one."""
    check_mode(layer, taken)
    mode = taken.get("tensor_parallel_mode")
    ranks = 1 if mode is None else group_size(layer, taken.get("tensor_parallel_group"))
    if ranks > 1:
        raise InputError(
            f"{layer} got {mode} tensor parallelism over {ranks} ranks; in this version of "
            "fuser it runs on one."
            " Leave the argument out."
        )


def modes_of_mlp(
    layer: str, taken: dict[str, Any], ffn_hidden_size: int, *, is_parallel: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the first and of the second linear: column and row parallel.

    Raises InputError if a mode is given for both, if rows are sharded without modes, or if the
    ranks do not divide ``ffn_hidden_size``.
    """
    mode, group = taken.get("tensor_parallel_mode"), taken.get("tensor_parallel_group")
    if mode is not None and group_size(layer, group) > 1:
        raise InputError(
            f"{layer} got parallel_mode={mode!r}, and its two linears have two modes: "
            "set_parallel_mode=True makes the first column and the second row parallel."
            " Use that."
        )
    if is_parallel:
        divided(f"{layer}'s ffn_hidden_size", ffn_hidden_size, group_size(layer, group))
        column, row = ({**taken, "tensor_parallel_mode": mode} for mode in ("column", "row"))
        return column, row
    if mode is None and taken.get("sequence_parallel", False):
        raise InputError(
            f"{layer} got sequence_parallel=True without set_parallel_mode=True, which makes its "
            "first linear column parallel, whose input is gathered, and its second row parallel, "
            "whose output is scattered."
            " Give both."
        )
    check_mode(layer, taken)
    return taken, taken


def mark_norm(norm: BasicOperation, linear: fused_ops.Linear) -> None:
    """Set ``sequence_parallel`` on the parameters of a norm of some rows of a sequence.

    Their gradients are sums over these rows: a trainer adds those of all ranks, as that of
    Megatron-LM does for parameters with this attribute.
    """
    op = linear.members[0]
    if op.sequence_parallel and op.tensor_parallel_size > 1:
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
