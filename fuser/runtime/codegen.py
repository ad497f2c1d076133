"""Generated code of a plan: one Python function for forward and one for backward.

A plan runs the same steps at every call, so its code is generated once, with a name for every step,
context and extra tensor; tracebacks show it. This saves 5 us compared to a loop over steps, of the
110 us that a training step of Linear-GELU-Linear on 16x128 takes on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fuser.basic_ops import Activation
from fuser.cuda.arguments import end_of
from fuser.cuda.tiled import NotInOneLaunch, in_one_launch
from fuser.doors import VIEW
from fuser.errors import StateError
from fuser.op import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationContext,
    StepInputs,
    is_plain,
    keyword_names,
)
from fuser.plan.graph import Source, assumes_extra_outputs
from fuser.plan.saved_inputs import rebuilding
from fuser.report.text import span
from fuser.runtime.diagnose import (
    check_backward,
    check_forward,
    check_result,
    explain_shape_error,
    note_extra_outputs,
    refuse_dropped,
    refuse_no_output,
    refuse_param_grads,
)
from fuser.source import SourceCode
from fuser.specs import PlanKey, QuantSpec
from fuser.tensors import Quantizer
from fuser.wrapper_tensor import WrapperTensor

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})

# After these errors the generated code checks the results: a wrong result may be the cause.
_CHECKED_ERRORS = "(AttributeError, LookupError, RuntimeError, TypeError, ValueError)"

PlannedOps = Sequence[tuple[FusibleOperation, tuple[int, ...]]]


class Neighbours(NamedTuple):
    """The ops beside a part of a pipeline, and their narrowed keys.

    None where nothing quantized passes between the op and the part, and at the pipeline's ends.
    ``start`` is the index of the part's first op in the pipeline.
    """

    start: int = 0
    before: tuple[BasicOperation, PlanKey] | None = None
    after: tuple[BasicOperation, PlanKey] | None = None


WHOLE = Neighbours()
"""Of a whole pipeline."""


class PlanCodegen:
    """Generates the Python source of a plan: ``forward``, and ``backward`` if there is one.

    ``forward`` returns the main output and the extra outputs, None for those that
    went to an op and not to the caller. In training it also returns the contexts, all
    tensors to save, the end of each op's tensors among them, and shape and dtype of
    every extra output, and of the main one if the caller gets others too.

    Names: ``x`` is the main input or output, and ``dx`` its gradient. For op i:
    ``c{i}`` is the context, ``s{i}`` its saved tensors, ``n{i}`` their end among all
    saved tensors, ``p{i}`` the gradients of its parameters, or those of all ops of a step that
    begins with it; ``out{i}_{k}`` is its
    extra output k, ``spec{i}_{k}`` the shape and dtype of that, ``dout{i}_{k}`` its
    gradient, and ``din{i}_{k}`` the gradient of its extra input k.
    """

    def __init__(
        self,
        key: PlanKey,
        ops: Sequence[BasicOperation],
        sources: Sequence[tuple[Source, ...]],
        returned: Sequence[tuple[int, int]],
        param_counts: Sequence[int],
        places: Sequence[tuple[int, int]],
        neighbours: Neighbours,
    ) -> None:
        self.key = key
        self.neighbours = neighbours
        self.ops = ops
        self.sources = sources
        self.returned = returned
        self.param_counts = param_counts
        self.places = places
        self.saving = [i for i, op_key in enumerate(key.ops) if op_key.requires_grad]
        self.titles: dict[str, str] = {}
        # While a step is written: the linear whose wgrad comes after the next one.
        self.waiting: int | None = None
        # By side: class and method of every step, and the ops that it runs.
        self.methods: dict[str, list[tuple[str, str]]] = {}
        self.windows: dict[str, list[tuple[int, ...]]] = {}
        names: dict[str, Any] = {
            "filled": _filled,
            "tensor": torch.Tensor,
            "total": _total,
            "plain": _plain,
            "marked": _marked,
            "no_kwargs": _NO_KWARGS,
            "in_one_launch": in_one_launch,
            "alone": contextlib.nullcontext,
            "NotInOneLaunch": NotInOneLaunch,
            "inputs": functools.partial(tuple.__new__, StepInputs),  # without a call of Python
            "separate": _separate,
            "recipe": key.recipe,
        }
        self.src = SourceCode(**names)
        self.names = self.src.names
        recipe = key.recipe
        constants = {} if recipe is None else {"split_accumulators": recipe.split_accumulators}
        # The ops that need no quantizers at a call, because theirs are constants.
        self.constant_ops = {
            i
            for i, op in enumerate(ops)
            if recipe is not None
            and any(
                op.num_quantizers(mode) and op.constant_quantizer(recipe, mode, 0) is not None
                for mode in ("forward", "backward")
            )
        }
        # By op, the expressions of attributes that each call sets in its context.
        self.context_values: dict[int, dict[str, str]] = {}
        for i, (op, op_key) in enumerate(zip(ops, key.ops, strict=True)):
            self.names[f"op{i}"] = op
            self.names[f"state{i}"] = op.__dict__
            values = {
                name: self.src.bind(f"{name}{i}", value)
                for name, value in op.context_values(key.window(i, i + 1)).items()
            }
            wanted = self._wanted_grad(i)
            if wanted != "None":
                values["grad_input_quantizer"] = wanted
            self.context_values[i] = values
            self.names[f"Context{i}"] = _context_class(
                requires_grad=op_key.requires_grad,
                input_requires_grad=op_key.input_requires_grad,
                params_require_grad=tuple(param.requires_grad for param in op_key.params),
                extra_inputs_require_grad=tuple(t.requires_grad for t in op_key.extra_inputs),
                autocast_dtype=key.autocast_dtype,
                has_recipe=recipe is not None,
                backward_override=recipe and recipe.backward_override,
                input_dtype=op_key.input_dtype,
                keeps_input=op_key.keeps_input,
                keeps_source=op_key.keeps_source,
                keeps_weight=op_key.keeps_weight,
                rounds_input=op_key.rounds_input,
                **constants,
                **op.context_constants(key.window(i, i + 1)),
            )

    def write(self, forward: PlannedOps, backward: PlannedOps) -> tuple[str, Any, Any]:
        """The source, and its two functions."""
        self._write_forward(forward)
        if self.saving:
            self._write_backward(backward, forward)
        # Comments for readers of the source or of a traceback, which do not show these values.
        quantizers = {n: value for n, value in self.names.items() if isinstance(value, Quantizer)}
        self.src.add(*(f"# {name} = {value!r}" for name, value in quantizers.items()))
        functions = self.src.functions("plan")
        return str(self.src), functions["forward"], functions.get("backward")

    def _write_forward(self, steps: PlannedOps) -> None:
        src = self.src
        with src.block("def forward(x, extra_inputs, kwargs):"):
            self._add_contexts()
            src.add("result = ()")
            with src.block("try:"):
                for number, (op, indices) in enumerate(steps):
                    self._add_forward_step(number, op, indices)
            with src.block(f"except {_CHECKED_ERRORS} as error:"):
                self._add_result_check("forward", steps)
                windows = [[self.ops[i] for i in indices] for _, indices in steps]
                explain = functools.partial(explain_shape_error, windows, self.key.autocast_dtype)
                name = src.bind("explain_shape_error", explain)
                src.add(f"if isinstance(error, RuntimeError): {name}(step, x, error)", "raise")
            produced = "".join(f"out{i}_{k}, " for i, k in self.places)
            if not self.saving:
                src.add(f"return x, ({produced})")
                return
            end = ""
            for i in self.saving:
                src.add(f"s{i} = c{i}.to_save or ()", f"n{i} = {end}len(s{i})")
                end = f"n{i} + "
            src.add(f"{self._each('c{i}.to_save = ')}None")
            saved, ends = self._each("*s{i}, ", self.saving), self._each("n{i}, ", self.saving)
            specs = "".join(f"spec{i}_{k}, " for i, k in self.places)
            if self.returned:  # the main output may then have no gradient
                specs += "(x.shape, x.dtype), "
            results = (produced, self._each("c{i}, "), saved, ends, specs)
            src.add(f"return x, {', '.join(f'({each})' for each in results)}")

    def _add_contexts(self) -> None:
        """Make the ops' contexts, and set the attributes that differ between calls."""
        src = self.src
        src.add(f"{self._each('c{i}, ')}= {self._each('Context{i}(), ')}")
        src.add(f"{self._each('c{i}.to_save = ')}None")
        for i, op in enumerate(self.ops):
            src.add(*(f"c{i}.{name} = {value}" for name, value in self.context_values[i].items()))
            if i in self.constant_ops and not op.is_external:
                self._add_recipe((i,))
            attributes = op.backward_attributes if i in self.saving else ()
            if isinstance(attributes, type):
                fields: tuple[str, ...] = attributes._fields  # type: ignore[attr-defined]
                state = src.bind(f"kept{i}", functools.partial(tuple.__new__, attributes))
                src.add(f"c{i}.state = {state}({_tuple(f'op{i}.{name}' for name in fields)})")
            else:
                src.add(*(f"c{i}.{name} = op{i}.{name}" for name in attributes))

    def _add_recipe(self, indices: tuple[int, ...]) -> None:
        """Store the recipe in the ops, for code that asks them for quantizers later."""
        self.src.add(*(f"state{i}['_last_recipe'] = recipe" for i in indices))

    def _add_forward_step(
        self, number: int, op: FusibleOperation, indices: tuple[int, ...]
    ) -> None:
        self.src.add(f"step = {number}  # {type(op).__name__}")
        self.titles[f"forward{number}"] = self._title("forward", op, indices)
        if op.is_external:
            self._add_recipe(indices)
        method = method_of(op, "forward")
        if method == "op_forward":
            self._add_plain_forward(number, indices[0])
        elif method == "step_forward":
            self._add_own_forward(number, op, indices)
        else:
            self._add_forward(number, op, indices)
        if op.is_external:
            refuse = functools.partial(refuse_no_output, op, indices)
            self.src.add(f"if x is None: {self.src.bind(f'no_output{number}', refuse)}()")

    def _add_plain_forward(self, number: int, i: int) -> None:
        op = self.ops[i]
        before, after = self._quantizers(op, (i,))
        # An op without keyword arguments is not given an empty dict, which would cost 0.2 us.
        own = f", **(kwargs[{i}] if kwargs else {{}})" if keyword_names(type(op)) != () else ""
        forward = self.src.bind(f"forward{number}", op.op_forward)
        given = f"c{i}, {self._main_input(op, i)}, prev_op_grad_output_quantizer={before}"
        self.src.add(
            f"x = {forward}({given},",
            f"    next_op_input_quantizer={after}{own})",
        )

    def _add_own_forward(self, number: int, op: FusibleOperation, indices: tuple[int, ...]) -> None:
        _, after = self._quantizers(op, indices)
        extras = _tuple(extra for i in indices for extra in self._extra_inputs(op, i, indices))
        outputs = _tuple(f"out{i}_{k}" for i, k in self.places if i in indices)
        forward = self.src.bind(f"forward{number}", op.step_forward)
        given = f"{self._kwargs(indices)} if kwargs else {_tuple(['no_kwargs'] * len(indices))}"
        self.src.add(
            f"x, {outputs if outputs != '()' else '_'} = {forward}({self._contexts(indices)}, "
            f"{self._main_input(op, indices[0])},",
            f"    inputs(({extras}, {after}, {given})))",
        )
        self._add_output_specs(indices)

    def _add_forward(self, number: int, op: FusibleOperation, indices: tuple[int, ...]) -> None:
        src = self.src
        before, after = self._quantizers(op, indices)
        extras = ", ".join(_tuple(self._extra_inputs(op, i, indices)) for i in indices)
        none = ", ".join(["no_kwargs"] * len(indices))
        counts = [self.ops[i].num_extra_outputs for i in indices]
        checked = self._checked(op, indices, "extra outputs", counts)
        forward = src.bind(f"forward{number}", op.fuser_forward)
        is_assumed = isinstance(op, BasicOperation) and assumes_extra_outputs(op)
        if is_assumed:
            src.add("entering = (x.shape, x.dtype)")
        src.add(
            f"result = {forward}([{self._each('c{i}, ', indices)}], "
            f"{self._main_input(op, indices[0])},",
            f"    basic_op_extra_inputs=[{extras}],",
            f"    prev_op_grad_output_quantizer={before},",
            f"    next_op_input_quantizer={after},",
            f"    basic_op_kwargs={self._kwargs(indices)} if kwargs else [{none}])",
            "x, made = result",
            "result = ()",
            f"{_names_of_rows('out', indices, counts)} = {checked}(made)"
            if any(counts)
            else f"if made != ({'(), ' * len(indices)}) and any(made): {checked}(made)",
        )
        if is_assumed:
            note = functools.partial(note_extra_outputs, self.ops[indices[0]])
            given = "".join(f"out{i}_{k}, " for i, k in self.places if i in indices)
            src.add(f"{src.bind(f'outputs_of{number}', note)}(entering, ({given}))")
        self._add_output_specs(indices)

    def _add_output_specs(self, indices: tuple[int, ...]) -> None:
        """Keep what backward needs of the extra outputs of a step, and drop those read last."""
        inner = self._inner_outputs(indices)
        for i, k in self.places if self.saving else ():
            if i in indices:
                absent = f" if out{i}_{k} is not None else None" if (i, k) in inner else ""
                self.src.add(f"spec{i}_{k} = (out{i}_{k}.shape, out{i}_{k}.dtype){absent}")
        self._add_drop(f"out{i}_{k}" for i, k in self._read_last(indices))

    def _write_backward(self, steps: PlannedOps, forward: PlannedOps) -> None:
        src = self.src
        covered = {i for _, indices in steps for i in indices}
        src.add("")
        with src.block("def backward(contexts, held, ends, dx, dout, specs):"):
            src.add("saved = held.pop()  # each op frees its part when its step is done")
            src.add(f"{self._each('c{i}, ')}= contexts")
            src.add(f"{self._each('n{i}, ', self.saving)}= ends")
            start = ""
            for i in range(len(self.ops)):
                is_read = i in self.saving and i in covered
                src.add(f"c{i}.saved_tensors = {f'saved[{start}:n{i}]' if is_read else 'None'}")
                if i in self.saving:
                    start = f"n{i}"
            src.add("del saved")
            if self.places:
                src.add(f"({''.join(f'dout{i}_{k}, ' for i, k in self.places)}) = dout")
            src.add("result = ()")
            with src.block("try:"):
                for number in range(len(steps)):
                    self._add_backward_step(number, steps, forward)
                self._add_results(steps)
            with src.block(f"except {_CHECKED_ERRORS} as error:"):
                self._add_result_check("backward", steps)
                src.add("raise")

    def _add_backward_step(self, number: int, steps: PlannedOps, forward: PlannedOps) -> None:
        src, (op, indices) = self.src, steps[number]
        src.add(f"step = {number}  # {type(op).__name__}")
        self.titles[f"backward{number}"] = self._title("backward", op, indices)
        joined, self.waiting = self.waiting, self._deferring(steps, number)
        if self.waiting is not None:
            src.add(f"c{self.waiting}.defers_wgrad = True")
        readers = [i for i in indices if i != self.waiting]
        if joined is None:
            self._add_backward_call(steps, number, readers, forward)
            return
        if not self._quantizes_again(joined):
            self._add_storing_call(steps, number, readers, forward, joined)
            self._add_deferred(joined)
            return
        readers.append(joined)
        activation = joined - 1
        if self.key.ops[activation].rounds_input:  # before it is held for a second attempt
            dequantize = src.bind(f"dequantize{activation}", self.ops[activation].saved_input)
            src.add(f"{dequantize}(c{activation})")
        changed = ", ".join(["dx", *(f"c{i}.saved_tensors" for i in (*indices, joined))])
        src.add(f"before = {changed}")
        # Only if the input is computed again here: a gradient alone would wait for a second launch.
        where = f"with in_one_launch() if c{joined}.defers_wgrad else alone():"
        with src.block("try:"), src.block(where):
            self._add_backward_call(steps, number, readers, forward)
        with src.block("except NotInOneLaunch:"):
            src.add(f"{changed} = before")
            self._add_backward_call(steps, number, readers, forward)
        src.add("del before")
        self._add_deferred(joined)

    def _add_storing_call(
        self,
        steps: PlannedOps,
        number: int,
        readers: Sequence[int],
        forward: PlannedOps,
        joined: int,
    ) -> None:
        """The call of a backward that stores the input of the linear ``joined`` where it can."""
        output = f"c{steps[number][1][-1]}.rebuilt_output"
        self.src.add(f"{output} = {self._rebuilt_input(joined, forward)}")
        self._add_backward_call(steps, number, readers, forward)
        take = self.src.bind(f"take_rebuilt{joined}", self.ops[joined].take_rebuilt_input)
        self.src.add(f"{take}(c{joined}, {output})", f"{output} = None")

    def _add_deferred(self, linear: int) -> None:
        finish = self.src.bind(f"deferred{linear}", self.ops[linear].deferred_gradients)
        self.src.add(f"p{linear} = {finish}(c{linear})", f"c{linear}.saved_tensors = None")

    def _add_backward_call(
        self, steps: PlannedOps, number: int, readers: Sequence[int], forward: PlannedOps
    ) -> None:
        """The call of a step's backward, after the inputs are computed again that it lacks."""
        self._add_rebuilt_inputs(readers, forward)
        (op, indices), is_last = steps[number], number + 1 == len(steps)
        method = method_of(op, "backward")
        if method == "op_backward":
            self._add_plain_backward(number, indices[0], is_last)
        elif method == "step_backward":
            self._add_own_backward(number, op, indices, is_last)
        else:
            self._add_backward(number, op, indices, is_last)

    def _deferring(self, steps: PlannedOps, number: int) -> int | None:
        """The linear of a step whose input the kernel of the next step computes too; or None.

        That is the kernel of a gradient that reads the same tensors. It stores the input beside an
        unquantized gradient, and quantizes it beside an activation's gradient that it quantizes.
        """
        if number + 1 == len(steps) or self.key.no_kernels is not None:
            return None
        (op, (i, *more)), (following, after) = steps[number : number + 2]
        is_alone = op is self.ops[i] and not more and not self.key.ops[i].keeps_input
        if not is_alone or after[-1] != i - 1 or not self.ops[i].can_defer_wgrad:
            return None
        if not self._quantizes_again(i):
            return i if following.stores_rebuilt_output else None
        emits = self.key.ops[after[0]].grad_input is not None
        return i if emits and isinstance(self.ops[i - 1], Activation) else None

    def _quantizes_again(self, linear: int) -> bool:
        """Whether the backward of a linear quantizes the input that is computed again."""
        return self.ops[linear].kept_input(self.key.window(linear, linear + 1)) is not None

    def _add_rebuilt_inputs(self, indices: Iterable[int], forward: PlannedOps) -> None:
        """Compute the inputs again that ops of a step did not keep, as ``forward`` did."""
        for reader in indices:
            if self.key.ops[reader].keeps_input:
                continue
            take = self.src.bind(f"take_rebuilt{reader}", self.ops[reader].take_rebuilt_input)
            self.src.add(f"{take}(c{reader}, {self._rebuilt_input(reader, forward)})")

    def _rebuilt_input(self, reader: int, forward: PlannedOps) -> str:
        """The input that an op did not keep, as the steps of ``forward`` made it."""
        path, value = rebuilding(self.ops, self.key, reader), "None"
        for op, window in forward:
            inside = [i for i in window if i in path]
            if inside and isinstance(op, FusedOperation) and op.recomputes:
                rebuild = self.src.bind(f"rebuild{window[0]}", op.step_rebuild)
                value = f"{rebuild}({self._contexts(window)}, {value})"
                continue
            for i in inside:
                rebuild = self.src.bind(f"rebuild{i}", self.ops[i].rebuild)
                value = f"{rebuild}(c{i}, {value})"
        return value

    def _add_plain_backward(self, number: int, i: int, is_last: bool) -> None:
        op = self.ops[i]
        backward = self.src.bind(f"backward{number}", op.op_backward)
        if op.is_external:  # its result may have another form
            self.src.add(f"result = {backward}(c{i}, dx)", f"dx, p{i} = result", "result = ()")
        else:
            self.src.add(f"dx, p{i} = {backward}(c{i}, dx)")
        self._add_release((i,))
        self._add_none_check(op, (i,), is_last)

    def _add_own_backward(
        self, number: int, op: FusibleOperation, indices: tuple[int, ...], is_last: bool
    ) -> None:
        inner = self._inner_outputs(indices)
        grads = _tuple(grad for i in indices for grad in self._extra_output_grads(i, inner))
        extras = _tuple(f"din{i}_{k}" for i in indices for k in range(self.ops[i].num_extra_inputs))
        backward = self.src.bind(f"backward{number}", op.step_backward)
        self.src.add(
            f"dx, p{indices[0]}, {extras if extras != '()' else '_'} = "
            f"{backward}({self._contexts(indices)}, dx, {grads})"
        )
        self._add_none_check(op, indices, is_last)
        self._add_channel_grads(indices)
        self._add_release(indices)

    def _add_backward(
        self, number: int, op: FusibleOperation, indices: tuple[int, ...], is_last: bool
    ) -> None:
        src = self.src
        inner = self._inner_outputs(indices)
        grads = ", ".join(_tuple(self._extra_output_grads(i, inner)) for i in indices)
        param_counts = [self.param_counts[i] for i in indices]
        checked = self._checked(op, indices, "parameters", param_counts)
        params = self._each("p{i}, ", indices)
        backward = src.bind(f"backward{number}", op.fuser_backward)
        src.add(
            f"result = {backward}([{self._each('c{i}, ', indices)}], dx,",
            f"    basic_op_grad_extra_outputs=[{grads}])",
            "dx, params, extras = result",
            "result = ()",
            f"{params}= params if params and len(params) == {len(indices)} else {checked}(params)",
        )
        self._add_none_check(op, indices, is_last)
        counts = [self.ops[i].num_extra_inputs for i in indices]
        if any(counts):
            checked = self._checked(op, indices, "extra inputs", counts)
            src.add(f"{_names_of_rows('din', indices, counts)} = {checked}(extras)")
            self._add_channel_grads(indices)
        self._add_release(indices)

    def _add_release(self, indices: tuple[int, ...]) -> None:
        """Drop the tensors that nothing reads after the backward of these ops."""
        names = [f"c{i}.saved_tensors" for i in indices if i in self.saving and i != self.waiting]
        names += [f"dout{i}_{k}" for i, k in self.places if i in indices]
        names += [
            f"din{i}_{k}"
            for i in indices
            for k, source in enumerate(self.sources[i])
            if source.producer is not None
        ]
        self._add_drop(names)

    def _add_drop(self, names: Iterable[str]) -> None:
        dropped = "".join(f"{name} = " for name in names)
        if dropped:
            self.src.add(f"{dropped}None")

    def _read_last(self, indices: tuple[int, ...]) -> list[tuple[int, int]]:
        """Extra outputs that stay in the pipeline and that no op after these reads."""
        last: dict[tuple[int, int], int] = {}
        for i, row in enumerate(self.sources):
            last |= {source.place: i for source in row if source.producer is not None}
        return [
            place
            for place, reader in last.items()
            if reader in indices and place not in self.returned
        ]

    def _add_results(self, steps: PlannedOps) -> None:
        """Return a gradient for each argument of the node: run, input, parameters, extra inputs.

        Those that leave the pipeline are plain tensors, whatever op computed them: autograd adds
        the next gradient of a tensor to the first in place, which would round a quantized one.
        """
        src = self.src
        covered = {i for _, indices in steps for i in indices}
        external = {i for op, indices in steps if op.is_external for i in indices}
        grad = "{0} if type({0}) is tensor else plain({0})"
        wants_dx = self.key.ops[0].input_requires_grad
        # The op before a part of a pipeline takes the gradient as it is.
        dx = "dx" if self.neighbours.before is not None else grad.format("dx")
        results = ["None", dx if wants_dx else "None"]
        counts: dict[int, int] = {}  # by op, the number of gradients under its name
        for op, indices in steps:
            own = {i: self.param_counts[i] for i in indices}
            is_one = method_of(op, "backward") == "step_backward"
            counts |= {indices[0]: sum(own.values())} if is_one else own
        for i, count in enumerate(self.param_counts):
            row = f"map(plain, p{i} or ())" if i in external else f"(p{i} or ())"
            results += [f"*{row}"] if i in counts else ["None"] * count * (i not in covered)
        taken = sorted(
            (source.caller_index, i, k)
            for i, row in enumerate(self.sources)
            for k, source in enumerate(row)
            if source.caller_index is not None
        )
        results += [grad.format(f"din{i}_{k}") if i in covered else "None" for _, i, k in taken]
        rows = "".join(f"p{i}, " if i in counts else "(), " for i in range(len(self.ops)))
        wanted = [counts.get(i, 0) for i in range(len(self.ops))]
        refuse = functools.partial(refuse_param_grads, self.ops, wanted)
        total = len(results) - len(counts) + sum(wanted)
        src.add(
            f"grads = ({', '.join(results)})",
            f"if len(grads) != {total}: {src.bind('refuse_param_grads', refuse)}(({rows}))",
        )
        gives_several = wants_dx + sum(
            self.key.ops[i].extra_inputs[k].requires_grad for _, i, k in taken
        )
        src.add("return separate(grads)" if taken and gives_several > 1 else "return grads")

    def _add_result_check(self, side: str, steps: PlannedOps) -> None:
        """Raise an error that names the method, if a result cannot be unpacked; else go on.

        The check runs only after an error: the result that is being unpacked is ``result``.
        """
        owners = {f"p{i}": number for number, (_, indices) in enumerate(steps) for i in indices}
        methods = [(type(op).__name__, method_of(op, side)) for op, _ in steps]
        self.methods[side] = methods
        self.windows[side] = [indices for _, indices in steps]
        check = functools.partial(check_result, methods, owners)
        refuse = (
            functools.partial(check_forward, check, methods)
            if side == "forward"
            else functools.partial(
                check_backward, check, self.ops, self.methods, self.windows, self.key.autocast_dtype
            )
        )
        self.src.add(f"{self.src.bind(f'check_{side}_result', refuse)}(locals())")

    def _title(self, side: str, op: FusibleOperation, indices: tuple[int, ...]) -> str:
        """A step's name in a profile: the name that the plan shows."""
        shown = span(tuple(self.neighbours.start + i for i in indices))
        return f"fuser {side} {shown} {type(op).__name__}"

    def _each(self, pattern: str, ops: Iterable[int] | None = None) -> str:
        """``pattern`` once for each of ``ops``, or for every op, with its index for ``{i}``."""
        return "".join(pattern.format(i=i) for i in (range(len(self.ops)) if ops is None else ops))

    def _add_none_check(
        self, op: FusibleOperation, indices: tuple[int, ...], is_last: bool
    ) -> None:
        """If steps follow, raise an error for an op that returns no gradient for its input."""
        if not is_last:
            refuse = functools.partial(refuse_dropped, op, indices)
            self.src.add(f"if dx is None: {self.src.bind(f'no_gradient_{indices[0]}', refuse)}()")

    def _inner_outputs(self, indices: tuple[int, ...]) -> set[tuple[int, int]]:
        """Extra outputs that only a step of these ops reads, so that it need not return them."""
        readers: dict[tuple[int, int], set[int]] = {}
        for i, row in enumerate(self.sources):
            for source in row:
                if source.producer in indices:
                    readers.setdefault(source.place, set()).add(i)
        return {
            place
            for place, reading in readers.items()
            if reading <= set(indices) and place not in self.returned
        }

    def _main_input(self, op: FusibleOperation, i: int) -> str:
        """``x`` as ``op`` receives it at basic op ``i``."""
        return "x" if i == 0 else self._marked(op, "x", self.key.ops[i].input_requires_grad)

    def _contexts(self, indices: tuple[int, ...]) -> str:
        return _tuple(f"c{i}" for i in indices)

    def _kwargs(self, indices: tuple[int, ...]) -> str:
        return f"kwargs[{indices[0]}:{indices[-1] + 1}]"

    def _extra_inputs(self, op: FusibleOperation, i: int, indices: tuple[int, ...]) -> list[str]:
        """The extra inputs of basic op ``i`` of a step; None for those that the step makes."""
        return [
            f"extra_inputs[{source.caller_index}]"
            if source.caller_index is not None
            else "None"
            if source.producer in indices
            else self._marked(op, "out{}_{}".format(*source.place), tensor.requires_grad)
            for source, tensor in zip(self.sources[i], self.key.ops[i].extra_inputs, strict=True)
        ]

    def _marked(self, op: FusibleOperation, name: str, wanted: bool) -> str:
        """A tensor that the pipeline makes, with the ``requires_grad`` that a user's ops may read.

        The library's own ops read it from their contexts.
        """
        return name if not (op.is_external and self.saving) else f"marked({name}, {wanted})"

    def _extra_output_grads(self, op: int, inner: set[tuple[int, int]]) -> list[str]:
        return [
            "None" if (i, k) in inner else f"filled(dout{i}_{k}, specs[{n}], dx)"
            for n, (i, k) in enumerate(self.places)
            if i == op
        ]

    def _add_channel_grads(self, indices: tuple[int, ...]) -> None:
        for i in indices:
            for k, source in enumerate(self.sources[i]):
                if source.producer is not None and source.producer not in indices:
                    name = "dout{}_{}".format(*source.place)
                    self.src.add(f"{name} = total({name}, din{i}_{k})")

    def _needed_outputs(self, indices: tuple[int, ...]) -> list[tuple[int, int, str]]:
        """Extra outputs of a step of these ops that something outside of it reads.

        For each: the op's position in the step, the output's index, and a description.
        """
        return [
            (
                i - indices[0],
                k,
                f"extra output {k} of op {i} ({type(self.ops[i]).__name__}), which {reader} reads",
            )
            for i, k in self.places
            if i in indices and (reader := self._reader(i, k, outside_of=indices))
        ]

    def _reader(self, i: int, k: int, outside_of: tuple[int, ...]) -> str:
        """The reader of extra output ``k`` of op ``i``, for a message; empty if there is none."""
        if (i, k) in self.returned:
            return "the caller"
        for reader, row in enumerate(self.sources):
            reads = any(s.producer is not None and s.place == (i, k) for s in row)
            if reads and reader not in outside_of:
                return f"op {reader} ({type(self.ops[reader]).__name__})"
        return ""

    def _quantizers(self, op: FusibleOperation, indices: tuple[int, ...]) -> tuple[str, str]:
        """The quantizers of the neighbours: for the gradient before, and for the output after."""
        first = indices[0]
        is_wanted = "grad_input_quantizer" in self.context_values[first]
        before = f"c{first}.grad_input_quantizer" if is_wanted else "None"
        wanted = before, self._wanted_input(indices[-1] + 1)
        if not op.is_external:
            return wanted
        self.names["view"] = VIEW.guest.of
        before, after = ("None" if w == "None" else f"view({w}, None)" for w in wanted)
        return before, after

    def _wanted_input(self, index: int) -> str:
        """The quantizer for an op's main input."""
        inside = index < len(self.ops)
        reader = self._op(index) if inside else self.neighbours.after
        if self.key.recipe is None or reader is None:
            return "None"
        name = f"op{index}" if inside else self.src.bind("op_after", reader[0])
        return self._wanted(name, *reader, "forward", "get_input_quantizer", "input_quantization")

    def _wanted_grad(self, index: int) -> str:
        """The quantizer of the previous op for the gradient of this op's main input."""
        reader = self._op(index - 1) if index else self.neighbours.before
        wants_any = reader is not None and self.key.ops[index].input_requires_grad
        if self.key.recipe is None or reader is None or not wants_any:
            return "None"
        name = f"op{index - 1}" if index else self.src.bind("op_before", reader[0])
        return self._wanted(
            name, *reader, "backward", "get_grad_output_quantizer", "grad_output_quantization"
        )

    def _op(self, index: int) -> tuple[BasicOperation, PlanKey]:
        return self.ops[index], self.key.window(index, index + 1)

    def _wanted(
        self, name: str, op: BasicOperation, key: PlanKey, mode: str, getter: str, question: str
    ) -> str:
        """The quantizer that ``op``, which has this name, wants for a tensor that it reads."""
        # A user's op may define the getter itself, and have no numbered quantizers.
        is_others = getattr(type(op), getter) is not getattr(BasicOperation, getter)
        quantizer = f"{getter}()" if is_others else f"quantizer_value({mode!r}, 0)"
        if not op.num_quantizers(mode):
            return f"{name}.{quantizer}" if is_others else "None"
        wanted: QuantSpec | None = getattr(op, question)(key)
        if wanted is None:
            return "None"
        assert self.key.recipe is not None
        if (constant := op.constant_quantizer(self.key.recipe, mode, 0)) is not None:
            return self._constant(constant.with_usage(**wanted.usage))
        arguments = ", ".join(f"{usage}={is_needed}" for usage, is_needed in wanted.usage.items())
        return f"{name}.{quantizer}.with_usage({arguments})"

    def _constant(self, quantizer: Quantizer) -> str:
        """The name of a quantizer that is the same at every call of the plan."""
        number = 0
        while self.names.setdefault(f"quantizer{number}", quantizer) != quantizer:
            number += 1
        return f"quantizer{number}"

    def _checked(
        self, op: FusibleOperation, indices: tuple[int, ...], what: str, counts: list[int]
    ) -> str:
        """The name of a function that checks one row of tensors for each basic op."""
        needed = self._needed_outputs(indices) if what == "extra outputs" else ()

        def checked(given: Iterable[Iterable[Any] | None] | None) -> list[tuple[Any, ...]]:
            if given is None:
                raise StateError(
                    f"{type(op).__name__} returned None in the place of its rows of {what}; it "
                    f"returns {len(counts)}, for ops {indices[0]} to {indices[-1]}, of {counts} "
                    f"{what}."
                )
            rows = [tuple(row or ()) for row in given]
            rows += [()] * (
                len(counts) - len(rows)
            )  # rows of ops without such tensors may be left out at the end
            if [len(row) for row in rows] != counts:
                raise StateError(
                    f"{type(op).__name__} replaces ops {indices[0]} to {indices[-1]}, which have "
                    f"{counts} {what}, and returned {[len(row) for row in rows]}."
                )
            for row, k, said in needed:
                if rows[row][k] is None:
                    raise StateError(f"{type(op).__name__} returned None for {said}.")
            return rows

        return self.src.bind(f"check_{what.replace(' ', '_')}_{indices[0]}", checked)


