"""An engine behind asyncio: a thread steps it, and each caller iterates over its own request's events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from selfspec.serving.engine import Engine
from selfspec.serving.ticket import Event, Ticket
from selfspec.session import Request

End = BaseException | None


class Streams:
    """Runs an engine in a thread of its own. Use as an async context manager, in the loop that iterates.

    Args:
        engine: nobody else may step it meanwhile.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.error: BaseException | None = None
        self._queues: dict[Ticket, asyncio.Queue[Event | End]] = {}
        self._everything: list[asyncio.Queue[Event | End]] = []
        self._wake, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._drive, name="selfspec engine", daemon=True)

    async def __aenter__(self) -> Streams:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._tell_all(None)

    async def stream(self, request: Request, priority: int = 0, timeout: float | None = None) -> AsyncIterator[Event]:
        """Queue a request and iterate over its events; the last one has a finish_reason.

        A caller that stops iterating, or is cancelled, cancels the request.

        Args:
            request: not yet served by anybody.
            priority: see `Engine.add`.
            timeout: likewise.

        Raises:
            ValueError: the request would never fit.
            RuntimeError: the engine has failed or was closed, be it in the middle of the answer.
        """
        queue: asyncio.Queue[Event | End] = asyncio.Queue()
        with self._wake:
            self._running()
            ticket = self.engine.add(request, priority, timeout)
            self._queues[ticket] = queue
            self._wake.notify()
        try:
            async for event in self._events(queue):
                yield event
                if event.finish_reason is not None:
                    return
            raise RuntimeError("the engine was closed before the answer's end")
        finally:
            with self._wake:
                self._queues.pop(ticket, None)
                if ticket.finish_reason is None:
                    self.engine.cancel(ticket)
                    self._wake.notify()

    async def events(self) -> AsyncIterator[Event]:
        """All events of the engine from now on, until it is closed.

        Raises:
            RuntimeError: it has failed, or no longer ran.
        """
        queue: asyncio.Queue[Event | End] = asyncio.Queue()
        self._running()
        self._everything.append(queue)
        try:
            async for event in self._events(queue):
                yield event
        finally:
            self._everything.remove(queue)

    def _running(self) -> None:
        if self._closed or self.error is not None:
            raise RuntimeError(f"the engine no longer runs: {self.error or 'it was closed'}") from self.error

    async def _events(self, queue: asyncio.Queue[Event | End]) -> AsyncIterator[Event]:
        while isinstance(event := await queue.get(), Event):
            yield event
        if event is not None:
            raise RuntimeError(f"the engine has failed: {event}") from event

    def _drive(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self.engine.busy, timeout=1.0)
                    if self._closed:
                        return
                events = self.engine.step() if self.engine.busy else []
                if events:
                    self._loop.call_soon_threadsafe(self._tell, events)
        except BaseException as error:
            self.error = error
            self._loop.call_soon_threadsafe(self._tell_all, error)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            queue = self._queues.get(event.ticket)
            for q in [*self._everything, *([queue] if queue else [])]:
                q.put_nowait(event)

    def _tell_all(self, end: End) -> None:
        for q in [*self._everything, *self._queues.values()]:
            q.put_nowait(end)
