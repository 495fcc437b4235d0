"""Who holds which slot of a session, and who decodes: kept up to date as requests come and go, not gathered anew."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np

from selfspec.draft.lookup import Copied
from selfspec.plan.views import Views
from selfspec.request import Request


@dataclass(frozen=True)
class Rows:
    """Who stands where in the next round; it changes only as requests join and leave.

    Attributes:
        requests: of its rows; None idles along.
        running: those that do not.
        key: what a captured round of them is valid for; None where the host has to look, or they differ.
    """

    requests: list[Request | None]
    running: list[Request]
    key: Hashable | None

    def given(self, idle: Request) -> list[Request]:
        """What a round is told of its rows: where nobody runs, one that is chosen for like others and kept by nobody.

        idle: for rounds that the host looks at."""
        return self._given if self.key is not None else [r or idle for r in self.requests]

    @cached_property
    def _given(self) -> list[Request]:
        return [r or self.running[0] for r in self.requests]

    @cached_property
    def ends(self) -> np.ndarray:
        """Committed positions after which each that runs has ended. [n] long"""
        return np.array([len(r.prompt) + r.max_new_tokens - 1 for r in self.running], np.int64)

    def views(self, lengths: list[int], reach: int, saved: bool) -> Views:
        """Of those that run. lengths: committed by slot; reach: what rounds on their way may add; saved: all drafts."""
        n = len(self.running)
        contexts = lengths[:n] if n == len(self.requests) else list(compress(lengths, self.requests))
        return Views(self.running, contexts, self.ends, reach, [True] * n if saved else [])


class Seats:
    """The slots of a session.

    Args:
        n: slots.

    Attributes:
        requests: by slot.
        decoding: likewise, those whose prompts are through.
        free: slots of nobody, in order.
        new: those that decode and have not been in a round.
    """

    def __init__(self, n: int):
        self.requests: list[Request | None] = [None] * n
        self.decoding: list[Request | None] = [None] * n
        self.free = list(range(n))
        self.new: list[Request] = []
        self._kinds: Counter[Hashable] = Counter()  # of those that decode
        self._rows: Rows | None = None  # while nobody joins or leaves

    def fresh(self) -> list[Request]:
        """Those that decode and have not been in a round, whose first one now starts."""
        new, self.new = self.new, []
        return new

    @property
    def taken(self) -> int:
        """Slots of somebody."""
        return len(self.requests) - len(self.free)

    def take(self, request: Request, slot: int) -> None:
        """Give a request a free slot."""
        self.free.remove(slot)
        self.requests[slot], request.slot, self._rows = request, slot, None

    def start(self, request: Request, copies: bool = False) -> None:
        """Its prompt is through. copies: say what lookup would do along its text."""
        assert request.slot is not None
        request.copied = Copied(request.prompt + request.handed) if copies else None
        self.decoding[request.slot], self._rows = request, None
        self._kinds[request.kind] += 1
        self.new.append(request)

    def leave(self, request: Request) -> int:
        """Free a request's slot. Returns it."""
        slot, request.slot, request.copied, self._rows = request.slot, None, None, None
        assert slot is not None
        if self.decoding[slot] is not None:
            self._kinds[request.kind] -= 1
            if not self._kinds[request.kind]:
                del self._kinds[request.kind]
        if request in self.new:
            self.new.remove(request)
        self.requests[slot] = self.decoding[slot] = None
        insort(self.free, slot)
        return slot

    def gaps(self, n: int) -> tuple[list[int], list[int]]:
        """Slots of requests that do not stand in the first n, and free ones among these for them."""
        behind = self.taken - n + bisect_left(self.free, n)
        if not behind:
            return [], []
        return [i for i in range(n, len(self.requests)) if self.requests[i] is not None], self.free[:behind]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Take requests to other slots."""
        for old, new in zip(sources, targets, strict=True):
            for place in (self.requests, self.decoding):
                place[new], place[old] = place[old], None
            self.requests[new].slot = new  # type: ignore[union-attr]
            self.free.remove(new)
            insort(self.free, old)
        self._rows = None

    def rows(self, n: int) -> Rows:
        """The next round's rows, which are the first n."""
        if self._rows is None:
            kinds, requests = self._kinds, self.decoding[:n]
            key = next(iter(kinds)) if len(kinds) == 1 else None
            self._rows = Rows(requests, [r for r in requests if r is not None], key)
        return self._rows
