from itertools import product

import numpy as np
import pytest

from selfspec.adapters import MaskPathConfig
from selfspec.plan import TREES, Plan, menu
from selfspec.plan.cost import Costs, Pace
from selfspec.plan.estimate import Family, harder
from selfspec.plan.latency import Latency
from selfspec.plan.planner import Planner
from selfspec.plan.policy import Fixed
from selfspec.plan.simulate import Outcome, bernoulli, simulate
from selfspec.plan.table import LatencyTable
from selfspec.plan.views import Assignment, View, Views

AR = Plan("ar", 1)
CHAINS = [AR, *(Plan("sequential", b) for b in (2, 4, 8, 16))]
LAYERS = 30


def costs(per_row, entry=0, fixed=1.0, requests=(1, 4, 16, 64, 512)):
    """A machine whose forwards cost `fixed` plus so much a row."""
    points = []
    for n, r in product(requests, (1, 2, 4, 8, 16, 32, 64, 256)):
        ms = fixed + per_row * n * r
        points.append(Latency("clean", n, r, 0, 512, False, ms, ms, ms))
        if 2 <= r <= 16:
            ms *= (LAYERS - entry) / LAYERS
            points.append(Latency("draft", n, r, entry, 512, False, ms, ms, ms))
    return Costs(LatencyTable(tuple(points), LAYERS), (entry,))


def rates(c, catch=0.15, lookup=0.02):
    """A world whose chains accept c at every position; trees and hidden bonuses in proportion."""
    hidden = float(harder(np.array(c), 1.6))
    out = {Family("lookup"): lookup, Family("loop"): c}
    for nodes in (0, *TREES):
        more = catch * np.log2(nodes) / 4 if nodes else 0.0
        out[Family("known", 0, nodes)] = c + (1 - c) * more
        out[Family("hidden", 0, nodes)] = hidden + (1 - hidden) * more
    return out


def texts(c, n, tokens=256, seed=0, **world):
    return [bernoulli(rates(c, **world), tokens, 50, seed + i) for i in range(n)]


def whole_menu(entry=0):
    return menu([MaskPathConfig(16, entry=entry, layouts=("known", "hidden"))])


def test_menus_hold_only_what_an_adapter_was_trained_for():
    full = menu([MaskPathConfig(16, layouts=("known", "hidden"), prefix_splits=True)])
    assert full[0] == AR and len(set(full)) == len(full)
    assert {p.mode for p in full} == {
        "ar", "lookup", "sequential", "loop", "tree", "loop+tree", "overlap", "overlap+tree"
    }  # fmt: skip
    plain = menu([MaskPathConfig(8)])
    assert {p.mode for p in plain} == {"ar", "lookup", "sequential", "tree"}
    assert max(p.block_size for p in plain if p.drafts) == 8
    assert {p.mode for p in menu([])} == {"ar", "lookup"}
    two = menu([MaskPathConfig(8), MaskPathConfig(16, entry=20)], modes=("sequential",))
    assert {(p.adapter, p.block_size) for p in two if p.drafts} == {(0, b) for b in (2, 4, 8)} | {
        (1, b) for b in (2, 4, 8, 16)
    }


@pytest.mark.parametrize(
    "made",
    [
        dict(mode="sequential", groups=2),
        dict(mode="overlap", groups=0),
        dict(mode="tree", verify_length=4),
        dict(mode="sequential", block_size=8, verify_length=9),
        dict(mode="loop", passes=1),
        dict(mode="ar+tree"),
        dict(adapter=-1),
    ],
)
def test_plans_that_make_no_sense_are_refused(made):
    with pytest.raises(ValueError):
        Plan(**made)


def test_a_loop_needs_an_adapter_that_knows_prefixes():
    with pytest.raises(ValueError, match="prefix_splits"):
        Plan("loop", 8).require(MaskPathConfig(16))
    Plan("loop+tree", 8).require(MaskPathConfig(16, prefix_splits=True))


def test_rows_of_a_plan():
    assert AR.nodes == Plan("ar", 16).nodes == 1 and Plan("sequential", 16).nodes == 16
    assert Plan("sequential", 16, verify_length=4).nodes == 4 and Plan("tree", 16, 64).nodes == 65
    assert Plan("overlap", 8).group_rows == 64 and Plan("overlap", 8, groups=2).group_rows == 16
    assert Plan("overlap+tree", 8, 16, groups=4).group_rows == 32 and Plan("tree", 8).group_rows == 0


