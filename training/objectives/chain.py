"""Chain loss: the accepted share of a block, end to end (composes with `positional`, `focal`).

A group's loss is `-log( (1/n) sum_k prod_{i <= k} q_i )` over its n drafts, q_i the probability of label i: minus the
logarithm of the expected accepted share of a greedy text's draft. Unlike D-PACE the products are differentiated as they
stand, and the logarithm keeps the gradient alive while they are small. The logarithm is a choice; the paper's form is
not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.decay import PerGroup
from selfspec.training.objectives.slots import Slots, products


@dataclass(frozen=True)
class Chain(PerGroup):
    """No options."""

    def total(self, slots: Slots) -> Tensor:
        """sum over groups of -log mean_k prod_{i <= k} q_i"""
        drafts = slots.drafts
        some = drafts.any(1)
        logs = torch.where(drafts, products(slots.logp, drafts), -torch.inf)
        logs = torch.where(some[:, None], logs, 0.0)
        n = drafts.sum(1).clamp(min=1).to(logs.dtype)
        return -torch.where(some, logs.logsumexp(1) - n.log(), 0).sum()
