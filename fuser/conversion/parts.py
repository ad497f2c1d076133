"""The parts of a converted chain: the ops that compute a child's values, from its parameters."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fuser import basic_ops, fused_ops
from fuser.conversion.modules import child_of, hooks_of, original_class
from fuser.op import COMPUTE_DTYPES
from fuser.runtime.joined_weights import joined

PLAIN_TENSORS = (torch.nn.Parameter, torch.Tensor)
"""The classes of a weight that fuser computes with; others are quantized or sharded by others."""


Function = Callable[[torch.Tensor], torch.Tensor]


def is_gathered(weight: Any) -> bool:
    """Whether ``fully_shard`` has gathered a weight quantized, as ``gather_quantized`` asks."""
    return getattr(weight, "_gathering", None) is not None


class KnownActivation(NamedTuple):
    """An activation, its op, and the op that multiplies it with a second half; None for none."""

    function: Function
    op: str
    gated_op: str | None
    options: tuple[tuple[str, str], ...] = ()


ACTIVATIONS = (
    KnownActivation(F.silu, "SiLU", "SwiGLU"),
    KnownActivation(
        functools.partial(F.gelu, approximate="tanh"), "GELU", "GEGLU", (("approximate", "tanh"),)
    ),
    KnownActivation(F.gelu, "GELU", "GEGLU", (("approximate", "none"),)),
    KnownActivation(F.relu, "ReLU", "ReGLU"),
    KnownActivation(lambda x: F.relu(x).square(), "SReLU", "SReGLU"),
    KnownActivation(lambda x: x * torch.sigmoid(1.702 * x), "QGELU", "QGEGLU"),
    KnownActivation(torch.sigmoid, "", "GLU"),
)

GATED = frozenset(known.gated_op for known in ACTIVATIONS)


@dataclass(frozen=True)
class Part(ABC):
    """A link of a chain. It holds names and numbers alone, so that it can be pickled."""

    @abstractmethod
    def modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        """What the pipeline has in this place: ops on meta, or the owner's own module."""

    def as_torch(self) -> Part:
        """The part with torch's order of rounding in 16 bits."""
        return self

    def tensors(self, owner: torch.nn.Module) -> list[tuple[torch.Tensor, ...]]:
        """Of each of the ops' parameters, in their order, the present tensors that it joins."""
        return []

    def takes(self, inputs: Sequence[Any]) -> bool:
        """Whether a pipeline that starts with this part takes these inputs of the forward."""
        return True

    def inputs(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The inputs of a pipeline that starts with this part, from those of the forward."""
        return inputs

    def sized(self, owner: torch.nn.Module) -> Part:
        """The part with the sizes of another owner's parameters."""
        return self

    def refusal(self, owner: torch.nn.Module) -> str | None:
        """Why the owner's present children are no longer what was converted; None if they are."""
        return None

    @property
    def weights(self) -> tuple[str, ...]:
        """The paths from the owner of the weights of its ops that quantize, in their order."""
        return ()

    @property
    @abstractmethod
    def text(self) -> str:
        """The part in a report."""


@dataclass(frozen=True)
class LinearPart(Part):
    """A linear, or several with one input, whose outputs follow one another.

    ``names`` are their paths from the owner, ``shape`` is that of their weights together, as
    ``[out, in]``, though each is ``[in, out]`` if they are transposed. ``outputs`` has the number
    of outputs of each, if they differ.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    has_bias: bool
    is_transposed: bool = False
    outputs: tuple[int, ...] = ()

    def modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        out_features, in_features = self.shape
        dtype = child_of(owner, self.names[0]).weight.dtype
        return [
            fused_ops.Linear(
                in_features, out_features, bias=self.has_bias, device="meta", dtype=dtype
            )
        ]

    @property
    def weights(self) -> tuple[str, ...]:
        first, *others = self.names
        return (" and ".join([first, *(name.rpartition(".")[2] for name in others)]),)

    def tensors(self, owner: torch.nn.Module) -> list[tuple[torch.Tensor, ...]]:
        linears: list[Any] = [child_of(owner, name) for name in self.names]
        weights = tuple([n.weight.t() if self.is_transposed else n.weight for n in linears])
        return [weights, tuple([n.bias for n in linears])] if self.has_bias else [weights]

    def sized(self, owner: torch.nn.Module) -> Part:
        (weights, *_) = self.tensors(owner)
        rows, columns = joined(weights).shape
        return replace(self, shape=(rows, columns))

    def refusal(self, owner: torch.nn.Module) -> str | None:
        linears, count = [child_of(owner, name) for name in self.names], len(self.names)
        names = [name or "it" for name in self.names]
        first = linears[0].weight
        rows, columns = self.shape
        outputs = self.outputs or (rows // count,) * count
        for name, linear, expected in zip(names, linears, outputs, strict=True):
            weight = linear._parameters.get("weight")
            if type(weight) not in PLAIN_TENSORS and not is_gathered(weight):
                return f"the weight of {name} is a {type(weight).__name__}"
            if is_gathered(weight) != is_gathered(first):
                return f"the weights of {' and '.join(names)} are not all gathered quantized"
            if count > 1 and is_gathered(first):
                joint = weight._gathering.joint
                if joint is None or joint is not first._gathering.joint:
                    return f"the weights of {' and '.join(names)} are gathered quantized apart"
            if weight.dtype not in COMPUTE_DTYPES or weight.dtype is not first.dtype:
                return f"the weight of {name} is {weight.dtype}"
            if (linear._parameters.get("bias") is not None) != self.has_bias:
                return f"the bias of {name} was added or removed"
            shape = (columns, expected) if self.is_transposed else (expected, columns)
            if weight.shape != shape:
                return f"the weight of {name} has another shape, {tuple(weight.shape)}"
        return None

    @property
    def text(self) -> str:
        return " and ".join(name.rpartition(".")[2] or "linear" for name in self.names)


@dataclass(frozen=True)
class ActivationPart(Part):
    """An activation: a class of :mod:`fuser.basic_ops` and its arguments.

    ``is_torchs``: with torch's functions, where it is rounded before it is multiplied.
    """

    op: str
    options: tuple[tuple[str, str], ...] = ()
    is_torchs: bool = False

    def modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        if self.is_torchs:
            return [TorchActivation(self.op, self.options)]
        return [getattr(basic_ops, self.op)(**dict(self.options))]

    def as_torch(self) -> Part:
        return replace(self, is_torchs=True)

    @property
    def text(self) -> str:
        return self.op


class TorchActivation(torch.nn.Module):
    """An activation, or the product of one of the first half with the second, by torch."""

    def __init__(self, op: str, options: tuple[tuple[str, str], ...]) -> None:
        super().__init__()
        self.known = next(
            known for known in ACTIVATIONS if op in known[1:3] and known.options == options
        )
        self.is_gated = op == self.known.gated_op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_gated:
            return self.known.function(x)
        gate, up = x.chunk(2, dim=-1)
        return self.known.function(gate) * up


@dataclass(frozen=True)
class NormPart(Part):
    """A norm with the parameters of the child ``name``."""

    name: str
    op: str
    size: int
    eps: float
    is_zero_centered: bool = False

    def modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        dtype = child_of(owner, self.name).weight.dtype
        cls = {"LayerNorm": basic_ops.LayerNorm, "RMSNorm": basic_ops.RMSNorm}[self.op]
        centered = self.is_zero_centered
        return [
            cls(self.size, eps=self.eps, device="meta", dtype=dtype, zero_centered_gamma=centered)
        ]

    def as_torch(self) -> Part:
        return ModulePart(self.name)

    def tensors(self, owner: torch.nn.Module) -> list[tuple[torch.Tensor, ...]]:
        norm: Any = child_of(owner, self.name)
        return [(norm.weight,), (norm.bias,)] if self.op == "LayerNorm" else [(norm.weight,)]

    def sized(self, owner: torch.nn.Module) -> Part:
        return replace(self, size=child_of(owner, self.name).weight.numel())

    def refusal(self, owner: torch.nn.Module) -> str | None:
        norm, name = child_of(owner, self.name), self.name or "it"
        present = [type(value) for value in norm._parameters.values() if value is not None]
        if len(present) != 1 + (self.op == "LayerNorm") or set(present) - set(PLAIN_TENSORS):
            return f"the parameters of {name} were changed"
        if norm.weight.dtype not in COMPUTE_DTYPES:
            return f"the weight of {name} is {norm.weight.dtype}"
        return None

    @property
    def text(self) -> str:
        return self.op + " (1 + weight)" * self.is_zero_centered


@dataclass(frozen=True)
class ModulePart(Part):
    """A child that runs as itself, such as a dropout, whose random numbers are torch's."""

    name: str

    def modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        return [child_of(owner, self.name)]

    @property
    def text(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class ForkPart(Part):
    """The start of a residual connection."""

    channel: str

    def modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        fork = basic_ops.MakeExtraOutput()
        fork.set_extra_output_channel(0, self.channel, output_to_caller=False)
        return [fork]

    @property
    def text(self) -> str:
        return ""


@dataclass(frozen=True)
class AddPart(Part):
    """The end of a residual connection, or the sum with another input if ``channel`` is None."""

    channel: str | None
    is_rounded_before: bool = False

    def modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        add = basic_ops.AddExtraInput()
        if self.channel is not None:
            add.set_extra_input_channel(0, self.channel)
        # A module between ends a pipeline, whose output is rounded.
        return [torch.nn.Identity(), add] if self.is_rounded_before else [add]

    def as_torch(self) -> Part:
        return replace(self, is_rounded_before=True)

    @property
    def text(self) -> str:
        return "residual" if self.channel is not None else "add"


@dataclass(frozen=True)
class Chain:
    """Parts that follow one another, from the input to the output, and the modules they replace.

    ``replaced`` has every module that is not called any more: its path from the owner, its class.
    """

    parts: tuple[Part, ...]
    replaced: tuple[tuple[str, type], ...] = field(repr=False)

    def pipeline_modules(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        """The modules of the chain's pipeline."""
        return [module for part in self.parts for module in part.modules(owner)]

    def tensors(self, owner: torch.nn.Module) -> list[tuple[torch.Tensor, ...]]:
        """Of each parameter, in the order of their places in the ops, the tensors that it joins."""
        return [tensors for part in self.parts for tensors in part.tensors(owner)]

    def values(self, owner: torch.nn.Module) -> list[torch.Tensor]:
        """The present parameters, in the order of their places in the ops."""
        return [joined(tensors) for tensors in self.tensors(owner)]

    @property
    def has_sums(self) -> bool:
        """Whether it adds another input of the forward."""
        return any(isinstance(part, AddPart) and part.channel is None for part in self.parts)

    @property
    def starts_with_a_sum(self) -> bool:
        """Whether it adds another input to the main one itself, so that each may be the other."""
        first = self.parts[0]
        return isinstance(first, AddPart) and first.channel is None

    def sums(self, features: int) -> list[tuple[int, bool]]:
        """The row width of each sum with another input, and whether a product came before it.

        ``features`` is the width of the main input.
        """
        sums, is_of_product = [], False
        for part in self.parts:
            if isinstance(part, LinearPart):
                features, is_of_product = part.shape[0], True
            elif isinstance(part, ActivationPart):
                features //= 1 + (part.op in GATED)
            elif isinstance(part, AddPart) and part.channel is None:
                sums.append((features, is_of_product))
        return sums

    def refusal(self, owner: torch.nn.Module) -> str | None:
        """Why the owner is no longer what was converted; None if it is."""
        for path, cls in self.replaced:
            module = child_of(owner, path)
            if module is None or cls not in (type(module), original_class(module)):
                return f"{path} is a {type(module).__name__} and was a {cls.__name__}"
            if path and (hooks := hooks_of(module)):
                return f"{path} has {hooks}"
        for part in self.parts:
            if (refusal := part.refusal(owner)) is not None:
                return refusal
        return None

    def in_autocast(self) -> Chain:
        """The chain with the owner's own norms where what reads them is no linear; itself if none.

        torch's autocast has norms in fp32; fuser's are in 16 bits, as a linear reads them.
        """
        following = (*self.parts[1:], None)
        parts = tuple(
            part.as_torch()
            if isinstance(part, NormPart) and not isinstance(after, LinearPart)
            else part
            for part, after in zip(self.parts, following, strict=True)
        )
        return self if parts == self.parts else replace(self, parts=parts)

    def as_torch(self) -> Chain:
        """The chain with torch's order of rounding in 16 bits."""
        parts = tuple(part.as_torch() for part in self.parts)
        kept = {part.name for part in parts if isinstance(part, ModulePart)}
        return Chain(parts, tuple(pair for pair in self.replaced if pair[0] not in kept))

    def sized(self, owner: torch.nn.Module) -> Chain:
        """The chain with the sizes of another owner's parameters."""
        return replace(self, parts=tuple(part.sized(owner) for part in self.parts))

    @property
    def linears(self) -> list[str]:
        """The paths of all linears."""
        linears = (part for part in self.parts if isinstance(part, LinearPart))
        return [name for part in linears for name in part.names]

    @property
    def text(self) -> str:
        return ", ".join(part.text for part in self.parts if part.text)
