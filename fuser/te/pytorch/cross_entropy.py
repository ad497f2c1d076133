"""Cross entropy over a vocabulary that ranks share (Shoeybi et al., 2019)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fuser.errors import InputError

__all__ = ["parallel_cross_entropy"]


class _CrossEntropy(torch.autograd.Function):
    """Per token: the log of the sum of exponentials less the target's logit, in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        smoothing: float,
        group: Any,
        ignored: int,
    ) -> torch.Tensor:
        columns = logits.shape[-1]
        ranks = 1 if group is None else dist.get_world_size(group)
        first = 0 if group is None else dist.get_rank(group) * columns
        values = logits.float()
        largest = values.amax(dim=-1)
        if ranks > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        values = values - largest[..., None]
        place = target - first
        is_mine = (place >= 0) & (place < columns)
        place = place.clamp(0, columns - 1)
        at_target = values.gather(-1, place[..., None])[..., 0].masked_fill(~is_mine, 0.0)
        exponentials = values.exp()
        sums = torch.stack((exponentials.sum(dim=-1), at_target, values.sum(dim=-1)))
        if ranks > 1:
            dist.all_reduce(sums, group=group)
        total, at_target, all_values = sums.unbind()
        log_total = total.log()
        loss = log_total - at_target
        if smoothing:
            mean = log_total - all_values / (columns * ranks)
            loss = (1 - smoothing) * loss + smoothing * mean
        is_ignored = target == ignored
        is_outside = ((target < 0) | (target >= columns * ranks)) & ~is_ignored
        loss = loss.masked_fill(is_ignored, 0.0).masked_fill(is_outside, float("nan"))
        probabilities = exponentials.div_(total[..., None])
        ctx.save_for_backward(probabilities, place, is_mine, is_ignored, is_outside)
        ctx.smoothing, ctx.columns, ctx.dtype = smoothing, columns * ranks, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        probabilities, place, is_mine, is_ignored, is_outside = ctx.saved_tensors
        dx = probabilities - ctx.smoothing / ctx.columns
        at_target = is_mine.to(dx.dtype) * (1 - ctx.smoothing)
        dx.scatter_add_(-1, place[..., None], -at_target[..., None])
        grad = grad.float().masked_fill(is_ignored, 0.0).masked_fill(is_outside, float("nan"))
        dx *= grad[..., None]
        return dx.to(ctx.dtype), None, None, None, None


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """The cross entropy of logits whose columns are shared by ranks, in fp32.

    Parameters
    ----------
    inp
        Logits ``[..., columns]`` of this rank's part of the vocabulary; the parts are equal, and
        in the order of the ranks.
    target
        Classes ``[...]`` of the whole vocabulary. On a GPU they are not read by the host, and the
        loss and the gradient of a class outside of the vocabulary are NaN.
    label_smoothing
        The part of the target's probability that is spread over the vocabulary.
    reduce_loss
        Return the mean over all targets that are not ``ignore_idx``, in place of a loss for each.
    dist_process_group
        The ranks that share the vocabulary; None for this one alone.
    ignore_idx
        A class whose loss and gradient are 0.
    is_cg_capturable
        Accepted, no effect: nothing is read by the host.

    Raises
    ------
    InputError
        If the shapes do not fit each other, or a class is outside of the vocabulary.
    """
    if inp.shape[:-1] != target.shape:
        raise InputError(
            f"parallel_cross_entropy got logits of shape {tuple(inp.shape)} and targets of shape "
            f"{tuple(target.shape)}; give targets of the shape of the logits without the last one."
        )
    if target.device.type == "cpu" and target.numel() and not torch.compiler.is_compiling():
        ranks = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
        classes = inp.shape[-1] * ranks
        read = target[target != ignore_idx]
        first, last = (int(end) for end in read.aminmax()) if read.numel() else (0, 0)
        if first < 0 or last >= classes:
            raise InputError(
                f"parallel_cross_entropy got a target of {first if first < 0 else last} for "
                f"{classes} classes; give 0 to {classes - 1}, or ignore_idx={ignore_idx}."
            )
    loss: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        inp, target, float(label_smoothing), dist_process_group, ignore_idx
    )
    if not reduce_loss:
        return loss
    return loss.sum() / (target != ignore_idx).sum().clamp(min=1)
