"""Recipes: how pipelines are quantized, as frozen values compared by contents."""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast, get_args

from torch.compiler import is_dynamo_compiling

from fuser.errors import InputError, InputTypeError, explains_arguments, explains_names
from fuser.formats import BlockScalingDim, DType
from fuser.torch_private import constant_in_graphs

__all__ = [
    "AmaxAlgorithm",
    "BACKWARD_OVERRIDES",
    "BACKWARD_OVERRIDE_VARIABLE",
    "BackwardOverride",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NAMES",
    "NVFP4BlockScaling",
    "QParams",
    "QuantizerRole",
    "RECIPES",
    "Recipe",
    "recipe_named",
]
__dir__ = __all__.copy  # dir() shows public names alone

BackwardOverride = Literal["high_precision", "dequantized"]
BACKWARD_OVERRIDES: tuple[BackwardOverride, ...] = get_args(BackwardOverride)
BACKWARD_OVERRIDE_VARIABLE = "NVTE_BACKWARD_OVERRIDE"
AmaxAlgorithm = Literal["max", "most_recent"]
"""How delayed scaling computes an amax of its history."""
FourOverSixScope = Literal["none", "weights", "activations", "all"]
FourOverSixError = Literal["MAE", "MSE"]


class FormatRange(NamedTuple):
    """The largest finite value of a format, in forward and in backward."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """FP8 and FP4 number formats; HYBRID is E4M3 in forward and E5M2 in backward."""

    E2M1 = FormatRange(6, 6)
    E4M3 = FormatRange(448, 448)
    E5M2 = FormatRange(57344, 57344)
    HYBRID = FormatRange(448, 57344)


FP8_FORMATS = (Format.E4M3, Format.HYBRID)
"""The accepted formats of FP8 recipes: E5M2 in forward has too few mantissa bits to train."""


class _Made:
    """The values that were made in graphs, as attributes: Dynamo reads them as it reads globals."""


class _MadeInGraphs:
    """Dynamo makes values of such a class while it traces, without a trace of their code."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # and its ``__init__`` does nothing
            return getattr(_Made, _made(cls, args, tuple(kwargs.items())))
        return super().__new__(cls)


@constant_in_graphs
def _made(
    cls: type[object], args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]
) -> str:
    """The name of the value, the same one for equal values."""
    value = cls(*args, **dict(kwargs))
    text = f"{cls.__module__}.{value!r}"
    name = f"made_{hashlib.sha256(text.encode()).hexdigest()}"  # an attribute's name has no dots
    setattr(_Made, name, getattr(_Made, name, value))
    return name


