"""What a session tells its policy of captured rounds."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from decoding import B, N, outputs
from test_session import Replayed
from tiny import PROMPT, model_of, path_of, reference, run

from selfspec.backbone import Backbone
from selfspec.plan import Plan
from selfspec.plan.policy import Fixed
from selfspec.plan.views import Assignment, Views
from selfspec.session import Request, Session


class Remembered(Replayed):
    """Its first call of a key runs, its second captures: from the third on it replays, as on a GPU."""

    def __contains__(self, key):
        return self.keys.count(key) > 1


class Restless(Fixed):
    """Any plan, and what it was told of all of them when it chose."""

    def __init__(self, plans):
        super().__init__(plans[0])
        self.plans, self.random = plans, random.Random(0)
        self.told, self.cold = [], []

    def round(self, active):
        views = Views.of(active)
        plan = self.random.choice(self.plans)
        self.told.append((plan, views.ready(plan)))
        return [Assignment(views, plan)]

    def observe(self, assignment, emitted, seconds=None, ended=None, hits=None, cold=False):
        self.cold.append((assignment.plan, cold))


@pytest.mark.parametrize("slots", [1, 3])
def test_a_policy_is_told_which_rounds_would_only_be_replayed(slots):
    model = model_of()
    plans = [Plan("ar", 1), Plan("sequential", B), Plan("sequential", B, verify_length=2), Plan("tree", B, N)]
    plans.append(Plan("overlap", B))
    policy = Restless(plans)
    body = Backbone(model, path_of(model, 0.2))
    session = Session(body, policy, slots, 200, graphs=Remembered())
    prompts = [PROMPT, [5, 8, 2, 5, 8], [13], [1] * 9] * 3
    requests = [Request(p, 40) for p in prompts]
    run(session, requests[:1], requests[1:])
    assert outputs(requests) == reference(model, prompts, 40)
    assert len(policy.told) == len(policy.cold) > 100
    for (plan, ready), (ran, cold) in zip(policy.told, policy.cold, strict=True):
        assert plan == ran
        if plan.overlap:  # it is ready only where its round with a saved draft and its round without are
            assert not (ready and cold)
        else:
            assert ready != cold
    assert any(ready for plan, ready in policy.told if plan.overlap)
    assert sum(cold for _, cold in policy.cold) > len(plans) and sum(ready for _, ready in policy.told) > 50


class Watchful(Fixed):
    """Notes whether the device waits for it, and how many slots decode for nobody."""

    def __init__(self, plan):
        super().__init__(plan)
        self.hurries, self.idle = [], []

    def round(self, active):
        views = Views.of(active)
        self.hurries.append(views.hurry)
        self.idle.append(views.idle)
        return [Assignment(views, self.plans[0])]


def test_a_policy_is_told_when_the_device_waits_for_it():
    model = model_of()
    policy = Watchful(Plan("ar", 1))
    session = Session(Backbone(model, path_of(model, 0.2)), policy, 1, 200, graphs=Remembered())
    for _ in range(2):
        run(session, [Request(PROMPT, 40)], [])
    assert sum(policy.hurries) == 2 and policy.hurries[0]  # as each begins: all others start beside the one before
    plain = Watchful(Plan("ar", 1))
    run(Session(Backbone(model, path_of(model, 0.2)), plain, 1, 200, graphs=False), [Request(PROMPT, 40)], [])
    assert not any(plain.hurries)  # nothing is ever on its way there: it would wait for ever


def test_a_policy_is_told_of_slots_that_decode_for_nobody():
    model = model_of()
    policy = Watchful(Plan("ar", 1))
    session = Session(Backbone(model, path_of(model, 0.2)), policy, 4, 200, graphs=Remembered())
    session.add([Request(PROMPT, 20)])
    session.step()
    session.step()
    assert set(policy.idle) == {0}
    session.door.held = 2
    session.add([Request([5, 8, 2], 20)])
    session.step()
    assert policy.idle[-1] == 3  # two that are held, one whose prompt runs


def test_a_session_that_is_dropped_in_the_middle_of_a_run_goes_at_once():
    """Views on their way held it by what they could ask, with keys, values and graphs, until the collector came."""
    model = model_of()
    policy = Restless([Plan("ar", 1), Plan("sequential", B)])
    session = Session(Backbone(model, path_of(model, 0.2)), policy, 1, 100, graphs=Remembered())
    session.add([Request(PROMPT, 40)])
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):
            session.step()
        assert session._flights and policy.told
        gone = weakref.ref(session)
        del session
        assert gone() is None
    finally:
        gc.enable()


def test_without_graphs_nobody_is_told():
    model = model_of()
    seen = []

    class Asks(Fixed):
        def round(self, active):
            seen.append(Views.of(active).ready)
            return super().round(active)

    session = Session(Backbone(model, path_of(model, 0.2)), Asks(Plan("ar", 1)), 1, 64, graphs=False)
    run(session, [Request(PROMPT, 5)], [])
    assert seen and not any(seen)
