"""Forward KL to the verifier's own distribution (Orthrus, arXiv 2605.12825).

`sum_k w_k KL(p_k || q_k) / sum_k w_k`, p_k the base model's distribution of the same token given everything before it.
Orthrus reports KL ahead of cross-entropy on text that the model did not write itself; on its own greedy answers the two
are close, and KL keeps more of what sampling (T > 0) needs. Costs a second pass through the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.ce import decay


@dataclass(frozen=True)
class ForwardKL:
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    top_k: only the verifier's k most probable tokens, renormalised; None takes the whole vocabulary.
    """

    gamma: float | None = 7.0
    top_k: int | None = None

    def total(self, slots) -> Tensor:
        """sum of w_k KL_k"""
        weights = decay(slots.steps, self.gamma) * slots.valid
        return (weights * torch.where(slots.valid, slots.kl[self.top_k], 0)).sum()

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """sum of w_k"""
        return (decay(steps, self.gamma) * valid).sum()
