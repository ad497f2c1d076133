"""Experts whose weights are one parameter for each of two linears, as in transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fuser import basic_ops
from fuser.conversion.held_objects import tensors_of
from fuser.conversion.leaves import are_close
from fuser.conversion.modules import (
    attributes_of,
    bare,
    joint,
    original_class,
    written_attributes,
)
from fuser.conversion.parts import PLAIN_TENSORS, Chain, Part
from fuser.conversion.trace import parameters_of
from fuser.conversion.unit import REQUIRED, ChainPipeline, Ref, Unit, UnitStep
from fuser.op import COMPUTE_DTYPES

CHANNELS = ("split sizes", "probs", "rows")

INPUTS = ("hidden_states", "top_k_index", "top_k_weights")
"""The inputs of a forward of any arguments, as those of transformers' implementations."""

MOST_TOKENS, MOST_CHOICES = 16384, 2**22
"""Tokens of the trial that a capacity would show in, and the product with the number of experts."""

Scalars = tuple[tuple[str, float], ...]

GATES = {"SwiGLU": basic_ops.ScaledSwiGLU, "ClampedSwiGLU": basic_ops.ScaledClampedQGeGLU}


@dataclass(frozen=True)
class ExpertsPart(Part):
    """Experts: a gated feed-forward for each, of tokens that a router has assigned to them.

    ``up`` and ``down`` name the parameters ``[experts, 2 * width, hidden]`` and ``[experts, hidden,
    width]``, which are ``[experts, in, out]`` if they are transposed, and ``biases`` those of shape
    ``[experts, 2 * width]`` and ``[experts, hidden]``, if there are any. ``gate`` is a name in
    ``GATES``, with the scalars of its formula; the rows of gate and up alternate, or are one half
    after the other.
    """

    up: str
    down: str
    experts: int
    hidden: int
    width: int
    biases: tuple[str, ...] = ()
    is_transposed: bool = False
    gate: str = "SwiGLU"
    scalars: Scalars = ()
    is_alternating: bool = False

    def modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        has_bias = bool(self.biases)
        options: dict[str, Any] = {"bias": has_bias, "single_grouped_weight": True}
        options |= {"single_grouped_bias": has_bias, "device": "meta"}
        options["dtype"] = owner._parameters[self.up].dtype  # type: ignore[union-attr]
        up = basic_ops.GroupedLinear(self.experts, self.hidden, 2 * self.width, **options)
        down = basic_ops.GroupedLinear(
            self.experts, self.width, self.hidden, scale_bias=has_bias, **options
        )
        gate = GATES[self.gate](1 if self.is_alternating else None, **dict(self.scalars))
        dispatch = basic_ops.MoeDispatch(self.experts)
        for index, channel in enumerate(CHANNELS):
            dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
        sizes, probs, rows = CHANNELS
        if has_bias:
            # The rows are multiplied by their probabilities before the last product.
            down.set_extra_input_channel(1, probs)
        return [
            dispatch,
            up.set_extra_input_channel(0, sizes),
            gate.set_extra_input_channel(0, probs),
            down.set_extra_input_channel(0, sizes),
            basic_ops.MoeCombine().set_extra_input_channel(0, rows),
        ]

    def tensors(self, owner: torch.nn.Module) -> list[tuple[torch.Tensor, ...]]:
        weights = [getattr(owner, name) for name in self.weights]
        if self.is_transposed:
            weights = [weight.transpose(1, 2) for weight in weights]
        biases = [getattr(owner, name) for name in self.biases]
        if not biases:
            return [(weight,) for weight in weights]
        return [(value,) for pair in zip(weights, biases, strict=True) for value in pair]

    @property
    def weights(self) -> tuple[str, ...]:
        return self.up, self.down

    def sized(self, owner: torch.nn.Module) -> ExpertsPart:
        experts, hidden, width = owner._parameters[self.down].shape  # type: ignore[union-attr]
        if self.is_transposed:
            hidden, width = width, hidden
        return replace(self, experts=experts, hidden=hidden, width=width)

    def takes(self, inputs: Sequence[Any]) -> bool:
        _, _, probs = inputs
        return isinstance(probs, torch.Tensor) and probs.dtype in COMPUTE_DTYPES

    def inputs(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, experts, probs = inputs
        if not (experts.is_cuda or experts.is_meta):
            # An index equal to the number of experts means an expert of another rank: none here.
            experts = torch.where(experts == self.experts, -1, experts)
        return x, experts, probs

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by their names."""
        sizes = [(2 * self.width, self.hidden), (self.hidden, self.width)]
        biases = {name: size[:1] for name, size in zip(self.biases, sizes, strict=False)}
        order = -1 if self.is_transposed else 1
        weights = {name: size[::order] for name, size in zip(self.weights, sizes, strict=True)}
        return {name: (self.experts, *shape) for name, shape in (weights | biases).items()}

    def refusal(self, owner: torch.nn.Module) -> str | None:
        first = owner._parameters.get(self.up)
        for name, shape in self.shapes.items():
            value = owner._parameters.get(name)
            if value is None or first is None:
                return f"{name} is computed at each call, as by PEFT's target_parameters"
            if type(value) not in PLAIN_TENSORS:
                return f"{name} is a {type(value).__name__}"
            if value.dtype not in COMPUTE_DTYPES or value.dtype is not first.dtype:
                return f"{name} is {value.dtype}"
            if tuple(value.shape) != shape:
                return f"{name} has another shape"
        return None

    @property
    def text(self) -> str:
        return f"{self.experts} experts: {self.up}, {self.gate}, {self.down}"


def experts_unit(module: torch.nn.Module) -> Unit | str | None:
    """The unit of a module that is experts; why it has none; None if it is nothing like that."""
    part = _part(module)
    if part is None or isinstance(part, str):
        return part
    parameters = parameters_of(module)
    if len(parameters) != len(INPUTS) and not hasattr(module, "config"):
        return "its forward does not take tokens, experts and their weights"
    named = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    names = named if len(named) == len(INPUTS) else INPUTS
    trials = _trials(module, part)
    if isinstance(trials, str):
        return trials
    for candidate in _with_gates(module, part):
        if _pass(candidate, trials):
            inputs = tuple((name, REQUIRED) for name in names)
            children = [(p, original_class(m)) for p, m in module.named_modules() if p]
            step = UnitStep(Chain((candidate,), tuple(children)), (Ref(0), Ref(1), Ref(2)))
            return Unit(inputs, (step, UnitStep(_as_tokens, (Ref(3), Ref(0)))), Ref(4))
    return f"its values are not those of {' or '.join(GATES)} experts"


def experts_chain(module: torch.nn.Module, up: str, down: str) -> Chain:
    """The chain of experts with the parameters ``up`` and ``down``, of their present shapes."""
    return Chain((ExpertsPart(up, down, 0, 0, 0).sized(module),), ())


def _as_tokens(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rows as the tokens that a forward got: maybe sequences, and in fp32 in torch's autocast."""
    y = y if y.shape == x.shape else y.view(x.shape)
    return y.to(x.dtype)


def _part(module: torch.nn.Module) -> ExpertsPart | str | None:
    """The part with a module's parameters; why it has none; None if they are not of experts."""
    shapes = {n: tuple(p.shape) for n, p in module._parameters.items() if p is not None}
    weights = [name for name, shape in shapes.items() if len(shape) == 3]
    if len(weights) != 2:
        return None
    up, down = weights
    biases = tuple(name for name in shapes if name not in weights)
    for is_transposed in (False, True):
        part = ExpertsPart(up, down, 0, 0, 0, biases, is_transposed).sized(module)
        if all(part.shapes[name] == shapes[name] for name in weights):
            break
    else:
        return f"the shapes {shapes[up]} and {shapes[down]} are not those of a gate"
    if len(biases) not in (0, 2) or part.shapes != shapes:
        return f"its experts have {' and '.join(biases)}, which are not a bias of each linear"
    others = [joint(path, n) for path, m in module.named_modules() for n in tensors_of(m)]
    others += [n for n, _ in module.named_parameters() if n not in shapes]
    if others:
        return f"its experts have {' and '.join(others)}, which may change what they compute"
    return part


def _with_gates(module: torch.nn.Module, part: ExpertsPart) -> Iterator[ExpertsPart]:
    """The part with each gate that the module may have: its scalars are numbers of the module."""
    numbers = {v for v in module.__dict__.values() if isinstance(v, float) and 0 < v < math.inf}
    formulas = [(1.0, 0.0), *((alpha, 1.0) for alpha in sorted(numbers))]
    gates: list[tuple[str, Scalars]] = [("SwiGLU", ())]
    for limit in sorted(numbers):
        for alpha, offset in formulas:
            scalars = (("limit", limit), ("alpha", alpha), ("glu_linear_offset", offset))
            gates.append(("ClampedSwiGLU", scalars))
    for gate, of_gate in gates:
        for is_alternating in (False, True):
            yield replace(part, gate=gate, scalars=of_gate, is_alternating=is_alternating)


class _Trial(NamedTuple):
    """A call of a module with small weights, and its results."""

    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor | None, ...]
    """The output, and the gradients unless they are nearly zeros, as those of large gates."""


