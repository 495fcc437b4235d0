"""Tree rules at work: which nodes are verified, what rounds teach, and that the text stays the same."""

from functools import cache

import numpy as np
import pytest
import torch
from test_replay import Dice, Replayed
from tiny import LAYERS, PROMPT, RAGGED, OraclePath, model_of, path_of, reference, run

from selfspec import SelfSpecModel, decode
from selfspec.arena import Arena, policy_of
from selfspec.backbone import Backbone
from selfspec.draft.trees.bastion import Roofline
from selfspec.growth import BUCKETS, Growth, together
from selfspec.paced import Paced
from selfspec.plan import RULES, Plan
from selfspec.plan.cost import Costs
from selfspec.plan.latency import Latency
from selfspec.plan.policy import Fixed
from selfspec.plan.table import LatencyTable
from selfspec.rounds import Rounds
from selfspec.sampling import Pipeline, Sampling
from selfspec.session import Request, Session
from selfspec.verify.greedy import walk

B, N, NODES = 6, 18, 20
ENDS = ("caddtree", "bastion")
HEADS = {"marginals": {}, "sampler": dict(heads=("sampler",), head_rank=6)}


def costs(row=0.0):
    """A table by hand: ms of every row of every request beside the first millisecond, drafts and trees for nothing."""
    points = [("clean", n, r, 1.0 + row * n * r) for n in (1, 4) for r in (1, 4, 16, 64)]
    points += [("draft", n, 4, 1e-6) for n in (1, 4)]
    return Costs(LatencyTable(tuple(Latency(k, n, r, 0, 512, False, t, t, t) for k, n, r, t in points), LAYERS))


def body_of(**more):
    return Backbone(model_of(), path_of(model_of(), 0.3, **{"block_size": B, "prefix_splits": True, **more}))


def session_of(plan, slots=3, graphs=False, verify="coupled", body=None, row=0.05):
    body = body or body_of()
    growth = None if plan.rule == RULES[0] else Growth(plan.rule, [body], costs(row))
    return Session(body, Fixed(plan, growth=growth), slots, 64, verify, graphs=graphs)


@cache
def truth():
    return reference(model_of(), RAGGED, N)


@pytest.fixture
def trees(monkeypatch):
    """Every tree that is verified."""
    seen, whole, forward = [], Rounds.verify, decode.verify

    def noted(rounds, plan, frame, size, proposal, *more):
        seen.append(proposal.tree)
        return whole(rounds, plan, frame, size, proposal, *more)

    def verify(*given):
        hidden = forward(*given)
        assert hidden.clean.shape[1] == given[3].n_nodes == seen[-1].n_nodes
        return hidden

    monkeypatch.setattr(Rounds, "verify", noted)
    monkeypatch.setattr(decode, "verify", verify)
    return seen


# ---- the text


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["tree", "overlap+tree", "loop+tree"])
def test_trees_of_every_rule_give_plain_decodings_text(mode, rule, graphs, heads, trees):
    """A queue behind two slots; those of rules that end trees are smaller, by buckets where shapes are fixed."""
    plan = Plan(mode, B, NODES, 2 if "overlap" in mode else None, rule=rule)
    session = session_of(plan, 2, Replayed() if graphs else False, body=body_of(**HEADS[heads]))
    requests = [Request(p, N) for p in RAGGED]
    run(session, requests[:2], requests[2:])
    assert [r.output for r in requests] == truth()
    sizes = {t.n_nodes for t in trees if t.n_nodes > 1}
    assert sizes == {NODES + 1} if rule not in ENDS else min(sizes) < NODES
    if graphs:
        assert session.graphs.replays > 3 and sizes <= {*BUCKETS, NODES + 1}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_seed_draws_the_same_text_whatever_the_rule(rule, graphs, heads):
    texts, body = [], body_of(**HEADS[heads])
    for plan in (Plan("ar", 1), Plan("tree", B, NODES, rule=rule)):
        requests = [Request(p, N, sampling=Sampling(Pipeline(), True, i)) for i, p in enumerate(RAGGED)]
        run(session_of(plan, 3, Replayed() if graphs else False, body=body), requests)
        texts.append([r.output for r in requests])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_drawn_trees(rule, graphs, trees):
    """Their law is that of any shape by marginals (`test_drawn`); here they run, and are cut."""
    session = session_of(Plan("tree", B, NODES, rule=rule), 2, Replayed() if graphs else False, "multi", row=0.2)
    requests = [Request(p, N, sampling=Sampling(Pipeline(), True, i)) for i, p in enumerate(RAGGED[:2])]
    run(session, requests)
    assert all(len(r.output) == N and min(r.output) >= 0 for r in requests)
    assert all(t.probs is not None for t in trees if t.n_nodes > 1)
    assert (min(t.n_nodes for t in trees[:3]) < NODES) == (rule in ENDS)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("rule", RULES[1:])
