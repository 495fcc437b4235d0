"""Prompts on their way into the cache, some positions at a time, beside requests that decode."""

from __future__ import annotations

from collections.abc import Callable
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

CHUNK = 512  # positions of one request in a forward, so that memory does not grow with the square of the prompt
ROWS = 8192  # positions of all requests in a forward
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

    def chunk(
        self,
        held: list[Request | None],
        frame: Callable[[int, int, int], Frame],
        chooser: Chooser,
    ) -> tuple[list[tuple[Request, int]], list[Request], list[Request], Tensor]:
        """Run the next positions of the first requests.

        Args:
            held: who holds which slot.
            frame: of a first slot, a number of requests and rows.
            chooser: of the first tokens.

        Returns:
            The requests of the forward and how many positions each ran; those whose prompts are through; of these
            those that are new, and the first token of each [m] long, on its way.
        """
        run, width = self._next(held)
        first, lengths = run[0].slot, self.cache.lengths
        assert first is not None
        counts = [min(width, goal(r) - lengths[first + i]) for i, r in enumerate(run)]
        last, taps = None, None
        if width:
            if self.graphs.enabled:
                width = min(max(NARROWEST, 1 << (width - 1).bit_length()), self.cache.tail)
            place = frame(first, len(run), width)
            inputs = [torch.tensor(counts, device=self.backbone.device)]
            if self.graphs.enabled and by_triton(self.backbone.backend):  # one graph for all slots
                inputs.append(torch.tensor([first], device=self.backbone.device))
            where = replace(place, first=0) if len(inputs) > 1 else place
            prefill = partial(decode.prefill, self.backbone, self.cache, self.slots, where, width=width)
            last, taps = self.graphs(("prefill", where, width), prefill, *inputs)
            self.slots.start[place.span] += inputs[0]
        self.cache.commit(counts, first)
        through = [i for i, r in enumerate(run) if lengths[first + i] == goal(r)]
        fresh = [i for i in through if not run[i].output]
        if taps is not None and self.slots.features is not None:
            for i in through:
                self.slots.features[first + i] = taps[i]
        new, ready = [run[i] for i in fresh], [run[i] for i in through]
        tokens = torch.empty(0, dtype=torch.long, device=self.backbone.device)
        if new:
            assert last is not None
            tokens = self._choose(new, last if len(new) == len(run) else last[fresh], chooser)
        self.requests = [r for r in self.requests if not any(r is x for x in ready)]
        return list(zip(run, counts)), ready, new, tokens

    def _choose(self, requests: list[Request], hidden: Tensor, chooser: Chooser) -> Tensor:
        """What follows each prompt. hidden: [m, d] of its last position. Returns [m] long"""
        device = self.backbone.device
        ends = DraftTree(torch.tensor([[r.prompt[-1]] for r in requests], device=device))
        start = torch.tensor([len(r.prompt) - 1 for r in requests], device=device)
        tokens = chooser.accept(requests, ends, self.backbone.logits(hidden[:, None]), start).tokens[:, 0]
        self.slots.text[torch.tensor([r.slot for r in requests], device=device), start + 1] = tokens
        return tokens

    def _next(self, held: list[Request | None]) -> tuple[list[Request], int]:
        """Requests in neighbouring slots whose prompts go through one forward, and its rows per request."""
        run: list[Request] = []
        width = 0
        for r in self.requests:
            assert r.slot is not None
            neighbour = not run or r.slot == run[0].slot + len(run)  # type: ignore[operator]
            if not neighbour or any(self.prefixes.worth(r.prompt, other.prompt) for other in run):
                break  # one of these is about to compute a prefix that the request can then copy
            self.slots.start[r.slot] = self.prefixes.fetch(r.slot, (r.prompt + r.output)[: goal(r)], held)
            wider = max(width, min(CHUNK, goal(r) - self.cache.lengths[r.slot]))
            if run and wider * (len(run) + 1) > ROWS:
                break
            run.append(r)
            width = wider
        if self.graphs.enabled:  # few sizes, so that graphs are seen again
            run = run[: 1 << (len(run).bit_length() - 1)]
        return run, width


def goal(request: Request) -> int:
    """Positions to prefill: the prompt, or all but the last token of a text that goes on."""
    return len(request.prompt) + max(0, len(request.output) - 1)
