"""What a change of texts costs, and when the planner thinks."""

import numpy as np
import pytest
from test_planner import AR, CHAINS, costs, texts

from selfspec.joining import Door
from selfspec.plan import Plan
from selfspec.plan.estimate import Estimator, Family
from selfspec.plan.planner import HURRIED, Planner
from selfspec.plan.probe import OFTEN
from selfspec.plan.simulate import simulate
from selfspec.plan.use import Use
from selfspec.plan.views import View, Views


def test_rounds_between_texts_are_counted():
    use = Use()
    for _ in range(20000):
        use.idle += 2
        use.spent([3, 2, 0, 3], ended=1)
    lost, held = use.between
    assert lost == pytest.approx((1 + 0.5) / 8, rel=0.01)  # one had left, one broke off
    assert held == pytest.approx(2 / (8 * 3) ** 0.5, rel=0.01)  # 2 idle slots to 8 tokens of 3 rounds


@pytest.mark.parametrize("tokens", [1.0, 2.5, 4.0])
def test_a_text_takes_its_rounds_and_those_between(tokens):
    values = Planner(costs(0.01, 20), CHAINS).values
    values.lost, values.held, length = 0.02, 0.05, 100
    rounds = length / tokens + 0.02 * length + 0.05 * length / np.sqrt(tokens)
    assert float(values.whole(np.array(tokens))) == pytest.approx(length / rounds)


def test_of_two_equals_the_one_of_short_rounds_loses_less_between_texts():
    values = Planner(costs(0.01, 20), CHAINS).values
    few, many, times = np.array(2.0), np.array(3.0), 1.5  # as many tokens a millisecond
    assert float(values.whole(many)) / times == pytest.approx(float(values.whole(few)))
    values.lost = 0.03
    assert float(values.whole(many)) / times < 0.98 * float(values.whole(few))


def test_a_door_says_whom_it_holds():
    door = Door()
    assert door.admit(64, 1, 10, now=0.0) == 0 and door.held == 1
    assert door.admit(64, 16, 10, now=0.001) == 10 and door.held == 0
    assert door.admit(64, 1, 10, now=1.0) == 0 and door.admit(64, 0, 10, now=1.001) == 0 and door.held == 0


def test_idle_slots_reach_the_planner():
    planner = Planner(costs(0.01, 20), CHAINS)
    simulate(planner, costs(0.01, 20), texts(0.6, 64), 8, lag=4)
    use = max(planner._uses.values(), key=lambda u: u.made)
    assert use.idle > 0 and use.lost > 0


def test_nothing_is_compared_while_the_device_waits():
    planner = Planner(costs(0.01, 20), CHAINS)
    keys = ["a"]

    def views(hurry: bool) -> Views:
        out = Views.of([View(keys[0], 100)])
        out.hurry = hurry
        return out

    first = planner.round(views(True))  # something has to be chosen
    assert len(planner.log) == 1
    for _ in range(HURRIED - 1):
        planner.observe(first[0], [1], 1e-3)
        assert planner.round(views(True))[0].plan == first[0].plan
    assert len(planner.log) == 1
    planner.round(views(False))
    assert len(planner.log) == 2


def test_a_planner_whose_device_always_waits_still_learns():
    """Very short texts, or processors that the host has to ask, leave no round on its way when the next one begins."""
    planner = Planner(costs(0.01, 20), CHAINS)
    chosen = []
    for _ in range(300):
        views = Views.of([View("a", 100)])
        views.hurry = True
        chosen += planner.round(views)
        planner.observe(chosen[-1], [1], 1e-3 * planner.costs.round(chosen[-1].plan, 1, 100))
    assert chosen[0].plan != AR and chosen[-1].plan == AR  # no draft was ever accepted
    assert sum(len(kept) for kept in planner.heard._rounds.values()) < 50  # nor is what was heard kept for ever


def test_what_runs_is_not_blamed_for_its_texts():
    """Trees ran while texts became hard: chains are taken to be nearly as much worse for them."""
    chain, tree = Family("known"), Family("known", 0, 15)
    estimator, draws = Estimator([chain, tree], [[0.7]]), np.random.default_rng(0)

    def run(family: Family, rate: float, rounds: int) -> None:
        for _ in range(rounds):
            accepted = (draws.random((8, 15)) < rate).cumprod(1).sum(1)
            estimator.observe(["all"] * 8, family, [15] * 8, accepted, texts=8)
            estimator.settle()

    def failing() -> np.ndarray:
        c = estimator.shared()[[estimator.index[chain], estimator.index[tree]], 1]
        return np.log((1 - c) / c)

    for _ in range(20):
        run(chain, 0.7, 10)
        run(tree, 0.8, 10)
    before = failing()
    run(tree, 0.6, 2000)
    of_chain, of_tree = failing() - before
    assert of_tree > 0.7 and of_chain > 0.75 * of_tree


@pytest.mark.parametrize("per_row, near", [(0.02, False), (0.08, True)])
def test_near_rivals_are_tried_again_and_again(per_row, near):
    """Which of two is better by 2 % is not learnt from one round; that one is worse by a tenth soon is."""
    table, plans = costs(per_row, 10), [AR, Plan("sequential", 4), Plan("sequential", 8)]
    planner = Planner(table, plans)
    simulate(planner, table, texts(0.7, 60))
    probes = sum(d.why == "probe" for d in planner.log)
    assert (probes > 20 and set(planner.probe.waits.values()) == {OFTEN}) if near else probes < 5
    assert planner.probe.spent <= 0.02 * planner.probe.total