def _check_values(settings: Any, accepted: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse values of fields that are not among those ``accepted``, and of flags all but two."""
    flags = {f.name: (True, False) for f in fields(settings) if f.type in ("bool", bool)}
    for name, values in {**flags, **accepted}.items():
        setting = getattr(settings, name)
        if setting not in values:
            listed = " or ".join(str(getattr(value, "name", repr(value))) for value in values)
            raise InputError(
                f"{type(settings).__name__} got {name} {getattr(setting, 'name', repr(setting))}; "
                f"it takes {listed}."
            )


def _changes(settings: Any) -> str:
    """The class, and the fields that differ from their defaults or do not follow from others."""
    changed = [
        f"{f.name}={getattr(value, 'name', repr(value))}"
        for f in fields(settings)
        if f.repr
        and (value := getattr(settings, f.name)) != (None if f.default is MISSING else f.default)
        and not getattr(value, "follows_recipe", False)
    ]
    return f"{type(settings).__name__}({', '.join(changed)})"


@dataclass(frozen=True)
class MMParams(_MadeInGraphs):
    """Options of one GEMM."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        _check_values(self, {})


@dataclass(frozen=True)
class QParams(_MadeInGraphs):
    """How the tensors of one role are quantized: inputs, weights or output gradients.

    Parameters
    ----------
    power_2_scale
        FP8 scales are powers of two.
    amax_epsilon
        Lower bound of the amax from which a scale is computed; finite and not negative.
    random_hadamard_transform, stochastic_rounding, fp4_2d_quantization
        For NVFP4: transform columnwise copies; round at random; one scale for
        each block of 16x16 elements.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False
    follows_recipe: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether the recipe made it from its other fields, and makes it again when they change."""

    def __post_init__(self) -> None:
        _check_values(self, {})
        if not 0 <= self.amax_epsilon < math.inf:
            raise InputError(
                f"QParams got amax_epsilon {self.amax_epsilon}; it must be finite and not negative."
            )

    def __repr__(self) -> str:
        return _changes(self)


FP8_PARAMS = ("power_2_scale", "amax_epsilon")
FP8_ROLES = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
NVFP4_PARAMS = ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization")
_BY_RECIPE: Any = None
"""The default of parameters that follow from other fields of the recipe, which fills them in."""


def _backward_override_from_environment() -> BackwardOverride | None:
    """The default of ``backward_override``; the only place that reads the variable."""
    value = os.environ.get(BACKWARD_OVERRIDE_VARIABLE) or None
    return cast("BackwardOverride | None", value)  # the recipe refuses another value


MOST_KEYS = 1024
_by_key: dict[str, Recipe] = {}


def recipe_of_key(key: str) -> Recipe:
    """One of the latest recipes with such contents.

    Raises KeyError if there is none, or it has functions of the user, as custom recipes.
    """
    return _by_key[key]


@dataclass(frozen=True)
class Recipe(_MadeInGraphs):
    """Base of all recipes.

    A recipe is a value: two recipes with the same contents are equal and share
    all cached plans. A change of any field gives a different plan key.

    Parameters
    ----------
    backward_override
        ``None`` (backward runs quantized), ``"high_precision"`` (backward uses
        the original unquantized operands) or ``"dequantized"`` (backward uses
        the dequantized operands of the forward). The default is read from the
        environment variable ``NVTE_BACKWARD_OVERRIDE`` when the recipe is built.
    fp8_dpa, fp8_mha
        Quantized attention; only False, because fuser has no attention.

    Raises
    ------
    InputError
        If ``backward_override`` has another value, or the recipe does not support
        it, or another field has a value that the recipe does not support.
    """

    backward_override: BackwardOverride | None = field(
        default_factory=_backward_override_from_environment, kw_only=True
    )
    # Only one value is accepted, so there is nothing to compare.
    fp8_dpa: bool = field(default=False, kw_only=True, repr=False, compare=False)
    fp8_mha: bool = field(default=False, kw_only=True, repr=False, compare=False)

    accepts_backward_override: ClassVar[bool] = True
    accepted: ClassVar[dict[str, tuple[object, ...]]] = {}
    """The accepted values of a field, for fields that do not accept every value of their type."""
    absent: ClassVar[dict[str, str]] = {}
    """The reason why a field accepts only its default, by field."""
    taken_params: ClassVar[tuple[str, ...]] = ()
    """The fields of QParams that the recipe's quantizers use."""

    _key: ClassVar[str] = ""
    """The contents as text, by which torch.compile compares recipes."""

    def __post_init__(self) -> None:
        self._refuse_absent()
        _check_values(self, self.accepted)
        self._complete_params()
        object.__setattr__(self, "_key", f"{type(self).__module__}.{self!r}")
        if not self.custom():
            while len(_by_key) >= MOST_KEYS:
                _by_key.pop(next(iter(_by_key)), None)
            _by_key[self._key] = self
        override = self.backward_override
        if override is None:
            return
        if override not in BACKWARD_OVERRIDES:
            raise InputError(
                f"backward_override of {type(self).__name__} is {override!r}; the accepted "
                f"values are {', '.join(map(repr, BACKWARD_OVERRIDES))} and None."
            )
        if not self.accepts_backward_override:
            accepting = (c.__name__ for c in Recipe.__subclasses__() if c.accepts_backward_override)
            raise InputError(
                f"{type(self).__name__} takes no backward_override (got {override!r}); "
                f"the recipes that accept one are {', '.join(accepting)}."
            )

    def _refuse_absent(self) -> None:
        attention = "attention is not quantized: it is torch's, in 16 bits"
        reasons = {"fp8_dpa": attention, "fp8_mha": attention, **self.absent}
        for name, reason in reasons.items():
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default:
                raise InputError(
                    f"{type(self).__name__} got {name}={value!r}; {reason}, so the only accepted "
                    f"value is {default!r}."
                )

    # -- parameters of the quantizers ------------------------------------------

    def default_params(self) -> dict[str, QParams]:
        """The parameters of each role's quantizer that follow from other fields, by field."""
        return {}

    def _complete_params(self) -> None:
        """Fill in the parameters that were not given; refuse those that no quantizer supports."""
        for name, default in self.default_params().items():
            params = getattr(self, name)
            if params is None:
                params = getattr(type(self), name)  # a subclass may define its own
            if params is None or params.follows_recipe:
                object.__setattr__(default, "follows_recipe", True)
                params = default
            for param in fields(QParams):
                is_taken = not param.compare or param.name in self.taken_params
                if not is_taken and getattr(params, param.name) != param.default:
                    raise InputError(
                        f"{type(self).__name__} got {name} with {param.name}="
                        f"{getattr(params, param.name)!r}; its quantizers have "
                        f"{' and '.join(self.taken_params)}."
                        " Leave the rest out."
                    )
            object.__setattr__(self, name, params)

    @property
    def quantizes_backward(self) -> bool:
        """Whether backward runs quantized, which it does without an override."""
        return self.backward_override is None

    def __str__(self) -> str:
        """The class, and the fields that differ from a recipe without arguments."""
        return _changes(self)

    @property
    def split_accumulators(self) -> tuple[bool, bool, bool]:
        """Whether the GEMMs of forward, dgrad and wgrad use split accumulators.

        With a split accumulator, partial sums are added to fp32 registers more often: slower and
        more accurate on Hopper. Recipes without a field for it use split accumulators in backward.
        """
        defaults = {"fprop": False, "dgrad": True, "wgrad": True}
        fprop, dgrad, wgrad = (
            getattr(self, f"fp8_gemm_{name}", MMParams(default)).use_split_accumulator
            for name, default in defaults.items()
        )
        return fprop, dgrad, wgrad

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is delayed scaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is FP8 current scaling."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether this is FP8 with one scale for each tensor, delayed or current."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8 block scaling."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is FP8 block scaling, in blocks of 128."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4 block scaling."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether this recipe takes its quantizers from the user."""
        return issubclass(cls, CustomRecipe)


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with scales from a history of earlier amaxes; has no ``backward_override``.

    The environment variable for the override is ignored here, not refused: it is
    set for a whole job, which may use other recipes too.

    ``override_linear_precision`` says of forward, dgrad and wgrad whether the product reads
    unquantized operands: ``(False, False, True)`` for exact weight gradients, or all False.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    reduce_amax: bool = True
    scaling_factor_compute_algo: Callable[..., Any] | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )
    backward_override: BackwardOverride | None = field(default=None, kw_only=True)
    override_linear_precision: tuple[bool, bool, bool] = field(
        default=(False, False, False), kw_only=True
    )

    accepts_backward_override: ClassVar[bool] = False
    absent: ClassVar[dict[str, str]] = {
        "scaling_factor_compute_algo": "scales are set by the one formula for all tensors at once",
    }
    accepted: ClassVar[dict[str, tuple[object, ...]]] = {
        "fp8_format": FP8_FORMATS,
        "amax_compute_algo": get_args(AmaxAlgorithm),
        "override_linear_precision": ((False, False, False), (False, False, True)),
    }

    def keeps_columns(self, role: str) -> bool:
        """Whether the weight gradient reads the values of tensors in that role, unquantized."""
        return self.override_linear_precision[2] and role != "weight"

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.amax_history_len
        if not isinstance(length, int) or length < 1:
            raise InputError(
                f"DelayedScaling got amax_history_len {length!r}; it is the number of steps whose "
                "amaxes are kept, 1 or more."
            )


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale for each tensor, from the tensor's own amax.

    ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight`` and ``fp8_quant_bwd_grad``
    are the :class:`QParams` of inputs, weights and output gradients. Their
    defaults follow from ``use_power_2_scales``.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_quant_fwd_inp: QParams = field(default=_BY_RECIPE, kw_only=True)
    fp8_quant_fwd_weight: QParams = field(default=_BY_RECIPE, kw_only=True)
    fp8_quant_bwd_grad: QParams = field(default=_BY_RECIPE, kw_only=True)

    accepted: ClassVar[dict[str, tuple[object, ...]]] = {"fp8_format": FP8_FORMATS}
    taken_params: ClassVar[tuple[str, ...]] = FP8_PARAMS

    def default_params(self) -> dict[str, QParams]:
        return dict.fromkeys(FP8_ROLES, QParams(power_2_scale=self.use_power_2_scales))


@dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """FP8 with one scale a row, from that row's own amax.

    A GEMM reads an operand row by row: rows of the tensor in one copy, its
    columns in the other, which is quantized apart. Rows need no exponent
    range of a whole tensor, so gradients are E4M3 too by default.
    ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight`` and ``fp8_quant_bwd_grad``
    are as in :class:`Float8CurrentScaling`.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_quant_fwd_inp: QParams = field(default=_BY_RECIPE, kw_only=True)
    fp8_quant_fwd_weight: QParams = field(default=_BY_RECIPE, kw_only=True)
    fp8_quant_bwd_grad: QParams = field(default=_BY_RECIPE, kw_only=True)

    accepted: ClassVar[dict[str, tuple[object, ...]]] = {"fp8_format": FP8_FORMATS}
    taken_params: ClassVar[tuple[str, ...]] = FP8_PARAMS

    def default_params(self) -> dict[str, QParams]:
        return dict.fromkeys(FP8_ROLES, QParams(power_2_scale=self.use_power_2_scales))


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """OCP MXFP8: blocks of 32 elements share a power-of-two scale."""

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    margin: int = field(default=0, kw_only=True, repr=False, compare=False)

    accepted: ClassVar[dict[str, tuple[object, ...]]] = {"fp8_format": FP8_FORMATS}
    absent: ClassVar[dict[str, str]] = {"margin": "scales of MXFP8 follow from amaxes alone"}


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with one fp32 scale for each block of 1x128 (dim 1) or 128x128 (dim 2) elements.

    At most one of the three dims is 2: no GEMM multiplies two operands of
    128x128 blocks, and each of the three is multiplied with the other two.
    ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight`` and ``fp8_quant_bwd_grad``
    are as in :class:`Float8CurrentScaling`. Their defaults follow from
    ``use_f32_scales``.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: BlockScalingDim = 1
    w_block_scaling_dim: BlockScalingDim = 2
    grad_block_scaling_dim: BlockScalingDim = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_quant_fwd_inp: QParams = field(default=_BY_RECIPE, kw_only=True)
    fp8_quant_fwd_weight: QParams = field(default=_BY_RECIPE, kw_only=True)
    fp8_quant_bwd_grad: QParams = field(default=_BY_RECIPE, kw_only=True)

    accepted: ClassVar[dict[str, tuple[object, ...]]] = {
        "fp8_format": FP8_FORMATS,
        "x_block_scaling_dim": get_args(BlockScalingDim),
        "w_block_scaling_dim": get_args(BlockScalingDim),
        "grad_block_scaling_dim": get_args(BlockScalingDim),
    }
    taken_params: ClassVar[tuple[str, ...]] = FP8_PARAMS

    def default_params(self) -> dict[str, QParams]:
        return dict.fromkeys(FP8_ROLES, QParams(power_2_scale=not self.use_f32_scales))

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
    """NVFP4: blocks of 16 E2M1 elements share an E4M3 scale, and the tensor has an fp32 scale.

    ``fp4_quant_fwd_inp``, ``fp4_quant_fwd_weight`` and ``fp4_quant_bwd_grad``
    are the :class:`QParams` of inputs, weights and output gradients. Their
    defaults follow from the three ``disable_`` fields.
    With ``row_scaled_activation`` inputs have one fp32 scale a row, in each copy;
    ``fp4_quant_fwd_inp`` then has no blocks of 16x16.
    With ``nvfp4_4over6`` the largest value of each block of ``"weights"``, of ``"activations"``,
    which are inputs, or of ``"all"`` of them is scaled to 6 or to 4, whichever has the smaller
    ``nvfp4_4over6_err_mode``: ``"MAE"``, the sum of absolute errors, or ``"MSE"``, of squares.
    Their largest block scale is 256 where ``nvfp4_4over6_e4m3_use_256`` says so, else 448. These
    tensors have neither a Hadamard transform nor rounding at random.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = field(default=False, kw_only=True)
    nvfp4_4over6: FourOverSixScope = field(default="none", kw_only=True)
    nvfp4_4over6_e4m3_use_256: FourOverSixScope = field(default="all", kw_only=True)
    nvfp4_4over6_err_mode: FourOverSixError = field(default="MAE", kw_only=True)
    fp4_format: Format = field(default=Format.E2M1, kw_only=True, repr=False, compare=False)
    fp8_format: Format = field(default=Format.E4M3, kw_only=True, repr=False, compare=False)
    fp4_quant_fwd_inp: QParams = field(default=_BY_RECIPE, kw_only=True)
    fp4_quant_fwd_weight: QParams = field(default=_BY_RECIPE, kw_only=True)
    fp4_quant_bwd_grad: QParams = field(default=_BY_RECIPE, kw_only=True)

    accepted: ClassVar[dict[str, tuple[object, ...]]] = {
        "nvfp4_4over6": get_args(FourOverSixScope),
        "nvfp4_4over6_e4m3_use_256": get_args(FourOverSixScope),
        "nvfp4_4over6_err_mode": get_args(FourOverSixError),
        "fp4_format": (Format.E2M1,),
        "fp8_format": (Format.E4M3,),
    }
    taken_params: ClassVar[tuple[str, ...]] = NVFP4_PARAMS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.row_scaled_activation and self.fp4_quant_fwd_inp.fp4_2d_quantization:
            raise InputError(
                "NVFP4BlockScaling got row_scaled_activation=True and fp4_quant_fwd_inp with "
                "fp4_2d_quantization=True; a row has no scale of its own if 16 of them share the "
                "scales of blocks. Leave one out."
            )
        roles = (("input", "fp4_quant_fwd_inp"), ("weight", "fp4_quant_fwd_weight"))
        for role, field_name in roles:
            params: QParams = getattr(self, field_name)
            options = ("random_hadamard_transform", "stochastic_rounding")
            refused = [name for name in options if getattr(params, name)]
            if refused and self.four_over_six(role):
                raise InputError(
                    f"NVFP4BlockScaling got nvfp4_4over6={self.nvfp4_4over6!r} and {field_name} "
                    f"with {refused[0]}=True; a block that chooses its scale by its error is "
                    "neither transformed nor rounded at random. Leave one out: disable_rht=True "
                    "does for inputs."
                )

    def four_over_six(self, role: str) -> dict[str, Any]:
        """The options of the quantizer of that role that differ from their defaults."""
        of_role = {"weight": ("weights", "all"), "input": ("activations", "all")}.get(role, ())
        if self.nvfp4_4over6 not in of_role:
            return {}
        return {
            "nvfp4_use_4over6": True,
            "nvfp4_e4m3_max": 256 if self.nvfp4_4over6_e4m3_use_256 in of_role else 448,
            "nvfp4_4over6_err_mode": self.nvfp4_4over6_err_mode,
        }

    def default_params(self) -> dict[str, QParams]:
        rht = not self.disable_rht
        return {
            "fp4_quant_fwd_inp": QParams(random_hadamard_transform=rht),
            "fp4_quant_fwd_weight": QParams(fp4_2d_quantization=not self.disable_2d_quantization),
            "fp4_quant_bwd_grad": QParams(
                random_hadamard_transform=rht,
                stochastic_rounding=not self.disable_stochastic_rounding,
            ),
        }


