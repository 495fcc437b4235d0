"""Requests share a session: they join, wait, leave and come back, and each answers as it does alone."""

import random
from unittest import mock

import pytest
import torch
from decoding import MODES, B, N, outputs
from tiny import PROMPT, RAGGED, SLIGHT, VOCAB, OraclePath, model_of, path_of, reference, run
from transformers.generation import LogitsProcessorList, StoppingCriteriaList, logits_process

from selfspec import SelfSpecModel, kernels
from selfspec.backbone import Backbone
from selfspec.graphs import Graphs
from selfspec.plan import Plan
from selfspec.sampling import Pipeline, Sampling
from selfspec.session import Request, Session


class Replayed(Graphs):
    """CUDA graphs as far as a session can tell: enabled, keyed, inputs copied to where they were at the first call."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.enabled, self.keys, self.inputs = True, [], {}

    def __call__(self, key, fn, *inputs):
        self.keys.append(key)
        static = self.inputs.setdefault(key, [i.clone() for i in inputs])
        for old, new in zip(static, inputs, strict=True):
            old.copy_(new)  # raises where a key stands for two shapes
        return fn(*static)


def session_of(mode="sequential", slots=3, capacity=64, model=None, graphs=True, **kwargs):
    model = model or model_of()
    graphs = Replayed() if graphs else False
    return Session(Backbone(model, path_of(model, 0.2)), Plan(mode, B, 8), slots, capacity, graphs=graphs, **kwargs)


@pytest.mark.parametrize("mode", [*MODES, "lookup"])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_rounds_that_are_started_before_the_last_is_read(mode, slots):
    """Padded to buckets, one round ahead of the host, with requests that join in the middle."""
    model = model_of()
    prompts = [PROMPT, [5, 8, 2, 5, 8], [13], [1] * 9, [2, 4, 6, 8], [21, 22], [7] * 3]
    caps = [3, 11, 1, 7, 19, 6, 12]
    truth = reference(model, prompts, max(caps))
    session = session_of(mode, slots, model=model)
    requests = [Request(p, c) for p, c in zip(prompts, caps, strict=True)]
    run(session, requests[:1], requests[1:])
    assert outputs(requests) == [t[:c] for t, c in zip(truth, caps, strict=True)]
    assert not session.active and session.free == slots
    for r in requests:
        assert r.stats.tokens == len(r.output) - 1 == sum(k * v for k, v in r.stats.accepted.items())


@pytest.mark.parametrize("graphs", [False, True])
def test_eos_in_a_round_whose_successor_has_started(graphs):
    model = model_of()
    prompts = [PROMPT, RAGGED[1], [9, 3, 3]]
    truth = reference(model, prompts, 20)
    ends = [next(i for i in range(k, 20) if t[i] not in t[:i]) for k, t in zip((2, 4, 6), truth, strict=True)]
    session = session_of(slots=2, model=model, graphs=graphs)
    requests = [Request(p, 20, frozenset([t[e]])) for p, t, e in zip(prompts, truth, ends, strict=True)]
    run(session, requests[:2], requests[2:])
    assert outputs(requests) == [t[: e + 1] for t, e in zip(truth, ends, strict=True)]
    assert all(r.finish_reason == "stop" for r in requests)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("mode", ["ar", "sequential", "overlap+tree"])
def test_released_requests_go_on_where_they_stood(mode, graphs):
    """Taken out after every step, one after another, and added again; not a token is lost or repeated."""
    model = model_of("Gemma3")
    truth = reference(model, RAGGED, 30)
    session = session_of(mode, model=model, graphs=graphs)
    requests = [Request(p, 30) for p in RAGGED]
    session.add(requests)
    turn, got = 0, {id(r): [] for r in requests}
    while session.active:
        for r, tokens in session.step():
            got[id(r)] += tokens
        victim = requests[turn % 3]
        turn += 1
        if victim.slot is not None and victim not in session.joining:
            session.release(victim)
            if victim.finish_reason is None:
                session.add([victim])
    for r, tokens in session.step() if session._landed else []:
        got[id(r)] += tokens
    assert outputs(requests) == truth
    assert turn > 8


def test_what_lands_while_a_request_is_released_is_not_lost():
    model = model_of()
    truth = reference(model, RAGGED, 20)
    session = session_of(model=model)
    requests = [Request(p, 20) for p in RAGGED]
    session.add(requests)
    got = {id(r): [] for r in requests}
    for _ in range(3):
        for r, tokens in session.step():
            got[id(r)] += tokens
    session.release(requests[0])  # a round is on its way
    while session.active:
        for r, tokens in session.step():
            got[id(r)] += tokens
    for r, t in zip(requests, truth, strict=True):
        assert got[id(r)] == r.output == t[: len(r.output)]
    assert len(requests[1].output) == 20 and 3 < len(requests[0].output) < 20 and requests[0].finish_reason is None


@pytest.mark.parametrize("graphs", [False, True])
def test_cancelled_requests_leave_and_the_others_do_not_notice(graphs):
    model, rng = model_of(), random.Random(0)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 12))] for _ in range(14)]
    truth = reference(model, prompts, 16)
    session = session_of("tree", 4, model=model, graphs=graphs)
    requests, waiting = [Request(p, 16) for p in prompts], []
    waiting = list(requests)
    cancelled = set()
    while waiting or session.active:
        if waiting and session.free:
            session.add([waiting.pop(0)])
        session.step()
        if rng.random() < 0.25 and session.active:
            victim = rng.choice(session.active)
            session.cancel(victim)
            cancelled.add(requests.index(victim))
            assert victim.finish_reason is not None and victim.slot is None
    assert 2 < len(cancelled) < 14
    for i, (r, t) in enumerate(zip(requests, truth, strict=True)):
        assert r.output == (t[: len(r.output)] if i in cancelled else t)
    with pytest.raises(ValueError, match="no slot"):
        session.cancel(requests[0])


def test_a_request_that_ended_or_runs_is_not_added_again():
    session = session_of()
    session.add([r := Request(PROMPT, 3)])
    with pytest.raises(ValueError, match="holds a slot"):
        session.add([r])
    run(session, [])
    with pytest.raises(ValueError, match="has ended"):
        session.add([r])


def test_long_prompts_do_not_hold_up_those_that_decode(monkeypatch):
    monkeypatch.setattr("selfspec.joining.CHUNK", 8)
    model = model_of()
    long = (PROMPT * 5)[:45]
    session = session_of("sequential", 2, model=model)
    first, late = Request(PROMPT, 30), Request(long, 5)
    session.add([first])
    session.step()
    session.add([late])
    emitted_meanwhile = 0
    while late in session.joining:
        emitted_meanwhile += sum(len(t) for r, t in session.step() if r is first)
    assert emitted_meanwhile >= 4
    run(session, [])
    assert [first.output, late.output] == [reference(model, [first.prompt], 30)[0], reference(model, [long], 5)[0]]


@pytest.mark.parametrize("graphs", [False, True])
def test_shared_prefixes_are_computed_once(graphs):
    """A common beginning of 40 tokens: copied from a running request, from one that left, and from one that joins."""
    model, rng = model_of(), random.Random(1)
    system = [rng.randrange(1, VOCAB) for _ in range(40)]
    prompts = [system + [rng.randrange(1, VOCAB) for _ in range(k)] for k in (3, 9, 1, 5, 2)]
    prompts += [[9, 9, 9], system[:40]]
    truth = reference(model, prompts, 9)
    session = session_of("sequential", 3, capacity=80, model=model, graphs=graphs, reuse=True)
    requests = [Request(p, 9) for p in prompts]
    run(session, requests[:3], requests[3:])
    assert outputs(requests) == truth
    computed = [r.stats.prompt_tokens for r in requests]
    assert computed[0] == 43 and computed[1:6] == [9, 1, 5, 2, 3] and computed[6] == 1


def test_a_chat_goes_on_from_what_its_slot_holds():
    model = model_of()
    session, text = session_of("sequential", 1, capacity=90, model=model, reuse=True), PROMPT * 4
    for turn in range(3):
        run(session, [r := Request(text, 6)])
        assert r.output == reference(model, [text], 6)[0]
        if turn:
            assert r.stats.prompt_tokens == 4  # the last token of the turn before, and the new question
        text = text + r.output + [3, 1, 4]


def test_without_reuse_nothing_is_taken_from_others():
    session = session_of("ar", 1, capacity=90)
    for _ in range(2):
        run(session, [r := Request(PROMPT * 4, 3)])
        assert r.stats.prompt_tokens == 40


def test_a_cleared_session_starts_anew():
    model = model_of()
    session = session_of("overlap", model=model)
    session.add([Request(p, 20) for p in RAGGED])
    for _ in range(3):
        session.step()
    session.clear()
    assert session.free == 3 and session.step() == []
    requests = run(session, [Request(p, N) for p in RAGGED])
    assert outputs(requests) == reference(model, RAGGED, N)


def test_no_round_is_started_that_nobody_can_use():
    """A drafter that is always right needs ceil(tokens / block) rounds, and no more are run."""
    model = model_of()
    [truth] = reference(model, [PROMPT], 60)
    path = OraclePath(model, {}, B - 1)
    session = Session(Backbone(model, path), Plan("sequential", B), 1, 64, graphs=Replayed())
    request = Request(PROMPT, 1 + 4 * B)
    emitted = lambda: len(request.output) + sum(f.reach for f in session._flights)  # noqa: E731
    path.session = type("", (), {"active": property(lambda s: [type("", (), {"output": range(emitted())})()])})()
    path.truth = type("", (dict,), {"__missing__": lambda s, k: truth})()
    session.add([request])
    while session.active:
        session.step()
    rounds = [k for k in session.graphs.keys if k[0] == "round"]
    assert request.output == truth[: 1 + 4 * B] and len(rounds) == request.stats.rounds == 4


@torch.no_grad()
def test_keys_are_read_as_far_as_a_round_ahead_may_reach():
    """Every forward's K covers every row that it writes, however far the unread round has come."""
    session = session_of("sequential", 2, capacity=60)
    inner, seen = session.backbone.forward, []

    def watched(layout, cache, tokens=None, draft=None, first=0, n_keys=None):
        live = session.slots.left[first : first + layout.n_requests] > 0
        if layout.n_rows <= B and live.any():
            seen.append(int((layout.start[live] + layout.n_rows).max()) <= n_keys)
        return inner(layout, cache, tokens, draft, first, n_keys)

    session.backbone.forward = watched
    with mock.patch("selfspec.session.KEYS", 8):
        run(session, [Request((PROMPT * 2)[:14], 40), Request(PROMPT, 12)])
    assert len(seen) > 10 and all(seen)


