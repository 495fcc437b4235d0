"""The planner: before every round it gives each request a plan, and learns from what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfspec.plan import Plan
from selfspec.plan.allot import allot, longest, partition
from selfspec.plan.cost import Costs, Pace
from selfspec.plan.estimate import DEPTH, Estimator, families
from selfspec.plan.heard import POOL, Heard
from selfspec.plan.probe import Probe
from selfspec.plan.use import SOON, Use
from selfspec.plan.value import Values
from selfspec.plan.views import Assignment, View, Views

APART = 9.0  # milliseconds of rounds, about, between two comparisons: short rounds leave the host less time to think
LONGEST = 5  # times as many rounds may pass between two comparisons: of short ones, or while plain decoding stays best
HURRIED = 16  # rounds in a row before which nothing is thought: at a text's ends few, of very short texts all
KNOWN = 16  # timed rounds after which not every one is booked
SURE = 3  # timed rounds after which a cost is known
UNBOUNDED = 1 << 30  # tokens left: caps bite only in a text's last rounds, which no change of plans would repay


class _Gone:
    """Stands for a request that has left, which is not to be held in memory."""


@dataclass(frozen=True)
class Decision:
    """One entry of the log.

    Attributes:
        number: of the round.
        context: mean committed positions.
        tokens: [K] expected per round over all requests, of every plan in the menu; rounds that are lost between two
            texts are taken off (`Values.whole`).
        ms: [K] expected per round.
        chosen: plan and number of requests of each assignment.
        why: "first", "keep", "hold" (a better one is not better by enough, or for long enough), "switch" or "probe".
    """

    number: int
    context: float
    tokens: np.ndarray
    ms: np.ndarray
    chosen: tuple[tuple[Plan, int], ...]
    why: str


class Planner:
    """Chooses, every few rounds, the plans with the most expected tokens per millisecond: estimate x latency table.

    The first rounds run what the table and the adapter's told acceptance promise most of. A change needs gains that
    add up to `patience` over the rounds since the last one (a half within four, 2 % only if they last), and to a tenth
    of what compiling and capturing the new shape takes where it never ran, as it stays captured; a change comes at most
    every `dwell` rounds. So graphs are not thrashed; plain decoding may come back at once. What is in use is in use for
    so many requests: at every doubling of the load the choice is made afresh, or goes on where it stood the last time.
    Modes not in use are probed within a share of the time (`Probe`). Plain decoding is in the menu like any other plan
    and is preferred within 1.5 %: where drafts do not pay, it wins. With more requests than the table holds, where
    costs are extrapolated, plain decoding runs first until its rounds are known, and a plan's first rounds there
    outweigh what others told.

    With `split`, a batch may run as two shapes where the table says that their two forwards pay, and every request is
    judged by itself. Without it the rounds of a batch are one request's to the estimator: their sum is all that counts,
    and planning takes as long for 128 requests as for one.

    Args:
        costs: the latency table.
        plans: what to choose from (`selfspec.plan.menu`); plain decoding is one of them.
        estimator: of acceptance.
        patience: relative gains that have to add up over rounds before a change; 1 % does not count. Plain decoding
            comes back sooner.
        dwell: rounds between two changes.
        every: rounds between two comparisons while the same requests run, 6 or more: what there is to think of is
            spread over them (`Use.turn`); of short rounds more, and while plain decoding stays the best, up to five
            times as many.
        probe: share of the time for modes not in use.
        split: let a batch run as two rounds of different shapes; a `Session` runs one.
        packed: verification rows are packed, so that `prune` may give each request its own length; otherwise rows stand
            in a rectangle.

    Attributes:
        log: the last decisions.
        switches: changes of plan so far, probes apart.
        rate: expected tokens per millisecond of the plans in use.
    """

    def __init__(
        self,
        costs: Costs,
        plans: Sequence[Plan],
        estimator: Estimator | None = None,
        patience: float = 2.0,
        dwell: int = 4,
        every: int = 6,
        probe: float = 0.02,
        split: bool = False,
        packed: bool = False,
    ):
        if not any(p.nodes == 1 for p in plans):
            raise ValueError("the menu needs plain decoding, Plan('ar', 1), to fall back to")
        if every < 6:
            raise ValueError(f"every={every}: expected 6 rounds or more, as its thinking is spread over them")
        self.costs, self.plans, self.split, self.packed = costs, list(plans), split, packed
        kinds = [f for p in plans for f in families(p)]
        self.estimator = estimator or Estimator(kinds, [0.7] * len(costs.entries))
        self.heard = Heard(self.estimator)
        self.values = Values(self.plans, self.estimator.index, costs)
        self.index = {p: k for k, p in enumerate(self.plans)}
        self.patience, self.dwell, self.every = patience, dwell, every
        self.pace, self.probe = Pace([_alike(p) for p in self.plans]), Probe(probe)
        self.log: deque[Decision] = deque(maxlen=512)
        self.rounds = self.switches = self._overheard = self._hurried = 0
        self.rate = 0.0
        self._uses: dict[int, Use] = {}  # by doublings of the number of requests
        self._use = Use()
        self._plain = next(k for k, p in enumerate(self.plans) if p.nodes == 1)
        self._members: set[Hashable] = set()
        self._gone: list[_Gone] = []  # whose own terms are still of use
        self._seen: list[Hashable] | None = None  # keys of the last round, as they were handed over

    @property
    def current(self) -> tuple[int, ...]:
        """Plans in use, by index."""
        return self._use.plans

    def round(self, active: Sequence[View]) -> list[Assignment]:
        """A plan for every running request.

        Args:
            active: the running requests, each once.

        Returns:
            Assignments that hold every request once; each is a round of its own.
        """
        if not active:
            return []
        views = Views.of(active)
        n, keys = len(views), self._judged(views.keys)
        joined = False
        if views.keys is not self._seen:  # a session hands over the same list while the same requests run
            members = set(views.keys)
            joined = not self._members.issuperset(members)
            self._members, self._seen = members, views.keys
        self.values.joined(joined)
        self.rounds += 1
        use = self._used(n)
        use.since += 1
        use.idle += views.idle
        self.values.lost, self.values.held = use.between
        use.wait -= 1
        if keys != use.keys:
            use.soon(self.split)
        self._hurried = self._hurried + 1 if views.hurry else 0
        if 0 < self._hurried <= HURRIED and len(use.parts) == 1 and not self.probe.running:
            return self._assigned(views, use.parts)
        fresh = use.since <= 4 * self.dwell
        turn = "compare" if fresh else use.turn(self.heard.copies and self.rounds - self._overheard > self.every)
        probed = self.probe.next(self, views) if turn == "probe" or self.probe.running else None
        if turn != "compare" and probed is None:
            if turn in ("drafts", "copies"):
                late = self.rounds - self._overheard > 4 * self.every  # short stays may give copies no turn
                self.learn(turn == "drafts", turn == "copies" or late)
            return self._assigned(views, use.parts)
        if self.split or fresh:  # what a change brings is to be seen at once
            self.learn()
        tokens, ms = self._expected(views, keys)
        if probed is None and self._beyond(n) and self.pace.known(self._plain, n) < SURE:
            probed = self._plain
        if probed is not None:
            parts, why = [(probed, list(range(n)))], "probe"
            use.wait = SOON if use.parts else 0
        else:
            parts, why = self._best(tokens, ms, views)
            idle = why == "keep" and use.plans == (self._plain,)  # nothing is learnt of drafts meanwhile
            took = sum(ms[k, len(m) if self.split else -1] for k, m in parts)
            apart = max(self.every, 2 * int(0.5 * APART / max(took, 1e-3)))  # even: see `Use.turn`
            use.pause = min(max(2 * use.pause, apart) if idle else apart, LONGEST * self.every)
            use.parts, use.keys, use.wait = parts, keys, use.pause
        chosen = tuple((self.plans[k], len(members)) for k, members in parts)
        self.log.append(Decision(self.rounds, views.context, tokens.sum(0), ms[:, -1], chosen, why))
        return self._assigned(views, parts)

    def _used(self, n: int) -> Use:
        """What is in use for so many requests."""
        use = self._uses.setdefault((n - 1).bit_length(), Use(pause=self.every))
        if use is not self._use:
            use.back(self.rounds)
            self._use, self.rate = use, use.rate
        use.left = self.rounds
        return use

    def _expected(self, views: Views, keys: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [n or 1, K] and milliseconds [K, n + 1 or 1], the last of all requests, of a round of every plan."""
        n, m, features = len(views), len(keys), views.features
        if features is not None and m < n:
            features = np.nanmean(features, keepdims=True)
        offers: Any = DEPTH
        if views.lookups is not None:
            looked = [DEPTH if found is None else found for found in views.lookups]
            offers = np.array(looked).reshape(m, -1).mean(1).astype(int)
        survival = np.multiply.accumulate(self.estimator.all(keys, features), 2)
        tokens, hit = self.values.tokens(survival, np.full(m, UNBOUNDED), offers)
        counts = np.arange(n + 1) if self.split else np.array([n])
        return tokens * (n / m), self.values.ms(counts, views.context, hit) * self.factors(n)[:, None]

    def _beyond(self, n: int) -> bool:
        """Whether rounds of so many requests are extrapolated by the table."""
        return n > self.costs.table.reach

    def factors(self, n: int) -> np.ndarray:
        """What rounds of n requests take over what the table says. [K]"""
        return self.pace.factors(n, 0.25 if self._beyond(n) else 2.0)

    def _judged(self, keys: list[Hashable]) -> Sequence[Hashable]:
        """Whom acceptance is estimated for: each request, or a batch as one."""
        return keys if self.split or len(keys) == 1 else POOL

    def _assigned(self, views: Views, parts: list[tuple[int, list[int]]]) -> list[Assignment]:
        if len(parts) == 1:
            return [Assignment(views, self.plans[parts[0][0]])]
        each = list(views)
        return [Assignment([each[i] for i in members], self.plans[k]) for k, members in parts]

    def setup(self, k: int, views: Views) -> float:
        """Milliseconds that plan k costs these requests beside its rounds until it runs at its pace."""
        there = views.ready is not None and views.ready(self.plans[k])
        return 0.0 if there else self.pace.setup(k, len(views))

    def _best(self, tokens: np.ndarray, ms: np.ndarray, views: Views) -> tuple[list[tuple[int, list[int]]], str]:
        """The parts to run, and why: the best ones, or those in use where the best gain too little.

        Args:
            tokens: [n or 1, K].
            ms: [K, n + 1 or 1], the last of n requests.
            views: of the requests.
        """
        n = len(views)
        use, rounds = self._use, self._use.pause - self._use.wait  # since the last comparison
        tokens = tokens.copy()
        tokens[:, self._plain] *= 1.015  # what is gained by less is lost to drafts that do worse than expected
        best, rate = self._parts(tokens, ms, n, None)
        if use.plans:
            kept, held = self._parts(tokens, ms, n, use.plans)
            use.lead = max(use.lead + rounds * min(rate / held - 1.01, 1.0), 0.0)  # 1 % may be error
            fallen = [k for k, _ in best] == [self._plain]  # falling back waits for nothing
            new = [k for k, _ in best if k not in use.plans and k != self._plain]
            price = sum(self.setup(k, views) for k in new) / sum(ms[k, -1] for k, _ in kept)  # in rounds
            patience = min(self.patience, 0.3) if fallen else max(self.patience, 0.1 * price)
            if use.lead < patience or (use.since < self.dwell and not fallen):
                self.rate = use.rate = held
                return kept, "keep" if rate <= held * 1.01 else "hold"
        why = "switch" if use.plans else "first"
        chosen = tuple(sorted({k for k, _ in best}))
        self.switches += bool(use.plans) and chosen != use.plans
        use.plans, use.since, use.lead, use.rate = chosen, 0, 0.0, rate
        self.rate = rate
        self.probe.used({f for k in chosen for f in families(self.plans[k])}, n)
        return best, why

    def _parts(
        self, tokens: np.ndarray, ms: np.ndarray, n: int, among: tuple[int, ...] | None
    ) -> tuple[list[tuple[int, list[int]]], float]:
        """The best parts, of all plans or some, and their tokens per millisecond."""
        if not self.split:
            rates = tokens.sum(0) / ms[:, -1]
            k = int(rates.argmax()) if among is None else max(among, key=lambda j: float(rates[j]))
            return [(k, list(range(n)))], float(rates[k])
        if among is None:  # two shapes are compared among those that do best alone, and those that suit somebody best
            alone = tokens / ms[:, n]  # [n, K]
            few = {self._plain, *np.argsort(-alone.sum(0))[:4].tolist(), *np.argmax(alone, 1)[:2].tolist()}
            among = tuple(sorted(few))
        parts = partition(tokens, ms, among)
        return parts, _rate(parts, tokens, ms)

    def prune(self, assignment: Assignment, survival: np.ndarray) -> list[int]:
        """Drafts to verify per request.

        Args:
            assignment: from `round`, its drafts made.
            survival: [n, D] the chance that draft j and all before it are accepted: products of confidences that were
                computed from marginals, not from the drafted tokens.

        Returns:
            One number a request. In a rectangle all are equal, and 1 more is a verify length of the menu.
        """
        n, depth = survival.shape
        seen = survival * (np.arange(depth) < np.array(assignment.offered)[:, None])
        context = assignment.context

        pace = float(self.factors(n)[self.index[assignment.plan]])

        def cost(rows: float) -> float:
            return pace * float(self.costs.table.time("clean", rows, n, context))

        mean = 1 + float(seen.sum(1).mean())
        rate = self.rate * mean / float(self.values.whole(np.array(mean)))  # between texts, drafts gain nothing
        if self.packed:
            return allot(seen, lambda rows: cost(rows / n), rate).tolist()
        sizes = sorted({p.nodes for p in self.plans if not p.tree and p.nodes <= depth + 1} | {depth + 1})
        return [longest(seen, sizes, cost, rate) - 1] * n

    def observe(
        self,
        assignment: Assignment,
        emitted: Sequence[int],
        seconds: float | None = None,
        ended: Sequence[bool] | None = None,
        hits: Sequence[bool] | None = None,
        cold: bool = False,
    ) -> None:
        """Learn from a round.

        Args:
            assignment: that ran.
            emitted: tokens that each request emitted, bonus included; 0 of one that has left meanwhile.
            seconds: that it took; None where nobody measured.
            ended: requests that ended; what they would have accepted beyond is not known.
            hits: of an overlap, whether each request has a saved draft now.
            cold: it was compiled or captured first: its seconds are the price of a first use.
        """
        plan, views, k = assignment.plan, Views.of(assignment.views), self.index[assignment.plan]
        self.heard.add(plan, views, emitted, ended, self._judged(views.keys) is POOL)
        if plan.overlap and hits is not None:
            there = [hit for hit, tokens in zip(hits, emitted, strict=True) if tokens]
            self.values.saw(k, sum(there), len(there))
        self._use.spent(emitted, sum(ended or ()))
        n, ms = len(views), None if seconds is None else 1e3 * seconds
        # of plain rounds, whose time hardly changes, a part says enough
        if ms is None or plan.nodes > 1 or cold or self.rounds % self.every == 0 or self.pace.known(k, n) < KNOWN:
            made_for = n - sum(views.saved) - sum(views.missed)
            expected = self.costs.round(plan, n, views.context, made_for)
            if ms is not None:
                self.pace.observe(k, n, expected, ms, cold)
        self.probe.observe(plan, expected if ms is None else ms)

    def learn(self, drafts: bool = True, copies: bool = True) -> None:
        """Bring the estimator up to date, with the drafts that were verified and with the copies that were heard of."""
        if copies:
            self._overheard = self.rounds
        self.heard.tell(drafts, copies)
        self.estimator.settle()
        for gone in [k for k in self._gone if not self.heard.holds(k)]:
            self.estimator.forget(gone)
            self._gone.remove(gone)

    def forget(self, key: Hashable) -> None:
        """A request is gone. What is to be told of it waits for its turn: while nobody runs, the device is idle."""
        if self.heard.holds(key):
            gone = _Gone()
            self.heard.rename(key, gone)
            self.estimator.rename(key, gone)
            self._gone.append(gone)
        self.estimator.forget(key)
        if key in self._members and len(self._members) > 1:
            self.estimator.renew(POOL[0], 1 / len(self._members))
        self._members.discard(key)
        self._seen = None
        for use in self._uses.values():  # nor is it held in memory, with the keys and values that it may have kept
            if key in use.keys:
                use.keys = ()


def _alike(plan: Plan) -> str:
    """Plans of which the table may be expected to err alike."""
    return "ar" if plan.nodes == 1 else f"{plan.mode} cut" if plan.verify_length else plan.mode


def _rate(parts: list[tuple[int, list[int]]], tokens: np.ndarray, ms: np.ndarray) -> float:
    """Tokens per millisecond."""
    return sum(tokens[m, k].sum() for k, m in parts) / sum(ms[k, len(m)] for k, m in parts)
