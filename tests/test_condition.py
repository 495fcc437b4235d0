"""Drafts conditioned on the token before them: growth, chains, sampling, and texts that stay what they were."""

import copy
import dataclasses
import math

import pytest
import torch
from conditioned import K, V, given_of, paths_of, told_by
from decoding import B, N, decoded, outputs
from tiny import PROMPT, RAGGED, model_of, path_of, reference, run

from selfspec import kernels, rows, tops
from selfspec.backbone import Backbone
from selfspec.choose import Chooser
from selfspec.draft import condition
from selfspec.draft.condition import Condition, Given
from selfspec.draft.tree import by_heap, ranked, step_by_step
from selfspec.draft.trees.domino import over_candidates
from selfspec.plan import Plan
from selfspec.sampling import Pipeline, Sampling
from selfspec.session import Request, Session
from selfspec.shadow import reader_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ("markov", "sampler")  # of the head that conditions
SIZES = ((1, 1, 1), (4, 3, 7), (15, 8, 40))


def linked(kind: str, generator: torch.Generator, n: int, t: int, k: int):
    """Tokens of candidates [N, T, K], and what follows each, in order: [N, T, K, K] twice."""
    logits = torch.randn(n, t, k, 2 * k, generator=generator) * 2
    if kind == "ties":
        logits = logits.round()
    if kind == "certain":  # log-probabilities of exactly 0: children tie with their parents
        logits[..., 0] += 40 * torch.randint(0, 2, (n, t, k), generator=generator)
    if kind == "banned":
        logits[..., 1:k][torch.rand(n, t, k, k - 1, generator=generator) < 0.7] = -math.inf
    top, order = logits.log_softmax(-1)[..., :k].sort(dim=-1, descending=True, stable=True)
    ids = torch.rand(n, t, 50, generator=generator).topk(k).indices
    return ids, top, order


@pytest.mark.parametrize(
    "kind,t,k,budget",
    [*((kind, *sizes) for kind in ("plain", "ties", "certain", "banned") for sizes in SIZES), ("ties", 6, 8, 130)],
)
def test_the_kernel_grows_over_linked_candidates_to_the_bit(kind, t, k, budget):
    pytest.importorskip("triton")
    from selfspec.draft import grow

    generator = torch.Generator().manual_seed(t * budget + len(kind))
    ids, top, order = linked(kind, generator, 1 if budget > 100 else 2, t, k)
    anchor = torch.tensor([5, 9])[: len(top)]
    want = by_heap(anchor, top, ids, budget, order)
    got = grow.grow(*(x.to(DEVICE) for x in (anchor, top, ids)), budget, order.to(DEVICE))
    for name in ("tokens", "parents", "scores", "levels"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
        assert getattr(got, name).dtype == getattr(want, name).dtype
    assert torch.equal(got.paths.cpu(), rows.ancestors(want.parents))
    best = order[..., 0]
    chain = step_by_step(anchor, ids, best)
    assert torch.equal(grow.follow(*(x.to(DEVICE) for x in (anchor, ids, best))).cpu(), chain)


@pytest.mark.parametrize("kind", ["plain", "banned"])
@pytest.mark.parametrize("t,k,budget", SIZES)
def test_growth_is_best_first_over_all_transitions(kind, t, k, budget):
    """Level by level, over beams that lose nothing."""
    ids, top, order = linked(kind, torch.Generator().manual_seed(t), 2, t, k)
    got = by_heap(torch.tensor([5, 9]), top, ids, budget, order)
    table = torch.empty_like(top).scatter(-1, order, top)
    want = over_candidates(torch.tensor([5, 9]), ids, table, budget)
    for row in range(2):
        ours, theirs = paths_of(got, row), paths_of(want, row)
        assert set(ours) == set(theirs) and ours == pytest.approx(theirs, abs=1e-5)
        assert list(ours.values()) == sorted(ours.values(), reverse=True)
    chain = step_by_step(torch.tensor([5, 9]), ids, order[..., 0])
    for row in range(2):
        at = 0
        for d in range(t):
            at = int(table[row, d, at].argmax())
            assert int(chain[row, d + 1]) == int(ids[row, d, at])


def test_marginals_are_the_case_of_equal_lists():
    top, ids = ranked(torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)), 4)
    order = torch.arange(4).expand(2, 5, 4, 4)
    plain, like = by_heap(torch.tensor([1, 2]), top, ids, 30), top[:, :, None].expand(2, 5, 4, 4)
    same = by_heap(torch.tensor([1, 2]), like, ids, 30, order)
    for name in ("tokens", "parents", "scores", "levels"):
        assert torch.equal(getattr(plain, name), getattr(same, name))


