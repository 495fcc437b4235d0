"""Objectives against their literal formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from formulas import G, Loops, T, V
from torch import Tensor

from selfspec.training.objectives import OBJECTIVES, Mix, Slots
from selfspec.training.objectives.bv import BlockVerification
from selfspec.training.objectives.dblast import AcceptanceLength
from selfspec.training.objectives.dbloom import block
from selfspec.training.objectives.dloop import views
from selfspec.training.objectives.dpace import credit

LENGTHS = [4, 2, 0, 3, 1]  # drafts of each group
HIDDEN = [0, 2]  # groups whose slot 0 is a hidden bonus, in the second kind of slots


class Dense:
    """What `Slots.rows` gives, from whole tensors of logits."""

    def __init__(self, draft: Tensor, verifier: Tensor, labels: Tensor, heads: dict[str, Tensor]):
        self.draft, self.verifier, self.labels, self.heads = draft, verifier, labels, heads

    def measure(self, fn, *scales, **options):
        flat = fn(self.draft.flatten(0, 1), self.verifier.flatten(0, 1), *(s.flatten() for s in scales), **options)
        return flat.view(self.labels.shape)

    def on_policy(self, fn, **options):
        return fn(self.draft.flatten(0, 1), self.heads["on_policy"].flatten(0, 1), **options).view(self.labels.shape)

    def verifier_logp(self):
        return picked(self.verifier, self.labels)

    def corrected(self, name, detach):
        return picked(self.heads[name] + (self.draft.detach() if detach else self.draft), self.labels)

    def predicted(self, name, detach):
        shift = 0 * self.draft.sum()
        return self.heads[name] + (shift.detach() if detach else shift)


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def batch(hidden: bool = False, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Draft logits, verifier logits, labels, valid, heads; with a bonus slot in front where that is hidden."""
    torch.manual_seed(seed)
    t = T + hidden
    labels = torch.randint(V, (G, t))
    valid = torch.arange(t) < torch.tensor(LENGTHS)[:, None] + hidden
    if hidden:
        valid[:, 0] = torch.tensor([g in HIDDEN for g in range(G)])
    draft = torch.randn(G, t, V, dtype=torch.float64)
    draft += 3 * torch.nn.functional.one_hot(labels, V) * (torch.rand(G, t, 1) < 0.6)  # some hit
    verifier = 2 * torch.randn(G, t, V, dtype=torch.float64)
    shapes = {
        "on_policy": (G, t, V),
        "markov": (G, t, V),
        "calibrator": (G, t, V),
        "confidence": (G, t),
        "length": (G, T + 1),
    }
    heads = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    return draft.requires_grad_(), verifier, labels, valid, heads


def slots_of(draft, verifier, labels, valid, heads, **fields) -> Slots:
    steps = torch.arange(1 + T - labels.shape[1], T + 1)
    hits = draft.argmax(-1) == labels
    return Slots(steps, valid, picked(draft, labels), hits, rows=Dense(draft, verifier, labels, heads), **fields)


def value_of(config: dict, slots: Slots) -> Tensor:
    return loss(config, slots).detach()


def loss(config: dict, slots: Slots) -> Tensor:
    mix = Mix.from_config(config)
    return mix.loss(slots, mix.divisors(slots.steps, slots.valid))[0]


LITERAL = {
    "ce": lambda f: f.decayed(lambda g, k: -math.log(f.qx(g, k)), 7),
    "dpace": lambda f: f.dpace(),
    "kl": lambda f: f.decayed(f.kl, 7),
    "rkl": lambda f: f.decayed(f.rkl, 7),
    "tv": lambda f: f.decayed(lambda g, k: 0.5 * sum(abs(a - b) for a, b in zip(f.p[g][k], f.q[g][k])), 7),
    "lk_alpha": lambda f: f.decayed(lambda g, k: -math.log(f.alpha(g, k)), 7),
    "lk_hybrid": lambda f: f.decayed(f.lk, 7),
    "bv": lambda f: f.groups(f.bv),
    "vat": lambda f: f.vat(),
    "positional": lambda f: f.positional(),
    "focal": lambda f: f.groups(f.focal),
    "chain": lambda f: f.groups(lambda g: -math.log(f.prefixes(g, f.qx))),
    "dblast": lambda f: f.groups(lambda g: 1 - f.prefixes(g, f.alpha)),
    "on_policy": lambda f: f.decayed(lambda g, k: f.rkl(g, k, f.policy), 7, f.drafts),
    "nelbo": lambda f: f.nelbo(),
    "markov": lambda f: f.corrected("markov"),
    "calibrator": lambda f: f.corrected("calibrator"),
    "confidence": lambda f: f.confidence("hit"),
    "length": lambda f: f.length(),
}  # fmt: skip


