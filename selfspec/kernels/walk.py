"""The walk from the anchor along accepted nodes, one program a request; `selfspec.verify.greedy.walk` is the reference.

A round's trees are small, and torch needs some twenty launches for one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 4096  # nodes that fit into registers


@triton.jit
def _walk(tokens, parents, targets, rows_out, count_out, tokens_out, m, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    """Follow the first child whose token is its parent's target. Lists are [BLOCK] registers, indexed by node."""
    n = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    live = node < m
    token = tl.load(tokens + n * m + node, live, -1)
    if CHAIN:
        wanted = tl.load(targets + n * m + node - 1, live & (node > 0), -1)
        miss = (node > 0) & (token != wanted)
        tl.store(count_out + n, tl.min(tl.where(live & miss, node, m), 0).to(tl.int64))
    else:
        parent = tl.load(parents + n * m + node, live, -1)
        rows = tl.zeros([BLOCK], tl.int32)
        emitted = tl.zeros([BLOCK], tl.int64)
        at, step = tl.program_id(0) * 0, tl.program_id(0) * 0
        while at < m:
            wanted = tl.load(targets + n * m + at)
            rows = tl.where(node >= step, at, rows)  # past the end the last one stays
            emitted = tl.where(node >= step, wanted, emitted)
            follows = (parent == at) & (token == wanted) & (node > 0)
            at = tl.min(tl.where(follows & live, node, m), 0)  # of siblings with one token the first
            step += 1
        tl.store(count_out + n, step.to(tl.int64))
        tl.store(rows_out + n * m + node, rows.to(tl.int64), live)
        tl.store(tokens_out + n * m + node, emitted, live)


def walk(tokens: Tensor, parents: Tensor | None, targets: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Nodes of the path, their number, and the tokens emitted.

    Args:
        tokens: [N, M] long.
        parents: [N, M] long, a parent before its child; None for chains.
        targets: [N, M] long, the token after each node.

    Returns:
        rows [N, M] long (None for chains, whose path is 0, 1, ...), count [N] long, tokens [N, M] long
    """
    n, m = tokens.shape
    tokens, targets = tokens.contiguous(), targets.contiguous()
    count = torch.empty(n, dtype=torch.long, device=tokens.device)
    rows, emitted = (None, targets) if parents is None else torch.empty(2, n, m, dtype=torch.long, device=tokens.device)
    _walk[(n,)](
        tokens, tokens if parents is None else parents.contiguous(), targets, count if rows is None else rows, count,
        emitted, m, BLOCK=max(16, triton.next_power_of_2(m)), CHAIN=parents is None, num_warps=1,
    )  # fmt: skip
    return rows, count, emitted
