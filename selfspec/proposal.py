"""What a round has to verify, between its draft and its verification."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.pruning import Cut


class Proposal(NamedTuple):
    """What is to be verified.

    Attributes:
        tree: the candidates.
        likely: [n, M] how likely each node of a chain is to be accepted once its parent is; None where nobody asks.
        cut: what the length rule wants of a chain; None without one.
        second: [n, M - 1] long, what drafts of a chain would be corrected to; None where nobody branches off.
    """

    tree: DraftTree
    likely: Tensor | None = None
    cut: Cut | None = None
    second: Tensor | None = None

    def first(self, m: int) -> Proposal:
        """A chain's first m nodes."""
        tokens, probs, likely, second = self.tree.tokens, self.tree.probs, self.likely, self.second
        chain = DraftTree(tokens[:, :m], None, None if probs is None or m == 1 else probs[:, : m - 1])
        likely, second = None if likely is None else likely[:, :m], None if second is None else second[:, : m - 1]
        return Proposal(chain, likely, second=second)