@dataclass(frozen=True, eq=False)
class QuantizerRole:
    """The argument of a :class:`CustomRecipe`'s factory: the tensor to make a quantizer for.

    Parameters
    ----------
    module_type
        The kind of op: ``"linear"``, or empty if it has none.
    tensor_type
        ``"input"``, ``"weight"`` or ``"grad_output"``. A role is equal to this
        string, and to another role with the same contents.
    name
        The op's own ``name``; empty if it has none.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.tensor_type == other
        if not isinstance(other, QuantizerRole):
            return NotImplemented
        mine = (self.module_type, self.tensor_type, self.name)
        return mine == (other.module_type, other.tensor_type, other.name)

    def __hash__(self) -> int:
        return hash(self.tensor_type)

    def __str__(self) -> str:
        return self.tensor_type


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Quantizers from the user: ``qfactory(role)`` returns one for a :class:`QuantizerRole`.

    It is called once for each quantizer of an op.
    """

    qfactory: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise InputTypeError(
                "CustomRecipe needs qfactory=, a function of the QuantizerRole (tensor_type "
                "'input', 'weight' or 'grad_output') that returns a Quantizer; got "
                f"{self.qfactory!r}."
            )
        try:
            hash(self.qfactory)
        except TypeError as error:
            raise InputError(
                f"CustomRecipe got the factory {self.qfactory!r}, which cannot be hashed; plans "
                "are cached by recipe, so a factory is a function or an object with a hash."
            ) from error


