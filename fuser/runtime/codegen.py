"""Generated code of a plan: one Python function for forward and one for backward.

A plan runs the same steps at every call, so its code is generated once, with a name for every step,
context and extra tensor; tracebacks show it. A loop over records of steps takes 4 to 6% more of a
training step of Linear-GELU-Linear on 16x128 on a CPU, and as many lines.
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
from fuser.op import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationContext,
    StepInputs,
    keyword_names,
    method_of,
)
from fuser.plan.graph import Source
from fuser.plan.saved_inputs import rebuilding
from fuser.report.text import span
from fuser.runtime.diagnose import (
    check_grad_input,
    explain_backward,
    explain_forward,
    refuse_dropped,
    refuse_no_output,
    refuse_param_grads,
)
from fuser.runtime.users_methods import UsersMethods, parts_of
from fuser.source import SourceCode, compiled
from fuser.specs import PlanKey, QuantSpec
from fuser.tensors import Quantizer
from fuser.wrapper_tensor import WrapperTensor

_EMPTY: Mapping[str, Any] = MappingProxyType({})

# After these errors the generated code checks the results: a wrong result may be the cause.
_CHECKED_ERRORS = "(AttributeError, LookupError, RuntimeError, TypeError, ValueError)"

# What a context has of its op's key.
_OF_KEY = (
    *("requires_grad", "input_requires_grad", "input_dtype", "keeps_input", "keeps_source"),
    *("keeps_weight", "rounds_input"),
)

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

    The plan was made for ``key``. ``returned`` are the extra outputs that the pipeline returns, and
    ``forward`` and ``backward`` the operations in the order in which they run, with their basic-op
    indices. ``neighbours`` are the ops beside ``ops``, if these are a part of the pipeline.

    ``forward`` returns the main output and the extra outputs, None for those that
    went to an op and not to the caller. In training it also returns the contexts, all
    tensors to save, the end of each op's tensors among them, and shape and dtype of
    every extra output, and of the main one if the caller gets others too.

    Names: ``x`` is the main input or output, and ``dx`` its gradient. For op i:
    ``c{i}`` is the context, ``s{i}`` its saved tensors, ``n{i}`` their end among all
    saved tensors, ``p{i}`` the gradients of its parameters, or those of all ops of a step that
    begins with it; ``out{i}_{k}`` is its extra output k, ``spec{i}_{k}`` the shape and dtype of
    that, ``dout{i}_{k}`` its gradient, and ``din{i}_{k}`` the gradient of its extra input k.
    """

    def __init__(
        self,
        key: PlanKey,
        ops: Sequence[BasicOperation],
        sources: Sequence[tuple[Source, ...]],
        returned: Sequence[tuple[int, int]],
        param_counts: Sequence[int],
        forward: PlannedOps,
        backward: PlannedOps,
        neighbours: Neighbours = WHOLE,
    ) -> None:
        self.key, self.ops, self.sources, self.neighbours = key, ops, sources, neighbours
        self.returned, self.param_counts = returned, param_counts
        # Every extra output.
        self.places = [(i, k) for i, op in enumerate(ops) for k in range(op.num_extra_outputs)]
        self.steps = {"forward": forward, "backward": backward}
        self.saving = [i for i, op_key in enumerate(key.ops) if op_key.requires_grad]
        self.covered = {i for _, indices in backward for i in indices}
        self.titles: dict[str, str] = {}
        # While a step is written: the linear whose wgrad comes after the next one.
        self.waiting: int | None = None
        # By extra output, the ops that read it, in their order.
        self.readers: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(sources):
            for source in row:
                if source.producer is not None:
                    self.readers.setdefault(source.place, []).append(i)
        names: dict[str, Any] = {
            "filled": _filled,
            "tensor": torch.Tensor,
            "total": _total,
            "plain": _plain,
            "marked": _marked,
            "no_kwargs": _EMPTY,
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
            quantizer = self._wanted(i - 1, "backward") if op_key.input_requires_grad else "None"
            if quantizer != "None":
                values["grad_input_quantizer"] = quantizer
            self.context_values[i] = values
            constants = {} if recipe is None else {"split_accumulators": recipe.split_accumulators}
            self.names[f"Context{i}"] = _context_class(
                params_require_grad=tuple(param.requires_grad for param in op_key.params),
                extra_inputs_require_grad=tuple(t.requires_grad for t in op_key.extra_inputs),
                autocast_dtype=key.autocast_dtype,
                has_recipe=recipe is not None,
                backward_override=recipe and recipe.backward_override,
                **{name: getattr(op_key, name) for name in _OF_KEY},
                **constants,
                **op.context_constants(key.window(i, i + 1)),
            )

        self._write_forward()
        if self.saving:
            self._write_backward()
        # Comments for readers of the source or of a traceback, which do not show these values.
        quantizers = {n: value for n, value in self.names.items() if isinstance(value, Quantizer)}
        self.src.add(*(f"# {name} = {value!r}" for name, value in quantizers.items()))
        self.source = str(self.src)

    def functions(self, changes: Mapping[str, Any] = _EMPTY) -> tuple[Any, Any]:
        """Forward, and backward or None, with ``changes`` of what they call by name."""
        functions = compiled(self.source, "plan", {**self.names, **changes})
        return functions["forward"], functions.get("backward")

    def _write_forward(self) -> None:
        src = self.src
        with src.block("def forward(x, extra_inputs, kwargs):"):
            self._add_contexts()
            with src.block("try:"):
                for number, (op, indices) in enumerate(self.steps["forward"]):
                    self._add_forward_step(number, op, indices)
            self._add_explanation(explain_forward, "step, x")
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
            src.add(f"return x, {', '.join(f'({result})' for result in results)}")

    def _add_explanation(self, explain: Any, arguments: str) -> None:
        """The end of a side: an error that the result of an op may have caused names the op."""
        function = functools.partial(explain, self.ops, self.steps, self.key.autocast_dtype)
        name = self.src.bind(explain.__name__, function)
        with self.src.block(f"except {_CHECKED_ERRORS} as error:"):
            self.src.add(f"{name}(error, {arguments})", "raise")

    def _add_contexts(self) -> None:
        """Make the ops' contexts, and set the attributes that differ between calls."""
        src, steps = self.src, self.steps["forward"]
        # Code asks these ops for quantizers, without a call that stores the recipe in them.
        asked = self.constant_ops.union(*(indices for op, indices in steps if op.is_external))
        src.add(f"{self._each('c{i}, ')}= {self._each('Context{i}(), ')}")
        src.add(f"{self._each('c{i}.to_save = ')}None")
        for i, op in enumerate(self.ops):
            src.add(*(f"c{i}.{name} = {value}" for name, value in self.context_values[i].items()))
            if i in asked:
                src.add(f"state{i}['_last_recipe'] = recipe")
            attributes = op.backward_attributes if i in self.saving else ()
            if isinstance(attributes, type):
                fields: tuple[str, ...] = attributes._fields  # type: ignore[attr-defined]
                state = src.bind(f"kept{i}", functools.partial(tuple.__new__, attributes))
                src.add(f"c{i}.state = {state}({_tuple(f'op{i}.{name}' for name in fields)})")
            else:
                src.add(*(f"c{i}.{name} = op{i}.{name}" for name in attributes))

    def _add_forward_step(
        self, number: int, op: FusibleOperation, indices: tuple[int, ...]
    ) -> None:
        method, forward, first = *self._add_step("forward", number), indices[0]
        needs_grad = self.key.ops[first].input_requires_grad
        main = "x" if first == 0 else self._marked(op, "x", needs_grad)
        after = self._viewed(op, self._wanted(indices[-1] + 1, "forward"))
        if method == "op_forward":
            is_wanted = "grad_input_quantizer" in self.context_values[first]
            before = f"c{first}.grad_input_quantizer" if is_wanted else "None"
            # An op without keyword arguments is not given an empty dict, which would cost 0.2 us.
            takes_any = keyword_names(type(op)) != ()
            keywords = f", **(kwargs[{first}] if kwargs else {{}})" if takes_any else ""
            inputs = f"prev_op_grad_output_quantizer={self._viewed(op, before)}"
            self.src.add(
                f"x = {forward}(c{first}, {main}, {inputs},",
                f"    next_op_input_quantizer={after}{keywords})",
            )
        else:
            extras = _tuple(extra for i in indices for extra in self._extra_inputs(op, i, indices))
            outputs = _tuple(f"out{i}_{k}" for i, k in self.places if i in indices)
            none = _tuple(["no_kwargs"] * len(indices))
            rows = f"kwargs[{first}:{indices[-1] + 1}]"
            if (extras, after) == ("()", "None"):  # the same at every call without arguments
                same = StepInputs((), None, (_EMPTY,) * len(indices))
                same_inputs = self.src.bind(f"inputs{number}", same)
                inputs = f"inputs(((), None, {rows})) if kwargs else {same_inputs}"
            else:
                inputs = f"inputs(({extras}, {after}, {rows} if kwargs else {none}))"
            self.src.add(
                f"x, {outputs if outputs != '()' else '_'} = "
                f"{forward}(({self._each('c{i}, ', indices)}), {main},",
                f"    {inputs})",
            )
            self._add_output_specs(indices)
        if op.is_external:
            refuse = functools.partial(refuse_no_output, op, indices)
            self.src.add(f"if x is None: {self.src.bind(f'no_output{number}', refuse)}()")

    def _add_step(self, side: str, number: int) -> tuple[str, str]:
        """Begin a step; returns its method, and the name of what calls that."""
        op, indices = self.steps[side][number]
        name, method = f"{side}{number}", method_of(op, side)
        self.src.add(f"step = {number}  # {type(op).__name__}")
        shown = span(tuple(self.neighbours.start + i for i in indices))
        self.titles[name] = f"fuser {side} {shown} {type(op).__name__}"
        call: Any = op
        if method.startswith("fuser_"):
            members = [(i, self.ops[i], self.param_counts[i]) for i in indices]
            call = UsersMethods(op, members, self._needed_outputs(indices))
        return method, self.src.bind(name, getattr(call, method))

    def _add_output_specs(self, indices: tuple[int, ...]) -> None:
        """Keep what backward needs of the extra outputs of a step, and drop those read last."""
        for i, k in self.places if self.saving else ():
            if i in indices:
                is_inner = self._is_inner((i, k), indices)
                absent = f" if out{i}_{k} is not None else None" if is_inner else ""
                self.src.add(f"spec{i}_{k} = (out{i}_{k}.shape, out{i}_{k}.dtype){absent}")
        self._add_drop(
            f"out{i}_{k}"
            for (i, k), readers in self.readers.items()
            if readers[-1] in indices and (i, k) not in self.returned
        )

    def _write_backward(self) -> None:
        src, steps = self.src, self.steps["backward"]
        src.add("")
        with src.block("def backward(contexts, held, ends, dx, dout, specs):"):
            src.add("saved = held.pop()  # each op frees its part when its step is done")
            src.add(f"{self._each('c{i}, ')}= contexts")
            src.add(f"{self._each('n{i}, ', self.saving)}= ends")
            start = ""
            for i in range(len(self.ops)):
                is_read = i in self.saving and i in self.covered
                src.add(f"c{i}.saved_tensors = {f'saved[{start}:n{i}]' if is_read else 'None'}")
                if i in self.saving:
                    start = f"n{i}"
            src.add("del saved")
            if self.places:
                src.add(f"({''.join(f'dout{i}_{k}, ' for i, k in self.places)}) = dout")
            with src.block("try:"):
                for number in range(len(steps)):
                    self._add_backward_step(number)
                self._add_results()
            self._add_explanation(explain_backward, "step, contexts, dx")

    def _add_backward_step(self, number: int) -> None:
        src, (_, indices) = self.src, self.steps["backward"][number]
        self._add_step("backward", number)
        joined, self.waiting = self.waiting, self._deferring(number)
        if self.waiting is not None:
            src.add(f"c{self.waiting}.defers_wgrad = True")
        readers = [i for i in indices if i != self.waiting]
        if joined is None:
            self._add_backward_call(number, readers)
            return
        if not self._quantizes_again(joined):  # the kernel of this step stores it where it can
            output = f"c{indices[-1]}.rebuilt_output"
            src.add(f"{output} = {self._rebuilt_input(joined)}")
            self._add_backward_call(number, readers)
            self._add_taking(joined, output)
            src.add(f"{output} = None")
        else:
            readers.append(joined)
            activation = joined - 1
            if self.key.ops[activation].rounds_input:  # before it is held for a second attempt
                dequantize = src.bind(f"dequantize{activation}", self.ops[activation].saved_input)
                src.add(f"{dequantize}(c{activation})")
            changed = ", ".join(["dx", *(f"c{i}.saved_tensors" for i in (*indices, joined))])
            src.add(f"before = {changed}")
            # Only if the input is computed again here: a gradient alone would wait for a second
            # launch.
            where = f"with in_one_launch() if c{joined}.defers_wgrad else alone():"
            with src.block("try:"), src.block(where):
                self._add_backward_call(number, readers)
            with src.block("except NotInOneLaunch:"):
                src.add(f"{changed} = before")
                self._add_backward_call(number, readers)
            src.add("del before")
        finish = src.bind(f"deferred{joined}", self.ops[joined].deferred_gradients)
        src.add(f"p{joined} = {finish}(c{joined})", f"c{joined}.saved_tensors = None")

    def _add_backward_call(self, number: int, readers: Iterable[int]) -> None:
        """The call of a step's backward, after the inputs are computed again that it lacks."""
        src, (op, indices) = self.src, self.steps["backward"][number]
        for reader in readers:
            if not self.key.ops[reader].keeps_input:
                self._add_taking(reader, self._rebuilt_input(reader))
        first, method = indices[0], method_of(op, "backward")
        if method == "op_backward" and (op.is_external or op.has_own_methods()):
            parts = src.bind(f"parts{number}", functools.partial(parts_of, op, method))
            is_right = "type(result) is tuple and len(result) == 2 and type(result[1]) is tuple"
            src.add(f"result = backward{number}(c{first}, dx)")
            src.add(f"dx, p{first} = result if {is_right} else {parts}(result)", "del result")
        elif method == "op_backward":
            src.add(f"dx, p{first} = backward{number}(c{first}, dx)")
        else:
            grads = _tuple(
                "None"
                if self._is_inner((i, k), indices)
                else f"filled(dout{i}_{k}, specs[{n}], dx)"
                for n, (i, k) in enumerate(self.places)
                if i in indices
            )
            inputs = [(i, k) for i in indices for k in range(self.ops[i].num_extra_inputs)]
            extras = _tuple(f"din{i}_{k}" for i, k in inputs) if inputs else "_"
            is_rows = method == "fuser_backward"
            params = f"({self._each('p{i}, ', indices)})" if is_rows else f"p{first}"
            contexts = self._each("c{i}, ", indices)
            src.add(f"dx, {params}, {extras} = backward{number}(({contexts}), dx, {grads})")
        if op.is_external or op.has_own_methods():
            check = functools.partial(check_grad_input, op)
            src.add(f"if type(dx) is not tensor: {src.bind(f'check_dx{number}', check)}(dx)")
        if number + 1 < len(self.steps["backward"]):
            refuse = functools.partial(refuse_dropped, op, indices)
            src.add(f"if dx is None: {src.bind(f'no_gradient_{first}', refuse)}()")
        self._add_release(indices)

    def _add_taking(self, reader: int, values: str) -> None:
        """An op takes its input, which was computed again."""
        take = self.src.bind(f"take_rebuilt{reader}", self.ops[reader].take_rebuilt_input)
        self.src.add(f"{take}(c{reader}, {values})")

    def _deferring(self, number: int) -> int | None:
        """The linear of a step whose input the kernel of the next step computes too; or None.

        That is the kernel of a gradient that reads the same tensors. It stores the input beside an
        unquantized gradient, and quantizes it beside an activation's gradient that it quantizes.
        """
        steps = self.steps["backward"]
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

    def _rebuilt_input(self, reader: int) -> str:
        """The input that an op did not keep, computed as the steps of forward made it."""
        path, value = rebuilding(self.ops, self.key, reader), "None"
        for op, window in self.steps["forward"]:
            inside = [i for i in window if i in path]
            if inside and isinstance(op, FusedOperation) and op.recomputes:
                rebuild = self.src.bind(f"rebuild{window[0]}", op.step_rebuild)
                value = f"{rebuild}(({self._each('c{i}, ', window)}), {value})"
                continue
            for i in inside:
                rebuild = self.src.bind(f"rebuild{i}", self.ops[i].rebuild)
                value = f"{rebuild}(c{i}, {value})"
        return value

    def _add_release(self, indices: tuple[int, ...]) -> None:
        """Add up the gradients of channels, and drop what nothing reads after these ops."""
        names = [f"c{i}.saved_tensors" for i in indices if i in self.saving and i != self.waiting]
        names += [f"dout{i}_{k}" for i, k in self.places if i in indices]
        for i in indices:
            for k, source in enumerate(self.sources[i]):
                if source.producer is None:
                    continue
                names.append(f"din{i}_{k}")
                if source.producer not in indices:
                    total = "dout{}_{}".format(*source.place)
                    self.src.add(f"{total} = total({total}, din{i}_{k})")
        self._add_drop(names)

    def _add_drop(self, names: Iterable[str]) -> None:
        dropped = "".join(f"{name} = " for name in names)
        if dropped:
            self.src.add(f"{dropped}None")

    def _add_results(self) -> None:
        """Return a gradient for each argument of the node: run, input, parameters, extra inputs.

        Those that leave the pipeline are plain tensors, whatever op computed them: autograd adds
        the next gradient of a tensor to the first in place, which would round a quantized one.
        """
        src, steps = self.src, self.steps["backward"]
        external = {i for op, indices in steps if op.is_external for i in indices}
        grad = "{0} if type({0}) is tensor else plain({0})"
        wants_dx = self.key.ops[0].input_requires_grad
        # The op before a part of a pipeline takes the gradient as it is.
        dx = "dx" if self.neighbours.before is not None else grad.format("dx")
        results = ["None", dx if wants_dx else "None"]
        counts: dict[int, int] = {}  # by op, the number of gradients under its name
        for op, indices in steps:
            counts_of_ops = {i: self.param_counts[i] for i in indices}
            is_one = method_of(op, "backward") == "step_backward"
            counts |= {indices[0]: sum(counts_of_ops.values())} if is_one else counts_of_ops
        for i, count in enumerate(self.param_counts):
            row = f"map(plain, p{i} or ())" if i in external else f"(p{i} or ())"
            results += [f"*{row}"] if i in counts else ["None"] * count * (i not in self.covered)
        taken = sorted(
            (source.caller_index, i, k)
            for i, row in enumerate(self.sources)
            for k, source in enumerate(row)
            if source.caller_index is not None
        )
        results += [
            grad.format(f"din{i}_{k}") if i in self.covered else "None" for _, i, k in taken
        ]
        rows = "".join(f"p{i}, " if i in counts else "(), " for i in range(len(self.ops)))
        param_grads = [counts.get(i, 0) for i in range(len(self.ops))]
        refuse = functools.partial(refuse_param_grads, self.ops, param_grads)
        total = len(results) - len(counts) + sum(param_grads)
        src.add(
            f"grads = ({', '.join(results)})",
            f"if len(grads) != {total}: {src.bind('refuse_param_grads', refuse)}(({rows}))",
        )
        gives_several = wants_dx + sum(
            self.key.ops[i].extra_inputs[k].requires_grad for _, i, k in taken
        )
        src.add("return separate(grads)" if taken and gives_several > 1 else "return grads")

    def _each(self, pattern: str, ops: Iterable[int] | None = None) -> str:
        """``pattern`` once for each of ``ops``, or for every op, with its index for ``{i}``."""
        return "".join(pattern.format(i=i) for i in (range(len(self.ops)) if ops is None else ops))

    def _is_inner(self, place: tuple[int, int], indices: tuple[int, ...]) -> bool:
        """Whether only a step of these ops reads an extra output, so that it need not return it."""
        readers = self.readers.get(place)
        return readers is not None and {*readers} <= {*indices} and place not in self.returned

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

    def _marked(self, op: FusibleOperation, name: str, requires_grad: bool) -> str:
        """A tensor that the pipeline makes, with the ``requires_grad`` that a user's ops may read.

        The library's own ops read it from their contexts.
        """
        return name if not (op.is_external and self.saving) else f"marked({name}, {requires_grad})"

    def _needed_outputs(self, indices: tuple[int, ...]) -> list[tuple[int, int, str]]:
        """Extra outputs of a step of these ops that something outside of it reads.

        For each: the op's position in the step, the output's index, and a description.
        """
        needed = []
        for i, k in self.places:
            outside = [reader for reader in self.readers.get((i, k), ()) if reader not in indices]
            if i in indices and ((i, k) in self.returned or outside):
                read = "the caller" if (i, k) in self.returned else self._named(outside[0])
                read = f"extra output {k} of {self._named(i)}, which {read} reads"
                needed.append((i - indices[0], k, read))
        return needed

    def _named(self, i: int) -> str:
        return f"op {i} ({type(self.ops[i]).__name__})"

    def _viewed(self, op: FusibleOperation, quantizer: str) -> str:
        """A quantizer as ``op`` gets it, which may change it if it is a user's."""
        if quantizer == "None" or not op.is_external:
            return quantizer
        return f"{self.src.bind('view', VIEW.guest.of)}({quantizer}, None)"

    def _wanted(self, index: int, side: str) -> str:
        """The quantizer that an op wants for its main input, or for the gradient of its output."""
        recipe, reader = self.key.recipe, self.neighbours.after
        name, op_name = "input", "op_after"
        if side == "backward":
            reader, name, op_name = self.neighbours.before, "grad_output", "op_before"
        if 0 <= index < len(self.ops):
            reader, op_name = (self.ops[index], self.key.window(index, index + 1)), f"op{index}"
        if recipe is None or reader is None:
            return "None"
        op, key = reader
        self.names[op_name] = op
        getter = f"get_{name}_quantizer"
        # A user's op may define the getter itself, and have no numbered quantizers.
        is_others = getattr(type(op), getter) is not getattr(BasicOperation, getter)
        quantizer = f"{op_name}.{f'{getter}()' if is_others else f'quantizer_value({side!r}, 0)'}"
        if not op.num_quantizers(side):
            return quantizer if is_others else "None"
        spec: QuantSpec | None = getattr(op, f"{name}_quantization")(key)
        if spec is None:
            return "None"
        if (constant := op.constant_quantizer(recipe, side, 0)) is not None:
            return self._constant(constant.with_usage(**spec.usage))
        arguments = ", ".join(f"{usage}={is_needed}" for usage, is_needed in spec.usage.items())
        return f"{quantizer}.with_usage({arguments})"

    def _constant(self, quantizer: Quantizer) -> str:
        """The name of a quantizer that is the same at every call of the plan."""
        number = 0
        while self.names.setdefault(f"quantizer{number}", quantizer) != quantizer:
            number += 1
        return f"quantizer{number}"


@functools.cache
def _context_class(**constants: Any) -> type[OperationContext]:
    """A context class with ``constants``, which hold for every call of a compiled plan.

    Making such a context costs nothing more. Ops with equal constants share the class:
    Python is fast at a place where it always meets one class.
    """
    bare = {"__slots__": (), "__init__": object.__init__}
    return type("OperationContext", (OperationContext,), bare | constants)


def _tuple(items: Iterable[str]) -> str:
    return f"({''.join(item + ', ' for item in items)})"


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
