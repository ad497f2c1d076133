"""What options of a conversion would bring: modelled times of modules, as they are and with them.

Notes are made at the conversion, and planned when somebody asks: plain torch is modelled by calls
on tensors without values, for which torch loads its compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser.conversion.modules import child_of
from fuser.conversion.parts import Chain, ForkPart, LinearPart, ModulePart, NormPart
from fuser.plan.cost import NOMINAL_TOKENS
from fuser.plan.devices import DEVICES, device_named
from fuser.plan.plain_torch import EAGER
from fuser.precision.contexts import autocast, default_recipe
from fuser.recipe import Recipe
from fuser.sequential import Sequential

Times = tuple[float, float]
"""Microseconds of forward and backward: of a module as it is, and as an option would have it."""


@dataclass(frozen=True)
class _Noted:
    """Chains, with the parameters that they compute with, without values.

    ``is_converted``: they are pipelines now, and would be quantized; else they are torch's.
    """

    owner: torch.nn.Module
    chains: tuple[Chain, ...]
    is_converted: bool


class Gains:
    """Notes on the modules of a model that an option would change.

    ``recipe`` is that of the conversion, None without one; ``rounding`` its option.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe | None, rounding: str) -> None:
        places = (parameter.device for parameter in model.parameters())
        self._device = device_at(next(places, torch.device("cpu")))
        self._is_quantized, self._recipe = recipe is not None, recipe or default_recipe()
        self._is_torch = rounding == "torch"
        self._noted: dict[str, _Noted] = {}

    def note(
        self, path: str, owner: torch.nn.Module, chains: Sequence[Chain], *, is_converted: bool
    ) -> None:
        """Note that an option would convert a module's chains, or quantize converted ones.

        Nothing is noted of what has no pipeline with the present parameters, of chains that start
        with what does not tell the width of their input, and of ``torch.nn.RMSNorm``.
        """
        if is_converted and not self._is_quantized:
            return
        if isinstance(owner, torch.nn.RMSNorm):
            return  # on a GPU one kernel of torch, which the model of plain torch takes for seven
        for chain in chains:
            is_fused = not self._is_torch or chain.as_torch() == chain
            is_known = isinstance(chain.parts[0], (LinearPart, NormPart, ForkPart))
            if not is_fused or not is_known or any(isinstance(p, ModulePart) for p in chain.parts):
                return
            if any(part.refusal(owner) is not None for part in chain.parts):
                return
        links = tuple(Chain(chain.parts, ()) for chain in chains)
        self._noted[path] = _Noted(_without_values(owner, links), links, is_converted)

    def times(self, device: str | None = None) -> dict[str, Times]:
        """The times of all noted modules by their paths; those that are alike are planned once."""
        device = self._device if device is None else device
        device_named(device)
        known: dict[object, Times] = {}
        result: dict[str, Times] = {}
        for path, noted in self._noted.items():
            parameters = tuple(
                (name, p.shape, p.dtype, p.requires_grad)
                for name, p in noted.owner.named_parameters()
            )
            key = noted.chains, noted.is_converted, parameters
            if key not in known:
                pairs = [self._planned(noted, chain, device) for chain in noted.chains]
                known[key] = sum(now for now, _ in pairs), sum(then for _, then in pairs)
            result[path] = known[key]
        return result

    @property
    def conditions(self) -> str:
        """What the times are modelled for."""
        has_linears = any(chain.linears for noted in self._noted.values() for chain in noted.chains)
        return (
            f"forward and backward of {NOMINAL_TOKENS} tokens, in the dtype of the weights, on "
            f"{device_named(self._device).describe()}"
            + f"; quantized under {type(self._recipe).__name__}"
            * has_linears
        )

    def _planned(self, noted: _Noted, chain: Chain, device: str) -> Times:
        pipeline = Sequential(*chain.pipeline_modules(noted.owner))
        with torch.enable_grad():
            values = chain.values(noted.owner)
        for parameter, value in zip(pipeline.parameters(), values, strict=True):
            parameter.requires_grad_(value.requires_grad)
        dtype, features = values[0].dtype, values[0].shape[-1]
        inputs = [
            torch.empty(NOMINAL_TOKENS, width, dtype=dtype, device="meta", requires_grad=True)
            for width in (features, *(width for width, _ in chain.sums(features)))
        ]
        with autocast(enabled=False):
            plain = pipeline.plan(*inputs, device=device)
        with autocast(recipe=self._recipe):
            then = pipeline.plan(*inputs, device=device).microseconds
        eager = {one.name: one.microseconds for one in plain.baselines}
        return plain.microseconds if noted.is_converted else eager[EAGER], then


def device_at(place: torch.device) -> str:
    """The name in the table of devices of a GPU that is here; else ``"h200"``."""
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else ""
    return next((short for short, device in DEVICES.items() if device.name in name), "h200")


def _without_values(owner: torch.nn.Module, chains: Sequence[Chain]) -> torch.nn.Module:
    """Modules at the paths of the linears and norms of ``chains``, with parameters on meta."""
    skeleton = torch.nn.Module()
    for path in (path for chain in chains for part in chain.parts for path in _paths(part)):
        module: Any = skeleton
        for name in path.split(".") if path else ():
            module = module._modules.setdefault(name, torch.nn.Module())
        for name, value in child_of(owner, path)._parameters.items():
            like = None
            if value is not None:
                like = torch.nn.Parameter(torch.empty_like(value, device="meta"))
                like.requires_grad_(value.requires_grad)
            module.register_parameter(name, like)
    return skeleton


def _paths(part: object) -> Iterator[str]:
    if isinstance(part, LinearPart):
        yield from part.names
    elif isinstance(part, NormPart):
        yield part.name
