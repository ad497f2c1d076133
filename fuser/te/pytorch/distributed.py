"""``transformer_engine.pytorch.distributed``: random states, checkpoints, and gathered rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from fuser.communication import GroupArgument
from fuser.errors import InputError, StateError
from fuser.te.functions import checkpoint

__all__ = [
    "CudaRNGStatesTracker",
    "activation_recompute_forward",
    "checkpoint",
    "gather_along_first_dim",
    "get_all_rng_states",
    "get_distributed_rank",
    "get_distributed_world_size",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "reduce_scatter_along_first_dim",
]


def _generator() -> Any:
    """What has the functions of the random state: that of the GPU, or of the CPU without one."""
    return torch.cuda if torch.cuda.is_available() else torch


_last_states: dict[str, torch.Tensor] = {}


class CudaRNGStatesTracker:
    """Named random states of the GPU, or of the CPU where there is none."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the dict of states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Use these states, of :meth:`get_states`."""
        global _last_states
        self.states_ = states
        _last_states = self.states_

    def add(self, name: str, seed: int) -> None:
        """A new state ``name``, seeded with ``seed``.

        Raises
        ------
        InputError
            If there is such a name or seed.
        """
        global _last_states
        if seed in self.seeds_:
            raise InputError(
                f"The random state {name!r} got the seed {seed}, which another has: give another."
            )
        if name in self.states_:
            raise InputError(f"There is a random state {name!r} already: call reset() first.")
        self.seeds_.add(seed)
        generator = _generator()
        before = generator.get_rng_state()
        generator.manual_seed(seed)
        self.states_[name] = generator.get_rng_state()
        generator.set_rng_state(before)
        _last_states = self.states_

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from the state ``name``, and go on with it the next time.

        Raises
        ------
        StateError
            If there is no such state.
        """
        if name not in self.states_:
            raise StateError(
                f"There is no random state {name!r} among {sorted(self.states_)}; add() makes one."
            )
        generator = _generator()
        before = generator.get_rng_state()
        generator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_rng_state()
            generator.set_rng_state(before)


def get_all_rng_states() -> dict[str, torch.Tensor]:
    """The states of the tracker that was used last."""
    return _last_states


_recomputes: ContextVar[tuple[bool, bool]] = ContextVar(
    "fuser_te_recompute", default=(False, False)
)


@contextlib.contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Say that code inside is run by a checkpoint, first (False) or again (True).

    Scales of delayed scaling are found by the recomputed op itself.
    """
    token = _recomputes.set((activation_recompute, recompute_phase))
    try:
        yield
    finally:
        _recomputes.reset(token)


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether a checkpoint runs the code here."""
    return _recomputes.get()[0]


def in_fp8_activation_recompute_phase() -> bool:
    """Whether a checkpoint runs the code here again, in backward."""
    return _recomputes.get()[1]


def get_distributed_world_size(group: GroupArgument = None) -> int:
    """The ranks of ``group``; 1 without process groups."""
    return dist.get_world_size(group=group) if dist.is_initialized() else 1  # type: ignore[arg-type]


def get_distributed_rank(group: GroupArgument = None) -> int:
    """This rank in ``group``; 0 without process groups."""
    return dist.get_rank(group=group) if dist.is_initialized() else 0  # type: ignore[arg-type]


def gather_along_first_dim(
    inp: torch.Tensor, process_group: Any, async_op: bool = False, quantizer: Any = None
) -> tuple[torch.Tensor, Any]:
    """``inp`` of all ranks along dimension 0, and a handle to wait for if ``async_op``.

    Raises
    ------
    InputError
        If a quantizer is given: ``fuser.AllGather`` gathers quantized rows.
    """
    if quantizer is not None:
        raise InputError(
            f"gather_along_first_dim got the quantizer {quantizer}; it gathers plain tensors. Use "
            "the op fuser.AllGather, which gathers rows in the format of their reader."
        )
    ranks = get_distributed_world_size(process_group)
    if ranks == 1:
        return inp, None
    out = torch.empty((ranks * inp.shape[0], *inp.shape[1:]), dtype=inp.dtype, device=inp.device)
    handle = dist.all_gather_into_tensor(
        out, inp.contiguous(), group=process_group, async_op=async_op
    )
    return out, handle


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: Any, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """This rank's rows of the sum of ``inp`` over ranks, and a handle if ``async_op``.

    Raises
    ------
    InputError
        If the ranks do not divide dimension 0.
    """
    ranks = get_distributed_world_size(tp_group)
    if ranks == 1:
        return inp, None
    if inp.shape[0] % ranks:
        raise InputError(
            f"reduce_scatter_along_first_dim got {inp.shape[0]} rows for {ranks} ranks; give rows "
            "that the ranks divide."
        )
    shape = (inp.shape[0] // ranks, *inp.shape[1:])
    out = torch.empty(shape, dtype=inp.dtype, device=inp.device)
    handle = dist.reduce_scatter_tensor(out, inp.contiguous(), group=tp_group, async_op=async_op)
    return out, handle
