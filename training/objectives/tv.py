"""Total variation to the verifier's distribution: one minus the acceptance rate (UNO, arXiv 2609.04010; DSpark).

`sum_k w_k TV_k / sum_k w_k` with `TV = 1 - sum_v min(p, q)`, the probability that token verification rejects the slot.
UNO trains on it alone (there without the factor 1/2, which a weight of 2 gives, and without decay), from a path that
starts as the base model; from scratch its gradient vanishes (arXiv 2602.23881), so start from `ce` or mix it in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.decay import Decayed
from selfspec.training.objectives.slots import Slots, log_probs


@dataclass(frozen=True)
class TotalVariation(Decayed):
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    """

    def each(self, slots: Slots) -> Tensor:
        """TV_k"""
        return 1 - slots.read.measure(overlap)


def overlap(draft: Tensor, verifier: Tensor, log_a: Tensor | None = None, log_r: Tensor | None = None) -> Tensor:
    """sum_v min(a p(v), r q(v)) by row; without scales the acceptance rate of token verification (arXiv 2211.17192,
    corollary 3.6), which rejection of a chain reaches position by position.

    Args:
        draft: [M, V] logits of q, -inf where it never guesses.
        verifier: [M, V] logits of p.
        log_a: [M] log of p's scale.
        log_r: [M] log of q's scale.

    Returns:
        [M] float32 (float64 for a float64 model)
    """
    log_p, log_q = log_probs(verifier), log_probs(draft)
    if log_a is not None and log_r is not None:
        log_p, log_q = log_p + log_a[:, None], log_q + log_r[:, None]
    return torch.minimum(log_p, log_q).exp().sum(-1)
