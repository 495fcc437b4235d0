"""Trying what is not in use: rarely, within a share of the time, and less often each time that it does not pay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from selfspec.plan import Plan
from selfspec.plan.estimate import Family, families, harder

if TYPE_CHECKING:
    from selfspec.plan.planner import Planner
    from selfspec.plan.views import Views

FIRST, LAST = 32, 2048  # rounds to wait after a first probe, and at most
NEAR, OFTEN = 0.9, 32  # of the rate in use, from which on a rival is tried again and again; after so many rounds
UNTIMED = 0.06  # of its time, what a plan may be faster than foretold that never ran with so many requests
COLD = 0.25  # of the share, for shapes that have to be captured first: each takes as long as a hundred rounds


class Probe:
    """Decides when a family of drafts that is not in use gets a round.

    What is about as good as drafts in use costs next to nothing to try, and only trying tells which is better: it gets
    a round every so often. Of the others:

    It does when the best that can be hoped of it would beat what is in use: its estimate, the odds of failing lowered
    by how little, and how long ago, it was tried, and its time lowered where it is only foretold. Where even that would
    not win, as with drafts that cost more than all of them are worth, nothing is ever probed. Waits that double are
    those of about as many requests: what does not pay for one may for many.

    Args:
        share: of the time that may go into probes.
    """

    def __init__(self, share: float = 0.02):
        self.share = share
        self.spent = self.total = 0.0  # milliseconds
        self.captured = 0.0  # of those spent, in captures that were foreseen
        self.round = 0
        self.looked = 0
        self.waits: dict[tuple[int, Family], int] = {}  # by doublings of the number of requests
        self.due: dict[tuple[int, Family], int] = {}
        self.running: list[int] = []  # plans still to run
        self._marked: Plan | None = None

    def next(self, planner: Planner, views: Views) -> int | None:
        """The plan to probe now, or None."""
        n, context = len(views), views.context
        if self.running:
            return self._marked_as(planner, self.running.pop(0))
        if not self.share or not planner.rate or self.spent > self.share * self.total or self.round < self.looked + 6:
            return None
        self.looked = self.round
        for _, k, family, near in sorted(self._hopes(planner, n, context), reverse=True):
            ms = planner.costs.round(planner.plans[k], n, context) * float(planner.factors(n)[k])
            length = 2 if planner.plans[k].overlap else 1  # what an overlap saves is verified a round later
            setup = length * planner.setup(k, views)
            price = length * ms + setup
            if self.spent + price > self.share * (self.total + price):
                continue
            if setup and self.captured + setup > COLD * self.share * (self.total + setup):
                continue
            self.captured += setup
            turn = _doublings(n), family
            self.waits[turn] = min(2 * self.waits.get(turn, FIRST // 2), OFTEN if near else LAST)
            self.due[turn] = self.round + self.waits[turn]
            self.running = [k] * (length - 1)
            return self._marked_as(planner, k)
        return None

    def _hopes(self, planner: Planner, n: int, context: float) -> list[tuple[float, int, Family, bool]]:
        """Of every family whose turn it could be and that may win: tokens per ms at best, plan, family, and whether it
        is about as good as drafts in use."""
        estimator, values = planner.estimator, planner.values
        used = {f for k in planner.current for f in families(planner.plans[k])}
        doubt = estimator.doubt(next(iter(sorted(used)), None) if len(used) == 1 else None)
        shared, many = estimator.shared(), np.full(1, 1 << 30)  # [F, DEPTH]
        likely, _ = values.tokens(shared.cumprod(1)[:, None], many, many)
        tokens, hit = values.tokens(harder(shared, np.exp(-doubt)[:, None]).cumprod(1)[:, None], many, many)
        timed = [planner.pace.known(k, n) > 0 for k in range(len(planner.plans))]
        ms = values.ms(np.array([n]), context, hit)[:, 0] * planner.factors(n) * np.where(timed, 1, 1 - UNTIMED)  # [K]
        hope = n * tokens[0] / ms
        known = likely[0] / ms
        near = known > NEAR * known[list(planner.current)].max()
        if any(planner.plans[k].nodes == 1 for k in planner.current):
            near[:] = False  # drafts that do not pay are no rivals
        found: dict[Family, tuple[float, int, Family, bool]] = {}
        for k in np.argsort(-hope).tolist():
            if hope[k] <= NEAR * planner.rate:
                break
            if hope[k] <= planner.rate and not near[k]:
                continue
            family = families(planner.plans[k])[1]
            due = self.due.get((_doublings(n), family), 0)
            if family not in used and planner.plans[k].nodes > 1 and self.round >= due:
                found.setdefault(family, (float(hope[k]), k, family, bool(near[k])))
        return list(found.values())

    def _marked_as(self, planner: Planner, k: int) -> int:
        self._marked = planner.plans[k]
        return k

    def used(self, in_use: Iterable[Family], n: int) -> None:
        """Plans were chosen for n requests: their families' back-off ends."""
        for f in in_use:
            self.waits.pop((_doublings(n), f), None)
            self.due.pop((_doublings(n), f), None)

    def observe(self, plan: Plan, ms: float) -> None:
        """Book a round."""
        self.round += 1
        self.total += ms
        if plan == self._marked:
            self.spent += ms
            self._marked = None


def _doublings(n: int) -> int:
    return (n - 1).bit_length()
