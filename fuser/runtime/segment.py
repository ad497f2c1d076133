"""Segment of a container: a pipeline, or a module that is called between pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fuser.errors import StateError
from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.plan.graph import Source
from fuser.plan.plan import FusionPlan, ModuleCall
from fuser.runtime.pipeline import OperationFuser
from fuser.torch_private import has_global_hooks, hooks_of

Keywords = Mapping[torch.nn.Module, Mapping[str, Any]]
"""The caller's keyword arguments, by op."""
Place = tuple[int, int]
"""An extra output: the index of its op, and its index among that op's extra outputs."""
Planned = tuple[list[FusionPlan | ModuleCall], tuple[torch.Tensor, ...]]
"""Plans, with the modules called between them; meta tensors like main and extra outputs."""

NO_OP = "it is not an op of fuser"
OWN_FORWARD = "it has its own forward"


class Segment:
    """A module that is not an op: it takes the main input and returns the main output.

    ``reason`` is why it is called as a module. ``last_reads`` are the extra outputs of earlier
    segments that no segment after this one reads.
    """

    def __init__(
        self,
        module: Any,
        reason: str,
        inputs: Sequence[Source] = (),
        outputs: Sequence[Place] = (),
    ) -> None:
        self.module = module
        self.reason = reason
        self.last_reads: list[Place] = []
        self._inputs = inputs
        self._outputs = outputs

    @property
    def inputs(self) -> Sequence[Source]:
        """The source of each extra input of a call."""
        return self._inputs

    @property
    def outputs(self) -> Sequence[Place | None]:
        """The extra outputs that a call returns; None for those that only the caller receives."""
        return self._outputs

    def call(self, x: Any, taken: Sequence[torch.Tensor], keywords: Keywords | None) -> Any:
        """Run on the main input and the extra inputs."""
        return self.module(x)

    def taken_apart(self, result: Any, count: int) -> tuple[Any, ...]:
        """The main output and the ``count`` extra outputs of a call.

        Refuses a result whose form a hook, or the module's own ``forward``, has changed.
        """
        if isinstance(result, tuple) and len(result) == 1 + count:
            return result
        form = type(result).__name__
        if isinstance(result, tuple):
            form += f" of {len(result)}"
        raise StateError(
            f"A call of {type(self.module).__name__} returns a tuple of {1 + count}, the output "
            f"and its extra outputs; its hooks, or its own forward, made it a {form}."
        )

    def pipelines(self) -> Iterator[OperationFuser]:
        """The pipelines of this segment."""
        yield from ()

    def planned(
        self,
        x: torch.Tensor,
        taken: Sequence[torch.Tensor],
        training: bool,
        device: str | None = None,
    ) -> Planned:
        """The plans of this segment, and meta tensors like its outputs."""
        call = ModuleCall(type(self.module).__name__, self.reason)
        return [call], _outputs_like(self.module, x, taken)


class PipelineSegment(Segment):
    """A pipeline of consecutive ops."""

    def __init__(
        self, pipeline: OperationFuser, inputs: Sequence[Source], outputs: Sequence[Place]
    ) -> None:
        super().__init__(pipeline, "", inputs, outputs)
        self.pipeline = pipeline

    def call(self, x: Any, taken: Sequence[torch.Tensor], keywords: Keywords | None) -> Any:
        return self.pipeline.run(x, tuple(taken), keyword_rows(self.pipeline, keywords))

    def pipelines(self) -> Iterator[OperationFuser]:
        yield self.pipeline

    def planned(
        self,
        x: torch.Tensor,
        taken: Sequence[torch.Tensor],
        training: bool,
        device: str | None = None,
    ) -> Planned:
        plan = self.pipeline.plan(x, *taken, training=training, device=device)
        return [plan], self.pipeline.outputs_like(x, *taken)


class OpSegment(Segment):
    """An op that is called as a module."""

    def call(self, x: Any, taken: Sequence[torch.Tensor], keywords: Keywords | None) -> Any:
        rows = [keywords.get(op, {}) for op in basic_ops_of(self.module)] if keywords else []
        if not any(rows):
            return self.module(x, *taken)
        if isinstance(self.module, FusedOperation):
            return self.module(x, *taken, basic_op_kwargs=rows)
        return self.module(x, *taken, **rows[0])

    def pipelines(self) -> Iterator[OperationFuser]:
        if isinstance(self.module, FusedOperation):
            yield from self.module._own_segments().pipelines()
        else:
            yield self.module._own_pipeline()

    def planned(
        self,
        x: torch.Tensor,
        taken: Sequence[torch.Tensor],
        training: bool,
        device: str | None = None,
    ) -> Planned:
        if isinstance(self.module, FusedOperation):
            segments = self.module._own_segments()
            parts, outputs = segments.planned(x, taken, training=training, device=device)
        else:
            pipeline = self.module._own_pipeline()
            parts = [pipeline.plan(x, *taken, training=training, device=device)]
            outputs = pipeline.outputs_like(x, *taken)
        if self.reason == OWN_FORWARD:
            outputs = _outputs_like(self.module, x, taken)
        ops = tuple(range(len(basic_ops_of(self.module))))
        return [ModuleCall(type(self.module).__name__, self.reason, ops), *parts], outputs


class NestedSegment(Segment):
    """A nested Sequential: its extra tensors are the caller's, its channels are its own."""

    @property
    def segments(self) -> Any:
        """The current segments of the container, which may have been edited or have new hooks."""
        return self.module._current_segments()

    @property
    def inputs(self) -> Sequence[Source]:
        return [Source(k) for k in range(self.segments.num_extra_inputs)]

    @property
    def outputs(self) -> Sequence[Place | None]:
        return [None] * self.segments.num_extra_outputs

    def call(self, x: Any, taken: Sequence[torch.Tensor], keywords: Keywords | None) -> Any:
        if keywords:
            own = {op for _, op in self.segments.named_ops()}
            keywords = {op: given for op, given in keywords.items() if op in own}
        return self.module(x, *taken, **({"op_kwargs": keywords} if keywords else {}))


def why_called(op: FusibleOperation) -> str | None:
    """The reason why ``op`` must be called as a module, outside of pipelines; or None."""
    if any(hooks_of(op)):
        return "it has hooks"
    if has_global_hooks():
        return "torch has hooks for every module"
    cls = type(op)
    forward = op.__dict__.get("forward")
    if (
        cls.forward not in (BasicOperation.forward, FusedOperation.forward)
        or cls.__call__ is not torch.nn.Module.__call__
        or (forward is not None and getattr(forward, "__func__", None) is not cls.forward)
    ):
        return OWN_FORWARD
    return None


def basic_ops_of(unit: Any) -> tuple[BasicOperation, ...]:
    """The basic ops that a module is, or that it replaces."""
    if isinstance(unit, FusedOperation):
        return unit.members
    return (unit,) if isinstance(unit, BasicOperation) else ()


def keyword_rows(pipeline: OperationFuser, keywords: Keywords | None) -> list[Any] | None:
    """The keyword arguments of each basic op of ``pipeline``."""
    return None if keywords is None else [keywords.get(op, {}) for op in pipeline.basic_ops]


def _outputs_like(
    module: torch.nn.Module, x: torch.Tensor, extra_inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Meta tensors like the outputs of ``module``, which runs on the meta device for this."""
    state = {
        name: tensor.to("meta")
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    inputs = tuple(tensor.to("meta") for tensor in (x, *extra_inputs))
    outputs = torch.func.functional_call(module, state, inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)
