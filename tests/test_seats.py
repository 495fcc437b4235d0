"""What a session keeps up to date between rounds says the same as gathering it anew."""

import random

import numpy as np
import pytest
import torch

from selfspec.plan import Plan
from selfspec.plan.views import Assignment, View, Views
from selfspec.request import Request
from selfspec.seats import Seats
from selfspec.slots import Slots
from selfspec.stats import Shares, Stats


@pytest.mark.parametrize("seed", range(4))
def test_seats_follow_who_comes_and_goes(seed):
    rng, seats = random.Random(seed), Seats(9)
    through, started = set(), []
    for _ in range(300):
        held = [r for r in seats.requests if r is not None]
        joining = [r for r in held if r not in through]
        event = rng.choice(["take", "start", "leave", "move", "fresh"])
        if event == "take" and seats.free:
            seats.take(request := Request([1], 3), rng.choice(seats.free))
            request.kind = rng.choice(["a", "a", "b", None])
        elif event == "start" and joining:
            seats.start(request := rng.choice(joining))
            through.add(request)
            started.append(request)
        elif event == "leave" and held:
            request = rng.choice(held)
            assert seats.requests[seats.leave(request)] is None and request.slot is None
            started = [r for r in started if r is not request]
        elif event == "move":
            n = rng.randint(len(held), 9)
            sources, targets = seats.gaps(n)
            assert sources == [i for i in range(n, 9) if seats.requests[i] is not None]
            assert all(seats.requests[t] is None and t < n for t in targets) and len(targets) == len(sources)
            seats.move(sources, targets)
            assert all(r is None for r in seats.requests[n:])
        elif event == "fresh":
            assert seats.fresh() == started
            started = []
        assert seats.free == [i for i, r in enumerate(seats.requests) if r is None]
        assert all(r is None or r.slot == i for i, r in enumerate(seats.requests))
        assert seats.taken == 9 - len(seats.free)
        rows = seats.rows(9)
        assert rows is seats.rows(9)  # nothing has changed
        assert rows.requests == [r if r in through else None for r in seats.requests]
        assert rows.running == [r for r in rows.requests if r is not None]
        kinds = {r.kind for r in rows.running}
        assert rows.key == (kinds.pop() if len(kinds) == 1 else None)


def test_columns_say_what_views_say():
    rng = random.Random(0)
    plans = [Plan("ar", 1), Plan("sequential", 4), Plan("tree", 8, 15), Plan("lookup", 6), Plan("overlap", 4)]
    for n in (1, 5):
        views = [
            View(i, rng.randint(1, 90), rng.randint(1, 6), rng.random() < 0.5, rng.random() < 0.3,
                 rng.choice([None, 0, 2]), rng.choice([None, 0.5]))
            for i in range(n)
        ]  # fmt: skip
        columns = Views.of(views)
        assert list(columns) == views and columns[n - 1] == views[-1] and Views.of(columns) is columns
        assert columns.context == sum(v.context for v in views) / n
        for plan in plans:
            depth = (plan.block_size if plan.tree else plan.nodes) - 1
            looked = [depth if v.lookup is None or not plan.lookup else min(depth, v.lookup) for v in views]
            wanted = [0 if v.missed else min(d, v.left - 1) for d, v in zip(looked, views)]
            assert Assignment(columns, plan).offered == Assignment(views, plan).offered == wanted


def test_columns_of_seats_count_what_is_on_its_way():
    requests = [Request([1] * 3, 10), Request([1] * 7, 5)]
    seats = Seats(4)
    for slot, request in zip((2, 0), requests):
        seats.take(request, slot)
        seats.start(request)
    views = seats.rows(4).views([8, 0, 5, 0], 2, True)
    assert views.keys is seats.rows(4).running and views.keys == requests[::-1]
    assert views.contexts == [8, 5] and views.saved == [True, True]
    assert views.left.tolist() == [5 - 1 - (8 - 7) - 2, 10 - 1 - (5 - 3) - 2]
    found = views.found({id(requests[0])})
    assert found.saved == [False, True] and found.missed == [True, False]
    assert views.without_drafts().saved == [] and not np.any(views.missed)


def test_shares_are_those_of_the_rounds_that_a_request_was_in():
    rng, shares = random.Random(1), Shares()
    running, everybody = [], []
    for _ in range(200):
        if rng.random() < 0.4:
            running.append((Stats(), Stats()))
            everybody.append(running[-1])
            shares.enter(running[-1][0])
        if running:
            laps = {name: rng.random() for name in rng.sample(["round", "draft", "rest"], 2)}
            drafts, plain = rng.choice([0.0, 0.5]), rng.random() < 0.3
            shares.add(plain, drafts, laps, len(running))
            for _, wanted in running:
                wanted.drafts += drafts
                wanted.accepted[1] += plain
                for name, seconds in laps.items():
                    wanted.seconds[name] += seconds / len(running)
        if running and rng.random() < 0.3:
            shares.leave(running.pop(rng.randrange(len(running)))[0])
    for stats, _ in running:
        shares.leave(stats)
        shares.leave(stats)  # a second time nothing is left to book
    shares.leave(nobody := Stats())
    assert nobody == Stats() and not nobody.seconds
    assert sum(wanted.accepted[1] for _, wanted in everybody) > 9
    for stats, wanted in everybody:
        assert stats.accepted == wanted.accepted and stats.drafts == pytest.approx(wanted.drafts)
        assert dict(stats.seconds) == pytest.approx(wanted.seconds)


def test_slots_are_written_together_and_before_they_move():
    slots = Slots(4, 8, torch.device("cpu"))
    slots.left[:] = 9
    slots.put(1, [5, 6, 7], 2, 3, 11)
    slots.put(3, [8], 0, 1, 12)
    slots.stop(0)
    assert slots.left.tolist() == [9] * 4 and not slots.text.any()
    slots.move([3], [2])
    assert slots.left.tolist() == [0, 0, 0, 0] and slots.start.tolist() == [0, 2, 0, 0]
    assert slots.prompt[1:3].tolist() == [3, 1] and slots.seed[1:3].tolist() == [11, 12]
    assert slots.text[1, :3].tolist() == [5, 6, 7] and slots.text[2, 0] == 8
    slots.left[:] = 9
    slots.write()
    assert slots.left.tolist() == [9] * 4
