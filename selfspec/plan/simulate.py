"""Policies without a GPU: a latency table and recorded acceptance stand for the model.

A simulated round costs what `Costs.round` says and emits what the trace accepted at that place of the answer. Where a
trace was recorded in the mode that is simulated, the rounds are the recorded ones, one by one; only time is predicted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

import numpy as np

from selfspec.plan import CORRECTIONS, Plan
from selfspec.plan.cost import Costs
from selfspec.plan.estimate import DEPTH, Family, families
from selfspec.plan.policy import Policy
from selfspec.plan.value import SECOND
from selfspec.plan.views import Assignment, View, Views
from selfspec.stats import Stats

LOOKUP = Family("lookup")
CHUNK = 512  # prompt positions of a prefill forward
GOLDEN = 0.618  # spreads what is right now and then evenly over a text


@dataclass(eq=False)
class Trace:
    """One prompt's acceptance.

    Attributes:
        prompt: tokens of it.
        tokens: tokens of the answer after the first, which the prefill gives.
        accepted: per family, [tokens or more] drafts that a round accepts which starts with so many tokens emitted.
        text: what tells it from other texts; None where nothing does.
    """

    prompt: int
    tokens: int
    accepted: dict[Family, np.ndarray]
    text: Hashable = None

    def cut(self, tokens: int) -> Trace:
        """The same of an answer that ends after so many tokens, the first not counted."""
        return replace(self, tokens=min(self.tokens, tokens))

    def at(self, family: Family, position: int) -> int:
        """Drafts accepted by a round of a full block."""
        return int(self.runs(family)[position])

    def knows(self, family: Family) -> bool:
        """Whether it was recorded, or what stands for it."""
        return self._told(family) is not None

    def _told(self, family: Family) -> Family | None:
        """What is not told of a smaller block is taken from the whole one, and of branches from drafts that wait for
        any bonus, which are worse."""
        hidden = "hidden" if family.source == "branch" else family.source
        near = family, family._replace(block=0), family._replace(source=hidden, block=0)
        return next((f for f in near if f in self.accepted), None)

    def runs(self, family: Family) -> np.ndarray:
        """The same of all positions.

        Raises:
            ValueError: nothing was recorded for the family.
        """
        told = self._told(family)
        if told is None:
            known = ", ".join(map(str, self.accepted))
            raise ValueError(f"the trace knows {known or 'nothing'}, not {family}: record it in that mode")
        return self.accepted[told]

    def ends(self, family: Family, depth: int) -> np.ndarray:
        """How often a round accepted exactly 0..depth drafts. [depth + 1]"""
        runs = np.minimum(self.runs(family), depth)
        return np.bincount(runs, minlength=depth + 1) / max(len(runs), 1)


class Recorder:
    """Collects traces from real rounds: call `note` for every round, then `traces`."""

    def __init__(self) -> None:
        self._prompt: dict[Hashable, int] = {}
        self._rounds: dict[Hashable, list[tuple[Family, int, int, int]]] = {}  # the last: tokens it could emit at most

    def note(self, assignment: Assignment, before: Sequence[int], emitted: Sequence[int]) -> None:
        """Book a round. Plain decoding drafts nothing: its rounds are kept apart from drafts that were refused.

        Args:
            assignment: that ran.
            before: tokens that each request's rounds had emitted until then (the prefill's token not among them).
            emitted: tokens that it emitted, bonus included.
        """
        plan = assignment.plan
        made, saved = (Family("ar"),) * 2 if plan.nodes == 1 else families(plan)
        most = min(plan.nodes, plan.block_size)
        for v, position, tokens in zip(assignment.views, before, emitted, strict=True):
            self._prompt.setdefault(v.key, v.context - position)
            rounds = self._rounds.setdefault(v.key, [])
            rounds.append((saved if v.saved else made, position, tokens, most))

    def traces(self, same: Callable[[Any], Hashable] = lambda key: key) -> list[Trace]:
        """One a request, or one for all requests that are the same text, as far as all their families go.

        A place where no round started takes what the round before it accepted. Where several did, the first counts that
        was not the last of its request: that one may have been cut by the end. So may one that took all drafts of a
        chain shorter than others of its family. (Of several texts that differ, as in bfloat16 they may, the best at
        every place would be better than any of them.)

        Args:
            same: equal for requests of one text, which several modes decoded.
        """
        texts: dict[Hashable, list[Hashable]] = {}
        widest: dict[Family, int] = {}
        for f, _, _, most in chain.from_iterable(self._rounds.values()):
            widest[f] = max(most, widest.get(f, 0))
        for key in self._rounds:
            texts.setdefault(same(key), []).append(key)
        out = []
        for text, keys in texts.items():
            rounds = [r for key in keys for r in self._rounds[key]]
            lasting = [r for key in keys for r in self._rounds[key][:-1]]
            lasting.sort(key=lambda r: r[3] <= r[2] < widest[r[0]])  # stable: the first still comes first
            found: dict[Family, dict[int, int]] = {}
            for f, p, t, _ in (*lasting, *(self._rounds[key][-1] for key in keys)):
                found.setdefault(f, {}).setdefault(p, t)
            kinds = {made_of(f) for f in found}
            total = min(max(p + t for f, p, t, _ in rounds if made_of(f) == kind) for kind in kinds)
            accepted = {}
            for family, runs in found.items():
                starts = np.array(sorted(runs))
                at = np.maximum(np.searchsorted(starts, np.arange(total), side="right") - 1, 0)
                accepted[family] = np.array([max(runs[p] - 1, 0) for p in starts.tolist()])[at]
            out.append(Trace(self._prompt[keys[0]], total, accepted, text))
        return out


def made_of(family: Family) -> Family:
    """The family whose rounds begin where this one's are missed: an overlap's have both, of whatever block."""
    return family._replace(source="known" if family.source in ("hidden", "branch") else family.source, block=0)


def of_stats(stats: Stats, family: Family, tokens: int, prompt: int = 0, seed: int = 0) -> Trace:
    """A trace whose rounds are drawn from the accepted lengths that a run counted."""
    runs = np.repeat(*np.array(sorted(stats.accepted.items())).T) - 1
    drawn = np.random.default_rng(seed).choice(np.maximum(runs, 0), tokens)
    return Trace(prompt, tokens, {family: drawn})


def bernoulli(
    rates: dict[Family, float | Sequence[float]], tokens: int, prompt: int = 0, seed: int | np.random.Generator = 0
) -> Trace:
    """A trace whose positions are accepted independently.

    Args:
        rates: conditional acceptance per family, one number or one a position, the last going on.
        tokens: of the answer.
        prompt: tokens of it.
        seed: of the draws. Families share them: a text that is hard for one drafter is hard for the others.
    """
    draws = np.random.default_rng(seed).random((tokens, DEPTH))
    accepted = {}
    for family, rate in rates.items():
        given = np.atleast_1d(np.asarray(rate, float))
        curve = np.append(given, np.full(max(DEPTH - len(given), 0), given[-1]))[:DEPTH]
        accepted[family] = np.cumprod(draws < curve, 1).sum(1)
    return Trace(prompt, tokens, accepted)


@dataclass
class Outcome:
    """What a policy did.

    Attributes:
        tokens: emitted by verification, over all requests.
        ms: of rounds.
        prefill_ms: of prefills.
        rounds: of requests (a round of n requests counts n).
        accepted: how many of those emitted k tokens.
        plans: milliseconds per plan.
        latency: of each request, in the order in which they ended, from its admission on; milliseconds.
    """

    tokens: int = 0
    ms: float = 0.0
    prefill_ms: float = 0.0
    rounds: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    plans: dict[Plan, float] = field(default_factory=dict)
    latency: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per millisecond of decoding."""
        return self.tokens / self.ms if self.ms else 0.0

    @property
    def tau(self) -> float:
        """Tokens per round."""
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass(eq=False)
class _Running:
    trace: Trace
    key: int
    admitted: float
    emitted: int = 0
    saved: bool = False
    missed: bool = False
    last: Plan | None = None  # that it ran
    rounds: int = 0
    looked: int = 0  # where the round of lookup begins that goes along its text

    @property
    def left(self) -> int:
        return self.trace.tokens - self.emitted

    def view(self) -> View:
        return View(self.key, self.trace.prompt + self.emitted, self.left, self.saved, self.missed)

    def heard(self) -> list[int]:
        """What rounds of lookup that ended since the last time would have accepted, as a session hears of them."""
        out: list[int] = []
        while self.looked < self.emitted:
            accepted = self.trace.at(LOOKUP, self.looked)
            if self.looked + accepted + 1 > self.emitted:
                break
            out.append(accepted)
            self.looked += accepted + 1
        return out


