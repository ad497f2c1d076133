"""What options of a conversion would bring: modelled times of modules, as they are and with them.

Notes are made at the conversion, and planned when somebody asks: plain torch is modelled by calls
on tensors without values, for which torch loads its compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fuser.conversion.parts import Chain, ForkPart, LinearPart, ModulePart, NormPart, Part
from fuser.plan.cost import NOMINAL_TOKENS
from fuser.plan.devices import DEVICES, device_named
from fuser.plan.plain_torch import EAGER
from fuser.precision.contexts import autocast, default_recipe
from fuser.recipe import Recipe
from fuser.sequential import Sequential

Times = tuple[float, float]
"""Microseconds of forward and backward: of a module as it is, and as an option would have it."""

Kind = tuple[tuple[tuple[Part, ...], ...], tuple[tuple[torch.dtype, bool], ...], bool]
"""What times depend on: the parts of chains, dtypes of parameters and whether they are trained,
and whether the chains are pipelines, which would be quantized; else they are torch's."""


class _ModelledPipeline(NamedTuple):
    """A pipeline of a chain, without values, and what its inputs are like."""

    sequential: Sequential
    dtype: torch.dtype
    widths: list[int]


class Gains:
    """Notes on the modules of a model that an option would change.

    ``recipe`` is that of the conversion, None without one; ``rounding`` its option.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe | None, rounding: str) -> None:
        places = (parameter.device for parameter in model.parameters())
        self._device = device_at(next(places, torch.device("cpu")))
        self._is_quantized, self._recipe = recipe is not None, recipe or default_recipe()
        self._is_torch = rounding == "torch"
        self._kinds: dict[str, Kind] = {}
        self._pipelines: dict[Kind, list[_ModelledPipeline]] = {}

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
        with torch.inference_mode(False), torch.enable_grad():
            values = [chain.values(owner) for chain in chains]
        facts = tuple(
            (value.dtype, value.requires_grad) for of_chain in values for value in of_chain
        )
        kind = tuple(chain.parts for chain in chains), facts, is_converted
        self._kinds[path] = kind
        if kind not in self._pipelines:
            pairs = zip(chains, values, strict=True)
            self._pipelines[kind] = [_pipeline(chain, owner, of_chain) for chain, of_chain in pairs]

    def times(self, device: str | None = None) -> dict[str, Times]:
        """The times of all noted modules by their paths; those that are alike are planned once."""
        device = self._device if device is None else device
        device_named(device)
        of_kinds: dict[Kind, Times] = {}
        for kind, pipelines in self._pipelines.items():
            *_, is_converted = kind
            pairs = [self._planned(pipeline, device, is_converted) for pipeline in pipelines]
            of_kinds[kind] = sum(now for now, _ in pairs), sum(then for _, then in pairs)
        return {path: of_kinds[kind] for path, kind in self._kinds.items()}

    @property
    def conditions(self) -> str:
        """What the times are modelled for."""
        parts = (part for chains, *_ in self._pipelines for chain in chains for part in chain)
        has_linears = any(isinstance(part, LinearPart) for part in parts)
        return (
            f"forward and backward of {NOMINAL_TOKENS} tokens, in the dtype of the weights, on "
            f"{device_named(self._device).describe()}"
            + f"; quantized under {type(self._recipe).__name__}"
            * has_linears
        )

    def _planned(self, pipeline: _ModelledPipeline, device: str, is_converted: bool) -> Times:
        inputs = [
            torch.empty(NOMINAL_TOKENS, w, dtype=pipeline.dtype, device="meta", requires_grad=True)
            for w in pipeline.widths
        ]
        with autocast(enabled=False):
            plain = pipeline.sequential.plan(*inputs, device=device)
        with autocast(recipe=self._recipe):
            then = pipeline.sequential.plan(*inputs, device=device).microseconds
        eager = {one.name: one.microseconds for one in plain.baselines}
        return plain.microseconds if is_converted else eager[EAGER], then


def device_at(place: torch.device) -> str:
    """The name in the table of devices of a GPU that is here; else ``"h200"``."""
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else ""
    return next((short for short, device in DEVICES.items() if device.name in name), "h200")


def _pipeline(
    chain: Chain, owner: torch.nn.Module, values: Sequence[torch.Tensor]
) -> _ModelledPipeline:
    sequential = Sequential(*chain.pipeline_modules(owner))
    for parameter, value in zip(sequential.parameters(), values, strict=True):
        parameter.requires_grad_(value.requires_grad)
    features = values[0].shape[-1]
    widths = [features, *(width for width, _ in chain.sums(features))]
    return _ModelledPipeline(sequential, values[0].dtype, widths)
