"""Plans of any module: its forward runs on fake tensors, and plans each pipeline that it calls.

Nothing is computed and the model is not touched: parameters stay where they are and no hook is set.
A pipeline answers the call with fake outputs. What other modules call of torch is listed, each call
for the innermost module on the Python stack.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from fuser.doors import OBSERVER, Observer
from fuser.errors import FuserError, InputError, InputTypeError
from fuser.op.structure import REFUSED, structure_of
from fuser.plan.devices import Device, device_named, device_of
from fuser.plan.graph import OpGraph
from fuser.plan.model import ModelPart, ModelPlan, StepMemory, TorchModule, grouped
from fuser.plan.plain_torch import COMPILED, EAGER, baselines_of
from fuser.plan.plan import PIPELINE_INPUT, Baseline, FusionPlan
from fuser.plan.registered import RegisteredFusions
from fuser.plan.saved_inputs import Limit, budget
from fuser.plan.torch_calls import (
    ATTENTION,
    ATTENTION_BACKWARD,
    TorchCall,
    TorchCalls,
    compiled_seconds,
)
from fuser.precision.contexts import current_recipe
from fuser.runtime.pipeline import OperationFuser
from fuser.specs import PlanKey
from fuser.torch_private import (
    FakeTensorMode,
    calling_module,
    outside_fake_mode,
    pytree,
    raising_module,
    storage_of,
    without_logs_of_fake_tensors,
)

Observe = Callable[[Any, Any, tuple[Any, ...]], Any]
"""``observe(pipeline, input, extra_inputs)`` returns what the call returns."""

_lock = threading.Lock()


class _PlanObserver(threading.local):
    observe: Observe | None = None


_observer = _PlanObserver()


def observer() -> Observe | None:
    """What every call of a pipeline on this thread is given to, in place of running; or None."""
    return _observer.observe


class ModelObserver(Observer):
    """Calls are observed while a context of this process is open; plans have baselines."""

    calls = None
    count = 0
    """The open contexts."""

    @classmethod
    def add(cls, contexts: int) -> None:
        """Count more contexts, or fewer."""
        with _lock:
            cls.count += contexts
            cls.calls = staticmethod(observer) if cls.count else None

    def costs(
        self,
        graph: OpGraph,
        plan: FusionPlan,
        key_under: Callable[[Limit], PlanKey],
        registered: RegisteredFusions,
        target: Device | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        fields = super().costs(graph, plan, key_under, registered, target, **others)
        return fields if target is None else {**fields, "baselines": baselines_of(graph, target)}


OBSERVER.open(ModelObserver())


@contextlib.contextmanager
def observing(observe: Observe) -> Iterator[None]:
    """Context in which pipelines do not run on this thread: ``observe`` answers their calls."""
    ModelObserver.add(1)
    outer, _observer.observe = _observer.observe, observe
    try:
        yield
    finally:
        _observer.observe = outer
        ModelObserver.add(-1)


def plan(
    model: torch.nn.Module,
    *inputs: Any,
    training: bool = True,
    device: str | None = None,
    **keywords: Any,
) -> ModelPlan:
    """What a call ``model(*inputs, **keywords)`` runs; nothing is computed, nothing is changed.

    Pipelines of fuser are planned as ``Sequential.plan`` does, anywhere in any module, and all
    others are boxes with their calls of torch. Model and inputs may be on the meta device.

    Parameters
    ----------
    training
        Whether to plan backward too. False plans as under ``torch.no_grad``.
    device
        A GPU that need not be here: ``"h200"``, ``"h100"``, ``"a100"``, ``"b200"`` or
        ``"rtx5090"``. Without it, that of the parameters.

    Raises
    ------
    InputTypeError
        If ``model`` is not a module.
    InputError
        If there is no such device, or the forward raises, as one that reads values of tensors does.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputTypeError(f"fuser.plan plans a torch.nn.Module; got {model!r:.60}.")
    target = None if device is None else device_named(device)
    return _ObservedForward(model, training, target).plan(inputs, keywords)


class _ListedCall(NamedTuple):
    """A call of a module that lists its calls of torch; the frame tells it from another call."""

    frame: FrameType | None
    module: int
    calls: list[TorchCall]