def test_one_prefill_graph_serves_all_slots():
    """Requests that join in different slots replay the same captured prefill; the slot is an input of the graph."""
    model, graphs = model_of("Llama", torch.float32, **SLIGHT), Replayed()
    body = Backbone(model, backend="triton")
    prompts = [PROMPT, [5, 8, 2, 5], [13, 2, 9], [1] * 9]
    session = Session(body, Plan("ar", 1), 4, 40, graphs=graphs)
    requests = [Request(p, 4) for p in prompts]
    for r in requests:  # each joins while the last ones run
        session.add([r])
        session.step()
    run(session, [])
    assert outputs(requests) == reference(model, prompts, 4)
    assert len({k for k in graphs.keys if k[0] == "prefill"}) == 1
    assert len([k for k in graphs.keys if k[0] == "prefill"]) == 4


def test_prompts_that_join_in_slots_apart_share_one_forward():
    """Each was a forward of its own; now they are padded to one width and to a number of slots that graphs know."""
    model, graphs = model_of("Llama", torch.float32, **SLIGHT), Replayed()
    session = Session(Backbone(model, backend="triton"), Plan("ar", 1), 6, 40, graphs=graphs)
    first = [Request([1 + i, 5, 8], c) for i, c in enumerate((3, 12, 3, 12, 3, 12))]
    session.add(first)
    while session.free < 3:
        session.step()
    assert [i for i, r in enumerate(session.requests) if r is None] != [3, 4, 5]  # or nothing of it is tried
    before = len([k for k in graphs.keys if k[0] == "prefill"])
    late = [Request(p, 5) for p in (PROMPT, [13], [5, 8, 2, 5])]
    run(session, late)
    assert outputs(first) == [reference(model, [r.prompt], r.max_new_tokens)[0] for r in first]
    assert outputs(late) == [reference(model, [r.prompt], 5)[0] for r in late]
    assert len([k for k in graphs.keys if k[0] == "prefill"]) == before + 1
    assert graphs.keys[[k[0] for k in graphs.keys].index("prefill")][1].n == 6  # of 6 slots, and not 8


