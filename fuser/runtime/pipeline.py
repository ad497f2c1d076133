"""OperationFuser: a pipeline of ops, planned once for each call key and then only run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from fuser.cuda.launch import kernel_refusal
from fuser.doors import OBSERVER, PARAMETERS, PASSES
from fuser.errors import InputError, InputTypeError, StateError
from fuser.formats import NumberFormat
from fuser.fused_ops.catalog import FUSIONS
from fuser.gemm.matmul import architecture
from fuser.op import BasicOperation, FusedOperation, FusibleOperation, autocast_dtype
from fuser.op.optimizer_steps import count_optimizer_steps
from fuser.plan.devices import Device, device_named, device_of
from fuser.plan.graph import (
    OpGraph,
    Source,
    extra_input_sources,
    returned_outputs,
    with_quantized_outputs,
)
from fuser.plan.plan import FusionPlan, Note
from fuser.plan.planner import features_of, make_plan
from fuser.plan.registered import FusionFunction, RegisteredFusions, check_has_methods
from fuser.plan.saved_inputs import Limit, budget, many_rows
from fuser.plan.window import check_window
from fuser.precision import contexts
from fuser.precision.availability import warn_if_emulated
from fuser.precision.contexts import current_recipe, recomputing_under
from fuser.precision.recomputation import (
    is_in_checkpoint,
    state_of_forward,
    warn_if_unquantized_in_backward,
)
from fuser.runtime.call_key import CallKeyReader
from fuser.runtime.checks import Checks
from fuser.runtime.executor import CompiledPlan
from fuser.runtime.known_parameters import LayoutOfCall
from fuser.specs import OpKey, PlanKey, QuantSpec, TensorKey, TensorSpec
from fuser.tensors import QuantizedTensor
from fuser.torch_private import breaks_graph

_registered = RegisteredFusions()

# A recipe with a new closure at every step would plan at every step: the oldest plans are
# dropped if there are more.
MAX_PLANS = 256
# The fields of a plan's key that say where a call runs.
_PLACE = ("autocast_dtype", "device", "arch", "no_kernels", "is_elsewhere")

Output = torch.Tensor | tuple[torch.Tensor, ...]


class OperationFuser:
    """A pipeline of basic ops that is planned once for each plan key and then only run.

    Parameters
    ----------
    ops
        The operations in order; fused ones count as the basic ops that they hold.
    fusions
        The fusion classes that the planner may use.
    open_channels
        Channels with an end outside: the pipeline returns an extra output that is
        bound to such a channel, and takes an extra input whose producer is outside
        from its caller.

    Raises
    ------
    InputError
        If a channel has two producers, one after its reader, or none and is not open.
    """

    def __init__(
        self,
        ops: Iterable[FusibleOperation],
        fusions: Sequence[type[FusedOperation]] = FUSIONS,
        *,
        open_channels: Collection[str] = (),
    ) -> None:
        count_optimizer_steps()
        self.fusions = checked_fusions(fusions)
        basic_ops: list[BasicOperation] = []
        for op in ops:
            members = op.basic_ops if isinstance(op, FusedOperation) else (op,)
            for member in members:
                if not isinstance(member, BasicOperation):
                    raise InputTypeError(
                        f"A pipeline is made of fuser's operations; got {type(member).__name__}."
                    )
                basic_ops.append(member)
        self.basic_ops = tuple(basic_ops)
        self.places: Sequence[str] = tuple(f"op {i}" for i in range(len(basic_ops)))
        """Where each op is, for messages; a container names its module too."""
        # Plans bind methods of the ops; an op's implementation may be replaced later.
        self.implementations = tuple(op.implementation() for op in basic_ops)
        self.open_channels = frozenset(open_channels)
        self.sources = extra_input_sources(self.basic_ops, self.open_channels)
        self.returned = returned_outputs(self.basic_ops, self.open_channels)
        self.checks = Checks(self.basic_ops, self.sources)
        self.num_extra_inputs = self.checks.num_extra_inputs
        self.equal_extras = _equal_extras(basic_ops, self.sources)
        self.planned_count = 0
        self._plans: dict[PlanKey, CompiledPlan] = {}
        self._runs: dict[tuple[Any, ...], CompiledPlan] = {}
        self._last: tuple[tuple[Any, ...], CompiledPlan | None] = ((), None)
        self._slots = CallKeyReader((), 0)  # empty until the first call or plan
        self._is_started = False
        self._start_lock = threading.Lock()
        self._hooked = [
            (index, op)
            for index, op in enumerate(self.basic_ops)
            if type(op).pre_fuser_forward is not FusibleOperation.pre_fuser_forward
        ]
        for basic_op in self.basic_ops:
            basic_op._captured = True

    def __reduce__(self) -> tuple[object, ...]:
        # A copy or an unpickled pipeline makes new plans.
        rebuild = functools.partial(OperationFuser, open_channels=self.open_channels)
        return rebuild, (list(self.basic_ops), self.fusions)

    @property
    def plans(self) -> tuple[FusionPlan, ...]:
        """All cached plans."""
        return tuple(run.plan for run in self._plans.values())

    # -- calling --------------------------------------------------------------

    @breaks_graph
    def __call__(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Output:
        """Run the pipeline.

        ``basic_op_kwargs`` are the keyword arguments of each basic op, one dict for
        each. Returns the main output, or a tuple of it and the extra outputs that no
        channel keeps inside.

        Raises
        ------
        InputError, InputTypeError
            If the inputs are wrong; nothing has run then.
        """
        if basic_op_kwargs is not None:
            self.checks.keywords(basic_op_kwargs)
        return self.run(input, extra_inputs, basic_op_kwargs)

    def run(
        self,
        input_: torch.Tensor,
        extra_inputs: tuple[torch.Tensor, ...],
        kwargs: list[dict[str, Any]] | None,
        *,
        is_placed: bool = False,
    ) -> Output:
        """:meth:`__call__` with a tuple of extra inputs, and keyword arguments that were checked.

        ``is_placed``: the caller has already set the conditions of a recomputation.
        """
        observer = OBSERVER.guest.calls
        if observer is not None and (observe := observer()) is not None:
            answer: Output = observe(self, input_, extra_inputs)
            return answer
        if not self._is_started and not self._takes_scalar(input_):
            self._start(input_, extra_inputs)
        if contexts.is_autocast_used and not is_placed:
            again = state_of_forward(self.basic_ops)
            if again is not None:
                with recomputing_under(again):
                    return self.run(input_, extra_inputs, kwargs, is_placed=True)
        try:
            params, call_key, layout = self._slots.read(input_, extra_inputs, _registered)
        except (AttributeError, IndexError, KeyError):  # not a tensor, no dimensions, no parameter
            if self._takes_scalar(input_):  # it gets one dimension inside
                result = self.run(input_[None], tuple(map(_with_dimension, extra_inputs)), kwargs)
                return tuple(t[0] for t in result) if isinstance(result, tuple) else result[0]
            self._find_parameters()  # a parameter may have been moved to another place
            self.checks.kinds(input_, self._slots.tensors(), extra_inputs)
            params, call_key, layout = self._slots.read(input_, extra_inputs, _registered)
        known, run = self._last
        if run is None or call_key != known:
            run_or_context = self._find_run(call_key, input_, extra_inputs, (params, layout))
            if not isinstance(run_or_context, tuple):
                with run_or_context:
                    return self.run(input_, extra_inputs, kwargs, is_placed=True)
            run, params, layout = run_or_context
        for one, other, check in self.equal_extras:
            first, second = extra_inputs[one], extra_inputs[other]
            if first is not second:
                check(first, second)
        for index, op in self._hooked:
            op.pre_fuser_forward(requires_grad=run.requires_grad[index])
        try:
            return run.call(input_, params, extra_inputs, kwargs, layout)
        except RuntimeError:
            self.checks.device(input_, params, extra_inputs)
            raise
        except InputError as error:
            try:  # a plan of these inputs says where the op is
                self._graph(input_, extra_inputs, run.key.autocast_dtype)
            except InputError as placed:
                error.args = placed.args
            raise

    def _takes_scalar(self, input_: Any) -> bool:
        """Whether ``input_`` is a tensor without dimensions and all ops accept that."""
        is_scalar = isinstance(input_, torch.Tensor) and input_.dim() == 0
        return is_scalar and all(op.takes_scalars for op in self.basic_ops)

    def _find_run(
        self,
        call_key: tuple[Any, ...],
        input_: torch.Tensor,
        extra_inputs: tuple[torch.Tensor, ...],
        read: tuple[tuple[torch.Tensor, ...], LayoutOfCall],
    ) -> tuple[CompiledPlan, tuple[torch.Tensor, ...], LayoutOfCall] | AbstractContextManager[None]:
        """The compiled plan of an earlier call with this key, or a new one; stored as the last.

        Returned with the parameters and their layout, ``read`` if the plan is known; including
        parameters that were added to an op since it was last planned. If a call reads other tensors
        than some parameters, such as local parts, the context in which they are in their places.
        """
        params, layout = read
        run = self._runs.get(call_key)
        if run is None:
            parts = PARAMETERS.guest.local_parts(self.basic_ops, self._slots, params)
            if parts is not None:
                return parts
            self._find_parameters()
            params, call_key, layout = self._slots.read(input_, extra_inputs, _registered)
            parts = PARAMETERS.guest.local_parts(self.basic_ops, self._slots, params)
            if parts is not None:
                return parts
            self.checks.recipes(params)
            run = self._plan_run(input_, params, extra_inputs, only_planning=False)
            _keep(self._runs, call_key, run)
        before = self._last[1]
        if before is not None and before.key.recipe is not None and run.key.recipe is None:
            warn_if_unquantized_in_backward(before.key.recipe, self.basic_ops)
        # One assignment, so that another thread sees both or neither.
        self._last = (call_key, run)
        return run, params, layout

    def plan(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        training: bool = True,
        device: str | None = None,
    ) -> FusionPlan:
        """The plan that a call with such inputs would run; nothing runs.

        Tensors on the meta device are planned as if on the parameters' device. The
        returned plan has notes on the layout of these tensors in kernels and on the
        cost of padding, the autograd nodes of such a call, and the costs of memory budgets; the
        cached plan does not.
        ``device``, such as ``"h200"``, is a GPU of the table of devices, which need not be here:
        the plan is for it, with fuser's kernels, and modelled for the rows of ``input``.

        Raises
        ------
        InputError
            If the ops do not take these inputs, or there is no such device.
        """
        if device is not None:
            return self.plan_on(device_named(device), input, *extra_inputs, training=training)
        if self._takes_scalar(input):
            input, extra_inputs = input[None], tuple(map(_with_dimension, extra_inputs))
        self._find_parameters()
        params = self._slots.tensors()
        count = self.planned_count
        with torch.set_grad_enabled(training):
            run = self._plan_run(input, params, extra_inputs, only_planning=True)
            graph = self._graph(input, extra_inputs, run.key.autocast_dtype)
            place = {name: getattr(run.key, name) for name in _PLACE}
            under = self._keys_under(graph, input, extra_inputs, **place)
        notes = OBSERVER.guest.notes(graph, run.plan, (input, *extra_inputs))
        plan = run.plan
        if plan.features != features_of(graph):  # it was made for tensors of other columns
            plan = make_plan(graph, run.key, _registered).plan
        every = tuple(range(len(self.basic_ops)))
        replays = [Note(every, text, side=side) for side, text in PASSES.guest.replays(run)]
        plan = replace(plan, replays=tuple(replays), **notes)
        # FSDP awaits all gradients of a module, and calls hooks of its parameters itself.
        are_gathered = PARAMETERS.guest.are_gathered(self.basic_ops, self._slots)
        if run.can_be_cut and not are_gathered:
            plan = run.with_nodes(plan, graph, input, params, extra_inputs)
        is_known = self.planned_count == count
        return replace(
            plan, **OBSERVER.guest.costs(graph, plan, under, _registered, is_known=is_known)
        )

    def plan_on(
        self,
        target: Device | None,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        training: bool = True,
    ) -> FusionPlan:
        """The plan of a call on ``target``, None for this machine, modelled for its own rows.

        It has the times of plain torch too. Nothing is kept for later calls.
        """
        if self._takes_scalar(input):
            input, extra_inputs = input[None], tuple(map(_with_dimension, extra_inputs))
        self._find_parameters()
        params = self._slots.tensors()
        self.checks.kinds(input, params, extra_inputs)
        facts: dict[str, Any]
        if target is None:
            place = self.checks.device(input, params, extra_inputs, only_planning=True)
            facts = {"arch": architecture(place), "no_kernels": kernel_refusal(place.type)}
            kind, target = place.type, device_of(place.type)
        else:
            kind, facts = "cuda", {"arch": target.arch, "no_kernels": None, "is_elsewhere": True}
        with torch.set_grad_enabled(training):
            graph, under = self._keys_on(kind, input, extra_inputs, **facts)
            key = under(self._limit(input))
        plan = make_plan(graph, key, _registered, target).plan
        return replace(plan, **OBSERVER.guest.costs(graph, plan, under, _registered, target))

    def plan_for_gpu(
        self,
        arch: tuple[int, int],
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        is_elsewhere: bool = True,
    ) -> tuple[OpGraph, FusionPlan]:
        """The graph and the plan of a training call on a GPU of compute capability ``arch``.

        fuser's kernels run on it. ``is_elsewhere``: the plan is the same on every machine; if not,
        the GPU has the libraries of this one. Inputs and parameters may be on the meta device.
        Nothing is kept for later calls.

        Raises
        ------
        InputError
            If an op cannot take its input.
        """
        self._find_parameters()
        with torch.enable_grad():
            facts = {"arch": arch, "no_kernels": None, "is_elsewhere": is_elsewhere}
            graph, under = self._keys_on("cuda", input, extra_inputs, **facts)
            key = under(self._limit(input))
        return graph, make_plan(graph, key, _registered).plan

    def _keys_on(
        self,
        kind: str,
        input_: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        **facts: Any,
    ) -> tuple[OpGraph, Callable[[Limit], PlanKey]]:
        """The graph and the :meth:`_keys_under` of a call on a device that need not be here.

        ``facts`` are fields of the keys: what is known of that device.
        """
        autocast = autocast_dtype(kind)
        graph = self._graph(input_, extra_inputs, autocast)
        place = {"autocast_dtype": autocast, "device": kind, **facts}
        return graph, self._keys_under(graph, input_, extra_inputs, **place)

    def _keys_under(
        self,
        graph: OpGraph,
        input_: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        **place: Any,
    ) -> Callable[[Limit], PlanKey]:
        """The key of a call under a limit of what is kept; ``place`` are its fields."""
        ops = self._op_keys(graph, input_, self._slots.tensors(), extra_inputs)
        return functools.partial(self._plan_key, ops, **place)

    def outputs_like(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Meta tensors like the main output and the extra outputs of a call with such inputs."""
        self._find_parameters()
        params = self._slots.tensors()
        device = self.checks.device(input, params, extra_inputs, only_planning=True)
        graph = self._graph(input, extra_inputs, autocast_dtype(device.type))
        keys = self._op_keys(graph, input, params, extra_inputs)
        outputs = [(graph.main_specs[-1], any(key.requires_grad for key in keys))]
        for i, k in self.returned:
            spec = graph.extra_outputs[i][k]
            outputs.append((spec, keys[i].requires_grad and spec.dtype.is_floating_point))
        return tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=requires_grad)
            for spec, requires_grad in outputs
        )

    # -- first call -----------------------------------------------------------

    def _start(self, input_: torch.Tensor, extra_inputs: Sequence[torch.Tensor]) -> None:
        """Before the first call: check its tensors, then let the ops make deferred parameters."""
        with self._start_lock:
            if self._is_started:
                return
            self._find_parameters()
            # A wrong call is refused while deferred parameters are still on the meta device.
            params = self._slots.tensors()
            self.checks.kinds(input_, params, extra_inputs)
            allocated = params if input_.is_meta else [p for p in params if not p.is_meta]
            device = self.checks.device(input_, allocated, extra_inputs)
            self._graph(input_, extra_inputs, autocast_dtype(device.type))
            if input_.is_meta:
                return  # a model on the meta device only computes shapes, and stays there
            # Deferred parameters are made on the input's device, for training too.
            with torch.inference_mode(False), torch.no_grad(), input_.device:
                for op in self.basic_ops:
                    op.pre_first_fuser_forward()
            self._find_parameters()
            self._is_started = True

    def _find_parameters(self) -> None:
        """Find the current places of the parameters; unchanged if they are the same."""
        slots = CallKeyReader(self.basic_ops, self.num_extra_inputs)
        for index in slots.computed:
            op = self.basic_ops[index]
            if op._forward_pre_hooks and len(self.basic_ops) > 1:
                raise StateError(
                    f"Op {index} ({type(op).__name__}) has a parameter that a hook computes before "
                    "each call of the op, and this pipeline of several ops runs it without its "
                    "hooks. Call it through a Sequential, which sees hooks."
                )
        if slots.places != self._slots.places:
            self._slots = slots

    # -- planning -------------------------------------------------------------

    def _plan_run(
        self,
        input_: torch.Tensor,
        params: tuple[torch.Tensor, ...],
        extra_inputs: Sequence[torch.Tensor],
        *,
        only_planning: bool,
    ) -> CompiledPlan:
        """Check the tensors and build the plan key; plan unless an equal key was planned."""
        self.checks.kinds(input_, params, extra_inputs)
        device = self.checks.device(input_, params, extra_inputs, only_planning=only_planning)
        return self.planned(
            *(input_, params, extra_inputs, self._limit(input_)),
            autocast_dtype=autocast_dtype(device.type),
            device=device.type,
            arch=architecture(device),
            no_kernels=kernel_refusal(device.type),
        )

    def planned(
        self,
        input_: torch.Tensor,
        params: tuple[torch.Tensor, ...],
        extra_inputs: Sequence[torch.Tensor],
        limit: Limit,
        *,
        autocast_dtype: torch.dtype | None,
        **place: Any,
    ) -> CompiledPlan:
        """The compiled plan for such tensors, ``place`` being fields of its key.

        New unless an equal key was planned.
        """
        graph = self._graph(input_, extra_inputs, autocast_dtype)
        ops = self._op_keys(graph, input_, params, extra_inputs)
        key = self._plan_key(ops, limit, autocast_dtype=autocast_dtype, **place)
        run = self._plans.get(key)
        if run is None:
            if key.recipe is not None:
                warn_if_emulated(key.recipe, key.arch)
            planned = make_plan(graph, key, _registered)
            contents = key, self.basic_ops, self.sources, self.returned, self._slots.counts
            passes = PASSES.default if self.basic_ops[0].runs_in_graph else PASSES.guest
            run = passes.compiled_plan(CompiledPlan, planned, graph, *contents)
            self.planned_count += 1
            _keep(self._plans, key, run)
        return run

    def _limit(self, input_: torch.Tensor) -> Limit:
        return budget.limit.of_rows(input_, many_rows(self.basic_ops))

    def _plan_key(self, ops: tuple[OpKey, ...], limit: Limit, **place: Any) -> PlanKey:
        """The key of a plan of ``ops`` under the recipe of this time; ``place`` are its fields."""
        key = PlanKey(
            ops, recipe=current_recipe(), fusions=self.fusions, registered=_registered, **place
        )
        # torch matches what a checkpointed forward and its recomputation save by their order; if
        # there are other hooks then, the ops are in other pipelines. In a graph they are not.
        is_free = self.basic_ops[0].runs_in_graph or not is_in_checkpoint()
        if is_free and _registered == RegisteredFusions():
            key = PASSES.guest.saving(self.basic_ops, key, limit)
        return with_quantized_outputs(self.basic_ops, key)

    def _graph(
        self,
        input_: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        autocast: torch.dtype | None,
    ) -> OpGraph:
        return OpGraph(
            self.basic_ops,
            self.sources,
            TensorSpec(tuple(input_.shape), input_.dtype),
            [TensorSpec(tuple(t.shape), t.dtype) for t in extra_inputs],
            autocast,
            self.returned,
            self.places,
        )

    def _op_keys(
        self,
        graph: OpGraph,
        input_: torch.Tensor,
        params: tuple[torch.Tensor, ...],
        extra_inputs: Sequence[torch.Tensor],
    ) -> tuple[OpKey, ...]:
        enabled = torch.is_grad_enabled()
        main_requires = enabled and input_.requires_grad
        remaining = iter(params)
        keys: list[OpKey] = []
        for i, count in enumerate(self._slots.counts):
            of_params = tuple(
                TensorKey(p.dtype, enabled and p.requires_grad, _format(p))
                for p in (next(remaining) for _ in range(count))
            )
            extras = tuple(
                TensorKey(
                    spec.dtype,
                    enabled and extra_inputs[source.caller_index].requires_grad
                    if source.caller_index is not None
                    else keys[source.producer or 0].requires_grad and spec.dtype.is_floating_point,
                )
                for source, spec in zip(self.sources[i], graph.extra_inputs[i], strict=True)
            )
            requires = main_requires or any(t.requires_grad for t in (*of_params, *extras))
            dtype = graph.main_specs[i].dtype
            keys.append(OpKey(dtype, requires, main_requires, of_params, extras))
            main_requires = requires
        if isinstance(input_, QuantizedTensor):
            usage = input_._usage()
            arrives = QuantSpec(input_.format, usage.rowwise, usage.columnwise)
            keys[0] = replace(keys[0], input=arrives)
        return tuple(keys)


