"""Base class of quantized tensors: their buffers, views, writes and conversions.

A quantized tensor is a ``torch.Tensor`` that stores its contents in several
buffers: bytes and scales, rowwise and columnwise. ``tensors/dispatch.py``
implements the torch operations on it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from fuser.doors import OfProduct
from fuser.errors import InputError, StateError
from fuser.formats import DType, Layout, NumberFormat, padded_shape
from fuser.functional.lazy import filled
from fuser.recipe import Recipe
from fuser.torch_private import fsdp_caller, is_module_conversion, make_wrapper, parse_to
from fuser.wrapper_tensor import WrapperTensor

USAGES = ("rowwise", "columnwise")


@dataclass(frozen=True)
class RowsOf:
    """The position of a view: it starts at row ``start`` of ``root``, taken as ``[M, K]``.

    ``is_turned``: ``t()`` was applied to it.
    """

    root: QuantizedTensor
    start: int
    is_turned: bool = False


class Operand(NamedTuple):
    """One side of a product: bytes ``[rows, inner]``, their number format, and their scales."""

    data: torch.Tensor
    format: NumberFormat
    scale_inv: torch.Tensor


class QuantizedTensor(WrapperTensor):
    """Base of the quantized tensors.

    Its dtype is the nominal dtype: the dtype of the tensor before quantization,
    and of the result of :meth:`dequantize`. Subclasses name their buffers and
    describe how rows are stored in them.

    **Views.** A view of whole rows (``t[a:b]``, ``split``, ``chunk``, ``narrow``,
    ``select``, ``as_strided``, another shape of the leading dimensions) is a
    quantized tensor. Its buffers are views of the parent's buffers: bytes, scales,
    and the scale or amax that a whole tensor shares. If the rows cut blocks of the
    rowwise or the columnwise copy, the view does not have that copy. If it would
    have neither copy, the view is a ``DequantizedView``, and so is every other view
    (columns, elements, a diagonal). A ``DequantizedView`` is not quantized: a read
    dequantizes the current values of its parent, and a write changes the parent.
    ``t()`` stays quantized if both copies hold the same values and each is stored
    as the transpose of the other.

    **Writes.** A write through a view changes its parent, and every view of the
    parent. If blocks of the format do not depend on the rest of the tensor, only the
    blocks from the first to the last row that is written are quantized: the other
    rows keep their bytes. Of a stack these are whole matrices. Otherwise the whole
    parent is quantized again with the new values, as after any in-place operation
    on it. In a format with one scale for
    the whole tensor, a NaN or an infinity makes that scale 1: the other values
    are kept, rounded as the format rounds values of their size. An operation that
    changes the shape in place (``t_``, ``resize_``) is refused.

    **Gradients.** :meth:`dequantize` and a call of a quantizer are differentiable:
    the gradient passes through unchanged.

    **Conversions.** ``to(dtype)``, ``float()``, ``half()`` and similar methods return
    a plain tensor, which is a copy, also for the nominal dtype:
    ``w.detach().float()`` are master weights. ``to(device)`` keeps bytes and scales
    unchanged. So does the conversion of a *module*, ``module.to(dtype)`` or
    ``module.half()``: it changes the nominal dtype of the quantized parameters, and
    the module then runs in that dtype.

    **Memory.** ``share_memory_()`` and pickling work on the buffers. A pickled
    parameter keeps the attributes that were set on it. :meth:`data_ptr` raises an
    error: the values are not stored at any address.

    **Layout.** The buffers of a tensor that is not a view are contiguous, and their
    scales are padded as described in ``formats``. The buffers of a view are
    strided, and their scales have no padding along rows; :meth:`compact` copies
    them into the layout of a tensor that is not a view.

    **Padding.** MXFP8 and NVFP4 data is stored in whole blocks: a tensor whose
    dimensions are not multiples of the block is quantized with rows and columns of
    zeros at its end. Its shape is the shape of the values; its buffers include the
    padding, and :meth:`dequantize` removes it.
    """

    buffer_names: ClassVar[tuple[str, ...]] = ()
    # The buffers of each copy, as in a ``Layout``.
    rowwise_names: ClassVar[tuple[str, ...]]
    columnwise_names: ClassVar[tuple[str, ...]]
    # The attributes that this module sets on a tensor; all others were set by the user.
    _own_names: ClassVar[frozenset[str]]
    # Whether whole blocks can be quantized without the rest of the tensor.
    has_independent_blocks: ClassVar[bool]
    # The matrix is padded with zeros to multiples of this number in both dimensions.
    multiple: ClassVar[int] = 1
    # Whether each 128 rows have the scale or amax that a tensor of the format has once.
    has_scales_of_rows: ClassVar[bool] = False
    # The constructor with Transformer Engine's keywords, and its methods.
    _from_keywords = OfProduct("fuser.te.tensors")
    get_usages = OfProduct("fuser.te.tensors")
    get_data_tensors = OfProduct("fuser.te.tensors")
    get_metadata = OfProduct("fuser.te.tensors")
    make_like = OfProduct("fuser.te.tensors")
    to_dtype = OfProduct("fuser.te.tensors")
    prepare_for_saving = OfProduct("fuser.te.tensors")
    restore_from_saved = OfProduct("fuser.te.tensors")
    clear = OfProduct("fuser.te.tensors")
    _fp8_dtype = OfProduct("fuser.te.tensors")
    _get_quantizer = OfProduct("fuser.te.quantizers")
    # Writes of several tensors; set by tensors/writes.py.
    _write_all: ClassVar[Callable[..., None]]

    _quantizer: Any  # a Quantizer; not typed, because that class imports this file
    _view_of: RowsOf | None = None
    _is_read_only = False
    # In a list that all tensors of this memory share: a write makes it empty.
    _high_precision_init_val: list[torch.Tensor] | None = None
    # The tensor that this one was quantized from, and the version of this one then.
    _source: tuple[torch.Tensor, int] | None = None
    _amaxes: torch.Tensor | None = None
    """Those of the values that it was quantized from, if its scales follow from them; the scales of
    groups under delayed scaling."""
    _observation: Any = None  # in a pass that is observed: an Observation (tensors/observation.py)
    _sharding: Any = None  # of a shard of a parameter: a Sharding (tensors/sharding.py)
    _gathering: Any = None  # of a gathered parameter: a Gathering (tensors/gathering.py)
    fsdp_pre_all_gather: Callable[..., Any]  # set by tensors/gathering.py
    fsdp_post_all_gather: Callable[..., Any]

    def __init_subclass__(cls, layout: Layout | None = None, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])
        if layout is not None:
            cls.buffer_names = tuple(layout.buffers)
            cls.rowwise_names, cls.columnwise_names = layout.rowwise, layout.columnwise
            cls.has_independent_blocks = layout.scope == "blocks"
            cls.multiple = layout.multiple
        names = ["_quantizer", "_view_of", "_is_read_only", "_is_param", "_source"]
        names += ["_sharding", "_gathering", "_amaxes", "_observation"]
        cls._own_names = frozenset((*cls.buffer_names, *names))

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
            tensor: QuantizedTensor = cls._from_keywords(
                shape, dtype, quantizer, requires_grad, named
            )
            return tensor
        offset = None
        if view_of is not None:
            strides, offset = geometry(shape, view_of)
        self: QuantizedTensor = make_wrapper(
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

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        usage = [u for u in ("rowwise", "columnwise") if self._has(u)]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"{' and '.join(usage)}, {self._quantizer})"
        )

    # -- defined by each format --------------------------------------------------

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """The values as ``[M, K]``, with the padding of the data."""
        raise NotImplementedError

    @property
    def _layout(self) -> Layout:
        """The buffers of a tensor that is not a view."""
        layout: Layout = self._quantizer.format.layout
        return layout.of_groups if self.has_scales_of_rows else layout

    def _is_transposable(self) -> bool:
        """Whether each copy is the transpose of the other, in values and layout."""
        return False

    @property
    def derives_columnwise(self) -> bool:
        """Whether each copy is made from the bytes of the other (:meth:`derive`)."""
        return False

    def derive(
        self, usage: str, source: dict[str, torch.Tensor | None], out: dict[str, torch.Tensor]
    ) -> None:
        """Write the buffers of the copy ``usage``, in ``out``, from those of the other one.

        ``source`` and ``out`` have the layout of a tensor that is not a view.
        """
        raise NotImplementedError

    def _make_copy(self, usage: str) -> None:
        if not self.derives_columnwise:
            raise StateError(
                f"{type(self).__name__} has no {usage} copy, and in this format one cannot be made "
                "from the other: quantize the original with both."
            )
        layout, source = self._layout.shapes(*self._matrix()), self.buffers()
        other = self._names("columnwise" if usage == "rowwise" else "rowwise")
        out: dict[str, torch.Tensor] = {}
        for name, twin in zip(self._names(usage), other, strict=True):
            like = source[twin]
            assert like is not None
            out[name] = torch.empty(layout[name], dtype=like.dtype, device=like.device)
        self.derive(usage, source, out)
        for name, buffer in out.items():
            setattr(self, name, buffer)

    # -- contents -------------------------------------------------------------

    def buffers(self) -> dict[str, torch.Tensor | None]:
        """The buffers by name; None for the buffers of a copy that was not made."""
        return {name: getattr(self, name) for name in self.buffer_names}

    def _memory(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.buffers().values() if buffer is not None]

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of the same shape, in ``dtype`` or else the nominal dtype.

        Differentiable: the gradient passes through unchanged, in the nominal dtype.
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
        """The values as a matrix ``[M, K]``, including the padding of its last blocks."""
        return self._present().compact()._dequantize_rows(dtype)

    @property
    def column_transform(self) -> Hashable | None:
        """The orthogonal transform of the columnwise copy along M; None without one.

        A product that contracts M may skip the inverse if both operands have the same transform.
        """
        return None

    def transformed_columns(self, dtype: torch.dtype) -> torch.Tensor:
        """The columnwise copy as a padded matrix ``[M, K]``, without the inverse transform."""
        return self.with_usage("columnwise").dequantize_padded(dtype)

    @property
    def high_precision_source(self) -> torch.Tensor | None:
        """The tensor that this one was quantized from, for a backward that needs it.

        None if it was not kept, or if this tensor or a view of it was written to
        since. It is not kept for an inference tensor: torch does not count writes
        to it, and it has no backward.
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
        """The number format of the data."""
        number_format: NumberFormat = self._quantizer.format
        return number_format

    def operand(self, usage: str) -> Operand:
        """The ``"rowwise"`` or ``"columnwise"`` copy as a GEMM reads it, contracted dimension last.

        It is made from the other copy if need be; StateError if it cannot be.
        """
        source = self if self._gathering is None else self._present(usage)
        source = source if self._view_of is None else source.compact()
        data_name, scale_name = self._operand_names(usage)
        data = getattr(source, data_name)
        if data is None:
            source = source.with_usage(usage)
            data = getattr(source, data_name)
        number_format = self._quantizer.format
        if number_format.parts is not None:
            number_format = number_format.of(usage)
        return Operand(data, number_format, getattr(source, scale_name))

    def _operand_names(self, usage: str) -> tuple[str, ...]:
        """The names of the data buffer and the scale buffer."""
        return self._names(usage)[:2]

    def _names(self, usage: str) -> tuple[str, ...]:
        return self.rowwise_names if usage == "rowwise" else self.columnwise_names

    def _has(self, usage: str) -> bool:
        names = self.rowwise_names if usage == "rowwise" else self.columnwise_names
        return getattr(self, names[0]) is not None

    def _copy_to_read(self) -> tuple[str, tuple[str, ...]]:
        """The copy whose values this tensor has, the rowwise one if it has both, and its names."""
        for usage, names in zip(USAGES, (self.rowwise_names, self.columnwise_names), strict=True):
            if getattr(self, names[0]) is not None:
                return usage, names
        raise StateError(
            f"{self} has no bytes: they were cleared or given to another tensor."
            " Quantize the values again."
        )

    def _present(self, usage: str | None = None) -> QuantizedTensor:
        """This tensor; of a gathered parameter, only the copies that are in memory now.

        A backward makes the copy that it reads if the forward left it out. StateError if none is in
        memory, or if the copy ``usage`` is not and cannot be made from the other.
        """
        if self._gathering is None:
            return self
        names = ("rowwise", "columnwise")
        held = {name: self._has(name) and self._is_in_memory(name) for name in names}
        is_there = any(held.values()) if usage is None else held[usage]
        if not (is_there or (usage and self.derives_columnwise and any(held.values()))):
            if self._gathering.complete(usage or next(filter(self._has, names))):
                return self._present(usage)
            copies = " and ".join(name for name in names if held[name]) or "no copy"
            raise StateError(
                f"The {usage or 'rowwise or columnwise'} copy of a sharded parameter, a "
                f"{type(self).__name__} of shape {tuple(self.shape)}, was read while {copies} of "
                "it was gathered: it is read outside of the forward and backward of the module "
                "that was given to fully_shard, or in a pass for which the copy was not asked. "
                "Gather all copies with the module's unshard()."
            )
        if all(held[name] == self._has(name) for name in names):
            return self
        alias = self._alias()
        alias._keep(held)
        return alias

    def _is_in_memory(self, usage: str) -> bool:
        data: torch.Tensor = getattr(self, self._names(usage)[0])
        return data.numel() == 0 or data.untyped_storage().nbytes() > 0

    def _usage(self) -> Any:
        """The quantizer, with the usages of the copies that this tensor has."""
        return self._quantizer.with_usage(
            rowwise=self._has("rowwise"), columnwise=self._has("columnwise")
        )

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Keep or drop the rowwise and the columnwise copy; None leaves a copy as it is.

        Existing aliases and views keep the copies that they have. A write through
        a tensor changes the copies that this tensor has.

        Raises
        ------
        StateError
            If a requested copy does not exist and cannot be made from the other,
            or if both copies would be dropped.
        """
        kept = {
            usage: self._has(usage) if is_asked is None else is_asked
            for usage, is_asked in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage))
        }
        if not any(kept.values()):
            raise StateError(
                f"{type(self).__name__} would have neither a rowwise nor a columnwise copy."
                " Keep one."
            )
        for usage, is_wanted in kept.items():
            if is_wanted and not self._has(usage):
                if self._view_of is not None:
                    raise StateError(
                        f"{self} is a view without a {usage} copy, and a copy made for the view "
                        "would not follow the tensor that it is a view of: clone it first."
                    )
                self._make_copy(usage)
        self._keep(kept)

    def release(self, usage: str) -> None:
        """Drop the ``"rowwise"`` or ``"columnwise"`` copy; for a tensor that has no other owner."""
        for name in self._names(usage):
            setattr(self, name, None)

    def _keep(self, kept: dict[str, bool]) -> None:
        for usage, is_wanted in kept.items():
            if not is_wanted:
                self.release(usage)

    def with_usage(self, usage: str) -> QuantizedTensor:
        """This tensor with only its ``"rowwise"`` or its ``"columnwise"`` copy; read-only.

        Shares buffers and the version counter. A write to it raises an error,
        because it would not change the other copy.
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
            # The alias must not keep the parent's other copy in memory.
            view = alias._view_of
            root = view.root.with_usage(other if view.is_turned else usage)
            alias._view_of = replace(view, root=root)
        return alias

    def compact(self) -> QuantizedTensor:
        """This tensor in the layout of a tensor that is not a view; read-only.

        Returns this tensor if it is not a view. Code that reads buffers by name
        (a GEMM, a kernel) reads those of the result.
        """
        if self._view_of is None:
            return self
        layout = self._layout.shapes(*self._matrix())
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
        self, change: Callable[[torch.Tensor], torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """A new tensor, not a view, with ``change(buffer)`` for each buffer of this one."""
        source = self._present().compact()
        changed = {n: None if b is None else change(b) for n, b in source.buffers().items()}
        device = next(b.device for b in changed.values() if b is not None)
        # A write to the copy must not count as a training step of this tensor.
        quantizer = self._quantizer.unbound()
        return type(self)(changed, self.shape, dtype or self.dtype, device, quantizer)

    def _alias(self) -> QuantizedTensor:
        """Another tensor with the same buffers."""
        return self._with(self.buffers(), self.shape, self._view_of)

    def _with(
        self, buffers: dict[str, torch.Tensor | None], shape: Sequence[int], view: RowsOf | None
    ) -> QuantizedTensor:
        """A tensor that shares memory with this one."""
        shares = type(self)(buffers, shape, self.dtype, self.device, self._quantizer, view_of=view)
        if self._is_read_only:
            shares._is_read_only = True
        if self._sharding is not None:
            shares._sharding = self._sharding
        if self._gathering is not None:
            shares._gathering = self._gathering
        if self._high_precision_init_val is not None:
            shares._high_precision_init_val = self._high_precision_init_val
        return shares

    def _take_attributes(self, source: QuantizedTensor) -> None:
        """Copy the attributes that the user set on ``source`` to this tensor.

        When torch converts a module, it replaces each parameter by another
        tensor; the attributes of the parameter must be kept.
        """
        if not source.__dict__.keys() <= self._own_names:
            self.__dict__.update(source._attributes())

    def _attributes(self) -> dict[str, object]:
        """The attributes that the user set on this tensor."""
        return {k: v for k, v in self.__dict__.items() if k not in self._own_names}

    # -- writes -----------------------------------------------------------------

    def quantize_(
        self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Quantize ``tensor`` into this tensor, in place, for the copies that it has.

        If ``noop_flag``, a tensor of one element, is not zero, every byte stays
        unchanged. The flag is read on its device, without a synchronization.

        Raises
        ------
        StateError
            If this tensor came from :meth:`with_usage` or :meth:`compact`, which return
            read-only tensors, or if it is a gathered parameter of ``fully_shard`` of which a copy
            is not in memory.
        """
        self._write_all([(self, tensor)], noop_flag)
        return self

    def _can_be_written_alone(self) -> bool:
        """Whether an in-place write keeps the tensors that share memory with this one correct."""
        self._check_can_be_written()
        view = self._view_of
        if view is None:
            return True
        root, copies = view.root, ("rowwise", "columnwise")
        if view.is_turned or any(self._has(usage) != root._has(usage) for usage in copies):
            return False
        start, stop = view.start, view.start + self._matrix()[0]
        if (start, stop) == (0, root._matrix()[0]):
            return True
        if root._sharding is not None and start == 0 and stop >= root._sharding.rows:
            return True  # a shard, before padding: zeros, which are the same bytes under any scale
        rows = root._rows_of_a_write()
        return rows > 0 and start % rows == 0 and (stop % rows == 0 or stop == root._matrix()[0])

    def _check_can_be_written(self) -> None:
        """Raise StateError if this tensor is read-only, or gathered and not all in memory."""
        if self._is_read_only:
            raise StateError(
                f"{self} is a read-only copy or layout of a tensor; write to the tensor that it "
                "was taken from, or to a clone. In a graph of torch.compile it may be a weight "
                "that delayed scaling quantizes: its scale is not there, so write outside of it."
            )
        copies = [usage for usage in ("rowwise", "columnwise") if self._has(usage)]
        held = copies if self._gathering is None else list(filter(self._is_in_memory, copies))
        if held != copies:
            raise StateError(
                f"A sharded parameter, a {type(self).__name__} of shape {tuple(self.shape)}, was "
                f"written while {held[0] if held else 'no'} copy of its {' and '.join(copies)} "
                "was gathered, and a write changes all. Write its shard: the parameter that the "
                "module has after reshard()."
            )

    def _rows_of_a_write(self) -> int:
        """The rows of a block, or of a matrix of a stack; 0 if a scale belongs to all rows."""
        stacked: int = self._quantizer.stacked_rows
        if stacked > 1:
            return stacked
        if not self.has_independent_blocks:
            return 0
        return max(self._block(usage) for usage in ("rowwise", "columnwise"))

    def _write(self, fresh: QuantizedTensor, non_blocking: bool = False) -> None:
        """Copy the buffers of ``fresh``, which has the same copies, into those of this tensor."""
        for name, new in fresh.compact().buffers().items():
            buffer = getattr(self, name)
            if buffer is not None:
                assert new is not None
                buffer.copy_(new[tuple(map(slice, buffer.shape))], non_blocking)
        self._was_written()

    def _took_bytes(self) -> None:
        """After bytes of another tensor were copied into this one."""

    def _leave_state(self) -> None:
        """Keep nothing of the state of an op, which a quantizer may hold."""

    def _was_written(self) -> None:
        self._source = None
        if self._high_precision_init_val:
            self._high_precision_init_val.clear()
        sharding = self._sharding
        # ``fully_shard`` itself moves the same bytes.
        has_kept = sharding is not None and sharding.high_precision_init_val is not None
        if has_kept and fsdp_caller("FSDPParam") is None:
            sharding.high_precision_init_val = None
        super()._was_written()
        # A graph of torch.compile saves the buffers, not this tensor.
        for buffer in self._memory():
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)

    def _cuts(self, usage: str, start: int, stop: int) -> bool:
        """Whether rows ``start`` to ``stop`` cut a block of the copy ``usage``."""
        block = self._block(usage)
        return start % block != 0 or (stop % block != 0 and stop != self._matrix()[0])

    def _block(self, usage: str) -> int:
        """The number of rows of a block of the copy ``usage``."""
        layout = self._layout
        names = (*self._names(usage), *layout.shared)
        return max(layout.rows[name][1] for name in names if name in layout.rows)

    # -- parameters ---------------------------------------------------------------

    def set_high_precision_init_val(self, value: torch.Tensor) -> None:
        """Keep the values that a parameter had before it was quantized, until it is written."""
        self._high_precision_init_val = [value]

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The values before quantization, on the CPU; None if they were not kept.

        Of a shard, its rows. None of a view, and after a write, such as a load or a step of an
        optimizer: the tensor has other values then.
        """
        if self._high_precision_init_val and self._view_of is None:
            (kept,) = self._high_precision_init_val
            return kept if kept.shape == self.shape else kept.view(self.shape)
        return None if self._sharding is None else self._sharding.high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Free the values kept from before quantization."""
        if self._high_precision_init_val is not None:
            self._high_precision_init_val.clear()
        if self._sharding is not None:
            self._sharding.high_precision_init_val = None

    @property
    def data(self) -> QuantizedTensor:
        """An alias that is not part of the autograd graph. Assignment replaces the contents.

        An assigned quantized tensor is shared; an assigned plain tensor is quantized for the
        copies that this tensor has.
        """
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        fresh = value if isinstance(value, type(self)) else self._usage()(value.detach())
        torch.Tensor.data.__set__(self, fresh)  # type: ignore[attr-defined]
        for name in (*self.buffer_names, "_quantizer", "_view_of", "_is_read_only"):
            setattr(self, name, getattr(fresh, name))
        self.high_precision_source = fresh.high_precision_source
        self._high_precision_init_val = fresh._high_precision_init_val

    # -- conversions --------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``torch.Tensor.to``; a plain copy if a dtype is given, also the nominal dtype.

        A tensor that torch converts as part of a module stays quantized.
        """
        asked = {name: value for name, value in kwargs.items() if name != "copy"}
        device, dtype, non_blocking, memory_format = parse_to(*args, **asked)
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
        """``torch.Tensor.type``; :meth:`to` if a ``torch.dtype`` is given."""
        if isinstance(dtype, torch.dtype):
            return self.to(dtype, *args, **kwargs)
        return super().type(dtype, *args, **kwargs)

    def type_as(self, other: torch.Tensor) -> torch.Tensor:
        """:meth:`to` the dtype and device of ``other``."""
        return self.to(other)

    # -- pickling, deep copies, torch.compile -------------------------------------

    def share_memory_(self) -> torch.Tensor:
        """Move the contents to shared memory, for other processes; no effect on a GPU.

        Raises
        ------
        StateError
            If this is a gathered parameter of ``fully_shard``, which frees its memory.
        """
        if self._gathering is not None:
            raise StateError(
                f"A sharded parameter, a {type(self).__name__} of shape {tuple(self.shape)}, was "
                "to be moved to shared memory while it was gathered, and fully_shard frees that "
                "memory. Share a clone() of it."
            )
        return super().share_memory_()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        # A view or a read-only copy is pickled as a tensor of its own, without its parent.
        is_part = self._view_of is not None or self._is_read_only
        source = self._like(torch.clone) if is_part else self._present()
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
        # Only a parameter's attributes: a state_dict has no parameters and must be plain data.
        attributes = self._attributes() if isinstance(self, torch.nn.Parameter) else None
        return rebuild, (*state, attributes) if attributes else state

    def __deepcopy__(self, memo: dict[int, object]) -> QuantizedTensor:
        if id(self) in memo or not self.is_leaf:
            copied: QuantizedTensor = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
            return copied
        # Torch's own deep copy fails on a wrapper with a storage offset, which a view has.
        contents = self.__dict__ | self._present().buffers()
        contents.pop("_gathering", None)  # a copy of a gathered parameter has memory of its own
        attributes = copy.deepcopy(contents, memo)
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

    def __tensor_flatten__(self) -> tuple[list[str], tuple[object, ...]]:
        """The names of the buffers, and everything else as a constant, for ``torch.compile``."""
        names = [name for name, buffer in self.buffers().items() if buffer is not None]
        # A graph receives only the buffers, so it cannot write to the parent of a view, or by the
        # state of a quantizer.
        quantizer = self._quantizer.without_state()
        is_read_only = self._is_read_only or self._view_of is not None
        return names, (quantizer, self.dtype, is_read_only or quantizer is not self._quantizer)

    def _stable_hash_for_caching(self) -> str:
        """Everything but values, as text: torch keeps compiled graphs by it, also on disk."""
        kind, (names, constants) = type(self), self.__tensor_flatten__()
        layouts = [(n, b.dtype, *b.shape, *b.stride()) for n in names for b in [getattr(self, n)]]
        properties = (tuple(self.shape), self.stride(), self.device, self.requires_grad)
        return f"{kind.__module__}.{kind.__qualname__} {properties} {layouts} {constants}"

    @staticmethod
    def __tensor_unflatten__(
        buffers: dict[str, torch.Tensor | None],
        constants: tuple[Any, ...],
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> QuantizedTensor:
        quantizer, dtype, is_read_only = constants
        device = next(b.device for b in buffers.values() if b is not None)
        tensor: QuantizedTensor = quantizer.tensor_class(
            buffers, shape, dtype, device, quantizer, strides=strides
        )
        tensor._is_read_only = is_read_only
        return tensor


class BlockScaledTensor(QuantizedTensor):
    """Base of the formats whose rowwise and columnwise copies have separate scales."""

    _rowwise_data: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None

    _kernels: Any
    _reference: Any
    """Of a class, the modules whose ``dequantize`` reads one copy, on a GPU and in plain torch."""

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        return self._dequantized(dtype, self._quantizer.fp8_dtype)

    def _dequantized(self, dtype: torch.dtype, *more: Any, **options: Any) -> torch.Tensor:
        """The values of one copy, with the padding of the data, by the kernel or the reference.

        ``more`` are arguments between the scales and the dtype.
        """
        usage, names = self._copy_to_read()
        data, scale = getattr(self, names[0]), getattr(self, names[1])
        shape = padded_shape(*self._matrix(), self.multiple)
        out = torch.empty(shape, dtype=dtype, device=data.device)
        functions = (self._kernels.dequantize, self._reference.dequantize)
        args = (data, scale, *more, dtype)
        return filled(out, *functions, *args, columnwise=usage == "columnwise", **options)


def note_backward_read(tensor: torch.Tensor | None, usage: str | None) -> None:
    """Say which copy of a gathered parameter the backward of the forward that runs now reads.

    None: it reads none. No effect on other tensors.
    """
    gathering = getattr(tensor, "_gathering", None)
    if gathering is not None:
        gathering.note_backward_read(usage)


def recipe_of_gathering(parameter: torch.Tensor) -> Recipe | None:
    """The recipe of ``gather_quantized`` of a gathered weight; None of any other parameter."""
    gathering = parameter._gathering if isinstance(parameter, QuantizedTensor) else None
    return None if gathering is None else gathering.recipe


def rebuild(
    cls: type[QuantizedTensor],
    buffers: dict[str, torch.Tensor | None],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Any,
    requires_grad: bool,
    is_parameter: bool = False,
    attributes: dict[str, object] | None = None,
) -> torch.Tensor:
    """Unpickle a quantized tensor; safe for ``torch.load(weights_only=True)``."""
    if unknown := buffers.keys() - set(cls.buffer_names):
        raise InputError(
            f"The file has a {cls.__name__} with {', '.join(sorted(unknown))}; in this version it "
            f"consists of {', '.join(cls.buffer_names)}. Load the file with the version that wrote "
            "it, and save the result of dequantize()."
        )
    present = (b.device for b in buffers.values() if b is not None)
    tensor: torch.Tensor = cls(
        buffers, shape, dtype, next(present, device), quantizer, requires_grad
    )
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    tensor.__dict__.update(attributes or {})
    return tensor


# Allow ``torch.load(weights_only=True)`` to build quantized tensors and quantizers,
# which are plain data. Each class registers itself.
torch.serialization.add_safe_globals([rebuild, DType, torch.device])


class _Dequantize(torch.autograd.Function):
    """Dequantize; the gradient passes unchanged, and torch casts it to the nominal dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype | None) -> torch.Tensor:
        return tensor._values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def geometry(shape: Sequence[int], view: RowsOf | None) -> tuple[Sequence[int], int]:
    """Strides and offset that a plain tensor of this shape, or such a view of one, would have."""
    contiguous = torch.empty(shape, device="meta").stride()
    if view is None:
        return contiguous, 0
    k = view.root.shape[-1]
    return (1, k) if view.is_turned else contiguous, view.start * k


def _laid_out(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``buffer``, contiguous and padded with zeros to ``shape``."""
    if buffer.shape == shape:
        return buffer.contiguous()
    padded = buffer.new_zeros(shape)
    padded[tuple(map(slice, buffer.shape))] = buffer
    return padded


def fitted(buffer: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``buffer`` with ``size`` entries of dimension ``dim``: fewer, or zeros after its own."""
    missing = size - buffer.shape[dim]
    if missing <= 0:
        return buffer.narrow(dim, 0, size) if missing else buffer
    zeros = buffer.new_zeros((*buffer.shape[:dim], missing, *buffer.shape[dim + 1 :]))
    return torch.cat([buffer, zeros], dim)
