"""What went wrong with streamed answers when somebody tried to break them: each fault by its name."""

import asyncio
import time

import pytest
import torch
from tiny import SLIGHT, model_of

from selfspec.model import SelfSpecModel
from selfspec.serving.engine import Engine
from selfspec.serving.stream import Streams
from selfspec.session import Request

pytestmark = pytest.mark.usefixtures("chains")


@pytest.fixture
def engine():
    return Engine(SelfSpecModel(model_of("Llama", torch.float32, **SLIGHT)), slots=1)


def test_an_answer_that_a_closed_engine_cuts_short_does_not_look_whole(engine, monkeypatch):
    """Its stream ended like any other, without an event that says why."""
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.01) or step())

    async def main():
        seen = []

        async def follow(streams):
            async for event in streams.stream(Request([1], 60)):
                seen.append(event)

        async with Streams(engine) as streams:
            task = asyncio.ensure_future(follow(streams))
            while not seen:
                await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="closed before the answer's end"):
            await task
        assert seen[-1].finish_reason is None

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("how", ["closed", "division by zero"])
def test_events_of_an_engine_that_no_longer_runs_are_not_waited_for(engine, monkeypatch, how):
    """They were awaited forever."""

    async def main():
        async with Streams(engine) as streams:
            if how != "closed":
                monkeypatch.setattr(engine, "step", lambda: 1 / 0)
                with pytest.raises(RuntimeError, match="has failed"):
                    await anext(streams.stream(Request([1], 2)))
                with pytest.raises(RuntimeError, match=f"no longer runs: {how}"):
                    await anext(streams.events())
        with pytest.raises(RuntimeError, match=f"no longer runs: .*{how}"):
            await anext(streams.events())

    asyncio.run(asyncio.wait_for(main(), 60))
