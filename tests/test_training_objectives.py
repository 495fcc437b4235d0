"""Objectives against their literal formulas, and the head's closed-form gradients."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.backbone import Backbone
from selfspec.training.head import Head
from selfspec.training.objectives import Mix, Slots
from selfspec.training.objectives.dpace import credit

G, T, V = 5, 4, 11


@pytest.fixture
def slots() -> Slots:
    torch.manual_seed(0)
    lengths = torch.tensor([4, 2, 0, 3, 1])
    valid = torch.arange(T) < lengths[:, None]
    logp = torch.randn(G, T, V, dtype=torch.float64).log_softmax(-1)[..., 0].requires_grad_()
    kl = {None: torch.rand(G, T, dtype=torch.float64, requires_grad=True)}
    return Slots(torch.arange(1, T + 1), valid, logp, kl)


def loss(config: dict, slots: Slots) -> torch.Tensor:
    mix = Mix.from_config(config)
    return mix.loss(slots, mix.divisors(slots.steps, slots.valid))[0]


def test_cross_entropy_decays_with_position(slots: Slots) -> None:
    top = bottom = 0.0
    logp = slots.logp.detach()
    for g in range(G):
        for k in range(1, T + 1):
            if slots.valid[g, k - 1]:
                w = math.exp(-(k - 1) / 3)
                top += w * -float(logp[g, k - 1])
                bottom += w
    assert float(loss({"ce": {"weight": 2, "gamma": 3.0}}, slots)) == pytest.approx(2 * top / bottom, rel=1e-6)
    flat = -slots.logp[slots.valid].mean()
    assert float(loss({"ce": {"gamma": None}}, slots)) == pytest.approx(float(flat), rel=1e-6)


@pytest.mark.parametrize("a", [0.0, 0.5])
def test_dpace_gives_each_slot_its_share_of_the_accepted_length(slots: Slots, a: float) -> None:
    want, groups = 0.0, 0
    for g in range(G):
        n = int(slots.valid[g].sum())
        q = [(1 - a) * math.exp(float(slots.logp[g, i])) + a for i in range(n)]
        groups += n > 0
        for j in range(n):
            want += sum(math.prod(q[: m + 1]) for m in range(j, n)) * -float(slots.logp[g, j])
    assert float(loss({"dpace": {"smoothing": a}}, slots)) == pytest.approx(want / groups, rel=1e-6)


def test_unsmoothed_dpace_has_the_gradient_of_the_accepted_length(slots: Slots) -> None:
    (ours,) = torch.autograd.grad(loss({"dpace": {"smoothing": 0.0}}, slots), slots.logp)
    q = torch.where(slots.valid, slots.logp.exp(), 0)
    (want,) = torch.autograd.grad(-q.cumprod(1).sum() / 4, slots.logp)
    torch.testing.assert_close(ours, want)


def test_credit_falls_along_the_block(slots: Slots) -> None:
    w = credit(slots.logp.detach(), slots.valid, 0.5)
    assert (w[:, 1:] <= w[:, :-1]).all() and (w[~slots.valid] == 0).all()


def test_terms_add_up(slots: Slots) -> None:
    both = loss({"ce": 0.3, "kl": {"weight": 2.0}}, slots)
    torch.testing.assert_close(both, 0.3 * loss({"ce": 1}, slots) + 2 * loss({"kl": 1}, slots))
    w = torch.exp(-(slots.steps - 1) / 7.0) * slots.valid
    assert float(loss({"kl": 1}, slots)) == pytest.approx(float((w * slots.kl[None]).sum() / w.sum()), rel=1e-6)


def test_a_batch_without_labels_has_no_loss() -> None:
    none = torch.zeros(2, 3, dtype=torch.bool)
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    value = loss({"ce": 1, "dpace": 1}, Slots(torch.arange(1, 4), none, logp))
    value.backward()
    assert float(value) == 0 and (logp.grad == 0).all()


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown objective 'cee'"):
        Mix.from_config({"cee": 1})
    with pytest.raises(ValueError, match="has no option gama"):
        Mix.from_config({"ce": {"gama": 1}})
    with pytest.raises(ValueError, match="no objective"):
        Mix.from_config({})


@pytest.fixture(scope="module")
def head() -> Head:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config).double().eval().requires_grad_(False)
    return Head(Backbone(model), chunk=3)


def test_label_log_probabilities_and_their_gradient(head: Head) -> None:
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (7,))
    want = head.logits(hidden).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    assert head.plain is not None
    logp, hits = head.logp(hidden, labels)
    torch.testing.assert_close(logp, want)
    assert torch.equal(hits, head.argmax(hidden) == labels)
    assert torch.autograd.gradcheck(lambda h: head.logp(h, labels)[0], hidden)
    plain, head.plain = head.plain, None  # a head that is more than a Linear
    try:
        torch.testing.assert_close(head.logp(hidden, labels)[0], want)
        assert torch.autograd.gradcheck(lambda h: head.logp(h, labels)[0], hidden)
    finally:
        head.plain = plain


def test_divergence_from_the_verifier(head: Head) -> None:
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, 8, dtype=torch.float64)
    p, q = head.logits(teacher).softmax(-1), head.logits(hidden).softmax(-1)
    torch.testing.assert_close(head.kl(hidden, teacher), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(head.kl(hidden, teacher, V), head.kl(hidden, teacher))
    top, index = p.topk(3, -1)
    top = top / top.sum(-1, keepdim=True)
    torch.testing.assert_close(head.kl(hidden, teacher, 3), (top * (top / q.gather(1, index)).log()).sum(-1))
    assert torch.autograd.gradcheck(lambda h: head.kl(h, teacher), hidden)


def test_a_banned_token_is_never_guessed(head: Head) -> None:
    hidden = torch.randn(7, 8, dtype=torch.float64)
    first = int(head.argmax(hidden)[0])
    assert int(head.argmax(hidden, banned=first)[0]) != first
