"""Quantized parameters in graphs: operations get their buffers, and put them together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fuser.errors import StateError
from fuser.runtime.saved_tensors import QuantizedPart
from fuser.tensors import QuantizedTensor

QUANTIZED = "quantized "


def buffers_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, and of quantized ones the buffers that they have, in order."""
    return [b for p in params for b in (p._memory() if isinstance(p, QuantizedTensor) else (p,))]


class QuantizedParameters(NamedTuple):
    """How to make the parameters of a pipeline, some of them quantized, from :func:`buffers_of`."""

    texts: tuple[str, ...]
    """Of each parameter: :data:`QUANTIZED` and everything but its values; or empty."""
    parts: tuple[QuantizedPart | int, ...]

    @classmethod
    def of(cls, params: Sequence[torch.Tensor]) -> QuantizedParameters:
        """How to make these parameters.

        Raises
        ------
        StateError
            If one refers to another tensor, which a graph would not get.
        """
        parts: list[QuantizedPart | int] = []
        texts: list[str] = []
        places = 0
        for parameter in params:
            if not isinstance(parameter, QuantizedTensor):
                parts.append(places)
                texts.append("")
                places += 1
                continue
            references = (parameter._view_of, parameter._gathering, parameter._source)
            if any(reference is not None for reference in references):
                raise StateError(
                    f"its parameter, a {type(parameter).__name__} of shape "
                    f"{tuple(parameter.shape)}, is a view, gathered by fully_shard, or keeps what "
                    "it was quantized from"
                )
            present = [name for name, buffer in parameter.buffers().items() if buffer is not None]
            buffers = {name: place for place, name in enumerate(present, places)}
            what = (parameter.shape, parameter.dtype, parameter.device, parameter._quantizer)
            part = QuantizedPart(type(parameter), buffers, *what, parameter._is_read_only)
            parts.append(part)
            places += len(buffers)
            texts.append(f"{QUANTIZED}{parameter._stable_hash_for_caching()}")
        return cls(tuple(texts), tuple(parts))

    def made_from(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters over these buffers."""
        return [buffers[p] if isinstance(p, int) else p.tensor(buffers) for p in self.parts]

    def apart(self, buffers: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """The plain parameters, with None for quantized ones, and the buffers of these."""
        plain = [buffers[p] if isinstance(p, int) else None for p in self.parts]
        places = {p for p in self.parts if isinstance(p, int)}
        return plain, [buffer for at, buffer in enumerate(buffers) if at not in places]
