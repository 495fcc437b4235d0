"""The law of what each verifier emits, enumerated: it is plain decoding's, to 1e-12. Wrong residuals are caught."""

import itertools
import math
import sys
from functools import cache

import pytest
import torch
from tiny import PROMPT, model_of, path_of
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec import SelfSpecModel
from selfspec.draft import DraftTree
from selfspec.draft.drawn import drawn, replay
from selfspec.draft.tree import best_first
from selfspec.recipe import cuts_of
from selfspec.sampling import Pipeline, as_seed
from selfspec.verify import CHAINS, DRAWN, VERIFIERS

V = 3
FILES = {name: sys.modules[f"selfspec.verify.{name}"] for name in VERIFIERS}  # the package's names are the functions
PIPELINES = {
    "bare": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top_k": [TopKLogitsWarper(2)],
    "top_p": [TemperatureLogitsWarper(1.4), TopPLogitsWarper(0.7)],
    "min_p": [MinPLogitsWarper(0.35)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(0.8)],
}


class Model:
    """A random table: logits after every text, and the drafter's marginals at every depth."""

    def __init__(self, pipeline, depth, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.pipeline, self.depth = Pipeline(LogitsProcessorList(pipeline)), depth
        self.logits = cache(lambda text: 1.5 * torch.randn(1, V, generator=g))
        for n in range(depth + 1):  # in a fixed order, whatever is asked first
            for text in itertools.product(range(V), repeat=n):
                self.logits(text)
        cuts = cuts_of(pipeline, [0], depth + 1)
        self.q = cuts(None, torch.randn(1, depth, V, generator=g))[0].double().softmax(-1)
        # [V]; a text begins with the anchor, token 0
        self.scores = cache(lambda text: self.pipeline(torch.tensor([[0, *text]]), self.logits(text))[0])
        self.p = cache(lambda text: self.scores(text).double().softmax(-1))

    def law(self):
        """Plain decoding's probability of every text of depth + 1 tokens."""
        out = {}
        for text in itertools.product(range(V), repeat=self.depth + 1):
            out[text] = float(torch.stack([self.p(text[:i])[t] for i, t in enumerate(text)]).prod())
        return out

    def complete(self, out, text, weight):
        """Add the texts that plain decoding makes of a beginning."""
        missing = self.depth + 1 - len(text)
        for rest in itertools.product(range(V), repeat=missing):
            whole, w = tuple(text) + rest, weight
            for i in range(len(text), len(whole)):
                w = w * float(self.p(whole[:i])[whole[i]])
            out[whole] = out.get(whole, 0.0) + w


class Scripted:
    """Noise that accepts or refuses as told, and keeps the weights of the last token instead of drawing it."""

    def __init__(self, yes):
        self.yes, self.start = yes, torch.zeros(len(yes), dtype=torch.long)

    def uniforms(self, n):
        return torch.where(self.yes[:, -n:], 0.0, 2.0).double()

    def residual(self, weights):
        self.weights = weights / weights.sum(-1, keepdim=True)
        return torch.zeros(len(weights), dtype=torch.long)


def emitted_law(model, tree, weights, yes, verifier, accepts):
    """Sum over all drafts and decisions.

    Args:
        model: see above.
        tree: N trees or chains, one for every draft and every pattern of decisions.
        weights: [N] probability of each draft.
        yes: [N, M - 1] the decisions.
        verifier: its name.
        accepts: function of the finished run -> [N] probability of its decisions.
    """
    n, m = tree.tokens.shape
    parents = tree.parents.tolist() if tree.parents is not None else [list(range(-1, m - 1))] * n
    scores = torch.zeros(n, m, V)
    for i, row in enumerate(tree.tokens.tolist()):
        texts = [()]
        for node in range(1, m):
            texts.append((*texts[max(parents[i][node], 0)], max(row[node], 0)))
        scores[i] = torch.stack([model.scores(t) for t in texts])
    noise = Scripted(torch.cat([yes[:, :1], yes], 1))
    got = VERIFIERS[verifier](tree, scores, noise)
    weights = weights * accepts(scores.double().softmax(-1))
    out = {}
    for i, weight in enumerate(weights.tolist()):
        if weight:
            kept = got.tokens[i, : int(got.count[i]) - 1].tolist()
            assert kept == tree.tokens[i][got.rows[i, 1 : int(got.count[i])]].tolist()
            for token, share in enumerate(noise.weights[i].tolist()):
                if share:
                    model.complete(out, (*kept, token), weight * share)
    return out


def chain_law(model, verifier):
    drafts = list(itertools.product(range(V), repeat=model.depth))
    decisions = list(itertools.product([False, True], repeat=model.depth))
    pairs = [(d, y) for d in drafts for y in decisions if all(model.q[i, t] > 0 for i, t in enumerate(d))]
    tokens = torch.tensor([[0, *d] for d, _ in pairs])
    yes = torch.tensor([y for _, y in pairs])
    q = model.q.expand(len(pairs), -1, -1)
    chance = q.gather(2, tokens[:, 1:, None])[..., 0].prod(1)

    def accepts(p):
        a = FILES["rejection" if verifier == "multi" else verifier].accept(p, q, tokens[:, 1:])
        return torch.where(yes, a, 1 - a).prod(1)

    return emitted_law(model, DraftTree(tokens, None, q), chance, yes, verifier, accepts)


def filled(anchor, log_q, budget, order):
    """Shape first, drawn tokens second."""
    return replay(best_first(anchor, log_q, budget), order)


def tree_law(model, budget, monkeypatch, build=filled):
    """`multi` on trees: all orders in which each depth's candidates can be drawn, all decisions."""
    k = min(budget, V)
    orders = [tuple(o) for o in itertools.permutations(range(V), k)]
    chance = {}
    for d in range(model.depth):
        for o in orders:
            left, w = model.q[d].clone(), 1.0
            for t in o:
                w, left[t] = w * float(left[t] / left.sum().clamp(min=1e-300)), 0.0
                if left.sum() <= 0:
                    break
            chance[d, o] = w
    support = [int((model.q[d] > 0).sum()) for d in range(model.depth)]

    def drawable(d, o):  # those without probability come last, in one order
        s = min(support[d], k)
        return all(model.q[d, t] > 0 for t in o[:s]) and list(o[s:]) == sorted(o[s:])

    cases = [
        (c, y)
        for c in itertools.product(orders, repeat=model.depth)
        if all(drawable(d, o) for d, o in enumerate(c))
        for y in itertools.product([False, True], repeat=budget)
    ]
    n = len(cases)
    yes = torch.tensor([y for _, y in cases])
    q = model.q.expand(n, -1, -1)
    tree = build(torch.zeros(n, dtype=torch.long), q.log(), budget, torch.tensor([c for c, _ in cases]))
    tree = DraftTree(tree.tokens, tree.parents, q)
    chances = [math.prod(chance[d, o] for d, o in enumerate(c)) for c, _ in cases]
    weights = torch.tensor(chances, dtype=torch.float64)
    asked, real = [], FILES["multi"].accept
    monkeypatch.setattr(FILES["multi"], "accept", lambda *a: asked.append(real(*a)) or asked[-1])

    def accepts(p):
        at, out = torch.zeros(n, dtype=torch.long), torch.ones(n, dtype=torch.float64)
        for node, a in enumerate(asked, 1):
            tried = (tree.parents[:, node] == at) & (tree.tokens[:, node] >= 0)
            chosen = torch.where(yes[:, node - 1], a, 1 - a)
            out = out * torch.where(tried, chosen, 0.5)  # an untried node's decision changes nothing
            at = torch.where(tried & yes[:, node - 1], node, at)
        return out

    return emitted_law(model, tree, weights, yes, "multi", accepts)


def off(found, law):
    assert set(found) <= set(law)
    return max(abs(found.get(text, 0.0) - p) for text, p in law.items())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("verifier", sorted(DRAWN))
def test_chains_have_plain_decodings_law(verifier, name, seed):
    for depth in (1, 2, 3):
        model = Model(PIPELINES[name], depth, seed)
        assert off(chain_law(model, verifier), model.law()) < 1e-12


@pytest.mark.parametrize("budget", [1, 3, 5])
@pytest.mark.parametrize("name", PIPELINES)
def test_trees_have_plain_decodings_law(name, budget, monkeypatch):
    model = Model(PIPELINES[name], 2)
    assert off(tree_law(model, budget, monkeypatch), model.law()) < 1e-12


WRONG = {
    "rejection: the target itself instead of the residual": ("rejection", "residuals", lambda p, q, x: p),
    "rejection: the last token from the draft": (
        "rejection", "residuals", lambda p, q, x: torch.cat([(p[:, :-1] - q).clamp(min=0), q[:, -1:]], 1)
    ),
    "rejection: q taken for 1": ("rejection", "accept", lambda p, q, x: p[:, :-1].gather(2, x[..., None])[..., 0]),
    "block: a residual that is not scaled": ("block", "residuals", FILES["rejection"].residuals),
    "block: the first failure ends it": ("block", "kept", FILES["rejection"].kept),
    "block: the token criterion": ("block", "accept", FILES["rejection"].accept),
    "multi: a refused token stays in q": (
        "multi", "refused", lambda p, q, x: ((p - q).clamp(min=0) / (p - q).clamp(min=0).sum(-1, keepdim=True), q)
    ),
    "multi: no residual": ("multi", "refused", lambda p, q, x: (p, q)),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_faults_change_the_law(fault, monkeypatch):
    verifier, name, wrong = WRONG[fault]
    monkeypatch.setattr(FILES[verifier], name, wrong)
    worst = 0.0
    for seed in range(4):  # over so few tokens not every table shows every fault
        model = Model([], 2, seed)
        found = tree_law(model, 5, monkeypatch) if verifier == "multi" else chain_law(model, verifier)
        worst = max(worst, off(found, model.law()))
    assert worst > 1e-3


def accepted_length(model, verifier):
    """Expected drafts kept in a chain."""
    total = 0.0
    for draft in itertools.product(range(V), repeat=model.depth):
        if any(model.q[i, t] == 0 for i, t in enumerate(draft)):
            continue
        x = torch.tensor([draft])
        p = torch.stack([model.p(draft[:i]) for i in range(model.depth + 1)])[None]
        a = FILES[verifier].accept(p, model.q[None], x)[0]
        w = float(model.q.gather(1, x.T).prod())
        for yes in itertools.product([False, True], repeat=model.depth):
            u = torch.where(torch.tensor([yes]), 0.0, 2.0)
            share = torch.where(torch.tensor(yes), a, 1 - a).prod()
            total += w * float(share) * int(FILES[verifier].kept(a[None], u))
    return total


@pytest.mark.parametrize("seed", range(6))
def test_blocks_keep_at_least_what_tokens_do(seed):
    model = Model([], 3, seed)
    assert accepted_length(model, "block") >= accepted_length(model, "rejection") - 1e-12


def test_blocks_keep_more_where_it_is_known():
    """Sun et al.'s example: two tokens, p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 and 11/9 are kept."""
    model = Model([], 2)
    model.p = lambda text: torch.tensor([1 / 3, 2 / 3, 0.0]).double()
    model.q = torch.tensor([[2 / 3, 1 / 3, 0.0]] * 2).double()
    assert accepted_length(model, "rejection") == pytest.approx(10 / 9)
    assert accepted_length(model, "block") == pytest.approx(11 / 9)


def test_trees_are_refused_where_only_chains_are_right():
    tree = DraftTree(torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 0]]))
    for name in CHAINS:
        with pytest.raises(ValueError, match="chains"):
            VERIFIERS[name](tree, torch.zeros(1, 3, V), None)
    model = model_of()
    with pytest.raises(ValueError, match="chains"):
        SelfSpecModel(model, path_of(model)).generate(
            torch.tensor([PROMPT]), max_new_tokens=4, do_sample=True, verify="block", mode="tree"
        )


