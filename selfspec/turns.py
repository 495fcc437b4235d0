"""Threads on one backbone: its route, and on CUDA the counters of its split products, serve one forward at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch


class Turn:
    """A lock that its holder may take again, but not past one who waits for it."""

    def __init__(self) -> None:
        self._door, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._stream: torch.cuda.Stream | None = None  # where the last one worked

    def __enter__(self) -> Turn:
        if self._owner != threading.get_ident():
            with self._door:  # whoever waits stands in it, and the last holder comes behind
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def order(self, device: torch.device) -> None:
        """Let the holder's stream wait for what the last one has started, where threads have streams of their own."""
        if device.type == "cuda":
            mine = torch.cuda.current_stream(device)
            if self._stream is not None and self._stream != mine:
                mine.wait_stream(self._stream)
            self._stream = mine


@contextmanager
def turns(bodies: Sequence[Any]) -> Iterator[None]:
    """The turns of several backbones, always in one order, so that no two threads wait for each other."""
    with ExitStack() as stack:
        for body in sorted(bodies, key=lambda b: id(b.turn)):
            stack.enter_context(body.turn)
            body.turn.order(body.device)
        yield


def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an object with `bodies` that runs while no other thread works on any of them."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.bodies) == 1:  # `turns` in a tenth of the time
            with self.bodies[0].turn as turn:
                turn.order(self.bodies[0].device)
                return method(self, *args, **kwargs)
        with turns(self.bodies):
            return method(self, *args, **kwargs)

    return run
