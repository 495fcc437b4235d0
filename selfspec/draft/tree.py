"""Best-first token tree over per-position marginals (DDTree, arXiv 2604.12989).

The expected accepted length of a tree is the sum over its nodes of the product of marginals along the node's path, so
the best N nodes are the N most probable prefixes. A heap over rank tuples finds them in order.
"""

from __future__ import annotations

import heapq
from math import inf

import torch
from torch import Tensor

from selfspec.draft import DraftTree


def best_first(anchor: Tensor, logits: Tensor, budget: int, order: Tensor | None = None) -> DraftTree:
    """The `budget` most probable prefixes as a tree; the plain reference, built on the host.

    Args:
        anchor: [N] long.
        logits: [N, T, V] marginals of the T positions after the anchor.
        budget: nodes beside the anchor.
        order: [N, T, K] long, the tokens that stand at ranks 0..K-1 instead of the most probable ones.

    Returns:
        A tree of budget + 1 nodes (fewer possible prefixes leave padding).
    """
    k = min(budget, logits.shape[-1])
    top, ids = logits.float().log_softmax(-1).topk(k, -1)  # [N, T, K]
    ids = ids if order is None else order
    trees = [_grow(top[i].tolist(), ids[i].tolist(), budget) for i in range(len(anchor))]
    tokens = torch.tensor([[-1, *t] for t, _ in trees], device=anchor.device)
    tokens[:, 0] = anchor
    parents = torch.tensor([[-1, *p] for _, p in trees], device=anchor.device)
    return DraftTree(tokens, parents)


def _grow(top: list[list[float]], ids: list[list[int]], budget: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of one request's nodes, most probable prefix first."""
    tokens: list[int] = []
    parents: list[int] = []
    depth, width = len(top), len(top[0]) if top else 0
    heap = [(-top[0][0], 0, 0, 0)] if depth and budget else []  # (-score, parent node, depth, rank)
    while heap and len(tokens) < budget:
        score, parent, d, rank = heapq.heappop(heap)
        tokens.append(ids[d][rank])
        parents.append(parent)
        node = len(tokens)
        if rank + 1 < width and top[d][rank + 1] > -inf:  # a banned token is no candidate
            heapq.heappush(heap, (score + top[d][rank] - top[d][rank + 1], parent, d, rank + 1))
        if d + 1 < depth:
            heapq.heappush(heap, (score - top[d + 1][0], node, d + 1, 0))
    missing = budget - len(tokens)
    return tokens + [-1] * missing, parents + [-1] * missing
