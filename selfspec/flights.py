"""Rounds and prefills that the device works on and whose outcome the host has not read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from selfspec.clock import Clock
from selfspec.plan.views import Assignment
from selfspec.request import Request


@dataclass(eq=False, slots=True)
class Flight:
    """A round or a prefill that was started, and whose outcome the host has not read."""

    requests: list[Request | None]
    result: Tensor  # [n, 2 + A] long: count, tokens, whether a draft was saved; on its way to the host
    arrived: Any  # an event, or None when it is there
    clock: Clock
    reach: int  # tokens that a request can have emitted in it
    ran: list[Request]  # who shares its time
    assignment: Assignment | None = None  # of a round
    warm: bool = False  # nothing was compiled or captured for it
    drafts: float = 0.0  # forwards that drafted for each request
    resumed: bool = False  # drafts that the round before had saved were verified
    made: bool = True  # whoever had no draft was made one
    new: list[Request] = field(default_factory=list)  # those whose first round it is


@dataclass
class Landed:
    """What came of a flight for the requests that are still there.

    Attributes:
        rows: of its result.
        kept: what each emitted.
        ended: those that have to leave; one whose tokens are chosen one by one may have ended long before.
        short: by row, of those that have left, now or before: how many tokens they were given.
        drafted: ids of those that a round left a draft.
        copied: by id, what each round of lookup that ends in its tokens would have accepted (`Copied`), of those that
            somebody asks it of.
    """

    rows: list[list[int]]
    kept: list[tuple[Request, list[int]]] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    short: dict[int, int] = field(default_factory=dict)
    drafted: set[int] = field(default_factory=set)
    copied: dict[int, list[int]] = field(default_factory=dict)

    def told(self, flight: Flight) -> tuple[list[int], list[bool], list[bool]]:
        """For each request that ran in a round the tokens emitted, whether it has left, whether it has a draft."""
        emitted = [row[0] for row in self.rows]
        gone, ready = [False] * len(emitted), [False] * len(emitted)
        if self.drafted:
            ready = [id(r) in self.drafted for r in flight.requests]
        for i, tokens in self.short.items():
            emitted[i], gone[i] = tokens, True
        if len(flight.ran) < len(emitted):
            there = [r is not None for r in flight.requests]
            return list(compress(emitted, there)), list(compress(gone, there)), list(compress(ready, there))
        return emitted, gone, ready


def read(flight: Flight, lengths: list[int], whose: Collection[int] = ()) -> Landed:
    """Hand every request its tokens.

    Args:
        flight: has arrived.
        lengths: committed positions by slot; they grow.
        whose: ids of requests that the round before left a draft.
    """
    out, verified = Landed(flight.result.tolist()), flight.assignment is not None
    plain = flight.assignment is not None and flight.assignment.plan.nodes == 1
    saves = flight.assignment is not None and flight.assignment.plan.overlap
    for i, (r, row) in enumerate(zip(flight.requests, out.rows, strict=True)):
        if r is None:
            continue
        slot = r.slot
        if slot is None:  # it has left since
            out.short[i] = 0
            continue
        count = row[0]
        kept = r.take(row[1 : 1 + count])
        out.kept.append((r, kept))
        if r.copied is not None and not verified:
            r.copied.write(kept)
        if verified:
            lengths[slot] += count
            if r.copied is not None and kept:
                out.copied[id(r)] = r.copied.follow(kept)
            if plain:  # `Shares` counts them, for all as if they had emitted something
                if not kept:
                    r.stats.accepted[1] -= 1
            elif kept or r.failure is None:  # otherwise it emitted nothing: no round of its own
                r.stats.count(len(kept))
                if saves:
                    r.stats.hang(bool(row[-1]), flight.resumed and flight.reach > 1 and id(r) in whose)
                if saves and row[-1]:
                    out.drafted.add(id(r))
        if r.finish_reason is not None:
            out.ended.append(r)
            out.short[i] = len(kept)
    return out


def sent(result: Tensor) -> tuple[Tensor, Any]:
    """A copy on its way to the host, and the event of its arrival; None where it is there."""
    if not result.is_cuda:
        return result, None
    landing = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    landing.copy_(result, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return landing, arrived