def fields_of(name: str) -> dict:
    return {"level": torch.linspace(0.2, 1.0, G, dtype=torch.float64)} if name == "nelbo" else {}


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_an_objective_is_its_formula(name: str, hidden: bool) -> None:
    if name == "calibrator" and not hidden:
        return  # no group that it is for
    parts, fields = batch(hidden), fields_of(name)
    want = LITERAL[name](Loops(*parts, **fields))
    assert abs(want) > 1e-3
    assert float(value_of({name: {"weight": 2.0}}, slots_of(*parts, **fields))) == pytest.approx(2 * want, rel=1e-6)


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"dpace", "lk_hybrid", "confidence", "length"}))
def test_an_objectives_gradient(name: str) -> None:
    draft, *rest = batch(hidden=name == "calibrator")
    for fields in ({"progress": 0.0}, {"progress": 0.2}, {"progress": 1.0}) if name == "bv" else (fields_of(name),):
        assert torch.autograd.gradcheck(
            lambda d, f=fields: loss({name: 1}, slots_of(d, *rest, **f)), draft, fast_mode=True
        )


@pytest.mark.parametrize("name", ["markov", "calibrator", "confidence", "length"])
def test_a_heads_gradient(name: str) -> None:
    *parts, heads = batch(hidden=name == "calibrator")
    heads[name].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h: loss({name: 1}, slots_of(*parts, heads | {name: h})), heads[name], fast_mode=True
    )
    draft = parts[0]
    alone = loss({name: {"detach": True}}, slots_of(*parts, heads))
    grads = torch.autograd.grad(alone, [draft, heads[name]], allow_unused=True)
    assert grads[0] is None or not grads[0].any()
    assert grads[1].any()


def test_lk_hybrid_holds_its_share_fixed() -> None:
    draft, verifier, labels, valid, heads = batch()
    (ours,) = torch.autograd.grad(
        loss({"lk_hybrid": {"gamma": None}}, slots_of(draft, verifier, labels, valid, heads)), draft
    )
    p, q = verifier.softmax(-1), draft.softmax(-1)
    lam = torch.exp(-3 * torch.minimum(p, q).sum(-1)).detach()
    each = lam * (p * (p / q).log()).sum(-1) + (1 - lam) * 0.5 * (p - q).abs().sum(-1)
    (want,) = torch.autograd.grad(each[valid].mean(), draft)
    torch.testing.assert_close(ours, want)


def test_unsmoothed_dpace_has_the_gradient_of_the_accepted_length() -> None:
    parts = batch()
    slots = slots_of(*parts)
    (ours,) = torch.autograd.grad(loss({"dpace": {"smoothing": 0.0}}, slots), parts[0])
    slots = slots_of(*parts)
    q = torch.where(slots.valid, slots.logp.exp(), 0)
    (want,) = torch.autograd.grad(-q.cumprod(1).sum() / 4, parts[0])
    torch.testing.assert_close(ours, want)


def test_credit_falls_along_the_block() -> None:
    slots = slots_of(*batch())
    w = credit(slots.logp.detach(), slots.valid, 0.5)
    assert (w[:, 1:] <= w[:, :-1]).all() and (w[~slots.valid] == 0).all()


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.4])
def test_bv_anneals(progress: float) -> None:
    parts = batch()
    want = Loops(*parts, progress=progress)
    assert float(value_of({"bv": 1}, slots_of(*parts, progress=progress))) == pytest.approx(
        want.groups(want.bv), rel=1e-6
    )


