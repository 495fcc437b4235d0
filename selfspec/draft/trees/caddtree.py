"""CaDDTree (github.com/ZhangShuai1230/CaDDTree): the size that gives most tokens per time.

Nodes come best-first with path probabilities p_1 >= p_2 >= ..., and a round that verifies m + 1 rows takes C(m) ms, its
draft included. The size is

    argmax over m of theta(m) = (1 + p_1 + ... + p_m) / C(m).

The published rule stops at theta's first fall, which is the same thing where C is convex. A measured C is a staircase
(kernels and graphs pad their rows), on which a first fall is a step's edge, so all sizes are compared here. Good where
rows cost: at high concurrency, with long contexts, on large models.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CaDDTree:
    """Ends a tree where its expected speed is highest, at the smallest of equal sizes."""

    def __call__(self, scores: Tensor, costs: Tensor) -> Tensor:
        """See `draft.trees`."""
        speed = scores.exp().cumsum(1) / costs  # the anchor's 1 stands for the bonus
        return speed.argmax(1) + 1
