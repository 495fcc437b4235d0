"""Rounds as a CUDA graph would replay them: what a graph saw at its capture is all that it knows later."""

import gc
import random
import weakref

import pytest
import torch
from tiny import FAMILIES, POSITIONS, PROMPT, VOCAB, OraclePath, build, model_of, path_of, reference, run

from selfspec import SelfSpecModel, settings
from selfspec.backbone import Backbone, Hidden
from selfspec.choose import graph_key
from selfspec.draft import DraftTree
from selfspec.generation import processors_of
from selfspec.graphs import Graphs
from selfspec.plan import Plan, menu
from selfspec.plan.views import Assignment
from selfspec.pruning import Pruning
from selfspec.sampling import Pipeline, Sampling
from selfspec.session import Request, Session
from selfspec.verify import VERIFIERS, Noise

pytestmark = pytest.mark.usefixtures("chains")

B = 5
RULES = ("product:threshold=0.1", "libraspec:by=certainty", "product:by=margin")
KINDS = {
    "bare": None,
    "drawn": dict(do_sample=True),
    "penalty": dict(repetition_penalty=1.3),
    "both": dict(do_sample=True, temperature=0.7, repetition_penalty=1.2, suppress_tokens=[3]),
    "lazy": {},
    "lazily drawn": dict(do_sample=True, top_k=5),
}


class Replayed(Graphs):
    """Runs the function of a key's first call at every later one, over the inputs of that call, which are copied in.

    So whatever a later function closes over beside its key and its tensors is not seen, as in a real graph. What a
    graph has handed out is overwritten at the next call, since all share one pool (a round's outcome is on its way to
    the host by then). And what a forward has noted in a cache that is named here is gone after it: a graph notes
    nothing.
    """

    cache = None

    def __init__(self, replay=True):
        super().__init__(torch.device("cpu"))
        self.replay = replay
        self.enabled, self.functions, self.inputs, self.handed, self.replays = True, {}, {}, [], 0

    def __contains__(self, key):
        return key in self.functions

    def __call__(self, key, fn, *inputs):
        for t in self.handed:
            t.fill_(torch.nan if t.is_floating_point() else -7)
        self.replays += key in self.functions
        fn = self.functions.setdefault(key, fn) if self.replay else fn
        static = self.inputs.setdefault(key, [i.clone() for i in inputs])
        for old, new in zip(static, inputs, strict=True):
            assert old.shape == new.shape and old.dtype == new.dtype, key
            old.copy_(new)
        out = fn(*static)
        parts = vars(out).values() if isinstance(out, Hidden) else out if isinstance(out, tuple) else (out,)
        self.handed = [] if key[0] == "round" else [t for t in parts if isinstance(t, torch.Tensor)]
        if self.cache is not None:
            self.cache.place.requests = self.cache.place.slot = None
        return out


class Dice:
    """A policy that throws for every round's plan."""

    def __init__(self, plans, seed, pruning=None):
        self.plans, self.rng, self.used, self.pruning = plans, random.Random(seed), set(), pruning

    def round(self, active):
        plan = self.rng.choice(self.plans)
        self.used.add(plan)
        return [Assignment(tuple(active), plan)]

    def observe(self, assignment, emitted, seconds=None, ended=None, hits=None, cold=False):
        assert len(assignment.views) == len(emitted) == len(ended) == len(hits)

    def forget(self, key):
        pass


def plans_for(path):
    """The menu, and shapes that it has not."""
    more = [Plan("sequential", 4, verify_length=2), Plan("loop", 5, verify_length=3, passes=3), Plan("tree", 3, 7)]
    more += [Plan("overlap", 4, groups=2, verify_length=3), Plan("overlap", 3), Plan("overlap+loop", 3, groups=1)]
    more += [Plan("overlap+tree", 5, 6, 2), Plan("overlap+tree", 3, 6), Plan("loop+tree", 4, 5), Plan("lookup", 6)]
    return [p for p in menu([path.config]) if p.tree_nodes <= 16 and p.rows <= 100] + more


def sampling_of(model, kind, prompt, cap, seed):
    arguments = KINDS[kind]
    if arguments is None:
        return None
    own = [lambda ids, scores: scores] if "lazy" in kind or "lazily" in kind else []
    config = settings.merge(model.generation_config, None, dict(arguments))
    sample = "do_sample" in arguments
    return Sampling(Pipeline(processors_of(model, config, prompt, len(prompt), cap, own)), sample, seed * sample)


