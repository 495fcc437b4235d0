"""Drafts conditioned on the token before them, by an adapter's Markov head (DSpark, arXiv 2607.05147) or sampler
head (arXiv 2507.11851), which also sees the state of the slot that it corrects.

A block's marginals know nothing of one another: the second word of "New York" may be paired with the first of "San
Francisco". So every position offers its K most probable tokens by the marginals, and a head gives what each would be
followed by,

    log q(x_t = j | x_{t-1} = i) = log softmax(logits of t given i)[j]    over the whole vocabulary, i and j candidates.

A chain then walks from candidate to candidate, always to the best, for which the logits of those few are enough; a tree
grows best-first over these transitions (the
idea of DominoTree; `draft.trees.domino` has the forms that look at the whole vocabulary at every step).

K is a constant since K rows of vocabulary width a position are what conditioning costs, and 8 keep a block of 16 within
the rows that a product of a few serves. What the head could put right stands nearly always among the first few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec import kernels, tops
from selfspec.backbone import MASK, Backbone
from selfspec.draft import DraftTree
from selfspec.draft.block import ban_mask
from selfspec.draft.tree import follow, grow
from selfspec.rows import steps

CANDIDATES = 8  # tokens of a position, by the plain marginals, that the head chooses among
SMALL = 4096  # vocabulary of which a CPU can afford that many rows: of a large one they cost more than a forward
ROWS = 1024  # of vocabulary width at a time, or those of one position where they are more

Condition = Callable[[Tensor, Tensor], Tensor]
"""(hidden states [N, T, K, d], the token before each [N, T, K] long) -> logits [N, T, K, V]; a token below 0 leaves
them as they are without the head."""

Noised = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scores [N, R, K], their tokens [N, R, K] long, the position 0..T-1 that each row is of [R] long) -> the scores with
the noise that will choose the token there."""


@dataclass(frozen=True)
class Scored:
    """What becomes of a head's logits before they are compared.

    Attributes:
        all: of the vocabulary's width, [N, R, V] -> the same.
        few: of some of its tokens, [N, R, K] -> the same, none of which is banned.
        noised: adds noise; None where drafts are the likeliest tokens.
        temperatures: by which scores were divided, a number a request. A tree is grown by scores and noise multiplied
            by them: what a branch may gain is what the drafter errs, which no temperature makes smaller.
    """

    all: Callable[[Tensor], Tensor] = lambda logits: logits
    few: Callable[[Tensor], Tensor] = lambda logits: logits
    noised: Noised | None = None
    temperatures: tuple[float, ...] | None = None


PLAIN = Scored()


@dataclass(frozen=True)
class Given:
    """A draft that can be conditioned.

    Attributes:
        condition: the head.
        states: [N, T, d] hidden states of the drafts.
        before: [N] long, the token before the first; `MASK` where that one is not to be corrected.
        banned: a token that is never drafted.
    """

    condition: Condition
    states: Tensor
    before: Tensor
    banned: int | None = None


def heated(scores: Tensor, temperatures: tuple[float, ...] | None, power: int = 1) -> Tensor:
    """Scores [N, ...] times each request's temperature to that power: numbers, which a graph can capture."""
    if temperatures is None or all(t == 1.0 for t in temperatures):
        return scores
    if len(set(temperatures)) == 1:
        return scores * temperatures[0] ** power
    return torch.stack([s * t**power for s, t in zip(scores, temperatures, strict=True)])


def condition_of(backbone: Backbone) -> Condition | None:
    """The head of its mask path; None without one, and where its rows would cost more than what they save."""
    weight: Tensor = backbone.embeddings.weight  # type: ignore[assignment]
    return backbone.part("condition") if kernels.serve(weight) or backbone.vocab_size <= SMALL else None


