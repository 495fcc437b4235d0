"""Trains the confidence head: the probability that a slot survives verification, given that the slots before it do
(DSpark, arXiv 2607.05147; also VAT's verification head).

Binary cross-entropy against what verification says. With target "hit" (greedy decoding) the target is whether the
slot's most probable token is the label, and only slots that greedy verification reaches count, mean over groups: the
product of the outputs is then the probability of the run itself. With "overlap" (sampling; DSpark's choice) the target
is `sum_v min(p, q)`, mean over all drafts. DSpark weighs it 1 beside its other terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from selfspec.training.objectives.slots import Slots
from selfspec.training.objectives.tv import overlap


@dataclass(frozen=True)
class Confidence:
    """Attributes:
    target: "hit" or "overlap".
    detach: train the head alone, not the path under it.
    """

    target: str = "hit"
    detach: bool = True

    def __post_init__(self) -> None:
        if self.target not in ("hit", "overlap"):
            raise ValueError(f"target={self.target!r}: expected 'hit' or 'overlap'")

    def total(self, slots: Slots) -> Tensor:
        """sum of the slots' cross-entropies"""
        logits = slots.read.predicted("confidence", self.detach)
        if self.target == "hit":
            assert slots.hits is not None
            counted, target = slots.reached, slots.hits.to(logits.dtype)
        else:
            counted, target = slots.drafts, slots.read.measure(overlap).detach().clamp(0, 1).to(logits.dtype)
        each = binary_cross_entropy_with_logits(logits, target, reduction="none")
        return torch.where(counted, each, 0).sum()

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """Groups with a draft, or drafts."""
        drafts = valid & (steps >= 1)
        return drafts.any(1).sum() if self.target == "hit" else drafts.sum()
