import numpy as np
import pytest

from selfspec.plan import Plan
from selfspec.plan.estimate import DEPTH, Estimator, Family, families, harder
from selfspec.plan.family import COPIED, curve_of, name_of, told

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
    found, tokens = [], []
    for seed in range(4):
        estimator = Estimator(KINDS, [prior])
        late = feed(estimator, np.random.default_rng(seed), rates, 600)[0][200:]
        found.append(np.mean(late, 0))
        tokens.append(np.mean([tau(c) for c in late]))
    true = np.array((rates + rates[-1:] * DEPTH)[:DEPTH])
    for j in range(4):
        if np.prod(true[:j]) > 0.3:  # deeper positions are seldom tried
            assert np.mean(found, 0)[j] == pytest.approx(true[j], abs=0.03)
    assert np.mean(tokens) == pytest.approx(tau(true), rel=0.1)


def test_what_texts_have_in_common_is_known_of_all():
    rng, estimator = np.random.default_rng(0), Estimator(KINDS, [0.9])
    for text in range(60):
        _, real = feed(estimator, rng, [0.7, 0.6, 0.5], 10, text)
        estimator.forget(text)
    tokens = 1 + 0.7 + 0.42 + 0.21 + 0.105 + 0.05 + 0.05
    assert estimator.tau(KNOWN) == pytest.approx(tokens, rel=0.1)


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
    assert np.allclose(lookup, curve_of(COPIED))  # the adapter's failures say nothing about copying


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


@pytest.mark.parametrize("rates", [[0.05, 0.95], [0.4, 0.5], [0.02, 0.3], [0.7, 0.97]])
def test_how_often_a_text_says_things_again_and_how_long_are_learnt_apart(rates):
    """One term for both promised small blocks of a text with few long copies as much as large ones."""
    rng, estimator, found = np.random.default_rng(0), Estimator([Family("lookup"), KNOWN]), []
    for text in range(40):
        found += feed(estimator, rng, rates, 60, text, family=Family("lookup"))[0][30:]
        estimator.forget(text)
    for offered in (3, 15):
        true = tau(rates[:1] + rates[1:] * 14, offered)
        assert np.mean([tau(c, offered) for c in found]) == pytest.approx(true, rel=0.08)


def test_a_small_block_is_judged_by_itself():
    """An adapter that drafts a sixth worse in blocks of 4 was taken to be as good there as in its own of 16."""
    cut = Family("known", 0, 0, 4)
    estimator = Estimator([KNOWN, cut], [0.7])
    assert tau(estimator.curves(["a"], cut)[0]) == pytest.approx(tau(estimator.curves(["a"], KNOWN)[0]))
    for _ in range(120):
        estimator.observe(["a"], cut, [3], [0], None)
        estimator.observe(["a"], KNOWN, [15], [4], None)
        small, large = (estimator.curves(["a"], f)[0, 0] for f in (cut, KNOWN))
    assert small < 0.3 < 0.7 < large
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
    (easy, hard) = (estimator.shared()[estimator.index[f], :2].mean() for f in (first, second))
    assert easy - hard < 0.23  # by plain counts 0.27


def test_a_family_is_judged_with_its_kin():
    """Drafts that did worse than told were dropped for others that had not run, which did as much worse."""
    rng, tree = np.random.default_rng(0), Family("known", 1, 15)
    estimator = Estimator([KNOWN, Family("known", 1), tree], [{"chain": [0.8]}, {"chain": [0.7], "tree=15": [0.8]}])
    for text in range(80):  # all texts are harder than those that the adapters were measured on
        feed(estimator, rng, [harder(0.8, 2.0)], 10, text, family=tree)
        estimator.forget(text)
    found, other = (estimator.shared()[estimator.index[f], 0] for f in (tree, KNOWN))
    assert found == pytest.approx(harder(0.8, 2.0), abs=0.04) and other < 0.75


