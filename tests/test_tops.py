"""The best tokens of logits: kernels against torch, and torch against a sort that is stable."""

import pytest
import torch

from selfspec import kernels, tops
from selfspec.draft import chain_of
from selfspec.draft.tree import best_first

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["plain", "bfloat16", "rounded", "all equal", "banned", "one stretch", "float64"]


def logits_of(kind: str, n: int, t: int, v: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(n, t, v, generator=g)
    if kind == "bfloat16":
        x = x.bfloat16()
    if kind == "rounded":
        x = x.round()  # -0.0 beside 0.0
    if kind == "all equal":
        x = torch.where(torch.rand(n, t, v, generator=g) < 0.5, -0.0, 0.0)
    if kind == "banned":
        x = x.masked_fill(torch.rand(n, t, v, generator=g) < 0.97, -torch.inf)
        x[..., v // 2] = 1.0
    if kind == "one stretch":
        x[..., : v // 8] += 40
    if kind == "float64":
        x = x.double() * (1 + 1e-12)
    return x.to(DEVICE)


def by_sorting(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores, ids = (x.float() + 0.0).sort(dim=-1, descending=True, stable=True)
    top = scores[..., :k] - x.double().logsumexp(-1, keepdim=True)
    return top.float(), ids[..., :k].masked_fill(scores[..., :k] == -torch.inf, 0)


@pytest.fixture(params=["torch", "kernels"])
def how(request, monkeypatch):
    if request.param == "kernels":
        pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "DEVICES", {DEVICE} if request.param == "kernels" else set())
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("v,k", [(5, 1), (96, 33), (300, 17)])
def test_the_most_probable_tokens_stand_in_order(how, kind, v, k):
    x = logits_of(kind, 2, 3, v)
    top, ids = tops.ranked(x, k)
    wanted, tokens = by_sorting(x, k)
    assert torch.equal(ids, tokens)
    torch.testing.assert_close(top, wanted, rtol=1e-6, atol=3e-6)
    part = x[:, 1:]  # rows that lie apart
    assert torch.equal(tops.ranked(part, k)[1], tokens[:, 1:])
    if how == "kernels":  # to the bit, in any company
        assert torch.equal(tops.ranked(part[1], k)[0], top[1, 1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("v,k", [(5, 3), (1100, 8)])
def test_a_few_given_tokens_stand_in_order(how, kind, v, k):
    x = logits_of(kind, 2, 4, v)
    ids = torch.rand(2, 4, v, generator=torch.Generator().manual_seed(v)).topk(k).indices.to(DEVICE)
    ids[0, :, 1] = -1
    top, order = tops.among(x, ids)
    log_q = (x.double() - x.double().logsumexp(-1, keepdim=True)).float()
    own = torch.where(ids < 0, -torch.inf, log_q.gather(-1, ids.clamp(min=0)))
    scores = torch.where(ids < 0, -torch.inf, x.float().gather(-1, ids.clamp(min=0)))
    assert torch.equal(order, scores.sort(dim=-1, descending=True, stable=True).indices)
    torch.testing.assert_close(top, own.gather(-1, order), rtol=1e-6, atol=3e-6)
    part = tops.among(x[:, 1:], ids[:, 1:])  # rows that lie apart
    assert torch.equal(part[1], order[:, 1:])
    if how == "kernels":
        assert torch.equal(part[0], top[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_equals_is_best(how, kind):
    for v in (1, 7, 1100):
        x = logits_of(kind, 2, 3, v)
        wanted = x.float().cpu().argmax(-1).to(DEVICE)
        anchor = torch.tensor([-7, 9], device=DEVICE)
        assert torch.equal(tops.best(x), wanted) and torch.equal(tops.best(x[1, 2]), wanted[1, 2])
        chain = chain_of(anchor, x[:, :2]).tokens
        assert torch.equal(chain, torch.cat([anchor[:, None], wanted[:, :2]], 1))
        torch.testing.assert_close(tops.certainty(x), x.double().softmax(-1).amax(-1).float(), rtol=1e-5, atol=0)
    impossible = torch.full((1, 1, 1100), -torch.inf, device=DEVICE)
    assert tops.best(impossible).tolist() == [[0]]


def test_a_tree_takes_the_lower_of_equal_tokens(how):
    """torch's top-k takes any of them, and on another device others."""
    x = torch.zeros(1, 2, 500, device=DEVICE)
    tree = best_first(torch.tensor([3], device=DEVICE), x, 4)
    assert tree.tokens.tolist() == [[3, 0, 1, 2, 3]] and tree.parents.tolist() == [[-1, 0, 0, 0, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("v,k", [(49152, 16), (49152, 64), (151936, 32), (262144, 64)])
def test_real_sizes_in_a_graph(v, k):
    """Replays over new logits, among them rows whose best lie together."""
    x = torch.empty(1, 33, v, dtype=torch.bfloat16, device="cuda")
    x.copy_(logits_of("bfloat16", 1, 33, v))
    tops.ranked(x, k), tops.best(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (top, ids), first = tops.ranked(x, k), tops.best(x)
    for kind in ("bfloat16", "rounded", "all equal", "banned", "one stretch"):
        x.copy_(logits_of(kind, 1, 33, v, seed=1))
        graph.replay()
        wanted, tokens = by_sorting(x, k)
        assert torch.equal(ids, tokens) and torch.equal(first, tokens[..., 0]), kind
        torch.testing.assert_close(top, wanted, rtol=1e-6, atol=1e-5)
