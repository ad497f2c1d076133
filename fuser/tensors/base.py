"""What a quantized tensor is made of, and how it is written, whatever the format.

It is a ``torch.Tensor`` whose contents live in buffers of their own: bytes and
scales, rowwise and columnwise. ``tensors/dispatch.py`` says what torch may ask.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fuser.errors import InputError, StateError
from fuser.formats import DType, NumberFormat
from fuser.tensors.operand import Operand
from fuser.wrapper_tensor import WrapperTensor


@dataclass(frozen=True)
class RowsOf:
    """Where a view lies: from row ``start`` of ``root``, taken as ``[M, K]``; turned by ``t()``."""

    root: QuantizedTensor
    start: int
    is_turned: bool = False


class QuantizedTensor(WrapperTensor):
    """Base of the quantized tensors.

    Its dtype is the nominal one, in which it was given and is dequantized.
    Subclasses name their buffers and say how rows lie in them.

    **Views.** A view of whole rows (``t[a:b]``, ``split``, ``chunk``, ``narrow``,
    ``select``, ``as_strided``, another shape of the leading dimensions) is a
    quantized tensor whose buffers are views of the parent's: bytes, scales, and
    the scale or amax that a whole tensor shares. A copy whose blocks the rows
    cut is dropped. Where none is left, and for every other view (columns,
    elements, a diagonal), the view is a ``DequantizedView``: it is not
    quantized, reads the values that its parent has at that moment, and writes
    to it. ``t()`` stays quantized where both copies hold the same values and one
    is stored as the other's transpose.

    **Writes.** A write through a view reaches its parent, and every view of it.
    Rows that hold whole blocks, in a format whose blocks need nothing else of
    the tensor, are quantized alone: what was there is replaced and the rest
    keeps its bytes. Otherwise the whole parent is quantized again with the new
    values, as after any in-place operation on it. In a format with one scale for
    the whole tensor, a NaN or an infinity makes that scale 1: the other values
    are still there, rounded as the format rounds values of their size. An
    operation that changes the shape in place (``t_``, ``resize_``) is refused.

    **Gradients.** :meth:`dequantize` and a call of a quantizer are differentiable:
    the gradient passes as it is.

    **Conversions.** ``to(dtype)``, ``float()``, ``half()`` and the like give a plain
    tensor, a copy, also for the nominal dtype: ``w.detach().float()`` are master
    weights. ``to(device)`` keeps bytes and scales as they are. So does the
    conversion of a *module*, ``module.to(dtype)`` or ``module.half()``, which
    changes the nominal dtype of its quantized parameters and lets it run in that.

    **Memory.** ``share_memory_()`` and pickling work on the buffers, and a pickled
    parameter keeps the attributes that were set on it. :meth:`data_ptr` is
    refused: no address has the values.

    **Layout.** The buffers of a tensor that is no view are contiguous, with
    scales padded as ``formats`` says. Those of a view are strided, its scales
    have no padding along rows; :meth:`compact` lays them out as if it were none.

    **Padding.** MXFP8 and NVFP4 data is in whole blocks: a tensor of another
    shape is quantized with rows and columns of zeros after its own. Its shape
    is that of the values, its buffers have the padding, :meth:`dequantize`
    cuts it off.
    """

    buffer_names: ClassVar[tuple[str, ...]]
    # The buffers of each copy, in the same order; the first is the data. Others belong to both.
    rowwise_names: ClassVar[tuple[str, ...]]
    columnwise_names: ClassVar[tuple[str, ...]]
    # What this module sets on a tensor; anything else was set by somebody.
    _own_names: ClassVar[frozenset[str]]
    # Whether whole blocks can be quantized without the rest of the tensor.
    has_independent_blocks: ClassVar[bool]
    # Filled by tensors/compatibility.py: the constructor by the original's keywords.
    _from_keywords: ClassVar[Callable[..., QuantizedTensor]]

    _quantizer: Any  # a Quantizer; that class imports this file
    _view_of: RowsOf | None = None
    _is_read_only = False
    _high_precision_init_val: torch.Tensor | None = None
    # What it was quantized from, and its version then.
    _source: tuple[torch.Tensor, int] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])
        names = ("_quantizer", "_view_of", "_is_read_only", "_is_param", "_source")
        cls._own_names = frozenset((*getattr(cls, "buffer_names", ()), *names))

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        buffers: dict[str, torch.Tensor | None] | None = None,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        quantizer: Any = None,
        requires_grad: bool = False,
        *,
        view_of: RowsOf | None = None,
        strides: Sequence[int] | None = None,
        **named: Any,
    ) -> QuantizedTensor:
        if buffers is None:
            return cls._from_keywords(cls, shape, dtype, quantizer, requires_grad, named)
        offset = None
        if view_of is not None:
            strides, offset = geometry(shape, view_of)
        self: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides,
            storage_offset=offset,
            dtype=dtype,
            device=device,
            requires_grad=requires_grad,
            storage_size=0,
        )
        for name in cls.buffer_names:
            setattr(self, name, buffers.get(name))
        self._quantizer = quantizer
        if view_of is not None:
            self._view_of = view_of
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        usage = [u for u in ("rowwise", "columnwise") if self._has(u)]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"{' and '.join(usage)}, {self._quantizer})"
        )

    # -- what a format says -----------------------------------------------------

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """The values as ``[M, K]``, padded as the data is."""
        raise NotImplementedError

    def _layout(self, m: int, k: int) -> dict[str, tuple[int, ...]]:
        """The shape of each buffer of a tensor ``[m, k]`` that is no view.

        A format of whole blocks pads both dimensions (``formats.padded_shape``).
        """
        raise NotImplementedError

    def _row_units(self) -> dict[str, tuple[int, int]]:
        """The dimension along which rows lie in a buffer, and how many of them share an entry.

        A buffer that is not named belongs to all rows.
        """
        raise NotImplementedError

    def _is_transposable(self) -> bool:
        """Whether either copy is the other's transpose, values and layout."""
        raise NotImplementedError

    def _make_copy(self, usage: str) -> None:
        raise StateError(
            f"{type(self).__name__} has no {usage} copy, and in this format one cannot be made "
            "from the other: quantize the original with both."
        )

    # -- contents -------------------------------------------------------------

    def buffers(self) -> dict[str, torch.Tensor | None]:
        """The buffers by name; None for a copy that was not made."""
        return {name: getattr(self, name) for name in self.buffer_names}

    def _memory(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.buffers().values() if buffer is not None]

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of this shape, in ``dtype`` or the nominal one.

        Differentiable: the gradient passes as it is, in the nominal dtype.
        """
        if self.requires_grad and torch.is_grad_enabled():
            values: torch.Tensor = _Dequantize.apply(self, dtype)  # type: ignore[no-untyped-call]
            return values
        return self._values(dtype)

    def _values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        rows = self.dequantize_padded(dtype or self.dtype)
        if rows.numel() != self.numel():
            m, k = self._matrix()
            rows = rows[:m, :k].contiguous()
        return rows.view(self.shape)

    def dequantize_padded(self, dtype: torch.dtype) -> torch.Tensor:
        """The values as a matrix, with the rows and columns that fill up its last blocks."""
        return self.compact()._dequantize_rows(dtype)

    @property
    def high_precision_source(self) -> torch.Tensor | None:
        """What the tensor was quantized from, for a backward that wants that.

        None if that was not kept, or after a write to the tensor or a view of it. It is not kept
        for an inference tensor, whose writes torch does not count, and which has no backward.
        """
        if self._source is None or self._source[1] != self._version:
            return None
        return self._source[0]

    @high_precision_source.setter
    def high_precision_source(self, value: torch.Tensor | None) -> None:
        is_kept = value is not None and not self.is_inference()
        self._source = (value, self._version) if is_kept else None  # type: ignore[assignment]

    @property
    def format(self) -> NumberFormat:
        """What the tensor is quantized to."""
        number_format: NumberFormat = self._quantizer.format
        return number_format

    def operand(self, usage: str) -> Operand:
        """The ``"rowwise"`` or ``"columnwise"`` copy as a GEMM reads it, contracted dimension last.

        Raises
        ------
        StateError
            If that copy is not here and cannot be made from the other.
        """
        source = self if self._view_of is None else self.compact()
        data_name, scale_name = self._operand_names(usage)
        data = getattr(source, data_name)
        if data is None:
            source = source.with_usage(usage)
            data = getattr(source, data_name)
        return Operand(data, self._quantizer.format, getattr(source, scale_name))

    def _operand_names(self, usage: str) -> tuple[str, ...]:
        """The buffers of data and scales."""
        return self._names(usage)[:2]

    def _names(self, usage: str) -> tuple[str, ...]:
        return self.rowwise_names if usage == "rowwise" else self.columnwise_names

    def _has(self, usage: str) -> bool:
        names = self.rowwise_names if usage == "rowwise" else self.columnwise_names
        return getattr(self, names[0]) is not None

    def _usage(self) -> Any:
        """The quantizer with the copies that are really here."""
        return self._quantizer.with_usage(
            rowwise=self._has("rowwise"), columnwise=self._has("columnwise")
        )

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Keep or drop the rowwise and the columnwise copy; None leaves it as it is.

        Aliases and views that were made before keep what they have, and a write
        through a tensor reaches the copies that this tensor has.

        Raises
        ------
        StateError
            If a copy is asked for that is not here and cannot be made from the
            other, or both would be dropped.
        """
        wanted = {
            usage: self._has(usage) if is_asked is None else is_asked
            for usage, is_asked in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage))
        }
        if not any(wanted.values()):
            raise StateError(f"{type(self).__name__} would be left without any copy of its data.")
        for usage, is_wanted in wanted.items():
            if is_wanted and not self._has(usage):
                if self._view_of is not None:
                    raise StateError(
                        f"{self} is a view without a {usage} copy, and one of its own would not "
                        "follow the tensor that it is of: clone it first."
                    )
                self._make_copy(usage)
        self._keep(wanted)

    def release(self, usage: str) -> None:
        """Drop the ``"rowwise"`` or ``"columnwise"`` copy of a tensor that nobody else has."""
        for name in self._names(usage):
            setattr(self, name, None)

    def _keep(self, wanted: dict[str, bool]) -> None:
        for usage, is_wanted in wanted.items():
            if not is_wanted:
                self.release(usage)

    def with_usage(self, usage: str) -> QuantizedTensor:
        """This tensor with its ``"rowwise"`` or its ``"columnwise"`` copy alone, to read.

        Shares buffers and the version counter. It cannot be written to: the
        other copy would not follow.
        """
        other = "columnwise" if usage == "rowwise" else "rowwise"
        source = self if self._has(usage) else self.compact()
        alias = source.detach()
        assert isinstance(alias, QuantizedTensor)
        if not alias._has(usage):
            alias._make_copy(usage)
        elif not alias._has(other) and alias._view_of is None:
            return alias
        alias.release(other)
        alias._is_read_only = True
        if alias._view_of is not None:
            # The parent's other copy is not to live on through this one.
            view = alias._view_of
            root = view.root.with_usage(other if view.is_turned else usage)
            alias._view_of = replace(view, root=root)
        return alias

    def compact(self) -> QuantizedTensor:
        """This tensor in the layout of one that is no view, to read; itself if it is none.

        What reads buffers by name (a GEMM, a kernel) reads those of this.
        """
        if self._view_of is None:
            return self
        layout = self._layout(*self._matrix())
        buffers = {
            name: None if buffer is None else _laid_out(buffer, layout[name])
            for name, buffer in self.buffers().items()
        }
        compact = type(self)(buffers, self.shape, self.dtype, self.device, self._quantizer)
        compact._is_read_only = True
        return compact

    def _matrix(self) -> tuple[int, int]:
        """M and K."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def _like(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """A tensor of its own, no view, of ``change`` of every buffer."""
        source = self.compact()
        changed = {n: None if b is None else change(b) for n, b in source.buffers().items()}
        device = next(b.device for b in changed.values() if b is not None)
        # What is written to a copy is no step of the training of this one.
        quantizer = self._quantizer.unbound()
        return type(self)(changed, self.shape, dtype or self.dtype, device, quantizer)

    def _alias(self) -> QuantizedTensor:
        """Another tensor of the same buffers."""
        return self._with(self.buffers(), self.shape, self._view_of)

    def _with(
        self,
        buffers: dict[str, torch.Tensor | None],
        shape: Sequence[int],
        view: RowsOf | None,
    ) -> QuantizedTensor:
        """A tensor that shares memory with this one."""
        shares = type(self)(buffers, shape, self.dtype, self.device, self._quantizer, view_of=view)
        if self._is_read_only:
            shares._is_read_only = True
        return shares

    def _take_attributes(self, source: QuantizedTensor) -> None:
        """Set here what somebody set on ``source``.

        Torch converts the parameters of a module by putting another tensor in
        the place of each, and what hangs on a parameter is to survive that.
        """
        if not source.__dict__.keys() <= self._own_names:
            self.__dict__.update(source._attributes())

    def _attributes(self) -> dict[str, Any]:
        """What somebody set on this tensor."""
        return {k: v for k, v in self.__dict__.items() if k not in self._own_names}

    # -- writes -----------------------------------------------------------------

    def quantize_(
        self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Quantize ``tensor`` into this one, in place, with the copies that are here.

        Where ``noop_flag``, a tensor of one element, is not zero, every byte stays
        as it is; it is read on its device, without waiting for it.

        Raises
        ------
        StateError
            If this tensor came from :meth:`only` or :meth:`compact`, and is there to be read.
        """
        source = tensor.detach().to(dtype=self.dtype, device=self.device).expand(self.shape)
        if self._can_be_written_alone():
            fresh = self._usage()(source)
            self._write(fresh if noop_flag is None else self._unless(noop_flag, fresh))
            return self
        assert self._view_of is not None
        root = self._view_of.root
        values = root._values()
        values.as_strided(self.shape, *geometry(self.shape, self._view_of)).copy_(source)
        root.quantize_(values, noop_flag=noop_flag)
        self._was_written()
        return self

    def _unless(self, flag: torch.Tensor, fresh: QuantizedTensor) -> QuantizedTensor:
        """What this tensor holds if ``flag`` is set, else ``fresh``."""
        is_set = flag.to(self.device).reshape(()) != 0
        chosen, held = fresh.buffers(), self.compact().buffers()
        for name, new in chosen.items():
            old = held[name]
            if new is not None and old is not None:
                chosen[name] = torch.where(is_set, old, new)
        return self._with(chosen, self.shape, None)

    def _can_be_written_alone(self) -> bool:
        """Whether new bytes here leave what shares memory with this tensor right."""
        if self._is_read_only:
            raise StateError(
                f"{self} is one copy or layout of a tensor, there to be read; write to the "
                "tensor that it was taken from, or to a clone."
            )
        view = self._view_of
        if view is None:
            return True
        root, copies = view.root, ("rowwise", "columnwise")
        if view.is_turned or any(self._has(usage) != root._has(usage) for usage in copies):
            return False
        start, stop = view.start, view.start + self._matrix()[0]
        if (start, stop) == (0, root._matrix()[0]):
            return True
        is_whole = not any(root._cuts(usage, start, stop) for usage in copies)
        return self.has_independent_blocks and is_whole

    def _write(self, fresh: QuantizedTensor, non_blocking: bool = False) -> None:
        """Replace the buffers' contents by those of ``fresh``, which has the same copies."""
        for name, new in fresh.compact().buffers().items():
            buffer = getattr(self, name)
            if buffer is not None:
                assert new is not None
                buffer.copy_(new[tuple(map(slice, buffer.shape))], non_blocking)
        self._was_written()

    def _was_written(self) -> None:
        self._source = None
        super()._was_written()

    def _cuts(self, usage: str, start: int, stop: int) -> bool:
        """Whether rows ``start`` to ``stop`` cut a block of the named copy."""
        units = self._row_units()
        block = max(units[name][1] for name in self._names(usage) if name in units)
        return start % block != 0 or (stop % block != 0 and stop != self._matrix()[0])

    # -- as a parameter -----------------------------------------------------------

    def set_high_precision_init_val(self, value: torch.Tensor) -> None:
        """Keep the values that a parameter had before it was quantized."""
        self._high_precision_init_val = value

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The values before quantization, on the CPU; None unless they were kept."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Free the values kept from before quantization."""
        self._high_precision_init_val = None

    @property
    def data(self) -> QuantizedTensor:
        """An alias that autograd does not see. Set: takes the place of the contents.

        A quantized tensor is shared, and a plain one quantized with the copies that are here.
        """
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        fresh = value if isinstance(value, type(self)) else self._usage()(value.detach())
        torch.Tensor.data.__set__(self, fresh)  # type: ignore[attr-defined]
        for name in (*self.buffer_names, "_quantizer", "_view_of", "_is_read_only"):
            setattr(self, name, getattr(fresh, name))
        self.high_precision_source = fresh.high_precision_source

    # -- conversions --------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As for any tensor; a plain copy if a dtype is named, also the nominal one.

        A tensor that torch converts as a part of a module stays quantized.
        """
        asked = {name: value for name, value in kwargs.items() if name != "copy"}
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **asked)
        if dtype is None or is_module_conversion():
            return super().to(*args, **kwargs)
        moved = self if device is None else super().to(device=device, non_blocking=non_blocking)
        assert isinstance(moved, QuantizedTensor)
        is_value = dtype.is_floating_point
        plain = moved.dequantize(dtype=dtype) if is_value else moved.dequantize().to(dtype)
        return plain if memory_format is None else plain.to(memory_format=memory_format)

    def float(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """:meth:`to` fp32."""
        return self.to(torch.float32, *args, **kwargs)

    def half(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """:meth:`to` fp16."""
        return self.to(torch.float16, *args, **kwargs)

    def bfloat16(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """:meth:`to` bf16."""
        return self.to(torch.bfloat16, *args, **kwargs)

    def double(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """:meth:`to` fp64."""
        return self.to(torch.float64, *args, **kwargs)

    def type(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As for any tensor; :meth:`to` if a ``torch.dtype`` is given."""
        if isinstance(dtype, torch.dtype):
            return self.to(dtype, *args, **kwargs)
        return super().type(dtype, *args, **kwargs)

    def type_as(self, other: torch.Tensor) -> torch.Tensor:
        """:meth:`to` the dtype and device of ``other``."""
        return self.to(other)

    # -- as something to be written down ------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A part of a tensor goes by itself: the rest may not go with it.
        is_part = self._view_of is not None or self._is_read_only
        source = self._like(torch.clone) if is_part else self
        state = (
            type(self),
            source.buffers(),
            tuple(self.shape),
            self.dtype,
            self.device,
            self._quantizer.unbound(),
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
        )
        # Those of a parameter alone: a state_dict, whose tensors are none, is to be plain data.
        attributes = self._attributes() if isinstance(self, torch.nn.Parameter) else None
        return rebuild, (*state, attributes) if attributes else state

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo or not self.is_leaf:
            copied: QuantizedTensor = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
            return copied
        # Torch's own takes a wrapper with an offset, which a view is, for a tensor with memory.
        attributes = copy.deepcopy(self.__dict__, memo)
        copied = type(self)(
            attributes,
            self.shape,
            self.dtype,
            self.device,
            attributes["_quantizer"],
            self.requires_grad,
            view_of=attributes.get("_view_of"),
        )
        copied.__dict__.update(attributes)
        copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """The buffers that are here, and the rest as a constant, for ``torch.compile``."""
        names = [name for name, buffer in self.buffers().items() if buffer is not None]
        # A graph sees the buffers alone, and cannot write to what they are views of.
        return names, (self._quantizer, self.dtype, self._is_read_only or self._view_of is not None)

    @staticmethod
    def __tensor_unflatten__(
        buffers: dict[str, torch.Tensor | None],
        constants: tuple[Any, ...],
        shape: Any,
        strides: Any,
    ) -> QuantizedTensor:
        quantizer, dtype, is_read_only = constants
        device = next(b.device for b in buffers.values() if b is not None)
        tensor: QuantizedTensor = quantizer.tensor_class(
            buffers, shape, dtype, device, quantizer, strides=strides
        )
        tensor._is_read_only = is_read_only
        return tensor


