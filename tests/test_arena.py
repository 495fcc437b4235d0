"""Contests between plans, what they record, and what is foretold from it."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from selfspec import SelfSpecModel
from selfspec.arena import AUTO, Arena, Run, contest, verdict
from selfspec.explain import Watched
from selfspec.joining import Door
from selfspec.plan import Plan
from selfspec.plan.estimate import Family
from selfspec.plan.latency import Latency
from selfspec.plan.policy import Fixed
from selfspec.plan.record import PLAIN, Priced, Record, foretold, length, order, replayed
from selfspec.plan.simulate import Recorder, Trace
from selfspec.plan.table import LatencyTable
from selfspec.plan.views import Assignment, View
from selfspec.session import Request, Session

NAMES = ("ar", "sequential/b=4", "tree/nodes=6", "overlap/b=2", AUTO)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    hf = tiny.shallow()
    return SelfSpecModel(hf, [tiny.path_of(hf, 0.2), tiny.path_of(hf, 0.2, entry=1)])


def table(plain=1.0, row=0.1):
    points = [("clean", n, r, plain + row * n * r) for n in (1, 4) for r in (1, 4, 16)]
    points += [("draft", n, 4, 0.5) for n in (1, 4)]
    return LatencyTable(tuple(Latency(k, n, r, 0, 512, False, ms, ms, ms) for k, n, r, ms in points), 4)


def test_names_are_plans(model):
    assert model.plan("tree/nodes=32/b=4") == Plan("tree", 4, 32)
    assert model.plan("overlap/b=2/groups=1@1") == Plan("overlap", 2, groups=1, adapter=1)
    assert model.plan("ar").nodes == 1
    for name in ("tree/nodes", "tree/leaves=3", "sequential/b=x", "sequential@7", "sequential/b=64", "loop"):
        with pytest.raises(ValueError):
            model.plan(name)


def test_entrants_decode_the_same_texts_and_leave_a_record(model):
    arena = Arena(model, NAMES, tiny.RAGGED, 2, 12)
    runs = list(contest(arena, NAMES, 2, 30, 2, 1))
    assert [r.name for r in runs] == [*NAMES, *NAMES[1:], NAMES[0]]
    for run in runs:
        assert run.tokens >= 30 and run.seconds > run.prefill > 0 and run.each > 0 and run.rounds and not run.cold
    assert not arena.session.active
    assert [r.start for r in runs] == [0] * len(NAMES) + [6 % len(arena.prompts)] * len(NAMES)
    traces = arena.recorder.traces(lambda r: tuple(r.prompt))
    assert 0 < len(traces) <= 3  # one a text, not one a run
    assert all({f.source for f in t.accepted} >= {"known", "hidden"} for t in traces)
    rounds = [(p, n, 20.0, 1.0) for p, n in arena.spent]
    assert {p for p, *_ in rounds} == {f.plans[0] for n, f in arena.policies.items() if n != AUTO}
    record = Record(table(), (0, 2), traces, rounds)
    again = Record.of(json.loads(json.dumps(record.data())))
    assert again.rounds == record.rounds and again.table.points == record.table.points
    for a, b in zip(again.traces, traces, strict=True):
        assert (a.prompt, a.tokens) == (b.prompt, b.tokens)
        assert {f: r.tolist() for f, r in a.accepted.items()} == {f: r.tolist() for f, r in b.accepted.items()}
    assert foretold(Fixed(Plan("sequential", 4)), Priced(again.table, (0, 2), rounds), again.traces, 2).tokens > 0


def test_without_calibrator_nobody_finds_one(model):
    arena = Arena(model, ["ar", "overlap/b=2"], tiny.RAGGED, 1, 8, calibrated=False)
    found = []
    session = arena.session
    step = session.step
    session.step = lambda: (found.append(model.bodies[0].path.calibrate), step())[1]
    arena.run("overlap/b=2", 1, 8)
    assert found and set(found) == {None} and model.bodies[0].path.calibrate is not None


def test_the_best_is_chosen_on_one_half_and_compared_on_the_other():
    def run(name, tokens):
        return Run(name, 1, tokens, 1.0)

    even, odd = {"ar": 10, "a": 30, "b": 20, AUTO: 29}, {"ar": 10, "a": 20, "b": 40, AUTO: 22}
    runs = [run(n, t) for half in (even, odd, even, odd) for n, t in half.items()]
    found = verdict(runs)
    assert found["best"] == "a" and found["auto_over_best"] == pytest.approx(1.1)
    assert found["auto_over_ar"] == pytest.approx(2.2) and found["over_ar"]["b"] == pytest.approx(4.0)
    assert verdict([*runs, run("ar", 1)])["rates"] == {"ar": 10}  # one that has had more turns is not compared


def test_rounds_cost_what_they_took_beside_their_forwards():
    chain, tree = Plan("sequential", 4), Plan("tree", 4, 3)
    plain = Priced(table(), (0,), [])
    assert plain.round(chain, 1, 512) == pytest.approx(1.4 + 0.5) and plain.extra(chain, 1) == 0
    costs = Priced(table(), (0,), [(chain, 1, 512, 1.9 + 0.2), (chain, 4, 512, 2.6 + 0.5 + 0.8), (PLAIN, 1, 512, 1.1)])
    assert costs.extra(chain, 1) == pytest.approx(0.2) and costs.extra(chain, 2) == pytest.approx(0.4)
    assert costs.extra(tree, 1) == pytest.approx(0.2)  # as other plans that draft
    assert costs.extra(PLAIN, 4) == pytest.approx(0.0)


def test_a_foretold_speed_up_by_hand():
    chain = Plan("sequential", 4)
    trace = Trace(5, 40, {Family("known"): np.full(40, 3)})
    record = Record(table(), (0,), [trace], [(chain, 1, 512, 2 * 1.9), (PLAIN, 1, 512, 1.1)], [(0, 41)])
    for rounds, ms in (([], 1.9), (record.rounds, 3.8)):
        costs = Priced(record.table, (0,), rounds)
        rates = [replayed(record, costs, p, 1, 0, 80, Door()).rate for p in (chain, PLAIN)]
        assert rates[0] / rates[1] == pytest.approx(4 / ms * 1.1)
    with pytest.raises(ValueError, match="record it"):
        foretold(Fixed(replace(chain, mode="tree")), Priced(record.table, (0,), []), record.traces, 1)


def test_a_session_says_that_it_runs_one_shape_at_a_time(model):
    """A planner that splits a batch failed with "too many values to unpack"."""

    class Split(Fixed):
        def round(self, active):
            return [Assignment((v,), self.plans[0]) for v in active]

    session = Session(model.bodies, Split(PLAIN), 2, 40)
    session.add([Request(p, 8) for p in tiny.RAGGED[:2]])
    with pytest.raises(ValueError, match="split=False"):
        for _ in range(6):
            session.step()


def test_plain_rounds_are_no_refused_drafts(model):
    """They were booked as chains of the first adapter of which nothing was accepted, at every position."""
    recorder, chain = Recorder(), Plan("sequential", 16)
    for plan, rounds in ((chain, [(0, 4), (4, 3)]), (PLAIN, [(i, 1) for i in range(7)])):
        for before, emitted in rounds:
            recorder.note(Assignment((View("a", 9 + before),), plan), [before], [emitted])
    (trace,) = recorder.traces()
    assert trace.tokens == 7 and trace.runs(Family("known")).tolist() == [3, 3, 3, 3, 2, 2, 2]


def test_slots_are_staggered_and_caps_are_mixed(model):
    """With one cap for all, plain decoding's runs ended just before its answers did: others paid for joining alone."""
    arena = Arena(model, ["ar"], tiny.RAGGED * 4, 4, (8, 24))
    caps = [cap for _, cap in arena.prompts]
    assert 8 <= min(caps) < max(caps) <= 24
    arena.eos = frozenset()
    run = arena.run("ar", 4, 80)
    assert run.joined >= 3 and run.rounds * 4 >= 60
    assert [length(20, share) for share in (0.25, 0.5, 1.0)] == [5, 10, 20]
    assert [p for p, _ in zip(order(5, 3, 4), range(4), strict=False)] == [(4, 1 / 3), (0, 2 / 3), (1, 1.0), (2, 1.0)]


