"""Parameters in graphs: operations get the tensors of each, and put them together again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fuser.errors import StateError
from fuser.runtime.saved_tensors import QuantizedPart
from fuser.tensors import QuantizedTensor

QUANTIZED = "quantized "

_quantized: dict[str, QuantizedPart] = {}
"""By text, how to make a quantized parameter from its own buffers."""


def buffers_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, and of quantized ones the buffers that they have, in order."""
    return [b for p in params for b in (p._memory() if isinstance(p, QuantizedTensor) else (p,))]


def text_of(parameter: torch.Tensor) -> str:
    """Of a quantized parameter :data:`QUANTIZED` and everything but its values; of others empty.

    Raises
    ------
    StateError
        If it refers to another tensor, which a graph would not get.
    """
    if not isinstance(parameter, QuantizedTensor):
        return ""
    references = (parameter._view_of, parameter._gathering, parameter._source)
    if any(reference is not None for reference in references):
        raise StateError(
            f"its parameter, a {type(parameter).__name__} of shape {tuple(parameter.shape)}, is a "
            "view, gathered by fully_shard, or keeps what it was quantized from"
        )
    text = f"{QUANTIZED}{parameter._stable_hash_for_caching()}"
    present = [name for name, buffer in parameter.buffers().items() if buffer is not None]
    buffers = {name: place for place, name in enumerate(present)}
    what = (parameter.shape, parameter.dtype, parameter.device, parameter._quantizer)
    part = QuantizedPart(type(parameter), buffers, *what, parameter._is_read_only)
    _quantized.setdefault(text, part)
    return text


class GraphParameters(NamedTuple):
    """How to make the parameters of a pipeline from the tensors that a graph gives of them."""

    parts: tuple[QuantizedPart | None, ...]
    """Of each parameter how to make it; None if it is the tensor itself."""
    places: tuple[slice, ...]
    """The places of its tensors."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> GraphParameters | None:
        """Those with texts of :func:`text_of`; None if the graph gives each itself."""
        parts = tuple([_quantized.get(text) for text in texts])
        if not any(parts):
            return None
        counts = [1 if part is None else len(part.buffers) for part in parts]
        ends = itertools.accumulate(counts)
        places = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return cls(parts, tuple(places))

    def made_from(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters, from the tensors of a graph."""
        return [
            given[at.start] if part is None else part.tensor(given[at])
            for part, at in zip(self.parts, self.places, strict=True)
        ]

    def apart(self, given: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """The parameters, with None for quantized ones, and the buffers of these."""
        plain: list[Any] = []
        buffers: list[torch.Tensor] = []
        for part, at in zip(self.parts, self.places, strict=True):
            plain.append(given[at.start] if part is None else None)
            buffers += () if part is None else given[at]
        return plain, buffers
