"""Quantizer: the base class of the quantizers of all formats."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from fuser.cuda.launch import kernels_support
from fuser.errors import InputError, KernelUnavailable
from fuser.formats import Layout, NumberFormat, buffers_for_kernels, padded_shape
from fuser.functional.amax import reduce_amaxes
from fuser.functional.lazy import LazyTensor, materialize, matrix_of
from fuser.recipe import Recipe
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.observation import keep_source, observing
from fuser.torch_private import foreach_copy_
from fuser.wrapper_tensor import WrapperTensor

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

AMAXES = "amaxes"
"""Beside its buffers, :meth:`Quantizer.buffers_of` may return the amaxes that it measured."""
# Accepted dtypes. fp64 is quantized as fp32, so that a model in fp64 can be converted and written.
QUANTIZABLE = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))


@dataclass(frozen=True)
class Quantizer:
    """How to make a quantized tensor, as a value: hashable, and equal if its contents are equal.

    ``rowwise`` and ``columnwise`` are the usages: whether the copy that a GEMM
    reads along rows is made, and the copy that it reads along columns.
    """

    rowwise: bool = True
    columnwise: bool = True

    tensor_class: ClassVar[type[QuantizedTensor]]
    recipe_class: ClassVar[type[Recipe] | None] = None
    """The recipe whose quantizers :meth:`of_recipe` makes; None for a custom recipe's."""
    multiple: ClassVar[int] = 1
    """The matrix is padded with zeros to multiples of this number in both dimensions."""
    is_of_blocks: ClassVar[bool] = False
    """Whether rows of several groups, or matrices of a stack, are quantized as one matrix: no block
    reaches over the end of a tile. False for a subclass, which may compute otherwise."""
    accepts_lazy: ClassVar[bool] = False
    """Whether :meth:`buffers_of` accepts lazy tensors."""
    reduces_scales: ClassVar[bool] = False
    """Whether ranks that quantize by :meth:`bound_to` get equal scales, where rows share them."""
    reduced_amaxes: ClassVar[torch.Tensor | None] = None
    """Those of :meth:`with_amaxes`."""
    stacked_rows: ClassVar[int] = 1
    """Of stacked matrices, the number of rows of each, which is quantized alone (``stacks.py``)."""
    # The quantizers that differ only in usage, by usage; all of them share this dictionary.
    _family: ClassVar[dict[tuple[bool, bool], Quantizer]]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])
        declares_format = "tensor_class" in cls.__dict__
        if declares_format:
            cls.multiple = cls.tensor_class.multiple
        cls.is_of_blocks = declares_format and cls.tensor_class.has_independent_blocks
        if (recipe_class := cls.__dict__.get("recipe_class")) is not None:
            _OF_RECIPES[recipe_class] = cls
        # A subclass that redefines `buffers_of` does not inherit what its base promised about it.
        if "buffers_of" in cls.__dict__ and "accepts_lazy" not in cls.__dict__:
            cls.accepts_lazy = False
        if "buffers_of" in cls.__dict__ and "reduces_scales" not in cls.__dict__:
            cls.reduces_scales = False
        if "is_repeatable" not in cls.__dict__:
            cls.is_repeatable = False  # type: ignore[assignment]

    def __call__(self, tensor: torch.Tensor | LazyTensor) -> QuantizedTensor:
        """Quantize ``tensor``, of any shape ``[..., K]``; fp32, fp16, bf16, or fp64 as fp32.

        A format of whole blocks pads the buffers with zeros; the result has the tensor's shape.

        If the quantizer accepts lazy tensors, the kernel of a lazy tensor writes only the
        quantized values.

        Differentiable: the gradient passes through unchanged, in the dtype of ``tensor``.

        Raises
        ------
        InputError
            If the tensor has no dimension or another dtype.
        """
        if not (self.rowwise or self.columnwise):
            raise InputError(
                f"{self} makes neither a rowwise nor a columnwise copy."
                " Ask for one with set_usage()."
            )
        if isinstance(tensor, LazyTensor):
            if self.accepts_lazy:
                return self._made(self.buffers_of(tensor), tensor)
            tensor = tensor.tensor()
        if tensor.requires_grad and torch.is_grad_enabled():
            quantized: QuantizedTensor = _StraightThrough.apply(tensor, self)  # type: ignore[no-untyped-call]
            return quantized
        source = tensor.dequantize() if isinstance(tensor, WrapperTensor) else tensor
        if source.requires_grad and (_is_dynamo_compiling() or not self.is_repeatable):
            source = source.detach()
        return self._made(self.buffers_of(self._checked_rows(source)), source)

    def _checked_rows(self, source: torch.Tensor) -> torch.Tensor:
        """``source`` as a matrix ``[M, K]``, after a check that it can be quantized."""
        if not (source.dim() and source.dtype in QUANTIZABLE):
            raise InputError(
                f"{type(self).__name__} got a tensor of shape {tuple(source.shape)} and dtype "
                f"{source.dtype}; it takes floating-point tensors of one dimension or more, in "
                "fp32, fp16 or bf16."
            )
        return source if source.dim() == 2 else _rows(source)

    def value(self) -> Quantizer:
        """The frozen quantizer of the present contents: this one, unless it can be changed."""
        return self

    @classmethod
    def of_recipe(cls, recipe: Any, role: str) -> Quantizer:
        """The quantizer of an ``"input"``, ``"weight"`` or ``"grad_output"`` under a recipe.

        The recipe is a ``recipe_class``.
        """
        raise NotImplementedError

    @property
    def is_repeatable(self) -> bool:
        """Whether each call makes new tensors, whose bytes depend on its values and fields alone.

        Beside these they depend on :meth:`state_tensors`. A subclass says so itself.
        """
        return False

    def state_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that it reads or writes, other than the tensor to quantize."""
        return ()

    def copies(self, *values: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        """The buffers of the rowwise copy, then those of the columnwise copy, by name."""
        cls = self.tensor_class
        return dict(zip((*cls.rowwise_names, *cls.columnwise_names), values, strict=True))

    def _made(
        self, buffers: dict[str, torch.Tensor | None], source: torch.Tensor | LazyTensor
    ) -> QuantizedTensor:
        about = source.shape, source.dtype, source.device, self.unbound()
        tensor = self.tensor_class(buffers, *about)
        if AMAXES in buffers:
            tensor._amaxes = buffers[AMAXES]
        if observing.now is not None:
            keep_source(tensor, source)
        return tensor

    @property
    def format(self) -> NumberFormat:
        """The number format of the result."""
        raise NotImplementedError

    def new_buffers(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        """Uninitialized buffers for the matrix ``x``, by name; None in a copy that is not made.

        A lazy tensor may come with buffers, which are overwritten.
        """
        if isinstance(x, LazyTensor) and x.buffers is not None:
            return dict(x.buffers)
        (m, k), layout, unused = matrix_of(x), self._layout, self._unused
        buffers: dict[str, torch.Tensor | None] = {}
        for name, buffer, shape in buffers_for_kernels(layout, m, k):
            buffers[name] = None
            if buffer.usage not in unused:
                buffers[name] = torch.empty(shape, dtype=buffer.dtype, device=x.device)
        return buffers

    @functools.cached_property
    def _layout(self) -> Layout:
        layout = self.format.layout
        return layout.of_groups if self.tensor_class.has_scales_of_rows else layout

    @functools.cached_property
    def _unused(self) -> tuple[str, ...]:
        return tuple(usage for usage in ("rowwise", "columnwise") if not getattr(self, usage))

    # Typed ``Any``, because a subclass may accept only tensors.
    def buffers_of(self, rows: Any) -> dict[str, torch.Tensor | None]:
        """The buffers of a quantized tensor ``[M, K]``, or of a lazy tensor of any shape, by name.

        A kernel computes them if kernels run on this device, otherwise torch. A format of whole
        blocks returns the buffers of the padded matrix (:func:`whole_blocks`).
        """
        if self.multiple > 1:
            rows = whole_blocks(rows, self.multiple)
        is_lazy = isinstance(rows, LazyTensor)
        if not (is_lazy or kernels_support(rows)):
            return self.from_reference(rows)
        try:
            buffers = self.from_kernel(rows)
            if is_lazy:
                rows.finish()
            return buffers
        except KernelUnavailable:
            return self.from_reference(materialize(rows).view(matrix_of(rows)))

    def from_kernel(self, x: Any) -> dict[str, torch.Tensor | None]:
        """The kernel implementation of :meth:`buffers_of`: allocates the buffers and launches.

        ``x`` is a tensor of whole blocks that kernels can read, or a lazy tensor
        (:func:`source_of`).
        """
        raise KernelUnavailable(f"{type(self).__name__} has no kernel.")

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The PyTorch implementation of :meth:`buffers_of`; ``x [M, K]`` has whole blocks."""
        raise NotImplementedError

    def encoding(self) -> tuple[object, ...]:
        """Describes the bytes: tensors of one class with equal encodings can exchange bytes."""
        return (self.format,)

    def with_usage(self, *, rowwise: bool, columnwise: bool) -> Quantizer:
        """The same quantizer for other usages; returns the same object for the same usages."""
        try:
            return self._family[rowwise, columnwise]
        except (AttributeError, KeyError):
            return self._relative(rowwise, columnwise)

    def _relative(self, rowwise: bool, columnwise: bool) -> Quantizer:
        # Two threads may both make one; ``setdefault`` returns the same one to both.
        family = self.__dict__.setdefault("_family", {(self.rowwise, self.columnwise): self})
        if (rowwise, columnwise) not in family:
            relative = replace(self, rowwise=rowwise, columnwise=columnwise)
            relative.__dict__["_family"] = family
            family.setdefault((rowwise, columnwise), relative)
        member: Quantizer = family[rowwise, columnwise]
        return member

    def __getstate__(self) -> dict[str, object]:
        attributes, cls = self.__dict__.items(), type(self)
        # Cached properties are computed again after unpickling.
        return {
            name: value
            for name, value in attributes
            if name != "_family"
            and not isinstance(getattr(cls, name, None), functools.cached_property)
        }

    def of_view(self, root: Quantizer, start: int) -> Quantizer:
        """The quantizer of a view of a tensor with this one: of rows ``start`` on of its root."""
        return self

    def amaxes_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The amaxes of ``rows [M, K]`` that ranks with other rows of the tensor must know.

        fp32 ``[n]``, a new tensor; None if the scales of these rows depend on no other rows, as in
        formats of blocks. A format that defines it reads :attr:`reduced_amaxes` when it quantizes.
        """
        return None

    def with_amaxes(self, amaxes: torch.Tensor) -> Quantizer:
        """For one call: take these for those of :meth:`amaxes_of`, over the rows of all ranks."""
        quantizer = replace(self.value())
        quantizer.__dict__["reduced_amaxes"] = amaxes
        return quantizer

    def bound_to(self, group: Any) -> Callable[[torch.Tensor | LazyTensor], QuantizedTensor]:
        """For one call: reduce amaxes over ``group``; returns itself if the format has none."""
        if type(self).amaxes_of is Quantizer.amaxes_of:
            return self
        return lambda tensor: next(quantized_parts([RankRows(self, materialize(tensor), group)]))

    def unbound(self) -> Quantizer:
        """The quantizer that a tensor keeps: without the amaxes of one call."""
        return self if self.reduced_amaxes is None else replace(self)

    def to_repeat(self, tensor: QuantizedTensor) -> torch.Tensor | None:
        """What :meth:`repeating` needs to quantize the values of ``tensor``, made just now, again.

        None if their scales need not be known, or are to be measured again.
        """
        return tensor._amaxes

    def repeating(self, kept: torch.Tensor | None) -> Quantizer:
        """For one call: makes the same bytes of the same values, and records nothing.

        ``kept`` is the result of :meth:`to_repeat`.
        """
        return self if kept is None else self.with_amaxes(kept)

    def without_state(self) -> Quantizer:
        """A quantizer of the same format that holds no tensors; itself if it holds none."""
        return self


class RankRows(NamedTuple):
    """Values to quantize, and the ranks that have rows of the tensor; None if this rank has all.

    Parts with one ``joint`` have one amax, the largest: their tensors are read as one.
    """

    quantizer: Quantizer
    values: torch.Tensor
    group: torch.distributed.ProcessGroup | None = None
    joint: Hashable = None


def quantized_parts(parts: Sequence[RankRows]) -> Iterator[QuantizedTensor]:
    """Quantize parts one after another, as parts of their tensors.

    Their amaxes are reduced before the first of them: one reduction for all that have a group and a
    device in common. So the ranks of a group call this together, with parts in the same order. It
    does not depend on the values, or on kernels, whether a rank reduces: others would wait.
    """
    quantizers: list[Quantizer] = []
    by_group: dict[tuple[torch.distributed.ProcessGroup, torch.device], list[torch.Tensor]] = {}
    joint_amaxes: dict[Hashable, list[torch.Tensor]] = {}
    for quantizer, values, group, joint in parts:
        amaxes = None
        if group is not None or joint is not None:
            plain = values._values() if isinstance(values, WrapperTensor) else values.detach()
            amaxes = quantizer.amaxes_of(quantizer._checked_rows(plain))
        if amaxes is not None:
            if group is not None:
                by_group.setdefault((group, amaxes.device), []).append(amaxes)
            if joint is not None:
                joint_amaxes.setdefault(joint, []).append(amaxes)
            quantizer = quantizer.with_amaxes(amaxes)
        quantizers.append(quantizer)
    for (group, _), together in by_group.items():
        reduce_amaxes(together, group)
    for together in joint_amaxes.values():
        largest = torch.stack(together).amax(0)
        foreach_copy_(together, [largest] * len(together))
    for quantizer, part in zip(quantizers, parts, strict=True):
        yield quantizer(part.values)


_OF_RECIPES: dict[type[Recipe], type[Quantizer]] = {}


def quantizer_class(recipe: Recipe) -> type[Quantizer] | None:
    """The class whose ``recipe_class`` the recipe is; None if there is none."""
    return next((_OF_RECIPES[c] for c in type(recipe).__mro__ if c in _OF_RECIPES), None)


def _rows(x: torch.Tensor) -> torch.Tensor:
    k = x.shape[-1]
    return x.reshape(-1 if k else math.prod(x.shape[:-1]), k)


def whole_blocks(x: torch.Tensor | LazyTensor, multiple: int) -> torch.Tensor | LazyTensor:
    """``x [M, K]`` padded with zeros to multiples of ``multiple`` in both dimensions.

    Returns ``x`` if it has whole blocks. A lazy tensor that needs padding is written to memory
    first.
    """
    m, k = matrix_of(x)
    if not (m % multiple or k % multiple):
        return x
    rows, columns = padded_shape(m, k, multiple)
    return F.pad(materialize(x).view(m, k), (0, columns - k, 0, rows - m))


class _StraightThrough(torch.autograd.Function):
    """Quantize; the gradient passes through unchanged, and torch casts it to the tensor's dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
        return quantizer(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None
