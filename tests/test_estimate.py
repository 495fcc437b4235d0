import numpy as np
import pytest

from selfspec.plan import Plan
from selfspec.plan.estimate import DEPTH, Estimator, Family, as_usual, families, harder

KNOWN, HIDDEN = Family("known"), Family("hidden")
KINDS = [KNOWN, HIDDEN, Family("loop"), Family("lookup"), Family("known", 0, 64)]


def accepted(rng, rates, offered):
    """Drafts accepted by a chain of independent trials."""
    for j in range(offered):
        if rng.random() >= rates[min(j, len(rates) - 1)]:
            return j
    return offered


def tau(curve, offered=DEPTH):
    return 1 + float(np.cumprod(curve[:offered]).sum())


def feed(estimator, rng, rates, rounds, key="a", offered=15, family=KNOWN):
    """Run rounds. Returns the curve after each, and what it really accepted."""
    seen, real = [], []
    for _ in range(rounds):
        real.append(accepted(rng, rates, offered))
        estimator.observe([key], family, [offered], real[-1:])
        seen.append(estimator.curves([key], family)[0])
    return seen, real


@pytest.mark.parametrize("rates", [[0.9], [0.5], [0.2], [0.95, 0.9, 0.8, 0.7], [0.6, 0.8, 0.9]])
@pytest.mark.parametrize("prior", [0.3, 0.9])
def test_it_converges_to_the_true_rates(rates, prior):
    rng = np.random.default_rng(0)
    seen, real = feed(estimator := Estimator(KINDS, [prior]), rng, rates, 600)
    late = np.mean(seen[200:], 0)
    runs = np.array(real[200:])
    for j in range(4):
        if np.mean(runs >= j) > 0.3:  # deeper positions are seldom tried
            assert late[j] == pytest.approx(np.sum(runs > j) / np.sum(runs >= j), abs=0.04)
    assert np.mean([tau(c) for c in seen[200:]]) == pytest.approx(1 + np.mean(real[200:]), rel=0.1)
    assert estimator.tau(KNOWN) == pytest.approx(1 + np.mean(real[-50:]), rel=0.15)


@pytest.mark.parametrize("before, after", [(0.9, 0.3), (0.3, 0.9), (0.8, 0.02), (0.02, 0.8)])
def test_it_tracks_a_change_within_ten_rounds(before, after):
    closed = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        estimator = Estimator(KINDS)
        feed(estimator, rng, [before], 100)
        start = tau(estimator.curves(["a"], KNOWN)[0])
        seen, _ = feed(estimator, rng, [after], 10)
        closed.append((start - tau(seen[-1])) / (start - tau([after] * DEPTH)))
    assert np.median(closed) > 0.6  # of the way


def test_it_is_steady_where_nothing_changes():
    rng = np.random.default_rng(1)
    estimator = Estimator(KINDS)
    feed(estimator, rng, [0.8], 50)
    taus = [tau(c) for c in feed(estimator, rng, [0.8], 400)[0]]
    naive = np.std([1 + accepted(rng, [0.8], 15) for _ in range(400)])
    assert np.std(taus) < 0.3 * naive


def test_a_new_request_starts_from_the_others():
    rng = np.random.default_rng(2)
    estimator = Estimator(KINDS, [0.9])
    for i in range(30):
        feed(estimator, rng, [0.3], 10, key=i)
    assert tau(estimator.curves(["new"], KNOWN)[0]) == pytest.approx(tau([0.3] * DEPTH), rel=0.15)


def test_one_request_may_be_harder_than_its_neighbours():
    rng = np.random.default_rng(3)
    estimator, keys, rates = Estimator(KINDS), list(range(8)), [0.9] * 7 + [0.1]
    for _ in range(20):
        estimator.observe(keys, KNOWN, [15] * 8, [accepted(rng, [r], 15) for r in rates])
    taus = [tau(c) for c in estimator.curves(keys, KNOWN)]
    assert taus[-1] < 2 and min(taus[:-1]) > 3.5


def test_what_is_hard_in_one_mode_is_hard_in_its_kin():
    rng = np.random.default_rng(4)
    estimator = Estimator(KINDS)
    hidden, tree = tau(estimator.curves(["a"], HIDDEN)[0]), tau(estimator.curves(["a"], Family("known", 0, 64))[0])
    known = tau(estimator.curves(["a"], KNOWN)[0])
    assert hidden < known < tree
    feed(estimator, rng, [0.1], 20)
    assert tau(estimator.curves(["a"], HIDDEN)[0]) < 0.8 * hidden
    assert tau(estimator.curves(["a"], Family("known", 0, 64))[0]) < 0.8 * tree
    lookup = estimator.curves(["a"], Family("lookup"))[0]
    assert np.allclose(lookup, 0.3)  # the adapter's failures say nothing about copying


