"""Greedy verification: follow a child while it equals the base model's own argmax (first index on ties)."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec import kernels
from selfspec.draft import DraftTree
from selfspec.rows import steps
from selfspec.tops import best
from selfspec.verify.accepted import Accepted


def greedy(tree: DraftTree, logits: Tensor) -> Accepted:
    """Walk with the argmax of every node's logits.

    Args:
        tree: N trees of M nodes.
        logits: [N, M, V] the base model's logits after each node.
    """
    return walk(tree, best(logits))


def walk(tree: DraftTree, targets: Tensor) -> Accepted:
    """Follow a child while its token is the one that the base model emits after its parent.

    Args:
        tree: N trees of M nodes.
        targets: [N, M] long, the base model's token after each node; only those on the path have to be known.
    """
    n, m = tree.tokens.shape
    if kernels.serve(targets):
        from selfspec.kernels import walk as kernel

        if 0 < m <= kernel.LARGEST and n:
            path, count, emitted = kernel.walk(tree.tokens, tree.parents, targets)
            path = steps(m, targets.device).expand(n, m) if path is None else path
            return Accepted(path, count, emitted)
    return reference(tree, targets)


def reference(tree: DraftTree, targets: Tensor) -> Accepted:
    """The same by torch."""
    n, m = tree.tokens.shape
    if tree.parents is None:
        hits = (tree.tokens[:, 1:] == targets[:, :-1]).long().cumprod(1)  # [N, M - 1]
        rows = torch.arange(m, device=targets.device).expand(n, m)
        return Accepted(rows, 1 + hits.sum(1), targets)
    index = torch.arange(m, device=targets.device).expand(n, m)
    wanted = tree.tokens == targets.gather(1, tree.parents.clamp(min=0))
    child = wanted & (tree.parents >= 0)
    # of siblings with one token the first is followed
    home = torch.where(child, tree.parents, m)
    first = torch.full_like(targets[:, :1], m).repeat(1, m + 1).scatter_reduce(1, home, index, "amin")
    taken = (child & (first.gather(1, home) == index)) | (index == 0)
    kept = ~(tree.ancestors & ~taken[:, None]).any(-1)  # [N, M], the nodes of one path
    depths = tree.depths
    count = kept.sum(1)
    last = torch.where(kept, depths, -1).argmax(1)
    rows = last[:, None].repeat(1, m + 1).scatter(1, torch.where(kept, depths, m), index)[:, :m]
    return Accepted(rows, count, targets.gather(1, rows))
