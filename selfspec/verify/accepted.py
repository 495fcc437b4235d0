"""What every verifier gets beside the tree, and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec import sampling
from selfspec.draft import DraftTree


@dataclass(frozen=True)
class Accepted:
    """The accepted path of every request.

    Attributes:
        rows: [N, A] long, nodes of the path in order, the anchor first; padded past `count` with the last one.
        count: [N] long, nodes on the path, at least 1 (the anchor).
        tokens: [N, A] long, tokens emitted: those after the anchor on the path, then the bonus; `count` of them count.
    """

    rows: Tensor
    count: Tensor
    tokens: Tensor

    @property
    def bonus(self) -> Tensor:
        """[N] long, the verifier's own token after the path."""
        return self.tokens.gather(1, self.count[:, None] - 1)[:, 0]

    @property
    def last(self) -> Tensor:
        """[N] long, the last accepted node."""
        return self.rows.gather(1, self.count[:, None] - 1)[:, 0]


@dataclass(frozen=True)
class Noise:
    """The random numbers of one round, all functions of seed and place.

    `start` grows from round to round, so numbers keyed by it are never used twice: what one round's decisions have
    read may not decide a later one's draft.

    Attributes:
        seed: [N] long.
        start: [N] long, the anchor's position.
    """

    seed: Tensor
    start: Tensor

    def uniforms(self, n: int) -> Tensor:
        """n acceptance draws a request, [N, n] float64."""
        key = sampling.hashed(self.seed, sampling.ACCEPT, self.start)[:, None]
        return sampling.uniform(key, torch.arange(n, device=key.device))

    def residual(self, weights: Tensor) -> Tensor:
        """A token of each request, by weights that need not sum to 1. [N, V] -> [N]"""
        key = sampling.hashed(self.seed, sampling.RESIDUAL, self.start)
        return sampling.draw(weights.log(), key, self.start)

    def positions(self, tree: DraftTree) -> Tensor:
        """Position of the token that comes after each node. [N, M] long"""
        return self.start[:, None] + 1 + tree.depths
