"""Expected tokens and milliseconds of every plan of a menu at once: a planner has microseconds, not milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfspec.plan import CORRECTIONS, Plan
from selfspec.plan.cost import STEP, Costs, most_of
from selfspec.plan.estimate import DEPTH, Family, families

POSITION = np.arange(DEPTH)
SECOND = 0.3  # of drafts that fail, those whose second candidate is right, before any has been seen to


class Values:
    """A menu's plans as arrays.

    Args:
        plans: K plans.
        index: of every family, in what gives survival.
        costs: of rounds.
    """

    def __init__(self, plans: Sequence[Plan], index: dict[Family, int], costs: Costs):
        self.plans, self.costs = list(plans), costs
        pairs = [families(p) for p in plans]
        self.made = np.array([index[m] for m, _ in pairs])
        self.saved = np.array([index[s] for _, s in pairs])
        self.depth = np.array([(p.block_size if p.tree else p.nodes) - 1 for p in plans])
        self.lookup = np.array([p.lookup for p in plans])
        self.lookups = np.flatnonzero(self.lookup & (self.depth > 0) & (self.depth <= DEPTH))
        steps = self.depth[self.lookups][:, None] + 1
        self.full = (POSITION + 1) % steps == 0  # [L, DEPTH] drafts of the largest block that fill a smaller one
        over = [k for k, p in enumerate(plans) if p.overlap]
        self.overlaps = np.array(over, int)
        ends = [CORRECTIONS if plans[k].branches else plans[k].kept or DEPTH + 1 for k in over]
        groups = np.minimum(np.array(ends, int), DEPTH + 1)
        self.branches = np.array([[plans[k].branches] for k in over], bool)  # [O, 1]
        self.at, self.dropped = np.arange(len(over)), DEPTH - groups  # the last end without a group, least likely first
        self.every = np.array([[plans[k].kept is None] for k in over], bool)  # [O, 1]
        self.within = self.depth[self.overlaps][:, None, None] > POSITION  # [O, 1, DEPTH]
        self.lost = self.held = 0.0  # what a change of texts costs, see `whole`
        self.joins = 0.0  # share of rounds before which a request has joined
        self.hits = np.zeros((2, len(plans)))  # hits and tries of overlaps, fading
        self._parts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def tokens(self, survival: np.ndarray, left: np.ndarray, offers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a round emits, and how often an overlap finds a draft saved.

        Where it does not, one is made; of rounds that graphs replay, which start before anybody knows, only the anchor
        is verified, and one token emitted.

        Args:
            survival: [F, n, DEPTH] the chance that draft j and all before it are accepted.
            left: [n] tokens that may still be emitted.
            offers: [n] drafts that lookup has.

        Returns:
            [n, K] tokens, and the mean chance of a saved draft [K].
        """
        n, at = len(left), np.arange(len(left))
        room = np.minimum(self.depth[:, None], left - 1)  # [K, n]
        np.minimum(room, offers, out=room, where=self.lookup[:, None])
        upto = np.empty((len(survival), n, DEPTH + 1))
        upto[:, :, 0] = 1
        np.cumsum(survival, 2, out=upto[:, :, 1:])
        upto[:, :, 1:] += 1
        tokens, hit = upto[self.made[:, None], at, room], np.zeros(len(self.plans))
        if len(self.lookups):
            tokens[self.lookups] = 1 + (tokens[self.lookups] - 1) * self._resumed(upto, survival)
        if len(self.overlaps):
            chance = self.kept(survival)
            o = self.overlaps
            found = upto[self.saved[o][:, None], at, room[o]]
            tokens[o] = chance * found + (1 - chance) * (1.0 if self.costs.table.graphs else tokens[o])
            hit[o] = chance.sum(1) / n
        return self.whole(tokens.T), hit

    def whole(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens a round of a slot, rounds between two texts included, from those of its texts' rounds.

        A text of L tokens takes L / tokens rounds, some more of every plan (`lost` a token), and others in which its
        slot stands idle until several are free (`Door`): their number goes by the root of the text's own.
        """
        return tokens / (1 + self.lost * tokens + self.held * np.sqrt(tokens))

    def _resumed(self, upto: np.ndarray, survival: np.ndarray) -> np.ndarray:
        """How many times as many tokens a block of lookup accepts as the first drafts of the largest one. [L, n]

        A passage longer than the block is gone on with in the next round, whose first draft is right so much more
        often: what the largest block takes in one round takes one round more for every block that is full.

        Args:
            upto: [F, n, DEPTH + 1] tokens of rounds that verify so many drafts of the largest block.
            survival: [F, n, DEPTH] the chance that draft j and all before it are accepted.
        """
        made = self.made[self.lookups]
        rounds = 1 + (survival[made] * self.full[:, None]).sum(2)
        first = upto[made, :, self.depth[self.lookups]]
        return (upto[made, :, -1] / rounds - 1) / (first - 1)

    def kept(self, survival: np.ndarray) -> np.ndarray:
        """The chance that a kept group is the one that comes true, for every overlap. [F, n, DEPTH] -> [O, n]

        Groups hang where the run most probably ends: P(exactly k) = survival(k) - survival(k + 1). Those of branches
        take two such ends if the second candidate is right there, and that of the whole block.
        """
        o = self.overlaps
        runs = np.zeros((len(o), survival.shape[1], DEPTH + 2))  # of k drafts and more
        runs[:, :, 0] = 1
        np.multiply(survival[self.saved[o]], self.within, out=runs[:, :, 1:-1])
        ends = runs[:, :, :-1] - runs[:, :, 1:]  # [O, n, DEPTH + 1]
        whole = ends[self.at, :, self.depth[o]]
        ends.sort(2)
        least = np.cumsum(ends, 2)  # of the ends that are not kept, and the rest
        rest = least[self.at, :, self.dropped]
        chance = 1 - np.where(self.dropped[:, None] < 0, 0.0, rest)
        chance = np.where(self.branches, np.minimum(SECOND * chance + whole, 1.0), chance)
        hits, tries = self.hits[:, o, None]
        return np.where(self.every, 1.0, (10 * chance + hits) / (10 + tries))

    def ms(self, counts: np.ndarray, context: float, hit: np.ndarray) -> np.ndarray:
        """Expected milliseconds of a round of so many requests, each count for itself. [C] -> [K, C]

        Where a request has joined, an overlap is drafted for as if it came after other plans; and where one has no
        draft, if that is known when the round starts. hit: [K] of `tokens`
        """
        verify, draft = self._costs(int(counts.max()), context)
        out = verify[:, counts] + draft[:, counts]
        o = self.overlaps
        spared = np.ones((len(o), 1)) if self.costs.table.graphs else hit[o][:, None] ** counts
        out[o] -= (1 - self.joins) * spared * draft[o][:, counts]
        return out

    def _costs(self, n: int, context: float) -> tuple[np.ndarray, np.ndarray]:
        key = most_of(n), -(-int(context) // STEP)
        if key not in self._parts:
            if len(self._parts) > 64:  # contexts grow: those behind are not asked for again
                self._parts.clear()
            parts = [self.costs.parts(p, n, context) for p in self.plans]
            self._parts[key] = np.stack([v for v, _ in parts]), np.stack([d for _, d in parts])
        return self._parts[key]

    def joined(self, some: bool) -> None:
        """Book whether the requests of a round are not all of the last one's."""
        self.joins += (some - self.joins) / 32

    def saw(self, k: int, hits: int, tries: int) -> None:
        """Book how many requests an overlapped round left a draft."""
        self.hits[:, k] = 0.98 * self.hits[:, k] + (hits, tries)
