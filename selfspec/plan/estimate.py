"""How many drafts will be accepted: per request and position, from recent rounds.

c[j] is the chance that draft j is accepted when all before it were. Three levels, each shrunk towards the one above:
what the adapter promises; all requests, per kind of draft; this request. Between levels the shape of the curve is kept
and the odds of failing move by one factor, how much harder this text is (a Rasch model): failures over successes, over
what the curve above expected of the same trials. So one number per request says most of what its few rounds can say,
and counts per position correct the shape where there are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from selfspec.plan import Plan

DEPTH = 15  # drafts of the largest block; a tree is no deeper
LEAST, MOST = 1e-3, 0.999


class Family(NamedTuple):
    """Drafts that are accepted alike, whatever the block: cutting a block costs its early positions almost nothing.

    Attributes:
        source: "known" (the bonus in slot 0), "hidden" (a mask there), "loop" or "lookup".
        adapter: index.
        nodes: of a tree, 0 for a chain; "accepted at position j" then means by any branch.
    """

    source: str
    adapter: int = 0
    nodes: int = 0


def families(plan: Plan) -> tuple[Family, Family]:
    """The families of a plan's rounds: with a draft made for the round, and with one saved by an overlapped round."""
    if plan.lookup:
        return Family("lookup"), Family("lookup")
    nodes = plan.tree_nodes if plan.tree else 0
    made = Family("loop" if plan.loop else "known", plan.adapter, nodes)
    return made, Family("hidden", plan.adapter, nodes) if plan.overlap else made


class Level:
    """How many times the expected odds of failing were seen; fading, and shrunk towards 1."""

    def __init__(self, fade: float):
        self.fade = fade
        self.failed = self.expected = self.trials = 0.0

    def add(self, failed: float, expected: float, trials: float) -> None:
        """Book trials: how many failed, and how many should have."""
        self.failed = self.fade * self.failed + failed
        self.expected = self.fade * self.expected + expected
        self.trials = self.fade * self.trials + trials

    @property
    def odds(self) -> float:
        """The factor."""
        share = (self.expected + 0.5) / (self.trials + 1)
        return (self.failed + 3 * share) / (self.trials - self.failed + 3 * (1 - share)) * (1 - share) / share


def harder(curve: np.ndarray, odds: np.ndarray | float) -> np.ndarray:
    """A curve whose odds of failing are multiplied."""
    return curve / (curve + (1 - curve) * odds)


class Counts:
    """Successes and trials per position, and the level over all positions."""

    def __init__(self, fade: float):
        self.level, self.fade = Level(fade), fade
        self.won, self.tried = np.zeros(DEPTH), np.zeros(DEPTH)

    def add(self, won: np.ndarray, tried: np.ndarray, prior: np.ndarray) -> None:
        """Book rounds of several requests. [n, DEPTH] each; the prior [DEPTH] as it was when they ran."""
        self.won = self.fade * self.won + won.sum(0)
        self.tried = self.fade * self.tried + tried.sum(0)
        self.level.add(*map(sum, _summed(won, tried, prior)))

    def estimate(self, prior: np.ndarray) -> np.ndarray:
        """The curve now. [DEPTH]"""
        level = harder(prior, self.level.odds)
        return np.clip((self.won + 4 * level) / (self.tried + 4), LEAST, MOST)


