"""Experts whose weights are one parameter for each of two linears, as in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fuser import basic_ops
from fuser.conversion.leaves import are_close
from fuser.conversion.modules import bare
from fuser.conversion.parts import PLAIN_TENSORS, Chain, Part
from fuser.conversion.trace import parameters_of
from fuser.conversion.unit import REQUIRED, Pipeline, Ref, Step, Unit
from fuser.op import COMPUTE_DTYPES

CHANNELS = ("split sizes", "probs", "rows")


@dataclass(frozen=True)
class ExpertsPart(Part):
    """Experts: a gated feed-forward for each, of tokens that a router has assigned to them.

    Parameters
    ----------
    up, down
        Names of the parameters ``[experts, 2 * width, hidden]`` and ``[experts, hidden, width]``.
    experts, hidden, width
        The sizes.
    """

    up: str
    down: str
    experts: int
    hidden: int
    width: int

    def modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        options: dict[str, Any] = {"bias": False, "single_grouped_weight": True, "device": "meta"}
        options["dtype"] = owner._parameters[self.up].dtype  # type: ignore[union-attr]
        up = basic_ops.GroupedLinear(self.experts, self.hidden, 2 * self.width, **options)
        down = basic_ops.GroupedLinear(self.experts, self.width, self.hidden, **options)
        dispatch = basic_ops.MoeDispatch(self.experts)
        for index, channel in enumerate(CHANNELS):
            dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
        sizes, probs, rows = CHANNELS
        return [
            dispatch,
            up.set_extra_input_channel(0, sizes),
            basic_ops.ScaledSwiGLU().set_extra_input_channel(0, probs),
            down.set_extra_input_channel(0, sizes),
            basic_ops.MoeCombine().set_extra_input_channel(0, rows),
        ]

    def values(self, owner: torch.nn.Module) -> list[torch.Tensor]:
        return [getattr(owner, self.up), getattr(owner, self.down)]

    @property
    def weights(self) -> tuple[str, ...]:
        return self.up, self.down

    def inputs(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, experts, probs = inputs
        if not experts.is_cuda:
            # An index equal to the number of experts means an expert of another rank: none here.
            experts = torch.where(experts == self.experts, -1, experts)
        return x, experts, probs

    def refusal(self, owner: torch.nn.Module) -> str | None:
        shapes = {self.up: (2 * self.width, self.hidden), self.down: (self.hidden, self.width)}
        first = owner._parameters.get(self.up)
        for name, shape in shapes.items():
            weight = owner._parameters.get(name)
            if weight is None or first is None:
                return f"{name} is computed at each call, as by PEFT's target_parameters"
            if type(weight) not in PLAIN_TENSORS:
                return f"{name} is a {type(weight).__name__}"
            if weight.dtype not in COMPUTE_DTYPES or weight.dtype is not first.dtype:
                return f"{name} is {weight.dtype}"
            if tuple(weight.shape) != (self.experts, *shape):
                return f"{name} has another shape"
        return None

    @property
    def text(self) -> str:
        return f"{self.experts} experts: {self.up}, SwiGLU, {self.down}"


def experts_unit(module: torch.nn.Module) -> Unit | str | None:
    """The unit of a module that is experts; why it has none; None if it is nothing like that."""
    weights = {n: p for n, p in module._parameters.items() if p is not None and p.dim() == 3}
    if len(weights) != 2:
        return None
    (up, first), (down, second) = weights.items()
    experts, rows, hidden = first.shape
    if sum(p is not None for p in module._parameters.values()) != 2:
        return "its experts have biases"
    if second.shape != (experts, hidden, rows // 2) or rows % 2:
        return f"the shapes {tuple(first.shape)} and {tuple(second.shape)} are not those of a gate"
    if len(parameters_of(module)) != 3 and not hasattr(module, "config"):
        return "its forward does not take tokens, experts and their weights"
    names = ("hidden_states", "top_k_index", "top_k_weights")
    inputs = tuple((name, REQUIRED) for name in names)
    step = Step(experts_chain(module, up, down), (Ref(0), Ref(1), Ref(2)))
    unit = Unit(inputs, (step,), Ref(3))
    return unit if _is_proved(module, up, down) else "its values are not those of SwiGLU experts"


def experts_chain(module: torch.nn.Module, up: str, down: str) -> Chain:
    """The chain of experts with the parameters ``up`` and ``down``, of their present shapes."""
    experts, rows, hidden = getattr(module, up).shape
    return Chain((ExpertsPart(up, down, experts, hidden, rows // 2),), ())


def _is_proved(module: torch.nn.Module, up: str, down: str) -> bool:
    """Whether a module gives the values of the pipeline, for small weights of as many experts."""
    experts: int = module._parameters[up].shape[0]  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    values = {
        up: torch.randn(experts, 32, 8, generator=generator),
        down: torch.randn(experts, 8, 16, generator=generator),
    }
    tried = bare(module, values)
    pipeline = Pipeline(experts_chain(tried, up, down), tried)
    tokens = 16
    for spread in (0.1, 30.0, 1e4):
        x = spread * torch.randn(tokens, 8, generator=generator)
        order = torch.rand(tokens, experts, generator=generator).argsort(-1)
        chosen = order[:, : min(2, experts)]
        probs = torch.rand(chosen.shape, generator=generator)
        try:
            with torch.no_grad():
                expected = tried(x, chosen, probs)
        except Exception:
            return False
        with torch.no_grad():
            y = pipeline(tried, [x, chosen, probs], is_quantized=False)
        if not are_close(y, expected):
            return False
    return True