def test_dblast_is_the_mean_over_all_outcomes() -> None:
    """All drafts of a chain and all refusals, with a verifier whose tokens don't depend on one another."""
    torch.manual_seed(0)
    n, v = 3, 4
    p, q = (torch.rand(n, v, dtype=torch.float64).softmax(-1) ** 3 for _ in range(2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    accepted = 0.0
    for x in itertools.product(range(v), repeat=n):
        chance = math.prod(float(q[i, x[i]]) for i in range(n))
        passes = [min(1.0, float(p[i, x[i]] / q[i, x[i]])) for i in range(n)]
        accepted += chance * sum(math.prod(passes[: k + 1]) for k in range(n))
    labels = torch.zeros(1, n, dtype=torch.long)
    dense = Dense(q.log()[None], p.log()[None], labels, {})
    some = Slots(torch.arange(1, n + 1), labels == 0, picked(dense.draft, labels), rows=dense)
    assert float(AcceptanceLength().total(some)) == pytest.approx(1 - accepted / n)


def test_bv_scores_add_up_to_what_block_verification_accepts() -> None:
    """All texts of three tokens over a tiny vocabulary, drafts as marginals, verifier as a table."""
    torch.manual_seed(3)
    v, n = 3, 3
    q = torch.rand(n, v, dtype=torch.float64).softmax(-1) ** 4
    q /= q.sum(-1, keepdim=True)
    table = {}

    def p(prefix: tuple) -> Tensor:
        if prefix not in table:
            w = torch.rand(v, dtype=torch.float64) ** 3
            table[prefix] = w / w.sum()
        return table[prefix]

    scored = accepted = 0.0
    for x in itertools.product(range(v), repeat=n):
        logits_p = torch.stack([p(x[:i]).log() for i in range(n)])[None]
        labels = torch.tensor([x])
        dense = Dense(q.log()[None], logits_p, labels, {})
        valid = torch.ones(1, n, dtype=torch.bool)
        slots = Slots(torch.arange(1, n + 1), valid, picked(dense.draft, labels), rows=dense)
        # at beta = 1 the loss is -log of the mean score
        mean = math.exp(-float(BlockVerification(anneal=0.0).total(slots)))
        scored += math.prod(float(p(x[:i])[x[i]]) for i in range(n)) * mean * n
        ratio = 1.0  # E over drafts x ~ q of sum_i p_i, p_i = min(p_{i-1} p/q, 1): the length that is accepted
        for i in range(n):
            ratio = min(ratio * float(p(x[:i])[x[i]] / q[i, x[i]]), 1.0)
            accepted += math.prod(float(q[j, x[j]]) for j in range(n)) * ratio
    assert scored == pytest.approx(accepted, rel=1e-9)


def test_options_of_objectives() -> None:
    parts = batch()
    literal, slots = Loops(*parts), slots_of(*parts)
    assert float(value_of({"ce": {"gamma": None}}, slots)) == pytest.approx(
        -float(slots.logp.detach()[slots.valid].mean())
    )
    assert float(value_of({"confidence": {"target": "overlap"}}, slots)) == pytest.approx(literal.confidence("overlap"))
    want = literal.decayed(lambda g, k: literal.kl(g, k, literal.policy), 7, literal.drafts)
    assert float(value_of({"on_policy": {"divergence": "forward"}}, slots)) == pytest.approx(want)
    with pytest.raises(ValueError, match="divergence='jensen'"):
        Mix.from_config({"on_policy": {"divergence": "jensen"}})
    with pytest.raises(ValueError, match="target='miss'"):
        Mix.from_config({"confidence": {"target": "miss"}})


def test_terms_add_up() -> None:
    slots = slots_of(*batch())
    three = {"positional": 0.3, "focal": 2.0, "chain": 0.5}
    torch.testing.assert_close(loss(three, slots), sum(w * loss({name: 1}, slots) for name, w in three.items()))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_totals_and_divisors_add_up_over_parts_of_a_batch(name: str) -> None:
    """So that micro-batches and processes together have the loss of one large batch."""
    draft, verifier, labels, valid, heads = batch(hidden=True)
    objective, fields = OBJECTIVES[name](), fields_of(name)

    def part(at: slice) -> tuple[Tensor, Tensor]:
        some = {k: v[at] for k, v in heads.items()}, {k: v[at] for k, v in fields.items()}
        slots = slots_of(draft[at], verifier[at], labels[at], valid[at], some[0], **some[1])
        return objective.total(slots).detach(), objective.divisor(slots.steps, slots.valid)

    whole, first, rest = part(slice(None)), part(slice(2)), part(slice(2, None))
    torch.testing.assert_close(whole[0], first[0] + rest[0])
    torch.testing.assert_close(whole[1], first[1] + rest[1])
    assert objective.divisor(torch.arange(T + 1), valid & False) == 0


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_batch_without_labels_has_no_loss(name: str) -> None:
    draft, verifier, labels, valid, heads = batch(hidden=True)
    valid = torch.zeros_like(valid)
    value = loss({name: 1}, slots_of(draft, verifier, labels, valid, heads, progress=0.3, **fields_of(name)))
    assert float(value.detach()) == 0
    if value.requires_grad:
        value.backward()
        assert not draft.grad.any()


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_what_stands_in_slots_without_a_label_changes_nothing(name: str) -> None:
    draft, verifier, labels, valid, heads = batch(hidden=True)
    other, fields = batch(hidden=True, seed=1), fields_of(name)

    def mixed(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(valid.view(valid.shape + (1,) * (a.dim() - 2)), a, b) if a.shape[1] == T + 1 else a

    changed = {k: v if k == "length" else mixed(v, other[4][k]) for k, v in heads.items()}
    with torch.no_grad():
        one = loss({name: 1}, slots_of(draft, verifier, labels, valid, heads, **fields))
        two = slots_of(
            mixed(draft, other[0]), mixed(verifier, other[1]), mixed(labels, other[2]), valid, changed, **fields
        )
    torch.testing.assert_close(one, loss({name: 1}, two))


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown objective 'cee'"):
        Mix.from_config({"cee": 1})
    with pytest.raises(ValueError, match="has no option gama"):
        Mix.from_config({"ce": {"gama": 1}})
    with pytest.raises(ValueError, match="no objective"):
        Mix.from_config({})
    mix = Mix.from_config({"ce": 1, "markov": 1})
    mix.require(["markov"])
    with pytest.raises(ValueError, match="'markov' trains a head"):
        mix.require([])
    with pytest.raises(ValueError, match="head 'length' has no objective"):
        mix.require(["markov", "length"])
    mix.require(["sampler"])  # the other form of the head that "markov" trains
    with pytest.raises(ValueError, match="head 'sampler' has no objective 'markov'"):
        Mix.from_config({"ce": 1}).require(["sampler"])


def test_heads_train_alone_where_every_term_detaches_the_path() -> None:
    alone = {"markov": {"detach": True}, "confidence": 1, "length": 0.1, "calibrator": {"detach": True}}
    assert Mix.from_config(alone).heads_alone
    assert Mix.from_config(alone | {"ce": 0}).heads_alone  # without a weight it is no term
    for more in ({"ce": 1}, {"markov": 1}, {"length": {"detach": False}}):
        assert not Mix.from_config(alone | more).heads_alone


def test_blocks_grow_in_equal_stages() -> None:
    assert [block(p / 10, (4, 8, 16), 16) for p in range(11)] == [4, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16]
    assert block(0.2, (), 16) == 16
    for wrong in ((8, 4), (1, 16), (4, 8)):
        with pytest.raises(ValueError, match="growth="):
            block(0.0, wrong, 16)


def test_complementary_views_share_out_every_slot() -> None:
    anchors = torch.tensor([[3, 9, -1]])
    both, splits, ends = views(anchors, 6, torch.tensor([[0.0, 0.999, 0.5]]))
    assert both.tolist() == [[3, 3, 9, 9, -1, -1]]
    assert splits.tolist() == [[0, 1, 0, 4, 0, 3]]
    for first in range(0, 6, 2):
        s = int(splits[0, first + 1])
        assert 1 <= s <= 4 and splits[0, first] == 0 and ends[0, first] == s
        charged = [*range(1, int(ends[0, first]) + 1), *range(s + 1, 6)]  # anchor-only view, prefix view
        assert charged == [1, 2, 3, 4, 5] and ends[0, first + 1] >= 5
