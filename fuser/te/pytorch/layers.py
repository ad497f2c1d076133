"""The layers of ``transformer_engine.pytorch``: those of ``fuser.modules``, with what programs
for Transformer Engine pass them and read from them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fuser import basic_ops, modules
from fuser.basic_ops.collectives import CollectiveOperation
from fuser.communication import GroupArgument, group_size
from fuser.errors import FuserWarning, InputError
from fuser.modules.layer import InitMethod, Layer
from fuser.te.pytorch import grouped_state
from fuser.te.pytorch.positions import also_by_position

__all__ = [
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerEngineBaseModule",
    "get_dummy_wgrad",
]

Shape = Iterable[int] | int

DEFAULT_STD = 0.023
"""The standard deviation of a weight without an ``init_method``, as in Transformer Engine."""


class TransformerEngineBaseModule(Layer):
    """What the layers here share, and what a program may ask ``isinstance`` of."""

    fp8 = False
    fp8_calibration = False
    adds_bias = False
    """Whether the layer adds its bias itself, behind its pipeline."""
    save_original_input = False
    """Accepted, no effect: ``backward_override`` of the recipe says what is kept."""
    tp_size: int
    tp_group: GroupArgument = None

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """What programs read of the state of FP8, which is in the ops here: nothing is in it."""
        return {"fp8_checkpoint": False, "recipe": None}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Accepted, no effect: the state of a recipe is made when it is used."""

    def _adapt(self, arguments: dict[str, Any]) -> None:
        """Make the layer of ``fuser.modules`` by the arguments of Transformer Engine's.

        Sets what programs read of both, and a bias that this layer returns or adds itself.
        """
        given: dict[str, Any] = {**arguments, **arguments["options"]}
        for name in ("self", "options", "__class__"):
            given.pop(name, None)
        mode, bias = given.get("parallel_mode"), given["bias"]
        taken = self._taken(given)
        ranks, returns_bias = taken.get("tp_size", 1), taken.pop("return_bias") and bias
        # After the sum over ranks, so that a rank with a part of the rows has the gradient of
        # these, as trainers expect that add the gradients of all ranks.
        adds_bias = bias and not returns_bias and mode == "row" and ranks > 1
        taken["bias"] = bias and not returns_bias and not adds_bias
        super().__init__(**taken)
        if given.get("normalization") == "RMSNorm":
            self.layer_norm_bias = None
        self.use_bias, self.return_bias, self.adds_bias = bias, returns_bias, adds_bias
        self.tp_size, self.tp_group = ranks, taken.get("tp_group")
        self.sequence_parallel = taken.get("sequence_parallel", False)
        self.fuse_wgrad_accumulation = bool(
            given.get("fuse_wgrad_accumulation") or given.get("accumulate_into_main_grad")
        )
        self.delay_wgrad_compute = bool(given.get("delay_wgrad_compute", False))
        self.ub_name = given.get("ub_name")
        _zero_biases(self)

    def _taken(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the layer of ``fuser.modules`` takes: without what changes no result."""
        layer, taken = type(self).__name__, dict(given)
        overlaps = tuple(name for name in taken if name.startswith("ub_") and taken[name])
        for name in [name for name in taken if name.startswith("ub_")]:
            del taken[name]
        switches = tuple(name for name in overlaps if name != "ub_name")
        if switches:
            _warn_of_overlap(layer, switches)
        for name in {"init_method", "output_layer_init_method"} & taken.keys():
            taken[name] = taken[name] or _normal
        taken.pop("save_original_input", None)
        if not taken.get("fuse_wgrad_accumulation"):  # it has a second name, which may be on
            taken.pop("fuse_wgrad_accumulation", None)
        if taken.get("parallel_mode") not in (None, "column", "row"):
            raise InputError(
                f"{layer} got parallel_mode={taken['parallel_mode']!r}; give 'column', 'row' or "
                "None."
            )
        tracker = taken.pop("get_rng_state_tracker", None)
        name = taken.pop("rng_tracker_name", None)
        if tracker is not None:
            taken["get_rng_state_tracker"] = _NamedTracker(tracker, name) if name else tracker
        group, size = taken.pop("tp_group", None), taken.pop("tp_size", 1)
        ranks = 1 if taken.get("parallel_mode") is None else ranks_of(layer, size, group)
        if ranks == 1:  # nothing to gather or add, whatever the program's settings are
            taken.pop("sequence_parallel", None)
            if "parallel_mode" in taken:  # with a mode and no group it would be that of all ranks
                taken["parallel_mode"] = None
            return taken
        return {**taken, "tp_size": ranks, "tp_group": group}

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """The output ``[..., out_features]``; with ``return_bias`` also the bias."""
        output = super().forward(inp, is_first_microbatch, fp8_output, fp8_grad)
        bias: Any = getattr(self, "bias", None)
        if self.return_bias:
            # A view: a reentrant checkpoint would make a parameter that it returns its own output.
            return output, bias.view_as(bias)
        return output + bias if self.adds_bias else output

    def set_tensor_parallel_group(self, tp_group: GroupArgument) -> None:
        """Name the group of ranks after construction, as programs do that make it later.

        Raises
        ------
        InputError
            If its size is not that with which the layer was made.
        """
        name = type(self).__name__
        ranks = 1 if tp_group is None else group_size(name, tp_group)
        if ranks != self.tp_size:
            raise InputError(
                f"{name}.set_tensor_parallel_group got a group of {ranks} ranks, and the layer has "
                f"the features of one of {self.tp_size}: give such a group."
            )
        self.tp_group = tp_group
        if ranks > 1:
            for op in (op for _, op in self._basic_ops()):
                if isinstance(op, basic_ops.BasicLinear):
                    op.tensor_parallel_group = tp_group
                elif isinstance(op, CollectiveOperation):
                    op.process_group = tp_group

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters again; with ``defer_init`` nothing is done."""
        if not defer_init:
            super().reset_parameters()
            _zero_biases(self)

    def need_backward_dw(self) -> bool:
        """Whether :meth:`backward_dw` has weight gradients left to compute."""
        return bool(getattr(self, "delay_wgrad_compute", False))

    def backward_dw(self) -> None:
        """Compute the weight gradients that were left; a layer without such ones does nothing."""
        compute = getattr(super(), "backward_dw", None)
        if compute is not None:
            compute()


class _NamedTracker:
    """A tracker of random states whose ``fork()`` is that of one name."""

    def __init__(self, tracker: Callable[[], Any], name: str) -> None:
        self._tracker, self._name = tracker, name

    def __call__(self) -> _NamedTracker:
        return self

    def fork(self) -> Any:
        return self._tracker().fork(self._name)


def _normal(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=DEFAULT_STD)


@functools.cache
def _warn_of_overlap(layer: str, names: tuple[str, ...]) -> None:
    warnings.warn(
        f"{layer} ignores {', '.join(names)}: communication is not overlapped with GEMMs here. "
        "Results are the same; leave the arguments out.",
        FuserWarning,
        stacklevel=2,
    )


def ranks_of(layer: str, size: int, group: GroupArgument) -> int:
    """The ranks of a layer: of its group, or as the program says if it gives none."""
    return size if group is None else group_size(layer, group)


def _mark(parameter: torch.nn.Parameter | None, dim: int | None, ranks: int) -> None:
    """Set the attributes by which Megatron-LM knows the part of a parameter that a rank has."""
    if parameter is None:
        return
    is_part = dim is not None and ranks > 1
    parameter.tensor_model_parallel = is_part  # type: ignore[attr-defined]
    parameter.partition_dim = dim if is_part else -1  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]


