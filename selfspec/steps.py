"""transformers' processors and warpers over every node of a tree at once, to the last bit what each gives alone.

A `Step` stands for one processor. Those that are functions of the scores run transformers' own class on all rows; those
that read the text, or that read a tensor from the host in transformers, are written here over `Nodes`. Lengths are
those of the answer, so that requests with the same settings share their steps whatever their prompts are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from selfspec.nodes import Nodes


@dataclass(frozen=True)
class Step:
    """One processor of all nodes. Equal steps do the same.

    Attributes:
        kept: its constant tensors on the device, made at its first call.
    """

    kept: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False, kw_only=True)

    def __call__(self, nodes: Nodes, scores: Tensor) -> Tensor:
        """scores: [N, M, V] float32 after each node -> the same"""
        raise NotImplementedError

    @property
    def of_scores(self) -> bool:
        """Whether it is a function of the scores alone, which may be applied to the drafter's too."""
        return False

    @property
    def reads_text(self) -> bool:
        """Whether it needs the tokens of the text, not only their number."""
        return True

    def constant(self, name: Any, scores: Tensor, make: Callable[[int], Tensor]) -> Tensor:
        """A tensor that is made once on each device, from V."""
        key = (name, scores.shape[-1], scores.device)
        if key not in self.kept:
            self.kept[key] = make(scores.shape[-1]).to(scores.device)
        return self.kept[key]

    def mask(self, ids: tuple[int, ...], scores: Tensor) -> Tensor:
        """Whether a token is one of these. bool [V]"""
        return self.constant(ids, scores, lambda v: torch.isin(torch.arange(v), torch.tensor(ids)))


@dataclass(frozen=True)
class Pure(Step):
    """A function of the scores alone: transformers' own class on all rows. `key` says what it does."""

    key: tuple
    processor: Any = field(compare=False)
    of_scores = True
    reads_text = False

    def __call__(self, nodes: Nodes | None, scores: Tensor) -> Tensor:
        return self.processor(None, scores.reshape(-1, scores.shape[-1])).view_as(scores)


@dataclass(frozen=True)
class Eta(Pure):
    """`EtaLogitsWarper`, whose entropy transformers checks on the host."""

    def __call__(self, nodes: Nodes | None, scores: Tensor) -> Tensor:
        p = self.processor
        epsilon = self.constant("epsilon", scores, lambda _: p.epsilon)
        entropy = Categorical(logits=scores, validate_args=False).entropy()
        eta = torch.min(epsilon, torch.sqrt(epsilon) * torch.exp(-entropy))[..., None]
        best = torch.topk(scores, min(p.min_tokens_to_keep, scores.shape[-1]))[0][..., -1, None]
        return scores.masked_fill((scores.softmax(-1) < eta) & (scores < best), p.filter_value)


@dataclass(frozen=True)
class TopH(Pure):
    """`TopHLogitsWarper`, likewise."""

    def __call__(self, nodes: Nodes | None, scores: Tensor) -> Tensor:
        p = self.processor
        top, at = torch.topk(scores, min(p.top_n, scores.shape[-1]))
        law = Categorical(logits=top, validate_args=False)
        chosen = torch.cumsum(-law.probs * torch.log(law.probs), -1) <= (law.entropy() * p.top_h)[..., None]
        chosen[..., 0] = True
        keep = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, at, chosen)
        return scores.masked_fill(~keep, p.filter_value)


@dataclass(frozen=True)
class Ban(Step):
    """Tokens that may not come: never, below a length, or at a length (of the answer, in tokens)."""

    ids: tuple[int, ...]
    below: int | None = None
    at: int | None = None
    reads_text = False

    @property
    def of_scores(self) -> bool:
        """Always, or at some lengths only."""
        return self.below is None and self.at is None

    def __call__(self, nodes: Nodes, scores: Tensor) -> Tensor:
        banned = self.mask(self.ids, scores)
        if self.below is not None or self.at is not None:
            emitted = (nodes.length - nodes.text.prompt[:, None])[..., None]
            banned = banned & (emitted < self.below if self.below is not None else emitted == self.at)
        return scores.masked_fill(banned, -math.inf)


@dataclass(frozen=True)
class Force(Step):
    """Nothing but these tokens at a length of the answer."""

    ids: tuple[int, ...]
    at: int
    reads_text = False

    def __call__(self, nodes: Nodes, scores: Tensor) -> Tensor:
        now = (nodes.length - nodes.text.prompt[:, None] == self.at)[..., None]
        forced = torch.zeros_like(scores).masked_fill(~self.mask(self.ids, scores), -math.inf)
        return torch.where(now, forced, scores)


@dataclass(frozen=True)
class Repetition(Step):
    """Scores of tokens that the text holds from position `first` on (None: that the prompt holds), scaled."""

    penalty: float
    first: int | None = 0

    def __call__(self, nodes: Nodes, scores: Tensor) -> Tensor:
        v = scores.shape[-1]
        if self.first is None:
            held = nodes.in_prompt(v)[:, None]
        else:
            held = nodes.counts(torch.full_like(nodes.start, self.first), v) > 0
        return torch.where(held, torch.where(scores < 0, scores * self.penalty, scores / self.penalty), scores)


