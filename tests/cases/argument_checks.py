"""What rows of arguments assert: values and gradients of an op against its formula in fp64."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from oracles import Formula, random_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fuser

Make = Callable[..., Any]
"""Makes an op; called with the ``dtype`` of its parameters."""
FP32, BF16 = torch.float32, torch.bfloat16
# Relative errors; those of bf16 after as many as four roundings.
TOLERANCES = {FP32: 1e-5, BF16: 2e-2}
QUANTIZED = 0.2
"""E4M3 rounds by 6%, and a product may cancel; other arguments make errors of 1 or more."""
E4M3 = fuser.recipe.Float8CurrentScaling(fp8_format=fuser.recipe.Format.E4M3)


def untyped(make: Make, *args: Any, **given: Any) -> Make:
    """Makes an op that has no parameters, of any dtype."""
    return lambda dtype: make(*args, **given)


def near(actual: torch.Tensor, exact: torch.Tensor, tolerance: float, *, name: str = "") -> None:
    """Assert the shape, the error of the whole, and that no element is wrong."""
    assert actual.shape == exact.shape, f"{name}: {actual.shape}, not {exact.shape}"
    size = exact.detach().double()
    error = actual.detach().double() - size
    if size.numel():
        whole = float(error.norm() / size.norm().clamp(min=1e-30))
        worst = float(error.abs().max() / size.abs().max().clamp(min=1e-30))
        assert whole <= tolerance, f"{name} is off by {whole:.2g}, not {tolerance}"
        assert worst <= 4 * tolerance, f"An element of {name} is off by {worst:.2g}"


def leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that get gradients, if they are floating; else the tensors."""
    return [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]


