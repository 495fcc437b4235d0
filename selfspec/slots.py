"""What rounds read and write of every request: tensors that stay where they are, so that a CUDA graph can replay."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.draft.lookup import LONGEST
from selfspec.forecast import Forecast
from selfspec.nodes import Text
from selfspec.transfer import onto


class Slots:
    """One row for each cache slot.

    Args:
        n: slots.
        capacity: positions of a request.
        device: of the model.
        features: F, width of what the mask path wants to know of the last committed position; 0 for nothing.
        dtype: of features and saved drafts.

    Attributes:
        text: [n, W] long, prompt and answer, the token of position p at p; the last column takes what nobody wants.
        start: [n] long, committed positions, and so the position of the anchor: the last token known.
        left: [n] long, tokens that may still be emitted; 0 in a slot that no round may advance.
        prompt: [n] long, tokens of each prompt.
        seed: [n] long, of sampling.
        features: [n, F] of position start - 1, or None.
        saved: [n, T, V] logits of the positions after the anchor, where overlapped rounds leave them.
        told: what the mask path's heads say of those drafts, for the heads that it has.
        states: [n, T, d] their hidden states, where a head conditions drafts or a loop goes on from them.
        ready: [n] bool, whether the last one left any.
    """

    def __init__(
        self, n: int, capacity: int, device: torch.device, features: int = 0, dtype: torch.dtype = torch.float32
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(n, *shape, dtype=dtype, device=device)

        self.text = zeros(capacity + LONGEST + 1)
        self._numbers = torch.zeros(4, n, dtype=torch.long, device=device)
        self.start, self.left, self.prompt, self.seed = self._numbers
        self._new: dict[int, tuple[list[int], int, int, int]] = {}  # to be written: text, start, prompt, seed by slot
        self._idle: list[int] = []  # slots to be stopped
        self.features = zeros(features, dtype=dtype) if features else None
        self.saved: Tensor | None = None
        self.told = Forecast()
        self.states: Tensor | None = None
        self.ready = zeros(dtype=torch.bool)
        self._dtype = dtype

    def save_drafts(self, positions: int, vocab_size: int, width: int = 0) -> None:
        """Make room for drafts of so many positions, once: captured rounds know the place. width: d of states, or 0."""
        where, shape = self.start.device, (len(self.start), positions)
        if self.states is None and width:
            self.states = torch.zeros(*shape, width, dtype=self._dtype, device=where)
        if self.saved is None:
            self.saved = torch.zeros(*shape, vocab_size, dtype=self._dtype, device=where)
            wide = torch.zeros(len(self.start), 2 * positions + 1, device=where)
            self.told = Forecast(wide[:, :positions], wide[:, positions:])

    def anchor(self, n: int) -> Tensor:
        """Last known token of the first n requests. [n] long"""
        return self.text[:n].gather(1, self.start[:n, None])[:, 0]

    def view(self, n: int) -> Text:
        """What choosing a token needs to know of the first n requests."""
        return Text(self.text[:n], self.prompt[:n], self.seed[:n])

    def of(self, which: Tensor) -> Text:
        """Likewise of some requests. which: [m] long"""
        return Text(self.text[which], self.prompt[which], self.seed[which])

    def put(self, slot: int, text: list[int], start: int, prompt: int, seed: int) -> None:
        """Take in a request that no round advances yet; `write` tells the device.

        Args:
            slot: its row.
            text: prompt, and what was emitted already.
            start: positions that are committed.
            prompt: tokens of the prompt.
            seed: of sampling.
        """
        self._new[slot] = text, start, prompt, seed

    def stop(self, slot: int) -> None:
        """No round may advance this one any more; `write` tells the device."""
        self._idle.append(slot)

    def write(self) -> None:
        """Write what changed since the last time, in few copies: before each forward, and before rows move."""
        if self._idle:
            self.left.index_fill_(0, onto(self._idle, self.left.device), 0)
            self._idle.clear()
        if self._new:
            width = max(len(text) for text, *_ in self._new.values())
            rows = [[slot, start, 0, prompt, seed] for slot, (_, start, prompt, seed) in self._new.items()]
            texts = [text + [0] * (width - len(text)) for text, *_ in self._new.values()]
            numbers, text = onto(rows, self.text.device).T, onto(texts, self.text.device)
            self._numbers[:, numbers[0]] = numbers[1:]
            self.text[numbers[0], :width] = text
            self._new.clear()

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows to other places, over what stood there; no slot may be in both lists. The old ones stop."""
        self.write()
        old, new = onto([sources, targets], self.text.device)
        self._numbers[:, new] = self._numbers[:, old]
        self.left.index_fill_(0, old, 0)
        for t in (self.text, self.features, self.saved, self.states, *self.told, self.ready):
            if t is not None:
                t[new] = t[old]
