"""Drafts conditioned on the token before them, by an adapter's Markov head (DSpark, arXiv 2607.05147) or sampler
head (arXiv 2507.11851), which also sees the state of the slot that it corrects.

A block's marginals know nothing of one another: the second word of "New York" may be paired with the first of "San
Francisco". So every position offers its K most probable tokens by the marginals, and a head gives what each would be
followed by,

    log q(x_t = j | x_{t-1} = i) = log softmax(logits of t given i)[j]    over the whole vocabulary, i and j candidates.

A chain then walks from candidate to candidate, always to the best; a tree grows best-first over these transitions (the
idea of DominoTree; `draft.trees.domino` has the forms that look at the whole vocabulary at every step).

K is a constant: what the head could put right stands nearly always among the first few. Where logits are a product with
the model's own head and nothing more, K rows of vocabulary width a position need not be computed for them: only the
rows of the head that are asked for are read. A chain asks for those of the candidates; a greedy tree for those of the
WIDE most probable tokens, and takes the rest of its normaliser as the marginals have it. Trees of sampled or
processed texts still look at the whole vocabulary.
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
from selfspec.draft.tree import best_first, follow, grow
from selfspec.rows import steps

CANDIDATES = 8  # tokens of a position, by the plain marginals, that the head chooses among
WIDE = 32  # tokens whose mass under the head a tree's normaliser counts; that of the others the head is taken to leave
SMALL = 4096  # vocabulary of which a CPU can afford rows of its width: of a large one they cost more than a forward
ROWS = 1024  # of vocabulary width at a time, or those of one position where they are more

Noised = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scores [N, R, K], their tokens [N, R, K] long, the position 0..T-1 that each row is of [R] long) -> the scores with
the noise that will choose the token there."""


