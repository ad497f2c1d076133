"""Sequential: a container that runs consecutive fusible ops as pipelines."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch.compiler import is_compiling

from fuser.doors import PASSES
from fuser.errors import InputError, InputTypeError, explains_arguments, refuse_unknown
from fuser.fused_ops.catalog import FUSIONS
from fuser.op import CallResult, FusedOperation, Stateful
from fuser.op.module_calls import module_calls
from fuser.plan.plan import FusionPlan
from fuser.plan.saved_inputs import MemoryBudget, budget
from fuser.precision.recomputation import is_in_checkpoint
from fuser.runtime.checks import check_keywords
from fuser.runtime.pipeline import checked_fusions
from fuser.runtime.segments import Keywords, Segments
from fuser.torch_private import (
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)

if TYPE_CHECKING:
    from typing_extensions import Self

OpKwargs = Mapping[Any, Mapping[str, Any]]
"""Keyword arguments for single ops; a key is an op or the index of a module."""

_NO_SEGMENTS: tuple[Any, Any, Any, object] = (None, None, None, None)


class Sequential(Stateful, torch.nn.Sequential):
    """``torch.nn.Sequential`` that plans and fuses runs of fusible ops.

    Consecutive fusible ops form one pipeline. Other modules are called between pipelines, and so
    are ops that have hooks or a ``forward`` of their own. A module that is not an op receives only
    the main input; extra tensors and channels bypass it. A nested Sequential takes and
    returns extra tensors in their order, and its channels are its own.

    Parameters
    ----------
    modules
        Operations and any other modules, or one dict of them.
    fusions
        The fusion classes that the planner may use, e.g. ``fuser.FUSIONS + (Mine,)``.
    memory_budget
        What is kept for backward, a number as in :class:`fuser.activation_memory_budget` or one of
        these. The default is what the contexts of a call say.

    Raises
    ------
    InputTypeError
        If one of ``modules`` is not a module.
    InputError
        On another budget than those of :class:`fuser.activation_memory_budget`.
    """

    _memory_budget: MemoryBudget | None = None

    @explains_arguments
    def __init__(
        self,
        *modules: torch.nn.Module | Mapping[str, torch.nn.Module],
        fusions: Sequence[type[FusedOperation]] = FUSIONS,
        memory_budget: float | MemoryBudget | None = None,
    ) -> None:
        budget_of_calls = _as_budget(memory_budget)
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            super().__init__(OrderedDict(modules[0]))
        else:
            for module in modules:
                _check_module(module)
            super().__init__(*modules)  # type: ignore[arg-type]
        self._fusions, self._memory_budget = checked_fusions(fusions), budget_of_calls
        self._segments = _NO_SEGMENTS
        self._segments_lock = threading.Lock()

    @property
    def fusions(self) -> tuple[type[FusedOperation], ...]:
        """The fusion classes that the planner may use; setting them discards the plans."""
        return self._fusions

    @fusions.setter
    def fusions(self, fusions: Sequence[type[FusedOperation]]) -> None:
        self._fusions = checked_fusions(fusions)
        self._segments = _NO_SEGMENTS

    @property
    def memory_budget(self) -> MemoryBudget | None:
        """What is kept for backward; None for what the contexts of a call say."""
        return self._memory_budget

    @memory_budget.setter
    def memory_budget(self, memory_budget: float | MemoryBudget | None) -> None:
        self._memory_budget = _as_budget(memory_budget)

    @overload
    def __getitem__(self, idx: slice) -> Self: ...

    # For torch's type checker an attribute of a Module, such as a weight, is a tensor or a module.
    @overload
    def __getitem__(self, idx: int | str) -> Any: ...

    def __getitem__(self, idx: int | slice | str) -> Any:
        if isinstance(idx, str):
            return self._modules[idx]
        item = super().__getitem__(idx)
        if isinstance(item, Sequential) and isinstance(idx, slice):
            item.fusions, item.memory_budget = self.fusions, self.memory_budget
        return item

    def _like(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return Sequential(*modules, fusions=self.fusions, memory_budget=self.memory_budget)

    def __add__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return self._like([*self, *other])

    def __mul__(self, times: int) -> Sequential:
        return self._like(super().__mul__(times))

    __rmul__ = __mul__

    def __iadd__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(other)

    # The second names of arguments are those of te.ops.

    def insert(
        self,
        index: int | None = None,
        module: torch.nn.Module | None = None,
        *,
        idx: int | None = None,
    ) -> Self:
        """Insert a module before the one at ``index``, which is also named ``idx``."""
        return super().insert(_one_of("insert", index=index, idx=idx), module)  # type: ignore[arg-type]

    def pop(self, key: int | slice | None = None, *, idx: int | slice | None = None) -> Any:
        """Remove the module at ``key``, which is also named ``idx``, and return it."""
        return super().pop(_one_of("pop", key=key, idx=idx))

    def extend(
        self,
        sequential: Iterable[torch.nn.Module] | None = None,
        *,
        modules: Iterable[torch.nn.Module] | None = None,
    ) -> Self:
        """Append the modules of ``sequential``, which is also named ``modules``."""
        return super().extend(_one_of("extend", sequential=sequential, modules=modules))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.nn.Module):
            self._segments = _NO_SEGMENTS  # the old segments may hold the replaced module

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._segments = _NO_SEGMENTS

    def __getstate__(self) -> dict[str, object]:
        # Pipelines refer to ops; a copy builds its own pipelines.
        attributes = self.__dict__.items()
        return {k: v for k, v in attributes if k not in ("_segments", "_segments_lock")}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._segments = _NO_SEGMENTS
        self._segments_lock = threading.Lock()

    # -- running --------------------------------------------------------------

    if TYPE_CHECKING:

        def __call__(
            self,
            input: torch.Tensor,
            *extra_inputs: torch.Tensor,
            op_kwargs: OpKwargs | None = None,
        ) -> CallResult: ...

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: OpKwargs | None = None,
        **unknown: NoReturn,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run all modules.

        Parameters
        ----------
        input
            Main input.
        extra_inputs
            For the ops that take extra inputs, in the order of the ops.
        op_kwargs
            Keyword arguments for single ops: the key is an op, also one in a nested
            Sequential, or the index of a module; keyword arguments of a composite
            go to its first basic op.

        Returns
        -------
        The main output, or a tuple of it and the extra outputs in the order of the ops.

        Raises
        ------
        InputError
            If the number of extra inputs is wrong, ``op_kwargs`` names no op here, or a channel
            has two producers, none, or one after its reader.
        InputTypeError
            If ``op_kwargs`` is not a dict of dicts, or an op does not accept its arguments, or
            there is any other keyword argument.
        """
        if is_compiling():
            of_ops = {} if op_kwargs is None else {"op_kwargs": op_kwargs}
            traced: CallResult = PASSES.guest.traced_call(
                self, input, extra_inputs, of_ops | unknown
            )
            return traced
        if unknown:
            refuse_unknown(f"The call of a {type(self).__name__}", Sequential.forward, unknown)
        budget_of_calls = self._memory_budget
        if budget_of_calls is not None and budget_of_calls.limit is not budget.limit:
            with budget_of_calls:
                return Sequential.forward(self, input, *extra_inputs, op_kwargs=op_kwargs)
        if budget.limit.memory_budget == 0 and torch.is_grad_enabled() and not is_in_checkpoint():
            inputs = (input, *extra_inputs)
            again: torch.Tensor | tuple[torch.Tensor, ...]
            again = PASSES.guest.keeping_inputs(self, Sequential.forward, inputs, op_kwargs)
            return again
        modules, _, only, version = self._segments
        if (
            only is not None
            and op_kwargs is None
            and version is module_calls.version
            and not global_forward_hooks
            and not global_forward_pre_hooks
            and not global_backward_hooks
            and not global_backward_pre_hooks
            and tuple(self._modules.values()) == modules
        ):
            result: CallResult = only.run(input, extra_inputs, None)
            return result
        segments = self._current_segments()
        keywords = None if op_kwargs is None else self._keywords(segments, op_kwargs)
        return segments.run(input, extra_inputs, keywords)

    def _runs_segments(self) -> bool:
        """Whether a container around this one can plan what it runs: no class changed forward."""
        return type(self).forward is Sequential.forward

    def _current_segments(self) -> Segments:
        """The current modules, divided into pipelines and modules between them."""
        modules = tuple(self._modules.values())
        # Modules are compared by identity, so this detects every kind of edit.
        segments: Segments
        known, segments, *_ = self._segments
        if known == modules and segments.is_current():
            return segments
        with self._segments_lock:
            known, segments, *_ = self._segments
            is_known = known == modules
            if is_known and segments.is_current():
                return segments
            name, previous = type(self).__name__, segments if is_known else None
            segments = Segments(
                modules, self.fusions, name=name, keys=self._modules, previous=previous
            )
            # One assignment, so that another thread never sees a part of it.
            self._segments = (modules, segments, segments.only, segments.version)
            return segments

    def _keywords(self, segments: Segments, op_kwargs: OpKwargs) -> Keywords:
        """The keyword arguments by op, after all checks."""
        if not isinstance(op_kwargs, Mapping):
            raise InputTypeError(
                "op_kwargs is a dict of dicts of keyword arguments, each with an op, or the index "
                f"of a module, as its key; got {op_kwargs!r:.60}."
            )
        modules = list(self)
        names = {op: name for name, op in reversed(list(segments.named_ops()))}
        result: dict[torch.nn.Module, Mapping[str, Any]] = {}
        for target, keywords in op_kwargs.items():
            op = target
            is_index = isinstance(target, int) and not isinstance(target, bool)
            if is_index and -len(modules) <= target < len(modules):
                op = modules[target]
            if isinstance(op, FusedOperation):
                op = op.members[0]
            if not isinstance(op, torch.nn.Module) or op not in names:
                target_name = repr(target)
                if isinstance(target, torch.nn.Module):
                    target_name = f"a {type(target).__name__}"
                raise InputError(
                    f"op_kwargs names {target_name} that is not in this Sequential, which holds "
                    f"{', '.join(f'{i} {type(m).__name__}' for i, m in enumerate(modules))}."
                    " Name one of these."
                )
            if op in result:
                raise InputError(f"op_kwargs has two entries for one op: {names[op]}. Merge them.")
            check_keywords(names[op], op, keywords)
            result[op] = keywords
        return result

    # -- planning -------------------------------------------------------------

    def plan(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        training: bool = True,
        device: str | None = None,
        **unknown: NoReturn,
    ) -> FusionPlan:
        """The plan that :meth:`forward` would run for such inputs; nothing runs.

        ``input`` may be on the meta device. ``training=False`` plans as under
        ``torch.no_grad``. ``device`` is a GPU that need not be here: ``"h200"``, ``"h100"``,
        ``"a100"``, ``"b200"`` or ``"rtx5090"``; the plan is modelled for it and for the rows of
        ``input``, under ``torch.autocast("cuda")`` if that is on. Op indices count the basic ops
        of all pipelines here; modules between pipelines only compute shapes.

        Raises
        ------
        InputError
            If :meth:`forward` would refuse the input, there is no fusible op here, or there is no
            such device.
        InputTypeError
            If there is any other keyword argument.
        """
        if unknown:
            refuse_unknown(f"The plan of a {type(self).__name__}", Sequential.plan, unknown)
        with self._memory_budget or contextlib.nullcontext():
            segments = self._current_segments()
            return segments.plan(input, extra_inputs, training=training, device=device)

    @property
    def plans(self) -> tuple[FusionPlan, ...]:
        """Every cached plan of every pipeline here."""
        segments = self._segments[1]
        pipelines = () if segments is None else segments.pipelines()
        return tuple(plan for pipeline in pipelines for plan in pipeline.plans)


def _as_budget(budget: float | MemoryBudget | None) -> MemoryBudget | None:
    if budget is None or isinstance(budget, MemoryBudget):
        return budget
    new_budget: MemoryBudget = PASSES.guest.budget(budget)
    return new_budget


def _one_of(method: str, **names: Any) -> Any:
    """The value of an argument that has two names, of which one is given."""
    values = [value for value in names.values() if value is not None]
    if len(values) != 1:
        raise InputTypeError(
            f"Sequential.{method} got {len(values)} values for {' and '.join(names)}, two names of "
            "one argument: give one."
        )
    return values[0]


def _check_module(module: object) -> None:
    """Refuse what is not a module, and say what to write."""
    if module is None or isinstance(module, torch.nn.Module):
        return
    argument, hint = repr(module)[:60], ""
    if isinstance(module, type):
        argument, hint = f"the class {module.__name__}", f" Write {module.__name__}(...)."
    elif isinstance(module, Iterable) and not isinstance(module, str):
        argument, hint = f"a {type(module).__name__}", " Write Sequential(*modules)."
    raise InputTypeError(f"Sequential takes modules, one an argument; got {argument}.{hint}")