def checked_fusions(fusions: Iterable[type[FusedOperation]]) -> tuple[type[FusedOperation], ...]:
    """``fusions`` as a tuple, after a check that the planner can use all of them."""
    if not isinstance(fusions, Iterable) or isinstance(fusions, torch.nn.Module):
        raise InputTypeError(f"fusions is a sequence of FusedOperation classes; got {fusions!r}.")
    fusions = tuple(fusions)
    for fusion in fusions:
        _check_fusion(fusion)
    return fusions


def _check_fusion(fusion: Any) -> None:
    if not (isinstance(fusion, type) and issubclass(fusion, FusedOperation)):
        raise InputTypeError(f"fusions is a sequence of FusedOperation classes; got {fusion!r}.")
    name = fusion.__name__
    if not fusion.side or not fusion.window:
        raise InputTypeError(
            f"{name} has side {fusion.side!r} and window {fusion.window!r}; a fusion names the ops "
            "that it takes in its window, and its side, 'forward', 'backward' or 'joint'."
        )
    check_window(name, fusion.window)
    if fusion.side not in ("forward", "backward", "joint"):
        raise InputError(f"{name}.side is {fusion.side!r}; it is 'forward', 'backward' or 'joint'.")
    check_has_methods(fusion, fusion.side)


def _equal_extras(
    ops: Sequence[BasicOperation], sources: Sequence[tuple[Source, ...]]
) -> list[tuple[int, int, Callable[[torch.Tensor, torch.Tensor], None]]]:
    """Pairs of the caller's extra inputs that must be equal, each with its check."""
    pairs = []
    for place, op in enumerate(ops):
        equal = op.equal_extra(ops, place) if op.index_extras else None
        if equal is not None:
            before, check = equal
            first, second = sources[before][0].caller_index, sources[place][0].caller_index
            if first is not None and second is not None:
                pairs.append((first, second, check))
    return pairs


