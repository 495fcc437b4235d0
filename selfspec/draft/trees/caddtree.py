"""CaDDTree (github.com/ZhangShuai1230/CaDDTree): the size that gives most tokens per time.

Nodes come best-first with path probabilities p_1 >= p_2 >= ..., and a round that verifies m + 1 rows takes C(m) ms, its
draft included. The size is

    argmax over m of theta(m) = (1 + p_1 + ... + p_m) / C(m).

The published rule stops at theta's first fall, which is the same thing where C is convex. A measured C is a staircase
(kernels and graphs pad their rows), on which a first fall is a step's edge, so all sizes are compared here. Good where
rows cost: at high concurrency, with long contexts, on large models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.draft import DraftTree, cut
from selfspec.draft.tree import best_first


@dataclass(frozen=True)
class CaDDTree:
    """Cuts a best-first tree where its expected speed is highest.

    Attributes:
        costs: [M] float32 on the trees' device: ms of a round that verifies 1..M rows. It may be overwritten between
            rounds, also of a captured graph.
    """

    costs: Tensor

    def __call__(self, anchor: Tensor, logits: Tensor, budget: int) -> DraftTree:
        """See `draft.trees`.

        Raises:
            ValueError: the costs end before the budget.
        """
        tree = best_first(anchor, logits, budget)
        return cut(tree, best_size(tree, until(self.costs, budget)))


def best_size(tree: DraftTree, costs: Tensor) -> Tensor:
    """The size of highest expected speed, the smallest of equals. costs: [M]. Returns [N] long, anchor included."""
    assert tree.scores is not None
    speed = tree.scores.exp().cumsum(1) / costs  # the anchor's 1 stands for the bonus
    return speed.argmax(1) + 1


def until(costs: Tensor, budget: int) -> Tensor:
    """Costs of 1..budget + 1 rows.

    Raises:
        ValueError: some are missing.
    """
    if len(costs) <= budget:
        raise ValueError(f"costs are known up to {len(costs)} rows; a tree of {budget} nodes has {budget + 1}")
    return costs[: budget + 1]


def costs(latency: Callable[[int], float], fixed: float, budget: int, device: torch.device | str = "cpu") -> Tensor:
    """A table for `CaDDTree` and `Bastion`.

    Args:
        latency: rows -> ms of their verification.
        fixed: ms of what a round costs beside it, such as its draft.
        budget: nodes beside the anchor.
        device: of the trees.
    """
    return torch.tensor([fixed + latency(m + 1) for m in range(budget + 1)], dtype=torch.float32, device=device)
