"""Trains the length head: how many drafts greedy verification will accept (AdaFlash).

Cross-entropy over the lengths 0..B-1, mean over groups. Groups whose run is cut short by the end of the answer say
nothing about their length and don't count, nor do those with known tokens behind slot 0 (a loop's second pass). A class
for every length is a choice; AdaFlash's own head is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from selfspec.training.objectives.decay import PerGroup
from selfspec.training.objectives.slots import Slots


@dataclass(frozen=True)
class Length(PerGroup):
    """Attributes:
    detach: train the head alone, not the path under it.
    """

    detach: bool = True

    def total(self, slots: Slots) -> Tensor:
        """sum of the groups' cross-entropies"""
        logits = slots.read.predicted("length", self.detach)  # [G, B]
        drafts = slots.drafts
        run = slots.taken.sum(1)
        cut = (run == drafts.sum(1)) & (run < (slots.steps >= 1).sum())
        counted = (drafts & (slots.steps == 1)).any(1) & ~cut
        each = cross_entropy(logits, run.clamp(max=logits.shape[1] - 1), reduction="none")
        return torch.where(counted, each, 0).sum()