def test_many_texts_together_are_like_any():
    """The mean of 64 texts that did badly was taken for a hard text, and not for bad drafts."""
    found = []
    for texts in (1, 64):
        rng, estimator = np.random.default_rng(0), Estimator([KNOWN, Family("known", 1)], [{"chain": [0.8]}] * 2)
        for _ in range(30):
            estimator.observe(["all"], KNOWN, [15], [accepted(rng, [harder(0.8, 2.0)], 15)], None, texts)
        found.append(estimator.shared()[estimator.index[KNOWN], 1])
    assert found[1] < found[0] - 0.02


def test_rounds_that_wait_are_booked_like_any():
    """Those of one key are counted together, and booked when somebody asks; with a feature at once."""
    rng, found = np.random.default_rng(0), []
    offered = rng.integers(0, 20, (30, 8))
    taken = np.minimum(rng.integers(0, 20, (30, 8)), offered)
    for features in (None, np.zeros(8)):  # the same of all says nothing
        estimator = Estimator(KINDS, [0.6])
        for d, a in zip(offered, taken, strict=True):
            estimator.observe(["all"] * 8, KNOWN, d, a, features, 8)
            found.append(estimator.tau(KNOWN))
    assert found[:30] == pytest.approx(found[30:])


def test_what_never_ran_is_in_more_doubt_than_what_did():
    estimator = Estimator([KNOWN, Family("known", 1), Family("known", 0, 31)], [[0.8], 0.7])
    for _ in range(40):
        estimator.observe(["a"], KNOWN, [15], [3])
    doubt = dict(zip(estimator.kinds, estimator.doubt(KNOWN), strict=True))
    assert doubt[KNOWN] == 0 < doubt[Family("known", 0, 31)] < doubt[Family("known", 1)]


def test_what_an_adapter_tells_of_a_kind_is_taken():
    known = {"chain": [0.7, 0.6], "block=4": [0.65], "tree=15": [0.8], "tree=31": [0.85]}
    for family in (Family("known"), Family("known", 0, 0, 4), Family("known", 0, 31)):
        curve, exact = told(family, known)
        assert exact and curve[0] == known[name_of(family)][0]
    wider, exact = told(Family("known", 0, 63), known)
    narrower, _ = told(Family("known", 0, 7), known)
    assert not exact and 0.85 < wider[0] < 0.88 and 0.76 < narrower[0] < 0.8
    cut, hidden = (told(f, known)[0] for f in (Family("known", 0, 0, 8), Family("hidden")))
    assert cut[0] == 0.7 and hidden[0] == pytest.approx(harder(0.7, 1.6))
    with pytest.raises(ValueError, match="chains; this one tells that of tree=15"):
        told(Family("known"), {"tree=15": [0.8]})


def test_a_larger_tree_does_not_fall_behind_the_smaller_one_that_ran():
    """Trees of 15 nodes did better than told, short blocks did not; trees of 31, which hold those, stayed behind."""
    small, large, short = Family("known", 0, 15), Family("known", 0, 31), Family("known", 0, 0, 4)
    told = {"chain": [0.6] * 15, "block=4": [0.56] * 3, "tree=15": [0.72] * 15, "tree=31": [0.75] * 15}
    estimator = Estimator([small, large, short], [told])
    before = estimator.tau(large) - estimator.tau(small)
    rng = np.random.default_rng(0)
    for family, chance, depth in ((short, 0.56, 3), (small, 0.78, 15)):
        for i in range(300):
            keys = [f"{family}/{i}/{k}" for k in range(8)]
            accepted = [int(np.argmin([*(rng.random(depth) < chance), False])) for _ in keys]
            estimator.observe(keys, family, [depth] * 8, accepted)
            for key in keys:
                estimator.forget(key)
    assert estimator.tau(small) == pytest.approx(1 + 0.78 / 0.22, rel=0.08)
    assert estimator.tau(large) - estimator.tau(small) > 0.5 * before
