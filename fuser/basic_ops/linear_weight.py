"""The weight of a linear: its first values, the part of this rank, and its quantized copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from fuser.basic_ops.kept_weight import KeepsWeights
from fuser.basic_ops.linear_operands import bind
from fuser.communication import (
    Agreement,
    GroupArgument,
    GroupRef,
    divided,
    group_size,
    is_distributed,
)
from fuser.doors import PARAMETERS
from fuser.errors import InputError
from fuser.op import (
    ParallelMode,
    cast,
    check_parallel_mode,
    default_device,
    default_dtype,
    fill_weight,
)
from fuser.precision.contexts import (
    ParameterInit,
    current_parameter_init,
    initialised_weight,
    weight_quantizer,
)
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import DelayedScaling
from fuser.tensors import QuantizedTensor, Quantizer


class InitialisedWeights(KeepsWeights):
    """An op whose weights are initialised: ``weight``, or ``weight0``, ``weight1`` and so on."""

    _names: Mapping[str, tuple[str, ...]] = {"weight": ("weight",)}
    """Names of the parameters by kind: one, which is the kind, or one of each group."""
    _init: ParameterInit | None
    """The options of ``quantized_model_init``, under which the op was made."""
    _rng_state_tracker_function: Callable[[], Any] | None

    def _register(self, kind: str, buffer: torch.Tensor) -> None:
        """Register the parameters of a kind over ``buffer``, or over each ``buffer[g]``."""
        parts = [buffer] if self._is_one(kind) else buffer
        for name, part in zip(self._names[kind], parts, strict=True):
            self.register_parameter(name, Parameter(part))

    def _is_one(self, kind: str) -> bool:
        """Whether there is one parameter of a kind, for all groups if there are any."""
        return self._names[kind] == (kind,)

    def _parts(self, kind: str) -> list[Any]:
        """The parameters of a kind: those of each group, or the one that there is."""
        parameters = self._parameters  # without torch's lookup of an attribute, 0.5 us for each
        return [parameters[n] if n in parameters else getattr(self, n) for n in self._names[kind]]

    def _reset(self, names: Iterable[str]) -> None:
        """Initialise weights as torch.nn.Linear does, and other parameters with zeros."""
        tracker = self._rng_state_tracker_function
        with tracker().fork() if tracker is not None else contextlib.nullcontext():
            for name in names:
                is_weight = name.startswith(("weight", "lora_A"))
                self.initialise(name, fill_weight if is_weight else torch.nn.init.zeros_)

    def initialise(self, name: str, fill: Callable[[torch.Tensor], Any]) -> None:
        """As for other ops; a weight, or its shard on this rank, is quantized after that."""
        weight = fresh = getattr(self, name)
        if not name.startswith("weight"):
            super().initialise(name, fill)
            return
        if is_distributed(weight):
            quantizer = None
            if self._init is not None:
                quantizer = self._parameter_quantizer(name, weight.device)
                quantizer = weight_quantizer(self._init, quantizer)
            PARAMETERS.guest.initialise(self, name, fill, quantizer)
            return
        if weight.is_meta or isinstance(weight, QuantizedTensor):
            device = default_device(None) if weight.is_meta else weight.device
            data = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            fresh = Parameter(data, requires_grad=weight.requires_grad)
        fill(fresh)
        fresh = self.as_parameter(fresh, name)
        if fresh is not weight:
            self.renew(name, fresh)

    def as_parameter(self, weight: Parameter, name: str = "weight") -> Parameter:
        """``weight``; quantized if the op was made under ``quantized_model_init``."""
        if self._init is None or not name.startswith("weight"):
            return weight
        quantizer = self._parameter_quantizer(name, weight.device)
        return initialised_weight(weight, self._init, quantizer)

    def _parameter_quantizer(self, name: str, device: torch.device) -> Quantizer:
        """The quantizer of a weight that is a quantized parameter on ``device``."""
        assert self._init is not None
        recipe = self._init.recipe
        if not isinstance(recipe, DelayedScaling):
            return make_quantizer(recipe, "weight")
        state, dtypes, device = self._delayed_state("forward", recipe, device)
        state.prepare(recipe, dtypes, device)
        group = int(name.removeprefix("weight") or 0)
        quantizer = state.parameter_quantizer(2 * group + 1)  # after the input of its group
        assert quantizer is not None
        return quantizer

    def bound(self, weights: Sequence[Any]) -> Sequence[Any]:
        """The weights, with the scales of this op's state under delayed scaling."""
        state = self._delayed.get("forward")
        if state is not None and self._init is not None:
            for group, weight in enumerate(weights):
                bind(weight, state, 2 * group + 1)
        return weights