def propose(anchor: Tensor, marginals: Tensor, given: Given, nodes: int | None, scored: Scored = PLAIN) -> DraftTree:
    """A chain, or a tree of `nodes` beside the anchor. No host reads where there are kernels.

    Args:
        anchor: [N] long.
        marginals: [N, T, V] scores without the head, for the candidates; -inf bans a token.
        given: what conditions.
        nodes: None asks for a chain.
        scored: makes of the head's logits what the marginals are of the plain ones.
    """
    k = min(CANDIDATES, marginals.shape[-1], nodes or CANDIDATES)
    top, ids = tops.ranked(marginals, k)
    ids = ids.masked_fill(top == -torch.inf, MASK)
    if nodes is None:
        return follow(anchor, ids, successors(given, ids, scored))
    top, order = transitions(given, ids, scored)
    return grow(anchor, top, ids, nodes, order)


def successors(given: Given, ids: Tensor, scored: Scored = PLAIN) -> Tensor:
    """The candidate that follows each candidate best: nothing is asked about the rest of the vocabulary.

    Args:
        given: of T positions.
        ids: [N, T, K] long, candidates; below 0 where there are fewer.
        scored: of the head's logits.

    Returns:
        long [N, T, K], `[n, t, i]` after candidate i of position t - 1 (all alike at the first position).
    """

    def best(logits: Tensor, wanted: Tensor, place: Tensor) -> tuple[Tensor]:
        scores = scored.few(logits.gather(-1, wanted.clamp(min=0)))
        if scored.noised is not None:
            scores = scored.noised(scores, wanted, place)
        return (scores.masked_fill(wanted < 0, -torch.inf).argmax(-1),)

    return _by_position(given, ids, best)[0].view(ids.shape)


def transitions(given: Given, ids: Tensor, scored: Scored = PLAIN) -> tuple[Tensor, Tensor]:
    """What every candidate may be followed by, the most probable first.

    Noise is that of the candidates alone; beside them the rest of the vocabulary counts by its mass.

    Args:
        given: of T positions.
        ids: [N, T, K] long, candidates; below 0 where there are fewer.
        scored: of the head's logits.

    Returns:
        Log-probabilities, float32 [N, T, K, K], `[n, t, i]` after candidate i of position t - 1 (all alike at the first
        position), falling; and long [N, T, K, K], which candidate of position t each is of.
    """

    def ranked(logits: Tensor, wanted: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        warm = scored.temperatures
        top, order = tops.among(heated(scored.all(logits), warm), wanted)
        if scored.noised is None:
            return top, order
        rest = (1 - top.exp().sum(-1, keepdim=True)).clamp(min=0)
        top = heated(scored.noised(heated(top, warm, -1), wanted.gather(-1, order), place), warm)
        total = torch.logaddexp(top.logsumexp(-1, keepdim=True), rest.log())
        top, again = (top - total).clamp(max=0).sort(dim=-1, descending=True, stable=True)
        return top, order.gather(-1, again)

    top, order = _by_position(given, ids, ranked)
    return top.view(*ids.shape, -1), order.view(*ids.shape, -1)


def _by_position(given: Given, ids: Tensor, read: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]):
    """`read` of a bounded number of rows at a time: logits [N, R, V], candidates [N, R, K], positions [R]."""
    n, t, k = ids.shape
    before = torch.cat([given.before[:, None, None].expand(n, 1, k), ids[:, :-1]], 1)  # [N, T, K]
    size = max(1, ROWS // (n * k))
    parts = []
    for first in range(0, t, size):
        at = slice(first, min(first + size, t))
        states = given.states[:, at, None].expand(-1, -1, k, -1)
        logits = ban_mask(given.condition(states, before[:, at]).flatten(1, 2), given.banned)  # [N, t' * K, V]
        place = steps(t, ids.device)[at, None].expand(-1, k).flatten()
        wanted = ids[:, at, None].expand(-1, -1, k, -1).flatten(1, 2)  # [N, t' * K, K]
        parts.append(read(logits, wanted, place))
    return [p[0] if len(parts) == 1 else torch.cat(p, 1) for p in zip(*parts)]
