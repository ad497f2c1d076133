"""Parameters over several ranks: who answers what the core asks of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fuser.basic_ops.linear_parallel import Parallelism
from fuser.communication import ranks_of
from fuser.doors import PARAMETERS, ParameterSource
from fuser.precision.amax_reduction import amaxes_over_ranks
from fuser.runtime.local_parts import are_gathered, local_parts
from fuser.tensors import Quantizer
from fuser.tensors.sharding import initialise_shard, memory_of, shard_of_values


class ShardedParameters(ParameterSource):
    """Ranks have parts of parameters, and reduce amaxes."""

    parallelism = staticmethod(Parallelism)
    amaxes = staticmethod(amaxes_over_ranks)
    local_parts = staticmethod(local_parts)
    are_gathered = staticmethod(are_gathered)
    memory_of = staticmethod(memory_of)

    def initialise(
        self,
        op: Any,
        name: str,
        fill: Callable[[torch.Tensor], Any],
        quantizer: Quantizer | None,
    ) -> None:
        make = None
        if quantizer is not None:
            is_kept = op._init.preserve_high_precision_init_val
            make = functools.partial(shard_of_values, quantizer=quantizer, is_kept=is_kept)
        dim, group = op.placement_of(name)
        part = None if dim is None else (dim, ranks_of(type(op).__name__, group))
        initialise_shard(getattr(op, name), fill, make, part)


PARAMETERS.open(ShardedParameters())
