"""Cross-entropy weighted by a simulated verification (VAT, verification-aware training).

With f the first draft of a group that greedy verification rejects, `w_k = 1` for k <= f and
`w_k = exp(-(k - f) / gamma)` after it: everything up to the first rejection counts in full, and the decay starts there
rather than at the block's start. The loss is `sum w_k CE_k / drafts`. As the draft improves the full weight moves on by
itself.

Choices, as the paper's details are not known: verification is greedy (a slot is rejected where its most probable token
is not the label), the decay is exponential, the divisor counts slots, a hidden bonus is never rejected. VAT's
verification head, which learns to say which slots survive, is the `confidence` head: name its term beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.slots import Slots, missed


@dataclass(frozen=True)
class Vat:
    """Attributes:
    gamma: decay length in slots after the first rejection.
    """

    gamma: float = 7.0

    def total(self, slots: Slots) -> Tensor:
        """sum of w_k CE_k"""
        assert slots.hits is not None
        first = (slots.drafts & ~slots.hits & (missed(slots.hits, slots.drafts) == 0)).long()
        # slots since the first rejection, 0 up to it
        since = (first.cumsum(1) - first).cumsum(1).float()
        return -(torch.exp(-since / self.gamma) * torch.where(slots.valid, slots.logp, 0)).sum()

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """Slots with a label."""
        return valid.sum()
