"""Prompts on their way into the cache, some positions at a time, beside requests that decode."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from selfspec import decode
from selfspec.attention import by_triton
from selfspec.backbone import Backbone
from selfspec.cache import KVCache
from selfspec.choose import Chooser
from selfspec.decode import Frame
from selfspec.draft import DraftTree
from selfspec.graphs import Graphs
from selfspec.prefixes import Prefixes
from selfspec.request import Request
from selfspec.slots import Slots
from selfspec.transfer import onto

CHUNK = 512  # positions of one request in a forward, so that memory does not grow with the square of the prompt
ROWS = 8192  # positions of all requests in a forward
SPARE = 1024  # rows of a forward that may be padding anyway; a second one reads all weights again, and costs as many
HELD = 0.03  # seconds that a free slot waits for others
LIVES, REMEMBERED = 128.0, 64  # rounds of a request before any has ended; how many requests their mean remembers
NARROWEST = 16  # rows per request of a graph; the others are its doubles


class Joining:
    """Requests whose prompts are being prefilled, in order.

    Args:
        backbone: the model.
        cache: where each request has its slot.
        slots: likewise.
        prefixes: what the slots hold.
        graphs: runs the forwards.
    """

    def __init__(self, backbone: Backbone, cache: KVCache, slots: Slots, prefixes: Prefixes, graphs: Graphs):
        self.backbone, self.cache, self.slots, self.prefixes, self.graphs = backbone, cache, slots, prefixes, graphs
        self.requests: list[Request] = []
        # one forward, and one graph, for any slots; elsewhere attention reads a view, and slots have to be neighbours
        self.anywhere = graphs.enabled and by_triton(backbone.backend)

    def chunk(
        self,
        held: list[Request | None],
        frame: Callable[[Sequence[int], int], Frame],
        chooser: Chooser,
    ) -> tuple[list[tuple[Request, int]], list[Request], list[Request], Tensor]:
        """Run the next positions of the first requests.

        Args:
            held: who holds which slot.
            frame: of slots and rows.
            chooser: of the first tokens.

        Returns:
            The requests of the forward and how many positions each ran; those whose prompts are through; of these
            those that are new, and the first token of each [m] long, on its way.
        """
        run, width = self._next(held)
        places, lengths = [slot_of(r) for r in run], self.cache.lengths
        counts = [min(width, goal(r) - lengths[s]) for r, s in zip(run, places, strict=True)]
        which, last, taps = None, None, None
        if width:
            which, last, taps = self._forward(places, counts, width, frame)
        for slot, count in zip(places, counts, strict=True):
            lengths[slot] += count
        through = [i for i, r in enumerate(run) if lengths[places[i]] == goal(r)]
        fresh = [i for i in through if not run[i].output]
        if taps is not None and self.slots.features is not None and through:
            assert which is not None
            some = onto(through, self.backbone.device)
            self.slots.features[which[some]] = taps[some]
        new, ready = [run[i] for i in fresh], [run[i] for i in through]
        tokens = torch.empty(0, dtype=torch.long, device=self.backbone.device)
        if new:
            assert last is not None and which is not None
            if len(new) < len(run):
                some = onto(fresh, self.backbone.device)
                last, which = last[some], which[some]
            tokens = self._choose(new, last, which, chooser)
        done = set(ready)  # requests are told apart by identity
        self.requests = [r for r in self.requests if r not in done]
        return list(zip(run, counts)), ready, new, tokens

    def _forward(
        self, places: list[int], counts: list[int], width: int, frame: Callable[[Sequence[int], int], Frame]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Prefill some positions of the requests in these slots. Returns the slots, and `decode.prefill`'s."""
        n, most = len(places), self.cache.slots
        if self.graphs.enabled:
            width = min(max(NARROWEST, 1 << (width - 1).bit_length()), self.cache.tail)
        where = frame(places, width)
        if self.anywhere:  # to a power of two, with slots of others: rows behind their texts, which nobody reads
            spare = (s for s in range(most) if s not in places)
            places = places + list(itertools.islice(spare, min(1 << (n - 1).bit_length(), most) - n))
        sent = onto([places, counts + [0] * (len(places) - n)], self.backbone.device)
        which, count = sent[0], sent[1]
        where = replace(where, first=0, n=len(places)) if self.anywhere else where
        prefill = partial(decode.prefill, self.backbone, self.cache, self.slots, where, width=width)
        inputs = (count, which) if self.anywhere else (count,)
        last, taps = self.graphs(("prefill", where, width), prefill, *inputs)
        self.slots.start[which] += count
        return which[:n], last[:n], taps

    def _choose(self, requests: list[Request], hidden: Tensor, which: Tensor, chooser: Chooser) -> Tensor:
        """What follows each prompt. hidden: [m, d] of its last position; which: [m] long, its slot. Returns [m] long"""
        start = self.slots.start[which] - 1
        ends = DraftTree(self.slots.text[which, start][:, None])
        logits = self.backbone.logits(hidden[:, None])
        tokens = chooser.accept(requests, ends, logits, start, self.slots.of(which)).tokens[:, 0]
        self.slots.text[which, start + 1] = tokens
        return tokens

    def _next(self, held: list[Request | None]) -> tuple[list[Request], int]:
        """Requests whose prompts go through one forward, and its rows per request."""
        run: list[Request] = []
        width = real = 0
        for r in self.requests:
            neighbour = self.anywhere or not run or slot_of(r) == slot_of(run[0]) + len(run)
            if not neighbour or self.prefixes.awaited(r.prompt, (other.prompt for other in run)):
                break  # one of these is about to compute a prefix that the request can then copy
            before = self.cache.lengths[slot_of(r)]
            have = self.prefixes.fetch(slot_of(r), (r.prompt + r.output)[: goal(r)], held)
            if have != before:
                self.slots.start[r.slot] = have
            own = min(CHUNK, goal(r) - have)
            wider, real = max(width, own), real + own
            rows = wider * (len(run) + 1)
            if run and (rows > ROWS or rows - real > max(SPARE, real)):
                break
            run.append(r)
            width = wider
        if self.graphs.enabled and not (self.anywhere and width << (len(run) - 1).bit_length() <= ROWS):
            run = run[: 1 << (len(run).bit_length() - 1)]  # few sizes, so that graphs are seen again
        return run, width


