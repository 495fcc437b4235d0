"""Best-first token tree over per-position marginals (DDTree, arXiv 2604.12989).

The expected accepted length of a tree is the sum over its nodes of the product of marginals along the node's path, so
the best M nodes are the M most probable prefixes. A heap over rank tuples finds them in order.

A node's score is its parent's plus its own log-probability, added in float32, and of equal scores the lower parent goes
first, then the lower rank: two builders that keep to this give the same tree to the bit. The reference runs on the
host; on a GPU, `draft.grow` does the same in one kernel, so that nothing waits for the host.

Where a token's log-probability depends on the one before it, every candidate has a list of its own of what follows;
under marginals one list serves all.
"""

from __future__ import annotations

import heapq
from math import inf

import numpy as np
import torch
from torch import Tensor

from selfspec import kernels, tops
from selfspec.draft import DraftTree

RANKS = 64  # candidates per position; more are only reached by trees of hundreds of nodes over almost flat marginals
LARGEST = 511  # nodes beside the anchor that fit into the kernel's registers; larger trees are the host's


def best_first(anchor: Tensor, logits: Tensor, budget: int) -> DraftTree:
    """The `budget` most probable prefixes as a tree, among the RANKS most probable tokens of each position.

    Args:
        anchor: [N] long.
        logits: [N, T, V] marginals of the T positions after the anchor; -inf bans a token.
        budget: nodes beside the anchor.

    Returns:
        A tree of budget + 1 nodes, parents before children and the most probable first (fewer possible prefixes leave
        padding).
    """
    return grow(anchor, *ranked(logits, budget), budget)


def ranked(logits: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the candidates that a tree can need. [N, T, V] -> float32, long [N, T, K]"""
    return tops.ranked(logits, min(budget, logits.shape[-1], RANKS))


def grow(anchor: Tensor, top: Tensor, ids: Tensor, budget: int, order: Tensor | None = None) -> DraftTree:
    """Best-first growth over ranked candidates, on the device where there is a kernel for it.

    Args:
        anchor: [N] long.
        top: [N, T, K] float32 log-probabilities, falling along K; with `order` [N, T, K, K], those that follow each
            candidate of the position before (at the first position list 0 is what follows the anchor).
        ids: [N, T, K] long, the candidates' tokens.
        budget: nodes beside the anchor.
        order: [N, T, K, K] long, which candidate each place of a list is of.
    """
    if kernels.serve(top) and 0 < budget <= LARGEST and top.numel():
        from selfspec.draft import grow as kernel

        return kernel.grow(anchor, top, ids, budget, order)
    return by_heap(anchor, top, ids, budget, order)


def follow(anchor: Tensor, ids: Tensor, best: Tensor) -> DraftTree:
    """The chain that goes from every candidate to what follows it best: a tree of width one.

    Args:
        anchor: [N] long.
        ids: [N, T, K] long, candidates.
        best: [N, T, K] long, which candidate of its position follows each one of the position before (at the first
            position all are alike).
    """
    if kernels.serve(best) and best.numel():
        from selfspec.draft import grow as kernel

        return DraftTree(kernel.follow(anchor, ids, best))
    return DraftTree(step_by_step(anchor, ids, best))


def step_by_step(anchor: Tensor, ids: Tensor, best: Tensor) -> Tensor:
    """Tokens of `follow`, by torch. [N, T + 1] long"""
    at, tokens = torch.zeros_like(anchor)[:, None], [anchor[:, None]]
    for t in range(ids.shape[1]):
        at = best[:, t].gather(1, at)
        tokens.append(ids[:, t].gather(1, at))
    return torch.cat(tokens, 1)


def by_heap(anchor: Tensor, top: Tensor, ids: Tensor, budget: int, order: Tensor | None = None) -> DraftTree:
    """The plain reference of `grow`, on the host."""
    lists = top.float().cpu().numpy()
    orders = [None] * len(lists) if order is None else order.cpu().numpy()
    trees = [_heap(t, budget, o) for t, o in zip(lists, orders)]
    parents, depths, which, scores = (torch.tensor([t[i] for t in trees], device=top.device) for i in range(4))
    if ids.numel():
        at = (depths - 1).clamp(min=0) * ids.shape[-1] + which
        tokens = torch.where(parents >= 0, ids.flatten(1).gather(1, at), -1)
    else:
        tokens = torch.full_like(parents, -1)
    return DraftTree(torch.cat([anchor[:, None], tokens[:, 1:]], 1), parents, scores=scores.float(), levels=depths)


def _heap(
    top: np.ndarray, budget: int, order: np.ndarray | None
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Parents, depths, candidates and scores of one request's nodes, anchor first. top: [T, K] or [T, K, K] float32"""
    depth, width = len(top), top.shape[-1]
    parents, depths, which, scores = [-1], [0], [0], [np.float32(0)]
    heap: list[tuple[float, int, int]] = []  # (-score, parent, rank)

    def push(parent: int, rank: int) -> None:
        below = depths[parent]
        if below == depth or rank == width:
            return
        own = top[below, rank] if order is None else top[below, which[parent], rank]
        if own > -inf:  # a banned token is no candidate
            heapq.heappush(heap, (-float(scores[parent] + own), parent, rank))

    push(0, 0)
    while heap and len(parents) <= budget:
        score, parent, rank = heapq.heappop(heap)
        which.append(rank if order is None else int(order[depths[parent], which[parent], rank]))
        parents.append(parent)
        depths.append(depths[parent] + 1)
        scores.append(np.float32(-score))
        push(parent, rank + 1)
        push(len(parents) - 1, 0)
    missing = budget + 1 - len(parents)
    return (
        parents + [-1] * missing,
        depths + [0] * missing,
        which + [0] * missing,
        [float(s) for s in scores] + [-inf] * missing,
    )
