"""The best tokens of logits, the lower one first where scores are equal; by kernels where there are some for it.

Scores are compared as float32, in which transformers compares; -0.0 and 0.0 are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec import kernels
from selfspec.rows import steps


def best(logits: Tensor) -> Tensor:
    """The most probable token. [..., V] -> long [...]"""
    if kernels.serve(logits) and logits.numel():
        from selfspec.kernels import topk

        return topk.best(logits).view(logits.shape[:-1])
    return (logits.float() if logits.dtype == torch.float64 else logits).argmax(-1)


def chain(anchor: Tensor, logits: Tensor) -> Tensor:
    """Each anchor, and the most probable token at every position behind it. [N], [N, T, V] -> long [N, T + 1]"""
    if kernels.serve(logits) and logits.numel():
        from selfspec.kernels import topk

        return topk.best(logits, anchor)
    return torch.cat([anchor[:, None], best(logits)], 1)


def certainty(logits: Tensor) -> Tensor:
    """The largest probability of every row. [..., V] -> float32 [...]"""
    if kernels.serve(logits):
        return ranked(logits, 1)[0][..., 0].exp()
    return logits.float().softmax(-1).amax(-1)


def ranked(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of every row.

    Args:
        logits: [..., V]; a row holds one finite score at least.
        k: at most V.

    Returns:
        Log-probabilities, falling, float32 [..., k], and tokens, long [..., k]. Where a row has fewer possible tokens,
        -inf and 0 stand behind them. Tokens and their order are the same everywhere to the bit; log-probabilities are
        the score less the row's normaliser, which rounds as each library adds.
    """
    if kernels.serve(logits) and logits.numel() and k:
        from selfspec.kernels import topk

        return tuple(t.view(*logits.shape[:-1], k) for t in topk.ranked(logits, k))  # type: ignore[return-value]
    return reference(logits, k)


def among(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens of every row in order.

    Args:
        logits: [N, R, V]
        ids: [N, R, K] long, below 0 for none.

    Returns:
        Their log-probabilities among all of V, falling, float32 [N, R, K] (-inf for none), and which of them each is,
        long [N, R, K], the earlier first where they are equal.
    """
    if kernels.serve(logits) and ids.numel():
        from selfspec.kernels import among as kernel

        return kernel.among(logits, ids)
    scores = logits.float()
    top = scores.gather(-1, ids.clamp(min=0)) - scores.logsumexp(-1, keepdim=True)
    top, order = top.masked_fill(ids < 0, -torch.inf).sort(dim=-1, descending=True, stable=True)
    return top, order


def reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`ranked` by torch, whose top-k leaves open which of equal scores it takes, and in which order."""
    scores, v = logits.float(), logits.shape[-1]
    top, ids = scores.topk(k, -1)
    last, place = top[..., -1:], steps(v, logits.device)
    ids, order = ids.sort(-1)
    order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
    equal = torch.where(scores == last, -place.float(), -torch.inf).topk(k, -1).indices  # to the last, lowest first
    behind = steps(k, logits.device) - (top > last).sum(-1, keepdim=True)
    ids = torch.where(behind < 0, ids.gather(-1, order), equal.gather(-1, behind.clamp(min=0)))
    top = top - scores.logsumexp(-1, keepdim=True)
    return top, ids.masked_fill(top == -torch.inf, 0)
