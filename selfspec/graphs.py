"""CUDA graphs: a function over static tensors is captured once per key and replayed; elsewhere it simply runs.

A decoding step is hundreds of small kernels, and starting them one by one takes longer than running them. A graph
starts them all at once, but replays exactly what it saw: the same shapes and the same addresses. So everything that
changes from call to call must live in tensors: the caller's own, updated in place, or inputs, which are copied in.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

MOST = 256  # every kind of request, batch and context has its own graph, and a server meets ever new kinds
LARGE = 1 << 20  # bytes of an output from which on all graphs leave it in one place: a draft's logits are tens of MiB
ALIGNED = 256  # elements
SCARCE = 1 << 30  # bytes free on the device below which what the allocator holds in reserve is given back first
_own = threading.local()


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Any


class Graphs:
    """Captured functions by key; all share one memory pool, and one place for what is large of their outputs.

    The first call of a key runs the function as it is (libraries and compilers set themselves up, and a rare key costs
    no capture); the second captures it and replays that, as all later ones do. Every call does the function's work
    exactly once, so a function with side effects (a decoding step) needs no separate warm-up.

    Args:
        device: where the functions run.
        enabled: False runs everything as it is, which a CPU does in any case.
        most: captured functions that are kept; the one that was not used for longest goes first.

    Attributes:
        captures: functions captured so far, those among them that are no longer kept.
    """

    def __init__(self, device: torch.device, enabled: bool = True, most: int = MOST):
        self.enabled = enabled and device.type == "cuda"
        self.most, self.captures = most, 0
        self._device = device
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._pool: Any = None
        self._place: dict[torch.dtype, Tensor] = {}  # of large outputs, [elements]

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a call with this key would be a replay."""
        return key in self._captured

    def __call__(self, key: Hashable, fn: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run `fn(*inputs)`.

        Args:
            key: names the function together with all shapes, sizes and tensors that it closes over.
            fn: launches work on the device and nothing else: no host reads of tensors, no shapes that depend on data.
            inputs: tensors of the same shapes at every call with this key.

        Returns:
            What `fn` returned. After a replay these are the graphs' own tensors: read them before the next call.
        """
        if not self.enabled:
            return fn(*inputs)
        captured = self._captured.get(key)
        if captured is None:
            if key not in self._seen:
                self._seen[key] = None
                if len(self._seen) > 2 * self.most:  # a key holds on to its recipes, and these to tensors
                    self._seen.popitem(last=False)
                return self._first(fn, inputs)
            while len(self._captured) >= self.most:
                self._evict()
            captured = self._captured[key] = self._capture(fn, inputs)
            self.captures += 1
        self._captured.move_to_end(key)
        for static, new in zip(captured.inputs, inputs, strict=True):
            static.copy_(new)
        captured.graph.replay()
        return captured.outputs

    def _first(self, fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        """Run on the stream that captures, so that what libraries set up per stream is there."""
        stream, current = _stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            out = fn(*inputs)
        current.wait_stream(stream)
        self._room(out)
        return out

    def _capture(self, fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Captured:
        """Record the function; nothing runs yet.

        `torch.cuda.graph` would first wait for the device and give back all memory that is held in reserve, pinned
        memory too, which the next steps would then ask for anew: each graph would cost the run tens of milliseconds.
        """
        if torch.cuda.mem_get_info(self._device)[0] < SCARCE:  # inside a capture nothing can be given back
            torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        static, graph = tuple(t.clone() for t in inputs), torch.cuda.CUDAGraph()
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._placed(fn(*static))
            finally:
                graph.capture_end()
        return _Captured(graph, static, outputs)

    def _evict(self) -> None:
        """Let go of the graph that was not used for longest."""
        if self._device.type == "cuda":  # it may still run
            torch.cuda.current_stream(self._device).synchronize()
        self._captured.popitem(last=False)

    # ---- outputs

    def _room(self, out: Any) -> None:
        """Make room for large outputs: twice as much as they need at most, so that what was too small adds little."""
        need: dict[torch.dtype, int] = {}
        _each(out, lambda t: need.update({t.dtype: need.get(t.dtype, 0) + _step(t)}))
        for dtype, n in need.items():
            if n and (dtype not in self._place or len(self._place[dtype]) < n):
                size = 1 << (n - 1).bit_length()
                self._place[dtype] = torch.empty(size, dtype=dtype, device=self._device)

    def _placed(self, out: Any) -> Any:
        """Outputs with the large ones copied to where all graphs leave theirs: each would keep its own otherwise."""
        self._room(out)
        used: dict[torch.dtype, int] = {}

        def moved(t: Tensor) -> Tensor:
            if not (step := _step(t)):
                return t
            at = used.get(t.dtype, 0)
            used[t.dtype] = at + step
            return self._place[t.dtype][at : at + t.numel()].view(t.shape).copy_(t)

        return _each(out, moved)


def _each(out: Any, fn: Callable[[Tensor], Any]) -> Any:
    """What a function returned with every tensor replaced, in tuples and dataclasses too."""
    if isinstance(out, Tensor):
        return fn(out)
    if isinstance(out, tuple):
        return tuple(_each(o, fn) for o in out)
    if is_dataclass(out) and not isinstance(out, type):
        return replace(out, **{f.name: _each(getattr(out, f.name), fn) for f in fields(out)})
    return out


def _step(t: Tensor) -> int:
    """Elements that a large output takes up, 0 of a small one."""
    return -(-t.numel() // ALIGNED) * ALIGNED if t.numel() * t.element_size() >= LARGE else 0


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where this thread captures: one stream for all its graphs, as libraries keep a workspace for each stream."""
    streams = vars(_own).setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


def capturable(config: Any) -> bool:
    """Whether a model's rotary embedding leaves lengths on the device (dynamic kinds read them at every call)."""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [ropes, *(v for v in ropes.values() if isinstance(v, dict))]
    return not any(r.get("rope_type") in ("dynamic", "longrope") for r in kinds)
