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
from functools import cache
from typing import NamedTuple

import numpy as np

from selfspec.plan import BLOCKS, Plan

DEPTH = 15  # drafts of the largest block; a tree is no deeper
OWN, SHAPE = 6.0, 16.0  # trials that a text's own odds, and its own curve's shape, are set against
KIN = 40.0  # trials that all of smaller blocks count for in the whole one
LEAST, MOST = 1e-3, 0.999
FADE = 0.998  # of counts over all requests, per round


class Family(NamedTuple):
    """Drafts that are accepted alike.

    Some adapters lose little by blocks smaller than the one that they were trained for, others a sixth of their tokens.

    Attributes:
        source: "known" (the bonus in slot 0), "hidden" (a mask there), "loop" or "lookup"; "ar" in traces only.
        adapter: index.
        nodes: of a tree, 0 for a chain; "accepted at position j" then means by any branch.
        block: of a chain that is drafted in one pass in a smaller block than the largest; 0 stands for whole ones.
    """

    source: str
    adapter: int = 0
    nodes: int = 0
    block: int = 0


@cache
def families(plan: Plan) -> tuple[Family, Family]:
    """The families of a plan's rounds: with a draft made for the round, and with one saved by an overlapped round."""
    if plan.lookup:
        return Family("lookup"), Family("lookup")
    nodes = plan.tree_nodes if plan.tree else 0
    chain = plan.drafts and not (plan.tree or plan.loop)
    cut = plan.block_size if chain and plan.block_size < BLOCKS[-1] else 0
    made = Family("loop" if plan.loop else "known", plan.adapter, nodes, cut)
    return made, Family("hidden", plan.adapter, nodes) if plan.overlap else made


