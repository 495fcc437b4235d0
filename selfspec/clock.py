"""Time between marks, on the device's own clock where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Laps of one round. On CUDA, events are recorded in the stream and read once the host has waited anyway.

    Args:
        device: where the work runs.

    Attributes:
        hears: is told what is read, where somebody learns from it.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.hears: Callable[[dict[str, float]], None] | None = None
        self.lap("")

    def lap(self, name: str) -> None:
        """End the lap called `name`."""
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((name, mark))

    def read(self) -> dict[str, float]:
        """Seconds of every lap. Waits for the last one."""
        if self._cuda:
            self._marks[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (_, before), (name, after) in pairwise(self._marks):
            lap = before.elapsed_time(after) / 1e3 if self._cuda else after - before
            seconds[name] = seconds.get(name, 0.0) + lap
        if self.hears is not None:
            self.hears(seconds)
        return seconds
