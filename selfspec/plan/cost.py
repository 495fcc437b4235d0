"""What a round of a plan costs: the table's forwards put together, corrected by what rounds really took."""

from __future__ import annotations

from math import exp, log

import numpy as np

from selfspec.plan import Plan
from selfspec.plan.table import LatencyTable

STEP = 256  # positions; a table is asked once for all contexts within one step


class Costs:
    """Milliseconds of rounds.

    Args:
        table: forward times.
        entries: entry layer of each loaded adapter.
    """

    def __init__(self, table: LatencyTable, entries: tuple[int, ...] = (0,)):
        self.table, self.entries = table, entries
        self._parts: dict[tuple[Plan, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def parts(self, plan: Plan, most: int, context: float) -> tuple[np.ndarray, np.ndarray]:
        """Verify and draft milliseconds of 0..most requests. [most + 1] each"""
        step = -(-int(context) // STEP) * STEP
        key = plan, most, step
        if key not in self._parts:
            if len(self._parts) > 4096:  # contexts grow: those behind are not asked for again
                self._parts.clear()
            self._parts[key] = self._measured(plan, np.arange(1, most + 1), step)
        return self._parts[key]

    def _measured(self, plan: Plan, n: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
        entry = self.entries[plan.adapter] if plan.drafts else 0
        if plan.overlap:
            verify = self.table.time("overlap", plan.nodes, n, context, entry, plan.group_rows)
        else:
            verify = self.table.time("clean", plan.nodes, n, context)
        draft = np.zeros(len(n))
        if plan.drafts:
            draft = self.table.time("draft", plan.block_size, n, context, entry) * (plan.passes if plan.loop else 1)
        return np.concatenate([[0.0], verify]), np.concatenate([[0.0], draft])

    def round(self, plan: Plan, n: int, context: float, missed: int | None = None) -> float:
        """One round of n requests.

        Args:
            plan: its shape.
            n: requests.
            context: their mean committed positions.
            missed: overlap only, requests without a saved draft, for which one is made; by default all.
        """
        verify, draft = self.parts(plan, n, context)
        return float(verify[n] + draft[n if missed is None or not plan.overlap else missed])

    def rounds(self, plan: Plan, most: int, context: float, hit: float = 0.0) -> np.ndarray:
        """Expected rounds of 0..most requests, when each has a saved draft with the chance `hit`. [most + 1]"""
        verify, draft = self.parts(plan, most, context)
        if not plan.overlap:
            return verify + draft
        m = np.arange(most + 1)
        return verify + draft[np.ceil(m * (1 - hit)).astype(int)] * (1 - hit**m)


class Pace:
    """What rounds really take over what the table says, per plan and number of requests (BASTION's online calibration).

    The table times forwards; rounds also build trees, walk, transfer. A plan that never ran is taken to be as far off
    as plans are on average, so that no plan wins only because nobody has seen it run.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[Plan, int], tuple[float, float]] = {}  # (weight, mean log ratio)
        self.warm: dict[tuple[Plan, int], int] = {}
        self.all = (0.0, 0.0)

    def factor(self, plan: Plan, n: int) -> float:
        """Multiplies the table's milliseconds."""
        weight, mean = self.seen.get((plan, n.bit_length()), (0.0, 0.0))
        return exp((weight * mean + 2 * self.all[1]) / (weight + 2))

    def observe(self, plan: Plan, n: int, expected: float, real: float) -> None:
        """Book a round; both in milliseconds. The first two of a shape compile and capture, and say nothing."""
        key = plan, n.bit_length()
        self.warm[key] = self.warm.get(key, 0) + 1
        if self.warm[key] <= 2 or expected <= 0 or real <= 0:
            return
        ratio = min(max(log(real / expected), -3.0), 3.0)
        weight, mean = self.seen.get(key, (0.0, 0.0))
        if weight >= 8:  # one slow round is somebody else's doing
            ratio = min(max(ratio, mean - 0.2), mean + 0.2)
        self.seen[key] = _mixed(weight, mean, ratio, 20)
        self.all = _mixed(*self.all, ratio, 50)


def _mixed(weight: float, mean: float, value: float, most: float) -> tuple[float, float]:
    weight = min(weight + 1, most)
    return weight, mean + (value - mean) / weight