class Estimator:
    """Conditional acceptance of every running request. Host side; a round costs the same however long the text is.

    Args:
        kinds: families to keep; the chains that trees are judged by are added.
        priors: per adapter, the acceptance to begin with: one number, or one a position.
        fade: how a request's counts fade per round.
        window: rounds that are set against the counts; where they contradict them, the counts begin anew from them.
    """

    def __init__(
        self,
        kinds: Sequence[Family] = (),
        priors: Sequence[float | Sequence[float]] = (0.7,),
        fade: float = 0.95,
        window: int = 6,
    ):
        widest: dict[int, int] = {}  # of adapters that know no larger block: for them it is whole
        for k in kinds:
            if k.source == "known" and not k.nodes:
                widest[k.adapter] = max(widest.get(k.adapter, 0), k.block or BLOCKS[-1])
        whole = {k for k in kinds if k.block and k.block == widest[k.adapter]}
        kinds = [k for k in kinds if k not in whole]
        kin = [Family("known", i) for i in range(len(priors))] + [k._replace(nodes=0) for k in kinds] + list(kinds)
        self.kinds = sorted(set(kin), key=_stage)  # parents first
        self.index = {k: i for i, k in enumerate(self.kinds)}
        self.index |= {k: self.index[k._replace(block=0)] for k in whole}
        self.fade, self.window = fade, window
        self.effect = _Effect()
        self.own: dict[Hashable, _Own] = {}
        self._lookup = np.array([k.source == "lookup" for k in self.kinds])
        f = len(self.kinds)
        self._start = np.array([_curve(0.3 if k.source == "lookup" else priors[k.adapter]) for k in self.kinds])
        self.won, self.tried = np.zeros((f, DEPTH)), np.zeros((f, DEPTH))  # fading, over all requests
        self._sums = np.zeros((f, 3))  # failures, failures that the prior curve expected, trials
        self._kin = np.zeros((f, 3))  # the same of smaller blocks, for the whole one that they are cut from
        self._lately = np.zeros(3)  # failures, failures that the shared curves expected, trials of all drafts
        stages = np.array([_stage(k)[0] for k in self.kinds])
        self._stages = [np.flatnonzero(stages == s) for s in range(3)]
        self.parent = np.array([self.index[_parent(k)] for k in self.kinds])
        odds = {"hidden": 1.6, "loop": 0.9}
        self._odds = np.array([odds.get(k.source, 1.0) for k in self.kinds])[:, None]
        # further candidates catch a share of the failures that grows with the logarithm of the nodes
        self._catch = np.array([0.04 * np.log2(k.nodes) if k.nodes else 0.0 for k in self.kinds])[:, None]
        self._curves: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def now(self) -> float:
        """How many times the usual odds of failing texts have lately: what a new request is taken for."""
        failed, expected, trials = self._lately.tolist()
        return _odds(failed, expected, trials, weight=10.0)

    def shared(self) -> tuple[np.ndarray, np.ndarray]:
        """Priors and curves of all families over all requests. [F, DEPTH] each"""
        if self._curves is None:
            prior, out = self._start.copy(), np.empty_like(self._start)
            kin = self._kin * np.minimum(1.0, KIN / np.maximum(self._kin[:, 2:], KIN))  # a start, soon outweighed
            odds = _odds(*(self._sums + kin).T)[:, None]
            for stage, at in enumerate(self._stages):
                if stage == 1:
                    prior[at] = harder(out[self.parent[at]], self._odds[at])
                if stage == 2:
                    chain = out[self.parent[at]]
                    prior[at] = np.clip(chain + (1 - chain) * self._catch[at], LEAST, MOST)
                level = harder(prior[at], odds[at])
                out[at] = np.clip((self.won[at] + 24 * level) / (self.tried[at] + 24), LEAST, MOST)
            self._curves = prior, out
        return self._curves

    def all(self, keys: Sequence[Hashable], features: np.ndarray | None = None) -> np.ndarray:
        """Conditional acceptance of each request in every family.

        Args:
            keys: the requests.
            features: [n] what is known before the draft and says how hard the text is (the verifier's mean entropy over
                the last round as in RecGuide, or a negated mean top-2 margin); nan where it is not known.

        Returns:
            [F, n, DEPTH]
        """
        n, (_, shared) = len(keys), self.shared()
        mine, now = [self.own.get(k) for k in keys], self.now
        odds = np.ones((len(self.kinds), n))
        odds[~self._lookup] = self.effect.factor(features, n) * [now if o is None else o.odds(now) for o in mine]
        level = harder(shared[:, None], odds[:, :, None])
        none = np.zeros((2, *self.won.shape))
        won, tried = np.stack([none if o is None else o.counts for o in mine], 2)
        return np.clip((won + SHAPE * level) / (tried + SHAPE), LEAST, MOST)

    def curves(self, keys: Sequence[Hashable], family: Family, features: np.ndarray | None = None) -> np.ndarray:
        """The same of one family. [n, DEPTH]"""
        return self.all(keys, features)[self.index[family]]

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
            keys: the requests; one key for all books their rounds as one.
            family: kind of draft that was verified.
            offered: drafts verified (a tree: its depth), per request. A round that ended its text offered no more than
                it could still take.
            accepted: drafts accepted, per request.
            features: as in `all`, what they were before the draft.
        """
        f, n = self.index[family], len(keys)
        priors, shared = self.shared()
        d, a = np.minimum(offered, DEPTH), np.minimum(accepted, DEPTH)
        position = np.arange(DEPTH)
        tried = position < np.minimum(a + 1, d)[:, None]  # [n, DEPTH]
        won = position < np.minimum(a, d)[:, None]
        if n > 1 and len(set(keys)) == 1:
            keys, n, won, tried = keys[:1], 1, won.sum(0, keepdims=True), tried.sum(0, keepdims=True)
            features = None if features is None or np.isnan(features).all() else np.nanmean(features, keepdims=True)
        odds = np.ones(n) if self._lookup[f] else self.effect.factor(features, n)
        failed, trials = tried.sum(1) - won.sum(1), tried.sum(1)
        expected = (tried * (1 - harder(shared[f], odds[:, None]))).sum(1)
        surprise, now = np.zeros(n), self.now
        for i, sums in enumerate(zip(failed.tolist(), expected.tolist(), trials.tolist(), strict=True)):
            own = self.own.setdefault(keys[i], _Own(self.fade, self.window, self.won.shape))
            surprise[i] = own.add(_Round(f, won[i], tried[i], *sums, not self._lookup[f]), now)
        if not self._lookup[f]:
            self.effect.learn(features, surprise)
            self._lately = 0.97 * self._lately + (failed.sum(), expected.sum(), trials.sum())
        by_prior = float((tried * (1 - priors[f])).sum())
        self.won[f] = FADE * self.won[f] + won.sum(0)
        self.tried[f] = FADE * self.tried[f] + tried.sum(0)
        self._sums[f] = FADE * self._sums[f] + (failed.sum(), by_prior, trials.sum())
        if self.kinds[f].block:
            whole = self.parent[f]
            by_start = float((tried * (1 - self._start[whole])).sum())
            self._kin[whole] = FADE * self._kin[whole] + (failed.sum(), by_start, trials.sum())
        self._curves = None

    def tau(self, family: Family) -> float:
        """Tokens that a full round of the family emits, over all requests."""
        return 1 + float(np.cumprod(self.shared()[1][self.index[family]]).sum())

    def renew(self, key: Hashable, share: float) -> None:
        """A share of the requests that a key stands for have left; of the next ones no more is known than of any."""
        own = self.own.get(key)
        if own is not None:
            own.scale(1 - share)

    def forget(self, key: Hashable) -> None:
        """A request is gone: the next one's text may be of another kind."""
        self.own.pop(key, None)
        self._lately *= 0.1