@dataclass(frozen=True)
class Condition:
    """A head, and the model's own behind it.

    Attributes:
        correct: (hidden states [N, T, K, d], the token before each [N, T, K] long) -> states [N, T, K, d]; a token
            below 0 leaves them as they are.
        logits: [N, T, K, d] -> [N, T, K, V].
        readout: [V, d], where logits are the states' product with it and nothing more; None elsewhere.
    """

    correct: Callable[[Tensor, Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    readout: Tensor | None = None


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
    head: Condition | None = backbone.part("condition")
    weight: Tensor = backbone.embeddings.weight  # type: ignore[assignment]
    cheap = head is not None and head.readout is not None
    return head if cheap or _affordable(weight, backbone.vocab_size) else None


def _affordable(like: Tensor, vocab: int) -> bool:
    """Whether rows of the vocabulary's width are, where a tensor lives."""
    return kernels.serve(like) or vocab <= SMALL


def propose(anchor: Tensor, marginals: Tensor, given: Given, nodes: int | None, scored: Scored = PLAIN) -> DraftTree:
    """A chain, or a tree of `nodes` beside the anchor. No host reads where there are kernels.

    Args:
        anchor: [N] long.
        marginals: [N, T, V] scores without the head, for the candidates; -inf bans a token.
        given: what conditions.
        nodes: None asks for a chain.
        scored: makes of the head's logits what the marginals are of the plain ones.
    """
    if nodes is not None and scored is not PLAIN and not _affordable(marginals, marginals.shape[-1]):
        return best_first(anchor, marginals, nodes)  # processors are asked about the whole vocabulary
    k = min(CANDIDATES, marginals.shape[-1], nodes or CANDIDATES)
    wide = WIDE if nodes is not None and scored is PLAIN else k
    top, ids = tops.ranked(marginals, min(wide, marginals.shape[-1]))
    ids = ids.masked_fill(top == -torch.inf, MASK)
    if nodes is None:
        return follow(anchor, ids, successors(given, ids, scored))
    if scored is PLAIN:
        likely, order = near(given, ids, top, marginals.gather(-1, ids[..., :1].clamp(min=0))[..., 0], k)
    else:
        likely, order = transitions(given, ids, scored)
    return grow(anchor, likely, ids[..., :k], nodes, order)


def successors(given: Given, ids: Tensor, scored: Scored = PLAIN) -> Tensor:
    """The candidate that follows each candidate best: nothing is asked about the rest of the vocabulary.

    Args:
        given: of T positions.
        ids: [N, T, K] long, candidates; below 0 where there are fewer.
        scored: of the head's logits.

    Returns:
        long [N, T, K], `[n, t, i]` after candidate i of position t - 1 (all alike at the first position).
    """
    readout = _served(given, ids)
    if scored is PLAIN and readout is not None:
        from selfspec.kernels import pairs

        return pairs.best(_corrected(given, ids), readout, ids)
    n, t, k = ids.shape
    scores = scored.few(_few(given, ids, ids).flatten(1, 2))  # [N, T * K, K]
    wanted = ids[:, :, None].expand(-1, -1, k, -1).flatten(1, 2)
    if scored.noised is not None:
        scores = scored.noised(scores, wanted, steps(t, ids.device)[:, None].expand(-1, k).flatten())
    return scores.masked_fill(wanted < 0, -torch.inf).argmax(-1).view(n, t, k)


def near(given: Given, ids: Tensor, top: Tensor, first: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What every candidate may be followed by, the most probable first, by the logits of the likeliest tokens alone.

        log q(x_t = j | x_{t-1} = i) = l_ij - log(sum over the W likeliest of exp l_iw + rest)

    where rest is what the others weigh in the marginals.

    Args:
        given: of T positions.
        ids: [N, T, W] long, the likeliest tokens, the best first; the first k of them are candidates.
        top: [N, T, W] float32, their log-probabilities by the marginals.
        first: [N, T] the score of the first by the marginals.
        k: candidates.

    Returns:
        As `transitions`.
    """
    readout = _served(given, ids)
    if readout is not None:
        from selfspec.kernels import pairs

        return pairs.near(_corrected(given, ids[..., :k]), readout, ids, top, first)
    scores = _few(given, ids[..., :k], ids).float().masked_fill(ids[:, :, None] < 0, -torch.inf)  # [N, T, K, W]
    rest = (1 - top.exp().sum(-1)).clamp(min=0).log() + first.float() - top[..., 0]  # [N, T]
    total = torch.logaddexp(scores.logsumexp(-1), rest[..., None])
    return (scores[..., :k] - total[..., None]).sort(dim=-1, descending=True, stable=True)


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

    top, order = _by_position(given, ids, ids, ranked)
    return top.view(*ids.shape, -1), order.view(*ids.shape, -1)


def _before(given: Given, ids: Tensor) -> Tensor:
    """The token before each candidate's successor: those of the position before. [N, T, K]"""
    return torch.cat([given.before[:, None, None].expand(-1, 1, ids.shape[2]), ids[:, :-1]], 1)


def _corrected(given: Given, ids: Tensor) -> Tensor:
    """States after every candidate. [N, T, K, d]"""
    return given.condition.correct(given.states[:, :, None].expand(-1, -1, ids.shape[2], -1), _before(given, ids))


def _served(given: Given, ids: Tensor) -> Tensor | None:
    """The readout, where a kernel reads it; its products are not float64's."""
    known = kernels.serve(ids) and ids.numel() and given.states.dtype != torch.float64
    return given.condition.readout if known else None


def _few(given: Given, ids: Tensor, tokens: Tensor) -> Tensor:
    """Logits of some tokens [N, T, W] after every candidate. [N, T, K, W]"""
    readout = given.condition.readout
    if readout is not None:
        return _corrected(given, ids) @ readout[tokens.clamp(min=0)].transpose(-1, -2)
    (scores,) = _by_position(given, ids, tokens, lambda logits, wanted, _: (logits.gather(-1, wanted.clamp(min=0)),))
    return scores.view(*ids.shape, -1)


def _by_position(
    given: Given, ids: Tensor, tokens: Tensor, read: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
) -> list[Tensor]:
    """`read` of a bounded number of rows at a time: logits [N, R, V], tokens [N, R, W], positions [R]."""
    n, t, k = ids.shape
    before, condition = _before(given, ids), given.condition
    size = max(1, ROWS // (n * k))
    parts = []
    for first in range(0, t, size):
        at = slice(first, min(first + size, t))
        states = given.states[:, at, None].expand(-1, -1, k, -1)
        logits = ban_mask(condition.logits(condition.correct(states, before[:, at])).flatten(1, 2), given.banned)
        place = steps(t, ids.device)[at, None].expand(-1, k).flatten()
        wanted = tokens[:, at, None].expand(-1, -1, k, -1).flatten(1, 2)  # [N, t' * K, W]
        parts.append(read(logits, wanted, place))
    return [p[0] if len(parts) == 1 else torch.cat(p, 1) for p in zip(*parts, strict=True)]
