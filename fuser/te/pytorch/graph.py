"""``transformer_engine.pytorch.graph``: modules as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuser.communication import GroupArgument
from fuser.errors import InputError
from fuser.recipe import Recipe
from fuser.runtime import graphs

__all__ = ["make_graphed_callables"]

_NO_SCHEDULE = "modules are captured in the order in which they are given"
_ABSENT = {
    "sample_kwargs": "a graph takes arguments by position: give samples of them in sample_args",
    "calibrating": "a graph has no calibration: calibrate with the modules themselves, before",
    "cache_quantized_params": "a graph quantizes its weights at each replay",
    "_order": _NO_SCHEDULE,
    "_num_layers_per_chunk": _NO_SCHEDULE,
    "retain_graph_in_backward": "the backward of a module is captured once",
    "_reuse_graph_input_output_buffers": _NO_SCHEDULE,
}
"""Arguments that are refused if they are on, with the reason."""
_OLDER = {
    "enabled": "fp8_enabled",
    "calibrating": "fp8_calibrating",
    "recipe": "fp8_recipe",
    "amax_reduction_group": "fp8_group",
    "cache_quantized_params": "fp8_weight_caching",
}
"""Arguments with an older name."""


def make_graphed_callables(
    modules: Any,
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | Sequence[bool] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: GroupArgument = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | Sequence[bool] | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: GroupArgument = None,
    cache_quantized_params: bool | None = None,
    _order: Any = None,
    _num_layers_per_chunk: Any = None,
    pool: Any | None = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
) -> Any:
    """:func:`fuser.make_graphed_callables`, which takes what programs pass to Transformer Engine's.

    Parameters
    ----------
    fp8_enabled, fp8_recipe, fp8_group
        Older names of ``enabled``, ``recipe`` and ``amax_reduction_group``. ``enabled`` may be one
        value for each module, all alike.
    sample_kwargs, calibrating, cache_quantized_params, retain_graph_in_backward
        Refused if they are on, as are ``fp8_calibrating`` and ``fp8_weight_caching``, the older
        names of two.

    Raises
    ------
    InputError
        If an argument is on that is not here, or is given by both of its names.
    """
    given = dict(locals())
    for name, older in _OLDER.items():
        if given[name] is not None and given[older] is not None:
            raise InputError(
                f"make_graphed_callables got {name}={given[name]!r} and {older}={given[older]!r}, "
                f"its older name: give {name}."
            )
        given[name] = given[older] if given[name] is None else given[name]
    for name, reason in _ABSENT.items():
        if any(given[name]) if isinstance(given[name], (tuple, list)) else given[name]:
            raise InputError(
                f"make_graphed_callables got {name}, which is not here: {reason}. Leave it out."
            )
    return graphs.make_graphed_callables(
        modules,
        sample_args,
        num_warmup_iters,
        allow_unused_input,
        enabled=_one(given["enabled"]),
        recipe=given["recipe"],
        amax_reduction_group=given["amax_reduction_group"],
        pool=pool,
    )


def _one(enabled: Any) -> bool | None:
    """Whether modules are quantized, of one value for each or one for all."""
    if not isinstance(enabled, (tuple, list)):
        return None if enabled is None else bool(enabled)
    if len({bool(each) for each in enabled}) != 1:
        raise InputError(
            f"make_graphed_callables got enabled={enabled!r}; modules of one call are all "
            "quantized, or none is. Call it for each kind."
        )
    return bool(enabled[0])
