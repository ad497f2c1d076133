"""Linears that a forward calls with one tensor, such as those of queries, keys and values.

The forward stays the module's own. Where it calls the first of them, one product computes the
outputs of all; the others return theirs if they are called with the same tensor.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch

from fuser.conversion.modules import child_of, forward_of
from fuser.op import autocast_dtype
from fuser.op.graph_operations import define
from fuser.precision.contexts import current_recipe


class SharedProduct:
    """The product of linears with one input, during a call of their owner's forward.

    ``names`` are in the order of the calls. ``product`` computes the outputs of all, side by side,
    from the owner and the input.
    """

    def __init__(
        self, names: Sequence[str], product: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
    ) -> None:
        self.names = tuple(names)
        self._product = product
        self._owner: torch.nn.Module | None = None
        # The input, the conditions of its product, and the outputs that are left. One tuple:
        # another thread reads all of it or nothing.
        self._known: tuple[torch.Tensor, tuple[object, ...], dict[str, Any]] | None = None

    def during(
        self,
        owner: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        keywords: dict[str, Any],
    ) -> Any:
        """The owner's own forward, in which the linears share products."""
        self._owner = owner
        try:
            return forward(owner, *args, **keywords)
        finally:  # also of a call in another thread, whose linears go on alone
            self._owner = None
            self._known = None

    def output_of(
        self, name: str, linear: torch.nn.Module, args: Sequence[Any], keywords: dict[str, Any]
    ) -> torch.Tensor | None:
        """The output of a linear for such a call; None if it has to compute that itself.

        So has one that is not the owner's child ``name`` any more.
        """
        owner = self._owner
        if owner is None or len(args) != 1 or keywords or not isinstance(args[0], torch.Tensor):
            return None
        if child_of(owner, name) is not linear:
            return None
        (x,) = args
        if not torch.compiler.is_compiling() and x.is_inference():
            return None  # a write to it would go unseen, for it counts none
        conditions = _conditions(x)
        if name == self.names[0]:
            linears = [child_of(owner, linear) for linear in self.names]
            whole, columns = self._product(owner, x), [linear.weight.shape[0] for linear in linears]
            parts = _SplitColumns.apply(whole, columns)  # type: ignore[no-untyped-call]
            pairs = zip(parts, map(_versions, linears), strict=True)
            outputs = dict(zip(self.names, pairs, strict=True))
            self._known = (x, conditions, outputs)
        known = self._known
        if known is None or known[0] is not x or known[1] != conditions:
            return None
        output, versions = known[2].pop(name, (None, ()))
        return output if versions == _versions(child_of(owner, name)) else None


