"""The ops of a model, also those of layers, which are not submodules."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fuser.op.state import Stateful


class HiddenOps(Stateful):
    """Base of modules whose ops are not submodules: parameters and states are the module's own."""

    ops: torch.nn.Module

    def hand_parameters_to_ops(self) -> None:
        """Give the ops the parameters of this module."""
        raise NotImplementedError


def modules_and_ops(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The submodules with their paths, and after each layer its ops, with its parameters."""
    for path, each in module.named_modules():
        yield path, each
        if isinstance(each, HiddenOps):
            each.hand_parameters_to_ops()
            yield from each.ops.named_modules(prefix=f"{path}.ops".strip("."))