class Estimator:
    """Conditional acceptance of every running request. Host side; a round costs the same however long the text is.

    Args:
        priors: per adapter, the acceptance to begin with: one number, or one a position.
        fade: how a request's counts fade per round.
        window: rounds that are set against the counts; where they contradict them, the counts begin anew from them.
    """

    def __init__(self, priors: Sequence[float | Sequence[float]] = (0.7,), fade: float = 0.95, window: int = 6):
        self.priors = [_curve(p) for p in priors]
        self.fade, self.window = fade, window
        self.shared: dict[Family, Counts] = {}
        self.own: dict[Hashable, _Own] = {}
        self.effect = _Effect()

    def shared_curve(self, family: Family) -> np.ndarray:
        """Acceptance of a family over all requests. [DEPTH]"""
        prior = self._prior(family)
        counts = self.shared.get(family)
        return prior if counts is None else counts.estimate(prior)

    def _prior(self, family: Family) -> np.ndarray:
        """What to expect of a family before it was tried, from its nearest kin."""
        if family.source == "lookup":
            return _curve(0.3)
        if family.nodes:  # further candidates catch a share of the failures that grows with the logarithm of the nodes
            chain = self.shared_curve(family._replace(nodes=0))
            return np.clip(chain + (1 - chain) * 0.04 * np.log2(family.nodes), LEAST, MOST)
        if family.source == "known":
            return self.priors[family.adapter]
        known = self.shared_curve(family._replace(source="known"))
        return harder(known, {"hidden": 1.6, "loop": 0.9}[family.source])

    def curves(self, keys: Sequence[Hashable], family: Family, features: np.ndarray | None = None) -> np.ndarray:
        """Conditional acceptance of each request.

        Args:
            keys: the requests.
            family: kind of draft.
            features: [n] what is known before the draft and says how hard the text is (the verifier's mean entropy over
                the last round as in RecGuide, or a negated mean top-2 margin); nan where it is not known.

        Returns:
            [n, DEPTH]
        """
        shared = self.shared_curve(family)
        odds = self._odds(family, features, len(keys))
        out = np.empty((len(keys), DEPTH))
        for i, key in enumerate(keys):
            own = self.own.get(key)
            out[i] = harder(shared, odds[i]) if own is None else own.curve(family, shared, odds[i])
        return np.clip(out, LEAST, MOST)

    def observe(
        self,
        keys: Sequence[Hashable],
        family: Family,
        offered: Sequence[int],
        accepted: Sequence[int],
        features: np.ndarray | None = None,
    ) -> None:
        """Book a round.

        Args:
            keys: the requests.
            family: kind of draft that was verified.
            offered: drafts verified (a tree: its depth), per request. A round that ended its text offered no more than
                it could still take.
            accepted: drafts accepted, per request.
            features: as in `curves`, what they were before the draft.
        """
        prior, base, surprise = self._prior(family), self.shared_curve(family), np.zeros(len(keys))
        d, a = np.minimum(offered, DEPTH), np.minimum(accepted, DEPTH)
        position = np.arange(DEPTH)
        tried = position < np.minimum(a + 1, d)[:, None]  # [n, DEPTH]
        won = position < np.minimum(a, d)[:, None]
        odds = self._odds(family, features, len(keys))
        sums = zip(*_summed(won, tried, harder(base, odds[:, None])), strict=True)
        for i, (key, (failed, expected, trials)) in enumerate(zip(keys, sums, strict=True)):
            own = self._own(key)
            seen = _Round(family, won[i], tried[i], failed, expected, trials)
            surprise[i] = seen.failed - own.foreseen(seen)
            own.add(seen)
        if family.source != "lookup":
            self.effect.learn(features, surprise)
        if family not in self.shared:
            self.shared[family] = Counts(0.98)
        self.shared[family].add(won, tried, prior)

    def tau(self, family: Family) -> float:
        """Tokens that a full round of the family emits, over all requests."""
        return 1 + float(np.cumprod(self.shared_curve(family)).sum())

    def forget(self, key: Hashable) -> None:
        """A request is gone."""
        self.own.pop(key, None)

    def _odds(self, family: Family, features: np.ndarray | None, n: int) -> np.ndarray:
        """What the features say. [n]"""
        return np.ones(n) if family.source == "lookup" else self.effect.factor(features, n)

    def _own(self, key: Hashable) -> _Own:
        if key not in self.own:
            self.own[key] = _Own(self.fade, self.window)
        return self.own[key]


class _Round(NamedTuple):
    """What one round showed of one request: [DEPTH] arrays, and sums with what the shared curve expected."""

    family: Family
    won: np.ndarray
    tried: np.ndarray
    failed: float
    expected: float
    trials: float


