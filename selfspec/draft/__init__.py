"""Propose: every drafter ends in a `DraftTree`, which the verifier walks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations; node 0 is the anchor (the bonus token of the round before), every path is one guess.

    Attributes:
        tokens: [N, M] long; -1 never matches.
        parents: [N, M] long, a parent stands before its child; node 0 has -1, and so has padding. None means a chain.
        probs: [N, T, V] float64, what the tokens at depths 1..T were drawn from, siblings without replacement and in
            order; None where they were chosen otherwise.
    """

    tokens: Tensor
    parents: Tensor | None = None
    probs: Tensor | None = None

    @property
    def n_nodes(self) -> int:
        return self.tokens.shape[1]


def chain_of(anchor: Tensor, logits: Tensor) -> DraftTree:
    """The most probable token at every position: a tree of width one.

    Args:
        anchor: [N] long.
        logits: [N, T, V] marginals of the T positions after the anchor.
    """
    return DraftTree(torch.cat([anchor[:, None], logits.argmax(-1)], 1))


def repeat_parents(n_nodes: int, like: Tensor) -> Tensor:
    """A chain's parents spelt out. [N, M]"""
    return torch.arange(-1, n_nodes - 1, device=like.device).expand(like.shape[0], -1)


Builder = Callable[..., DraftTree]
