"""Length rules against their formulae in plain loops, and the law of what they leave to be verified, enumerated."""

import itertools
import math

import pytest
import torch
from test_verifiers import PIPELINES, Model, V, off

from selfspec.plan.lengths import LENGTHS, AdaFlash, Fixed, LibraSpec, Margins, Product, Scan, require
from selfspec.plan.lengths.adaflash import confidences
from selfspec.plan.lengths.margin import margins
from selfspec.verify.rejection import accept, residuals


def staircase(t):
    return torch.tensor([1.0 + 0.5 * (d > 2) + 1.0 * (d > 5) + 0.1 * d for d in range(t + 1)])


def by_hand(name, c):
    """[T] confidences -> drafts to verify."""
    t = len(c)
    if name == "fixed":
        return min(3, t)
    if name == "product":
        return max(1, sum(math.prod(c[: i + 1]) >= 0.2 for i in range(t)))
    if name == "libraspec":
        eps = [math.floor(2.2 * sum(math.prod(c[i : j + 1]) for j in range(i, t)) + i + 1) for i in range(t)]
        return min(t, max(1, min(eps)))
    rates = [(1 + sum(math.prod(c[:i]) for i in range(1, d + 1))) / float(staircase(t)[d]) for d in range(t + 1)]
    if name == "scan":
        return rates.index(max(rates))
    d = 0
    while d < t and rates[d + 1] > rates[d]:
        d += 1
    return d


