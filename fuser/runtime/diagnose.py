"""Error messages that name the op or the fusion that made a plan's step fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from fuser.errors import FuserError, FuserWarning, StateError
from fuser.op import BasicOperation, FusibleOperation
from fuser.specs import TensorSpec
from fuser.tensors import Quantizer
from fuser.torch_private import functorch_transform


def explain_shape_error(
    windows: Sequence[Sequence[BasicOperation]],
    autocast: torch.dtype | None,
    step: int,
    x: torch.Tensor,
    error: RuntimeError,
) -> None:
    """Ask the ops of a step that torch refused to run whether they can take ``x`` at all.

    So an op that fails by itself on a wrong shape need not check shapes at every call.
    """
    if isinstance(error, FuserError):
        return
    spec: TensorSpec | None = TensorSpec(tuple(x.shape), x.dtype)
    for op in windows[step]:
        if spec is None or op.num_extra_inputs:
            return
        spec = op.output_spec(spec, (), autocast)


def refuse_param_grads(
    ops: Sequence[BasicOperation], counts: Sequence[int], rows: Sequence[Sequence[Any] | None]
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


RESULTS = {
    "op_backward": ("grad_input", "param_grads"),
    "fuser_forward": ("output", "extra_outputs"),
    "fuser_backward": ("grad_input", "param_grads", "grad_extra_inputs"),
}
"""The parts of the results of ops' methods, which a plan unpacks."""


def check_result(
    methods: Sequence[tuple[str, str]], owners: Mapping[str, int], at: Mapping[str, Any]
) -> None:
    """Raise an error that names the method whose result a plan could not unpack, if that failed.

    ``at`` are the local names of the plan where it failed, ``methods`` class and method of each
    step. A tensor may be unpacked into its rows, and fail later: ``owners`` gives the step for
    each name that must not be a tensor.
    """
    step, result = at["step"], at["result"]
    for name in ("made", "params", "extras", *owners):
        if isinstance(at.get(name), torch.Tensor):
            step, result = owners.get(name, step), at[name]
    cls, method = methods[step]
    names = RESULTS.get(method, ())
    is_apart = isinstance(result, (tuple, list)) and len(result) in (0, len(names))
    if not is_apart:
        form = type(result).__name__
        if isinstance(result, (tuple, list)):
            form = f"{form} of {len(result)}"
        raise StateError(f"{cls}.{method} returns ({', '.join(names)}); it returned a {form}.")


def check_forward(
    check: Callable[[Mapping[str, Any]], None],
    methods: Sequence[tuple[str, str]],
    at: dict[str, Any],
) -> None:
    """Raise an error that names the method, if its result made a forward fail."""
    try:
        check(at)
        result = at["result"]
        is_unpacked = isinstance(result, tuple) and not result
        if not isinstance(at["error"], FuserError) and not isinstance(at["x"], torch.Tensor):
            refuse_output(methods[at["step"] - is_unpacked], at["x"])
    finally:
        at.clear()  # the frame keeps it, and with the error it would be a cycle


def refuse_output(method: tuple[str, str], output: Any) -> NoReturn:
    """Raise an error that names the method whose output is not a tensor."""
    kind = type(output).__name__
    raise StateError(f"The output of {'.'.join(method)} must be a tensor; it is a {kind}.")


def check_backward(
    check: Callable[[Mapping[str, Any]], None],
    ops: Sequence[BasicOperation],
    methods: Mapping[str, Sequence[tuple[str, str]]],
    windows: Mapping[str, Sequence[tuple[int, ...]]],
    autocast: torch.dtype | None,
    at: dict[str, Any],
) -> None:
    """Raise an error that names the op or fusion, if its result made a backward fail.

    Such a result has another form, or is a gradient of another shape than its tensor, or comes
    from a fused forward that did not save the tensors that the backward of an op unpacks.
    ``methods`` and ``windows`` are those of the steps of both sides.
    """
    try:
        check(at)
        error, step, contexts, dx = (at[name] for name in ("error", "step", "contexts", "dx"))
    finally:
        at.clear()  # the frame keeps it, and with the error it would be a cycle
    has_sentence = isinstance(error, FuserError)
    if has_sentence:
        return
    window = windows["backward"][step]
    first = contexts[0].__dict__.get("first_shapes")
    if step and first is not None and isinstance(dx, torch.Tensor):
        spec: TensorSpec | None = TensorSpec(first[0], contexts[0].input_dtype)
        for op in ops[: window[-1] + 1]:
            if spec is not None:
                spec = None if op.num_extra_inputs else op.output_spec(spec, (), autocast)
        if spec is not None:
            _check_shape(f"Op {_origin(ops, window[-1] + 1)}", dx, "its input", spec.shape)
    for i in window:
        place = next(n for n, ran in enumerate(windows["forward"]) if i in ran)
        cls, method = methods["forward"][place]
        saved = contexts[i].saved_tensors
        is_fused = len(windows["forward"][place]) > 1 and windows["forward"][place] != window
        is_missing = "to unpack" in str(error) or "Saved.__new__() " in str(error)
        if is_fused and saved is not None and is_missing:
            raise StateError(
                f"The backward of op {i} ({type(ops[i]).__name__}) failed ({error}): "
                f"{cls}.{method} ran its forward, and saved {len(saved)} tensors in its context."
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


def _check_shape(owner: str, grad: torch.Tensor, tensor: str, shape: tuple[int, ...]) -> None:
    """Raise if autograd cannot sum a gradient to the shape of its tensor."""
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

    Raises
    ------
    StateError
        Always.
    """
    raise StateError(
        "A fuser pipeline cannot be differentiated twice, and this backward was asked for with "
        "create_graph=True: the backward runs fused operations that have no derivative of their "
        "own. For second derivatives of a converted module take the first gradient with "
        "torch.func.grad or torch.func.vjp, under which it runs its own forward, unquantized; "
        "compute other pipelines with plain torch modules."
    )


def refuse_batched_gradients(error: BaseException) -> NoReturn:
    """Refuse a backward that ``error`` has ended because it got many gradients at once.

    Raises
    ------
    StateError
        Always.
    """
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
