"""Running a plan: the straight-line Python it means, as one autograd node.

A plan is walked the same way at every call, so it is written out once: ``Run``
generates one forward and one backward function with every step, context and
extra tensor named. ``Run.source`` is what runs, and tracebacks show it. Against
a loop over steps this saves 5 us of the 110 us that a training step of
Linear-GELU-Linear on 16x128 takes on a CPU.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

import torch

from fuser.errors import StateError
from fuser.graph import Source
from fuser.op import BasicOperation, FusibleOperation, OperationContext
from fuser.plan import FusionPlan
from fuser.plan_key import PlanKey
from fuser.precision import claim_gradient_update, update_delayed_scales
from fuser.recipe import DelayedScaling

_plan_numbers = itertools.count()

PlannedOps = Sequence[tuple[FusibleOperation, tuple[int, ...]]]


class Run:
    """A plan ready to be called.

    Parameters
    ----------
    plan, key
        The plan, and the key it was made for.
    ops, sources, param_counts
        The pipeline's basic ops, where their extra inputs come from, and how
        many parameters each has.
    forward, backward
        The operations in the order they run, with their basic-op indices.
    """

    def __init__(
        self,
        plan: FusionPlan,
        key: PlanKey,
        ops: Sequence[BasicOperation],
        sources: Sequence[tuple[Source, ...]],
        param_counts: Sequence[int],
        forward: PlannedOps,
        backward: PlannedOps,
    ) -> None:
        self.plan = plan
        self.key = key
        self.requires_grad = [op.requires_grad for op in key.ops]
        self.needs_backward = key.requires_grad
        self.is_delayed = isinstance(key.recipe, DelayedScaling)
        # Every extra output; which of them the caller gets, and needs no gradient for.
        self.places = [(i, k) for i, op in enumerate(ops) for k in range(op.num_extra_outputs)]
        self.returned = [
            n for n, (i, k) in enumerate(self.places) if ops[i].returns_extra_output(k)
        ]
        writer = _Writer(key, ops, sources, param_counts, self.places)
        self.source, self.forward, self.backward = writer.write(forward, backward)
        # A traceback through the generated code shows its lines.
        name, lines = writer.filename, self.source.splitlines(keepends=True)
        linecache.cache[name] = (len(self.source), None, lines, name)
        weakref.finalize(self, linecache.cache.pop, name, None)

    def __call__(
        self,
        input_: torch.Tensor,
        params: Sequence[torch.Tensor],
        extra_inputs: Sequence[torch.Tensor],
        kwargs: list[dict[str, Any]] | None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run forward; under autograd if anything needs a gradient."""
        if self.needs_backward:
            apply = _checked_apply if _is_functorch_active() else _direct_apply
            result: torch.Tensor | tuple[torch.Tensor, ...] = apply(
                (self, kwargs, len(params)), input_, *params, *extra_inputs
            )
            return result
        output, _, produced = self.forward(input_, extra_inputs, kwargs)
        if not self.returned:
            return output  # type: ignore[no-any-return]
        return (output, *(produced[n] for n in self.returned))