def test_a_join_drops_no_round_on_its_way():
    """Rounds that were started before it land as usual, and the round after it holds the new request already."""
    session = session_of("ar", 4)
    session.add([Request(PROMPT, 30), Request([5, 8], 30)])
    for _ in range(4):
        session.step()
    late = Request([13, 2], 9)
    session.add([late])
    ahead = list(session._flights)
    session.step()
    assert late not in session.joining and ahead and session._flights[-1].requests == [late]
    session.step()
    assert [late in f.ran for f in session._flights if f.assignment is not None][-1] and late.slot is not None
    run(session, [])
    assert late.output == reference(model_of(), [[13, 2]], 9)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU, kernels are not interpreted")
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("mode", ["ar", "sequential", "tree"])
def test_rounds_of_kernels_answer_as_torchs_do(mode, sample, monkeypatch):
    """Tree, draw and walk by the kernels that a GPU runs, cuts and all."""
    pytest.importorskip("triton")
    model, texts = model_of(), []
    for devices in ({"cuda"}, {"cuda", "cpu"}):
        monkeypatch.setattr(kernels, "DEVICES", devices)
        cuts = [logits_process.TemperatureLogitsWarper(0.8), logits_process.TopPLogitsWarper(0.9)]
        how = Sampling(Pipeline(LogitsProcessorList(cuts)), True, 5) if sample else None
        requests = [Request(p, 8, sampling=how) for p in RAGGED[:2]]
        run(session_of(mode, 2, model=model), requests)
        texts.append(outputs(requests))
    assert texts[0] == texts[1]
    if not sample:
        assert texts[1] == reference(model, RAGGED[:2], 8)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("mode", ["ar", "tree", "overlap"])