class LinearWeight(InitialisedWeights):
    """An op with a weight ``[local_out_features, local_in_features]``, the part of this rank."""

    parameter_names: Sequence[str] = ("weight",)
    weight: torch.nn.Parameter
    in_features: int
    out_features: int
    local_in_features: int
    local_out_features: int
    _sharded_dim: int | None = None  # the dimension of the weight of which this rank has a part
    _product_ranks = 1  # the ranks whose products a later op adds

    def _make_weight(
        self,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        rng_state_tracker_function: Callable[[], Any] | None,
    ) -> None:
        self._rng_state_tracker_function = rng_state_tracker_function
        self._init = current_parameter_init()
        options: dict[str, Any] = {"device": default_device(device), "dtype": default_dtype(dtype)}
        size = (self.local_out_features, self.local_in_features)
        self._register("weight", torch.empty(size, **options))
        if not self.weight.is_meta:
            self.reset_parameters()

    # -- the part of this rank ------------------------------------------------

    def shard(
        self,
        mode: ParallelMode | None,
        group: GroupArgument = None,
        sequence_parallel: bool = False,
    ) -> None:
        """Shard an op of whole features over ``group``; the caller replaces the weight.

        The arguments are ``tensor_parallel_mode``, ``tensor_parallel_group`` and
        ``sequence_parallel`` of the constructor. Raises InputError, StateError as the constructor;
        nothing has changed then.
        """
        check_parallel_mode("BasicLinear", mode, sequence_parallel)
        ranks = group_size("BasicLinear", group) if mode is not None else 1
        name = "out_features" if mode == "column" else "in_features"
        size = divided(f"BasicLinear's {name}", getattr(self, name), ranks)
        setattr(self, f"local_{name}", size)
        self.tensor_parallel_mode = mode
        self.sequence_parallel = sequence_parallel
        self.tensor_parallel_size = ranks
        self._group = GroupRef(group)
        self._agreement = Agreement()
        self._parallel: Any | None = None  # what a linear of several ranks does otherwise
        if mode is not None and ranks > 1:
            self._parallel = PARAMETERS.guest.parallelism(mode, ranks, sequence_parallel)
            self._sharded_dim = 0 if mode == "column" else 1

    def note_products(self, group: GroupArgument) -> None:
        """Say that the op's features are those of this rank, and a later op adds the products."""
        self._group = GroupRef(group)
        self._sharded_dim = 1
        self._product_ranks = group_size("BasicLinear", group)

    @property
    def mode_and_ranks(self) -> tuple[ParallelMode, int] | None:
        """``"column"`` or ``"row"``, and how many ranks share the linear; None if none do.

        Also if a later op adds the products.
        """
        if self._parallel is not None:
            return self._parallel.mode, self._parallel.ranks
        return None if self._sharded_dim is None else ("row", self._product_ranks)

    @property
    def whole_in_features(self) -> int:
        """``in_features`` of all ranks together, also if a later op adds the products."""
        return self.in_features * self._product_ranks

    def placement_of(self, name: str) -> tuple[int | None, Any]:
        dim = self._sharded_dim
        return (None, None) if dim is None else (dim, self._group.group)

    @property
    def tensor_parallel_group(self) -> Any | None:
        """The argument of the constructor; it may be set to another group of the same size."""
        return self._group.group

    @tensor_parallel_group.setter
    def tensor_parallel_group(self, group: GroupArgument) -> None:
        ranks = group_size("BasicLinear", group) if self._parallel is not None else 1
        if ranks != self.tensor_parallel_size:
            raise InputError(
                f"BasicLinear is sharded over {self.tensor_parallel_size} ranks, and a group of "
                f"{ranks} cannot run it."
                " Make the op with that group."
            )
        self._group = GroupRef(group)

    # -- first values ---------------------------------------------------------

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight as torch.nn.Linear does; a weight on meta is allocated first.

        Of a weight that ``fully_shard`` has sharded, every rank initialises its shard; all ranks
        call this.
        """
        self._reset(("weight",))

    # -- quantized copies -----------------------------------------------------

    def _quantized_weight(
        self,
        weight: torch.Tensor,
        dtype: torch.dtype,
        quantizer: Quantizer,
        is_first_microbatch: bool | None,
    ) -> QuantizedTensor:
        """The quantized weight; see :mod:`kept_weight` for a caller that counts microbatches."""
        if isinstance(weight, QuantizedTensor):
            self.bound([weight])
            return weight
        if is_first_microbatch is None:
            return quantizer(cast(weight, dtype))
        return self.kept_weights(
            [weight],
            dtype,
            [quantizer],
            is_first_microbatch,
            lambda: quantizer(cast(weight, dtype)),
            lambda kept: kept._has("columnwise") or not quantizer.columnwise,
        )


def parallel_text(linears: Sequence[LinearWeight]) -> str:
    """For a repr: ``", column and row parallel over 2 ranks"`` of two linears, else empty."""
    shared = [pair for linear in linears if (pair := linear.mode_and_ranks) is not None]
    if not shared:
        return ""
    return f", {' and '.join(mode for mode, _ in shared)} parallel over {shared[0][1]} ranks"
