"""Baselines: the ops of a pipeline in plain torch, as a script without fuser has them.

They run on meta tensors, forward and backward, so that nothing is computed; the calls that torch
makes have the modelled times of torch_calls.py. Groups of rows are taken to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fuser.basic_ops.activation import Activation, ScaledActivation
from fuser.basic_ops.basic_linear import BasicLinear
from fuser.basic_ops.grouped_linear import GroupedLinear
from fuser.basic_ops.lora_adapters import LoRAAdapters
from fuser.basic_ops.lora_linear import LoRAGroupedLinear, LoRALinear
from fuser.basic_ops.moe import MoeCombine, MoeDispatch
from fuser.basic_ops.normalization import AdaptiveLayerNorm, L2Normalization, LayerNorm, RMSNorm
from fuser.basic_ops.pointwise_ops import AddExtraInput, Bias, ConstantScale, Dropout
from fuser.basic_ops.quantize import Quantize
from fuser.basic_ops.views import Identity, MakeExtraOutput, Reshape
from fuser.op import BasicOperation
from fuser.plan.devices import Device
from fuser.plan.graph import OpGraph
from fuser.plan.plan import Baseline
from fuser.plan.torch_calls import TorchCall, TorchCalls, compiled_seconds, eager_seconds
from fuser.reference.activation import step_by_step
from fuser.specs import TensorSpec

Tensors = tuple[torch.Tensor, ...]

EAGER, COMPILED = "torch eager", "torch.compile"


def _linear(op: BasicLinear, x: torch.Tensor, extras: Tensors, params: Tensors) -> torch.Tensor:
    return F.linear(x, *params)


def _lora_linear(op: LoRALinear, x: torch.Tensor, extras: Tensors, params: Tensors) -> torch.Tensor:
    *frozen, a, b = params
    return _adapted(op, x, F.linear(x, *frozen), lambda x: F.linear(F.linear(x, a), b))


def _adapted(op: LoRAAdapters, x: torch.Tensor, y: torch.Tensor, product: Any) -> torch.Tensor:
    """``y`` with the adapters' ``product``."""
    if op.is_merged:
        return y
    added = product(F.dropout(x, op.dropout_probability, training=op.training))
    return torch.add(y, added, alpha=op.scale)


def _grouped_linear(op: Any, x: torch.Tensor, extras: Tensors, params: Tensors) -> torch.Tensor:
    weights, *biases = params
    y = _grouped(x, weights)
    return (y + biases[0][:, None] if biases else y).reshape(*x.shape[:-1], op.out_features)


def _lora_grouped_linear(
    op: LoRAGroupedLinear, x: torch.Tensor, extras: Tensors, params: Tensors
) -> torch.Tensor:
    *frozen, a, b = params

    def product(x: torch.Tensor) -> torch.Tensor:
        return _grouped(_grouped(x, a), b).reshape(*x.shape[:-1], op.out_features)

    return _adapted(op, x, _grouped_linear(op, x, extras, tuple(frozen)), product)


