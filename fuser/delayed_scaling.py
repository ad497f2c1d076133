"""Delayed scaling's state, which amaxes it records, and when its steps end.

The forward's step ends with the outermost autocast in which amaxes were recorded, the gradients'
with the backward. Evaluation records nothing, so that it leaves training as it is; a recomputation
quantizes with the scales of its forward, and records only what that did not.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import Variable

from fuser.errors import InputError
from fuser.formats import DType
from fuser.functional.fp8_scaling import update_delayed
from fuser.precision import Region, current_group, current_region, recomputed_conditions
from fuser.recipe import DelayedScaling
from fuser.tensors import Float8Quantizer, Quantizer

_is_evaluating: ContextVar[bool] = ContextVar("fuser_is_evaluating", default=False)


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    """A forward that no backward follows: it records no amax."""
    token = _is_evaluating.set(True)
    try:
        yield
    finally:
        _is_evaluating.reset(token)


class DelayedScales:
    """Delayed scaling's state for the tensors that one op quantizes on one side.

    ``scale`` fp32 [n] and ``amax_history`` fp32 [length, n], plain tensors;
    row 0 of the history collects the amax of the running step. ``mode`` is
    ``"forward"`` or ``"backward"``.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.scale = torch.empty(0, dtype=torch.float32, device="cpu")
        self.amax_history = torch.empty(0, 0, dtype=torch.float32, device="cpu")
        self._recipe: DelayedScaling | None = None
        self._quantizers: list[Float8Quantizer] = []
        # Regions whose forward may be recomputed, and ran with the scales of now.
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()

    def quantizer(
        self, recipe: DelayedScaling, dtypes: Sequence[DType], index: int, device: torch.device
    ) -> Quantizer:
        """The quantizer of tensor ``index``, on ``device``; it reads and writes this state."""
        is_other = recipe != self._recipe or device != self.scale.device
        if is_other and _is_evaluating.get() and self.scale.numel():
            # Evaluation under another recipe leaves training's history as it is.
            scale = self.scale[index : index + 1].to(device)
            return Float8Quantizer(scale, None, dtypes[index])
        if is_other:
            with torch.inference_mode(False):  # the state outlives an inference region
                self._prepare(recipe, dtypes, device)
        region = current_region()
        if self.mode == "backward" or region is None:
            return self._quantizers[index]
        if self in region.past_scales:
            past = region.past_scales[self][index : index + 1]
            return Float8Quantizer(past, None, dtypes[index])
        quantizer = self._quantizers[index]
        return quantizer if self._records(region) else quantizer.unbound()

    def _records(self, region: Region) -> bool:
        """Whether the forward that runs records its amaxes; sees to it that their step ends."""
        if _is_evaluating.get():
            return False
        conditions = recomputed_conditions()
        if conditions is None or conditions.region is not region:
            region.recorded[self] = current_group()
            self._regions.add(region)
            return True
        if region in self._regions:
            return False  # as its forward did
        # Its forward ran without gradients, as a reentrant checkpoint's does.
        record_until_backward_ends(self, current_group())
        return True

    def _prepare(
        self, recipe: DelayedScaling, dtypes: Sequence[DType], device: torch.device
    ) -> None:
        self._resize(recipe.amax_history_len, len(dtypes))
        self.scale, self.amax_history = self.scale.to(device), self.amax_history.to(device)
        self._quantizers = [
            Float8Quantizer(self.scale[i : i + 1], self.amax_history[0, i : i + 1], dtype)
            for i, dtype in enumerate(dtypes)
        ]
        self._max = torch.tensor(
            [dtype.max for dtype in dtypes], dtype=torch.float32, device=device
        )
        self._recipe = recipe

    def _resize(self, length: int, count: int) -> None:
        """Make the state, or keep as much of it as the history's new length holds."""
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        if not self.scale.numel():
            self.scale = torch.ones(count, **options)
            self.amax_history = torch.zeros(length, count, **options)
        elif self.scale.numel() != count:
            raise InputError(
                f"Delayed scaling's state is of {self.scale.numel()} tensors, and the op that "
                f"holds it quantizes {count} in its {self.mode}."
            )
        elif len(self.amax_history) != length:
            history = torch.zeros(length, count, **options)
            kept = self.amax_history[:length]
            history[: len(kept)] = kept
            self.amax_history = history

    # -- steps ------------------------------------------------------------------

    def _keep_past_scale(self) -> None:
        """Before an update: leave the scale to the regions whose forward ran with it."""
        regions = list(self._regions)
        self._regions.clear()
        if regions:
            past = self.scale.clone()
            for region in regions:
                region.past_scales[self] = past

    @staticmethod
    def end_step(states: Mapping[DelayedScales, Any]) -> None:
        """Reduce the amaxes of ``states`` over their groups, then roll histories and set scales.

        The order of states is that of their first use, which is the same on
        every rank.
        """
        for state in states:
            state._keep_past_scale()
        reduced = [state for state in states if state._is_reduced()]
        for some in _alike(reduced, lambda state: (id(states[state]), state.scale.device)):
            _max_over_ranks([state.amax_history[0] for state in some], states[some[0]])
        for some in _alike(states, lambda state: (state._recipe, state.scale.device)):
            recipe = some[0]._recipe
            assert recipe is not None
            update_delayed(
                [state.amax_history for state in some],
                [state.scale for state in some],
                [state._max for state in some],
                margin=recipe.margin,
                algorithm=recipe.amax_compute_algo,
            )

    def _is_reduced(self) -> bool:
        return self._recipe is not None and self._recipe.reduce_amax

    # -- as a plain tensor --------------------------------------------------------

    def packed(self) -> torch.Tensor:
        """The state as one fp32 tensor on the CPU: n, length, scales, history row by row."""
        length, count = self.amax_history.shape
        sizes = torch.tensor([count, length], dtype=torch.float32, device="cpu")
        return torch.cat([sizes, self.scale.cpu(), self.amax_history.flatten().cpu()])

    @classmethod
    def unpacked(cls, packed: torch.Tensor, mode: str) -> tuple[DelayedScales, torch.Tensor]:
        """The state at the head of what :meth:`packed` gave, and the rest.

        Raises
        ------
        InputError
            If there is less than the sizes at the head say.
        """
        state = cls(mode)
        count, length = (int(size) for size in packed[:2]) if len(packed) > 1 else (0, -1)
        start, stop = 2 + count, 2 + count + count * length
        if length < 0 or len(packed) < stop:
            raise InputError(
                f"Delayed scaling's {mode} state needs {max(stop, 2)} numbers for {count} tensors "
                f"with a history of {max(length, 0)}; the checkpoint has {len(packed)}."
            )
        state.scale = packed[2:start].clone()
        state.amax_history = packed[start:stop].view(length, count).clone()
        return state, packed[stop:]

    def __getstate__(self) -> dict[str, Any]:
        return {"mode": self.mode, "scale": self.scale, "amax_history": self.amax_history}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["mode"])  # type: ignore[misc]
        self.__dict__.update(state)


