"""On-policy distillation: the verifier judges the draft's own block (AdaFlash; Draft-OPD, arXiv 2605.29343).

The block that the draft would propose (its most probable tokens; known tokens stay) is run through the untouched model
behind the same prefix, and `sum_k w_k D(q_k, p_k) / sum_k w_k` compares every draft with what the verifier says after
the draft's own tokens, accepted or not, instead of after the text's. D is the reverse KL by default, as in AdaFlash.
One more forward of as many rows, without gradient. Good late: it moves drafts off continuations that only make sense
after tokens which they do not propose.

Choices: the block is greedy, so that a step has no randomness beside its anchors; a hidden bonus is not judged.
Draft-OPD's replay from the positions where verification failed is `training.replay`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.decay import Decayed
from selfspec.training.objectives.kl import forward_kl
from selfspec.training.objectives.rkl import reverse_kl
from selfspec.training.objectives.slots import Slots

DIVERGENCES = {"reverse": reverse_kl, "forward": forward_kl}


@dataclass(frozen=True)
class OnPolicy(Decayed):
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    divergence: "reverse" (KL(q || p)) or "forward".
    """

    divergence: str = "reverse"

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence={self.divergence!r}: expected one of {sorted(DIVERGENCES)}")

    def each(self, slots: Slots) -> Tensor:
        """D(q_k, p_k), nothing for a hidden bonus"""
        return torch.where(slots.drafts, slots.read.on_policy(DIVERGENCES[self.divergence]), 0)

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """sum of w_k over drafts"""
        return super().divisor(steps, valid & (steps >= 1))
