"""Length rules at work: what is pruned, that the text stays the same, and what an adapter's heads are asked for."""

from functools import cache

import pytest
import torch
from test_replay import Replayed
from tiny import LAYERS, PROMPT, RAGGED, OraclePath, model_of, path_of, reference, run

from selfspec import SelfSpecModel, custom_generate, decode
from selfspec.adapters import heads
from selfspec.arena import Arena, policy_of
from selfspec.backbone import Backbone
from selfspec.draft import overlap
from selfspec.forecast import Forecast
from selfspec.plan import Plan
from selfspec.plan.cost import Costs
from selfspec.plan.latency import Latency
from selfspec.plan.lengths import LENGTHS
from selfspec.plan.lengths.named import read
from selfspec.plan.policy import Fixed
from selfspec.plan.table import LatencyTable
from selfspec.pruning import Pruning, bucket, together
from selfspec.sampling import Pipeline, Sampling
from selfspec.session import Request, Session

B, N = 6, 18
ALL = ("confidence", "length")
RULES = ("product:threshold=0.1", "product:by=certainty:threshold=0.1", "product:by=margin", "libraspec:alpha=1")
RULES += ("scan", "scan:in_order=true:by=certainty", "adaflash:lookahead=-1", "fixed:length=2")


def table():
    points = [("clean", n, r, 1.0 + 0.2 * n * r) for n in (1, 4) for r in (1, 4, 16)]
    points += [("draft", n, 4, 0.5) for n in (1, 4)]
    return LatencyTable(tuple(Latency(k, n, r, 0, 512, False, ms, ms, ms) for k, n, r, ms in points), LAYERS)


def path(**more):
    return path_of(model_of(), 0.3, **{"block_size": B, "heads": ALL, "head_rank": 6, "prefix_splits": True, **more})


@cache
def truth():
    return reference(model_of(), RAGGED, N)


@pytest.fixture
def widths(monkeypatch):
    """Nodes and draft rows of every verification."""
    seen, whole = [], decode.verify

    def verify(backbone, cache, start, tree, frame, hang=None, path=None):
        seen.append((tree.n_nodes, 0 if hang is None else hang[0].nodes.shape[1]))
        return whole(backbone, cache, start, tree, frame, hang, path)

    monkeypatch.setattr(decode, "verify", verify)
    return seen


def session_of(rule, plan, slots=3, graphs=False, verify="coupled", body=None):
    body = body or Backbone(model_of(), path())
    pruning = Pruning(rule, [body], Costs(table()))
    return Session(body, pruning.policy(plan, body.path), slots, 64, verify, graphs=graphs)


# ---- names


def test_rules_are_read_as_they_are_named():
    assert read("product", LENGTHS).settings == {} and read("product", LENGTHS).by is None
    named = read("product:threshold=0.2:least=3:by=margin", LENGTHS)
    assert named.settings == {"threshold": 0.2, "least": 3} and named.by == "margin"
    assert read("scan:in_order=true", LENGTHS).settings == {"in_order": True}
    for text, words in {
        "best": "expected fixed, product",
        "product:treshold=1": "treshold=1.* has threshold=float, least=int",
        "product:threshold=high": "threshold=high",
        "product:threshold": "no setting",
        "scan:costs=1": "no setting",
        "fixed": "needs length=",
        "libraspec:by=guess": "by=guess",
        "adaflash:by=head": "by=head",
    }.items():
        with pytest.raises(ValueError, match=words):
            read(text, LENGTHS)


def test_fixed_shapes_are_few():
    assert [bucket(d, 16, True) for d in range(16)] == [1, 2, 4, 4, 8, 8, 8, 8] + [16] * 8
    assert [bucket(d, 6, True) for d in range(6)] == [1, 2, 4, 4, 6, 6]
    assert [bucket(d, 6, False) for d in range(6)] == [1, 2, 3, 4, 5, 6]


# ---- one length for a batch


