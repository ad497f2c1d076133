"""Methods and constructors of Transformer Engine's quantized tensors, as members of their classes.

The classes name them as :class:`~fuser.doors.OfProduct`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from fuser.errors import InputError, InputTypeError
from fuser.formats import DType
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.block_scaling import Float8BlockQuantizer, Float8BlockwiseQTensor
from fuser.tensors.fp8 import Float8CurrentScalingQuantizer, Float8Tensor
from fuser.tensors.hybrid import HybridQuantizedTensor
from fuser.tensors.identity import IdentityTensor
from fuser.tensors.nvfp4 import NVFP4Quantizer, NVFP4Tensor
from fuser.tensors.quantizer import Quantizer


class Float8BlockScaleTensorFormat(Enum):
    """The layouts of FP8 blocks in Transformer Engine, of which the first is here."""

    GEMM_READY = 0
    COMPACT = 1


# The keywords of constructors, and the buffers that they set if the names differ.
_KEYWORDS: dict[type[QuantizedTensor], dict[str, str]] = {
    Float8Tensor: {
        "data": "_rowwise_data",
        "data_transpose": "_columnwise_data",
        "fp8_scale_inv": "_scale_inv",
    },
}
# The other keywords, each with the values that this library supports; None: any value.
_OPTIONS: dict[str, tuple[Any, ...] | None] = {
    "fp8_dtype": None,
    "fp4_dtype": (None, DType.kFloat4E2M1),
    "is_2D_scaled": None,
    "data_format": (None, Float8BlockScaleTensorFormat.GEMM_READY),
    "device": None,
    "with_gemm_swizzled_scales": (False,),
}


def _buffers_by_keyword(cls: type[QuantizedTensor]) -> dict[str, str]:
    own = next((_KEYWORDS[base] for base in cls.__mro__ if base in _KEYWORDS), None)
    return own or {name.removeprefix("_"): name for name in cls.buffer_names}


# -- constructors ----------------------------------------------------------------


@classmethod  # type: ignore[misc]
def _from_keywords(
    cls: type[QuantizedTensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    quantizer: Quantizer | None,
    requires_grad: bool,
    named: dict[str, Any],
) -> QuantizedTensor:
    """A tensor that shares the given buffers.

    ``Float8Tensor`` takes ``data``, ``data_transpose`` and ``fp8_scale_inv``, the
    others take ``rowwise_data``, ``rowwise_scale_inv``, ``columnwise_data`` and so
    on, with ``fp8_dtype`` and, for blocks of 128, ``is_2D_scaled``. If no quantizer
    is given, it is made from these.

    Raises
    ------
    InputTypeError
        If a keyword is unknown, or the class is not made of buffers.
    InputError
        If no data is given, or a buffer does not fit the shape.
    """
    if issubclass(cls, (HybridQuantizedTensor, IdentityTensor)):
        raise InputTypeError(f"{cls.__name__} is not made of buffers here: call its quantizer.")
    keywords = _buffers_by_keyword(cls)
    for name, value in named.items():
        if name not in keywords and name not in _OPTIONS:
            raise InputTypeError(
                f"{cls.__name__} takes no keyword {name!r}; it takes {', '.join(keywords)}."
            )
        allowed = _OPTIONS.get(name)
        if allowed is not None and value not in allowed:
            raise InputError(
                f"{cls.__name__} got {name}={value!r}; the only supported value is {allowed[-1]!r}."
            )
    given = {keywords[name]: value for name, value in named.items() if name in keywords}
    buffers = {name: _as_bytes(given.get(name)) for name in cls.buffer_names}
    usages = {
        usage: buffers[names[0]] is not None
        for usage, names in (("rowwise", cls.rowwise_names), ("columnwise", cls.columnwise_names))
    }
    if not any(usages.values()):
        raise InputError(f"{cls.__name__} got no data. Give rowwise_data, columnwise_data or both.")
    if quantizer is None:
        quantizer = _quantizer_of(cls, named)
    device = next(buffer.device for buffer in buffers.values() if buffer is not None)
    tensor = cls(
        buffers, shape, dtype, device, quantizer.with_usage(**usages).unbound(), requires_grad
    )
    _check_layout(tensor, usages)
    return tensor


def _check_layout(tensor: QuantizedTensor, usages: dict[str, bool]) -> None:
    """View each buffer in its layout in memory; raise if one does not fit or is missing."""
    both = {*tensor.rowwise_names, *tensor.columnwise_names}
    for name, shape in tensor._layout.shapes(*tensor._matrix()).items():
        buffer = getattr(tensor, name)
        is_needed = name not in both or any(
            is_used and name in tensor._names(usage) for usage, is_used in usages.items()
        )
        if buffer is None and not is_needed:
            continue
        fits = buffer is not None and buffer.is_contiguous()
        if not fits or buffer.numel() != torch.Size(shape).numel():
            layout = "none" if buffer is None else f"shape {tuple(buffer.shape)}"
            raise InputError(
                f"A {type(tensor).__name__} of shape {tuple(tensor.shape)} needs a contiguous "
                f"{name} of shape {shape}; got {layout}."
            )
        setattr(tensor, name, buffer.view(shape))


def _as_bytes(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 data as uint8; scales unchanged."""
    if buffer is None or buffer.dtype is torch.float32:
        return buffer
    return buffer.view(torch.uint8)


