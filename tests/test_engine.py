"""The engine against one-by-one decoding: arrivals, cancellations, preemption, budgets, threads."""

import asyncio
import random
import threading
import time
import weakref
from collections import Counter

import pytest
import torch
from tiny import VOCAB, build, path_of
from transformers.generation import LogitsProcessorList

from selfspec.cache import KVCache
from selfspec.memory import slot_bytes
from selfspec.model import SelfSpecModel
from selfspec.plan import Plan
from selfspec.sampling import Pipeline, Sampling
from selfspec.serving import lane
from selfspec.serving.engine import Engine
from selfspec.serving.lane import Lane, allot, classes, most_slots
from selfspec.serving.stream import Streams
from selfspec.session import Request

pytestmark = pytest.mark.usefixtures("chains")

MODES = ("ar", "lookup", "sequential", "tree", "overlap", "overlap+tree")
EOS = frozenset([0])


@pytest.fixture(scope="module")
def model():
    base = build("Llama", torch.float32, max_position_embeddings=128, num_hidden_layers=2)
    return SelfSpecModel(base, path_of(base))


@pytest.fixture
def short(monkeypatch):
    """Lanes of 16, 32 and more positions, as 128 are all that the model has."""
    monkeypatch.setattr(lane, "SHORTEST", 16)
    monkeypatch.setattr(lane, "STEP", 2)