RECIPES = tuple(cls for cls in Recipe.__subclasses__() if cls is not CustomRecipe)
"""The recipes that need no function of the user's, in the order of this file."""


def name_of(recipe: type[Recipe]) -> str:
    """The short name of a class: ``current`` of ``Float8CurrentScaling``, or ``mxfp8``."""
    name = recipe.__name__.removesuffix("Scaling").removeprefix("Float8")
    return (name.removesuffix("Block") or name).lower()


def made_by_new(init: Callable[..., None]) -> Callable[..., None]:
    """``__init__`` of a recipe, which a graph leaves out: the value that it got is made already."""

    @functools.wraps(init)
    def once(self: object, *args: Any, **kwargs: Any) -> None:
        if not is_dynamo_compiling():
            init(self, *args, **kwargs)

    return once


for _cls in (MMParams, QParams, Recipe, *RECIPES, CustomRecipe):  # dataclass has made __init__
    type.__setattr__(_cls, "__init__", made_by_new(explains_arguments(_cls.__dict__["__init__"])))

if not TYPE_CHECKING:  # a type checker would accept every name of this module
    __getattr__ = explains_names(__name__)

NAMES: dict[str, type[Recipe]] = {name_of(cls): cls for cls in RECIPES}
"""The recipes by their short names, which commands and examples take."""


