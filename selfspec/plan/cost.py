"""What a round of a plan costs: the table's forwards put together, corrected by what rounds really took."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np

from selfspec.plan import Plan
from selfspec.plan.table import LatencyTable

BUCKETS = 12  # of numbers of requests, by powers of two; larger ones share the last
STEP = 256  # positions; a table is asked once for all contexts within one step
FAR = 0.1  # rounds as foretold that what was seen at other loads is set against
MANY = 256  # requests; and once for all numbers up to this one, since asking takes as long for hundreds as for one


class Costs:
    """Milliseconds of rounds.

    Args:
        table: forward times.
        entries: entry layer of each loaded adapter.
    """

    def __init__(self, table: LatencyTable, entries: tuple[int, ...] = (0,)):
        self.table, self.entries = table, entries
        self._parts: dict[tuple[Plan, int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._times: dict[tuple, np.ndarray] = {}  # of single forwards: plans share many

    def parts(self, plan: Plan, most: int, context: float) -> tuple[np.ndarray, np.ndarray]:
        """Milliseconds of verifying (trees built first) and of drafting, for 0, 1, ... most requests and more."""
        most = most_of(most)
        step = -(-int(context) // STEP) * STEP
        key = plan, most, step
        if key not in self._parts:
            if len(self._parts) > 4096:  # contexts grow: those behind are not asked for again
                self._parts.clear()
                self._times.clear()
            self._parts[key] = self._measured(plan, most, step)
        return self._parts[key]

    def _measured(self, plan: Plan, most: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        entry = self.entries[plan.adapter] if plan.drafts else 0
        if plan.overlap:
            verify = self._time(most, context, "overlap", plan.nodes, entry, plan.group_rows)
        else:
            verify = self._time(most, context, "clean", plan.nodes)
        if not plan.drafts:
            return verify, np.zeros(most + 1)
        if plan.tree:
            verify = verify + self._time(most, context, "tree", plan.tree_nodes)
        draft = self._time(most, context, "draft", plan.block_size, entry) * (plan.passes if plan.loop else 1)
        if plan.verify_length:  # what is not verified needs no head, but all that a short block of its own needs
            heads = [self._time(most, context, "head", rows) for rows in (plan.block_size, plan.verify_length)]
            short = self._time(most, context, "draft", plan.verify_length, entry)
            draft = np.maximum(draft - np.maximum(heads[0] - heads[1], 0.0), np.minimum(short, draft))
        if plan.loop and plan.overlap:  # later passes go on from saved drafts too
            draft = draft / plan.passes
            verify = verify + (plan.passes - 1) * draft
        return verify, draft

    def _time(self, most: int, context: int, kind: str, rows: int, entry: int = 0, drafts: int = 0) -> np.ndarray:
        """Milliseconds of a forward of 0..most requests."""
        key = most, context, kind, rows, entry, drafts
        if key not in self._times:
            ms = self.table.time(kind, rows, np.arange(1, most + 1), context, entry, drafts)
            self._times[key] = np.concatenate([[0.0], ms])
        return self._times[key]

    def round(self, plan: Plan, n: int, context: float, missed: int | None = None) -> float:
        """One round of n requests.

        Args:
            plan: its shape.
            n: requests.
            context: their mean committed positions.
            missed: overlap only, requests without a saved draft for which one is made, in a pass for all; by default
                all.
        """
        verify, draft = self.parts(plan, n, context)
        return float(verify[n] + draft[0 if plan.overlap and missed == 0 else n])


def most_of(n: int) -> int:
    """The largest number of requests among those whose costs are worked out together with those of n."""
    return max(MANY, 1 << (n - 1).bit_length())


class Pace:
    """What rounds really take over what the table says, per plan and number of requests (BASTION's online calibration).

    The table times forwards; rounds also build trees, walk, transfer. A plan that never ran is taken to be as far off
    as others of its mode are, or as plans are on average, plain decoding among them (other contexts than the table's
    change all alike), so that none wins or loses only because nobody has seen it run.
    What was seen with other numbers of requests counts a quarter for every doubling between: trees that take a fifth
    longer than foretold for 64 requests need not do so for 2. Far from all that was seen the table is taken at its
    word: its errors at 1 and at 32 requests have little to do with one another.
    Plain decoding is the exception: it is what all is measured against, so until it has run it is taken at its word,
    unless others are faster than theirs.

    Args:
        modes: of each plan; "ar" is plain decoding.
    """

    def __init__(self, modes: Sequence[str]):
        names = sorted(set(modes))
        self.mode = np.array([names.index(m) for m in modes])
        self.plain = np.array([m == "ar" for m in modes])
        self.drafts = (~self.plain).astype(float)
        self.modes = np.equal.outer(self.mode, self.mode).astype(float)  # [K, K]
        self.seen = np.zeros((BUCKETS, 3, len(self.mode)))  # by bucket of requests: rounds, weight, sum of log ratios
        at = np.arange(BUCKETS)
        self.near = 0.25 ** abs(at[:, None] - at)  # what a bucket counts in another
        self.first = np.zeros(2)  # cold rounds, and the milliseconds that one of them takes longer

    def _bucket(self, n: int) -> np.ndarray:
        return self.seen[min((n - 1).bit_length(), BUCKETS - 1)]

    def factors(self, n: int, trust: float = 2.0) -> np.ndarray:
        """Multiply the table's milliseconds. [K]

        Args:
            n: requests.
            trust: rounds of so many requests that all others are set against.
        """
        here = min((n - 1).bit_length(), BUCKETS - 1)
        # weights and weighted log ratios: of each plan, of all plans of its mode, of all plans, of all drafts
        near = (self.near[here] @ self.seen[:, 1:].reshape(BUCKETS, -1)).reshape(2, -1)
        alike = near @ self.modes
        count, total = near.sum(1).tolist()
        drafts, of_drafts = (near @ self.drafts).tolist()
        gain = min(of_drafts / (drafts + FAR), 0.0)
        factor = (alike[1] + 2 * np.where(self.plain, gain, total / (count + FAR))) / (alike[0] + 2)
        factor = (near[1] + 2 * factor) / (near[0] + 2)
        _, weight, ratios = self.seen[here]
        return np.exp((ratios + trust * factor) / (weight + trust))

    def known(self, k: int, n: int) -> int:
        """Rounds of plan k with about n requests whose time is known."""
        return int(self._bucket(n)[1, k])

    def setup(self, k: int, n: int) -> float:
        """Milliseconds that plan k costs beside its rounds until it runs at its pace with n requests."""
        return 0.0 if self._bucket(n)[0, k] > 0 else 2 * float(self.first[1])  # what is captured runs once before

    def observe(self, k: int, n: int, expected: float, real: float, cold: bool = False) -> None:
        """Book a round of plan k; both in milliseconds. A shape's first round sets up and says nothing of its pace.

        A single slow round is somebody else's doing, so what is known moves by a step at most.
        """
        booked = self._bucket(n)
        if cold:
            self.first[0] = min(self.first[0] + 1, 20)
            self.first[1] += (max(real - expected, 0.0) - self.first[1]) / self.first[0]
            return
        rounds, weight, ratios = booked[:, k].tolist()
        booked[0, k] = rounds + 1
        if rounds < 1 or expected <= 0 or real <= 0:
            return
        ratio = min(max(log(real / expected), -3.0), 3.0)
        mean = ratios / weight if weight else 0.0
        if weight >= 8:
            ratio = min(max(ratio, mean - 0.5), mean + 0.5)
        weight = min(weight + 1, 20)
        booked[1:, k] = weight, weight * (mean + (ratio - mean) / weight)