def _format(tensor: torch.Tensor) -> NumberFormat | None:
    # Of a sharded parameter, which is gathered for a call, the format is that of its shards.
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.format if isinstance(tensor, QuantizedTensor) else None


def _with_dimension(value: Any) -> Any:
    return value[None] if isinstance(value, torch.Tensor) else value


def _keep(table: dict[Any, CompiledPlan], key: Any, run: CompiledPlan) -> None:
    if len(table) >= MAX_PLANS:
        table.pop(next(iter(table)), None)
    table[key] = run


def registered_count() -> int:
    """The number of registered fusions, for code that Dynamo traces."""
    return len(_registered.joint) + len(_registered.forward) + len(_registered.backward)


def register_forward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register ``func(ops, *, recipe) -> ops``, which may replace ops by forward-only fused ops.

    Registered functions run before the planner, which plans the remaining ops.
    With ``prepend``, this function runs before those registered earlier. Prefer a
    class in ``Sequential(..., fusions=...)``: it can refuse with a reason, and the
    planner compares its cost with other fusions.
    """
    _register("forward", op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a function of backward-only fused ops; see :func:`register_forward_fusion`."""
    _register("backward", op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a function of fused ops that replace both halves; see
    :func:`register_forward_fusion`.
    """
    _register("joint", op_fusion_func, prepend)


def _register(side: str, function: FusionFunction, prepend: bool) -> None:
    global _registered
    if isinstance(function, (type, FusibleOperation)) or not callable(function):
        raise InputTypeError(
            f"A registered fusion is a function of a list of ops, func(ops, *, recipe) -> ops; got "
            f"{function!r}. Fusion classes go to Sequential(..., fusions=...)."
        )
    present = getattr(_registered, side)
    changed = (function, *present) if prepend else (*present, function)
    _registered = replace(_registered, **{side: changed})