def prompts_and_caps(rng, n):
    shared = [rng.randrange(1, VOCAB) for _ in range(36)]
    for _ in range(n):
        prompt, cap = [rng.randrange(1, VOCAB) for _ in range(rng.choice((1, 2, 5, 9, 20)))], rng.choice((1, 2, 8, 20))
        if rng.random() < 0.4:
            prompt = shared[: rng.choice((33, 35, 36))] + prompt[:5]
        yield prompt[: POSITIONS - cap], cap, frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 2, 4))))


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_events_with_a_new_plan_every_round(seed, monkeypatch):
    """Join, release, come back, cancel, clear and change of policy at random; every answer is plain decoding's own.

    A stale round would only draft badly: what a replay accepts is what the newest function does.
    """
    played(seed, False, monkeypatch)
    assert played(seed, Replayed(), monkeypatch) == played(seed, Replayed(replay=False), monkeypatch)


def played(seed, graphs, monkeypatch):
    """One sequence of events. Returns what each request's rounds accepted."""
    rng = random.Random(seed)
    model = model_of(rng.choice(list(FAMILIES)))
    extra = [{}, *2 * [dict(shift=True, causal=True)], dict(mask_id=5), dict(entry=2), dict(heads=("calibrator",))]
    extra += [dict(heads=("calibrator", "confidence", "length"), shift=True, causal=True), dict(heads=("confidence",))]
    extra += [dict(heads=("markov",)), dict(heads=("markov", "calibrator", "confidence"), mask_id=5)]
    extra += [dict(heads=("sampler", "calibrator"))]
    path = path_of(model, rng.choice((0.0, 0.02)), prefix_splits=True, **rng.choice(extra))
    body, kinds = Backbone(model, path), rng.choice((["bare"], ["drawn"], ["bare", "lazy"], list(KINDS), ["both"]))
    monkeypatch.setattr("selfspec.joining.CHUNK", rng.choice((512, 8)))
    monkeypatch.setattr("selfspec.session.KEYS", rng.choice((256, 8)))
    specs = [(*s, rng.choice(kinds), rng.randrange(99)) for s in prompts_and_caps(rng, 4)]

    def request(prompt, cap, eos, kind, noise):
        return Request(prompt, cap, eos, sampling=sampling_of(model, kind, prompt, cap, noise))

    truth = []
    for spec in specs:
        run(Session(body, Plan("ar", 1), 1, len(spec[0]) + spec[1]), [r := request(*spec)])
        truth.append(r.output)
    plans, rules = plans_for(path), [None, *(Pruning(r, [body]) for r in RULES)]
    capacity = max(len(p) + cap for p, cap, *_ in specs)
    session = Session(
        body, Dice(plans, seed), rng.choice((1, 3, 4, 5)), capacity, graphs=graphs,
        reuse=rng.random() < 0.5,
    )  # fmt: skip
    if graphs:
        graphs.cache = session.cache
    session.use(Dice(rng.sample(plans, rng.choice((1, 2, 6))), seed, rng.choice(rules)))
    requests = [request(*spec) for spec in specs]
    waiting, cancelled, told = list(requests), set(), {r: [] for r in requests}
    while waiting or session.active:
        while waiting and session.free and rng.random() < 0.7:
            session.add([waiting.pop(0)])
        for r, tokens in session.step():
            told[r] += tokens
        event = rng.choice(("nothing",) * 5 + ("cancel", "release", "release", "clear", "use"))
        if event == "use":
            session.use(Dice(rng.sample(plans, rng.choice((1, 2, 6))), seed, rng.choice(rules)))
        elif event == "clear" and rng.random() < 0.3:
            waiting += session.active
            session.clear()
            told = {r: list(r.output) for r in requests}  # what was not handed out yet is in the output alone
        elif event in ("cancel", "release") and session.active:
            victim = rng.choice(session.active)
            getattr(session, event)(victim)
            if event == "cancel":
                cancelled.add(victim)
            elif victim.finish_reason is None:
                waiting.insert(rng.randrange(len(waiting) + 1), victim)
    for r, tokens in session.step():
        told[r] += tokens
    for r, wanted in zip(requests, truth, strict=True):
        assert r.output == told[r] == (wanted[: len(r.output)] if r in cancelled else wanted)
    return [(r.stats.accepted, r.stats.saved, r.stats.rounds) for r in requests]


