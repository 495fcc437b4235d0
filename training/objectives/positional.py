"""Cross-entropy weighted by how many slots depend on a slot: the first of three terms that compose (with `focal`,
`chain`).

`w_k = ((T - k + 1) / T) ^ power` for k = 1..T: the share of the block that is lost when slot k misses. The paper's form
is not known; this one has no length to tune, and falls to nearly nothing at the block's end, where `ce` with its decay
does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selfspec.training.objectives.decay import Weighted
from selfspec.training.objectives.slots import Slots


@dataclass(frozen=True)
class Positional(Weighted):
    """Attributes:
    power: how steep; 0 weighs all slots alike.
    """

    power: float = 1.0

    def each(self, slots: Slots) -> Tensor:
        """CE_k"""
        return -slots.logp

    def weights(self, steps: Tensor) -> Tensor:
        """((T - k + 1) / T) ^ power; a hidden bonus counts as the first draft does."""
        last = steps[-1]
        return ((last - steps.clamp(min=1) + 1).float() / last) ** self.power
