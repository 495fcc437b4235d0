"""The exact scan: the length of most tokens per time under the confidences and the measured latencies.

    d* = argmax_{0 <= d <= T} (1 + sum_{i=1..d} c_1 ... c_i) / T(d),

T(d) the round's time when d drafts are verified, its draft included. A block has so few lengths that all are tried; no
convexity is asked of T, which under padding is a staircase. With `in_order` it stops at the first d that does not gain,
as it must where a confidence has seen the tokens before it (DSpark's scheduler, arXiv 2607.05147, makes the same
choice).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scan:
    """The best length by the latency table.

    Attributes:
        costs: [T + 1] float32 on the confidences' device: ms of a round that verifies 0..T drafts. It may be
            overwritten between rounds, also of a captured graph.
        in_order: stop at the first length that does not gain.
    """

    costs: Tensor
    in_order: bool = False

    def __call__(self, confidence: Tensor) -> Tensor:
        """[N, T] -> [N] long, 0 for none.

        Raises:
            ValueError: the costs end before T.
        """
        n, t = confidence.shape
        if len(self.costs) <= t:
            raise ValueError(f"costs are known for up to {len(self.costs) - 1} drafts, not for {t}")
        tokens = 1 + confidence.float().cumprod(1).cumsum(1)
        rate = torch.cat([tokens.new_ones(n, 1), tokens], 1) / self.costs[: t + 1]  # [N, T + 1]
        if self.in_order:
            return (rate[:, 1:] > rate[:, :-1]).long().cumprod(1).sum(1)
        return rate.argmax(1)
