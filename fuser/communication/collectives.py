"""Asynchronous collectives along dim 0: all-gather, reduce-scatter, all-reduce, all-to-all.

Each ``start_*`` returns at once; the communication overlaps with the work that follows, until
``wait``. The caller's tensors are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from fuser.cuda.launch import call_each_time
from fuser.torch_private import is_unfinished
from fuser.wrapper_tensor import WrapperTensor

Result = TypeVar("Result")

# torch 2.13 renames the two functions, and warns about the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Recordings repeat each of these calls.


def _gather(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> Any:
    return _all_gather(out, x, group=group, async_op=True)


def _scatter(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> Any:
    return _reduce_scatter(out, x, group=group, async_op=True)


def _exchange(
    out: torch.Tensor,
    x: torch.Tensor,
    received: list[int] | None,
    sent: list[int] | None,
    group: dist.ProcessGroup,
) -> Any:
    return dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)


def _add(out: torch.Tensor, group: dist.ProcessGroup) -> Any:
    return dist.all_reduce(out, group=group, async_op=True)


def _wait(work: Any, kept: tuple[torch.Tensor, ...]) -> None:
    """Wait for a collective, whose tensors are in memory until then."""
    work.wait()


class Pending(Generic[Result]):
    """The result of communication that may still run.

    Parameters
    ----------
    finish
        Returns the result, after the communication.
    work
        torch's object for the collective; None if nothing was communicated, or ``finish`` waits.
    kept
        Tensors that the communication reads and writes: they stay in memory until :meth:`wait`.
    """

    def __init__(
        self,
        finish: Callable[[], Result],
        work: Any | None = None,
        kept: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self._finish = finish
        self._work = work
        self._kept = kept

    def wait(self) -> Result:
        """The result. Work that the device gets after this call runs after the communication."""
        if self._work is not None:
            call_each_time(_wait, self._work, self._kept)
        self._work, self._kept = None, ()
        return self._finish()


def finished(tensor: Any) -> Any:
    """The result of a collective of torch that may still run; anything else itself.

    Kernels read memory, and such an ``AsyncCollectiveTensor`` has none of its own. torch's tensor
    parallel styles return them.
    """
    return tensor.wait() if is_unfinished(tensor) else tensor


def _values(x: torch.Tensor) -> torch.Tensor:
    """``x`` as memory that holds its values: contiguous, and not quantized."""
    if isinstance(x, WrapperTensor):
        x = x.dequantize()
    return x.detach().contiguous()


def _shares_memory(out: torch.Tensor, x: torch.Tensor) -> bool:
    return not isinstance(x, WrapperTensor) and out.data_ptr() == x.data_ptr()


def _is_silent(x: torch.Tensor) -> bool:
    """Whether there is nothing to send: no elements, or no memory (meta)."""
    return x.is_meta or x.numel() == 0


def start_all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0
) -> Pending[torch.Tensor]:
    """Start to gather the tensors of all ranks, equal in shape, along ``dim`` 0 or 1.

    The result is contiguous, and the same on every rank.
    """
    ranks = dist.get_world_size(group)
    x = _values(x)
    out = torch.empty((ranks * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    work = None if _is_silent(x) else call_each_time(_gather, out, x, group)
    if dim == 0:
        return Pending(lambda: out, work, (out, x))
    assert dim == 1
    rows, columns = x.shape

    def side_by_side() -> torch.Tensor:
        return out.view(ranks, rows, columns).transpose(0, 1).reshape(rows, ranks * columns)

    return Pending(side_by_side, work, (out, x))


def start_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Start to add the tensors of all ranks; each rank gets its part of the rows of the sum.

    The number of ranks divides the rows (``groups.check_divides``).
    """
    x = _values(x)
    shape = (x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    work = None if _is_silent(x) else call_each_time(_scatter, out, x, group)
    return Pending(lambda: out, work, (out, x))


def start_all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> Pending[torch.Tensor]:
    """Start to send rows of ``x`` to each rank; the result has those from rank 0, then rank 1, ...

    ``send_sizes`` and ``receive_sizes`` are the numbers of rows by rank. Without them every rank
    gets an equal part, which the number of ranks divides.
    """
    x = _values(x)
    rows = len(x) if receive_sizes is None else sum(receive_sizes)
    out = torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
    # With sizes a rank without rows takes part too: others may exchange some.
    work = None
    if not (x.is_meta or (send_sizes is None and x.numel() == 0)):
        received, sent = (None if n is None else list(n) for n in (receive_sizes, send_sizes))
        work = call_each_time(_exchange, out, x, received, sent, group)
    return Pending(lambda: out, work, (out, x))


def start_all_reduce(
    x: torch.Tensor, group: dist.ProcessGroup, *, is_own: bool = False
) -> Pending[torch.Tensor]:
    """Start to add the tensors of all ranks; each rank gets the sum.

    ``is_own``: nothing else reads ``x``, which may hold the result.
    """
    out = _values(x)
    if not is_own and (x.is_meta or _shares_memory(out, x)):
        out = out.clone()
    work = None if _is_silent(out) else call_each_time(_add, out, group)
    return Pending(lambda: out, work, (out,))