@pytest.mark.parametrize("c, per_row, entry, slots", [*product((0.01, 0.5), (0.001, 0.03), (0, 20), (1, 8))])
def test_it_never_loses_to_plain_decoding(c, per_row, entry, slots):
    table, requests = costs(per_row, entry), texts(c, max(12, 3 * slots))
    planner = Planner(table, whole_menu(entry))
    auto, plain = simulate(planner, table, requests, slots), simulate(Fixed(AR), table, requests, slots)
    assert auto.rate >= 0.98 * plain.rate
    assert planner.probe.spent <= 0.02 * planner.probe.total


def test_where_drafts_cannot_pay_they_are_not_even_probed():
    table = costs(1.0, requests=(1, 64))  # every row costs like a forward
    planner = Planner(table, CHAINS)
    out = simulate(planner, table, texts(0.9, 64), slots=64)
    assert set(out.plans) == {AR} and planner.probe.spent == 0


@pytest.mark.parametrize(
    "c, per_row, entry, slots, best",
    [
        (0.9, 0.001, 20, 1, Plan("sequential", 16)),
        (0.7, 0.05, 20, 1, Plan("sequential", 8)),
        (0.8, 0.005, 20, 16, Plan("sequential", 8)),
        (0.3, 0.001, 0, 1, AR),
        (0.9, 0.02, 0, 64, AR),
    ],
)
def test_it_finds_the_best_fixed_plan(c, per_row, entry, slots, best):
    table, requests = costs(per_row, entry), texts(c, max(32, 4 * slots))
    fixed = {p: simulate(Fixed(p), table, requests, slots).rate for p in CHAINS}
    assert max(fixed, key=fixed.get) == best
    planner = Planner(table, CHAINS)
    assert simulate(planner, table, requests, slots).rate >= 0.97 * fixed[best]
    assert planner.switches <= planner.rounds / 50


@pytest.mark.parametrize("slots", [1, 8])
def test_changes_are_few_in_a_world_of_near_ties(slots):
    table = costs(0.02, 10)
    planner = Planner(table, whole_menu(10))
    simulate(planner, table, texts(0.6, 4 * slots + 8), slots, noise=0.2)
    assert planner.switches <= planner.rounds / 20


def test_it_follows_a_text_that_changes():
    table = costs(0.01, 20)
    easy, hard = texts(0.9, 12), texts(0.01, 12, seed=50)
    planner = Planner(table, CHAINS)
    for traces in (easy, hard, easy):
        before, rounds = planner.switches, planner.rounds
        out = simulate(planner, table, traces)
        best = max(simulate(Fixed(p), table, traces).rate for p in CHAINS)
        assert out.rate >= (0.95 if traces is hard else 0.7) * best
        assert planner.switches - before <= (planner.rounds - rounds) / 40


def test_a_table_that_errs_is_corrected_by_what_rounds_take():
    """The table says that drafts are free; they cost four forwards."""
    believed, real = costs(0.001, 29), costs(0.001, 0, fixed=1.0)
    real.table = LatencyTable(
        tuple(p if p.kind == "clean" else Latency("draft", p.requests, p.rows, 0, 512, False, 4.0, 4.0, 4.0)
              for p in real.table.points), LAYERS)  # fmt: skip
    requests = texts(0.6, 16)
    planner = Planner(believed, CHAINS)
    out, plain = simulate(planner, real, requests), simulate(Fixed(AR), real, requests)
    assert out.rate >= 0.98 * plain.rate and planner.current == (0,)


def test_one_slow_round_is_not_believed():
    pace = Pace(["tree", "sequential"])
    for _ in range(30):
        pace.observe(0, 1, 1.0, 1.0)
    pace.observe(0, 1, 1.0, 500.0)
    assert pace.factors(1)[0] < 1.05
    for _ in range(60):
        pace.observe(0, 1, 1.0, 2.0)
    assert pace.factors(1)[0] == pytest.approx(2, rel=0.1)
    assert pace.factors(1)[1] > 1.5  # what never ran is as far off as the rest
    assert pace.factors(4)[0] > 1.5 and pace.factors(64)[0] < 1.1  # at another load the table errs otherwise


