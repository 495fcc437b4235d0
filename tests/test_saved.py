"""Saved drafts belong to their requests: who joins has none, who missed gets one, the others keep theirs."""

import pytest
import torch
from decoding import oracle
from test_planner import costs
from test_replay import Replayed
from tiny import PROMPT, RAGGED, model_of, path_of, reference, run

from selfspec.backbone import Backbone
from selfspec.plan import Plan
from selfspec.saved import Saved
from selfspec.session import Request, Session
from selfspec.stats import Stats, rates, total

B, N = 5, 24


def watched(plan, slots=2, graphs=False, **path):
    """A session, and what its rounds draft from: [rows, T, V] logits of each."""
    model = model_of()
    session = Session(Backbone(model, path_of(model, 0.3, **path)), plan, slots, 64, graphs=graphs)
    seen, tree = [], session.chooser.tree

    def noted(requests, anchor, start, logits, *rest):
        seen.append(logits.clone())
        return tree(requests, anchor, start, logits, *rest)

    session.chooser.tree = noted
    return session, seen


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("mode", ["overlap", "overlap+tree"])
def test_who_joins_leaves_the_others_their_drafts(mode, graphs):
    """The first round of a request made every other one's draft anew."""
    session, seen = watched(Plan(mode, B, 8), graphs=Replayed(replay=False) if graphs else False)
    requests = [Request(p, N) for p in RAGGED[:2]]
    session.add(requests[:1])
    for _ in range(3):
        session.step()
    session.add(requests[1:])
    while session.joining:
        session.step()
    assert session.slots.ready.tolist() == [True, False]
    kept, before = session.slots.saved.clone(), len(seen)
    session.step()
    first = seen[before]
    assert torch.equal(first[0], kept[0]) and not torch.equal(first[1], kept[1])
    run(session, [])
    assert [r.output for r in requests] == reference(model_of(), RAGGED[:2], N)


@pytest.mark.parametrize("heads", [(), ("calibrator", "confidence", "length"), ("markov", "calibrator")])
def test_after_a_miss_a_draft_is_made_and_the_others_keep_theirs(heads):
    """A miss verified the anchor alone."""
    session, seen = watched(Plan("overlap", B, groups=1), 3, heads=heads)
    requests = [Request(p, N) for p in RAGGED]
    session.add(requests)
    session.step()
    mixed = 0
    while session.active:
        ready, kept, before = session.slots.ready.clone(), session.slots.saved.clone(), len(seen)
        rows = [r.slot for r in session.active]
        drafts = [session._shares._drafts]
        session.step()
        if len(seen) == before or rows != [0, 1, 2]:
            continue
        there = ready[:3].tolist()
        for i, one in enumerate(seen[-1]):
            assert torch.equal(one, kept[i, : len(one)]) == there[i]
        assert (session._shares._drafts > drafts[0]) == (not all(there))
        mixed += any(there) and not all(there)
    assert mixed and [r.output for r in requests] == reference(model_of(), RAGGED, N)


def test_a_slot_tells_nothing_of_whoever_held_it_before():
    """A request that came into the place of one with a draft would have verified that one's."""
    session, _ = watched(Plan("overlap", B), 1)
    session.add([Request(PROMPT, 20)])
    for _ in range(3):
        session.step()
    assert session.slots.ready[0]
    session.cancel(session.active[0])
    session.add([second := Request(RAGGED[1], N)])
    session.step()
    assert not session.slots.ready[0] and id(second) not in session._saved.whose
    run(session, [])
    assert second.output == reference(model_of(), RAGGED[1:2], N)[0]


def test_what_the_host_knows():
    a, b, saved = Request([1], 1), Request([2], 1), Saved()
    saved.whose = {id(a)}
    assert not saved.lacking([a], [], False) and saved.lacking([a, b], [], False)
    assert not saved.lacking([a, b], [], True) and saved.lacking([a, b], [b], True)
    saved.joined([a])
    assert saved.lacking([a], [], False)


def test_rates_after_misses():
    """A round begins with a draft where the one before it left one."""
    session, _ = watched(Plan("overlap", B, groups=1), 3)
    requests = [Request(p, N) for p in RAGGED]
    session.add(requests)
    ready, left, began = dict.fromkeys(requests, False), 0, 0
    while session.active:
        hung = {r: r.stats.hung for r in requests}
        session.step()
        for r in requests:
            if r.stats.hung > hung[r]:
                began += ready[r] and len(r.output) < N
                ready[r] = r.slot is not None and bool(session.slots.ready[r.slot])
                left += ready[r]
    whole = total([r.stats for r in requests])
    assert 0 < began < left < whole.hung == whole.rounds
    assert began <= whole.reused <= left <= whole.saved <= left + len(requests)


def test_rates_by_hand():
    for r in oracle(2, 1 + 4 * 3, mode="overlap")[0]:  # four rounds; every end has a group
        assert (r.stats.hung, r.stats.saved, r.stats.reused) == (4, 4, 3)
        assert r.stats.overlap == {"hit": 1, "reuse": 0.75, "saved": 0.75}
        assert rates((r.stats + r.stats).overlap) == ", hit 1.00, reuse 0.75, saved 0.75"
    assert Stats().overlap == {} and rates({}) == ""


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("mode", ["overlap+loop", "overlap+loop+tree"])
def test_loops_go_on_from_saved_drafts(mode, graphs, passes):
    """No pass followed a saved draft: after the first round nothing was looped."""
    plan = Plan(mode, B, 8, passes=passes, prefix="fixed:s=2")
    path = dict(prefix_splits=True, entry=2)
    session, seen = watched(plan, 1, Replayed(replay=False) if graphs else False, **path)
    session.add([request := Request(PROMPT, N)])
    looped = []
    while session.active:
        kept, before = session.slots.saved[0].clone(), len(seen)
        session.step()
        if before and len(seen) == before + 1 and len(seen[-1][0]) == B - 1:
            looped.append((kept, seen[-1][0]))
    for kept, used in looped:
        assert torch.equal(used[:2], kept[:2]) and not torch.equal(used[2:], kept[2:])
    assert len(looped) > 1 and request.output == reference(model_of(), [PROMPT], N)[0]
    rounds = request.stats.hung - (0 if graphs else 1)  # the last one has room for no draft
    assert request.stats.drafts == pytest.approx(0.5 * (passes + (passes - 1) * (rounds - 1)), abs=0.5 * passes)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("groups", [None, 1, "branches"])
@pytest.mark.parametrize("heads", [(), ("calibrator", "confidence", "length"), ("markov",)])
def test_looped_overlaps_are_exact(family, graphs, groups, heads):
    model = model_of(family)
    body = Backbone(model, path_of(model, 0.3, prefix_splits=True, heads=heads))
    plan = Plan("overlap+loop", B, groups=groups)
    session = Session(body, plan, 2, 64, graphs=Replayed() if graphs else False)
    requests = [Request(p, 15) for p in RAGGED]
    run(session, requests[:2], requests[2:])
    assert [r.output for r in requests] == reference(model, RAGGED, 15)
    assert sum(r.stats.saved for r in requests)


def test_a_looped_overlap_costs_its_later_passes_every_round():
    table = costs(0.1, entry=15)
    looped, plain = Plan("overlap+loop", 4, passes=3), Plan("overlap", 4)
    drafts = table.parts(plain, 1, 512)[1][1]
    assert table.round(looped, 1, 512, 0) == pytest.approx(table.round(plain, 1, 512, 0) + 2 * drafts)
    assert table.round(looped, 1, 512) == pytest.approx(table.round(plain, 1, 512) + 2 * drafts)