@pytest.mark.parametrize("kind, at", [("processor", 0), ("processor", 3), ("criterion", 0)])
def test_a_processor_that_raises_at_the_first_token_leaves_no_stale_anchor(mode, graphs, at, kind):
    """The others of its forward were lost with it, and its slot went on from a token that nobody had chosen."""
    model = model_of()
    truth = reference(model, RAGGED, N)

    def broken(ids, scores):
        if ids.shape[1] == len(PROMPT) + at + (kind == "criterion"):
            raise RuntimeError("the caller's own fault")
        return scores if kind == "processor" else torch.zeros(len(ids), dtype=torch.bool)

    def bad():
        if kind == "criterion":
            return Request(PROMPT, N, criteria=StoppingCriteriaList([broken]))
        return Request(PROMPT, N, sampling=Sampling(Pipeline(LogitsProcessorList([broken]))))

    session = session_of(mode, graphs=graphs, model=model, reuse=True)
    requests = [Request(RAGGED[1], N), bad(), Request(RAGGED[2], N)]
    run(session, requests, [Request(PROMPT, N)])
    assert requests[1].finish_reason == "error" and "own fault" in str(requests[1].failure)
    assert requests[1].output == truth[0][: at + (kind == "criterion")] and requests[1].slot is None
    assert [requests[0].output, requests[2].output] == truth[1:] and session.free == 3
    after = run(session, [Request(p, N) for p in RAGGED])  # in the same slots
    assert outputs(after) == truth
    decoder = SelfSpecModel(model, path_of(model, 0.2))
    own = {"criterion": "stopping_criteria", "processor": "logits_processor"}[kind]
    with pytest.raises(RuntimeError, match="own fault"):
        decoder.generate([PROMPT], max_new_tokens=N, mode=mode, **{own: [broken]})
