"""Best-first growth on the device: one program a request, and nothing read by the host.

Every node offers one candidate, its next child in rank order, so the frontier is one number a node. A step takes the
best of them by a single maximum over 64-bit keys whose upper half orders the scores as integers and whose lower half
holds node, depth, list and rank: the lower node wins a tie, as in the reference `draft.tree.by_heap`, and the winner's
own data arrive with it. Scores are float32 sums of the same two numbers there and here, so trees agree to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.draft import DraftTree

ROWS = 16  # nodes whose ancestors one program finds
NOTHING = tl.constexpr(-2139095041)  # -inf as an ordered integer


@triton.jit
def _ordered(x):
    """float32 as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _grow(
    top, ids, order, anchor, token_out, parent_out, depth_out, score_out, n_nodes, n_depth, n_ranks,
    BLOCK: tl.constexpr, LINKED: tl.constexpr,
):  # fmt: skip
    """All nodes of one request, in [BLOCK] registers, indexed by node. LINKED: each candidate has a list of its own."""
    n = tl.program_id(0)
    n_lists = n_ranks if LINKED else 1
    top += n * n_depth * n_lists * n_ranks
    order += n * n_depth * n_lists * n_ranks
    ids += n * n_depth * n_ranks
    node = tl.arange(0, BLOCK)
    low = -float("inf")
    token = tl.where(node == 0, tl.load(anchor + n), -1).to(tl.int32)
    parent = tl.full([BLOCK], -1, tl.int32)
    depth = tl.zeros([BLOCK], tl.int32)
    rank = tl.zeros([BLOCK], tl.int32)  # of the child that a node offers
    source = tl.zeros([BLOCK], tl.int32)  # the list that a node offers from
    score = tl.where(node == 0, 0.0, low).to(tl.float32)
    offer = tl.where(node == 0, tl.load(top) + 0.0, low).to(tl.float32)
    for new in range(1, n_nodes):
        place = ((BLOCK - 1 - node) << 22) | (depth << 14) | (source << 7) | rank
        key = (_ordered(offer).to(tl.int64) << 32) | place.to(tl.int64)
        best = tl.max(key, 0)
        found = (best >> 32) > NOTHING
        at = (BLOCK - 1 - ((best >> 22) & 0x1FF)).to(tl.int32)
        d, r = ((best >> 14) & 0xFF).to(tl.int32), (best & 0x7F).to(tl.int32)
        here = (d * n_lists + ((best >> 7) & 0x7F).to(tl.int32)) * n_ranks + r
        which, own = r, 0
        if LINKED:
            which = tl.load(order + here, found, 0).to(tl.int32)
            own = which
        name = tl.load(ids + d * n_ranks + which, found, -1).to(tl.int32)
        sibling = tl.load(top + here + 1, found & (r + 1 < n_ranks), low)
        child = tl.load(top + ((d + 1) * n_lists + own) * n_ranks, found & (d + 1 < n_depth), low)
        bits = (best >> 32).to(tl.int32)
        path = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        mine, giver = (node == new) & found, (node == at) & found
        token = tl.where(mine, name, token)
        parent = tl.where(mine, at, parent)
        depth = tl.where(mine, d + 1, depth)
        score = tl.where(mine, path, score)
        rank = tl.where(giver, r + 1, rank)
        source = tl.where(mine, own, source)
        offer = tl.where(giver, score + sibling, tl.where(mine, path + child, offer))
    live = node < n_nodes
    tl.store(token_out + n * n_nodes + node, token.to(tl.int64), live)
    tl.store(parent_out + n * n_nodes + node, parent.to(tl.int64), live)
    tl.store(depth_out + n * n_nodes + node, depth.to(tl.int64), live)
    tl.store(score_out + n * n_nodes + node, score, live)


@triton.jit
def _paths(parents, out, n_nodes, n_depth, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Ancestors of ROWS nodes: follow each one's parents to the anchor."""
    n = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live = row < n_nodes
    at = row.to(tl.int64)
    seen = at[:, None] == column
    for _ in range(n_depth):
        at = tl.load(parents + n * n_nodes + at, live & (at >= 0), -1)
        seen = seen | (at[:, None] == column)
    pair = live[:, None] & (column < n_nodes)
    tl.store(out + (n * n_nodes + row[:, None]) * n_nodes + column, seen.to(tl.uint8), pair)


@triton.jit
def _follow(ids, best, anchor, out, n_depth, n_ranks):
    """One request's chain: from every candidate to what follows it best."""
    n = tl.program_id(0)
    ids += n * n_depth * n_ranks
    best += n * n_depth * n_ranks
    out += n * (n_depth + 1)
    tl.store(out, tl.load(anchor + n))
    at = (n * 0).to(tl.int64)
    for d in range(n_depth):
        at = tl.load(best + d * n_ranks + at)
        tl.store(out + d + 1, tl.load(ids + d * n_ranks + at))


def grow(anchor: Tensor, top: Tensor, ids: Tensor, budget: int, order: Tensor | None = None) -> DraftTree:
    """Best-first growth, with depths and ancestors.

    Args:
        anchor: [N] long.
        top: [N, T, K] float32 log-probabilities, falling along K; T between 1 and 255, K between 1 and 127. With
            `order` [N, T, K, K], as in `draft.tree.grow`.
        ids: [N, T, K] long, their tokens.
        budget: nodes beside the anchor, 1..511; registers go by powers of two with the anchor in, so 255 is cheaper
            than 256.
        order: [N, T, K, K] long, or None.
    """
    n, t, k = ids.shape
    m = budget + 1
    tokens, parents, depths = anchor.new_empty(3, n, m).unbind()
    scores = top.new_empty(n, m, dtype=torch.float32)
    block = max(32, triton.next_power_of_2(m))
    _grow[(n,)](
        top.float().contiguous(), ids.contiguous(), ids if order is None else order.contiguous(), anchor.contiguous(),
        tokens, parents, depths, scores, m, t, k, BLOCK=block, LINKED=order is not None, num_warps=1,
    )  # fmt: skip
    return DraftTree(tokens, parents, scores=scores, paths=paths(parents, min(t, budget)), levels=depths)


def follow(anchor: Tensor, ids: Tensor, best: Tensor) -> Tensor:
    """Tokens of `draft.tree.follow`. [N], [N, T, K], [N, T, K], all long -> long [N, T + 1]"""
    n, t, k = ids.shape
    out = anchor.new_empty(n, t + 1)
    _follow[(n,)](ids.contiguous(), best.contiguous(), anchor.contiguous(), out, t, k, num_warps=1)
    return out


def paths(parents: Tensor, deepest: int) -> Tensor:
    """`rows.ancestors` of trees that are at most `deepest` deep. [N, M] -> bool [N, M, M]"""
    n, m = parents.shape
    out = torch.empty(n, m, m, dtype=torch.uint8, device=parents.device)
    _paths[(n, triton.cdiv(m, ROWS))](
        parents.contiguous(), out, m, deepest, BLOCK=triton.next_power_of_2(m), ROWS=ROWS, num_warps=4
    )
    return out.view(torch.bool)
