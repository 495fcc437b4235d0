"""The log of a run: one JSON record a line, and the same numbers for TensorBoard where that is installed."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from selfspec.training.flops import Work


class Log:
    """Appends to `log.jsonl`, to TensorBoard's events under `tensorboard/`, and prints.

    Args:
        folder: of the run.
        tensorboard: write its events; None writes them where the package is installed.
        silent: write and print nothing (every process but the first).
    """

    def __init__(self, folder: Path, tensorboard: bool | None = None, silent: bool = False):
        self.began, self.folder, self.silent = time.perf_counter(), folder, silent
        installed = importlib.util.find_spec("tensorboard") is not None
        if tensorboard and not installed:
            raise ValueError("tensorboard=true, but it is not installed: pip install 'selfspec[train]'")
        self._wanted = installed if tensorboard is None else tensorboard
        self._writer: Any = None

    def __call__(self, record: dict[str, Any]) -> None:
        """Write a record; `event` and, where there is one, `step` say what and when it is."""
        if self.silent:
            return
        line = json.dumps({"t": self.since(), **record})
        print(line, flush=True)
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(line + "\n")
        if self._wanted and "step" in record:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(self.folder / "tensorboard")
            for name, value in scalars({k: v for k, v in record.items() if k not in ("event", "step")}):
                self._writer.add_scalar(f"{record['event']}/{name}", value, record["step"])

    def since(self) -> float:
        """Seconds since this call began."""
        return round(time.perf_counter() - self.began, 2)

    def close(self) -> None:
        """Write out what is held back."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Window:
    """Steps since the last record."""

    def __init__(self) -> None:
        self.seconds, self.steps, self.work = 0.0, 0, Work()

    def add(self, seconds: float, work: Work) -> None:
        """Book a step of this process."""
        self.seconds, self.steps, self.work = self.seconds + seconds, self.steps + 1, self.work + work


def profiled(step: Callable[[], Any], n: int, device: torch.device) -> str:
    """Run some steps under torch's profiler. Returns a table of kernels, the slowest first."""
    from torch.profiler import profile

    with profile() as profiler:
        for _ in range(n):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90)


def scalars(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings, with names like `known/tau`."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)
