"""Cross-entropy on the model's own tokens with position decay (DFlash, arXiv 2602.06036).

`sum_k w_k CE_k / sum_k w_k` with `w_k = exp(-(k - 1) / gamma)`: later slots count less, as they are reached less often.
DFlash uses gamma 7 for blocks of 16, 5 for 10, 4 for 8. The safe default, good from the first step on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selfspec.training.objectives.decay import Decayed
from selfspec.training.objectives.slots import Slots


@dataclass(frozen=True)
class CrossEntropy(Decayed):
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    """

    def each(self, slots: Slots) -> Tensor:
        """CE_k"""
        return -slots.logp
