"""The simulator: policies without a machine, checked by hand."""

from dataclasses import replace

import numpy as np
import pytest
from test_planner import AR, LAYERS, costs, texts

from selfspec.plan import Plan
from selfspec.plan.cost import Costs
from selfspec.plan.estimate import DEPTH, Family, families
from selfspec.plan.policy import Fixed
from selfspec.plan.simulate import Trace, bernoulli, of_stats, simulate
from selfspec.plan.table import LatencyTable
from selfspec.plan.value import Values
from selfspec.plan.views import Assignment, Views
from selfspec.stats import Stats


def test_simulated_rounds_by_hand():
    table, known = costs(0.1), Family("known")
    trace = Trace(10, 7, {known: np.array([2, 9, 9, 1, 9, 9, 0])})
    out = simulate(Fixed(Plan("sequential", 4)), table, [trace])
    # 2 accepted of 3 + bonus = 3 tokens; 1 + bonus = 2; then 2 are left: 1 draft fits beside the bonus
    assert sorted(out.accepted.elements()) == [2, 2, 3] and out.tokens == 7 and out.tau == pytest.approx(7 / 3)
    assert out.ms == pytest.approx(3 * (1.4 + 1.4)) and out.prefill_ms == pytest.approx(1 + 0.1 * 10)
    plain = simulate(Fixed(AR), table, [trace])
    assert plain.rounds == 7 and plain.ms == pytest.approx(7 * 1.1) and plain.latency == [pytest.approx(7 * 1.1)]


def test_simulated_overlap_by_hand():
    table = costs(0.1, entry=15)
    hidden, known = Family("hidden"), Family("known")
    trace = Trace(10, 9, {known: np.full(9, 1), hidden: np.array([0, 0, 3, 0, 0, 0, 0, 0, 0])})
    every = simulate(Fixed(Plan("overlap", 4)), table, [trace])
    # known: 2 tokens; then saved drafts: 4, 1, 1, 1
    assert sorted(every.accepted.elements()) == [1, 1, 1, 2, 4]
    verify, draft = 0.5 * 1.4 + 0.5 * (1 + 0.1 * 20), 0.5 * 1.4
    assert every.ms == pytest.approx(5 * verify + draft)
    one = simulate(Fixed(Plan("overlap", 4, groups=1)), table, [trace])
    # only runs of 0 have a group: rounds of made drafts, 2 tokens each, and with one left the end
    assert sorted(one.accepted.elements()) == [1, 2, 2, 2, 2]
    assert one.ms == pytest.approx(5 * (0.5 * 1.4 + 0.5 * (1 + 0.1 * 8) + draft))


def test_simulated_misses_of_graphs_cost_a_round_of_the_anchor():
    """Rounds are started ahead: that a draft is missing is known too late to make one."""
    eager = costs(0.1, entry=15)
    table = Costs(LatencyTable(tuple(replace(p, graph=True) for p in eager.table.points), LAYERS), (15,))
    trace = Trace(10, 9, {Family("known"): np.full(9, 1), Family("hidden"): np.zeros(9, int)})
    one = simulate(Fixed(Plan("overlap", 4, groups=1)), table, [trace])
    # the first round's 1 is a miss, so the next verifies the anchor alone, which leaves a draft; later runs are of 0
    assert sorted(one.accepted.elements()) == [1] * 7 + [2]
    assert one.ms == pytest.approx(8 * (0.5 * 1.4 + 0.5 * (1 + 0.1 * 8)) + 0.5 * 1.4)


@pytest.mark.parametrize("graphs", [False, True])
def test_simulated_requests_that_join_leave_the_others_their_drafts(graphs):
    eager = costs(0.1, entry=15)
    table = Costs(LatencyTable(tuple(replace(p, graph=graphs) for p in eager.table.points), LAYERS), (15,))
    runs = {Family("known"): np.zeros(9, int), Family("hidden"): np.full(9, 1)}
    out = simulate(Fixed(Plan("overlap", 4)), table, [Trace(10, 4, runs), Trace(10, 9, runs), Trace(10, 1, runs)], 2)
    # both: 1, then 2, 2 of saved drafts, the first ended by its last one; the third joins: 1; the second alone: 2
    assert dict(out.accepted) == {1: 4, 2: 5} and out.rounds == 9


