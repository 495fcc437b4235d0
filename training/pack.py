"""Packing: whole documents side by side in rows of one length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selfspec.training.data import Answer


@dataclass(frozen=True)
class Pack:
    """N rows of S tokens, each holding whole documents one after another.

    Attributes:
        tokens: [N, S] long, 0 where nothing stands.
        positions: [N, S] long, position in the document.
        segments: [N, S] long, document of the row; -1 where nothing stands.
        answer: [N, S] bool, tokens that the model answered.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    answer: Tensor

    def to(self, device: torch.device) -> Pack:
        """The same on another device, without waiting for the copy."""
        return Pack(*(send(x, device) for x in (self.tokens, self.positions, self.segments, self.answer)))


def send(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; the host doesn't wait for what the device still has to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class Packer:
    """Puts answers into rows of `length` tokens; which ones stand together changes with every epoch.

    Args:
        answers: documents; those that have no anchor (an answer of less than two tokens within `length`) are left out.
        length: S, tokens of a row; longer documents lose their end.
        rows: N, rows of a batch.
        seed: of the order.

    Attributes:
        skipped: documents left out.
        cut: documents that lost their end.
    """

    def __init__(self, answers: list[Answer], length: int, rows: int, seed: int = 0):
        self.length, self.rows, self.seed = length, rows, seed
        kept = [a for a in answers if len(a.answer) >= 2 and len(a.prompt) + 2 <= length]
        self.skipped, self.cut = len(answers) - len(kept), sum(len(a) > length for a in kept)
        if not kept:
            raise ValueError(f"none of {len(answers)} answers has two tokens within {length} tokens of its prompt")
        self._docs = [np.asarray((a.prompt + a.answer)[:length], dtype=np.int32) for a in kept]
        self._prompts = np.array([len(a.prompt) for a in kept])
        self._lengths = np.array([len(d) for d in self._docs])
        self._starts = [0]  # first batch of every epoch that was laid out so far
        self._epoch, self._plan = 0, self._lay_out(0)

    def __len__(self) -> int:
        return len(self._docs)

    def batch(self, index: int) -> Pack:
        """The batch of a step; the same for the same index, in whatever order batches are asked for."""
        while index >= self._starts[self._epoch] + len(self._plan):
            if len(self._starts) == self._epoch + 1:
                self._starts.append(self._starts[-1] + len(self._plan))
            self._epoch += 1
            self._plan = self._lay_out(self._epoch)
        while index < self._starts[self._epoch]:
            self._epoch -= 1
            self._plan = self._lay_out(self._epoch)
        return self.pack(self._plan[index - self._starts[self._epoch]])

    def pack(self, plan: list[list[int]]) -> Pack:
        """Rows from lists of documents."""
        shape = (self.rows, self.length)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        segments, answer = np.full(shape, -1, np.int64), np.zeros(shape, bool)
        for i, docs in enumerate(plan):
            at = 0
            for segment, doc in enumerate(docs):
                n = int(self._lengths[doc])
                tokens[i, at : at + n] = self._docs[doc]
                positions[i, at : at + n] = np.arange(n)
                segments[i, at : at + n] = segment
                answer[i, at + int(self._prompts[doc]) : at + n] = True
                at += n
        return Pack(*(torch.from_numpy(x) for x in (tokens, positions, segments, answer)))

    def in_order(self) -> list[list[list[int]]]:
        """All documents once, next to one another as they came, as plans for `pack` (evaluation)."""
        return self._batches(_fit(np.arange(len(self._docs)), self._lengths, self.length))

    def _lay_out(self, epoch: int) -> list[list[list[int]]]:
        random = np.random.default_rng((self.seed, epoch))
        bins = _fit(random.permutation(len(self._docs)), self._lengths, self.length)
        return self._batches([bins[i] for i in random.permutation(len(bins))], drop=True)

    def _batches(self, bins: list[list[int]], drop: bool = False) -> list[list[list[int]]]:
        end = len(bins) // self.rows * self.rows if drop and len(bins) >= self.rows else len(bins)
        return [bins[i : i + self.rows] for i in range(0, end, self.rows)]


def _fit(order: np.ndarray, lengths: np.ndarray, capacity: int, open_bins: int = 32) -> list[list[int]]:
    """First fit over a window of open rows: every document goes where it first fits, full rows are closed."""
    done: list[list[int]] = []
    bins: list[tuple[int, list[int]]] = []
    for doc in order.tolist():
        n = int(lengths[doc])
        at = next((i for i, (free, _) in enumerate(bins) if free >= n), None)
        if at is None:
            if len(bins) == open_bins:
                done.append(bins.pop(min(range(len(bins)), key=lambda i: bins[i][0]))[1])
            bins.append((capacity - n, [doc]))
        else:
            bins[at] = (bins[at][0] - n, [*bins[at][1], doc])
    return done + [docs for _, docs in bins]
