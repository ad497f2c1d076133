"""Launchers of pointwise chains: what a chain is, its forward, its backward, and its producers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fuser.cuda.launch import Kernel, Launch, Producer, Struct, float32, int32, int64
from fuser.cuda.operands import ELEMENTS, boolean
from fuser.errors import InputError, InputTypeError

# name -> the struct in activations.cuh, and how many scalars the formula has
UNARY = {
    "gelu": ("GELU", 0),
    "qgelu": ("QGELU", 0),
    "relu": ("ReLU", 0),
    "srelu": ("SReLU", 0),
    "silu": ("SiLU", 0),
}
GATED = {
    "glu": ("GLU", 0),
    "geglu": ("GEGLU", 0),
    "qgeglu": ("QGEGLU", 0),
    "reglu": ("ReGLU", 0),
    "sreglu": ("SReGLU", 0),
    "swiglu": ("SwiGLU", 0),
    "situglu": ("SiTUGLU", 2),
    "clamped_swiglu": ("ClampedSwiGLU", 3),
}
ACTIVATIONS = {**UNARY, **GATED}
# The other stages, and how many scalars they have.
PLAIN = {"bias": 0, "constant_scale": 1, "add_extra_input": 0, "dropout": 1}

THREADS = 256
# Threads of a block side by side in a row: 2 KB. At least two rows, so that what a block sums over
# its rows takes half as many bytes.
MAX_BLOCK_X = 128
WARP = 32
MAX_GRID_Y = 65535
# A thread asks for about four vectors of 16 bytes before it waits for one: this many rows, by the
# tensors that are read. Four blocks of 256 threads have 64 KB on their way then; 25 KB would do for
# a multiprocessor of an H200 to keep up with its memory.
ROWS = {1: 4, 2: 2, 3: 2}
# A thread sums up to 64 rows, of fewer where there would be under 1000 threads a multiprocessor of
# an H200. A fp32 for the 128 rows of a block, written and read, is 1% of the bytes of bias + GELU.
MAX_SUMMED_ROWS = 64
MIN_SUMMING_THREADS = 2**17
# A tile takes as many values from a producer at once.
TILE_RUN = 8

Tensors = Sequence[torch.Tensor | None]


# -- what a chain is ----------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One op of a chain.

    Parameters
    ----------
    name
        ``"bias"``, ``"constant_scale"``, ``"add_extra_input"``, ``"dropout"``,
        or an activation, a key of ``ACTIVATIONS``.
    scalars
        The scale; the probability that a dropout zeroes an element; what the
        activation's formula takes.
    interleave
        Width of the column blocks in which the gate and the linear part of a
        gated activation alternate; None for the halves of a row.
    is_scaled
        Whether the rows of an activation are multiplied by its operand, before
        the output is rounded.

    Raises
    ------
    InputError
        If there is no such stage.
    """

    name: str
    scalars: tuple[float, ...] = ()
    interleave: int | None = None
    is_scaled: bool = False

    def __post_init__(self) -> None:
        if not self.is_activation and self.name not in PLAIN:
            raise InputError(
                f"A chain got a stage {self.name!r}; there are {', '.join([*PLAIN, *ACTIVATIONS])}."
            )
        count = ACTIVATIONS[self.name][1] if self.is_activation else PLAIN[self.name]
        if len(self.scalars) != count:
            raise InputError(f"Stage {self.name} got scalars {self.scalars}; it takes {count}.")
        if self.interleave is not None and (not self.is_gated or self.interleave < 1):
            raise InputError(
                f"Stage {self.name} got interleave {self.interleave}; gated activations take a "
                "positive one, and other stages none."
            )
        if self.is_scaled and not self.is_activation:
            raise InputError(f"Stage {self.name} got is_scaled=True; only activations are scaled.")
        if self.name == "dropout" and not 0 <= self.scalars[0] <= 1:
            raise InputError(f"A dropout got p={self.scalars[0]}; it is between 0 and 1.")

    @property
    def is_activation(self) -> bool:
        """Whether backward reads the input of this stage."""
        return self.name in ACTIVATIONS

    @property
    def is_gated(self) -> bool:
        """Whether the output has half the columns of the input."""
        return self.name in GATED


Stages = tuple[Stage, ...]


# -- launchers ----------------------------------------------------------------