class _ObservedForward:
    """One forward of ``model`` on fake tensors."""

    def __init__(self, model: torch.nn.Module, training: bool, target: Device | None) -> None:
        self.model = model
        self.training = training
        self.elsewhere = target
        self.tensors = (*model.parameters(), *model.buffers())
        self.place = next((tensor.device for tensor in self.tensors), torch.device("cpu"))
        self.target = target or device_of(self.place.type)
        self.paths: dict[int, str] = {}
        self.modules: dict[int, torch.nn.Module] = {}
        for path, module in model.named_modules():
            self.paths[id(module)] = path
            self.modules[id(module)] = module
        self.made: list[_ListedCall | ModelPart] = []
        self.known: dict[Any, FusionPlan] = {}
        self.calls = TorchCalls(self._listed)
        # What backward reads of forward: memory of the model's own tensors, and of pipelines.
        self.held: dict[int, torch.UntypedStorage] = {}
        self.kept_inside = 0.0

    def plan(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> ModelPlan:
        """The plan of a call with these arguments."""
        name = type(self.model).__name__
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self.training))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(observing(self._pipeline))
            stack.enter_context(fakes)
            stack.enter_context(self.place)
            inputs, keywords = pytree.tree_map_only(
                torch.Tensor, lambda tensor: _empty(tensor, self.place), (inputs, dict(keywords))
            )
            fake_tensors = [fakes.from_tensor(tensor) for tensor in self.tensors]
            hooks = saved_tensors_hooks(self._holds, _same)
            try:
                with self.calls, hooks, without_logs_of_fake_tensors():
                    self.model(*inputs, **keywords)
            except FuserError:
                raise
            except Exception as error:
                raise InputError(
                    f"{name} cannot be planned with these inputs: {self._raising(error)}, on "
                    "tensors without values, raised "
                    f"{type(error).__name__}: {str(error).splitlines()[0]:.300}"
                ) from error
        return ModelPlan(
            name,
            tuple(
                f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                for tensor in pytree.tree_leaves((inputs, keywords))
                if isinstance(tensor, torch.Tensor)
            ),
            sum(parameter.numel() for parameter in self.model.parameters()),
            self.training,
            self.target,
            grouped(
                part if isinstance(part, ModelPart) else self._box(part)
                for part in self.made
                if isinstance(part, ModelPart) or part.calls
            ),
            self._memory(fake_tensors) if self.training else StepMemory(),
        )

    # -- memory -----------------------------------------------------------------

    def _holds(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd saves for backward."""
        if not self.calls.is_inside:
            self.held[storage_of(tensor)] = tensor.untyped_storage()
        return tensor

    def _keeps(self, plan: FusionPlan, x: torch.Tensor) -> None:
        """Note what a pipeline keeps for backward; several may keep one input."""
        for kept in plan.kept:
            nbytes = kept.nbytes + kept.bytes_per_token * plan.nominal_tokens
            if kept.reason == PIPELINE_INPUT and nbytes == x.nbytes:
                self._holds(x)
            else:
                self.kept_inside += nbytes

    def _memory(self, fakes: Sequence[torch.Tensor]) -> StepMemory:
        """The memory of a step; ``fakes`` are like the parameters and buffers."""
        of_model = {storage_of(tensor) for tensor in (*self.tensors, *fakes)}
        kept = sum(memory.nbytes() for key, memory in self.held.items() if key not in of_model)
        parameters = list(self.model.parameters())
        return StepMemory(
            sum(p.nbytes for p in parameters),
            sum(p.nbytes for p in parameters if p.requires_grad),
            kept + self.kept_inside,
        )

    def _raising(self, error: BaseException) -> str:
        """The forward that raised, of the innermost module."""
        module = raising_module(error, [key for key, path in self.paths.items() if path])
        if module is None:
            return "its forward"
        return f"the forward of {self.paths[module]}, a {type(self.modules[module]).__name__}"

    # -- pipelines --------------------------------------------------------------

    def _pipeline(
        self, pipeline: OperationFuser, x: torch.Tensor, extras: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Plan a pipeline that the forward calls; its outputs, on fake tensors."""
        _, module = calling_module(self.paths)
        # Plain torch runs beside the plan on meta tensors; what that saves does not count.
        with outside_fake_mode(), saved_tensors_hooks(_same, _same):
            inputs = [_empty(tensor, "meta") for tensor in (x, *extras)]
            plan = self._planned(pipeline, inputs)
            outputs = pipeline.outputs_like(*inputs)
        self._keeps(plan, x)
        name = type(self.modules[module]).__name__ if module else type(self.model).__name__
        self.made.append(ModelPart((self.paths.get(module, ""),), name, plan))
        fakes = tuple(_empty(output, x.device) for output in outputs)
        return fakes if len(fakes) > 1 else fakes[0]

    def _planned(self, pipeline: OperationFuser, inputs: list[torch.Tensor]) -> FusionPlan:
        """The plan; of layers that are alike it is made once."""
        structures = tuple(map(structure_of, pipeline.basic_ops))
        tensors = [*inputs, *(p for op in pipeline.basic_ops for p in op._parameters.values())]
        key = (
            structures,
            tuple(pipeline.sources),
            pipeline.fusions,
            tuple(
                None if t is None else (type(t), tuple(t.shape), t.dtype, t.requires_grad)
                for t in tensors
            ),
            current_recipe(),
            budget.limit,
            torch.is_grad_enabled(),
            *(
                (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in ("cuda", "cpu")
            ),
        )
        is_known = not any(structure.startswith(REFUSED) for structure in structures)
        plan = self.known.get(key) if is_known else None
        if plan is None:
            plan = pipeline.plan_on(self.elsewhere, *inputs, training=torch.is_grad_enabled())
            if is_known:
                self.known[key] = plan
        return plan

    # -- other modules ----------------------------------------------------------

    def _listed(self, call: TorchCall) -> None:
        if call.name == ATTENTION and call.has_backward:  # as FlashAttention, whatever runs here
            for number, _ in (*call.reads, *call.writes):
                self.held[number] = self.calls.storages[number]
        frame, module = calling_module(self.paths)
        for listed in reversed(self.made):
            if (
                isinstance(listed, _ListedCall)
                and listed.frame is frame
                and listed.module == module
            ):
                listed.calls.append(call)
                return
        self.made.append(_ListedCall(frame, module, [call]))

    def _sides(self, call: TorchCall) -> float:
        return 1 + _times(call) * self.training

    def _box(self, caller: _ListedCall) -> ModelPart:
        """The box of a module's own calls. Backward is twice forward, of attention 2.5 times."""
        calls, device = caller.calls, self.target
        forward = sum(call.seconds(device, "forward") for call in calls)
        backward, compiled_backward = 0.0, 0.0
        fused, _ = compiled_seconds(calls, (), _last(calls), device)
        if self.training:
            recorded = [call for call in calls if call.has_backward]
            products = [call for call in recorded if call.is_product]
            backward = sum(_backward(call, device) for call in recorded)
            of_products = sum(_backward(call, device) for call in products)
            alone = sum(call.seconds(device, "forward") for call in products)
            again, _ = compiled_seconds(recorded, (), _last(recorded), device)
            compiled_backward = of_products + 2 * (again - alone)
        path = self.paths.get(caller.module, "")
        module = self.modules.get(caller.module, self.model)
        box = TorchModule(
            sum(call.flops * self._sides(call) for call in calls),
            sum(call.nbytes * self._sides(call) for call in calls),
            tuple(Counter(call.name for call in calls).items()),
            Baseline(EAGER, forward * 1e6, backward * 1e6),
            Baseline(COMPILED, fused * 1e6, compiled_backward * 1e6),
        )
        return ModelPart((path,), type(module).__name__, box)


def _times(call: TorchCall) -> float:
    """How many times the work of forward backward has."""
    if not call.has_backward:
        return 0.0
    return ATTENTION_BACKWARD if call.name == ATTENTION else 2.0


def _backward(call: TorchCall, device: Device) -> float:
    return _times(call) * call.seconds(device, "backward")


def _last(calls: list[TorchCall]) -> list[tuple[int, int]]:
    """What the last call writes: the output of a module."""
    return list(calls[-1].writes) if calls else []


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _empty(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return like.requires_grad_(tensor.requires_grad)