def test_drafts_are_drawn_from_q_without_replacement():
    n = 20000
    q = torch.tensor([0.5, 0.3, 0.2, 0.0]).double()
    scores, seed = q.log().expand(n, 2, 4), torch.arange(n)
    anchor = start = torch.zeros(n, dtype=torch.long)
    chain = drawn(anchor, scores, seed, start).tokens[:, 1:]
    pairs = torch.bincount(chain[:, 0] * 4 + chain[:, 1], minlength=16).view(4, 4) / n
    assert (pairs - q[:, None] * q).abs().max() < 0.015
    tree = drawn(anchor, scores, seed, start, 3)
    children = tree.tokens[:, 1:][tree.parents[:, 1:] == 0].view(n, -1)
    assert children.shape[1] == 2
    pairs = torch.bincount(children[:, 0] * 4 + children[:, 1], minlength=16).view(4, 4) / n
    wanted = q[:, None] * q / (1 - q[:, None])
    assert (pairs - wanted.fill_diagonal_(0)).abs().max() < 0.015
    again = drawn(anchor, scores, seed, start + 1).tokens[:, 1:]
    assert (again == chain).double().mean() < 0.5  # the next round's draws are new ones


# ---- end to end: 2,000 answers of four tokens; 64 texts of the last three, whose chances the model itself gives


