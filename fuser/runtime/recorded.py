"""Recorded passes: the forward and backward of a plan as one function of tensors.

A plan's generated code calls its ops, and an op decides, checks and allocates. If the tensors of a
call have the layouts of an earlier call, the ops decide the same. The second call of a layout is
recorded (:mod:`fuser.cuda.sequence`), and later calls only allocate, launch and call torch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from fuser.basic_ops.main_grad import accumulation, note_accumulation
from fuser.basic_ops.shared_memory import Versions
from fuser.cuda import launch
from fuser.cuda.sequence import PLAIN, LaunchSequence, layout_of, record
from fuser.functional.lazy import LazyTensor
from fuser.op import BasicOperation, FusibleOperation, OperationContext, autocast_dtype
from fuser.precision.delayed_scaling import (
    DelayedScales,
    delayed_quantizers,
    is_evaluating,
    note_uses,
    noting_uses,
)
from fuser.recipe import DelayedScaling
from fuser.runtime.known_parameters import MOST_LAYOUTS, ParameterLayout
from fuser.source import SourceCode
from fuser.tensors import Float8Quantizer, QuantizedTensor

Tensors = Sequence[torch.Tensor | None]
# By op, the weights whose ``main_grad`` it adds to; None for one whose gradient it returns.
Owners = dict[int, tuple[torch.Tensor | None, ...]]
Forward = Callable[..., tuple[Any, ...]]
Backward = Callable[..., tuple[torch.Tensor | None, ...]]


def is_recordable(ops: Iterable[FusibleOperation]) -> bool:
    """Whether the steps of a plan are this library's own code, which the layouts determine."""
    return all(
        type(op).__module__.partition(".")[0] == "fuser"
        and not op.has_own_methods()
        and getattr(op, "is_recordable", True)
        for op in ops
    )


class RecordedPasses:
    """The recorded forwards of a compiled plan, by the layouts of their tensors.

    Parameters
    ----------
    ops
        The basic ops of the plan. A change of an attribute of one is a new layout.
    recipe
        The plan's recipe, if it is delayed scaling. New quantizers of a state are a new layout.
    """

    def __init__(self, ops: Sequence[BasicOperation], recipe: DelayedScaling | None) -> None:
        self._ops = ops
        self._recipe = recipe
        modes = ("forward", "backward") if recipe is not None else ()
        self._quantizing = [op for op in ops if any(map(op.num_quantizers, modes))]
        self._forwards: dict[Any, RecordedForward | None] = {}
        self._readers: dict[int, Callable[[Tensors], Any]] = {}

    def find(
        self, tensors: Tensors, extra_count: int, parameters: ParameterLayout
    ) -> RecordedForward | None:
        """The recorded forward for such tensors: the input, parameters, and extra inputs.

        New for the second call of a layout: :meth:`RecordedForward.run` records then. None if there
        is none, and the plan's own code must run.
        """
        if launch.recording.listener is not None or _has_saved_tensor_hooks(False) is not None:
            return None
        reader = self._readers.get(extra_count)
        if reader is None:
            reader = self._readers[extra_count] = _reader(self._ops, 1 + extra_count)
        first_extra = len(tensors) - extra_count
        others = (tensors[0], *tensors[first_extra:])
        try:
            layout = reader(others)
        except RuntimeError:  # a tensor without memory of its own
            return None
        if layout is None:
            return None
        places = list(map(id, others))
        may_be_parameter = Parameter in map(type, others) or not parameters.are_parameters
        if may_be_parameter and not set(places).isdisjoint(map(id, tensors[1:first_extra])):
            return None  # a parameter is given as an input too
        if len(set(places)) < len(places):  # one tensor is given twice, such as split sizes
            layout = (layout, tuple(map(places.index, places)))
        layout = (layout, parameters)
        quantizers: list[list[Float8Quantizer]] = []
        if self._recipe is not None:
            states = [op._delayed for op in self._quantizing]
            given = delayed_quantizers(self._recipe, states)
            if given is None:
                return None
            quantizers = given
            layout = (layout, is_evaluating(), *map(id, quantizers))
        found = self._forwards.get(layout, self)
        if found is self:
            while len(self._forwards) >= MOST_LAYOUTS:
                self._forwards.pop(next(iter(self._forwards)), None)
            self._forwards[layout] = None
            return None
        if found is None:
            found = self._forwards[layout] = RecordedForward(quantizers, parameters)
        assert isinstance(found, RecordedForward)
        return found if found.refusal is None else None


