"""Sentences that name the op or the fusion because of which a plan's step failed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from fuser.errors import FuserError, StateError
from fuser.op import BasicOperation, FusibleOperation
from fuser.specs import TensorSpec
from fuser.tensors import Float8Quantizer


def explain_shape_error(
    windows: Sequence[Sequence[BasicOperation]],
    autocast: torch.dtype | None,
    step: int,
    x: torch.Tensor,
    error: RuntimeError,
) -> None:
    """Ask the ops of a step that torch refused to run whether they can take ``x`` at all.

    An op that fails by itself on a wrong shape need not look at it at every call.
    """
    if isinstance(error, FuserError):
        return
    spec: TensorSpec | None = TensorSpec(tuple(x.shape), x.dtype)
    for op in windows[step]:
        if spec is None or op.num_extra_inputs:
            return
        spec = op.output_spec(spec, (), autocast)


def refuse_param_grads(
    ops: Sequence[BasicOperation], wanted: Sequence[int], rows: Sequence[Sequence[Any] | None]
) -> None:
    """Name the op whose backward returned another number of gradients than it has parameters."""
    for index, (op, count, row) in enumerate(zip(ops, wanted, rows, strict=True)):
        if len(row or ()) != count:
            raise StateError(
                f"Op {index} ({type(op).__name__}) has {count} parameters, and its backward "
                f"returned {len(row or ())} gradients for them."
            )


_warned: set[type[BasicOperation]] = set()


def note_extra_outputs(
    op: BasicOperation,
    entering: tuple[torch.Size, torch.dtype],
    made: Sequence[torch.Tensor | None],
) -> None:
    """Warn, once for a class, of extra outputs that plans take for tensors like the op's input.

    ``entering`` are shape and dtype of that input. Results are right; bytes in the plan, and the
    choice of fusions that follows from them, are not.
    """
    for k, tensor in enumerate(made):
        if tensor is None or (tensor.shape, tensor.dtype) == entering or type(op) in _warned:
            continue
        _warned.add(type(op))
        name = type(op).__name__
        warnings.warn(
            f"Extra output {k} of {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, and "
            f"plans count it like the input, {entering[1]} of shape {tuple(entering[0])}. Give "
            f"{name} a method extra_output_specs(spec), which returns a TensorSpec(shape, dtype) "
            "for each extra output.",
            stacklevel=2,
        )


RESULTS = {
    "op_backward": ("grad_input", "param_grads"),
    "fuser_forward": ("output", "extra_outputs"),
    "fuser_backward": ("grad_input", "param_grads", "grad_extra_inputs"),
}
"""What methods of ops return that a plan takes apart."""


def check_result(
    methods: Sequence[tuple[str, str]], owners: Mapping[str, int], at: Mapping[str, Any]
) -> None:
    """Name the method whose result a plan could not take apart, if that is why it failed.

    ``at`` are the names of the plan where it failed, ``methods`` class and method of each step. A
    tensor may come apart into its rows, and fail later: ``owners`` are the steps by the names of
    what must not be a tensor.
    """
    step, result = at["step"], at["result"]
    for name in ("made", "params", "extras", *owners):
        if isinstance(at.get(name), torch.Tensor):
            step, result = owners.get(name, step), at[name]
    cls, method = methods[step]
    wanted = RESULTS.get(method, ())
    is_apart = isinstance(result, (tuple, list)) and len(result) in (0, len(wanted))
    if not is_apart:
        found = type(result).__name__
        if isinstance(result, (tuple, list)):
            found = f"{found} of {len(result)}"
        raise StateError(f"{cls}.{method} returns ({', '.join(wanted)}); it returned a {found}.")


def refuse_no_output(op: FusibleOperation, indices: tuple[int, ...]) -> None:
    raise StateError(
        f"The forward of {type(op).__name__} (ops {indices[0]} to {indices[-1]}) returned None; it "
        "must return the output."
    )


def refuse_dropped(op: FusibleOperation, indices: tuple[int, ...]) -> None:
    raise StateError(
        f"The backward of {type(op).__name__} (ops {indices[0]} to {indices[-1]}) returned no "
        "gradient for its input, and ops before it need one."
    )


TRANSFORMS = {
    "Grad": "torch.func.grad, vjp, jacrev or hessian: use torch.autograd.grad, or backward()",
    "Vmap": "torch.func.vmap: give it the whole batch, whose leading dimensions are rows to it",
    "Jvp": "torch.func.jvp or jacfwd: use torch.autograd.functional.vjp, or a torch module here",
}
"""Transforms of torch.func that no pipeline can be under, and what to do instead."""


def refuse_transform() -> NoReturn:
    """Name the transform under which a pipeline was called; that of forward_ad if there is none."""
    what = "torch.autograd.forward_ad: use backward mode, or a torch module here"
    if torch._C._are_functorch_transforms_active():
        kind = torch._C._functorch.peek_interpreter_stack().key().name
        what = TRANSFORMS.get(kind, f"torch.func's {kind}: call it outside")
    raise StateError(
        "A fuser pipeline runs fused operations with a backward of their own, which torch cannot "
        f"transform. It was called under {what}."
    )


def refuse_other_kinds(
    ops: Sequence[BasicOperation],
    saving: Iterable[int],
    ends: Sequence[int],
    kept: list[Any],
    found: list[Any],
) -> None:
    """Name the op whose saved tensors came back otherwise than they were saved.

    ``saving`` are the ops that save, and ``ends`` where the tensors of each end.
    """
    for position, (before, after) in enumerate(zip(kept, found, strict=True)):
        # Delayed scaling's quantizers hold a scale, which is its forward's in any case.
        is_delayed = isinstance(before, Float8Quantizer) and isinstance(after, Float8Quantizer)
        if before != after and not (is_delayed and before.format == after.format):
            index = next(i for i, end in zip(saving, ends, strict=True) if position < end)
            was, now = ("unquantized" if kind is None else str(kind) for kind in (before, after))
            raise StateError(
                f"Op {index} ({type(ops[index]).__name__}) saved a tensor in its forward as "
                f"{was}, and got it back as {now}. If activation checkpointing recomputed it, "
                "enter fuser.autocast inside the checkpointed function; if a saved-tensor hook "
                "packed it, that must give it back as it was."
            )
