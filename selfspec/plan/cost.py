"""What a round of a plan costs: the table's forwards put together, corrected by what rounds really took."""

from __future__ import annotations

from math import log

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


class Pace:
    """What rounds really take over what the table says, per plan and number of requests (BASTION's online calibration).

    The table times forwards; rounds also build trees, walk, transfer. A plan that never ran is taken to be as far off
    as plans are on average, so that no plan wins only because nobody has seen it run.

    Args:
        plans: how many there are.
    """

    def __init__(self, plans: int):
        self.plans = plans
        self.seen: dict[int, np.ndarray] = {}  # bucket of requests -> [3, K] rounds, weight, mean log ratio
        self.ever = np.zeros((2, plans))  # weight, mean log ratio over all numbers of requests
        self.all = [0.0, 0.0]  # the same over all plans

    def _bucket(self, n: int) -> np.ndarray:
        return self.seen.setdefault(n.bit_length(), np.zeros((3, self.plans)))

    def factors(self, n: int) -> np.ndarray:
        """Multiply the table's milliseconds. [K]"""
        _, weight, mean = self._bucket(n)
        ever = (self.ever[0] * self.ever[1] + 2 * self.all[1]) / (self.ever[0] + 2)
        return np.exp((weight * mean + 2 * ever) / (weight + 2))

    def observe(self, k: int, n: int, expected: float, real: float) -> None:
        """Book a round of plan k; both in milliseconds. The first two of a shape compile and capture, and say nothing.

        A single slow round is somebody else's doing, so what is known moves by a step at most.
        """
        rounds, weight, mean = self._bucket(n)
        rounds[k] += 1
        if rounds[k] <= 2 or expected <= 0 or real <= 0:
            return
        ratio = min(max(log(real / expected), -3.0), 3.0)
        if weight[k] >= 8:
            ratio = min(max(ratio, mean[k] - 0.5), mean[k] + 0.5)
        weight[k] = min(weight[k] + 1, 20)
        mean[k] += (ratio - mean[k]) / weight[k]
        self.ever[0, k] = min(self.ever[0, k] + 1, 20)
        self.ever[1, k] += (ratio - self.ever[1, k]) / self.ever[0, k]
        self.all[0] = min(self.all[0] + 1, 50)
        self.all[1] += (ratio - self.all[1]) / self.all[0]
