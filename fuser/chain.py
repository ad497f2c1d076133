"""Stages of pointwise chains: a value that describes each op of a chain.

References, kernels and ops use this file, and it imports none of them. ``register`` adds a
stage defined by the user.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fuser.errors import InputError


class Traits(NamedTuple):
    """The properties that all stages of one name share.

    ``struct`` is the stage's type in device code. ``scalars`` is the number of
    its scalars, of which the first ``positive`` must be positive. ``operand`` is
    the tensor that the stage reads: ``"columns"``, one element for each column;
    ``"elements"``, one for each element; ``"seed"``, two int64; None for no tensor.
    The backward of an activation reads the activation's input; the backward of
    other stages does not. The last three fields are set for stages that users
    :func:`register`.
    """

    struct: str
    scalars: int = 0
    positive: int = 0
    is_activation: bool = False
    is_gated: bool = False
    operand: str | None = None
    header: Path | None = None
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None


_UNARY = Traits("", is_activation=True)
_GATED = Traits("", is_activation=True, is_gated=True)

STAGES = {
    "bias": Traits("Bias", operand="columns"),
    "constant_scale": Traits("ConstantScale", scalars=1),
    "add_extra_input": Traits("AddExtraInput", operand="elements"),
    "dropout": Traits("Dropout", scalars=1, operand="seed"),
    "gelu": _UNARY._replace(struct="GELU"),
    "gelu_erf": _UNARY._replace(struct="GELUErf"),
    "qgelu": _UNARY._replace(struct="QGELU"),
    "relu": _UNARY._replace(struct="ReLU"),
    "srelu": _UNARY._replace(struct="SReLU"),
    "silu": _UNARY._replace(struct="SiLU"),
    "tanh_srelu": _UNARY._replace(struct="TanhSReLU", scalars=1, positive=1),
    "glu": _GATED._replace(struct="GLU"),
    "geglu": _GATED._replace(struct="GEGLU"),
    "geglu_erf": _GATED._replace(struct="GEGLUErf"),
    "qgeglu": _GATED._replace(struct="QGEGLU"),
    "reglu": _GATED._replace(struct="ReGLU"),
    "sreglu": _GATED._replace(struct="SReGLU"),
    "swiglu": _GATED._replace(struct="SwiGLU"),
    "situglu": _GATED._replace(struct="SiTUGLU", scalars=2, positive=2),
    "clamped_swiglu": _GATED._replace(struct="ClampedSwiGLU", scalars=3, positive=1),
}
ACTIVATIONS = tuple(name for name, traits in STAGES.items() if traits.is_activation)


def register(
    name: str,
    *,
    struct: str,
    header: Path,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    scalars: int = 0,
    positive: int = 0,
    is_activation: bool = True,
    is_gated: bool = False,
) -> None:
    """Add a stage of your own; ``Stage(name, scalars)`` then creates it.

    A kernel of a chain with this struct includes the header. ``forward`` and ``backward`` compute
    the same in PyTorch, in float32. They run if kernels do not run, and tests compare the kernels
    with them.

    Parameters
    ----------
    name
        Name of the stage; not a name of one of the library's stages.
    struct
        The C++ type, with its namespace: ``"mine::Tanh"``. For an activation, a template over the
        dtype, ``template <class T> using Tanh = fuser::Unary<...>`` or ``fuser::Gated<...>``; for
        another stage, a struct derived from ``fuser::Stage``.
    header
        The file that defines it; it may include ``<fuser/extend.cuh>`` and files in its folder.
    forward
        ``forward(x, *scalars)``; for a gated activation ``forward(gate, linear, *scalars)``.
    backward
        The gradient of x. For an activation ``backward(dy, x, *scalars)``; for a gated one
        ``backward(dy, gate, linear, *scalars)``, which returns two tensors; for another stage
        ``backward(dy, *scalars)``.
    scalars, positive
        The number of scalars of the stage, and how many of the first must be positive.
    is_activation
        Whether backward reads the stage's input.
    is_gated
        Whether the output has half the columns; only for an activation.

    Raises
    ------
    InputError
        If the header does not exist, the struct has no namespace or the library's namespace, or
        the name or the struct belongs to another stage.
    """
    path = Path(header).resolve()
    if not path.is_file():
        raise InputError(
            f"Stage {name!r} got the header {path}, which does not exist. Check its path."
        )
    if not re.fullmatch(r"(?!fuser::)\w+(::\w+)+", struct):
        raise InputError(
            f"Stage {name!r} got the struct {struct!r}; it is a C++ type in a namespace of your "
            "own, such as 'mine::Tanh'."
        )
    if is_gated and not is_activation:
        raise InputError(f"Stage {name!r} got is_gated=True; only activations are gated.")
    row = Traits(struct, scalars, positive, is_activation, is_gated, None, path, forward, backward)
    known = STAGES.get(name)
    # The same stage again: its module was reloaded, and the new functions replace the old ones.
    if known is not None and known[:-2] != row[:-2]:
        raise InputError(
            f"Stage {name!r} exists already, with the struct {known.struct!r}. Choose another name."
        )
    owner = next((n for n, traits in STAGES.items() if traits.struct == struct and n != name), None)
    if owner is not None:
        raise InputError(
            f"The struct {struct!r} belongs to stage {owner!r}; {name!r} needs another one."
        )
    STAGES[name] = row


def headers_in(text: str) -> tuple[Path, ...]:
    """The headers of the registered stages whose structs occur in ``text``, a kernel's C++ name."""
    rows = (traits for traits in STAGES.values() if traits.header is not None)
    return tuple(
        dict.fromkeys(
            traits.header
            for traits in rows
            if traits.header and re.search(rf"(?<![\w:]){traits.struct}(?!\w)", text)
        )
    )


