"""An engine's figures, as JSON and for Prometheus."""

import json
import urllib.request

import pytest
import torch
from tiny import build

from selfspec.model import SelfSpecModel
from selfspec.serving.engine import Engine
from selfspec.serving.metrics import KEPT, Latency, serve, snapshot
from selfspec.session import Request


@pytest.fixture(scope="module")
def engine():
    engine = Engine(SelfSpecModel(build("Llama", torch.float32, num_hidden_layers=2)), slots=2)
    tickets = [engine.add(Request([3, 7, 1 + i], 5)) for i in range(6)]
    engine.cancel(tickets[5])
    for _ in engine.run():
        pass
    return engine


def test_a_snapshot_is_plain_json_and_adds_up(engine):
    s = json.loads(json.dumps(snapshot(engine)))
    assert s["tokens"] == 25 and s["requests"] == {"length": 5, "cancelled": 1}
    assert s["tau"] >= 1 and s["prompt_tokens"] == 15 and s["latency_seconds"]["whole"]["count"] == 6
    assert s["latency_seconds"]["first"]["count"] == s["latency_seconds"]["wait"]["count"] == 5
    assert 0 < s["memory"]["peak"] <= s["memory"]["budget"] and s["peaks"]["running"] == 2
    assert s["running"] == s["waiting"] == 0 and s["overlap"] == {}


def test_latencies_keep_a_bounded_number_of_samples():
    latency = Latency()
    for i in range(3 * KEPT):
        latency.add(i / 1000)
    assert len(latency.latest) == KEPT and latency.count == 3 * KEPT and sum(latency.counts) == 3 * KEPT
    s = latency.summary()
    assert s["p50"] == pytest.approx(2.5 * KEPT / 1000, rel=0.01) and s["max"] == (3 * KEPT - 1) / 1000
    assert latency.counts[0] == 6  # 0 to 5 ms


def test_the_endpoint_speaks_prometheus(engine):
    parser = pytest.importorskip("prometheus_client.parser")
    server = serve(engine, 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        with pytest.raises(ValueError, match=f"metrics port {server.server_port}"):
            serve(engine, server.server_port)
    finally:
        server.shutdown()
        server.server_close()
    found = {f.name: f for f in parser.text_string_to_metric_families(text)}
    value = {s.name: s.value for f in found.values() for s in f.samples if not s.labels}
    assert value["selfspec_tokens_total"] == 25 and value["selfspec_requests_waiting"] == 0
    ended = {s.labels["reason"]: s.value for s in found["selfspec_requests_ended"].samples}
    assert ended == {"length": 5, "cancelled": 1}
    buckets = [s.value for s in found["selfspec_request_seconds"].samples if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == 6


def test_a_snapshot_tells_how_many_graphs_a_lane_keeps_and_may_keep(engine):
    """A soak's memory grew, and nothing said how much of it were graphs, nor that they have a bound."""
    lane = next(iter(engine.lanes.values()))
    told = snapshot(engine)["lanes"][0]["graphs"]
    assert told == {"kept": 0, "most": lane.open.graphs.most, "captured": 0}
    lane.open.graphs.captures = 7
    assert snapshot(engine)["lanes"][0]["graphs"]["captured"] == 7
    lane.session, session = None, lane.session  # as it is while another thread closes it
    assert "graphs" not in snapshot(engine)["lanes"][0]
    lane.session = session
