"""What a machine showed of a model: latency table, acceptance traces, how long rounds really took; kept as JSON.

From it `replayed` predicts a run that was measured, on the same texts, and `foretold` how fast a plan or a policy is
with so many requests at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from selfspec.plan import Plan
from selfspec.plan.cost import Costs
from selfspec.plan.estimate import Family, families
from selfspec.plan.latency import Latency
from selfspec.plan.policy import Fixed, Policy
from selfspec.plan.simulate import Door, Outcome, Trace, simulate
from selfspec.plan.table import LatencyTable

PLAIN = Plan("ar", 1)


def order(places: int, slots: int, start: int) -> Iterator[tuple[int, float]]:
    """A run's requests: places of the queue from `start` on, again and again, and the share of its cap at which each
    ends. The first end early, at places spread over the slots."""
    for k in itertools.count():
        yield (start + k) % places, min((k + 1) / slots, 1.0)


def length(cap: int, share: float) -> int:
    """New tokens of a request, the prefill's one among them."""
    return max(1, round(cap * share))


@dataclass
class Record:
    """A recorded run.

    Attributes:
        table: forward times.
        entries: entry layer of each adapter.
        traces: acceptance, each text in several families.
        rounds: plan, requests at a time, context -> median milliseconds of rounds.
        queue: by place, the index of the trace (-1 where none was recorded) and the cap of its new tokens.
    """

    table: LatencyTable
    entries: tuple[int, ...]
    traces: list[Trace]
    rounds: list[tuple[Plan, int, float, float]]
    queue: list[tuple[int, int]] = field(default_factory=list)

    def texts(self, plans: Sequence[Plan], slots: int, start: int, tokens: int) -> list[Trace]:
        """What a run decoded, each to its own end, and a few more; texts that some plan has no record of left out.

        Args:
            plans: that will be simulated.
            slots: requests at a time.
            start: place of the queue at which it began.
            tokens: of the run.

        Raises:
            ValueError: no text of the queue is known.
        """
        good = {id(t) for t in usable(self.traces, plans)}
        known = [i >= 0 and id(self.traces[i]) in good for i, _ in self.queue]
        if not any(known):
            raise ValueError(f"no text of the queue is known for {', '.join(map(str, plans[:3]))}")
        out: list[Trace] = []
        more = 2 * slots + 1  # those that still run at the end, and as many behind them
        for place, share in order(len(self.queue), slots, start):
            if known[place]:
                index, cap = self.queue[place]
                out.append(self.traces[index].cut(length(cap, share) - 1))
                tokens, more = tokens - out[-1].tokens, more - (tokens <= 0)
                if not more:
                    break
        return out

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
            "queue": [list(place) for place in self.queue],
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
        return cls(table, tuple(data["entries"]), traces, rounds, [(i, cap) for i, cap in data.get("queue", [])])


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
                self.beyond.setdefault(key, {}).setdefault(self._rows(n), []).append(rest)

    def _rows(self, n: int) -> int:
        """Requests that the forward of n is as large as."""
        return 1 << (n - 1).bit_length() if self.table.graphs else n

    def extra(self, plan: Plan, n: int) -> float:
        """Milliseconds beside the forwards of a round of n requests."""
        known = next((self.beyond[k] for k in (plan, plan.mode, plan.nodes > 1) if k in self.beyond), {})
        if not known:
            return 0.0
        counts = sorted(known)
        return float(np.interp(self._rows(n), counts, [float(np.median(known[c])) for c in counts]))

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


def replayed(record: Record, costs: Costs, plan: Plan, slots: int, start: int, tokens: int, door: Door) -> Outcome:
    """What a run in a `selfspec.arena.Arena` should have done: the same texts to the same ends, for as many tokens.

    Args:
        record: with its queue.
        costs: what rounds are taken to cost.
        plan: that ran.
        slots: requests at a time.
        start: place of the queue at which the run began.
        tokens: that its rounds emitted.
        door: holds back who joins, as the session's did.

    Raises:
        ValueError: no text of the queue is known for the plan.
    """
    texts = record.texts([plan], slots, start, tokens)
    # a session reads of an end when the next round has begun, with graphs the one after it too; then comes the prefill
    lag = 1 + record.table.graphs
    return simulate(Fixed(plan), costs, texts, slots, drain=False, tokens=tokens, lag=lag, door=door)