def test_easy_and_hard_requests_are_parted_where_that_pays():
    table = costs(0.01, 25)
    planner = Planner(table, CHAINS, probe=0.0, split=True)
    views = [View(i, 100) for i in range(16)]
    rng, seen = np.random.default_rng(0), Assignment(tuple(views), Plan("sequential", 16))
    for _ in range(10):
        runs = [min(int(rng.geometric(0.05 if v.key < 4 else 0.98)) - 1, 15) for v in views]
        planner.observe(seen, [1 + run for run in runs])
    planner.rounds = 3
    assignments = planner.round(views)
    by_key = {v.key: a.plan for a in assignments for v in a.views}
    assert len(assignments) == 2 and by_key[0].drafts and by_key[15] == AR


def test_pruning_spends_rows_where_they_survive():
    table = costs(0.05, 20)
    survival = np.cumprod([[0.95] * 15, [0.1] * 15], 1)
    views = (View(0, 100), View(1, 100))
    for packed in (True, False):
        planner = Planner(table, [AR, Plan("sequential", 16)], packed=packed)
        planner.round(list(views))
        planner.rate = 1.5
        lengths = planner.prune(Assignment(views, Plan("sequential", 16)), survival)
        assert lengths[0] > 5 and (lengths[1] < 2 if packed else lengths[1] == lengths[0])
    ending = Assignment((View(0, 100, left=3),), Plan("sequential", 16))
    assert Planner(table, CHAINS, packed=True).prune(ending, survival[:1])[0] <= 2


def test_a_cap_is_not_a_failure():
    planner = Planner(costs(0.01, 20), CHAINS)
    for _ in range(30):
        planner.observe(Assignment((View("a", 10, left=3),), Plan("sequential", 16)), [3])
        planner.observe(Assignment((View("a", 10),), Plan("sequential", 16)), [3], ended=[True])
    planner.learn()
    assert planner.estimator.curves(["a"], Family("known"))[0, :2].min() > 0.9


def test_it_can_say_why():
    table = costs(0.01, 20)
    planner = Planner(table, whole_menu(20))
    simulate(planner, table, texts(0.8, 4))
    assert [d.why for d in planner.log][:2] == ["first", "keep"]
    assert {d.why for d in planner.log} <= {"first", "keep", "hold", "switch", "probe"}
    for d in planner.log:
        assert d.tokens.shape == d.ms.shape == (len(planner.plans),) and (d.ms > 0).all()
        plain = d.tokens[planner.index[AR]]  # one token, less what texts' ends cost
        assert 0.98 < plain <= 1 and (d.tokens >= plain).all()
    assert len(planner.log) <= 512


def test_512_slots():
    table = costs(0.002, 20)
    requests = texts(0.8, 600, tokens=40)
    planner = Planner(table, CHAINS)
    auto, plain = (simulate(p, table, requests, 512) for p in (planner, Fixed(AR)))
    assert isinstance(auto, Outcome) and auto.tokens == plain.tokens == 600 * 40
    assert auto.rate >= 0.98 * plain.rate


def test_a_menu_without_plain_decoding_is_refused():
    with pytest.raises(ValueError, match="Plan\\('ar', 1\\)"):
        Planner(costs(0.1), CHAINS[1:])


def test_a_planner_begins_with_what_its_adapter_is_known_to_reach(tmp_path, monkeypatch):
    """With the same guess for all, a good adapter was tried late: its plans looked worse than copies of the text."""
    from tiny import model_of, path_of

    from selfspec.backbone import Backbone
    from selfspec.planners import planner_for

    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    model, tokens = model_of(), []
    for known in ((), (0.9, 0.8, 0.8, 0.8)):
        body = Backbone(model, path_of(model, block_size=8, acceptance=known))
        planner = planner_for([body], seconds=0.5)
        chain = next(k for k, p in enumerate(planner.plans) if p.mode == "sequential" and p.block_size == 4)
        accepted = planner.estimator.all(["text"], np.array([np.nan])).cumprod(2)
        tokens.append(float(planner.values.tokens(accepted, np.array([99]), np.array([0]))[0][0, chain]))
    assert tokens[0] == pytest.approx(1 + 0.7 + 0.49 + 0.343, rel=0.02)
    assert tokens[1] == pytest.approx(1 + 0.9 + 0.72 + 0.576, rel=0.02)


