"""Drafts by chance: tokens drawn from the drafter's marginals, for verifiers that weigh p against q.

A tree's shape comes from the marginals alone, best-first as in `draft.tree`; then its places are filled with drawn
tokens, siblings without replacement (Gumbel top-k; shape first and tokens second as in Tsubame, arXiv 2609.33652).
Shape and q know nothing of the tokens drawn, and the noise is new in every round, so no decision can foresee a draw.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from selfspec import sampling
from selfspec.draft import DraftTree
from selfspec.draft.tree import RANKS, best_first


def drawn(anchor: Tensor, scores: Tensor, seed: Tensor, start: Tensor, budget: int | None = None) -> DraftTree:
    """A chain, or with a budget a tree, of drawn tokens.

    Args:
        anchor: [N] long.
        scores: [N, T, V] the drafter's scores, processed.
        seed: [N] long.
        start: [N] long, the anchor's position.
        budget: nodes beside the anchor; None draws a chain of T.
    """
    n, t, v = scores.shape
    log_q = scores.double().log_softmax(-1)
    key = sampling.hashed(seed, sampling.DRAFT, start)[:, None].expand(n, t).reshape(-1)
    depth = torch.arange(t, device=anchor.device).expand(n, t).reshape(-1)
    k = 1 if budget is None else min(budget, v, RANKS)
    order = sampling.perturbed(log_q.view(-1, v), key, depth, lambda s: s.topk(k, -1).indices).view(n, t, k)
    if budget is None:
        return DraftTree(torch.cat([anchor[:, None], order[..., 0]], 1), None, log_q.exp())
    return replace(best_first(anchor, log_q, budget, order), probs=log_q.exp())
