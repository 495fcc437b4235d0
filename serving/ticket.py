"""A request's place in the engine, and what it is told."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from selfspec.serving.lane import Lane
from selfspec.session import Request


@dataclass(eq=False)
class Ticket:
    """A request's place in the engine.

    Attributes:
        request: holds the output.
        priority: higher ones go first, and take slots from lower ones.
        deadline: on time.monotonic's clock; then it ends, wherever it is.
        arrived: on the same clock, as are the next two.
        admitted: when it got its first slot.
        first: when its first token came.
        finish_reason: "stop", "length", "cancelled", "deadline" or "error", once it has ended.
        error: what was wrong with it.
    """

    request: Request
    seq: int
    length: int  # capacity of its class
    priority: int = 0
    deadline: float | None = None
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    lane: Lane | None = None
    seen: int = 0  # tokens that events have told of
    alone: bool = False  # it was in a round that failed: it runs by itself, so that no other fails with it

    def __lt__(self, other: Ticket) -> bool:
        """Whose turn is first."""
        return (-self.priority, self.seq) < (-other.priority, other.seq)


@dataclass(eq=False, slots=True)
class Event:
    """New tokens of a request, its end, or both."""

    ticket: Ticket
    tokens: list[int]
    finish_reason: str | None = None
    error: str | None = None


class Running(dict[Request, Ticket]):
    """Tickets of the requests that hold a slot, and what is asked about all of them between rounds.

    Attributes:
        alone: how many of them may only run by themselves.
    """

    def __init__(self) -> None:
        self._priorities: Counter[int] = Counter()
        self.alone = 0

    def enter(self, ticket: Ticket, lane: Lane) -> None:
        """It has a slot."""
        ticket.lane, self[ticket.request] = lane, ticket
        self._priorities[ticket.priority] += 1
        self.alone += ticket.alone

    def leave(self, ticket: Ticket) -> None:
        """It has none any more, if it had."""
        ticket.lane = None
        if self.pop(ticket.request, None) is not None:
            self.alone -= ticket.alone
            self._priorities[ticket.priority] -= 1
            if not self._priorities[ticket.priority]:
                del self._priorities[ticket.priority]

    def any_below(self, priority: int) -> bool:
        """Whether some have a lower priority."""
        return bool(self._priorities) and min(self._priorities) < priority