def test_simulated_slots_are_refilled_from_the_queue():
    table, trace = costs(0.1), Trace(5, 4, {})
    out = simulate(Fixed(AR), table, [trace] * 3, slots=2)
    assert out.tokens == 12 and out.ms == pytest.approx(4 * 1.2 + 4 * 1.1)
    with pytest.raises(ValueError, match="record it in that mode"):
        simulate(Fixed(Plan("tree", 4)), table, [trace])


def test_simulated_slots_stay_empty_until_an_end_is_read_and_the_door_opens():
    table, trace = costs(0.1), Trace(5, 4, {})
    late = simulate(Fixed(AR), table, [trace.cut(2), trace, trace], slots=2, lag=1)
    # two rounds of both, one of the second alone, the second and the third, the third's other rounds
    assert late.tokens == 10 and late.ms == pytest.approx(2 * 1.2 + 1.1 + 1.2 + 3 * 1.1)

    ended = []

    class Shut:
        def admit(self, slots, free, waiting, now):
            return 0

        def left(self, rounds):
            ended.append(rounds)

    shut = simulate(Fixed(AR), table, [trace.cut(2), trace, trace], slots=2, door=Shut())
    assert ended == [2, 4, 4] and shut.ms == pytest.approx(2 * 1.2 + 2 * 1.1 + 4 * 1.1)
    assert simulate(Fixed(AR), table, [trace] * 9, slots=2, tokens=9).tokens == 10


@pytest.mark.parametrize("hears, slots", [(16, 1), (2, 3), (3, 3)])
def test_a_simulated_planner_hears_what_lookup_would_do_whatever_runs(hears, slots):
    table, runs = costs(0.1), np.array([0, 3, 9, 9, 9, 1, 9, 0, 5, 0])
    trace = Trace(10, 10, {Family("lookup"): runs, Family("known"): np.full(10, 2)})

    class Listening(Fixed):
        def observe(self, assignment, emitted, *rest, **more):
            for key, accepted in zip(assignment.keys, Views.of(assignment.views).copied or [None] * slots, strict=True):
                heard[key] += accepted or []

    for plan in (AR, Plan("sequential", 4), Plan("lookup", 2)):
        heard = [[] for _ in range(slots)]
        simulate(Listening(plan), table, [trace] * slots, slots, hears=hears)
        # rounds of 1, 4, 2 and 1 tokens; the end cuts one of 6
        assert heard == [[0, 3, 1, 0] if hears >= slots else []] * slots


def test_a_policy_that_forgets_a_request_is_caught():
    class Lazy(Fixed):
        def round(self, active):
            return [Assignment(tuple(active[:1]), self.plans[0])]

    with pytest.raises(ValueError, match="every running request"):
        simulate(Lazy(AR), costs(0.1), texts(0.5, 2), slots=2)


def test_counted_lengths_make_a_trace():
    stats = Stats()
    for k in [1] * 30 + [4] * 70:
        stats.count(k)
    out = simulate(Fixed(Plan("sequential", 8)), costs(0.0), [of_stats(stats, Family("known"), 4000)])
    assert out.tau == pytest.approx(stats.tau, rel=0.05)


def test_a_miss_is_estimated_to_cost_what_it_does():
    """After one, the estimate told of a round of one token, and rounds were taken to draft for nobody."""
    eager, plan = costs(0.1, entry=15), Plan("overlap", 8, groups=2)
    table = Costs(LatencyTable(eager.table.points, LAYERS), (15,))
    made, saved = families(plan)
    rates = {made: 0.7, saved: 0.6}
    values = Values([AR, plan], {families(AR)[0]: 0, made: 0, saved: 1}, table)
    survival = np.cumprod(np.array([[[rates[f]] * DEPTH] for f in (made, saved)]), 2)
    tokens, hit = values.tokens(survival, np.array([1 << 30]), np.array([DEPTH]))
    out = simulate(Fixed(plan), table, [bernoulli(rates, 4000)])
    assert tokens[0, 1] == pytest.approx(out.tau, rel=0.05)
    assert values.ms(np.array([1]), 512, hit)[1, 0] == pytest.approx(out.ms / out.rounds, rel=0.05)
    alone, many = values.ms(np.array([1, 64]), 512, hit)[1] - values.ms(np.array([1, 64]), 512, np.ones(2))[1]
    whole = table.parts(plan, 64, 512)[1]
    assert alone == pytest.approx((1 - hit[1]) * whole[1]) and many == pytest.approx(whole[64], rel=1e-3)