def test_a_new_plan_every_round(rule, graphs):
    """Trees with and without the rule in turn, of drafts that were saved too; one request is taken out and back in."""
    body = body_of(heads=("sampler", "calibrator"), head_rank=6)
    plans = [Plan("ar", 1), Plan("lookup", 4), Plan("sequential", B), Plan("tree", B, 9), Plan("overlap", B, groups=2)]
    plans += [Plan("tree", B, m, rule=rule) for m in (5, 9, NODES)]
    plans += [Plan("overlap+tree", B, 9, g, rule=rule) for g in (2, None)]
    for seed in range(3):
        policy = Dice(plans, seed)
        policy.growth = Growth(rule, [body], costs(0.05))
        session = Session(body, policy, 3, 64, graphs=Replayed() if graphs else False)
        requests = [Request(p, N) for p in RAGGED]
        session.add(requests)
        for _ in range(3):
            session.step()
        session.release(requests[1])
        run(session, [], [requests[1]])
        assert [r.output for r in requests] == truth() and len(policy.used) > 2


# ---- ends


@pytest.mark.parametrize("rule", ENDS)
def test_trees_are_whole_where_rows_are_free_and_small_where_they_cost(rule, trees):
    sizes = []
    for row in (0.0, 0.02, 2.0):
        trees.clear()
        growth = Growth(rule, [body := body_of()], costs(row))
        growth.listen = lambda *_: None  # by the table alone
        session = Session(body, Fixed(Plan("tree", B, NODES, rule=rule), growth=growth), 3, 64)
        run(session, [Request(p, N) for p in RAGGED])
        sizes.append(max(t.n_nodes for t in trees))
        assert all(t.parents is None or t.tokens.shape == t.parents.shape == t.scores.shape for t in trees)
        assert all(t.ancestors.shape[1:] == 2 * (t.n_nodes,) for t in trees)
    whole = NODES + 1 if rule == "caddtree" else (NODES + 1) // 8 * 8  # whole buckets
    assert sizes[0] == whole > sizes[1] >= sizes[2] == (1 if rule == "caddtree" else 8)


def test_the_size_of_a_batch_is_the_batchs_own_optimum():
    generator, seen = torch.Generator().manual_seed(0), set()
    plan, growth = Plan("tree", B, NODES, rule="caddtree"), Growth("caddtree", [body_of()], costs(0.03))
    live = torch.tensor([True, True, False, True])
    times = growth.times(plan, 4, 300, False, False)
    assert times.tolist() == pytest.approx([1 + 0.03 * 4 * m for m in range(1, NODES + 2)], rel=1e-4)
    assert growth.times(plan, 4, 400, False, False) is times  # where a graph found it
    steps = growth.times(plan, 4, 300, False, True).tolist()
    assert sorted({*steps}) == pytest.approx([1 + 0.03 * 4 * m for m in (1, 8, 16, NODES + 1)], rel=1e-4)
    for scale in torch.linspace(0.05, 4, 30):
        tree = growth.end and torch.rand(4, NODES + 1, generator=generator).log() * scale
        tree[:, 0] = 0
        scores = tree.cumsum(1)
        gains = [float(scores[live].exp()[:, :m].sum()) / float(times[m - 1]) for m in range(1, NODES + 2)]
        got = int(growth.end(together(scores, live), times)[0])
        assert got == gains.index(max(gains)) + 1
        seen.add(got)
    assert len(seen) > 4
    assert together(scores, torch.zeros(4, dtype=torch.bool)).exp().tolist() == [[1.0] + [0.0] * NODES]
    assert together(scores[:1], live[:1]) is not None and torch.equal(together(scores[:1], live[:1]), scores[:1])


