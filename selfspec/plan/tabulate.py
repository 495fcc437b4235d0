"""Measuring a latency table: the most telling points first, within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import psutil
import torch

from selfspec.backbone import Backbone
from selfspec.graphs import capturable
from selfspec.plan import BLOCKS, CUTS
from selfspec.plan.latency import REPLAYS, Latency, measure
from selfspec.plan.table import LatencyTable, setting, stored_at

MOST_ROWS = 4096  # of one forward; beyond it every row costs alike, and extrapolation says so
PER_POINT = 0.1  # seconds of repeats


@dataclass(frozen=True)
class Sizes:
    """Padded sizes to measure.

    Attributes:
        rows: clean rows per request.
        requests: N.
        contexts: committed positions.
        blocks: rows of a draft group.
        trees: nodes of trees.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    contexts: tuple[int, ...] = (256, 2048, 8192)
    blocks: tuple[int, ...] = BLOCKS
    trees: tuple[int, ...] = (15, 63)


def at_load(slots: int, context: int = 256) -> Sizes:
    """The few sizes that a planner needs for so many requests at a time."""
    requests = (1, *(n for n in (8, 32, 128) if n < slots), slots)
    return Sizes((1, 4, 16, 32, 64, 256), tuple(dict.fromkeys(requests)), (context,), (4, 16))


@dataclass(frozen=True)
class Shape:
    """One forward to measure; the fields are those of `Latency`."""

    kind: str
    requests: int
    rows: int
    context: int
    drafts: int = 0