def test_rounds_that_somebody_left_are_observed(model):
    """Started before the host had read the last, they were dropped: four of five in batches of 128."""
    session, seen = Session(model.bodies, Watched(Fixed(Plan("sequential", 4))), 2, 60), []
    session.policy.observe = lambda assignment, emitted, *rest, **more: seen.append((list(emitted), rest))
    requests = [Request(p, 12) for p in tiny.RAGGED[:2]]
    session.add(requests)
    session.step()
    session._start()
    session._leave(requests[0])
    session._land()
    emitted, (_, ended, _) = seen[-1]
    assert len(emitted) == 2 and emitted[0] == 0 and ended[0] and emitted[1] > 0


@pytest.mark.parametrize("slots", [1, 2])
def test_a_run_is_foretold_from_the_texts_that_it_decoded(model, slots):
    """All recorded texts stood for those of a run, which were harder or easier, and none ended early."""
    names = NAMES[:3]
    arena = Arena(model, names, [*tiny.RAGGED, *([i, 2, i] for i in range(1, 10))], slots, (6, 24))
    runs = list(contest(arena, names, slots, 60, 3, 1))
    arena.spent[PLAIN, 1] = [1.0] * 3
    record = Record.of(json.loads(json.dumps(replace(arena.recorded(), table=table()).data())))
    assert len(record.queue) == len(arena.prompts) and sum(i >= 0 for i, _ in record.queue) > 6
    assert len({r.start for r in runs}) > 1
    costs, found = Priced(record.table, record.entries, []), set()
    for r in runs:
        plan = arena.policies[r.name].plans[0]
        out = replayed(record, costs, plan, slots, r.start, r.tokens - r.joined, Door())
        real = r.rounds * slots
        # requests' rounds: at one slot those that ran; at two, less than two rounds are idle for everyone that left
        assert out.rounds == real if slots == 1 else real - 3 * len(out.latency) - 1 <= out.rounds <= real
        found.add(out.rounds)
    assert len(found) > 3


