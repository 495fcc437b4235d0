"""One prompt on its way to an answer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList

from selfspec.draft.lookup import Copied
from selfspec.past import PastText
from selfspec.recipe import Recipe, cuts_of, recipe_of
from selfspec.sampling import Sampling
from selfspec.stats import Stats

NOTHING = -2  # in place of a token that could not be chosen; no token, and no padding of a tree either


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer.

    Attributes:
        prompt: token ids, not empty.
        max_new_tokens: cap on emitted tokens, at least 1.
        eos: token ids that end the answer (kept in it, as transformers does).
        output: emitted tokens so far.
        finish_reason: "stop", "length", "cancelled" or "error" once it has ended.
        failure: what its own processors or criteria raised; it ends with that, and its neighbours go on.
        stats: rounds and acceptance.
        sampling: how tokens are chosen; None is greedy on the bare logits.
        criteria: transformers' stopping criteria, asked after every emitted token.
        scores: [1, V] processed scores of each emitted token, if they are kept.
        logits: [1, V] logits of each emitted token, if they are kept.
        device: where its text is kept for processors and criteria; its session says.
        drawn: the session's verifier draws whole paths, whatever the processors; likewise.
        plain: its tokens are taken as they come: neither lazy, nor with criteria, nor with scores to keep; likewise.
        kind: `choose.graph_key` of it alone; likewise.
        slot: the cache slot that it holds in its session.
        past: keys and values of a text that it continues; once it has ended, its own if `keep_past` says so.
        keep_past: keep them.
        copied: says what rounds of lookup would accept of its text, where a planner listens; its session makes it.
    """

    prompt: list[int]
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    failure: Exception | None = None
    stats: Stats = field(default_factory=Stats)
    sampling: Sampling | None = None
    criteria: StoppingCriteriaList | None = None
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    device: torch.device | None = None
    drawn: bool = False
    plain: bool = False
    kind: Hashable | None = None
    slot: int | None = None
    past: PastText | None = None
    keep_past: bool = False
    copied: Copied | None = None
    _text: Tensor | None = None
    _written: int = 0  # tokens of prompt and output that stand in it
    _fresh: list[int] = field(default_factory=list)
    _seen: tuple[Tensor, Tensor] | None = None  # scores and logits along the round's path, [A, V] each

    @cached_property
    def recipe(self) -> Recipe | None:
        """Its processors over all nodes at once; None where they have no such form. Empty without processors."""
        processors = [] if self.sampling is None else self.sampling.pipeline.processors
        return recipe_of(processors, self.prompt, self.max_new_tokens)

    @cached_property
    def cuts(self) -> Recipe:
        """Those of its processors that its drafts pass through too."""
        if self.recipe is not None:
            return self.recipe.cuts  # which lives as long as a graph that was captured with the recipe
        processors = [] if self.sampling is None else self.sampling.pipeline.processors
        return cuts_of(processors, self.prompt, self.max_new_tokens)

    @property
    def lazy(self) -> bool:
        """Whether its tokens are chosen, and taken, one by one."""
        return self.recipe is None and not self.drawn

    @property
    def handed(self) -> list[int]:
        """Its output but for what was chosen one by one and is not handed out yet (`take`)."""
        return self.output[: len(self.output) - len(self._fresh)]

    @property
    def keeps(self) -> bool:
        """Whether scores or logits of its tokens are kept."""
        return self.sampling is not None and (self.sampling.keep_scores or self.sampling.keep_logits)

    def see(self, scores: Tensor, logits: Tensor) -> None:
        """Note what the tokens of a round come from, before they are taken. [A, V] each, of at least those emitted"""
        self._seen = scores, logits

    def take(self, tokens: list[int]) -> list[int]:
        """Append what a round emitted, up to its end, and note why it ended. Returns what was kept.

        What was chosen one by one has been taken already.
        """
        if self.plain:
            output = self.output
            if len(output) + len(tokens) < self.max_new_tokens and self.eos.isdisjoint(tokens):
                output += tokens  # of hundreds of requests hardly any gets further
                return tokens
            return self._take_last(tokens)
        if self.lazy:
            kept, self._fresh = self._fresh, []
            return kept
        if not (self.criteria or self.keeps):
            return self._take_last(tokens)
        kept = []
        for i, token in enumerate(tokens):
            if self.finish_reason is None:
                self._keep(i)
                self.push(token)
                kept.append(token)
        self._seen = None
        return kept

    def _take_last(self, tokens: list[int]) -> list[int]:
        """Append what may be an answer's last tokens."""
        kept = tokens[: self.max_new_tokens - len(self.output)]
        if not self.eos.isdisjoint(kept):
            end = next(i for i, t in enumerate(kept) if t in self.eos)
            kept, self.finish_reason = kept[: end + 1], "stop"
        self.output += kept
        if self.finish_reason is None and len(self.output) >= self.max_new_tokens:
            self.finish_reason = "length"
        return kept

    def _keep(self, i: int) -> None:
        """Scores and logits of the round's i-th token, if they are kept: copies, which hold on to nothing else."""
        if self._seen is not None and self.sampling is not None:
            scores, logits = self._seen
            if self.sampling.keep_scores:
                self.scores.append(scores[i : i + 1].clone())
            if self.sampling.keep_logits:
                self.logits.append(logits[i : i + 1].to(torch.float32, copy=True))

    def push(self, token: int) -> None:
        """Append one token and ask, as transformers does, whether the answer ends with it."""
        self.output.append(token)
        ended = token in self.eos
        if self.criteria:
            keep = self.sampling is not None and self.sampling.keep_scores
            try:
                ended |= bool(self.criteria(self.text(), tuple(self.scores) if keep else None).any())
            except Exception as error:
                self._fail(error)
                return
        if ended:
            self.finish_reason = "stop"
        elif len(self.output) >= self.max_new_tokens:
            self.finish_reason = "length"

    def next_token(self, logits: Tensor) -> int:
        """Choose the token after the text so far, take it, and return it; `NOTHING` if that fails. logits: [1, V]"""
        assert self.sampling is not None
        try:
            scores = self.sampling.pipeline(self.text(), logits)
            token = self.sampling.choose(scores, len(self.prompt) + len(self.output))
        except Exception as error:
            self._fail(error)
            return NOTHING
        self.see(scores, logits)
        self._keep(0)
        self._seen = None
        self.push(token)
        self._fresh.append(token)
        return token

    def _fail(self, error: Exception) -> None:
        """End with what code of the caller's raised. Lack of memory is everybody's, and goes on upwards."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self.failure, self.finish_reason = error, "error"

    def text(self) -> Tensor:
        """Prompt and answer so far, [1, t] long; what was handed out is never changed by later tokens."""
        n = len(self.prompt) + len(self.output)
        if self._text is None:
            size = len(self.prompt) + self.max_new_tokens
            self._text = torch.zeros(1, size, dtype=torch.long, device=self.device)
        if self._written < n:
            new = self.output[-(n - self._written) :] if self._written else self.prompt + self.output
            self._text[0, self._written : n] = torch.tensor(new)
            self._written = n
        return self._text[:, :n]
