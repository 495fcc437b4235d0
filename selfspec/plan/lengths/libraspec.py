"""LibraSpec's marginal rule (arXiv 2608.08721): extend while the marginal rate beats the average.

With confidences q and d drafts at hand, for every i <= d

    eps_i = floor(alpha * sum_{j=i..d} prod_{k=i..j} q_k + i),   eps* = min_i eps_i,

and eps* < d cuts the draft there, once. (Where eps* is larger the paper drafts further blocks; here a block is what
there is, so all of it is verified.) alpha stands in for the machine's latencies: 2.2 is published for block drafters.
Good without a latency table; where there is one, `Scan` finds the maximum itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LibraSpec:
    """The cut of a block."""

    alpha: float = 2.2
    in_order = False

    def __call__(self, confidence: Tensor) -> Tensor:
        """[N, T] -> [N] long, at least 1."""
        t = confidence.shape[1]
        place = torch.arange(t, device=confidence.device)
        inside = place >= place[:, None]  # [i, j]: j stands at or after i
        products = torch.where(inside, confidence[:, None], 1.0).cumprod(-1)  # [N, i, j]: prod_{k=i..j} q_k
        gains = (products * inside).sum(-1)  # [N, i]
        return (self.alpha * gains + place + 1).floor().amin(1).long().clamp(1, t)