def test_the_scan_of_a_batch_is_the_batchs_own_optimum():
    generator, seen = torch.Generator().manual_seed(0), set()
    body = Backbone(model_of(), path())
    plan, pruning = Plan("sequential", B), Pruning("scan", [body], Costs(table()))
    for _ in range(40):
        sure = torch.rand(4, B - 1, generator=generator) ** 0.3
        live = torch.tensor([True, True, False, True])
        times = pruning.times(plan, 4, B - 1, 300, False, False)
        got = int(pruning(plan, torch.empty(4, B - 1, 1), Forecast(sure), live, times).drafts)
        tokens = [3 + float(sure[live].cumprod(1)[:, :d].sum()) for d in range(B)]
        ms = [pruning.costs.round(Plan("sequential", B, verify_length=d + 1), 4, 512) for d in range(B)]
        rates = [t / m for t, m in zip(tokens, ms, strict=True)]
        assert got == rates.index(max(rates))
        seen.add(got)
    assert len(seen) > 2
    assert pruning.times(plan, 4, B - 1, 400, False, False) is times  # where a graph found it


def test_a_batch_is_judged_by_its_means_and_one_request_by_itself():
    sure = torch.tensor([[0.9, 0.5, 0.1], [0.7, 0.1, 0.9], [0.0, 0.0, 0.0]])
    chain = together(sure, torch.tensor([True, True, False]))
    assert chain.shape == (1, 3)
    assert chain.cumprod(1)[0].tolist() == pytest.approx([0.8, (0.45 + 0.07) / 2, (0.045 + 0.063) / 2])
    assert torch.equal(together(sure[:1], torch.tensor([True])), sure[:1])
    assert together(sure, torch.zeros(3, dtype=torch.bool)).tolist() == [[0, 0, 0]]  # nobody: no nan