def test_a_text_that_nobody_recorded_is_passed_over():
    chain, plain = Plan("sequential", 4), {Family("ar"): np.zeros(9, int)}
    known = Trace(5, 9, plain | {Family("known"): np.full(9, 3)})
    record = Record(table(), (0,), [Trace(7, 9, plain), known], [], [(0, 10), (-1, 10), (1, 6)])
    assert {t.prompt for t in record.texts([chain], 1, 0, 20)} == {5}
    assert [t.tokens for t in record.texts([PLAIN], 3, 1, 20)][:4] == [3, 9, 5, 9]  # the first is a third of its cap
    with pytest.raises(ValueError, match="no text"):
        record.texts([Plan("tree", 4, 3)], 1, 0, 20)


def test_a_request_that_ended_early_does_not_shorten_what_its_text_accepts():
    """Its last round was booked in place of the whole one, at the same place of the same text."""
    recorder, chain = Recorder(), Plan("sequential", 16)
    for key, rounds in (("whole", [(0, 4), (4, 4)]), ("early", [(0, 4), (4, 1)])):
        for before, emitted in rounds:
            recorder.note(Assignment((View(key, 9 + before),), chain), [before], [emitted])
    (trace,) = recorder.traces(lambda key: "text")
    assert trace.runs(Family("known")).tolist() == [3] * 8 and trace.text == "text"


