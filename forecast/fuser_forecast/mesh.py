"""Meshes of GPUs: replicas x FSDP x TP, with experts spread over ranks of FSDP and TP."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from fuser.errors import InputError
from fuser.plan.transformers import Transformer
from fuser_forecast.hardware import Ranks


@dataclass(frozen=True)
class Sizes:
    """Sizes of a mesh that are given; those that are None are chosen."""

    fsdp: int | None = None
    tp: int | None = None
    ep: int | None = None
    replicas: int | None = None
    gpus_per_node: int = 8


ANY = Sizes()


@dataclass(frozen=True)
class Mesh:
    """``gpus = replicas * fsdp * tp``; neighbours are of one tensor parallel group.

    The experts are spread over ``ep`` neighbouring GPUs of the ``fsdp * tp``, and their weights
    are sharded over the ``fsdp * tp / ep`` that have the same experts.

    Raises
    ------
    InputError
        If the sizes do not multiply to the number of GPUs, or a group ends inside a node.
    """

    gpus: int
    fsdp: int
    tp: int = 1
    ep: int = 1
    replicas: int = 1
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise InputError(f"The mesh has {name} {size}; it must be 1 or more.")
        if self.replicas * self.fsdp * self.tp != self.gpus:
            raise InputError(
                f"The mesh of replicas {self.replicas} x fsdp {self.fsdp} x tp {self.tp} has "
                f"{self.replicas * self.fsdp * self.tp} GPUs, and there are {self.gpus}."
            )
        node = self.gpus_per_node
        if self.gpus > node and self.gpus % node:
            raise InputError(f"{self.gpus} GPUs are not whole nodes of {node}.")
        _check_tensor(self.tp, node)
        if (self.fsdp * self.tp) % self.ep:
            raise InputError(
                f"ep is {self.ep}, and fsdp {self.fsdp} x tp {self.tp} is {self.fsdp * self.tp} "
                "GPUs, which it does not divide."
            )

    @functools.cached_property
    def tensor(self) -> Ranks:
        """The ranks of a tensor parallel group."""
        return self._group(1, self.tp)

    @functools.cached_property
    def shards(self) -> Ranks:
        """The ranks over which weights are sharded, except those of experts."""
        return self._group(self.tp, self.fsdp)

    @functools.cached_property
    def experts(self) -> Ranks:
        """The ranks over which experts are spread."""
        return self._group(1, self.ep)

    @functools.cached_property
    def expert_shards(self) -> Ranks:
        """The ranks over which the weights of the same experts are sharded."""
        return self._group(self.ep, self.fsdp * self.tp // self.ep)

    @functools.cached_property
    def copies(self) -> Ranks:
        """The ranks that have the same shards."""
        return self._group(self.fsdp * self.tp, self.replicas)

    def _group(self, stride: int, size: int) -> Ranks:
        """``size`` ranks of which neighbours are ``stride`` GPUs apart."""
        if self.gpus <= self.gpus_per_node:
            return Ranks(size, size)
        return Ranks(size, math.gcd(size, max(1, self.gpus_per_node // stride)))

    def check(self, model: Transformer) -> None:
        """Refuse a model that this mesh does not divide.

        Raises
        ------
        InputError
        """
        for name in ("heads", "kv_heads", "intermediate", "vocab"):
            size = getattr(model, name)
            if size % self.tp and not (name == "intermediate" and model.experts):
                raise InputError(
                    f"{model.name} has {name} {size}, which tp {self.tp} does not divide."
                )
        if self.ep > 1 and not model.experts:
            raise InputError(f"ep is {self.ep}, and {model.name} has no experts.")
        if model.experts % self.ep:
            raise InputError(
                f"{model.name} has {model.experts} experts, which ep {self.ep} does not divide."
            )


def meshes(model: Transformer, gpus: int, sizes: Sizes) -> list[Mesh]:
    """All meshes of ``gpus`` that ``sizes`` and the model allow; never empty.

    Raises
    ------
    InputError
        If there is none.
    """
    for name, size in {"gpus": gpus, **vars(sizes)}.items():
        if size is not None and size < 1:
            raise InputError(f"{name} is {size}; it must be 1 or more.")
    _check_given(gpus, sizes)
    allowed: list[Mesh] = []
    refusals: list[InputError] = []
    for fsdp, tp, ep, replicas in _choices(model, gpus, sizes):
        try:
            mesh = Mesh(gpus, fsdp, tp, ep, replicas, sizes.gpus_per_node)
            mesh.check(model)
        except InputError as error:
            refusals.append(error)
        else:
            allowed.append(mesh)
    if not allowed:
        raise refusals[-1]  # of the largest tp and fsdp
    return allowed


def _check_given(gpus: int, sizes: Sizes) -> None:
    """Refuse sizes that no choice of the others completes to a mesh of ``gpus``."""
    if sizes.tp is not None:
        _check_tensor(sizes.tp, sizes.gpus_per_node)
    given = {name: getattr(sizes, name) or 1 for name in ("replicas", "fsdp", "tp")}
    for factors in (given, {"ep": sizes.ep or 1}):
        if gpus % math.prod(factors.values()):
            text = " x ".join(f"{name} {size}" for name, size in factors.items() if size > 1)
            raise InputError(f"{text} does not divide {gpus} GPUs.")


def _check_tensor(tp: int, node: int) -> None:
    if node % tp:
        raise InputError(
            f"tp is {tp}, and a node has {node} GPUs: tensor parallel groups are parts of a node, "
            "so tp divides it."
        )


def _choices(model: Transformer, gpus: int, sizes: Sizes) -> Iterator[tuple[int, int, int, int]]:
    """fsdp, tp, ep and replicas; those that multiply to other numbers of GPUs are refused later."""
    for tp in _divisors(math.gcd(sizes.gpus_per_node, gpus)) if sizes.tp is None else [sizes.tp]:
        left = max(1, gpus // tp)
        if sizes.fsdp is not None:
            shards = [sizes.fsdp]
        else:
            shards = _divisors(left) if sizes.replicas is None else [max(1, left // sizes.replicas)]
        for fsdp in shards:
            replicas = max(1, left // fsdp) if sizes.replicas is None else sizes.replicas
            experts = _divisors(math.gcd(model.experts, fsdp * tp)) if model.experts else [1]
            for ep in experts if sizes.ep is None else [sizes.ep]:
                yield fsdp, tp, ep, replicas


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
