"""Sequential: a container whose runs of fusible ops are pipelines."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fuser.catalog import FUSIONS
from fuser.checks import wrong_extra_count
from fuser.errors import InputError
from fuser.op import FusedOperation, FusibleOperation
from fuser.pipeline import OperationFuser
from fuser.plan import FusionPlan, merged

Group = OperationFuser | torch.nn.Module


_Grouping = tuple[tuple[Any, ...] | None, list[Group], OperationFuser | None]
_UNGROUPED: _Grouping = (None, [], None)


class Sequential(torch.nn.Sequential):
    """``torch.nn.Sequential`` in which runs of fusible ops are planned and fused.

    Other modules may stand between; each run of fusible ops is one pipeline.

    Parameters
    ----------
    modules
        Operations and any other modules, or one dict of them.
    fusions
        The fusion classes the planner may use, e.g. ``fuser.FUSIONS + (Mine,)``.
    """

    def __init__(
        self,
        *modules: torch.nn.Module | Mapping[str, torch.nn.Module],
        fusions: Sequence[type[FusedOperation]] = FUSIONS,
    ) -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            super().__init__(OrderedDict(modules[0]))
        else:
            super().__init__(*modules)  # type: ignore[arg-type]
        self._fusions = tuple(fusions)
        self._grouping = _UNGROUPED
        self._grouping_lock = threading.Lock()

    @property
    def fusions(self) -> tuple[type[FusedOperation], ...]:
        """The fusion classes the planner may use; setting them plans anew."""
        return self._fusions

    @fusions.setter
    def fusions(self, fusions: Sequence[type[FusedOperation]]) -> None:
        self._fusions = tuple(fusions)
        self._grouping = _UNGROUPED

    def __getitem__(self, idx: int | slice | str) -> Any:
        if isinstance(idx, str):
            return self._modules[idx]
        item = super().__getitem__(idx)
        if isinstance(item, Sequential) and isinstance(idx, slice):
            item.fusions = self.fusions
        return item

    def __add__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return Sequential(*self, *other, fusions=self.fusions)

    def __mul__(self, times: int) -> Sequential:
        return Sequential(*super().__mul__(times), fusions=self.fusions)

    __rmul__ = __mul__

    def __iadd__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(other)

    def __getstate__(self) -> dict[str, Any]:
        # Pipelines hold ops by reference; a copy builds its own.
        state = {**self.__dict__, "_grouping": _UNGROUPED}
        del state["_grouping_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._grouping_lock = threading.Lock()

    # -- running --------------------------------------------------------------

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[Any, dict[str, Any]] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run all modules.

        Parameters
        ----------
        input
            Main input.
        extra_inputs
            For the ops that take extra inputs, in the order of the ops.
        op_kwargs
            Keyword arguments for single ops: the key is an op, or the index of
            a module here; for a composite they go to its first basic op.

        Returns
        -------
        The output, or a tuple of it and the extra outputs in the order of the ops.

        Raises
        ------
        InputError
            If the number of extra inputs is wrong, or ``op_kwargs`` names no op here.
        """
        modules, groups, only = self._grouping
        if only is not None and op_kwargs is None and tuple(self._modules.values()) == modules:
            return only.run(input, extra_inputs, None)
        groups = self._pipelines()
        kwargs = None if op_kwargs is None else self._kwargs_by_op(op_kwargs)
        self._check_extra_count(groups, len(extra_inputs))
        x: Any = input
        extra_outputs: list[torch.Tensor] = []
        for group in groups:
            pipeline = _pipeline_of(group)
            if pipeline is None:
                x = group(x)
                continue
            taken, extra_inputs = (
                extra_inputs[: pipeline.num_extra_inputs],
                extra_inputs[pipeline.num_extra_inputs :],
            )
            if pipeline is group:
                x = pipeline(x, *taken, basic_op_kwargs=_of(pipeline, kwargs))
            else:
                x = group(x, *taken)
            if isinstance(x, tuple):
                extra_outputs += x[1:]
                x = x[0]
        return (x, *extra_outputs) if extra_outputs else x

    def _pipelines(self) -> list[Group]:
        """The modules with maximal runs of fusible ops as one pipeline each.

        An op with hooks stands alone and is called as a module, so that its
        hooks run; hooks count from the first call on, or the next edit.
        """
        modules = tuple(self._modules.values())
        # Equality of modules is identity, so this notices every way of editing.
        if self._grouping[0] == modules:
            return self._grouping[1]
        with self._grouping_lock:
            if self._grouping[0] == modules:
                return self._grouping[1]
            groups: list[Group] = []
            run: list[FusibleOperation] = []
            for module in modules:
                assert module is not None
                if isinstance(module, FusibleOperation) and not _has_hooks(module):
                    run.append(module)
                    continue
                if run:
                    groups.append(OperationFuser(run, self.fusions))
                    run = []
                groups.append(module)
            if run:
                groups.append(OperationFuser(run, self.fusions))
            only = groups[0] if len(groups) == 1 else None
            # One assignment: another thread sees all of it or nothing.
            self._grouping = (modules, groups, only if isinstance(only, OperationFuser) else None)
            return groups

    def _check_extra_count(self, groups: Iterable[Group], given: int) -> None:
        pipelines = [p for p in map(_pipeline_of, groups) if p is not None]
        wanted = sum(pipeline.num_extra_inputs for pipeline in pipelines)
        if given != wanted:
            takers: list[str] = []
            first = 0
            for pipeline in pipelines:
                takers += pipeline.checks.extra_input_takers(first)
                first += len(pipeline.basic_ops)
            raise InputError(f"The Sequential {wrong_extra_count(wanted, takers, given)}")

    def _kwargs_by_op(
        self, op_kwargs: Mapping[Any, dict[str, Any]]
    ) -> dict[torch.nn.Module, dict[str, Any]]:
        modules = list(self)
        pipelines = [p for p in map(_pipeline_of, self._pipelines()) if p is not None]
        known = {op for pipeline in pipelines for op in pipeline.basic_ops}
        result: dict[torch.nn.Module, dict[str, Any]] = {}
        for target, kwargs in op_kwargs.items():
            op = target
            if isinstance(target, int) and -len(modules) <= target < len(modules):
                op = modules[target]
            if isinstance(op, FusedOperation) and any(op is module for module in modules):
                op = op.basic_ops[0]
            if not isinstance(op, torch.nn.Module) or op not in known:
                what = repr(target)
                if isinstance(target, torch.nn.Module):
                    what = type(target).__name__
                raise InputError(
                    f"op_kwargs names {what}, which is no op of this Sequential: it holds "
                    f"{', '.join(f'{i} {type(m).__name__}' for i, m in enumerate(modules))}."
                )
            result[op] = kwargs
        return result

    # -- planning -------------------------------------------------------------

    def plan(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, training: bool = True
    ) -> FusionPlan:
        """What :meth:`forward` would run for such inputs; nothing runs.

        ``input`` may be on the meta device. ``training=False`` plans as under
        ``torch.no_grad``. Op indices count the basic ops of all pipelines here;
        modules between pipelines are asked for shapes only.

        Raises
        ------
        InputError
            As :meth:`forward`, or if there is no fusible op here.
        """
        groups = self._pipelines()
        self._check_extra_count(groups, len(extra_inputs))
        plans: list[FusionPlan] = []
        x = input
        for number, group in enumerate(groups):
            pipeline = _pipeline_of(group)
            if pipeline is not None:
                taken, extra_inputs = (
                    extra_inputs[: pipeline.num_extra_inputs],
                    extra_inputs[pipeline.num_extra_inputs :],
                )
                plans.append(pipeline.plan(x, *taken, training=training))
                if number + 1 < len(groups):
                    x = pipeline.output_like(x, *taken)
            else:
                assert isinstance(group, torch.nn.Module)
                x = _shape_only(group, x)
        if not plans:
            raise InputError("This Sequential holds no fusible op, so there is nothing to plan.")
        return merged(plans)

    @property
    def plans(self) -> tuple[FusionPlan, ...]:
        """Every plan cached so far, of every pipeline here."""
        pipelines = [p for p in map(_pipeline_of, self._grouping[1]) if p is not None]
        return tuple(plan for pipeline in pipelines for plan in pipeline.plans)


def _pipeline_of(group: Group) -> OperationFuser | None:
    """The pipeline that runs ``group``: itself, that of an op alone, None of another module."""
    if isinstance(group, OperationFuser):
        return group
    if isinstance(group, FusibleOperation):
        pipeline: OperationFuser = group._own_pipeline()
        return pipeline
    return None


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in module.modules()
    )


def _of(
    pipeline: OperationFuser, kwargs: Mapping[torch.nn.Module, dict[str, Any]] | None
) -> list[dict[str, Any]] | None:
    """The keyword arguments of each basic op of ``pipeline``."""
    return None if kwargs is None else [kwargs.get(op, {}) for op in pipeline.basic_ops]


def _shape_only(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What ``module`` returns for ``x``, run on the meta device."""
    state = {
        name: tensor.to("meta")
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    output = torch.func.functional_call(module, state, (x.to("meta"),))
    assert isinstance(output, torch.Tensor)
    return output
