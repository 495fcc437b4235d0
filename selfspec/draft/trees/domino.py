"""Path-conditioned trees from a Markov head (the idea of DominoTree; the head is DSpark's, arXiv 2607.05147).

A block's marginals know nothing of one another: the second word of "New York" may be paired with the first of "San
Francisco". A low-rank head corrects each position's logits by the token before it,

    log q(x | parent) = log softmax(logits_d + bias(parent, d)),

and nodes are scored by the sum along their path. Good where an adapter has the head: deep nodes get truer scores, so
the same budget reaches further.

No rule of a plan names it: where an adapter has such a head, rounds grow their trees this way by themselves, best-first
over a few candidates of each position (`draft.condition.propose`). Here stand the plain forms that it has to agree
with, level by level, over the whole vocabulary or over candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.draft.levels import by_levels
from selfspec.draft.tree import ranked

Bias = Callable[[Tensor, int], Tensor]
"""(parent tokens [N, W] long, depth of their children from 0) -> corrections of the logits [N, W, V]."""


@dataclass(frozen=True)
class DominoTree:
    """Scores under the corrected distributions.

    Attributes:
        bias: the head.
        width: nodes of a level that may have children. Each costs a row of the vocabulary's size a level; from the
            budget on, the tree is the best there is.
    """

    bias: Bias
    width: int = 16

    def __call__(self, anchor: Tensor, logits: Tensor, budget: int) -> DraftTree:
        """See `draft.trees`."""

        def expand(tokens: Tensor, d: int) -> tuple[Tensor, Tensor]:
            return ranked(logits[:, d, None] + self.bias(tokens, d), budget)

        return by_levels(anchor, expand, logits.shape[1], budget, min(self.width, budget))


def over_candidates(
    anchor: Tensor, candidates: Tensor, transitions: Tensor, budget: int, width: int | None = None
) -> DraftTree:
    """The same tree among a few candidates of each position, whose transitions were computed beforehand at once.

    No level waits for a product of the vocabulary's size, so this is the form for graphs.

    Args:
        anchor: [N] long.
        candidates: [N, T, K] long.
        transitions: [N, T, K, K] log-probabilities; `[n, t, i, j]` of candidate j at position t after candidate i of
            the position before. At the first position row 0 is what follows the anchor.
        budget: nodes beside the anchor.
        width: nodes of a level that may have children; the budget by default, and then nothing better exists.
    """
    n, t, k = candidates.shape
    ranks = torch.arange(k, device=candidates.device)

    def expand(at: Tensor, d: int) -> tuple[Tensor, Tensor]:
        return transitions[:, d].gather(1, at[:, :, None].expand(-1, -1, k)), ranks.expand(*at.shape, k)

    tree = by_levels(torch.zeros_like(anchor), expand, t, budget, width or budget)
    place = (tree.depths - 1).clamp(min=0) * k + tree.tokens.clamp(min=0)
    tokens = torch.where(tree.tokens >= 0, candidates.flatten(1).gather(1, place), -1)
    return replace(tree, tokens=torch.cat([anchor[:, None], tokens[:, 1:]], 1))
