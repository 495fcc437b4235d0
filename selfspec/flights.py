"""Rounds and prefills that the device works on and whose outcome the host has not read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from selfspec.clock import Clock
from selfspec.plan.planner import Assignment, View
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


@dataclass(frozen=True)
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


@dataclass
class Landed:
    """What came of a flight for the requests that are still there.

    Attributes:
        kept: what each emitted.
        ended: those that have to leave; one whose tokens are chosen one by one may have ended long before.
        took: of a round, by the ids of those that took part: tokens of each, and whether it left a draft.
        drafted: ids of those that it left one.
    """

    kept: list[tuple[Request, list[int]]] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    took: dict[int, tuple[int, bool]] = field(default_factory=dict)
    drafted: set[int] = field(default_factory=set)

    def by(self, views: Sequence[View]) -> tuple[list[int], list[bool], list[bool]]:
        """For each of a round's views the tokens emitted, whether the request has left, whether it left a draft."""
        took = [self.took.get(id(v.key)) for v in views]
        gone = [t is None or bool(v.key.finish_reason) for t, v in zip(took, views)]  # type: ignore[attr-defined]
        return [t[0] if t else 0 for t in took], gone, [bool(t and t[1]) for t in took]


def read(flight: Flight, lengths: list[int]) -> Landed:
    """Hand every request its tokens.

    Args:
        flight: has arrived.
        lengths: committed positions by slot; they grow.
    """
    out = Landed()
    for r, row in zip(flight.requests, flight.result.tolist(), strict=True):
        if r is None or r.slot is None:  # who has left since
            continue
        count = row[0]
        kept = r.take(row[1 : 1 + count])
        out.kept.append((r, kept))
        if r.finish_reason is not None:
            out.ended.append(r)
        if flight.assignment is None:
            continue
        lengths[r.slot] += count
        if r.failure is not None and not kept:  # it emitted nothing: no round of its own
            continue
        r.stats.count(len(kept))
        out.took[id(r)] = len(kept), bool(row[-1])
        if row[-1]:
            r.stats.saved += 1
            out.drafted.add(id(r))
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


def book(requests: list[Request], clock: Clock) -> float:
    """Share a round's time out among its requests. Returns its seconds."""
    laps = clock.read()
    for name, seconds in laps.items():
        share = seconds / len(requests)
        for r in requests:
            r.stats.seconds[name] += share  # type: ignore[assignment]
    return sum(laps.values())