# ---- what rounds teach


def test_taps_trees_grow_wide_where_later_drafts_never_survive():
    """The first token is as likely as the drafter says, the others never come, though it is sure of them."""
    growth, plan = Growth("taps", [body_of()]), Plan("tree", B, 12, rule="taps")
    generator, first = torch.Generator().manual_seed(0), 0.7 ** torch.arange(24)
    sure = torch.full((B - 2, 24), 0.004)
    sure[:, 3] = 1 - 23 * 0.004
    logits, anchor, wide = torch.cat([first[None] / first.sum(), sure]).log()[None], torch.tensor([9]), []
    for _ in range(200):
        tree = growth.builder(plan)(anchor, logits, plan.tree_nodes)
        wide.append(int((tree.depths[0, 1:] == 1).sum()))
        targets = torch.full_like(tree.tokens, 23)
        targets[:, 0] = torch.multinomial(first, 1, generator=generator)
        growth.observe(0, tree, walk(tree, targets).rows, torch.tensor([True]))
    assert wide[-1] >= wide[0] + 5
    trials = growth.learnt[0].trials.view(B - 1, -1).sum(1)
    assert trials[0] > 0 and trials[1] > 0 and not trials[2:].any()  # nodes whose parent was accepted


def test_what_taps_is_told_of_a_drafter_of_known_quality():
    """Two guesses are right in every round, and the third is wrong."""
    model, n = model_of(), 31
    [answer] = reference(model, [PROMPT], n + 2 * B)
    own, request = OraclePath(model, {}, 2, B), Request(PROMPT, n)
    body = Backbone(model, own)
    growth = Growth("taps", [body])
    growth.learnt[0].decay = 1.0
    policy = Fixed(Plan("tree", B, 6, rule="taps"), growth=growth)
    own.session = session = Session(body, policy, 1, 64)
    own.truth = {request: answer}
    run(session, [request])
    assert request.output == answer[:n] and dict(request.stats.accepted) == {3: 10}
    assert growth.learnt[0].hits.view(B - 1, -1).sum(1).tolist() == [10, 10, 0, 0, 0]
    assert growth.learnt[0].trials.view(B - 1, -1).sum(1)[3:].tolist() == [0, 0]


@pytest.mark.parametrize("graphs", [False, True])
def test_taps_learns_of_requests_that_run(graphs, monkeypatch):
    """Under graphs, with rows that idle along and rounds on their way when a text has ended."""
    session = session_of(Plan("tree", B, NODES, rule="taps"), 4, Replayed() if graphs else False)
    rule, accepted = session.rounds.growth.learnt[0], []
    rule.decay = 1.0
    observe = rule.observe
    monkeypatch.setattr(
        rule, "observe", lambda tree, path, live: accepted.append(int(live.sum())) or observe(tree, path, live)
    )
    requests = [Request(p, n) for p, n in zip(RAGGED, (N, 5, 11))]
    run(session, requests)
    rounds = sum(r.stats.rounds for r in requests)
    assert rounds - len(requests) <= sum(accepted) <= rounds  # the last one may have room for its bonus alone
    assert rule.trials.sum() > rule.hits.sum() >= sum(r.stats.tokens - r.stats.rounds for r in requests) > 0


@pytest.mark.parametrize("graphs", [False, True])
def test_rounds_calibrate_bastions_roofline(graphs, monkeypatch, trees):
    """A table from a machine whose rows were nearly free; here each costs as much as a round, and trees end sooner."""

    hear = Growth.timed

    def timed(growth, plan, n, rows, context, drafted, laps):
        assert laps["draft"] > 0 and laps["verify"] > 0
        hear(growth, plan, n, rows, context, drafted, {"draft": 0.002, "verify": 0.001 * (1 + rows), "rest": 0.001})

    monkeypatch.setattr(Growth, "timed", timed)
    plan = Plan("tree", B, 40, rule="bastion")
    session = session_of(plan, 1, Replayed() if graphs else False, row=0.02)
    growth = session.rounds.growth
    for _ in range(4):
        run(session, [request := Request(PROMPT, 40)])
        assert request.output == reference(model_of(), [PROMPT], 40)[0]
    paced, sizes = growth.paced[plan], [t.n_nodes for t in trees if t.n_nodes > 1]
    assert {n for _, _, n in paced.roofline.seen} == {1} and {r for r, _, _ in paced.roofline.seen} <= {*sizes}
    assert paced.rest[1, False] == pytest.approx(3.0) and paced.rounds > 8
    [times] = growth._times.values()
    assert torch.allclose(times, torch.tensor(paced.times(1, 256, False, 41)).float())
    assert 2 < float(times[15] - times[7]) < 11  # where the table had 0.16
    assert max(sizes[:4]) == 16 and {*sizes[-40:]} == {8}