class BlockScaledTensor(QuantizedTensor):
    """Base of the formats whose rowwise and columnwise copies have scales of their own."""

    buffer_names: ClassVar[tuple[str, ...]] = (
        "_rowwise_data",
        "_columnwise_data",
        "_rowwise_scale_inv",
        "_columnwise_scale_inv",
    )
    rowwise_names: ClassVar[tuple[str, ...]] = ("_rowwise_data", "_rowwise_scale_inv")
    columnwise_names: ClassVar[tuple[str, ...]] = ("_columnwise_data", "_columnwise_scale_inv")
    _rowwise_data: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None

    def _one_copy(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Data and scales of a copy that is here, the rowwise one if it is; is it columnwise?"""
        columnwise = self._rowwise_data is None
        data = self._columnwise_data if columnwise else self._rowwise_data
        scale = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        if data is None or scale is None:
            raise StateError(f"{self} has no bytes: they were cleared or handed on.")
        return data, scale, columnwise


def rebuild(
    cls: type[QuantizedTensor],
    buffers: dict[str, torch.Tensor | None],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Any,
    requires_grad: bool,
    is_parameter: bool = False,
    attributes: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Unpickle a quantized tensor; safe for ``torch.load(weights_only=True)``.

    Raises
    ------
    InputError
        On a file of a version whose tensors had other buffers.
    """
    if unknown := buffers.keys() - set(cls.buffer_names):
        raise InputError(
            f"The file has a {cls.__name__} with {', '.join(sorted(unknown))}; in this version it "
            f"consists of {', '.join(cls.buffer_names)}. Load the file with the version that wrote "
            "it, and save what dequantize() gives."
        )
    present = (b.device for b in buffers.values() if b is not None)
    tensor: torch.Tensor = cls(
        buffers, shape, dtype, next(present, device), quantizer, requires_grad
    )
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    tensor.__dict__.update(attributes or {})
    return tensor


# ``torch.load(weights_only=True)`` may build quantized tensors and quantizers,
# which are plain data; each class adds itself.
torch.serialization.add_safe_globals([rebuild, DType, torch.device])


class _Dequantize(torch.autograd.Function):
    """Dequantize; the gradient passes as it is, and torch casts it to the nominal dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype | None) -> torch.Tensor:
        return tensor._values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def is_module_conversion() -> bool:
    """Whether ``torch.nn.Module`` converts its parameters at this moment.

    It calls the conversion on each (``t.half()``, ``t.to(...)``) and says nothing about why, for
    modules of any kind, so the calls on the stack are asked.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.nn.Module._apply.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def geometry(shape: Sequence[int], view: RowsOf | None) -> tuple[Sequence[int], int]:
    """Strides and offset of a tensor or view of that shape, were it plain."""
    contiguous = torch.empty(shape, device="meta").stride()
    if view is None:
        return contiguous, 0
    k = view.root.shape[-1]
    return (1, k) if view.is_turned else contiguous, view.start * k


def _laid_out(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``buffer``, contiguous and filled up with zeros."""
    if buffer.shape == shape:
        return buffer.contiguous()
    padded = buffer.new_zeros(shape)
    padded[tuple(map(slice, buffer.shape))] = buffer
    return padded