def test_of_equal_scores_the_lower_parent_goes_first_then_the_lower_rank():
    half = math.log(0.5)
    top = torch.tensor([[[[half, half], [half, half]], [[half, -9.0], [half, half]]]])
    order = torch.tensor([[[[1, 0], [1, 0]], [[0, 1], [1, 0]]]])
    tree = by_heap(torch.tensor([1]), top, torch.tensor([[[10, 11], [20, 21]]]), 5, order)
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2]]
    assert tree.tokens.tolist() == [[1, 11, 10, 21, 20, 20]]


# ---- what is proposed


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("nodes", [None, 12, 3])
def test_greedy_drafts_follow_the_head_among_the_likeliest_tokens(served, read, nodes, monkeypatch):
    if served:
        pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "DEVICES", {DEVICE} if served else set())
    table, plain, given = given_of(2, 4, banned=7)
    plain[..., 7] = -math.inf
    anchor = torch.tensor([0, 1])
    requests = [Request(PROMPT, N)] * 2
    start = torch.tensor([4, 9])
    move = [t.to(DEVICE) for t in (anchor, start, plain)]
    table = table.to(DEVICE)
    given = dataclasses.replace(given, condition=told_by(table, read), states=given.states.to(DEVICE), before=move[0])
    tree = Chooser().tree(requests, *move, nodes, given=given)
    law = table.clone()
    law[:, 7] = -math.inf
    law = law.log_softmax(-1)
    few = plain.topk(min(K, nodes or K)).indices
    if nodes is None:
        for row in range(2):
            token = row
            for d, got in enumerate(tree.tokens[row, 1:].tolist()):
                token = int(few[row, d][law[token, few[row, d]].argmax()])
                assert got == token
        return
    for row in range(2):
        want = {}

        def grow(path, score):
            for token in few[row, len(path)].tolist() if len(path) < 4 else []:  # noqa: B023
                want[(*path, token)] = score + float(law[path[-1] if path else row, token])  # noqa: B023
                grow((*path, token), want[(*path, token)])  # noqa: B023

        grow((), 0.0)
        best = sorted(want.values(), reverse=True)[:nodes]
        assert sorted(paths_of(tree, row).values(), reverse=True) == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("wide", [8, 11, 32])
def test_the_rest_of_the_vocabulary_weighs_what_the_marginals_give_it(wide, served, monkeypatch):
    if served:
        pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "DEVICES", {DEVICE} if served else set())
    table, plain, given = (x if isinstance(x, Given) else x.to(DEVICE) for x in given_of(2, 4))
    plain[0, 1, 5:] = -math.inf  # fewer possible tokens than are asked for
    given = Given(told_by(table), given.states.to(DEVICE), given.before.to(DEVICE))
    top, ids = tops.reference(plain, min(wide, V))
    ids = ids.masked_fill(top == -math.inf, -1)
    first = plain.gather(-1, ids[..., :1])[..., 0]
    likely, order = condition.near(given, ids, top, first, 8)
    for n in range(2):
        for t in range(4):
            within = [j for j in ids[n, t].tolist() if j >= 0]
            beside = [j for j in range(V) if j not in within]
            for i, before in enumerate([n] * 8 if t == 0 else ids[n, t - 1, :8].tolist()):
                scores, rest = table[before].tolist(), plain[n, t].tolist()
                total = sum(math.exp(scores[j]) for j in within) + sum(math.exp(rest[j]) for j in beside)
                want = [scores[j] - math.log(total) if j >= 0 else -math.inf for j in ids[n, t, :8].tolist()]
                places = sorted(range(8), key=lambda k: -want[k])
                assert likely[n, t, i].tolist() == pytest.approx([want[k] for k in places], abs=2e-3)
                assert [want[k] for k in order[n, t, i].tolist()] == pytest.approx([want[k] for k in places], abs=1e-5)
                best = condition.successors(given, ids[..., :8])[n, t, i]
                assert want[int(best)] == max(want)