# ---- where it is asked for


@pytest.fixture
def decoder(monkeypatch):
    monkeypatch.setattr("selfspec.planners.table_of", lambda bodies, seconds=10.0, slots=None: costs(0.05).table)
    return SelfSpecModel(model_of(), path_of(model_of(), 0.3, block_size=B))


@pytest.mark.parametrize("rule", RULES)
def test_generate_takes_a_rule_by_name(rule, decoder, trees):
    out = decoder.generate(RAGGED, max_new_tokens=N, mode=f"tree/nodes=15/rule={rule}")
    assert out[:, len(PROMPT) :].tolist() == truth() and decoder.stats.rounds
    assert (min(t.n_nodes for t in trees[:3]) < 16) == (rule in ENDS)
    kept = decoder.policy(f"tree/nodes=15/rule={rule}").growth
    assert kept is decoder.policy(f"tree/nodes=31/rule={rule}").growth and (kept is None) == (rule == RULES[0])
    requests = [Request(p, N) for p in RAGGED]
    for _ in decoder.run(requests, decoder.plan(f"tree/nodes=7/rule={rule}")):
        pass
    assert [r.output for r in requests] == truth()


def test_what_a_rule_cannot_do_is_refused_before_any_work(decoder):
    body = body_of()
    for rule in ENDS:
        with pytest.raises(ValueError, match=f"{rule}.*no latency table"):
            Growth(rule, [body])
    with pytest.raises(ValueError, match="expected ddtree"):
        Growth("oak", [body])
    for policy in (
        Plan("tree", B, rule="taps"),
        Fixed(Plan("tree", B, rule="taps"), growth=Growth("opt-tree", [body])),
    ):
        with pytest.raises(ValueError, match=r"rule='taps'.*SelfSpecModel.policy"):
            Session(body, policy, 1, 32)
    arguments = dict(max_new_tokens=4, do_sample=True)
    for verify in ("rejection", "block"):
        with pytest.raises(ValueError, match="for chains"):
            decoder.generate([PROMPT], mode="tree/rule=caddtree", verify=verify, **arguments)
    with pytest.raises(ValueError, match="drafted chains"):
        decoder.generate([PROMPT], mode="tree/rule=taps", lengths="product", max_new_tokens=4)


def test_rules_take_turns_in_an_arena(decoder):
    names = ["ar", "tree/nodes=15", *(f"tree/nodes=15/rule={r}" for r in RULES[1:])]
    assert policy_of(decoder, names[2]).growth is policy_of(decoder, names[2], 2).growth
    arena = Arena(decoder, names, RAGGED, 2, 12)
    for name in names:
        assert arena.run(name, 2, 20, record=True).tokens >= 20
    assert {p for p, _ in arena.spent} == {Plan("ar", B), Plan("tree", B, 15)}


def test_one_request_without_a_draft_verifies_the_anchor_alone():
    """A miss was given the whole tree's rows, all of them padding."""
    scores = torch.tensor([[0.0, -0.1, -0.2]])
    assert together(scores, torch.tensor([True])).equal(scores)
    assert together(scores, torch.tensor([False])).exp().tolist() == [[1, 0, 0]]


def test_a_shapes_first_round_sets_up_and_says_nothing_of_its_pace():
    paced = Paced(Roofline(1e9, 1e3, 1e9, 1e9, 1e9))
    paced.begin(1, 0, False, np.full(8, 1.0), 0.1)
    before = paced.times(1, 0, False, 8)
    assert not paced.observe(1, 8, 0, False, 8000.0, 4000.0)
    assert np.array_equal(paced.times(1, 0, False, 8), before)
    assert paced.observe(1, 8, 0, False, 2.0, 0.1) and paced.times(1, 0, False, 8)[-1] < 10
