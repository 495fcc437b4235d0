"""Continuous batching: requests join and leave between rounds.

The engine queues and admits; what a round does is the session's business. First come, first served among requests of
one priority. Memory is reserved when a lane is made (see `selfspec.serving.lane`), so nothing that was admitted can run
out of it. A running request can be taken out and go on later without losing a token: for one of higher priority, or for
lanes of other sizes.
"""

from __future__ import annotations

import heapq
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator

import torch

from selfspec.memory import free_memory, position_bytes, slot_bytes
from selfspec.model import SelfSpecModel
from selfspec.plan import Plan
from selfspec.plan.policy import Policy
from selfspec.serving.lane import Lane, allot, classes, most_slots
from selfspec.serving.metrics import Metrics
from selfspec.serving.ticket import Event, Running, Ticket
from selfspec.session import Request

PATIENCE = 64  # rounds that a request waits before running ones make room for a lane of its length


class Engine:
    """Many requests on one model. Any thread may call any method; steps run one at a time.

    Args:
        model: with or without adapter.
        plan: what rounds do; by default the model's own.
        slots: requests that run at a time, at most; by default 256 on CUDA and 32 elsewhere.
        memory: bytes that keys and values may take, never exceeded; by default most of what is free on the device.
            A GPU's lanes take it early, those of a CPU as requests come. May be changed while requests run.
        verify: see `SelfSpecModel.generate`.
        patience: rounds that a request waits for memory before running ones make room.
        reuse: take keys and values of a common prefix from a slot that holds it.
    """

    def __init__(
        self,
        model: SelfSpecModel,
        plan: Plan | Policy | None = None,
        slots: int | None = None,
        memory: int | None = None,
        verify: str = "coupled",
        patience: int = PATIENCE,
        reuse: bool = True,
    ):
        slots = most_slots(model.backbone.device) if slots is None else slots
        if slots < 1:
            raise ValueError(f"slots={slots}: expected 1 or more")
        self.bodies, self.backbone, self.verify = model.bodies, model.backbone, verify
        plan = plan or model.policy(verify=verify)
        self.plan = model.pruned(plan, None) if isinstance(plan, Plan) else plan
        self.slots, self.patience, self.reuse = slots, patience, reuse
        self.ahead = self.backbone.device.type == "cuda"  # see `allot`
        self.memory = free_memory(self.backbone) if memory is None else memory
        lengths = range(1, self.memory // position_bytes(self.backbone) + 1)
        reach = bisect_right(lengths, self.memory, key=lambda c: slot_bytes(self.backbone, self.plan.plans, c))
        if reach < 2:
            raise ValueError(f"memory={self.memory} bytes: one request of two tokens needs more")
        limit = self.backbone.max_positions
        self.classes = classes(reach if limit is None else min(reach, limit))
        self.cost = {c: slot_bytes(self.backbone, self.plan.plans, c) for c in self.classes}
        self.lanes: dict[int, Lane] = {}
        self.running = Running()
        self.metrics = Metrics()
        self.rounds = 0
        self._queues: dict[int, list[Ticket]] = {c: [] for c in self.classes}
        self._waiting: Counter[int] = Counter()
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._arrivals: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._late: list[Event] = []  # of what was on its way when requests were taken out
        self._stepping = threading.Lock()
        self._count, self._lacking = 0, 0  # tickets so far; the round since which a class lacks memory
        self._counting = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._arrivals or self.running or self._cancelled or +self._waiting)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._arrivals) + self._waiting.total()

    @property
    def reserved(self) -> int:
        """Bytes that keys and values take now."""
        return sum(lane.nbytes for lane in list(self.lanes.values()))

    def add(self, request: Request, priority: int = 0, timeout: float | None = None) -> Ticket:
        """Queue a request.

        Args:
            request: not yet served by anybody.
            priority: higher ones go first.
            timeout: seconds from now in which it has to end.

        Raises:
            ValueError: it would never fit.
        """
        need = len(request.prompt) + request.max_new_tokens
        length = next((c for c in self.classes if c >= need), None)
        if length is None:
            limit = self.backbone.max_positions
            short = "the model's positions" if limit == self.classes[-1] else f"a KV memory of {self.memory} bytes"
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones exceed the "
                f"{self.classes[-1]} positions that {short} allow"
            )
        with self._counting:
            self._count += 1
            ticket = Ticket(request, self._count, length, priority)
        if timeout is not None:
            ticket.deadline = ticket.arrived + timeout
        self._arrivals.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request before the next round; nothing happens to one that has ended."""
        self._cancelled.append(ticket)

    def step(self) -> list[Event]:
        """Admit what fits, and run a round of every lane."""
        with self._stepping:
            events = self._arrive()
            events += self._admit()
            events += self._late
            self._late = []
            for lane in list(self.lanes.values()):
                if lane.running:
                    events += self._round(lane)
            self.rounds += 1
            self.metrics.look(len(self.running), self.waiting, self.reserved)
            return events

    def run(self) -> Iterator[Event]:
        """Events until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def _arrive(self) -> list[Event]:
        """Sort in what came since the last round; end what was cancelled or is too late."""
        while self._arrivals:
            ticket = self._arrivals.popleft()
            self._queue(ticket)
            if ticket.deadline is not None:
                heapq.heappush(self._deadlines, (ticket.deadline, ticket.seq, ticket))
        ends = []
        while self._cancelled:
            ends.append((self._cancelled.popleft(), "cancelled"))
        if len(self._deadlines) > 64 + 2 * (len(self.running) + self.waiting):  # most have ended long before theirs
            self._deadlines = sorted(d for d in self._deadlines if d[2].finish_reason is None)
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            ends.append((heapq.heappop(self._deadlines)[2], "deadline"))
        return [self._end(t, reason) for t, reason in ends if t.finish_reason is None]

    def _queue(self, ticket: Ticket) -> None:
        heapq.heappush(self._queues[ticket.length], ticket)
        self._waiting[ticket.length] += 1

    def _head(self, length: int) -> Ticket | None:
        """The next request of a class."""
        queue = self._queues[length]
        while queue and queue[0].finish_reason is not None:
            heapq.heappop(queue)
        return queue[0] if queue else None

    def _heads(self) -> list[Ticket]:
        return sorted(t for c in self.classes if (t := self._head(c)) is not None)

    # ---- memory

    def _shrink(self) -> list[Event]:
        """Keep to a budget that was lowered: all lanes are made anew, and what no longer fits at all ends."""
        for lane in list(self.lanes.values()) if self.reserved > self.memory else ():
            self._close(lane)
        error = f"the KV memory was lowered to {self.memory} bytes, and one slot of its length needs more"
        lost = [t for c in self.classes if self.cost[c] > self.memory for t in self._queues[c]]
        return [self._end(t, "error", error) for t in lost if t.finish_reason is None]

    def _arrange(self) -> None:
        """Make the lanes that the waiting requests need, if the budget allows; running ones go on in new slots."""
        heads = {t.length: t for t in self._heads()}
        homeless = [c for c in heads if all(lane.capacity < c for lane in self.lanes.values())]
        full = [c for c in heads if c in self.lanes and not self.lanes[c].free and len(self.running) < self.slots]
        if not homeless and not full:
            self._lacking = self.rounds
            return
        oldest = dict(heads)
        demand = Counter({c: self._waiting[c] for c in heads})
        for ticket in self.running.values():
            demand[ticket.length] += 1
            oldest[ticket.length] = min(ticket, oldest.get(ticket.length, ticket))
        order = sorted(oldest, key=lambda c: oldest[c])
        target = allot(demand, self.cost, self.memory, self.slots, order, self.ahead)
        grown = [c for c in full if target.get(c, 0) >= 2 * self.lanes[c].slots]
        new = [c for c in homeless if c in target] + grown
        if not new:
            return
        closing = [self.lanes[c] for c in grown]
        rest = [lane for lane in self.lanes.values() if lane not in closing]
        rest.sort(key=lambda lane: (bool(lane.running), target.get(lane.capacity, 0) - lane.slots))
        for lane in rest:
            kept = sum(x.nbytes for x in self.lanes.values() if x not in closing)
            if kept + sum(target[c] * self.cost[c] for c in new) <= self.memory:
                break
            slots = target.get(lane.capacity, 0)
            if lane.slots > slots:
                closing.append(lane)
                new += [lane.capacity] if slots else []
        moved = [self.running[r] for lane in closing for r in lane.running]
        first = min(heads[c] for c in new if c in heads)
        # lanes that double are made anew a few times in an engine's life, and nobody loses a slot
        patience = 0 if not self.ahead and len(closing) == len(grown) else self.patience
        if any(t.priority >= first.priority for t in moved) and self.rounds - self._lacking < patience:
            return
        for lane in closing:
            self._close(lane)
        for c in sorted(new):
            self._open(c, target[c])
        self._lacking = self.rounds
        self.metrics.arrangements += 1

    def _open(self, length: int, slots: int) -> None:
        while True:
            try:
                lane = Lane(self.bodies, self.plan, slots, length, self.verify, self.reuse)
                break
            except torch.OutOfMemoryError:  # another program took the memory meanwhile
                if slots == 1:
                    raise
                slots //= 2
        self.lanes[length] = lane
        assert lane.nbytes <= slots * self.cost[length], "a session took more memory than was planned"

    def _close(self, lane: Lane) -> None:
        for request in list(lane.running):
            self._release(self.running[request])
        lane.close()  # its memory is free before another lane takes any
        del self.lanes[lane.capacity]

    def _release(self, ticket: Ticket) -> None:
        """Back into the queue, at its old place."""
        assert ticket.lane is not None
        ticket.lane.leave(ticket.request)
        if ticket.request.finish_reason is not None:
            self._late.append(self._finished(ticket))
            return
        if len(ticket.request.output) > ticket.seen:
            self._late.append(Event(ticket, self._fresh(ticket)))
        self._requeue(ticket)
        self.metrics.preemptions += 1

    def _requeue(self, ticket: Ticket) -> None:
        self.running.leave(ticket)
        self._queue(ticket)

    # ---- admission

    def _admit(self) -> list[Event]:
        events = self._shrink()
        self._arrange()
        for lane in sorted(self.lanes.values(), key=lambda lane: lane.capacity):
            wanted = self._wanted(lane)
            while wanted and lane.free and len(self.running) < self.slots and (ticket := self._next(lane)):
                events += self._start(ticket, lane)
        for head in self._heads():  # only those of higher priority than something that runs get any further
            while (ticket := self._head(head.length)) and (room := self._room(ticket)):
                events += self._start(ticket, room)
        return events

    def _wanted(self, lane: Lane) -> bool:
        """Whether a lane takes in requests now; who goes before one that runs does not wait for others (see `Door`)."""
        waiting = sum(n for c, n in self._waiting.items() if c <= lane.capacity)
        if lane.room(waiting, self.slots - len(self.running)):
            return True
        head = self._next(lane) if waiting else None
        return head is not None and self.running.any_below(head.priority)

    def _next(self, lane: Lane) -> Ticket | None:
        """Who gets a free slot: its own class, or a shorter one without a lane; else any shorter one."""
        heads = [t for t in self._heads() if t.length <= lane.capacity]
        own = [t for t in heads if t.length == lane.capacity or t.length not in self.lanes]
        ticket = next(iter(own or heads), None)
        several = ticket is not None and ticket.alone and lane.running
        guarded = self.running.alone and any(self.running[r].alone for r in lane.running)
        return None if several or guarded else ticket

    def _room(self, ticket: Ticket) -> Lane | None:
        """A slot for a request of higher priority, taken from the newest of the lowest."""
        lanes = [lane for lane in self.lanes.values() if lane.capacity >= ticket.length]
        if ticket.alone or not lanes or not self.running.any_below(ticket.priority):
            return None
        free = next((lane for lane in lanes if lane.free), None)
        lower = [t for t in self.running.values() if t.priority < ticket.priority]  # at most times nobody
        victim = max((t for t in lower if free is not None or t.lane in lanes), default=None)
        if victim is None or victim.alone:
            return None
        room = free if free is not None else victim.lane
        self._release(victim)
        return room

    def _start(self, ticket: Ticket, lane: Lane) -> list[Event]:
        """Give a waiting request its slot."""
        heapq.heappop(self._queues[ticket.length])
        self._waiting[ticket.length] -= 1
        try:
            lane.add(ticket.request)
        except ValueError as error:
            return [self._ended(ticket, "error", str(error))]
        self.running.enter(ticket, lane)
        if ticket.admitted is None:
            ticket.admitted = time.monotonic()
            self.metrics.wait.add(ticket.admitted - ticket.arrived)
        return []

    # ---- rounds

    def _round(self, lane: Lane) -> list[Event]:
        try:
            emitted = lane.step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # not a request's own processor, which ends it alone; one of them is the cause
            return self._failed(lane, error)
        events = []
        for request, _ in emitted:
            if (ticket := self.running.get(request)) is None:  # it was told of already
                continue
            if request.finish_reason is not None:
                events.append(self._finished(ticket))
            elif tokens := self._fresh(ticket):
                events.append(Event(ticket, tokens))
        return events

    def _failed(self, lane: Lane, error: Exception) -> list[Event]:
        """A round raised: all of its requests go back into the queue, each to run alone; one that did so ends."""
        tickets = [self.running[r] for r in lane.running]
        lane.close()
        del self.lanes[lane.capacity]
        events = [self._finished(t) for t in tickets if t.request.finish_reason is not None]
        for ticket in [t for t in tickets if t.request.finish_reason is None]:
            if len(tickets) == 1:
                ticket.request.finish_reason = "error"
                return [self._ended(ticket, "error", f"{type(error).__name__}: {error}")]
            if tokens := self._fresh(ticket):
                events.append(Event(ticket, tokens))
            self._requeue(ticket)
            ticket.alone = True
        return events

    def _finished(self, ticket: Ticket) -> Event:
        """The end that its session has found."""
        request, failure = ticket.request, ticket.request.failure
        error = None if failure is None else f"{type(failure).__name__}: {failure}"
        return self._ended(ticket, request.finish_reason or "error", error)

    def _fresh(self, ticket: Ticket) -> list[int]:
        """Tokens that no event has told of."""
        tokens = ticket.request.output[ticket.seen :]
        if tokens:
            ticket.seen += len(tokens)
            self.metrics.tokens += len(tokens)
            if ticket.first is None:
                ticket.first = time.monotonic()
                self.metrics.first.add(ticket.first - ticket.arrived)
        return tokens

    def _end(self, ticket: Ticket, reason: str, error: str | None = None) -> Event:
        """End a request, wherever it is."""
        request = ticket.request
        if ticket.lane is None:
            self._waiting[ticket.length] -= 1
            request.finish_reason = reason
        else:
            ticket.lane.leave(request, end=True)
            request.finish_reason = reason if request.finish_reason == "cancelled" else request.finish_reason
        if request.failure is not None:
            return self._finished(ticket)
        return self._ended(ticket, request.finish_reason or reason, error)

    def _ended(self, ticket: Ticket, reason: str, error: str | None = None) -> Event:
        self.running.leave(ticket)
        ticket.finish_reason, ticket.error = reason, error
        tokens = self._fresh(ticket)
        self.metrics.ended(reason, ticket.request.stats, time.monotonic() - ticket.arrived)
        return Event(ticket, tokens, reason, error)
