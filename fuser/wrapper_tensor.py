"""WrapperTensor: base of tensors that store their values in other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import torch

from fuser.errors import StateError
from fuser.torch_private import is_called_by_stager, no_torch_function


class WrapperTensor(torch.Tensor):
    """Base of the tensors without values in their own memory: quantized tensors and views of them.

    They have a shape, a dtype and strides, and a storage of 0 bytes; torch's
    operations go to ``_dispatch``.
    """

    # Set by tensors/dispatch.py, which imports this file.
    _dispatch: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]

    # torch calls this for every function; ours are handled below autograd, in dispatch.
    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return cls._dispatch(func, args, kwargs or {})

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of this shape, in ``dtype`` or else the nominal dtype."""
        raise NotImplementedError

    def _values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The same as :meth:`dequantize`, without autograd."""
        raise NotImplementedError

    def _memory(self) -> list[torch.Tensor]:
        """The tensors that hold the contents."""
        raise NotImplementedError

    def _was_written(self) -> None:
        """Increment the version, so that caches and autograd notice the write."""
        if not self.is_inference():
            torch.autograd.graph.increment_version(self)

    # -- memory ---------------------------------------------------------------------

    def data_ptr(self) -> int:
        """Raises: the values are not stored at any address.

        It is 0, as of torch's own wrappers, for the copy that ``dcp.async_save`` makes.

        Raises
        ------
        StateError
            For all other callers.
        """
        if is_called_by_stager():
            return 0
        raise StateError(
            f"A {type(self).__name__} has no memory with its values; take them from "
            "`tensor.dequantize()`. For safetensors: `save_file({name: t.dequantize() if "
            "isinstance(t, fuser.QuantizedTensor) else t for name, t in "
            "model.state_dict().items()}, path)` and `model.load_state_dict(load_file(path))`."
        )

    def is_shared(self) -> bool:
        """Whether the contents are in shared memory; always True on a GPU."""
        return all(b.is_shared() for b in self._memory())  # type: ignore[no-untyped-call]

    def share_memory_(self) -> torch.Tensor:
        """Move the contents to shared memory, for other processes; no effect on a GPU."""
        for buffer in self._memory():
            buffer.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def numpy(self, *, force: bool = False) -> numpy.ndarray[Any, Any]:
        """The values as a new array; ``force`` as for any tensor."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.dequantize().tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dequantize().__dlpack__(*args, **kwargs)
