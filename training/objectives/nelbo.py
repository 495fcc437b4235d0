"""BD3LM's bound: cross-entropy of the masked slots over the share that was masked (arXiv 2503.09573; PEFT-BD's loss).

With t the group's masked share, `(1/t) sum_{masked k} CE_k`, mean over groups: the negative evidence bound of a masked
diffusion with a linear schedule. It goes with the noise "masked"; with all slots masked (t = 1) it is a plain sum.
PEFT-BD (arXiv 2607.12422) trained a drafter so and found no speed-up: a one-step drafter only ever meets t = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.slots import Slots


@dataclass(frozen=True)
class Nelbo:
    """No options."""

    def total(self, slots: Slots) -> Tensor:
        """sum over groups of (1/t) sum CE_k"""
        sums = -torch.where(slots.valid, slots.logp, 0).sum(1)
        return (sums if slots.level is None else sums / slots.level).sum()

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """Groups that predict anything."""
        return valid.any(1).sum()
