"""Linear: BasicLinear and Bias under one name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuser.basic_ops import BasicLinear, Bias
from fuser.errors import InputError
from fuser.op import FusedOperation, FusibleOperation


class Linear(FusedOperation):
    """Apply a linear transformation: ``y = x @ weight.T + bias``.

    A composite of ``BasicLinear`` and ``Bias``, which own the parameters:
    state_dict keys are ``basic_ops.0.weight`` and ``basic_ops.1.bias``, and
    ``weight`` and ``bias`` read and set them.

    Parameters
    ----------
    in_features, out_features
        Last dimension of the input and of the output.
    bias
        Whether to add a bias.
    device, dtype, tensor_parallel_mode, tensor_parallel_group, sequence_parallel, \
    rng_state_tracker_function, accumulate_into_main_grad
        As in ``BasicLinear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        ops: list[FusibleOperation] = [
            BasicLinear(
                in_features,
                out_features,
                device=device,
                dtype=dtype,
                tensor_parallel_mode=tensor_parallel_mode,
                tensor_parallel_group=tensor_parallel_group,
                sequence_parallel=sequence_parallel,
                rng_state_tracker_function=rng_state_tracker_function,
                accumulate_into_main_grad=accumulate_into_main_grad,
            )
        ]
        if bias:
            ops.append(
                Bias(
                    out_features,
                    device=device,
                    dtype=dtype,
                    tensor_parallel=tensor_parallel_mode is not None,
                    tensor_parallel_group=tensor_parallel_group,
                )
            )
        super().__init__(ops)

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight, shape ``[out_features, in_features]``; may be replaced."""
        parameter: torch.nn.Parameter = self.members[0].weight
        return parameter

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """The bias, shape ``[out_features]``, or None without one; may be replaced."""
        if len(self.members) == 1:
            return None
        parameter: torch.nn.Parameter = self.members[-1].bias
        return parameter

    def __setattr__(self, name: str, value: Any) -> None:
        # torch would register a Parameter here instead of calling a property.
        if name == "weight":
            self.members[0].weight = value
        elif name == "bias" and len(self.members) > 1:
            self.members[-1].bias = value
        elif name == "bias" and value is not None:
            raise InputError("This Linear was made with bias=False and cannot be given a bias.")
        elif name != "bias":
            super().__setattr__(name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name in ("weight", "bias"):
            setattr(self, name, param)
        else:
            super().register_parameter(name, param)