def _pass(part: ExpertsPart, trials: Sequence[_Trial]) -> bool:
    """Whether the part's pipeline gives the results of all trials."""
    first = trials[0].module
    pipeline = ChainPipeline(Chain((part.sized(first),), ()), first)
    for module, inputs, expected in trials:

        def call(*given: torch.Tensor, owner: torch.nn.Module = module) -> torch.Tensor:
            y: torch.Tensor = pipeline(owner, given, is_quantized=False)
            return y

        if not all(map(are_close, _results(call, module, *inputs), expected)):
            return False
    return True


def _results(
    function: Callable[..., torch.Tensor],
    owner: torch.nn.Module,
    x: torch.Tensor,
    chosen: torch.Tensor,
    probs: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """The output, and the gradients of tokens, their weights and the parameters of ``owner``."""
    leaves = [value.clone().requires_grad_() for value in (x, probs)]
    with torch.enable_grad():
        y = function(leaves[0], chosen, leaves[1])
        of = [*leaves, *owner.parameters()]
        return y.detach(), *torch.autograd.grad(y.square().sum(), of, allow_unused=True)


def _trials(module: torch.nn.Module, part: ExpertsPart) -> list[_Trial] | str:
    """Calls of a module with small weights of as many experts; how it fails if it does."""
    generator = torch.Generator().manual_seed(0)
    experts, hidden, width, few = part.experts, 8, 16, 16
    shapes = replace(part, hidden=hidden, width=width).shapes
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    # All gates are far below zero: a clamp there would be most of the small values.
    below = {**values, part.up: values[part.up].abs()}
    for name, sign in zip(part.biases, (-1, 0), strict=False):
        below[name] = sign * values[name].abs()
    trials: list[_Trial] = []
    calls = [(spread, values, few) for spread in (0.1, 3.0, 30.0, 1e4)]
    # Many tokens, all with the same experts: a capacity would leave some out. They are small, since
    # at the bound of a clamp rounding decides about a gradient.
    many = max(few, min(MOST_TOKENS, MOST_CHOICES // experts))
    for spread, weights, tokens in (*calls, (3.0, below, few), (0.1, values, many)):
        x = spread * torch.randn(tokens, hidden, generator=generator)
        rows = few if tokens == few else 1
        order = torch.rand(rows, experts, generator=generator).argsort(-1)
        chosen = order[:, : min(2, experts)]
        chosen = chosen.repeat(tokens // rows, 1)
        probs = torch.randn(chosen.shape, generator=generator)
        inputs = -x.abs() if weights is below else x, chosen, probs
        tried = bare(module, weights).train(len(trials) % 2 == 1).requires_grad_()
        before = [attributes_of(m) for m in tried.modules()]
        try:
            results = _results(tried, tried, *inputs)
        except Exception as error:
            sentence = str(error).partition("\n")[0] or type(error).__name__
            return f"its forward fails with tokens, experts and their weights: {sentence:.150}"
        if [attributes_of(m) for m in tried.modules()] != before or written_attributes(tried):
            return "its forward keeps something"
        trials.append(_Trial(tried, inputs, results if spread < 30 else results[:1]))
    return trials