class Linear(TransformerEngineBaseModule, modules.Linear):
    """``y = x @ weight.T + bias``: :class:`fuser.modules.Linear` for programs of te.Linear.

    ``return_bias=True`` returns ``(x @ weight.T, bias)``: the caller adds the bias. A bias
    begins with zeros, and a weight without an ``init_method`` with normal values of
    deviation 0.023. Arguments for userbuffers are ignored, with a warning if they are on.
    """

    @also_by_position(
        "parameters_split device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad "
        "ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type "
        "save_original_input name"
    )
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: GroupArgument = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Any = None,
        **options: Any,
    ) -> None:
        self._adapt(locals())
        _finish(self, self.ops[0].members[0], parallel_mode)


class LayerNormLinear(TransformerEngineBaseModule, modules.LayerNormLinear):
    """A norm and a linear: :class:`fuser.modules.LayerNormLinear`, with the additions of Linear."""

    @also_by_position(
        "return_layernorm_output return_layernorm_output_gathered parameters_split "
        "zero_centered_gamma device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad "
        "ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute symmetric_ar_type name"
    )
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: GroupArgument = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: Any = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Any = None,
        *,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        self._adapt(locals())
        _finish(self, self.ops[1].members[0], parallel_mode)


class LayerNormMLP(TransformerEngineBaseModule, modules.LayerNormMLP):
    """A feed-forward block: :class:`fuser.modules.LayerNormMLP`, with the additions of Linear."""

    @also_by_position(
        "get_rng_state_tracker tp_group tp_size init_method bias normalization activation "
        "activation_params output_layer_init_method fuse_wgrad_accumulation params_dtype "
        "return_layernorm_output return_layernorm_output_gathered seq_length "
        "micro_batch_size set_parallel_mode zero_centered_gamma device ub_overlap_ag name "
        "ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute "
        "symmetric_ar_type checkpoint"
    )
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        *,
        bias: bool = True,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        **options: Any,
    ) -> None:
        if return_bias:
            raise InputError(
                "LayerNormMLP got return_bias=True; its second bias is added inside of the "
                "pipeline. Leave the argument out, and do not add the bias."
            )
        self._adapt(locals())
        self.tp_group = options.get("tp_group")
        for name, dim in {
            "fc1_weight": 0,
            "fc2_weight": 1,
            "fc1_bias": 0,
            "fc2_bias": None,
        }.items():
            _mark(self._parameters[name], dim, self.tp_size)

    def _taken(self, given: dict[str, Any]) -> dict[str, Any]:
        mode = "column" if given.get("set_parallel_mode") else None
        taken = super()._taken({**given, "parallel_mode": mode})
        del taken["parallel_mode"]
        if "tp_size" not in taken:
            taken.pop("set_parallel_mode", None)
        return taken


