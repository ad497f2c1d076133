"""Weights of ops: their first values, and the quantized ones kept for later microbatches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from fuser.basic_ops.linear_operands import bind, kept_copy
from fuser.communication import is_distributed
from fuser.cuda.arguments import layout_of
from fuser.doors import PARAMETERS
from fuser.op import BasicOperation, default_device, fill_weight
from fuser.op.optimizer_steps import optimizer_steps
from fuser.precision.contexts import (
    ParameterInit,
    initialised_weight,
    recomputed_state,
    weight_quantizer,
)
from fuser.precision.delayed_scaling import holds_steps
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import DelayedScaling
from fuser.specs import PlanKey, QuantSpec
from fuser.tensors import Float8Quantizer, QuantizedTensor, Quantizer

Form = QuantizedTensor | list[QuantizedTensor]
"""Quantized weights: one tensor, or one of each group."""
Made = TypeVar("Made", bound=Form)


class KeepsWeights(BasicOperation):
    """An op whose weights may be quantized for the first microbatch and kept for the next ones."""

    # What is kept of the weights, by the first of them, which it does not keep alive.
    _kept_weight: MutableMapping[torch.Tensor, KeptWeight] | None = None

    def weights_to_keep(self) -> Sequence[torch.Tensor] | None:
        """The weights that a microbatch reads; None if each reading computes them."""
        names = (self.parameter_names or ())[: self.main_grad_count]
        try:
            weights: list[Any] = list(map(self._parameters.__getitem__, names))
        except KeyError:
            return None
        return weights

    def kept_weights(
        self,
        weights: Sequence[torch.Tensor],
        dtype: torch.dtype,
        quantizers: Sequence[Quantizer],
        is_first_microbatch: bool,
        make: Callable[[], Made],
        is_complete: Callable[[Made], bool],
    ) -> Made:
        """The result of ``make`` for a microbatch, or that of an earlier one.

        Weights that have changed since are quantized again, whatever the caller says, and so are
        those whose form is not ``is_complete``.
        """
        before = KeptBefore.of(self, weights, is_first_microbatch)
        if before is None:
            return make()
        how = (dtype, *[_encoding(quantizer) for quantizer in quantizers])
        kept = before.kept
        if kept is not None and kept.how == how and is_complete(cast(Made, kept.made)):
            return cast(Made, kept.made)
        # What is kept outlives the caller's inference_mode: a later microbatch may be trained.
        with torch.inference_mode(False), torch.no_grad():
            form = make()
        before.keep(how, form)
        return form

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_kept_weight": None}

    # Both methods may swap a weight with another tensor. torch refuses to swap a tensor that has
    # weak references, and what was kept does not belong to the new contents.

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._kept_weight = None
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._kept_weight = None
        super()._load_from_state_dict(*args, **kwargs)


class InitialisedWeights(KeepsWeights):
    """An op whose weights are initialised: ``weight``, or ``weight0``, ``weight1`` and so on."""

    _names: Mapping[str, tuple[str, ...]] = {"weight": ("weight",)}
    """Names of the parameters by kind: one, which is the kind, or one of each group."""
    _init: ParameterInit | None
    """The options of ``quantized_model_init``, under which the op was made."""
    _rng_state_tracker_function: Callable[[], Any] | None

    def kept_input(self, key: PlanKey) -> QuantSpec | None:
        return kept_copy(self, "input", key)

    def kept_weight(self, key: PlanKey) -> QuantSpec | None:
        return kept_copy(self, "weight", key)

    def _register(self, kind: str, buffer: torch.Tensor) -> None:
        """Register the parameters of a kind over ``buffer``, or over each ``buffer[g]``."""
        parts = [buffer] if self._is_one(kind) else buffer
        for name, part in zip(self._names[kind], parts, strict=True):
            self.register_parameter(name, Parameter(part))

    def _is_one(self, kind: str) -> bool:
        """Whether there is one parameter of a kind, for all groups if there are any."""
        return self._names[kind] == (kind,)

    def _parts(self, kind: str) -> list[Any]:
        """The parameters of a kind: those of each group, or the one that there is."""
        parameters = self._parameters  # without torch's lookup of an attribute, 0.5 us for each
        return [parameters[n] if n in parameters else getattr(self, n) for n in self._names[kind]]

    def _reset(self, names: Iterable[str]) -> None:
        """Initialise weights as torch.nn.Linear does, and other parameters with zeros."""
        tracker = self._rng_state_tracker_function
        with tracker().fork() if tracker is not None else contextlib.nullcontext():
            for name in names:
                is_weight = name.startswith(("weight", "lora_A"))
                self.initialise(name, fill_weight if is_weight else torch.nn.init.zeros_)

    def initialise(self, name: str, fill: Callable[[torch.Tensor], object]) -> None:
        """As for other ops; a weight, or its shard on this rank, is quantized after that."""
        weight = fresh = getattr(self, name)
        if not name.startswith("weight"):
            super().initialise(name, fill)
            return
        if is_distributed(weight):
            quantizer = None
            if self._init is not None:
                quantizer = self._parameter_quantizer(name, weight.device)
                quantizer = weight_quantizer(self._init, quantizer)
            PARAMETERS.guest.initialise(self, name, fill, quantizer)
            return
        if weight.is_meta or isinstance(weight, QuantizedTensor):
            device = default_device(None) if weight.is_meta else weight.device
            data = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            fresh = Parameter(data, requires_grad=weight.requires_grad)
        fill(fresh)
        fresh = self.as_parameter(fresh, name)
        if fresh is not weight:
            self.renew(name, fresh)

    def as_parameter(self, weight: Parameter, name: str = "weight") -> Parameter:
        """``weight``; quantized if the op was made under ``quantized_model_init``."""
        if self._init is None or not name.startswith("weight"):
            return weight
        quantizer = self._parameter_quantizer(name, weight.device)
        return initialised_weight(weight, self._init, quantizer)

    def _parameter_quantizer(self, name: str, device: torch.device) -> Quantizer:
        """The quantizer of a weight that is a quantized parameter on ``device``."""
        assert self._init is not None
        recipe = self._init.recipe
        if not isinstance(recipe, DelayedScaling):
            return make_quantizer(recipe, "weight")
        state, dtypes, device = self._delayed_state("forward", recipe, device)
        state.prepare(recipe, dtypes, device)
        group = int(name.removeprefix("weight") or 0)
        quantizer = state.parameter_quantizer(2 * group + 1)  # after the input of its group
        assert quantizer is not None
        return quantizer

    def bound(self, weights: Sequence[Any]) -> Sequence[Any]:
        """The weights, with the scales of this op's state under delayed scaling."""
        state = self._delayed.get("forward")
        if state is not None and self._init is not None:
            for group, weight in enumerate(weights):
                bind(weight, state, 2 * group + 1)
        return weights


