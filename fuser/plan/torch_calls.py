"""Calls of plain torch: what a function calls, and the modelled time eager and compiled.

The function runs on fake tensors, so that nothing is computed. An eager call moves the tensors that
it reads and writes; a product takes the time of its operations, if that is longer. Compiled, the
calls between two products are one kernel, which reads what came from outside, and writes what is
read outside; backward computes again what such kernels computed and did not write.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fuser.plan.devices import Device, precision_of
from fuser.torch_private import TorchDispatchMode, pytree, storage_of

ALLOCATES = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "set_", "resize_")
ATTENTION = "scaled_dot_product_attention"
# FlashAttention's backward has five products, one of them computed again; forward has two.
ATTENTION_BACKWARD = 2.5

Place = tuple[int, int]
"""A part of a storage: the number of that, and where the part begins."""


@dataclass(frozen=True)
class TorchCall:
    """One call: its operations if it is a product, and the bytes of what it reads and writes.

    ``has_backward``: autograd may record it.
    """

    name: str
    flops: int
    precision: str
    reads: dict[Place, int]
    writes: dict[Place, int]
    has_backward: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def is_product(self) -> bool:
        """Whether torch.compile calls it by itself."""
        return self.flops > 0

    def seconds(self, device: Device, side: str) -> float:
        """The time of the call by itself, with its launch."""
        moving = self.nbytes / device.bandwidth
        if not self.is_product:
            return moving + device.launch
        rate = device.products(self.precision, is_grouped=False).on(side)
        if self.name == ATTENTION:
            rate = min(device.attention, device.peak)
        return max(self.flops / rate, moving) + device.launch


class TorchCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that lists calls; ``listed`` is called with each."""

    def __init__(self, listed: Callable[[TorchCall], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listed = listed
        # Of all tensors, by their numbers, which so stay unique.
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._on_a_gpu = _AsOnAGpu(self)
        self.is_inside = False
        """Whether attention runs, whose kernel depends on the device: nothing is listed."""

    def __enter__(self) -> Any:
        self._on_a_gpu.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._on_a_gpu.__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        is_free = func.is_view or name.startswith(ALLOCATES) or name == "detach"
        if self.is_inside or is_free or func.namespace == "prim":
            return result
        from torch.utils.flop_counter import flop_registry  # it imports Triton

        formula = flop_registry.get(func.overloadpacket)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
        self.list(name, flops, (args, kwargs), result)
        return result

    def list(self, name: str, flops: int, inputs: object, outputs: object) -> None:
        """Add a call with the tensors in ``inputs`` and ``outputs``."""
        reads, writes = self._parts(inputs), self._parts(outputs)
        dtypes = [t.dtype for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        precision = precision_of(dtypes[0] if dtypes else torch.float32)
        self._listed(TorchCall(name, flops, precision, reads, writes, torch.is_grad_enabled()))

    def _parts(self, tree: object) -> dict[Place, int]:
        parts: dict[Place, int] = {}
        for tensor in pytree.tree_leaves(tree):
            if isinstance(tensor, torch.Tensor):
                number = storage_of(tensor)
                self.storages[number] = tensor.untyped_storage()
                place = (number, int(tensor.storage_offset()))
                sizes = zip(tensor.shape, tensor.stride(), strict=True)
                elements = math.prod(size for size, stride in sizes if stride)
                parts[place] = max(parts.get(place, 0), elements * tensor.element_size())
        return parts


class _AsOnAGpu(TorchFunctionMode):
    """Lists attention and RMS norms as one call, as a GPU's kernels are, on every device."""

    def __init__(self, calls: TorchCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.rms_norm and not self._calls.is_inside:
            return _rms_norm(*args, **kwargs)
        if func is not F.scaled_dot_product_attention or self._calls.is_inside:
            return func(*args, **kwargs)
        self._calls.is_inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._calls.is_inside = False
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (arguments[name] for name in names[:3])
        batch, heads = math.prod(query.shape[:-3]), math.prod(query.shape[-3:-2])
        shapes = [(batch, heads, *tensor.shape[-2:]) for tensor in (query, key, value)]
        from torch.utils.flop_counter import sdpa_flop_count

        flops = int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
        if arguments.get("is_causal"):
            flops //= 2  # half of the pairs are masked, and skipped
        tensors = (query, key, value, arguments.get("attn_mask"))
        self._calls.list(ATTENTION, flops, tensors, result)
        return result


def _rms_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """A call of the kernel that torch has for it on a GPU, which is that of the layer norm."""
    if weight is not None and weight.dtype != x.dtype:
        return F.rms_norm(x, shape, weight, eps)  # of several kernels there too
    return F.layer_norm(x, shape, weight, None, 1e-5 if eps is None else eps)


def eager_seconds(calls: Sequence[TorchCall], device: Device, side: str) -> float:
    """The time of ``calls`` of one side, one after the other."""
    return sum(call.seconds(device, side) for call in calls)


def compiled_seconds(
    forward: Sequence[TorchCall],
    backward: Sequence[TorchCall],
    outputs: Sequence[Place],
    device: Device,
) -> tuple[float, float]:
    """The time of the calls of both sides in torch.compile, as it is modelled here.

    ``outputs`` are the parts of storages that the caller gets, and so is what no call reads.
    """
    groups = {"forward": list(_groups(forward)), "backward": list(_groups(backward))}
    producer = {
        place: call
        for group in groups["forward"]
        for call in group
        if not call.is_product
        for place in call.writes
        if place not in call.reads  # written in place
    }
    stored = {place for call in forward if call.is_product for place in call.reads}
    stored.update(outputs)

    def sources(place: Place, nbytes: int) -> dict[Place, int]:
        """What backward reads for a tensor of forward: what that was computed of, if not stored."""
        result: dict[Place, int] = {}
        waiting, seen = [(place, nbytes)], {place}
        while waiting:
            place, nbytes = waiting.pop()
            call = producer.get(place)
            if call is None or place in stored:
                result[place] = nbytes
            else:
                waiting += [item for item in call.reads.items() if item[0] not in seen]
                seen.update(call.reads)
        return result

    read = {place for call in (*forward, *backward) for place in call.reads}
    results = {place for call in (*forward, *backward) for place in call.writes} - read
    results.update(outputs)
    seconds = {}
    for side, parts in groups.items():
        seconds[side] = 0.0
        for number, group in enumerate(parts):
            if group[0].is_product:
                seconds[side] += group[0].seconds(device, side)
                continue
            written = {p: n for call in group for p, n in call.writes.items()}
            entering: dict[Place, int] = {}
            for call in group:
                for place, nbytes in call.reads.items():
                    if place not in written:
                        known = sources(place, nbytes) if side == "backward" else {place: nbytes}
                        entering |= known
            later = {p for rest in parts[number + 1 :] for call in rest for p in call.reads}
            leaving = sum(n for p, n in written.items() if p in later or p in results)
            moved = sum(entering.values()) + leaving
            seconds[side] += moved / device.bandwidth + device.launch
    return seconds["forward"], seconds["backward"]


def _groups(calls: Sequence[TorchCall]) -> Iterator[list[TorchCall]]:
    """Each product alone, and the calls between two products together."""
    for is_product, group in itertools.groupby(calls, lambda call: call.is_product):
        if is_product:
            yield from ([call] for call in group)
        else:
            yield list(group)
