"""Facts about a pipeline's parameters, which are read again only after one of them has changed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from fuser.cuda.arguments import layout_of
from fuser.op import BasicOperation
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.base import recipe_of_gathering
from fuser.torch_private import TensorGuards

# A process whose shapes never repeat must not fill the memory.
MOST_LAYOUTS = 64

Parameters = Sequence[torch.Tensor]

# What a quantized tensor may refer to besides its buffers: a recording would not get it.
_REFERENCES = ("_view_of", "_source", "_sharding", "_observation")
_IS_NONE = (None,) * len(_REFERENCES)
# Of a gathered one: ops ask which copies are in memory, and give the shard a quantizer.
_OF_GATHERED = ("_gathering.held", "_gathering.recipe", "_gathering.quantizer")


class QuantizedFacts(NamedTuple):
    """A quantized parameter, but for its buffers: their names, and what the rest is."""

    kind: type[QuantizedTensor]
    names: tuple[str, ...]
    """The buffers that it has; of a gathered one those in memory."""
    others: tuple[str, ...]
    """The attributes that are not buffers of it: quantizer, references, and missing buffers."""
    values: tuple[object, ...]
    """Those of :attr:`others`."""

    @classmethod
    def of(cls, parameter: QuantizedTensor) -> QuantizedFacts | None:
        """None if its class or its quantizer is a user's, or if it refers to other tensors.

        And if it is gathered, and nothing of it is in memory.
        """
        kind = type(parameter)
        if not (_is_own(kind) and _has_own_parts(parameter._quantizer)):
            return None
        if _getter(_REFERENCES)(parameter) != _IS_NONE:
            return None
        names = tuple(name for name, buffer in parameter.buffers().items() if buffer is not None)
        missing = (name for name in kind.buffer_names if name not in names)
        others = ("_quantizer", "_is_read_only", *_REFERENCES, "_gathering", *missing)
        if parameter._gathering is not None:
            others += _OF_GATHERED
            held = parameter._gathering.held
            names = tuple(name for name in names if name in held)
        return cls(kind, names, others, _getter(others)(parameter)) if names else None

    @property
    def is_gathered(self) -> bool:
        return _OF_GATHERED[0] in self.others


Quantized = Sequence[tuple[int, QuantizedFacts]]
"""The quantized ones among parameters, by their places."""
BuffersOf = Callable[[Sequence[Any]], list[torch.Tensor] | None]
"""The buffers of the quantized ones among parameters; None if other facts hold of one."""


def buffers_reader(quantized: Quantized) -> BuffersOf:
    """A function that reads buffers, in the order of the parameters.

    Those of one run have attributes of the same names, and are read by loops in C: there may be
    hundreds, of as many experts.
    """
    runs = []
    for (names, others), run in groupby(quantized, lambda pair: (pair[1].names, pair[1].others)):
        places, facts = zip(*run, strict=True)
        kinds, values = [about.kind for about in facts], [about.values for about in facts]
        runs.append((places, kinds, _getter(others), values, _getter(names)))

    def buffers_of(params: Sequence[Any]) -> list[torch.Tensor] | None:
        buffers: list[torch.Tensor] = []
        for places, kinds, others_of, values, named_of in runs:
            parameters = list(map(params.__getitem__, places))
            if list(map(type, parameters)) != kinds or list(map(others_of, parameters)) != values:
                return None
            buffers += chain.from_iterable(map(named_of, parameters))
        return buffers

    return buffers_of


def _getter(names: Sequence[str]) -> Callable[[object], tuple[Any, ...]]:
    """A function that returns the attributes of these names."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda holder: tuple(getattr(holder, name) for name in names)