@dataclass(eq=False)
class KeptWeight:
    """A quantized form of weights, and all that it depends on."""

    facts: tuple[object, ...]
    """Of the weights: their versions, the number of steps of optimizers, and their places."""
    how: tuple[object, ...]
    """The dtype in which they were read, and the encodings."""
    made: Form
    memory: Any
    """That in which they were gathered; None if nothing frees it."""

    @functools.cached_property
    def buffers(self) -> list[torch.Tensor]:
        """The tensors that hold the form."""
        return [buffer for tensor in as_list(self.made) for buffer in tensor._memory()]

    @functools.cached_property
    def layout(self) -> Hashable:
        """All that launches over the form depend on; None if they cannot be recorded."""
        kinds = [
            (type(t), t.shape, t.dtype, *[b is None for b in t.buffers().values()])
            for t in as_list(self.made)
        ]
        layouts = list(map(layout_of, self.buffers))
        return None if None in layouts else (self.how, *kinds, *layouts)


def as_list(form: Form) -> list[QuantizedTensor]:
    """The tensors of a form."""
    return form if isinstance(form, list) else [form]


class KeptBefore(NamedTuple):
    """The weights of an op before a pass, and what the pass may take of what is kept."""

    op: KeepsWeights
    table: MutableMapping[torch.Tensor, KeptWeight] | None
    first: torch.Tensor
    facts: tuple[object, ...]
    memory: Any
    kept: KeptWeight | None

    @staticmethod
    def of(
        op: KeepsWeights, weights: Sequence[torch.Tensor], is_first_microbatch: bool
    ) -> KeptBefore | None:
        """None if nothing is kept of these weights, and nothing may be.

        Weights that ``fully_shard`` gathers are quantized again after each gathering, which writes
        to them and is not counted by torch. The capture of a graph keeps nothing: its replays would
        read what other microbatches have kept.
        """
        # The local tensor of a DTensor is a new one at each call (runtime/local_parts.py).
        wholes = [getattr(w, "whole_parameter", w) for w in weights]
        table = op._kept_weight
        kept = table.get(wholes[0]) if table else None
        memory = PARAMETERS.guest.memory_of(wholes, None if kept is None else kept.memory)
        if holds_steps() or (memory is not None and memory.is_freed_after_forward()):
            op.__dict__["_kept_weight"] = None
            return None
        versions = tuple([None if w.is_inference() else w._version for w in wholes])
        places = (*map(torch.Tensor.data_ptr, weights), *map(id, wholes[1:]))
        facts = (versions, optimizer_steps(), places)
        if kept is not None:
            is_taken = recomputed_state() is not None or not is_first_microbatch
            is_freed = memory is not kept.memory or (memory is not None and not memory.lasts())
            if kept.facts != facts or is_freed or not is_taken:
                kept = None
        return KeptBefore(op, table, wholes[0], facts, memory, kept)

    def keep(self, how: tuple[object, ...], form: Any) -> None:
        """Keep what was made of the weights in the pass."""
        if self.memory is not None:
            self.memory.begin()
        kept = KeptWeight(self.facts, how, form, self.memory)
        # Not by its name: recordings would be of another op.
        self.op.__dict__["_kept_weight"] = WeakTensorKeyDictionary({self.first: kept})

    def made(self) -> KeptWeight | None:
        """What the op has kept since; None if it took what was there, or nothing."""
        table = self.op._kept_weight
        return None if table is None or table is self.table else next(iter(table.values()))


def _encoding(quantizer: Quantizer) -> object:
    """All that a quantized weight depends on, besides the weight and its copies."""
    # A recomputation under delayed scaling has another scale, and so another quantizer.
    is_delayed = isinstance(quantizer, Float8Quantizer)
    both = quantizer.with_usage(rowwise=True, columnwise=True)
    return quantizer.encoding() if is_delayed else both
