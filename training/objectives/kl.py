"""Forward KL to the verifier's own distribution (Orthrus, arXiv 2605.12825).

`sum_k w_k KL(p_k || q_k) / sum_k w_k`, p_k the base model's distribution of the same token given everything before it.
Orthrus reports KL ahead of cross-entropy on text that the model did not write itself; on its own greedy answers the two
are close, and KL keeps more of what sampling (T > 0) needs. Costs a second pass through the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selfspec.training.objectives.decay import Decayed
from selfspec.training.objectives.slots import Slots, log_probs


@dataclass(frozen=True)
class ForwardKL(Decayed):
    """Attributes:
    gamma: decay length in slots; None weighs all slots alike.
    top_k: only the verifier's k most probable tokens, renormalised; None takes the whole vocabulary.
    """

    top_k: int | None = None

    def each(self, slots: Slots) -> Tensor:
        """KL(p_k || q_k)"""
        return slots.read.measure(forward_kl, top_k=self.top_k)


def forward_kl(draft: Tensor, verifier: Tensor, top_k: int | None = None) -> Tensor:
    """sum_v p(v) (log p(v) - log q(v)) by row. [M, V], [M, V] -> [M]"""
    log_q = log_probs(draft)
    if top_k is not None:
        verifier, index = verifier.topk(min(top_k, verifier.shape[-1]), -1)
        log_q = log_q.gather(-1, index)
    log_p = log_probs(verifier)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