@pytest.mark.parametrize("verify", ["rejection", "block", "multi"])
@pytest.mark.parametrize("graphs", [True, False])
def test_drawn_chains_of_an_overlap_that_missed(verify, graphs):
    """An end without a group leaves no draft; its place in the chain, -1, was looked up in the drafter's law."""
    model = model_of()
    session = Session(
        Backbone(model, path_of(model, 0.2)), Plan("overlap", B, groups=1), 2, 60, verify,
        graphs=Replayed() if graphs else False,
    )  # fmt: skip
    requests = [Request(p, 25, sampling=Sampling(Pipeline(), True, i)) for i, p in enumerate((PROMPT, PROMPT[:3]))]
    run(session, requests)
    assert all(len(r.output) == 25 and min(r.output) >= 0 for r in requests)
    assert any(r.stats.saved < r.stats.rounds for r in requests)  # there was a miss


@pytest.mark.parametrize("graphs", [False, True])
def test_a_calibrator_is_given_tokens_only(graphs):
    """A lazily walked text that ended inside its draft had -2 for a bonus, which no embedding has."""
    model = model_of()
    [truth] = reference(model, [PROMPT], 30)
    seen = 0
    for end in range(2, 16):
        if truth[end] in truth[:end]:
            continue
        body = Backbone(model, path_of(model, 0.0, shift=True, causal=True, heads=("calibrator",)))
        session = Session(body, Plan("overlap", B), 1, 60, graphs=Replayed() if graphs else False)
        sampling = sampling_of(model, "lazy", PROMPT, 20, 0)
        run(session, [r := Request(PROMPT, 20, frozenset([truth[end]]), sampling=sampling)])
        seen += int(session.slots.start[0]) >= len(PROMPT) + len(r.output)  # the walk went on past the end
        assert r.output == truth[: end + 1]
    assert seen


@pytest.mark.parametrize("drafted", [1, 4])
def test_a_text_ended_by_the_host_holds_nothing_but_tokens(drafted):
    """Behind an end that a lazy walk chose stood -2; whatever ran on in that slot looked it up in its tables."""
    model = model_of()
    [truth] = reference(model, [PROMPT], 30)
    end = next(i for i in range(2, 9) if truth[i] not in truth[:i])
    path = OraclePath(model, {}, drafted)
    session = Session(Backbone(model, path), Plan("sequential", B), 4, 60, graphs=Replayed())
    path.session = session
    cap = 12
    first = Request(PROMPT, cap, frozenset([truth[end]]), sampling=sampling_of(model, "lazy", PROMPT, cap, 0))
    others = [Request(p, cap, sampling=sampling_of(model, "penalty", p, cap, 0)) for p in ([5, 8], [7, 7, 1], [9])]
    path.truth = {r: truth for r in (first, *others)}
    run(session, [first, *others])
    assert first.output == truth[: end + 1] and first.finish_reason == "stop"
    assert all(len(r.output) == cap for r in others)
    assert int(session.slots.text.min()) >= 0


@pytest.mark.parametrize("mode", ["tree", "overlap+tree"])
def test_a_path_is_compacted_where_a_replayed_forward_has_written_it(mode):
    """Requests of two kinds are settled outside of graphs. The rows to move were looked up in what the cache's last
    forward in Python had noted: after a replay another one's, or memory that its graph had given back. On a GPU that
    was a wrong text, or an index out of range."""
    model = model_of()
    truth = reference(model, [PROMPT, [5, 8]], 20)
    session = Session(Backbone(model, path_of(model, 0.02)), Plan(mode, B, 8), 2, 60, graphs=(graphs := Replayed()))
    graphs.cache = session.cache
    requests = [Request(PROMPT, 20), Request([5, 8], 20, sampling=Sampling(Pipeline()))]
    run(session, requests)
    assert requests[0].kind != requests[1].kind and graphs.replays
    assert [r.output for r in requests] == truth
    assert any(max(r.stats.accepted) > 1 for r in requests)  # there was something to move


def test_a_graph_holds_the_cuts_that_its_drafts_pass_through():
    """They were made anew for every request, so a graph read tensors that the first one's end had freed."""
    model = model_of()
    request = Request(PROMPT, 5, sampling=sampling_of(model, "both", PROMPT, 5, 1))
    assert request.cuts is not request.recipe
    key, cuts = graph_key([request]), weakref.ref(request.cuts)
    del request
    gc.collect()
    assert cuts() is not None and key is not None
    again = Request(PROMPT[:4], 7, sampling=sampling_of(model, "both", PROMPT[:4], 7, 2))
    assert again.cuts is cuts() and graph_key([again]) == key