class ParameterLayout:
    """Everything that a recording depends on in parameters. Equal layouts are one object.

    ``runs`` are parameters that follow one another in one memory without gaps: the place of the
    first, and their number. ``are_parameters``: each is a plain ``Parameter``, and none a tensor of
    a hook.
    """

    __slots__ = ("_parts", "are_parameters", "buffers_of", "is_gathered", "quantized", "runs")

    def __init__(
        self,
        runs: tuple[tuple[int, int], ...],
        *,
        are_parameters: bool = True,
        quantized: Quantized = (),
    ) -> None:
        self.runs = runs
        self.are_parameters = are_parameters
        self.quantized = quantized
        self.is_gathered = any(about.is_gathered for _, about in quantized)
        self.buffers_of = buffers_reader(quantized)
        self._parts: dict[tuple[int, int], ParameterLayout] = {}

    def part(self, start: int, stop: int) -> ParameterLayout:
        """The layout of parameters ``start`` to ``stop - 1``, the same object each time."""
        part = self._parts.get((start, stop))
        if part is None:
            cut = [(max(first, start), min(first + count, stop)) for first, count in self.runs]
            runs = tuple((first - start, end - first) for first, end in cut if end - first > 1)
            quantized = [(at - start, f) for at, f in self.quantized if start <= at < stop]
            are_parameters = self.are_parameters
            part = ParameterLayout(runs, are_parameters=are_parameters, quantized=quantized)
            part = self._parts.setdefault((start, stop), part)
        return part

    def with_buffers(self, params: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
        """The parameters, and the buffers of quantized ones; None if other facts hold of one."""
        buffers = self.buffers_of(params)
        return None if buffers is None else (*params, *buffers)

    def memory(self, params: Sequence[Any]) -> list[tuple[int, int]]:
        """The first address of each run, and the address after it."""
        pairs = [(params[first], params[first + count - 1]) for first, count in self.runs]
        return [(one.data_ptr(), last.data_ptr() + last.nbytes) for one, last in pairs]


LayoutOfCall = tuple[ParameterLayout | None, Sequence[torch.Tensor] | None]
"""The layout of the parameters of a call, None if their memory does not hold their values; and the
result of its ``with_buffers`` for them, None if that has not been called."""


class KnownParameters:
    """Facts about parameters at their last call, and how to see in few calls that they still hold.

    A parameter may be replaced, frozen, cast, resized or moved without notice. All of that changes
    what torch's guard compares (class, dtype, device, sizes, strides, ``requires_grad``, lazy
    negation), or an address. It takes 0.1 us a parameter; reading all facts takes 1.5. Of quantized
    parameters the buffers are compared too, and the attributes that are not buffers.

    ``ops`` have the parameters, and may move them when one has changed.
    """

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        self._ops = ops
        # One attribute, so that another thread sees facts and checks that belong together: the
        # guard, the places whose addresses are compared and the addresses, first places of runs and
        # the ends of their memory, key and layout, and the method that adds the buffers of
        # quantized parameters, if there are any.
        self.state: tuple[object, ...] = (None, slice(0), None, (), None, None, None, None)
        self._layouts: dict[Hashable, ParameterLayout] = {}

    def renew(self, params: Parameters) -> tuple[tuple[object, ...], ParameterLayout | None]:
        """Read the facts: those that a plan depends on, and the layout.

        The layout is None if the memory of a parameter does not hold its values.
        """
        key = tuple(
            [(type(p), p.dtype, p.requires_grad, p.is_meta, recipe_of_gathering(p)) for p in params]
        )
        try:
            layout = self._layout(params)
            if layout is not None:
                are_moved = [op.arrange_parameters() for op in self._ops]
                layout = self._layout(params) if any(are_moved) else layout
        except RuntimeError:  # a tensor without memory of its own
            layout = None
        tensors = None if layout is None else layout.with_buffers(params)
        if layout is None or tensors is None or TensorGuards is None:
            self.state = (None, slice(0), None, (), None, key, layout, None)
            return key, layout
        is_same = tensor_guard(tensors)
        heads = [first for first, _ in layout.runs]
        # Those of quantized ones are 0, of which the first are left out: often there are no others.
        start = next(
            (at for at, p in enumerate(params) if not isinstance(p, QuantizedTensor)), len(params)
        )
        # Gathered ones get other memory for each pass, in which they are aligned alike.
        are_gathered = all(about.is_gathered for _, about in layout.quantized)
        seen = slice(start, len(params) if layout.quantized and are_gathered else None)
        addresses = list(map(torch.Tensor.data_ptr, tensors[seen]))
        ends = ends_of_memory(params, heads)
        with_buffers = layout.with_buffers if layout.quantized else None
        self.state = (is_same, seen, addresses, heads, ends, key, layout, with_buffers)
        return key, layout

    def _layout(self, params: Parameters) -> ParameterLayout | None:
        quantized: list[tuple[int, QuantizedFacts]] = []
        for place, parameter in enumerate(params):
            if isinstance(parameter, QuantizedTensor):
                about = QuantizedFacts.of(parameter)
                if about is None:
                    return None
                quantized.append((place, about))
        buffers = buffers_reader(quantized)(params)
        if buffers is None:  # another thread has changed one
            return None
        plain = [p for p in params if not isinstance(p, QuantizedTensor)]
        layouts = [*map(layout_of, (*plain, *buffers))]
        if None in layouts:
            return None
        places = list(map(id, (*params, *buffers)))
        ties = tuple(map(places.index, places)) if len(set(places)) < len(places) else None
        runs = _runs(list(map(_follows, params, params[1:])))
        are_parameters = all(type(p) is Parameter for p in params)
        wholes = [(params[at].shape, params[at].dtype, about) for at, about in quantized]
        facts = (ties, runs, are_parameters, *[at for at, _ in quantized], *wholes, *layouts)
        layout = self._layouts.pop(facts, None)
        if layout is None:
            while len(self._layouts) >= MOST_LAYOUTS:  # the one that was not used for longest
                self._layouts.pop(next(iter(self._layouts)), None)
            layout = ParameterLayout(runs, are_parameters=are_parameters, quantized=quantized)
        self._layouts[facts] = layout
        return layout


def tensor_guard(tensors: Parameters) -> Callable[..., bool]:
    """A function of as many tensors: whether it finds what it compares as in ``tensors``.

    That is class, dtype, device, sizes, strides, ``requires_grad`` and lazy negation.
    """
    if TensorGuards is None:
        facts = list(map(_facts_of, tensors))
        return lambda *others: list(map(_facts_of, others)) == facts
    # None: sizes and strides are those of the tensors.
    guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    is_same: Callable[..., bool] = guard.check
    return is_same


def _facts_of(tensor: torch.Tensor) -> tuple[object, ...]:
    layout = (tensor.device, tensor.shape, tensor.stride())
    return (type(tensor), tensor.dtype, *layout, tensor.requires_grad, tensor.is_neg())


def ends_of_memory(params: Parameters, places: Sequence[int]) -> list[int]:
    """The address after the storage of some parameters."""
    return [(s := params[place].untyped_storage()).data_ptr() + s.nbytes() for place in places]


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor starts where another one ends, in the same storage."""
    return (
        not (isinstance(one, QuantizedTensor) or isinstance(other, QuantizedTensor))
        and one.data_ptr() + one.nbytes == other.data_ptr()
        and one.nbytes > 0
        and one.is_contiguous()
        and other.is_contiguous()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _runs(follows: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Where parameters begin that follow one another, and their number.

    ``follows`` says of each but the first whether it follows the one before it.
    """
    runs, first = [], 0
    for place, is_next in enumerate([*follows, False], 1):
        if not is_next:
            if place - first > 1:
                runs.append((first, place - first))
            first = place
    return tuple(runs)


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _is_own(kind: type) -> bool:
    """Whether a class is this library's."""
    return kind.__module__.partition(".")[0] == "fuser"


def _has_own_parts(quantizer: Quantizer) -> bool:
    """Whether a quantizer, and those in its fields, are this library's."""
    kind: Any = type(quantizer)
    values = [getattr(quantizer, name) for name in _field_names(kind)]
    parts = [value for value in values if isinstance(value, Quantizer)]
    return _is_own(type(quantizer)) and all(map(_has_own_parts, parts))