# ---- the text


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("plan", [Plan("sequential", B), Plan("overlap", B, groups=2), Plan("loop", B)], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_pruned_chains_give_plain_decodings_text(rule, plan, graphs, widths):
    session = session_of(rule, plan, graphs=Replayed() if graphs else False)
    requests = [Request(p, N) for p in RAGGED]
    run(session, requests[:2], requests[2:])
    assert [r.output for r in requests] == truth()
    pruned = {m for m, _ in widths if m < B}
    assert pruned or rule == "product:by=margin"  # it has not learnt enough to trust itself
    if graphs:
        assert session.graphs.replays > 3 and pruned <= {1, 2, 3, 4}  # fixed says 3 itself
    for r in requests:
        assert r.stats.tokens == len(r.output) - 1


@pytest.mark.parametrize("mode", ["sequential", "overlap", "loop"])
@pytest.mark.parametrize("rule", ["product:threshold=0.1", "libraspec:alpha=1:by=certainty", "adaflash:lookahead=-1"])
def test_a_seed_draws_the_same_text_whatever_is_pruned(rule, mode, widths):
    decoder = SelfSpecModel(model_of(), path())
    arguments = dict(max_new_tokens=N, do_sample=True, temperature=0.8, seed=[1, 2, 3])
    plain = decoder.generate(RAGGED, mode="ar", **arguments)
    widths.clear()
    assert torch.equal(decoder.generate(RAGGED, mode=mode, lengths=rule, **arguments), plain)
    assert min(m for m, _ in widths) < B


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("verify", ["rejection", "block", "multi"])
@pytest.mark.parametrize("rule", ["product:threshold=0.1", "scan"])
def test_drawn_chains_are_pruned_with_their_law(rule, verify, graphs, widths):
    session = session_of(rule, Plan("sequential", B), 2, Replayed() if graphs else False, verify)
    requests = [Request(p, N, sampling=Sampling(Pipeline(), True, i)) for i, p in enumerate(RAGGED[:2])]
    run(session, requests)
    assert all(len(r.output) == N and min(r.output) >= 0 for r in requests) and min(m for m, _ in widths) < B


# ---- what is asked


def test_the_length_of_a_round_is_the_heads(widths):
    """Confidences by hand: two drafts while the text is short, all of them later."""
    own = path()
    sure = torch.tensor([0.9, 0.9, 0.01, 0.9, 0.9])
    own.__dict__["confide"] = lambda: lambda hidden: sure[: hidden.shape[1]].expand(len(hidden), -1)
    session = session_of("product:threshold=0.5", Plan("sequential", B), body=Backbone(model_of(), own))
    run(session, requests := [Request(p, N) for p in RAGGED])
    assert [r.output for r in requests] == truth() and {m for m, _ in widths[:4]} == {3}
    sure[2] = 0.9
    widths.clear()
    run(session, [Request(PROMPT, N)])
    assert widths[0] == (B, 0)


@pytest.mark.parametrize("rule", [None, "product:threshold=0.001"])
@pytest.mark.parametrize("end", [0, 2, B - 1])
def test_groups_hang_where_the_confidence_head_expects_the_end(end, rule, monkeypatch):
    """In rounds whose draft was made for them, and in those whose draft an overlapped round has saved."""
    own, kept, keep = path(), [], overlap.keep
    sure = torch.where(torch.arange(B - 1) == end, 0.01, 0.99)
    own.__dict__["confide"] = lambda: lambda hidden: sure[: hidden.shape[1]].expand(len(hidden), -1)
    monkeypatch.setattr(overlap, "keep", lambda probs, budget: kept.append(keep(probs, budget)) or kept[-1])
    body = Backbone(model_of(), own)
    plan, pruning = Plan("overlap", B, groups=1), None if rule is None else Pruning(rule, [body])
    session = Session(body, Fixed(plan, pruning), 3, 64)
    run(session, requests := [Request(p, N) for p in RAGGED])
    assert [r.output for r in requests] == truth() and sum(r.stats.saved for r in requests)
    early = torch.cat(kept[:4])
    assert {end} <= set(early.flatten().tolist()) <= {end, 0}  # 0 where no draft was saved


def test_saved_drafts_keep_what_the_heads_said_of_them(monkeypatch):
    """The forecast of a saved draft is the heads' of the hidden states that it came from."""
    states, told = [], []
    saved, known = overlap.saved, Forecast.known

    def noted(*given):
        out = saved(*given)
        states.append((out[1], out[-1]))
        return out

    monkeypatch.setattr(overlap, "saved", noted)
    monkeypatch.setattr(
        Forecast, "known", lambda *given: told.append(tuple(map(torch.clone, known(*given)))) or known(*given)
    )
    own = path()
    session = session_of("adaflash", Plan("overlap", B, groups=2), 1, body=Backbone(model_of(), own))
    run(session, [Request(PROMPT, N)])
    assert len(told) > 3  # the last rounds had no room for drafts
    for (hit, hidden), (sure, lengths) in zip(states, told[1:]):  # nothing was saved before the first
        torch.testing.assert_close(sure, heads.confidence(own.heads, hidden))
        torch.testing.assert_close(lengths, heads.lengths(own.heads, hidden))
        assert hit.shape == (1,)
    assert Forecast(None, lengths).first(2).lengths.tolist() == [
        [*lengths[0, :2].tolist(), float(lengths[0, 2:].sum())]
    ]


def test_learning_sees_what_could_be_emitted():
    model = model_of()
    [answer] = reference(model, [PROMPT], N + 2 * B)
    own, request = OraclePath(model, {}, 2, B), Request(PROMPT, N)
    own.session = session = session_of("product:by=margin", Plan("sequential", B), body=Backbone(model, own))
    own.truth, told = {request: answer}, noted(session)
    run(session, [request])
    left, wanted = N - 1, []
    while left:
        wanted.append(([min(B - 1, left - 1)], [min(2, left - 1)]))
        left -= min(3, left)
    assert request.output == answer[:N] and told == wanted


def noted(session):
    """What a rule that learns is told of every round: drafts verified and accepted by request."""
    told, margins = [], session.rounds.pruning.learnt[0]
    learn = margins.observe
    margins.observe = lambda seen, v, a: (told.append((v.tolist(), a.tolist())), learn(seen, v, a))
    return told


@pytest.mark.parametrize("plan", [Plan("sequential", B), Plan("overlap", B, groups=1)], ids=str)
def test_learning_is_of_requests_that_run(plan):
    """Under graphs, with rows that idle along and rounds on their way when a text has ended."""
    session = session_of("product:by=margin", plan, 4, Replayed())
    told, requests = noted(session), [Request(p, n) for p, n in zip(RAGGED, (N, 5, 11))]
    run(session, requests)
    assert sum(map(sum, (a for _, a in told))) == sum(r.stats.tokens - r.stats.rounds for r in requests) > 0
    assert all(0 <= x <= y <= B - 1 for v, a in told for y, x in zip(v, a, strict=True))
    assert {len(v) for v, _ in told} >= {4} and all(v[3:] in ([], [0]) for v, _ in told)
    margins = session.rounds.pruning.learnt[0]
    assert int(margins.count[0]) == sum(x > 0 for v, _ in told for x in v)


def test_heads_of_a_seeded_path():
    own = path()
    hidden = torch.randn(2, 4, 32, dtype=torch.float64)
    sure, ends = (f(own.heads, hidden, seeded=True) for f in (heads.confidence, heads.lengths))
    assert torch.equal(sure[:, 0], torch.ones(2)) and torch.equal(
        sure[:, 1:], heads.confidence(own.heads, hidden)[:, 1:]
    )
    assert torch.equal(ends[:, 1:], heads.lengths(own.heads, hidden[:, 1:])) and not ends[:, 0].any()
    assert heads.lengths(own.heads, hidden[:, :1], seeded=True).tolist() == [[0, 1]] * 2


@pytest.mark.parametrize("rule", ["product:threshold=0.8", "adaflash:lookahead=-1"])
def test_a_seed_rows_draft_is_never_pruned(rule, widths):
    seeded = dict(seed_row=True, shift=True, causal=True, layouts=("known",), prefix_splits=False)
    session = session_of(rule, Plan("sequential", B), body=Backbone(model_of(), path(**seeded)))
    run(session, requests := [Request(p, N) for p in RAGGED])
    assert [r.output for r in requests] == truth()
    assert min(m for m, _ in widths[:-1]) == 2 < B  # the last round may have room for its bonus alone


# ---- where it is asked for


def test_generate_takes_a_rule_and_says_what_it_cannot_do(monkeypatch, widths):
    monkeypatch.setattr("selfspec.planners.table_of", lambda bodies, seconds=10.0, slots=None: table())
    decoder, bare = SelfSpecModel(model_of(), path()), SelfSpecModel(model_of(), path_of(model_of(), 0.2))
    for rule in RULES:
        out = decoder.generate(RAGGED, max_new_tokens=N, lengths=rule)
        assert out[:, len(PROMPT) :].tolist() == truth()
    assert decoder.policy(lengths="fixed:length=2").plans == [Plan("sequential", B, verify_length=3)]
    assert decoder.policy(lengths="scan").pruning is decoder.policy("overlap", lengths="scan").pruning
    assert bare.generate([PROMPT], max_new_tokens=4, lengths="product").shape[1] == len(PROMPT) + 4
    own = custom_generate(path(), lengths="product:threshold=0.1")
    widths.clear()
    ids = torch.tensor([PROMPT])
    out = model_of().generate(ids, attention_mask=ids > 0, max_new_tokens=N, do_sample=False, custom_generate=own)
    assert out[0, len(PROMPT) :].tolist() == truth()[0] and min(m for m, _ in widths) < B
    for model, arguments, words in (
        (decoder, dict(mode="auto", lengths="product"), "auto.*the planner chooses"),
        (decoder, dict(mode="tree", lengths="product"), "drafted chains"),
        (decoder, dict(mode="ar", lengths="product"), "drafted chains"),
        (decoder, dict(lengths="longest"), "expected fixed"),
        (bare, dict(lengths="adaflash"), "length head"),
        (bare, dict(lengths="product:by=head"), "by=certainty"),
    ):
        with pytest.raises(ValueError, match=words):
            model.generate([PROMPT], max_new_tokens=4, **arguments)


def test_rules_take_turns_in_an_arena():
    model = SelfSpecModel(model_of(), path())
    names = ["ar", "sequential", "sequential/b=4/lengths=product:threshold=0.1", "sequential/lengths=adaflash"]
    assert policy_of(model, names[2]).plans == [Plan("sequential", 4)]
    with pytest.raises(ValueError, match="drafted chains"):
        policy_of(model, "tree/lengths=product")
    arena = Arena(model, names, RAGGED, 2, 12)
    for name in names:
        assert arena.run(name, 2, 20, record=True).tokens >= 20
    assert {p for p, _ in arena.spent} == {Plan("ar", B), Plan("sequential", B)}
