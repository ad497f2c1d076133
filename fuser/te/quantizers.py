"""Changeable quantizers for scripts of te.ops; each makes frozen quantizers.

Ops, plans, caches and tensors hold frozen quantizers, which are equal by contents. A script of
te.ops calls ``set_usage`` on the quantizer that it made, or that an op gave it. The classes here
accept these calls. They quantize with :meth:`ChangeableQuantizer.value`, a frozen quantizer of
their present contents, so a change does not affect a frozen quantizer made before.
"""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch

from fuser import tensors
from fuser.communication import resolved
from fuser.doors import VIEW, View
from fuser.errors import InputError
from fuser.formats import BlockScalingDim, DType
from fuser.functional.lazy import LazyTensor
from fuser.op import default_device
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.quantizer import QUANTIZABLE

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
]

_VALUE_OF: dict[type, type[Quantizer]] = {}
"""The class of frozen quantizers for each class here."""
_CHANGEABLE: dict[type[Quantizer], type[ChangeableQuantizer]] = {}


def _usage(name: str) -> property:
    def changed(self: Quantizer, usage: bool) -> None:
        setattr(self, name, usage)

    return property(attrgetter(name), changed, doc=f"Whether tensors have {name} data; may be set.")


class ChangeableQuantizer(Quantizer, abc.ABC):
    """A quantizer with attributes that a script may set.

    It is equal to a frozen quantizer of the same contents. A user's subclass
    computes with its own methods, on a copy of itself.
    """

    internal: bool = False
    """Accepted, no effect: every quantized tensor of fuser is a torch.Tensor."""
    optimize_for_gemm: bool = False
    """Accepted, no effect: a GEMM makes the layout of scales that it reads."""
    with_amax_reduction: bool = False
    amax_reduction_group: Any = None
    _is_value = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:
            value_class: Any = cls.__bases__[1]
            _VALUE_OF[cls], _CHANGEABLE[value_class] = value_class, cls
            cls.accepts_lazy = value_class.accepts_lazy
            cls.is_repeatable = value_class.is_repeatable  # type: ignore[method-assign]
            cls.__doc__ = value_class.__doc__

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        """A frozen quantizer counts as an instance of the changeable class of its kind."""
        return _VALUE_OF.get(cls, cls) in subclass.__mro__

    def value(self) -> Quantizer:
        """The frozen quantizer of the present contents."""
        if self._is_value:
            return self
        value: Quantizer | None = self.__dict__.get("_value")
        if value is None:
            value_class = _VALUE_OF.get(type(self))
            if value_class is None:
                value = copy.copy(self)
                value.__dict__["_is_value"] = True
            else:
                contents = {f.name: getattr(self, f.name) for f in fields(value_class)}
                value = value_class(**contents)
            # Two threads may both make one; ``setdefault`` gives both the same.
            value = self.__dict__.setdefault("_value", value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        for derived in [name for name in self.__dict__ if _is_derived(type(self), name)]:
            del self.__dict__[derived]

    def __getstate__(self) -> dict[str, Any]:
        own = self.__dict__.items()
        return {
            name: value
            for name, value in own
            if name != "_made_from" and not _is_derived(type(self), name)
        }

    def __eq__(self, other: object) -> bool:
        if type(self) not in _VALUE_OF:
            return super().__eq__(other)
        return self.value() == (other.value() if type(other) in _VALUE_OF else other)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.value()) if type(self) in _VALUE_OF else super().__hash__()

    # -- quantizing -------------------------------------------------------------

    def __call__(self, tensor: torch.Tensor | LazyTensor) -> QuantizedTensor:
        value = self.value()
        if isinstance(value, ChangeableQuantizer):
            return Quantizer.__call__(value, tensor)
        return self._over_ranks(value)(tensor)

    def _over_ranks(self, value: Quantizer) -> Callable[[Any], QuantizedTensor]:
        """``value``, for one call, with the amaxes of the ranks over which this one reduces."""
        if not self.with_amax_reduction:
            return value
        group = self.amax_reduction_group
        if group is None:  # all ranks
            group = resolved(type(self).__name__, None)
        return value.bound_to(group)

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Quantize ``tensor``, into ``out`` if that is given.

        Raises
        ------
        InputError
            If ``dtype`` is not the tensor's, or as :meth:`update_quantized`.
        """
        if dtype not in (None, tensor.dtype):
            raise InputError(
                f"{type(self).__name__}.quantize got dtype {dtype} for a tensor of {tensor.dtype}; "
                "a quantized tensor has the dtype of its source: convert the source first."
            )
        return self(tensor) if out is None else self.update_quantized(tensor, out)

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize ``src`` into the memory of ``dst``, with the usage of ``dst``.

        If ``noop_flag``, a tensor of one element, is not zero, ``dst`` does not
        change. Returns ``dst``.

        Raises
        ------
        InputError
            If ``dst`` has another shape or another format, or is not quantized, such as a view
            that cuts the blocks of its tensor.
        """
        if not isinstance(dst, QuantizedTensor):
            raise InputError(
                f"{type(self).__name__}.update_quantized writes into a quantized tensor; got a "
                f"{type(dst).__name__} of shape {tuple(dst.shape)}. Write to an unquantized view "
                "with copy_."
            )
        usage = {"rowwise": dst._has("rowwise"), "columnwise": dst._has("columnwise")}
        maker = self.value().with_usage(**usage)
        is_alike = type(dst) is maker.tensor_class and (
            dst._quantizer.encoding() == maker.encoding()
        )
        if not is_alike or dst.shape != src.shape:
            raise InputError(
                f"{self} cannot write a tensor of shape {tuple(src.shape)} into {dst}: shape and "
                "format must be the same."
            )
        with torch.no_grad():
            fresh = self._over_ranks(maker)(src.to(device=dst.device))
            if noop_flag is not None:
                keeps = noop_flag.reshape(()).to(device=dst.device) != 0
                before = dst.compact().buffers()
                for name, buffer in fresh.buffers().items():
                    kept = before[name]
                    if buffer is not None and kept is not None:
                        buffer.copy_(torch.where(keeps, kept, buffer))
            dst.copy_(fresh)
        return dst

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """A quantized tensor of zeros, for a later write."""
        zeros = torch.zeros(tuple(shape), dtype=dtype, device=default_device(device))
        empty = self.value()(zeros)
        if pin_memory:
            empty = empty.pin_memory()  # type: ignore[assignment]
        return empty.requires_grad_(requires_grad)  # type: ignore[return-value]

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether the quantizer can quantize this tensor."""
        return inp.dim() > 0 and inp.dtype in QUANTIZABLE

    # -- usage -------------------------------------------------------------------

    def with_usage(self, *, rowwise: bool, columnwise: bool) -> Quantizer:
        """A frozen quantizer with another usage."""
        value = self.value()
        if isinstance(value, ChangeableQuantizer):
            return Quantizer.with_usage(value, rowwise=rowwise, columnwise=columnwise)
        return value.with_usage(rowwise=rowwise, columnwise=columnwise)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Set the usages of the next tensors; None leaves a usage unchanged."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Whether tensors have the ``rowwise`` and the ``columnwise`` usage."""
        return {"rowwise": self.rowwise, "columnwise": self.columnwise}

    rowwise_usage = _usage("rowwise")
    columnwise_usage = _usage("columnwise")

    @property
    def dtype(self) -> DType:
        """The element type of quantized tensors."""
        return self.value().format.element

    def copy(self) -> ChangeableQuantizer:
        """A second quantizer with the same contents."""
        return copy.copy(self)