class Door:
    """Says when those that wait go in: several at a time, since a prefill of one prompt takes about as long as a round.

    Of N slots, waiting for k free ones leaves (k - 1) / 2 idle in the mean, and those that live for T rounds then cost
    N / (k T) prefills a round: the sum k / (2 N) + N / (k T) is least at k = N sqrt(2 / T), a sixteenth of the slots
    for texts of 512 rounds, a quarter for those of 32. Nobody waits for longer than `HELD` with a slot free, nor where
    all that wait would find one.

    Attributes:
        lived: rounds of a request, T, about that of the latest.
        since: when the first slot came free for somebody who waits.
        held: requests that wait though a slot is free.
    """

    def __init__(self) -> None:
        self.lived = LIVES
        self.since: float | None = None
        self.held = 0

    def left(self, rounds: int) -> None:
        """A request has ended."""
        self.lived += (max(rounds, 1) - self.lived) / REMEMBERED

    def admit(self, slots: int, free: int, waiting: int, now: float | None = None) -> int:
        """How many of those that wait should go in now.

        Args:
            slots: N.
            free: slots without a request.
            waiting: requests without a slot that could take one.
            now: seconds of a clock other than the host's, as in a simulation.
        """
        n, self.held = min(free, waiting), 0
        if n <= 0:
            self.since = None
            return 0
        enough = min(max(slots * math.sqrt(2 / self.lived), slots / 16), slots / 4)
        now = time.monotonic() if now is None else now
        self.since = now if self.since is None else self.since
        if n < int(enough) and n < waiting and free < slots and now - self.since < HELD:
            self.held = n
            return 0
        self.since = None
        return n


def slot_of(request: Request) -> int:
    """The slot of one that holds any."""
    assert request.slot is not None
    return request.slot


def goal(request: Request) -> int:
    """Positions to prefill: the prompt, or all but the last token of a text that goes on."""
    return len(request.prompt) + max(0, len(request.output) - 1)
