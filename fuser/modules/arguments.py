"""Arguments of layers that have two names, or that must be off."""

from __future__ import annotations

from typing import Any

from fuser.errors import InputError, InputTypeError

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
OFF: dict[str, tuple[Any, str]] = {
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


def one_of_two(first: str, value: Any, second: str, other: Any) -> Any:
    """The value of an argument with two names."""
    if value is not None and other is not None and value != other:
        raise InputError(
            f"A layer got {first} {value} and {second} {other}, two names of one argument."
        )
    return other if value is None else value


def linear_arguments(layer: type, options: dict[str, Any]) -> dict[str, Any]:
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
            raise InputTypeError(f"{layer.__name__} takes no argument {name!r}.")
    return taken