@pytest.mark.parametrize("mode", ["sequential", "overlap", "overlap+tree", "lookup"])
def test_nothing_but_counting_is_needed_to_free_a_session(mode):
    """A cycle through cache, graphs or model would keep device memory until a collector happens to run."""
    gc.collect()
    gc.disable()
    try:
        model = build()
        body = Backbone(model, path_of(model))
        session = Session(body, Plan(mode, B, 6), 2, 40, graphs=Replayed(), reuse=True)
        session.graphs.functions.clear()
        run(session, [Request(PROMPT, 9), Request([4], 9, keep_past=True)])
        session.graphs.functions.clear()  # a real graph keeps no function
        gone = [weakref.ref(x) for x in (session, session.cache, session.cache.stores[0], session.slots, body)]
        del session, body
        assert [x() for x in gone] == [None] * 5
    finally:
        gc.enable()


class Fails:
    """A processor or criterion that raises at its n-th call."""

    def __init__(self, n, error):
        self.left, self.error = n, error

    def __call__(self, ids, scores):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return scores


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("mode", ["sequential", "overlap+tree"])
def test_a_call_that_failed_leaves_nothing_behind(error, at, mode, monkeypatch):
    """Also where the session is kept for the next call, with what was captured for it."""
    model = model_of()
    prompts = [PROMPT, [5, 8, 10], [13, 1]]
    decoder = SelfSpecModel(model, path_of(model, 0.2))
    replayed = Replayed()
    monkeypatch.setattr("selfspec.session.Graphs", lambda *a: replayed)
    truth = reference(model, prompts, 10)
    nodes = 6 if "tree" in mode else None
    arguments = dict(max_new_tokens=10, mode=mode, tree_nodes=nodes)

    def check():
        out = decoder.generate(prompts, **arguments)
        assert out[:, len(PROMPT) :].tolist() == truth

    check()
    with pytest.raises(type(error)):
        decoder.generate(prompts, logits_processor=[[Fails(at, error)], [], []], **arguments)
    check()
    for _ in decoder.rounds([Request(p, 10) for p in prompts], decoder.policy(mode, None, nodes)):
        break  # dropped, with a round on its way
    check()
    decoder.generate(prompts[:2], max_new_tokens=4, mode="tree", tree_nodes=3, block_size=3)
    check()
    assert replayed.replays > 10


def test_as_many_run_together_as_fit_with_their_tails(monkeypatch):
    """A slot was counted without the rows behind its positions, so that many short prompts asked for twice the room."""
    model = model_of()
    decoder, taken = SelfSpecModel(model, path_of(model)), []
    memory = 500_000
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": memory}))
    monkeypatch.setattr("selfspec.model.Session", lambda *a: (taken.append(s := Session(*a)), s)[1])
    prompts = [PROMPT] * 40
    out = decoder.generate(prompts, max_new_tokens=3, mode="overlap")
    assert out[:, len(PROMPT) :].tolist() == reference(model, [PROMPT], 3) * 40
    assert 1 < taken[0].cache.slots < 40 and taken[0].cache.nbytes <= memory


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_places_without_a_draft_are_as_if_the_chain_ended_there(verify):
    """All, some and no drafts of a chain missing: the outcome is that of the chain cut there."""
    g = torch.Generator().manual_seed(0)
    n, t, v = 60, 3, 6
    scores = torch.randn(n, t + 1, v, generator=g)
    probs = torch.randn(n, t, v, generator=g).double().softmax(-1)
    tokens = torch.randint(v, (n, t + 1), generator=g)
    noise = Noise(torch.arange(n), torch.arange(n) + 3)
    for drafts in range(t + 1):
        gone = torch.arange(t + 1) > drafts
        got = VERIFIERS[verify](DraftTree(tokens.masked_fill(gone, -1), None, probs), scores, noise)
        cut = DraftTree(tokens[:, : drafts + 1], None, probs[:, :drafts])
        wanted = VERIFIERS[verify](cut, scores[:, : drafts + 1], noise)
        assert torch.equal(got.count, wanted.count) and torch.equal(got.bonus, wanted.bonus)
        for i, count in enumerate(got.count.tolist()):
            assert torch.equal(got.tokens[i, :count], wanted.tokens[i, :count])


def test_a_round_that_was_captured_is_no_replay():
    """Its time was booked as a "round": a run that captured much looked as if its graphs were slow."""
    model = build("Llama", torch.float32)
    session = Session(Backbone(model, path_of(model)), Plan("ar", 1), 1, 60, graphs=Replayed())
    session.add([request := Request(list(PROMPT), 8)])
    while session.active:
        session.step()
    assert request.stats.seconds["rest"] > 0 and request.stats.seconds["round"] > 0
    session.add([again := Request(list(PROMPT), 8)])
    while session.active:
        session.step()
    assert again.stats.seconds["rest"] == 0 and again.stats.seconds["round"] > 0
