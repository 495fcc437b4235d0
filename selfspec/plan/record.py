"""What a machine showed of a model: latency table, acceptance traces, how long rounds really took; kept as JSON.

From it `foretold` predicts how fast a plan or a policy is with so many requests at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from selfspec.plan import Plan
from selfspec.plan.cost import Costs
from selfspec.plan.estimate import Family, families
from selfspec.plan.latency import Latency
from selfspec.plan.planner import Fixed, Policy
from selfspec.plan.simulate import Outcome, Trace, simulate
from selfspec.plan.table import LatencyTable

PLAIN = Plan("ar", 1)


@dataclass
class Record:
    """A recorded run.

    Attributes:
        table: forward times.
        entries: entry layer of each adapter.
        traces: acceptance, each text in several families.
        rounds: plan, requests at a time, context -> median milliseconds of rounds.
    """

    table: LatencyTable
    entries: tuple[int, ...]
    traces: list[Trace]
    rounds: list[tuple[Plan, int, float, float]]

    def data(self) -> dict[str, Any]:
        """In plain JSON types."""
        return {
            "n_layers": self.table.n_layers,
            "setting": self.table.setting,
            "points": [asdict(p) for p in self.table.points],
            "entries": list(self.entries),
            "traces": [
                {
                    "prompt": t.prompt,
                    "tokens": t.tokens,
                    "accepted": [[*map(_plain, f), [int(a) for a in runs]] for f, runs in t.accepted.items()],
                }
                for t in self.traces
            ],
            "rounds": [[asdict(p), n, context, ms] for p, n, context, ms in self.rounds],
        }

    @classmethod
    def of(cls, data: dict[str, Any]) -> Record:
        """The inverse of `data`."""
        table = LatencyTable(tuple(Latency(**p) for p in data["points"]), data["n_layers"], data["setting"])
        traces = [
            Trace(t["prompt"], t["tokens"], {Family(*f): np.array(runs) for *f, runs in t["accepted"]})
            for t in data["traces"]
        ]
        rounds = [(Plan(**p), n, context, ms) for p, n, context, ms in data["rounds"]]
        return cls(table, tuple(data["entries"]), traces, rounds)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else int(value)


class Priced(Costs):
    """Costs of rounds rather than of their forwards: what building trees, walking and settling takes is added.

    It is what rounds of the same plan took beyond their forwards, in between and beyond in proportion to the number of
    requests; of a plan without any, what those of its mode took, or all that draft.

    Args:
        table: forward times.
        entries: entry layer of each adapter.
        rounds: plan, requests, context and milliseconds of rounds that were timed.
    """

    def __init__(self, table: LatencyTable, entries: tuple[int, ...], rounds: Sequence[tuple[Plan, int, float, float]]):
        super().__init__(table, entries)
        self.beyond: dict[Any, dict[int, list[float]]] = {}
        for plan, n, context, ms in rounds:
            rest = ms - super().round(plan, n, context, 0)
            for key in (plan, plan.mode, plan.nodes > 1):
                self.beyond.setdefault(key, {}).setdefault(n, []).append(rest)

    def extra(self, plan: Plan, n: int) -> float:
        """Milliseconds beside the forwards of a round of n requests."""
        known = next((self.beyond[k] for k in (plan, plan.mode, plan.nodes > 1) if k in self.beyond), {})
        if not known:
            return 0.0
        counts = sorted(known)
        return float(np.interp(n, counts, [float(np.median(known[c])) for c in counts]))

    def round(self, plan: Plan, n: int, context: float, missed: int | None = None) -> float:
        """As `Costs.round`, and what it takes beside forwards; never less than a tenth of those."""
        forwards = super().round(plan, n, context, missed)
        return max(forwards + self.extra(plan, n), 0.1 * forwards)


def usable(traces: Sequence[Trace], plans: Sequence[Plan]) -> list[Trace]:
    """Those that know all families of some plans."""
    wanted = {f for p in plans if p.nodes > 1 for f in families(p)}
    return [t for t in traces if all(map(t.knows, wanted)) and t.tokens > 1]


def foretold(policy: Policy, costs: Costs, traces: Sequence[Trace], slots: int) -> Outcome:
    """What a policy would do while the queue keeps all slots full: three texts a slot, the traces repeated.

    Raises:
        ValueError: no trace knows what the policy may choose.
    """
    good = usable(traces, policy.plans)
    if not good:
        raise ValueError(f"no trace knows {', '.join(map(str, policy.plans[:3]))}: record it in that mode")
    texts = list(itertools.islice(itertools.cycle(good), max(3 * slots, len(good))))
    return simulate(policy, costs, texts, slots, drain=False)


def speed_up(record: Record, plan: Plan, slots: int, seen: Sequence[int] = ()) -> float:
    """How many times plain decoding's tokens a second a plan should give.

    Args:
        record: of the machine.
        plan: what runs.
        slots: requests at a time.
        seen: numbers of requests whose timed rounds may be used; none goes by forwards alone.
    """
    costs = Priced(record.table, record.entries, [r for r in record.rounds if r[1] in seen])
    traces = usable(record.traces, [plan])
    rates = [foretold(Fixed(p), costs, traces, slots).rate for p in (plan, PLAIN)]
    return rates[0] / rates[1]
