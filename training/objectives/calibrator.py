"""Trains the bonus calibrator: cross-entropy of a hidden group's drafts once the bonus is known (FlexDraft,
arXiv 2605.20022).

`sum_k w_k CE'_k / sum_k w_k` over the drafts of groups whose bonus is hidden, CE' with the head's bias for the true
bonus. Groups that know their bonus already need no correction and don't count. FlexDraft's loss weight is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.decay import Decayed
from selfspec.training.objectives.slots import Slots


@dataclass(frozen=True)
class Calibrator(Decayed):
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    detach: train the head alone, not the path under it.
    """

    detach: bool = False

    def each(self, slots: Slots) -> Tensor:
        """CE'_k of hidden groups"""
        return -torch.where(_counted(slots.steps, slots.valid), slots.read.corrected("calibrator", self.detach), 0)

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """sum of w_k"""
        return super().divisor(steps, _counted(steps, valid))


def _counted(steps: Tensor, valid: Tensor) -> Tensor:
    """Drafts of groups that have to guess their bonus. [G, T] bool"""
    hidden = (valid & (steps == 0)).any(1, keepdim=True)
    return valid & hidden & (steps >= 1)