def recipe_named(name: str) -> Recipe:
    """The recipe of a short name or of the name of a class, with its defaults.

    Raises
    ------
    InputError
        If there is none of this name.
    """
    known = {**NAMES, **{cls.__name__: cls for cls in RECIPES}}
    if name not in known:
        raise InputError(f"There is no recipe {name!r}; there are {', '.join(known)}.")
    return known[name]()


# -- what a recipe says of one role -----------------------------------------------


def fp8_dtype(recipe_format: Format, role: str) -> DType:
    """The FP8 format of a tensor in that role: E5M2 for gradients under HYBRID."""
    if recipe_format is Format.HYBRID:
        return DType.kFloat8E5M2 if role == "grad_output" else DType.kFloat8E4M3
    return {Format.E4M3: DType.kFloat8E4M3, Format.E5M2: DType.kFloat8E5M2}[recipe_format]


def fp8_options(recipe: Any, role: str) -> dict[str, Any]:
    """The options of the quantizer of that role that all FP8 recipes with parameters have."""
    params = role_params(recipe, role)
    return {
        "fp8_dtype": fp8_dtype(recipe.fp8_format, role),
        "force_pow_2_scales": params.power_2_scale,
        "amax_epsilon": params.amax_epsilon,
    }


def role_params(recipe: Recipe, role: str, prefix: str = "fp8") -> QParams:
    """The parameters of the quantizer of that role; ``prefix`` begins the recipe's fields."""
    names = {"input": "fwd_inp", "weight": "fwd_weight", "grad_output": "bwd_grad"}
    params: QParams = getattr(recipe, f"{prefix}_quant_{names[role]}")
    return params
