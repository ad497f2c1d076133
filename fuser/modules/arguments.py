"""Arguments of layers that have two names, or that must be off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

from fuser.communication import GroupArgument
from fuser.errors import InputError, InputTypeError
from fuser.op import ParallelMode

T = TypeVar("T")

# Arguments of a linear op, by their other names.
_LINEAR_NAMES = {
    "parallel_mode": "tensor_parallel_mode",
    "tp_group": "tensor_parallel_group",
    "get_rng_state_tracker": "rng_state_tracker_function",
    "fuse_wgrad_accumulation": "accumulate_into_main_grad",
    "sequence_parallel": "sequence_parallel",
}
# More arguments of other libraries' layers: the value that turns each off, and the reason why
# fuser accepts only that value.
_SHARDING = "a layer runs on one rank"
_OVERLAP = "communication is not overlapped with GEMMs"
OFF: dict[str, tuple[object, str]] = {
    "return_bias": (False, "a layer adds its bias itself"),
    "return_layernorm_output": (False, "a layer returns its output alone"),
    "return_layernorm_output_gathered": (False, "a layer returns its output alone"),
    "parameters_split": (None, "a layer has one weight and one bias for each linear"),
    "delay_wgrad_compute": (False, "a weight's gradient is computed in the backward"),
    "save_original_input": (False, "backward_override of the recipe says what is kept"),
    "symmetric_ar_type": (None, _SHARDING),
    "tp_size": (1, _SHARDING),
    "set_parallel_mode": (False, _SHARDING),
    "checkpoint": (False, "fuser.checkpoint computes any module again"),
    **{
        f"ub_{name}": (False, _OVERLAP)
        for name in (
            *("overlap_ag", "overlap_rs", "overlap_rs_dgrad", "overlap_rs_fprop"),
            *("overlap_ag_fprop", "overlap_ag_dgrad", "bulk_wgrad", "bulk_dgrad"),
        )
    },
}
# Arguments for work that fuser does not do; they change no result.
IGNORED = ("ub_name", "seq_length", "micro_batch_size")


class GroupedOptions(TypedDict, total=False):
    """The names in the tables above and ``tp_size``, for type checkers.

    Without ``delay_wgrad_compute``, which a grouped layer takes.
    """

    parallel_mode: ParallelMode | None
    tensor_parallel_mode: ParallelMode | None
    tp_group: GroupArgument
    tensor_parallel_group: GroupArgument
    tp_size: int
    sequence_parallel: bool
    get_rng_state_tracker: Callable[[], Any] | None
    rng_state_tracker_function: Callable[[], Any] | None
    fuse_wgrad_accumulation: bool
    accumulate_into_main_grad: bool
    set_parallel_mode: bool
    return_bias: bool
    return_layernorm_output: bool
    return_layernorm_output_gathered: bool
    parameters_split: None
    save_original_input: bool
    symmetric_ar_type: None
    checkpoint: bool
    ub_overlap_ag: bool
    ub_overlap_rs: bool
    ub_overlap_rs_dgrad: bool
    ub_overlap_rs_fprop: bool
    ub_overlap_ag_fprop: bool
    ub_overlap_ag_dgrad: bool
    ub_bulk_wgrad: bool
    ub_bulk_dgrad: bool
    ub_name: str | None
    seq_length: int | None
    micro_batch_size: int | None


class LayerOptions(GroupedOptions, total=False):
    """The options of a layer that is not grouped."""

    delay_wgrad_compute: bool


def one_of_two(first: str, value: T | None, second: str, other: T | None) -> T | None:
    """The value of an argument with two names."""
    if value is not None and other is not None and value != other:
        raise InputError(
            f"A layer got {first} {value} and {second} {other}, two names of one argument."
            " Give one."
        )
    return other if value is None else value


def linear_arguments(layer: type, options: Mapping[str, object]) -> dict[str, Any]:
    """The arguments in ``options`` that the linear op takes. Refuses arguments that are on."""
    names = {**_LINEAR_NAMES, **{name: name for name in _LINEAR_NAMES.values()}}
    taken = {}
    for name, value in options.items():
        if name in names:
            taken[names[name]] = value
        elif name in OFF:
            default, reason = OFF[name]
            if value != default:
                raise InputError(
                    f"{layer.__name__} got {name}={value!r}; {reason}, so it takes only "
                    f"{default!r}."
                )
        elif name not in IGNORED:
            raise InputTypeError(f"{layer.__name__} takes no argument {name!r}. Leave it out.")
    return taken