def pointwise(
    stages: Stages,
    x: torch.Tensor,
    operands: Tensors,
    y: torch.Tensor,
    amax: torch.Tensor | None = None,
) -> None:
    """Write ``y = stages(x)``, every stage rounded to the dtype of ``x``.

    Bytes an element of y: its own, those of the element of x, or of the two in
    front of a gated stage, and of each extra input.

    Parameters
    ----------
    stages
        The chain; at most one stage is gated.
    x
        Read; fp32, fp16 or bf16, ``[..., columns]``, or ``[..., 2 * columns]``
        in front of a gated stage. Contiguous, or a matrix of contiguous rows.
    operands
        Read; one entry a stage, contiguous. Of ``"bias"``: ``[width]`` in the
        dtype of x, for an output of that width. Of ``"add_extra_input"``: as
        many elements as the stage's output, in the dtype of x. Of
        ``"dropout"``: two int64, drawn by torch's generator on the device; the
        mask follows from them and from the element's index. Of a scaled
        activation: one scale a row, fp32, fp16 or bf16. Else None.
    y
        Written; contiguous, in the dtype of x. Shares no memory with an input.
    amax
        Raised to ``max |y|`` of the rounded values; one fp32, at least 0. NaN
        is above infinity.

    Raises
    ------
    InputError, InputTypeError
        If a tensor's dtype, shape or layout is another.
    """
    chain = _chain(stages, x.dtype, _scale_dtypes(stages, operands))
    rows, columns = _matrix("y", y, chain.dtype)
    inputs = chain.forward_inputs(x, operands, rows, columns)
    _check_amax(amax)
    is_aligned = chain.is_aligned(inputs, chain.widest, y)
    vector = chain.widest if is_aligned else 1
    kernel = chain.forward_kernel(vector, amax is not None)
    launch = _launch(rows, columns, chain.widest, vector, chain.forward_rows)
    kernel(launch, inputs.struct(chain), y, amax, np.uint32(rows))


def pointwise_backward(
    stages: Stages,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    operands: Tensors,
    dx: torch.Tensor,
    grads: Tensors,
    workspace: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    *,
    saved: int = 0,
) -> None:
    """Write the gradients of the input of ``stages`` and of their operands.

    The stages from ``saved`` on are run again from their input. Every stage's
    gradient is rounded to the dtype of ``dy``. Sums over rows or columns are
    taken in fp32, in an order that follows from the shape alone.

    Bytes an element of dy: its own, those of the one or two elements of x and
    of dx, of each extra input in front of an activation, and of each gradient
    of an extra input.

    Parameters
    ----------
    stages
        The chain, as it ran forward.
    dy
        Read; the gradient of the chain's output, fp32, fp16 or bf16. Contiguous,
        or a matrix of contiguous rows.
    x
        Read; the input of ``stages[saved]`` in the dtype of dy, laid out
        likewise. None if no stage is an activation.
    operands
        Read, as in :func:`pointwise`. A bias or an extra input may be None
        where it is not added again: in front of ``saved``, and with no
        activation behind it.
    dx
        Written; the gradient of the input of ``stages[0]``, contiguous. Shares
        no memory with an input.
    grads
        Written; one entry a stage, contiguous, None where no gradient is
        wanted. Of a bias: ``[width]`` in the dtype of dy. Of an extra input or
        of scales: in their shape and dtype.
    workspace
        Overwritten; :func:`workspace_size` contiguous fp32, None if that is 0.
    amax
        Raised to ``max |dx|``, as in :func:`pointwise`.
    saved
        No stage in front of this one is an activation.

    Raises
    ------
    InputError, InputTypeError
        If a tensor's dtype, shape or layout is another.
    """
    wanted = tuple(grad is not None for grad in grads)
    chain = _chain(stages, dy.dtype, _scale_dtypes(stages, operands), wanted, saved)
    rows, wide = _matrix("dx", dx, chain.dtype)
    columns = wide // chain.lines
    inputs = chain.backward_inputs(dy, x, operands, rows, columns)
    chain.check_grads(grads, operands, rows, columns)
    _check_amax(amax)

    is_aligned = chain.is_aligned(inputs, chain.widest, dx, workspace, *chain.elementwise(grads))
    vector = chain.widest if is_aligned else 1
    parts = chain.parts(rows, columns, vector)
    _check_workspace(workspace, sum(part.count * part.size for part in parts))
    outputs = list(grads)
    begin = 0
    for part in parts:
        if workspace is not None:
            outputs[part.stage] = workspace.view(-1).narrow(0, begin, part.count * part.size)
        begin += part.count * part.size

    kernel = chain.backward_kernel(vector, amax is not None)
    steps = chain.steps(rows, columns)
    launch = _launch(rows, columns, chain.widest, vector, chain.backward_rows * steps)
    kernel(launch, inputs.struct(chain, outputs), dx, amax, np.uint32(rows), int32(steps))
    for part in parts:
        grad = grads[part.stage]
        assert grad is not None
        sum_kernel = _sum_kernel(grad.dtype, part.fan)
        sum_kernel(
            _sum_launch(part.size), outputs[part.stage], grad, int32(part.count), int64(part.size)
        )


