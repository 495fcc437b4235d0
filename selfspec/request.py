"""One prompt on its way to an answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList

from selfspec.sampling import Sampling
from selfspec.stats import Stats


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer.

    Attributes:
        prompt: token ids, not empty.
        max_new_tokens: cap on emitted tokens, at least 1.
        eos: token ids that end the answer (kept in it, as transformers does).
        output: emitted tokens so far.
        finish_reason: "stop", "length" or "cancelled" once it has ended.
        stats: rounds and acceptance.
        sampling: how tokens are chosen; None is greedy on the bare logits.
        criteria: transformers' stopping criteria, asked after every emitted token.
        scores: [1, V] processed scores of each emitted token, if they are kept.
        logits: [1, V] logits of each emitted token, if they are kept.
        device: where its text is kept for processors and criteria; its session says.
        drawn: the session's verifier draws whole paths, whatever the processors; likewise.
        slot: the cache slot that it holds in its session.
    """

    prompt: list[int]
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats = field(default_factory=Stats)
    sampling: Sampling | None = None
    criteria: StoppingCriteriaList | None = None
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    device: torch.device | None = None
    drawn: bool = False
    slot: int | None = None
    _text: Tensor | None = None
    _fresh: list[int] = field(default_factory=list)

    @property
    def lazy(self) -> bool:
        """Whether its tokens are chosen, and taken, one by one."""
        return self.sampling is not None and self.sampling.lazy and not self.drawn

    def take(self, tokens: list[int]) -> list[int]:
        """Append what a round emitted, up to its end, and note why it ended. Returns what was kept.

        What was chosen one by one has been taken already.
        """
        if self.lazy:
            kept, self._fresh = self._fresh, []
            return kept
        if self.criteria:
            kept = []
            for token in tokens:
                if self.finish_reason is None:
                    self.push(token)
                    kept.append(token)
            return kept
        kept = tokens[: self.max_new_tokens - len(self.output)]
        end = next((i for i, t in enumerate(kept) if t in self.eos), None)
        if end is not None:
            kept, self.finish_reason = kept[: end + 1], "stop"
        self.output += kept
        if self.finish_reason is None and len(self.output) >= self.max_new_tokens:
            self.finish_reason = "length"
        return kept

    def push(self, token: int) -> None:
        """Append one token and ask, as transformers does, whether the answer ends with it."""
        text = self._text
        if text is not None:
            text[0, len(self.prompt) + len(self.output)] = token
        self.output.append(token)
        ended = token in self.eos
        if self.criteria:
            keep = self.sampling is not None and self.sampling.keep_scores
            ended |= bool(self.criteria(self.text(), tuple(self.scores) if keep else None).any())
        if ended:
            self.finish_reason = "stop"
        elif len(self.output) >= self.max_new_tokens:
            self.finish_reason = "length"

    def next_token(self, logits: Tensor) -> int:
        """Choose the token after the text so far, take it, and return it. logits: [1, V]"""
        assert self.sampling is not None
        raw = logits.to(torch.float32, copy=self.sampling.keep_logits)  # no view that holds on to the whole batch
        scores = self.sampling.pipeline(self.text(), raw)
        if self.sampling.keep_logits:
            self.logits.append(raw)
        if self.sampling.keep_scores:
            self.scores.append(scores)
        token = self.sampling.choose(scores, len(self.prompt) + len(self.output))
        self.push(token)
        self._fresh.append(token)
        return token

    def text(self) -> Tensor:
        """Prompt and answer so far, [1, t] long; what was handed out is never changed by later tokens."""
        if self._text is None:
            self._text = torch.zeros(1, len(self.prompt) + self.max_new_tokens, dtype=torch.long, device=self.device)
            self._text[0, : len(self.prompt) + len(self.output)] = torch.tensor(self.prompt + self.output)
        return self._text[:, : len(self.prompt) + len(self.output)]