@dataclass(frozen=True)
class PresenceFrequency(Step):
    """See `selfspec.penalties`; `skip` is the first token that counts, from the answer's first on."""

    presence: float
    frequency: float
    skip: int

    def __call__(self, nodes: Nodes, scores: Tensor) -> Tensor:
        counts = nodes.counts(nodes.text.prompt + self.skip, scores.shape[-1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class NGram(Step):
    """No n-gram of the text (of the prompt alone) comes again: a window equal to the suffix bans its last token."""

    size: int
    prompt_only: bool = False

    def __call__(self, nodes: Nodes, scores: Tensor) -> Tensor:
        (n, m, v), k = scores.shape, self.size - 1
        suffix = nodes.last(k)  # [N, M, k]
        text, whole = nodes.text.tokens, (nodes.length >= self.size)[..., None]
        banned = torch.zeros(n, m, v + 1, dtype=torch.bool, device=scores.device)
        width = text.shape[1] - k  # windows of the committed text, those behind its end among them
        if width > 0:
            end = nodes.text.prompt if self.prompt_only else nodes.start + 1
            match = whole & (torch.arange(k, k + width, device=scores.device) < end[:, None])[:, None]
            for j in range(k):
                match = match & (text[:, None, j : j + width] == suffix[:, :, j, None])
            self._ban(banned, match, text[:, None, k:].expand(n, m, width))
        if not self.prompt_only and m > 1:  # windows that end on the path
            seen = nodes.window(k)
            match = whole & (torch.arange(1, m, device=scores.device) <= nodes.depth[..., None])
            for j in range(k):
                match = match & (seen[:, :, j : j + m - 1] == suffix[:, :, j, None])
            self._ban(banned, match, seen[:, :, k:])
        return scores.masked_fill(banned[..., :v], -math.inf)

    @staticmethod
    def _ban(banned: Tensor, match: Tensor, ends: Tensor) -> None:
        """What is not banned goes to the spare column."""
        spare = banned.shape[-1] - 1
        banned.scatter_(2, torch.where(match, ends, spare).clamp(0, spare), True)


@dataclass(frozen=True)
class Bias(Step):
    """Added to the last token of a sequence where the text ends with the tokens before it; bad words have -inf."""

    sequences: tuple[tuple[tuple[int, ...], float], ...]

    def __call__(self, nodes: Nodes, scores: Tensor) -> Tensor:
        bias = torch.zeros_like(scores) + self.constant(1, scores, self._single)
        for k in sorted({len(s) - 1 for s, _ in self.sequences} - {0}, key=self._first_of):
            before, after, biases = (self.constant((k, i), scores, partial(self._longer, k, i)) for i in range(3))
            hit = (nodes.last(k)[:, :, None] == before).all(-1)  # [N, M, S]
            bias.index_add_(2, after, torch.where(hit, biases, 0.0))
        return scores + bias

    def _single(self, vocab: int) -> Tensor:
        """Biases of single tokens. [V]"""
        out = torch.zeros(vocab)
        for (token, *rest), bias in self.sequences:
            if not rest:
                out[token] = bias
        return out

    def _longer(self, k: int, part: int, vocab: int) -> Tensor:
        """Sequences of k + 1 tokens: the first k [S, k], the last [S], or the biases [S]."""
        of = [(s, b) for s, b in self.sequences if len(s) == k + 1]
        return torch.tensor([(s[:-1], s[-1], b)[part] for s, b in of])

    def _first_of(self, k: int) -> int:
        """Sums are made in transformers' order: lengths as they first come."""
        return next(i for i, (s, _) in enumerate(self.sequences) if len(s) == k + 1)


@dataclass(frozen=True)
class Decay(Step):
    """Scores of ends grow by a factor with every token past a length of the answer (up to `longest` are told apart)."""

    start: int
    factor: float
    ids: tuple[int, ...]
    longest: int
    reads_text = False

    def __call__(self, nodes: Nodes, scores: Tensor) -> Tensor:
        past = nodes.length - nodes.text.prompt[:, None] - self.start  # [N, M]
        ids = self.constant("ids", scores, lambda _: torch.tensor(self.ids))
        growth = self.constant("growth", scores, lambda _: torch.tensor(self.table()))
        ends = scores.index_select(2, ids)
        grown = ends.abs() * growth[past.clamp(0, len(growth) - 1)][..., None]
        penalties = torch.zeros_like(scores).index_copy_(2, ids, grown.masked_fill(~ends.isfinite(), 0.0))
        return torch.where((past > 0)[..., None], scores + penalties, scores)

    def table(self) -> list[float]:
        """Powers in Python's own arithmetic, as transformers has them."""
        out = []
        for k in range(self.longest + 1):
            try:
                out.append(pow(self.factor, k) - 1)
            except OverflowError:  # transformers fails here
                out.append(math.inf)
        return out