def _is_derived(cls: type, name: str) -> bool:
    """Whether ``name`` is a cache of a value that follows from the contents."""
    if name in ("_value", "_family", "_is_value"):
        return True
    return isinstance(getattr(cls, name, None), functools.cached_property)


class Float8Quantizer(ChangeableQuantizer, tensors.Float8Quantizer):
    pass


class Float8CurrentScalingQuantizer(ChangeableQuantizer, tensors.Float8CurrentScalingQuantizer):
    def __init__(
        self,
        fp8_dtype: DType = DType.kFloat8E4M3,
        device: Any = None,
        *,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        use_existing_amax: bool = False,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        if scale is not None or amax is not None:
            raise InputError(
                "Float8CurrentScalingQuantizer got a scale or an amax; each tensor has one of each "
                "of its own, which are written nowhere else. Leave them out."
            )
        if use_existing_amax:
            raise InputError(
                "Float8CurrentScalingQuantizer got use_existing_amax=True; it keeps no amax, "
                "and computes the amax of the tensor at every call."
                " Leave it out."
            )
        tensors.Float8CurrentScalingQuantizer.__init__(self, fp8_dtype, device, **options)
        if with_amax_reduction:
            self.with_amax_reduction = True
            self.amax_reduction_group = amax_reduction_group


class MXFP8Quantizer(ChangeableQuantizer, tensors.MXFP8Quantizer):
    pass


class Float8BlockQuantizer(ChangeableQuantizer, tensors.Float8BlockQuantizer):
    def __init__(
        self,
        fp8_dtype: DType = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: BlockScalingDim = 2,
        all_gather_usage: bool = False,
    ) -> None:
        if all_gather_usage:
            raise InputError(
                "Float8BlockQuantizer got all_gather_usage=True; its tensors have one layout, and "
                "ranks gather that. Leave it out."
            )
        tensors.Float8BlockQuantizer.__init__(
            self,
            fp8_dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            amax_epsilon=amax_epsilon,
            force_pow_2_scales=force_pow_2_scales,
            block_scaling_dim=block_scaling_dim,
        )


class NVFP4Quantizer(ChangeableQuantizer, tensors.NVFP4Quantizer):
    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        with_random_sign_mask: bool = True,
        **options: Any,
    ) -> None:
        if fp4_dtype is not DType.kFloat4E2M1:
            raise InputError(
                f"NVFP4Quantizer got fp4_dtype {fp4_dtype}; the elements of NVFP4 are "
                "DType.kFloat4E2M1."
            )
        if with_amax_reduction:
            raise InputError(
                "NVFP4Quantizer got with_amax_reduction=True; amaxes of NVFP4 are not reduced over "
                "a group yet."
                " Leave it out."
            )
        # With a transform the columnwise amax is that of the transformed values, which is what
        # ``with_post_rht_amax`` asks for; without one it means nothing.
        tensors.NVFP4Quantizer.__init__(
            self,
            rowwise=rowwise,
            columnwise=columnwise,
            with_2d_quantization=with_2d_quantization,
            with_rht=with_rht,
            stochastic_rounding=stochastic_rounding,
            with_random_sign_mask=with_random_sign_mask,
            **options,
        )


