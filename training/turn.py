"""Whose turn it is on a device that several runs share: one trains, while others load, compile and evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable

from filelock import FileLock, Timeout

POLL_S = 0.2


class Turn:
    """A lock on a file, which the system takes back from a process that dies.

    Args:
        file: shared by the runs; "" is a device of one's own, whose turn it always is.
    """

    def __init__(self, file: str):
        self._lock = FileLock(file) if file else None

    @property
    def mine(self) -> bool:
        """Whether this run has it."""
        return self._lock is None or self._lock.is_locked

    def take(self, given_up: Callable[[], bool]) -> None:
        """Wait until no other run has the turn, or until `given_up` says so. Does nothing for the run that has it."""
        while self._lock is not None and not self.mine and not given_up():
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                time.sleep(POLL_S)

    def give(self) -> None:
        """Let the next one."""
        if self._lock is not None:
            self._lock.release()
