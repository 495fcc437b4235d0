"""Greedy verification: follow a child while it equals the base model's own argmax (first index on ties)."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.verify.accepted import Accepted


def greedy(tree: DraftTree, logits: Tensor) -> Accepted:
    """Walk with the argmax of every node's logits.

    Args:
        tree: N trees of M nodes.
        logits: [N, M, V] the base model's logits after each node.
    """
    return walk(tree, best(logits))


def best(logits: Tensor) -> Tensor:
    """The most probable token, the first on ties; in float32 at most, as transformers compares. [..., V] -> [...]"""
    return (logits.float() if logits.dtype == torch.float64 else logits).argmax(-1)


def walk(tree: DraftTree, targets: Tensor) -> Accepted:
    """Follow a child while its token is the one that the base model emits after its parent.

    Args:
        tree: N trees of M nodes.
        targets: [N, M] long, the base model's token after each node.
    """
    n, m = tree.tokens.shape
    if tree.parents is None:
        hits = (tree.tokens[:, 1:] == targets[:, :-1]).long().cumprod(1)  # [N, M - 1]
        rows = torch.arange(m, device=targets.device).expand(n, m)
        return Accepted(rows, 1 + hits.sum(1), targets)
    at = torch.zeros(n, dtype=torch.long, device=targets.device)
    count, alive = at + 1, at == 0
    path = [at]
    for _ in range(m - 1):
        want = targets.gather(1, at[:, None])
        child = (tree.parents == at[:, None]) & (tree.tokens == want)  # [N, M]
        alive = alive & child.any(1)
        at = torch.where(alive, child.int().argmax(1), at)
        count = count + alive
        path.append(at)
    rows = torch.stack(path, 1)
    return Accepted(rows, count, targets.gather(1, rows))
