"""What an objective may read of a forward's draft slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Measure = Callable[..., Tensor]  # (draft logits [M, V], verifier logits [M, V], *scales [M], **options) -> [M]


class Readout(Protocol):
    """What costs a pass through the head, or another forward; asked for only by those who need it."""

    def measure(self, fn: Measure, *scales: Tensor, **options) -> Tensor:
        """`fn` of every slot's draft and verifier logits, in chunks that keep no graph over the vocabulary.

        Args:
            fn: from [M, V] and [M, V] to [M]; a module-level function.
            scales: [G, T] further inputs of every slot, [M] when `fn` gets them.
            options: of `fn`.

        Returns:
            [G, T], with the gradient of the draft logits and of the scales.
        """

    def verifier_logp(self) -> Tensor:
        """Log-probability of every label under the verifier; no gradient. [G, T]"""

    def on_policy(self, fn: Measure, **options) -> Tensor:
        """`fn` against the verifier's logits after the draft's own tokens instead of the text's. [G, T]"""

    def corrected(self, name: str, detach: bool) -> Tensor:
        """Log-probability of every label once a head has corrected its slot: "calibrator", or "markov" for the one
        that knows the token before, a sampler head too. [G, T]"""

    def predicted(self, name: str, detach: bool) -> Tensor:
        """Logits of a head that guesses about the draft: "confidence" [G, T], "length" [G, B]."""


@dataclass(frozen=True)
class Slots:
    """What is known of G groups of T slots.

    Attributes:
        steps: [T] long, how many tokens after the anchor a slot predicts: 1 for the first draft, 0 for a hidden bonus.
        valid: [G, T] bool, slots with a label.
        logp: [G, T] log-probability of the label; anything where there is none.
        hits: [G, T] bool, slots whose most probable token is the label; anything where there is none.
        level: [G] share of a group's slots that were masked (BD3LM's t); None where all were.
        progress: share of the training schedule that is done; a tensor where a graph is captured.
        rows: everything that has to be computed first.
    """

    steps: Tensor
    valid: Tensor
    logp: Tensor
    hits: Tensor | None = None
    level: Tensor | None = None
    progress: float | Tensor = 1.0
    rows: Readout | None = None

    @property
    def read(self) -> Readout:
        """`rows`, for an objective that cannot do without.

        Raises:
            ValueError: there are none.
        """
        if self.rows is None:
            raise ValueError("this objective needs the rows' logits: pass `rows`")
        return self.rows

    @property
    def drafts(self) -> Tensor:
        """Slots that a verifier would judge: those with a label but for a hidden bonus. [G, T] bool"""
        return self.valid & (self.steps >= 1)

    @property
    def reached(self) -> Tensor:
        """Drafts that greedy verification gets to: everything before them hits. [G, T] bool"""
        assert self.hits is not None
        return self.drafts & (missed(self.hits, self.drafts) == 0)

    @property
    def taken(self) -> Tensor:
        """Drafts that greedy verification accepts. [G, T] bool"""
        assert self.hits is not None
        return self.reached & self.hits


def missed(hits: Tensor, drafts: Tensor) -> Tensor:
    """How many drafts before a slot miss. [G, T] long"""
    miss = (drafts & ~hits).long()
    return miss.cumsum(1) - miss


def products(logs: Tensor, drafts: Tensor) -> Tensor:
    """Log of the running product along the drafts; slots that are none count 1. [G, T]"""
    return torch.where(drafts, logs, 0).cumsum(1)


def log_probs(logits: Tensor) -> Tensor:
    """log softmax in float32 at least. [..., V] -> [..., V]"""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