def in_fp64(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return leaves([t.detach().double() if t.is_floating_point() else t for t in tensors])


def results(
    run: Callable[..., Any], inputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Outputs of a call, and gradients of ``wanted`` for some gradient of each output."""
    outputs = run(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    floating = [y for y in outputs if y.is_floating_point()]
    grads = [random_tensor(y.shape, BF16, 90 + i).to(y.dtype) for i, y in enumerate(floating)]
    torch.autograd.backward(floating, grads)
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    for i, tensor in enumerate(wanted):
        if tensor.requires_grad:
            named[f"gradient {i}"] = (
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            )
    return named


def fill(op: torch.nn.Module, spread: float = 1.0) -> list[torch.nn.Parameter]:
    """The parameters of an op, with random values."""
    parameters = list(op.parameters())
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            parameter.copy_(random_tensor(parameter.shape, parameter.dtype, 50 + i, spread))
    return parameters


def agrees(
    make: Make,
    formula: Formula,
    *inputs: torch.Tensor,
    dtypes: Sequence[torch.dtype] = (FP32, BF16),
    in_pipelines: bool = True,
) -> None:
    """Values and gradients of an op, alone and in two calls before another op, are its formula's.

    The formula gets the main input, parameters, and extra inputs.
    """
    for dtype in dtypes:
        for factor in (1.0, 0.5) if in_pipelines else (1.0,):
            op = make(dtype=dtype)
            parameters = fill(op)
            run = op if factor == 1.0 else _pipeline(op, fuser.ConstantScale(factor))
            given = leaves([t.to(dtype) if t.is_floating_point() else t for t in inputs])
            wanted = [given[0], *parameters, *given[1:]]
            actual = results(run, given, wanted)
            if factor != 1.0:  # the second call finds the plan of the first
                for tensor in wanted:
                    tensor.grad = None
                actual = results(run, given, wanted)
            x, *others = in_fp64([given[0], *parameters, *given[1:]])
            _freeze_as([x, *others], parameters)
            scaled = formula if factor == 1.0 else _then(formula, lambda y, f=factor: f * y)
            exact = results(scaled, [x, *others], [x, *others])
            _compare(actual, exact, TOLERANCES[dtype], f"{dtype}, times {factor}")


def agrees_quantized(
    make: Make,
    formula: Formula,
    *inputs: torch.Tensor,
    tolerance: float = QUANTIZED,
    has_stored: bool = False,
) -> None:
    """As :func:`agrees` before a linear under a recipe: the op's output is quantized.

    With ``has_stored`` also with weights that are stored quantized.
    """
    for is_stored in (False, True) if has_stored else (False,):
        with fuser.quantized_model_init(enabled=is_stored, recipe=E4M3):
            op = make(dtype=BF16)
        parameters = fill(op)
        assert is_stored == any(isinstance(p, fuser.QuantizedTensor) for p in parameters)
        given = leaves([t.to(BF16) if t.is_floating_point() else t for t in inputs])
        tensors = [given[0], *parameters, *given[1:]]
        with torch.no_grad():
            features = _first(formula(*in_fp64(tensors))).shape[-1]
        linear = fuser.BasicLinear(features, 16, dtype=BF16)
        fill(linear)
        with fuser.autocast(recipe=E4M3):
            actual = results(_pipeline(op, linear), given, [*tensors, linear.weight])
        *others, weight = in_fp64([*tensors, linear.weight])
        _freeze_as(others, parameters)
        whole = _then(formula, lambda y, weight=weight: y @ weight.T)
        exact = results(whole, others, [*others, weight])
        _compare(actual, exact, tolerance, f"quantized, with stored weights: {is_stored}")


def _freeze_as(tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    """Let the tensors after the first, which are the parameters in fp64, be frozen as these."""
    for tensor, parameter in zip(tensors[1:], parameters, strict=False):
        tensor.requires_grad_(parameter.requires_grad)


def _pipeline(op: Any, last: Any) -> Callable[..., Any]:
    """``last`` of the output of ``op``, in one Sequential unless the first is a layer."""
    if isinstance(op, (fuser.FusibleOperation, fuser.Sequential)):
        return fuser.Sequential(op, last)
    return lambda *inputs: last(op(*inputs))


def _first(outputs: Any) -> torch.Tensor:
    y: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return y


def _then(formula: Formula, last: Formula) -> Formula:
    """``last`` of the main output; extra outputs as they are."""

    def both(*tensors: torch.Tensor) -> Any:
        outputs = formula(*tensors)
        y = last(_first(outputs))
        return (y, *outputs[1:]) if isinstance(outputs, tuple) else y

    return both


def _compare(
    actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], tolerance: float, where: str
) -> None:
    assert actual.keys() == exact.keys()
    for name, tensor in exact.items():
        near(actual[name], tensor, tolerance, name=f"{name} of {where}")


def saved_by(run: Callable[[], Any]) -> list[torch.Tensor]:
    """The tensors that a forward saves for its backward."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return kept


def refuses(run: Callable[[], Any], match: str) -> None:
    """The call raises a sentence with ``match`` in it."""
    sentence = None
    try:
        run()
    except fuser.FuserError as error:
        sentence = str(error)
    assert sentence is not None, f"No error says {match}."
    assert re.search(match, sentence), sentence


# -- two ranks ------------------------------------------------------------------------------


@contextlib.contextmanager
def rank_0_of_2() -> Iterator[Any]:
    """Process groups of two ranks: this one, and a twin that has the same tensors.

    Yields the group of this rank alone.
    """
    collectives: dict[str, Any] = {
        "_gather": _gather,
        "_scatter": _scatter,
        "_add": _add,
        "_exchange": _exchange,
    }
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with mock.patch.multiple("fuser.communication.collectives", **collectives):
            yield torch.distributed.new_group([0])
    finally:
        torch.distributed.destroy_process_group()


class _Done:
    def wait(self) -> None:
        pass


def _gather(out: torch.Tensor, x: torch.Tensor, group: Any) -> _Done:
    out.copy_(torch.cat([x, x]))
    return _Done()


def _scatter(out: torch.Tensor, x: torch.Tensor, group: Any) -> _Done:
    out.copy_(x[: len(out)] + x[: len(out)])
    return _Done()


def _add(out: torch.Tensor, group: Any) -> _Done:
    out.mul_(2)
    return _Done()


def _exchange(out: torch.Tensor, x: torch.Tensor, received: Any, sent: Any, group: Any) -> _Done:
    """Both ranks send this one the rows that are for rank 0; rank 1 has no rows of its own."""
    rows = len(x) // 2 if sent is None else sent[0]
    is_sent_by_both = received is None or received[1]
    out.copy_(torch.cat([x[:rows], x[:rows]] if is_sent_by_both else [x[:rows]]))
    return _Done()


def added(x: torch.Tensor) -> torch.Tensor:
    """The sum over the two ranks; each passes the gradient of the sum on."""
    return x + x.detach()


def added_in_backward(x: torch.Tensor) -> torch.Tensor:
    """The same values, whose gradients of the two ranks are added."""
    return 2 * x - x.detach()


def gathered(x: torch.Tensor) -> torch.Tensor:
    """The rows of both ranks, whose gradients are added."""
    return torch.cat([added_in_backward(x), x.detach()])


def scattered(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum; the gradient has the rows of both."""
    own, others = x.chunk(2)
    return own + others + (own - others).detach()


class Tracker:
    """Forks a generator of its own: what is drawn inside are numbers of another seed."""

    SEED = 1234

    def fork(self) -> contextlib.AbstractContextManager[Any]:
        return self._forked()

    @contextlib.contextmanager
    def _forked(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.SEED)
            yield


def kaiming(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    """A weight as ``torch.nn.Linear`` draws it, from the seed of :class:`Tracker`."""
    with Tracker().fork():
        weight = torch.empty(shape, dtype=dtype)
        for matrix in weight if weight.dim() == 3 else [weight]:
            torch.nn.init.kaiming_uniform_(matrix, a=5**0.5)
        return weight


# -- parameters ---------------------------------------------------------------------------


def parameters_are_in(op: torch.nn.Module, dtype: torch.dtype) -> None:
    """All parameters of an op have a dtype that is not torch's default."""
    assert dtype is not torch.get_default_dtype()
    dtypes = [parameter.dtype for parameter in op.parameters()]
    assert dtypes == [dtype] * len(dtypes)
    assert dtypes


def is_on_meta_until_its_first_call(op: torch.nn.Module, *inputs: torch.Tensor) -> None:
    """Parameters have no memory, and are allocated, as the same objects, at the first forward."""
    before = list(op.parameters())
    assert before
    assert all(parameter.is_meta for parameter in before)
    op(*inputs)
    after = list(op.parameters())
    assert list(map(id, after)) == list(map(id, before))
    assert all(parameter.device.type == "cpu" for parameter in after)
    assert all(parameter.isfinite().all() for parameter in after)


def is_drawn_by_the_tracker(
    make: Callable[[], Any], weights: Callable[[Any], list[Any]], *, each_alone: bool = False
) -> None:
    """Weights are drawn in a context of :class:`Tracker`, or each in its own; nothing else is."""
    before = torch.random.get_rng_state()
    op = make()
    assert torch.equal(torch.random.get_rng_state(), before), "It has drawn outside of the context."
    with torch.no_grad():
        for step in ("made", "reset"):
            exact: list[torch.Tensor] = []
            for some in [[w] for w in weights(op)] if each_alone else [weights(op)]:
                with Tracker().fork():
                    exact += map(_drawn, some)
            for weight, values in zip(weights(op), exact, strict=True):
                assert torch.equal(weight, values), f"{step}: drawn from another generator"
                weight.zero_()
            (op if hasattr(op, "reset_parameters") else op.members[0]).reset_parameters()
    with fuser.quantized_model_init(recipe=E4M3):
        quantized = make()
    near(weights(quantized)[0].dequantize(), exact[0].double(), QUANTIZED)


def _drawn(weight: torch.Tensor) -> torch.Tensor:
    values = torch.empty(weight.shape, dtype=weight.dtype)
    for matrix in values if values.dim() == 3 else [values]:
        torch.nn.init.kaiming_uniform_(matrix, a=5**0.5)
    return values


def accumulates(
    make: Make, formula: Formula, *inputs: torch.Tensor, weights: Callable[[Any], list[Any]]
) -> None:
    """Gradients of weights are added to ``main_grad``, or replace it; all others are returned."""
    for dtype, tolerance, recipe, is_stored in (
        (FP32, TOLERANCES[FP32], None, False),
        (BF16, TOLERANCES[BF16], None, False),
        (BF16, QUANTIZED, E4M3, False),
        (BF16, QUANTIZED, E4M3, True),
    ):
        for is_overwritten in (False, True):
            with fuser.quantized_model_init(enabled=is_stored, recipe=recipe):
                op = make(dtype=dtype)
            parameters = fill(op)
            assert is_stored == isinstance(weights(op)[0], fuser.QuantizedTensor)
            own = weights(op)
            for weight in own:
                weight.main_grad = torch.full(weight.shape, 0.5)
                weight.overwrite_main_grad = is_overwritten
            given = leaves([t.to(dtype) if t.is_floating_point() else t for t in inputs])
            tensors = [given[0], *parameters, *given[1:]]
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                actual = results(op, given, tensors)
            for i, tensor in enumerate(tensors):
                if any(tensor is weight for weight in own):
                    assert tensor.grad is None
                    actual[f"gradient {i}"] = tensor.main_grad - (0.0 if is_overwritten else 0.5)
            others = in_fp64(tensors)
            _freeze_as(others, parameters)
            exact = results(formula, others, others)
            _compare(actual, exact, tolerance, f"{dtype}, {recipe}")
    op = make(dtype=FP32)
    refuses(lambda: op(*leaves(inputs[:1]), *inputs[1:]).sum().backward(), "has no main_grad")
