"""Colwise, Rowwise and Replicated: styles of ``parallelize_module`` for ops and layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fuser.basic_ops import BasicLinear, Bias
from fuser.communication import Group, divided
from fuser.errors import InputError
from fuser.fused_ops import Linear
from fuser.modules import layers
from fuser.modules.layer import Layer
from fuser.op import BasicOperation
from fuser.op.module_calls import module_calls
from fuser.tensors import QuantizedTensor

LINEARS = "fuser.Linear, BasicLinear, fuser.modules.Linear"
KINDS = {
    "Colwise": f"{LINEARS}, LayerNormLinear, LayerNormMLP and Bias",
    "Rowwise": LINEARS,
    "Replicated": "basic ops such as norms and Bias",
}


class _Style:
    """Base of the styles: what ``parallelize_module`` calls, and the checks before it.

    It is registered as torch's ``ParallelStyle`` when the first one is made: importing that takes
    half a second.
    """

    taken: ClassVar[tuple[type, ...]]
    """The modules that the style is for."""
    src_data_rank: int | None = 0
    """As in torch's styles: the rank of the mesh whose values all get; None for each rank's own."""

    def __init__(self, *, sequence_parallel: bool) -> None:
        from torch.distributed.tensor.parallel import ParallelStyle

        ParallelStyle.register(_Style)
        self.is_sequence = sequence_parallel

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_parallel={self.is_sequence})"

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        name = type(self).__name__
        if device_mesh.ndim != 1:
            raise InputError(
                f"{name} got a mesh of {device_mesh.ndim} dimensions {device_mesh.mesh_dim_names}; "
                "it takes a mesh of one, such as mesh['tp']."
            )
        self._check(module)
        group, ranks = device_mesh.get_group(), device_mesh.size()
        for op in self._shard(module, group, ranks):
            for key, value in list(op._parameters.items()):
                if value is not None:
                    self._distribute(op, key, device_mesh)
        if isinstance(module, Layer):
            module._take_parameters_of_ops()
        module_calls.change()
        return module

    def _check(self, module: torch.nn.Module) -> None:
        """Refuse a module of another kind, or one that is sharded already."""
        name = type(self).__name__
        if not isinstance(module, self.taken):
            kind = type(module).__name__
            styles = [s for s in (Colwise, Rowwise, Replicated) if isinstance(module, s.taken)]
            if styles:
                hint = f"The style for {kind} is {' or '.join(s.__name__ for s in styles)}."
            else:
                hint = (
                    "Give parallelize_module a plan with a style for each of its ops or layers, by "
                    "their paths; torch's own styles are for modules of torch."
                )
            raise InputError(f"{name} takes {KINDS[name]}; got a {kind}. {hint}")
        if isinstance(module, Layer):
            module.hand_parameters_to_ops()
        for op in _basic_ops(module):
            if any(op.placement_of(key)[0] is not None for key in op._parameters):
                raise InputError(
                    f"{name} got a {type(module).__name__} that is tensor parallel already; it "
                    "takes one of whole parameters."
                )
            if op.accumulates_into_main_grad:
                raise InputError(
                    f"{name} got a {type(op).__name__} with accumulate_into_main_grad=True, which "
                    "a weight that is a DTensor does not have: leave that argument out, or shard "
                    "by tensor_parallel_mode, without DTensors."
                )
            for key, value in op._parameters.items():
                is_plain = isinstance(value, QuantizedTensor) or type(value) is torch.nn.Parameter
                if value is not None and not is_plain:
                    raise InputError(
                        f"{name} got {type(op).__name__}.{key} of shape {tuple(value.shape)} as a "
                        f"{type(value).__name__}; it takes plain and quantized parameters, before "
                        "gather_quantized and fully_shard."
                    )

    def _shard(self, module: Any, group: Group, ranks: int) -> list[BasicOperation]:
        """Shard the ops of ``module``; returns those whose parameters become DTensors."""
        raise NotImplementedError

    def _distribute(self, op: BasicOperation, name: str, mesh: Any) -> None:
        """Make the whole parameter ``name`` a ``DTensor``; a quantized one of quantized parts."""
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

        dim, _ = op.placement_of(name)
        placements = [Replicate() if dim is None else Shard(dim)]
        parameter = getattr(op, name)
        values = parameter.detach()
        if isinstance(parameter, QuantizedTensor):
            kept = parameter.get_high_precision_init_val()
            values = parameter.dequantize().detach() if kept is None else kept.to(parameter.device)
            values = values.to(parameter.dtype)
        distributed = distribute_tensor(values, mesh, placements, src_data_rank=self.src_data_rank)
        if isinstance(parameter, QuantizedTensor):
            part: Any = torch.nn.Parameter(distributed.to_local())
            if isinstance(op, BasicLinear):
                part = op.as_parameter(part)
            if not isinstance(part, QuantizedTensor):  # the user has set a quantized weight
                part = parameter._quantizer(part)
            distributed = DTensor.from_local(
                part.detach(),
                mesh,
                placements,
                run_check=False,
                shape=distributed.shape,
                stride=distributed.stride(),
            )
        setattr(op, name, torch.nn.Parameter(distributed, requires_grad=parameter.requires_grad))


class _LinearStyle(_Style):
    """Base of the styles of linears, with the arguments of torch's."""

    whole: ClassVar[str]
    """The side of the linear, ``"input"`` or ``"output"``, with all features on each rank."""
    parted: ClassVar[str]
    """The other side, of which each rank has some features."""

    def __init__(
        self,
        *,
        sequence_parallel: bool = False,
        input_layouts: object = None,
        output_layouts: object = None,
        use_local_output: bool = True,
    ) -> None:
        from torch.distributed.tensor import Replicate, Shard

        style, layouts = type(self).__name__, {"input": input_layouts, "output": output_layouts}
        whole, parted = layouts[self.whole], layouts[self.parted]
        has_shards = {None: sequence_parallel, Replicate(): False, Shard(0): True}
        if whole not in has_shards or (sequence_parallel and not has_shards[whole]):
            raise InputError(
                f"{style} got {self.whole}_layouts={whole} and "
                f"sequence_parallel={sequence_parallel}; the {self.whole} is Replicate(), or "
                "Shard(0) with sequence_parallel=True."
            )
        if parted not in (None, Shard(-1)):
            raise InputError(
                f"{style} got {self.parted}_layouts={parted}; the {self.parted} is Shard(-1)."
            )
        if not use_local_output:
            raise InputError(
                f"{style} got use_local_output=False; an op returns the tensor of this rank, and "
                "no DTensor."
                " Leave it out."
            )
        super().__init__(sequence_parallel=has_shards[whole])