def test_float64_is_left_to_torch(monkeypatch):
    """A kernel's products are float32 at best."""
    monkeypatch.setattr(kernels, "DEVICES", {DEVICE})
    monkeypatch.setattr("selfspec.kernels.pairs._run", lambda *_: pytest.fail("a kernel ran"))
    table, plain, given = given_of(2, 4)
    given = Given(told_by(table.double()), given.states.double(), given.before)
    top, ids = tops.reference(plain.double(), 8)
    assert condition.successors(given, ids).shape == ids.shape
    assert condition.near(given, ids, top, plain.gather(-1, ids[..., :1])[..., 0], 8)[0].shape == (2, 4, 8, 8)


def test_a_head_that_is_a_product_is_read_where_it_is_asked():
    """A cap, a scale or a bias behind the product shows, in half precision too, and all logits are computed then."""
    for dtype in (torch.float32, torch.bfloat16):
        assert Backbone(copy.deepcopy(model_of("Llama")).to(dtype)).readout is not None
        for family in ("Gemma2", "Granite"):
            assert Backbone(copy.deepcopy(model_of(family)).to(dtype)).readout is None, family


def test_every_adapter_of_a_model_has_its_readout():
    """The second one's head was left out on a CPU, as only the first backbone of a model was compared with it."""
    assert Backbone(model_of("Llama"), verify=False).readout is not None


def test_a_head_in_another_dtype_or_of_another_width_is_no_readout():
    """Such models could not be loaded."""
    like = torch.zeros(32)
    for head in (torch.nn.Linear(32, 24, bias=False).double(), torch.nn.Linear(16, 24, bias=False), None):
        assert reader_of(head, lambda states: states, like) == ()


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [None, 40])
def test_a_graph_replays_conditioned_drafts(nodes):
    table, plain, given = given_of(3, 7)
    table, plain, anchor = table.to(DEVICE), plain.to(DEVICE), torch.arange(3, device=DEVICE)
    given = Given(told_by(table), given.states.to(DEVICE), anchor)
    requests = [Request(PROMPT, N, sampling=Sampling(Pipeline(), i < 2, 40 + i)) for i in range(3)]
    where = anchor, torch.tensor([4, 9, 2], device=DEVICE), plain, nodes, torch.tensor([7, 8, 9], device=DEVICE)

    def run_both():
        return [Chooser().tree(r, *where, given=given).tokens for r in (requests, [Request(PROMPT, N)] * 3)]

    run_both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_both()
    for seed in range(3):
        plain.copy_(torch.randn(plain.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, run_both(), strict=True))


# ---- texts stay what they were


