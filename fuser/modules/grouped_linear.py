"""GroupedLinear as a layer, which is called with the sizes of the groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fuser import basic_ops
from fuser.errors import InputError, InputTypeError, refuse_unknown
from fuser.modules.arguments import GroupedOptions, linear_arguments, one_of_two
from fuser.modules.layer import InitMethod, Layer, Place
from fuser.modules.parallel import refuse_ranks
from fuser.plan.plan import FusionPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GroupedLinear(Layer):
    """``y_g = x_g @ weight_g.T + bias_g``: a linear for each group of consecutive rows.

    Parameters
    ----------
    num_gemms
        The number of groups.
    in_features, out_features
        Last dimension of the input and of the output.
    bias
        Whether each group has one.
    init_method
        Called with each weight to initialise it; None initialises as ``torch.nn.Linear`` does.
    params_dtype, dtype
        Of the parameters; two names of one argument.
    device
        Of the parameters.
    delay_wgrad_compute
        Leave weight gradients to :meth:`backward_dw`.
    single_grouped_weight, single_grouped_bias
        One parameter ``weight`` or ``bias`` in place of ``weight0`` and so on, as in the op.
    name, options
        As in :class:`fuser.modules.Linear`.

    Raises
    ------
    InputError
        If :class:`fuser.modules.Linear` would refuse the arguments, or a number is not positive.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        **options: Unpack[GroupedOptions],
    ) -> None:
        taken = linear_arguments(type(self), options)
        refuse_ranks(type(self).__name__, taken)
        for name_of_ranks in ("tensor_parallel_mode", "tensor_parallel_group", "sequence_parallel"):
            taken.pop(name_of_ranks, None)
        op = basic_ops.GroupedLinear(
            num_gemms,
            in_features,
            out_features,
            bias=bias,
            device=device,
            dtype=one_of_two("params_dtype", params_dtype, "dtype", dtype),
            delay_wgrad_compute=delay_wgrad_compute,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            **taken,
        )
        op.name = name or ""
        weights, biases = (
            [kind] if is_one else [f"{kind}{i}" for i in range(num_gemms)]
            for kind, is_one in (("weight", single_grouped_weight), ("bias", single_grouped_bias))
        )
        places: dict[str, Place | None] = {weight: (op, weight) for weight in weights}
        places |= {name_of_bias: (op, name_of_bias) if bias else None for name_of_bias in biases}
        init = _of_each(init_method) if single_grouped_weight and init_method else init_method
        super().__init__(op, places=places, init_methods=dict.fromkeys(weights, init))
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}"
        )

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """Run the layer on ``[..., in_features]``, whose rows are those of group 0, then 1, ...

        ``m_splits`` are the numbers of rows of the groups: ints, or an integer tensor
        ``[num_gemms]`` on the CPU or the device of ``inp``. Rows after the last group get zeros.
        ``is_first_microbatch`` is as in ``BasicLinear``: True quantizes weights and keeps them,
        False uses the kept ones, None quantizes at every call.

        Raises
        ------
        InputError
            If the sizes are negative, sum to more than the rows, or are not ``num_gemms``.
        InputTypeError
            If they are neither ints nor a tensor.
        """
        kwargs = None
        if is_first_microbatch is not None:
            kwargs = {0: {"is_first_microbatch": is_first_microbatch}}
        return self.run(inp, self._sizes(m_splits), op_kwargs=kwargs)

    if TYPE_CHECKING:
        __call__ = forward

    def plan(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        *,
        training: bool = True,
        device: str | None = None,
        **unknown: NoReturn,
    ) -> FusionPlan:
        """The plan of a call with such arguments."""
        if unknown:
            refuse_unknown("The plan of a GroupedLinear", GroupedLinear.plan, unknown)
        self.hand_parameters_to_ops()
        return self.ops.plan(inp, self._sizes(m_splits), training=training, device=device)

    def backward_dw(self) -> None:
        """As ``backward_dw`` of the op: compute weight gradients that a backward has left."""
        self.hand_parameters_to_ops()
        self._op.backward_dw()

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], object]
    ) -> None:
        """Call this hook, without arguments, at the end of each :meth:`backward_dw`."""
        self._op.register_wgrad_accumulation_and_reduce_hooks(wgrad_accumulation_and_reduce_hook)

    @property
    def _op(self) -> basic_ops.GroupedLinear:
        op = self.ops[0]
        assert isinstance(op, basic_ops.GroupedLinear)
        return op

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; separate parameters become views of one buffer again, by the op."""
        result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.hand_parameters_to_ops()
        self._op._apply(lambda tensor: tensor)
        return result

    def _sizes(self, m_splits: Sequence[int] | torch.Tensor) -> torch.Tensor:
        if isinstance(m_splits, torch.Tensor):
            return m_splits
        try:
            is_ints = all(type(size) is int for size in m_splits)
        except TypeError:
            is_ints = False
        if not is_ints:
            raise InputTypeError(
                f"GroupedLinear takes m_splits as ints or an integer tensor; got {m_splits!r:.60}."
            )
        if len(m_splits) != self.num_gemms:
            raise InputError(
                f"GroupedLinear got {len(m_splits)} m_splits for {self.num_gemms} groups."
                " Give one for each group."
            )
        return torch.tensor(m_splits, dtype=torch.int64, device="cpu")


def _of_each(init_method: InitMethod) -> InitMethod:
    """``init_method`` for weights that are one tensor."""

    def of_each(weights: torch.Tensor) -> None:
        for weight in weights:
            init_method(weight)

    return of_each
