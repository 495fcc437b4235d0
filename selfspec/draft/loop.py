"""Loop: passes that regenerate the suffix of a draft given its confident prefix (D-Loop, arXiv 2610.06011).

A block's positions are guessed without knowledge of one another, so neighbours tend to guess the same word. The first
pass drafts the block from anchor and masks; the next one sees the first s draft tokens as known tokens in slots 1..s
and drafts what follows anew:

    pass 1: [anchor, mask, mask, ...]        pass 2: [anchor, x_1, ..., x_s, mask, ...].

Every pass costs a draft forward, so loops pay where those are cheap: at a late entry layer. Where verification overlaps
with drafting it is the first pass itself, and later ones go on from the draft that it saved. s comes from confidences,
which are marginals; whoever draws tokens passes a `choose` that draws them, and then no decision foresees a draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec import tops
from selfspec.backbone import MASK, Backbone
from selfspec.cache import KVCache
from selfspec.draft.block import guesses
from selfspec.draft.block import states as one_pass
from selfspec.plan.lengths.named import read

Prefix = Callable[[Tensor], Tensor]
"""Confidences [N, T] -> [N] long, tokens that the next pass takes as known."""


@dataclass(frozen=True)
class Fixed:
    """Always the first s."""

    s: int = 4

    def __call__(self, confidence: Tensor) -> Tensor:
        return torch.full_like(confidence[:, 0], self.s, dtype=torch.long).clamp(max=confidence.shape[1])


@dataclass(frozen=True)
class Product:
    """As many as are all right with that probability: the running product of confidences stays at or above it."""

    threshold: float = 0.6

    def __call__(self, confidence: Tensor) -> Tensor:
        return (confidence.cumprod(1) >= self.threshold).sum(1)


@dataclass(frozen=True)
class Expected:
    """A share of the number expected to be accepted, floor(factor * sum of running products)."""

    factor: float = 1.0

    def __call__(self, confidence: Tensor) -> Tensor:
        return (self.factor * confidence.cumprod(1).sum(1)).long().clamp(max=confidence.shape[1])


PREFIXES: dict[str, type] = {"product": Product, "expected": Expected, "fixed": Fixed}


def prefix_of(text: str) -> Prefix:
    """The rule that a text names, as in "fixed:s=2" or "product:threshold=0.8".

    Raises:
        ValueError: there is no such rule, or no such setting.
    """
    named = read(text, PREFIXES, "prefix")
    return PREFIXES[named.name](**named.settings)


@dataclass(frozen=True)
class Looped:
    """A block drafted in several passes.

    Attributes:
        logits: [N, T, V]; those of a prefix token are from the pass that chose it, so `choose(logits)` gives it again.
        tokens: [N, T] long, `choose(logits)`: the tokens that the suffix is conditioned on, then the suffix itself.
        prefix: [N] long, tokens that the last pass took as known.
        states: [N, T, d] hidden states that the logits come from.
    """

    logits: Tensor
    tokens: Tensor
    prefix: Tensor
    states: Tensor


def require(path) -> None:
    """Refuse a mask path that was not trained for known tokens inside its block.

    Raises:
        ValueError: says what to do.
    """
    path.require("known")
    if not path.prefix_splits:
        raise ValueError(
            "this adapter was not trained with prefix splits, so a second pass would not know its known tokens; "
            "train it with prefix_splits=true, or choose mode='sequential'"
        )


def propose(
    backbone: Backbone,
    cache: KVCache,
    anchor: Tensor,
    start: Tensor,
    size: int,
    path,
    features: Tensor | None = None,
    n_keys: int | None = None,
    passes: int = 2,
    prefix: Prefix | None = None,
    choose: Callable[[Tensor], Tensor] | None = None,
    confidence: Callable[[Tensor], Tensor] | None = None,
    first: tuple[Tensor, Tensor] | None = None,
) -> Looped:
    """Marginals of the size - 1 positions after the anchor, each later pass given a prefix of the draft.

    Args:
        backbone: with a mask path.
        cache: committed up to `start`; the draft's rows stay uncommitted.
        anchor: [N] long, the bonus token, whose position is `start`.
        start: [N] long, committed lengths.
        size: nodes that the resulting chain will have, the anchor included.
        path: the mask path's configuration.
        features: [N, F] of the last committed position, for a path that wants them.
        n_keys: K of `KVCache.bind`, where the caller fixes it.
        passes: draft forwards, 1 or more.
        prefix: how many tokens the next pass takes as known; `Product()` by default. A later pass never takes fewer.
        choose: tokens [N, T] of logits [N, T, V], the same for the same logits (noise fixed by round and depth where
            they are drawn); the most probable ones by default.
        confidence: [N, T] of logits, from marginals alone; the largest probability by default.
        first: logits and hidden states, [N, T, V] and [N, T, d], that stand for the first pass: a draft which an
            overlapped verification has made.

    Raises:
        ValueError: the path has no prefix splits, or `passes` is below 1.
    """
    require(path)
    if passes < 1:
        raise ValueError(f"passes={passes}: expected 1 or more")
    prefix, choose, confidence = prefix or Product(), choose or tops.best, confidence or tops.certainty
    if first is None:
        states = one_pass(backbone, cache, anchor, start, size, path, features, n_keys)
        logits = guesses(backbone, states, path)
    else:
        logits, states = first
    s, tokens = torch.zeros_like(anchor), choose(logits)
    place = torch.arange(size - 1, device=anchor.device)
    for _ in range(passes - 1):
        s = torch.maximum(s, prefix(confidence(logits)))
        inside = place < s[:, None]  # [N, T]
        known = torch.where(inside, tokens, MASK)
        again = one_pass(backbone, cache, anchor, start, size, path, features, n_keys, known)
        states = torch.where(inside[..., None], states, again)
        logits = torch.where(inside[..., None], logits, guesses(backbone, again, path))
        tokens = choose(logits)
    return Looped(logits, tokens, s, states)