def prompts(n, seed=0, longest=20):
    draw = random.Random(seed)
    return [[draw.randrange(1, VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(n)]


def alone(model, prompt, cap):
    """What one request answers by itself, plainly."""
    request = Request(list(prompt), cap)
    for _ in model.run([request], Plan("ar", 1)):
        pass
    return request.output


def finish(engine):
    """Run to the end. Returns the tokens that events told of, by ticket."""
    told = {}
    for event in engine.run():
        told.setdefault(event.ticket, []).extend(event.tokens)
    return told


@pytest.fixture(scope="module")
def answered(model):
    """200 prompts, caps, and what generate answers to them one by one."""
    draw = random.Random(1)
    todo = [(p, draw.randint(1, 12)) for p in prompts(200, 1, longest=12)]
    right = []
    for prompt, cap in todo:
        out = model.generate([prompt], max_new_tokens=cap, do_sample=False, eos_token_id=0, mode="ar")
        right.append(out[0, len(prompt) :].tolist())
    return todo, right


@pytest.mark.parametrize("mode", MODES)
def test_random_arrivals_and_cancellations_change_no_text(model, short, answered, mode):
    plan = Plan(mode, 1 if mode == "ar" else 5, 6)
    draw = random.Random(MODES.index(mode))
    engine = Engine(model, plan, slots=6, memory=12 * slot_bytes(model.backbone, [plan], 32), patience=8)
    todo, truth = list(answered[0]), answered[1]
    tickets, told, doomed = [], {}, set()
    while todo or engine.busy:
        for _ in range(min(len(todo), draw.choice([0, 0, 1, 2, 9]))):
            prompt, cap = todo.pop(0)
            tickets.append(engine.add(Request(prompt, cap, EOS), priority=draw.choice([0, 0, 0, 1])))
            if draw.random() < 0.2:
                doomed.add(tickets[-1])
        for ticket in [t for t in doomed if t.finish_reason is None and draw.random() < 0.3]:
            engine.cancel(ticket)
        for event in engine.step():
            told.setdefault(event.ticket, []).extend(event.tokens)
        assert engine.reserved <= engine.memory and len(engine.running) <= 6
    reasons = Counter(t.finish_reason for t in tickets)
    assert reasons["cancelled"] > 10 and set(reasons) == {"stop", "length", "cancelled"}
    for ticket, right in zip(tickets, truth, strict=True):
        assert told.get(ticket, []) == ticket.request.output
        whole = ticket.finish_reason != "cancelled"
        assert ticket.request.output == (right if whole else right[: len(ticket.request.output)])
    assert engine.metrics.preemptions > 0  # or nothing of it was tried
    assert not engine.waiting and not engine.running and not any(x.running for x in engine.lanes.values())


def test_a_preempted_request_goes_on_without_a_lost_token(model):
    engine = Engine(model, slots=1)
    first = engine.add(Request([3, 7, 1, 9], 30))
    for _ in range(3):
        engine.step()
    before = list(first.request.output)
    urgent = engine.add(Request([5, 8, 10], 6), priority=1)
    engine.step()
    assert urgent.lane is not None and first.lane is None and 0 < len(before) < 30
    finish(engine)
    assert first.request.output == alone(model, [3, 7, 1, 9], 30) and first.request.output[: len(before)] == before
    assert urgent.request.output == alone(model, [5, 8, 10], 6) and engine.metrics.preemptions == 1


def test_requests_of_one_priority_are_served_in_their_order(model):
    engine = Engine(model, slots=2)
    tickets = [engine.add(Request(p, 3)) for p in prompts(12)]
    finish(engine)
    admitted = [t.admitted for t in tickets]
    assert admitted == sorted(admitted) and engine.metrics.preemptions == 0


def test_a_long_prompt_is_not_starved_by_short_ones(model, short):
    """A memory that holds either the long one's lane or the short ones', and short ones that keep coming."""
    plan = model.plan("sequential")
    budget = slot_bytes(model.backbone, [plan], 128)
    engine = Engine(model, plan, slots=4, memory=budget, patience=4)
    some = prompts(400, longest=8)
    for _ in range(8):
        engine.add(Request(some.pop(), 6))
    engine.step()
    long = engine.add(Request(prompts(1, longest=1)[0] * 100, 20))
    rounds = 0
    while long.finish_reason is None:
        engine.add(Request(some.pop(), 6))
        engine.step()
        rounds += 1
        assert engine.reserved <= budget and rounds < 60
    assert long.request.output == alone(model, long.request.prompt, 20)


def test_live_caches_never_exceed_the_budget(model, short, monkeypatch):
    """Counted on the caches that exist, not on what the engine believes; a lowered budget takes effect at once."""
    caches, peak = weakref.WeakSet(), []
    init = KVCache.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        caches.add(self)
        peak.append(sum(c.nbytes for c in caches))

    monkeypatch.setattr(KVCache, "__init__", noted)
    plan = model.plan("sequential")
    engine = Engine(model, plan, memory=4 * slot_bytes(model.backbone, [plan], 128), patience=2)
    draw = random.Random(5)
    tickets = [engine.add(Request(p * draw.choice([1, 1, 1, 4]), 10)) for p in prompts(60)]
    for _ in range(10):
        engine.step()
    assert len(caches) > 1 and max(peak) <= engine.memory
    engine.memory //= 3
    peak.clear()
    engine.step()
    assert sum(c.nbytes for c in caches) <= engine.memory
    finish(engine)
    assert max(peak) <= engine.memory
    monkeypatch.undo()
    done = [t for t in tickets if engine.cost[t.length] <= engine.memory]
    assert len(done) > 30 and all(t.request.output == alone(model, t.request.prompt, 10) for t in done)
    lost = [t for t in tickets if t not in done and t.finish_reason == "error"]
    assert all("lowered" in t.error for t in lost)


def test_the_planned_bytes_are_those_that_a_session_takes(model):
    for mode in MODES:
        for capacity in (5, 40, 128):
            plan = Plan(mode, 1 if mode == "ar" else 5, 6)
            made = Lane(model.backbone, plan, 3, capacity)
            assert made.nbytes == 3 * slot_bytes(model.backbone, [plan], capacity)


def test_what_would_never_fit_is_refused(model):
    plan = model.plan("sequential")
    engine = Engine(model, plan, memory=slot_bytes(model.backbone, [plan], 50))
    with pytest.raises(ValueError, match=r"prompt of 40 tokens and 20 new ones exceed the 50 positions that a KV"):
        engine.add(Request([1] * 40, 20))
    with pytest.raises(ValueError, match="the model's positions allow"):
        Engine(model).add(Request([1] * 127, 2))
    with pytest.raises(ValueError, match="needs more"):
        Engine(model, memory=100)
    bad = [engine.add(r) for r in (Request([], 3), Request([1], 0), Request([VOCAB], 3))]
    good = engine.add(Request([1], 3))
    finish(engine)
    assert [t.finish_reason for t in bad] == ["error"] * 3 and good.finish_reason == "length"
    assert "empty" in bad[0].error and "max_new_tokens=0" in bad[1].error and "token ids" in bad[2].error


def test_a_bare_engine_reserves_no_memory_for_hundreds_of_requests(model):
    """7 GB for one prompt on a CPU."""
    engine = Engine(model)
    assert engine.slots == 32 == most_slots(torch.device("cpu")) and most_slots(torch.device("cuda:0")) == 256
    slot = slot_bytes(model.backbone, engine.plan.plans, engine.classes[0])
    engine.add(Request([1], 3))
    engine.step()
    assert engine.reserved == 8 * slot
    for p in prompts(40):
        engine.add(Request(p, 90))
    engine.step()  # it grows by need
    engine.step()
    assert engine.reserved == 32 * slot and len(engine.running) == 32


def test_deadlines_end_waiting_and_running_requests(model):
    engine = Engine(model, slots=1)
    running = engine.add(Request([3, 7, 1], 100), timeout=0.05)
    waiting = engine.add(Request([5, 8], 3), timeout=0.05)
    after = engine.add(Request([5, 8], 3))
    engine.step()
    time.sleep(0.06)
    finish(engine)
    assert running.finish_reason == waiting.finish_reason == "deadline" and after.finish_reason == "length"
    right = alone(model, [3, 7, 1], 100)
    assert running.request.output == right[: len(running.request.output)] and not waiting.request.output


def test_ended_requests_are_not_kept_until_their_deadlines(model):
    """With timeouts of an hour a server held on to an hour's requests, texts and all."""
    engine = Engine(model, slots=4)
    for p in prompts(300):
        engine.add(Request(p, 2), timeout=3600)
    finish(engine)
    last = engine.add(Request([5, 8], 100), timeout=0.05)  # the latest deadline comes first
    engine.step()
    assert len(engine._deadlines) <= 64 + 2
    time.sleep(0.06)
    finish(engine)
    assert last.finish_reason == "deadline"


def test_a_request_that_fails_in_a_round_fails_alone(model):
    def broken(ids, scores):
        if ids.shape[1] > 6:
            raise RuntimeError("a processor's own fault")
        return scores

    def listed(processor):
        return Request([3, 7, 1, 9], 8, sampling=Sampling(Pipeline(LogitsProcessorList([processor]))))

    engine = Engine(model)
    good = [engine.add(Request(p, 12)) for p in prompts(5)]
    lazy = engine.add(listed(lambda ids, scores: scores))
    bad = engine.add(listed(broken))
    finish(engine)
    assert bad.finish_reason == "error" and "a processor's own fault" in bad.error
    for t in good:
        assert t.request.output == alone(model, t.request.prompt, 12)
    assert lazy.request.output == alone(model, [3, 7, 1, 9], 8)


def test_what_fails_beyond_a_processor_ends_one_request_and_no_other(model, monkeypatch):
    """Nobody can tell whose fault it is, so all of that round go on one by one."""
    engine, step = Engine(model), Lane.step
    tickets = [engine.add(Request(p, 12)) for p in prompts(5)]

    def failing(self):
        if tickets[2].request in self.running and len(tickets[2].request.output) > 4:
            raise IndexError("no such thing")
        return step(self)

    monkeypatch.setattr(Lane, "step", failing)
    finish(engine)
    assert tickets[2].finish_reason == "error" and tickets[2].error == "IndexError: no such thing"
    for t in tickets[:2] + tickets[3:]:
        assert t.request.output == alone(model, t.request.prompt, 12)


def test_allotments_meet_demand_fairly_and_within_the_budget():
    draw = random.Random(0)
    for _ in range(300):
        cost = {c: c * draw.randint(1, 3) for c in (10, 40, 160)}
        demand = {c: draw.randint(0, 40) for c in cost}
        budget, most = draw.randint(0, 3000), draw.randint(1, 30)
        order = draw.sample(list(cost), 3)
        slots = allot(demand, cost, budget, most, order)
        assert sum(cost[c] * n for c, n in slots.items()) <= budget
        assert all(demand[c] and 1 <= n <= most for c, n in slots.items())
        first = next((c for c in order if demand[c]), None)
        assert first is None or cost[first] > budget or first in slots
    assert [allot({10: 3}, {10: 10}, 10**6, 99, [10], ahead) for ahead in (True, False)] == [{10: 99}, {10: 8}]
    assert allot({10: 100, 40: 25}, {10: 10, 40: 40}, 400, 99, [40, 10]) == {40: 5, 10: 20}  # a fifth of each
    assert classes(None)[:3] == [1024, 4096, 16384] and classes(5000) == [1024, 4096, 5000] and classes(64) == [64]


def test_threads_take_turns(model):
    """Two threads step one engine, two others add, another one calls generate: every text is its own."""
    engine, tickets, errors = Engine(model, slots=3), [], []
    some = prompts(24)
    right = {tuple(p): alone(model, p, 8) for p in some}

    def guarded(f):
        def run():
            try:
                f()
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=run)

    def add(part):
        for p in part:
            tickets.append(engine.add(Request(p, 8)))
            time.sleep(0.002)

    def step():
        end = time.monotonic() + 20
        while (len(tickets) < 24 or any(t.finish_reason is None for t in tickets)) and time.monotonic() < end:
            engine.step()

    def generate():
        for p in some[:6]:
            out = model.generate([p], max_new_tokens=8, do_sample=False, eos_token_id=None)
            assert out[0, len(p) :].tolist() == right[tuple(p)]

    threads = [guarded(f) for f in (lambda: add(some[::2]), lambda: add(some[1::2]), step, step, generate)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and len(tickets) == 24
    assert all(t.request.output == right[tuple(t.request.prompt)] for t in tickets)


def test_async_callers_get_their_own_events(model):
    some = prompts(6)
    right = [alone(model, p, 12) for p in some]

    async def answer(streams, prompt):
        return [t async for event in streams.stream(Request(prompt, 12)) for t in event.tokens]

    async def leave(streams):
        request = Request([3, 7, 1], 100)
        async for _ in streams.stream(request):
            break
        return request

    async def main():
        async with Streams(Engine(model, slots=2)) as streams:
            seen = []
            everything = asyncio.ensure_future(_collect(streams, seen))
            outs = await asyncio.gather(*(answer(streams, p) for p in some), leave(streams))
            while streams.engine.busy:
                await asyncio.sleep(0.01)
            with pytest.raises(ValueError, match="exceed"):
                await anext(streams.stream(Request([1] * 200, 1)))
        await everything
        with pytest.raises(RuntimeError, match="closed"):
            await anext(streams.stream(Request([1], 1)))
        return outs, seen

    async def _collect(streams, seen):
        async for event in streams.events():
            seen.append(event)

    *outs, left = asyncio.run(main())[0]
    assert outs == right
    assert left.finish_reason == "cancelled" and len(left.output) < 100


def test_a_failed_engine_tells_every_caller(model, monkeypatch):
    async def main():
        engine = Engine(model)
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        async with Streams(engine) as streams:
            with pytest.raises(RuntimeError, match="has failed: division by zero"):
                await anext(streams.stream(Request([1], 1)))

    asyncio.run(main())
