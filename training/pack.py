"""Packing: whole documents side by side in rows of one length."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selfspec.sampling import hashed, uniform
from selfspec.training.data import Answer


@dataclass(frozen=True)
class Pack:
    """N rows of S tokens, each holding whole documents one after another.

    Attributes:
        tokens: [N, S] long, 0 where nothing stands.
        positions: [N, S] long, position in the document.
        segments: [N, S] long, document of the row; -1 where nothing stands.
        answer: [N, S] bool, tokens that the model answered.
        keys: [N, S] long, what the randomness of a slot's document is drawn from: (seed, document, epoch), hashed.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    answer: Tensor
    keys: Tensor | None = None

    def to(self, device: torch.device) -> Pack:
        """The same on another device, without waiting for the copy; the keys stay, randomness is the host's."""
        return self.each(lambda x: send(x, device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Pack:
        """The same with every tensor that a forward reads changed."""
        parts = (self.tokens, self.positions, self.segments, self.answer)
        tokens, positions, segments, answer = (change(x) for x in parts)
        return Pack(tokens, positions, segments, answer, self.keys)

    def random(self, what: int) -> Tensor:
        """A number in (0, 1) for every slot: a function of seed, document, epoch and position, whatever stands beside.

        Args:
            what: tells the draws of one slot apart.

        Returns:
            [N, S] double
        """
        if self.keys is None:
            raise ValueError("this pack has no keys: only packs of a Packer draw random numbers")
        return uniform(self.keys, self.positions, what)


def send(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; the host doesn't wait for what the device still has to do."""
    if x.device.type != "cpu" or device.type != "cuda":
        return x.to(device)
    return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)


class Packer:
    """Puts answers into rows of `length` tokens; which ones stand together changes with every epoch.

    Rows form one endless stream, epoch after epoch: a step takes the next ones, however many, so that the batch may
    change, and processes may share it, without a document being left out or seen twice in an epoch.

    Args:
        answers: documents; those that have no anchor (an answer of less than two tokens within `length`) are left out.
        length: S, tokens of a row.
        rows: N, rows of a batch.
        seed: of the order and of the keys.
        context: positions that the model has; longer documents lose their end. None: as many as a row.

    Attributes:
        empty: documents left out since their answers hold less than two tokens.
        over: documents left out since their prompts leave no room for two tokens.
        cut: documents that lost their end.
    """

    def __init__(self, answers: list[Answer], length: int, rows: int, seed: int = 0, context: int | None = None):
        self.length, self.rows, self.seed = length, rows, seed
        room = min(length, context or length)
        answered = [a for a in answers if len(a.answer) >= 2]
        kept = [a for a in answered if len(a.prompt) + 2 <= room]
        self.empty, self.over = len(answers) - len(answered), len(answered) - len(kept)
        self.cut = sum(len(a) > room for a in kept)
        if not kept:
            raise ValueError(
                f"none of {len(answers)} answers has two tokens within {room} tokens of its prompt "
                f"({self.empty} are too short, {self.over} prompts too long)"
            )
        self._docs = [np.asarray((a.prompt + a.answer)[:room], dtype=np.int32) for a in kept]
        self._prompts = np.array([len(a.prompt) for a in kept])
        self._lengths = np.array([len(d) for d in self._docs])
        self._lock = threading.Lock()  # the present epoch is looked up from threads
        self._starts = [0]  # first row of every epoch that was laid out so far
        self._epoch, self._bins = 0, self._lay_out(0)

    def __len__(self) -> int:
        return len(self._docs)

    def epoch(self, row: int) -> int:
        """Epoch of a row of the stream. Laying an epoch out takes time; the last one is kept."""
        while row >= self._starts[self._epoch] + len(self._bins):
            if len(self._starts) == self._epoch + 1:
                self._starts.append(self._starts[-1] + len(self._bins))
            self._epoch += 1
            self._bins = self._lay_out(self._epoch)
        while row < self._starts[self._epoch]:
            self._epoch -= 1
            self._bins = self._lay_out(self._epoch)
        return self._epoch

    def take(self, first: int, n: int, rows: int | None = None) -> Pack:
        """Rows [first, first + n) of the stream; empty ones behind them where `rows` are more."""
        epochs, plan = [], []
        with self._lock:
            for row in range(first, first + n):
                epochs.append(self.epoch(row))
                plan.append(self._bins[row - self._starts[self._epoch]])
        return self.pack(plan, rows, epochs)

    def batch(self, index: int) -> Pack:
        """`rows` rows of the stream; the same for the same index, in whatever order batches are asked for."""
        return self.take(index * self.rows, self.rows)

    def pack(self, plan: list[list[int]], rows: int | None = None, epochs: list[int] | None = None) -> Pack:
        """Rows from lists of documents.

        Args:
            plan: documents of each row.
            rows: N, not less than the plan's; the packer's own by default.
            epochs: of each row, for its keys; 0 by default.
        """
        shape = (max(rows or self.rows, len(plan)), self.length)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        segments, answer = np.full(shape, -1, np.int64), np.zeros(shape, bool)
        document, epoch = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for i, docs in enumerate(plan):
            at = 0
            epoch[i] = epochs[i] if epochs else 0
            for segment, doc in enumerate(docs):
                n = int(self._lengths[doc])
                tokens[i, at : at + n] = self._docs[doc]
                positions[i, at : at + n] = np.arange(n)
                segments[i, at : at + n] = segment
                document[i, at : at + n] = doc
                answer[i, at + int(self._prompts[doc]) : at + n] = True
                at += n
        keys = hashed(self.seed, torch.from_numpy(document), torch.from_numpy(epoch))
        host = torch.from_numpy
        return Pack(host(tokens), host(positions), host(segments), host(answer), keys)

    def in_order(self) -> list[list[list[int]]]:
        """All documents once, next to one another as they came, as plans for `pack` (evaluation)."""
        bins = _fit(np.arange(len(self._docs)), self._lengths, self.length)
        return [bins[i : i + self.rows] for i in range(0, len(bins), self.rows)]

    def _lay_out(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng((self.seed, epoch))
        bins = _fit(random.permutation(len(self._docs)), self._lengths, self.length)
        return [bins[i] for i in random.permutation(len(bins))]


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
