"""Sequential: a container whose runs of fusible ops are pipelines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fuser.catalog import FUSIONS
from fuser.errors import InputError
from fuser.op import FusedOperation, FusibleOperation
from fuser.pipeline import OperationFuser
from fuser.plan import FusionPlan, merged

Group = OperationFuser | torch.nn.Module


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
        self._grouped: tuple[torch.nn.Module, ...] | None = None
        self._groups: list[Group] = []
        self._only: OperationFuser | None = None  # the pipeline, where that is all there is

    @property
    def fusions(self) -> tuple[type[FusedOperation], ...]:
        """The fusion classes the planner may use; setting them plans anew."""
        return self._fusions

    @fusions.setter
    def fusions(self, fusions: Sequence[type[FusedOperation]]) -> None:
        self._fusions = tuple(fusions)
        self._grouped = None

    def __getitem__(self, idx: int | slice | str) -> Any:
        if isinstance(idx, str):
            return self._modules[idx]
        item = super().__getitem__(idx)
        if isinstance(item, Sequential) and isinstance(idx, slice):
            item.fusions = self.fusions
        return item

    def __add__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return Sequential(*self, *other, fusions=self.fusions)

    def __iadd__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(other)

    def __getstate__(self) -> dict[str, Any]:
        # Pipelines hold ops by reference; a copy builds its own.
        return {**self.__dict__, "_grouped": None, "_groups": [], "_only": None}

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
        if (
            self._only is not None
            and op_kwargs is None
            and tuple(self._modules.values()) == self._grouped
        ):
            return self._only(input, *extra_inputs)
        groups = self._pipelines()
        kwargs = None if op_kwargs is None else self._kwargs_by_op(op_kwargs)
        self._check_extra_count(groups, len(extra_inputs))
        x: Any = input
        extra_outputs: list[torch.Tensor] = []
        for group in groups:
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            taken, extra_inputs = (
                extra_inputs[: group.num_extra_inputs],
                extra_inputs[group.num_extra_inputs :],
            )
            x = group(x, *taken, basic_op_kwargs=_of(group, kwargs))
            if isinstance(x, tuple):
                extra_outputs += x[1:]
                x = x[0]
        return (x, *extra_outputs) if extra_outputs else x

    def _pipelines(self) -> list[Group]:
        """The modules with maximal runs of fusible ops as one pipeline each."""
        modules = tuple(self._modules.values())
        # Equality of modules is identity, so this notices every way of editing.
        if modules == self._grouped:
            return self._groups
        groups: list[Group] = []
        run: list[FusibleOperation] = []
        for module in modules:
            if isinstance(module, FusibleOperation):
                run.append(module)
                continue
            if run:
                groups.append(OperationFuser(run, self.fusions))
                run = []
            assert module is not None
            groups.append(module)
        if run:
            groups.append(OperationFuser(run, self.fusions))
        self._grouped, self._groups = modules, groups
        only = groups[0] if len(groups) == 1 else None
        self._only = only if isinstance(only, OperationFuser) else None
        return groups

    def _check_extra_count(self, groups: Iterable[Group], given: int) -> None:
        pipelines = [g for g in groups if isinstance(g, OperationFuser)]
        wanted = sum(pipeline.num_extra_inputs for pipeline in pipelines)
        if given != wanted:
            who = ", ".join(
                f"{type(op).__name__} {op.num_extra_inputs}"
                for pipeline in pipelines
                for op in pipeline.basic_ops
                if op.num_extra_inputs
            )
            raise InputError(
                f"The Sequential takes {wanted} extra inputs and got {given}"
                f"{': ' + who if who else ''}."
            )

    def _kwargs_by_op(
        self, op_kwargs: Mapping[Any, dict[str, Any]]
    ) -> dict[torch.nn.Module, dict[str, Any]]:
        modules = list(self)
        known = {
            op for g in self._pipelines() if isinstance(g, OperationFuser) for op in g.basic_ops
        }
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
            if isinstance(group, OperationFuser):
                taken, extra_inputs = (
                    extra_inputs[: group.num_extra_inputs],
                    extra_inputs[group.num_extra_inputs :],
                )
                plans.append(group.plan(x, *taken, training=training))
                if number + 1 < len(groups):
                    x = group.output_like(x, *taken)
            else:
                x = _shape_only(group, x)
        if not plans:
            raise InputError("This Sequential holds no fusible op, so there is nothing to plan.")
        return merged(plans)

    @property
    def plans(self) -> tuple[FusionPlan, ...]:
        """Every plan cached so far, of every pipeline here."""
        pipelines = [g for g in self._pipelines() if isinstance(g, OperationFuser)]
        return tuple(plan for pipeline in pipelines for plan in pipeline.plans)


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
