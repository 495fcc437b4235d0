"""Propose: every drafter ends in a `DraftTree`, which the verifier walks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from selfspec import rows, tops


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations; node 0 is the anchor (the bonus token of the round before), every path is one guess.

    Attributes:
        tokens: [N, M] long; -1 never matches.
        parents: [N, M] long, a parent stands before its child; node 0 has -1, and so has padding. None means a chain.
        probs: [N, T, V] float64, what the tokens at depths 1..T were drawn from, siblings without replacement and in
            order; None where they were chosen otherwise.
        scores: [N, M] float32, the drafter's log-probability of each node's path, 0 at the anchor and -inf at padding;
            None where the drafter says nothing of it.
        paths: [N, M, M] bool, `ancestors` where the builder has them anyway.
        levels: [N, M] long, `depths` likewise.
        marginals: [N, M] float32, log-probability of each node's own token at its depth (of a tree filled by draws,
            that of its place); None where no rule learns from it.
    """

    tokens: Tensor
    parents: Tensor | None = None
    probs: Tensor | None = None
    scores: Tensor | None = None
    paths: Tensor | None = None
    levels: Tensor | None = None
    marginals: Tensor | None = None

    @property
    def n_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def sizes(self) -> Tensor:
        """[N] long, nodes that are not padding, the anchor included."""
        if self.parents is None:
            return (self.tokens >= 0).sum(1)
        return (self.parents >= 0).sum(1) + 1

    @cached_property
    def ancestors(self) -> Tensor:
        """`out[n, i, j]`: node j is i or an ancestor of i. bool [N, M, M]"""
        if self.paths is not None:
            return self.paths
        return rows.ancestors(repeat_parents(self.n_nodes, self.tokens) if self.parents is None else self.parents)

    @cached_property
    def depths(self) -> Tensor:
        """Steps from the anchor to each node, 0 for padding. [N, M] long"""
        if self.levels is not None:
            return self.levels
        if self.parents is None:
            return rows.steps(self.n_nodes, self.tokens.device).expand_as(self.tokens)
        return self.ancestors.sum(-1) - 1


def chain_of(anchor: Tensor, logits: Tensor) -> DraftTree:
    """The most probable token at every position: a tree of width one.

    Args:
        anchor: [N] long.
        logits: [N, T, V] marginals of the T positions after the anchor.
    """
    return DraftTree(tops.chain(anchor, logits))


def cut(tree: DraftTree, sizes: Tensor) -> DraftTree:
    """Keep each tree's first nodes and turn the others into padding; the shape stays.

    Args:
        tree: with the nodes that are to be kept standing first, such as one built best-first.
        sizes: [N] long, nodes kept, the anchor included.
    """
    gone = torch.arange(tree.n_nodes, device=sizes.device) >= sizes[:, None]  # [N, M]
    parents = repeat_parents(tree.n_nodes, tree.tokens) if tree.parents is None else tree.parents
    return DraftTree(
        tree.tokens.masked_fill(gone, -1),
        parents.masked_fill(gone, -1),
        tree.probs,
        None if tree.scores is None else tree.scores.masked_fill(gone, -torch.inf),
        None
        if tree.paths is None
        else tree.paths & ~gone[:, :, None] | torch.eye(tree.n_nodes, dtype=torch.bool, device=sizes.device),
        None if tree.levels is None else tree.levels.masked_fill(gone, 0),
    )


def first(tree: DraftTree, m: int) -> DraftTree:
    """A tree of the first m nodes: what `cut` turns into padding is gone."""

    def part(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:, :m].contiguous()  # kernels read rows that follow one another

    paths = None if tree.paths is None else tree.paths[..., :m]
    of = (tree.scores, paths, tree.levels, tree.marginals)
    return DraftTree(tree.tokens[:, :m].contiguous(), part(tree.parents), tree.probs, *map(part, of))


def repeat_parents(n_nodes: int, like: Tensor) -> Tensor:
    """A chain's parents spelt out. [N, M]"""
    return (rows.steps(n_nodes, like.device) - 1).expand(like.shape[0], -1)


Builder = Callable[..., DraftTree]
