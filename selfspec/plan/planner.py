"""The planner: before every round it gives each request a plan, and learns from what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from selfspec.plan import Plan
from selfspec.plan.allot import allot, longest, partition
from selfspec.plan.cost import Costs, Pace
from selfspec.plan.estimate import DEPTH, Estimator, families
from selfspec.plan.probe import Probe
from selfspec.plan.value import Values

PACED = 3  # plain rounds at the start; the first two of a shape compile and capture


@dataclass(frozen=True)
class View:
    """What a planner sees of a running request before a round.

    Attributes:
        key: the request.
        context: committed positions.
        left: tokens that it may still emit.
        saved: whether an overlapped round left it a draft.
        lookup: tokens that its own text suggests; None where nobody looked.
        feature: how hard its text is, see `Estimator.curves`; None where it is not known.
    """

    key: Hashable
    context: int
    left: int = 1 << 30
    saved: bool = False
    lookup: int | None = None
    feature: float | None = None


@dataclass(frozen=True)
class Assignment:
    """Requests that run a round together."""

    views: tuple[View, ...]
    plan: Plan

    @property
    def keys(self) -> list[Hashable]:
        """The requests."""
        return [v.key for v in self.views]

    @property
    def context(self) -> float:
        """Mean committed positions."""
        return sum(v.context for v in self.views) / len(self.views)

    @property
    def offered(self) -> list[int]:
        """Drafts that each request can accept; a tree's depth counts, not its nodes."""
        p = self.plan
        depth = (p.block_size if p.tree else p.nodes) - 1
        looked = [depth if v.lookup is None or not p.lookup else min(depth, v.lookup) for v in self.views]
        return [max(min(d, v.left - 1), 0) for d, v in zip(looked, self.views, strict=True)]


class Policy(Protocol):
    """What chooses plans: `Fixed`, `Planner`.

    Attributes:
        plans: all that it may choose.
    """

    plans: list[Plan]

    def round(self, active: Sequence[View]) -> list[Assignment]:
        """A plan for every running request; requests of one assignment share their forwards."""

    def prune(self, assignment: Assignment, survival: np.ndarray) -> list[int]:
        """Drafts to verify per request, once the draft's confidences are known."""

    def observe(
        self,
        assignment: Assignment,
        emitted: Sequence[int],
        seconds: float | None = None,
        ended: Sequence[bool] | None = None,
        hits: Sequence[bool] | None = None,
    ) -> None:
        """What came of an assignment."""

    def forget(self, key: Hashable) -> None:
        """A request is gone."""


class Fixed:
    """Always the same plan."""

    def __init__(self, plan: Plan):
        self.plans = [plan]

    def round(self, active: Sequence[View]) -> list[Assignment]:
        """All requests together."""
        return [Assignment(tuple(active), self.plans[0])] if active else []

    def prune(self, assignment: Assignment, survival: np.ndarray) -> list[int]:
        """Everything is verified."""
        return assignment.offered

    def observe(self, assignment, emitted, seconds=None, ended=None, hits=None) -> None:
        """Nothing is learnt."""

    def forget(self, key: Hashable) -> None:
        """Nothing was kept."""


@dataclass(frozen=True)
class Decision:
    """One entry of the log.

    Attributes:
        number: of the round.
        context: mean committed positions.
        tokens: [K] expected per round over all requests, of every plan in the menu.
        ms: [K] expected per round.
        chosen: plan and number of requests of each assignment.
        why: "pace" (plain decoding first, to see what its rounds take), "first", "keep", "hold" (a better one is not
            better by enough, or for long enough), "switch" or "probe".
    """

    number: int
    context: float
    tokens: np.ndarray
    ms: np.ndarray
    chosen: tuple[tuple[Plan, int], ...]
    why: str


