"""Linear: BasicLinear and Bias under one name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuser.basic_ops import BasicLinear, Bias
from fuser.basic_ops.basic_linear import parallel_text
from fuser.communication import GroupArgument, divided, group_size, rank_in
from fuser.doors import PARAMETERS
from fuser.errors import InputError
from fuser.op import BasicOperation, FusedOperation, ParallelMode, check_parallel_mode, check_sizes


class Linear(FusedOperation):
    """Apply a linear transformation: ``y = x @ weight.T + bias``.

    A composite of ``BasicLinear`` and ``Bias``, which own the parameters:
    state_dict keys are ``basic_ops.0.weight`` and ``basic_ops.1.bias``, and
    ``weight`` and ``bias`` read and set them.

    A row parallel linear is the product of this rank, the bias, and then ``ReduceScatter``, with
    ``sequence_parallel``, or ``AllReduce``. Every rank holds the whole bias and its whole gradient,
    and the first rank of the group adds it.

    Parameters
    ----------
    in_features, out_features
        Last dimension of the input and of the output, of all ranks together.
    bias
        Whether to add a bias, of shape ``[out_features]``.
    device, dtype
        Device and dtype of the weight, of shape ``[out_features, in_features]``, and of the bias.
        By default the device is that of torch if one was set, else a GPU if there is one.
    tensor_parallel_mode
        ``"column"``: each rank has a part of the output's features. ``"row"``: each has a part of
        the input's features, and the products of all ranks are added. None: no part.
    tensor_parallel_group
        A process group, a mesh of one dimension, or None for all ranks.
    sequence_parallel
        Each rank has ``1 / ranks`` of dimension 0 of the input of a column parallel linear, or of
        the output of a row parallel one.
    rng_state_tracker_function
        Returns an object whose ``fork()`` is the context in which the weight is initialised.
    accumulate_into_main_grad
        Add the weight gradient to ``weight.main_grad`` instead of returning it; overwrite the
        buffer if ``weight.overwrite_main_grad`` is true.

    Raises
    ------
    InputTypeError
        On a feature size that is not an integer.
    InputError
        On one that is not positive or that the ranks do not divide, an unknown parallel mode,
        ``sequence_parallel`` without a mode, or a group without this rank.
    StateError
        If a group is given and torch.distributed is not initialised.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: ParallelMode | None = None,
        tensor_parallel_group: GroupArgument = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        check_parallel_mode("Linear", tensor_parallel_mode, sequence_parallel)
        mode, group = tensor_parallel_mode, tensor_parallel_group
        ranks = group_size("Linear", group) if mode is not None else 1
        is_row = mode == "row" and ranks > 1
        if is_row:  # the products of this rank; an op of its own adds them
            in_features = divided("Linear's in_features", in_features, ranks)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        linear = BasicLinear(
            in_features,
            out_features,
            tensor_parallel_mode=None if is_row else mode,
            tensor_parallel_group=group,
            sequence_parallel=sequence_parallel and not is_row,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
            **factory,
        )
        ops: list[BasicOperation] = [linear]
        if bias:
            is_shard = mode == "column"
            ops.append(
                Bias(out_features, tensor_parallel=is_shard, tensor_parallel_group=group, **factory)
            )
        for op in ops:
            op.part_of = "Linear"
        super().__init__(ops)
        if is_row:
            linear.note_products(group)
            self._add_products(group, sequence_parallel)

    def shard(
        self, mode: ParallelMode, group: GroupArgument, sequence_parallel: bool = False
    ) -> None:
        """Shard a linear of one rank over ``group``; the caller replaces the parameters.

        The arguments are ``tensor_parallel_mode``, ``tensor_parallel_group`` and
        ``sequence_parallel`` of the constructor. A row parallel linear gets another basic op, which
        adds the products.

        Raises
        ------
        InputError, StateError
            As the constructor; nothing has changed then.
        """
        check_parallel_mode("Linear", mode, sequence_parallel)
        linear: BasicLinear = self.members[0]
        if mode == "column":
            linear.shard(mode, group, sequence_parallel)
            if self.bias_op is not None:
                self.bias_op.shard(group)
        elif group_size("Linear", group) > 1:
            size = divided("Linear's in_features", linear.in_features, group_size("Linear", group))
            linear.in_features = linear.local_in_features = size
            linear.note_products(group)
            self._add_products(group, sequence_parallel)

    def _add_products(self, group: GroupArgument, is_scattered: bool) -> None:
        """Make this a row parallel linear, whose first op computes the products of this rank."""
        if self.bias_op is not None:
            self.bias_op.is_added = rank_in("Linear", group) == 0
        ranks = group_size("Linear", group)
        parallel = PARAMETERS.guest.parallelism("row", ranks, is_scattered)
        self._set_members([*self.members, parallel.adding_op(group)])

    @property
    def in_features(self) -> int:
        """Last dimension of the input, of all ranks together."""
        features: int = self.members[0].whole_in_features
        return features

    @property
    def out_features(self) -> int:
        """Last dimension of the output, of all ranks together."""
        features: int = self.members[0].out_features
        return features

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight on this rank, of one rank ``[out_features, in_features]``; may be replaced."""
        parameter: torch.nn.Parameter = self.members[0].weight
        return parameter

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """The bias on this rank, of one rank ``[out_features]``, or None; may be replaced."""
        op = self.bias_op
        return None if op is None else op.bias

    def plain_names(self) -> dict[str, str]:
        bias = self.bias_op
        names = {"basic_ops.0.weight": "weight"}
        return names if bias is None else names | {"basic_ops.1.bias": "bias"}

    @property
    def bias_op(self) -> Bias | None:
        """The op that adds the bias; None without one."""
        return next((op for op in self.members if isinstance(op, Bias)), None)

    def __repr__(self) -> str:
        linear, *others = self.members
        are_own = all(type(op) is Bias or op.process_groups for op in others)
        if type(linear) is not BasicLinear or not are_own:
            return super().__repr__()  # with adapters, say
        bias = ", bias=False" * (self.bias_op is None)
        parallel = parallel_text([linear])
        return f"{type(self).__name__}({self.in_features}, {self.out_features}{bias}{parallel})"

    def __setattr__(self, name: str, value: Any) -> None:
        # torch would register a Parameter here instead of calling a property.
        if name == "weight":
            self.members[0].weight = value
        elif name == "bias" and self.bias_op is not None:
            self.bias_op.bias = value
        elif name == "bias" and value is not None:
            raise InputError(
                "This Linear was made with bias=False and cannot be given a bias."
                " Make one with a bias."
            )
        elif name != "bias":
            super().__setattr__(name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name in ("weight", "bias"):
            setattr(self, name, param)
        else:
            super().register_parameter(name, param)
