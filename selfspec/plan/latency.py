"""What a forward of so many rows costs on this machine: single points, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from selfspec import rows, tops
from selfspec.backbone import Backbone
from selfspec.cache import KVCache
from selfspec.draft.block import draft_inputs
from selfspec.draft.condition import CANDIDATES, Given, condition_of, propose
from selfspec.draft.tree import best_first, grow

REPLAYS = 8  # of a graph in a row: rounds are launched ahead too, so the host's launch and wait are no part of a pass


@dataclass(frozen=True)
class Latency:
    """One measured point.

    Attributes:
        kind: "clean" (verify rows at all layers, head included), "draft" (a group from the entry layer on, its head
            included), "head" (that head alone: of a chain that is cut no more rows need it than are verified),
            "overlap" (clean rows, and draft rows that join them at the entry layer) or "tree" (what making and
            verifying a tree of a draft takes longer than a chain of as many rows; its growth alone where no graph is
            replayed, as launched forwards differ by more from run to run).
        requests: N.
        rows: rows per request; of an overlap its clean rows, of a tree its nodes.
        entry: first layer that draft rows run through; 0 where there are none.
        context: committed positions per request.
        graph: replayed from a CUDA graph rather than launched eagerly.
        ms: median milliseconds.
        low, high: the fastest and the slowest repeat.
        drafts: of an overlap, its draft rows per request; of a tree, the drafts that it is built of.
    """

    kind: str
    requests: int
    rows: int
    entry: int
    context: int
    graph: bool
    ms: float
    low: float
    high: float
    drafts: int = 0


@torch.no_grad()
def measure(
    backbone: Backbone,
    kind: str,
    n: int,
    r: int,
    context: int = 512,
    graph: bool = False,
    repeats: int = 20,
    drafts: int = 0,
    seconds: float | None = None,
) -> Latency:
    """Time one forward with its head, or what a tree costs.

    Args:
        backbone: with a mask path when `kind` is "draft" or "overlap".
        kind: "clean", "draft", "head", "overlap" or "tree".
        n: requests.
        r: rows per request; of an overlap its clean rows, of a tree its nodes.
        context: committed positions.
        graph: capture it in a CUDA graph first.
        repeats: timed runs after three warm ones; a graph is replayed `REPLAYS` times in each.
        drafts: of an overlap, draft rows per request: one group on each of the last clean rows, blocks as wide as they
            divide evenly; of a tree, its drafts.
        seconds: stop repeating after this long (two runs at least, and then one warm one is enough).
    """
    cache = backbone.new_cache(n, context, r + max(drafts, 1))
    cache.lengths = [context] * n
    start = torch.full((n,), context, device=backbone.device)
    ids = torch.randint(backbone.vocab_size, (n, r), device=backbone.device)
    entry = backbone.path.entry if kind in ("draft", "overlap") and backbone.path is not None else 0
    if kind == "tree":
        run, grown, chained = _rounds(backbone, cache, start, ids[:, 0], drafts, r)
    elif kind == "head":
        some = torch.randn(n, r, _width(backbone), device=backbone.device, dtype=backbone.dtype)

        def run() -> None:
            _condition(backbone, some, backbone.logits(some), ids[:, 0])
    elif kind == "clean":
        layout = rows.chain(start, r)

        def run() -> None:
            backbone.logits(backbone(layout, cache, ids).clean)
    elif kind == "draft":
        layout = rows.block(start, r)
        inputs = draft_inputs(ids[:, 0], n, r, 1, backbone.device, _features(backbone, n))

        def run() -> None:
            states = backbone(layout, cache, draft=inputs).draft
            _condition(backbone, states, backbone.logits(states), ids[:, 0])
    else:
        groups = next(g for g in range(min(r, drafts), 0, -1) if drafts % g == 0)
        nodes = torch.arange(r - groups, r, device=backbone.device).expand(n, groups)
        layout = rows.overlapped(rows.chain(start, r), nodes, drafts // groups)
        inputs = draft_inputs(None, n, drafts // groups, groups, backbone.device, _features(backbone, n))

        def run() -> None:
            hidden = backbone(layout, cache, ids, inputs)
            backbone.logits(hidden.clean)
            states = hidden.draft[:, : drafts // groups]  # only the group that came true needs the head
            _condition(backbone, states, backbone.logits(states), ids[:, 0])

    def timed(run: Callable[[], None]) -> list[float]:
        return _timed(captured(run) if graph else run, backbone.device, repeats, seconds, REPLAYS if graph else 1)

    times = timed(run)
    if kind == "tree" and graph:
        more = statistics.median(timed(grown)) - statistics.median(timed(chained)) - statistics.median(times)
        times = [ms + max(more, 0.0) for ms in times]
    return Latency(kind, n, r, entry, context, graph, statistics.median(times), min(times), max(times), drafts)


def _rounds(
    backbone: Backbone, cache: KVCache, start: torch.Tensor, anchor: torch.Tensor, drafts: int, nodes: int
) -> tuple[Callable[[], None], ...]:
    """Growing a tree; making one of a draft and verifying it; the same of a chain of as many rows. No heads of the
    model."""
    n, k, device = len(anchor), CANDIDATES, backbone.device
    states = torch.randn(n, drafts, _width(backbone), device=device, dtype=backbone.dtype)
    logits, condition = backbone.logits(states), condition_of(backbone)
    given = None if condition is None else Given(condition, states, anchor)
    tokens = anchor[:, None].expand(n, nodes + 1)
    # what a head says of candidates, for the growth alone
    top, order = torch.randn(n, drafts, k, k, device=device).log_softmax(-1).sort(-1, descending=True)
    ids = torch.randint(backbone.vocab_size, (n, drafts, k), device=device)

    def growth() -> None:
        if given is None:
            best_first(anchor, logits, nodes)
        else:  # over what may follow each candidate
            grow(anchor, top, ids, nodes, order)

    def grown() -> None:
        tree = best_first(anchor, logits, nodes) if given is None else propose(anchor, logits, given, nodes)
        assert tree.parents is not None
        backbone(rows.tree(start, tree.parents, tree.ancestors, tree.depths), cache, tokens)

    def chained() -> None:
        if given is None:
            tops.chain(anchor, logits)
        else:
            propose(anchor, logits, given, None)
        backbone(rows.chain(start, nodes + 1), cache, tokens)

    return growth, grown, chained


def _condition(backbone: Backbone, states: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor) -> None:
    """What a draft costs beside its forward, where a head conditions it: all but the growth of a tree."""
    condition = condition_of(backbone)
    if condition is not None:
        propose(anchor, logits, Given(condition, states, anchor), None)


def _features(backbone: Backbone, n: int) -> torch.Tensor | None:
    """[N, 1, F] of nothing in particular, where the mask path reads features."""
    path = backbone.path
    if path is None or not path.taps:
        return None
    return torch.zeros(n, 1, len(path.taps) * _width(backbone), dtype=backbone.dtype, device=backbone.device)


def _width(backbone: Backbone) -> int:
    """Of hidden states."""
    return int(backbone.embed(torch.zeros(1, 1, dtype=torch.long, device=backbone.device)).shape[-1])


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """The same work as one CUDA graph replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm: lazy allocations and library handles may not happen inside a capture
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _timed(
    run: Callable[[], None], device: torch.device, repeats: int, seconds: float | None = None, runs: int = 1
) -> list[float]:
    """Milliseconds of a run in each repeat, the device synchronised around its runs, which follow one another."""

    def once() -> float:
        sync(device)
        begin = time.perf_counter()
        for _ in range(runs):
            run()
        sync(device)
        return (time.perf_counter() - begin) * 1e3 / runs

    begin = time.perf_counter()

    def late() -> bool:
        return seconds is not None and time.perf_counter() - begin > seconds

    for i in range(3):
        if i == 0 or not late():
            once()
    times: list[float] = []
    while len(times) < repeats and (len(times) < 2 or not late()):
        times.append(once())
    return times


def sync(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