def test_beyond_its_table_a_planner_tries_plain_decoding_first():
    """Told by a table of single requests, it took trees for 32 that lost to plain decoding, which was never tried."""
    points = [("clean", 1, r, 0, 1.0 + 0.001 * r) for r in (1, 4, 16)] + [("draft", 1, r, 0, 1.0) for r in (4, 16)]
    told = LatencyTable(tuple(Latency(k, n, r, e, 512, False, ms, ms, ms) for k, n, r, e, ms in points), 30)
    planner, views = Planner(Costs(told), CHAINS), [View(i, 100) for i in range(32)]
    ran = []
    for _ in range(60):
        (assignment,) = planner.round(views)
        plain = assignment.plan.nodes == 1
        planner.observe(assignment, [1 if plain else 3] * 32, 0.001 if plain else 0.02)
        ran.append(plain)
    assert all(ran[:3]) and sum(ran) >= 50 and all(ran[-20:])
    assert Planner(Costs(told), CHAINS).round(views[:1])[0].plan.nodes > 1  # the table knows this


def test_plain_decoding_that_stays_the_best_is_compared_rarely():
    planner = Planner(costs(1.0, 0), CHAINS, probe=0.0)
    for n, most in ((16, 60), (16, 8), (64, 60), (64, 8)):  # the first rounds of so many requests compare often
        views, before = [View(i, 100) for i in range(n)], len(planner.log)
        for _ in range(200):
            [assignment] = planner.round(views)
            assert assignment.plan == AR
            planner.observe(assignment, [1] * n, planner.costs.round(AR, n, 100.0) / 1e3)
        assert 1 <= len(planner.log) - before <= most
    planner.round([View(i, 100) for i in range(65)])
    assert planner.log[-1].number == planner.rounds


def test_a_table_is_asked_once_for_all_numbers_of_requests(monkeypatch):
    """A batch that drains had all plans' costs worked out at every halving, 8 ms each while the GPU waited."""
    asked, time = [], LatencyTable.time
    monkeypatch.setattr(LatencyTable, "time", lambda *a, **k: asked.append(a) or time(*a, **k))
    made = costs(0.01)
    planner = Planner(made, CHAINS)
    by_n = {n: planner.round([View(i, 100) for i in range(n)]) for n in (256, 200, 64, 17, 4, 1)}
    once = len(asked)
    assert all(by_n.values()) and 0 < once <= 2 * len(CHAINS)
    planner.round([View(i, 300) for i in range(9)])  # the next stretch of contexts
    assert once < len(asked) <= 2 * once
    for n in (1, 4, 200):
        assert made.round(Plan("ar", 1), n, 100) == pytest.approx(float(time(made.table, "clean", 1, n)))


def test_plans_of_lookup_without_drafts_promise_one_token():
    """Nothing over nothing was the highest of all promises."""
    plans = [Plan("ar", 1), Plan("lookup", 4, verify_length=1), Plan("sequential", 16), Plan("lookup", 4)]
    planner = Planner(costs(0.1), plans)
    tokens, _ = planner.values.tokens(
        np.multiply.accumulate(planner.estimator.all(["a"]), 2), np.array([99]), np.array([15])
    )
    assert tokens[0, 1] == 1 and np.isfinite(tokens).all()


@pytest.mark.parametrize("stay", [2, 3, 4])
def test_copies_are_told_also_at_loads_that_alternate(stay):
    """No stay was long enough for their turn, and what was heard of them was kept for ever."""
    planner = Planner(costs(0.1), whole_menu())
    for i in range(1200):
        views = Views.of([View(k, 100 + i) for k in range(4 + i // stay % 2)])
        (assignment,) = planner.round(views)
        heard = Views.of(assignment.views).heard({id(k): [1, 0] for k in views.keys})
        planner.observe(Assignment(heard, assignment.plan), [2] * len(views), 1e-3)
    assert sum(map(len, planner.heard._copied.values())) < 1000


def test_a_planner_says_what_it_needs():
    plans = whole_menu()
    with pytest.raises(ValueError, match="plain decoding"):
        Planner(costs(0.1), [p for p in plans if p.nodes > 1])
    with pytest.raises(ValueError, match="every=4: expected 6 rounds or more"):
        Planner(costs(0.1), plans, every=4)
