"""Error messages that name the op or the fusion that made a plan's step fail."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from fuser.errors import FuserError, FuserWarning, StateError
from fuser.functional.lazy import LazyTensor
from fuser.op import BasicOperation, FusibleOperation, OperationContext, method_of
from fuser.specs import TensorSpec
from fuser.tensors import Quantizer
from fuser.torch_private import functorch_transform

Steps = Mapping[str, Sequence[tuple[FusibleOperation, tuple[int, ...]]]]
"""The steps of forward and backward: each an op or a fusion, with its basic ops."""


def explain_forward(
    ops: Sequence[BasicOperation],
    steps: Steps,
    autocast: torch.dtype | None,
    error: Exception,
    step: int,
    x: torch.Tensor,
) -> None:
    """Raise an error that names the op which made a forward fail: by what it returned or got.

    ``x`` is the main input of the step. Where torch refused it, the ops of the step are asked
    whether they can take it at all. So an op that fails by itself on a wrong shape need not check
    shapes at every call.
    """
    if isinstance(error, FuserError):
        return
    if not isinstance(x, torch.Tensor):
        refuse_output(steps["forward"][step - 1][0], x)
    if not isinstance(error, RuntimeError):
        return
    spec: TensorSpec | None = TensorSpec(tuple(x.shape), x.dtype)
    for i in steps["forward"][step][1]:
        if spec is None or ops[i].num_extra_inputs:
            return
        spec = ops[i].output_spec(spec, (), autocast)


def refuse_param_grads(
    ops: Sequence[BasicOperation], counts: Sequence[int], rows: Sequence[Sequence[object] | None]
) -> None:
    """Raise an error that names the op whose backward returned a wrong number of gradients."""
    for index, (op, count, row) in enumerate(zip(ops, counts, rows, strict=True)):
        if len(row or ()) != count:
            raise StateError(
                f"Op {index} ({type(op).__name__}) has {count} parameters, and its backward "
                f"returned {len(row or ())} gradients for them."
            )


_warned: set[type[BasicOperation]] = set()


def note_extra_outputs(
    op: BasicOperation,
    entering: tuple[torch.Size, torch.dtype],
    extras: Sequence[torch.Tensor | None],
) -> None:
    """Warn, once for each class, if extra outputs differ from what plans assume: the op's input.

    ``entering`` are shape and dtype of that input. Results are correct; the bytes in the plan, and
    the choice of fusions that depends on them, are not.
    """
    for k, tensor in enumerate(extras):
        if tensor is None or (tensor.shape, tensor.dtype) == entering or type(op) in _warned:
            continue
        _warned.add(type(op))
        name = type(op).__name__
        warnings.warn(
            f"Extra output {k} of {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, and "
            f"plans count it like the input, {entering[1]} of shape {tuple(entering[0])}. Give "
            f"{name} a method extra_output_specs(spec, extras), which returns a TensorSpec(shape, "
            "dtype) for each extra output.",
            FuserWarning,
            stacklevel=2,
        )


def refuse_output(op: FusibleOperation, output: object) -> NoReturn:
    """Raise an error that names the method whose output is not a tensor."""
    method, kind = f"{type(op).__name__}.{method_of(op, 'forward')}", type(output).__name__
    raise StateError(f"The output of {method} must be a tensor; it is a {kind}.")


def check_grad_input(op: FusibleOperation, grad_input: object) -> None:
    """Raise an error that names the method whose gradient of the input is not a tensor."""
    if grad_input is not None and not isinstance(grad_input, (torch.Tensor, LazyTensor)):
        method, kind = f"{type(op).__name__}.{method_of(op, 'backward')}", type(grad_input).__name__
        raise StateError(f"The grad_input of {method} must be a tensor or None; it is a {kind}.")


def explain_backward(
    ops: Sequence[BasicOperation],
    steps: Steps,
    autocast: torch.dtype | None,
    error: Exception,
    step: int,
    contexts: Sequence[OperationContext],
    dx: Any,
) -> None:
    """Raise an error that names the op or fusion, if its result made a backward fail.

    Such a result is a gradient of another shape than its tensor, or comes from a fused forward
    that did not save the tensors that the backward of an op unpacks.
    """
    if isinstance(error, FuserError):
        return
    window = steps["backward"][step][1]
    first = contexts[0].__dict__.get("first_shapes")
    if step and first is not None and isinstance(dx, torch.Tensor):
        spec: TensorSpec | None = TensorSpec(first[0], contexts[0].input_dtype)
        for op in ops[: window[-1] + 1]:
            if spec is not None:
                spec = None if op.num_extra_inputs else op.output_spec(spec, (), autocast)
        if spec is not None:
            _check_shape(f"Op {_origin(ops, window[-1] + 1)}", dx, "its input", spec.shape)
    is_missing = "to unpack" in str(error) or "Saved.__new__() " in str(error)
    for i in window if is_missing else ():
        ran, of = next(run for run in steps["forward"] if i in run[1])
        saved = contexts[i].saved_tensors
        if len(of) > 1 and of != window and saved is not None:
            raise StateError(
                f"The backward of op {i} ({type(ops[i]).__name__}) failed ({error}): "
                f"{type(ran).__name__}.{method_of(ran, 'forward')} ran its forward, and saved "
                f"{len(saved)} tensors in its context."
            ) from error


def check_grad_shapes(
    ops: Sequence[BasicOperation],
    inputs: Sequence[tuple[int, ...] | None],
    params: Sequence[Sequence[tuple[int, ...] | None]],
    grads: Sequence[torch.Tensor | None],
) -> None:
    """Raise an error that names the op that returned a gradient of a wrong shape.

    ``grads`` are the gradients that a pipeline returns: of its input, of parameters op by op, and
    of extra inputs. ``inputs`` and ``params`` are the shapes of these tensors, None for
    a tensor that needs no gradient.
    """
    tensors = [(f"Op {_origin(ops, 0)}", "its input", inputs[0])]
    for i, (op, shapes) in enumerate(zip(ops, params, strict=True)):
        name = f"Op {i} ({type(op).__name__})"
        tensors += [(name, f"its parameter {k}", shape) for k, shape in enumerate(shapes)]
    tensors += [("An op", f"extra input {k}", shape) for k, shape in enumerate(inputs[1:])]
    for (owner, tensor, shape), grad in zip(tensors, grads, strict=True):
        if grad is not None and shape is not None:
            _check_shape(owner, grad, tensor, shape)


def _check_shape(owner: str, grad: object, tensor: str, shape: tuple[int, ...]) -> None:
    """Raise if a gradient is no tensor, or autograd cannot sum it to the shape of its tensor."""
    if not isinstance(grad, torch.Tensor):
        raise StateError(
            f"{owner} returned a {type(grad).__name__} as the gradient of {tensor}, which must be "
            "a tensor or None."
        )
    grad_shape = tuple(grad.shape)
    last = zip(reversed(shape), reversed(grad_shape), strict=False)
    if len(shape) > len(grad_shape) or any(size not in (1, summed) for size, summed in last):
        raise StateError(
            f"{owner} returned a gradient of shape {grad_shape} for {tensor}, which has shape "
            f"{shape}."
        )


def _origin(ops: Sequence[BasicOperation], index: int) -> str:
    """The op that made the gradient that op ``index`` returned, which may have passed it on."""
    while index + 1 < len(ops) and ops[index].passes_gradient_on:
        index += 1
    return f"{index} ({type(ops[index]).__name__})"


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
"""Transforms of torch.func that cannot contain a pipeline, and alternatives."""


def refuse_second_derivative() -> NoReturn:
    """Refuse a backward with ``create_graph=True`` before it runs.

    A gradient that it returned would look like a constant to a second derivative.
    """
    raise StateError(
        "A fuser pipeline cannot be differentiated twice, and this backward was asked for with "
        "create_graph=True: the backward runs fused operations that have no derivative of their "
        "own. For second derivatives of a converted module take the first gradient with "
        "torch.func.grad or torch.func.vjp, under which it runs its own forward, unquantized; "
        "compute other pipelines with plain torch modules."
    )


def refuse_batched_gradients(error: BaseException) -> NoReturn:
    """Refuse a backward that ``error`` has ended because it got many gradients at once."""
    raise StateError(
        "A fuser pipeline that quantizes or runs kernels takes one gradient at a time, and this "
        "backward got a batch of them, from torch.autograd.grad(is_grads_batched=True) or "
        "jacobian(vectorize=True). Call torch.autograd.grad for each gradient, with "
        "retain_graph=True, or use vectorize=False."
    ) from error


def refuse_transform() -> NoReturn:
    """Raise an error that names the transform around a pipeline; forward_ad if there is none."""
    transform = "torch.autograd.forward_ad: use backward mode, or a torch module here"
    kind = functorch_transform()
    if kind is not None:
        transform = TRANSFORMS.get(kind, f"torch.func's {kind}: call it outside")
    raise StateError(
        "A fuser pipeline runs fused operations with a backward of their own, which torch cannot "
        f"transform. It was called under {transform}."
        " Use plain torch modules under it."
    )


def refuse_other_kinds(
    ops: Sequence[BasicOperation],
    saving: Iterable[int],
    ends: Sequence[int],
    kept: list[Any],
    returned: list[Any],
) -> None:
    """Raise an error that names the op whose saved tensors did not come back as they were saved.

    ``saving`` are the ops that save, and ``ends`` the end of the tensors of each.
    """
    for position, (before, after) in enumerate(zip(kept, returned, strict=True)):
        # Delayed scaling's quantizers hold a scale, which is always that of their forward.
        if before == after:
            continue
        is_alike = type(before) is type(after) and isinstance(after, Quantizer)
        if not (is_alike and before.format == after.format and after.state_tensors()):
            index = next(i for i, end in zip(saving, ends, strict=True) if position < end)
            was, now = ("unquantized" if kind is None else str(kind) for kind in (before, after))
            raise StateError(
                f"Op {index} ({type(ops[index]).__name__}) saved a tensor in its forward as "
                f"{was}, and got it back as {now}. If activation checkpointing recomputed it, "
                "enter fuser.autocast inside the checkpointed function; if a saved-tensor hook "
                "packed it, that must give it back as it was."
            )
