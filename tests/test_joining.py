"""When those that wait go in."""

import pytest
import torch
from test_session import Replayed
from tiny import SLIGHT, model_of, reference

from selfspec import joining
from selfspec.backbone import Backbone
from selfspec.joining import Door
from selfspec.model import SelfSpecModel
from selfspec.plan import Plan
from selfspec.serving.engine import Engine
from selfspec.session import Request, Session


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(joining.time, "monotonic", lambda: now[0])
    return now


def test_a_few_free_slots_wait_for_others_but_not_for_long(clock):
    door = Door()
    assert door.admit(64, 1, 100) == 0 and door.admit(64, 7, 100) == 0
    assert door.admit(64, 8, 100) == 8  # 64 sqrt(2 / 128)
    assert door.admit(64, 1, 100) == 0
    clock[0] += 0.5 * joining.HELD
    assert door.admit(64, 2, 100) == 0
    clock[0] += 0.6 * joining.HELD
    assert door.admit(64, 2, 100) == 2
    assert door.admit(64, 1, 100) == 0  # the time starts anew


@pytest.mark.parametrize(
    "slots, free, waiting, admitted",
    [(64, 3, 3, 3), (64, 5, 2, 2), (64, 64, 100, 64), (1, 1, 9, 1), (4, 1, 9, 1), (64, 0, 9, 0), (64, 9, 0, 0)],
)
def test_nobody_waits_where_nothing_is_gained(clock, slots, free, waiting, admitted):
    """All that wait find a slot, nothing runs, or the slots are few."""
    assert Door().admit(slots, free, waiting) == admitted


def test_short_texts_go_in_more_at_a_time_and_long_ones_fewer(clock):
    def enough(rounds):
        door = Door()
        for _ in range(2000):
            door.left(rounds)
        return next(n for n in range(1, 65) if door.admit(64, n, 1000))

    assert [enough(r) for r in (1, 31, 127, 500, 10**6)] == [16, 16, 8, 4, 4]


@pytest.mark.parametrize("by", ["rounds", "engine"])
def test_a_queue_is_answered_in_its_order_through_fewer_prefills(monkeypatch, clock, by):
    """With the door prompts share their prefills, and texts are the same."""
    base = model_of("Llama", torch.float32, **SLIGHT)
    asked = [([1 + i, 3, 1 + i % 7], 2 + i % 8) for i in range(14)]
    truth = [reference(base, [p], n)[0] for p, n in asked]
    model, graphs, counts = SelfSpecModel(base), [], []
    model.bodies = [Backbone(base, backend="triton")]
    model.backbone = model.bodies[0]
    monkeypatch.setattr(joining, "LIVES", 8.0)
    monkeypatch.setattr(joining, "NARROWEST", 4)
    monkeypatch.setattr("selfspec.session.Graphs", lambda *_: graphs.append(Replayed()) or graphs[-1])
    for admit in (lambda self, slots, free, waiting: min(free, waiting), Door.admit):
        monkeypatch.setattr(Door, "admit", admit)
        requests, first = [Request(p, n) for p, n in asked], {}
        if by == "engine":
            engine = Engine(model, Plan("ar", 1), slots=8)
            for r in requests:
                engine.add(r)
            news = ([(e.ticket.request, e.tokens)] for e in engine.run())
        else:
            model._kept = None
            news = model.rounds(requests, Plan("ar", 1), slots=8)
        for emitted in news:
            first |= {r: len(first) for r, tokens in emitted if tokens and r not in first}
        assert sorted(first, key=first.get)[8:] == requests[8:] and len(first) == 14
        assert [r.output for r in requests] == truth
        counts.append(sum(k[0] == "prefill" for g in graphs for k in g.keys))
        graphs.clear()
    assert counts[1] < counts[0]


def test_prompts_of_very_different_lengths_do_not_share_a_forward(monkeypatch):
    """Padding costs no more rows than are computed, or than `SPARE`."""
    monkeypatch.setattr(joining, "SPARE", 8)
    session = Session(Backbone(model_of()), Plan("ar", 1), 5, 64, graphs=False)
    session.add([Request([1 + i] * n, 2) for i, n in enumerate((3, 4, 40, 3, 3))])
    ran = []
    while session.joining:
        before = list(session.joining)
        session.step()
        ran.append(len([r for r in before if r not in session.joining]))
    assert ran == [2, 2, 1]
