"""First-error focal loss: only the draft that ends the accepted run is charged (composes with `positional`, `chain`).

With f the first draft of a group whose most probable token is not the label: `-(1 - q_f)^focus log q_f`, mean over
groups; a group without an error costs nothing. The focal factor (arXiv 1708.02002) takes weight off errors that are
nearly right already. It moves only what limits the accepted length now, so it needs a term beside it that keeps the
other slots (`positional`). The factor is a choice; the paper's is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.decay import PerGroup
from selfspec.training.objectives.slots import Slots


@dataclass(frozen=True)
class FirstErrorFocal(PerGroup):
    """Attributes:
    focus: power of 1 - q.
    """

    focus: float = 2.0

    def total(self, slots: Slots) -> Tensor:
        """sum over groups of -(1 - q_f)^focus log q_f"""
        assert slots.hits is not None
        at = slots.reached & ~slots.hits
        logp = torch.where(at, slots.logp, -1.0)  # nothing to differentiate at q = 1
        return (torch.where(at, (-torch.expm1(logp)) ** self.focus, 0) * -logp).sum()
