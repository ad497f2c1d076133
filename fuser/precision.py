"""Which recipe is in force, the quantizers it stands for, and delayed scaling's state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch

from fuser.errors import InputError, InputTypeError
from fuser.formats import DType, NumberFormat
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fuser.reference import fp8_scaling
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
)

_active_recipe: ContextVar[Recipe | None] = ContextVar("fuser_recipe", default=None)
current_recipe = _active_recipe.get
"""The recipe of the innermost :class:`autocast`, or None outside one."""


def fp8_dtype(recipe_format: Format, role: str) -> DType:
    """The FP8 format of a tensor in that role: E5M2 for gradients under HYBRID."""
    if recipe_format is Format.HYBRID:
        return DType.kFloat8E5M2 if role == "grad_output" else DType.kFloat8E4M3
    return {Format.E4M3: DType.kFloat8E4M3, Format.E5M2: DType.kFloat8E5M2}[recipe_format]


@functools.lru_cache(maxsize=1024)
def make_quantizer(recipe: Recipe, role: str) -> Quantizer:
    """The quantizer that ``recipe`` means for an ``"input"``, ``"weight"`` or ``"grad_output"``."""
    if isinstance(recipe, Float8CurrentScaling):
        return Float8CurrentScalingQuantizer(
            fp8_dtype(recipe.fp8_format, role), force_pow_2_scales=recipe.use_power_2_scales
        )
    if isinstance(recipe, MXFP8BlockScaling):
        return MXFP8Quantizer(
            fp8_dtype(recipe.fp8_format, role),
            with_2d_quantization=recipe.enable_2d_quantization and role == "weight",
        )
    if isinstance(recipe, Float8BlockScaling):
        dims = {
            "input": recipe.x_block_scaling_dim,
            "weight": recipe.w_block_scaling_dim,
            "grad_output": recipe.grad_block_scaling_dim,
        }
        return Float8BlockQuantizer(
            fp8_dtype(recipe.fp8_format, role),
            force_pow_2_scales=not recipe.use_f32_scales,
            block_scaling_dim=dims[role],
        )
    if isinstance(recipe, NVFP4BlockScaling):
        return NVFP4Quantizer(
            with_2d_quantization=role == "weight" and not recipe.disable_2d_quantization,
            with_rht=role != "weight" and not recipe.disable_rht,
            stochastic_rounding=(role == "grad_output" and not recipe.disable_stochastic_rounding),
        )
    if isinstance(recipe, CustomRecipe) and recipe.qfactory is not None:
        quantizer = recipe.qfactory(role)
        if isinstance(quantizer, Quantizer):
            return quantizer
    raise InputError(f"{recipe} names no quantizer for the role {role!r}.")


@functools.lru_cache(maxsize=1024)
def role_format(recipe: Recipe, role: str) -> NumberFormat:
    """The format that ``recipe`` means for such a role."""
    if isinstance(recipe, DelayedScaling):
        return NumberFormat("FP8", fp8_dtype(recipe.fp8_format, role))
    return make_quantizer(recipe, role).format


class DelayedScales:
    """Delayed scaling's state for the tensors that one op quantizes on one side.

    ``scale`` fp32 [n] and ``amax_history`` fp32 [length, n], plain tensors;
    row 0 of the history collects the amax of the running step. ``mode`` is
    ``"forward"`` or ``"backward"``.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.scale = torch.empty(0)
        self.amax_history = torch.empty(0, 0)
        self._quantizers: list[Quantizer] = []
        self._recipe: DelayedScaling | None = None

    def quantizer(
        self, recipe: DelayedScaling, roles: Sequence[str], index: int, device: torch.device
    ) -> Quantizer:
        """The quantizer of tensor ``index``, which reads and writes this state on ``device``."""
        if recipe != self._recipe or device != self.scale.device:
            with torch.inference_mode(False):  # the state outlives an inference region
                self._prepare(recipe, roles, device)
        _pending[self.mode].setdefault(self, _active_group.get())
        return self._quantizers[index]

    def _prepare(self, recipe: DelayedScaling, roles: Sequence[str], device: torch.device) -> None:
        self._resize(recipe, len(roles))
        self.scale, self.amax_history = self.scale.to(device), self.amax_history.to(device)
        dtypes = [fp8_dtype(recipe.fp8_format, role) for role in roles]
        self._quantizers = [
            Float8Quantizer(self.scale[i : i + 1], self.amax_history[0, i : i + 1], dtype)
            for i, dtype in enumerate(dtypes)
        ]
        self._max = torch.tensor([dtype.max for dtype in dtypes], device=device)
        self._recipe = recipe

    def _resize(self, recipe: DelayedScaling, count: int) -> None:
        """Make the state, or keep as much of it as the history's new length holds."""
        if not self.scale.numel():
            self.scale = torch.ones(count)
            self.amax_history = torch.zeros(recipe.amax_history_len, count)
            return
        kept = self.amax_history[: recipe.amax_history_len]
        history = torch.zeros(recipe.amax_history_len, count)
        history[: len(kept)] = kept
        self.amax_history = history

    def packed(self) -> torch.Tensor:
        """The state as one fp32 tensor on the CPU: n, length, scales, history row by row."""
        length, count = self.amax_history.shape
        sizes = torch.tensor([count, length], dtype=torch.float32)
        return torch.cat([sizes, self.scale.cpu(), self.amax_history.flatten().cpu()])

    @classmethod
    def unpacked(cls, packed: torch.Tensor, mode: str) -> tuple[DelayedScales, torch.Tensor]:
        """The state at the head of what :meth:`packed` gave, and the rest."""
        state = cls(mode)
        count, length = (int(size) for size in packed[:2])
        start, stop = 2 + count, 2 + count + count * length
        state.scale = packed[2:start].clone()
        state.amax_history = packed[start:stop].view(length, count).clone()
        return state, packed[stop:]

    def __getstate__(self) -> dict[str, Any]:
        # Quantizers hold parts of the state; a copy makes its own at its first use.
        kept = {"mode": self.mode, "scale": self.scale, "amax_history": self.amax_history}
        return {**kept, "_quantizers": [], "_recipe": None}

    @property
    def newest(self) -> torch.Tensor | None:
        """The amaxes of the running step, [n], where they are reduced over ranks."""
        is_reduced = self._recipe is not None and self._recipe.reduce_amax
        return self.amax_history[0] if is_reduced else None

    def update(self) -> None:
        """After a step: roll the history, and set the scales from it."""
        assert self._recipe is not None
        fp8_scaling.update_delayed(
            self.amax_history,
            self.scale,
            self._max,
            margin=self._recipe.margin,
            algorithm=self._recipe.amax_compute_algo,
        )


