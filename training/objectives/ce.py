"""Cross-entropy on the model's own tokens with position decay (DFlash, arXiv 2602.06036).

`sum_k w_k CE_k / sum_k w_k` with `w_k = exp(-(k - 1) / gamma)`: later slots count less, as they are reached less often.
DFlash uses gamma 7 for blocks of 16, 5 for 10, 4 for 8. The safe default, good from the first step on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CrossEntropy:
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    """

    gamma: float | None = 7.0

    def total(self, slots) -> Tensor:
        """sum of w_k CE_k"""
        weights = decay(slots.steps, self.gamma) * slots.valid
        return -(weights * torch.where(slots.valid, slots.logp, 0)).sum()

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """sum of w_k"""
        return (decay(steps, self.gamma) * valid).sum()


def decay(steps: Tensor, gamma: float | None) -> Tensor:
    """w_k; a hidden bonus (k = 0) counts as the first draft does. [T] -> [T]"""
    k = steps.clamp(min=1).float()
    return torch.ones_like(k) if gamma is None else torch.exp(-(k - 1) / gamma)