class Door(Protocol):
    """Lets requests in, as `selfspec.joining.Door` does."""

    def admit(self, slots: int, free: int, waiting: int, now: float | None = None) -> int:
        """How many that wait go in."""

    def left(self, rounds: int) -> None:
        """One has ended after so many rounds."""


def simulate(
    policy: Policy,
    costs: Costs,
    traces: Sequence[Trace],
    slots: int = 1,
    noise: float = 0.0,
    setup: float = 0.0,
    drain: bool = True,
    tokens: float = math.inf,
    lag: int = 0,
    door: Door | None = None,
    hears: int = 16,
) -> Outcome:
    """Run a queue of requests through a number of slots, all there from the start.

    Args:
        policy: `Fixed` or `Planner`; what it believes of costs may differ from `costs`.
        costs: what rounds take here.
        traces: the requests, in the order of the queue.
        slots: requests at a time.
        noise: standard deviation of the logarithm of a round's time.
        setup: milliseconds that each of the first two rounds of a plan takes longer for every number of requests up to
            a power of two (the second captures a graph).
        drain: go on when the queue is empty and slots with it; otherwise what still runs is left.
        tokens: end after so many.
        lag: rounds of the others between a request's end and the next one's beginning in its slot.
        door: says when those that wait go in; by default at once.
        hears: most requests at a time whose texts are looked through for copies, whatever runs.

    Raises:
        ValueError: the policy left a request out or gave it two plans, or a trace lacks a family that it chose.
    """
    out, clock, rng = Outcome(), 0.0, np.random.default_rng(0)
    queue = deque(_Running(t, i, 0.0) for i, t in enumerate(traces) if t.tokens > 0)
    active: list[_Running] = []
    leaving: list[int] = []  # rounds until their slots are free
    uses: Counter[tuple[Plan, int]] = Counter()
    while out.tokens < tokens and (queue or (active if drain else len(active) == slots)):
        leaving = [k for k in leaving if k and active]  # nobody waits for rounds of nobody
        free = min(slots - len(active) - len(leaving), len(queue))
        if door is not None and active:
            free = door.admit(slots, free, len(queue), clock / 1e3)
        joining = [queue.popleft() for _ in range(free)]
        if joining:
            spent = _prefill(costs, [r.trace.prompt for r in joining])
            clock, out.prefill_ms = clock + spent, out.prefill_ms + spent
            for r in joining:
                r.admitted = clock
            active += joining
        by_key: dict[Hashable, _Running] = {r.key: r for r in active}
        views = Views.of([r.view() for r in active])
        views.idle = min(slots - len(active), len(queue))
        assignments = policy.round(views)
        if Counter(k for a in assignments for k in a.keys) != Counter(by_key.keys()):
            raise ValueError("a policy has to give every running request one plan")
        for a in assignments:
            group = [by_key[v.key] for v in a.views]
            new = [not a.plan.overlap or r.last != a.plan for r in group]  # who surely has no draft
            if any(new) and any(v.saved or v.missed for v in a.views):  # one is made for those that missed too
                kept = zip(a.views, new, strict=True)
                a = replace(a, views=tuple(replace(v, saved=v.saved and not n, missed=False) for v, n in kept))
            ms = costs.round(a.plan, len(a.views), a.context, sum(not v.saved and not v.missed for v in a.views))
            ms *= float(np.exp(noise * rng.standard_normal())) if noise else 1.0
            shape = a.plan, (len(a.views) - 1).bit_length()
            cold, uses[shape] = setup > 0 and uses[shape] < 2, uses[shape] + 1
            ms += setup if cold else 0.0
            clock, out.ms = clock + ms, out.ms + ms
            out.plans[a.plan] = out.plans.get(a.plan, 0.0) + ms
            for r, v in zip(group, a.views, strict=True):
                r.saved, r.missed = v.saved, v.missed
            emitted = [_step(r, a.plan, room, costs.table.graphs) for r, room in zip(group, a.offered, strict=True)]
            out.tokens, out.rounds = out.tokens + sum(emitted), out.rounds + len(emitted)
            out.accepted.update(emitted)
            if len(active) <= hears and all(r.trace.knows(LOOKUP) for r in group):
                a = replace(a, views=Views.of(a.views).heard({id(r.key): r.heard() for r in group}))
            policy.observe(a, emitted, ms / 1e3, [not r.left for r in group], [r.saved for r in group], cold)
        leaving = [k - 1 for k in leaving]
        for r in [r for r in active if not r.left]:
            if lag:
                leaving.append(lag)
            if door is not None:
                door.left(r.rounds)
            out.latency.append(clock - r.admitted)
            policy.forget(r.key)
            active.remove(r)
    return out


