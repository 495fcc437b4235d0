"""Drafts by chance: tokens drawn from the drafter's marginals, for verifiers that weigh p against q.

A tree's shape comes from the marginals alone, by any rule of `draft.trees` whose scores depend on depth and rank; then
its places are filled with drawn tokens, siblings without replacement (Gumbel top-k; shape first and tokens second as in
Tsubame, arXiv 2609.33652). Shape and q know nothing of the tokens drawn, and the noise is new in every round, so no
decision can foresee a draw. An adapter's Markov or sampler head is left out: q is the plain marginals.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from selfspec import sampling
from selfspec.draft import Builder, DraftTree
from selfspec.draft.tree import RANKS, best_first


def drawn(
    anchor: Tensor, scores: Tensor, seed: Tensor, start: Tensor, budget: int | None = None, build: Builder = best_first
) -> DraftTree:
    """A chain, or with a budget a tree, of drawn tokens.

    Args:
        anchor: [N] long.
        scores: [N, T, V] the drafter's scores, processed.
        seed: [N] long.
        start: [N] long, the anchor's position.
        budget: nodes beside the anchor; None draws a chain of T.
        build: the rule of the shape. One that conditions on parents' tokens (`DominoTree`) has no such q and won't do.
    """
    n, t, v = scores.shape
    log_q = scores.double().log_softmax(-1)
    key = sampling.hashed(seed, sampling.DRAFT, start)[:, None].expand(n, t).reshape(-1)
    depth = torch.arange(t, device=anchor.device).expand(n, t).reshape(-1)
    if budget is None:
        tokens = sampling.draw(log_q.view(-1, v), key, depth).view(n, t)
        return DraftTree(torch.cat([anchor[:, None], tokens], 1), None, log_q.exp())
    k = min(budget, v, RANKS)
    order = sampling.perturbed(log_q.view(-1, v), key, depth, lambda s: s.topk(k, -1).indices).view(n, t, k)
    return replace(replay(build(anchor, log_q, budget), order), probs=log_q.exp())


def replay(shape: DraftTree, order: Tensor) -> DraftTree:
    """Fill a shape's places: the r-th child of every node at depth d - 1 gets the token drawn r-th at depth d.

    Nodes of one depth share its draws; only one of them is on any path, so a path meets each draw once. The tree's
    `scores` stay those of the shape, which no draw has touched.

    Args:
        shape: siblings in the order of their ranks.
        order: [N, T, K] long, tokens in the order of their drawing.
    """
    parents = shape.parents
    assert parents is not None
    elder = (parents[:, :, None] == parents[:, None]).tril(-1).sum(-1)  # [N, M], siblings that stand before a node
    at = (shape.depths - 1).clamp(min=0) * order.shape[-1] + elder.clamp(max=order.shape[-1] - 1)
    tokens = torch.where(parents >= 0, order.flatten(1).gather(1, at), shape.tokens)
    return replace(shape, tokens=tokens)
