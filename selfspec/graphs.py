"""CUDA graphs: a function over static tensors is captured once per key and replayed; elsewhere it simply runs.

A decoding step is hundreds of small kernels, and starting them one by one takes longer than running them. A graph
starts them all at once, but replays exactly what it saw: the same shapes and the same addresses. So everything that
changes from call to call must live in tensors: the caller's own, updated in place, or inputs, which are copied in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST = 512  # every kind of request, batch and context has its own graph, and a server meets ever new kinds


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Any


class Graphs:
    """Captured functions by key; all share one memory pool.

    The first call of a key runs the function as it is (libraries and compilers set themselves up, and a rare key costs
    no capture); the second captures it and replays that, as all later ones do. Every call does the function's work
    exactly once, so a function with side effects (a decoding step) needs no separate warm-up.

    Args:
        device: where the functions run.
        enabled: False runs everything as it is, which a CPU does in any case.
        most: captured functions that are kept; the one that was not used for longest goes first.
    """

    def __init__(self, device: torch.device, enabled: bool = True, most: int = MOST):
        self.enabled = enabled and device.type == "cuda"
        self.most = most
        self._device = device
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

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
            What `fn` returned. After a replay these are the graph's own tensors: read them before the next call.
        """
        if not self.enabled:
            return fn(*inputs)
        captured = self._captured.get(key)
        if captured is None:
            if key not in self._seen:
                self._seen[key] = None
                if len(self._seen) > 8 * self.most:
                    self._seen.popitem(last=False)
                return self._first(fn, inputs)
            while len(self._captured) >= self.most:
                self._captured.popitem(last=False)
            captured = self._captured[key] = self._capture(fn, inputs)
        self._captured.move_to_end(key)
        for static, new in zip(captured.inputs, inputs, strict=True):
            static.copy_(new)
        captured.graph.replay()
        return captured.outputs

    def _first(self, fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        """Run on the stream that captures, so that what libraries set up per stream is there."""
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            out = fn(*inputs)
        current.wait_stream(self._stream)
        return out

    def _capture(self, fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Captured:
        """Record the function; nothing runs yet."""
        static = tuple(t.clone() for t in inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = fn(*static)
        return _Captured(graph, static, outputs)


def capturable(config: Any) -> bool:
    """Whether a model's rotary embedding leaves lengths on the device (dynamic kinds read them at every call)."""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [ropes, *(v for v in ropes.values() if isinstance(v, dict))]
    return not any(r.get("rope_type") in ("dynamic", "longrope") for r in kinds)
