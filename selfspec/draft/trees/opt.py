"""OPT-Tree (arXiv 2406.17276): the tree of a fixed size with the largest expected accepted length.

E(A) = sum over nodes of prod of drafter probabilities along the path; it grows level by level, the best M nodes of each
level, and keeps the best M of all. Made for autoregressive drafters, where each level is one draft forward and growth
ends once E gains less than a threshold; a block draft has all its levels at once, so here nothing is cut and the set is
best-first's. Kept for comparison, and where there is a device without the growth kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.draft.levels import by_levels
from selfspec.draft.tree import ranked


@dataclass(frozen=True)
class OPTTree:
    """Always fills its budget."""

    def __call__(self, anchor: Tensor, logits: Tensor, budget: int) -> DraftTree:
        """See `draft.trees`."""
        top, ids = ranked(logits, budget)

        def expand(tokens: Tensor, d: int) -> tuple[Tensor, Tensor]:
            shape = (-1, tokens.shape[1], -1)
            return top[:, d, None].expand(shape), ids[:, d, None].expand(shape)

        return by_levels(anchor, expand, logits.shape[1], budget, budget)