def workspace_size(
    stages: Stages, rows: int, columns: int, dtype: torch.dtype, wanted: Sequence[bool]
) -> int:
    """How many fp32 elements :func:`pointwise_backward` may need.

    ``rows`` and ``columns`` are those of the chain's output; ``wanted`` says for
    each stage whether the gradient of its operand is.
    """
    chain = _chain(stages, dtype, (torch.float32,) * len(stages), tuple(wanted))
    return sum(part.count * part.size for part in chain.parts(rows, columns, 1))


def forward_producer(
    stages: Stages, x: torch.Tensor, operands: Tensors, rows: int, columns: int
) -> Producer:
    """The values that :func:`pointwise` writes, ``[rows, columns]``; arguments as there."""
    chain = _chain(stages, x.dtype, _scale_dtypes(stages, operands))
    inputs = chain.forward_inputs(x, operands, rows, columns)
    is_aligned = chain.is_aligned(inputs, TILE_RUN)
    name = f"fuser::PointwiseProducer<{chain.type}, {boolean(is_aligned)}>"
    return Producer(name, inputs.struct(chain), rows, columns, chain.dtype, is_aligned)


def backward_producer(
    stages: Stages,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    operands: Tensors,
    rows: int,
    columns: int,
    saved: int = 0,
) -> Producer:
    """The values of ``dx`` that :func:`pointwise_backward` writes, for outputs of that shape.

    Operands get no gradients.
    """
    wanted = (False,) * len(stages)
    chain = _chain(stages, dy.dtype, _scale_dtypes(stages, operands), wanted, saved)
    inputs = chain.backward_inputs(dy, x, operands, rows, columns)
    is_aligned = chain.is_aligned(inputs, TILE_RUN)
    name = f"fuser::PointwiseBackwardProducer<{chain.type}, {boolean(is_aligned)}>"
    wide = chain.lines * columns
    return Producer(name, inputs.struct(chain), rows, wide, chain.dtype, is_aligned)


# -- chains -------------------------------------------------------------------


@dataclass(frozen=True)
class _Parts:
    """The sum for one stage in parts, ``[count, size]``; ``fan`` neighbours are added first."""

    stage: int
    count: int
    size: int
    fan: int


@dataclass(frozen=True)
class _Inputs:
    """What a kernel reads: tensors that have been checked, and their layout."""

    x: torch.Tensor | None
    dy: torch.Tensor | None
    x_stride: int
    dy_stride: int
    operands: Tensors
    columns: int
    interleave: int

    def struct(self, chain: _Chain, outputs: Tensors | None = None) -> Struct:
        """``fuser::Inputs``, with the outputs of backward."""
        pointers: list[torch.Tensor | None] = []
        for i in chain.with_operand:
            pointers.append(self.operands[i])
            if outputs is not None and chain.wanted is not None and chain.wanted[i]:
                pointers.append(outputs[i])
        return Struct(
            (
                *(pointers or (None,)),
                self.x,
                self.dy,
                int64(self.x_stride),
                int64(self.dy_stride),
                *(chain.scalars or (float32(0.0),)),
                int32(self.columns),
                int32(self.interleave),
            )
        )