# States whose quantizers were asked for since their last update, in that order, which is the same
# on every rank; with the process group that their amaxes are reduced over.
_pending: dict[str, dict[DelayedScales, Any]] = {"forward": {}, "backward": {}}


def update_delayed_scales(mode: str) -> None:
    """End a step of delayed scaling on one side: reduce the amaxes, roll, and set the scales."""
    states = list(_pending[mode].items())
    _pending[mode].clear()
    for group in {id(group): group for _, group in states}.values():
        newest = [state.newest for state, its_group in states if its_group is group]
        _max_over_ranks([amaxes for amaxes in newest if amaxes is not None], group)
    for state, _ in states:
        state.update()


def _max_over_ranks(amaxes: list[torch.Tensor], group: Any) -> None:
    """Replace each of the tensors by its maximum over the ranks of ``group``, in one reduction."""
    if not amaxes or not torch.distributed.is_initialized():
        return
    if torch.distributed.get_world_size(group) == 1:
        return
    flat = torch.cat(amaxes)
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group=group)
    for target, reduced in zip(amaxes, torch.split(flat, [t.numel() for t in amaxes]), strict=True):
        target.copy_(reduced)


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def claim_gradient_update() -> bool:
    """Whether the caller is the first to run forward in the outermost autocast.

    Its backward is the last one of the step, and ends the step for the
    gradients' scales.
    """
    region = _outermost.get()
    if region is None or region.is_claimed or is_in_backward():
        return False
    region.is_claimed = True
    return True


class _Region:
    """An outermost autocast, from its entry to its exit."""

    is_claimed = False


_outermost: ContextVar[_Region | None] = ContextVar("fuser_outermost", default=None)
_active_group: ContextVar[Any] = ContextVar("fuser_amax_group", default=None)