def _reader(ops: Sequence[BasicOperation], count: int) -> Callable[[Tensors], Any]:
    """A function of tensors that returns everything that their forward depends on.

    It returns None for tensors whose memory does not hold their values.
    """
    names = [f"t{i}" for i in range(count)]
    src = SourceCode(launch=launch, PLAIN=PLAIN)
    states = [src.bind(f"state{i}", op.__dict__) for i, op in enumerate(ops)]
    with src.block("def read(tensors):"):
        src.add(f"{''.join(f'{name}, ' for name in names)}= tensors")
        for t in names:
            src.add(f"if type({t}) not in PLAIN or {t}.is_neg(): return None")
        with src.block("return ("):
            src.add("id(launch.backend),", *(f"{state}.get('_changes')," for state in states))
            for t in names:
                src.add(
                    f"{t}.dtype, {t}.shape, {t}.stride(), {t}.get_device(), {t}.data_ptr() & 15,"
                )
        src.add(")")
    return src.functions("layout")["read"]


def _are_distinct(tensors: Tensors) -> bool:
    """Whether no tensor is there twice: a recording could not tell which one is read."""
    return len(set(map(id, tensors))) == len(tensors)


class _Saved(NamedTuple):
    """A saved quantized tensor: everything but its buffers, which have these places."""

    kind: type[QuantizedTensor]
    buffers: dict[str, int]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    quantizer: Any
    is_read_only: bool

    def tensor(self, held: Sequence[torch.Tensor]) -> QuantizedTensor:
        """The tensor over other buffers."""
        buffers: dict[str, torch.Tensor | None] = {n: held[at] for n, at in self.buffers.items()}
        made = self.kind(buffers, self.shape, self.dtype, self.device, self.quantizer)
        made._is_read_only = self.is_read_only
        return made


class _Recording(NamedTuple):
    """A recorded forward."""

    sequence: LaunchSequence
    used: list[DelayedScales]
    """The states of delayed scaling that record in it, in their order."""
    contexts: list[tuple[type[OperationContext], dict[str, Any]]]
    saved: list[_Saved | int | None]
    """How to make each saved tensor from those that the sequence returns."""
    ends: tuple[int, ...]
    specs: tuple[Any, ...]
    """Shape and dtype of every extra output."""
    versioned: list[tuple[int, str, Callable[[Tensors], Any]]]
    """The ops whose contexts hold versions, with their owners, and what picks their tensors."""


