"""Requests leave a planner: what was learnt of them, what is still to be told, and what is held in memory."""

import weakref

import numpy as np
import pytest
from test_planner import CHAINS, costs, texts, whole_menu

from selfspec.plan import Plan
from selfspec.plan.estimate import Estimator
from selfspec.plan.heard import POOL
from selfspec.plan.planner import Planner
from selfspec.plan.simulate import simulate
from selfspec.plan.views import Assignment, View, Views
from selfspec.request import Request


def test_forgotten_requests_leave_nothing():
    table = costs(0.01, 20)
    planner = Planner(table, whole_menu(20))
    simulate(planner, table, texts(0.8, 10), slots=4)
    assert set(planner.estimator.own) <= {POOL[0]} and planner.round([]) == []


def test_a_planner_holds_no_request_that_is_gone():
    """The last batch stayed in memory, with the keys and values that its requests had kept."""
    planner = Planner(costs(0.01), CHAINS)
    request = Request([1, 2], 40)
    for _ in range(6):
        planner.round([View(request, 10, 40)])
    planner.forget(request)
    gone = weakref.ref(request)
    del request
    assert gone() is None


def test_requests_that_leave_take_what_was_learnt_of_them_along():
    """A batch that is judged as one stayed as hard as its first texts had been, when all of them had long gone."""
    planner, views = Planner(costs(0.001, 20), CHAINS), [View(i, 100) for i in range(4)]
    planner.round(views)
    for _ in range(20):
        planner.observe(Assignment(tuple(views), Plan("sequential", 16)), [1] * 4, 0.001)
    planner.learn()
    own = planner.estimator.own["all requests"]
    before = list(own.mean), own.variance[0]
    planner.forget(0)
    assert own.mean == pytest.approx([0.75 * m for m in before[0]]) and before[0][0] > 0
    assert own.variance[0] == pytest.approx(0.5625 * before[1] + 0.4375 * own.bounds[0])


def test_nothing_is_kept_of_a_request_that_left_a_batch():
    """It ran alone, was joined, and left while the batch was one: its own rounds were told after it was forgotten."""
    planner = Planner(costs(0.1), whole_menu())
    for turn in range(20):
        for i in range(30):
            keys = [turn] if i < 28 else [turn, turn + 1]
            views = Views.of([View(k, 100 + i) for k in keys])
            (assignment,) = planner.round(views)
            heard = Views.of(assignment.views).heard({id(k): [1] for k in keys})
            planner.observe(Assignment(heard, assignment.plan), [2] * len(keys), 1e-3)
        planner.forget(turn)
    for _ in range(60):
        planner.observe(*[planner.round(Views.of([View(20, 100)]))[0], [2], 1e-3])
    assert not {*range(20)} & set(planner.estimator.own)


def test_the_host_thinks_of_nothing_where_a_request_that_ran_alone_leaves(monkeypatch):
    """It told the estimator of the last rounds there and then: a millisecond in which the device had nothing to do."""
    steps = []
    learn = Estimator._learn
    monkeypatch.setattr(Estimator, "_learn", lambda self, *given: steps.append(1) or learn(self, *given))
    late, told = (Planner(costs(0.1), whole_menu()) for _ in range(2))
    for planner in (late, told):
        for i in range(200):
            assignment = planner.round(Views.of([View("first", 100 + i)]))[0]
            heard = Views.of(assignment.views).heard({id("first"): [1]})
            planner.observe(Assignment(heard, assignment.plan), [4], 1e-3)
    assert late.heard.holds("first")
    told.learn()
    steps.clear()
    for planner in (late, told):
        planner.forget("first")
    assert not steps and "first" not in late.estimator.own and len(late.estimator.own) == 1
    late.learn()  # of the text that it was, whose own term is still there
    assert steps and not late.estimator.own and not late._gone
    assert np.allclose(late.estimator.mean, told.estimator.mean) and np.allclose(
        late.estimator.doubts, told.estimator.doubts
    )


def test_what_waits_of_one_that_left_holds_no_request():
    planner, request = Planner(costs(0.1), whole_menu()), Request([1, 2], 400)
    for i in range(40):
        assignment = planner.round(Views.of([View(request, 10 + i, 400)]))[0]
        planner.observe(assignment, [2], 1e-3)
    held = planner.heard.holds(request)
    planner.forget(request)
    gone = weakref.ref(request)
    del request, assignment
    assert held and gone() is None
