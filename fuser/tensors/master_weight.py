"""MasterWeight: an unquantized weight that ``fully_shard`` (FSDP2) gathers quantized."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser.cuda.launch import kernel_refusal
from fuser.errors import StateError
from fuser.recipe import Recipe
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.gathering import KnownSignature, calling_gatherer, gather
from fuser.tensors.joined_gathering import has_one_scale
from fuser.tensors.quantizer import Quantizer
from fuser.tensors.sharding import Gathered, shards_of_values
from fuser.torch_private import (
    forwards_without_backward,
    fsdp_caller,
    local_shard,
    make_wrapper,
    no_torch_function,
    pytree,
    schema_of,
    training_state,
    whole_size,
)

aten = torch.ops.aten


@dataclass(eq=False)
class Joint:
    """Weights that ops read as one, and so under one scale, if the format has one for a tensor.

    ``names`` are those of the weights, for messages.
    """

    names: tuple[str, ...]

    def text(self, recipe: Recipe) -> str:
        """The begin of a sentence about them."""
        return (
            f"{', '.join(self.names)} are read as one weight under {recipe}, which has one scale "
            "for it,"
        )


@dataclass(eq=False)
class _State:
    """What all views of a master weight share: its quantizer, and what was gathered last."""

    recipe: Recipe
    quantizer: Quantizer
    joint: Joint | None = None
    shard: QuantizedTensor | None = None
    is_new: bool = False  # the shard was quantized for the gathering that comes next
    backward_reads: set[str] = field(default_factory=set)
    known: dict[Any, Any] = field(default_factory=dict)
    """What is known of quantizations of this and the weights after it, which are repeated."""

    def __deepcopy__(self, memo: dict[int, object]) -> _State:
        return _State(self.recipe, self.quantizer, copy.deepcopy(self.joint, memo))


class MasterWeight(torch.Tensor):
    """A weight of plain values, which behaves as them, and is gathered quantized.

    A forward and its backward get a :class:`QuantizedTensor`, with the bytes of ``quantizer`` for
    the values of all ranks, in the dtype of the mixed precision policy. A shard is quantized before
    each forward; the backward gathers the same bytes. Results of operations are plain tensors,
    except views, copies and empty tensors like it. It is pickled as a plain tensor.

    ``values``, fp32, fp16 or bf16 ``[M, K]``, are shared. ``recipe`` is that of
    ``gather_quantized``, under which ops read the gathered weight, and ``joint`` has the weights
    with which it is read as one; None if it is read alone.
    """

    _plain: torch.Tensor
    _state: _State

    # torch calls this for every function; ours are handled below autograd.
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls: type[MasterWeight],
        values: torch.Tensor,
        recipe: Recipe,
        quantizer: Quantizer,
        joint: Joint | None = None,
    ) -> MasterWeight:
        return cls._of(values, _State(recipe, quantizer, joint))

    @classmethod
    def _of(cls, values: torch.Tensor, state: _State) -> MasterWeight:
        self: MasterWeight = make_wrapper(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
            requires_grad=values.requires_grad,
        )
        self._plain = values
        self._state = state
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self._plain!r}, {self._state.quantizer!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> MasterWeight:
        if id(self) in memo or not self.is_leaf:
            copied: MasterWeight = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
            return copied
        # Torch's own deep copy fails on a wrapper with a storage offset: one of an op's experts.
        attributes = copy.deepcopy(self.__dict__, memo)
        copied = MasterWeight._of(attributes["_plain"], attributes["_state"])
        copied.__dict__.update(attributes)
        copied.requires_grad_(self.requires_grad)
        copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        plain = self._plain
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain.detach(), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        plain_args = pytree.tree_map_only(MasterWeight, lambda one: one._plain, args)
        plain_kwargs = pytree.tree_map_only(MasterWeight, lambda one: one._plain, kwargs)
        result = func(*plain_args, **plain_kwargs)
        first = args[0] if args else None
        if not isinstance(first, MasterWeight):
            return result
        if schema_of(func).is_mutable:
            return first if isinstance(result, torch.Tensor) else result
        if func in _KEEPS_CLASS:
            state = first._state_of_result(func)
            return pytree.tree_map_only(
                torch.Tensor, lambda one: MasterWeight._of(one, state), result
            )
        return result

    def _state_of_result(self, func: object) -> _State:
        """The same for a view of these values and for ``fully_shard``'s copy on another device.

        Another weight, such as a clone or the shard of a weight, has a state of its own.
        """
        if func not in _MAY_BE_ANOTHER:
            return self._state
        is_another = fsdp_caller("FSDPParam", "_init_sharded_param") is not None
        if func not in _VIEWS:
            is_another = is_another or fsdp_caller("FSDPParam") is None
        state = self._state
        return _State(state.recipe, state.quantizer, state.joint) if is_another else state

    @property
    def data(self) -> torch.Tensor:
        """The values without their history, as a master weight that shares them."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        plain = (value._plain if isinstance(value, MasterWeight) else value).detach()
        torch.Tensor.data.__set__(self, MasterWeight._of(plain, self._state))  # type: ignore[attr-defined]
        self._plain, self._state.shard, self._state.is_new = plain, None, False

    @KnownSignature
    def fsdp_pre_all_gather(
        self,
        mesh: object,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The bytes and scales of this shard that the pass needs, as of a quantized parameter."""
        state, gathered = self._state, calling_gatherer(self)
        group = gathered.group
        is_backward = training_state(group) == "PRE_BACKWARD"
        if not state.is_new and (state.shard is None or not is_backward):
            _quantize(self, gathered, is_backward=is_backward)
        shard, state.is_new = state.shard, False
        assert shard is not None
        parts, sent = gather(shard, gathered, outer_size)
        sent.gathering.recipe = state.recipe
        if is_backward and forwards_without_backward(group) <= 1:
            state.shard = None  # no other backward is to come
        return parts, (shard, sent)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """The whole quantized weight, for ``fully_shard``."""
        shard, sent = metadata
        return shard.fsdp_post_all_gather(all_gather_outputs, sent, param_dtype, out=out)


def _quantize(weight: MasterWeight, gathered: Gathered, *, is_backward: bool) -> None:
    """Make new shards of ``weight`` and of the weights of its group that are gathered after it.

    In a backward only of those that have none. Their amaxes are reduced together: torch asks the
    parameters of a group one after another, on all ranks in the same order. A weight that is kept
    on the CPU comes as a copy on the device, one at a time, and is quantized alone.
    """
    weights = [(weight, gathered.param)]
    if not gathered.param.offload_to_cpu:
        after = itertools.dropwhile(lambda p: p is not gathered.param, gathered.group.fsdp_params)
        weights += [
            (other, param)
            for param in itertools.islice(after, 1, None)
            if isinstance(other := local_shard(param), MasterWeight)
            and (other._state.shard is None or not is_backward)
        ]
    states = [one._state for one, _ in weights]
    joints = [state.joint if has_one_scale(state.quantizer) else None for state in states]
    for joint in joints:
        if joint is not None and joints.count(joint) < len(joint.names):
            raise StateError(
                f"{joint.text(weight._state.recipe)} and were not gathered together: give them to "
                "one fully_shard, without CPUOffloadPolicy, and write them after the backward."
            )
    values = [one._plain.to(param.mp_policy.param_dtype or one.dtype) for one, param in weights]
    shards = shards_of_values(
        [
            (plain, one._state.quantizer, whole_size(param))
            for plain, (one, param) in zip(values, weights, strict=True)
        ],
        getattr(gathered.param.mesh_info, "shard_process_group", None),
        joints,
        weight._state.known if kernel_refusal(weight.device.type) is None else None,
    )
    for shard, plain, (one, _), joint in zip(shards, values, weights, joints, strict=True):
        if joint is not None and not shard._sharding.is_exact:
            raise StateError(
                f"{joint.text(weight._state.recipe)} and {shard._sharding.ranks} ranks cut blocks "
                "of rows of a weight: take a recipe without such a scale, or other ranks."
            )
        one._state.shard, one._state.is_new = shard, True
        shard._sharding.backward_reads = one._state.backward_reads
        if not shard._sharding.is_exact:  # the values are gathered, and quantized once
            shard.high_precision_source = plain


_VIEWS = frozenset((aten.slice.Tensor, aten.split.Tensor))
_MAY_BE_ANOTHER = _VIEWS | frozenset(
    (
        aten.clone.default,
        aten.new_zeros.default,
        aten.empty_like.default,
        aten._to_copy.default,
        aten._pin_memory.default,
    )
)
_KEEPS_CLASS = _MAY_BE_ANOTHER | frozenset(
    (aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default)
)
