"""Requests on one cache: join, run rounds, leave. The only place where host and rounds meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress

import torch

from selfspec.backbone import Backbone
from selfspec.choose import Chooser, graph_key
from selfspec.clock import Clock
from selfspec.decode import Frame
from selfspec.flights import Flight, read, sent
from selfspec.graphs import Graphs, capturable
from selfspec.joining import Door, Joining, goal, slot_of
from selfspec.launch import captured, launch
from selfspec.memory import tail_rows
from selfspec.past import PastText
from selfspec.plan import Plan
from selfspec.plan.policy import Fixed, Policy, together
from selfspec.plan.views import Assignment, Views
from selfspec.prefixes import Prefixes
from selfspec.request import Request
from selfspec.rounds import Rounds, require, verifier_of
from selfspec.saved import Saved
from selfspec.seats import Rows, Seats
from selfspec.slots import Slots
from selfspec.stats import Shares
from selfspec.transfer import onto
from selfspec.turns import in_turn

__all__ = ["Request", "Session"]

IDLE = Request([0], 1)  # in the place of nobody
FEW = 16  # requests at a time, of whose texts the host looks for copies
KEYS = 256  # the smallest K of a graph; the others are its doubles


class Session:
    """Running requests, each in a cache slot of its own.

    Threads take turns, those with other sessions of its backbones too: each call below runs by itself.
    With CUDA graphs a round is started before the host has read the one before, so that the device never waits.

    Args:
        backbone: with a mask path if a plan drafts; or one for each adapter, all of one model.
        policy: what rounds do: a plan for all of them, or what chooses one before each.
        slots: requests at a time.
        capacity: positions per request (prompt and answer).
        verify: how drawn tokens are verified, a name in `selfspec.verify.VERIFIERS`; greedy requests need "coupled".
        graphs: replay rounds from CUDA graphs, where the device and the model allow it; or what replays them.
        reuse: take keys and values of a prefix from a slot that holds the same tokens.

    Raises:
        ValueError: the plan needs a layout or a block that the mask path was not trained for, or the verifier does not
            take its drafts.
    """

    def __init__(
        self,
        backbone: Backbone | Sequence[Backbone],
        policy: Plan | Policy,
        slots: int,
        capacity: int,
        verify: str = "coupled",
        graphs: bool | Graphs = True,
        reuse: bool = False,
    ):
        bodies = [backbone] if isinstance(backbone, Backbone) else list(backbone)
        self.bodies = bodies
        self.backbone = backbone = verifier_of(bodies)
        self.chooser = Chooser(verify)
        policy = Fixed(policy) if isinstance(policy, Plan) else policy
        require(policy, bodies, self.chooser)
        self.cache = backbone.new_cache(slots, capacity, tail_rows(policy.plans, capacity))
        self.slots = Slots(slots, capacity, backbone.device, backbone.n_features, backbone.dtype)
        if isinstance(graphs, bool):
            graphs = Graphs(backbone.device, graphs and capturable(backbone.config))
        self.graphs = graphs
        self.prefixes = Prefixes(self.cache, reuse)
        self.door, self.queue = Door(), Joining(backbone, self.cache, self.slots, self.prefixes, self.graphs)
        self.rounds = Rounds(bodies, self.cache, self.slots, self.chooser, self.graphs.enabled)
        self.seats = Seats(slots)
        self.requests = self.seats.requests  # by slot
        self._shares = Shares()
        self._flights: deque[Flight] = deque()
        self._landed: list[tuple[Request, list[int]]] = []  # read between steps
        self._saved = Saved()
        self.limit = slots  # requests at a time, if not all slots are to be used
        self.use(policy)

    @in_turn
    def use(self, policy: Plan | Policy) -> None:
        """Go on with other plans; drafts that were saved for the next round are dropped.

        Raises:
            ValueError: as at the start, or a plan's rows do not fit the cache.
        """
        policy = Fixed(policy) if isinstance(policy, Plan) else policy
        require(policy, self.bodies, self.chooser)
        rows = max(p.rows for p in policy.plans)
        if rows > self.cache.tail:
            raise ValueError(f"the plan runs {rows} rows a request; this session has room for {self.cache.tail}")
        if any(p.overlap for p in policy.plans):
            longest = max(c.block_size for c in map(self.rounds.config, self.bodies) if c is not None)
            self.slots.save_drafts(longest - 1, self.backbone.vocab_size, self.rounds.width(policy.plans))
        self.policy, self._saved.plan = policy, None
        self.rounds = self.rounds.under(policy)
        self._asks = type(policy) is not Fixed  # it reads what the requests are, and learns
        self._hears = self._asks and {p.lookup for p in policy.plans} == {False, True}

    def suits(self, policy: Policy, capacity: int, verify: str) -> bool:
        """Whether other plans and texts of this length fit."""
        rows = max(p.rows for p in policy.plans)
        return rows <= self.cache.tail and capacity <= self.cache.capacity and verify == self.chooser.verify

    # ---- who runs

    @property
    def active(self) -> list[Request]:
        """All requests that hold a slot, in the order of their slots."""
        return [r for r in self.requests if r is not None]

    @property
    def joining(self) -> list[Request]:
        """Those whose prompts are being prefilled, in order."""
        return self.queue.requests

    @property
    def free(self) -> int:
        """Requests that may still be added."""
        return self.limit - self.taken

    @property
    def taken(self) -> int:
        """Requests that hold a slot."""
        return self.seats.taken

    def room(self, waiting: int, most: int | None = None) -> int:
        """How many of so many that wait to add now, `most` at most; none while it is better to let others come free.

        See `Door`. Where slots have to be neighbours for a common prefill, nothing would be gained by waiting."""
        free = self.free if most is None else min(self.free, most)
        return self.door.admit(self.limit, free, waiting) if self.queue.anywhere else min(free, waiting)

    @in_turn
    def add(self, requests: list[Request]) -> None:
        """Give requests a slot each; the next steps prefill them. One that was released goes on where it stood.

        Raises:
            ValueError: a request that cannot be served, or no free slot; nothing has changed then.
        """
        for r in requests:
            self.check(r)
        if len(requests) > self.free:
            taken = f"{self.taken} of {self.limit} slots are taken"
            raise ValueError(f"{taken}; {len(requests)} more do not fit")
        for r in requests:
            r.device, r.drawn = self.backbone.device, self.chooser.draws
            r.plain, r.kind = not (r.lazy or r.criteria or r.keeps), graph_key([r])
            text = r.prompt + r.output
            slot = self.prefixes.place(self.seats.free, text[: goal(r)])
            self.seats.take(r, slot)
            self.joining.append(r)
            if r.past is not None and not r.output:
                r.past.load(self.cache, slot, r.prompt)
            seed = 0 if r.sampling is None else r.sampling.seed
            self.slots.put(slot, text, self.cache.lengths[slot], len(r.prompt), seed)

    def check(self, request: Request) -> None:
        """Refuse what would fail, or end in wrong positions, once it runs beside others.

        Raises:
            ValueError: the request cannot be served; the message says why.
        """
        if not request.prompt:
            raise ValueError("the prompt is empty")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={request.max_new_tokens}: expected 1 or more")
        if request.finish_reason is not None or request.slot is not None:
            raise ValueError("the request has ended" if request.slot is None else "the request holds a slot already")
        if min(request.prompt) < 0 or max(request.prompt) >= self.backbone.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self.backbone.vocab_size - 1}")
        limit = min(self.cache.capacity, self.backbone.max_positions or self.cache.capacity)
        length, new = len(request.prompt), request.max_new_tokens
        if length + new > limit:
            raise ValueError(f"a prompt of {length} tokens and {new} new ones exceed {limit} positions")
        self.chooser.check(request)

    @in_turn
    def cancel(self, request: Request) -> None:
        """End a request where it stands; its slot is free at once.

        Raises:
            ValueError: it holds no slot here.
        """
        self.release(request)
        request.finish_reason = request.finish_reason or "cancelled"

    @in_turn
    def release(self, request: Request) -> None:
        """Take a request out of its slot without ending it: `add` goes on with it later, from the same text.

        Raises:
            ValueError: it holds no slot here.
        """
        if request.slot is None or self.requests[request.slot] is not request:
            raise ValueError("the request holds no slot in this session")
        while self._flights:
            self._land()
        if request.slot is not None:  # it may have ended in what was on its way
            self._leave(request)

    @in_turn
    def clear(self) -> None:
        """Drop all requests, without reading what is on its way."""
        self._flights.clear()
        self._landed.clear()
        for r in self.active:
            self._leave(r)

    # ---- what runs

    @in_turn
    @torch.no_grad()
    def step(self) -> list[tuple[Request, list[int]]]:
        """One round for the requests that decode, and one forward for the prompts of those that join.

        Returns:
            What each request emitted. Those that ended have left their slots, also one whose own processor or
            criterion raised: it holds the exception as `failure`, and the others go on.
        """
        if self.taken > len(self.joining) or self._flights:
            self._round()
        if self.joining:
            self._chunk()
        self._landed, out = [], self._landed
        return out

    def _round(self) -> None:
        """Start a round, or two when none is on its way, and read the oldest."""
        ahead = self._ahead
        while self._flights and (not ahead or self._rounds_ahead() > 1):  # what the host chooses waits for all of them
            self._land()
        if self._unfinished():
            self._start()
            if ahead and self._rounds_ahead() == 1 and self._unfinished():
                self._start()
        if self._flights:
            self._land()

    @property
    def _ahead(self) -> bool:
        """Whether rounds are started before the last one is read."""
        return self.graphs.enabled and self._arranged().key is not None

    def _rounds_ahead(self) -> int:
        """Rounds that are on their way."""
        return sum(f.assignment is not None for f in self._flights)

    def _unfinished(self) -> bool:
        """Whether some request goes on even if all that is on its way is accepted."""
        reach = sum(f.reach for f in self._flights)
        return any(r.max_new_tokens - len(r.output) > reach for r in self._arranged().running)

    def _arranged(self) -> Rows:
        """The next round's rows, gaps closed where that makes the forward smaller."""
        n = self._bucket(self.taken)
        sources, targets = self.seats.gaps(n)
        if sources:
            self.cache.move(sources, targets, sum(f.reach for f in self._flights))
            for part in (self.slots, self.prefixes, self.seats):
                part.move(sources, targets)
        return self.seats.rows(n)

    def _start(self) -> None:
        """Start one round of the first slots; with a key it needs no look of the host."""
        rows = self._arranged()
        requests, running, key = rows.requests, rows.running, rows.key
        assignment = self._plan(rows)
        plan, clock = assignment.plan, Clock(self.slots.start.device)
        size = plan.block_size
        if not self.graphs.enabled:  # a graph has one shape; elsewhere rows cost, and nobody can take more
            size = min(size, max(r.max_new_tokens - len(r.output) for r in running))
        resumed = plan == self._saved.plan
        redraft = not resumed or self._saved.lacking(running, self.seats.new, self._ahead)
        frame = self._frame(range(len(requests)), plan.rows)
        self.slots.write()
        if plan.overlap and not resumed:
            self.slots.ready.zero_()
        given = rows.given(IDLE)
        result, warm = launch(self.rounds, self.graphs, key, plan, frame, size, redraft, given, clock)
        self._saved.plan = plan if plan.overlap else None
        drafts = self.rounds.drafted(plan, redraft) if size > 1 else 0.0
        result, arrived = sent(result)
        new, reach = self.seats.fresh(), result.shape[1] - 2
        self._flights.append(
            Flight(requests, result, arrived, clock, reach, running, assignment, warm, drafts, resumed, redraft, new)
        )

    def _plan(self, rows: Rows) -> Assignment:
        """What the policy wants for the next round, which is one for all."""
        if not self._asks:
            return Assignment((), self.policy.plans[0])
        ahead = [f.reach for f in self._flights if f.assignment is not None]
        views = rows.views(self.cache.lengths, sum(ahead), self._saved.plan is not None)
        views.idle, views.hurry = self.door.held + len(self.joining), self.graphs.enabled and not ahead
        views.ready = self._ready if self.graphs.enabled else None
        assignment = together(self.policy.round(views))
        views.ready = None  # or views that are kept would hold the session
        dropped = self._saved.plan not in (None, assignment.plan)  # what was saved
        return Assignment(views.without_drafts(), assignment.plan) if dropped else assignment

    def _ready(self, plan: Plan) -> bool:
        """Whether a round started now would find all captured."""
        rows = self._arranged()
        return captured(self.rounds, self.graphs, rows.key, plan, self._frame(range(len(rows.requests)), plan.rows))

    def _land(self) -> None:
        """Read the outcome of the oldest round or prefill."""
        flight = self._flights.popleft()
        if flight.arrived is not None:
            flight.arrived.synchronize()
        planned, laps = flight.assignment, flight.clock.read()
        if planned is None:
            for r in flight.ran:
                r.stats.seconds["prefill"] += laps["prefill"] / len(flight.ran)  # type: ignore[assignment]
        else:
            for r in flight.new:
                if r.slot is not None:
                    self._shares.enter(r.stats)
            self._shares.add(planned.plan.nodes == 1, flight.drafts, laps, len(flight.ran))
        landed = read(flight, self.cache.lengths, self._saved.whose)
        self._landed += landed.kept
        if planned is not None:
            if planned.views and landed.kept:  # in large batches somebody has left since every other round
                emitted, gone, ready = landed.told(flight)
                views = Views.of(planned.views).found(self._saved.whose, flight.made)
                known = Assignment(views.heard(landed.copied), planned.plan)
                seconds = sum(laps.values())
                self.policy.observe(known, emitted, seconds, gone, ready, cold=not flight.warm)
            self._saved.whose = landed.drafted
        for r in landed.ended:
            self._leave(r)

    def _chunk(self) -> None:
        """Prefill the next positions of the first that join, and choose the first tokens of those that are through."""
        clock = Clock(self.slots.start.device)
        self.slots.write()
        run, through, new, tokens = self.queue.chunk(self.requests, self._frame, self.chooser)
        if through:  # what is new has its first token
            left = [r.max_new_tokens - max(1, len(r.output)) for r in through]
            which, budget = onto([[slot_of(r) for r in through], left], self.slots.left.device)
            self.slots.left[which] = budget
            self.slots.ready.index_fill_(0, which, False)
            self._saved.joined(through)
            for r in through:
                self.seats.start(r, self._hears and self.taken <= FEW)
        for r, count in run:
            r.stats.prompt_tokens += count
        one = torch.ones_like(tokens)
        result, arrived = sent(torch.stack([one, tokens, one - 1], 1))
        clock.lap("prefill")
        self._flights.append(Flight([*new], result, arrived, clock, 1 if new else 0, [r for r, _ in run]))
        if not self.graphs.enabled or any(r.lazy or r.keeps for r in new):
            while self._flights:
                self._land()

    def _leave(self, request: Request) -> None:
        """Free a request's slot."""
        slot = self.seats.leave(request)
        if request.keep_past and request.finish_reason is not None and request.failure is None:
            request.past = PastText.of(self.cache, slot, request.prompt + request.output, self.backbone.embeddings)
        self._shares.leave(request.stats)
        self.door.left(request.stats.rounds)
        self.slots.stop(slot)
        if request in self.joining:
            self.joining.remove(request)
        self.policy.forget(request)
        self.prefixes.keep(slot, request.prompt + request.output)

    def _bucket(self, n: int) -> int:
        """Rows of the smallest forward that holds n requests: a graph's are powers of two."""
        return min(1 << (n - 1).bit_length(), len(self.requests)) if self.graphs.enabled and n else n

    def _frame(self, places: Sequence[int], n_rows: int) -> Frame:
        """The next forward's requests, whose first slot counts if they are neighbours, and K of its graph."""
        if not self.graphs.enabled:
            return Frame(places[0], len(places))
        lengths, held = self.cache.lengths, self.requests
        if isinstance(places, range):  # several times as fast, and every round asks
            longest = max(compress(lengths[places.start : places.stop], held[places.start : places.stop]))
        else:
            longest = max(lengths[s] for s in places if held[s] is not None)
        n_keys = longest + sum(f.reach for f in self._flights) + n_rows
        bucket = KEYS << max(0, (n_keys - 1) // KEYS).bit_length()
        return Frame(places[0], len(places), min(bucket, self.cache.capacity + self.cache.tail))
