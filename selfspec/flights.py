"""Rounds and prefills that the device works on and whose outcome the host has not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.clock import Clock
from selfspec.plan.planner import Assignment
from selfspec.request import Request


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
