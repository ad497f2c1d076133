"""Checks of a pipeline's arguments: kinds, dtypes, devices and keyword arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fuser.communication import is_distributed
from fuser.errors import InputError, InputTypeError, hint_of
from fuser.op import (
    BasicOperation,
    default_device,
    keyword_names,
    pipeline_arguments,
)
from fuser.op.parameters import compute_dtypes
from fuser.plan.graph import Source
from fuser.precision.contexts import current_recipe
from fuser.tensors.base import recipe_of_gathering


class Checks:
    """The checks of a pipeline of ``ops``; every error names the op and the values.

    ``sources`` are the sources of the ops' extra inputs.
    """

    def __init__(
        self, ops: Sequence[BasicOperation], sources: Sequence[tuple[Source, ...]]
    ) -> None:
        self.ops = ops
        self.sources = sources
        self.num_extra_inputs = sum(s.caller_index is not None for row in sources for s in row)
        # The caller's extra inputs that may be on the CPU beside tensors on another device.
        self.indices = {
            source.caller_index
            for op, row in zip(ops, sources, strict=True)
            for k, source in enumerate(row)
            if k in op.index_extras
        }

    def extra_input_takers(self) -> list[str]:
        """A name for each op that takes extra inputs from the caller, for messages.

        Includes the number of extra inputs if it is more than one.
        """
        counts = [sum(s.caller_index is not None for s in row) for row in self.sources]
        return [
            f"{f'{count} ' if count > 1 else ''}for op {i}, {type(op).__name__}"
            for i, (op, count) in enumerate(zip(self.ops, counts, strict=True))
            if count
        ]

    def kinds(
        self, input_: Any, params: Sequence[torch.Tensor], extra_inputs: Sequence[Any]
    ) -> None:
        """Check the number and dtypes of tensors, and that the input is not empty in features."""
        if len(extra_inputs) != self.num_extra_inputs:
            raise InputError(
                "The pipeline "
                + wrong_extra_count(
                    self.num_extra_inputs, self.extra_input_takers(), len(extra_inputs)
                )
            )
        for noun, value in [("input", input_), *self._extra_names(extra_inputs)]:
            if not isinstance(value, torch.Tensor):
                raise InputTypeError(
                    f"The {noun} must be a tensor; got {type(value).__name__} ({value!r:.60})."
                )
            dtensor: Any = value
            if is_distributed(dtensor):
                raise InputTypeError(
                    f"The {noun} is a DTensor of shape {tuple(dtensor.shape)} with the placements "
                    f"{tuple(dtensor.placements)}; a pipeline takes the tensor of this rank. Use "
                    "to_local(); a linear with sequence_parallel=True gathers rows itself."
                )
        if input_.dim() == 0:
            index = next(i for i, op in enumerate(self.ops) if not op.takes_scalars)
            raise InputError(
                f"The input has no dimensions, and op {index} ({type(self.ops[index]).__name__}) "
                "needs at least one."
            )
        if input_.shape[-1] == 0:
            raise InputError(
                f"The input has shape {tuple(input_.shape)}; its last dimension must not be empty."
            )
        named = [("input", input_), *((f"parameter of shape {tuple(p.shape)}", p) for p in params)]
        for noun, tensor in named:
            if tensor.dtype not in compute_dtypes():
                allowed = ", ".join(map(str, compute_dtypes()))
                raise InputError(f"The {noun} is {tensor.dtype}; a pipeline runs in {allowed}.")

    def device(
        self,
        input_: torch.Tensor,
        params: Sequence[torch.Tensor],
        extra_inputs: Sequence[torch.Tensor],
        *,
        only_planning: bool = False,
    ) -> torch.device:
        """The device of all tensors; while planning, meta tensors count as on any device."""
        named = [
            ("input", input_),
            *((f"parameter of shape {tuple(p.shape)}", p) for p in params),
            *(
                (noun, tensor)
                for k, (noun, tensor) in enumerate(self._extra_names(extra_inputs))
                if k not in self.indices or tensor.device.type != "cpu"
            ),
        ]
        if only_planning:
            named = [(noun, tensor) for noun, tensor in named if not tensor.is_meta]
            if not named:
                return default_device(None)
        first_name: str = named[0][0]
        first: torch.Tensor = named[0][1]
        for noun, tensor in named:
            if tensor.device != first.device:
                raise InputError(
                    f"The {first_name} is on {first.device} and the {noun} on {tensor.device}; "
                    "a pipeline runs on one device."
                )
        return first.device

    def recipes(self, params: Sequence[torch.Tensor]) -> None:
        """Check that weights of ``gather_quantized`` are read under its recipe, or under none."""
        recipe = current_recipe()
        for param in params:
            other = recipe_of_gathering(param)
            if recipe is not None and other is not None and other != recipe:
                raise InputError(
                    f"A weight of shape {tuple(param.shape)} is gathered quantized under {other}, "
                    f"and this forward runs under {recipe}: it would compute with values rounded "
                    "for the other recipe. Give gather_quantized the recipe of autocast."
                )

    def keywords(self, kwargs: Sequence[Mapping[str, Any]]) -> None:
        """Check that there is a dict for each op, and that the op takes each keyword argument."""
        if not isinstance(kwargs, (list, tuple)) or len(kwargs) != len(self.ops):
            raise InputTypeError(
                f"basic_op_kwargs is a list of {len(self.ops)} dicts, one for each basic op; got "
                f"{kwargs!r:.60}."
            )
        for index, (op, of_op) in enumerate(zip(self.ops, kwargs, strict=True)):
            check_keywords(f"Op {index} ({type(op).__name__})", op, of_op)

    def _extra_names(self, extra_inputs: Sequence[Any]) -> list[tuple[str, Any]]:
        """Each extra input from the caller, with a name that contains the op that takes it."""
        names = {
            source.caller_index: f"extra input {source.caller_index} (for op {i}, "
            f"{type(self.ops[i]).__name__})"
            for i, row in enumerate(self.sources)
            for source in row
        }
        return [(names[k], value) for k, value in enumerate(extra_inputs)]


def check_keywords(name: str, op: BasicOperation, keywords: Any) -> None:
    """Check the keyword arguments that a caller gives to an op; ``name`` names the op."""
    if not isinstance(keywords, Mapping):
        raise InputTypeError(
            f"{name} takes its keyword arguments as a dict; got {type(keywords).__name__} "
            f"({keywords!r:.60})."
        )
    of_pipeline = pipeline_arguments(type(op))
    taken = None if "fuser_forward" in op.__dict__ else keyword_names(type(op))
    for key in keywords:
        if key in of_pipeline:
            raise InputTypeError(
                f"{name} gets {key!r} from its pipeline; a caller cannot give it. Leave it out."
            )
        if not isinstance(key, str) or (taken is not None and key not in taken):
            takes = "any that is a str" if taken is None else ", ".join(taken) or "none"
            sentence = f"{name} takes no keyword argument {key!r}; it takes {takes}."
            raise InputTypeError(f"{sentence} {hint_of('', key)}".rstrip())


def wrong_extra_count(needed: int, takers: Sequence[str], count: int) -> str:
    """The end of a sentence about a wrong number of extra inputs, with the ops that take them."""
    noun = "extra input" if needed == 1 else "extra inputs"
    who = f" ({'; '.join(takers)})" if takers else ""
    return f"takes {needed} {noun}{who} and got {count}."