class _Own:
    """One request: how hard its text is, and counts per family and position."""

    def __init__(self, fade: float, window: int):
        self.fade = fade
        self.recent: deque[_Round] = deque(maxlen=window)
        self.clear()

    def clear(self) -> None:
        self.level = Level(self.fade)
        self.counts: dict[Family, tuple[np.ndarray, np.ndarray]] = {}

    def curve(self, family: Family, shared: np.ndarray, odds: float) -> np.ndarray:
        """[DEPTH]"""
        prior = shared if family.source == "lookup" else harder(shared, self.level.odds * odds)
        if family not in self.counts:
            return prior
        won, tried = self.counts[family]
        return (won + 4 * prior) / (tried + 4)

    def foreseen(self, seen: _Round) -> float:
        """Failures among a round's trials, by what was known before it."""
        return seen.trials * _share(seen.expected, seen.trials, self.level.odds)

    def add(self, seen: _Round) -> None:
        self.recent.append(seen)
        self._book(seen)
        if len(self.recent) == self.recent.maxlen and self._contradicted():
            self.clear()
            for earlier in self.recent:
                self._book(earlier)

    def _book(self, seen: _Round) -> None:
        if seen.family.source != "lookup":
            self.level.add(seen.failed, seen.expected, seen.trials)
        won, tried = self.counts.get(seen.family, (0.0, 0.0))
        self.counts[seen.family] = self.fade * won + seen.won, self.fade * tried + seen.tried

    def _contradicted(self) -> bool:
        """Whether the window failed much more, or less, often than the counts say (2.5 standard deviations)."""
        drafted = [r for r in self.recent if r.family.source != "lookup"]
        failed, expected = sum(r.failed for r in drafted), sum(r.expected for r in drafted)
        trials = sum(r.trials for r in drafted)
        share = _share(expected, trials, self.level.odds)
        return abs(failed - trials * share) > 2.5 * (trials * share * (1 - share) + 0.5) ** 0.5


def _share(expected: float, trials: float, odds: float) -> float:
    """The expected share of failures, its odds multiplied."""
    share = expected / trials if trials else 0.0
    return share * odds / (1 - share + share * odds)


def _summed(won: np.ndarray, tried: np.ndarray, curve: np.ndarray) -> tuple[list[float], list[float], list[float]]:
    """Each request's failures, failures that the curve expected, and trials."""
    return (tried & ~won).sum(1).tolist(), (tried * (1 - curve)).sum(1).tolist(), tried.sum(1).tolist()


class _Effect:
    """How a feature moves the odds of failing: exp(weight * standardised feature), learnt online over all requests."""

    def __init__(self) -> None:
        self.weight = self.mean = 0.0
        self.var, self.seen = 1.0, 0

    def _standard(self, features: np.ndarray | None, n: int) -> np.ndarray:
        if features is None:
            return np.zeros(n)
        z = (np.asarray(features, float) - self.mean) / max(self.var, 1e-12) ** 0.5
        return np.clip(np.nan_to_num(z, nan=0.0), -3, 3)

    def factor(self, features: np.ndarray | None, n: int) -> np.ndarray:
        """[n]"""
        return np.exp(np.clip(self.weight * self._standard(features, n), -1.5, 1.5))

    def learn(self, features: np.ndarray | None, surprise: np.ndarray) -> None:
        """One step up the likelihood; surprise [n] is failures minus what was expected."""
        if features is None or np.isnan(features).all():
            return
        self.weight += 0.05 * float(np.mean(self._standard(features, len(surprise)) * surprise))
        self.seen += 1
        rate = max(1 / self.seen, 0.01)
        known = np.asarray(features, float)[~np.isnan(features)]
        self.var += rate * (float(np.mean((known - self.mean) ** 2)) - self.var)
        self.mean += rate * (float(known.mean()) - self.mean)


def _curve(value: float | Sequence[float]) -> np.ndarray:
    """[DEPTH], the last value going on."""
    given = np.atleast_1d(np.asarray(value, float))[:DEPTH]
    return np.clip(np.concatenate([given, np.full(DEPTH - len(given), given[-1])]), LEAST, MOST)
