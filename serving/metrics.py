"""What an engine did: JSON for reports, and a Prometheus endpoint."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.stats import Stats

if TYPE_CHECKING:
    from selfspec.serving.engine import Engine
    from selfspec.serving.lane import Lane

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)  # seconds
KEPT = 4096  # latest observations, for percentiles: memory doesn't grow with the run
PERCENTILES = (50, 90, 99)


class Latency:
    """Seconds, observed one by one: a histogram of all, percentiles of the latest."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(BOUNDS) + 1), 0.0
        self.latest: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """Book one."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds
        self.latest.append(seconds)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def summary(self) -> dict[str, float]:
        """Count, mean, percentiles and the most, in seconds."""
        if not self.latest:
            return {"count": 0}
        values = list(self.latest)
        out = {f"p{p}": float(v) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES))}
        return {"count": self.count, "mean": self.sum / self.count, **out, "max": max(values)}


@dataclass
class Metrics:
    """Counts of one engine; the engine books them.

    Attributes:
        tokens: emitted.
        preemptions: times that a running request was taken out of its slot.
        arrangements: times that lanes were made or remade.
        reasons: how many requests ended, by their finish_reason.
        stats: rounds and acceptance of ended requests.
        wait: from arrival to a slot.
        first: from arrival to the first token.
        whole: from arrival to the end.
        peaks: the most that was running, waiting, and reserved in bytes.
    """

    tokens: int = 0
    preemptions: int = 0
    arrangements: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    stats: Stats = field(default_factory=Stats)
    wait: Latency = field(default_factory=Latency)
    first: Latency = field(default_factory=Latency)
    whole: Latency = field(default_factory=Latency)
    peaks: dict[str, int] = field(default_factory=lambda: {"running": 0, "waiting": 0, "memory": 0})
    began: float = field(default_factory=time.monotonic)

    def look(self, running: int, waiting: int, memory: int) -> None:
        """Note a round's load."""
        now = {"running": running, "waiting": waiting, "memory": memory}
        self.peaks = {k: max(v, now[k]) for k, v in self.peaks.items()}

    def ended(self, reason: str, stats: Stats, seconds: float) -> None:
        """Note a request's end."""
        self.reasons[reason] += 1
        self.stats = self.stats + stats
        self.whole.add(seconds)


def snapshot(engine: Engine) -> dict[str, Any]:
    """All figures of an engine, in plain JSON types."""
    m, seconds = engine.metrics, time.monotonic() - engine.metrics.began
    return {
        "seconds": seconds,
        "tokens": m.tokens,
        "tokens_per_second": m.tokens / seconds if seconds else 0.0,
        "prompt_tokens": m.stats.prompt_tokens,
        "requests": dict(m.reasons),
        "rounds": engine.rounds,
        "tau": m.stats.tau,
        "tpf": m.stats.tpf,
        "overlap": m.stats.overlap,
        "acceptance": m.stats.acceptance,
        "accepted": {str(k): n for k, n in sorted(m.stats.accepted.items())},
        "phase_seconds": dict(m.stats.seconds),
        "latency_seconds": {"wait": m.wait.summary(), "first": m.first.summary(), "whole": m.whole.summary()},
        "running": len(engine.running),
        "waiting": engine.waiting,
        "preemptions": m.preemptions,
        "arrangements": m.arrangements,
        "memory": {"budget": engine.memory, "reserved": engine.reserved, "peak": m.peaks["memory"]},
        "peaks": m.peaks,
        "lanes": [_lane(x) for x in list(engine.lanes.values())],
    }


def _lane(lane: Lane) -> dict[str, Any]:
    """A lane's figures: how many graphs it keeps, may keep, and has captured so far."""
    out: dict[str, Any] = {"slots": lane.slots, "capacity": lane.capacity, "bytes": lane.nbytes}
    if (session := lane.session) is not None:  # it may be closed by another thread
        graphs = session.graphs
        out["graphs"] = {"kept": len(graphs), "most": graphs.most, "captured": graphs.captures}
    return out


class Collector:
    """An engine's figures for prometheus_client, read when they are asked for.

    Args:
        engine: whose.
    """

    def __init__(self, engine: Engine):
        self.engine = engine

    def collect(self) -> Iterator[Any]:
        """Metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        s, m = snapshot(self.engine), self.engine.metrics
        gauges = {
            "requests_running": ("Requests in a slot.", s["running"]),
            "requests_waiting": ("Requests without a slot.", s["waiting"]),
            "kv_reserved_bytes": ("Memory of keys and values.", s["memory"]["reserved"]),
            "kv_budget_bytes": ("Memory that keys and values may take.", s["memory"]["budget"]),
            "tau": ("Tokens that a verified round emits, over all ended requests.", s["tau"]),
            "overlap_hits": ("Share of overlapped rounds that left a draft.", s["overlap"].get("hit", 0.0)),
            "overlap_reuse": ("Share of overlapped rounds that began with a draft.", s["overlap"].get("reuse", 0.0)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"selfspec_{name}", text, value=value)
        counters = {
            "tokens": ("Tokens emitted.", s["tokens"]),
            "prompt_tokens": ("Prompt tokens of ended requests.", s["prompt_tokens"]),
            "preemptions": ("Running requests taken out of their slots.", s["preemptions"]),
            "rounds": ("Steps of the engine.", s["rounds"]),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"selfspec_{name}", text, value=value)
        ended = CounterMetricFamily("selfspec_requests_ended", "Requests by how they ended.", labels=["reason"])
        for reason, n in s["requests"].items():
            ended.add_metric([reason], n)
        yield ended
        named = {"queue_wait": m.wait, "time_to_first_token": m.first, "request": m.whole}
        for name, latency in named.items():
            sums = np.cumsum(latency.counts).tolist()
            buckets = [(str(b), n) for b, n in zip((*BOUNDS, "+Inf"), sums)]
            text = "Seconds from a request's arrival."
            yield HistogramMetricFamily(f"selfspec_{name}_seconds", text, buckets=buckets, sum_value=latency.sum)


def serve(engine: Engine, port: int, address: str = "127.0.0.1") -> Any:
    """Start the Prometheus endpoint in a thread of its own.

    Args:
        engine: whose figures.
        port: 0 takes any free one.
        address: to listen on; only this machine by default.

    Returns:
        The HTTP server (`server_port` tells the port), whose `shutdown` ends it.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
        ValueError: the port is taken, or is none.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--metrics-port needs prometheus_client: pip install 'selfspec[serve]'") from error
    registry = CollectorRegistry()
    registry.register(Collector(engine))
    try:
        return start_http_server(port, address, registry)[0]
    except (OSError, OverflowError) as error:
        raise ValueError(f"metrics port {port}: {error}") from error