class RecordedForward:
    """A recorded forward, and the backwards that were recorded after it.

    It saves the buffers of quantized tensors, and makes the tensors only for a backward that is not
    recorded. Recordings are below torch's autocast: they run without it.
    """

    def __init__(
        self, quantizers: list[list[Float8Quantizer]], parameters: ParameterLayout
    ) -> None:
        self.refusal: str | None = None
        """Why the forward cannot be repeated; None if it can."""
        self._parameters = parameters
        self._quantizers = quantizers  # held, so that no other list has its id
        self._constants = [
            tensor
            for quantizer in itertools.chain(*quantizers)
            for tensor in quantizer.state_tensors()
            if tensor is not None
        ]
        # Set once, when complete: another thread may record or run it at the same time.
        self._recording: _Recording | None = None
        self._backwards: dict[Any, LaunchSequence] = {}

    def run(self, tensors: Tensors, forward: Forward, *args: Any) -> tuple[Any, ...]:
        """The results of ``forward(*args)``, which reads ``tensors``.

        If it needs a backward, these are the output, the extra outputs, this object and the
        versions for :meth:`backward`, the tensors to save, None, and the shapes and dtypes of the
        extra outputs. The first call records; if the forward cannot be repeated, it returns what
        ``forward`` returned.
        """
        versions: dict[int, Versions] = {}
        known = self._recording
        if known is not None:
            if known.used:
                note_uses(known.used)
            results: tuple[Any, ...] = _played(known.sequence, tensors)
            if len(results) == 2:
                return results
            output, produced, saved = results
            for i, owner, picked in known.versioned:
                versions[i] = Versions(picked(tensors), owner)
            return output, produced, (self, versions), saved, None, known.specs
        with noting_uses() as used:
            sequence, results, slotted = record(
                tensors,
                lambda: forward(*args),
                constants=self._constants,
                runs=self._parameters.memory(tensors[1:]),
                with_calls=True,
            )
        output, produced, *rest = results
        kept: tuple[Any, ...] = (output, produced)
        recording = _Recording(sequence, list(dict.fromkeys(used)), [], [], (), (), [])
        if type(output) is not torch.Tensor:
            sequence.refusal = f"the output is a {type(output).__name__}"
        if rest:
            contexts, to_save, ends, specs = rest
            values = [dict(context.__dict__) for context in contexts]
            versions = {i: v.pop("versions") for i, v in enumerate(values) if "versions" in v}
            held: list[torch.Tensor] = []
            recording = recording._replace(
                contexts=list(zip(map(type, contexts), values, strict=True)),
                saved=[_saved_as(tensor, held, sequence) for tensor in to_save],
                ends=ends,
                specs=specs,
                versioned=[
                    (i, each.owner, _picked(each.tensors, tensors, sequence))
                    for i, each in versions.items()
                ],
            )
            if any(_holds_tensors(list(each.values())) for each in values):
                sequence.refusal = sequence.refusal or "a context holds a tensor"
            kept = (output, produced, tuple(held))
        sequence.result = slotted(kept)
        self.refusal = sequence.refusal
        if self.refusal is not None:
            return results
        # With extra outputs, a caller gets the views that the ops return (executor.py).
        sequence.drop_names(
            sequence.result[:2] if any(sequence.result[1]) else (), sequence.result[0]
        )
        self._recording = recording
        if not rest:
            return results
        return (*kept[:2], (self, versions), kept[2], None, recording.specs)

    # -- backward -------------------------------------------------------------

    def backward(
        self,
        backward: Backward,
        saved: list[torch.Tensor],
        versions: dict[int, Versions],
        dx: torch.Tensor,
        grad_extras: list[torch.Tensor | None] | None,
        owners: Owners,
        *,
        is_observed: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients that ``backward`` computes from the saved tensors; empties ``saved``.

        Parameters
        ----------
        backward
            The plan's generated code.
        saved
            The tensors that :meth:`run` returned for saving.
        versions
            By op, the versions that :meth:`run` returned.
        dx, grad_extras
            The gradients of the output and of the extra outputs.
        owners
            By op, the weights whose ``main_grad`` it adds their gradients to.
        is_observed
            Something watches the steps, so that they must run.
        """
        grads: list[Any] = [dx]
        others: tuple[Any, ...] = ()
        if grad_extras is not None or owners:
            more, others = _other_tensors(grad_extras or (), owners)
            grads += more
        is_observed = is_observed or launch.recording.listener is not None
        is_observed = is_observed or not all(map(_has_its_values, grads))
        found = None
        if not is_observed:
            autocast = _is_autocast() and autocast_dtype(dx.device.type)
            layout = (id(launch.backend), autocast, others, *map(layout_of, grads))
            found = self._backwards.get(layout)
        if found is not None and found.is_complete:
            for each in versions.values():
                each.check()
            saved += grads
            del grads, dx, grad_extras
            result: tuple[torch.Tensor | None, ...] = _played(found, saved)
            for weight in itertools.chain.from_iterable(owners.values()):
                if weight is not None:
                    note_accumulation(weight)
            return result
        recording = self._recording
        assert recording is not None
        contexts = [_context(*each) for each in recording.contexts]
        for i, each in versions.items():
            contexts[i].versions = each  # type: ignore[attr-defined]
        for i, weights in owners.items():
            contexts[i].main_grad_owners = weights
        inputs = [*saved, *grads]
        held = [tuple(_tensor(each, saved) for each in recording.saved)]
        saved.clear()
        args = (contexts, held, recording.ends, dx, grad_extras, recording.specs)
        if is_observed or found is not None or not _are_distinct(inputs):
            del inputs
            return backward(*args)
        sequence, result, slotted = record(
            inputs,
            lambda: backward(*args),
            constants=self._constants,
            with_calls=True,
            owns_inputs=True,
        )
        sequence.result = slotted(result)
        sequence.drop_names()
        while len(self._backwards) >= MOST_LAYOUTS:
            self._backwards.pop(next(iter(self._backwards)), None)
        self._backwards[layout] = sequence
        return result


def _saved_as(
    tensor: torch.Tensor | None, held: list[torch.Tensor], sequence: LaunchSequence
) -> _Saved | int | None:
    """How to make a saved tensor from the tensors in ``held``, to which its own are added."""
    if tensor is None:
        return None
    if not isinstance(tensor, QuantizedTensor):
        return _index(tensor, held)
    if tensor._view_of is not None or tensor._source is not None:
        sequence.refusal = sequence.refusal or f"it saves {tensor}, which refers to another"
    buffers = {n: _index(b, held) for n, b in tensor.buffers().items() if b is not None}
    what = (tensor.shape, tensor.dtype, tensor.device, tensor._quantizer)
    return _Saved(type(tensor), buffers, *what, tensor._is_read_only)


def _tensor(saved: _Saved | int | None, held: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A saved tensor, over other buffers."""
    if saved is None or isinstance(saved, int):
        return None if saved is None else held[saved]
    return saved.tensor(held)


def _other_tensors(
    extras: Sequence[torch.Tensor | None], owners: Owners
) -> tuple[list[Any], tuple[Any, ...]]:
    """The tensors besides dx that a backward reads: gradients of extra outputs, and ``main_grad``.

    And what it depends on besides them. A buffer that is not there is None.
    """
    tensors: list[Any] = []
    key: list[Any] = []
    for grad in extras:
        key.append(grad is None)
        if grad is not None:
            tensors.append(grad)
    for owner in itertools.chain.from_iterable(owners.values()):
        buffer, options = (None, None) if owner is None else accumulation(owner)
        key.append(options)
        if owner is not None:
            tensors.append(buffer)
    return tensors, tuple(key)


def _has_its_values(tensor: torch.Tensor | None) -> bool:
    """Whether the memory of a tensor holds its values."""
    return type(tensor) in PLAIN and not tensor.is_neg()  # type: ignore[union-attr]


def _played(sequence: LaunchSequence, tensors: Tensors) -> Any:
    if not _is_autocast():
        return sequence.play(tensors)
    with torch._C._DisableAutocast():
        return sequence.play(tensors)


def _picked(
    wanted: Sequence[torch.Tensor], tensors: Tensors, sequence: LaunchSequence
) -> Callable[[Tensors], Any]:
    """A function that picks some tensors, two or more, from the inputs of ``sequence``."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    if not all(id(tensor) in places for tensor in wanted):
        sequence.refusal = sequence.refusal or "it reads the version of what is no input"
        return tuple
    return operator.itemgetter(*[places[id(tensor)] for tensor in wanted])


def _index(tensor: torch.Tensor, held: list[torch.Tensor]) -> int:
    """The place of ``tensor`` in ``held``, to which it is added if it is not there."""
    for place, other in enumerate(held):
        if other is tensor:
            return place
    held.append(tensor)
    return len(held) - 1


def _context(kind: type[OperationContext], attributes: dict[str, Any]) -> OperationContext:
    context = kind()
    context.to_save = context.saved_tensors = None
    context.__dict__.update(attributes)
    return context


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensors, value))
    return isinstance(value, (torch.Tensor, LazyTensor))


_is_autocast = torch._C._is_any_autocast_enabled
_has_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
