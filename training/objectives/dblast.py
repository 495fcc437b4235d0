"""The expected accepted length as the loss (DBLast; DeepSpec's acceptance-length term has the same form).

`1 - (1/n) sum_k prod_{i <= k} alpha_i` over a group's n drafts, with `alpha_i = sum_v min(p_i, q_i)` the acceptance
rate of token verification: one minus the expected accepted share of the block, every alpha differentiated. It trades
slots against each other as verification does, at any temperature. Its gradient is small while the first slots are bad:
start from `ce`, or keep some. The mean over n rather than the bare length is a choice, so that short groups at an
answer's end count no less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.decay import PerGroup
from selfspec.training.objectives.slots import Slots
from selfspec.training.objectives.tv import overlap


@dataclass(frozen=True)
class AcceptanceLength(PerGroup):
    """No options."""

    def total(self, slots: Slots) -> Tensor:
        """sum over groups of 1 - mean_k prod_{i <= k} alpha_i"""
        drafts = slots.drafts
        reach = torch.where(drafts, slots.read.measure(overlap), 1).cumprod(1)
        share = torch.where(drafts, reach, 0).sum(1) / drafts.sum(1).clamp(min=1)
        return torch.where(drafts.any(1), 1 - share, 0).sum()