class GroupedLinear(TransformerEngineBaseModule, modules.GroupedLinear):
    """A linear for each group: :class:`fuser.modules.GroupedLinear`, with the additions of Linear.

    ``return_bias=True`` returns the biases beside the output, a list of one for each group.
    """

    @also_by_position(
        "device ub_overlap_rs ub_overlap_ag ub_name delay_wgrad_compute save_original_input name"
    )
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: GroupArgument = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Any = None,
        **options: Any,
    ) -> None:
        self._adapt(locals())
        self.parallel_mode = None
        self.single_grouped_weight = bool(options.get("single_grouped_weight", False))
        self.single_grouped_bias = bool(options.get("single_grouped_bias", False))
        self._fp8_meta: dict[str, Any] = {"recipe": None}
        if self.return_bias:
            weight = next(self.parameters())
            zeros = functools.partial(torch.zeros, device=weight.device, dtype=weight.dtype)
            shapes: dict[str, tuple[int, ...]] = {
                f"bias{i}": (out_features,) for i in range(num_gemms)
            }
            if self.single_grouped_bias:
                shapes = {"bias": (num_gemms, out_features)}
            for name, shape in shapes.items():
                self.register_parameter(name, torch.nn.Parameter(zeros(shape)))

    def _taken(self, given: dict[str, Any]) -> dict[str, Any]:
        taken = super()._taken(given)
        if "tp_size" in taken:
            raise InputError(
                f"GroupedLinear got {taken['tp_size']} ranks; its features are not sharded over "
                "ranks here. Give each rank whole experts: expert parallelism."
            )
        for name in ("parallel_mode", "use_grouped_tensor"):
            taken.pop(name, None)
        return taken

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Whether the layer has a state of delayed scaling, and a recipe with the length of its
        histories; programs that load a state write the recipe before."""
        state = self.get_extra_state()
        self._fp8_meta["fp8_checkpoint"] = bool(state.numel())
        if state.numel():
            self._fp8_meta["recipe"] = grouped_state.recipe_of(state)
        return self._fp8_meta

    def get_extra_state(self) -> torch.Tensor:
        """Delayed scaling's state as :mod:`fuser.te.pytorch.grouped_state` writes it.

        An empty uint8 tensor if there is none.
        """
        state = super().get_extra_state()
        return grouped_state.pickled_state(state[1:], self.num_gemms) if state.numel() else state

    def set_extra_state(self, state: Any) -> None:
        """Load such a state, or that of :class:`fuser.modules.GroupedLinear`.

        Raises
        ------
        InputError
            If it is that of another number of groups.
        """
        if isinstance(state, torch.Tensor) and state.numel() and state.dtype is torch.uint8:
            plain = grouped_state.plain_state(state, self.num_gemms)
            if plain is None:
                return
            state = torch.cat([torch.tensor([float(plain.numel())], device="cpu"), plain])
        super().set_extra_state(state)

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """The output ``[..., out_features]``; with ``return_bias`` also the biases."""
        output = modules.GroupedLinear.forward(self, inp, m_splits, is_first_microbatch)
        if not self.return_bias:
            return output
        if self.single_grouped_bias:
            return output, list(self.get_parameter("bias").unbind())
        return output, [getattr(self, f"bias{i}") for i in range(self.num_gemms)]


def _finish(layer: Any, linear: basic_ops.BasicLinear, mode: Any) -> None:
    """Set what programs read of a layer of one linear, and its own bias."""
    layer.in_features, layer.out_features = linear.local_in_features, linear.local_out_features
    layer.parallel_mode, ranks = mode, layer.tp_size
    weight = layer.weight
    if layer.return_bias or layer.adds_bias:
        zeros = torch.zeros(layer.out_features, device=weight.device, dtype=weight.dtype)
        layer.bias = torch.nn.Parameter(zeros)
    _mark(weight, {"column": 0, "row": 1}.get(mode or ""), ranks)
    _mark(layer.bias, 0 if mode == "column" else None, ranks)
    if mode == "row" and ranks > 1 and layer.sequence_parallel and layer.bias is not None:
        layer.bias.sequence_parallel = True


def _zero_biases(layer: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name and not parameter.is_meta:
                parameter.zero_()


class _Norm:
    """The constructor of both norms, before that of the op."""

    def __init__(
        self,
        normalized_shape: Shape | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        shape: Any = hidden_size if normalized_shape is None else normalized_shape
        if shape is None or (normalized_shape is not None and hidden_size is not None):
            raise InputError(
                f"{type(self).__name__} got normalized_shape={normalized_shape} and "
                f"hidden_size={hidden_size}; it takes one of them."
            )
        super().__init__(  # type: ignore[call-arg]
            shape,
            eps=eps,
            dtype=params_dtype or dtype,
            zero_centered_gamma=zero_centered_gamma,
            **options,
        )
        if sequence_parallel is not None:
            for parameter in self.parameters():  # type: ignore[attr-defined]
                parameter.sequence_parallel = sequence_parallel


class LayerNorm(_Norm, basic_ops.LayerNorm):
    """A LayerNorm as te.LayerNorm: also by ``hidden_size`` and ``params_dtype``.

    ``sequence_parallel`` is set on the parameters, whose gradients a trainer adds over ranks.
    """


class RMSNorm(_Norm, basic_ops.RMSNorm):
    """An RMSNorm as te.RMSNorm: see :class:`LayerNorm`."""


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """A gradient of the shape of a weight whose gradient was added to ``main_grad``.

    Its values are not read; with ``zero`` they are 0.
    """
    make = torch.zeros if zero else torch.empty
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return make(tuple(shape), dtype=dtype, device=device, requires_grad=False)