@functools.cache
def _context_class(**constants: Any) -> type[OperationContext]:
    """A context class with ``constants``, which hold for every call of a compiled plan.

    Making such a context costs nothing more. Ops with equal constants share the class:
    Python is fast at a place where it always meets one class.
    """
    bare = {"__slots__": (), "__init__": object.__init__}
    return type("OperationContext", (OperationContext,), bare | constants)


def method_of(op: FusibleOperation, side: str) -> str:
    """The method that runs ``op`` on ``"forward"`` or ``"backward"``.

    ``step_`` of this library's fusions and ops with extra tensors, ``op_`` of a basic op without,
    and else ``fuser_``, also of a class or an object that defines it anew.
    """
    cls, method = type(op), f"fuser_{side}"
    is_inherited = any(
        getattr(cls, method) is getattr(base, method) for base in (BasicOperation, FusibleOperation)
    )
    if is_plain(cls, side) and not (op.num_extra_inputs or op.num_extra_outputs):
        return f"op_{side}"
    if is_inherited and method not in op.__dict__:
        own = f"step_{side}"
        return method if getattr(cls, own) is getattr(FusibleOperation, own) else own
    return method


def _tuple(items: Iterable[str]) -> str:
    return f"({''.join(item + ', ' for item in items)})"


def _names_of_rows(prefix: str, indices: Iterable[int], counts: Iterable[int]) -> str:
    rows = (
        _tuple(f"{prefix}{i}_{k}" for k in range(count))
        for i, count in zip(indices, counts, strict=True)
    )
    return _tuple(rows)


