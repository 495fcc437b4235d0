"""Shared prefixes: what a slot's keys and values stand for, so that equal beginnings are computed once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from selfspec.cache import KVCache

WORTH = 32  # tokens; shorter prefixes are computed again as soon as copied


class Prefixes:
    """The tokens behind each slot's committed positions.

    Args:
        cache: whose slots they are.
        reuse: False computes every prefix again.
    """

    def __init__(self, cache: KVCache, reuse: bool):
        self.cache, self.reuse = cache, reuse
        self._held: list[list[int]] = [[] for _ in range(cache.slots)]  # of free slots; running requests know theirs
        self._heads: list[list[int] | None] = [None] * cache.slots  # how all texts begin; None of shorter ones

    def keep(self, slot: int, text: list[int]) -> None:
        """A request has left: its slot holds the text's committed part until somebody needs the place."""
        self._held[slot] = held = text[: self.cache.lengths[slot]]
        self._heads[slot] = _head(held)

    def place(self, free: list[int], text: list[int]) -> int:
        """Choose a slot for a text (all of it that has to be computed): one that holds much of it, or the first.

        What the slot holds of other texts is forgotten.
        """
        slot = max(free, key=lambda s: _common(self._held[s], text)) if self.reuse else free[0]
        length = min(_common(self._held[slot], text), len(text) - 1) if self.reuse else 0
        self.cache.crop(length if length >= WORTH else 0, slot)
        self._held[slot], self._heads[slot] = [], _head(text)
        return slot

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Requests have moved to other slots."""
        for old, new in zip(sources, targets, strict=True):
            self._held[old] = self._held[new] = []
            self._heads[new], self._heads[old] = self._heads[old], None

    def fetch(self, slot: int, text: list[int], requests: list[Any]) -> int:
        """Copy the longest prefix that another slot holds, if it is longer than what stands in this one.

        Args:
            slot: of a text that was not computed further than its crop.
            text: the positions that have to stand there.
            requests: who holds which slot.

        Returns:
            Committed positions of the slot now.
        """
        have, best, donor = self.cache.lengths[slot], 0, slot
        head = _head(text)
        for other, known in enumerate(self._heads if self.reuse and len(text) > have + WORTH else ()):
            if known is not None and known != head:  # of most of them this is all that is read
                continue
            r = requests[other]
            held = self._held[other] if r is None else (r.prompt + r.output)[: self.cache.lengths[other]]
            length = min(_common(held, text), len(text) - 1)
            if other != slot and length > best:
                best, donor = length, other
        if best >= have + WORTH:
            self.cache.copy(donor, slot, best)
        return self.cache.lengths[slot]

    def awaited(self, prompt: list[int], others: Iterable[list[int]]) -> bool:
        """Whether a prompt begins like one of others for long enough to wait for it."""
        head = _head(prompt) if self.reuse else None
        return head is not None and any(other[:WORTH] == head for other in others)


def _head(text: list[int]) -> list[int] | None:
    """What another text has to begin with to share a prefix that is worth it; None where it is no such text yet."""
    return text[:WORTH] if len(text) >= WORTH else None


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