def test_of_texts_that_differ_the_best_is_not_made_up():
    """In bfloat16 a text goes on differently from run to run: the best of them at every place accepted a fifth more."""
    recorder, chain = Recorder(), Plan("sequential", 16)
    for key, rounds in (("one", [(0, 1), (1, 6), (7, 2)]), ("other", [(0, 5), (5, 2), (7, 2)])):
        for before, emitted in rounds:
            recorder.note(Assignment((View(key, 9 + before),), chain), [before], [emitted])
    (trace,) = recorder.traces(lambda key: "text")
    assert trace.at(Family("known"), 0) == 0 and trace.at(Family("known"), 1) == 5


def test_a_cut_chain_does_not_shorten_what_its_family_accepts():
    """What a chain of four took stood for the whole block's, which shares its family: 2.7 tokens a round, and not 3."""
    recorder = Recorder()
    for key, cut, rounds in (("cut", 4, [(0, 4), (4, 4), (8, 1)]), ("whole", None, [(0, 7), (7, 2)])):
        for before, emitted in rounds:
            plan = Plan("sequential", 16, verify_length=cut)
            recorder.note(Assignment((View(key, 9 + before),), plan), [before], [emitted])
    (trace,) = recorder.traces(lambda key: "text")
    assert [trace.at(Family("known"), p) for p in (0, 4, 7)] == [6, 3, 1]


def test_first_tokens_that_the_host_reads_late_are_not_of_the_clock(model):
    """With graphs a prefill is read a step later: its tokens and seconds counted, though it ran before the clock."""
    arena, late = Arena(model, ["ar"], tiny.RAGGED * 2, 2, 12), []
    step = arena.session.step

    def delayed():
        late.append(step())
        return late[-2] if len(late) > 1 else []

    arena.session.step = delayed
    run = arena.run("ar", 2, 40)
    assert run.prefill < sum(r.stats.seconds["prefill"] for r in {r for out in late[:-1] for r, _ in out})
    told = sum(len(new) for out in late[:-1] for _, new in out)
    assert run.tokens == told - 2 and run.joined == len({r for out in late[:-1] for r, _ in out}) - 2


def test_rounds_of_graphs_are_told_by_the_size_of_their_forwards():
    chain = Plan("sequential", 4)
    graphs = LatencyTable(tuple(replace(p, graph=True) for p in table().points), 4)
    costs = Priced(graphs, (0,), [(chain, 3, 512, 9.0), (chain, 4, 512, 9.0)])
    assert costs.extra(chain, 3) == costs.extra(chain, 4) == pytest.approx(9.0 - 2.6 - 0.5)


def test_the_benchmark_sets_what_is_foretold_against_what_was_measured():
    file = Path(__file__).parents[1] / "benchmarks" / "foretell.py"
    spec = importlib.util.spec_from_file_location("foretell", file)
    foretell = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(foretell)
    chain = Plan("sequential", 4)
    traces = [Trace(5, 40, {Family("known"): np.full(40, k), Family("ar"): np.zeros(40, int)}) for k in (3, 1)]
    rounds = [(p, n, 512, ms) for n in (1, 2) for p, ms in ((chain, 2.0), (PLAIN, 1.0))]
    record = Record(table(), (0,), traces, rounds, [(0, 41), (1, 41)])
    runs = [
        {"name": name, "plans": {str(p): 9}, "slots": 1, "start": start, "tokens": 41, "joined": 1, "decode_rate": rate}
        for start in (0, 1)
        for name, p, rate in (("ar", PLAIN, 1.0), ("sequential", chain, 2.0 - start), (AUTO, chain, 50.0))
    ]
    report = {"points": [{"runs": runs}], "record": record.data()}
    (row,) = foretell.compared(report)
    assert row["measured"] == 1.5  # what auto did is no run of that plan, even where it ran nothing else
    assert row["rounds"] == pytest.approx((4 + 2) / 2 / 2) and row["used"] and row["error"] == pytest.approx(0.0)
    del runs[0]["start"]
    with pytest.raises(SystemExit, match="measure again"):
        foretell.compared(report)