class Planner:
    """Chooses, every few rounds, the plans with the most expected tokens per millisecond: estimate x latency table.

    A batch may be split over two shapes where the table says that their two forwards pay. A change needs gains that add
    up to `patience` over the comparisons since the last one (a third at once, 2 % only if they last), and comes at
    most every `dwell` rounds, so that graphs are not thrashed; plain decoding may come back at once. Modes not in use
    are probed within a share of the time (`Probe`). Plain decoding is in the menu like any other plan and is preferred
    within 1.5 %: where drafts do not pay, it wins.

    Args:
        costs: the latency table.
        plans: what to choose from (`selfspec.plan.menu`); plain decoding is one of them.
        estimator: of acceptance.
        patience: relative gains that have to add up before a change; 1 % of each comparison does not count.
        dwell: rounds between two changes.
        every: rounds between two comparisons while the same requests run.
        probe: share of the time for modes not in use.
        split: let a batch run as two rounds of different shapes.
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
        patience: float = 0.3,
        dwell: int = 4,
        every: int = 4,
        probe: float = 0.02,
        split: bool = True,
        packed: bool = False,
    ):
        if not any(p.nodes == 1 for p in plans):
            raise ValueError("the menu needs plain decoding, Plan('ar', 1), to fall back to")
        self.costs, self.plans, self.split, self.packed = costs, list(plans), split, packed
        kinds = [f for p in plans for f in families(p)]
        self.estimator = estimator or Estimator(kinds, [0.7] * len(costs.entries))
        self.values = Values(self.plans, self.estimator.index, costs)
        self.index = {p: k for k, p in enumerate(self.plans)}
        self.patience, self.dwell, self.every = patience, dwell, every
        self.pace, self.probe = Pace(len(self.plans)), Probe(probe)
        self.log: deque[Decision] = deque(maxlen=512)
        self.rounds = self.switches = 0
        self.rate = 0.0
        self.current: tuple[int, ...] = ()  # plans in use
        self._plain = next(k for k, p in enumerate(self.plans) if p.nodes == 1)
        self._since = self._lead = 0.0  # rounds since they were chosen; what was foregone since then
        self._last: list[tuple[int, list[int]]] = []
        self._keys: list[Hashable] = []

    def round(self, active: Sequence[View]) -> list[Assignment]:
        """A plan for every running request.

        Args:
            active: the running requests, each once.

        Returns:
            Assignments that hold every request once; each is a round of its own.
        """
        if not active:
            return []
        keys = [v.key for v in active]
        self.rounds += 1
        self._since += 1
        tail = all(v.left < DEPTH for v in active)  # caps bite, and change from round to round
        settled = self._since > 4 * self.dwell and int(self._since) % self.every
        if keys == self._keys and settled and not tail and not self.probe.running:
            return self._assigned(active, self._last)
        n, context = len(active), sum(v.context for v in active) / len(active)
        features = np.array([np.nan if v.feature is None else v.feature for v in active])
        left = np.array([v.left for v in active])
        offers = np.array([DEPTH if v.lookup is None else v.lookup for v in active])
        tokens, hit = self.values.tokens(self.estimator.all(keys, features).cumprod(2), left, offers)
        ms = self.values.ms(n, context, hit) * self.pace.factors(n)[:, None]
        # a few plain rounds first: how much longer than the table says are rounds of what all is measured against?
        probed = self._plain if self.rounds <= PACED else self.probe.next(self, n, context)
        if probed is not None:
            parts, why = [(probed, list(range(n)))], "pace" if self.rounds <= PACED else "probe"
            self._keys = []
        else:
            parts, why = self._best(tokens, ms)
            self._last, self._keys = parts, keys
        chosen = tuple((self.plans[k], len(members)) for k, members in parts)
        self.log.append(Decision(self.rounds, context, tokens.sum(0), ms[:, n], chosen, why))
        return self._assigned(active, parts)

    def _assigned(self, active: Sequence[View], parts: list[tuple[int, list[int]]]) -> list[Assignment]:
        return [Assignment(tuple(active[i] for i in members), self.plans[k]) for k, members in parts]

    def _best(self, tokens: np.ndarray, ms: np.ndarray) -> tuple[list[tuple[int, list[int]]], str]:
        """The parts to run, and why: the best ones, or those in use where the best gain too little."""
        n, tokens = len(tokens), tokens.copy()
        tokens[:, self._plain] *= 1.015  # what is gained by less is lost to drafts that do worse than expected
        # two shapes are compared among those that do best alone, and those that suit somebody best
        alone = tokens / ms[:, n]  # [n, K]
        few = {self._plain, *np.argsort(-alone.sum(0))[:4].tolist(), *np.argmax(alone, 1)[:2].tolist()}
        best = partition(tokens, ms, sorted(few), self.split)
        rate = _rate(best, tokens, ms)
        if self.current:
            kept = partition(tokens, ms, self.current, self.split)
            held = _rate(kept, tokens, ms)
            self._lead = max(self._lead + min(rate / held - 1.01, 1.0), 0.0)
            early = self._since < self.dwell and best != [(self._plain, list(range(n)))]  # falling back needs no graph
            if self._lead < self.patience or early:
                self.rate = held
                return kept, "keep" if rate <= held * 1.01 else "hold"
        why = "switch" if self.current else "first"
        chosen = tuple(sorted({k for k, _ in best}))
        self.switches += bool(self.current) and chosen != self.current
        self.current, self._since, self._lead, self.rate = chosen, 0, 0.0, rate
        self.probe.used({f for k in chosen for f in families(self.plans[k])})
        return best, why

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

        pace = float(self.pace.factors(n)[self.index[assignment.plan]])

        def cost(rows: float) -> float:
            return pace * float(self.costs.table.time("clean", rows, n, context))

        if self.packed:
            return allot(seen, lambda rows: cost(rows / n), self.rate).tolist()
        sizes = sorted({p.nodes for p in self.plans if not p.tree and p.nodes <= depth + 1} | {depth + 1})
        return [longest(seen, sizes, cost, self.rate) - 1] * n

    def observe(
        self,
        assignment: Assignment,
        emitted: Sequence[int],
        seconds: float | None = None,
        ended: Sequence[bool] | None = None,
        hits: Sequence[bool] | None = None,
    ) -> None:
        """Learn from a round.

        Args:
            assignment: that ran.
            emitted: tokens that each request emitted, bonus included.
            seconds: that it took; None where nobody measured.
            ended: requests that ended; what they would have accepted beyond is not known.
            hits: of an overlap, whether each request has a saved draft now.
        """
        plan, views = assignment.plan, assignment.views
        offered, accepted = list(assignment.offered), [max(e - 1, 0) for e in emitted]
        if ended is not None:
            offered = [min(o, a) if e else o for o, a, e in zip(offered, accepted, ended, strict=True)]
        made, saved = families(plan)
        for family, want in ((made, False), (saved, True)) if plan.overlap else ((made, None),):
            who = [i for i, v in enumerate(views) if want is None or v.saved == want]
            if who and any(offered[i] for i in who):
                features = np.array([np.nan if views[i].feature is None else views[i].feature for i in who], float)
                picked = [offered[i] for i in who], [accepted[i] for i in who]
                self.estimator.observe([views[i].key for i in who], family, *picked, features)
        if plan.overlap and hits is not None:
            self.values.saw(self.index[plan], sum(hits), len(hits))
        missed = sum(not v.saved for v in views)
        expected = self.costs.round(plan, len(views), assignment.context, missed)
        if seconds is not None:
            self.pace.observe(self.index[plan], len(views), expected, 1e3 * seconds)
        self.probe.observe(plan, expected if seconds is None else 1e3 * seconds)

    def forget(self, key: Hashable) -> None:
        """A request is gone."""
        self.estimator.forget(key)
        if key in self._keys:  # nor is it held in memory, with the keys and values that it may have kept
            self._keys = []


def _rate(parts: list[tuple[int, list[int]]], tokens: np.ndarray, ms: np.ndarray) -> float:
    """Tokens per millisecond."""
    return sum(tokens[m, k].sum() for k, m in parts) / sum(ms[k, len(m)] for k, m in parts)