def _filled(
    grad: torch.Tensor | None, spec: tuple[torch.Size, torch.dtype], like: torch.Tensor
) -> torch.Tensor | None:
    """``grad``, or zeros if a channel returned no gradient; None for integers, which have none."""
    if grad is not None or not spec[1].is_floating_point:
        return grad
    return like.new_zeros(spec[0], dtype=spec[1])


def _marked(tensor: torch.Tensor, wants_grad: bool) -> torch.Tensor:
    """``tensor`` with the right ``requires_grad``: inside the node torch does not set it."""
    if tensor.requires_grad == wants_grad or not tensor.is_floating_point():
        return tensor
    return tensor.detach().requires_grad_(wants_grad)


def _plain(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad.dequantize() if isinstance(grad, WrapperTensor) else grad


def _total(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients of one tensor; either may be None."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _separate(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """``grads``, of which none is another tensor with the memory of an earlier one.

    Autograd takes a gradient for the ``.grad`` of a leaf if nothing else refers to the tensor, and
    adds to it in place. It sees that one tensor is returned twice, and not that memory is.
    Parts of one buffer, as the gradients of experts' weights, share none.
    """
    plain = {id(g): g for g in grads if type(g) is torch.Tensor and g.numel()}
    copies: dict[int, torch.Tensor] = {}
    end = 0
    for grad in sorted(plain.values(), key=torch.Tensor.data_ptr):
        if grad.data_ptr() < end:
            copies[id(grad)] = grad.clone()
        end = max(end, end_of(grad))
    return tuple([copies.get(id(grad), grad) for grad in grads])
