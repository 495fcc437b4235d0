"""The latency table: what a forward of so many rows costs on this machine, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from selfspec import rows
from selfspec.backbone import Backbone
from selfspec.draft.block import draft_inputs


@dataclass(frozen=True)
class Latency:
    """One measured point.

    Attributes:
        kind: "clean" (verify rows at all layers, head included) or "draft" (a group from the entry layer on).
        requests: N.
        rows: rows per request.
        entry: first layer run.
        context: committed positions per request.
        graph: replayed from a CUDA graph rather than launched eagerly.
        ms: median milliseconds.
        low, high: the fastest and the slowest repeat.
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


@torch.no_grad()
def measure(
    backbone: Backbone, kind: str, n: int, r: int, context: int = 512, graph: bool = False, repeats: int = 20
) -> Latency:
    """Time one forward with its head.

    Args:
        backbone: with a mask path when `kind` is "draft".
        kind: "clean" or "draft".
        n: requests.
        r: rows per request.
        context: committed positions.
        graph: capture it in a CUDA graph first.
        repeats: timed runs after three warm ones.
    """
    cache = backbone.new_cache(n, context, r)
    cache.lengths = [context] * n
    start = torch.full((n,), context, device=backbone.device)
    ids = torch.randint(backbone.vocab_size, (n, r), device=backbone.device)
    entry = backbone.path.entry if kind == "draft" and backbone.path is not None else 0
    if kind == "clean":
        layout = rows.chain(start, r)

        def run() -> None:
            backbone.logits(backbone(layout, cache, ids).clean)
    else:
        layout = rows.block(start, r)
        inputs = draft_inputs(ids[:, 0], n, r, 1, backbone.device)

        def run() -> None:
            backbone.logits(backbone(layout, cache, draft=inputs).draft)

    times = _timed(captured(run) if graph else run, backbone.device, repeats)
    return Latency(kind, n, r, entry, context, graph, statistics.median(times), min(times), max(times))


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


def _timed(run: Callable[[], None], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each repeat, the device synchronised around it."""

    def once() -> float:
        sync(device)
        begin = time.perf_counter()
        run()
        sync(device)
        return (time.perf_counter() - begin) * 1e3

    for _ in range(3):
        once()
    return [once() for _ in range(repeats)]


def sync(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