class Colwise(_LinearStyle):
    """Give each rank of the mesh a part of the outputs of a linear.

    For ``fuser.Linear``, ``BasicLinear``, ``Bias``, ``fuser.modules.Linear`` and
    ``LayerNormLinear``, whose norm stays whole. Of a ``LayerNormMLP`` the first linear becomes
    column parallel and the second one row parallel. The module is sharded in place: weights and
    biases become DTensors with ``Shard(0)``, and the others with ``Replicate()``. All ranks
    have the same module before; values are those of the mesh's first rank, as in torch.

    Parameters
    ----------
    sequence_parallel
        Each rank has some rows, dimension 0, of the input, which are gathered. Of a
        ``LayerNormMLP`` also of the output.
    input_layouts, output_layouts, use_local_output
        As in torch's ``ColwiseParallel``: the input is ``Replicate()``, or ``Shard(0)`` with
        ``sequence_parallel``; the output is the local tensor of ``Shard(-1)``.

    Raises
    ------
    InputError
        On other layouts. When it is applied: on another kind of module, one that is sharded
        already, a mesh of several dimensions, or features that its ranks do not divide; the module
        is unchanged then.
    """

    whole, parted = "input", "output"
    taken = (
        *(Linear, BasicLinear, Bias),
        *(layers.Linear, layers.LayerNormLinear, layers.LayerNormMLP),
    )

    def _shard(self, module: Any, group: Group, ranks: int) -> list[BasicOperation]:
        if isinstance(module, Bias):
            if self.is_sequence:
                raise InputError(
                    "Colwise got sequence_parallel=True for a Bias, which gathers nothing; use "
                    "Colwise(), or Replicated(sequence_parallel=True), which leaves it whole."
                )
            module.shard(group)
            return [module]
        first, *others = _linears(module)
        if others:
            _check_gates(module, ranks)
            divided("LayerNormMLP's ffn_hidden_size", module.ffn_hidden_size, ranks)
        first.shard("column", group, self.is_sequence)
        for linear in others:
            linear.shard("row", group, self.is_sequence)
        if isinstance(module, (layers.LayerNormLinear, layers.LayerNormMLP)):
            module.ops[0].rows_are_sharded = self.is_sequence
        return _basic_ops(module)