class IdentityQuantizer(ChangeableQuantizer, tensors.IdentityQuantizer):
    dtype: torch.dtype | None = None  # type: ignore[assignment]


class HybridQuantizer(ChangeableQuantizer, tensors.HybridQuantizer):
    pass


# The other formats, which te.ops does not have: an op may be handed their quantizers too.
for _value_class in Quantizer.__subclasses__():
    if _value_class.__module__.startswith("fuser.tensors.") and _value_class not in _CHANGEABLE:
        _name, _bases = _value_class.__name__, (ChangeableQuantizer, _value_class)
        globals()[_name] = abc.ABCMeta(_name, _bases, {"__module__": __name__})


# -- quantizers for scripts ----------------------------------------------------------


def changeable(value: Any, before: Any = None) -> Any:
    """A changeable quantizer of the contents of ``value``; None and a user's own are unchanged.

    ``before`` is the previous result for the same place. It is returned again
    for an equal value; for another value the result keeps its usage.
    """
    cls = _CHANGEABLE.get(type(value))
    if cls is None:
        return value
    if isinstance(before, ChangeableQuantizer) and before.__dict__.get("_made_from") is value:
        return before
    quantizer = cls.__new__(cls)
    quantizer.__dict__.update({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(before, ChangeableQuantizer):
        quantizer.set_usage(rowwise=before.rowwise, columnwise=before.columnwise)
    quantizer.__dict__["_made_from"] = value
    return quantizer


def _get_quantizer(self: QuantizedTensor) -> Any:
    """A changeable copy of the tensor's quantizer; a change does not affect the tensor."""
    return changeable(self._quantizer)


class _Changeable(View):
    of = staticmethod(changeable)


VIEW.open(_Changeable())