class _SplitColumns(torch.autograd.Function):
    """Columns of a tensor as tensors of their own: a forward may view an output in any shape."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, columns: list[int]) -> tuple[torch.Tensor, ...]:
        parts = torch.split(whole, columns, dim=-1)
        return tuple([part.clone(memory_format=torch.contiguous_format) for part in parts])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return _side_by_side(list(grads)), None
        return torch.cat(grads, dim=-1), None


def _beside(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts), dim=-1)


# inductor writes a concatenation in the kernel that computes its parts: 0.37 ms for the gradients
# of queries, keys and values of Llama-3-8B on an H200 (docs/dev/facts.md), whose bytes take 0.05.
_side_by_side = define("side_by_side(Tensor[] parts) -> Tensor", _beside, _beside)


def _conditions(x: torch.Tensor) -> tuple[object, ...]:
    """What a product of ``x`` depends on besides weights."""
    if torch.compiler.is_compiling():
        return (torch.is_grad_enabled(),)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, autocast_dtype(x.device.type), current_recipe(), x._version


def _versions(linear: Any) -> tuple[int, ...]:
    """The numbers of writes to the parameters of a linear, except in a graph and in inference."""
    if torch.compiler.is_compiling():
        return ()
    return tuple([p._version for p in linear.parameters() if not p.is_inference()])


def shared_inputs(module: torch.nn.Module, linears: Iterable[str]) -> list[tuple[str, ...]]:
    """The names of children, of ``linears``, that a forward calls with one variable, in order.

    Read in its source: calls such as ``self.q_proj(hidden_states)`` that every call of the forward
    makes once, where no statement between them could change the values of the variable's tensor.
    """
    return _read(forward_of(module), frozenset(linears))


@functools.lru_cache(maxsize=64)
def _read(forward: Callable[..., Any], linears: frozenset[str]) -> list[tuple[str, ...]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return []
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return []
    source = _ForwardSource(function.args.args[0].arg, linears)
    calls = [call for node in ast.walk(function) if (call := source.call(node))]
    times = Counter(name for name, _ in calls)
    aliases: dict[str, set[str]] = {}
    open_groups: dict[str, list[str]] = {}
    groups: list[list[str]] = []
    for statement in function.body:
        members = source.members(statement)
        read, stored = source.values_read(statement), _stored(statement)
        if members is None:  # it may write to any tensor, or end the forward
            members = []
            open_groups.clear()
        for variable in list(open_groups):
            if variable in read or not read.isdisjoint(aliases.get(variable, ())):
                del open_groups[variable]  # by what reads it, it may have other values
        for name, variable in members:
            if variable not in read and times[name] == 1:
                if variable not in open_groups:
                    groups.append(open_groups.setdefault(variable, []))
                open_groups[variable].append(name)
        for variable in stored:
            open_groups.pop(variable, None)
        for variable in read | aliases.keys():
            names = aliases.setdefault(variable, set())
            if variable in read or not names.isdisjoint(read):
                names |= stored
    return [tuple(names) for names in groups if len(names) > 1]


_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
_UNSURE = (
    *(ast.IfExp, ast.BoolOp, ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_WRITING = {"out", "inplace"}
_OF_SHAPES = ("shape", "dtype", "device", "ndim", "size", "dim", "numel")


class _ForwardSource:
    """Statements of a forward, whose first argument and whose linears have these names."""

    def __init__(self, owner: str, linears: frozenset[str]) -> None:
        self._owner, self._linears = owner, linears

    def members(self, statement: ast.stmt) -> list[tuple[str, str]] | None:
        """The calls of linears with a variable, all of which run with the statement.

        None if a part of it may not run, or is seen to write to a tensor.
        """
        members = []
        if not isinstance(statement, _SIMPLE):
            return None
        for node in ast.walk(statement):
            if isinstance(node, _UNSURE):
                return None
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                return None
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name.endswith("_") or {k.arg for k in node.keywords} & _WRITING:
                    return None
                if (call := self.call(node)) and call[1]:
                    members.append(call)
        return members

    def call(self, node: Any) -> tuple[str, str] | None:
        """The linear that is called, and the variable that is its only argument."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        is_own = _is_name(node.func.value, ast.Load) and node.func.value.id == self._owner
        if not is_own or node.func.attr not in self._linears:
            return None
        alone = node.args[0] if len(node.args) == 1 and not node.keywords else None
        return node.func.attr, alone.id if _is_name(alone, ast.Load) else ""

    def values_read(self, statement: ast.stmt) -> set[str]:
        """The variables that it reads, but for sizes and what linears are called with."""
        skipped = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and (call := self.call(node)) and call[1]:
                skipped.add(id(node.args[0]))
            if isinstance(node, ast.Attribute) and node.attr in _OF_SHAPES:
                skipped.add(id(node.value))
        names = [node for node in ast.walk(statement) if _is_name(node, ast.Load)]
        return {node.id for node in names if id(node) not in skipped} - {self._owner}


def _stored(statement: ast.stmt) -> set[str]:
    """The variables that a statement gives a value, and the functions that it defines."""
    nodes = list(ast.walk(statement))
    functions = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    return functions | {n.id for n in nodes if _is_name(n, ast.Store)}


def _is_name(node: Any, context: type[ast.expr_context]) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, context)