class _Writer:
    """Writes a plan out as Python source.

    Names: ``x`` the main line and ``dx`` its gradient; of op i, ``c{i}`` the
    context and ``p{i}`` the gradients of its parameters; ``out{i}_{k}`` and
    ``dout{i}_{k}`` its extra output k and the gradient of it, ``din{i}_{k}``
    the gradient of its extra input k.
    """

    def __init__(
        self,
        key: PlanKey,
        ops: Sequence[BasicOperation],
        sources: Sequence[tuple[Source, ...]],
        param_counts: Sequence[int],
        places: Sequence[tuple[int, int]],
    ) -> None:
        self.key = key
        self.ops = ops
        self.sources = sources
        self.param_counts = param_counts
        self.places = places
        self.filename = f"<fuser plan {next(_plan_numbers)}>"
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"filled": _filled, "total": _total}
        recipe = key.recipe
        split_accumulators = (
            {"split_accumulators": recipe.split_accumulators} if recipe is not None else {}
        )
        for i, (op, op_key) in enumerate(zip(ops, key.ops, strict=True)):
            self.names[f"op{i}"] = op
            # What holds for every call stands on a class of contexts, so that
            # making a context costs nothing more.
            self.names[f"Context{i}"] = type(
                "OperationContext",
                (OperationContext,),
                {
                    "requires_grad": op_key.requires_grad,
                    "input_requires_grad": op_key.input_requires_grad,
                    "autocast_dtype": key.autocast_dtype,
                    "is_quantized": key.recipe is not None,
                    "backward_override": key.recipe and key.recipe.backward_override,
                    "input_dtype": op_key.input_dtype,
                    **split_accumulators,
                },
            )

    def write(self, forward: PlannedOps, backward: PlannedOps) -> tuple[str, Any, Any]:
        """The source, and its two functions."""
        self._write_forward(forward)
        self._write_backward(backward)
        source = "\n".join(self.lines) + "\n"
        exec(compile(source, self.filename, "exec"), self.names)
        # Popped: a function that stands in its own globals is a reference cycle.
        return source, self.names.pop("forward"), self.names.pop("backward")

    def _write_forward(self, steps: PlannedOps) -> None:
        add = self.lines.append
        contexts = "".join(f"c{i}, " for i in range(len(self.ops)))
        makes = "".join(f"Context{i}(), " for i in range(len(self.ops)))
        self.names["no_kwargs"] = [MappingProxyType({})] * len(self.ops)
        add("def forward(x, extra_inputs, kwargs):")
        add("    kwargs = kwargs or no_kwargs")
        add(f"    {contexts}= {makes}")
        for i in range(1, len(self.ops)):
            wanted = self._wanted(i - 1, "grad_output")
            if wanted != "None" and self.key.ops[i].input_requires_grad:
                add(f"    c{i}.grad_input_quantizer = {wanted}")
        for number, (op, indices) in enumerate(steps):
            before, after = self._quantizers(indices)
            add(f"    # {type(op).__name__}")
            if _is_plain(op, "forward"):
                i = indices[0]
                self.names[f"forward{number}"] = op.op_forward
                add(f"    x = forward{number}(c{i}, x, prev_op_grad_output_quantizer={before},")
                add(f"        next_op_input_quantizer={after}, **kwargs[{i}])")
                continue
            self.names[f"forward{number}"] = op.fuser_forward
            extras = ", ".join(self._extra_inputs(i) for i in indices)
            add(f"    x, made = forward{number}([{_contexts(indices)}], x,")
            add(f"        basic_op_extra_inputs=[{extras}],")
            add(f"        prev_op_grad_output_quantizer={before},")
            add(f"        next_op_input_quantizer={after},")
            add(f"        basic_op_kwargs=kwargs[{indices[0]}:{indices[-1] + 1}])")
            counts = [self.ops[i].num_extra_outputs for i in indices]
            checked = self._checked(op, indices, "extra outputs", counts)
            if any(counts):
                add(f"    {_names_of_rows('out', indices, counts)} = {checked}(made)")
            else:
                add(f"    if any(made): {checked}(made)")
        produced = "".join(f"out{i}_{k}, " for i, k in self.places)
        add(f"    return x, ({contexts}), ({produced})")

    def _write_backward(self, steps: PlannedOps) -> None:
        add = self.lines.append
        add("")
        add("def backward(contexts, dx, dout, specs):")
        add(f"    ({''.join(f'c{i}, ' for i in range(len(self.ops)))}) = contexts")
        if self.places:
            add(f"    ({''.join(f'dout{i}_{k}, ' for i, k in self.places)}) = dout")
        covered = {i for _, indices in steps for i in indices}
        for number, (op, indices) in enumerate(steps):
            if _is_plain(op, "backward"):
                i = indices[0]
                self.names[f"backward{number}"] = op.op_backward
                add(f"    # {type(op).__name__}")
                add(f"    dx, p{i} = backward{number}(c{i}, dx)")
                self._add_none_check(op, indices, number + 1 < len(steps))
                continue
            self.names[f"backward{number}"] = op.fuser_backward
            grads = ", ".join(self._extra_output_grads(i) for i in indices)
            params = "".join(f"p{i}, " for i in indices)
            param_counts = [self.param_counts[i] for i in indices]
            checked = self._checked(op, indices, "parameters", param_counts)
            add(f"    # {type(op).__name__}")
            add(f"    dx, params, extras = backward{number}([{_contexts(indices)}], dx,")
            add(f"        basic_op_grad_extra_outputs=[{grads}])")
            add(f"    {params}= params if len(params) == {len(indices)} else {checked}(params)")
            self._add_none_check(op, indices, number + 1 < len(steps))
            counts = [self.ops[i].num_extra_inputs for i in indices]
            if any(counts):
                rows = _names_of_rows("din", indices, counts)
                add(f"    {rows} = {self._checked(op, indices, 'extra inputs', counts)}(extras)")
                self._add_channel_grads(indices)
        flat = ", ".join(
            f"*(p{i} or ())" if i in covered else ", ".join(["None"] * count)
            for i, count in enumerate(self.param_counts)
            if count or i in covered
        )
        rows = "".join(f"p{i}, " if i in covered else "(), " for i in range(len(self.ops)))
        wanted = [n if i in covered else 0 for i, n in enumerate(self.param_counts)]
        self.names["refuse_param_grads"] = functools.partial(_refuse_param_grads, self.ops, wanted)
        add(f"    grads = [{flat}]")
        add(f"    if len(grads) != {sum(self.param_counts)}:")
        add(f"        refuse_param_grads(({rows}))")
        callers = "".join(
            f"din{i}_{k}, " if i in covered else "None, "
            for i, row in enumerate(self.sources)
            for k, source in enumerate(row)
            if source.caller_index is not None
        )
        dx = "dx" if self.key.ops[0].input_requires_grad else "None"
        add(f"    return (None, {dx}, *grads, {callers})")

    def _add_none_check(
        self, op: FusibleOperation, indices: tuple[int, ...], is_wanted: bool
    ) -> None:
        """Where steps follow, name an op that returns no gradient for its input."""
        if is_wanted:
            name = f"dropped{len(self.names)}"
            self.names[name] = functools.partial(_refuse_dropped, op, indices)
            self.lines.append(f"    if dx is None: {name}()")

    def _extra_inputs(self, op: int) -> str:
        return _tuple(
            f"extra_inputs[{source.caller_index}]"
            if source.caller_index is not None
            else "out{}_{}".format(*source.place)
            for source in self.sources[op]
        )

    def _extra_output_grads(self, op: int) -> str:
        return _tuple(
            f"filled(dout{i}_{k}, specs[{n}], dx)"
            for n, (i, k) in enumerate(self.places)
            if i == op
        )

    def _add_channel_grads(self, indices: tuple[int, ...]) -> None:
        for i in indices:
            for k, source in enumerate(self.sources[i]):
                if source.producer is not None:
                    name = "dout{}_{}".format(*source.place)
                    self.lines.append(f"    {name} = total({name}, din{i}_{k})")

    def _quantizers(self, indices: tuple[int, ...]) -> tuple[str, str]:
        """What the neighbours want: of the gradient before, of the value after."""
        before, after = indices[0] - 1, indices[-1] + 1
        return (
            self._wanted(before, "grad_output") if before >= 0 else "None",
            self._wanted(after, "input") if after < len(self.ops) else "None",
        )

    def _wanted(self, index: int, what: str) -> str:
        """The quantizer in which an op wants its ``"input"`` or its ``"grad_output"``."""
        if self.key.recipe is None:
            return "None"
        op = self.ops[index]
        getter = f"op{index}.get_{what}_quantizer()"
        if not op.quantizer_roles("forward" if what == "input" else "backward"):
            return getter  # an op that others wrote may have its own
        emission = getattr(op, f"wanted_{what}")(self.key.window(index, index + 1))
        if emission is None:
            return "None"
        return f"{getter}.with_usage(rowwise={emission.rowwise}, columnwise={emission.columnwise})"

    def _checked(
        self, op: FusibleOperation, indices: tuple[int, ...], what: str, counts: list[int]
    ) -> str:
        """The name of a function that checks one row of tensors for each basic op."""

        def checked(given: Iterable[Iterable[Any] | None]) -> list[tuple[Any, ...]]:
            rows = [tuple(row or ()) for row in given]
            rows += [()] * (len(counts) - len(rows))  # ops without any may leave theirs out
            if [len(row) for row in rows] != counts:
                raise StateError(
                    f"{type(op).__name__} stands for ops {indices[0]} to {indices[-1]}, which have "
                    f"{counts} {what}, and returned {[len(row) for row in rows]}."
                )
            return rows

        name = f"checked{len(self.names)}"
        self.names[name] = checked
        return name