RULES = {
    "fixed": lambda t: Fixed(3),
    "product": lambda t: Product(0.2),
    "libraspec": lambda t: LibraSpec(),
    "scan": lambda t: Scan(staircase(t)),
    "scan in order": lambda t: Scan(staircase(t), True),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("t", [1, 2, 9])
def test_rules_are_their_formulae(name, t):
    generator = torch.Generator().manual_seed(t)
    confidence = torch.rand(200, t, generator=generator) ** 0.4
    got = RULES[name](t)(confidence)
    wanted = [by_hand(name, c) for c in confidence.double().tolist()]
    assert got.tolist() == wanted
    assert t < 9 or name == "fixed" or len(set(wanted)) > 2


def test_the_length_head_verifies_one_more_than_it_expects():
    lengths = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    assert AdaFlash()(lengths).tolist() == [3, 1, 3]
    assert AdaFlash(0)(lengths).tolist() == [2, 1, 3]
    assert confidences(lengths)[0].tolist() == pytest.approx([0.9, 0.7 / 0.9, 0.4 / 0.7])
    assert confidences(lengths)[1:].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_costs_that_end_too_early_are_refused():
    with pytest.raises(ValueError, match="up to 3 drafts, not for 5"):
        Scan(staircase(3))(torch.rand(1, 5))


# ---- confidences learnt online


def served(rounds, seed=0, depth=4):
    """Margins, and outcomes drawn by a logistic of each position's own."""
    generator = torch.Generator().manual_seed(seed)
    w, b = torch.tensor([0.8, 0.5, 0.3, 1.2])[:depth], torch.tensor([0.5, -1.0, -0.5, -2.0])[:depth]
    m = 6 * torch.rand(rounds, 3, depth, generator=generator)
    truth = (w * m + b).sigmoid()
    accepted = (torch.rand(m.shape, generator=generator) < truth).long().cumprod(-1).sum(-1)
    return m, accepted, truth


def test_margins_learn_each_positions_logistic():
    rule, (m, accepted, truth) = Margins(4, every=200, warm=2), served(400)
    everything = torch.full((3,), 4)
    for i in range(400):
        before = rule(m[i])
        assert (before == 1).all() or i >= 400  # all is verified until it is warm
        rule.observe(m[i], everything, accepted[i])
    got, wanted = rule(m.flatten(0, 1)), truth.flatten(0, 1)
    assert (got - wanted).abs().mean() < 0.05
    assert (wanted - wanted.mean(0)).abs().mean() > 0.15  # what a constant would miss by


def test_what_follows_a_failure_or_was_not_verified_teaches_nothing():
    rule = Margins(4, every=10**6)
    rule.observe(torch.ones(3, 4), torch.tensor([4, 2, 4]), torch.tensor([1, 2, 4]))
    assert rule.count.tolist() == [3, 3, 1, 1]
    assert rule.label[:, :3].sum(1).tolist() == [3, 2, 1, 1]


def test_old_outcomes_leave_and_a_position_that_never_failed_stays_finite():
    rule = Margins(2, window=64, every=50, warm=1, enough=10)
    m, all_of = torch.full((1, 2), 3.0), torch.tensor([2])
    for accepted in [2] * 100 + [0] * 100:
        rule.observe(m, all_of, torch.tensor([accepted]))
    assert torch.isfinite(rule.fit).all()
    first, second = rule(m)[0].tolist()
    assert first < 0.1 and 0.9 < second < 1  # position 1 failed in all that is remembered; 2 was never tried since


def test_margins_are_top_two_differences():
    logits = torch.tensor([[[1.0, 4.0, 2.5], [-math.inf, 3.0, -math.inf]]])
    assert margins(logits).tolist() == [[1.5, 100.0]]


# ---- the law, when drafts are drawn and verified by rejection


def law_of(model, draft, length):
    """Probability of every text.

    Args:
        model: the target.
        draft: earlier draft tokens -> q [V] of the next.
        length: (draft tokens, their q [T, V]) -> drafts that are verified.
    """
    out = {}
    for x in itertools.product(range(V), repeat=model.depth):
        q = torch.stack([draft(x[:i]) for i in range(model.depth)])
        chance = math.prod(float(q[i, t]) for i, t in enumerate(x))
        if not chance:
            continue
        d = length(x, q)
        p = torch.stack([model.p(x[:i]) for i in range(d + 1)])[None]
        tokens = torch.tensor([x[:d]], dtype=torch.long).view(1, d)
        a = accept(p, q[None, :d], tokens)[0].tolist() if d else []
        for i, weights in enumerate(residuals(p, q[None, :d], tokens)[0]):
            weight = chance * math.prod(a[:i]) * (1 - a[i] if i < d else 1)
            if weight > 1e-15:
                for token, share in enumerate((weights / weights.sum()).tolist()):
                    if share:
                        model.complete(out, (*x[:i], token), weight * share)
    return out


def largest(q):
    """Confidences from marginals. [T, V] -> [1, T]"""
    return q.amax(-1)[None].float()


CUT = {
    "fixed": Fixed(1),
    "product": Product(0.35, 0),
    "libraspec": LibraSpec(1.2),
    "scan": Scan(torch.tensor([1.0, 1.3, 1.7, 2.3])),
}


@pytest.mark.parametrize("rule", CUT)
@pytest.mark.parametrize("name", ["bare", "top_k"])
def test_lengths_by_marginals_keep_the_law(rule, name):
    seen = set()
    for seed in range(3):
        model = Model(PIPELINES[name], 3, seed)

        def length(x, q):
            seen.add(d := int(CUT[rule](largest(q))))
            return d

        assert off(law_of(model, lambda before, m=model: m.q[len(before)], length), model.law()) < 1e-12
    assert seen - {3}  # something was cut


def test_a_length_that_peeks_at_the_drawn_token_breaks_the_law():
    worst = 0.0
    for seed in range(3):
        model = Model([], 3, seed)

        def peeking(x, q):
            own = torch.tensor([[float(q[i, t]) for i, t in enumerate(x)]])  # the drawn tokens' own probabilities
            return int(Product(0.35, 0)(own))

        worst = max(worst, off(law_of(model, lambda before, m=model: m.q[len(before)], peeking), model.law()))
    assert worst > 1e-2


def conditioned(seed):
    """A drafter whose distributions follow from its own token before."""
    g = torch.Generator().manual_seed(100 + seed)
    table = torch.randn(4, V, V, generator=g).mul(2).double().softmax(-1)
    return lambda before: table[len(before), before[-1] if before else 0]


@pytest.mark.parametrize("rule", [Product(0.5, 0), Scan(torch.tensor([1.0, 1.5, 2.1, 2.9]), True)])
def test_rules_in_order_keep_the_law_where_confidences_have_seen_earlier_tokens(rule):
    assert rule.in_order
    seen = set()
    for seed in range(3):
        model = Model([], 3, seed)

        def length(x, q):
            seen.add(d := int(rule(largest(q))))
            return d

        assert off(law_of(model, conditioned(seed), length), model.law()) < 1e-12
    assert len(seen) > 1


def test_a_rule_that_waits_for_later_confidences_breaks_it_there_and_is_refused():
    rule, worst = Scan(torch.tensor([1.0, 1.5, 2.1, 2.4])), 0.0
    for seed in range(3):
        model = Model([], 3, seed)
        worst = max(worst, off(law_of(model, conditioned(seed), lambda x, q: int(rule(largest(q)))), model.law()))
    assert worst > 1e-3
    with pytest.raises(ValueError, match="in_order=True"):
        require(rule, drawn=True, conditioned=True)
    for drawn, seen in ((True, False), (False, True)):
        require(rule, drawn, seen)
    require(Scan(rule.costs, True), True, True)
    assert {name for name, rule in LENGTHS.items() if rule.in_order} == {"fixed", "product"}
