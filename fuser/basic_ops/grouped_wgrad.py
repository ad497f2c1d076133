"""Weight gradients of a grouped linear: to autograd, into ``main_grad``, or by ``backward_dw``."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.basic_ops.initialised_weights import InitialisedWeights
from fuser.basic_ops.main_grad import check_main_grad, main_grad_of, stand_in_gradient
from fuser.errors import StateError
from fuser.op import OperationContext


class GroupedWeightGradients(InitialisedWeights):
    """The weight gradients of :class:`GroupedLinear`, which derives from this class.

    ``accumulate_into_main_grad`` and ``delay_wgrad_compute``: as in :class:`GroupedLinear`.
    """

    def __init__(self, accumulate_into_main_grad: bool, delay_wgrad_compute: bool) -> None:
        super().__init__()
        self.delay_wgrad_compute = delay_wgrad_compute
        self._accumulate_into_main_grad = accumulate_into_main_grad
        self._delayed_wgrads: deque[Callable[[], None]] = deque()
        self._wgrad_hooks: list[Callable[[], Any]] = []

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether weight gradients are left to :meth:`backward_dw`.

        Raises
        ------
        StateError
            If it is set to another value after the first call or plan.
        """
        is_delayed: bool = self.__dict__["delay_wgrad_compute"]
        return is_delayed

    @delay_wgrad_compute.setter
    def delay_wgrad_compute(self, value: bool) -> None:
        if self._captured and value != self.delay_wgrad_compute:
            raise StateError(
                f"{type(self).__name__}.delay_wgrad_compute was set to {value} after the first "
                f"call or plan, which is made for {self.delay_wgrad_compute}. Set it before the "
                "first call, or on a copy of the op (copy.deepcopy), which has no plan."
            )
        self.__dict__["delay_wgrad_compute"] = value

    @property
    def accumulates_into_main_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients go elsewhere than to autograd: backward then gets the weights."""
        return self._accumulate_into_main_grad or self.delay_wgrad_compute

    @property
    def is_recordable(self) -> bool:  # type: ignore[override]
        """A repeated backward would leave no weight gradients to :meth:`backward_dw`."""
        return not self.delay_wgrad_compute

    def weight_gradients(
        self, ctx: OperationContext, make: Callable[[], torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradient of each weight that autograd gets.

        The gradients of leaves that this backward accumulates may instead go into ``main_grad``, or
        wait for :meth:`backward_dw`. A weight that a hook computes is not a leaf.
        """
        require_grad = ctx.params_require_grad[: self.main_grad_count]
        owners: Sequence[torch.Tensor | None] = [None] * self.main_grad_count
        if self.accumulates_into_main_grad:
            owners = ctx.main_grad_owners
        if not self.delay_wgrad_compute:
            return self._added(make(), owners, require_grad)
        if any(owner is not None for owner in owners):
            self._delayed_wgrads.append(functools.partial(self._add_later, make, owners))
        now = [wants and owner is None for wants, owner in zip(require_grad, owners, strict=True)]
        if not any(now):
            return [None] * self.main_grad_count
        return self._added(make(), [None] * self.main_grad_count, now)

    def _added(
        self,
        gradients: torch.Tensor,
        owners: Sequence[torch.Tensor | None],
        require_grad: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """The gradients that autograd gets, after others were added to their ``main_grad``."""
        parts = [gradients] if self._is_one("weight") else list(gradients)
        names = self._names["weight"]
        if not self._accumulate_into_main_grad:
            owners = [None] * self.main_grad_count
        for name, owner, part in zip(names, owners, parts, strict=True):  # before any is added to
            check_main_grad(name, owner, self._parameters.get(name), part.shape)
        grads: list[torch.Tensor | None] = []
        for name, owner, part, is_wanted in zip(names, owners, parts, require_grad, strict=True):
            own = self._parameters.get(name)
            main_grad = None if owner is None else main_grad_of(owner, own)
            if main_grad is None:
                grads.append(part if is_wanted else None)
            else:
                main_grad.view(part.shape).add_(part)
                grads.append(stand_in_gradient(owner))
        return grads

    def _add_later(
        self, make: Callable[[], torch.Tensor], owners: Sequence[torch.Tensor | None]
    ) -> None:
        """Add gradients to the ``main_grad`` or the ``grad`` of their weights."""
        is_leaf = [owner is not None for owner in owners]
        for owner, grad in zip(owners, self._added(make(), owners, is_leaf), strict=True):
            has_main_grad = self._accumulate_into_main_grad and hasattr(owner, "main_grad")
            if owner is None or grad is None or has_main_grad:
                continue
            if owner.grad is None:
                owner.grad = grad.to(owner.dtype)
            else:
                owner.grad.add_(grad)

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward that left them to this call.

        They go into ``grad``, or into ``main_grad``. A backward leaves the gradients of the leaves
        into which it accumulates. Hooks of these weights are not called. Do not change the input or
        the gradient of the output in place before this call. Without ``delay_wgrad_compute`` it
        does nothing.

        Raises
        ------
        StateError
            If no backward has left any.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._delayed_wgrads:
            raise StateError(
                "GroupedLinear.backward_dw() was called, and no backward has left weight gradients "
                "to it: call it once for each backward."
            )
        with torch.no_grad():
            self._delayed_wgrads[0]()
        self._delayed_wgrads.popleft()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]
    ) -> None:
        """Call this hook, without arguments, at the end of each :meth:`backward_dw`."""
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_delayed_wgrads": deque(), "_wgrad_hooks": []}