def _grouped(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Batched products of equal groups of rows with weights ``[G, N, K]``."""
    return torch.bmm(x.reshape(len(weights), -1, x.shape[-1]), weights.transpose(1, 2))


def _adaptive(op: Any, x: torch.Tensor, extras: Tensors, params: Tensors) -> torch.Tensor:
    gain, shift = (extra.expand(x.shape[-1]) if extra.dim() == 0 else extra for extra in extras)
    if gain.dim() != x.dim():  # [batch, features]
        sizes = [1] * (x.dim() - 1)
        sizes[op.batch_dim] = gain.shape[0]
        gain, shift = gain.view(*sizes, -1), shift.view(*sizes, -1)
    return F.layer_norm(x, (op.hidden_size,), eps=op.eps) * (1 + gain) + shift


def _dispatch(op: Any, x: torch.Tensor, extras: Tensors, params: Tensors) -> torch.Tensor:
    """Rows by an index; as many of each token."""
    places = torch.zeros(op._rows(extras[0]), dtype=torch.int64, device="meta")
    return x.reshape(-1, x.shape[-1]).index_select(0, places)


def _combine(op: MoeCombine, x: torch.Tensor, extras: Tensors, params: Tensors) -> torch.Tensor:
    places = torch.zeros(x.shape[0], dtype=torch.int64, device="meta")
    return x.new_zeros(extras[0].shape[0], x.shape[-1]).index_add(0, places, x)


# The main output, from the op, its main input, its extra inputs and its parameters.
PLAIN: dict[type[BasicOperation], Callable[[Any, torch.Tensor, Tensors, Tensors], torch.Tensor]] = {
    Activation: lambda op, x, extras, params: step_by_step(op.function, x),
    AdaptiveLayerNorm: _adaptive,
    AddExtraInput: lambda op, x, extras, params: x + extras[0],
    BasicLinear: _linear,
    Bias: lambda op, x, extras, params: x + params[0],
    ConstantScale: lambda op, x, extras, params: x * op.scale,
    Dropout: lambda op, x, extras, params: F.dropout(
        x, op.dropout_probability, training=op.training
    ),
    GroupedLinear: _grouped_linear,
    Identity: lambda op, x, extras, params: x,
    L2Normalization: lambda op, x, extras, params: F.normalize(x, dim=-1, eps=op.eps),
    LayerNorm: lambda op, x, extras, params: F.layer_norm(
        x, op.normalized_shape, params[0], params[1], op.eps
    ),
    LoRAGroupedLinear: _lora_grouped_linear,
    LoRALinear: _lora_linear,
    MakeExtraOutput: lambda op, x, extras, params: x,
    MoeCombine: _combine,
    MoeDispatch: _dispatch,
    Quantize: lambda op, x, extras, params: x,
    Reshape: lambda op, x, extras, params: x.reshape(op.shape),
    RMSNorm: lambda op, x, extras, params: F.rms_norm(x, op.normalized_shape, params[0], op.eps),
    ScaledActivation: lambda op, x, extras, params: (
        step_by_step(op.function, x) * extras[0].to(x.dtype).unsqueeze(-1)
    ),
}


def baselines_of(graph: OpGraph, device: Device) -> tuple[Baseline, ...]:
    """Plain torch, eager and compiled, on ``device``, for the rows of ``graph``.

    None for pipelines with ops that this table lacks, such as users' and those of several ranks.
    """
    written = [_plain(op) for op in graph.ops]
    if None in written or any(op.process_groups for op in graph.ops):
        return ()
    calls: dict[str, list[TorchCall]] = {"forward": [], "backward": []}
    mode = TorchCalls(calls["forward"].append)
    # No autocast changes meta tensors; it is in the dtypes of the graph.
    with torch.inference_mode(False), torch.enable_grad():
        run = _PlainRun(graph)
        with mode:
            outputs = run.forward()
        places = [place for output in outputs for place in mode._parts(output)]
        trained = [t for t in run.leaves if t.requires_grad]
        ends = [output for output in outputs if output.requires_grad]
        if graph.key.requires_grad and trained and ends:
            grads = [torch.empty_like(end) for end in ends]
            mode._listed = calls["backward"].append
            with mode:
                torch.autograd.grad(ends, trained, grads, allow_unused=True)
    eager = [eager_seconds(calls[side], device, side) for side in calls]
    compiled = compiled_seconds(calls["forward"], calls["backward"], places, device)
    return (
        Baseline(EAGER, eager[0] * 1e6, eager[1] * 1e6),
        Baseline(COMPILED, compiled[0] * 1e6, compiled[1] * 1e6),
    )


def _plain(op: BasicOperation) -> Any:
    return next((PLAIN[cls] for cls in type(op).__mro__ if cls in PLAIN), None)


class _PlainRun:
    """A forward of the ops of a graph in plain torch; ``leaves`` are its tensors from outside."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.leaves: list[torch.Tensor] = []
        key = graph.key
        self.x = self._leaf(graph.main_specs[0], key.ops[0].input_requires_grad)
        self.params = [self._params(i) for i in range(len(graph.ops))]
        self.given: dict[int, torch.Tensor] = {}
        for i, row in enumerate(graph.sources):
            for k, source in enumerate(row):
                if source.caller_index is not None and source.caller_index not in self.given:
                    needs_grad = key.ops[i].extra_inputs[k].requires_grad
                    spec = graph.extra_inputs[i][k]
                    self.given[source.caller_index] = self._leaf(spec, needs_grad)

    def _params(self, index: int) -> list[torch.Tensor]:
        """The parameters of an op; each kind of a grouped linear's is one tensor of all groups."""
        graph, op = self.graph, self.graph.ops[index]
        dtype, keys = graph.main_specs[index + 1].dtype, graph.key.ops[index].params
        shapes = [tuple(p.shape) for p in graph.params[index]]
        trained = [k.requires_grad for k in keys]
        if isinstance(op, GroupedLinear):
            rows = math.prod(graph.main_specs[index].shape[:-1])
            # Of one group if the rows cannot be divided.
            groups = op.num_groups if rows % op.num_groups == 0 else 1
            names = [name for name, p in op._parameters.items() if p is not None]
            kinds = [name.rstrip("0123456789") for name in names]
            of_kind = {kind: kinds.index(kind) for kind in kinds}
            trained = [
                any(w for w, other in zip(trained, kinds, strict=True) if other == kind)
                for kind in of_kind
            ]
            sizes = {kind: 1 if kind.startswith("bias") else 2 for kind in of_kind}
            shapes = [(groups, *shapes[i][-sizes[kind] :]) for kind, i in of_kind.items()]
        pairs = zip(shapes, trained, strict=True)
        return [self._leaf(TensorSpec(shape, dtype), needs_grad) for shape, needs_grad in pairs]

    def _leaf(self, spec: TensorSpec, requires_grad: bool) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self.leaves.append(tensor.requires_grad_(requires_grad and spec.dtype.is_floating_point))
        return tensor

    def forward(self) -> list[torch.Tensor]:
        """The main output, and the extra outputs for the caller."""
        graph, x = self.graph, self.x
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        ops: Sequence[BasicOperation] = graph.ops
        for i, op in enumerate(ops):
            extras = tuple(
                outputs[s.place] if s.caller_index is None else self.given[s.caller_index]
                for s in graph.sources[i]
            )
            params = tuple(self.params[i])
            dtype = graph.main_specs[i + 1].dtype
            # The linear before a bias has added it.
            if not (isinstance(op, Bias) and i and _plain(ops[i - 1]) is _linear):
                if params:
                    x = x.to(dtype)
                has_bias = i + 1 < len(ops) and isinstance(ops[i + 1], Bias)
                if has_bias and _plain(op) is _linear:
                    params += tuple(self.params[i + 1])
                x = _plain(op)(op, x, extras, params)
            for k, spec in enumerate(graph.extra_outputs[i]):
                outputs[i, k] = self._extra_output(op, x, extras, spec)
        return [x, *(outputs[place] for place in graph.returned)]

    def _extra_output(
        self, op: BasicOperation, x: torch.Tensor, extras: Tensors, spec: TensorSpec
    ) -> torch.Tensor:
        if isinstance(op, MakeExtraOutput):
            return x
        if isinstance(op, MoeDispatch) and spec.dtype.is_floating_point:
            places = torch.zeros(spec.shape, dtype=torch.int64, device="meta")
            return extras[1].flatten().index_select(0, places)
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
