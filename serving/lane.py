"""Lanes: sessions by length class, and how the memory budget is divided among them.

A session's slots all have one capacity, so one session for every length would give each short prompt the memory of the
longest. A lane is a session for the requests of one class, each class four times as long as the one before: a request
wastes at most three quarters of its slot, and a step runs few forwards, as few lanes exist at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from selfspec.backbone import Backbone
from selfspec.plan.policy import Policy
from selfspec.session import Request, Session

SHORTEST, STEP = 1024, 4  # capacity of the first class, and how much longer each next one is
FEW = 8  # slots of a lane that grows by need, at least


class Lane:
    """A session for requests of up to `capacity` positions; all that the engine asks of a session goes through here.

    Args:
        bodies: the model's backbone, or one for each adapter.
        plan: what rounds do.
        slots: requests at a time.
        capacity: positions a request.
        verify: see `Session`.
        reuse: likewise.
    """

    def __init__(
        self,
        bodies: Backbone | Sequence[Backbone],
        plan: Policy,
        slots: int,
        capacity: int,
        verify: str = "coupled",
        reuse: bool = True,
    ):
        self.slots, self.capacity = slots, capacity
        self.session: Session | None = Session(bodies, plan, slots, capacity, verify, reuse=reuse)
        self.nbytes = self.session.cache.nbytes  # of its keys and values
        self.running: dict[Request, None] = {}  # in the order in which they came

    @property
    def open(self) -> Session:
        """Its session."""
        assert self.session is not None, "the lane is closed"
        return self.session

    @property
    def free(self) -> int:
        """Slots that `add` may take."""
        return self.slots - len(self.running)

    def room(self, waiting: int, most: int) -> int:
        """How many of so many that wait to add now, `most` at most; see `Session.room`."""
        return self.open.room(waiting, most)

    def add(self, request: Request) -> None:
        """Give a request a slot; one that was released goes on where it was.

        Raises:
            ValueError: it cannot be served.
        """
        self.open.add([request])
        self.running[request] = None

    def step(self) -> list[tuple[Request, list[int]]]:
        """A prefill chunk and a round. Returns what requests emitted, those too that ended as others were taken out."""
        emitted = self.open.step()
        for request, _ in emitted:
            if request.finish_reason is not None:
                self.running.pop(request, None)
        return emitted

    def leave(self, request: Request, end: bool = False) -> None:
        """Take a running request out. It may turn out to have ended, in a round whose outcome nobody had read yet.

        Args:
            request: runs here.
            end: for good.
        """
        del self.running[request]
        if request.slot is not None:
            (self.open.cancel if end else self.open.release)(request)

    def close(self) -> None:
        """Give the memory back, whatever state the session is in."""
        with contextlib.suppress(Exception):
            self.open.clear()
        self.running, self.session = {}, None


def classes(longest: int | None) -> list[int]:
    """Capacities of the lanes, up to the model's longest text."""
    out, longest = [SHORTEST], longest or 1 << 20
    while out[-1] < longest:
        out.append(out[-1] * STEP)
    return [*out[:-1], min(out[-1], longest)]


def most_slots(device: torch.device) -> int:
    """Requests at a time where nobody says. A GPU gains by each one up to hundreds, a CPU is busy with a few."""
    return 256 if device.type == "cuda" else 32


def allot(
    demand: Mapping[int, int],
    cost: Mapping[int, int],
    budget: int,
    most: int,
    order: Sequence[int],
    ahead: bool = True,
) -> dict:
    """Slots for every class.

    Each class with demand gets a slot, in `order` as far as the budget goes; then the class that is worst supplied gets
    the next one, until all demand is met. What is left stays in reserve, but for a half of it: with that the lanes grow
    beyond today's demand, so that they need not be made anew as soon as another request comes.

    Args:
        demand: class -> requests that wait or run.
        cost: class -> bytes a slot.
        budget: bytes.
        most: slots of a lane, and all that demand can take together.
        order: classes, the one that must not wait first.
        ahead: grow beyond today's demand as far as half of the rest goes, since lanes that are made anew lose their
            CUDA graphs; otherwise to twice the demand, which takes no memory that nobody may ever want.

    Returns:
        class -> slots, at least 1; a class that got none is not there.
    """
    slots: dict[int, int] = {}
    for c in order:
        if demand.get(c) and cost[c] <= budget and sum(slots.values()) < most:
            slots[c], budget = 1, budget - cost[c]
    for spare in (False, True):
        budget = budget // 2 if spare else budget
        open_ = dict(slots)
        while open_:
            c = min(open_, key=lambda c: (slots[c] / demand[c], cost[c]))
            enough = most if ahead else min(most, max(FEW, 2 * demand[c]))
            full = slots[c] >= (enough if spare else demand[c]) or (not spare and sum(slots.values()) >= most)
            if full or cost[c] > budget:
                del open_[c]
            else:
                slots[c], budget = slots[c] + 1, budget - cost[c]
    return slots
