"""Routing by top-k scores, and the loss that balances experts."""

from __future__ import annotations

from typing import Literal

import torch

from fuser.errors import InputError

__all__ = [
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

Score = Literal["softmax", "sigmoid"]
TINY = 1e-20
"""Added to sums of sigmoids, which divide."""


def _check_score(name: str, score_function: str) -> None:
    if score_function not in ("softmax", "sigmoid"):
        raise InputError(
            f"{name} got score_function={score_function!r}; it is 'softmax' or 'sigmoid'."
        )


def _chosen(
    scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None
) -> torch.Tensor:
    """The indices of the ``topk`` largest scores, of the best groups alone if there are groups."""
    if group_topk:
        if not num_groups or scores.shape[1] % num_groups or topk % group_topk:
            raise InputError(
                f"fused_topk_with_score_function got num_groups={num_groups}, group_topk="
                f"{group_topk} and topk={topk} for {scores.shape[1]} experts: give groups that "
                "divide the experts, of which a number is chosen that divides topk."
            )
        grouped = scores.reshape(len(scores), num_groups, -1)
        best = grouped.topk(topk // group_topk, dim=-1).values.sum(dim=-1)
        is_chosen = torch.zeros_like(best, dtype=torch.bool)
        is_chosen.scatter_(1, best.topk(group_topk, dim=-1).indices, True)
        scores = grouped.masked_fill(~is_chosen[..., None], float("-inf")).flatten(1)
    return scores.topk(topk, dim=1).indices


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: Score = "softmax",
    expert_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities ``[tokens, experts]`` of the chosen experts, others 0, and a mask of them.

    Parameters
    ----------
    logits
        ``[tokens, experts]``.
    topk
        The experts of a token.
    use_pre_softmax
        Take the softmax over all experts, before the choice, and not over the chosen ones.
    num_groups, group_topk
        Choose among the experts of the ``group_topk`` groups, of ``num_groups`` equal ones, whose
        ``topk / group_topk`` best scores have the largest sums.
    scaling_factor
        Multiplies the probabilities.
    score_function
        ``"softmax"``, or ``"sigmoid"``, whose chosen values are divided by their sum.
    expert_bias
        ``[experts]``, added to sigmoids for the choice alone.

    Raises
    ------
    InputError
        If the score function is another, or the groups do not divide the experts.
    """
    _check_score("fused_topk_with_score_function", score_function)
    values = logits.float()
    if score_function == "softmax":
        scores = values.softmax(dim=-1).type_as(logits) if use_pre_softmax else logits
        indices = _chosen(scores, topk, num_groups, group_topk)
        taken = scores.gather(1, indices)
        if not use_pre_softmax:
            taken = taken.float().softmax(dim=-1).type_as(logits)
    else:
        scores = values.sigmoid().type_as(logits)
        ranked = scores if expert_bias is None else scores + expert_bias
        indices = _chosen(ranked, topk, num_groups, group_topk)
        taken = scores.gather(1, indices)
        if topk > 1:
            taken = taken / (taken.sum(dim=-1, keepdim=True) + TINY)
    if scaling_factor:
        taken = taken * scaling_factor
    probabilities = torch.zeros_like(logits).scatter(1, indices, taken.type_as(logits))
    is_routed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
    return probabilities, is_routed


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: Score
) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask ``[tokens, experts]`` of the ``topk`` best experts, and the scores of all of them.

    Scores are in fp32 and sum to 1 for each token.

    Raises
    ------
    InputError
        If the score function is neither ``"softmax"`` nor ``"sigmoid"``.
    """
    _check_score("fused_compute_score_for_moe_aux_loss", score_function)
    values = logits.float()
    if score_function == "softmax":
        scores = values.softmax(dim=-1)
    else:
        scores = values.sigmoid()
        scores = scores / (scores.sum(dim=-1, keepdim=True) + TINY)
    indices = scores.topk(topk, dim=1).indices
    is_routed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
    return is_routed, scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """The loss that balances experts, ``coeff E / (k T^2) sum_e n_e sum_t p_te`` (Fedus et al.,
    2021), for E experts, T tokens with k experts each, and n_e tokens of expert e."""
    factor = coeff * num_experts / (topk * total_num_tokens * total_num_tokens)
    return (probs.sum(dim=0) * tokens_per_expert).sum() * factor