def harder(curve: np.ndarray, odds: np.ndarray | float) -> np.ndarray:
    """A curve whose odds of failing are multiplied."""
    return curve / (curve + (1 - curve) * odds)


def _odds(failed, expected, trials, target=1.0, weight=6.0):
    """How many times the expected odds of failing were seen, shrunk towards a target by so many trials."""
    share = (expected + 0.5) / (trials + 1)
    prior = share * target / (1 - share + share * target)
    return (failed + weight * prior) / (trials - failed + weight * (1 - prior)) * (1 - share) / share


def _stage(family: Family) -> tuple[int, Family]:
    return (2 if family.nodes else 1 if family.block or family.source in ("hidden", "loop") else 0), family


def _parent(family: Family) -> Family:
    """The kin that a family is judged by until it has been tried."""
    if family.nodes:
        return family._replace(nodes=0)
    return family._replace(source="known", block=0) if family.source in ("hidden", "loop") else family._replace(block=0)


class _Round(NamedTuple):
    """What one round showed of one request: [DEPTH] arrays, and sums with what the shared curve expected."""

    family: int
    won: np.ndarray
    tried: np.ndarray
    failed: float
    expected: float
    trials: float
    drafted: bool  # rather than looked up


class _Own:
    """One request: how hard its text is, and counts [2 (won, tried), F, DEPTH]."""

    def __init__(self, fade: float, window: int, shape: tuple[int, ...]):
        self.fade, self.recent = fade, deque[_Round](maxlen=window)
        self.counts = np.zeros((2, *shape))
        self.failed = self.expected = self.trials = 0.0

    def odds(self, target: float) -> float:
        """How many times the shared odds of failing this text has; about what others have lately, until it shows."""
        return _odds(self.failed, self.expected, self.trials, target, OWN)

    def add(self, seen: _Round, target: float) -> float:
        """Book a round. Returns its failures beyond what was foreseen."""
        foreseen = _foreseen(seen.expected, seen.trials, self.odds(target))[0]
        self.recent.append(seen)
        self._book(seen)
        if len(self.recent) == self.recent.maxlen and self._contradicted(target):
            self.counts[:] = 0.0
            self.failed = self.expected = self.trials = 0.0
            for earlier in self.recent:
                self._book(earlier)
        return seen.failed - foreseen

    def scale(self, factor: float) -> None:
        """Let what was booked count less."""
        self.counts *= factor
        self.failed, self.expected, self.trials = (factor * x for x in (self.failed, self.expected, self.trials))

    def _book(self, seen: _Round) -> None:
        if seen.drafted:
            self.failed = self.fade * self.failed + seen.failed
            self.expected = self.fade * self.expected + seen.expected
            self.trials = self.fade * self.trials + seen.trials
        self.counts[:, seen.family] *= self.fade
        self.counts[0, seen.family] += seen.won
        self.counts[1, seen.family] += seen.tried

    def _contradicted(self, target: float) -> bool:
        """Whether the window failed much more, or less, often than the counts say (2.75 standard deviations)."""
        failed = expected = trials = 0.0
        for r in self.recent:
            if r.drafted:
                failed, expected, trials = failed + r.failed, expected + r.expected, trials + r.trials
        foreseen, variance = _foreseen(expected, trials, self.odds(target))
        return abs(failed - foreseen) > 2.75 * (variance + 0.5) ** 0.5


def _foreseen(expected: float, trials: float, odds: float) -> tuple[float, float]:
    """Mean and variance of the failures among trials, the expected odds multiplied."""
    share = expected / trials if trials else 0.0
    share = share * odds / (1 - share + share * odds)
    return trials * share, trials * share * (1 - share)


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