@cache
def exact_law():
    """Chances of the first three tokens at T = 0.9 and top-k 4."""
    model, out = model_of(dtype=torch.float32), {}

    def grow(text, chance):
        if len(text) == 3:
            out[tuple(text)] = chance
            return
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + text])).logits[0, -1] / 0.9
        top = logits.topk(4)
        for token, p in zip(top.indices.tolist(), top.values.double().softmax(-1).tolist()):
            grow([*text, token], chance * p)

    grow([], 1.0)
    return out


def surprise(verifier, mode, n=2000):
    """Chi-square over the 64 texts, in standard deviations above its mean."""
    model = model_of(dtype=torch.float32)
    out = SelfSpecModel(model, path_of(model, 0.2)).generate(
        torch.tensor([PROMPT]), max_new_tokens=4, do_sample=True, temperature=0.9, top_k=4,
        num_return_sequences=n, seed=as_seed(12), verify=verifier, mode=mode, tree_nodes=6 if mode == "tree" else None,
    )  # fmt: skip
    law, found = exact_law(), dict.fromkeys(exact_law(), 0)
    for text in out[:, len(PROMPT) : len(PROMPT) + 3].tolist():
        found[tuple(text)] += 1
    chi = sum((found[t] - n * p) ** 2 / (n * p) for t, p in law.items())
    return (chi - 63) / (2 * 63) ** 0.5


CASES = [*itertools.product(sorted(VERIFIERS), ["sequential"]), ("coupled", "tree"), ("multi", "tree")]


@pytest.mark.parametrize("verifier, mode", CASES)
def test_a_sample_of_answers_follows_the_models_own_law(verifier, mode):
    assert surprise(verifier, mode) < 5  # one false alarm in a million or so, were it normal


@pytest.mark.parametrize("fault", ["rejection: the target itself instead of the residual", "multi: no residual"])
def test_such_a_sample_shows_a_wrong_residual(fault, monkeypatch):
    verifier, name, wrong = WRONG[fault]
    monkeypatch.setattr(FILES[verifier], name, wrong)
    assert surprise(verifier, "sequential") > 10
