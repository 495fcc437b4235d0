"""LK losses: train for the acceptance rate itself (arXiv 2602.23881).

With `alpha = sum_v min(p, q)`: LK-alpha is `-log alpha`, whose gradient is that of TV divided by alpha, so that it does
not vanish where the draft is bad. LK-hybrid is `lam KL(p || q) + (1 - lam) TV` with `lam = exp(-eta alpha)`, alpha
detached: KL where little is accepted, TV where much is. Both are means over slots with position decay (the paper's 0.8
a head is gamma 4.5). Reported gains are larger at T = 1 and for weak drafters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.decay import Decayed
from selfspec.training.objectives.kl import forward_kl
from selfspec.training.objectives.slots import Slots
from selfspec.training.objectives.tv import overlap

TINY = 1e-30  # keeps the logarithm of an acceptance that underflowed finite


@dataclass(frozen=True)
class LKAlpha(Decayed):
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    """

    def each(self, slots: Slots) -> Tensor:
        """-log alpha_k"""
        return -slots.read.measure(overlap).clamp(min=TINY).log()


@dataclass(frozen=True)
class LKHybrid(Decayed):
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    eta: how fast KL gives way to TV as acceptance rises; the paper takes 3, and 10 for Medusa heads.
    """

    eta: float = 3.0

    def each(self, slots: Slots) -> Tensor:
        """lam KL + (1 - lam) TV"""
        alpha = slots.read.measure(overlap)
        lam = torch.exp(-self.eta * alpha.detach())
        return lam * slots.read.measure(forward_kl, top_k=None) + (1 - lam) * (1 - alpha)
