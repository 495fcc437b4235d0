"""Reverse KL to the verifier's own distribution (AdaFlash's divergence; speculators' `rkl`).

`sum_k w_k KL(q_k || p_k) / sum_k w_k`. It seeks modes: a draft that commits to one of the verifier's likely tokens is
not charged for the others, which suits greedy drafts and small drafters. Weak from scratch (a q far from p gets little
guidance): mix it with `ce` or `kl`, or start from a trained path.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selfspec.training.objectives.decay import Decayed
from selfspec.training.objectives.slots import Slots, log_probs


@dataclass(frozen=True)
class ReverseKL(Decayed):
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    """

    def each(self, slots: Slots) -> Tensor:
        """KL(q_k || p_k)"""
        return slots.read.measure(reverse_kl)


def reverse_kl(draft: Tensor, verifier: Tensor) -> Tensor:
    """sum_v q(v) (log q(v) - log p(v)) by row. [M, V], [M, V] -> [M]"""
    log_q, log_p = log_probs(draft), log_probs(verifier)
    return (log_q.exp() * (log_q - log_p)).sum(-1)
