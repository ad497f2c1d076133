"""Router: the experts of each token, their probabilities, and the load-balancing loss."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch.autograd.function import once_differentiable

from fuser.errors import InputError
from fuser.op import check_sizes
from fuser.op.parameters import default_device, default_dtype

Score = Literal["softmax", "sigmoid"]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Against a division by 0 where all sigmoids of a token underflow, as in DeepSeek-V3's code.
TINY = 1e-20


class Routing(NamedTuple):
    """The result of a :class:`Router` for T tokens."""

    expert_indices: torch.Tensor
    """int64 ``[T, k]``: the experts of each token, the highest score first."""
    probs: torch.Tensor
    """fp32 ``[T, k]``: their probabilities; differentiable."""
    load_balancing_loss: torch.Tensor
    """fp32 scalar, multiplied by ``aux_loss_coefficient``; differentiable. Add it to the loss."""


class Router(torch.nn.Module):
    """Chooses ``top_k`` of ``num_experts`` experts for each token, by a linear map of it.

    ``logits = x @ weight.T`` is computed in fp32 whatever the dtypes of x and the weight, also
    under torch's autocast; whether a GPU uses TF32 for it is torch's setting. The experts are those
    with the highest logits, and of equal logits the first, on every device. Their probabilities:

    ========== =================================== ==========================================
    score      ``norm_topk_prob=True``             ``norm_topk_prob=False``
    ========== =================================== ==========================================
    softmax    softmax over the chosen logits      softmax over all logits, then the chosen
    sigmoid    sigmoids, divided by their sum      sigmoids
    ========== =================================== ==========================================

    So with softmax and ``norm_topk_prob=True`` the probabilities are normalized after top-k, as in
    Mixtral; it is the same as a softmax over all experts of which the chosen ones are divided by
    their sum. ``norm_topk_prob`` has the name and the meaning of the option in Hugging Face's
    configurations; in Megatron-LM False is ``moe_router_pre_softmax``. Sigmoid is the score of
    DeepSeek-V3 (arXiv:2412.19437, equations 13 to 15). With ``top_k=1`` and ``norm_topk_prob=True``
    every probability is 1 and has no gradient; the Switch Transformer uses softmax and False.

    Load-balancing loss of the Switch Transformer (arXiv:2101.03961, equations 4 to 6), after GShard
    (arXiv:2006.16668, section 2.2)::

        loss = aux_loss_coefficient * num_experts * sum over i of f_i * P_i

    ``f_i`` is the fraction of the ``T * k`` assignments that chose expert i, which has no gradient,
    and ``P_i`` the mean over tokens of its score, normalized over all experts: the softmax, or each
    sigmoid divided by the sum of all (DeepSeek-V3, equations 17 to 20). With equal load the loss is
    ``aux_loss_coefficient``.

    With experts on several ranks every rank routes its own tokens, and the loss is that of these.

    Nothing waits for the device and no shape depends on values, so a CUDA graph can contain
    forward and backward; the results are the same in every run.

    Parameters
    ----------
    hidden
        The size of a token.
    num_experts
        The number of experts.
    top_k
        The number of experts of a token, at most ``num_experts``.
    score
        ``"softmax"`` or ``"sigmoid"``.
    norm_topk_prob
        Whether the probabilities of a token add up to 1; see the table.
    aux_loss_coefficient
        The factor of the load-balancing loss, at least 0. With 0 nothing is computed for it.
    device
        Of the weight. None means torch's default device if one was set, else CUDA if there is one,
        else the CPU.
    dtype
        Of the weight: fp32, fp16 or bf16; None means torch's default.

    Raises
    ------
    InputError
        If a value does not match its description.
    InputTypeError
        If a size is not an int.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        norm_topk_prob: bool = True,
        aux_loss_coefficient: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("Router", hidden=hidden, num_experts=num_experts, top_k=top_k)
        if top_k > num_experts:
            raise InputError(
                f"Router got top_k={top_k} of num_experts={num_experts}; it takes 1 to num_experts."
            )
        if score not in get_args(Score):
            raise InputError(f"Router got score={score!r}; it is 'softmax' or 'sigmoid'.")
        if not 0 <= aux_loss_coefficient < math.inf:
            raise InputError(
                f"Router got aux_loss_coefficient={aux_loss_coefficient}; it is at least 0."
            )
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.score, self.norm_topk_prob = score, bool(norm_topk_prob)
        self.aux_loss_coefficient = float(aux_loss_coefficient)
        options: dict[str, Any] = {"device": default_device(device), "dtype": default_dtype(dtype)}
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden, **options))
        """``[num_experts, hidden]``, initialised as in ``torch.nn.Linear``."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight again."""
        if not self.weight.is_meta:
            torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> Routing:
        """Route ``x [..., hidden]``; T is the product of its leading dimensions.

        Raises
        ------
        InputError
            If the shape, dtype or device of x does not match.
        """
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise InputError(f"Router takes [..., {self.hidden}]; got {tuple(x.shape)}.")
        if x.dtype not in DTYPES:
            raise InputError(f"Router takes float32, float16 and bfloat16; got {x.dtype}.")
        if x.device != self.weight.device:
            raise InputError(
                f"Router got x on {x.device}, and its weight is on {self.weight.device}."
                " Move one to the other."
            )
        logits: torch.Tensor = _Logits.apply(  # type: ignore[no-untyped-call]
            x.reshape(math.prod(x.shape[:-1]), self.hidden), self.weight
        )
        # torch.topk leaves the order of equal values open.
        order = logits.detach().sort(dim=-1, descending=True, stable=True).indices
        expert_indices = order[:, : self.top_k].contiguous()
        probs = self._probs(logits, expert_indices)
        return Routing(expert_indices, probs, self._loss(logits, expert_indices))

    if TYPE_CHECKING:
        __call__ = forward

    def _probs(self, logits: torch.Tensor, expert_indices: torch.Tensor) -> torch.Tensor:
        if self.score == "softmax" and not self.norm_topk_prob:
            return logits.softmax(-1).gather(1, expert_indices)
        chosen = logits.gather(1, expert_indices)
        if self.score == "softmax":
            return chosen.softmax(-1)
        probs = chosen.sigmoid()
        return probs / (probs.sum(-1, keepdim=True) + TINY) if self.norm_topk_prob else probs

    def _loss(self, logits: torch.Tensor, expert_indices: torch.Tensor) -> torch.Tensor:
        if self.aux_loss_coefficient == 0 or logits.shape[0] == 0:
            return logits.new_zeros(())
        if self.score == "softmax":
            scores = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + TINY)
        # Sums of integers are exact in any order; torch.bincount would wait for the device.
        chosen = expert_indices.view(-1)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        fractions = counts.to(logits.dtype) / chosen.numel()
        factor = self.aux_loss_coefficient * self.num_experts
        return factor * (fractions * scores.mean(0)).sum()

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"score={self.score!r}, norm_topk_prob={self.norm_topk_prob}, "
            f"aux_loss_coefficient={self.aux_loss_coefficient}"
        )


class _Logits(torch.autograd.Function):
    """``x @ weight.T`` in fp32, saving both in their own dtypes and not as copies in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        with _without_autocast(x.device.type):
            return x.to(wide) @ weight.to(wide).t()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogits: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        with _without_autocast(x.device.type):
            if ctx.needs_input_grad[0]:
                dx = (dlogits @ weight.to(dlogits.dtype)).to(x.dtype)
            if ctx.needs_input_grad[1]:
                dweight = (dlogits.t() @ x.to(dlogits.dtype)).to(weight.dtype)
        return dx, dweight


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """A context in which products are in the dtype of their operands."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
