"""What a round has to verify, between its draft and its verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from selfspec.draft import DraftTree, first
from selfspec.pruning import Cut


class Proposal(NamedTuple):
    """What is to be verified.

    Attributes:
        tree: the candidates.
        likely: [n, M] how likely each node of a chain is to be accepted once its parent is; None where nobody asks.
        cut: what the rule that cuts drafts wants; None without one.
        second: [n, M - 1] long, what drafts of a chain would be corrected to; None where nobody branches off.
    """

    tree: DraftTree
    likely: Tensor | None = None
    cut: Cut | None = None
    second: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """What a graph hands to the next one; `of` is the inverse. Drawn drafts, whose law is large, are in none."""
        tree = self.tree
        return tree.tokens, tree.parents, tree.scores, tree.paths, tree.levels, self.likely, self.second

    @staticmethod
    def of(parts: Sequence[Tensor | None]) -> Proposal:
        """From its `parts`."""
        tokens, parents, scores, paths, levels, likely, second = parts
        assert tokens is not None
        return Proposal(DraftTree(tokens, parents, None, scores, paths, levels), likely, second=second)

    def first(self, m: int) -> Proposal:
        """The first m nodes, of a tree or a chain; the anchor alone is a chain."""
        if self.tree.parents is not None and m > 1:
            return Proposal(first(self.tree, m))
        tokens, probs, likely, second = self.tree.tokens, self.tree.probs, self.likely, self.second
        chain = DraftTree(tokens[:, :m], None, None if probs is None or m == 1 else probs[:, : m - 1])
        likely, second = None if likely is None else likely[:, :m], None if second is None else second[:, : m - 1]
        return Proposal(chain, likely, second=second)