def _is_plain(op: FusibleOperation, side: str) -> TypeGuard[BasicOperation]:
    """Whether ``op`` is one basic op that does nothing on ``side`` but what its half does."""
    method = f"fuser_{side}"
    return (
        isinstance(op, BasicOperation)
        and not op.num_extra_inputs
        and not op.num_extra_outputs
        and getattr(type(op), method) is getattr(BasicOperation, method)
    )


def _contexts(indices: Iterable[int]) -> str:
    return ", ".join(f"c{i}" for i in indices)


def _tuple(items: Iterable[str]) -> str:
    return f"({''.join(item + ', ' for item in items)})"


def _names_of_rows(prefix: str, indices: Iterable[int], counts: Iterable[int]) -> str:
    rows = (
        _tuple(f"{prefix}{i}_{k}" for k in range(count))
        for i, count in zip(indices, counts, strict=True)
    )
    return _tuple(rows)


def _refuse_param_grads(
    ops: Sequence[BasicOperation], wanted: Sequence[int], rows: Sequence[Sequence[Any] | None]
) -> None:
    """Name the op whose backward returned another number of gradients than it has parameters."""
    for index, (op, count, row) in enumerate(zip(ops, wanted, rows, strict=True)):
        if len(row or ()) != count:
            raise StateError(
                f"Op {index} ({type(op).__name__}) has {count} parameters, and its backward "
                f"returned {len(row or ())} gradients for them."
            )