# States that record in a backward which runs, by autograd's number of it.
_recorded_in_backward: dict[int, weakref.WeakKeyDictionary[DelayedScales, Any]] = {}
_recorded_lock = threading.Lock()
# More than run inside one another, as nested reentrant checkpoints do.
MAX_BACKWARDS = 64


def record_until_backward_ends(state: DelayedScales, group: Any) -> None:
    """See to it that the step of ``state`` ends when the backward that runs does."""
    task = torch._C._current_graph_task_id()
    with _recorded_lock:  # a backward over several devices has a thread for each
        if task not in _recorded_in_backward:
            # A backward that failed has left its entry; it never ends.
            while len(_recorded_in_backward) >= MAX_BACKWARDS:
                _recorded_in_backward.pop(next(iter(_recorded_in_backward)))
            _recorded_in_backward[task] = weakref.WeakKeyDictionary()
            Variable._execution_engine.queue_callback(lambda: _end_backward(task))
        _recorded_in_backward[task][state] = group


def _end_backward(task: int) -> None:
    with _recorded_lock:
        states = dict(_recorded_in_backward.pop(task, {}))
    DelayedScales.end_step(states)


def _alike(
    states: Iterable[DelayedScales], what: Callable[[DelayedScales], Any]
) -> list[list[DelayedScales]]:
    """``states`` in groups of which ``what`` says the same, all in their order."""
    groups: dict[Any, list[DelayedScales]] = {}
    for state in states:
        groups.setdefault(what(state), []).append(state)
    return list(groups.values())


def _max_over_ranks(amaxes: list[torch.Tensor], group: Any) -> None:
    """Replace each of the tensors by its maximum over the ranks of ``group``, in one reduction."""
    if not amaxes or not torch.distributed.is_initialized():
        return
    if torch.distributed.get_world_size(group) == 1:
        return
    flat = torch.cat(amaxes)
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group=group)
    parts = torch.split(flat, [amax.numel() for amax in amaxes])
    for target, reduced in zip(amaxes, parts, strict=True):
        target.copy_(reduced)
