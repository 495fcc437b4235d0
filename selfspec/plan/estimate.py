"""How many drafts will be accepted: per request and position, from recent rounds.

c[j] is the chance that draft j is accepted when all before it were. Its log odds of failing are what the adapter tells
of this family of drafts, plus what was learnt since:

    log (1 - c[j]) / c[j] = told + all drafts + adapter + adapter at j + kind + family + text          (a Rasch model)

The terms but the last are one Gaussian belief, kept by an extended Kalman filter: a round that fails more often than
foreseen raises each term by its share of the doubt, so what all drafts have in common is not blamed on the family that
happened to run, and a family that never ran follows its kin. A text's own term has a variance of its own; it starts
afresh with every text. Kinds that are chosen for hard texts do not look bad for it, and the doubt that is left says how
much could be hoped of what has not run (`doubt`).

What is looked up in the text has terms apart, a family's and a text's: for the first token of a round, and for those
behind one that was right. Whether a text says things again, and how far it then goes on as before, are two things.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from selfspec.plan import BLOCKS
from selfspec.plan.family import DEPTH, LEAST, MOST, Family, families, harder, told

__all__ = ["DEPTH", "Estimator", "Family", "families", "harder"]

STARTS = (0, 1, 2, 3, 7)  # where positions begin that move together
BINS = np.searchsorted(STARTS, range(DEPTH), side="right") - 1
EYE = np.eye(len(STARTS))
# standard deviations of terms before anything has run: where the adapter tells its acceptance, and where it is guessed
ALL, ADAPTER, SHAPE = 0.3, (0.2, 1.0), (0.15, 0.6)
KIND, FAMILY = (0.15, 0.2, 0.2), (0.05, 0.12, 0.12)  # told of the family, of others of its adapter, of none
TEXT, COPY = 0.85, 1.2  # of texts, to drafts and to what is looked up in them
OWN = np.array([TEXT, COPY, COPY])  # of a text's terms: drafts, first token looked up, those behind it
TURN = np.array([0.01, 0.04, 0.04])  # share of them that a round renews: copies come in bursts, and late in texts
DRIFT = 1.5e-5  # variance that a round adds to what all drafts share
WANDER = 0.5  # other terms drift in proportion to their variances, or to this deviation's where theirs is wider
STEADY = 0.3  # of the drift, what one family has for itself: else what runs is praised or blamed for its texts
FURTHEST = 2.0  # log odds that a step of the filter moves at most
AT_ONCE, STEPS = 8, 6  # rounds of a text that a step takes in, and most steps: each goes by its slope


class Estimator:
    """Acceptance of every family, over all requests and for each.

    Args:
        kinds: families that may run.
        priors: of each adapter: the acceptance of its chains (one number, or one a position, the last going on), or
            what it tells by name of family (`selfspec.plan.family.told`).

    Attributes:
        kinds: all families, kin of the given ones included.
        index: of every family.
        own: what is known of the texts: key -> `_Text`.
    """

    def __init__(
        self,
        kinds: Sequence[Family] = (),
        priors: Sequence[float | Sequence[float] | Mapping[str, Sequence[float]]] = (0.7,),
    ):
        known = [p if isinstance(p, Mapping) else {"chain": np.atleast_1d(p).tolist()} for p in priors]
        self._sure = [not isinstance(p, (int, float)) for p in priors]
        widest: dict[int, int] = {}  # of adapters that know no larger block: for them it is whole
        for k in kinds:
            if k.source == "known" and not k.nodes:
                widest[k.adapter] = max(widest.get(k.adapter, 0), k.block or BLOCKS[-1])
        whole = {k for k in kinds if k.block and k.block == widest[k.adapter]}
        kin = [Family("known", i) for i in range(len(known))] + [k._replace(nodes=0) for k in kinds if k not in whole]
        self.kinds = sorted({*kin, *(k for k in kinds if k not in whole)})
        self.index = {k: i for i, k in enumerate(self.kinds)}
        self.index |= {k: self.index[k._replace(block=0)] for k in whole}
        self.copied = np.array([k.source == "lookup" for k in self.kinds])
        found = [told(k, known[k.adapter]) for k in self.kinds]
        self.base = np.stack([np.log((1 - c) / c) for c, _ in found])  # [F, DEPTH] log odds of failing
        self.effect = _Effect()
        self.own: dict[Hashable, _Text] = {}
        self._terms([f for _, f in found])
        self._shift: np.ndarray | None = None
        self._waiting: dict[tuple[Hashable, int, int], np.ndarray] = {}

    def _terms(self, exact: list[bool]) -> None:
        """Lay out the shared terms and what is doubted of each."""
        bins, place, wide, counts = len(STARTS), dict[Any, int](), list[float](), list[tuple[int, int, int]]()

        def count(i: int, b: int, name: Hashable, deviation: float) -> None:
            """A term counts in a family at a bin."""
            if name not in place:
                place[name] = len(wide)
                wide.append(deviation)
            counts.append((i, b, place[name]))

        for (i, k), b in product(enumerate(self.kinds), range(bins)):
            if self.copied[i]:
                count(i, b, ("copied", b > 0), COPY)
                continue
            sure = self._sure[k.adapter]
            guess = 0 if exact[i] else 1 if sure else 2
            count(i, b, "all", ALL)
            count(i, b, ("adapter", k.adapter), ADAPTER[not sure])
            count(i, b, ("shape", k.adapter, b), SHAPE[not sure])
            # the trees of a draft hold one another: what is found of one size holds for all; likewise short blocks
            count(i, b, ("kind", k._replace(nodes=min(k.nodes, 1), block=min(k.block, 1))), KIND[guess])
            count(i, b, k, FAMILY[guess])
        self.of = np.zeros((len(self.kinds), bins, len(wide)))
        self.of[tuple(np.array(counts).T)] = 1.0
        self.mine = np.zeros((len(self.kinds), bins, len(OWN)))  # likewise of a text's own terms
        self.mine[~self.copied, :, 0] = self.mine[self.copied, 0, 1] = self.mine[self.copied, 1:, 2] = 1.0
        self.mean, self.doubts, self._diagonal = np.zeros(len(wide)), np.diag(wide) ** 2, np.diag_indices(len(wide))
        # texts get easier for all drafts sooner than for one family alone: else what runs is praised for its texts
        drift = DRIFT * np.minimum(np.array(wide), WANDER) ** 2 / ALL**2
        drift[[i for name, i in place.items() if isinstance(name, Family) or name[0] == "kind"]] *= STEADY
        self._drift = np.stack([drift, drift])  # by rounds of drafts, and by what is heard of copies beside them
        self._drift[1, self.of[~self.copied].any((0, 1))] = 0

    def shared(self) -> np.ndarray:
        """Conditional acceptance of all families, on a text like any. [F, DEPTH]"""
        self.settle()
        return _chance(self._odds())

    def _odds(self) -> np.ndarray:
        """Log odds of failing, texts apart. [F, DEPTH]"""
        if self._shift is None:
            self._shift = self.base + (self.of @ self.mean)[:, BINS]
        return self._shift

    def doubt(self, used: Family | None = None) -> np.ndarray:
        """Standard deviation of each family's log odds, at its first drafts, against those of a family in use. [F]"""
        self.settle()
        rows = self.of[:, 1]
        if used is not None:
            rows = rows - rows[self.index[used]]
        return np.sqrt(np.maximum(((rows @ self.doubts) * rows).sum(1), 0.0))

    def all(self, keys: Sequence[Hashable], features: np.ndarray | None = None) -> np.ndarray:
        """Conditional acceptance of each request in every family.

        Args:
            keys: the requests.
            features: [n] what is known before the draft and says how hard the text is (the verifier's mean entropy over
                the last round as in RecGuide, or a negated mean top-2 margin); nan where it is not known.

        Returns:
            [F, n, DEPTH]
        """
        self.settle()
        n = len(keys)
        text = np.zeros((n, len(OWN)))
        for i, key in enumerate(keys):
            if key in self.own:
                text[i] = self.own[key].mean
        if features is not None:
            text[:, 0] += self.effect.weighed(features, n)
        return _chance(self._odds()[:, None] + (text @ self.mine.swapaxes(1, 2))[:, :, BINS])

    def curves(self, keys: Sequence[Hashable], family: Family, features: np.ndarray | None = None) -> np.ndarray:
        """The same of one family. [n, DEPTH]"""
        return self.all(keys, features)[self.index[family]]

    def observe(
        self,
        keys: Sequence[Hashable],
        family: Family,
        offered: Sequence[int] | np.ndarray,
        accepted: Sequence[int] | np.ndarray,
        features: np.ndarray | None = None,
        texts: int = 1,
    ) -> None:
        """Book a round.

        Args:
            keys: the requests, each of its round, or one of all; if there is but one, its rounds are booked as one.
            family: kind of draft that was verified.
            offered: drafts verified (a tree: its depth), per request. A round that ended its text offered no more than
                it could still take.
            accepted: drafts accepted, per request.
            features: as in `all`, what they were before the draft.
            texts: that a key stands for: the mean of many varies less than one.
        """
        f = self.index[family]
        d, a = np.minimum(offered, DEPTH), np.minimum(accepted, DEPTH)
        ends = d, np.minimum(a + 1, d), np.minimum(a, d)  # drafts that were offered, tried, and accepted
        features = None if features is None or np.isnan(features).all() else features
        if len(keys) == 1 or len(set(keys)) == 1:
            offers, tried, won = (len(e) - np.bincount(e, minlength=DEPTH + 1).cumsum()[:DEPTH] for e in ends)
            seen = np.stack([offers, tried, tried - won])[:, None].astype(float)
            if features is None:  # a planner asks only every few rounds: those between wait
                self._waiting[keys[0], f, texts] = self._waiting.get((keys[0], f, texts), 0.0) + seen
                return
            keys, features = keys[:1], np.nanmean(features, keepdims=True)
        else:
            offers, tried, won = (np.arange(DEPTH) < e[:, None] for e in ends)  # [n, DEPTH]
            seen = np.stack([offers, tried, tried & ~won]).astype(float)
        self.settle()
        self._book(keys, f, seen, features, texts)

    def settle(self) -> None:
        """Book the rounds that wait."""
        waiting, self._waiting = self._waiting, {}
        for (key, f, texts), seen in waiting.items():
            # copies, which many rounds may wait for, are booked at once
            steps = 1 if self.copied[f] else min(-(-int(seen[0].max()) // (AT_ONCE * texts)), STEPS)
            for _ in range(steps):
                self._book([key], f, seen / steps, None, texts)

    def _book(self, keys, f, seen, features, texts) -> None:
        """Learn from rounds that offered a draft, tried it, and saw it fail, of each key. [3, n, DEPTH]"""
        copied = bool(self.copied[f])
        fixed = np.zeros(len(keys)) if copied else self.effect.weighed(features, len(keys))
        rounds = seen[0, :, 0] / texts  # [n]
        self.doubts[self._diagonal] += float(rounds.max()) * self._drift[int(copied)]
        surprise = [
            self._learn(f, self.own.setdefault(k, _Text(texts)), texts, rounds[i], float(fixed[i]), *seen[:, i])
            for i, k in enumerate(keys)
        ]
        if not copied and features is not None:
            self.effect.learn(features, np.array(surprise))

    def _learn(self, f, text, texts, rounds, fixed, offered, tried, failed) -> float:
        """One step of the filter by the trials of a text. [DEPTH] each. Returns its failures beyond those foreseen.

        What is expected to be tried says how much can be learnt, and all positions are judged by what was foreseen of
        the round: trials end with a failure, so steps by what was really tried, or position after position, would lean.
        """
        at, mine = self.of[f], self.mine[f]  # [bins, terms], [bins, terms of a text]
        own, variance = text.turned(mine.any(0), texts, rounds)
        if not offered[0]:
            return 0.0
        chance = _chance(self.base[f] + (at @ self.mean + mine @ own)[BINS] + fixed)
        failing, reached = 1 - chance, np.ones(DEPTH)  # the chance that a draft fails, and that it is tried at all
        np.multiply.accumulate(chance[:-1], out=reached[1:])
        seen = np.empty((2, DEPTH))
        seen[0], seen[1] = failed - tried * failing, offered * reached * failing * chance
        missed, information = np.add.reduceat(seen, STARTS, axis=1)  # [bins]; of what is never offered both are 0
        cover = self.doubts @ at.T  # [terms, bins]: covariance with what these trials show
        spread = at @ cover + mine * variance @ mine.T  # [bins, bins]
        root = np.sqrt(np.maximum(information, 1e-9))
        inverse = np.linalg.inv(EYE + root[:, None] * spread * root)
        weight = root * (inverse @ (missed / root))
        weight *= min(1.0, FURTHEST / max(float(np.abs(spread @ weight).max()), 1e-9))
        shrunk = root[:, None] * inverse * root
        self.mean += cover @ weight
        self.doubts -= cover @ shrunk @ cover.T
        text.mean = np.minimum(np.maximum(own + variance * (weight @ mine), -4.0), 4.0)
        text.variance = variance - variance**2 * ((shrunk @ mine) * mine).sum(0)
        self._shift = None
        return float(missed.sum())

    def tau(self, family: Family) -> float:
        """Tokens that a full round of the family emits, over all requests."""
        return 1 + float(np.cumprod(self.shared()[self.index[family]]).sum())

    def renew(self, key: Hashable, share: float) -> None:
        """A share of the requests that a key stands for have left; of the next ones no more is known than of any."""
        own = self.own.get(key)
        if own is not None:
            own.renew(share)

    def rename(self, key: Hashable, other: Hashable) -> None:
        """What is known of a text is another's from now on."""
        if key in self.own:
            self.own[other] = self.own.pop(key)
        self._waiting = {(other if k == key else k, f, n): seen for (k, f, n), seen in self._waiting.items()}

    def forget(self, key: Hashable) -> None:
        """A request is gone: the next one's text may be of another kind."""
        if any(k == key for k, *_ in self._waiting):
            self.settle()
        self.own.pop(key, None)


class _Text:
    """What is known of a text, or of the mean of many: its own terms, see `OWN`, and their variances."""

    def __init__(self, texts: int) -> None:
        self.mean, self.bounds = np.zeros(len(OWN)), OWN**2 / texts
        self.variance = self.bounds.copy()

    def turned(self, which: np.ndarray, texts: int, rounds: float) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances, some rounds later that show some of the terms. which: [3] bool"""
        self.bounds[which] = OWN[which] ** 2 / texts
        kept = np.where(which, (1 - TURN) ** rounds, 1.0)
        return kept * self.mean, kept**2 * self.variance + (1 - kept**2) * self.bounds

    def renew(self, share: float) -> None:
        """A share of the texts are others now."""
        kept = (1 - share) ** 2
        self.mean = self.mean * (1 - share)
        self.variance = kept * self.variance + (1 - kept) * self.bounds


def _chance(odds: np.ndarray) -> np.ndarray:
    """Acceptance, of log odds of failing."""
    return np.minimum(np.maximum(1 / (1 + np.exp(np.minimum(odds, 30))), LEAST), MOST)


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

    def weighed(self, features: np.ndarray | None, n: int) -> np.ndarray:
        """What it adds to the log odds. [n]"""
        return np.clip(self.weight * self._standard(features, n), -1.5, 1.5)

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
