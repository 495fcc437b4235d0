"""The head's log-probabilities, divergences and closed-form gradients."""

from __future__ import annotations

import pytest
import torch
from formulas import V
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.backbone import Backbone
from selfspec.training.head import Head
from selfspec.training.objectives.kl import forward_kl
from selfspec.training.objectives.tv import overlap


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


def test_a_librarys_fused_loss_is_the_same(head: Head) -> None:
    """Each row with a weight of its own, as the objectives have it; in float32, which its kernels are for."""
    pytest.importorskip("liger_kernel")
    pytest.importorskip("triton")
    plain, hidden, labels = head.plain, torch.randn(7, 8), torch.randint(V, (7,))
    labels[:3] = head.argmax(hidden[:3].double())
    weights, got = torch.rand(7), {}
    try:
        for head.forget in (False, True):
            own = hidden.clone().requires_grad_(True)
            head.plain = plain[0].float(), torch.linspace(-1, 1, V)
            logp, hits = head.logp(own, labels)
            (logp * weights).sum().backward()
            got[head.forget] = logp.detach(), hits, own.grad
    finally:
        head.plain, head.forget = plain, False
    for mine, theirs in zip(got[False], got[True], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_divergence_from_the_verifier(head: Head) -> None:
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, 8, dtype=torch.float64)
    p, q = head.logits(teacher).softmax(-1), head.logits(hidden).softmax(-1)

    def kl(h, top_k=None):
        return head.measure(forward_kl, h, teacher, top_k=top_k)

    torch.testing.assert_close(kl(hidden), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(kl(hidden, V), kl(hidden))
    top, index = p.topk(3, -1)
    top = top / top.sum(-1, keepdim=True)
    torch.testing.assert_close(kl(hidden, 3), (top * (top / q.gather(1, index)).log()).sum(-1))
    assert torch.autograd.gradcheck(kl, hidden, fast_mode=True)
    a, r = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    want = torch.minimum(a.exp()[:, None] * p, r.exp()[:, None] * q).sum(-1)
    torch.testing.assert_close(head.measure(overlap, hidden, teacher, a, r), want)
    assert torch.autograd.gradcheck(lambda h, a, r: head.measure(overlap, h, teacher, a, r), (hidden, a, r))


def test_a_banned_token_is_never_guessed(head: Head) -> None:
    hidden = torch.randn(7, 8, dtype=torch.float64)
    first = int(head.argmax(hidden)[0])
    assert int(head.argmax(hidden, banned=first)[0]) != first
