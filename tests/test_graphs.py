"""What is kept of captured functions; capturing itself needs a GPU."""

import torch

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
    assert len(graphs._seen) <= 8 * 3 and len(graphs) == 3