def _step(r: _Running, plan: Plan, room: int, ahead: bool) -> int:
    """One request's part of a round. Returns the tokens that it emits.

    ahead: the next round starts before this one is read, so that after a miss no draft is made for it."""
    made, saved = families(plan)
    family, accepted = saved if r.saved else made, 0
    if room:
        accepted = min(r.trace.at(family, r.emitted), room)
    r.saved = plan.overlap and _kept(r, plan, accepted)
    r.emitted, r.rounds = r.emitted + accepted + 1, r.rounds + 1
    r.missed, r.last = ahead and plan.overlap and not r.saved, plan
    return accepted + 1


def _kept(r: _Running, plan: Plan, accepted: int) -> bool:
    """Whether a group was kept for a run of this length: the likeliest ones have one. A miss has verified nothing, so
    its one group fits."""
    if plan.kept is None or r.missed:
        return True
    likely = _likely(r.trace, plan)
    if plan.branches:  # a trace does not tell of second candidates
        right = r.emitted * GOLDEN % 1 < SECOND
        return accepted == plan.nodes - 1 or (right and accepted in likely[:CORRECTIONS])
    return accepted in likely[: plan.kept]


@lru_cache(4096)
def _likely(trace: Trace, plan: Plan) -> list[int]:
    """Accepted lengths of saved drafts, the commonest first."""
    return np.argsort(-trace.ends(families(plan)[1], plan.block_size - 1), kind="stable").tolist()


def _prefill(costs: Costs, prompts: list[int]) -> float:
    """Milliseconds of prefilling prompts together, chunk by chunk."""
    spent = 0.0
    for done in range(0, max(prompts), CHUNK):
        rows = min(CHUNK, max(prompts) - done)
        spent += float(costs.table.time("clean", rows, sum(p > done for p in prompts), done))
    return spent
