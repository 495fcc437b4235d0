"""What is kept of captured functions; capturing itself needs a GPU."""

import contextlib
import threading
from dataclasses import dataclass

import pytest
import torch

from selfspec import graphs as graphs_module
from selfspec.graphs import Graphs, _Captured


class Replays:
    def replay(self):
        pass


def test_ever_new_kinds_do_not_fill_the_memory():
    """A server that is asked for ever new temperatures has ever new graphs."""
    graphs = Graphs(torch.device("cpu"), most=3)
    graphs.enabled, ran, captures = True, [], []
    graphs._first = lambda fn, inputs: ran.append("as it is") or fn(*inputs)
    graphs._capture = lambda fn, inputs: captures.append(fn()) or _Captured(Replays(), (), fn())

    def call(key):
        return graphs(key, lambda: key)

    assert [call("a"), call("a"), call("a")] == ["a"] * 3  # as it is, captured, replayed
    assert ran == ["as it is"] and captures == ["a"] and "a" in graphs
    for key in "bcd":
        call(key), call(key), call("a")
    assert len(graphs) == 3 and "a" in graphs and "b" not in graphs  # the least lately used has gone
    assert call("b") == "b" and captures == ["a", "b", "c", "d", "b"]  # it was seen before: captured at once
    for key in range(100):
        call(key)
    assert len(graphs._seen) <= 2 * 3 and len(graphs) == 3


class Machine:
    """Stands in for `torch.cuda`: notes what is asked of it; a graph runs its function at the capture only."""

    def __init__(self, monkeypatch, free=1 << 40):
        self.asked, self.streams, self.free = [], 0, free
        machine = self

        class Stream:
            def __init__(self, *_):
                machine.streams += 1

            def wait_stream(self, other):
                pass

            def synchronize(self):
                machine.asked.append("wait")

        class Graph:
            def capture_begin(self, pool=None, capture_error_mode="global"):
                assert capture_error_mode == "thread_local"  # other threads go on
                machine.asked.append("capture")

            def capture_end(self):
                machine.asked.append("end")

            def replay(self):
                machine.asked.append("replay")

        current = Stream()
        self.streams = 0
        for name, what in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "stream": lambda _: contextlib.nullcontext(),
            "current_stream": lambda _: current,
            "graph_pool_handle": lambda: (0, 1),
            "mem_get_info": lambda _: (self.free, 1 << 41),
            "empty_cache": lambda: self.asked.append("empty"),
            "synchronize": lambda *_: self.asked.append("synchronize"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, what)
        monkeypatch.setattr(graphs_module, "_own", threading.local())

    def graphs(self, most=3):
        graphs = Graphs(torch.device("cpu"), most=most)
        graphs.enabled = True
        return graphs


def test_a_capture_neither_waits_nor_gives_memory_back(monkeypatch):
    """`torch.cuda.graph` does both: with a planner, graphs are captured in mid-run, and all that the allocators held
    in reserve, pinned memory too, was asked for anew after each."""
    machine = Machine(monkeypatch)
    graphs = machine.graphs()
    for _ in range(3):
        graphs("a", lambda: torch.ones(2))
    assert machine.asked == ["capture", "end", "replay", "replay"] and graphs.captures == 1
    machine.free = 1 << 29  # inside a capture the allocator can't give back what it holds
    for _ in range(2):
        graphs("b", lambda: torch.ones(2))
    assert machine.asked[4:] == ["empty", "capture", "end", "replay"]


def test_a_capture_that_fails_ends(monkeypatch):
    """A stream that goes on capturing would swallow all later work."""
    machine = Machine(monkeypatch)
    graphs, calls = machine.graphs(), []

    def fails_later():
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no")
        return torch.ones(1)

    graphs("a", fails_later)
    with pytest.raises(ValueError, match="no"):
        graphs("a", fails_later)
    assert machine.asked == ["capture", "end"] and len(graphs) == 0


def test_all_graphs_of_a_thread_are_captured_on_one_stream(monkeypatch):
    """Libraries keep a workspace of tens of MiB per stream for good; lanes that were made anew had a stream each."""
    machine = Machine(monkeypatch)
    for _ in range(5):
        graphs = machine.graphs()
        graphs("a", lambda: torch.ones(1)), graphs("a", lambda: torch.ones(1))
    assert machine.streams == 1


def test_a_graph_that_goes_may_not_run_any_more(monkeypatch):
    machine = Machine(monkeypatch)
    graphs = machine.graphs(most=1)
    graphs._device = torch.device("cuda")
    for key in "aabb":
        graphs(key, lambda: torch.ones(1))
    assert machine.asked == ["capture", "end", "replay", "wait", "capture", "end", "replay"]


@dataclass(frozen=True)
class Drafted:
    logits: torch.Tensor
    states: torch.Tensor | None = None


def test_large_outputs_of_all_graphs_stand_in_one_place(monkeypatch):
    """Each graph kept its draft's logits, tens of MiB: a server's memory grew with every shape that it met."""
    monkeypatch.setattr("selfspec.graphs.LARGE", 1 << 10)
    machine = Machine(monkeypatch)
    graphs = machine.graphs(most=100)

    def drafted(n):
        logits = torch.arange(n * 512.0).view(n, 512).t().contiguous().t()  # as no view of a dense place would be
        return Drafted(logits, torch.full((2,), float(n))), None, torch.full((n, 300), n)

    def places(n):
        out = graphs(n, lambda: drafted(n))
        assert torch.equal(out[0].logits, torch.arange(n * 512.0).view(n, 512)) and out[1] is None
        assert torch.equal(out[0].states, torch.full((2,), float(n))) and torch.equal(out[2], torch.full((n, 300), n))
        return out

    for n in range(1, 9):
        places(n), places(n)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for c in graphs._captured.values()
            for t in (c.outputs[0].logits, c.outputs[2])}  # fmt: skip
    alone = sum(n * (512 * 4 + 300 * 8) for n in range(1, 9))
    assert len(kept) <= 8 and sum(kept.values()) < alone
    assert max(kept.values()) <= 2 * 8 * 300 * 8 + 8 * 256 * 8
    last, before = graphs._captured[8].outputs, graphs._captured[7].outputs
    assert last[0].logits.data_ptr() == before[0].logits.data_ptr()
    assert last[0].states.data_ptr() != before[0].states.data_ptr()  # small ones stay with their graph


def test_two_large_outputs_of_a_graph_do_not_stand_in_one_another(monkeypatch):
    monkeypatch.setattr("selfspec.graphs.LARGE", 1 << 10)
    graphs = Machine(monkeypatch).graphs()

    def two():
        return torch.full((300,), 1.0), torch.full((301,), 2.0)

    graphs("a", two)
    one, other = graphs("a", two)
    assert one.eq(1).all() and other.eq(2).all()
