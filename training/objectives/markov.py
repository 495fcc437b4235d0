"""Trains the Markov head (DSpark, arXiv 2607.05147) or the sampler head (Samragh et al. 2025, arXiv 2507.11851),
whichever the path has: cross-entropy of every slot once the token before it has corrected it.

`sum_k w_k CE'_k / sum_k w_k`, CE' with the head's bias for the text's own token before slot k (teacher forcing). The
plain marginals keep their own terms, so a draft without the head still works. DSpark trains path and head together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selfspec.training.objectives.decay import Decayed
from selfspec.training.objectives.slots import Slots


@dataclass(frozen=True)
class Markov(Decayed):
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    detach: train the head alone, not the path under it.
    """

    detach: bool = False

    def each(self, slots: Slots) -> Tensor:
        """CE'_k"""
        return -slots.read.corrected("markov", self.detach)
