"""Best-first token tree over per-position marginals (DDTree, arXiv 2604.12989).

The expected accepted length of a tree is the sum over its nodes of the product of marginals along the node's path, so
the best M nodes are the M most probable prefixes. A heap over rank tuples finds them in order.

A node's score is its parent's plus its own log-probability, added in float32, and of equal scores the lower parent goes
first, then the lower rank: two builders that keep to this give the same tree to the bit. The reference runs on the
host; on a GPU, `draft.grow` does the same in one kernel, so that nothing waits for the host.
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


def grow(anchor: Tensor, top: Tensor, ids: Tensor, budget: int) -> DraftTree:
    """Best-first growth over ranked candidates, on the device where there is a kernel for it.

    Args:
        anchor: [N] long.
        top: [N, T, K] float32 log-probabilities, falling along K.
        ids: [N, T, K] long, their tokens.
        budget: nodes beside the anchor.
    """
    if kernels.serve(top) and 0 < budget <= LARGEST and top.numel():
        from selfspec.draft import grow as kernel

        return kernel.grow(anchor, top, ids, budget)
    return by_heap(anchor, top, ids, budget)


def by_heap(anchor: Tensor, top: Tensor, ids: Tensor, budget: int) -> DraftTree:
    """The plain reference of `grow`, on the host."""
    trees = [_heap(np.asarray(t), budget) for t in top.float().cpu()]
    parents, depths, ranks, scores = (torch.tensor([t[i] for t in trees], device=top.device) for i in range(4))
    if ids.numel():
        at = (depths - 1).clamp(min=0) * ids.shape[-1] + ranks
        tokens = torch.where(parents >= 0, ids.flatten(1).gather(1, at), -1)
    else:
        tokens = torch.full_like(parents, -1)
    return DraftTree(torch.cat([anchor[:, None], tokens[:, 1:]], 1), parents, scores=scores.float(), levels=depths)


def _heap(top: np.ndarray, budget: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """Parents, depths, ranks and scores of one request's nodes, anchor first. top: [T, K] float32"""
    depth, width = top.shape
    parents, depths, ranks, scores = [-1], [0], [0], [np.float32(0)]
    heap: list[tuple[float, int, int]] = []  # (-score, parent, rank)

    def push(parent: int, rank: int) -> None:
        below = depths[parent]
        if below < depth and rank < width and top[below, rank] > -inf:  # a banned token is no candidate
            heapq.heappush(heap, (-float(scores[parent] + top[below, rank]), parent, rank))

    push(0, 0)
    while heap and len(parents) <= budget:
        score, parent, rank = heapq.heappop(heap)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        ranks.append(rank)
        scores.append(np.float32(-score))
        push(parent, rank + 1)
        push(len(parents) - 1, 0)
    missing = budget + 1 - len(parents)
    return (
        parents + [-1] * missing,
        depths + [0] * missing,
        ranks + [0] * missing,
        [float(s) for s in scores] + [-inf] * missing,
    )