def _refuse_dropped(op: FusibleOperation, indices: tuple[int, ...]) -> None:
    raise StateError(
        f"The backward of {type(op).__name__} (ops {indices[0]} to {indices[-1]}) returned no "
        "gradient for its input, and ops before it need one."
    )


def _filled(
    grad: torch.Tensor | None, spec: tuple[torch.Size, torch.dtype], like: torch.Tensor
) -> torch.Tensor:
    """``grad``, or zeros where no gradient came back on a channel."""
    return like.new_zeros(spec[0], dtype=spec[1]) if grad is None else grad


def _total(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients of one tensor, either of which may be absent."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


class _PipelineFunction(torch.autograd.Function):
    """The one autograd node of a pipeline."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Run, list[dict[str, Any]] | None, int],
        input_: torch.Tensor,
        *params_and_extra_inputs: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        run, kwargs, num_params = call
        output, op_ctxs, produced = run.forward(
            input_, params_and_extra_inputs[num_params:], kwargs
        )
        to_save: list[torch.Tensor | None] = []
        saving: list[tuple[OperationContext, int, int]] = []
        for op_ctx in op_ctxs:
            tensors = op_ctx.to_save
            if tensors is not None:
                op_ctx.to_save = None
                if op_ctx.requires_grad:
                    start = len(to_save)
                    to_save += tensors
                    saving.append((op_ctx, start, len(to_save)))
        ctx.save_for_backward(*to_save)
        specs = [(t.shape, t.dtype) for t in produced] if produced else None
        ends_step = run.is_delayed and claim_gradient_update()
        ctx.call = (run, op_ctxs, saving, specs, ends_step)
        if not run.returned:
            base = output._base
            # A reshape in here is no view to the caller, who may write to it.
            if (
                base is not None
                and all(base is not t for t in (input_, input_._base))
                and output is not input_
            ):
                output = output.detach()
            return output  # type: ignore[no-any-return]
        outputs = [output]
        without_grad = []
        for n in run.returned:
            tensor = produced[n]
            # Autograd wants a tensor object of its own for each output.
            if not run.requires_grad[run.places[n][0]]:
                tensor = tensor.detach()
                without_grad.append(tensor)
            elif any(tensor is other for other in outputs):
                tensor = tensor.view_as(tensor)
            outputs.append(tensor)
        ctx.mark_non_differentiable(*without_grad)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if _is_grad_enabled():
            # Refused at once: a gradient handed out here would look like a
            # constant to a second derivative, which would come out as zero.
            raise StateError(
                "A fuser pipeline cannot be differentiated twice, and this backward was asked for "
                "with create_graph=True: the backward runs fused operations that have no "
                "derivative of their own. Compute this part with plain torch modules if you need "
                "second derivatives."
            )
        run, op_ctxs, saving, specs, ends_step = ctx.call
        saved = ctx.saved_tensors
        for op_ctx, start, stop in saving:
            op_ctx.saved_tensors = saved[start:stop]
        grad_extras: list[torch.Tensor | None] | None = None
        if specs is not None:
            grad_extras = [None] * len(run.places)
            for n, grad in zip(run.returned, grad_outputs[1:], strict=True):
                grad_extras[n] = grad
        try:
            # A sum's gradient is one number with zero strides, which every GEMM
            # that reads it would copy; it is copied once here.
            result: tuple[torch.Tensor | None, ...] = run.backward(
                op_ctxs, grad_outputs[0].contiguous(), grad_extras, specs
            )
            return result
        finally:
            # A retained graph runs again; in between, nothing here keeps tensors alive.
            for op_ctx, _, _ in saving:
                op_ctx.saved_tensors = None
            if ends_step:
                update_delayed_scales("backward")


# torch wraps ``apply`` for functorch's transforms. The wrapper costs 2 us, and is
# used only under one of those: it says what it has to say.
_is_grad_enabled = torch.is_grad_enabled
_is_functorch_active = torch._C._are_functorch_transforms_active
_checked_apply: Callable[..., Any] = _PipelineFunction.apply
_direct_apply: Callable[..., Any] = super(torch.autograd.Function, _PipelineFunction).apply

# At every backward torch's node works out anew that the class has a ``backward``
# and no ``vjp``: 2.5 us for a constant. Its node calls ours directly instead.
_PipelineFunction._backward_cls.apply = _PipelineFunction.backward  # type: ignore[attr-defined]
