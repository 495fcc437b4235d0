"""D-PACE: cross-entropy weighted by each slot's share in the expected accepted length (arXiv 2605.18810).

With q_i the probability of label i and `q~ = (1 - a) q + a`, slot j weighs `w_j = sum_{m >= j} prod_{i <= m} q~_i`,
detached; the loss is `sum_j w_j CE_j / groups`. Dividing by sum w instead would cancel the credit. At a = 0 it has the
gradient of the expected accepted length of a greedy chain itself. Good with greedy answers once the first slots work;
smoothing keeps later slots alive before that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.slots import Slots


@dataclass(frozen=True)
class DPace:
    """Attributes:
    smoothing: a; 0.3 to 0.7 are stable.
    """

    smoothing: float = 0.5

    def total(self, slots: Slots) -> Tensor:
        """sum of w_j CE_j"""
        weights = credit(slots.logp.detach(), slots.valid, self.smoothing)
        return -(weights * torch.where(slots.valid, slots.logp, 0)).sum()

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """Groups that predict anything."""
        return valid.any(1).sum()


def credit(logp: Tensor, valid: Tensor, smoothing: float) -> Tensor:
    """w_j. Slots without a label are 1 in products and 0 in sums. [G, T] -> [G, T]"""
    q = torch.where(valid, (1 - smoothing) * logp.exp() + smoothing, 1)
    reach = q.cumprod(1) * valid
    return reach.flip(1).cumsum(1).flip(1) * valid