@dataclass(frozen=True)
class Stage:
    """One op of a chain.

    Parameters
    ----------
    name
        A key of ``STAGES``.
    scalars
        The scale; the probability that a dropout zeroes an element; the parameters
        of an activation's formula.
    interleave
        Width of the column blocks in which the gate and the linear part of a
        gated activation alternate; None if they are the halves of a row.
    is_scaled
        Whether the rows of an activation are multiplied by its operand, one
        scale for each row, before the output is rounded.

    Raises
    ------
    InputError
        If there is no such stage, or it does not take these scalars, an
        interleave or scales.
    """

    name: str
    # Compared by their bits, as a key of launches: 0.0 differs from -0.0, and a NaN equals itself.
    scalars: tuple[float, ...] = field(default=(), compare=False)
    interleave: int | None = None
    is_scaled: bool = False
    _bits: bytes = field(init=False, repr=False, default=b"")

    def __post_init__(self) -> None:
        traits = STAGES.get(self.name)
        if traits is None:
            raise InputError(f"A chain got a stage {self.name!r}; there are {', '.join(STAGES)}.")
        if len(self.scalars) != traits.scalars:
            raise InputError(
                f"Stage {self.name} got scalars {self.scalars}; it takes {traits.scalars}."
            )
        is_finite = not traits.is_activation or all(map(math.isfinite, self.scalars))
        if not is_finite or any(value <= 0 for value in self.scalars[: traits.positive]):
            raise InputError(
                f"{self.name} got scalars {self.scalars}; all must be finite and the first "
                f"{traits.positive} positive."
            )
        if self.interleave is not None and not traits.is_gated:
            raise InputError(
                f"Stage {self.name} got interleave {self.interleave}; gated activations take one."
            )
        if self.interleave is not None and self.interleave < 1:
            raise InputError(
                f"{self.name} got glu_interleave_size {self.interleave}; it must be >= 1."
            )
        if self.is_scaled and not traits.is_activation:
            raise InputError(f"Stage {self.name} got is_scaled=True; only activations are scaled.")
        if self.name == "dropout" and not 0 <= self.scalars[0] <= 1:
            raise InputError(f"A dropout got p={self.scalars[0]}; it must be between 0 and 1.")
        object.__setattr__(self, "_bits", struct.pack(f"{traits.scalars}d", *self.scalars))

    @functools.cached_property  # every call of a small pipeline asks
    def is_activation(self) -> bool:
        """Whether backward reads the input of this stage."""
        return STAGES[self.name].is_activation

    @functools.cached_property
    def is_gated(self) -> bool:
        """Whether the output has half the columns of the input."""
        return STAGES[self.name].is_gated

    @property
    def operand(self) -> str | None:
        """The tensor that the stage reads, as in :class:`Traits`; ``"rows"``: one scale a row."""
        return "rows" if self.is_scaled else STAGES[self.name].operand

    @functools.cached_property
    def scaled(self) -> Stage:
        """The same activation with one scale for each row."""
        return replace(self, is_scaled=True)

    def output_features(self, features: int) -> int:
        """Columns of the output for ``features`` columns of input.

        Raises
        ------
        InputError
            If a gated activation cannot split that many columns.
        """
        if not self.is_gated:
            return features
        multiple = 2 * (self.interleave or 1)
        if features % multiple:
            raise InputError(
                f"{self.name} splits the last dimension into a gate and a linear part, so it "
                f"must be a multiple of {multiple}; got {features}."
            )
        return features // 2


Stages = tuple[Stage, ...]