class autocast(contextlib.ContextDecorator):
    """Run pipelines quantized under ``recipe``: a context, or a decorator; nests and re-enters.

    Parameters
    ----------
    enabled
        Off where False, also inside another autocast.
    calibrating
        Accepted for compatibility.
    recipe
        ``DelayedScaling()`` if None.
    amax_reduction_group
        The ranks over which delayed scaling takes the maximum of its amaxes,
        once a step; None for all of them. Every rank of it must train then.

    Raises
    ------
    InputTypeError
        If ``recipe`` is none.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any | None = None,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise InputTypeError(
                f"autocast got the recipe {recipe!r}; it takes one of fuser.recipe's classes, "
                "such as MXFP8BlockScaling()."
            )
        self.calibrating = calibrating
        self.amax_reduction_group = amax_reduction_group
        self.recipe = (recipe or DelayedScaling()) if enabled else None
        self._tokens: list[list[tuple[ContextVar[Any], Token[Any]]]] = []

    def _recreate_cm(self) -> autocast:
        # As a decorator each call gets its own: two threads may be inside at once.
        return type(self)(
            self.recipe is not None, self.calibrating, self.recipe, self.amax_reduction_group
        )

    def __enter__(self) -> None:
        tokens: list[tuple[ContextVar[Any], Token[Any]]] = [
            (_active_recipe, _active_recipe.set(self.recipe)),
            (_active_group, _active_group.set(self.amax_reduction_group)),
        ]
        if _outermost.get() is None:
            tokens.append((_outermost, _outermost.set(_Region())))
        self._tokens.append(tokens)

    def __exit__(self, *exc_info: object) -> None:
        for variable, token in self._tokens.pop():
            variable.reset(token)
        # A step of forward ends here, but not in evaluation or in a recomputation.
        if _outermost.get() is None and torch.is_grad_enabled() and not is_in_backward():
            update_delayed_scales("forward")


@contextlib.contextmanager
def recomputing_under(recipe: Recipe) -> Iterator[None]:
    """The recipe of a forward, for its recomputation in a backward; ends no step."""
    token = _active_recipe.set(recipe)
    try:
        yield
    finally:
        _active_recipe.reset(token)


@dataclass(frozen=True)
class _ParameterInit:
    """What parameters made under :class:`quantized_model_init` become."""

    recipe: Recipe
    preserve_high_precision_init_val: bool


_parameter_init: ContextVar[_ParameterInit | None] = ContextVar("fuser_init", default=None)


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Make the weights of linears in the format of ``recipe``; their only copy is quantized.

    Parameters
    ----------
    enabled
        Off where False, also inside another region.
    recipe
        ``Float8CurrentScaling()`` if None. Delayed scaling has no scale for a
        weight before its first step, and is refused. Under a
        ``backward_override`` weights have their rowwise copy alone, which is
        all that such a backward reads; a later backward without the override
        quantizes the other copy from the weight's values at every step.
    preserve_high_precision_init_val
        Keep the initial values on the CPU, for an optimizer's master weights:
        ``weight.get_high_precision_init_val()`` gives them, and
        ``weight.clear_high_precision_init_val()`` frees them.

    Raises
    ------
    InputError
        If ``recipe`` is DelayedScaling.
    """
    recipe = recipe or Float8CurrentScaling()
    if enabled and isinstance(recipe, DelayedScaling):
        raise InputError(
            "quantized_model_init got DelayedScaling, which has no scale for a weight before its "
            "first step; use Float8CurrentScaling or a block-scaled recipe."
        )
    chosen = _ParameterInit(recipe, preserve_high_precision_init_val) if enabled else None
    token = _parameter_init.set(chosen)
    try:
        yield
    finally:
        _parameter_init.reset(token)


def initialised_weight(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """``weight``, or its quantized stand-in inside :func:`quantized_model_init`."""
    init = _parameter_init.get()
    if init is None:
        return weight
    quantizer = make_quantizer(init.recipe, "weight")
    # Under an override nothing reads the columnwise copy. Without one, it is made here: not every
    # format can make it from the other.
    needs_columnwise = init.recipe.backward_override is None
    quantizer = quantizer.with_usage(rowwise=True, columnwise=needs_columnwise)
    quantized = quantizer(weight.detach())
    parameter = torch.nn.Parameter(quantized, requires_grad=weight.requires_grad)
    if init.preserve_high_precision_init_val:
        assert isinstance(parameter, QuantizedTensor)
        parameter.set_high_precision_init_val(weight.detach().cpu().clone())
    return parameter