def test_a_cut_block_does_not_look_like_a_failure():
    estimator = Estimator(KINDS, [0.5])
    for _ in range(50):
        estimator.observe(["a"], KNOWN, [3], [3])  # everything that was offered
    curve = estimator.curves(["a"], KNOWN)[0]
    assert (curve[:3] > 0.85).all()
    for _ in range(20):
        estimator.observe(["a"], KNOWN, [0], [0])  # plain decoding teaches nothing
    assert np.allclose(estimator.curves(["a"], KNOWN)[0][:3], curve[:3], atol=0.05)


def test_a_feature_that_tells_hard_rounds_is_learnt():
    rng = np.random.default_rng(5)
    estimator = Estimator(KINDS)
    for _ in range(600):
        hard = rng.random() < 0.5
        feature = np.array([2.0 if hard else 0.5])
        estimator.observe(["a"], KNOWN, [15], [accepted(rng, [0.4 if hard else 0.9], 15)], feature)
    easy, hard = (tau(estimator.curves(["a"], KNOWN, np.array([f]))[0]) for f in (0.5, 2.0))
    unknown = tau(estimator.curves(["a"], KNOWN, np.array([np.nan]))[0])
    assert easy > 1.5 * hard and hard < unknown < easy
    plain = Estimator(KINDS)
    for _ in range(300):
        noise = np.array([rng.normal()])
        plain.observe(["a"], KNOWN, [15], [accepted(rng, [0.7], 15)], noise)
    assert abs(plain.effect.weight) < 0.15


@pytest.mark.parametrize("seed", range(5))
def test_no_history_breaks_it(seed):
    rng = np.random.default_rng(seed)
    kinds = [KNOWN, HIDDEN, Family("loop", 1), Family("lookup"), Family("known", 1, 256)]
    estimator = Estimator(kinds, [0.999, [0.0, 1.0]])
    for _ in range(300):
        n = int(rng.integers(1, 4))
        offered = rng.integers(0, 40, n)
        feature = rng.choice([np.nan, 0.0, 1e9, -1e9], n)
        estimator.observe(list(range(n)), kinds[rng.integers(5)], offered, rng.integers(0, offered + 1), feature)
    for kind in kinds:
        curves = estimator.curves([0, 1, 2, "new"], kind, np.array([np.nan, 1e9, -1e9, 0]))
        assert curves.shape == (4, DEPTH) and (curves > 0).all() and (curves < 1).all()
    for key in range(4):
        estimator.forget(key)
    assert not estimator.own


def test_a_small_block_is_judged_by_itself():
    """An adapter that drafts a sixth worse in blocks of 4 was taken to be as good there as in its own of 16."""
    cut = Family("known", 0, 0, 4)
    estimator = Estimator([KNOWN, cut], [0.7])
    assert tau(estimator.curves(["a"], cut)[0]) == pytest.approx(tau(estimator.curves(["a"], KNOWN)[0]))
    for _ in range(60):
        estimator.observe(["a"], cut, [3], [0], None)
        estimator.observe(["a"], KNOWN, [15], [4], None)
    assert estimator.curves(["a"], cut)[0, 0] < 0.3 < 0.7 < estimator.curves(["a"], KNOWN)[0, 0]
    small = Estimator([cut, Family("known", 0, 0, 2), Family("loop")], [0.7])  # its own block is one of 4
    assert small.index[cut] == small.index[KNOWN] != small.index[Family("known", 0, 0, 2)]


def test_plans_share_a_family():
    assert families(Plan("sequential", 16)) == families(Plan("sequential", 16, verify_length=4)) == (KNOWN, KNOWN)
    cut = Family("known", 0, 0, 8)
    assert families(Plan("sequential", 8)) == (cut, cut)
    assert families(Plan("overlap", 8, groups=2)) == (cut, HIDDEN)
    assert families(Plan("overlap+tree", 16, 32)) == (Family("known", 0, 32), Family("hidden", 0, 32))
    assert families(Plan("lookup", 8))[0] == Family("lookup")
    assert families(Plan("loop", 8, adapter=1))[0] == Family("loop", 1)


def test_drafts_that_only_hard_texts_were_given_are_not_taken_to_be_bad():
    """A planner that turned to another adapter wherever a text was hard found it bad, and never used it again."""
    rng, usual = np.random.default_rng(0), np.full(DEPTH, 0.7)
    first, second = Family("known", 0), Family("known", 1)
    estimator = Estimator([first, second], [0.7, 0.7])
    for text in range(60):
        hard = text % 2
        rates = harder(usual, 2.5 if hard else 0.4)
        feed(estimator, rng, rates, 8, text, family=first)
        feed(estimator, rng, rates, 24, text, family=second if hard else first)
        estimator.forget(text)
    (easy, hard) = (estimator.shared()[1][estimator.index[f], :2].mean() for f in (first, second))
    assert easy - hard < 0.23  # by plain counts 0.27


def test_counts_of_hard_texts_are_those_of_usual_ones_in_the_mean():
    curve, odds = np.array([0.8, 0.6]), np.array([3.0])
    won, tried = as_usual(harder(curve, 3.0)[None], np.ones((1, 2)), curve, odds)
    assert won[0] == pytest.approx(curve) and tried[0] == pytest.approx([1, 1])
