"""Views of a quantized tensor that cannot be quantized themselves, such as columns."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from fuser.tensors.base import QuantizedTensor
from fuser.torch_private import make_wrapper
from fuser.wrapper_tensor import WrapperTensor

Step = Callable[[torch.Tensor], torch.Tensor]


class DequantizedView(WrapperTensor):
    """A view of a quantized tensor that is not a range of whole rows: columns, a diagonal.

    It behaves as a view of a plain tensor. A read dequantizes the quantized tensor at that moment.
    An in-place write dequantizes the whole tensor, writes, and quantizes the blocks of rows that it
    has elements of (``QuantizedTensor``). Results of operations on a view are plain tensors, and so
    is a clone of it.

    ``path`` is the view operations that lead from the values of ``root``, which is not a view, to
    those of the view; ``like`` has the view's shape, strides, offset and dtype.
    """

    _root: QuantizedTensor
    _path: tuple[Step, ...]

    @staticmethod
    def __new__(
        cls: type[DequantizedView],
        root: QuantizedTensor,
        path: tuple[Step, ...],
        like: torch.Tensor,
    ) -> DequantizedView:
        self: DequantizedView = make_wrapper(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=root.device,
            storage_size=0,
        )
        self._root = root
        self._path = path
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._values()!r}, of {self._root!r})"

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of the same shape, in ``dtype`` or else the view's dtype."""
        return self.clone() if dtype in (None, self.dtype) else self.to(dtype)

    def _values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = follow(self._path, self._root._values())
        return values if dtype is None else values.to(dtype)

    def _memory(self) -> list[torch.Tensor]:
        return self._root._memory()

    def share_memory_(self) -> torch.Tensor:
        """Move the contents of the parent to shared memory."""
        self._root.share_memory_()
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        # A view is pickled as a tensor of its own, as a view of rows is.
        alone = self._alone()
        reduced: tuple[object, ...] = alone.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return reduced

    def _alone(self) -> torch.Tensor:
        values = self._values().clone()
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(values, self.requires_grad)
        return values.requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, object]) -> DequantizedView:
        if id(self) in memo or not self.is_leaf:
            copied: DequantizedView = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
            return copied
        # As torch does: the copied view is a view of the copied parent.
        attributes = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_path"}
        copied = DequantizedView(attributes["_root"], self._path, self)
        copied.requires_grad_(self.requires_grad)
        copied.__dict__.update(attributes)
        copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def __tensor_flatten__(self) -> tuple[list[str], tuple[object, ...]]:
        """The quantized tensor, and everything else as a constant, for ``torch.compile``."""
        return ["_root"], (self._path, self.dtype, int(self.storage_offset()))

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Any], constants: tuple[Any, ...], shape: Any, strides: Any
    ) -> DequantizedView:
        path, dtype, offset = constants
        like = torch.empty(0, dtype=dtype, device="meta").as_strided(shape, strides, offset)
        # The graph has a copy of the tensor: a write to it would not change the tensor itself.
        root = parts["_root"]._alias()
        root._is_read_only = True
        return DequantizedView(root, path, like)


def follow(path: tuple[Step, ...], values: torch.Tensor) -> torch.Tensor:
    """``values`` after the view operations of ``path``, in order."""
    return functools.reduce(lambda seen, step: step(seen), path, values)
