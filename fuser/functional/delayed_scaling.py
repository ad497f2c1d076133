"""Update of delayed scaling: one kernel for many states, or PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.cuda import fp8_scaling as kernels
from fuser.cuda.launch import kernels_support
from fuser.doors import PASSES
from fuser.errors import KernelUnavailable
from fuser.reference import fp8_scaling as reference


def update_delayed(
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_fp8: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor | None] | None = None,
    *,
    margin: int = 0,
    algorithm: str = "max",
    cache: dict[Any, Any] | None = None,
) -> None:
    """Update many states of delayed scaling, all on one device; see the reference.

    ``cache``, of the caller, keeps recorded launches over these tensors.
    """
    newest = amaxes or [None] * len(scales)
    options: dict[str, Any] = {"margin": margin, "algorithm": algorithm}
    if scales and kernels_support(scales[0]):
        try:
            PASSES.guest.constant_launches(
                {} if cache is None else cache,
                (margin, algorithm, *map(id, newest)),
                (*amax_histories, *scales, *max_fp8, *filter(torch.is_tensor, amaxes or ())),
                lambda: kernels.update_delayed(amax_histories, scales, max_fp8, newest, **options),
            )
        except KernelUnavailable:
            pass
        else:
            return
    for state in zip(amax_histories, scales, max_fp8, newest, strict=True):
        reference.update_delayed(*state, **options)
