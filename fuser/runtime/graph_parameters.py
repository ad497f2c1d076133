"""Parameters in graphs: operations get the tensors of each, and put them together again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fuser.errors import StateError
from fuser.runtime.joined_weights import memory_of
from fuser.runtime.saved_tensors import QuantizedPart
from fuser.tensors import QuantizedTensor

QUANTIZED, JOINED = "quantized ", "joined "
PLAIN_CLASSES = ("Tensor", "Parameter", "FakeTensor", "FunctionalTensor")
"""The names of the classes of tensors that operations take as they are."""

_quantized: dict[str, QuantizedPart] = {}
"""By text, how to make a quantized parameter from its own buffers."""


def buffers_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, and of quantized ones the buffers that they have, in order."""
    return [b for p in params for b in (p._memory() if isinstance(p, QuantizedTensor) else (p,))]


def text_of(parameter: torch.Tensor) -> str:
    """Of a quantized parameter :data:`QUANTIZED` and everything but its values; of others empty.

    Refuses one that refers to another tensor, which a graph would not get.
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
    rest = (parameter.shape, parameter.dtype, parameter.device, parameter._quantizer)
    part = QuantizedPart(type(parameter), buffers, *rest, parameter._is_read_only)
    _quantized.setdefault(text, part)
    return text


def tensors_of_joined(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Those that a graph gives of a parameter that joins these: the copy if dtypes differ."""
    dtype = tensors[0].dtype
    is_of_one = False not in [t.dtype == dtype for t in tensors]
    return tensors if is_of_one else (torch.cat(tensors),)


def joined_text(tensors: Sequence[torch.Tensor]) -> str:
    """Of a parameter that joins several tensors :data:`JOINED` and their number; of one empty.

    Or the class of one that no graph gets, such as a gathered weight.
    """
    classes = [type(tensor).__name__ for tensor in tensors]
    odd = [name for name in classes if name not in PLAIN_CLASSES]
    if odd or len(tensors) == 1:
        return odd[0] if odd else ""
    return f"{JOINED}{len(tensors)}"


class JoinedPart(NamedTuple):
    """A parameter that joins several tensors along dimension 0."""

    number_of_tensors: int

    def tensor(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter: a view of the memory in which the tensors are joined, else a copy."""
        memory = memory_of(tensors)
        return torch.cat(list(tensors)) if memory is None else memory.detach()

    def gradients(
        self, gradient: torch.Tensor | None, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The rows of its gradient that belong to each tensor, of which torch drops frozen ones."""
        if gradient is None:
            return [None] * self.number_of_tensors
        return list(torch.split(gradient, [tensor.shape[0] for tensor in tensors]))


def _part_of(text: str) -> QuantizedPart | JoinedPart | None:
    if text.startswith(JOINED):
        return JoinedPart(int(text.removeprefix(JOINED)))
    return _quantized.get(text)


class GraphParameters(NamedTuple):
    """How to make the parameters of a pipeline from the tensors that a graph gives of them.

    If a graph gives each parameter itself, methods return what they get.
    """

    parts: tuple[QuantizedPart | JoinedPart | None, ...]
    """Of each parameter how to make it; None if it is the tensor itself."""
    places: tuple[slice, ...]
    """The places of its tensors."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> GraphParameters:
        """Those with texts of :func:`text_of` or :func:`joined_text`."""
        parts = tuple(map(_part_of, texts))
        counts = list(map(_count_of, parts))
        ends = itertools.accumulate(counts)
        places = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return cls(parts, tuple(places))

    def made_from(self, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The parameters, from the tensors of a graph."""
        if not any(self.parts):
            return flat
        return [
            flat[at.start] if part is None else part.tensor(flat[at])
            for part, at in zip(self.parts, self.places, strict=True)
        ]

    def apart(self, flat: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """The parameters, with None for quantized ones, and the buffers of these."""
        if not any(self.parts):
            return flat, ()
        plain: list[Any] = []
        buffers: list[torch.Tensor] = []
        for part, at in zip(self.parts, self.places, strict=True):
            if part is None:
                plain.append(flat[at.start])
            elif isinstance(part, JoinedPart):
                plain.append(part.tensor(flat[at]))
            else:
                plain.append(None)
                buffers += flat[at]
        return plain, buffers

    def gradients_of(
        self, gradients: Sequence[torch.Tensor | None], flat: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Those of the tensors, quantized ones whole, from the gradients of the parameters."""
        if not any(self.parts):
            return gradients
        of_tensors: list[torch.Tensor | None] = []
        for gradient, part, at in zip(gradients, self.parts, self.places, strict=True):
            of_tensors += (
                part.gradients(gradient, flat[at]) if isinstance(part, JoinedPart) else [gradient]
            )
        return of_tensors

    @property
    def joined(self) -> list[int]:
        """The numbers of the parameters that join several tensors."""
        return [n for n, part in enumerate(self.parts) if isinstance(part, JoinedPart)]


def _count_of(part: QuantizedPart | JoinedPart | None) -> int:
    """The number of tensors that a graph gives of a parameter."""
    if part is None:
        return 1
    return part.number_of_tensors if isinstance(part, JoinedPart) else len(part.buffers)