PLANS = [
    Plan("sequential", B),
    Plan("sequential", B, verify_length=3),
    Plan("tree", B, 8),
    Plan("overlap", B),
    Plan("overlap+tree", B, 6, groups=3),
    Plan("loop", B),
    Plan("loop+tree", B, 8),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_greedy_text_is_transformers_own(plan, family, form):
    model = model_of(family)
    path = path_of(model, 0.3, heads=(form, "calibrator"), head_rank=6, prefix_splits=True, mask_id=5)
    assert outputs(decoded(Backbone(model, path), plan, RAGGED, N)) == reference(model, RAGGED, N)


KINDS = {
    "plain": dict(),
    "calibrated": dict(heads=("calibrator",)),
    "shift": dict(shift=True, causal=True),
    "late": dict(entry=2, taps=(1,), layouts=("known",)),
    "uno": dict(shift=True, causal=True, seed_row=True, layouts=("known",)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "kind,mode",
    [(k, m) for k, f in KINDS.items() for m in ("sequential", "tree", "overlap", "overlap+tree")
     if "layouts" not in f or "overlap" not in m],
)  # fmt: skip
def test_coupled_text_is_plain_decodings_own(kind, mode, form):
    model, fields = model_of(), KINDS[kind]
    path = path_of(model, 0.3, head_rank=6, **fields | {"heads": (form, *fields.get("heads", ()))})
    if fields.get("seed_row"):
        path.config = dataclasses.replace(path.config, noise="uniform")
    body = Backbone(model, path)

    def texts(plan):
        requests = [
            Request(p, 20, sampling=Sampling(Pipeline(), True, 3 + i) if i else None) for i, p in enumerate(RAGGED)
        ]
        return [r.output for r in run(Session(body, plan, 3, 40), requests)]

    assert texts(Plan(mode, B, 8)) == texts(Plan("ar", 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verify", ["rejection", "multi", "block"])
def test_other_verifiers_draft_as_if_there_were_no_head(verify, form):
    model = model_of()
    headed, bare = path_of(model, 0.3, heads=(form,), head_rank=6), path_of(model, 0.3)
    state = {k: v for k, v in headed.state_dict().items() if not k.startswith("heads.")}
    bare.load_state_dict(state)
    found = []
    for path in (headed, bare):
        requests = [Request(p, 20, sampling=Sampling(Pipeline(), True, i)) for i, p in enumerate(RAGGED)]
        run(Session(Backbone(model, path), Plan("overlap", B), 3, 40, verify), requests)
        found.append([(r.output, r.stats) for r in requests])
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["sequential", "tree", "overlap", "overlap+tree"])
def test_rounds_draft_what_the_head_says(mode, monkeypatch):
    """A head that knows what follows every token of the answer makes every draft right, from the first round on."""
    model, cap = model_of(), 13
    truth = reference(model, [PROMPT], cap + B)[0]
    follows = {(len(PROMPT) + i, t): truth[i + 1] for i, t in enumerate(truth[:-1])}
    body = Backbone(model, path_of(model, 0.02, heads=("markov",), head_rank=6))
    session = Session(body, Plan(mode, B, 24), 1, 40)
    monkeypatch.setattr(condition, "CANDIDATES", 24)

    def knows(states, before):
        out = body.logits(states)
        for t in range(before.shape[1]):
            for k, token in enumerate(before[0, t].tolist()):
                right = follows.get((int(session.slots.start[0]) + t, token))
                if right is not None:
                    out[0, t, k, right] += 50
        return out

    known = Condition(knows, lambda states: states)  # its states are logits already
    monkeypatch.setattr(type(body.path), "condition", lambda self, _: known)
    request = Request(PROMPT, cap)
    run(session, [request])
    assert request.output == truth[:cap]
    assert request.stats.rounds == math.ceil((cap - 1) / B)


@pytest.mark.parametrize("family,plan,sampled", [("Gemma2", "sequential", False), ("Llama", "tree", True)])
def test_a_processor_leaves_heads_over_large_vocabularies_alone(family, plan, sampled, monkeypatch):
    """120 rows of 49,152 logits took a CPU longer than the forwards of the round.

    They are asked for where the head's product is not all, and by trees of texts that processors change.
    """
    model = model_of(family)
    path, bare = path_of(model, 0.3, heads=("sampler",), head_rank=6), path_of(model, 0.3)
    bare.load_state_dict({k: v for k, v in path.state_dict().items() if not k.startswith("heads.")})
    torch.nn.init.normal_(path.heads["sampler"].up.weight)
    found = []
    for small, p in ((8, path), (8, bare), (24, path)):
        monkeypatch.setattr(condition, "SMALL", small)
        requests = [Request(q, 20, sampling=Sampling(Pipeline(), sampled, i)) for i, q in enumerate(RAGGED)]
        run(Session(Backbone(model, p), Plan(plan, B, 8), 3, 40), requests)
        found.append([(r.output, r.stats.accepted) for r in requests])
    assert found[0] == found[1] != found[2]


def test_a_processor_reads_a_heads_product_of_a_few_tokens(monkeypatch):
    """The head was left out on a CPU, and a seventh of the tokens of a round with it."""
    model, asked = model_of(), []
    path = path_of(model, 0.3, heads=("sampler",), head_rank=6)
    monkeypatch.setattr(condition, "SMALL", 8)
    body = Backbone(model, path)
    known = condition.condition_of(body)
    monkeypatch.setattr(type(path), "condition", lambda *_: dataclasses.replace(known, logits=asked.append))
    texts = {m: outputs(decoded(body, Plan(m, B, 8), RAGGED, N)) for m in ("ar", "sequential", "tree")}
    assert texts["sequential"] == texts["tree"] == texts["ar"] and not asked