@dataclass(frozen=True)
class _Chain:
    """A chain of one dtype, forward or, where ``wanted`` is not None, backward."""

    stages: Stages
    dtype: torch.dtype
    scale_dtypes: tuple[torch.dtype | None, ...]
    wanted: tuple[bool, ...] | None = None
    saved: int = 0

    def __post_init__(self) -> None:
        count = len(self.stages)
        if not count or sum(stage.is_gated for stage in self.stages) > 1:
            raise InputError(
                f"A chain takes one stage or more, and at most one gated; got {self.stages}."
            )
        if self.dtype not in ELEMENTS:
            raise InputTypeError(f"Chains take float32, float16 and bfloat16; got {self.dtype}.")
        if len(self.scale_dtypes) != count or len(self.wanted or self.stages) != count:
            raise InputError(f"A chain of {count} stages takes {count} operands and gradients.")
        if self.saved and any(stage.is_activation for stage in self.stages[: self.saved]):
            raise InputError(
                f"saved={self.saved} has an activation in front of it, in {self.stages}."
            )

    # What follows from the chain alone, found once.

    @functools.cached_property
    def widest(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    @functools.cached_property
    def gated(self) -> int | None:
        """The number of the gated stage."""
        return next((i for i, stage in enumerate(self.stages) if stage.is_gated), None)

    @functools.cached_property
    def lines(self) -> int:
        """Columns of the input for each of the output."""
        return 1 if self.gated is None else 2

    @functools.cached_property
    def with_operand(self) -> tuple[int, ...]:
        """The numbers of the stages that have an operand."""
        return tuple(
            i
            for i, stage in enumerate(self.stages)
            if stage.is_scaled or (not stage.is_activation and stage.name != "constant_scale")
        )

    @functools.cached_property
    def reads_input(self) -> bool:
        """Whether the kernel reads x."""
        return self.wanted is None or any(stage.is_activation for stage in self.stages)

    def reads_operand(self, i: int) -> bool:
        """Whether the kernel reads the operand of a stage that has one."""
        if self.wanted is None or self.stages[i].name not in ("bias", "add_extra_input"):
            return True
        return i >= self.saved and any(stage.is_activation for stage in self.stages[i:])

    @functools.cached_property
    def scalars(self) -> tuple[Any, ...]:
        """Those of all stages, as the kernel takes them."""
        return tuple(scalar for stage in self.stages for scalar in _scalars(stage))

    @functools.cached_property
    def type(self) -> str:
        """The C++ type."""
        stages = ", ".join(map(self._stage_type, range(len(self.stages))))
        return f"fuser::Chain<{ELEMENTS[self.dtype]}, {stages}>"

    def _stage_type(self, i: int) -> str:
        stage = self.stages[i]
        grad = "true" if self.wanted is not None and self.wanted[i] else "false"
        function = f"fuser::{ACTIVATIONS.get(stage.name, ('',))[0]}<{ELEMENTS[self.dtype]}>"
        if stage.is_scaled:
            dtype = self.scale_dtypes[i]
            if dtype not in ELEMENTS:
                raise InputTypeError(f"Scales are float32, float16 or bfloat16; got {dtype}.")
            return f"fuser::ScaledActivation<{function}, {ELEMENTS[dtype]}, {grad}>"
        if stage.is_activation:
            return f"fuser::Activation<{function}>"
        name = {
            "bias": f"fuser::Bias<{grad}>",
            "add_extra_input": f"fuser::AddExtraInput<{grad}>",
            "constant_scale": "fuser::ConstantScale",
            "dropout": "fuser::Dropout",
        }[stage.name]
        return f"fuser::Done<{name}>" if i < self.saved else name

    @functools.cached_property
    def forward_rows(self) -> int:
        """Rows that a thread reads at once."""
        extras = sum(stage.name == "add_extra_input" for stage in self.stages)
        return ROWS.get(self.lines + extras, 1)

    @functools.cached_property
    def backward_rows(self) -> int:
        """Rows that a thread reads at once."""
        extras = sum(
            stage.name == "add_extra_input" and self.reads_operand(i)
            for i, stage in enumerate(self.stages)
        )
        return ROWS.get(1 + self.lines * self.reads_input + extras, 1)

    def forward_kernel(self, vector: int, with_amax: bool) -> Kernel:
        """``fuser_pointwise`` over runs of ``vector`` elements."""
        return _kernel("fuser_pointwise", self.type, self.forward_rows, vector, with_amax)

    def backward_kernel(self, vector: int, with_amax: bool) -> Kernel:
        """``fuser_pointwise_backward`` over runs of ``vector`` elements."""
        return _kernel("fuser_pointwise_backward", self.type, self.backward_rows, vector, with_amax)

    # What follows from the chain and a shape; `columns` are the output's.

    def width(self, i: int, columns: int) -> int:
        """Columns of the output of stage i."""
        return 2 * columns if self.gated is not None and i < self.gated else columns

    def steps(self, rows: int, columns: int) -> int:
        """How many times ``backward_rows`` rows a thread of backward takes."""
        assert self.wanted is not None
        stages = zip(self.stages, self.wanted, strict=True)
        if not any(stage.name == "bias" and is_wanted for stage, is_wanted in stages):
            return 1
        runs = -(-columns // self.widest)
        summed = min(rows * runs // MIN_SUMMING_THREADS, MAX_SUMMED_ROWS)
        return max(1, summed // self.backward_rows)

    def parts(self, rows: int, columns: int, vector: int) -> list[_Parts]:
        """The sums that backward leaves in parts; those read by vectors first."""
        assert self.wanted is not None
        over_rows, over_columns = [], []
        launch = _launch(
            rows, columns, self.widest, vector, self.backward_rows * self.steps(rows, columns)
        )
        (x, y, z), threads_x = launch.grid, launch.block[0]
        for i, stage in enumerate(self.stages):
            if not self.wanted[i]:
                continue
            if stage.name == "bias":
                over_rows.append(_Parts(i, y * z, self.width(i, columns), 1))
            elif stage.is_scaled:
                count = x * threads_x // min(threads_x, WARP)
                over_columns.append(_Parts(i, count, rows, self.widest // vector))
        return over_rows + over_columns

    # What is checked at a launch.

    def forward_inputs(
        self, x: torch.Tensor, operands: Tensors, rows: int, columns: int
    ) -> _Inputs:
        """Inputs of forward."""
        stride = _row_stride("x", x, rows, self.lines * columns, self.dtype)
        self._check_operands(operands, rows, columns)
        return _Inputs(x, None, stride, 0, operands, columns, self._interleave(columns))

    def backward_inputs(
        self,
        dy: torch.Tensor,
        x: torch.Tensor | None,
        operands: Tensors,
        rows: int,
        columns: int,
    ) -> _Inputs:
        """Inputs of backward."""
        dy_stride = _row_stride("dy", dy, rows, columns, self.dtype)
        x_stride = 0
        if not self.reads_input:
            x = None
        elif x is None:
            raise InputError(f"The backward of {self.stages} reads their input; x is None.")
        else:
            x_stride = _row_stride("x", x, rows, self.lines * columns, self.dtype)
        self._check_operands(operands, rows, columns)
        return _Inputs(x, dy, x_stride, dy_stride, operands, columns, self._interleave(columns))

    def check_grads(self, grads: Tensors, operands: Tensors, rows: int, columns: int) -> None:
        """Raise InputError unless each gradient is what its operand is."""
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            name = self.stages[i].name
            if i not in self.with_operand or name == "dropout":
                raise InputError(f"Stage {i}, {name}, has no operand with a gradient.")
            self._check(f"The gradient of stage {i}, {name},", grad, i, rows, columns)
            operand = operands[i]
            if self.stages[i].is_scaled and operand is not None and grad.dtype != operand.dtype:
                raise InputTypeError(
                    f"The gradient of {operand.dtype} scales is {grad.dtype}; the two are one."
                )

    def _check_operands(self, operands: Tensors, rows: int, columns: int) -> None:
        for i, operand in enumerate(operands):
            name = self.stages[i].name
            if i not in self.with_operand:
                if operand is not None:
                    raise InputError(f"Stage {i}, {name}, takes no operand; got one.")
            elif operand is not None:
                self._check(f"The operand of stage {i}, {name},", operand, i, rows, columns)
            elif self.reads_operand(i):
                raise InputError(f"Stage {i}, {name}, got no operand.")

    def _check(self, what: str, tensor: torch.Tensor, i: int, rows: int, columns: int) -> None:
        stage, width = self.stages[i], self.width(i, columns)
        dtype: torch.dtype | None = self.dtype
        if stage.is_scaled:
            count, dtype = rows, tensor.dtype if tensor.dtype in ELEMENTS else torch.float32
        elif stage.name == "dropout":
            count, dtype = 2, torch.int64
        else:
            count = width if stage.name == "bias" else rows * width
        if tensor.numel() != count or tensor.dtype != dtype or not tensor.is_contiguous():
            raise InputError(
                f"{what} is {_described(tensor)}; it is {count} contiguous elements of {dtype}."
            )

    def _interleave(self, columns: int) -> int:
        interleave = None if self.gated is None else self.stages[self.gated].interleave
        if interleave is not None and columns % interleave:
            raise InputError(
                f"Blocks of {interleave} columns do not fill the {columns} columns of a gated "
                "stage's output."
            )
        return interleave or columns

    def elementwise(self, tensors: Tensors) -> list[torch.Tensor | None]:
        """Those of operands or of their gradients that are read or written by vectors."""
        return [
            tensor
            for stage, tensor in zip(self.stages, tensors, strict=True)
            if stage.name in ("bias", "add_extra_input")
        ]

    def is_aligned(self, inputs: _Inputs, run: int, *others: torch.Tensor | None) -> bool:
        """Whether runs of that many elements lie side by side everywhere, at 16 bytes."""
        tensors = (inputs.x, inputs.dy, *self.elementwise(inputs.operands), *others)
        return (
            inputs.columns % run == 0
            and inputs.interleave % run == 0
            and inputs.x_stride % self.widest == 0
            and inputs.dy_stride % self.widest == 0
            and not any(t is not None and t.data_ptr() % 16 for t in tensors)
        )


_chain = functools.lru_cache(maxsize=4096)(_Chain)


def _scale_dtypes(stages: Stages, operands: Tensors) -> tuple[torch.dtype | None, ...]:
    return tuple(
        operand.dtype if operand is not None and stage.is_scaled else None
        for stage, operand in zip(stages, operands, strict=True)
    )


def _scalars(stage: Stage) -> tuple[Any, ...]:
    """The scalars of a stage as its C++ struct takes them."""
    if stage.name == "dropout":
        (p,) = stage.scalars
        scale = 1 / (1 - p) if p < 1 else 0.0
        return float32(scale), np.uint32(min(round(p * 2**32), 2**32 - 1))
    if stage.name == "situglu":
        return tuple(float32(v) for beta in stage.scalars for v in (beta, 1 / beta))
    return tuple(map(float32, stage.scalars))


@functools.lru_cache(maxsize=4096)
def _kernel(name: str, chain: str, rows: int, vector: int, with_amax: bool) -> Kernel:
    amax = str(with_amax).lower()
    return Kernel("pointwise", f"{name}<{chain}, {rows}, {vector}, {amax}>")


@functools.lru_cache(maxsize=64)
def _sum_kernel(dtype: torch.dtype, fan: int) -> Kernel:
    return Kernel("pointwise", f"fuser_sum_parts<{ELEMENTS[dtype]}, {fan}>")


# -- launches -----------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _launch(rows: int, columns: int, widest: int, vector: int, each: int) -> Launch:
    """Threads of ``each`` rows and ``vector`` columns.

    The block is that of ``widest`` columns a thread, so that runs of 1 and of ``widest`` columns
    take the same rows, and add them in the same order.
    """
    runs = max(1, -(-columns // widest))
    if runs < WARP:
        x = 1 << (runs - 1).bit_length()
    else:
        blocks = -(-runs // MAX_BLOCK_X)
        x = -(-runs // (blocks * WARP)) * WARP
    y = THREADS // x
    chunks = -(-rows // (y * each))
    z = -(-chunks // MAX_GRID_Y)
    return Launch((-(-columns // (vector * x)), -(-chunks // max(1, z)), z), (x, y))


@functools.lru_cache(maxsize=4096)
def _sum_launch(size: int) -> Launch:
    return Launch((-(-size // WARP),), (WARP, 8))


# -- tensors ------------------------------------------------------------------


def _matrix(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and columns of an output."""
    if tensor.dtype != dtype or tensor.dim() == 0 or not tensor.is_contiguous():
        raise InputError(f"{name} is {_described(tensor)}; it is contiguous {dtype}.")
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    if max(rows, 2 * columns) >= 2**31:
        raise InputError(f"{name} has {rows} rows and {columns} columns; a kernel takes 2^31.")
    return rows, columns


def _row_stride(
    name: str, tensor: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> int:
    """Elements from a row of an input to the next."""
    if tensor.dtype != dtype or tensor.numel() != rows * columns or tensor.shape[-1:] != (columns,):
        raise InputError(
            f"{name} is {_described(tensor)}; it has {rows} rows of {columns} columns of {dtype}."
        )
    if tensor.is_contiguous():
        return columns
    if tensor.dim() == 2 and (tensor.stride(1) == 1 or columns == 1):
        return tensor.stride(0)
    raise InputError(
        f"{name} is {_described(tensor)}; it is contiguous, or a matrix of contiguous rows."
    )


def _check_amax(amax: torch.Tensor | None) -> None:
    if amax is not None and (amax.dtype != torch.float32 or amax.numel() != 1):
        raise InputError(f"amax is {_described(amax)}; it is one element of float32.")


def _check_workspace(workspace: torch.Tensor | None, size: int) -> None:
    if size and (
        workspace is None
        or workspace.dtype != torch.float32
        or workspace.numel() < size
        or not workspace.is_contiguous()
    ):
        raise InputError(
            f"The workspace is {_described(workspace)}; it is contiguous float32 of {size} "
            "elements or more."
        )


def _described(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"


# -- the compile check --------------------------------------------------------

SWIGLU = (Stage("swiglu"),)
BIAS_GELU = (Stage("bias"), Stage("gelu"))
SCALED_SRELU = (Stage("srelu", is_scaled=True),)
LINEAR = (
    *(Stage("bias"), Stage("dropout", (0.3,))),
    *(Stage("constant_scale", (0.7,)), Stage("add_extra_input")),
)
TWO_LINES = (Stage("silu"), Stage("add_extra_input"), Stage("geglu"), Stage("relu"))
EVERYTHING = (
    *(Stage("bias"), Stage("constant_scale", (0.7,)), Stage("swiglu", is_scaled=True)),
    *(Stage("dropout", (0.3,)), Stage("add_extra_input")),
)


def instantiations() -> tuple[Kernel, ...]:
    """The kernels that the tests compile and run; any other chain is made when it is asked for.

    Every activation forward and backward in bf16, two chains in every dtype with and without
    vectors, and every kind of stage with the gradient of its operand.
    """
    bf16, fp32 = torch.bfloat16, torch.float32
    kernels = [_sum_kernel(dtype, 1) for dtype in ELEMENTS]
    kernels += [_sum_kernel(fp32, 4), _sum_kernel(fp32, 8)]

    def add(
        stages: Stages,
        dtype: torch.dtype,
        *,
        vectors: tuple[bool, ...] = (True,),
        wanted: tuple[int, ...] = (),
        saved: int = 0,
        scales: torch.dtype = fp32,
        with_amax: bool = False,
    ) -> None:
        scale_dtypes = tuple(scales if stage.is_scaled else None for stage in stages)
        grads = tuple(i in wanted for i in range(len(stages)))
        forward = _chain(stages, dtype, scale_dtypes)
        backward = _chain(stages, dtype, scale_dtypes, grads, saved)
        for has_vectors in vectors:
            vector = forward.widest if has_vectors else 1
            kernels.append(forward.forward_kernel(vector, with_amax))
            kernels.append(backward.backward_kernel(vector, with_amax))

    for name, (_, count) in ACTIVATIONS.items():
        add((Stage(name, (1.0,) * count),), bf16)
    for dtype in ELEMENTS:
        add(SWIGLU, dtype, vectors=(True, False))
        add(BIAS_GELU, dtype, vectors=(True, False), wanted=(0,), saved=1)
    add(BIAS_GELU, bf16, wanted=(0,))
    add(BIAS_GELU, bf16, wanted=(0,), saved=1, with_amax=True)
    add(SCALED_SRELU, bf16, wanted=(0,), scales=bf16)
    add(LINEAR, bf16, wanted=(0, 3))
    add(TWO_LINES, bf16, wanted=(1,))
    for dtype in (bf16, fp32):
        add(EVERYTHING, dtype, vectors=(True, False), wanted=(0, 2, 4))
    return tuple(kernels)
