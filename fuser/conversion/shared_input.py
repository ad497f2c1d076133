"""Linears that a forward calls with one tensor, such as those of queries, keys and values.

The forward stays the module's own. Where it calls the first of them, one product computes the
outputs of all; the others return theirs if they are called with the same tensor.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fuser.conversion.modules import child_of, forward_of
from fuser.op import autocast_dtype
from fuser.op.graph_operations import define
from fuser.precision.contexts import current_recipe


class SharedProduct:
    """The product of linears with one input, during a call of their owner's forward.

    Parameters
    ----------
    names
        Of the linears in their owner, in the order of their calls.
    product
        Computes the outputs of all, side by side, from the owner and the input.
    """

    def __init__(
        self, names: Sequence[str], product: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
    ) -> None:
        self.names = tuple(names)
        self._product = product
        self._owner: torch.nn.Module | None = None
        # The input, the conditions of its product, and the outputs that nobody has taken yet. One
        # tuple, so that another thread reads all of it or nothing.
        self._known: tuple[torch.Tensor, tuple[object, ...], dict[str, torch.Tensor]] | None = None

    def during(
        self,
        owner: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        keywords: dict[str, Any],
    ) -> Any:
        """The owner's own forward, in which the linears share products."""
        before = self._owner
        self._owner = owner
        try:
            return forward(owner, *args, **keywords)
        finally:
            self._owner = before
            self._known = None

    def output_of(
        self, name: str, args: Sequence[Any], keywords: dict[str, Any]
    ) -> torch.Tensor | None:
        """The output of a linear for such a call; None if it has to compute that itself."""
        owner = self._owner
        if owner is None or len(args) != 1 or keywords or not isinstance(args[0], torch.Tensor):
            return None
        (x,) = args
        conditions = _conditions(x)
        if name == self.names[0]:
            whole = self._product(owner, x)
            rows = [child_of(owner, each).weight.shape[0] for each in self.names]
            parts = _Parts.apply(whole, rows)  # type: ignore[no-untyped-call]
            outputs = dict(zip(self.names, parts, strict=True))
            self._known = (x, conditions, outputs)
        known = self._known
        if known is None or known[0] is not x or known[1] != conditions:
            return None
        return known[2].pop(name, None)


class _Parts(torch.autograd.Function):
    """Columns of a tensor as tensors of their own: a forward may view an output in any shape."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, columns: list[int]) -> tuple[torch.Tensor, ...]:
        return tuple([part.contiguous() for part in torch.split(whole, columns, dim=-1)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return _side_by_side(list(grads)), None
        return torch.cat(grads, dim=-1), None


def _beside(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts), dim=-1)


# inductor would write these with what computes them, in a kernel that takes five times as long.
_side_by_side = define("side_by_side(Tensor[] parts) -> Tensor", _beside, _beside)


def _conditions(x: torch.Tensor) -> tuple[object, ...]:
    """What a product of ``x`` depends on besides weights."""
    if torch.compiler.is_compiling():
        return (torch.is_grad_enabled(),)
    version = None if x.is_inference() else x._version
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, autocast_dtype(x.device.type), current_recipe(), version


def shared_inputs(module: torch.nn.Module) -> list[tuple[str, ...]]:
    """The names of children that a module's forward calls with one variable, in order.

    Read in its source: calls such as ``self.q_proj(hidden_states)`` that every call of the forward
    makes once, with no other value of the variable between them.
    """
    return _read(forward_of(module))


@functools.lru_cache(maxsize=64)
def _read(forward: Callable[..., Any]) -> list[tuple[str, ...]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return []
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return []
    owner = function.args.args[0].arg
    times: dict[str, int] = {}
    for name, _ in _calls(ast.walk(function), owner):
        times[name] = times.get(name, 0) + 1
    by_variable: dict[str, list[str]] = {}
    for statement in function.body:
        nodes = list(_always_run(statement))
        for name, variable in _calls(nodes, owner):
            if variable and times[name] == 1:
                by_variable.setdefault(variable, []).append(name)
        for variable in _written(ast.walk(statement)) & by_variable.keys():
            by_variable[f"{variable} before {statement.lineno}"] = by_variable.pop(variable)
    return [tuple(names) for names in by_variable.values() if len(names) > 1]


def _calls(nodes: Iterator[ast.AST] | list[ast.AST], owner: str) -> Iterator[tuple[str, str]]:
    """Each call of an attribute of ``owner``: its name, and the variable that is its argument."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == owner:
            alone = node.args[0] if len(node.args) == 1 and not node.keywords else None
            yield node.func.attr, alone.id if isinstance(alone, ast.Name) else ""


_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
_CONDITIONAL = (ast.IfExp, ast.BoolOp, ast.Lambda)
_REPEATED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _always_run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement, in the order of the text, that run once whenever it is reached."""
    if isinstance(node, ast.stmt) and not isinstance(node, _SIMPLE):
        return
    if isinstance(node, (*_CONDITIONAL, *_REPEATED)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _always_run(child)


def _written(nodes: Iterator[ast.AST]) -> set[str]:
    """The variables that get another value, or whose tensor a method writes to."""
    written = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            written.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            is_in_place = node.attr.endswith("_") and not node.attr.endswith("__")
            written |= {node.value.id} if is_in_place else set()
    return written