def _quantizer_of(cls: type[QuantizedTensor], named: dict[str, Any]) -> Quantizer:
    element = named.get("fp8_dtype") or DType.kFloat8E4M3
    if issubclass(cls, Float8Tensor):
        return Float8CurrentScalingQuantizer(element)
    if issubclass(cls, Float8BlockwiseQTensor):
        return Float8BlockQuantizer(
            element, block_scaling_dim=2 if named.get("is_2D_scaled", True) else 1
        )
    if issubclass(cls, NVFP4Tensor):
        return NVFP4Quantizer()
    makes: Any = next(
        q for q in Quantizer.__subclasses__() if getattr(q, "tensor_class", None) in cls.__mro__
    )
    quantizer: Quantizer = makes(element)
    return quantizer


# -- methods of every quantized tensor -----------------------------------------------


def get_usages(self: QuantizedTensor) -> dict[str, bool]:
    """Which copies the tensor has: ``rowwise`` and ``columnwise``."""
    return {"rowwise": self._has("rowwise"), "columnwise": self._has("columnwise")}


def get_data_tensors(
    self: QuantizedTensor, rowwise_data: bool = True, columnwise_data: bool = True
) -> Any:
    """The bytes of the rowwise and the columnwise copy; a pair, or one tensor if one is requested.

    Raises
    ------
    InputError
        If both arguments are False.
    """
    asked = (("rowwise", rowwise_data), ("columnwise", columnwise_data))
    buffers = tuple(getattr(self, self._names(usage)[0]) for usage, is_asked in asked if is_asked)
    if not buffers:
        raise InputError(
            "get_data_tensors got neither rowwise_data nor columnwise_data. Ask for one or both."
        )
    return buffers if len(buffers) == 2 else buffers[0]


def get_metadata(self: QuantizedTensor) -> dict[str, Any]:
    """The keywords that make a tensor of the same bytes, together with ``shape`` and ``dtype``."""
    source = self.compact()
    keywords = _buffers_by_keyword(type(self))
    metadata = {keyword: getattr(source, name) for keyword, name in keywords.items()}
    metadata["quantizer"] = self._quantizer
    if isinstance(self, NVFP4Tensor):
        return metadata | {"fp4_dtype": DType.kFloat4E2M1}
    if isinstance(self, Float8BlockwiseQTensor):
        metadata["is_2D_scaled"] = self._quantizer.block_scaling_dim == 2
        metadata["data_format"] = Float8BlockScaleTensorFormat.GEMM_READY
    if isinstance(self, (HybridQuantizedTensor, IdentityTensor)):
        return metadata
    return metadata | {"fp8_dtype": self._quantizer.fp8_dtype}


@classmethod  # type: ignore[misc]
def make_like(
    cls: type[QuantizedTensor],
    tensor: QuantizedTensor,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> QuantizedTensor:
    """A tensor that shares the bytes of ``tensor``, with another shape or nominal dtype.

    Raises
    ------
    InputError
        If ``shape`` changes the last dimension or the number of elements.
    """
    size = tensor.shape if shape is None else torch.Size(shape)
    if size.numel() != tensor.numel() or size[-1:] != tensor.shape[-1:]:
        raise InputError(
            f"make_like got shape {tuple(size)} for a tensor of shape {tuple(tensor.shape)}; "
            "another shape must keep the length and the number of rows."
        )
    alike = type(tensor)(
        tensor.buffers(),
        size,
        dtype or tensor.dtype,
        tensor.device,
        tensor._quantizer,
        view_of=tensor._view_of,
    )
    alike._is_read_only = tensor._is_read_only
    return alike.requires_grad_(requires_grad)  # type: ignore[return-value]


def to_dtype(self: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """A tensor that shares the bytes of this one, with another nominal dtype."""
    return self.make_like(self, dtype=dtype)  # type: ignore[no-any-return]


def prepare_for_saving(
    self: QuantizedTensor,
) -> tuple[list[torch.Tensor | None], QuantizedTensor]:
    """The buffers, for ``ctx.save_for_backward``, and a tensor without buffers.

    :func:`restore_from_saved` puts the buffers back into that tensor. This tensor is unchanged.
    """
    waiting = self.make_like(self)
    for name in self.buffer_names:
        setattr(waiting, name, None)
    return list(self.buffers().values()), waiting


def restore_from_saved(
    self: QuantizedTensor, tensors: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Take this tensor's buffers from the start of ``tensors``; return the rest of ``tensors``."""
    count = len(self.buffer_names)
    for name, buffer in zip(self.buffer_names, tensors[:count], strict=True):
        setattr(self, name, buffer)
    return list(tensors[count:])


def clear(self: QuantizedTensor) -> None:
    """Free the bytes; aliases and views keep theirs. The tensor cannot be read afterwards."""
    for name in self.buffer_names:
        setattr(self, name, None)


# -- members of some formats ------------------------------------------------------------


def _reset_caches(self: Float8Tensor) -> None:
    """Drop the transpose after a write to the bytes; it is made again when it is needed."""
    if self._rowwise_data is not None:
        self._columnwise_data = None
    self._was_written()


_fp8_dtype = property(lambda tensor: tensor._quantizer.fp8_dtype)
_is_2D_scaled = property(lambda tensor: tensor._quantizer.block_scaling_dim == 2)