def shapes(backbone: Backbone, sizes: Sizes) -> list[Shape]:
    """Everything that the sizes ask for and the model allows, the most telling first.

    Each axis is walked like a bisection (first, last, middle, ...), and a shape's turn comes by the sum of its places
    on the axes: a budget that ends early leaves a coarse table, not half of one.
    """
    limit = backbone.max_positions
    contexts = [c for c in sizes.contexts if limit is None or c < limit] or [max((limit or 2) // 2, 1)]
    path = getattr(backbone.path, "config", None)
    widest = getattr(path, "block_size", 0)
    # the widest block that planners may choose is always measured: beyond it a time would only be an upper bound
    most = max((b for b in BLOCKS if b <= widest), default=max(widest, 2))
    blocks = [] if backbone.path is None else sorted({most, *(b for b in sizes.blocks if b <= widest)})
    turns: list[tuple[int, int, Shape]] = []
    for i, n in _bisected(sizes.requests) if blocks else ():  # a tree costs over a chain about as much at any context
        turns += [(i + j + 2, 3, Shape("tree", n, m, contexts[0], most - 1)) for j, m in enumerate(sizes.trees)]
        turns += [(i + j + 1, 4, Shape("head", n, b, contexts[0])) for j, b in enumerate(_heads(blocks))]
    for (i, n), (k, c) in product(_bisected(sizes.requests), _bisected(contexts)):
        turns += [(i + j + k, 0, Shape("clean", n, r, c)) for j, r in _bisected(sizes.rows)]
        turns += [(i + j + k + 1, 1, Shape("draft", n, b, c)) for j, b in _bisected(sorted(blocks, reverse=True))]
        if blocks and getattr(path, "layouts", ()) != ("known",):
            b = max(blocks)
            turns += [(i + j + k + 4, 2, Shape("overlap", n, b, c, g * b)) for j, g in _bisected((1, b, 4)) if g <= b]
    turns = [t for t in turns if t[2].requests * (t[2].rows + t[2].drafts) <= MOST_ROWS]
    return list(dict.fromkeys(s for *_, s in sorted(turns, key=lambda t: t[:2])))


def _heads(blocks: Sequence[int]) -> list[int]:
    """Rows at which the head alone is measured: the widest block, and the shortest cut of it."""
    return sorted({max(blocks), min(c for c in (*CUTS, max(blocks)) if c <= max(blocks))}, reverse=True)


def _bisected(values) -> Iterator[tuple[int, int]]:
    """(place, value) of first, last, the middle of what lies between, and so on."""
    values, seen = list(values), list[int]()
    gaps = [(0, len(values) - 1)]
    seen += dict.fromkeys([0, len(values) - 1])
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            seen.append(middle)
            gaps += [(low, middle), (middle, high)]
    return ((place, values[i]) for place, i in enumerate(seen))


def tabulate(
    backbone: Backbone,
    sizes: Sizes,
    seconds: float | None = None,
    graph: bool | None = None,
    known: LatencyTable | None = None,
    note: Callable[[Latency], None] = lambda point: None,
    measured: Callable[..., Latency] = measure,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyTable:
    """Measure what is not known yet.

    Args:
        backbone: the model; its mask path's drafts are measured too.
        sizes: what to measure.
        seconds: time budget. A point that would overrun it by what is known so far is left out; the first is always
            measured.
        graph: replay CUDA graphs; by default where that is possible.
        known: an earlier table of the same setting, which is completed.
        note: called with each point.
        measured: takes the points.
        clock: seconds.
    """
    begin = clock()
    graph = graphs_run(backbone) if graph is None else graph
    table = known or LatencyTable((), backbone.n_layers, setting(backbone, graph))
    entry = backbone.path.entry if backbone.path is not None else 0
    done = {Shape(p.kind, p.requests, p.rows, p.context, p.drafts) for p in table.points}
    left = [s for s in shapes(backbone, sizes) if s not in done]
    while left:
        spent = clock() - begin
        if seconds is None or not table.points:
            affordable: list[Shape] = left
        else:
            runs = 3e-3 * (2 + REPLAYS if graph else 1)  # seconds per millisecond: a warm repeat, two timed, captures
            affordable = [s for s in left if spent + runs * _expected(table, s, entry) < seconds]
        shape = next((s for s in affordable if _fits(backbone, s)), None)
        if shape is None:
            break
        left.remove(shape)
        s = shape
        point = measured(
            backbone, s.kind, s.requests, s.rows, s.context, graph, drafts=s.drafts, seconds=seconds and PER_POINT
        )
        table = table.merged((point,))
        note(point)
    return table


def _expected(table: LatencyTable, s: Shape, entry: int) -> float:
    ms = float(table.time(s.kind, s.rows, s.requests, s.context, entry, s.drafts))
    if s.kind not in ("tree", "head"):
        return ms
    forward = float(table.time("clean", s.rows + s.drafts, s.requests, s.context))
    return max(ms, 2 * forward if s.kind == "tree" else forward)  # few of them are known yet; of a tree two are run


def graphs_run(backbone: Backbone) -> bool:
    """Whether this model's rounds replay CUDA graphs on its device."""
    return backbone.device.type == "cuda" and capturable(backbone.config)


def _fits(backbone: Backbone, s: Shape) -> bool:
    """Whether the cache and the logits of a forward take no more than half of the free memory."""
    size = torch.empty(0, dtype=backbone.dtype).element_size()
    per_position = size * sum(h * (d + dv) for h, d, dv in backbone.kv_shapes)
    rows = s.rows + s.drafts
    wanted = s.requests * ((s.context + rows) * per_position + rows * backbone.vocab_size * (size + 4))
    if backbone.device.type == "cuda":
        return wanted < 0.5 * torch.cuda.mem_get_info(backbone.device)[0]
    return wanted < 0.5 * psutil.virtual_memory().available


def table_for(
    backbone: Backbone,
    slots: int = 1,
    context: int = 256,
    seconds: float = 10.0,
    graph: bool | None = None,
    shared: Sequence[Latency] = (),
) -> LatencyTable:
    """The stored table of this machine and model, or one measured now and stored.

    Args:
        backbone: the model.
        slots: requests at a time that it must cover.
        context: committed positions at which missing points are measured.
        seconds: time budget of the measurement.
        graph: as in `tabulate`.
        shared: points of the same model with another mask path, which need not be measured again.
    """
    graph = graphs_run(backbone) if graph is None else graph
    file = stored_at(setting(backbone, graph))
    known = stored(backbone, graph)
    if known is not None and known.covers(slots):
        return known
    if known is None:
        known = LatencyTable(tuple(shared), backbone.n_layers, setting(backbone, graph))
    table = replace(tabulate(backbone, at_load(slots, context), seconds, graph, known), asked=slots)
    table.save(file)
    return table


def stored(backbone: Backbone, graph: bool | None = None) -> LatencyTable | None:
    """The stored table of this machine and model, if there is one that can be read."""
    try:
        return LatencyTable.load(stored_at(setting(backbone, graphs_run(backbone) if graph is None else graph)))
    except (FileNotFoundError, ValueError):
        return None
