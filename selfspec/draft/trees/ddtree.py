"""DDTree (arXiv 2604.12989): the budget's most probable prefixes under independent marginals.

The expected accepted length under the marginals q is sum over nodes of prod q along the path, so the best tree of M
nodes is the M most probable prefixes. The rule of choice where rows up to the budget cost nearly the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.draft.tree import best_first


@dataclass(frozen=True)
class DDTree:
    """Always fills its budget."""

    def __call__(self, anchor: Tensor, logits: Tensor, budget: int) -> DraftTree:
        """See `draft.trees`."""
        return best_first(anchor, logits, budget)
