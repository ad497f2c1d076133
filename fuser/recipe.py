"""Recipes: how a pipeline is quantized, as frozen values compared by contents."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from fuser.errors import InputError, InputTypeError

BACKWARD_OVERRIDES = ("high_precision", "dequantized")
BACKWARD_OVERRIDE_VARIABLE = "NVTE_BACKWARD_OVERRIDE"


class Format(enum.Enum):
    """FP8 and FP4 number formats; HYBRID is E4M3 in forward and E5M2 in backward."""

    E2M1 = "E2M1"
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


FP8_FORMATS = (Format.E4M3, Format.HYBRID)
"""What FP8 recipes take: E5M2 in forward has too few mantissa bits to train with."""


@dataclass(frozen=True)
class MMParams:
    """Matrix multiplication options of one GEMM."""

    use_split_accumulator: bool = True


def _backward_override_from_environment() -> str | None:
    """The default of ``backward_override``; the one place where it is read."""
    return os.environ.get(BACKWARD_OVERRIDE_VARIABLE) or None


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes.

    A recipe is a value: two with the same contents are equal and share every
    cached plan, and changing any field makes a different plan key.

    Parameters
    ----------
    backward_override
        ``None`` (backward runs quantized), ``"high_precision"`` (backward uses
        the original unquantized operands) or ``"dequantized"`` (backward uses
        the dequantized operands of the forward). The default is read from the
        environment variable ``NVTE_BACKWARD_OVERRIDE`` when the recipe is built.

    Raises
    ------
    InputError
        If ``backward_override`` is none of the above, or the recipe takes none,
        or another field holds a value that the recipe does not take.
    """

    backward_override: str | None = field(
        default_factory=_backward_override_from_environment, kw_only=True
    )

    accepts_backward_override: ClassVar[bool] = True
    accepted: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """The values that a field takes, where not every one of its type."""

    def __post_init__(self) -> None:
        for name, values in self.accepted.items():
            if getattr(self, name) not in values:
                listed = " or ".join(str(getattr(value, "name", repr(value))) for value in values)
                given = getattr(self, name)
                raise InputError(
                    f"{type(self).__name__} got {name} {getattr(given, 'name', repr(given))}; "
                    f"it takes {listed}."
                )
        override = self.backward_override
        if override is None:
            return
        if override not in BACKWARD_OVERRIDES:
            raise InputError(
                f"backward_override of {type(self).__name__} is {override!r}; the accepted "
                f"values are {', '.join(map(repr, BACKWARD_OVERRIDES))} and None."
            )
        if not self.accepts_backward_override:
            accepting = [
                cls.__name__ for cls in Recipe.__subclasses__() if cls.accepts_backward_override
            ]
            raise InputError(
                f"{type(self).__name__} takes no backward_override (got {override!r}); "
                f"the recipes that accept one are {', '.join(accepting)}."
            )

    @property
    def quantizes_backward(self) -> bool:
        """Whether backward runs quantized; under an override it does not."""
        return self.backward_override is None

    def __str__(self) -> str:
        """The class, and the fields that are not as a bare recipe has them."""
        changed = [
            f"{f.name}={getattr(value, 'name', repr(value))}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != (None if f.default is MISSING else f.default)
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    @property
    def split_accumulators(self) -> tuple[bool, bool, bool]:
        """Whether the GEMMs of forward, dgrad and wgrad use split accumulators.

        Partial sums then go to fp32 registers more often: slower and more exact
        on Hopper. Recipes without a field for it use them in backward.
        """
        defaults = {"fprop": False, "dgrad": True, "wgrad": True}
        fprop, dgrad, wgrad = (
            getattr(self, f"fp8_gemm_{name}", MMParams(default)).use_split_accumulator
            for name, default in defaults.items()
        )
        return fprop, dgrad, wgrad

    def delayed(self) -> bool:
        """Whether this is delayed scaling."""
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        """Whether this is FP8 current scaling."""
        return isinstance(self, Float8CurrentScaling)

    def mxfp8(self) -> bool:
        """Whether this is MXFP8 block scaling."""
        return isinstance(self, MXFP8BlockScaling)

    def float8_block_scaling(self) -> bool:
        """Whether this is FP8 scaling in blocks of 128."""
        return isinstance(self, Float8BlockScaling)

    def nvfp4(self) -> bool:
        """Whether this is NVFP4 block scaling."""
        return isinstance(self, NVFP4BlockScaling)

    def custom(self) -> bool:
        """Whether this recipe takes its quantizers from the user."""
        return isinstance(self, CustomRecipe)


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with scales from a history of earlier amaxes; takes no ``backward_override``.

    The environment's override is ignored here rather than refused: it is set
    for a whole job, which may hold other recipes.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    backward_override: str | None = field(default=None, kw_only=True)

    accepts_backward_override: ClassVar[bool] = False
    accepted: ClassVar[dict[str, tuple[Any, ...]]] = {
        "fp8_format": FP8_FORMATS,
        "amax_compute_algo": ("max", "most_recent"),
    }


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale a tensor, from that tensor's own amax."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    accepted: ClassVar[dict[str, tuple[Any, ...]]] = {"fp8_format": FP8_FORMATS}


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """OCP MXFP8: 32 elements share a power-of-two scale."""

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    accepted: ClassVar[dict[str, tuple[Any, ...]]] = {"fp8_format": FP8_FORMATS}


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with fp32 scales for blocks of 1x128 (dim 1) or 128x128 (dim 2) elements.

    At most one of the three dims is 2: no GEMM multiplies two operands of
    128x128 blocks, and each of the three meets the other two.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    accepted: ClassVar[dict[str, tuple[Any, ...]]] = {
        "fp8_format": FP8_FORMATS,
        "x_block_scaling_dim": (1, 2),
        "w_block_scaling_dim": (1, 2),
        "grad_block_scaling_dim": (1, 2),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if dims.count(2) > 1:
            raise InputError(
                f"Float8BlockScaling got block scaling dims {dims} for inputs, weights and "
                "gradients; no GEMM multiplies two operands with 128x128 blocks, so at most one "
                "of them is 2."
            )


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: 16 E2M1 elements share an E4M3 scale, and the tensor an fp32 scale."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Quantizers from the user: ``qfactory(role)`` returns one for each role.

    Roles are ``"input"``, ``"weight"`` and ``"grad_output"``.
    """

    qfactory: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise InputTypeError(
                "CustomRecipe needs qfactory=, a function of the role ('input', 'weight' or "
                f"'grad_output') that returns a Quantizer; got {self.qfactory!r}."
            )
        try:
            hash(self.qfactory)
        except TypeError as error:
            raise InputError(
                f"CustomRecipe got the factory {self.qfactory!r}, which cannot be hashed; plans "
                "are cached by recipe, so a factory is a function or an object with a hash."
            ) from error