class Rowwise(_LinearStyle):
    """Give each rank of the mesh a part of the inputs of a linear; the products are added.

    For ``fuser.Linear``, ``BasicLinear`` and ``fuser.modules.Linear``, in place as
    :class:`Colwise`: the weight becomes a ``DTensor`` with ``Shard(1)`` and the bias one with
    ``Replicate()``. A ``fuser.Linear`` gets another basic op, ``AllReduce`` or ``ReduceScatter``.

    Parameters
    ----------
    sequence_parallel
        Each rank gets some rows, dimension 0, of the output.
    input_layouts, output_layouts, use_local_output
        As in torch's ``RowwiseParallel``: the input is the local tensor of ``Shard(-1)``, the
        output ``Replicate()``, or ``Shard(0)`` with ``sequence_parallel``.

    Raises
    ------
    InputError
        If :class:`Colwise` would raise it.
    """

    whole, parted = "output", "input"
    taken = (Linear, BasicLinear, layers.Linear)

    def _shard(self, module: Any, group: Group, ranks: int) -> list[BasicOperation]:
        _linears(module)[0].shard("row", group, self.is_sequence)
        return _basic_ops(module)


class Replicated(_Style):
    """Make the parameters of an op DTensors that every rank of the mesh has as a whole.

    For ops that are not sharded, such as norms, beside sharded ones: then all parameters are
    DTensors, which torch's ``clip_grad_norm_`` and optimizers need.

    Parameters
    ----------
    sequence_parallel
        Each rank has some rows, dimension 0, of the input: gradients of the parameters are added
        over the mesh, in backward.

    Raises
    ------
    InputError
        If :class:`Colwise` would raise it.
    """

    taken = (BasicOperation,)

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__(sequence_parallel=sequence_parallel)

    def _shard(self, module: Any, group: Group, ranks: int) -> list[BasicOperation]:
        module.rows_are_sharded = self.is_sequence
        return [module]


# -- ops --------------------------------------------------------------------------------


def _basic_ops(module: Any) -> list[BasicOperation]:
    ops: Any = module.ops if isinstance(module, Layer) else (module,)
    return [member for op in ops for member in getattr(op, "members", (op,))]


def _linears(module: Any) -> list[Linear | BasicLinear]:
    ops: Any = module.ops if isinstance(module, Layer) else (module,)
    return [op for op in ops if isinstance(op, (Linear, BasicLinear))]


def _check_gates(mlp: Any, ranks: int) -> None:
    """Refuse a gated activation whose gates are the first half of the features."""
    function = mlp.ops[2].function
    if not function.is_gated or ranks == 1:
        return
    size, width = function.interleave, 2 * mlp.ffn_hidden_size
    if size is None or width % (2 * size * ranks):
        raise InputError(
            f"Colwise gives each of {ranks} ranks {width // ranks} consecutive ones of the {width} "
            f"outputs of a LayerNormMLP's first linear, and its activation {mlp.activation} has "
            f"glu_interleave_size={size}: a rank would not have the gates of its values. Make the "
            "layer with activation_params={'glu_interleave_size': size}, where gates and values "
            f"alternate in blocks of that many outputs, and {2 * ranks} times the size divides "
            f"{width}; or without DTensors, by set_parallel_mode=True."
        )
